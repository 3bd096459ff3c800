"""Shared by the tests of what stands around the model: short runs, folders of runs, data."""
import os
import re
import shutil
import subprocess
import sys
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

import train
from support import check, native
from support.data import get_data, get_tokenizer
from support.models import build_model
from support.run import read_checkpoint
from support.tables import write_table
from support.windowed import screen_windowed
from tests.inputs import move_away, random

ROOT = Path(__file__).parent.parent
has_cpp = shutil.which(os.environ.get("CXX") or "c++") is not None
needs_cpp = pytest.mark.skipif(not has_cpp, reason="needs a C++ compiler")
CPU_SCREEN = native.screen if has_cpp else screen_windowed         # what `auto` takes on a CPU
needs_matplotlib = pytest.mark.skipif(not find_spec("matplotlib"), reason="draws figures")


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
    # The check at the end would take longer than a small run; tests/test_check.py tests it.
    with mock.patch.object(check, "LONG", check.SHORT):
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
