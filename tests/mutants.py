"""Known mistakes: most were made in public by other implementations of the paper.

Each is a wrong version of one exercise, and words of the message that a student gets for it.
tests/test_exercises.py asserts that, and that the CORRECT versions, written in other ways than
multiscreen.py, pass. For teachers: the list of what to look for when you read solutions.
"""
import math

import torch
import torch.nn.functional as F

import multiscreen as ms
from exercises.solutions import part3_derivative as solved

MUTANTS = []                                           # (exercise, f, words of its message)
CORRECT = []                                           # (exercise, f)


def mutant(exercise, words):
    """Add a function or class to the list of mistakes. In part 2 an exercise is a method."""
    def add(f):
        MUTANTS.append((exercise, f, words))
        return f
    return add


def correct(exercise):
    def add(f):
        CORRECT.append((exercise, f))
        return f
    return add


def stands_for(exercise, f):
    """The name in adapters.py that f stands in for: its exercise's, or that of multiscreen.py."""
    if not isinstance(f, type):
        return exercise
    return next(c.__name__ for c in f.__mro__ if c.__module__ == "multiscreen")


# ------------------------------------------------------------------------ windows and widths

@mutant("window", "w lacks the + 1")
def window_without_one(s_w):
    return s_w.exp()


@mutant("window", "the gradient at s_w = inf is")
def window_of_infinity(s_w):
    return s_w.exp() + 1


@correct("window")
def window_by_a_mask(s_w):
    far = s_w == math.inf
    return 1 + torch.exp(s_w.masked_fill(far, 0.0)).masked_fill(far, math.inf)


@mutant("acceptance", "older version of the paper")
def acceptance_of_the_older_version(s_r):
    return s_r.exp() + 1


@mutant("acceptance", "the sign of s_r")
def acceptance_with_the_other_sign(s_r):
    return torch.sigmoid(-s_r).clamp_min(1e-6)


@mutant("acceptance", "clip r at 1e-6")
def acceptance_down_to_zero(s_r):
    return torch.sigmoid(s_r)


@correct("acceptance")
def acceptance_as_a_fraction(s_r):
    return (1 / (1 + torch.exp(-s_r))).clamp(1e-6, 1)


# ------------------------------------------------------------------------------ unit vectors

@mutant("unit", "all vectors were divided by one length")
def unit_of_the_whole(x, eps=1e-6):
    return x / x.norm().clamp_min(eps)


@mutant("unit", "eps was added")
def unit_with_eps_added(x, eps=1e-6):
    return x / (x.square().sum(-1, keepdim=True).sqrt() + eps)


@mutant("unit", "unit(0) is not 0")
def unit_without_eps(x, eps=1e-6):
    return x / x.norm(dim=-1, keepdim=True)


@mutant("unit", "Clip the square, before the root")
def unit_clipped_after_the_root(x, eps=1e-6):
    return x / x.square().sum(-1, keepdim=True).sqrt().clamp_min(eps)


@correct("unit")
def unit_by_torch(x, eps=1e-6):
    return torch.nn.functional.normalize(x, dim=-1, eps=eps)


# -------------------------------------------------------------------------------------- MiPE

def gamma(w, w_th):
    return (torch.cos(math.pi * w.clamp(max=w_th) / w_th) + 1) / 2


@mutant("mipe_angle", "the angle lacks pi")
def angle_without_pi(i, w, w_th):
    w = w.double()
    return i * (gamma(w, w_th) / w)[:, None]


@mutant("mipe_angle", "does gamma lack its 1/2")
def angle_with_twice_gamma(i, w, w_th):
    w = w.double()
    return i * (2 * math.pi * gamma(w, w_th) / w.clamp(max=w_th))[:, None]


@mutant("mipe_angle", "gamma is missing")
def angle_without_gamma(i, w, w_th):
    return i * (math.pi / w.double())[:, None]


@mutant("mipe_angle", "MiPE still turns at w >= w_th")
def angle_that_comes_back(i, w, w_th):
    w = w.double()
    return math.pi * i * ((torch.cos(math.pi * w / w_th) + 1) / 2 / w)[:, None]


@mutant("mipe_angle", "gradient is NaN at w >= w_th")
def angle_with_a_bare_where(i, w, w_th):
    w = w.double()
    cosine = (torch.cos(math.pi * w / w_th) + 1) / 2
    return math.pi * i * (torch.where(w < w_th, cosine, 0.0) / w)[:, None]


