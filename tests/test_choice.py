"""Tests of what screens: an edit acts everywhere, and what does not agree does not screen."""
import json
import math
import re
import shutil

import pytest
import torch

import multiscreen as ms
import screening_triton as fused
import support.kernel
import train
from multiscreen import Config
from support.cli import UsageError
from support.kernel import CASES, NEARBY, difference, get_screen, with_gradients
from tests import DEVICE
from tests.helpers import CPU, ROOT, SMALL, TEXT, run

SHORT = torch.bfloat16
revealing_inputs = support.kernel.revealing_inputs
why_not = fused.available(DEVICE)
kernel = pytest.mark.skipif(why_not is not None, reason=str(why_not))


# ------------------------------------------------------------------- an edit of multiscreen.py

# As a user edits the file: old text, new text.
EDITS = {
    "nothing": ("", ""),
    "window": ("clamp(max=80.0).exp()) + 1", "clamp(max=80.0).exp()) + 3"),
    "unit": ("clamp_min(eps**2).rsqrt()", "clamp_min(eps**2).pow(-0.4)"),
    "mipe": ("x0 * cos - x1 * sin, x0 * sin + x1 * cos",
             "x0 * cos - x1 * sin, x1 * cos - x0 * sin"),
    "trim": (".relu().square()", ".relu()"),
    "softmask": ("0.5 * (torch.cos(math.pi * (d / w)) + 1)", "1.0"),
    "softmask without an edge": (
        "torch.where((-w < d) & (d <= 0), 0.5 * (torch.cos(math.pi * (d / w)) + 1), 0.0)",
        "torch.where(d <= 0, torch.exp(d.clamp(max=0) / w), 0.0)"),
    "relevance": ("return trim(s, r[:, None, None]) *",
                  "return trim(s, r[:, None, None].detach()) *"),
    "screen": ("    return (alpha_d @ v.to(dtype)).to(v.dtype)",
               "    alpha_d = alpha_d / (alpha_d.sum(-1, keepdim=True) + 0.1)\n"
               "    return (alpha_d @ v.to(dtype)).to(v.dtype)"),
    "tanh_norm": ("torch.tanh(norm) / norm", "norm / norm"),
    "gate": ("return torch.tanh(F.silu(", "return torch.sigmoid(F.silu("),
}
# What screen_windowed cannot do: then the definition screens.
NOT_WINDOWED = ("softmask without an edge", "screen")

