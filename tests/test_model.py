"""What users meet when they build, train and use a model: refusals, memory, sampling, edits.

That the model is the paper's, and that its caches and greedy generation are right, is shown in
test_multiscreen.py.
"""
import math
import re

import pytest
import torch
from torch.nn.functional import cross_entropy

import multiscreen as ms
from multiscreen import Config, Multiscreen
from test_multiscreen import INF, correlated, draw_tokens, random, small, talkative
from tests.helpers import ROOT

# --------------------------------------------------------------------- build and train

@pytest.mark.parametrize("name, x", [("N_L", 0), ("d_K", 1), ("w_th", 1.0), ("w_th", math.nan),
                                     ("w_th", INF)])
def test_an_impossible_size_is_named(name, x):
    with pytest.raises(ValueError, match=f"{name} is {x}"):
        Config(**{name: x})


def test_what_a_model_does_not_take_is_refused():
    model, x = small(1), draw_tokens(2, 8)
    for tokens in (x[0], x[:0], x[:, :0], x[..., None]):
        with pytest.raises(ValueError, match="tokens has shape"):
            model(tokens)
        with pytest.raises(ValueError, match="tokens has shape"):
            model.generate(tokens, 1)
    with pytest.raises(ValueError, match="targets has shape"):
        model.loss(x, x.flatten())
    with pytest.raises(ValueError, match="'sum'"):
        model.loss(x, x, "sum")
    with pytest.raises(ValueError, match="shorter"):                       # than the layers
        model(x, model.new_caches()[:2])
    for options in ({"temperature": -1.0}, {"temperature": 1e-5}, {"top_k": 0}):
        with pytest.raises(ValueError, match="expected"):
            model.generate(x, 1, **options)
    with pytest.raises(TypeError, match="keep them in float32"):
        model.bfloat16()(x)


def test_a_sum_of_16_bit_values_is_rounded_once():
    q, k, v = (x.float() for x in correlated(3, 2, 2, 40, 40))
    inputs, v = (torch.tensor([5.5, INF]), torch.tensor([0.5, 0.7])), v.bfloat16()
    h = ms.screen(q, k, v, *inputs)
    assert torch.equal(h, ms.screen(q, k, v.float(), *inputs).bfloat16())


def test_logits_are_never_kept_for_backward():
    model, tokens, kept = small(1), draw_tokens(1, 71), []
    model.logits_at_once = 7 * 50                                          # chunks of 7 tokens

    def keep(x):
        kept.append(tuple(x.shape))
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        model.loss(tokens[:, :-1], tokens[:, 1:])
    assert (7, model.config.d_E) in kept               # a chunk, from which its logits come again
    assert not {(7, 50), (70, 50)} & set(kept)


def test_without_targets_the_loss_is_zero_and_so_is_its_gradient():
    model, tokens = small(1, moved=True), draw_tokens(2, 41)
    loss = model.loss(tokens, torch.full_like(tokens, -100))
    loss.backward()
    assert loss == 0
    assert all((p.grad == 0).all() for p in model.parameters())


# --------------------------------------------------------------------- use

def test_gradients_flow_through_caches():
    """A text in pieces, each with the caches of those before, has the gradients of one pass."""
    model, tokens = small(1, moved=True).double(), draw_tokens(2, 101)
    x, y = tokens[:, :-1], tokens[:, 1:]
    caches = model.new_caches()
    logits = torch.cat([model(part, caches) for part in x.split([50, 1, 49], 1)], 1)
    found, wanted = (torch.autograd.grad(loss, list(model.parameters()))
                     for loss in (cross_entropy(logits.mT, y), model.loss(x, y)))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("temperature, top_k", [(2.5, None), (2.5, 99), (0.5, 3)])
def test_tokens_are_drawn_from_the_softmax_of_the_top_k_logits(temperature, top_k):
    """The generator of random numbers that is given draws them: the same ones each time."""
    model, tokens = small(2, moved=True, psi=1, d_K=2, d_V=2), draw_tokens(2, 9)
    with torch.no_grad():
        z = model(tokens)[:, -1]
    kept = z.topk(min(top_k or 50, 50)).indices
    p = torch.zeros(2, 50).scatter(1, kept, (z.gather(1, kept) / temperature).softmax(1))

    def draw(seed):
        return model.generate(tokens.repeat(3000, 1), 1, temperature=temperature, top_k=top_k,
                              generator=random(seed)).view(3000, 2)

    drawn = draw(0)
    share = torch.stack([drawn[:, n].bincount(minlength=50) for n in (0, 1)]) / 3000
    assert ((share - p).abs() <= 5 * (p / 3000).sqrt()).all()
    assert torch.equal(drawn, draw(0)) and not torch.equal(drawn, draw(1))


