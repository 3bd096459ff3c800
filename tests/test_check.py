"""lab/check.py: wrong models are named, right ones pass."""
import os
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import multiscreen
import train
from lab import ablations, check
from lab.transformer import Block, Transformer, distances
from multiscreen import GatedScreeningTiles, KeyCache, Multiscreen, mipe, mipe_angle

PROMISES = {promise.__name__: promise for promise in check.PROMISES}


# ------------------------------------------------------------------- wrong: layers

class Gate(GatedScreeningTiles):
    """A layer whose gate is changed by `change`."""
    def gate(self, x):
        return self.change(super().gate(x))


class LeakFar(Gate):
    """Beyond 512 tokens a gate is that of the next token."""
    def change(self, g):
        if g.shape[2] <= 512:
            return g
        return torch.cat([g[:, :, :512], g[:, :, 513:], g[:, :, -1:]], 2)


class DeadGate(GatedScreeningTiles):
    """ReLU of zeros: nothing gets a gradient."""
    def initialize(self):
        super().initialize()
        nn.init.zeros_(self.W_G)

    def gate(self, x):
        return F.relu(self.project(x, self.W_G))


class RunMean(GatedScreeningTiles):
    """A running mean over all sequences and tokens, which a state dict does not hold."""
    def initialize(self):
        super().initialize()
        self.register_buffer("m", torch.zeros(self.config.d_E), persistent=False)

    def forward(self, x, screen, cache=None):
        if self.training:
            self.m = 0.9 * self.m + 0.1 * x.detach().mean((0, 1))
        return super().forward(x - self.m, screen, cache)


class TrainLeak(Gate):
    """In train mode a gate is a little that of the next token."""
    def change(self, g):
        return g + 0.1 * torch.cat([g[:, :, 1:], g[:, :, -1:]], 2) if self.training else g


class Detached(GatedScreeningTiles):
    """r gets no gradient."""
    @property
    def r(self):
        return torch.sigmoid(self.s_r.detach())


class NoEffect(GatedScreeningTiles):
    """A matrix whose gradient is 0: weight decay alone would move it."""
    def initialize(self):
        super().initialize()
        self.W_U = nn.Parameter(torch.randn(4, 4))

    def gate(self, x):
        return super().gate(x) + 0 * self.W_U.sum()


class MixAbove(Gate):
    """In train mode a gate is mixed with that of the sequence before."""
    def change(self, g):
        return torch.cat([g[:1], g[1:] + 0.05 * g[:-1]]) if self.training else g


class ByLength(Gate):
    """A gate is larger in a longer text."""
    def change(self, g):
        return g * (1 + g.shape[2] / 1000)


class Infinite(Gate):
    """The root's slope at 0 is infinite."""
    def change(self, g):
        return g + (self.s_O - self.s_O.detach()).abs().sqrt()[:, None, None]


class LeakInBlocks(Gate):
    """Within each whole block, as long as a piece of a prompt, a gate is that of the next token."""
    def change(self, g):
        size = Multiscreen.tokens_at_once
        n = g.shape[2] // size * size
        blocks = g[:, :, :n].unflatten(2, (-1, size))
        blocks = torch.cat([blocks[:, :, :, 1:], blocks[:, :, :, -1:]], 3)
        return torch.cat([blocks.flatten(2, 3), g[:, :, n:]], 2)


class WidePieces(GatedScreeningTiles):
    """Tiles with wide windows have positions, too, which count from 0 in each piece of a text."""
    def encode(self, x_bar, i, w):
        wide = (w >= self.config.w_th)[:, None]
        angle = mipe_angle(i, w, self.config.w_th)
        return mipe(x_bar, torch.where(wide, 0.01 * (i - i[0]), angle))


class LeakAtEnds(Gate):
    """The last gate of each block of 100 tokens is that of the next token."""
    def change(self, g):
        g = g.clone()
        g[:, :, 99:-1:100] = g[:, :, 100::100]
        return g


class RandomScale(Gate):
    """A random number that no state dict holds."""
    def initialize(self):
        super().initialize()
        self.scale = random.random()

    def change(self, g):
        return g * self.scale


class KeepsLast(GatedScreeningTiles):
    """The last token of a text that was decoded is added to the next text."""
    last = 0.0

    def screening(self, x, screen, cache=None):
        u = super().screening(x + (self.last if cache is not None else 0.0), screen, cache)
        if cache is not None:
            self.last = x[:, -1:]
        return u


