"""Twelve ways to attend, compared: by the weights they give, and by what their runs have measured.

    python -m experiments.mechanisms

trains nothing. It prints and draws the weights that each mechanism of baselines/attention.py gives
the same scores, once among 64 keys and once among 1,024: see weights.py. --names chooses the
mechanisms, also your own in BLOCKS of baselines/__init__.py.

    python -m experiments.mechanisms 'out/mechanisms/*' --out out/mechanisms.png

compares runs of train.py on text and on abcdigits, each by what is in its folder: log.tsv,
perplexity.tsv of `python -m experiments.perplexity`, abcdigits.tsv of abcdigits.py. A model has a
row in the table, with means over its seeds, and one more for --swe or the best --rope-scale. The
numbers go to out/mechanisms.tsv, a row for each run and measurement. Name that table, alone or
beside other runs, to draw it again.
"""
import math
import statistics
from pathlib import Path

from abcdigits import get_cells
from baselines import BLOCKS
from experiments.common import figure_path, pyplot, save_figure
from experiments.perplexity import positions
from experiments.retrieval import mean_by_length
from experiments.runs import median, read_run
from experiments.style import COLORS, WIDTH, legend_below, paper_name, plain_axis
from experiments.weights import TITLES, show_weights
from support.cli import Parser, UsageError, cli
from support.data import STREAMS
from support.table import current, keep_rows, named_paths, print_table, read_rows, run_of

# ------------------------------------------------------------------------- what runs have measured

COLUMNS = ("model", "task", "seed", "lr", "step", "what", "value")
# What is drawn: the title of a panel, and how a table shows a number.
KINDS = {"loss": ("loss on text\n(less is better)", ".4f"),
         "perplexity": ("perplexity at\n{:,} / at 64", ".2f"),
         "needles": ("answers found\nat {:,} (%)", ".1f")}
SETTINGS = {"": "as trained", "SWE": "with SWE", "RoPE": "with the best RoPE scaling"}


def rows_of(folder, label=""):
    """The rows of a run of train.py and of what was measured with it, dicts of text by COLUMNS."""
    run, folder = read_run(folder), Path(folder)
    values = {"parameters": int(run.flags["parameters"]), "ms": median(run.curves["ms"][1]),
              "loss": run.loss_at(), "needle digits": [math.nan, *run.curves["needle"][1]][-1],
              **measured(folder / "perplexity.tsv", perplexities),
              **measured(folder / "abcdigits.tsv", needles)}
    model, data = run.flags["model"], run.flags["data"]
    cells = {"model": f"{model.partition(':')[0]}={label}" if label else model,
             "task": data if data in STREAMS else "text", "seed": run.seed, "lr": run.flags["lr"],
             "step": str(max(run.losses, default=0))}
    return [cells | {"what": what, "value": f"{x:.6g}"} for what, x in values.items()
            if what == "loss" or not math.isnan(x)]


def measured(path, summary):
    """{what: value} of a table beside a checkpoint, as it was measured last, for each setting.

    "needles 256" is as trained, "needles 256 SWE" with SWE, "needles 256 RoPE" with the best of
    all factors.
    """
    rows = read_rows(path) if path.exists() else []
    rows = [row for row in current(rows) if run_of(row) == run_of(rows[-1])]
    plain = [row for row in rows if not row["swe"]]
    found = {"": [row for row in plain if row["factor"] in ("", "1")],
             "SWE": [row for row in rows if row["swe"]],
             "RoPE": plain if any(row["factor"] for row in plain) else []}
    return {f"{what} {setting}".strip(): x for setting, rows in found.items() if rows
            for what, x in summary(rows).items()}


def perplexities(rows):
    """{"perplexity 64": x, "perplexity 2048": y}: the longest length measured, if it is above 64.

    Means over the documents, with the RoPE factor that is best at the end.
    """
    length, factors = max(int(row["length"]) for row in rows), {}
    for row in rows:
        if int(row["length"]) == length:
            factors.setdefault(row["factor"], []).append([float(x) for x in row["nats"].split()])
    means = [[statistics.mean(x) for x in zip(*documents)] for documents in factors.values()]
    best = dict(zip(positions(length), min(means, key=lambda nats: nats[-1])))
    return {f"perplexity {n}": math.exp(best[n]) for n in (64, length) if length > 64}


