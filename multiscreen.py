"""Multiscreen, after K. M. Nakanishi, "Screening Is Enough": every equation of the paper, once.

Softmax attention shares out a fixed mass among all keys, so no key can be rejected and none can be judged alone.
Screening compares unit queries with unit keys, keeps a key only if its similarity passes a threshold (Trim) and its
distance lies in a learned window (Softmask), and adds up the values that remain: each relevance is in [0, 1], exactly
0 for a rejected key, and does not depend on any other key. Many small gated screening tiles make a layer.

Symbol            meaning                                                       where
x_i^(l)           representation of position i after layer l, in R^E            Multiscreen, Eqs. 1 to 3
W_E, s_E, s_F     embedding (shared with the head), log scales in and out       Multiscreen
W_Q W_K W_V W_G   projections to query, key, value, gate, one set per tile      GatedScreeningTiles
W_O, s_O          projection back to R^E and its log scale, per tile            GatedScreeningTiles
s_w -> w          screening window: keys at distance >= w are never seen        window
s_r -> r          acceptance width: similarities <= 1 - r are rejected          acceptance
q_bar, q_tilde    query of unit length; the same with its position in it        unit, mipe
w_th              windows from here on carry no position                        mipe_angle
s, alpha          similarity in [-1, 1]; distance-unaware relevance             relevance, trim
m, alpha_d        softmask; distance-aware relevance alpha * m                  softmask, relevance
h, u, g_hat       screened sum of values; its bounded form; the gate            screen, tanh_norm, GatedScreeningTiles.gate

Axes: B batch, T queries i, S keys j, H tiles ("heads") of a layer, E d_E, K d_K, V d_V, N vocabulary.
Geometry is float32 (angles float64 until they are within one turn); a cast is written where it happens.
"""
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


@dataclass
class Config:
    """Sizes. `psi` sets N_L = N_H = psi and d_E = psi^2, unless they are given. There is no maximum length."""
    psi: int = 8
    vocab_size: int = 50257
    N_L: int = None
    N_H: int = None
    d_E: int = None
    d_K: int = 16
    d_V: int = 64
    w_th: float = 256.0

    def __post_init__(self):
        self.N_L = self.psi if self.N_L is None else self.N_L
        self.N_H = self.psi if self.N_H is None else self.N_H
        self.d_E = self.psi**2 if self.d_E is None else self.d_E
        for name in ("psi", "vocab_size", "N_L", "N_H", "d_E", "d_K", "d_V"):
            if getattr(self, name) < (2 if name == "d_K" else 1):
                raise ValueError(f"{name} = {getattr(self, name)}: it must be at least {2 if name == 'd_K' else 1}")
        if not self.w_th > 1:
            raise ValueError(f"w_th = {self.w_th}: it must be above 1, the smallest window")


# ---------------------------------------------------------------------------------------------- one screening unit

def window(s_w):
    """Eq. (4), the screening window: w = exp(s_w) + 1, in (1, inf]. Shape of s_w.

    s_w = +inf is w = +inf, a window without an edge; its gradient is 0.
    """
    return torch.where(s_w == torch.inf, torch.inf, s_w.clamp(max=80.0).exp()) + 1


def acceptance(s_r):
    """The other half of Eq. 4, the acceptance width: r = sigmoid(s_r), in (0, 1]. Shape of s_r.

    Clipped from below at 1e-6, about what float32 resolves in a similarity near 1.
    """
    return torch.sigmoid(s_r).clamp_min(1e-6)


def unit(x, eps=1e-6):
    """Eq. (5), unit length: x_bar = x / |x|, the norm clipped from below by eps. (..., D) -> (..., D)"""
    return x * x.square().sum(-1, keepdim=True).clamp_min(eps**2).rsqrt()


def mipe_angle(i, w, w_th):
    """Eq. (6), MiPE's angle: phi(i, w) = pi i gamma(w) / w; Eq. (7): gamma(w) = (cos(pi w / w_th) + 1)/2 if w < w_th, else 0.

    i: (T,) integer positions; w: (H,). Returns (H, T) in radians, float32, reduced to one turn in float64:
    in float32 the product alone would be off by 0.03 rad at i = 2^17, w = 2.
    """
    u = w.double().clamp(max=w_th)                     # at w_th gamma is 0, and so is its slope
    gamma = 0.5 * (torch.cos(math.pi * u / w_th) + 1)
    return torch.remainder(i * (math.pi * gamma / u)[:, None], 2 * math.pi).to(torch.promote_types(w.dtype, torch.float32))


