"""Kill commands again and again, start them again, and compare what they leave. Run by hand.

    python -m tests.kills                          the four cases below, about half an hour
    python -m tests.kills 10 'bash runs/tiny.sh'   10 kills of a command that writes below $OUT

A command runs once undisturbed, with OUT set to a new folder. Then it starts in an empty folder, is
killed with all its children at random moments, and is started again, until it finishes; then it
starts over in another empty folder. Half of the kills are SIGKILL, half Ctrl-C. In the end every
TSV must have the rows of the undisturbed run, and every checkpoint its weights: nothing lost,
nothing twice, no other numbers. Columns of times may differ.
"""
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from support.checkpoint import read_checkpoint, weights_hash
from support.cli import Parser, UsageError, cli
from tests.helpers import ROOT, TEXT, read_table

TIMES = {"ms", "tokens_per_s"}
TRAIN = ("train.py --psi 2 --seq-len 32 --batch-size 4 --steps 60 --save-every 1 --log-every 1 "
         "--eval-every 20 --kernel definition --device cpu --data $TEXT --out $OUT")
# (name, kills, kill within this many seconds of the folder's creation or None, command)
CASES = [
    ("one process", 150, None, f"python {TRAIN}"),
    ("two processes", 40, None, f"torchrun --nproc_per_node 2 {TRAIN} --shard 2"),
    ("a measuring command", 20, None, f"python {TRAIN} && python abcdigits.py --device cpu "
     "--ckpt $OUT/ckpt.pt --lengths 512 1024 2048 --trials 20"),
    ("the first second of a run", 20, 1.0, f"python {TRAIN}"),
]


def start_command(command, out):
    """Start a command as the first process of a new group."""
    return subprocess.Popen(["bash", "-c", command], cwd=ROOT, env=os.environ | {"OUT": str(out)},
                            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                            start_new_session=True)


def wait_or_kill(process, out, seconds, soon):
    """The exit code of a command, or None if it was killed.

    The kill comes within `seconds`, or within `soon` after its folder appears. torchrun's workers
    have their own sessions and outlive it, so SIGKILL is sent to them, too.
    """
    wait = random.uniform(0, seconds)
    if soon:
        while process.poll() is None and not (out / "flags.txt").exists():
            time.sleep(0.01)
        wait = random.uniform(0, soon)
    try:
        return process.wait(wait)
    except subprocess.TimeoutExpired:
        sent = random.choice([signal.SIGKILL, signal.SIGINT])
        os.killpg(process.pid, sent)
        process.wait()
        for pid in processes_of(out) if sent == signal.SIGKILL else ():
            os.kill(pid, signal.SIGKILL)
        while processes_of(out):
            time.sleep(0.01)
        return None


def processes_of(out):
    """The IDs of the processes with this OUT in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"OUT={out}".encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:                                # it has just ended
            continue
    return found


def results(out):
    """{path: rows without times, or a hash of the weights} of each TSV and checkpoint in `out`."""
    found = {}
    for path in sorted(out.rglob("*.tsv")):
        found[path.relative_to(out)] = [{name: x for name, x in row.items() if name not in TIMES}
                                        for row in read_table(path)]
    for path in sorted(out.rglob("ckpt.pt")):
        found[path.relative_to(out)] = weights_hash(read_checkpoint(path))
    return found


def kill(name, n, soon, command):
    """Kill a command n times. Return (kills, runs whose results differ from the undisturbed)."""
    folder = Path(tempfile.mkdtemp())
    out, begin = folder / "out", time.perf_counter()
    if start_command(command, out).wait():
        sys.exit(f"the command fails without being killed: {command}")
    seconds = time.perf_counter() - begin
    expected, kills, wrong = results(out), 0, 0
    if not expected:
        sys.exit("the command leaves no TSV and no checkpoint below $OUT")
    out.rename(folder / "undisturbed")
    while kills < n:
        code = wait_or_kill(start_command(command, out), out, seconds, soon)
        kills += code is None
        # After an early kill, finish the run at once; other runs are compared when they end.
        if code is not None or soon or kills == n:
            code = start_command(command, out).wait() if code is None else code
            if code or results(out) != expected:
                wrong += 1
                out.rename(folder / f"wrong_{wrong}")
                print(f"{name}: {folder / f'wrong_{wrong}'} differs", flush=True)
            else:
                out.rename(folder / f"right_{kills}_{time.monotonic_ns()}")
        print(f"{name}: {kills} kills", end="\r", file=sys.stderr, flush=True)
    return kills, wrong


def main():
    random.seed(0)
    os.environ["TEXT"] = str(Path(tempfile.mkdtemp()) / "text.txt")
    Path(os.environ["TEXT"]).write_text(TEXT)
    p = Parser(__doc__)
    p.add_argument("kills", nargs="?", type=int)
    p.add_argument("command", nargs="?")
    args = p.parse_args()
    if args.kills and not args.command:
        raise UsageError("name the command to kill, too")
    cases = [(args.command, args.kills, None, args.command)] if args.command else CASES
    total = 0
    print("| killed | kills | runs with another result |\n|---|--:|--:|")
    for case in cases:
        kills, wrong = kill(*case)
        print(f"| {case[0]} | {kills} | {wrong} |", flush=True)
        total += wrong
    sys.exit(total > 0)


if __name__ == "__main__":
    cli(main)
