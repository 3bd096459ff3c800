"""Is it a language model, and is it this screen? What everything else takes for granted, tried.

The paper's model keeps four promises. An edit or a class of yours may break one while the loss
falls as before, so train.py tries three of them before it trains, and all at the end; what decodes
a trained model tries them, too. `python -m lab.check` prints a table. Below that stand the one
comparison of a screen with the definition, and what relevance maps say. Read it if a warning
puzzles you.

    causal      other tokens after position t leave the logits up to t unchanged
    cached      a text in pieces, with caches, gets the logits of one pass
    alone       a sequence's logits do not depend on the other sequences of its batch
    trained     every parameter gets a gradient that is finite and not all 0
"""
import copy
import difflib
import math

import torch
from torch import nn

import multiscreen
from multiscreen import softmask, unit
from support.cli import error_line
from support.models import drawing_from, has_windows, random_states, windows_of

PROMISES = ("causal", "cached", "alone", "trained")
MEANS = {
    "causal": "the output at a token depends on later tokens, which it has to predict: losses will "
              "be too low, and what it writes will be bad; has an edit dropped a mask?",
    "cached": "decoding with a cache gives other logits than one pass: training is right, but "
              "lab.sample, abcdigits.py, lab.passkey and lab.perplexity will measure another "
              "model; compute a key, a value or a gate from the token at its position alone",
    "alone": "the logits of a sequence depend on the others of its batch: losses depend on "
             "--batch-size, and decoding one text gives other logits",
    "random": "two equal passes differ, so nothing can be tried: a layer draws random numbers, or "
              "remembers the pass before"}
SHORT, LONG = 24, 150                                  # tokens of a text to try


# ---------------------------------------------------------------------------------- a model

def warn(model, T=SHORT, file=None):
    """Print a line for each promise that a model breaks, and if its class overrides nothing."""
    lines = [*faults(model, T).values(), *unused(type(model.layers[0]))]
    for line in lines:
        print(f"warning: {line}", file=file, flush=True)


def faults(model, T=SHORT, gradients=False):
    """{promise: what is wrong} of the promises that a model breaks; {} if it keeps all.

    Tried on a copy, with random tokens, (2, T). gradients: try `trained`, too.
    """
    with drawing_from(random_states()):
        try:
            return faults_of(moved_copy(model, torch.float64), T, gradients, 1e-6)
        except (RuntimeError, TypeError, ValueError):  # a layer may know only float32
            return faults_of(moved_copy(model, torch.float32), T, gradients, 1e-4)


