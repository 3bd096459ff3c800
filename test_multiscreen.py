"""Tests, in the order of the equations: hand-worked points, properties (Hypothesis), an independent float64 reference.

Tensors come from local generators with a drawn seed. Queries and keys are correlated: independent unit vectors in 16
dimensions almost never pass Trim, and a test on them would compare zeros with zeros.
"""
import functools
import hashlib
import io
import math
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
os.environ.setdefault("TRITON_INTERPRET", "0" if DEVICE == "cuda" else "1")       # before anything imports triton
INDUCTOR = tempfile.TemporaryDirectory()                   # a cache of its own: it cannot tell two layouts of one operator apart
os.environ["TORCHINDUCTOR_CACHE_DIR"] = INDUCTOR.name

import abcdigits
import multiscreen as ms
import screening_triton as fused
import train
from multiscreen import Config, KeyCache, Multiscreen

HERE = Path(__file__).parent
INF = math.inf
settings.register_profile("repo", deadline=None, max_examples=40, derandomize=bool(os.environ.get("CI")))
settings.load_profile("repo")

seeds = st.integers(0, 2**31 - 1)
widths = st.one_of(st.integers(1, 90).map(float), st.floats(1.0, 150.0), st.just(1e9), st.just(INF))
acceptances = st.floats(0.02, 1.0)


def random(seed):
    return torch.Generator().manual_seed(seed)


def correlated(seed, B, H, T, S, K=16, V=64, dtype=torch.float64, rho=0.8):
    """Unit q, k, v around a direction of each tile: similarities spread over (0, 1), so many pairs pass Trim."""
    g = random(seed)
    base = torch.randn(B, H, 1, K, generator=g, dtype=torch.float64)
    q, k = (ms.unit(rho * base + (1 - rho) * torch.randn(B, H, n, K, generator=g, dtype=torch.float64)) for n in (T, S))
    return q.to(dtype), k.to(dtype), ms.unit(torch.randn(B, H, S, V, generator=g, dtype=torch.float64)).to(dtype)


def guards(equation):
    """A test of an equation: where it fails, it says what to think if the equation was changed on purpose."""
    def decorate(test):
        @functools.wraps(test)
        def wrapper(*args, **kwargs):
            try:
                test(*args, **kwargs)
            except AssertionError as e:
                e.add_note(f"This test guards {equation} of the paper. If you changed it on purpose, the failure is right: the "
                           "change acts. Undo it with git checkout multiscreen.py, which drops every edit of that file.")
                raise
        return wrapper
    return decorate


# ------------------------------------------------------------------------------------------------ equations 4 to 14

def test_every_equation_has_one_owner_and_the_readme_agrees():
    owners = {}
    for scope in (ms, ms.GatedScreeningTiles, ms.Multiscreen):
        for name, f in vars(scope).items():
            if getattr(f, "__module__", "") == "multiscreen" and callable(f) and not isinstance(f, type):
                for n in re.findall(r"Eq\. \((\d+)\)", f.__doc__ or ""):
                    owners.setdefault(int(n), []).append(name)
    assert sorted(owners) == list(range(1, 19))
    assert all(len(names) == 1 for names in owners.values()), owners
    rows = re.findall(r"^\| *([\d, ]+?) *\|.*?\| *`([\w.]+)`", (HERE / "README.md").read_text(), re.M)
    table = {int(n): function.split(".")[-1] for numbers, function in rows for n in numbers.split(",")}
    assert table == {n: names[0] for n, names in owners.items()}


@guards("Eq. (4), window and acceptance width")
def test_window_and_acceptance_by_hand():
    s_w = torch.tensor([0.0, math.log(256), -INF, INF, 1e4], requires_grad=True)
    w = ms.window(s_w)
    assert w[0] == 2 and w[2] == 1 and w[3] == INF
    torch.testing.assert_close(w[1].item(), 257.0, rtol=1e-5, atol=0)
    w[:4].sum().backward()
    torch.testing.assert_close(s_w.grad, torch.tensor([1.0, 256.0, 0.0, 0.0, 0.0]))
    assert ms.acceptance(torch.tensor(0.0)) == 0.5
    torch.testing.assert_close(ms.acceptance(torch.tensor(math.log(3.0))).item(), 0.75)


@guards("Eq. (5), unit length")
@given(seed=seeds, scale=st.floats(1e-3, 1e6))
def test_unit_has_length_one_and_ignores_scale(seed, scale):
    x = torch.randn(5, 16, generator=random(seed), dtype=torch.float64)
    torch.testing.assert_close(ms.unit(x).norm(dim=-1), torch.ones(5, dtype=torch.float64))
    torch.testing.assert_close(ms.unit(scale * x), ms.unit(x), rtol=1e-9, atol=1e-12)


@guards("Eq. (5), unit length")
def test_unit_of_zero_is_zero_with_a_finite_gradient():
    x = torch.zeros(3, 16, requires_grad=True)
    y = ms.unit(x)
    y.sum().backward()
    assert (y == 0).all() and x.grad.isfinite().all()


@guards("Eqs. (6) and (7), MiPE's angle")
def test_mipe_angle_by_hand():
    w = torch.tensor([2.0, 128.0, 256.0, 1e6, INF], dtype=torch.float64)
    angle = ms.mipe_angle(torch.tensor([0, 1, 3]), w, 256.0)
    assert (angle[:, 0] == 0).all() and (angle[2:] == 0).all()
    torch.testing.assert_close(angle[1, 1].item(), math.pi / 256)                     # gamma(w_th / 2) = 1/2
    gamma = (math.cos(math.pi / 128) + 1) / 2
    torch.testing.assert_close(angle[0, 2].item(), 3 * math.pi * gamma / 2)


@guards("Eqs. (6) and (7), MiPE's angle")
@given(i=st.integers(0, 2**20), w=st.floats(1.0, 300.0))
def test_mipe_angle_is_right_far_out(i, w):
    """In float32 pi * i * gamma / w alone would be off by 0.03 rad at 2^17; the reference has more digits than float64."""
    w = float(np.float32(w))
    pi = np.longdouble("3.14159265358979323846264338327950288")
    gamma = (np.cos(pi * np.longdouble(w) / 256) + 1) / 2 if w < 256 else np.longdouble(0)
    exact = i * (pi * gamma / np.longdouble(w))
    angle = ms.mipe_angle(torch.tensor([i]), torch.tensor([w]), 256.0).item()
    assert abs(np.remainder(angle - exact + pi, 2 * pi) - pi) < 2e-6


@guards("Eqs. (6) and (7), MiPE")
@given(seed=seeds, i=st.integers(0, 5000), d=st.integers(0, 300), shift=st.integers(0, 10**6), w=st.floats(1.5, 400.0))
def test_rotation_depends_on_the_distance_only(seed, i, d, shift, w):
    q, k, _ = correlated(seed, 1, 1, 1, 1)
    w = torch.tensor([w], dtype=torch.float64)

    def similarity(i, j):
        turn = [ms.mipe(x, ms.mipe_angle(torch.tensor([n]), w, 256.0)) for x, n in ((q, i), (k, j))]
        return (turn[0] * turn[1]).sum()

    torch.testing.assert_close(similarity(i + d, i), similarity(i + d + shift, i + shift), rtol=0, atol=1e-8)
    if w >= 256:
        assert similarity(i + d, i) == (q * k).sum()
    else:
        x = ms.mipe(q, ms.mipe_angle(torch.tensor([i]), w, 256.0))
        torch.testing.assert_close(x.norm(), q.norm())
        assert torch.equal(x[..., 2:], q[..., 2:])


@guards("Eq. (9), Trim")
@pytest.mark.parametrize("s, r, alpha", [(1, 0.5, 1), (0.9, 0.5, 0.64), (0.5, 0.5, 0), (0.75, 0.5, 0.25), (0, 1, 0), (-1, 1, 0), (0.5, 1, 0.25)])
def test_trim_by_hand(s, r, alpha):
    torch.testing.assert_close(ms.trim(torch.tensor(float(s)), torch.tensor(float(r))).item(), float(alpha))


@guards("Eq. (9), Trim")
@given(s=st.floats(-1, 1, width=32), r=st.floats(0.015625, 1, width=32))
@example(s=0.5, r=0.5)
@example(s=1.0, r=1.0)
def test_trim_is_bounded_and_exactly_zero_at_its_threshold(s, r):
    s = torch.tensor(s, requires_grad=True)
    alpha = ms.trim(s, torch.tensor(r))
    alpha.backward()
    assert 0 <= alpha <= 1
    if 1 - s >= r:
        assert alpha == 0 and s.grad == 0
    elif 1 - s < 0.999 * r:
        assert alpha > 0 and s.grad > 0


@guards("Eq. (10), Softmask")
@pytest.mark.parametrize("d, w, m", [(0, 4, 1), (-1, 4, 0.5 + 0.25 * math.sqrt(2)), (-2, 4, 0.5), (-3, 4, 0.5 - 0.25 * math.sqrt(2)), (-4, 4, 0),
                                     (1, 4, 0), (-5, 4, 0), (-9, INF, 1), (1, INF, 0), (0, 1, 1), (-1, 1, 0)])
def test_softmask_by_hand(d, w, m):
    torch.testing.assert_close(ms.softmask(torch.tensor(d), torch.tensor(float(w))).item(), float(m))


@guards("Eq. (10), Softmask")
@given(d=st.integers(-400, 5), w=widths)
def test_softmask_is_bounded_and_exactly_zero_outside(d, w):
    m = ms.softmask(torch.tensor(d), torch.tensor(w, dtype=torch.float64))
    assert 0 <= m <= 1
    assert (m > 0) == (-w < d <= 0) or (-w < d and m < 1e-9)


@guards("Eqs. (8) and (11), relevance")
@given(seed=seeds, w=widths, r=acceptances, dtype=st.sampled_from([torch.float32, torch.float64]))
def test_relevance_of_a_pair_does_not_depend_on_other_keys(seed, w, r, dtype):
    q, k, _ = correlated(seed, 1, 2, 20, 20, dtype=dtype)
    w, r = torch.full((2,), w, dtype=dtype), torch.full((2,), r, dtype=dtype)
    before = ms.relevance(q, k, w, r)
    changed = k.clone()
    changed[:, :, 7] = q[:, :, 11]
    after = ms.relevance(q, changed, w, r)
    others = [j for j in range(20) if j != 7]
    assert torch.equal(before[..., others], after[..., others])
    assert not torch.equal(before, after) or w[0] <= 1 or r[0] < 0.05
    assert before.min() >= 0 and before.max() <= 1 + 1e-5


def reference_screen(q, k, v, w, r, i0):
    """Eqs. 8 to 12 in float64, one pair at a time."""
    q, k, v, w, r = (x.double().numpy() for x in (q, k, v, w, r))
    h = np.zeros(q.shape[:3] + v.shape[3:])
    for b, n, t, j in np.ndindex(*q.shape[:3], k.shape[2]):
        d = j - (i0 + t)
        if -w[n] < d <= 0:
            alpha = max(1 - (1 - q[b, n, t] @ k[b, n, j]) / r[n], 0) ** 2
            h[b, n, t] += alpha * (math.cos(math.pi * d / w[n]) + 1) / 2 * v[b, n, j]
    return torch.from_numpy(h)


@guards("Eqs. (8) to (12), screening")
@settings(max_examples=15)
@given(seed=seeds, T=st.integers(1, 12), S=st.integers(1, 12), i0=st.integers(-3, 12), w=widths, r=acceptances)
def test_screen_against_a_loop_over_pairs(seed, T, S, i0, w, r):
    q, k, v = correlated(seed, 2, 2, T, S, V=3)
    w, r = torch.tensor([w, 3.5], dtype=torch.float64), torch.tensor([r, 0.9], dtype=torch.float64)
    torch.testing.assert_close(ms.screen(q, k, v, w, r, i0), reference_screen(q, k, v, w, r, i0), rtol=1e-12, atol=1e-12)


@guards("Eqs. (8) to (12), screening")
def test_screen_gradcheck():
    q, k, v = correlated(0, 1, 2, 5, 7, K=4, V=3)
    w, r = torch.tensor([3.5, INF], dtype=torch.float64), torch.tensor([0.4, 0.9], dtype=torch.float64)
    inputs = [x.requires_grad_() for x in (q, k, v, w[:1].clone(), r)]
    assert torch.autograd.gradcheck(lambda q, k, v, w0, r: ms.screen(q, k, v, torch.cat((w0, w[1:])), r, 2), inputs)


