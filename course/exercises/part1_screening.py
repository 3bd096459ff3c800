"""Part 1: one screening unit, Eqs. 4 to 13, section "Screening Unit" of the paper.

Replace each `raise` with your code, and check it with `pytest course/exercises/test_part1.py`.
Where the paper leaves something open, the docstring decides it.

Axes: B batch, T queries i, S keys j, H tiles of a layer, K d_K, V d_V.
"""
import math  # noqa: F401

import torch  # noqa: F401


def window(s_w):
    """Eq. (4), the screening window: w = exp(s_w) + 1, in [1, inf]. Same shape as s_w.

    s_w = +inf gives w = +inf, a window without an edge. The gradient there must be 0, not NaN.
    """
    raise NotImplementedError("Exercise 1.1: Eq. 4, the screening window")


def acceptance(s_r):
    """The second half of Eq. 4, the acceptance width: r = sigmoid(s_r), at least 1e-3.

    Same shape as s_r. The floor is not in the paper. It is there because a similarity in
    float32 is off by up to 5e-7, and its relevance by up to 2/r times as much.
    """
    raise NotImplementedError("Exercise 1.2: Eq. 4, the acceptance width")


def unit(x, eps=1e-6):
    """Eq. (5), unit length: x_bar = x / |x|, where |x| is at least eps. (..., D) -> (..., D)

    |x| is the length over the last dimension. unit(0) is 0, and its gradient is finite.
    """
    raise NotImplementedError("Exercise 1.3: Eq. 5, unit length")


def mipe_angle(i, w, w_th):
    """Eq. (6), MiPE's angle: phi(i, w) = pi i gamma(w) / w.

    Eq. (7): gamma(w) = (cos(pi w / w_th) + 1)/2 for w < w_th, else 0. i: (T,) integers; w: (H,).
    Returns (H, T) in radians, in w's dtype.

    In float32 the angle would be off by about 0.01 rad at i = 2^17, so multiply in float64, and
    remove whole turns before you convert it to w's dtype. The gradient of w is finite everywhere,
    and 0 for w >= w_th.
    """
    raise NotImplementedError("Exercise 1.4: Eqs. 6 and 7, MiPE's angle")


def mipe(x, angle):
    """MiPE: rotate the first two dimensions. (B, H, T, K) by angles (H, T) -> (B, H, T, K)

    They become (x_0 cos phi - x_1 sin phi, x_0 sin phi + x_1 cos phi). The other dimensions stay as
    they are.
    """
    raise NotImplementedError("Exercise 1.5: MiPE, the rotation")


def trim(s, r):
    """Eq. (9), Trim: alpha = max(1 - (1 - s)/r, 0)^2, the distance-unaware relevance.

    s: (..., T, S) similarities in [-1, 1]; r: broadcastable, in (0, 1]. Same shape as s.
    The relevance is exactly 0 where 1 - s >= r.
    """
    raise NotImplementedError("Exercise 1.6: Eq. 9, Trim")


def softmask(d, w):
    """Eq. (10), Softmask: m = (cos(pi d / w) + 1)/2 where -w < d <= 0, else 0.

    d: (T, S) = j - i, integers, key minus query position; w: broadcastable. Returns values in
    [0, 1], computed in w's dtype. The mask is exactly 0 for keys in the future (d > 0) and at a
    distance of w or more. For w = inf it is 1 for the query's own position and all earlier ones.
    """
    raise NotImplementedError("Exercise 1.7: Eq. 10, Softmask")


def relevance(q, k, w, r, i0=0):
    """Eq. (11), distance-aware relevance of key j to query i: alpha_d_ij = Trim(s_ij) m_ij.

    Eq. (8), similarity: s_ij = q_i . k_j; m_ij = Softmask(j - i).
    q: (B, H, T, K), k: (B, H, S, K), unit vectors with positions encoded; w, r: (H,).
    i0: the position of the first query, counted from the first key. Returns (B, H, T, S).
    """
    raise NotImplementedError("Exercise 1.8: Eqs. 8 and 11, relevance")


def screen(q, k, v, w, r, i0=0):
    """Eq. (12), screening: h_i = sum_j alpha_d_ij v_j.

    q, k, w, r, i0: as in `relevance`; v: (B, H, S, V), unit vectors. Returns (B, H, T, V) in v's
    dtype. Compute in float64 if q is float64, and otherwise in float32, even for bfloat16 inputs.
    """
    raise NotImplementedError("Exercise 1.9: Eq. 12, screening")


def tanh_norm(x, eps=1e-6):
    """Eq. (13), TanhNorm: x tanh|x| / |x| keeps the direction and bounds the length by 1.

    |x| is the length over the last dimension. Same shape as x. For |x| < eps it returns x, which
    is the limit. The Jacobian at 0 is the identity.
    """
    raise NotImplementedError("Exercise 1.10: Eq. 13, TanhNorm")
