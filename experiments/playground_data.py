"""The numbers of the page that experiments/playground.py writes: what each tile sees of a text."""
import base64
import math
import re

import numpy as np
import torch

from experiments.relevance_maps import get_maps
from multiscreen import trim


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
    """What each layer hands to `screen` and gets back: a list of (q, k, v, r, h). tokens: (1, T)"""
    layers = []

    def record(q, k, v, w, r, i0):
        h = model.screen(q, k, v, w, r, i0)
        layers.append((q[0].float(), k[0].float(), v[0].float(), r, h[0].float()))
        return h

    x = model.embed(tokens)
    for tile in model.layers:
        x = tile(x, record)
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


def pack(arrays, dtype):
    """Arrays of numbers one after the other, little-endian, as base64 text."""
    flat = np.concatenate([np.asarray(a).ravel() for a in arrays])
    return base64.b64encode(flat.astype(np.dtype(dtype).newbyteorder("<")).tobytes()).decode()


def get_data(model, tokenizer, tokens):
    """What the page gets, a dict for JSON. tokens: a list."""
    x = torch.tensor([tokens], device=model.W_E.device)
    pieces = tokenizer.decode_tokens_bytes(tokens)
    needle = find_needle(pieces)
    maps, rows = get_maps(model, x)
    maps = maps.reshape(-1, *maps.shape[2:])
    past = np.tril_indices(len(tokens))                # pairs (i, j <= i), row by row
    similarities, values, scales, lengths = [], [], [], []
    for q, k, v, r, h in record_screening(model, x):
        s = round_similarities(q @ k.mT, r).cpu().numpy()
        similarities.append(s[:, *past])
        scale = v.abs().amax((1, 2), keepdim=True).clamp_min(1e-12) / 127
        values.append((v / scale).round().cpu().numpy())
        scales += scale.flatten().tolist()
        lengths += h[:, -1].norm(dim=-1).tolist()
    data = {"pieces": [piece.decode(errors="backslashreplace") for piece in pieces],
            "tokenizer": tokenizer.name, "layers": model.config.N_L, "tiles": model.config.N_H,
            "w": [None if math.isinf(w) else w for _, _, w, _, _ in rows],     # JSON has no inf
            "r": [r for _, _, _, r, _ in rows], "alive": [share for *_, share in rows],
            "d_V": model.config.d_V, "similarities": pack(similarities, np.int16),
            "values": pack(values, np.int8), "value_scales": scales,
            "chosen": choose_tile(maps, needle and needle[2]), "needle": None,
            # PyTorch's numbers for the last query, for the page to compare with.
            "last_alpha_d": pack([maps[:, -1]], np.float32), "last_length": lengths}
    if needle:
        letter, number, positions = needle
        answer = model.generate(x, len(tokenizer.encode_ordinary(number)))[0].tolist()
        data["needle"] = {"letter": letter, "number": number, "positions": positions,
                          "answer": tokenizer.decode(answer)}
    return data
