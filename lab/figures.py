"""Draw tables of measurements and of runs, and print the numbers of each figure.

    python -m lab.figures perplexity out/perplexity.tsv mine=out-mine/perplexity.tsv
    python -m lab.figures copying out/copying.tsv                    by distance
    python -m lab.figures gain out/copying.tsv                       what reading the string gains
    python -m lab.figures copying_steps 'out/*copying*.tsv'          by training step
    python -m lab.figures retrieval out/abcdigits.tsv                or the tables of lab.passkey
    python -m lab.figures losses --by lr 'Ours=out/m_lr*' 'Theirs=out/t_lr*'
    python -m lab.figures changes 'Original=out/o-*' 'Mine=out/m-*'   by how much a loss changed
    python -m lab.figures logs Ours=out/m-0 Theirs=out/t-0           losses by training step
    python -m lab.figures latency out/latency.tsv

A curve is a model as train.py names it, or a label as in mine=out/table.tsv. Runs that differ only
in their seed share a curve: it is their mean, over what all of them have measured, with a band of
one standard deviation. Tables that lie beside their runs are refused if runs of one label differ in
more than the seed, as by lab.compare. Where models were measured with several RoPE factors,
`retrieval` and `copying` show the best at each place, chosen by its result, among those that all
seeds have. The rows of a figure of measurements are written beside it, as .tsv, if you name it with
--out.
"""
import math
import re
import statistics
from argparse import ArgumentTypeError
from pathlib import Path

import numpy as np

from lab.compare import (
    Run,
    best_choice,
    changes_of,
    get_groups,
    last_common_step,
    mean_and_std,
    read_flags,
    read_runs,
)
from lab.perplexity import positions
from support.cli import Parser, UsageError, cli
from support.tables import named_paths, print_table, read_table, read_tables, write_table

STYLE = Path(__file__).with_name("figures.mplstyle")
MARKERS = "os^DvPX"
GUESS = math.log(62)                                   # nats of a letter or digit without knowledge


def pyplot():
    """matplotlib.pyplot in our style, for files."""
    try:
        import matplotlib
    except ImportError:
        raise UsageError("figures need matplotlib: pip install matplotlib") from None
    matplotlib.use("agg")
    import matplotlib.pyplot as plt
    plt.style.use(STYLE)
    return plt


# ----------------------------------------------------------------- curves: what is in one mean

def curves(rows, *apart):
    """{name of a curve: {seed: its rows}}: rows that differ only in the seed and some columns.

    apart: the columns by which a curve goes on, or over which a mean is taken, and the values.
    """
    columns = dict.fromkeys(name for row in rows for name in row
                            if name not in (*apart, "seed", "step", "hash"))
    found = {}
    for row in rows:
        of_curve = found.setdefault(tuple(row.get(name, "") for name in columns), {})
        of_curve.setdefault(row["seed"], []).append(row)
    keys = [dict(zip(columns, key)) for key in found]
    return {name_of(key, keys): seeds for key, seeds in zip(keys, found.values())}


def require_equal_flags(words):
    """Raise UsageError if runs of one label differ in more than the seed, where they are known.

    words: tables as on a command line. Beside a table of train.py's folder are the run's flags.
    """
    runs = {}
    for label, path in named_paths(words):
        folder = Path(path).parent
        if (folder / "flags.txt").exists():
            flags = read_flags(folder)
            name = label or f"{flags['model']}, {flags['parameters']} parameters"
            runs[name, folder] = Run(name, flags, {}, {}, False, {})
    get_groups(runs.values())


def print_steps(rows):
    """Print after how many steps a model was measured, if its seeds differ in it."""
    steps = {}
    for row in rows:
        steps.setdefault((row["model"], row["parameters"]), set()).add(int(row["step"]))
    for (model, _), found in steps.items():
        if len(found) > 1:
            print(f"{model}: its runs were measured after {min(found):,} to {max(found):,} steps")


