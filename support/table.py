"""A table of measurements: one TSV beside a checkpoint, one row per cell, added when measured.

A row names the run and the cell that was measured, and has the values and a hash of the weights and
the equations. Rerun a command to measure what is missing. Rows are appended, so two commands
may fill one table, and nothing is locked.
"""
import glob
import math
import re
import sys
import time
from contextlib import contextmanager
from pathlib import Path

from support.cli import UsageError, clock, on_one_line, replacing

RUN = ("model", "parameters", "seed", "seq_len", "init_weights", "changes", "step")
# Flags in which the runs of one model may differ.
MAY_DIFFER = ("seed", "log_every", "eval_every", "save_every")
# Lines of a run's flags.txt that do not say what was trained, or that a row says better.
UNSEEN = (*MAY_DIFFER, "data", "classes", "versions")


class Table:
    """The rows of one hash at `path`. keys: the columns that name a cell; values: those measured.

    Rows of another hash are replaced when the first new one is added.
    """

    def __init__(self, path, keys, values, model_hash):
        self.path, self.keys, self.hash = Path(path), tuple(keys), model_hash
        self.columns = (*keys, *values, "hash")
        self.rows, self.replaced = {}, 0
        self.in_file = False
        if self.path.exists():
            rows, wrong = read_file(self.path, self.columns)
            self.rows = {self.key_of(row): row for row in rows if row["hash"] == model_hash}
            self.replaced = wrong + sum(row["hash"] != model_hash for row in rows)
            self.in_file = self.path.read_bytes().endswith(b"\n")

    def key_of(self, cell):
        return tuple(as_text(cell[name]) for name in self.keys)

    def missing(self, cells):
        """The cells (dicts by `keys`) still to measure, after a line about the others."""
        cells = {self.key_of(cell): cell for cell in cells}
        found = [cell for key, cell in cells.items() if key not in self.rows]
        if len(found) < len(cells):
            print(f"reusing {len(cells) - len(found)} of {len(cells)} measurements in {self.path}",
                  file=sys.stderr)
        if self.replaced and found:
            print(f"replacing {self.replaced} row{'s' * (self.replaced > 1)} in {self.path}: other "
                  "weights or equations, or damaged", file=sys.stderr)
        return found

    def add(self, cell, **values):
        """Append the row of a cell."""
        row = cell | values | {"hash": self.hash}
        row = {name: as_text(row[name]) for name in self.columns}
        self.rows[self.key_of(row)] = row
        if self.in_file and not self.replaced and self.path.exists():
            try:
                with open(self.path, "a", encoding="utf-8") as file:
                    file.write(as_line(row.values()))
            except OSError as e:
                e.filename = str(self.path)            # a full disk does not say which file
                raise
        else:
            # Another command may have begun the table, too: its rows stay.
            others = read_file(self.path, self.columns)[0] if self.path.exists() else []
            others = [row for row in others if row["hash"] == self.hash]
            self.rows = {self.key_of(row): row for row in others} | self.rows
            write_rows(self.path, [*self.rows.values()])
            self.in_file, self.replaced = True, 0

    @contextmanager
    def measuring(self):
        """Inside, Ctrl-C says what is kept."""
        try:
            yield
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"stopped; rows in {self.path}: {len(self.rows)}; rerun the "
                                    "command to resume") from None

    def rows_of(self, cells):
        """The rows of cells that were measured, dicts of text."""
        keys = map(self.key_of, cells)
        return [self.rows[key] for key in keys if key in self.rows]


def beside(ckpt_path, name):
    """The path of a checkpoint's table or figure. For m.pt its name begins with m_."""
    path = Path(ckpt_path)
    return path.with_name(name if path.name == "ckpt.pt" else f"{path.stem}_{name}")


