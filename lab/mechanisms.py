"""Compare attention mechanisms on one backbone: their loss, perplexity and retrieval.

    python -m lab.mechanisms 'softmax=out/mechanisms/*_softmax-*' 'mine=out/mechanisms/*_mine-*'
    python -m lab.mechanisms lab/report/mechanisms.tsv

A label names a mechanism, and its runs are folders of train.py, on text or on abcdigits, that were
measured with lab.perplexity or abcdigits.py. A row of the table has the means over the seeds; what
was measured with SWE, or with the best RoPE scaling at each place, has a row of its own. The
columns are the validation loss, the perplexity at the end of the documents over that at 64 tokens,
the share of needles found at each length, and how many seeds learned to look things up, which is
that they guess more than half of the needles' digits in validation. The loss is that of the last
step that all runs on text have; a run on abcdigits counts if it has ended, at --steps or before,
when it had learned the task. The second form draws a table that the first has written beside its
figure. docs/mechanisms.md has the protocol.
"""
import math
import statistics
from pathlib import Path

import numpy as np

from lab.compare import column, get_groups, last_common_step, read_folder
from lab.figures import (
    best_cells,
    best_factor,
    by_factor,
    curves,
    figure_path,
    keep_rows,
    mean_by_length,
    mean_in_words,
    numbers,
    one_of,
    plain_numbers,
    pyplot,
    save,
    shared,
)
from lab.perplexity import positions
from support.cli import Parser, UsageError, cli
from support.run import read_checkpoint
from support.tables import as_cell, named_paths, print_table, read_table, read_tables

SETTINGS = {"": "as trained (small: one seed)", "SWE": "with SWE",
            "RoPE": "with the best RoPE scaling"}


# ------------------------------------------------------------------------------- from runs to rows

def rows_of(words):
    """The rows of the table, dicts, of labelled runs."""
    runs, tables = [], {"perplexity": [], "abcdigits": []}
    for label, path in named_paths(words):
        run = read_folder(Path(path), label)
        name = "perplexity"
        if run.flags["data"] == "abcdigits":
            name, found = "abcdigits", column(read_table(Path(path) / "log.tsv"), "needle")
            if not run.diverged and not has_ended(run, Path(path)):
                raise UsageError(f"{path} has not ended: --resume continues it")
            run.facts["needle"] = math.nan             # of a run that diverged before it was asked
            if found:
                run.facts["needle"] = found[max(found)]
        run.label = f"{run.label} {name}"
        runs.append(run)
        if not run.diverged:
            tables[name].append(f"{label}={path}/{name}.tsv")
    get_groups(runs)                                   # refuses runs that differ in more than seeds

    found = []
    on_text = [run for run in runs if "needle" not in run.facts]
    for run in runs:
        if "needle" in run.facts:
            what, value = "needle digits", run.facts["needle"]
        else:
            what, value = "loss", run.loss(last_common_step(on_text))
        found.append([run.label.rpartition(" ")[0], run.seed, what, "", "", value])
    for name, of_rows in (("perplexity", perplexities), ("abcdigits", needles)):
        if tables[name]:
            found += of_rows(read_tables(tables[name]))
    parameters = {run.label.rpartition(" ")[0]: run.flags["parameters"] for run in runs}
    return [{"model": model, "parameters": parameters[model], "seed": seed, "what": what,
             "length": length, "setting": setting, "value": value}
            for model, seed, what, length, setting, value in found]


def has_ended(run, folder):
    """Whether a run on a task has had all its steps, or has learned the task before."""
    if max(run.losses) >= int(run.flags["steps"]):
        return True
    return read_checkpoint(folder / "ckpt.pt")["learned"]


def by_setting(rows, *apart):
    """Yield (model, setting, {seed: rows}), for "RoPE" with the rows of all factors."""
    for seeds in curves(rows, "factor", *apart).values():
        first = next(iter(seeds.values()))[0]
        plain = {seed: [row for row in rows if not row["factor"]] for seed, rows in seeds.items()}
        all_have_plain = all(plain.values())
        has_factors = plain != seeds
        if all_have_plain:
            yield first["model"], "SWE" if first["swe"] else "", plain
        if has_factors and not first["swe"]:
            yield first["model"], "RoPE", seeds


def perplexities(rows):
    """Perplexity at 64 tokens and at the end of the documents, with the factor best at each."""
    L = int(one_of(rows, "length"))
    one_of(rows, "data")
    for model, setting, seeds in by_setting(rows, "document", "nats"):
        for position in (64, L):
            n = positions(L).index(position)
            costs = {key: np.exp(np.mean([numbers(row)[n] for row in found]))
                     for key, found in shared(by_factor(seeds), "document").items()}
            _, of_seeds = best_factor(costs, f"at position {position}")
            for seed, value in of_seeds.items():
                yield model, seed, "perplexity", position, setting, value


