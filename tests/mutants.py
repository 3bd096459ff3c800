"""Known mistakes: most were made in public by other implementations of the paper.

Each is a wrong version of one exercise, with words from the message a student gets for it.
tests/test_exercises.py checks the messages, and that the CORRECT versions pass: they are right, but
written differently from multiscreen.py. Teachers: look for these mistakes when you read solutions,
and for the wrong values that the course's tests give to `expect`. One of those for each comparison
is enough here.
"""
import math

import torch
import torch.nn.functional as F

import multiscreen as ms
from exercises.solutions import part3_derivative as solved

MUTANTS = []                                           # (exercise, f, words from its message)
CORRECT = []                                           # (exercise, f)


def mutant(exercise, words):
    """Add one function or class to MUTANTS. Part 2's exercises are methods."""
    def add(f):
        MUTANTS.append((exercise, f, words))
        return f
    return add


def mistakes(exercise, wrong):
    """Add functions to MUTANTS. wrong: {words: f}"""
    MUTANTS.extend((exercise, f, words) for words, f in wrong.items())


def methods(exercise, base, name, wrong):
    """Add classes to MUTANTS: `base` with its method `name` replaced by each f of {words: f}."""
    mistakes(exercise, {words: type(base.__name__, (base,), {name: f})
                        for words, f in wrong.items()})


def correct(exercise):
    def add(f):
        CORRECT.append((exercise, f))
        return f
    return add


def stands_for(exercise, f):
    """The name in adapters.py that f replaces: its exercise, or a class of multiscreen.py."""
    if not isinstance(f, type):
        return exercise
    return next(c.__name__ for c in f.__mro__ if c.__module__ == "multiscreen")


# ------------------------------------------------------------------------ windows and widths

mistakes("window", {
    "a clamp makes it finite": lambda s_w: s_w.clamp(max=80).exp() + 1,
    "s_w is clamped at 10": lambda s_w: torch.where(s_w < math.inf, s_w.clamp(max=10).exp() + 1,
                                                    math.inf),
    "of float64 numbers is torch.float32": lambda s_w: ms.window(s_w).float(),
    "the gradient at s_w = inf is": lambda s_w: s_w.exp() + 1,
})


@correct("window")
def window_by_a_mask(s_w):
    far = s_w == math.inf
    return 1 + torch.exp(s_w.masked_fill(far, 0.0)).masked_fill(far, math.inf)


mistakes("acceptance", {
    "clip r there, add nothing": lambda s_r: torch.sigmoid(s_r) + 1e-3,
    "older version of the paper": lambda s_r: s_r.exp() + 1,
    "is not clipped": lambda s_r: torch.sigmoid(s_r),
    "10^3 acceptance([-6, -9])": lambda s_r: torch.sigmoid(s_r).clamp_min(2e-3),
    "no gradient comes back": lambda s_r: ms.acceptance(s_r.detach()),
})


@correct("acceptance")
def acceptance_as_a_fraction(s_r):
    return (1 / (1 + torch.exp(-s_r))).clamp(1e-3, 1)


# ------------------------------------------------------------------------------ unit vectors

mistakes("unit", {
    "eps was added in the root":
        lambda x, eps=1e-6: x / (x.square().sum(-1, keepdim=True) + eps).sqrt(),
    "keepdim=True is missing": lambda x: x / x.norm(dim=-1),
    "taken along axis 1": lambda x: x / x.norm(dim=1, keepdim=True).clamp_min(1e-6),
    "eps was added": lambda x, eps=1e-6: x / (x.square().sum(-1, keepdim=True).sqrt() + eps),
    "unit(0) is not 0": lambda x: x / x.norm(dim=-1, keepdim=True),
    "clipped at less than eps": lambda x: F.normalize(x, dim=-1, eps=1e-12),
    "clip it at eps^2": lambda x, eps=1e-6: ms.unit(x, eps**0.5),
    "the length is detached":
        lambda x, eps=1e-6: x / x.norm(dim=-1, keepdim=True).clamp_min(eps).detach(),
    "Clip the square, before the root":
        lambda x, eps=1e-6: x / x.square().sum(-1, keepdim=True).sqrt().clamp_min(eps),
})


@correct("unit")
def unit_by_torch(x, eps=1e-6):
    return torch.nn.functional.normalize(x, dim=-1, eps=eps)


