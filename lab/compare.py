"""Which run is better, by how much, and what differs between them?

    python -m lab.compare out my=out-edit
    python -m lab.compare out/idea/original-* out/idea/*
    python -m lab.compare 'Ours=out/m_lr*' 'Theirs=out/t_lr*' --by lr

A RUN is a folder that train.py has written, or a table that this command has written, with a row
for each run. You can put a label and = before it. Without a label, the name of the folder is used,
without the seed at its end. Runs with the same label form a group, which has one row in the table.
With --by, a group has one row for each value of that flag, such as lr or parameters. If you name a
run twice, it counts once. The columns are:

val_loss, std   the mean validation loss and its standard deviation over the seeds, at the last
                evaluation that all runs have, or most of them
change          the difference from the first group, averaged over the seeds that both groups have,
                because runs with the same seed see the same data in the same order
alive           the share of the pairs in the windows whose relevance is above 0, at the end
w_max           the largest window, at the end
spikes          how many rows of the log have a loss that is more than 5 standard deviations above
                the mean of the --window rows before
grad            the median gradient norm of the second half of the run
tokens_per_s    tokens per second; compare them only if each run had a machine to itself

With three seeds, ignore a change smaller than twice its standard deviation, change_std. If a group
has three runs or more, and each has a partner in the first group, a line below the table says
whether the change is larger than that. A run has diverged if train.py stopped it, or if both its
validation loss and its training loss are higher at the end than they were at the first evaluation.

Below the table you find the flags in which groups differ, as `first | other`, the lines of source
in which they differ, and a note for each run that was resumed after changes.

If matplotlib is installed, a figure is drawn into the folder --out. It shows losses and gradient
norms by step, as means over the seeds with bands of one standard deviation. With --by it shows the
loss by the value of the flag. For tables, which have no curves, it shows the changes. --name also
writes the runs to a table, which you can pass as a RUN later.
"""
import difflib
import math
from collections import Counter
from pathlib import Path

import numpy as np

from lab.common import mean_and_std, pyplot, save_figure
from lab.logs import FACTS, keep_runs, read_runs
from lab.style import WIDTH, count_of, legend_below, look, millions_axis, plot_with_band
from support.cli import Parser, UsageError, cli
from support.measure import cell_text, print_table

# Lines of a run's flags.txt, or of an old table, that are no difference between groups, or are
# shown otherwise.
NOT_SHOWN = ("seed", "log_every", "eval_every", "save_every", "parameters", "equations", "classes",
             "corpus", "named_by", "out", "device", "torch", "resume", "force")
COLUMNS = ("run", "seeds", "parameters", "val_loss", "std", "change", "change_std", *FACTS)


def make_groups(runs, by=None):
    """{label: its Runs, sorted by the flag `by`}. Raises UsageError if a seed comes twice."""
    groups = {}
    for run in runs:
        known = groups.setdefault(run.label, {})
        if known.setdefault((run.seed, run.flags.get(by)), run) is not run:
            raise UsageError(f"{run.label} has seed {run.seed} twice: label the runs, as in "
                             "mine=out-mine")
    try:
        return {label: sorted(known.values(), key=lambda run: float(run.flags[by]) if by else 0)
                for label, known in groups.items()}
    except (KeyError, ValueError):
        raise UsageError(f"--by {by} is not a number in each of these runs") from None


def common_step(runs):
    """The step after which most of the runs were evaluated, of several the last."""
    counts = Counter(step for run in runs for step in run.losses
                     if run.end != "diverged" and not why_not(runs[0], run))
    return max(counts, key=lambda step: (counts[step], step), default=None)


def why_not(first, run, *more):
    """Why a loss does not compare with the first run's, or "". more: flags that must agree, too."""
    a, b = first.flags, run.flags
    # The same files may have other names; streams have no files.
    if (a.get("corpus") or a["data"]) != (b.get("corpus") or b["data"]):
        return "other texts"
    return next((f"{name} {a.get(name)} | {b.get(name)}" for name in
                 ("digits", "tokenizer", "seq_len", *more) if a.get(name) != b.get(name)), "")


