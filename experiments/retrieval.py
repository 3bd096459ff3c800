"""Retrieval as figures: by context length and depth, a panel for each model, and by length alone.

Section "Retrieval Ability", appendices "ABCDigits" and "Passkey Retrieval Results", and the
retrieval of "Architectural Ablations".

    python -m experiments.retrieval out/abcdigits.tsv out-t/abcdigits.tsv --out out/figure.png

prints each seed's share at each length and how many seeds find 95 % or more, then the means. It
draws the tables of abcdigits.py, also as curves in figure_by_length.png, or those of `python -m
experiments.passkey`. Rows: Transformer, Multiscreen, Multiscreen + SWE; columns: sizes, or
ablations and their original; more than three continue below. Models that differ only in their seed
share a panel, which shows their mean.

Paper:  lengths of 2^12 to 2^17 tokens, 1000 prompts per cell; each Multiscreen again with --swe,
        each Transformer with --rope-scale 1 2 .. 64. It prints two means over the depths at 4,096
        tokens, its training length: 99.18 % for the 286M Multiscreen, 95.98 % for the 1.3B
        Transformer with the best RoPE scaling factor in each cell.
"""
import math
import statistics
from typing import NamedTuple

from experiments.common import (
    add_tables,
    get_figure,
    mean_and_std,
    percent,
    pyplot,
    save_figure,
)
from experiments.style import (
    ABLATIONS,
    WIDTH,
    count_of,
    legend_below,
    look,
    paper_name,
    plot_with_band,
    short_number,
    variant_of,
)
from support.cli import Parser, cli
from support.table import RUN, print_table

COLUMNS = ["model", "length", "x_training", "seeds", "prompts", "mean", "std", "worst_depth"]
ROWS = ("Transformer", "Multiscreen", "Multiscreen + SWE")
ORDER = ("", *ABLATIONS)
SIDE_BY_SIDE = 3                                       # panels; the letters of more are too small


# ------------------------------------------------------------------------------------- cells

class Cell(NamedTuple):
    """The share of right answers and the number of prompts by seed; the RoPE factor, or None."""
    shares: dict
    prompts: dict
    factor: str = None

    @property
    def mean(self):
        return statistics.mean(self.shares.values())


def get_cells(rows):
    """{(length, depth): Cell} of the rows of one model.

    For each seed the measurement with the most prompts counts. Of the RoPE factors, the one with
    the best mean over the seeds counts; of several, the smallest.
    """
    found = {}
    for row in sorted(rows, key=lambda row: int(row["trials"])):
        by_factor = found.setdefault((int(row["length"]), float(row["depth"])), {})
        factor = row["factor"] or None
        cell = by_factor.setdefault(factor, Cell({}, {}, factor))
        cell.shares[row["seed"]] = float(row["accuracy"])
        cell.prompts[row["seed"]] = int(row["trials"])
    cells = {}
    for place, by_factor in sorted(found.items()):
        candidates = sorted(by_factor.values(), key=lambda cell: size_of(cell.factor))
        cells[place] = max(candidates, key=lambda cell: (len(cell.shares), cell.mean))
    return cells


def size_of(factor):
    """For sorting: "2", "4", "ntk2", "ntk4"; None is first."""
    return (0, 0.0) if factor is None else (
        factor.startswith("ntk"), float(factor.removeprefix("ntk")))


def mean_by_length(cells):
    """{length: {seed: mean share over the depths}}

    Seeds measured at fewer depths than others are left out: their mean covers other cells.
    """
    columns = {}
    for (length, _), cell in cells.items():
        for seed, share in cell.shares.items():
            columns.setdefault(length, {}).setdefault(seed, []).append(share)
    return {length: {seed: statistics.mean(shares) for seed, shares in column.items()
                     if len(shares) == max(map(len, column.values()))}
            for length, column in columns.items()}


# ------------------------------------------------------------------------------------ panels

class Panel(NamedTuple):
    """A model in a figure: its cells are means over the seeds.

    label, title: in a legend, and beside the name of its row, one of ROWS.
    """
    label: str
    title: str
    row: int
    variant: str
    parameters: int
    T_train: int
    cells: dict


