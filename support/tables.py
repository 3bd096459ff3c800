"""Tables of measurements: tab-separated text, a row for each measurement, as dicts of text.

A row says which run was measured (the columns RUN), what was measured, the values, and in "hash"
with which weights and which code.

Measuring tools write such tables by support/measure.py, and lab/figures.py draws them.
"""
import glob
import math
import os
import sys
from pathlib import Path

from support.cli import UsageError

RUN = ("model", "parameters", "seed", "seq_len", "tokenizer", "dtype", "step")


# ------------------------------------------------------------------------------------- files

def read_table(path):
    """The rows of a table. A line that a killed process has left incomplete is no row."""
    if not Path(path).exists():
        raise UsageError(f"{path} does not exist: measure a model first (-h has the command)")
    lines = Path(path).read_text("utf-8", "replace").split("\n")[:-1]
    if not lines:
        return []
    head, *rows = [line.split("\t") for line in lines]
    return [dict(zip(head, row)) for row in rows if len(row) == len(head)]


def write_table(path, rows):
    """Write a whole table: the file is always the old one or the new one."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    lines = [as_line(rows[0].keys()), *(as_line(row.values()) for row in rows)]
    temporary.write_text("".join(lines), "utf-8")
    os.replace(temporary, path)


def add_row(path, row):
    """Append a row to a table, which begins with the names of its columns."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab+") as file:
        line = as_line(row.values())
        if file.seek(0, os.SEEK_END) == 0:
            line = as_line(row.keys()) + line
        else:
            file.seek(-1, os.SEEK_END)
            if file.read() != b"\n":                   # a killed process has left half a row
                line = "\n" + line
            file.seek(0)
            if file.readline() != as_line(row.keys()).encode():
                raise UsageError(f"{path} does not have the columns {' '.join(row)}: move it away, "
                                 "or name another table")
        file.write(line.encode())


def as_line(cells):
    """A line of a table. A tab in a cell, as in the name of a file, becomes a space."""
    return "\t".join(as_cell(x) for x in cells) + "\n"


def as_cell(x):
    """A cell of a table: "" for what does not apply."""
    if x is None:
        return ""
    text = f"{x:.12g}" if isinstance(x, float) else str(x)
    return " ".join(text.split("\t")).replace("\n", " ")


# ------------------------------------------------------------------- the tables of a command line

def named_paths(words):
    """[(label or "", path)] of words such as out/a.tsv, mine=out/a.tsv, mine=out/mine-*/a.tsv."""
    found = []
    for word in map(str, words):
        label, equals, pattern = word.partition("=")
        if not equals or Path(word).exists():          # a folder may be named lr=0.1
            label, pattern = "", word
        paths = sorted(glob.glob(pattern))
        if not paths:
            paths = [pattern]                          # whoever opens it says that it is missing
        found += [(label, path) for path in paths]
    return found


def read_tables(words, by_step=False):
    """The rows of several tables, to draw. The model of a labelled table is its label.

    A run may have been measured again after an edit or after more training: then its last rows
    count. by_step: each training step of a run counts. Raises UsageError if two runs would be one,
    of the same model and seed.
    """
    found, places = {}, {}
    for label, path in named_paths(words):
        rows = read_table(path)
        known = ("model", "parameters", "seed", "seq_len", "step", "hash")
        if not rows or not all(name in rows[0] for name in known):
            raise UsageError(f"{path} is not a table of measurements: name another")
        runs = [run_of(row | {"model": label or row["model"]}, by_step) for row in rows]
        last = {run: (row["step"], row["hash"]) for run, row in zip(runs, rows)}
        current = [(run, row) for run, row in zip(runs, rows)
                   if (row["step"], row["hash"]) == last[run]]
        if len(current) < len(rows):
            print(f"{path}: {len(rows) - len(current)} rows are left out, measured before an edit "
                  "or before more training", file=sys.stderr)
        for run, row in current:
            place = places.setdefault(run, (path, row["model"]))
            if place != (path, row["model"]):
                raise UsageError(f"{path} and {place[0]} both have {run[0]}, seed {row['seed']}: "
                                 f"label one, as in mine={path}")
            row = row | {"model": run[0]}
            found[tuple(row.values())] = row           # a row may be there twice
    return list(found.values())


def run_of(row, by_step):
    """What identifies the run of a row."""
    names = [name for name in RUN if name != "step" or by_step]
    return tuple(row.get(name, "") for name in names)


# ------------------------------------------------------------------------------ what is printed

def print_table(columns, rows, title):
    """Print rows in columns of equal width. None and NaN are shown as -."""
    cells = [[str(name) for name in columns]]
    cells += [[shown(x) for x in row] for row in rows]
    widths = [max(len(row[n]) for row in cells) for n in range(len(columns))]
    print(f"\n{title}")
    for row in cells:
        print("  ".join(x.rjust(width) for x, width in zip(row, widths)))


def shown(x):
    """A cell of a printed table."""
    if x is None:
        return "-"
    if not isinstance(x, float):
        return str(x)
    if math.isnan(x):
        return "-"
    return f"{x:.5g}"
