"""Which run is better, by how much, and what differs between them?

    python -m experiments.compare out my=out-edit
    python -m experiments.compare out/idea/*
    python -m experiments.compare 'Ours=out/m_lr*' 'Theirs=out/t_lr*' --by lr

A run is a folder of train.py, or a table that this command wrote. A word before = is its label; a
pattern in quotes names several runs. Without a label a run is called like its folder, without the
seed at the end. Runs that differ only in their seed are a group.

The table has a row a group: the mean validation loss and its deviation over the seeds; the change
against the first group, the mean over the seeds that both have, for runs of one seed see equal data
in equal order; the share of pairs inside the windows that are alive; the largest window; spikes,
the rows of the log whose loss is more than 5 deviations above the --window rows before it; grad,
the median gradient norm of the second half. Tokens per second say something only if the runs were
alone on one machine.

Then come the differences: flags, as `first | other`, and the lines of source. Runs with other steps
are compared after the last evaluation that all have. Runs on other data, with another tokenizer or
sequence length are listed without a change. A run has diverged if train.py stopped it, or if its
last loss is more than half a nat above its first one, or above the least mean over an eighth of its
log.

With matplotlib --out gets a figure: losses and gradient norms by step, means over the seeds and a
band of one deviation; or with --by the losses by the value of a flag. --name keeps the runs in a
table, too, which this command reads.
"""
import glob
import math
import re
import statistics
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from experiments.common import (
    mean_and_std,
    paired_change,
    pyplot,
    read_run,
    runs_parser,
    save_figure,
    signed,
)
from experiments.style import WIDTH, count_of, legend_below, look
from support.cli import UsageError, cli
from support.source import bare_lines, changed_lines, parts_of
from support.table import keep_rows, print_table, read_file

# Lines of flags.txt in which the runs of one group may differ, or that are shown in another way.
NOT_COMPARED = ("seed", "log_every", "eval_every", "save_every", "parameters", "equations",
                "classes", "corpus")
SHARED = ("corpus", "data", "digits", "tokenizer", "seq_len")      # else losses do not compare
MEASURED = ("end", "step", "val_loss", "tokens_per_s", "alive", "w_max", "spikes", "grad")
COLUMNS = ["run", "seeds", "parameters", "val_loss", "std", "change", "change_std", "tokens_per_s",
           "alive", "w_max", "spikes", "grad"]
MOST_LINES = 20


@dataclass
class Run:
    """flags: text by name; losses: {step: validation loss}; facts: of MEASURED, or NaN.

    end: "", "diverged", or where a run is that goes on or has learned.
    curve: arrays step, loss, gradient norm, or None.
    source: {path: lines}, or None where only the hash of the equations is known.
    """
    label: str
    named_by: str                                      # "label", "seed": name-SEED, or "folder"
    flags: dict
    losses: dict
    facts: dict
    end: str = ""
    curve: tuple = None
    source: dict = None

    @property
    def seed(self):
        return self.flags["seed"]

    def loss_at(self, step):
        """The validation loss after so many steps; without such an evaluation the last one."""
        if self.end == "diverged" or not self.losses:
            return math.nan
        return self.losses.get(step, self.losses[max(self.losses)])


@dataclass
class Group:
    """Runs that differ only in their seed. reason: why its loss is not compared, or ""."""
    label: str
    runs: list = field(default_factory=list)
    reason: str = ""

    @property
    def flags(self):
        return self.runs[0].flags


# ---------------------------------------------------------------------------------- reading runs

def read_all(words, window):
    """The Runs that the words of the command line name."""
    runs = []
    for word in words:
        label, found, path = word.partition("=")
        if not found or Path(word).exists():
            label, path = "", word
        for each in sorted(glob.glob(path)) or [path]:
            is_table = each.endswith(".tsv")
            runs += read_table(each, label) if is_table else [read_folder(each, label, window)]
    return runs


