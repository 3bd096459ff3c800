"""Part 1: your screening unit beside multiscreen.py, and the typical mistakes of each function."""
import math

import torch
import torch.nn.functional as F

import multiscreen as ms
from course.exercises import grade
from course.exercises.grade import Case, correlated
from course.exercises.mistakes import INF, INSIDE, MASK, MASKS, ROOT, ROOTS, edits


def numbers(*x, dtype=torch.float32):
    return torch.tensor(x, dtype=dtype)


def normal(*shape):
    return torch.randn(*shape, generator=grade.random(1), dtype=torch.float64)


# ---------------------------------------------------------------------------- their mistakes

def compete(line, weights):
    """Mistakes: the relevances of a query are divided by their sum, or by what people add to it."""
    says = "the relevances of a query sum to 1, as in softmax: nothing may compete, so divide by " \
           "nothing"
    total = f"({weights}).sum(-1, keepdim=True)"
    return [(line, line.replace(weights, wrong), says) for wrong in (
        f"({weights}).softmax(-1)", f"F.normalize({weights}, p=1, dim=-1)", f"{weights} / {total}",
        *(f"{weights} / ({total} + {eps})" for eps in (1e-9, 1e-8, 1e-6)))]


SWAPPED = ("queries and keys were swapped, or alpha_d transposed: a row of it is a query, and "
           "relevance(q, k, ..) gives it so")
NO_INF = "-inf is for softmax: the future gets 0 from Softmask, which multiplies Trim of s"
OTHER_LENGTH = ("the length is the root of the sum of the squares over the last dimension: this is "
                "another number")
OTHER_LENGTHS = ["x.abs().sum(-1, keepdim=True)", "x.abs().amax(-1, keepdim=True)"]

# What the edits of multiscreen.py below replace.
LENGTH = "x.square().sum(-1, keepdim=True).clamp_min(eps**2).sqrt()"
GAMMA = "0.5 * (torch.cos(math.pi * w_near / w_th) + 1)"
ROTATED = "x0 * cos - x1 * sin, x0 * sin + x1 * cos"
TRIM = f"{ROOT}.square()"
ALPHA_D, D = "trim(s, r) * softmask(j - i[:, None], w)", "j - i[:, None]"
SCREEN = "(alpha_d @ v.to(dtype)).to(v.dtype)"
BOUNDED = "x * (torch.tanh(norm) / norm).masked_fill(small, 1.0)"
NORM = "square.masked_fill(small, 1.0).sqrt()"

