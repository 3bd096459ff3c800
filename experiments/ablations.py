"""The paper's five ablations (appendix "Architectural Ablations"): each overrides one hook of a layer of tiles.

Paper:  python -m experiments.ablations --seeds 3 --psi 16 --data slimpajama/ --tokenizer gpt2 --seq-len 4096 \\
            --batch-size 16 --accumulate 64 --steps 16384 --warmup 4096 --eval-every 4096 --out out/ablations_paper
        (2^36 tokens each; one alone: python train.py --model multiscreen:nope ...)
Small:  python -m experiments.ablations
        trains all six on the standard library's source text, 5 minutes on 2 cores. It leaves out: the size (0.3M instead of
        28M parameters), 99.99 % of the tokens, two of three seeds (--seeds 3), warm-up (50 of 350 steps, in the
        paper a quarter), long contexts and retrieval (`python -m experiments.long_context` and
        `python abcdigits.py` take the checkpoints).
"""
import math
from pathlib import Path

import torch

from experiments.transformer import rope
from multiscreen import Config, GatedScreeningTiles, Multiscreen


class RoPE(GatedScreeningTiles):
    """MiPE -> RoPE: every pair of dimensions of q and k turns, whatever the window. `rope_scale` as for the Transformer."""
    rope_scale = 1.0

    def encode(self, x_bar, i, w):
        return rope(x_bar, i, self.rope_scale)


class NoPE(GatedScreeningTiles):
    """MiPE -> no positions in q and k: only the softmask knows the distance."""

    def encode(self, x_bar, i, w):
        return x_bar


class NoTanhNorm(GatedScreeningTiles):
    """The norm of the aggregated values is not bounded."""

    def bound(self, h):
        return h


class NoGate(GatedScreeningTiles):
    """No gate and no W_G; `build` adds layers and heads to make up for the parameters."""

    def __init__(self, config, dtype=None):
        super().__init__(config, dtype)
        del self.W_G

    def gate(self, x):
        return 1.0


class FixedR(GatedScreeningTiles):
    """The acceptance width is 1 and not learned: keys are rejected for a negative similarity only."""

    def __init__(self, config, dtype=None):
        super().__init__(config, dtype)
        self.s_r.requires_grad_(False)

    def acceptance(self):
        return torch.ones_like(self.s_r)


TILES = {"rope": RoPE, "nope": NoPE, "no-tanhnorm": NoTanhNorm, "no-gate": NoGate, "fixed-r": FixedR}
PAPER = {"multiscreen": (3.0966, 0.0027), "multiscreen:rope": (3.1232, 0.0014), "multiscreen:nope": (3.1109, 0.0025),
         "multiscreen:no-tanhnorm": (3.1094, 0.0026), "multiscreen:no-gate": (3.1555, 0.0007), "multiscreen:fixed-r": (3.1120, 0.0026)}


def build(variant, config, dtype=None):
    """The ablation of that name. Without a gate a tile has 160 d_E weights instead of 224 d_E, so N_L and N_H become
    sqrt(224/160) psi, rounded, unless they are given: 19 for psi = 16, as in the paper."""
    if variant not in TILES:
        raise ValueError(f"multiscreen:{variant} is unknown: take multiscreen, or multiscreen: and one of {', '.join(TILES)}")
    if variant == "no-gate":
        N = round(math.sqrt(224 / 160) * config.get("psi", 8))
        config = config | {n: N if config.get(n) is None else config[n] for n in ("N_L", "N_H")}
    return Multiscreen(Config(**config), dtype, TILES[variant])


def main():
    from experiments.common import Progress, count_parameters, pyplot, refuse, report, run_seeds, save_figure, summarize
    from train import Parser, UsageError           # here, because train.py imports this file to build a model

    p = Parser(__doc__)
    p.add_argument("--steps", type=int, default=350, help="optimizer steps of a run (paper: 16384) [350]")
    p.add_argument("--seeds", type=int, default=1, help="runs of each model (paper: 3) [1]")
    p.add_argument("--out", default="out/ablations", help="folder; finished runs in it are not run again [out/ablations]")
    args, flags = p.parse_known_args()                             # all other flags go to train.py
    if args.seeds < 1:
        raise UsageError(f"--seeds {args.seeds}: at least 1")
    refuse(flags, "--model", "--seed", "--resume")
    flags = ["--psi", 6, "--seq-len", 128, "--batch-size", 8, "--log-every", 50, *flags]
    count = {name: count_parameters("--model", name, *flags)[0] for name in PAPER}
    rows, progress, paper_original = [], Progress(len(PAPER) * args.seeds), PAPER["multiscreen"][0]
    for name, (paper, paper_std) in PAPER.items():
        out = Path(args.out) / name.replace(":", "_")
        mean, std, bad = summarize(run_seeds(out, "--model", name, *flags, steps=args.steps, seeds=args.seeds, progress=progress))
        original = rows[0][2] if rows else mean
        rows.append([name, count[name], mean, std, bad, f"{mean - original:+.4f}", paper, paper_std, f"{paper - paper_original:+.4f}"])
    columns = ["model", "parameters", "val_loss", "std", "diverged", "change", "paper_28M", "paper_std", "paper_change"]
    report(Path(args.out) / "ablations.tsv", columns, rows, f"Validation loss, nats per token, {args.steps} steps, {args.seeds} seed(s); "
           "the paper's: 28M parameters, 2^36 tokens, 3 seeds")
    if plt := pyplot():
        fig, ax = plt.subplots(figsize=(7, 3.5))
        names = [name.removeprefix("multiscreen:") for name in PAPER]
        ax.barh(names, [row[2] - original for row in rows], 0.4, xerr=[row[3] for row in rows], label="here")
        ax.barh([y + 0.4 for y in range(len(names))], [v - paper_original for v, _ in PAPER.values()], 0.4, label="paper, 28M")
        ax.set(xlabel="change of the validation loss (nats per token) against the original; positive is worse", yticks=range(len(names)))
        ax.set_yticklabels(names)
        ax.invert_yaxis()                                          # the table's order
        ax.axvline(0, color="black", lw=0.8)
        ax.legend()
        save_figure(fig, Path(args.out) / "ablations.png")


if __name__ == "__main__":
    from train import cli

    cli(main)
