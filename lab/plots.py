"""What all pictures share: their style, bands, axes and legend, and how they are written."""
from argparse import ArgumentTypeError
from pathlib import Path

import numpy as np

from lab.alike import mean_and_std
from support.cli import UsageError
from support.data import count
from support.tables import read_table, write_table

STYLE = Path(__file__).with_name("figures.mplstyle")
MARKERS = "os^DvPX"
LINES = ("-", "--", "-.", ":")


def pyplot():
    """matplotlib.pyplot in our style, for files. Tools print their table first, then call this."""
    try:
        import matplotlib
    except ImportError:
        raise UsageError("the picture needs matplotlib: pip install matplotlib") from None
    matplotlib.use("agg")
    import matplotlib.pyplot as plt
    plt.style.use(STYLE)
    return plt


# --------------------------------------------------------------------------------- curves and bands

def looks(curves):
    """A look for each curve: one colour and marker for a model, one line for a setting."""
    models, chosen = list(dict.fromkeys(curve.model for curve in curves)), []
    for curve in curves:
        n = models.index(curve.model)
        settings = [other.setting for other in curves if other.model == curve.model]
        look = {"color": f"C{n}", "marker": MARKERS[n % len(MARKERS)],
                "ls": LINES[settings.index(curve.setting) % len(LINES)]}
        if curve.setting:
            look["mfc"] = "white"
        chosen.append(look)
    return chosen


def draw_means(ax, x, curves, **more):
    """Draw curves under their names. more: of their look"""
    for curve, look in zip(curves, looks(curves)):
        draw_mean(ax, x, curve, curve.name, **look, **more)


def draw_mean(ax, x, curve, label, **look):
    """Draw the mean of a curve (seeds, places), and a band of one deviation."""
    columns = {place: list(curve.at(n).values()) for n, place in enumerate(x) if curve.at(n)}
    x, columns = list(columns), list(columns.values())
    means, stds = np.array([mean_and_std(column) for column in columns]).T
    stds = np.nan_to_num(stds)                         # one seed has no deviation
    ax.plot(x, means, label=f"{label}, {seeds_of(columns)}", **look)
    ax.fill_between(x, means - stds, means + stds, alpha=0.25, color=look["color"], lw=0)


def seeds_of(columns):
    """How many seeds the means of some columns have: "3 seeds", "1 to 3 seeds"."""
    low, high = min(map(len, columns)), max(map(len, columns))
    return count(high, "seed") if low == high else f"{low} to {high} seeds"


# ------------------------------------------------------------------------------------------- axes

def mark_training_length(ax, rows):
    for T in sorted({int(row["seq_len"]) for row in rows}):
        ax.axvline(T, color="black", ls=(0, (5, 3)), lw=1, marker="",
                   label=f"training length, {T} tokens")


def powers_of_2(ax, x):
    """A logarithmic axis with a tick at each x."""
    ax.set_xscale("log", base=2)
    ax.set_xticks(x, [f"{n:,}" for n in x])
    ax.minorticks_off()


def logarithmic(set_scale, values, base=10):
    """Make an axis logarithmic, with a linear piece if it has to show 0. set_scale: of the axis"""
    positive = [value for value in values if value > 0]
    if positive and min(values) > 0:
        set_scale("log", base=base)
    elif positive:
        set_scale("symlog", base=base, linthresh=min(positive))


def plain_numbers(plt, axis, at=(1, 2, 5)):
    """Ticks of a logarithmic axis: `at` times a power of ten, written out."""
    axis.set_major_locator(plt.LogLocator(subs=at))
    axis.set_major_formatter(lambda x, _: f"{x:,.6g}")
    axis.set_minor_locator(plt.NullLocator())


def millions(plt, ax):
    """A logarithmic x axis of parameters, in millions."""
    ax.set_xscale("log")
    plain_numbers(plt, ax.xaxis)
    ax.xaxis.set_major_formatter(lambda n, _: f"{n / 1e6:g}")


# ------------------------------------------------------------------------------------------ files

def figure_path(text):
    """The type of --out: a name that ends as figures do."""
    path = Path(text)
    if path.suffix not in (".png", ".pdf", ".svg"):
        raise ArgumentTypeError(f"{text!r} names no figure: end it with .png, .pdf or .svg")
    return path


def save(fig, path):
    """Write a figure, with one legend of all its axes below it."""
    handles = {}
    for ax in fig.axes:
        for handle, label in zip(*ax.get_legend_handles_labels()):
            handles[label] = handle
    if handles:
        fig.legend(handles.values(), handles, loc="outside lower center", ncols=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path)
    print(f"wrote {path}")


def keep_rows(path, rows):
    """Write the rows of a figure beside it. Raises UsageError if rows that are there would go."""
    if path.exists():
        kept = {tuple(row.values()) for row in rows}
        lost = [row for row in read_table(path) if tuple(row.values()) not in kept]
        if lost:
            raise UsageError(f"{path} already holds {len(lost)} other rows: move it away, or "
                             "choose another --out")
    write_table(path, rows)
