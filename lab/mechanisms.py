"""Compare twelve attention mechanisms, by the weights they give and by how well their models do.

    python -m lab.mechanisms

This trains nothing. Each mechanism of lab/baselines/attention.py is given the same scores, once
among 64 keys and once among 1,024, and the weights that it gives to the keys are printed and drawn;
lab/weights.py has the details. --names chooses the mechanisms, which may be your own, as
FILE.CLASS.

    python -m lab.mechanisms 'out/softmax-*' mine='out/mine-*' --out out/mechanisms.png

This compares runs of train.py on text and on abcdigits. It reads what is in each run's folder: the
log.tsv of train.py, the perplexity.tsv of `python -m lab.perplexity`, and the abcdigits.tsv of
abcdigits.py. Runs of the same model, or with the same label, share a row of the table, which has
their means over the seeds. What was measured with --swe, or with the best --rope-scale, has a row
of its own. Measurements count only if they were made with the weights that the run has now. All
runs must have been measured on the same documents, or at the same depths and digits. If some were
measured in other ways as well, choose what to compare, as in --only data=books digits=6. Notes
below the table say which runs differ.

The numbers are also written to out/mechanisms.tsv, with a row for each run and measurement. You can
pass this table in place of the runs, alone or beside others, to draw it again.
"""
import statistics
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from lab.common import figure_path, keep_rows, pyplot, save_figure
from lab.compare import differences_inside, notes_on_run, why_not
from lab.logs import median, read_run
from lab.perplexity import KEYS, get_curves, hash_in, with_one_path
from lab.retrieval import CELL, get_cells, mean_by_length
from lab.style import COLORS, WIDTH, labels_of, legend_below, plain_axis
from lab.weights import TITLES, show_weights
from support.cli import Parser, UsageError, cli
from support.data import STREAMS
from support.measure import RUN, named_paths, print_table, read_rows, run_of

# "length" is that of "perplexity" and "needles"; "setting" is of SETTINGS.
COLUMNS = ("model", "parameters", "seed", "task", "lr", "step", "what", "length", "setting",
           "value")
SETTINGS = {"": "as trained", "SWE": "with SWE", "RoPE": "with the best RoPE scaling"}
# What a table shows: the title of its panel in the figure, and the format of a mean.
KINDS = {"loss": ("loss on text\n(less is better)", ".4f"),
         "perplexity": ("perplexity at\n{:,} / at 64", ".2f"),
         "needles": ("answers found\nat {:,} (%)", ".1f"),
         "ms": ("", ".0f")}


# ------------------------------------------------------------------------- what runs have measured

def rows_of(run, folder, label, only):
    """The rows of a run of train.py and of what was measured with it, dicts of text by COLUMNS.

    Those of a measurement have one more cell, "on": what it was measured on. only: of `parse_only`.
    """
    data, step = run.flags["data"], last_step(run)
    cells = {"model": name_of_model(run.flags, label), "parameters": run.flags["parameters"],
             "seed": run.seed, "task": data if data in STREAMS else "text", "lr": run.flags["lr"],
             "step": step}
    if data in STREAMS:
        digits = run.curves["needle"][1]
        found = [("needle digits", digits[-1])] if len(digits) else []
        others = measured(run, folder / "abcdigits.tsv", "needles", only)
    else:
        found = [("loss", run.loss_at()), ("ms", median(run.curves["ms"][1]))]
        others = measured(run, folder / "perplexity.tsv", "perplexity", only)
    rows = [{"what": what, "length": "", "setting": "", "value": x} for what, x in found] + others
    return [cells | row | {"value": f"{row['value']:.6g}"} for row in rows]


def name_of_model(flags, label):
    """The name of a run's model, with its label."""
    return f"{flags['model'].partition(':')[0]}={label}" if label else flags["model"]


def current(rows):
    """The rows of each run that were measured with its last hash."""
    last = {run_of(row): row["hash"] for row in rows}
    return [row for row in rows if row["hash"] == last[run_of(row)]]


def last_step(run):
    """The step of a run's last evaluation, as text."""
    steps = [*run.curves["val_loss"][0], *run.curves["needle"][0]]
    return str(int(max(steps, default=0)))


