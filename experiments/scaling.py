"""Loss against size under one token budget (section "Scaling Efficiency" and its appendix).

Paper:  python -m experiments.scaling --psi 8 16 32 48 64 --data slimpajama/ --tokenizer gpt2 \\
            --transformers transformer:8M transformer:45M transformer:353M transformer:1.3B \\
            --seeds 3 48:1 64:1 transformer:1.3B:1 --unfitted 64 --seq-len 4096 --batch-size 16 \\
            --batch-tokens 4194304 --steps 65536 --log-every 1 --eval-every 4096 \\
            --out out/scaling_paper
        2^38 tokens each, 3 seeds of the smaller sizes and 1 of the larger ones. The 4B model (64)
        is undertrained and lies off the line.
Small:  python -m experiments.scaling
        Four Multiscreens and four Transformers of 0.02M to 0.3M parameters, bytes of the standard
        library's source text. What it leaves out: the sizes (4M to 4B), nearly all of the 2^38
        tokens (it has 0.6M), and two of three seeds. The learning rates, 2^-4 and 1e-3, are the
        paper's for its smallest models. They are not tuned for these, and after 600 steps a family
        that learns fast looks like one that needs fewer parameters.

Every flag that is not listed below goes to train.py. The warm-up is a sixteenth of the steps, as in
the paper. A line, loss = a + b ln(size), is fitted to the mean losses of each family by least
squares. Both families reach a common range of losses. At L in its middle, the saving is
1 - N_multiscreen(L) / N_transformer(L), where N(L) = exp((L - a) / b). Its standard deviation is
that of the fits, by the residuals of both lines.
"""
if not __package__:
    raise SystemExit("error: run python -m experiments.scaling in the folder above")

import math
from pathlib import Path

import numpy as np

from experiments.common import mean_and_std, pyplot, report, save_figure
from experiments.fits import fit_line, per_doubling, saving
from experiments.models import parameters_of
from experiments.runs import flat, make_runs, parse_flags, train_missing
from experiments.style import WIDTH, look, millions_axis
from support.cli import Parser, UsageError, cli

TRANSFORMERS = ["transformer:2,2,28", "transformer:2,2,48", "transformer:3,4,64",
                "transformer:4,4,80"]
FAMILIES = ("multiscreen", "transformer")
AXES = {"total": "parameters (millions)", "rest": "non-embedding parameters (millions)",
        "psi": r"$\Psi$ of Multiscreen"}
PAPER = """The paper prints no losses. It states: Multiscreen needs roughly 30 % fewer parameters at
similar validation loss. Against non-embedding parameters the advantage is preserved, and the trend
is even closer to linear. Against Psi it is clean. The 4B model deviates, as undertrained.
Its sizes: Multiscreen 4M, 28M, 286M, 1.3B, 4B (Psi 8, 16, 32, 48, 64), Transformer 8M, 45M, 353M,
1.3B."""


def select(models, family, key, only_fitted=False):
    """(sizes, losses, their deviations) of the models of a family that have a size of that kind."""
    chosen = [m for m in models if m["family"] == family and key in m
              and (m["fitted"] or not only_fitted)]
    return [[m[k] for m in chosen] for k in (key, "loss", "std")]


def draw_scaling(plt, models, path):
    """Loss against parameters, non-embedding parameters and Psi, with the fitted lines."""
    fig, axes = plt.subplots(2, 2, figsize=(WIDTH, 6.5), sharey=True, layout="constrained")
    for ax, (key, label) in zip(axes.flat, AXES.items()):
        slopes = []
        for n, family in enumerate(FAMILIES):
            sizes, losses, stds = select(models, family, key)
            if not sizes:
                continue
            name, style = family.capitalize(), look(n)
            ax.errorbar(sizes, losses, stds, capsize=4, ms=7, **style | {"ls": "none"})
            if line := fit_line(*select(models, family, key, only_fitted=True)[:2]):
                ends = np.array([min(sizes), max(sizes)], dtype=float)
                ax.plot(ends, line[0] + line[1] * np.log(ends), color=style["color"],
                        ls=style["ls"])
                slopes.append(f"{name} {per_doubling(line):+.3f}")
        if slopes:
            ax.set_title("change when the size doubles:\n" + ", ".join(slopes), fontsize=9)
        ax.set_xlabel(label)
        millions_axis(plt, ax)
    psi = sorted({m["psi"] for m in models if "psi" in m})
    axes[1, 0].set_xticks(psi, psi)
    for ax in axes[:, 0]:
        ax.set_ylabel("validation loss (nats per token)")

    # The fourth place is for the legend.
    axes[1, 1].axis("off")
    handles = [plt.Line2D([], [], ms=7, label=f"{family.capitalize()}, line: fit", **look(n))
               for n, family in enumerate(FAMILIES)]
    axes[1, 1].legend(handles=handles, loc="center", frameon=False)
    save_figure(fig, path)