# -------------------------------------------------------------------------------------- MiPE

def gamma(w, w_th):
    return (torch.cos(math.pi * w.clamp(max=w_th) / w_th) + 1) / 2


mistakes("mipe_angle", {
    "the sign: the angle grows": lambda i, w, w_th: -ms.mipe_angle(i, w, w_th),
    "w_th is an argument": lambda i, w, w_th: ms.mipe_angle(i, w, 256.0),
    "no gradient comes back": lambda i, w, w_th: ms.mipe_angle(i, w.detach(), w_th),
    "is torch.float32; it should be torch.float64":
        lambda i, w, w_th: ms.mipe_angle(i, w, w_th).float(),
    "is torch.float64: return it in w's dtype":
        lambda i, w, w_th: ms.mipe_angle(i, w.double(), w_th),
    "turn i and w to float64":
        lambda i, w, w_th: math.pi * i * (gamma(w, w_th) / w.clamp(max=w_th))[:, None],
})


@mutant("mipe_angle", "MiPE still turns at w >= w_th")
def angle_that_comes_back(i, w, w_th):
    x = w.double()
    return (math.pi * i * ((torch.cos(math.pi * x / w_th) + 1) / 2 / x)[:, None]).to(w.dtype)


@mutant("mipe_angle", "the gradient of w is NaN at w = inf (w_th = 64)")
def angle_with_a_bare_where(i, w, w_th):
    x = w.double()
    cosine = (torch.cos(math.pi * x / w_th) + 1) / 2
    return (math.pi * i * (torch.where(x < w_th, cosine, 0.0) / x)[:, None]).to(w.dtype)


@correct("mipe_angle")
def angle_by_a_double_where(i, w, w_th):
    near = w < w_th
    safe = torch.where(near, w, w_th).double()
    turns = i[None] * (torch.where(near, gamma(safe, w_th), 0.0) / (2 * safe))[:, None]
    return (2 * math.pi * (turns - turns.round())).to(w.dtype)


mistakes("mipe", {
    "sine and cosine were swapped": lambda x, angle: ms.mipe(x, math.pi / 2 - angle),
    "each tile has angles of its own": lambda x, angle: ms.mipe(x, angle[:1].expand_as(angle)),
    "needs an axis at its end": lambda x, angle: ms.mipe(x, angle) if len(x) == 1
    else torch.cat((x, x[..., :6]), -1),
    "turned the wrong way": lambda x, angle: ms.mipe(x, -angle),
    "no gradient arrives at angle": lambda x, angle: ms.mipe(x, angle.detach()),
})


@mutant("mipe", "as in RoPE")
def mipe_of_all_pairs(x, angle):
    a, b = x[..., ::2], x[..., 1::2]
    cos, sin = torch.cos(angle)[..., None], torch.sin(angle)[..., None]
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)


@mutant("mipe", "one of the two sines has a minus")
def mipe_with_two_pluses(x, angle):
    x0, x1 = x[..., :1], x[..., 1:2]
    cos, sin = torch.cos(angle)[..., None], torch.sin(angle)[..., None]
    return torch.cat((x0 * cos + x1 * sin, x0 * sin + x1 * cos, x[..., 2:]), -1)


@correct("mipe")
def mipe_as_complex_numbers(x, angle):
    z = torch.view_as_complex(x[..., :2].contiguous()) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((torch.view_as_real(z), x[..., 2:]), -1)


# -------------------------------------------------------------------------- Trim and Softmask

mistakes("trim", {
    "divided by r, not multiplied": lambda s, r: (1 - (1 - s) * r).relu().square(),
    "no gradient arrives at r": lambda s, r: ms.trim(s, r.detach()),
    "a width of its own": lambda s, r: ms.trim(s, r.flatten()[0] if r.ndim > 1 else r),
    "is torch.float32; it should be": lambda s, r: ms.trim(s, r).float(),
})


@correct("trim")
def trim_by_clamp(s, r):
    return torch.clamp(1 - (1 - s) / r, min=0) ** 2


