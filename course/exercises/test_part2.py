"""Part 2: your layer, cache and model beside multiscreen.py's, and their typical mistakes.

Each method is graded in a layer or a model of multiscreen.py, where it stands in place of that
file's. So a mistake in one method costs nothing in another. A mistake is the right code with other
lines, (the right one, the wrong one), and a sentence.
"""
import dataclasses
import math
from pathlib import Path

import torch
import torch.nn.functional as F

import multiscreen as ms
from course.exercises import drive, grade
from course.exercises.grade import case, correlated, random
from course.exercises.mistakes import edits
from multiscreen import acceptance, mipe, mipe_angle, tanh_norm, unit, window

SIZES = drive.SIZES
TRAINED = Path(ms.__file__).with_name("models") / "retrieval.pt"


# -------------------------------------------------- the right code, of which mistakes are edits

def project(self, x, W):
    return torch.einsum("bte,ehd->bhtd", x, W)


def gate(self, x):
    g = self.project(x, self.W_G)
    return torch.tanh(F.silu(g))


def screening(self, x, screen, cache=None):
    start = 0
    if cache is not None:
        start = cache.end
    w = window(self.s_w)
    r = acceptance(self.s_r)
    q = unit(self.project(x, self.W_Q))
    k = unit(self.project(x, self.W_K))
    v = unit(self.project(x, self.W_V))
    angle = mipe_angle(torch.arange(start, start + x.shape[1]), w, self.w_th)
    q = mipe(q, angle)
    k = mipe(k, angle)
    i0 = 0
    if cache is not None:
        k, v = cache.append(k, v, w)
        i0 = k.shape[2] - q.shape[2]
    h = screen(q, k, v, w, r, i0)
    return tanh_norm(h)


def forward(self, x, screen, cache=None):
    u = self.screening(x, screen, cache)
    g_hat = self.gate(x)
    y = u * g_hat
    W_O = self.s_O.exp()[:, None, None] * self.W_O
    updates = torch.einsum("bhtv,hve->bhte", y, W_O)
    return x + updates.sum(1)


class KeyCache:
    def __init__(self):
        self.k = self.v = None
        self.end = 0

    def append(self, k, v, w):
        new = k.shape[2]
        self.end = self.end + new
        if self.k is not None:
            k = torch.cat((self.k, k), 2)
            v = torch.cat((self.v, v), 2)
        self.k = k
        self.v = v
        return k, v


def embed(self, tokens):
    e = self.W_E[tokens]
    return self.s_E.exp() * unit(e)


def logits(self, x):
    W = unit(self.W_E)
    return self.s_F.exp() * x @ W.T


def loss(self, tokens, targets):
    z = self(tokens)
    t = targets
    return F.cross_entropy(z.transpose(1, 2), t)


def generate(self, tokens, n):
    caches = [ms.KeyCache() for _ in self.layers]
    seen = tokens
    x = tokens
    for _ in range(n):
        z = self.logits(self.hidden(x, caches))[:, -1]
        x = z.argmax(-1, keepdim=True)
        seen = torch.cat((seen, x), 1)
    return seen[:, tokens.shape[1] :]


def layer_norm(x):
    return F.layer_norm(x, x.shape[-1:])


def rms(x):
    return F.rms_norm(x, x.shape[-1:])


def softmax(x):
    return x.softmax(-1)


# ---------------------------------------------------------------------------- the mistakes

# The functions that people apply where the paper has none, and their names.
FUNCTIONS = {"layer_norm": "LayerNorm", "rms": "RMSNorm", "unit": "unit length",
             "tanh_norm": "TanhNorm", "torch.tanh": "tanh", "torch.sigmoid": "sigmoid",
             "F.silu": "SiLU", "F.relu": "ReLU", "softmax": "softmax"}


def with_functions(line, x, what, *but):
    """Mistakes: each of FUNCTIONS but these is applied to x in a line of the right code."""
    return [(line, line.replace(x, f"{f}({x})"), f"{what}: there is no {name} here")
            for f, name in FUNCTIONS.items() if f not in but]


