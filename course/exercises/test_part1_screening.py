"""Part 1, from Trim on: hand-worked points first, then properties, then multiscreen.py."""
import math

import torch

import multiscreen as ms
from course.exercises.adapters import mine
from course.exercises.checks import (
    Wrong,
    check,
    correlated,
    expect,
    expect_gradients,
    gradient,
    random,
)

INF = math.inf


def test_trim():
    s, r = torch.tensor([1.0, 0.95, 0.8, 0.75, 0.6, -1.0]), torch.tensor(0.25)
    z = 1 - (1 - s) / r
    expect(mine.trim(s, r), [1, 0.64, 0.04, 0, 0, 0],
           "trim([1, 0.95, 0.8, 0.75, 0.6, -1], r = 0.25)",
           [((1 - (1 - s) * r).relu().square(), "1 - s must be divided by r, not multiplied by it"),
            (z.square(), "below the threshold the relevance rises again: the max with 0 comes "
             "before the square"),
            (z.relu(), "the square is missing"),
            ((r - 1 + s).relu().square(), "s = 1 must give 1 whatever r is: divide by r"),
            (1 - ((1 - s) / r).clamp(max=1).square(), "square the whole expression: (1 - ..)^2"),
            (((s - r) / (1 - r)).relu().square(),
             "r was taken for the threshold: the threshold is 1 - r, the width is r"),
            *((torch.where(s > 1 - r, x, 0.0), "a similarity that passes is also rescaled: "
               "relevance is 0 at the threshold and 1 at s = 1") for x in (s, s.square(), 1.0)),
            ((r - 1 + s).relu().square() / r, "square the whole expression: divide by r first"),
            (z.relu().square() * s, "Trim takes the place of s: do not multiply by s"),
            ((1 - (1 - s).square() / r).relu().square(), "only the result is squared, not 1 - s"),
            (torch.maximum(z, r).square(), "the max is with 0"),
            (2 * z.relu(), "a square is z z, not 2 z"),
            ((2 * s - 1).relu().square(), "r is ignored: is there a constant in its place?"),
            ((1 - (1 - s) / (2 * r)).relu().square(), "the width is r, not 2 r"),
            ((1 - (1 - s.abs()) / r).relu().square(), "|s| was taken: opposite vectors are not "
             "similar"),
            ((1 - (1 + s) / r).relu().square(), "the sign: 1 - s, not 1 + s"),
            ((1 - s / r).relu().square(), "Trim compares 1 - s with r, not s"),
            ((-s / r).relu().square(), "brackets: it is 1 - (1 - s)/r"),
            ((-s / r).square(), "brackets, and a max with 0: max(1 - (1 - s)/r, 0)"),
            (1 + 0 * s, "the max is over all numbers together: compare each with 0"),
            (torch.nn.functional.softplus(z).square(), "softplus is never 0: take a max"),
            (z.relu() ** 3, "the power is 2"),
            (z.relu().sqrt(), "the power is 2, not 1/2"),
            (torch.nn.functional.leaky_relu(z).square(), "below the threshold the relevance is "
             "exactly 0: this max leaks"),
            (torch.sigmoid(z), "this is a sigmoid: Trim is max(1 - (1 - s)/r, 0)^2"),
            (torch.where(s < 0, s.square(), z.relu().square()), "a similarity below 0 is rejected, "
             "as all below the threshold")])
    on = torch.tensor([0.25, 0.5, 0.75])
    check((mine.trim(on, 1 - on) == 0).all(), "at the threshold, 1 - s = r, the relevance must be "
          "exactly 0")
    s = torch.tensor([0.3, 0.5, 0.75, 1.0])
    slope, = gradient(lambda s: mine.trim(s, torch.tensor(0.5)), s)
    expect(slope, [0, 0, 2, 4], "the slope of trim at s = 0.3, 0.5, 0.75, 1 for r = 0.5")
    inputs = torch.rand(2, 3, 4, generator=random(3)).double(), torch.tensor([[[0.4]], [[0.9]]])
    expect(mine.trim(*inputs), ms.trim(*inputs), "trim of two tiles, r = 0.4 and 0.9,",
           [(ms.trim(inputs[0], inputs[1][:1]), "each tile has a width of its own")])
    expect_gradients(mine.trim, ms.trim, inputs, "s r")


