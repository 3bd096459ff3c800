"""Multiscreen, after K. M. Nakanishi, "Screening Is Enough": every equation of the paper, once.

Softmax attention divides a fixed budget of weight among all keys: keys compete, and none can be
rejected. Screening compares unit queries with unit keys. It keeps a key only if the similarity
passes a threshold (Trim) and the distance lies in a learned window (Softmask), and sums the values
of the keys that remain. Each relevance is in [0, 1], exactly 0 for a rejected key, and independent
of every other key. Many small gated screening tiles make a layer.

Symbol            meaning                                                    where
x_i^(l)           representation of position i after layer l, in R^E         Multiscreen
W_E, s_E, s_F     embedding (shared with the head), log scales in and out    Multiscreen
W_Q W_K W_V W_G   projections to query, key, value, gate of each tile        GatedScreeningTiles
W_O, s_O          projection back to R^E and its log scale, of each tile     GatedScreeningTiles
s_w -> w          screening window: keys at distance >= w are never seen     window
s_r -> r          acceptance width: similarities <= 1 - r are rejected       acceptance
q_bar, q_tilde    query of unit length; the same with its position in it     unit, mipe
w_th              windows from here on carry no position                     mipe_angle
s, alpha          similarity in [-1, 1]; distance-unaware relevance          relevance, trim
m, alpha_d        softmask; distance-aware relevance alpha m                 softmask, relevance
h, u, g_hat       screened sum of values; bounded; the gate                  screen, tanh_norm, gate

Axes: B batch, T queries i, S keys j, H tiles of a layer, E d_E, K d_K, V d_V, N vocabulary.
Geometry is float32, angles float64 until they are within one turn. Casts are written out.
"""
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


@dataclass
class Config:
    """Sizes. `psi` sets N_L = N_H = psi and d_E = psi^2, unless given. No length is a maximum."""
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
        least = {"psi": 1, "vocab_size": 1, "N_L": 1, "N_H": 1, "d_E": 1, "d_K": 2, "d_V": 1}
        for name, n in least.items():
            if getattr(self, name) < n:
                raise ValueError(f"{name} = {getattr(self, name)}: it must be at least {n}")
        if not self.w_th > 1:
            raise ValueError(f"w_th = {self.w_th}: it must be above 1, the smallest window")


# ---------------------------------------------------------------------- one screening unit

def window(s_w):
    """Eq. (4), the screening window: w = exp(s_w) + 1, in [1, inf]. Shape of s_w.

    s_w = +inf gives w = +inf, a window without an edge. Beyond s_w = 80 the gradient is 0.
    """
    return torch.where(s_w == torch.inf, torch.inf, s_w.clamp(max=80.0).exp()) + 1


def acceptance(s_r):
    """The other half of Eq. 4, the acceptance width: r = sigmoid(s_r). Shape of s_r.

    In [1e-6, 1]: float32 resolves about 1e-6 in a similarity near 1.
    """
    return torch.sigmoid(s_r).clamp_min(1e-6)


def unit(x, eps=1e-6):
    """Eq. (5), unit length: x_bar = x / |x|, where |x| is at least eps. (..., D) -> (..., D)"""
    return x * x.square().sum(-1, keepdim=True).clamp_min(eps**2).rsqrt()


def mipe_angle(i, w, w_th):
    """Eq. (6), MiPE's angle: phi(i, w) = pi i gamma(w) / w.

    Eq. (7): gamma(w) = (cos(pi w / w_th) + 1)/2 for w < w_th, else 0. i: (T,) integers; w: (H,).
    Returns (H, T) in radians, float32, reduced to one turn in float64: in float32 the product is
    off by 0.03 rad at i = 2^17, w = 2.
    """
    w_near = w.double().clamp(max=w_th)                # at w_th gamma is 0, and so is its slope
    gamma = 0.5 * (torch.cos(math.pi * w_near / w_th) + 1)
    angle = torch.remainder(i * (math.pi * gamma / w_near)[:, None], 2 * math.pi)
    return angle.to(torch.promote_types(w.dtype, torch.float32))


def mipe(x, angle):
    """MiPE: rotate the first two dimensions. (B, H, T, K) by angles (H, T) -> (B, H, T, K)"""
    x0, x1, rest = x.split((1, 1, x.shape[-1] - 2), -1)
    cos, sin = torch.cos(angle)[..., None], torch.sin(angle)[..., None]
    return torch.cat((x0 * cos - x1 * sin, x0 * sin + x1 * cos, rest), -1)


