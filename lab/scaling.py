"""How many parameters does each family need for an equal loss (section "Scaling Efficiency")?

    python -m lab.scaling 'out/m_*' 'out/t_*'
    python -m lab.scaling lab/report/scaling.tsv

Runs are read as by lab.compare, and of each size the learning rate with the best mean over the
seeds counts; a rate at which a seed is missing or diverged is none. You need to try several: at a
fixed rate, the family that learns faster would seem to need fewer parameters. For each size that
was measured in one family, the table gives the size at which the other family has the same loss. It
is interpolated in ln(size) between two measured sizes, and never extrapolated. saving is
1 - N_multiscreen / N_transformer, in percent, and std its standard deviation over the seeds; the
last two columns are the same without the embedding.

The paper prints no losses. It states that Multiscreen needs roughly 30 % fewer parameters at a
similar validation loss, and that the advantage remains without the embeddings. The sizes of its
Multiscreens are 4M, 28M, 286M, 1.3B and 4B (Psi 8, 16, 32, 48 and 64), and those of its
Transformers 8M, 45M, 353M and 1.3B. docs/scale.md has the commands for the paper's runs.
"""
import math
import statistics
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from lab.compare import (
    best_choice,
    flags_that_differ,
    last_common_step,
    mean_and_std,
    read_runs,
)
from lab.figures import figure_path, plain_numbers, pyplot, save
from support.cli import Parser, UsageError, cli
from support.models import build_model
from support.tables import print_table

FAMILIES = ("multiscreen", "transformer")


@dataclass
class Model:
    """A model at its best rate. losses: {seed: validation loss}; rest: parameters but W_E's."""
    name: str
    lr: str
    parameters: int
    rest: int
    losses: dict

    @property
    def loss(self):
        return statistics.fmean(self.losses.values())


def get_models(runs):
    """{family: its Models, each at its best rate, the smallest first}"""
    rest, choices, step = {}, {}, last_common_step(runs)
    for run in runs:
        for name in flags_that_differ(runs[0], run):
            if name in ("corpus", "tokenizer", "seq_len", "batch_tokens", "steps"):
                raise UsageError(f"{run.label} does not compare with {runs[0].label}: {name} "
                                 f"{runs[0].flags[name]} | {run.flags[name]}")
        size = run.flags["model"], int(run.flags["parameters"])
        rest[size] = rest_of(run.flags)
        of_rate = choices.setdefault(size, {}).setdefault(run.flags["lr"], {})
        if run.seed in of_rate:
            raise UsageError(f"{run.label} has seed {run.seed} twice at one rate: lab.compare "
                             "shows what differs")
        of_rate[run.seed] = run.loss(step)
    models = {family: [] for family in FAMILIES}
    for (name, parameters), rates in sorted(choices.items(), key=lambda item: item[0][1]):
        family, lr = name.partition(":")[0], best_choice(rates)
        if lr is None:
            raise UsageError(f"{name}, {parameters}: at each rate a seed is missing or diverged")
        models[family].append(Model(name, lr, parameters, rest[name, parameters], rates[lr]))
    return models


def rest_of(flags):
    """The parameters of a run's model without its embedding."""
    sizes = {"vocab_size": 257}
    if flags["tokenizer"] == "gpt2":
        sizes["vocab_size"] = 50257
    elif flags["tokenizer"] != "bytes":
        sizes["vocab_size"] = int(flags["tokenizer"])
    if flags["model"].startswith("multiscreen"):
        sizes |= {name: int(flags[name]) for name in ("psi", "d_E")
                  if flags.get(name, "None").isdigit()}
    with torch.device("meta"):
        config = build_model(flags["model"], sizes).config
    return int(flags["parameters"]) - config.vocab_size * config.d_E


def size_at(loss, models, kind, seed=None):
    """The size at which a family has a loss, or NaN outside what was measured.

    kind: "parameters" or "rest"; seed: that of the losses, or None for their means.
    """
    losses = [model.loss if seed is None else model.losses[seed] for model in models]
    falls = all(a > b for a, b in zip(losses, losses[1:]))
    if not losses or not falls or not losses[-1] <= loss <= losses[0]:
        return math.nan
    sizes = [math.log(getattr(model, kind)) for model in models]
    return math.exp(np.interp(-loss, [-x for x in losses], sizes))


def saving(loss, models, kind, seed=None):
    """1 - N_multiscreen / N_transformer at a loss."""
    ours, theirs = (size_at(loss, models[family], kind, seed) for family in FAMILIES)
    return 1 - ours / theirs


def get_rows(models):
    """Rows of the table: for each measured size the sizes of both families at its loss."""
    measured = sorted((model for family in FAMILIES for model in models[family]),
                      key=lambda model: -model.loss)
    if not measured:
        raise UsageError("no run is a multiscreen or a transformer")
    seeds = set.intersection(*(set(model.losses) for model in measured))
    rows = []
    for model in measured:
        row = [f"{model.name}, {model.parameters}", model.lr, model.loss]
        for family in FAMILIES:
            size = size_at(model.loss, models[family], "parameters")
            row.append(size if math.isnan(size) else round(size))
        for kind in ("parameters", "rest"):
            _, std = mean_and_std([saving(model.loss, models, kind, seed) for seed in seeds])
            row += [100 * saving(model.loss, models, kind), 100 * std]
        rows.append(row)
    return rows


def draw(models, path):
    """Draw the loss by size, a curve for each family."""
    plt = pyplot()
    fig, ax = plt.subplots()
    for family in FAMILIES:
        stats = [mean_and_std(model.losses.values()) for model in models[family]]
        seeds = max((len(model.losses) for model in models[family]), default=0)
        ax.errorbar([model.parameters for model in models[family]], [mean for mean, _ in stats],
                    np.nan_to_num([std for _, std in stats]), capsize=3,
                    label=f"{family.capitalize()}, {seeds} seeds")
    ax.set(xscale="log", xlabel="parameters (millions)", ylabel="validation loss (nats per token)")
    plain_numbers(plt, ax.xaxis)
    ax.xaxis.set_major_formatter(lambda n, _: f"{n / 1e6:g}")
    save(fig, path)


def main():
    p = Parser(__doc__)
    p.add_argument("runs", nargs="+", metavar="RUN", help="as for lab.compare")
    p.add_argument("--out", type=figure_path, default=Path("out/scaling.png"),
                   help="the figure to write [out/scaling.png]")
    args = p.parse_args()
    runs = read_runs(args.runs)
    models = get_models(runs)
    rows = [[*row[:5], *(x if math.isnan(x) else f"{x:.0f}" for x in row[5:])]
            for row in get_rows(models)]
    print_table(["measured", "lr", "at_loss", *FAMILIES, "saving", "std", "non_emb", "std"], rows,
                "Sizes at an equal loss, one measured, at its best rate, and one interpolated")
    draw(models, args.out)


if __name__ == "__main__":
    cli(main)
