"""Part 4: each kernel beside multiscreen.py, with odd lengths, and their typical mistakes.

Mistakes are written in PyTorch: your kernel's results tell which of them it makes.
"""
import functools
import math
import os

import pytest
import torch

triton = pytest.importorskip("triton", reason="part 4 needs triton, which runs only on Linux")
if os.environ["TRITON_INTERPRET"] != "1":
    pytest.skip("part 4 runs in Triton's interpreter: unset TRITON_INTERPRET",
                allow_module_level=True)

from course.exercises import grade  # noqa: E402
from course.exercises.grade import Case, correlated, random  # noqa: E402
from course.exercises.mistakes import (  # noqa: E402
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

# ------------------------------------------ the right code in PyTorch, of which mistakes are edits

def root_and_mask(q, k, w, r, i0, BI, BJ, pairs=pairs):
    """z and m of each query and key."""
    t = torch.arange(len(q))
    j = torch.arange(len(k))
    i = i0 + t
    z, m, _ = pairs(q, k, w, r, i, j)
    return z, m


def similarity_kernel(q, k, BI, BJ):
    return q @ k.T


def relevance_kernel(q, k, w, r, i0, BI, BJ, z_and_m=root_and_mask):
    z, m = z_and_m(q, k, w, r, i0, BI, BJ)
    return z * z * m


def bounds_kernel(T, S, w, i0, BI, BJ):
    """For each block of queries, where its loop over the keys begins and ends, (blocks, 2)."""
    found = []
    for t0 in range(0, T, BI):
        i = i0 + t0
        last = i0 + min(t0 + BI, T) - 1
        reach = math.ceil(min(w.item(), 2**30))
        first = max(i - reach + 1, 0)
        end = min(last + 1, S)
        lo = first // BJ * BJ
        hi = end if first < end else lo
        found.append([lo, hi])
    return torch.tensor(found)


def in_loop(q, k, w, i0, BI, BJ, turns=INF):
    """Which keys (T, S) the loop of the query's block visits, or its last turns alone."""
    bounds = bounds_kernel(len(q), len(k), w, i0, BI, BJ)[torch.arange(len(q)) // BI]
    lo, hi = bounds[:, :1], bounds[:, 1:]
    end = (hi + BJ - 1) // BJ * BJ                     # of the last block
    j = torch.arange(len(k))
    return (lo <= j) & (j < end) & (j >= end - turns * BJ)


# In one case of the next two NaN stands outside the window.
def forward_kernel(q, k, v, w, r, i0, BI, BJ, z_and_m=root_and_mask):
    k = k.nan_to_num()
    v = v.nan_to_num()
    z, m = z_and_m(q, k, w, r, i0, BI, BJ)
    alpha_d = z * z * m
    return (alpha_d * in_loop(q, k, w, i0, BI, BJ)) @ v


def dq_kernel(q, k, v, w, r, dh, i0, BI, BJ, z_and_m=root_and_mask):
    k = k.nan_to_num()
    v = v.nan_to_num()
    z, m = z_and_m(q, k, w, r, i0, BI, BJ)
    dz = 2 * z * m * (dh @ v.T)
    return (dz * in_loop(q, k, w, i0, BI, BJ)) @ k / r


RIGHT = {f.__name__: f for f in (similarity_kernel, relevance_kernel, bounds_kernel,
                                 forward_kernel, dq_kernel)}


# ------------------------------------------------------------------------------ their mistakes

def first_block(x, n):
    """The first n rows of x, over and over."""
    return x[torch.arange(len(x)) % n]


OUTSIDE = ("blocks of keys outside the window were read, where there is NaN: loop from lo to hi, "
           "as in exercise 4.3")
SEES = "the block's first query sees keys from i - ceil(w) + 1 on"
SIMILARITY = "return q @ k.T"
PROGRAM = "program takes the first block of queries: they begin at program_id(0) * BI"

# Where positions are wrong, or z and m.
POSITIONS = edits(
    root_and_mask,
    ("i0 + t", "t", "i0 is ignored: query t is at position i0 + t"),
    ("i0 + t", "i0 + t % BI", "the positions of the queries lack t0 = program_id(0) * BI"),
    ("torch.arange(len(k))", "torch.arange(len(k)) % BJ", "the positions of the keys lack j0, "
     "their block's first"))
OF_PAIRS = [
    ("q @ k.T", "q @ k.T / q.shape[1] ** 0.5", DIVIDED),
    ("j - i[:, None]", "i[:, None] - j", "d is j - i, negative in the past"),
    *MASKS,
    *ROOTS[:-1],
    (ROOT, "s.softmax(-1)", "this is a softmax: z = max(1 - (1 - s)/r, 0)")]


def of_pairs(kernel, *more):
    """The mistakes of a kernel that has a wrong z or m."""
    of_z_and_m = [(functools.partial(root_and_mask, pairs=wrong), says)
                  for wrong, says in edits(pairs, *OF_PAIRS, *more)]
    return [(functools.partial(kernel, z_and_m=wrong), says)
            for wrong, says in [*POSITIONS, *of_z_and_m]]


def of_alpha(kernel):
    """The mistakes of a kernel that computes alpha_d, all of which dq does not show."""
    return [
        *of_pairs(kernel, ROOTS[-1]),
        *edits(kernel,
               *[("z * z * m", f"{c} * z**{a} * m**{b}", "alpha_d is z^2 m: yours is "
                  f"{c} z^{a} m^{b}") for c, a, b in FACTORS if (c, a, b) != (1, 2, 1)],
               ("z * z * m", "z * z * m / (z * z * m).sum(1, keepdim=True).clamp_min(1e-9)",
                "nothing may compete: do not divide by the sum of relevances"))]


# {kernel: [(a wrong one in PyTorch, what to say to those who have its results)]}
MISTAKES = {
    "similarity_kernel": edits(
        similarity_kernel,
        (SIMILARITY, "return first_block(q, BI) @ k.T", f"each {PROGRAM}"),
        (SIMILARITY, "return q @ first_block(k, BJ).T", "each program takes the first block of "
         "keys: they begin at program_id(1) * BJ"),
        (SIMILARITY, "return q @ torch.where(torch.arange(len(k))[:, None] < len(q), k, 0.0).T",
         "the keys have S rows: load rows < S, not rows < T"),
        ("k.T", "k.T / q.shape[1] ** 0.5", DIVIDED)),
    "relevance_kernel": of_alpha(relevance_kernel),
    "bounds_kernel": edits(
        bounds_kernel,
        ("math.ceil", "math.floor", f"w is rounded down: {SEES}"),
        ("reach + 1", "reach", f"one key too many at the window's edge: {SEES}"),
        ("max(i -", "max(last -", f"the first key is that of the block's last query: {SEES}"),
        ("max(i - reach + 1, 0)", "0", f"blocks before the window are visited: {SEES}"),
        ("min(last + 1, S)", "min(last, S)", "the last query's own key is missing: hi is one past "
         "its position"),
        ("min(last + 1, S)", "min(i + 1, S)", "hi is that of the block's first query: its last "
         "query sees later keys"),
        ("min(last + 1, S)", "S", "blocks of later keys are visited: hi is one past the position "
         "of the block's last query"),
        ("first // BJ * BJ", "first", "lo is a multiple of BJ: round it down"),
        ("min(t0 + BI, T) - 1", "t0 + BI - 1", "the last query of the last block is T - 1"),
        ("i0 + t0", "i0", "min(t0 + BI, T)", "min(BI, T)", f"each {PROGRAM}"),
        ("i0 + t0", "t0", "i0 + min", "min", "i0 is ignored: query t is at position i0 + t"),
        ("end if first < end else lo", "end", "where the block sees no key, hi = lo")),
    "forward_kernel": [
        *of_alpha(forward_kernel),
        *edits(forward_kernel,
               ("z_and_m(q,", "z_and_m(first_block(q, BI),", f"each {PROGRAM}"),
               ("BI, BJ))", "BI, BJ, 1))", "only the last block of keys counts: add up, h += .."))],
    "dq_kernel": [
        *of_pairs(dq_kernel),
        *edits(dq_kernel,
               *[("2 * z * m", f"{c} * z**{a} * m**{b}", "dz is 2 z m (dh . v): yours is "
                  f"{c} z^{a} m^{b} (dh . v)") for c, a, b in FACTORS if (c, a, b) != (2, 1, 1)],
               *WITH_R,
               (" * (dh @ v.T)", "", "dh . v is missing: dz = 2 z m (dh . v)"),
               ("dh @", "first_block(dh, BI) @", "each program takes the first block of dh: it "
                "begins at program_id(0) * BI"),
               ("BI, BJ))", "BI, BJ, 1))", "only the last block of keys counts: add up, dq += "
                ".."))],
}


# -------------------------------------------------------------------------------- the tests

def check(name, *cases):
    grade.Exercise("part4_kernel", name, RIGHT[name], MISTAKES[name],
                   gradients=False).grade(*cases)


def inputs(T, S, w):
    """q (T, K), k (S, K), v (S, V), w, r, dh (T, V) in float32; K = 64, V = 128, or the other way.

    Every fifth key points away from the queries. r = 0.98 where w is below 2, so that of two keys
    both count, whatever a mistake makes of their similarity.
    """
    K, V = (64, 128) if T < 50 else (128, 64)
    q, k, v = (x[0, 0] for x in correlated(0, 1, 1, T, S, K, V, dtype=torch.float32))
    k[::5] *= -1
    r = torch.tensor([0.98 if w < 2 else 0.25])
    return q, k, v, torch.tensor([w]), r, torch.randn(T, V, generator=random(1))


def far(T, S, w):
    """The same, with NaN in all keys outside the blocks to visit, 80 to 127."""
    x = inputs(T, S, w)
    for keys in x[1:3]:
        keys[:80] = keys[128:] = torch.nan
    return x


# T, S, i0, w, BI, BJ: a last block of one query; first keys at an edge; blocks that see no key;
# another size of blocks, and a window that begins a block before the first key; w = inf.
SIZES = [(33, 47, 0, 1.4, 32, 16), (50, 79, 20, 22.0, 32, 16), (37, 95, 23, 24.25, 32, 16),
         (90, 41, 5, 6.0, 32, 16), (45, 61, 11, 45.0, 16, 32), (45, 61, 11, INF, 32, 16)]
FAR = (20, 160, 100, 20.0, 32, 16)


def cases(make, hint, *sizes):
    """A case of each size. make(T, S, w): the inputs that come before i0, BI and BJ."""
    return [Case(*make(T, S, w), i0, BI, BJ, hint=f"{T} queries, {S} keys, i0 = {i0}, w = {w:g}, "
                 f"BI = {BI}, BJ = {BJ}: {hint}") for T, S, i0, w, BI, BJ in sizes]


def test_similarity_kernel():
    some = []
    for T, S, BI, BJ in ((45, 21, 32, 16), (20, 50, 32, 16), (50, 33, 16, 32)):
        q, k, *_ = inputs(T, S, INF)
        some.append(Case(q, k, BI, BJ, hint=f"{T} queries, {S} keys, BI = {BI}, BJ = {BJ}: row t "
                         "of Q starts at Q + t * K, row j of K_ at K_ + j * K, and row t of OUT "
                         "at OUT + t * S. Load rows < T and rows < S, and store rows < T and "
                         "columns < S only"))
    check("similarity_kernel", *some)


def test_relevance_kernel():
    def make(T, S, w):
        q, k, _, w, r, _ = inputs(T, S, w)
        return q, k, w, r

    check("relevance_kernel", *cases(make, "by hand, where q = k, alpha_d is m, 1 at d = 0 and "
                                     "1/2 at d = -w/2", *SIZES, (18, 40, 22, 1.0, 32, 16)))


def test_bounds_kernel():
    check("bounds_kernel", *cases(
        lambda T, S, w: (T, S, torch.tensor([w])), "row n has lo and hi of block n: lo is "
        "max(i_first - ceil(w) + 1, 0), rounded down, and hi is min(i_last + 1, S)", *SIZES,
        (64, 64, 0, 1.0, 32, 16), (64, 64, 0, 17.25, 32, 16), (40, 20, 0, 9.0, 32, 16),
        (40, 20, 1, INF, 32, 16), (32, 100, 68, 16.0, 32, 16), (32, 20, 2**21, INF, 32, 16)))


ROWS = ("If this is what you add up: a program's queries have the rows t0 .., also in OUT, and "
        "keys and values the rows j0 .. of each turn of the loop; i0 is for d alone")


def test_forward_kernel():
    check("forward_kernel",
          *cases(lambda *size: inputs(*size)[:5], f"h_i is the sum over j of z^2 m v_j. {ROWS}",
                 *SIZES),
          *cases(lambda *size: far(*size)[:5], OUTSIDE, FAR))


def test_dq_kernel():
    check("dq_kernel",
          *cases(inputs, f"dq_i is the sum over j of 2 z m (dh_i . v_j) k_j / r. {ROWS}", *SIZES),
          *cases(far, OUTSIDE, FAR))