def measured(run, path, what, only):
    """Cells of the rows of a table in a run's folder: step, what, length, setting, value and on.

    No RoPE factor is a factor of 1; the setting RoPE has the rows of all factors. Raises UsageError
    if the run was measured on several texts, or with several numbers of digits.
    """
    summary, constant, unit = MEASURED[what]
    rows = current(read_rows(path)) if path.exists() else []
    if not path.with_name("ckpt.pt").exists():
        known = run.flags | {"step": last_step(run)}
        rows = [row for row in rows if all(row[name] == known[name] for name in OF_RUN)]
    rows = [row | {"factor": row["factor"] or "1"} for row in rows
            if all(row[name] in values for name, values in only.items() if name in row)]
    rows = with_one_path(rows) if what == "perplexity" else rows
    for name in constant:
        if len(values := dict.fromkeys(row[name] for row in rows)) > 1:
            raise UsageError(f"{path} was measured with {name} {' | '.join(values)}: choose, as "
                             f"in --only '{name}={[*values][-1]}'")

    plain = [row for row in rows if not row["swe"]]
    groups = {"": [row for row in plain if row["factor"] == "1"],
              "SWE": [row for row in rows if row["swe"]],
              "RoPE": plain if any(row["factor"] != "1" for row in plain) else []}
    return [{"step": rows[-1]["step"], "what": what, "length": str(length), "setting": setting,
             "value": x, "on": {basis_of(used, factor, constant, unit)
                                for factor in {row["factor"] for row in used}}}
            for setting, some in groups.items() if some
            for length, (x, used) in summary(some).items()]


def basis_of(rows, factor, constant, unit):
    """(what runs must have in common, in words): of the rows with a RoPE factor."""
    units = sorted({row[unit] for row in rows if row["factor"] == factor})
    settings = [(name, rows[0][name]) for name in constant]
    words = [f"{name} {x}" for name, x in settings] + [f"{unit}s {' '.join(units)}"]
    # A text is the same under any name.
    same = sorted(map(hash_in, units)) + [x for name, x in settings if name != "data"]
    return tuple(same), ", ".join(words) if len(units) < 9 else f"{words[0]}, {len(units)} {unit}s"


def perplexities(rows):
    """{64: (x, rows), L: (x, rows)}: at the longest length L, with the RoPE factor best there."""
    length = max(int(row["length"]) for row in rows)
    used = [row for row in rows if int(row["length"]) == length]
    best = min(get_curves(used), key=lambda curve: curve.mean[-1])
    return {n: (best.mean[best.x.index(n)], used) for n in (64, length) if length > 64}


def needles(rows):
    """{length: (share of answers found, rows)}: means over the depths, in each cell the best."""
    shares = mean_by_length(get_cells(rows))
    return {length: (statistics.mean(shares[length].values()),
                     [row for row in rows if int(row["length"]) == length]) for length in shares}


# Of a measurement: its summary, columns that have one value in a run, and what it is a mean over.
MEASURED = {"perplexity": (perplexities, ("data", "window"), "document"),
            "needles": (needles, ("digits",), "depth")}
# Columns of RUN that flags.txt has, and step.
OF_RUN = [name for name in RUN if name != "parameters"]


def parse_only(words):
    """{column: its values} of --only."""
    only = {}
    for word in words:
        name, _, value = word.partition("=")
        if name not in ("digits", *KEYS[len(RUN):], *CELL) or not value:
            raise UsageError(f"--only {word}: expected a column of perplexity.tsv or abcdigits.tsv "
                             "and a value, as in data=books, digits=6, depth=0.5")
        only.setdefault(name, []).append(value)
    return only


def gather(words, only=()):
    """(the rows of runs and tables, {(model, parameters, task): its Runs}).

    Raises UsageError if two of them have the same run, or were measured on different things.
    """
    places, known, rows, runs = {}, {}, [], {}
    only = parse_only(only)
    for label, name in dict.fromkeys(named_paths(words)):
        if name.endswith(".tsv"):
            found = read_rows(name)
        else:
            run = read_run(name)
            found = rows_of(run, Path(name), label, only)
        for row in found:
            measured_on = row.pop("on", ())
            if tuple(row) != COLUMNS:
                raise UsageError(f"{name} is not a table of this command: name runs' folders")
            # That at 64 is no column: it divides the others of its run.
            column = row["what"], row["length"], name * (row["length"] == "64")
            for on, said in measured_on:
                first, first_said, place = known.setdefault(column, (on, said, name))
                if on != first:
                    raise UsageError(f"{' '.join(column[:2])} is of {first_said} in {place}, of "
                                     f"{said} in {name}: measure both alike, or choose with "
                                     "--only")
            of_run = row["model"], row["task"], row["seed"]
            if places.setdefault(of_run, name) != name:
                raise UsageError(f"{places[of_run]} and {name} are both {', '.join(of_run)}: label "
                                 f"one, as in mine={name}")
            rows.append(row)
        if found and not name.endswith(".tsv"):
            row = found[0]
            group = runs.setdefault((row["model"], row["parameters"], row["task"]), [run])
            if reason := why_not(group[0], run):
                raise UsageError(f"{name} would share a row with a run that it does not compare "
                                 f"with ({reason}): label it, as in mine={name}")
            group += [run] * (group[0] is not run)
    return rows, runs