def gradients(f, q, k, v, w, r, i0, seed):
    inputs = [x.detach().clone().requires_grad_() for x in (q, k, v, w, r)]
    h = f(*inputs, i0)
    h.backward(torch.randn(h.shape, generator=random(seed), dtype=torch.float64).to(h.dtype))
    return [h.detach()] + [x.grad for x in inputs]


@given(seed=seeds, B=st.integers(1, 2), T=st.integers(1, 150), S=st.integers(1, 150), i0=st.integers(-90, 160), w=st.lists(widths, min_size=3, max_size=3),
       r=st.lists(acceptances, min_size=3, max_size=3), K=st.sampled_from([4, 16]))
@example(seed=0, B=2, T=1, S=1, i0=0, w=[1.0, 2.5, INF], r=[0.02, 0.5, 1.0], K=16)
@example(seed=0, B=2, T=140, S=140, i0=0, w=[33.0, 64.5, INF], r=[0.3, 0.5, 1.0], K=16)
@example(seed=1, B=1, T=40, S=150, i0=110, w=[32.0, 65.0, 66.0], r=[0.3, 0.5, 1.0], K=16)
def test_windowed_equals_dense_in_value_and_every_gradient(seed, B, T, S, i0, w, r, K):
    q, k, v = correlated(seed, B, 3, T, S, K=K, V=8)
    w, r = torch.tensor(w, dtype=torch.float64), torch.tensor(r, dtype=torch.float64)
    for dense, windowed in zip(gradients(ms.screen, q, k, v, w, r, i0, seed), gradients(ms.screen_windowed, q, k, v, w, r, i0, seed)):
        torch.testing.assert_close(windowed, dense, rtol=1e-6, atol=1e-6 * max(1.0, dense.abs().max().item()))


def test_a_second_derivative_of_screen_windowed_is_refused():
    x = [y.float().requires_grad_() for y in correlated(0, 1, 2, 40, 40, V=8)]
    w, r = torch.tensor([5.0, INF], requires_grad=True), torch.tensor([0.4, 0.9], requires_grad=True)
    first, = torch.autograd.grad(ms.screen_windowed(*x, w, r).square().sum(), r, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_backward_may_run_twice_and_gives_the_same_bits():
    """The first time from the graphs that were kept, the second from graphs made again."""
    x = [y.float().requires_grad_() for y in correlated(0, 1, 2, 100, 100, V=8)]
    w, r = torch.tensor([5.0, 80.0], requires_grad=True), torch.tensor([0.4, 0.9], requires_grad=True)
    loss = ms.screen_windowed(*x, w, r).square().sum()
    once, twice = (torch.autograd.grad(loss, [*x, w, r], retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(once, twice))


@pytest.mark.parametrize("T, tile", [(1, 0), (40, 0), (300, 1)])
def test_windowed_dense_and_bfloat16_agree_on_transposed_inputs(T, tile):
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in correlated(3, 2, 2, T, T, dtype=torch.bfloat16))
    w, r = torch.tensor([5.5, INF]), torch.tensor([0.5, 0.7])
    exact = ms.screen(q.double(), k.double(), v.double(), w.double(), r.double())
    for f in (ms.screen, ms.screen_windowed):
        h = f(q, k, v, w, r)
        assert h.dtype == torch.bfloat16
        torch.testing.assert_close(h.double(), exact, rtol=0.01, atol=1e-3)


@settings(max_examples=20)
@given(seed=seeds, T=st.integers(2, 140), w=widths, dtype=st.sampled_from([torch.float32, torch.bfloat16]), f=st.sampled_from([ms.screen, ms.screen_windowed]),
       data=st.data())
def test_causality_and_window_edge_are_bitwise(seed, T, w, dtype, f, data):
    """Changing the key and value at j changes nothing before j, and nothing from j + w on: not by one bit."""
    q, k, v = correlated(seed, 1, 1, T, T, dtype=dtype)
    w, r = torch.tensor([w]), torch.tensor([0.9])
    j = data.draw(st.integers(0, T - 1))
    k2, v2 = k.clone(), v.clone()
    k2[:, :, j], v2[:, :, j] = q[:, :, T - 1], -v[:, :, j]
    before, after = f(q, k, v, w, r), f(q, k2, v2, w, r)
    edge = math.ceil(min(w.item(), T)) + j
    assert torch.equal(before[:, :, :j], after[:, :, :j]) and torch.equal(before[:, :, edge:], after[:, :, edge:])
    assert not torch.equal(before[:, :, j], after[:, :, j])                  # q and k are close: the pair (j, j) is alive


@pytest.mark.skipif(sys.platform == "win32", reason="reads the peak memory the Unix way")
def test_memory_is_linear_whatever_the_windows():
    """Forward and backward over 2^14 positions with infinite windows: a T x T matrix alone would be 1 GiB."""
    code = """if True:
        import resource, sys, torch, multiscreen as ms
        q, k, v = (ms.unit(torch.randn(1, 1, 2**14, n)).requires_grad_() for n in (16, 16, 64))
        w, r = torch.tensor([torch.inf], requires_grad=True), torch.tensor([0.5], requires_grad=True)
        ms.screen_windowed(q[:, :, :64], k[:, :, :64], v[:, :, :64], w, r).sum().backward()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        ms.screen_windowed(q, k, v, w, r).sum().backward()
        print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / (2**20 if sys.platform == 'linux' else 2**30))"""
    out = subprocess.run([sys.executable, "-c", code], cwd=HERE, capture_output=True, text=True, check=True)
    assert float(out.stdout) < 0.25                                          # GiB


@pytest.mark.parametrize("f", [ms.screen, ms.screen_windowed])
@pytest.mark.parametrize("r", [0.3, 0.55, 0.75])
def test_a_key_exactly_on_the_threshold_contributes_nothing_at_all(f, r):
    """s is a multiple of 2^-10 and no product rounds, so both forms see the same s; r is the float32 number 1 - s."""
    s = round((1 - r) * 1024) / 1024
    q, k = torch.zeros(2, 1, 1, 64, 16)
    q[..., 0], k[..., 0] = 1, s
    v, w = torch.ones(1, 1, 64, 64), torch.tensor([INF])
    assert (f(q, k, v, w, torch.tensor([1 - s])) == 0).all()
    below = torch.nextafter(torch.tensor([1 - s]), torch.tensor([0.0]))
    above = torch.tensor([(1 - s) * 1.001])
    assert (f(q, k, v, w, below) == 0).all() and (f(q, k, v, w, above) > 0).all()


@guards("Eq. (13), TanhNorm")
@given(seed=seeds, scale=st.floats(1e-4, 1e3))
def test_tanh_norm_bounds_the_length_and_keeps_the_direction(seed, scale):
    x = scale * torch.randn(3, 16, generator=random(seed), dtype=torch.float64)
    y = ms.tanh_norm(x)
    torch.testing.assert_close(y.norm(dim=-1), torch.tanh(x.norm(dim=-1)))
    torch.testing.assert_close(ms.unit(y), ms.unit(x))


@guards("Eq. (13), TanhNorm")
@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-8, 1e-6, 1e-3, 1e4])
def test_tanh_norm_has_no_bad_point(size):
    x = torch.zeros(16, dtype=torch.float64)
    x[0] = size
    J = torch.autograd.functional.jacobian(ms.tanh_norm, x)
    assert J.isfinite().all()
    if size <= 1e-3:
        torch.testing.assert_close(J, torch.eye(16, dtype=torch.float64), rtol=0, atol=2e-6)
    for dtype in (torch.float32, torch.float64):
        x32 = x.to(dtype).requires_grad_()
        ms.tanh_norm(x32).sum().backward()
        assert x32.grad.isfinite().all()
    assert torch.autograd.gradcheck(ms.tanh_norm, [torch.randn(2, 4, generator=random(0), dtype=torch.float64).requires_grad_()])


# ------------------------------------------------------------------------------- the model: equations 1 to 3, 15 to 18

def small(seed=0, far=False, vocab_size=50, **sizes):
    """A small model, its parameters far from their initial values if asked: windows 1.1 to inf, r .05 to .95."""
    torch.manual_seed(seed)
    model = Multiscreen(Config(**({"psi": 3, "d_E": 24, "vocab_size": vocab_size} | sizes)))
    if far:
        with torch.no_grad():
            g = random(seed)
            for tile in model.layers:
                tile.s_w.uniform_(-2.0, 6.0, generator=g)
                tile.s_r.uniform_(-3.0, 3.0, generator=g)
                tile.s_O.uniform_(-1.0, 1.0, generator=g)
                tile.W_Q.copy_(0.3 * torch.randn(tile.W_Q.shape, generator=g))
                tile.W_K.copy_(tile.W_Q + 0.1 * torch.randn(tile.W_Q.shape, generator=g))
                tile.W_V.mul_(20)
                tile.W_G.mul_(10)
            model.layers[0].s_w[0] = INF
            model.W_E.add_(0.03 * torch.randn(model.config.d_E, generator=g))       # similar tokens: many pairs pass Trim
            model.s_E.fill_(0.7)
            model.s_F.fill_(1.3)
    return model


def reference_logits(p, c, tokens):
    """The whole paper, Eqs. 1 to 18, in float64, one sequence, one tile and one query at a time. p: parameters by name."""
    E = p["W_E"] / p["W_E"].norm(dim=1, keepdim=True)
    x = p["s_E"].exp() * E[tokens]
    for n in range(c.N_L):
        W = {name: p[f"layers.{n}.{name}"] for name in ("W_Q", "W_K", "W_V", "W_G", "W_O", "s_w", "s_r", "s_O")}
        update = 0
        for t in range(c.N_H):
            w, r = W["s_w"][t].exp() + 1, 1 / (1 + (-W["s_r"][t]).exp())
            q, k, v, g = (x @ W[name][:, t] for name in ("W_Q", "W_K", "W_V", "W_G"))
            q, k, v = (y / y.norm(dim=1, keepdim=True) for y in (q, k, v))
            if w < c.w_th:
                phi = math.pi * torch.arange(len(tokens), dtype=x.dtype) * ((math.pi * w / c.w_th).cos() + 1) / 2 / w
                q, k = (torch.cat((y[:, :1] * phi.cos()[:, None] - y[:, 1:2] * phi.sin()[:, None],
                                   y[:, :1] * phi.sin()[:, None] + y[:, 1:2] * phi.cos()[:, None], y[:, 2:]), 1) for y in (q, k))
            h = []
            for i in range(len(tokens)):
                j = torch.arange(max(math.floor(i - w.item()) + 1, 0) if w < INF else 0, i + 1)
                alpha = (1 - (1 - k[j] @ q[i]) / r).relu() ** 2
                m = ((math.pi * ((j - i) / w)).cos() + 1) / 2 if w < INF else torch.ones(len(j), dtype=x.dtype)
                h.append((alpha * m) @ v[j])
            h = torch.stack(h)
            norm = h.norm(dim=1, keepdim=True)
            u = torch.where(norm > 0, norm.tanh() / torch.where(norm > 0, norm, 1), 1) * h
            update = update + (u * (g / (1 + (-g).exp())).tanh()) @ (W["s_O"][t].exp() * W["W_O"][t])
        x = x + update
    return x @ (p["s_F"].exp() * E).T


@guards("Eqs. (1) to (18), the model")
@pytest.mark.parametrize("seed, far", [(0, False), (0, True), (1, True), (2, True)])
@pytest.mark.parametrize("screen", [ms.screen, ms.screen_windowed])
def test_logits_and_every_gradient_equal_the_paper_in_float64(seed, far, screen):
    model = small(seed, far)
    model.screen = screen
    tokens = torch.randint(50, (1, 71), generator=random(seed))
    x, y = tokens[:, :-1], tokens[0, 1:]
    p = {name: value.detach().double().requires_grad_() for name, value in model.named_parameters()}
    exact = reference_logits(p, model.config, x[0])
    if far:
        alive = torch.stack(model.relevance_maps(x)).gt(0).double().mean()
        assert 0.05 < alive < 0.5                                        # of T x T; the causal half is 0.5
    logits = model(x)[0]
    assert (logits.double() - exact).norm() / exact.norm() < 1e-4
    torch.testing.assert_close(model.double()(x)[0], exact, rtol=1e-9, atol=1e-9)
    torch.nn.functional.cross_entropy(exact, y).backward()
    model.loss(x, y[None]).backward()
    for name, value in model.named_parameters():
        wanted = p[name].grad.nan_to_num()                               # the reference has 0/0 for an infinite window
        torch.testing.assert_close(value.grad, wanted, rtol=1e-6, atol=1e-9 * max(1, wanted.abs().max().item()), msg=lambda m: f"{name}: {m}")


