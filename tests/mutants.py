"""Known mistakes: most were made in public by other implementations of the paper.

MISTAKES: {exercise: {words from the message that a student gets: the mistake}}, about one for each
comparison in the course's tests. CORRECT: {exercise: what is right, too, but is written in another
way}. In parts 1 and 2 they are functions, and classes of multiscreen.py with other methods. In
parts 3 and 4 they are edits of the solution, {old: new}.

Teachers: look for these mistakes when you read solutions, and for the wrong values that the
course's tests give to `expect`.
"""
import functools
import importlib.util
import math

import torch
import torch.nn.functional as F

import multiscreen as ms
from course.exercises.adapters import FILES, SOLUTIONS
from multiscreen import GatedScreeningTiles as Tiles
from multiscreen import KeyCache, Multiscreen

INF = math.inf


def made(exercise, mistake, folder):
    """(a name in adapters.py, what a student has under it) for a mistake of an exercise.

    An edited solution goes to a file in `folder`: Triton reads a kernel's source.
    """
    if isinstance(mistake, type):
        return mistake.__base__.__name__, mistake
    if not isinstance(mistake, dict):
        return exercise, mistake
    solution = next(SOLUTIONS[file] for file, names in FILES.items() if exercise in names)
    with open(importlib.util.find_spec(solution).origin, encoding="utf-8") as file:
        source = file.read()
    for old, new in mistake.items():
        assert old in source, old
        source = source.replace(old, new)
    (folder / "edited.py").write_text(source)
    spec = importlib.util.spec_from_file_location("edited", folder / "edited.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return exercise, getattr(module, exercise)


# ------------------------------------------------------------------------- part 1, the equations

def window_by_a_mask(s_w):
    far = s_w == INF
    return 1 + torch.exp(s_w.masked_fill(far, 0.0)).masked_fill(far, INF)


def length(x):
    return x.norm(dim=-1, keepdim=True)


def gamma(w, w_th):
    return (torch.cos(math.pi * w / w_th) + 1) / 2


def turned(i, w, gamma):
    """MiPE's angle in the dtype of w."""
    return math.pi * i * (gamma / w)[:, None]


def angle_by_a_double_where(i, w, w_th):
    near = w < w_th
    safe = torch.where(near, w, w_th).double()
    turns = i[None] * (torch.where(near, gamma(safe, w_th), 0.0) / (2 * safe))[:, None]
    return (2 * math.pi * (turns - turns.round())).to(w.dtype)


def mipe_with_two_pluses(x, angle):
    y = ms.mipe(x, angle)
    y[..., 0] += 2 * x[..., 1] * torch.sin(angle)
    return y


def mipe_as_complex_numbers(x, angle):
    z = torch.view_as_complex(x[..., :2].contiguous()) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((torch.view_as_real(z), x[..., 2:]), -1)


def cosine(d, w):
    """Softmask without its mask."""
    return 0.5 * (torch.cos(math.pi * (d / w)) + 1)


def relevance_with_positions_in_the_dtype_of_q(q, k, w, r, i0=0):
    i = i0 + torch.arange(q.shape[2], dtype=q.dtype)
    d = torch.arange(k.shape[2], dtype=q.dtype) - i[:, None]
    return ms.trim(q @ k.mT, r[:, None, None]) * ms.softmask(d, w[:, None, None])


def relevance_by_einsum(q, k, w, r, i0=0):
    i, j = torch.arange(q.shape[2]) + i0, torch.arange(k.shape[2])
    s = torch.einsum("bhik,bhjk->bhij", q, k)
    m = ms.softmask(j[None] - i[:, None], w.view(-1, 1, 1))
    return m * ms.trim(s, r.view(-1, 1, 1))


def screen_with_rounded_relevances(q, k, v, w, r, i0=0):
    if q.dtype == torch.float64:
        return ms.screen(q, k, v, w, r, i0)
    return ms.relevance(q.float(), k.float(), w, r, i0).to(v.dtype) @ v


def screen_with_rounded_keys(q, k, v, w, r, i0=0):
    if q.dtype != torch.float64:
        q, k = q.bfloat16(), k.bfloat16()
    return ms.screen(q, k, v, w, r, i0)


def screen_one_query_at_a_time(q, k, v, w, r, i0=0):
    wide = torch.promote_types(q.dtype, torch.float32)
    h = [(ms.relevance(q[:, :, t : t + 1].to(wide), k.to(wide), w, r, i0 + t)[..., None]
          * v[:, :, None].to(wide)).sum(3) for t in range(q.shape[2])]
    return torch.cat(h, 2).to(v.dtype)


def tanh_norm_with_two_clamps(x, eps=1e-6):
    norm = x.square().sum(-1, keepdim=True).clamp_min(eps**2).sqrt()
    return x * (torch.tanh(norm) / norm)


MISTAKES = {
    "window": {
        "a clamp makes it finite": lambda s_w: s_w.clamp(max=80).exp() + 1,
        "s_w is clamped at 10":
            lambda s_w: torch.where(s_w < INF, s_w.clamp(max=10).exp() + 1, INF),
        "of float64 numbers is torch.float32": lambda s_w: ms.window(s_w).float(),
        "the gradient at s_w = inf is": lambda s_w: s_w.exp() + 1,
    },
    "acceptance": {
        "older version of the paper": lambda s_r: s_r.exp() + 1,
        "is not clipped": lambda s_r: torch.sigmoid(s_r),
        "no gradient comes back": lambda s_r: ms.acceptance(s_r.detach()),
    },
    "unit": {
        "keepdim=True is missing": lambda x: x / x.norm(dim=-1),
        "taken along axis 1": lambda x: x / x.norm(dim=1, keepdim=True).clamp_min(1e-6),
        "eps was added": lambda x: x / (x.square().sum(-1, keepdim=True).sqrt() + 1e-6),
        "unit(0) is not 0": lambda x: x / length(x),
        "clipped at less than eps": lambda x: F.normalize(x, dim=-1, eps=1e-12),
        "the length is detached": lambda x: x / length(x).clamp_min(1e-6).detach(),
        "Clip the square, before the root":
            lambda x: x / x.square().sum(-1, keepdim=True).sqrt().clamp_min(1e-6),
    },
    "mipe_angle": {
        "the sign: the angle grows": lambda i, w, w_th: -ms.mipe_angle(i, w, w_th),
        "w_th is an argument": lambda i, w, w_th: ms.mipe_angle(i, w, 256.0),
        "no gradient comes back": lambda i, w, w_th: ms.mipe_angle(i, w.detach(), w_th),
        "is torch.float64: return it in w's dtype":
            lambda i, w, w_th: ms.mipe_angle(i, w.double(), w_th),
        "MiPE still turns at w >= w_th": lambda i, w, w_th: turned(i, w, gamma(w, w_th)),
        "the gradient of w is NaN at w = inf (w_th = 64)":
            lambda i, w, w_th: turned(i, w, torch.where(w < w_th, gamma(w, w_th), 0.0)),
        "convert i and w to float64":
            lambda i, w, w_th: turned(i, w.clamp(max=w_th), gamma(w.clamp(max=w_th), w_th)),
    },
    "mipe": {
        "turned the wrong way": lambda x, angle: ms.mipe(x, -angle),
        "needs an axis at its end":
            lambda x, angle: ms.mipe(x, angle) if len(x) == 1 else torch.cat((x, x), -1),
        "one of the two sines has a minus": mipe_with_two_pluses,
        "each tile has angles of its own": lambda x, angle: ms.mipe(x, angle[:1].expand_as(angle)),
        "no gradient arrives at angle": lambda x, angle: ms.mipe(x, angle.detach()),
    },
    "trim": {
        "divided by r, not multiplied": lambda s, r: (1 - (1 - s) * r).relu().square(),
        "a width of its own": lambda s, r: ms.trim(s, r[0] if r.ndim > 1 else r),
        "no gradient arrives at r": lambda s, r: ms.trim(s, r.detach()),
    },
    "softmask": {
        "is negative in the past": lambda d, w: ms.softmask(-d, w),
        "-inf is for softmax":
            lambda d, w: torch.where((-w < d) & (d <= 0), ms.softmask(d, w), -INF),
        "there is no mask": lambda d, w: cosine(d, w),
        "sees the future": lambda d, w: torch.where(d.abs() < w, cosine(d, w), 0.0),
        "the cosine rises again": lambda d, w: torch.where(d <= 0, cosine(d, w), 0.0),
        "round nothing": lambda d, w: ms.softmask(d, w.ceil()),
        "no if and no float(w)": lambda d, w: (d <= 0).float() if w == INF else ms.softmask(d, w),
        "is something in float32": lambda d, w: torch.where(
            (-w < d) & (d <= 0), 0.5 * (torch.cos(math.pi * d / w) + 1), 0.0),
        "no gradient comes back": lambda d, w: ms.softmask(d, w.detach()),
    },
    "relevance": {
        "the relevances of a query sum to 1":
            lambda q, k, w, r, i0=0: F.normalize(ms.relevance(q, k, w, r, i0), p=1, dim=-1),
        "a width of its own": lambda q, k, w, r, i0=0: ms.relevance(q, k, w, r[:1].expand_as(r)),
        "no gradient arrives at q": lambda q, k, w, r, i0=0: ms.relevance(q.detach(), k, w, r, i0),
        "i0 is not used": lambda q, k, w, r, i0=0: ms.relevance(q, k, w, r),
        "positions in bfloat16 see the future": relevance_with_positions_in_the_dtype_of_q,
    },
    "screen": {
        "squared once too often":
            lambda q, k, v, w, r, i0=0: ms.relevance(q, k, w, r, i0).square() @ v,
        "cuts it": lambda q, k, v, w, r, i0=0: ms.screen(q, k, v, w, r, i0).float(),
        "is something in float32": lambda q, k, v, w, r, i0=0:
            ms.screen(*(x.float() for x in (q, k, v, w, r)), i0).to(v.dtype),
        "i0 is not passed on": lambda q, k, v, w, r, i0=0: ms.screen(q, k, v, w, r),
        "no gradient comes back":
            lambda q, k, v, w, r, i0=0: ms.screen(*(x.detach() for x in (q, k, v, w, r)), i0),
        "Convert bfloat16 to float32": lambda q, k, v, w, r, i0=0: ms.relevance(q, k, w, r, i0) @ v,
        "to float32 before the products":
            lambda q, k, v, w, r, i0=0: ms.relevance(q, k, w.to(q.dtype), r.to(q.dtype), i0) @ v,
        "return v's dtype":
            lambda q, k, v, w, r, i0=0: ms.screen(q, k, v.to(w.dtype), w, r, i0),
        "values in bfloat16 give h in torch.float32":
            lambda q, k, v, w, r, i0=0: ms.screen(q, k, v, w, r, i0).to(q.dtype),
        "rounded to bfloat16 on the way": screen_with_rounded_keys,
        "before its product with v": screen_with_rounded_relevances,
    },
    "tanh_norm": {
        "tanh of each number changes the direction": lambda x: torch.tanh(x),
        "taken along axis 2":
            lambda x: ms.tanh_norm(x.mT).mT if x.ndim > 2 else ms.tanh_norm(x),
        "the length is detached":
            lambda x: x * (length(ms.tanh_norm(x)) / length(x)).detach(),
        "tanh_norm(0) is not 0": lambda x: x * torch.tanh(length(x)) / length(x),
        "Jacobian at 0 is NaN": lambda x: torch.where(
            length(x) < 1e-6, x, x * torch.tanh(length(x)) / length(x)),
        "Jacobian at 0 is 0, not the identity":
            lambda x: x * torch.tanh(length(x)) / length(x).clamp_min(1e-6),
        "of vectors of size 0.01": lambda x: torch.where(length(x) < 0.1, x, ms.tanh_norm(x)),
    },
}
CORRECT = {
    "window": [window_by_a_mask],
    "acceptance": [lambda s_r: (1 / (1 + torch.exp(-s_r))).clamp(1e-3, 1)],
    "unit": [lambda x: F.normalize(x, dim=-1, eps=1e-6)],
    "mipe_angle": [angle_by_a_double_where],
    "mipe": [mipe_as_complex_numbers],
    "trim": [lambda s, r: torch.clamp(1 - (1 - s) / r, min=0) ** 2],
    "softmask": [lambda d, w: 0.5 * (torch.cos(math.pi * (d / w)) + 1) * ((d <= 0) & (d > -w)),
                 lambda d, w: torch.cos(math.pi / 2 * (d / w)).square() * ((d <= 0) & (d > -w))],
    "relevance": [relevance_by_einsum],
    "screen": [screen_one_query_at_a_time],
    "tanh_norm": [tanh_norm_with_two_clamps],
}


# ----------------------------------------------------------------------------- part 2, the model

def layer(**methods):
    return type("Layer", (Tiles,), methods)


def model(**methods):
    return type("Model", (Multiscreen,), methods)


def layer_with(screen):
    """A layer that replaces what screens by screen(cache's end, given, inputs)."""
    def screening(self, x, given, cache=None):
        end = cache.end if cache else 0

        @functools.wraps(given)
        def replaced(*inputs):
            return screen(end, given, inputs)

        return Tiles.screening(self, x, replaced, cache)

    return layer(screening=screening)


def screening_by_the_equations(self, x, screen, cache=None):
    w, r = ms.window(self.s_w), ms.acceptance(self.s_r)
    phi = ms.mipe_angle(torch.arange(x.shape[1]), w, self.config.w_th)
    q, k = (ms.mipe(ms.unit(self.project(x, W)), phi) for W in (self.W_Q, self.W_K))
    return ms.tanh_norm(screen(q, k, ms.unit(self.project(x, self.W_V)), w, r, 0))


def screening_of_any_length(self, x, screen, cache=None):
    w, r = ms.window(self.s_w), ms.acceptance(self.s_r)
    phi = ms.mipe_angle(torch.arange(x.shape[1]), w, self.config.w_th)
    q, k = (ms.mipe(self.project(x, W), phi) for W in (self.W_Q, self.W_K))
    return ms.tanh_norm(screen(q, k, self.project(x, self.W_V), w, r, 0))


def tile_after_tile(self, x, screen, cache=None):
    for h, W in enumerate(self.s_O.exp()[:, None, None] * self.W_O):
        x = x + (self.screening(x, screen) * self.gate(x))[:, h] @ W
    return x


def gate_by_hand(self, x):
    g = self.project(x, self.W_G)
    return (g / (1 + torch.exp(-g))).tanh()


def cache(kept):
    """A cache that returns kept(w) keys before the new ones; w: the largest window."""
    def append(self, k, v, w):
        k_all, v_all, _ = KeyCache.append(self, k, v, torch.full_like(w, math.inf))
        first = max(self.end - k.shape[2] - kept(min(w.max().item(), 2**30)), 0)
        return k_all[:, :, first:], v_all[:, :, first:], first

    return type("Cache", (KeyCache,), {"append": append})


class WithoutEnd(KeyCache):
    def append(self, k, v, w):
        out = super().append(k, v, w)
        self.end = 0
        return out


def restarted(change):
    """A model with the right initial values, then change(model, layer) for each layer."""
    def __init__(self, config):
        Multiscreen.__init__(self, config)
        with torch.no_grad():
            for layer in self.layers:
                change(self, layer)

    return model(__init__=__init__)


def forward_with_the_future(self, tokens, caches=None):
    z = Multiscreen.forward(self, tokens, caches)
    return z + 1e-6 * z.roll(-1, 1)


def generate_again(self, tokens, n):
    for _ in range(n):
        tokens = torch.cat((tokens, self(tokens)[:, -1].argmax(-1, keepdim=True)), 1)
    return tokens[:, -n:]


def mean_of_means(self, tokens, targets):
    return torch.stack([F.cross_entropy(z, t) for z, t in zip(self(tokens), targets)]).mean()


MISTAKES |= {
    "project": {
        "the tiles come before the positions":
            layer(project=lambda self, x, W: torch.einsum("bte,ehd->bthd", x, W)),
        "tiles and positions are mixed up": layer(project=lambda self, x, W: (
            (x @ W.flatten(1)).view(x.shape[0], W.shape[1], x.shape[1], W.shape[2]))),
        "tiles and dimensions are mixed up": layer(project=lambda self, x, W: (
            (x @ W.flatten(1)).unflatten(-1, (W.shape[2], W.shape[1])).permute(0, 3, 1, 2))),
    },
    "gate": {
        "take W_G": layer(gate=lambda self, x: torch.tanh(F.silu(self.project(x, self.W_V)))),
    },
    "screening": {
        "TanhNorm, is missing": layer(bound=lambda self, h: h),
        "nothing is of unit length": layer(screening=screening_of_any_length),
        "the argument `screen` is ignored":
            layer_with(lambda end, screen, inputs: ms.screen(*inputs)),
    },
    "forward": {
        "the gate acts twice": layer(gate=lambda self, x: Tiles.gate(self, x) ** 2),
        "all tiles read the same x": layer(forward=tile_after_tile),
    },
    "cache": {
        "append moves it on": WithoutEnd,
        "append returned only the new keys": cache(lambda w: 0),
        "sees key 16 with w = 4.5": cache(lambda w: math.floor(w) - 1),
        "i0 is not passed to screen": layer_with(lambda end, screen, inputs: screen(*inputs[:5])),
        "i0 counts from the first key that append returns":
            layer_with(lambda end, screen, inputs: screen(*inputs[:5], end)),
    },
    "initialize": {
        "the root of the wrong dimension":
            restarted(lambda self, layer: layer.W_K.mul_((self.config.d_K / self.config.d_E)**0.5)),
        "W_V has no initial values": restarted(lambda self, layer: layer.W_V.zero_()),
        "it is N(0, ..), around 0": restarted(lambda self, layer: layer.W_V.add_(1.0)),
        "W_K are alike": restarted(lambda self, layer: layer.W_K.copy_(layer.W_Q)),
        "s_w is spread over the tiles": restarted(lambda self, layer: layer.s_w.zero_()),
        "the root is missing": restarted(lambda self, layer: layer.s_O.mul_(2)),
        "the log is missing": restarted(lambda self, layer: self.s_F.fill_(self.config.d_E**0.5)),
    },
    "embed": {
        "the scale is e^s_E, not s_E":
            model(embed=lambda self, tokens: self.s_E * ms.unit(self.W_E[tokens])),
    },
    "logits": {
        "the rows of W_E are not of unit length":
            model(logits=lambda self, x: self.s_F.exp() * x @ self.W_E.T),
    },
    "loss": {
        "the targets are shifted twice": model(loss=lambda self, tokens, targets: (
            F.cross_entropy(self(tokens)[:, :-1].transpose(1, 2), targets[:, 1:]))),
        "the mean of each sequence's mean": model(loss=mean_of_means),
    },
    "generate": {
        "the prompt too": model(generate=lambda self, tokens, n: (
            torch.cat((tokens, Multiscreen.generate(self, tokens, n)), 1))),
        "all tokens go through the layers again": model(generate=generate_again),
        "the layers share one cache": model(hidden=lambda self, tokens, caches=None: (
            Multiscreen.hidden(self, tokens, caches and caches[:1] * len(caches)))),
    },
    "model": {
        "the model sees the future": model(forward=forward_with_the_future),
    },
    "training": {
        "no gradient reaches": model(hidden=lambda self, tokens, caches=None: (
            Multiscreen.hidden(self, tokens, caches).detach())),
    },
}
CORRECT |= {
    "gate": [layer(gate=gate_by_hand)],
    "screening": [layer(screening=screening_by_the_equations)],
    "cache": [cache(lambda w: math.ceil(w) - 1)],
    "loss": [model(loss=lambda self, tokens, targets: (
        F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())))],
}