@pytest.mark.parametrize("temperature, bad, n_tokens", [(1.0, 0, 0), (1.0, 3, 8), (0.0, 3, 8)])
def test_logits_that_are_not_finite_are_reported_at_once_or_at_the_end(
        monkeypatch, temperature, bad, n_tokens):
    """Those of the prompt at once, those of a later token after the last one."""
    right, calls, seen = Multiscreen.logits, [], []

    def logits(self, x, head):
        calls.append(x)
        return right(self, x, head) * (math.nan if len(calls) == bad + 1 else 1.0)

    monkeypatch.setattr(Multiscreen, "logits", logits)
    with pytest.raises(FloatingPointError, match="not finite"):
        for tokens in small(1).stream(draw_tokens(1, 5), 9, temperature):
            seen.append(tokens)
    assert len(seen) == n_tokens


def test_a_long_prompt_goes_through_in_pieces():
    """The definition needs memory for T x S relevances, so it reads few tokens at a time."""
    model, sizes = small(1), []

    def screen(q, k, *others):
        assert not torch.is_grad_enabled()             # else every layer's relevances are kept
        sizes.append((q.shape[2], k.shape[2]))
        return ms.screen(q, k, *others)

    model.screen, model.tokens_at_once = screen, 40
    model.generate(draw_tokens(1, 100), 2)
    assert sizes[:: model.config.N_L] == [(40, 40), (40, 80), (20, 100), (1, 101)]


@torch.no_grad()
def test_an_edit_of_an_equation_acts_on_a_model_that_exists(monkeypatch):
    model, tokens = talkative(), draw_tokens(2, 60)
    logits, maps, text = model(tokens), model.relevance_maps(tokens), model.generate(tokens, 8)
    loss = model.loss(tokens, tokens)

    # Eq. 12: in its logits, its maps and its decoding.
    def compete(q, k, v, w, r, i0=0):
        alpha_d = ms.relevance(q, k, w, r, i0)
        return alpha_d / (alpha_d.sum(-1, keepdim=True) + 0.1) @ v

    right = ms.screen
    monkeypatch.setattr(ms, "screen", compete)
    assert not torch.allclose(model(tokens), logits)
    assert model.relevance_maps(tokens)[0].sum(-1).max() < 1
    assert not torch.equal(model.generate(tokens, 8), text)

    # A screen that is assigned is the one that acts.
    model.screen = right
    assert torch.equal(model(tokens), logits)
    torch.testing.assert_close(model.relevance_maps(tokens), maps)

    # Eq. 3: in its loss.
    right = Multiscreen.logits
    monkeypatch.setattr(Multiscreen, "logits", lambda self, *args: 0.5 * right(self, *args))
    assert not torch.allclose(model.loss(tokens, tokens), loss)


@pytest.mark.parametrize("name", ["Sigmoid", "Power", "model"])
def test_the_variants_of_the_guide_decode_as_they_read_and_learn(name):
    codes = re.findall(r"```python\n(.*?)```", (ROOT / "docs/variants.md").read_text("utf-8"), re.S)
    code, = [code for code in codes if re.search(rf"^(class|def) {name}\b", code, re.M)]
    scope, config = {}, Config(psi=2, vocab_size=50, d_E=16)
    exec(code, scope)
    torch.manual_seed(0)
    model = scope["model"](config) if name == "model" else Multiscreen(config, None, scope[name])
    tokens, caches = draw_tokens(2, 60), model.new_caches()
    parts = torch.cat([model(part, caches) for part in tokens.split([40, 1, 19], 1)], 1)
    torch.testing.assert_close(parts, model(tokens), rtol=1e-4, atol=1e-4)
    model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
    assert all(p.grad.isfinite().all() and p.grad.any() for p in model.layers[0].parameters())