@mutant("mipe_angle", "multiply in float64")
def angle_in_float32(i, w, w_th):
    return math.pi * i * (gamma(w, w_th) / w.clamp(max=w_th))[:, None]


@correct("mipe_angle")
def angle_by_a_double_where(i, w, w_th):
    near = w < w_th
    safe = torch.where(near, w, w_th).double()
    turns = i[None] * (torch.where(near, gamma(safe, w_th), 0.0) / (2 * safe))[:, None]
    return (2 * math.pi * (turns - turns.round())).to(w.dtype)


@mutant("mipe", "turned the wrong way")
def mipe_the_wrong_way(x, angle):
    return ms.mipe(x, -angle)


@mutant("mipe", "as in RoPE")
def mipe_of_all_pairs(x, angle):
    a, b = x[..., ::2], x[..., 1::2]
    cos, sin = torch.cos(angle)[..., None], torch.sin(angle)[..., None]
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)


@mutant("mipe", "the wrong pair turns")
def mipe_of_two_halves(x, angle):
    half = x.shape[-1] // 2
    order = [0, half, *range(1, half), *range(half + 1, 2 * half)]
    return ms.mipe(x[..., order], angle)[..., torch.tensor(order).argsort()]


@mutant("mipe", "the sine has a minus once")
def mipe_with_two_pluses(x, angle):
    x0, x1 = x[..., :1], x[..., 1:2]
    cos, sin = torch.cos(angle)[..., None], torch.sin(angle)[..., None]
    return torch.cat((x0 * cos + x1 * sin, x0 * sin + x1 * cos, x[..., 2:]), -1)


@correct("mipe")
def mipe_as_complex_numbers(x, angle):
    z = torch.view_as_complex(x[..., :2].contiguous()) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((torch.view_as_real(z), x[..., 2:]), -1)


# -------------------------------------------------------------------------- Trim and Softmask

@mutant("trim", "divided by r, not multiplied")
def trim_multiplied(s, r):
    return (1 - (1 - s) * r).relu().square()


@mutant("trim", "s = 1 must give 1 whatever r is")
def trim_not_divided(s, r):
    return (r - (1 - s)).relu().square()


@mutant("trim", "the relevance rises again")
def trim_without_max(s, r):
    return (1 - (1 - s) / r).square()


@mutant("trim", "the square is missing")
def trim_without_square(s, r):
    return (1 - (1 - s) / r).relu()


@mutant("trim", "r was taken for the threshold")
def trim_with_r_as_threshold(s, r):
    return ((s - r) / (1 - r)).relu().square()


@mutant("trim", "r does not act")
def trim_with_a_constant(s, r):
    return (1 - (1 - s) / 0.5).relu().square()


@correct("trim")
def trim_by_clamp(s, r):
    return torch.clamp(1 - (1 - s) / r, min=0) ** 2


@mutant("softmask", "not yet between 0 and 1")
def softmask_without_half_and_one(d, w):
    return torch.where((-w < d) & (d <= 0), torch.cos(math.pi * (d / w)), 0.0)


@mutant("softmask", "a key at distance exactly w must get 0")
def softmask_over_one_more(d, w):
    return torch.where((-w <= d) & (d <= 0), 0.5 * (torch.cos(math.pi * d / (w + 1)) + 1), 0.0)


@mutant("softmask", "the cosine rises again")
def softmask_without_edge(d, w):
    return torch.where(d <= 0, 0.5 * (torch.cos(math.pi * (d / w)) + 1), 0.0)


@mutant("softmask", "sees the future")
def softmask_of_both_sides(d, w):
    return torch.where(d.abs() < w, 0.5 * (torch.cos(math.pi * (d / w)) + 1), 0.0)


@mutant("softmask", "is negative in the past")
def softmask_of_the_future(d, w):
    return ms.softmask(-d, w)


@mutant("softmask", "this window is hard")
def softmask_hard(d, w):
    return ((-w < d) & (d <= 0)).float()


@correct("softmask")
def softmask_as_a_squared_cosine(d, w):
    inside = (d <= 0) & (d > -w)
    return torch.cos(math.pi / 2 * (d / w)).square() * inside


# --------------------------------------------------------------------- relevance and screening