@pytest.mark.parametrize("psi, total, non_embedding", [
    (8, 4_134_146, 917_698), (16, 27_546_626, 14_680_834), (32, 286_347_266, 234_884_098), (48, 1_304_884_226, 1_189_092_098),
    (64, 3_963_961_346, 3_758_108_674)])
def test_parameter_counts_are_the_papers(psi, total, non_embedding):
    with torch.device("meta"):
        model = Multiscreen(Config(psi))
    count = sum(p.numel() for p in model.parameters())
    assert (count, count - model.W_E.numel()) == (total, non_embedding)


def test_the_printed_table_has_these_counts():
    out = subprocess.run([sys.executable, "multiscreen.py"], cwd=HERE, capture_output=True, text=True, check=True).stdout
    assert "1,304,884,226   1,189,092,098" in out and len(out.splitlines()) == 6


def test_initial_values_are_the_papers():
    torch.manual_seed(0)
    model = Multiscreen(Config(8, vocab_size=5000, N_L=5, d_E=144))               # all sizes differ
    stds = {"W_Q": 0.1 / 4, "W_K": 0.1 / 4, "W_V": 0.1 / 8, "W_G": 0.1, "W_O": 0.1 / 12}
    for tile in model.layers:
        for name, std in stds.items():
            W = getattr(tile, name).detach() / std
            assert abs(W.std() - 1) < 0.05 and abs(W.mean()) < 0.05 and abs(W.pow(4).mean() / 3 - 1) < 0.2      # Gaussian
        torch.testing.assert_close(tile.s_w.detach(), torch.arange(8) * math.log(256) / 7)
        assert (tile.s_r == 0).all()
        torch.testing.assert_close(tile.s_O.detach(), torch.full((8,), math.log(1 / math.sqrt(40))))
    assert abs(model.W_E.std().item() / (0.1 / 12) - 1) < 0.02
    assert model.s_E == 0 and abs(model.s_F.item() - math.log(12)) < 1e-6


@pytest.mark.parametrize("sizes", [{"psi": 0}, {"N_L": 0}, {"d_K": 1}, {"vocab_size": 0}, {"w_th": 1.0}])
def test_impossible_sizes_are_refused(sizes):
    with pytest.raises(ValueError, match="must be"):
        Config(**sizes)


def test_the_code_in_the_readme_is_the_model():
    code = re.search(r"```python\n(.*?)```", (HERE / "README.md").read_text(), re.S).group(1)
    scope = {}
    exec(code, scope)
    q, k, v = (torch.randn(2, 3, 40, n, generator=random(n)) for n in (16, 17, 64))
    q, k = q + 1, k[..., :16] + 1
    tile = small(psi=3, far=True).layers[1]
    w, r = ms.window(tile.s_w), ms.acceptance(tile.s_r)
    i = torch.arange(40)
    u = tile.bound(ms.screen_windowed(tile.encode(ms.unit(q), i, w), tile.encode(ms.unit(k), i, w), ms.unit(v), w, r))
    torch.testing.assert_close(scope["screening_unit"](q, k, v, w, r), u, rtol=1e-4, atol=1e-6)
    assert u.abs().max() > 0.01


def test_logits_are_never_kept_for_backward():
    model = small(1)
    model.config.vocab_size = 2**25 // 7                                       # chunks of 7 tokens
    tokens = torch.randint(50, (1, 71), generator=random(0))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.shape) or x, lambda x: x):
        model.loss(tokens[:, :-1], tokens[:, 1:])
    assert not any(len(shape) == 2 and shape[0] in (7, 70) and shape[-1] == 50 for shape in kept)


def test_loss_is_the_cross_entropy_of_the_logits_in_chunks_too(monkeypatch):
    model = small(1, far=True)
    tokens = torch.randint(50, (2, 41), generator=random(0))
    x, y = tokens[:, :-1], tokens[:, 1:]
    exact = torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
    wanted = torch.autograd.grad(exact, list(model.parameters()))
    loss = model.loss(x, y)
    monkeypatch.setattr(model.config, "vocab_size", 2**25 // 7)           # chunks of 7 tokens
    chunked = model.loss(x, y)
    torch.testing.assert_close((loss.item(), chunked.item(), model.loss(x, y, "none").mean().item()), (exact.item(),) * 3)
    for g1, g2 in zip(torch.autograd.grad(chunked, list(model.parameters())), wanted):
        torch.testing.assert_close(g1, g2, rtol=1e-3, atol=1e-5)


def test_ignored_targets_do_not_count_and_other_reductions_are_refused():
    model = small(1, far=True)
    tokens = torch.randint(50, (2, 41), generator=random(0))
    x, y = tokens[:, :-1], tokens[:, 1:].clone()
    y[0, 3:30] = -100
    exact = torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
    torch.testing.assert_close(model.loss(x, y), exact)
    assert (model.loss(x, y, "none")[0, 3:30] == 0).all()
    with pytest.raises(ValueError, match="'sum'"):
        model.loss(x, y, "sum")
    with pytest.raises(ValueError, match="must be the same"):
        model.loss(x, y.flatten())


@pytest.mark.parametrize("shape", [(5,), (0,), (1, 0), (0, 5), (1, 5, 2)])
def test_tokens_of_another_shape_are_refused(shape):
    with pytest.raises(ValueError, match="give \\(B, T\\)"):
        small()(torch.zeros(shape, dtype=torch.long))


def test_the_gradient_of_the_model_reaches_every_parameter_and_windowed_equals_dense():
    model = small(1, far=True).double()
    tokens = torch.randint(50, (2, 81), generator=random(0))
    grads = {}
    for screen in (ms.screen, ms.screen_windowed):
        model.screen = screen
        model.zero_grad()
        model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
        grads[screen] = {n: p.grad for n, p in model.named_parameters()}
    for name, g in grads[ms.screen].items():
        assert g.isfinite().all() and g.abs().max() > 0, name
        torch.testing.assert_close(grads[ms.screen_windowed][name], g, rtol=1e-6, atol=1e-9)


@settings(max_examples=10)
@given(seed=seeds, T=st.integers(2, 90), dtype=st.sampled_from([None, torch.bfloat16]), data=st.data())
def test_the_model_is_causal_bitwise(seed, T, dtype, data):
    model = small(seed % 3, far=True)
    for part in [model, *model.layers]:
        part.dtype = dtype
    tokens = torch.randint(50, (1, T), generator=random(seed))
    j = data.draw(st.integers(1, T - 1))
    changed = tokens.clone()
    changed[0, j] = (changed[0, j] + 1) % 50
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :j], after[:, :j]) and not torch.equal(before[:, j], after[:, j])


def test_bfloat16_products_stay_near_float32_and_geometry_is_float32():
    model = small(1, far=True)
    tokens = torch.randint(50, (2, 60), generator=random(0))
    exact = model(tokens)
    for part in [model, *model.layers]:
        part.dtype = torch.bfloat16

    def screen(q, k, v, w, r, i0=0):
        assert {q.dtype, k.dtype, w.dtype, r.dtype} == {torch.float32} and v.dtype == torch.bfloat16
        assert all((x.norm(dim=-1) - 1).abs().max() < 1e-5 for x in (q, k))        # normalised and turned after the product
        return ms.screen_windowed(q, k, v, w, r, i0)

    model.screen = screen
    logits = model(tokens)
    assert logits.dtype == torch.float32 and 0 < (logits - exact).norm() / exact.norm() < 0.1


