"""Which run is better, by how much, and what differs between them?

    python -m experiments.compare out my=out-edit
    python -m experiments.compare out/idea/original-* out/idea/*
    python -m experiments.compare 'Ours=out/m_lr*' 'Theirs=out/t_lr*' --by lr

A run is a folder of train.py, or a row of a table that this command wrote. A word before = is its
label; a pattern in quotes names several runs. A run named twice counts once. An unlabeled run is
named after its folder, without the seed at the end. Runs that differ only in their seed are a
group.

The table has a row for each group. val_loss and std: the mean validation loss and its deviation
over the seeds. change: the difference from the first group, averaged over the seeds that both have,
because runs with the same seed see the same data in the same order. alive: the share of pairs in
the windows with relevance above 0. w_max: the largest window. spikes: rows of the log with a loss
more than 5 deviations above the --window rows before. grad: the median gradient norm of the second
half. Compare tokens per second only if each run had one machine to itself. Empty columns are left
out.

Then come the differences: flags, as `first | other`, and lines of source. Runs of different lengths
are compared at the last evaluation they share. Runs with other data, another tokenizer or another
sequence length are listed without a change. A run has diverged if train.py stopped it, or if its
mean training loss over the last eighth of the log is more than half a nat above the mean over
another eighth, or above the first loss.

With matplotlib, the folder --out gets a figure: losses and gradient norms by step, with means over
the seeds and bands of one deviation; with --by, losses by the value of a flag; for tables, which
have no curves, the changes. --name also writes the runs to a table that this command can read.
"""
import math
import statistics
from dataclasses import dataclass, field

import numpy as np

from experiments.common import mean_and_std, paired_change, pyplot, save_figure, signed
from experiments.runs import is_of_models, keep_runs, read_runs, runs_parser
from experiments.style import (
    WIDTH,
    count_of,
    legend_below,
    look,
    paper_name,
    plot_with_band,
)
from support.cli import UsageError, cli
from support.source import changed_lines, shown_change
from support.table import MAY_DIFFER, cell_text, print_table

# Lines of flags.txt in which runs of one group may differ, or that are shown in another way.
NOT_COMPARED = (*MAY_DIFFER, "parameters", "equations", "classes", "corpus", "source")
SHARED = ("corpus", "data", "digits", "tokenizer", "seq_len")      # else losses do not compare
COLUMNS = ["run", "seeds", "parameters", "val_loss", "std", "change", "change_std", "tokens_per_s",
           "alive", "w_max", "spikes", "grad"]
MOST_LINES = 20


@dataclass
class Group:
    """Runs that differ only in their seed.

    reason: why its loss does not compare, or "". other_steps: it has no evaluation in common with
    the groups before it.
    """
    label: str
    runs: list = field(default_factory=list)
    reason: str = ""
    other_steps: bool = False

    @property
    def flags(self):
        return self.runs[0].flags


# --------------------------------------------------------------------------------- groups of runs

def make_groups(runs, by=None):
    """Groups in the order of their first runs: flags agree, and the label or the name before -SEED.

    Folders with other names are a group if flags and source agree, and no seed comes twice. by: a
    flag in which the runs of a group may differ; then those of one source are a group.
    """
    groups = []
    for run in runs:
        label = paper_name(run.flags["model"]) if by and run.named_by != "label" else run.label
        for group in groups:
            first = group.runs[0]
            if compared(run.flags, by) != compared(first.flags, by):
                continue
            one_source = run.flags.get("source") == first.flags.get("source")
            alike = one_source and run.named_by == first.named_by == "folder"
            new = run.seed not in [other.seed for other in group.runs]
            same = label == group.label and run.named_by != "folder"
            if by and run.named_by != "label":
                same = label == group.label and one_source
            if same or alike and new:
                group.runs.append(run)
                break
        else:
            groups.append(Group(label, [run]))
    for group in groups:
        seeds = [run.seed for run in group.runs]
        if not by and len(seeds) > len({*seeds}):
            raise UsageError(f"{group.label} has seed {statistics.mode(seeds)} twice: label the "
                             "runs, as in mine=out-mine")
    tell_apart(groups)
    for group in groups:
        group.reason = why_not(groups[0].flags, group.flags)
    return groups


