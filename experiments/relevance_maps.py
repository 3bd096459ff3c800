"""What every tile looks at (appendix "Visualization of Distance-Aware Relevance"): the maps alpha_d of one text.

Paper:  python -m experiments.relevance_maps --ckpt out/scaling_paper/multiscreen_psi8-0/ckpt.pt --text "The abstract of the paper .."
        (psi = 8 with GPT-2's tokens, 203 of them)
Small:  python -m experiments.relevance_maps --ckpt out/ckpt.pt         (seconds, some more for the figure)
        203 tokens of a text of ours. What it leaves out: with bytes for tokens they are two sentences, not a passage.

Rows of the grid are layers, columns heads; in a map queries i go down and keys j to the right. Dark gray: outside the
window (and the future). White: inside it, and exactly 0. Pr is the share of the pairs inside the window with alpha_d > 0.
The paper prints no numbers for its figure; it says that many maps have a substantial number of zeros, more in some tiles.
"""
from pathlib import Path

import numpy as np
import torch

import abcdigits
from experiments.common import pyplot, report, save_figure
from multiscreen import window
from train import Parser, UsageError, cli, screens

TEXT = """Softmax attention hands out a fixed amount of weight, so a key can only win what another key loses. Screening asks every
key the same question: are you similar enough to the query, and near enough? A key that fails is dropped, its relevance is
exactly zero, whatever the others are worth. A key that passes is counted at its own value, and nobody else pays for it. If
all keys fail, the sum is zero, and this is an answer too: nothing here is relevant. How similar is enough and how near is
enough are learned, one pair of numbers for every tile. Some tiles look at the last few tokens only, others at everything
that was ever said. Because a far key cannot take weight from a near one, a longer text does not blur what was seen before.
"""
COLUMNS = ["layer", "head", "w", "r", "alive"]


def inside(T, w):
    """Which pairs (i, j) of T positions are in the past and nearer than w: (T, T) booleans, queries i down."""
    d = np.arange(T) - np.arange(T)[:, None]
    return (-w < d) & (d <= 0)


def alive(alpha_d, w):
    """Pr(alpha_d > 0) among the pairs inside the window w. alpha_d: (T, T)."""
    return float((alpha_d > 0)[inside(len(alpha_d), w)].mean())


def paint(alpha_d, w, shade):
    """The picture of a map, (T, T) -> (T, T, 4) RGBA: shade(alpha_d), but white where it is exactly 0, dark gray outside."""
    image = np.array(shade(alpha_d), dtype=float)
    image[alpha_d == 0] = 1.0
    image[~inside(len(alpha_d), w)] = (0.3, 0.3, 0.3, 1.0)
    return image


@torch.no_grad()
def measure(model, tokens):
    """(maps (N_L, N_H, T, T), rows of COLUMNS for all tiles, layers and heads counted from 1). tokens: (1, T)."""
    maps = torch.cat(model.relevance_maps(tokens)).float().cpu().numpy()
    rows = []
    for n, tile in enumerate(model.layers):
        for m, (w, r) in enumerate(zip(window(tile.s_w).tolist(), tile.acceptance().tolist())):
            rows.append([n + 1, m + 1, w, r, alive(maps[n, m], w)])
    return maps, rows


def draw(plt, maps, rows):
    """The grid of all maps, (N_L, N_H, T, T), annotated with their rows; one colour scale for all."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import PowerNorm
    from matplotlib.patches import Patch

    N_L, N_H = maps.shape[:2]
    colors = ScalarMappable(PowerNorm(0.5, 0, max(float(maps.max()), 1e-6)), "plasma_r")
    fig, axes = plt.subplots(N_L, N_H, figsize=(1.35 * N_H + 1.5, 1.6 * N_L + 1), squeeze=False, layout="constrained")
    for ax, alpha_d, (n, m, w, r, share) in zip(axes.flat, maps.reshape(-1, *maps.shape[2:]), rows):
        ax.imshow(paint(alpha_d, w, lambda x: colors.cmap(colors.norm(x))), interpolation="nearest")
        ax.set_title(f"layer {n} head {m}\nw {w:.4g}  r {r:.2f}\nPr {share:.2g}", fontsize=6, pad=2)
        ax.set(xticks=[], yticks=[])
    fig.supxlabel(f"key position j, 0 .. {maps.shape[-1] - 1} (tokens); a column for each head", fontsize=9)
    fig.supylabel(f"query position i, 0 .. {maps.shape[-1] - 1} (tokens); a row for each layer", fontsize=9)
    fig.colorbar(colors, ax=axes, shrink=0.5, label="relevance alpha_d (its root sets the colour)")
    fig.legend(handles=[Patch(facecolor="white", edgecolor="black", label="inside the window, exactly 0"),
                        Patch(facecolor=(0.3, 0.3, 0.3), label="outside the window, or in the future")],
               loc="outside upper center", ncols=2, fontsize=8)
    return fig


def main():
    p = Parser(__doc__)
    p.add_argument("--ckpt", default="out/ckpt.pt", help="checkpoint of train.py [out/ckpt.pt]")
    p.add_argument("--text", default=TEXT, help="the text [six lines about screening]")
    p.add_argument("--tokens", type=int, default=203, help="at most so many tokens of it; memory grows like its square [203]")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = p.parse_args()
    if args.tokens < 1 or not args.text:
        raise UsageError("--tokens must be at least 1, and --text not empty")
    model, tokenizer, ckpt = abcdigits.load(args.ckpt, args.device)
    if not screens(model):
        raise UsageError(f"{args.ckpt} is a {ckpt['model']}: it has no screening windows; take a multiscreen checkpoint")
    tokens = tokenizer.encode_ordinary(args.text)
    print(f"{min(len(tokens), args.tokens)} of the text's {len(tokens)} tokens ({tokenizer.name})", flush=True)
    maps, rows = measure(model, torch.tensor([tokens[: args.tokens]], device=model.W_E.device))
    path = Path(args.ckpt).with_name("relevance_maps.tsv")
    report(path, COLUMNS, rows, f"Window w (tokens), acceptance width r, and alive = Pr(alpha_d > 0) inside the window, {ckpt['model']} "
           f"after {ckpt['step']} steps")
    if plt := pyplot():
        save_figure(draw(plt, maps, rows), path.with_suffix(".png"))


if __name__ == "__main__":
    cli(main)
