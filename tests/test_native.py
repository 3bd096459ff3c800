"""Tests of support/native.py and screen.cpp: the definition in C++, on a CPU."""
import os
import re
import shutil
import stat
import subprocess
import sys

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.autograd import forward_ad

import multiscreen as ms
from support.cli import UsageError
from support import fast, native, windowed
from support.models import build_model
from tests.helpers import ROOT, full_disk, moved_model, needs_cpp
from tests.inputs import INF, acceptances, correlated, draw_tokens, random, seeds, widths
from tests.test_windowed import h_and_gradients

pytestmark = needs_cpp
NAMES = ("h", "dq", "dk", "dv", "dw", "dr")


def in_float32(*inputs):
    return [x.float() for x in inputs]


def assert_close_to_definition(found, wanted, r):
    """Rounding a similarity moves z by 1/r times as much, and a gradient by 1/r^2 times."""
    for name, a, b in zip(NAMES, found, wanted):
        atol = 1e-5 / r.min().item()**2 * max(0.2, b.abs().max().item())
        torch.testing.assert_close(a.double(), b, rtol=1e-3, atol=atol,
                                   msg=lambda message, name=name: f"{name}: {message}")


# 32 similarities are computed at once: windows end inside these groups and between them.
edges = st.one_of(widths, st.sampled_from([16.5, 17.0, 17.2, 31.9, 32.0, 33.0, INF]))
lengths = st.one_of(st.integers(1, 200), st.sampled_from([1, 31, 32, 33, 64, 65]))


@given(seed=seeds, B=st.integers(1, 2), T=lengths, i0=st.integers(-90, 200),
       more=st.sampled_from([0, 0, 0, 0, 5, -5]), w=st.lists(edges, min_size=3, max_size=3),
       r=st.lists(acceptances, min_size=3, max_size=3))
@example(seed=0, B=2, T=1, i0=0, more=0, w=[1.0, 2.5, INF], r=[0.1, 0.5, 1.0])
@example(seed=0, B=2, T=140, i0=0, more=0, w=[16.5, 17.0, 17.2], r=[0.3, 0.5, 1.0])
@example(seed=1, B=2, T=97, i0=20, more=0, w=[31.9, 32.0, INF], r=[0.3, 0.5, 1.0])
@example(seed=1, B=1, T=50, i0=3, more=-33, w=[32.0, 1.0, INF], r=[0.3, 0.5, 1.0])
@example(seed=1, B=1, T=150, i0=0, more=-100, w=[90.0, 9.0, INF], r=[1.0, 1.0, 1.0])
@example(seed=2, B=1, T=40, i0=-20, more=70, w=[33.0, 2.0, INF], r=[0.3, 0.5, 1.0])
def test_native_equals_dense_in_value_and_every_gradient(seed, B, T, i0, more, w, r):
    """S is shorter and longer than i0 + T, too."""
    q, k, v = correlated(seed, B, 3, T, max(i0 + T + more, 1), K=16, V=64)
    w, r = torch.tensor([w, r], dtype=torch.float64)
    # Rounded before, or an edge of Trim or of a window would lie elsewhere.
    q, k, v, w, r = (x.float().double() for x in (q, k, v, w, r))
    wanted = h_and_gradients(ms.screen, q, k, v, w, r, i0, seed)
    found = h_and_gradients(native.screen, *in_float32(q, k, v, w, r), i0, seed)
    assert_close_to_definition(found, wanted, r)


@pytest.fixture
def inputs():
    """q, k, v, w, r of 2 sequences of 150 tokens, 3 tiles."""
    w, r = torch.tensor([3.0, 90.0, INF]), torch.tensor([0.3, 0.5, 1.0])
    return *in_float32(*correlated(0, 2, 3, 150, 150, K=16, V=64)), w, r


def test_results_have_the_same_bits_on_any_number_of_threads():
    """Over and over, because threads that share a sum do not differ each time."""
    inputs = in_float32(*correlated(0, 4, 4, 300, 300, K=16, V=64))
    inputs += [torch.tensor([3.0, 90.0, INF, INF]), torch.tensor([0.3, 0.5, 1.0, 1.0])]
    threads, found = torch.get_num_threads(), []
    for n in (1, 2, 3, 3, 3, 3):
        torch.set_num_threads(n)
        found.append(h_and_gradients(native.screen, *inputs, 0, 0))
    torch.set_num_threads(threads)
    for again in found[1:]:
        assert all(map(torch.equal, found[0], again))