mistakes("softmask", {
    "no if and no float(w)": lambda d, w: (d <= 0).float() if w == math.inf else ms.softmask(d, w),
    "is torch.float32; it should be": lambda d, w: ms.softmask(d, w).float(),
    "round nothing": lambda d, w: ms.softmask(d, w.ceil()),
    "write math.pi * (d / w)":
        lambda d, w: 0.5 * (torch.cos(math.pi * d / w) + 1) * (ms.softmask(d, w) > 0),
    "-inf is for softmax":
        lambda d, w: torch.where((-w < d) & (d <= 0), ms.softmask(d, w), -math.inf),
    "there is no mask": lambda d, w: 0.5 * (torch.cos(math.pi * (d / w)) + 1),
    "the cosine rises again":
        lambda d, w: torch.where(d <= 0, 0.5 * (torch.cos(math.pi * (d / w)) + 1), 0.0),
    "sees the future":
        lambda d, w: torch.where(d.abs() < w, 0.5 * (torch.cos(math.pi * (d / w)) + 1), 0.0),
    "is negative in the past": lambda d, w: ms.softmask(-d, w),
    "no gradient comes back": lambda d, w: ms.softmask(d, w.detach()),
})


@correct("softmask")
def softmask_as_a_squared_cosine(d, w):
    inside = (d <= 0) & (d > -w)
    return torch.cos(math.pi / 2 * (d / w)).square() * inside


# --------------------------------------------------------------------- relevance and screening

mistakes("relevance", {
    "a width of its own": lambda q, k, w, r, i0=0: ms.relevance(q, k, w, r[:1].expand_as(r), i0),
    "queries and keys were swapped": lambda q, k, w, r, i0=0: ms.relevance(k, q, w, r, i0),
    "i0 is not used": lambda q, k, w, r, i0=0: ms.relevance(q, k, w, r),
    "no gradient arrives at q": lambda q, k, w, r, i0=0: ms.relevance(q.detach(), k, w, r, i0),
    "keep float64": lambda q, k, w, r, i0=0: ms.relevance(q.float(), k.float(), w, r, i0),
})


@mutant("relevance", "the relevances of a query sum to 1")
def relevance_with_competition(q, k, w, r, i0=0):
    alpha_d = ms.relevance(q, k, w, r, i0)
    return alpha_d / alpha_d.sum(-1, keepdim=True).clamp_min(1e-9)


@mutant("relevance", "positions in bfloat16 see the future")
def relevance_with_positions_in_the_dtype_of_q(q, k, w, r, i0=0):
    i = i0 + torch.arange(q.shape[2], dtype=q.dtype)
    d = torch.arange(k.shape[2], dtype=q.dtype) - i[:, None]
    s = q @ k.transpose(-2, -1)
    return ms.trim(s, r[:, None, None]) * ms.softmask(d, w[:, None, None])


@correct("relevance")
def relevance_by_einsum(q, k, w, r, i0=0):
    i, j = torch.arange(q.shape[2]) + i0, torch.arange(k.shape[2])
    s = torch.einsum("bhik,bhjk->bhij", q, k)
    m = ms.softmask(j[None] - i[:, None], w.view(-1, 1, 1))
    return m * ms.trim(s, r.view(-1, 1, 1))


def v64(q, exact, rounded):
    """`exact` for float64 inputs, `rounded()` for smaller types."""
    return exact if q.dtype == torch.float64 else rounded()


mistakes("screen", {
    "squared once too often": lambda q, k, v, w, r, i0=0: ms.relevance(q, k, w, r, i0).square() @ v,
    "cuts it": lambda q, k, v, w, r, i0=0: ms.screen(q, k, v, w, r, i0).float(),
    "i0 is not passed on": lambda q, k, v, w, r, i0=0: ms.screen(q, k, v, w, r),
    "return v's dtype": lambda q, k, v, w, r, i0=0: ms.screen(q, k, v.to(w.dtype), w, r, i0),
    "values in bfloat16 give h in torch.float32":
        lambda q, k, v, w, r, i0=0: ms.screen(q, k, v, w, r, i0).to(q.dtype),
    "before its product with v": lambda q, k, v, w, r, i0=0: v64(
        q, ms.screen(q, k, v, w, r, i0),
        lambda: ms.relevance(q.float(), k.float(), w, r, i0).to(v.dtype) @ v),
    "rounded to bfloat16 on the way":
        lambda q, k, v, w, r, i0=0: v64(q, ms.screen(q, k, v, w, r, i0),
                                        lambda: ms.screen(q.bfloat16(), k.bfloat16(), v, w, r, i0)),
    "Convert bfloat16 to float32": lambda q, k, v, w, r, i0=0: ms.relevance(q, k, w, r, i0) @ v,
    "to float32 before the products":
        lambda q, k, v, w, r, i0=0: ms.relevance(q, k, w.to(q.dtype), r.to(q.dtype), i0) @ v,
    "no gradient comes back":
        lambda q, k, v, w, r, i0=0: ms.screen(*(x.detach() for x in (q, k, v, w, r)), i0),
})


