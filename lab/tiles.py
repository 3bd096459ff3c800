"""What have the tiles learned: where do they look, how far, and how similar must a key be?

This reproduces the appendices "Distribution of Learned Screening Parameters" and "Visualization of
Distance-Aware Relevance" for any checkpoint.

Paper:  python -m lab.tiles --ckpt out/paper/psi64-0/ckpt.pt
        This model has 4,096 tiles. The paper's maps show the model with psi = 8 on the paper's own
        abstract, which has 203 of GPT-2's tokens: pass it with --text "..".
Small:  python -m lab.tiles --ckpt out/ckpt.pt
        With psi = 8 there are 64 tiles; the maps show 203 bytes of a text that we wrote for it.

A summary of each layer is printed. Beside the checkpoint you find tiles.tsv, with a row for each
tile, and three figures. `python -m lab.tiles out/tiles.tsv` prints the summary of such a table.
tiles_windows.png has a point for each tile, with its window w and its acceptance width r, and a
histogram of each. Tiles to the right of w_th have no positional encoding. In the paper most windows
are local or medium-range, a few exceed the training length, and r is often close to 1.

tiles_maps.png shows the relevance maps alpha_d of all tiles, a row of the grid for each layer.
tiles_six.png shows six of them in a larger size, from narrow windows to wide ones. In a map,
queries i run downwards and keys j to the right. A pair is gray if it is outside the window or in
the future, and white if it is inside but its relevance is exactly 0. "alive", the paper's Pr, is
the share of the pairs inside the window with alpha_d > 0. In the paper many maps have a substantial
number of zeros. There are no maps if a layer does not call the `screen` that it is given.

A tile with alive = 0 accepts nothing in this text, because no similarity in its window is above
1 - r. It gets no gradient from this text, but its input changes as the embedding and the layers
before it train, so it may accept keys again.
"""
import math
from pathlib import Path

import numpy as np
import torch

from support.cli import DEVICE, Parser, UsageError, cli, get_device, products_dtype
from lab.alike import TILES, require_table
from lab.plots import pyplot, save
from support.check import inside, maps_of
from support.data import documents_in, text_held_out
from support.measure import table_of
from support.models import has_windows
from support.run import load_checkpoint
from support.tables import print_table, read_table, write_table

TEXT = (
    "Softmax attention hands out a fixed amount of weight, so a key can only win what another key "
    "loses. Screening asks every\nkey the same question: are you similar enough to the query, and "
    "near enough? A key that fails is dropped, its relevance is\nexactly zero, whatever the others "
    "are worth. A key that passes is counted at its own value, and nobody else pays for it."
)
TOKENS = 203                                           # of a text: a map has TOKENS^2 pairs


@torch.no_grad()
def measure(model, tokens, T_train):
    """(a dict for each tile, its map (T, T), masked outside the window) for all tiles.

    tokens: (1, T). T_train: the training length. Without maps `alive` is NaN, and the second list
    is empty.
    """
    relevance_maps, tiles, maps = maps_of(model, tokens), [], []
    for n, layer in enumerate(model.layers):
        w, r = layer.window().cpu(), layer.acceptance().cpu()
        pairs = inside(tokens.shape[1], w)
        for m in range(len(w)):
            tile = {"layer": n + 1, "tile": m + 1, "w": w[m].item(), "r": r[m].item(),
                    "alive": math.nan, "seq_len": T_train}
            if relevance_maps:
                alpha_d = relevance_maps[n][0, m].float().cpu()
                if not alpha_d.isfinite().all():
                    raise FloatingPointError("the model's relevances are not finite: has it "
                                             "diverged, or does an edit divide by 0?")
                tile["alive"] = (alpha_d[pairs[m]] > 0).float().mean().item()
                maps.append(np.ma.array(alpha_d, mask=~pairs[m]))
            tiles.append(tile)
    return tiles, maps


def print_summary(tiles, title):
    """Print a row for each layer, and one for all. tiles: dicts, of `measure` or of a table."""
    rows = []
    for layer in [*dict.fromkeys(tile["layer"] for tile in tiles), "all"]:
        chosen = [tile for tile in tiles if layer in (tile["layer"], "all")]
        w, r, alive, T = (np.array([float(tile[name]) for tile in chosen])
                          for name in ("w", "r", "alive", "seq_len"))
        dead = math.nan if np.isnan(alive).any() else int((alive == 0).sum())
        rows.append({
            "layer": layer, "tiles": len(chosen),
            "w_min": w.min(), "w_median": np.median(w), "w_max": w.max(), "w > T": sum(w > T),
            "r_min": r.min(), "r_median": np.median(r), "r_max": r.max(), "r > 0.9": sum(r > 0.9),
            "alive": alive.mean(), "most alive": alive.max(), "alive = 0": dead})
    print_table(rows, title)


def six_of(tiles):
    """The numbers of at most six tiles that accept a key, from narrow windows to wide ones."""
    alive = [n for n, tile in enumerate(tiles) if tile["alive"] > 0]
    if not alive:
        return []
    w = {n: math.log(min(tiles[n]["w"], 1e9)) for n in alive}
    chosen = []
    for goal in np.linspace(min(w.values()), max(w.values()), min(6, len(alive))):
        left = [n for n in alive if n not in chosen]
        chosen.append(min(left, key=lambda n: abs(w[n] - goal)))
    return chosen