class TwoRows(GatedScreeningTiles):
    """Decodes no text alone."""
    def screening(self, x, screen, cache=None):
        if cache is not None:
            x = x.squeeze()
            x = x[:, None] if x.ndim == 2 else x
        return super().screening(x, screen, cache)


# ------------------------------------------------------------------- wrong: models

class Smoothed(Multiscreen):
    def nats(self, x, t, head):
        return F.cross_entropy(self.logits(x, head), t, reduction="none", label_smoothing=0.1)


class Cut(KeyCache):
    def append(self, k, v, w):
        k, v = super().append(k, v, w)
        self.k, self.v = k[:, :, -1024:], v[:, :, -1024:]
        return self.k, self.v


class CacheCut(Multiscreen):
    """Keeps 1,024 keys, whatever the windows are."""
    def new_caches(self):
        return [Cut() for _ in self.layers]


class NoCaches(Multiscreen):
    def hidden(self, tokens, caches=None):
        return super().hidden(tokens, caches if tokens.shape[1] > 1 else None)


class CachedNaN(Multiscreen):
    """After 40 tokens logits are NaN, only with caches."""
    def hidden(self, tokens, caches=None):
        x = super().hidden(tokens, caches)
        return x * np.nan if caches and caches[0].end > 40 else x


class Shifted(Multiscreen):
    """Single losses are those of the token before; their mean is right."""
    def loss(self, tokens, targets, reduction="mean"):
        loss = super().loss(tokens, targets, reduction)
        return loss.roll(1, 1) if reduction == "none" else loss


class SumOverT(Multiscreen):
    """The mean is one over the batch alone."""
    def loss(self, tokens, targets, reduction="mean"):
        n = super().loss(tokens, targets, "none")
        return n if reduction == "none" else n.sum(1).mean()


class ChangesTokens(Multiscreen):
    """Clamps the tokens in place, and with them the targets."""
    def embed(self, tokens):
        return super().embed(tokens.clamp_(max=150))


class SecondBest(Multiscreen):
    """Its own generate, without caches, takes the token before the last as the last."""
    @torch.no_grad()
    def generate(self, tokens, n, **options):
        T = tokens.shape[1]
        for _ in range(n):
            z = self(tokens)[:, max(tokens.shape[1] - 2, 0)]
            tokens = torch.cat([tokens, z.argmax(-1, keepdim=True)], 1)
        return tokens[:, T:]


WRONG = {DeadGate: "moves", NoEffect: "moves", Detached: "moves", Infinite: "moves",
         RandomScale: "is_its_weights", RunMean: "is_its_weights", KeepsLast: "is_its_weights",
         Smoothed: "is_cross_entropy", Shifted: "is_cross_entropy", SumOverT: "is_cross_entropy",
         ChangesTokens: "is_cross_entropy", LeakFar: "is_causal", LeakAtEnds: "is_causal",
         TrainLeak: "is_causal", ByLength: "is_causal", MixAbove: "is_alone", TwoRows: "decodes",
         NoCaches: "decodes", SecondBest: "decodes", LeakInBlocks: "decodes",
         WidePieces: "decodes", CachedNaN: "decodes"}


# ------------------------------------------------------------------------- right

class PassedOn(GatedScreeningTiles):
    """Softmax with ALiBi, which needs no r."""
    def screening(self, x, screen, cache=None):
        def alibi(q, k, v, w, r, i0=0):
            i, j = torch.arange(i0, i0 + q.shape[2])[:, None], torch.arange(k.shape[2])
            a = (q @ k.mT - 0.05 * (i - j)).masked_fill(j > i, -torch.inf).softmax(-1)
            return a @ v
        return super().screening(x, alibi, cache)


class ZerosTwice(GatedScreeningTiles):
    """A change of the gate by A B with B = 0, and W_O = 0: A moves at the third step."""
    def initialize(self):
        super().initialize()
        nn.init.zeros_(self.W_O)
        self.A = nn.Parameter(torch.randn(self.config.d_V, 4))
        self.B = nn.Parameter(torch.zeros(4, self.config.d_V))

    def gate(self, x):
        g = super().gate(x)
        return g + g @ self.A @ self.B


