"""This file launches the kernels of part 4. You need not change it, but read it once.

Everything here is for a single tile without a batch axis, and all tensors are contiguous and in
float32. w and r are tensors of one number each, which the kernels load. BI, BJ, K and V are all
different, so that a kernel that confuses two of them fails. Each kernel is run twice, first with
its programs from the last to the first and then with them in a random order, because on a GPU you
cannot rely on any order. A third run uses other block sizes, and it must store every element of OUT
as well.
"""
import random

import torch
import triton

from course.exercises import strict
from course.exercises.checks import check

BI, BJ = 32, 16                                        # queries and keys in a block
GUARD = 64                                             # unused rows behind each matrix


def from_last(programs):
    return programs[::-1]


def drawn(programs):
    return random.Random(0).sample(programs, len(programs))


def similarities(kernel, q, k):
    """All similarities (T, S), with one program for each block of queries and block of keys."""
    (T, K), S = q.shape, len(k)
    out = torch.full((T, S), torch.nan)
    return launch(kernel, (T, S), {"Q": q, "K_": k}, out, {"T": T, "S": S}, {"K": K})[0]


def relevances(kernel, q, k, w, r, i0=0):
    """All relevances (T, S), with one program for each block of queries and block of keys."""
    (T, K), S = q.shape, len(k)
    out = torch.full((T, S), torch.nan)
    return launch(kernel, (T, S), {"Q": q, "K_": k, "W": w, "R": r}, out,
                  {"i0": i0, "T": T, "S": S}, {"K": K})[0]


def bounds(kernel, T, S, w, i0=0):
    """For each block of queries, where its loop over the keys begins and ends: (blocks, 2)."""
    out = torch.full((triton.cdiv(T, BI), 2), -1, dtype=torch.int32)
    return launch(kernel, (T,), {"W": w}, out, {"i0": i0, "T": T, "S": S}, {})[0]


def forward(kernel, q, k, v, w, r, i0=0):
    """h (T, V), and the rows that were loaded, with one program for each block of queries."""
    (T, K), (S, V) = q.shape, v.shape
    out = torch.full((T, V), torch.nan)
    return launch(kernel, (T,), {"Q": q, "K_": k, "V_": v, "W": w, "R": r}, out,
                  {"i0": i0, "T": T, "S": S}, {"K": K, "V": V})


def dq(kernel, q, k, v, w, r, dh, i0=0):
    """dL/dq (T, K), and the rows that were loaded, with one program for each block of queries."""
    (T, K), (S, V) = q.shape, v.shape
    out = torch.full((T, K), torch.nan)
    return launch(kernel, (T,), {"Q": q, "K_": k, "V_": v, "W": w, "R": r, "DH": dh}, out,
                  {"i0": i0, "T": T, "S": S}, {"K": K, "V": V})


def launch(kernel, covered, inputs, out, sizes, widths):
    """Run a kernel, and return its result and {(name, program): the rows that it loaded}.

    covered: what the grid of programs covers, which is (T,) with blocks of BI queries, or (T, S)
    with blocks of BI queries and BJ keys.
    """
    def run(order, *block):
        tensors = {name: guarded(x) for name, x in (inputs | {"OUT": out}).items()}
        grid = tuple(triton.cdiv(n, side) for n, side in zip(covered, block))
        memory = strict.run(kernel, grid, tensors, sizes, widths | dict(zip(("BI", "BJ"), block)),
                            order)
        check_result(tensors["OUT"], memory)
        return tensors["OUT"], memory.loaded

    result, _ = run(from_last, BI, BJ)
    again, loaded = run(drawn, BI, BJ)
    check(torch.equal(result, again), "the result depends on the order of the programs: a "
          "program must not depend on another's work")
    if widths:                      # not for `bounds`, whose rows depend on the size of a block
        run(drawn, BJ, BI)
    return result, loaded


def guarded(x):
    """A copy of x as a matrix, with unused rows behind it.

    An address that is a little past the end then does not fall into another matrix.
    """
    x = x.reshape(len(x), -1)
    copy = x.new_empty(len(x) + GUARD, x.shape[1])[: len(x)]
    return copy.copy_(x)


def check_result(out, memory):
    """Check that every element of OUT was stored and is not NaN."""
    missing = (memory.stored < 0).nonzero()
    if len(missing[0]):
        row, column = missing[0][0], missing[1][0]
        check(False, f"OUT[{row}, {column}] was never stored: do queries begin at program_id(0) * "
              "BI, keys at program_id(1) * BJ? Is a block that sees no key stored?")
    check(memory.bare is None or not out.isnan().any(), f"{memory.bare} is loaded with a mask and "
          "without other=0.0: where the mask is False, this loads arbitrary numbers, here NaN, and "
          "they reached OUT")
    check(not out.isnan().any(), "OUT contains NaN, although no input does")
