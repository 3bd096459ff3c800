"""Draw tables of measurements and of runs, and print the numbers of each figure.

    python -m lab.figures perplexity out/perplexity.tsv mine=out-mine/perplexity.tsv
    python -m lab.figures copying out/copying.tsv                    by distance
    python -m lab.figures gain out/copying.tsv                       what reading the string gains
    python -m lab.figures candidates out/copying.tsv                 the right one of many strings
    python -m lab.figures copying_steps 'out/*copying*.tsv'          by training step
    python -m lab.figures retrieval out/abcdigits.tsv                or the tables of lab.passkey
    python -m lab.figures losses --by lr 'Ours=out/m_lr*' 'Theirs=out/t_lr*'
    python -m lab.figures changes 'Original=out/o-*' 'Mine=out/m-*'   by how much a loss changed
    python -m lab.figures logs Ours=out/m-0 Theirs=out/t-0           losses by training step
    python -m lab.figures latency out/latency.tsv

A curve is a model as train.py names it, or a label as in mine=out/table.tsv. Runs that differ only
in their seed share a curve: it is their mean, with a band of one standard deviation. All that is in
one figure has to be measured alike, on the same texts, for the same answers, by the same tokens;
what is not is refused, and lab/alike.py has this rule. Where models were measured with several RoPE
factors, `retrieval` and `copying` show the best at each place, chosen by its result, among those
that all seeds have. The rows of a figure of measurements are written beside it, as .tsv, if you
name it with --out. Without matplotlib the numbers are printed, and no figure is drawn.

`gain` also prints how each curve differs from each other, paired by seed, in the mean over the
distances from 128 to 8,192: in the gain, and in what the string costs. t and p are Student's, and
two-sided; the standard errors are over the seeds, over the strings, which all seeds share, and over
both. Then it prints the differences of the gain by distance, with p by Holm's correction.
`candidates` prints beside the share of right answers the one to be expected of a model that tells
one string from another as well as it does among two.
"""
import math
import statistics
from itertools import combinations
from pathlib import Path

import numpy as np

from support.cli import Parser, UsageError, cli
from lab import alike, plots
from lab.alike import mean_and_std, mean_in_words, read_measurements, seeds_in_words
from lab.compare import compare, print_rows
from lab.curves import (
    Curve,
    copying_curves,
    curves_by_string,
    perplexity_curves,
    print_candidates,
    print_costs,
    print_perplexities,
    retrieval_curves,
    row_of,
)
from lab.paired import difference, holm, standard_errors
from lab.runs import column, last_of, read_runs
from support.data import count
from support.run import read_flags
from support.tables import named_paths, print_table, read_table

GUESS = math.log(62)                                   # nats of a letter or digit without knowledge
FIRST, LAST = 128, 8192                                # distances of copying's one mean
DISTANCE = "distance between the string and its repetition (tokens)"


# ---------------------------------------------------- figures of measurements: rows -> the figure

def print_steps(rows):
    """Print after how many steps a model was measured, if its seeds differ in it."""
    for model in dict.fromkeys(row["model"] for row in rows):
        steps = {int(row["step"]) for row in rows if row["model"] == model}
        if len(steps) > 1:
            print(f"{model}: its runs were measured after {min(steps):,} to {max(steps):,} steps")


def perplexity(rows):
    """Perplexity by position: the mean over the documents.

    More than five curves are drawn in a panel for each model, beside the first model.
    """
    curves = perplexity_curves(rows)
    print_perplexities(curves)
    first, *models = dict.fromkeys(curve.model for curve in curves)
    panels = {"": curves}
    if len(curves) > 5 and models:
        panels = {model: [curve for curve in curves if curve.model in (first, model)]
                  for model in models}
    fig, axes = plots.draw_panels(panels, "position (tokens of context)", "perplexity per token")
    plots.context_axes(axes, curves, rows)
    axes[0].set_yscale("log")
    plots.plain_numbers(axes[0].yaxis, (1, 2, 3, 4, 5, 7))
    return fig