def test_each_sequence_has_sums_of_its_own(inputs):
    """Which are added up afterwards: bit for bit the gradients of the sequences one by one."""
    q, k, v, w, r = inputs
    m = ms.softmask(-torch.arange(150), w[:, None])
    dh, reach = torch.randn(v.shape, generator=random(0)), torch.tensor([2, 89, 149])

    def gradients(part):
        leaves = [x[part] for x in (q, k, v)] + [m, r]
        leaves = [x.clone().requires_grad_() for x in leaves]
        h = native.Screen.apply(*leaves, reach, 0)
        return torch.autograd.grad(h, leaves, dh[part])

    both, first, second = (gradients(part) for part in (slice(0, 2), slice(0, 1), slice(1, 2)))
    for x, a, b in zip(both[:3], first, second):
        assert torch.equal(x, torch.cat((a, b)))
    for x, a, b in zip(both[3:], first[3:], second[3:]):
        assert torch.equal(x, a + b) and x.any()


def beside_nan(x, before, after):
    """x as a part of a longer tensor, whose other rows are NaN."""
    B, H, _, D = x.shape
    rows = torch.full((B, H, before, D), torch.nan), x, torch.full((B, H, after, D), torch.nan)
    return torch.cat(rows, 2)[:, :, before : before + x.shape[2]]


LAYOUTS = {
    "of projections": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "of half a batch": lambda x: torch.cat((x, x)).chunk(2)[1],
    "of a cache": lambda x: beside_nan(x, 0, 50),
    "of a cache's last keys": lambda x: beside_nan(x, 50, 0),
    "of columns": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_results_have_the_same_bits_wherever_rows_lie_in_memory(inputs, layout):
    dh, found = torch.randn(2, 3, 150, 64, generator=random(0)), []
    for lay in (torch.Tensor.contiguous, LAYOUTS[layout]):
        leaves = [*(lay(x) for x in inputs[:3]), *inputs[3:]]
        leaves = [x.detach().requires_grad_() for x in leaves]
        h = native.screen(*leaves)
        found.append([h, *torch.autograd.grad(h, leaves, lay(dh))])
    for name, a, b in zip(NAMES, *found):
        assert torch.equal(a, b), name


def test_all_sequences_and_tiles_may_share_rows(inputs):
    """As the identity matrix of relevance maps, which is expanded."""
    q, k, v, w, r = inputs
    shared = v[:1, :1].expand(v.shape)
    assert torch.equal(native.screen(q, k, shared, w, r),
                       native.screen(q, k, shared.contiguous(), w, r))


def test_the_gradient_of_a_sum_which_is_one_number_expanded(inputs):
    leaves = [x.clone().requires_grad_() for x in inputs]
    found = torch.autograd.grad(native.screen(*leaves).sum(), leaves)
    wanted = torch.autograd.grad(ms.screen(*leaves).sum(), leaves)
    for a, b in zip(found, wanted):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4 * b.abs().max().item())


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_nan_shows_in_each_pair_that_counts_and_in_no_other(inputs, name):
    """That of a query in its own sum, that of a key wherever it is in the window, that of a value
    wherever its key is alive."""
    q, k, v, w, r = inputs
    before, alive = native.screen(*inputs), ms.relevance(q, k, w, r) > 0
    i, j = torch.arange(150)[:, None], torch.arange(150)
    in_window = (j <= i) & (j > i - w[:, None, None])
    x = {"q": q, "k": k, "v": v}[name]
    x[1, :, 40, 5] = torch.nan
    h = native.screen(*inputs)
    if name == "q":
        wanted = (i == 40)[:, 0].expand(3, 150)
    elif name == "k":
        wanted = in_window[:, :, 40]
    else:
        wanted = alive[1, :, :, 40]
    assert torch.equal(h[1].isnan().any(-1), wanted)
    assert torch.equal(h[0], before[0]) and torch.equal(h[1][~wanted], before[1][~wanted])
    assert wanted.any() and not wanted.all()


