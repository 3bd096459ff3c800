"""Part 1: your screening unit beside multiscreen.py, and the typical mistakes of each function."""
import math

import torch
import torch.nn.functional as F

import multiscreen as ms
from course.exercises import grade
from course.exercises.grade import case, correlated
from course.exercises.mistakes import INF, MASKS, ROOTS, cosine, inside, masked

RIGHT = {name: getattr(ms, name) for name in grade.IN_ORDER if hasattr(ms, name)}


def numbers(*x, dtype=torch.float32):
    return torch.tensor(x, dtype=dtype)


def normal(*shape):
    return torch.randn(*shape, generator=grade.random(1), dtype=torch.float64)


def length(x):
    return x.square().sum(-1, keepdim=True).sqrt()


def gamma(w, w_th):
    return (torch.cos(math.pi * w / w_th) + 1) / 2


def angle(i, w, gamma):
    """MiPE's angle in w's dtype."""
    return math.pi * i * (gamma / w)[:, None]


def with_whole_turns(i, w, w_th):
    """A wrong `mipe_angle`: a large angle is rounded to w's dtype."""
    w_near = w.double().clamp(max=w_th)
    return angle(i.double(), w_near, gamma(w_near, w_th)).to(w.dtype)


def by_rows(x, a, b, c, d):
    """x with its first two numbers multiplied by the matrix ((a, b), (c, d))."""
    x0, x1, *rest = x.unbind(-1)
    return torch.stack((a * x0 + b * x1, c * x0 + d * x1, *rest), -1)


def on_halves(x, angle):
    """A wrong `mipe`: x_n turns with x_(n + K/2), as in RoPE."""
    cos, sin = torch.cos(angle)[..., None], torch.sin(angle)[..., None]
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


def without_an_axis(x, angle):
    """A wrong `mipe`: torch.cos(angle) lacks an axis for the dimensions."""
    x0, x1, rest = x.split((1, 1, x.shape[-1] - 2), -1)
    cos, sin = torch.cos(angle), torch.sin(angle)
    return torch.cat((x0 * cos - x1 * sin, x0 * sin + x1 * cos, rest), -1)


def compete(f, share):
    """A wrong `relevance` or `screen`: the relevances of a query are divided among its keys."""
    if f is ms.relevance:
        return lambda q, k, w, r, i0=0: share(ms.relevance(q, k, w, r, i0))
    return lambda q, k, v, w, r, i0=0: share(ms.relevance(q, k, w, r, i0)) @ v


# The sum is divided by as it is, or with what people add to it.
SHARES = [lambda alpha_d: alpha_d.softmax(-1), lambda alpha_d: F.normalize(alpha_d, p=1, dim=-1),
          *(lambda alpha_d, eps=eps: alpha_d / (alpha_d.sum(-1, keepdim=True) + eps)
            for eps in (0.0, 1e-9, 1e-8, 1e-6))]


def of_pairs(alpha_d, axes=(..., None, None)):
    """A wrong `relevance`: alpha_d is a function of s, d, w and r. axes: those that w gets."""
    def relevance(q, k, w, r, i0=0):
        d = torch.arange(k.shape[2]) - torch.arange(i0, i0 + q.shape[2])[:, None]
        return alpha_d(q @ k.mT, d, w[axes], r[:, None, None])

    return relevance


def positions_of_bfloat16(q, k, w, r, i0=0):
    """A wrong `relevance` that counts positions in q's dtype."""
    i = i0 + torch.arange(q.shape[2], dtype=q.dtype)
    d = torch.arange(k.shape[2], dtype=q.dtype) - i[:, None]
    return ms.trim(q @ k.mT, r[:, None, None]) * ms.softmask(d, w[:, None, None])


UNIT_AT_0 = ("unit(0) must be 0, with a finite gradient: clip the length from below at eps, and as "
             "the slope of a root at 0 is infinite, clip the square, before the root")
TANH_NORM_AT_0 = ("tanh_norm(0) must be 0, and the Jacobian there the identity: near 0 return x, "
                  "not 0. Put a 1 in place of small squares before the root, and use one length "
                  "above and below. torch.where alone does not help, because backward computes "
                  "both branches")
SWAPPED = ("queries and keys were swapped, or alpha_d transposed: a row of it is a query, and "
           "relevance(q, k, ..) gives it so")
NO_SOFTMAX = "Trim takes the similarity itself: there is no softmax"
NO_INF = "-inf is for softmax: the future gets 0 from Softmask, which multiplies Trim of s"

