"""Tests of experiments.mechanisms."""
import math

import pytest
import torch

from baselines import BLOCKS
from baselines.attention import Scored
from experiments import mechanisms
from experiments.mechanisms import CONFIG, MATCH, N_KEYS, TITLES, draw_tokens, get_weights, is_zero
from multiscreen import softmask
from support.cli import UsageError
from tests.helpers import cells_of, needs_matplotlib

# ------------------------------------------------------------------------------- weights


def scores(n):
    """The scores of the last head, the nearest key first."""
    query, x = (y.double().unflatten(-1, (CONFIG.N_H, -1))[0, :, -1] for y in draw_tokens(n))
    return (x @ query[0] / math.sqrt(CONFIG.d_K)).flip(0)


def test_the_scores_are_those_that_the_figure_says():
    """One match, the same for both lengths; all others are random, of deviation 1.5."""
    few, many = map(scores, N_KEYS)
    torch.testing.assert_close(few, many[: len(few)])
    assert many[MATCH].item() == pytest.approx(6)
    others = torch.cat((many[:MATCH], many[MATCH + 1 :]))
    assert others.max() < 5.5
    assert others.std().item() == pytest.approx(1.5, abs=0.1)
    assert abs(others.mean()) < 0.1


@pytest.mark.parametrize("n", N_KEYS)
def test_weights_are_those_of_the_formulas(n):
    s, d = scores(n), torch.arange(n)
    slope, head = 2**-8, CONFIG.N_H - 1
    expected = {
        "softmax": s.softmax(0),
        "nope": s.softmax(0),
        "local": s.masked_fill(d >= 64, -math.inf).softmax(0),
        "alibi": (s - slope * d).softmax(0),
        "ssmax-rope": (s * math.log(n) / math.log(256)).softmax(0),
        "off-by-one": s.exp() / (1 + s.exp().sum()),
        "sigmoid": (s - slope * d - math.log(n)).sigmoid(),
        "forgetting": (s + d * math.log(0.5)).softmax(0),
    }
    for name, p in expected.items():
        torch.testing.assert_close(get_weights(name, n), p, rtol=1e-5, atol=1e-12, msg=name)
    r, w = (getattr(BLOCKS["screening"](CONFIG), f)()[head].item() for f in ("acceptance", "reach"))
    alpha = (1 - (1 - s / 6) / r).relu().square() * softmask(-d, torch.tensor(w))
    p = get_weights("screening", n)
    torch.testing.assert_close(p, alpha, rtol=1e-4, atol=1e-9)
    assert torch.equal(p == 0, (s / 6 <= 1 - r) | (d >= w))


def test_what_the_figure_shows_of_each_mechanism():
    """(match of 64, of 1,024), zeros of 1,024, totals without a match."""
    seen = {name: mechanisms.summarize(name) for name in TITLES}
    kept = {name for name, (match, _, _) in seen.items() if match[1] > 0.9 * match[0] > 0.1}
    assert kept == {"local", "entmax", "selective", "screening"}
    assert {name for name, (match, _, _) in seen.items() if match[1] < 1e-3} == {
        "stick-breaking", "forgetting"}
    assert {name for name, (_, zeros, _) in seen.items() if zeros > 1} == {
        "local", "entmax", "screening"}
    assert seen["stick-breaking"][1] == 1              # the query's own key, never an underflow
    free = {name for name, (_, _, totals) in seen.items() if abs(totals[0] - 1) > 1e-4}
    assert free == {"off-by-one", "sigmoid", "screening"}
    assert max(seen["off-by-one"][2]) < 1


def test_a_product_that_underflows_is_no_zero():
    p = torch.tensor([0.0, 1e-3, 0.0, 1e-250, 0.0], dtype=torch.float64)
    assert is_zero(p).tolist() == [True, False, True, False, False]


class Softpick(Scored):
    """A reader's thirteenth: weights that may all be 0, and a matrix of its own."""

    def __init__(self, config, dtype=None, number=1):
        super().__init__(config, dtype, number)
        self.W_new = torch.nn.Parameter(torch.full((2, 2), math.nan))

    def weights(self, s, d):
        e = s.exp() - 1
        return e.relu() / (e.abs().sum(-1, keepdim=True) + self.W_new.sum())


@needs_matplotlib
def test_a_thirteenth_is_drawn_when_it_is_named(call, monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(BLOCKS, "softpick", Softpick)
    call(mechanisms, "--names", "softpick", "screening", "--out", "a/weights.png")
    names = [cells[0] for cells in cells_of(capsys)]
    assert names[-3:-1] == ["softpick", "screening"]
    assert (tmp_path / "a/weights.png").exists()
    with pytest.raises(UsageError, match="softpic: use softmax, or one of qknorm, nope"):
        call(mechanisms, "--names", "softpic")


@needs_matplotlib
def test_without_names_the_twelve_are_drawn(call, tmp_path, capsys):
    call(mechanisms)
    assert [cells[0] for cells in cells_of(capsys)][2:-1] == [*TITLES]
    assert (tmp_path / "out/mechanism_weights.png").exists()