@correct("screen")
def screen_one_query_at_a_time(q, k, v, w, r, i0=0):
    wide = torch.promote_types(q.dtype, torch.float32)
    h = [(ms.relevance(q[:, :, t : t + 1].to(wide), k.to(wide), w, r, i0 + t)[..., None]
          * v[:, :, None].to(wide)).sum(3) for t in range(q.shape[2])]
    return torch.cat(h, 2).to(v.dtype)


# ---------------------------------------------------------------------------------- TanhNorm

mistakes("tanh_norm", {
    "of vectors of size 0.01": lambda x: torch.where(
        x.square().sum(-1, True) < 0.01, x, ms.tanh_norm(x)),
    "taken along axis 2": lambda x, eps=1e-6: ms.tanh_norm(x.mT).mT if x.ndim > 2
    else ms.tanh_norm(x),
    "the length is detached": lambda x, eps=1e-6: x * (ms.tanh_norm(x).norm(dim=-1, keepdim=True)
                                                  / x.norm(dim=-1, keepdim=True)).detach(),
    "tanh of each number changes the direction": lambda x: torch.tanh(x),
    "is torch.float32; it should be": lambda x: ms.tanh_norm(x).float(),
})


@mutant("tanh_norm", "Jacobian at 0 is 0, not the identity")
def tanh_norm_with_one_clamp(x, eps=1e-6):
    norm = x.norm(dim=-1, keepdim=True)
    return x * torch.tanh(norm) / norm.clamp_min(eps)


@mutant("tanh_norm", "tanh_norm(0) is not 0")
def tanh_norm_without_limit(x, eps=1e-6):
    norm = x.norm(dim=-1, keepdim=True)
    return x * torch.tanh(norm) / norm


@mutant("tanh_norm", "Jacobian at 0 is NaN")
def tanh_norm_with_a_bare_where(x, eps=1e-6):
    norm = x.square().sum(-1, keepdim=True).sqrt()
    return torch.where(norm < eps, x, x * torch.tanh(norm) / norm)


@correct("tanh_norm")
def tanh_norm_with_two_clamps(x, eps=1e-6):
    norm = x.square().sum(-1, keepdim=True).clamp_min(eps**2).sqrt()
    return x * (torch.tanh(norm) / norm)


# --------------------------------------------------------------------------------- the layer

def project(x, W):
    return torch.einsum("bte,ehd->bhtd", x, W)


forward = ms.GatedScreeningTiles.forward


methods("project", ms.GatedScreeningTiles, "project", {
    "tiles and positions are mixed up":
        lambda self, x, W: (x @ W.flatten(1)).view(x.shape[0], W.shape[1], x.shape[1], W.shape[2]),
    "the tiles come before the positions": lambda self, x, W: torch.einsum("bte,ehd->bthd", x, W),
})


@mutant("project", "tiles and dimensions are mixed up")
class Interleaved(ms.GatedScreeningTiles):
    def project(self, x, W):
        _, H, D = W.shape
        return (x @ W.flatten(1)).unflatten(-1, (D, H)).permute(0, 3, 1, 2)


@correct("project")
class ProjectedByEinsum(ms.GatedScreeningTiles):
    def project(self, x, W):
        return torch.einsum("bte,ehd->bhtd", x, W)


methods("gate", ms.GatedScreeningTiles, "gate", {
    "take W_G": lambda self, x: torch.tanh(F.silu(self.project(x, self.W_V))),
})


@correct("gate")
class GateByHand(ms.GatedScreeningTiles):
    def gate(self, x):
        g = self.project(x, self.W_G)
        return (g / (1 + torch.exp(-g))).tanh()