def test_softmask():
    d, w, m = torch.tensor([0, -1, -2, -3]), torch.tensor(4.0), [1, 0.5 + 0.5**1.5, 0.5]
    m.append(1 - m[1])
    right = torch.tensor(m)
    cos = 2 * right - 1
    found = mine.softmask(d, w)
    expect(found, right, "softmask(w = 4) at d = {}",
           [(cos, "the cosine is not yet between 0 and 1: (cos + 1)/2"),
            (cos.relu(), "the cosine is not yet between 0 and 1: (cos + 1)/2"),
            (cos + 1, "softmask lacks its 1/2: at distance 0 it is 1"),
            (torch.tensor([1.0, 0, 0, 0]), "all keys but the query's own get 0: d = j - i is "
             "negative in the past"),
            (0.5 * (torch.cos(d / w) + 1), "the cosine lacks pi: the mask must be 0 at distance w"),
            (0.5 * (torch.cos(math.pi * d / (w + 1)) + 1),
             "a key at distance exactly w must get 0: the cosine is stretched over w + 1"),
            (right + 0.5, "brackets: 0.5 * (cos(..) + 1)"),
            (0.5 * (torch.cos(math.pi * d * w) + 1), "d is divided by w, not multiplied by it"),
            (0.5 * (torch.cos(3.14 * d / w) + 1), "3.14 is cut short: take math.pi"),
            (0.5 * (torch.sin(math.pi * d / w) + 1), "the cosine, not the sine"),
            (torch.ones(4), "inside the window the mask must fall from 1 to 0 as a cosine: this "
             "window is hard"),
            (0.5 * (torch.cos(2 * math.pi * d / w) + 1), "the angle is doubled: it is pi d/w"),
            (0.5 * (torch.cos(math.pi / 2 * d / w) + 1), "the angle is halved: it is pi d/w"),
            (right * (d < 0), "the query's own key counts: at d = 0 the mask is 1"),
            (1 + d / w, "the mask falls as a cosine, not as a line"),
            (torch.exp(d / w), "the mask falls as a cosine, not as an exponential"),
            (right.square(), "squared once too often: (cos + 1)/2 is already a square"),
            (2 * right.square(), "squared once too often: (cos + 1)/2 is already a square"),
            (0.5 * (torch.cos(180 * (d / w)) + 1), "the cosine takes radians: pi, not 180"),
            (right.sqrt(), "this is the cosine of pi d/(2 w): Softmask is its square"),
            (ms.softmask(d, w / 2), "the window ends at w, not at w/2"),
            (ms.softmask(d, w - 1), "the window ends at w, not at w - 1")], at=d)
    edge = mine.softmask(torch.tensor([-4]), w)
    check(edge != -INF, "outside the window the mask is 0, which multiplies: -inf is for softmax")
    check(edge == 0, "a key at distance exactly w must get 0")
    future = mine.softmask(torch.tensor([1, 2, 3]), w)
    endless = mine.softmask(torch.tensor([-5, -9, 1, 2, 3]), w) > 0
    check(not endless.all(), "there is no mask: outside -w < d <= 0 the result must be 0")
    check((future == 0).all(), "a later key, d > 0, must get 0: this mask sees the future")
    far = mine.softmask(torch.tensor([-5, -8, -9, -100]), w)
    check((far == 0).all(), "beyond the window the cosine rises again: every distance above w must "
          "get exactly 0")
    infinite = mine.softmask(torch.tensor([-10**6, -1, 0, 1]), torch.tensor(INF))
    expect(infinite, [1, 1, 1, 0], "softmask(w = inf) at d = {}",
           [([1, 1, 1, 1], "w = inf opens the whole past: a later key, d > 0, still gets 0")],
           at=[-10**6, -1, 0, 1])
    d = torch.arange(-300, 100)
    for w in (1.0, 3.5, 7.0, 256.0, 1e9):
        w = torch.tensor(w)
        found = mine.softmask(d, w)
        outside = found[(d > 0) | (d <= -w)]
        check((outside == 0).all(), f"outside the window, w = {w.item():g}, the mask is "
              f"{outside.abs().max().item():.2g}: it must be exactly 0")
        expect(found, ms.softmask(d, w), f"softmask(w = {w.item():g}) at d = {{}}",
               [(ms.softmask(d, turn(w)), "w is a real number: round nothing")
                for turn in (torch.ceil, torch.floor, torch.round)], at=d)
    w = torch.tensor([[[7.5]], [[INF]]]).double()
    try:
        expect(mine.softmask(d[None], w), ms.softmask(d[None], w),
               "softmask of w = 7.5 and inf, in float64,", tolerance=1e-9)
    except (RuntimeError, ValueError) as e:
        raise Wrong(f"w may be a tensor, (H, 1, 1), so no if and no float(w): {e}") from e
    expect_gradients(lambda w: mine.softmask(d, w), lambda w: ms.softmask(d, w),
                     [torch.tensor(7.5)], "w")


