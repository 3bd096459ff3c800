"""Where the learned windows and acceptance widths end up.

Appendix "Distribution of Learned Screening Parameters".

Paper:  python -m experiments.windows --ckpt out/paper/multiscreen_psi64-0/ckpt.pt
        4,096 tiles; `bash runs/paper.sh` trains the model.
Small:  python -m experiments.windows --ckpt out/ckpt.pt
        Seconds. What it leaves out: the size (64 tiles for psi = 8) and the length of the training.

One point for each tile: w on a logarithmic axis, r, and a histogram of each. A tile with w >= w_th,
the dotted line, has no positional encoding. The dashed line is the training length. These two
lines, 2^8 and 2^12, are the only numbers in the paper. It says: most windows are local or
medium-range, a few exceed the training length, and r is often close to 1.
"""
import math
import statistics

import numpy as np
import torch

from experiments.common import pyplot, report, save_figure
from experiments.style import COLORS, WIDTH, legend_below
from multiscreen import window
from support.checkpoint import load_checkpoint, require_windows
from support.cli import Parser, cli
from support.table import beside

COLUMNS = ["layer", "tiles", "w_min", "w_median", "w_max", "r_min", "r_median", "r_max", "w>w_th",
           "w>T_train"]


@torch.no_grad()
def windows_and_widths(model):
    """(w, r) of all tiles: two arrays (N_L, N_H), w in tokens, inf for a window without an edge."""
    w = torch.stack([window(tile.s_w) for tile in model.layers])
    r = torch.stack([tile.acceptance() for tile in model.layers])
    return w.cpu().double().numpy(), r.cpu().double().numpy()


def summary(name, w, r, w_th, T_train):
    """A row of COLUMNS for tiles with the windows w and the acceptance widths r, both (n,)."""
    row = [name, len(w)]
    for x in (w.tolist(), r.tolist()):
        row += [min(x), statistics.median(x), max(x)]
    return [*row, int((w > w_th).sum()), int((w > T_train).sum())]


def draw_windows(plt, w, r, w_th, T_train):
    """Points (w, r) coloured by layer, with marginal histograms. w, r: (N_L, N_H)

    Infinite windows stand at the right edge as triangles, and in the last bin.
    """
    finite = np.isfinite(w)
    edge = 2 * max(w[finite].max(initial=1.0), w_th, T_train)
    layer = np.broadcast_to(np.arange(1, len(w) + 1)[:, None], w.shape)
    shown = np.where(finite, w, edge)
    color = {"cmap": "viridis", "vmin": 1, "vmax": max(len(w), 2), "edgecolors": "black",
             "linewidths": 0.3}
    fig, axes = plt.subplots(2, 2, figsize=(WIDTH, 6), width_ratios=[4, 1], height_ratios=[1, 4],
                             sharex="col", sharey="row", layout="constrained")
    (top, corner), (ax, right) = axes
    corner.axis("off")

    # The points, and the two lengths that matter to a window.
    points = ax.scatter(shown[finite], r[finite], 30, layer[finite], **color)
    if not finite.all():
        ax.scatter(shown[~finite], r[~finite], 50, layer[~finite], marker=">",
                   label="w infinite, drawn at the edge", **color)
    for a in (ax, top):
        a.axvline(w_th, color=COLORS[1], ls=":", lw=2.5,
                  label=rf"$w_\mathrm{{th}}$ = {w_th:g}, no MiPE from here on")
        a.axvline(T_train, color="black", ls="--", label=f"training length, {T_train:,} tokens")
    ax.set(xscale="log", xlim=(1, 1.2 * edge), ylim=(-0.03, 1.03),
           xlabel="screening window w (tokens)", ylabel="acceptance width r")

    # The histograms.
    top.hist(shown.ravel(), np.geomspace(1, 1.2 * edge, 31), color="gray")
    right.hist(r.ravel(), np.linspace(0, 1, 21), orientation="horizontal", color="gray")
    top.set(ylabel="tiles")
    right.set(xlabel="tiles")
    for axis in (top.yaxis, right.xaxis):
        axis.set_major_locator(plt.MaxNLocator(3, integer=True))
    legend_below(fig, ax)
    ticks = range(1, len(w) + 1, math.ceil(len(w) / 8))
    fig.colorbar(points, ax=axes, label="layer", ticks=ticks)
    return fig


def main():
    p = Parser(__doc__)
    p.add_shared("--ckpt")
    args = p.parse_args()
    model, _, ckpt = load_checkpoint(args.ckpt)
    require_windows(model, args.ckpt, ckpt["model"])
    table = beside(args.ckpt, "windows.tsv")
    w, r = windows_and_widths(model)
    w_th, T_train = model.config.w_th, ckpt["args"]["seq_len"]
    rows = [summary(str(n), *layer, w_th, T_train) for n, layer in enumerate(zip(w, r), 1)]
    rows.append(summary("all", w.ravel(), r.ravel(), w_th, T_train))
    report(table, COLUMNS, rows,
           f"Learned windows w (tokens) and acceptance widths r, {ckpt['model']} after "
           f"{ckpt['step']} steps; w_th {w_th:g}, training length {T_train} (the paper's figure: "
           "256 and 4096)")
    if plt := pyplot():
        save_figure(draw_windows(plt, w, r, w_th, T_train), table.with_suffix(".png"))


if __name__ == "__main__":
    cli(main)
