"""Part 4: each kernel against part 1, with odd lengths, all of them different."""
import math
import os

import pytest
import torch

pytest.importorskip("triton", reason="part 4 needs triton, which is made for Linux")
if os.environ["TRITON_INTERPRET"] != "1":
    pytest.skip("part 4 runs in Triton's interpreter: unset TRITON_INTERPRET",
                allow_module_level=True)

from exercises import launch  # noqa: E402
from exercises.adapters import earlier, mine  # noqa: E402
from exercises.checks import Wrong, check, correlated, expect, gradient, random  # noqa: E402

INF = math.inf
BI, BJ = launch.BI, launch.BJ

# T, S, i0, w: a last block of one query; keys before the first query; blocks that see no key.
CASES = [(BI + 1, BI + 1, 0, 1.9), (50, 79, 20, 17.0), (37, 60, 23, 24.5), (90, 41, 5, 9.0),
         (45, 61, 11, INF)]


def inputs(T, S, w, r=0.25):
    """q (T, 64), k (S, 64), v (S, 128), w, r in float32, one tile."""
    q, k, v = (x[0, 0] for x in correlated(0, 1, 1, T, S, 64, 128, dtype=torch.float32))
    return q, k, v, torch.tensor([w]), torch.tensor([r])


def named(T, S, i0, w):
    return f"of {T} queries and {S} keys, i0 = {i0}, w = {w}"


def test_similarity_kernel():
    for T, S in ((BI, BJ), (45, 21), (BI + 1, 50)):
        q, k, *_ = inputs(T, S, INF)
        s = launch.similarities(mine.similarity_kernel, q, k)
        repeated = (q @ k.T)[:BI].repeat(3, 1)[:T]
        expect(s, q @ k.T, f"s of {T} queries and {S} keys",
               [(repeated, "each block of queries is the first: use program_id(0) * BI")])


def trim_and_softmask(q, k, w, r, i0):
    """z of Trim, m of Softmask, and d = j - i. (T, S) each."""
    d = torch.arange(len(k)) - (i0 + torch.arange(len(q)))[:, None]
    m = torch.where((d <= 0) & (d > -w), torch.cos(math.pi / 2 * d / w) ** 2, 0.0)
    return (1 - (1 - q @ k.T) / r).relu(), m, d


def wrong_relevances(q, k, w, r, i0):
    """(alpha_d, what it comes from): Eqs. 9 to 11 with one mistake each."""
    z, m, d = trim_and_softmask(q, k, w, r, i0)
    angle, inside, s = math.pi * d / w, m > 0, q @ k.T
    wave = 0.5 * (torch.cos(angle) + 1)
    m_at_0 = trim_and_softmask(q, k, w, r, 0)[1]
    future = "a later key must get 0: this kernel sees the future"
    return [
        (z**2 * m_at_0, "i0 does not act in d: query t is at position i0 + t"),
        (z**2 * wave * (d > -w), future), (z**2 * wave * (d.abs() < w), future),
        (z**2 * wave * (d < w) * (d >= 0), "the sign of d: it is j - i, negative in the past"),
        (z**2 * wave * (d <= 0), "beyond the window m is 0: the cosine comes back"),
        (z**2 * inside, "the window is hard: Softmask falls from 1 to 0 as a cosine"),
        (z**2 * (d <= 0), "the window does not act: Softmask is missing"),
        (z**2, "Softmask is missing: each key counts, later ones too"),
        (z**2 * torch.cos(angle) * inside, "Softmask is (cos(pi d/w) + 1)/2, not the cosine"),
        (z**2 * torch.cos(angle / 2) * inside, "Softmask is cos^2(pi d/(2 w)): the square of the "
         "cosine is missing"),
        (2 * z**2 * m, "Softmask is 1 at d = 0: the half of (cos + 1)/2 is missing"),
        (z**2 * 0.5 * (torch.cos(angle / math.pi) + 1) * inside, "pi is missing in Softmask"),
        (z**2 * 0.5 * (torch.cos(2 * angle) + 1) * inside, "the angle of Softmask is twice too "
         "large: cos(pi d/w), or cos^2(pi d/(2 w))"),
        (z * m, "the square of Trim is missing"),
        ((1 - (1 - s) * r).relu() ** 2 * m, "1 - s must be divided by r, not multiplied by it"),
        ((1 - (1 - s) / r) ** 2 * m, "the max of Trim is missing: z is at least 0"),
        (s.relu() ** 2 * m, "r does not act: z = max(1 - (1 - s)/r, 0)"),
        ((s - r).relu() ** 2 * m, "r is no threshold for s: z = max(1 - (1 - s)/r, 0)"),
        (s * m, "Trim is missing: z = max(1 - (1 - s)/r, 0)")]


def test_relevance_kernel():
    relevance = earlier("relevance")
    for T, S, i0, w in [*CASES, (18, 40, 22, 1.0)]:
        q, k, _, w, r = inputs(T, S, w)
        found = launch.relevances(mine.relevance_kernel, q, k, w, r, i0)
        right = relevance(q[None, None], k[None, None], w, r, i0)[0, 0]
        expect(found, right, f"alpha_d {named(T, S, i0, w.item())}",
               wrong_relevances(q, k, w, r, i0))
        outside = trim_and_softmask(q, k, w, r, i0)[1] == 0
        check((found[outside] == 0).all(), "a key at distance w or more, and a later one, must get "
              "exactly 0: ask for d, a cosine is only nearly 0")


