"""The fused twin of `multiscreen.screen` (Eqs. 8 to 12): one Triton kernel forward, two backward, O(T w) time and O(T) memory.

Why is there no softmax machinery? FlashAttention must carry a running maximum and a running sum through the keys of a
row, rescale what it has summed whenever the maximum moves, and keep both for backward, because each weight depends on
all keys of its row. A relevance depends on one query and one key. So a program takes a block of queries, walks over the
key blocks inside the window in any order and adds alpha_d v; and backward makes alpha_d again from q and k alone.

A pair is cheap. Softmask is cos^2(theta d), theta = pi/(2w), so Eq. 11 is alpha_d = y^2 with y = z c, where
z = max(s/r + 1 - 1/r, 0) and c = cos(theta (i - j)) = cos a cos b + sin a sin b, a and b counted from the origin of the
key block: two multiply-adds, no cosine per pair. w = inf is theta = 0, nothing special. For N pairs and dh = dL/dh:

    forward       y = z c                        h_i  = sum_j y^2 v_j
    both kernels  t = y (dh_i . v_j)             dz   = 2 t c
    dq kernel     dq_i = sum_j dz k_j / r        dr   = sum dz (1 - z) / r
                  dw = (2 theta / w) sum t z (i - j) sin(theta (i - j))
    dk/dv kernel  dk_j = sum_i dz q_i / r        dv_j = sum_i y^2 dh_i

Operations in matrix products, each counted once however many parts its operands have: 2 N (K + V) forward,
2 N (2K + V) dq, 2 N (2K + 2V) dk/dv. Bytes: q, k, v in and h out, once; a block of keys is read again for each block
of queries that sees it, from the cache if the window is narrow. (Backward, both kernels: 2.7 times the bytes. Splitting q and
k, see below, is 0.7 times the bytes more forward, 0.8 backward.) With T = 2^17, K = 16, V = 64:

    one tile           N        operations forward    bytes
    dense, causal      T^2/2    1.4e12                64 GiB for T x T relevances in float32 (`screen`)
    w = 256            T w      5.4e9                 48 MiB: q, k in float32, v and h in bfloat16

Precision. With float32 v all products are float32 (three tf32 products each). With 16-bit v, q and k still matter to more
digits: alpha_d feels 2/r times an error of s, and MiPE's part of dL/dw is a small difference of sums that grow with
the position. So q and k in float32 are split, q = q_hi + q_lo, each of v's dtype (together 16 bits if bfloat16, 22 if
float16), and s = q_hi k_hi + q_hi k_lo + q_lo k_hi. The two backward kernels round the same dz to the same 16 bits and
multiply it with q and k in full (bfloat16 takes three parts for that): the sums still cancel as they must.

No atomics: dr and dw leave the kernel as one partial sum for each block of queries, and PyTorch adds them. Gradients
are bitwise reproducible. Loop bounds are computed on the device from w; the widest tiles start first.
"""
import os
from types import SimpleNamespace

import torch

try:
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import libdevice
    jit = triton.jit(do_not_specialize=["i0", "B", "H", "T", "S"])
except ImportError:                                    # macOS, Windows: the file still imports, `available` says why not
    triton, jit, tl = None, lambda f: f, SimpleNamespace(constexpr=lambda x: x)

INTERPRET = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


def impossible(*sizes):
    """None if the kernel takes keys and values of these sizes, otherwise the reason in one line."""
    for size in sizes:
        if size < 16 or size & (size - 1):             # a matrix product on the GPU has no smaller side
            return f"keys or values have {size} dimensions: the kernel takes powers of two from 16 on"


def available(device="cuda"):
    """None if `screen` can run on tensors of this device, otherwise the reason in one line."""
    if triton is None:
        return "triton is not installed (it is made for Linux: pip install triton)"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None
    if torch.device(device).type != "cuda":
        return f"the kernel runs on a CUDA GPU, not on {torch.device(device).type} (TRITON_INTERPRET=1 emulates it there, slowly)"
    if not torch.cuda.is_available():
        return "there is no CUDA GPU"
    if torch.version.hip or torch.cuda.get_device_capability(device) < (8, 0):
        return "the kernel needs an NVIDIA GPU of compute capability 8.0 or later"
    return None


