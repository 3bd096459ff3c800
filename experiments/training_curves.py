"""Loss and gradient norm in training, from log.tsv files.

Appendices "Training Loss Dynamics" and "Gradient Norm Dynamics".

Paper:  python -m experiments.training_curves out/lr_sweep_paper/*-0/log.tsv --window 256
        python -m experiments.training_curves --window 256 \\
            out/scaling_paper/{transformer_1.3B,multiscreen_psi48}-0/log.tsv
        The first draws the loss at each learning rate, the second gradient norms, both from runs
        with --log-every 1. Those of the sanity check: python -m experiments.sanity
Small:  python -m experiments.training_curves
        All runs of `python -m experiments.lr_sweep`, in seconds. What it leaves out: what they
        leave out, and every second step. A log has a row each --log-every steps and one for the
        first step; a peak between two rows is lost.

--window counts rows of the log: the paper's moving average over 256 steps is 256 rows with
--log-every 1. Gradient norms are measured before clipping. Their median, 90th percentile and
maximum are taken over the second half of the steps. A spike is a row, of the loss or of the norm,
more than 5 standard deviations above the mean of the WINDOW rows before it. The column `end` says
"diverged" by lr_sweep's criterion. The figure draws norms above its axis as crosses at its end.
What a run is stands in flags.txt beside its log.
"""
if not __package__:
    raise SystemExit("error: run python -m experiments.training_curves in the folder above")

import math
from pathlib import Path

import numpy as np

from experiments.common import pyplot, report, save_figure
from experiments.curves import get_columns, moving_average, summarize_run
from experiments.models import model_of
from experiments.runs import final_loss, flags_in, read_log
from experiments.style import COLORS, LINES, WIDTH, count_of, paper_name, short_number
from support.cli import Parser, UsageError, cli
from support.results import flag

COLUMNS = ["run", "steps", "loss_first", "loss_last", "loss_spikes",
           "grad_median", "grad_p90", "grad_max", "grad_spikes", "end"]
PAPER = """The paper prints no numbers here. It states: the Transformer's loss has frequent spikes
at moderate rates and does not converge at larger ones; Multiscreen's is smooth even at 1. Its
gradient norm decays and settles near zero with minimal variance; the Transformer's keeps a floor,
with substantial variance and occasional spikes."""


def parse_folder(folder):
    """(name of the model, what sets the run apart from others of it, seed), by its flags.txt.

    That is an exponent for a learning rate 2^e, else words. A folder without flags has its name.
    """
    line = flags_in(folder)
    if not line:
        return "", folder.name, 0
    rate, seed = float(flag(line, "--lr")), int(flag(line, "--seed"))
    words, model = [], model_of(line)
    if model.family == "transformer":
        words = [f"w/o {what}" for what, name in (("weight decay", "--weight-decay"),
                                                  ("clipping", "--clip"))
                 if not float(flag(line, name))]
    if not words and not math.log2(rate).is_integer():
        words = [f"{rate:g}"]
    size = f"{paper_name(model.name)}, {short_number(model.parameters)}"
    return size, ", ".join(words) or int(math.log2(rate)), seed


def get_styles(plt, keys):
    """{key: (colour, line, label)}. Learning rates go from dark to bright, other runs alternate."""
    rates = sorted(key for key in keys if isinstance(key, int))
    others = sorted(key for key in keys if isinstance(key, str))
    styles = {}
    for n, e in enumerate(rates):
        color = plt.cm.viridis(0.92 * n / max(len(rates) - 1, 1))
        styles[e] = color, LINES[n % len(LINES)], f"$2^{{{e}}}$"
    for n, name in enumerate(others, 1):
        styles[name] = COLORS[n % len(COLORS)], LINES[n % len(LINES)], name
    return styles


