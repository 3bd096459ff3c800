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
what is not is refused, and lab/alike.py has this rule. If a table holds measurements of several
kinds, choose one, as in --only window=0.3. Where models were measured with several RoPE factors,
`retrieval` and `copying` show the best at each place, chosen by its result, among those that all
seeds have. The rows of a figure of measurements are written beside it, as .tsv, if you name it with
--out. Without matplotlib the numbers are printed, and no figure is drawn.

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

from lab import alike, plots
from lab.alike import mean_and_std, mean_in_words, read_measurements, seeds_in_words
from lab.compare import compare, print_rows
from lab.curves import (
    copying_curves,
    gains_by_string,
    mean_over_items,
    perplexity_curves,
    read_curves,
    retrieval_curves,
)
from lab.paired import difference, holm, share_among, standard_errors
from lab.runs import column, read_runs
from support.cli import Parser, UsageError, cli
from support.data import count
from support.run import read_flags
from support.tables import named_paths, print_table, read_table

GUESS = math.log(62)                                   # nats of a letter or digit without knowledge
FIRST, LAST = 128, 8192                                # distances of copying's one mean


# ---------------------------------------------------- figures of measurements: rows -> the figure

def print_steps(rows):
    """Print after how many steps a model was measured, if its seeds differ in it."""
    for model in dict.fromkeys(row["model"] for row in rows):
        steps = {int(row["step"]) for row in rows if row["model"] == model}
        if len(steps) > 1:
            print(f"{model}: its runs were measured after {min(steps):,} to {max(steps):,} steps")


def row_of(curve, places, **more):
    """The row of a curve (seeds, places) in a printed table: its means in words."""
    return {"model": curve.name, "seeds": seeds_in_words(curve.seeds_measured())} | more | {
        place: mean_in_words(curve.at(n).values(), 2) for n, place in enumerate(places)}


def perplexity(rows):
    """Perplexity by position: the mean over the documents.

    More than five curves are drawn in a panel for each model, beside the first curve.
    """
    curves, x = perplexity_curves(rows)
    print_table([row_of(curve, x) for curve in curves], "Perplexity by tokens of context")

    plt = plots.pyplot()
    panels = {"": curves}
    if len(curves) > 5:
        panels = {}
        for curve in curves[1:]:
            panels.setdefault(curve.model, [curves[0]]).append(curve)
    columns = min(len(panels), 3)
    fig, axes = plt.subplots(math.ceil(len(panels) / columns), columns, sharex=True, sharey=True,
                             squeeze=False)
    fig.set_figheight(2.5 + 2 * len(axes))
    for ax in axes.flat[len(panels) :]:
        ax.axis("off")
    for ax, (title, shown) in zip(axes.flat, panels.items()):
        for n, (curve, look) in enumerate(zip(shown, plots.looks(shown))):
            label = curve.name
            if title:                                  # the title has the name
                look = {"color": f"C{n}", "marker": plots.MARKERS[n], "ms": 3}
                if n > 0:
                    label = curve.setting if curve.setting else "the ablation as trained"
            plots.draw_mean(ax, x, curve, label, **look)
        plots.mark_training_length(ax, rows)
        plots.powers_of_2(ax, x[:: 4 if title else 2])
        ax.set(yscale="log", title=title)
        plots.plain_numbers(plt, ax.yaxis, (1, 2, 3, 4, 5, 7))
        ax.tick_params(labelbottom=True)
    axes[-1, 0].set_xlabel("position (tokens of context)")
    fig.supylabel("perplexity per token", fontsize=10)
    return fig


def costs_by_distance(rows):
    """([{end, or "gain": its curve (seeds, distances)}], the distances), and print them."""
    curves, ends, _, distances = copying_curves(rows, alike.COPYING)
    shown, lines = [], []
    for curve in curves:
        costs = {end: curve.of(curve.values[:, n, 0]) for n, end in enumerate(ends)}
        costs["gain"] = curve.of(costs["another"].values - costs["same"].values)
        lines += [row_of(cost, distances, end=end) for end, cost in costs.items()]
        shown.append(costs)
    print_table(lines, "Nats per token by distance; gain: what another string costs more than the "
                "same")
    return shown, distances


