"""Is it a language model, and is it this screen? What everything else takes for granted, tried.

The paper's model keeps four promises. An edit or a class of yours may break one while the loss
falls as before, so train.py tries the first three before it trains and again at the end; what
decodes a trained model tries them, too. `python -m lab.check` tries all, and prints a table. Below
that stand the one comparison of a screen with the definition, and what relevance maps say. Read it
if a warning puzzles you.

    causal      other tokens after position t leave the logits up to t unchanged
    cached      a text in pieces, with caches, gets the logits of one pass
    alone       a sequence's logits do not depend on the other sequences of its batch
    trained     every parameter gets a gradient that is finite and not all 0
"""
import copy
import difflib
import math
from inspect import isfunction

import torch
from torch import nn

import multiscreen
from support.cli import error_line
from multiscreen import softmask, unit
from support.models import drawing_from, has_windows, random_states, windows_of

PROMISES = ("causal", "cached", "alone", "trained")
MEANS = {
    "causal": "the output at a token depends on later tokens, which it has to predict: losses will "
              "be too low, and what it writes will be bad; has an edit dropped a mask, or taken a "
              "mean over all positions?",
    "cached": "decoding with a cache gives other logits than one pass: lab.sample, abcdigits.py, "
              "lab.passkey and lab.perplexity will measure another model than the one that is "
              "trained; compute a key, a value or a gate from the token at its position alone, and "
              "in a `screening` of your own count positions and i0 as the original does",
    "alone": "the logits of a sequence depend on the others of its batch: losses depend on "
             "--batch-size, and decoding one text gives other logits; does an edit mix the first "
             "dimension, which is that of the batch?"}
# Where one of these holds, no promise can be tried.
HOPELESS = {
    "finite": "the logits are not finite, so training would diverge: does an edit divide by 0, or "
              "take the logarithm or the root of a number that is 0 or less?",
    "random": "two equal passes differ, so nothing can be tried: draw random numbers only while "
              "self.training is true, as dropout does, and let no pass change what the next one "
              "computes with"}
SHORT, LONG = 24, 256                                  # tokens of a text to try


# ---------------------------------------------------------------------------------- a model

def warn(model, T=SHORT, file=None):
    """Print a line for each promise that a model breaks."""
    try:
        lines = list(faults(model, T).values())
    except IndexError as e:                            # a layer may know only so many positions
        lines = [f"the model could not be checked on {T} tokens ({error_line(e)})"]
    for line in lines:
        print(f"warning: {line}", file=file, flush=True)


def faults(model, T=SHORT, gradients=False):
    """{promise: what is wrong} of the promises that a model breaks; {} if it keeps all.

    Tried on a copy, with random tokens, (2, T). gradients: try `trained`, too.
    """
    with drawing_from(random_states()):
        try:
            return faults_in(model, torch.float64, T, gradients, 1e-6)
        except (RuntimeError, TypeError, ValueError):
            pass                                       # a layer may know only float32
        return faults_in(model, torch.float32, T, gradients, 1e-4)


def faults_in(model, dtype, T, gradients, tolerance):
    """The faults of a model's copy of that dtype. tolerance: of an error, as in `differ`."""
    copied, g = moved_copy(model, dtype), torch.Generator().manual_seed(0)
    widen_acceptance(copied)
    tokens, others = (torch.randint(len(copied.W_E), (2, T), generator=g).to(copied.W_E.device)
                      for _ in range(2))
    with torch.no_grad():
        whole = copied(tokens)
        if not whole.isfinite().all():
            return {"finite": HOPELESS["finite"]}
        if not torch.equal(copied(tokens), whole):
            return {"random": HOPELESS["random"]}
        found = {}
        if sees_later(copied, tokens, whole, others, tolerance):
            found["causal"] = MEANS["causal"]
        if differ(torch.cat([copied(one) for one in tokens.split(1)]), whole, tolerance):
            found["alone"] = MEANS["alone"]
        for promise in broken_in_training(copied, tokens, whole, others, tolerance):
            found.setdefault(promise, f"in training, {MEANS[promise]}")
        # A cache cannot know later tokens, so this would say nothing new.
        if "causal" not in found:
            found |= fault_of_caches(copied, tokens, tolerance)
    if gradients:
        found |= without_gradient(model, dtype, tokens, others)
    return found


def differ(a, b, tolerance):
    """Whether logits differ by more than a tolerance, relative to the largest of b."""
    return not (a - b).abs().max() <= tolerance * b.abs().max()


