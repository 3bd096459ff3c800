"""Compare attention mechanisms on one backbone: their loss, perplexity and retrieval.

    python -m lab.mechanisms 'softmax=out/mechanisms/*_softmax-*' 'mine=out/mechanisms/*_mine-*'
    python -m lab.mechanisms lab/report/mechanisms.tsv

A label names a mechanism, and its runs are folders of train.py, on text or on abcdigits, that were
measured with lab.perplexity, lab.copying or abcdigits.py. A row of the table has the means over the
seeds; what was measured with SWE, or with the best RoPE scaling at each place, has a row of its
own. The columns are the validation loss, the perplexity at the end of the documents over that at 64
tokens, the gain of copying at each distance, the share of needles found at each length, and how
many seeds learned to look things up, which is that they guess more than half of the needles' digits
in validation. All numbers of runs on text are of the last step that all of them have; a run on
abcdigits counts if it has ended, at --steps or before, when its training loss said that the task
was learned. A run that diverged is in no mean, and is counted. A second table has how the needles
found at the longest length differ from those of the best, and of the same mechanism as trained,
paired by seed, and p by Student's t. The second form of the command draws a table that the first
has written beside its figure. docs/mechanisms.md has the protocol.
"""
import math
import statistics
from dataclasses import replace
from pathlib import Path

from support.cli import Parser, UsageError, cli
from lab import alike, plots
from lab.alike import group_runs, mean_of_seeds, read_measurements, seeds_in_words
from lab.curves import (
    Curve,
    copying_curves,
    perplexity_curves,
    retrieval_curves,
    with_best_scaling,
)
from lab.paired import difference
from lab.runs import column, last_common_step, read_folder
from support.run import read_checkpoint
from support.tables import as_cell, named_paths, print_table, read_table

SETTINGS = {"": "as trained (small: one seed)", "SWE": "with SWE",
            "RoPE": "with the best RoPE scaling"}
START = 64                                             # the perplexity there is divided by
# {what: (its digits, its title in the table, and in the figure)}, in the order of the columns
SHOWN = {"loss": (3, "loss", "loss (nats)"),
         "perplexity": (2, "perplexity {} / 64", "perplexity at\n{}, over\nthat at 64"),
         "gain": (2, "gain {}", "gain (nats)\nat {}"),
         "needles": (0, "needles {}", "% found\nat {}")}


# ------------------------------------------------------------------------------- from runs to rows

def rows_of(words):
    """The rows of the table, dicts: a number of a labelled run, one for each seed."""
    on_text, on_task = {}, {}                          # {path: run}
    for label, path in named_paths(words):
        run = read_folder(Path(path), label)
        if run.flags["data"] == "abcdigits":
            on_task[path] = run
        else:
            on_text[path] = run
    parameters = {run.label: run.flags["parameters"] for run in (on_text | on_task).values()}
    rows = []
    for what, curve in (*curves_on_text(on_text), *curves_on_task(on_task)):
        setting = "SWE" if curve.swe else ""
        if curve.factor:
            setting = "RoPE"
        rows += [{"model": curve.model, "parameters": parameters[curve.model], "seed": seed,
                  "what": what, "length": length, "setting": setting, "value": value}
                 for length, of_seed in curve.points.items() for seed, value in of_seed.items()]
    return rows


def curves_on_text(runs):
    """Yield (what, a curve by length) of runs: losses, perplexities, gains of copying."""
    group_runs(runs.values())                          # refuses those that were not trained alike
    if not runs:
        return
    step = last_common_step(runs.values())
    for run in runs.values():
        yield "loss", Curve(run.label, {"": {run.seed: run.loss(step)}})
    curves = perplexity_curves(measured(runs, "perplexity", alike.PERPLEXITY, step))
    end = max(curves[0].points)
    if START not in curves[0].points:
        raise UsageError(f"the perplexities are of {end} tokens: measure with --length "
                         f"{2 * START} or more, because they are divided by those at {START}")
    for curve in with_best_scaling(curves, lambda points, place: sum(points[place].values())):
        yield "perplexity", replace(curve, points={x: curve.points[x] for x in (START, end)})
    if any((Path(path) / "copying.tsv").exists() for path in runs):
        for curve in copying_curves(measured(runs, "copying", alike.COPYING, step)):
            yield "gain", curve.part("gain", ...)


