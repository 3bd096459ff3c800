"""Kill a command again and again, start it again, and compare what it leaves. Run by hand.

    python -m tests.kills 'bash runs/tiny.sh'
    python -m tests.kills --kills 60 'python train.py --psi 2 --steps 60 --save-every 1 --out $OUT'

The command runs once undisturbed, with OUT set to a new folder. Then it runs in an empty one and is
killed at random instants with all its children, half of the times by SIGKILL, half by Ctrl-C, and
given again each time. In the end every TSV must have the rows of the first run: no row lost, none
twice, none with other numbers. Columns of times, and files given with --ignore, may differ.
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

from tests.helpers import ROOT, read_table

TIMES = {"ms", "tokens_per_s", "time", "commit"}


def start_command(command, out):
    """The process of a command, the first of a group of its own."""
    return subprocess.Popen(["bash", "-c", command], cwd=ROOT, env=os.environ | {"OUT": str(out)},
                            stdout=subprocess.DEVNULL, start_new_session=True)


def wait_or_kill(process, seconds, sent):
    """Whether the command was still running after so many seconds, and has been killed."""
    try:
        process.wait(seconds)
        return False
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, sent)
        process.wait()
        return True


def read_tables(out, ignored):
    """{path: rows} of every TSV below a folder, without times."""
    tables = {}
    for path in sorted(out.rglob("*.tsv")):
        if path.name not in ignored:
            rows = [{name: x for name, x in row.items() if name not in TIMES}
                    for row in read_table(path)]
            tables[str(path.relative_to(out))] = rows
    return tables


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("command")
    p.add_argument("--kills", type=int, default=10)
    p.add_argument("--ignore", nargs="*", default=[], help="names of TSVs that hold times")
    args = p.parse_args()
    random.seed(0)

    # Both in the same folder: a table may name it.
    out = Path(tempfile.mkdtemp()) / "out"
    begin = time.perf_counter()
    if start_command(args.command, out).wait():
        sys.exit("the command fails without being killed")
    seconds = time.perf_counter() - begin
    expected = read_tables(out, args.ignore)
    out.rename(out.with_name("undisturbed"))
    if not expected:
        sys.exit("the command leaves no TSV below $OUT")

    kills = finished = 0
    while kills < args.kills and finished < args.kills:
        sent = random.choice([signal.SIGKILL, signal.SIGINT])
        killed = wait_or_kill(start_command(args.command, out), random.uniform(0, seconds), sent)
        kills += killed
        finished += not killed
        print(f"{kills} kills, {finished} times finished", flush=True)
    code = start_command(args.command, out).wait()
    found = read_tables(out, args.ignore)
    differing = [name for name in expected.keys() | found.keys()
                 if expected.get(name) != found.get(name)]
    print(f"{kills} kills; exit code {code}; of {len(expected)} TSVs differ: "
          f"{', '.join(sorted(differing)) or 'none'} ({out.parent})")
    sys.exit(bool(code or differing))


if __name__ == "__main__":
    main()
