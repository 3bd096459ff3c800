"""Part 2: your layer, cache and model beside multiscreen.py's, and their typical mistakes.

Each method is graded in a layer or a model of multiscreen.py, where it stands in place of that
file's. So a mistake in one method costs nothing in another.
"""
import functools
import itertools
import math
from pathlib import Path

import torch
import torch.nn.functional as F

import multiscreen as ms
from course.exercises import grade
from course.exercises.grade import correlated, random

SIZES = {"vocab_size": 40, "N_L": 2, "N_H": 3, "d_E": 24, "w_th": 100.0}
LAYER = ("project", "gate", "screening", "forward")
MODEL = ("embed", "logits", "loss", "generate")
TRAINED = Path(ms.__file__).with_name("models") / "retrieval.pt"


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
    layer.W_Q.copy_(torch.randn(E, H, K, generator=g))
    layer.W_K.copy_(layer.W_Q + 0.3 * torch.randn(E, H, K, generator=g))
    for W in (layer.W_V, layer.W_G, layer.W_O):
        W.copy_(0.2 * torch.randn(W.shape, generator=g))


def a_layer(methods, **sizes):
    """multiscreen.py's layer with these methods in place of its own."""
    config = ms.Config(**(SIZES | sizes))
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


def draw_inputs(*shape):
    """Similar positions, with a part in common; otherwise every key would be rejected."""
    g = random(0)
    return torch.randn(shape[-1], generator=g) + 0.5 * torch.randn(*shape, generator=g)


def some_tokens(*shape, seed=0):
    return torch.randint(SIZES["vocab_size"], shape, generator=random(seed))


# --------------------------------------------------------- the screening unit, step by step

def positions(start, x):
    return torch.arange(start, start + x.shape[1])


def screening(self, x, screen, cache=None, W_V="W_V", unit_qk=ms.unit, unit_v=ms.unit,
              window=ms.window, acceptance=ms.acceptance, angle=ms.mipe_angle, turn_q=ms.mipe,
              turn_k=ms.mipe, turn_v=lambda v, phi: v, bound=ms.tanh_norm,
              begin=lambda start: start, reuse=True, before=lambda x: x,
              turn_all_keys=lambda k, w, w_th: k,
              i0=lambda start, n_keys, n_queries: n_keys - n_queries):
    """Eq. 16. Its mistakes replace one of the steps, which are the arguments from W_V on."""
    w, r = window(self.s_w), acceptance(self.s_r)
    x = before(x)
    q, k = self.project(x, self.W_Q), self.project(x, self.W_K)
    v = self.project(x, getattr(self, W_V))
    start = 0 if cache is None else cache.end
    phi = angle(positions(begin(start), x), w, self.w_th)
    q, k, v = turn_q(unit_qk(q), phi), turn_k(unit_qk(k), phi), turn_v(unit_v(v), phi)
    if cache is None or not reuse:
        return bound(screen(q, turn_all_keys(k, w, self.w_th), v, w, r, 0))
    k, v = cache.append(k, v, w)
    k = turn_all_keys(k, w, self.w_th)
    return bound(screen(q, k, v, w, r, i0(start, k.shape[2], x.shape[1])))


def as_it_is(x, *_):
    return x


def turned_from_0(k, w, w_th):
    """Keys that turn as if the first of them were at position 0."""
    return ms.mipe(k, ms.mipe_angle(torch.arange(k.shape[2]), w, w_th))


class Cache:
    """Keeps the keys and values that a new query or a later one may see."""

    def __init__(self):
        self.k = self.v = None
        self.first = self.end = 0

    def oldest(self, start, end, w):
        """The oldest position to keep, when new tokens stand at start .. end - 1."""
        if w is None:                                  # the caller's `screen` may look at all keys
            return 0
        return start - math.ceil(min(w.max().item(), 2**30)) + 1

    def join(self, old, new):
        return new if old is None else torch.cat((old, new), 2)

    def append(self, k, v, w):
        start, self.end = self.end, self.end + k.shape[2]
        oldest = max(self.oldest(start, self.end, w), self.first)
        self.k = self.join(self.k, k)[:, :, oldest - self.first :]
        self.v = self.join(self.v, v)[:, :, oldest - self.first :]
        self.first = oldest
        return self.k, self.v


def cache_with(**methods):
    return type("Cache", (Cache,), methods)


def append_and(end):
    """An `append` that keeps everything, and a wrong end, a function of the cache and new keys."""
    def append(self, k, v, w):
        self.k, self.v = self.join(self.k, k), self.join(self.v, v)
        self.end = end(self, k)
        return self.k, self.v

    return append


def in_turn(self, x, screen, cache=None):
    """A wrong `forward`, where each tile reads what the one before it has written."""
    for h, W in enumerate(self.s_O.exp()[:, None, None] * self.W_O):
        x = x + (self.screening(x, screen) * self.gate(x))[:, h] @ W
    return x