methods("screening", ms.GatedScreeningTiles, "project", {
    "both come from W_Q": lambda self, x, W: project(x, self.W_Q if W is self.W_K else W),
    "W_G is for the gate": lambda self, x, W: project(x, self.W_G if W is self.W_V else W),
})
methods("forward", ms.GatedScreeningTiles, "forward", {
    "x is not normalised": lambda self, x, screen: forward(self, ms.unit(x), screen),
    "normalised after the sum": lambda self, x, screen: ms.unit(forward(self, x, screen)),
})
methods("forward", ms.GatedScreeningTiles, "gate", {
    "the gate acts twice": lambda self, x: ms.GatedScreeningTiles.gate(self, x) ** 2,
})
methods("screening", ms.GatedScreeningTiles, "bound", {
    "TanhNorm, is missing": lambda self, h: h,
    "TanhNorm scales the whole vector": lambda self, h: torch.tanh(h),
})


@mutant("screening", "the values are not of unit length")
class LongValues(ms.GatedScreeningTiles):
    def screening(self, x, screen, cache=None):
        def longer(q, k, v, w, r, i0):
            return screen(q, k, self.project(x, self.W_V), w, r, i0)

        return super().screening(x, longer, cache)


methods("screening", ms.GatedScreeningTiles, "encode", {
    "w_th is self.w_th": lambda self, x_bar, i, w: ms.mipe(x_bar, ms.mipe_angle(i, w, 256.0)),
    "MiPE is missing": lambda self, x_bar, i, w: x_bar,
})


@correct("screening")
class ByTheEquations(ms.GatedScreeningTiles):
    def screening(self, x, screen, cache=None):
        w, r = ms.window(self.s_w), ms.acceptance(self.s_r)
        phi = ms.mipe_angle(torch.arange(x.shape[1]), w, self.config.w_th)
        q, k = (ms.mipe(ms.unit(self.project(x, W)), phi) for W in (self.W_Q, self.W_K))
        return ms.tanh_norm(screen(q, k, ms.unit(self.project(x, self.W_V)), w, r, 0))


@mutant("screening", "the argument `screen` is ignored")
class ItsOwnScreen(ms.GatedScreeningTiles):
    def screening(self, x, screen, cache=None):
        return super().screening(x, ms.screen, cache)


@mutant("forward", "the residual is missing")
class NoResidual(ms.GatedScreeningTiles):
    def forward(self, x, screen, cache=None):
        return super().forward(x, screen, cache) - x


methods("cache", ms.GatedScreeningTiles, "encode", {
    "MiPE counts from 0 in each piece":
        lambda self, x_bar, i, w: ms.GatedScreeningTiles.encode(self, x_bar, i - i[0], w),
})


methods("cache", ms.GatedScreeningTiles, "screening", {
    "each piece sees only itself":
        lambda self, x, screen, cache=None: ms.GatedScreeningTiles.screening(self, x, screen),
})


@mutant("cache", "i0 is not passed to screen")
class WithoutI0(ms.GatedScreeningTiles):
    def screening(self, x, screen, cache=None):
        return super().screening(x, lambda *inputs: screen(*inputs[:5], 0), cache)


@mutant("cache", "i0 counts from the first key that append returns")
class FirstForgotten(ms.GatedScreeningTiles):
    def screening(self, x, screen, cache=None):
        start = cache.end if cache else 0

        def from_start(*inputs):
            return screen(*inputs[:5], start)

        return super().screening(x, from_start, cache)


class Appended(ms.KeyCache):
    """A cache of tensors that keeps `reach` keys before the new ones."""

    def append(self, k, v, w):
        T = k.shape[2]
        if self.k is not None:
            k, v = torch.cat((self.k, k), 2), torch.cat((self.v, v), 2)
        kept = k.shape[2] if w.max() == math.inf else min(T + self.reach(w, T), k.shape[2])
        self.k, self.v = k[:, :, -kept:], v[:, :, -kept:]
        self.end += T
        self.first = self.end - kept
        return self.k, self.v, self.first

    def reach(self, w, T):
        return math.ceil(w.max().item()) - 1


@mutant("cache", "sees key 16 with w = 4.5")
class OneTooFew(Appended):
    def reach(self, w, T):
        return math.floor(w.max().item()) - 1


@mutant("cache", "append returned only the new keys")
class Overwritten(Appended):
    def reach(self, w, T):
        return 0


@mutant("cache", "append moves it on")
class WithoutEnd(Appended):
    def append(self, k, v, w):
        out = super().append(k, v, w)
        self.end = 0
        return out


@correct("cache")
class NoMoreThanNeeded(Appended):
    pass


