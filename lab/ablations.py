"""What does each part of a tile do? The paper's five ablations, and keys that compete.

    python train.py --model lab.ablations.Nope

From the appendix "Architectural Ablations": each class overrides one hook of GatedScreeningTiles.
Three are not the paper's: Compete and Softmax test its claim that keys must not compete, and
SoftmaxRope changes the positions, too. docs/variants.md tells how to write one of your own.
"""
import functools

import torch
from torch.nn import functional as F

from lab.transformer import rope
from multiscreen import GatedScreeningTiles, no_autocast, softmask


class Rope(GatedScreeningTiles):
    """MiPE -> RoPE: every pair of dimensions of q and k turns, whatever the window."""
    rope_scale = (1.0, 1.0)

    def encode(self, x_bar, i, w):
        return rope(x_bar, i, *self.rope_scale)


class Nope(GatedScreeningTiles):
    """MiPE -> no positions in q and k: only the softmask knows the distance."""

    def encode(self, x_bar, i, w):
        return x_bar


class NoTanhNorm(GatedScreeningTiles):
    """The norm of the aggregated values is not bounded."""

    def bound(self, h):
        return h


class NoGate(GatedScreeningTiles):
    """No gate and no W_G. Add layers and tiles, to make up for the parameters.

    A tile has 160 d_E weights instead of 224 d_E. So the paper takes sqrt(224/160) psi tiles,
    rounded, and the fewest layers that make the model no smaller:

        --psi       4   5   6   8  16  32
        --layers    5   6   8  10  19  38
        --tiles     5   6   7   9  19  38
    """

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

    @property
    def r(self):
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
    """h_i = sum_j m_ij exp(2 (s_ij - 1) / r) v_j: the sums of Softmax, called like `screen`.

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

exponential.within_w = True                            # a cache may forget what is farther


class Softmax(Compete):
    """Keys compete, and none is rejected: softmax over the window, of 2 s_ij / r + log m_ij."""
    rest = 0.0

    def screening(self, x, screen, cache=None):
        return super().screening(x, exponential, cache)


class SoftmaxRope(Rope, Softmax):
    """Softmax over the window, and RoPE in place of MiPE."""
