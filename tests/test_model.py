"""What users meet when they build and train a model: refusals, memory, edits.

That the model is the paper's is shown in test_multiscreen.py.
"""
import math

import pytest
import torch

import multiscreen as ms
from multiscreen import Config, Multiscreen
from test_multiscreen import INF, correlated, draw_tokens, small


@pytest.mark.parametrize("name, x", [("N_L", 0), ("d_K", 1), ("w_th", 1.0), ("w_th", math.nan),
                                     ("w_th", INF)])
def test_an_impossible_size_is_named(name, x):
    with pytest.raises(ValueError, match=f"{name} is {x}"):
        Config(**{name: x})


@pytest.mark.parametrize("shape", [(5,), (1, 0), (0, 5), (1, 5, 2)])
def test_tokens_of_another_shape_are_refused(shape):
    tokens = torch.zeros(shape, dtype=torch.long)
    for use in (small(), lambda tokens: small().generate(tokens, 1)):
        with pytest.raises(ValueError, match="tokens has shape"):
            use(tokens)


def test_parameters_of_16_bits_are_refused():
    with pytest.raises(TypeError, match="keep them in float32"):
        small().bfloat16()(draw_tokens(1, 5))


def test_what_a_loss_or_a_cache_does_not_fit_is_refused():
    model, x = small(1), draw_tokens(2, 8)
    with pytest.raises(ValueError, match="targets has shape"):
        model.loss(x, x.flatten())
    with pytest.raises(ValueError, match="'sum'"):
        model.loss(x, x, "sum")
    with pytest.raises(ValueError, match="shorter"):                       # than the layers
        model(x, model.new_caches()[:2])


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


def test_an_edit_of_logits_acts_in_training(monkeypatch):
    model, tokens = small(1, moved=True), draw_tokens(2, 41)
    before = model.loss(tokens[:, :-1], tokens[:, 1:]).item()
    right = Multiscreen.logits
    monkeypatch.setattr(Multiscreen, "logits", lambda self, *args: 0.5 * right(self, *args))
    assert abs(model.loss(tokens[:, :-1], tokens[:, 1:]).item() - before) > 0.01


def test_without_targets_the_loss_is_zero_and_so_is_its_gradient():
    model, tokens = small(1, moved=True), draw_tokens(2, 41)
    loss = model.loss(tokens, torch.full_like(tokens, -100))
    loss.backward()
    assert loss == 0
    assert all((p.grad == 0).all() for p in model.parameters())