def needles(rows):
    """{"needles 256": share of answers found}, means over the depths, in each cell the best."""
    return {f"needles {length}": statistics.mean(shares.values())
            for length, shares in mean_by_length(get_cells(rows)).items()}


def gather(words):
    """The rows of runs and tables. Raises UsageError if two of them have the same run."""
    places, rows = {}, []
    for label, name in named_paths(words):
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

def merge_tries(rows):
    """The rows, of a mechanism's name where one of its tries won on text, and another on the task.

    alibi-steep is a try of alibi. Prints what was merged. Tries that trained on one task with one
    seed stay apart.
    """
    def mechanism_of(model):
        begin, _, kind = model.rpartition(":")
        first = kind.rpartition("-")[0]
        is_try = first in BLOCKS and issubclass(BLOCKS.get(kind, object), BLOCKS[first])
        return f"{begin}:{first}" if first and is_try else model

    models = {}
    for row in rows:
        of_seed = models.setdefault(mechanism_of(row["model"]), {})
        of_seed.setdefault((row["task"], row["seed"]), set()).add(row["model"])
    merged = [model for model, of_seed in models.items() if max(map(len, of_seed.values())) == 1]
    for model in merged:
        tries = sorted({(task, *names) for (task, _), names in models[model].items()})
        if any(name != model for _, name in tries):
            words = (f"{name.rpartition(':')[2]} on {task}" for task, name in tries)
            print(f"{paper_name(model)}: {', '.join(words)}")
    return [row | {"model": mechanism_of(row["model"])}
            if mechanism_of(row["model"]) in merged else row for row in rows]


def get_lines(rows):
    """{(what a table calls a model, setting): {column: {seed: value}}}, in the order of TITLES.

    Columns: "loss", "parameters" and "ms", a step's, of texts; "perplexity 2048", divided by that
    at 64 as trained; "needles 256" and so on, and "needle digits" in validation, in percent.
    """
    values = {}
    for row in rows:
        of_task = row["what"].startswith("needle")
        if of_task == (row["task"] != "text") or row["what"] == "parameters":
            x = float(row["value"]) * (100 if of_task else 1)
            of_model = values.setdefault(row["model"], {})
            of_model.setdefault(row["what"], {})[row["seed"]] = x
    names = {model: paper_name(model).removeprefix("Transformer, ") for model in values}
    names = {model: "softmax" if name == "Transformer" else name for model, name in names.items()}

    def place(model):
        known = [*TITLES, names[model]]
        return model.startswith("multiscreen"), known.index(names[model])

    lines = {}
    for model in sorted(values, key=place):
        several = [*names.values()].count(names[model]) > 1        # of several sizes
        first = values[model].get("perplexity 64", {})
        for what, seeds in values[model].items():
            kind, n, setting = [*what.split(), "", ""][:3]
            if kind == "perplexity":
                seeds = {seed: x / first[seed] for seed, x in seeds.items() if seed in first}
            if seeds:
                line = lines.setdefault((model if several else names[model], setting), {})
                line[f"{kind} {n}".strip()] = seeds
    return lines


def columns_of(lines):
    """The columns of KINDS that were measured: loss, perplexity and needles by length."""
    def place(column):
        kind, _, length = column.partition(" ")
        return [*KINDS].index(kind), int(length or 0)

    found = {column for line in lines.values() for column in line if column.split()[0] in KINDS}
    return sorted(found - {"perplexity 64"}, key=place)


