"""Part 4, solved plainly. screening_triton.py is the fast one."""
import triton
import triton.language as tl


@triton.jit
def load_rows(X, first, end, N: tl.constexpr, D: tl.constexpr):
    """N rows of a matrix with `end` rows and D columns; zeros past its end."""
    rows = first + tl.arange(0, N)
    at = rows[:, None] * D + tl.arange(0, D)[None, :]
    return tl.load(X + at, mask=(rows < end)[:, None], other=0.0)


@triton.jit
def store_rows(X, x, first, end, N: tl.constexpr, D: tl.constexpr):
    rows = first + tl.arange(0, N)
    at = rows[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(X + at, x, mask=(rows < end)[:, None])


@triton.jit
def store_block(X, x, t0, j0, T, S, BI: tl.constexpr, BJ: tl.constexpr):
    t = t0 + tl.arange(0, BI)[:, None]
    j = j0 + tl.arange(0, BJ)[None, :]
    tl.store(X + t * S + j, x, mask=(t < T) & (j < S))


@triton.jit
def alpha_and_mask(s, i, j, W, R):
    """z, which is Trim before its square, and Softmask."""
    w = tl.load(W)
    z = tl.maximum(1 - (1 - s) / tl.load(R), 0.0)
    d = j[None, :] - i[:, None]
    m = 0.5 * (tl.cos(3.141592653589793 * (d.to(tl.float32) / w)) + 1)
    return z, tl.where((d <= 0) & (d > -w), m, 0.0)


@triton.jit
def similarity_kernel(Q, K_, OUT, T, S, K: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr):
    t0, j0 = tl.program_id(0) * BI, tl.program_id(1) * BJ
    q, k = load_rows(Q, t0, T, BI, K), load_rows(K_, j0, S, BJ, K)
    s = tl.dot(q, tl.trans(k), input_precision="ieee")
    store_block(OUT, s, t0, j0, T, S, BI, BJ)


@triton.jit
def relevance_kernel(Q, K_, W, R, OUT, i0, T, S, K: tl.constexpr, BI: tl.constexpr,
                     BJ: tl.constexpr):
    t0, j0 = tl.program_id(0) * BI, tl.program_id(1) * BJ
    q, k = load_rows(Q, t0, T, BI, K), load_rows(K_, j0, S, BJ, K)
    s = tl.dot(q, tl.trans(k), input_precision="ieee")
    z, m = alpha_and_mask(s, i0 + t0 + tl.arange(0, BI), j0 + tl.arange(0, BJ), W, R)
    store_block(OUT, z * z * m, t0, j0, T, S, BI, BJ)


@triton.jit
def keys_in_sight(W, i, i_last, S, BJ: tl.constexpr):
    """lo and hi for the queries at positions i .. i_last."""
    reach = tl.minimum(tl.ceil(tl.load(W)), 1073741824.0).to(tl.int32) - 1
    first, end = tl.maximum(i - reach, 0), tl.minimum(S, i_last + 1)
    lo = first // BJ * BJ
    return lo, tl.where(first < end, end, lo)


@triton.jit
def bounds_kernel(W, OUT, i0, T, S, BI: tl.constexpr, BJ: tl.constexpr):
    n = tl.program_id(0)
    t0 = n * BI
    lo, hi = keys_in_sight(W, i0 + t0, i0 + tl.minimum(t0 + BI, T) - 1, S, BJ)
    tl.store(OUT + 2 * n, lo)
    tl.store(OUT + 2 * n + 1, hi)


@triton.jit
def forward_kernel(Q, K_, V_, W, R, OUT, i0, T, S, K: tl.constexpr, V: tl.constexpr,
                   BI: tl.constexpr, BJ: tl.constexpr):
    t0 = tl.program_id(0) * BI
    q, i = load_rows(Q, t0, T, BI, K), i0 + t0 + tl.arange(0, BI)
    lo, hi = keys_in_sight(W, i0 + t0, i0 + tl.minimum(t0 + BI, T) - 1, S, BJ)
    h = tl.zeros([BI, V], tl.float32)
    for j0 in range(lo, hi, BJ):
        k, v = load_rows(K_, j0, S, BJ, K), load_rows(V_, j0, S, BJ, V)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        z, m = alpha_and_mask(s, i, j0 + tl.arange(0, BJ), W, R)
        h += tl.dot(z * z * m, v, input_precision="ieee")
    store_rows(OUT, h, t0, T, BI, V)


@triton.jit
def dq_kernel(Q, K_, V_, W, R, DH, OUT, i0, T, S, K: tl.constexpr, V: tl.constexpr,
              BI: tl.constexpr, BJ: tl.constexpr):
    t0 = tl.program_id(0) * BI
    q, dh = load_rows(Q, t0, T, BI, K), load_rows(DH, t0, T, BI, V)
    i = i0 + t0 + tl.arange(0, BI)
    lo, hi = keys_in_sight(W, i0 + t0, i0 + tl.minimum(t0 + BI, T) - 1, S, BJ)
    dq = tl.zeros([BI, K], tl.float32)
    for j0 in range(lo, hi, BJ):
        k, v = load_rows(K_, j0, S, BJ, K), load_rows(V_, j0, S, BJ, V)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        z, m = alpha_and_mask(s, i, j0 + tl.arange(0, BJ), W, R)
        dz = 2 * z * m * tl.dot(dh, tl.trans(v), input_precision="ieee")
        dq += tl.dot(dz, k, input_precision="ieee")
    store_rows(OUT, dq / tl.load(R), t0, T, BI, K)
