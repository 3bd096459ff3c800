"""Part 5 of the course: each variant trains, and the table compares seed by seed."""
import io
import math
import re
import sys
from dataclasses import asdict

import pytest
import torch

import multiscreen
from exercises import part5_research, research
from exercises.checks import correlated
from support.checkpoint import load_checkpoint
from support.cli import UsageError
from tests.helpers import ROOT

TEXT = str(ROOT / "test_multiscreen.py")


retrieval = research.retrieval


@pytest.fixture(autouse=True)
def shorter(monkeypatch, quick_choice):
    monkeypatch.setattr(research, "LONG", 200)
    monkeypatch.setattr(research, "MORE", 1)
    monkeypatch.setattr(research, "retrieval", lambda *_: {"found": 50.0})


@pytest.mark.parametrize("variant", [v for v in part5_research.VARIANTS if v != "mine"])
def test_each_open_question_can_be_trained(variant, capsys):
    part5_research.main([variant, "--steps", "2", "--data", TEXT, "--predict", "no change"])
    out = capsys.readouterr().out
    assert "\npredicted: no change\n" in out
    assert re.search(r"\nfound +50.0 +50.0 +0.0000\n", out)
    assert "what the longer context costs" in out
    assert "nan" not in out


def test_the_weights_of_a_trained_model_find_needles_until_the_screen_is_broken():
    trained, tokenizer, _ = load_checkpoint(part5_research.TRAINED)
    sizes = asdict(trained.config)
    found = {}
    for name in ("base", "nope", "untied", "transformer"):
        model = part5_research.build_variant(name, 0, sizes)
        found[name] = retrieval(name, model, trained, tokenizer, 0)
    at_once, after = "trained before: found, 200 tokens, %", "found after 1 more steps, %"
    assert found["base"] == {at_once: 100, after: 100}
    assert found["nope"][at_once] < 50                         # it has relied on positions
    assert found["untied"] == found["transformer"] == {}       # they have other weights


def test_differences_are_paired_by_seed():
    pairs = [({"loss": 2.0, "w": 1.0}, {"loss": 2.5}), ({"loss": 3.0, "w": 1.0}, {"loss": 3.7})]
    head, loss, w = research.table("compete", pairs)
    assert head.split() == ["mean", "of", "the", "seeds", "base", "compete", "difference",
                            "+-", "deviation", "of", "each", "seed"]
    deviation = f"{0.1 * math.sqrt(2):.4f}"
    assert loss.split() == ["loss", "2.5000", "3.1000", "0.6000", "+-", deviation, "0.5000",
                            "0.7000"]
    assert w.split() == ["w", "1.0000", "-", "-"]


def test_two_seeds_are_two_runs_and_the_same_seed_is_the_same_run(capsys):
    tables = []
    for seeds in (["3"], ["0", "3"]):
        part5_research.main(["hard-window", "--steps", "2", "--data", TEXT, "--seeds", *seeds])
        tables.append(capsys.readouterr().out.splitlines())
    one, two = ([line for line in lines if line.startswith("largest window")][0].split()
                for lines in tables)
    assert two[-1] == one[-1] != two[-2]


def test_the_prediction_is_asked_for_before_the_run(monkeypatch, capsys):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stdin", Terminal("it gets worse\n"))
    part5_research.main(["nope", "--steps", "1", "--data", TEXT])
    out = capsys.readouterr().out
    assert out.startswith("What will nope change")
    assert "predicted: it gets worse" in out


def test_the_longer_context_is_compared_on_the_same_tokens():
    """A model without memory gives the same tokens the same loss."""
    class Bigram(torch.nn.Module):
        layers = [None]

        def loss(self, x, y, reduction="mean"):
            nats = (x - y).abs().float()
            return nats if reduction == "none" else nats.mean()

    class Data(list):
        def spread(self, n):
            return range(len(self))

    sequences = torch.randint(257, (3, research.LONG + 1)).numpy()
    found = research.measure(Bigram(), [(1.0, 1.0, 1.0)] * 2, Data(sequences[:, :129]),
                             Data(sequences))
    assert found["what the longer context costs"] == 0
    assert found["the same after 136 others"] > 0


def test_variants_change_what_they_say():
    q, k, _ = correlated(0, 1, 1, 12, 12)
    v = torch.eye(12, dtype=torch.float64)[None, None]             # then h is alpha_d
    w, r = torch.tensor([6.0]).double(), torch.tensor([0.1]).double()
    alpha_d = multiscreen.relevance(q, k, w, r)[0, 0]
    compete, hard, sigmoid = (part5_research.SCREENS[name](q, k, v, w, r)[0, 0]
                              for name in ("compete", "hard-window", "sigmoid"))
    inside = multiscreen.softmask(part5_research.distances(q, k, 0), w) > 0
    assert (alpha_d[inside] == 0).any()                            # Trim rejects some
    assert (compete.sum(-1) < 1).all()
    assert torch.equal(hard > 0, alpha_d > 0)
    assert (hard >= alpha_d).all()
    assert torch.equal(sigmoid > 0, inside)


def test_untied_begins_as_the_base_does():
    base, untied = (part5_research.build_variant(name, 0) for name in ("base", "untied"))
    assert untied.screen is base.screen                # or the milliseconds differ for no reason
    tokens = torch.arange(40)[None]
    torch.testing.assert_close(untied(tokens), base(tokens))


@pytest.mark.parametrize("argv, message", [
    (["nothing"], "variant 'nothing' is unknown"), (["nope", "--steps", "0"], "--steps must be"),
    (["nope", "--seeds", "1", "1"], "--seeds must be different"), (["mine"], "write my_screen")])
def test_a_wrong_question_is_explained(argv, message):
    with pytest.raises(UsageError, match=message):
        part5_research.main(argv)
