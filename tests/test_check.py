"""Tests of support/check.py and lab/check.py: what is wrong is found, and nothing else."""
import copy
import math
import random
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import multiscreen as ms
from lab import check as command
from lab import perplexity, sample
from lab.baselines import ablations, attention, transformer
from multiscreen import GatedScreeningTiles
from support import check, fast, windowed
from support.models import build_model
from support.run import load_checkpoint
from tests.helpers import ROOT, fit, moved_model, run
from tests.inputs import needs_interpreter

SIZES = {"psi": 3, "N_L": 2, "vocab_size": 50}
BLOCK = "transformer:2,2,24"
softmask = ms.softmask                                 # as it is without an edit


def model_of(tiles):
    torch.manual_seed(0)
    return build_model(f"multiscreen:{__name__}.{tiles.__name__}", SIZES)


# ------------------------------------------------------------------------------- what is right

def rows_of_ticks():
    """(model, the cells of its row) in the table of docs/mechanisms.md, for each name in it."""
    text = (ROOT / "docs/mechanisms.md").read_text()
    table = text.split("| no competing keys |")[1].split("\n\n")[0]
    for line in table.splitlines()[2:]:
        names, *cells = line.strip("| ").split(" | ")
        for name in re.findall("`(.+?)`", names):
            if not name.startswith("multiscreen"):
                name = f"{BLOCK}:{name}".removesuffix(":transformer")
            yield name, cells


@pytest.mark.parametrize("name, cells", list(rows_of_ticks()))
def test_the_table_of_absolute_relevance_is_what_the_command_finds(name, cells):
    torch.manual_seed(0)
    assert list(command.absolute(build_model(name, SIZES))[0].values()) == cells


class Unbounded(attention.Scored):
    def weights(self, s, d):
        return (0.01 * s).relu()                       # below 1 as long as W_Q and W_K are small


def test_weights_that_grow_with_the_scores_are_not_bounded():
    model = build_model(f"{BLOCK}:{__name__}.Unbounded", SIZES)
    ticks, reasons = command.absolute(model)
    assert list(ticks.values()) == ["NO", "yes", "yes", "yes", "yes"]
    assert list(reasons) == ["bounded"]


class Overflows(attention.Scored):
    def weights(self, s, d):
        return s.exp() / s.exp().sum(-1, keepdim=True)


class Threes(attention.Scored):
    def weights(self, s, d):
        return 3.0 * (s > 0)


@pytest.mark.parametrize("block, why", [(Overflows, "a weight is nan"), (Threes, "a weight is 3")])
def test_the_reason_for_a_no_has_the_number_that_was_found(block, why, capsys):
    name = f"{BLOCK}:{__name__}.{block.__name__}"
    command.check_models({name: build_model(name, SIZES)})
    assert re.search(f"{name}, bounded: NO, .*{why}\n", capsys.readouterr().out)


def test_the_table_has_all_mechanisms_and_ablations():
    names = {name for name, _ in rows_of_ticks()}
    assert {f"multiscreen:{word}" for word in ablations.VARIANTS} <= names
    tuned = {"alibi-steep", "forgetting-late", "screening-wide", "screening-slow"}
    assert {f"{BLOCK}:{word}" for word in {*attention.VARIANTS} - tuned} <= names


@pytest.mark.parametrize("name", [
    *(f"multiscreen:{word}" for word in ablations.VARIANTS),
    *(f"{BLOCK}:{word}" for word in attention.VARIANTS)])
def test_no_model_here_is_warned_of(name, capsys):
    model = moved_model(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    screen = model.screen
    check.warn(model)
    assert check.faults(model, 64, gradients=True) == {}
    assert capsys.readouterr().out == ""
    assert model.training and model.screen is screen
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])


@pytest.mark.parametrize("name", ["text", "retrieval"])
def test_the_trained_models_keep_everything(name):
    model, *_ = load_checkpoint(ROOT / f"models/{name}.pt")
    assert check.faults(model, check.LONG, gradients=True) == {}


class Dropout(GatedScreeningTiles):
    def gate(self, x):
        return F.dropout(super().gate(x), 0.2, self.training)