def read_folder(path, label, window):
    """The Run in a folder of train.py."""
    run = read_run(path)
    name, seed = run.folder.resolve().name, f"-{run.flags['seed']}"
    steps = int(max((row["step"] for row in run.rows), default=0))
    end = "diverged" if math.isnan(run.loss) and run.rows else ""
    if not end and steps < int(run.flags["steps"]):
        most = "at most " * (run.flags["data"] in ("abcdigits", "passkey"))
        end = f"at step {steps} of {most}{run.flags['steps']}"
    curve = columns_of(run.rows, "step", "loss", "grad_norm")

    def last(column):
        return [row[column] for row in run.rows if column in row][-1:] or [math.nan]

    speeds = [row["tokens_per_s"] for row in run.rows if "tokens_per_s" in row] or [math.nan]
    step, loss, norm = curve
    late = norm[step > steps / 2]
    facts = {"tokens_per_s": statistics.median(speeds), "alive": last("alive")[0],
             "w_max": last("w_max")[0], "spikes": count_spikes(loss, window),
             "grad": float(np.median(late)) if len(late) else math.nan}
    losses = {int(row["step"]): row["val_loss"] for row in run.rows if "val_loss" in row}
    named_by = "label" if label else "seed" if name.endswith(seed) else "folder"
    return Run(label or name.removesuffix(seed), named_by, run.flags, losses, facts, end, curve,
               read_source(run.folder / "source", run.flags["classes"].split()))


def read_source(folder, classes):
    """{path: lines} of what a run is made of: of a model's files, the definitions it reaches."""
    files = [path for path in sorted(folder.rglob("*.py")) if path.is_file()]
    text = {path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8")
            for path in files}
    parts = parts_of(text, classes)
    # What a new class imports is no news.
    parts = {path: [line for line in lines if not re.fullmatch(r"\w+ is [\w.]+", line)]
             for path, lines in parts.items()}
    return {path: parts.get(path) or bare_lines(text[path]) for path in text
            if path in parts or not is_of_models(path)}


def is_of_models(path):
    return path == "multiscreen.py" or path.startswith("baselines/")


def read_table(path, label):
    """The Runs of a table that this command wrote."""
    rows, _ = read_file(path)
    if not rows or [*rows[0]][:2] != ["run", "named_by"] or not {*MEASURED} <= rows[0].keys():
        raise UsageError(f"{path} is not a table of experiments.compare")
    runs = []
    for row in rows:
        try:
            numbers = {name: float(row[name] or "nan") for name in MEASURED[2:]}
            losses = {int(row["step"]): numbers.pop("val_loss")}
        except ValueError as e:
            raise UsageError(f"{path}: {e}") from None
        flags = {name: x for name, x in row.items() if name not in ("run", "named_by", *MEASURED)}
        runs.append(Run(label or row["run"], "label" if label else row["named_by"], flags, losses,
                        numbers, row["end"]))
    return runs


def columns_of(rows, *names):
    """Arrays (n,) of the rows of a log that have all of these columns."""
    rows = [row for row in rows if set(names) <= row.keys()]
    return tuple(np.array([row[name] for row in rows]) for name in names)


def count_spikes(x, window):
    """How many of x, (n,), lie more than 5 deviations above the mean of the `window` before."""
    if len(x) <= window:
        return 0
    before = np.lib.stride_tricks.sliding_window_view(x, window)[:-1]
    return int((x[window:] > before.mean(-1) + 5 * before.std(-1)).sum())


# --------------------------------------------------------------------------------- groups of runs

def make_groups(runs, by=None):
    """Groups in the order of their first runs: flags agree, and the label or the name before -SEED.

    Folders with other names are a group if flags and source agree, and no seed comes twice. by: a
    flag in which the runs of a group may differ; then those of one source are a group.
    """
    groups = []
    for run in runs:
        label = run.flags["model"] if by and run.named_by != "label" else run.label
        for group in groups:
            first = group.runs[0]
            if compared(run.flags, by) != compared(first.flags, by):
                continue
            alike = run.source == first.source and run.named_by == first.named_by == "folder"
            new = run.seed not in [other.seed for other in group.runs]
            same = label == group.label and run.named_by != "folder"
            if by and run.named_by != "label":
                same = label == group.label and run.source == first.source
            if same or alike and new:
                group.runs.append(run)
                break
        else:
            groups.append(Group(label, [run]))
    for group in groups:
        seeds = [run.seed for run in group.runs]
        if not by and len(seeds) > len({*seeds}):
            raise UsageError(f"{group.label} has seed {statistics.mode(seeds)} twice: give the "
                             "runs labels, as in mine=out-mine")
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
            group.label = ", ".join([label, *(f"{name} {group.flags.get(name)}" for name in names)]
                                    if names else [label, str(n + 1)])


