"""The paper's five ablations (appendix "Architectural Ablations"): each overrides one hook.

    python train.py --model multiscreen:nope

A variant of yours is a class in a file of its own, and its name is multiscreen:my_file.Tiles. It
overrides a method that GatedScreeningTiles names, or has an `own_screen`. docs/variants.md shows
one from idea to comparison.

Three more are not the paper's. `compete` and `softmax` test its claim that keys must not compete;
`softmax-rope` changes the positions, too. `python -m lab.compare` compares runs of them.
"""
import functools
import math

import torch
from torch.nn import functional as F

from lab.baselines.transformer import rope
from multiscreen import GatedScreeningTiles, no_autocast, softmask


class RoPE(GatedScreeningTiles):
    """MiPE -> RoPE: every pair of dimensions of q and k turns, whatever the window."""
    rope_scale = (1.0, 1.0)

    def initialize(self):
        if self.config.d_K % 2:
            raise ValueError(f"d_K is {self.config.d_K}; expected an even number, as RoPE turns "
                             "pairs")
        super().initialize()

    def encode(self, x_bar, i, w):
        return rope(x_bar, i, *self.rope_scale)


class NoPE(GatedScreeningTiles):
    """MiPE -> no positions in q and k: only the softmask knows the distance."""

    def encode(self, x_bar, i, w):
        return x_bar


class NoTanhNorm(GatedScreeningTiles):
    """The norm of the aggregated values is not bounded."""

    def bound(self, h):
        return h


class NoGate(GatedScreeningTiles):
    """No gate and no W_G, but more layers and tiles, to make up for the parameters."""

    @staticmethod
    def sizes(given):
        """The sizes of Config. N_L and N_H, where they are not given, are larger than psi.

        Without a gate a tile has 160 d_E weights instead of 224 d_E. So N_H = sqrt(224/160) psi,
        rounded, with the fewest layers that make the model no smaller: 19 layers of 19 tiles for
        psi = 16, as in the paper.
        """
        psi = given.get("psi", 8)
        N_H = round(math.sqrt(1.4) * psi)
        return {"N_L": math.ceil(1.4 * psi**2 / N_H), "N_H": N_H} | given

    def initialize(self):
        super().initialize()
        del self.W_G

    def gate(self, x):
        return 1.0


class FixedR(GatedScreeningTiles):
    """The acceptance width is 1 and not learned: only a negative similarity rejects a key."""

    def initialize(self):
        super().initialize()
        self.s_r.requires_grad_(False)

    def acceptance(self):
        return torch.ones_like(self.s_r)


class Compete(GatedScreeningTiles):
    """Keys compete: h_i = sum_j alpha_d_ij v_j / (rest + sum_j alpha_d_ij), with rest = 1.

    The 1 acts as a key that is always there and says nothing, so no other need be relevant.
    Relevance maps show alpha_d_ij, before the division.
    """
    rest = 1.0

    def screening(self, x, screen, cache=None):
        @functools.wraps(screen)
        def compete(q, k, v, w, r, i0=0):
            # A column of ones among the values gives the sum; 2 V columns, as the kernel needs 2^n.
            h = screen(q, k, F.pad(v, (0, v.shape[-1]), value=1.0), w, r, i0)
            return h[..., : v.shape[-1]] / (self.rest + h[..., -1:])

        return super().screening(x, compete, cache)


@no_autocast
def exponential(q, k, v, w, r, i0=0):
    """The sums of `Softmax`: h_i = sum_j m_ij exp(2 (s_ij - 1) / r) v_j, called like `screen`.

    m is the softmask. The temperature r / 2 is learned; with it, log alpha_d has the slope of
    log Trim at s = 1. Exponentials are from e^-60 to e^60: the denominator is never 0 or inf.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    q, k, w, r = (x.to(dtype) for x in (q, k, w, r))
    i = torch.arange(i0, i0 + q.shape[2], device=q.device)
    j = torch.arange(k.shape[2], device=q.device)
    s = q @ k.transpose(-2, -1)
    z = 2 * (s - 1) / r[:, None, None]
    alpha_d = softmask(j - i[:, None], w[:, None, None]) * z.clamp(-60.0, 60.0).exp()
    return (alpha_d @ v.to(dtype)).to(v.dtype)


class Softmax(Compete):
    """Keys compete, and none is rejected: softmax over the window, of 2 s_ij / r + log m_ij."""
    rest = 0.0
    own_screen = staticmethod(exponential)


class SoftmaxRoPE(RoPE, Softmax):
    """Softmax over the window, and RoPE in place of MiPE."""


VARIANTS = {"rope": RoPE, "nope": NoPE, "no-tanhnorm": NoTanhNorm, "no-gate": NoGate,
            "fixed-r": FixedR, "compete": Compete, "softmax": Softmax, "softmax-rope": SoftmaxRoPE}
