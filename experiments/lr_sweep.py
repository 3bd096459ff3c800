"""The same training at learning rates from 2^-14 to 1 (section "Learning Rate Stability").

Compared are a Multiscreen and a Transformer with and without QKNorm. Appendices: "Learning Rate
Sweep Details" and "QKNorm Transformer Baseline".

Paper:  python -m experiments.lr_sweep --exponents $(seq -14 0) --seeds 3 --psi 16 \\
            --models multiscreen transformer:45M transformer:45M:qknorm --data slimpajama/ \\
            --tokenizer gpt2 --seq-len 4096 --batch-size 16 --batch-tokens 4194304 --steps 65536 \\
            --log-every 1 --eval-every 4096 --out out/lr_sweep_paper
Small:  python -m experiments.lr_sweep
        Every second exponent, three models of about 0.15M parameters, bytes of the standard
        library's source text. What it leaves out: the size (28M and 45M), nearly all of the 2^38
        tokens, and two of three seeds. In 200 steps a slow instability has no time to show.

Every flag that is not listed below goes to train.py, which sets the paper's weight decay of 0.1 and
clipping at 1.0 for the Transformer and neither for Multiscreen. The warm-up is a sixteenth of the
steps, as in the paper (4096 of 65536). Models with QKNorm have one seed, as in the paper.

A run has diverged in two cases. Either train.py stopped it, because a loss, a gradient norm or a
weight was not finite. Or its last validation loss is more than half a nat above its first training
loss, or above the least mean over an eighth of its log.

Each run stays in OUT/MODEL-EXPONENT-SEED with its checkpoint and its log.tsv, which `python -m
experiments.training_curves` draws. A finished run is not run again.
"""
if not __package__:
    raise SystemExit("error: run python -m experiments.lr_sweep in the folder above")

import math
from pathlib import Path

import train
from experiments.common import mean_and_std, pyplot, report, save_figure
from experiments.models import parameters_of
from experiments.runs import flat, make_runs, parse_flags, train_missing
from experiments.style import WIDTH, label_models, legend_below, look, plot_with_band
from support.cli import Parser, UsageError, cli
from support.data import get_tokenizer

MODELS = ["multiscreen", "transformer:3,4,64", "transformer:3,4,64:qknorm"]
PAPER = """The paper prints no numbers here. Its models: a 45M Transformer and a 28M Multiscreen,
2^38 tokens, 3 seeds (1 with QKNorm). It states: the Transformer diverges for learning rates >= 2^-4
(0.0625), with QKNorm and without; QKNorm is slightly better at moderate rates; Multiscreen
"continues to train reliably without divergence" even at 1 (2^0)."""


def loss_cells(losses):
    """The table's [loss] of a model at one rate; [loss, std] if there were several seeds."""
    mean, std, diverged = mean_and_std(losses)
    n, shown = len(losses), mean
    if diverged == n:
        shown = "diverged"
    elif diverged:
        shown = f"{mean:.5g} ({diverged} of {n} diverged)"
    return [shown] if n == 1 else [shown, std]


def draw_sweep(plt, results, n_vocab, path):
    """Loss by learning rate. results[label][exponent]: losses; what diverged stands at the edge."""
    fig, ax = plt.subplots(figsize=(WIDTH, 5), layout="constrained")
    for n, (label, by_rate) in enumerate(results.items()):
        points = {e: mean_and_std(losses) for e, losses in by_rate.items()}
        means, stds, _ = zip(*points.values())
        plot_with_band(ax, list(points), means, stds, label=label, **look(n))
        diverged = [e for e, (_, _, n_diverged) in points.items() if n_diverged]
        ax.plot(diverged, [1.03 + 0.045 * n] * len(diverged), "x", color=look(n)["color"], ms=7,
                mew=2, transform=ax.get_xaxis_transform(), clip_on=False, in_layout=False)
    ax.axhline(math.log(n_vocab), color="gray", lw=1, ls=(0, (1, 3)), label="uniform guess")
    ax.plot([], [], "x", color="black", ms=7, mew=2, label="at least one seed diverged")

    # The strip above the axis has no height of a loss: it is closed off by a line.
    ax.spines.top.set_visible(True)
    ax.set_title(" ", fontsize=7 + 9 * len(results))
    exponents = sorted({e for by_rate in results.values() for e in by_rate})
    ax.set_xticks(exponents, [f"$2^{{{e}}}$" for e in exponents])
    ax.set(xlabel="learning rate", ylabel="validation loss (nats per token)")
    legend_below(fig, ax, ncols=3)
    save_figure(fig, path)


