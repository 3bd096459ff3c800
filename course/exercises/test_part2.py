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
from course.exercises.grade import Case, correlated, random
from course.exercises.mistakes import edits
from multiscreen import unit

EQUATIONS = grade.without("GatedScreeningTiles", "Multiscreen", "KeyCache")


# --- plain forms of what multiscreen.py writes for speed, of which mistakes are edits, too

def logits(self, x):
    W = unit(self.W_E)
    return self.s_F.exp() * x @ W.T


def loss(self, tokens, targets):
    z = self(tokens)
    return F.cross_entropy(z.transpose(1, 2), targets)


def generate(self, tokens, n):
    caches = [ms.KeyCache() for _ in self.layers]
    seen = tokens
    x = tokens
    for _ in range(n):
        z = self.logits(self.hidden(x, caches))[:, -1]
        x = z.argmax(-1, keepdim=True)
        seen = torch.cat((seen, x), 1)
    return seen[:, tokens.shape[1] :]


# ---------------------------------------------------------------------------- the mistakes

# The functions that people apply where the paper has none, and their names.
FUNCTIONS = {"layer_norm": "LayerNorm", "rms": "RMSNorm", "unit": "unit length",
             "tanh_norm": "TanhNorm", "torch.tanh": "tanh", "F.silu": "SiLU", "softmax": "softmax"}


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
            (scale, f"(1 + self.{name})", f"{says}1 + {name}")]


# What the edits below replace.
PRODUCT = 'product("bte,ehd->bhtd", x, W, self.dtype)'
W_R = "w, r = self.w, self.r"
QK = "unit(torch.cat((q, k)))"
V = "unit(self.project(x, self.W_V))"
TURNED = f"self.encode({QK}, i, w).chunk(2)"
APPEND = "k_tilde, v_bar = cache.append(k_tilde, v_bar, reach)"
I0 = "i0 = k_tilde.shape[2] - x.shape[1]"
H = "screen(q_tilde, k_tilde, v_bar, w, r, i0)"
U = "self.bound(h.to(x.dtype))"
G = "self.project(x, self.W_G)"
GATE = f"torch.tanh(F.silu({G}))"
SCREENED = "self.screening(x, screen, cache)"
Y = f"{SCREENED} * self.gate(x)"
UPDATES = 'product("bhtv,hve->bte", y, W_O, self.dtype)'
END, JOINED = "self.end += k.shape[2]", "torch.cat((self.k, k), 2), torch.cat((self.v, v), 2)"
ROW = "F.embedding(tokens, self.W_E)"
E_BAR = f"self.s_E.exp() * unit({ROW})"
LOGITS = "return self.s_F.exp() * x @ W.T"
PAIRS = "z.transpose(1, 2), targets"
ENTROPY = f"F.cross_entropy({PAIRS})"

READS = "the layer reads x as it is"
COLUMNS = "the columns of W_E have unit length here: a row is a token, so dim=-1"
READ_AGAIN = ("all tokens go through the layers again at each step: pass on only the new one, as "
              "the caches hold the others")
MOVES = "append must move cache.end on, by the number of new tokens, k.shape[2]"
IGNORED = ("the cache is ignored: give it the new keys and values, and screen all that it returns")
PROBABILITIES = "the softmax belongs to the loss: return the logits"


def keeps(first, says):
    """A mistake: a cache that returns keys from `first` on, which may use the number of new ones.

    widest: of the windows, and at most 10^9.
    """
    return ("return k, v", f"widest = min(w.max(), 1e9)\n        first = max({first}, 0)\n"
            "        return k[:, :, first:], v[:, :, first:]",
            END, f"new = k.shape[2]\n        {END}", says)