def relevance_with(q, k, w, r, s=lambda s: s, d=lambda d: d, mask=ms.softmask):
    """Eq. 11 with another s, d or Softmask."""
    distance = d(torch.arange(k.shape[2]) - torch.arange(q.shape[2])[:, None])
    return ms.trim(s(q @ k.mT), r[:, None, None]) * mask(distance, w[:, None, None])


def wrong_relevances(q, k, w, r):
    """(relevance, cause): one mistake each, for i0 = 0."""
    z2, m = (relevance_with(q, k, *x) for x in ((w * INF, r), (w, r / r * 1e9)))
    every = relevance_with(q, k, w, r, mask=lambda d, w: torch.ones_like(d * w))
    return [
        (ms.relevance(k, q, w, r), "queries and keys were swapped: q goes first"),
        (every, "there is no mask: Softmask is missing"),
        (z2, "the window is ignored: m is Softmask of d and w"),
        (relevance_with(q, k, w, r, d=lambda d: -d), "the sign of d: it is j - i, negative in the "
         "past"),
        (relevance_with(q, k, w, r, s=lambda s: s * q.shape[-1] ** -0.5), "s must not be "
         "divided by the root of d_K: q and k are unit vectors"),
        (relevance_with(q, k, r, w), "w and r were swapped"),
        (relevance_with(q, k, w, r, d=lambda d: torch.where(d == 0, 1, d)), "a query sees its own "
         "key: d = 0 is in the window"),
        (q @ k.mT * m, "Trim is missing: alpha is Trim of s"),
        (m, "Trim is missing: alpha is Trim of s"),
        (every + m, "Trim and Softmask are multiplied, not added"),
        *((q @ k.mT * (every > 0) * x, "a similarity that passes is also rescaled: alpha is Trim "
           "of s") for x in (m, m > 0)),
        (ms.trim(q @ k.mT * m, r[:, None, None]), "Trim takes s alone: Softmask multiplies alpha"),
        (every * m.square(), "Softmask is squared: multiply by it once"),
        (every.square() * m, "squared once too often: Trim has the square"),
        (relevance_with(q, k, w, r, d=lambda d: -d.abs()), "a later key must get 0: this sees the "
         "future"),
        (ms.relevance(q, k, w, r, 1), "the first query is at i0: add nothing"),
        (ms.relevance(q, k.sum(0, True).expand_as(k), w, r), "the sequences were added up"),
        (ms.relevance(q, k, w, r).softmax(-1), "this is a softmax: nothing may compete"),
        (ms.relevance(q, k, w[:1].expand_as(w), r), "each tile has a window of its own: "
         "w[:, None, None]"),
        (ms.relevance(q, k, w, r[:1].expand_as(r)), "each tile has a width of its own: "
         "r[:, None, None]"),
        (ms.relevance(q, k, w.flip(0), r), "the windows are those of other tiles")]


