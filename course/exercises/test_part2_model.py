"""Part 2, the model: hand-worked points first, then properties, then multiscreen.py."""
import math
from functools import partial

import torch
import torch.nn.functional as F

import multiscreen as ms
from course.exercises.adapters import mine
from course.exercises.checks import check, correlated, enliven, expect, random
from course.exercises.test_part2 import SIZES, a_layer, draw_inputs, parts_of, some_tokens
from course.exercises.trained import blank, load_into, losses_on, trained_model


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


def test_embed():
    yours, theirs = a_model()
    t = some_tokens(2, 5)
    rows = theirs.W_E[t]
    expect(yours.embed(t), theirs.embed(t), "x^(0)",
           [(rows, "the row of W_E as it is: it needs unit length and the scale e^s_E"),
            (theirs.s_E.exp() * rows, "the embedding is not of unit length"),
            (F.normalize(rows, dim=-1), "the scale e^s_E is missing"),
            (theirs.s_E * F.normalize(rows, dim=-1), "the scale is e^s_E, not s_E"),
            (theirs.s_F.exp() * F.normalize(rows, dim=-1), "s_F is for the logits: take s_E")])


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
            (theirs.s_E.exp() * x @ E_bar.T, "s_E is for the embedding: take s_F"),
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
            (nats.mean() / math.log(2), "these are bits: leave out the division to get nats"),
            (F.cross_entropy(z.softmax(-1).transpose(1, 2), targets), "softmax was taken twice: "
             "cross_entropy begins with one"),
            (nats.sum(), "the sum over all tokens: take the mean"),
            (nats.sum(1).mean(), "the mean is over sequences only: take it over tokens, too")])
    targets[0, 3:] = -100
    seen = targets != -100
    expect(yours.loss(inputs, targets), nats[seen].mean(), "the loss with targets of -100",
           [((nats * seen).sum(1).div(seen.sum(1)).mean(), "the mean of each sequence's mean: take "
             "it over all tokens that count"),
            ((nats * seen).mean(), "targets of -100 count in the denominator"),
            (nats.mean(), "targets of -100 count")])


class TightCache:
    """Drops keys that every window has passed, so `first` moves on."""

    def __init__(self):
        self.whole, self.end = ms.KeyCache(), 0

    def append(self, k, v, w):
        reach = math.ceil(min(w.max().item(), 2**30)) - 1
        first = max(self.end - reach, 0)
        k, v, _ = self.whole.append(k, v, torch.full_like(w, math.inf))
        self.end = self.whole.end
        return k[:, :, first:], v[:, :, first:], first


def check_append():
    """Check what append returns, and its positions."""
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
          f"kept only those from {first} on")


@torch.no_grad()
def test_cache():
    check_append()
    yours, theirs = a_layer()
    x = draw_inputs(2, 12, 24)
    pieces = torch.split(x, [5, 1, 1, 4, 1], 1)
    # The repository's layer tells a cache of its windows only if the screen stays inside them.
    screen = partial(ms.screen)
    screen.stays_in_window = True

    def wrong(from_0=False, i0=lambda start, first, end: start - first):
        """x^(1) with MiPE's positions from 0 in each piece, or with another i0."""
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

    for s_w, cache in ((theirs.s_w.tolist(), mine.KeyCache()), ([1.0, 0.0, 1.2], TightCache()),
                       ([1.0, 0.0, 1.2], mine.KeyCache())):
        theirs.s_w.copy_(torch.tensor(s_w))
        load_into(yours, theirs)
        found = torch.cat([yours(piece, screen, cache) for piece in pieces], 1)
        expect(found, theirs(x, ms.screen),
               "x^(1), computed in pieces of 5, 1, 1, 4, 1 positions,",
               [(torch.cat([theirs(piece, ms.screen) for piece in pieces], 1),
                 "the cache is ignored: each piece sees only itself"),
                (wrong(from_0=True), "MiPE counts from 0 in each piece: positions continue "
                 "at cache.end"),
                (wrong(i0=lambda start, first, end: 0), "i0 is not passed to screen: the queries "
                 "begin after the keys in the cache"),
                (wrong(i0=lambda start, first, end: end - first), "cache.end was read after "
                 "append: the queries begin where it was before"),
                (wrong(i0=lambda start, first, end: start), "the cache dropped old keys: i0 counts "
                 "from the first key that append returns")], tolerance=1e-4)


def greedy(model, tokens, n, caches=None):
    """The next n tokens; with caches, each from the last token alone. caches: one list a step."""
    for m in range(n):
        x = tokens[:, -1:] if caches and m else tokens
        z = model(x, caches and caches(m))
        tokens = torch.cat((tokens, z[:, -1].argmax(-1, keepdim=True)), 1)
    return tokens


def test_generate():
    yours, theirs = a_model()
    with torch.no_grad():
        for layer in theirs.layers:
            layer.s_O.add_(3)                          # else the last token decides
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
          "step: pass on only the new one, as the caches hold the others")


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
    with torch.no_grad():
        expect(yours(tokens), theirs(tokens), "logits of the trained model", tolerance=1e-3)


def test_training():
    sizes = {"vocab_size": 30, "N_L": 1, "N_H": 2, "d_E": 16, "d_V": 16}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = ms.Config(**sizes)
        theirs, yours = ms.Multiscreen(config), blank(config)
    load_into(yours, theirs)
    text = torch.randint(30, (60,), generator=random(1)).repeat(20)      # a text to memorize
    theirs.screen = ms.screen
    yours.loss(text[None, :59], text[None, 1:60]).backward()
    for name, p in yours.named_parameters():
        check(p.grad is not None and p.grad.abs().max() > 0,
              f"no gradient reaches {name}: does the loss not depend on it?")
        check(p.grad.isfinite().all(), f"the gradient of {name} is not finite")
    right = list(losses_on(theirs, text, steps=3))
    found = list(losses_on(yours, text, steps=100))
    expect(torch.tensor(found[:3]), right, "the loss of the first three steps", tolerance=1e-3)
    check(found[-1] < 0.7 * found[0], f"after 100 steps the loss is {found[-1]:.2f}, having begun "
          f"at {found[0]:.2f}: the model hardly learns")
