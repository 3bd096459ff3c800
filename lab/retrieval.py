"""How many needles does a model find, by the length of the context and the depth of the needle?

This compares models in figures like those of the paper's section "Retrieval Ability", its
appendices "ABCDigits" and "Passkey Retrieval Results", and the retrieval part of "Architectural
Ablations".

    python -m lab.retrieval out/abcdigits.tsv out-t/abcdigits.tsv --out out/figure.png

The tables are those that abcdigits.py or `python -m lab.passkey` has filled. For each seed
the share of needles found at each length is printed, then the mean and the deviation over the
seeds, and how many seeds find 95 % or more. Models that differ only in their seed share a panel of
the figure, which shows their mean at each length and depth; models with SWE come last. If there are
no more than seven models, they are also drawn as curves, in figure_by_length.png.

Paper:  python abcdigits.py --ckpt out/paper/psi32-0/ckpt.pt --digits 6 \\
            --lengths 4096 8192 16384 32768 65536 131072 --trials 1000
        Run this again with --swe for each Multiscreen and each ablation. For each Transformer and
        the ablation rope, run it with --rope-scale 1 2 4 8 16 32 64. The paper prints two numbers,
        both of them means over the depths at 4,096 tokens, its training length: 99.18 % for the
        286M Multiscreen, and 95.98 % for the 1.3B Transformer with the best RoPE scaling factor for
        each length and depth.
"""
import math
import statistics
from typing import NamedTuple

from lab.common import (
    add_tables,
    get_figure,
    group_rows,
    mean_and_std,
    percent,
    pyplot,
    save_figure,
)
from lab.style import COLORS, WIDTH, count_of, legend_below, look, plot_with_band
from support.cli import Parser, cli
from support.measure import print_table

CELL = ("length", "depth", "factor", "swe", "trials")


class Cell(NamedTuple):
    """{seed: share of right answers} at a length and a depth, and the RoPE factor, or ""."""
    shares: dict
    factor: str

    @property
    def mean(self):
        return statistics.mean(self.shares.values())


def get_cells(rows):
    """{(length, depth): Cell} of the rows of one model, dicts of text.

    For each seed the measurement with the most prompts counts. Of the RoPE factors, the one with
    the best mean over the seeds counts; of equal ones, the first.
    """
    found = {}
    for row in sorted(rows, key=lambda row: int(row["trials"])):
        by_factor = found.setdefault((int(row["length"]), float(row["depth"])), {})
        cell = by_factor.setdefault(row["factor"], Cell({}, row["factor"]))
        cell.shares[row["seed"]] = float(row["accuracy"])
    return {place: max(by_factor.values(), key=lambda cell: (len(cell.shares), cell.mean))
            for place, by_factor in sorted(found.items())}


class Panel(NamedTuple):
    """A model in a figure. cells: those of get_cells"""
    name: str
    T_train: int
    cells: dict

    @property
    def title(self):
        """The model and how many seeds it has, "1 to 3 seeds" if some cells have fewer."""
        counts = {len(cell.shares) for cell in self.cells.values()}
        least = f"{min(counts)} to " if len(counts) > 1 else ""
        return f"{self.name}, {least}{count_of(max(counts), 'seed')}"


# ------------------------------------------------------------------------------------- cells

def mean_by_length(cells):
    """{length: {seed: mean share over the depths}}

    Seeds that lack a depth which others have are left out: their mean covers other cells.
    """
    columns = {}
    for (length, depth), cell in cells.items():
        for seed, share in cell.shares.items():
            columns.setdefault(length, {}).setdefault(seed, {})[depth] = share
    return {length: {seed: statistics.mean(shares.values()) for seed, shares in column.items()
                     if shares.keys() == set().union(*column.values())}
            for length, column in columns.items()}


def get_panels(rows):
    """The Panels of rows, in their order, those with SWE last."""
    groups = group_rows(sorted(rows, key=lambda row: row["swe"]), {
        "digits": ", {} digits", "seq_len": ", trained at {}", "swe": " + SWE"})
    return [Panel(label + setting, int(found[0]["seq_len"]), get_cells(found))
            for (label, setting), found in groups.items()]


def left_out(panels):
    """A line for each seed and length that has no mean, though it was measured."""
    for panel in panels:
        found = mean_by_length(panel.cells)
        measured = {(length, seed) for (length, _), cell in panel.cells.items()
                    for seed in cell.shares}
        for length, seed in sorted(measured, key=lambda pair: (pair[0], len(pair[1]), pair[1])):
            if seed not in found[length]:
                yield (f"{panel.name}, seed {seed}: no mean at {length} tokens, since it lacks "
                       "depths that other seeds have")