def shared(groups, unit):
    """{key: its rows}, less those for whose document, or other unit, another key has no row.

    groups: {key: rows}, where a key is a seed, or a (factor, seed).
    """
    units = set.intersection(*({row[unit] for row in rows} for rows in groups.values()))
    if not units:
        model = next(iter(groups.values()))[0]["model"]
        raise UsageError(f"the seeds of {model} have no {unit} in common: measure them on one text")
    return {key: [row for row in rows if row[unit] in units] for key, rows in groups.items()}


def by_factor(seeds):
    """{(RoPE factor, seed): its rows} of {seed: rows}."""
    found = {}
    for seed, rows in seeds.items():
        for row in rows:
            found.setdefault((row["factor"], seed), []).append(row)
    return found


def best_factor(costs, where):
    """(factor, {seed: its cost}) of the RoPE factor that costs least. costs: {(factor, seed): cost}

    where: what was measured, in words. Raises UsageError if no factor has all seeds.
    """
    choices = {}
    for (factor, seed), cost in costs.items():
        choices.setdefault(factor, {})[seed] = cost
    factor = best_choice(choices)
    if factor is None:
        raise UsageError(f"no RoPE factor {where} was measured with all seeds: measure them alike")
    return factor, choices[factor]


def name_of(curve, others):
    """The name of a curve: its model, and what tells it from others of that model."""
    others = [other for other in others if other["model"] == curve["model"]]
    name = curve["model"]
    if len({other["parameters"] for other in others}) > 1:
        name += f", {int(curve['parameters']) / 1e6:.2g}M"
    for column, x in curve.items():
        if column == "swe" and x:
            name += " + SWE"
        elif column == "factor" and x:
            name += f", RoPE ×{x}"
        elif column not in ("model", "parameters", "swe", "factor"):
            if len({other[column] for other in others}) > 1:
                name += f", {column} {x}"
    return name


def numbers(row):
    """The numbers in the column nats."""
    return np.array(row["nats"].split(), dtype=float)


def one_of(rows, column):
    """The value that all rows have in a column."""
    values = {row[column] for row in rows}
    if len(values) > 1:
        raise UsageError(f"the tables differ in {column} ({' | '.join(sorted(values))}): draw "
                         "those that are equal")
    return values.pop()


# ----------------------------------------------------------------------- what the figures share

def looks(names):
    """{name of a curve: its look}: one colour and marker for a model, one line for a setting."""
    models, found = [], {}
    for name in names:
        model, setting = model_and_setting(name)
        if model not in models:
            models.append(model)
        settings = [model_and_setting(other)[1] for other in names
                    if model_and_setting(other)[0] == model]
        n = settings.index(setting)
        found[name] = {"color": f"C{models.index(model)}", "ls": ("-", "--", "-.", ":")[n % 4],
                       "marker": MARKERS[models.index(model) % len(MARKERS)]}
        if setting:
            found[name]["mfc"] = "white"
    return found


def model_and_setting(name):
    """The two parts of the name of a curve: the model, and what was changed after training."""
    model, mark, setting = re.match(r"(.*?)( \+ |, RoPE ×|$)(.*)", name).groups()
    return model, (mark + setting).strip(" ,")


def draw_mean(ax, x, columns, label, **look):
    """Draw a curve and a band of one deviation. columns: for each x the values of the seeds."""
    means, stds = zip(*(mean_and_std(column) for column in columns))
    means, stds = np.array(means), np.nan_to_num(stds)           # one seed has no deviation
    counts = sorted({len(column) for column in columns})
    seeds = "1 seed" if counts == [1] else f"{' to '.join(map(str, counts))} seeds"
    ax.plot(x, means, label=f"{label}, {seeds}", **look)
    ax.fill_between(x, means - stds, means + stds, alpha=0.25, color=look["color"], lw=0)


def mean_in_words(of_seeds, digits):
    """"mean ± deviation" of a number for each seed."""
    mean, std = mean_and_std(of_seeds)
    mean += 1e-9                                       # 98.25 is 98.3
    return f"{mean:.{digits}f}" + ("" if math.isnan(std) else f" ± {std:.{digits}f}")


