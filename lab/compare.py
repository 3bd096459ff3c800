"""Which run is better, by how much, and what differs between them?

    python -m lab.compare out my=out-edit
    python -m lab.compare 'out/idea/original-*' 'out/idea/mine-*'
    python -m lab.compare 'Ours=out/m_lr*' 'Theirs=out/t_lr*' --by lr --table out/rates.tsv

A RUN is a folder that train.py has written, or a table that this command has written with --table,
which has a row for each run. Runs with the same label form a group, whose runs may differ only in
their seed, and with --by in that flag. Without a label, the name of the folder counts, without the
seed at its end. The columns are:

val_loss, std   the mean validation loss and its standard deviation over the seeds, at the last step
                at which all runs were evaluated
change, std     the difference from the first group, averaged over the seeds that both have: runs
                with the same seed see the same data in the same order
t95             half the 95 % interval of the change, by Student's t. If it is larger than the
                change, other seeds may well turn the change around. With three seeds it is 2.48
                times the deviation
grad            the median gradient norm of the second half of the run
spikes          logged losses more than 5 standard deviations above the mean of the ten before
                (--before)
alive, w_max    at the end: the share of the pairs in the windows whose relevance is above 0, and
                the largest window
tokens_per_s    compare them only if each run had a machine to itself

A run has diverged if train.py stopped it, or if both its validation loss and its training loss are
higher at the end than they were at the first evaluation. Below the table you find the flags, and
the lines of code, in which the groups differ. `python -m lab.figures logs` and `losses` draw runs.
"""
import difflib
import math
import statistics
from dataclasses import dataclass
from pathlib import Path

from support.cli import Parser, UsageError, at_least, cli
from support.tables import named_paths, print_table, read_table, write_table

FACTS = ("grad", "spikes", "alive", "w_max", "tokens_per_s")
# What a loss depends on besides the model: losses on other texts do not compare.
TEXT = ("corpus", "tokenizer", "seq_len", "digits")
# Flags, and columns of a table, that say nothing about what was trained.
LEFT_OUT = ("seed", "out", "device", "resume", "force", "compile", "shard", "recompute",
            "log_every", "eval_every", "save_every", "data", "parameters", "torch",
            "run", "end", "step", "val_loss", *FACTS)
