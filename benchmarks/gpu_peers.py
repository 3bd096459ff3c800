"""What the fused kernel is measured against: stock PyTorch's way to screen."""
import torch
import torch._dynamo
import torch._functorch.config
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from multiscreen import softmask, trim


def flex_screen(T, w):
    """A function (q, k, v, w, r) that screens with FlexAttention. T: a multiple of 128.

    A softmax of log alpha_d is alpha_d over its sum, and exp(lse) is that sum: relevances are at
    least 0, so the product of the two is Eq. 12. Below 1e-30 a relevance counts as 1e-30. q and k
    are cast to v's dtype, as FlexAttention requires. The block mask is made here, once, from the
    windows w (H,): while they are trained it must be made again after each step.
    """
    def inside(b, h, i, j):
        return (j <= i) & (i - j < edges[h])

    edges, compiled = w.detach(), w.is_cuda
    block_mask = create_block_mask(inside, None, len(w), T, T, device=w.device, _compile=compiled)
    if compiled:
        torch._dynamo.config.recompile_limit = 64      # a graph for each T
        torch._functorch.config.donated_buffer = False  # backward is timed again and again
    flex = torch.compile(flex_attention, dynamic=False) if compiled else flex_attention

    def screen(q, k, v, w, r):
        def score(s, b, h, i, j):
            return (trim(s, r[h]) * softmask(j - i, w[h])).clamp(min=1e-30).log()

        u, lse = flex(q.to(v.dtype), k.to(v.dtype), v, score_mod=score, block_mask=block_mask,
                      scale=1.0, return_lse=True)
        return (u * lse.exp()[..., None]).to(v.dtype)

    return screen