def curves_on_task(runs):
    """Yield (what, a curve by length) of the needles that runs find."""
    group_runs(runs.values())
    for path, run in runs.items():
        share = needle_of(run, Path(path))
        yield "needle digits", Curve(run.label, {"": {run.seed: share}})
    if not all(run.diverged for run in runs.values()):
        _, curves = retrieval_curves(measured(runs, "abcdigits", alike.RETRIEVAL), plain=True)
        for curve in curves:
            yield "needles", curve


def measured(runs, name, kind, step=None):
    """The rows of runs, {path: run}, at a step or else at their ends, of one setting at most."""
    rows = read_measurements([f"{run.label}={path}/{name}.tsv" for path, run in runs.items()
                              if not run.diverged], kind)
    ends = {(run.label, run.seed, str(step or max(run.losses, default=0))) for run in runs.values()}
    for row in rows:
        if (row["model"], row["seed"], row["step"]) not in ends:
            raise UsageError(f"{name}.tsv of {row['model']}, seed {row['seed']}, is of step "
                             f"{row['step']}, and the loss is not: end all runs and measure again")
    return [row for row in rows if "" in (row["swe"], row["factor"])]


def needle_of(run, folder):
    """The share of the needles' digits that a run on abcdigits guesses; NaN if it diverged."""
    if run.diverged:
        return math.nan
    if max(run.losses) < int(run.flags["steps"]):
        ckpt = read_checkpoint(folder / "ckpt.pt")
        if not ckpt["learned"] or ckpt.get("owes_evaluation"):
            raise UsageError(f"{folder} has not ended: --resume continues it")
    return list(column(read_table(folder / "log.tsv"), "needle").values())[-1]


# ----------------------------------------------------------------------- the table and the figure

def get_lines(rows):
    """{(mechanism, setting): {(what, length): {seed: value}}}, in the order of the table.

    The last perplexity is divided by that of the same run at 64 tokens, as trained. Needles are in
    percent.
    """
    lines = {(model, setting): {} for model in dict.fromkeys(row["model"] for row in rows)
             for setting in SETTINGS}
    for row in rows:
        name = row["what"], int(row["length"] or 0)
        of_seed = lines[row["model"], row["setting"]].setdefault(name, {})
        if row["seed"] in of_seed:
            raise UsageError(f"{row['model']} has seed {row['seed']} twice in {row['what']}: make "
                             "the table anew")
        of_seed[row["seed"]] = float(row["value"])
    for (model, _), values in lines.items():
        start = lines[model, ""].get(("perplexity", START), {})
        for (what, length), of_seed in values.items():
            for seed in of_seed:
                if what == "needles":
                    of_seed[seed] *= 100
                elif what == "perplexity" and seed not in start:
                    raise UsageError(f"{model}, seed {seed}, was not measured as trained: measure "
                                     "it with --rope-scale 1, too")
                elif what == "perplexity" and length != START:
                    of_seed[seed] /= start[seed]
    return {key: values for key, values in lines.items() if values}


def columns_of(lines):
    """The table's columns of numbers: loss, perplexity, gains by distance, needles by length."""
    names = {name for values in lines.values() for name in values}
    return sorted((name for name in names if name[0] in SHOWN and name != ("perplexity", START)),
                  key=lambda name: ([*SHOWN].index(name[0]), name[1]))


def good_of(of_seed):
    """{seed: number} less the runs that diverged, whose number is NaN."""
    return {seed: value for seed, value in of_seed.items() if not math.isnan(value)}


def print_lines(lines, columns):
    """Print a row for each mechanism and setting."""
    seeds = {seed for values in lines.values() for of_seed in values.values() for seed in of_seed}
    table = []
    for (model, setting), values in lines.items():
        row = {"mechanism": model, "": setting}
        for what, length in columns:
            digits, title, _ = SHOWN[what]
            of_seed = values.get((what, length), {})
            cell = mean_of_seeds(good_of(of_seed), digits, seeds)
            bad = of_seed.keys() - good_of(of_seed).keys()
            if bad:
                cell += f", diverged {seeds_in_words(bad)}"
            row[title.format(length)] = cell
        shares = values.get(("needle digits", 0), {}).values()
        row["learned"] = None
        if shares:
            row["learned"] = f"{sum(share > 0.5 for share in shares)} of {len(shares)}"
        table.append(row)
    print_table(table, f"Means and deviations over seeds {seeds_in_words(seeds)}; needles: % found")


