"""Loss and gradient norm in training, from the logs of runs.

Appendices "Training Loss Dynamics", "Gradient Norm Dynamics", "Optimizer-setting sanity check".

    python -m experiments.training_curves out        one run, also one that is not finished
    python -m experiments.training_curves RUN...     several: a column for each model
    bash runs/small.sh lr_sweep scaling sanity       trains the runs and draws three figures

A log has a row every --log-every steps and one for the first; a peak between two rows is lost.
--window counts rows: the paper's moving average over 256 steps is 256 rows with --log-every 1.
Gradient norms are measured before clipping. Their median, 90th percentile and maximum are taken
over the second half of the steps. A spike is a row, of the loss or of the norm, more than 5
standard deviations above the mean of the WINDOW rows before it. `val_least` is the least validation
loss, after `least_at` steps. The column `end` says "diverged" by the criterion of
experiments.lr_sweep. Norms above the axis are crosses at its end, a line of them for each run.

The paper prints no numbers here. It states: the Transformer's loss has frequent spikes at moderate
rates and does not converge at larger ones; Multiscreen's is smooth even at 1. Its gradient norm
decays and settles near zero with minimal variance; the Transformer's keeps a floor, with
substantial variance and occasional spikes.
"""
import math

import numpy as np

from experiments.common import pyplot, read_run, report, runs_parser, save_figure
from experiments.compare import columns_of, count_spikes
from experiments.style import (
    COLORS,
    LINES,
    WIDTH,
    count_of,
    optimizer_name,
    paper_name,
    short_number,
)
from support.cli import UsageError, cli

COLUMNS = ["run", "model", "lr", "seed", "steps", "loss_first", "loss_last", "loss_spikes",
           "grad_median", "grad_p90", "grad_max", "grad_spikes", "val_least", "least_at",
           "val_last", "end"]


# ---------------------------------------------------------------------------- numbers of a run

def moving_average(x, window):
    """Means of `window` neighbours, or of all if there are fewer. (n,) -> (n - window + 1,)"""
    return np.lib.stride_tricks.sliding_window_view(x, min(window, len(x))).mean(-1)


def get_columns(rows):
    """(step, loss, grad_norm), arrays (n,), of the rows of a log.tsv that have all three."""
    return columns_of(rows, "step", "loss", "grad_norm")


def summarize_run(step, loss, norm, window):
    """[steps, loss_first, loss_last, loss_spikes, grad_median, grad_p90, grad_max, grad_spikes]

    Losses are smoothed, in nats per token. Gradient norms: of the second half of the steps.
    """
    if not len(step):                                  # diverged before the first row
        return [0] + [None] * 7
    smooth = moving_average(loss, window)
    late = norm[step > step[-1] / 2]
    median, p90 = np.quantile(late, [0.5, 0.9])
    return [int(step[-1]), float(smooth[0]), float(smooth[-1]), count_spikes(loss, window),
            float(median), float(p90), float(late.max()), count_spikes(norm, window)]


def least_and_last(rows):
    """[least validation loss, after how many steps, last validation loss] of the rows of a log."""
    found = [(row["val_loss"], int(row["step"])) for row in rows if "val_loss" in row]
    return [*min(found), found[-1][0]] if found else [None] * 3


# ------------------------------------------------------------------------------------- figure

def label_curve(flags):
    """(title of the column, label of the curve), which is the learning rate or what is left out."""
    name, rate = paper_name(flags["model"]), float(flags["lr"])
    left_out = optimizer_name(*(flags[name] for name in ("model", "weight_decay", "clip")))
    exponent = math.log2(rate) if rate else 0.5
    label = f"$2^{{{exponent:g}}}$" if exponent.is_integer() else f"{rate:g}"
    return (f"{name}, {short_number(int(flags['parameters']))}",
            left_out.removeprefix(name).strip() or label)


def get_styles(plt, runs):
    """{label: (colour, line)}: learning rates from dark to bright, then what is left out."""
    rates = {label_curve(run.flags)[1]: float(run.flags["lr"]) for run in runs}
    others = [label for label in rates if label.startswith("w/o")]
    labels = sorted(rates.keys() - set(others), key=rates.get)
    styles = {}
    for n, label in enumerate(labels):
        color = plt.cm.viridis(0.92 * n / max(len(labels) - 1, 1))
        styles[label] = color, LINES[n % len(LINES)]
    for n, label in enumerate(sorted(others), 1):
        styles[label] = COLORS[n % len(COLORS)], LINES[n % len(LINES)]
    return styles