# ------------------------------------------------------------------------------------------ shared by the three kernels

@jit
def _dot(a, b, acc):
    if INTERPRET:                                      # it would multiply the bit patterns of bfloat16
        return acc + tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b, acc, input_precision="tf32x3")


@jit
def _cast(x, dtype: tl.constexpr):
    if INTERPRET and dtype == tl.bfloat16:             # it would cut the digits off; the GPU rounds to nearest, ties to even
        bits = x.to(tl.int32, bitcast=True)
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    return x.to(dtype)


@jit
def _load(ptr, first, stride, end, N: tl.constexpr, D: tl.constexpr, EDGE: tl.constexpr):
    """Rows first .. first + N - 1 of a matrix (end, D); zeros past its end."""
    n = tl.arange(0, N)
    at = ptr + tl.cast(first, tl.int64) * stride + (n.to(tl.int64) * stride)[:, None] + tl.arange(0, D)[None, :]
    if EDGE:
        return tl.load(at, mask=(first + n < end)[:, None], other=0.0)
    return tl.load(at)


@jit
def _store(ptr, x, first, stride, end, N: tl.constexpr, D: tl.constexpr):
    n = tl.arange(0, N)
    at = ptr + tl.cast(first, tl.int64) * stride + (n.to(tl.int64) * stride)[:, None] + tl.arange(0, D)[None, :]
    tl.store(at, _cast(x, ptr.dtype.element_ty), mask=(first + n < end)[:, None])