# Train, load and use each edited copy. One process for all, or importing torch takes longest.
USE = """if True:
    import json, os, sys, traceback
    import torch

    def use():
        import multiscreen, train
        train.main(["--psi", "2", "--seq-len", "100", "--batch-size", "2", "--warmup", "1",
                    "--steps", "3", "--log-every", "1", "--device", "cpu", "--data", "text.txt",
                    "--out", "out"])
        model, _, _ = train.load_checkpoint("out/ckpt.pt")
        tokens = torch.arange(150)[None] * 7 % 256
        caches = [multiscreen.KeyCache() for _ in model.layers]
        with torch.no_grad():
            whole, chunks = model(tokens), model.logits(model.hidden(tokens, chunk=40))
            one_by_one = torch.cat([model(t, caches) for t in tokens.split(1, 1)], 1)
        torch.testing.assert_close(chunks, whole, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(one_by_one, whole, rtol=1e-3, atol=1e-3)
        rows = [row.split("\\t") for row in open("out/log.tsv")]
        return {"file": multiscreen.__file__, "screens": model.screen.__name__,
                "losses": [row[1] for row in rows[1:]], "spread": whole.std().item(),
                "relevances": torch.cat(model.relevance_maps(tokens)).sum().item()}

    for folder in sys.argv[1:]:
        for name in list(sys.modules):
            if name.split(".")[0] in ("multiscreen", "train", "support", "baselines"):
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
    """What training and a forward pass give with each edit, by name."""
    folders, source = {}, (ROOT / "multiscreen.py").read_text()
    for n, (name, (old, new)) in enumerate(EDITS.items()):
        assert not old or source.count(old) == 1, f"{name}: the text is not there once"
        folders[name] = folder = tmp_path_factory.mktemp(f"edit-{n}")
        (folder / "multiscreen.py").write_text(source.replace(old, new) if old else source)
        (folder / "text.txt").write_text(TEXT)
        shutil.copy(ROOT / "train.py", folder)
        for room in ("support", "baselines"):
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
    assert len(found["losses"]) == 3
    assert found["losses"][1:] != plain["losses"][1:]
    assert found["spread"] != plain["spread"]
    assert found["relevances"] != plain["relevances"]
    assert found["screens"] == ("screen" if name in NOT_WINDOWED else "screen_windowed")


# --------------------------------------------------------------------- what does not agree

def scaled(h, factor):
    return h * factor[:, None, None]


# Ways to be wrong: (f, q, k, v, w, r, i0) -> h, by f, which is right.
WRONG = {
    "a factor": lambda f, q, k, v, w, r, i0: f(q, k, v * 1.0005, w, r, i0),
    "off by one": lambda f, q, k, v, w, r, i0: f(q, k, v, w, r, i0 + 1),
    "no gradient of r": lambda f, q, k, v, w, r, i0: f(q, k, v, w, r.detach(), i0),
    "no gradient of wide windows": lambda f, q, k, v, w, r, i0:
        f(q, k, v, torch.where(w > 200, w.detach(), w), r, i0),
    "16 bits": lambda f, q, k, v, w, r, i0: f(q.bfloat16(), k.bfloat16(), v, w, r, i0),
    "nan": lambda f, q, k, v, w, r, i0: f(q, k, v, w, r, i0) * math.nan,
    "later queries": lambda f, q, k, v, w, r, i0: f(q, k, v, w, r, i0) * (1.01 if i0 else 1),
    "16-bit values": lambda f, q, k, v, w, r, i0:
        f(q, k, v, w, r, i0) * (1.2 if v.dtype == SHORT else 1),
    "infinite windows": lambda f, q, k, v, w, r, i0:
        scaled(f(q, k, v, w.clamp(max=1e4), r, i0), 1 + w.isinf() * 0.001),
    "windows of 300": lambda f, q, k, v, w, r, i0:
        scaled(f(q, k, v, w, r, i0), 1 + (w == 300) * 0.001),
    "windows beyond 500": lambda f, q, k, v, w, r, i0:
        f(q, k, v, torch.where(w > 500, math.inf, w), r, i0),
}


@pytest.mark.parametrize("way", WRONG)
def test_what_does_not_agree_with_the_definition_does_not_screen(monkeypatch, way):
    right = ms.screen_windowed

    def wrong(q, k, v, w, r, i0=0):
        return WRONG[way](right, q, k, v, w, r, i0)

    monkeypatch.setattr(ms, "screen_windowed", wrong)
    screen, line, expected = get_screen("auto", CPU, Config(4), SHORT)
    assert screen is ms.screen
    assert not expected
    assert re.fullmatch(r"multiscreen.screen and screen_windowed differ by \S+ of the largest "
                        r"value \(a changed equation\?\): using multiscreen.screen, the "
                        r"definition", line)


def test_what_is_asked_for_and_does_not_agree_is_refused(monkeypatch):
    right = ms.screen_windowed
    monkeypatch.setattr(ms, "screen_windowed", lambda *inputs: 1.01 * right(*inputs))
    with pytest.raises(UsageError, match="--kernel windowed: .*screen_windowed differ by"):
        get_screen("windowed", CPU, Config(4))


def fails(*inputs):
    raise RuntimeError("no such\nthing")


def test_what_fails_does_not_screen(monkeypatch):
    monkeypatch.setattr(ms, "screen_windowed", fails)
    screen, line, _ = get_screen("auto", CPU, Config(4))
    assert screen is ms.screen
    assert line == ("screen_windowed fails here (RuntimeError: no such): using "
                    "multiscreen.screen, the definition")


def test_a_definition_that_fails_is_not_blamed_on_another(monkeypatch):
    monkeypatch.setattr(ms, "relevance", fails)
    with pytest.raises(RuntimeError, match="no such"):
        get_screen("auto", CPU, Config(4))


def test_a_definition_that_gives_nan_screens_as_it_is(monkeypatch):
    right = ms.relevance
    monkeypatch.setattr(ms, "relevance", lambda *inputs: math.nan * right(*inputs))
    screen, line, expected = get_screen("auto", CPU, Config(4))
    assert screen is ms.screen
    assert not expected
    assert "gives nan or inf" in line


@pytest.mark.parametrize("name", ["windows beyond 400", "the number of keys",
                                  "a power for each tile"])
def test_an_edit_that_acts_far_away_or_in_one_tile_is_seen(monkeypatch, name):
    softmask, screen, trim = ms.softmask, ms.screen, ms.trim
    power = 1 + torch.arange(4.0)[:, None, None]       # screen_windowed sees one tile at a time

    def no_edge(d, w):
        tail = torch.exp(d.clamp(max=0) / w)
        return torch.where((w > 400) & (d <= 0), tail, softmask(d, w))

    def diluted(q, k, *others):
        return screen(q, k, *others) / max(k.shape[2] / 331, 1)

    def to_a_power(s, r):
        return trim(s, r) ** power

    edits = {"windows beyond 400": ("softmask", no_edge), "the number of keys": ("screen", diluted),
             "a power for each tile": ("trim", to_a_power)}
    monkeypatch.setattr(ms, *edits[name])
    assert get_screen("auto", CPU, Config(4))[0] is ms.screen


def test_an_edit_that_cuts_a_gradient_off_is_no_disagreement(monkeypatch):
    trim = ms.trim
    monkeypatch.setattr(ms, "trim", lambda s, r: trim(s, r.detach()))
    monkeypatch.setattr(ms, "softmask", lambda d, w: ((-w < d) & (d <= 0)).float())
    assert get_screen("auto", CPU, Config(4))[0] is ms.screen_windowed


def test_the_comparison_sees_what_a_kernel_could_get_wrong():
    """About 330 keys, an odd number; s = 1 and s = -1; in every tile part of the pairs rejected."""
    q, k, v, w, r = revealing_inputs(331, 331, NEARBY, Config(), CPU)
    s = (q @ k.mT)[0]
    assert s.max() > 0.99999
    assert s.min() < -0.99999
    d = torch.arange(331) - torch.arange(331)[:, None]
    inside = ms.softmask(d, w[:, None, None]) > 0
    alive = ms.relevance(q, k, w, r)[0] > 0
    shares = alive.sum((1, 2)) / inside.sum((1, 2))
    assert shares.min() > 0.02
    assert shares.max() < 1
    assert {i0 for _, _, i0, _ in CASES} == {0, 384, 5000}


@pytest.mark.parametrize("name, screen", [
    ("auto", ms.screen_windowed), ("windowed", ms.screen_windowed), ("definition", ms.screen)])
def test_each_name_of_a_kernel_is_obeyed(name, screen):
    found, _, expected = get_screen(name, CPU, Config(4))
    assert found is screen
    assert expected


def test_other_sizes_are_compared_too():
    assert get_screen("auto", CPU, Config(d_K=7, d_V=5, N_H=3), SHORT)[0] is ms.screen_windowed


# --------------------------------------------------------------------------- the fused kernel

@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Let get_screen compare on the device that there is, over few keys."""
    def on_this_device(T, S, windows, config, device):
        return revealing_inputs(T, S, windows, config, DEVICE)

    monkeypatch.setattr(support.kernel, "CASES", [(40, 40, 0, NEARBY), (17, 40, 23, NEARBY)])
    monkeypatch.setattr(support.kernel, "revealing_inputs", on_this_device)
    return torch.device("cuda")


