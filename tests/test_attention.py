"""Tests of lab/baselines/attention.py: each way to attend, against float64 and values by hand."""
import math
import sys
from types import SimpleNamespace

import pytest
import torch

import multiscreen as ms
from lab.baselines import attention, local
from support.check import LONG, alive_pairs, faults
from support.fast import choose_screen
from tests.helpers import CPU_SCREEN, ROOT, fit, moved_model
from tests.inputs import draw_tokens, random
from tests.reference import MECHANISMS, entmax, reference_transformer


def name_of(variant, size="2,3,24"):
    return f"transformer:{size}:{variant}".rstrip(":")


# ------------------------------------------- all, also one that you add: and in test_baselines.py

@pytest.mark.parametrize("variant", ["", *attention.VARIANTS])
def test_only_the_products_are_bfloat16(variant):
    """So a loss, and a gradient, are within a few hundredths of those of float32."""
    def loss_and_gradient(dtype):
        model = moved_model(name_of(variant), dtype)
        loss = model.loss(x[:, :-1], x[:, 1:])
        W = model.layers[0].W_V
        return loss.item(), torch.autograd.grad(loss, W)[0]

    x = draw_tokens(2, 65)
    (a, da), (b, db) = map(loss_and_gradient, (torch.bfloat16, None))
    assert abs(a - b) < 0.02 * b
    assert (da - db).norm() < 0.1 * db.norm()
    assert a != b


def test_an_autocast_leaves_scores_in_float32():
    q, k = torch.randn(2, 1, 2, 30, 8, generator=random(0))
    exact = attention.scores(q, k)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(attention.scores(q, k), exact)


def test_an_autocast_leaves_forgetting_at_a_distance():
    """In 16 bits log f is off by the same at each of 1,000 equal tokens."""
    layer = moved_model(name_of("forgetting")).layers[0]
    x = torch.randn(24, generator=random(0)).expand(1, 1000, 24)
    with torch.no_grad():
        layer.b_f.fill_(2.7)                           # f = 0.94 or so
    exact = layer.project(x, torch.arange(1000))[1][..., -1]
    with torch.autocast("cpu", torch.bfloat16):
        found = layer.project(x, torch.arange(1000))[1][..., -1]
    torch.testing.assert_close(found.sum(-1), exact.sum(-1), rtol=0, atol=0.01)


# ---------------------------------------------------------------------- against the reference

@pytest.mark.parametrize("variant", MECHANISMS)
def test_the_model_is_a_llama_with_one_thing_changed(variant):
    """Value and gradients equal those of loops over queries, in float64."""
    model, x = moved_model(name_of(variant)).double(), draw_tokens(1, 70)
    p = {name: value.detach().clone().requires_grad_() for name, value in model.named_parameters()}
    exact = reference_transformer(p, model.config, x[0], variant)
    torch.testing.assert_close(model(x)[0], exact, rtol=1e-9, atol=1e-9)

    dz = torch.randn(exact.shape, generator=random(1), dtype=exact.dtype)
    wanted = torch.autograd.grad(exact, list(p.values()), dz)
    found = torch.autograd.grad(model(x)[0], list(model.parameters()), dz)
    for name, a, b in zip(p, found, wanted):
        assert (a - b).norm() < 1e-8 * b.norm() + 1e-10, name
    z = model.float()(x)[0].double()
    assert (z - exact).norm() < 1e-4 * exact.norm()


# ------------------------------------------------------------------------------------ by hand

def weights(block, s):
    """p of the causal scores s, (T, T)."""
    layer = block(SimpleNamespace(d_E=2, N_H=1))
    d = torch.arange(len(s)) - torch.arange(len(s))[:, None]
    return layer.weights(torch.tensor(s).masked_fill(d > 0, -math.inf)[None, None], d)[0, 0]