@jit
def _split(X, OUT, x_sb, x_sh, x_st, size, H, T, N: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr):
    """N rows of X as PARTS parts, each the rounding of what those before it left; one part in OUT has `size` numbers."""
    n = (T + N - 1) // N
    tile = tl.program_id(0).to(tl.int64) // n                            # b H + h
    t = tl.program_id(0) % n * N
    x = _load(X + tile // H * x_sb + tile % H * x_sh, t, x_st, T, N, D, True).to(tl.float32)
    for m in tl.static_range(PARTS):
        _store(OUT + m * tl.cast(size, tl.int64) + tile * T * D, x, t, D, T, N, D)
        x -= _cast(x, OUT.dtype.element_ty).to(tl.float32)


@jit
def _blocks(first, end, inner_first, inner_end, N: tl.constexpr):
    """Cover first .. end - 1 with blocks of N. Returns lo, a, b, n: the blocks that start in [a, b) lie within
    inner_first .. inner_end - 1 and need no mask; n blocks do, from lo on and from b on."""
    lo = tl.maximum(first, 0) // N * N
    hi = tl.maximum((tl.maximum(end, 0) + N - 1) // N * N, lo)
    a = tl.minimum(tl.maximum((tl.maximum(inner_first, 0) + N - 1) // N * N, lo), hi)
    b = tl.minimum(tl.maximum(tl.maximum(inner_end, 0) // N * N, a), hi)
    return lo, a, b, (a - lo + hi - b) // N


@jit
def _cos_sin(x, w, FAR: tl.constexpr):
    """cos and sin of theta x = pi x / (2 w), for whole numbers x in float32; FAR if theta x may be many turns.

    x / (4 w) turns are reduced to half a turn. 1/(4 w) is split in two, so that its product with x has no error before
    whole turns are taken off: a window of 2 makes 8 turns in a block of 64.
    """
    turn = 0.25 / w
    if FAR:
        coarse = turn.to(tl.bfloat16).to(tl.float32)
        turns = x * coarse
        angle = 6.2831853071795865 * (turns - tl.floor(turns + 0.5) + x * (turn - coarse))
    else:
        angle = x * (6.2831853071795865 * turn)
    if INTERPRET:
        return tl.cos(angle), tl.sin(angle)
    return libdevice.fast_cosf(angle), libdevice.fast_sinf(angle)      # one instruction each, wrong by at most 2^-20.5 here (PTX manual)


@jit
def _relevance(a, a_lo, b, b_lo, x, cos_b, sin_b, w, slope, d, reach, PARTS: tl.constexpr, EDGE: tl.constexpr):
    """Eqs. 8 to 11 for a block of rows a (queries or keys) and columns b (the others): alpha_d = (z c)^2.

    x: the distance of each row from the origin of the columns, whose cosines are cos_b; d = i - j. Returns z, c and
    sin(theta d), up to the sign of d. c is 0 in the future and outside the window.
    """
    FROM: tl.constexpr = -1.0 if a.dtype == tl.float32 else 0.0          # s - 1, for nothing; 16 bits have rounded s more than this saves
    s = tl.full([a.shape[0], b.shape[0]], FROM, tl.float32)
    if PARTS > 1:
        s = _dot(a, tl.trans(b_lo), _dot(a_lo, tl.trans(b), s))
    s = _dot(a, tl.trans(b), s)
    z = tl.maximum(s * slope + (1 - slope * (1 + FROM)), 0.0, propagate_nan=tl.PropagateNan.ALL)
    cos_a, sin_a = _cos_sin(x.to(tl.float32), w, EDGE)
    c = cos_a[:, None] * cos_b[None, :] + sin_a[:, None] * sin_b[None, :]
    sin = sin_a[:, None] * cos_b[None, :] - cos_a[:, None] * sin_b[None, :]
    if EDGE:
        c = tl.where(d >= 0, c, 0.0)
        c = tl.where(d <= reach, c, 0.0)
    return z, c, sin


@jit
def _tile(ORDER, W, R, n, B):
    """What this program works on: the tile h (widest first), the sequence b, the block m of n; and h's w, 1/r and reach."""
    pid = tl.program_id(0)
    h = tl.load(ORDER + pid // (B * n)).to(tl.int64)
    w = tl.load(W + h).to(tl.float32)
    reach = tl.minimum(tl.ceil(w), 1073741824.0).to(tl.int32) - 1         # the largest distance inside the window
    r = tl.load(R + h).to(tl.float32)
    slope = tl.div_rn(1.0, r)
    slope = tl.where(slope * r - 1 < 0, slope * 1.00000012, slope)        # rounded up: z is exactly 0 at the threshold, s - 1 = -r
    return h, (pid % B).to(tl.int64), pid % (B * n) // B, w, slope, reach


# -------------------------------------------------------------------------------------------------------------- forward

@jit
def _forward_block(acc, q, q_lo, K, V, k_part, k_st, v_st, S, p, j, w, slope, reach, cos_j, sin_j, BJ: tl.constexpr, D_K: tl.constexpr,
                   D_V: tl.constexpr, PARTS: tl.constexpr, EDGE: tl.constexpr):
    k = _load(K, j, k_st, S, BJ, D_K, EDGE)
    k_lo = _load(K + k_part, j, k_st, S, BJ, D_K, EDGE) if PARTS > 1 else k
    v = _load(V, j, v_st, S, BJ, D_V, EDGE)
    d = p[:, None] - (j + tl.arange(0, BJ))[None, :]
    z, c, _ = _relevance(q, q_lo, k, k_lo, p - j, cos_j, sin_j, w, slope, d, reach, PARTS, EDGE)
    y = z * c
    return _dot(_cast(y * y, v.dtype), v, acc)


@jit
def _forward(Q, K, V, W, R, ORDER, OUT, q_part, q_sb, q_sh, q_st, k_part, k_sb, k_sh, k_st, v_sb, v_sh, v_st, o_sb, o_sh, o_st,
             i0, B, T, S, BI: tl.constexpr, BJ: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr, PARTS: tl.constexpr):
    n = (T + BI - 1) // BI
    h, b, m, w, slope, reach = _tile(ORDER, W, R, n, B)
    t = (n - 1 - m) * BI                               # the last queries see the most keys: they start first
    K, V = K + b * k_sb + h * k_sh, V + b * v_sb + h * v_sh
    q = _load(Q + b * q_sb + h * q_sh, t, q_st, T, BI, D_K, True)
    q_lo = _load(Q + q_part + b * q_sb + h * q_sh, t, q_st, T, BI, D_K, True) if PARTS > 1 else q
    p0 = i0 + t
    p = p0 + tl.arange(0, BI)
    cos_j, sin_j = _cos_sin(tl.arange(0, BJ).to(tl.float32), w, True)
    lo, first, end, edges = _blocks(p0 - reach, tl.minimum(S, tl.minimum(i0 + T, p0 + BI)), p0 + BI - 1 - reach, tl.minimum(S, p0 + 1), BJ)
    acc = tl.zeros([BI, D_V], tl.float32)
    for e in range(edges):
        j = lo + e * BJ
        j = tl.where(j < first, j, j + end - first)
        acc = _forward_block(acc, q, q_lo, K, V, k_part, k_st, v_st, S, p, j, w, slope, reach, cos_j, sin_j, BJ, D_K, D_V, PARTS, True)
    for j in range(first, end, BJ):
        acc = _forward_block(acc, q, q_lo, K, V, k_part, k_st, v_st, S, p, j, w, slope, reach, cos_j, sin_j, BJ, D_K, D_V, PARTS, False)
    _store(OUT + b * o_sb + h * o_sh, acc, t, o_st, T, BI, D_V)


# ------------------------------------------------------------------------------------------------------------- backward

@jit
def _dq_block(dq, dr, dw, q, q_lo, dh, K, V, k_part, k_st, v_st, S, p, j, w, slope, reach, cos_j, sin_j, BJ: tl.constexpr, D_K: tl.constexpr,
              D_V: tl.constexpr, PARTS: tl.constexpr, EDGE: tl.constexpr):
    k = _load(K, j, k_st, S, BJ, D_K, EDGE)
    k_lo = _load(K + k_part, j, k_st, S, BJ, D_K, EDGE) if PARTS > 1 else k
    v = _load(V, j, v_st, S, BJ, D_V, EDGE)
    d = p[:, None] - (j + tl.arange(0, BJ))[None, :]
    z, c, sin = _relevance(q, q_lo, k, k_lo, p - j, cos_j, sin_j, w, slope, d, reach, PARTS, EDGE)
    t = _dot(dh, tl.trans(v), tl.zeros([dh.shape[0], BJ], tl.float32)) * (z * c)
    half_dz = t * c
    dr += tl.sum(half_dz - half_dz * z, 1)
    dw += tl.sum(t * z * sin * d.to(tl.float32), 1)
    dz = _cast(half_dz, k.dtype)
    dq = _dot(dz, k, dq)
    if PARTS > 1:
        dq = _dot(dz, k_lo, dq)
    if PARTS > 2:
        dq = _dot(dz, _load(K + 2 * tl.cast(k_part, tl.int64), j, k_st, S, BJ, D_K, EDGE), dq)
    return dq, dr, dw


@jit
def _backward_dq(Q, K, V, W, R, ORDER, DH, DQ, SUMS, q_part, q_sb, q_sh, q_st, k_part, k_sb, k_sh, k_st, v_sb, v_sh, v_st, o_sb, o_sh, o_st,
                 i0, B, T, S, BI: tl.constexpr, BJ: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr, PARTS: tl.constexpr):
    n = (T + BI - 1) // BI
    h, b, m, w, slope, reach = _tile(ORDER, W, R, n, B)
    H = tl.num_programs(0) // (B * n)
    t = (n - 1 - m) * BI
    K, V = K + b * k_sb + h * k_sh, V + b * v_sb + h * v_sh
    q = _load(Q + b * q_sb + h * q_sh, t, q_st, T, BI, D_K, True)
    q_lo = _load(Q + q_part + b * q_sb + h * q_sh, t, q_st, T, BI, D_K, True) if PARTS > 1 else q
    dh = _load(DH + b * o_sb + h * o_sh, t, o_st, T, BI, D_V, True)
    p0 = i0 + t
    p = p0 + tl.arange(0, BI)
    cos_j, sin_j = _cos_sin(tl.arange(0, BJ).to(tl.float32), w, True)
    lo, first, end, edges = _blocks(p0 - reach, tl.minimum(S, tl.minimum(i0 + T, p0 + BI)), p0 + BI - 1 - reach, tl.minimum(S, p0 + 1), BJ)
    dq = tl.zeros([BI, D_K], tl.float32)
    dr = tl.zeros([BI], tl.float32)
    dw = tl.zeros([BI], tl.float32)
    for e in range(edges):
        j = lo + e * BJ
        j = tl.where(j < first, j, j + end - first)
        dq, dr, dw = _dq_block(dq, dr, dw, q, q_lo, dh, K, V, k_part, k_st, v_st, S, p, j, w, slope, reach, cos_j, sin_j, BJ, D_K, D_V, PARTS, True)
    for j in range(first, end, BJ):
        dq, dr, dw = _dq_block(dq, dr, dw, q, q_lo, dh, K, V, k_part, k_st, v_st, S, p, j, w, slope, reach, cos_j, sin_j, BJ, D_K, D_V, PARTS, False)
    _store(DQ + (b * H + h) * T * D_K, dq * (2 * slope), t, D_K, T, BI, D_K)
    part = SUMS + (h * n + m) * B + b                                    # (2, H, n, B)
    tl.store(part, tl.sum(dr, 0) * (2 * slope))
    tl.store(part + H.to(tl.int64) * n * B, tl.sum(dw, 0) * (3.14159265358979324 / (w * w)))


@jit
def _dkv_block(dk, dv, k, k_lo, v, Q, DH, q_part, q_st, o_st, T, i0, p, t, w, slope, reach, cos_i, sin_i, BI: tl.constexpr, D_K: tl.constexpr,
               D_V: tl.constexpr, PARTS: tl.constexpr, EDGE: tl.constexpr):
    q = _load(Q, t, q_st, T, BI, D_K, EDGE)
    q_lo = _load(Q + q_part, t, q_st, T, BI, D_K, EDGE) if PARTS > 1 else q
    dh = _load(DH, t, o_st, T, BI, D_V, EDGE)
    d = (i0 + t + tl.arange(0, BI))[None, :] - p[:, None]
    z, c, _ = _relevance(k, k_lo, q, q_lo, p - (i0 + t), cos_i, sin_i, w, slope, d, reach, PARTS, EDGE)
    y = z * c
    dz = _cast(_dot(v, tl.trans(dh), tl.zeros([v.shape[0], BI], tl.float32)) * y * c, k.dtype)
    dv = _dot(_cast(y * y, v.dtype), dh, dv)
    dk = _dot(dz, q, dk)
    if PARTS > 1:
        dk = _dot(dz, q_lo, dk)
    if PARTS > 2:
        dk = _dot(dz, _load(Q + 2 * tl.cast(q_part, tl.int64), t, q_st, T, BI, D_K, EDGE), dk)
    return dk, dv


@jit
def _backward_dkv(Q, K, V, W, R, ORDER, DH, DK, DV, q_part, q_sb, q_sh, q_st, k_part, k_sb, k_sh, k_st, v_sb, v_sh, v_st, o_sb, o_sh, o_st,
                  i0, B, T, S, BI: tl.constexpr, BJ: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr, PARTS: tl.constexpr):
    n = (S + BJ - 1) // BJ
    h, b, m, w, slope, reach = _tile(ORDER, W, R, n, B)    # the first keys are seen by the most queries: they start first
    H = tl.num_programs(0) // (B * n)
    j = m * BJ
    Q, DH = Q + b * q_sb + h * q_sh, DH + b * o_sb + h * o_sh
    k = _load(K + b * k_sb + h * k_sh, j, k_st, S, BJ, D_K, True)
    k_lo = _load(K + k_part + b * k_sb + h * k_sh, j, k_st, S, BJ, D_K, True) if PARTS > 1 else k
    v = _load(V + b * v_sb + h * v_sh, j, v_st, S, BJ, D_V, True)
    p = j + tl.arange(0, BJ)
    cos_i, sin_i = _cos_sin(tl.arange(0, BI).to(tl.float32), w, True)
    lo, first, end, edges = _blocks(j - i0, tl.minimum(T, tl.minimum(S, j + BJ) + reach - i0), j + BJ - 1 - i0, tl.minimum(T, j + reach + 1 - i0), BI)
    dk = tl.zeros([BJ, D_K], tl.float32)
    dv = tl.zeros([BJ, D_V], tl.float32)
    for e in range(edges):
        t = lo + e * BI
        t = tl.where(t < first, t, t + end - first)
        dk, dv = _dkv_block(dk, dv, k, k_lo, v, Q, DH, q_part, q_st, o_st, T, i0, p, t, w, slope, reach, cos_i, sin_i, BI, D_K, D_V, PARTS, True)
    for t in range(first, end, BI):
        dk, dv = _dkv_block(dk, dv, k, k_lo, v, Q, DH, q_part, q_st, o_st, T, i0, p, t, w, slope, reach, cos_i, sin_i, BI, D_K, D_V, PARTS, False)
    _store(DK + (b * H + h) * S * D_K, dk * (2 * slope), j, D_K, S, BJ, D_K)
    _store(DV + (b * H + h) * S * D_V, dv, j, D_V, S, BJ, D_V)


# -------------------------------------------------------------------------------------------------------- from PyTorch

KERNELS = {"forward": _forward, "dq": _backward_dq, "dkv": _backward_dkv}


def config(kernel, exact, D_K, D_V, capability):
    """(queries in a block, keys in a block, warps, stages) of a kernel. exact: float32 values, hence float32 products.

    The rows of a matrix product (queries; keys in dkv) must be at least 16 x warps, or warps do the same work twice.
    Chosen for d_K = 16, d_V = 64: no spills, see experiments/kernel_compile.py. Larger ones take the smallest blocks: right, not tuned, some spill.
    """
    hopper, dkv = capability >= (9, 0), kernel == "dkv"
    if D_K > 16 or D_V > 64:
        return 16, 16, 1, 1
    if exact:
        return ((16, 64, 4, 1) if dkv else (64, 32, 4, 1)) if hopper else ((16, 16, 1, 1) if dkv else (32, 32, 2, 1))
    return (32 if dkv and not hopper else 64), 64, 4, 2


def parts(qk, v, backward):
    """How many parts q and k of dtype qk are split into, beside values of dtype v."""
    if v == torch.float32 or qk == v:
        return 1
    return 3 if backward and v == torch.bfloat16 else 2


def operands(q, k, v, backward):
    """q, k and v as the kernels read them, q and k with a first axis for the parts that they are split into."""
    n = parts(q.dtype if q.dtype == k.dtype else torch.float32, v.dtype, backward)

    if n == 1:
        return rows(q.to(v.dtype))[None], rows(k.to(v.dtype))[None], rows(v)
    return split(rows(q), v.dtype, n), split(rows(k), v.dtype, n), rows(v)


def split(x, dtype, n):
    """x (B, H, T, D) as a sum of n tensors of that dtype (n, B, H, T, D), the largest first."""
    B, H, T, D = x.shape
    y = torch.empty(n, B, H, T, D, dtype=dtype, device=x.device)
    if y.numel():
        with torch.cuda.device_of(x):
            _split[(-(-T // 64) * B * H,)](x, y, *x.stride()[:3], y.stride(0), H, T, N=64, D=D, PARTS=n)
    return y


def rows(x):
    """x, with the last dimension contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def blocks_for(kernel, q, v):
    capability = torch.cuda.get_device_capability(q.device) if q.is_cuda else (9, 0)
    return config(kernel, v.dtype == torch.float32, q.shape[-1], v.shape[-1], capability)


def launch(kernel, n, q, k, v, w, r, order, o, outputs, i0, blocks):
    """Run n programs for each tile of each sequence. o: h, or its gradient; outputs: what only this kernel writes."""
    (n_parts, B, H, T, D_K), S = q.shape, k.shape[3]
    BI, BJ, warps, stages = blocks
    with torch.cuda.device_of(q):
        kernel[(B * H * n,)](q, k, v, w, r, order, o, *outputs, *q.stride()[:4], *k.stride()[:4], *v.stride()[:3], *o.stride()[:3],
                             i0, B, T, S, BI=BI, BJ=BJ, D_K=D_K, D_V=v.shape[-1], PARTS=n_parts, num_warps=warps, num_stages=stages)


@torch.library.custom_op("multiscreen::screen", mutates_args=())
def _screen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, w: torch.Tensor, r: torch.Tensor, order: torch.Tensor, i0: int) -> torch.Tensor:
    reason = available(q.device)
    if reason:
        raise RuntimeError(reason)
    h = _screen_shape(q, k, v, w, r, order, i0)
    blocks = blocks_for("forward", q, v)
    if h.numel():
        launch(_forward, -(-q.shape[2] // blocks[0]), *operands(q, k, v, False), w.contiguous(), r.contiguous(), order, h, (), i0, blocks)
    return h


@_screen.register_fake
def _screen_shape(q, k, v, w, r, order, i0):
    B, H, T, _ = q.shape
    return v.new_empty(B, T, H, v.shape[-1]).transpose(1, 2)       # as the output projection wants it


@torch.library.custom_op("multiscreen::screen_backward", mutates_args=())
def _screen_backward(dh: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, w: torch.Tensor, r: torch.Tensor,
                     order: torch.Tensor, i0: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    (B, H, T, _), S = q.shape, k.shape[2]
    dq, dk, dv, dw, dr = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v, w, r))
    inputs = *operands(q, k, v, True), w.contiguous(), r.contiguous(), order, rows(dh.to(v.dtype))
    blocks = blocks_for("dq", q, v)
    n = -(-T // blocks[0])
    sums = torch.empty(2, H, n, B, device=q.device)
    if dq.numel():
        launch(_backward_dq, n, *inputs, (dq, sums), i0, blocks)
    blocks = blocks_for("dkv", q, v)
    if dk.numel():
        launch(_backward_dkv, -(-S // blocks[1]), *inputs, (dk, dv), i0, blocks)
    dr.copy_(sums[0].sum((1, 2)))
    dw.copy_(sums[1].sum((1, 2)))
    return dq, dk, dv, dw, dr


@_screen_backward.register_fake
def _(dh, q, k, v, w, r, order, i0):
    return tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v, w, r))


def _save(ctx, inputs, output):
    *tensors, ctx.i0 = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx, dh):
    return *_screen_backward(dh, *ctx.saved_tensors, ctx.i0), None, None


_screen.register_autograd(_gradients, setup_context=_save)


def screen(q, k, v, w, r, i0=0):
    """`multiscreen.screen` (Eq. 12): same arguments, same numbers. float32, float16 or bfloat16; differentiable once.

    The sizes K and V must be powers of two from 16 on. Nothing is broadcast: a ValueError says which shapes do not fit.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise TypeError(f"{name} is {x.dtype}: the kernel takes float32, float16 and bfloat16")
    if reason := impossible(q.shape[-1], v.shape[-1]):
        raise ValueError(reason)
    (B, H, T, K), S, V = q.shape, k.shape[2], v.shape[3]
    for name, x, shape in (("k", k, (B, H, S, K)), ("v", v, (B, H, S, V)), ("w", w, (H,)), ("r", r, (H,))):
        if x.shape != shape:
            raise ValueError(f"{name} has the shape {tuple(x.shape)}; with q {tuple(q.shape)} it must be {shape}")
    return _screen(q, k, v, w, r, w.detach().argsort(descending=True), i0)       # the widest tiles start first
