"""What the measuring commands share: flags, a trained model, its settings, and a table of rows.

abcdigits.py and the measuring tools of lab/ use it. Read it before you write a tool of your own.

A command lists its cells. A cell is a dict that says what is measured, and becomes a row of a table
beside the checkpoint. A cell that has a row is not measured again, so a command that was stopped
goes on where it was when you repeat it:

    run = Measurement(parser(__doc__).parse_args(), "perplexity")
    cells = [setting | {"document": name} for setting in run.settings for name in documents]
    for cell in run.missing(cells):
        run.add(cell, nats=measure(run.model, documents[cell["document"]]))
    print(run.rows())

A setting is what can be changed in a trained model: "swe" is "yes" where windows beyond the
training length are infinite, and "factor" scales RoPE's positions. Both are "" for the model as it
was trained.

A row is reused only for the same run (the columns RUN), the same cell, the same weights and the
same code. So a cell has to name all that its number depends on: of a text, a hash.
"""
import hashlib
import math
import re
import sys
import time
from pathlib import Path

import numpy as np

from support.cli import DEVICE, Parser, UsageError, get_device, products_dtype
from support import check
from support.data import count
from support.models import count_parameters, has_windows
from support.run import ROOT, identity, load_checkpoint
from support.tables import add_row, as_cell, read_table, write_table

# ---------------------------------------------------------------------------------- the flags

def parser(doc):
    """A parser with the flags of all measuring commands."""
    p = Parser(doc)
    p.add_argument("--ckpt", default="out/ckpt.pt", help="a checkpoint of train.py [out/ckpt.pt]")
    p.add_argument("--device", default=DEVICE, help=f"cpu, cuda or mps [{DEVICE}]")
    p.add_argument("--table", type=Path, help="the table to fill [beside the checkpoint]")
    p.add_argument("--swe", action="store_true", help="measure also with screening-window "
                   "expansion: windows longer than the training length become infinite")
    p.add_argument("--rope-scale", nargs="+", default=[""], type=rope_factor, metavar="FACTOR",
                   help="for models with RoPE: measure with each of these factors; 1 is as "
                   "trained, 4 divides the positions by 4, ntk4 scales theta instead (paper: 1 2 4 "
                   ".. 64)")
    return p


def rope_factor(text):
    """A factor of --rope-scale as tables have it: "" for 1, "4", "ntk4"."""
    if not re.fullmatch(r"(ntk)?\d+(\.\d+)?", text) or float(text.removeprefix("ntk")) == 0:
        raise UsageError(f"--rope-scale {text}: expected a number above 0, such as 4 or ntk4")
    number = float(text.removeprefix("ntk"))
    if number == 1:
        return ""
    return f"ntk{number:g}" if text.startswith("ntk") else f"{number:g}"


def scale_rope(model, factor):
    """Stretch a model's RoPE for texts `factor` times as long; "" leaves it as it was trained.

    "4" divides the positions by 4 (position interpolation). "ntk4" turns the slowest pair at a
    quarter of its speed and the fastest as before (NTK-aware scaling of theta).
    """
    layers = [layer for layer in model.layers if getattr(layer, "rope_scale", None)]
    if factor and not layers:
        raise UsageError("--rope-scale is for models with RoPE: transformer:SIZE, multiscreen:rope")
    number = float(factor.removeprefix("ntk") or 1)
    for layer in layers:
        layer.rope_scale = (1.0, number) if factor.startswith("ntk") else (number, 1.0)


# -------------------------------------------------------------------------- measuring a checkpoint

