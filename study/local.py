"""Softmax and screening in one layout: a window in odd layers, no positions in even ones.

    python train.py --model study.local.Screening --layers 6 --tiles 4 --d-E 112

Every second layer, the first one included, sees the last 64 tokens, the query's own among them, and
has the positions of its mechanism. The other layers see all tokens before them and have no
positions. So two models differ in their mechanism alone, and not in what they know about places.
"""
import math

import torch

from study import attention

Softmax = attention.Local


@attention.transformer_of
class Screening(Softmax.block, attention.Screening.block):
    """Windows of 64, or infinite ones, which turn Softmask and MiPE off. No window is learned."""

    def __init__(self, config, dtype=None, number=1):
        super().__init__(config, dtype, number)
        s_w = torch.full((config.N_H,), math.log(self.nearby - 1) / self.speed)
        del self.s_w
        self.register_buffer("s_w", s_w, persistent=False)         # an infinite weight is refused