# {function: [(a wrong one, what to say to those who have its results)]}. The first one counts.
MISTAKES = {
    "window": [
        (lambda s: s.exp(), "w lacks the + 1: the smallest window is 1"),
        (lambda s: (s + 1).exp(), "the + 1 comes after the exponential: exp(s_w) + 1"),
        (lambda s: s + 1, "s_w is the logarithm of w - 1: the exponential is missing"),
        (lambda s: F.softplus(s) + 1, "softplus is log(1 + e^s_w): take e^s_w + 1")],
    "acceptance": [
        (lambda s: s.exp() + 1, "r = exp(s) + 1 is from an older version of the paper, which "
         "multiplies by r: here r is the sigmoid of s_r"),
        *[(lambda s, f=f: f(s).clamp_min(1e-3), "this is no sigmoid: r is 1/(1 + e^-s_r)")
          for f in (torch.tanh, F.softplus, lambda s: s.exp().clamp_max(1))],
        (lambda s: s.clamp(1e-3, 1), "s_r is not yet r: take its sigmoid"),
        (lambda s: torch.sigmoid(-s).clamp_min(1e-3), "the sign of s_r is wrong: a larger s_r "
         "accepts more"),
        (lambda s: torch.sigmoid(s), "r is not clipped: it is at least 1e-3"),
        (lambda s: torch.sigmoid(s) + 1e-3, "1e-3 is a lower limit: clip r there, add nothing")],
    "unit": edits(
        ms.unit,
        ("x / length", "x / x.norm()", "all vectors were divided by one length: each has its own"),
        ("x / length", "F.normalize(x)", "the length is that of the last dimension, dim=-1: this "
         "is that of dimension 1, which F.normalize takes by default"),
        ("x / length", "F.normalize(x, dim=-1)", "F.normalize clips the length at 1e-12: pass "
         "eps=eps"),
        ("x / length", "x / x.norm(dim=-1)", "keepdim=True is missing: a row's length acts on a "
         "column"),
        ("sum(", "mean(", "divided by the root of the mean, as in RMSNorm: the length is the root "
         "of the sum"),
        *[(LENGTH, other, OTHER_LENGTH) for other in OTHER_LENGTHS],
        (LENGTH, "x.norm(dim=-1, keepdim=True) + eps", "eps was added to the length: clip it from "
         "below"),
        *[(".clamp_min(eps**2)", f".add({eps})", "eps was added in the root: clip the square from "
           "below, at eps^2") for eps in ("eps", "eps**2")],
        ("eps**2", "eps", "the square was clipped at eps, and so the length at the root of eps: "
         "clip the square at eps^2"),
        ("x / length", "F.layer_norm(x, x.shape[-1:])", "this is LayerNorm, which also subtracts "
         "the mean: unit divides by the length, and nothing else")),
    "mipe_angle": edits(
        ms.mipe_angle,
        ("math.pi * gamma", "gamma", "the angle lacks pi"),
        ("gamma / w_near", "1 / w_near", "gamma is missing: the angle must fade out towards w_th"),
        ("0.5 * ", "", "the angle is twice what it should be: gamma has a factor 1/2, and the "
         "angle pi, not 2 pi"),
        ("gamma / w_near", "gamma", "not divided by w"),
        (GAMMA, "torch.cos(math.pi * w_near / w_th) + 1 / 2", "parentheses are missing in gamma: "
         "(cos + 1)/2"),
        ("math.pi * w_near", "w_near", "gamma lacks pi: cos(pi w/w_th)"),
        ("math.pi * gamma / w_near", "10000.0 ** (-torch.arange(len(w)) / len(w)) + 0 * w_near",
         "these are RoPE's angles: MiPE's depend on w")),
    "mipe": edits(
        ms.mipe,
        (ROTATED, "x0 * cos + x1 * sin, -x0 * sin + x1 * cos", "turned the wrong way: a quarter "
         "turn maps (1, 0) to (0, 1)"),
        (f"torch.cat(({ROTATED}, rest), -1)", "torch.cat([mipe(x, angle) for x in x.split(2, -1)], "
         "-1)", "all pairs of dimensions turn, as in RoPE: MiPE turns only the first two"),
        ("x.split((1, 1, x.shape[-1] - 2), -1)", "*x.chunk(2, -1), x[..., :0]", "x_0 is paired "
         "with the middle of x, as in RoPE on halves: MiPE turns x_0 and x_1, and nothing else"),
        ("cos(angle)[..., None]", "cos(angle)", "sin(angle)[..., None]", "sin(angle)", "torch.cos("
         "angle) is (H, T): it needs an axis at its end, [..., None], where it multiplies numbers "
         "of x"),
        ("x0 * sin", "(x0 * cos - x1 * sin) * sin", "the second number takes the x_0 that has "
         "turned already: keep the old one"),
        (", rest), -1)", "), -1)", "the other dimensions are missing: put them behind the two that "
         "turn")),
    "trim": edits(
        ms.trim,
        *ROOTS,
        (TRIM, "(s - (1 - r)).relu().square() / r", "the division by r comes before the square"),
        (TRIM, ROOT, "the square is missing: Trim is a square"),
        (TRIM, "(1 - ((1 - s) / r).square()).relu()", "square the whole expression, after the max "
         "with 0"),
        *[(TRIM, f"torch.where(1 - s < r, {wrong}, 0.0) + 0 * r", "a similarity that passes is "
           "also rescaled: the relevance is 0 at the threshold, and 1 at s = 1")
          for wrong in ("s", "1.0")],
        (TRIM, "s.softmax(-1)", "this is a softmax: Trim judges each key by itself"),
        *compete(TRIM, TRIM)),
    "softmask": edits(
        ms.softmask,
        *MASKS,
        (INSIDE, "(0 <= d) & (d < w)", "d = j - i is negative in the past"),
        *[(MASK, MASK.replace("0.0", wrong), "outside the window the mask is 0, which multiplies: "
           "-inf, or a large negative number, is for softmax")
          for wrong in ("-torch.inf", "-1e9", "torch.finfo(w.dtype).min")],
        (INSIDE, "(-w <= d) & (d <= 0)", "the window ends before distance w: -w < d"),
        ("inside =", "w = w.detach(); inside =", "w is detached, or turned into a number: s_w "
         "learns through the cosine"),
        (MASK, "inside", "inside the window the mask must fall from 1 to 0 as a cosine: this "
         "window is hard")),
    "relevance": edits(
        ms.relevance,
        ("k.transpose(-2, -1)", "k.permute(3, 2, 1, 0)", "k.T swaps all four axes: q @ "
         "k.transpose(-2, -1)"),
        (", r[:, None, None]", ", r", "r has the shape (H,) and s (B, H, T, S): w[:, None, None] "
         "and r[:, None, None] align them"),
        ("i0, i0 + q.shape[2]", "q.shape[2]", "i0 is ignored: the first query stands at i0, not "
         "at 0"),
        ("q @", "q / q.shape[-1] ** 0.5 @", "s was divided by the root of d_K, as in attention: "
         "q and k have unit length, so q . k is their cosine already"),
        *compete(ALPHA_D, ALPHA_D),
        (ALPHA_D, f"trim(s, w) * softmask({D}, r)", "w and r were swapped: w is for Softmask, and "
         "r for Trim"),
        (D, "i[:, None] - j", "the sign of d: it is j - i"),
        (f"softmask({D}, w)", f"({D} <= 0)", "a causal mask is not enough: Softmask also fades "
         "with the distance and ends at w"),
        ("trim(s, r)", "s.softmax(-1)", "Trim takes the similarity itself: there is no softmax"),
        *[(ALPHA_D, f"trim(s.masked_fill({D} > 0, -math.inf), r){mask}", NO_INF)
          for mask in ("", f" * softmask({D}, w)")],
        (ALPHA_D, f"trim(s * softmask({D}, w), r)", "Softmask multiplies Trim of s, not s: "
         "trim(s, r) * softmask(d, w)"),
        ("w[:, None, None]", "w", "w has the shape (H,), and d (T, S): w[:, None, None] aligns "
         "them"),
        (ALPHA_D, "trim(s, r)", "Softmask is missing: alpha_d is Trim times Softmask"),
        ("trim(s, r)", "s", "Trim is missing: alpha is Trim of s")),
    "screen": edits(
        ms.screen,
        (", i0)\n", ")\n", "i0 is not passed on to `relevance`"),
        *compete(SCREEN, "alpha_d"),
        (SCREEN, f"tanh_norm({SCREEN})", "TanhNorm comes later, in Eq. 14: return the plain sum"),
        ("alpha_d @", "alpha_d.mT @", SWAPPED),
        ("q.to(dtype), k.to(dtype)", "k.to(dtype), q.to(dtype)", SWAPPED),
        ("w.to(dtype), r.to(dtype)", "r.to(dtype), w.to(dtype)", "w and r were swapped")),
    "tanh_norm": edits(
        ms.tanh_norm,
        (BOUNDED, "F.layer_norm(x, x.shape[-1:])", "this is LayerNorm: TanhNorm scales the vector "
         "so that its length is tanh|x|"),
        (BOUNDED, "torch.tanh(x)", "tanh of each number changes the direction: take it of the "
         "length"),
        (" / norm", "", "not divided by the length |x|"),
        (BOUNDED, "x * torch.tanh(x.norm(dim=-1)) / x.norm(dim=-1)", "keepdim=True is missing: a "
         "row's length acts on a column"),
        (BOUNDED, "F.rms_norm(x, x.shape[-1:])", "this is RMSNorm: TanhNorm scales the vector so "
         "that its length is tanh|x|"),
        (BOUNDED, "unit(x) * torch.tanh(x)", "tanh is taken of the length, one number for each "
         "vector"),
        *[(NORM, other, OTHER_LENGTH) for other in OTHER_LENGTHS],
        ("sum(", "mean(", "the root of the mean was taken for the length: it is the root of the "
         "sum"),
        ("torch.tanh(norm)", "1", "the length is always 1: tanh|x| is missing"),
        (BOUNDED, "x / x.norm() * torch.tanh(x.norm())", "one length for all: each vector has its "
         "own")),
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
    "tanh_norm": "By hand: (0.3, 0.4) has length 0.5 and becomes (0.6, 0.8) tanh(0.5), which is "
                 "(0.277, 0.370)"}