@mutant("relevance", "queries and keys were swapped")
def relevance_transposed(q, k, w, r, i0=0):
    return ms.relevance(k, q, w, r, i0)


@mutant("relevance", "i0 is not used")
def relevance_without_i0(q, k, w, r, i0=0):
    return ms.relevance(q, k, w, r)


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


@mutant("screen", "divided by their sum")
def screen_with_competition(q, k, v, w, r, i0=0):
    alpha_d = ms.relevance(q, k, w, r, i0)
    return alpha_d / alpha_d.sum(-1, keepdim=True) @ v


@mutant("screen", "i0 is not handed on")
def screen_without_i0(q, k, v, w, r, i0=0):
    return ms.screen(q, k, v, w, r)


@mutant("screen", "TanhNorm comes later")
def screen_with_tanh_norm(q, k, v, w, r, i0=0):
    return ms.tanh_norm(ms.screen(q, k, v, w, r, i0))


@mutant("screen", "return v's dtype")
def screen_in_another_dtype(q, k, v, w, r, i0=0):
    return ms.screen(q, k, v.to(w.dtype), w, r, i0)


@mutant("screen", "Turn them to float32 first")
def screen_of_two_dtypes(q, k, v, w, r, i0=0):
    return ms.relevance(q, k, w, r, i0) @ v


@mutant("screen", "Turn q, k and v to float32")
def screen_in_bfloat16(q, k, v, w, r, i0=0):
    alpha_d = ms.relevance(q, k, w.to(q.dtype), r.to(q.dtype), i0)
    return alpha_d @ v


@mutant("screen", "no gradient comes back")
def screen_that_detaches(q, k, v, w, r, i0=0):
    return ms.screen(*(x.detach() for x in (q, k, v, w, r)), i0)


@correct("screen")
def screen_one_query_at_a_time(q, k, v, w, r, i0=0):
    wide = torch.promote_types(q.dtype, torch.float32)
    h = [(ms.relevance(q[:, :, t : t + 1].to(wide), k.to(wide), w, r, i0 + t)[..., None]
          * v[:, :, None].to(wide)).sum(3) for t in range(q.shape[2])]
    return torch.cat(h, 2).to(v.dtype)


# ---------------------------------------------------------------------------------- TanhNorm

@mutant("tanh_norm", "tanh of each number changes the direction")
def tanh_of_each_number(x, eps=1e-6):
    return torch.tanh(x)


@mutant("tanh_norm", "not divided by the length")
def tanh_norm_undivided(x, eps=1e-6):
    return x * torch.tanh(x.norm(dim=-1, keepdim=True))


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

@mutant("project", "tiles and positions are mixed up")
class Reshaped(ms.GatedScreeningTiles):
    def project(self, x, W):
        return (x @ W.flatten(1)).view(x.shape[0], W.shape[1], x.shape[1], W.shape[2])


@mutant("project", "the tiles come before the positions")
class Untransposed(ms.GatedScreeningTiles):
    def project(self, x, W):
        return torch.einsum("bte,ehd->bthd", x, W)


@mutant("project", "tiles and dimensions are mixed up")
class Interleaved(ms.GatedScreeningTiles):
    def project(self, x, W):
        _, H, D = W.shape
        return (x @ W.flatten(1)).unflatten(-1, (D, H)).permute(0, 3, 1, 2)


@correct("project")
class ProjectedByEinsum(ms.GatedScreeningTiles):
    def project(self, x, W):
        return torch.einsum("bte,ehd->bhtd", x, W)


@mutant("gate", "tanh is missing")
class GateWithoutTanh(ms.GatedScreeningTiles):
    def gate(self, x):
        return F.silu(self.project(x, self.W_G))


@mutant("gate", "SiLU is missing")
class GateWithoutSiLU(ms.GatedScreeningTiles):
    def gate(self, x):
        return torch.tanh(self.project(x, self.W_G))


@mutant("gate", "this is a sigmoid")
class GateOfGLU(ms.GatedScreeningTiles):
    def gate(self, x):
        return torch.sigmoid(self.project(x, self.W_G))


@mutant("gate", "here W_G")
class GateOfTheValues(ms.GatedScreeningTiles):
    def gate(self, x):
        return torch.tanh(F.silu(self.project(x, self.W_V)))