def copying(rows):
    """What a string costs by distance; dotted: a string that the model has not read."""
    shown, distances = costs_by_distance(rows)
    fig, ax = plots.pyplot().subplots()
    plots.draw_means(ax, distances, [costs["same"] for costs in shown])
    for line, costs in zip(list(ax.lines), shown):
        ax.plot(distances, costs["another"].mean(), ls=":", lw=1, marker="", color=line.get_color())
    ax.plot([], [], color="gray", ls=":", marker="", label="the same for a string not read before")
    mark_guess(ax, rows)
    label_distances(ax, rows, distances)
    ax.set(ylim=(0, None), ylabel="nats per token of the repetition")
    return fig


def print_differences(shown, distances, rows):
    """Print how the curves of `costs_by_distance` differ, two at a time, paired by seed."""
    within = [n for n, distance in enumerate(distances) if FIRST <= distance <= LAST]
    pairs, gains = list(combinations(shown, 2)), gains_by_string(rows)
    if not within:
        return
    means, by_distance = [], []
    for curve in shown:
        for what in ("gain", "same"):
            of_seed = of_mean(curve[what], within)
            mean, std = mean_and_std(of_seed.values())
            means.append({"curve": curve[what].name, "less": "", "of": what,
                          "seeds": seeds_in_words(of_seed), "mean": mean, "± std": std, "t": None,
                          "p": None, "error: seeds": None, "strings": None, "both": None})
    for one, other in pairs:
        names = {"curve": one["gain"].name, "less": other["gain"].name}
        for what in ("gain", "same"):
            x = difference(*(of_mean(curve[what], within) for curve in (one, other)))
            means.append(names | {"of": what, "seeds": seeds_in_words(x.seeds),
                                  "mean": x.mean, "± std": x.std, "t": x.t, "p": x.p})
        errors = errors_of([gains.get(name) for name in names.values()], within)
        for of_pair, numbers in zip(means[-2:], (errors, [None] * 3)):
            of_pair |= dict(zip(("error: seeds", "strings", "both"), numbers))

        differences = [difference(one["gain"].at(n), other["gain"].at(n))
                       for n in range(len(distances))]
        corrected = holm([x.p for x in differences])
        cells = [f"{x.mean:.2f}" if math.isnan(p) else f"{x.mean:.2f} ({p:.3f})"
                 for x, p in zip(differences, corrected)]
        by_distance.append(names | dict(zip(distances, cells)))
    print_table(means, f"Means over the distances from {distances[within[0]]:,} to "
                f"{distances[within[-1]]:,} tokens, and their differences")
    if not pairs:
        return
    print_table(by_distance, "Differences of the gain by distance, and p by Holm's correction")


def of_mean(curve, places):
    """{seed: the mean of a curve (seeds, places) over some places}"""
    means = curve.of(curve.values[:, places].mean(axis=1, keepdims=True))
    return means.at(0)


def errors_of(gains, places):
    """Three standard errors of a difference of mean gains, of two arrays (seeds, strings, places).

    They are NaN where a RoPE scaling was chosen, which has no gains of its own: None.
    """
    if any(of_curve is None for of_curve in gains):
        return [math.nan] * 3
    differences = (gains[0] - gains[1])[:, :, places].mean(axis=2)
    differences = differences[~np.isnan(differences).all(axis=1)]
    differences = differences[:, ~np.isnan(differences).any(axis=0)]
    if min(differences.shape) < 2:
        return [math.nan] * 3
    return standard_errors(differences)


def gain(rows):
    """How much less a string costs if it was read, by distance."""
    shown, distances = costs_by_distance(rows)
    print_differences(shown, distances, rows)
    fig, ax = plots.pyplot().subplots()
    plots.draw_means(ax, distances, [costs["gain"] for costs in shown])
    ax.axhline(0, color="gray", marker="", lw=0.8)
    label_distances(ax, rows, distances)
    ax.set_ylabel("gain (nats per token): what another\nstring costs more than the one read")
    return fig


def label_distances(ax, rows, distances):
    plots.mark_training_length(ax, rows)
    plots.powers_of_2(ax, distances)
    ax.set_xlabel("distance between the string and its repetition (tokens)")


def mark_guess(ax, rows):
    """Where each character is a token, we know what guessing costs."""
    if rows[0].get("tokenizer", "bytes") == "bytes":
        ax.axhline(GUESS, color="gray", marker="", lw=0.8, label="guessing a letter or digit")