def needles(rows):
    """The share of needles found at each length, with the best factor in each cell."""
    one_of(rows, "digits")
    for model, setting, seeds in by_setting(rows, "length", "depth", "accuracy"):
        for length, of_seed in mean_by_length(best_cells(seeds)).items():
            for seed, share in of_seed.items():
                yield model, seed, "needles", length, setting, share


# ----------------------------------------------------------------------- the table and the figure

def get_lines(rows):
    """{(mechanism, setting): {column of the table: its values, one for each seed}}

    The last perplexity is divided by that of the same run at 64 tokens, as trained.
    """
    at_64 = {(row["model"], row["seed"]): float(row["value"]) for row in rows
             if row["what"] == "perplexity" and row["length"] == "64" and not row["setting"]}
    lines = {}
    for row in rows:
        value, name = float(row["value"]), f"{row['what']} {row['length']}".strip()
        if row["what"] == "perplexity":
            if row["length"] == "64":
                continue
            if (row["model"], row["seed"]) not in at_64:
                raise UsageError(f"{row['model']}, seed {row['seed']}, was not measured as "
                                 "trained: measure it with --rope-scale 1, too")
            value /= at_64[row["model"], row["seed"]]
            name += " / 64"
        if row["what"] == "needles":
            value *= 100
        lines.setdefault((row["model"], row["setting"]), {}).setdefault(name, []).append(value)
    models = list(dict.fromkeys(model for model, _ in lines))
    order = sorted(lines, key=lambda key: (models.index(key[0]), [*SETTINGS].index(key[1])))
    return {key: lines[key] for key in order}


def columns_of(lines):
    """The columns of the table: loss, perplexity, and needles by length."""
    found = {name for values in lines.values() for name in values if name != "needle digits"}
    order = ("loss", "perplexity", "needles")

    def place(name):
        what, *more = name.split()
        length = 0
        if more:
            length = int(more[0])
        return order.index(what), length

    return sorted(found, key=place)


def print_lines(lines, columns):
    """Print a row for each mechanism and setting."""
    table = []
    digits = {"loss": 3, "perplexity": 2, "needles": 0}
    for (model, setting), values in lines.items():
        cells = [mean_in_words(values[name], digits[name.split()[0]]) if name in values else None
                 for name in columns]
        learned = [share > 0.5 for share in values.get("needle digits", [])]
        cells.append(f"{sum(learned)} of {len(learned)}" if learned else None)
        table.append([model, setting, *cells])
    print_table(["mechanism", "", *columns, "learned"], table,
                "Means and deviations over the seeds; needles: % found")


def draw(lines, columns, path):
    """Draw a panel for each column: the mean of each mechanism, small marks for its seeds."""
    plt = pyplot()
    models = list(dict.fromkeys(model for model, _ in lines))
    fig, axes = plt.subplots(1, len(columns), figsize=(8, 0.3 * len(models) + 2), sharey=True,
                             squeeze=False)
    titles = {"loss": "loss (nats)", "perplexity": "perplexity at\n{1}, over\nthat at 64",
              "needles": "% found\nat {1}"}
    for ax, name in zip(axes[0], columns):
        for n, (setting, words) in enumerate(SETTINGS.items()):
            look = {"ls": "", "marker": "o^s"[n], "color": f"C{n}", "mfc": f"C{n}"}
            if setting:
                look["mfc"] = "white"
            for (model, of), values in lines.items():
                if of == setting and name in values:
                    y = models.index(model)
                    ax.plot(values[name], [y] * len(values[name]), **look, ms=3, alpha=0.5,
                            clip_on=False)
                    ax.plot(statistics.fmean(values[name]), y, **look, ms=7, clip_on=False)
            if any(of == setting for _, of in lines):
                ax.plot([], [], **look, ms=7, label=words)
        ax.set_title(titles[name.split()[0]].format(*name.split()), fontsize=9)
        ax.set_ylim(len(models) - 0.5, -0.5)           # the first one on top
        ax.grid(axis="y", color="0.9")
        if name.startswith("needles"):
            ax.set_xlim(0, 100)
        if name.startswith("perplexity"):
            ax.set(xscale="log", xlim=(1, None))
            plain_numbers(plt, ax.xaxis)
    axes[0, 0].set_yticks(range(len(models)), models)
    save(fig, path)


def main():
    p = Parser(__doc__)
    p.add_argument("runs", nargs="+", metavar="RUN", help="label=folders, or a table")
    p.add_argument("--out", type=figure_path, default=Path("out/mechanisms.png"),
                   help="the figure to write, and beside it its table [out/mechanisms.png]")
    args = p.parse_args()
    tables = [word for word in args.runs if word.endswith(".tsv")]
    if tables and tables != args.runs:
        raise UsageError("name folders of runs, or one table")
    if tables:
        rows = read_table(tables[0])
    else:
        rows = [{name: as_cell(x) for name, x in row.items()} for row in rows_of(args.runs)]
        keep_rows(args.out.with_suffix(".tsv"), rows)
    lines = get_lines(rows)
    columns = columns_of(lines)
    print_lines(lines, columns)
    draw(lines, columns, args.out)


if __name__ == "__main__":
    cli(main)
