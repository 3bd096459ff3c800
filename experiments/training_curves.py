"""Loss and gradient norm in training, from log.tsv files (appendices "Training Loss Dynamics" and "Gradient Norm Dynamics").

Paper:  python -m experiments.training_curves out/lr_sweep_paper/*-0/log.tsv --window 256        (loss at each learning rate)
        python -m experiments.training_curves out/scaling_paper/*/log.tsv --window 256                       (gradient norms)
        from runs with --log-every 1. Its sanity check compares a Multiscreen with transformer:45M trained as it is, with
        --weight-decay 0, and with --clip 0: three runs of train.py, given here as well.
Small:  python -m experiments.training_curves
        all runs of `python -m experiments.lr_sweep`, some seconds. It leaves out what they leave out, and of every two steps
        one: a log has one row each --log-every steps (and one for the first), a peak between two rows is not seen.

--window counts rows of the log, not steps: the paper's moving average over 256 steps is 256 rows with --log-every 1.
The gradient norm is the one before clipping; the table's median, 90th percentile and maximum are over the rows in the second
half of the steps. A spike is a row more than 5 standard deviations above the mean of the WINDOW rows before it, in the loss
or in the gradient norm. `end` is "diverged" by the criterion of lr_sweep. In the figure a gradient norm above 1 is drawn at 1 as
a cross, as in the paper.
"""
import math
import re
from pathlib import Path

import numpy as np

from experiments.common import outcome, pyplot, read_log, report, save_figure
from train import Parser, UsageError, cli

COLUMNS = ["run", "steps", "loss_first", "loss_last", "loss_spikes",
           "grad_median", "grad_p90", "grad_max", "grad_spikes", "end"]
PAPER = """The paper's statements (it prints no numbers here): the Transformer's loss has frequent spikes at moderate rates and
does not converge at larger ones, Multiscreen's is smooth even at 1; Multiscreen's gradient norm decays and settles near zero
with minimal variance, the Transformer's keeps a floor, with substantial variance and occasional spikes."""


def moving_average(x, window):
    """Means of `window` neighbours, or of all if there are fewer. x: (n,) -> (n - min(window, n) + 1,)."""
    return np.lib.stride_tricks.sliding_window_view(x, min(window, len(x))).mean(-1)


def count_spikes(x, window):
    """How many values are more than 5 standard deviations above the mean of the `window` values before them. x: (n,)."""
    if len(x) <= window:
        return 0
    before = np.lib.stride_tricks.sliding_window_view(x, window)[:-1]
    return int((x[window:] > before.mean(-1) + 5 * before.std(-1)).sum())


def curves(rows):
    """(step, loss, grad_norm), float arrays (n,), of the rows of a log.tsv that have them."""
    rows = [row for row in rows if {"step", "loss", "grad_norm"} <= row.keys()]
    return tuple(np.array([row[c] for row in rows]) for c in ("step", "loss", "grad_norm"))


def summarize(step, loss, norm, window):
    """The table's numbers of one run, COLUMNS without the first and last; nats per token."""
    smooth, late = moving_average(loss, window), norm[step > step[-1] / 2]
    return [int(step[-1]), *map(float, (smooth[0], smooth[-1])), count_spikes(loss, window),
            *map(float, (*np.quantile(late, [0.5, 0.9]), late.max())), count_spikes(norm, window)]


def parse(name):
    """(model, exponent, seed) of a folder of lr_sweep, MODEL-EXPONENT-SEED; ("runs", name, 0) of any other."""
    match = re.fullmatch(r"(.+?)-(-?\d+)-(\d+)", name)
    return (match[1].replace("_", ":"), int(match[2]), int(match[3])) if match else ("runs", name, 0)


def draw(plt, runs, window, path):
    """Smoothed losses above, gradient norms below, a column for each model. runs: {name: (step, loss, norm)}.

    Of several seeds only the first is drawn. A loss beyond 1.2 times the largest first row is outside the axes.
    """
    columns = {}
    for name, run in runs.items():
        model, e, _ = parse(name)
        columns.setdefault(model, {}).setdefault(e, run)
    keys = sorted({e for lines in columns.values() for e in lines}, key=lambda e: (isinstance(e, str), e))
    low = min(moving_average(loss, window).min() for _, loss, _ in runs.values())
    high = 1.2 * max(loss[0] for _, loss, _ in runs.values())
    fig, axes = plt.subplots(2, len(columns), figsize=(1 + 4 * len(columns), 6.5), sharex="col", sharey="row", squeeze=False)
    for (title, lines), (above, below) in zip(columns.items(), axes.T):
        for e, (step, loss, norm) in lines.items():
            color, smooth = plt.cm.viridis(0.95 * keys.index(e) / max(len(keys) - 1, 1)), moving_average(loss, window)
            label = e if isinstance(e, str) else f"$2^{{{e}}}$"
            label += " (above)" if smooth.min() > high else ""
            above.plot(step[len(step) - len(smooth) :], smooth, color=color, lw=1.2, label=label)
            below.plot(step, np.minimum(norm, 1), color=color, lw=0.8)
            below.plot(step[norm > 1], np.ones((norm > 1).sum()), "x", color=color, ms=4)
        above.set(title=title, ylim=(low - 0.05 * (high - low), high))
        above.legend(fontsize=7, ncol=2)
        below.set(xlabel="optimizer step", ylim=(0, 1.05))
    axes[0, 0].set_ylabel(f"training loss (nats per token),\nmean of {window} rows of the log")
    axes[1, 0].set_ylabel("gradient norm before clipping\n(above 1: crosses)")
    save_figure(fig, path)


def main():
    p = Parser(__doc__)
    p.add_argument("logs", nargs="*", help="log.tsv files of train.py [out/lr_sweep/*/log.tsv]")
    p.add_argument("--window", type=int, default=10, help="rows of the log in a moving average (paper: 256 steps) [10]")
    p.add_argument("--out", default="out/training_curves", help="folder for table and figure [out/training_curves]")
    args = p.parse_args()
    if args.window < 2:
        raise UsageError(f"--window {args.window}: it must be at least 2")
    paths = sorted(map(Path, args.logs or Path("out/lr_sweep").glob("*/log.tsv")), key=lambda path: [(isinstance(x, int), x) for x in parse(path.parent.name)])
    if not paths:
        raise UsageError("no log.tsv in out/lr_sweep: `python -m experiments.lr_sweep` makes them, or name some here")
    runs, rows = {}, []
    for path in paths:
        name = path.parent.name or str(path)
        name = str(path.parent) if name in runs else name
        log, stopped = read_log(path), (path.parent / "diverged.txt").exists()
        step, loss, norm = curves(log)
        end = "diverged" if stopped or len(step) and math.isnan(outcome(log, None)) else None
        if len(step):
            runs[name] = step, loss, norm
        numbers = summarize(step, loss, norm, args.window) if len(step) else [0] + [None] * (len(COLUMNS) - 3)
        rows.append([name, *numbers, end])
    report(Path(args.out) / "training_curves.tsv", COLUMNS, rows, "Training loss, nats per token, mean of the first and last "
           f"{args.window} rows of the log, and gradient norm in the second half, of {len(paths)} run(s)")
    print(PAPER)
    if runs and (plt := pyplot()):
        draw(plt, runs, args.window, Path(args.out) / "training_curves.png")


if __name__ == "__main__":
    cli(main)
