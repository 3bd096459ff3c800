"""How tests use what you write where that is a method or a class: parts 2 and 3.

This file runs beside your code and beside the right code alike, and contains no solution.
`multiscreen` is the repository's in one process, and in yours what this exercise may use of it.
"""
import functools
import math

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import multiscreen as ms
from course.exercises.child import Wrong, own

SIZES = {"vocab_size": 40, "N_L": 2, "N_H": 3, "d_E": 24, "w_th": 100.0}
LAYER = ("project", "gate", "screening", "forward")
MODEL = ("embed", "logits", "loss", "generate")


def random(seed):
    return torch.Generator().manual_seed(seed)


def yours(file, name):
    """What you wrote as a function of tensors."""
    if name == "gradients":
        return watched(own(file, name))
    if name in WHOLE:
        return functools.partial(WHOLE[name], functools.partial(whole, file))
    if name in ("cache", "initialize"):
        written = own(file, "KeyCache" if name == "cache" else "Multiscreen")
        return functools.partial(CALLS[name], written)

    # A method stands in a layer or model of multiscreen.py, with what you have added to the class.
    if hasattr(ms, "KeyCache"):
        file.KeyCache = ms.KeyCache
    kind = "Multiscreen" if name in MODEL else "GatedScreeningTiles"
    written = own(file, kind)
    if not hasattr(written, name):
        raise Wrong(f"{kind} has no {name}")
    added = {other: f for other, f in vars(written).items()
             if other not in (*LAYER, *MODEL) and not other.startswith("__")}
    return driven(name, added | {name: getattr(written, name)})


def driven(name, methods):
    """A method in a layer or model as a function of tensors."""
    def f(*inputs):
        made = a_layer(methods) if name in LAYER else a_model(methods)
        if name in CALLS:
            return CALLS[name](made, *inputs)
        return getattr(made, name)(*inputs)

    return f


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
    """The keys and values that queries may see after 20, 4 and 1 tokens, and each cache.end."""
    made, found = kind(), []
    for part in (slice(0, 20), slice(20, 24), slice(24, 25)):
        kept, values = made.append(k[:, :, part], v[:, :, part], w)
        first = part.stop - kept.shape[2]
        oldest = max(part.start - math.ceil(min(w.max().item(), 2**30)) + 1, 0)
        found.append([at_positions(kept, first, oldest, part.stop),
                      at_positions(values, first, oldest, part.stop), torch.tensor([made.end])])
    keys, values, ends = zip(*found)
    return torch.cat(keys, 2), torch.cat(values, 2), torch.cat(ends)


def at_positions(x, first, oldest, end):
    """The keys at the positions oldest to end - 1, with NaN for missing ones."""
    seen = x.new_full((*x.shape[:2], end - oldest, x.shape[3]), torch.nan)
    for n in range(x.shape[2]):
        if oldest <= first + n < end:
            seen[:, :, first + n - oldest] = x[:, :, n]
    return seen


@functools.cache
def initialized(multiscreen, seed=0):
    """A new model. The right one and each wrong one are made once, from the same random numbers."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return multiscreen(ms.Config(vocab_size=300, N_L=3, N_H=5, d_E=81, w_th=100.0))


def initialize(multiscreen, what):
    """A scale, or what is seen of the numbers of a matrix, or how many pairs of them are alike."""
    model = initialized(multiscreen)
    if what == "matrices":
        matrices = [p for made in (model, initialized(multiscreen, 1)) for p in made.parameters()
                    if p.ndim > 1]
        begin = torch.stack([p.detach().flatten()[:32] / p.detach().std() for p in matrices])
        return ((begin[:, None] - begin).square().mean(-1) < 1e-3).sum() - len(matrices)
    named = [p.detach() for n, p in model.named_parameters() if n.rpartition(".")[2] == what]
    x = torch.cat([p.flatten() for p in named])
    if named[0].ndim == 1:
        return x
    return torch.stack((x.mean(), x.std(), math.sqrt(math.pi / 2) * x.abs().mean()))


def loss(model, tokens, targets, trained):
    """The loss, or its gradient with s_F."""
    found = model.loss(tokens, targets)
    if not trained:
        return found
    model.s_F.grad = torch.zeros(1)
    if found.requires_grad:
        found.backward()
    return model.s_F.grad


def generate(model, tokens, n, counted):
    """The new tokens, or how many go through a layer at a time after the prompt."""
    lengths = []

    def count(q, *inputs):
        lengths.append(q.shape[2])
        return ms.screen(q, *inputs)

    model.screen = count
    model.s_F.data.fill_(-2)                           # flat: sampling finds other tokens
    found = model.generate(tokens, n)
    return torch.tensor(max(lengths[len(model.layers) :])) if counted else found


CALLS = {f.__name__: f for f in (screening, forward, cache, initialize, loss, generate)}


# ------------------------------------------------------------------------- the whole model

def whole(file, config, weights):
    """Your whole model with these weights, without your `initialize`."""
    class Blank(own(file, "Multiscreen")):
        def initialize(self):
            pass

    model = Blank(ms.Config(**config))
    others = [name for name, _ in model.named_parameters() if name not in weights]
    if others:
        raise Wrong(f"your model has parameters that the stubs have not, {', '.join(others)}: keep "
                    "to theirs. Eq. 3, too, has the matrix W_E")
    model.load_state_dict(weights)
    return model


def whole_logits(make, config, weights, tokens):
    return make(config, weights)(tokens).detach()


def whole_generate(make, config, weights, tokens, n):
    return make(config, weights).generate(tokens, n)


def whole_gradients(make, config, weights, x):
    model = make(config, weights)
    model.loss(x[None, :-1], x[None, 1:]).backward()
    return tuple(torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters())


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
WHOLE = {"the whole model": whole_logits, "the whole model with trained weights": whole_logits,
         "generate with your own cache": whole_generate, "the loss": whole_gradients,
         "training": train}


# ---------------------------------------------------------------------- part 3: memory

class Watch(TorchDispatchMode):
    """Looks at all tensors that PyTorch's functions return."""
    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves(out) if torch.is_tensor(x)]
        self.largest = max([self.largest, *sizes])
        return out


def watched(f):
    """`gradients`, which must not have a tensor with a number for each of 96 queries and keys."""
    def gradients(q, k, *inputs):
        with Watch() as watch:
            found = f(q, k, *inputs)
        if len(q) == len(k) == 96 and watch.largest >= 96 * 96:
            raise Wrong(f"for 96 queries and 96 keys there is a tensor of {watch.largest} numbers: "
                        "compute block by block, without a T x S tensor")
        return found

    return gradients
