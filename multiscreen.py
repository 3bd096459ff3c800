"""Multiscreen, from K. M. Nakanishi's "Screening Is Enough": each equation is written here once.

Softmax attention divides a fixed budget of weight among all keys: the keys compete, and none can be
rejected. Screening judges each key alone. A key is kept only if its similarity to the query passes
a threshold (Trim) and its distance lies in a learned window (Softmask). The kept values are summed,
each weighted by the relevance of its key. Relevance is in [0, 1] (up to 1.001 with rounding), it is
exactly 0 for a rejected key, and no other key changes it. A layer has many small gated tiles.

Symbol            meaning                                                    where
x_i^(l)           representation of position i after layer l, in R^E         Multiscreen
W_E, s_E, s_F     embedding, tied to the head; log scales of input and head  Multiscreen
W_Q W_K W_V W_G   projections to each tile's query, key, value and gate      GatedScreeningTiles
W_O, s_O          each tile's projection back to R^E, and its log scale      GatedScreeningTiles
s_w -> w          screening window: keys at distance >= w are never seen     window
s_r -> r          acceptance width: similarities <= 1 - r are rejected       acceptance
q_bar k_bar v_bar query, key and value of unit length                        unit
q_tilde, k_tilde  q_bar and k_bar with their positions encoded               mipe
w_th              tiles with a window >= w_th get no positional encoding     mipe_angle
s, alpha          similarity in [-1, 1]; distance-unaware relevance          relevance, trim
m, alpha_d        softmask; distance-aware relevance alpha m                 softmask, relevance
h, u, g_hat       screened sum of values; the same, bounded; the gate        screen, tanh_norm, gate

Axes: B batch, T queries i, S keys j, H tiles of a layer, E d_E, K d_K, V d_V, N vocabulary.
Relevances and MiPE's angles are float32, or float64 if the parameters are; angles are computed in
float64. Without autocast, the type of a float changes only by a written `.to` or `double`.
"""
import math
from dataclasses import dataclass
from functools import wraps

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


@dataclass
class Config:
    """Sizes: N_L layers of N_H tiles, both psi unless given; width d_E, psi^2 unless given.

    There is no maximum length of a text.
    """
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
        for name, value in vars(self).items():
            # d_K > 1: MiPE rotates two dimensions. w_th > 1: no window is below 1.
            lowest = {"d_K": 1, "w_th": 1}.get(name, 0)
            if not lowest < value < math.inf:
                raise ValueError(f"{name} is {value}; expected a finite number above {lowest}")


# ---------------------------------------------------------------------- one screening unit

def window(s_w):
    """Eq. (4), the screening window: w = exp(s_w) + 1, in [1, inf]. Shape of s_w.

    If s_w = +inf, w = +inf, so no key is too far. Otherwise w is at most e^80, because float32 ends
    at e^88; above s_w = 80 the gradient is 0.
    """
    w = s_w.clamp(max=80.0).exp() + 1
    return w.masked_fill(s_w == torch.inf, torch.inf)


def acceptance(s_r):
    """The second half of Eq. 4, the acceptance width: r = sigmoid(s_r), at least 1e-3.

    The floor is ours; below it s_r gets no gradient. In float32 a similarity is off by up to 5e-7,
    and a relevance by up to 2/r times as much, which is 0.001 at the floor. Instead of 1/r, version
    1 of the paper and most other code use exp(s_r) + 1 = 1/sigmoid(-s_r): their s_r is our -s_r.
    """
    return torch.sigmoid(s_r).clamp_min(1e-3)


def unit(x, eps=1e-6):
    """Eq. (5), unit length: x_bar = x / |x|. (..., D) -> (..., D)

    |x| counts as at least eps, so a vector of zeros stays 0 and its gradient is finite.
    """
    length = x.square().sum(-1, keepdim=True).clamp_min(eps**2).sqrt()
    return x / length


def double(x):
    """x in float64, on the CPU if the device has no float64 (Apple's)."""
    return (x.cpu() if x.is_mps else x).double()


