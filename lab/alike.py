"""What may stand together in one figure, table or mean: the one rule of the lab.

Whatever stands together was measured alike: its rows are equal in all columns but those that the
figure varies. Otherwise an error names the column and two of its values. A seed counts once, what
is printed names the seeds that are in a mean, and a run that diverged is in none, but is counted.

What a column is for is said once for each kind of table, below, by its role:

seed, value      may differ
axis             may differ: it is on the axis of the figure, or has a row each in a table
item             may differ: a mean is taken over documents, strings or depths
setting          may differ: it tells the curves of one label apart
free             may differ: it says who measured, not what
label            is equal under one label, which is yours, as in mine=out, or the name of the model
figure           is equal in the whole figure
"""
import math
import statistics
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from support.cli import UsageError
from support.run import read_flags
from support.tables import named_paths, read_table

FACTS = ("grad", "spikes", "alive", "w_max", "tokens_per_s")


# ------------------------------------------------------------------------- the kinds of tables

@dataclass(frozen=True)
class Kind:
    """The role of each column of a kind of table. others: the role of all that have no other."""
    tool: str
    roles: dict
    others: str
    # What to do about columns that differ; {} stands for the column and its value.
    if_figure: str = "draw those that are equal"
    if_label: str = "draw those that are equal"

    def role(self, column):
        return self.roles.get(column, self.others)

    def the(self, role):
        """The name of the first column with a role, or ""."""
        return next((name for name, of_name in self.roles.items() if of_name == role), "")

    def columns(self, role, rows):
        """The columns of rows that have a role."""
        names = dict.fromkeys(name for row in rows for name in row)
        return [name for name in names if self.role(name) == role]

    def by(self, column):
        """This kind with a column on the axis."""
        return replace(self, roles=self.roles | {column: "axis"})


def measured(tool, **roles):
    """The Kind of the rows that a measuring tool writes: what it does not name is its protocol."""
    who = {"model": "free", "seed": "seed", "step": "free", "hash": "free", "swe": "setting",
           "factor": "setting", "parameters": "label", "seq_len": "label"}
    choose = "or choose some with --only '{}'"
    return Kind(tool, who | roles, "figure", f"measure them alike, {choose}",
                f"label them, as in mine=TABLE, {choose}")


PERPLEXITY = measured("lab.perplexity", document="item", nats="value")
COPYING = measured("lab.copying", string="item", nats="value", right="value", beaten="value")
COPYING_STEPS = COPYING.by("step")
# With many strings there is less text before them, so that the context has the same length.
CANDIDATES = COPYING.by("candidates").by("before")
RETRIEVAL = measured("abcdigits.py or lab.passkey", length="axis", depth="item", accuracy="value")
# Runs are compared in what a label does not say. Losses on two texts, or two tasks, do not compare.
RUNS = Kind("train.py", {"seed": "seed", "val_loss": "value"} | dict.fromkeys(FACTS, "value")
            | dict.fromkeys(("corpus", "tokenizer", "seq_len", "digits"), "figure")
            | dict.fromkeys(("out", "device", "resume", "force", "compile", "shard", "recompute",
                             "log_every", "eval_every", "save_every", "data", "torch", "run",
                             "end", "step"), "free"), "label",
            "their losses do not compare", "label them, as in mine=out, or compare them with --by")
# In lab.scaling a label is a family, whose runs differ in their size and what is adapted to it.
SIZES = Kind("train.py", RUNS.roles | {"batch_tokens": "figure", "steps": "figure"}
             | dict.fromkeys(("model", "parameters", "psi", "layers", "tiles", "d_E", "d_K", "d_V",
                              "batch_size", "lr"), "axis"), "label")
LATENCY = Kind("lab.bench", {"model": "free", "setting": "setting", "length": "axis",
                             "parameters": "axis", "ms": "value",
                             "parts_ms": "value"}, "figure")       # parts_ms: of older tables
MECHANISMS = Kind("lab.mechanisms", {"model": "free", "seed": "seed", "what": "axis",
                                     "length": "axis", "setting": "setting", "value": "value"},
                  "free")
TILES = Kind("lab.tiles", {"layer": "item", "tile": "item", "seq_len": "figure", "w": "value",
                           "r": "value", "alive": "value"}, "figure")
LATER = ("tokenizer", "dtype")                         # columns that our oldest tables lack


# ------------------------------------------------------------------------------------- the rule

def require_alike(groups, kind):
    """Raise UsageError unless rows were measured alike. groups: {label: its rows, dicts}"""
    rows = [row for of_label in groups.values() for row in of_label]
    require_equal(rows, kind.columns("figure", rows), "the runs", kind.if_figure)
    for label, of_label in groups.items():
        require_equal(of_label, kind.columns("label", rows), f"the runs of {label}", kind.if_label)


def require_equal(rows, columns, whose, advice):
    """Raise UsageError if rows differ in a column. An old row that lacks it is not asked."""
    for column in columns:
        values = dict.fromkeys(row[column] for row in rows if column in row)
        values = [value for value in values if value or column not in LATER]
        if len(values) > 1:
            both = " | ".join(value if value else "(none)" for value in values[:2])
            raise UsageError(f"{whose} differ in {column} ({both}): "
                             f"{advice.format(f'{column}={values[0]}')}")


