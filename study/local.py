"""The layout of `local` for each mechanism: a window in odd layers, no positions in even ones.

    python train.py --model transformer:6,4,112:lab.baselines.local.Entmax

Every second layer, the first one included, sees the last 64 tokens, the query's own among them, and
has the positions of its mechanism. The other layers see all tokens before them and have no
positions. So two models differ in their mechanism alone, and not in what they know about places,
except that stick-breaking, forgetting and selective attention depend by themselves on the order of
keys. Softmax in this layout is `local`.
"""
import math

import torch

from lab.baselines import attention
from lab.baselines.attention import Local


class NoPE(Local, attention.NoPE):
    """Windows, and no positions anywhere."""


class ALiBi(Local, attention.ALiBi):
    """Slopes in the windows. The other layers are those of softmax without positions."""

    def sloped(self, s, d):
        if self.nearby == math.inf:
            return s
        return super().sloped(s, d)


class SSMax(Local, attention.SSMax):
    pass


class OffByOne(Local, attention.OffByOne):
    pass


class Sigmoid(ALiBi, attention.Sigmoid):
    """Slopes in the windows; the bias depends on the number of keys in all layers."""


class Entmax(Local, attention.Entmax):
    pass


class StickBreaking(Local, attention.StickBreaking):
    pass


class Forgetting(Local, attention.Forgetting):
    pass


class Selective(Local, attention.Selective):
    pass


class Screening(Local, attention.Screening):
    """Windows of 64, or infinite ones, which turn Softmask and MiPE off. No window is learned."""

    def __init__(self, config, dtype=None, number=1):
        super().__init__(config, dtype, number)
        s_w = torch.full((config.N_H,), math.log(self.nearby - 1) / self.speed)
        del self.s_w
        self.register_buffer("s_w", s_w, persistent=False)         # an infinite weight is refused