def test_long_inputs_without_gradient_go_through_in_chunks():
    model = small(1, far=True)
    tokens = torch.randint(50, (2, 150), generator=random(0))
    with torch.no_grad():
        whole = model.hidden(tokens, chunk=150)
        torch.testing.assert_close(model.hidden(tokens, chunk=37), whole, rtol=1e-3, atol=1e-4)
        caches = [KeyCache() for _ in model.layers]
        parts = [model.hidden(part, caches, chunk=20) for part in tokens.split([70, 80], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-3, atol=1e-4)
    assert model.hidden(tokens, chunk=37).requires_grad


@settings(max_examples=15)
@given(seed=seeds, pieces=st.lists(st.integers(1, 60), min_size=1, max_size=5), infinite=st.booleans())
def test_cached_chunks_equal_one_pass(seed, pieces, infinite):
    model = small(seed % 5, far=True)
    if not infinite:
        model.layers[0].s_w.data[0] = 3.0
    tokens = torch.randint(50, (2, sum(pieces)), generator=random(seed))
    caches = [KeyCache() for _ in model.layers]
    with torch.no_grad():
        whole = model(tokens)
        parts = torch.cat([model(piece, caches) for piece in tokens.split(pieces, 1)], 1)
    torch.testing.assert_close(parts, whole, rtol=1e-3, atol=1e-4)


def test_greedy_generation_equals_recomputation_and_the_cache_stays_bounded():
    model = small(2, far=True)
    for tile in model.layers:
        tile.s_w.data.clamp_(max=3.0)                                     # windows up to 21
    tokens = torch.randint(50, (2, 33), generator=random(0))
    out = model.generate(tokens, 40)
    seen = tokens
    for n in range(40):
        seen = torch.cat((seen, model(seen)[:, -1].argmax(-1, keepdim=True)), 1)
    assert torch.equal(out, seen[:, 33:])
    cache, k, v = KeyCache(), torch.randn(1, 3, 1, 16), torch.randn(1, 3, 1, 8)
    for n in range(5000):
        keys, values, first = cache.append(k * n, v, torch.tensor([2.0, 21.0, 5.5]))
        assert first + keys.shape[2] == n + 1 == cache.end and torch.equal(keys[:, :, -1:], k * n)
        assert keys.shape[2] >= min(n + 1, 21) and torch.equal(keys[:, :, -min(n + 1, 21)], k[:, :, 0] * max(n - 20, 0))
    assert cache.k.shape[2] <= 1024 + 21


def test_sampling_respects_temperature_top_k_and_the_generator():
    model = small(2, far=True)
    tokens = torch.randint(50, (1, 9), generator=random(0))
    greedy = model.generate(tokens, 12)
    assert torch.equal(model.generate(tokens, 12, temperature=1.0, top_k=1), greedy)
    assert torch.equal(model.generate(tokens, 12, temperature=1e-4, generator=random(1)), greedy)
    hot = [model.generate(tokens, 12, temperature=2.0, top_k=20, generator=random(s)) for s in (1, 1, 2)]
    assert torch.equal(hot[0], hot[1]) and not torch.equal(hot[0], hot[2])
    z = model(tokens)[0, -1]
    firsts = {model.generate(tokens, 1, temperature=5.0, top_k=3, generator=random(s)).item() for s in range(60)}
    assert firsts == set(z.topk(3).indices.tolist())


def test_window_expansion_and_relevance_maps():
    model = small(1, far=True)
    for n, tile in enumerate(model.layers):
        tile.s_w.data = torch.tensor([math.log(9.0), math.log(99.0), math.log(99.001)])        # w = 10, 100, 100.001
    model.expand_windows(100.0005)
    assert all(ms.window(tile.s_w).isinf().tolist() == [False, False, True] for tile in model.layers)
    tokens = torch.randint(50, (2, 120), generator=random(0))
    maps = model.relevance_maps(tokens)
    assert model.screen is ms.screen_windowed
    assert len(maps) == 3 and all(a.shape == (2, 3, 120, 120) for a in maps)
    i, j = torch.meshgrid(torch.arange(120), torch.arange(120), indexing="ij")
    for a in maps:
        assert (a >= 0).all() and (a <= 1 + 1e-5).all() and (a[..., j > i] == 0).all() and (a[:, 0][:, i - j >= 10] == 0).all()
        assert a.diagonal(dim1=-2, dim2=-1).amax() > 0
    assert any((a[:, 2][:, i - j >= 101] > 0).any() for a in maps)
    model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


# ------------------------------------------------------------------------------------------------------- ABCDigits

def test_prompts_are_the_authors_bit_for_bit():
    def digest(prompts):
        return hashlib.sha256("\0".join(prompts).encode()).hexdigest()

    assert digest(abcdigits.generate_by_line_count(64, 0.1, n_trials=3)) == "b72dc88ab383d80a12db83b320d3f424a41b566a7bf60186f32af024b74be7b5"
    assert digest(abcdigits.generate_by_token_count(1000, 0.7, len, n_trials=3)) == "55820dafe0de27bd685acf9b9ed6e84db9eae403996d06884486b66eed1d2f66"


@given(lines=st.integers(27, 300), depth=st.floats(0, 1), digits=st.integers(2, 8))
def test_prompts_are_what_the_paper_says(lines, depth, digits):
    for prompt in abcdigits.generate_by_line_count(lines, depth, digits, 2):
        rows = prompt.split("\n")
        assert len(rows) == lines and all(re.fullmatch(rf"[A-Z]=[1-9]\d{{{digits - 1}}}", row) for row in rows)
        assert len(set(rows)) == len({row[0] for row in rows}) == len({row[2:] for row in rows}) == 26       # one number a letter
        assert [n for n, row in enumerate(rows) if row == rows[-1]] == [int((lines - 2) * depth), lines - 1]


@pytest.mark.parametrize("call", [lambda: abcdigits.generate_by_line_count(26, 0.5), lambda: abcdigits.generate_by_token_count(200, 0.5, len),
                                  lambda: abcdigits.generate_by_line_count(64, 1.5), lambda: abcdigits.generate_by_line_count(64, 0.5, n_digits=1)])
def test_impossible_prompts_are_refused(call):
    with pytest.raises(train.UsageError):
        call()


class Parrot(torch.nn.Module):
    """Completes the last letter by looking it up in the prompt, and for the letters in `wrong` answers one digit too many."""

    def __init__(self, tokenizer, wrong=""):
        super().__init__()
        self.p, self.tokenizer, self.wrong, self.batches = torch.nn.Parameter(torch.zeros(())), tokenizer, wrong, []

    def generate(self, tokens, n):
        self.batches.append(tokens.shape)
        out = []
        for row in tokens.tolist():
            text = self.tokenizer.decode(row)
            value = re.search(text[-2:] + r"(\d+)", text).group(1) + ("7" if text[-2] in self.wrong else "") + "\nX=123456789"
            out.append((self.tokenizer.encode_ordinary(value) + [10] * n)[:n])
        return torch.tensor(out)


@pytest.mark.parametrize("name", ["bytes", pytest.param("gpt2", marks=pytest.mark.skipif("TIKTOKEN_CACHE_DIR" not in os.environ, reason="no GPT-2 BPE"))])
def test_evaluate_counts_the_exact_integer_only(name):
    tokenizer = train.get_tokenizer(name)
    prompts = abcdigits.generate_by_line_count(40, 0.3, 4, 30)
    asked = {p[-6] for p in prompts}
    model = Parrot(tokenizer, wrong=sorted(asked)[0] + sorted(asked)[1])
    right = abcdigits.evaluate(model, tokenizer, [p[:-4] for p in prompts], [p[-4:] for p in prompts], tokens_at_once=1000)
    assert right == [p[-6] not in model.wrong for p in prompts] and {True, False} == set(right)
    assert sum(b for b, _ in model.batches) == 30 and all(b * t <= 1000 for b, t in model.batches)
    assert name == "gpt2" or len(model.batches) <= 10


# -------------------------------------------------------------------------------------------------- data and training

def run(*argv):
    return subprocess.run([sys.executable, *map(str, argv)], cwd=HERE, capture_output=True, text=True)


SMALL = ["--psi", "2", "--seq-len", "32", "--batch-size", "4", "--warmup", "2", "--device", "cpu"]
TEXT = "".join(f"{n} bottles of beer on the wall, {n} bottles of beer.\n" for n in range(400))


def fit(out, *flags, data=None):
    """Train in this process on TEXT; returns the checkpoint."""
    path = out.parent / "text.txt"
    path.write_text(TEXT)
    train.main([*SMALL, "--data", str(data or path), "--out", str(out), *flags])
    return train.read_checkpoint(out / "ckpt.pt")


@pytest.fixture(autouse=True)
def restore_signals():
    old = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGINT, old[0]), signal.signal(signal.SIGTERM, old[1])


def test_training_learns_and_the_checkpoint_serves(tmp_path, capsys, monkeypatch):
    """A repetitive text goes from about 5.5 nats a byte to a third of it in 60 steps; windows and gradients are logged."""
    ckpt = fit(tmp_path / "out", "--steps", "60", "--eval-every", "60", "--psi", "3")
    rows = [line.split("\t") for line in (tmp_path / "out/log.tsv").read_text().splitlines()]
    assert tuple(rows[0]) == train.COLUMNS and [int(r[0]) for r in rows[1:]] == [1, 10, 20, 30, 40, 50, 60]
    first, last = float(rows[1][1]), float(rows[-1][1])
    assert first > 5 and last < first / 3 and float(rows[-1][rows[0].index("val_loss")]) < first / 2
    assert 0 < float(rows[-1][rows[0].index("alive")]) < 1
    model, tokenizer, again = train.load_checkpoint(tmp_path / "out/ckpt.pt")
    assert again["step"] == 60 and not model.training and all(torch.equal(p, ckpt["weights"][n]) for n, p in model.state_dict().items())
    windows, real = [], abcdigits.evaluate
    monkeypatch.setattr(abcdigits, "evaluate", lambda model, *a: windows.append(ms.window(model.layers[0].s_w).tolist()) or real(model, *a))
    for flags in ([], ["--swe"]):
        monkeypatch.setattr(sys, "argv", ["abcdigits.py", "--ckpt", str(tmp_path / "out/ckpt.pt"), "--lengths", "260", "--trials", "2", "--depths", "0.5", *flags])
        abcdigits.main()
    assert "0.0%" in capsys.readouterr().out and windows[1] == [INF if w > 32 else w for w in windows[0]] and INF in windows[1]
    assert (tmp_path / "out/abcdigits_swe.tsv").read_text().splitlines()[1].startswith("260\t0.5\t2\t6\t0.0")


@pytest.mark.parametrize("stop_at, number", [(3, signal.SIGTERM), (10, signal.SIGINT)])
def test_interrupted_and_resumed_equals_uninterrupted(tmp_path, monkeypatch, stop_at, number):
    whole = fit(tmp_path / "whole", "--steps", "12", "--eval-every", "5", "--log-every", "2", "--accumulate", "2")
    steps, real = 0, torch.optim.AdamW.step

    def step(self, *a, **k):
        nonlocal steps
        steps += 1
        if steps == stop_at:
            os.kill(os.getpid(), number)
        return real(self, *a, **k)

    with monkeypatch.context() as m:
        m.setattr(torch.optim.AdamW, "step", step)
        part = fit(tmp_path / "parts", "--steps", "12", "--eval-every", "5", "--log-every", "2", "--accumulate", "2")
    assert part["step"] == stop_at
    fit(tmp_path / "parts", "--resume")
    resumed = train.read_checkpoint(tmp_path / "parts/ckpt.pt")
    assert resumed["step"] == 12 and resumed["drawn"] == whole["drawn"] == 96
    for name, p in whole["weights"].items():
        assert torch.equal(p, resumed["weights"][name]), name
    for a, b in zip(whole["optimizer"]["state"].values(), resumed["optimizer"]["state"].values()):
        assert all(torch.equal(a[n], b[n]) for n in a)

    def losses(name):
        return [row.split("\t")[:2] for row in (tmp_path / name / "log.tsv").read_text().splitlines() if not row.split("\t")[0] == "1"]

    assert losses("parts") == losses("whole")


def test_a_resumed_abcdigits_run_goes_on_with_the_weights_it_had(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "FLAT_AFTER", 40)
    monkeypatch.setattr(train, "NEAR", 10.0)
    whole = fit(tmp_path / "whole", "--steps", "6", "--digits", "2", data="abcdigits")
    fit(tmp_path / "parts", "--steps", "4", "--digits", "2", data="abcdigits")
    train.main(["--resume", "--out", str(tmp_path / "parts"), "--steps", "6"])
    parts = train.read_checkpoint(tmp_path / "parts/ckpt.pt")
    assert parts["learned"] == whole["learned"] == 24
    for name, p in whole["weights"].items():
        assert torch.equal(p, parts["weights"][name]), name


def test_later_runs_keep_the_files_of_earlier_ones(tmp_path):
    kept = []
    for steps in (2, 3, 1):
        fit(tmp_path / "out", "--steps", str(steps))
        kept.append((tmp_path / "out/ckpt.pt").read_bytes())
    (tmp_path / "out/mine.txt").write_text("stays")
    fit(tmp_path / "out", "--steps", "1")
    assert [(tmp_path / f"out/old-{n}/ckpt.pt").read_bytes() for n in (1, 2, 3)] == kept
    assert all((tmp_path / f"out/old-{n}/log.tsv").exists() for n in (1, 2, 3)) and (tmp_path / "out/mine.txt").exists()


CPU = torch.device("cpu")
SHORT = torch.bfloat16
EDITS = {                                              # as a user edits the file: old text, new text
    "window": ("clamp(max=80.0).exp()) + 1", "clamp(max=80.0).exp()) + 3"),
    "unit": ("clamp_min(eps**2).rsqrt()", "clamp_min(eps**2).pow(-0.4)"),
    "mipe": ("x0 * cos - x1 * sin, x0 * sin + x1 * cos", "x0 * cos - x1 * sin, x1 * cos - x0 * sin"),
    "trim": (".relu().square()", ".relu()"),
    "softmask": ("0.5 * (torch.cos(math.pi * (d / w)) + 1)", "1.0"),
    "softmask without an edge": ("torch.where((-w < d) & (d <= 0), 0.5 * (torch.cos(math.pi * (d / w)) + 1), 0.0)",
                                 "torch.where(d <= 0, torch.exp(d.clamp(max=0) / w), 0.0)"),
    "relevance": ("return trim(s, r[:, None, None]) *", "return trim(s, r[:, None, None].detach()) *"),
    "screen": ("    return (relevance(q.to(dtype), k.to(dtype), w.to(dtype), r.to(dtype), i0) @ v.to(dtype)).to(v.dtype)",
               "    a = relevance(q.to(dtype), k.to(dtype), w.to(dtype), r.to(dtype), i0)\n"
               "    return (a / (a.sum(-1, keepdim=True) + 0.1) @ v.to(dtype)).to(v.dtype)"),
    "tanh_norm": ("torch.tanh(norm) / norm", "norm / norm"),
    "gate": ("return torch.tanh(F.silu(", "return torch.sigmoid(F.silu("),
    "nothing": ("", ""),
}
NOT_WINDOWED = ("softmask without an edge", "screen")
USE = """if True:
    import sys, torch, train
    train.main(["--psi", "2", "--seq-len", "100", "--batch-size", "2", "--warmup", "1", "--steps", "3", "--log-every", "1",
                "--device", "cpu", "--data", "text.txt", "--out", "out"])
    model, _, _ = train.load_checkpoint("out/ckpt.pt")
    tokens = torch.arange(150)[None] * 7 % 256
    caches = [train.multiscreen.KeyCache() for _ in model.layers]
    with torch.no_grad():
        whole, chunks = model(tokens), model.logits(model.hidden(tokens, chunk=40))
        one_by_one = torch.cat([model(t, caches) for t in tokens.split(1, 1)], 1)
    maps = torch.cat(model.relevance_maps(tokens)).sum().item()
    torch.testing.assert_close(chunks, whole, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(one_by_one, whole, rtol=1e-3, atol=1e-3)
    print("RESULT", whole.std().item(), maps, model.screen.__name__)"""


