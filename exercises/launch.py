"""What starts the kernels of part 4. Nothing to do here: read it once.

One tile, no batch, float32, contiguous. Results are filled with NaN first, and have rows of NaN
behind them: a number that is never written, and a row that should not be, show at once. w and r are
tensors of one number, which the kernels load.

On a GPU the programs of a grid run in any order, a masked load without `other` gives anything, and
a product is rounded to tf32 unless told otherwise. Triton's interpreter is kinder: here it runs the
programs in three orders, loads NaN where `other` lacks, and refuses a product that is rounded.
"""
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np
import torch
import triton
from triton._C.libtriton import ir
from triton.runtime.interpreter import interpreter_builder as builder

from exercises.checks import Wrong

BI, BJ = 16, 32                                        # queries, and keys, of a block
GUARD = 32                                             # rows of NaN behind each matrix


def drawn(n):
    """The numbers below n in an order drawn at random, each time the same."""
    return torch.randperm(n, generator=torch.Generator().manual_seed(0)).tolist()


ORDERS = {"in order": list, "backwards": lambda n: list(n)[::-1],
          "at random": lambda n: drawn(len(n))}


@contextmanager
def as_on_a_gpu(order):
    """Within it the interpreter is not kind. order: a range to the numbers of the programs."""
    set_grid_idx, load, dot = builder.set_grid_idx, builder.create_masked_load, builder.create_dot

    def in_that_order(x, y, z):
        nx, ny, nz = builder.grid_dim
        n = order(range(nx * ny * nz))[(x * ny + y) * nz + z]
        set_grid_idx(n // (ny * nz), n // nz % ny, n % nz)

    def masked_load(pointers, mask, other, *options):
        found = load(pointers, mask, other, *options)
        if other is None and found.data.dtype.kind == "f":
            found.data = np.where(mask.data, found.data, np.nan)
        return found

    def exact_dot(a, b, d, precision, *options):
        if precision != ir.INPUT_PRECISION.IEEE:
            raise Wrong('tl.dot rounds float32 to tf32 on a GPU: give it input_precision="ieee"')
        return dot(a, b, d, precision, *options)

    with patch.multiple(builder, set_grid_idx=in_that_order, create_masked_load=masked_load,
                        create_dot=exact_dot):
        yield


def in_any_order(start, empty):
    """The result of start(out), out = empty(). Raises Wrong if the programs' order changes it."""
    first = None
    for name, order in ORDERS.items():
        out = empty()
        try:
            with as_on_a_gpu(order):
                start(out)
        except Exception as e:
            if isinstance(e.__cause__, Wrong):         # the interpreter wraps what a kernel raises
                raise e.__cause__ from None
            raise
        first = out if first is None else first
        if not torch.equal(out.nan_to_num(nan=1e30), first.nan_to_num(nan=1e30)):
            raise Wrong(f"run {name}, the programs give another result: on a GPU they run in any "
                        "order, so each may store only what no other one stores")
    return first


def poisoned(rows, columns):
    return torch.full((rows + GUARD, columns), torch.nan)[:rows]


def guarded(x):
    """x, with rows of NaN behind it in memory."""
    y = poisoned(*x.shape)
    y.copy_(x)
    return y


def similarities(kernel, q, k):
    """(T, S), one program for each block of queries and keys."""
    (T, K), S = q.shape, len(k)

    def start(out):
        grid = (triton.cdiv(T, BI), triton.cdiv(S, BJ))
        kernel[grid](guarded(q), guarded(k), out, T, S, K=K, BI=BI, BJ=BJ)

    return in_any_order(start, lambda: poisoned(T, S))


def relevances(kernel, q, k, w, r, i0=0):
    """(T, S), one program for each block of queries and keys."""
    (T, K), S = q.shape, len(k)

    def start(out):
        grid = (triton.cdiv(T, BI), triton.cdiv(S, BJ))
        kernel[grid](guarded(q), guarded(k), w, r, out, i0, T, S, K=K, BI=BI, BJ=BJ)

    return in_any_order(start, lambda: poisoned(T, S))


def bounds(kernel, T, S, w, i0=0):
    """(blocks of queries, 2): where the loop over keys begins and ends, for each."""
    blocks = triton.cdiv(T, BI)

    def start(out):
        kernel[(blocks,)](w, out, i0, T, S, BI=BI, BJ=BJ)

    return in_any_order(start, lambda: torch.full((blocks, 2), -(10**6), dtype=torch.int32))


def forward(kernel, q, k, v, w, r, i0=0):
    """h (T, V), one program for each block of queries."""
    (T, K), (S, V) = q.shape, v.shape

    def start(out):
        kernel[(triton.cdiv(T, BI),)](guarded(q), guarded(k), guarded(v), w, r, out, i0, T, S,
                                      K=K, V=V, BI=BI, BJ=BJ)

    return in_any_order(start, lambda: poisoned(T, V))


def dq(kernel, q, k, v, w, r, dh, i0=0):
    """dL/dq (T, K), one program for each block of queries."""
    (T, K), (S, V) = q.shape, v.shape

    def start(out):
        kernel[(triton.cdiv(T, BI),)](guarded(q), guarded(k), guarded(v), w, r, guarded(dh), out,
                                      i0, T, S, K=K, V=V, BI=BI, BJ=BJ)

    return in_any_order(start, lambda: poisoned(T, K))