def check(name, *cases):
    grade.Exercise("part1_screening", name, getattr(ms, name), MISTAKES[name], HINTS[name],
                   grade.without(name), HINTS.keys() - {name}).grade(*cases)


def test_window():
    check("window", Case(numbers(0, math.log(3), -1, 4)),
          Case(numbers(-INF, 12, 40), hint="s_w = -inf gives w = 1, and up to s_w = 80 nothing is "
               "clipped"),
          Case(numbers(INF), hint="s_w = inf gives w = inf, with the gradient 0, and not NaN. "
               "torch.where computes both branches in the backward pass: give exp a finite number "
               "where s_w is inf"),
          Case(numbers(0, 2, dtype=torch.float64)))


def test_acceptance():
    check("acceptance", Case(numbers(0, math.log(3), -math.log(3))), Case(numbers(-6, -9, INF)))


def test_unit():
    check("unit", Case(numbers([3, 4], [1, -2])),
          Case(normal(2, 3, 5, 16), hint="the length is that of the last dimension"),
          Case(torch.zeros(2, 4), hint="unit(0) must be 0, with a finite gradient: clip the "
               "length from below at eps, and as the slope of a root at 0 is infinite, clip the "
               "square, before the root"),
          Case(numbers([0, 1e-4], [0, 1e-8], [0, 2e-6], dtype=torch.float64)))