def faults_of(model, T, gradients, tolerance):
    """The faults of a copy. tolerance: of an error, relative to the largest logit."""
    g = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randint(len(model.W_E), shape, generator=g).to(model.W_E.device)

    def differ(a, b):
        return not (a - b).abs().max() <= tolerance * b.abs().max()

    found, tokens = {}, draw(2, T)
    with torch.no_grad():
        whole = model(tokens)
        if not torch.equal(whole.nan_to_num(), model(tokens).nan_to_num()):
            return {"random": MEANS["random"]}
        for t in (T // 2, T - 1):
            others = torch.cat([tokens[:, :t], draw(2, T - t)], 1)
            if differ(model(others)[:, :t], whole[:, :t]):
                found["causal"] = MEANS["causal"]
        if differ(model(tokens[:1]), whole[:1]):
            found["alone"] = MEANS["alone"]
        try:
            # A cache cannot know later tokens, so this would say nothing new.
            if "causal" not in found and differ(in_pieces(model, tokens), whole):
                found["cached"] = MEANS["cached"]
        except Exception as e:                         # whatever it is, decoding meets it, too
            found["cached"] = f"decoding with a cache fails ({error_line(e)})"
    if gradients:
        found |= without_gradient(model, tokens, draw(2, T))
    return found


def are_same(a, b):
    """Whether two models have the same logits, once the parameters of both are moved alike."""
    for dtype, tolerance in ((torch.float64, 1e-6), (torch.float32, 1e-3)):
        try:
            x, y = (logits_of(moved_copy(model, dtype, len(model.layers))) for model in (a, b))
            return torch.allclose(x, y, rtol=0, atol=tolerance * x.abs().max().item())
        except (RuntimeError, TypeError, ValueError):  # a layer may know only float32
            continue
    return False


@torch.no_grad()
def logits_of(model):
    """The logits of a few tokens; a layer that draws random numbers draws the same each time."""
    tokens = torch.arange(2 * SHORT, device=model.W_E.device).view(2, -1) % len(model.W_E)
    with drawing_from(random_states()):
        return model(tokens)


def moved_copy(model, dtype, n_layers=4):
    """A copy of some layers and 1,000 tokens of a model, in eval mode, its parameters moved.

    Each is moved by a tenth of its size, or of 1: a share that is learned, and 0 at first, counts.
    The layers' matrices are tripled, as those of a new model change its logits only a little.
    """
    part = copy.copy(model)                            # shares its tensors, however large
    part._modules = model._modules | {"layers": model.layers[:n_layers]}
    W_E = nn.Parameter(model.W_E.detach()[:1000])
    part._parameters = model._parameters | {"W_E": W_E}
    for name in ("head", "nats", "loss"):              # compiled for the model itself
        vars(part).pop(name, None)
    clone, g = copy.deepcopy(part).eval(), torch.Generator().manual_seed(0)
    if clone.W_E.is_mps:
        clone = clone.cpu()                            # Apple's have no float64
    clone.to(dtype)
    for module in (clone, *clone.layers):
        module.dtype = None
    with torch.no_grad():
        for p in clone.parameters():
            size = p[p.isfinite()].square().mean().sqrt().nan_to_num()
            noise = torch.randn(p.shape, generator=g, dtype=torch.float64).to(p)
            p.add_(0.1 * noise * (size if size > 0 else 1.0))
        for p in clone.layers.parameters():
            if p.ndim > 1:
                p.mul_(3.0)
    return clone


def in_pieces(model, tokens):
    """The logits of tokens that go through a model in pieces, with caches that forget at once."""
    caches = model.new_caches()
    for cache in caches:
        cache.spare = 0
    # PyTorch imports for two seconds when a Transformer gets a second piece of several tokens.
    T = tokens.shape[1]
    sizes = [T - 3, 1, 1, 1]
    if T > SHORT:
        sizes = [T - 60, 13, 13, 13, 13, *[1] * 8]
    return torch.cat([model(piece, caches) for piece in tokens.split(sizes, 1)], 1)


def without_gradient(model, tokens, targets):
    """{"trained": ..} if a parameter gets no gradient of the loss, or one that is not finite."""
    model.loss(tokens, targets).backward()
    wrong = []
    for name, p in model.named_parameters():
        if p.grad is not None and not p.grad.isfinite().all():
            wrong.append(f"the gradient of {name} is not finite, so training will diverge")
        elif p.requires_grad and (p.grad is None or not p.grad.any()):
            wrong.append(f"{name} gets no gradient, so it will stay as it is")
    if len(wrong) > 1:
        wrong[0] += f" (and {len(wrong) - 1} more)"
    return {"trained": wrong[0]} if wrong else {}


def unused(layer):
    """Sentences on a class of layers of which nothing is used.

    A method may override nothing, but have almost the name of one that could be overridden; a class
    without a known name trains as its base does.
    """
    bases = [c for c in layer.__mro__[1:] if c is not nn.Module and issubclass(c, nn.Module)]
    names = [name for c in bases for name in vars(c) if not name.startswith("__")]
    known = {"own_screen", "sizes", "__init__", *names}
    own = [name for name in vars(layer) if name in known or not name.startswith("__")]
    said = []
    for name in own:
        near = difflib.get_close_matches(name, known, 1, 0.8)
        if name not in known and near:
            said.append(f"{name} overrides nothing: is it {near[0]}?")
    # With two bases, one may override what the other has.
    if bases and len(layer.__bases__) == 1 and not known.intersection(own):
        said.append(f"{layer.__name__} overrides no method of {bases[0].__name__}, so it trains as "
                    f"{bases[0].__name__} does")
    return said


# ---------------------------------------------------------------------------------- a screen

def draw_case(T, i0, w, r, seed=0, dtype=torch.float32, device="cpu"):
    """[q, k, v, w, r, dh] for a screen, T queries at i0, and a tile for each window in w.

    Queries and keys lie near one direction, 1 - s around r: most pairs of independent ones are
    rejected, and a wrong window would not show. dtype: that of v and dh.
    """
    g, H, S = torch.Generator().manual_seed(seed), len(w), i0 + T
    w, r = torch.tensor(w), torch.tensor(r)
    spread = (0.6 * r / 16).sqrt()[:, None, None]
    x = unit(torch.randn(16, generator=g)) + spread * torch.randn(1, H, T + S, 16, generator=g)
    q, k = unit(x).split((T, S), 2)
    v, dh = (torch.randn(1, H, size, 64, generator=g) for size in (S, T))
    return [x.to(device) for x in (q, k, unit(v).to(dtype), w, r, dh.to(dtype))]


def value_and_gradients(screen, inputs, i0=0):
    """{h, dq, dk, dv, dw, dr}, in float64; h alone if it cannot be differentiated here."""
    *inputs, dh = inputs
    inputs = [x.detach().requires_grad_() for x in inputs]
    with torch.enable_grad():
        try:
            h = screen(*inputs, i0)
            grads = torch.autograd.grad(h, inputs, dh.to(h), allow_unused=True)
        except NotImplementedError:                    # such as FlexAttention's on a CPU
            return {"h": screen(*(x.detach() for x in inputs), i0).double()}
    found = {"h": h.detach().double()}
    for name, x, grad in zip(("dq", "dk", "dv", "dw", "dr"), inputs, grads):
        found[name] = torch.zeros_like(x).double() if grad is None else grad.double()
    return found


def screen_errors(screen, inputs, i0=0, exact=multiscreen.screen):
    """{output: its error in each tile, (H,)}, relative to its length, for the value and gradients.

    exact: what a screen is compared with, in float64. NaN becomes infinite.
    """
    right = value_and_gradients(exact, [x.double() for x in inputs], i0)
    errors = {}
    for name, x in value_and_gradients(screen, inputs, i0).items():
        a, b = (y.movedim(-3 % y.ndim, 0).flatten(1) if y.ndim > 1 else y[:, None]
                for y in (x, right[name]))
        length = b.norm(dim=1)
        least = 1e-3 * length.max() + 1e-4             # some tiles may reject everything
        errors[name] = ((a - b).norm(dim=1) / length.clamp_min(least)).nan_to_num(math.inf)
    return errors


# -------------------------------------------------------------------------- relevance maps

def inside(T, w):
    """Which pairs (i, j) of T positions Softmask lets through. w: (H,) tokens -> (H, T, T)"""
    i = torch.arange(T, device=w.device)
    return softmask(i - i[:, None], w[:, None, None]) > 0


def maps_of(model, tokens):
    """A model's relevance maps; none unless each layer calls the `screen` it is given once."""
    with torch.compiler.set_stance("force_eager"):     # compiling would take longer
        maps = model.relevance_maps(tokens)
    return maps if len(maps) == len(model.layers) else []


def alive_pairs(model, tokens):
    """A column of the log: the share of the pairs inside the windows that get a weight.

    tokens: (B, T), T <= 512. Nothing for a model without relevance maps.
    """
    if not has_windows(model):
        return {}
    seen = [inside(tokens.shape[1], w) for w in windows_of(model)]
    maps = maps_of(model, tokens)
    if not maps:
        return {}
    alive = sum(((alpha_d != 0) & pairs).sum().item() for alpha_d, pairs in zip(maps, seen))
    pairs = sum(pairs.sum().item() for pairs in seen) * len(tokens)
    return {"alive": alive / pairs}