@correct("cache")
class Everything(ms.KeyCache):
    def append(self, k, v, w):
        self.k = k if self.k is None else torch.cat((self.k, k), 2)
        self.v = v if self.v is None else torch.cat((self.v, v), 2)
        self.end += k.shape[2]
        return self.k, self.v, 0


# --------------------------------------------------------------------------------- the model

def restarted(wrong):
    """Add mutants of `initialize`: the right initial values, then change(layer, config)."""
    def add(words, change):
        class Restarted(ms.Multiscreen):
            @torch.no_grad()
            def __init__(self, config):
                super().__init__(config)
                for layer in self.layers:
                    change(layer, config)

        mutant("initialize", words)(Restarted)

    for words, change in wrong.items():
        add(words, change)


restarted({
    "the root of the wrong dimension": lambda layer, c: layer.W_K.mul_(math.sqrt(c.d_K / c.d_E)),
    "is the deviation x, not the variance":
        lambda layer, c: layer.W_Q.mul_((0.1 / math.sqrt(c.d_K)) ** -0.5),
    "W_G has the fixed scale": lambda layer, c: layer.W_G.div_(math.sqrt(c.d_V)),
    "s_w is spread over the tiles": lambda layer, c: layer.s_w.zero_(),
    "the root is missing": lambda layer, c: layer.s_O.mul_(2),
    "W_K are alike": lambda layer, c: layer.W_K.copy_(layer.W_Q),
    "it is N(0, ..), around 0": lambda layer, c: layer.W_V.add_(1.0),
    "divide by its root": lambda layer, c: layer.W_Q.div_(math.sqrt(c.d_K)),
    "W_V has no initial values": lambda layer, c: layer.W_V.zero_(),
    "w_th is config.w_th":
        lambda layer, c: layer.s_w.copy_(torch.linspace(0, math.log(256), c.N_H)),
    "N_H values are N_H - 1 steps":
        lambda layer, c: layer.s_w.copy_(torch.arange(c.N_H) / c.N_H * math.log(c.w_th)),
})


@mutant("initialize", "are alike: draw each matrix anew")
class OneLayerCopied(ms.Multiscreen):
    def __init__(self, config):
        super().__init__(config)
        for layer in self.layers[1:]:
            layer.load_state_dict(self.layers[0].state_dict())


@mutant("initialize", "the log is missing")
class LoudHead(ms.Multiscreen):
    def __init__(self, config):
        super().__init__(config)
        torch.nn.init.constant_(self.s_F, math.sqrt(config.d_E))


methods("embed", ms.Multiscreen, "embed", {
    "the embedding is not of unit length": lambda self, tokens: self.s_E.exp() * self.W_E[tokens],
    "the scale is e^s_E, not s_E": lambda self, tokens: self.s_E * ms.unit(self.W_E[tokens]),
})


methods("logits", ms.Multiscreen, "logits", {
    "the rows of W_E are not of unit length": lambda self, x: self.s_F.exp() * x @ self.W_E.T,
    "no norm before the head": lambda self, x: ms.Multiscreen.logits(self, ms.unit(x)),
    "the scale is e^s_F, not s_F": lambda self, x: self.s_F * x @ ms.unit(self.W_E).T,
    "these are probabilities": lambda self, x: ms.Multiscreen.logits(self, x).softmax(-1),
})


@mutant("loss", "the targets are shifted twice")
class ShiftedTwice(ms.Multiscreen):
    def loss(self, tokens, targets):
        return F.cross_entropy(self(tokens)[:, :-1].transpose(1, 2), targets[:, 1:])


@mutant("loss", "the mean of each sequence's mean")
class MeanOfMeans(ms.Multiscreen):
    def loss(self, tokens, targets):
        rows = zip(self(tokens), targets)
        return torch.stack([F.cross_entropy(z, t) for z, t in rows]).mean()


@correct("loss")
class LossInOneLine(ms.Multiscreen):
    def loss(self, tokens, targets):
        return F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())


methods("generate", ms.Multiscreen, "generate", {
    "the prompt too":
        lambda self, tokens, n: torch.cat((tokens, ms.Multiscreen.generate(self, tokens, n)), 1),
})