OTHER_LENGTH = ("the length is the root of the sum of the squares over the last dimension: this is "
                "another number")
OTHER_LENGTHS = [lambda x: x.abs().sum(-1, keepdim=True), lambda x: x.abs().amax(-1, keepdim=True),
                 lambda x: x.std(-1, keepdim=True), lambda x: x.norm(dim=0, keepdim=True)]

# {function: [(a wrong one, what to say to those who have its results)]}. The first one counts.
MISTAKES = {
    "window": [
        (lambda s: s.exp(), "w lacks the + 1: the smallest window is 1"),
        (lambda s: s.exp().clamp_min(1), "the 1 is added: this is the larger of e^s_w and 1"),
        (lambda s: (s + 1).exp(), "the + 1 comes after the exponential: exp(s_w) + 1"),
        (lambda s: s + 1, "s_w is the logarithm of w - 1: the exponential is missing"),
        (lambda s: 2**s + 1, "the base is e, not 2: exp(s_w) + 1"),
        (lambda s: (-s).exp() + 1, "e^s_w, not e^-s_w"),
        (lambda s: F.softplus(s) + 1, "softplus is log(1 + e^s_w): take e^s_w + 1"),
        (lambda s: s.clamp(max=80).exp() + 1, "s_w = inf must give w = inf: a clamp makes it "
         "finite"),
        (lambda s: torch.where(s == INF, INF, s.exp() + 1), "the gradient at s_w = inf must be 0, "
         "and not NaN: torch.where computes both branches in the backward pass. Give exp a finite "
         "number where s_w is inf"),
        (lambda s: s.exp() + 1, "the gradient at s_w = inf must be 0: an infinite window is a "
         "setting, and must not spoil a backward pass")],
    "acceptance": [
        (lambda s: s.exp() + 1, "r = exp(s) + 1 is from an older version of the paper, which "
         "multiplies by r: here r is the sigmoid of s_r"),
        (lambda s: s.exp(), "r has no upper limit: it is the sigmoid of s_r, below 1"),
        *[(lambda s, f=f: f(s).clamp_min(1e-3), "this is no sigmoid: r is 1/(1 + e^-s_r)")
          for f in (torch.tanh, F.softplus, F.hardsigmoid, lambda s: s.exp().clamp_max(1),
                    lambda s: (s.tanh() + 1) / 2)],
        (lambda s: s.clamp(1e-3, 1), "s_r is not yet r: take its sigmoid"),
        (lambda s: torch.sigmoid(-s).clamp_min(1e-3), "the sign of s_r is wrong: a larger s_r "
         "accepts more"),
        (lambda s: torch.sigmoid(s), "r is not clipped: it is at least 1e-3"),
        (lambda s: 1e-3 + 0.999 * torch.sigmoid(s), "1e-3 is a lower limit: clip r there, and "
         "scale nothing"),
        (lambda s: torch.sigmoid(s) + 1e-3, "1e-3 is a lower limit: clip r there, add nothing")],
    "unit": [
        (lambda x: x / x.norm(), "all vectors were divided by one length: each has its own"),
        (lambda x: F.normalize(x), "the length is that of the last dimension, dim=-1: this is that "
         "of dimension 1, which F.normalize takes by default"),
        (lambda x: F.normalize(x, dim=-1), "F.normalize clips the length at 1e-12: pass eps=eps"),
        (lambda x: x / x.norm(dim=-1), "keepdim=True is missing: a row's length acts on a column"),
        (lambda x: x / x.square().mean(-1, keepdim=True).sqrt(), "divided by the root of the mean, "
         "as in RMSNorm: the length is the root of the sum"),
        *[(lambda x, of=of: x / of(x), OTHER_LENGTH) for of in OTHER_LENGTHS],
        (lambda x: x / length(x) ** 2, "divided by the squared length: take its root"),
        (lambda x: x / (length(x.where(x != 0, 1e-20)) + 1e-6), "eps was added to the length: "
         "clip it from below"),
        *[(lambda x, eps=eps: x / (x.square().sum(-1, keepdim=True) + eps).sqrt(), "eps was added "
           "in the root: clip the square from below, at eps^2") for eps in (1e-6, 1e-12)],
        (lambda x: x / x.square().sum(-1, keepdim=True).clamp_min(1e-6).sqrt(), "the square was "
         "clipped at eps, and so the length at the root of eps: clip the square at eps^2"),
        (lambda x: F.layer_norm(x, x.shape[-1:]), "this is LayerNorm, which also subtracts the "
         "mean: unit divides by the length, and nothing else"),
        (lambda x: x / length(x), UNIT_AT_0),
        (lambda x: x / length(x).clamp_min(1e-6), UNIT_AT_0),
        (lambda x: x / length(x).clamp_min(1e-6).detach(), "the length is detached: it changes "
         "with x, too")],
    "mipe_angle": [
        (lambda i, w, w_th: ms.mipe_angle(i, w, w_th) / math.pi, "the angle lacks pi"),
        (lambda i, w, w_th: angle(i, w, 1 + 0 * w), "gamma is missing: the angle must fade out "
         "towards w_th"),
        (lambda i, w, w_th: 2 * angle(i, w, gamma(w, w_th)), "the angle is twice what it should "
         "be: gamma has a factor 1/2, and the angle pi, not 2 pi"),
        (lambda i, w, w_th: angle(i, w, w * gamma(w, w_th)), "not divided by w"),
        (lambda i, w, w_th: angle(i, w, gamma(w, w_th) + 0.5), "in gamma the 1/2 multiplies the 1, "
         "too: 0.5 * (cos + 1)"),
        (lambda i, w, w_th: angle(i, w, torch.cos(math.pi * w / w_th) + 0.5), "parentheses are "
         "missing in gamma: (cos + 1)/2"),
        (lambda i, w, w_th: angle(i, w, gamma(w / math.pi, w_th)), "gamma lacks pi: "
         "cos(pi w/w_th)"),
        (lambda i, w, w_th: angle(i, w, (1 - torch.cos(math.pi * w / w_th)) / 2), "the sign of the "
         "cosine: gamma falls from 1 to 0, (cos + 1)/2"),
        (lambda i, w, w_th: angle(i, w, 1 - w / w_th), "gamma falls as a cosine, not as a line"),
        (lambda i, w, w_th: i * 10000.0 ** (-torch.arange(len(w)) / len(w))[:, None].to(w) +
         0 * w[:, None], "these are RoPE's angles: MiPE's depend on w"),
        (lambda i, w, w_th: angle(i, w.clamp(max=w_th), gamma(w.clamp(max=w_th), w_th)), "far out "
         "the angle is off: convert i and w to float64 before anything else, and remove whole "
         "turns before you convert the angle back to w's dtype"),
        (with_whole_turns, "far out the angle is off: remove whole turns before you convert the "
         "angle back to w's dtype"),
        (lambda i, w, w_th: angle(i, w, gamma(w, w_th)), "MiPE still turns at w >= w_th: the angle "
         "must be 0 there, for w = inf too"),
        (lambda i, w, w_th: angle(i, w, torch.where(w < w_th, gamma(w, w_th), 0.0)), "the gradient "
         "is NaN at w = inf: torch.where does not stop a NaN in backward. Clamp w before the "
         "formula")],
    "mipe": [
        (lambda x, angle: ms.mipe(x, -angle), "turned the wrong way: a quarter turn maps (1, 0) to "
         "(0, 1)"),
        (lambda x, angle: torch.cat([ms.mipe(pair, angle) for pair in x.split(2, -1)], -1),
         "all pairs of dimensions turn, as in RoPE: MiPE turns only the first two"),
        (on_halves, "x_0 is paired with the middle of x, as in RoPE on halves: MiPE turns x_0 and "
         "x_1, and nothing else"),
        (without_an_axis, "torch.cos(angle) is (H, T): it needs an axis at its end, [..., None], "
         "where it multiplies numbers of x"),
        (lambda x, angle: by_rows(x, angle.cos(), angle.sin(), angle.sin(), angle.cos()),
         "a minus is missing: the first number is x_0 cos - x_1 sin"),
        (lambda x, angle: by_rows(x, angle.cos(), -angle.sin(), angle.sin() * angle.cos(),
                                  angle.cos() - angle.sin() ** 2), "the second number takes the "
         "x_0 that has turned already: keep the old one"),
        (lambda x, angle: by_rows(x, angle.sin(), -angle.cos(), angle.cos(), angle.sin()),
         "sine and cosine were swapped: a turn by 0 changes nothing"),
        (lambda x, angle: by_rows(x, angle.cos(), -angle.sin(), angle.cos(), angle.sin()), "the "
         "second number takes sine and cosine of the first: it is x_0 sin + x_1 cos"),
        (lambda x, angle: by_rows(x, angle.cos(), -angle.sin(), angle.sin(), -angle.cos()),
         "a minus too many: the second number is x_0 sin + x_1 cos"),
        (lambda x, angle: ms.mipe(x, angle)[..., :2], "the other dimensions are missing: put them "
         "behind the two that turn")],
    "trim": [
        *[(lambda s, r, z=z: z(s, r).square(), says) for z, says in ROOTS],
        (lambda s, r: (s - (1 - r)).relu().square() / r, "the division by r comes before the "
         "square"),
        *[(lambda s, r, n=n: (1 - (1 - s) / r).relu() ** n, f"{what}: Trim is a square") for n, what
          in ((1, "the square is missing"), (3, "this is a cube"), (4, "this is squared twice"))],
        (lambda s, r: (1 - ((1 - s) / r).square()).relu(), "square the whole expression, after the "
         "max with 0"),
        *[(passes, "a similarity that passes is also rescaled: the relevance is 0 at the "
           "threshold, and 1 at s = 1") for passes in (
               lambda s, r: torch.where(s > 1 - r, s, 0.0),
               lambda s, r: torch.where(s > 1 - r, 1.0, 0.0) + 0 * r)],
        (lambda s, r: s.softmax(-1), "this is a softmax: Trim judges each key by itself"),
        (lambda s, r: F.normalize(ms.trim(s, r), p=1, dim=-1), "the relevances of a row sum to 1, "
         "as in softmax: nothing may compete, so divide by nothing"),
        (lambda s, r: (1 - (1 - s) / r).clamp(min=1e-9).square(), "a rejected key has a relevance "
         "of exactly 0: clip at 0 and add no eps, as nothing here is divided by it")],
    "softmask": [
        *MASKS,
        (lambda d, w: ms.softmask(-d, w), "d = j - i is negative in the past"),
        (lambda d, w: torch.where(inside(d, w), cosine(d, w), -INF), "outside the window the mask "
         "is 0, which multiplies: -inf is for softmax"),
        *[(lambda d, w, large=large: torch.where(inside(d, w), cosine(d, w), large), "outside the "
           "window the mask is 0, which multiplies: a large negative number is for softmax")
          for large in (-1e9, torch.finfo(torch.float32).min)],
        (masked(lambda d, w: (-w <= d) & (d <= 0), cosine), "the window ends before distance w: "
         "-w < d"),
        (masked(inside, lambda d, w: 0.5 * (torch.cos(math.pi * d / w) + 1)), "math.pi * d is "
         "float32 for integers d: math.pi * (d / w) has the dtype of w"),
        (lambda d, w: ms.softmask(d, w.detach()), "w is detached, or turned into a number: s_w "
         "learns through the cosine"),
        (inside, "inside the window the mask must fall from 1 to 0 as a cosine: this window is "
         "hard")],
    "relevance": [
        (lambda q, k, w, r, i0=0: ms.relevance(k, q, w, r, i0), "queries and keys were swapped"),
        (lambda q, k, w, r, i0=0: ms.trim(q @ k.permute(3, 2, 1, 0), r[:, None, None]), "k.T swaps "
         "all four axes: q @ k.transpose(-2, -1)"),
        (lambda q, k, w, r, i0=0: ms.trim(q @ k.mT, r), "r has the shape (H,) and s (B, H, T, S): "
         "w[:, None, None] and r[:, None, None] align them"),
        (lambda q, k, w, r, i0=0: ms.relevance(q, k, w, r), "i0 is ignored: the first query stands "
         "at i0, not at 0"),
        (lambda q, k, w, r, i0=0: ms.relevance(q / q.shape[-1] ** 0.5, k, w, r, i0), "s was "
         "divided by the root of d_K, as in attention: q and k have unit length, so q . k is their "
         "cosine already"),
        *[(compete(ms.relevance, share), "the relevances of a query sum to 1, as in softmax: "
           "nothing may compete, so divide by nothing") for share in SHARES],
        (lambda q, k, w, r, i0=0: ms.relevance(q, k, w, r, k.shape[2] - q.shape[2]), "the queries "
         "begin at i0: they need not end at the last key"),
        (lambda q, k, w, r, i0=0: ms.relevance(q, k, r, w, i0), "w and r were swapped: w is for "
         "Softmask, and r for Trim"),
        (of_pairs(lambda s, d, w, r: ms.trim(s, r) * ms.softmask(-d, w)), "the sign of d: it is "
         "j - i"),
        (of_pairs(lambda s, d, w, r: ms.trim(s, r) * (d <= 0)), "a causal mask is not enough: "
         "Softmask also fades with the distance and ends at w"),
        (of_pairs(lambda s, d, w, r: s.softmax(-1) * ms.softmask(d, w)), NO_SOFTMAX),
        (of_pairs(lambda s, d, w, r: ms.trim(s.masked_fill(d > 0, -INF), r)), NO_INF),
        (of_pairs(lambda s, d, w, r: ms.trim(s.masked_fill(d > 0, -INF), r) * ms.softmask(d, w)),
         NO_INF),
        (of_pairs(lambda s, d, w, r: ms.trim(s * ms.softmask(d, w), r)), "Softmask multiplies "
         "Trim of s, not s: trim(s, r) * softmask(d, w)"),
        (of_pairs(lambda s, d, w, r: ms.trim(s, r) * ms.softmask(d, w), axes=...), "w has the "
         "shape (H,), and d (T, S): w[:, None, None] aligns them"),
        (of_pairs(lambda s, d, w, r: ms.trim(s, r) + ms.softmask(d, w)), "Softmask multiplies "
         "Trim: it is not added"),
        *[(of_pairs(lambda s, d, w, r, n=n: ms.trim(s, r) * ms.softmask(d + n, w)), "the positions "
           "are off by one: the query's own key has d = 0") for n in (1, -1)],
        (of_pairs(lambda s, d, w, r: ms.trim(s, r) * ms.softmask(-d.abs(), w)), "d is no distance: "
         "a later key, d > 0, gets 0"),
        (lambda q, k, w, r, i0=0: ms.relevance(q, k, w, r, -i0), "the sign of i0: query n stands "
         "at i0 + n"),
        (of_pairs(lambda s, d, w, r: ms.trim(s, r)), "Softmask is missing: alpha_d is Trim times "
         "Softmask"),
        (of_pairs(lambda s, d, w, r: s * ms.softmask(d, w)), "Trim is missing: alpha is Trim of s"),
        (positions_of_bfloat16, "positions in bfloat16 see the future: above 256 bfloat16 has only "
         "every second integer. Count positions in integers")],
    "screen": [
        (lambda q, k, v, w, r, i0=0: ms.screen(q, k, v, w, r), "i0 is not passed on to "
         "`relevance`"),
        *[(compete(ms.screen, share), "the weights of a query sum to 1, as in softmax: nothing may "
           "compete, so divide by nothing") for share in SHARES],
        (lambda q, k, v, w, r, i0=0: ms.tanh_norm(ms.screen(q, k, v, w, r, i0)), "TanhNorm comes "
         "later, in Eq. 14: return the plain sum"),
        (lambda q, k, v, w, r, i0=0: ms.relevance(q, k, w, r, i0).mT @ v, SWAPPED),
        (lambda q, k, v, w, r, i0=0: ms.relevance(k, q, w, r, i0) @ v, SWAPPED),
        (lambda q, k, v, w, r, i0=0: ms.screen(k, q, v, w, r, i0), SWAPPED),
        (lambda q, k, v, w, r, i0=0: ms.screen(q, k, v, r, w, i0), "w and r were swapped"),
        (lambda q, k, v, w, r, i0=0: ms.relevance(q, k, w, r, i0) @ v, "convert bfloat16 to "
         "float32 before the products, and the result to v's dtype"),
        (lambda q, k, v, w, r, i0=0: ms.relevance(q.float(), k.float(), w, r, i0).to(v) @ v,
         "alpha_d is rounded before its product with v: convert v to float32 instead, or keep "
         "float64"),
        (lambda q, k, v, w, r, i0=0: ms.relevance(q, k, w.to(q), r.to(q), i0).to(v) @ v, "an error "
         "in s is amplified by 2/r: convert bfloat16 to float32 before the products")],
    "tanh_norm": [
        (lambda x: F.layer_norm(x, x.shape[-1:]), "this is LayerNorm: TanhNorm scales the vector "
         "so that its length is tanh|x|"),
        (lambda x: torch.tanh(x), "tanh of each number changes the direction: take it of the "
         "length"),
        (lambda x: x * torch.tanh(length(x)), "not divided by the length |x|"),
        (lambda x: x * torch.tanh(x.norm(dim=-1)) / x.norm(dim=-1), "keepdim=True is missing: a "
         "row's length acts on a column"),
        (lambda x: F.rms_norm(x, x.shape[-1:]), "this is RMSNorm: TanhNorm scales the vector so "
         "that its length is tanh|x|"),
        *[(f, "tanh is taken of the length, one number for each vector") for f in (
            lambda x: torch.tanh(ms.unit(x)) * length(x), lambda x: ms.unit(x) * torch.tanh(x),
            lambda x: torch.tanh(length(x)).expand_as(x))],
        *[(lambda x, of=of: x * torch.tanh(of(x)) / of(x), OTHER_LENGTH) for of in OTHER_LENGTHS],
        *[(lambda x, f=f: ms.unit(x) * f(length(x)), "the length is tanh|x|: this is another curve "
           "that ends at a limit") for f in (
               torch.sigmoid, torch.atan, torch.erf, lambda n: 1 - (-n).exp(),
               lambda n: n / (1 + n), lambda n: n.clamp_max(1))],
        (lambda x: ms.tanh_norm(x / x.shape[-1] ** 0.5) * x.shape[-1] ** 0.5, "the root of the "
         "mean was taken for the length: it is the root of the sum"),
        (lambda x: x * (torch.tanh(length(x)) / length(x).clamp_min(1e-6)).detach(), "the length "
         "is detached: it changes with x, too"),
        (lambda x: x / length(x), "the length is always 1: tanh|x| is missing"),
        (lambda x: x / x.norm() * torch.tanh(x.norm()), "one length for all: each vector has its "
         "own"),
        (lambda x: torch.where(length(x) < 1e-6, x, x * torch.tanh(length(x)) / length(x)),
         TANH_NORM_AT_0),
        (lambda x: x * torch.tanh(length(x)) / length(x), TANH_NORM_AT_0),
        (lambda x: x * torch.tanh(length(x)) / (length(x) + 1e-8), TANH_NORM_AT_0),
        (lambda x: x * torch.tanh(length(x)) / length(x).clamp_min(1e-6), TANH_NORM_AT_0)],
}