# {exercise: [(wrong code, what to say to those who have its results)]}
MISTAKES = {
    "project": edits(
        ms.GatedScreeningTiles.project,
        *with_functions(PRODUCT, "x", "x stays as it is"),
        *with_functions(PRODUCT, PRODUCT, "`project` is only the product"),
        (PRODUCT, "(x @ W.flatten(1)).view(len(x), W.shape[1], x.shape[1], W.shape[2])", "tiles "
         "and positions are mixed up: the product is (B, T, H, D). Transpose it, as a view only "
         "renames the axes"),
        (PRODUCT, "x @ W", "W has three axes, (E, H, D): flatten the last two, or use "
         "torch.einsum"),
        (PRODUCT, PRODUCT + " / W.shape[-1] ** 0.5", "divided by the root of d_K, as in "
         "attention: `project` is only the product")),
    "gate": edits(
        ms.GatedScreeningTiles.gate,
        *with_functions(G, "x", READS),
        *with_functions(G, G, "g is the product as it is, and SiLU and tanh come after it",
                        "tanh_norm"),
        *[(GATE, wrong, f"{what}: the gate is tanh(SiLU(g))") for wrong, what in (
            (f"F.silu({G})", "the gate is not bounded, tanh is missing"),
            (G, "g is not yet the gate"),
            (f"torch.tanh({G})", "SiLU is missing"),
            (f"F.silu(torch.tanh({G}))", "tanh and SiLU are in the wrong order"),
            (f"torch.tanh(torch.sigmoid({G}))", "SiLU(g) is g sigmoid(g), not sigmoid(g)"),
            (f"torch.sigmoid({G})", "this is a sigmoid"),
            (f"tanh_norm(F.silu({G}))", "TanhNorm stands for tanh of each number"))],
        *[(GATE, f"torch.tanh(F.{f}({G}))", f"{f} stands for SiLU: the gate is tanh(SiLU(g))")
          for f in ("relu", "gelu", "softplus")],
        *[(GATE, f"F.{f}({G})", f"this is {f} alone: the gate is tanh(SiLU(g))")
          for f in ("relu", "gelu")],
        ("self.W_G", "self.W_V", "W_V is for the values: take W_G")),
    "screening": edits(
        ms.GatedScreeningTiles.screening,
        *with_functions(H, H, "TanhNorm takes h as it is", "rms"),
        *[(U, wrong, f"{what}: Eq. 14 is TanhNorm of h") for wrong, what in (
            ("h", "the output is not bounded"),
            ("unit(h)", "the output always has length 1, but short vectors stay as they are"),
            ("torch.tanh(h)", "tanh of each number changes the direction"),
            ("layer_norm(h)", "this is LayerNorm"),
            ("rms(h)", "this is RMSNorm"))],
        *[(QK, QK.replace("unit", f), V, V.replace("unit", f),
           f"{what}: Eq. 5 divides q, k and v by their length") for f, what in (
               ("", "nothing is of unit length"),
               ("layer_norm", "this is LayerNorm"),
               ("rms", "this is RMSNorm, as in QK-norm"),
               ("tanh_norm", "this is TanhNorm"))],
        *[(right, wrong, f"{what} are not of unit length: Eq. 5 is for q, k and v")
          for right, wrong, what in (
              (QK, "torch.cat((q, k))", "queries and keys"),
              (V, "self.project(x, self.W_V)", "the values"))],
        (W_R, f"x = layer_norm(x); {W_R}", f"{READS}: there is no LayerNorm"),
        ("x, screen, cache", "x, _, cache", "the argument `screen` is ignored: the caller chooses "
         "what screens"),
        (H, "screen(k_tilde, q_tilde, v_bar, w, r, i0)", "queries and keys are swapped: screen(q, "
         "k, v, ..)"),
        (H, "screen(q_tilde, k_tilde, v_bar, r, w, i0)", "w and r are swapped: screen(q, k, v, w, "
         "r, i0)"),
        *[(W_R, f"w, r = {wrong}", says) for wrong, says in (
            ("self.s_w, self.s_r", "s_w and s_r are not yet w and r: apply `window` and "
             "`acceptance`"),
            ("self.s_w, self.r", "s_w is not yet w: apply `window`"),
            ("self.w, self.s_r", "s_r is not yet r: apply `acceptance`"),
            ("self.w, self.s_r.exp() + 1", "r = exp(s) + 1 is from an older version of the paper: "
             "apply `acceptance`"))],
        (QK, "unit(torch.cat((q, k))) / q.shape[-1] ** 0.25", "divided by the root of d_K, as in "
         "attention: q and k have unit length, so q . k is their cosine already"),
        (TURNED, f"{QK}.chunk(2)", "queries and keys have no positions: MiPE is missing"),
        (V, f"self.encode({V}, i, w)", "the values turn, too: MiPE is for q and k only"),
        (APPEND, "cache.append(k_tilde, v_bar, reach)", I0, "", IGNORED),
        ("if cache is not None", "if False", IGNORED),
        ("start = 0 if cache is None else cache.end", "start = 0", "MiPE counts from 0 in each "
         "call: positions continue at cache.end"),
        (I0, "i0 = 0", "i0 is not passed to screen: the queries begin after the keys in the cache"),
        (I0, "i0 = k_tilde.shape[2]", "i0 is the number of keys before the first query's own: the "
         "new keys are not among them"),
        (I0, "i0 = start", "the cache may drop old keys: i0 counts from the first key that append "
         "returns")),
    "forward": edits(
        ms.GatedScreeningTiles.forward,
        *with_scales("s_O"),
        ("self.s_O.exp()[:, None, None] * ", "", "the scale e^s_O is missing"),
        *with_functions(Y, Y, "multiply u by g_hat, and nothing else"),
        *with_functions(UPDATES, UPDATES, "the updates are added as they are"),
        *with_functions(f"x + {UPDATES}", f"x + {UPDATES}", "the sum is the layer's output",
                        "tanh_norm"),
        *with_functions("return x", "x", "the residual is x as it is"),
        *[(SCREENED, SCREENED.replace("x", f"{f}(x)", 1), "self.gate(x)", f"self.gate({f}(x))",
           f"{READS}: there is no {name}") for f, name in (
               ("layer_norm", "LayerNorm"), ("rms", "RMSNorm"), ("unit", "unit length"))],
        *[("y = ", f"x = {f}(x); y = ", f"{READS}, and the residual is x: there is no {name}")
          for f, name in (("layer_norm", "LayerNorm"), ("rms", "RMSNorm"))],
        ("return x + ", "return ", "the residual is missing: Eq. 2 adds the updates to x"),
        ("return x + ", "return x - ", "the sign: Eq. 2 adds the updates to x"),
        (UPDATES, f"{UPDATES} / len(W_O)", "the tiles are averaged: Eq. 2 adds them"),
        (UPDATES, "y.reshape(*x.shape[:2], -1) @ W_O.flatten(0, 1)", "tiles and positions are "
         "mixed up: y is (B, H, T, V), so transpose(1, 2) before the tiles are flattened"),
        (Y, SCREENED, "the gate is ignored: u times g_hat"),
        (Y, f"{SCREENED} * (1 + self.gate(x))", "u is multiplied by g_hat itself, not by 1 + "
         "g_hat")),
    "cache": edits(
        ms.KeyCache,
        keeps("k.shape[2] - new", "append returned only the new keys: return all that are kept"),
        keeps("self.end - new - int(widest) + 1", "w is rounded down: a query sees ceil(w) keys, "
              "its own included"),
        keeps("self.end - math.ceil(widest)", "these are the keys that the last of the new tokens "
              "sees: the first of them sees further back"),
        ("return k, v", "", "append must return all keys and all values"),
        ("return k, v", "return k", "append must return all keys and all values"),
        ("return k, v", "return v, k", "append returns the keys, and then the values"),
        (END, "self.end = 0", MOVES),
        (END, "self.end += 1", MOVES),
        (END, "self.end = k.shape[2]", "cache.end is the number of the last new tokens: add it to "
         "what it was"),
        (JOINED, "torch.cat((k, self.k), 2), torch.cat((v, self.v), 2)", "the oldest key comes "
         "first"),
        (JOINED, JOINED.replace("2", "1"), "keys (B, H, T, K) are joined along the axis of their "
         "positions, torch.cat(.., 2)")),
    "embed": edits(
        ms.Multiscreen.embed,
        *with_scales("s_E"),
        *[(E_BAR, E_BAR.replace("unit", f), f"{what}: e_bar is the row divided by its length")
          for f, what in (("", "there is no unit length"), ("layer_norm", "this is LayerNorm"),
                          ("rms", "this is RMSNorm"), ("tanh_norm", "this is TanhNorm"))],
        (E_BAR, ROW, "this is the row of W_E as it is: it needs unit length and the scale e^s_E"),
        (E_BAR, f"unit({ROW})", "the scale e^s_E is missing: it comes after unit length, which "
         "would take it away"),
        (E_BAR, f"self.config.d_E ** 0.5 * {ROW}", "this is the Transformer's embedding: here the "
         "scale is e^s_E, and the row has unit length"),
        (E_BAR, f"self.config.d_E ** 0.5 * {E_BAR}", "the root of d_E is not part of the scale: "
         "e^s_E alone"),
        (E_BAR, "self.s_E.exp() * F.normalize(self.W_E, dim=0)[tokens]", COLUMNS)),
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
        ("@ W.T", "@ W", "transpose W_E: its rows are the tokens")),
    "loss": edits(
        loss,
        (PAIRS, "z[:, :-1].transpose(1, 2), targets[:, 1:]", "the targets are shifted twice: they "
         "are the next tokens already"),
        (PAIRS, "z.transpose(1, 2), tokens", "the inputs were taken for the targets"),
        (PAIRS, "z, targets", "cross_entropy takes the classes as axis 1: flatten B and T, or "
         "transpose(1, 2)"),
        ("z.transpose", "z.softmax(-1).transpose", "softmax was taken twice: cross_entropy begins "
         "with one"),
        ("F.cross_entropy", "F.nll_loss", "nll_loss takes logarithms of probabilities: "
         "cross_entropy takes the logits"),
        (ENTROPY, ENTROPY + " / math.log(2)", "this is in bits: take nats, the natural logarithm"),
        (ENTROPY, ENTROPY + ".exp()", "this is the perplexity: the loss is its logarithm"),
        *[(PAIRS, f"{PAIRS}, {option}", says) for option, says in (
            ("label_smoothing=0.1", "the labels are smoothed: the target's probability alone "
             "counts"),
            ("ignore_index=0", "token 0 counts, and targets of -100 do not: ignore_index=-100"),
            ("reduction='sum'", "this is the sum over all tokens: take the mean"))]),
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
         "self.hidden(x, caches)", "self.hidden(x)", READ_AGAIN)),
}