def describe_run(ckpt):
    """What a checkpoint's run is, by RUN."""
    parameters = sum(W.numel() for W in ckpt["weights"].values())
    return {"model": ckpt["model"], "parameters": parameters, "seed": ckpt["args"]["seed"],
            "seq_len": ckpt["args"]["seq_len"], "init_weights": ckpt["init_weights"],
            "changes": "; ".join(ckpt["changes"]), "step": ckpt["step"]}


# ------------------------------------------------------------------------------------- files

def read_rows(path):
    """The rows of a table as dicts of text. Prints how many were incomplete."""
    rows, torn = read_file(path)
    tell(path, torn)
    return rows


def tell(path, torn):
    """Print how many rows of a table are incomplete."""
    if torn:
        print(f"skipped {torn} incomplete row{'s' * (torn > 1)} of {path}", file=sys.stderr)


def read_file(path, columns=None):
    """(the complete rows, how many are not). A killed process may leave half a last row.

    Raises UsageError if there is no file, or a table with other columns.
    """
    if not Path(path).exists():
        raise UsageError(f"{path} does not exist: measure a model first (-h has the command)")
    text = Path(path).read_text(encoding="utf-8", errors="replace")
    *lines, last = [line.split("\t") for line in text.split("\n")]
    head, *lines = lines or [[]]
    if head and columns and head != list(columns):
        raise UsageError(f"{path} does not have the columns {' '.join(columns)}: move it away, or "
                         "name another")
    rows = [dict(zip(head, line)) for line in lines if len(line) == len(head)]
    return rows, len(lines) - len(rows) + bool(head and last != [""])


def named_paths(words):
    """[(label or "", path)] of words like mine=out/mine-*, which may be patterns."""
    found = []
    for word in map(str, words):
        label, equals, path = word.partition("=")
        if not equals or Path(word).exists():          # a folder may be named lr=0.1
            label, path = "", word
        found += [(label, name) for name in sorted(glob.glob(path)) or [path]]
    return found


def read_tables(paths, value):
    """The rows of several tables of one measurement, for a figure. value: the column measured.

    A path may have a label, mine=out/abcdigits.tsv: the models of its rows are then called
    multiscreen=mine. It may be a pattern, mine=out/mine-*/abcdigits.tsv. Runs that began with other
    weights, or whose flags were changed, are models of their own. A note says where the equations
    of one model differ, and its flags where tables are in their runs' folders. Raises UsageError if
    two runs, by their weights, would be one in a figure, or if two tables have other values for one
    cell.
    """
    rows, places, runs, known, columns = {}, {}, {}, {}, None
    for label, path in named_paths(paths):
        found = read_measured(path, columns, value)
        columns, flags = tuple(found[0]), flags_beside(path)
        for row in found:
            if label:
                row["model"] = f"{re.split('[:=]', row['model'])[0]}={label}"
            key = tuple(row[name] for name in columns[:-2])
            weights, _, of_model = row["hash"].partition("-")
            before, same = runs.setdefault(key[: len(RUN)], (path, weights))
            if same == weights:
                before = places.setdefault(key, path)
            if same != weights or before != path and rows[key] != row:
                raise UsageError(f"{path} and {before} both have {row['model']}, seed "
                                 f"{row['seed']}: label the runs, as in mine={path}")
            rows[key] = row
            one = known.setdefault((row["model"], row["parameters"]), {})
            for name, text in (flags | {"equations": of_model}).items():
                one.setdefault(name, set()).add(text)
    for (model, _), values in known.items():
        if names := [name for name, found in values.items() if len(found) > 1]:
            print(f"note: the runs of {model} differ in {', '.join(names)}", file=sys.stderr)
    return [row | {"model": name_by_training(row)} for row in rows.values()]


def read_measured(path, columns, value):
    """The rows of one table of measurements. columns: see `read_file`; value: the one measured."""
    rows, torn = read_file(path, columns)
    if not rows:
        raise UsageError(f"{path} has no rows: measure a model first")
    columns = tuple(rows[0])
    if columns[: len(RUN)] != RUN or columns[-2:] != (value, "hash"):
        raise UsageError(f"{path} does not have the columns {' '.join(RUN)} .. {value} hash: "
                         "name another")
    tell(path, torn)
    for row in rows:
        check_numbers(row, path, value)
    return rows


