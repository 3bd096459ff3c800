"""Screening (Eq. 12) cut into pieces: the same numbers in O(T w) time and O(T) memory.

h is a plain sum over the keys, so it may be cut anywhere. Each piece is a call of the definition.
This assumes that no query sees beyond its window, so it is used only while EQUATIONS have the text
that they had when this was written; see support/fast.py. Trim is not among them: it looks at just
one query and one key, and all pieces call the current one. If keys compete, the denominator is
computed as an extra column of the values.

A tile's reach is the distance of the farthest key that its queries may see: ceil(w) - 1, as in the
kernel, or S - 1 if that is less.
"""
import math
from functools import partial
from itertools import groupby

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import multiscreen

EQUATIONS, TEXT = ("softmask", "relevance", "screen"), "9083c1d64fce"
PAIRS = 2**20                       # query-key pairs in one call; beyond, backward recomputes
PAIRS_ON_GPU = 2**24                # .. up to which a GPU is fastest with just one call of all


def screen_windowed(q, k, v, w, r, i0=0, screen=None):
    """`screen` (Eq. 12), or an ablation's own, for each query with the keys in its window.

    It is called just once for up to 128 keys, for few pairs on a GPU, and for shapes that no model
    asks for (S != i0 + T).

    The pieces depend on the values in w. A trace (torch.jit.trace, make_fx) would keep those of its
    example for any other w: trace `screen` instead.
    """
    screen = screen or multiscreen.screen
    (B, H, T, _), S = q.shape, k.shape[2]
    is_fastest_at_once = q.is_cuda and B * H * T * S <= PAIRS_ON_GPU
    if S <= 128 or S != i0 + T or is_fastest_at_once:
        return screen(q, k, v, w, r, i0)
    reaches = [math.ceil(min(S, x)) - 1 for x in w.tolist()]
    if T <= 16:
        return few_queries(q, k, v, w, r, i0, screen, reaches)

    # Let narrow tiles reach 16, 32 or 64 keys back, so that neighbours can share calls.
    groups = [(reach, len([*tiles])) for reach, tiles in groupby(map(round_up, reaches))]
    sizes = [n for _, n in groups]
    dtype, dtype_of_h = torch.promote_types(q.dtype, torch.float32), v.dtype
    q, k, v = (x.to(dtype).split(sizes, 1) for x in (q, k, v))
    w, r = w.split(sizes), r.split(sizes)
    h = [in_blocks(q[n], k[n], v[n], w[n], r[n], i0, screen, reach)
         for n, (reach, _) in enumerate(groups)]
    return torch.cat(h, 2).transpose(1, 2).to(dtype_of_h)


def round_up(reach):
    """16, 32 or 64 for a reach up to that many keys; a longer one stays as it is."""
    for n in (16, 32, 64):
        if reach <= n:
            return n
    return reach


