"""What relevance maps say: which pairs of a query and a key are inside the window, and alive.

Evaluations in train.py log the share of alive pairs; lab/tiles.py looks at single tiles.
"""
import torch

from multiscreen import softmask
from support.models import has_windows, windows_of


def inside(T, w):
    """Which pairs (i, j) of T positions Softmask lets through. w: (H,) tokens -> (H, T, T)"""
    i = torch.arange(T, device=w.device)
    return softmask(i - i[:, None], w[:, None, None]) > 0


def maps_of(model, tokens):
    """A model's relevance maps; none unless each layer calls the `screen` it is given once."""
    with torch.compiler.set_stance("force_eager"):     # compiling would take longer
        maps = model.relevance_maps(tokens)
    return maps if len(maps) == len(model.layers) else []


def alive_pairs(model, tokens):
    """A column of the log: the share of the pairs inside the windows that get a weight.

    tokens: (B, T), T <= 512. Nothing for a model without relevance maps.
    """
    if not has_windows(model):
        return {}
    seen = [inside(tokens.shape[1], w) for w in windows_of(model)]
    maps = maps_of(model, tokens)
    if not maps:
        return {}
    alive = sum(((alpha_d != 0) & pairs).sum().item() for alpha_d, pairs in zip(maps, seen))
    pairs = sum(pairs.sum().item() for pairs in seen) * len(tokens)
    return {"alive": alive / pairs}
