"""Loss against size under one token budget (section "Scaling Efficiency" and its appendix).

    bash runs/scaling.sh                             trains the runs and draws them
    python -m experiments.scaling RUN...             draws runs of your own
    python -m experiments.scaling                    the paper's sizes, built and counted

runs/paper.sh has the paper's runs: five Multiscreens and four Transformers of 4M to 4B parameters,
2^38 tokens each. Its 4B model is undertrained and lies off the line: --unfitted 64.

A line, loss = a + b ln(size), is fitted to the mean losses of each family by least squares. Both
families reach a common range of losses. At L in its middle, the saving is
1 - N_multiscreen(L) / N_transformer(L), where N(L) = exp((L - a) / b). Its standard deviation
comes from the residuals of both lines.

At a small scale the paper's learning rates for its smallest models, 2^-4 and 1e-3, are not tuned,
and a family that learns fast seems to need fewer parameters. For a model with runs at several
rates, the rate with the best mean over the seeds is fitted and drawn; the fits at the paper's rates
are printed, too. residual: the loss above the line against total parameters. If the residuals are
far above the deviation of the losses, the family does not follow a line, and the saving depends on
the size. So a last table uses no line: for each size of one family, it interpolates the size at
which the other family has the same loss.

The paper prints no losses. It states: Multiscreen needs roughly 30 % fewer parameters at similar
validation loss. Against non-embedding parameters the advantage remains, and the trend is even
closer to linear. Against Psi it is clean. Its sizes: Multiscreen 4M, 28M, 286M, 1.3B, 4B (Psi 8,
16, 32, 48, 64), Transformer 8M, 45M, 353M, 1.3B.
"""
import math

import numpy as np
import torch

from baselines import build, count_parameters, recipe
from baselines.transformer import SIZES
from experiments.common import mean_and_std, percent, pyplot, save_figure
from experiments.runs import keep_runs, read_runs, runs_parser
from experiments.style import WIDTH, look, millions_axis
from support.cli import UsageError, cli
from support.table import MAY_DIFFER, print_table

PAPER = {                                              # parameters: total, non-embedding
    "multiscreen, psi 8": (4_134_146, 917_698),
    "multiscreen, psi 16": (27_546_626, 14_680_834),
    "multiscreen, psi 32": (286_347_266, 234_884_098),
    "multiscreen, psi 48": (1_304_884_226, 1_189_092_098),
    "multiscreen, psi 64": (3_963_961_346, 3_758_108_674),
    "transformer:8M": (7_613_312, 1_180_416),
    "transformer:45M": (44_609_024, 18_877_440),
    "transformer:353M": (353_453_056, 301_989_888),
    "transformer:1.3B": (1_310_935_040, 1_208_008_704),
}
SIZE_COLUMNS = ["model", "N_L", "N_H", "d_E", "parameters", "non-embedding", "as in the paper"]
# Losses are compared only between runs that agree in these.
BUDGET = ("data", "corpus", "tokenizer", "seq_len", "batch_tokens", "steps")
FAMILIES = ("multiscreen", "transformer")
AXES = {"total": "parameters (millions)", "non_embedding": "non-embedding parameters (millions)",
        "psi": r"$\Psi$ of Multiscreen"}
COLUMNS = ["model", "psi", "total", "non_embedding", "lr", "seeds", "val_loss", "std", "diverged",
           "residual"]
FITS = ["rates", "size", "multiscreen", "off_m", "transformer", "off_t", "at_loss",
        "N_multiscreen", "N_transformer", "saving", "std", "paper"]
BETWEEN = ["size", "at_loss", "N_multiscreen", "N_transformer", "saving", "std"]
STATED = {"total": "roughly 30 %", "non_embedding": "preserved"}


# ------------------------------------------------------------------------------------ lines

def fit_line(sizes, losses):
    """(a, b) of the line loss = a + b ln(size), or None for fewer than two different sizes."""
    if len(set(sizes)) < 2:
        return None
    b, a = np.polyfit(np.log(sizes), losses, 1)
    return float(a), float(b)


def size_at(loss, line):
    """The size at which a fitted line has that loss."""
    a, b = line
    return math.exp((loss - a) / b)


