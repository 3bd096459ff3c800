"""Tests of --compile: the same numbers, and a way back where compiling fails."""
import copy
from functools import partial

import pytest
import torch

from support import choose
from support.choose import OUTSIDE_OF_LAYERS, compile_layers, try_to_compile
from support.cli import UsageError
from support.distributed import recompute
from support.windowed import screen_windowed
from tests.helpers import draw_tokens, small
from tests.pretended import Pretended

COMPILE = torch.compile


def of_a_step(model, tokens):
    """The loss, and the gradients by name."""
    model.zero_grad()
    loss = model.loss(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    return {"loss": loss.detach()} | {n: p.grad.clone() for n, p in model.named_parameters()}


@pytest.fixture
def model():
    model = small(1, far=True, N_L=2)
    model.screen = screen_windowed
    return model


def fails(*inputs, **options):
    raise RuntimeError("no\ncompiler")


def test_a_compiled_model_gives_the_numbers_of_an_eager_one(model, monkeypatch):
    tokens, names = draw_tokens(2, 180), []

    def backend(graph, inputs):
        names.append({node.name for node in graph.graph.nodes})
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(COMPILE, backend=backend))
    eager = of_a_step(model, tokens)
    assert try_to_compile(model, True, 2, 179) == "compiled by torch.compile"
    before = len(names)
    assert before >= 4                                 # two parts of a layer, embedding, head
    compiled = of_a_step(model, tokens)
    assert len(names) == before                        # the trial made all graphs of a step
    assert not any("embedding" in name for graph in names for name in graph)
    for name, x in eager.items():
        torch.testing.assert_close(compiled[name], x, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind, wanted, triton, tried", [
    ("cuda", None, True, True), ("cuda", None, False, False), ("cuda", False, True, False),
    ("mps", None, True, False)])
def test_where_compiling_fails_the_model_is_as_it_was(model, monkeypatch, kind, wanted, triton,
                                                      tried):
    monkeypatch.setattr(torch, "compile", lambda f, **options: fails)
    monkeypatch.setattr(choose, "has_triton", lambda: triton)
    tokens = draw_tokens(2, 180)
    eager = of_a_step(model, tokens)
    with Pretended(kind):
        line = try_to_compile(model.to(kind), wanted, 2, 179)
        said = "not compiled: torch.compile fails here (RuntimeError: no)"
        assert line == (said if tried else None)
        assert model.screen is screen_windowed
        assert not vars(model).keys() & {*OUTSIDE_OF_LAYERS}
        for name, x in of_a_step(model, tokens.to(kind)).items():
            assert torch.equal(x, eager[name].to(kind))


def test_what_was_asked_for_and_fails_is_an_error(model, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda f, **options: fails)
    assert try_to_compile(model, None, 2, 30) is None  # a CPU
    with pytest.raises(UsageError, match="^--compile: torch.compile fails .*RuntimeError: no"):
        try_to_compile(model, True, 2, 30)


def test_a_copy_of_a_compiled_or_recomputed_model_has_its_own_weights(model, monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(COMPILE, backend="eager"))
    for change in (compile_layers, recompute):
        changed = copy.deepcopy(model)
        change(changed)
        other, tokens = copy.deepcopy(changed), draw_tokens(2, 20)
        with torch.no_grad():
            for W in other.parameters():
                W.zero_()
        assert not other(tokens).any()
        assert changed(tokens).any()