def mipe_angle(i, w, w_th):
    """Eq. (6), MiPE's angle: phi(i, w) = pi i gamma(w) / w, reduced to [0, 2 pi).

    Eq. (7): gamma(w) = (cos(pi w / w_th) + 1)/2 for w < w_th, else 0. Over a window the angle turns
    by at most pi. i: (T,) integers; w: (H,). Returns (H, T). It is computed in float64, because in
    float32 the angle would be off by about 0.01 rad at i = 2^17.
    """
    # Clamp wider windows to w_th, where gamma and its slope are 0.
    w_near = double(w).clamp(max=w_th)
    gamma = 0.5 * (torch.cos(math.pi * w_near / w_th) + 1)
    angle = torch.remainder(i.to(w_near.device) * (math.pi * gamma / w_near)[:, None], 2 * math.pi)
    return angle.to(torch.promote_types(w.dtype, torch.float32)).to(w.device)


def mipe(x, angle):
    """MiPE: rotate the first two dimensions. (B, H, T, K) by angles (H, T) -> (B, H, T, K)

    With queries and keys rotated by phi, similarities depend on positions only through j - i.
    """
    x0, x1, rest = x.split((1, 1, x.shape[-1] - 2), -1)
    cos, sin = torch.cos(angle)[..., None], torch.sin(angle)[..., None]
    return torch.cat((x0 * cos - x1 * sin, x0 * sin + x1 * cos, rest), -1)


def trim(s, r):
    """Eq. (9), Trim: alpha = max(1 - (1 - s)/r, 0)^2, distance-unaware relevance.

    s: (..., T, S) similarities in [-1, 1]; r: broadcastable, in (0, 1]. Returns the shape of s.
    Exactly 0 where 1 - s >= r, and both the value and the slope are continuous at that edge.
    """
    return (1 - (1 - s) / r).relu().square()


def softmask(d, w):
    """Eq. (10), Softmask: m = (cos(pi d / w) + 1)/2 where -w < d <= 0, else 0.

    d: (T, S) = j - i, key minus query position; w: broadcastable. Returns values in [0, 1].
    Exactly 0 in the future (d > 0) and at distance w or more. If w = inf, m is 1 wherever d <= 0.
    """
    inside = (-w < d) & (d <= 0)
    return torch.where(inside, 0.5 * (torch.cos(math.pi * (d / w)) + 1), 0.0)


def no_autocast(f):
    """f without autocast, which would round the products in f to 16 bits."""
    @wraps(f)
    def outside(q, *inputs, **options):
        if not torch.is_autocast_enabled(q.device.type):
            return f(q, *inputs, **options)
        with torch.autocast(q.device.type, enabled=False):
            return f(q, *inputs, **options)
    return outside


@no_autocast
def relevance(q, k, w, r, i0=0):
    """Eq. (11), distance-aware relevance of key j to query i: alpha_d_ij = Trim(s_ij) m_ij.

    Eq. (8), similarity: s_ij = q_i . k_j; m_ij = Softmask(j - i).
    q: (B, H, T, K), k: (B, H, S, K), unit vectors with positions encoded; w, r: (H,).
    i0: the first query's position, counted from the first key; above 0 after a cache. Returns
    (B, H, T, S).
    """
    w, r = w[:, None, None], r[:, None, None]
    i = torch.arange(i0, i0 + q.shape[2], device=q.device)
    j = torch.arange(k.shape[2], device=k.device)
    s = q @ k.transpose(-2, -1)
    return trim(s, r) * softmask(j - i[:, None], w)


@no_autocast
def screen(q, k, v, w, r, i0=0):
    """Eq. (12), screening: h_i = sum_j alpha_d_ij v_j. The definition: T x S memory.

    q, k, w, r, i0: as in `relevance`; v: (B, H, S, V), unit vectors. Computes in float32, or in
    float64 if q is float64, and returns (B, H, T, V) in v's dtype.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    alpha_d = relevance(q.to(dtype), k.to(dtype), w.to(dtype), r.to(dtype), i0)
    return (alpha_d @ v.to(dtype)).to(v.dtype)


def tanh_norm(x, eps=1e-6):
    """Eq. (13), TanhNorm: x tanh|x| / |x| bounds the length by 1 and keeps the direction.

    (..., D) -> (..., D). Where |x| < eps the result is x: the Jacobian at 0 is the identity.
    """
    # sqrt has no finite slope at 0. Where x is small, write 1 for the norm, then 1 for the factor.
    square = x.square().sum(-1, keepdim=True)
    small = square < eps**2
    norm = square.masked_fill(small, 1.0).sqrt()
    return x * (torch.tanh(norm) / norm).masked_fill(small, 1.0)


# ------------------------------------------------------------------------------- the model

def product(axes, x, W, dtype=None):
    """torch.einsum(axes, x, W), computed in `dtype` if one is given, returned in x's dtype."""
    if dtype is not None:
        return torch.einsum(axes, x.to(dtype), W.to(dtype)).to(x.dtype)
    # Under autocast the product has 16 bits: cast back.
    return torch.einsum(axes, x, W).to(x.dtype)


