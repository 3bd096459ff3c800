"""How well does the paper's baseline do, a LLaMA-style Transformer, in the place of Multiscreen?

    python train.py --model lab.transformer.Transformer --layers 4 --tiles 4 --d-E 96

From the appendix "Transformer Baseline Configurations": RMSNorm, RoPE (theta = 10,000), SwiGLU with
floor(8 d_E / 3) hidden units, an embedding shared with the head, a final norm without a weight, no
biases. Heads are --tiles. The paper's sizes and learning rates:

            --layers  --tiles  --d-E    --lr
    8M             6        4    128   0.001
    45M            6        8    512   0.001
    353M          24       16   1024  0.0003
    1.3B          24       16   2048  0.0002
"""
import math

import torch
import torch.nn.functional as F
from torch import nn

from multiscreen import Multiscreen, double, product
from screening_cpu import WindowCache


def rope(x, i, scale=1.0, ntk=1.0):
    """Rotary positions: the pair (n, n + K/2) turns by i / scale * theta^(-2n/K).

    theta = 10,000 ntk^(K/(K-2)): the slowest pair turns ntk times as slowly, the fastest as before.
    x: (B, H, T, K); i: (T,) positions. Returns like x.
    """
    K = x.shape[-1]
    theta = 10_000.0 * ntk ** (K / max(K - 2, 1))
    speed = theta ** (-double(torch.arange(0, K, 2, device=i.device)) / K)
    angle = torch.remainder(double(i)[:, None] / scale * speed, 2 * math.pi)
    cos, sin = (y.to(x.dtype).to(x.device) for y in (angle.cos(), angle.sin()))
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


class Block(nn.Module):
    """x + Attention(RMSNorm(x)), then x + SwiGLU(RMSNorm(x)).

    number: of the layer, from 1. dtype: of the matrix products, None for the parameters' own.
    A variant overrides `encode`, or what `attention` calls: `project`, the property `w`, `mix`.
    `rope_scale`, (scale, ntk) of `rope`, may be changed after training; None: no RoPE. Keys at
    distance `nearby` or more are not seen.
    """
    rope_scale = (1.0, 1.0)
    nearby = math.inf
    attend = staticmethod(F.scaled_dot_product_attention)

    def __init__(self, config, dtype=None, number=1):
        super().__init__()
        E, hidden = config.d_E, 8 * config.d_E // 3
        self.N_H, self.dtype = config.N_H, dtype
        self.norm_1 = nn.RMSNorm(E, eps=1e-5)
        self.norm_2 = nn.RMSNorm(E, eps=1e-5)
        self.W_Q = nn.Parameter(torch.empty(E, E))
        self.W_K = nn.Parameter(torch.empty(E, E))
        self.W_V = nn.Parameter(torch.empty(E, E))
        self.W_O = nn.Parameter(torch.empty(E, E))
        self.W_gate = nn.Parameter(torch.empty(E, hidden))
        self.W_up = nn.Parameter(torch.empty(E, hidden))
        self.W_down = nn.Parameter(torch.empty(hidden, E))

    def encode(self, q, k, i):
        """Queries and keys with their positions i, (T,), encoded. (B, H, T, K) each"""
        if self.rope_scale is None:
            return q, k
        return rope(q, i, *self.rope_scale), rope(k, i, *self.rope_scale)

    def heads(self, x, W):
        """x W, split into heads. (B, T, E) -> (B, H, T, K)"""
        W = W.unflatten(1, (self.N_H, -1))
        return product("bte,ehk->bhtk", x, W, self.dtype)

    def project(self, x, i):
        """Queries, keys and values of tokens at positions i, (T,). (B, T, E) -> (B, H, T, K) each

        A cache keeps the keys and values: what a mechanism needs of old tokens goes into a key.
        """
        q, k = self.encode(self.heads(x, self.W_Q), self.heads(x, self.W_K), i)
        v = self.heads(x, self.W_V)
        return [y.to(self.dtype or x.dtype) for y in (q, k, v)]

    @property
    def w(self):
        """A query sees no key at this distance or beyond: a cache may forget such keys."""
        return torch.tensor(self.nearby)

    def seen(self, d):
        """Which keys a query sees, (T, S), by d = j - i."""
        return (-self.nearby < d) & (d <= 0)

    def mix(self, q, k, v, i0, screen):
        """h, sums of values. (B, H, T, K), keys and values (B, H, S, K) -> (B, H, T, K)

        i0: position of the first query, counted from the first key. screen: for those that screen.
        """
        # One query may see all keys; several after a cache see a triangle at the lower right.
        mask, square = None, i0 == 0
        if self.nearby < math.inf:
            mask, square = self.seen(distances(q, k, i0)), False
        elif not square and q.shape[2] > 1:
            from torch.nn.attention.bias import causal_lower_right  # takes two seconds
            mask = causal_lower_right(q.shape[2], k.shape[2])
        return self.attend(q, k, v, attn_mask=mask, is_causal=square)

    def attention(self, x, screen, cache):
        start = 0 if cache is None else cache.end
        i = torch.arange(start, start + x.shape[1], device=x.device)
        q, k, v = self.project(x, i)
        i0 = 0
        if cache is not None:
            k, v = cache.append(k, v, self.w)
            i0 = k.shape[2] - q.shape[2]               # the queries belong to the last keys
        h = self.mix(q, k, v, i0, screen)
        W_O = self.W_O.unflatten(0, (self.N_H, -1))
        return product("bhtk,hke->bte", h.to(x.dtype), W_O, self.dtype)

    def forward(self, x, screen=None, cache=None):
        x = x + self.attention(self.norm_1(x), screen, cache)
        y = self.norm_2(x)
        gate = F.silu(product("bte,ef->btf", y, self.W_gate, self.dtype))
        y = gate * product("bte,ef->btf", y, self.W_up, self.dtype)
        return x + product("btf,fe->bte", y, self.W_down, self.dtype)


