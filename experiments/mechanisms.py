"""Twelve ways to attend, compared: by the weights they give, and by what their runs have measured.

    python -m experiments.mechanisms

trains nothing. It prints and draws the weights that each mechanism of baselines/attention.py gives
the same scores, once among 64 keys and once among 1,024: see weights.py. --names chooses the
mechanisms, also your own in BLOCKS of baselines/__init__.py.

    python -m experiments.mechanisms 'out/softmax-*' mine='out/mine-*' --out out/mechanisms.png

compares runs of train.py on text and on abcdigits, each by what is in its folder: log.tsv,
perplexity.tsv of `python -m experiments.perplexity`, abcdigits.tsv of abcdigits.py. Runs of one
model, or of one label, share a row in the table, with means over the seeds, and have one more for
--swe or the best --rope-scale. The numbers go to out/mechanisms.tsv, a row for each run and
measurement. Name that table, alone or beside other runs, to draw it again.
"""
import statistics
from pathlib import Path
from typing import NamedTuple

from abcdigits import get_cells
from experiments.common import figure_path, pyplot, save_figure
from experiments.perplexity import get_curves
from experiments.retrieval import mean_by_length
from experiments.runs import median, read_run
from experiments.style import COLORS, WIDTH, labels_of, legend_below, plain_axis
from experiments.weights import TITLES, show_weights
from support.cli import Parser, UsageError, cli
from support.data import STREAMS
from support.table import (
    current,
    keep_rows,
    name_of_model,
    named_paths,
    print_table,
    read_rows,
    run_of,
)

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

def rows_of(folder, label=""):
    """The rows of a run of train.py and of what was measured with it, dicts of text by COLUMNS."""
    run, folder = read_run(folder), Path(folder)
    data = run.flags["data"]
    cells = {"model": name_of_model(run.flags, label), "parameters": run.flags["parameters"],
             "seed": run.seed, "task": data if data in STREAMS else "text", "lr": run.flags["lr"],
             "step": str(max(run.losses, default=0))}
    if data in STREAMS:
        digits = run.curves["needle"][1]
        found = [("needle digits", "", "", digits[-1])] if len(digits) else []
        found += measured(folder / "abcdigits.tsv", "needles", needles)
    else:
        found = [("loss", "", "", run.loss_at()), ("ms", "", "", median(run.curves["ms"][1])),
                 *measured(folder / "perplexity.tsv", "perplexity", perplexities)]
    return [cells | {"what": what, "length": str(length), "setting": setting, "value": f"{x:.6g}"}
            for what, length, setting, x in found]


def measured(path, what, summary):
    """[(what, length, setting, value)] of a table beside a checkpoint, as it was measured last.

    summary: a function of rows that gives {length: value}. No RoPE factor is a factor of 1; the
    setting RoPE has the rows of all factors.
    """
    rows = read_rows(path) if path.exists() else []
    rows = [row for row in current(rows) if run_of(row) == run_of(rows[-1])]
    plain = [row for row in rows if not row["swe"]]
    found = {"": [row for row in plain if row["factor"] in ("", "1")],
             "SWE": [row for row in rows if row["swe"]],
             "RoPE": plain if any(row["factor"] for row in plain) else []}
    return [(what, length, setting, x) for setting, rows in found.items() if rows
            for length, x in summary(rows).items()]


def perplexities(rows):
    """{64: x, L: y} at the longest length L, with the RoPE factor that is best at the end."""
    length = max(int(row["length"]) for row in rows)
    curves = get_curves([row for row in rows if int(row["length"]) == length])
    best = min(curves, key=lambda curve: curve.mean[-1])
    return {n: best.mean[best.x.index(n)] for n in (64, length) if length > 64}


def needles(rows):
    """{length: share of answers found}, means over the depths, in each cell the best."""
    return {length: statistics.mean(shares.values())
            for length, shares in mean_by_length(get_cells(rows)).items()}


def gather(words):
    """The rows of runs and tables. Raises UsageError if two of them have the same run."""
    places, rows = {}, []
    for label, name in dict.fromkeys(named_paths(words)):
        for row in read_rows(name) if name.endswith(".tsv") else rows_of(name, label):
            if tuple(row) != COLUMNS:
                raise UsageError(f"{name} is not a table of this command: name runs' folders")
            run = row["model"], row["task"], row["seed"]
            if places.setdefault(run, name) != name:
                raise UsageError(f"{places[run]} and {name} are both {', '.join(run)}: label one, "
                                 f"as in mine={name}")
            rows.append(row)
    return rows


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
    p.add_argument("runs", nargs="*", metavar="RUN", help="folders of train.py, label=folder, or "
                   "tables of this script")
    p.add_argument("--names", nargs="+", help="mechanisms whose weights are drawn: softmax, or a "
                   "name in BLOCKS of baselines/__init__.py [the twelve of baselines/attention.py]")
    p.add_argument("--out", type=figure_path, help="path of the figure, .png; the rows of runs go "
                   "beside it as .tsv [out/mechanism_weights.png; for runs, out/mechanisms.png]")
    args = p.parse_args()
    if args.runs and args.names:
        raise UsageError("--names is for the figure of weights: leave it out, or the runs")
    if not args.runs:
        return show_weights(args.names or [*TITLES], args.out or Path("out/mechanism_weights.png"))

    out = args.out or Path("out/mechanisms.png")
    rows = gather(args.runs)
    lines = get_lines(rows)
    columns = columns_of(lines)
    keep_rows(out.with_suffix(".tsv"), rows, ("step", "value"))
    print_results(lines, columns)
    if columns and (plt := pyplot()):
        draw_results(plt, lines, columns, out)


if __name__ == "__main__":
    cli(main)
