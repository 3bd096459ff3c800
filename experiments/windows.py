"""Where the learned windows and acceptance widths end up (appendix "Distribution of Learned Screening Parameters").

Paper:  python -m experiments.windows --ckpt out/scaling_paper/multiscreen_psi64-0/ckpt.pt     (4,096 tiles; see scaling)
Small:  python -m experiments.windows --ckpt out/ckpt.pt        (seconds)
        What it leaves out: the size (64 tiles for psi = 8) and the length of the training.

One point for each tile: w on a logarithmic axis, r, and a histogram of each. The red line is w_th, from which on a tile
has no positional encoding; the dashed one the training length. The paper prints no numbers for its figure but these two
lines, 2^8 and 2^12; it says that most windows are local or medium-range, a few exceed the training length, and r is often
close to 1.
"""
import math
import statistics
from pathlib import Path

import numpy as np
import torch

from experiments.common import pyplot, report, save_figure
from multiscreen import window
from train import Parser, UsageError, cli, load_checkpoint, screens

COLUMNS = ["layer", "tiles", "w_min", "w_median", "w_max", "r_min", "r_median", "r_max", "w>w_th", "w>T_train"]


@torch.no_grad()
def learned(model):
    """(w, r) of all tiles: two arrays (N_L, N_H), w in tokens, inf for a window without an edge."""
    w = torch.stack([window(tile.s_w) for tile in model.layers])
    r = torch.stack([tile.acceptance() for tile in model.layers])
    return w.double().cpu().numpy(), r.double().cpu().numpy()


def summary(name, w, r, w_th, T_train):
    """A row of COLUMNS for the tiles whose windows and acceptance widths are w and r, both (n,)."""
    spread = [f(x) for x in (w.tolist(), r.tolist()) for f in (min, statistics.median, max)]
    return [name, len(w), *spread, int((w > w_th).sum()), int((w > T_train).sum())]


def draw(plt, w, r, w_th, T_train):
    """The figure: scatter of (w, r), (N_L, N_H) each, coloured by layer, with marginal histograms. Infinite windows stand
    at the right edge as triangles, and in the last bin."""
    finite = np.isfinite(w)
    edge = 2 * max(w[finite].max(initial=1.0), w_th, T_train)
    layer = np.broadcast_to(np.arange(1, len(w) + 1)[:, None], w.shape)
    shown, color = np.where(finite, w, edge), {"cmap": "viridis", "vmin": 1, "vmax": max(len(w), 2)}
    fig, axes = plt.subplots(2, 2, figsize=(7.5, 5.5), width_ratios=[4, 1], height_ratios=[1, 4], sharex="col", sharey="row",
                             layout="constrained")
    (top, corner), (ax, right) = axes
    corner.axis("off")
    points = ax.scatter(shown[finite], r[finite], 18, layer[finite], **color)
    if not finite.all():
        ax.scatter(shown[~finite], r[~finite], 30, layer[~finite], marker=">", label="w infinite, drawn at the edge", **color)
    for a in (ax, top):
        a.axvline(w_th, color="C3", lw=3, alpha=0.4, label=f"w_th = {w_th:g}, no MiPE from here on")
        a.axvline(T_train, color="black", ls="--", label=f"training length, {T_train}")
    ax.set(xscale="log", xlim=(1, 1.2 * edge), ylim=(-0.03, 1.03), xlabel="screening window w (tokens, log scale)",
           ylabel="acceptance width r")
    top.hist(shown.ravel(), np.geomspace(1, 1.2 * edge, 31), color="gray")
    right.hist(r.ravel(), np.linspace(0, 1, 21), orientation="horizontal", color="gray")
    top.set(ylabel="tiles")
    right.set(xlabel="tiles")
    ax.legend(fontsize=8, loc="lower left")
    fig.colorbar(points, ax=axes, label="layer", ticks=range(1, len(w) + 1, math.ceil(len(w) / 8)))
    return fig


def main():
    p = Parser(__doc__)
    p.add_argument("--ckpt", default="out/ckpt.pt", help="checkpoint of train.py [out/ckpt.pt]")
    args = p.parse_args()
    model, _, ckpt = load_checkpoint(args.ckpt)
    if not screens(model):
        raise UsageError(f"{args.ckpt} is a {ckpt['model']}: it has no screening windows; take a multiscreen checkpoint")
    (w, r), w_th, T_train = learned(model), model.config.w_th, ckpt["args"]["seq_len"]
    rows = [summary(str(n), w[n - 1], r[n - 1], w_th, T_train) for n in range(1, len(w) + 1)]
    rows.append(summary("all", w.ravel(), r.ravel(), w_th, T_train))
    path = Path(args.ckpt).with_name("windows.tsv")
    report(path, COLUMNS, rows, f"Learned windows w (tokens) and acceptance widths r, {ckpt['model']} after {ckpt['step']} steps; "
           f"w_th {w_th:g}, training length {T_train} (the paper's figure: 256 and 4096)")
    if plt := pyplot():
        save_figure(draw(plt, w, r, w_th, T_train), path.with_suffix(".png"))


if __name__ == "__main__":
    cli(main)
