"""Learning rates from 2^-14 to 1 (section "Learning Rate Stability", appendices "Learning Rate Sweep Details" and "QKNorm
Transformer Baseline"): the same training with each of them, of a Multiscreen and of a Transformer with and without QKNorm.

Paper:  python -m experiments.lr_sweep --models multiscreen transformer:45M transformer:45M:qknorm --exponents $(seq -14 0) \\
            --seeds 3 --psi 16 --data slimpajama/ --tokenizer gpt2 --seq-len 4096 --batch-size 16 --accumulate 64 \\
            --steps 65536 --log-every 1 --eval-every 4096 --out out/lr_sweep_paper
Small:  python -m experiments.lr_sweep
        every second exponent, three models of about 0.15M parameters on the standard library's source text, byte by byte. It
        leaves out: the size (28M and 45M), all but a few of the 2^38 tokens, two of three seeds (--seeds 3), and with the
        length of a run most of the time in which a slow instability could show.

Every other flag goes to train.py, which gives the Transformer the paper's weight decay of 0.1 and clipping at 1.0 and
Multiscreen neither. The warm-up is a sixteenth of the steps, the paper's 4096 of 65536. Models with QKNorm have one seed, as
in the paper. A run is called diverged if train.py stopped it (a loss, a gradient norm or a weight was not finite), or if its
validation loss ended more than half a nat above its first training loss or the least mean over an eighth of its log.

Each run stays in OUT/MODEL-EXPONENT-SEED with its checkpoint and log.tsv, whose losses and gradient norms
`python -m experiments.training_curves` draws. A run that is there is not run again.
"""
import math
from pathlib import Path

import train
from experiments.common import Progress, count_parameters, pyplot, refuse, report, run_seeds, save_figure, summarize
from train import Parser, UsageError, cli

PAPER = """The paper's statements (no numbers are printed; 45M Transformer, 28M Multiscreen, 2^38 tokens, 3 seeds, QKNorm 1):
the Transformer, with and without QKNorm, diverges for learning rates >= 2^-4 (0.0625); QKNorm is slightly better at moderate
rates; Multiscreen "continues to train reliably without divergence" even at 1 (2^0)."""


def cells(losses):
    """The table's [loss] of a model at one rate, or [loss, std] where several seeds were run, with "diverged" written out."""
    mean, std, bad = summarize(losses)
    n = len(losses)
    text = mean if not bad else "diverged" if bad == n else f"{mean:.5g} ({bad} of {n} diverged)"
    return [text] if n == 1 else [text, std]


def draw(plt, results, n_vocab, path):
    """One curve with error bars for each model, its diverged rates as crosses above. results: {model: {exponent: losses}}."""
    fig, ax = plt.subplots(figsize=(7, 4.2))
    for n, (name, by_rate) in enumerate(results.items()):
        points = {e: summarize(losses) for e, losses in by_rate.items()}
        mean, std = [p[0] for p in points.values()], [0.0 if math.isnan(p[1]) else p[1] for p in points.values()]
        ax.errorbar(list(points), mean, std, marker="o", ms=4, capsize=3, color=f"C{n}", label=name)
        bad = [e for e, p in points.items() if p[2]]
        ax.plot(bad, [0.97 - 0.04 * n] * len(bad), "x", color=f"C{n}", transform=ax.get_xaxis_transform())
    ax.axhline(math.log(n_vocab), color="gray", lw=0.8, ls=":", label="uniform guess")
    ax.plot([], [], "x", color="black", label="diverged (at least one seed)")
    low, high = ax.get_ylim()
    ax.set_ylim(low, high + 0.2 * (high - low))
    exponents = sorted({e for by_rate in results.values() for e in by_rate})
    ax.set(xlabel="learning rate", ylabel="validation loss (nats per token)", xticks=exponents)
    ax.set_xticklabels([f"$2^{{{e}}}$" for e in exponents])
    ax.legend(fontsize=8)
    save_figure(fig, path)


def main():
    p = Parser(__doc__)
    p.add_argument("--models", nargs="+", default=["multiscreen", "transformer:3,4,64", "transformer:3,4,64:qknorm"],
                   help="names of models as train.py takes them [multiscreen transformer:3,4,64 transformer:3,4,64:qknorm]")
    p.add_argument("--exponents", nargs="+", type=int, default=[*range(-14, 1, 2)],
                   help="e of the learning rates 2^e (paper: -14 to 0) [-14 -12 -10 -8 -6 -4 -2 0]")
    p.add_argument("--steps", type=int, default=200, help="optimizer steps of a run (paper: 65536) [200]")
    p.add_argument("--seeds", type=int, default=1, help="runs at each rate, 1 with QKNorm (paper: 3) [1]")
    p.add_argument("--out", default="out/lr_sweep", help="folder; finished runs in it are not run again [out/lr_sweep]")
    args, flags = p.parse_known_args()                             # all other flags go to train.py
    if args.seeds < 1 or not all(-60 <= e <= 60 for e in args.exponents):
        raise UsageError(f"--seeds {args.seeds}, --exponents {args.exponents}: at least 1 seed, exponents from -60 to 60")
    refuse(flags, "--model", "--lr", "--seed", "--resume")
    flags = ["--psi", 5, "--seq-len", 128, "--batch-size", 8, "--log-every", 2, "--warmup", args.steps // 16, *flags]
    for name in args.models:                                       # a wrong name or flag ends here, not after the first model
        print("{}: {:,} parameters, {:,} of them non-embedding".format(name, *count_parameters("--model", name, *flags)))
    n_vocab = train.get_tokenizer(train.get_args([str(f) for f in flags])[0].tokenizer).n_vocab
    seeds = {name: 1 if name.endswith(":qknorm") else args.seeds for name in args.models}
    exponents = sorted(set(args.exponents))
    progress = Progress(len(exponents) * sum(seeds.values()))
    results = {name: {} for name in seeds}
    for name in seeds:
        for e in exponents:
            out = Path(args.out) / f"{name.replace(':', '_')}-{e}"
            results[name][e] = run_seeds(out, "--model", name, *flags, "--lr", 2.0**e, steps=args.steps, seeds=seeds[name], progress=progress)
    columns = ["exponent", "rate"] + [c for name in seeds for c in ([name, "std"] if seeds[name] > 1 else [name])]
    rows = [[e, 2.0**e] + [c for name in seeds for c in cells(results[name][e])] for e in exponents]
    report(Path(args.out) / "lr_sweep.tsv", columns, rows, f"Validation loss, nats per token, after {args.steps} steps, "
           f"{args.seeds} seed(s); a uniform guess has {math.log(n_vocab):.4g}")
    print(PAPER)
    if plt := pyplot():
        draw(plt, results, n_vocab, Path(args.out) / "lr_sweep.png")


if __name__ == "__main__":
    cli(main)