def notes_on(rows, runs):
    """Lines: which numbers are of other steps, how runs ended, and in what those of a row differ.

    rows, runs: of `gather`
    """
    labels, last = labels_of(rows), {}
    for row in rows:
        if row["length"] == "":
            last[row["model"], row["parameters"], row["seed"], row["task"]] = row["step"]
    ends = Counter(step for (*_, task), step in last.items() if task == "text")
    usual = max(ends, key=lambda step: (ends[step], int(step)), default=None)
    for (*model, seed, task), step in last.items():
        if task == "text" and step != usual:
            yield f"{labels[tuple(model)]}, seed {seed}: its loss is that after {step} steps"
    others = dict.fromkeys((row["model"], row["parameters"], row["seed"], row["what"], row["step"])
                           for row in rows if row["length"] and row["step"] != last.get(
                               (row["model"], row["parameters"], row["seed"], row["task"])))
    for *model, seed, what, step in others:
        yield f"{labels[tuple(model)]}, seed {seed}: its {what} was measured after {step} steps"
    n_runs = Counter((*model, task) for (*model, _, task) in last)
    n_measured = Counter((row["model"], row["parameters"], row["task"], row["what"], row["length"])
                         for row in rows if row["length"] not in ("", "64") and not row["setting"])
    for (*model, task, what, length), n in n_measured.items():
        if n < n_runs[*model, task]:
            yield (f"{labels[tuple(model)]}: {what} {length} is of {n} of its "
                   f"{n_runs[*model, task]} seeds")

    firsts, groups = {}, {}
    for (*model, task), group in runs.items():
        label = labels[tuple(model)]
        groups[f"{label}, {task}"] = group
        if reason := why_not(firsts.setdefault(task, group[0]), group[0]):
            yield f"{label} does not compare with the first row: {reason}"
        for run in group:
            yield from (f"{label}{note}" for note in notes_on_run(run))
    yield from differences_inside(groups)


# ----------------------------------------------------------------------- the table and the figure

class Line(NamedTuple):
    """A model in a setting. values: {(what, length): one for each seed}"""
    name: str
    parameters: str
    setting: str
    values: dict

    def learned(self):
        """For each seed whether it guessed most digits of the needles in validation."""
        return [share > 0.5 for share in self.values.get(("needle digits", ""), [])]


def get_lines(rows):
    """The Lines of rows, those of a model together.

    Perplexity is divided by that at 64 as trained; answers are in percent.
    """
    def run(row):
        return row["model"], row["parameters"], row["seed"]

    at_64 = {run(row): float(row["value"]) for row in rows
             if (row["what"], row["length"], row["setting"]) == ("perplexity", "64", "")}
    labels = labels_of(rows)
    lines = {(key, setting): Line(label, key[1], setting, {})
             for key, label in labels.items() for setting in SETTINGS}
    for row in rows:
        what, length, x = row["what"], row["length"], float(row["value"])
        if what == "perplexity":
            if length == "64" or run(row) not in at_64:
                continue
            x /= at_64[run(row)]
        elif what == "needles":
            x *= 100
        line = lines[(row["model"], row["parameters"]), row["setting"]]
        line.values.setdefault((what, length and int(length)), []).append(x)
    return [line for line in lines.values() if line.values]


def columns_of(lines):
    """What the lines have measured of KINDS, in its order and by length: [(what, length)]"""
    found = {column for line in lines for column in line.values if column[0] in KINDS}
    return sorted(found, key=lambda column: ([*KINDS].index(column[0]), column[1]))


