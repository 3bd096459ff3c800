"""Part 3: each formula beside autograd in float64, and the typical mistakes of each function."""
import functools
import inspect
import math
from types import SimpleNamespace

import torch
import torch.nn.functional as F

import multiscreen as ms
from course.exercises import grade
from course.exercises.grade import correlated
from course.exercises.mistakes import (
    DIVIDED,
    FACTORS,
    INF,
    MASKS,
    ROOT,
    ROOTS,
    WITH_R,
    edits,
    pairs,
)

# ---------------------------------------------------------------------- the right functions

def gradient(f, x, dy):
    """The gradient of the sum of f(x) dy."""
    x = x.detach().clone().requires_grad_()
    return torch.autograd.grad(f(x), x, dy)[0]


def dv_block(z, m, dh):
    v = torch.zeros(z.shape[1], dh.shape[1], dtype=dh.dtype)
    return gradient(lambda v: (z.square() * m) @ v, v, dh)


def dz_block(z, m, v, dh):
    return gradient(lambda z: (z.square() * m) @ v, z, dh)


def dq_block(dz, k, r):
    q = torch.zeros(len(dz), k.shape[1], dtype=dz.dtype)
    return gradient(lambda q: 1 - (1 - q @ k.T) / r, q, dz)


def dk_block(dz, q, r):
    k = torch.zeros(dz.shape[1], q.shape[1], dtype=dz.dtype)
    return gradient(lambda k: 1 - (1 - q @ k.T) / r, k, dz)


def dr_block(dz, z, r):
    one_minus_s = r * (1 - z)
    return gradient(lambda r: 1 - one_minus_s / r, r, dz)


def dw_block(z, m, d, v, dh, w):
    return gradient(lambda w: (z.square() * ms.softmask(d, w)) @ v, w, dh)


def of_pairs(mask, q, k, v, w, r, dh, i0):
    """The gradients of h, if only the pairs in mask (T, S) count."""
    inputs = [x.detach().clone().requires_grad_() for x in (q, k, v, w, r)]
    q, k, v, w, r = inputs
    alpha_d = ms.relevance(q[None, None], k[None, None], w[None], r[None], i0)[0, 0]
    return torch.autograd.grad((alpha_d * mask) @ v, inputs, dh)


def gradients(q, k, v, w, r, dh, i0=0, size=16):
    # In one case NaN stands where no block may look.
    return of_pairs(1.0, q, k.nan_to_num(), v.nan_to_num(), w, r, dh, i0)


RIGHT = {f.__name__: f for f in (pairs, dv_block, dz_block, dq_block, dk_block, dr_block, dw_block,
                                 gradients)}


# ---------------------------------------------------------------------------- their mistakes

def block_by_block(q, k, v, w, r, dh, i0=0, size=16):
    """`gradients`, as the sum over blocks of queries and keys."""
    total = [torch.zeros_like(x) for x in (q, k, v, w, r)]
    for a in range(0, len(q), size):
        i = i0 + a
        last = i0 + min(a + size, len(q)) - 1
        reach = math.ceil(min(w, 1e6))
        first = max(i - reach + 1, 0)
        start = first // size * size
        end = min(last + 1, len(k))
        for b in range(start, end, size):
            queries, keys = slice(a, a + size), slice(b, min(b + size, end))
            mask = torch.zeros(len(q), len(k), dtype=q.dtype)
            mask[queries, keys] = 1
            added = of_pairs(mask, q, k.nan_to_num(), v.nan_to_num(), w, r, dh, i0)
            for n, rows in enumerate((queries, keys, keys, ..., ...)):
                total[n][rows] += added[n][rows]
    return total


OUTSIDE = ("blocks outside the window were read, where there is NaN: the queries at i .. last see "
           "the keys max(i - ceil(w) + 1, 0) .. min(last, S - 1)")
SEES = "sees keys from i - ceil(w) + 1 on, where i is the position of its first query"
MASK = "ms.softmask(d, w)"
ADDED = "total[n][rows] += added[n][rows]"