class GatedScreeningTiles(nn.Module):
    """One layer: N_H gated screening tiles side by side.

    Read `forward` first: x -> `screening` (`project`, `encode`, `screen`, `bound`) times `gate`.
    A variant is a subclass that overrides `initialize`, `encode`, `w`, `r`, `bound`, `gate` or
    `screening`. Relevance maps need a `screening` that calls the `screen` it is given. Tools show
    s_w, s_r and s_O for each tile, so a variant must keep them, of shape (N_H,).
    dtype: that of products with weights; None means that of the parameters.
    """

    def __init__(self, config, dtype=None):
        super().__init__()
        self.config, self.dtype = config, dtype
        self.initialize()

    def initialize(self):
        """The paper's table of initial values. The factor before randn is the std.

        Windows w start between 2 and w_th + 1, evenly spaced in log(w - 1), and r starts at 1/2.
        """
        c = self.config
        H, E, K, V = c.N_H, c.d_E, c.d_K, c.d_V
        self.W_Q = nn.Parameter(0.1 / math.sqrt(K) * torch.randn(E, H, K))
        self.W_K = nn.Parameter(0.1 / math.sqrt(K) * torch.randn(E, H, K))
        self.W_V = nn.Parameter(0.1 / math.sqrt(V) * torch.randn(E, H, V))
        self.W_G = nn.Parameter(0.1 * torch.randn(E, H, V))
        self.W_O = nn.Parameter(0.1 / math.sqrt(E) * torch.randn(H, V, E))
        self.s_w = nn.Parameter(torch.linspace(0, math.log(c.w_th), H))
        self.s_r = nn.Parameter(torch.zeros(H))
        self.s_O = nn.Parameter(torch.full((H,), math.log(1 / math.sqrt(H * c.N_L))))

    @property
    def w(self):
        """w of each tile, (H,): Eq. 4."""
        return window(self.s_w)

    @property
    def r(self):
        """r of each tile, (H,): the second half of Eq. 4."""
        return acceptance(self.s_r)

    def encode(self, x_bar, i, w):
        """MiPE (Eqs. 6, 7). x_bar: (2B, H, T, K), B unit queries, then B unit keys; i: (T,)."""
        return mipe(x_bar, mipe_angle(i, w, self.config.w_th))

    def bound(self, h):
        """Eq. (14): u = TanhNorm(h). (B, H, T, V) -> (B, H, T, V)"""
        return tanh_norm(h)

    def project(self, x, W):
        """Eq. (15): q, k, v, g = x W for all tiles. (B, T, E) x (E, H, D) -> (B, H, T, D)"""
        return product("bte,ehd->bhtd", x, W, self.dtype)

    def screening(self, x, screen, cache=None):
        """Eq. (16): u = Screening(q, k, v) of x, continuing the cache. -> (B, H, T, V)

        screen: Eq. 12. The model passes it in, so that a kernel can take its place and
        `relevance_maps` can record it. A screen with the attribute within_w = True promises to look
        at no key at distance w or more: then the cache may forget such keys.
        """
        w, r = self.w, self.r
        # The position of x's first token.
        start = 0 if cache is None else cache.end
        i = torch.arange(start, start + x.shape[1], device=x.device)
        q, k = self.project(x, self.W_Q), self.project(x, self.W_K)
        # q and k have the same positions, so one call encodes both.
        q_tilde, k_tilde = self.encode(unit(torch.cat((q, k))), i, w).chunk(2)
        v_bar = unit(self.project(x, self.W_V)).to(self.dtype or x.dtype)
        i0 = 0
        if cache is not None:
            reach = w if getattr(screen, "within_w", False) else None
            k_tilde, v_bar = cache.append(k_tilde, v_bar, reach)
            # The queries are at the positions of the last keys; the first keys may be forgotten.
            i0 = k_tilde.shape[2] - x.shape[1]
        h = screen(q_tilde, k_tilde, v_bar, w, r, i0)
        return self.bound(h.to(x.dtype))

    def gate(self, x):
        """Eq. (17), the gate: g_hat = tanh(SiLU(g)), g = x W_G. (B, T, E) -> (B, H, T, V)"""
        return torch.tanh(F.silu(self.project(x, self.W_G)))

    def forward(self, x, screen, cache=None):
        """Eq. (18), the update: Delta x = (u * g_hat) (e^s_O W_O); Eq. (2): x + sum_h Delta x^(h).

        x: (B, T, E) -> (B, T, E). One product sums over V and over the tiles, H.
        """
        y = self.screening(x, screen, cache) * self.gate(x)
        W_O = self.s_O.exp()[:, None, None] * self.W_O
        return x + product("bhtv,hve->bte", y, W_O, self.dtype)


