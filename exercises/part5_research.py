"""Part 5: open questions. Change one thing, train both models side by side, explain the difference.

    python -m exercises.part5_research compete       one of: compete, hard-window, sigmoid, nope,
                                                     no-bound, untied, mine
    python -m exercises.part5_research compete --seed 1
    python -m exercises.part5_research nope --data abcdigits

Both models begin with the same weights and see the same sequences: what differs is the change. One
run is an anecdote, so take three seeds before you believe a difference: each takes one to three
minutes of one core. exercises/README.md says for each variant what to look for. Compare columns,
not the two validation losses: their texts differ. There is no single right answer.
"""
import statistics
import time
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn

import multiscreen as ms
from support.checkpoint import build_model
from support.cli import Parser, UsageError, cli
from support.data import files_of, get_data
from support.tokens import get_tokenizer

SIZES = {"psi": 4, "vocab_size": 257}
LONG = 1024                                            # tokens of the second validation


# --------------------------------------------------------------------------------- variants

def compete(q, k, v, w, r, i0=0):
    """Competition is back: relevances are divided by their sum, and 0.1 so that nothing may be."""
    alpha_d = ms.relevance(q, k, w, r, i0)
    return alpha_d / (alpha_d.sum(-1, keepdim=True) + 0.1) @ v


def distances(q, k, i0):
    i = i0 + torch.arange(q.shape[2])
    return torch.arange(k.shape[2]) - i[:, None]


def hard_window(q, k, v, w, r, i0=0):
    """1 inside the window and 0 outside. How does w learn now?"""
    alpha = ms.trim(q @ k.transpose(-2, -1), r[:, None, None])
    inside = ms.softmask(distances(q, k, i0), w[:, None, None]) > 0
    return alpha * inside @ v


def sigmoid(q, k, v, w, r, i0=0):
    """A sigmoid of the same middle in place of Trim: nothing is rejected, everything weighs a bit.

    Trim is 1/4 at s = 1 - r/2; this is 1/2 there, and about 0 and 1 at the ends of its rise.
    """
    r = r[:, None, None]
    alpha = torch.sigmoid((q @ k.transpose(-2, -1) - (1 - r / 2)) * 8 / r)
    return alpha * ms.softmask(distances(q, k, i0), w[:, None, None]) @ v


class Untied(ms.Multiscreen):
    """A head of its own, W_F, which begins as a copy of W_E."""

    def __init__(self, config):
        super().__init__(config)
        self.W_F = nn.Parameter(self.W_E.detach().clone())

    def head(self):
        return self.s_F.exp() * ms.unit(self.W_F)


def my_screen(q, k, v, w, r, i0=0):
    """Your own question: a function with the arguments of `screen`."""
    raise NotImplementedError("Exercise 5: a question of your own")


SCREENS = {"compete": compete, "hard-window": hard_window, "sigmoid": sigmoid, "mine": my_screen}
MODEL_NAMES = {"nope": "multiscreen:nope", "no-bound": "multiscreen:no-tanhnorm"}
VARIANTS = [*SCREENS, *MODEL_NAMES, "untied"]


def build_variant(variant, seed):
    """A model; `base` is the paper's. All have the same initial weights for one seed."""
    torch.manual_seed(seed)
    if variant == "untied":
        model = Untied(ms.Config(**SIZES))
    else:
        model = build_model(MODEL_NAMES.get(variant, "multiscreen"), SIZES)
    model.screen = SCREENS.get(variant, ms.screen)
    try:
        model(torch.zeros(1, 2, dtype=torch.int64))    # what cannot run shows before training
    except NotImplementedError as e:
        raise UsageError(f"{e}: write my_screen in exercises/part5_research.py") from None
    return model


# ---------------------------------------------------------------------------------- harness