class LowRank(GatedScreeningTiles):
    """B is 0 at first, so A gets no gradient before the first step."""

    def initialize(self):
        super().initialize()
        E, H, V = self.W_G.shape
        self.A, self.B = nn.Parameter(torch.randn(E, 4)), nn.Parameter(torch.zeros(4, H, V))

    def gate(self, x):
        return super().gate(x) * (1 + self.project(x @ self.A, self.B))


class ExtraColumn(GatedScreeningTiles):
    def screening(self, x, screen, cache=None):
        def own(q, k, v, w, r, i0=0):
            h = screen(q, k, F.pad(v, (0, v.shape[-1]), value=1.0), w, r, i0)
            return h[..., : v.shape[-1]] / (1 + h[..., -1:]).sqrt()

        return super().screening(x, own, cache)


@pytest.mark.parametrize("tiles", [Dropout, LowRank, ExtraColumn])
def test_classes_as_one_writes_them_keep_everything(tiles):
    model = model_of(tiles)
    fast.choose_screen(model)
    assert check.faults(model, check.LONG, gradients=True) == {}


# ------------------------------------------------------------------------------- what is wrong

class NextShare(GatedScreeningTiles):
    """A learned share, 0 at first, of the gate of the next position."""

    def initialize(self):
        super().initialize()
        self.share = nn.Parameter(torch.zeros(self.config.N_H, 1, 1))

    def gate(self, x):
        g = super().gate(x)
        return g + self.share * torch.cat([g[:, :, 1:], g[:, :, -1:]], 2)


class MinusMean(GatedScreeningTiles):
    def gate(self, x):
        g = super().gate(x)
        return g - g.mean(2, keepdim=True)


class OverRms(GatedScreeningTiles):
    def gate(self, x):
        g = super().gate(x)
        return g / g.square().mean(2, keepdim=True).sqrt()


class TokenBefore(GatedScreeningTiles):
    def gate(self, x):
        return super().gate(0.5 * (x + F.pad(x, (0, 0, 1, 0))[:, :-1]))


class CausalMean(GatedScreeningTiles):
    def gate(self, x):
        n = torch.arange(1, x.shape[1] + 1)[:, None]
        return super().gate(x.cumsum(1) / n)


class NoCache(GatedScreeningTiles):
    """A `screening` of its own, without cache and screen."""

    def screening(self, x, screen, cache=None):
        q, k, v = (self.project(x, W) for W in (self.W_Q, self.W_K, self.W_V))
        return self.bound((q @ k.transpose(-2, -1)).relu().tril() @ v) + self.s_r.sum()


class BatchMean(GatedScreeningTiles):
    def gate(self, x):
        g = super().gate(x)
        return g - g.mean(0, keepdim=True)


class MeansOfBlocks(GatedScreeningTiles):
    """Blocks of 12 tokens see no others."""

    def gate(self, x):
        g, block = super().gate(x), torch.arange(x.shape[1]) // 12
        are_same = (block == block[:, None]).to(g)
        return g - are_same / are_same.sum(1, keepdim=True) @ g


class NextButTheLast(GatedScreeningTiles):
    """A position sees the next one, unless that is the last."""

    def gate(self, x):
        return super().gate(x + F.pad(x[:, 1:-1], (0, 0, 0, 2)))


class BatchSum(GatedScreeningTiles):
    """Only later sequences of a batch depend on others."""

    def gate(self, x):
        return super().gate(x.cumsum(0))


class OverBatchSize(GatedScreeningTiles):
    def gate(self, x):
        return super().gate(x) / len(x)


class LaterInTraining(GatedScreeningTiles):
    def gate(self, x):
        if self.training:
            x = x - x.mean(1, keepdim=True)
        return super().gate(x)


class OthersInTraining(GatedScreeningTiles):
    def gate(self, x):
        if self.training:
            x = x.cumsum(0)
        return super().gate(x)