class SparseDropout(Gate):
    """Dropout in some tokens only: the others' numbers depend on how many these are."""
    def change(self, g):
        g, some = g.clone(), g[..., 0] > 0
        g[some] = F.dropout(g[some], 0.1, self.training)
        return g


class NumpyNoise(Gate):
    """Noise of two more generators in training."""
    def change(self, g):
        if not self.training:
            return g
        return g * (1 + 0.01 * np.random.randn() + 0.01 * random.random())


class Urandom(Gate):
    """Noise in training that no seed repeats."""
    def change(self, g):
        return g * (1 + os.urandom(1)[0] / 1000) if self.training else g


class Experts(GatedScreeningTiles):
    """One of two experts for each token: the sizes of products depend on the text."""
    def initialize(self):
        super().initialize()
        E = self.config.d_E
        self.experts = nn.ParameterList(torch.randn(E, E) / E**0.5 for _ in range(2))

    def forward(self, x, screen, cache=None):
        x = super().forward(x, screen, cache)
        flat, y = x.flatten(0, 1), torch.zeros_like(x).flatten(0, 1)
        for number, W in enumerate(self.experts):
            mine = (flat[:, 0] > 0) == (number == 0)
            y[mine] = flat[mine] @ W
        return x + y.view(x.shape).tanh()


class Amplified(Experts):
    """Its sines amplify rounding: logits in decoding differ by 2e-3 in float32."""
    def forward(self, x, screen, cache=None):
        return super().forward(x + 0.1 * (1e4 * x).sin(), screen, cache)


class Limited(Multiscreen):
    """40 learned positions, and no more."""
    def __init__(self, *a, **k):
        super().__init__(*a, **k)
        self.P = nn.Embedding(40, self.config.d_E)

    def hidden(self, tokens, caches=None):
        self.start = caches[0].end if caches else 0
        return super().hidden(tokens, caches)

    def embed(self, tokens):
        i = torch.arange(self.start, self.start + tokens.shape[1])
        return super().embed(tokens) + 0.1 * self.P(i)


class NoPast(GatedScreeningTiles):
    """Looks at no other token."""
    def screening(self, x, screen, cache=None):
        return self.project(x, self.W_V)

    def initialize(self):
        super().initialize()
        for W in (self.W_Q, self.W_K):
            W.requires_grad_(False)


RIGHT = (Multiscreen, PassedOn, ZerosTwice, SparseDropout, NumpyNoise, Urandom, Amplified, Limited,
         NoPast)
UNTRIED = {SparseDropout: {"is_causal", "is_alone"}, Urandom: {"is_causal", "is_alone"},
           Limited: {"decodes"}, NoPast: {"is_causal"}}
LENGTHS = {LeakFar: 600, LeakAtEnds: 200}


def trial_of(*flags):
    args = train.get_args(["--psi", "2", "--device", "cpu", *flags])
    return check.Trial(args, SimpleNamespace(n_vocab=257))


def answers(cls, monkeypatch):
    """{name of a promise: (answer, why if it is not yes)}"""
    monkeypatch.setattr(Multiscreen, "tokens_at_once", 16)         # 49 tokens are decoded
    length = str(LENGTHS.get(cls, 16))
    found, _ = check.answers(trial_of("--model", f"{__name__}.{cls.__name__}", "--seq-len", length))
    return {name: found[promise.__doc__] for name, promise in PROMISES.items()
            if promise.__doc__ in found}


@pytest.mark.parametrize("cls", WRONG, ids=lambda cls: cls.__name__)
def test_a_wrong_model_is_named(cls, monkeypatch):
    promises = dict.fromkeys([check.moves, PROMISES[WRONG[cls]]])
    monkeypatch.setattr(check, "PROMISES", promises)
    assert answers(cls, monkeypatch)[WRONG[cls]][0] == "NO"


@pytest.mark.parametrize("cls", RIGHT, ids=lambda cls: cls.__name__)
def test_a_right_model_passes(cls, monkeypatch):
    for name, (answer, *why) in answers(cls, monkeypatch).items():
        assert answer == ("-" if name in UNTRIED.get(cls, ()) else "yes"), f"{name}: {why}"


