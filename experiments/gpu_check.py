"""The part `check` of experiments.gpu: is the fused kernel right on this GPU?

Its numbers at large T come first: if they are wrong the script stops. Then compute-sanitizer on a
small case, where it is there, and all tests of the kernel, compiled.
"""
import os
import shutil
import subprocess
import sys
from pathlib import Path

from experiments import kernel_check
from experiments.gpu_report import run_steps
from support.cli import UsageError

ROOT = Path(__file__).parent.parent
TESTS = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=line",
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
    sanitizer = next(filter(None, map(shutil.which, SANITIZER)), None)
    if sanitizer:
        for tool in ("memcheck", "racecheck"):
            command = [sanitizer, "--tool", tool, "--error-exitcode", "9", sys.executable, "-c",
                       SMALL]
            name = f"compute-sanitizer {tool}"
            steps.append((name, 10, command_step(name, command)))
    else:
        report.note("compute-sanitizer is not here.")
    steps.append(("the tests of the kernel", 20, command_step("the tests of the kernel", TESTS)))
    run_steps(steps, report, tell)


def compare_at(T, dtype, limit, table):
    def step(report):
        errors, same = kernel_check.check_case(T, dtype)
        table.add(T, str(dtype)[6:], *(f"{e:.1e}" for e in errors), limit, "yes" if same else "no")
        if wrong := kernel_check.objection(errors, same, limit):
            raise UsageError(f"at T = {T}, {dtype}: {wrong}")

    return step


def command_step(name, command):
    """A step that runs a command and notes how it ended, and its last lines if it failed."""
    def step(report):
        environment = os.environ | {"TRITON_INTERPRET": "0"}
        try:
            done = subprocess.run(command, cwd=ROOT, env=environment, text=True,
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                  timeout=max(report.left(), 1))
        except subprocess.TimeoutExpired:
            report.note(f"{name}: did not end in the time that was left.")
            return
        lines = [line for line in done.stdout.splitlines() if line.strip()] or ["(no output)"]
        shown = lines[-1:] if done.returncode == 0 else lines[-12:]
        report.note(f"{name}: exit code {done.returncode}: {' / '.join(shown)}")

    return step
