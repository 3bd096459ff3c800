"""Tests of support/choose.py: an edit acts everywhere, and only a screen that agrees is used."""
import copy
import json
import math
import re
import shutil
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

import multiscreen as ms
import screening_triton as fused
import train
from lab.baselines import ablations, attention
from multiscreen import Config, Multiscreen
from support import choose
from support.checkpoint import load_checkpoint
from support.choose import (
    CASES,
    NEARBY,
    WIDE,
    get_screen,
    revealing_inputs,
)
from support.cli import UsageError, products_dtype
from support.models import build_model
from support.windowed import screen_windowed
from tests import DEVICE
from tests.helpers import ROOT, SMALL, TEXT, needs_kernel, run

CPU, BF16 = torch.device("cpu"), torch.bfloat16


def of_sizes(dtype=None, **sizes):
    return Multiscreen(Config(**({"psi": 4, "vocab_size": 7} | sizes)), dtype)


# ------------------------------------------------------------------- an edit of multiscreen.py

# Edits a user might make: (old text, new text).
EDITS = {
    "nothing": ("", ""),
    "window": ("clamp(max=80.0).exp() + 1", "clamp(max=80.0).exp() + 3"),
    "trim": (".relu().square()", ".relu()"),
    "softmask without an edge": (
        "torch.where(inside, 0.5 * (torch.cos(math.pi * (d / w)) + 1), 0.0)",
        "torch.where(d <= 0, torch.exp(d.clamp(max=0) / w), 0.0)"),
    "screen": ("    return (alpha_d @ v.to(dtype)).to(v.dtype)",
               "    alpha_d = alpha_d / (alpha_d.sum(-1, keepdim=True) + 0.1)\n"
               "    return (alpha_d @ v.to(dtype)).to(v.dtype)"),
    "a query's own value": (
        "    return (alpha_d @ v.to(dtype)).to(v.dtype)",
        "    return (alpha_d @ v.to(dtype)).to(v.dtype) + v[:, :, i0 : i0 + q.shape[2]]"),
    "gate": ("return torch.tanh(F.silu(self.project(x, self.W_G)))", "return 1.0"),
    "embed": ("self.s_E.exp() * unit(F.embedding(tokens, self.W_E))",
              "self.s_E.exp() * F.embedding(tokens, self.W_E)"),
    "forward": ("return x + product(", "return x + 0.5 * product("),
    "head": ("self.s_F.exp() * unit(self.W_E)", "self.s_F.exp() * self.W_E"),
    "encode": ("return mipe(x_bar, mipe_angle(i, w, self.config.w_th))", "return x_bar"),
    "bound": ("return tanh_norm(h)", "return h"),
    "project": ('        return product("bte,ehd->bhtd"',
                "        if W is self.W_K:\n            W = W[:, :1].expand_as(W)\n"
                '        return product("bte,ehd->bhtd"'),
    "screening": ("unit(self.project(x, self.W_V))", "self.project(x, self.W_V)"),
}
# Edits that screen_windowed cannot follow: the definition screens.
NOT_WINDOWED = ("softmask without an edge", "screen", "a query's own value")

# Train, load and use each edited copy, all in one process: importing torch takes longest.
USE = """if True:
    import json, os, sys, traceback
    import torch

    def use():
        import multiscreen, train
        from support import choose
        choose.CASES = choose.CASES[1:2]               # the others take longer
        multiscreen.Multiscreen.generate = lambda model, tokens, n, **flags: tokens    # no sample
        train.main(["--psi", "2", "--seq-len", "100", "--batch-size", "2", "--warmup", "1",
                    "--steps", "2", "--log-every", "1", "--device", "cpu", "--data", "text.txt",
                    "--out", "out"])
        model, _, _ = train.load_checkpoint("out/ckpt.pt")
        tokens = torch.arange(60)[None] * 7 % 256
        caches = [multiscreen.KeyCache() for _ in model.layers]
        with torch.no_grad():
            whole, pieces = model(tokens), model.new_caches()
            chunks = torch.cat([model(t, pieces) for t in tokens.split(40, 1)], 1)
            one_by_one = torch.cat([model(t, caches) for t in tokens.split(1, 1)], 1)
        torch.testing.assert_close(chunks, whole, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(one_by_one, whole, rtol=1e-3, atol=1e-3)
        rows = [row.split("\\t") for row in open("out/log.tsv")]
        return {"file": multiscreen.__file__, "screens": model.screen.__name__,
                "losses": [row[1] for row in rows[1:] if row[1]], "spread": whole.std().item(),
                "relevances": torch.cat(model.relevance_maps(tokens)).sum().item()}

    for folder in sys.argv[1:]:
        for name in list(sys.modules):
            if name.split(".")[0] in ("multiscreen", "train", "support", "lab"):
                del sys.modules[name]
        os.chdir(folder)
        sys.path[0] = folder
        try:
            found = use()
        except Exception:
            found = {"error": traceback.format_exc()}
        with open("found.json", "w") as f:
            json.dump(found, f)"""


