"""What every tile looks at in one text: the maps alpha_d.

Appendix "Visualization of Distance-Aware Relevance".

Paper:  python -m experiments.relevance_maps --text "The abstract of the paper .." \\
            --ckpt out/paper/multiscreen_psi8-0/ckpt.pt
        psi = 8 with GPT-2's tokens, 203 of them.
Small:  python -m experiments.relevance_maps --ckpt out/ckpt.pt
        10 seconds. 203 tokens of a text of ours. What it leaves out: with bytes for tokens this is
        two sentences instead of a passage.

A row of the grid is a layer, a column the n-th tile of each. In a map, queries i go down and keys j
to the right. Dark gray: outside the window, or in the future. White: inside it, and exactly 0. Pr
is the share of the pairs inside the window with alpha_d > 0. Most windows are short: so
relevance_by_distance.png has i down and the distance i - j to the right, up to the window, and one
map with its characters. The paper prints no numbers for its figure. It says: many maps have a
substantial number of zeros, more in some tiles.
"""
if not __package__:
    raise SystemExit("error: run python -m experiments.relevance_maps in the folder above")

import numpy as np
import torch

from experiments.common import pyplot, report, save_figure
from experiments.style import WIDTH
from multiscreen import window
from support.checkpoint import load_for_evaluation, require_windows
from support.cli import Parser, UsageError, cli
from support.table import beside

TEXT = (
    "Softmax attention hands out a fixed amount of weight, so a key can only win what "
    "another key loses. Screening asks every\n"
    "key the same question: are you similar enough to the query, and near enough? A key that "
    "fails is dropped, its relevance is\n"
    "exactly zero, whatever the others are worth. A key that passes is counted at its own "
    "value, and nobody else pays for it. If\n"
    "all keys fail, the sum is zero, and this is an answer too: nothing here is relevant. "
    "How similar is enough and how near is\n"
    "enough are learned, one pair of numbers for every tile. Some tiles look at the last few "
    "tokens only, others at everything\n"
    "that was ever said. Because a far key cannot take weight from a near one, a longer text "
    "does not blur what was seen before.\n"
)
COLUMNS = ["layer", "tile", "w", "r", "alive"]
OUTSIDE = (0.3, 0.3, 0.3, 1.0)                         # dark gray


def inside(T, w):
    """Which pairs (i, j) of T positions are in the past and nearer than w. (T, T) booleans"""
    d = np.arange(T) - np.arange(T)[:, None]
    return (-w < d) & (d <= 0)


def alive(alpha_d, w):
    """Pr(alpha_d > 0) among the pairs inside the window w. alpha_d: (T, T)"""
    return float((alpha_d > 0)[inside(len(alpha_d), w)].mean())


def by_distance(alpha_d, w):
    """alpha_d with the distance i - j in place of j, as far as the window reaches; NaN before 0.

    (T, T) -> (T, distances)
    """
    T = len(alpha_d)
    d = np.arange(T)[None]
    d = d[:, : int(min(np.ceil(w), T))]                # the last with d < w
    j = np.arange(T)[:, None] - d
    return np.where(j >= 0, alpha_d[np.arange(T)[:, None], np.maximum(j, 0)], np.nan)


@torch.no_grad()
def get_maps(model, tokens):
    """(maps (N_L, N_H, T, T), rows of COLUMNS for all tiles, counted from 1). tokens: (1, T)"""
    maps = torch.cat(model.relevance_maps(tokens)).float().cpu().numpy()
    rows = []
    for n, tile in enumerate(model.layers):
        widths = zip(window(tile.s_w).tolist(), tile.acceptance().tolist())
        for m, (w, r) in enumerate(widths):
            rows.append([n + 1, m + 1, w, r, alive(maps[n, m], w)])
    return maps, rows


# ------------------------------------------------------------------------------- pictures

