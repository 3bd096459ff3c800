"""Part 3, solved. screening_triton.py has the same formulas in its docstring."""
import math

import torch


def pairs(q, k, w, r, i, j):
    d = j[None, :] - i[:, None]
    z = (1 - (1 - q @ k.T) / r).relu()
    m = torch.where((d <= 0) & (d > -w), 0.5 * (torch.cos(math.pi * (d / w)) + 1), 0.0)
    return z, m, d


def dv_block(z, m, dh):
    return (z.square() * m).T @ dh


def dz_block(z, m, v, dh):
    return 2 * z * m * (dh @ v.T)


def dq_block(dz, k, r):
    return dz @ k / r


def dk_block(dz, q, r):
    return dz.T @ q / r


def dr_block(dz, z, r):
    return (dz * (1 - z)).sum() / r


def dw_block(z, m, d, v, dh, w):
    dm = z.square() * (dh @ v.T)
    slope = torch.where(m > 0, torch.sin(math.pi * (d / w)) * math.pi * d / (2 * w**2), 0.0)
    return (dm * slope).sum()


def gradients(q, k, v, w, r, dh, i0=0, size=16):
    T, S = len(q), len(k)
    dq, dk, dv, dw, dr = (torch.zeros_like(x) for x in (q, k, v, w, r))
    for a in range(0, T, size):
        rows = slice(a, min(a + size, T))
        i = i0 + torch.arange(rows.start, rows.stop)
        first = 0 if w == math.inf else max(int(i[0]) - math.ceil(w) + 1, 0)
        for b in range(first // size * size, min(int(i[-1]) + 1, S), size):
            columns = slice(b, min(b + size, S))
            q_b, k_b, v_b, dh_b = q[rows], k[columns], v[columns], dh[rows]
            j = torch.arange(columns.start, columns.stop)
            z, m, d = pairs(q_b, k_b, w, r, i, j)
            dz = dz_block(z, m, v_b, dh_b)
            dq[rows] += dq_block(dz, k_b, r)
            dk[columns] += dk_block(dz, q_b, r)
            dv[columns] += dv_block(z, m, dh_b)
            dw += dw_block(z, m, d, v_b, dh_b, w)
            dr += dr_block(dz, z, r)
    return dq, dk, dv, dw, dr
