"""What may stand together in one figure, table or mean: the one rule of the lab.

Whatever stands together was measured alike: its rows are equal in all columns but those that the
figure varies. Otherwise an error names the column and two of its values. A seed counts once, what
is printed names the seeds that are in a mean, and a run that diverged is in none, but is counted.
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
    """What the columns of a kind of table are for.

    A label is yours, as in mine=out, or else the name of the model. Under one label all columns are
    equal but `own` and `free`.
    """
    tool: str
    own: tuple                                         # what was measured, of what: all are there
    free: tuple = ()                                   # may differ, too, as the seed does
    label: tuple = ()                                  # may differ between labels
    figure: tuple = ()                                 # equal in the whole figure; (): all others
    run: tuple = ("model", "seed")                     # what identifies a run
    asked: tuple = ()                                  # what older tables of the tool lack

    def fixed(self, rows):
        """The columns of rows that are equal under one label."""
        names = dict.fromkeys(name for row in rows for name in row)
        return [name for name in names if name not in (*self.own, *self.free)]

    def fixed_in_figure(self, rows):
        """Those of them that are equal in the whole figure."""
        if self.figure:
            return [name for name in self.fixed(rows) if name in self.figure]
        return [name for name in self.fixed(rows) if name not in self.label]


def measured(tool, *own, free=(), asked=()):
    """The Kind of the rows that a measuring tool writes: what it does not name is its protocol."""
    return Kind(tool, own, ("model", "seed", "step", "hash", "swe", "factor", *free),
                ("parameters", "seq_len"), asked=asked)


PERPLEXITY = measured("lab.perplexity", "document", "nats", asked=("positions",))
COPYING = measured("lab.copying", "string", "nats", free=("right", "beaten"))
COPYING_STEPS = replace(COPYING, run=("model", "seed", "step"))
# With many strings there is less text before them, so that the context has the same length.
CANDIDATES = measured("lab.copying", "string", "nats", "right", "beaten", "candidates", "before")
RETRIEVAL = measured("abcdigits.py or lab.passkey", "length", "depth", "accuracy")
# Runs are compared in what a label does not say. Losses on two texts, or two tasks, do not compare.
RUNS = Kind("train.py", ("seed", "val_loss"),
            ("out", "device", "resume", "force", "compile", "shard", "recompute", "log_every",
             "eval_every", "save_every", "data", "val", "torch", "run", "end", "step", *FACTS),
            figure=("corpus", "tokenizer", "seq_len", "digits"))
# In lab.scaling a label is a family, whose runs differ in their size and what is adapted to it.
SIZES = replace(RUNS, figure=(*RUNS.figure, "batch_tokens", "steps"), free=(
    *RUNS.free, "model", "parameters", "psi", "layers", "tiles", "d_E", "d_K", "d_V", "batch_size",
    "lr"))
LATENCY = Kind("lab.bench", ("model", "parameters", "setting", "length", "ms"), ("parts_ms",))
MECHANISMS = Kind("lab.mechanisms", ("model", "seed", "what", "length", "setting", "value"))
TILES = Kind("lab.tiles", ("layer", "tile", "w", "r", "alive"))
LATER = ("tokenizer", "dtype")                         # columns that our oldest tables lack


# ------------------------------------------------------------------------------------- the rule

def require_alike(groups, kind):
    """Raise UsageError unless rows were measured alike. groups: {label: its rows, dicts}"""
    rows = [row for of_label in groups.values() for row in of_label]
    require_equal(rows, kind.fixed_in_figure(rows), "the runs",
                  "measure each into a --table of its own")
    for label, of_label in groups.items():
        require_equal(of_label, kind.fixed(rows), f"the runs of {label}",
                      "give them labels, as in mine=PATH")


def require_equal(rows, columns, whose, advice):
    """Raise UsageError if rows differ in a column. An old row that lacks it is not asked."""
    for column in columns:
        values = dict.fromkeys(row[column] for row in rows if column in row)
        values = [value for value in values if value or column not in LATER]
        if len(values) > 1:
            one, other = (value if value else "(none)" for value in values[:2])
            raise UsageError(f"{whose} differ in {column} ({one} | {other}): {advice}")


def require_table(rows, kind, path):
    """Raise UsageError unless a tool has written rows: they have all columns of its own."""
    for column in kind.own:
        if not rows or column not in rows[0]:
            raise UsageError(f"{path} is no table of {kind.tool}: it has no column {column}")
    for column in kind.asked:
        if column not in rows[0]:
            raise UsageError(f"{path} is of an older {kind.tool}, without the column {column}: "
                             "move it away and measure again")


# ------------------------------------------------------------------------------- runs of train.py

def flags_that_differ(one, other):
    """The flags in which two runs, {flag: value}, differ. A run of an old table may lack some."""
    flags = [name for name in RUNS.fixed([one]) if name in other]
    return [name for name in flags if name != "parameters" and one[name] != other[name]]


def group_runs(runs, by=None):
    """{the label of runs, and their value of `by`: these runs}, each a mean of other seeds.

    by: a flag whose values get a group each, or None. runs: with `label`, `seed` and `flags`.
    """
    groups = {}
    for run in runs:
        if by and by not in run.flags:
            raise UsageError(f"--by {by} is no flag of {run.label}")
        name = f"{run.label}, {by} {run.flags[by]}" if by else run.label
        if any(run.seed == other.seed for other in groups.get(name, [])):
            raise UsageError(f"{name} has seed {run.seed} twice: label the runs, as in mine=out")
        groups.setdefault(name, []).append(run)
    require_alike({name: [run.flags for run in group] for name, group in groups.items()},
                  replace(RUNS, free=(*RUNS.free, by)))
    return groups


# --------------------------------------------------------------------------- rows of measurements

def read_measurements(words, kind):
    """The rows of tables, with labels as their models, which were measured alike.

    A run may have been measured again after an edit or after more training: then its last rows
    count.
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
    rows = [none | row for row in rows]
    for row in rows:
        groups.setdefault(row["model"], []).append(row)
    require_alike(groups, kind)
    return rows