def off_line(sizes, losses):
    """The standard error of the residuals of the fitted line, in nats; NaN for two points."""
    if len(sizes) < 3:
        return math.nan
    a, b = fit_line(sizes, losses)
    residuals = np.array(losses) - a - b * np.log(sizes)
    return math.sqrt((residuals**2).sum() / (len(sizes) - 2))


def variance_at(loss, sizes, losses):
    """The variance of ln(size_at(loss)) by the residuals of the line; NaN for two points."""
    x = np.log(sizes)
    a, b = fit_line(sizes, losses)
    offset = (loss - a) / b - x.mean()
    relative = off_line(sizes, losses) / b
    return relative**2 * (1 / len(x) + offset**2 / ((x - x.mean()) ** 2).sum())


def saving(multiscreen, transformer):
    """(loss, N_multiscreen, N_transformer, 1 - their ratio, its standard deviation).

    In the middle of the common losses. Each argument: (sizes, losses). None if no loss is common,
    or if a line does not fall. The deviation is that of the fits, to first order.
    """
    lines = fit_line(*multiscreen), fit_line(*transformer)
    if not all(line and line[1] < 0 for line in lines):
        return None
    low = max(min(multiscreen[1]), min(transformer[1]))
    high = min(max(multiscreen[1]), max(transformer[1]))
    if low > high:
        return None
    loss = (low + high) / 2
    N_m, N_t = (size_at(loss, line) for line in lines)
    std = N_m / N_t * math.sqrt(variance_at(loss, *multiscreen) + variance_at(loss, *transformer))
    return loss, N_m, N_t, 1 - N_m / N_t, std


# ----------------------------------------------------------------------------------- models

def check_runs(runs):
    """Raise UsageError if runs differ in budget, have not ended, or come twice."""
    for name in BUDGET:
        values = sorted({run.flags.get(name, "") for run in runs})
        if len(values) > 1:
            raise UsageError(f"the runs differ in {name} ({', '.join(values)}): draw them "
                             "separately")
    for run in runs:
        if run.end not in ("", "diverged"):
            raise UsageError(f"{run.label} is {run.end}: rerun its command to resume it")


def model_rows(runs):
    """A dict of COLUMNS and `losses` for each model and rate, by family, size and rate."""
    groups, rows = {}, []
    for run in runs:
        key = tuple(run.flags[name] for name in ("model", "psi", "parameters", "lr"))
        losses, first = groups.setdefault(key, ({}, run))
        if run.seed in losses:
            raise UsageError(f"{run.label} has seed {run.seed} twice at one rate: "
                             "experiments.compare shows what differs")
        losses[run.seed] = run.loss_at()
        other = [x for x in run.flags if first.flags.get(x, run.flags[x]) != run.flags[x]]
        if other := [x for x in other if x not in MAY_DIFFER]:
            print(f"note: {run.label}, seed {run.seed}, and {first.label}, seed {first.seed}, "
                  f"count as one model, but differ in {', '.join(other)}: experiments.compare "
                  "shows how")
        began = "it began with the weights of --init" * bool(run.flags.get("init_weights"))
        for words in filter(None, (began, run.flags.get("changes"))):
            print(f"note: {run.label}, seed {run.seed}: {words}")
    n_vocab = 257 if runs[0].flags["tokenizer"] == "bytes" else 50257
    for (name, psi, total, lr), (losses, first) in groups.items():
        sizes, psi = {"vocab_size": n_vocab}, None
        if name.startswith("multiscreen"):
            psi, d_E = int(first.flags["psi"]), first.flags.get("d_E", "None")
            sizes |= {"psi": psi, "d_E": None if d_E == "None" else int(d_E)}
        with torch.device("meta"):
            model = build(name, sizes)
        embedding = n_vocab * model.config.d_E
        mean, std, diverged = mean_and_std(losses.values())
        rows.append({"model": name, "psi": psi, "total": int(total),
                     "non_embedding": int(total) - embedding, "lr": float(lr),
                     "seeds": len(losses), "val_loss": mean, "std": std, "diverged": diverged,
                     "residual": None, "losses": losses})
    return sorted(rows, key=lambda row: (row["model"].partition(":")[0], row["total"], row["lr"]))


def at_paper_rates(rows):
    """The rows of the paper's learning rates."""
    return [row for row in rows if row["lr"] == recipe(row["model"])["lr"]]