def sees_later(run, tokens, whole, others, tolerance):
    """Whether other tokens change the logits before them. run: tokens -> logits; whole: theirs."""
    T = tokens.shape[1]
    for t in (T // 2, T - 1):
        changed = torch.cat([tokens[:, :t], others[:, t:]], 1)
        if differ(run(changed)[:, :t], whole[:, :t], tolerance):
            return True
    return False


def broken_in_training(model, tokens, evaluated, others, tolerance):
    """Those of `causal` and `alone` that a model breaks in train mode. evaluated: its logits.

    Dropout draws the same numbers in each pass, as shapes stay the same. A GPU draws others, and
    then nothing is tried.
    """
    states = random_states()

    def run(tokens):
        with drawing_from(states):
            return model(tokens)

    model.train()
    whole, broken = run(tokens), []
    if differ(whole, evaluated, tolerance) and not differ(run(tokens), whole, tolerance):
        if sees_later(run, tokens, whole, others, tolerance):
            broken.append("causal")
        first = run(torch.stack([tokens[0], others[1]]))[0]
        second = run(torch.stack([others[0], tokens[1]]))[1]
        if differ(torch.stack([first, second]), whole, tolerance):
            broken.append("alone")
    model.eval()
    return broken


def fault_of_caches(model, tokens, tolerance):
    """{"cached": ..} if a model decodes otherwise than in one pass. Narrows its windows."""
    narrow_windows(model, tokens.shape[1] / 3)
    try:
        if differ(in_pieces(model, tokens), model(tokens), tolerance):
            return {"cached": MEANS["cached"]}
    except Exception as e:                             # whatever it is, decoding meets it, too
        return {"cached": f"decoding with a cache fails ({error_line(e)}), and with it lab.sample "
                          "and all that measures a trained model"}
    return {}


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
    """The logits of some tokens; a layer that draws random numbers draws the same each time."""
    # Of a tiny model a few tokens may reject each other, and then nothing shows.
    tokens = torch.arange(8 * SHORT, device=model.W_E.device).view(8, -1) % len(model.W_E)
    with drawing_from(random_states()):
        return model(tokens)


def moved_copy(model, dtype, n_layers=None):
    """The `copy_of_part` of a model, its parameters moved.

    Each is moved by a tenth of its size, or of 1: a share that is learned, and 0 at first, counts.
    The layers' matrices are tripled, as those of a new model change its logits only a little.
    """
    clone, g = copy_of_part(model, dtype, n_layers), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in clone.parameters():
            size = p[p.isfinite()].square().mean().sqrt().nan_to_num()
            noise = torch.randn(p.shape, generator=g, dtype=torch.float64).to(p)
            p.add_(0.1 * noise * (size if size > 0 else 1.0))
        for p in clone.layers.parameters():
            if p.ndim > 1:
                p.mul_(3.0)
    return clone


def copy_of_part(model, dtype, n_layers=None):
    """A copy of the first layers and 1,000 tokens of a model, in eval mode.

    n_layers: if it is not given, four, or more if a later one has another class or other settings.
    """
    part = copy.copy(model)                            # shares its tensors, however large
    layers = model.layers[: n_layers or n_to_try(model)]
    part._modules = model._modules | {"layers": layers}
    W_E = nn.Parameter(model.W_E.detach()[:1000])
    part._parameters = model._parameters | {"W_E": W_E}
    for name in ("head", "nats", "loss"):              # compiled for the model itself
        vars(part).pop(name, None)
    clone = copy.deepcopy(part).eval()
    if clone.W_E.is_mps:
        clone = clone.cpu()                            # Apple's have no float64
    clone.to(dtype)
    for module in (clone, *clone.layers):
        module.dtype = None
    return clone


def n_to_try(model):
    """How many of the first layers have all kinds among them, four at least."""
    kinds, n = [], 4
    for number, layer in enumerate(model.layers, 1):
        settings = {name: x for name, x in vars(layer).items()
                    if isinstance(x, (bool, int, float, str, tuple))}
        kind = (type(layer), settings)
        if kind not in kinds:
            kinds.append(kind)
            n = max(n, number)
    return n


@torch.no_grad()
def widen_acceptance(model):
    """Let half of all pairs match, in place: small models reject so many that nothing shows."""
    for layer in model.layers:
        if hasattr(layer, "s_r"):
            layer.s_r.fill_(4.0)                       # r = 0.98


def narrow_windows(model, widest):
    """Make windows narrow, in place, so that a cache forgets keys."""
    for layer in model.layers:
        if hasattr(layer, "s_w"):
            layer.s_w.nan_to_num_(posinf=10.0)
            for _ in range(10):                        # a `window` of yours may not follow s_w
                if layer.window().max() > widest:
                    layer.s_w.mul_(0.7)


def in_pieces(model, tokens):
    """The logits of tokens that go through a model in pieces, with caches that forget at once."""
    caches = model.new_caches()
    for cache in caches:
        cache.spare = 0
    # PyTorch imports for two seconds when a Transformer gets a second piece of several tokens.
    T = tokens.shape[1]
    sizes = [T - 3, 1, 1, 1]
    if T >= 64:
        sizes = [T - 60, 13, 13, 13, 13, *[1] * 8]
    return torch.cat([model(piece, caches) for piece in tokens.split(sizes, 1)], 1)


def without_gradient(model, dtype, tokens, targets):
    """{"trained": ..} if a parameter gets no gradient of the loss, or one that is not finite.

    It has to be finite at the values that the parameters have, such as 0, as well as around them.
    """
    wrong = {}
    for part in (copy_of_part(model, dtype), moved_copy(model, dtype)):
        part.loss(tokens, targets).backward()
        for name, p in part.named_parameters():
            if p.grad is not None and not p.grad.isfinite().all():
                wrong[name] = f"the gradient of {name} is not finite, so training will diverge"
    # Where the parameters are, it may be 0: of A, if A B is used and B is 0 at first.
    for name, p in part.named_parameters():
        if p.requires_grad and (p.grad is None or not p.grad.any()):
            wrong[name] = (f"{name} gets no gradient, so it will stay as it is: use it, delete it, "
                           "or freeze it by requires_grad_(False)")
    if not wrong:
        return {}
    line = next(iter(wrong.values()))
    if len(wrong) > 1:
        line += f" (and {len(wrong) - 1} more)"
    return {"trained": line}


def unused(layer):
    """Sentences on a class of layers of which nothing is used.

    A method may override nothing, but have almost the name of one that could be overridden, and no
    other method names it; a class without a known name trains as its base does.
    """
    bases = [c for c in layer.__mro__[1:] if c is not nn.Module and issubclass(c, nn.Module)]
    names = [name for c in bases for name in vars(c) if not name.startswith("__")]
    known = {"own_screen", "sizes", "__init__", *names}
    own = [name for name in vars(layer) if name in known or not name.startswith("__")]
    called = {name for f in vars(layer).values() if isfunction(f) for name in f.__code__.co_names}
    said = []
    for name in own:
        near = difflib.get_close_matches(name, known, 1, 0.8)
        if name not in {*known, *called} and near:
            said.append(f"{name} overrides nothing: is it {near[0]}?")
    # With two bases, one may override what the other has.
    if bases and len(layer.__bases__) == 1 and not known.intersection(own):
        said.append(f"{layer.__name__} overrides no method of {bases[0].__name__}, so it trains as "
                    f"{bases[0].__name__} does")
    return said


# ---------------------------------------------------------------------------------- a screen

def draw_case(T, i0, w, r, seed=0, dtype=torch.float32, device="cpu", d_K=16, d_V=64):
    """[q, k, v, w, r, dh] for a screen, T queries at i0, and a tile for each window in w.

    Queries and keys lie near one direction, 1 - s around r: most pairs of independent ones are
    rejected, and a wrong window would not show. dtype: that of v and dh.
    """
    g, H, S = torch.Generator().manual_seed(seed), len(w), i0 + T
    w, r = torch.tensor(w), torch.tensor(r)
    spread = (0.6 * r / d_K).sqrt()[:, None, None]
    x = unit(torch.randn(d_K, generator=g)) + spread * torch.randn(1, H, T + S, d_K, generator=g)
    q, k = unit(x).split((T, S), 2)
    v, dh = (torch.randn(1, H, size, d_V, generator=g) for size in (S, T))
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


def screen_errors(screen, inputs, i0=0, exact=None):
    """{output: its error in each tile, (H,)}, relative to its length, for the value and gradients.

    exact: what a screen is compared with, in float64; if it is not given, multiscreen's `screen` as
    it is now. NaN becomes infinite.
    """
    exact = exact or multiscreen.screen
    right = value_and_gradients(exact, [x.double() for x in inputs], i0)
    errors = {}
    for name, x in value_and_gradients(screen, inputs, i0).items():
        a, b = x[:, None], right[name][:, None]        # dw and dr: (H,)
        if x.ndim > 1:                                 # all others: (1, H, T or S, D)
            a, b = (y.transpose(0, 1).flatten(1) for y in (x, right[name]))
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