def rows_of(groups, step, by=None):
    """(rows, dicts by COLUMNS; notes): a row for each group, with `by` for each of its values."""
    parts = {}
    for label, runs in groups.items():
        for run in runs:
            parts.setdefault(f"{label}, {by} {run.flags[by]}" if by else label, []).append(run)

    first, *_ = groups.values()
    rows, notes, single = [], [], []
    for label, runs in parts.items():
        changes = changes_of(runs, first, step, by)
        rows.append(row_of(label, runs, changes, step))
        notes += [f"{label}{note}" for note in notes_on(runs, changes, first[0], step)]
        if not by and len(changes) == len(runs) > 2:
            notes.append(f"{label} {verdict(changes)}")
        single += [label] * (len(changes) == 1)
    if single:
        notes.append("one pair of runs shows nothing, since another seed gives another loss; train "
                     "more seeds of " + "; ".join(single))
    return rows, notes


def changes_of(runs, first, step, by):
    """The losses after `step` minus those of the first group, of equal seeds and values of `by`."""
    if runs[0].label == first[0].label:
        return []
    ours, theirs = ({(run.seed, run.flags.get(by)): run for run in some
                     if run.end != "diverged" and step in run.losses} for some in (runs, first))
    return [run.losses[step] - theirs[pair].losses[step] for pair, run in ours.items()
            if pair in theirs and not why_not(theirs[pair], run)]


def verdict(changes):
    """What three changes or more say together."""
    change, std = mean_and_std(changes)
    if abs(change) > 2 * std:
        word = "lower" if change < 0 else "higher"
        return f"has a {word} loss: the change is more than twice its deviation"
    return "changes the loss by at most twice the deviation, as another seed may, too"


def row_of(label, runs, changes, step):
    """A row, {name of COLUMNS: cell}: means over the runs, of losses over those on one text."""
    loss, std = mean_and_std([run.loss_at(step) for run in runs if not why_not(runs[0], run)])
    change, change_std = mean_and_std(changes)
    row = {"run": label, "seeds": len(runs), "parameters": runs[0].flags["parameters"],
           "val_loss": loss, "std": std, "change": change, "change_std": change_std}
    if changes:
        row["change"] = f"{change:+.4f}"
    for name in FACTS:
        row[name], _ = mean_and_std([run.facts[name] for run in runs])
    if not math.isnan(row["tokens_per_s"]):
        row["tokens_per_s"] = round(row["tokens_per_s"])
    return row


def notes_on(runs, changes, first, step):
    """What a row does not say: what is not compared, how runs ended, where one was better."""
    n = sum(not math.isnan(run.loss_at(step)) and not why_not(runs[0], run) for run in runs)
    if reason := why_not(first, runs[0]):
        yield f" is not compared: {reason}"
    elif runs[0].label != first.label and len(changes) < n:
        yield (f": the change uses {len(changes)} of its {n} losses: the others have no partner, "
               "of the same seed and step")
    for run in runs:
        if reason := why_not(runs[0], run):
            yield f", seed {run.seed}: left out of the mean: {reason}"
        yield from notes_on_run(run)
        if not math.isnan(run.loss_at()) and step not in run.losses:
            yield f", seed {run.seed}: its loss is that after {max(run.losses)} steps"


def notes_on_run(run):
    """How a run ended, and where it was better."""
    if run.end:
        yield f", seed {run.seed}: {run.end}"
    if run.loss_at() > run.facts["best"] + 0.05:
        yield (f", seed {run.seed}: best {run.facts['best']:.5g} after "
               f"{run.facts['best_step']:g} steps")


def differences_inside(groups, by=None):
    """Lines: where runs of a group differ from its first in more than the seed."""
    for label, (one, *others) in groups.items():
        for run in others:
            if lines := what_differs(one, run, by):
                yield from (f"\n{label}: seed {one.seed} | seed {run.seed}", *lines)


