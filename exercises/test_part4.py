"""Part 4: each kernel against part 1, with odd lengths and NaN behind every matrix."""
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
from exercises.checks import check, correlated, expect, gradient, random  # noqa: E402
from exercises.launch import BI, BJ  # noqa: E402

INF = math.inf
K, V = 64, 128                                         # all sizes are different
# (T, S, i0, w): one block; a last block of one query, which sees its own key only in the last block
# of keys; i0; keys past the last query; a key just inside the window, alone in its block.
CASES = [(16, 16, 0, INF), (33, 33, 0, 17.0), (21, 60, 39, 24.5), (40, 20, 0, 9.0),
         (21, 76, 55, 24.5)]


def inputs(T, S, w, r=0.3):
    """q (T, K), k (S, K), v (S, V), w, r in float32, one tile.

    The last query accepts its own key. Of 76 keys one, at the edge of a window, has a large value.
    """
    q, k, v = (x[0, 0] for x in correlated(0, 1, 1, T, S, K, V, torch.float32, rho=0.6))
    if T == S:
        k[-1] = q[-1]
    if S == 76:
        k[31] = q[0]
        v[31] *= 1000
    return q, k, v, torch.tensor([w]), torch.tensor([r])


def check_rows(x, what):
    """Nothing unwritten, and nothing written behind the last row."""
    behind = x._base[len(x) :]
    check(behind.isnan().all(), f"rows of {what} past the end were written: mask the store")
    check(not x.isnan().any(), f"{what} has NaN: either rows past the end were read, NaN stands "
          "there (mask the load, other=0.0), or a place was never stored")


def test_similarity_kernel():
    for T, S in ((16, 16), (37, 21)):
        q, k, *_ = inputs(T, S, INF)
        s = launch.similarities(mine.similarity_kernel, q, k)
        check_rows(s, "s")
        expect(s, q @ k.T, f"s of {T} queries and {S} keys",
               [(k @ q.T, "queries and keys were swapped: a row is a query"),
                ((q @ k.T)[:BI].repeat(3, 1)[:T], "each block of queries is the first: use "
                 "program_id(0) * BI")])


def test_relevance_kernel():
    relevance = earlier("relevance")
    for T, S, i0, w in ((16, 16, 0, INF), (37, 37, 0, 12.0), (20, 40, 20, 9.5), (16, 16, 0, 1.0)):
        q, k, _, w, r = inputs(T, S, w)
        found = launch.relevances(mine.relevance_kernel, q, k, w, r, i0)
        check_rows(found, "alpha_d")

        def right(w=w, r=r, i0=i0, q=q, k=k):
            return relevance(q[None, None], k[None, None], w, r, i0)[0, 0]

        i, j = i0 + torch.arange(T)[:, None], torch.arange(S)
        mask = right(q=torch.ones(T, K) / 8, k=torch.ones(S, K) / 8, r=torch.ones(1))
        check((found[j > i] == 0).all(), "a later key must get 0: this kernel sees the future")
        expect(found, right(), f"alpha_d of {T} queries and {S} keys, i0 = {i0}, w = {w.item()}",
               [(right(i0=0), "i0 does not act: query t is at position i0 + t"),
                (right(w=torch.tensor([INF])), "the window does not act: Softmask is missing"),
                (right() ** 0.5, "the square of Trim is missing"),
                (right(r=torch.ones(1)), "r does not act"),
                ((1 - (1 - q @ k.T) * r).relu().square() * mask,
                 "1 - s must be divided by r, not multiplied by it"),
                ((1 - (1 - q @ k.T) / r).square() * mask, "the max of Trim is missing"),
                (right(w=w + 1), "a key at distance exactly w must get 0")], tolerance=1e-4)
        check((found[i - j >= w] == 0).all(), "a key at distance w or more must get exactly 0")