def test_relevance_outside_the_window_or_below_the_threshold_is_exactly_zero(inputs):
    """Where the definition has 0, h has no trace of a value, however large."""
    q, k, v, w, r = inputs
    zero = ms.relevance(q, k, w, r)[:, :, 100] == 0                # (B, H, S)
    h = native.screen(q, k, v, w, r)[:, :, 100]
    v[zero] = 1e30
    assert zero.any() and not zero.all()
    assert torch.equal(native.screen(q, k, v, w, r)[:, :, 100], h)


def test_trim_keeps_a_key_from_just_above_its_threshold():
    """s = 1 - r is rejected: even an infinite value leaves no trace."""
    s = torch.tensor([0.5, 0.5, 0.5 + 2**-24 * 2, 0.5 - 2**-24]).float()
    q, k = torch.zeros(1, 1, 1, 16), torch.zeros(1, 1, 4, 16)
    q[..., 0], k[..., 0] = 1, s
    v = torch.ones(1, 1, 4, 64)
    v[0, 0, [0, 1, 3]] = INF
    h = native.screen(q, k, v, torch.tensor([INF]), torch.tensor([0.5]), 3)
    assert torch.equal(h, ms.relevance(q, k, torch.tensor([INF]), torch.tensor([0.5]), 3)[..., 2:3]
                       .expand(h.shape))
    assert 0 < h.max() < 1e-12


def test_other_sizes_other_dtypes_and_empty_tensors():
    q, k, v = correlated(0, 1, 2, 140, 140, K=4, V=8)
    w, r = torch.tensor([9.0, INF]).double(), torch.ones(2).double()
    wanted = h_and_gradients(ms.screen, q, k, v, w, r, 0, 0)
    for a, b in zip(h_and_gradients(native.screen, q, k, v, w, r, 0, 0), wanted):
        torch.testing.assert_close(a, b)               # float64
    found = h_and_gradients(native.screen, *in_float32(q, k, v, w, r), 0, 0)
    assert_close_to_definition(found, wanted, r)
    for B, H, T, S in ((0, 2, 5, 5), (1, 0, 5, 5), (1, 2, 0, 5), (1, 2, 5, 0)):
        q, k, v = torch.ones(B, H, T, 16), torch.ones(B, H, S, 16), torch.ones(B, H, S, 64)
        results = h_and_gradients(native.screen, q, k, v, torch.full((H,), 3.0), torch.ones(H), 0,
                                  0)
        assert results[0].shape == (B, H, T, 64)
        assert not any(x.any() for x in results)


def test_recomputed_layers_have_the_same_gradients():
    """Recomputing drops what forward saved, and backward gets other tensors."""
    model, x = build_model("multiscreen", {"psi": 4, "vocab_size": 50}), draw_tokens(2, 100)
    fast.choose_screen(model, "cpp")
    model.loss(x, x).backward()
    wanted = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    fast.recompute(model)
    model.loss(x, x).backward()
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), wanted))


@torch.no_grad()
def test_the_softmask_is_computed_once_for_many_tokens_and_anew_after_an_edit(monkeypatch):
    """For each layer at each power of two of the context, here 128, 256 and 512."""
    model, tokens, calls = moved_model("multiscreen"), draw_tokens(1, 100), []
    fast.choose_screen(model, "cpp")
    right = ms.softmask

    def softmask(d, w):
        calls.append(w)
        return right(d, w)

    with monkeypatch.context() as m:
        m.setattr(ms, "softmask", softmask)
        model.generate(tokens, 200)
    assert len(calls) == 3 * len(model.layers)

    before = model(tokens)
    monkeypatch.setattr(ms, "softmask", lambda d, w: 0.1 * right(d, w))
    assert not torch.allclose(model(tokens), before, atol=0.1)
    monkeypatch.undo()
    model.expand_windows(5)
    found = model(tokens)
    assert not torch.allclose(found, before, atol=0.1)
    fast.choose_screen(model, "definition")
    torch.testing.assert_close(model(tokens), found, rtol=1e-4, atol=1e-4)