def mark_training_length(ax, rows):
    for T in sorted({int(row["seq_len"]) for row in rows}):
        ax.axvline(T, color="black", ls=(0, (5, 3)), lw=1, marker="",
                   label=f"training length, {T} tokens")


def powers_of_2(ax, x):
    """A logarithmic axis with a tick at each x."""
    ax.set_xscale("log", base=2)
    ax.set_xticks(x, [f"{n:,}" for n in x])
    ax.minorticks_off()


def plain_numbers(plt, axis, at=(1, 2, 5)):
    """Ticks of a logarithmic axis: `at` times a power of ten, as whole numbers."""
    axis.set_major_locator(plt.LogLocator(subs=at))
    axis.set_major_formatter("{x:,.0f}")
    axis.set_minor_locator(plt.NullLocator())


def figure_path(text):
    """The type of --out: a name that ends as figures do."""
    path = Path(text)
    if path.suffix not in (".png", ".pdf", ".svg"):
        raise ArgumentTypeError(f"{text!r} names no figure: end it with .png, .pdf or .svg")
    return path


def save(fig, path):
    """Write a figure, with one legend of all its axes below it."""
    handles = {}
    for ax in fig.axes:
        for handle, label in zip(*ax.get_legend_handles_labels()):
            handles[label] = handle
    if handles:
        fig.legend(handles.values(), handles, loc="outside lower center", ncols=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path)
    print(f"wrote {path}")


def keep_rows(path, rows):
    """Write the rows of a figure beside it. Raises UsageError if rows that are there would go."""
    if path.exists():
        kept = {tuple(row.values()) for row in rows}
        lost = [row for row in read_table(path) if tuple(row.values()) not in kept]
        if lost:
            raise UsageError(f"{path} already holds {len(lost)} other rows: move it away, or "
                             "choose another --out")
    write_table(path, rows)


# ------------------------------------------------------------------------- one function a figure

def perplexity(plt, rows):
    """Perplexity by position: the mean over the documents that all seeds of a curve have.

    More than five curves are drawn in a panel for each model, beside the first curve.
    """
    x = positions(int(one_of(rows, "length")))
    found, lines = {}, []
    for name, seeds in curves(rows, "document", "nats").items():
        of_seeds = list(shared(seeds, "document").values())
        y = [np.exp(np.mean([numbers(row) for row in of_seed], axis=0)) for of_seed in of_seeds]
        found[name] = list(zip(*y))
        lines.append([name, len(y), len(of_seeds[0]),
                      *(mean_in_words(column, 2) for column in found[name])])
    print_table(["model", "seeds", "documents", *x], lines, "Perplexity by tokens of context")

    panels = {"": list(found)}
    if len(found) > 5:
        panels = {}
        for name in list(found)[1:]:
            panels.setdefault(model_and_setting(name)[0], [list(found)[0]]).append(name)
    columns = min(len(panels), 3)
    fig, axes = plt.subplots(math.ceil(len(panels) / columns), columns, sharex=True, sharey=True,
                             squeeze=False)
    fig.set_figheight(2.5 + 2 * len(axes))
    for ax in axes.flat[len(panels) :]:
        ax.axis("off")
    for ax, (title, names) in zip(axes.flat, panels.items()):
        for n, name in enumerate(names):
            look, label = looks(found)[name], name
            if title:                                  # the title has the name
                look = {"color": f"C{n}", "marker": MARKERS[n], "ms": 3}
                label = name if n == 0 else model_and_setting(name)[1] or "the ablation as trained"
            draw_mean(ax, x, found[name], label, **look)
        mark_training_length(ax, rows)
        powers_of_2(ax, x[:: 4 if title else 2])
        ax.set(yscale="log", title=title)
        plain_numbers(plt, ax.yaxis, (1, 2, 3, 4, 5, 7))
        ax.tick_params(labelbottom=True)
    axes[-1, 0].set_xlabel("position (tokens of context)")
    fig.supylabel("perplexity per token", fontsize=10)
    return fig


