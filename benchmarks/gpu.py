"""Everything that only a GPU can tell, in one command: is the kernel right, and how fast is it?

    python -m experiments.gpu                    all parts, in at most 8 minutes
    python -m experiments.gpu --part kernel      one part, with all of the time

OUT/report.md grows while it is measured: the machine, the versions, the commit, every table beside
its target, and what did not fit into the time. Each part runs in a process of its own, so that one
that crashes or hangs does not take the others along. OUT/errors.txt has the tracebacks, and all
else that goes to stderr.

check    the kernel against float64 at up to 2^17 positions, the same bits twice, compute-sanitizer
         where it is there, all tests of the kernel. If its numbers are wrong nothing is timed.
kernel   a psi = 48 layer's screening, T = 2^10 .. 2^17, beside attention and other ways to screen
model    the latency of whole models beside the Transformer (experiments.latency, compiled)
train    tokens per second, utilisation and memory of a training step, T = 4,096
layer    one psi = 48 layer: time by kind, bytes moved, which passes are not fused
"""
if not __package__:
    raise SystemExit("error: run python -m experiments.gpu in the folder above")

import multiprocessing
import os
import platform
import signal
import subprocess
import sys
import time
import traceback
from hashlib import sha256
from pathlib import Path

import torch

from experiments.gpu_check import ROOT, check
from experiments.gpu_kernel import kernel
from experiments.gpu_layer import layer
from experiments.gpu_model import model
from experiments.gpu_report import Report, did_not_fit
from experiments.gpu_train import train
from experiments.kernel_check import require_gpu
from screening_triton import triton
from support.cli import Parser, UsageError, check_writable, cli

# The parts, the most important first, and their shares of the time.
PARTS = {"check": (check, 3), "kernel": (kernel, 4), "model": (model, 4), "train": (train, 3),
         "layer": (layer, 2)}
START = "spawn"                                        # CUDA cannot be forked
WRONG = 3                                              # exit code of a part: the kernel is wrong


def output_of(*command):
    """The first line that a command prints, or "unknown"."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return (done.stdout.splitlines() or ["unknown"])[0] if done.returncode == 0 else "unknown"


def describe():
    """[(what, value)] of the machine and the code."""
    query = output_of("nvidia-smi", "--format=csv,noheader",
                      "--query-gpu=name,driver_version,memory.total,clocks.max.sm,power.limit")
    changed = output_of("git", "status", "--porcelain", "--untracked-files=no")
    code = sha256(b"".join((ROOT / name).read_bytes()
                           for name in ("multiscreen.py", "screening_triton.py"))).hexdigest()
    return [("command", " ".join(["python -m experiments.gpu", *sys.argv[1:]])),
            ("date", time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())),
            ("GPU, driver, memory, clock, power", query),
            ("torch, CUDA, triton, python",
             ", ".join([torch.__version__, str(torch.version.cuda),
                        getattr(triton, "__version__", "none"), platform.python_version()])),
            ("commit", output_of("git", "rev-parse", "HEAD")
             + ("" if changed == "unknown" else ", with changes")),
            ("SHA-256 of multiscreen.py and screening_triton.py", code[:16])]


def run_part(part, path, end, pipe):
    """One part, in a process of its own, until time.monotonic() is `end`.

    pipe: where the names go of what is not done yet.
    """
    os.setpgrp()                                       # what it starts can be killed with it
    with open(path.with_name("errors.txt"), "a") as file:
        os.dup2(file.fileno(), 2)
    report = Report(path, end - time.monotonic())
    try:
        part(report, pipe.send)
    except UsageError as e:
        traceback.print_exc()
        report.note(f"Stopped: {e}")
        sys.exit(WRONG)


def follow(process, pipe, seconds):
    """(the last message of a process, or None; whether it still runs). Waits for its end."""
    last, end = None, time.monotonic() + seconds
    try:
        while pipe.poll(max(end - time.monotonic(), 0)):
            last = pipe.recv()
    except (EOFError, OSError):                        # it has ended: nobody else holds the pipe
        process.join(10)
    return last, process.is_alive()


def end_group(process):
    """Kill a part, if it still runs, and what it has left running: it would be timed, too."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except OSError:                                    # nobody is left, or it has just begun
        process.kill()
    process.join()


def run_parts(names, path, seconds):
    """Run parts one after the other. Each has its share of what is left of the time."""
    end = time.monotonic() + seconds
    context = multiprocessing.get_context(START)
    for n, name in enumerate(names):
        left = end - time.monotonic()
        part, share = PARTS[name]
        limit = left * share / sum(PARTS[other][1] for other in names[n:])
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=run_part, args=(part, path, time.monotonic() + 0.85 * limit, theirs))
        process.start()
        theirs.close()
        try:
            missing, killed = follow(process, ours, limit)
        finally:
            end_group(process)
        missing = [name] if missing is None else missing

        # What this process could not say itself.
        report = Report(path)
        if killed:
            report.note(f"{name} was stopped after {limit:.0f} s.")
        elif process.exitcode not in (0, WRONG):
            report.note(f"{name} ended with exit code {process.exitcode}.")
        if missing and (killed or process.exitcode):
            report.note(did_not_fit(missing))
        if process.exitcode == WRONG:
            report.note(f"Not run, because of the kernel: {', '.join(names[n + 1:]) or '-'}.")
            raise UsageError(f"the kernel is wrong: see {path}")


def main():
    p = Parser(__doc__)
    p.add_argument("--part", choices=[*PARTS, "all"], default="all", help="what to run [all]")
    p.add_argument("--out", default="out/gpu", help="folder for report.md [out/gpu]")
    p.add_argument("--minutes", type=float, default=8.0, help="at most this long [8]")
    p.add_shared("--force")
    args = p.parse_args()
    require_gpu()
    if not args.minutes > 0:
        raise UsageError(f"--minutes {args.minutes}: it must be above 0")
    path = Path(args.out) / "report.md"
    check_writable(path, args.force)
    path.write_text("")
    began = time.monotonic()

    report = Report(path)
    report.section("Measured on a GPU: `python -m experiments.gpu`")
    table = report.table("The machine and the code", ["what", "value"])
    for row in describe():
        table.add(*row)
    names = list(PARTS) if args.part == "all" else [args.part]
    run_parts(names, path, 60 * args.minutes - (time.monotonic() - began))
    print(f"wrote {path}")


if __name__ == "__main__":
    cli(main)