class Measurement:
    """A trained model, the settings that the flags ask for, and the table that its rows go to.

    name: of the table, and of the command's figure.
    """

    def __init__(self, args, name):
        device = get_device(args.device)
        dtype = products_dtype(device)
        self.model, self.tokenizer, ckpt = load_checkpoint(args.ckpt, device, dtype)
        self.ckpt, self.flags, self.T_train = ckpt, ckpt["args"], ckpt["args"]["seq_len"]
        self.path = args.table or table_of(args.ckpt, name)
        self.columns = {"model": ckpt["model"], "parameters": count_parameters(self.model),
                        "seed": self.flags["seed"], "seq_len": self.T_train,
                        "tokenizer": self.tokenizer.name,
                        "dtype": str(dtype or "float32").removeprefix("torch."),
                        "step": ckpt["step"]}
        check.warn(self.model, file=sys.stderr)        # decoding may not be what was trained
        # What a notebook has defined is in no file: no later row is known to be of the same code.
        self.hash = identity(self.model, ckpt["weights"]) or f"notebook-{time.time_ns()}"

        # SWE comes last, because expanded windows stay expanded.
        if args.swe and not has_windows(self.model):
            raise UsageError(f"--swe: {args.ckpt} is a {ckpt['model']}, which has no windows")
        self.settings = [{"swe": "", "factor": factor} for factor in args.rope_scale]
        if args.swe:
            self.settings += [{"swe": "yes", "factor": factor} for factor in args.rope_scale]
        for factor in args.rope_scale:
            scale_rope(self.model, factor)             # refuses what is impossible before any work

    def missing(self, cells, cost=None):
        """Yield each cell without a row, after putting the model into the setting of the cell.

        cells: dicts with the same names, those with SWE last. cost: the name in a cell that its
        time is proportional to, for the time that is left.
        """
        self.cells = cells
        found = self.found()
        self.make_last(found)
        todo = [cell for cell in cells if self.key(cell) not in found]
        if len(todo) < len(cells):
            print(f"{len(cells) - len(todo)} of {len(cells)} rows are already in {self.path}",
                  file=sys.stderr)
        costs = [1 for _ in todo]
        if cost is not None:
            costs = [cell[cost] for cell in todo]
        names = [name for name in cells[0] if len({cell[name] for cell in cells}) > 1]
        if todo:
            print(f"measuring {count(len(todo), 'row')} of {self.path}; if you stop this, repeat "
                  "the command to go on", file=sys.stderr)
        began = time.perf_counter()
        for n, cell in enumerate(todo):
            if cell["swe"]:
                self.model.expand_windows(self.T_train)
            scale_rope(self.model, cell["factor"])
            yield cell
            seconds = time.perf_counter() - began
            left = seconds * sum(costs[n + 1 :]) / sum(costs[: n + 1])
            what = ", ".join(f"{name} {cell[name]}" for name in names if cell[name] != "")
            print(f"{what}   {seconds:.0f} s, about {left:.0f} s left", file=sys.stderr)

    def add(self, cell, **values):
        """Append the row of a cell."""
        add_row(self.path, self.columns | cell | values | {"hash": self.hash})

    def rows(self):
        """The rows of the cells that `missing` was given, dicts of text."""
        found = self.found()
        return [found[self.key(cell)] for cell in self.cells if self.key(cell) in found]

    def found(self):
        """{key: row} of the rows in the table that are of these weights and this code."""
        if not self.path.exists():
            return {}
        rows = read_table(self.path)
        names = [*self.columns, *self.cells[0]]
        if rows and list(rows[0])[: len(names)] != names:
            raise UsageError(f"{self.path} does not have the columns {' '.join(names)}: move it "
                             "away, or name another with --table")
        return {self.key(row): row for row in self.of_this_run(rows) if row["hash"] == self.hash}

    def of_this_run(self, rows):
        """The rows of this run, measured with whatever code."""
        run = {name: as_cell(x) for name, x in self.columns.items()}
        return [row for row in rows if run.items() <= row.items()]

    def make_last(self, found):
        """Figures show the last rows of a run: move those that are reused behind all others.

        They are not the last ones if an edit was measured after them, and then undone.
        """
        rows = read_table(self.path) if found else []
        if found and self.of_this_run(rows)[-1]["hash"] != self.hash:
            others = [row for row in rows if row not in found.values()]
            write_table(self.path, [*others, *found.values()])

    def key(self, row):
        """What identifies a cell, or a row: the run and the names of the cells, as text."""
        row = self.columns | row
        return tuple(as_cell(row[name]) for name in [*self.columns, *self.cells[0]])


def table_of(ckpt, name):
    """Where the rows of a checkpoint go: NAME.tsv beside ckpt.pt, m_NAME.tsv beside m.pt.

    Those of the bundled models go to out/.
    """
    ckpt = Path(ckpt)
    if ckpt.name != "ckpt.pt":
        name = f"{ckpt.stem}_{name}"
    if ckpt.resolve().parent == ROOT / "models":
        return Path("out") / f"{name}.tsv"
    return ckpt.with_name(f"{name}.tsv")


def short_hash(data):
    """Eight letters that stand for bytes, or for numbers: what a cell calls a text."""
    return hashlib.sha256(np.asarray(data).tobytes()).hexdigest()[:8]


def joined(numbers):
    """Numbers as one cell of a table. A model that has diverged has some that are not finite."""
    if not all(math.isfinite(x) for x in numbers):
        raise FloatingPointError("the model's losses are not finite: has it diverged, or does an "
                                 "edit divide by 0?")
    return " ".join(f"{x:.6g}" for x in numbers)