@mutant("gate", "g must not be of unit length")
class UnitGate(ms.GatedScreeningTiles):
    def gate(self, x):
        return torch.tanh(F.silu(ms.unit(self.project(x, self.W_G))))


@correct("gate")
class GateByHand(ms.GatedScreeningTiles):
    def gate(self, x):
        g = self.project(x, self.W_G)
        return (g / (1 + torch.exp(-g))).tanh()


@mutant("screening", "TanhNorm, is missing")
class Unbounded(ms.GatedScreeningTiles):
    def bound(self, h):
        return h


@mutant("screening", "the values are not of unit length")
class LongValues(ms.GatedScreeningTiles):
    def screening(self, x, screen, cache=None):
        def longer(q, k, v, w, r, i0):
            return screen(q, k, self.project(x, self.W_V), w, r, i0)

        return super().screening(x, longer, cache)


@mutant("screening", "the keys are not of unit length")
class LongKeys(ms.GatedScreeningTiles):
    def screening(self, x, screen, cache=None):
        def longer(q, k, v, w, r, i0):
            k = self.encode(self.project(x, self.W_K), torch.arange(x.shape[1]), w)
            return screen(q, k, v, w, r, i0)

        return super().screening(x, longer, cache)


@mutant("screening", "w_th is self.w_th")
class ThresholdOf256(ms.GatedScreeningTiles):
    def encode(self, x_bar, i, w):
        return ms.mipe(x_bar, ms.mipe_angle(i, w, 256.0))


@mutant("screening", "TanhNorm scales the whole vector")
class TanhOfEach(ms.GatedScreeningTiles):
    def bound(self, h):
        return torch.tanh(h)


@mutant("screening", "w and r were swapped")
class WidthForWindow(ms.GatedScreeningTiles):
    def screening(self, x, screen, cache=None):
        def swapped(q, k, v, w, r, i0):
            return screen(q, k, v, r, w, i0)

        return super().screening(x, swapped, cache)


@mutant("screening", "MiPE is missing")
class Placeless(ms.GatedScreeningTiles):
    def encode(self, x_bar, i, w):
        return x_bar


@mutant("screening", "queries and keys were swapped")
class Swapped(ms.GatedScreeningTiles):
    def screening(self, x, screen, cache=None):
        def swapped(q, k, *others):
            return screen(k, q, *others)

        return super().screening(x, swapped, cache)


@correct("screening")
class ByTheEquations(ms.GatedScreeningTiles):
    def screening(self, x, screen, cache=None):
        w, r = ms.window(self.s_w), ms.acceptance(self.s_r)
        phi = ms.mipe_angle(torch.arange(x.shape[1]), w, self.config.w_th)
        q, k = (ms.mipe(ms.unit(self.project(x, W)), phi) for W in (self.W_Q, self.W_K))
        return ms.tanh_norm(screen(q, k, ms.unit(self.project(x, self.W_V)), w, r, 0))


@mutant("forward", "the residual is missing")
class NoResidual(ms.GatedScreeningTiles):
    def forward(self, x, screen, cache=None):
        return super().forward(x, screen, cache) - x


@mutant("forward", "the scale e^s_O is missing")
class Unscaled(ms.GatedScreeningTiles):
    def forward(self, x, screen, cache=None):
        y = self.screening(x, screen, cache) * self.gate(x)
        return x + torch.einsum("bhtv,hve->bte", y, self.W_O)


@mutant("forward", "the tiles are averaged")
class Averaged(ms.GatedScreeningTiles):
    def forward(self, x, screen, cache=None):
        return x + (super().forward(x, screen, cache) - x) / len(self.s_O)


@mutant("cache", "MiPE counts from 0 in each piece")
class AlwaysFromZero(ms.GatedScreeningTiles):
    def encode(self, x_bar, i, w):
        return super().encode(x_bar, i - i[0], w)


@mutant("cache", "each piece sees itself only")
class Forgetful(ms.GatedScreeningTiles):
    def screening(self, x, screen, cache=None):
        return super().screening(x, screen)


@mutant("cache", "i0 is not handed to screen")
class WithoutI0(ms.GatedScreeningTiles):
    def screening(self, x, screen, cache=None):
        return super().screening(x, lambda *inputs: screen(*inputs[:5], 0), cache)