def copying(rows):
    """What a string costs by distance; dotted: a string that the model has not read."""
    curves = copying_curves(rows)
    print_costs(curves)
    same, another = ([curve.part(end, ...) for curve in curves] for end in ("same", "another"))
    fig, (ax,) = plots.draw_panels({"": same}, DISTANCE, "nats per token of the repetition")
    for line, curve in zip(list(ax.lines), another):
        ax.plot([*curve.points], [statistics.fmean(x.values()) for x in curve.points.values()],
                ls=":", lw=1, marker="", color=line.get_color())
    ax.plot([], [], color="gray", ls=":", marker="", label="the same for a string not read before")
    mark_guess(ax, rows)
    plots.context_axes([ax], same, rows)
    ax.set_ylim(0, None)
    return fig


def mark_guess(ax, rows):
    """Where each character is a token, we know what guessing costs."""
    if rows[0].get("tokenizer", "bytes") == "bytes":
        ax.axhline(GUESS, color="gray", marker="", lw=0.8, label="guessing a letter or digit")


def gain(rows):
    """How much less a string costs if it was read, by distance."""
    curves = copying_curves(rows)
    print_costs(curves)
    print_differences(curves, rows)
    gains = [curve.part("gain", ...) for curve in curves]
    fig, (ax,) = plots.draw_panels({"": gains}, DISTANCE, "gain (nats per token): what another\n"
                                   "string costs more than the one read")
    ax.axhline(0, color="gray", marker="", lw=0.8)
    plots.context_axes([ax], gains, rows)
    return fig


def print_differences(curves, rows):
    """Print means over the distances, and how the curves differ, two at a time, paired by seed."""
    distances = [*curves[0].part("gain", ...).points]
    within = [distance for distance in distances if FIRST <= distance <= LAST]
    if not within:
        return
    means = {(curve.name, what): mean_over(curve.part(what, ...).points, within)
             for curve in curves for what in ("gain", "same")}
    table = []
    for (name, what), of_seed in means.items():
        mean, std = mean_and_std(of_seed.values())
        table.append({"curve": name, "of": what, "seeds": seeds_in_words(of_seed), "mean": mean,
                      "± std": std})
    print_table(table, f"Means over the distances from {within[0]:,} to {within[-1]:,} tokens")
    if len(curves) == 1:
        return

    by_string = {curve.name: curve.points for curve in curves_by_string(rows)}
    table, by_distance = [], []
    for one, other in combinations(curves, 2):
        names = {"curve": one.name, "less": other.name}
        for what in ("gain", "same"):
            x = difference(means[one.name, what], means[other.name, what])
            # A RoPE scaling that was chosen has no gains of its own by string.
            errors = [math.nan] * 3
            if what == "gain" and {one.name, other.name} <= by_string.keys():
                errors = errors_of(by_string[one.name], by_string[other.name], within)
            table.append(names | {
                "of": what, "seeds": seeds_in_words(x.seeds), "mean": x.mean, "± std": x.std,
                "t": x.t, "p": x.p, "error: seeds": errors[0], "strings": errors[1],
                "both": errors[2]})
        differences = [difference(one.points["gain", distance], other.points["gain", distance])
                       for distance in distances]
        corrected = holm([x.p for x in differences])
        cells = [f"{x.mean:.2f}" if math.isnan(p) else f"{x.mean:.2f} ({p:.3f})"
                 for x, p in zip(differences, corrected)]
        by_distance.append(names | dict(zip(distances, cells)))
    print_table(table, "How these means differ, paired by seed")
    print_table(by_distance, "Differences of the gain by distance, and p by Holm's correction")


def mean_over(points, places):
    """{seed: the mean over some places}, of the seeds that have all of them."""
    seeds = set.intersection(*(set(points[place]) for place in places))
    return {seed: statistics.fmean(points[place][seed] for place in places) for seed in seeds}


