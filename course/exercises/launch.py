"""This file launches the kernels of part 4. You need not change it, but read it once.

Everything here is for a single tile without a batch axis, and all tensors are contiguous and in
float32. w and r are tensors of one number each, which the kernels load. A block has BI queries and
BJ keys.

Triton's interpreter runs the programs one after another. It lets a kernel read and write outside
a matrix, which on a GPU is somebody else's memory. So there are NaN rows before and behind each
matrix here, and OUT and the rows around it are filled with a number that no kernel computes. A
load without a mask is found if what it brings is stored in OUT.
"""
import functools
import warnings

import torch
import torch.nn.functional as F
import triton
from triton._C.libtriton import ir
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder

from course.exercises.child import Wrong, own

GUARD = 64                                             # unused rows before and behind each matrix
UNTOUCHED = 12345.0                                    # fills OUT


def similarities(kernel, q, k, BI, BJ):
    """All similarities (T, S), with one program for each block of queries and block of keys."""
    (T, K), S = q.shape, len(k)
    grid = triton.cdiv(T, BI), triton.cdiv(S, BJ)
    return launch(kernel, grid, [q, k], torch.empty(T, S), T, S, K=K, BI=BI, BJ=BJ)


def relevances(kernel, q, k, w, r, i0, BI, BJ):
    """All relevances (T, S), with one program for each block of queries and block of keys."""
    (T, K), S = q.shape, len(k)
    grid = triton.cdiv(T, BI), triton.cdiv(S, BJ)
    return launch(kernel, grid, [q, k, w, r], torch.empty(T, S), i0, T, S, K=K, BI=BI, BJ=BJ)


def bounds(kernel, T, S, w, i0, BI, BJ):
    """For each block of queries, where its loop over the keys begins and ends: (blocks, 2)."""
    out = torch.empty(triton.cdiv(T, BI), 2, dtype=torch.int32)
    return launch(kernel, (len(out),), [w], out, i0, T, S, BI=BI, BJ=BJ)


def forward(kernel, q, k, v, w, r, i0, BI, BJ):
    """h (T, V), with one program for each block of queries."""
    (T, K), (S, V) = q.shape, v.shape
    grid, h = (triton.cdiv(T, BI),), torch.empty(T, V)
    return launch(kernel, grid, [q, k, v, w, r], h, i0, T, S, K=K, V=V, BI=BI, BJ=BJ)


def dq(kernel, q, k, v, w, r, dh, i0, BI, BJ):
    """dL/dq (T, K), with one program for each block of queries."""
    (T, K), (S, V) = q.shape, v.shape
    grid, out = (triton.cdiv(T, BI),), torch.empty(T, K)
    return launch(kernel, grid, [q, k, v, w, r, dh], out, i0, T, S, K=K, V=V, BI=BI, BJ=BJ)


KERNELS = {"similarity_kernel": similarities, "relevance_kernel": relevances,
           "bounds_kernel": bounds, "forward_kernel": forward, "dq_kernel": dq}


def yours(file, name):
    """Your kernel as a function of tensors."""
    kernel = own(file, name)
    if type(kernel) is not InterpretedFunction:
        raise Wrong(f"{name} is no kernel: write @triton.jit above its def")
    InterpreterBuilder.create_dot = checked_dot
    InterpreterBuilder.create_masked_load = checked_load
    return functools.partial(KERNELS[name], kernel)


# Two steps of the interpreter, which refuse what works there and fails on a GPU.
dot, load = InterpreterBuilder.create_dot, InterpreterBuilder.create_masked_load


def checked_dot(builder, a, b, d, input_precision, *more):
    if input_precision != ir.INPUT_PRECISION.IEEE:
        raise ValueError('tl.dot needs input_precision="ieee": without it a GPU rounds float32 to '
                         "tf32, which has three digits")
    return dot(builder, a, b, d, input_precision, *more)


def checked_load(builder, pointers, mask, other, *more):
    if other is None and not mask.data.all():
        raise ValueError("a load with a mask needs other=0.0: where the mask is False, a GPU may "
                         "load any number")
    return load(builder, pointers, mask, other, *more)


def launch(kernel, grid, inputs, out, *sizes, **constants):
    """Run all programs of a kernel. Returns OUT, after checking that all of it was stored."""
    inputs = [guarded(x) for x in inputs]
    around = out.new_full((GUARD + len(out) + GUARD, out.shape[1]), UNTOUCHED)
    store = around[GUARD:-GUARD]
    with warnings.catch_warnings():
        # Where inf becomes an integer, which is another one on each machine.
        warnings.filterwarnings("error", "invalid value encountered in cast")
        kernel[grid](*inputs, store, *sizes, **constants)
    if (around[:GUARD] != UNTOUCHED).any():
        raise Wrong("a store goes before the beginning of OUT")
    if (around[-GUARD:] != UNTOUCHED).any():
        raise Wrong("a store goes past the end of OUT: mask its rows, and the columns of a block "
                    "that may be cut off. Does row t begin at t times the number of columns?")
    if (store == UNTOUCHED).any():
        row, column = (store == UNTOUCHED).nonzero()[0].tolist()
        raise Wrong(f"OUT[{row}, {column}] was never stored: do queries begin at program_id(0) * "
                    "BI, and keys at program_id(1) * BJ? Is a block that sees no key stored?")
    if store.isnan().any() and not any(x.isnan().any() for x in inputs):
        raise Wrong("OUT contains NaN, as there is around each matrix here: mask each load of "
                    "rows, rows < T or rows < S, with other=0.0. If you do, is the first row at "
                    "least 0, and does row n begin at n times the number of columns? Or is an "
                    "infinite number multiplied by 0?")
    return store


def guarded(x):
    """A copy of x as a matrix, with GUARD rows of NaN before and behind it."""
    return F.pad(x.reshape(len(x), -1), (0, 0, GUARD, GUARD), value=torch.nan)[GUARD:-GUARD]