def trim(s, r):
    """Eq. (9), Trim: alpha = max(1 - (1 - s)/r, 0)^2, distance-unaware relevance.

    s: (..., T, S) similarities in [-1, 1]; r: broadcastable, in (0, 1]. Returns like s, in [0, 1].
    Exactly 0 where 1 - s >= r; value and slope are continuous there.
    """
    return (1 + (s - 1) / r).relu().square()           # 1 + (s - 1)/r has fewer backward passes


def softmask(d, w):
    """Eq. (10), Softmask: m = (cos(pi d / w) + 1)/2 where -w < d <= 0, else 0.

    d: (T, S) = j - i, key minus query position; w: broadcastable. Returns values in [0, 1].
    Exactly 0 in the future (d > 0) and at distance w and beyond; 1 in all the past for w = inf.
    """
    return torch.where((-w < d) & (d <= 0), 0.5 * (torch.cos(math.pi * (d / w)) + 1), 0.0)


def relevance(q, k, w, r, i0=0):
    """Eq. (8), similarity: s_ij = q_i . k_j. Eq. (11): alpha_d_ij = Trim(s_ij) Softmask(j - i).

    q: (B, H, T, K), k: (B, H, S, K), both with their positions in them; w, r: (H,).
    i0: position of the first query, counted from the first key. Returns (B, H, T, S).
    """
    i = i0 + torch.arange(q.shape[2], device=q.device)
    d = torch.arange(k.shape[2], device=k.device) - i[:, None]
    s = q @ k.transpose(-2, -1)
    return trim(s, r[:, None, None]) * softmask(d, w[:, None, None])