def updated(y=lambda self, x, screen: self.screening(x, screen) * self.gate(x),
            scale=lambda s_O: s_O.exp(), add=lambda x, updates: x + updates.sum(1)):
    """A wrong `forward`: y, the scale of each tile, and how its updates (B, H, T, E) are added."""
    def forward(self, x, screen, cache=None):
        updates = torch.einsum("bhtv,hve->bhte", y(self, x, screen), self.W_O)
        return add(x, updates * scale(self.s_O)[:, None, None])

    return forward


def layer_norm(x):
    return F.layer_norm(x, x.shape[-1:])


def rms(x):
    return F.rms_norm(x, x.shape[-1:])


def g_of(self, x):
    return self.project(x, self.W_G)


def changed(name, change):
    """A wrong model: the right initial values, and then change(parameter, sizes) for one name."""
    def model(config):
        made = ms.Multiscreen(config)
        with torch.no_grad():
            for full, p in made.named_parameters():
                if full.rpartition(".")[2] == name:
                    p.copy_(change(p, config))
        return made

    return model


def uniform(name):
    """A wrong model with a matrix from the uniform distribution between 0 and x."""
    return changed(name, lambda W, c: W.std() * torch.rand(W.shape))


def tied(config):
    """A wrong model whose layers begin with W_K = W_Q."""
    model = ms.Multiscreen(config)
    for layer in model.layers:
        layer.W_K.data.copy_(layer.W_Q)
    return model


def alike(config):
    """A wrong model in which all layers begin with the same matrices."""
    model = ms.Multiscreen(config)
    for layer in model.layers[1:]:
        layer.load_state_dict(model.layers[0].state_dict())
    return model


def seeded(config):
    """A wrong model that sets the seed itself."""
    torch.manual_seed(0)
    return ms.Multiscreen(config)


# The size of each matrix's output, which is its last axis, and the axes that are taken for it.
OUTPUTS = {"W_Q": ("d_K", 0, 1), "W_K": ("d_K", 0, 1), "W_V": ("d_V", 0, 1), "W_O": ("d_E", 0, 1),
           "W_E": ("d_E", 0)}


def of_matrix(name, size, *others):
    """The mistakes in 0.1/sqrt(size), the deviation of a matrix."""
    return [
        *[(changed(name, lambda W, c, axis=axis: W * (W.shape[-1] / W.shape[axis]) ** 0.5),
           f"{name} is divided by the root of the wrong dimension: take the output's, {size}")
          for axis in others],
        (changed(name, lambda W, c: W / W.shape[-1] ** 0.5), f"{name}: divide 0.1 by the root of "
         f"{size}, not by {size}"),
        (changed(name, lambda W, c: W * (0.1 / W.shape[-1] ** 0.5) ** -0.5), "x of N(0, x) is the "
         "standard deviation here, not the variance: take no root of it"),
        (changed(name, lambda W, c: W * 10), f"{name}: the factor 0.1 is missing")]


def nats(self, tokens, targets, reduction="mean"):
    z = self(tokens).transpose(1, 2)
    return F.cross_entropy(z, targets, reduction=reduction)


def greedy(self, tokens, n, caches, again=False, position=-1):
    """The n tokens after the prompt. caches: a function of the step; again: read all each time."""
    seen = tokens
    for m in range(n):
        x = seen if again or m == 0 else seen[:, -1:]
        z = self.logits(self.hidden(x, caches(m)))[:, position]
        seen = torch.cat((seen, z.argmax(-1, keepdim=True)), 1)
    return seen[:, tokens.shape[1] :]


def once(self):
    """The same caches at each step."""
    caches = [ms.KeyCache() for _ in self.layers]
    return lambda m: caches


def generate_with_one_cache(self, tokens, n):
    cache = ms.KeyCache()
    return greedy(self, tokens, n, lambda m: [cache] * len(self.layers))


# ---------------------------------------------------------------------------- the mistakes

COLUMNS = "the columns of W_E have unit length here: a row is a token, so dim=-1"
READ_AGAIN = ("all tokens go through the layers again at each step: pass on only the new one, as "
              "the caches hold the others")

