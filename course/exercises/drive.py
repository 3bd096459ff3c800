"""How tests use what you write, where it is no plain function of tensors.

This file runs beside your code and beside the right code alike, and contains no solution.
`multiscreen` is the repository's in one process, and in yours what this exercise may use of it.
"""
import functools
import inspect
import math

import torch

import multiscreen as ms
from course.exercises.child import Wrong, own

SIZES = {"vocab_size": 40, "N_L": 2, "N_H": 3, "d_E": 24, "w_th": 100.0}
LAYER = ("project", "gate", "screening", "forward")
MODEL = ("embed", "logits", "loss", "generate")


def random(seed):
    """A generator of random numbers of its own."""
    return torch.Generator().manual_seed(seed)


def yours(file, name):
    """What you wrote, as a test calls it."""
    if name.endswith("_kernel"):
        from course.exercises import launch  # imports triton, which is only on Linux

        return launch.yours(file, name)
    if name in WHOLE:
        return call_of(name, functools.partial(whole, file))
    if name not in (*LAYER, *MODEL):
        return call_of(name, own(file, CLASSES.get(name, name)))

    # A method stands in a layer or model of multiscreen.py, with what you have added to the class.
    kind = "Multiscreen" if name in MODEL else "GatedScreeningTiles"
    written = own(file, kind)
    if not hasattr(written, name):
        raise Wrong(f"{kind} has no {name}")
    added = {other: f for other, f in vars(written).items()
             if other not in (*LAYER, *MODEL) and not other.startswith("__")}
    return call_of(name, getattr(written, name), added)


def call_of(name, written, added=()):
    """What you wrote, or right or wrong code, as a test calls it: a function of tensors."""
    if name not in (*LAYER, *MODEL):
        return functools.partial(CALLS[name], written) if name in CALLS else written
    methods = dict(added) | {name: written}

    def f(*inputs):
        made = a_layer(methods) if name in LAYER else a_model(methods)
        return CALLS.get(name, written)(made, *inputs)

    return f


def names_of_inputs(name, right):
    """The names of a call's inputs, without what is called."""
    names = list(inspect.signature(CALLS.get(name, right)).parameters)
    return names[1:] if name in CALLS or names[0] == "self" else names


def named(names, found):
    """Several results by their names."""
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


def pairs(f, *inputs):
    return named(("z", "m", "d"), f(*inputs))


def gradients(f, *inputs):
    return named(("dq", "dk", "dv", "dw", "dr"), f(*inputs))


# ---------------------------------------------------------------------- layers and models

@torch.no_grad()
def enliven(layer, seed=0):
    """Move parameters far from their initial values: w from 3.7 to inf, r from 0.62 to 0.88."""
    g = random(seed)
    E, H, K = layer.W_Q.shape
    layer.s_w.copy_(torch.linspace(3.0, 1.0, H))
    layer.s_w[0] = torch.inf
    layer.s_r.copy_(torch.linspace(0.5, 2.0, H))
    layer.s_O.uniform_(-1.0, 1.0, generator=g)
    layer.W_Q.copy_(0.05 * torch.randn(E, H, K, generator=g))              # so |q| is about 1
    layer.W_K.copy_(layer.W_Q + 0.015 * torch.randn(E, H, K, generator=g))
    for W in (layer.W_G, layer.W_O):
        W.copy_(0.2 * torch.randn(W.shape, generator=g))
    layer.W_V.copy_(0.02 * torch.randn(layer.W_V.shape, generator=g))      # so |v| is about 1


def a_layer(methods):
    """multiscreen.py's layer with these methods in place of its own."""
    config = ms.Config(**SIZES)
    layer = type("Layer", (ms.GatedScreeningTiles,), dict(methods))(config)
    layer.w_th = config.w_th                           # as in the stubs
    enliven(layer)
    return layer


