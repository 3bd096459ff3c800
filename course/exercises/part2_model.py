"""Part 2: the model, Eqs. 1 to 3 and 14 to 18, sections "Overview" and "Gated Screening Tile".

Check it with `pytest course/exercises/test_part2.py`. The model uses the functions of part 1 from
multiscreen.py, so a mistake in part 1 costs nothing here. The parameters have the same names as in
the repository, so its trained weights fit your model.

Axes: B batch, T positions, H tiles of a layer, E d_E, K d_K, V d_V, N vocabulary.
"""
import math  # noqa: F401

import torch
import torch.nn.functional as F  # noqa: F401
from torch import nn

from multiscreen import (  # noqa: F401
    acceptance,
    mipe,
    mipe_angle,
    screen,
    tanh_norm,
    unit,
    window,
)


class GatedScreeningTiles(nn.Module):
    """One layer: N_H gated screening tiles side by side. config: a `multiscreen.Config`."""

    def __init__(self, config):
        super().__init__()
        H, E, K, V = config.N_H, config.d_E, config.d_K, config.d_V
        self.w_th = config.w_th
        self.W_Q = nn.Parameter(torch.empty(E, H, K))
        self.W_K = nn.Parameter(torch.empty(E, H, K))
        self.W_V = nn.Parameter(torch.empty(E, H, V))
        self.W_G = nn.Parameter(torch.empty(E, H, V))
        self.W_O = nn.Parameter(torch.empty(H, V, E))
        self.s_w = nn.Parameter(torch.empty(H))
        self.s_r = nn.Parameter(torch.empty(H))
        self.s_O = nn.Parameter(torch.empty(H))

    def project(self, x, W):
        """Eq. (15): q, k, v, g = x W for all tiles. (B, T, E) x (E, H, D) -> (B, H, T, D)"""
        raise NotImplementedError("Exercise 2.1: Eq. 15, the projections")

    def gate(self, x):
        """Eq. (17), the gate: g_hat = tanh(SiLU(g)), g = x W_G. (B, T, E) -> (B, H, T, V)"""
        raise NotImplementedError("Exercise 2.2: Eq. 17, the gate")

    def screening(self, x, screen, cache=None):
        """Eq. (16): u = Screening(q, k, v) of x, continuing the cache. -> (B, H, T, V)

        Project x to q, k, v = x W_Q, x W_K, x W_V (Eq. 15), scale each to unit length (Eq. 5), and
        rotate q and k by MiPE. Then h = screen(q_tilde, k_tilde, v_bar, w, r, i0) (Eq. 12) and
        u = TanhNorm(h) (Eq. 14). Without a cache x starts at position 0, and with one at position
        `cache.end`. cache.append(k_tilde, v_bar, w) adds the new keys and values (exercise 2.9; the
        test brings a cache of its own). It returns all keys and all values that it has, the oldest
        first. Of these keys the last T are x's own, and i0 is the number of the others.
        """
        raise NotImplementedError("Exercise 2.3: Eq. 16, the screening unit of each tile")

    def forward(self, x, screen, cache=None):
        """Eq. (18), the update: Delta x = (u * g_hat) (e^s_O W_O); Eq. (2): x + sum_h Delta x^(h).

        (B, T, E) -> (B, T, E)
        """
        raise NotImplementedError("Exercise 2.4: Eqs. 18 and 2, the update")


class KeyCache:
    """The keys, after MiPE, and values of one layer that later queries may see, oldest first."""

    def __init__(self):
        self.k = self.v = None
        self.end = 0                                   # the position of the next token

    def append(self, k, v, w):
        """Add (B, H, T, K) keys and (B, H, T, V) values. Returns all keys and all values.

        You may keep everything. If you want to bound the memory, drop the keys that lie outside
        every window; w: (H,).
        """
        raise NotImplementedError("Exercise 2.9: a cache of keys and values")


class Multiscreen(nn.Module):
    """The language model: tokens (B, T) -> logits (B, T, N)."""

    def __init__(self, config):
        super().__init__()
        self.config, self.screen = config, screen
        self.W_E = nn.Parameter(torch.empty(config.vocab_size, config.d_E))
        self.s_E = nn.Parameter(torch.empty(1))
        self.s_F = nn.Parameter(torch.empty(1))
        self.layers = nn.ModuleList(GatedScreeningTiles(config) for _ in range(config.N_L))
        self.initialize()

    @torch.no_grad()
    def initialize(self):
        """The table in the appendix "Multiscreen Initialization".

        In N(0, x), x is the standard deviation:

        W_Q, W_K  N(0, 0.1/sqrt(d_K))    s_w  evenly spaced over the tiles, from 0 to log w_th
        W_V       N(0, 0.1/sqrt(d_V))    s_r  0
        W_G       N(0, 0.1)              s_O  log(1/sqrt(N_H N_L))
        W_O, W_E  N(0, 0.1/sqrt(d_E))    s_E  0,  s_F  log sqrt(d_E)
        """
        raise NotImplementedError("Exercise 2.5: the initial values")

    def embed(self, tokens):
        """Eq. (1): x^(0) = e^s_E e_bar_t, where e_t is row t of W_E. (B, T) -> (B, T, E)"""
        raise NotImplementedError("Exercise 2.6: Eq. 1, the embedding")

    def logits(self, x):
        """Eq. (3): z = x (e^s_F W_E_bar)^T. (..., E) -> (..., N). W_E_bar: rows of unit length."""
        raise NotImplementedError("Exercise 2.7: Eq. 3, the logits")

    def hidden(self, tokens, caches=None):
        """x^(N_L), after the last layer. (B, T) -> (B, T, E). caches: one KeyCache per layer."""
        x = self.embed(tokens)
        for layer, cache in zip(self.layers, caches or [None] * len(self.layers)):
            x = layer(x, self.screen, cache)
        return x

    def forward(self, tokens, caches=None):
        return self.logits(self.hidden(tokens, caches))

    def loss(self, tokens, targets):
        """Mean cross-entropy in nats, (B, T) x (B, T) -> a scalar. targets: the next tokens.

        Positions whose target is -100 do not count.
        """
        raise NotImplementedError("Exercise 2.8: the loss")

    @torch.no_grad()
    def generate(self, tokens, n):
        """The next n tokens, (B, n), each the one with the largest logit. tokens: (B, T)

        Each token goes through the layers only once, because later steps find its keys and values
        in the caches.
        """
        raise NotImplementedError("Exercise 2.10: greedy generation with a cache")