class Multiscreen(nn.Module):
    """The language model of the paper: tokens (B, T) -> logits (B, T, N).

    tiles: the class of a layer. dtype: that of products with weights, such as torch.bfloat16; None
    means that of the parameters.
    """
    logits_at_once = 2**25                             # logits that `loss` computes at a time
    tokens_at_once = 2**9                              # prompt tokens that `stream` reads at a time

    def __init__(self, config, dtype=None, tiles=GatedScreeningTiles):
        super().__init__()
        self.config, self.dtype = config, dtype
        self.layers = nn.ModuleList(tiles(config, dtype) for _ in range(config.N_L))
        N, E = config.vocab_size, config.d_E
        self.W_E = nn.Parameter(0.1 / math.sqrt(E) * torch.randn(N, E))
        self.s_E = nn.Parameter(torch.zeros(1))
        self.s_F = nn.Parameter(torch.full((1,), math.log(math.sqrt(E))))

    def embed(self, tokens):
        """Eq. (1): x^(0) = e^s_E e_bar_t. (B, T) -> (B, T, E)"""
        if self.W_E.dtype not in (torch.float32, torch.float64):
            raise TypeError(f"the parameters are {self.W_E.dtype}: keep them in float32, and pass "
                            "dtype=torch.bfloat16 to the model for its products")
        return self.s_E.exp() * unit(F.embedding(tokens, self.W_E))

    @staticmethod
    def screen(q, k, v, w, r, i0=0):
        """Eq. 12, the definition. Assign a faster twin, or your own function, to model.screen."""
        return screen(q, k, v, w, r, i0)

    def hidden(self, tokens, caches=None, screen=None):
        """x^(N_L), after the last layer. (B, T) -> (B, T, E). caches: one for each layer.

        screen: Eq. 12 in this call; None means the model's own. All tokens go through a layer at
        once, so split a long text, as `stream` does.
        """
        if tokens.ndim != 2 or tokens.numel() == 0:
            raise ValueError(f"tokens has shape {tuple(tokens.shape)}; expected (B, T), B and T "
                             "at least 1")
        if caches is None:
            caches = [None] * len(self.layers)
        if screen is None:
            screen = self.screen
        x = self.embed(tokens)
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, screen, cache)
        return x

    def head(self):
        """The matrix of Eq. 3, e^s_F W_E_bar, (N, E)."""
        return self.s_F.exp() * unit(self.W_E)

    def logits(self, x, head=None):
        """Eq. (3): z = x (e^s_F W_E_bar)^T. (..., E) -> (..., N). head: that of `head`."""
        head = self.head() if head is None else head
        return product("...e,ne->...n", x, head, self.dtype)

    def forward(self, tokens, caches=None):
        """tokens: (B, T) integers -> logits (B, T, N)."""
        return self.logits(self.hidden(tokens, caches))

    def nats(self, x, targets, head):
        """The cross-entropy of each target. (n, E), (n,) -> (n,)"""
        return F.cross_entropy(self.logits(x, head), targets, reduction="none")

    def loss(self, tokens, targets, reduction="mean"):
        """Cross-entropy in nats, (B, T) x (B, T) -> a scalar, or (B, T) for reduction="none".

        Targets of -100 are ignored. More than `logits_at_once` logits are computed in chunks, and
        again in backward (torch.func cannot differentiate that).
        """
        if reduction not in ("mean", "none"):
            raise ValueError(f"reduction is {reduction!r}; expected 'mean' or 'none'")
        if targets.shape != tokens.shape:
            raise ValueError(f"targets has shape {tuple(targets.shape)}; expected that of tokens, "
                             f"{tuple(tokens.shape)}")
        x, t, head = self.hidden(tokens).flatten(0, 1), targets.flatten(), self.head()
        chunk = max(self.logits_at_once // self.config.vocab_size, 1)
        if len(t) <= chunk:
            nats = self.nats(x, t, head)
        else:
            # `nats` draws no random numbers, so `checkpoint` need not restore a generator's state.
            nats = torch.cat([checkpoint(self.nats, x_part, t_part, head, use_reentrant=False,
                                         preserve_rng_state=False)
                              for x_part, t_part in zip(x.split(chunk), t.split(chunk))])
        if reduction == "none":
            return nats.view(targets.shape)
        return nats.sum() / (t != -100).sum().clamp_min(1)

    # ------------------------------------------------------------------ using a trained model

    def new_caches(self):
        """An empty cache for each layer: a KeyCache, or `screen.cache` if the screen has one."""
        kind = getattr(self.screen, "cache", KeyCache)
        return [kind() for _ in self.layers]

    @torch.no_grad()
    def stream(self, tokens, n, temperature=0.0, top_k=None, generator=None):
        """Yield the next n tokens, (B,) each, decoding with a cache. tokens: (B, T), T >= 1.

        Greedy at temperature 0, otherwise drawn from softmax(logits / temperature) over the top_k.
        """
        if not (temperature == 0 or temperature >= 1e-4):
            raise ValueError(f"temperature is {temperature}; expected 0, or at least 1e-4")
        if top_k is not None and top_k < 1:
            raise ValueError(f"top_k is {top_k}; expected at least 1")
        caches, head, finite = self.new_caches(), self.head(), True
        for step in range(n):
            # The prompt goes through in pieces, then one token per step: the caches hold the rest.
            for piece in tokens.split(self.tokens_at_once, -1):
                x = self.hidden(piece, caches)
            z = self.logits(x[:, -1], head)

            # To read `finite`, the CPU waits for the GPU: do so at the first and last token only.
            finite = z.isfinite().all() & finite
            if step in (0, n - 1) and not finite:
                raise FloatingPointError("the logits are not finite: has the model diverged, or "
                                         "does a layer fail with a cache?")
            if top_k is not None:
                k_th = z.topk(min(top_k, z.shape[-1])).values[:, -1:]      # the smallest kept
                z = z.masked_fill(z < k_th, -torch.inf)
            if temperature == 0:
                tokens = z.argmax(-1, keepdim=True)
            else:
                # On a GPU multinomial aborts the process at a NaN, before the check above can
                # report it.
                p = (z / temperature).softmax(-1).nan_to_num(1.0)
                tokens = torch.multinomial(p, 1, generator=generator)
            yield tokens[:, 0]

    def generate(self, tokens, n, **options):
        """The n tokens that `stream` yields, (B, n)."""
        new = list(self.stream(tokens, n, **options))
        return torch.stack(new, 1) if new else tokens[:, :0]

    @torch.no_grad()
    def relevance_maps(self, tokens):
        """The weight of each key in each tile: a list of N_L tensors (B, H, T, T).

        With the identity as values, the model's screen returns its weights. The identity is fed d_V
        columns at a time. There is one map for each call of the screen.
        """
        maps, own = [], self.screen

        def record(q, k, v, w, r, i0=0):
            B, H, S, V = v.shape
            missing = -S % V                           # zero columns that make S a multiple of V
            identity = F.pad(torch.eye(S, dtype=q.dtype, device=q.device), (0, missing))
            columns = [own(q, k, e.expand(B, H, S, V), w, r, i0) for e in identity.split(V, 1)]
            maps.append(torch.cat(columns, -1)[..., :S])
            return own(q, k, v, w, r, i0)

        self.hidden(tokens, screen=record)
        return maps

    @torch.no_grad()
    def expand_windows(self, T_train):
        """Screening-window expansion (SWE): windows beyond T_train become infinite, in place.

        Start new caches afterwards: an old cache may have forgotten keys outside the old windows.
        """
        for layer in self.layers:
            layer.s_w.masked_fill_(layer.w > T_train, torch.inf)


class KeyCache:
    """The encoded keys and the values of all tokens that a layer has seen.

    Gradients flow through the cache. For truncated backpropagation, detach k and v between calls.
    """

    def __init__(self):
        self.k = self.v = None
        self.end = 0                                   # the position of the next token

    def append(self, k, v, w=None):
        """Add keys (B, H, T, K) and values (B, H, T, V). Returns those of all tokens.

        w: (H,), unused here. A cache that forgets, such as screening_cpu's, drops keys beyond all
        windows w; None tells it to keep every key.
        """
        self.end += k.shape[2]
        if self.k is not None:
            k, v = torch.cat((self.k, k), 2), torch.cat((self.v, v), 2)
        self.k, self.v = k, v
        return k, v
