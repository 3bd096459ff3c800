"""Loss by learning rate (section "Learning Rate Stability").

Compares a Multiscreen and a Transformer with and without QKNorm. Appendices: "Learning Rate
Sweep Details" and "QKNorm Transformer Baseline".

    bash runs/small.sh lr_sweep                      trains the runs and draws them
    python -m experiments.lr_sweep RUN...            draws runs of your own
    python -m experiments.lr_sweep experiments/report/lr_sweep.tsv --out out

Each rate has the mean over its seeds. runs/paper.sh has the paper's runs: every exponent from -14
to 0, a Multiscreen of 28M and a Transformer of 45M parameters, 2^38 tokens, three seeds, with
QKNorm one.

A run on the standard library has failed if it ends no better than the entropy of single bytes in
the held-out files, the dashed line in the figure.

A run has diverged in two cases. Either train.py stopped it, because a loss, a gradient norm or a
weight was not finite. Or its last validation loss is more than half a nat above its first training
loss, or above the least mean over an eighth of its log.

The paper prints no numbers here. Its models: a 45M Transformer and a 28M Multiscreen, 2^38 tokens,
3 seeds (1 with QKNorm). It states: the Transformer diverges for learning rates >= 2^-4 (0.0625),
with QKNorm and without; QKNorm is slightly better at moderate rates; Multiscreen "continues to
train reliably without divergence" even at 1 (2^0).
"""
import math

import numpy as np

from experiments.common import (
    VOCABULARY,
    group_runs,
    keep_runs,
    mean_and_std,
    pyplot,
    runs_parser,
    save_figure,
)
from experiments.style import WIDTH, count_of, label_models, legend_below, look, plot_with_band
from support.cli import cli
from support.data import HELD_OUT, read_text, standard_library
from support.table import print_table


def losses_by_rate(runs):
    """{label of a model: {exponent of the learning rate: losses of the seeds}}"""
    groups = group_runs(runs, "model", "parameters", "lr")
    labels = label_models((model, int(n)) for model, n, _ in groups)
    results = {labels[model, int(n)]: {} for model, n, _ in groups}
    for model, n, rate in sorted(groups, key=lambda key: float(key[2])):
        losses = [*groups[model, n, rate].values()]
        results[labels[model, int(n)]][exponent_of(rate)] = losses
    return results


def exponent_of(rate):
    """log2 of a learning rate, given as text; minus infinity for 0."""
    return math.log2(float(rate)) if float(rate) else -math.inf


def rate_table(results):
    """(columns, rows): a row for each rate, and for each model its mean and deviation."""
    columns, rows = ["exponent", "rate"], []
    for label in results:
        columns += [label, "std"]
    for e in sorted({e for by_rate in results.values() for e in by_rate}):
        rows.append([e, 2.0**e])
        for by_rate in results.values():
            losses = by_rate.get(e, [])
            mean, std, diverged = mean_and_std(losses)
            note = f" ({diverged} of {len(losses)} diverged)" if diverged else ""
            rows[-1] += [f"{mean:.5g}{note}" if diverged < len(losses) else note[2:-1] or None, std]
    return columns, rows


def byte_entropy():
    """The entropy of single bytes in this Python's held-out files of --data stdlib, in nats."""
    held_out = "".join(map(read_text, standard_library()[HELD_OUT])).encode()
    p = np.bincount(np.frombuffer(held_out, np.uint8)) / len(held_out)
    return -(p[p > 0] * np.log(p[p > 0])).sum()


def draw_sweep(plt, results, references, path):
    """Loss by learning rate; diverged runs stand above the axis. references: {label: loss}."""
    fig, ax = plt.subplots(figsize=(WIDTH, 5), layout="constrained")
    for n, (label, by_rate) in enumerate(results.items()):
        points = {e: mean_and_std(losses) for e, losses in by_rate.items()}
        means, stds, _ = zip(*points.values())
        seeds = count_of(max(map(len, by_rate.values())), "seed")
        plot_with_band(ax, list(points), means, stds, label=f"{label}, {seeds}", **look(n))
        diverged = [e for e, (_, _, n_diverged) in points.items() if n_diverged]
        ax.plot(diverged, [1.03 + 0.045 * n] * len(diverged), "x", color=look(n)["color"], ms=7,
                mew=2, transform=ax.get_xaxis_transform(), clip_on=False, in_layout=False)
    for (label, loss), line in zip(references.items(), ((0, (1, 3)), "--")):
        ax.axhline(loss, color="gray", lw=1, ls=line, label=label)
    ax.plot([], [], "x", color="black", ms=7, mew=2, label="a seed diverged, not in the mean")

    # The strip above the axis does not show a loss: a line closes it off.
    ax.spines.top.set_visible(True)
    ax.set_title(" ", fontsize=7 + 9 * len(results))
    exponents = sorted({e for by_rate in results.values() for e in by_rate})
    ax.set_xticks(exponents, [f"$2^{{{e:.3g}}}$" for e in exponents])
    ax.set(xlabel="learning rate", ylabel="validation loss (nats per token)")
    legend_below(fig, ax, ncols=3)
    save_figure(fig, path)


def main():
    args = runs_parser(__doc__).parse_args()
    runs = keep_runs(args, "lr_sweep")
    results, uniform = losses_by_rate(runs), math.log(VOCABULARY[runs[0]["tokenizer"]])
    print_table(*rate_table(results), f"Validation loss, nats per token, after {runs[0]['steps']} "
                f"steps; a uniform guess has {uniform:.4g}")
    if plt := pyplot():
        references = {"uniform guess": uniform}
        if (runs[0]["data"], runs[0]["tokenizer"]) == ("stdlib", "bytes"):
            references["byte frequencies"] = byte_entropy()
        draw_sweep(plt, results, references, args.out / "lr_sweep.png")


if __name__ == "__main__":
    cli(main)
