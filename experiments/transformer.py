"""The paper's baseline: a LLaMA-style Transformer (appendix "Transformer Baseline Configurations").

RMSNorm, RoPE (theta = 10,000, positions divided by a scaling factor that can be changed after training), SwiGLU with
floor(8 d_E / 3) hidden units, embedding shared with the head, a final norm without a weight, no biases. For QKNorm, RMSNorm
with weights on queries and keys, name it `transformer:45M:qknorm`; `transformer:4,4,96` is N_L, N_H, d_E of your choice.

Paper:  python train.py --model transformer:45M --data slimpajama/ --tokenizer gpt2 --seq-len 4096 --batch-size 16 \\
            --accumulate 64 --steps 65536 --warmup 4096 --out out45M
Small:  python train.py --model transformer:8M --out out-t                 (2 minutes on 2 cores: bytes, 256 at a time)
        It leaves out the larger sizes, and nearly all of the 2^38 tokens.
Table:  python -m experiments.transformer                                  (the sizes and parameter counts of the paper)

train.py takes weight decay 0.1, clipping at 1.0 and the learning rates below from here; --weight-decay 0 and --clip 0
are the paper's sanity checks.
"""
import math
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from multiscreen import Multiscreen

SIZES = {"8M": (6, 4, 128), "45M": (6, 8, 512), "353M": (24, 16, 1024), "1.3B": (24, 16, 2048)}        # N_L, N_H, d_E
LEARNING_RATES = {"8M": 1e-3, "45M": 1e-3, "353M": 3e-4, "1.3B": 2e-4}
PAPER = {"8M": (7_613_312, 1_180_416), "45M": (44_609_024, 18_877_440), "353M": (353_453_056, 301_989_888),
         "1.3B": (1_310_935_040, 1_208_008_704)}                                              # total, non-embedding


@dataclass
class Config:
    """Sizes. The head dimension is d_E / N_H."""
    N_L: int
    N_H: int
    d_E: int
    vocab_size: int = 50257
    qk_norm: bool = False
    theta: float = 10_000.0

    def __post_init__(self):
        if min(self.N_L, self.N_H, self.d_E, self.vocab_size) < 1 or self.d_E % (2 * self.N_H):
            raise ValueError(f"N_L, N_H, d_E = {self.N_L}, {self.N_H}, {self.d_E}: all at least 1, and d_E a multiple of 2 N_H")


def get_config(variant, **given):
    """The Config that a name after "transformer:" stands for, with what is given (not None) put over it."""
    size, _, norm = variant.partition(":")
    dims = size.split(",")
    if not (size in SIZES or len(dims) == 3 and all(d.isdigit() for d in dims)) or norm not in ("", "qknorm"):
        raise ValueError(f"transformer:{variant} is unknown: take transformer:8M, 45M, 353M, 1.3B or N_L,N_H,d_E, and :qknorm after it")
    base = dict(zip(("N_L", "N_H", "d_E"), SIZES.get(size) or map(int, dims)), qk_norm=bool(norm))
    names = Config.__dataclass_fields__
    return Config(**base | {k: v for k, v in given.items() if v is not None and k in names})


def rope(x, i, scale=1.0, theta=10_000.0):
    """Rotary positions: the pair (n, n + K/2) turns by i / scale * theta^(-2n/K). x: (B, H, T, K); i: (T,) -> like x."""
    K = x.shape[-1]
    speed = theta ** (-torch.arange(0, K, 2, device=x.device, dtype=torch.float64) / K)
    angle = torch.remainder(i[:, None] / scale * speed, 2 * math.pi)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


