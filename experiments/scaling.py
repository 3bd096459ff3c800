"""Loss against size under one token budget (section "Scaling Efficiency", appendix "Additional Scaling Analysis").

Paper:  python -m experiments.scaling --psi 8 16 32 48 64 --data slimpajama/ --tokenizer gpt2 \\
            --transformers transformer:8M transformer:45M transformer:353M transformer:1.3B \\
            --seq-len 4096 --batch-size 16 --accumulate 64 --steps 65536 --log-every 1 --eval-every 4096 --out out/scaling_paper
        (2^38 tokens each; the paper has 3 seeds of the smaller sizes and 1 of the larger, --seeds is one number for all; it
        finds its 4B model off the line, as undertrained: leave out 64 to fit without it)
Small:  python -m experiments.scaling
        four Multiscreens and four Transformers of 0.02M to 0.3M parameters on the standard library's source text, byte by
        byte. It leaves out: the sizes (4M to 4B), nearly all of the 2^38 tokens (it has 0.6M), and two of three seeds
        (--seeds 3). Its learning rates, 2^-4 and 1e-3, are the paper's for its smallest models and not tuned for these:
        the saving after so few steps is that of a family that learns fast as much as of one that needs fewer parameters.

Every other flag goes to train.py; the warm-up is a sixteenth of the steps, as in the paper. For each family a line, loss =
a + b ln(size), is fitted by least squares to the mean losses. The saving is read off the two lines at the loss L in the
middle of the range that both families reached: 1 - N_multiscreen(L) / N_transformer(L), N(L) = exp((L - a) / b).
"""
import math
from pathlib import Path

import numpy as np

from experiments.common import Progress, count_parameters, pyplot, refuse, report, run_seeds, save_figure, summarize
from train import Parser, UsageError, cli

TRANSFORMERS = ["transformer:2,2,28", "transformer:2,2,48", "transformer:3,4,64", "transformer:4,4,80"]
PAPER = """The paper prints no losses. Its statements: Multiscreen needs roughly 30 % fewer parameters at similar validation loss;
against non-embedding parameters the advantage is preserved and the trend even closer to linear; against Psi it is clean; the
4B model deviates from the trend, as undertrained. Its sizes: Multiscreen 4M, 28M, 286M, 1.3B, 4B (Psi 8, 16, 32, 48, 64),
Transformer 8M, 45M, 353M, 1.3B."""


def fit(sizes, losses):
    """(a, b) of the least-squares line loss = a + b ln(size), or None for fewer than two different sizes. Nats per token."""
    if len(set(sizes)) < 2:
        return None
    b, a = np.polyfit(np.log(sizes), losses, 1)
    return float(a), float(b)


def size_at(loss, line):
    """The size at which a fitted line has that loss."""
    a, b = line
    return math.exp((loss - a) / b)


def saving(multiscreen, transformer):
    """(loss, N_multiscreen, N_transformer, 1 - their ratio) in the middle of the losses that both families reached.

    Each argument: (sizes, losses). None if there is no such loss, or a line that does not fall.
    """
    lines = fit(*multiscreen), fit(*transformer)
    if not all(line and line[1] < 0 for line in lines):
        return None
    low, high = max(min(multiscreen[1]), min(transformer[1])), min(max(multiscreen[1]), max(transformer[1]))
    if low > high:
        return None
    loss = (low + high) / 2
    N_m, N_t = (size_at(loss, line) for line in lines)
    return loss, N_m, N_t, 1 - N_m / N_t


def select(models, family, key):
    """(sizes, losses, their deviations) of the models of a family that have a size of that kind."""
    return [[m[k] for m in models if m["family"] == family and key in m] for k in (key, "loss", "std")]