class StatisticsOfBatch(GatedScreeningTiles):
    def initialize(self):
        super().initialize()
        self.norm = nn.BatchNorm1d(self.config.d_E)

    def gate(self, x):
        return super().gate(self.norm(x.transpose(1, 2)).transpose(1, 2))


class NotFinite(GatedScreeningTiles):
    def gate(self, x):
        return super().gate(x).log()


class CountsFromFirst(GatedScreeningTiles):
    """i0 is the position of the first query: as it should be as long as no key is forgotten."""

    def screening(self, x, screen, cache=None):
        start = 0 if cache is None else cache.end

        def own(q, k, v, w, r, i0=0):
            return screen(q, k, v, w, r, start)

        return super().screening(x, own, cache)


class Unused(GatedScreeningTiles):
    def initialize(self):
        super().initialize()
        self.s_p = nn.Parameter(torch.zeros(self.config.N_H))


class Infinite(Unused):
    def gate(self, x):
        return super().gate(x) + (0 * self.s_p[:, None, None]).abs().sqrt()


class InfiniteAtFirst(Unused):
    """The gradient of s_p is infinite where s_p is 0, as it is at first."""

    def gate(self, x):
        return super().gate(x) * (1 + self.s_p[:, None, None].abs().sqrt())


class SeesBeyond(GatedScreeningTiles):
    """A `screening` of its own, with a cache that it tells of a window, and without the window."""

    def screening(self, x, screen, cache=None):
        q, k, v = (self.project(x, W) for W in (self.W_Q, self.W_K, self.W_V))
        if cache is not None:
            k, v = cache.append(k, v, torch.full_like(self.s_w, 5.0))
        s = (q @ k.transpose(-2, -1)).relu().tril(k.shape[2] - q.shape[2])
        return self.bound(s @ v) + 0 * (self.s_w + self.s_r).sum()


@pytest.mark.parametrize("tiles, promise, says", [
    (NextShare, "causal", "later tokens"), (MinusMean, "causal", "later tokens"),
    (OverRms, "causal", "later tokens"), (MeansOfBlocks, "causal", "later tokens"),
    (NextButTheLast, "causal", "later tokens"), (TokenBefore, "cached", "decoding with a cache"),
    (CausalMean, "cached", "decoding with a cache"), (NoCache, "cached", "decoding with a cache"),
    (SeesBeyond, "cached", "decoding with a cache"),
    (CountsFromFirst, "cached", "decoding with a cache"),
    (BatchMean, "alone", "the others of its batch"), (BatchSum, "alone", "the others of its batch"),
    (OverBatchSize, "alone", "the others of its batch"),
    (LaterInTraining, "causal", "^in training, the output at a token depends on later tokens"),
    (OthersInTraining, "alone", "^in training, the logits of a sequence depend on the others"),
    (StatisticsOfBatch, "causal", "^in training, "), (StatisticsOfBatch, "alone", "^in training, "),
    (NotFinite, "finite", "the logits are not finite"),
    (Unused, "trained", "layers.0.s_p gets no gradient, .*and 1 more"),
    (Infinite, "trained", "the gradient of layers.0.s_p is not finite"),
    (InfiniteAtFirst, "trained", "the gradient of layers.0.s_p is not finite")])
def test_each_fault_breaks_its_promise(tiles, promise, says, capsys):
    model = model_of(tiles)
    fast.choose_screen(model)
    found = check.faults(model, check.LONG, gradients=True)
    assert promise in found
    # Two do not use all parameters, and one breaks two promises.
    if tiles not in (NoCache, SeesBeyond, StatisticsOfBatch):
        assert list(found) == [promise]
    check.warn(model)
    said = capsys.readouterr().out
    if promise != "trained":
        assert found[promise] in said                  # in a short text, too
        assert said.startswith("warning: ") and said.count("\n") == len(found.keys() - {"trained"})
    assert re.search(says, found[promise] + said)


@pytest.mark.parametrize("edit, wanted", [
    (lambda d, w: torch.ones_like(d / w), ["causal"]),             # no mask at all
    (lambda d, w: softmask(-d.abs(), w), ["causal"]),
    (lambda d, w: softmask(d, w) * (d < 0), [])])      # not even itself: it may