# {exercise: what to check where no mistake is known}
HINTS = {
    "project": "Number [b, h, t, d] is the product of x[b, t] and W[:, h, d]",
    "gate": "By hand: g = 0 gives 0, and g = 2 gives tanh(1.762) = 0.943",
    "screening": "Print each step: q, k, v of unit length, MiPE, screen, TanhNorm",
    "forward": "The result is x plus all updates, with u * g_hat before W_O e^s_O",
    "embed": "Each result has the length e^s_E: print its norm",
    "logits": "For x = row t of W_E at unit length, logit t is e^s_F",
    "loss": "The mean of -log p(target) over the targets that are not -100, in nats",
    "generate": "Compare with the argmax of model(all tokens so far)[:, -1]"}


# ------------------------------------------------------------------------------------ the tests

# The methods of multiscreen.py that have a part of an exercise.
HELPERS = {"logits": "head", "loss": "nats", "generate": "stream"}


def check(name, *cases):
    """Compare with multiscreen.py's class or method of this name."""
    right, given, others = getattr(ms, drive.CLASSES[name]), EQUATIONS, ()
    if name in drive.METHODS:
        right, others = getattr(right, name), ["KeyCache"]
        given = grade.without(name, HELPERS.get(name))
    grade.Exercise("part2_model", name, right, MISTAKES.get(name, ()), HINTS.get(name, ""),
                   given, others, gradients=name in drive.METHODS).grade(*cases)