def compared(flags, by=None):
    """Those flags in which the runs of a group agree."""
    return {name: x for name, x in flags.items() if name not in (*NOT_COMPARED, by)}


def tell_apart(groups):
    """Add to equal labels the flags in which their groups differ."""
    for label in {group.label for group in groups}:
        same = [group for group in groups if group.label == label]
        names = [name for name in compared(same[0].flags)
                 if len({group.flags.get(name) for group in same}) > 1]
        for n, group in enumerate(same if len(same) > 1 else []):
            words = [word_of(name, group.flags.get(name, "")) for name in names]
            own = group.runs[0].label
            words = words or [own if own != label else str(n + 1)]
            group.label = ", ".join([label, *filter(None, words)])


def word_of(name, value):
    """A flag in a label; what was changed on --resume is too long for one."""
    words = {"changes": "resumed with changes", "init_weights": "--init"}
    if name in words:
        return words[name] if value else ""
    return f"{name} {value}"


def why_not(first, other):
    """Why a loss does not compare with that of the first group, or ""."""
    for name in SHARED:
        if name == "digits" and first.get("data") != "abcdigits":
            continue
        if name == "data" and first.get("corpus"):
            continue                                   # the same files may have other names
        a, b = first.get(name), other.get(name)
        if a != b:
            return "other texts" if name == "corpus" else f"{name} {a} | {b}"
    return ""


def common_step(groups):
    """The last step after which all compared runs that did not diverge were evaluated, or None.

    A group that has none in common with those before it is set apart: `other_steps`.
    """
    shared = None
    for group in groups:
        steps = [set(run.losses) for run in group.runs if run.end != "diverged"]
        if group.reason or not steps:
            continue
        common = set.intersection(*steps)
        if shared is not None:
            common &= shared
        group.other_steps = bool(shared) and not common
        if not group.other_steps:
            shared = common
    return max(shared, default=None) if shared else None


# ------------------------------------------------------------------------------------------- text

def losses_of(runs, step, by=None):
    """{(seed, value of the flag `by`): loss}."""
    return {(run.seed, run.flags.get(by)): run.loss_at(step) for run in runs}


def pairs_of(group, first, step, by=None):
    """(how many losses of a group have a partner among the runs `first`, how many it has)."""
    known, losses = ({key for key, x in losses_of(runs, step, by).items() if x == x}
                     for runs in (first, group.runs))
    return len(known & losses), len(losses)


def why_no_change(group, first, step):
    """Why a group without a change has none. first: the runs it is compared with."""
    if group.reason:
        return group.reason
    if step is None or group.other_steps:
        return "no evaluation in common"
    for runs, reason in ((group.runs, "diverged"), (first, "the first group diverged")):
        if all(run.end == "diverged" for run in runs):
            return reason
    return "no seed in common"


def rows_of(groups, first, step, by=None):
    """A row of COLUMNS for each group. first: the runs it is compared with, at equal `by`."""
    rows = []
    known = losses_of(first, step, by)
    for group in groups:
        losses = losses_of(group.runs, step, by)
        mean, std, _ = mean_and_std(losses.values())
        change, change_std = paired_change(losses, known)
        if group.reason or group.other_steps or group.runs[0] in first or step is None:
            change = change_std = math.nan
        speed, *others = [mean_and_std([run.facts[name] for run in group.runs])[0] for name in
                          ("tokens_per_s", "alive", "w_max", "spikes", "grad")]
        rows.append([group.label, len(losses), group.flags["parameters"], mean, std,
                     signed(change), change_std, speed if math.isnan(speed) else round(speed),
                     *others])
    return rows