def errors_of(one, other, distances):
    """Standard errors of how mean gains differ. one, other: {(end, distance, string): {seed: x}}"""
    table = []
    for string in sorted({place[-1] for place in one} & {place[-1] for place in other}):
        ours, theirs = (mean_over(points, [("gain", distance, string) for distance in distances])
                        for points in (one, other))
        table.append([ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())])
    table = [of_string for of_string in table if len(of_string) == max(map(len, table))]
    if len(table) < 2 or len(table[0]) < 2:
        return [math.nan] * 3
    return standard_errors(np.array(table).T)


def copying_steps(rows):
    """What a string costs by training step, a panel for each distance."""
    curves = copying_curves(rows, "step")
    places = [place for curve in curves for place in curve.points]
    _, steps, distances = (sorted(set(x)) for x in zip(*places))
    lines = [row_of(curve.part("same", step, ...), distances, step=step)
             for curve in curves for step in steps]
    print_table([line for line in lines if line["seeds"] != "0"],
                "Nats per token of a string that was read")
    fig, axes = plots.draw_panels(
        {f"repeated after {distance:,} tokens": [curve.part("same", ..., distance)
                                                 for curve in curves] for distance in distances},
        "training step", "nats per token of the repetition")
    for ax in axes:
        mark_guess(ax, rows)
        ax.locator_params(axis="x", nbins=5)
        ax.xaxis.set_major_formatter("{x:,.0f}")
    axes[0].set_ylim(0, None)
    return fig


def candidates(rows):
    """How often the right one of several strings is the likeliest, by distance."""
    rows = [row for row in rows if row["right"]]
    if not rows:
        raise UsageError("no row is of several strings: measure with lab.copying --candidates 2")
    shares = print_candidates(rows)
    fig, (ax,) = plots.draw_panels({"": [*shares.values()]}, DISTANCE, "the right string is the "
                                   "likeliest (%);\ndotted: by chance")
    for k in {k for _, k in shares}:
        ax.axhline(100 / k, color="gray", ls=":", marker="", lw=0.8)
    plots.context_axes([ax], shares.values(), rows)
    ax.set_ylim(-2, 102)
    return fig


