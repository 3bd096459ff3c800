"""What a run of train.py was, from its folder or from a row of a table of runs."""
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from support.cli import UsageError
from lab.alike import FACTS
from support.run import read_flags
from support.tables import named_paths, read_table


@dataclass
class LoggedRun:
    """A run as train.py logged it. losses: {step: validation loss}.

    facts_at(step): {FACT: number} as they were after a step, because the runs of one table may have
    other lengths. A run that is a row of a table has those of one step only.
    """
    label: str
    flags: dict
    losses: dict
    facts_at: Callable
    diverged: bool
    source: dict

    @property
    def seed(self):
        return self.flags["seed"]

    def loss(self, step):
        """The validation loss after a step; NaN for a run that diverged."""
        return math.nan if self.diverged else self.losses[step]


def read_runs(words, before=10):
    """The runs that the words of a command line name. before: of count_spikes"""
    runs = []
    for label, path in named_paths(words):
        if path.endswith(".tsv"):
            runs += [run_of_row(row, label, path) for row in read_table(path)]
        else:
            runs.append(read_folder(Path(path), label, before))
    return runs


def run_of_row(row, label, path):
    """The run in a row of a table that --table has written."""
    if not row.keys() >= {"run", "model", "seed", "step", "val_loss"}:
        raise UsageError(f"{path} is no table of lab.compare --table: name folders of runs")
    facts = {name: float(row.get(name) or "nan") for name in FACTS}
    losses = {int(row["step"]): float(row["val_loss"] or "nan")}
    label = label if label else row["run"]
    return LoggedRun(label, row, losses, lambda step: facts, row["end"] == "diverged", {})


def row_of_run(run, step):
    """The row of a run in that table."""
    row = {"run": run.label} | run.flags               # which has "run", too, if read from a table
    row |= {"run": run.label, "end": "diverged" if run.diverged else "", "step": step}
    return row | {"val_loss": run.losses.get(step)} | run.facts_at(step)


def read_folder(folder, label, before=10):
    """The run in a folder that train.py has written."""
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

    def facts_at(step):
        return facts_of([row for row in log if int(row["step"]) <= step], before)

    return LoggedRun(label, flags, losses, facts_at, diverged, source)


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


def last_of(log, name):
    """The last number in a column of a log; NaN if there is none."""
    return [math.nan, *column(log, name).values()][-1]


def facts_of(log, before):
    """{name of FACTS: number} of a log, NaN for a column that it lacks."""
    facts = {"spikes": count_spikes(list(column(log, "loss").values()), before),
             "alive": last_of(log, "alive"), "w_max": last_of(log, "w_max")}
    norms = list(column(log, "grad_norm").values())
    for name, numbers in (("grad", norms[len(norms) // 2 :]),
                          ("tokens_per_s", column(log, "tokens_per_s").values())):
        facts[name] = statistics.median(numbers) if numbers else math.nan
    return {name: facts[name] for name in FACTS}


def count_spikes(losses, before):
    """How many losses lie more than 5 deviations above the mean of so many before them."""
    count = 0
    for n in range(before, len(losses)):
        last = losses[n - before : n]
        if losses[n] > statistics.fmean(last) + 5 * statistics.pstdev(last):
            count += 1
    return count


def last_common_step(runs):
    """The last step at which all runs that did not diverge have a validation loss."""
    steps = [set(run.losses) for run in runs if not run.diverged]
    if not steps:
        raise UsageError("all of these runs have diverged")
    if not set.intersection(*steps):
        raise UsageError("the runs have no step with a validation loss in common")
    return max(set.intersection(*steps))