# ------------------------------------------------------------- part 3, gradients block by block

MISTAKES |= {
    "pairs": {
        "key n of the block is at j[n]": {"j[None, :]": "torch.arange(len(j))"},
        "z and c are swapped": {"return z, c, d": "return c, z, d"},
        "it sees the future": {"d >= 0": "d > -w"},
    },
    "dv_block": {
        "the square is missing": {"(z * c).square().T": "(z * c).T"},
        "all are 0.25 times": {"(z * c).square().T": "(z * c / 2).square().T"},
    },
    "dz_block": {
        "the 2 of the square's derivative": {"2 * z * c.square()": "z * c.square()"},
        "changes its input z": {"2 * z * c.square()": "z.mul_(2) * c.square()"},
    },
    "dq_block": {"1/r is missing": {"dz @ k / r": "dz @ k"}},
    "dk_block": {"queries and keys were swapped": {"dz.T @ q": "dz @ q"}},
    "dr_block": {
        "multiply pair by pair": {"(dz * (1 - z)).sum()": "dz.sum() * (1 - z).sum()"},
    },
    "dw_block": {
        "a 1/w is missing": {"* theta / w": "* theta"},
        "for w = inf": {"* theta / w": "* theta / w * (w / w)"},
    },
    "gradients": {
        "changes its input q": {"T, S = len(q),": "T, S = len(q.mul_(2)),"},
        "return five gradients": {"return dq, dk, dv, dw, dr": "return dq, dk, dv, dw"},
        "the inputs are float64": {"torch.zeros_like(x)": "torch.zeros(x.shape)"},
        "zeros of its own": {"return dq, dk, dv, dw, dr": "return dq, dk, dv, dr, dr"},
        "these come in the order dr, dw, dv, dk, dq":
            {"return dq, dk, dv, dw, dr": "return dr, dw, dv, dk, dq"},
        "i0 is ignored": {"i = i0 + ": "i = "},
        "only dw is off": {"dw += ": "dw = "},
        "w is rounded down": {"math.ceil(w)": "math.floor(w)"},
        "the last block of queries": {"range(0, T, size)": "range(0, T - size + 1, size)"},
        "is 16 used instead of size": {"min(a + size, T)": "min(a + 16, T)"},
        "T x S must never exist": {"T, S = len(q), len(k)": "T, S, size = len(q), len(k), 10**6"},
        "blocks outside the window are visited": {"range(first // size * size,": "range(0,"},
        "blocks of later keys are visited": {"min(int(i[-1]) + 1, S)": "S"},
    },
}
CORRECT |= {
    "pairs": [{"math.pi / 2 * (d / w)": "math.pi * d / (2 * w)"}],         # float32 for integers d
    "dw_block": [{"2 * z.square() * c": "z.square() * (c > 0)",
                  "sin(theta * d)": "sin(2 * theta * d)"}],
    "gradients": [{"T, S = len(q), len(k)": "T, S, size = len(q), len(k), 7"}],
}


