"""The layout of `Local` for each mechanism: a window in odd layers, no positions in even ones.

    python train.py --model study.local.Entmax --layers 6 --tiles 4 --d-E 112

Every second layer, the first one included, sees the last 64 tokens, the query's own among them, and
has the positions of its mechanism. The other layers see all tokens before them and have no
positions. So two models differ in their mechanism alone, and not in what they know about places,
except that stick-breaking, forgetting and selective attention depend by themselves on the order of
keys. Softmax in this layout is `Softmax`.
"""
import math

import torch

from study import attention
from study.attention import LocalBlock, transformer_of


class ALiBiBlock(LocalBlock, attention.ALiBiBlock):
    """Slopes in the windows. The other layers are those of softmax without positions."""

    def sloped(self, s, d):
        if self.nearby == math.inf:
            return s
        return super().sloped(s, d)


class SigmoidBlock(ALiBiBlock, attention.SigmoidBlock):
    """Slopes in the windows; the bias depends on the number of keys in all layers."""


class ScreeningBlock(LocalBlock, attention.ScreeningBlock):
    """Windows of 64, or infinite ones, which turn Softmask and MiPE off. No window is learned."""

    def __init__(self, config, dtype=None, number=1):
        super().__init__(config, dtype, number)
        s_w = torch.full((config.N_H,), math.log(self.nearby - 1) / self.speed)
        del self.s_w
        self.register_buffer("s_w", s_w, persistent=False)         # an infinite weight is refused


def in_layout(block):
    """What --model takes: a mechanism that needs nothing but LocalBlock's windows and positions."""
    return transformer_of(type(block.__name__, (LocalBlock, block), {"__module__": __name__}))


Softmax = attention.Local
ALiBi = transformer_of(ALiBiBlock)
Sigmoid = transformer_of(SigmoidBlock)
Screening = transformer_of(ScreeningBlock)
NoPE = in_layout(attention.NoPEBlock)
SSMax = in_layout(attention.SSMaxBlock)
OffByOne = in_layout(attention.OffByOneBlock)
Entmax = in_layout(attention.EntmaxBlock)
StickBreaking = in_layout(attention.StickBreakingBlock)
Forgetting = in_layout(attention.ForgettingBlock)
Selective = in_layout(attention.SelectiveBlock)
