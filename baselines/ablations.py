"""The paper's five ablations (appendix "Architectural Ablations"): each overrides one hook.

    python train.py --model multiscreen:nope

`python -m experiments.ablations` trains and compares them all.
"""
import math

import torch

from baselines.transformer import rope
from multiscreen import Config, GatedScreeningTiles, Multiscreen


class RoPE(GatedScreeningTiles):
    """MiPE -> RoPE: every pair of dimensions of q and k turns, whatever the window."""
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
    """No gate and no W_G; `build_ablation` adds layers and tiles to make up for the parameters."""

    def __init__(self, config, dtype=None):
        super().__init__(config, dtype)
        del self.W_G

    def gate(self, x):
        return 1.0


class FixedR(GatedScreeningTiles):
    """The acceptance width is 1 and not learned: only a negative similarity rejects a key."""

    def __init__(self, config, dtype=None):
        super().__init__(config, dtype)
        self.s_r.requires_grad_(False)

    def acceptance(self):
        return torch.ones_like(self.s_r)


TILES = {"rope": RoPE, "nope": NoPE, "no-tanhnorm": NoTanhNorm, "no-gate": NoGate,
         "fixed-r": FixedR}


def build_ablation(variant, config, dtype=None):
    """The ablation of that name; raises ValueError if there is none.

    Without a gate a tile has 160 d_E weights instead of 224 d_E. So N_L and N_H become
    sqrt(224/160) psi, rounded, unless they are given: 19 for psi = 16, as in the paper.
    """
    if variant not in TILES:
        raise ValueError(f"multiscreen:{variant} is unknown: take multiscreen, or multiscreen: and "
                         f"one of {', '.join(TILES)}")
    if variant == "no-gate":
        N = round(math.sqrt(224 / 160) * config.get("psi", 8))
        config = config | {n: N if config.get(n) is None else config[n] for n in ("N_L", "N_H")}
    return Multiscreen(Config(**config), dtype, TILES[variant])