# {exercise: [(a wrong method, class or model, what to say to those who have its results)]}
MISTAKES = {
    "project": [
        (lambda self, x, W: torch.einsum("bte,ehd->bthd", x, W), "the axes are (B, T, H, D): the "
         "tiles come before the positions, (B, H, T, D)"),
        (lambda self, x, W: (x @ W.flatten(1)).view(len(x), W.shape[1], x.shape[1], W.shape[2]),
         "tiles and positions are mixed up: the product is (B, T, H, D). Transpose it, as a view "
         "only renames the axes"),
        (lambda self, x, W: (x @ W.flatten(1)).unflatten(-1, W.shape[:0:-1]).permute(0, 3, 1, 2),
         "tiles and dimensions are mixed up: unflatten(-1, (H, D)), in the order of W's axes"),
        (lambda self, x, W: x @ W, "W has three axes, (E, H, D): flatten the last two, or use "
         "torch.einsum"),
        (lambda self, x, W: x @ W.transpose(0, 1), "the axis of B is taken for that of the tiles: "
         "give x an axis for them, x[:, None]"),
        (lambda self, x, W: ms.unit(torch.einsum("bte,ehd->bhtd", x, W)), "unit length comes "
         "later: `project` is only the product")],
    "gate": [
        (lambda self, x: F.silu(g_of(self, x)), "the gate is not bounded: tanh is missing"),
        (lambda self, x: torch.tanh(g_of(self, x)), "SiLU is missing: tanh(SiLU(g))"),
        (lambda self, x: F.silu(torch.tanh(g_of(self, x))), "tanh and SiLU are in the wrong order: "
         "tanh(SiLU(g))"),
        (lambda self, x: torch.tanh(F.relu(g_of(self, x))), "ReLU stands for SiLU: tanh(SiLU(g))"),
        (lambda self, x: torch.tanh(F.gelu(g_of(self, x))), "GELU stands for SiLU: tanh(SiLU(g))"),
        (lambda self, x: torch.tanh(g_of(self, x)) * torch.sigmoid(g_of(self, x)), "tanh is taken "
         "of g alone: it is taken of all of SiLU(g) = g sigmoid(g)"),
        (lambda self, x: torch.sigmoid(g_of(self, x)), "this is a sigmoid: the gate is "
         "tanh(SiLU(g))"),
        (lambda self, x: torch.tanh(torch.sigmoid(g_of(self, x))), "SiLU(g) is g sigmoid(g), not "
         "sigmoid(g)"),
        (lambda self, x: torch.tanh(F.silu(self.project(x, self.W_V))), "W_V is for the values: "
         "take W_G")],
    "screening": [(functools.partialmethod(screening, **steps), cause) for steps, cause in [
        ({"bound": as_it_is}, "the output is not bounded: Eq. 14, TanhNorm, is missing"),
        ({"bound": ms.unit}, "the output always has length 1: Eq. 14 is TanhNorm, which leaves "
         "short vectors as they are"),
        ({"bound": torch.tanh}, "tanh of each number changes the direction: TanhNorm scales the "
         "whole vector"),
        ({"unit_qk": as_it_is, "unit_v": as_it_is}, "nothing is of unit length: Eq. 5 is for q, k "
         "and v"),
        ({"unit_qk": lambda x: layer_norm(x), "unit_v": lambda x: layer_norm(x)}, "this is "
         "LayerNorm: Eq. 5 divides q, k and v by their length"),
        ({"window": as_it_is, "acceptance": as_it_is}, "s_w and s_r are not yet w and r: apply "
         "`window` and `acceptance`"),
        ({"before": lambda x: layer_norm(x)}, "the layer reads x as it is: there is no LayerNorm"),
        ({"unit_v": as_it_is}, "the values are not of unit length: Eq. 5 is for q, k and v"),
        ({"unit_qk": as_it_is}, "queries and keys are not of unit length: Eq. 5 is for q, k and v"),
        ({"angle": lambda i, w, w_th: ms.mipe_angle(i, w, 256.0)}, "w_th is "
         "self.w_th, and not always 256"),
        ({"before": ms.unit, "unit_qk": as_it_is, "unit_v": as_it_is}, "unit length comes "
         "after the product: Eq. 5 scales q, k and v, and x stays as it is"),
        ({"turn_q": lambda q, phi: ms.mipe(q, phi) / q.shape[-1] ** 0.5}, "divided by the root of "
         "d_K, as in attention: q and k have unit length, so q . k is their cosine already"),
        ({"turn_q": as_it_is, "turn_k": as_it_is}, "queries and keys have no positions: MiPE is "
         "missing"),
        ({"turn_k": as_it_is}, "only the queries turn: MiPE is for q and k"),
        ({"turn_v": ms.mipe}, "the values turn, too: MiPE is for q and k only"),
        ({"window": as_it_is}, "s_w is not yet w: apply `window`"),
        ({"acceptance": as_it_is}, "s_r is not yet r: apply `acceptance`"),
        ({"W_V": "W_G"}, "W_G is for the gate: values take W_V"),
        ({"reuse": False}, "the cache is ignored: give it the new keys and values, and screen all "
         "that it returns"),
        ({"turn_k": as_it_is, "turn_all_keys": turned_from_0}, "turn the keys before append: the "
         "cache may drop old ones, so a key's place in it is not its position"),
        ({"begin": lambda start: 0}, "MiPE counts from 0 in each call: positions continue at "
         "cache.end"),
        ({"i0": lambda start, n_keys, n_queries: 0}, "i0 is not passed to screen: the queries "
         "begin after the keys in the cache"),
        ({"i0": lambda start, n_keys, n_queries: n_keys}, "i0 is the number of keys before the "
         "first query's own: the new keys are not among them"),
        ({"i0": lambda start, n_keys, n_queries: start}, "the cache may drop old keys: i0 counts "
         "from the first key that append returns")]],
    "forward": [
        (updated(add=lambda x, updates: updates.sum(1)), "the residual is missing: Eq. 2 adds the "
         "updates to x"),
        (updated(scale=torch.ones_like), "the scale e^s_O is missing"),
        (updated(scale=lambda s_O: s_O), "the scale is e^s_O, not s_O"),
        (updated(add=lambda x, updates: x + updates.mean(1)), "the tiles are averaged: Eq. 2 adds "
         "them"),
        (updated(lambda self, x, screen: self.screening(x, screen)), "the gate is ignored: u times "
         "g_hat"),
        (updated(lambda self, x, screen: self.screening(x, screen) + self.gate(x)), "u is "
         "multiplied by the gate, not added to it"),
        (updated(lambda self, x, screen: self.screening(layer_norm(x), screen) *
                 self.gate(layer_norm(x))), "the layer reads x as it is: there is no LayerNorm"),
        (updated(lambda self, x, screen: self.screening(rms(x), screen) * self.gate(rms(x))), "the "
         "layer reads x as it is: there is no RMSNorm"),
        (updated(add=lambda x, updates: ms.unit(x + updates.sum(1))), "the sum is the layer's "
         "output: it is not scaled to unit length"),
        (updated(add=lambda x, updates: layer_norm(x + updates.sum(1))), "the sum is the layer's "
         "output: there is no LayerNorm"),
        (updated(), "the cache is ignored: pass it on to `screening`"),
        (in_turn, "all tiles read the same x: add up their updates, then add the sum to x")],
    "cache": [
        (cache_with(oldest=lambda self, start, end, w: start), "append returned only the new keys: "
         "return all that are kept"),
        (cache_with(oldest=lambda self, start, end, w: start - int(min(w.max(), 1e9)) + 1),
         "w is rounded down: a query sees ceil(w) keys, its own included"),
        (cache_with(oldest=lambda self, start, end, w: end - math.ceil(min(w.max(), 1e9))),
         "these are the keys that the last of the new tokens sees: the first of them sees further "
         "back"),
        (cache_with(append=lambda self, k, v, w: None), "append must return all keys and all "
         "values"),
        *[(cache_with(append=append_and(end)), "append must move cache.end on, by the number of "
           "new tokens, k.shape[2]") for end in (
              lambda cache, k: 0, lambda cache, k: cache.end + 1,
              lambda cache, k: cache.end + k.shape[1],
              lambda cache, k: cache.end + cache.k.shape[2])],
        (cache_with(append=lambda self, k, v, w: Cache.append(self, k, v, w)[::-1]), "append "
         "returns the keys, and then the values"),
        (cache_with(join=lambda self, old, new: new if old is None else torch.cat((new, old), 2)),
         "the oldest key comes first"),
        (cache_with(join=lambda self, old, new: new if old is None else torch.cat((old, new), 1)),
         "keys (B, H, T, K) are joined along the axis of their positions, torch.cat(.., 2)")],
    "initialize": [
        *[mistake for name, sizes in OUTPUTS.items() for mistake in of_matrix(name, *sizes)],
        (changed("W_G", lambda W, c: W / c.d_V**0.5), "W_G has the fixed standard deviation 0.1, "
         "whatever its dimensions"),
        *[(uniform(name), f"{name} is drawn from a uniform distribution: N(0, x) is the normal one")
          for name in OUTPUTS],
        (tied, "W_Q and W_K are equal: draw each matrix by itself"),
        (alike, "all layers have the same matrices: draw each by itself"),
        (seeded, "each model has the same matrices: set no seed, as the caller does"),
        (changed("s_w", lambda s, c: 0 * s), "s_w is spread over the tiles of a layer, not 0 for "
         "all"),
        (changed("s_w", lambda s, c: torch.linspace(0, c.w_th, c.N_H)), "s_w goes up to log w_th, "
         "not to w_th"),
        (changed("s_w", lambda s, c: torch.linspace(0, math.log(256), c.N_H)), "w_th is "
         "config.w_th, and not always 256"),
        (changed("s_O", lambda s, c: 2 * s), "s_O: the root is missing, log(1/sqrt(N_H N_L))"),
        (changed("s_O", lambda s, c: 0 * s - math.log(c.N_H) / 2), "s_O: N_L is missing, as the "
         "tiles of all layers count"),
        (changed("s_O", lambda s, c: s.exp()), "s_O: the log is missing, log(1/sqrt(N_H N_L))"),
        (changed("s_E", lambda s, c: s + 1), "the scale e^s_E starts at 1, so s_E starts at 0"),
        (changed("s_F", lambda s, c: 2 * s), "s_F: the root is missing, log sqrt(d_E)"),
        (changed("s_F", lambda s, c: s.exp()), "s_F: the log is missing, log sqrt(d_E)")],
    "embed": [
        (lambda self, t: self.W_E[t], "this is the row of W_E as it is: it needs unit length and "
         "the scale e^s_E"),
        (lambda self, t: self.s_E.exp() * self.W_E[t], "the embedding is not of unit length"),
        (lambda self, t: self.s_E.exp() * F.normalize(self.W_E, dim=0)[t], COLUMNS),
        (lambda self, t: ms.unit(self.W_E[t]), "the scale e^s_E is missing"),
        (lambda self, t: self.s_E * ms.unit(self.W_E[t]), "the scale is e^s_E, not s_E"),
        (lambda self, t: self.s_E + ms.unit(self.W_E[t]), "the scale multiplies: e^s_E times the "
         "unit vector"),
        (lambda self, t: self.s_E.exp() + ms.unit(self.W_E[t]), "the scale multiplies: e^s_E times "
         "the unit vector"),
        (lambda self, t: self.W_E.shape[1] ** 0.5 * ms.unit(self.W_E[t]), "the scale is e^s_E, not "
         "the root of d_E"),
        (lambda self, t: self.W_E.shape[1] ** 0.5 * self.W_E[t], "this is the Transformer's "
         "embedding: here the scale is e^s_E, and the row has unit length"),
        *[(lambda self, t, norm=norm: norm(self.W_E[t]), "this is a norm of Transformers: "
           "e_bar is the row divided by its length") for norm in (layer_norm, rms)],
        (lambda self, t: self.s_E.exp() * rms(self.W_E[t]), "this is RMSNorm: e_bar is the row "
         "divided by its length"),
        (lambda self, t: self.s_E.exp() * layer_norm(self.W_E[t]), "this is LayerNorm: e_bar is "
         "the row divided by its length"),
        (lambda self, t: self.s_F.exp() * ms.unit(self.W_E[t]), "s_F is for the logits: take s_E")],
    "logits": [
        (lambda self, x: self.s_F.exp() * x @ self.W_E.T, "the rows of W_E are not of unit length "
         "here"),
        (lambda self, x: self.s_F.exp() * x @ F.normalize(self.W_E, dim=0).T, COLUMNS),
        (lambda self, x: x @ ms.unit(self.W_E).T, "the scale e^s_F is missing"),
        (lambda self, x: self.s_F * x @ ms.unit(self.W_E).T, "the scale is e^s_F, not s_F"),
        (lambda self, x: self.s_E.exp() * x @ ms.unit(self.W_E).T, "s_E is for the embedding: take "
         "s_F"),
        (lambda self, x: ms.Multiscreen.logits(self, x).softmax(-1), "these are probabilities: the "
         "softmax belongs to the loss"),
        (lambda self, x: ms.Multiscreen.logits(self, x).log_softmax(-1), "these are logarithms of "
         "probabilities: the softmax belongs to the loss"),
        (lambda self, x: x @ ms.unit(self.W_E).T + self.s_F, "the scale multiplies: e^s_F times "
         "W_E_bar"),
        (lambda self, x: x @ ms.unit(self.W_E).T / x.shape[-1] ** 0.5, "the scale is e^s_F: divide "
         "by no root of d_E"),
        *[(lambda self, x, norm=norm: ms.Multiscreen.logits(self, norm(x)), "x must not be "
           "normalised: there is no norm before the head") for norm in (ms.unit, layer_norm)],
        (lambda self, x: self.s_F.exp() * x @ ms.unit(self.W_E), "transpose W_E: its rows are the "
         "tokens")],
    "loss": [
        (lambda self, x, t: F.cross_entropy(self(x)[:, :-1].transpose(1, 2), t[:, 1:]), "the "
         "targets are shifted twice: they are the next tokens already"),
        (lambda self, x, t: nats(self, x[:, :-1], t[:, :-1]), "the last position is left out: all "
         "count, as each has its target"),
        (lambda self, x, t: F.cross_entropy(self(x), t), "cross_entropy takes the classes as axis "
         "1: flatten B and T, or transpose(1, 2)"),
        (lambda self, x, t: F.cross_entropy(self(x).view(len(x), -1, x.shape[1]), t), "a view to "
         "(B, N, T) mixes up tokens and classes: transpose(1, 2), or flatten B and T"),
        (lambda self, x, t: nats(self, x, x), "the inputs were taken for the targets"),
        (lambda self, x, t: F.cross_entropy(self(x).softmax(-1).transpose(1, 2), t), "softmax was "
         "taken twice: cross_entropy begins with one"),
        (lambda self, x, t: F.nll_loss(self(x).transpose(1, 2), t), "nll_loss takes logarithms of "
         "probabilities: cross_entropy takes the logits"),
        (lambda self, x, t: nats(self, x, t) / math.log(2), "this is in bits: take nats, the "
         "natural logarithm"),
        (lambda self, x, t: -nats(self, x, t), "the sign: the loss is -log p, which is positive"),
        (lambda self, x, t: nats(self, x, t).exp(), "this is the perplexity: the loss is its "
         "logarithm"),
        (lambda self, x, t: F.cross_entropy(self(x).transpose(1, 2), t, label_smoothing=0.1),
         "the labels are smoothed: the target's probability alone counts"),
        (lambda self, x, t: nats(self, x, t, "sum"), "this is the sum over all tokens: take the "
         "mean"),
        (lambda self, x, t: nats(self, x, t.clamp_min(0)), "targets of -100 count: leave them out"),
        (lambda self, x, t: nats(self, x, t, "sum") / t.numel(), "targets of -100 count in the "
         "denominator"),
        (lambda self, x, t: torch.stack([nats(self, a[None], b[None]) for a, b in zip(x, t)]).mean(
         ), "this is the mean of each sequence's mean: take it over all tokens that count")],
    "generate": [
        (lambda self, t, n: torch.cat((t, greedy(self, t, n, once(self))), 1), "generate returned "
         "the prompt, too: return the n new tokens"),
        (lambda self, t, n: greedy(self, t[:, :-1], n, once(self)), "the last token of the prompt "
         "is left out: the first new token follows it"),
        (lambda self, t, n: greedy(self, t[:, -1:], n, once(self)), "only the last token of the "
         "prompt is read: all of it goes through the layers first"),
        (lambda self, t, n: greedy(self, torch.cat((t, t[:, -1:]), 1), n, once(self)), "the last "
         "token of the prompt is read twice: the first new token follows from the first reading"),
        (lambda self, t, n: greedy(self, t, n, lambda m: self.new_caches()), "the caches are empty "
         "at each step: make them once, before the first, and pass them to `hidden`"),
        (generate_with_one_cache, "the layers share one cache: each has keys of its own"),
        (lambda self, t, n: greedy(self, t, n, once(self), again=True), READ_AGAIN),
        (lambda self, t, n: greedy(self, t, n, lambda m: None, again=True), READ_AGAIN),
        (lambda self, t, n: greedy(self, t, n, once(self), position=0), "the next token follows "
         "from the logits of the last position, z[:, -1]")],
}