def retrieval(rows):
    """Answers found: a panel for each model by length and depth, then all models by length."""
    cells, means = ([curve.times(100) for curve in sorted(
        curves, key=lambda curve: curve.swe)] for curves in retrieval_curves(rows, plain=False))
    lines = [{"model": curve.name, "length": length, "seeds": seeds_in_words(shares),
              "found (%)": mean_in_words(shares.values(), 1),
              "with 95 %": sum(share >= 95 for share in shares.values())}
             for curve in means for length, shares in curve.points.items()]
    print_table(lines, "Answers found, mean over the depths")

    has_curves = len(means) < 8                        # more could not be told apart
    heights = [1] * math.ceil(len(cells) / 3)
    if has_curves:
        heights.append(1.7)
    fig = plots.pyplot().figure(figsize=(8, 1 + 1.9 * sum(heights)))
    grid = fig.add_gridspec(len(heights), 3, height_ratios=heights)
    places = [place for curve in cells for place in curve.points]
    lengths, depths = (sorted(set(x)) for x in zip(*places))
    for n, curve in enumerate(cells):
        ax = fig.add_subplot(grid[n // 3, n % 3])
        draw_cells(ax, curve, lengths, depths)
        if n % 3 == 0:
            ax.set_ylabel("depth")
    if has_curves:
        ax = fig.add_subplot(grid[-1, :])
        plots.draw_curves(ax, means, plots.looks(means))
        plots.context_axes([ax], means, rows)
        ax.set(ylim=(-2, 102), ylabel="answers found (%)", xlabel="context (tokens)")
    else:
        fig.supxlabel("context (tokens); the numbers are answers found (%)", fontsize=10)
    return fig


def draw_cells(ax, curve, lengths, depths):
    """The panel of a model, of percents: a cell is the mean over its seeds."""
    shares = np.full((len(depths), len(lengths)), math.nan)
    for (length, depth), of_seed in curve.points.items():
        y, x, share = depths.index(depth), lengths.index(length), statistics.fmean(of_seed.values())
        shares[y, x] = share
        ax.text(x, y, f"{share + 1e-9:.0f}", ha="center", va="center", fontsize=7,
                color="black" if share > 45 else "white")
    ax.imshow(shares, vmin=0, vmax=100, cmap="cividis", aspect="auto")
    ax.set_xticks(range(len(lengths)), [f"{x:,}" for x in lengths], rotation=90)
    ax.set_yticks(range(len(depths)), depths)
    ax.set_title(curve.name.replace(" + best", "\n+ best"), fontsize=9)


# ------------------------------------------------------------- figures of runs: words -> the figure

def losses(words, by="lr"):
    """The validation loss of runs, at the last common step, by a flag such as lr or parameters."""
    runs = read_runs(words)
    rows, groups, step = compare(runs, by)
    print_rows(rows, runs, step)
    curves, diverged = {}, {}
    for group in sorted(groups.values(), key=lambda group: as_number(by, group[0].flags[by])):
        label, x = group[0].label, as_number(by, group[0].flags[by])
        curve = curves.setdefault(label, Curve(label, {}))
        curve.points[x] = {run.seed: run.loss(step) for run in group if not run.diverged}
        if any(run.diverged for run in group):
            diverged.setdefault(label, []).append(x)

    xlabel = "learning rate" if by == "lr" else by
    fig, (ax,) = plots.draw_panels({"": curves.values()}, xlabel,
                                   "validation loss (nats per token)")
    # A seed that diverged has no loss: the point is the mean of the others.
    top = max(run.loss(step) for run in runs if not run.diverged)
    for n, label in enumerate(curves):
        x = diverged.get(label, [])
        ax.plot(x, [top * (1.03 + 0.03 * n)] * len(x), ls="", marker="x", ms=9, mew=2,
                color=f"C{n}")
    ax.plot([], [], ls="", marker="x", ms=9, mew=2, color="gray",
            label="on top: a seed diverged, the point is of the others")
    plots.logarithmic(ax.set_xscale, [x for curve in curves.values() for x in curve.points],
                      base=2 if by == "lr" else 10)
    return fig


def as_number(flag, text):
    """The value of a flag for an axis."""
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"--by {flag}: {text} is no number, so there is no axis for it; "
                         f"lab.compare --by {flag} prints the losses") from None


def changes(words):
    """The change of the validation loss against the first group, paired by seed."""
    runs = read_runs(words)
    rows, _, step = compare(runs)
    print_rows(rows, runs, step)
    fig, ax = plots.pyplot().subplots(figsize=(8, 1.2 + 0.4 * len(rows)))
    labels = []
    for n, row in enumerate(rows):
        change, seeds = row["change"], row["pairs"]
        if n == 0:
            change, seeds = 0, row["seeds"]
        label = f"{row['run']}, {count(int(seeds.split()[0]), 'seed')}"
        if row["diverged"] != "0":
            label += f", {row['diverged'].split()[0]} diverged"
        labels.append(label)
        ax.errorbar(change, n, xerr=np.nan_to_num(row["± std"]), marker="o", capsize=4, color="C0")
    ax.axvline(0, color="gray", lw=0.8, marker="", zorder=0)
    ax.set_yticks(range(len(rows)), labels)
    ax.set_ylim(len(rows) - 0.5, -0.5)                 # the first one on top, all of them in sight
    ax.set_xlabel(f"validation loss minus that of {rows[0]['run']} (nats per token)")
    return fig


def logs(words):
    """Training losses with validation losses as points, and gradient norms, by step."""
    runs = [(label if label else path, path) for label, path in named_paths(words)]
    alike.require_alike({path: [read_flags(path)] for _, path in runs}, alike.RUNS)
    logs = [(name, read_table(Path(path) / "log.tsv")) for name, path in runs]
    print_table([{"run": name, "loss": last_of(log, "loss"), "val_loss": last_of(log, "val_loss")}
                 for name, log in logs], "The last losses, nats per token")
    fig, (top, bottom) = plots.pyplot().subplots(2, 1, figsize=(8, 7), sharex=True)
    norms = []
    for n, (name, log) in enumerate(logs):
        for ax, x, look in ((top, "loss", {"marker": "", "label": name}),
                            (bottom, "grad_norm", {"marker": ""}),
                            (top, "val_loss", {"ls": "", "mec": "black"})):
            points = column(log, x)
            ax.plot(list(points), list(points.values()), color=f"C{n}", **look)
        norms += column(log, "grad_norm").values()
    plots.logarithmic(bottom.set_yscale, norms)
    top.set(ylabel="training loss (nats per token);\npoints: validation")
    bottom.set(xlabel="optimizer step", ylabel="gradient norm before clipping")
    return fig


def latency(words):
    """Milliseconds of a forward pass, of tables of lab.bench: by length, or else by parameters."""
    rows = []
    for _, path in named_paths(words):
        rows += read_table(path)
        alike.require_table(rows, alike.LATENCY, path)
    rows = [row for row in rows if row["what"].startswith("forward")]
    if not rows:
        raise UsageError(f"{words[0]} has no forward passes: measure some with lab.bench")
    alike.require_alike({"": rows}, alike.LATENCY)
    by, curves = "parameters", {}
    if len({row["length"] for row in rows}) > 1:
        by = "length"
    for row in sorted(rows, key=lambda row: int(row[by])):
        name = f"{row['model'].partition(':')[0].capitalize()}, {row['setting']}"
        if by == "length":
            name += f", {int(row['parameters']) / 1e6:.2g}M"
        # What was timed again counts once, by its last times.
        curve = curves.setdefault(name, Curve(name, {}))
        curve.points[int(row[by])] = dict(enumerate(map(float, row["ms"].split())))
    print_table([{"model": curve.name, by: x, "ms": statistics.fmean(times.values())}
                 for curve in curves.values() for x, times in curve.points.items()],
                f"Milliseconds of one forward pass; {rows[0]['machine']}")

    xlabel = "context (tokens)"
    if by == "parameters":
        xlabel = f"parameters (millions), at {int(rows[0]['length']):,} tokens"
    fig, (ax,) = plots.draw_panels({"": curves.values()}, xlabel,
                                   "milliseconds of one forward pass", "time")
    if by == "length":
        plots.context_axes([ax], curves.values())
    else:
        plots.millions(ax)
    ax.set_yscale("log")
    plots.plain_numbers(ax.yaxis)
    return fig


# {name: (function, the kind of the tables that it draws)}
OF_ROWS = {"perplexity": (perplexity, alike.PERPLEXITY), "copying": (copying, alike.COPYING),
           "gain": (gain, alike.COPYING), "candidates": (candidates, alike.CANDIDATES),
           "copying_steps": (copying_steps, alike.COPYING_STEPS),
           "retrieval": (retrieval, alike.RETRIEVAL)}
OF_RUNS = {"losses": losses, "changes": changes, "logs": logs, "latency": latency}


def main():
    p = Parser(__doc__)
    p.add_argument("figure", choices=[*OF_ROWS, *OF_RUNS])
    p.add_argument("tables", nargs="+", metavar="TSV", help="tables, runs of train.py, or "
                   "label=path; for many at once label='pattern*'")
    p.add_argument("--by", default="lr", help="for losses: the flag of train.py on the x axis [lr]")
    p.add_argument("--out", type=plots.figure_path, help="the figure to write [out/FIGURE.png]")
    args = p.parse_args()
    out = args.out or Path("out") / f"{args.figure}.png"
    if args.figure in OF_ROWS:
        draw, kind = OF_ROWS[args.figure]
        rows = read_measurements(args.tables, kind)
        if args.figure != "copying_steps":
            print_steps(rows)
        fig = draw(rows)
        if args.out:
            plots.keep_rows(out.with_suffix(".tsv"), rows)
    elif args.figure == "losses":
        fig = losses(args.tables, args.by)
    else:
        fig = OF_RUNS[args.figure](args.tables)
    plots.save(fig, out)


if __name__ == "__main__":
    cli(main)
