"""What the experiments share: tables, figures, progress."""
import math
import statistics
import time

from experiments.style import SETTINGS
from support.cli import clock


def report(path, columns, rows, title):
    """Print rows as a table and write them to `path` as TSV. None and NaN are shown as -."""
    cells = [list(columns)] + [[cell_text(x) for x in row] for row in rows]
    widths = [max(len(row[c]) for row in cells) for c in range(len(columns))]
    print(f"\n{title}")
    for row in cells:
        print("  ".join(x.rjust(n) for x, n in zip(row, widths)))
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