@functools.cache
def after_edit(name):
    """(losses of three steps, [spread of the logits, sum of the relevance maps], what screens) with an edited multiscreen.py."""
    with tempfile.TemporaryDirectory() as folder:
        folder, (old, new) = Path(folder), EDITS[name]
        text = (HERE / "multiscreen.py").read_text()
        assert not old or text.count(old) == 1, f"{name}: the text to edit is not there once"
        (folder / "multiscreen.py").write_text(text.replace(old, new) if old else text)
        shutil.copy(HERE / "train.py", folder)
        (folder / "text.txt").write_text(TEXT)
        out = subprocess.run([sys.executable, "-c", USE], cwd=folder, capture_output=True, text=True)
        assert out.returncode == 0, out.stderr
        *numbers, screens = out.stdout.rpartition("RESULT ")[2].split()
        losses = [row.split("\t")[1] for row in (folder / "out/log.tsv").read_text().splitlines()[1:]]
        return losses, numbers, screens


@pytest.mark.parametrize("name", [name for name in EDITS if name != "nothing"])
def test_an_edit_acts_in_training_in_one_pass_in_chunks_and_in_decoding(name):
    (losses, numbers, screens), (plain, plain_numbers, _) = after_edit(name), after_edit("nothing")
    assert len(losses) == 3
    assert losses[1:] != plain[1:]
    assert numbers != plain_numbers
    assert screens == ("screen" if name in NOT_WINDOWED else "screen_windowed")


WRONG = {                                              # ways to be wrong: (q, k, v, w, r, i0) -> h, by what is right
    "a factor": lambda f, q, k, v, w, r, i0: f(q, k, v * 1.0005, w, r, i0),
    "off by one": lambda f, q, k, v, w, r, i0: f(q, k, v, w, r, i0 + 1),
    "no gradient of r": lambda f, q, k, v, w, r, i0: f(q, k, v, w, r.detach(), i0),
    "no gradient of wide windows": lambda f, q, k, v, w, r, i0: f(q, k, v, torch.where(w > 200, w.detach(), w), r, i0),
    "16 bits": lambda f, q, k, v, w, r, i0: f(q.bfloat16(), k.bfloat16(), v, w, r, i0),
    "nan": lambda f, q, k, v, w, r, i0: f(q, k, v, w, r, i0) * math.nan,
    "later queries": lambda f, q, k, v, w, r, i0: f(q, k, v, w, r, i0) * (1.01 if i0 else 1),
    "16-bit values": lambda f, q, k, v, w, r, i0: f(q, k, v, w, r, i0) * (1.2 if v.dtype == torch.bfloat16 else 1),
    "infinite windows": lambda f, q, k, v, w, r, i0: f(q, k, v, w.clamp(max=1e4), r, i0) * (1 + w.isinf() * 0.001)[:, None, None],
    "windows of 300": lambda f, q, k, v, w, r, i0: f(q, k, v, w, r, i0) * (1 + (w == 300) * 0.001)[:, None, None],
    "windows beyond 500": lambda f, q, k, v, w, r, i0: f(q, k, v, torch.where(w > 500, math.inf, w), r, i0),
}


@pytest.mark.parametrize("way", WRONG)
def test_what_does_not_agree_with_the_definition_does_not_screen(monkeypatch, way):
    windowed = ms.screen_windowed
    monkeypatch.setattr(ms, "screen_windowed", lambda q, k, v, w, r, i0=0: WRONG[way](windowed, q, k, v, w, r, i0))
    screen, line, expected = train.get_screen("auto", CPU, Config(), torch.bfloat16)
    assert screen is ms.screen
    assert not expected
    assert re.fullmatch(r"multiscreen.screen and screen_windowed differ by \S+ of the largest value \(a changed equation\?\): "
                        r"using multiscreen.screen, the definition", line)
    with pytest.raises(train.UsageError, match="--kernel windowed: .*screen_windowed"):
        train.get_screen("windowed", CPU, Config(), torch.bfloat16)


def test_what_fails_does_not_screen_and_a_broken_definition_is_not_blamed_on_it(monkeypatch):
    def fails(*args):
        raise RuntimeError("no such\nthing")

    with monkeypatch.context() as m:
        m.setattr(ms, "screen_windowed", fails)
        screen, line, _ = train.get_screen("auto", CPU)
        assert screen is ms.screen
        assert line == "screen_windowed fails here (RuntimeError: no such): using multiscreen.screen, the definition"
    with monkeypatch.context() as m:
        m.setattr(ms, "relevance", fails)
        with pytest.raises(RuntimeError, match="no such"):
            train.get_screen("auto", CPU)
    monkeypatch.setattr(ms, "relevance", lambda *args: math.nan * torch.ones(1, 8, args[0].shape[2], args[1].shape[2]))
    screen, line, _ = train.get_screen("auto", CPU)
    assert screen is ms.screen
    assert "gives nan or inf" in line


@pytest.mark.parametrize("name", ["windows beyond 400", "the number of keys", "a power for each tile"])
def test_an_edit_that_acts_far_away_or_in_one_tile_is_seen(monkeypatch, name):
    softmask, screen, trim = ms.softmask, ms.screen, ms.trim
    if name == "windows beyond 400":
        edge = lambda d, w: torch.where((w > 400) & (d <= 0), torch.exp(d.clamp(max=0) / w), softmask(d, w))
        monkeypatch.setattr(ms, "softmask", edge)
    elif name == "the number of keys":
        monkeypatch.setattr(ms, "screen", lambda q, k, *rest: screen(q, k, *rest) / max(k.shape[2] / 331, 1))
    else:
        power = 1 + torch.arange(4.0)[:, None, None]                       # which screen_windowed, a tile at a time, cannot apply
        monkeypatch.setattr(ms, "trim", lambda s, r: trim(s, r) ** power)
    assert train.get_screen("auto", CPU, Config(4))[0] is ms.screen


def test_the_comparison_sees_what_a_kernel_could_get_wrong():
    """About 330 keys, an odd number; pairs with s = 1 and s = -1; part of the pairs rejected, in every tile."""
    q, k, v, w, r = train.correlated(331, 331, train.NEARBY, Config(), CPU)
    s = (q @ k.mT)[0]
    assert s.max() > 0.99999
    assert s.min() < -0.99999
    alive = ms.relevance(q, k, w, r)[0] > 0
    inside = ms.softmask(torch.arange(331) - torch.arange(331)[:, None], w[:, None, None]) > 0
    shares = (alive.sum((1, 2)) / inside.sum((1, 2))).tolist()
    assert all(0.02 < share < 1 for share in shares)
    assert [train.get_screen(name, CPU)[0] for name in ("auto", "windowed", "definition")] == [ms.screen_windowed] * 2 + [ms.screen]
    assert train.get_screen("auto", CPU, Config(d_K=7, d_V=5, N_H=3), SHORT)[0] is ms.screen_windowed


def test_empty_inputs_screen_to_empty_or_zero_outputs():
    for B, H, T, S in ((0, 2, 5, 5), (1, 0, 5, 5), (1, 2, 0, 5), (1, 2, 5, 0)):
        q, k, v = torch.ones(B, H, T, 16), torch.ones(B, H, S, 16), torch.ones(B, H, S, 8)
        h = ms.screen_windowed(q, k, v, torch.full((H,), 3.0), torch.ones(H))
        assert h.shape == (B, H, T, 8)
        assert (h == 0).all()


def test_an_edit_that_cuts_a_gradient_off_is_no_disagreement(monkeypatch):
    trim = ms.trim
    monkeypatch.setattr(ms, "trim", lambda s, r: trim(s, r.detach()))
    monkeypatch.setattr(ms, "softmask", lambda d, w: ((-w < d) & (d <= 0)).float())
    assert train.get_screen("auto", CPU)[0] is ms.screen_windowed


def test_with_the_definition_the_cache_drops_no_key():
    model = small(2, far=True)
    for screen, kept in ((ms.screen, 60), (ms.screen_windowed, 9)):
        model.screen, caches = screen, [KeyCache() for _ in model.layers]
        for tile in model.layers:
            tile.s_w.data.fill_(math.log(8.0))                            # windows of 9
        model(torch.randint(50, (1, 60), generator=random(0)), caches)
        assert [cache.n for cache in caches] == [kept] * 3


def test_a_run_is_resumed_from_an_older_checkpoint(tmp_path, capsys):
    """s_E and s_F without an axis, kernel = torch, no model among the flags; and a run that is finished says so."""
    fit(tmp_path / "new", "--steps", "2")
    fit(tmp_path / "old", "--steps", "1")
    old = train.read_checkpoint(tmp_path / "old/ckpt.pt")
    del old["args"]["model"]
    old["args"]["kernel"] = "torch"
    for name in ("s_E", "s_F"):
        old["weights"][name] = old["weights"][name].reshape(())
    for state in old["optimizer"]["state"].values():
        for name in ("exp_avg", "exp_avg_sq"):
            if state[name].shape == (1,):
                state[name] = state[name].reshape(())
    train.save_checkpoint(tmp_path / "old/ckpt.pt", old)
    train.main(["--resume", "--out", str(tmp_path / "old"), "--steps", "2"])
    resumed, whole = (train.read_checkpoint(tmp_path / name / "ckpt.pt")["weights"] for name in ("old", "new"))
    for name, p in whole.items():
        assert torch.equal(p, resumed[name]), name
    train.main(["--resume", "--out", str(tmp_path / "old")])
    assert "at step 2 of 2 already" in capsys.readouterr().out


def test_main_gives_the_signal_handlers_back(tmp_path):
    before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    fit(tmp_path / "out", "--steps", "1")
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_folder_of_sources_may_hold_other_files(tmp_path, capsys):
    for name, content in {"a.py": b"a = 1\n" * 99, "__init__.py": b"", "b.pyc": b"\xff\x00\xfe"}.items():
        (tmp_path / name).write_bytes(content)
    assert [p.name for p in train.files_of([str(tmp_path)])] == ["a.py"] and "2 files left out" in capsys.readouterr().out
    with pytest.raises(train.UsageError, match="empty"):
        train.get_data(train.get_parser().parse_args(["--data", str(tmp_path / "__init__.py")]), train.get_tokenizer("bytes"))


def test_clipping_weight_decay_and_learning_rate_are_applied(tmp_path):
    plain = fit(tmp_path / "a", "--steps", "3", "--log-every", "1")
    rows = [line.split("\t") for line in (tmp_path / "a/log.tsv").read_text().splitlines()[1:]]
    assert [float(r[2]) for r in rows] == [2**-5, 2**-4, 2**-4]
    assert plain["optimizer"]["param_groups"][0]["betas"] == (0.9, 0.95)
    for flags in (["--weight-decay", "0.5"], ["--clip", "1e-6"], ["--lr", "0.01"], ["--seed", "1"], ["--dtype", "bfloat16"]):
        other = fit(tmp_path / "b", "--steps", "3", *flags)
        assert not torch.equal(plain["weights"]["W_E"], other["weights"]["W_E"]), flags


def test_accumulated_batches_are_one_batch(tmp_path):
    rows = {}
    for batch, accumulate in ((4, 1), (2, 2)):
        fit(tmp_path / str(batch), "--steps", "3", "--log-every", "1", "--batch-size", str(batch), "--accumulate", str(accumulate))
        rows[batch] = [[float(x) for x in row.split("\t")[:4]] for row in (tmp_path / str(batch) / "log.tsv").read_text().splitlines()[1:]]
    np.testing.assert_allclose(rows[2], rows[4], rtol=1e-3)


def test_evaluation_counts_bits_bytes_and_live_pairs():
    tokenizer = train.get_tokenizer("bytes")
    model = small(1, far=True, vocab_size=257)
    data = train.Sequences([torch.randint(97, 120, (2000,), generator=random(0)).numpy().astype(np.uint16)], 300, "test")
    with torch.no_grad():
        model.s_F.fill_(-INF)                                            # uniform logits
    nats, bits = train.evaluate(model, data, 4, 3, tokenizer)
    assert abs(nats - math.log(257)) < 1e-6 and abs(bits - math.log2(257)) < 1e-6
    tokens = torch.from_numpy(data[0][None, :-1])
    alive = inside = 0
    d = torch.arange(300) - torch.arange(300)[:, None]
    for tile, a in zip(model.layers, model.relevance_maps(tokens)):
        w = ms.window(tile.s_w)[:, None, None]
        alive, inside = alive + (a > 0).sum().item(), inside + ((-w < d) & (d <= 0)).sum().item()
    assert abs(train.alive_fraction(model, tokens) - alive / inside) < 1e-4


