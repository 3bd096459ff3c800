"""Shared by the experiments: tables and figures."""
import math
import statistics
from pathlib import Path

from experiments.style import ABLATIONS, SETTINGS, label_models, variant_of
from support.cli import Parser, UsageError, replacing
from support.table import (
    cell_text,
    keep_rows,
    print_table,
    read_file,
    read_tables,
    split_label,
    write_rows,
)

# ---------------------------------------------------------------------------------- tables

def report(path, columns, rows, title):
    """Print rows as a table and write them to `path` as TSV. None and NaN are shown as -."""
    print_table(columns, rows, title)
    if path.exists():
        read_file(path, columns)                       # refuses a table of something else
    write_rows(path, [dict(zip(columns, map(cell_text, row))) for row in rows])
    print(f"wrote {path}")


def mean_and_std(losses):
    """(mean, standard deviation, number of NaNs) of losses. A NaN counts only in the last."""
    good = [x for x in losses if not math.isnan(x)]
    mean = statistics.mean(good) if good else math.nan
    std = statistics.stdev(good) if len(good) > 1 else math.nan
    return mean, std, len(losses) - len(good)


def paired_change(losses, original):
    """(mean, standard deviation) of losses - original, by seed, over the seeds that both have.

    Runs of one seed see equal data in equal order.
    """
    changes = [losses[seed] - original[seed] for seed in losses.keys() & original.keys()]
    return mean_and_std(changes)[:2]


def with_deviation(row):
    """A row of latency.tsv with the mean of its times as `ms`, and their `std`; NaN for one."""
    mean, std, _ = mean_and_std([float(ms) for ms in row["ms"].split()])
    return row | {"ms": mean, "std": std}


def signed(x):
    """A difference as a cell of a table; NaN stays NaN."""
    return x if math.isnan(x) else f"{x:+.4f}"


# --------------------------------------------------------------------------------- figures

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
    with replacing(path) as file:
        fig.savefig(file, format="png", dpi=150, bbox_inches="tight")
    print(f"wrote {path}")


# ------------------------------------------------------------- figures of tables of measurements

def get_figure(description, value):
    """(rows to draw, path of the figure, {(model, parameters): label}) by the command line.

    value: the column that was measured. Beside ablations the plain Multiscreen is "Original". With
    --out the rows are kept beside the figure.
    """
    p = Parser(description)
    p.add_argument("tables", nargs="+", metavar="TSV",
                   help="tables of measurements, also with a label: mine=out/table.tsv")
    p.add_argument("--out", type=Path, help="path of the figure, .png; its rows are written beside "
                   "it as .tsv [beside the first table]")
    args = p.parse_args()
    if args.out and args.out.suffix != ".png":
        raise UsageError(f"--out {args.out}: name a figure, .png")
    rows = read_tables(args.tables, value)
    out = args.out or Path(split_label(args.tables[0])[1]).with_suffix(".png")
    models = {(row["model"], int(row["parameters"])) for row in rows}
    labels = {(name, str(n)): label for (name, n), label in label_models(models).items()}
    if any(variant_of(name) in ABLATIONS for name, _ in models):
        known = {f"multiscreen:{variant}": label for variant, label in ABLATIONS.items()}
        known["multiscreen"] = "Original"
        labels = {(name, n): known.get(name, label) for (name, n), label in labels.items()}
    out.parent.mkdir(parents=True, exist_ok=True)
    if args.out:
        keep_rows(out.with_suffix(".tsv"), rows)
    return rows, out, labels
