"""Tests of study/attention.py and local.py: each mechanism, against float64 and values by hand."""
import math
from types import SimpleNamespace

import pytest
import torch

import multiscreen as ms
from study import attention, local
from tests.reference import MECHANISMS, entmax, reference_transformer
from train import build_model

# What the reference calls a mechanism, and its name in study/attention.py.
NAMES = {"": "Softmax", "qknorm": "QKNorm", "nope": "NoPE", "local": "Local", "alibi": "ALiBi",
         "ssmax": "SSMaxNoPE", "ssmax-rope": "SSMax", "off-by-one": "OffByOne",
         "sigmoid": "Sigmoid", "entmax": "Entmax", "stick-breaking": "StickBreaking",
         "forgetting": "Forgetting", "selective": "Selective", "screening": "Screening",
         "alibi-steep": "SteepALiBi", "sigmoid-fixed": "FixedSigmoid",
         "forgetting-late": "LateForgetting", "screening-wide": "WideScreening",
         "screening-slow": "SlowScreening"}
SIZES = {"N_L": 2, "N_H": 3, "d_E": 24, "vocab_size": 257}
LAYOUT = [name for name in vars(local) if hasattr(getattr(local, name), "recipe")]


def random(seed):
    return torch.Generator().manual_seed(seed)


def draw_tokens(*shape):
    return torch.randint(0, 257, shape, generator=random(1))


def moved_model(name):
    """A model whose weights are large enough that its layers matter."""
    torch.manual_seed(0)
    model = build_model(f"study.{name}", SIZES)
    with torch.no_grad():
        for W in model.layers.parameters():
            W.mul_(3 if W.ndim > 1 else 1).add_(0.1 * torch.randn(W.shape, generator=random(2)))
    return model


@pytest.mark.parametrize("name", [*(f"attention.{name}" for name in NAMES.values()),
                                  *(f"local.{name}" for name in LAYOUT)])
def test_each_is_causal_and_decodes_as_it_trains(name):
    """A prefix does not depend on what follows; a cache that forgets beyond 64 changes nothing."""
    model, x = moved_model(name).double(), draw_tokens(2, 90)
    z = model(x)
    torch.testing.assert_close(model(x[:, :70]), z[:, :70])
    with torch.no_grad():
        caches = model.new_caches()
        pieces = [model(piece, caches) for piece in x.split([70, 1, 3, 16], 1)]
    torch.testing.assert_close(torch.cat(pieces, 1), z.detach())
    model.loss(x[:, :-1], x[:, 1:]).backward()
    assert all(W.grad.abs().sum() > 0 for W in model.parameters())


# ---------------------------------------------------------------------- against the reference

@pytest.mark.parametrize("variant", MECHANISMS)
def test_the_model_is_a_llama_with_one_thing_changed(variant):
    """Value and gradients equal those of loops over queries, in float64."""
    model, x = moved_model(f"attention.{NAMES[variant]}").double(), draw_tokens(1, 70)
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
    found = weights(getattr(attention, f"{NAMES[name]}Block"), s)
    torch.testing.assert_close(found, torch.tensor(p), atol=1e-6, rtol=1e-6)


def test_entmax_with_many_keys_is_that_of_sorting_and_sums_to_one():
    s = 3 * torch.randn(20, 2000, generator=random(0), dtype=torch.float64)
    layer = attention.EntmaxBlock(SimpleNamespace(d_E=2, N_H=1))
    found = layer.weights(s[None, None], torch.zeros(20, 2000))[0, 0]
    torch.testing.assert_close(found, torch.stack([entmax(row) for row in s]), atol=1e-9, rtol=1e-9)
    assert ((found == 0).sum(-1) > 1000).all()
    torch.testing.assert_close(found.sum(-1), torch.ones(20, dtype=s.dtype))


@pytest.mark.parametrize("n", [2**12, 2**16, 2**20])
def test_entmax_of_very_many_keys_sums_to_one(n):
    """Equal scores, and those nearly equal, take the most steps."""
    layer = attention.EntmaxBlock(SimpleNamespace(d_E=2, N_H=1))
    for spread in (0.0, 0.01, 0.1):
        s = spread * torch.randn(1, n, generator=random(0))
        assert layer.weights(s, None).sum().item() == pytest.approx(1, abs=1e-4)


@torch.no_grad()
def test_forgetting_is_as_exact_far_away():
    """c, the sum of log f, is a thousand there: its differences would lose three digits."""
    model, x = moved_model("attention.Forgetting"), draw_tokens(1, 1500)
    z = model(x)
    exact = model.double()(x)
    assert (z - exact).norm() < 1e-5 * exact.norm()


# ------------------------------------------------------------------------ the layout of local.py

@pytest.mark.parametrize("name", LAYOUT)
@torch.no_grad()
def test_odd_layers_see_64_tokens_and_even_ones_no_order(name):
    odd, even = moved_model(f"local.{name}").double().layers
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
    odd, even = moved_model("local.SSMax").layers
    q = torch.randn(1, 3, 1, 8, generator=random(0))

    def length(layer, i):
        return layer.encode(q, q, torch.tensor([i]))[0].norm().item()

    assert length(odd, 500) == pytest.approx(length(odd, 63))
    assert length(even, 500) > 1.1 * length(even, 63)
