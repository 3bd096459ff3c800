"""What the page gets: a model, a text, and PyTorch's numbers to compare with."""
import base64
import math

import numpy as np
import torch

MATRICES = ("W_Q", "W_K", "W_V", "W_G", "W_O")


def pack(numbers, dtype):
    """A tensor as base64 text: numbers of a NumPy dtype, little-endian."""
    little_endian = numbers.cpu().numpy().astype(np.dtype(dtype).newbyteorder("<"))
    return base64.b64encode(little_endian.tobytes()).decode()


def round_matrices(model):
    """Round the matrices of a model to 16 bits, in place."""
    for p in model.parameters():
        if p.ndim > 1:
            p.copy_(p.half())


@torch.no_grad()
def model_data(model):
    """Sizes and weights for model.js, a dict for JSON. Matrices in 16 bits, scalars as they are."""
    matrices = [model.W_E, *(getattr(tile, name) for tile in model.layers for name in MATRICES)]
    w = torch.cat([tile.w for tile in model.layers]).tolist()
    return vars(model.config) | {
        "s_E": model.s_E.item(), "s_F": model.s_F.item(),
        "w": [None if math.isinf(x) else x for x in w],                    # JSON has no inf
        "r": torch.cat([tile.r for tile in model.layers]).tolist(),
        "s_O": torch.cat([tile.s_O for tile in model.layers]).tolist(),
        "matrices": pack(torch.cat([W.flatten() for W in matrices]), np.float16)}


@torch.no_grad()
def page_data(model, text):
    """What the page gets, a dict for JSON. The model's matrices are rounded to 16 bits, in place.

    So PyTorch's numbers, for the last byte of the text, are those of the same weights.
    """
    # A browser's text field turns each line end into \n, and the page computes what it holds.
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    round_matrices(model)
    tokens = torch.tensor([list(text.encode())], device=model.W_E.device)
    logits = model(tokens)[0, -1]
    alpha_d = torch.cat([layer[0, :, -1] for layer in model.relevance_maps(tokens)])
    return {"model": model_data(model), "text": text, "last_alpha_d": pack(alpha_d, np.float32),
            "last_logits": logits.tolist()}
