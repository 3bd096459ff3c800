"""Tables of measurements: tab-separated text, a row for each measurement, as dicts of text.

A row says which run was measured (the columns RUN), what was measured, the values, and in "hash"
with which weights and which code.

Measuring tools write such tables by support/measure.py, and lab/figures.py draws them.
"""
import glob
import math
import os
from pathlib import Path

from support.cli import UsageError

RUN = ("model", "parameters", "seed", "seq_len", "tokenizer", "dtype", "step")


# ------------------------------------------------------------------------------------- files

def read_table(path):
    """The rows of a table, less a line that a kill cut off and the heads of appended tables."""
    if not Path(path).exists():
        raise UsageError(f"{path} does not exist: measure a model first (-h has the command)")
    lines = Path(path).read_text("utf-8", "replace").split("\n")[:-1]
    if not lines:
        return []
    head, *rows = [line.split("\t") for line in lines]
    return [dict(zip(head, row)) for row in rows if len(row) == len(head) and row != head]


def write_table(path, rows):
    """Write a whole table: the file is always the old one or the new one.

    A row may lack columns that others have.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    names = dict.fromkeys(name for row in rows for name in row)
    lines = [as_line(names), *(as_line(row.get(name, "") for name in names) for row in rows)]
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
    """[(label or "", path)] of words such as out/a.tsv, mine=out/a.tsv, mine=out/mine-*/a.tsv.

    A path that exists is that path, even if its name has an = or a pattern's [ ] in it.
    """
    named = []
    for word in map(str, words):
        label, equals, pattern = word.partition("=")
        if not equals or Path(word).exists():          # a folder may be named lr=0.1
            label, pattern = "", word
        paths = [pattern]                              # whoever opens it says that it is missing
        if not Path(pattern).exists():
            paths = sorted(glob.glob(pattern)) or paths
        named += [(label, path) for path in paths]
    return named


# ------------------------------------------------------------------------------ what is printed

def print_table(rows, title):
    """Print rows, dicts with the same names, in columns of equal width under these names.

    None and NaN are shown as -. A column that is empty in all rows is left out.
    """
    names = [name for name in rows[0] if any(row[name] != "" for row in rows)]
    cells = [[str(name) for name in names]]
    cells += [[shown(row[name]) for name in names] for row in rows]
    widths = [max(len(row[n]) for row in cells) for n in range(len(names))]
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