def model_flags(name, psi):
    """The flags of a model; a Transformer's size is in its name."""
    return ["--model", name, *(["--psi", psi] if name.startswith("multiscreen") else [])]


def read_flags(argv=None):
    """(arguments, {(model, exponent): [Run]}, flags of train.py). With QKNorm there is one seed."""
    p = Parser(__doc__)
    p.add_argument("--models", nargs="+", default=MODELS,
                   help=f"models as train.py names them [{' '.join(MODELS)}]")
    p.add_argument("--exponents", nargs="+", type=int, default=[*range(-14, 1, 2)],
                   help="e of the learning rates 2^e (paper: -14 to 0) [-14 -12 -10 -8 -6 -4 -2 0]")
    p.add_argument("--psi", type=int, default=5, help="size of Multiscreen (paper: 16) [5]")
    args, flags = parse_flags(p, argv, "out/lr_sweep", steps=200, paper_steps=65536, own=["--lr"],
                              seeds="runs at each rate, 1 with QKNorm (paper: 3)")
    if not all(-60 <= e <= 60 for e in args.exponents):
        raise UsageError(f"--exponents {args.exponents}: exponents from -60 to 60")
    flags = ["--seq-len", 128, "--batch-size", 8, "--log-every", 2,
             "--warmup", args.steps // 16, *flags]
    args.exponents, runs = sorted(set(args.exponents)), {}
    for name in args.models:
        for e in args.exponents:
            own = ["--lr", 2.0**e, *model_flags(name, args.psi), *flags]
            found = make_runs(f"{name.replace(':', '_')}-{e}", own, args)
            runs[name, e] = found[:1] if name.endswith(":qknorm") else found
    return args, runs, flags


def main():
    args, runs, flags = read_flags()

    # A wrong name or flag ends here, before the first run.
    sizes = {}
    for name in args.models:
        sizes[name], rest = parameters_of(*model_flags(name, args.psi), *flags)
        print(f"{name}: {sizes[name]:,} parameters, {rest:,} of them non-embedding")
    train_args, _ = train.get_args([str(f) for f in flags])
    n_vocab = get_tokenizer(train_args.tokenizer).n_vocab
    losses, exponents = train_missing(flat(runs), args.out), args.exponents
    results = {name: {e: [losses[run] for run in runs[name, e]] for e in exponents}
               for name in args.models}

    # The table: a row for each rate.
    columns = ["exponent", "rate"]
    for name, by_rate in results.items():
        columns += [name, f"{name} std"] if len(by_rate[exponents[0]]) > 1 else [name]
    rows = []
    for e in exponents:
        rows.append([e, 2.0**e])
        for by_rate in results.values():
            rows[-1] += loss_cells(by_rate[e])
    table = Path(args.out) / "lr_sweep.tsv"
    report(table, columns, rows,
           f"Validation loss, nats per token, after {args.steps} steps; a uniform guess has "
           f"{math.log(n_vocab):.4g}")
    print(PAPER)
    if plt := pyplot():
        labels = label_models(sizes.items())
        shown = {labels[name, sizes[name]]: by_rate for name, by_rate in results.items()}
        draw_sweep(plt, shown, n_vocab, table.with_suffix(".png"))


if __name__ == "__main__":
    cli(main)