# --------------------------------------------------------------------------- part 4, the kernels

STORE = "    store_rows(OUT, h, t0"
LOOP = "for j0 in range(lo, hi, BJ):\n"

MISTAKES |= {
    "similarity_kernel": {
        "row n of Q starts at Q + n * K": {"rows[:, None] * D": "rows[:, None] * N"},
        "row n of OUT starts at OUT + n * S": {"X + t * S + j": "X + t * T + j"},
        "a load goes to row 21 of K_": {"load_rows(K_, j0, S,": "load_rows(K_, j0, T,"},
        "mask the store, columns < S": {"mask=(t < T) & (j < S)": "mask=t < T"},
        "needs input_precision": {', input_precision="ieee"': ""},
        "keys at program_id(1) * BJ": {"tl.program_id(1) * BJ": "tl.program_id(1) * BI"},
        "not be divided by the root of d_K": {", s, t0, j0": ", s / 8.0, t0, j0"},
    },
    "relevance_kernel": {
        "this is z c: alpha_d is its square": {"z * z * m": "z * tl.sqrt(m)"},
    },
    "bounds_kernel": {
        "row n start at OUT + n * 2": {"OUT + 2 * n": "OUT + n"},
        "inf became an integer": {"tl.minimum(tl.ceil(tl.load(W)), 1073741824.0)": "tl.load(W)"},
        "were they swapped": {"OUT + 2 * n, lo": "OUT + 2 * n, hi", "+ 1, hi": "+ 1, lo"},
        "w is rounded down": {"tl.ceil(tl.load(W))": "tl.load(W)"},
        "cut to a number that is too small": {", 1073741824.0)": ", 1e6)"},
        "lo is rounded up": {"first // BJ * BJ": "tl.cdiv(first, BJ) * BJ"},
        "the last query of the last block is T - 1": {"tl.minimum(t0 + BI, T)": "(t0 + BI)"},
        "where nothing is seen, lo = hi": {"tl.where(first < end, end, lo)": "tl.maximum(end, lo)"},
    },
    "forward_kernel": {
        "mask the store": {"X + at, x, mask=(rows < end)[:, None]": "X + at, x"},
        "without other=0.0": {", other=0.0": ""},
        "no atomics": {"tl.store(X + at": "tl.atomic_add(X + at"},
        "tl.dot of less than float32":
            {"tl.dot(z * z * m, v": "tl.dot((z * z * m).to(tl.float16), v.to(tl.float16)"},
        "has not stored itself":
            {"h = tl.zeros([BI, V], tl.float32)": "h = load_rows(OUT, t0, T, BI, V)"},
        "do queries begin at program_id(0) * BI": {"program_id(0) * BI": "program_id(0) * 32"},
        "Is a block that sees no key stored": {STORE: "    " + STORE},
        "the first key is 0: blocks before the window":
            {"return lo, tl.where(first < end, end, lo)": "return 0, end"},
        "only the last block counts": {"h += ": "h = "},
    },
    "dq_kernel": {
        "keys are cut at T": {"- 1, S, BJ)": "- 1, T, BJ)"},
        "1/r is missing": {"dq / tl.load(R)": "dq"},
    },
}
CORRECT["forward_kernel"] = [                          # from the last block to the first
    {LOOP: LOOP.replace("j0", "n") + "        j0 = lo + (hi - 1 - lo) // BJ * BJ - (n - lo)\n"}]