def draw_windows(plt, tiles, w_th, T_train, path):
    """Draw a point (w, r) for each tile, coloured by layer, and a histogram of each."""
    w, r = np.array([tile["w"] for tile in tiles]), [tile["r"] for tile in tiles]
    edge = 2.4 * max(w[w < np.inf].max(initial=1), w_th, T_train)
    w = w.clip(max=edge)                               # infinite windows stand at the right edge
    fig, ((top, corner), (ax, right)) = plt.subplots(
        2, 2, figsize=(8, 6), width_ratios=[4, 1], height_ratios=[1, 4], sharex="col", sharey="row")
    corner.axis("off")
    points = ax.scatter(w, r, 30, [tile["layer"] for tile in tiles], clip_on=False)
    fig.colorbar(points, ax=[corner, right], label="layer",
                 ticks=sorted({tile["layer"] for tile in tiles}))
    ax.axvline(T_train, color="black", ls="--", marker="", label=f"training length, {T_train}")
    ax.axvline(w_th, color="C1", ls=":", lw=2.5, marker="",
               label=f"w_th = {w_th:g}: no MiPE from here on")
    ax.set(xscale="log", xlim=(1, edge), ylim=(-0.03, 1.03), xlabel="screening window w (tokens)",
           ylabel="acceptance width r")
    top.hist(w, np.geomspace(1, edge, 31), color="gray")
    right.hist(r, np.linspace(0, 1, 21), orientation="horizontal", color="gray")
    save(fig, path)


def draw_maps(plt, tiles, maps, columns, path):
    """Draw a grid of maps. The colours start far from white, which is exactly 0."""
    cmap = plt.matplotlib.colors.ListedColormap(plt.cm.plasma_r(np.linspace(0.25, 1, 256)))
    cmap = cmap.with_extremes(bad="0.3", under="white")
    largest = max(float(alpha_d.max()) for alpha_d in maps)
    norm = plt.matplotlib.colors.PowerNorm(0.5, 1e-9, max(largest, 1e-6))
    lines, size = math.ceil(len(maps) / columns), max(8 / columns, 1)
    fig, axes = plt.subplots(lines, columns, figsize=(size * columns, (size + 0.3) * lines + 1),
                             squeeze=False)
    for ax in axes.flat[len(maps) :]:
        ax.axis("off")
    for ax, tile, alpha_d in zip(axes.flat, tiles, maps):
        image = ax.imshow(alpha_d, cmap=cmap, norm=norm)
        ax.set_title(f"{tile['layer']}.{tile['tile']}: alive {tile['alive']:.2f}\n"
                     f"w {tile['w']:.3g} r {tile['r']:.2f}", fontsize=8, pad=2)
        ax.set(xticks=[], yticks=[])
    fig.colorbar(image, ax=axes, location="bottom", shrink=0.6, fraction=0.02, pad=0.01,
                 label="relevance; white: exactly 0, gray: outside the window or in the future\n"
                 "above a map: layer.tile; in it: queries down, keys to the right")
    save(fig, path)


def tokens_to_show(text, tokenizer, ckpt):
    """The tokens of the maps, a list. text: of --text, or None."""
    if text is None and tokenizer.eot_token is None:   # a vocabulary of your own has no sentences
        files, _ = text_held_out(ckpt, tokenizer)
        _, tokens = documents_in(files, tokenizer)[0]
        return tokens[:TOKENS].tolist()
    tokens = tokenizer.encode_ordinary(TEXT if text is None else text)[:TOKENS]
    if not tokens:
        raise UsageError("--text must not be empty")
    return tokens


def main():
    p = Parser(__doc__)
    p.add_argument("table", nargs="?", help="print the summary of this tiles.tsv, and measure none")
    p.add_argument("--ckpt", default="out/ckpt.pt", help="a checkpoint of train.py [out/ckpt.pt]")
    p.add_argument("--device", default=DEVICE, help=f"cpu, cuda or mps [{DEVICE}]")
    p.add_argument("--table", dest="to", type=Path, help="the table to write; figures go beside "
                   "it [beside the checkpoint]")
    p.add_argument("--text", help=f"draw the maps of the first {TOKENS} tokens of this text [four "
                   "sentences about screening; if the tokens are numbers: what the run held out]")
    args = p.parse_args()
    if args.table:
        tiles = read_table(args.table)
        require_table(tiles, TILES, args.table)
        print_summary(tiles, args.table)
        return
    device = get_device(args.device)
    model, tokenizer, ckpt = load_checkpoint(args.ckpt, device, products_dtype(device))
    if not has_windows(model):
        raise UsageError(f"{args.ckpt} is a {ckpt['model']}, which has no windows")
    tokens = tokens_to_show(args.text, tokenizer, ckpt)
    T_train = ckpt["args"]["seq_len"]
    tiles, maps = measure(model, torch.tensor([tokens], device=device), T_train)
    path = args.to or table_of(args.ckpt, "tiles")
    write_table(path, tiles)
    print_summary(tiles, f"Windows, acceptance widths and pairs alive; {path}")

    if not maps:
        print(f"no maps: a layer of {ckpt['model']} does not call the screen that it is given")
    plt = pyplot()
    w_th = getattr(model.config, "w_th", None) or model.layers[0].w_th
    draw_windows(plt, tiles, w_th, T_train, path.with_name(f"{path.stem}_windows.png"))
    if maps:
        columns = len(tiles) // len(model.layers)
        draw_maps(plt, tiles, maps, columns, path.with_name(f"{path.stem}_maps.png"))
        six = six_of(tiles)
        if six:
            draw_maps(plt, [tiles[n] for n in six], [maps[n] for n in six], 3,
                      path.with_name(f"{path.stem}_six.png"))


if __name__ == "__main__":
    cli(main)
