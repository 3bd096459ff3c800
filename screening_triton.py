"""Screening (Eqs. 8 to 12) as Triton kernels, forward and backward: O(T w) time, O(T) memory.

`screen` is the twin of `multiscreen.screen`. Read that first; here is what differs.

1. No softmax machinery. In attention a weight depends on every key of its row, so FlashAttention
   carries a running maximum and a running sum, and saves their log-sum-exp for backward. A
   relevance depends on just one query and one key. So a program takes a block of queries, visits
   the blocks of keys in their windows in any order, and adds up alpha_d v. Backward recomputes
   alpha_d from q and k.

2. No cosine per pair. Softmask is a squared cosine, so alpha_d is a square:

       alpha_d = y^2,   y = z c,   z = max(1 - (1 - s) / r, 0),   c = cos(theta d),
       theta = pi / (2 w),   d = i - j

   and cos(theta (i - j)) = cos(theta i) cos(theta j) + sin(theta i) sin(theta j), two multiply-adds
   per pair. i and j are counted from the block's first key, so cos(theta j) and sin(theta j) are
   the same for all blocks. An infinite window is no special case: theta is 0.

3. Gradients. Let dh = dL/dh. For each pair

       dy   = 2 y (dh_i . v_j)      dz   = dy c
       dq_i = sum_j dz k_j / r      dk_j = sum_i dz q_i / r      dv_j = sum_i y^2 dh_i
       dr   = sum dz (1 - z) / r    dw   = (theta / w) sum dy z d sin(theta d)

   One kernel computes dq, dw and dr for a block of queries, the other dk and dv for a block of
   keys. w also sets MiPE's angles (Eqs. 6, 7); autograd computes that part of dL/dw from dq and dk.

4. Precision. With float32 values, all products are float32, each made of three tf32 products.
   With 16-bit values, q and k still need more digits: an error in s is 2/r times as large in
   alpha_d, and r may be as small as 1e-3. So float32 q and k are split into parts:

       float16, 22 bits:   q = q0 + q1         s = q0 k0 + (q0 k1 + q1 k0)
       bfloat16, 24 bits:  q = q0 + q1 + q2    s = q0 k0 + (q0 k1 + q1 k0)
                                                         + (q0 k2 + q1 k1 + q2 k0)

   The forward pass splits into float16 parts, because unit vectors fit its range. The backward pass
   splits into parts of v's dtype, because dz needs the range of bfloat16.

   MiPE's part of dL/dw is a small difference of large sums. They cancel if both backward kernels
   use the same dz, so both round it to the same 16 bits, and multiply it by all parts of q and k.
   They add up s and c in different orders, so in about one pair in ten thousand their dz differ by
   one rounding. With an Ampere GPU's products, dL/ds_w was off by up to 1e-2 (w = 3, T = 2,048).

5. No atomics. dw and dr leave the kernel as one number per query, and PyTorch adds them up, so
   two runs give the same bits. The GPU computes loop bounds from w; the widest tiles start first.

6. Decoding. With up to 16 queries, several programs share a tile's keys, and PyTorch adds up
   their sums. The cache is neither copied nor split into parts: q and k stay float32.

Names
B, H, T, S           as in multiscreen.py; D_K and D_V are K and V there
Q, q                 a tensor in memory; a block of its rows in registers
BI x BJ              queries x keys of a block of pairs; t0, j0: its first query, its first key
i = i0 + t           position of query t, counted from the first key
reach = ceil(w) - 1  the largest d inside the window
ORDER                the tiles, the widest window first
k_b, k_h, k_t        strides of K: from one sequence to the next, from tile to tile, key to key

In memory the parts of q and k are (B, H, T, part, D_K); h, dh and dv are (B, T, H, D_V), as the
projections write and read them. v may have any strides, and so may k if it is in one part.
"""
import os
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.autograd import forward_ad

try:
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import libdevice

    # One compiled kernel for all sizes: by itself Triton specializes on 1 and on multiples of 16.
    jit = triton.jit(do_not_specialize=["i0", "B", "H", "T", "S"])
