"""Screening (Eq. 12) cut into pieces: the same numbers in O(T w) time and O(T) memory.

Relevances do not compete, so the sum over the keys may be cut anywhere. Each piece is a call of the
definition. That assumes what support/choose.py checks: no query sees beyond its window.
"""
import math
from functools import partial

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from multiscreen import screen

PAIRS = 2**20                       # of a query and a key, in one call; beyond, backward recomputes


@torch.compiler.disable                                # the number of pieces depends on w
def screen_windowed(q, k, v, w, r, i0=0, screen=screen):
    """`screen` (Eq. 12), or the same compiled, of each query with the keys in its window.

    Up to 128 keys, and shapes that no model asks for (S != i0 + T), are one call of it.
    """
    T, S = q.shape[2], k.shape[2]
    if S <= 128 or S != i0 + T or not q.numel():
        return screen(q, k, v, w, r, i0)
    reaches = [math.ceil(min(S, x)) - 1 for x in w.tolist()]
    if T <= 16:
        return few_queries(q, k, v, w, r, i0, screen, reaches)
    dtype = torch.promote_types(q.dtype, torch.float32)
    tiles = zip(*(x.to(dtype).split(1, 1) for x in (q, k, v)), w.split(1), r.split(1))
    h = [in_blocks(*tile, i0, screen, reach) for tile, reach in zip(tiles, reaches)]
    return torch.stack(h, 2).transpose(1, 2).to(v.dtype)


screen_windowed.keeps_to_window = True                 # a KeyCache may drop what lies outside


def few_queries(q, k, v, w, r, i0, screen, reaches):
    """Few queries, as in decoding: tiles that see at most 256 keys back share a call."""
    def crop(some, reach):
        first = max(i0 - reach, 0)
        return screen(q[:, some], k[:, some, first:], v[:, some, first:], w[some], r[some],
                      i0 - first)

    if max(reaches) <= 256:
        return crop(slice(None), max(reaches))
    near = [n for n, reach in enumerate(reaches) if reach <= 256]
    h = v.new_empty(*q.shape[:3], v.shape[3])
    if near:
        h[:, near] = crop(near, 256)
    for n, reach in enumerate(reaches):
        if reach > 256:
            h[:, n : n + 1] = crop(slice(n, n + 1), reach)
    return h


def in_blocks(q, k, v, w, r, i0, screen, reach):
    """One tile: blocks of C queries, each with the keys p blocks before it, summed over all p."""
    def blocks(x, front, N):
        # (B, 1, S, D) after `front` rows of zeros, as (N, B, 1, C, D).
        x = F.pad(x, (0, 0, front, N * C - front - x.shape[2]))
        return x.unflatten(2, (N, C)).movedim(2, 0)

    def piece(i0, w, r, *inputs):
        return screen(*(x.flatten(0, 1) for x in inputs), w, r, i0)

    # N blocks of queries, `start` of keys before them, `last` back to the edge. Narrow: one piece.
    B, _, T, _ = q.shape
    C = 16 if reach <= 16 else 32 if reach <= 32 else 64
    N, start, last, first = -(-T // C), -(-i0 // C), -(-reach // C), 0
    if last < 2:
        k, v = (torch.cat([blocks(x, a - i0, N) for a in (C, 0)], 3) for x in (k, v))
        start, last, first = 0, 0, C
    else:
        k, v = (blocks(x, -i0 % C, start + N) for x in (k, v))
    q = blocks(q, 0, N)

    if torch.is_grad_enabled() and B * T * (reach + C) > PAIRS:
        piece = partial(checkpoint, piece, use_reentrant=False, preserve_rng_state=False)
    for p in range(min(last, start + N - 1) + 1):
        # Equal parts, shorter with p: what one part frees, the next can take.
        rows, keys = q[max(p - start, 0) :], slice(max(start - p, 0), len(k) - p)
        m = -(-B * C * k.shape[3] * len(rows) // PAIRS)
        inputs = zip(rows.chunk(m), k[keys].chunk(m), v[keys].chunk(m))
        parts = (piece(first + p * C, w, r, *x) for x in inputs)
        if p == 0:
            h = torch.cat(list(parts)) if m > 1 else next(parts)
        at = len(h) - B * len(rows)
        for part in parts:                             # none are left of p = 0
            h[at : at + len(part)] += part
            at += len(part)
    return h.unflatten(0, (N, B)).movedim(0, 2).flatten(2, 3)[:, 0, :T]
