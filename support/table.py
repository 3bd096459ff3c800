"""A table of measurements: a TSV beside a checkpoint, with a row per cell, appended when measured.

A row names the run and the cell, and has the values and a hash of the weights and the code that
were measured. Rows are only ever appended, so none is lost, and a row is reused only for its own
hash: undo an edit, and the old rows count again. Nothing is locked; two commands may fill one
table.
"""
import glob
import math
import os
import re
import sys
import time
from pathlib import Path

from support.checkpoint import read_checkpoint, weights_hash
from support.cli import UsageError, clock, naming, on_one_line, replacing
from support.source import ROOT

RUN = ("model", "parameters", "seed", "seq_len", "init_weights", "changes", "step")
# The tables that a checkpoint has beside it, and in which only its own rows count.
BESIDE = ("abcdigits", "copying", "latency", "passkey", "perplexity")


class Table:
    """The rows of one hash at `path`. keys: the columns of a cell; values: those measured."""

    def __init__(self, path, keys, values, model_hash):
        self.path, self.keys, self.hash = Path(path), tuple(keys), model_hash
        self.columns = (*keys, *values, "hash")
        rows, head = [], b""
        if self.path.exists():
            rows = read_rows(self.path)
            with open(self.path, "rb") as file:
                head = file.readline()
        if head not in (b"", as_line(self.columns)):
            raise UsageError(f"{path} does not have the columns {' '.join(self.columns)}: move it "
                             "away, or name another with --table")
        self.rows = {self.key_of(row): row for row in rows if row["hash"] == model_hash}
        self.last = last_hashes(rows)

    def key_of(self, cell):
        return tuple(as_text(cell[name]) for name in self.keys)

    def reuse(self, cells):
        """Reuse the rows of some cells, dicts by `keys`, after a line that says so.

        Returns the cells that are still to be measured. If an edit was measured since, one more row
        is appended, which makes the reused ones the run's last again.
        """
        cells = {self.key_of(cell): cell for cell in cells}
        found = [cell for key, cell in cells.items() if key not in self.rows]
        if len(found) < len(cells):
            print(f"reusing {len(cells) - len(found)} of {len(cells)} measurements in {self.path}",
                  file=sys.stderr)
        for row in self.rows_of(cells.values()):
            if self.last[run_of(row)] != self.hash:
                self.append(row)
        return found

    def add(self, cell, **values):
        """Append the row of a cell."""
        row = cell | values | {"hash": self.hash}
        row = {name: as_text(row[name]) for name in self.columns}
        self.append(row)
        self.rows[self.key_of(row)] = row

    def append(self, row):
        """Write a row on a line of its own, even after half a row that a killed process left."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with naming(self.path), open(self.path, "ab+") as file:
            before = as_line(self.columns)
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                before = b"" if file.read() == b"\n" else b"\n"
            file.write(before + as_line(row.values()))
        self.last[run_of(row)] = self.hash

    def rows_of(self, cells):
        """The rows of cells that were measured, dicts of text."""
        keys = map(self.key_of, cells)
        return [self.rows[key] for key in keys if key in self.rows]


def beside(ckpt_path, name, given=None):
    """The path of a checkpoint's table: `given` by --table, or beside it, as m_NAME for m.pt.

    If the model is bundled, or its folder cannot be written to, the table is in out/; a line says
    so. Raises UsageError if it cannot be written there either.
    """
    ckpt_path = Path(ckpt_path)
    in_folder = ckpt_path.name == "ckpt.pt"
    path = Path(given or ckpt_path.with_name(name if in_folder else f"{ckpt_path.stem}_{name}"))
    moves = not given and (path.resolve().parent == ROOT / "models" or not can_write(path))
    if moves:
        label = ckpt_path.resolve().parent.name if in_folder else ckpt_path.stem
        path = Path("out", f"{label}_{name}")
    if not can_write(path):
        raise UsageError(f"{path} cannot be written: choose a table with --table PATH")
    if moves:
        print(f"the table is {path}: nothing is written to {ckpt_path.parent}", file=sys.stderr)
    return path


def can_write(path):
    """Whether a file, or a new one with its folders, can be written."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return os.access(path, os.W_OK)


def describe_run(ckpt):
    """What identifies a checkpoint's run: a dict with the columns RUN."""
    parameters = sum(W.numel() for W in ckpt["weights"].values())
    return {"model": ckpt["model"], "parameters": parameters, "seed": ckpt["args"]["seed"],
            "seq_len": ckpt["args"]["seq_len"], "init_weights": ckpt["init_weights"],
            "changes": "; ".join(ckpt["changes"]), "step": ckpt["step"]}


# ------------------------------------------------------------------------------------- files

def read_rows(path):
    """The rows of a table as dicts of text, without half a row that a killed process left."""
    if not Path(path).exists():
        raise UsageError(f"{path} does not exist: measure a model first (-h has the command)")
    text = Path(path).read_text(encoding="utf-8", errors="replace")
    head, *lines = [line.split("\t") for line in text.split("\n")[:-1]] or [[]]
    # Two commands that begin one table at once may both write its head.
    return [dict(zip(head, line)) for line in lines if len(line) == len(head) and line != head]


def run_of(row):
    """What identifies the run of a row: its columns RUN."""
    return tuple(row.get(name, "") for name in RUN)


def last_hashes(rows):
    """{run: the hash of its last row}"""
    return {run_of(row): row["hash"] for row in rows}


