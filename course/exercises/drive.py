"""How tests use what you write, where it is no plain function of tensors.

This file runs beside your code and beside the right code alike, and contains no solution.
`multiscreen` is the repository's in one process, and in yours what this exercise may use of it.
"""
import functools
import math

import torch

import multiscreen as ms
from course.exercises.child import Wrong, own

METHODS = dict.fromkeys(("project", "gate", "screening", "forward"), "GatedScreeningTiles")
METHODS |= dict.fromkeys(("embed", "logits", "loss", "generate"), "Multiscreen")
CLASSES = METHODS | {"cache": "KeyCache", "initialize": "Multiscreen",
                     "the whole model": "Multiscreen", "training": "Multiscreen"}


def random(seed):
    """A generator of random numbers of its own."""
    return torch.Generator().manual_seed(seed)


def yours(file, name):
    """What you wrote, as a test calls it."""
    if name.endswith("_kernel"):
        from course.exercises import launch  # imports triton, which is only on Linux

        return launch.yours(file, name)
    written = own(file, CLASSES.get(name, name))
    if name not in METHODS:
        return call_of(name, written)
    added = {other: f for other, f in vars(written).items()
             if other not in METHODS and not other.startswith("__")}
    return call_of(name, own(written, name), added)


def call_of(name, written, added=()):
    """What you wrote, or right or wrong code, as a test calls it: a function of tensors.

    A method stands in a model of multiscreen.py or its first layer, with what you have added.
    """
    if name not in METHODS:
        return functools.partial(CALLS[name], written) if name in CALLS else written
    kind = type("Yours", (getattr(ms, METHODS[name]),), dict(added) | {name: written})

    def call(*inputs):
        if METHODS[name] == "Multiscreen":
            place = a_model(kind)
        else:
            place = a_model(ms.Multiscreen, tiles=kind).layers[0]
        return CALLS.get(name, written)(place, *inputs)

    return call


# Mean and deviation of the numbers in a model whose parts all count: |q| and |v| are about 1.
NUMBERS = {"W_Q": (0, 0.05), "W_K": (0, 0.015), "W_V": (0, 0.02), "W_G": (0, 0.2), "W_O": (0, 0.2),
           "s_w": (1.5, 0.5), "s_r": (1.2, 0.5), "s_O": (0, 0.5), "W_E": (0.03, 0.02),
           "s_E": (0.7, 0), "s_F": (1.3, 0)}


@torch.no_grad()
def a_model(kind, **options):
    """A small model of this class, far from its initial values."""
    model = kind(ms.Config(vocab_size=40, N_L=2, N_H=3, d_E=24, w_th=100.0), **options)
    g = random(0)
    for name, p in model.named_parameters():
        p.normal_(*NUMBERS[name.rpartition(".")[2]], generator=g)
    for layer in model.layers:
        layer.W_K.add_(layer.W_Q)                      # so keys pass Trim
        layer.s_w[0] = torch.inf
        layer.w_th = model.config.w_th                 # as in the stubs
    return model


def named(names, f, *inputs):
    """The results of f by their names."""
    found = f(*inputs)
    if not isinstance(found, (tuple, list)) or len(found) != len(names):
        raise Wrong(f"this should return {', '.join(names)}, and returns something else")
    return dict(zip(names, found))


# -------------------------------------------------------------------------- parts 1 and 3

def mipe_angle(f, i, w, w_th):
    """An angle in [0, 2 pi). No right one here is just below 2 pi."""
    found = f(i, w, w_th)
    if torch.is_tensor(found):
        found = torch.remainder(found, 2 * math.pi)
    return found


# --------------------------------------------------------------------------------- part 2

def in_pieces(name, axis, layer, x, pieces):
    """A method's result of x without a cache, or with one that drops keys, for x in pieces."""
    method = getattr(layer, name)

    def screen(*inputs):
        return 2 * ms.screen(*inputs)                  # to see whether it is this one that is used

    if not pieces:
        return method(x, screen)

    class Forgetful(ms.KeyCache):
        """Keeps what the widest window reaches."""
        def append(self, k, v, w):
            k, v = super().append(k, v, w)
            kept = math.ceil(w.max().item())
            self.k, self.v = k[:, :, -kept:], v[:, :, -kept:]
            return k, v

    screen.within_w = True
    layer.s_w.data.clamp_(max=1.2)
    cache = Forgetful()
    return torch.cat([method(part, screen, cache) for part in x.split(pieces, 1)], axis)