def get_colors(plt, maps):
    """One colour scale for all maps. It starts far from white, which is exactly 0."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, PowerNorm

    cmap = ListedColormap(plt.cm.plasma_r(np.linspace(0.25, 1, 256)))
    return ScalarMappable(PowerNorm(0.5, 0, max(float(maps.max()), 1e-6)), cmap)


def paint(values, outside, colors):
    """Values as a picture: white where they are exactly 0. (..) -> (.., 4)"""
    image = colors.cmap(colors.norm(np.nan_to_num(values)))
    image[values == 0] = 1.0
    image[outside] = OUTSIDE
    return image


def short_width(w):
    """A window in four characters: 8.2, 150, 2.1k, 153k."""
    if w < 1000:
        return f"{w:.2g}" if w < 10 else f"{w:.0f}"
    return f"{w / 1000:.1f}k" if w < 10_000 else f"{w / 1000:.0f}k"


def draw_maps(plt, maps, rows):
    """The grid of all maps, (N_L, N_H, T, T), with w, r and Pr of each; one colour scale for all.

    8 tiles a layer fit the width of a page. More make the figure wider.
    """
    N_L, N_H = maps.shape[:2]
    colors = get_colors(plt, maps)
    fig, axes = plt.subplots(N_L, N_H, figsize=(max(WIDTH, N_H), 1.3 * N_L + 1.5), squeeze=False,
                             layout="constrained")
    for ax, alpha_d, row in zip(axes.flat, maps.reshape(-1, *maps.shape[2:]), rows):
        _, _, w, r, share = row
        ax.imshow(paint(alpha_d, ~inside(len(alpha_d), w), colors))
        title = f"w {short_width(w)} r {r:.2f}\nPr {share:.2f}"
        ax.set_title(title.replace(" 0.", " ."), fontsize=9, pad=2)
        ax.set(xticks=[], yticks=[])
    for n, ax in enumerate(axes[:, 0], 1):
        ax.set_ylabel(f"layer {n}", fontsize=9)
    for n, ax in enumerate(axes[-1], 1):
        ax.set_xlabel(f"tile {n}", fontsize=9)

    explain(plt, fig, axes, colors)
    last = maps.shape[-1] - 1
    fig.supxlabel(f"in a map: query i = 0 .. {last} down, key j = 0 .. {last} to the right",
                  fontsize=10)
    return fig


def explain(plt, fig, axes, colors):
    """The colour bar, and what white and gray are."""
    fig.colorbar(colors, ax=axes, location="bottom", shrink=0.6, fraction=0.02, pad=0.01,
                 label=r"distance-aware relevance $\alpha^\mathrm{d}$")
    handles = [plt.Rectangle((0, 0), 1, 1, facecolor="white", edgecolor="black"),
               plt.Rectangle((0, 0), 1, 1, facecolor=OUTSIDE)]
    fig.legend(handles, ["inside, exactly 0", "outside the window, or in the future"],
               loc="outside upper center", ncols=2, frameon=False)


def draw_distances(plt, maps, rows, characters):
    """All tiles by distance, and a large map of one of them with the characters on its axes.

    The large one: of the tiles with windows beyond 16 the one whose Pr is nearest to .15.
    """
    N_L, N_H = maps.shape[:2]
    colors = get_colors(plt, maps)
    height = 0.9 * N_L
    fig = plt.figure(figsize=(max(WIDTH, N_H), height + WIDTH), layout="constrained")
    above, below = fig.subfigures(2, 1, height_ratios=[WIDTH, height])
    tiles = [(tile, alpha_d, row) for tile, (alpha_d, row)
             in enumerate(zip(maps.reshape(-1, *maps.shape[2:]), rows))]
    _, alpha_d, row = min(tiles, key=lambda tile: (tile[2][2] <= 16, abs(tile[2][4] - 0.15)))
    n = min(len(characters), 64)
    ax = above.subplots()
    ax.imshow(paint(alpha_d[:n, :n], ~inside(n, row[2]), colors))
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_ticks(range(n), characters[:n], fontsize=7, family="monospace")
    ax.set(xlabel="key j", ylabel="query i",
           title=f"layer {row[0]}, tile {row[1]}: w {short_width(row[2])}, r {row[3]:.2f}, "
           f"Pr {row[4]:.2f}; the first {n} tokens")

    axes = below.subplots(N_L, N_H, squeeze=False)
    for ax, (_, alpha_d, row) in zip(axes.flat, tiles):
        values = by_distance(alpha_d, row[2])
        ax.imshow(paint(values, np.isnan(values), colors), aspect="auto", interpolation="nearest")
        ax.set(xticks=[0, values.shape[1] - 1] if values.shape[1] > 1 else [0], yticks=[])
        ax.tick_params(labelsize=7, pad=1)
    for n, ax in enumerate(axes[:, 0], 1):
        ax.set_ylabel(f"layer {n}", fontsize=9)
    for n, ax in enumerate(axes[0], 1):
        ax.set_title(f"tile {n}", fontsize=9)
    explain(plt, below, axes, colors)
    below.supxlabel("distance i - j to the right, up to the window; query i down", fontsize=10)
    return fig


def main():
    p = Parser(__doc__)
    p.add_argument("--text", default=TEXT, help="the text [six lines about screening]")
    p.add_argument("--tokens", type=int, default=203,
                   help="at most this many of its tokens; memory grows with their square [203]")
    p.add_shared("--ckpt", "--device")
    args = p.parse_args()
    if args.tokens < 1 or not args.text:
        raise UsageError("--tokens must be at least 1, and --text not empty")
    model, tokenizer, ckpt = load_for_evaluation(args.ckpt, args.device)
    require_windows(model, args.ckpt, ckpt["model"])

    tokens = tokenizer.encode_ordinary(args.text)
    shown = tokens[: args.tokens]
    print(f"{len(shown)} of the text's {len(tokens)} tokens ({tokenizer.name})", flush=True)
    maps, rows = get_maps(model, torch.tensor([shown], device=model.W_E.device))
    table = beside(args.ckpt, "relevance_maps.tsv")
    report(table, COLUMNS, rows,
           "Window w (tokens), acceptance width r, and alive = Pr(alpha_d > 0) inside the window, "
           f"{ckpt['model']} after {ckpt['step']} steps")
    if plt := pyplot():
        save_figure(draw_maps(plt, maps, rows), table.with_suffix(".png"))
        characters = [tokenizer.decode([token]).replace("\n", "\u21b5") for token in shown]
        save_figure(draw_distances(plt, maps, rows, characters),
                    beside(args.ckpt, "relevance_by_distance.png"))


if __name__ == "__main__":
    cli(main)