def by_end(rows):
    """{name of a curve: {end: costs (seeds, distances)}} of rows of lab.copying.

    If there are several RoPE factors, the best one at each distance makes one more curve.
    """
    names = one_of([{"ends": "same another"} | row for row in rows], "ends").split()

    def means(groups):
        """{key: the means over the strings that all keys have (ends, distances)}"""
        return {key: np.mean([numbers(row) for row in found], axis=0).reshape(len(names), -1)
                for key, found in shared(groups, "string").items()}

    found, best = {}, {}
    apart = ("string", "nats", "first_right", "four_right")
    for name, seeds in curves(rows, "factor", *apart).items():
        factors = {row["factor"] for of_seed in seeds.values() for row in of_seed}
        if len(factors) > 1:
            best[f"{name} + best RoPE scaling"] = best_by_distance(means(by_factor(seeds)), names)
        for factor in factors:
            if factor == "" or len(factors) == 1:
                plain = {seed: of_seed for (x, seed), of_seed in by_factor(seeds).items()
                         if x == factor}
                of_factor = name
                if factor:
                    of_factor += f", RoPE ×{factor}"
                found[of_factor] = means(plain)
    return {name: {end: np.array([costs[n] for costs in of_seeds.values()])
                   for n, end in enumerate(names)} for name, of_seeds in (found | best).items()}


def best_by_distance(costs, names):
    """{seed: costs (ends, distances)} of the factor with which `same` costs least at each distance.

    costs: {(factor, seed): (ends, distances)}; names: of the ends.
    """
    best = {}
    for n in range(next(iter(costs.values())).shape[1]):
        same = {key: of_key[names.index("same"), n] for key, of_key in costs.items()}
        factor, of_seeds = best_factor(same, "at these distances")
        for seed in of_seeds:
            best.setdefault(seed, []).append(costs[factor, seed][:, n])
    return {seed: np.stack(columns, axis=1) for seed, columns in best.items()}


def print_copying(found, x):
    """Print a row for each curve and end, and the gain."""
    lines = []
    for name, ends in found.items():
        ends = ends | {"gain": ends["another"] - ends["same"]}
        lines += [[name, len(costs), end, *(mean_in_words(column, 2) for column in costs.T)]
                  for end, costs in ends.items()]
    print_table(["model", "seeds", "end", *x], lines, "Nats per token by distance; gain: what "
                "another string costs more than the same")


def copying(plt, rows):
    """What a string costs by distance; dotted: a string that the model has not read."""
    fig, ax = plt.subplots()
    x = [int(distance) for distance in one_of(rows, "distances").split()]
    found = by_end(rows)
    for name, ends in found.items():
        look = looks(found)[name]
        draw_mean(ax, x, ends["same"].T, name, **look)
        ax.plot(x, ends["another"].mean(0), ls=":", lw=1, marker="", color=look["color"])
    ax.plot([], [], color="gray", ls=":", marker="", label="the same for a string not read before")
    if all(row.get("tokenizer", "bytes") == "bytes" for row in rows):
        ax.axhline(GUESS, color="gray", marker="", lw=0.8, label="guessing a letter or digit")
    mark_training_length(ax, rows)
    powers_of_2(ax, x)
    ax.set(ylim=(0, None), xlabel="distance between the string and its repetition (tokens)",
           ylabel="nats per token of the repetition")
    print_copying(found, x)
    return fig


def gain(plt, rows):
    """How much less a string costs if it was read, by distance."""
    fig, ax = plt.subplots()
    x = [int(distance) for distance in one_of(rows, "distances").split()]
    found = by_end(rows)
    for name, ends in found.items():
        draw_mean(ax, x, (ends["another"] - ends["same"]).T, name, **looks(found)[name])
    ax.axhline(0, color="gray", marker="", lw=0.8)
    mark_training_length(ax, rows)
    powers_of_2(ax, x)
    ax.set(xlabel="distance between the string and its repetition (tokens)",
           ylabel="gain (nats per token): what another\nstring costs more than the one read")
    print_copying(found, x)
    return fig