# {exercise: what to check where no mistake is known}
HINTS = {
    "window": "By hand: s_w = 0 gives w = 2, and s_w = log 3 gives 4",
    "acceptance": "By hand: s_r = 0 gives r = 1/2, and s_r = log 3 gives 3/4",
    "unit": "By hand: (3, 4) has length 5 and becomes (0.6, 0.8)",
    "mipe_angle": "By hand: i = 0 gives 0, and w = w_th/2 gives pi i/(2 w)",
    "mipe": "By hand: a quarter turn makes (1, 2, rest) into (-2, 1, rest)",
    "trim": "By hand: s = 0.8, r = 0.25 give 1 - 0.2/0.25 = 0.2, squared 0.04",
    "softmask": "By hand: w = 4, d = 0 .. -4 give 1, 0.854, 0.5, 0.146, 0",
    "relevance": "Take one pair by hand: s, d = j - i0 - i, Trim of s, Softmask of d",
    "screen": "The result is relevance(..) @ v, and nothing else",
    "tanh_norm": "By hand: (3, 4) becomes (0.6, 0.8) tanh(5)"}


def check(name, *cases):
    # In place of your other functions yours calls the right ones: only of earlier exercises.
    earlier = grade.IN_ORDER[: grade.IN_ORDER.index(name)]
    grade.Exercise("part1_screening", name, RIGHT[name], MISTAKES[name], HINTS[name],
                   given=grade.before(name), replaced=earlier).grade(*cases)


