"""Do these runs differ, by how much, and what makes them differ?

    python -m lab.compare out/a-0 out/a-1 out/b-0 out/b-1     runs, one by one
    python -m lab.compare out/a out/b                         the same: out/a-SEED and out/b-SEED
    python -m lab.compare out                                 every run in a folder

A run is a folder of train.py, and its label is the folder's name without -SEED at the end. Runs of
one label are one group, whose flags and code must be equal but for the seed, and which must have
reached the same step; otherwise they have no mean, and an error names the run and both values.

Each group is compared with the first one, paired by seed, because runs of one seed read the same
sequences. A run that diverged is counted by its seed, and is in no mean and no pair.
"""
import argparse
import csv
import difflib
import io
import itertools
import math
import sys
from pathlib import Path

import numpy as np

from train import has_diverged, plain_code, read_checkpoint

try:
    import pandas as pd
    from scipy import stats
except ImportError as e:
    sys.exit(f'error: {e}: pip install -e ".[lab]"')

# Flags in which runs of a group may differ.
OF_ONE_RUN = {"seed", "out", "resume", "force", "log_every", "eval_every"}
ROUNDING = 1e-9                                        # relative: a smaller deviation is none


# --------------------------------------------------------------------------------- statistics

def paired(ours, theirs):
    """Ours less theirs, Series by seed, over the seeds of both: a dict with n, mean, sd, the 95 %
    interval low to high, and p, NaN where there is no deviation to compare with.
    """
    ours, theirs = pd.Series(ours, dtype=float), pd.Series(theirs, dtype=float)
    change = (ours - theirs).dropna()
    found = {"n": len(change), "mean": change.mean(), "sd": change.std(),
             "low": math.nan, "high": math.nan, "p": math.nan}
    # Equal differences deviate by rounding alone, so p would be nearly 0.
    if found["sd"] > ROUNDING * max(ours.abs().max(), theirs.abs().max()):
        test = stats.ttest_1samp(change, 0)
        found["low"], found["high"] = test.confidence_interval()
        found["p"] = test.pvalue
    return found


def holm(ps):
    """The p of several tests together: one falls below 0.05 by chance in one of 20 tables."""
    ps = pd.Series(ps, dtype=float)
    tests = ps.dropna().sort_values()
    corrected = (tests * np.arange(len(tests), 0, -1)).cummax().clip(upper=1)
    return corrected.reindex(ps.index)


def in_words(name, first, test, corrected):
    """What a paired comparison shows, as a sentence."""
    if test["n"] == 0:
        return f"{name}: no seed that ended is in {first}, too, so there is no pair"
    mean = f"{test['mean']:+.4f} nats per token (pairs: {test['n']})"
    if math.isnan(test["p"]):
        return f"{name}: {mean}; no p: it takes at least two pairs, whose differences are not equal"
    verdict = f"no difference from {first} is shown"
    if corrected < 0.05:
        verdict = f"the loss is {'lower' if test['mean'] < 0 else 'higher'} than that of {first}"
    return (f"{name}: {verdict}: {mean}, 95 % interval {test['low']:+.4f} to {test['high']:+.4f}, "
            f"p = {test['p']:.3g}, with Holm's correction {corrected:.3g}")


# --------------------------------------------------------------------------------------- runs

def split_seed(folder):
    """(label, seed) of a run's folder: out/a-1 has the label out/a and the seed 1."""
    label, _, seed = str(folder).rpartition("-")
    if seed.isdecimal():
        return label, int(seed)
    return str(folder), 0


def folders_of(name):
    """The runs that a name stands for: it is a run itself, a label, or a folder with runs."""
    if (name / "log.tsv").exists():
        return [name]
    labelled = [path.parent for path in name.parent.glob("*/log.tsv")
                if split_seed(path.parent)[0] == str(name)]
    found = labelled or [path.parent for path in name.glob("*/log.tsv")]
    if not found:
        sys.exit(f"error: {name} is no run of train.py, with a log.tsv, nor a folder of some, and "
                 f"there is no {name}-0 or such")
    return sorted(found)


def is_diverged(folder):
    """Whether the last row of a run's log says that training has diverged."""
    with open(folder / "log.tsv") as file:
        last = list(csv.DictReader(file, delimiter="\t"))[-1]
    return has_diverged({name: float(x) for name, x in last.items() if x})


