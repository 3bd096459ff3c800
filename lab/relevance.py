"""Is a model's relevance absolute, and what weight does each key get? For lab.check and lab.tiles.

Version 4 of the paper calls relevance absolute "when its values lie on a fixed bounded scale,
depend on neither competing keys nor sequence length, require no sequence-length-dependent
calibration, and can all be zero". The values are here the weights by which a layer sums values. A
constant that was set for one length by hand passes.
"""
import torch

ROUNDING = 1e-6                                        # of weights in float64
TINY = 2.0**-20                                        # values that TanhNorm leaves as they are


class Identity:
    """A cache that gives a layer columns of the identity in place of its values.

    So the sums of values are the weights of these keys. first: number of the first column.
    """
    end = 0

    def __init__(self, first):
        self.first = first

    def append(self, k, v, w):
        S, V = v.shape[2:]
        columns = TINY * torch.eye(S, self.first + V, dtype=v.dtype, device=v.device)
        return k, columns[:, self.first :].expand(v.shape)


def weights_of(layer, x, screen):
    """The weight of each key of each query in a layer, (B, H, T, T), for any way to attend.

    They are seen where a layer's sums of values leave `mix` (a Transformer's) or enter `bound`.
    """
    method = "bound" if hasattr(layer, "bound") else "mix"
    call, parts, done = getattr(layer, method), [], 0

    def note(h, *inputs):
        if method == "mix":
            h = call(h, *inputs)
        parts.append(h / TINY)
        return h

    setattr(layer, method, note)
    while done < x.shape[1]:
        layer(x, screen, Identity(done))
        if not parts:
            raise ValueError(f"the layer does not call `{method}`")
        done += parts[-1].shape[3]
    delattr(layer, method)
    return torch.cat(parts, 3)[..., : x.shape[1]]


@torch.no_grad()
def absolute(model, tokens):
    """{condition of absolute relevance: (yes or NO, the number seen)}, of a model in float64.

    tokens: (B, T), B above 1. The matrices of the model are changed. The first three conditions
    must hold in all layers, the last two in one. Keys that are never seen, by their position, are
    not rejected.
    """
    bounded, by_keys, by_length, least, emptiest = [], [], [], [], []          # of each layer
    x, screen = model.embed(tokens), model.screen
    for layer in model.layers:
        weights, others, mixed = weights_of(layer, x, screen), x.roll(1, 0), x.clone()
        mixed[:, 1::2] = others[:, 1::2]
        altered = weights_of(layer, mixed, screen) - weights
        later = weights_of(layer, torch.cat((others[:, :8], x), 1), screen)[..., 8:, 8:] - weights
        seen = (weights != 0).any(0).expand_as(weights)            # in one of the sequences
        y = layer(x, screen)
        for W in layer.parameters():                   # scores may be as large as they like
            if W.ndim > 1:
                W.mul_(100.0)
        bounded.append(weights_of(layer, x, screen).abs().max())
        by_keys.append(altered[..., ::2, ::2].abs().max())
        by_length.append(later.abs().max())
        least.append(weights[seen].abs().min())
        emptiest.append(weights.abs().amax(-1)[seen.any(-1)].min())
        x = y
    return {
        "bounded: largest weight with all matrices of a layer 100 times as large":
            tick(torch.max, bounded, 1 + ROUNDING),
        "no competing keys: change of weights with every other token replaced":
            tick(torch.max, by_keys, ROUNDING),
        "no length: change of weights behind eight more tokens":
            tick(torch.max, by_length, ROUNDING),
        "exact zeros: least weight of the keys that a query can see": tick(torch.min, least, 0),
        "all can be 0: least of the queries' largest weights": tick(torch.min, emptiest, 0)}


def tick(worst, values, limit):
    """(yes or NO, the number seen), of the largest or the smallest value of all layers."""
    x = worst(torch.stack(values))
    return "yes" if x <= limit else "NO", f"{x:.3g}"