def train_variant(name, model, data, args):
    """The paper's recipe. Returns the losses, gradient norms and milliseconds of all steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95),
                                  weight_decay=0)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.02, total_iters=50)
    rows = []
    for step in range(args.steps):
        start = time.perf_counter()
        numbers = range(8 * step, 8 * step + 8)
        x = torch.from_numpy(np.stack([data.draw(n, args.seed) for n in numbers]))
        loss = model.loss(x[:, :-1], x[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        norms = [p.grad.norm() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        warmup.step()
        rows.append((loss.item(), torch.stack(norms).norm().item(),
                     1000 * (time.perf_counter() - start)))
        if (step + 1) % 50 == 0:
            print(f"{name:12s} step {step + 1:4d}   loss {mean_of_last(rows, 0):.4f}", flush=True)
    return rows


def mean_of_last(rows, column, n=20):
    return statistics.mean(row[column] for row in rows[-n:])


def all_windows(model):
    return torch.cat([ms.window(tile.s_w.detach()) for tile in model.layers])


def least_to_largest(w):
    return f"{w.min():.1f}, {w.median():.1f}, {w.max():.0f}"


@torch.no_grad()
def table_column(model, rows, val, long):
    """What the table shows of a model."""
    def loss(data, n):
        x = torch.from_numpy(np.stack([data[i] for i in data.spread(n)]))
        return model.loss(x[:, :-1], x[:, 1:]).item()

    model.eval()                                       # for your dropout
    w = all_windows(model)
    x = torch.from_numpy(val[0])[None, :-1]
    alive = torch.cat([alpha_d.flatten(2).gt(0).sum(-1).flatten()
                       for alpha_d in model.relevance_maps(x)]).sum()
    T = x.shape[1]
    near = torch.arange(T)[:, None] - torch.arange(T)
    inside = sum(((near >= 0) & (near < w_n)).sum() for w_n in w)
    return [f"{mean_of_last(rows, 0):.4f}", f"{loss(val, 32):.4f}", f"{loss(long, 4):.4f}",
            f"{mean_of_last(rows, 1):.3f}", least_to_largest(w),
            f"{100 * alive / inside:.1f} %" if model.screen is ms.screen else "-",
            f"{sum(p.numel() for p in model.parameters()):,}",
            f"{statistics.median(row[2] for row in rows):.0f}"]


ROW_NAMES = ["training loss, last 20 steps", "validation loss, 128 tokens",
         "validation loss, 1,024 tokens", "gradient norm, last 20 steps",
         "windows: least, median, largest", "pairs in the windows that pass Trim",
         "parameters", "milliseconds a step"]


def main(argv=None):
    p = Parser(__doc__)
    p.add_argument("variant", help=", ".join(VARIANTS))
    p.add_argument("--data", nargs="+", default=["stdlib"], help="as in train.py [stdlib]")
    p.add_argument("--steps", type=int, default=300, help="[300]")
    p.add_argument("--lr", type=float, default=2**-4, help="learning rate [0.0625]")
    p.add_argument("--seed", type=int, default=0, help="[0]")
    args = p.parse_args(argv)
    if args.variant not in VARIANTS:
        raise UsageError(f"variant {args.variant!r} is unknown: take {', '.join(VARIANTS)}")
    if args.steps < 1 or not 0 < args.lr < 1e9 or not 0 <= args.seed < 2**63:
        raise UsageError("--steps must be at least 1, --lr above 0 and finite, --seed not negative")

    tokenizer = get_tokenizer("bytes")
    flags = SimpleNamespace(data=args.data, tokenizer="bytes", digits=2, seed=args.seed)
    flags.seq_len = LONG
    files = list(files_of(args.data))
    _, long = get_data(flags, tokenizer, files)
    flags.seq_len = 128
    data, val = get_data(flags, tokenizer, files)

    columns = []
    models = {name: build_variant(name, args.seed) for name in ("base", args.variant)}
    before = least_to_largest(all_windows(models["base"]))
    for name, model in models.items():
        rows = train_variant(name, model, data, args)
        columns.append([name, *table_column(model, rows, val, long)])
    print(f"\n{args.steps} steps of 8 x 128 tokens, seed {args.seed}; windows before: {before}")
    for line, *cells in zip(["", *ROW_NAMES], *columns):
        print(f"{line:36s}" + "".join(f"{cell:>18s}" for cell in cells))


if __name__ == "__main__":
    cli(main)