def screen(q, k, v, w, r, i0=0):
    """Eq. (12), screening: h_i = sum_j alpha_d_ij v_j. The definition, T x S in memory.

    q: (B, H, T, K); k: (B, H, S, K); v: (B, H, S, V), unit vectors; w, r: (H,); i0 as above.
    Returns (B, H, T, V) in v's dtype. Inside is float32, or float64 if q is.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    alpha_d = relevance(q.to(dtype), k.to(dtype), w.to(dtype), r.to(dtype), i0)
    return (alpha_d @ v.to(dtype)).to(v.dtype)


def tanh_norm(x, eps=1e-6):
    """Eq. (13), TanhNorm: x tanh|x| / |x| keeps the direction, bounds the length by 1. Like x.

    For |x| < eps it returns x, the limit. The Jacobian at 0 is the identity.
    """
    square = x.square().sum(-1, keepdim=True)
    small = square < eps**2
    norm = torch.where(small, 1.0, square).sqrt()
    return x * torch.where(small, 1.0, torch.tanh(norm) / norm)


# ---------------------------------------------------------- the same sums, without the waste

PAIRS_AT_ONCE = 2**18                                  # in one call of `screen`: they fit the cache
PAIRS_KEPT = 2**19                                     # a tile keeps its graphs up to here


@torch.compiler.disable                                # the number of blocks depends on w
def screen_windowed(q, k, v, w, r, i0=0, screen=screen):
    """`screen` (Eq. 12) on blocks of queries and the keys in their windows: same numbers.

    O(T w) time and O(T) memory. Relevances do not compete, so the sum over the keys may be cut
    anywhere. Assumes that query i sees nothing outside [i - w, i]. Differentiable once; for second
    derivatives take `screen`. The argument `screen` is the definition, or the definition compiled.
    """
    if not q.numel() or not v.numel():
        return screen(q, k, v, w, r, i0)
    B, _, T, _ = q.shape
    largest = max(i0 + T - 1, 0)                       # distance of a query from the first key
    reaches = (w.detach().ceil() - 1).clamp(max=largest).long().tolist()
    if T <= 16:
        return screen_few(q, k, v, w, r, i0, screen, reaches)
    dtype = torch.promote_types(q.dtype, torch.float32)
    tiles = zip(*(x.to(dtype).unbind(1) for x in (q, k, v)), w.split(1), r.split(1), reaches)
    h = []
    for q_n, k_n, v_n, w_n, r_n, reach in tiles:
        C = min(max(2 ** (reach - 1).bit_length(), 8), 64)     # rows of a block, few if narrow
        front = -i0 % C                                # so that keys and queries share their cuts
        q_n, k_n, v_n = blocks(q_n, 0, C), blocks(k_n, front, C), blocks(v_n, front, C)
        pieces = list(diagonals(q_n, k_n, i0 + front, reach))
        keep = B * T * min(reach + C, T) <= PAIRS_KEPT
        h_n = Blockwise.apply(q_n, k_n, v_n, w_n, r_n, screen, pieces, keep)
        h.append(h_n.flatten(1, 2)[:, :T])
    return torch.stack(h, 2).transpose(1, 2).to(v.dtype)


screen_windowed.keeps_to_window = True                 # a KeyCache may drop what lies outside


def screen_few(q, k, v, w, r, i0, screen, reaches):
    """`screen_windowed` for few queries, as in decoding: tiles that see few keys share a call."""
    groups = [(slice(n, n + 1), reach) for n, reach in enumerate(reaches) if reach > 256]
    near = [n for n, reach in enumerate(reaches) if reach <= 256]
    if near:
        groups.append((near if groups else slice(None), max(reaches[n] for n in near)))
    h = v.new_empty(*q.shape[:3], v.shape[3])
    for tiles, reach in groups:
        seen = slice(max(i0 - reach, 0), max(i0 + q.shape[2], 0))
        h[:, tiles] = screen(q[:, tiles], k[:, tiles, seen], v[:, tiles, seen], w[tiles], r[tiles],
                             i0 - seen.start)
    return h


def blocks(x, front, C):
    """x: (B, S, D) after `front` rows of zeros, in blocks of C rows. (B, n, C, D)"""
    return F.pad(x, (0, 0, front, -(front + x.shape[1]) % C)).unflatten(1, (-1, C))


def diagonals(q, k, start, reach):
    """Yield (i, j, i0): slices of query blocks and of key blocks, one diagonal after the other.

    q, k: (B, n, C, D). start: the first query, counted from the first key, a multiple of C.
    i0: the first query of a block, counted from the first key of its keys' block.
    """
    B, n_q, C, _ = q.shape
    n = max(PAIRS_AT_ONCE // (B * C * C), 1)
    for p in range(-(-reach // C) + 1):
        shift = start // C - p
        end = min(n_q, k.shape[1] - shift)
        for a in range(max(-shift, 0), end, n):
            b = min(a + n, end)
            yield slice(a, b), slice(a + shift, b + shift), p * C


class Blockwise(torch.autograd.Function):
    """The sum of `screen` over pieces (i, j, i0) of one tile. Autograd differentiates each piece.

    With `keep` the graphs of the pieces are kept. Otherwise backward computes them again.
    """

    @staticmethod
    def piece(ctx, i, j, i0, q, k, v, w, r):
        """(inputs, h): `screen` of one piece, and the leaves of its graph."""
        inputs = [x.detach().requires_grad_(ctx.needed) for x in (q[:, i], k[:, j], v[:, j], w, r)]
        with torch.set_grad_enabled(ctx.needed):
            return inputs, ctx.screen(*inputs, i0)

    @staticmethod
    def forward(ctx, q, k, v, w, r, screen, pieces, keep):
        ctx.save_for_backward(q, k, v, w, r)
        ctx.screen, ctx.pieces, ctx.kept = screen, pieces, []
        ctx.needed = any(ctx.needs_input_grad)
        h = v.new_zeros(*q.shape[:3], v.shape[3])
        for i, j, i0 in pieces:
            inputs, part = Blockwise.piece(ctx, i, j, i0, q, k, v, w, r)
            h[:, i] += part.detach()
            if keep and ctx.needed:
                ctx.kept.append((inputs, part))
        return h

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dh):
        dq, dk, dv, dw, dr = (torch.zeros_like(x) for x in ctx.saved_tensors)
        again = (Blockwise.piece(ctx, *piece, *ctx.saved_tensors) for piece in ctx.pieces)
        for (i, j, _), (inputs, h) in zip(ctx.pieces, ctx.kept or again):
            parts = torch.autograd.grad(h, inputs, dh[:, i], allow_unused=True,
                                        materialize_grads=True)
            for total, part in zip((dq[:, i], dk[:, j], dv[:, j], dw, dr), parts):
                total += part
        ctx.kept = []
        return dq, dk, dv, dw, dr, None, None, None


# ------------------------------------------------------------------------------- the model

def matmul(x, W, dtype=None):
    """x W, multiplied in `dtype` (None: as it is), returned in x's dtype."""
    dtype = dtype or x.dtype
    return (x.to(dtype) @ W.to(dtype)).to(x.dtype)


