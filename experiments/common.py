"""What the experiments share: tables, figures, progress."""
import math
import statistics
import time
from pathlib import Path

from experiments.style import ABLATIONS, SETTINGS, label_models
from support.cli import Parser, UsageError, clock
from support.table import keep_rows, read_tables


def report(path, columns, rows, title):
    """Print rows as a table and write them to `path` as TSV. None and NaN are shown as -."""
    print_table(columns, rows, title)
    write_table(path, columns, rows)


def print_table(columns, rows, title):
    """Print rows in columns of equal width."""
    cells = [list(columns)] + [[cell_text(x) for x in row] for row in rows]
    widths = [max(len(row[c]) for row in cells) for c in range(len(columns))]
    print(f"\n{title}")
    for row in cells:
        print("  ".join(x.rjust(n) for x, n in zip(row, widths)))


def write_table(path, columns, rows):
    """Write rows as TSV."""
    cells = [columns, *([cell_text(x) for x in row] for row in rows)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join("\t".join(row) + "\n" for row in cells))
    print(f"wrote {path}")


def cell_text(x):
    """A cell of a table."""
    if x is None or isinstance(x, float) and math.isnan(x):
        return "-"
    return f"{x:.5g}" if isinstance(x, float) else str(x)


def mean_and_std(losses):
    """(mean, standard deviation, number of NaNs) of losses. A NaN counts in the last only."""
    good = [x for x in losses if not math.isnan(x)]
    mean = statistics.mean(good) if good else math.nan
    std = statistics.stdev(good) if len(good) > 1 else math.nan
    return mean, std, len(losses) - len(good)


def signed(x):
    """A difference as a cell of a table, NaN as it is."""
    return x if math.isnan(x) else f"{x:+.4f}"


def pyplot():
    """matplotlib.pyplot without a window, or None after one line that says how to get it."""
    try:
        import matplotlib
    except ImportError:
        print("no figure: `pip install matplotlib` and run this again to draw it")
        return None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update(SETTINGS)
    return plt


def save_figure(fig, path):
    """Write a figure as PNG, 150 dots per inch."""
    fig.savefig(path, dpi=150, bbox_inches="tight")
    print(f"wrote {path}")


class Progress:
    """One printed line for each unit of work, with the time left by its share of the whole."""

    def __init__(self, total):
        self.total, self.done, self.began = total, 0.0, time.perf_counter()

    def add(self, amount, text, known=False):
        """known: it was done before, so the time left is estimated from the rest."""
        if known:
            self.total -= amount
        else:
            self.done += amount
        seconds = time.perf_counter() - self.began
        left = ""
        if self.done:
            left = f", about {clock(seconds * (self.total / self.done - 1))} left"
        print(f"{text}   {clock(seconds)}{left}", flush=True)


# ------------------------------------------------------------- figures of tables of measurements

def get_figure(description, get_columns):
    """(rows to draw, path of the figure, {(model, parameters): label}) by the command line.

    get_columns(path of a table) -> (columns that name a cell, columns of values). Where there are
    ablations, the rows are theirs and their original's: the Multiscreen that was trained alike.
    With --out the rows are kept beside the figure.
    """
    p = Parser(description)
    p.add_argument("tables", nargs="+", metavar="TSV", help="tables of measurements")
    p.add_argument("--out", type=Path, help="path of the figure, .png; its rows are written beside "
                   "it as .tsv [beside the first table]")
    args = p.parse_args()
    out = args.out or Path(args.tables[0]).with_suffix(".png")
    if out.suffix != ".png":
        raise UsageError(f"--out {out}: name a figure, .png")
    keys, values = get_columns(args.tables[0])
    rows = read_tables(args.tables, keys, values)
    if not rows:
        raise UsageError(f"{args.tables[0]} has no rows: measure a model first")

    ablated = {(row["seq_len"], row["step"]) for row in rows if variant_of(row) in ABLATIONS}
    models = {(row["model"], int(row["parameters"])) for row in rows}
    labels = {(name, str(n)): label for (name, n), label in label_models(models).items()}
    if ablated:
        rows = [row for row in rows if variant_of(row) in ABLATIONS
                or row["model"] == "multiscreen" and (row["seq_len"], row["step"]) in ablated]
        labels = {(row["model"], row["parameters"]): ABLATIONS.get(variant_of(row), "Original")
                  for row in rows}
    out.parent.mkdir(parents=True, exist_ok=True)
    if args.out:
        keep_rows(out.with_suffix(".tsv"), (*keys, *values, "hash"), rows)
    return rows, out, labels


def variant_of(row):
    """An ablation's name, a Transformer's size, or ""."""
    return row["model"].partition(":")[2]