def read_flags(argv=None):
    """(arguments, {name: [Run]}, models: a dict of each)"""
    p = Parser(__doc__)
    p.add_argument("--psi", nargs="+", type=int, default=[3, 4, 5, 6],
                   help="sizes of the Multiscreens (paper: 8 16 32 48 64) [3 4 5 6]")
    p.add_argument("--transformers", nargs="+", default=TRANSFORMERS,
                   help="Transformers as train.py names them (paper: 8M, 45M, 353M, 1.3B) "
                   f"[{' '.join(TRANSFORMERS)}]")
    p.add_argument("--unfitted", nargs="+", type=int, default=[],
                   help="sizes of --psi that the lines leave out (paper: 64) [none]")
    args, flags = parse_flags(
        p, argv, "out/scaling", steps=600, paper_steps=65536,
        seeds="runs of each model, or of one: 3 48:1 (paper: 3 for smaller ones, 1 for larger)")
    flags = ["--seq-len", 128, "--batch-size", 8, "--log-every", 20, "--warmup", args.steps // 16,
             *flags]

    models = []
    for n in args.psi:
        own = ["--psi", n, *flags]
        models.append({"name": f"multiscreen_psi{n}", "family": "multiscreen", "psi": n,
                       "fitted": n not in args.unfitted, "flags": own, "size": str(n)})
    for name in args.transformers:
        models.append({"name": name.replace(":", "_"), "family": "transformer", "fitted": True,
                       "flags": ["--model", name, *flags], "size": name})
    unknown = set(args.seeds) - {m["size"] for m in models} - {""}
    if unknown:
        raise UsageError(f"--seeds {' '.join(sorted(unknown))}: sizes are those of --psi and "
                         "--transformers")
    for m in models:
        m["total"], m["rest"] = parameters_of(*m["flags"])
        m["runs"] = make_runs(m["name"], m["flags"], args, m["size"])
    return args, {m["name"]: m["runs"] for m in models}, models


def main():
    args, runs, models = read_flags()
    sizes, out = {run: m["rest"] for m in models for run in m["runs"]}, Path(args.out)
    losses = train_missing(flat(runs), out, sizes.get)
    for m in models:
        m["seeds"] = len(m["runs"])
        m["loss"], m["std"], m["diverged"] = mean_and_std([losses[run] for run in m["runs"]])
    columns = ["model", "psi", "total", "non_embedding", "seeds", "val_loss", "std", "diverged"]
    keys = ["name", "psi", "total", "rest", "seeds", "loss", "std", "diverged"]
    report(out / "scaling.tsv", columns, [[m.get(key) for key in keys] for m in models],
           f"Validation loss, nats per token, after the same {args.steps} steps; diverged runs are "
           "left out of mean and fit")

    # The fitted lines.
    models = [m for m in models if not math.isnan(m["loss"])]
    rows = []
    for key, name, paper in (("total", "total", "roughly 30 %"),
                             ("rest", "non_embedding", "preserved"), ("psi", "psi", None)):
        points = [select(models, family, key, only_fitted=True)[:2] for family in FAMILIES]
        slopes = [per_doubling(fit_line(*p)) for p in points]
        loss, N_m, N_t, *saved = saving(*points) or (None,) * 3 + (math.nan,) * 2
        shown = [None if math.isnan(x) else f"{x:.0%}" for x in saved]
        rows.append([name, *slopes, loss, N_m, N_t, *shown, paper])
    columns = ["size", *FAMILIES, "at_loss", "N_multiscreen", "N_transformer", "saving", "std",
               "paper"]
    report(out / "fits.tsv", columns, rows,
           "Fitted lines: change of the loss when the size doubles; the sizes at an equal loss\n"
           "(-: no loss that both families reached, or a line that does not fall)")
    print(PAPER)
    if models and (plt := pyplot()):
        draw_scaling(plt, models, out / "scaling.png")


if __name__ == "__main__":
    cli(main)