def notes_of(groups, first, step, by=None):
    """Lines about what the table does not show. first: see rows_of."""
    alike = [group for group in groups if not group.reason and not group.other_steps]
    ends = {max(run.losses) for group in alike for run in group.runs
            if run.losses and run.end != "diverged"}
    notes = []
    if step is None and len(groups) > 1:
        notes.append("no evaluation in common: each loss is the run's last, and none is compared")
    elif len(ends) > 1:
        notes.append(f"compared after {step} steps, the last evaluation that all runs have; "
                     "other columns are of each run's end")
    for group in groups:
        n, of = pairs_of(group, first, step, by)
        if group.reason:
            notes.append(f"{group.label} is not compared: {group.reason}")
        elif group.other_steps:
            notes.append(f"{group.label} is not compared: no evaluation in common; its loss is the "
                         "last")
        elif group.runs[0] not in first and step is not None and n < of:
            what = f"the change uses {n} of its {of} finite losses, those with a partner"
            notes.append(f"{group.label}: {what if n else why_no_change(group, first, step)}")
        for end in sorted({run.end for run in group.runs} - {""}):
            seeds = [run.seed for run in group.runs if run.end == end]
            notes.append(f"{group.label}, seed {', '.join(seeds)}: {end}")
        for run in group.runs:
            # Not where the last evaluation is the best, or nearly.
            if not group.reason and run.loss_at() > run.facts["best"] + 0.05:
                notes.append(f"{group.label}, seed {run.seed}: best {run.facts['best']:.5g} after "
                             f"{run.facts['best_step']:g} steps")
        if note := other_sources(group):
            notes.append(note)
    return notes


def what_differs(one, run):
    """"equations" or "source", by their hashes, if two runs have others, or ""."""
    for name in ("equations", "source"):
        before, now = one.flags.get(name), run.flags.get(name)
        if before and now and before != now:           # older tables have no hash of the source
            return name
    return ""


def other_sources(group):
    """A line if some runs of a group have another source than its first run, or ""."""
    one = group.runs[0]
    others = [run for run in group.runs if what_differs(one, run)]
    if not others:
        return ""
    seeds, change = ", ".join(run.seed for run in others), ""
    before, after = one.source, others[0].source
    if before and after:
        changes = [shown_change(before.get(path, []), after.get(path, []))
                   for path in sorted({*before, *after})]
        change = next((f": {line}" for line in changes if line), "")
    return f"{group.label}: seed {seeds} ran other source than seed {one.seed}{change}"


def differences(first, other, by=None):
    """Lines: the flags, but for `by`, and the source in which a group differs from the first."""
    lines = []
    for name in {**first.flags, **other.flags}:
        a, b = first.flags.get(name, ""), other.flags.get(name, "")
        if a != b and name not in (*NOT_COMPARED, by):
            lines.append(f"  {name} {a or '-'} | {b or '-'}")
    a, b = first.runs[0].source, other.runs[0].source
    if not a or not b:
        what = what_differs(first.runs[0], other.runs[0])
        if what and first.flags["model"] == other.flags["model"]:
            lines.append(f"  other {what}; a table has no source: name the folders")
        return lines
    paths = sorted({*a} | {*b})
    if not {*first.flags["classes"].split()} & {*other.flags["classes"].split()}:
        # Nothing of the one model is in the other: a diff would be both files.
        lines.append("  other classes: " + other.flags["classes"])
        paths = [path for path in paths if not is_of_models(path)]
    left = MOST_LINES
    for path in paths:
        changed = changed_lines(a.get(path, []), b.get(path, []), left)
        if changed:
            lines += [f"  {path}", *(f"    {line}" for line in changed)]
            left = max(left - len(changed), 0)
    if a == b and what_differs(first.runs[0], other.runs[0]):
        lines.append("  other equations from the same source: it computed another value at import, "
                     "or something was replaced at run time")
    return lines


# --------------------------------------------------------------------------------------- figures

def smoothed(x, window):
    """Means of up to `window` neighbours, fewer at both ends; a short x stays as it is. (n,)

    Row i takes at most i // 2 rows from each side: a loss falls steeply at first, and its first
    value, in the mean of a later row, would lift the curve there.
    """
    if len(x) < 3 * window:
        return x
    reach = np.minimum(np.arange(len(x)), window) // 2
    return np.array([x[i - n : i + n + 1].mean() for i, n in enumerate(reach)])


