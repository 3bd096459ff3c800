"""Tables of retrieval, accuracy by length and depth: read, averaged over seeds, drawn."""
import math
import statistics
from dataclasses import dataclass
from pathlib import Path

from experiments.common import save_figure
from experiments.style import count_of, label_models
from support.cli import UsageError


@dataclass
class Grid:
    """A table: {(length, depth): (accuracy, RoPE scaling factor or None)}, and what was measured.

    kind: (name, parameters) of the model; task: for instance "6 digits".
    """
    cells: dict
    task: str
    kind: tuple
    T_train: int
    swe: bool

    @property
    def name(self):
        return f"{self.kind[0]}, SWE" if self.swe else self.kind[0]

    @property
    def lengths(self):
        return sorted({n for n, _ in self.cells})

    def mean(self, length):
        """The mean over the depths."""
        return statistics.mean(a for (n, _), (a, _) in self.cells.items() if n == length)

    def worst(self, length):
        """The least accuracy of all depths."""
        return min(a for (n, _), (a, _) in self.cells.items() if n == length)


def read_grid(path):
    """(cells of a Grid, "6 digits") from a TSV of abcdigits.py or of experiments.passkey."""
    try:
        head, *lines = [line.split("\t") for line in Path(path).read_text().splitlines()]
        rows = [dict(zip(head, line, strict=True)) for line in lines]
        cells = {}
        for row in rows:
            factor = float(row["rope_scale"]) if row.get("rope_scale") else None
            cells[int(row["length"]), float(row["depth"])] = float(row["accuracy"]), factor
        return cells, f"{rows[0]['digits']} digits"
    except (ValueError, LookupError) as e:
        raise UsageError(f"{path} is not a table of abcdigits.py or experiments.passkey "
                         f"({type(e).__name__})") from None


def get_grid(path, ckpt, swe):
    """The Grid of a table and of the checkpoint that it was measured with."""
    cells, task = read_grid(path)
    parameters = sum(W.numel() for W in ckpt["weights"].values())
    return Grid(cells, task, (ckpt["model"], parameters), ckpt["args"]["seq_len"], swe)


def group_seeds(grids):
    """The grids as a list of lists: each holds the seeds of one kind of model and setting."""
    groups = {}
    for grid in grids:
        key = grid.kind, grid.T_train, grid.swe, grid.task
        groups.setdefault(key, []).append(grid)
    return list(groups.values())


def average(grids):
    """The cells of a group of seeds: mean accuracies, and the factors that all of them chose."""
    cells = {}
    for key in sorted({key for grid in grids for key in grid.cells}):
        found = [grid.cells[key] for grid in grids if key in grid.cells]
        factors = {factor for _, factor in found}
        mean = statistics.mean(accuracy for accuracy, _ in found)
        cells[key] = mean, factors.pop() if len(factors) == 1 else None
    return cells


# ------------------------------------------------------------------------------ the figure

def draw_grids(plt, groups, path):
    """A panel for each group of seeds, two in a row, with one colour bar."""
    columns = min(len(groups), 2)
    rows = math.ceil(len(groups) / columns)
    fig, axes = plt.subplots(rows, columns, figsize=(4 * columns, 2.7 * rows + 0.4),
                             squeeze=False, layout="constrained")
    labels = label_models(grids[0].kind for grids in groups)
    for ax, grids in zip(axes.flat, groups):
        image = draw_cells(ax, average(grids), grids[0].T_train)
        ax.set_title(panel_title(grids, labels[grids[0].kind]))
    for ax in axes.flat[len(groups) :]:
        ax.axis("off")
    fig.supxlabel("context (tokens; K = 1,024)", fontsize=10)
    fig.supylabel("depth of the needle", fontsize=10)
    fig.colorbar(image, ax=axes, label="accuracy (%)")
    save_figure(fig, path)


def panel_title(grids, label):
    """Multiscreen, SWE, 8 seeds; then what it was trained on and asked for."""
    grid = grids[0]
    title = [label]
    if grid.swe:
        title.append("SWE")
    if any(factor for _, factor in grid.cells.values()):
        title.append("best RoPE scaling")
    counts = [sum(key in g.cells for g in grids) for key in average(grids)]
    if max(counts) > min(counts):
        title.append(f"{min(counts)} to {max(counts)} seeds")
    elif len(grids) > 1:
        title.append(count_of(len(grids), "seed"))
    return f"{', '.join(title)}\n{grid.task}; dashed: training length, {grid.T_train:,}"


def draw_cells(ax, cells, T_train):
    """Cells as colours with their accuracy in percent, and the best RoPE scaling factor."""
    lengths, depths = (sorted(set(x)) for x in zip(*cells))
    missing = math.nan, None
    percent = [[100 * cells.get((n, d), missing)[0] for n in lengths] for d in depths]
    image = ax.imshow(percent, vmin=0, vmax=100, cmap="cividis", aspect="auto")
    for (n, d), (accuracy, factor) in cells.items():
        text = f"{100 * accuracy:.1f}".removesuffix(".0") if accuracy else "--"
        if accuracy and factor:
            text += f"\n×{factor:g}"
        ax.text(lengths.index(n), depths.index(d), text, ha="center", va="center", fontsize=9,
                color="black" if accuracy > 0.45 else "white")

    # Black on white stands out from every colour.
    x = sum(n <= T_train for n in lengths) - 0.5
    ax.axvline(x, color="white", lw=3)
    ax.axvline(x, color="black", lw=1.5, ls="--")
    ax.set_xticks(range(len(lengths)), [short_length(n) for n in lengths])
    ax.set_yticks(range(len(depths)), [f"{d:g}" for d in depths])
    return image


def short_length(n):
    """512, 4K."""
    return f"{n // 1024}K" if n % 1024 == 0 else str(n)