# {exercise: what to check where no mistake is known}
HINTS = {
    "project":
        "no known mistake. Number [b, h, t, d] is the product of x[b, t] and W[:, h, d]",
    "gate": "no known mistake. By hand: g = 0 gives 0, and g = 1 gives tanh(0.731) = 0.624",
    "screening":
        "no known mistake. Print each step: q, k, v of unit length, MiPE, screen, TanhNorm",
    "forward":
        "no known mistake. The result is x plus all updates, with u * g_hat before W_O e^s_O",
    "cache": "no known mistake. Append 3 tokens, then 1: the second call returns up to 4",
    "initialize": "no known mistake. Print the mean and the deviation of each matrix",
    "embed": "no known mistake. Each result has the length e^s_E: print its norm",
    "logits": "no known mistake. For x = row t of W_E at unit length, logit t is e^s_F",
    "loss":
        "no known mistake. The mean of -log p(target) over the targets that are not -100, in nats",
    "generate": "no known mistake. Compare with the argmax of model(all tokens so far)[:, -1]"}


# ------------------------------------------------------------------------------------ the tests

def yours(name):
    """What you wrote, or in the course's own tests a wrong one.

    It is a method, KeyCache, or for `initialize` Multiscreen. A method comes as {name: method},
    with what you have added to the class.
    """
    file = grade.load("part2_model")
    if name == "cache":
        return grade.own(file, "part2_model", "KeyCache")
    if name == "initialize":
        return grade.own(file, "part2_model", "Multiscreen")
    file.KeyCache = ms.KeyCache
    kind, exercises = ("Multiscreen", MODEL) if name in MODEL else ("GatedScreeningTiles", LAYER)
    written = grade.own(file, "part2_model", kind)
    if not hasattr(written, name):
        grade.fail(f"{kind} has no {name}")
    added = {other: f for other, f in vars(written).items()
             if other not in exercises and not other.startswith("__")}
    return added | {name: getattr(written, name)}