def test_an_edited_mask(monkeypatch, edit, wanted):
    monkeypatch.setattr(ms, "softmask", edit)
    torch.manual_seed(0)
    assert list(check.faults(build_model("multiscreen", SIZES))) == wanted


def test_a_leak_that_reaches_far_is_seen_in_a_long_text():
    class Far(GatedScreeningTiles):
        def gate(self, x):
            return super().gate(x + F.pad(x, (0, 0, 0, 100))[:, 100:])

    model = ms.Multiscreen(ms.Config(**SIZES), tiles=Far)
    assert check.faults(model) == {}
    assert list(check.faults(model, check.LONG)) == ["causal"]


def test_several_tokens_at_once_are_decoded_after_others_in_a_long_text():
    class OneAtATime(GatedScreeningTiles):
        def screening(self, x, screen, cache=None):
            def own(q, k, v, w, r, i0=0):
                if i0 > 0:
                    i0 = k.shape[2] - 1
                return screen(q, k, v, w, r, i0)

            return super().screening(x, own, cache)

    model = ms.Multiscreen(ms.Config(**SIZES), tiles=OneAtATime)
    assert check.faults(model) == {}
    assert list(check.faults(model, check.LONG)) == ["cached"]


def test_a_layer_that_differs_from_the_first_four_is_seen():
    class Sixth(transformer.Block):
        def __init__(self, config, dtype=None, number=1):
            super().__init__(config, dtype, number)
            self.is_sixth = number == 6

        def mix(self, q, k, v, i0, screen):
            h = super().mix(q, k, v, i0, screen)
            if self.is_sixth:
                h = h + F.pad(h, (0, 0, 0, 1))[:, :, 1:]
            return h

    model = transformer.Transformer(transformer.get_config("8,2,24", vocab_size=50), block=Sixth)
    assert list(check.faults(model)) == ["causal"]


def test_models_that_differ_in_one_layer_are_told_apart_although_few_pairs_are_alive():
    torch.manual_seed(12)
    model = ms.Multiscreen(ms.Config(2, 257))
    model.layers[1] = WithHelper(model.config)
    other = ms.Multiscreen(model.config)
    other.load_state_dict(model.state_dict())
    assert not check.are_same(model, other)
    assert check.are_same(model, copy.deepcopy(model))


def test_a_cache_that_fails_is_a_broken_promise():
    class Fails(GatedScreeningTiles):
        def screening(self, x, screen, cache=None):
            return super().screening(x, screen) + (cache.k if cache else 0.0)

    model = ms.Multiscreen(ms.Config(**SIZES), tiles=Fails)
    assert check.faults(model)["cached"].startswith("decoding with a cache fails (TypeError: ")


def test_a_large_model_is_tried_in_part():
    model = ms.Multiscreen(ms.Config(psi=2, N_L=9, vocab_size=5000))
    part = check.moved_copy(model, torch.float64)
    assert len(part.layers) == 4 and part.W_E.shape == (1000, 4)
    assert len(model.layers) == 9 and model.W_E.shape == (5000, 4)


class OnlyFloat32(GatedScreeningTiles):
    def gate(self, x):
        return torch.tanh(torch.einsum("bte,ehd->bhtd", x.float(), self.W_G))


class OnlyFloat32AndBefore(TokenBefore):
    def gate(self, x):
        return super().gate(x.float())


class Draws(GatedScreeningTiles):
    def bound(self, h):
        return super().bound(h) * random.random()


def test_a_layer_that_knows_only_float32_is_tried_in_float32():
    assert check.faults(model_of(OnlyFloat32)) == {}
    assert list(check.faults(model_of(OnlyFloat32AndBefore))) == ["cached"]


def test_a_layer_that_draws_random_numbers_cannot_be_tried_and_the_next_ones_are_as_without():
    model = model_of(Draws)
    random.seed(0)
    assert list(check.faults(model)) == ["random"]
    again = random.random()
    random.seed(0)
    assert again == random.random()