def run_of(row, kind):
    """What identifies the run of a row."""
    return tuple(row[name] for name in kind.run)


def last_rows(rows, kind, path):
    """The rows of a table less those that were measured before an edit or before more training."""
    hashes = {}                                        # {(run, step, code): its weights'}
    for row in rows:
        weights, _, code = row["hash"].partition("-")
        if weights != hashes.setdefault((run_of(row, kind), row["step"], code), weights):
            raise UsageError(f"{path} has two runs of {row['model']}, seed {row['seed']}, step "
                             f"{row['step']}: move it away, and measure again; if both are "
                             "there, each into a --table of its own")
    last = {run_of(row, kind): (row["step"], row["hash"]) for row in rows}
    kept = [row for row in rows if (row["step"], row["hash"]) == last[run_of(row, kind)]]
    if len(kept) < len(rows):
        print(f"{path}: {len(rows) - len(kept)} rows are left out, measured before an edit or "
              "before more training", file=sys.stderr)
    return kept


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


def mean_of_seeds(of_seed, digits, seeds):
    """The mean of {seed: number} in words, and its seeds where they are not all of some seeds."""
    words = mean_in_words(of_seed.values(), digits)
    if of_seed and of_seed.keys() != seeds:
        words += f", seeds {seeds_in_words(of_seed)}"
    return words


def seeds_in_words(seeds):
    """How many seeds, and which: "3 (0-2)", "2 (0 5)", "0"."""
    numbers = sorted(map(int, seeds))
    if not numbers:
        return "0"
    names = " ".join(map(str, numbers))
    if len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        names = f"{numbers[0]}-{numbers[-1]}"
    return f"{len(numbers)} ({names})"