# Half of a 95 % interval in standard errors, by the number of pairs less one.
STUDENT = (math.nan, 12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


@dataclass
class Run:
    """A run of train.py. losses: {step: validation loss}; facts: {name of FACTS: number}."""
    label: str
    flags: dict
    losses: dict
    facts: dict
    diverged: bool
    source: dict

    @property
    def seed(self):
        return self.flags["seed"]

    def loss(self, step=None):
        """The validation loss after a step, or the last one; NaN for a run that diverged."""
        if self.diverged:
            return math.nan
        return self.losses[max(self.losses) if step is None else step]


# ----------------------------------------------------------------------------------- read runs

def read_runs(words, before=10):
    """The Runs that the words of a command line name. before: of count_spikes"""
    runs = []
    for label, path in named_paths(words):
        if path.endswith(".tsv"):
            runs += [read_row(row, label) for row in read_table(path)]
        else:
            runs.append(read_folder(Path(path), label, before))
    return runs


def read_row(row, label):
    """The Run in a row of a table that --table has written."""
    if not row.keys() >= {"run", "model", "seed", "step", "val_loss"}:
        raise UsageError("compare reads only those tables that it has written with --table")
    facts = {name: float(row.get(name) or "nan") for name in FACTS}
    losses = {int(row["step"]): float(row["val_loss"] or "nan")}
    return Run(label or row["run"], row, losses, facts, row["end"] == "diverged", {})


def read_folder(folder, label, before=10):
    """The Run in a folder that train.py has written."""
    if not (folder / "flags.txt").exists() or not (folder / "log.tsv").exists():
        raise UsageError(f"{folder} is not a run's folder: name one that train.py has written")
    flags = read_flags(folder)
    log = read_table(folder / "log.tsv")
    losses = {int(row["step"]): float(row["val_loss"]) for row in log if row.get("val_loss")}
    was_stopped = (folder / "diverged.txt").exists()
    if not losses and not was_stopped:
        raise UsageError(f"{folder} has no validation loss yet: --resume continues it")
    root = folder / "source"
    source = {str(path.relative_to(root)): path.read_text("utf-8").splitlines()
              for path in sorted(root.rglob("*.py"))}
    label = label or folder.resolve().name.removesuffix(f"-{flags['seed']}")
    diverged = was_stopped or rose(log, losses)
    return Run(label, flags, losses, facts_of(log, before), diverged, source)


def read_flags(folder):
    """{name of a flag: its value} of a folder that train.py has written."""
    lines = (folder / "flags.txt").read_text("utf-8", "replace").splitlines()
    return dict(line.partition("\t")[::2] for line in lines)


def column(log, name):
    """The numbers in a column of a log, as dict by step."""
    return {int(row["step"]): float(row[name]) for row in log if row.get(name)}


def rose(log, losses):
    """Whether a run ends above where its validation began, and so does its training loss.

    losses: {step: validation loss}. Means of an eighth of the log are compared. Where a model
    overfits, its training loss falls; where a task gets harder as it is learned, its validation
    loss falls.
    """
    if not all(math.isfinite(x) for x in losses.values()):
        return True
    training, first = column(log, "loss"), min(losses)
    if not training or losses[max(losses)] <= losses[first]:
        return False
    n = max(len(training) // 8, 1)
    before = [x for step, x in training.items() if step <= first][-n:]
    return statistics.mean(list(training.values())[-n:]) > statistics.mean(before)


def facts_of(log, before):
    """{name of FACTS: number} of a log, NaN for a column that it lacks."""
    facts = dict.fromkeys(FACTS, math.nan)
    facts["spikes"] = count_spikes(list(column(log, "loss").values()), before)
    norms = list(column(log, "grad_norm").values())
    speeds = list(column(log, "tokens_per_s").values())
    if norms:
        facts["grad"] = statistics.median(norms[len(norms) // 2 :])
    if speeds:
        facts["tokens_per_s"] = statistics.median(speeds)
    for name in ("alive", "w_max"):
        if values := list(column(log, name).values()):
            facts[name] = values[-1]
    return facts


def count_spikes(losses, before):
    """How many losses lie more than 5 deviations above the mean of so many before them."""
    count = 0
    for n in range(before, len(losses)):
        last = losses[n - before : n]
        if losses[n] > statistics.fmean(last) + 5 * statistics.pstdev(last):
            count += 1
    return count


# -------------------------------------------------------------------------- means over the seeds

def mean_and_std(numbers):
    """(mean, standard deviation); NaN if one of the numbers is NaN, or where there are too few."""
    numbers = list(numbers)
    if not numbers or any(math.isnan(x) for x in numbers):
        return math.nan, math.nan
    std = statistics.stdev(numbers) if len(numbers) > 1 else math.nan
    return statistics.fmean(numbers), std


def best_choice(choices):
    """The key of the best of several choices, {key: {seed: a number, the lower the better}}.

    A choice that lacks a seed which others have, or with which a seed diverged (NaN), is none, as
    its mean would be of other seeds. Returns None if no choice is left.
    """
    seeds = {seed for numbers in choices.values() for seed in numbers}
    means = {key: statistics.fmean(numbers.values()) for key, numbers in choices.items()
             if numbers.keys() == seeds and all(math.isfinite(x) for x in numbers.values())}
    return min(means, key=means.get, default=None)


def get_groups(runs, by=None):
    """{name of a row: its runs}. by: a flag whose values get a row each, or None.

    Raises UsageError if runs of a group differ in more than the seed: their mean would be none.
    """
    groups = {}
    for run in runs:
        if by and by not in run.flags:
            raise UsageError(f"--by {by} is no flag of {run.label}")
        name = f"{run.label}, {by} {run.flags[by]}" if by else run.label
        groups.setdefault(name, []).append(run)
    for name, group in groups.items():
        first, seeds = group[0], set()
        for run in group:
            if run.seed in seeds:
                raise UsageError(f"{name} has seed {run.seed} twice: label the runs, as in "
                                 "mine=out")
            seeds.add(run.seed)
            if different := flags_that_differ(first, run):
                raise UsageError(f"{name} has runs that differ in {' and '.join(different)}: label "
                                 f"them, as in mine=out, or try --by {different[0]}")
    return groups


def flags_that_differ(one, other):
    """The flags in which two runs differ. A run of an old table may lack some."""
    names = [name for name in one.flags if name in other.flags and name not in LEFT_OUT]
    return [name for name in names if one.flags[name] != other.flags[name]]


def last_common_step(runs):
    """The last step at which all runs that did not diverge have a validation loss."""
    steps = [set(run.losses) for run in runs if not run.diverged]
    if not steps:
        raise UsageError("all of these runs have diverged")
    if not set.intersection(*steps):
        raise UsageError("the runs have no step with a validation loss in common")
    return max(set.intersection(*steps))


def changes_of(runs, first, step):
    """The losses after a step minus those of other runs with the same seeds, on the same text."""
    partners = {run.seed: run for run in first if not run.diverged}
    changes = []
    for run in runs:
        partner = partners.get(run.seed)
        if partner is not None and partner is not run and not run.diverged:
            if not set(TEXT) & set(flags_that_differ(run, partner)):
                changes.append(run.loss(step) - partner.loss(step))
    return changes


def row_of(name, runs, first, step):
    """A row of the table. first: the runs of the first group, with the same value of --by."""
    good = [run for run in runs if not run.diverged]
    loss, std = mean_and_std([run.loss(step) for run in good])
    changes = changes_of(runs, first, step)
    change, change_std = mean_and_std(changes)
    facts = []
    for fact in FACTS:                                 # old tables have those of one seed
        known = [run.facts[fact] for run in runs if not math.isnan(run.facts[fact])]
        facts.append(mean_and_std(known)[0])
    return [name, len(runs), len(runs) - len(good), runs[0].flags["parameters"], loss, std, change,
            change_std, half_interval(change_std, len(changes)), *facts]


def half_interval(std, n):
    """Half of the 95 % interval of a mean of n numbers with a standard deviation."""
    if n < 2:
        return math.nan
    return (STUDENT[n - 1] if n <= len(STUDENT) else 2.2) * std / math.sqrt(n)


def print_differences(one, other, by):
    """Print the flags, but for `by`, and the lines of code in which two runs differ."""
    print(f"\n{one.label} | {other.label}")
    for name in flags_that_differ(one, other):
        if name != by:
            print(f"  {name} {one.flags[name]} | {other.flags[name]}")
    paths = sorted(one.source.keys() | other.source.keys()) if one.source and other.source else []
    for path in paths:
        texts = one.source.get(path, []), other.source.get(path, [])
        if texts[0] != texts[1]:
            print(f"  {path}")
            for line in list(difflib.unified_diff(*texts, n=0, lineterm=""))[2:]:
                if not line.startswith("@@"):
                    print(f"    {line}")


def main():
    p = Parser(__doc__)
    p.add_argument("runs", nargs="+", metavar="RUN", help="folders that train.py has written, "
                   "label=folder, or tables that this command has written")
    p.add_argument("--by", help="a row for each value of this flag of train.py, such as lr")
    p.add_argument("--table", type=Path, help="write a row for each run to this file")
    p.add_argument("--before", type=at_least(2), default=10,
                   help="how many losses before one say whether it is a spike [10]")
    args = p.parse_args()
    runs = read_runs(args.runs, args.before)
    groups, step = get_groups(runs, args.by), last_common_step(runs)

    rows = []
    for name, group in groups.items():
        first = [run for run in runs if run.label == runs[0].label
                 and run.flags.get(args.by) == group[0].flags.get(args.by)]
        rows.append(row_of(name, group, first, step))
    print_table(["run", "seeds", "diverged", "parameters", "val_loss", "std", "change", "std",
                 "t95", *FACTS], rows, f"Validation loss after {step} steps, nats per token; "
                f"change: against {runs[0].label}, by seed")
    firsts = {}
    for run in runs:
        one = firsts.setdefault(run.label, run)
        if run is one and run is not runs[0]:
            print_differences(runs[0], run, args.by)
        elif run.source != one.source:
            print(f"\nseeds {one.seed} and {run.seed} of {run.label} ran different code:")
            print_differences(one, run, args.by)

    if args.table:
        names = dict.fromkeys(name for run in runs for name in run.flags)
        rows = [{"run": run.label} | {name: run.flags.get(name, "") for name in names}
                | {"end": "diverged" if run.diverged else "", "step": step,
                   "val_loss": run.losses.get(step)} | run.facts for run in runs]
        write_table(args.table, rows)


if __name__ == "__main__":
    cli(main)
