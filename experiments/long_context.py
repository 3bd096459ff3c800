"""Perplexity by position as a figure (section "Long-Context Perplexity", and its ablations).

    python -m experiments.long_context out/perplexity.tsv out-t/perplexity.tsv --out out/figure.png

draws the tables of `python -m experiments.perplexity`. Models that differ only in their seed are
one curve: their mean, and a band of one standard deviation. Where there are ablations, the figure
is of them and of their original. The paper prints no numbers for its curves.
"""
from experiments.common import get_figure, pyplot, save_figure
from experiments.curves import get_curves, positions, print_curves, summarize, words_of
from experiments.style import (
    ABLATIONS,
    WIDTH,
    count_of,
    legend_below,
    look,
    plain_axis,
    plot_with_band,
    variant_of,
)
from support.cli import cli

PANELS = {"positions": ("", "rope", "nope"),
          "TanhNorm, gate, acceptance width": ("", "no-tanhnorm", "no-gate", "fixed-r"),
          "competition": ("", "compete", "softmax")}


def draw_panel(plt, ax, curves, labels):
    """Perplexity by position: a curve for each model and setting, and a band over its seeds."""
    for n, (curve, seeds) in enumerate(curves.items()):
        mean, std = zip(*summarize(seeds))
        words = [labels[curve.model, curve.parameters], words_of(curve, curves),
                 count_of(len(seeds), "seed")]
        if words[1] == "as trained":
            del words[1]
        plot_with_band(ax, positions(int(curve.length)), mean, std if len(seeds) > 1 else None,
                       label=", ".join(words), **look(n))
    for T in sorted({int(curve.seq_len) for curve in curves}):
        ax.axvline(T, color="black", ls=(0, (5, 3)), lw=1, label=f"training length, {T:,} tokens")
    ax.set_xscale("log", base=2)
    ax.set(yscale="log", xlabel="position (tokens of context)")
    plain_axis(plt, ax.yaxis, (1, 2, 3, 4, 5, 7))


def draw_models(plt, curves, labels, path):
    """All curves in one panel."""
    fig, ax = plt.subplots(figsize=(WIDTH, 5.5), layout="constrained")
    draw_panel(plt, ax, curves, labels)
    ax.set_ylabel("perplexity per token")
    legend_below(fig, ax)
    save_figure(fig, path)


def draw_ablations(plt, curves, labels, path):
    """The original beside the ablations, in a panel for each group of PANELS."""
    found = {variant_of(curve.model) for curve in curves} - {""}
    panels = {title: names for title, names in PANELS.items() if found & {*names}}
    if others := found - {name for names in PANELS.values() for name in names}:
        panels["others"] = ("", *sorted(others))
    fig, axes = plt.subplots(1, len(panels), figsize=(0.75 * WIDTH * len(panels), 5.5),
                             sharey=True, squeeze=False, layout="constrained")
    axes = axes[0]
    for ax, (title, variants) in zip(axes, panels.items()):
        shown = {curve: seeds for curve, seeds in curves.items()
                 if variant_of(curve.model) in variants}
        draw_panel(plt, ax, shown, labels)
        ax.set_title(title)
        ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=2, frameon=False)
    axes[0].set_ylabel("perplexity per token")
    save_figure(fig, path)


def main():
    rows, out, labels = get_figure(__doc__, "nats")
    curves = get_curves(rows)
    print_curves(curves, labels, "Perplexity by tokens of context; the paper prints no numbers of "
                 "its curves")
    if plt := pyplot():
        ablated = any(variant_of(curve.model) in ABLATIONS for curve in curves)
        draw = draw_ablations if ablated else draw_models
        draw(plt, curves, labels, out)


if __name__ == "__main__":
    cli(main)