def read_run(folder):
    """A run as a dict. One that diverged before its first checkpoint has neither flags nor code."""
    label, seed = split_seed(folder)
    run = {"folder": folder, "label": label, "seed": seed, "diverged": is_diverged(folder),
           "flags": None, "source": None, "step": None, "weights": None, "loss": None}
    path = folder / "ckpt.pt"
    if run["diverged"] and not path.exists():
        return run
    ckpt = read_checkpoint(path, "step", "log", "finished", "text")
    flags = {name: x for name, x in ckpt["args"].items() if name not in OF_ONE_RUN}
    # Files are stored by absolute paths; what MODULE.NAME makes may depend on the seed.
    if flags["data"] == ["stdlib"] or Path(flags["data"][0]).is_absolute():
        flags["text"] = ckpt["text"]
    flags["end"] = "finished"                          # a curriculum ends at a step of its own
    if not (ckpt["finished"] or run["diverged"]):
        flags["end"] = f"stopped at step {ckpt['step']}"
    loss = pd.read_csv(io.StringIO(ckpt["log"]), sep="\t").val_loss.iloc[-1]
    if math.isnan(loss) and not run["diverged"]:
        sys.exit(f"error: {folder} has no validation loss at step {ckpt['step']}, where it was "
                 "stopped: train.py --resume continues it")
    return run | {"seed": ckpt["args"]["seed"], "flags": flags, "source": ckpt["source"],
                  "step": ckpt["step"], "loss": loss,
                  "weights": sum(p.numel() for p in ckpt["weights"].values())}


def differences(one, other):
    """Lines that say in which flags and lines of code two runs differ, and if one was stopped."""
    found = []
    for name in one["flags"] | other["flags"]:
        a, b = one["flags"].get(name), other["flags"].get(name)
        if a != b:
            found.append(f"{name} {a} | {b}")
    for module in sorted(one["source"] | other["source"]):
        a, b = (run["source"].get(module, "") for run in (one, other))
        if plain_code(a) != plain_code(b):
            lines = [*difflib.unified_diff(a.splitlines(), b.splitlines(), n=0, lineterm="")][2:]
            found.append(f"{module}.py")
            found += [f"    {line}" for line in lines if not line.startswith("@@")]
    return found


def require_alike(one, other):
    """End the program if two runs of one label differ in more than their seed, or not in it."""
    if one["seed"] == other["seed"]:
        sys.exit(f"error: {one['folder']} and {other['folder']} both have the seed {one['seed']}")
    differ = differences(one, other) if one["flags"] and other["flags"] else []
    if differ:
        sys.exit(f"error: {one['folder']} and {other['folder']} differ in more than their seed, so "
                 "they have no mean:\n  " + "\n  ".join(differ))


def compare(names):
    """Print the losses of each label's runs, what the paired differences say, and what differs."""
    folders = dict.fromkeys(folder for name in names for folder in folders_of(Path(name)))
    runs = [read_run(folder) for folder in folders]
    for one, other in itertools.combinations(runs, 2):
        if one["label"] == other["label"]:
            require_alike(one, other)
    table = pd.DataFrame(runs).convert_dtypes()
    labels, ended = table.label.unique(), table[~table.diverged]
    summary = ended.groupby("label").agg(
        seeds=("seed", list), step=("step", "first"), weights=("weights", "first"),
        val_loss=("loss", "mean"), std=("loss", "std")).reindex(labels)
    summary["diverged"] = table[table.diverged].groupby("label").seed.agg(list)
    print("Validation loss, nats per token: mean and standard deviation over each label's seeds\n")
    print(summary.astype(object).fillna("-").to_string(float_format="{:.5g}".format))

    losses = ended.pivot(index="seed", columns="label", values="loss").reindex(columns=labels)
    first, *others = labels
    tests = [paired(losses[label], losses[first]) for label in others]
    known = {run["label"]: run for run in runs if run["flags"]}
    for label, test, corrected in zip(others, tests, holm([test["p"] for test in tests])):
        print()
        if first in known and label in known:
            differ = differences(known[first], known[label])
            print(f"{first} | {label}", *differ or ["the same"], sep="\n  ")
        print(in_words(label, first, test, corrected))


def main():
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("runs", nargs="+", metavar="RUN", help="runs, labels or folders, as above")
    compare(p.parse_args().runs)


if __name__ == "__main__":
    main()