except ImportError:
    # On macOS and Windows the file can still be imported; `available` says why it cannot run.
    triton = None

    def jit(x):
        return x

    tl = SimpleNamespace(constexpr=jit)

INTERPRET = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
PI = tl.constexpr(3.14159265358979324)


def available(device="cuda"):
    """None if `screen` can run on tensors of this device, otherwise the reason in one line."""
    if triton is None:
        return "triton is not installed (it is made for Linux: pip install triton)"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None
    kind = torch.device(device).type
    if kind != "cuda":
        return (f"the kernel runs on a CUDA GPU, not on {kind} "
                "(TRITON_INTERPRET=1 emulates it there, slowly)")
    if not torch.cuda.is_available():
        return "there is no CUDA GPU"
    if torch.version.hip or torch.cuda.get_device_capability(device) < (8, 0):
        return "the kernel needs an NVIDIA GPU of compute capability 8.0 or later"


def unsupported_sizes(d_K, d_V):
    """None if the kernel takes keys and values of these sizes, otherwise the reason in one line."""
    for dims in (d_K, d_V):
        if dims < 16 or dims & (dims - 1):
            return f"keys or values have {dims} dimensions: the kernel needs powers of two >= 16"


@jit
def _dot(a, b, acc):
    """acc + a b. A float32 product is made of three tf32 products."""
    # The interpreter stores bfloat16 as 16-bit integers, and would multiply those.
    if INTERPRET:
        return acc + tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b, acc, input_precision="tf32x3")


@jit
def _cast(x, dtype: tl.constexpr):
    """x, rounded to nearest, ties to even."""
    # The interpreter would cut off the last 16 bits. So add half of their range first, or slightly
    # less so that ties go to even, then clear them.
    if INTERPRET and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    return x.to(dtype)


# ------------------------------------------------------------------------------ blocks in memory

@jit
def _pointers(X, first, stride, N: tl.constexpr, D: tl.constexpr):
    """Pointers to rows first .. first + N - 1. Offsets have 64 bits: a tensor may pass 2^31."""
    X += tl.cast(first, tl.int64) * stride
    return X + (tl.arange(0, N).to(tl.int64) * stride)[:, None] + tl.arange(0, D)[None, :]


@jit
def _load(X, first, end, stride, N: tl.constexpr, D: tl.constexpr, MASK: tl.constexpr):
    """N rows of a matrix of `end` rows and D columns. MASK: zeros past its end."""
    at = _pointers(X, first, stride, N, D)
    if MASK:
        return tl.load(at, mask=(first + tl.arange(0, N) < end)[:, None], other=0.0)
    return tl.load(at)


@jit
def _load_parts(X, first, end, stride, N: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr,
                MASK: tl.constexpr):
    """N rows of q or k: a tuple of PARTS blocks, the largest part first. A row holds all parts."""
    x = ()
    for part in tl.static_range(PARTS):
        x += (_load(X + part * D, first, end, stride, N, D, MASK),)
    return x


@jit
def _store(X, x, first, end, stride, N: tl.constexpr, D: tl.constexpr):
    """Write N rows, but none past the matrix's end."""
    mask = (first + tl.arange(0, N) < end)[:, None]
    tl.store(_pointers(X, first, stride, N, D), _cast(x, X.dtype.element_ty), mask=mask)


@jit
def _split(X, OUT, x_b, x_h, x_t, H, T, D: tl.constexpr, N: tl.constexpr, PARTS: tl.constexpr):
    """Write N rows of X as PARTS parts, each of which rounds what the earlier parts leave."""
    n_blocks = tl.cdiv(T, N)
    matrix = tl.program_id(0).to(tl.int64) // n_blocks                            # b H + tile
    t0 = tl.program_id(0) % n_blocks * N
    X += matrix // H * x_b + matrix % H * x_h
    OUT += matrix * T * PARTS * D
    rest = _load(X, t0, T, x_t, N, D, True).to(tl.float32)
    for part in tl.static_range(PARTS):
        _store(OUT + part * D, rest, t0, T, PARTS * D, N, D)
        rest -= _cast(rest, OUT.dtype.element_ty).to(tl.float32)