def get_panels(rows, labels):
    """The Panels of rows, small models first, ablations in the paper's order.

    Labels have the digits where they differ, the training length where one model has several, and
    the step where one seed has several: seeds end at different steps. An original stands beside its
    ablations at their lengths only.
    """
    lengths = {row["length"] for row in rows if variant_of(row["model"]) in ABLATIONS}
    steps, groups = {}, {}
    for row in rows:
        steps.setdefault(tuple(row[name] for name in RUN[:-1]), set()).add(row["step"])
    for row in rows:
        if not lengths or row["model"] != "multiscreen" or row["length"] in lengths:
            step = row["step"] if len(steps[tuple(row[name] for name in RUN[:-1])]) > 1 else ""
            key = [row[name] for name in ("model", "parameters", "seq_len", "swe")]
            groups.setdefault((*key, row.get("digits", ""), step), []).append(row)
    panels = []
    for key, found in groups.items():
        model, parameters, T_train, swe, digits, step = key
        label = labels[model, parameters]
        words = [f"{digits} digits"] * (len({other[4] for other in groups}) > 1)
        lengths_of = {other[2] for other in groups if other[:2] == key[:2]}
        words += [f"trained at {T_train}"] * (len(lengths_of) > 1)
        words += [f"step {step}"] * bool(step)
        row = 0 if model.startswith("transformer") else 2 if swe else 1
        kind = paper_name(model).partition(", ")[2]    # "local"
        title = ", ".join(filter(None, [kind, short_number(int(parameters))]))
        title = label if lengths else title
        panels.append(Panel(", ".join([label, *words]), ", ".join([title, *words]), row,
                            variant_of(model), int(parameters), int(T_train), get_cells(found)))

    def place(panel):
        variant = panel.variant
        return panel.row, ORDER.index(variant) if variant in ORDER else 0, panel.parameters

    return sorted(panels, key=place)


def name_of(panel):
    """A panel's label in a table or a legend."""
    return panel.label + " + SWE" * (panel.row == 2)


def at_least_95(by_seed):
    """"6 of 8": how many seeds find 95 % or more. by_seed: {seed: share}"""
    return f"{sum(share >= 0.95 for share in by_seed.values())} of {len(by_seed)}"


def seed_rows(panels, lengths):
    """A row for each model and seed: its mean over the depths at each length.

    Several seeds of a model get one more row: how many find 95 % or more.
    """
    rows = []
    for panel in panels:
        found = mean_by_length(panel.cells)
        seeds = {seed for by_seed in found.values() for seed in by_seed}
        for seed in sorted(seeds, key=lambda seed: (len(seed), seed)):
            shares = [found.get(length, {}).get(seed) for length in lengths]
            rows.append([name_of(panel), seed, *map(percent, shares)])
        if len(seeds) > 1:
            rows.append([name_of(panel), "95 %", *(at_least_95(found[length]) if length in found
                                                   else None for length in lengths)])
    return rows


def retrieval_rows(panels):
    """A row of COLUMNS for each model and length: the mean over the depths, std over the seeds.

    prompts: in a cell of one seed, as a range where they differ.
    """
    rows = []
    for panel in panels:
        for length, by_seed in mean_by_length(panel.cells).items():
            mean, std, _ = mean_and_std(by_seed.values())
            column = [cell for (n, _), cell in panel.cells.items() if n == length]
            prompts = [n for cell in column for seed, n in cell.prompts.items() if seed in by_seed]
            least, most = min(prompts), max(prompts)
            of_depths = [[cell.shares[seed] for seed in by_seed if seed in cell.shares]
                         for cell in column]
            worst = min(statistics.mean(shares) for shares in of_depths if shares)
            rows.append([name_of(panel), length, length / panel.T_train, len(by_seed),
                         most if least == most else f"{least}-{most}", percent(mean),
                         percent(std), percent(worst)])
    return rows


# ----------------------------------------------------------------------- by length and depth

def draw_panels(plt, panels, path, note):
    """The panels with one colour bar. note: behind the words of the x axis."""
    lines = []
    for n, name in enumerate(ROWS):
        shown = [panel for panel in panels if panel.row == n]
        lines += [(name, shown[i : i + SIDE_BY_SIDE])
                  for i in range(0, len(shown), SIDE_BY_SIDE)]
    n = max(len(shown) for _, shown in lines)
    fig, axes = plt.subplots(len(lines), n, squeeze=False, layout="constrained",
                             figsize=(max(WIDTH, 2.9 * n), 2.5 * len(lines) + 0.5))
    for line, (name, shown) in zip(axes, lines):
        for ax in line[len(shown) :]:
            ax.axis("off")
        for ax, panel in zip(line, shown):
            image = draw_cells(ax, panel.cells, panel.T_train)
            title = f"{panel.title}, {count_seeds(panel.cells)}"
            ax.set_title(f"{name}, {title}" if n < 3 else f"{name}\n{title}")
    scaled = any(cell.factor for panel in panels for cell in panel.cells.values())
    fig.supxlabel("context (tokens; K = 1,024; dashed: training length)"
                  f"{note}\n--: no needle found; white: not measured"
                  f"{'; ×n: the best RoPE scaling, ntk: of theta' * scaled}", fontsize=10)
    fig.supylabel("depth of the needle", fontsize=10)
    fig.colorbar(image, ax=axes, label="accuracy (%)")
    save_figure(fig, path)