def draw(plt, models, path):
    """Three panels: loss against parameters, non-embedding parameters, and Psi, with the fitted lines."""
    fig, axes = plt.subplots(1, 3, figsize=(13, 4), sharey=True)
    labels = {"total": "total parameters (millions)", "rest": "non-embedding parameters (millions)", "psi": "Psi"}
    for ax, (key, label) in zip(axes, labels.items()):
        for color, family in (("C0", "multiscreen"), ("C1", "transformer")):
            x, y, std = select(models, family, key)
            if not x:
                continue
            ax.errorbar(x, y, np.nan_to_num(std), fmt="o", capsize=3, color=color, label=family)
            if line := fit(x, y):
                ends = np.array([min(x), max(x)], dtype=float)
                slope = f"{line[1] * math.log(2):+.3f} per doubling"
                ax.plot(ends, line[0] + line[1] * np.log(ends), "--", color=color, lw=1, label=slope)
        ax.set(xscale="log", xlabel=label)
        ax.xaxis.set_major_locator(plt.LogLocator(subs=(1, 2, 5)))
        ax.xaxis.set_major_formatter(lambda n, _: f"{n / 1e6:g}")
        ax.minorticks_off()
        ax.legend(fontsize=8)
    psi = sorted({m["psi"] for m in models if "psi" in m})
    axes[2].set_xticks(psi, psi)
    axes[0].set_ylabel("validation loss (nats per token)")
    save_figure(fig, path)


def main():
    p = Parser(__doc__)
    p.add_argument("--psi", nargs="+", type=int, default=[3, 4, 5, 6], help="Multiscreens (paper: 8 16 32 48 64) [3 4 5 6]")
    p.add_argument("--transformers", nargs="+", default=TRANSFORMERS,
                   help=f"Transformers as train.py names them (paper: 8M, 45M, 353M, 1.3B) [{' '.join(TRANSFORMERS)}]")
    p.add_argument("--steps", type=int, default=600, help="optimizer steps of a run (paper: 65536) [600]")
    p.add_argument("--seeds", type=int, default=1, help="runs of each model (paper: 3 for smaller ones, 1 for larger) [1]")
    p.add_argument("--out", default="out/scaling", help="folder; finished runs in it are not run again [out/scaling]")
    args, flags = p.parse_known_args()                             # all other flags go to train.py
    if args.seeds < 1:
        raise UsageError(f"--seeds {args.seeds}: at least 1")
    refuse(flags, "--model", "--seed", "--resume")
    flags = ["--seq-len", 128, "--batch-size", 8, "--log-every", 20, "--warmup", args.steps // 16, *flags]
    models = [{"name": f"multiscreen_psi{n}", "family": "multiscreen", "psi": n, "flags": ["--psi", n]} for n in args.psi]
    models += [{"name": name.replace(":", "_"), "family": "transformer", "flags": ["--model", name]}
               for name in args.transformers]
    for m in models:                                               # a wrong size ends here, not after the first run
        m["total"], m["rest"] = count_parameters(*m["flags"], *flags)
    progress = Progress(sum(m["rest"] for m in models) * args.seeds)
    for m in models:
        m["loss"], m["std"], m["bad"] = summarize(run_seeds(Path(args.out) / m["name"], *m["flags"], *flags, steps=args.steps, seeds=args.seeds,
                                                            progress=progress, amount=m["rest"]))
    report(Path(args.out) / "scaling.tsv", ["model", "psi", "total", "non_embedding", "val_loss", "std", "diverged"],
           [[m["name"], m.get("psi"), m["total"], m["rest"], m["loss"], m["std"], m["bad"]] for m in models],
           f"Validation loss, nats per token, after the same {args.steps} steps, {args.seeds} seed(s); diverged ones are left out of mean and fit")
    models = [m for m in models if not math.isnan(m["loss"])]
    rows = []
    for key, name, paper in (("total", "total", "roughly 30 %"), ("rest", "non_embedding", "preserved"), ("psi", "psi", None)):
        of = [select(models, family, key)[:2] for family in ("multiscreen", "transformer")]
        slopes = [line[1] * math.log(2) if (line := fit(*points)) else None for points in of]
        loss, N_m, N_t, saved = saving(*of) or (None,) * 4
        rows.append([name, *slopes, loss, N_m, N_t, None if saved is None else f"{saved:.0%}", paper])
    columns = ["size", "multiscreen", "transformer", "at_loss", "N_multiscreen", "N_transformer", "saving", "paper"]
    report(Path(args.out) / "fits.tsv", columns, rows, "Fitted lines: change of the loss when the size doubles; the sizes at "
           "an equal loss\n(-: no loss that both families reached, or a line that does not fall)")
    print(PAPER)
    if models and (plt := pyplot()):
        draw(plt, models, Path(args.out) / "scaling.png")


if __name__ == "__main__":
    cli(main)