def check(name, call, make, *cases):
    """Grade call(inputs of a case, made), with `made` by make(what you wrote)."""
    def graded(written):
        def f(*inputs):
            return call(*inputs, make(written))
        f.__name__, f.__wrapped__ = name, call
        return f

    def with_name(wrong):
        return {name: wrong} if name in (*LAYER, *MODEL) else wrong

    found = yours(name)
    right = RIGHT[name] if name in RIGHT else {}
    grade.grade(graded(found if isinstance(found, dict) else with_name(found)), graded(right),
                cases, [(graded(with_name(wrong)), cause) for wrong, cause in MISTAKES[name]],
                HINTS[name])


RIGHT = {"screening": {"screening": screening}, "cache": Cache, "initialize": ms.Multiscreen}


def case(*inputs, **options):
    return grade.Case(inputs, **options)


def test_project():
    x, W = draw_inputs(2, 5, 24), draw_inputs(24, 3, 7)
    check("project", lambda x, W, layer: layer.project(x, W), a_layer, case(x, W),
          case(draw_inputs(4, 3, 24), draw_inputs(24, 4, 2)))


def test_gate():
    check("gate", lambda x, layer: layer.gate(x), a_layer, case(draw_inputs(2, 5, 24)))


def test_screening():
    def call(x, pieces, screen, layer):
        """u of x, without a cache or in pieces with one."""
        if not pieces:
            return layer.screening(x, screen)
        cache = Cache()
        layer.s_w.data.copy_(torch.tensor([1.0, 0.0, 1.2]))            # the cache drops keys
        return torch.cat([layer.screening(part, screen, cache) for part in x.split(pieces, 1)], 2)

    def twice(*inputs):
        return 2 * ms.screen(*inputs)

    check("screening", call, a_layer,
          case(draw_inputs(2, 9, 24), [], ms.screen, tolerance=1e-4),
          case(draw_inputs(2, 9, 24), [], twice, tolerance=1e-4, hint="the argument `screen` is "
               "ignored: the caller chooses what screens"),
          case(draw_inputs(2, 12, 24), [5, 1, 1, 4, 1], ms.screen, tolerance=1e-4, hint="with a "
               "cache: the queries start at cache.end as it is before append, and i0 is the number "
               "of keys that append returns before the first query's own"))