def at_best_rates(rows):
    """For each model the row of its least loss."""
    best = {}
    for row in rows:
        other = best.setdefault((row["model"], row["total"]), row)
        if row["val_loss"] < other["val_loss"] or math.isnan(other["val_loss"]):
            best[row["model"], row["total"]] = row
    return [*best.values()]


def at_parabolas(rows):
    """For each model its loss at the best of all rates, if losses lie on a parabola in log(rate).

    The parabola goes through the best rate and its neighbours, also of each seed. A model of fewer
    than three rates keeps its best row.
    """
    found = []
    for best in at_best_rates(rows):
        rates = [row for row in rows if (row["model"], row["total"]) ==
                 (best["model"], best["total"]) and not math.isnan(row["val_loss"])]
        if len(rates) > 2:
            first = min(max(rates.index(best) - 1, 0), len(rates) - 3)
            three = rates[first : first + 3]
            lr = [row["lr"] for row in three]
            losses = {seed: lowest(lr, [row["losses"].get(seed, math.nan) for row in three])
                      for seed in best["losses"]}
            best = best | {"losses": losses,
                           "val_loss": lowest(lr, [row["val_loss"] for row in three])}
        found.append(best)
    return found


def lowest(rates, losses):
    """The least loss of the parabola through three, between them; if it opens down, their least."""
    x = np.log(rates)
    a, b, c = np.polyfit(x, losses, 2)
    if a <= 0:
        return min(losses)
    return float(np.polyval((a, b, c), np.clip(-b / (2 * a), x.min(), x.max())))


def set_residuals(rows, unfitted):
    """Fill in the column residual of one row for each model."""
    for family in FAMILIES:
        if line := fit_line(*points(rows, family, "total", unfitted)[:2]):
            for row in rows:
                if row["model"].startswith(family):
                    row["residual"] = row["val_loss"] - line[0] - line[1] * math.log(row["total"])


def points(rows, family, key, leave_out=()):
    """(sizes, losses, deviations) of the models of a family that have a size of that kind."""
    chosen = [row for row in rows if row["model"].startswith(family) and row[key]
              and row["psi"] not in leave_out and not math.isnan(row["val_loss"])]
    return [[row[name] for row in chosen] for name in (key, "val_loss", "std")]


def fit_rows(rates, rows, unfitted):
    """Rows of FITS: the change of the loss when a size doubles, and the sizes at an equal loss.

    off_m, off_t: the standard errors about the lines, by off_line.

    rows: one for each model.
    """
    table = []
    for key in AXES:
        found = [points(rows, family, key, unfitted)[:2] for family in FAMILIES]
        lines = [fit_line(*sizes) for sizes in found]
        falls = []
        for line, sizes in zip(lines, found):
            falls += [line[1] * math.log(2), off_line(*sizes)] if line else [None, None]
        loss, N_m, N_t, saved, std = saving(*found) or [None] * 5
        table.append([rates, key, *falls, loss, N_m, N_t, percent(saved, 0), percent(std, 0),
                      STATED.get(key)])
    return table


def size_between(loss, sizes, losses):
    """The size that has a loss, linear in ln(size) between neighbours.

    NaN beyond the ends, without sizes, and where the losses do not fall with size.
    """
    falls = all(a > b for a, b in zip(losses, losses[1:]))
    if not (losses and falls and min(losses) <= loss <= max(losses)):
        return math.nan
    return math.exp(np.interp(-loss, -np.array(losses), np.log(sizes)))


def between_rows(rows):
    """Rows of BETWEEN: the saving at each loss of a size. The deviation is over the seeds.

    rows: one for each model.
    """
    table = []
    rows = [row for row in rows if not math.isnan(row["val_loss"])]
    for key in ("total", "non_embedding"):
        found = [[row for row in rows if row["model"].startswith(family)] for family in FAMILIES]
        sizes = [[row[key] for row in family] for family in found]
        means = [[row["val_loss"] for row in family] for family in found]
        for loss in sorted({*means[0], *means[1]}, reverse=True):
            N_m, N_t = (size_between(loss, *of_family) for of_family in zip(sizes, means))
            if math.isnan(N_m / N_t):
                continue
            savings = []
            for seed in set.intersection(*(set(row["losses"]) for row in rows)):
                n_m, n_t = (size_between(loss, n, [row["losses"][seed] for row in family])
                            for n, family in zip(sizes, found))
                savings.append(1 - n_m / n_t)
            std = mean_and_std(savings)[1]
            table.append([key, loss, round(N_m), round(N_t), percent(1 - N_m / N_t, 0),
                          percent(std, 0)])
    return table


