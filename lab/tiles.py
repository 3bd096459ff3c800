"""What have the tiles learned: where do they look, how far, and how similar must a key be?

This reproduces the appendices "Distribution of Learned Screening Parameters" and "Visualization of
Distance-Aware Relevance" for any checkpoint.

Paper:  python -m lab.tiles --ckpt out/paper/psi64-0/ckpt.pt
        This model has 4,096 tiles; docs/scale.md has the command that trains it. The
        paper's maps show the model with psi = 8 on the paper's own abstract, which has 203 of
        GPT-2's tokens: pass it with --text "..".
Small:  python -m lab.tiles --ckpt out/ckpt.pt
        This takes 10 seconds. With psi = 8 there are 64 tiles; the maps show 203 bytes of a text
        that we wrote for it.

A summary of each layer is printed. tiles.tsv, beside the checkpoint, has one row per tile.

tiles_windows.png shows how far and how selectively the tiles look: a point for each tile, with its
window w on a logarithmic axis and its acceptance width r, and a histogram of each. The dotted line
is w_th; tiles to the right of it have no positional encoding. The dashed line is the training
length. In the paper most windows are local or medium-range, a few exceed the training length, and r
is often close to 1.

tiles_maps.png shows the relevance maps alpha_d of all tiles, one row of the grid per layer; 3.7 is
tile 7 of layer 3. tiles_six.png shows at most six of them in a larger size, chosen among the tiles
that accept a key, from narrow windows to wide ones. In each map, queries i run downwards and keys j
to the right. A pair is dark gray if it is outside the window or in the future, and white if it is
inside but its relevance is exactly 0. "alive", the paper's Pr, is the share of the pairs inside the
window with alpha_d > 0. In the paper many maps have a substantial number of zeros, some tiles more
than others. There are no maps if a layer does not call the `screen` that it is given.

If alive is 0, the tile accepts nothing in this text, because no similarity in its window is above
1 - r. Such a tile may recover. In one run on tiny Shakespeare 17 of 64 tiles accepted nothing at
step 100, and 10 of these accepted a key again at some later checkpoint, up to step 450. Of 18 such
tiles at step 200, 5 did (LOG.md).
"""
import math
from typing import NamedTuple

import numpy as np
import torch

from lab.common import pyplot, save_figure, write_rows
from lab.style import COLORS, WIDTH, legend_below
from support.cli import Parser, UsageError, cli
from support.maps import count_alive, inside, maps_of
from support.measure import (
    add_flags,
    beside,
    cell_text,
    load_for_evaluation,
    print_table,
    require_finite,
    require_windows,
)

TEXT = (
    "Softmax attention hands out a fixed amount of weight, so a key can only win what another key "
    "loses. Screening asks every\nkey the same question: are you similar enough to the query, and "
    "near enough? A key that fails is dropped, its relevance is\nexactly zero, whatever the others "
    "are worth. A key that passes is counted at its own value, and nobody else pays for it."
)
SUMMARY = ["layer", "tiles", "w_min", "w_median", "w_max", "r_min", "r_median", "r_max", "w>w_th",
           "w>T_train", "alive", "alive=0"]
TOKENS = 203                                           # of a text: a map has TOKENS^2 pairs
OUTSIDE = "0.3"                                        # dark gray


class Tile(NamedTuple):
    """A row of tiles.tsv. layer and tile count from 1; alive is NaN without maps."""
    layer: int
    tile: int
    w: float
    r: float
    alive: float


# -------------------------------------------------------------------------------------- table

@torch.no_grad()
def measure(model, tokens):
    """(all Tiles, their maps (N_L N_H, T, T), or None if there are none).

    tokens: (1, T). Raises FloatingPointError for relevances that are not finite: they would count
    as alive.
    """
    maps = maps_of(model, tokens)
    tiles = []
    for n, layer in enumerate(model.layers):
        w, r = layer.window(), layer.acceptance()
        alive = torch.full_like(w, math.nan)
        if maps:
            require_finite(maps[n], "relevances")
            count, pairs = count_alive(maps[n], w)
            alive = count / pairs
        values = zip(w.tolist(), r.tolist(), alive.tolist())
        tiles += [Tile(n + 1, m, *cells) for m, cells in enumerate(values, 1)]
    return tiles, torch.cat(maps).flatten(0, 1).float().cpu().numpy() if maps else None