def with_scales(name):
    """Mistakes: something else stands for the scale e^s."""
    scale = f"self.{name}.exp()"
    says = f"the scale is e^{name}, not "
    return [(scale, f"self.{name}", f"{says}{name}"),
            (scale, f"(-self.{name}).exp()", f"{says}e^-{name}"),
            (scale, f"(2 * self.{name}).exp()", f"{says}its square"),
            (scale, f"(1 + self.{name})", f"{says}1 + {name}"),
            (scale, f"torch.sigmoid(self.{name})", f"{says}a sigmoid")]


PRODUCT = 'torch.einsum("bte,ehd->bhtd", x, W)'
Q, K, V = ("q = unit(self.project(x, self.W_Q))", "k = unit(self.project(x, self.W_K))",
           "v = unit(self.project(x, self.W_V))")
W, R = "w = window(self.s_w)", "r = acceptance(self.s_r)"
APPEND = "k, v = cache.append(k, v, w)"
I0 = "i0 = k.shape[2] - q.shape[2]"
H = "h = screen(q, k, v, w, r, i0)"
G = "g = self.project(x, self.W_G)"
GATE = "return torch.tanh(F.silu(g))"
Y = "y = u * g_hat"
SUM = "return x + updates.sum(1)"
E_BAR = "return self.s_E.exp() * unit(e)"
LOGITS = "return self.s_F.exp() * x @ W.T"
ENTROPY = "F.cross_entropy(z.transpose(1, 2), t)"
PAIRS = "z.transpose(1, 2), t"
READS = "the layer reads x as it is"
COLUMNS = "the columns of W_E have unit length here: a row is a token, so dim=-1"
READ_AGAIN = ("all tokens go through the layers again at each step: pass on only the new one, as "
              "the caches hold the others")
END = "append must move cache.end on, by the number of new tokens, k.shape[2]"
IGNORED = ("the cache is ignored: give it the new keys and values, and screen all that it returns")
PROBABILITIES = "the softmax belongs to the loss: return the logits"
FIRST_KEYS = "return k[:, :, first:], v[:, :, first:]"

