"""Tests of support/windowed.py: the definition in pieces, in O(T w) time and O(T) memory."""
import functools
import sys

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import multiscreen as ms
from support.windowed import screen_windowed
from tests.helpers import run
from tests.inputs import INF, acceptances, correlated, random, seeds, widths


def h_and_gradients(screen, q, k, v, w, r, i0, seed):
    """h, and the gradients of q, k, v, w, r for a random gradient of h."""
    inputs = [x.detach().clone().requires_grad_() for x in (q, k, v, w, r)]
    h = screen(*inputs, i0)
    dh = torch.randn(h.shape, generator=random(seed), dtype=torch.float64)
    return [h.detach(), *torch.autograd.grad(h, inputs, dh.to(h.dtype))]


@given(seed=seeds, B=st.integers(1, 2), T=st.integers(1, 200), i0=st.integers(-90, 200),
       more=st.sampled_from([0, 0, 0, 0, 5, -5]), w=st.lists(widths, min_size=3, max_size=3),
       r=st.lists(acceptances, min_size=3, max_size=3), K=st.sampled_from([4, 16]))
@example(seed=0, B=2, T=1, i0=0, more=0, w=[1.0, 2.5, INF], r=[0.02, 0.5, 1.0], K=16)
@example(seed=0, B=2, T=140, i0=0, more=0, w=[33.0, 64.5, INF], r=[0.3, 0.5, 1.0], K=16)
@example(seed=1, B=1, T=40, i0=110, more=0, w=[32.0, 65.0, 66.0], r=[0.3, 0.5, 1.0], K=16)
@example(seed=2, B=2, T=1100, i0=0, more=0, w=[16.0, 700.0, INF], r=[0.3, 0.5, 1.0], K=4)
@example(seed=4, B=1, T=140, i0=0, more=0, w=[17.2, 33.2, 65.2], r=[0.3, 0.5, 1.0], K=16)
@example(seed=5, B=1, T=145, i0=-16, more=0, w=[3.0, 65.0, INF], r=[0.3, 0.5, 1.0], K=4)
@example(seed=3, B=1, T=140, i0=10, more=0, w=[17.0, 65.0, 66.0], r=[0.3, 0.5, 1.0], K=4)
def test_windowed_equals_dense_in_value_and_every_gradient(seed, B, T, i0, more, w, r, K):
    q, k, v = correlated(seed, B, 3, T, max(i0 + T + more, 1), K=K, V=8)
    w, r = torch.tensor([w, r], dtype=torch.float64)
    dense = h_and_gradients(ms.screen, q, k, v, w, r, i0, seed)
    windowed = h_and_gradients(screen_windowed, q, k, v, w, r, i0, seed)
    for a, b in zip(windowed, dense):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6 * max(1.0, b.abs().max().item()))


@given(seed=seeds, T=st.integers(1, 16))
def test_decoding_calls_the_definition_once_with_the_keys_in_sight(seed, T):
    """Tiles come in any order, and with windows whose fractions matter."""
    seen = []

    def screen(*inputs):
        seen.append(inputs[1].shape[2])
        return ms.screen(*inputs)

    q, k, v = correlated(seed, 1, 4, T, 400, V=8)
    order = torch.randperm(4, generator=random(seed))
    w = torch.tensor([3.0, 17.2, 33.4, 256.0]).double()[order]
    r = torch.tensor([0.5, 0.9]).double().repeat(2)
    dense = h_and_gradients(ms.screen, q, k, v, w, r, 400 - T, seed)
    windowed = functools.partial(screen_windowed, screen=screen)
    few = h_and_gradients(windowed, q, k, v, w, r, 400 - T, seed)
    for a, b in zip(few, dense):
        torch.testing.assert_close(a, b)
    assert seen == [T + 255]


@pytest.mark.parametrize("T, windows", [
    (39, [2.5, 20.0, INF]), (150, [1.5, 16.0, 17.5, 33.0, 64.0, 65.0, 100.0, INF]),
    (1040, [9.0, INF])])
def test_second_derivatives_are_those_of_the_definition(T, windows):
    """In one call, in pieces, and at T = 1,040 in recomputed pieces."""
    q, k, v = correlated(0, 1, len(windows), T, T, V=8)
    w, r = torch.tensor(windows).double(), torch.linspace(0.3, 1, len(windows)).double()
    dh = torch.randn(v.shape, generator=random(1), dtype=torch.float64)
    found = []
    for screen in (ms.screen, screen_windowed):
        inputs = [x.clone().requires_grad_() for x in (q, k, v, w, r)]
        first = torch.autograd.grad(screen(*inputs), inputs, dh, create_graph=True)
        size = sum(g.square().sum() for g in first)
        found.append([*first, *torch.autograd.grad(size, inputs)])
    for a, b in zip(*found):
        torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-12 * a.abs().max().item())


def test_empty_inputs_screen_to_empty_or_zero_outputs():
    for B, H, T, S in ((0, 2, 5, 5), (1, 0, 5, 5), (1, 2, 0, 5), (1, 2, 5, 0)):
        q, k, v = torch.ones(B, H, T, 16), torch.ones(B, H, S, 16), torch.ones(B, H, S, 8)
        h = screen_windowed(q, k, v, torch.full((H,), 3.0), torch.ones(H))
        assert h.shape == (B, H, T, 8)
        assert (h == 0).all()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="reads the peak memory the Unix way")
def test_memory_is_linear_whatever_the_windows():
    """Forward and backward over 2^12 positions with an infinite window; T x T takes 64 MiB."""
    code = """if True:
        import resource, sys, torch, multiscreen as ms
        from support.windowed import screen_windowed

        def peak():
            unit = 2**10 if sys.platform == "linux" else 2**20
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit

        w = torch.tensor([torch.inf], requires_grad=True)
        r = torch.tensor([0.5], requires_grad=True)
        for T in (2**10, 2**12):                       # the first imports what recomputes
            before = peak()
            inputs = (torch.randn(1, 1, T, n, requires_grad=True) for n in (16, 16, 64))
            screen_windowed(*map(ms.unit, inputs), w, r).sum().backward()
        print(peak() - before)"""
    assert float(run("-c", code, check=True).stdout) < 50                  # MiB
