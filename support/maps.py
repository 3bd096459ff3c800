"""What relevance maps say: which pairs of a query and a key are inside the window, and alive."""
import torch

from multiscreen import softmask


def inside(T, w):
    """Which pairs (i, j) of T positions Softmask lets through. w: (H,) tokens -> (H, T, T)"""
    i = torch.arange(T, device=w.device)
    return softmask(i - i[:, None], w[:, None, None]) > 0


def count_alive(alpha_d, w):
    """(alive, inside) of each tile: pairs that get a weight, pairs inside its window.

    alpha_d: (B, H, T, T), relevance maps of a layer; w: (H,) tokens. Two tensors (H,)
    """
    pairs = inside(alpha_d.shape[-1], w)
    alive = ((alpha_d != 0) & pairs).sum((0, 2, 3))
    return alive, pairs.sum((1, 2)) * len(alpha_d)
