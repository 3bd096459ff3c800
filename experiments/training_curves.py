"""Loss and gradient norm in training, from log.tsv files.

Appendices "Training Loss Dynamics" and "Gradient Norm Dynamics".

Paper:  python -m experiments.training_curves out/lr_sweep_paper/*-0/log.tsv --window 256
        python -m experiments.training_curves out/scaling_paper/*/log.tsv --window 256
        The first draws the loss at each learning rate, the second gradient norms, both from runs
        with --log-every 1. The paper's sanity check compares a Multiscreen with three runs of
        transformer:45M: as it is, with --weight-decay 0, and with --clip 0. Train them with
        train.py and name their logs here.
Small:  python -m experiments.training_curves
        All runs of `python -m experiments.lr_sweep`, in seconds. What it leaves out: what they
        leave out, and every second step. A log has a row each --log-every steps and one for the
        first step; a peak between two rows is lost.

--window counts rows of the log: the paper's moving average over 256 steps is 256 rows with
--log-every 1. Gradient norms are measured before clipping. Their median, 90th percentile and
maximum are taken over the second half of the steps. A spike is a row, of the loss or of the norm,
more than 5 standard deviations above the mean of the WINDOW rows before it. The column `end` says
"diverged" by lr_sweep's criterion. The figure draws norms above 1 as crosses at 1, like the paper.
"""
if not __package__:
    raise SystemExit("error: run python -m experiments.training_curves in the folder above")

import math
import re
from pathlib import Path

import numpy as np

from experiments.common import pyplot, report, save_figure
from experiments.curves import get_columns, moving_average, summarize_run
from experiments.runs import final_loss, read_log
from experiments.style import COLORS, LINES, WIDTH, count_of, label_run, paper_name
from support.cli import Parser, UsageError, check_writable, cli

COLUMNS = ["run", "steps", "loss_first", "loss_last", "loss_spikes",
           "grad_median", "grad_p90", "grad_max", "grad_spikes", "end"]
PAPER = """The paper prints no numbers here. It states: the Transformer's loss has frequent spikes
at moderate rates and does not converge at larger ones; Multiscreen's is smooth even at 1. Its
gradient norm decays and settles near zero with minimal variance; the Transformer's keeps a floor,
with substantial variance and occasional spikes."""


def parse_folder(name):
    """(model, exponent, seed) of lr_sweep's MODEL-EXPONENT-SEED; ("", name, 0) of any other."""
    match = re.fullmatch(r"(.+?)-(-?\d+)-(\d+)", name)
    if not match:
        return "", name, 0
    return match[1].replace("_", ":"), int(match[2]), int(match[3])


def get_styles(plt, keys):
    """{key: (colour, line, label)}. Learning rates go from dark to bright, other runs alternate."""
    rates = sorted(key for key in keys if isinstance(key, int))
    others = sorted(key for key in keys if isinstance(key, str))
    styles = {}
    for n, e in enumerate(rates):
        color = plt.cm.viridis(0.92 * n / max(len(rates) - 1, 1))
        styles[e] = color, LINES[n % len(LINES)], f"$2^{{{e}}}$"
    for n, name in enumerate(others):
        styles[name] = COLORS[n % len(COLORS)], LINES[n % len(LINES)], label_run(name)
    return styles


def draw_curves(plt, runs, window, path):
    """Losses above, gradient norms below, a column for each model. runs[name]: step, loss, norm.

    Of several seeds only the first is drawn. The loss axis ends at 1.2 times the largest first row;
    a title names the runs that stay above it.
    """
    columns = {}
    for name, run in runs.items():
        model, key, _ = parse_folder(name)
        columns.setdefault(model, {}).setdefault(key, run)
    styles = get_styles(plt, {key for lines in columns.values() for key in lines})
    low = min(moving_average(loss, window).min() for _, loss, _ in runs.values())
    high = 1.2 * max(loss[0] for _, loss, _ in runs.values())

    fig, axes = plt.subplots(2, len(columns), figsize=(WIDTH, 6.5), sharex="col", sharey="row",
                             squeeze=False, layout="constrained")
    for (model, lines), (above, below) in zip(columns.items(), axes.T):
        outside = []
        for key, (step, loss, norm) in lines.items():
            color, line, label = styles[key]
            smooth = moving_average(loss, window)
            if smooth.min() > high:
                outside.append(label)
            marker = "." if len(smooth) == 1 else ""
            above.plot(step[len(step) - len(smooth) :], smooth, color=color, ls=line, lw=1.5,
                       marker=marker)
            below.plot(step, np.minimum(norm, 1), color=color, ls=line, lw=1)
            below.plot(step[norm > 1], np.ones((norm > 1).sum()), "x", color=color, ms=4)
        title = [paper_name(model)] if model else []
        if outside:
            title.append(f"above the axis: {', '.join(outside)}")
        above.set(title="\n".join(title), ylim=(low - 0.05 * (high - low), high))
        below.set(xlabel="optimizer step", ylim=(0, 1.05))
    axes[0, 0].set_ylabel(f"training loss (nats per token),\nmean of {window} rows of the log")
    axes[1, 0].set_ylabel("gradient norm before clipping\n(above 1: crosses)")
    handles = [plt.Line2D([], [], color=color, ls=line, label=label)
               for color, line, label in styles.values()]
    title, ncols = ("learning rate", 8) if any(columns) else (None, 2)
    fig.legend(handles=handles, title=title, loc="outside lower center", ncols=ncols, frameon=False)
    save_figure(fig, path)


def main():
    p = Parser(__doc__)
    p.add_argument("logs", nargs="*", help="log.tsv files of train.py [out/lr_sweep/*/log.tsv]")
    p.add_argument("--window", type=int, default=10,
                   help="rows of the log in a moving average (paper: 256 steps) [10]")
    p.add_argument("--out", default="out/training_curves",
                   help="folder for table and figure [out/training_curves]")
    p.add_shared("--force")
    args = p.parse_args()
    if args.window < 2:
        raise UsageError(f"--window {args.window}: it must be at least 2")
    paths = map(Path, args.logs or Path("out/lr_sweep").glob("*/log.tsv"))
    paths = sorted(paths, key=lambda path: parse_folder(path.parent.name))
    if not paths:
        raise UsageError("out/lr_sweep has no log.tsv: run `python -m experiments.lr_sweep`, or "
                         "name some logs")
    table = Path(args.out) / "training_curves.tsv"
    check_writable(table, args.force)

    runs, rows = {}, []
    for path in paths:
        name = path.parent.name or str(path)
        if name in runs:
            name = str(path.parent)
        log = read_log(path)
        step, loss, norm = get_columns(log)
        diverged = (path.parent / "diverged.txt").exists()
        numbers = [0] + [None] * (len(COLUMNS) - 3)
        if len(step):
            runs[name] = step, loss, norm
            diverged = diverged or math.isnan(final_loss(log, None))
            numbers = summarize_run(step, loss, norm, args.window)
        rows.append([name, *numbers, "diverged" if diverged else None])
    report(table, COLUMNS, rows,
           f"Training loss, nats per token, mean of the first and last {args.window} rows of the "
           f"log, and gradient norm in the second half, of {count_of(len(paths), 'run')}")
    print(PAPER)
    if runs and (plt := pyplot()):
        draw_curves(plt, runs, args.window, table.with_suffix(".png"))


if __name__ == "__main__":
    cli(main)