def test_a_checkpoint_is_whole_at_any_time(tmp_path, monkeypatch):
    path = tmp_path / "ckpt.pt"
    train.save_checkpoint(path, {"a": 1})

    def save(value, file):
        file.write(b"half")
        raise RuntimeError("no space left\nsecond line")

    monkeypatch.setattr(train.torch, "save", save)
    with pytest.raises(train.UsageError, match="no space left"):
        train.save_checkpoint(path, {"a": 2})
    assert torch.load(path) == {"a": 1} and list(tmp_path.iterdir()) == [path]


def test_held_out_tokens_are_not_trained_on(tmp_path):
    """One text, and a token file: the two parts share no sequence, and only targets at the border."""
    np.arange(5000, dtype="<u2").tofile(tmp_path / "a.bin")
    (tmp_path / "b.txt").write_text("".join(chr(0x4E00 + n) for n in range(3000)))
    args = train.get_parser().parse_args(["--data", str(tmp_path / "a.bin"), str(tmp_path / "b.txt"), "--seq-len", "16"])
    tokenizer = train.tiktoken.Encoding("wide", pat_str="(?s:.)", mergeable_ranks={bytes([i]): i for i in range(256)},
                                        special_tokens={"<|endoftext|>": 6000})
    training, held_out = train.get_data(args, tokenizer)
    for a, b in zip(training.arrays, held_out.arrays):
        assert a.nbytes + b.nbytes in (2 * 5000, 2 * 9001) and len(b) == (5000 if len(a) + len(b) == 5000 else 9001) // 20
    assert not set(training.arrays[1].tolist()) & set(held_out.arrays[1].tolist())


def test_the_standard_library_is_found_without_its_tests(monkeypatch):
    texts = list(train.standard_library())
    assert len(texts) > 100 and sum(map(len, texts)) > 5e6 and sum("import unittest" in t for t in texts) < 0.05 * len(texts)


@given(n=st.integers(1, 3000), key=st.tuples(st.integers(0, 2**32), st.integers(0, 5)))
def test_permute_is_a_permutation(n, key):
    assert sorted(train.permute(i, n, key) for i in range(n)) == list(range(n))


def test_permutations_differ_from_seed_to_seed_and_from_epoch_to_epoch_and_look_random():
    orders = {key: [train.permute(i, 1000, key) for i in range(1000)] for key in ((0, 0), (0, 1), (1, 0), (1, 1), (2, 0))}
    assert len(set(map(tuple, orders.values()))) == 5
    for order in orders.values():
        assert abs(np.corrcoef(order, range(1000))[0, 1]) < 0.12
        assert np.mean(np.diff(order) == 1) < 0.01
    assert train.permute(10**11, 153 * 10**9, (0, 0)) < 153 * 10**9


def test_sequences_cover_the_text_without_replacement():
    data = train.Sequences([np.arange(100, dtype=np.uint16), np.arange(200, 251, dtype=np.uint16)], 10, "test")
    assert len(data) == 9 + 5
    drawn = [data.draw(n, seed=4) for n in range(28)]
    for epoch in (drawn[:14], drawn[14:]):
        starts = sorted(int(x[0]) for x in epoch)
        assert starts == [*range(0, 90, 10), *range(200, 250, 10)] and all((np.diff(x) == 1).all() and len(x) == 11 for x in epoch)
    assert [int(x[0]) for x in drawn[:14]] != [int(x[0]) for x in drawn[14:]]


def test_documents_are_joined_by_end_of_text_and_the_held_out_part_is_apart(tmp_path):
    for n in range(40):
        (tmp_path / f"{n:02}.txt").write_text(chr(65 + n) * 30)
    args = train.get_parser().parse_args(["--data", str(tmp_path), "--seq-len", "8"])
    tokenizer = train.get_tokenizer("bytes")
    training, held_out = train.get_data(args, tokenizer)
    a, b = training.arrays[0].tolist(), held_out.arrays[0].tolist()
    assert b == [65 + 19] * 30 + [256] + [65 + 39] * 30 + [256] and a[:32] == [65] * 30 + [256, 66] and not set(a) & set(b) - {256}


def test_the_byte_tokenizer_is_lossless_and_needs_no_network():
    tokenizer = train.get_tokenizer("bytes")
    text = "naïve ☃ \0\r\n 𝄞<|endoftext|>"
    assert tokenizer.encode_ordinary(text) == list(text.encode()) and tokenizer.decode(list(text.encode())) == text
    assert (tokenizer.n_vocab, tokenizer.eot_token) == (257, 256)


def test_token_files_of_both_formats(tmp_path):
    tokens = np.random.default_rng(0).integers(0, 50257, 5000).astype("<u2")
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, 5000
    (tmp_path / "nano.bin").write_bytes(tokens.tobytes())
    (tmp_path / "llmc.bin").write_bytes(header.tobytes() + tokens.tobytes())
    for name in ("nano.bin", "llmc.bin"):
        a = train.read_bin(tmp_path / name, 50257)
        assert isinstance(a, np.memmap) and np.array_equal(a, tokens)


