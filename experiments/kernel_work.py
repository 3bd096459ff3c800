"""The operations and bytes of screening, and of attention in a model of that size, by hand.

For N query-key pairs in the windows of one layer, d_K = K = 16, d_V = V = 64:

                          forward             backward
    operations            2 N (K + V)         2 N (2K + V) for dq, 2 N (2K + 2V) for dk and dv
    bytes per position    384: q, k, v, h     1024: q, k, v, dh twice, and dq, dk, dv

An operation counts once, however many parts its operands have.
"""
import math

import torch

from baselines.transformer import SIZES

# The Transformer of the size of psi = 48: half as many layers.
N_L, HEADS, _ = SIZES["1.3B"]
HEAD = 128


def initial_windows(n=48):
    """The windows of a layer of n tiles before training."""
    return [math.exp(s) + 1 for s in torch.linspace(0, math.log(256), n).tolist()]


def pairs_inside(T, w):
    """How many query-key pairs of a sequence of T lie in the windows w of a layer."""
    # The queries that see a key d back are T - d, for d = 0 .. n - 1 where the window is n.
    n_inside = [math.ceil(min(width, T)) for width in w]
    return sum(n * T - n * (n - 1) // 2 for n in n_inside)


def screening_work(T, H, pairs):
    """(operations, bytes) of a layer of H tiles, forward and backward."""
    return [(160 * pairs, 384 * H * T), (512 * pairs, 1024 * H * T)]


def causal_work(T):
    """(operations, bytes) of a layer of the Transformer, forward and backward."""
    return [(2 * HEADS * HEAD * T**2, 8 * HEADS * HEAD * T),
            (5 * HEADS * HEAD * T**2, 16 * HEADS * HEAD * T)]