def test_bounds_kernel():
    cases = [(64, 64, 0, INF), (64, 64, 0, 1.0), (64, 64, 0, 17.0), (64, 64, 0, 17.5),
             (33, 33, 0, 9.0), (50, 70, 20, 20.0), (26, 70, 1, 9.0), (40, 20, 0, INF),
             (40, 20, 0, 9.0), (16, 100, 84, 16.0), (16, 100, 84, 300.0)]
    for T, S, i0, w in cases:
        found = launch.bounds(mine.bounds_kernel, T, S, torch.tensor([w]), i0)
        check((found != -(10**6)).all(), "a row of OUT is not filled: lo of block n is at "
              "OUT + 2 n, hi behind it")
        for n, (lo, hi) in enumerate(found.tolist()):
            queries = range(i0 + BI * n, i0 + min(BI * (n + 1), T))
            seen = [j for j in range(S) if any(0 <= i - j < w for i in queries)]
            where = (f"block {n} of {T} queries and {S} keys, i0 = {i0}, w = {w}, sees "
                     + (f"the keys {seen[0]} to {seen[-1]}" if seen else "no key")
                     + f", lo = {lo}, hi = {hi}")
            check(lo <= hi or not seen, f"lo comes after hi: were they swapped? {where}")
            check(lo >= 0 and lo % BJ == 0, f"lo must be a multiple of BJ, not negative: {where}")
            blocks = set(range(lo // BJ, -(-hi // BJ)))
            needed = {j // BJ for j in seen}
            if needed - blocks:
                cause = "a block at the window's edge is missing"
                if w == INF and seen[-1] // BJ in blocks:
                    cause = "w = inf became a small integer: cut it to 2^30 before"
                elif i0 == 0 and hi <= seen[-1]:
                    cause = "hi is one more than the position of the last query"
                elif i0 and seen[-1] // BJ not in blocks:
                    cause = "i0 does not act: query t is at position i0 + t"
                check(False, f"{cause}: {where}")
            check(seen or not blocks, f"nothing is seen, so lo = hi: {where}")
            first = needed and min(blocks) == min(needed)
            check(blocks == needed, ("blocks of the future, or past the last key, are visited: "
                                     if first else "blocks outside the window are visited: ")
                  + where)


def pairs_with_windows(q, k, w, r, i0):
    """z, m before its window, whether a key is in the window, is past, in a block to be visited, in
    the last of them; in one that is visited where hi is one less, where lo is one more."""
    T, S = len(q), len(k)
    t, j = torch.arange(T)[:, None], torch.arange(S)
    d = i0 + t - j
    first = i0 + t // BI * BI
    last = (first + BI - 1).clamp(max=i0 + T - 1)
    reach = w.ceil().clamp(max=2**30) - 1
    visited = (j // BJ <= last // BJ) & (j // BJ >= (first - reach) // BJ)
    narrow = (j // BJ < -(-last // BJ)), (j // BJ >= (first - reach + 1) // BJ)
    z, m = (1 - (1 - q @ k.T) / r).relu(), torch.cos(math.pi / 2 * (d / w)) ** 2
    return z, m, d.abs() < w, d >= 0, visited, (j // BJ == last // BJ), narrow


HI = "hi is one more than the position of the last query: a block of keys is missing"
LO = "lo comes from ceil(w) - 1 keys back, the last distance below w: a block of keys is missing"


def test_forward_kernel():
    screen, relevance = earlier("screen"), earlier("relevance")
    for T, S, i0, w in CASES:
        q, k, v, w, r = inputs(T, S, w)
        h = launch.forward(mine.forward_kernel, q, k, v, w, r, i0)
        check_rows(h, "h")
        right = screen(q[None, None], k[None, None], v[None, None], w, r, i0)[0, 0]
        at_0 = relevance(q[None, None], k[None, None], w, r, 0)[0, 0]
        z, m, near, past, visited, own, (to_hi, from_lo) = pairs_with_windows(q, k, w, r, i0)
        alpha_d = z * z * m * near * past
        expect(h, right, f"h of {T} queries and {S} keys, i0 = {i0}, w = {w.item()}",
               [(at_0 * visited @ v, "i0 does not act: query t is at position i0 + t"),
                (alpha_d * to_hi @ v, HI), (alpha_d * from_lo @ v, LO),
                (alpha_d * own @ v, "only the last block counts: add up, h += .."),
                (z * z * m * near * visited @ v, "a later key must get 0: the future is seen"),
                (z * z * visited @ v, "Softmask is missing: alpha_d = z^2 m"),
                (z * z * past * visited @ v, "the window does not act: m of Softmask"),
                (z * z * m * past * visited @ v, "beyond the window m is 0: the cosine comes back"),
                (z * m * near * past @ v, "the square of Trim is missing"),
                (alpha_d @ v.as_strided((S, V), (K, 1)), "a row of V_ and of OUT has V numbers, "
                 "not K"),
                (alpha_d[:, :T] @ v[:T], "keys from T on are left out: there are S of them"),
                (alpha_d / alpha_d.sum(1, keepdim=True) @ v, "relevances must not compete: nothing "
                 "is divided by their sum")], tolerance=1e-4)

    def forward(q, k, v, w, r, i0):
        return launch.forward(mine.forward_kernel, q, k, v, w, r, i0)

    check_visits(forward)


def check_visits(f):
    """Keys that no query sees are poisoned: a loop over their blocks meets NaN."""
    for part, what in ((slice(32), "blocks outside the window are visited: NaN in keys 0 to 31,"),
                       (slice(64, None), "blocks of later keys are visited: NaN in keys from 64,")):
        q, k, v, w, r = inputs(16, 96, 9.0)
        k[part], v[part] = torch.nan, torch.nan
        check(not f(q, k, v, w, r, 40).isnan().any(), f"{what} which the queries 40 "
              "to 55 with w = 9 do not see, reached them")


def test_dq_kernel():
    screen = earlier("screen")

    def dq(q, k, v, w, r, i0):
        dh = torch.randn(len(q), V, generator=random(1))
        return launch.dq(mine.dq_kernel, q, k, v, w, r, dh, i0)

    for T, S, i0, w in CASES:
        q, k, v, w, r = inputs(T, S, w)
        dh = torch.randn(T, V, generator=random(1))
        found = dq(q, k, v, w, r, i0)
        check_rows(found, "dq")

        def h(q, k=k, v=v, w=w, r=r, i0=i0):
            return screen(q[None, None], k[None, None], v[None, None], w, r, i0)[0, 0]

        right, = gradient(h, q, dh=dh)
        z, m, near, past, visited, own, (to_hi, from_lo) = pairs_with_windows(q, k, w, r, i0)
        m, (_, m_0, near_0, past_0, *_) = m * near, pairs_with_windows(q, k, w, r, 0)
        slope = 2 * z * (dh @ v.T) * visited / r
        expect(found, right, f"dq of {T} queries and {S} keys, i0 = {i0}, w = {w.item()}",
               [(right / 2, "the 2 of the square's derivative is missing"),
                (right * r, "1/r is missing: dz/ds = 1/r"),
                (right * r * r, "divide by r, dz/ds = 1/r; this multiplies"),
                (-right, "the sign: z grows with s"),
                (slope * m * past * own @ k, "only the last block counts: add up, dq += .."),
                (slope * m_0 * near_0 * past_0 @ k, "i0 does not act: query t is at i0 + t"),
                (slope * m * past * to_hi @ k, HI), (slope * m * past * from_lo @ k, LO),
                (slope * z * m * past @ k, "one factor z is too many: (z^2)' = 2 z"),
                (slope @ k, "Softmask is missing: dz = 2 z m (dh . v)"),
                (slope * m * m * past @ k, "m is c^2 already: dz = 2 z m (dh . v)"),
                (slope * m.sqrt() * past @ k, "one factor c is missing: dz = 2 z c^2 (dh . v)"),
                (slope * m @ k, "a later key must get 0: this kernel sees the future")],
               tolerance=1e-4)
    check_visits(dq)
