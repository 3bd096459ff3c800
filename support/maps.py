"""What relevance maps say: which pairs of a query and a key are inside the window, and alive."""
import statistics

import torch

from multiscreen import softmask
from support import distributed as dist
from support.models import has_windows


def inside(T, w):
    """Which pairs (i, j) of T positions Softmask lets through. w: (H,) tokens -> (H, T, T)"""
    i = torch.arange(T, device=w.device)
    return softmask(i - i[:, None], w[:, None, None]) > 0


def count_alive(alpha_d, w):
    """(alive, inside) of each tile: pairs that get a weight, pairs inside its window.

    alpha_d: (B, H, T, T), relevance maps of a layer; w: (H,) tokens. Returns two tensors (H,).
    """
    pairs = inside(alpha_d.shape[-1], w)
    alive = ((alpha_d != 0) & pairs).sum((0, 2, 3))
    return alive, pairs.sum((1, 2)) * len(alpha_d)


def maps_of(model, tokens):
    """A model's relevance maps; none unless each layer calls the `screen` it is given once."""
    with torch.compiler.set_stance("force_eager"):     # compiling would take longer
        maps = model.relevance_maps(tokens)
    return maps if len(maps) == len(model.layers) else []


def alive_pairs(model, tokens):
    """A column of the log: the share of the pairs inside the windows that get a weight.

    tokens: (B, T), T <= 512. Nothing for a model without relevance maps.
    """
    maps = maps_of(model, tokens) if has_windows(model) else []
    if not maps:
        return {}
    counts = [torch.stack(count_alive(alpha_d, dist.full(tile.window())))
              for alpha_d, tile in zip(maps, model.layers)]
    alive, pairs = torch.stack(counts).sum((0, 2)).tolist()
    return {"alive": alive / pairs}


@torch.no_grad()
def windows(model):
    """Columns of the log: the smallest, median and largest window, of a model that has some."""
    if not has_windows(model):
        return {}
    w = torch.cat([dist.full(layer.window()) for layer in model.layers]).tolist()
    return {"w_min": min(w), "w_median": statistics.median(w), "w_max": max(w)}