def test_relevance():
    # Three directions 60 degrees apart: s is 1, 1/2 or -1/2. r = 1, and an infinite window.
    a = torch.tensor([[1.0, 0.0], [0.5, math.sqrt(3) / 2], [-0.5, math.sqrt(3) / 2]])
    q, k = a[[0, 1, 2]].view(1, 1, 3, 2), a[[1, 0, 0]].view(1, 1, 3, 2)
    infinite, one = torch.tensor([INF]), torch.tensor([1.0])
    expect(mine.relevance(q, k, infinite, one), [[[[0.25, 0, 0], [1, 0.25, 0], [0.25, 0, 0]]]],
           "the relevance of three keys, s = 1/2, 1 or -1/2, for three queries",
           [(torch.tensor([[0.25, 0, 0], [1, 0.25, 0], [0.25, 0, 0]]).T[None, None],
             "queries and keys were swapped: a row is a query, a column is a key"),
            (ms.relevance(k, q, infinite, one), "queries and keys were swapped: q goes first"),
            ([[[[1, 0, 0], [0.8, 0.2, 0], [1, 0, 0]]]],
             "the relevances of a query sum to 1: nothing may compete, so divide by nothing"),
            *wrong_relevances(q, k, infinite, one)])

    q, k, _ = correlated(0, 2, 3, 9, 9)
    w, r = torch.tensor([4.0, 2.5, INF]).double(), torch.tensor([0.5, 0.9, 0.3]).double()
    exact = ms.relevance(q, k, w, r)
    found = mine.relevance(q, k, w, r)
    expect(found, exact, "the relevance of 9 queries and 9 keys in each of 2 x 3 tiles,",
           [(relevance_with(q.float(), k.float(), w, r), "cut to float32 on the way: keep float64"),
            *wrong_relevances(q, k, w, r)], tolerance=1e-9)
    expect_gradients(mine.relevance, ms.relevance, [q, k, w, r], "q k w r", [
        (lambda q, k, w, r: ms.relevance(ms.unit(q), ms.unit(k), w, r), "q and k have unit length "
         "already: only multiply them")])
    changed = k.clone()
    changed[:, :, 3] = q[:, :, 5]
    others = [j for j in range(9) if j != 3]
    check(torch.equal(mine.relevance(q, changed, w, r)[..., others], found[..., others]),
          "one key changed, and the relevance of another with it: keys must not compete")

    q, k, _ = correlated(1, 1, 3, 4, 9)
    expect(mine.relevance(q, k, w, r, 3), ms.relevance(q, k, w, r, 3),
           "the relevance of 4 queries at positions 3 to 6 (i0 = 3), among 9 keys,",
           [(ms.relevance(q, k, w, r), "i0 is not used: the first query stands at i0, not at 0"),
            (ms.relevance(q, k, w, r, 5), "i0 is taken to be S - T: keys may come after the last "
             "query, too"),
            (ms.relevance(q, k, w, r, 3).tril(), "torch.tril does not know i0: let Softmask hide "
             "the future"),
            (ms.relevance(q, k, w, r, -3), "i0 has the wrong sign")])

    q, k, _ = correlated(2, 1, 1, 300, 300, dtype=torch.bfloat16)
    found = mine.relevance(q, k, torch.tensor([64.0]), one)
    check((found.triu(1) == 0).all(), "positions in bfloat16 see the future: above 256 "
          "bfloat16 has only every second integer. Count positions in integers, whatever the dtype "
          "of q")


