"""The numbers of the page: what each tile sees of a text."""
import base64
import math
import re

import numpy as np
import torch

from multiscreen import softmask, trim, weights, window


def find_needle(pieces):
    """(letter, number, positions of its line's tokens) of an ABCDigits prompt, or None.

    pieces: the bytes of each token. A letter with several lines: the first number, all lines.
    """
    text = b"".join(pieces)
    question = re.search(rb"(?:^|\n)([A-Z])=$", text)
    lines = question and list(re.finditer(rb"^%b=(\d+)$" % question[1], text, re.MULTILINE))
    if not lines:
        return None
    ends = np.cumsum([len(piece) for piece in pieces])
    positions = []
    for line in lines:
        first, last = np.searchsorted(ends, [line.start(), line.end() - 1], side="right")
        positions += range(int(first), int(last) + 1)
    return question[1].decode(), lines[0][1].decode(), positions


@torch.no_grad()
def record_screening(model, tokens):
    """What each layer hands to `screen`, what returns, and the maps: (q, k, v, w, r, h, alpha_d).

    tokens: (1, T). Without the batch's axis, and on the CPU.
    """
    layers = []

    def record(q, k, v, w, r, i0):
        h = model.screen(q, k, v, w, r, i0)
        alpha_d = weights(model.screen, q, k, w, r, i0)
        layers.append([x.float().cpu() for x in (q[0], k[0], v[0], w, r, h[0], alpha_d[0])])
        return h

    model.through_layers(tokens, None, record)
    return layers


def round_similarities(s, r):
    """s in units of 1/32767, 16 bits; no rounding crosses the threshold of Trim. (H, T, T); r (H,)

    A similarity on the wrong side of 1 - r goes one unit back.
    """
    s, r = s.clamp(-1, 1), r[:, None, None]
    rounded = torch.round(s.double() * 32767)
    accepted = trim(s, r) > 0
    wrong = (trim(rounded / 32767, r.double()) > 0) != accepted
    step = torch.where(accepted, 1.0, -1.0)
    return torch.where(wrong, rounded + step, rounded).to(torch.int16)


def choose_tile(maps, needle):
    """The tile to begin with. maps: (tiles, T, T); needle: positions, or None.

    With a needle, the tile whose last query finds its line and little else: the line's relevance
    times its share of all that the query gives is the largest. Without one, the tile that looks
    back farthest: the largest sum of alpha_d times the distance.
    """
    if needle:
        found = maps[:, -1, needle].sum(1)
        return int((found**2 / np.maximum(maps[:, -1].sum(1), 1e-6)).argmax())
    i = np.arange(maps.shape[1])
    return int((maps * (i[:, None] - i)).sum((1, 2)).argmax())


def pack(numbers, dtype):
    """An array of numbers, little-endian, as base64 text."""
    little_endian = np.asarray(numbers).astype(np.dtype(dtype).newbyteorder("<"))
    return base64.b64encode(little_endian.tobytes()).decode()


@torch.no_grad()
def round_matrices(model):
    """Round the matrices of a model to 16 bits, in place, as `model_data` stores them."""
    for p in model.parameters():
        if p.ndim > 1:
            p.copy_(p.half())


@torch.no_grad()
def model_data(model):
    """Sizes and weights for model.js, a dict for JSON. Matrices have 16 bits; the rest is exact."""
    names = ("W_Q", "W_K", "W_V", "W_G", "W_O")
    matrices = [model.W_E, *(getattr(tile, name) for tile in model.layers for name in names)]
    w = torch.cat([window(tile.s_w) for tile in model.layers]).tolist()
    return vars(model.config) | {
        "s_E": model.s_E.item(), "s_F": model.s_F.item(),
        "w": [None if math.isinf(x) else x for x in w],                    # JSON has no inf
        "r": torch.cat([tile.acceptance() for tile in model.layers]).tolist(),
        "s_O": torch.cat([tile.s_O for tile in model.layers]).tolist(),
        "matrices": pack(torch.cat([W.flatten() for W in matrices]).cpu(), np.float16)}


def alive(alpha_d, w):
    """Pr, the share of the pairs inside the window w with a relevance. alpha_d: (T, T)"""
    d = torch.arange(len(alpha_d)) - torch.arange(len(alpha_d))[:, None]
    return (alpha_d != 0)[softmask(d, w) > 0].double().mean().item()


def page_data(model, tokenizer, tokens):
    """What the page gets, a dict for JSON. tokens: a list."""
    x = torch.tensor([tokens], device=model.W_E.device)
    q, k, v, w, r, h, maps = (torch.cat(parts) for parts in zip(*record_screening(model, x)))
    past = np.tril_indices(len(tokens))                # pairs (i, j <= i), row by row
    scale = v.abs().amax((1, 2), keepdim=True).clamp_min(1e-12) / 127
    pieces = tokenizer.decode_tokens_bytes(tokens)
    needle = find_needle(pieces)
    data = {"model": model_data(model),
            "pieces": [piece.decode(errors="backslashreplace") for piece in pieces],
            "tokenizer": tokenizer.name, "layers": model.config.N_L, "tiles": model.config.N_H,
            "w": [None if math.isinf(x) else x for x in w.tolist()],       # JSON has no inf
            "r": r.tolist(), "alive": [alive(*tile) for tile in zip(maps, w)],
            "d_V": model.config.d_V,
            "similarities": pack(round_similarities(q @ k.mT, r).numpy()[:, *past], np.int16),
            "values": pack((v / scale).round(), np.int8), "value_scales": scale.flatten().tolist(),
            "chosen": choose_tile(maps.numpy(), needle and needle[2]), "needle": None,
            # PyTorch's numbers for the last query, for the page to compare with.
            "last_alpha_d": pack(maps[:, -1], np.float32),
            "last_length": h[:, -1].norm(dim=-1).tolist()}
    if needle:
        letter, number, positions = needle
        answer = model.generate(x, len(tokenizer.encode_ordinary(number)))[0].tolist()
        data["needle"] = {"letter": letter, "number": number, "positions": positions,
                          "answer": tokenizer.decode(answer)}
    return data