def test_window():
    check("window", case(numbers(0, math.log(3), -1, 4)),
          case(numbers(-INF, 12, 40), hint="s_w = -inf gives w = 1, and up to s_w = 80 nothing is "
               "clipped"),
          case(numbers(INF), hint="s_w = inf gives w = inf, with the gradient 0"),
          case(numbers(0, 2, dtype=torch.float64)))


def test_acceptance():
    check("acceptance", case(numbers(0, math.log(3), -math.log(3))), case(numbers(-6, -9, INF)))


def test_unit():
    check("unit", case(numbers([3, 4], [1, -2])),
          case(normal(2, 3, 5, 16), hint="the length is that of the last dimension"),
          case(torch.zeros(2, 4), hint=UNIT_AT_0),
          case(numbers([0, 1e-4], [0, 1e-8], [0, 2e-6], dtype=torch.float64)))


def in_one_turn(angle):
    """An angle in [0, 2 pi). No right one here is just below 2 pi."""
    return torch.remainder(angle, 2 * math.pi)


def test_mipe_angle():
    i, near = torch.tensor([0, 1, 3, 4]), numbers(2.5, 40, 63, dtype=torch.float64)
    check("mipe_angle",
          case(i, near, 64.0, through=in_one_turn),
          case(i, numbers(64, 70, 1e6), 64.0, through=in_one_turn, hint="at w >= w_th the angle is "
               "0, with gradient 0"),
          case(i, numbers(2.5, INF), 64.0, through=in_one_turn, hint="at w = inf the angle is 0, "
               "with gradient 0"),
          case(torch.tensor([2**17 + 1]), numbers(2.0039062), 256.0, through=in_one_turn,
               tolerance=1e-4, hint="at position 2^17 the angle is off: convert i and w to float64 "
               "before anything else"))