def ceil_div(a, b):
    """a / b, rounded up, for whole numbers."""
    return -(-a // b)


def few_queries(q, k, v, w, r, i0, screen, reaches):
    """Few queries, as in decoding. (B, H, T, V)

    Tiles that reach at most 256 keys back share a call, and each other tile has its own. All share
    one if it has at most 2^14 pairs: a second call would cost more than it saves.
    """
    B, H, T, _ = q.shape
    if max(reaches) <= 256 or B * H * T * max(reaches) <= 2**14:
        first = max(i0 - max(reaches), 0)              # the oldest key that is seen
        return screen(q, k[:, :, first:], v[:, :, first:], w, r, i0 - first)
    groups = [[n] for n, reach in enumerate(reaches) if reach > 256]
    near = [n for n, reach in enumerate(reaches) if reach <= 256]
    if near:
        groups.append(near)
    h = v.new_empty(B, H, T, v.shape[3])
    for tiles in groups:
        # The slice of one tile is a view; the list of several copies their keys.
        some = tiles
        if len(tiles) == 1:
            some = slice(tiles[0], tiles[0] + 1)
        first = max(i0 - max(reaches[n] for n in tiles), 0)
        h[:, some] = screen(q[:, some], k[:, some, first:], v[:, some, first:], w[some], r[some],
                            i0 - first)
    return h


def in_blocks(q, k, v, w, r, i0, screen, reach):
    """Many queries, of tiles with one reach: N blocks of C = min(reach, 64) queries. (B, T, H, V)

    Keys are cut into blocks like queries, and zeros fill up the blocks: zero values add nothing.
    """
    B, _, T, _ = q.shape
    C = min(reach, 64)
    q = cut(q, C, ceil_div(T, C))
    f = partial(screen_blocks, screen, w, r)
    if torch.is_grad_enabled() and B * T * (reach + C) > PAIRS:
        f = partial(checkpoint, f, use_reentrant=False, preserve_rng_state=False)
    if reach == C:
        h = narrow(f, q, k, v, i0)
    else:
        h = wide(f, q, k, v, i0, reach)
    return h.movedim(2, 3).flatten(1, 2)[:, :T]


def narrow(f, q, k, v, i0):
    """h of blocks q (B, N, H, C, K) that reach C keys back: into the block before their own.

    The two blocks of keys are laid side by side, as 2 C keys, so that a query needs only one call.
    """
    _, N, _, C, _ = q.shape
    k, v = (torch.cat([cut(x, C, N, front) for front in (C - i0, -i0)], 3) for x in (k, v))
    return concatenate(in_calls(f, C, q, k, v))


def wide(f, q, k, v, i0, reach):
    """h of blocks q (B, N, H, C, K) that reach farther: a sum, in which each pass adds one block.

    In a pass each block of queries meets the keys that lie `back` blocks before it. For C = 4,
    i0 = 6, T = 11, reach = 10 (in use C is 64) the keys 0 .. 16 are cut into these blocks, with
    zeros for dots. `before` = 2 of them lie before the queries 6 .. 16, which make N = 3 blocks.
    Below its keys stands the number of the block of queries that meets them:

                    . . 0 1 | 2 3 4 5 | 6 7 8 9 | 10 11 12 13 | 14 15 16 .
        back = 0                           0           1            2
        back = 1                 0         1           2
        back = 2       0         1         2
        back = 3       1         2
    """
    _, N, _, C, _ = q.shape
    before = ceil_div(i0, C)
    k, v = (cut(x, C, before + N, -i0 % C) for x in (k, v))
    h = concatenate(in_calls(f, 0, q, k[:, before:], v[:, before:]))
    farthest = min(ceil_div(reach, C), before + N - 1)
    for back in range(1, farthest + 1):
        first = max(back - before, 0)                  # the first block of queries that meets one
        keys = slice(before + first - back, before + N - back)
        n = first
        for part in in_calls(f, back * C, q[:, first:], k[:, keys], v[:, keys]):
            h[:, n : n + part.shape[1]] += part
            n += part.shape[1]
    return h


def cut(x, C, N, front=0):
    """(B, H, S, D), after `front` rows of zeros, as N blocks of C rows: (B, N, H, C, D).

    A negative front leaves out rows; zeros fill the last block.
    """
    rows = front, N * C - front - x.shape[2]
    x = F.pad(x, (0, 0, *rows)) if any(rows) else x
    return x.unflatten(2, (N, C)).movedim(2, 1)


def in_calls(f, i0, q, k, v):
    """Yield f(i0, q, k, v) of as many blocks at a time as have PAIRS pairs, in order.

    The shares are equal, so that each call can reuse the memory which the last one freed.
    """
    B, N, H, C, _ = q.shape
    n_calls = ceil_div(B * N * H * C * k.shape[3], PAIRS)
    for some in zip(*(x.chunk(n_calls, 1) for x in (q, k, v))):
        yield f(i0, *some)


def screen_blocks(screen, w, r, i0, q, k, v):
    """`screen` of each block of queries with its keys: (B, n, H, C, V). i0: from its first key."""
    h = screen(*(x.flatten(0, 1) for x in (q, k, v)), w, r, i0)
    return h.unflatten(0, (len(q), -1))


def concatenate(parts):
    """Concatenate parts (B, n, H, C, V). A single part is not copied."""
    parts = [*parts]
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts, 1)
