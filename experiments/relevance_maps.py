"""What every tile looks at in one text: the maps alpha_d.

Appendix "Visualization of Distance-Aware Relevance".

Paper:  python -m experiments.relevance_maps --text "The abstract of the paper .." \\
            --ckpt out/paper/multiscreen_psi8-0/ckpt.pt
        psi = 8 with GPT-2's tokens, 203 of them.
Small:  python -m experiments.relevance_maps --ckpt out/ckpt.pt
        10 seconds. 203 tokens of a text of ours. What it leaves out: with bytes for tokens this is
        two sentences instead of a passage.

It draws all tiles, a row of the grid for each layer, and six of them larger, from the narrowest
window to the widest. In a map, queries i go down and keys j to the right. Dark gray: outside the
window, or in the future. White: inside it, and exactly 0. Pr is the share of the pairs inside the
window with alpha_d > 0. The paper prints no numbers for its figure. It says: many maps have a
substantial number of zeros, more in some tiles.
"""
import numpy as np
import torch

from experiments.common import pyplot, report, save_figure
from experiments.style import WIDTH
from multiscreen import softmask, window
from support.checkpoint import load_for_evaluation, require_maps
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
    """Which pairs (i, j) of T positions Softmask lets through. (T, T) booleans"""
    d = torch.arange(T) - torch.arange(T)[:, None]
    return (softmask(d, torch.tensor(w)) > 0).numpy()


def alive(alpha_d, w):
    """Pr, the share of the pairs inside the window w with a relevance. alpha_d: (T, T)"""
    return float((alpha_d != 0)[inside(len(alpha_d), w)].mean())


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

def short_width(w):
    """A window in four characters: 8.2, 150, 2.1k, 153k."""
    if w < 1000:
        return f"{w:.2g}" if w < 10 else f"{w:.0f}"
    return f"{w / 1000:.1f}k" if w < 10_000 else f"{w / 1000:.0f}k"


def spread(rows, n=6):
    """The indices of at most n tiles that see something, from narrow windows to wide ones."""
    alive = [i for i, row in enumerate(rows) if row[-1] > 0] or [0]
    w = np.log([rows[i][2] for i in alive])
    nearest = {int(abs(w - x).argmin()) for x in np.linspace(w.min(), w.max(), n)}
    return sorted((alive[i] for i in nearest), key=lambda i: rows[i][2])


def draw_maps(plt, maps, rows, columns):
    """A grid of maps, (n, T, T), with w, r and Pr of each; one colour scale for all.

    8 columns fit the width of a page. More make the figure wider. The colours start far from white,
    which is exactly 0.
    """
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, PowerNorm

    cmap = ListedColormap(plt.cm.plasma_r(np.linspace(0.25, 1, 256)))
    colors = ScalarMappable(PowerNorm(0.5, 0, max(float(maps.max()), 1e-6)), cmap)
    lines = -(-len(maps) // columns)
    size = max(WIDTH / columns, 1)
    fig, axes = plt.subplots(lines, columns, figsize=(size * columns, (size + 0.3) * lines + 1.5),
                             squeeze=False, layout="constrained")
    for ax in axes.flat[len(maps):]:
        ax.set_axis_off()
    for ax, alpha_d, (layer, tile, w, r, share) in zip(axes.flat, maps, rows):
        image = colors.cmap(colors.norm(alpha_d))
        image[alpha_d == 0] = 1.0
        image[~inside(len(alpha_d), w)] = OUTSIDE
        ax.imshow(image)
        title = f"{layer}, {tile}: Pr {share:.2f}\nw {short_width(w)} r {r:.2f}"
        ax.set_title(title.replace(" 0.", " ."), fontsize=9, pad=2)
        ax.set(xticks=[], yticks=[])

    # The colour bar, and what white and gray are.
    fig.colorbar(colors, ax=axes, location="bottom", shrink=0.6, fraction=0.02, pad=0.01,
                 label=r"distance-aware relevance $\alpha^\mathrm{d}$")
    handles = [plt.Rectangle((0, 0), 1, 1, facecolor="white", edgecolor="black"),
               plt.Rectangle((0, 0), 1, 1, facecolor=OUTSIDE)]
    fig.legend(handles, ["inside, exactly 0", "outside the window, or in the future"],
               loc="outside upper center", ncols=2, frameon=False)
    last = maps.shape[-1] - 1
    fig.supxlabel(f"above a map: layer, tile; in it: query i = 0 .. {last} down, "
                  f"key j = 0 .. {last} to the right", fontsize=10)
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
    require_maps(model, args.ckpt, ckpt["model"])

    tokens = tokenizer.encode_ordinary(args.text)
    shown = tokens[: args.tokens]
    print(f"{len(shown)} of the text's {len(tokens)} tokens ({tokenizer.name})", flush=True)
    maps, rows = get_maps(model, torch.tensor([shown], device=model.W_E.device))
    table = beside(args.ckpt, "relevance_maps.tsv")
    report(table, COLUMNS, rows,
           "Window w (tokens), acceptance width r, and alive = Pr(alpha_d > 0) inside the window, "
           f"{ckpt['model']} after {ckpt['step']} steps")
    if plt := pyplot():
        N_H, maps = maps.shape[1], maps.reshape(-1, *maps.shape[2:])
        save_figure(draw_maps(plt, maps, rows, N_H), table.with_suffix(".png"))
        some = spread(rows)
        save_figure(draw_maps(plt, maps[some], [rows[n] for n in some], 3),
                    table.with_name("relevance_maps_of_six.png"))


if __name__ == "__main__":
    cli(main)