def draw_curves(plt, runs, window, path):
    """Losses above, gradient norms below, a column for each model. runs[folder]: step, loss, norm.

    Of several seeds only the first is drawn. The loss axis ends at 1.2 times the largest first row;
    a title names the runs that stay above it. The norms' axis ends at 1, like the paper's, or at
    twice the norm of the middle run, in halves.
    """
    columns = {}
    for folder, run in runs.items():
        model, key, _ = parse_folder(folder)
        columns.setdefault(model, {}).setdefault(key, run)
    styles = get_styles(plt, {key for lines in columns.values() for key in lines})
    low = min(moving_average(loss, window).min() for _, loss, _ in runs.values())
    high = 1.2 * max(loss[0] for _, loss, _ in runs.values())
    middle = np.median([np.median(norm) for *_, norm in runs.values()])
    top = max(1, math.ceil(4 * middle) / 2)

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
            shown = np.minimum(norm, top)
            below.plot(step, shown, color=color, lw=0.5, alpha=0.3)
            below.plot(step[len(step) - len(smooth) :], moving_average(shown, window), color=color,
                       ls=line, lw=1.5)
            below.plot(step[norm > top], shown[norm > top], "x", color=color, ms=4)
        title = [model] if model else []
        if outside:
            title.append(f"above the axis: {', '.join(outside)}")
        above.set(title="\n".join(title), ylim=(low - 0.05 * (high - low), high))
        below.set(xlabel="optimizer step", ylim=(0, 1.05 * top))
    axes[0, 0].set_ylabel(f"training loss (nats per token),\nmean of {window} rows of the log")
    axes[1, 0].set_ylabel("gradient norm before clipping,\n"
                          f"and its mean (above {top:g}: crosses)")
    handles = [plt.Line2D([], [], color=color, ls=line, label=label)
               for color, line, label in styles.values()]
    title, ncols = ("learning rate", 8) if any(columns) else (None, 2)
    if any("w/o" in label for _, _, label in styles.values()):
        title += ", or what is left out"
    fig.legend(handles=handles, title=title, loc="outside lower center", ncols=ncols, frameon=False)
    save_figure(fig, path)


def main():
    p = Parser(__doc__)
    p.add_argument("logs", nargs="*", help="log.tsv files of train.py [out/lr_sweep/*/log.tsv]")
    p.add_argument("--window", type=int, default=10,
                   help="rows of the log in a moving average (paper: 256 steps) [10]")
    p.add_argument("--out", default="out/training_curves",
                   help="folder for table and figure [out/training_curves]")
    args = p.parse_args()
    if args.window < 2:
        raise UsageError(f"--window {args.window}: it must be at least 2")
    paths = map(Path, args.logs or Path("out/lr_sweep").glob("*/log.tsv"))
    folders = sorted((path.parent for path in paths), key=lambda x: (*map(str, parse_folder(x)), x))
    if not folders:
        raise UsageError("out/lr_sweep has no log.tsv: run `python -m experiments.lr_sweep`, or "
                         "name some logs")
    show(folders, args.window, Path(args.out) / "training_curves.tsv")


def are_there(logs):
    """Whether all these log.tsv files are there; if not, a line says what that costs."""
    found = all(path.exists() for path in logs)
    if not found:
        print("training curves are not drawn: some of the logs are gone")
    return found


def show(folders, window, table):
    """The table and the figure of the runs in some folders."""
    runs, rows = {}, []
    for folder in folders:
        log = read_log(folder / "log.tsv")
        step, loss, norm = get_columns(log)
        diverged = (folder / "diverged.txt").exists()
        numbers = [0] + [None] * (len(COLUMNS) - 3)
        if len(step):
            runs[folder] = step, loss, norm
            diverged = diverged or math.isnan(final_loss(log, None))
            numbers = summarize_run(step, loss, norm, window)
        rows.append([folder.name or str(folder), *numbers, "diverged" if diverged else None])
    report(table, COLUMNS, rows,
           f"Training loss, nats per token, mean of the first and last {window} rows of the "
           f"log, and gradient norm in the second half, of {count_of(len(folders), 'run')}")
    print(PAPER)
    if runs and (plt := pyplot()):
        draw_curves(plt, runs, window, table.with_suffix(".png"))


if __name__ == "__main__":
    cli(main)
