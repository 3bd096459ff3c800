"""Measurements of trained models: load one, fill a table beside it, read tables to draw them.

A table is a TSV with a row per cell, appended as soon as it is measured. A row says which model it
is of (RUN), which cell, what was measured, and `hash`, which stands for the weights and the code.
A row is reused only for its own hash: undo an edit, and the old rows count again.
"""
import glob
import re
import sys
import time
from pathlib import Path

from support.cli import DEVICE, UsageError, get_device, products_dtype
from support.data import require_text
from support.models import has_windows
from support.run import ROOT, load_checkpoint

RUN = ("model", "parameters", "seed", "seq_len", "step")


# ------------------------------------------------------------------------ the model to measure

def add_flags(parser):
    """The flags that all measuring commands have."""
    parser.flag("--ckpt", "out/ckpt.pt", "checkpoint of train.py")
    parser.flag("--device", DEVICE, "cpu, cuda or mps")
    parser.flag("--table", None, "the table to fill [beside the checkpoint]", Path)


def load_for_evaluation(path, device, swe=False, text=True):
    """Like load_checkpoint, with `products_dtype`; `swe` expands its windows.

    text: raise UsageError for a model that was trained on numbers, `--tokenizer 65`, not on text.
    """
    device = get_device(device)
    model, tokenizer, ckpt = load_checkpoint(path, device, products_dtype(device))
    if text:
        require_text(tokenizer, f"this measurement of {path}")
    if swe:
        require_windows(model, path)
        model.expand_windows(ckpt["args"]["seq_len"])
    return model, tokenizer, ckpt


def require_windows(model, path):
    """Raise UsageError if a model has no windows. path: its checkpoint."""
    if not has_windows(model):
        raise UsageError(f"{path} has no screening windows: use a multiscreen checkpoint")


def require_finite(numbers, what):
    """Raise FloatingPointError if some of a model's numbers are nan or inf. what: their name."""
    if not numbers.isfinite().all():
        raise FloatingPointError(f"the model's {what} are not finite: has it diverged, or does an "
                                 "edit divide by 0?")


def rope_factor(text):
    """A factor of --rope-scale as tables write it: the type of that flag."""
    try:
        number = float(text.removeprefix("ntk"))
    except ValueError:
        number = 0.0
    if not 0 < number < 1e9:
        raise UsageError(f"--rope-scale {text}: expected a number above 0, such as 4 or ntk4")
    return f"ntk{number:g}" if text.startswith("ntk") else f"{number:g}"


def scale_rope(model, factor):
    """Stretch the RoPE of a model for texts `factor` times as long. factor: of `rope_factor`.

    "4" divides the positions by 4 (position interpolation); "ntk4" turns the slowest pair at a
    quarter of its speed and the fastest as before (NTK-aware scaling of theta).
    """
    layers = [layer for layer in model.layers if getattr(layer, "rope_scale", None)]
    if not layers:
        raise UsageError("--rope-scale is for models with RoPE: transformer:SIZE, multiscreen:rope")
    number = float(factor.removeprefix("ntk"))
    for layer in layers:
        layer.rope_scale = (1.0, number) if factor.startswith("ntk") else (number, 1.0)


# --------------------------------------------------------------------------------- the table

def beside(ckpt_path, name, given=None):
    """The path of a checkpoint's table: `given` by --table, or beside it, as m_NAME for m.pt."""
    path = Path(ckpt_path)
    if given:
        return given
    if path.resolve().parent == ROOT / "models":       # nothing is written there
        return Path("out", f"{path.stem}_{name}")
    return path.with_name(name if path.name == "ckpt.pt" else f"{path.stem}_{name}")


def describe_run(ckpt):
    """The columns RUN of a checkpoint."""
    args = ckpt["args"]
    parameters = sum(W.numel() for W in ckpt["weights"].values())
    return {"model": ckpt["model"], "parameters": parameters, "seed": args["seed"],
            "seq_len": args["seq_len"], "step": ckpt["step"]}


