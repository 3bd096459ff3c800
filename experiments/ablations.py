"""The paper's five ablations beside the original (appendix "Architectural Ablations").

    bash runs/small.sh ablations                     trains the runs, measures and draws them
    python -m experiments.ablations RUN...           draws the losses of runs of your own
    python train.py --model multiscreen:nope         trains one; they are in baselines/ablations.py

In the paper: 28M parameters, 2^36 tokens, three seeds. Long contexts and retrieval of the same
models: `python -m experiments.long_context` and `python -m experiments.retrieval`.
"""
import math

from experiments.common import (
    group_runs,
    keep_runs,
    mean_and_std,
    paired_change,
    pyplot,
    runs_parser,
    save_figure,
    signed,
)
from experiments.style import ABLATIONS, COLORS, count_of, legend_below, variant_of
from support.cli import UsageError, cli
from support.table import print_table

PAPER = {                                              # validation loss: mean, std over 3 seeds
    "multiscreen": (3.0966, 0.0027),
    "multiscreen:rope": (3.1232, 0.0014),
    "multiscreen:nope": (3.1109, 0.0025),
    "multiscreen:no-tanhnorm": (3.1094, 0.0026),
    "multiscreen:no-gate": (3.1555, 0.0007),
    "multiscreen:fixed-r": (3.1120, 0.0026),
}
# Two are ours: what changes where keys compete.
NAMES = (*PAPER, "multiscreen:compete", "multiscreen:softmax")
COLUMNS = ["model", "parameters", "seeds", "val_loss", "std", "diverged", "change", "change_std",
           "paper_28M", "paper_std", "paper_change"]


def ablation_rows(runs):
    """Rows of COLUMNS, in the paper's order: the original, and the ablations that were run.

    The change is against the original, over the seeds that both have; NaN without any.
    """
    groups = {}
    for (model, n), losses in group_runs(runs, "model", "parameters").items():
        if model not in NAMES or model in groups:
            raise UsageError(f"{model} is not an ablation, or comes in two sizes: name runs of "
                             "one Multiscreen and its ablations")
        groups[model] = n, losses
    if "multiscreen" not in groups:
        raise UsageError("the original is missing: name a run of --model multiscreen, too")
    rows = []
    for name in filter(groups.get, NAMES):
        n, losses = groups[name]
        change, change_std = paired_change(losses, groups["multiscreen"][1])
        paper, paper_std = PAPER.get(name, (math.nan, math.nan))
        rows.append([name, n, len(losses), *mean_and_std(losses.values()), signed(change),
                     change_std, paper, paper_std, signed(paper - PAPER["multiscreen"][0])])
    return rows


def draw_ablations(plt, rows, path):
    """The change of the validation loss by each ablation: here, and in the paper. rows: COLUMNS."""
    fig, ax = plt.subplots(figsize=(7, 3.6), layout="constrained")
    rows = [dict(zip(COLUMNS, row)) for row in rows]
    changes = [float(row["change"]) for row in rows]
    paper_changes = [row["paper_28M"] - rows[0]["paper_28M"] for row in rows]
    here = [y - 0.2 for y in range(len(rows))]
    there = [y + 0.2 for y in range(len(rows))]
    bar = {"height": 0.4, "edgecolor": "black", "linewidth": 0.5, "capsize": 3}
    ax.barh(here, changes, xerr=[row["change_std"] for row in rows], color=COLORS[0], label="here",
            **bar)
    ax.barh(there, paper_changes, xerr=[row["paper_std"] for row in rows], color=COLORS[4],
            hatch="//", label="paper, 28M", **bar)
    ax.axvline(0, color="black", lw=0.8)
    for y, change, row in zip(here, changes, rows):
        if math.isnan(change):
            why = "diverged" if math.isnan(row["val_loss"]) else "no seed in common"
            ax.annotate(why, (0, y), (4, 0), textcoords="offset points", va="center")

    # From top to bottom in the table's order.
    names = [ABLATIONS.get(variant_of(row["model"]), "Original")
             + f", {count_of(row['seeds'], 'seed')}" for row in rows]
    ax.set_yticks(range(len(rows)), names)
    ax.invert_yaxis()
    ax.set_xlabel("change of the validation loss (nats per token); above 0 is worse")
    legend_below(fig, ax)
    save_figure(fig, path)


def main():
    args = runs_parser(__doc__).parse_args()
    runs = keep_runs(args, "ablations")
    rows = ablation_rows(runs)
    print_table(COLUMNS, rows, f"Validation loss, nats per token, after {runs[0]['steps']} steps; "
                "the paper's: 28M parameters, 2^36 tokens, 3 seeds")
    if plt := pyplot():
        draw_ablations(plt, rows, args.out / "ablations.png")


if __name__ == "__main__":
    cli(main)