def why_not(first, other):
    """Why a loss does not compare with that of the first group, or ""."""
    for name in SHARED:
        if name == "digits" and first.get("data") != "abcdigits":
            continue
        a, b = first.get(name), other.get(name)
        if a != b and name != "data" or name == "data" and a != b and not first.get("corpus"):
            return "other texts" if name == "corpus" else f"{name} {a} | {b}"
    return ""


def common_step(groups):
    """The last step after which all compared runs that did not diverge were evaluated, or None."""
    steps = [set(run.losses) for group in groups if not group.reason for run in group.runs
             if run.end != "diverged"]
    return max(set.intersection(*steps), default=None) if steps else None


# ------------------------------------------------------------------------------------------- text

def rows_of(groups, step):
    """A row of COLUMNS for each group."""
    rows = []
    first = {run.seed: run.loss_at(step) for run in groups[0].runs}
    for group in groups:
        losses = {run.seed: run.loss_at(step) for run in group.runs}
        mean, std, _ = mean_and_std(losses.values())
        change, change_std = paired_change(losses, first)
        if group.reason or group is groups[0] or step is None:
            change = change_std = math.nan
        facts = [mean_and_std([run.facts[name] for run in group.runs])[0] for name in
                 ("tokens_per_s", "alive", "w_max", "spikes", "grad")]
        rows.append([group.label, len(losses), group.flags["parameters"], mean, std,
                     signed(change), change_std, round(facts[0]) if facts[0] == facts[0] else None,
                     *facts[1:]])
    return rows


def notes_of(groups, step):
    """Lines about what the table does not show."""
    ends = {max(run.losses) for group in groups if not group.reason for run in group.runs
            if run.losses and run.end != "diverged"}
    notes = []
    if step is None and len(groups) > 1:
        notes.append("no evaluation in common: each loss is the run's last, and none is compared")
    elif len(ends) > 1:
        notes.append(f"compared after {step} steps, the last evaluation that all runs have")
    for group in groups:
        if group.reason:
            notes.append(f"{group.label} is not compared: {group.reason}")
        for end in sorted({run.end for run in group.runs} - {""}):
            seeds = [run.seed for run in group.runs if run.end == end]
            notes.append(f"{group.label}, seed {', '.join(seeds)}: {end}")
        sources = {run.flags["equations"] for run in group.runs}
        texts = [run.source for run in group.runs if run.source]
        if len(sources) > 1 or any(text != texts[0] for text in texts):
            notes.append(f"{group.label}: its runs have different source")
    return notes


def differences(first, other):
    """Lines: the flags and the source in which a group differs from the first."""
    lines = []
    for name in {**first.flags, **other.flags}:
        a, b = first.flags.get(name, ""), other.flags.get(name, "")
        if a != b and name not in NOT_COMPARED:
            lines.append(f"  {name} {a or '-'} | {b or '-'}")
    a, b = first.runs[0].source, other.runs[0].source
    if not a or not b:
        if first.flags["equations"] != other.flags["equations"]:
            lines.append("  other equations; a table has no source: name the folders")
        return lines
    if not {*first.flags["classes"].split()} & {*other.flags["classes"].split()}:
        return [*lines, "  other classes: " + other.flags["classes"]]
    left = MOST_LINES
    for path in sorted({*a} | {*b}):
        changed = changed_lines(a.get(path, []), b.get(path, []), left)
        if changed and left:
            lines += [f"  {path}", *(f"    {line}" for line in changed)]
            left = max(left - len(changed), 0)
    return lines


# --------------------------------------------------------------------------------------- figures

def smoothed(x, window):
    """Means of up to `window` neighbours, fewer at both ends; a short x stays as it is. (n,)"""
    if len(x) < 3 * window:
        return x
    ones = np.ones(window)
    return np.convolve(x, ones, "same") / np.convolve(np.ones(len(x)), ones, "same")


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
            ax.plot(step, mean, lw=1.5, marker=marker, label=label, **style)
            if std is not None:
                ax.fill_between(step, mean - std, mean + std, color=style["color"], alpha=0.2, lw=0)
            if column == 1:
                tops.append(mean[0])
                lows.append(mean.min())
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
    axes[1].set(xlabel=f"optimizer step; curves are means of {window} rows of the log",
                ylabel="gradient norm before clipping", yscale="log")
    legend_below(fig, axes[0])
    save_figure(fig, path)


