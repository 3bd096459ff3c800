"""Part 1: one screening unit, Eqs. 4 to 13, section "Screening Unit" of the paper.

Check it with `pytest exercises -k part1`. Replace each `raise` with your code. The docstrings say
what the paper leaves open.

Axes: B batch, T queries i, S keys j, H tiles of a layer, K d_K, V d_V.
"""
import math  # noqa: F401

import torch  # noqa: F401


def window(s_w):
    """Eq. (4), first half, the screening window: w = exp(s_w) + 1. Shape of s_w.

    s_w = +inf gives w = +inf, a window without an edge, and the gradient there is 0, not NaN.
    """
    raise NotImplementedError("Exercise 1.1: Eq. 4, the screening window")


def acceptance(s_r):
    """Eq. (4), second half, the acceptance width: r = 1/(1 + exp(-s_r)). Shape of s_r.

    At least 1e-3: float32 similarities near 1 are off by up to 5e-7, relevances by 2/r times that.
    """
    raise NotImplementedError("Exercise 1.2: Eq. 4, the acceptance width")


def unit(x, eps=1e-6):
    """Eq. (5), unit length: x / |x|, over the last dimension. (..., D) -> (..., D)

    The length is clipped from below at eps: unit(0) is 0, and its gradient is finite.
    """
    raise NotImplementedError("Exercise 1.3: Eq. 5, unit length")


def mipe_angle(i, w, w_th):
    """Eqs. (6) and (7), MiPE's angle: phi(i, w) = pi i gamma(w) / w.

    gamma(w) = (cos(pi w / w_th) + 1)/2 for w < w_th, else 0. i: (T,) integers; w: (H,). Returns
    (H, T), in radians.

    Whole turns may be left out. At i = 2^17 float32 is off by 0.01 rad: multiply in float64, and
    return w's dtype. The gradient of w is finite everywhere, and 0 for w >= w_th.
    """
    raise NotImplementedError("Exercise 1.4: Eqs. 6 and 7, MiPE's angle")


def mipe(x, angle):
    """MiPE: turn the first two dimensions of x, (1, 0) towards (0, 1).

    (x_0 cos phi - x_1 sin phi, x_0 sin phi + x_1 cos phi); the others stay.
    x: (B, H, T, K); angle: (H, T). Returns (B, H, T, K).
    """
    raise NotImplementedError("Exercise 1.5: MiPE, the rotation")


def trim(s, r):
    """Eq. (9), Trim, distance-unaware relevance: alpha = max(1 - (1 - s)/r, 0)^2.

    s: similarities (..., T, S); r: broadcastable. -> like s. Exactly 0 where 1 - s >= r.
    """
    raise NotImplementedError("Exercise 1.6: Eq. 9, Trim")


def softmask(d, w):
    """Eq. (10), Softmask: m = (cos(pi d / w) + 1)/2 where -w < d <= 0, else 0.

    d: (T, S) = j - i, key minus query position; w: broadcastable.
    Exactly 0 in the future and at distance w and beyond; 1 in all the past for w = inf.
    """
    raise NotImplementedError("Exercise 1.7: Eq. 10, Softmask")


def relevance(q, k, w, r, i0=0):
    """Eq. (8), similarity: s_ij = q_i . k_j. Eq. (11): alpha_d_ij = Trim(s_ij) Softmask(j - i).

    q: (B, H, T, K), k: (B, H, S, K), unit vectors after MiPE; w, r: (H,).
    i0: position of the first query, counted from the first key. Returns (B, H, T, S).
    """
    raise NotImplementedError("Exercise 1.8: Eqs. 8 and 11, relevance")


def screen(q, k, v, w, r, i0=0):
    """Eq. (12), screening: h_i = sum_j alpha_d_ij v_j.

    Arguments as in `relevance`, and v: (B, H, S, V). Returns (B, H, T, V) in v's dtype. bfloat16
    inputs are converted to float32 first; float64 stays float64.
    """
    raise NotImplementedError("Exercise 1.9: Eq. 12, screening")


def tanh_norm(x, eps=1e-6):
    """Eq. (13), TanhNorm: x tanh|x| / |x|, |x| over the last dimension. (..., D) -> same

    For |x| < eps it returns x, the limit. The Jacobian at 0 is the identity.
    """
    raise NotImplementedError("Exercise 1.10: Eq. 13, TanhNorm")
