"""Does weight decay or clipping make the difference? (appendix "Experimental Setup")

The paper trains its 45M Transformer again without weight decay and without gradient clipping, and
compares it with the 28M Multiscreen, which has neither (appendix "Gradient Norm Dynamics",
"Optimizer-setting sanity check").

    bash runs/small.sh scaling sanity                trains the runs and draws them
    python -m experiments.sanity RUN...              the table of any Multiscreens and Transformers
    python -m experiments.training_curves RUN...     their losses and gradient norms

The paper prints: without weight decay the validation loss is about 0.02 lower; without clipping
the loss curves are nearly the same. At a small scale weight decay has hardly begun.
"""
from experiments.common import (
    group_runs,
    keep_runs,
    mean_and_std,
    paired_change,
    runs_parser,
    signed,
)
from experiments.style import optimizer_name
from support.cli import UsageError, cli
from support.table import print_table

COLUMNS = ["run", "seeds", "val_loss", "std", "diverged", "change", "change_std", "paper_change"]
PAPER = {"Transformer w/o weight decay": "about -0.02", "Transformer w/o clipping": "nearly 0"}


def name_setting(w_th, *key):
    """Transformer w/o clipping; Multiscreen, w_th = 256. key: as optimizer_name takes it."""
    return optimizer_name(*key) + ("" if w_th == "-" else f", w_th = {float(w_th):g}")


def sanity_rows(runs):
    """Rows of COLUMNS. The change is against the unmodified Transformer, by seed."""
    groups = {name_setting(*key): losses for key, losses
              in group_runs(runs, "w_th", "model", "weight_decay", "clip").items()}
    if "Transformer" not in groups:
        raise UsageError("the runs have no Transformer with weight decay and clipping to compare "
                         "with: name one, too")
    rows = []
    for name, losses in groups.items():
        change, change_std = paired_change(losses, groups["Transformer"])
        rows.append([name, len(losses), *mean_and_std(losses.values()), signed(change), change_std,
                     PAPER.get(name)])
    return rows


def main():
    p = runs_parser(__doc__)
    p.add_argument("--name", default="sanity", help="of the table [sanity]")
    args = p.parse_args()
    runs = keep_runs(args, args.name)
    print_table(COLUMNS, sanity_rows(runs),
                f"Validation loss, nats per token, after {runs[0]['steps']} steps")


if __name__ == "__main__":
    cli(main)
