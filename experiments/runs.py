"""Runs of train.py, read from their folders or from a table of runs.

A table of runs has a row for each run: its name, its flags, what was measured. A figure can be
drawn from it when the folders are gone.
"""
import glob
import hashlib
import math
import re
import statistics
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from support.cli import Parser, UsageError, own_folder
from support.data import STREAMS
from support.source import bare_lines, parts_of
from support.table import keep_rows, named_paths, read_flags, read_rows

# Lines of flags.txt without which a run is not comparable.
NEEDED = ("model", "psi", "parameters", "data", "tokenizer", "seq_len", "batch_tokens", "steps",
          "lr", "equations", "classes", "seed")
MEASURED = ("end", "step", "val_loss", "best", "best_step", "tokens_per_s", "alive", "w_max",
            "spikes", "grad")
FACTS = MEASURED[3:]


@dataclass
class Run:
    """flags: text by name, and "source", a hash of the source; losses: {step: validation loss};
    facts: of FACTS, or NaN.

    end: "", "diverged", or where a run is that goes on or has learned.
    curve: arrays step, loss, gradient norm, or None.
    source: {path: lines}, or None where only its hash is known.
    """
    label: str
    named_by: str                                      # "label", "seed": name-SEED, or "folder"
    flags: dict
    losses: dict
    facts: dict
    end: str = ""
    curve: tuple = None
    source: dict = None

    @property
    def seed(self):
        return self.flags["seed"]

    def loss_at(self, step=None):
        """The validation loss after so many steps; without such an evaluation the last one."""
        if self.end == "diverged" or not self.losses:
            return math.nan
        return self.losses.get(step, self.losses[max(self.losses)])


def runs_parser(description, nargs="+"):
    """The flags of a script that draws from runs."""
    p = Parser(description)
    p.add_argument("runs", nargs=nargs, metavar="RUN",
                   help="folders of train.py, label=folder, or tables of runs")
    p.add_argument("--out", type=own_folder, default=Path("out"),
                   help="folder for the results [out]")
    return p


def read_runs(words, window=10):
    """The Runs that the words of a command line name, each once. window: see count_spikes."""
    runs, seen = [], set()
    for label, path in named_paths(words):
        place = Path(path).resolve()
        if place in seen:
            continue
        seen.add(place)
        is_table = path.endswith(".tsv")
        runs += read_table(path, label) if is_table else [read_folder(path, label, window)]
    return runs


# ------------------------------------------------------------------------------------ a folder

def read_folder(path, label="", window=10):
    """The Run in a folder of train.py."""
    folder = Path(path)
    if not (folder / "log.tsv").exists() or not (folder / "flags.txt").exists():
        if glob.glob(f"{folder}-[0-9]*"):
            raise UsageError(f"{folder} holds no run: do you mean '{folder}-*'?")
        if "*" in str(path):
            raise UsageError(f"{path} matches no run")
        raise UsageError(f"{folder} holds no run: train one, python train.py --out {folder}")
    flags = read_flags(folder)
    if lacking := [name for name in NEEDED if name not in flags]:
        raise UsageError(f"{folder / 'flags.txt'} lacks {', '.join(lacking)}")
    rows = read_log(folder / "log.tsv")
    losses = {int(row["step"]): row["val_loss"] for row in rows if "val_loss" in row}
    steps = int(max((row["step"] for row in rows), default=0))
    stopped = (folder / "diverged.txt").exists()
    end = "diverged" if stopped or has_diverged(rows) else ""
    if not end and int(flags["steps"]) not in losses:
        most = "at most " * (flags["data"] in STREAMS)
        end = f"at step {steps} of {most}{flags['steps']}"
    curve = step, loss, norm = columns_of(rows, "step", "loss", "grad_norm")

    def last(column):
        return next((row[column] for row in reversed(rows) if column in row), math.nan)

    speeds = [row["tokens_per_s"] for row in rows if "tokens_per_s" in row] or [math.nan]
    late = norm[step > steps / 2]
    best = min(losses, key=losses.get, default=math.nan)
    facts = {"best": losses.get(best, math.nan), "best_step": best,
             "tokens_per_s": statistics.median(speeds), "alive": last("alive"),
             "w_max": last("w_max"), "spikes": count_spikes(loss, window),
             "grad": float(np.median(late)) if len(late) else math.nan}
    source = read_source(folder / "source", flags["classes"].split())
    if source:
        flags["source"] = hashlib.sha256(repr(source).encode()).hexdigest()[:12]
    name, seed = folder.resolve().name, f"-{flags['seed']}"
    named_by = "label" if label else "seed" if name.endswith(seed) else "folder"
    return Run(label or name.removesuffix(seed), named_by, flags, losses, facts, end, curve,
               source)


