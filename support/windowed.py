"""Screening (Eq. 12) cut into blocks: the same numbers in O(T w) time and O(T) memory.

h is a plain sum over the keys, so it may be cut anywhere. Each part is a call of the definition.
This assumes that no query sees beyond its window, so it is used only while EQUATIONS have the code
that they had when this was written; see support/fast.py. Trim is not among them: it looks at just
one query and one key, and all parts call the current one. A screen whose keys compete, such as
Compete in lab/baselines/ablations.py, computes its denominator as an extra column of the values.

A tile's reach is the distance of the farthest key that its queries may see: ceil(w) - 1, as in the
kernel, or S - 1 if that is less.

support/fast.py chooses it. Read it after multiscreen.py, if you want to know how a sum over all
keys becomes one over a window without a kernel.
"""
import math
from functools import partial

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import multiscreen
from multiscreen import KeyCache

EQUATIONS = {"softmask": "7e812ad14d4b", "relevance": "82c31fca5176",
             "screen": "13937fcdf926", "Multiscreen.screen": "9bbd0c6d64c5",
             "KeyCache.append": "45a4a3230a91"}
NEAR, FAR = 16, 64                  # queries in a block: 16 for tiles that reach at most 16 keys
PAIRS = 2**20                       # query-key pairs of a tile, beyond which backward recomputes
PAIRS_ON_GPU = 2**24                # .. of all tiles, up to which a GPU is fastest with one call


class WindowCache(KeyCache):
    """A KeyCache without the keys that no window reaches, and with room for more tokens."""
    spare = 1023                                       # tokens it has room for, to save copies

    def __init__(self):
        super().__init__()
        self.n = 0                                     # the keys that it has, without spare room

    def append(self, k, v, w):
        """Add keys (B, H, T, K) and values (B, H, T, V). Returns all that are kept.

        w: the windows of the layer, (H,).
        """
        T = k.shape[2]
        self.end += T
        # With gradients there is no spare room: backward may need the tensors of earlier calls.
        room = 0 if torch.is_grad_enabled() else self.spare
        if self.k is None:
            self.k, self.v = k[:, :, :0], v[:, :, :0]
        if self.n + T > self.k.shape[2] or room == 0:
            kept = math.ceil(min(self.n, w.max().item()))          # n, too, if a window is NaN
            old = slice(self.n - kept, self.n)
            self.k, self.v = (F.pad(x[:, :, old], (0, 0, 0, T + room)) for x in (self.k, self.v))
            self.n = kept
        new = slice(self.n, self.n + T)
        self.k[:, :, new], self.v[:, :, new] = k, v
        self.n += T
        return self.k[:, :, : self.n], self.v[:, :, : self.n]


def screen_windowed(q, k, v, w, r, i0=0, screen=None):
    """`screen` (Eq. 12), or an ablation's own, for each query with the keys in its window.

    It is called just once for up to 128 keys, for few pairs on a GPU, and for shapes that no model
    asks for (S != i0 + T, or i0 < 0).

    The blocks depend on the values in w. A trace (torch.jit.trace, make_fx) would keep those of its
    example for any other w: trace `screen` instead.
    """
    screen = screen or multiscreen.Multiscreen.screen
    (B, H, T, _), S = q.shape, k.shape[2]
    is_fastest_at_once = q.is_cuda and B * H * T * S <= PAIRS_ON_GPU
    if S <= 128 or S != i0 + T or i0 < 0 or is_fastest_at_once:
        return screen(q, k, v, w, r, i0)
    reaches = [math.ceil(min(S, x)) - 1 for x in w.tolist()]
    if T <= NEAR:                                      # as in decoding: one call, of what is seen
        first = max(i0 - max(reaches), 0)
        return screen(q, k[:, :, first:], v[:, :, first:], w, r, i0 - first)

    dtype = torch.promote_types(q.dtype, torch.float32)
    inputs = [x.to(dtype) for x in (q, k, v)]
    h = q.new_empty(B, H, T, v.shape[3], dtype=dtype)
    order = sorted(range(H), key=lambda n: reaches[n])
    n_near = len([reach for reach in reaches if reach <= NEAR])
    for C, tiles in ((NEAR, order[:n_near]), (FAR, order[n_near:])):
        if tiles:
            some = [x[:, tiles] for x in inputs]
            h[:, tiles] = in_blocks(C, screen, *some, w[tiles], r[tiles], i0,
                                    [reaches[n] for n in tiles])
    return h.to(v.dtype)


screen_windowed.cache = WindowCache


def in_blocks(C, screen, q, k, v, w, r, i0, reaches):
    """h of tiles in the order of their reach, a sum, in which each pass adds one block of keys.

    Queries and keys are cut into blocks of C, and zeros fill them up: zero values add nothing. In a
    pass each block of queries meets the keys that lie `back` blocks before it. For C = 4, i0 = 6,
    T = 11, reach = 10 the keys 0 .. 16 are cut into these blocks, with zeros for dots. `before` = 2
    of them lie before the queries 6 .. 16, which make N = 3 blocks. Below its keys stands the
    number of the block of queries that meets them:

                    . . 0 1 | 2 3 4 5 | 6 7 8 9 | 10 11 12 13 | 14 15 16 .
        back = 0                           0           1            2
        back = 1                 0         1           2
        back = 2       0         1         2
        back = 3       1         2
    """
    B, _, T, _ = q.shape
    N, before = math.ceil(T / C), math.ceil(i0 / C)
    q = cut(q, C, N)
    k, v = (cut(x, C, before + N, -i0 % C) for x in (k, v))
    f = partial(screen_blocks, screen)
    if torch.is_grad_enabled() and B * T * (reaches[-1] + C) > PAIRS:
        f = partial(checkpoint, f, use_reentrant=False, preserve_rng_state=False)
    h = f(q, k[:, before:], v[:, before:], w, r, 0)
    farthest = min(math.ceil(reaches[-1] / C), before + N - 1)
    for back in range(1, farthest + 1):
        # The first block of queries that meets one, and the first tile that reaches it.
        n = max(back - before, 0)
        tile = len([reach for reach in reaches if reach <= (back - 1) * C])
        keys = slice(before + n - back, before + N - back)
        h[:, n:, tile:] += f(q[:, n:, tile:], k[:, keys, tile:], v[:, keys, tile:], w[tile:],
                             r[tile:], back * C)
    return h.movedim(1, 2).flatten(2, 3)[:, :, :T]


def cut(x, C, N, front=0):
    """(B, H, S, D), after `front` rows of zeros, as N blocks of C rows: (B, N, H, C, D)."""
    x = F.pad(x, (0, 0, front, N * C - front - x.shape[2]))
    return x.unflatten(2, (N, C)).movedim(2, 1)


def screen_blocks(screen, q, k, v, w, r, i0):
    """`screen` of each block of queries with its keys. (B, N, H, C, V). i0: from its first key."""
    h = screen(*(x.flatten(0, 1) for x in (q, k, v)), w, r, i0)
    return h.unflatten(0, (len(q), -1))