def print_differences(lines, column):
    """Print how the needles found at the longest length differ, paired by seed, with p.

    Each line is compared with the one that finds most, and with its mechanism as trained.
    """
    found = {key: good_of(values.get(column, {})) for key, values in lines.items()}
    found = {key: of_seed for key, of_seed in found.items() if of_seed}
    if column[0] != "needles" or len(found) < 2:
        return
    best = max(found, key=lambda key: statistics.fmean(found[key].values()))
    table = []
    for (model, setting), of_seed in found.items():
        row = {"mechanism": model, "": setting}
        for whose, other in (("the best", best), ("as trained", (model, ""))):
            x = difference(of_seed, found.get(other, {}) if other != (model, setting) else {})
            row |= {f"less {whose}": x.mean, f"p of {whose}": x.p,
                    f"pairs of {whose}": seeds_in_words(x.seeds) if x.seeds else None}
        table.append(row)
    print_table(table, f"{SHOWN['needles'][1].format(column[1])}: differences, paired by seed; the "
                f"best is {' '.join(best).strip()}")


def draw(lines, columns, path):
    """Draw a panel for each column: the mean of each mechanism, small marks for its seeds."""
    models = list(dict.fromkeys(model for model, _ in lines))
    fig, axes = plots.pyplot().subplots(
        1, len(columns), figsize=(max(8, 1.2 * len(columns)), 0.3 * len(models) + 2), sharey=True,
        squeeze=False)
    for ax, (what, length) in zip(axes[0], columns):
        for n, (setting, words) in enumerate(SETTINGS.items()):
            look = {"ls": "", "marker": "o^s"[n], "color": f"C{n}",
                    "mfc": "white" if setting else f"C{n}"}
            of_setting = {models.index(model): [*good_of(values.get((what, length), {})).values()]
                          for (model, of), values in lines.items() if of == setting}
            for y, numbers in of_setting.items():
                if numbers:
                    ax.plot(numbers, [y] * len(numbers), **look, ms=3, alpha=0.5, clip_on=False)
                    ax.plot(statistics.fmean(numbers), y, **look, ms=7, clip_on=False)
            if of_setting:
                ax.plot([], [], **look, ms=7, label=words)
        ax.set_title(SHOWN[what][2].format(length), fontsize=9)
        ax.set_ylim(len(models) - 0.5, -0.5)           # the first one on top
        ax.grid(axis="y", color="0.9")
        if what == "needles":
            ax.set_xlim(0, 100)
        if what == "perplexity":
            ax.set_xscale("log")
            ax.set_xlim(left=min(1, 0.9 * ax.dataLim.x0))         # a ratio below 1 is in sight
            plots.plain_numbers(ax.xaxis)
    axes[0, 0].set_yticks(range(len(models)), models)
    plots.save(fig, path)


def main():
    p = Parser(__doc__)
    p.add_argument("runs", nargs="+", metavar="RUN", help="label=folders, or a table")
    p.add_argument("--out", type=plots.figure_path, default=Path("out/mechanisms.png"),
                   help="the figure to write, and beside it its table [out/mechanisms.png]")
    args = p.parse_args()
    is_table = args.runs[0].endswith(".tsv")
    if is_table and len(args.runs) > 1:
        raise UsageError("name folders of runs, or one table")
    if is_table:
        rows = read_table(args.runs[0])
        alike.require_table(rows, alike.MECHANISMS, args.runs[0])
    else:
        rows = [{name: as_cell(x) for name, x in row.items()} for row in rows_of(args.runs)]
    lines = get_lines(rows)
    columns = columns_of(lines)
    print_lines(lines, columns)
    print_differences(lines, columns[-1])
    if not is_table:
        plots.keep_rows(args.out.with_suffix(".tsv"), rows)
    draw(lines, columns, args.out)


if __name__ == "__main__":
    cli(main)
