"""Part 2: hand-worked points first, then properties, then the model of multiscreen.py."""
import math

import torch
import torch.nn.functional as F

import multiscreen as ms
from exercises.adapters import mine
from exercises.checks import check, correlated, enliven, expect, random
from exercises.trained import blank, load_into, train_steps, trained_model

SIZES = {"vocab_size": 40, "N_L": 2, "N_H": 3, "d_E": 24, "w_th": 100.0}


def a_layer():
    """(your layer, the repository's) with the same parameters."""
    config = ms.Config(**SIZES)
    theirs = enliven(ms.GatedScreeningTiles(config))
    yours = mine.GatedScreeningTiles(config)
    load_into(yours, theirs)
    return yours, theirs


def a_model(**sizes):
    """(your model, the repository's) with the same parameters."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = ms.Config(**(SIZES | sizes))
        theirs, yours = ms.Multiscreen(config), blank(config)
    with torch.no_grad():
        theirs.W_E.add_(0.03 * torch.randn(config.d_E, generator=random(0)))      # tokens alike
        theirs.s_E.fill_(0.7)
        theirs.s_F.fill_(1.3)
    for n, layer in enumerate(theirs.layers):
        enliven(layer, n)
    load_into(yours, theirs)
    return yours, theirs


def draw_inputs(*shape):
    """Positions alike: a part of them in common, or all keys would be rejected."""
    g = random(0)
    return torch.randn(shape[-1], generator=g) + 0.5 * torch.randn(*shape, generator=g)


def some_tokens(*shape, seed=0):
    return torch.randint(SIZES["vocab_size"], shape, generator=random(seed))


def test_project():
    yours, _ = a_layer()
    x, W = torch.tensor([[[1.0, 2.0], [0.0, 3.0], [1.0, 0.0]]]), torch.tensor([[[1.0], [10.0]],
                                                                              [[0.1], [5.0]]])
    found = yours.project(x, W)
    check(found.shape != (1, 3, 2, 1), "the axes are (B, T, H, D): the tiles come before the "
          "positions, (B, H, T, D)")
    expect(found, [[[[1.2], [0.3], [1]], [[20], [15], [10]]]], "x W of two tiles and 3 positions",
           [([[[[1.2], [20], [0.3]], [[15], [1], [10]]]], "tiles and positions are mixed up: the "
             "product is (B, T, H, D). Transpose it, a reshape only renames the axes")])
    x, W = draw_inputs(2, 5, 24), draw_inputs(24, 3, 7)
    expect(yours.project(x, W), torch.einsum("bte,ehd->bhtd", x, W), "x W",
           [((x @ W.flatten(1)).unflatten(-1, (7, 3)).permute(0, 3, 1, 2), "tiles and dimensions "
             "are mixed up: unflatten(-1, (H, D)), in the order of W's axes")])


def test_gate():
    yours, theirs = a_layer()
    x = draw_inputs(2, 5, 24)
    g = theirs.project(x, theirs.W_G)
    expect(yours.gate(x), torch.tanh(g * torch.sigmoid(g)), "the gate",
           [(F.silu(g), "the gate is not bounded: tanh is missing"),
            (torch.tanh(g), "SiLU is missing: tanh(SiLU(g))"),
            (F.silu(torch.tanh(g)), "tanh and SiLU are in the wrong order: tanh(SiLU(g))"),
            (torch.sigmoid(g), "this is a sigmoid: the gate is tanh(SiLU(g))"),
            (torch.tanh(torch.sigmoid(g)), "SiLU(g) is g times sigmoid(g), not sigmoid(g)"),
            (theirs.gate(F.normalize(x, dim=-1)), "x must not be normalised before the projection"),
            (torch.tanh(F.gelu(g)), "this is GELU: the paper has SiLU"),
            (torch.tanh(F.relu(g)), "this is ReLU: the paper has SiLU"),
            (torch.tanh(F.silu(theirs.project(x, theirs.W_V))), "W_V is for the values: here W_G"),
            (torch.tanh(F.silu(ms.unit(g))), "g must not be of unit length: Eq. 5 is for q, k and "
             "v")])


def parts_of(layer, x, start=0):
    """q_bar, k_bar, v (not unit), the angle, w, r: what screening of x, from `start` on, has."""
    q, k, v = (layer.project(x, W) for W in (layer.W_Q, layer.W_K, layer.W_V))
    w, r = ms.window(layer.s_w), ms.acceptance(layer.s_r)
    angle = ms.mipe_angle(start + torch.arange(x.shape[1]), w, layer.config.w_th)
    return ms.unit(q), ms.unit(k), v, angle, w, r


def test_screening():
    yours, theirs = a_layer()
    x = draw_inputs(2, 9, 24)
    q, k, v, angle, w, r = parts_of(theirs, x)
    q_tilde, k_tilde, v_bar = ms.mipe(q, angle), ms.mipe(k, angle), ms.unit(v)
    h = ms.screen(q_tilde, k_tilde, v_bar, w, r)
    q_long, k_long = theirs.project(x, theirs.W_Q), theirs.project(x, theirs.W_K)
    of_256 = ms.mipe_angle(torch.arange(9), w, 256.0)
    found = yours.screening(x, ms.screen)
    expect(found, ms.tanh_norm(h), "u",
           [(h, "the output is not bounded: Eq. 14, TanhNorm, is missing"),
            (ms.tanh_norm(ms.screen(q_tilde, k_tilde, v, w, r)),
             "the values are not of unit length: Eq. 5 is for q, k and v"),
            (ms.tanh_norm(ms.screen(ms.mipe(q_long, angle), k_tilde, v_bar, w, r)),
             "the queries are not of unit length: Eq. 5 is for q, k and v"),
            (ms.tanh_norm(ms.screen(q_tilde, ms.mipe(k_long, angle), v_bar, w, r)),
             "the keys are not of unit length: Eq. 5 is for q, k and v"),
            (ms.tanh_norm(ms.screen(ms.mipe(q, of_256), ms.mipe(k, of_256), v_bar, w, r)),
             "w_th is self.w_th, here 100, not 256"),
            (torch.tanh(h), "tanh of each number changes the direction: TanhNorm scales the "
             "whole vector"),
            (ms.unit(h), "u has length 1 whatever h is: TanhNorm's length is tanh |h|"),
            (ms.tanh_norm(ms.screen(q_tilde, k_tilde, v_bar, w, theirs.s_r)),
             "s_r is not yet r: `acceptance` comes between"),
            (ms.tanh_norm(ms.screen(q_tilde, k_tilde, v_bar, r, w)), "w and r were swapped"),
            (ms.tanh_norm(ms.screen(q, k, v_bar, w, r)),
             "queries and keys have no positions: MiPE is missing"),
            (ms.tanh_norm(ms.screen(q_tilde, k, v_bar, w, r)),
             "only the queries have positions: MiPE is for keys too"),
            (ms.tanh_norm(ms.screen(q_tilde, k_tilde, ms.mipe(v_bar, angle), w, r)),
             "MiPE turned the values: it is for queries and keys only"),
            (ms.tanh_norm(ms.screen(k_tilde, q_tilde, v_bar, w, r)),
             "queries and keys were swapped")], tolerance=1e-4)


def test_forward():
    yours, theirs = a_layer()
    x = draw_inputs(2, 9, 24)
    y = theirs.screening(x, ms.screen) * theirs.gate(x)
    updates = torch.einsum("bhtv,hve->bthe", y, theirs.W_O)
    scale = theirs.s_O.exp()[:, None]
    right = x + (updates * scale).sum(2)
    expect(yours(x, ms.screen), right, "x^(1)",
           [(right - x, "the residual is missing: Eq. 2 adds the updates to x"),
            (x + updates.sum(2), "the scale e^s_O is missing"),
            (x + (updates * theirs.s_O[:, None]).sum(2), "the scale is e^s_O, not s_O"),
            (x + (updates * scale).mean(2), "the tiles are averaged: Eq. 2 adds them"),
            (x + torch.einsum("bhtv,hve->bte", theirs.screening(x, ms.screen), scale[..., None]
                              * theirs.W_O), "the gate does not act: u times g_hat")],
           tolerance=1e-4)


def test_initialize():
    sizes = {"vocab_size": 1000, "N_L": 3, "N_H": 5, "d_E": 100, "w_th": 100.0}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = mine.Multiscreen(ms.Config(**sizes))
    named = list(model.named_parameters())

    def std(name):
        return torch.cat([p.detach().flatten() for n, p in named if n.endswith(name)]).std()

    dimension = ("divided by the root of the wrong dimension: take the output's, the second in the "
                 "paper's shape")
    rows = {"W_Q": 0.1 / 4, "W_K": 0.1 / 4, "W_V": 0.1 / 8, "W_G": 0.1, "W_O": 0.01, "W_E": 0.01}
    for name, right in rows.items():
        causes = [(math.sqrt(right), "N(0, x) in the table is the deviation x, not the variance"),
                  (10 * right, "the scale 0.1 is missing")]
        causes += [(0.1 / n**0.5, dimension) for n in (16, 64, 100, 1000)]
        causes += [(0.1 / n, "divided by the dimension: by its root") for n in (16, 64, 100, 1000)]
        if name == "W_G":
            causes = [(0.1 / 8, "W_G has the fixed scale 0.1, whatever its dimensions"), *causes]
        check(1e-4 < std(name) < 10, f"{name} has no initial values: torch.empty "
              "leaves what was in memory")
        expect(std(name), right, f"the standard deviation of {name}", causes,
               tolerance=0.05 * right)
    for layer in model.layers:
        s_w = torch.linspace(0, math.log(100), 5)
        expect(layer.s_w, s_w, "s_w of a layer",
               [(torch.zeros(5), "s_w is spread over the tiles of a layer, not 0 for all"),
                (torch.linspace(0, 100, 5), "s_w goes up to log w_th, not w_th"),
                (torch.linspace(0, math.log(256), 5), "w_th is config.w_th, here 100, not 256"),
                (torch.linspace(0, math.log(99), 5), "s_w goes up to log w_th: w is 1 more then"),
                (0.8 * s_w, "the last tile has s_w = log w_th: N_H values are N_H - 1 steps"),
                (s_w.flip(0), "the first tile has the narrowest window"),
                (torch.linspace(1, 100, 5).log(), "s_w itself is evenly spaced, not the window")])
        expect(layer.s_r, torch.zeros(5), "s_r", [(0.5 * torch.ones(5), "r is 1/2: s_r is 0")])
        expect(layer.s_O, -math.log(15) / 2 * torch.ones(5), "s_O",
               [(-math.log(15) * torch.ones(5), "the root is missing: log(1 / sqrt(N_H N_L))"),
                (-math.log(5) / 2 * torch.ones(5), "N_L is missing: all tiles of all layers count"),
                (15**-0.5 * torch.ones(5), "the log is missing: log(1 / sqrt(N_H N_L))")])
    expect(model.s_E, [0], "s_E", [([1], "the scale e^s_E starts at 1: s_E at 0")])
    expect(model.s_F, [math.log(10)], "s_F",
           [([10], "the log is missing: log sqrt(d_E)"), ([math.log(100)], "the root is missing"),
            ([0], "s_F starts at log sqrt(d_E): with 0 the logits are too small to learn from")])


def test_embed():
    yours, theirs = a_model()
    t = some_tokens(2, 5)
    rows = theirs.W_E[t]
    expect(yours.embed(t), theirs.embed(t), "x^(0)",
           [(rows, "the row of W_E as it is: it needs unit length and the scale e^s_E"),
            (theirs.s_E.exp() * rows, "the embedding is not of unit length"),
            (F.normalize(rows, dim=-1), "the scale e^s_E is missing"),
            (theirs.s_E * F.normalize(rows, dim=-1), "the scale is e^s_E, not s_E"),
            (theirs.s_F.exp() * F.normalize(rows, dim=-1), "s_F is for the logits: here s_E")])


def test_logits():
    yours, theirs = a_model()
    x = draw_inputs(2, 5, 24)
    E_bar = F.normalize(theirs.W_E, dim=-1)
    expect(yours.logits(x), theirs.logits(x), "the logits",
           [(theirs.s_F.exp() * x @ theirs.W_E.T, "the rows of W_E are not of unit length here"),
            (x @ E_bar.T, "the scale e^s_F is missing"),
            (theirs.s_F * x @ E_bar.T, "the scale is e^s_F, not s_F"),
            (theirs.logits(x).softmax(-1), "these are probabilities: the softmax belongs to the "
             "loss"),
            (theirs.logits(x).log_softmax(-1), "these are log-probabilities: the softmax belongs "
             "to the loss"),
            (theirs.s_E.exp() * x @ E_bar.T, "s_E is for the embedding: here s_F"),
            (theirs.logits(F.normalize(x, dim=-1)), "x must not be normalised: no norm before the "
             "head")], tolerance=1e-4)


def test_loss():
    yours, theirs = a_model()
    t = some_tokens(3, 9)
    inputs, targets = t[:, :-1], t[:, 1:].clone()
    z = theirs(inputs)
    nats = F.cross_entropy(z.transpose(1, 2), targets, reduction="none")
    expect(yours.loss(inputs, targets), nats.mean(), "the loss",
           [(F.cross_entropy(z[:, :-1].transpose(1, 2), targets[:, 1:]),
             "the targets are shifted twice: they are the next tokens already"),
            (F.cross_entropy(z.transpose(1, 2), inputs), "the inputs were taken for the targets"),
            (nats.mean() / math.log(2), "these are bits: divide by nothing, nats are asked for"),
            (F.cross_entropy(z.softmax(-1).transpose(1, 2), targets), "softmax was taken twice: "
             "cross_entropy begins with one"),
            (nats.sum(), "the sum over all tokens: the mean is asked for"),
            (nats.sum(1).mean(), "the mean over sequences only: it is over tokens")])
    targets[0, 3:] = -100
    seen = targets != -100
    expect(yours.loss(inputs, targets), nats[seen].mean(), "the loss with targets of -100",
           [((nats * seen).sum(1).div(seen.sum(1)).mean(), "the mean of each sequence's mean: it "
             "is over all tokens that count"),
            ((nats * seen).mean(), "targets of -100 count in the denominator"),
            (nats.mean(), "targets of -100 count")])


class TightCache:
    """Returns no key that every window has passed: `first` moves on."""

    def __init__(self):
        self.whole, self.end = ms.KeyCache(), 0

    def append(self, k, v, w):
        reach = math.ceil(min(w.max().item(), 2**30)) - 1
        first = max(self.end - reach, 0)
        k, v, _ = self.whole.append(k, v, w)
        self.end = self.whole.end
        return k[:, :, first:], v[:, :, first:], first


def check_append():
    """What append returns, and where the positions are."""
    k, v, _ = correlated(0, 1, 2, 24, 24)
    w, cache = torch.tensor([3.0, 4.5]).double(), mine.KeyCache()
    kept, _, first = cache.append(k[:, :, :20], v[:, :, :20], w)
    check(cache.end == 20, f"after 20 tokens cache.end is {cache.end}: append moves it on")
    kept, values, first = cache.append(k[:, :, 20:], v[:, :, 20:], w)
    check(cache.end == 24, f"after 20 and 4 tokens cache.end is {cache.end}: append adds the "
          "number of new tokens")
    check(kept.shape[2] > 4, "append returned only the new keys: return all that are kept")
    check(kept.shape[2] == values.shape[2] == 24 - first, f"of positions 0 to 23 append returned "
          f"{kept.shape[2]} keys, the first at {first}: it must be the oldest key's position")
    check(torch.equal(kept, k[:, :, first:]) and torch.equal(values, v[:, :, first:]),
          "the cache must return the keys from position `first` to the newest, oldest first")
    check(first <= 16, f"the first of the new tokens, at 20, sees key 16 with w = 4.5: the cache "
          f"kept those from {first} on")


@torch.no_grad()
def test_cache():
    check_append()
    yours, theirs = a_layer()
    x = draw_inputs(2, 12, 24)
    pieces = torch.split(x, [5, 1, 1, 4, 1], 1)

    def wrong(from_0=False, i0=lambda start, first, end: start - first):
        """x^(1) with positions of MiPE from 0 in each piece, or with another i0."""
        cache, out = TightCache(), []
        W_O = theirs.s_O.exp()[:, None, None] * theirs.W_O
        for piece in pieces:
            start = cache.end
            q, k, v, angle, w, r = parts_of(theirs, piece, 0 if from_0 else start)
            k, v, first = cache.append(ms.mipe(k, angle), ms.unit(v), w)
            h = ms.screen(ms.mipe(q, angle), k, v, w, r, i0(start, first, cache.end))
            y = ms.tanh_norm(h) * theirs.gate(piece)
            out.append(piece + torch.einsum("bhtv,hve->bte", y, W_O))
        return torch.cat(out, 1)

    # The repository's tile lets a cache drop keys only if what screens says so.
    def screen(*inputs):
        return ms.screen(*inputs)

    screen.keeps_to_window = True
    for s_w, cache in ((theirs.s_w.tolist(), mine.KeyCache()), ([1.0, 0.0, 1.2], TightCache()),
                       ([1.0, 0.0, 1.2], mine.KeyCache())):
        theirs.s_w.copy_(torch.tensor(s_w))
        load_into(yours, theirs)
        found = torch.cat([yours(piece, screen, cache) for piece in pieces], 1)
        expect(found, theirs(x, ms.screen),
               "x^(1), computed in pieces of 5, 1, 1, 4, 1 positions,",
               [(torch.cat([theirs(piece, ms.screen) for piece in pieces], 1),
                 "the cache does not act: each piece sees itself only"),
                (wrong(from_0=True), "MiPE counts from 0 in each piece: positions go on at "
                 "cache.end"),
                (wrong(i0=lambda start, first, end: 0), "i0 is not handed to screen: the queries "
                 "begin after the keys in the cache"),
                (wrong(i0=lambda start, first, end: end - first), "cache.end was read after "
                 "append: the queries begin where it was before"),
                (wrong(i0=lambda start, first, end: start), "the cache dropped old keys: i0 counts "
                 "from the first key that append returns")], tolerance=1e-4)


def greedy(model, tokens, n, caches=None):
    """The n next tokens, each of the last one alone once there are caches. caches: of each step."""
    for m in range(n):
        x = tokens[:, -1:] if caches and m else tokens
        z = model(x, caches and caches(m))
        tokens = torch.cat((tokens, z[:, -1].argmax(-1, keepdim=True)), 1)
    return tokens


def test_generate():
    yours, theirs = a_model()
    with torch.no_grad():
        for layer in theirs.layers:
            layer.s_O.add_(3)                          # or the last token alone says what follows
    load_into(yours, theirs)
    t, lengths = some_tokens(2, 6), []
    right, one = greedy(theirs, t, 7), ms.KeyCache()
    fresh = greedy(theirs, t, 7, lambda m: [ms.KeyCache() for _ in theirs.layers])
    shared = greedy(theirs, t, 7, lambda m: [one] * len(theirs.layers))

    def count(q, *inputs):
        lengths.append(q.shape[2])
        return ms.screen(q, *inputs)

    yours.screen = count
    found = yours.generate(t, 7)
    check(found.shape != right.shape, "generate returned the prompt too: return the n new tokens")
    expect(found, right[:, 6:], "the 7 tokens after the prompt",
           [(right[:, 5:12], "the last token of the prompt came first: return the new ones only"),
            (fresh[:, 6:], "the caches are empty at each step: make them once, before the first"),
            (shared[:, 6:], "the layers share one cache: each has keys of its own")])
    check(max(lengths[len(yours.layers) :]) == 1, "all tokens go through the layers again at each "
          "step: hand on only the new one, the caches know the others")


def test_model():
    yours, theirs = a_model()
    t = some_tokens(2, 30)
    expect(yours(t), theirs(t), "logits of the whole model", tolerance=1e-4)
    for j in (7, 29):
        changed = t.clone()
        changed[:, j] = (changed[:, j] + 1) % SIZES["vocab_size"]
        check(torch.equal(yours(changed)[:, :j], yours(t)[:, :j]),
              f"token {j} changed, and a logit before it too: the model sees the future")
    theirs, tokens = trained_model()
    yours = blank(theirs.config)
    load_into(yours, theirs)
    theirs.screen = ms.screen
    with torch.no_grad():
        expect(yours(tokens), theirs(tokens), "logits of the trained model", tolerance=1e-3)


def test_training():
    sizes = {"vocab_size": 30, "N_L": 1, "N_H": 2, "d_E": 16, "d_V": 16}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = ms.Config(**sizes)
        theirs, yours = ms.Multiscreen(config), blank(config)
    load_into(yours, theirs)
    text = torch.randint(30, (60,), generator=random(1)).repeat(20)      # to be learned by heart
    theirs.screen = ms.screen
    yours.loss(text[None, :59], text[None, 1:60]).backward()
    for name, p in yours.named_parameters():
        check(p.grad is not None and p.grad.abs().max() > 0,
              f"no gradient reaches {name}: what does not depend on it any more?")
        check(p.grad.isfinite().all(), f"the gradient of {name} is not finite")
    right = list(train_steps(theirs, text, steps=3))
    found = list(train_steps(yours, text, steps=200))
    expect(found[:3], right, "the loss of the first three steps", tolerance=1e-3)
    check(found[-1] < 0.7 * found[0], f"after 200 steps the loss is {found[-1]:.2f}, it began at "
          f"{found[0]:.2f}: the model hardly learns")