def read_log(path):
    """The rows of a log as dicts of numbers, without empty cells."""
    try:
        rows = [{name: float(x) for name, x in row.items() if x} for row in read_rows(path)]
    except ValueError as e:
        raise UsageError(f"{path}: {e}") from None
    if any("step" not in row for row in rows):
        raise UsageError(f"{path} is not a log of train.py")
    return rows


def has_diverged(rows):
    """Whether a training loss ends more than half a nat above an earlier one.

    Means over an eighth of the log are compared; earlier is also the first loss. A validation loss
    counts only if it is not finite: it also rises where a run has read its texts too often.
    """
    losses = [row["loss"] for row in rows if "loss" in row]
    if not all(math.isfinite(row.get("val_loss", 0.0)) for row in rows):
        return True
    if not losses:
        return False
    n = max(len(losses) // 8, 1)
    means = [sum(losses[i : i + n]) / n for i in range(len(losses) - n + 1)]
    return not means[-1] <= min(losses[0], *means) + 0.5


def columns_of(rows, *names):
    """Arrays (n,) of the rows of a log that have all of these columns."""
    rows = [row for row in rows if set(names) <= row.keys()]
    return tuple(np.array([row[name] for row in rows]) for name in names)


def count_spikes(x, window):
    """How many of x, (n,), lie more than 5 deviations above the mean of the `window` before."""
    if len(x) <= window:
        return 0
    before = np.lib.stride_tricks.sliding_window_view(x, window)[:-1]
    return int((x[window:] > before.mean(-1) + 5 * before.std(-1)).sum())


def read_source(folder, classes):
    """{path: lines} of what a run is made of: of a model's files, the definitions it reaches."""
    files = [path for path in sorted(folder.rglob("*.py")) if path.is_file()]
    text = {path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8")
            for path in files}
    parts = parts_of(text, classes)
    # What a new class imports is no news.
    parts = {path: [line for line in lines if not re.fullmatch(r"\w+ is [\w.]+", line)]
             for path, lines in parts.items()}
    return {path: parts.get(path) or bare_lines(text[path]) for path in text
            if path in parts or not is_of_models(path)}


def is_of_models(path):
    return path == "multiscreen.py" or path.startswith("baselines/")


# ------------------------------------------------------------------------------------- a table

def read_table(path, label=""):
    """The Runs of a table that keep_runs wrote."""
    rows = read_rows(path)
    if not rows or [*rows[0]][:2] != ["run", "named_by"] or not {*NEEDED, *MEASURED} <= {*rows[0]}:
        raise UsageError(f"{path} is not a table of runs")
    runs = []
    for row in rows:
        try:
            facts = {name: float(row[name] or "nan") for name in FACTS}
            losses = {int(row["step"]): float(row["val_loss"])}
        except ValueError as e:
            raise UsageError(f"{path}: {e}") from None
        flags = {name: x for name, x in row.items() if name not in ("run", "named_by", *MEASURED)}
        runs.append(Run(label or row["run"], "label" if label else row["named_by"], flags, losses,
                        facts, row["end"]))
    return runs


def keep_runs(path, runs, step=None):
    """Write a row a run. val_loss is that after `step`, where the run has one, or its last.

    Raises UsageError if the row of another run would be lost; a run may have gone on.
    """
    names = {name: None for run in runs for name in run.flags}
    rows = []
    for run in runs:
        at = step if step in run.losses else max(run.losses, default=0)
        numbers = {"val_loss": f"{run.loss_at(at):.6g}"}
        numbers |= {name: f"{x:.6g}" for name, x in run.facts.items() if x == x}
        numbers |= {"end": run.end, "step": str(at)}
        rows.append({"run": run.label, "named_by": run.named_by}
                    | {name: run.flags.get(name, "") for name in names}
                    | {name: numbers.get(name, "") for name in MEASURED})
    keep_rows(path, rows, (*MEASURED, "steps"))
