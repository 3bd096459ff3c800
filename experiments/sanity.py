"""Is it weight decay or clipping that tells the two apart? (appendix "Experimental Setup")

The paper trains its 45M Transformer again without weight decay and without gradient clipping, and
compares gradient norms with those of the 28M Multiscreen, which has neither (appendix "Gradient
Norm Dynamics", "Optimizer-setting sanity check").

Paper:  python -m experiments.sanity --seeds 3 --psi 16 --transformer transformer:45M \\
            --data slimpajama/ --tokenizer gpt2 --seq-len 4096 --batch-size 16 \\
            --batch-tokens 4194304 --steps 65536 --window 256 --log-every 1 --eval-every 4096 \\
            --out out/sanity_paper
Small:  python -m experiments.sanity
        A Transformer and a Multiscreen of about 0.15M parameters, 300 steps on the standard
        library's source text, 2 minutes on 2 cores. What it leaves out: the size, nearly all of
        the 2^38 tokens, and two of three seeds. Weight decay has hardly begun after 300 steps.

Every flag that is not listed below goes to train.py. The warm-up is a sixteenth of the steps, as in
the paper. The paper prints: without weight decay the validation loss is about 0.02 lower; without
clipping the loss curves are nearly the same.
"""
if not __package__:
    raise SystemExit("error: run python -m experiments.sanity in the folder above")

from pathlib import Path

from experiments.common import mean_and_std, report, signed
from experiments.runs import flat, make_runs, parse_flags, train_missing
from experiments.training_curves import are_there, show
from support.cli import Parser, cli

COLUMNS = ["run", "seeds", "val_loss", "std", "diverged", "change", "paper_change"]


def read_flags(argv=None):
    """(arguments, {name: [Run]})"""
    p = Parser(__doc__)
    p.add_argument("--transformer", default="transformer:3,4,64",
                   help="the Transformer (paper: transformer:45M) [transformer:3,4,64]")
    p.add_argument("--psi", type=int, default=5, help="size of Multiscreen (paper: 16) [5]")
    p.add_argument("--window", type=int, default=10,
                   help="rows of the log in a moving average (paper: 256 steps) [10]")
    args, flags = parse_flags(p, argv, "out/sanity", steps=300, paper_steps=65536,
                              own=["--weight-decay", "--clip"],
                              seeds="runs of each (paper: 3)")
    flags = ["--seq-len", 128, "--batch-size", 8, "--log-every", 1, "--warmup", args.steps // 16,
             *flags]
    size, baseline = args.transformer.replace(":", "_"), ["--model", args.transformer, *flags]
    runs = {
        "Transformer": make_runs(size, baseline, args),
        "Transformer w/o weight decay": make_runs(f"{size}_no_decay",
                                                  [*baseline, "--weight-decay", 0], args),
        "Transformer w/o clipping": make_runs(f"{size}_no_clipping",
                                              [*baseline, "--clip", 0], args),
        "Multiscreen": make_runs(f"multiscreen_psi{args.psi}", ["--psi", args.psi, *flags], args),
    }
    return args, runs


def main():
    args, runs = read_flags()
    losses = train_missing(flat(runs), args.out)

    rows, papers = [], {"Transformer w/o weight decay": "about -0.02",
                        "Transformer w/o clipping": "nearly 0"}
    for name, found in runs.items():
        mean, std, diverged = mean_and_std([losses[run] for run in found])
        rows.append([name, len(found), mean, std, diverged,
                     signed(mean - rows[0][2] if rows else 0.0), papers.get(name)])
    report(Path(args.out) / "sanity.tsv", COLUMNS, rows,
           f"Validation loss, nats per token, after {args.steps} steps")
    folders = [found[0].folder(args.out) for found in runs.values()]
    if are_there([folder / "log.tsv" for folder in folders]):
        show(folders, args.window, Path(args.out) / "sanity_curves.tsv")


if __name__ == "__main__":
    cli(main)
