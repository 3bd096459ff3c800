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
import math
import sys
from pathlib import Path

from lab.measure import optional
from train import has_diverged, read_checkpoint

np, pd, stats = optional("numpy"), optional("pandas"), optional("scipy.stats")

OF_ONE_RUN = {"seed", "out", "resume", "force"}        # flags in which runs of a group may differ
ROUNDING = 1e-9                                        # relative: a smaller deviation is none


# --------------------------------------------------------------------------------- statistics

def paired(ours, theirs):
    """Ours less theirs, Series by seed, over the seeds of both: a dict with n, mean, sd, the 95 %
    interval low to high, and Student's t and p, NaN where there is no deviation to compare with.
    """
    ours, theirs = pd.Series(ours, dtype=float), pd.Series(theirs, dtype=float)
    change = (ours - theirs).dropna()
    found = {"n": len(change), "mean": change.mean(), "sd": change.std(),
             "low": math.nan, "high": math.nan, "t": math.nan, "p": math.nan}
    # Equal differences deviate by rounding alone, from which t would be 1e15.
    largest = max(ours.abs().max(), theirs.abs().max())
    if found["sd"] <= ROUNDING * largest:
        found["sd"] = 0.0
    if found["sd"] > 0:
        test = stats.ttest_1samp(change, 0)
        found["low"], found["high"] = test.confidence_interval()
        found["t"], found["p"] = test.statistic, test.pvalue
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
        return f"{name}: no seed in common with {first}, so there is no pair"
    pairs = "1 pair" if test["n"] == 1 else f"{test['n']} pairs"
    mean = f"{test['mean']:+.4f} nats per token, {pairs}"
    if test["n"] == 1:
        return f"{name}: {mean}: one pair says nothing about other seeds"
    if test["sd"] == 0:
        return f"{name}: {mean}, the same in each, so there is no deviation and no p"
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


def folders_of(names):
    """The runs that names stand for: each is a run, a folder with runs, or a label."""
    folders = []
    for name in map(Path, names):
        found = [name / "log.tsv"]
        if not found[0].exists():
            found = list(name.glob("*/log.tsv"))
            found += [path for path in name.parent.glob("*/log.tsv")
                      if split_seed(path.parent)[0] == str(name) != str(path.parent)]
        if not found:
            sys.exit(f"error: {name} is no run of train.py, with a log.tsv, nor a folder of some, "
                     f"and there is no {name}-0 or such")
        folders += sorted(path.parent for path in found)
    return list(dict.fromkeys(folders))


def is_diverged(folder):
    """Whether the last row of a run's log says that training has diverged."""
    with open(folder / "log.tsv") as file:
        last = list(csv.DictReader(file, delimiter="\t"))[-1]
    return has_diverged({name: float(x) for name, x in last.items() if x})


def read_run(folder):
    """A run as a dict. One that diverged before its first checkpoint has neither flags nor code."""
    diverged = is_diverged(folder)
    label, seed = split_seed(folder)
    run = {"folder": folder, "label": label, "seed": seed, "diverged": diverged}
    if not (folder / "ckpt.pt").exists():
        if not diverged:
            sys.exit(f"error: {folder} has no checkpoint yet: train.py --resume continues it")
        return run | {"flags": None}
    ckpt = read_checkpoint(folder / "ckpt.pt")
    flags = {name: x for name, x in ckpt["args"].items() if name not in OF_ONE_RUN}
    # Files are stored by absolute paths; what MODULE.NAME makes may depend on the seed.
    if flags["data"] == ["stdlib"] or Path(flags["data"][0]).is_absolute():
        flags["text"] = ckpt.get("text")
    log = pd.read_csv(io.StringIO(ckpt["log"]), sep="\t")
    loss = log.val_loss[log.step == ckpt["step"]].dropna()
    if len(loss) == 0 and not diverged:
        sys.exit(f"error: {folder} has no validation loss at step {ckpt['step']}, where it was "
                 "stopped: train.py --resume continues it")
    weights = sum(p.numel() for p in ckpt["weights"].values())
    return run | {"seed": ckpt["args"]["seed"], "flags": flags, "source": ckpt["source"],
                  "step": ckpt["step"], "weights": weights, "loss": loss.max()}


def differences(one, other):
    """Lines that say in which flags and lines of code two runs differ."""
    found = []
    for name in one["flags"] | other["flags"]:
        a, b = one["flags"].get(name), other["flags"].get(name)
        if a != b:
            found.append(f"{name} {a} | {b}")
    for module in sorted(one["source"] | other["source"]):
        texts = [run["source"].get(module, "").splitlines() for run in (one, other)]
        lines = [*difflib.unified_diff(*texts, n=0, lineterm="")][2:]
        if lines:
            found.append(f"{module}.py")
            found += [f"    {line}" for line in lines if not line.startswith("@@")]
    return found


def require_alike(runs):
    """End the program if runs of one label differ in more than their seed."""
    for place, run in enumerate(runs):
        before = [other for other in runs[:place] if other["label"] == run["label"]]
        for other in before:
            if other["seed"] == run["seed"]:
                sys.exit(f"error: {other['folder']} and {run['folder']} both have the seed "
                         f"{run['seed']}")
        before = [other for other in before if other["flags"]]
        if not before or not run["flags"]:
            continue
        first, differ = before[0], differences(before[0], run)
        ended = [other for other in before if not other["diverged"]]
        if not run["diverged"] and ended and ended[0]["step"] != run["step"]:
            first, differ = ended[0], [f"step {ended[0]['step']} | {run['step']}", *differ]
        if differ:
            sys.exit(f"error: {first['folder']} and {run['folder']} differ in more than their "
                     "seed, so they have no mean:\n  " + "\n  ".join(differ))


def first_of(runs, label):
    """The first run of a label that has flags and code, or None."""
    return next((run for run in runs if run["label"] == label and run["flags"]), None)


def compare(names):
    """Print the losses of each label's runs, what the paired differences say, and what differs."""
    runs = [read_run(folder) for folder in folders_of(names)]
    require_alike(runs)
    labels, rows, losses = list(dict.fromkeys(run["label"] for run in runs)), [], {}
    for label in labels:
        ended = [run for run in runs if run["label"] == label and not run["diverged"]]
        diverged = [run["seed"] for run in runs if run["label"] == label and run["diverged"]]
        losses[label] = pd.Series({run["seed"]: run["loss"] for run in ended}, dtype=float)
        rows.append({
            "runs": label, "seeds": " ".join(str(run["seed"]) for run in ended) or "none",
            "diverged": " ".join(map(str, diverged)) or "none",
            "step": ended[0]["step"] if ended else None,
            "weights": ended[0]["weights"] if ended else None,
            "val_loss": losses[label].mean(), "std": losses[label].std()})
    print("Validation loss, nats per token: mean and standard deviation over the seeds\n")
    print(pd.DataFrame(rows).to_string(index=False, na_rep="-", float_format="{:.5g}".format))

    first, *others = labels
    tests = [paired(losses[label], losses[first]) for label in others]
    for label, test, corrected in zip(others, tests, holm([test["p"] for test in tests])):
        print(f"\n{in_words(label, first, test, corrected)}")
        one, other = first_of(runs, first), first_of(runs, label)
        if one and other:
            print(f"{first} | {label}", *differences(one, other) or ["the same"], sep="\n  ")


def main():
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("runs", nargs="+", metavar="RUN", help="runs, labels or folders, as above")
    compare(p.parse_args().runs)


if __name__ == "__main__":
    main()
