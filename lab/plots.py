"""What all pictures share: their style, curves, axes and legend, and how they are written."""
import math
from argparse import ArgumentTypeError
from pathlib import Path

import numpy as np

from support.cli import UsageError
from lab.alike import mean_and_std
from support.data import count
from support.tables import read_table, write_table

STYLE = Path(__file__).with_name("figures.mplstyle")
MARKERS = "os^DvPXp"
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


# ------------------------------------------------------------------------------------------ curves

def draw_panels(panels, xlabel, ylabel, unit="seed"):
    """(a figure with a panel for each of {title: its curves}, its axes, their curves drawn).

    unit: what a mean is over.
    """
    columns = min(len(panels), 3)
    fig, axes = pyplot().subplots(math.ceil(len(panels) / columns), columns, sharex=True,
                                  sharey=True, squeeze=False)
    fig.set_figheight(2.5 + 2 * len(axes))
    all_looks = looks([curve for curves in panels.values() for curve in curves])
    for ax, (title, curves) in zip(axes.flat, panels.items()):
        draw_curves(ax, curves, all_looks, unit)
        ax.set_title(title)
        ax.tick_params(labelbottom=True)
    for ax in axes.flat[len(panels) :]:
        ax.axis("off")
    for ax in axes[-1]:
        ax.set_xlabel(xlabel)
    for ax in axes[:, 0]:
        ax.set_ylabel(ylabel)
    return fig, axes.flat[: len(panels)]


def looks(curves):
    """{name of a curve: its look}: one colour and marker for a model, one line for a setting."""
    settings, chosen = {}, {}
    for curve in curves:
        of_model = settings.setdefault(curve.model, {})
        line = of_model.setdefault(curve.setting, LINES[len(of_model) % len(LINES)])
        n = [*settings].index(curve.model)
        chosen[curve.name] = {"color": f"C{n}", "marker": MARKERS[n % len(MARKERS)], "ls": line,
                              "mfc": "white" if curve.setting else f"C{n}",
                              "ms": 5 if len(curves) < 6 else 3.5}
    return chosen


def draw_curves(ax, curves, look, unit="seed"):
    """Draw the mean of each curve over its seeds, and a band of one deviation.

    look: of `looks`. unit: what a mean is over.
    """
    for curve in curves:
        columns = [[*of_seed.values()] for of_seed in curve.points.values()]
        means, stds = np.array([mean_and_std(column) for column in columns]).T
        stds, x = np.nan_to_num(stds), [*curve.points]             # one seed has no deviation
        low, high = min(map(len, columns)), max(map(len, columns))
        size = count(high, unit) if low == high else f"{low} to {count(high, unit)}"
        ax.plot(x, means, label=f"{curve.name}, {size}", **look[curve.name])
        ax.fill_between(x, means - stds, means + stds, alpha=0.25, lw=0,
                        color=look[curve.name]["color"])


# ------------------------------------------------------------------------------------------- axes

def context_axes(axes, curves, rows=()):
    """Logarithmic axes of tokens, a tick at each x, with the training lengths of rows marked."""
    x = sorted({place for curve in curves for place in curve.points})
    x = x[:: math.ceil(len(x) * min(len(axes), 3) / 12)]           # more would overlap
    for ax in axes:
        ax.set_xscale("log", base=2)
        ax.set_xticks(x, [f"{n:,}" for n in x])
        ax.minorticks_off()
        for T in sorted({int(row["seq_len"]) for row in rows}):
            ax.axvline(T, color="black", ls=(0, (5, 3)), lw=1, marker="",
                       label=f"training length, {T} tokens")


def logarithmic(set_scale, values, base=10):
    """Make an axis logarithmic, with a linear piece if it has to show 0. set_scale: of the axis"""
    positive = [value for value in values if value > 0]
    if positive and min(values) > 0:
        set_scale("log", base=base)
    elif positive:
        set_scale("symlog", base=base, linthresh=min(positive))


def plain_numbers(axis, at=(1, 2, 5)):
    """Ticks of a logarithmic axis: `at` times a power of ten, written out."""
    plt = pyplot()
    axis.set_major_locator(plt.LogLocator(subs=at))
    axis.set_major_formatter(lambda x, _: f"{x:,.6g}")
    axis.set_minor_locator(plt.NullLocator())


def millions(ax):
    """A logarithmic x axis of parameters, in millions."""
    ax.set_xscale("log")
    plain_numbers(ax.xaxis)
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