class GatedScreeningTiles(nn.Module):
    """One layer: N_H gated screening tiles side by side.

    `encode`, `acceptance`, `bound` and `gate` are made to be overridden: an exercise or an ablation
    is a subclass that changes one of them. dtype: of the matrix products, None for the parameters'.
    """

    def __init__(self, config, dtype=None):
        super().__init__()
        H, E, K, V = config.N_H, config.d_E, config.d_K, config.d_V
        self.w_th, self.dtype = config.w_th, dtype
        self.W_Q = nn.Parameter(torch.empty(E, H, K))
        self.W_K = nn.Parameter(torch.empty(E, H, K))
        self.W_V = nn.Parameter(torch.empty(E, H, V))
        self.W_G = nn.Parameter(torch.empty(E, H, V))
        self.W_O = nn.Parameter(torch.empty(H, V, E))
        self.s_w = nn.Parameter(torch.empty(H))
        self.s_r = nn.Parameter(torch.empty(H))
        self.s_O = nn.Parameter(torch.empty(H))

    def encode(self, x_bar, i, w):
        """MiPE (Eqs. 6, 7) of unit queries or keys (B, H, T, K) at positions i (T,). Like x_bar."""
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
        """Eq. (15): q, k, v, g = x W for all tiles. (B, T, E) x (E, H, D) -> (B, H, T, D)"""
        return matmul(x, W.flatten(1), self.dtype).unflatten(-1, W.shape[1:]).transpose(1, 2)

    def screening(self, x, screen, cache=None):
        """Eq. (16): u = Screening(q, k, v) of x, after what is in the cache. -> (B, H, T, V)"""
        w, r = window(self.s_w), self.acceptance()
        start = cache.end if cache else 0
        i = torch.arange(start, start + x.shape[1], device=x.device)
        q_tilde = self.encode(unit(self.project(x, self.W_Q)), i, w)
        k_tilde = self.encode(unit(self.project(x, self.W_K)), i, w)
        v_bar = unit(self.project(x, self.W_V)).to(self.dtype or x.dtype)
        first = 0
        if cache:
            k_tilde, v_bar, first = cache.append(k_tilde, v_bar, w)
        return self.bound(screen(q_tilde, k_tilde, v_bar, w, r, start - first).to(x.dtype))

    def forward(self, x, screen, cache=None):
        """Eq. (18), the update: Delta x = (u * g_hat) (e^s_O W_O); Eq. (2): x + sum_h Delta x^(h).

        x: (B, T, E) -> (B, T, E). The product over (H, V) is the sum over the tiles.
        """
        y = self.screening(x, screen, cache) * self.gate(x)
        W_O = self.s_O.exp()[:, None, None] * self.W_O
        return x + matmul(y.transpose(1, 2).flatten(2), W_O.flatten(0, 1), self.dtype)


class KeyCache:
    """The keys and values of one layer that a later query may see: encoded, unit, oldest first.

    When the buffer is full, what lies outside every window is dropped: memory is bounded if all
    windows are finite. With `whole` nothing is dropped: a changed definition may see further.
    """

    def __init__(self):
        self.k = self.v = None
        self.whole = False
        self.first = self.end = 0                      # positions: the oldest key, the next token

    @torch.compiler.disable                            # its sizes change with every call
    def append(self, k, v, w):
        """Add (B, H, T, K) keys, (B, H, T, V) values. Returns all kept, and the first position."""
        T = k.shape[2]
        n = self.end - self.first
        if self.k is None:
            self.k, self.v = k[:, :, :0], v[:, :, :0]
        if n + T > self.k.shape[2]:
            kept = n if self.whole else math.ceil(min(w.max().item(), n))
            self.k = F.pad(self.k[:, :, n - kept : n], (0, 0, 0, T + 1023))
            self.v = F.pad(self.v[:, :, n - kept : n], (0, 0, 0, T + 1023))
            self.first = self.end - kept
            n = kept
        self.k[:, :, n : n + T] = k
        self.v[:, :, n : n + T] = v
        self.end += T
        return self.k[:, :, : n + T], self.v[:, :, : n + T], self.first