# {function: [(a wrong one, what to say to those who have its results)]}. The first one counts.
MISTAKES = {
    "pairs": edits(
        pairs,
        ("d = j - i", "d = torch.arange(len(j)) - i", "j is given: key n of the block is at j[n]"),
        ("i[:, None]", "torch.arange(len(i))[:, None]", "i is given: query n of the block is at "
         "i[n]"),
        *[(right, wrong, "d is j - i, as in Eq. 10: negative in the past") for right, wrong in (
            ("j - i[:, None]", "i[:, None] - j"), ("return z, m, d", "return z, m, -d"))],
        ("return z, m, d", "return d, z, m", "`pairs` returns z, m and d, in this order"),
        ("q @ k.T", "q @ k.T / q.shape[1] ** 0.5", DIVIDED),
        (ROOT, f"{ROOT}.square()", "z is Trim before its square: alpha_d = z^2 m"),
        *ROOTS,
        *MASKS),
    "dv_block": [
        *[(lambda z, m, dh, c=c, a=a, b=b: (c * z**a * m**b).T @ dh, f"alpha_d is z^2 m: yours is "
           f"{c} z^{a} m^{b}") for c, a, b in FACTORS if (c, a, b) != (1, 2, 1)],
        (lambda z, m, dh: F.normalize(z.square() * m, p=1, dim=1).T @ dh, "nothing competes: do "
         "not divide by the sum of a row"),
        (lambda z, m, dh: (z.square() * m) @ dh, "transpose alpha_d: a row of it is a query, and a "
         "row of dv is a key")],
    "dz_block": [
        *[(lambda z, m, v, dh, c=c, a=a, b=b: c * z**a * m**b * (dh @ v.T), "the slope of "
           f"z^2 m with z is 2 z m: yours is {c} z^{a} m^{b}")
          for c, a, b in FACTORS if (c, a, b) != (2, 1, 1)],
        (lambda z, m, v, dh: 2 * z * m * (dh @ v.T).sum(1, keepdim=True), "dh . v belongs to each "
         "pair: sum nothing over a row"),
        (lambda z, m, v, dh: 2 * z * m, "dh . v is missing: dL/d(alpha_d) = dh . v"),
        (lambda z, m, v, dh: z.square() * m * ((dh @ v.T) - (z.square() * m * (dh @ v.T)).sum(
            1, keepdim=True)), "the sum over a row belongs to softmax: here a weight depends on no "
         "other key, dL/d(alpha_d) = dh . v")],
    "dq_block": [
        *edits(dq_block, *WITH_R, ("q @ k.T", "q @ k.T / k.shape[1] ** 0.5", DIVIDED)),
        (lambda dz, k, r: dz.T @ k / r, "dz is (I, J): dq sums over the keys, dz @ k")],
    "dk_block": [
        *edits(dk_block, *WITH_R, ("q @ k.T", "q @ k.T / q.shape[1] ** 0.5", DIVIDED)),
        (lambda dz, q, r: dz @ q / r, "transpose dz: dk sums over the queries, dz.T @ q")],
    "dr_block": [
        *[(lambda dz, z, r, f=f, c=c, n=n: c * (dz * f(z, r)).sum() * r**n, "dz/dr is "
           f"(1 - s)/r^2 = (1 - z)/r: yours is {c} ({text}) r^{n}")
          for f, text in ((lambda z, r: 1 - z, "1 - z"), (lambda z, r: z, "z"),
                          (lambda z, r: 1, "1"), (lambda z, r: 1 - r * (1 - z), "s"))
          for c in (1, -1) for n in (-2, -1, 0, 1) if (c, text, n) != (1, "1 - z", -1)],
        (lambda dz, z, r: dz * (1 - z) / r, "sum over the pairs: dL/dr is one number"),
        (lambda dz, z, r: (dz * (1 - z)).mean() / r, "a gradient is the sum over the pairs, not "
         "their mean")],
    "dw_block": edits(
        dw_block,
        *[(right, wrong, f"the power of {x} is wrong: dL/dm = z^2 (dh . v), and dm/dw = "
           "sin(pi d/w) pi d/(2 w^2)") for x, right, wrong in (
               ("z", "z.square() * ", ""), ("z", "z.square()", "z"), ("m", MASK, f"m * {MASK}"),
               ("pi", "return ", "return 1 / math.pi * "), ("d", MASK, f"d * {MASK}"),
               ("d", MASK, f"{MASK} / d.clamp(max=-1)"), ("w", "return ", "return w * "),
               ("w", "return ", "return w**2 * "))],
        (MASK, f"2 * {MASK}", "the 1/2 of Softmask is missing: m = (cos(pi d/w) + 1)/2"),
        (MASK, "0.5 * torch.cos(math.pi * (d / w))", "outside the window m stays 0, whatever w is: "
         "count only pairs with m > 0"),
        *[("z.square()", wrong, "dL/dm is not dL/dz: dL/dm = z^2 (dh . v)")
          for wrong in ("2 * z", "2 * z * m", "z * m")],
        (MASK, "torch.where(m > 0, -0.5 * torch.sin(math.pi * (d / w)), 0.0)", "the slope of cos "
         "is -sin, not cos")),
    "gradients": [
        *edits(gradients, ("dh, i0)", "dh, 0)", "i0 is ignored: query t is at position i0 + t")),
        *edits(
            block_by_block,
            ("math.ceil", "math.floor", f"w is rounded down: a block {SEES}"),
            ("max(i -", "max(last -", "the first key is that of the block's last query: a block "
             f"{SEES}"),
            ("last + 1", "last", "the last query's own key is missing: the end is one past that "
             "query's position"),
            ("last + 1", "i + 1", "the end is that of the block's first query: its last query sees "
             "later keys"),
            ("range(0, len(q), size)", "range(0, len(q) - size + 1, size)", "the last block of "
             "queries, which is short, is left out"),
            *[(ADDED, f"if n == {n}:\n                    total[n][rows] = 0\n"
               f"                {ADDED}", f"{name} is overwritten by each block: add to it, with "
               "+=") for n, name in enumerate(("dq", "dk", "dv", "dw", "dr"))])],
}