# ---------------------------------------------------------------------------- one block of pairs

@jit
def _cos_sin(x, w, REDUCE: tl.constexpr):
    """cos and sin of theta x, for whole numbers x. theta is a quarter turn divided by w.

    REDUCE: remove whole turns first. If the window is smaller than a block there may be many.
    """
    rate = 0.25 / w                                    # turns per unit of x
    if REDUCE:
        # The rate is split: coarse has 8 bits, so x * coarse is exact, and what is left is small.
        coarse = rate.to(tl.bfloat16).to(tl.float32)
        turns = x * coarse
        angle = 2 * PI * (turns - tl.floor(turns + 0.5) + x * (rate - coarse))
    else:
        angle = x * (2 * PI * rate)

    # The fast cosine is one instruction and, within half a turn, off by at most 2^-20.5.
    if INTERPRET:
        return tl.cos(angle), tl.sin(angle)
    return libdevice.fast_cosf(angle), libdevice.fast_sinf(angle)


@jit
def _trim_root(held, visited, r_inv):
    """z = max(1 - (1 - s) / r, 0), the root of Trim (Eqs. 8 and 9).

    held, visited: the rows that the program holds and those that it visits, as tuples of parts.
    """
    # z = 1 + r_inv (s - 1). In float32 the sum begins at -1, so that it ends as s - 1 at no cost.
    # With parts it begins at 0, since small terms would be lost beside a 1.
    BEGIN: tl.constexpr = -1.0 if held[0].dtype == tl.float32 else 0.0
    s_plus_begin = tl.full([held[0].shape[0], visited[0].shape[0]], BEGIN, tl.float32)

    # Add up the products (m, n) of parts, the smallest first. With three parts these are (0, 2),
    # (1, 1), (2, 0), then (0, 1), (1, 0), then (0, 0).
    for m_plus_n in tl.static_range(len(held) - 1, -1, -1):
        for m in tl.static_range(m_plus_n + 1):
            s_plus_begin = _dot(held[m], tl.trans(visited[m_plus_n - m]), s_plus_begin)

    z = s_plus_begin * r_inv + (1 - r_inv * (1 + BEGIN))
    # NaN stays NaN: a model that has diverged must not look as if it had found nothing.
    return tl.maximum(z, 0.0, propagate_nan=tl.PropagateNan.ALL)


@jit
def _softmask_root(x, cos_n, sin_n, w, low, high, EDGE: tl.constexpr):
    """c = cos(theta d), the root of Softmask (Eq. 10), and d sin(theta d), where d = x - n.

    x: the positions of the rows held, counted from the first row visited; n: the number of a row
    visited. In _backward_dkv x - n is -d: both results are even in d. cos_n, sin_n: of theta n.
    EDGE: the block may have pairs outside the window; c is 0 unless low <= x - n <= high.
    """
    n = tl.arange(0, cos_n.shape[0])
    # Without EDGE all pairs lie within a window, so theta x is small.
    cos_x, sin_x = _cos_sin(x.to(tl.float32), w, EDGE)
    c = cos_x[:, None] * cos_n[None, :] + sin_x[:, None] * sin_n[None, :]
    if EDGE:
        c = tl.where(x[:, None] - n[None, :] >= low, c, 0.0)
        c = tl.where(x[:, None] - n[None, :] <= high, c, 0.0)
    # Subtracting floats is cheaper than converting integers.
    d = x.to(tl.float32)[:, None] - n.to(tl.float32)[None, :]
    return c, d * (sin_x[:, None] * cos_n[None, :] - cos_x[:, None] * sin_n[None, :])


# -------------------------------------------------------------------- which blocks a program visits

