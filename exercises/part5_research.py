"""Part 5: open questions. Change one thing, train both models side by side, explain the difference.

    python -m exercises.part5_research transformer --seeds 0 1 2
    python -m exercises.part5_research compete --predict "the loss at 1,024 tokens rises by 0.1"

The variants are transformer, compete, hard-window, sigmoid, nope, no-bound, untied and mine. Before
the run you are asked what you expect; your answer is printed above the table.

For each seed both models start from the same weights, as far as they share them, and see the same
sequences. One run is an anecdote: give three seeds. The table has the means, the paired differences
and their deviation; believe a difference of more than twice its deviation. Three seeds take about
four minutes on one core. exercises/README.md says for each variant what to look for.
"""
import contextlib
import io
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn

import multiscreen as ms
from exercises import research
from support.checkpoint import build_model, load_checkpoint
from support.cli import Parser, UsageError, cli
from support.data import files_of, get_data
from support.tokens import get_tokenizer

SIZES = {"psi": 4, "vocab_size": 257}
TRAINED = Path(ms.__file__).with_name("models") / "retrieval.pt"
TRANSFORMER = "transformer:4,4,32"                     # about as many parameters


# --------------------------------------------------------------------------------- variants

def compete(q, k, v, w, r, i0=0):
    """Competition is back: divides by (the sum of relevances + 0.1), so none may be relevant."""
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
    """A sigmoid centred on Trim's rise, in its place: rejects nothing, gives every key some weight.

    Trim is 1/4 at s = 1 - r/2; this is 1/2 there, and about 0 and 1 at the ends of Trim's rise.
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
MODEL_NAMES = {"transformer": TRANSFORMER, "nope": "multiscreen:nope",
               "no-bound": "multiscreen:no-tanhnorm"}
VARIANTS = [*SCREENS, *MODEL_NAMES, "untied"]


def build_variant(variant, seed, sizes=SIZES):
    """A model; `base` is the paper's. All have the same initial weights for one seed."""
    torch.manual_seed(seed)
    if variant == "transformer":
        model = build_model(TRANSFORMER, {"vocab_size": sizes["vocab_size"]})
        model.lr_factor = 2**-3                        # the paper's models learn at higher rates
        return model
    if variant == "untied":
        model = Untied(ms.Config(**sizes))
    else:
        model = build_model(MODEL_NAMES.get(variant, "multiscreen"), sizes)
    model.screen = SCREENS.get(variant, ms.screen)
    try:
        model(torch.zeros(1, 2, dtype=torch.int64))    # an error shows before training
    except NotImplementedError as e:
        raise UsageError(f"{e}: write my_screen in exercises/part5_research.py") from None
    return model


# --------------------------------------------------------------------------------- the run

def ask(args):
    """What the student expects: --predict, or typed before the run."""
    if args.predict is None and sys.stdin.isatty():
        return input(f"What will {args.variant} change, in which row, by how much, and why?\n> ")
    return args.predict or ""


def get_texts(args, seed):
    """(training sequences, held-out ones of the same length, and long ones)."""
    flags = SimpleNamespace(data=args.data, tokenizer="bytes", digits=2, seed=seed)
    files = list(files_of(args.data))
    found = []
    for flags.seq_len in (research.LONG, research.T):
        with contextlib.redirect_stdout(io.StringIO()):                # no report on the data
            found.append(get_data(flags, get_tokenizer("bytes"), files))
    (_, long), (data, val) = found
    return data, val, long


def main(argv=None):
    p = Parser(__doc__)
    p.add_argument("variant", help=", ".join(VARIANTS))
    p.add_argument("--predict", metavar="TEXT", help="what you expect [you are asked]")
    p.add_argument("--seeds", type=int, nargs="+", default=[0], help="[0]")
    p.add_argument("--data", nargs="+", default=["stdlib"], help="as in train.py [stdlib]")
    p.add_argument("--steps", type=int, default=300, help="[300]")
    p.add_argument("--lr", type=float, default=2**-4, help="learning rate [0.0625]")
    args = p.parse_args(argv)
    if args.variant not in VARIANTS:
        raise UsageError(f"variant {args.variant!r} is unknown: take {', '.join(VARIANTS)}")
    if args.steps < 1 or not 0 < args.lr < 1e9:
        raise UsageError("--steps must be at least 1, --lr above 0 and finite")
    if min(args.seeds) < 0 or max(args.seeds) >= 2**63 or len({*args.seeds}) < len(args.seeds):
        raise UsageError("--seeds must be different numbers, not negative, below 2^63")
    build_variant(args.variant, 0)                     # an error shows before the question
    prediction = ask(args)

    trained, tokenizer, _ = load_checkpoint(TRAINED)
    pairs = []
    for seed in args.seeds:
        data, val, long = get_texts(args, seed)
        measured = []
        for name in ("base", args.variant):
            model = build_variant(name, seed)
            rows = research.train_variant(name, model, data, args.steps, args.lr, seed)
            found = research.measure(model, rows, val, long)
            model = build_variant(name, seed, asdict(trained.config))
            found |= research.retrieval(name, model, trained, tokenizer, seed)
            measured.append(found)
        pairs.append(measured)
    print(f"\npredicted: {prediction or 'nothing'}")
    print(f"{args.steps} steps of 8 x {research.T} tokens, seeds: {' '.join(map(str, args.seeds))}")
    print(*research.table(args.variant, pairs), sep="\n")


if __name__ == "__main__":
    cli(main)