def distances(q, k, i0):
    """d = j - i, key minus query position, (T, S). i0: position of the first query."""
    i = torch.arange(i0, i0 + q.shape[2], device=q.device)
    return torch.arange(k.shape[2], device=q.device) - i[:, None]


class Transformer(Multiscreen):
    """tokens (B, T) -> logits (B, T, N), with layers, embedding and head of its own.

    block: the class of a layer. config: of its sizes N_L, N_H, d_E and vocab_size count.
    """
    # Defaults of train.py's flags. The rate is one for small sizes: the paper tunes it for each.
    recipe = {"layers": 6, "tiles": 4, "d_E": 128, "lr": 1e-3, "weight_decay": 0.1, "clip": 1.0}

    def __init__(self, config, dtype=None, block=Block):
        if config.d_E % (2 * config.N_H):
            raise ValueError(f"d_E is {config.d_E}; expected a multiple of 2 N_H")
        nn.Module.__init__(self)                       # not Multiscreen's, which makes its layers
        self.config, self.dtype = config, dtype
        self.W_E = nn.Parameter(torch.empty(config.vocab_size, config.d_E))
        self.layers = nn.ModuleList(block(config, dtype, n + 1) for n in range(config.N_L))
        self.initialize()

    @torch.no_grad()
    def initialize(self):
        """GPT-NeoX: N(0, sqrt(2 / (5 d_E))); N(0, 2 / (N_L sqrt(d_E))) back to the residual."""
        N_L, d_E = self.config.N_L, self.config.d_E
        for name, W in self.named_parameters():
            if W.ndim > 1:
                back = name.endswith(("W_O", "W_down"))
                nn.init.normal_(W, 0, 2 / (N_L * math.sqrt(d_E)) if back else math.sqrt(0.4 / d_E))

    def embed(self, tokens):
        return F.embedding(tokens, self.W_E)

    def head(self):
        return self.W_E

    def logits(self, x, head=None):
        x = F.rms_norm(x, x.shape[-1:], eps=1e-5)
        return product("...e,ne->...n", x, self.W_E if head is None else head, self.dtype)

    def new_caches(self):
        """As Multiscreen's; for a layer that does not screen, with the window of its mask."""
        if hasattr(self.layers[0], "s_w"):
            return super().new_caches()
        return [WindowCache() for _ in self.layers]


def scale_rope(model, factor):
    """Stretch RoPE for texts `factor` times as long, in place, in each layer that has it.

    "4" divides the positions by 4 (position interpolation). "ntk4" turns the slowest pair at a
    quarter of its speed and the fastest as before (NTK-aware scaling of theta). "1": as trained.
    Raises ValueError for another factor, or if the model has no RoPE.
    """
    number = float(factor.removeprefix("ntk"))
    if not 0 < number < math.inf:
        raise ValueError(f"{factor} is no factor for RoPE; expected such as 4 or ntk4")
    layers = [layer for layer in model.layers if getattr(layer, "rope_scale", None)]
    if number != 1 and not layers:
        raise ValueError(f"RoPE cannot be scaled by {factor}: the model has none")
    for layer in layers:
        layer.rope_scale = (1.0, number) if factor.startswith("ntk") else (number, 1.0)