def draw_inputs(*shape):
    """Similar positions, with a part in common; otherwise every key would be rejected."""
    g = random(0)
    return torch.randn(shape[-1], generator=g) + 0.5 * torch.randn(*shape, generator=g)


def some_tokens(*shape):
    return torch.randint(40, shape, generator=random(0))


def test_project():
    x, W = draw_inputs(2, 5, 24), draw_inputs(24, 3, 7)
    check("project", Case(x, W), Case(draw_inputs(4, 3, 24), draw_inputs(24, 4, 2)))


def test_gate():
    check("gate", Case(draw_inputs(2, 5, 24)))


def test_screening():
    check("screening",
          Case(draw_inputs(2, 9, 24), [], tolerance=1e-4),
          Case(draw_inputs(2, 12, 24), [5, 1, 1, 4, 1], tolerance=1e-4, hint="with a cache: the "
               "queries start at cache.end as it is before append, and i0 is the number of keys "
               "that append returns before the first query's own"))


def test_forward():
    check("forward",
          Case(draw_inputs(2, 9, 24), [], tolerance=1e-4),
          Case(draw_inputs(2, 9, 24), [5, 4], tolerance=1e-4, hint="only with a cache is the "
               "result wrong: pass it on to `screening`"))


def test_cache():
    k, v, _ = correlated(0, 1, 2, 25, 25)
    check("cache", *[Case(k, v, torch.tensor(w).double(), hint=f"append is called with 20, 4 and 1 "
          f"new tokens, for windows of {w}: it must return all keys that a new query may see, the "
          "oldest first, and all their values. Afterwards cache.end must be 20, 24 and 25")
          for w in ([2.0, 5.0], [2.0, 5.5], [2.0, math.inf])])


