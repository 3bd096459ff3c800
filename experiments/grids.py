"""Retrieval as pictures: accuracy by depth and length, a panel for each model, as in the paper."""
import math

from experiments.common import save_figure
from experiments.models import model_of, split_runs, tell_apart
from experiments.style import ABLATIONS, WIDTH, count_of, short_number
from support.results import flag
from support.retrieval import get_cells

ROWS = ("Transformer", "Multiscreen", "Multiscreen + SWE")


def arrange(models):
    """({row: [(title, {Key: share})]} of all sizes, the same of the ablations), small ones first.

    models: as `by_model` gives them. An ablation's original has the same flags but for --model; it
    stands beside them at their lengths.
    """
    sizes, ablations, order = {}, {}, ["", *ABLATIONS]
    words = tell_apart([key for values in models for key in values])
    models = sorted(((next(iter(values)), values) for values in models),
                    key=lambda pair: model_of(pair[0].run).parameters)
    plain, same = split_runs([key.run for key, _ in models])
    lengths = {k.length for key, values in models if model_of(key.run).variant in ABLATIONS
               for k in values}
    for key, values in models:
        model = model_of(key.run)
        row = ROWS[0] if model.family == "transformer" else ROWS[2 if key.swe else 1]
        if key.run in plain:
            title = f"{short_number(model.parameters)}, {count_seeds(values)}{words(key)}"
            sizes.setdefault(row, []).append((title, values))
        values = {k: x for k, x in values.items() if k.length in lengths}
        if values and key.run in same:
            name = ABLATIONS.get(model.variant, "Original")
            title = f"{name}, {count_seeds(values)}{words(key)}"
            ablations.setdefault(row, []).append((order.index(model.variant), title, values))
    for row, panels in ablations.items():
        ablations[row] = [panel[1:] for panel in sorted(panels, key=lambda panel: panel[0])]
    return sizes, ablations


def count_seeds(values):
    """"3 seeds", or "1 to 3 seeds" where some cells have fewer."""
    counts = {len(cell.shares) for cell in get_cells(values).values()}
    least = f"{min(counts)} to " if len(counts) > 1 else ""
    return least + count_of(max(counts), "seed")


def draw_grids(plt, models, path):
    """All sizes in the figure `path`; the ablations, if there are any, in one beside it."""
    sizes, ablations = arrange(models)
    if sizes:
        draw_panels(plt, sizes, path)
    if ablations:
        draw_panels(plt, ablations, path.with_name(f"{path.stem}_ablations.png"))


def draw_panels(plt, rows, path):
    """{row: [(title, {Key: share})]} as panels with one colour bar."""
    rows = {name: rows[name] for name in ROWS if name in rows}
    n = max(map(len, rows.values()))
    fig, axes = plt.subplots(len(rows), n, figsize=(max(WIDTH, 2.9 * n), 2.5 * len(rows) + 0.5),
                             squeeze=False, layout="constrained")
    for line, (name, panels) in zip(axes, rows.items()):
        for ax in line[len(panels) :]:
            ax.axis("off")
        for ax, (title, values) in zip(line, panels):
            key = next(iter(values))
            image = draw_cells(ax, get_cells(values), int(flag(key.run, "--seq-len")))
            ax.set_title(f"{name}, {title}" if n < 3 else f"{name}\n{title}")
    task = key.task.partition(", ")[2]                 # titles have it where there are several
    task = f"; {task}" if task and task not in title else ""
    scaled = any(k.factor for panels in rows.values() for _, values in panels for k in values)
    fig.supxlabel(f"context (tokens; K = 1,024; dashed: training length){task}\n"
                  "--: no needle found; white: not measured"
                  f"{'; ×n: the best RoPE scaling factor' * scaled}", fontsize=10)
    fig.supylabel("depth of the needle", fontsize=10)
    fig.colorbar(image, ax=axes, label="accuracy (%)")
    save_figure(fig, path)


def draw_cells(ax, cells, T_train):
    """Cells as colours with their accuracy in percent, and the best RoPE scaling factor."""
    lengths, depths = (sorted(set(x)) for x in zip(*cells))
    percent = [[100 * cells[n, d].mean if (n, d) in cells else math.nan for n in lengths]
               for d in depths]
    image = ax.imshow(percent, vmin=0, vmax=100, cmap="cividis", aspect="auto")
    for (n, d), cell in cells.items():
        text = f"{100 * cell.mean:.1f}".removesuffix(".0") if cell.mean else "--"
        if cell.mean and cell.factor:
            text += f"\n×{cell.factor:g}"
        ax.text(lengths.index(n), depths.index(d), text, ha="center", va="center",
                fontsize=8 if len(lengths) < 7 else 7,
                color="black" if cell.mean > 0.45 else "white")

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