# ------------------------------------------------------------------------ which blocks are visited

def between(first, end):
    """The blocks of the keys first .. end - 1."""
    return set(range(max(first, 0) // BJ, -(-end // BJ))) if first < end else set()


def right_blocks(T, S, i0, w, n):
    """The blocks of keys that block n of the queries sees."""
    queries = range(i0 + n * BI, i0 + min((n + 1) * BI, T))
    return {j // BJ for j in range(S) if any(0 <= i - j < w for i in queries)}


def wrong_bounds(T, S, i0, w, n):
    """{what it comes from: (first key, end)} of block n, with one mistake each."""
    w = min(w, 2**30)
    i, last = i0 + n * BI, i0 + min((n + 1) * BI, T) - 1
    first, end = i - math.ceil(w) + 1, min(S, last + 1)
    return {
        "hi is one more than the position of the last query": (first, min(S, last)),
        "w is rounded down: the farthest key is at distance ceil(w) - 1":
            (i - math.floor(w) + 1, end),
        "the farthest key is at distance ceil(w) - 1, one more than these": (first + 1, end),
        "the farthest key is at distance ceil(w) - 1, one less than these": (first - 1, end),
        "lo comes from the block's last query: the first one sees farther back":
            (last - math.ceil(w) + 1, end),
        "hi comes from the block's first query: the last one sees later keys":
            (first, min(S, i + 1)),
        "i0 does not act: query t is at position i0 + t": (first - i0, min(S, last - i0 + 1)),
        "i0 does not act in lo: query t is at position i0 + t": (first - i0, end),
        "i0 does not act in hi: query t is at position i0 + t": (first, min(S, last - i0 + 1)),
        "keys are cut at T: there are S of them": (first, min(T, last + 1)),
        "hi is past the last key: it is at most S": (first, last + 1),
        "the last query of the last block is T - 1": (first, min(S, i + BI)),
        "hi is S: blocks of later keys are visited": (first, S),
        "lo is 0: blocks before the window are visited": (0, end),
        "all blocks of keys are visited": (0, S),
        "the window acts in whole blocks only: lo is i - ceil(w) + 1, rounded down":
            (i // BJ * BJ, end)}


def check_blocks(visited):
    """visited: {(T, S, i0, w): for each block of queries the blocks of keys that it visits}."""
    wrong = [(case, n) for case, found in visited.items() for n, blocks in enumerate(found)
             if blocks != right_blocks(*case, n)]
    if not wrong:
        return
    case, n = wrong[0]
    T, S, i0, w = case
    causes = [cause for cause in wrong_bounds(*case, 0)
              if all(between(*wrong_bounds(*case, n)[cause]) == blocks
                     for case, found in visited.items() for n, blocks in enumerate(found))]
    if not any(right_blocks(*case, n) for case, n in wrong):
        causes = ["where nothing is seen lo = hi, and nothing is visited"]
    raise Wrong("\n".join([*causes[:3], (
        f"block {n} {named(*case)}, is of the queries at {i0 + n * BI} to "
        f"{i0 + min((n + 1) * BI, T) - 1}. It sees {keys(right_blocks(*case, n))} and visits "
        f"{keys(visited[case][n])}")]))


def keys(blocks):
    """Blocks of keys in words."""
    if not blocks:
        return "no block of keys"
    return f"keys in the blocks {', '.join(f'{b * BJ} to {b * BJ + BJ - 1}' for b in sorted(blocks))}"


def test_bounds_kernel():
    cases = [*CASES, (64, 64, 0, INF), (64, 64, 0, 1.0), (64, 64, 0, 17.5), (33, 33, 0, 9.0),
             (40, 20, 0, 9.0), (40, 20, 1, INF), (32, 100, 68, 16.0), (32, 100, 68, 300.0)]
    visited = {}
    for T, S, i0, w in cases:
        found = launch.bounds(mine.bounds_kernel, T, S, torch.tensor([w]), i0).tolist()
        for lo, hi in found:
            where = f"{named(T, S, i0, w)}: lo = {lo}, hi = {hi}"
            check(lo >= 0 and lo % BJ == 0, f"lo must be a multiple of BJ = {BJ}, and not "
                  f"negative: {where}")
            check(lo <= hi or hi > 0, f"hi must not be negative: {where}")
        visited[T, S, i0, w] = [between(lo, hi) for lo, hi in found]
    check_blocks(visited)


def check_loads(kernel_of):
    """kernel_of(case): what a kernel loads. A loop must visit the blocks that are seen, no other."""
    visited = {}
    for T, S, i0, w in CASES:
        loaded = kernel_of(T, S, i0, w)
        visited[T, S, i0, w] = [{row // BJ for row in loaded["K_", n]} for n in range(-(-T // BI))]
    check_blocks(visited)