def count_seeds(cells):
    """"3 seeds", or "1 to 3 seeds" where some cells have fewer."""
    counts = {len(cell.shares) for cell in cells.values()}
    least = f"{min(counts)} to " if len(counts) > 1 else ""
    return least + count_of(max(counts), "seed")


def draw_cells(ax, cells, T_train):
    """Cells as colours with their accuracy in percent, and the best RoPE scaling factor."""
    lengths, depths = (sorted(set(x)) for x in zip(*cells))
    grid = [[100 * cells[n, d].mean if (n, d) in cells else math.nan for n in lengths]
            for d in depths]
    image = ax.imshow(grid, vmin=0, vmax=100, cmap="cividis", aspect="auto")
    for (n, d), cell in cells.items():
        text = f"{100 * cell.mean:.1f}".removesuffix(".0") if cell.mean else "--"
        if cell.mean and cell.factor:
            text += f"\n{cell.factor if cell.factor.startswith('ntk') else '×' + cell.factor}"
        ax.text(lengths.index(n), depths.index(d), text, ha="center", va="center",
                fontsize=6 if cell.factor else 8 if len(lengths) < 7 else 7,
                color="black" if cell.mean > 0.45 else "white")

    # Black on white stands out from every colour.
    x = sum(n <= T_train for n in lengths) - 0.5
    ax.axvline(x, color="white", lw=3)
    ax.axvline(x, color="black", lw=1.5, ls="--")
    short = [f"{n // 1024}K" if n % 1024 == 0 else str(n) for n in lengths]
    ax.set_xticks(range(len(lengths)), short)
    ax.set_yticks(range(len(depths)), [f"{d:g}" for d in depths])
    return image


# --------------------------------------------------------------------------------- by length

def draw_by_length(plt, panels, path):
    """The means over the depths as curves by length, with a band of one std over the seeds.

    A hollow marker has fewer seeds than others of its curve.
    """
    fig, ax = plt.subplots(figsize=(WIDTH, 4), layout="constrained")
    lengths, hollow = set(), False
    for n, panel in enumerate(sorted(panels, key=lambda panel: panel.row or 1.5)):
        found = mean_by_length(panel.cells)
        stats = [mean_and_std([100 * share for share in x.values()]) for x in found.values()]
        means, stds, _ = zip(*stats)                   # one seed has std NaN: no band
        most = max(map(len, found.values()))
        plot_with_band(ax, list(found), means, stds, clip_on=False, **look(n),
                       label=f"{name_of(panel)}, {count_of(most, 'seed')}")
        fewer = {length: mean for length, mean in zip(found, means) if len(found[length]) < most}
        ax.plot([*fewer], [*fewer.values()], clip_on=False, in_layout=False, zorder=3, ms=5,
                **look(n) | {"ls": "", "mfc": "white"})
        lengths |= found.keys()
        hollow |= bool(fewer)
        ax.axvline(panel.T_train, color="0.5", lw=1, ls=":")
    ax.annotate("training length", (panel.T_train, 50), (-5, 0), textcoords="offset points",
                color="0.4", rotation=90, ha="right", va="center")
    ax.set(xscale="log", ylim=(0, 100), ylabel="answers found (%)",
           title="Answers found beyond the training length: mean and deviation over the seeds",
           xlabel="context (tokens)" + "; hollow markers: fewer seeds" * hollow)
    ax.set_xticks(sorted(lengths), [f"{n:,}" for n in sorted(lengths)])
    ax.minorticks_off()
    legend_below(fig, ax, 3)
    save_figure(fig, path)


def main():
    p = Parser(__doc__)
    add_tables(p, "+")
    rows, out, labels = get_figure(p.parse_args(), "accuracy")
    panels = get_panels(rows, labels)
    lengths = sorted({length for panel in panels for length, _ in panel.cells})
    print_table(["model", "seed", *map(str, lengths)], seed_rows(panels, lengths),
                "Needles found by seed and length; 95 %: seeds that find 95 % or more")
    print_table(COLUMNS, retrieval_rows(panels), "Needles found, mean over the depths")
    if plt := pyplot():
        digits = {row.get("digits") for row in rows} - {None}
        draw_panels(plt, panels, out, f"; {digits.pop()} digits" if len(digits) == 1 else "")
        if "digits" in rows[0] and not any(panel.variant in ABLATIONS for panel in panels):
            draw_by_length(plt, panels, out.with_name(f"{out.stem}_by_length.png"))


if __name__ == "__main__":
    cli(main)
