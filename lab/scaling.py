"""How many parameters does each family need for an equal loss (section "Scaling Efficiency")?

    python -m lab.scaling 'out/m_*' 'out/t_*'
    python -m lab.scaling lab/report/scaling.tsv

Runs are read as by lab.compare, and of each size the learning rate with the best mean over the
seeds counts; a rate at which a seed is missing or diverged is none. You need to try several: at a
fixed rate, the family that learns faster would seem to need fewer parameters. The runs of a family
may differ in their size, rate and seed, and in nothing else; both families read the same text in
the same steps. For each size that was measured in one family, the table gives the size at which the
other family has the same loss. It is interpolated in ln(size) between two measured sizes, and never
extrapolated. saving is 1 - N_multiscreen / N_transformer, in percent, and ± its standard deviation
over the seeds that all models have; non_emb is the same without the embedding.

The paper prints no losses. It states that Multiscreen needs roughly 30 % fewer parameters at a
similar validation loss, and that the advantage remains without the embeddings. The sizes of its
Multiscreens are 4M, 28M, 286M, 1.3B and 4B (Psi 8, 16, 32, 48 and 64), and those of its
Transformers 8M, 45M, 353M and 1.3B. docs/scale.md has the commands for the paper's runs.
"""
import math
import statistics
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from support.cli import Parser, UsageError, cli
from lab import plots
from lab.alike import SIZES, group_runs, mean_and_std, require_alike, seeds_in_words
from lab.curves import Curve
from lab.runs import last_common_step, read_runs
from support.data import get_tokenizer
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
    families, sizes = {family: [] for family in FAMILIES}, {}
    for run in runs:
        family, variant = family_and_variant(run)
        families[family].append(run.flags | {"variant": variant})
    require_alike(families, SIZES)

    # The runs of one size and rate have a mean.
    step = last_common_step(runs)
    of_size = [replace(run, label=f"{run.flags['model']}, {run.flags['parameters']}")
               for run in runs]
    for group in group_runs(of_size, "lr").values():
        sizes.setdefault(group[0].label, []).append(group)
    models = {family: [] for family in FAMILIES}
    for name, groups in sizes.items():
        best = best_rate(groups, step)
        flags, losses = best[0].flags, {run.seed: run.loss(step) for run in best}
        family, _ = family_and_variant(best[0])
        models[family].append(
            Model(name, flags["lr"], int(flags["parameters"]), rest_of(flags), losses))
    return {family: sorted(of_family, key=lambda model: model.parameters)
            for family, of_family in models.items()}


def family_and_variant(run):
    """The family of a run's model, and what follows its size: "" in transformer:2,2,28."""
    family, *parts = run.flags["model"].split(":")
    if family not in FAMILIES:
        raise UsageError(f"{run.label} is neither a multiscreen nor a transformer")
    if family == "transformer":
        parts = parts[1:]
    return family, ":".join(parts)


def best_rate(groups, step):
    """The group of runs with the best mean loss, of groups with one rate each.

    A rate that lacks a seed which others have, or at which a seed diverged, is none, as its mean
    would be of other seeds.
    """
    seeds = {run.seed for group in groups for run in group}
    complete = [group for group in groups if {run.seed for run in group} == seeds
                and not any(run.diverged for run in group)]
    if not complete:
        raise UsageError(f"{groups[0][0].label}: at each rate a seed is missing or diverged")
    return min(complete, key=lambda group: statistics.fmean(run.loss(step) for run in group))


def rest_of(flags):
    """The parameters of a run's model without its embedding."""
    sizes = {"vocab_size": get_tokenizer(flags["tokenizer"]).n_vocab}
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
    """1 - N_multiscreen / N_transformer at a loss, in percent."""
    ours, theirs = (size_at(loss, models[family], kind, seed) for family in FAMILIES)
    return 100 * (1 - ours / theirs)


def get_rows(models):
    """Rows of the table: for each measured size the sizes of both families at its loss."""
    measured = sorted((model for family in FAMILIES for model in models[family]),
                      key=lambda model: -model.loss)
    seeds = set.intersection(*(set(model.losses) for model in measured))
    rows = []
    for model in measured:
        row = {"measured": model.name, "lr": model.lr,
               "seeds": seeds_in_words(model.losses), "at_loss": model.loss}
        row |= {family: size_at(model.loss, models[family], "parameters") for family in FAMILIES}
        for kind, head in (("parameters", "saving"), ("rest", "non_emb")):
            row[head] = saving(model.loss, models, kind)
            # NaN if the loss is beyond what was measured with a seed: of the others it is no mean.
            _, row[f"± {head}"] = mean_and_std([saving(model.loss, models, kind, seed)
                                                for seed in seeds])
        row["± of"] = seeds_in_words(seeds)
        rows.append(row)
    return rows


def draw(models, path):
    """Draw the loss by size, a curve for each family."""
    curves = [Curve(family.capitalize(), {model.parameters: model.losses for model in
                                                  models[family]}) for family in FAMILIES
              if models[family]]
    fig, (ax,) = plots.draw_panels({"": curves}, "parameters (millions)",
                                   "validation loss (nats per token)")
    plots.millions(ax)
    plots.save(fig, path)


def main():
    p = Parser(__doc__)
    p.add_argument("runs", nargs="+", metavar="RUN", help="as for lab.compare")
    p.add_argument("--out", type=plots.figure_path, default=Path("out/scaling.png"),
                   help="the figure to write [out/scaling.png]")
    args = p.parse_args()
    models = get_models(read_runs(args.runs))
    rows = get_rows(models)
    for row in rows:
        for name in (*FAMILIES, "saving", "± saving", "non_emb", "± non_emb"):
            if not math.isnan(row[name]):
                row[name] = f"{row[name]:.0f}"
    print_table(rows, "Sizes at an equal loss, one measured, at its best rate, and one "
                "interpolated")
    draw(models, args.out)


if __name__ == "__main__":
    cli(main)