def mipe(x, angle):
    """Minimal positional encoding: rotate the first two dimensions of x by `angle`. x: (B, H, T, K); angle: (H, T)."""
    x0, x1, rest = x.split((1, 1, x.shape[-1] - 2), -1)
    cos, sin = torch.cos(angle)[..., None], torch.sin(angle)[..., None]
    return torch.cat((x0 * cos - x1 * sin, x0 * sin + x1 * cos, rest), -1)


def trim(s, r):
    """Eq. (9), Trim: alpha = max(1 - (1 - s)/r, 0)^2, distance-unaware relevance.

    s: (..., T, S) similarities in [-1, 1]; r: broadcastable, in (0, 1]. Returns like s, in [0, 1].
    Exactly 0 where 1 - s >= r; value and slope are continuous there.
    """
    return (1 + (s - 1) / r).relu().square()           # with 1 + (s - 1)/r backward has fewer passes


def softmask(d, w):
    """Eq. (10), Softmask: m = (cos(pi d / w) + 1)/2 where -w < d <= 0, else 0.

    d: (T, S) = j - i, key minus query position; w: broadcastable. Returns values in [0, 1].
    Exactly 0 in the future (d > 0) and at distance w and beyond; 1 in all the past for w = inf.
    """
    return torch.where((-w < d) & (d <= 0), 0.5 * (torch.cos(math.pi * (d / w)) + 1), 0.0)


def relevance(q, k, w, r, i0=0):
    """Eq. (8), similarity: s_ij = q_i . k_j, and Eq. (11), distance-aware relevance: alpha_d = Trim(s_ij) Softmask(j - i).

    q: (B, H, T, K), k: (B, H, S, K), both with their positions in them; w, r: (H,). Returns (B, H, T, S).
    i0: position of the first query, counted from the first key.
    """
    d = torch.arange(k.shape[2], device=k.device) - (i0 + torch.arange(q.shape[2], device=q.device))[:, None]
    s = q @ k.transpose(-2, -1)
    return trim(s, r[:, None, None]) * softmask(d, w[:, None, None])