def copying_steps(plt, rows):
    """What a string costs by training step, a panel for each distance."""
    x = [int(distance) for distance in one_of(rows, "distances").split()]
    fig, axes = plt.subplots(1, len(x), sharey=True, squeeze=False)
    by_step, lines = {}, []
    for step in sorted({int(row["step"]) for row in rows}):
        for name, ends in by_end([row for row in rows if row["step"] == str(step)]).items():
            by_step.setdefault(name, {})[step] = ends["same"]
    for name, costs in by_step.items():
        for n, ax in enumerate(axes[0]):
            draw_mean(ax, list(costs), [of_step[:, n] for of_step in costs.values()], name, ms=4,
                      **looks(by_step)[name])
        lines += [[name, step, len(of_step), *(mean_in_words(column, 2) for column in of_step.T)]
                  for step, of_step in costs.items()]
    for ax, distance in zip(axes[0], x):
        if all(row.get("tokenizer", "bytes") == "bytes" for row in rows):
            ax.axhline(GUESS, color="gray", marker="", lw=0.8, label="guessing a letter or digit")
        ax.set(title=f"repeated after {distance:,} tokens", xlabel="training step", ylim=(0, None))
        ax.locator_params(axis="x", nbins=5)
        ax.xaxis.set_major_formatter("{x:,.0f}")
    axes[0, 0].set_ylabel("nats per token of the repetition")
    print_table(["model", "step", "seeds", *x], lines, "Nats per token of a string that was read")
    return fig


