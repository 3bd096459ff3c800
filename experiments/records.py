"""The race of RECORDS.md: the seeds of an entry, its commands, and whether it counts.

    python -m experiments.records --commit HASH                    prints the commands
    python -m experiments.records --commit HASH RUN RUN RUN RUN    checks the four runs

Give the whole hash, as `git rev-parse HEAD` prints it. Train, measure and check in that commit:
rows of abcdigits.tsv are tied to the equations they were measured with.
"""
import hashlib
import re
from pathlib import Path

from support.checkpoint import equations, model_hash, read_checkpoint
from support.cli import Parser, UsageError, cli
from support.retrieval import CELL, get_cells, mean_by_length
from support.run import NOT_RESUMED
from support.stream import DONE_AFTER
from support.table import RUN, Table, beside, describe_run, print_table

# What an entry cannot choose. `parameters` are those of --psi 8 --layers 4.
FIXED = {"model": "multiscreen", "parameters": 475_298, "data": ["abcdigits"], "digits": 2,
         "tokenizer": "bytes", "seq_len": 256, "documents a step": 8, "init": None}
TRAIN = ("python train.py --data abcdigits --digits 2 --psi 8 --layers 4 --tokenizer bytes "
         "--seq-len 256 --batch-size 8")
FLAGS = "--lr 0.015625 --w-th 16 --steps 4800"         # an entry commits its own
LENGTH, DEPTHS, TRIALS, ENOUGH = 8192, (0.1, 0.3, 0.5, 0.7, 0.9), 40, 0.95


def seeds_of(commit):
    """The four seeds of a commit: 1,001 + the first four different words of its hash's SHA-256.

    A word is four bytes, big-endian. The recipe of main was tuned on seeds 0 to 23.
    """
    if not re.fullmatch("[0-9a-f]{40}", commit):
        raise UsageError(f"--commit {commit}: give the 40 digits that `git rev-parse HEAD` prints")
    digest = hashlib.sha256(commit.encode()).digest()
    words = [int.from_bytes(digest[n : n + 4], "big") for n in range(0, 32, 4)]
    return [1001 + word for word in dict.fromkeys(words)][:4]


def print_commands(commit):
    """What trains, evaluates and checks the entry of a commit."""
    out = f"out/record_{commit[:7]}"
    for seed in seeds_of(commit):
        run = f"{out}/{seed}"
        print(f"{TRAIN} {FLAGS} --seed {seed} --out {run}")
        print(f"python abcdigits.py --lengths {LENGTH} --trials {TRIALS} --ckpt {run}/ckpt.pt")
    print(f"python -m experiments.records --commit {commit} {out}/*")


def wrong_of(ckpt):
    """What a run lacks of FIXED, and whether it was stopped by hand, in words."""
    run = describe_run(ckpt) | {"documents a step": ckpt["drawn"] / max(ckpt["step"], 1)}
    found = ckpt["args"] | run
    wrong = [f"{name} is {found.get(name)}, not {value}" for name, value in FIXED.items()
             if found.get(name) != value]
    # Only the data of the race have this state.
    early = not wrong and ckpt["step"] < ckpt["args"]["steps"]
    if early and ckpt["data_state"][0] < DONE_AFTER:
        wrong.append(f"stopped at step {ckpt['step']}: the same command continues it")
    if ckpt["equations"] != equations(ckpt["model"]):
        wrong.append("trained with other equations than this commit's")
    return wrong


def share_found(ckpt, path):
    """The share of needles found, over the depths, or None while a cell is missing."""
    run = describe_run(ckpt) | {"digits": FIXED["digits"], "swe": False, "trials": TRIALS}
    cells = [run | {"length": LENGTH, "depth": depth, "factor": None} for depth in DEPTHS]
    columns = (*RUN, "digits", *CELL)
    table = Table(beside(path, "abcdigits.tsv"), columns, ["accuracy"], model_hash(ckpt))
    rows = table.rows_of(cells)
    if len(rows) < len(cells):
        return None
    return round(mean_by_length(get_cells(rows))[LENGTH][str(run["seed"])], 6)


def check(seeds, folders):
    """Print a row for each run. Returns (the steps of the slowest, what does not count)."""
    rows, wrong, flags = [], [], []
    for folder in folders:
        path = Path(folder) / "ckpt.pt"
        ckpt = read_checkpoint(path)
        share = share_found(ckpt, path)
        shown = None if share is None else f"{share:.1%}"
        rows.append([ckpt["args"]["seed"], ckpt["step"], shown])
        own = {name: x for name, x in ckpt["args"].items() if name not in ("seed", *NOT_RESUMED)}
        if own not in flags:
            flags.append(own)
        wrong += [f"{folder}: {words}" for words in wrong_of(ckpt)]
        if share is None:
            wrong.append(f"{folder}: abcdigits.tsv lacks {TRIALS} prompts at each depth")
        elif share < ENOUGH:
            wrong.append(f"{folder} finds {share:.1%}, fewer than {ENOUGH:.0%}")
    print_table(["seed", "steps", "needles"], rows, f"Needles found at {LENGTH:,} bytes")
    found = sorted(row[0] for row in rows)
    if found != sorted(seeds):
        wrong.append(f"the seeds are {found}, not {sorted(seeds)}")
    if len(flags) > 1:
        wrong.append("the runs have different flags")
    return max(row[1] for row in rows), wrong


def main():
    p = Parser(__doc__)
    p.add_argument("--commit", required=True, help="the whole hash of the entry's commit")
    p.add_argument("runs", nargs="*", metavar="RUN", help="the folders of the four runs")
    args = p.parse_args()
    if not args.runs:
        print_commands(args.commit)
        return
    steps, wrong = check(seeds_of(args.commit), args.runs)
    if wrong:
        raise UsageError(f"it does not count: {'; '.join(wrong)}")
    print(f"it counts: {steps:,} steps, the slowest of the four")


if __name__ == "__main__":
    cli(main)