def screen(q, k, v, w, r, i0=0):
    """Eq. (12), screening: h_i = sum_j alpha_d_ij v_j. The definition, with T x S relevances in memory.

    q: (B, H, T, K); k: (B, H, S, K); v: (B, H, S, V), unit vectors; w, r: (H,); i0 as in `relevance`.
    Returns (B, H, T, V) in v's dtype; the inside is float32, or float64 if that is what comes in.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    return (relevance(q.to(dtype), k.to(dtype), w.to(dtype), r.to(dtype), i0) @ v.to(dtype)).to(v.dtype)


def tanh_norm(x, eps=1e-6):
    """Eq. (13), TanhNorm: x tanh|x| / |x|, which keeps the direction and bounds the length by 1. (..., V) -> (..., V)

    Below |x| = eps it is its limit, x; value and gradient are finite everywhere, the Jacobian at 0 is the identity.
    """
    square = x.square().sum(-1, keepdim=True)
    small = square < eps**2
    norm = torch.where(small, 1.0, square).sqrt()
    return x * torch.where(small, 1.0, torch.tanh(norm) / norm)


# ------------------------------------------------------------------------------------------------------- the model

class GatedScreeningTiles(nn.Module):
    """One layer: N_H gated screening tiles side by side.

    The four methods `encode`, `acceptance`, `bound` and `gate` are made to be overridden: an exercise or an ablation
    is a subclass that changes one of them. dtype: of the matrix products, None for that of the parameters.
    """

    def __init__(self, config, dtype=None):
        super().__init__()
        H, E, K, V = config.N_H, config.d_E, config.d_K, config.d_V
        self.w_th, self.dtype = config.w_th, dtype
        self.W_Q, self.W_K = nn.Parameter(torch.empty(E, H, K)), nn.Parameter(torch.empty(E, H, K))
        self.W_V, self.W_G = nn.Parameter(torch.empty(E, H, V)), nn.Parameter(torch.empty(E, H, V))
        self.W_O = nn.Parameter(torch.empty(H, V, E))
        self.s_w, self.s_r, self.s_O = (nn.Parameter(torch.empty(H)) for _ in range(3))

    def encode(self, x_bar, i, w):
        """MiPE (Eqs. 6, 7): unit queries or keys (B, H, T, K) and their positions i (T,) -> the same with positions."""
        return mipe(x_bar, mipe_angle(i, w, self.w_th))

    def acceptance(self):
        """The acceptance widths of the tiles (Eq. 4), (H,)."""
        return acceptance(self.s_r)

    def bound(self, h):
        """Eq. (14): u = TanhNorm(h). (B, H, T, V) -> (B, H, T, V)"""
        return tanh_norm(h)

    def gate(self, x):
        """Eq. (17), the gate: g_hat = tanh(SiLU(g)), g = x W_G. (B, T, E) -> (B, H, T, V)"""
        return torch.tanh(F.silu(self.project(x, self.W_G)))

    def project(self, x, W):
        """Eq. (15): x W for all tiles in one product, W one of W_Q, W_K, W_V, W_G. (B, T, E) x (E, H, D) -> (B, H, T, D)"""
        y = x.to(self.dtype or x.dtype) @ W.flatten(1).to(self.dtype or x.dtype)
        return y.to(x.dtype).unflatten(-1, W.shape[1:]).transpose(1, 2)

    def screening(self, x, screen, cache=None):
        """Eq. (16): u = Screening(q, k, v). (B, T, E) -> (B, H, T, V). With a cache, x continues what went through it."""
        w, r = window(self.s_w), self.acceptance()
        start = cache.end if cache else 0
        i = torch.arange(start, start + x.shape[1], device=x.device)
        q_tilde = self.encode(unit(self.project(x, self.W_Q)), i, w)
        k_tilde = self.encode(unit(self.project(x, self.W_K)), i, w)
        v_bar = unit(self.project(x, self.W_V)).to(self.dtype or x.dtype)
        k_tilde, v_bar, first = cache.append(k_tilde, v_bar, w) if cache else (k_tilde, v_bar, 0)
        return self.bound(screen(q_tilde, k_tilde, v_bar, w, r, start - first).to(x.dtype))

    def forward(self, x, screen, cache=None):
        """Eq. (18), the update Delta x = (u * g_hat) (e^s_O W_O), and Eq. (2), the layer: x + sum_h Delta x^(h).

        x: (B, T, E) -> (B, T, E); the product over (H, V) is the sum over the tiles.
        """
        y = (self.screening(x, screen, cache) * self.gate(x)).transpose(1, 2).flatten(2).to(self.dtype or x.dtype)
        W_O = (self.s_O.exp()[:, None, None] * self.W_O).flatten(0, 1).to(self.dtype or x.dtype)
        return x + (y @ W_O).to(x.dtype)


class KeyCache:
    """The keys and values of one layer that a later query may still see: encoded, unit length, oldest first.

    When its buffer is full, what lies outside every window is dropped: bounded memory if all windows are finite. With
    `whole` nothing is dropped: the definition may have been changed to see beyond its windows.
    """

    def __init__(self):
        self.k = self.v = None
        self.whole = False
        self.first = self.n = 0                        # position of the oldest key kept; number of keys kept

    @property
    def end(self):
        """The position of the next token."""
        return self.first + self.n

    @torch.compiler.disable                            # its sizes are numbers that change with every call
    def append(self, k, v, w):
        """Add (B, H, T, K) keys and (B, H, T, V) values. Returns all that these T queries may see, and its first position."""
        T = k.shape[2]
        if self.k is not None and self.n + T <= self.k.shape[2]:
            self.k[:, :, self.n : self.n + T], self.v[:, :, self.n : self.n + T] = k, v
            self.n += T
            return self.k[:, :, : self.n], self.v[:, :, : self.n], self.first
        if self.k is not None:
            k, v = torch.cat((self.k[:, :, : self.n], k), 2), torch.cat((self.v[:, :, : self.n], v), 2)
        first, S = self.first, k.shape[2]
        self.n = S if self.whole else int(min(math.ceil(min(w.max().item(), 2.0**62)), S))
        self.first = first + S - self.n
        self.k, self.v = (F.pad(x[:, :, S - self.n :], (0, 0, 0, 1024)) for x in (k, v))     # room for 1024 more
        return k, v, first


class Multiscreen(nn.Module):
    """The language model: tokens (B, T) -> logits (B, T, N).

    screen: the function that screens, `screen_windowed` unless replaced by one with the signature of `screen`.
    tiles: the class of a layer. dtype: of the matrix products (torch.bfloat16, say), None for the parameters' own.
    """

    def __init__(self, config, dtype=None, tiles=GatedScreeningTiles):
        super().__init__()
        self.config, self.dtype, self.screen = config, dtype, screen_windowed
        self.W_E = nn.Parameter(torch.empty(config.vocab_size, config.d_E))
        self.s_E, self.s_F = nn.Parameter(torch.empty(1)), nn.Parameter(torch.empty(1))
        self.layers = nn.ModuleList(tiles(config, dtype) for _ in range(config.N_L))
        self.initialize()

    @torch.no_grad()
    def initialize(self):
        """The paper's table of initial values; the second argument of N is the standard deviation."""
        c = self.config
        std = {"W_Q": 0.1 / math.sqrt(c.d_K), "W_K": 0.1 / math.sqrt(c.d_K), "W_V": 0.1 / math.sqrt(c.d_V),
               "W_G": 0.1, "W_O": 0.1 / math.sqrt(c.d_E)}
        for tile in self.layers:
            for name, W in tile.named_parameters():
                if name in std:
                    nn.init.normal_(W, 0, std[name])
            tile.s_w.copy_(torch.linspace(0, math.log(c.w_th), c.N_H))
            tile.s_r.fill_(0)
            tile.s_O.fill_(math.log(1 / math.sqrt(c.N_H * c.N_L)))
        nn.init.normal_(self.W_E, 0, 0.1 / math.sqrt(c.d_E))
        self.s_E.fill_(0)
        self.s_F.fill_(math.log(math.sqrt(c.d_E)))

    def embed(self, tokens):
        """Eq. (1): x^(0) = e^s_E e_bar_t. (B, T) -> (B, T, E)"""
        return self.s_E.exp() * unit(F.embedding(tokens, self.W_E))

    def hidden(self, tokens, caches=None, chunk=2**12):
        """x^(N_L), the representation after the last layer. (B, T) -> (B, T, E). caches: one KeyCache a layer, or None.

        Where no gradient is wanted the tokens go through in chunks, through the caches: long inputs then take little memory.
        """
        if tokens.ndim != 2 or tokens.numel() == 0:
            raise ValueError(f"tokens have the shape {tuple(tokens.shape)}: give (B, T), at least one of each")
        if tokens.shape[1] > chunk and not torch.is_grad_enabled():
            caches = caches or [KeyCache() for _ in self.layers]
            return torch.cat([self.hidden(part, caches, chunk) for part in tokens.split(chunk, 1)], 1)
        x = self.embed(tokens)
        for tile, cache in zip(self.layers, caches or [None] * len(self.layers)):
            if cache:
                cache.whole = self.screen is screen
            x = tile(x, self.screen, cache)
        return x

    def logits(self, x):
        """Eq. (3): z = x (e^s_F W_E_bar)^T. (..., E) -> (..., N), float32."""
        W = (self.s_F.exp() * unit(self.W_E)).to(self.dtype or x.dtype)
        return (x.to(W.dtype) @ W.T).to(x.dtype)

    def forward(self, tokens, caches=None):
        """tokens: (B, T) integers -> logits (B, T, N)."""
        return self.logits(self.hidden(tokens, caches))

    def loss(self, tokens, targets, reduction="mean"):
        """Cross-entropy in nats, (B, T) x (B, T) -> a scalar, or (B, T) for reduction="none"; targets of -100 do not count.

        In chunks of tokens, each recomputed in backward: 2^17 x 50257 logits never exist at once.
        """
        if reduction not in ("mean", "none"):
            raise ValueError(f"reduction {reduction!r}: take 'mean' or 'none'")
        if targets.shape != tokens.shape:
            raise ValueError(f"targets have the shape {tuple(targets.shape)}, tokens {tuple(tokens.shape)}: they must be the same")

        def part(x, y):
            return F.cross_entropy(self.logits(x), y, reduction="none")

        size = max(2**25 // self.config.vocab_size, 1)
        chunks = zip(self.hidden(tokens).flatten(0, 1).split(size), targets.flatten().split(size))
        nats = torch.cat([checkpoint(part, x, y, use_reentrant=False, preserve_rng_state=False) for x, y in chunks])
        return nats.sum() / (targets != -100).sum() if reduction == "mean" else nats.view(targets.shape)

    @torch.no_grad()
    def relevance_maps(self, tokens):
        """alpha_d of every layer and tile: a list of N_L tensors (B, H, T, T). Memory O(T^2)."""
        maps, chosen = [], self.screen

        def record(q, k, v, w, r, i0=0):
            maps.append(relevance(q, k, w, r, i0))
            return chosen(q, k, v, w, r, i0)

        try:
            self.screen = record
            self.hidden(tokens, chunk=tokens.shape[1])
        finally:
            self.screen = chosen
        return maps

    @torch.no_grad()
    def expand_windows(self, T_train):
        """Screening-window expansion: every window beyond T_train becomes infinite, s_w = +inf. In place."""
        for tile in self.layers:
            tile.s_w.masked_fill_(window(tile.s_w) > T_train, torch.inf)

    @torch.no_grad()
    def stream(self, tokens, n, temperature=0.0, top_k=None, generator=None):
        """Yield n next tokens, (B,) each, decoding with a cache. tokens: (B, T), T >= 1.

        temperature 0 is greedy; otherwise samples softmax(logits / temperature), from the top_k tokens if given.
        """
        if temperature < 0 or (top_k is not None and top_k < 1):
            raise ValueError(f"temperature {temperature}, top_k {top_k}: neither can be below 0, nor top_k be 0")
        caches = [KeyCache() for _ in self.layers]
        for _ in range(n):
            z = self.logits(self.hidden(tokens, caches)[:, -1])
            if temperature == 0:
                tokens = z.argmax(-1, keepdim=True)
            else:
                if top_k is not None:
                    z = z.masked_fill(z < z.topk(min(top_k, z.shape[-1])).values[:, -1:], -torch.inf)
                tokens = torch.multinomial((z / temperature).softmax(-1), 1, generator=generator)
            yield tokens[:, 0]

    def generate(self, tokens, n, **options):
        """The n tokens that `stream` yields, (B, n)."""
        new = list(self.stream(tokens, n, **options))
        return torch.stack(new, 1) if new else tokens[:, :0]


# ------------------------------------------------------------------------------------- the same sums, without the waste

PAIRS_AT_ONCE = 2**18                                  # of queries and keys in one call of `screen`: they stay in the cache
PAIRS_KEPT = 2**19                                     # up to so many a tile, graphs are kept for backward: it is faster


@torch.compiler.disable                                # how many blocks there are depends on the values of w
def screen_windowed(q, k, v, w, r, i0=0, screen=screen):
    """`screen` (Eq. 12) on blocks of queries and the keys in their windows: same numbers, O(T w) time, O(T) memory.

    Relevances do not compete, so the sum over the keys may be cut anywhere. It assumes one thing: query i sees nothing
    outside [i - w, i]. Differentiable once (for second derivatives take `screen`). screen: the definition, or it compiled.
    """
    if not q.numel() or not v.numel():
        return screen(q, k, v, w, r, i0)
    (B, _, T, _), dtype = q.shape, torch.promote_types(q.dtype, torch.float32)
    reach = (w.detach().ceil() - 1).clamp(max=max(i0 + T - 1, 0)).long().tolist()      # the largest distances inside
    tiles = zip(q.to(dtype).unbind(1), k.to(dtype).unbind(1), v.to(dtype).unbind(1), w.split(1), r.split(1), reach)
    h = []
    for q_n, k_n, v_n, w_n, r_n, W in tiles:
        # Blocks of C queries, each with L keys: all that they see where the window is narrow, else one diagonal of blocks
        # after the other. Rows are padded with zeros to whole blocks.
        C = T if T <= 16 else 16 if W <= 16 else 32 if W <= 64 else 64
        last = i0 + T + -T % C
        if W <= 64 or T <= 16:
            first, L = i0 - W, W + C
        else:
            first, L = -(-i0 % C), C
        cuts = list(pieces(last - i0, k.shape[2] - first, i0 - first, W, C, L, max(PAIRS_AT_ONCE // (B * C * L), 1)))
        keep = B * T * min(W + C, T) <= PAIRS_KEPT
        inputs = rows(q_n, 0, last - i0), rows(k_n, first, last), rows(v_n, first, last), w_n, r_n
        h.append(Blockwise.apply(*inputs, screen, C, L, cuts, keep)[:, :T])
    return torch.stack(h, 2).transpose(1, 2).to(v.dtype)


def rows(x, first, last):
    """Rows first .. last - 1 of x: (B, S, D), zeros where x has none. (B, last - first, D)"""
    y = x[:, max(first, 0) : max(last, 0)]
    before = min(max(-first, 0), last - first)
    return F.pad(y, (0, 0, before, last - first - before - y.shape[1])) if y.shape[1] < last - first else y


def pieces(T, S, i0, W, C, L, n):
    """Cover the pairs inside the reach W: yields (i, j, offset), slices of the queries (at most n blocks of C) and of the
    keys that they see, L a block, whose first stands `offset` before the first query of its block."""
    for offset in range(L - C, W + C, L):
        end = min(T, -(-(S - i0 + offset) // C) * C)   # later blocks have their keys beyond the last one
        for a in range(max(offset - i0, 0), end, n * C):
            b = min(a + n * C, end)
            yield slice(a, b), slice(i0 + a - offset, i0 + b - offset + L - C), offset


class Blockwise(torch.autograd.Function):
    """The sum of `screen` over the pieces of one tile. No equation is written here: autograd differentiates each piece.

    With `keep` the graphs of the pieces are kept. Otherwise only the inputs are, and backward runs `screen` again.
    """

    @staticmethod
    def blocks(q, k, v, cut, C, L):
        """A piece as blocks, views of its tensors: (B, n, C, K), (B, n, L, K), (B, n, L, V)."""
        i, j, _ = cut
        return q[:, i].unfold(1, C, C).mT, k[:, j].unfold(1, L, C).mT, v[:, j].unfold(1, L, C).mT

    @staticmethod
    def piece(ctx, cut, q, k, v, w, r):
        """(inputs, h): `screen` of one piece, and the leaves of its graph."""
        views = *Blockwise.blocks(q, k, v, cut, ctx.C, ctx.L), w, r
        inputs = [x.contiguous().detach().requires_grad_(ctx.needed) for x in views]
        with torch.set_grad_enabled(ctx.needed):
            return inputs, ctx.screen(*inputs, cut[2])

    @staticmethod
    def forward(ctx, q, k, v, w, r, screen, C, L, cuts, keep):
        ctx.save_for_backward(q, k, v, w, r)
        ctx.screen, ctx.C, ctx.L, ctx.cuts = screen, C, L, cuts
        ctx.needed, ctx.kept = any(ctx.needs_input_grad), []
        h = v.new_zeros(*q.shape[:2], v.shape[2])
        for cut in cuts:
            piece = Blockwise.piece(ctx, cut, q, k, v, w, r)
            h[:, cut[0]].unfold(1, C, C).mT.add_(piece[1].detach())
            if keep and ctx.needed:
                ctx.kept.append(piece)
        return h

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dh):
        C, L, inputs = ctx.C, ctx.L, ctx.saved_tensors
        dq, dk, dv, dw, dr = (torch.zeros_like(x) for x in inputs)
        again = (Blockwise.piece(ctx, cut, *inputs) for cut in ctx.cuts)
        for cut, (leaves, h) in zip(ctx.cuts, ctx.kept or again):
            dh_blocks = dh[:, cut[0]].unfold(1, C, C).mT
            *grads, dw_, dr_ = torch.autograd.grad(h, leaves, dh_blocks, allow_unused=True, materialize_grads=True)
            for total, grad in zip(Blockwise.blocks(dq, dk, dv, cut, C, L), grads):
                for m in range(0, L, C):               # where L > C the blocks overlap, but not their m-th parts of C rows
                    total[:, :, m : m + C] += grad[:, :, m : m + C]
            dw += dw_
            dr += dr_
        ctx.kept = []
        return dq, dk, dv, dw, dr, None, None, None, None, None


if __name__ == "__main__":
    print(f"{'Psi':>4}{'N_L':>5}{'N_H':>5}{'d_E':>6}{'parameters':>16}{'non-embedding':>16}")
    for psi in (8, 16, 32, 48, 64):
        with torch.device("meta"):
            model = Multiscreen(Config(psi))
        total = sum(p.numel() for p in model.parameters())
        c = model.config
        print(f"{psi:>4}{c.N_L:>5}{c.N_H:>5}{c.d_E:>6}{total:>16,}{total - model.W_E.numel():>16,}")