# {exercise: [(wrong code, what to say to those who have its results)]}
MISTAKES = {
    "project": edits(
        project,
        *with_functions(PRODUCT, "x", "x stays as it is"),
        *with_functions(PRODUCT, PRODUCT, "`project` is only the product"),
        (PRODUCT, "(x @ W.flatten(1)).view(len(x), W.shape[1], x.shape[1], W.shape[2])", "tiles "
         "and positions are mixed up: the product is (B, T, H, D). Transpose it, as a view only "
         "renames the axes"),
        (PRODUCT, "(x @ W.flatten(1)).unflatten(-1, W.shape[:0:-1]).permute(0, 3, 1, 2)", "tiles "
         "and dimensions are mixed up: unflatten(-1, (H, D)), in the order of W's axes"),
        (PRODUCT, "x @ W", "W has three axes, (E, H, D): flatten the last two, or use "
         "torch.einsum"),
        (PRODUCT, PRODUCT + " / x.shape[-1] ** 0.5", "divided by the root of d_E: `project` is "
         "only the product"),
        (PRODUCT, PRODUCT + " / W.shape[-1] ** 0.5", "divided by the root of d_K, as in "
         "attention: `project` is only the product")),
    "gate": edits(
        gate,
        *with_functions(G, "x", READS),
        *with_functions(G, "self.project(x, self.W_G)", "g is the product as it is, and SiLU and "
                        "tanh come after it", "tanh_norm"),
        *[(GATE, f"return {wrong}", f"{what}: the gate is tanh(SiLU(g))") for wrong, what in (
            ("F.silu(g)", "the gate is not bounded, tanh is missing"),
            ("g", "g is not yet the gate"),
            ("torch.tanh(g)", "SiLU is missing"),
            ("F.silu(torch.tanh(g))", "tanh and SiLU are in the wrong order"),
            ("torch.tanh(torch.sigmoid(g))", "SiLU(g) is g sigmoid(g), not sigmoid(g)"),
            ("torch.sigmoid(g)", "this is a sigmoid"),
            ("torch.sigmoid(F.silu(g))", "a sigmoid stands for tanh"),
            ("tanh_norm(F.silu(g))", "TanhNorm stands for tanh of each number"))],
        *[(GATE, f"return torch.tanh(F.{f}(g))", f"{f} stands for SiLU: the gate is tanh(SiLU(g))")
          for f in ("relu", "gelu", "mish", "softplus", "elu", "leaky_relu")],
        *[(GATE, f"return F.{f}(g)", f"this is {f} alone: the gate is tanh(SiLU(g))")
          for f in ("relu", "gelu", "mish")],
        ("self.W_G", "self.W_V", "W_V is for the values: take W_G")),
    "screening": edits(
        screening,
        *with_functions(H, "screen(q, k, v, w, r, i0)", "TanhNorm takes h as it is", "rms"),
        *[("tanh_norm(h)", f"{wrong}", f"{what}: Eq. 14 is TanhNorm of h") for wrong, what in (
            ("h", "the output is not bounded"),
            ("unit(h)", "the output always has length 1, but short vectors stay as they are"),
            ("torch.tanh(h)", "tanh of each number changes the direction"),
            ("layer_norm(h)", "this is LayerNorm"),
            ("rms(h)", "this is RMSNorm"))],
        *[(Q, Q.replace("unit", f), K, K.replace("unit", f), V, V.replace("unit", f),
           f"{what}: Eq. 5 divides q, k and v by their length") for f, what in (
               ("", "nothing is of unit length"),
               ("layer_norm", "this is LayerNorm"),
               ("rms", "this is RMSNorm, as in QK-norm"),
               ("tanh_norm", "this is TanhNorm"))],
        *[(line, line.replace("unit", ""), f"{what} are not of unit length: Eq. 5 is for q, k and "
           "v") for line, what in ((Q, "the queries"), (K, "the keys"), (V, "the values"))],
        (Q, Q.replace("unit", ""), K, K.replace("unit", ""), "queries and keys are not of unit "
         "length: Eq. 5 is for q, k and v"),
        (Q, f"x = layer_norm(x); {Q}", f"{READS}: there is no LayerNorm"),
        (Q, Q.replace("W_Q", "W_K"), "the queries take W_K: they have W_Q"),
        (K, K.replace("W_K", "W_Q"), "the keys take W_Q: they have W_K"),
        (H, "h = screen(k, q, v, w, r, i0)", "queries and keys are swapped: screen(q, k, v, ..)"),
        (H, "h = screen(q, k, v, r, w, i0)", "w and r are swapped: screen(q, k, v, w, r, i0)"),
        (H, "h = screen(q, k, v, self.s_w, self.s_r, i0)", "screen takes w and r, not s_w and s_r"),
        (W, "w = self.s_w", R, "r = self.s_r", "s_w and s_r are not yet w and r: apply `window` "
         "and `acceptance`"),
        (W, "w = self.s_w", "s_w is not yet w: apply `window`"),
        (W, "w = self.s_w.exp()", "w lacks its + 1: apply `window`"),
        (R, "r = self.s_r", "s_r is not yet r: apply `acceptance`"),
        (R, "r = torch.sigmoid(-self.s_r)", "the sign of s_r: apply `acceptance`"),
        (R, "r = self.s_r.exp() + 1", "r = exp(s) + 1 is from an older version of the paper: apply "
         "`acceptance`"),
        ("self.w_th", "256.0", "w_th is self.w_th, and not always 256"),
        ("q = mipe(q, angle)", "q = mipe(q, angle) / q.shape[-1] ** 0.5", "divided by the root of "
         "d_K, as in attention: q and k have unit length, so q . k is their cosine already"),
        ("q = mipe(q, angle)", "", "k = mipe(k, angle)", "", "queries and keys have no positions: "
         "MiPE is missing"),
        ("k = mipe(k, angle)", "", "only the queries turn: MiPE is for q and k"),
        ("q = mipe(q, angle)", "", "only the keys turn: MiPE is for q and k"),
        (H, "h = screen(q, k, mipe(v, angle), w, r, i0) if cache is None else None",
         "the values turn, too: MiPE is for q and k only"),
        (APPEND, "cache.append(k, v, w)", I0, "", IGNORED),
        ("if cache is not None:\n        k, v", "if False:\n        k, v", IGNORED),
        ("k = mipe(k, angle)", "", H, "k = mipe(k, mipe_angle(torch.arange(k.shape[2]), w, "
         "self.w_th)); " + H, "turn the keys before append: the cache may drop old ones, so a "
         "key's place in it is not its position"),
        ("start = cache.end", "start = 0", "MiPE counts from 0 in each call: positions continue at "
         "cache.end"),
        (I0, "i0 = 0", "i0 is not passed to screen: the queries begin after the keys in the cache"),
        (I0, "i0 = k.shape[2]", "i0 is the number of keys before the first query's own: the new "
         "keys are not among them"),
        (I0, "i0 = start", "the cache may drop old keys: i0 counts from the first key that append "
         "returns")),
    "forward": edits(
        forward,
        *with_scales("s_O"),
        ("self.s_O.exp()[:, None, None] * ", "", "the scale e^s_O is missing"),
        *with_functions("g_hat = self.gate(x)", "self.gate(x)", "g_hat is the gate already"),
        *with_functions(Y, "u", "u stays as it is"),
        *with_functions(Y, "u * g_hat", "multiply u by g_hat, and nothing else"),
        *with_functions(SUM, "updates.sum(1)", "the updates are added as they are"),
        *with_functions(SUM, "x + updates.sum(1)", "the sum is the layer's output"),
        *with_functions(SUM, "x ", "the residual is x as it is"),
        *[("u = self.screening(x,", f"u = self.screening({f}(x),", "self.gate(x)",
           f"self.gate({f}(x))", f"{READS}: there is no {name}") for f, name in (
               ("layer_norm", "LayerNorm"), ("rms", "RMSNorm"), ("unit", "unit length"))],
        *[("u = self.", f"x = {f}(x); u = self.", f"{READS}, and the residual is x: there is no "
           f"{name}") for f, name in (("layer_norm", "LayerNorm"), ("rms", "RMSNorm"))],
        (SUM, "return updates.sum(1)", "the residual is missing: Eq. 2 adds the updates to x"),
        (SUM, "return x - updates.sum(1)", "the sign: Eq. 2 adds the updates to x"),
        ("updates.sum(1)", "updates.mean(1)", "the tiles are averaged: Eq. 2 adds them"),
        ("updates.sum(1)", "updates.sum(1) / updates.shape[1] ** 0.5", "divided by the root of "
         "N_H: Eq. 2 adds the tiles as they are"),
        (SUM, "return x + y.reshape(*x.shape[:2], -1) @ W_O.flatten(0, 1)", "tiles and positions "
         "are mixed up: y is (B, H, T, V), so transpose(1, 2) before the tiles are flattened"),
        (Y, "y = u", "the gate is ignored: u times g_hat"),
        (Y, "y = u + g_hat", "u is multiplied by the gate, not added to it"),
        (Y, "y = u * (1 + g_hat)", "u is multiplied by g_hat itself, not by 1 + g_hat")),
    "cache": edits(
        KeyCache,
        ("return k, v", "return k[:, :, -new:], v[:, :, -new:]", "append returned only the new "
         "keys: return all that are kept"),
        ("return k, v", "first = max(self.end - new - int(min(w.max(), 1e9)) + 1, 0); "
         + FIRST_KEYS, "w is rounded down: a query sees ceil(w) keys, its own included"),
        ("return k, v", "first = max(self.end - math.ceil(min(w.max(), 1e9)), 0); " + FIRST_KEYS,
         "these are the keys that the last of the new tokens sees: the first of them sees further "
         "back"),
        ("return k, v", "first = max(self.end - new - math.ceil(min(w.min(), 1e9)) + 1, 0); "
         + FIRST_KEYS, "the smallest window decides: a tile with a wider one needs older keys"),
        ("return k, v", "", "append must return all keys and all values"),
        ("return k, v", "return k", "append must return all keys and all values"),
        ("return k, v", "return v, k", "append returns the keys, and then the values"),
        ("self.end + new", "0", END),
        ("self.end + new", "self.end + 1", END),
        ("self.end + new", "new", "cache.end is the number of the last new tokens: add it to what "
         "it was"),
        ("self.end = self.end + new", "", "self.v = v", "self.v = v; self.end += k.shape[2]",
         "cache.end counts old keys again: add the number of new ones"),
        ("(self.k, k), 2", "(k, self.k), 2", "(self.v, v), 2", "(v, self.v), 2", "the oldest key "
         "comes first"),
        ("(self.k, k), 2", "(self.k, k), 1", "(self.v, v), 2", "(self.v, v), 1", "keys (B, H, T, "
         "K) are joined along the axis of their positions, torch.cat(.., 2)")),
    "embed": edits(
        embed,
        *with_scales("s_E"),
        *[(E_BAR, E_BAR.replace("unit", f), f"{what}: e_bar is the row divided by its length")
          for f, what in (("", "there is no unit length"), ("layer_norm", "this is LayerNorm"),
                          ("rms", "this is RMSNorm"), ("tanh_norm", "this is TanhNorm"))],
        (E_BAR, "return e", "this is the row of W_E as it is: it needs unit length and the scale "
         "e^s_E"),
        (E_BAR, "return unit(e)", "the scale e^s_E is missing: it comes after unit length, which "
         "would take it away"),
        (E_BAR, "return e.shape[-1] ** 0.5 * e", "this is the Transformer's embedding: here the "
         "scale is e^s_E, and the row has unit length"),
        (E_BAR, E_BAR + " * e.shape[-1] ** 0.5", "the root of d_E is not part of the scale: e^s_E "
         "alone"),
        ("unit(e)", "F.normalize(self.W_E, dim=0)[tokens]", COLUMNS),
        ("self.s_E", "self.s_F", "s_F is for the logits: take s_E")),
    "logits": edits(
        logits,
        *with_scales("s_F"),
        *with_functions(LOGITS, "x ", "x is read as it is, with no norm before the head"),
        *with_functions(LOGITS, LOGITS.removeprefix("return "), "the logits stay as they are",
                        "softmax", "tanh_norm"),
        (LOGITS, "return softmax(self.s_F.exp() * x @ W.T)", PROBABILITIES),
        (LOGITS, "return (self.s_F.exp() * x @ W.T).log_softmax(-1)", PROBABILITIES),
        ("self.s_F.exp() * x", "x", "the scale e^s_F is missing"),
        (LOGITS, "return x @ self.W_E.T", "W_E stands as it is: its rows need unit length, and the "
         "scale e^s_F is missing"),
        ("W = unit(self.W_E)", "W = self.W_E", "the rows of W_E are not of unit length here"),
        ("W = unit(self.W_E)", "W = F.normalize(self.W_E, dim=0)", COLUMNS),
        ("W = unit(self.W_E)", "W = self.W_E", LOGITS, LOGITS.replace("x ", "unit(x) "), "x was "
         "scaled to unit length in place of W_E: there is no norm before the head"),
        (LOGITS, LOGITS + " / x.shape[-1] ** 0.5", "the root of d_E is not part of the scale: "
         "e^s_F alone"),
        (LOGITS, "return x @ W.T * x.shape[-1] ** 0.5", "the scale is e^s_F, and not always the "
         "root of d_E"),
        ("self.s_F", "self.s_E", "s_E is for the embedding: take s_F"),
        ("@ W.T", "@ W", "transpose W_E: its rows are the tokens")),
    "loss": edits(
        loss,
        (PAIRS, "z[:, :-1].transpose(1, 2), t[:, 1:]", "the targets are shifted twice: they are "
         "the next tokens already"),
        (PAIRS, "z[:, -1], t[:, -1]", "only the last position counts: all do, as each has its "
         "target"),
        (PAIRS, "z, t", "cross_entropy takes the classes as axis 1: flatten B and T, or "
         "transpose(1, 2)"),
        (PAIRS, "z.view(len(z), -1, z.shape[1]), t", "a view to (B, N, T) mixes up tokens and "
         "classes: transpose(1, 2), or flatten B and T"),
        ("t = targets", "t = tokens", "the inputs were taken for the targets"),
        ("z.transpose", "z.softmax(-1).transpose", "softmax was taken twice: cross_entropy begins "
         "with one"),
        ("F.cross_entropy", "F.nll_loss", "nll_loss takes logarithms of probabilities: "
         "cross_entropy takes the logits"),
        (ENTROPY, ENTROPY + " / math.log(2)", "this is in bits: take nats, the natural logarithm"),
        (ENTROPY, ENTROPY + ".exp()", "this is the perplexity: the loss is its logarithm"),
        ("(1, 2), t)", "(1, 2), t, label_smoothing=0.1)", "the labels are smoothed: the target's "
         "probability alone counts"),
        ("(1, 2), t)", "(1, 2), t, ignore_index=0)", "token 0 counts, and targets of -100 do not: "
         "ignore_index=-100"),
        ("(1, 2), t)", "(1, 2), t, reduction='sum')", "this is the sum over all tokens: take the "
         "mean")),
    "generate": edits(
        generate,
        ("seen[:, tokens.shape[1] :]", "seen", "generate returned the prompt, too: return the n "
         "new tokens"),
        ("seen[:, tokens.shape[1] :]", "x", "only the last token is returned: all n new ones are "
         "wanted"),
        ("x = tokens", "x = tokens[:, -1:]", "only the last token of the prompt is read: all of it "
         "goes through the layers first"),
        ("x = tokens", "self.hidden(tokens, caches)\n    x = tokens[:, -1:]", "the last token of "
         "the prompt goes through the layers twice: its logits are those of the whole prompt"),
        ("for _ in range(n):", "for _ in range(n):\n        caches = self.new_caches()", "the "
         "caches are empty at each step: make them once, before the first, and pass them to "
         "`hidden`"),
        ("[ms.KeyCache() for _ in self.layers]", "[ms.KeyCache()] * len(self.layers)", "the layers "
         "share one cache: each has keys of its own"),
        ("seen = torch.cat((seen, x), 1)", "seen = x = torch.cat((seen, x), 1)", READ_AGAIN),
        ("seen = torch.cat((seen, x), 1)", "seen = x = torch.cat((seen, x), 1)",
         "self.hidden(x, caches)", "self.hidden(x)", READ_AGAIN),
        ("[:, -1]", "[:, 0]", "the next token follows from the logits of the last position, "
         "z[:, -1]"),
        ("z.argmax", "z.argmin", "this is the token with the smallest logit: take the largest")),
}