def copying_steps(rows):
    """What a string costs by training step, a panel for each distance."""
    curves, ends, steps, distances = copying_curves(rows, alike.COPYING_STEPS)
    same = [curve.of(curve.values[:, ends.index("same")]) for curve in curves]
    lines = [row_of(curve.of(curve.values[:, n]), distances, step=step)
             for curve in same for n, step in enumerate(steps)]
    print_table([line for line in lines if line["seeds"] != "0"],
                "Nats per token of a string that was read")

    fig, axes = plots.pyplot().subplots(1, len(distances), sharey=True, squeeze=False)
    for n, (ax, distance) in enumerate(zip(axes[0], distances)):
        plots.draw_means(ax, steps, [curve.of(curve.values[:, :, n]) for curve in same], ms=4)
        mark_guess(ax, rows)
        ax.set(title=f"repeated after {distance:,} tokens", xlabel="training step")
        ax.locator_params(axis="x", nbins=5)
        ax.xaxis.set_major_formatter("{x:,.0f}")
    axes[0, 0].set(ylim=(0, None), ylabel="nats per token of the repetition")
    return fig


def candidates(rows):
    """How often the right one of several strings is the likeliest, by distance."""
    rows = [row for row in rows if row["right"]]
    if not rows:
        raise UsageError("no row is of several strings: measure with lab.copying --candidates 2")
    distances = [int(distance) for distance in rows[0]["distances"].split()]
    lines = []
    for what, unit in (("nats", 1), ("right", 100), ("beaten", 100)):
        if not all(row[what] for row in rows):         # tables from before have no share beaten
            continue
        curves, numbers = read_curves(rows, alike.CANDIDATES, what)
        for curve in mean_over_items(curves, "string"):
            for place, k in enumerate(numbers):
                of_k = curve.of(unit * curve.values[:, place, : len(distances)])
                if of_k.seeds_measured():
                    lines.append((of_k, what, k))
    shares = {(curve.name, k): curve for curve, what, k in lines if what == "right"}
    table = []
    for curve, what, k in lines:
        table.append(row_of(curve, distances, strings=k, of=what))
        of_two = shares.get((curve.name, 2))
        if what == "right" and k > 2 and of_two:
            expected = [share_among(k, share / 100) for share in of_two.mean()]
            table.append(row_of(curve.of(100 * np.array([expected])), distances, strings=k,
                                of="expected") | {"seeds": ""})
    print_table(table, "Strings in the context, one asked for: its nats per token; in percent, how "
                "often\nit is the likeliest (expected: as well as among two), and how many others "
                "it beats")

    fig, ax = plots.pyplot().subplots()
    for n, ((_, k), curve) in enumerate(shares.items()):
        look = {"color": f"C{n}", "marker": plots.MARKERS[n % len(plots.MARKERS)]}
        plots.draw_mean(ax, distances, curve, f"{curve.name}, {k} strings", **look)
    for k in {k for _, k in shares}:
        ax.axhline(100 / k, color="gray", ls=":", marker="", lw=0.8)
    label_distances(ax, rows, distances)
    ax.set(ylim=(-2, 102), ylabel="the right string is the likeliest (%);\ndotted: by chance")
    return fig


