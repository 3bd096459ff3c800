"""Part 4: each kernel against part 1, with odd lengths, all of them different."""
import math
import os

import pytest
import torch

pytest.importorskip("triton", reason="part 4 needs triton, which runs only on Linux")
if os.environ["TRITON_INTERPRET"] != "1":
    pytest.skip("part 4 runs in Triton's interpreter: unset TRITON_INTERPRET",
                allow_module_level=True)

from course.exercises import launch  # noqa: E402
from course.exercises.adapters import earlier, mine  # noqa: E402
from course.exercises.bounds import wrong_bounds  # noqa: E402
from course.exercises.checks import Wrong, check, correlated, expect, gradient, random  # noqa: E402

INF = math.inf
BI, BJ = launch.BI, launch.BJ

# T, S, i0, w: a last block of one query; first keys at an edge; blocks that see no key; w = inf.
CASES = [(BI + 1, 47, 0, 1.4), (50, 79, 20, 22.0), (37, 95, 23, 24.25), (90, 41, 5, 6.0),
         (45, 61, 11, INF)]


def inputs(T, S, w, r=0.25):
    """q (T, K), k (S, K), v (S, V), w, r in float32, one tile; K = 64, V = 128, or the other way.

    Every fifth key points away from the queries.
    """
    K, V = (64, 128) if T < 50 else (128, 64)
    q, k, v = (x[0, 0] for x in correlated(0, 1, 1, T, S, K, V, dtype=torch.float32))
    k[1::5] *= -1
    return q, k, v, torch.tensor([w]), torch.tensor([r])


def named(T, S, i0, w):
    return f"of {T} queries and {S} keys, i0 = {i0}, w = {float(w):g}"


def test_similarity_kernel():
    for T, S in ((45, 21), (50, BI + 1)):
        q, k, *_ = inputs(T, S, INF)
        s = launch.similarities(mine.similarity_kernel, q, k)
        swapped = torch.zeros(T, S)
        swapped[:S, :T] = (k @ q.T)[:T, :S]
        expect(s, q @ k.T, f"s of {T} queries and {S} keys",
               [((q @ k.T)[:BI].repeat(3, 1)[:T], "each program takes the first block of queries: "
                 "use program_id(0) * BI"),
                (q @ k.T / q.shape[1] ** 0.5, "s must not be divided by the root of d_K"),
                (swapped, "queries and keys were swapped: a row is a query")])


def softmask(i, j, w):
    """m of queries at positions i and keys at j."""
    d = j - i[:, None]
    return torch.where((d <= 0) & (d > -w), torch.cos(math.pi / 2 * d / w) ** 2, 0.0)


def trim_and_softmask(q, k, w, r, i0):
    """z of Trim, m of Softmask, and d = j - i. (T, S) each."""
    i, j = i0 + torch.arange(len(q)), torch.arange(len(k))
    return (1 - (1 - q @ k.T) / r).relu(), softmask(i, j, w), j - i[:, None]


def wrong_masks(q, k, w, i0):
    """(m, its cause): Softmask with one mistake each."""
    t, j = torch.arange(len(q)), torch.arange(len(k))
    d = j - i0 - t[:, None]
    inside, angle = (d <= 0) & (d > -w), math.pi * d / w
    wave = 0.5 * (torch.cos(angle) + 1)
    future = "a later key must get 0: this kernel sees the future"
    return [
        (softmask(t, j, w), "i0 is ignored in d: query t is at position i0 + t"),
        (softmask(t - i0, j, w), "the sign of i0: query t is at position i0 + t"),
        (softmask(i0 + t % BI, j, w), "the positions of the queries lack t0 = program_id(0) * BI"),
        (softmask(i0 + t, j % BJ, w), "the positions of the keys lack j0, their block's first"),
        (softmask(i0 + t - 1, j, w), "positions are off by one: query t is at i0 + t, key j at j"),
        (softmask(i0 + t + 1, j, w), "positions are off by one: query t is at i0 + t, key j at j"),
        (wave * (d > -w), future), (wave * (d.abs() < w), future),
        (wave * (d < w) * (d >= 0), "the sign of d: it is j - i, negative in the past"),
        (wave * (d <= 0), "beyond the window m must be 0: the cosine rises again"),
        (wave, "there is no mask: outside -w < d <= 0 m is 0"),
        (wave * inside * (d < 0), "a query sees its own key: d = 0 is in the window"),
        ((wave * inside) ** 2, "Softmask is squared: alpha_d = z^2 m, and dz = 2 z m (dh . v)"),
        (0.5 * (torch.cos(angle / 2) + 1) * inside, "the angle is pi d/w in (cos + 1)/2: "
         "halve it only in cos^2(pi d/(2 w))"),
        (1.0 * inside, "the window is hard: Softmask falls from 1 to 0 as a cosine"),
        (1.0 * (d <= 0), "the window is ignored: Softmask is missing"),
        (torch.ones_like(wave), "Softmask is missing: each key counts, later ones too"),
        (torch.cos(angle) * inside, "Softmask is (cos(pi d/w) + 1)/2, not the cosine"),
        ((0.5 * torch.cos(angle) + 1) * inside, "brackets: 0.5 * (cos(..) + 1)"),
        (torch.cos(angle / 2) * inside, "Softmask is cos^2(pi d/(2 w)): one factor c is missing"),
        (0.5 * (torch.cos(angle / math.pi) + 1) * inside, "pi is missing in Softmask"),
        (0.5 * (torch.cos(angle / math.pi * 3.14) + 1) * inside, "3.14 is cut short: take math.pi"),
        (0.5 * (torch.cos(2 * angle) + 1) * inside, "the angle of Softmask is twice as "
         "large as it should be: cos(pi d/w), or cos^2(pi d/(2 w))"),
        (softmask(i0 + t, j, w.trunc()), "w is a real number: it was rounded"),
        (softmask(i0 + t, j, w + 1), "the window is w, not w + 1")]