def fill(path, cells, value, identity, measure):
    """Measure those of some cells that the table at `path` lacks. Returns the rows of all.

    cells: dicts with the same names, of the run and of the cell; value: the name of what is
    measured; identity: that of run.py; measure(cell) -> the number or text.
    """
    cells = [{name: as_text(x) for name, x in cell.items()} | {"cell": cell} for cell in cells]
    columns = [name for name in cells[0] if name != "cell"] + [value, "hash"]
    known = {}
    for row in read_rows(path) if path.exists() else ():
        if list(row) != columns:
            raise UsageError(f"{path} does not have the columns {' '.join(columns)}: move it away, "
                             "or name another with --table")
        if row["hash"] == identity:
            known[key_of(row, columns)] = row
    missing = [cell for cell in cells if key_of(cell, columns) not in known]
    if len(missing) < len(cells):
        print(f"reusing {len(cells) - len(missing)} of {len(cells)} measurements in {path}",
              file=sys.stderr)
    began = time.perf_counter()
    for n, cell in enumerate(missing, 1):
        row = cell | {value: as_text(measure(cell["cell"])), "hash": identity or "-"}
        append(path, columns, row)
        known[key_of(row, columns)] = row
        shown = ", ".join(f"{name} {cell[name]}" for name in columns[len(RUN) : -2] if cell[name])
        print(f"{n}/{len(missing)}, {time.perf_counter() - began:.0f} s: {shown}: {row[value]}",
              file=sys.stderr, flush=True)
    return [known[key_of(cell, columns)] for cell in cells]


def key_of(row, columns):
    """What names a row: the run and the cell."""
    return tuple(row[name] for name in columns[:-2])


def append(path, columns, row):
    """Append a row to a table, which begins with the names of its columns."""
    lines = "" if path.exists() else "\t".join(columns) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        file.write(lines + "\t".join(row[name] for name in columns) + "\n")


def as_text(x):
    """A value as text: "" if it does not apply."""
    if x is None or x is False:
        return ""
    if x is True:
        return "yes"
    return f"{x:.12g}" if isinstance(x, float) else str(x)


def read_rows(path):
    """The rows of a table as dicts of text. A kill may have left half a row, which is left out."""
    if not Path(path).exists():
        raise UsageError(f"{path} does not exist: measure a model first (-h has the command)")
    head, *lines = [line.split("\t") for line in Path(path).read_text("utf-8").splitlines()]
    return [dict(zip(head, line)) for line in lines if len(line) == len(head)]


# --------------------------------------------------------------------------------- to draw them

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

    Of each run in a table, those count that have the hash of its last row. A path may have a label,
    mine=out/abcdigits.tsv: the models of its rows are then called multiscreen=mine.
    """
    found, runs = [], {}
    for label, path in named_paths(paths):
        rows = read_rows(path)
        if not rows or not {*RUN, value, "hash"} <= rows[0].keys():
            raise UsageError(f"{path} does not have the columns {' '.join(RUN)} .. {value} hash: "
                             "name another")
        last = {run_of(row): row["hash"] for row in rows}
        for row in [row for row in rows if row["hash"] == last[run_of(row)]]:
            if label:
                row["model"] = re.split("[:=]", row["model"])[0] + f"={label}"
            if runs.setdefault(run_of(row), path) != path:
                raise UsageError(f"{path} and {runs[run_of(row)]} are both {row['model']}, seed "
                                 f"{row['seed']}: label the tables, as in mine={path}")
            found.append(row)
    return found


def run_of(row):
    """What identifies the run of a row: its columns RUN."""
    return tuple(row[name] for name in RUN)


def print_table(columns, rows, title):
    """Print rows in columns of equal width. None and NaN are shown as -."""
    cells = [list(map(cell_text, row)) for row in [columns, *rows]]
    widths = [max(map(len, column)) for column in zip(*cells)]
    print(f"\n{title}")
    for row in cells:
        print("  ".join(x.rjust(n) for x, n in zip(row, widths)))


def cell_text(x):
    """A cell of a printed table."""
    if x is None or x != x:
        return "-"
    return f"{x:.5g}" if isinstance(x, float) else str(x)
