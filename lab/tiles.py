"""What do the tiles see: how far do they look, how similar must a key be, and which keys count?

    python -m lab.tiles --ckpt out/ckpt.pt
    python -m lab.tiles --ckpt out/ckpt.pt --text "The paper's maps show its own abstract, .."

From the appendices "Distribution of Learned Screening Parameters" and "Visualization of
Distance-Aware Relevance". A summary of each layer is printed. Beside the checkpoint you find
tiles.tsv, with a row for each tile, and two figures: tiles_windows.png has a point (w, r) for each
tile, tiles_maps.png shows the weights of all tiles, a row for each layer.

The weights are those by which the layer itself sums values, whatever its screen is. In a map,
queries run downwards and keys to the right. A weight is white if it is exactly 0 inside the window
w, and gray if it is 0 beyond it or in the future. "alive", the paper's Pr, is the share of weights
that are not 0, of those that are not gray. Windows are in tokens.
"""
import sys

import numpy as np
import torch

from lab.measure import Measurement, add_table, get_parser
from lab.relevance import weights_of

try:
    import matplotlib.pyplot as plt
    import pandas as pd
except ImportError as e:
    sys.exit(f'error: {e}: pip install -e ".[lab]"')

TEXT = (
    "Softmax attention hands out a fixed amount of weight, so a key can only win what another key "
    "loses. Screening asks every\nkey the same question: are you similar enough to the query, and "
    "near enough? A key that fails is dropped, its relevance is\nexactly zero, whatever the others "
    "are worth. A key that passes is counted at its own value, and nobody else pays for it."
)
TOKENS = 203                                           # of a text: a map has TOKENS^2 pairs


@torch.no_grad()
def measure(model, tokens):
    """(a dict for each tile, its map (T, T), masked where gray) for all tiles. tokens: (1, T)."""
    tiles, maps, x = [], [], model.embed(tokens)
    i = torch.arange(tokens.shape[1], device=x.device)
    distance = i[:, None] - i                          # i - j
    for n, layer in enumerate(model.layers):
        w, r = layer.w, layer.r
        for m, alpha in enumerate(weights_of(layer, x, model.screen)[0].float()):
            inside = (distance >= 0) & (distance < w[m])
            shown = inside | (alpha != 0)
            tiles.append({"layer": n + 1, "tile": m + 1, "w": w[m].item(), "r": r[m].item(),
                          "alive": (alpha != 0)[shown].float().mean().item()})
            maps.append(np.ma.array(alpha.cpu(), mask=~shown.cpu()))
        x = layer(x, model.screen)
    return tiles, maps


def summary_of(tiles, T_train):
    """A row for each layer, and one for all. longer: windows w of more than T_train tokens."""
    table = pd.DataFrame(tiles)
    table["long"], table["empty"] = table.w > T_train, table.alive == 0
    layers = pd.concat([table, table.assign(layer="all")]).groupby("layer", sort=False)
    return layers.agg(
        tiles=("w", "size"), w_least=("w", "min"), w_median=("w", "median"), w_most=("w", "max"),
        longer=("long", "sum"), r_median=("r", "median"), alive=("alive", "mean"),
        empty=("empty", "sum"))


def draw_windows(tiles, w_th, T_train, path):
    """Draw a point (w, r) for each tile, coloured by layer."""
    w, r, layers = (np.array([tile[name] for tile in tiles]) for name in ("w", "r", "layer"))
    edge = 2.4 * max(w[w < np.inf].max(initial=1), w_th, T_train)
    fig, ax = plt.subplots(figsize=(8, 5))
    # Infinite windows stand at the right edge.
    points = ax.scatter(w.clip(max=edge), r, 30, layers, clip_on=False)
    fig.colorbar(points, label="layer", ticks=np.unique(layers))
    ax.axvline(T_train, color="black", ls="--", label=f"training length, {T_train}")
    ax.axvline(w_th, color="C1", ls=":", lw=2.5, label=f"w_th = {w_th:g}: no MiPE from here on")
    ax.set(xscale="log", xlim=(1, edge), ylim=(-0.03, 1.03), xlabel="screening window w (tokens)",
           ylabel="acceptance width r")
    ax.legend(loc="lower left")
    fig.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(fig)


def draw_maps(tiles, maps, path):
    """Draw the maps of all tiles, a row for each layer.

    The colours start far from white, which is exactly 0.
    """
    cmap = plt.matplotlib.colors.ListedColormap(plt.cm.plasma_r(np.linspace(0.25, 1, 256)))
    cmap = cmap.with_extremes(bad="0.3", under="white")
    largest = max(float(alpha.max()) for alpha in maps)
    norm = plt.matplotlib.colors.PowerNorm(0.5, 1e-9, max(largest, 1e-6))
    lines = tiles[-1]["layer"]
    columns = len(tiles) // lines
    size = max(8 / columns, 1)                         # of a map, in inches
    fig, axes = plt.subplots(lines, columns, figsize=(size * columns, (size + 0.3) * lines + 1),
                             squeeze=False)
    for ax, tile, alpha in zip(axes.flat, tiles, maps):
        image = ax.imshow(alpha, cmap=cmap, norm=norm)
        ax.set_title(f"{tile['layer']}.{tile['tile']}: alive {tile['alive']:.2f}\n"
                     f"w {tile['w']:.3g} r {tile['r']:.2f}", fontsize=8, pad=2)
        ax.set(xticks=[], yticks=[])
    fig.colorbar(image, ax=axes, location="bottom", shrink=0.6, fraction=0.02, pad=0.01,
                 label="weight; white: exactly 0, gray: 0 beyond the window or in the future\n"
                 "above a map: layer.tile; in it: queries down, keys to the right")
    fig.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(fig)


def main():
    p = get_parser(__doc__)
    add_table(p)
    p.add_argument("--text", default=TEXT, help=f"show the first {TOKENS} tokens of this text "
                   "[four sentences about screening]")
    args = p.parse_args()
    plt.switch_backend("agg")
    run = Measurement(args, "tiles")
    if not hasattr(run.model.layers[0], "s_w"):
        sys.exit(f"error: {args.ckpt} is a {run.flags['model']}, which has no windows")
    tokens = run.tokenizer.encode_ordinary(args.text)[:TOKENS]
    tiles, maps = measure(run.model, torch.tensor([tokens], device=args.device))
    T_train = run.flags["seq_len"]
    print(f"longer: windows w of more than {T_train} tokens; empty: tiles without any weight")
    print(summary_of(tiles, T_train).to_string(float_format="{:.3g}".format))
    run.setting = "as trained"
    for tile in tiles:
        run.add(text="ours" if args.text == TEXT else args.text[:40], **tile)
    run.write()
    beside = run.path.with_suffix("")
    draw_windows(tiles, run.flags["w_th"], T_train, f"{beside}_windows.png")
    draw_maps(tiles, maps, f"{beside}_maps.png")


if __name__ == "__main__":
    main()
