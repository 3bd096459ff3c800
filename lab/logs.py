"""Runs of train.py, read from their folders or from a table of runs.

A table has a row for each run: its label, its flags, what was measured. A figure can be drawn from
it when the folders are gone.
"""
import glob
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lab.common import keep_rows
from support.cli import UsageError
from support.measure import named_paths, read_rows

BEST = ("best", "best_step")                           # the lowest validation loss, and when
FACTS = ("tokens_per_s", "alive", "w_max", "spikes", "grad")
MEASURED = ("end", "step", "val_loss", *BEST, *FACTS)


@dataclass(eq=False)
class Run:
    """flags: text by name; losses: {step: validation loss}; facts: {name of BEST, FACTS: x}.

    end: "", "diverged", or where a run is that has not made all its steps. curves: {column of the
    log: (steps, values)}, or None; source: {path: text}. A row of a table has none of these.
    """
    label: str
    flags: dict
    losses: dict
    facts: dict
    end: str
    curves: dict = None
    source: dict = None

    @property
    def seed(self):
        return self.flags["seed"]

    def loss_at(self, step=None):
        """The validation loss after so many steps; without such an evaluation the last one."""
        if self.end == "diverged" or not self.losses:
            return math.nan
        return self.losses.get(step, self.losses[max(self.losses)])


def read_runs(words, window=10):
    """The Runs that the words of a command line name, each once. window: see count_spikes."""
    runs, seen = [], set()
    for label, path in named_paths(words):
        place = Path(path).resolve()
        if place not in seen:
            is_table = path.endswith(".tsv")
            runs += read_table(path, label) if is_table else [read_run(path, label, window)]
        seen.add(place)
    return runs


def read_run(path, label="", window=10):
    """The Run in a folder of train.py."""
    folder = Path(path)
    if not (folder / "log.tsv").exists() or not (folder / "flags.txt").exists():
        for meant, runs in ((f"{folder}-*", f"{folder}-[0-9]*"),
                            (f"{folder}/*", f"{folder}/*/log.tsv")):
            if glob.glob(runs):
                raise UsageError(f"{folder} holds no run: do you mean '{meant}'?")
        raise UsageError(f"{folder} holds no run: check its name, or train one, python train.py "
                         f"--out {folder}")
    lines = (folder / "flags.txt").read_text(encoding="utf-8", errors="replace").splitlines()
    flags = dict(line.partition("\t")[::2] for line in lines)
    rows = [{name: float(x) for name, x in row.items() if x}
            for row in read_rows(folder / "log.tsv")]
    curves = {}
    for name in ("loss", "grad_norm", "val_loss", "tokens_per_s", "ms", "needle"):
        found = [(row["step"], row[name]) for row in rows if name in row]
        curves[name] = np.array(found).reshape(-1, 2).T
    losses = {int(step): x for step, x in zip(*curves["val_loss"])}
    last = {name: x for row in rows for name, x in row.items()}

    at = int(last.get("step", 0))
    end = "" if int(flags["steps"]) in losses else f"at step {at} of at most {flags['steps']}"
    if (folder / "diverged.txt").exists() or rose(losses, *curves["loss"]):
        end = "diverged"
    best = min(losses, key=losses.get, default=math.nan)
    steps, norms = curves["grad_norm"]
    facts = {"best": losses.get(best, math.nan), "best_step": best,
             "tokens_per_s": median(curves["tokens_per_s"][1]),
             "alive": last.get("alive", math.nan), "w_max": last.get("w_max", math.nan),
             "spikes": count_spikes(curves["loss"][1], window),
             "grad": median(norms[steps > at / 2])}
    label = label or folder.resolve().name.removesuffix(f"-{flags['seed']}")
    root = folder / "source"
    source = {path.relative_to(root).as_posix(): path.read_text("utf-8")
              for path in sorted(root.rglob("*.py"))}
    return Run(label, flags, losses, facts, end, curves, source)


def median(x):
    return float(np.median(x)) if len(x) else math.nan


def rose(losses, steps, training):
    """Whether a run ends above where its validation began, or has a validation loss that is NaN.

    losses: {step: validation loss}; training: those of the log, (n,), after so many steps. Means of
    an eighth of the log must have risen, too, since the first evaluation: where a model overfits
    they fall. Training losses alone say nothing, since a task gets harder as it is learned.
    """
    if not all(map(math.isfinite, losses.values())):
        return True
    if not losses or not len(training) or losses[max(losses)] <= losses[min(losses)]:
        return False
    n = max(len(training) // 8, 1)
    return training[-n:].mean() > training[steps <= min(losses)][-n:].mean()


def count_spikes(x, window):
    """How many of x, (n,), lie more than 5 deviations above the mean of the `window` before."""
    if len(x) <= window:
        return 0
    before = np.lib.stride_tricks.sliding_window_view(x, window)[:-1]
    return int((x[window:] > before.mean(-1) + 5 * before.std(-1)).sum())


def read_table(path, label=""):
    """The Runs of a table that keep_runs wrote."""
    rows = read_rows(path)
    if not rows or "run" not in rows[0] or not {*MEASURED} <= {*rows[0]}:
        raise UsageError(f"{path} is not a table of runs")
    return [Run(label or row["run"],
                {name: x for name, x in row.items() if name not in ("run", *MEASURED)},
                {int(row["step"]): float(row["val_loss"])},
                {name: float(row[name] or "nan") for name in BEST + FACTS},
                row["end"]) for row in rows]


def keep_runs(path, runs, step=None):
    """Write a row a run. val_loss is that after `step`, where the run has one, or its last.

    Raises UsageError if the row of another run would be lost; a run may have gone on.
    """
    names = dict.fromkeys(name for run in runs for name in run.flags)
    rows = []
    for run in runs:
        at = step if step in run.losses else max(run.losses, default=0)
        flags = {name: run.flags.get(name, "") for name in names}
        facts = {name: "" if math.isnan(x) else f"{x:.6g}" for name, x in run.facts.items()}
        rows.append({"run": run.label, **flags, "end": run.end, "step": str(at),
                     "val_loss": f"{run.loss_at(at):.6g}", **facts})
    keep_rows(path, rows, (*MEASURED, "steps"))