def what_differs(one, other, by=None):
    """Lines: the flags, but for `by`, and the source in which two runs differ."""
    a, b = ({name: x or "-" for name, x in run.flags.items()} for run in (one, other))
    hidden = [*NOT_SHOWN, by]
    if "corpus" in a and a["corpus"] == b.get("corpus"):
        hidden.append("data")                          # the same texts at another path
    lines = [f"  {name} {a.get(name, '-')} | {b.get(name, '-')}" for name in {**a, **b}
             if a.get(name, "-") != b.get(name, "-") and name not in hidden]
    if "corpus" in a and "corpus" in b and a["corpus"] != b["corpus"]:
        lines.append("  other texts")
    if one.source and other.source:
        lines += differences(one.source, other.source)
    elif a["model"] == b["model"] and a.get("equations") != b.get("equations"):
        lines.append("  other equations")              # of an old table
    return lines


def differences(old, new, most=20):
    """The lines in which two {path: text} differ, at most `most` of each file."""
    lines = []
    for path in sorted(old.keys() & new.keys()):
        diff = difflib.unified_diff(old[path].splitlines(), new[path].splitlines(), n=0,
                                    lineterm="")
        changed = [line for line in diff if line[:3] not in ("---", "+++")]
        if changed:
            lines += [f"  {path}", *(f"    {line}" for line in changed[:most])]
        if len(changed) > most:
            lines.append(f"    and {len(changed) - most} more lines")
    return lines


# ------------------------------------------------------------------------------------- figures

def mean_curve(runs, column, window):
    """(steps, mean, deviation) over the runs' curves, at the steps that all have.

    If they are many, a point is the mean of `window` steps.
    """
    curves = [dict(zip(*run.curves[column])) for run in runs]
    steps = sorted(set.intersection(*map(set, curves)))
    found = np.array([steps, *([curve[step] for step in steps] for curve in curves)])
    if len(steps) >= 3 * window:
        found = np.lib.stride_tricks.sliding_window_view(found, window, 1).mean(-1)
    steps, *values = found
    std = np.std(values, 0, ddof=1) if len(values) > 1 else None
    return steps, np.mean(values, 0), std