class Multiscreen(nn.Module):
    """The language model: tokens (B, T) -> logits (B, T, N).

    screen: `screen_windowed`, or any function with the arguments of `screen`. After an edit of the
    equations take `screen`, or `support.kernel.get_screen`, which compares. tiles: the class of a
    layer. dtype: of the matrix products (torch.bfloat16, say), None for the parameters' own.
    """

    def __init__(self, config, dtype=None, tiles=GatedScreeningTiles):
        super().__init__()
        self.config, self.dtype, self.screen = config, dtype, screen_windowed
        self.W_E = nn.Parameter(torch.empty(config.vocab_size, config.d_E))
        self.s_E = nn.Parameter(torch.empty(1))
        self.s_F = nn.Parameter(torch.empty(1))
        self.layers = nn.ModuleList(tiles(config, dtype) for _ in range(config.N_L))
        self.initialize()

    @torch.no_grad()
    def initialize(self):
        """The paper's table of initial values. N(0, std) for matrices."""
        c = self.config
        std = {"W_Q": 0.1 / math.sqrt(c.d_K), "W_K": 0.1 / math.sqrt(c.d_K),
               "W_V": 0.1 / math.sqrt(c.d_V), "W_G": 0.1, "W_O": 0.1 / math.sqrt(c.d_E)}
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
        """x^(N_L), after the last layer. (B, T) -> (B, T, E). caches: a KeyCache a layer, or None.

        Without gradients, long inputs are processed in chunks to save memory.
        """
        if tokens.ndim != 2 or tokens.numel() == 0:
            raise ValueError(f"tokens have the shape {tuple(tokens.shape)}: give (B, T), "
                             "at least one of each")
        if tokens.shape[1] > chunk and not torch.is_grad_enabled():
            caches = caches or [KeyCache() for _ in self.layers]
            return torch.cat([self.hidden(t, caches, chunk) for t in tokens.split(chunk, 1)], 1)
        x = self.embed(tokens)
        for tile, cache in zip(self.layers, caches or [None] * len(self.layers)):
            if cache:
                cache.whole = not getattr(self.screen, "keeps_to_window", False)
            x = tile(x, self.screen, cache)
        return x

    def logits(self, x):
        """Eq. (3): z = x (e^s_F W_E_bar)^T. (..., E) -> (..., N)"""
        return matmul(x, (self.s_F.exp() * unit(self.W_E)).T, self.dtype)

    def forward(self, tokens, caches=None):
        """tokens: (B, T) integers -> logits (B, T, N)."""
        return self.logits(self.hidden(tokens, caches))

    def loss(self, tokens, targets, reduction="mean"):
        """Cross-entropy in nats, (B, T) x (B, T) -> a scalar, or (B, T) for reduction="none".

        Targets of -100 do not count. Chunks of logits are recomputed in backward: 2^17 x 50257 of
        them never exist at once.
        """
        if reduction not in ("mean", "none"):
            raise ValueError(f"reduction {reduction!r}: take 'mean' or 'none'")
        if targets.shape != tokens.shape:
            raise ValueError(f"targets have the shape {tuple(targets.shape)}, tokens "
                             f"{tuple(tokens.shape)}: they must be the same")

        def part(x, y):
            return F.cross_entropy(self.logits(x), y, reduction="none")

        x, y = self.hidden(tokens).flatten(0, 1), targets.flatten()
        size = max(2**25 // self.config.vocab_size, 1)
        chunks = zip(x.split(size), y.split(size))
        nats = torch.cat([checkpoint(part, x, y, use_reentrant=False) for x, y in chunks])
        return nats.sum() / (y != -100).sum() if reduction == "mean" else nats.view(targets.shape)

    @torch.no_grad()
    def relevance_maps(self, tokens):
        """alpha_d of every layer and tile: a list of N_L tensors (B, H, T, T). Memory O(T^2)."""
        maps = []

        def record(q, k, v, w, r, i0):
            maps.append(relevance(q, k, w, r, i0))
            return self.screen(q, k, v, w, r, i0)

        x = self.embed(tokens)
        for tile in self.layers:
            x = tile(x, record)
        return maps

    @torch.no_grad()
    def expand_windows(self, T_train):
        """Screening-window expansion: windows beyond T_train become infinite, in place."""
        for tile in self.layers:
            tile.s_w.masked_fill_(window(tile.s_w) > T_train, torch.inf)

    @torch.no_grad()
    def stream(self, tokens, n, temperature=0.0, top_k=None, generator=None):
        """Yield n next tokens, (B,) each, decoding with a cache. tokens: (B, T), T >= 1.

        Greedy for temperature 0, otherwise sampled from softmax(logits / temperature), from the
        top_k tokens if given.
        """
        if temperature < 0:
            raise ValueError(f"temperature {temperature}: it must be at least 0")
        if top_k is not None and top_k < 1:
            raise ValueError(f"top_k {top_k}: it must be at least 1")
        caches = [KeyCache() for _ in self.layers]
        for _ in range(n):
            z = self.logits(self.hidden(tokens, caches)[:, -1])
            if temperature == 0:
                tokens = z.argmax(-1, keepdim=True)
            else:
                if top_k is not None:
                    least = z.topk(min(top_k, z.shape[-1])).values[:, -1:]
                    z = z.masked_fill(z < least, -torch.inf)
                p = (z / temperature).softmax(-1)
                tokens = torch.multinomial(p, 1, generator=generator)
            yield tokens[:, 0]

    def generate(self, tokens, n, **options):
        """The n tokens that `stream` yields, (B, n)."""
        new = list(self.stream(tokens, n, **options))
        return torch.stack(new, 1) if new else tokens[:, :0]
