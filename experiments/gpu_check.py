"""The part `check` of experiments.gpu: is the fused kernel right on this GPU?

Its numbers at large T come first: if they are wrong, or there are none, the script stops. Then all
tests of the kernel, compiled, and compute-sanitizer on a small case, where it is there.
"""
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from experiments import kernel_check
from experiments.gpu_report import first_line, run_steps
from support.cli import UsageError

ROOT = Path(__file__).parent.parent
# They compile about a hundred kernels, a second or more each: side by side, where that can be.
BESIDE = ["-n", "8"] if importlib.util.find_spec("xdist") else []
TESTS = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=line", *BESIDE,
         "test_multiscreen.py", "-k", "kernel"]
SANITIZER = ("compute-sanitizer", "/usr/local/cuda/bin/compute-sanitizer")
# What it runs: 130 positions, a window inside a block, one across blocks, an infinite one.
SMALL = """
import torch
from experiments.kernel_check import draw_inputs, value_and_gradients
from screening_triton import screen
for dtype in (torch.float32, torch.bfloat16):
    value_and_gradients(screen, *draw_inputs(130, (2.0, 70.5, float("inf")), dtype))
"""


def check(report, tell):
    report.section("check: is the kernel right?")
    table = report.table("Largest error over largest value, against `screen_windowed` in float64",
                         ["T", "v", "h", "dq", "dk", "dv", "dw", "dr", "limit",
                          "same bits twice"])
    steps = [(f"T = {T:,}, {str(dtype)[6:]}", 20 * T / 2**17, compare_at(T, dtype, limit, table))
             for T in kernel_check.LENGTHS for dtype, limit in kernel_check.LIMITS.items()]
    steps.append(("the tests of the kernel", 20, command_step("the tests of the kernel", TESTS)))
    sanitizer = next(filter(None, map(shutil.which, SANITIZER)), None)
    if sanitizer:
        for tool in ("memcheck", "racecheck"):
            command = [sanitizer, "--tool", tool, "--error-exitcode", "9", sys.executable, "-c",
                       SMALL]
            name = f"compute-sanitizer {tool}"
            steps.append((name, 10, command_step(name, command)))
    else:
        report.note("compute-sanitizer is not here.")
    run_steps(steps, report, tell)


def compare_at(T, dtype, limit, table):
    def step(report):
        try:
            errors, same = kernel_check.check_case(T, dtype)
        except torch.OutOfMemoryError:
            raise
        except Exception as e:                         # it does not compile, say
            raise UsageError(f"at T = {T}, {dtype}: {first_line(e)}") from e
        table.add(T, str(dtype)[6:], *(f"{e:.1e}" for e in errors), limit, "yes" if same else "no")
        if wrong := kernel_check.objection(errors, same, limit):
            raise UsageError(f"at T = {T}, {dtype}: {wrong}")

    return step


def command_step(name, command):
    """A step that runs a command and notes how it ended, and its last lines if it failed."""
    def step(report):
        # PyTorch's pool of memory would hide from the sanitizer what is out of bounds.
        environment = os.environ | {"TRITON_INTERPRET": "0"}
        if "--tool" in command:
            environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
        try:
            done = subprocess.run(command, cwd=ROOT, env=environment,
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                  timeout=max(report.left(), 1))
        except subprocess.TimeoutExpired as e:
            report.note(f"{name}: did not end in the time that was left: {last_lines(e.stdout, 3)}")
            return
        shown = last_lines(done.stdout, 1 if done.returncode == 0 else 12)
        report.note(f"{name}: exit code {done.returncode}: {shown}")

    return step


def last_lines(output, n):
    """The last n lines of what a command has written, in one."""
    lines = [line for line in (output or b"").decode(errors="replace").splitlines() if line.strip()]
    return " / ".join(lines[-n:]) or "(no output)"