def mean_curve(runs, column, window):
    """(steps, mean, deviation) over the runs' curves, at the steps that all have logged."""
    curves = [dict(zip(run.curve[0], run.curve[column])) for run in runs]
    steps = sorted(set.intersection(*map(set, curves)))
    values = np.array([smoothed(np.array([c[n] for n in steps]), window) for c in curves])
    return np.array(steps), values.mean(0), values.std(0, ddof=1) if len(curves) > 1 else None


def draw_curves(plt, groups, window, path):
    """Losses above, with the validation losses as points; gradient norms below."""
    fig, axes = plt.subplots(2, 1, figsize=(WIDTH, 7.5), sharex=True, layout="constrained")
    tops, lows = [], []
    for n, group in enumerate(groups):
        runs = [run for run in group.runs if run.curve and len(run.curve[0])]
        if group.reason or not runs:
            continue
        style = {name: x for name, x in look(n).items() if name != "marker"}
        label = f"{group.label}, {count_of(len(runs), 'seed')}"
        for ax, column in zip(axes, (1, 2)):
            step, mean, std = mean_curve(runs, column, window)
            marker = "." if len(step) < 2 else ""
            plot_with_band(ax, step, mean, std, marker=marker, label=label, **style)
            if column == 1:
                tops.append(mean[len(mean) // 20])     # not where it falls steeply
                lows.append((mean - (0 if std is None else std)).min())
        shared = set.intersection(*(set(run.losses) for run in runs))
        points = [(s, statistics.mean(run.losses[s] for run in runs)) for s in sorted(shared)]
        if points:
            axes[0].plot(*zip(*points), ls="", marker=look(n)["marker"], ms=5, mec="black", mew=0.5,
                         color=style["color"])
            lows.append(min(loss for _, loss in points))
    if tops:
        span = max(tops) - min(lows)
        axes[0].set_ylim(min(lows) - 0.05 * span, max(tops) + 0.1 * span)
    axes[0].set_ylabel("training loss (nats per token);\npoints: validation")
    axes[1].set(xlabel=f"optimizer step; long curves are means of about {window} rows of the log",
                ylabel="gradient norm before clipping", yscale="log")
    legend_below(fig, axes[0])
    save_figure(fig, path)


def draw_by(plt, groups, flag, step, path):
    """The loss after `step` against a flag, a curve a group; diverged runs are hollow on top."""
    groups = [group for group in groups if not group.reason]
    fig, ax = plt.subplots(figsize=(WIDTH, 5), layout="constrained")
    values = sorted({run.flags[flag] for group in groups for run in group.runs}, key=order)
    numbers = [order(x)[1] for x in values]
    is_log = all(order(x)[0] == 0 for x in values) and min(numbers) > 0 and (
        max(numbers) > 5 * min(numbers))
    place = dict(zip(values, np.log2(numbers) if is_log else range(len(values))))
    for n, group in enumerate(groups):
        found = {}
        for run in group.runs:
            found.setdefault(place[run.flags[flag]], []).append(run.loss_at(step))
        points = {x: mean_and_std(losses) for x, losses in sorted(found.items())}
        means, stds, _ = (np.array(y, dtype=float) for y in zip(*points.values()))
        seeds = count_of(max(map(len, found.values())), "seed")
        ax.errorbar([*points], means, yerr=np.nan_to_num(stds), capsize=3, lw=1.5, ms=5,
                    label=f"{group.label}, {seeds}", **look(n))
        bad = [x for x, losses in found.items() if any(map(math.isnan, losses))]
        ax.plot(bad, [1.03 + 0.05 * n] * len(bad), transform=ax.get_xaxis_transform(), ms=7,
                mew=1.5, clip_on=False, in_layout=False, **look(n) | {"ls": "", "mfc": "none"})
    if any(run.end == "diverged" for group in groups for run in group.runs):
        ax.plot([], [], "o", color="black", ms=7, mew=1.5, mfc="none",
                label="hollow, on top: a diverged seed, not in the mean")
        # The strip above the axis does not show a loss: a line closes it off.
        ax.set_title(" ", fontsize=7 + 8 * len(groups))
        ax.spines.top.set_visible(True)
    exact = [f"$2^{{{x:g}}}$" if float(x).is_integer() else text for text, x in place.items()]
    ax.set_xticks([*place.values()], exact if is_log else values)
    name = "learning rate" if flag == "lr" else flag.replace("_", " ")
    ax.set(xlabel=name, ylabel="validation loss (nats per token)")
    legend_below(fig, ax)
    save_figure(fig, path)


def index_of(group, sets):
    """Which of some groups has the runs of another one."""
    return next(n for n, other in enumerate(sets) if group.runs[0] in other.runs)


def order(text):
    """For sorting the values of a flag: numbers first."""
    try:
        return 0, float(text), ""
    except ValueError:
        return 1, 0.0, text


def draw_changes(plt, groups, rows, step, path):
    """The change of the loss by each group, with its deviation. rows: of COLUMNS."""
    rows = [dict(zip(COLUMNS, row)) for row in rows]
    fig, ax = plt.subplots(figsize=(WIDTH, 1.2 + 0.4 * len(rows)), layout="constrained")
    changes = [float(row["change"]) for row in rows]
    changes[0] = 0.0
    ax.errorbar(changes, range(len(rows)), xerr=np.nan_to_num([row["change_std"] for row in rows]),
                ls="none", marker="o", ms=6, capsize=4, color=look(0)["color"])
    ax.axvline(0, color="gray", lw=0.8, zorder=0)
    for y, (group, change) in enumerate(zip(groups, changes)):
        if math.isnan(change):
            why = why_no_change(group, groups[0].runs, step)
            ax.annotate(why, (0, y), (6, 0), textcoords="offset points", va="center")
    names = [f"{row['run']}, {count_of(row['seeds'], 'seed')}" for row in rows]
    ax.set_yticks(range(len(rows)), names)
    ax.invert_yaxis()
    ax.set_xlabel(f"validation loss minus that of {groups[0].label} (nats per token)")
    save_figure(fig, path)


# ---------------------------------------------------------------------------------------- command

def main():
    p = runs_parser(__doc__)
    p.add_argument("--by", metavar="FLAG", help="draw the last loss against this flag of train.py")
    p.add_argument("--window", type=int, default=10, help="rows of the log to average over [10]")
    p.add_argument("--name", help="name of the figure, and of a table with a row for each run "
                   "[compare.png, no table]")
    args = p.parse_args()
    if args.window < 2:
        raise UsageError(f"--window {args.window}: use at least 2")
    runs = read_runs(args.runs, args.window)
    by = args.by and args.by.removeprefix("--").replace("-", "_")
    if by and not all(by in run.flags for run in runs):
        raise UsageError(f"--by {args.by} is not a flag of these runs")
    groups = make_groups(runs)
    step = common_step(groups)
    # With --by, groups that differ in nothing else are one.
    sets = make_groups(runs, by) if by else groups
    if by:
        groups.sort(key=lambda group: (index_of(group, sets), order(group.flags[by])))
    rows = rows_of(groups, sets[0].runs, step, by)
    known = [n for n in range(len(COLUMNS)) if any(cell_text(row[n]) != "-" for row in rows)]
    title = "Validation loss, nats per token"
    if COLUMNS.index("change") in known:
        title += f"; change: against {sets[0].label}, by seed" + f" and {by}" * bool(by)
    print_table([COLUMNS[n] for n in known], [[row[n] for n in known] for row in rows],
                title)
    for note in notes_of(groups, sets[0].runs, step, by):
        print(note)

    for other in sets[1:]:
        if lines := differences(sets[0], other, by):
            print("\n".join([f"\n{sets[0].label} | {other.label}", *lines]))

    if args.name:
        ordered = [run for group in groups for run in group.runs]
        keep_runs(args.out / f"{args.name}.tsv", ordered, step)
    has_curves = any(run.curve and len(run.curve[0]) for run in runs)
    if (by or has_curves or len(groups) > 1) and (plt := pyplot()):
        path = args.out / f"{args.name or 'compare'}.png"
        if by:
            draw_by(plt, sets, by, step, path)
        elif has_curves:
            draw_curves(plt, groups, args.window, path)
        else:
            draw_changes(plt, groups, rows, step, path)


if __name__ == "__main__":
    cli(main)