def test_an_error_of_the_model_is_raised_as_it_is(capsys):
    class Mistake(GatedScreeningTiles):
        def gate(self, x):
            raise AttributeError("W_X")

    model = ms.Multiscreen(ms.Config(**SIZES), tiles=Mistake)
    with pytest.raises(AttributeError, match="W_X"):
        check.warn(model)
    with pytest.raises(AttributeError, match="W_X"):
        command.check_models({"mine": model})
    assert capsys.readouterr().out.startswith("mine fails on 2 x 256 random tokens")


@pytest.mark.parametrize("seed", range(4))
def test_the_smallest_model_that_sees_the_next_token_is_found(monkeypatch, seed):
    """Its tiles reject almost all keys, whatever the seed."""
    monkeypatch.setattr(ms, "softmask", lambda d, w: softmask(torch.where(d == 1, -1, d), w))
    torch.manual_seed(seed)
    assert "causal" in check.faults(build_model("multiscreen", {"psi": 2, "vocab_size": 257}))


# ------------------------------------------------------------------------------- a class of yours

class Plain(GatedScreeningTiles):
    own_screen = ms.screen                             # without staticmethod


def test_a_screen_of_a_class_is_a_function_of_it_and_not_a_method():
    model = model_of(Plain)
    assert fast.choose_screen(model).startswith("screening by multiscreen.screen")
    assert check.faults(model) == {}


class Misspelt(GatedScreeningTiles):
    def gates(self, x):
        return 0.0


class Nothing(ablations.RoPE):
    """No method at all."""


class MisspeltWeight(attention.Scored):
    def weight(self, s, d):
        return s.sigmoid()


class WithHelper(GatedScreeningTiles):
    """`gated` is used, so it is not a misspelt `gate`."""

    def gated(self, x):
        return super().gate(x) ** 2

    def gate(self, x):
        return self.gated(x)


class Helped(GatedScreeningTiles):
    own_screen = staticmethod(ms.screen)
    sharpness = 3.0


@pytest.mark.parametrize("layer, said", [
    (Misspelt, ["gates overrides nothing: is it gate?",
                "Misspelt overrides no method of GatedScreeningTiles, so it trains as "
                "GatedScreeningTiles does"]),
    (Nothing, ["Nothing overrides no method of RoPE, so it trains as RoPE does"]),
    (MisspeltWeight, ["weight overrides nothing: is it weights?", "MisspeltWeight overrides no "
                      "method of Scored, so it trains as Scored does"]),
    *((layer, []) for layer in (Helped, WithHelper, TokenBefore, GatedScreeningTiles,
                                transformer.Block, *ablations.VARIANTS.values(),
                                *attention.VARIANTS.values()))])
def test_a_class_that_overrides_nothing_is_named_with_what_it_may_mean(layer, said):
    assert check.unused(layer) == said


# ------------------------------------------------------------------------------- the command

@pytest.mark.parametrize("flags, code", [
    ([], 0), (["--model", "multiscreen:nope", BLOCK], 0),
    (["--model", f"multiscreen:{__name__}.TokenBefore"], 1),
    (["--model", f"multiscreen:{__name__}.Nothing"], 1),
    (["--model", f"multiscreen:{__name__}.CountsFromFirst"], 1),
    (["--model", f"multiscreen:{__name__}.Draws"], 1)])
def test_the_command_prints_a_row_for_each_model_and_its_exit_code_says_whether_all_is_kept(
        call, capsys, flags, code):
    with pytest.raises(SystemExit) as e:
        call(command, *flags)
    said = capsys.readouterr().out
    assert e.value.code == code
    ticks = {0: "yes +yes", 1: "yes +NO"}[code]
    if flags and flags[-1].endswith("Nothing"):
        ticks = "yes +yes"
    if flags and flags[-1].endswith("Draws"):
        ticks = "- +-"
    for name in flags[1:] or ["multiscreen"]:
        assert re.search(f"^ *{re.escape(name)} +{ticks} ", said, re.M)