@kernel
@pytest.mark.parametrize("dtype", [None, SHORT])
def test_the_kernel_screens_on_a_gpu_until_an_equation_is_changed(monkeypatch, as_on_a_gpu, dtype):
    assert get_screen("auto", as_on_a_gpu, Config(4), dtype)[0] is fused.screen
    monkeypatch.setattr(ms, "trim", lambda s, r: (1 - (1 - s) / r).relu())
    screen, line, _ = get_screen("auto", as_on_a_gpu, Config(4), dtype)
    assert screen is ms.screen_windowed
    assert re.fullmatch(r"multiscreen.screen and screening_triton.screen differ by \S+ of the "
                        r"largest value \(a changed equation\?\): using screen_windowed", line)
    with pytest.raises(UsageError, match="--kernel triton: .*screening_triton.screen differ"):
        get_screen("triton", as_on_a_gpu, Config(4), dtype)


@kernel
@pytest.mark.parametrize("case", CASES[1:])
def test_the_kernel_is_far_below_the_limit_with_every_window_and_acceptance_width(case):
    """On a GPU its cosine is 2^-20.5 off: what is near the limit here would be refused there."""
    T, S, i0, windows = case
    inputs = revealing_inputs(T, S, windows, Config(5), torch.device(DEVICE))
    found, wanted = (with_gradients(screen, inputs, i0) for screen in (fused.screen, ms.screen))
    assert difference(found, wanted) < (5e-5 if DEVICE == "cuda" else 1e-5)


@kernel
def test_sizes_that_the_kernel_does_not_take_make_way_for_another(as_on_a_gpu):
    odd = Config(4, d_K=24)
    assert get_screen("auto", as_on_a_gpu, odd)[0] is ms.screen_windowed
    with pytest.raises(UsageError, match="24 dimensions: .* powers of two"):
        get_screen("triton", as_on_a_gpu, odd)


def test_the_kernel_says_in_one_line_why_it_cannot_run(monkeypatch, as_on_a_gpu):
    monkeypatch.setattr(fused, "available", lambda device: "there is no CUDA GPU")
    found = get_screen("auto", as_on_a_gpu, Config(4))
    assert found == (ms.screen_windowed, "there is no CUDA GPU: using screen_windowed", False)
    with pytest.raises(UsageError, match="--kernel triton: there is no CUDA GPU") as e:
        train.main([*SMALL, "--kernel", "triton"])
    assert "\n" not in str(e.value)


def test_without_triton_the_file_can_be_imported_and_says_so():
    code = ("import sys; sys.modules['triton'] = None; import screening_triton; "
            "print(screening_triton.available())")
    assert run("-c", code).stdout.startswith("triton is not installed")