def wrong_relevances(q, k, w, r, i0):
    """(alpha_d, its cause): Eqs. 9 to 11 with one mistake each."""
    z, m, _ = trim_and_softmask(q, k, w, r, i0)
    s = q @ k.T
    return [
        *((z**2 * wrong, cause) for wrong, cause in wrong_masks(q, k, w, i0)),
        (2 * z**2 * m, "twice the right value: the half of (cos + 1)/2 is missing, "
         "or there is a 2 too many"),
        (z * m, "the square of Trim is missing"),
        (z * m.sqrt(), "this is z c: alpha_d is its square, z^2 m"),
        (z**3 * m, "one factor z too many: alpha_d = z^2 m"),
        (m, "Trim is missing: alpha_d = z^2 m"),
        ((1 - (1 - s) * r).relu() ** 2 * m, "1 - s must be divided by r, not multiplied by it"),
        ((1 - (1 - s) / r) ** 2 * m, "the max of Trim is missing: z is at least 0"),
        ((1 - (1 - s) / r).clamp(max=0) ** 2 * m, "z is the larger of the two, tl.maximum"),
        ((1 - (1 - s.abs()) / r).relu() ** 2 * m, "|s| was taken: opposites are not similar"),
        (s.relu() ** 2 * m, "r is ignored: z = max(1 - (1 - s)/r, 0)"),
        ((1 - s / r).relu() ** 2 * m, "Trim compares 1 - s with r, not s"),
        ((1 - (1 - s) / r**2).relu() ** 2 * m, "divided by r twice"),
        ((1 - (1 - s) / w).relu() ** 2 * trim_and_softmask(q, k, r, w, i0)[1],
         "w and r were swapped"),
        ((s - r).relu() ** 2 * m, "r is not a threshold for s: z = max(1 - (1 - s)/r, 0)"),
        (s * m, "Trim is missing: z = max(1 - (1 - s)/r, 0)")]


def test_relevance_kernel():
    relevance = earlier("relevance")
    for T, S, i0, w in [*CASES, (18, 40, 22, 1.0)]:
        q, k, _, w, r = inputs(T, S, w)
        found = launch.relevances(mine.relevance_kernel, q, k, w, r, i0)
        right = relevance(q[None, None], k[None, None], w, r, i0)[0, 0]
        expect(found, right, f"alpha_d {named(T, S, i0, w)}",
               wrong_relevances(q, k, w, r, i0))
        outside = trim_and_softmask(q, k, w, r, i0)[1] == 0
        check((found[outside] == 0).all(), "a key at distance w or more, and a later one, must get "
              "exactly 0: test d, since a cosine is only nearly 0")


# ------------------------------------------------------------------------ which blocks are visited

