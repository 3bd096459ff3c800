"""How many parameters does each family need for an equal loss (section "Scaling Efficiency")?

    bash lab/runs/scaling.sh        trains small runs of both families and draws them
    python -m lab.scaling RUN...    draws runs of your own

docs/scale.md has the commands for the paper's runs, which are five Multiscreens and four
Transformers of 4M to 4B parameters, trained on 2^38 tokens each. The paper's 4B model is
undertrained.

If a model has runs at several learning rates, the rate with the best mean over the seeds counts.
You need to try several, because the paper's rates for its smallest models, 2^-4 and 1e-3, are not
tuned for runs this small: at a fixed rate, the family that learns faster would seem to need fewer
parameters. For each size that was measured in one family, the table gives the size at which the
other family has the same loss. It is interpolated in ln(size) between two measured sizes, and never
extrapolated. The column saving is 1 - N_multiscreen / N_transformer, and std is its standard
deviation over the seeds; non_emb and non_emb_std are the same for the parameters without the
embedding.

The paper prints no losses. It states that Multiscreen needs roughly 30 % fewer parameters at a
similar validation loss, and that the advantage remains without the embeddings. The sizes of its
Multiscreens are 4M, 28M, 286M, 1.3B and 4B (Psi 8, 16, 32, 48 and 64), and those of its
Transformers 8M, 45M, 353M and 1.3B.
"""
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from lab.common import mean_and_std, percent, pyplot
from lab.compare import differences_inside, draw_by, why_not
from lab.logs import keep_runs, read_runs
from support.cli import Parser, UsageError, cli
from support.measure import print_table
from support.models import build_model

FAMILIES = ("multiscreen", "transformer")
COLUMNS = ["measured", "lr", "at_loss", "N_multiscreen", "N_transformer", "saving", "std",
           "non_emb", "non_emb_std"]


@dataclass
class Model:
    """A model at one learning rate. losses: {seed: validation loss}, NaN if it diverged.

    rest: the parameters without the embedding.
    """
    name: str
    lr: float
    parameters: int
    rest: int
    losses: dict

    def loss(self, seed=None):
        """The loss of a seed, or the mean."""
        return mean_and_std(self.losses.values())[0] if seed is None else self.losses[seed]


def get_models(runs):
    """{family: its Models by size}, each at the rate with the best mean over the seeds."""
    models = {}
    for run in runs:
        if reason := why_not(runs[0], run, "batch_tokens", "steps"):
            raise UsageError(f"{run.label} does not compare with {runs[0].label}: {reason}: draw "
                             "them separately")
        if run.end not in ("", "diverged"):
            raise UsageError(f"{run.label} is {run.end}: rerun its command with --resume")
        key = run.flags["model"], float(run.flags["lr"]), int(run.flags["parameters"])
        model = models.setdefault(key, Model(*key, rest_of(run.flags), {}))
        if run.seed in model.losses:
            raise UsageError(f"{run.label} has seed {run.seed} twice at one rate: "
                             "lab.compare shows what differs")
        model.losses[run.seed] = run.loss_at()
    trained = [model for model in models.values() if not math.isnan(model.loss())]
    # Of equal names and sizes the last one stays, which has the lowest loss.
    best = {(model.parameters, model.name): model
            for model in sorted(trained, key=Model.loss, reverse=True)}
    return {family: [model for (_, name), model in sorted(best.items())
                     if name.partition(":")[0] == family] for family in FAMILIES}


def rest_of(flags):
    """The parameters of a run's model without its embedding."""
    name = flags["tokenizer"]
    sizes = {"vocab_size": {"bytes": 257, "gpt2": 50257}.get(name) or int(name)}
    if flags["model"].startswith("multiscreen"):
        sizes |= {name: int(flags[name]) for name in ("psi", "d_E")
                  if flags.get(name, "None").isdigit()}
    with torch.device("meta"):
        config = build_model(flags["model"], sizes).config
    return int(flags["parameters"]) - config.vocab_size * config.d_E


def size_at(loss, models, kind, seed=None):
    """The size at which a family has a loss, linear in ln(size) between measured neighbours.

    kind: "parameters" or "rest". NaN beyond the ends, without models, and where the losses do not
    fall with size.
    """
    losses = [model.loss(seed) for model in models]
    falls = all(a > b for a, b in zip(losses, losses[1:]))
    if not (losses and falls and losses[-1] <= loss <= losses[0]):
        return math.nan
    sizes = [math.log(getattr(model, kind)) for model in models]
    return math.exp(np.interp(-loss, -np.array(losses), sizes))


def saved(loss, models, kind, seeds):
    """(both families' sizes at a loss, the share saved, its deviation over the seeds)"""
    sizes = [[size_at(loss, models[family], kind, seed) for family in FAMILIES]
             for seed in (None, *seeds)]
    saving, *of_seeds = [1 - ours / theirs for ours, theirs in sizes]
    return sizes[0], percent(saving, 0), percent(mean_and_std(of_seeds)[1], 0)


def equal_losses(models):
    """Rows of COLUMNS: for each measured size the sizes of both families at its loss."""
    measured = [model for family in FAMILIES for model in models[family]]
    seeds = set.intersection(*(set(model.losses) for model in measured)) if measured else ()
    rows = []
    for model in sorted(measured, key=Model.loss, reverse=True):
        sizes, *saving = saved(model.loss(), models, "parameters", seeds)
        _, *non_emb = saved(model.loss(), models, "rest", seeds)
        rows.append([f"{model.name}, {model.parameters}", model.lr, model.loss(),
                     *(x if math.isnan(x) else round(x) for x in sizes), *saving, *non_emb])
    return rows


def main():
    p = Parser(__doc__)
    p.add_argument("runs", nargs="+", metavar="RUN",
                   help="folders that train.py has written, label=folder, or tables of runs")
    p.add_argument("--out", type=Path, default=Path("out"),
                   help="the folder to write the figure and the table to [out]")
    args = p.parse_args()
    runs = read_runs(args.runs)
    models = get_models(runs)
    keep_runs(args.out / "scaling.tsv", runs)
    print_table(COLUMNS, equal_losses(models),
                f"Sizes at an equal loss (nats per token, after {runs[0].flags['steps']} steps), "
                "one measured, at its best rate, and one interpolated")
    groups = {}
    for run in runs:
        name = f"{run.flags['model']}, {run.flags['parameters']}, lr {run.flags['lr']}"
        groups.setdefault(name, []).append(run)
    for line in differences_inside(groups):
        print(line)
    if plt := pyplot():
        points = {family.capitalize(): [(model.parameters, [*model.losses.values()])
                                        for model in found]
                  for family, found in models.items() if found}
        draw_by(plt, points, "parameters", args.out / "scaling.png")


if __name__ == "__main__":
    cli(main)