class Block(nn.Module):
    """x + Attention(RMSNorm(x)), then x + SwiGLU(RMSNorm(x)). Geometry in x's dtype, matrix products in `dtype`."""

    def __init__(self, config, dtype=None):
        super().__init__()
        E, self.N_H, self.dtype, self.theta, self.rope_scale = config.d_E, config.N_H, dtype, config.theta, 1.0
        hidden, head = 8 * E // 3, E // config.N_H
        self.norm_1, self.norm_2 = nn.RMSNorm(E, eps=1e-5), nn.RMSNorm(E, eps=1e-5)
        self.norm_q, self.norm_k = (nn.RMSNorm(head, eps=1e-5) if config.qk_norm else nn.Identity() for _ in range(2))
        self.W_Q, self.W_K, self.W_V, self.W_O = (nn.Parameter(torch.empty(E, E)) for _ in range(4))
        self.W_gate, self.W_up = nn.Parameter(torch.empty(E, hidden)), nn.Parameter(torch.empty(E, hidden))
        self.W_down = nn.Parameter(torch.empty(hidden, E))

    def project(self, x, W):
        dtype = self.dtype or x.dtype
        return (x.to(dtype) @ W.to(dtype)).to(x.dtype)

    def attention(self, x, backend, cache):
        start = cache.end if cache else 0
        i = torch.arange(start, start + x.shape[1], device=x.device)
        q, k, v = (self.project(x, W).unflatten(-1, (self.N_H, -1)).transpose(1, 2) for W in (self.W_Q, self.W_K, self.W_V))
        q, k = (rope(norm(y), i, self.rope_scale, self.theta) for y, norm in ((q, self.norm_q), (k, self.norm_k)))
        q, k, v = (y.to(self.dtype or x.dtype) for y in (q, k, v))
        if cache:
            k, v, _ = cache.append(k, v, torch.full((), torch.inf))
        square = not cache or q.shape[2] == k.shape[2]
        mask = None if square or q.shape[2] == 1 else causal_lower_right(q.shape[2], k.shape[2])
        with sdpa_kernel(backend) if backend else nullcontext():
            h = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=square)
        return self.project(h.transpose(1, 2).flatten(2).to(x.dtype), self.W_O)

    def forward(self, x, backend=None, cache=None):
        x = x + self.attention(self.norm_1(x), backend, cache)
        y = self.norm_2(x)
        return x + self.project(F.silu(self.project(y, self.W_gate)) * self.project(y, self.W_up), self.W_down)


class Transformer(nn.Module):
    """tokens (B, T) -> logits (B, T, N), with the methods of Multiscreen that know nothing of screening.

    screen: what Multiscreen calls the function that screens; here the SDPBackend (or a list of them) that attention must
    use, None for PyTorch's choice.
    """
    hidden, forward, loss, stream, generate = (Multiscreen.hidden, Multiscreen.forward, Multiscreen.loss,
                                               Multiscreen.stream, Multiscreen.generate)

    def __init__(self, config, dtype=None):
        super().__init__()
        self.config, self.dtype, self.screen = config, dtype, None
        self.W_E = nn.Parameter(torch.empty(config.vocab_size, config.d_E))
        self.layers = nn.ModuleList(Block(config, dtype) for _ in range(config.N_L))
        self.initialize()

    @torch.no_grad()
    def initialize(self):
        """GPT-NeoX: N(0, sqrt(2 / (5 d_E))), and N(0, 2 / (N_L sqrt(d_E))) for the two projections back to the residual."""
        for name, W in self.named_parameters():
            if W.ndim > 1:
                out = name.endswith(("W_O", "W_down"))
                nn.init.normal_(W, 0, 2 / (self.config.N_L * math.sqrt(self.config.d_E)) if out else math.sqrt(0.4 / self.config.d_E))

    def embed(self, tokens):
        return F.embedding(tokens, self.W_E)

    def logits(self, x):
        x = F.rms_norm(x, x.shape[-1:], eps=1e-5)
        dtype = self.dtype or x.dtype
        return (x.to(dtype) @ self.W_E.to(dtype).T).to(x.dtype)


def main():
    from train import Parser           # here, because train.py imports this file to build a model

    Parser(__doc__).parse_args()
    print(f"{'size':>5}{'N_L':>5}{'N_H':>5}{'d_E':>6}{'parameters':>16}{'paper':>16}{'non-embedding':>16}{'paper':>16}")
    for size, (total, rest) in PAPER.items():
        with torch.device("meta"):
            model = Transformer(get_config(size))
        n, c = sum(p.numel() for p in model.parameters()), model.config
        print(f"{size:>5}{c.N_L:>5}{c.N_H:>5}{c.d_E:>6}{n:>16,}{total:>16,}{n - model.W_E.numel():>16,}{rest:>16,}")


if __name__ == "__main__":
    from train import cli

    cli(main)