def between(first, end):
    """The blocks that hold keys first .. end - 1."""
    return set(range(max(first, 0) // BJ, -(-end // BJ))) if first < end else set()


def there_are(S):
    """The blocks that exist for S keys. A load beyond them has no rows."""
    return set(range(-(-S // BJ)))


def right_blocks(T, S, i0, w, n):
    """The blocks of keys that block n of the queries sees."""
    queries = range(i0 + n * BI, i0 + min((n + 1) * BI, T))
    return {j // BJ for j in range(S) if any(0 <= i - j < w for i in queries)}


def wrong_blocks(T, S, i0, w, n):
    """{cause: the blocks of keys} for block n of the queries, with one mistake each."""
    i, full = i0 + n * BI, i0 + (n + 1) * BI
    last = min(full, i0 + T) - 1
    causes = wrong_bounds(i, last, full, w, T, S, i0)
    first, end = max(i - math.ceil(min(w, 2**30)) + 1, 0), min(last + 1, S)
    causes["lo is rounded up: round it down to a multiple of BJ"] = -(-first // BJ) * BJ, end
    for t0, cause in ((0, "each program takes the first block: t0 = program_id(0) * BI"),
                      (n * BJ, "t0 = program_id(0) * BI: a block has BI queries, and BJ keys")):
        causes[cause] = first - n * BI + t0, min(i0 + min(t0 + BI, T), S)
    causes["the step of the loop is BJ: range(lo, hi, BJ)"] = first // BJ * BJ, end + BJ - 1
    found = {cause: between(*keys) for cause, keys in causes.items()}
    found["the step of the loop is BJ, not BI"] = {*sorted(between(first, end))[:: BI // BJ]}
    return found


def check_blocks(visited):
    """visited: {(T, S, i0, w): for each block of queries, the blocks of keys it visits}."""
    wrong = [(case, n) for case, found in visited.items() for n, blocks in enumerate(found)
             if blocks != right_blocks(*case, n)]
    if not wrong:
        return
    case, n = wrong[0]
    T, S, i0, w = case
    causes = [cause for cause in wrong_blocks(*case, n)
              if all(blocks in (these := wrong_blocks(*case, n)[cause], these & there_are(case[1]))
                     for case, found in visited.items() for n, blocks in enumerate(found))]
    if not any(right_blocks(*case, n) for case, n in wrong):
        causes = ["where nothing is seen, lo = hi and nothing is visited"]
    raise Wrong("\n".join([*causes[:3], (
        f"block {n} {named(*case)}, has positions {i0 + n * BI} to "
        f"{i0 + min((n + 1) * BI, T) - 1}. It sees {keys(right_blocks(*case, n))}, and visits "
        f"{keys(visited[case][n])}")]))


def keys(blocks):
    """Blocks of keys in words."""
    if not blocks:
        return "no keys"
    return "keys " + ", ".join(f"{b * BJ} to {b * BJ + BJ - 1}" for b in sorted(blocks))


def test_bounds_kernel():
    cases = [*CASES, (64, 64, 0, INF), (64, 64, 0, 1.0), (64, 64, 0, 17.25), (33, 33, 0, 9.0),
             (40, 20, 0, 9.0), (40, 20, 1, INF), (32, 100, 68, 16.0), (32, 100, 68, 300.0),
             (32, 20, 2**21, INF)]
    visited = {}
    for T, S, i0, w in cases:
        found = launch.bounds(mine.bounds_kernel, T, S, torch.tensor([w]), i0).tolist()
        for lo, hi in found:
            where = f"{named(T, S, i0, w)}: lo = {lo}, hi = {hi}"
            check(lo <= hi or lo >= S, "lo comes after hi: were they swapped, or does one count "
                  f"blocks? {where}")
            check(lo >= 0 and lo % BJ == 0,
                  f"lo must be a multiple of BJ = {BJ}, and not negative: {where}")
        visited[T, S, i0, w] = [between(lo, hi) for lo, hi in found]
    check_blocks(visited)


# ------------------------------------------------------------------------------- whole kernels

def loads_of(results):
    """{case: for each block of queries, the blocks of keys it loads}, from (result, loads)."""
    return {case: [{row // BJ for row in loads["K_", n]} for n in range(-(-case[0] // BI))]
            for case, (_, loads) in results.items()}


def of_seen_blocks(T, S, i0, w):
    """(T, S) twice: is a key in a block that must be visited, and in the last of these?"""
    seen, last = torch.zeros(T, S), torch.zeros(T, S)
    for t in range(T):
        blocks = sorted(right_blocks(T, S, i0, w, t // BI))
        for b in blocks:
            seen[t, b * BJ : (b + 1) * BJ] = 1
            last[t, b * BJ : (b + 1) * BJ] = b == blocks[-1]
    return seen, last


def test_forward_kernel():
    screen = earlier("screen")
    results = {case: launch.forward(mine.forward_kernel, *inputs(*case[:2], case[3]), case[2])
               for case in CASES}
    check_blocks(loads_of(results))
    for (T, S, i0, w), (h, _) in results.items():
        q, k, v, w, r = inputs(T, S, w)
        right = screen(q[None, None], k[None, None], v[None, None], w, r, i0)[0, 0]
        z, m, _ = trim_and_softmask(q, k, w, r, i0)
        alpha_d = z * z * m
        seen, last = of_seen_blocks(T, S, i0, w)
        expect(h, right, f"h {named(T, S, i0, w)}",
               [*((alpha * seen @ v, cause)
                  for alpha, cause in wrong_relevances(q, k, w, r, i0)),
                (alpha_d * last @ v, "only the last block counts: add up, h += .."),
                (right + 1, "h must begin at 0: start from tl.zeros"),
                (right / S, "the mean over the keys: Eq. 12 is their sum"),
                ((1 - (1 - q[:BI].repeat(3, 1)[:T] @ k.T) / r).relu() ** 2 * m @ v,
                 "each block takes the rows of q of the first: t0 = program_id(0) * BI"),
                (alpha_d[:, :T] @ v[:T], "keys from T on are left out: there are S of them"),
                (alpha_d / alpha_d.sum(1, keepdim=True).clamp_min(1e-9) @ v,
                 "relevances must not compete: nothing is divided by their sum"),
                (right / right.norm(dim=1, keepdim=True).clamp_min(1e-9) * right.norm(
                    dim=1, keepdim=True).tanh(), "TanhNorm comes later: this kernel returns h")])


def wrong_slopes(q, k, w, r, i0):
    """(dz / (dh . v), its cause): 2 z m with one mistake each."""
    z, m, _ = trim_and_softmask(q, k, w, r, i0)
    return [
        *((2 * z * wrong, cause) for wrong, cause in wrong_masks(q, k, w, i0)),
        (z * m, "the 2 of the square's derivative is missing"),
        (4 * z * m, "a 2 too many: (z^2)' = 2 z"),
        (-2 * z * m, "the sign: z grows with s"),
        (2 * z * z * m, "one factor z too many: (z^2)' = 2 z"),
        (z * z * m, "this is alpha_d (dh . v): dz is 2 z m (dh . v)"),
        (2 * m, "the factor z is missing: (z^2)' = 2 z"),
        (2 * (z > 0) * m, "the factor z is missing: (z^2)' = 2 z"),
        ((z > 0) * m, "the factor 2 z is missing: (z^2)' = 2 z"),
        (2 * (1 - (1 - q @ k.T) / r) * m, "the max of Trim is missing: z is at least 0")]


def test_dq_kernel():
    screen = earlier("screen")
    results, dh_of = {}, {}
    for T, S, i0, w in CASES:
        q, k, v, *widths = inputs(T, S, w)
        dh = dh_of[T] = torch.randn(T, v.shape[1], generator=random(1))
        results[T, S, i0, w] = launch.dq(mine.dq_kernel, q, k, v, *widths, dh, i0)
    check_blocks(loads_of(results))
    for (T, S, i0, w), (dq, _) in results.items():
        q, k, v, w, r = inputs(T, S, w)
        dh = dh_of[T]

        def h(q, k=k, v=v, w=w, r=r, i0=i0):
            return screen(q[None, None], k[None, None], v[None, None], w, r, i0)[0, 0]

        right, = gradient(h, q, dh=dh)
        z, m, _ = trim_and_softmask(q, k, w, r, i0)
        seen, last = of_seen_blocks(T, S, i0, w)
        dy, right_dz = dh @ v.T, 2 * z * m * (dh @ v.T)
        expect(dq, right, f"dq {named(T, S, i0, w)}",
               [*((slope * seen * dy @ k / r, cause)
                  for slope, cause in wrong_slopes(q, k, w, r, i0)),
                (right_dz * last @ k / r, "only the last block counts: add up, dq += .."),
                (right_dz[:, :T] @ k[:T] / r, "keys from T on are left out: there are S of them"),
                (2 * z * m * (dh[:BI].repeat(3, 1)[:T] @ v.T) @ k / r,
                 "each block takes the first block's rows of dh: t0 = program_id(0) * BI"),
                (2 * z * m @ k / r, "dh . v is missing: dz = 2 z m (dh . v)"),
                (right * r, "1/r is missing: dz/ds = 1/r"),
                (right * r * r, "divide by r, dz/ds = 1/r; this multiplies"),
                (right * r / w, "divided by w: dz/ds = 1/r"),
                (right / r, "divided by r twice: dz/ds = 1/r")])
