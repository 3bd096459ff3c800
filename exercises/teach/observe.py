"""Run every "Observe" of exercises/README.md, and print the numbers of answers.md.

    python -m exercises.teach.observe
"""
import math
from pathlib import Path

import torch

import multiscreen as ms
from exercises.solutions import part3_derivative
from exercises.teach.accounting import visited_blocks
from exercises.trained import train_steps


def relevance_of_a_turned_key(r=0.5):
    """{degrees: relevance} of a key turned away from its query, in an infinite window."""
    degrees = list(range(0, 91, 10))
    angles = torch.tensor(degrees).deg2rad()
    q = torch.tensor([1.0, 0.0])
    k = torch.stack((angles.cos(), angles.sin()), -1)
    one = torch.ones(1)
    alpha_d = ms.relevance(q.view(1, 1, 1, 2), k[None, None], one * math.inf, one * r, len(k))
    return dict(zip(degrees, alpha_d.flatten().tolist()))


def weight_of_a_copied_key():
    """{how: (weight of a key alone, and beside its copy)}, by screening and by softmax."""
    q = torch.tensor([1.0, 0.0]).view(1, 1, 1, 2)
    k = torch.tensor([[0.8, 0.6]])[None, None]
    one, both = torch.ones(1), torch.cat((k, k), 2)
    return {"screening": tuple(ms.relevance(q, x, one * math.inf, one * 0.5, 2)[0, 0, 0, 0].item()
                               for x in (k, both)),
            "softmax": tuple((q @ x.mT).softmax(-1)[0, 0, 0, 0].item() for x in (k, both))}


def passes_of_generate(prompt=50, new=100):
    """{how: tokens that go through the layers} for a prompt and the tokens that follow it."""
    torch.manual_seed(0)
    model = ms.Multiscreen(ms.Config(psi=2, vocab_size=50))
    count = []
    model.layers[0].register_forward_pre_hook(lambda _, x: count.append(x[0].shape[1]))
    tokens = torch.zeros(1, prompt, dtype=torch.int64)
    model.generate(tokens, new)
    with_cache, calls = sum(count), len(count)
    count.clear()
    with torch.no_grad():
        for _ in range(new):
            tokens = torch.cat((tokens, model(tokens)[:, -1:].argmax(-1)), 1)
    return {"calls": calls, "with the cache": with_cache, "without": sum(count)}


def rounding_grows(steps=200):
    """{step: difference of two losses} of a model, and of one that adds its products in reverse.

    The second is the same function: its channels stand in reverse order.
    """
    torch.manual_seed(0)
    model = ms.Multiscreen(ms.Config(psi=4, vocab_size=257))
    other = reversed_channels(model)
    text = torch.tensor(list(Path(ms.__file__).read_bytes()))
    losses = zip(train_steps(model, text, steps), train_steps(other, text, steps))
    return {step: abs(a - b) for step, (a, b) in enumerate(losses, 1)}


def reversed_channels(model):
    """The same function as `model`, with its d_E channels in reverse order."""
    other = ms.Multiscreen(model.config)
    weights = model.state_dict()
    for name, W in weights.items():
        if W.ndim > 1:
            weights[name] = W.flip(2 if name.endswith("W_O") else 1 if name == "W_E" else 0)
    other.load_state_dict(weights)
    return other


def gradients_of_a_rejected_key():
    """{gradient: its largest magnitude} where Trim rejects the only key."""
    q, k = torch.tensor([[1.0, 0.0]]).double(), torch.tensor([[0.0, 1.0]]).double()
    v, dh = torch.ones(1, 3).double(), torch.ones(1, 3).double()
    w, r = torch.tensor(4.0).double(), torch.tensor(0.5).double()
    found = part3_derivative.gradients(q, k, v, w, r, dh)
    return dict(zip(("dq", "dk", "dv", "dw", "dr"), (x.abs().max().item() for x in found)))


def main():
    for part, observation in (("1", relevance_of_a_turned_key), ("1", weight_of_a_copied_key),
                              ("2", passes_of_generate), ("3", gradients_of_a_rejected_key)):
        print(f"part {part}, {observation.__name__.replace('_', ' ')}")
        for what, number in observation().items():
            print(f"    {what!s:16s}{number}")
    apart = rounding_grows()
    print("part 2, rounding grows")
    for step in (1, 10, 50, 200):
        print(f"    step {step:<11d}{apart[step]:.2g}")
    print("part 4, blocks of the forward loop, T = 4096")
    for w in (17, math.inf):
        print(f"    w = {w:<12}{visited_blocks(4096, w, BI=32):,}")


if __name__ == "__main__":
    main()