def test_mipe_angle():
    i, near = torch.tensor([0, 1, 3, 4]), numbers(2.5, 40, 63, dtype=torch.float64)
    check("mipe_angle",
          Case(i, near, 64.0),
          Case(i, numbers(64, 70, 1e6), 64.0, hint="MiPE still turns at w >= w_th: the angle is 0 "
               "there, with the gradient 0"),
          Case(i, numbers(2.5, INF), 64.0, hint="at w = inf the angle is 0, with the gradient 0, "
               "and not NaN: torch.where does not stop a NaN in backward. Clamp w before the "
               "formula"),
          Case(torch.tensor([2**17 + 1]), numbers(2.0039062), 256.0, tolerance=1e-4, hint="at "
               "position 2^17 the angle is off: convert i and w to float64 before anything else, "
               "and remove whole turns before you convert the angle back to w's dtype"))


def test_mipe():
    quarter = torch.full((1, 1), math.pi / 2)
    check("mipe", Case(numbers(1, 2, 3, 5, 4, 7, 6, 8).view(1, 1, 1, 8), quarter),
          Case(normal(2, 3, 4, 16), normal(3, 4)))


def test_trim():
    check("trim", Case(numbers(1, 0.95, 0.8, 0.6, -1), torch.tensor(0.25)),
          Case(numbers(0.25, 0.5, 0.75), 1 - numbers(0.25, 0.5, 0.75), hint="at the threshold, "
               "1 - s = r, the relevance must be exactly 0"),
          Case(normal(2, 3, 4).tanh(), numbers([[0.4]], [[0.9]], dtype=torch.float64), hint="r is "
               "a tensor: each tile has a width of its own"))


def test_softmask():
    d = torch.arange(-300, 100)
    windows = [Case(d[None], torch.tensor(w), hint=f"for w = {w:g} and d = -300 .. 99")
               for w in (4.0, 1.0, 7.5, 256.0)]
    check("softmask", *windows,
          Case(d[None], numbers([[7.5]], [[INF]], dtype=torch.float64), tolerance=1e-9,
               hint="w may be a tensor, (H, 1, 1), and w = inf opens the whole past. math.pi * d "
               "is float32 for integers d; math.pi * (d / w) has the dtype of w"))


def test_relevance():
    w, r = numbers(4, 2.5, INF, dtype=torch.float64), numbers(0.5, 0.9, 0.3, dtype=torch.float64)
    q, k, _ = correlated(0, 2, 3, 9, 9)
    later, keys, _ = correlated(1, 1, 1, 4, 9)
    check("relevance",
          Case(q, k, w, r, 0, tolerance=1e-9),
          Case(later, keys, w[:1], r[:1], 3, tolerance=1e-9, hint="the 4 queries stand at "
               "positions 3 to 6, and there are 9 keys"))


def test_screen():
    w, r = numbers(4, INF, dtype=torch.float64), numbers(0.4, 0.9, dtype=torch.float64)
    q, k, v = correlated(3, 2, 2, 7, 10)
    q_16, k_16, v_16 = correlated(5, 1, 1, 40, 40, dtype=torch.bfloat16)
    check("screen",
          Case(q, k, v, w, r, 2, tolerance=1e-8),
          Case(q_16, k_16, v_16, numbers(INF), numbers(0.1), 0, tolerance=0.01, hint="an error in "
               "s is amplified by 2/r: convert bfloat16 to float32 before all products, and the "
               "result to v's dtype. torch.promote_types(q.dtype, torch.float32) is the type"),
          Case(q_16.float(), k_16.float(), v_16, numbers(INF), numbers(0.1), 0, tolerance=0.01,
               hint="return v's dtype"))


def test_tanh_norm():
    check("tanh_norm", Case(numbers([3, 4], [0.3, 0.4])),
          Case(normal(2, 3, 4, 5), hint="the length is that of the last dimension"),
          Case(torch.zeros(2, 4), hint="tanh_norm(0) must be 0, and the Jacobian there the "
               "identity: near 0 return x, not 0. Put a 1 in place of small squares before the "
               "root, and use one length above and below. torch.where alone does not help, because "
               "backward computes both branches"),
          *[Case(normal(3, 16) * size, hint=f"at |x| = {size:g}")
            for size in (1e-30, 1e-8, 1e-6, 1e-3, 1e4)])