def test_mipe():
    quarter = torch.full((1, 1), math.pi / 2)
    check("mipe", case(numbers(1, 2, 0, 5, 0, 7, 0, 0).view(1, 1, 1, 8), quarter),
          case(normal(2, 3, 4, 16), normal(3, 4)))


def test_trim():
    check("trim", case(numbers(1, 0.95, 0.8, 0.6, -1), torch.tensor(0.25), zero=0.0),
          case(numbers(0.25, 0.5, 0.75), 1 - numbers(0.25, 0.5, 0.75), hint="at the threshold, "
               "1 - s = r, the relevance must be exactly 0"),
          case(normal(2, 3, 4).tanh(), numbers([[0.4]], [[0.9]], dtype=torch.float64), hint="r is "
               "a tensor: each tile has a width of its own"))


def test_softmask():
    d = torch.arange(-300, 100)
    windows = [case(d[None], torch.tensor(w), zero=0.0, hint=f"for w = {w:g} and d = -300 .. 99")
               for w in (4.0, 1.0, 7.5, 256.0)]
    check("softmask", *windows,
          case(d[None], numbers([[7.5]], [[INF]], dtype=torch.float64), tolerance=1e-9,
               hint="w may be a tensor, (H, 1, 1), and w = inf opens the whole past. math.pi * d "
               "is float32 for integers d; math.pi * (d / w) has the dtype of w"))