@pytest.fixture(scope="module")
def after_edit(tmp_path_factory):
    """{edit: what training and a forward pass give with it}"""
    folders, source = {}, (ROOT / "multiscreen.py").read_text()
    for n, (name, (old, new)) in enumerate(EDITS.items()):
        assert not old or source.count(old) == 1, f"{name}: the text is not there once"
        folders[name] = folder = tmp_path_factory.mktemp(f"edit-{n}")
        (folder / "multiscreen.py").write_text(source.replace(old, new) if old else source)
        (folder / "text.txt").write_text(TEXT)
        shutil.copy(ROOT / "train.py", folder)
        for room in ("support", "lab"):
            shutil.copytree(ROOT / room, folder / room, ignore=shutil.ignore_patterns("__*__"))
            shutil.copy(ROOT / room / "__init__.py", folder / room)
    out = run("-c", USE, *folders.values())
    assert out.returncode == 0, out.stderr
    return {name: json.loads((folder / "found.json").read_text()) | {"folder": str(folder)}
            for name, folder in folders.items()}


@pytest.mark.parametrize("name", [name for name in EDITS if name != "nothing"])
def test_an_edit_acts_in_training_in_one_pass_in_chunks_and_in_decoding(after_edit, name):
    found, plain = after_edit[name], after_edit["nothing"]
    assert "error" not in found, found["error"]
    assert found["file"].startswith(found["folder"])
    assert len(found["losses"]) == 2
    assert found["losses"][1:] != plain["losses"][1:]
    assert found["spread"] != plain["spread"]
    assert found["relevances"] != plain["relevances"]
    assert found["screens"] == ("screen" if name in NOT_WINDOWED else "screen_windowed")


# --------------------------------------------------------------------- what does not agree

def scaled(h, factor):
    return h * factor[:, None, None]


# Ways to be wrong: (f, q, k, v, w, r, i0) -> h, from the right f.
WRONG = {
    "no gradient of r": lambda f, q, k, v, w, r, i0: f(q, k, v, w, r.detach(), i0),
    "no gradient of wide windows": lambda f, q, k, v, w, r, i0:
        f(q, k, v, torch.where(w > 200, w.detach(), w), r, i0),
    # Each s as from products with few bits: for r = 1e-3, 2 % of a relevance.
    "s too small by 1e-5": lambda f, q, k, v, w, r, i0: f(q * (1 - 1e-5), k, v, w, r, i0),
    "nan": lambda f, q, k, v, w, r, i0: f(q, k, v, w, r, i0) * math.nan,
    "later queries": lambda f, q, k, v, w, r, i0: f(q, k, v, w, r, i0) * (1.01 if i0 else 1),
    "16-bit values": lambda f, q, k, v, w, r, i0:
        f(q, k, v, w, r, i0) * (1.2 if v.dtype == BF16 else 1),
    "infinite windows": lambda f, q, k, v, w, r, i0:
        scaled(f(q, k, v, w.clamp(max=1e4), r, i0), 1 + w.isinf() * 0.001),
    "windows of 300": lambda f, q, k, v, w, r, i0:
        scaled(f(q, k, v, w, r, i0), 1 + (w == 300) * 0.001),
    "windows beyond 500": lambda f, q, k, v, w, r, i0:
        f(q, k, v, torch.where(w > 500, math.inf, w), r, i0),
}


@pytest.mark.parametrize("way", WRONG)
def test_what_does_not_agree_with_the_definition_does_not_screen(monkeypatch, way):
    right = screen_windowed

    def wrong(q, k, v, w, r, i0=0):
        return WRONG[way](right, q, k, v, w, r, i0)

    monkeypatch.setattr(choose, "screen_windowed", wrong)
    model = of_sizes(BF16)
    screen, line, expected = get_screen(model)
    assert screen is ms.screen
    assert not expected
    assert re.fullmatch(r"multiscreen.screen and screen_windowed differ by \S+ times the "
                        r"largest value \(a changed equation\?\): using multiscreen.screen, the "
                        r"definition", line)