def retrieval(plt, rows):
    """Answers found: a panel for each model by length and depth, then all models by length."""
    rows = sorted(rows, key=lambda row: row["swe"])
    cells = {}
    for name, seeds in curves(rows, "length", "depth", "factor", "accuracy").items():
        if len({row["factor"] for found in seeds.values() for row in found}) > 1:
            name += " + best RoPE scaling"
        cells[name] = best_cells(seeds)
    lengths = sorted({length for found in cells.values() for length, _ in found})
    depths = sorted({depth for found in cells.values() for _, depth in found})
    has_curves = len(cells) < 8                        # more could not be told apart
    lines = math.ceil(len(cells) / 3)
    heights = [1] * lines
    if has_curves:
        heights.append(1.7)
    fig = plt.figure(figsize=(8, 1 + 1.9 * sum(heights)))
    grid = fig.add_gridspec(len(heights), 3, height_ratios=heights)

    # A panel for each model. A cell is the mean over the seeds.
    for n, (name, found) in enumerate(cells.items()):
        ax = fig.add_subplot(grid[n // 3, n % 3])
        shares = np.full((len(depths), len(lengths)), np.nan)
        for (length, depth), of_seed in found.items():
            share = 100 * statistics.fmean(of_seed.values())
            y, x = depths.index(depth), lengths.index(length)
            shares[y, x] = share
            ax.text(x, y, f"{share + 1e-9:.0f}", ha="center", va="center", fontsize=7,
                    color="black" if share > 45 else "white")
        ax.imshow(shares, vmin=0, vmax=100, cmap="cividis", aspect="auto")
        ax.set_xticks(range(len(lengths)), [f"{x:,}" for x in lengths], rotation=90)
        ax.set_yticks(range(len(depths)), depths)
        ax.set_title(name.replace(" + best", "\n+ best"), fontsize=9)
        ax.set_ylabel("depth" if n % 3 == 0 else "")

    # The curves.
    table = []
    for name, found in cells.items():
        for length, of_seed in mean_by_length(found).items():
            column = [100 * share for share in of_seed.values()]
            enough = sum(share >= 95 for share in column)
            table.append([name, length, mean_in_words(column, 1), f"{enough} of {len(column)}"])
    print_table(["model", "length", "found (%)", "seeds with 95 %"], table,
                "Answers found, mean over the depths")
    if has_curves:
        ax = fig.add_subplot(grid[-1, :])
        for name, found in cells.items():
            means = mean_by_length(found)
            columns = [[100 * share for share in of_seed.values()] for of_seed in means.values()]
            draw_mean(ax, list(means), columns, name, **looks(cells)[name])
        mark_training_length(ax, rows)
        powers_of_2(ax, lengths)
        ax.set(ylim=(-2, 102), ylabel="answers found (%)", xlabel="context (tokens)")
    else:
        fig.supxlabel("context (tokens); the numbers are answers found (%)", fontsize=10)
    return fig


def best_cells(seeds):
    """{(length, depth): {seed: share}} of {seed: rows}, with the best RoPE factor in each cell."""
    costs = {}
    for key, rows in by_factor(seeds).items():
        for row in rows:
            place = int(row["length"]), float(row["depth"])
            costs.setdefault(place, {})[key] = -float(row["accuracy"])
    best = {}
    for (length, depth), of_cell in sorted(costs.items()):
        _, of_seeds = best_factor(of_cell, f"at length {length}, depth {depth}")
        best[length, depth] = {seed: -cost for seed, cost in of_seeds.items()}
    return best


def mean_by_length(cells):
    """{length: {seed: mean share over the depths}}, of seeds that have all depths of a length."""
    found = {}
    for (length, _), shares in cells.items():
        for seed, share in shares.items():
            found.setdefault(length, {}).setdefault(seed, []).append(share)
    return {length: {seed: statistics.fmean(shares) for seed, shares in of_seed.items()
                     if len(shares) == max(map(len, of_seed.values()))}
            for length, of_seed in found.items()}


def losses(plt, words, by="lr"):
    """The validation loss of runs, at the last common step, by a flag such as lr or parameters."""
    fig, ax = plt.subplots()
    runs = read_runs(words)
    found, step = {}, last_common_step(runs)
    for group in get_groups(runs, by).values():
        point = [run.loss(step) for run in group]
        found.setdefault(group[0].label, {})[float(group[0].flags[by])] = point
    top = max(x for points in found.values() for values in points.values() for x in values
              if not math.isnan(x))
    for n, (label, points) in enumerate(found.items()):
        x = sorted(points)
        stats = [mean_and_std([y for y in points[value] if not math.isnan(y)]) for value in x]
        means, stds = zip(*stats)
        seeds = max(map(len, points.values()))
        ax.errorbar(x, means, np.nan_to_num(stds), capsize=3, color=f"C{n}",
                    label=f"{label}, {seeds} seed" + ("s" if seeds > 1 else ""))
        # A seed that diverged has no loss: the point is the mean of the others.
        bad = [value for value in x if any(math.isnan(y) for y in points[value])]
        ax.plot(bad, [top * (1.03 + 0.03 * n)] * len(bad), ls="", marker="x", ms=9, mew=2,
                color=f"C{n}")
    ax.plot([], [], ls="", marker="x", ms=9, mew=2, color="gray",
            label="on top: a seed diverged, the point is of the others")
    ax.set_xscale("log", base=2 if by == "lr" else 10)
    names = {"lr": "learning rate"}
    ax.set(xlabel=names.get(by, by), ylabel="validation loss (nats per token)")
    return fig


def changes(plt, words):
    """The change of the validation loss against the first group, paired by seed."""
    runs = read_runs(words)
    groups, step = list(get_groups(runs).items()), last_common_step(runs)
    fig, ax = plt.subplots(figsize=(8, 1.2 + 0.4 * len(groups)))
    for n, (_, group) in enumerate(groups):
        mean, std = (0, 0) if n == 0 else mean_and_std(changes_of(group, groups[0][1], step))
        ax.errorbar(mean, n, xerr=np.nan_to_num(std), marker="o", capsize=4, color="C0")
    ax.axvline(0, color="gray", lw=0.8, marker="", zorder=0)
    ax.set_yticks(range(len(groups)), [f"{name}, {len(group)} seeds" for name, group in groups])
    ax.invert_yaxis()
    ax.set_xlabel(f"validation loss minus that of {groups[0][0]} (nats per token)")
    return fig


def logs(plt, words):
    """Training losses with validation losses as points, and gradient norms, by step."""
    fig, (top, bottom) = plt.subplots(2, 1, figsize=(8, 7), sharex=True)
    for n, (label, path) in enumerate(named_paths(words)):
        log = read_table(Path(path) / "log.tsv")
        for ax, column, look in ((top, "loss", {"marker": "", "label": label or path}),
                                 (bottom, "grad_norm", {"marker": ""}),
                                 (top, "val_loss", {"ls": "", "mec": "black"})):
            found = [(int(row["step"]), float(row[column])) for row in log if row.get(column)]
            if found:
                ax.plot(*zip(*found), color=f"C{n}", **look)
    top.set(ylabel="training loss (nats per token);\npoints: validation")
    bottom.set(xlabel="optimizer step", ylabel="gradient norm before clipping", yscale="log")
    return fig


def latency(plt, words):
    """Milliseconds of a forward pass, of tables of lab.bench: by length, or else by parameters."""
    rows = [row for _, path in named_paths(words) for row in read_table(path)
            if row["what"].startswith("forward")]
    lengths = sorted({int(row["length"]) for row in rows})
    fig, ax = plt.subplots()
    found = {}
    for row in rows:
        size, name = int(row["parameters"]), f"{row['model'].partition(':')[0]}, {row['setting']}"
        x = size
        if len(lengths) > 1:
            x, name = int(row["length"]), f"{name}, {size / 1e6:.2g}M"
        found.setdefault(name, {})[x] = np.array(row["ms"].split(), float)
    for name, points in found.items():
        ax.errorbar(sorted(points), [points[x].mean() for x in sorted(points)],
                    [np.nan_to_num(mean_and_std(points[x])[1]) for x in sorted(points)],
                    label=name)
    if len(lengths) > 1:
        powers_of_2(ax, lengths)
        ax.set_xlabel("context (tokens)")
    else:
        ax.set(xscale="log", xlabel=f"parameters (millions), at {lengths[0]:,} tokens")
        plain_numbers(plt, ax.xaxis)
        ax.xaxis.set_major_formatter(lambda n, _: f"{n / 1e6:g}")
    ax.set(yscale="log", ylabel="milliseconds of one forward pass")
    plain_numbers(plt, ax.yaxis)
    lines = [[row["model"], int(row["parameters"]), row["setting"], int(row["length"]),
              statistics.fmean(map(float, row["ms"].split())), row["parts_ms"] or None]
             for row in rows]
    print_table(["model", "parameters", "setting", "length", "ms", "its parts alone"], lines,
                f"Milliseconds of one forward pass; {rows[0]['machine']}")
    return fig


OF_ROWS = {"perplexity": perplexity, "copying": copying, "gain": gain,
           "copying_steps": copying_steps, "retrieval": retrieval}
OF_RUNS = {"losses": losses, "changes": changes, "logs": logs, "latency": latency}


def main():
    p = Parser(__doc__)
    p.add_argument("figure", choices=[*OF_ROWS, *OF_RUNS])
    p.add_argument("tables", nargs="+", metavar="TSV", help="tables, runs of train.py, or "
                   "label=path; for many at once label='pattern*'")
    p.add_argument("--by", default="lr", help="for losses: the flag of train.py on the x axis [lr]")
    p.add_argument("--out", type=figure_path, help="the figure to write [out/FIGURE.png]")
    args = p.parse_args()
    plt, out = pyplot(), args.out or Path("out") / f"{args.figure}.png"
    if args.figure in OF_ROWS:
        require_equal_flags(args.tables)
        rows = read_tables(args.tables, by_step=args.figure == "copying_steps")
        if args.figure != "copying_steps":
            print_steps(rows)
        if args.out:
            keep_rows(out.with_suffix(".tsv"), rows)
        fig = OF_ROWS[args.figure](plt, rows)
    elif args.figure == "losses":
        fig = losses(plt, args.tables, args.by)
    else:
        fig = OF_RUNS[args.figure](plt, args.tables)
    save(fig, out)


if __name__ == "__main__":
    cli(main)