@mutant("cache", "cache.end was read after append")
class EndAfterAppend(ms.GatedScreeningTiles):
    def screening(self, x, screen, cache=None):
        def later(q, k, v, w, r, i0):
            return screen(q, k, v, w, r, i0 + q.shape[2] if cache else i0)

        return super().screening(x, later, cache)


@mutant("cache", "i0 counts from the first key that append returns")
class FirstForgotten(ms.GatedScreeningTiles):
    def screening(self, x, screen, cache=None):
        start = cache.end if cache else 0

        def from_start(*inputs):
            return screen(*inputs[:5], start)

        from_start.keeps_to_window = True              # or the cache drops nothing
        return super().screening(x, from_start, cache)


class Appended(ms.KeyCache):
    """A cache of tensors: what to keep is `reach` keys before the new ones."""

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
class ForTheLastQuery(Appended):
    def reach(self, w, T):
        return math.ceil(w.max().item()) - T


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

def restarted(words):
    """A mutant of `initialize`: change(model, config), after the right initial values."""
    def add(change):
        class Restarted(ms.Multiscreen):
            @torch.no_grad()
            def __init__(self, config):
                super().__init__(config)
                change(self, config)

        Restarted.__name__ = change.__name__
        return mutant("initialize", words)(Restarted)
    return add


@restarted("the root of the wrong dimension")
def keys_by_width(model, c):
    for layer in model.layers:
        layer.W_K.mul_(math.sqrt(c.d_K / c.d_E))


@restarted("is the deviation x, not the variance")
def a_variance(model, c):
    for layer in model.layers:
        layer.W_Q.mul_((0.1 / math.sqrt(c.d_K)) ** -0.5)


@restarted("W_G has the fixed scale")
def a_smaller_gate(model, c):
    for layer in model.layers:
        layer.W_G.div_(math.sqrt(c.d_V))


@restarted("s_w is spread over the tiles")
def equal_windows(model, c):
    for layer in model.layers:
        layer.s_w.zero_()


@restarted("the root is missing")
def smaller_updates(model, c):
    for layer in model.layers:
        layer.s_O.mul_(2)


@restarted("the log is missing")
def a_loud_head(model, c):
    model.s_F.fill_(math.sqrt(c.d_E))


@restarted("divided by the dimension: by its root")
def no_root(model, c):
    for layer in model.layers:
        layer.W_Q.div_(math.sqrt(c.d_K))


@restarted("W_V has no initial values")
def values_forgotten(model, c):
    for layer in model.layers:
        layer.W_V.zero_()


@restarted("w_th is config.w_th")
def always_256(model, c):
    for layer in model.layers:
        layer.s_w.copy_(torch.linspace(0, math.log(256), c.N_H))


@restarted("N_H values are N_H - 1 steps")
def a_step_too_many(model, c):
    for layer in model.layers:
        layer.s_w.copy_(torch.arange(c.N_H) / c.N_H * math.log(c.w_th))


@mutant("embed", "the embedding is not of unit length")
class LongEmbedding(ms.Multiscreen):
    def embed(self, tokens):
        return self.s_E.exp() * self.W_E[tokens]


@mutant("embed", "the scale is e^s_E, not s_E")
class LinearScale(ms.Multiscreen):
    def embed(self, tokens):
        return self.s_E * ms.unit(self.W_E[tokens])


@mutant("logits", "the rows of W_E are not of unit length")
class LongHead(ms.Multiscreen):
    def logits(self, x):
        return self.s_F.exp() * x @ self.W_E.T


@mutant("logits", "no norm before the head")
class NormBeforeTheHead(ms.Multiscreen):
    def logits(self, x):
        return super().logits(ms.unit(x))


@mutant("logits", "the scale is e^s_F, not s_F")
class LinearScaleOfTheHead(ms.Multiscreen):
    def logits(self, x):
        return self.s_F * x @ ms.unit(self.W_E).T


@mutant("logits", "these are probabilities")
class Probabilities(ms.Multiscreen):
    def logits(self, x):
        return super().logits(x).softmax(-1)


@mutant("loss", "the targets are shifted twice")
class ShiftedTwice(ms.Multiscreen):
    def loss(self, tokens, targets):
        return F.cross_entropy(self(tokens)[:, :-1].transpose(1, 2), targets[:, 1:])