def test_a_second_derivative_is_refused_and_the_message_names_the_flag(inputs):
    leaves = [x.requires_grad_() for x in inputs]
    with pytest.raises(NotImplementedError, match="--kernel windowed"):
        torch.autograd.grad(native.screen(*leaves).sum(), leaves, create_graph=True)


def test_forward_mode_is_refused(inputs):
    """Even without gradients, PyTorch would silently drop a tangent: the derivative would be 0."""
    for context in (torch.enable_grad, torch.no_grad):
        with context(), forward_ad.dual_level(), pytest.raises(RuntimeError, match="forward"):
            native.screen(forward_ad.make_dual(inputs[0], inputs[1]), *inputs[1:])


# ------------------------------------------------------------------------------- the library

@pytest.fixture
def new_folder(tmp_path, monkeypatch):
    """An empty folder of torch's extensions; and no library is loaded yet."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    native.library.cache_clear()
    yield tmp_path
    native.library.cache_clear()


def small():
    return build_model("multiscreen", {"psi": 2, "vocab_size": 7})


@pytest.mark.slow
def test_it_is_built_once_and_kept_under_a_name_of_its_own(new_folder, monkeypatch, tmp_path):
    model = small()
    assert fast.choose_screen(model) == "screening in C++, by support/screen.cpp"
    assert model.screen is native.screen
    built = list((new_folder / "multiscreen").iterdir())
    assert [path.suffix for path in built] == [".so"]
    assert stat.S_IMODE((new_folder / "multiscreen").stat().st_mode) == 0o700

    # Later commands take the same file.
    def no_build(*inputs):
        raise AssertionError("built again")

    native.library.cache_clear()
    with monkeypatch.context() as m:
        m.setattr(native, "build", no_build)
        fast.choose_screen(small())
    # Another source, or other flags, are another file.
    source = tmp_path / "edited.cpp"
    source.write_text(native.SOURCE.read_text() + "// An edit.\n")
    monkeypatch.setattr(native, "SOURCE", source)
    native.library.cache_clear()
    fast.choose_screen(small())
    monkeypatch.setattr(native, "FLAGS", [*native.FLAGS, "-O1"])
    native.library.cache_clear()
    fast.choose_screen(small())
    assert len(list((new_folder / "multiscreen").iterdir())) == 3


def use_compiler(folder, monkeypatch, lines):
    """Let $CXX be a script that runs `lines`, and then the real compiler."""
    real, script = shutil.which(os.environ.get("CXX") or "c++"), folder / "compiler"
    script.write_text(f'#!/bin/sh\n{lines}\nexec {real} "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))


def assert_windows_screen(reason):
    """In one line, which gives the reason; and whoever asks for C++ gets an error."""
    model = small()
    line = fast.choose_screen(model)
    assert re.fullmatch(rf"no screen in C\+\+ \(.*{reason}.*\); screening in windows, by "
                        "multiscreen.screen", line)
    assert model.screen is windowed.screen_windowed
    with pytest.raises(UsageError, match=rf"^--kernel cpp: no screen in C.*{reason}"):
        fast.choose_screen(small(), "cpp")


@pytest.mark.parametrize("lines, reason", [
    ("exit 3", "compiler fails with code 3"),
    ("printf 'no r\\366m\\nat all' >&2; exit 1", "compiler fails with code 1: no r.m"),
    ('for x; do [ "$last" = -o ] && echo a half >"$x" && exit 1; last=$x; done', "compiler fails"),
    ('case "$*" in *screen.cpp*) exit 0; esac', "No such file")])
def test_without_a_compiler_that_works_windows_screen(new_folder, monkeypatch, lines, reason):
    use_compiler(new_folder, monkeypatch, lines)
    assert_windows_screen(reason)
    assert not list(new_folder.glob("multiscreen/*"))
    monkeypatch.setenv("CXX", "/nonexistent")
    assert_windows_screen("No such file .*/nonexistent")
    monkeypatch.setenv("CXX", '"c++')
    assert_windows_screen('CXX is "c.*: No closing quotation')


def test_without_openmp_there_is_one_thread(new_folder, monkeypatch, inputs):
    use_compiler(new_folder, monkeypatch, """for x; do
        if [ "$x" = -fopenmp ]; then echo unknown >&2; exit 1; fi
    done""")
    line = fast.choose_screen(small())
    assert line == ("screening in C++, by support/screen.cpp, on one thread, because the compiler "
                    "has no OpenMP")
    one = h_and_gradients(native.screen, *inputs, 0, 0)
    native.library.cache_clear()
    monkeypatch.undo()
    for a, b in zip(one, h_and_gradients(native.screen, *inputs, 0, 0)):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_a_folder_that_others_may_write_to_is_refused(new_folder):
    fast.choose_screen(small())
    for mode in (0o722, 0o770):
        (new_folder / "multiscreen").chmod(mode)
        native.library.cache_clear()
        assert_windows_screen("others may write to it")


@pytest.mark.slow
def test_where_nothing_can_be_kept_windows_screen(new_folder, monkeypatch):
    """The disk is full; the folder is a file; the library is damaged."""
    with full_disk():
        assert_windows_screen("fails")
    assert not list(new_folder.glob("multiscreen/*"))
    monkeypatch.setattr(native, "build", lambda command, path: path.write_text("damaged"))
    assert_windows_screen("(file too short|not a mach-o)")
    (new_folder / "file").touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(new_folder / "file"))
    assert_windows_screen("Not a directory")


def test_a_library_that_is_wrong_is_found_out(new_folder, monkeypatch):
    """As that of a compiler with a mistake, by 5 % and in backward only."""
    wrong = native.SOURCE.read_text().replace("2 * z * m[distance]", "2.1f * z * m[distance]")
    (new_folder / "wrong.cpp").write_text(wrong)
    monkeypatch.setattr(native, "SOURCE", new_folder / "wrong.cpp")
    model = small()
    line = fast.choose_screen(model)
    assert line == ("on this machine, dq of support.native.screen is wrong by 5.0%: please report "
                    "it; screening in windows, by multiscreen.screen")


@pytest.mark.parametrize("name, change, reason", [
    ("multiscreen", {"dtype": torch.bfloat16}, "for float32 on a CPU"),
    ("multiscreen:softmax", {}, "the model's own exponential")])
def test_what_it_is_not_for(name, change, reason):
    model = build_model(name, {"psi": 2, "vocab_size": 7}, **change)
    with pytest.raises(UsageError, match=f"^--kernel cpp: .*{reason}"):
        fast.choose_screen(model, "cpp")
    fast.choose_screen(model)
    assert model.screen is not native.screen


def test_products_in_float32_may_be_named():
    model = build_model("multiscreen", {"psi": 2, "vocab_size": 7}, torch.float32)
    fast.choose_screen(model, "cpp")
    assert model.screen is native.screen


@pytest.mark.slow
def test_commands_that_build_at_once_do_not_spoil_it(tmp_path):
    code = """if True:
        from support import native
        from tests.test_native import small
        from support.fast import choose_screen
        print(choose_screen(small()))"""
    environment = os.environ | {"TORCH_EXTENSIONS_DIR": str(tmp_path)}
    several = [subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=environment, text=True,
                                stdout=subprocess.PIPE) for _ in range(4)]
    for process in several:
        assert process.communicate()[0] == "screening in C++, by support/screen.cpp\n"
    assert len(list((tmp_path / "multiscreen").iterdir())) == 1


@pytest.mark.parametrize("shared", ["w", "r", "k", "v"])
def test_tiles_may_share_what_the_definition_lets_them_share(inputs, shared):
    """C++ trusts the sizes that it is given, so what is shared is expanded first."""
    named = dict(zip(("q", "k", "v", "w", "r"), inputs))
    named[shared] = named[shared][:, :1] if shared in ("k", "v") else named[shared][:1]
    for a, b in zip(h_and_gradients(native.screen, *named.values(), 0, 0),
                    h_and_gradients(ms.screen, *named.values(), 0, 0)):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="have the shapes"):
        native.screen(named["q"], named["k"], named["v"][:, :, 1:], named["w"], named["r"])


def test_the_default_dtype_changes_nothing(inputs):
    with torch.no_grad():
        right = native.screen(*inputs)
        torch.set_default_dtype(torch.float64)
        try:
            native.kept_table_of.cache_clear()
            assert torch.equal(native.screen(*inputs), right)
        finally:
            torch.set_default_dtype(torch.float32)