def test_screen():
    # Two keys, both equal to both queries, and values (1, 0) and (0, 1); at distance 1, m = 1/2.
    q = torch.tensor([1.0, 0.0]).expand(1, 1, 2, 2)
    v, half = torch.eye(2).view(1, 1, 2, 2), torch.tensor([0.5])
    w = torch.tensor([2.0])
    expect(mine.screen(q, q, v, w, half), [[[[1, 0], [0.5, 1]]]],
           "h of two equal keys with values (1, 0) and (0, 1), w = 2,",
           [([[[[1, 0], [1 / 3, 2 / 3]]]], "the weights were divided by their sum: nothing may "
             "compete, and the sum may be 0 or above 1"),
            (ms.tanh_norm(torch.tensor([[[[1, 0], [0.5, 1]]]])),
             "TanhNorm comes later, in Eq. 14: return the plain sum"),
            ([[[[1, 0], [0.25, 1]]]], "alpha^d is squared once too often: Trim squares it already"),
            *(([[x]], "the mean over the keys: Eq. 12 is their sum")
              for x in ([[0.5, 0], [0.25, 0.5]], [[1, 0], [0.25, 0.5]])),
            ([[[[1, 0], [1, 1]]]], "alpha^d is the weight of a value: do not round it to 0 or 1"),
            (torch.eye(2).view(1, 1, 2, 2), "alpha^d @ v is a matrix product, not *"),
            (torch.tensor([[[[1, 0], [0.5, 1]]]]).softmax(-1), "this is a softmax: nothing may "
             "compete"),
            (ms.unit(torch.tensor([[[[1, 0], [0.5, 1]]]])), "h has no fixed length: return the "
             "plain sum"),
            ([[[[1, 0.5], [0, 1]]]], "alpha^d is transposed: a row is a query"),
            (ms.screen(q, q, q, w, half), "the values are v, not the keys"),
            (ms.screen(q, q, v, half, w), "w and r were swapped"),
            (ms.screen(q, q, v, w, half, 1), "the first query is at i0: add nothing")])
    q, k, v = correlated(3, 2, 2, 7, 10)
    w, r = torch.tensor([4.0, INF]).double(), torch.tensor([0.4, 0.9]).double()
    exact = ms.screen(q, k, v, w, r, 2)
    dtype = mine.screen(q, k, v, w, r, 2).dtype
    check(dtype == torch.float64, f"for q, k and v in float64 h is {dtype}: .float() cuts it. "
          "Compute in torch.promote_types(q.dtype, torch.float32), and return v's dtype")
    total = ms.relevance(q, k, w, r, 2).sum(-1, keepdim=True)
    expect(mine.screen(q, k, v, w, r, 2), exact, "h of 7 queries and 10 keys, i0 = 2,",
           [(ms.screen(q, k, v, w, r), "i0 is not passed on to `relevance`"),
            (ms.screen(q, k, v, w, r, 4), "i0 is doubled: pass it on as it is"),
            (ms.screen(q, k, v, w, r, 3), "i0 is taken to be S - T: keys may come after the last "
             "query, too"),
            (ms.screen(q, k[:, :, :7], v[:, :, :7], w, r, 2), "keys from T on are left out: there "
             "are S of them"),
            (exact / total, "the weights were divided by their sum: nothing may compete")])
    expect_gradients(lambda *x: mine.screen(*x, 2), lambda *x: ms.screen(*x, 2), [q, k, v, w, r],
                     "q k v w r", [(lambda q, k, v, w, r: ms.screen(q, k, ms.unit(v), w, r, 2),
                                    "v has unit length already: only multiply it")], 1e-8)

    q, k, v = correlated(5, 1, 1, 40, 40, dtype=torch.bfloat16)
    w, r = torch.tensor([INF]), torch.tensor([0.1])
    try:
        h = mine.screen(q, k, v, w, r)
    except RuntimeError as e:
        raise Wrong(f"with q, k and v in bfloat16: {e}. Convert bfloat16 to float32 "
                    "first") from None
    check(h.dtype == torch.bfloat16, f"values in bfloat16 give h in {h.dtype}: return v's dtype")
    exact = ms.screen(*(x.double() for x in (q, k, v, w, r)))
    off = (h - exact).abs().max() / exact.abs().max()
    check(off < 0.01, f"with bfloat16 inputs h is off by {off.item():.0%}: an error in s is "
          "amplified by 2/r in alpha. Convert bfloat16 to float32 before the products")

    mixed = mine.screen(q.float(), k.float(), v, w, r)
    check(mixed.dtype == torch.bfloat16,
          f"q and k in float32 and values in bfloat16 give h in {mixed.dtype}: return v's dtype")

    q, k, v = correlated(5, 1, 1, 40, 40, dtype=torch.float32)
    exact = ms.screen(*(x.double() for x in (q, k, v, w, r)))
    off = (mine.screen(q, k, v, w, r) - exact).abs().max() / exact.abs().max()
    check(off < 1e-3, f"with q, k and v in float32 h is off by {off.item():.1%}: is something "
          "rounded to bfloat16 on the way?")

    # Two keys with relevances 1 and 0.999, and values 1 and -1.
    one, keys, values = torch.ones(1), torch.tensor([1, 0.9995]), torch.tensor([1, -1]).bfloat16()
    h = mine.screen(one.view(1, 1, 1, 1), *(x.view(1, 1, 2, 1) for x in (keys, values)), w, one, 1)
    expect(h, [[[[0.001]]]], "h of two keys that nearly cancel, their values in bfloat16,",
           [([[[[0]]]], "alpha^d is rounded to bfloat16 before its product with v: convert v "
             "to float32 instead")])


