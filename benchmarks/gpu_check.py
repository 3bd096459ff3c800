"""Is the compiled kernel right? The parts `check` and `tests` of benchmarks.gpu.

A part yields cells: (what is measured, a function that measures it), each {column: value}.
"""
import importlib.util
import math
import subprocess
import sys
from functools import partial
from itertools import product
from unittest import mock

import torch

from multiscreen import unit
from screening_triton import screen
from support import windowed
from support.cli import DEVICE
from support.source import ROOT
from support.windowed import screen_windowed

CHECKED = (2**12 - 1, 2**15, 2**17)
LIMITS = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}
GRADIENTS = ("h", "dq", "dk", "dv", "dw", "dr")


def check():
    """Largest error over largest value, against `screen_windowed` in float64."""
    for T, dtype in product(CHECKED, LIMITS):
        yield {"T": T, "v": str(dtype)[6:]}, partial(compare_with_float64, T, dtype)


def draw_inputs(T, w, dtype=torch.bfloat16):
    """q and k around one direction of their tile, in float32, v in dtype, w, r and dh.

    One sequence of T positions, a tile for each window in w.
    """
    torch.manual_seed(0)
    H, draw = len(w), partial(torch.randn, device=DEVICE)
    base = draw(1, H, 1, 16)
    q, k = (unit(0.6 * base + 0.4 * draw(1, H, T, 16)) for _ in range(2))
    v = unit(draw(1, T, H, 64)).transpose(1, 2).to(dtype)
    dh = draw(1, T, H, 64).transpose(1, 2).to(dtype)
    return q, k, v, torch.tensor(w, device=DEVICE), torch.full((H,), 0.5, device=DEVICE), dh


def value_and_gradients(f, *x, dtype=None):
    """[h, dq, dk, dv, dw, dr]. x: q, k, v, w, r and dh, cast to dtype if one is given."""
    *x, dh = x
    x = [a.detach().to(dtype or a.dtype).requires_grad_() for a in x]
    h = f(*x)
    return [h.detach(), *torch.autograd.grad(h, x, dh.to(h.dtype))]


def compare_with_float64(T, dtype):
    x = draw_inputs(T, (2.0, 17.5, 256.0, 5000.0, math.inf), dtype)
    # Larger blocks: at T = 2^17 those for a CPU are half a minute of launches.
    with mock.patch.object(windowed, "PAIRS", 2**24):
        exact = value_and_gradients(screen_windowed, *x, dtype=torch.float64)
    first, second = (value_and_gradients(screen, *x) for _ in range(2))
    errors = [((a - b).abs().max() / b.abs().max()).item() for a, b in zip(first, exact)]
    verdict = "right"
    if not all(e < LIMITS[dtype] for e in errors):     # a NaN is not
        verdict = f"off by more than {LIMITS[dtype]}"
    elif not all(torch.equal(a, b) for a, b in zip(first, second)):
        verdict = "different bits the second time"
    return dict(zip(GRADIENTS, errors)) | {"verdict": verdict}


def tests():
    """The kernel's tests, compiled, and small cases under compute-sanitizer: the last lines."""
    beside = "-n 8" if importlib.util.find_spec("xdist") else ""
    small = ("from benchmarks.gpu_check import *; windows = 2.0, 70.5, math.inf; "
             "value_and_gradients(screen, *draw_inputs(130, windows)); "
             "value_and_gradients(screen, *draw_inputs(16, windows))")         # 16: as in decoding
    commands = {"pytest": (f"{sys.executable} -m pytest -q {beside} test_multiscreen.py -k kernel",
                           240)}
    # Calls of CUDA that fail are no mistake of the kernel; compilers are not looked at.
    for tool, flags in (("memcheck", "--report-api-errors no"), ("racecheck", "")):
        commands[tool] = (f"compute-sanitizer --tool {tool} {flags} --error-exitcode 9 "
                          f"--target-processes application-only {sys.executable} -c '{small}'", 120)
    for name, (command, seconds) in commands.items():
        yield {"command": name}, partial(run_command, command, seconds)


def run_command(command, seconds):
    """The last line of a shell command that succeeds in time."""
    # A pool of memory would hide mistakes.
    settings = "PATH=$PATH:/usr/local/cuda/bin TRITON_INTERPRET=0 PYTORCH_NO_CUDA_MEMORY_CACHING=1"
    # `timeout` ends a command with its children.
    done = subprocess.run(f"exec timeout -k 5 {seconds} env {settings} {command} 2>&1", shell=True,
                          cwd=ROOT, text=True, stdout=subprocess.PIPE)
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    if done.returncode:
        print("\n".join(lines[-60:]))
        why = "took too long" if done.returncode == 124 else f"exit code {done.returncode}"
        raise RuntimeError(f"{why}: {' / '.join(lines[-2:])}")
    return {"result": lines[-1]}