S = [[0.0, 0.0, 0.0], [math.log(2), 0.0, 0.0], [math.log(3), math.log(2), 0.0]]
T = (1 - math.sqrt(7)) / 4                             # (1/2 - t)^2 + t^2 = 1
BY_HAND = {
    "off-by-one": (S, [[1 / 2, 0, 0], [1 / 2, 1 / 4, 0], [3 / 7, 2 / 7, 1 / 7]]),
    # b is 2/3 for the key before; the next gets 3/4 of the third that is left.
    "stick-breaking": (S, [[0, 0, 0], [2 / 3, 0, 0], [1 / 4, 2 / 3, 0]]),
    # A score 2 below the best has no weight.
    "entmax": ([[5.0, 0, 0], [2, 0, 0], [1, 0, -9]],
               [[1, 0, 0], [1, 0, 0], [(1 / 2 - T)**2, T**2, 0]]),
    # One head: m = 2^-8. Scores that undo the slope leave softmax, or a sigmoid of -log n.
    "alibi": ([[0.0, 0, 0], [2**-8, 0, 0], [2**-7, 2**-8, 0]],
              [[1, 0, 0], [1 / 2, 1 / 2, 0], [1 / 3, 1 / 3, 1 / 3]]),
    "sigmoid": ([[0.0, 0, 0], [2**-8, 0, 0], [2**-7, 2**-8, 0]],
                [[1 / 2, 0, 0], [1 / 3, 1 / 3, 0], [1 / 4, 1 / 4, 1 / 4]]),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_values_worked_by_hand(name):
    s, p = BY_HAND[name]
    found = weights(attention.VARIANTS[name], s)
    torch.testing.assert_close(found, torch.tensor(p), atol=1e-6, rtol=1e-6)


def test_entmax_with_many_keys_is_that_of_sorting_and_sums_to_one():
    s = 3 * torch.randn(20, 2000, generator=random(0), dtype=torch.float64)
    layer = attention.Entmax(SimpleNamespace(d_E=2, N_H=1))
    found = layer.weights(s[None, None], torch.zeros(20, 2000))[0, 0]
    torch.testing.assert_close(found, torch.stack([entmax(row) for row in s]), atol=1e-9, rtol=1e-9)
    assert ((found == 0).sum(-1) > 1000).all()
    torch.testing.assert_close(found.sum(-1), torch.ones(20, dtype=s.dtype))


@pytest.mark.parametrize("n", [2**12, 2**16, 2**20])
def test_entmax_of_very_many_keys_sums_to_one(n):
    """Equal scores, and those nearly equal, take the most steps."""
    layer = attention.Entmax(SimpleNamespace(d_E=2, N_H=1))
    for spread in (0.0, 0.01, 0.1):
        s = spread * torch.randn(1, n, generator=random(0))
        assert layer.weights(s, None).sum().item() == pytest.approx(1, abs=1e-4)


@torch.no_grad()
def test_forgetting_is_as_exact_far_away():
    """c, the sum of log f, is a thousand there: its differences would lose three digits."""
    model, x = moved_model(name_of("forgetting")), draw_tokens(1, 1500)
    z = model(x)
    exact = model.double()(x)
    assert (z - exact).norm() < 1e-5 * exact.norm()


# -------------------------------------------------------------- screening in a Transformer's layer

def test_screening_in_a_transformer_has_all_that_multiscreen_has():
    model, x = moved_model(name_of("screening")), draw_tokens(1, 300)
    exact = model(x)
    choose_screen(model)
    assert model.screen is CPU_SCREEN
    torch.testing.assert_close(model(x), exact, atol=1e-4, rtol=1e-4)
    maps = model.relevance_maps(x)
    assert [alpha_d.shape for alpha_d in maps] == [(1, 3, 300, 300)] * 2
    assert 0 < alive_pairs(model, x)["alive"] < 1

    assert model.layers[0].window()[0] < 100
    with torch.no_grad():
        model.layers[0].s_w[2] = math.log(200) / 8
    model.expand_windows(150)
    w = torch.stack([layer.window() for layer in model.layers])
    assert w[0, 2] == math.inf
    assert w[0, 0] < 100


# ------------------------------------------------------------------------ the layout of local.py

LAYOUT = [name for name, x in vars(local).items()
          if isinstance(x, type) and x.__module__ == local.__name__]


@pytest.mark.parametrize("name", LAYOUT)
def test_each_mechanism_in_the_layout_keeps_the_promises_of_a_model(name):
    model = moved_model(name_of(f"lab.baselines.local.{name}"))
    assert faults(model, LONG, gradients=True) == {}


@pytest.mark.parametrize("name", LAYOUT)
@torch.no_grad()
def test_odd_layers_see_64_tokens_and_even_ones_no_order(name):
    odd, even = moved_model(name_of(f"lab.baselines.local.{name}")).double().layers
    for layer in (odd, even):
        layer.W_Q.mul_(0.01)                           # far keys count, too
    g = random(0)
    x, other = torch.randn(2, 1, 100, 24, generator=g, dtype=torch.float64)

    def last(layer, x):
        return layer(x, ms.screen)[0, -1]

    beyond = torch.cat([other[:, :36], x[:, 36:]], 1)
    torch.testing.assert_close(last(odd, beyond), last(odd, x))
    if name not in ("Screening", "StickBreaking", "Forgetting"):   # there a key so far has faded
        edge = torch.cat([x[:, :36], other[:, 36:37], x[:, 37:]], 1)
        assert not torch.allclose(last(odd, edge), last(odd, x), rtol=0, atol=1e-9)

    # What a token has selected, taken or faded depends on the tokens between.
    order = torch.cat([torch.randperm(99, generator=g), torch.tensor([99])])
    is_same = torch.allclose(last(even, x[:, order]), last(even, x))
    assert is_same == (name not in ("StickBreaking", "Forgetting", "Selective"))


def test_scalable_softmax_counts_the_keys_of_its_window():
    odd, even = moved_model(name_of("lab.baselines.local.SSMax")).layers
    q = torch.randn(1, 3, 1, 8, generator=random(0))

    def length(layer, i):
        return layer.encode(q, q, torch.tensor([i]))[0].norm().item()

    assert length(odd, 500) == pytest.approx(length(odd, 63))
    assert length(even, 500) > 1.1 * length(even, 63)


# ---------------------------------------------------------------------------- a thirteenth of yours

def test_the_softpick_of_the_guide_is_a_file_that_trains(tmp_path, monkeypatch):
    code = (ROOT / "docs/variants.md").read_text().split("```python\n")[2].partition("```")[0]
    (tmp_path / "softpick.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    fit(tmp_path / "out", "--model", name_of("softpick.Softpick", "1,2,8"), "--steps", "2")
    s, d = torch.tensor([[-1.0, 0.5, 2.0, -math.inf]]), torch.tensor([[-2, -1, 0, 1]])
    weights, e = sys.modules["softpick"].Softpick.weights, s.expm1()
    torch.testing.assert_close(weights(None, s, d), e.relu() / e[:, :3].abs().sum())
    large = weights(None, 1000 * s, d)[0].tolist()     # exp(2000) is infinite
    assert large == pytest.approx([0, 0, 1, 0], abs=1e-5)
    del sys.modules["softpick"]
    assert (tmp_path / "out/source/softpick.py").read_text() == code