def test_forward():
    def call(x, pieces, layer):
        """x after the layer, without a cache or in pieces with one."""
        if not pieces:
            return layer(x, ms.screen)
        cache = Cache()
        return torch.cat([layer(part, ms.screen, cache) for part in x.split(pieces, 1)], 1)

    check("forward", call, a_layer,
          case(draw_inputs(2, 9, 24), [], tolerance=1e-4),
          case(draw_inputs(2, 9, 24), [5, 4], tolerance=1e-4, hint="only with a cache is the "
               "result wrong: `screening` needs it, and nothing else"))


def test_cache():
    def call(k, v, w, ends, cache):
        """The keys and values that queries may see after 20, 4 and 1 tokens, or all cache.end."""
        found = []
        for part in (slice(0, 20), slice(20, 24), slice(24, 25)):
            kept, values = cache.append(k[:, :, part], v[:, :, part], w)
            first = part.stop - kept.shape[2]
            oldest = max(part.start - math.ceil(min(w.max().item(), 2**30)) + 1, 0)
            if ends:
                found.append([torch.tensor([cache.end])])
            else:
                found.append([at_positions(x, first, oldest, part.stop) for x in (kept, values)])
        return tuple(torch.cat(pieces, 0 if ends else 2) for pieces in zip(*found))

    def at_positions(x, first, oldest, end):
        """The keys at the positions oldest to end - 1, with NaN for missing ones."""
        seen = x.new_full((*x.shape[:2], end - oldest, x.shape[3]), torch.nan)
        for n in range(x.shape[2]):
            if oldest <= first + n < end:
                seen[:, :, first + n - oldest] = x[:, :, n]
        return seen

    k, v, _ = correlated(0, 1, 2, 25, 25)
    cases = [case(k, v, torch.tensor(w).double(), False, outputs=("a key", "a value"), hint=(
        f"append is called with 20, 4 and 1 new tokens, for windows of {w}: it must return all "
        "keys that a new query may see, the oldest first, and all their values"))
        for w in ([3.0, 4.0], [3.0, 4.5], [3.0, math.inf])]
    check("cache", call, lambda cache: cache(), *cases,
          case(k, v, torch.tensor([3.0, 4.5]).double(), True, outputs=("cache.end",), hint="append "
               "is called with 20, 4 and 1 new tokens: afterwards cache.end must be 20, 24 and 25"))


