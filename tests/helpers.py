"""Shared by the tests of what stands around the model: short runs, folders, other processes."""
import csv
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

import train

ROOT = Path(__file__).parent.parent
needs_interpreter = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1" or find_spec("triton") is None,
    reason="needs Triton's interpreter")

# A run of a second, by the definition, which everything else is compared with.
SMALL = ["--psi", "2", "--seq-len", "32", "--batch-size", "4", "--warmup", "2", "--device", "cpu",
         "--kernel", "multiscreen"]
TEXT = "".join(f"{n} bottles of beer on the wall, {n} bottles of beer.\n" for n in range(400))


def run(*argv, cwd=ROOT, **options):
    """`python ARGV` in a process of its own."""
    command = [sys.executable, *map(str, argv)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, **options)


def command(*flags):
    """`python train.py FLAGS` in this process, whose reaction to signals stays as it was."""
    handlers = [(number, signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        train.main([*map(str, flags)])
    finally:
        for number, handler in handlers:
            signal.signal(number, handler)


def fit(out, *flags, data=None):
    """Train in this process, on TEXT unless data is given; return the checkpoint."""
    path = out.parent / "text.txt"
    if not path.exists():
        path.write_text(TEXT)
    command(*SMALL, "--data", data or path, "--out", out, *flags)
    return train.read_checkpoint(out / "ckpt.pt")


def args_of(flags):
    """The flags of a new run, as train.py has them."""
    return train.get_args([*map(str, flags)])


def read_table(path):
    """The rows of a TSV file, as dicts of strings."""
    with path.open() as file:
        return list(csv.DictReader(file, delimiter="\t"))


@torch.no_grad()
def moved_model(name):
    """A small model of that name, its parameters far from their initial values."""
    torch.manual_seed(0)
    model = train.build_model(name, {"psi": 3, "vocab_size": 50})
    for p in model.parameters():
        p.add_(0.3 * torch.randn(p.shape))
    return model


def write(folder, files):
    """Write {name: text, bytes, or an array of tokens}. Return the folder."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, np.ndarray):
            content = content.tobytes()
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def edit(path, old, new):
    """Replace a part of a file."""
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