@mutant("generate", "all tokens go through the layers again")
class Uncached(ms.Multiscreen):
    def generate(self, tokens, n):
        for _ in range(n):
            tokens = torch.cat((tokens, self(tokens)[:, -1].argmax(-1, keepdim=True)), 1)
        return tokens[:, -n:]


@mutant("generate", "the layers share one cache")
class OneCache(ms.Multiscreen):
    def hidden(self, tokens, caches=None):
        return super().hidden(tokens, caches and caches[:1] * len(caches))


@mutant("model", "the model sees the future")
class Unmasked(ms.Multiscreen):
    def forward(self, tokens, caches=None):
        z = super().forward(tokens, caches)
        return z + 1e-6 * z.roll(-1, 1)


methods("training", ms.Multiscreen, "hidden", {
    "no gradient reaches":
        lambda self, tokens, caches=None: ms.Multiscreen.hidden(self, tokens, caches).detach(),
})


# ---------------------------------------------------------------------- gradients, block by block

@mutant("pairs", "it sees the future")
def pairs_of_both_sides(q, k, w, r, i, j):
    z, _, d = solved.pairs(q, k, w, r, i, j)
    return z, torch.cos(math.pi / 2 * (d / w)) * (d.abs() < w), d


mistakes("pairs", {
    "key n of the block is at j[n]":
        lambda q, k, w, r, i, j: solved.pairs(q, k, w, r, i, torch.arange(len(j))),
})


mistakes("dv_block", {
    "the square is missing": lambda z, c, dh: (z * c).T @ dh,
    "all are 0.25 times": lambda z, c, dh: (z * c).square().T @ dh / 4,
})


mistakes("dz_block", {
    "the 2 of the square's derivative": lambda z, c, v, dh: z * c.square() * (dh @ v.T),
})


mistakes("dq_block", {
    "1/r is missing": lambda dz, k, r: dz @ k,
})


mistakes("dk_block", {
    "queries and keys were swapped": lambda dz, q, r: dz @ q / r,
    "dk is torch.float32": lambda dz, q, r: dz.float().T @ q.float() / r,
})


mistakes("dr_block", {
    "multiply pair by pair": lambda dz, z, r: dz.sum() * (1 - z).sum() / r,
})


mistakes("dw_block", {
    "a 1/w is missing": lambda z, c, d, v, dh, w: solved.dw_block(z, c, d, v, dh, w) * w,
    "for w = inf": lambda z, c, d, v, dh, w: solved.dw_block(z, c, d, v, dh, w) * w / w,
})


@correct("dw_block")
def dw_by_the_double_angle(z, c, d, v, dh, w):
    """2 sin(x) cos(x) = sin(2x)."""
    slope = torch.sin(math.pi * d / w) * d * (c > 0)
    return (z.square() * (dh @ v.T) * slope).sum() * math.pi / 2 / w / w


mistakes("gradients", {
    "T x S must never exist":
        lambda q, k, v, w, r, dh, i0=0, size=16: solved.gradients(q, k, v, w, r, dh, i0, 10**6),
    "i0 is ignored": lambda q, k, v, w, r, dh, i0=0, size=16: solved.gradients(q, k, v, w, r, dh),
})


@mutant("gradients", "blocks outside the window are visited")
def gradients_of_all_blocks(q, k, v, w, r, dh, i0=0, size=16):
    return tuple(a + b for a, b in zip(solved.gradients(q, k, v, w, r, dh, i0),
                 solved.gradients(q, k, v, w * math.inf, r, 0 * dh, i0)))


@mutant("gradients", "only dw is off")
def gradients_with_the_last_dw(q, k, v, w, r, dh, i0=0, size=16):
    dq, dk, dv, _, dr = solved.gradients(q, k, v, w, r, dh, i0)
    t = (len(q) - 1) // size * size
    dw = solved.gradients(q[t:], k, v, w, r, dh[t:], i0 + t)[3]
    return dq, dk, dv, dw, dr


@mutant("gradients", "the last block of queries")
def gradients_of_whole_blocks(q, k, v, w, r, dh, i0=0, size=16):
    T = len(q) // size * size
    dq, *others = solved.gradients(q[:T], k, v, w, r, dh[:T], i0)
    return torch.cat((dq, torch.zeros_like(q[T:]))), *others


@mutant("gradients", "zeros of its own")
def gradients_in_one_tensor(*inputs):
    dq, dk, dv, dw, dr = solved.gradients(*inputs)
    dw += dr
    return dq, dk, dv, dw, dw