def draw_by(plt, groups, flag, path):
    """The last loss against a flag, a curve a group; runs that diverged are crosses on top."""
    fig, ax = plt.subplots(figsize=(WIDTH, 5), layout="constrained")
    values = sorted({run.flags[flag] for group in groups for run in group.runs}, key=order)
    numbers = [order(x)[1] for x in values]
    is_log = all(order(x)[0] == 0 for x in values) and min(numbers) > 0 and (
        max(numbers) > 5 * min(numbers))
    place = dict(zip(values, np.log2(numbers) if is_log else range(len(values))))
    for n, group in enumerate(groups):
        found = {}
        for run in group.runs:
            found.setdefault(place[run.flags[flag]], []).append(run.loss_at(None))
        points = {x: mean_and_std(losses) for x, losses in sorted(found.items())}
        means, stds, _ = (np.array(y, dtype=float) for y in zip(*points.values()))
        seeds = count_of(max(map(len, found.values())), "seed")
        ax.errorbar([*points], means, yerr=np.nan_to_num(stds), capsize=3, lw=1.5, ms=5,
                    label=f"{group.label}, {seeds}", **look(n))
        bad = [x for x, losses in found.items() if any(map(math.isnan, losses))]
        ax.plot(bad, [1.03 + 0.04 * n] * len(bad), "x", color=look(n)["color"], ms=7, mew=2,
                transform=ax.get_xaxis_transform(), clip_on=False, in_layout=False)
    ax.plot([], [], "x", color="black", ms=7, mew=2, label="a seed diverged: not in the mean")
    ax.set_title(" ", fontsize=7 + 8 * len(groups))
    ax.spines.top.set_visible(True)
    exact = [f"$2^{{{x:g}}}$" if float(x).is_integer() else text for text, x in place.items()]
    ax.set_xticks([*place.values()], exact if is_log else values)
    ax.set(xlabel=flag.replace("_", " "), ylabel="validation loss (nats per token)")
    legend_below(fig, ax)
    save_figure(fig, path)


def order(text):
    """For sorting the values of a flag: numbers first."""
    try:
        return 0, float(text), ""
    except ValueError:
        return 1, 0.0, text


# ---------------------------------------------------------------------------------------- command

def table_rows(groups, step):
    """A row a run, all text, with each flag that a run has."""
    names = {name: None for group in groups for run in group.runs for name in run.flags}
    rows = []
    for group in groups:
        for run in group.runs:
            at = step if step in run.losses else max(run.losses, default=0)
            facts = {**run.facts, "end": run.end, "step": at, "val_loss": run.loss_at(at)}
            shown = {name: f"{x:.6g}" if isinstance(x, float) else str(x)
                     for name, x in facts.items() if name == "val_loss" or x == x}
            shown = {name: shown.get(name, "") for name in MEASURED}
            rows.append({"run": run.label, "named_by": run.named_by}
                        | {name: run.flags.get(name, "") for name in names} | shown)
    return rows


def main():
    p = runs_parser(__doc__, "folders of train.py, label=folder, or tables of this command")
    p.add_argument("--by", metavar="FLAG", help="draw the last loss against this flag of train.py")
    p.add_argument("--window", type=int, default=10, help="rows of the log in a mean [10]")
    p.add_argument("--name", help="name of the figure, and of a table with a row a run [the figure "
                   "is compare.png, there is no table]")
    args = p.parse_args()
    if args.window < 2:
        raise UsageError(f"--window {args.window}: at least 2")
    runs = read_all(args.runs, args.window)
    by = args.by and args.by.removeprefix("--").replace("-", "_")
    if by and not all(by in run.flags for run in runs):
        raise UsageError(f"--by {args.by}: not a flag of these runs")
    groups = make_groups(runs)
    step = common_step(groups)
    print_table(COLUMNS, rows_of(groups, step), "Validation loss, nats per token; change: against "
                f"{groups[0].label}, by seed")
    for note in notes_of(groups, step):
        print(note)
    for group in groups[1:]:
        if lines := differences(groups[0], group):
            print("\n".join([f"\n{groups[0].label} | {group.label}", *lines]))
    if args.name:
        keep_rows(args.out / f"{args.name}.tsv", table_rows(groups, step))
    has_curves = any(run.curve and len(run.curve[0]) for run in runs)
    if (by or has_curves) and (plt := pyplot()):
        args.out.mkdir(parents=True, exist_ok=True)
        path = args.out / f"{args.name or 'compare'}.png"
        if by:
            draw_by(plt, make_groups(runs, by), by, path)
        else:
            draw_curves(plt, groups, args.window, path)


if __name__ == "__main__":
    cli(main)