def summary(name, tiles, w_th, T_train):
    """A row of SUMMARY for some Tiles. alive: the mean over them."""
    w, r, alive = np.array([tile[2:] for tile in tiles]).T
    return [name, len(w), w.min(), np.median(w), w.max(), r.min(), np.median(r), r.max(),
            int((w > w_th).sum()), int((w > T_train).sum()), alive.mean(), int((alive == 0).sum())]


# ------------------------------------------------------------------------------------ figures

def draw_windows(plt, tiles, w_th, T_train):
    """Points (w, r) coloured by layer, with marginal histograms.

    Infinite windows stand at the right edge, and in the last bin.
    """
    w, r, _ = np.array([tile[2:] for tile in tiles]).T
    layer, n_layers = [tile.layer for tile in tiles], tiles[-1].layer
    edge = 2.4 * max(w[w < np.inf].max(initial=1), w_th, T_train)
    w = w.clip(max=edge)
    fig, axes = plt.subplots(2, 2, figsize=(WIDTH, 6), width_ratios=[4, 1], height_ratios=[1, 4],
                             sharex="col", sharey="row", layout="constrained")
    (top, corner), (ax, right) = axes
    corner.axis("off")

    # The points, and the two lengths that matter to a window.
    points = ax.scatter(w, r, 30, layer, cmap="viridis", vmin=1, vmax=max(n_layers, 2),
                        edgecolors="black", linewidths=0.3, clip_on=False)
    for a in (ax, top):
        a.axvline(w_th, color=COLORS[1], ls=":", lw=2.5,
                  label=rf"$w_\mathrm{{th}}$ = {w_th:g}, no MiPE from here on")
        a.axvline(T_train, color="black", ls="--", label=f"training length, {T_train:,} tokens")
    ax.set(xscale="log", xlim=(1, edge), ylim=(-0.03, 1.03),
           xlabel="screening window w (tokens)", ylabel="acceptance width r")

    # The histograms.
    top.hist(w, np.geomspace(1, edge, 31), color="gray")
    right.hist(r, np.linspace(0, 1, 21), orientation="horizontal", color="gray")
    top.set(ylabel="tiles")
    right.set(xlabel="tiles")
    for axis in (top.yaxis, right.xaxis):
        axis.set_major_locator(plt.MaxNLocator(3, integer=True))
    legend_below(fig)
    fig.colorbar(points, ax=axes, label="layer", ticks=range(1, n_layers + 1, -(-n_layers // 8)))
    return fig


def spread(tiles):
    """The indices of at most six tiles that accept a key, from narrow windows to wide ones."""
    alive = [n for n, tile in enumerate(tiles) if tile.alive > 0] or [0]
    w = np.log([tiles[n].w for n in alive])
    nearest = {alive[abs(w - x).argmin()] for x in np.linspace(w.min(), w.max(), 6)}
    return sorted(nearest, key=lambda n: tiles[n].w)


def draw_maps(plt, maps, tiles, columns):
    """A grid of maps, (n, T, T), with w, r and alive of each; one colour scale for all.

    8 columns fit the width of a page. More make the figure wider. The colours start far from white,
    which is exactly 0.
    """
    from matplotlib.colors import ListedColormap, PowerNorm

    cmap = ListedColormap(plt.cm.plasma_r(np.linspace(0.25, 1, 256)))
    cmap = cmap.with_extremes(bad=OUTSIDE, under="white")
    norm = PowerNorm(0.5, 1e-9, max(float(maps.max()), 1e-6))
    lines = -(-len(maps) // columns)
    size = max(WIDTH / columns, 1)
    fig, axes = plt.subplots(lines, columns, figsize=(size * columns, (size + 0.3) * lines + 1.5),
                             squeeze=False, layout="constrained")
    for ax in axes.flat[len(maps):]:
        ax.set_axis_off()
    for ax, alpha_d, (layer, tile, w, r, alive) in zip(axes.flat, maps, tiles):
        outside = ~inside(len(alpha_d), torch.tensor([w]))[0].numpy()
        image = ax.imshow(np.ma.array(alpha_d, mask=outside), cmap=cmap, norm=norm)
        w = f"{w:.2g}" if w < 10 else f"{w:,.0f}"
        title = f"{layer}.{tile}: alive {alive:.2f}\nw {w} r {r:.2f}"
        ax.set_title(title.replace(" 0.", " ."), fontsize=9, pad=2)
        ax.set(xticks=[], yticks=[])

    # The colour bar, and what white and gray are.
    fig.colorbar(image, ax=axes, location="bottom", shrink=0.6, fraction=0.02, pad=0.01,
                 label=r"distance-aware relevance $\alpha^\mathrm{d}$")
    handles = [plt.Rectangle((0, 0), 1, 1, facecolor="white", edgecolor="black"),
               plt.Rectangle((0, 0), 1, 1, facecolor=OUTSIDE)]
    fig.legend(handles, ["inside, exactly 0", "outside the window, or in the future"],
               loc="outside upper center", ncols=2, frameon=False)
    last = maps.shape[-1] - 1
    fig.supxlabel(f"above a map: layer.tile; in it: query i = 0 .. {last} down, "
                  f"key j = 0 .. {last} to the right", fontsize=10)
    return fig


def main():
    p = Parser(__doc__)
    p.add_argument("--text", default=TEXT, help=f"draw the maps of the first {TOKENS} tokens of "
                   "this text [four sentences about screening]")
    add_flags(p)
    args = p.parse_args()
    if not args.text:
        raise UsageError("--text must not be empty")
    model, tokenizer, ckpt = load_for_evaluation(args.ckpt, args.device)
    require_windows(model, args.ckpt)
    path = beside(args.ckpt, "tiles.tsv", args.table)

    # The table.
    tokens = tokenizer.encode_ordinary(args.text)
    shown = tokens[:TOKENS]
    tiles, maps = measure(model, torch.tensor([shown], device=model.W_E.device))
    write_rows(path, [dict(zip(Tile._fields, map(cell_text, tile))) for tile in tiles])
    # Multiscreen's is a size; that of screening in a Transformer's layers is theirs.
    w_th = getattr(model.config, "w_th", None) or model.layers[0].w_th
    T_train = ckpt["args"]["seq_len"]
    layers = [summary(n, [tile for tile in tiles if tile.layer == n], w_th, T_train)
              for n in range(1, len(model.layers) + 1)]
    print_table(SUMMARY, [*layers, summary("all", tiles, w_th, T_train)],
                f"Learned windows w (tokens) and acceptance widths r, {ckpt['model']} after "
                f"{ckpt['step']} steps; w_th {w_th:g}, training length {T_train}; alive: on "
                f"the first {len(shown)} of the text's {len(tokens)} tokens ({tokenizer.name})")
    print(f"wrote {path}")
    if maps is None:
        print(f"no maps: a layer of {ckpt['model']} does not call the screen that it is given, or "
              "calls it more than once")

    # The figures.
    if plt := pyplot():
        figures = {"windows": draw_windows(plt, tiles, w_th, T_train)}
        if maps is not None:
            six = spread(tiles)
            figures["maps"] = draw_maps(plt, maps, tiles, len(tiles) // len(model.layers))
            figures["six"] = draw_maps(plt, maps[six], [tiles[n] for n in six], 3)
        for name, figure in figures.items():
            save_figure(figure, path.with_name(f"{path.stem}_{name}.png"))


if __name__ == "__main__":
    cli(main)