def weights_of(row):
    """The hash of the weights in a row's hash, or "" for a row of no checkpoint."""
    return row["hash"].rpartition("-")[0]


def current(rows, path):
    """The rows of the table at `path` that are drawn: those of each run with its last hash.

    Beside a checkpoint only the rows of its own weights count: it may have been trained further, or
    anew, since the others were measured. Raises UsageError if two runs cannot be told apart.
    """
    ckpt_path = checkpoint_of(path)
    if ckpt_path and ckpt_path.exists():
        known = "", weights_hash(read_checkpoint(ckpt_path))
        own = [row for row in rows if weights_of(row) in known]
        if left_out := len(rows) - len(own):
            print(f"{path}: {left_out} row{'s' * (left_out > 1)} left out, measured with other "
                  f"weights than {ckpt_path} has now", file=sys.stderr)
        rows = own
    weights = {}
    for row in rows:
        if weights.setdefault(run_of(row), weights_of(row)) != weights_of(row):
            raise UsageError(f"{path} has two runs that are {row['model']}, seed {row['seed']}: "
                             "measure each with a --table of its own, and label the tables")
    last = last_hashes(rows)
    return [row for row in rows if row["hash"] == last[run_of(row)]]


def checkpoint_of(path):
    """The path of the checkpoint that `beside` gives this table, ckpt.pt or m.pt, or None."""
    stem, _, name = Path(path).stem.rpartition("_")
    return Path(path).with_name(f"{stem or 'ckpt'}.pt") if name in BESIDE else None


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
    multiscreen=mine. Raises UsageError if two runs would be one in a figure.
    """
    found, known, columns = {}, {}, None
    for label, path in named_paths(paths):
        rows = read_rows(path)
        if not rows:
            raise UsageError(f"{path} has no rows: measure a model first")
        head = tuple(rows[0])
        columns = columns or head
        if head != columns or head[: len(RUN)] != RUN or head[-2:] != (value, "hash"):
            raise UsageError(f"{path} does not have the columns {' '.join(RUN)} .. {value} hash: "
                             "name another")
        rows = current(rows, path)
        if not rows:
            raise UsageError(f"{path} has no row of {checkpoint_of(path)} as it is now: measure it "
                             "again")
        for row in rows:
            # A name leaves out at which step flags changed, and which weights --init took.
            how = row["init_weights"], row["changes"]
            row["model"] = name_of_model(row, label)
            name = tuple(row[x] for x in RUN if x not in ("init_weights", "changes", "step"))
            if (known.setdefault(name, how) != how
                    or known.setdefault(run_of(row), row["hash"]) != row["hash"]):
                raise UsageError(f"two runs are {row['model']}, seed {row['seed']}: label the "
                                 f"runs, as in mine={path}")
            found[tuple(row[x] for x in columns[:-2])] = row
    return [*found.values()]


def name_of_model(row, label):
    """The name of a row's model, with its label, and with --init or changes if it had any."""
    family, variant = re.match("([^:=]*)[:=]?(.*)", row["model"]).groups()
    words = ["--init"] * bool(row["init_weights"])
    words += [re.sub(r"from step \d+: ", "", row["changes"])] * bool(row["changes"])
    if not label and ("=" in row["model"] or not words):
        return row["model"]
    return f"{family}={', '.join([label or variant or family, *words])}"


def keep_rows(path, rows, measured=()):
    """Write the rows of a figure beside it. Raises UsageError if existing rows would be lost.

    measured: columns in which a row may have new values.
    """
    def known(row):
        return frozenset((name, x) for name, x in row.items() if name not in measured)

    new = {known(row) for row in rows}
    found = read_rows(path) if Path(path).exists() else []
    if lost := sum(known(row) not in new for row in found):
        raise UsageError(f"{path} already holds {lost} other row{'s' * (lost > 1)}: add this "
                         "table to the inputs, or choose another --out")
    write_rows(path, rows)


def write_rows(path, rows):
    """Write a whole table, dicts of text: the file is always the old one or the new one."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with replacing(Path(path)) as file:
        file.write(as_line(rows[0].keys()))
        file.writelines(as_line(row.values()) for row in rows)


def as_line(cells):
    return ("\t".join(cells) + "\n").encode()


def as_text(x):
    """A value as text: "" if it does not apply, and with blanks for tabs, as in a file's name."""
    if x is None or x is False:
        return ""
    if isinstance(x, float):
        return f"{x:.12g}"
    return "yes" if x is True else on_one_line(x)


# ------------------------------------------------------------------------------ what is printed

def print_table(columns, rows, title):
    """Print rows in columns of equal width. None and NaN are shown as -."""
    cells = [list(columns), *([cell_text(x) for x in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells)]
    print(f"\n{title}")
    for row in cells:
        print("  ".join(x.rjust(n) for x, n in zip(row, widths)))


def cell_text(x):
    """A cell of a table."""
    if x is None or isinstance(x, float) and math.isnan(x):
        return "-"
    return f"{x:.5g}" if isinstance(x, float) else str(x)


class Progress:
    """Print a line for each unit of work, with the time left, from the share that is done."""

    def __init__(self, total):
        self.total, self.done, self.began = total, 0, time.perf_counter()

    def add(self, amount, text):
        """An amount of the total is done; `text` says which."""
        self.done += amount
        seconds = time.perf_counter() - self.began
        left = clock(seconds * (self.total / self.done - 1))
        print(f"{text}   {clock(seconds)}, about {left} left", file=sys.stderr, flush=True)