def test_the_abcdigits_stream_is_the_task_and_can_be_continued():
    tokenizer = train.get_tokenizer("bytes")
    stream = train.ABCDigitsStream(tokenizer, 400, 3, seed=5, part=0)
    texts = [tokenizer.decode(stream[n].tolist()) for n in range(50)]
    again, held_out = (train.ABCDigitsStream(tokenizer, 400, 3, seed=5, part=part) for part in (0, 1))
    assert texts == [tokenizer.decode(again[n].tolist()) for n in range(50)] and len(set(texts)) == 50
    assert not {tokenizer.decode(held_out[n].tolist()) for n in range(50)} & set(texts)
    repeats = []
    for text in texts:
        rows = text.split("\n")[:-1]
        assert len(text) == 401 and all(re.fullmatch(r"[A-Z]=[1-9]\d\d", row) for row in rows)
        assert len({row for row in rows}) == len({row[0] for row in rows})                                # one number a letter
        repeats.append(max(sum(row[0] == c for row in rows) for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZ") / len(rows))
    assert 0.4 < np.mean(repeats) < 0.6                                                     # the weights 2^i: half of the lines


def test_the_stream_becomes_flatter_while_the_loss_is_near_the_least_and_counts_its_needles():
    tokenizer = train.get_tokenizer("bytes")
    stream, held_out = (train.ABCDigitsStream(tokenizer, 256, 2, seed=5, part=part) for part in (0, 1))
    assert (stream.base, held_out.base) == (2, 1.1)
    early, rows = stream[3], [tokenizer.decode(stream[n].tolist()).split("\n")[:-1] for n in range(200)]
    nats = -(2.0 ** np.arange(-1, -25, -1.0)) @ np.log(2.0 ** np.arange(-1, -25, -1.0))             # weights 1/2, 1/4, ...
    by_hand = np.mean([len(r) * nats + len(set(r)) * math.log(90) for r in rows]) / 256
    assert abs(stream.least_loss() - by_hand) < 0.01
    share = [np.mean([stream.needles(stream[n]).mean() for n in range(50)])]
    stream.observe(stream.least_loss() + 1.01 * train.NEAR, 1000)                                   # far from it: nothing happens
    assert stream.base == 2
    stream.observe(stream.least_loss() + 0.99 * train.NEAR, train.FLAT_AFTER // 3)
    assert stream.base == pytest.approx(1.7)
    stream.observe(0.0, train.FLAT_AFTER)
    assert (stream.base, held_out.base) == (1.1, 1.1)
    share.append(np.mean([stream.needles(stream[n]).mean() for n in range(50)]))
    assert share[1] > 2 * share[0]
    stream.learned = 0
    assert np.array_equal(stream[3], early)
    text = "A=12\nB=34\nA=12\nA=12\nB=34\nC=56\nB=3"
    wanted = "....." + "....." + "..XX." + "....." + "..XX." + "....." + "..."
    assert "".join(".X"[int(x)] for x in stream.needles(np.array(list(text.encode())))) == wanted[1:]
    seen = [re.findall(r"[A-Z]=\d+", tokenizer.decode(held_out[n].tolist())) for n in range(100)]
    by_hand = sum(2 for lines in seen for i, line in enumerate(lines) if lines[:i].count(line) == 1 and len(line) == 4)
    counted = sum(held_out.needles(held_out[n]).sum() for n in range(100))
    assert by_hand <= counted <= by_hand + 100                            # the last number of a document may be cut off


# ------------------------------------------------------------- the fused kernel: natively on a GPU, else interpreted

HALF, SHORT = torch.float16, torch.bfloat16
ROUNDING = {torch.float32: 2**-24, HALF: 2**-11, SHORT: 2**-8}                   # half a unit in the last place, at most
kernel = pytest.mark.skipif(fused.available(DEVICE) is not None, reason=str(fused.available(DEVICE)))
block_sizes = st.sampled_from([None, (16, 32), (32, 16), (32, 32), (64, 32)])


def through_kernel(q, k, v, w, r, i0, dh, blocks=(32, 32)):
    """h and the five gradients from the kernel; whatever it allocates is full of NaN until it writes there. blocks: None as shipped."""
    x = [y.detach().to(DEVICE).requires_grad_() for y in (q, k, v, w, r)]
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        warps_and_stages = (4, 2) if DEVICE == "cuda" else (1, 1)
        with mock.patch.object(fused, "config", lambda *args: (*blocks, *warps_and_stages)) if blocks else nullcontext():
            h = fused.screen(*x, i0)
            return [h.detach().cpu(), *(g.cpu() for g in torch.autograd.grad(h, x, dh.to(DEVICE)))]
    finally:
        torch.use_deterministic_algorithms(False)


def through_torch(q, k, v, w, r, i0, dh, dtype=None):
    x = [y.detach().to(dtype or y.dtype).requires_grad_() for y in (q, k, v, w, r)]
    h = ms.screen(*x, i0)
    return [h.detach(), *torch.autograd.grad(h, x, dh.to(h.dtype))]


def assert_as_good_as_torch(q, k, v, w, r, i0, dh, blocks=(32, 32)):
    """The error against float64 is at most twice that of plain PyTorch on operands of v's dtype, plus 1e-6.

    If PyTorch's 16-bit results happen to be nearer than one rounding of the largest value, it is one rounding that counts. dw
    and dr are sums over all pairs, far smaller than their terms: 1e-6 of the terms' sizes may be added (1e-6/r in dr, as
    the last bit of s moves z by 1/r bits).
    """
    exact = through_torch(q, k, v, w, r, i0, dh, torch.float64)
    plain = through_torch(q.to(v.dtype), k.to(v.dtype), v, w, r, i0, dh)
    fast = through_kernel(q, k, v, w, r, i0, dh, blocks)
    x = w.double().requires_grad_(), r.double().requires_grad_()
    terms = torch.autograd.grad(ms.relevance(q.double(), k.double(), *x, i0), x, dh.double().abs() @ v.double().abs().mT)
    slack = {"dw": 1e-6 * terms[0].abs(), "dr": 1e-6 * terms[1].abs() / r}
    for name, a, b, c, dtype in zip(("h", "dq", "dk", "dv", "dw", "dr"), fast, plain, exact, (v.dtype, q.dtype, k.dtype, v.dtype, w.dtype, r.dtype)):
        assert a.dtype == dtype and a.shape == c.shape
        rounding = ROUNDING[v.dtype if dtype == torch.float32 else dtype] * c.abs().max() if name not in slack else torch.tensor(0.0)
        allowed = 2 * torch.maximum((b.double() - c).abs().max(), rounding) + 1e-6 + slack.get(name, 0)
        if DEVICE == "cuda":                                                 # its cos and sin have an error of 2^-20.5
            allowed = allowed + 2**-17 * c.abs().max()
        assert ((a.double() - c).abs() <= allowed).all(), (name, (a.double() - c).abs() / allowed)                     # NaN fails


def drawn(seed, B, T, S, dtypes, rho=0.6, H=2):
    """Correlated q, k, v and a gradient dh of h, in the dtypes of (q and k, v)."""
    q, k, v = correlated(seed, B, H, T, S, rho=rho)
    dh = torch.randn(B, H, T, 64, generator=random(seed + 1), dtype=torch.float64)
    return q.to(dtypes[0]), k.to(dtypes[0]), v.to(dtypes[1]), dh.to(dtypes[1])


@kernel
@settings(max_examples=16, phases=(Phase.explicit, Phase.reuse, Phase.generate))       # shrinking takes the interpreter minutes
@given(seed=seeds, B=st.integers(1, 2), T=st.integers(1, 60), S=st.integers(1, 60), i0=st.one_of(st.just(0), st.integers(-40, 70)), blocks=block_sizes,
       tiles=st.lists(st.tuples(widths, acceptances), min_size=1, max_size=3), rho=st.floats(0.3, 0.9),
       dtypes=st.sampled_from([(torch.float32,) * 2, (HALF,) * 2, (SHORT,) * 2, (torch.float32, HALF), (torch.float32, SHORT), (SHORT, HALF)]))
@example(seed=0, B=1, T=1, S=1, i0=0, blocks=(16, 16), tiles=[(1.0, 0.5), (INF, 1.0)], rho=0.9, dtypes=(torch.float32, SHORT))
@example(seed=1, B=2, T=70, S=70, i0=0, blocks=(16, 32), tiles=[(40.0, 0.3), (INF, 1.0)], rho=0.6, dtypes=(torch.float32,) * 2)
@example(seed=2, B=1, T=50, S=75, i0=25, blocks=(32, 16), tiles=[(33.0, 0.02), (48.5, 0.9)], rho=0.6, dtypes=(torch.float32, SHORT))
@example(seed=3, B=1, T=75, S=75, i0=0, blocks=(16, 32), tiles=[(1e4, 0.5), (2.5, 0.7)], rho=0.4, dtypes=(SHORT,) * 2)
@example(seed=4, B=1, T=90, S=90, i0=0, blocks=None, tiles=[(1.5, 0.9), (2.0, 0.7)], rho=0.8, dtypes=(torch.float32, HALF))
def test_kernel_is_as_good_as_torch_in_value_and_every_gradient(seed, B, T, S, i0, blocks, tiles, rho, dtypes):
    q, k, v, dh = drawn(seed, B, T, S, dtypes, rho, len(tiles))
    assert_as_good_as_torch(q, k, v, *torch.tensor(tiles).T, i0, dh, blocks)


@kernel
@pytest.mark.parametrize("i0", [0, 1, 2, 4, 6, 8, 10, 12, 14])
def test_kernel_draws_its_bounds_right_wherever_blocks_begin(i0):
    """Every offset of a window's edge against blocks of 16; a pair just outside has a softmask that would be seen."""
    q, k, v, dh = drawn(12, 1, 47, 50, (torch.float32,) * 2)
    assert_as_good_as_torch(q, k, v, torch.tensor([31.1, 30.1]), torch.tensor([0.5, 1.0]), i0, dh, (16, 16))


@kernel
@pytest.mark.parametrize("case", ["same", "opposite", "zero", "threshold", "wide"])
def test_kernel_at_special_points(case):
    q, k, v, dh = drawn(4, 1, 40, 40, (torch.float32, torch.float32), 0.9 if case == "opposite" else 0.6)
    w, r = torch.tensor([7.0, INF]), torch.tensor([0.5, 1.0])
    if case in ("same", "opposite"):
        k = q if case == "same" else -q
    elif case == "zero":
        q[:, :, 3:9], k[:, :, 20:] = 0, 0
    elif case == "threshold":                                                # s = 1/2 and r = 1/2, s = 0 and r = 1
        q, k = torch.zeros(2, 1, 2, 40, 16)
        q[..., 0], k[:, 0, :, 0], k[..., 1] = 1, 0.5, 1
    else:
        q, k, v = (torch.cat((x, x, x, x), 3)[..., :n] for x, n in ((q, 32), (k, 32), (v, 128)))
        q, k, dh = q / 2**0.5, k / 2**0.5, torch.cat((dh, dh), 3)
    if case in ("opposite", "threshold"):
        assert all((x == 0).all() for x in through_kernel(q, k, v, w, r, 0, dh))
    assert_as_good_as_torch(q, k, v, w, r, 0, dh, (16, 16))


@kernel
@pytest.mark.parametrize("s", range(1, 1024, 93))
def test_kernel_drops_a_key_exactly_on_the_threshold(s):
    """Whatever 1/r rounds to."""
    test_a_key_exactly_on_the_threshold_contributes_nothing_at_all(lambda *x: fused.screen(*(y.to(DEVICE) for y in x)), 1 - s / 1024)


@kernel
@settings(max_examples=6, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(seed=seeds, T=st.integers(2, 50), w=widths, blocks=block_sizes, dtypes=st.sampled_from([(torch.float32,) * 2, (torch.float32, SHORT)]), data=st.data())
@example(seed=0, T=50, w=16.0, blocks=(16, 16), dtypes=(torch.float32,) * 2, data=None)
def test_kernel_causality_and_window_edge_are_bitwise(seed, T, w, blocks, dtypes, data):
    """What is at key j reaches the queries j to j + w - 1 alone, and a query's gradient no other keys: not by one bit."""
    q, k, v, dh = drawn(seed, 1, T, T, dtypes, 0.8)
    w, r = torch.full((2,), w), torch.tensor([0.9, 1.0])
    j = data.draw(st.integers(0, T - 1)) if data else 20
    k2, v2, q2, dh2 = k.clone(), v.clone(), q.clone(), dh.clone()
    k2[:, :, j], v2[:, :, j], q2[:, :, j], dh2[:, :, j] = q[:, :, T - 1], -v[:, :, j], k[:, :, 0], -dh[:, :, j]
    reach = math.ceil(min(w[0].item(), T))
    h, dq, dk, dv, _, _ = through_kernel(q, k, v, w, r, 0, dh, blocks)
    h2, dq2, _, _, _, _ = through_kernel(q, k2, v2, w, r, 0, dh, blocks)
    assert all(torch.equal(a[:, :, part], b[:, :, part]) for a, b in ((h, h2), (dq, dq2)) for part in (slice(0, j), slice(j + reach, T)))
    assert not torch.equal(h[:, :, j], h2[:, :, j])
    v2[:, :, :j], v2[:, :, j + 1 :] = 0, 0                                   # now nothing else is there to hide a tiny relevance
    h2, dq2, _, _, _, _ = through_kernel(q, k, v2, w, r, 0, dh, blocks)
    assert not any(x[:, :, part].any() for x in (h2, dq2) for part in (slice(0, j), slice(j + reach, T)))
    _, _, dk2, dv2, _, _ = through_kernel(q2, k, v, w, r, 0, dh2, blocks)
    assert all(torch.equal(a[:, :, part], b[:, :, part]) for a, b in ((dk, dk2), (dv, dv2)) for part in (slice(0, max(j - reach + 1, 0)), slice(j + 1, T)))


@kernel
def test_kernel_never_visits_what_lies_outside_the_windows():
    """NaN in key blocks outside the window, and in query blocks, would spoil all that a program adds up."""
    q, k, v, dh = drawn(5, 1, 96, 96, (torch.float32, SHORT))
    w, r = torch.tensor([5.0, 16.5]), torch.tensor([0.5, 0.9])
    clean = through_kernel(q, k, v, w, r, 0, dh, (16, 16))
    k2, v2, q2, dh2 = k.clone(), v.clone(), q.clone(), dh.clone()
    for x in (k2, v2):
        x[:, :, :48] = x[:, :, 80:] = math.nan                               # the queries 64 to 79 see keys from 48 to 79
    for a, b in zip(clean[:2], through_kernel(q, k2, v2, w, r, 0, dh, (16, 16))):
        assert torch.equal(a[:, :, 64:80], b[:, :, 64:80]) and b[:, :, :48].isnan().any()
    for x in (q2, dh2):
        x[:, :, :32] = x[:, :, 64:] = math.nan                               # the keys 32 to 47 are seen by queries 32 to 63
    for a, b in zip(clean[2:4], through_kernel(q2, k, v, w, r, 0, dh2, (16, 16))[2:4]):
        assert torch.equal(a[:, :, 32:48], b[:, :, 32:48])


@kernel
@pytest.mark.parametrize("dtypes, tolerance", [((torch.float32,) * 2, 2e-6), ((torch.float32, SHORT), 6e-3)])
def test_kernel_gives_the_same_for_every_block_shape_and_the_same_bits_twice(dtypes, tolerance):
    q, k, v, dh = drawn(6, 1, 70, 70, dtypes)
    w, r = torch.tensor([21.5, INF]), torch.tensor([0.4, 0.9])
    first = through_kernel(q, k, v, w, r, 0, dh, (64, 64))
    for blocks in ((16, 16), (16, 64), (64, 16), None):
        for a, b in zip(through_kernel(q, k, v, w, r, 0, dh, blocks), first):
            torch.testing.assert_close(a, b, rtol=0, atol=(tolerance + (1e-5 if DEVICE == "cuda" else 0)) * b.abs().max().item())
    assert all(torch.equal(a, b) for a, b in zip(through_kernel(q, k, v, w, r, 0, dh, (64, 64)), first))


@kernel
def test_kernel_with_an_infinite_window_is_the_limit_of_wide_ones():
    q, k, v, dh = drawn(7, 1, 50, 50, (torch.float32,) * 2)
    r = torch.tensor([0.4, 0.9])
    infinite, wide = (through_kernel(q, k, v, torch.full((2,), w), r, 0, dh) for w in (INF, 1e7))
    for a, b in zip(infinite, wide):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert (infinite[4] == 0).all() and all(x.isfinite().all() for x in infinite)


@kernel
def test_kernel_takes_any_strides_and_past_two_billion_elements(tmp_path):
    q, k, v, dh = drawn(8, 2, 40, 40, (torch.float32, HALF))
    w, r = torch.tensor([9.0, 1.0, INF, 1.0])[::2], torch.tensor([0.4, 1.0, 0.9, 1.0])[::2]
    dh = dh[:, :, :1].expand(dh.shape)
    wanted = through_kernel(q, k[:1].expand(k.shape).contiguous(), v, w.contiguous(), r.contiguous(), 0, dh.contiguous())
    every_second = torch.zeros(2, 2, 40, 32)
    every_second[..., ::2] = q
    size = 39 * 2**26 + 2**20                                                # 5 GB; on a CPU of addresses, in a sparse file
    far = torch.empty(size, dtype=HALF, device="cuda") if DEVICE == "cuda" else torch.from_file(str(tmp_path / "v"), True, size, dtype=HALF)
    far = far.as_strided((2, 2, 40, 64), (256, 64, 2**26, 1)).copy_(v)
    for a, b in zip(through_kernel(every_second[..., ::2], k[:1].expand(k.shape), far, w, r, 0, dh), wanted):
        assert torch.equal(a, b)
    (tmp_path / "v").unlink(missing_ok=True)


@kernel
def test_kernel_keeps_nan_where_it_is_seen():
    """A model that has diverged must not look as if it had found nothing."""
    q, k, v, dh = drawn(13, 1, 40, 40, (torch.float32,) * 2)
    q[0, 0, 20], k[0, 1, 5] = math.nan, math.nan
    h, dq, *_ = through_kernel(q, k, v, torch.tensor([4.0, 4.0]), torch.tensor([0.5, 0.5]), 0, dh)
    assert all(x[0, 0, 20].isnan().all() and x[0, 1, 5:9].isnan().all() for x in (h, dq))


@kernel
@pytest.mark.parametrize("w", [3.0, 6.0])
def test_kernel_keeps_the_gradient_of_the_window_through_mipe(w):
    """d(s_w) through the rotations and the softmask, 16-bit values: at most 3e-3 wrong at T = 4096, where MiPE's part is a
    small difference of large sums. (Without the third part of k it is 8e-3 for w = 3, of q 9e-3 for w = 6.)"""
    T = 4096
    q, k, v = correlated(9, 1, 1, T, T, rho=0.6)
    dh = torch.randn(1, 1, T, 64, generator=random(10), dtype=torch.float64).to(SHORT)

    def gradient(screen, dtype, v):
        s_w, r = torch.tensor([math.log(w - 1)], requires_grad=True), torch.tensor([0.5])
        width = ms.window(s_w.to(dtype))
        q_tilde, k_tilde = (ms.mipe(x.float().to(dtype), ms.mipe_angle(torch.arange(T), width, 256.0)) for x in (q, k))
        h = screen(q_tilde.to(DEVICE), k_tilde.to(DEVICE), v.to(DEVICE), width.to(DEVICE), r.to(dtype).to(DEVICE))
        h.backward(dh.to(h.dtype).to(DEVICE))
        return s_w.grad.item()

    exact = gradient(ms.screen_windowed, torch.float64, v.to(SHORT).double())
    assert abs(gradient(fused.screen, torch.float32, v.to(SHORT)) / exact - 1) < 3e-3


@kernel
def test_the_model_through_the_kernel_is_the_paper_and_has_its_gradient():
    model = small(1, far=True, N_L=2)
    tokens = torch.randint(50, (1, 41), generator=random(0))
    exact = reference_logits({n: p.detach().double() for n, p in model.named_parameters()}, model.config, tokens[0])
    grads = {}
    for screen in (ms.screen, fused.screen):
        model.screen = screen
        model.zero_grad()
        model.to(DEVICE).loss(tokens[:, :-1].to(DEVICE), tokens[:, 1:].to(DEVICE)).backward()
        grads[screen] = {n: p.grad.clone() for n, p in model.named_parameters()}
    assert (model(tokens.to(DEVICE)).detach()[0].cpu().double() - exact).norm() / exact.norm() < 1e-4
    for name, g in grads[ms.screen].items():
        torch.testing.assert_close(grads[fused.screen][name], g, rtol=1e-3, atol=1e-4 * g.abs().max().item(), msg=name)


@kernel
def test_decoding_through_the_kernel_equals_the_full_forward():
    model = small(2, far=True, N_L=1).to(DEVICE)
    model.screen = fused.screen
    tokens = torch.randint(50, (1, 20), generator=random(0)).to(DEVICE)
    new = model.generate(tokens, 6)
    assert torch.equal(new[0], model(torch.cat((tokens, new), 1))[0, 19:-1].argmax(-1))


can_build = shutil.which("g++") and Path(sysconfig.get_path("include"), "Python.h").exists()


@kernel
@pytest.mark.filterwarnings("ignore::DeprecationWarning")                    # inside torch
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.skipif(not can_build, reason="no g++ or Python.h"))])
def test_kernel_is_a_proper_operator_and_compiles_into_a_graph(backend):
    q, k, v, dh = drawn(11, 1, 20, 20, (torch.float32,) * 2)
    w, r = torch.tensor([5.0, INF]), torch.tensor([0.4, 0.9])
    x = [y.to(DEVICE).requires_grad_() for y in (q, k, v, w, r)]
    torch.library.opcheck(fused._screen, (*x, torch.tensor([1, 0], device=DEVICE), 3))

    def work(q, k, v, w, r):
        return ms.tanh_norm(fused.screen(2 * q, k, v, w, r))

    wanted, got = (torch.autograd.grad((f(*x) * dh.to(DEVICE)).sum(), x) for f in (work, torch.compile(work, backend=backend, fullgraph=True)))
    for a, b in zip(got, wanted):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * b.abs().max().item())