def cache(kind, k, v, w):
    """What queries see through a cache after 20, 4 and 1 tokens, and each cache.end."""
    made, found, ends = kind(), [], []
    for tokens in (slice(0, 20), slice(20, 24), slice(24, 25)):
        new = k[:, :, tokens]
        keys, values = made.append(new, v[:, :, tokens], w)
        found.append(ms.screen(new, keys, values, w, torch.ones_like(w),
                               keys.shape[2] - new.shape[2]))
        ends.append(made.end)
    return {"what queries see": torch.cat(found, 2), "cache.end": torch.tensor(ends)}


def initialize(kind, names):
    """New parameters of all layers: the scales, or what is seen of a matrix's numbers."""
    models = []
    for seed in (0, 1):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            models.append(kind(ms.Config(vocab_size=300, N_L=3, N_H=5, d_E=81, w_th=100.0)))
    found = {}
    for name, std in names.items():
        made = [p.detach() for n, p in models[0].named_parameters() if n.endswith(name)]
        x = torch.cat([p.flatten() for p in made]) / std
        if made[0].ndim == 1:
            found[name] = x
            continue
        alike = sum(torch.equal(p, q) for p in made for model in models for q in model.parameters())
        found |= {f"the standard deviation of {name}, divided by {std:.4g}": x.std(),
                  f"sqrt(pi/2) times the mean of abs({name}), divided by {std:.4g}":
                      math.sqrt(math.pi / 2) * x.abs().mean(),
                  f"the mean of {name}": x.mean(),
                  f"the number of other matrices like a {name}": torch.tensor(alike - len(made))}
    return found


def generate(model, tokens, n):
    lengths = []

    def count(q, *inputs):
        lengths.append(q.shape[2])
        return ms.screen(q, *inputs)

    model.screen = count
    for layer in model.layers:
        layer.s_O.data.add_(3)                         # else the last token decides
    found = model.generate(tokens, n)
    later = torch.tensor(lengths[len(model.layers) :])
    return {"the value": found, "the number of tokens in a step after the prompt": later.max()}


def with_weights(kind, config, weights):
    """A model of this class with these weights, without its `initialize`."""
    model = type("Blank", (kind,), {"initialize": lambda self: None})(ms.Config(**config))
    model.load_state_dict(weights)
    return model


def whole_model(kind, config, weights, tokens, n):
    model = with_weights(kind, config, weights)
    return {"the logits": model(tokens), "the new tokens": model.generate(tokens[:, :6], n)}


def train(kind, config, weights, text):
    """The losses of three steps by the paper's recipe, and the gradients of the first.

    Prints the losses of 100 steps. The gradients are those of 10^4 times the loss: those of s_w are
    small, and must be right, too.
    """
    model, g, losses, gradients = with_weights(kind, config, weights), random(0), [], {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=2**-4, betas=(0.9, 0.95), weight_decay=0)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.02, total_iters=50)
    for step in range(1, 101):
        starts = torch.randint(len(text) - 32, (4,), generator=g).tolist()
        x = torch.stack([text[n : n + 33] for n in starts])
        loss = model.loss(x[:, :-1], x[:, 1:])
        losses.append(loss.item())
        if step < 4 or step % 10 == 0:
            print(f"{kind.__module__}: step {step}, loss {losses[-1]:.4f}")
        optimizer.zero_grad()
        loss.backward()
        if step == 1:
            gradients = {f"10^4 dL/d({name})": torch.zeros_like(p) if p.grad is None else
                         1e4 * p.grad for name, p in model.named_parameters()}
        optimizer.step()
        warmup.step()
    return gradients | {"the losses": torch.tensor(losses[:3])}


# By the names that tests and messages have for them.
CALLS = {"mipe_angle": mipe_angle, "cache": cache, "initialize": initialize, "generate": generate,
         "screening": functools.partial(in_pieces, "screening", 2),
         "forward": functools.partial(in_pieces, "forward", 1),
         "pairs": functools.partial(named, ("z", "m", "d")),
         "gradients": functools.partial(named, ("dq", "dk", "dv", "dw", "dr")),
         "the whole model": whole_model, "training": train}
