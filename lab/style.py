"""How the figures look, and what they call a model: the paper's words, never a path."""
import numpy as np

# Okabe and Ito's colours, made for colour-blind readers. Markers and lines serve in greyscale.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LINES = ("-", "--", "-.", ":")

# A figure is 8 inches wide, so that its letters are readable on a README page.
WIDTH = 8
SETTINGS = {"font.size": 10, "axes.titlesize": 10, "legend.fontsize": 9, "xtick.labelsize": 9,
            "ytick.labelsize": 9, "axes.spines.top": False, "axes.spines.right": False}

ABLATIONS = {"rope": "MiPE → RoPE", "nope": "MiPE → NoPE", "no-tanhnorm": "w/o TanhNorm",
             "no-gate": "w/o Gate", "fixed-r": "Fixed r = 1", "compete": "Keys compete",
             "softmax": "Softmax", "softmax-rope": "Softmax, RoPE"}


def look(n):
    """Colour, marker and line of the n-th curve."""
    return {"color": COLORS[n % len(COLORS)], "marker": MARKERS[n % len(MARKERS)],
            "ls": LINES[n % len(LINES)]}


def plot_with_band(ax, x, mean, std, **options):
    """A curve, and a band of one standard deviation to each side. std: None or NaN for no band."""
    ax.plot(x, mean, **{"ms": 5, "lw": 1.5} | options)
    if std is not None:
        ax.fill_between(x, np.subtract(mean, std), np.add(mean, std), color=options["color"],
                        alpha=0.25, lw=0)


def legend_below(fig, ncols=2):
    """One legend for all axes, under a figure of layout "constrained", where it hides nothing."""
    handles = {}
    for ax in fig.axes:
        handles |= dict(zip(*reversed(ax.get_legend_handles_labels())))
    fig.legend(handles.values(), handles, loc="outside lower center", ncols=ncols, frameon=False)


def millions_axis(plt, ax):
    """A logarithmic x axis that counts parameters in millions."""
    ax.set_xscale("log")
    ax.xaxis.set_major_locator(plt.LogLocator(subs=(1, 2, 5)))
    ax.xaxis.set_major_formatter(lambda n, _: f"{n / 1e6:g}")
    ax.minorticks_off()


def plain_axis(plt, axis, at=(1, 2, 5)):
    """Ticks of a logarithmic axis that is drawn: `at` times a power of ten, as whole numbers.

    An axis that spans less than a factor of 4 has evenly spaced ticks.
    """
    low, high = axis.get_view_interval()
    axis.set_major_locator(plt.AutoLocator() if high < 4 * low else plt.LogLocator(subs=at))
    axis.set_major_formatter(lambda x, _: f"{x:g}" if x < 1000 else f"{x:,.0f}")
    axis.set_minor_locator(plt.NullLocator())


# ------------------------------------------------------------------------- names of models

def paper_name(model):
    """The paper's words for a name that train.py takes, or the label after "="."""
    if "=" in model:
        return model.partition("=")[2]
    family, _, variant = model.partition(":")
    if family == "multiscreen":
        return ABLATIONS.get(variant, f"Multiscreen, {variant}" if variant else "Multiscreen")
    kind = variant.partition(":")[2]                   # after the size
    return {"": "Transformer", "qknorm": "Transformer + QKNorm"}.get(kind, f"Transformer, {kind}")


def labels_of(rows):
    """{model: label} of the rows of tables."""
    return {row["model"]: paper_name(row["model"]) for row in rows}


def short_number(n):
    """4.6K, 0.48M, 28M, 1.3B."""
    unit, letter = (1e9, "B") if n >= 1e9 else (1e6, "M") if n >= 1e5 else (1e3, "K")
    return f"{n / unit:.0f}{letter}" if n >= 10 * unit else f"{n / unit:.2g}{letter}"


def count_of(n, noun):
    """1 seed, 8 seeds."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"