@kernel
@pytest.mark.parametrize("dtype", [None, SHORT])
def test_the_kernel_screens_on_a_gpu_until_an_equation_is_changed(monkeypatch, dtype):
    few = train.correlated
    monkeypatch.setattr(train, "CASES", [(40, 40, 0, train.NEARBY), (17, 40, 23, train.NEARBY)])
    monkeypatch.setattr(train, "correlated", lambda T, S, windows, config, device: few(T, S, windows, config, DEVICE))
    cuda = torch.device("cuda")
    assert train.get_screen("auto", cuda, Config(4), dtype)[0] is fused.screen
    assert train.get_screen("auto", cuda, Config(d_K=24), dtype)[0] is ms.screen_windowed
    monkeypatch.setattr(ms, "trim", lambda s, r: (1 - (1 - s) / r).relu())
    screen, line, _ = train.get_screen("auto", cuda, Config(4), dtype)
    assert screen is ms.screen_windowed
    assert re.fullmatch(r"multiscreen.screen and screening_triton.screen differ by \S+ of the largest value "
                        r"\(a changed equation\?\): using screen_windowed", line)
    with pytest.raises(train.UsageError, match="--kernel triton: multiscreen.screen and screening_triton.screen differ"):
        train.get_screen("triton", cuda, Config(4), dtype)


def test_kernel_says_in_one_line_why_it_cannot_run(monkeypatch):
    q, k, v, _ = drawn(0, 1, 4, 4, (torch.float64,) * 2)
    with pytest.raises(TypeError, match="float64"):
        fused.screen(q, k, v, torch.ones(2), torch.ones(2))
    with pytest.raises(ValueError, match="powers of two"):
        fused.screen(q.float(), k.float(), v[..., :3].float(), torch.ones(2), torch.ones(2))
    fits = {"q": q.float(), "k": k.float(), "v": v.float(), "w": torch.ones(2), "r": torch.ones(2)}
    for name, part in (("k", fits["k"][:, :1]), ("k", fits["k"][:, :, :3]), ("v", fits["v"][:, :, :3]), ("w", torch.ones(1)), ("r", torch.ones(()))):
        with pytest.raises(ValueError, match="has the shape"):
            fused.screen(**fits | {name: part})
    on_cpu = train.correlated
    monkeypatch.setattr(train, "correlated", lambda T, S, windows, config, device: on_cpu(T, S, windows, config, CPU))
    odd = Config(d_K=24)                                                                    # "auto" makes way, "triton" says why
    with pytest.raises(train.UsageError, match="24 dimensions: .* powers of two"):
        train.get_screen("triton", torch.device("cuda"), odd)
    monkeypatch.setattr(fused, "available", lambda device: "there is no CUDA GPU")
    with pytest.raises(train.UsageError, match="--kernel triton: ") as e:
        train.main([*SMALL, "--kernel", "triton"])
    assert "\n" not in str(e.value)
    found = train.get_screen("auto", torch.device("cuda"))
    assert found == (ms.screen_windowed, "there is no CUDA GPU: using screen_windowed", False)
    code = "import sys; sys.modules['triton'] = None; import screening_triton; print(screening_triton.available())"
    assert run("-c", code).stdout.startswith("triton is not installed")


@pytest.mark.skipif(fused.triton is None, reason="triton is not installed")
def test_every_configuration_compiles_ahead_of_time_without_spills():
    out = run("-m", "experiments.kernel_compile")
    table = [line.split() for line in out.stdout.splitlines() if " sm_" in line]
    assert out.returncode == 0 and len(table) == 3 * 4 * 3, out.stderr
    aims = {"forward": 10, "dq": 30, "dkv": 21}
    for name, qk, v, target, block, warps, stages, registers, spills, shared, edge, interior in table:
        assert int(spills) == 0 and int(shared) <= 99 * 1024 and float(interior) < float(edge)
        assert target != "sm_90" or v == "fp32" or float(interior) <= aims[name]


# ------------------------------------------------------------------------------------------------------- mistakes

def test_a_mistake_is_one_line_and_exit_code_1(tmp_path):
    for argv in (["train.py", "--data", tmp_path / "nowhere", "--out", tmp_path / "o"], ["abcdigits.py", "--ckpt", tmp_path / "nowhere"]):
        out = run(*argv)
        assert out.returncode == 1 and len(out.stderr.splitlines()) == 1 and out.stderr.startswith("error: ") and "nowhere" in out.stderr


def bad_files(folder):
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, 5000
    (folder / "empty.txt").write_bytes(b"")
    (folder / "latin.txt").write_bytes(b"caf\xe9 " * 100)
    (folder / "short.txt").write_text("short")
    (folder / "empty.bin").write_bytes(b"")
    (folder / "odd.bin").write_bytes(b"123")
    (folder / "truncated.bin").write_bytes(header.tobytes() + b"12" * 4000)
    (folder / "beyond.bin").write_bytes(np.r_[np.full(4999, 30), 300].astype("<u2").tobytes())           # in the held-out part
    (folder / "nothing").mkdir()


@pytest.mark.parametrize("flags, message", [
    (["--data", "missing.txt"], "does not exist"), (["--data", "empty.txt"], "empty"), (["--data", "latin.txt"], "not UTF-8"),
    (["--data", "short.txt"], "fewer than one sequence"), (["--data", "empty.bin"], "not a token file"), (["--data", "odd.bin"], "not a token file"),
    (["--data", "truncated.bin"], "truncated"), (["--lr", "-1"], "--lr"), (["--lr", "nan"], "--lr"), (["--seed", "-1"], "--seed"),
    (["--clip", "-1"], "--clip"), (["--data", "abcdigits", "--digits", "19"], "digits"), (["--psi", "many"], "--psi"), (["--data", "beyond.bin"], "beyond the vocabulary"), (["--data", "nothing"], "no files"),
    (["--psi", "0"], "psi = 0"), (["--layers", "0"], "N_L = 0"), (["--batch-size", "0"], "--batch-size"), (["--out", "short.txt"], "cannot be written"),
    (["--tokenizer", "words"], "unknown"), (["--data", "abcdigits", "--digits", "1"], "digits"), (["--device", "nonsense"], "device")])
def test_bad_input_is_explained_and_costs_nothing(tmp_path, monkeypatch, flags, message):
    bad_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    fit(tmp_path / "out", "--steps", "2")
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises(train.UsageError, match=message) as e:
        train.main([*SMALL, "--data", "text.txt", "--out", "out", *flags])
    assert "\n" not in str(e.value)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def test_gpt2_without_network_or_cache_is_explained(tmp_path, monkeypatch):
    monkeypatch.setattr(train.tiktoken, "get_encoding", lambda name: (_ for _ in ()).throw(ConnectionError("no route")))
    with pytest.raises(train.UsageError, match="TIKTOKEN_CACHE_DIR"):
        train.get_tokenizer("gpt2")


@pytest.mark.filterwarnings("error")
def test_bad_checkpoints_are_explained_and_nothing_in_them_runs(tmp_path):
    fit(tmp_path / "out", "--steps", "2")
    good = (tmp_path / "out/ckpt.pt").read_bytes()

    class Malicious:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'was-run'}",)

    wrapped = io.BytesIO()
    torch.save({"weights": Malicious()}, wrapped)
    for name, content in {"truncated": good[: len(good) // 2], "text": b"hello", "empty": b"", "pickle": pickle.dumps(Malicious()), "zip": wrapped.getvalue(),
                          "tensor": b"", "other": b""}.items():
        path = tmp_path / name
        path.write_bytes(content)
        if name in ("tensor", "other"):
            torch.save(torch.zeros(3) if name == "tensor" else {"model": "multiscreen"}, path)
        with pytest.raises(train.UsageError, match="no checkpoint of train.py") as e:
            train.load_checkpoint(path)
        assert "\n" not in str(e.value)
    assert not (tmp_path / "was-run").exists()
    with pytest.raises(train.UsageError, match="cannot be read"):
        train.load_checkpoint(tmp_path / "nowhere")


@pytest.mark.parametrize("flags, message", [(["--psi", "3"], "--psi 2"), (["--seq-len", "64"], "--seq-len 32"), (["--seed", "9"], "--seed 0")])
def test_resume_cannot_change_the_run(tmp_path, flags, message):
    fit(tmp_path / "out", "--steps", "2")
    before = (tmp_path / "out/ckpt.pt").read_bytes()
    with pytest.raises(train.UsageError, match=message):
        train.main(["--out", str(tmp_path / "out"), "--resume", *flags])
    assert (tmp_path / "out/ckpt.pt").read_bytes() == before


def test_divergence_stops_the_run_and_keeps_the_last_good_checkpoint(tmp_path, monkeypatch):
    real, calls = Multiscreen.loss, 0

    def loss(self, x, y, reduction="mean"):
        nonlocal calls
        calls += reduction == "mean"
        return real(self, x, y, reduction) * (math.nan if calls == 5 and reduction == "mean" else 1.0)

    monkeypatch.setattr(Multiscreen, "loss", loss)
    with pytest.raises(train.UsageError, match="diverged: at step 5 .*holds step 4"):
        fit(tmp_path / "out", "--steps", "9", "--eval-every", "2")
    ckpt = train.read_checkpoint(tmp_path / "out/ckpt.pt")
    assert ckpt["step"] == 4 and all(p.isfinite().all() for p in ckpt["weights"].values())