def draw_scaling(plt, rows, unfitted, path):
    """Loss against parameters, non-embedding parameters and Psi, with the fitted lines."""
    fig, axes = plt.subplots(2, 2, figsize=(WIDTH, 6.5), sharey=True, layout="constrained")
    for ax, (key, label) in zip(axes.flat, AXES.items()):
        slopes = []
        for n, family in enumerate(FAMILIES):
            sizes, losses, stds = points(rows, family, key)
            if not sizes:
                continue
            name, style = family.capitalize(), look(n)
            ax.errorbar(sizes, losses, stds, capsize=4, ms=7, **style | {"ls": "none"})
            if line := fit_line(*points(rows, family, key, unfitted)[:2]):
                ends = np.array([min(sizes), max(sizes)], dtype=float)
                ax.plot(ends, line[0] + line[1] * np.log(ends), color=style["color"],
                        ls=style["ls"])
                slopes.append(f"{name} {line[1] * math.log(2):+.3f}")
        if slopes:
            ax.set_title("change when the size doubles:\n" + ", ".join(slopes), fontsize=9)
        ax.set_xlabel(label)
        millions_axis(plt, ax)
    psi = sorted({row["psi"] for row in rows if row["psi"]})
    axes[1, 0].set_xticks(psi, psi)
    for ax in axes[:, 0]:
        ax.set_ylabel("validation loss (nats per token)")

    # The fourth place is for the legend.
    axes[1, 1].axis("off")
    handles = [plt.Line2D([], [], ms=7, label=f"{family.capitalize()}, line: fit", **look(n))
               for n, family in enumerate(FAMILIES)]
    axes[1, 1].legend(handles=handles, loc="center", frameon=False)
    save_figure(fig, path)


def size_rows():
    """Rows of SIZE_COLUMNS for the paper's models."""
    models = {f"multiscreen, psi {n}": ("multiscreen", {"psi": n}) for n in (8, 16, 32, 48, 64)}
    models |= {f"transformer:{size}": (f"transformer:{size}", {}) for size in SIZES}
    rows = []
    for label, (name, sizes) in models.items():
        with torch.device("meta"):
            model = build(name, sizes)
        total, rest = count_parameters(model)
        same = "yes" if (total, rest) == PAPER[label] else f"no: {PAPER[label]}"
        c = model.config
        rows.append([label, c.N_L, c.N_H, c.d_E, f"{total:,}", f"{rest:,}", same])
    return rows


def main():
    p = runs_parser(__doc__, nargs="*")
    p.add_argument("--unfitted", nargs="+", type=int, default=[], metavar="PSI",
                   help="sizes of Multiscreen that the lines leave out (paper: 64) [none]")
    args = p.parse_args()
    if not args.runs:
        print_table(SIZE_COLUMNS, size_rows(), "Parameters of the paper's models")
        return
    runs = read_runs(args.runs)
    check_runs(runs)
    rows = model_rows(runs)
    keep_runs(args.out / "scaling.tsv", runs)
    best, paper = at_best_rates(rows), at_paper_rates(rows)
    set_residuals(best, args.unfitted)
    print_table(COLUMNS, [[row[name] for name in COLUMNS] for row in rows],
                f"Validation loss, nats per token, after {runs[0].flags['steps']} steps; diverged "
                "runs are left out of mean and fit")
    fits = fit_rows("best", best, args.unfitted)
    if len(paper) == len(best) and paper != best:
        fits += fit_rows("paper's", paper, args.unfitted)
    print_table(FITS, fits,
                "Fitted lines: change of the loss when the size doubles; sizes at an equal "
                "loss\n(-: no loss that both families reached, or a line that does not fall)")
    print_table(BETWEEN, between_rows(best), "Without a line, at the best rates: sizes at an equal "
                "loss, one measured, one interpolated")
    if (curved := at_parabolas(rows)) != best:
        print_table(BETWEEN, between_rows(curved), "The same, with each model's loss at the "
                    "minimum of a parabola through three rates")
    if plt := pyplot():
        draw_scaling(plt, best, args.unfitted, args.out / "scaling.png")


if __name__ == "__main__":
    cli(main)
