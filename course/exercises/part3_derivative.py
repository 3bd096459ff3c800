"""Part 3: the gradients of screening by hand, in blocks, as the kernel computes them.

Check it with `pytest course/exercises/test_part3.py`. To keep it readable there is one tile and no
batch. All numbers are float64, but positions and d are integers: math.pi * d would be float32.

Trim is a square, of which this file has the root, z. m is Softmask, and d = j - i, as in Eq. 10:

    alpha_d = z^2 m,   z = max(1 - (1 - s)/r, 0),   m = (cos(pi d/w) + 1)/2 inside the window, or 0

Let dh = dL/dh be the incoming gradient. The gradient of a relevance is dh_i . v_j, whatever the
other keys are. So you can compute each block of queries and keys by itself and add up the results.
Derive each formula on paper before you write it as code.

Axes: I queries of a block, J keys of a block; T all queries, S all keys; K d_K, V d_V.
"""
import math  # noqa: F401

import torch  # noqa: F401


def pairs(q, k, w, r, i, j):
    """z, m and d of each pair, (I, J) each. q: (I, K), at positions i (I,); k: (J, K), at j (J,).

        d = j - i,   z = max(1 - (1 - q . k)/r, 0),   m = (cos(pi d/w) + 1)/2 for -w < d <= 0

    m is exactly 0 for a key after the query (d > 0) and at a distance of w or more.
    """
    raise NotImplementedError("Exercise 3.1: z, m and d of a block")


def dv_block(z, m, dh):
    """What a block adds to dL/dv of its keys. z, m: (I, J); dh: (I, V). Returns (J, V).

    Derive it from h_i = sum_j z_ij^2 m_ij v_j: a key collects dh from the queries that see it.
    """
    raise NotImplementedError("Exercise 3.2: the gradient of v")


def dz_block(z, m, v, dh):
    """dL/dz of each pair. v: (J, V). Returns (I, J).

    dL/dz = dL/d(alpha_d) d(alpha_d)/dz, with dL/d(alpha_d) = dh_i . v_j and alpha_d = z^2 m.
    """
    raise NotImplementedError("Exercise 3.3: the gradient of z")


def dq_block(dz, k, r):
    """What a block adds to dL/dq of its queries. k: (J, K). Returns (I, K).

    dL/dq_i = sum_j dL/dz_ij dz/ds ds/dq_i, with s = q_i . k_j and, where z > 0, z = 1 - (1 - s)/r.
    """
    raise NotImplementedError("Exercise 3.4: the gradient of q")


def dk_block(dz, q, r):
    """What a block adds to dL/dk of its keys. q: (I, K). Returns (J, K).

    dL/dk_j = sum_i dL/dz_ij dz/ds ds/dk_j.
    """
    raise NotImplementedError("Exercise 3.5: the gradient of k")


def dr_block(dz, z, r):
    """What a block adds to dL/dr. Returns a scalar.

    dL/dr = sum_ij dL/dz_ij dz/dr, with z = 1 - (1 - s)/r. You are given z but not s, so express
    (1 - s)/r by z.
    """
    raise NotImplementedError("Exercise 3.6: the gradient of r")


def dw_block(z, m, d, v, dh, w):
    """What a block adds to dL/dw, through Softmask. Returns a scalar: 0, not NaN, for w = inf.

    dL/dw = sum_ij dL/dm_ij dm/dw, with m = (cos(pi d/w) + 1)/2 inside the window. Outside it, m is
    0 whatever w is.
    """
    raise NotImplementedError("Exercise 3.7: the gradient of w")


def gradients(q, k, v, w, r, dh, i0=0, size=16):
    """dL/dq, dL/dk, dL/dv, dL/dw, dL/dr of h = screen(q, k, v, w, r, i0), in blocks of `size`.

    q: (T, K); k: (S, K); v: (S, V); dh: (T, V); w, r: tensors without axes. The first query is at
    position i0. Take `size` queries at a time, and only the keys that one of them sees, so that
    there is no T x S tensor: the queries at the positions i .. last see the keys
    max(i - ceil(w) + 1, 0) .. min(last, S - 1).
    """
    raise NotImplementedError("Exercise 3.8: all gradients, block by block")