# {exercise: what to check where no mistake is known}
HINTS = {
    "project": "Number [b, h, t, d] is the product of x[b, t] and W[:, h, d]",
    "gate": "By hand: g = 0 gives 0, and g = 1 gives tanh(0.731) = 0.624",
    "screening": "Print each step: q, k, v of unit length, MiPE, screen, TanhNorm",
    "forward": "The result is x plus all updates, with u * g_hat before W_O e^s_O",
    "embed": "Each result has the length e^s_E: print its norm",
    "logits": "For x = row t of W_E at unit length, logit t is e^s_F",
    "loss": "The mean of -log p(target) over the targets that are not -100, in nats",
    "generate": "Compare with the argmax of model(all tokens so far)[:, -1]"}


# ------------------------------------------------------------------------------------ the tests

RIGHT = {"cache": ms.KeyCache, "initialize": ms.Multiscreen} | {
    f.__name__: f for f in (project, gate, screening, forward, embed, logits, loss, generate)}


def check(name, *cases):
    given = grade.before("KeyCache" if name in ("cache", "initialize") else name)
    grade.Exercise("part2_model", name, RIGHT[name], MISTAKES.get(name, ()), HINTS.get(name, ""),
                   given, gradients=name != "cache").grade(*cases)


def draw_inputs(*shape):
    """Similar positions, with a part in common; otherwise every key would be rejected."""
    g = random(0)
    return torch.randn(shape[-1], generator=g) + 0.5 * torch.randn(*shape, generator=g)


