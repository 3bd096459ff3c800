"""Starts the kernels of part 4. Nothing to do here: read it once.

One tile, no batch, float32, contiguous. w and r are one-number tensors, which the kernels load.
The sizes BI, BJ, K and V differ, so that mixing them up shows. Each kernel runs twice: its programs
from the last to the first, then in a random order. On a GPU there is no order. A third run has
other block sizes, and must store every element of OUT, too.
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
    """(T, S), one program for each block of queries and keys."""
    (T, K), S = q.shape, len(k)
    out = torch.full((T, S), torch.nan)
    return launch(kernel, (T, S), {"Q": q, "K_": k}, out, {"T": T, "S": S}, {"K": K})[0]


def relevances(kernel, q, k, w, r, i0=0):
    """(T, S), one program for each block of queries and keys."""
    (T, K), S = q.shape, len(k)
    out = torch.full((T, S), torch.nan)
    return launch(kernel, (T, S), {"Q": q, "K_": k, "W": w, "R": r}, out,
                  {"i0": i0, "T": T, "S": S}, {"K": K})[0]


def bounds(kernel, T, S, w, i0=0):
    """(blocks of queries, 2): where each loop over keys begins and ends."""
    out = torch.full((triton.cdiv(T, BI), 2), -1, dtype=torch.int32)
    return launch(kernel, (T,), {"W": w}, out, {"i0": i0, "T": T, "S": S}, {})[0]


def forward(kernel, q, k, v, w, r, i0=0):
    """h (T, V) and the rows loaded, one program for each block of queries."""
    (T, K), (S, V) = q.shape, v.shape
    out = torch.full((T, V), torch.nan)
    return launch(kernel, (T,), {"Q": q, "K_": k, "V_": v, "W": w, "R": r}, out,
                  {"i0": i0, "T": T, "S": S}, {"K": K, "V": V})


def dq(kernel, q, k, v, w, r, dh, i0=0):
    """dL/dq (T, K) and the rows loaded, one program for each block of queries."""
    (T, K), (S, V) = q.shape, v.shape
    out = torch.full((T, K), torch.nan)
    return launch(kernel, (T,), {"Q": q, "K_": k, "V_": v, "W": w, "R": r, "DH": dh}, out,
                  {"i0": i0, "T": T, "S": S}, {"K": K, "V": V})


def launch(kernel, covered, inputs, out, sizes, widths):
    """The result, and {(name, program): the rows that it loaded}.

    covered: (T,) or (T, S), to be covered by blocks of BI queries and BJ keys.
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
    check(torch.equal(result, again), "two orders of the programs give two results: a program must "
          "not depend on another's work")
    if widths:                                         # not for bounds: a row per block
        run(drawn, BJ, BI)
    return result, loaded


def guarded(x):
    """A copy as a matrix, with room behind it: addresses past its end hit no other matrix."""
    x = x.reshape(len(x), -1)
    copy = x.new_empty(len(x) + GUARD, x.shape[1])[: len(x)]
    return copy.copy_(x)


def check_result(out, memory):
    """Check that each element of OUT was stored, and is a number."""
    missing = (memory.stored < 0).nonzero()
    if len(missing[0]):
        row, column = missing[0][0], missing[1][0]
        check(False, f"OUT[{row}, {column}] was never stored: do queries begin at program_id(0) * "
              "BI, keys at program_id(1) * BJ? Is a block that sees no key stored?")
    check(memory.bare is None or not out.isnan().any(), f"{memory.bare} is loaded with a mask and "
          "without other=0.0: where the mask is False there are other numbers, here NaN, and they "
          "reached OUT")
    check(not out.isnan().any(), "OUT has a NaN, and no input has one")
