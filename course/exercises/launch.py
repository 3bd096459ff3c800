"""This file launches the kernels of part 4. You need not change it, but read it once.

Everything here is for a single tile without a batch axis, and all tensors are contiguous and in
float32. w and r are tensors of one number each, which the kernels load. A block has BI queries and
BJ keys.

Triton's interpreter runs the programs one after another. It lets a kernel read and write outside
a matrix, which on a GPU is somebody else's memory. So there are NaN rows before and behind each
matrix here, and OUT and the rows around it are filled with a number that no kernel computes. A
load without a mask is found if what it brings is stored in OUT.
"""
import ast
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
from triton.runtime.interpreter import InterpretedFunction

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


def visits(kernel, T, S, w, i0, BI, BJ):
    """How often the loop of each block of queries visits each key: (blocks, keys)."""
    found = bounds(kernel, T, S, w, i0, BI, BJ)
    if (found < 0).any():
        raise Wrong(f"{T} queries, {S} keys, i0 = {i0}, w = {w.item():g}, BI = {BI}, BJ = {BJ}: lo "
                    "is negative, where there are no keys: the first key is at least 0")
    return torch.stack([visited(lo, hi, S, BJ) for lo, hi in found.tolist()])


def visited(lo, hi, S, BJ):
    """How often `for j0 in range(lo, hi, BJ)` visits each key, and places behind the last one."""
    found = torch.zeros(S + 4 * BJ, dtype=torch.int32)
    for j0 in range(lo, min(hi, S + 3 * BJ), BJ):
        found[j0 : j0 + BJ] += 1
    return found


KERNELS = {"similarity_kernel": similarities, "relevance_kernel": relevances,
           "bounds_kernel": visits, "forward_kernel": forward, "dq_kernel": dq}


def yours(file, name):
    """Your kernel as a function of tensors."""
    kernel = own(file, name)
    if type(kernel) is not InterpretedFunction:
        raise Wrong(f"{name} is no kernel: write @triton.jit above its def")
    check_source(file, name)
    return lambda *inputs: KERNELS[name](kernel, *inputs)


def check_source(file, name):
    """Refuse what works in the interpreter and fails on a GPU, in a kernel and your helpers."""
    tree = ast.parse(Path(file.__file__).read_text("utf-8"))
    tree.body = [f for f in tree.body if getattr(f, "name", "") not in KERNELS.keys() - {name}]
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call):
            continue
        options = {option.arg: ast.unparse(option.value) for option in call.keywords}
        f, where = ast.unparse(call.func), f"part4_kernel.py, line {call.lineno}: "
        if f.endswith(".dot") and options.get("input_precision") != "'ieee'":
            raise Wrong(where + 'tl.dot needs input_precision="ieee": without it a GPU rounds '
                        "float32 to tf32, which has three digits")
        has_mask = len(call.args) == 2 or "mask" in options        # with three: other, too
        if f.endswith(".load") and has_mask and "other" not in options:
            raise Wrong(where + "a load with a mask needs other=0.0: where the mask is False, a "
                        "GPU may load any number")


def launch(kernel, grid, inputs, out, *sizes, **constants):
    """Run all programs of a kernel. Returns OUT, after checking that all of it was stored."""
    inputs = [guarded(x) for x in inputs]
    around = out.new_full((GUARD + len(out) + GUARD, out.shape[1]), UNTOUCHED)
    store = around[GUARD:-GUARD]
    with warnings.catch_warnings(record=True) as seen:
        kernel[grid](*inputs, store, *sizes, **constants)
    if any("invalid value encountered in cast" in str(warning.message) for warning in seen):
        raise Wrong("inf became an integer, which is another one on each machine: clamp w to 2^30 "
                    "first")
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
