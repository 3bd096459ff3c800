"""Tune the learning rate of a training command. `lab/runs/mechanisms.sh tune` calls this script.

    python lab/runs/tune.py text softmax 2 -10 -8 -6 -- python train.py --resume ...

This trains softmax on text with seed 20 at the rates 2^-10, 2^-8 and 2^-6, in OUT/tune_text/. The
rate with the lowest final validation loss wins. As long as the winner is at an edge of the grid,
the next rate beyond that edge is tried as well, here at a factor of 2^2, unless all runs diverged.
The winner is added to OUT/tuned.txt. The environment variable OUT names the folder, by default
out/mechanisms.
"""
import csv
import math
import os
import subprocess
import sys
from pathlib import Path

OUT = Path(os.environ.get("OUT", "out/mechanisms"))
TRAIN = os.environ.get("TRAIN", "").split()
DIVERGED = 99


def run(*command):
    """Run a command, and exit as it does if it fails. 3: it diverged, which is a result."""
    print("+", *command, flush=True)
    process = subprocess.Popen(command)
    try:
        code = process.wait()
    except KeyboardInterrupt:
        process.wait()                                 # until it has saved its checkpoint
        sys.exit(130)
    if code not in (0, 3):
        sys.exit(code)


def last_of(out, column, until=math.inf):
    """The last value of a column of a run's log, up to a step; 99 if it diverged or has none."""
    if (out / "diverged.txt").exists():
        return DIVERGED
    with open(out / "log.tsv") as file:
        values = [float(row[column]) for row in csv.DictReader(file, delimiter="\t")
                  if row[column] and int(row["step"]) <= until]
    return values[-1] if values else DIVERGED


def train(task, command, exponent, out):
    """The loss at a rate. A run that looks nothing up after 2,500 steps is stopped there."""
    flags = ["--lr", f"{2.0**exponent:.12g}", "--seed", "20", *TRAIN, "--out", str(out)]
    if task == "text":
        run(*command, *flags)
    else:
        run(*command, "--steps", "2500", *flags)
        if 0.2 < last_of(out, "needle", 2500) <= 1:
            run(*command, "--steps", "4800", *flags)
    return last_of(out, "val_loss")


def main(task, name, step, *words):
    cut = words.index("--")
    step, new, command = int(step), [int(x) for x in words[:cut]], words[cut + 1:]
    losses = {}
    while new:
        for exponent in new:
            losses[exponent] = train(task, command, exponent, OUT / f"tune_{task}/{name}{exponent}")
        loss, best = min((loss, exponent) for exponent, loss in losses.items())
        beyond = {min(losses): best - step, max(losses): best + step}
        new = [beyond[best]] if best in beyond and loss != DIVERGED else []

    print(line := f"{task} {name} {loss:g} {best}")
    with open(OUT / "tuned.txt", "a") as file:
        file.write(f"{line}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