def print_results(lines, columns):
    """A row for each model and setting: means over the seeds."""
    rows = []
    for (name, setting), line in lines.items():
        means = {column: statistics.mean(seeds.values()) for column, seeds in line.items()}
        digits = line.get("needle digits", {}).values()
        learned = f"{sum(x > 50 for x in digits)} of {len(digits)}" if digits else None
        rows.append([name, SETTINGS[setting], len(line.get("loss", ())) or None,
                     *(format(means[x], KINDS[x.split()[0]][1]) if x in means else None
                       for x in columns), learned,
                     *(round(means[x]) if x in means else None for x in ("parameters", "ms"))])
    print_table(["model", "", "seeds", *columns, "learned", "parameters", "ms"], rows,
                "Means over the seeds. seeds, loss, ms of a step: of runs on text; perplexity N: "
                "at N tokens over that at 64;\nneedles N: answers found at N tokens (%); learned: "
                "runs that guess most digits of needles in validation")


def draw_results(plt, lines, columns, path):
    """A panel for each column: a row for each model, its mean, and small marks for its seeds."""
    names = [*dict.fromkeys(name for name, _ in lines)]
    looks = dict(zip(SETTINGS, ({"color": COLORS[0], "marker": "o"},
                                {"color": COLORS[1], "marker": "^", "mfc": "white"},
                                {"color": COLORS[2], "marker": "s", "mfc": "white"})))
    fig, axes = plt.subplots(1, len(columns), figsize=(WIDTH, 0.3 * len(names) + 1.6), sharey=True,
                             squeeze=False, layout="constrained")
    for ax, column in zip(axes[0], columns):
        kind, *lengths = column.split()
        for (name, setting), line in lines.items():
            x = [*line.get(column, {}).values()]
            y, look = names.index(name), looks[setting]
            if x:
                ax.plot(x, [y] * len(x), ls="", ms=3, alpha=0.5, clip_on=False, **look)
                ax.plot(statistics.mean(x), y, ls="", ms=7, clip_on=False, **look)
            digits = line.get("needle digits", {}).values()
            if kind == "needles" and digits and max(digits) <= 50:
                ax.text(95, y, "no lookup", ha="right", va="center", fontsize=8, color="0.3")
        ax.set_title(KINDS[kind][0].format(*map(int, lengths)))
        ax.set_ylim(len(names) - 0.5, -0.5)            # the first one on top
        ax.grid(axis="y", color="0.9")
        if kind == "needles":
            ax.set_xlim(0, 100)
        elif kind == "perplexity":
            ax.set(xscale="log", xlim=(min(1, ax.get_xlim()[0]), None))
            plain_axis(plt, ax.xaxis)
    axes[0, 0].set_yticks(range(len(names)), names)
    for setting, look in looks.items():
        if any(of_line == setting for _, of_line in lines):
            label = SETTINGS[setting] + " (small: one seed)" * (not setting)
            axes[0, 0].plot([], [], ls="", ms=7, label=label, **look)
    legend_below(fig, axes[0, 0], 3)
    save_figure(fig, path)


def compare(words, out):
    """Print and draw what runs have measured, and keep it as a TSV."""
    rows = gather(words)
    lines = get_lines(merge_tries(rows))
    columns = columns_of(lines)
    keep_rows(out.with_suffix(".tsv"), rows, ("step", "value"))
    print_results(lines, columns)
    if plt := pyplot():
        draw_results(plt, lines, columns, out)


def main():
    p = Parser(__doc__)
    p.add_argument("runs", nargs="*", metavar="RUN", help="folders of train.py, label=folder, or "
                   "tables of this script")
    p.add_argument("--names", nargs="+", help="mechanisms whose weights are drawn: softmax, or a "
                   "name in BLOCKS of baselines/__init__.py [the twelve of baselines/attention.py]")
    p.add_argument("--out", type=figure_path, help="path of the figure, .png; the rows of runs go "
                   "beside it as .tsv [out/mechanism_weights.png; for runs, beside the first "
                   "table, or out/mechanisms.png]")
    args = p.parse_args()
    if args.runs and args.names:
        raise UsageError("--names is for the figure of weights: leave it out, or the runs")
    if args.runs:
        first = args.runs[0]
        out = Path(first).with_suffix(".png") if first.endswith(".tsv") else "out/mechanisms.png"
        compare(args.runs, args.out or Path(out))
    else:
        show_weights(args.names or [*TITLES], args.out or Path("out/mechanism_weights.png"))


if __name__ == "__main__":
    cli(main)