def print_results(lines, columns):
    """A row for each model and setting: means over the seeds."""
    rows = []
    for line in lines:
        means = {column: format(statistics.mean(values), KINDS[column[0]][1])
                 for column, values in line.values.items() if column in columns}
        seeds, learned = len(line.values.get(("loss", ""), [])), line.learned()
        rows.append([line.name, SETTINGS[line.setting], seeds or None, *map(means.get, columns),
                     f"{sum(learned)} of {len(learned)}" if learned else None, line.parameters])
    heads = [f"{what} {length}".strip() for what, length in columns]
    print_table(["model", "", "seeds", *heads, "learned", "parameters"], rows,
                "Means over the seeds. seeds, loss, ms of a step: of runs on text; perplexity N: "
                "at N tokens over that at 64;\nneedles N: answers found at N tokens (%); learned: "
                "runs that guess most digits of needles in validation")


def draw_results(plt, lines, columns, path):
    """A panel for each column: a row for each model, its mean, and small marks for its seeds."""
    names = [*dict.fromkeys(line.name for line in lines)]
    looks = dict(zip(SETTINGS, ({"color": COLORS[0], "marker": "o"},
                                {"color": COLORS[1], "marker": "^", "mfc": "white"},
                                {"color": COLORS[2], "marker": "s", "mfc": "white"})))
    columns = [column for column in columns if KINDS[column[0]][0]]
    fig, axes = plt.subplots(1, len(columns), figsize=(WIDTH, 0.3 * len(names) + 1.6), sharey=True,
                             squeeze=False, layout="constrained")
    for ax, (what, length) in zip(axes[0], columns):
        for line in lines:
            x = line.values.get((what, length), [])
            y, look = names.index(line.name), looks[line.setting]
            if x:
                ax.plot(x, [y] * len(x), ls="", ms=3, alpha=0.5, clip_on=False, **look)
                ax.plot(statistics.mean(x), y, ls="", ms=7, clip_on=False, **look)
            if what == "needles" and line.learned() and not any(line.learned()):
                ax.text(95, y, "no lookup", ha="right", va="center", fontsize=8, color="0.3")
        ax.set_title(KINDS[what][0].format(length))
        ax.set_ylim(len(names) - 0.5, -0.5)            # the first one on top
        ax.grid(axis="y", color="0.9")
        if what == "needles":
            ax.set_xlim(0, 100)
        elif what == "perplexity":
            ax.set(xscale="log", xlim=(min(1, ax.get_xlim()[0]), None))
            plain_axis(plt, ax.xaxis)
    axes[0, 0].set_yticks(range(len(names)), names)
    for setting, look in looks.items():
        if any(line.setting == setting for line in lines):
            label = SETTINGS[setting] + " (small: one seed)" * (not setting)
            axes[0, 0].plot([], [], ls="", ms=7, label=label, **look)
    legend_below(fig, 3)
    save_figure(fig, path)


def main():
    p = Parser(__doc__)
    p.add_argument("runs", nargs="*", metavar="RUN", help="folders that train.py has written, "
                   "label=folder, or tables that this command has written")
    p.add_argument("--names", nargs="+", help="draw the weights of these mechanisms: softmax, "
                   "names in lab/baselines/attention.py, or FILE.CLASS of yours [the twelve]")
    p.add_argument("--only", nargs="+", default=[], metavar="NAME=VALUE", help="if runs were "
                   "measured in several ways, use only these rows: data=books digits=6 depth=0.5")
    p.add_argument("--out", type=figure_path, help="the figure to write, a .png; the rows of runs "
                   "go beside it as .tsv [out/mechanism_weights.png; for runs, out/mechanisms.png]")
    args = p.parse_args()
    if args.runs and args.names:
        raise UsageError("--names is for the figure of weights: leave it out, or the runs")
    if not args.runs:
        return show_weights(args.names or [*TITLES], args.out or Path("out/mechanism_weights.png"))

    out = args.out or Path("out/mechanisms.png")
    rows, runs = gather(args.runs, args.only)
    lines = get_lines(rows)
    columns = columns_of(lines)
    keep_rows(out.with_suffix(".tsv"), rows, ("step", "value"))
    print_results(lines, columns)
    for line in notes_on(rows, runs):
        print(line)
    if columns and (plt := pyplot()):
        draw_results(plt, lines, columns, out)


if __name__ == "__main__":
    cli(main)