def read_flags(out):
    """{name: text} of a run's flags.txt, or {} if it has none."""
    path = out / "flags.txt"
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    return dict(line.partition("\t")[::2] for line in lines)


def flags_beside(path):
    """{name: text} of what a run trained, if a table is in its folder; without its seed."""
    flags = read_flags(Path(path).parent)
    return {name: text for name, text in flags.items() if name not in UNSEEN}


def name_by_training(row):
    """The name of a row's model. It says so if the run did not simply train."""
    words = ["--init"] * bool(row["init_weights"])
    words += [re.sub(r"from step \d+: ", "", row["changes"])] * bool(row["changes"])
    if not words:
        return row["model"]
    family, variant = re.match("([^:=]*)[:=]?(.*)", row["model"]).groups()
    return f"{family}={', '.join([variant or family, *words])}"


def check_numbers(row, path, value):
    """Raise UsageError if a cell that figures count with is not a finite number.

    Sizes are whole numbers. Some may be missing: random weights have no training length.
    """
    for name in ("parameters", "seed", "seq_len", "step", "length", "trials", value):
        cell = row.get(name, "")
        try:
            numbers = [float(x) if name == value else int(x) for x in cell.split()]
            right = all(map(math.isfinite, numbers)) and (
                numbers or name not in ("parameters", "length", value))
        except ValueError:
            right = False
        if not right:
            raise UsageError(f"{path}: {name} is {cell!r} in a row: measure it again")


def keep_rows(path, rows, measured=()):
    """Write the rows of a figure beside it. Raises UsageError if existing rows would be lost.

    measured: columns in which a row may have new values.
    """
    def known(row):
        return {name: x for name, x in row.items() if name not in measured}

    if Path(path).exists():
        found, torn = read_file(path, tuple(rows[0]))
        new = [known(row) for row in rows]
        if lost := torn + sum(known(row) not in new for row in found):
            raise UsageError(f"{path} already holds {lost} other row{'s' * (lost > 1)}: add this "
                             "table to the inputs, or choose another --out")
    write_rows(path, rows)


def write_rows(path, rows):
    """Write a whole table, dicts of text: the file is always the old one or the new one."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with replacing(Path(path)) as file:
        file.writelines(as_line(cells).encode() for cells in [rows[0], *map(dict.values, rows)])


def as_line(cells):
    return "\t".join(cells) + "\n"


def as_text(x):
    """A cell: empty if it does not apply, with blanks for the tabs of a file's name."""
    if x is None or x is False:
        return ""
    if isinstance(x, float):
        return f"{x:.12g}"
    return "yes" if x is True else on_one_line(x)


# ------------------------------------------------------------------------------ what is printed

def print_table(columns, rows, title):
    """Print rows in columns of equal width."""
    print(f"\n{title}\n{as_columns(columns, rows)}")


def as_columns(columns, rows):
    """Rows in columns of equal width, a line each. None and NaN are shown as -."""
    cells = [list(columns), *([cell_text(x) for x in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells)]
    return "\n".join("  ".join(x.rjust(n) for x, n in zip(row, widths)) for row in cells)


def cell_text(x):
    """A cell of a table."""
    if x is None or isinstance(x, float) and math.isnan(x):
        return "-"
    return f"{x:.5g}" if isinstance(x, float) else str(x)


class Progress:
    """One line for each unit of work, with the time left by its share of the whole."""

    def __init__(self, total):
        self.total, self.done, self.began = total, 0, time.perf_counter()

    def add(self, amount, text):
        """An amount of the total is done; `text` says which."""
        self.done += amount
        seconds = time.perf_counter() - self.began
        left = clock(seconds * (self.total / self.done - 1))
        print(f"{text}   {clock(seconds)}, about {left} left", file=sys.stderr, flush=True)
