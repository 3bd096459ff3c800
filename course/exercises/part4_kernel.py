"""Part 4: screening as Triton kernels. They run in Triton's interpreter, which needs no GPU.

Check it with `pytest course/exercises/test_part4.py`. Read launch.py first, because it starts the
kernels and says how many programs run. In the interpreter you can call `print` inside a kernel, and
a mistake gives a Python traceback. On a GPU the same code compiles, once you have removed `if` and
`raise`.

    tl.program_id(0)                     which block this program works on
    tl.arange(0, N)                      0 .. N - 1; N is a power of two
    tl.load(P + offsets, mask=, other=)  P is a pointer; offsets may be a matrix
    tl.store(P + offsets, x, mask=)
    tl.dot(a, b, input_precision="ieee") matrix product; tl.trans(x)
    tl.zeros, tl.where, tl.maximum, tl.minimum, tl.cos, tl.ceil, tl.cdiv, x.to(tl.int32)
    math.pi, or PI = tl.constexpr(3.141592653589793) above the kernels; a plain PI = 3.14 there runs
    in the interpreter only

Matrices are contiguous, so row n of Q starts at Q + n K. Q has T rows and K_ has S rows. Past the
last row, load 0 and store nothing. Programs run at the same time, so each one stores a block of its
own. With b = program_id(0), block b consists of the queries t = b BI .. b BI + BI - 1, which are at
the positions i0 + t.
"""
import math  # noqa: F401

import triton
import triton.language as tl  # noqa: F401


@triton.jit
def similarity_kernel(Q, K_, OUT, T, S, K: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr):
    """Eq. 8 for block (program_id(0), program_id(1)). Q: (T, K); K_: (S, K), keys; OUT: (T, S).

        s_tj = q_t . k_j
    """
    raise NotImplementedError("Exercise 4.1: a block of similarities")


@triton.jit
def relevance_kernel(Q, K_, W, R, OUT, i0, T, S, K: tl.constexpr, BI: tl.constexpr,
                     BJ: tl.constexpr):
    """Eqs. 8 to 11 for one block. W, R: pointers to one number each; OUT: (T, S).

        z = max(1 - (1 - s)/r, 0),   d = j - i,   m = (cos(pi d/w) + 1)/2 for -w < d <= 0, or 0
        alpha_d = z^2 m

    Query t is at position i0 + t. w may be inf.
    """
    raise NotImplementedError("Exercise 4.2: Trim and Softmask in the kernel")


@triton.jit
def bounds_kernel(W, OUT, i0, T, S, BI: tl.constexpr, BJ: tl.constexpr):
    """The keys that block program_id(0) of the queries sees: lo and hi, stored in its row of OUT.

        lo = max(i_first - ceil(w) + 1, 0), rounded down,   hi = min(i_last + 1, S)

    OUT: (blocks, 2), int32. lo is a multiple of BJ, so that the kernels can loop by
    `for j0 in range(lo, hi, BJ)`. This loop covers every key that a query of the block sees, and
    visits no block of keys without one. If the queries see no key at all, hi = lo. w may
    be inf: clamp it to 2^30 before you convert it to an integer.
    """
    raise NotImplementedError("Exercise 4.3: the loop bounds of a window")


@triton.jit
def forward_kernel(Q, K_, V_, W, R, OUT, i0, T, S, K: tl.constexpr, V: tl.constexpr,
                   BI: tl.constexpr, BJ: tl.constexpr):
    """Eq. 12 for one block of queries: loop from lo to hi. V_: (S, V); OUT: (T, V).

        h_t = sum_j alpha_d,tj v_j
    """
    raise NotImplementedError("Exercise 4.4: screening, forward")


@triton.jit
def dq_kernel(Q, K_, V_, W, R, DH, OUT, i0, T, S, K: tl.constexpr, V: tl.constexpr,
              BI: tl.constexpr, BJ: tl.constexpr):
    """dL/dq for one block of queries, as in part 3. DH: (T, V), dL/dh; OUT: (T, K).

        dL/dq_t = sum_j dz_tj k_j / r,   dz = 2 z m (dh_t . v_j)

    The loop is the same as in forward_kernel.
    """
    raise NotImplementedError("Exercise 4.5: the gradient of the queries")