@jit
def _this_program(ORDER, W, R, n_blocks, B):
    """The block, tile and sequence b of this program, and the tile's w, 1/r and reach."""
    # Program numbers run through the sequences fastest, then blocks, then tiles, the widest first.
    pid = tl.program_id(0)
    tile = tl.load(ORDER + pid // (B * n_blocks)).to(tl.int64)
    b = (pid % B).to(tl.int64)
    block = pid % (B * n_blocks) // B

    # An infinite window reaches 2^30 - 1 back: positions have 32 bits.
    w = tl.load(W + tile).to(tl.float32)
    reach = tl.minimum(tl.ceil(w), 1073741824.0).to(tl.int32) - 1

    # 1/r is rounded up by a factor 1 + 2^-23, so z is exactly 0 at the threshold, s - 1 = -r.
    r = tl.load(R + tile).to(tl.float32)
    r_inv = tl.div_rn(1.0, r)
    r_inv = tl.where(r_inv * r - 1 < 0, r_inv * 1.00000012, r_inv)
    return block, tile, b, w, r_inv, reach


@jit
def _in_sight(x, x_end, n_end, low, high, X: tl.constexpr, N: tl.constexpr):
    """The blocks to visit, in two passes of (start, stop, inner, skip).

    The program holds rows x .. x + X - 1, queries or keys, and visits rows n of the other kind in
    blocks of N. Rows end at x_end and n_end. A pair is in sight (o) if low <= x - n <= high; here
    blocks have 4 rows, low = 0 and high = 13:

        n         4    8    12   16   20   24
        x = 20    ...o|oooo|oooo|oooo|o...
            21    ....|oooo|oooo|oooo|oo..
            22    ....|.ooo|oooo|oooo|ooo.
            23    ....|..oo|oooo|oooo|oooo
                  first     inner     |    end
                                      inner_end

    Pass 0 visits the inner blocks, inner .. inner_end, where all pairs are in sight: it needs no
    masks. Pass 1 visits the others, with masks. Its count runs from start to stop - skip without a
    gap: below `inner` the block begins at the count, from there on at count + skip. In the drawing
    skip is 8, and the counts 4, 8, 12 are the blocks 4, 8, 20. EDGE is the number of the pass:
    static_range(2) writes each kernel's loop twice.
    """
    end = tl.minimum(n_end, tl.minimum(x_end, x + X) - low)
    inner = x + X - 1 - high
    inner_end = tl.minimum(n_end, x - low + 1)

    # From rows to whole blocks: 0 <= first <= inner <= inner_end <= end.
    first = tl.maximum(x - high, 0) // N * N
    end = tl.maximum(tl.cdiv(tl.maximum(end, 0), N) * N, first)
    inner = tl.minimum(tl.maximum(tl.cdiv(tl.maximum(inner, 0), N) * N, first), end)
    inner_end = tl.minimum(tl.maximum(tl.maximum(inner_end, 0) // N * N, inner), end)

    skip = inner_end - inner
    return (inner, inner_end, inner, 0), (first, end, inner, skip)


# ----------------------------------------------------------------------------------- the kernels

@jit
def _forward(Q, K, V, W, R, ORDER, OUT, k_b, k_h, k_t, v_b, v_h, v_t, i0, B, H, T, S,
             D_K: tl.constexpr, D_V: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr,
             PARTS: tl.constexpr):
    """h for a block of queries. The last blocks, which see the most keys, start first."""
    n_blocks = tl.cdiv(T, BI)
    block, tile, b, w, r_inv, reach = _this_program(ORDER, W, R, n_blocks, B)
    t0 = (n_blocks - 1 - block) * BI

    # In decoding, the keys are divided among programs. This one has share number program_id(1),
    # which is also its index in OUT's first axis. It counts from the first key of its share, so K,
    # V, i0 and S are shifted. Otherwise there is only one share, and `before` is 0.
    keys_each = tl.cdiv(S, tl.num_programs(1) * BJ) * BJ
    before = tl.program_id(1) * keys_each
    i0 -= before
    S = tl.minimum(S - before, keys_each)

    # Move the pointers to this sequence and tile, and to the share.
    Q += (b * H + tile) * T * PARTS * D_K
    K += b * k_b + tile * k_h + before.to(tl.int64) * k_t
    V += b * v_b + tile * v_h + before.to(tl.int64) * v_t
    OUT += ((tl.program_id(1) * B + b) * T * H + tile) * D_V

    q = _load_parts(Q, t0, T, PARTS * D_K, BI, D_K, PARTS, True)
    i = i0 + t0 + tl.arange(0, BI)
    cos_n, sin_n = _cos_sin(tl.arange(0, BJ).to(tl.float32), w, True)
    passes = _in_sight(i0 + t0, i0 + T, S, 0, reach, BI, BJ)
    h = tl.zeros([BI, D_V], tl.float32)

    # EDGE 0: the inner blocks, without masks. EDGE 1: the others; j0 jumps over the inner ones.
    for EDGE in tl.static_range(2):
        start, stop, inner, skip = passes[EDGE]
        for count in range(start, stop - skip, BJ):
            j0 = count + tl.where(count < inner, 0, skip)
            k = _load_parts(K, j0, S, k_t, BJ, D_K, PARTS, EDGE)
            v = _load(V, j0, S, v_t, BJ, D_V, EDGE)
            z = _trim_root(q, k, r_inv)
            c, _ = _softmask_root(i - j0, cos_n, sin_n, w, 0, reach, EDGE)
            y = z * c
            h = _dot(_cast(y * y, v.dtype), v, h)

    _store(OUT, h, t0, T, H * D_V, BI, D_V)


@jit
def _backward_dq(Q, K, V, W, R, ORDER, DH, DQ, DW, DR, k_b, k_h, k_t, v_b, v_h, v_t,
                 i0, B, H, T, S, D_K: tl.constexpr, D_V: tl.constexpr, BI: tl.constexpr,
                 BJ: tl.constexpr, PARTS: tl.constexpr):
    """dq for a block of queries, and what each query adds to dw and dr."""
    n_blocks = tl.cdiv(T, BI)
    block, tile, b, w, r_inv, reach = _this_program(ORDER, W, R, n_blocks, B)
    t0 = (n_blocks - 1 - block) * BI
    Q += (b * H + tile) * T * PARTS * D_K
    K += b * k_b + tile * k_h
    V += b * v_b + tile * v_h
    DH += (b * T * H + tile) * D_V

    q = _load_parts(Q, t0, T, PARTS * D_K, BI, D_K, PARTS, True)
    dh = _load(DH, t0, T, H * D_V, BI, D_V, True)
    i = i0 + t0 + tl.arange(0, BI)
    cos_n, sin_n = _cos_sin(tl.arange(0, BJ).to(tl.float32), w, True)
    passes = _in_sight(i0 + t0, i0 + T, S, 0, reach, BI, BJ)
    dq = tl.zeros([BI, D_K], tl.float32)
    dw = tl.zeros([BI], tl.float32)
    dr = tl.zeros([BI], tl.float32)

    for EDGE in tl.static_range(2):
        start, stop, inner, skip = passes[EDGE]
        for count in range(start, stop - skip, BJ):
            j0 = count + tl.where(count < inner, 0, skip)
            k = _load_parts(K, j0, S, k_t, BJ, D_K, PARTS, EDGE)
            v = _load(V, j0, S, v_t, BJ, D_V, EDGE)
            z = _trim_root(q, k, r_inv)
            c, d_sin = _softmask_root(i - j0, cos_n, sin_n, w, 0, reach, EDGE)
            # The factor 2 of dy = 2 y (dh . v) is applied after all sums are done.
            half_dy = _dot(dh, tl.trans(v), tl.zeros([BI, BJ], tl.float32)) * (z * c)
            half_dz = half_dy * c
            dw += tl.sum(half_dy * z * d_sin, 1)
            dr += tl.sum(half_dz - half_dz * z, 1)
            for part in tl.static_range(PARTS):
                dq = _dot(_cast(half_dz, k[0].dtype), k[part], dq)

    _store(DQ + (b * H + tile) * T * D_K, dq * (2 * r_inv), t0, T, D_K, BI, D_K)
    t = t0 + tl.arange(0, BI)
    at = (b * H + tile) * T + t
    tl.store(DW + at, dw * (PI / (w * w)), mask=t < T)                          # 2 theta / w
    tl.store(DR + at, dr * (2 * r_inv), mask=t < T)


@jit
def _backward_dkv(Q, K, V, W, R, ORDER, DH, DK, DV, k_b, k_h, k_t, v_b, v_h, v_t,
                  i0, B, H, T, S, D_K: tl.constexpr, D_V: tl.constexpr, BI: tl.constexpr,
                  BJ: tl.constexpr, PARTS: tl.constexpr):
    """dk and dv for a block of keys. The first blocks, seen by the most queries, start first.

    Roles swap: the program holds keys and visits queries, so z, c and y are (keys, queries).
    """
    block, tile, b, w, r_inv, reach = _this_program(ORDER, W, R, tl.cdiv(S, BJ), B)
    j0 = block * BJ
    Q += (b * H + tile) * T * PARTS * D_K
    K += b * k_b + tile * k_h
    V += b * v_b + tile * v_h
    DH += (b * T * H + tile) * D_V

    k = _load_parts(K, j0, S, k_t, BJ, D_K, PARTS, True)
    v = _load(V, j0, S, v_t, BJ, D_V, True)
    j = j0 + tl.arange(0, BJ)
    cos_n, sin_n = _cos_sin(tl.arange(0, BI).to(tl.float32), w, True)
    # Key j is at x = j - i0, counted from the first query, and seen if -reach <= x - t <= 0.
    passes = _in_sight(j0 - i0, S - i0, T, -reach, 0, BJ, BI)
    dk = tl.zeros([BJ, D_K], tl.float32)
    dv = tl.zeros([BJ, D_V], tl.float32)

    for EDGE in tl.static_range(2):
        start, stop, inner, skip = passes[EDGE]
        for count in range(start, stop - skip, BI):
            t0 = count + tl.where(count < inner, 0, skip)
            q = _load_parts(Q, t0, T, PARTS * D_K, BI, D_K, PARTS, EDGE)
            dh = _load(DH, t0, T, H * D_V, BI, D_V, EDGE)
            z = _trim_root(k, q, r_inv)
            c, _ = _softmask_root(j - (i0 + t0), cos_n, sin_n, w, -reach, 0, EDGE)
            y = z * c
            # dv first: in the other order the kernel spills registers in float32.
            dv = _dot(_cast(y * y, v.dtype), dh, dv)
            half_dy = _dot(v, tl.trans(dh), tl.zeros([BJ, BI], tl.float32)) * y
            for part in tl.static_range(PARTS):
                dk = _dot(_cast(half_dy * c, q[0].dtype), q[part], dk)

    _store(DK + (b * H + tile) * S * D_K, dk * (2 * r_inv), j0, S, D_K, BJ, D_K)
    _store(DV + (b * S * H + tile) * D_V, dv, j0, S, H * D_V, BJ, D_V)


# ---------------------------------------------------------------------------------- from PyTorch

KERNELS = {"forward": _forward, "decode": _forward, "dq": _backward_dq, "dkv": _backward_dkv}
KEYS_PER_PROGRAM = 1024                                # of "decode"

# (BI, BJ, warps, stages) for compute capability 8, 9, and from 10 on, by kernel and by whether the
# values are float32. A product has at least 16 x warps rows (queries; keys in dkv), or several
# warps would do the same work. With 4 warps and 64 rows a 10.0 GPU multiplies in its tensor memory,
# which one program uses up, and spills. Chosen with lab/benchmarks/kernel_compile.py.
BLOCK_SIZES = {
    ("forward", False): ((64, 64, 4, 2), (64, 64, 4, 2), (64, 32, 2, 2)),
    ("forward", True): ((32, 32, 2, 1), (64, 32, 4, 1), (32, 32, 2, 1)),
    ("decode", False): 3 * ((16, 32, 1, 2),),
    ("decode", True): 3 * ((16, 16, 1, 2),),
    ("dq", False): ((64, 64, 4, 2), (64, 64, 4, 2), (32, 32, 2, 2)),
    ("dq", True): ((32, 32, 2, 1), (64, 32, 4, 1), (32, 16, 2, 1)),
    ("dkv", False): ((32, 64, 4, 2), (64, 64, 4, 2), (32, 32, 2, 2)),
    ("dkv", True): ((16, 16, 1, 1), (16, 64, 4, 1), (16, 32, 2, 1)),
}


def block_sizes(kernel, float32, d_K, d_V, capability):
    """(BI, BJ, warps, stages). float32: whether the values are.

    Keys and values with more dimensions than the paper's get small blocks: these are correct, but
    not tuned, and some of them spill.
    """
    if d_K > 16 or d_V > 64:
        return 16, 16, 1, 1
    return BLOCK_SIZES[kernel, float32][min(capability[0], 10) - 8]


def choose_parts(kernel, qk_dtype, v_dtype):
    """(dtype, number) of the parts of q and k, for q, k and values of these dtypes."""
    if v_dtype == torch.float32 or qk_dtype == v_dtype:
        return v_dtype, 1
    if kernel == "decode":
        return torch.float32, 1
    if kernel == "forward":
        return torch.float16, 2
    number = 3 if (qk_dtype, v_dtype) == (torch.float32, torch.bfloat16) else 2
    return v_dtype, number


def with_contiguous_rows(x):
    """x, or a copy of it where its last dimension is not contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def split_into_parts(x, dtype, parts):
    """x as a sum of tensors of that dtype, the largest first: (B, H, T, D) -> (B, H, T, part, D)"""
    if parts == 1:
        return with_contiguous_rows(x.to(dtype)).unsqueeze(3)
    x = with_contiguous_rows(x)
    B, H, T, D = x.shape
    y = torch.empty(B, H, T, parts, D, dtype=dtype, device=x.device)
    if y.numel():
        with torch.cuda.device_of(x):
            grid = (B * H * triton.cdiv(T, 64),)
            _split[grid](x, y, *x.stride()[:3], H, T, D=D, N=64, PARTS=parts)
    return y


def kernel_inputs(kernel, q, k, v, w, r, order):
    """Q, K, V, W, R and ORDER, the first arguments of every kernel.

    The kernels take k and v with any strides, but q must be contiguous.
    """
    qk_dtype = q.dtype if q.dtype == k.dtype else torch.float32
    dtype, parts = choose_parts(kernel, qk_dtype, v.dtype)
    q, k = split_into_parts(q, dtype, parts), split_into_parts(k, dtype, parts)
    v, w, r = (with_contiguous_rows(x) for x in (v, w, r))
    return q.contiguous(), k, v, w, r, order


def launch(kernel, inputs, *others, i0, shares=1):
    """Run a program for each sequence, tile, block and share of the keys.

    inputs: from `kernel_inputs`; others: the tensors that the kernel takes after ORDER.
    """
    q, k, v = inputs[:3]
    B, H, T, parts, D_K = q.shape
    S, D_V = v.shape[2:]
    # The interpreter uses the blocks of an H100.
    capability = torch.cuda.get_device_capability(v.device) if v.is_cuda else (9, 0)
    BI, BJ, warps, stages = block_sizes(kernel, v.dtype == torch.float32, D_K, D_V, capability)
    n_blocks = triton.cdiv(S, BJ) if kernel == "dkv" else triton.cdiv(T, BI)
    if programs := B * H * n_blocks:                   # 0 if a tensor is empty
        with torch.cuda.device_of(v):
            KERNELS[kernel][programs, shares](
                *inputs, *others, *k.stride()[:3], *v.stride()[:3], i0, B, H, T, S,
                D_K=D_K, D_V=D_V, BI=BI, BJ=BJ, PARTS=parts, num_warps=warps, num_stages=stages)


@torch.library.custom_op("multiscreen::screen", mutates_args=())
def _screen(q: Tensor, k: Tensor, v: Tensor, w: Tensor, r: Tensor, order: Tensor,
            i0: int) -> Tensor:
    if reason := available(q.device):
        raise RuntimeError(reason)
    kernel = "decode" if q.shape[2] <= 16 else "forward"
    shares = max(triton.cdiv(k.shape[2], KEYS_PER_PROGRAM), 1) if kernel == "decode" else 1
    # In memory h is (B, T, H, V), once for each share of the keys.
    B, H, T, _ = q.shape
    h = v.new_empty(shares, B, T, H, v.shape[3], dtype=v.dtype if shares == 1 else torch.float32)
    launch(kernel, kernel_inputs(kernel, q, k, v, w, r, order), h, i0=i0, shares=shares)
    h = h[0] if shares == 1 else h.sum(0).to(v.dtype)
    return h.transpose(1, 2)


@_screen.register_fake
def _empty_h(q, k, v, w, r, order, i0):
    """For torch.compile: an empty tensor with the layout of `_screen`'s result."""
    B, H, T, _ = q.shape
    return v.new_empty(B, T, H, v.shape[3]).transpose(1, 2)


@torch.library.custom_op("multiscreen::screen_backward", mutates_args=())
def _screen_backward(dh: Tensor, q: Tensor, k: Tensor, v: Tensor, w: Tensor, r: Tensor,
                     order: Tensor, i0: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv, _, _ = _empty_gradients(dh, q, k, v, w, r, order, i0)
    dh = dh.to(v.dtype).transpose(1, 2).contiguous()
    inputs = *kernel_inputs("dq", q, k, v, w, r, order), dh
    # What each query adds to dw and dr, (B, H, T).
    dw_terms, dr_terms = torch.empty(2, *q.shape[:3], device=q.device)
    launch("dq", inputs, dq, dw_terms, dr_terms, i0=i0)
    launch("dkv", inputs, dk, dv, i0=i0)
    dw, dr = dw_terms.sum((0, 2)).to(w.dtype), dr_terms.sum((0, 2)).to(r.dtype)
    return dq, dk, dv, dw, dr


@_screen_backward.register_fake
def _empty_gradients(dh, q, k, v, w, r, order, i0):
    dq, dk, dw, dr = (x.new_empty(x.shape) for x in (q, k, w, r))
    return dq, dk, v.new_empty(v.transpose(1, 2).shape).transpose(1, 2), dw, dr


def _save(ctx, inputs, output):
    *tensors, ctx.i0 = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx, dh):
    refuse_forward_mode(dh)
    return *_screen_backward(dh, *ctx.saved_tensors, ctx.i0), None, None


def _refuse_second_derivatives(ctx, *gradients):
    raise NotImplementedError("screening_triton.screen is differentiable once: for second "
                              "derivatives use multiscreen.screen")


def refuse_forward_mode(*tensors):
    """Refuse tangents, which PyTorch would silently drop, so that the derivative would be 0."""
    if any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError("screening_triton.screen is differentiable once, in reverse "
                                  "mode: for forward mode use multiscreen.screen")


_screen.register_autograd(_gradients, setup_context=_save)
_screen_backward.register_autograd(_refuse_second_derivatives)


def screen(q, k, v, w, r, i0=0):
    """`multiscreen.screen` (Eq. 12): same arguments, same numbers, differentiable once.

    float32, float16 or bfloat16; D_K and D_V are powers of two >= 16. Nothing is broadcast: a
    ValueError names the shape that does not fit.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise TypeError(f"{name} is {x.dtype}: the kernel takes float32, float16 and bfloat16")
    if reason := unsupported_sizes(q.shape[-1], v.shape[-1]):
        raise ValueError(reason)
    B, H, _, D_K = q.shape
    S, D_V = k.shape[2], v.shape[3]
    wanted = (("k", k, (B, H, S, D_K)), ("v", v, (B, H, S, D_V)), ("w", w, (H,)), ("r", r, (H,)))
    for name, x, shape in wanted:
        if x.shape != shape:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; "
                             f"with q of shape {tuple(q.shape)}, expected {shape}")
    refuse_forward_mode(q, k, v, w, r)
    return _screen(q, k, v, w, r, w.detach().argsort(descending=True), i0)


screen.stays_in_window = True                          # caches drop the keys outside