@mutant("loss", "count in the denominator")
class LossOverAll(ms.Multiscreen):
    def loss(self, tokens, targets):
        z = self(tokens).transpose(1, 2)
        return F.cross_entropy(z, targets, reduction="none").mean()


@mutant("loss", "softmax was taken twice")
class SoftmaxTwice(ms.Multiscreen):
    def loss(self, tokens, targets):
        return F.cross_entropy(self(tokens).softmax(-1).flatten(0, 1), targets.flatten())


@mutant("loss", "the mean of each sequence's mean")
class MeanOfMeans(ms.Multiscreen):
    def loss(self, tokens, targets):
        rows = zip(self(tokens), targets)
        return torch.stack([F.cross_entropy(z, t) for z, t in rows]).mean()


@correct("loss")
class LossInOneLine(ms.Multiscreen):
    def loss(self, tokens, targets):
        return F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())


@mutant("generate", "the prompt too")
class WithThePrompt(ms.Multiscreen):
    def generate(self, tokens, n):
        return torch.cat((tokens, super().generate(tokens, n)), 1)


@mutant("generate", "all tokens go through the layers again")
class Uncached(ms.Multiscreen):
    def generate(self, tokens, n):
        for _ in range(n):
            tokens = torch.cat((tokens, self(tokens)[:, -1].argmax(-1, keepdim=True)), 1)
        return tokens[:, -n:]


@mutant("generate", "the caches are empty at each step")
class FreshCaches(ms.Multiscreen):
    def hidden(self, tokens, caches=None):
        return super().hidden(tokens, caches and [ms.KeyCache() for _ in caches])


@mutant("generate", "the layers share one cache")
class OneCache(ms.Multiscreen):
    def hidden(self, tokens, caches=None):
        return super().hidden(tokens, caches and caches[:1] * len(caches))


@mutant("model", "the model sees the future")
class Unmasked(ms.Multiscreen):
    def forward(self, tokens, caches=None):
        z = super().forward(tokens, caches)
        return z + 1e-6 * z.roll(-1, 1)


@mutant("training", "no gradient reaches")
class Detached(ms.Multiscreen):
    def hidden(self, tokens, caches=None):
        return super().hidden(tokens, caches).detach()


# ---------------------------------------------------------------------- gradients, block by block

@mutant("pairs", "it sees the future")
def pairs_of_both_sides(q, k, w, r, i, j):
    z, _, d = solved.pairs(q, k, w, r, i, j)
    return z, torch.cos(math.pi / 2 * (d / w)) * (d.abs() < w), d


@mutant("pairs", "the angle is halved in c")
def pairs_with_the_whole_angle(q, k, w, r, i, j):
    z, c, d = solved.pairs(q, k, w, r, i, j)
    return z, torch.cos(math.pi * d / w) * (c > 0), d


@mutant("pairs", "the max of Trim is missing")
def pairs_without_max(q, k, w, r, i, j):
    _, c, d = solved.pairs(q, k, w, r, i, j)
    return 1 - (1 - q @ k.T) / r, c, d


@mutant("pairs", "z is Trim before its square")
def pairs_squared(q, k, w, r, i, j):
    z, c, d = solved.pairs(q, k, w, r, i, j)
    return z.square(), c, d


@mutant("pairs", "not multiplied by it")
def pairs_multiplied(q, k, w, r, i, j):
    _, c, d = solved.pairs(q, k, w, r, i, j)
    return (1 - (1 - q @ k.T) * r).relu(), c, d


@mutant("pairs", "a query sees its own key")
def pairs_of_the_strict_past(q, k, w, r, i, j):
    z, c, d = solved.pairs(q, k, w, r, i, j)
    return z, c * (d > 0), d


@mutant("dv_block", "the square is missing")
def dv_without_square(z, c, dh):
    return (z * c).T @ dh


@mutant("dv_block", "c is squared too")
def dv_with_one_c(z, c, dh):
    return (z.square() * c).T @ dh


@mutant("dz_block", "this is dL/dc")
def dz_for_c(z, c, v, dh):
    return 2 * z.square() * c * (dh @ v.T)


@mutant("dz_block", "one factor c is missing")
def dz_without_c(z, c, v, dh):
    return 2 * z * c * (dh @ v.T)


@mutant("dz_block", "the 2 of the square's derivative")
def dz_without_2(z, c, v, dh):
    return z * c.square() * (dh @ v.T)