def draw_curves(plt, runs, window, path):
    """Losses above, gradient norms below, a column for each model. runs: with rows.

    Of several seeds only the first is drawn. The loss axis ends at 1.2 times where the highest
    curve begins; a title names the runs that stay above it. The norms' axis ends at 1, like the
    paper's, or at twice the norm of the middle run, in halves.
    """
    columns = {}
    for run in runs:
        model, label = label_curve(run.flags)
        columns.setdefault(model, {}).setdefault(label, get_columns(run.rows))
    drawn = [curve for curves in columns.values() for curve in curves.values()]
    low = min(moving_average(loss, window).min() for _, loss, _ in drawn)
    # A short run that diverges has a first mean above its first row.
    begins = [min(loss[0], moving_average(loss, window)[0]) for _, loss, _ in drawn]
    high = 1.2 * max(begins)
    top = max(1, math.ceil(4 * np.median([np.median(norm) for *_, norm in drawn])) / 2)
    styles = get_styles(plt, runs)

    fig, axes = plt.subplots(2, len(columns), figsize=(WIDTH, 6.5), sharex="col", sharey="row",
                             squeeze=False, layout="constrained")
    for (model, curves), (above, below) in zip(columns.items(), axes.T):
        outside = []
        for n, (label, (step, loss, norm)) in enumerate(curves.items()):
            color, line = styles[label]
            smooth = moving_average(loss, window)
            if smooth.min() > high:
                outside.append(label)
            end, marker = step[len(step) - len(smooth) :], "." if len(smooth) == 1 else ""
            above.plot(end, smooth, color=color, ls=line, lw=1.5, marker=marker)
            # The means lie above the norms of all runs.
            cut = np.minimum(norm, top)
            below.plot(step, cut, color=color, lw=0.5, alpha=0.3, zorder=1)
            below.plot(end, moving_average(cut, window), color=color, ls=line, lw=1.5)
            beyond, height = step[norm > top], top * (1.02 + 0.02 * n)
            below.plot(beyond, np.full(len(beyond), height), "x", color=color, ms=3)
        title = [model] + [f"above the axis: {', '.join(outside)}"] * bool(outside)
        above.set(title="\n".join(title), ylim=(low - 0.05 * (high - low), high))
        below.set(xlabel="optimizer step", ylim=(0, top * (1.02 + 0.02 * len(styles))))
    axes[0, 0].set_ylabel(f"training loss (nats per token),\nmean of {window} rows of the log")
    axes[1, 0].set_ylabel("gradient norm before clipping, and\n"
                          f"its mean, cut at {top:g} (above: crosses)")
    handles = [plt.Line2D([], [], color=color, ls=line, label=label)
               for label, (color, line) in styles.items()]
    title = "learning rate" + ", or what is left out" * any(label[0] == "w" for label in styles)
    fig.legend(handles=handles, title=title, loc="outside lower center", ncols=8, frameon=False)
    save_figure(fig, path)


def main():
    p = runs_parser(__doc__, "folders of train.py")
    p.add_argument("--window", type=int, default=10,
                   help="rows of the log in a moving average (paper: 256 steps) [10]")
    p.add_argument("--name", default="training_curves",
                   help="of the table and the figure [training_curves]")
    args = p.parse_args()
    if args.window < 2:
        raise UsageError(f"--window {args.window}: it must be at least 2")
    runs, rows = [read_run(folder) for folder in args.runs], []
    for run in runs:
        numbers = summarize_run(*get_columns(run.rows), args.window)
        end = "diverged" if math.isnan(run.loss) else None
        flags = [run.flags[name] for name in ("model", "lr", "seed")]
        rows.append([run.folder.name or str(run.folder), *flags, *numbers,
                     *least_and_last(run.rows), end])
    report(args.out / f"{args.name}.tsv", COLUMNS, rows,
           f"Training loss, nats per token, mean of the first and last {args.window} rows of the "
           f"log, and gradient norm in the second half, of {count_of(len(runs), 'run')}")
    runs = [run for run in runs if len(get_columns(run.rows)[0])]
    if runs and (plt := pyplot()):
        draw_curves(plt, runs, args.window, args.out / f"{args.name}.png")


if __name__ == "__main__":
    cli(main)
