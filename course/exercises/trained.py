"""At the end of part 2, compare your model with the repository's, and give it trained weights.

    python -m course.exercises.trained                        with models/retrieval.pt
    python -m course.exercises.trained --ckpt out/ckpt.pt     with a model you trained with train.py

First your Multiscreen and the repository's are trained for 200 steps from the same initial weights,
and their losses are printed side by side. They should agree to at least three digits at first. Then
the weights of a trained model are loaded into your Multiscreen, and its logits are compared with
those of the repository's.
"""
from pathlib import Path

import torch

import multiscreen as ms
from course.exercises.adapters import mine
from course.exercises.checks import random
from support.cli import Parser, UsageError, cli
from support.models import build_model, has_windows
from support.run import load_checkpoint, load_weights, read_checkpoint

ROOT = Path(__file__).parent.parent.parent
TRAINED = ROOT / "models/retrieval.pt"


def load_into(yours, theirs):
    """Load the repository's parameters into your module, which must use the same names."""
    yours.load_state_dict(theirs.state_dict())


def blank(config):
    """Your Multiscreen without your `initialize` (exercise 2.5), because its weights are loaded."""
    class Blank(mine.Multiscreen):
        def initialize(self):
            pass

    return Blank(config)


def trained_model():
    """The repository's trained model, and random tokens (1, 200) to try it on."""
    ckpt = read_checkpoint(TRAINED)
    model = build_model(ckpt["model"], ckpt["config"])
    load_weights(model, ckpt["weights"], TRAINED)
    return model, torch.randint(256, (1, 200), generator=random(2))


def losses_on(model, text, steps, T=32, B=4, seed=0):
    """Train a model on random pieces of `text` by the paper's recipe, yielding each step's loss."""
    g = random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2**-4, betas=(0.9, 0.95), weight_decay=0)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.02, total_iters=50)
    for _ in range(steps):
        starts = torch.randint(len(text) - T, (B,), generator=g).tolist()
        x = torch.stack([text[n : n + T + 1] for n in starts])
        loss = model.loss(x[:, :-1], x[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        warmup.step()
        yield loss.item()


def main(argv=None):
    try:
        compare_models(argv)
    except NotImplementedError as e:
        raise UsageError(f"still to do: {e}: pytest course/exercises -k part2") from None


def compare_models(argv):
    parser = Parser(__doc__)
    parser.add_argument("--ckpt", default=TRAINED,
                        help="the trained model, a checkpoint of train.py [models/retrieval.pt]")
    parser.add_argument("--steps", type=int, default=200, help="train for this many steps [200]")
    args = parser.parse_args(argv)
    text = torch.tensor(list((ROOT / "multiscreen.py").read_bytes()))

    torch.manual_seed(0)
    config = ms.Config(psi=4, vocab_size=257)
    theirs, yours = ms.Multiscreen(config), blank(config)
    load_into(yours, theirs)
    print(f"{args.steps} steps on the source of multiscreen.py, from the same weights")
    print(" step  theirs   yours")
    losses = [losses_on(model, text, args.steps, T=128) for model in (theirs, yours)]
    for step, (a, b) in enumerate(zip(*losses), 1):
        if step in (1, 2, 3, 5) or step % 20 == 0:
            print(f"{step:5d}  {a:6.4f}  {b:6.4f}", flush=True)

    theirs, _, run = load_checkpoint(args.ckpt)
    if not has_windows(theirs):
        raise UsageError(f"{args.ckpt} has no screening windows: use a multiscreen checkpoint")
    yours = blank(theirs.config)
    load_into(yours, theirs)
    tokens = text[None, :500]
    with torch.no_grad():
        a, b = theirs(tokens), yours(tokens)
    print(f"logits of {args.ckpt}: largest {a.abs().max():.3g}, largest difference "
          f"{(a - b).abs().max():.2g}")
    same = (a.argmax(-1) == b.argmax(-1)).double().mean()
    print(f"the two predict the same next byte at {same:.1%} of {tokens.numel()} positions")


if __name__ == "__main__":
    cli(main)