def retrieval(rows):
    """Answers found: a panel for each model by length and depth, then all models by length."""
    cells, means, lengths = retrieval_curves(rows, plain=False)
    curves, by_length = ([curve.of(100 * curve.values) for curve in sorted(x, key=lambda x: x.swe)]
                         for x in (cells, means))
    lines = []
    for curve in by_length:
        for n, length in enumerate(lengths):
            shares = curve.at(n)
            if shares:
                lines.append({"model": curve.name, "length": length,
                              "seeds": seeds_in_words(shares),
                              "found (%)": mean_in_words(shares.values(), 1),
                              "with 95 %": sum(share >= 95 for share in shares.values())})
    print_table(lines, "Answers found, mean over the depths")

    has_curves = len(curves) < 8                       # more could not be told apart
    heights = [1] * math.ceil(len(curves) / 3)
    if has_curves:
        heights.append(1.7)
    fig = plots.pyplot().figure(figsize=(8, 1 + 1.9 * sum(heights)))
    grid = fig.add_gridspec(len(heights), 3, height_ratios=heights)
    depths = sorted({row["depth"] for row in rows})
    for n, curve in enumerate(curves):
        ax = fig.add_subplot(grid[n // 3, n % 3])
        draw_cells(ax, curve, lengths, depths)
        if n % 3 == 0:
            ax.set_ylabel("depth")
    if has_curves:
        ax = fig.add_subplot(grid[-1, :])
        plots.draw_means(ax, lengths, by_length)
        plots.mark_training_length(ax, rows)
        plots.powers_of_2(ax, lengths)
        ax.set(ylim=(-2, 102), ylabel="answers found (%)", xlabel="context (tokens)")
    else:
        fig.supxlabel("context (tokens); the numbers are answers found (%)", fontsize=10)
    return fig


def draw_cells(ax, curve, lengths, depths):
    """The panel of a model: a cell is the mean over its seeds. values: percent, (seeds, ..)"""
    shares = curve.mean().T        # (depths, lengths)
    for (y, x), share in np.ndenumerate(shares):
        if not math.isnan(share):
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
    points = {}                                        # {label: [(value of the flag, row, runs)]}
    for row, group in zip(rows, groups.values()):
        x = as_number(by, group[0].flags[by])
        points.setdefault(group[0].label, []).append((x, row, group))

    fig, ax = plots.pyplot().subplots()
    top = max(run.loss(step) for run in runs if not run.diverged)
    for n, (label, of_label) in enumerate(points.items()):
        x, of_x, groups = zip(*sorted(of_label, key=lambda point: point[0]))
        seeds = plots.seeds_of([[run for run in group if not run.diverged] for group in groups])
        ax.errorbar(x, [row["val_loss"] for row in of_x],
                    np.nan_to_num([row["std"] for row in of_x]), capsize=3, color=f"C{n}",
                    label=f"{label}, {seeds}")
        # A seed that diverged has no loss: the point is the mean of the others.
        bad = [value for value, row in zip(x, of_x) if row["diverged"] != "0"]
        ax.plot(bad, [top * (1.03 + 0.03 * n)] * len(bad), ls="", marker="x", ms=9, mew=2,
                color=f"C{n}")
    ax.plot([], [], ls="", marker="x", ms=9, mew=2, color="gray",
            label="on top: a seed diverged, the point is of the others")
    base = 10
    if by == "lr":
        base = 2
    values = [x for of_label in points.values() for x, _, _ in of_label]
    plots.logarithmic(ax.set_xscale, values, base)
    names = {"lr": "learning rate"}
    ax.set(xlabel=names.get(by, by), ylabel="validation loss (nats per token)")
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


def last_of(log, name):
    """The last number in a column of a log; NaN if there is none."""
    return [math.nan, *column(log, name).values()][-1]


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
    names = ("model", "parameters", "setting", "length")
    # What was timed again counts once, by its last times.
    rows = list({tuple(row[name] for name in names): row for row in rows}.values())
    print_table([{name: row[name] for name in names} | {"ms": statistics.fmean(times(row))}
                 for row in rows], f"Milliseconds of one forward pass; {rows[0]['machine']}")

    plt = plots.pyplot()
    fig, ax = plt.subplots()
    lengths = sorted({int(row["length"]) for row in rows})
    points = {}                                        # {name of a curve: {x: its row}}
    for row in rows:
        size, name = int(row["parameters"]), f"{row['model'].partition(':')[0]}, {row['setting']}"
        if len(lengths) > 1:
            points.setdefault(f"{name}, {size / 1e6:.2g}M", {})[int(row["length"])] = row
        else:
            points.setdefault(name, {})[size] = row
    for name, of_name in points.items():
        means, stds = zip(*(mean_and_std(times(of_name[x])) for x in sorted(of_name)))
        ax.errorbar(sorted(of_name), means, np.nan_to_num(stds), label=name)
    if len(lengths) > 1:
        plots.powers_of_2(ax, lengths)
        ax.set_xlabel("context (tokens)")
    else:
        plots.millions(plt, ax)
        ax.set_xlabel(f"parameters (millions), at {lengths[0]:,} tokens")
    ax.set(yscale="log", ylabel="milliseconds of one forward pass")
    plots.plain_numbers(plt, ax.yaxis)
    return fig


def times(row):
    """The milliseconds of a row of lab.bench, as list."""
    return [float(x) for x in row["ms"].split()]


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
    p.add_argument("--only", nargs="+", default=[], metavar="COLUMN=VALUE", help="of the "
                   "measurements draw those with this value, such as window=0.3")
    p.add_argument("--out", type=plots.figure_path, help="the figure to write [out/FIGURE.png]")
    args = p.parse_args()
    out = args.out or Path("out") / f"{args.figure}.png"
    if args.figure in OF_ROWS:
        draw, kind = OF_ROWS[args.figure]
        rows = read_measurements(args.tables, kind, args.only)
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