def test_decoding_is_tried_beyond_1024_tokens():
    found = []
    for name in ("multiscreen", f"{__name__}.CacheCut"):
        trial = trial_of("--model", name, "--seq-len", "24")
        check.moves(trial)
        found.append(check.answer(check.decodes, trial)[0])
    assert found == ["yes", "NO"]


class EvalNoise(Gate):
    """Noise in eval mode, too."""
    def change(self, g):
        return g * (1 + 0.05 * torch.randn_like(g))


def test_two_models_draw_the_same_random_numbers():
    trial = trial_of("--model", f"{__name__}.EvalNoise", "--seq-len", "24")
    check.moves(trial)                                 # else noise is lost in what layers add
    assert check.answer(check.is_cross_entropy, trial) == ("yes",)


def test_a_no_stays_if_it_cannot_be_tried_in_float64(monkeypatch):
    def promise(trial):
        """a promise"""
        raise check.Answer("-" if trial.in_float64 else "NO", "seen")

    monkeypatch.setattr(check, "PROMISES", (promise,))
    found, _ = check.answers(trial_of("--seq-len", "16"))
    assert found == {"a promise": ("NO", "seen")}


def test_a_checkpoint_is_tried_with_its_own_weights(tmp_path, capsys, monkeypatch):
    args = train.get_args(["--psi", "2", "--seq-len", "20", "--device", "cpu"])
    torch.manual_seed(0)
    model = train.build_model("multiscreen", {"psi": 2, "vocab_size": 257})
    train.save_checkpoint(tmp_path / "right.pt", model, args)
    for W in model.layers.parameters():
        W.data.fill_(torch.inf)
    train.save_checkpoint(tmp_path / "infinite.pt", model, args)
    monkeypatch.setattr(Multiscreen, "tokens_at_once", 10)
    untried = ["--model", f"{__name__}.NoPast", "--psi", "2", "--seq-len", "20", "--device", "cpu"]
    for flags, code in ((["--ckpt", f"{tmp_path}/right.pt"], 0),
                        (["--ckpt", f"{tmp_path}/infinite.pt"], 1), (untried, 0)):
        monkeypatch.setattr("sys.argv", ["check", *flags])
        with pytest.raises(SystemExit) as e:
            check.main()
        assert e.value.code == code
    assert "20 tokens" in capsys.readouterr().out


def screen(q, k, v, w, r, i0=0):
    """A screen that treats windows above 1,000 as infinite."""
    return multiscreen.screen(q, k, v, w.masked_fill(w > 1000, torch.inf), r, i0)


def test_a_kernel_is_tried_by_its_numbers():
    with pytest.raises(SystemExit, match="off by"):
        check.answers(trial_of("--kernel", __name__))


class RawScores(Block):
    """Linear attention: weights are scores, small at first, and as large as queries and keys."""
    def mix(self, q, k, v, i0, screen):
        scores = 1e-3 * (q @ k.mT).masked_fill(distances(q, k, i0) > 0, 0.0)
        return scores @ v


def raw_scores(config, dtype=None):
    return Transformer(config, dtype, RawScores)


def last_competes(config, dtype=None):
    """One layer that screens, then one whose keys compete."""
    model = Multiscreen(config, dtype)
    model.layers[-1] = ablations.Softmax(config, dtype)
    return model


# Of the conditions of absolute relevance, those that hold.
ALL = {"bounded", "no competing keys", "no length", "exact zeros", "all can be 0"}
CONDITIONS = {"multiscreen": ALL, "lab.ablations.FixedR": ALL, "lab.ablations.Softmax": {"bounded"},
              "lab.transformer.Transformer": {"bounded"},
              f"{__name__}.raw_scores": {"no competing keys", "no length"},
              f"{__name__}.last_competes": {"bounded", "exact zeros", "all can be 0"}}


@pytest.mark.parametrize("name", CONDITIONS)
def test_the_conditions_of_absolute_relevance(name):
    trial = trial_of("--model", name, "--layers", "2", "--tiles", "2", "--d-E", "16")
    check.moves(trial)
    found = {condition.partition(":")[0] for condition, (answer, _)
             in check.conditions(trial).items() if answer == "yes"}
    assert found == CONDITIONS[name]


def test_nan_is_equal_to_nothing():
    nan = torch.full((3,), torch.nan)
    with pytest.raises(check.Answer):
        check.compare(nan, nan, "losses")
