"""Shared by the tests: random inputs, small models, short runs.

Tensors come from local generators with a drawn seed. Queries and keys are correlated: independent
unit vectors in 16 dimensions almost never pass Trim, and a test would only compare zeros.
"""
import math
import os
import re
import shutil
import subprocess
import sys
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st

import train
from course.exercises import grade
from course.exercises.grade import random
from multiscreen import Config, GatedScreeningTiles, Multiscreen
from screening_triton import available
from support import native
from support.data import get_data, get_tokenizer
from support.models import build_model
from support.run import read_checkpoint
from support.tables import write_table
from support.windowed import screen_windowed
from tests import DEVICE

ROOT = Path(__file__).parent.parent
INF = math.inf
# needs_kernel: native on a GPU, else interpreted. needs_interpreter: interpreted even with a GPU.
needs_kernel = pytest.mark.skipif(not available(DEVICE), reason="the kernel cannot run here")
needs_interpreter = pytest.mark.skipif(not available("cpu"), reason="needs Triton's interpreter")
has_cpp = shutil.which(os.environ.get("CXX", "c++")) is not None
needs_cpp = pytest.mark.skipif(not has_cpp, reason="needs a C++ compiler")
CPU_SCREEN = native.screen if has_cpp else screen_windowed         # what `auto` takes on a CPU
needs_matplotlib = pytest.mark.skipif(not find_spec("matplotlib"), reason="draws figures")

seeds = st.integers(0, 2**31 - 1)
widths = st.one_of(st.integers(1, 90).map(float), st.floats(1.0, 150.0), st.just(1e9),
                   st.just(INF))
acceptances = st.floats(0.02, 1.0)


def draws(n, **options):
    """Settings of a slow property: n examples, but in the nightly profile as many as it has."""
    nightly = settings.get_profile("nightly").max_examples
    if settings().max_examples == nightly:
        n = nightly
    return settings(max_examples=n, **options)


def draw_tokens(*shape, seed=0, n=50):
    """Random integers from 0 to n - 1."""
    return torch.randint(n, shape, generator=random(seed))


# Similarities spread over (0, 1).
correlated = partial(grade.correlated, V=64, rho=0.8)


# ----------------------------------------------------------------------------------- models

def small(seed=0, moved=False, vocab_size=50, dtype=None, tiles=GatedScreeningTiles, **sizes):
    """A small model; moved=True takes its parameters far from their initial values.

    Then windows range from 1.1 to inf and r from 0.05 to 0.95, and many pairs pass Trim.
    """
    torch.manual_seed(seed)
    config = Config(**({"psi": 3, "d_E": 24, "vocab_size": vocab_size} | sizes))
    model = Multiscreen(config, dtype, tiles)
    if moved:
        move_away(model, random(seed))
    return model


@torch.no_grad()
def move_away(model, g):
    """Move the parameters of a Multiscreen or an ablation far from their initial values."""
    for tile in model.layers:
        tile.s_w.uniform_(-2.0, 6.0, generator=g)
        tile.s_r.uniform_(-3.0, 3.0, generator=g)
        tile.s_O.uniform_(-1.0, 1.0, generator=g)
        tile.W_Q.copy_(0.3 * torch.randn(tile.W_Q.shape, generator=g))
        tile.W_K.copy_(tile.W_Q + 0.1 * torch.randn(tile.W_Q.shape, generator=g))
        tile.W_V.mul_(20)
        if hasattr(tile, "W_G"):
            tile.W_G.mul_(10)
    model.layers[0].s_w[0] = INF
    model.W_E.add_(0.03 * torch.randn(model.config.d_E, generator=g))      # make tokens similar
    model.s_E.fill_(0.7)
    model.s_F.fill_(1.3)


@torch.no_grad()
def moved_model(name, dtype=None):
    """A small model of that name, its parameters far from their initial values.

    dtype: of the matrix products.
    """
    torch.manual_seed(0)
    model, g = build_model(name, {"psi": 3, "vocab_size": 50}, dtype), random(0)
    if name.startswith("multiscreen"):
        move_away(model, g)
    else:
        for p in model.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=g))
    return model