def table_rows(panels, lengths):
    """For each model a row a seed, its mean over the depths; then what several seeds have."""
    rows = []
    for panel in panels:
        found = mean_by_length(panel.cells)
        columns = [found.get(length, {}) for length in lengths]
        seeds = {seed for cell in panel.cells.values() for seed in cell.shares}
        for seed in sorted(seeds, key=lambda seed: (len(seed), seed)):
            rows.append([panel.name, seed, *(percent(column.get(seed)) for column in columns)])
        if len(seeds) > 1:
            means, stds = zip(*(mean_and_std(column.values()) for column in columns))
            rows.append([panel.name, "mean", *map(percent, means)])
            rows.append([panel.name, "std", *map(percent, stds)])
            enough = [sum(share >= 0.95 for share in column.values()) for column in columns]
            rows.append([panel.name, "95 %", *(f"{n} of {len(column)}" if column else None
                                               for n, column in zip(enough, columns))])
    return rows


# ------------------------------------------------------------------------------------ figures

def draw_panels(plt, panels, path):
    """A panel for each model: accuracy in percent by length and depth, the best RoPE factor."""
    columns = 2 if len(panels) == 4 else min(len(panels), 3)
    lines = math.ceil(len(panels) / columns)
    fig, axes = plt.subplots(lines, columns, squeeze=False, layout="constrained",
                             figsize=(WIDTH + 1, 2.5 * lines + 0.5))
    for ax in axes.flat[len(panels):]:
        ax.axis("off")
    for ax, panel in zip(axes.flat, panels):
        image = draw_cells(ax, panel)
    scaled = any(cell.factor for panel in panels for cell in panel.cells.values())
    fig.supxlabel("context (tokens; K = 1,024; dashed: training length)\n--: no needle found; "
                  f"white: not measured{'; ×n: the best RoPE scaling, ntk: of theta' * scaled}",
                  fontsize=10)
    fig.supylabel("depth of the needle", fontsize=10)
    fig.colorbar(image, ax=axes, fraction=0.03, aspect=40, label="answers found (%)")
    save_figure(fig, path)


def draw_cells(ax, panel):
    lengths, depths = (sorted(set(x)) for x in zip(*panel.cells))
    grid = [[100 * panel.cells[n, d].mean if (n, d) in panel.cells else math.nan for n in lengths]
            for d in depths]
    image = ax.imshow(grid, vmin=0, vmax=100, cmap="cividis", aspect="auto")
    for (n, d), cell in panel.cells.items():
        text = f"{100 * cell.mean:.1f}".removesuffix(".0") if cell.mean else "--"
        if cell.mean and cell.factor:
            text += f"\n{cell.factor if cell.factor.startswith('ntk') else '×' + cell.factor}"
        ax.text(lengths.index(n), depths.index(d), text, ha="center", va="center",
                fontsize=6 if cell.factor else 7, color="black" if cell.mean > 0.45 else "white")

    # Black on white stands out from every colour.
    x = sum(n <= panel.T_train for n in lengths) - 0.5
    ax.axvline(x, color="white", lw=3)
    ax.axvline(x, color="black", lw=1.5, ls="--")
    short = [f"{n // 1024}K" if n % 1024 == 0 else str(n) for n in lengths]
    ax.set_xticks(range(len(lengths)), short)
    ax.set_yticks(range(len(depths)), [f"{d:g}" for d in depths])
    ax.set_title(panel.title)
    return image


def draw_by_length(plt, panels, path):
    """The means over the depths as curves by length, with a band of one std over the seeds."""
    fig, ax = plt.subplots(figsize=(WIDTH, 4), layout="constrained")
    for n, panel in enumerate(panels):
        found = mean_by_length(panel.cells)
        stats = [mean_and_std([100 * share for share in x.values()]) for x in found.values()]
        means, stds = zip(*stats)                      # one seed has std NaN: no band
        plot_with_band(ax, list(found), means, stds, clip_on=False, label=panel.title, **look(n))
        ax.axvline(panel.T_train, color="0.5", lw=1, ls=":")
    ax.annotate("training length", (panel.T_train, 50), (-5, 0), textcoords="offset points",
                color="0.4", rotation=90, ha="right", va="center")
    ax.set(xscale="log", ylim=(0, 100), ylabel="answers found (%)", xlabel="context (tokens)",
           title="Answers found beyond the training length: mean and deviation over the seeds")
    lengths = sorted({length for panel in panels for length, _ in panel.cells})
    ax.set_xticks(lengths, [f"{n:,}" for n in lengths])
    ax.minorticks_off()
    legend_below(fig)
    save_figure(fig, path)


def main():
    p = Parser(__doc__)
    add_tables(p, "+")
    rows, out = get_figure(p, "accuracy")
    panels = get_panels(rows)
    lengths = sorted({length for panel in panels for length, _ in panel.cells})
    trials = " or ".join(map(str, sorted({int(row["trials"]) for row in rows})))
    print_table(["model", "seed", *map(str, lengths)], table_rows(panels, lengths),
                f"Needles found by length, mean over the depths, prompts per cell: {trials}; "
                "95 %: seeds that find 95 % or more")
    for line in left_out(panels):
        print(line)
    if plt := pyplot():
        draw_panels(plt, panels, out)
        if len(panels) <= len(COLORS):
            draw_by_length(plt, panels, out.with_name(f"{out.stem}_by_length.png"))


if __name__ == "__main__":
    cli(main)
