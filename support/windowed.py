"""Screening (Eq. 12) cut into pieces: the same numbers in O(T w) time and O(T) memory.

h is a plain sum over the keys, so it may be cut anywhere. Each piece is a call of the definition.
That assumes what support/choose.py checks: no query sees beyond its window. Where keys compete, the
sum that divides is one more column of h.
"""
import math
from functools import partial
from itertools import groupby

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from multiscreen import screen

PAIRS = 2**20                       # query-key pairs in one call; beyond, backward recomputes


def screen_windowed(q, k, v, w, r, i0=0, screen=screen, at_once=0):
    """`screen` (Eq. 12), or an ablation's own, for each query with the keys in its window.

    It is called once for up to 128 keys, for up to `at_once` pairs B H T S, where a GPU is fastest,
    and for shapes that no model asks for (S != i0 + T).

    The pieces follow from the numbers in w. A trace (torch.jit.trace, make_fx) would keep those of
    its example, whatever w it is given: trace `screen` instead.
    """
    T, S = q.shape[2], k.shape[2]
    pairs = q.shape[0] * q.shape[1] * T * S
    if S <= 128 or pairs <= at_once or S != i0 + T:
        return screen(q, k, v, w, r, i0)
    reaches = [math.ceil(min(S, x)) - 1 for x in w.tolist()]
    if T <= 16:
        return few_queries(q, k, v, w, r, i0, screen, reaches)
    # Narrow windows take blocks of 16, 32 or 64. Neighbours with the same reach share their calls.
    reaches = [next((C for C in (16, 32, 64) if reach <= C), reach) for reach in reaches]
    reaches, sizes = zip(*((reach, len([*some])) for reach, some in groupby(reaches)))
    dtype = torch.promote_types(q.dtype, torch.float32)
    tiles = zip(*(x.to(dtype).split(sizes, 1) for x in (q, k, v)), w.split(sizes), r.split(sizes))
    h = [in_blocks(*some, i0, screen, reach) for some, reach in zip(tiles, reaches)]
    return torch.cat(h, 2).transpose(1, 2).to(v.dtype)


def few_queries(q, k, v, w, r, i0, screen, reaches):
    """Few queries, as in decoding: tiles that see at most 256 keys back share a call.

    All share one where it has at most 2^14 pairs: a second call would cost more than it spares.
    """
    B, H, T, _ = q.shape
    if max(reaches) <= 256 or B * H * T * max(reaches) <= 2**14:
        first = max(i0 - max(reaches), 0)
        return screen(q, k[:, :, first:], v[:, :, first:], w, r, i0 - first)
    near = [n for n, reach in enumerate(reaches) if reach <= 256]
    groups = [[n] for n, reach in enumerate(reaches) if reach > 256] + [near] * bool(near)
    h = v.new_empty(B, H, T, v.shape[3])
    for tiles in groups:
        some = tiles if 1 < len(tiles) < len(w) else slice(tiles[0], tiles[-1] + 1)
        first = max(i0 - max(reaches[n] for n in tiles), 0)
        h[:, some] = screen(q[:, some], k[:, some, first:], v[:, some, first:], w[some], r[some],
                            i0 - first)
    return h


def in_blocks(q, k, v, w, r, i0, screen, reach):
    """Blocks of C queries, each with the keys p blocks before it, summed. (B, T, H, V)"""
    def blocks(x, front, N):
        # (B, H, S, D) after `front` rows of zeros, as (B, N, H, C, D).
        rows = front, N * C - front - x.shape[2]
        x = F.pad(x, (0, 0, *rows)) if any(rows) else x
        return x.unflatten(2, (N, C)).movedim(2, 1)

    def piece(i0, w, r, *inputs):
        return screen(*(x.flatten(0, 1) for x in inputs), w, r, i0).unflatten(0, (B, -1))

    # N blocks of queries, `start` of keys before them, `last` back to the edge. Narrow: one piece.
    B, H, T, _ = q.shape
    C = min(reach, 64)
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
        at, keys = max(p - start, 0), slice(max(start - p, 0), start + N - p)
        inputs = q[:, at:], k[:, keys], v[:, keys]
        m = -(-B * H * (N - at) * C * k.shape[3] // PAIRS)
        inputs = zip(*(x.chunk(m, 1) if m > 1 else [x] for x in inputs))
        parts = (piece(first + p * C, w, r, *x) for x in inputs)
        if p == 0:
            h = torch.cat(list(parts), 1) if m > 1 else next(parts)
        for part in parts:                             # none are left for p = 0
            h[:, at : at + part.shape[1]] += part
            at += part.shape[1]
    return h.movedim(2, 3).flatten(1, 2)[:, :T]