def test_relevance():
    w, r = numbers(4, 2.5, INF, dtype=torch.float64), numbers(0.5, 0.9, 0.3, dtype=torch.float64)
    q, k, _ = correlated(0, 2, 3, 9, 9)
    later, keys, _ = correlated(1, 1, 3, 4, 9)
    coarse, coarse_keys, _ = correlated(2, 1, 1, 300, 300, dtype=torch.bfloat16)
    check("relevance",
          case(q, k, w, r, 0, tolerance=1e-9),
          case(later, keys, w, r, 3, tolerance=1e-9, hint="the 4 queries stand at positions 3 to "
               "6, and there are 9 keys"),
          case(coarse, coarse_keys, numbers(64), numbers(1), 0, gradients=False,
               through=lambda y: (y.triu(1) > 0).any(), hint="queries in bfloat16 see the future"))


def test_screen():
    w, r = numbers(4, INF, dtype=torch.float64), numbers(0.4, 0.9, dtype=torch.float64)
    q, k, v = correlated(3, 2, 2, 7, 10)
    q_16, k_16, v_16 = correlated(5, 1, 1, 40, 40, dtype=torch.bfloat16)
    check("screen",
          case(q, k, v, w, r, 2, tolerance=1e-8),
          case(q_16, k_16, v_16, numbers(INF), numbers(0.1), 0, tolerance=0.01, hint="compute in "
               "torch.promote_types(q.dtype, torch.float32), and return v's dtype"),
          case(q_16.float(), k_16.float(), v_16, numbers(INF), numbers(0.1), 0, tolerance=0.01,
               hint="return v's dtype"))


def test_tanh_norm():
    check("tanh_norm", case(numbers([3, 4], [0.3, 0.4])),
          case(normal(2, 3, 4, 5), hint="the length is that of the last dimension"),
          case(torch.zeros(2, 4), hint=TANH_NORM_AT_0),
          *[case(normal(3, 16) * size, hint=f"at |x| = {size:g}")
            for size in (1e-30, 1e-8, 1e-6, 1e-3, 1e4)])