def use_products_of(model, dtype):
    """Let the model's matrix products run in dtype."""
    for part in [model, *model.layers]:
        part.dtype = dtype


# ------------------------------------------------------------------------------- short runs

# The definition, which everything else is compared with.
SMALL = ["--psi", "2", "--seq-len", "32", "--batch-size", "4", "--warmup", "2", "--device", "cpu",
         "--kernel", "definition"]
TEXT = "".join(f"{n} bottles of beer on the wall, {n} bottles of beer.\n" for n in range(400))


def run(*argv, cwd=ROOT, **options):
    """`python ARGV` in a process of its own."""
    command = [sys.executable, *map(str, argv)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, **options)


FORK = """if True:
    import os, sys, torch
    code, *cases = sys.argv[1:]
    for case in cases:
        if os.fork() == 0:
            exec(code)
            sys.stdout.flush()
            os._exit(0)
        os.wait()"""


def run_cases(code, cases, cwd=ROOT):
    """Run `code` in a process of its own for each `case`; PyTorch is imported once."""
    return run("-c", FORK, code, *cases, cwd=cwd)


def fit(out, *flags, data=None):
    """Train in this process, on TEXT unless data is given; return the checkpoint."""
    path = out.parent / "text.txt"
    path.write_text(TEXT)
    small = SMALL[2:] if any("transformer" in flag for flag in flags) else SMALL   # no --psi
    train.main([*small, "--data", str(data or path), "--out", str(out), *flags])
    return read_checkpoint(out / "ckpt.pt")


def args_of(flags):
    """The flags of a new run, as train.py has them."""
    return train.get_args(flags)


def assert_same_weights(a, b):
    """Two checkpoints have the same weights, bit for bit."""
    assert a["weights"].keys() == b["weights"].keys()
    for name, p in a["weights"].items():
        assert torch.equal(p, b["weights"][name]), name


# flags.txt of `python train.py --psi 2`, without what no test looks at.
RUN_FLAGS = {"model": "multiscreen", "psi": 2, "w_th": 256.0, "data": "stdlib", "digits": 6,
             "tokenizer": "bytes", "seq_len": 64, "batch_tokens": 512, "steps": 20, "lr": 0.0625,
             "seed": 0, "log_every": 1, "parameters": 4626, "changes": "",
             "corpus": "c1"}


def write_run(folder, log, **flags):
    """A folder as train.py leaves it. log: rows of log.tsv, dicts; a column may be missing."""
    folder.mkdir(parents=True)
    lines = [f"{name}\t{x}\n" for name, x in (RUN_FLAGS | flags).items()]
    (folder / "flags.txt").write_text("".join(lines))
    columns = dict.fromkeys(name for row in log for name in row)
    write_table(folder / "log.tsv", [{x: str(row.get(x, "")) for x in columns} for row in log])
    return folder


def read_table(path):
    """The rows of a TSV file, as dicts of strings."""
    head, *rows = [line.split("\t") for line in path.read_text().splitlines()]
    return [dict(zip(head, row, strict=True)) for row in rows]


def cells_of(capsys):
    """The printed lines, split at two or more spaces."""
    lines = capsys.readouterr().out.splitlines()
    return [re.split(" {2,}", line.strip()) for line in lines if line]


# ------------------------------------------------------------------------------------- data

def data_of(*paths, T, val=None, tokenizer="bytes"):
    """(training data, validation data) of `--data PATHS --val VAL --seq-len T`."""
    args = SimpleNamespace(data=[str(path) for path in paths], val=val, seq_len=T)
    return get_data(args, get_tokenizer(tokenizer))


def texts_of(stream, n):
    """The first n documents of a task's stream, as text."""
    return [stream.tokenizer.decode(stream[i].tolist()) for i in range(n)]


def arrays_of(data):
    """The tokens of each part of Sequences, as arrays."""
    return data.arrays


@contextmanager
def full_disk(size=9):
    """Inside, the disk is full after `size` bytes of each file."""
    resource = pytest.importorskip("resource")         # Windows has none
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def write(folder, files):
    """Write {name: text, bytes, or an array of tokens}. Return the folder."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, np.ndarray):
            content = content.astype("<u2").tobytes()
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder
