"""Tests of screening_cpu: the definition in C++, the cache that forgets, and who may use them."""
import math
import os
import shutil

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import multiscreen as ms
import screening_cpu
import train
from multiscreen import KeyCache, Multiscreen
from test_multiscreen import (
    INF,
    acceptances,
    assert_keys_on_the_threshold_contribute_nothing,
    correlated,
    draw_tokens,
    random,
    seeds,
    small,
    widths,
)
from tests.helpers import run

NAMES = ("h", "dq", "dk", "dv", "dw", "dr")
CPP = "layers are given screening_cpu.screen"
COMPILER = shutil.which(os.environ.get("CXX") or "c++")


@pytest.fixture(scope="module", autouse=True)
def needs_a_compiler():
    try:
        screening_cpu.library(16, 64)
    except OSError as e:
        pytest.skip(f"there is no C++ compiler that works: {e}")


# -------------------------------------------------------------------------- its numbers

def h_and_gradients(screen, q, k, v, w, r, i0=0):
    leaves = [x.clone().requires_grad_() for x in (q, k, v, w, r)]
    h = screen(*leaves, i0)
    dh = torch.randn(h.shape, dtype=torch.float64, generator=random(1))
    return [h, *torch.autograd.grad(h, leaves, dh.to(h.dtype))]


# 32 similarities are computed at once: windows end inside these groups and between them.
edges = st.one_of(widths, st.sampled_from([16.5, 17.0, 17.2, 31.9, 32.0, 33.0, INF]))


@given(seed=seeds, B=st.integers(1, 2), T=st.integers(1, 120), i0=st.integers(-90, 120),
       more=st.sampled_from([0, 0, 0, 0, 5, -5]), w=st.lists(edges, min_size=3, max_size=3),
       r=st.lists(acceptances, min_size=3, max_size=3))
@example(seed=0, B=2, T=140, i0=0, more=0, w=[16.5, 17.0, 17.2], r=[0.3, 0.5, 1.0])
@example(seed=1, B=2, T=97, i0=20, more=0, w=[31.9, 32.0, INF], r=[0.3, 0.5, 1.0])
@example(seed=1, B=1, T=50, i0=3, more=-33, w=[32.0, 1.0, INF], r=[0.3, 0.5, 1.0])
@example(seed=1, B=1, T=2, i0=99, more=-90, w=[32.0, 1.0, INF], r=[0.3, 0.5, 1.0])
def test_cpp_equals_the_definition_in_value_and_every_gradient(seed, B, T, i0, more, w, r):
    """Also where there are more keys than i0 + T, or fewer."""
    q, k, v = correlated(seed, B, 3, T, max(i0 + T + more, 1))
    w, r = torch.tensor([w, r], dtype=torch.float64)
    # Rounded before, or an edge of Trim or of a window would lie elsewhere.
    inputs = [x.float().double() for x in (q, k, v, w, r)]
    wanted = h_and_gradients(ms.screen, *inputs, i0)
    found = h_and_gradients(screening_cpu.screen, *(x.float() for x in inputs), i0)
    for name, a, b in zip(NAMES, found, wanted):
        # Rounding a similarity moves z by 1/r times as much, and a gradient by 1/r^2 times.
        atol = 1e-5 / r.min().item()**2 * max(0.2, b.abs().max().item())
        torch.testing.assert_close(a.double(), b, rtol=1e-3, atol=atol,
                                   msg=lambda message, name=name: f"{name}: {message}")


@pytest.fixture
def inputs():
    """q, k, v, w, r of 2 sequences of 150 tokens, 3 tiles."""
    w, r = torch.tensor([3.0, 90.0, INF]), torch.tensor([0.3, 0.5, 1.0])
    return *correlated(0, 2, 3, 150, 150, dtype=torch.float32), w, r


LAYOUTS = {
    "of projections": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "of half a batch": lambda x: torch.cat((x, x)).chunk(2)[1],
    "of a cache": lambda x: torch.cat((x, x * torch.nan), 2)[:, :, : x.shape[2]],
    "of columns": lambda x: x.mT.contiguous().mT}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_results_have_the_same_bits_wherever_rows_lie_and_on_any_number_of_threads(
        inputs, layout, monkeypatch):
    dh, found = torch.randn(inputs[2].shape, generator=random(0)), []
    for lay, threads in ((torch.Tensor.contiguous, 1), (LAYOUTS[layout], 3)):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        leaves = [*(lay(x) for x in inputs[:3]), *inputs[3:]]
        leaves = [x.detach().requires_grad_() for x in leaves]
        h = screening_cpu.screen(*leaves)
        found.append([h, *torch.autograd.grad(h, leaves, lay(dh))])
    for name, a, b in zip(NAMES, *found):
        assert torch.equal(a, b), name


def test_tiles_and_sequences_may_share_keys_values_windows_and_widths():
    q, (k, v) = torch.randn(2, 3, 20, 16), (torch.randn(1, 1, 20, D) for D in (16, 64))
    inputs = [ms.unit(q), ms.unit(k), v, torch.tensor([9.5]), torch.tensor([1.0])]
    found, right = (h_and_gradients(f, *inputs) for f in (screening_cpu.screen, ms.screen))
    for name, a, b in zip(NAMES, found, right):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=name)
    for other in ((k, v[:, :, 1:]), (k[..., :8], v)):
        with pytest.raises(ValueError, match="have the shapes"):
            screening_cpu.screen(q, *other, *inputs[3:])


def test_what_is_not_float32_goes_to_the_definition(inputs):
    for some in ({0, 1, 2, 3, 4}, {2}, {3}, {4}):
        given = [x.double() if n in some else x for n, x in enumerate(inputs)]
        assert torch.equal(screening_cpu.screen(*given), ms.screen(*given))


def test_a_key_exactly_on_the_threshold_contributes_nothing():
    """(1 - s) / r is exactly 1 there; (1 - s) times 1/r, which is rounded, would often be less."""
    assert_keys_on_the_threshold_contribute_nothing(screening_cpu.screen)


@torch.no_grad()
def test_a_query_sees_10_000_keys():
    """While a text is generated, the softmask's table is kept; it has to be long enough."""
    q, k, v = (ms.unit(torch.randn(1, 2, n, D)) for n, D in ((1, 16), (10_000, 16), (10_000, 64)))
    inputs = q, k, v, torch.tensor([INF, 9000.5]), torch.tensor([1.0, 0.9])
    torch.testing.assert_close(screening_cpu.screen(*inputs, 9_999), ms.screen(*inputs, 9_999))


@torch.no_grad()
def test_an_edit_of_softmask_acts_on_a_model_that_decodes_already(inputs, monkeypatch):
    before, right = screening_cpu.screen(*inputs), ms.softmask
    monkeypatch.setattr(ms, "softmask", lambda d, w: 0.5 * right(d, w))
    torch.testing.assert_close(screening_cpu.screen(*inputs), 0.5 * before)


def test_dr_is_summed_in_double():
    """Equal keys with s = 0.8, r = 1 and one v: dr = sum over pairs of 2 z (1 - z) (dh . v).

    In float32 the 500,000 equal terms of one tile's sum would lose digits.
    """
    T = 1000
    q, k, v = torch.zeros(1, 1, T, 16), torch.zeros(1, 1, T, 16), torch.zeros(1, 1, T, 64)
    q[..., 0], k[..., 0], k[..., 1], v[..., 0] = 1, 0.8, 0.6, 1
    r = torch.ones(1, requires_grad=True)
    screening_cpu.screen(q, k, v, torch.tensor([INF]), r).sum().backward()
    pairs, z = T * (T + 1) / 2, float(torch.tensor(0.8))
    assert r.grad.item() == pytest.approx(pairs * 2 * z * (1 - z), rel=2e-6)


def test_a_second_derivative_is_refused(inputs):
    leaves = [x.requires_grad_() for x in inputs]
    with pytest.raises(NotImplementedError, match="multiscreen.screen"):
        torch.autograd.grad(screening_cpu.screen(*leaves).sum(), leaves, create_graph=True)


@pytest.mark.slow
def test_no_byte_outside_of_the_tensors_is_read(tmp_path):
    """By the compiler's address sanitizer, on tensors whose rows end where memory ends."""
    library = screening_cpu.output([COMPILER, "-print-file-name=libasan.so"]).strip()
    if not os.path.isabs(library):
        pytest.skip("this compiler has no address sanitizer")
    code = """if True:
        import torch, screening_cpu
        screening_cpu.FLAGS.append("-fsanitize=address")
        for T, S, i0 in ((1, 1, 0), (5, 37, 32), (33, 33, 0)):
            q, k, v = torch.ones(1, 2, T, 16), torch.ones(1, 2, S, 16), torch.ones(1, 2, S, 64)
            x = [y.requires_grad_() for y in (q, k, v, torch.tensor([9.0, torch.inf]),
                                              torch.ones(2))]
            screening_cpu.screen(*x, i0).sum().backward()
        print("all right")"""
    env = {"TORCH_EXTENSIONS_DIR": str(tmp_path), "LD_PRELOAD": library}
    done = run("-c", code, env=os.environ | env | {"ASAN_OPTIONS": "detect_leaks=0"})
    assert done.stdout == "all right\n", done.stderr[-3000:]


# ---------------------------------------------------------------------- who may use it

@pytest.mark.parametrize("scope, name", [
    (ms, "trim"), (ms, "softmask"), (ms, "relevance"), (ms, "screen"), (Multiscreen, "screen"),
    (KeyCache, "append")])
def test_an_edit_of_what_it_repeats_switches_it_off(monkeypatch, scope, name):
    """The code counts: this edit changes no number."""
    right = getattr(scope, name)

    def edited(*inputs):
        return right(*inputs)

    monkeypatch.setattr(scope, name, staticmethod(edited) if scope is Multiscreen else edited)
    model = small()
    assert "edited" in train.choose_screen(model)
    assert model.screen is Multiscreen.screen
    with pytest.raises(SystemExit, match="edited"):
        train.choose_screen(model, "screening_cpu")


def test_a_model_with_a_screen_of_its_own_keeps_it():
    class Halved(Multiscreen):
        @staticmethod
        def screen(*inputs):
            return 0.5 * ms.screen(*inputs)

    model = Halved(ms.Config(psi=2, vocab_size=7))
    for kernel in ("auto", "screening_cpu"):
        assert "does not screen by multiscreen.screen" in train.choose_screen(model, kernel)
        assert model.screen is Halved.screen


def test_a_kernel_of_ones_own_is_tried_before_it_is_used(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name, factor in (("right_kernel", 1), ("wrong_kernel", 1.01)):
        (tmp_path / f"{name}.py").write_text(
            "import multiscreen\n"
            f"def screen(*inputs):\n    return {factor} * multiscreen.screen(*inputs)\n")
    assert train.choose_screen(small(), "right_kernel") == "layers are given right_kernel.screen"
    with pytest.raises(SystemExit, match="wrong_kernel: h is off by 0.01 of its largest value"):
        train.choose_screen(small(), "wrong_kernel")
    for model in (small().double(), small(dtype=torch.bfloat16)):
        with pytest.raises(SystemExit, match="screening_cpu: it is for float32"):
            train.choose_screen(model, "screening_cpu")


# What a wrong screen returns in place of h.
WRONG = {
    "the first sequence for all": lambda h, *inputs: h[:1].expand_as(h),
    "windows above 1,000 are infinite": lambda h, q, k, v, w, r, i0: ms.screen(
        q, k, v, w.masked_fill(w > 1000, INF), r, i0),
    "one tile is 0.3 % off": lambda h, q, k, v, w, r, i0: h * (1 + 0.003 * (w < 2))[:, None, None],
    "no gradient of r": lambda h, q, k, v, w, r, i0: ms.screen(q, k, v, w, r.detach() + 0 * r, i0),
    "NaN as the gradient of r": lambda h, q, k, v, w, r, i0: h + 0 * (r - r.detach()).sqrt().sum(),
    "NaN becomes 0": lambda h, *inputs: h.nan_to_num(0),
    "NaN reaches other queries": lambda h, q, *inputs: h + 0 * q.sum((2, 3), keepdim=True),
    "wrong for the model's sizes alone": lambda h, q, *inputs: h * (2.0 if q.shape[3] == 8 else 1),
    "keys that point away count": lambda h, q, k, *inputs: h + ms.screen(q, -k, *inputs)}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_screen_with_wrong_numbers_is_refused(mistake):
    def screen(*inputs):
        return WRONG[mistake](ms.screen(*inputs), *inputs)

    with pytest.raises(ValueError, match="off by|NaN"):
        train.try_screen(screen, small(d_K=8, d_V=32))


# ------------------------------------------------------------------------- the library

@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder of torch's extensions; no library is loaded yet."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    screening_cpu.library.cache_clear()
    yield tmp_path / "multiscreen"
    screening_cpu.library.cache_clear()


def choose_again():
    screening_cpu.library.cache_clear()
    return train.choose_screen(small())


@pytest.mark.slow
def test_it_is_built_once_and_again_where_it_was_cut_off_or_does_not_load(folder):
    assert choose_again() == CPP
    path, = folder.iterdir()
    written = path.stat().st_mtime_ns
    assert choose_again() == CPP
    assert path.stat().st_mtime_ns == written
    # In another process, because this one still has the whole file in memory.
    whole = path.read_bytes()
    for damaged in (whole[:3000], bytes(len(whole))):
        path.unlink()
        path.write_bytes(damaged)
        done = run("-c", "from tests.test_screen_cpu import *; print(choose_again())")
        assert done.stdout == f"{CPP}\n", done.stderr
        assert [file.name for file in folder.iterdir()] == [path.name]
        assert path.stat().st_size > 10_000


@pytest.mark.slow
def test_it_is_right_under_ffast_math(folder, monkeypatch):
    monkeypatch.setenv("CXX", f"{COMPILER} -ffast-math")
    assert choose_again() == CPP


def use_compiler(folder, monkeypatch, lines):
    """Let $CXX be a script that runs `lines`, and then the real compiler."""
    script = folder.parent / "compiler"
    script.write_text(f'#!/bin/sh\n{lines}\nexec {COMPILER} "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))


@pytest.mark.parametrize("lines, reason", [
    ("exit 3", "compiler fails with code 3"),
    ('for x; do [ "$last" = -o ] && echo a half >"$x" && exit 1; last=$x; done', "compiler fails"),
    ('case "$*" in *screen.cpp*) exit 0; esac', "No such file")])
def test_without_a_compiler_that_works_the_definition_screens(folder, monkeypatch, lines, reason):
    use_compiler(folder, monkeypatch, lines)
    line = choose_again()
    assert line.startswith("layers are given multiscreen.screen") and reason in line
    assert not list(folder.glob("*"))


@pytest.mark.slow
@pytest.mark.parametrize("lines", [
    # OpenMP, once it is there, is used.
    'for x; do if [ "$x" = -fopenmp ] && [ ! -e "$0.other" ]; then exit 1; fi; done',
    # Two processors that share a home: macros say what each can do.
    'case "$*" in *-dM*) [ -e "$0.other" ] && echo "#define OTHER" ;; esac'])
def test_another_compiler_or_processor_has_a_library_of_its_own(folder, monkeypatch, lines):
    use_compiler(folder, monkeypatch, lines)
    assert choose_again() == CPP
    assert ["one_thread" in file.name for file in folder.iterdir()] == ["openmp" in lines]
    (folder.parent / "compiler.other").touch()
    assert choose_again() == CPP
    assert len(list(folder.iterdir())) == 2


# --------------------------------------------------------------- the cache that forgets

@torch.no_grad()
def test_decoding_with_the_cache_that_forgets_equals_one_pass():
    """Layer 0 forgets; an infinite window in layer 1 sees all keys, far more than a chunk has."""
    model, pieces = small(w_th=16.0), [7, 7, 1500, 1, 1000, 40]
    model.layers[1].s_w[0] = INF
    assert train.choose_screen(model) == CPP
    tokens, caches = draw_tokens(2, sum(pieces)), model.new_caches()
    assert isinstance(caches[0], screening_cpu.WindowCache)
    found = torch.cat([model(part, caches) for part in tokens.split(pieces, 1)], 1)
    torch.testing.assert_close(found, model(tokens), rtol=1e-4, atol=1e-4)
    assert caches[0].n_kept < sum(pieces)
    assert caches[1].n_kept == sum(pieces)


@pytest.mark.parametrize("w, oldest", [([3.0, 9.5, 4.0], 30), ([3.0, INF], 0), ([math.nan], 0),
                                       (None, 0)])
def test_the_cache_keeps_what_the_widest_window_reaches_and_forgets_older_keys(w, oldest):
    cache, x = screening_cpu.WindowCache(), torch.arange(41.0).reshape(1, 1, 41, 1)
    for part in x.split([40, 1], 2):
        k, v = cache.append(part, part, None if w is None else torch.tensor(w))
    assert k.flatten().tolist() == v.flatten().tolist() == list(range(oldest, 41))


def test_gradients_flow_through_the_cache_that_forgets_after_a_prompt_without_any():
    k, v, w = torch.ones(1, 1, 4, 16), torch.ones(1, 1, 4, 64), torch.tensor([3.0])
    found = []
    for kind in (KeyCache, screening_cpu.WindowCache):
        cache, leaf, loss = kind(), k.clone().requires_grad_(), 0
        with torch.no_grad():
            cache.append(k, v, w)
        for _ in range(2):
            kept, _ = cache.append(leaf, v, w)
            loss = loss + kept[:, :, -5:].square().sum()
        loss.backward()
        found.append(leaf.grad)
    assert torch.equal(*found) and found[0].any()
