"""Common mistakes in the bounds of the keys that a block of queries sees."""
import math


def wrong_bounds(i, last, end_of_block, w, T, S, i0):
    """{cause: (first key, end)}, with one mistake each.

    i, last: positions of a block's first and last query; end_of_block: of its last, if full.
    """
    w = min(float(w), 2**30)
    first, end = i - math.ceil(w) + 1, min(last + 1, S)
    return {
        "w is rounded down, or to the nearest: the first key is at i - ceil(w) + 1":
            (i - math.floor(w) + 1, end),
        "one key too few at the window's edge: the first key is at i - ceil(w) + 1":
            (first + 1, end),
        "one key too many at the window's edge: the first key is at i - ceil(w) + 1":
            (first - 1, end),
        "the first key is that of the block's last query: its first query sees farther back":
            (last - math.ceil(w) + 1, end),
        "the last query's own key is missing: the end is one past that query's position":
            (first, min(last, S)),
        "the end is that of the block's first query: its last query sees later keys":
            (first, min(i + 1, S)),
        "the last query of the last block is T - 1": (first, min(end_of_block, S)),
        "the end is past the last key: it should be at most S": (first, last + 1),
        "one key too many at the end: the end is one past the last query's position":
            (first, min(last + 2, S)),
        "keys are cut at T: there are S of them": (first, min(last + 1, T)),
        "i0 is ignored in bounds: query t is at position i0 + t":
            (first - i0, min(last - i0 + 1, S)),
        "the sign of i0: query t is at position i0 + t":
            (first - 2 * i0, min(last - 2 * i0 + 1, S)),
        "i0 is ignored in the first key: query t is at position i0 + t": (first - i0, end),
        "i0 is ignored in the end: query t is at position i0 + t":
            (first, min(last - i0 + 1, S)),
        "the first key is 0: blocks before the window are visited": (0, end),
        "the end is S: blocks of later keys are visited": (first, S),
        "all blocks of keys are visited": (0, S),
        "w = inf is cut to a number that is too small: use 2^30": (first if i < 2**20 else i, end),
        "the last block of queries, which may be short, is left out":
            (first, end if last - i0 < T - 1 else 0)}