@mutant("dq_block", "1/r is missing")
def dq_without_r(dz, k, r):
    return dz @ k


@mutant("dq_block", "this multiplies")
def dq_multiplied(dz, k, r):
    return dz @ k * r


@mutant("dk_block", "queries and keys were swapped")
def dk_not_transposed(dz, q, r):
    return dz @ q / r


@mutant("dk_block", "the sign")
def dk_with_the_other_sign(dz, q, r):
    return -dz.T @ q / r


@mutant("dr_block", "the mean over the pairs")
def dr_as_a_mean(dz, z, r):
    return (dz * (1 - z)).mean() / r


@mutant("dr_block", "1 - z has one r in it already")
def dr_divided_twice(dz, z, r):
    return (dz * (1 - z)).sum() / r**2


@mutant("dr_block", "the sign")
def dr_with_the_other_sign(dz, z, r):
    return (dz * (z - 1)).sum() / r


@mutant("dw_block", "the sign")
def dw_with_the_other_sign(z, c, d, v, dh, w):
    return solved.dw_block(z, c, -d, v, -dh, w)


@mutant("dw_block", "a 1/w is missing")
def dw_for_theta(z, c, d, v, dh, w):
    return solved.dw_block(z, c, d, v, dh, w) * w


@mutant("dw_block", "one factor c is too many")
def dw_with_c_twice(z, c, d, v, dh, w):
    return solved.dw_block(z * c.sqrt(), c, d, v, dh, w)


@mutant("dw_block", "for w = inf")
def dw_by_a_quotient(z, c, d, v, dh, w):
    return solved.dw_block(z, c, d, v, dh, w) * w / w


@correct("dw_block")
def dw_by_the_double_angle(z, c, d, v, dh, w):
    """2 sin cos of half the angle is the sine of the whole."""
    slope = torch.sin(math.pi * d / w) * d * (c > 0)
    return (z.square() * (dh @ v.T) * slope).sum() * math.pi / 2 / w / w


@mutant("gradients", "T x S must never exist")
def gradients_in_one_block(q, k, v, w, r, dh, i0=0, size=16):
    return solved.gradients(q, k, v, w, r, dh, i0, 10**6)


@mutant("gradients", "i0 does not act")
def gradients_without_i0(q, k, v, w, r, dh, i0=0, size=16):
    return solved.gradients(q, k, v, w, r, dh)


@mutant("gradients", "blocks outside the window are visited")
def gradients_of_all_blocks(q, k, v, w, r, dh, i0=0, size=16):
    return tuple(a + b for a, b in zip(solved.gradients(q, k, v, w, r, dh, i0),
                 solved.gradients(q, k, v, w * math.inf, r, 0 * dh, i0)))


@mutant("gradients", "add up with +=")
def gradients_with_the_last_dw(q, k, v, w, r, dh, i0=0, size=16):
    dq, dk, dv, _, dr = solved.gradients(q, k, v, w, r, dh, i0)
    t = (len(q) - 1) // size * size
    dw = solved.gradients(q[t:], k, v, w, r, dh[t:], i0 + t)[3]
    return dq, dk, dv, dw, dr


@mutant("gradients", "a block is left out")
def gradients_of_whole_blocks(q, k, v, w, r, dh, i0=0, size=16):
    T = len(q) // size * size
    dq, *others = solved.gradients(q[:T], k, v, w, r, dh[:T], i0)
    return torch.cat((dq, torch.zeros_like(q[T:]))), *others


@mutant("gradients", "they come in the order")
def gradients_in_another_order(*inputs):
    dq, dk, dv, dw, dr = solved.gradients(*inputs)
    return dq, dk, dv, dr, dw


@mutant("gradients", "blocks of later keys are visited")
def gradients_of_the_future_too(q, k, v, w, r, dh, i0=0, size=16):
    for i in range(0, len(q) - size, size):
        here, later = slice(i, i + size), slice(i + size, None)
        solved.gradients(q[here], k[later], v[later], w * math.inf, r, dh[here], len(k))
    return solved.gradients(q, k, v, w, r, dh, i0)


@correct("gradients")
def gradients_in_other_blocks(q, k, v, w, r, dh, i0=0, size=16):
    return solved.gradients(q, k, v, w, r, dh, i0, 7)
