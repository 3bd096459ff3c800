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

INF = math.inf


def inputs(T, S, w, r=0.3):
    """q (T, 16), k (S, 16), v (S, 16), w, r in float32, one tile."""
    q, k, v = (x[0, 0] for x in correlated(0, 1, 1, T, S, V=16, dtype=torch.float32))
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
                ((q @ k.T)[:16].repeat(3, 1)[:T], "each block of queries is the first: use "
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
        mask = right(q=torch.ones(T, 16) / 4, k=torch.ones(S, 16) / 4, r=torch.ones(1))
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
             (50, 70, 20, 20.0), (40, 20, 0, 9.0), (16, 100, 84, 16.0), (16, 100, 84, 300.0)]
    for T, S, i0, w in cases:
        found = launch.bounds(mine.bounds_kernel, T, S, torch.tensor([w]), i0)
        for n, (lo, hi) in enumerate(found.tolist()):
            queries = range(i0 + 16 * n, i0 + min(16 * (n + 1), T))
            seen = [j for j in range(S) if any(0 <= i - j < w for i in queries)]
            where = (f"block {n} of {T} queries and {S} keys, i0 = {i0}, w = {w}, sees the keys "
                     + (f"{seen[0]} to {seen[-1]}" if seen else "of no block")
                     + f", lo = {lo}, hi = {hi}")
            check(lo >= 0 and lo % 16 == 0, f"lo must be a multiple of BJ, not negative: {where}")
            blocks = set(range(lo // 16, -(-hi // 16)))
            needed = {j // 16 for j in seen}
            if needed - blocks:
                cause = "a block at the window's edge is missing"
                if w == INF and seen[-1] // 16 in blocks:
                    cause = "w = inf became a small integer: cut it to 2^30 before"
                elif i0 and seen[-1] // 16 not in blocks:
                    cause = "i0 does not act: query t is at position i0 + t"
                check(False, f"{cause}: {where}")
            first = needed and min(blocks) == min(needed)
            check(blocks == needed, ("blocks of the future, or past the last key, are visited: "
                                     if first else "blocks outside the window are visited: ")
                  + where)


def test_forward_kernel():
    screen = earlier("screen")
    for T, S, i0, w in ((16, 16, 0, INF), (50, 50, 0, 17.0), (21, 60, 39, 24.5), (40, 20, 0, 9.0)):
        q, k, v, w, r = inputs(T, S, w)
        h = launch.forward(mine.forward_kernel, q, k, v, w, r, i0)
        check_rows(h, "h")

        def right(i0=i0, q=q, k=k, v=v, w=w, r=r):
            return screen(q[None, None], k[None, None], v[None, None], w, r, i0)[0, 0]

        last = i0 + torch.arange(T) // 16 * 16
        own = (torch.arange(S) // 16 * 16) == last[:, None]
        relevance = earlier("relevance")(q[None, None], k[None, None], w, r, i0)[0, 0]
        expect(h, right(), f"h of {T} queries and {S} keys, i0 = {i0}, w = {w.item()}",
               [(right(i0=0), "i0 does not act: query t is at position i0 + t"),
                ((relevance * own) @ v, "only the last block counts: add up, h += ..")],
               tolerance=1e-4)
    check_visits(mine.forward_kernel)


def check_visits(kernel):
    """Keys that no query sees are poisoned: a loop over all blocks meets NaN."""
    q, k, v, w, r = inputs(64, 64, 9.0)
    k[:32], v[:32] = torch.nan, torch.nan
    h = launch.forward(kernel, q, k, v, w, r)[48:]
    check(not h.isnan().any(), "blocks outside the window are visited: NaN in keys that queries 48 "
          "to 63 do not see, w = 9, reached them")


def test_dq_kernel():
    screen = earlier("screen")
    for T, S, i0, w in ((16, 16, 0, INF), (50, 50, 0, 17.0), (21, 60, 39, 24.5)):
        q, k, v, w, r = inputs(T, S, w)
        dh = torch.randn(T, 16, generator=random(1))
        found = launch.dq(mine.dq_kernel, q, k, v, w, r, dh, i0)
        check_rows(found, "dq")

        def h(q, k=k, v=v, w=w, r=r, i0=i0):
            return screen(q[None, None], k[None, None], v[None, None], w, r, i0)[0, 0]

        right, = gradient(h, q, dh=dh)
        expect(found, right, f"dq of {T} queries and {S} keys, i0 = {i0}, w = {w.item()}",
               [(right / 2, "the 2 of the square's derivative is missing"),
                (right * r, "1/r is missing: dz/ds = 1/r"),
                (right * r * r, "divide by r, dz/ds = 1/r; this multiplies")], tolerance=1e-4)