@functools.cache
def initialized(multiscreen, seed=0):
    """A new model. The right one and each wrong one are made once, from the same random numbers."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return multiscreen(ms.Config(vocab_size=1000, N_L=3, N_H=5, d_E=49, w_th=100.0))


def test_initialize():
    right = {"W_Q": 0.1 / 4, "W_K": 0.1 / 4, "W_V": 0.1 / 8, "W_G": 0.1, "W_O": 0.1 / 7,
             "W_E": 0.1 / 7}

    def call(name, multiscreen):
        """A parameter, or of a matrix the mean and deviation, in units of the right deviation."""
        model = initialized(multiscreen)
        named = [p.detach() for n, p in model.named_parameters() if n.rpartition(".")[2] == name]
        if name not in right:
            return torch.cat(named)
        numbers = torch.cat([p.flatten() for p in named]) / right[name]
        return torch.stack((numbers.mean(), numbers.std()))

    def equal(what, multiscreen):
        """Which matrices are equal that should differ, by their names: a list of 0 and 1."""
        model = initialized(multiscreen)
        matrices = [p for p in model.parameters() if p.ndim > 1]
        if what == "seeds":
            others = [p for p in initialized(multiscreen, 1).parameters() if p.ndim > 1]
            return torch.tensor([torch.equal(a, b) for a, b in zip(matrices, others)])
        first = model.layers[0] if what == "of a layer" else model
        pairs = itertools.combinations([p for p in first.parameters() if p.ndim > 1], 2)
        return torch.tensor([a.shape == b.shape and torch.equal(a, b) for a, b in pairs])

    def either(what, multiscreen):
        if what in ("of a layer", "of all layers", "seeds"):
            return equal(what, multiscreen)
        return call(what, multiscreen)

    check("initialize", either, lambda multiscreen: multiscreen,
          *[case(name, gradients=False, tolerance=0.05, hint=f"{name} is drawn from N(0, x), the "
                 "normal distribution: these are its mean and its standard deviation, both divided "
                 "by x, which should be 0 and 1") for name in right],
          *[case(name, gradients=False, hint=f"the initial values of {name} are wrong")
            for name in ("s_w", "s_r", "s_O", "s_E", "s_F")],
          case("of a layer", gradients=False, hint="two matrices of a layer are equal: draw each "
               "by itself"),
          case("of all layers", gradients=False, hint="two matrices are equal: draw each by "
               "itself"),
          case("seeds", gradients=False, hint="another seed must give other matrices: draw all of "
               "them, and set no seed"))


def test_embed():
    check("embed", lambda t, model: model.embed(t), a_model, case(some_tokens(2, 5)))


def test_logits():
    check("logits", lambda x, model: model.logits(x), a_model,
          case(draw_inputs(2, 5, 24), tolerance=1e-4))


def test_loss():
    t = some_tokens(3, 9)
    inputs, targets = t[:, :-1], t[:, 1:].clone()
    some = targets.clone()
    some[0, 3:] = -100
    check("loss", lambda tokens, targets, model: model.loss(tokens, targets), a_model,
          case(inputs, targets), case(inputs, some, hint="targets of -100 do not count"))


def test_generate():
    def call(tokens, n, counted, model):
        """The new tokens, or how many go through a layer at a time after the prompt."""
        lengths = []

        def count(q, *inputs):
            lengths.append(q.shape[2])
            return ms.screen(q, *inputs)

        model.screen = count
        model.s_F.data.fill_(-2)                       # flat: sampling finds other tokens
        found = model.generate(tokens, n)
        return torch.tensor(max(lengths[len(model.layers) :])) if counted else found

    t = some_tokens(2, 6)
    check("generate", call, a_model, case(t, 7, False),
          case(t, 7, True, hint="after the prompt only one token at a time goes through the "
               "layers"))


# ------------------------------------------------------------------------- the whole model

def whole(theirs):
    """Your whole model with the parameters of multiscreen.py's, and without your `initialize`."""
    file = grade.load("part2_model")

    class Blank(file.Multiscreen):
        def initialize(self):
            pass

    model = Blank(theirs.config)
    right = {name for name, _ in theirs.named_parameters()}
    others = [name for name, _ in model.named_parameters() if name not in right]
    if others:
        grade.fail(f"your model has parameters that the stubs have not, {', '.join(others)}: keep "
                   "to theirs. Eq. 3, too, has the matrix W_E")
    model.load_state_dict(theirs.state_dict())
    return model


