"""The numbers of the problem set (problems.md), computed: parameters, bytes, windows, FLOPs.

    python -m exercises.teach.accounting

prints the answer to each question. A product of (m, n) and (n, p) counts 2 m n p FLOPs; an element
of float32 has 4 bytes. Nothing else is counted.
"""
import math
from types import SimpleNamespace

PSI_8 = SimpleNamespace(N_L=8, N_H=8, d_E=64, d_K=16, d_V=64, N=50257, w_th=256)
T = 4096


def parameters(c):
    """Five matrices, s_w, s_r and s_O for each tile; W_E, s_E and s_F."""
    tile = c.d_E * (2 * c.d_K + 3 * c.d_V) + 3
    return c.N * c.d_E + 2 + c.N_L * c.N_H * tile


def training_bytes(parameters):
    """Weights, gradients, and Adam's two moments, all in float32."""
    return 16 * parameters


def flops_of_projections(c):
    """For one token, all layers: q, k, v, g and the update."""
    return c.N_L * c.N_H * 2 * c.d_E * (2 * c.d_K + 3 * c.d_V)


def flops_of_head(c):
    """For one token."""
    return 2 * c.N * c.d_E


def flops_of_pair(c):
    """For one tile, one query and one key: a similarity, and a value times its relevance."""
    return 2 * c.d_K + 2 * c.d_V


def initial_windows(c):
    """The windows of a layer's tiles before training: 1 + w_th^(h/(N_H - 1))."""
    return [1 + c.w_th ** (h / (c.N_H - 1)) for h in range(c.N_H)]


def seen(i, w):
    """How many keys query i sees: those at the distances 0 .. ceil(w) - 1 that exist."""
    return i + 1 if w == math.inf else min(i + 1, math.ceil(w))


def pairs(T, w):
    """How many pairs of a query and a key lie inside a window, in T tokens."""
    return sum(seen(i, w) for i in range(T))


def visited_blocks(T, w, BI=16, BJ=16):
    """How many blocks of BJ keys the loops of part 4 visit, in all programs of BI queries."""
    count = 0
    for first in range(0, T, BI):
        oldest, last = first + 1 - seen(first, w), min(first + BI, T) - 1
        count += last // BJ - oldest // BJ + 1
    return count


def cache_bytes(c, tokens):
    """Keys and values of that many tokens, all tiles of all layers, float32."""
    return 4 * c.N_L * c.N_H * (c.d_K + c.d_V) * tokens


def intensity(c, size):
    """FLOPs per byte of a visit: loads a block of `size` keys and values, has the queries."""
    return size * size * flops_of_pair(c) / (4 * size * (c.d_K + c.d_V))


def gamma(w, w_th):
    """Eq. 7."""
    return 0.5 * (math.cos(math.pi * w / w_th) + 1) if w < w_th else 0.0


def positions_of_a_turn(w, w_th):
    """How many positions MiPE takes to turn by 2 pi."""
    return 2 * w / gamma(w, w_th)


def answers():
    """{question: {what: number}}"""
    c = PSI_8
    n, windows = parameters(c), initial_windows(c)
    causal, narrow = pairs(T, math.inf), pairs(T, 17)
    layer = sum(pairs(T, w) for w in windows)
    screening = c.N_L * layer * flops_of_pair(c) / T
    return {
        "1": {"parameters": n, "of the embedding": c.N * c.d_E, "bytes to train": training_bytes(n),
              "GiB for psi = 64": training_bytes(3_963_961_346) / 2**30},
        "2": {"projections": flops_of_projections(c), "head": flops_of_head(c),
              "share of the head, %":
                  100 * flops_of_head(c) / (flops_of_head(c) + flops_of_projections(c))},
        "3": {"pairs, w = 17": narrow, "pairs, w = inf": causal, "ratio": causal / narrow,
              "T x T, bytes of a layer": 4 * c.N_H * T * T},
        "4": {"windows": [round(w, 1) for w in windows], "pairs of a layer": layer,
              "share of all, %": 100 * layer / (c.N_H * causal),
              "FLOPs of a token": screening,
              "FLOPs of a token, all windows inf":
                  c.N_L * c.N_H * causal * flops_of_pair(c) / T},
        "5": {"blocks, w = 17": visited_blocks(T, 17), "blocks, w = 18": visited_blocks(T, 18),
              "blocks, w = inf": visited_blocks(T, math.inf)},
        "6": {"bytes of a token": cache_bytes(c, 1), "all of 131,072": cache_bytes(c, 2**17),
              "the widest window": cache_bytes(c, math.ceil(max(windows)))},
        "7": {"BI = BJ = 16": intensity(c, 16), "BI = BJ = 128": intensity(c, 128)},
        "8": {"gamma(17)": gamma(17, 256), "a turn, w = 17": positions_of_a_turn(17, 256),
              "gamma(128)": gamma(128, 256), "a turn, w = 128": positions_of_a_turn(128, 256),
              "s_w from w = 257 to 513": math.log(512) - math.log(256)},
    }


def in_words(x):
    """A number as problems.md writes it."""
    if isinstance(x, list):
        return ", ".join(map(str, x))
    return f"{x:,}" if isinstance(x, int) else f"{x:,.0f}" if x >= 1000 else f"{x:.3g}"


def main():
    for question, numbers in answers().items():
        for what, number in numbers.items():
            print(f"{question}  {what:36s}{in_words(number):>20s}")


if __name__ == "__main__":
    main()