def fails(*inputs):
    raise RuntimeError("no such\nthing")


@pytest.mark.parametrize("module, name, wrong, said", [
    (choose, "screen_windowed", fails, "screen_windowed fails here (RuntimeError: no such)"),
    (ms, "relevance", fails, "multiscreen.screen fails in the comparison (RuntimeError: no such)"),
    (ms, "relevance", lambda q, k, *others: q @ k.mT * math.nan, "gives nan or inf")])
def test_what_fails_or_gives_nan_is_named_and_the_definition_screens(monkeypatch, module, name,
                                                                     wrong, said):
    monkeypatch.setattr(module, name, wrong)
    screen, line, expected = get_screen(of_sizes())
    assert screen is ms.screen
    assert said in line
    assert not expected


def test_a_definition_that_fails_can_still_screen(monkeypatch, as_on_a_gpu):
    monkeypatch.setattr(ms, "relevance", fails)
    with pytest.raises(UsageError, match="--kernel windowed: .*which --kernel definition skips"):
        get_screen(of_sizes(), "windowed")
    assert get_screen(of_sizes(), "definition")[2]
    assert get_screen(as_on_a_gpu())[1].count("multiscreen.screen fails") == 1


def test_an_edit_that_acts_on_one_tile_or_on_many_keys_is_seen(monkeypatch):
    screen, trim = ms.screen, ms.trim
    power = 1 + torch.arange(4.0)[:, None, None]       # screen_windowed passes some tiles at a time

    def diluted(q, k, *others):
        return screen(q, k, *others) / max(k.shape[2] / 331, 1)

    def to_a_power(s, r):
        return trim(s, r) ** power

    for edit in (("screen", diluted), ("trim", to_a_power)):
        with monkeypatch.context() as m:
            m.setattr(ms, *edit)
            assert get_screen(of_sizes())[0] is ms.screen


@pytest.mark.parametrize("trim", [lambda s, r: (1 - (1 - s) / r).relu().sqrt(),
                                  lambda s, r: (-1e6 * (1 - s) / r).exp()])
def test_an_edit_that_amplifies_rounding_is_no_false_alarm(monkeypatch, trim):
    """The pieces call the very definition: with infinite slopes they, too, agree in float64."""
    monkeypatch.setattr(ms, "trim", trim)
    assert get_screen(of_sizes())[0] is screen_windowed


def test_bfloat16_agrees_for_many_tiles():
    """A query that sees one key has a gradient of q near 0: v must not be rounded there."""
    assert get_screen(of_sizes(BF16, psi=16, N_L=1, d_E=8))[0] is screen_windowed


@pytest.mark.parametrize("name, screen", [
    ("auto", screen_windowed), ("windowed", screen_windowed), ("definition", ms.screen)])
def test_each_name_of_a_kernel_is_obeyed_for_all_sizes(monkeypatch, name, screen):
    monkeypatch.setattr(choose, "CASES", CASES[:2])
    for sizes in ({}, {"d_K": 7, "d_V": 5, "N_H": 3, "dtype": BF16}):
        found, _, expected = get_screen(of_sizes(**sizes), name)
        assert found is screen
        assert expected


def test_a_model_that_was_trained_by_the_definition_is_measured_by_it(checkpoints):
    assert load_checkpoint(checkpoints["multiscreen"])[0].screen is ms.screen


# --------------------------------------------------------------------------- the fused kernel

IN_ITS_PLACE = r"using multiscreen.screen up to B H T T = 3\.4e\+07, then screen_windowed"


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """A function that makes a model; get_screen believes that it is on a GPU.

    The comparison runs on the device at hand, over a few keys.
    """
    def on_this_device(*case):
        return revealing_inputs(*case[:-1], DEVICE)

    def make(dtype=None, **sizes):
        weight = SimpleNamespace(device=torch.device("cuda"), dtype=sizes.pop("parameters", None))
        return SimpleNamespace(config=of_sizes(**sizes).config, dtype=dtype, W_E=weight,
                               layers=[SimpleNamespace()])

    cases = [(30, 30, NEARBY, WIDE), (17, 30, NEARBY, (1e-3,))]
    monkeypatch.setattr(choose, "CASES", cases)
    monkeypatch.setattr(choose, "revealing_inputs", on_this_device)
    monkeypatch.setattr(choose, "asks_for_screen", lambda model: True)
    return make