def trained():
    """The repository's model for retrieval, after training."""
    saved = torch.load(TRAINED, weights_only=True)
    model = ms.Multiscreen(ms.Config(**saved["config"]))
    model.load_state_dict(saved["weights"])
    return model


def check_whole(name, call, theirs, *cases):
    """Grade call(inputs of a case, model) of your whole model."""
    def f(*inputs):
        return call(*inputs, whole(theirs))

    def right(*inputs):
        return call(*inputs, theirs)

    right.__name__, right.__wrapped__ = name, call
    grade.grade(f, right, cases)


def test_model():
    def logits(tokens, model):
        return model(tokens).detach()

    def change_before(tokens, j, model):
        """How the logits before position j change if token j changes."""
        other = tokens.clone()
        other[:, j] = (other[:, j] + 1) % SIZES["vocab_size"]
        return (model(other) - model(tokens))[:, :j].abs().max().detach()

    model, t = a_model({}), some_tokens(2, 30)
    check_whole("the whole model", logits, model,
                case(t, tolerance=1e-4, hint="the logits are wrong: do 2.1 to 2.7 pass?"))
    check_whole("the change of earlier logits", change_before, model,
                *[case(t, j, hint=f"token {j} changed, and a logit before it, too: the model sees "
                       "the future") for j in (7, 29)])
    check_whole("generate", lambda t, n, model: model.generate(t, n), model,
                case(t[:, :6], 7, hint="generate with your own cache and layers: do 2.3, 2.4, "
                     "2.9 and 2.10 pass?"))
    tokens = torch.randint(256, (1, 200), generator=random(2))
    check_whole("the whole model with trained weights", logits, trained(),
                case(tokens, tolerance=1e-3, hint="the logits are right, but not with trained "
                     "weights: is something rounded?"))


def test_training():
    """pytest -s shows the losses of both models while they train."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = ms.Config(vocab_size=30, N_L=1, N_H=2, d_E=16, d_V=16)
        theirs = ms.Multiscreen(config)
    text = torch.randint(30, (60,), generator=random(1)).repeat(20)      # a text to memorize
    names = tuple(f"dL/d({name})" for name, _ in theirs.named_parameters())
    losses = []

    def gradients(x, model):
        model.loss(x[None, :-1], x[None, 1:]).backward()
        return tuple(torch.zeros_like(p) if p.grad is None else p.grad
                     for p in model.parameters())

    def train(steps, model):
        """The losses of the first three of these steps, by the paper's recipe."""
        g, found = random(0), []
        optimizer = torch.optim.AdamW(model.parameters(), lr=2**-4, betas=(0.9, 0.95),
                                      weight_decay=0)
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
        losses.append(found)
        return torch.tensor(found[:3])

    check_whole("the loss", gradients, theirs, case(text[:60], outputs=names, tolerance=1e-4,
                hint="a parameter has a wrong gradient: do 2.1 to 2.9 pass?"))
    check_whole("training", train, theirs, case(100, tolerance=1e-3, hint="the losses of the first "
                "three steps differ: do 2.1 to 2.8 pass?"))
    found, right = losses
    print("\n step   yours  theirs")
    for step in (0, 1, 2, 4, *range(9, 100, 10)):
        print(f"{step + 1:5d}  {found[step]:6.4f}  {right[step]:6.4f}")
    if not found[-1] < 0.7 * found[0]:
        grade.fail(f"after 100 steps the loss is {found[-1]:.2f}, having begun at {found[0]:.2f}: "
                   "the model hardly learns")