def some_tokens(*shape):
    return torch.randint(SIZES["vocab_size"], shape, generator=random(0))


def test_project():
    x, W = draw_inputs(2, 5, 24), draw_inputs(24, 3, 7)
    check("project", case(x, W), case(draw_inputs(4, 3, 24), draw_inputs(24, 4, 2)))


def test_gate():
    check("gate", case(draw_inputs(2, 5, 24)))


def test_screening():
    check("screening",
          case(draw_inputs(2, 9, 24), [], 1, tolerance=1e-4),
          case(draw_inputs(2, 9, 24), [], 2, tolerance=1e-4, hint="the argument `screen` is "
               "ignored: the caller chooses what screens"),
          case(draw_inputs(2, 12, 24), [5, 1, 1, 4, 1], 1, tolerance=1e-4, hint="with a cache: the "
               "queries start at cache.end as it is before append, and i0 is the number of keys "
               "that append returns before the first query's own"))


def test_forward():
    check("forward",
          case(draw_inputs(2, 9, 24), [], tolerance=1e-4),
          case(draw_inputs(2, 9, 24), [5, 4], tolerance=1e-4, hint="only with a cache is the "
               "result wrong: pass it on to `screening`"))


def test_cache():
    k, v, _ = correlated(0, 1, 2, 25, 25)
    check("cache", *[case(k, v, torch.tensor(w).double(), hint=f"append is called with 20, 4 and 1 "
          f"new tokens, for windows of {w}: it must return all keys that a new query may see, the "
          "oldest first, and all their values. Afterwards cache.end must be 20, 24 and 25")
          for w in ([2.0, 5.0], [2.0, 5.5], [2.0, math.inf])])