def test_softmax_is_cut_while_it_agrees_with_itself_in_pieces(monkeypatch, as_on_a_gpu):
    model = as_on_a_gpu()
    monkeypatch.setattr(choose, "CASES", CASES[:1])    # 128 keys or fewer are one piece
    model.layers[0].own_screen = ablations.exponential
    screen, line, expected = get_screen(model)
    assert (screen.func, expected) == (screen_windowed, True)
    assert screen.keywords == {"screen": ablations.exponential, "at_once": 2**27 // 4}
    assert "at_once" not in get_screen(model, "windowed")[0].keywords
    beyond = ms.softmask
    monkeypatch.setattr(ablations, "softmask", lambda d, w: beyond(d, w + 9))
    screen, line, expected = get_screen(model)
    assert (screen, expected) == (ablations.exponential, False)
    assert re.fullmatch(r"exponential and screen_windowed differ by \S+ times the largest value "
                        r"\(a changed equation\?\): using exponential, the definition", line)


@needs_kernel
def test_the_kernel_screens_on_a_gpu_until_an_equation_is_changed(monkeypatch, as_on_a_gpu):
    assert get_screen(as_on_a_gpu(BF16))[0] is fused.screen
    monkeypatch.setattr(ms, "trim", lambda s, r: (1 - (1 - s) / r).relu())
    screen, line, _ = get_screen(as_on_a_gpu(BF16))
    assert screen.func is screen_windowed
    assert re.fullmatch(r"multiscreen.screen and screening_triton.screen differ by \S+ times "
                        r"the largest value \(a changed equation\?\): " + IN_ITS_PLACE, line)
    with pytest.raises(UsageError, match="--kernel triton: .*screening_triton.screen differ"):
        get_screen(as_on_a_gpu(BF16), "triton")


@needs_kernel
def test_sizes_that_the_kernel_does_not_take_make_way_for_another(as_on_a_gpu):
    odd = as_on_a_gpu(d_K=24)
    assert get_screen(odd)[0].func is screen_windowed
    with pytest.raises(UsageError, match="24 dimensions: .* powers of two"):
        get_screen(odd, "triton")
    assert get_screen(as_on_a_gpu(parameters=torch.float64))[0].func is screen_windowed


def test_the_kernel_says_in_one_line_why_it_cannot_run(monkeypatch, as_on_a_gpu, tmp_path):
    monkeypatch.setattr(fused, "available", lambda device: "there is no CUDA GPU")
    screen, line, expected = get_screen(as_on_a_gpu())
    assert screen.func is screen_windowed
    assert re.fullmatch(f"there is no CUDA GPU: {IN_ITS_PLACE}", line)
    assert not expected
    with pytest.raises(UsageError, match="^--kernel triton: there is no CUDA GPU$"):
        train.main([*SMALL, "--kernel", "triton", "--out", str(tmp_path / "out")])


@pytest.mark.parametrize("reason, triton, hip, capability", [
    ("triton is not installed (it is made for Linux: pip install triton)", None, None, (9, 0)),
    ("the kernel needs an NVIDIA GPU of compute capability 8.0 or later", "3", None, (7, 5)),
    ("the kernel needs an NVIDIA GPU of compute capability 8.0 or later", "3", "6.4", (9, 4)),
    (None, "3", None, (8, 0))], ids=["Windows", "Turing", "AMD", "Ampere"])
def test_a_gpu_without_the_kernel_says_why(monkeypatch, reason, triton, hip, capability):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(fused, "triton", triton)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert fused.available("cuda") == reason


@pytest.mark.parametrize("T, once", [(180, True), (220, False)])
def test_without_the_kernel_a_gpu_calls_the_definition_once_for_few_pairs(monkeypatch, as_on_a_gpu,
                                                                          T, once):
    """Backward keeps at most eight numbers per pair, so that all layers keep 4 GiB."""
    monkeypatch.setattr(fused, "available", lambda device: "there is no CUDA GPU")
    screen = get_screen(as_on_a_gpu())[0]
    assert screen.keywords["at_once"] * 4 * 32 == 2**32
    kept, calls = {}, []

    def counted(*inputs):
        calls.append(inputs)
        return ms.screen(*inputs)

    def keep(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    *x, _ = revealing_inputs(T, T, NEARBY, WIDE, Config(4), CPU)
    x = [a.float().requires_grad_() for a in x]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        screen(*x, screen=counted, at_once=4 * 200**2)
    assert (len(calls) == 1) == once
    assert not once or sum(kept.values()) < 32 * 4 * T**2


@pytest.mark.parametrize("flags, refused", [
    ({}, True), ({"recompute": True}, False), ({"T": 2**13}, False)])
def test_relevances_that_exceed_the_memory_are_refused_in_training(monkeypatch, flags, refused):
    """Of a machine of 16 GiB. Four layers of four tiles keep 64 GiB, or one layer 16."""
    sizes = {"SC_PAGE_SIZE": 2**12, "SC_PHYS_PAGES": 2**22}
    monkeypatch.setattr(choose.os, "sysconf", sizes.get)
    model, flags = of_sizes(), {"batch": 1, "T": 2**14} | flags
    model.screen = screen_windowed
    choose.require_memory(model, **flags)
    model.screen = ms.screen
    said = pytest.raises(UsageError, match="keep 64 GiB .* has 16: use --kernel windowed")
    with said if refused else nullcontext():
        choose.require_memory(model, **flags)


@pytest.mark.parametrize("chip, dtype", [(True, BF16), (False, None)])
def test_products_are_bfloat16_only_where_the_chip_multiplies_it(monkeypatch, chip, dtype):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: chip)
    assert products_dtype(torch.device("cuda")) == dtype
    assert products_dtype(torch.device("mps")) is None
    assert products_dtype(CPU) is None


def test_without_triton_the_file_can_be_imported_and_says_so():
    code = ("import sys; sys.modules['triton'] = None; import screening_triton; "
            "print(screening_triton.available())")
    assert run("-c", code).stdout.startswith("triton is not installed")


@pytest.mark.parametrize("lost, warned", [(False, False), (True, True)])
def test_an_edit_that_loses_the_mask_of_the_future_is_told(monkeypatch, capsys, lost, warned):
    """Softmask of |d|: it trains, and its losses look splendid."""
    softmask = ms.softmask
    if lost:
        monkeypatch.setattr(ms, "softmask", lambda d, w: softmask(-d.abs(), w))
    model = of_sizes()
    flags = {"kernel": "definition", "recompute": False, "compile": False, "shard": 1}
    choose.make_fast(model, SimpleNamespace(batch_size=2, seq_len=16, **flags))
    assert ("depends on later tokens" in capsys.readouterr().out) == warned
    assert model.training


@pytest.mark.parametrize("name", [
    *(f"multiscreen:{word}" for word in ablations.VARIANTS), "transformer:2,2,32",
    *(f"transformer:2,2,32:{word}" for word in attention.VARIANTS)])
def test_no_model_here_sees_later_tokens(name):
    torch.manual_seed(0)
    model = build_model(name, {"N_L": 2, "N_H": 4, "vocab_size": 257})
    assert not choose.sees_later_tokens(model, 256)


class Noisy(ms.GatedScreeningTiles):
    """It draws random numbers, keeps a mean of what it has seen, and has 16 learned positions."""

    def initialize(self):
        super().initialize()
        self.positions = torch.nn.Parameter(torch.randn(16, self.config.d_E))
        self.register_buffer("mean", torch.zeros(self.config.d_E))

    def forward(self, x, screen, cache=None):
        y = x + self.positions[: x.shape[1]] + self.mean + 0.1 * torch.randn_like(x)
        self.mean.lerp_(x.detach().mean((0, 1)), 0.1)
        return super().forward(y, screen, cache)


def test_looking_for_later_tokens_leaves_the_model_and_the_random_numbers_as_they_were():
    model = Multiscreen(Config(psi=4, vocab_size=7), tiles=Noisy)
    before = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    assert not choose.sees_later_tokens(model, 16)
    assert torch.equal(torch.get_rng_state(), before[1])
    assert all(torch.equal(x, before[0][name]) for name, x in model.state_dict().items())


class OneWindow(ms.GatedScreeningTiles):
    """A layer whose tiles share one number s_w."""

    def initialize(self):
        super().initialize()
        self.s_w = torch.nn.Parameter(self.s_w.data.mean(0, keepdim=True))


def test_windows_that_are_not_a_number_for_each_tile_are_refused():
    model = Multiscreen(Config(psi=4, vocab_size=7), tiles=OneWindow)
    with pytest.raises(UsageError, match=r"windows w have shape \(1,\); expected \(4,\)"):
        choose.get_screen(model)