def draw_curves(plt, groups, window, path):
    """Losses above, with the validation losses as points; gradient norms below."""
    fig, axes = plt.subplots(2, 1, figsize=(WIDTH, 7.5), sharex=True, layout="constrained")
    tops = []
    for n, (label, runs) in enumerate(groups.items()):
        for ax, column in zip(axes, ("loss", "grad_norm")):
            steps, mean, std = mean_curve(runs, column, window)
            style = look(n) | ({"marker": ""} if len(steps) > 1 else {})
            plot_with_band(ax, steps, mean, std, label=f"{label}, {count_of(len(runs), 'seed')}",
                           **style)
            if column == "loss" and len(mean):
                tops.append(mean[len(mean) // 20])     # not where it falls steeply
        steps, mean, _ = mean_curve(runs, "val_loss", math.inf)
        axes[0].plot(steps, mean, **look(n) | {"ls": ""}, ms=5, mec="black", mew=0.5)
    axes[0].set_ylim(top=max(tops, default=None))
    axes[0].set_ylabel("training loss (nats per token);\npoints: validation")
    axes[1].set(xlabel=f"optimizer step; long curves are means of {window} rows of the log",
                ylabel="gradient norm before clipping", yscale="log")
    legend_below(fig)
    save_figure(fig, path)


def draw_by(plt, groups, flag, path):
    """Losses against a flag, a curve a group; runs without a loss are hollow on top.

    groups: {label: [(value of the flag, a loss for each seed)]}
    """
    fig, ax = plt.subplots(figsize=(WIDTH, 5), layout="constrained")
    room = 0                                           # for hollow marks, in points
    for n, (label, points) in enumerate(groups.items()):
        values, losses = zip(*points)
        means, stds = zip(*map(mean_and_std, losses))
        ax.errorbar(values, means, yerr=np.nan_to_num(stds), capsize=3, lw=1.5, ms=5,
                    label=f"{label}, {count_of(max(map(len, losses)), 'seed')}", **look(n))
        bad = [x for x, of_seeds in points if any(map(math.isnan, of_seeds))]
        ax.plot(bad, [1.03 + 0.05 * n] * len(bad), transform=ax.get_xaxis_transform(), ms=7,
                mew=1.5, clip_on=False, in_layout=False, **look(n) | {"ls": "", "mfc": "none"})
        if bad:
            room = 15 + 8 * n
    if room:
        ax.set_title(" ", fontsize=room)
        ax.plot([], [], "o", color="black", ms=7, mew=1.5, mfc="none",
                label="hollow, on top: a seed without a loss, diverged or not evaluated")
    values = [x for points in groups.values() for x, _ in points]
    if flag == "parameters":
        millions_axis(plt, ax)
    elif 0 < 5 * min(values) < max(values):
        ax.set_xscale("log", base=2)
    names = {"lr": "learning rate", "parameters": "parameters (millions)"}
    ax.set(xlabel=names.get(flag, flag.replace("_", " ")),
           ylabel="validation loss (nats per token)")
    legend_below(fig)
    save_figure(fig, path)


def draw_changes(plt, rows, path):
    """The change of the loss by each group, with its deviation."""
    fig, ax = plt.subplots(figsize=(WIDTH, 1.2 + 0.4 * len(rows)), layout="constrained")
    changes = [0.0, *(float(row["change"]) for row in rows[1:])]
    ax.errorbar(changes, range(len(rows)), xerr=np.nan_to_num([row["change_std"] for row in rows]),
                ls="none", marker="o", ms=6, capsize=4, color=look(0)["color"])
    ax.axvline(0, color="gray", lw=0.8, zorder=0)
    ax.set_yticks(range(len(rows)),
                  [f"{row['run']}, {count_of(row['seeds'], 'seed')}" for row in rows])
    ax.invert_yaxis()
    ax.set_xlabel(f"validation loss minus that of {rows[0]['run']} (nats per token)")
    save_figure(fig, path)


# ------------------------------------------------------------------------------------- command

def main():
    p = Parser(__doc__)
    p.add_argument("runs", nargs="+", metavar="RUN",
                   help="folders that train.py has written, label=folder, or tables of runs")
    p.add_argument("--by", metavar="FLAG",
                   help="compare the runs by the value of this flag of train.py, such as lr")
    p.flag("--window", 10, "how many rows of the log to average for spikes and curves")
    p.add_argument("--out", type=Path, default=Path("out"),
                   help="the folder to write the figure and the table to [out]")
    p.add_argument("--name", help="write NAME.png, and a table NAME.tsv with a row for each run "
                   "[compare.png, and no table]")
    args = p.parse_args()
    by = args.by and args.by.removeprefix("--").replace("-", "_")
    runs = read_runs(args.runs, args.window)
    groups = make_groups(runs, by)
    (reference, (first, *_)), *_ = groups.items()
    step = common_step([run for group in groups.values() for run in group])

    # The table, and what it does not show.
    rows, notes = rows_of(groups, step, by)
    known = [name for name in COLUMNS if any(cell_text(row[name]) != "-" for row in rows)]
    title = "Validation loss, nats per token"
    if step:
        title += f", after {step} steps"
    if "change" in known:
        title += f"; change: against {reference}, by seed" + f" and {by}" * bool(by)
    print_table(known, [[row[name] for name in known] for row in rows], title)
    print(*notes, sep="\n", end="\n" * bool(notes))

    # What differs between the groups, and inside them.
    for label, (one, *_) in groups.items():
        if lines := what_differs(first, one, by):
            print(f"\n{reference} | {label}", *lines, sep="\n")
    for line in differences_inside(groups, by):
        print(line)

    if args.name:
        keep_runs(args.out / f"{args.name}.tsv", runs, step)
    groups = {label: [run for run in group if not why_not(first, run)]
              for label, group in groups.items() if not why_not(first, group[0])}
    path = args.out / f"{args.name or 'compare'}.png"
    has_curves = all(run.curves for group in groups.values() for run in group)
    if (by or has_curves or len(rows) > 1) and (plt := pyplot()):
        if by:
            points = {}
            for label, group in groups.items():
                losses = {}
                for run in group:
                    losses.setdefault(float(run.flags[by]), []).append(run.loss_at(step))
                points[label] = [*losses.items()]
            draw_by(plt, points, by, path)
        elif has_curves:
            draw_curves(plt, groups, args.window, path)
        else:
            draw_changes(plt, rows, path)


if __name__ == "__main__":
    cli(main)