def test_initialize():
    matrices = {"W_Q": (0.1 / 4, "0.1/sqrt(d_K)"), "W_K": (0.1 / 4, "0.1/sqrt(d_K)"),
                "W_V": (0.1 / 8, "0.1/sqrt(d_V)"), "W_G": (0.1, "0.1"),
                "W_O": (0.1 / 9, "0.1/sqrt(d_E)"), "W_E": (0.1 / 9, "0.1/sqrt(d_E)")}
    scales = {"s_w": "itself, and not w, is evenly spaced over the tiles of a layer, from 0 in the "
                     "first to log w_th in the last",
              "s_r": "is 0", "s_O": "is log(1/sqrt(N_H N_L)) in all tiles of all layers",
              "s_E": "is 0", "s_F": "is log sqrt(d_E)"}
    check("initialize",
          *[case(name, tolerance=0.03 * x, hint=f"{name} is drawn from N(0, {text}), the normal "
                 f"distribution, where {text} is the standard deviation. It is also sqrt(pi/2) "
                 "times the mean of the absolute values")
            for name, (x, text) in matrices.items()],
          *[case(name, hint=f"{name} {text}") for name, text in scales.items()])


def test_embed():
    check("embed", case(some_tokens(2, 5)))


def test_logits():
    check("logits", case(draw_inputs(2, 5, 24), tolerance=1e-4),
          case(-draw_inputs(2, 5, 24), tolerance=1e-4, hint="logits may be negative"))


