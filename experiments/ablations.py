"""The paper's five ablations, trained beside the original (appendix "Architectural Ablations").

Paper:  python -m experiments.ablations --seeds 3 --psi 16 --data slimpajama/ --tokenizer gpt2 \\
            --seq-len 4096 --batch-size 16 --batch-tokens 4194304 --steps 16384 --warmup 4096 \\
            --eval-every 4096 --out out/ablations_paper
        2^36 tokens each. To train one: python train.py --model multiscreen:nope
Small:  python -m experiments.ablations
        All six on the standard library's source text, 5 minutes on 2 cores. What it leaves out:
        the size (0.3M parameters instead of 28M), 99.99 % of the tokens, and two of three seeds.
        Warm-up is 50 of 350 steps, in the paper a quarter. For long contexts and retrieval, give
        the checkpoints to `python -m experiments.long_context` and `python abcdigits.py`.

The models are in baselines/ablations.py. Every flag that is not listed below goes to train.py.
"""
if not __package__:
    raise SystemExit("error: run python -m experiments.ablations in the folder above")

import math
from pathlib import Path

from experiments.common import mean_and_std, pyplot, report, save_figure, signed
from experiments.models import parameters_of
from experiments.runs import flat, make_runs, parse_flags, train_missing
from experiments.style import ABLATIONS, COLORS, legend_below
from support.cli import Parser, cli

PAPER = {                                              # validation loss: mean, std over 3 seeds
    "multiscreen": (3.0966, 0.0027),
    "multiscreen:rope": (3.1232, 0.0014),
    "multiscreen:nope": (3.1109, 0.0025),
    "multiscreen:no-tanhnorm": (3.1094, 0.0026),
    "multiscreen:no-gate": (3.1555, 0.0007),
    "multiscreen:fixed-r": (3.1120, 0.0026),
}
COLUMNS = ["model", "parameters", "seeds", "val_loss", "std", "diverged", "change", "paper_28M",
           "paper_std", "paper_change"]


def draw_ablations(plt, rows, path):
    """The change of the validation loss by each ablation: here, and in the paper. rows: COLUMNS."""
    fig, ax = plt.subplots(figsize=(7, 3.6), layout="constrained")
    rows = [dict(zip(COLUMNS, row)) for row in rows]
    changes = [row["val_loss"] - rows[0]["val_loss"] for row in rows]
    paper_changes = [row["paper_28M"] - rows[0]["paper_28M"] for row in rows]
    here = [y - 0.2 for y in range(len(rows))]
    there = [y + 0.2 for y in range(len(rows))]
    bar = {"height": 0.4, "edgecolor": "black", "linewidth": 0.5, "capsize": 3}
    ax.barh(here, changes, xerr=[row["std"] for row in rows], color=COLORS[0], label="here", **bar)
    ax.barh(there, paper_changes, xerr=[row["paper_std"] for row in rows], color=COLORS[4],
            hatch="//", label="paper, 28M", **bar)
    ax.axvline(0, color="black", lw=0.8)
    for y, change in zip(here, changes):
        if math.isnan(change):
            ax.annotate("diverged", (0, y), (4, 0), textcoords="offset points", va="center")

    # From top to bottom in the table's order.
    ax.set_yticks(range(len(rows)), ["Original", *ABLATIONS.values()])
    ax.invert_yaxis()
    ax.set_xlabel("change of the validation loss (nats per token); above 0 is worse")
    legend_below(fig, ax)
    save_figure(fig, path)


def read_flags(argv=None):
    """(arguments, {model: [Run]}, flags of train.py)"""
    args, flags = parse_flags(Parser(__doc__), argv, "out/ablations", steps=350, paper_steps=16384,
                              seeds="runs of each model (paper: 3)")
    flags = ["--psi", 6, "--seq-len", 128, "--batch-size", 8, "--log-every", 50, *flags]
    runs = {name: make_runs(name.replace(":", "_"), ["--model", name, *flags], args)
            for name in PAPER}
    return args, runs, flags


def main():
    args, runs, flags = read_flags()
    parameters = {name: parameters_of("--model", name, *flags)[0] for name in runs}
    out, losses = Path(args.out), train_missing(flat(runs), args.out)
    rows = []
    paper_original, _ = PAPER["multiscreen"]
    for name, (paper, paper_std) in PAPER.items():
        mean, std, diverged = mean_and_std([losses[run] for run in runs[name]])
        original = rows[0][3] if rows else mean
        rows.append([name, parameters[name], len(runs[name]), mean, std, diverged,
                     signed(mean - original), paper, paper_std, signed(paper - paper_original)])
    report(out / "ablations.tsv", COLUMNS, rows,
           f"Validation loss, nats per token, after {args.steps} steps; the paper's: 28M "
           "parameters, 2^36 tokens, 3 seeds")
    if plt := pyplot():
        draw_ablations(plt, rows, out / "ablations.png")


if __name__ == "__main__":
    cli(main)