def a_model(methods):
    """multiscreen.py's model with these methods in place of its own."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = type("Model", (ms.Multiscreen,), dict(methods))(ms.Config(**SIZES))
    with torch.no_grad():
        model.W_E.add_(0.03 * torch.randn(SIZES["d_E"], generator=random(0)))     # tokens alike
        model.s_E.fill_(0.7)
        model.s_F.fill_(1.3)
    for n, layer in enumerate(model.layers):
        enliven(layer, n)
        layer.s_O.data.add_(3)                         # else the last token decides
    return model


# ------------------------------------------ the calls of exercises that are no plain call

def in_pieces(method, layer, x, pieces, screen, axis):
    """method(x, screen) without a cache, or with one that drops keys, for x in pieces."""
    if not pieces:
        return method(x, screen)
    cache, found = ms.KeyCache(), []
    layer.s_w.data.copy_(torch.tensor([1.0, 0.0, 1.2]))
    for part in x.split(pieces, 1):
        found.append(method(part, screen, cache))
        if cache.k is not None:
            cache.k, cache.v = cache.k[:, :, -4:], cache.v[:, :, -4:]      # the widest w is 4.3
    return torch.cat(found, axis)


def screening(layer, x, pieces, factor):
    """u of x, with `factor` times the right screen."""
    def screen(*inputs):
        return factor * ms.screen(*inputs)

    return in_pieces(layer.screening, layer, x, pieces, screen, 2)


def forward(layer, x, pieces):
    return in_pieces(layer, layer, x, pieces, ms.screen, 1)


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


@functools.cache
def initialized(multiscreen):
    """A new model. The right one and each wrong one are made once, from the same random numbers."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return multiscreen(ms.Config(vocab_size=300, N_L=3, N_H=5, d_E=81, w_th=100.0))


def initialize(multiscreen, what):
    """A scale, or what is seen of a matrix's numbers."""
    model = initialized(multiscreen)
    named = [p.detach() for n, p in model.named_parameters() if n.rpartition(".")[2] == what]
    x = torch.cat([p.flatten() for p in named])
    if named[0].ndim == 1:
        return {what: x}
    return {f"the standard deviation of {what}": x.std(), f"the mean of {what}": x.mean(),
            f"sqrt(pi/2) times the mean of abs({what})": math.sqrt(math.pi / 2) * x.abs().mean()}


def loss(model, tokens, targets):
    found = model.loss(tokens, targets)
    model.s_F.grad = torch.zeros(1)
    if torch.is_tensor(found) and found.numel() == 1 and found.requires_grad:
        found.backward()
    return {"the value": found, "the gradient dL/ds_F": model.s_F.grad}


def generate(model, tokens, n):
    lengths = []

    def count(q, *inputs):
        lengths.append(q.shape[2])
        return ms.screen(q, *inputs)

    model.screen = count
    model.s_F.data.fill_(-2)                           # flat: sampling finds other tokens
    found = model.generate(tokens, n)
    later = torch.tensor(lengths[len(model.layers) :])
    return {"the value": found, "the number of tokens in a step after the prompt": later.max()}


# ------------------------------------------------------------------------- the whole model

def whole(file, config, weights):
    """Your whole model with these weights, without your `initialize`."""
    class Blank(own(file, "Multiscreen")):
        def initialize(self):
            pass

    model = Blank(ms.Config(**config))
    model.load_state_dict(weights)
    return model


def whole_model(make, config, weights, tokens, n):
    model = make(config, weights)
    return {"the logits": model(tokens), "the new tokens": model.generate(tokens[:, :6], n)}


def whole_gradients(make, config, weights, x):
    """All of 10^4 times the loss: those of s_w are small, and must be right, too."""
    model = make(config, weights)
    (1e4 * model.loss(x[None, :-1], x[None, 1:])).backward()
    return {f"10^4 dL/d({name})": torch.zeros_like(p) if p.grad is None else p.grad
            for name, p in model.named_parameters()}


def train(make, config, weights, text, steps):
    """The losses of these steps, by the paper's recipe."""
    model, g, found = make(config, weights), random(0), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=2**-4, betas=(0.9, 0.95), weight_decay=0)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.02, total_iters=50)
    for _ in range(steps):
        starts = torch.randint(len(text) - 32, (4,), generator=g).tolist()
        x = torch.stack([text[n : n + 33] for n in starts])
        loss = model.loss(x[:, :-1], x[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        warmup.step()
        found.append(loss.item())
    return torch.tensor(found)


# By the names that messages have for them.
WHOLE = {"the whole model": whole_model, "the loss": whole_gradients, "training": train}
CLASSES = {"cache": "KeyCache", "initialize": "Multiscreen"}
CALLS = WHOLE | {f.__name__: f for f in (mipe_angle, pairs, gradients, screening, forward, cache,
                                         initialize, loss, generate)}
