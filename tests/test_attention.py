"""Tests of study/attention.py and local.py: each mechanism, against loops in float64."""
from types import SimpleNamespace

import pytest
import torch

import multiscreen as ms
from study import attention, local
from test_multiscreen import draw_tokens, random
from tests.reference import MECHANISMS, reference_transformer
from train import build_model, choose_screen, try_model

# The mechanisms of the reference, and those that differ from one of them in a constant.
NAMES = (*MECHANISMS, "SteepALiBi", "FixedSigmoid", "LateForgetting", "WideScreening")
SIZES = {"N_L": 2, "N_H": 3, "d_E": 24, "vocab_size": 257}
LAYOUT = [name for name in vars(local) if hasattr(getattr(local, name), "recipe")]


def moved_model(name, dtype=None):
    """A model whose weights are large enough that its layers matter."""
    torch.manual_seed(0)
    model = build_model(f"study.{name}", SIZES, dtype)
    with torch.no_grad():
        for W in model.layers.parameters():
            W.mul_(3 if W.ndim > 1 else 1).add_(0.1 * torch.randn(W.shape, generator=random(2)))
    return model


@pytest.mark.parametrize("name", [*(f"attention.{name}" for name in NAMES),
                                  *(f"local.{name}" for name in LAYOUT)])
def test_each_is_causal_and_decodes_as_it_trains(name, capsys):
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
    try_model(moved_model(name), SimpleNamespace(kernel="multiscreen", seq_len=64, model=name))
    assert "warning" not in capsys.readouterr().out


@pytest.mark.parametrize("name", NAMES)
def test_only_the_products_are_bfloat16(name):
    """So a loss is within some hundredths of that in float32, and so is a gradient."""
    losses, gradients, x = [], [], draw_tokens(2, 65)
    for dtype in (torch.bfloat16, None):
        model = moved_model(f"attention.{name}", dtype)
        loss = model.loss(x[:, :-1], x[:, 1:])
        losses.append(loss.item())
        gradients.append(torch.autograd.grad(loss, model.layers[0].W_V)[0])
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
    assert (gradients[0] - gradients[1]).norm() < 0.15 * gradients[1].norm()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["Softmax", "Entmax", "Selective", "Screening"])
def test_a_layer_compiles_as_one_graph_for_all_lengths(name):
    """A rival that breaks into several graphs would be slower than it need be."""
    model = moved_model(f"attention.{name}")
    layer = model.layers[0]
    compiled = torch.compile(layer, backend="eager", fullgraph=True, dynamic=True)
    for T in (20, 33):
        x = model.embed(draw_tokens(1, T))
        torch.testing.assert_close(compiled(x, ms.screen), layer(x, ms.screen))


@torch.no_grad()
def test_screening_in_a_transformer_has_what_multiscreen_has():
    """A twin for its screen, relevance maps, and windows that can be expanded."""
    model, x = moved_model("attention.Screening"), draw_tokens(1, 300)
    exact = model(x)
    choose_screen(model)
    torch.testing.assert_close(model(x), exact, rtol=1e-4, atol=1e-4)
    assert [alpha_d.shape for alpha_d in model.relevance_maps(x)] == [(1, 3, 300, 300)] * 2
    model.layers[0].s_w.copy_(torch.tensor([9.0, 99.0, 199.0]).log() / 8)
    model.expand_windows(150)
    assert model.layers[0].w.isinf().tolist() == [False, False, True]


# ---------------------------------------------------------------------- against the reference

@pytest.mark.parametrize("variant", MECHANISMS)
def test_the_model_is_a_llama_with_one_thing_changed(variant):
    """Value and gradients equal those of loops over queries, in float64."""
    model, x = moved_model(f"attention.{variant}").double(), draw_tokens(1, 70)
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


# ------------------------------------------------------------------------------- long texts

@pytest.mark.parametrize("n", [2**12, 2**16, 2**20])
def test_entmax_of_very_many_keys_sums_to_one(n):
    """Equal scores, and those nearly equal, take the most of Newton's steps."""
    layer = attention.Entmax.block(SimpleNamespace(d_E=2, N_H=1))
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
