"""What is timed: models with random weights, windows like trained ones, the code as it is now."""
import hashlib

import torch
from torch.nn.attention import SDPBackend

from support.checkpoint import build_model, has_windows
from support.choose import get_screen
from support.cli import products_dtype
from support.source import ROOT

# Of a Transformer's attention.
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION,
            "efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH}
CODE = ("multiscreen.py", "screening_triton.py", "support/windowed.py", "baselines/transformer.py")


def code_hash():
    """Twelve digits that change with the files that are timed."""
    return hashlib.sha256(b"".join((ROOT / name).read_bytes() for name in CODE)).hexdigest()[:12]


def random_model(name, config, device):
    """A model with random weights and `products_dtype`. Prints what screens."""
    device = torch.device(device)
    with device:
        model = build_model(name, config, products_dtype(device))
    if has_windows(model):
        model.screen, line, _ = get_screen(model)
        print(line, flush=True)
    return model


def trained_like(n):
    """n shuffled windows (n,), log-uniform in three ranges.

    5 % (at least one) are in 4096 .. 65536, 25 % in 256 .. 4096, the rest in 2 .. 128.
    """
    rng = torch.Generator().manual_seed(0)
    n_far, n_middle = max(round(0.05 * n), 1), round(0.25 * n)
    bounds = [(4096.0, 65536.0)] * n_far + [(256.0, 4096.0)] * n_middle
    bounds = torch.tensor(bounds + [(2.0, 128.0)] * (n - len(bounds)))
    low, high = bounds[torch.randperm(n, generator=rng)].log().T
    return (low + (high - low) * torch.rand(n, generator=rng)).exp()


@torch.no_grad()
def set_trained_like(model):
    """Give a model trained-like windows, in place."""
    sizes = [len(tile.s_w) for tile in model.layers]
    for tile, w in zip(model.layers, trained_like(sum(sizes)).split(sizes)):
        tile.s_w.copy_((w - 1).log())


@torch.no_grad()
def forward_pass(model, tokens):
    """Hidden states of all tokens at once, then all logits in parts of 2^29. tokens: (1, T)"""
    x, head = model.hidden(tokens), model.head()
    for part in x.split(max(2**29 // model.config.vocab_size, 1), 1):
        model.logits(part, head)