def require_table(rows, kind, path):
    """Raise UsageError unless a tool has written rows: they have all columns that it names."""
    needed = [name for name, role in kind.roles.items() if role != "value"]
    for column in (*needed, kind.the("value")):
        if not rows or column not in rows[0]:
            raise UsageError(f"{path} is no table of {kind.tool}: it has no column {column}")


# ------------------------------------------------------------------------------- runs of train.py

def flags_that_differ(one, other):
    """The flags in which two runs, {flag: value}, differ. A run of an old table may lack some."""
    flags = [name for name in one if RUNS.role(name) in ("label", "figure") and name in other]
    return [name for name in flags if name != "parameters" and one[name] != other[name]]


def group_runs(runs, by=None):
    """{the label of runs, and their value of `by`: these runs}, each a mean of other seeds.

    by: a flag whose values get a group each, or None. runs: with `label`, `seed` and `flags`.
    """
    groups, kind = {}, RUNS
    if by:
        kind = RUNS.by(by)
    for run in runs:
        if by and by not in run.flags:
            raise UsageError(f"--by {by} is no flag of {run.label}")
        name = f"{run.label}, {by} {run.flags[by]}" if by else run.label
        if any(run.seed == other.seed for other in groups.get(name, [])):
            raise UsageError(f"{name} has seed {run.seed} twice: label the runs, as in mine=out")
        groups.setdefault(name, []).append(run)
    require_alike({name: [run.flags for run in group] for name, group in groups.items()}, kind)
    return groups


# --------------------------------------------------------------------------- rows of measurements

def read_measurements(words, kind, only=()):
    """The rows of tables, with labels as their models, which were measured alike.

    A run may have been measured again after an edit or after more training: then its last rows
    count. only: of the rows those that have all of these "column=value".
    """
    rows, sources, flags = [], {}, {}
    for label, path in named_paths(words):
        table, beside = read_table(path), Path(path).parent / "flags.txt"
        require_table(table, kind, path)
        for row in last_rows(table, kind, path):
            source, row = (path, row["model"]), row | {"model": label if label else row["model"]}
            first, _ = sources.setdefault(run_of(row, kind), source)
            if sources[run_of(row, kind)] != source:
                raise UsageError(f"{path} and {first} both have {row['model']}, seed "
                                 f"{row['seed']}: label one, as in mine={path}")
            rows.append(row)
        if beside.exists():
            flags.setdefault(row["model"], []).append(read_flags(beside.parent))
    for name, of_name in flags.items():
        require_alike({name: of_name}, RUNS)

    # What another tool's table lacks is a difference.
    none, groups = {name: "" for row in rows for name in row}, {}
    rows = choose([none | row for row in rows], only)
    for row in rows:
        groups.setdefault(row["model"], []).append(row)
    require_alike(groups, kind)
    return rows


def run_of(row, kind):
    """What identifies the run of a row."""
    if kind.role("step") == "axis":
        return row["model"], row["seed"], row["step"]
    return row["model"], row["seed"]


def last_rows(rows, kind, path):
    """The rows of a table less those that were measured before an edit or before more training.

    A row may be there twice, and counts once.
    """
    last = {run_of(row, kind): (row["step"], row["hash"]) for row in rows}
    kept = [row for row in rows if (row["step"], row["hash"]) == last[run_of(row, kind)]]
    if len(kept) < len(rows):
        print(f"{path}: {len(rows) - len(kept)} rows are left out, measured before an edit or "
              "before more training", file=sys.stderr)
    return list({tuple(row.values()): row for row in kept}.values())


def choose(rows, only):
    """The rows that have all of some "column=value"."""
    for word in only:
        column, _, value = word.partition("=")
        values = dict.fromkeys(row.get(column, "") for row in rows)
        if value not in values:
            raise UsageError(f"--only {word}: no row has it; {column} is {' | '.join(values)}")
        rows = [row for row in rows if row.get(column, "") == value]
    return rows


# ------------------------------------------------------------------------- means over the seeds

def mean_and_std(numbers):
    """(mean, standard deviation); NaN if one of the numbers is NaN, or where there are too few."""
    numbers = [float(x) for x in numbers]
    if not numbers or any(math.isnan(x) for x in numbers):
        return math.nan, math.nan
    std = statistics.stdev(numbers) if len(numbers) > 1 else math.nan
    return statistics.fmean(numbers), std


def mean_in_words(numbers, digits):
    """"mean ± deviation" of a number for each seed; of one seed "mean", of none "-"."""
    mean, std = mean_and_std(numbers)
    if math.isnan(mean):
        return "-"
    words = f"{mean + 1e-9:.{digits}f}"                # 98.25 is 98.3
    if math.isnan(std):
        return words
    return f"{words} ± {std:.{digits}f}"


def seeds_in_words(seeds):
    """How many seeds, and which: "3 (0-2)", "2 (0 5)", "0"."""
    numbers = sorted(map(int, seeds))
    if not numbers:
        return "0"
    names = " ".join(map(str, numbers))
    if len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        names = f"{numbers[0]}-{numbers[-1]}"
    return f"{len(numbers)} ({names})"