def test_loss():
    t = some_tokens(3, 9)
    inputs, targets = t[:, :-1], t[:, 1:].clone()
    some = targets.clone()
    some[0, 3:] = -100
    check("loss", case(inputs, targets),
          case(inputs, some, hint="some targets are -100: leave them out of the sum, and of the "
               "number that it is divided by"))


def test_generate():
    check("generate", case(some_tokens(2, 6), 7))


# ------------------------------------------------------------------------- the whole model

def whole(name, model, *inputs, **options):
    """The exercise of your whole model, and a case of it with this model's weights."""
    exercise = grade.Exercise("part2_model", name, ms.Multiscreen, given=grade.before("KeyCache"),
                              gradients=False)
    return exercise, case(dataclasses.asdict(model.config), dict(model.state_dict()), *inputs,
                          **options)


def test_model():
    """With the weights of the repository's model for retrieval."""
    saved = torch.load(TRAINED, weights_only=True)
    theirs = ms.Multiscreen(ms.Config(**saved["config"]))
    theirs.load_state_dict(saved["weights"])
    tokens = torch.randint(256, (1, 200), generator=random(2))
    exercise, logits = whole("the whole model", theirs, tokens, 7, tolerance=1e-3, hint="with "
                             "trained weights: do 2.1 to 2.7 pass, and for the new tokens 2.9 and "
                             "2.10?")
    exercise.grade(logits)


def test_training():
    """pytest -s shows the losses of both models while they train."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        theirs = ms.Multiscreen(ms.Config(vocab_size=30, N_L=1, N_H=2, d_E=16, d_V=16))
    text = torch.randint(30, (60,), generator=random(1)).repeat(20)      # a text to memorize
    exercise, three = whole("training", theirs, text, 3, tolerance=1e-3, hint="after three steps: "
                            "do 2.1 to 2.8 pass? If a gradient is wrong, is its parameter "
                            "detached, or what is made of it?")
    exercise.grade(three)
    exercise, hundred = whole("training", theirs, text, 100)
    found = exercise.yours([hundred])[0]["the losses"]
    right = exercise.results(exercise.right, hundred)["the losses"]
    print("\n step   yours  theirs")
    for step in (0, 1, 2, 4, *range(9, 100, 10)):
        print(f"{step + 1:5d}  {found[step]:6.4f}  {right[step]:6.4f}")
    if not found[-1] < 0.7 * found[0]:
        grade.fail(f"after 100 steps the loss is {found[-1]:.2f}, having begun at {found[0]:.2f}: "
                   "the model hardly learns")
