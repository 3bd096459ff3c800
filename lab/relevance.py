"""What weight does each key get in a layer? For lab.check and lab.tiles."""
import torch

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
    if not hasattr(layer, method):
        raise ValueError("a layer has neither `bound` nor `mix`")
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
