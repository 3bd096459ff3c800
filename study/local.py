"""The layout of `Local` for each mechanism: a window in odd layers, no positions in even ones.

    python train.py --model study.local.Entmax --layers 6 --tiles 4 --d-E 112

Every second layer, the first one included, sees the last 64 tokens, the query's own among them, and
has the positions of its mechanism. The other layers see all tokens before them and have no
positions. So two models differ in their mechanism and its positions inside windows, and in nothing
else. Stick-breaking, forgetting and selective attention depend by themselves on the order of keys.
"""
import math

import torch

from study import attention

Softmax = attention.Local


def in_layout(mechanism):
    """A mechanism with the windows and positions of `Local`."""
    block = mechanism.block
    return attention.transformer_of(type(block.__name__, (Softmax.block, block), {}))


NoPE = in_layout(attention.NoPE)
ALiBi = in_layout(attention.ALiBi)
SSMax = in_layout(attention.SSMax)
OffByOne = in_layout(attention.OffByOne)
Sigmoid = in_layout(attention.Sigmoid)                 # its bias counts keys in all layers
Entmax = in_layout(attention.Entmax)
StickBreaking = in_layout(attention.StickBreaking)
Forgetting = in_layout(attention.Forgetting)
Selective = in_layout(attention.Selective)


@attention.transformer_of
class Screening(Softmax.block, attention.Screening.block):
    """Windows of 64, or infinite ones, which turn Softmask and MiPE off. No window is learned."""

    def __init__(self, config, dtype=None, number=1):
        super().__init__(config, dtype, number)
        s_w = torch.full((config.N_H,), math.log(self.nearby - 1) / self.speed)
        del self.s_w
        self.register_buffer("s_w", s_w, persistent=False)         # an infinite weight is refused