def tanh_norm_along(x, axis):
    """A wrong TanhNorm, over another axis than the last."""
    return ms.tanh_norm(x.transpose(axis, -1)).transpose(axis, -1)


def test_tanh_norm():
    x = torch.tensor([[3.0, 4.0], [0.3, 0.4]])
    length = x.norm(dim=-1, keepdim=True)
    right = x / length * torch.tanh(length)
    rms = length / 2**0.5
    expect(mine.tanh_norm(x), right, "tanh_norm([[3, 4], [0.3, 0.4]])",
           [*((wrong, "tanh of each number changes the direction: take it of the length")
              for wrong in (torch.tanh(x), torch.tanh(x) / length, torch.tanh(x / length))),
            (x * torch.tanh(x.norm(dim=-1, keepdim=True)), "not divided by the length |x|"),
            (x * length * torch.tanh(length), "multiplied by the length: divide by it"),
            (x * torch.tanh(length) / length.clamp_min(1), "the length in the denominator is "
             "clipped at 1: short vectors have one, too"),
            (x / x.norm(dim=-1, keepdim=True), "the length is always 1: tanh|x| is missing"),
            (x / x.norm() * torch.tanh(x.norm()), "one length for all: each vector has its own"),
            (x * torch.tanh(x.norm(dim=-1)) / x.norm(dim=-1), "keepdim=True is missing: a row's "
             "length acts on a column"),
            (x / length * torch.tanh(length) ** 2, "tanh is squared: multiply by it once"),
            (x / length**2 * torch.tanh(length), "divided by the squared length"),
            (x / length * torch.atan(length), "the length is tanh|x|, not the arc tangent"),
            (x / length.clamp_min(1), "the length is clipped at 1: it is tanh|x| for short x, too"),
            (x / length * torch.tanh(length**2), "tanh of the squared length: a root is missing"),
            (x / rms * torch.tanh(rms), "the length is the root of the sum of squares, not of "
             "their mean"),
            (x / length * torch.sigmoid(length), "the length is tanh|x|, not a sigmoid"),
            (x / (1 + length), "the length is tanh|x|, not |x|/(1 + |x|)")])
    x = torch.randn(2, 3, 4, 5, generator=random(7), dtype=torch.float64)
    axes = [(tanh_norm_along(x, n), f"the length is taken along axis {n}: take the last")
            for n in range(3)]
    axes.append((ms.tanh_norm(x.flatten(1)).view_as(x), "the vectors of a sequence share one "
                 "length: each has its own"))
    expect(mine.tanh_norm(x), ms.tanh_norm(x), "tanh_norm of random vectors (2, 3, 4, 5)", axes)
    length = x.norm(dim=-1, keepdim=True)
    expect_gradients(mine.tanh_norm, ms.tanh_norm, [x], "x", [
        (lambda x: x * torch.tanh(length) / length, "the length is detached: it changes with x, "
         "too")])
    zero = torch.zeros(4, dtype=torch.float64)
    check((mine.tanh_norm(zero) == 0).all(), "tanh_norm(0) is not 0. Is it 0/0? For |x| < eps "
          "return x")
    J = torch.autograd.functional.jacobian(mine.tanh_norm, zero)
    check(not J.isnan().any(), "TanhNorm's Jacobian at 0 is NaN: the slope of the root of 0 is "
          "infinite, and torch.where does not stop it. Put a 1 in place of small squares first")
    check(J.abs().max() > 1e-3, "TanhNorm's Jacobian at 0 is 0, not the identity: where is the "
          "clamp? The numerator and the denominator must use the same length")
    expect(J, torch.eye(4), "TanhNorm's Jacobian at 0")
    for size in (1e-30, 1e-8, 1e-6, 1e-3, 0.01, 1.0, 1e4):
        x = torch.randn(3, 16, generator=random(6)) * size
        expect(mine.tanh_norm(x) / min(size, 1), ms.tanh_norm(x) / min(size, 1),
               f"tanh_norm of vectors of size {size:g}{', divided by it' * (size < 1)},")
        slope, = gradient(mine.tanh_norm, x)
        check(slope.isfinite().all(), f"TanhNorm's gradient is not finite at |x| = {size:g}")