# {exercise: what to check where no mistake is known}
HINTS = {
    "pairs": "By hand: s = 1 gives z = 1, s = 1 - r/2 gives 1/2, and d = 0 m = 1",
    "dv_block": "For one pair dv is z^2 m dh",
    "dz_block": "For one pair dz is 2 z m times dh . v",
    "dq_block": "For one pair dq is dz k/r",
    "dk_block": "For one pair dk is dz q/r",
    "dr_block": "For one pair dr is dz (1 - z)/r. z is 0 where Trim rejects: divide nothing by it",
    "dw_block": "Compare your dm/dw with (m(w + 1e-6) - m(w))/1e-6 for one pair",
    "gradients": "Compare with one block of all queries and all keys"}


# ------------------------------------------------------------------------------------ the tests

def given():
    """What `gradients` may use: the right functions of all other exercises, as a text."""
    blocks = [f for name, f in RIGHT.items() if name != "gradients"]
    of_ms = grade.without("relevance", "screen")
    return "\n\n".join([of_ms, "import sys\nms = sys.modules[__name__]",
                        *map(inspect.getsource, (gradient, *blocks))])


def check(name, *cases):
    exercise = grade.Exercise("part3_derivative", name, RIGHT[name], MISTAKES[name], HINTS[name],
                              gradients=False)
    if name == "gradients":
        exercise.given, exercise.others = given(), RIGHT.keys() - {name}
    exercise.grade(*cases)


Case = functools.partial(grade.Case, tolerance=1e-9)   # in float64


def block(w=9.0, r=0.3, I=12, J=10, first=8):  # noqa: E741
    """What the exercises get of a block: queries from position `first` on, keys from 2.

    Every fifth key points away from the queries.
    """
    q, k, v = (x[0, 0] for x in correlated(0, 1, 1, I, J))
    k[1::5] *= -1
    dh = torch.randn(I, 8, generator=grade.random(1), dtype=torch.float64)
    w, r = torch.tensor(w, dtype=torch.float64), torch.tensor(r, dtype=torch.float64)
    i, j = first + torch.arange(I), 2 + torch.arange(J)
    z, m, d = pairs(q, k, w, r, i, j)
    return SimpleNamespace(q=q, k=k, v=v, dh=dh, w=w, r=r, i=i, j=j, z=z, m=m, d=d,
                           dz=dz_block(z, m, v, dh))


def test_pairs():
    check("pairs", *[Case(b.q, b.k, b.w, b.r, b.i, b.j) for b in map(block, (9.0, 3.5, INF))])


def test_dv_block():
    b = block()
    check("dv_block", Case(b.z, b.m, b.dh))


def test_dz_block():
    b = block()
    check("dz_block", Case(b.z, b.m, b.v, b.dh))


def test_dq_block():
    b = block()
    check("dq_block", Case(b.dz, b.k, b.r))


def test_dk_block():
    b = block()
    check("dk_block", Case(b.dz, b.q, b.r))


def test_dr_block():
    b = block()
    check("dr_block", Case(b.dz, b.z, b.r))


def test_dw_block():
    b, open_ = block(), block(INF)
    check("dw_block", Case(b.z, b.m, b.d, b.v, b.dh, b.w),
          Case(open_.z, open_.m, open_.d, open_.v, open_.dh, open_.w, hint="for w = inf dw is 0: "
               "arrange the factors so that inf and 0 are never multiplied"))


def test_gradients():
    # T, S, i0, w, size: a last block of one query, and blocks that begin and end at the edge of one
    # of keys; no i0; keys before the window; another size.
    cases = []
    for T, S, i0, w, size in [(33, 50, 16, 1.4, 16), (40, 31, 0, 32.0, 16), (23, 61, 38, 17.0, 16),
                              (23, 61, 38, INF, 16), (5, 40, 33, 24.5, 16), (26, 45, 11, 6.0, 7)]:
        b = block(w, I=T, J=S)
        cases.append(Case(b.q, b.k, b.v, b.w, b.r, b.dh, i0, size, hint=(
            f"{T} queries, {S} keys, i0 = {i0}, w = {w:g}, size = {size}: are i and j the "
            "positions of the block, is each pair visited once, and each block added, with +=, to "
            "the right rows?")))

    # Queries at 50 to 59 see keys 41 to 59. Blocks of 16 keys may begin a little before.
    b = block(10.0, I=10, J=90)
    for x in (b.k, b.v):
        x[:25] = x[76:] = torch.nan
    check("gradients", *cases, Case(b.q, b.k, b.v, b.w, b.r, b.dh, 50, 16, hint=OUTSIDE))