def test_initialize():
    matrices = {"W_Q": 0.1 / 4, "W_K": 0.1 / 4, "W_V": 0.1 / 8, "W_G": 0.1, "W_O": 0.1 / 9,
                "W_E": 0.1 / 9}
    scales = dict.fromkeys(("s_w", "s_r", "s_O", "s_E", "s_F"), 1.0)
    check("initialize",
          Case(matrices, tolerance=0.03, hint="in N(0, x), the normal distribution, x is the "
               "standard deviation, and also sqrt(pi/2) times the mean of the absolute values. "
               "d_K = 16, d_V = 64 and d_E = 81. Each matrix of each layer, and of a model of "
               "another seed, has numbers of its own"),
          Case(scales, hint="s_w itself, and not w, is evenly spaced over the tiles of a layer, "
               "from 0 in the first to log w_th in the last. All other scales are alike in all "
               "tiles of all layers"))


def test_embed():
    check("embed", Case(some_tokens(2, 5)))


def test_logits():
    check("logits", Case(draw_inputs(2, 5, 24), tolerance=1e-4),
          Case(-draw_inputs(2, 5, 24), tolerance=1e-4, hint="logits may be negative"))


def test_loss():
    t = some_tokens(3, 9)
    inputs, targets = t[:, :-1], t[:, 1:].clone()
    some = targets.clone()
    some[0, 3:] = -100
    check("loss", Case(inputs, targets),
          Case(inputs, some, hint="some targets are -100: leave them out of the sum, and of the "
               "number that it is divided by"))


def test_generate():
    check("generate", Case(some_tokens(4, 6), 7))


# ------------------------------------------------------------------------- the whole model

def test_model():
    """With the weights of the repository's model for retrieval."""
    saved = torch.load(Path(ms.__file__).with_name("models") / "retrieval.pt", weights_only=True)
    check("the whole model", Case(
        saved["config"], saved["weights"], some_tokens(1, 200), 7, tolerance=1e-3, hint="with "
        "trained weights: do 2.1 to 2.7 pass, and for the new tokens 2.9 and 2.10?"))


def test_training():
    """pytest -s shows the losses of both models while they train."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = ms.Multiscreen(ms.Config(vocab_size=30, N_L=1, N_H=2, d_E=16, d_V=16))
    text = torch.randint(30, (60,), generator=random(1)).repeat(20)      # a text to memorize
    check("training", Case(
        dataclasses.asdict(model.config), dict(model.state_dict()), text, tolerance=1e-3, hint="in "
        "the first three steps: do 2.1 to 2.8 pass? If a gradient is wrong, is its parameter "
        "detached, or what is made of it?"))
