"""Kill a training run again and again, and count what is lost. Run by hand; prints its counts.

    python -m tests.kills                          60 kills of one process: a minute or two
    python -m tests.kills --processes 2 --kills 40

A run of 60 steps is killed (SIGKILL), resumed, killed, and so on: half of the kills come at a
random instant, half at a line of what writes the log and the checkpoint, one line after the other.
After each the checkpoint must load, and in the end the run must be as one that was never killed:
the same weights (bitwise for one process), the same rows in its log.
"""
import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import train
from support.checkpoint import read_checkpoint
from support.cli import UsageError
from tests.helpers import ROOT, SMALL, TEXT, read_table

STEPS = 60
WRITERS = {"save", "save_checkpoint", "add", "rewrite", "open_run", "replacing", "__enter__",
           "__exit__"}
WRITTEN_IN = ("train.py", "support/checkpoint.py", "support/run.py", "support/files.py")


def kill_at_line(n):
    """Kill this process when it comes to the n-th line of what writes."""
    left = n

    def line(frame, event, _):
        nonlocal left
        left -= event == "line"
        if left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return line

    def call(frame, event, _):
        code = frame.f_code
        return line if code.co_name in WRITERS and code.co_filename.endswith(WRITTEN_IN) else None

    sys.settrace(call)


def start_one(flags, line):
    """Start the run in a fork of this process, which has PyTorch imported. Returns its number."""
    pid = os.fork()
    if pid == 0:
        try:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            if line:
                kill_at_line(line)
            train.main(flags)
            os._exit(0)
        except UsageError as e:
            print(f"error: {e}", file=sys.stderr, flush=True)
        finally:
            os._exit(1)
    return pid


class Torchrun:
    """The run in several processes, of which one is killed."""

    def __init__(self, processes, flags):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                   "--nproc_per_node", str(processes), "train.py", *flags]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE,
                                        stderr=subprocess.PIPE, text=True)

    def wait_for_steps(self):
        """Whether training has begun; otherwise the run has ended."""
        return any(line.split("/")[0].strip().isdigit() for line in self.process.stdout)

    def kill(self):
        listed = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        pids = listed.read_text().split()              # none if the run has just ended
        for pid in pids[: random.randint(1, 2)][-1:]:
            os.kill(int(pid), signal.SIGKILL)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--kills", type=int, default=60)
    p.add_argument("--processes", type=int, default=1)
    args = p.parse_args()
    torch.set_num_threads(1)
    random.seed(0)
    folder = Path(tempfile.mkdtemp())
    (folder / "text.txt").write_text(TEXT)
    # By steps, so that a run that is killed early each time comes on all the same.
    base = [*SMALL, "--data", str(folder / "text.txt"), "--steps", str(STEPS), "--log-every", "1",
            "--eval-every", "10", "--save-every", "1", "--batch-tokens", "256"]
    whole, parts = folder / "whole", folder / "parts"
    os.waitpid(start_one([*base, "--out", str(whole)], None), 0)

    kills = unreadable = failed = line = ended = 0
    while kills < args.kills:
        # A run that has come to its end begins again in another folder.
        start = "--resume" if (parts / "ckpt.pt").exists() else "--force"
        flags = [*base, "--out", str(parts), start]
        if args.processes > 1:
            run = Torchrun(args.processes, flags)
            began = run.wait_for_steps()
            time.sleep(random.uniform(0, 1.0) if began else 0)
            shot = began and run.process.poll() is None
            if shot:
                run.kill()
            _, errors = run.process.communicate(timeout=120)
            killed = run.process.returncode != 0
            said = [line for line in errors.splitlines() if line.startswith("error: ")
                    and not line.endswith("another process has ended")]
            wrong = said or killed and not shot
        else:
            line = line + 1 if kills % 2 else line
            pid = start_one(flags, line if kills % 2 else None)
            if kills % 2 == 0:
                time.sleep(random.uniform(0, 3.0))
                os.kill(pid, signal.SIGKILL)
            status = os.waitpid(pid, 0)[1]
            killed, wrong = os.WIFSIGNALED(status), os.WIFEXITED(status) and os.WEXITSTATUS(status)
        kills += killed and not wrong
        failed += bool(wrong)
        try:
            step = read_checkpoint(parts / "ckpt.pt")["step"] if (parts / "ckpt.pt").exists() else 0
        except UsageError as e:
            unreadable += 1
            print(e)
            break
        if step == STEPS and kills < args.kills:
            ended += 1
            compare_runs(whole, parts, args.processes)
            parts = folder / f"parts{ended}"
        print(f"\r{kills} kills, step {step}, {failed} resumes failed", end="", flush=True)

    # To the end, in one process.
    start = "--resume" if (parts / "ckpt.pt").exists() else "--force"
    os.waitpid(start_one([*base, "--out", str(parts), start], None), 0)
    differing, lost = compare_runs(whole, parts, args.processes)
    print(f"\n{kills} kills of {args.processes} processes, the last at line {line} of what writes: "
          f"unreadable checkpoints {unreadable}, resumes that fail {failed}, runs whose final "
          f"weights differ {differing}, log rows lost {lost}")
    sys.exit(bool(unreadable or failed or differing or lost))


totals = [0, 0]


def compare_runs(whole, parts, processes):
    """(runs whose final weights differ, log rows lost), of all runs so far."""
    a, b = (read_checkpoint(out / "ckpt.pt") for out in (whole, parts))
    tolerance = {"rtol": 0, "atol": 0} if processes == 1 else {"rtol": 0.05, "atol": 0.02}
    same = all(torch.allclose(a["weights"][name], b["weights"][name], **tolerance)
               for name in a["weights"])
    steps = {row["step"] for row in read_table(parts / "log.tsv")}
    totals[0] += not same or b["step"] != STEPS
    totals[1] += STEPS - len(steps & {str(n) for n in range(1, STEPS + 1)})
    return totals


if __name__ == "__main__":
    main()
