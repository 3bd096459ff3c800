"""Shared by the experiments: means, figures, and what a figure is drawn from."""
import math
import os
import statistics
import sys
from pathlib import Path

from lab.style import SETTINGS, labels_of
from support.cli import UsageError
from support.measure import (
    RUN,
    named_paths,
    read_rows,
    read_tables,
    require_windows,
    rope_factor,
    scale_rope,
)


def mean_and_std(losses):
    """(mean, standard deviation) of losses, without those that are NaN."""
    good = [x for x in losses if not math.isnan(x)]
    mean = statistics.mean(good) if good else math.nan
    return mean, statistics.stdev(good) if len(good) > 1 else math.nan


def percent(share, digits=1):
    """A share as a cell of a table, halves up; None and NaN stay. digits: after the point."""
    if share is None or math.isnan(share):
        return share
    units = 10**digits                                 # in a percent
    return f"{math.floor(100 * units * share + 0.5 + 1e-9) / units:.{digits}f}%"


def write_rows(path, rows):
    """Write a whole table, dicts of text."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    lines = [list(rows[0]), *(list(row.values()) for row in rows)]
    Path(path).write_text("".join("\t".join(line) + "\n" for line in lines), "utf-8")


def keep_rows(path, rows, measured=()):
    """Write the rows of a figure beside it. Raises UsageError if existing rows would be lost.

    measured: columns in which a row may have new values.
    """
    def known(row):
        return frozenset((name, x) for name, x in row.items() if name not in measured)

    new = {known(row) for row in rows}
    found = read_rows(path) if Path(path).exists() else []
    lost = [row for row in found if known(row) not in new]
    if lost:
        raise UsageError(f"{path} already holds {len(lost)} other rows: add this table to the "
                         "inputs, or choose another --out")
    write_rows(path, rows)


# --------------------------------------------------------------------------------- figures

def pyplot():
    """matplotlib.pyplot for files, or None after one line that says how to get it."""
    # A script that a notebook starts gets the name of the notebook's backend, which may not be
    # installed here, and matplotlib looks at it when it is imported. In the notebook itself, by
    # %run, it must stay: agg shows no plots.
    if "IPython" not in sys.modules:
        os.environ["MPLBACKEND"] = "agg"
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        print("no figure: `pip install matplotlib` and run this again to draw it")
        return None
    plt.rcParams.update(SETTINGS)
    return plt


def save_figure(fig, path):
    """Write a figure as PNG, 150 dots per inch, and close it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, format="png", dpi=150, bbox_inches="tight")
    pyplot().close(fig)
    print(f"wrote {path}")


# ----------------------------------------------------------------- longer than in training

def add_settings(parser):
    """Add the flags that `settings_of` reads."""
    parser.flag("--rope-scale", [None], "for models with RoPE: measure with each of these factors; "
                "4 divides the positions by 4, ntk4 scales theta instead (paper: 1 2 4 .. 64)",
                rope_factor, nargs="+")
    parser.add_argument("--swe", action="store_true",
                        help="measure also with screening-window expansion: windows longer than "
                        "the training length become infinite")


def settings_of(args, model):
    """What `stretch` needs of a cell, {"swe": .., "factor": ..}, for each setting that is measured.

    SWE comes last, as windows stay expanded.
    """
    settings = [{"swe": False, "factor": factor} for factor in args.rope_scale]
    if args.swe:
        require_windows(model, args.ckpt)
        settings += [{"swe": True, "factor": factor} for factor in args.rope_scale]
    return settings


def stretch(model, cell, T_train):
    """Expand the windows or scale the RoPE of a model, as a cell asks."""
    if cell["swe"]:
        model.expand_windows(T_train)
    if cell["factor"]:
        scale_rope(model, cell["factor"])


# ------------------------------------------------------------- figures of tables of measurements

def add_tables(p, nargs):
    """Add what a figure is drawn from, and --out."""
    p.add_argument("tables", nargs=nargs, metavar="TSV",
                   help="tables of measurements to draw; you may label them, as mine=out/table.tsv")
    p.add_argument("--out", type=figure_path, help="the figure to write, a .png; its rows go "
                   "beside it as .tsv [beside the first table]")


def figure_path(name):
    """The Path of --out. Raises UsageError if it is not of a PNG."""
    path = Path(name)
    if path.suffix != ".png":
        raise UsageError(f"--out {name}: name a .png file")
    return path


def get_figure(p, value, measure=None):
    """(rows to draw, path of the figure) by the command line of a parser.

    The rows are those of the tables, or without tables those that measure(args) returns with a
    path. value: the column that was measured. With --out the rows are kept beside the figure.
    """
    args = p.parse_args()
    if args.tables:
        for name, x in vars(args).items():
            if name not in ("tables", "out") and x != p.get_default(name):
                raise UsageError(f"tables are for drawing, --{name.replace('_', '-')} is for "
                                 "measuring: use only one")
        rows = read_tables(args.tables, value)
        out = Path(named_paths(args.tables)[0][1]).with_suffix(".png")
    else:
        rows, out = measure(args)
    if args.out:
        out = args.out
        keep_rows(out.with_suffix(".tsv"), rows)
    return rows, out


def at_any_step(row):
    """What names the run of a row, whatever its step: its other columns of RUN."""
    return tuple(row[name] for name in RUN if name != "step")


def steps_of(rows):
    """{run, of `at_any_step`: its steps} of rows. A run whose checkpoints were kept has several."""
    steps = {}
    for row in rows:
        steps.setdefault(at_any_step(row), set()).add(row["step"])
    return steps


def group_rows(rows, texts):
    """{(label, setting): rows}: rows that differ only in the seed and in what was measured.

    texts: {column: text for its value}. A setting, such as " + SWE, step 9", has the texts of cells
    that are not empty and differ among the rows, and always those of swe and factor. Of steps it
    says something only where one seed has several: seeds end at different steps.
    """
    labels, steps, groups = labels_of(rows), steps_of(rows), {}
    differ = {name for name in texts if len({row.get(name) for row in rows}) > 1}
    for row in rows:
        shown = [text.format(row[name]) for name, text in texts.items() if row.get(name)
                 and (name in differ or name in ("swe", "factor"))]
        shown += [f", step {row['step']}"] * (len(steps[at_any_step(row)]) > 1)
        key = labels[row["model"]], "".join(shown)
        groups.setdefault(key, []).append(row)
    return groups