def test_training_warns_at_its_start_and_at_its_end(tmp_path, capsys):
    fit(tmp_path / "out", "--steps", "1", "--model", f"multiscreen:{__name__}.MinusMean")
    said = capsys.readouterr().out
    assert said.count("\nwarning: the output at a token depends on later") == 2
    fit(tmp_path / "right", "--steps", "1")
    assert "warning" not in capsys.readouterr().out
    fit(tmp_path / "nothing", "--steps", "1", "--model", f"multiscreen:{__name__}.Nothing")
    assert capsys.readouterr().out.count("warning: Nothing overrides no method") == 1


def test_what_decodes_a_trained_model_warns(tmp_path, capsys, call):
    fit(tmp_path / "out", "--steps", "1", "--model", f"multiscreen:{__name__}.TokenBefore")
    for tool, flags in ((sample, ["--tokens", 1]), (perplexity, ["--length", 40])):
        capsys.readouterr()
        call(tool, "--ckpt", tmp_path / "out/ckpt.pt", *flags)
        assert "warning: decoding with a cache" in capsys.readouterr().err


@pytest.mark.slow
def test_the_check_does_not_load_the_compiler():
    """Dynamo takes two seconds, and nobody compiles here."""
    code = ("import sys\nfrom support.models import build_model\nfrom support import check, fast\n"
            "model = build_model('multiscreen', {'psi': 2, 'vocab_size': 9})\n"
            "fast.choose_screen(model); check.warn(model)\n"
            "print('torch._dynamo' in sys.modules)")
    assert run("-c", code).stdout == "False\n"


# ------------------------------------------------------------------------------- a screen of yours

def right(q, k, v, w, r, i0=0):
    return ms.screen(q, k, v, w, r, i0)


def wide(q, k, v, w, r, i0=0):
    return ms.screen(q, k, v, 1.05 * w, r, i0)


def forgets_i0(q, k, v, w, r, i0=0):
    return ms.screen(q, k, v, w, r)


def constant_w(q, k, v, w, r, i0=0):
    return ms.screen(q, k, v, w.detach(), r, i0)


def finite_windows(q, k, v, w, r, i0=0):
    return ms.screen(q, k, v, w, r, i0) * w.isfinite()[:, None, None]


def nan_for_one_query(q, k, v, w, r, i0=0):
    h = ms.screen(q, k, v, w, r, i0)
    if q.shape[2] == 1:
        h = h * math.nan
    return h


def only_even(q, k, v, w, r, i0=0):
    if q.shape[2] % 2:
        raise ValueError("T must be even")
    return ms.screen(q, k, v, w, r, i0)


@pytest.mark.parametrize("screen, says", [
    (right, None), (windowed.screen_windowed, None),
    (wide, "h, dq, dk, dv, dw, dr: too far off"), (forgets_i0, "h, dq, dk, dv, dw"),
    (finite_windows, "h, dq, dk, dv, dr: too far off"),
    (nan_for_one_query, "h, dq, dk, dv, dw, dr: too far off"),
    (constant_w, "\ndw: too far off"), (only_even, "fails with 1 queries.*T must be even")])
def test_a_screen_of_your_own_is_compared_in_value_and_gradients(screen, says, capsys):
    is_right = command.check_screen(f"{screen.__module__}.{screen.__name__}")
    said = capsys.readouterr().out
    assert is_right == (says is None)
    assert re.search(says or "worst error", said)
    if screen is right:                                # it is multiscreen.screen, so it errs alike
        columns = re.findall(r"^ *(?:h|d[qkvwr]) +(\S+) +(\S+) ", said, re.M)
        assert len(columns) == 6 and all(error == own for error, own in columns)


def has_no_gradient(q, k, v, w, r, i0=0):
    if q.requires_grad:
        raise NotImplementedError("backward")
    return ms.screen(q, k, v, w, r, i0)


def test_a_screen_without_gradients_is_compared_in_value(capsys):
    assert command.check_screen(f"{__name__}.has_no_gradient")
    assert "its gradients cannot be computed on this device" in capsys.readouterr().out


@needs_interpreter
def test_the_kernel_is_right_in_two_cases():
    assert command.check_screen("screening_triton.screen", 2)      # of one query, one with a cache