@mutant("gradients", "blocks of later keys are visited")
def gradients_of_the_future_too(q, k, v, w, r, dh, i0=0, size=16):
    for i in range(0, len(q) - size, size):
        here, later = slice(i, i + size), slice(i + size, None)
        solved.gradients(q[here], k[later], v[later], w * math.inf, r, dh[here], len(k))
    return solved.gradients(q, k, v, w, r, dh, i0)


def gradients_within(bounds):
    """solved.gradients, with each block's keys given by bounds(i, last, w, S)."""
    def gradients(q, k, v, w, r, dh, i0=0, size=16):
        dq, dk, dv, dw, dr = (torch.zeros_like(x) for x in (q, k, v, w, r))
        for a in range(0, len(q), size):
            rows = slice(a, a + size)
            i = i0 + torch.arange(len(q))[rows]
            first, end = bounds(int(i[0]), int(i[-1]), min(w.item(), 2**30), len(k))
            for b in range(max(first, 0) // size * size, end, size):
                z, c, d = solved.pairs(q[rows], k[b : b + size], w, r, i,
                                       torch.arange(len(k))[b : b + size])
                dz = solved.dz_block(z, c, v[b : b + size], dh[rows])
                dq[rows] += solved.dq_block(dz, k[b : b + size], r)
                dk[b : b + size] += solved.dk_block(dz, q[rows], r)
                dv[b : b + size] += solved.dv_block(z, c, dh[rows])
                dw += solved.dw_block(z, c, d, v[b : b + size], dh[rows], w)
                dr += solved.dr_block(dz, z, r)
        return dq, dk, dv, dw, dr

    return gradients


mistakes("gradients", {
    "w is rounded down":
        gradients_within(lambda i, last, w, S: (i - math.floor(w) + 1, min(last + 1, S))),
    "one key too few":
        gradients_within(lambda i, last, w, S: (i - math.ceil(w) + 2, min(last + 1, S))),
    "the end is one past":
        gradients_within(lambda i, last, w, S: (i - math.ceil(w) + 1, min(last, S))),
    "that of the block's last query":
        gradients_within(lambda i, last, w, S: (last - math.ceil(w) + 1, min(last + 1, S))),
})


@mutant("gradients", "changes its input q")
def gradients_in_place(q, k, v, w, r, dh, i0=0, size=16):
    found = solved.gradients(q, k, v, w, r, dh, i0, size)
    q *= 2
    return found


@mutant("gradients", "these come in the order dr, dw, dv, dk, dq")
def gradients_backwards(*inputs):
    return solved.gradients(*inputs)[::-1]


@mutant("gradients", "is 16 used instead of size")
def gradients_of_the_usual_size(q, k, v, w, r, dh, i0=0, size=16):
    T = len(q) // size * size
    found = solved.gradients(q, k, v, w, r, dh, i0, 16)
    late = solved.gradients(q[T:], k, v, w, r, dh[T:], i0 + T, 16) if size != 16 else found
    return found if size == 16 else tuple(x + y.sum() for x, y in zip(found, late))


mistakes("gradients", {
    "return five gradients": lambda *inputs: solved.gradients(*inputs)[:4],
    "the inputs are float64": lambda *inputs: tuple(x.float() for x in solved.gradients(*inputs)),
})


@mutant("pairs", "z for w = 9 is torch.float32")
def pairs_in_float32(q, k, w, r, i, j):
    return solved.pairs(q.float(), k.float(), w, r, i, j)


@correct("pairs")
def pairs_as_it_is_written(q, k, w, r, i, j):
    """For integers d, math.pi * d is float32."""
    z, c, d = solved.pairs(q, k, w, r, i, j)
    return z, torch.where(c > 0, torch.cos(math.pi * d / (2 * w)), 0.0), d


@mutant("pairs", "z and c are swapped")
def pairs_with_c_first(*inputs):
    z, c, d = solved.pairs(*inputs)
    return c, z, d


@mutant("dz_block", "changes its input z")
def dz_in_place(z, c, v, dh):
    return z.mul_(2) * c.square() * (dh @ v.T)


@correct("gradients")
def gradients_in_other_blocks(q, k, v, w, r, dh, i0=0, size=16):
    return solved.gradients(q, k, v, w, r, dh, i0, 7)
