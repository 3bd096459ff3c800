"""The proof that this code is the paper: each claim, the test that proves it, and the yardstick.

The yardstick of the equations is the paper itself, written once more below in plain loops over
tokens, in float64, without a line of multiscreen.py (the functions paper_...). If you trust those
90 lines, you need not trust multiscreen.py. Hypothesis draws new inputs in each run, such that
queries often find keys; a failure prints how to draw the same inputs again. If you changed an
equation on purpose, its tests must fail, which shows that your change acts.

claim, and below it the test                                      compared with
----------------------------------------------------------------  ----------------------------------
The equations
 1) each is one function, whose docstring has its number          multiscreen.py
     test_every_equation_has_one_owner
 2) they are right at points worked out by hand                   numbers written in the test
     pytest -k by_hand: Eqs. 4, 6, 7, 9, 10 and 11
 3) they are right for drawn inputs: Eqs. 8 to 12                 the paper, a loop over pairs
     test_screen_against_a_loop_over_pairs
 4) relevance is absolute: other keys do not change it            itself, bit for bit
     test_relevance_of_a_pair_does_not_depend_on_other_keys
 5) relevance is exactly 0 for later keys, keys at distance w or  itself, bit for bit
   more, and keys at or below Trim's threshold
     test_causality_and_window_edge_are_bitwise
     test_a_key_exactly_on_the_threshold_contributes_nothing
 6) angles are right 2^20 tokens after the first one, and keys    80-bit numbers; numbers worked
   count 70,000 tokens back                                       out by hand
     test_mipe_angle_is_right_far_out
     test_keys_count_however_far_a_window_reaches
 7) gradients are right, and finite where a vector is 0           the limit worked out by hand;
     test_unit_of_zero_is_zero_with_a_finite_gradient             finite differences
     test_tanh_norm_has_a_finite_jacobian_everywhere
     test_gradients_equal_finite_differences

The model, Eqs. 1 to 18
 8) has the paper's logits and the gradient of every weight       the paper
     test_logits_and_every_gradient_equal_the_paper_in_float64
 9) has the paper's sizes and initial values                      the paper's tables
     test_parameter_counts_are_the_papers
     test_initial_values_are_the_papers
10) sees no later token                                           itself, bit for bit
     test_the_model_is_causal_bitwise
11) multiplies in 16 bits, and keeps the rest in float32          itself, with rounded weights
     test_products_run_in_16_bits_and_geometry_in_float32
     test_relevances_are_float32_under_autocast
12) is trained on its logits' cross-entropy, each sequence alone  torch's cross-entropy
     test_loss_is_the_cross_entropy_of_the_logits_in_chunks_too

The trained model
13) gives the same in pieces with a cache                         one pass over the whole text
     test_cached_chunks_equal_one_pass
14) lets a cache forget only what its screen never looks at       one pass over the whole text
     test_a_cache_gets_the_windows_only_for_a_screen_that_stays_within_them
15) generates the tokens with the largest logits                  a forward pass for each token
     test_generate_takes_the_token_with_the_largest_logit
16) expands the windows beyond the training length, no others     windows written in the test
     test_expand_windows_frees_the_windows_beyond_the_training_length
17) shows in its maps the weights that its screen uses            relevance; another screen
     test_relevance_maps_are_the_weights_of_the_models_own_screen

The fused kernel, screening_triton.py (native on a GPU, else in Triton's interpreter)
18) has the value and all five gradients of Eq. 12                the definition in float64; error
     test_kernel_is_as_good_as_torch_in_value_and_every_gradient  at most about twice PyTorch's
19) keeps the windows' edges exactly, and Trim's in float32       exact zeros; NaN where it must not
     test_kernel_drops_a_key_exactly_on_the_threshold             read
     test_kernel_causality_and_window_edge_are_exact
     test_kernel_never_visits_what_lies_outside_the_windows
20) keeps the gradient of w that comes through MiPE               the definition in float64
     test_kernel_keeps_the_gradient_of_the_window_through_mipe
21) gives the model the same logits and gradients                 the paper; the definition
     test_the_model_through_the_kernel_is_the_paper_and_has_its_gradient
"""
import math
import os
import re
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from torch.nn.functional import normalize

import multiscreen as ms
from multiscreen import Config, GatedScreeningTiles, KeyCache, Multiscreen

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# screening_triton reads TRITON_INTERPRET when it is imported.
os.environ.setdefault("TRITON_INTERPRET", "0" if DEVICE == "cuda" else "1")
try:
    import screening_triton as fused
except ImportError:                                    # there is no triton for macOS and Windows
    fused = None

needs_kernel = pytest.mark.skipif(fused is None or not fused.available(DEVICE),
                                  reason="the kernel needs triton")

# Draw few examples, unless a conftest.py has changed Hypothesis's default number.
FEW = 40
if settings().max_examples == settings.get_profile("default").max_examples:
    settings.register_profile("few", derandomize=False, deadline=None, print_blob=True,
                              max_examples=FEW)
    settings.load_profile("few")
torch.set_num_threads(1)                               # on small tensors a second one costs time

# ------------------------------------------------------------------------ the paper, in float64

def paper_unit(x):
    """Eq. 5, for each row."""
    return x / x.norm(dim=1, keepdim=True)


def paper_visible(i, S, w):
    """The keys j < S that position i sees: up to i, at distances below w."""
    w = float(w.detach())
    return [j for j in range(S) if j <= i and i - j < w]


def paper_relevance(s, d, w, r):
    """Eqs. 9 to 11 for keys in the window: similarities s, d = j - i, window w, width r."""
    alpha = (1 - (1 - s) / r).clamp(min=0) ** 2
    if w == math.inf:
        return alpha
    return alpha * ((math.pi * d / w).cos() + 1) / 2


def paper_screen(q, k, v, w, r, i0=0):
    """Eqs. 8 to 12, one pair at a time; shapes as in multiscreen.screen."""
    q, k, v, w, r = (x.detach().double() for x in (q, k, v, w, r))
    B, H, T, _ = q.shape
    S, V = v.shape[2:]
    h = torch.zeros(B, H, T, V, dtype=torch.float64)
    for b in range(B):
        for t in range(H):
            for i in range(T):
                for j in paper_visible(i0 + i, S, w[t]):
                    d = torch.tensor(j - (i0 + i), dtype=torch.float64)
                    s = q[b, t, i] @ k[b, t, j]
                    h[b, t, i] += paper_relevance(s, d, w[t], r[t]) * v[b, t, j]
    return h


def paper_turned(x, angle):
    """Rotate the pairs (x_n, x_(n + K/2)) of each row by angle[:, n], as complex numbers."""
    a, b = x.chunk(2, 1)
    z = torch.complex(a, b) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((z.real, z.imag), 1)


def paper_mipe(x, w, w_th):
    """Eqs. 6 and 7: rotate the first two dimensions if the window is below w_th."""
    if w >= w_th:
        return x
    gamma = ((math.pi * w / w_th).cos() + 1) / 2
    phi = math.pi * torch.arange(len(x), dtype=x.dtype) * gamma / w
    return torch.cat((paper_turned(x[:, :2], phi[:, None]), x[:, 2:]), 1)


def paper_tanh_norm(h):
    """Eq. 13, for each row."""
    norm = h.norm(dim=1, keepdim=True)
    factor = norm.tanh() / torch.where(norm > 0, norm, 1)
    return torch.where(norm > 0, factor, 1) * h


def paper_gate(g):
    """Eq. 17: tanh(SiLU(g))."""
    return (g / (1 + (-g).exp())).tanh()


def paper_screening_unit(q, k, v, w, r, w_th):
    """Eqs. 5 to 14 for one tile: projected q, k, v, one row a token -> u."""
    q, k, v = paper_mipe(paper_unit(q), w, w_th), paper_mipe(paper_unit(k), w, w_th), paper_unit(v)
    h = []
    for i in range(len(q)):
        j = torch.tensor(paper_visible(i, len(k), w))
        h.append(paper_relevance(k[j] @ q[i], (j - i).double(), w, r) @ v[j])
    return paper_tanh_norm(torch.stack(h))


def paper_logits(p, c, tokens):
    """Eqs. 1 to 18: the logits (T, N). p: parameters by name; c: Config; tokens: (T,)."""
    E = paper_unit(p["W_E"])
    x = p["s_E"].exp() * E[tokens]
    for n in range(c.N_L):
        layer = f"layers.{n}."
        W = {key.removeprefix(layer): value for key, value in p.items() if key.startswith(layer)}
        update = 0
        for t in range(c.N_H):
            w, r = W["s_w"][t].exp() + 1, 1 / (1 + (-W["s_r"][t]).exp())
            q, k, v, g = (x @ W[name][:, t] for name in ("W_Q", "W_K", "W_V", "W_G"))
            y = paper_screening_unit(q, k, v, w, r, c.w_th) * paper_gate(g)
            update = update + y @ (W["s_O"][t].exp() * W["W_O"][t])
        x = x + update
    return x @ (p["s_F"].exp() * E).T


# ------------------------------------------------------------------------------ what is drawn

INF = math.inf
seeds = st.integers(0, 2**31 - 1)
widths = st.one_of(st.integers(1, 90).map(float), st.floats(1.0, 150.0), st.just(1e9),
                   st.just(INF))
acceptances = st.floats(0.02, 1.0)


def draws(n, **options):
    """Settings of a slow property: n examples, or the profile's number if it is above FEW."""
    if settings().max_examples > FEW:
        n = settings().max_examples
    return settings(max_examples=n, **options)


def random(seed):
    """A generator of random numbers, apart from PyTorch's own."""
    return torch.Generator().manual_seed(seed)


def correlated(seed, B, H, T, S, K=16, V=64, dtype=torch.float64, rho=0.8):
    """Unit q and k around one direction per tile, so that many pass Trim; random unit v.

    Independent unit vectors in 16 dimensions seldom pass Trim: a test would compare zeros.
    """
    g = random(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    base = draw(B, H, 1, K)
    q = normalize(rho * base + (1 - rho) * draw(B, H, T, K), dim=-1)
    k = normalize(rho * base + (1 - rho) * draw(B, H, S, K), dim=-1)
    v = normalize(draw(B, H, S, V), dim=-1)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def draw_tokens(*shape, seed=0, n=50):
    """Random integers from 0 to n - 1."""
    return torch.randint(n, shape, generator=random(seed))


def small(seed=0, moved=False, vocab_size=50, dtype=None, tiles=GatedScreeningTiles, **sizes):
    """A small model. moved=True: w from 1.1 to inf, r from 0.05 to 0.95, many pairs pass Trim."""
    torch.manual_seed(seed)
    config = Config(**({"psi": 3, "d_E": 24, "vocab_size": vocab_size} | sizes))
    model = Multiscreen(config, dtype, tiles)
    if moved:
        move_away(model, random(seed))
    return model


@torch.no_grad()
def move_away(model, g):
    """Move the parameters of a Multiscreen or an ablation far from their initial values."""
    for layer in model.layers:
        layer.s_w.uniform_(-2.0, 6.0, generator=g)
        layer.s_r.uniform_(-3.0, 3.0, generator=g)
        layer.s_O.uniform_(-1.0, 1.0, generator=g)
        layer.W_Q.copy_(0.3 * torch.randn(layer.W_Q.shape, generator=g))
        layer.W_K.copy_(layer.W_Q + 0.1 * torch.randn(layer.W_Q.shape, generator=g))
        layer.W_V.mul_(20)
        if hasattr(layer, "W_G"):
            layer.W_G.mul_(10)
    model.layers[0].s_w[0] = INF
    model.W_E.add_(0.03 * torch.randn(model.config.d_E, generator=g))      # make tokens similar
    model.s_E.fill_(0.7)
    model.s_F.fill_(1.3)


# -------------------------------------------------------------------------- equations 4 to 14

def test_the_table_of_claims_names_tests_of_this_file():
    named = set(re.findall(r"^ +(test_\w+)", __doc__, re.M))
    assert named and named <= set(globals())


def test_every_equation_has_one_owner():
    # By n, the functions whose docstrings say "Eq. (n)".
    owners = {}
    for scope in (ms, ms.GatedScreeningTiles, ms.Multiscreen):
        for name, f in vars(scope).items():
            ours = getattr(f, "__module__", "") == "multiscreen"
            if ours and callable(f) and not isinstance(f, type):
                for n in re.findall(r"Eq\. \((\d+)\)", f.__doc__ or ""):
                    owners.setdefault(int(n), []).append(name)
    assert sorted(owners) == list(range(1, 19))
    assert all(len(names) == 1 for names in owners.values()), owners


def test_window_and_acceptance_by_hand():
    s_w = torch.tensor([0.0, math.log(256), -INF, INF, 1e4], requires_grad=True)
    w = ms.window(s_w)
    assert w[[0, 2, 3]].tolist() == [2, 1, INF]
    torch.testing.assert_close(w[1].item(), 257.0, rtol=1e-5, atol=0)
    torch.testing.assert_close(w[4].item(), math.exp(80), rtol=1e-5, atol=0)
    w.sum().backward()
    torch.testing.assert_close(s_w.grad, torch.tensor([1.0, 256.0, 0.0, 0.0, 0.0]))
    assert ms.acceptance(torch.tensor(0.0)) == 0.5
    assert ms.acceptance(torch.tensor(-INF)) == torch.tensor(1e-3)
    torch.testing.assert_close(ms.acceptance(torch.tensor(math.log(3.0))).item(), 0.75)


@given(seed=seeds, scale=st.floats(1e-3, 1e6))
def test_unit_has_length_one_and_ignores_scale(seed, scale):
    x = torch.randn(5, 16, generator=random(seed), dtype=torch.float64)
    torch.testing.assert_close(ms.unit(x), paper_unit(x))
    torch.testing.assert_close(ms.unit(scale * x), ms.unit(x), rtol=1e-9, atol=1e-12)


def test_unit_of_zero_is_zero_with_a_finite_gradient():
    x = torch.zeros(3, 16, requires_grad=True)
    y = ms.unit(x)
    y.sum().backward()
    assert (y == 0).all()
    assert x.grad.isfinite().all()


def test_unit_divides_by_the_length_but_by_no_less_than_1e_6():
    found = ms.unit(torch.tensor([[3.0, 4.0], [6e-6, 8e-6], [3e-8, 4e-8]]))
    torch.testing.assert_close(found, torch.tensor([[0.6, 0.8], [0.6, 0.8], [0.03, 0.04]]))


def test_mipe_angle_by_hand():
    w = torch.tensor([2.0, 128.0, 256.0, 1e6, INF], dtype=torch.float64)
    angle = ms.mipe_angle(torch.tensor([0, 1, 3]), w, 256.0)
    assert (angle[:, 0] == 0).all()
    assert (angle[2:] == 0).all()
    torch.testing.assert_close(angle[1, 1].item(), math.pi / 256)          # gamma(w_th / 2) = 1/2
    gamma = (math.cos(math.pi / 128) + 1) / 2
    torch.testing.assert_close(angle[0, 2].item(), 3 * math.pi * gamma / 2)
    assert ms.mipe_angle(torch.tensor([1]), w.bfloat16(), 256.0).dtype == torch.float32


@given(i=st.integers(0, 2**20), w=st.floats(1.0, 300.0))
def test_mipe_angle_is_right_far_out(i, w):
    """Computed in float32, it would be off by 0.01 rad at 2^17; longdouble has more digits."""
    w = float(np.float32(w))
    pi = np.longdouble("3.14159265358979323846264338327950288")
    gamma = (np.cos(pi * np.longdouble(w) / 256) + 1) / 2 if w < 256 else np.longdouble(0)
    exact = i * (pi * gamma / np.longdouble(w))

    # Both angles are right if they differ by whole turns.
    angle = ms.mipe_angle(torch.tensor([i]), torch.tensor([w]), 256.0).item()
    assert abs(np.remainder(angle - exact + pi, 2 * pi) - pi) < 2e-6


def test_a_quarter_turn_takes_the_first_axis_to_the_second_and_leaves_the_others():
    found = ms.mipe(torch.tensor([[[[1.0, 2.0, 3.0, 4.0]]]]), torch.tensor([[math.pi / 2]]))
    torch.testing.assert_close(found, torch.tensor([[[[-2.0, 1.0, 3.0, 4.0]]]]))


@given(seed=seeds, i=st.integers(0, 5000), d=st.integers(0, 300), shift=st.integers(0, 10**6),
       w=st.floats(1.5, 400.0))
def test_rotation_depends_on_the_distance_only(seed, i, d, shift, w):
    q, k, _ = correlated(seed, 1, 1, 1, 1)
    w = torch.tensor([w], dtype=torch.float64)

    def turn(x, n):
        return ms.mipe(x, ms.mipe_angle(torch.tensor([n]), w, 256.0))

    def similarity(i, j):
        return (turn(q, i) * turn(k, j)).sum()

    here, there = similarity(i + d, i), similarity(i + d + shift, i + shift)
    torch.testing.assert_close(here, there, rtol=0, atol=1e-8)
    if w >= 256:
        assert here == (q * k).sum()
    else:
        assert torch.equal(turn(q, i)[..., 2:], q[..., 2:])


@pytest.mark.parametrize("s, r, alpha", [
    (1, 0.5, 1), (0.9, 0.5, 0.64), (0.5, 0.5, 0), (0.75, 0.5, 0.25), (0, 1, 0), (-1, 1, 0),
    (0.5, 1, 0.25)])
def test_trim_by_hand(s, r, alpha):
    found = ms.trim(torch.tensor(float(s)), torch.tensor(float(r)))
    torch.testing.assert_close(found.item(), float(alpha))


@given(s=st.floats(-1, 1, width=32), r=st.floats(0.015625, 1, width=32))
@example(s=0.5, r=0.5)
@example(s=1.0, r=1.0)
def test_trim_is_bounded_and_exactly_zero_at_its_threshold(s, r):
    s = torch.tensor(s, requires_grad=True)
    alpha = ms.trim(s, torch.tensor(r))
    alpha.backward()
    assert 0 <= alpha <= 1
    if 1 - s >= r:
        assert alpha == 0
        assert s.grad == 0
    elif 1 - s < 0.999 * r:
        assert alpha > 0
        assert s.grad > 0


@pytest.mark.parametrize("d, w, m", [
    (0, 4, 1), (-1, 4, 0.5 + 0.25 * math.sqrt(2)), (-2, 4, 0.5),
    (-3, 4, 0.5 - 0.25 * math.sqrt(2)), (-4, 4, 0), (1, 4, 0), (-5, 4, 0), (-9, INF, 1),
    (1, INF, 0), (0, 1, 1), (-1, 1, 0), (-100_000, 150_000, 0.25), (-100_000, INF, 1)])
def test_softmask_by_hand(d, w, m):
    found = ms.softmask(torch.tensor(d), torch.tensor(float(w)))
    torch.testing.assert_close(found.item(), float(m))


@given(d=st.integers(-200, 100), w=widths, dtype=st.sampled_from([torch.float32, torch.float64]))
@example(d=-7, w=7.0, dtype=torch.float32)
@example(d=-7, w=7.00001, dtype=torch.float64)
@example(d=1, w=INF, dtype=torch.float32)
def test_softmask_is_exactly_zero_outside_the_window_and_positive_inside(d, w, dtype):
    w = torch.tensor(w, dtype=dtype)
    m = ms.softmask(torch.tensor(d), w)
    rounding = math.sqrt(torch.finfo(dtype).eps) * w   # so near to w, a cosine may round to -1
    assert m <= 1
    if d > 0 or d <= -w:
        assert m == 0
    elif w == INF:
        assert m == 1
    else:
        assert m >= 0
        assert m > 0 or d + w < rounding


def test_relevance_by_hand():
    q = torch.tensor([[[[1.0, 0.0]]]])
    k = torch.tensor([[[[1.0, 0.0], [0.6, 0.8], [-1.0, 0.0]]]])            # -1: an opposite key
    found = ms.relevance(q, k, torch.tensor([4.0]), torch.tensor([1.0]), i0=2)
    expected = torch.tensor([[[[0.5, 0.36 * 0.8535533905932737, 0.0]]]])
    torch.testing.assert_close(found, expected)


@given(seed=seeds, w=widths, r=acceptances, dtype=st.sampled_from([torch.float32, torch.float64]))
def test_relevance_of_a_pair_does_not_depend_on_other_keys(seed, w, r, dtype):
    q, k, _ = correlated(seed, 1, 2, 20, 20, dtype=dtype)
    w, r = torch.full((2,), w, dtype=dtype), torch.full((2,), r, dtype=dtype)
    before = ms.relevance(q, k, w, r)
    changed = k.clone()
    changed[:, :, 7] = q[:, :, 11]                     # query 11 matches it, 4 tokens later
    after = ms.relevance(q, changed, w, r)
    others = [j for j in range(20) if j != 7]
    assert torch.equal(before[..., others], after[..., others])
    if w[0] > 4.1:
        assert (after[..., 11, 7] > before[..., 11, 7]).all()


@given(seed=seeds, s_r=st.floats(-30, 30), w=widths, i0=st.integers(0, 2**17))
@example(seed=0, s_r=-30.0, w=20.0, i0=2**17)
def test_every_relevance_is_in_0_1_and_that_of_an_exact_match_is_1(seed, s_r, w, i0):
    """Up to 1e-3: in float32 the similarity of a unit vector to itself is off by up to 5e-7."""
    x = torch.randn(1, 1, 40, 16, generator=random(seed))
    w, r = torch.tensor([w]), ms.acceptance(torch.tensor([s_r]))
    q = ms.mipe(ms.unit(x), ms.mipe_angle(torch.arange(i0, i0 + 40), w, 256.0))
    alpha_d = ms.relevance(q, q, w, r)
    assert (alpha_d >= 0).all()
    assert (alpha_d < 1 + 1e-3).all()
    assert (alpha_d.diagonal(dim1=-2, dim2=-1) > 1 - 1e-3).all()


@draws(15)
@given(seed=seeds, T=st.integers(1, 12), S=st.integers(1, 12), i0=st.integers(-3, 12), w=widths,
       r=acceptances)
def test_screen_against_a_loop_over_pairs(seed, T, S, i0, w, r):
    q, k, v = correlated(seed, 2, 2, T, S, V=3)
    w = torch.tensor([w, 3.5], dtype=torch.float64)
    r = torch.tensor([r, 0.9], dtype=torch.float64)
    exact = paper_screen(q, k, v, w, r, i0)
    torch.testing.assert_close(ms.screen(q, k, v, w, r, i0), exact, rtol=1e-12, atol=1e-12)


def assert_keys_on_the_threshold_contribute_nothing(screen):
    """A tile for each r = n/1024, whose keys have s = 1 - r: no product rounds."""
    r = torch.arange(1, 1024, 93) / 1024
    H, T = len(r), 17
    q, k = torch.zeros(2, 1, H, T, 16)
    q[..., 0], k[..., 0] = 1, (1 - r)[:, None]
    v, w = torch.ones(1, H, T, 64), torch.full((H,), INF)
    assert (screen(q, k, v, w, r) == 0).all()
    assert (screen(q, k, v, w, torch.nextafter(r, torch.zeros(H))) == 0).all()
    assert (screen(q, k, v, w, 1.001 * r) > 0).all()


def test_a_key_exactly_on_the_threshold_contributes_nothing():
    assert_keys_on_the_threshold_contribute_nothing(ms.screen)


def assert_far_keys_count(screen, T):
    """The last of T queries finds three of 70,100 keys; the windows are 70,000 and infinite."""
    S = 70_100
    distance = torch.tensor([17_500, 66_000, 69_999])
    q, k, v = torch.zeros(1, 2, T, 16), torch.zeros(1, 2, S, 16), torch.zeros(1, 2, S, 16)
    q[..., 0] = 1
    k[:, :, S - 1 - distance, 0] = 1
    v[:, :, S - 1 - distance, :3] = torch.eye(3)
    h = screen(q, k, v, torch.tensor([70_000.0, INF]), torch.ones(2), S - T)
    m = 0.5 * (1 + torch.cos(math.pi * distance / 70_000))
    torch.testing.assert_close(h[0, :, -1, :3].cpu(), torch.stack((m, torch.ones(3))), rtol=1e-5,
                               atol=1e-6)
    assert (h[..., 3:] == 0).all()


@pytest.mark.parametrize("T", [1, 17])
def test_keys_count_however_far_a_window_reaches(T):
    assert_far_keys_count(ms.screen, T)


@given(seed=seeds, scale=st.floats(1e-4, 1e3))
@example(seed=0, scale=1e-4)
def test_tanh_norm_of_drawn_vectors(seed, scale):
    x = scale * torch.randn(3, 16, generator=random(seed), dtype=torch.float64)
    torch.testing.assert_close(ms.tanh_norm(x), paper_tanh_norm(x), rtol=1e-9, atol=0)


@pytest.mark.parametrize("length", [0.0, 1e-30, 1e-8, 1e-6, 1e-3, 1e4])
def test_tanh_norm_has_a_finite_jacobian_everywhere(length):
    x = torch.zeros(16, dtype=torch.float64)
    x[0] = length
    J = torch.autograd.functional.jacobian(ms.tanh_norm, x)
    assert J.isfinite().all()
    if length <= 1e-3:
        torch.testing.assert_close(J, torch.eye(16, dtype=torch.float64), rtol=0, atol=2e-6)
    x = x.float().requires_grad_()
    ms.tanh_norm(x).sum().backward()
    assert x.grad.isfinite().all()


@draws(20)
@given(seed=seeds, T=st.integers(2, 60), w=widths,
       dtype=st.sampled_from([torch.float32, torch.bfloat16]), data=st.data())
def test_causality_and_window_edge_are_bitwise(seed, T, w, dtype, data):
    """A change of key j leaves each bit of h before j, and from j + w on, as it was."""
    q, k, v = correlated(seed, 1, 1, T, T, dtype=dtype)
    w, r = torch.tensor([w]), torch.tensor([0.9])
    j = data.draw(st.integers(0, T - 1))
    k2, v2 = k.clone(), v.clone()
    k2[:, :, j], v2[:, :, j] = q[:, :, T - 1], -v[:, :, j]
    before, after = ms.screen(q, k, v, w, r), ms.screen(q, k2, v2, w, r)
    assert before.dtype == dtype
    edge = math.ceil(min(w.item(), T)) + j             # the first query beyond the reach of j
    assert torch.equal(before[:, :, :j], after[:, :, :j])
    assert torch.equal(before[:, :, edge:], after[:, :, edge:])
    assert not torch.equal(before[:, :, j], after[:, :, j])        # the pair (j, j) is alive


@draws(10)
@given(seed=seeds, w=st.floats(1.0, 300.0), i0=st.integers(0, 5))
@example(seed=0, w=3.0, i0=2)
@example(seed=0, w=256.0, i0=2)
def test_gradients_equal_finite_differences(seed, w, i0):
    """The gradients of q, k, v, w and r through MiPE, screening and TanhNorm.

    On the edges of a window and of MiPE, too, since both have a continuous slope.
    """
    q, k, v = correlated(seed, 1, 1, 4, 4 + i0, K=3, V=2)
    w, r = torch.tensor([[w], [0.9]], dtype=torch.float64)

    def screening(q, k, v, w, r):
        angle = ms.mipe_angle(torch.arange(4 + i0), w, 256.0)
        h = ms.screen(ms.mipe(q, angle[:, i0:]), ms.mipe(k, angle), v, w, r, i0)
        return ms.tanh_norm(h)

    inputs = [x.clone().requires_grad_() for x in (q, k, v, w, r)]
    assert torch.autograd.gradcheck(screening, inputs, atol=1e-5)


# --------------------------------------------------------- the model: equations 1 to 3, 15 to 18

# Other sizes reveal an equation with a size of the paper written into it.
SIZES = {"the paper's": {}, "others": {"w_th": 16.0, "d_K": 9, "d_V": 25, "N_H": 4}}


@pytest.mark.parametrize("seed, moved, sizes", [
    (0, False, "the paper's"), (0, True, "the paper's"), (1, True, "the paper's"),
    (2, True, "others")])
def test_logits_and_every_gradient_equal_the_paper_in_float64(seed, moved, sizes):
    model, tokens = small(seed, moved, **SIZES[sizes]), draw_tokens(1, 101, seed=seed)
    x, y = tokens[:, :-1], tokens[:, 1:]
    parameters = {name: p.detach().double().requires_grad_()
                  for name, p in model.named_parameters()}
    exact = paper_logits(parameters, model.config, x[0])
    torch.nn.functional.cross_entropy(exact, y[0]).backward()
    exact = exact.detach()
    if moved:
        alive = torch.stack(model.relevance_maps(x)).gt(0).double().mean()
        assert 0.05 < alive < 0.5                      # of T x T; the causal half is 0.5
    assert (model(x)[0].double() - exact).norm() < 1e-4 * exact.norm()
    torch.testing.assert_close(model.double()(x)[0], exact, rtol=1e-9, atol=1e-9)
    model.loss(x, y).backward()
    for name, p in model.named_parameters():
        wanted = parameters[name].grad
        assert wanted.any(), name
        atol = 1e-9 * max(1, wanted.abs().max().item())
        torch.testing.assert_close(p.grad, wanted, rtol=1e-6, atol=atol,
                                   msg=lambda m, name=name: f"{name}: {m}")


@draws(15)
@given(s=st.floats(-15, 60))
@example(s=-15.0)
@example(s=60.0)
def test_each_log_scale_acts_as_its_exponential_however_large_or_small(s):
    """s_E of the embedding, s_O of a tile's update, s_F of the logits."""
    model = small(1, moved=True, N_L=1).double()
    layer, tokens = model.layers[0], draw_tokens(1, 9)
    x = torch.randn(1, 9, 24, generator=random(0), dtype=torch.float64)

    def scaled(s):
        model.s_E.data.fill_(s)
        layer.s_O.data.fill_(s)
        model.s_F.data.fill_(s)
        return model.embed(tokens), layer(x, model.screen) - x, model.logits(x)

    with torch.no_grad():
        for ours, plain in zip(scaled(s), scaled(0.0)):
            torch.testing.assert_close(ours / math.exp(s), plain, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("psi, total, non_embedding", [
    (8, 4_134_146, 917_698), (16, 27_546_626, 14_680_834), (32, 286_347_266, 234_884_098),
    (48, 1_304_884_226, 1_189_092_098), (64, 3_963_961_346, 3_758_108_674)])
def test_parameter_counts_are_the_papers(psi, total, non_embedding):
    with torch.device("meta"):
        model = Multiscreen(Config(psi))
    count = sum(p.numel() for p in model.parameters())
    assert count == total
    assert count - model.W_E.numel() == non_embedding


@pytest.mark.parametrize("config", [
    Config(8, vocab_size=5000, N_L=5, d_E=144),
    Config(4, vocab_size=5000, N_L=3, N_H=9, d_E=225, d_K=36, d_V=100, w_th=16.0)])
def test_initial_values_are_the_papers(config):
    torch.manual_seed(0)
    model = Multiscreen(config)
    H, E, K, V = config.N_H, config.d_E, config.d_K, config.d_V
    stds = {"W_Q": 0.1 / K**0.5, "W_K": 0.1 / K**0.5, "W_V": 0.1 / V**0.5, "W_G": 0.1,
            "W_O": 0.1 / E**0.5}
    assert len(model.layers) == config.N_L
    for layer in model.layers:
        for name, std in stds.items():
            W = getattr(layer, name).detach() / std
            assert abs(W.std() - 1) < 0.05
            assert abs(W.mean()) < 0.05
            assert abs(W.pow(4).mean() / 3 - 1) < 0.2      # 3: the fourth moment of a normal
        s_w = torch.arange(H) * math.log(config.w_th) / (H - 1)
        torch.testing.assert_close(layer.s_w.detach(), s_w)
        assert (layer.s_r == 0).all()
        s_O = torch.full((H,), -0.5 * math.log(H * config.N_L))
        torch.testing.assert_close(layer.s_O.detach(), s_O)
    assert abs(model.W_E.std().item() / (0.1 / E**0.5) - 1) < 0.02
    assert model.s_E == 0
    assert abs(model.s_F.item() - 0.5 * math.log(E)) < 1e-6


def test_sizes_follow_psi_unless_they_are_given():
    assert vars(Config()) == dict(psi=8, vocab_size=50257, N_L=8, N_H=8, d_E=64, d_K=16, d_V=64,
                                  w_th=256.0)
    given = dict(psi=4, vocab_size=7, N_L=2, N_H=3, d_E=5, d_K=6, d_V=9, w_th=10.0)
    assert vars(Config(**given)) == given
    for name in given:
        part = {n: x for n, x in given.items() if n in ("psi", name)}
        assert vars(Config(**part)) == vars(Config(4)) | part


def test_loss_is_the_cross_entropy_of_the_logits_in_chunks_too(monkeypatch):
    model = small(1, moved=True).double()
    tokens = draw_tokens(2, 42)
    x, y = tokens[:, :-1], tokens[:, 1:].clone()
    y[0, 3:30] = -100
    torch.testing.assert_close(model(x)[1:], model(x[1:]))                 # each sequence alone
    exact = torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
    each = torch.nn.functional.cross_entropy(model(x).mT, y, reduction="none")
    wanted = torch.autograd.grad(exact, list(model.parameters()))
    for vocab_size in (50, 2**25 // 7):                # one chunk; chunks of 7 tokens, or fewer
        monkeypatch.setattr(model.config, "vocab_size", vocab_size)
        found = model.loss(x, y)
        torch.testing.assert_close(found, exact)
        torch.testing.assert_close(torch.autograd.grad(found, list(model.parameters())), wanted)
        torch.testing.assert_close(model.loss(x, y, "none"), each)


@draws(10)
@given(seed=seeds, T=st.integers(2, 90), dtype=st.sampled_from([None, torch.bfloat16]),
       data=st.data())
def test_the_model_is_causal_bitwise(seed, T, dtype, data):
    model, tokens = small(seed % 3, moved=True, dtype=dtype), draw_tokens(1, T, seed=seed)
    j = data.draw(st.integers(1, T - 1))
    changed = tokens.clone()
    changed[0, j] = (changed[0, j] + 1) % 50
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :j], after[:, :j])
    assert not torch.equal(before[:, j], after[:, j])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_products_run_in_16_bits_and_geometry_in_float32(dtype, monkeypatch):
    right_unit = ms.unit

    def unit(x):
        assert x.dtype == torch.float32
        return right_unit(x)

    monkeypatch.setattr(ms, "unit", unit)

    class Watched(ms.GatedScreeningTiles):
        def bound(self, h):
            assert h.dtype == torch.float32
            return super().bound(h)

    def screen(q, k, v, w, r, i0=0):
        assert {q.dtype, k.dtype, w.dtype, r.dtype} == {torch.float32}
        assert v.dtype == dtype

        # The products' results are normalised and rotated in float32.
        assert all((x.norm(dim=-1) - 1).abs().max() < 1e-5 for x in (q, k))
        return ms.screen(q, k, v, w, r, i0)

    tokens = draw_tokens(2, 60)
    exact = small(1, moved=True)(tokens)
    model = small(1, moved=True, dtype=dtype, tiles=Watched)
    assert all(type(layer) is Watched for layer in model.layers)
    model.screen = screen
    logits = model(tokens)
    assert logits.dtype == torch.float32
    assert 0 < (logits - exact).norm() / exact.norm() < 0.1

    # A product in 16 bits rounds both its factors: rounding one beforehand changes no bit.
    x = torch.randn(3, 24, generator=random(0))
    assert torch.equal(model.logits(x), model.logits(x.to(dtype).float()))
    for layer in model.layers:
        layer.s_O.data.zero_()                         # W_O is rounded after the factor e^s_O
    logits = model(tokens)
    for name in ("W_Q", "W_K", "W_V", "W_G", "W_O"):
        for layer in model.layers:
            W = getattr(layer, name)
            W.data.copy_(W.to(dtype))
        assert torch.equal(model(tokens), logits), name


@pytest.mark.parametrize("products", [torch.bfloat16, None])
def test_relevances_are_float32_under_autocast(products):
    """With r = 0.01, products in 16 bits would change h."""
    q, _, v = (x.float() for x in correlated(1, 1, 2, 60, 60))
    k = ms.unit(q + 0.01 * torch.randn(q.shape, generator=random(2)))
    w, r = torch.tensor([9.0, INF]), torch.tensor([0.01, 0.01])
    with torch.autocast("cpu", torch.bfloat16):
        h, alpha_d = ms.screen(q, k, v, w, r), ms.relevance(q, k, w, r)
    assert torch.equal(h, ms.screen(q, k, v, w, r))
    assert torch.equal(alpha_d, ms.relevance(q, k, w, r))

    # A model's products have 16 bits, whether autocast or the model's dtype asks for it.
    tokens, model = draw_tokens(2, 60), small(1, moved=True, dtype=products)
    wanted = small(1, moved=True, dtype=torch.bfloat16)(tokens)
    with torch.autocast("cpu", torch.bfloat16):
        found = model(tokens)
    assert found.dtype == torch.float32
    assert (found - wanted).norm() < 0.1 * wanted.norm()
    assert not torch.equal(found, small(1, moved=True)(tokens))


# ------------------------------------------------------------------------------ the trained model

@draws(15)
@given(seed=seeds, pieces=st.lists(st.integers(1, 60), min_size=1, max_size=5),
       infinite=st.booleans())
def test_cached_chunks_equal_one_pass(seed, pieces, infinite):
    model = small(seed % 5, moved=True)
    if not infinite:                                   # the only infinite window
        model.layers[0].s_w.data[0] = 3.0
    tokens = draw_tokens(2, sum(pieces), seed=seed)
    caches = model.new_caches()
    assert {type(cache) for cache in caches} == {KeyCache}
    with torch.no_grad():
        whole = model(tokens)
        parts = torch.cat([model(piece, caches) for piece in tokens.split(pieces, 1)], 1)
    torch.testing.assert_close(parts, whole, rtol=1e-3, atol=1e-4)


class Forgetful(KeyCache):
    """A cache that keeps, after a call, only the keys that the next query's windows reach."""

    def append(self, k, v, w=None):
        k, v = super().append(k, v)
        if w is not None and w.max() < INF:
            n = math.ceil(w.max().item()) - 1
            self.k, self.v = k[:, :, max(k.shape[2] - n, 0):], v[:, :, max(v.shape[2] - n, 0):]
        return k, v


def alibi(q, k, v, w, r, i0=0):
    """A screen that looks beyond w: similarities fall with the distance, and none is rejected."""
    i, j = torch.arange(i0, i0 + q.shape[2])[:, None], torch.arange(k.shape[2])
    return (q @ k.mT + (j - i) / 4).exp().where(j <= i, 0) @ v


class WithAlibi(GatedScreeningTiles):
    """A layer that passes on a screen of its own, whichever screen the model has."""

    def screening(self, x, screen, cache=None):
        return super().screening(x, alibi, cache)


@torch.no_grad()
@pytest.mark.parametrize("tiles, within_w, forgets", [
    (GatedScreeningTiles, True, True), (GatedScreeningTiles, False, False),
    (WithAlibi, True, False)])
def test_a_cache_gets_the_windows_only_for_a_screen_that_stays_within_them(tiles, within_w,
                                                                          forgets):
    model, tokens = small(2, moved=True, tiles=tiles), draw_tokens(2, 90)
    for layer in model.layers:
        layer.s_w.copy_(torch.tensor([0.5, 3.0, 2.0]))                     # w = 2.6, 21.1 and 8.4

    def screen(*inputs):
        return ms.screen(*inputs)

    screen.cache, screen.within_w = Forgetful, within_w
    model.screen = screen
    caches = model.new_caches()
    parts = torch.cat([model(piece, caches) for piece in tokens.split([40, 1, 30, 19], 1)], 1)
    torch.testing.assert_close(parts, model(tokens), rtol=1e-3, atol=1e-4)
    assert {cache.end for cache in caches} == {90}
    assert {cache.k.shape[2] for cache in caches} == {21 if forgets else 90}


@torch.no_grad()
def talkative():
    """A model whose next token depends on the whole text; that of `small` repeats the last."""
    model = small(2, moved=True).double()
    model.W_E.add_(0.2 * torch.randn(model.W_E.shape, generator=random(0)))
    model.s_E.fill_(-2.0)
    for layer in model.layers:
        layer.s_O.add_(3.0)
    return model


@torch.no_grad()
@pytest.mark.parametrize("tokens_at_once", [512, 7])
def test_generate_takes_the_token_with_the_largest_logit(tokens_at_once):
    """The prompt goes through the layers in pieces of tokens_at_once."""
    model, tokens = talkative(), draw_tokens(10, 33)
    model.tokens_at_once = tokens_at_once
    seen = tokens
    for _ in range(12):
        seen = torch.cat((seen, model(seen)[:, -1:].argmax(-1)), 1)
    assert (seen[:, 33:] == seen[:, 32:-1]).double().mean() < 0.5          # few repetitions
    assert torch.equal(model.generate(tokens, 12), seen[:, 33:])
    assert torch.equal(torch.stack(list(model.stream(tokens, 12)), 1), seen[:, 33:])
    assert model.generate(tokens, 0).shape == (10, 0)


def test_expand_windows_frees_the_windows_beyond_the_training_length():
    model = small(1, moved=True)
    for layer in model.layers:
        layer.s_w.data = torch.tensor([9.0, 99.0, 99.001]).log()           # w = 10, 100, 100.001
    model.expand_windows(100.0005)
    for layer in model.layers:
        assert layer.w.isinf().tolist() == [False, False, True]
        layer.s_w.data[1] = 0                                              # w = 2, exactly
    model.expand_windows(2)
    for layer in model.layers:
        assert layer.w.isinf().tolist() == [True, False, True]
    tokens = draw_tokens(2, 120)
    model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("screen, dtype", [(None, None), (None, torch.bfloat16), (alibi, None)])
def test_relevance_maps_are_the_weights_of_the_models_own_screen(screen, dtype):
    """With d_V = 7 the identity, 40 wide, goes through the screen in six pieces."""
    model, tokens, given = small(1, moved=True, dtype=dtype, d_V=7), draw_tokens(2, 40), []
    if screen is not None:
        model.screen = screen

    def watch(q, k, v, w, r, i0=0):
        given.append((q, k, w, r))
        return model.screen(q, k, v, w, r, i0)

    model.hidden(tokens, screen=watch)
    maps = model.relevance_maps(tokens)
    assert len(maps) == len(given) == model.config.N_L
    for (q, k, w, r), alpha_d in zip(given, maps):
        assert not alpha_d.requires_grad
        if screen is None:
            wanted = ms.relevance(q, k, w, r)
        else:
            wanted = alibi(q, k, torch.eye(40), w, r)
        assert alpha_d.shape == (2, 3, 40, 40)
        torch.testing.assert_close(alpha_d, wanted.detach(), rtol=1e-4, atol=1e-6)


def test_relevance_maps_change_no_attribute_of_the_model():
    """Two threads may ask at once, and one of them may train."""
    model, attributes = small(1), []

    def screen(*inputs):
        attributes.append(dict(vars(model)))
        return ms.screen(*inputs)

    model.screen = screen
    before = dict(vars(model))
    model.relevance_maps(draw_tokens(1, 9))
    with pytest.raises(IndexError):                    # token 50 is not in the vocabulary
        model.relevance_maps(torch.tensor([[50]]))
    assert attributes
    assert all(seen == before for seen in [*attributes, vars(model)])


# ------------------------------------------------------------------------------- the fused kernel

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
# The largest relative error of rounding to nearest.
ROUNDING = {FP32: 2**-24, FP16: 2**-11, BF16: 2**-8}
S_ERROR = 2**-22                                       # of a similarity: 16 products in float32
# Shrinking would take minutes in the interpreter.
QUICKLY = (Phase.explicit, Phase.reuse, Phase.generate)
# The families of GPUs for which blocks are shipped, by compute capability. The interpreter takes
# the blocks of any of them, a GPU its own.
FAMILIES = [8, 9, 10] if DEVICE == "cpu" else [min(torch.cuda.get_device_capability()[0], 10)]
some_blocks = st.sampled_from([*FAMILIES, (16, 32), (32, 16), (32, 32), (64, 32)])


def use_blocks(blocks):
    """A context with blocks of (queries, keys), or with those shipped for a family of GPUs."""
    if blocks in FAMILIES:
        shipped = fused.block_sizes

        def sizes(kernel, float32, d_K, d_V, capability):
            return shipped(kernel, float32, d_K, d_V, (blocks, 0))
    else:
        def sizes(*args):
            return *blocks, *((4, 2) if DEVICE == "cuda" else (1, 1))      # warps and stages

    return mock.patch.object(fused, "block_sizes", sizes)


def through_kernel(q, k, v, w, r, i0, dh, blocks=(32, 32)):
    """h and the five gradients from the kernel. blocks: of `use_blocks`."""
    inputs = [x.detach().to(DEVICE).requires_grad_() for x in (q, k, v, w, r)]
    # Fill new memory with NaN, so that a number which the kernel never writes shows.
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with use_blocks(blocks):
            h = fused.screen(*inputs, i0)
            gradients = torch.autograd.grad(h, inputs, dh.to(DEVICE))
    finally:
        torch.use_deterministic_algorithms(False)
    return [h.detach().cpu(), *(g.cpu() for g in gradients)]


def through_torch(q, k, v, w, r, i0, dh):
    """h and the five gradients from the definition."""
    inputs = [x.detach().requires_grad_() for x in (q, k, v, w, r)]
    h = ms.screen(*inputs, i0)
    return [h.detach(), *torch.autograd.grad(h, inputs, dh.to(h.dtype))]


def assert_as_good_as_torch(q, k, v, w, r, i0, dh, blocks=(32, 32)):
    """The kernel's error is at most about twice that of PyTorch in float32.

    Errors are against float64, with the inputs as they are: nothing rounds these first. PyTorch's
    error counts as at least one rounding of the largest value, because its 16-bit results may be
    nearer by luck.
    """
    q64, k64, v64, w64, r64 = (x.double() for x in (q, k, v, w, r))
    exact = through_torch(q64, k64, v64, w64, r64, i0, dh)
    plain = through_torch(q, k, v, w, r, i0, dh)
    fast = through_kernel(q, k, v, w, r, i0, dh, blocks)

    # A sum may be far smaller than its terms, so add what each term may be off by. The kernel
    # rounds each relevance, and each dL/ds, at most to v's dtype before it multiplies them. And s
    # is off by its last bits: 1/r multiplies this error in a relevance, and 1/r^2 in dL/ds.
    w64.requires_grad_()
    r64.requires_grad_()
    s = (q64 @ k64.mT).requires_grad_()
    d = torch.arange(k.shape[2]) - torch.arange(i0, i0 + q.shape[2])[:, None]
    m = ms.softmask(d, w64[:, None, None])
    alpha_d = ms.trim(s, r64[:, None, None]) * m
    slope, = torch.autograd.grad(alpha_d.sum(), s, retain_graph=True)
    r_column = r.double()[:, None, None]
    may_pass = s > 1 - r_column - S_ERROR
    curvature = (2 * m / r_column**2 * may_pass).detach()
    dh64 = dh.double()
    dh_v = (dh64 @ v64.mT).abs()
    of_alpha_d = ROUNDING[v.dtype] * alpha_d.detach() + S_ERROR * slope
    of_ds = (ROUNDING[v.dtype] * slope + S_ERROR * curvature) * dh_v
    slack = {"h": of_alpha_d @ v64.abs(), "dv": of_alpha_d.mT @ dh64.abs(),
             "dq": of_ds @ k64.abs(), "dk": of_ds.mT @ q64.abs()}

    # dw and dr are sums over all pairs: add 1e-6 of the terms' magnitudes.
    of_w, of_r = torch.autograd.grad(alpha_d, (w64, r64), dh_v)
    of_s = (S_ERROR * curvature * dh_v).sum((0, 2, 3))
    slack |= {"dw": 1e-6 * of_w.abs(), "dr": 1e-6 * of_r.abs() + of_s}

    dtypes = {"h": v.dtype, "dq": q.dtype, "dk": k.dtype, "dv": v.dtype, "dw": w.dtype,
              "dr": r.dtype}
    for (name, dtype), x_fast, x_plain, x_exact in zip(dtypes.items(), fast, plain, exact):
        assert x_fast.dtype == dtype, name
        assert x_fast.shape == x_exact.shape, name
        largest = x_exact.abs().max()
        plain_error = (x_plain.double() - x_exact).abs().max()
        if name not in ("dw", "dr"):
            of_result = ROUNDING[v.dtype if dtype == FP32 else dtype] * largest
            plain_error = torch.maximum(plain_error, of_result)
        allowed = 2 * plain_error + 2e-6 + slack[name]
        if DEVICE == "cuda":                                   # its cos and sin: off by 2^-20.5
            allowed = allowed + 2**-17 * largest
        error = (x_fast.double() - x_exact).abs()
        assert (error <= allowed).all(), (name, error / allowed)           # fails on NaN


def draw_inputs(seed, B, T, S, dtypes, rho=0.6, H=2):
    """Correlated q, k, v and a gradient dh of h. dtypes: that of q and k, then that of v."""
    q, k, v = correlated(seed, B, H, T, S, rho=rho)
    dh = torch.randn(B, H, T, 64, generator=random(seed + 1), dtype=torch.float64)
    return q.to(dtypes[0]), k.to(dtypes[0]), v.to(dtypes[1]), dh.to(dtypes[1])


@needs_kernel
@draws(2, phases=QUICKLY)
@given(seed=seeds, B=st.integers(1, 2), T=st.integers(1, 40), S=st.integers(1, 40),
       i0=st.one_of(st.just(0), st.integers(-40, 40)), keys=st.sampled_from([16, 48, 1024]),
       blocks=some_blocks, tiles=st.lists(st.tuples(widths, acceptances), min_size=1, max_size=2),
       rho=st.floats(0.3, 0.9),
       dtypes=st.sampled_from([(FP32, FP32), (FP16, FP16), (BF16, BF16), (FP32, FP16),
                               (FP32, BF16), (BF16, FP16)]))
# The bounds of a window of 31.1 lie on the edge of a block, or one beside it.
@example(seed=0, B=1, T=47, S=50, i0=1, keys=1024, blocks=(16, 16), tiles=[(31.1, 0.9)], rho=0.6,
         dtypes=(FP32, FP32))
@example(seed=1, B=1, T=47, S=50, i0=14, keys=1024, blocks=(16, 16), tiles=[(31.1, 0.9)], rho=0.6,
         dtypes=(FP32, FP32))
# A tiny r; a huge window and a small one, after the last key; windows smaller than the blocks that
# are shipped.
@example(seed=2, B=1, T=33, S=50, i0=17, keys=1024, blocks=(32, 16), tiles=[(33.0, 0.02)], rho=0.6,
         dtypes=(FP32, BF16))
@example(seed=3, B=2, T=35, S=21, i0=5, keys=1024, blocks=(16, 32), tiles=[(1e4, 0.5), (2.5, 0.7)],
         rho=0.6, dtypes=(BF16, BF16))
@example(seed=4, B=1, T=70, S=70, i0=0, keys=1024, blocks=FAMILIES[0],
         tiles=[(1.5, 0.9), (2.0, 0.7)], rho=0.8, dtypes=(FP32, FP16))
# Decoding: one pair; one query; 16 queries; a program without keys.
@example(seed=5, B=1, T=1, S=1, i0=0, keys=1024, blocks=(16, 16), tiles=[(1.0, 0.5), (INF, 1.0)],
         rho=0.9, dtypes=(FP32, BF16))
@example(seed=6, B=2, T=1, S=110, i0=109, keys=48, blocks=FAMILIES[0], tiles=[(60.0, 0.3)],
         rho=0.6, dtypes=(FP32, BF16))
@example(seed=7, B=1, T=16, S=50, i0=34, keys=16, blocks=(16, 16),
         tiles=[(5.0, 0.9), (40.5, 0.02)], rho=0.6, dtypes=(FP32, FP32))
@example(seed=8, B=1, T=7, S=20, i0=16, keys=16, blocks=(32, 64), tiles=[(INF, 0.5)], rho=0.9,
         dtypes=(FP32, FP16))
def test_kernel_is_as_good_as_torch_in_value_and_every_gradient(seed, B, T, S, i0, keys, blocks,
                                                                tiles, rho, dtypes):
    """Up to 16 queries are decoded: there, each program has `keys` keys of a tile."""
    q, k, v, dh = draw_inputs(seed, B, T, S, dtypes, rho, len(tiles))
    with mock.patch.object(fused, "KEYS_PER_PROGRAM", keys):
        assert_as_good_as_torch(q, k, v, *torch.tensor(tiles).T, i0, dh, blocks)


@needs_kernel
def test_kernel_drops_a_key_exactly_on_the_threshold():
    """1/r is rounded, up or down. At no r = n/1024 may this let a key on the threshold pass."""
    assert_keys_on_the_threshold_contribute_nothing(
        lambda *inputs: fused.screen(*(x.to(DEVICE) for x in inputs)))


@needs_kernel
@draws(2, phases=QUICKLY)
@given(seed=seeds, T=st.integers(2, 32), j=st.integers(0, 31), w=widths, blocks=some_blocks,
       dtypes=st.sampled_from([(FP32, FP32), (FP32, BF16)]))
@example(seed=0, T=32, j=12, w=16.0, blocks=(16, 16), dtypes=(FP32, FP32))
def test_kernel_causality_and_window_edge_are_exact(seed, T, j, w, blocks, dtypes):
    """Key j reaches only queries j to j + ceil(w) - 1, and query j only keys that see it."""
    q, k, v, dh = draw_inputs(seed, 2, T, T, dtypes, 0.8, H=1)
    j = j % T
    reach = math.ceil(min(w, T))
    unseen = [n for n in range(T) if not j <= n < j + reach]
    unseeing = [n for n in range(T) if not j - reach < n <= j]

    # In sequence 0 all values are 0 but that of key j, in 1 all dh but that of query j. So nothing
    # hides a tiny relevance of a pair that should have none.
    others = [n for n in range(T) if n != j]
    v[0, :, others] = 0
    dh[1, :, others] = 0
    inputs = q, k, v, torch.tensor([w]), torch.tensor([0.9])
    h, dq, dk, dv, _, _ = through_kernel(*inputs, 0, dh, blocks)
    assert not h[0, :, unseen].any()
    assert not dq[0, :, unseen].any()
    assert not dk[1, :, unseeing].any()
    assert not dv[1, :, unseeing].any()
    for x in (h[0], dq[0], dk[1], dv[1]):
        assert x[:, j].any()


@needs_kernel
@pytest.mark.parametrize("w, end", [((5.0, 16.5), 48), ((33.0, 32.5), 64)])
def test_kernel_never_visits_what_lies_outside_the_windows(w, end):
    """One visit to a block outside the window would turn a program's sums into NaN.

    If w is 33 or 32.5, a program visits three blocks, the middle one without masks. NaN that a
    query sees stays NaN: a model that has diverged must not look like one that finds nothing.
    """
    T = end + 16
    q, k, v, dh = draw_inputs(5, 1, T, T, (FP32, FP32))
    for x in (q, k):
        x[:, :, :16] = math.nan
        x[:, :, end:] = math.nan
    inputs = q, k, v, torch.tensor(w), torch.tensor([0.5, 0.9])
    h, dq, dk, dv, _, _ = through_kernel(*inputs, 0, dh, (16, 16))

    # The last 16 queries before `end` see keys 16 to end - 1. In tile 1, queries 16 to 31 see one
    # before these.
    for x in (h, dq):
        assert x[:, :, end - 16:end].isfinite().all()
        assert x[:, 1, :32].isnan().all()
    # Only queries 16 to end - 1 see keys 16 to 31, and in tile 1 a later query sees the last 16.
    for x in (dk, dv):
        assert x[:, :, 16:32].isfinite().all()
        assert x[:, 1, end - 16:].isnan().all()


@needs_kernel
def test_kernel_keeps_the_gradient_of_the_window_through_mipe():
    """The gradient of s_w, through the rotations and the softmask, with 16-bit values.

    MiPE's part of it is a small difference of large sums. The relative error depends on the parts
    into which the backward kernels split q and k:
        two in float16, as shipped     < 2.5e-3 (on an Ampere 1e-2, as the two round s differently)
        two parts in bfloat16          1e-2
        one part                       0.5 to 1
    """
    hopper = DEVICE == "cpu" or torch.cuda.get_device_capability()[0] == 9
    # In the interpreter, a shorter text whose errors are as far apart.
    T, seed = (2048, 11) if DEVICE == "cuda" else (512, 21)
    w = 3.0
    q, k, v = correlated(seed, 1, 1, T, T, rho=0.6)
    v = v.to(BF16)
    dh = torch.randn(1, 1, T, 64, generator=random(seed + 1), dtype=torch.float64).to(BF16)

    def gradient(screen, dtype, v):
        s_w, r = torch.tensor([math.log(w - 1)], requires_grad=True), torch.tensor([0.5])
        width = ms.window(s_w.to(dtype))
        angle = ms.mipe_angle(torch.arange(T), width, 256.0)
        q_tilde, k_tilde = (ms.mipe(x.float().to(dtype), angle) for x in (q, k))
        h = screen(*(x.to(DEVICE) for x in (q_tilde, k_tilde, v, width, r.to(dtype))))
        h.backward(dh.to(h.dtype).to(DEVICE))
        return s_w.grad.item()

    exact = gradient(ms.screen, torch.float64, v.double())
    with use_blocks(FAMILIES[0] if DEVICE == "cuda" else (256, 256)):      # fewer to interpret
        error = abs(gradient(fused.screen, FP32, v) / exact - 1)
    assert error < (2.5e-3 if hopper else 2e-2)


@needs_kernel
def test_the_model_through_the_kernel_is_the_paper_and_has_its_gradient():
    model = small(1, moved=True, N_L=1)
    tokens = draw_tokens(1, 41)
    parameters = {name: p.detach().double() for name, p in model.named_parameters()}
    exact = paper_logits(parameters, model.config, tokens[0])
    model.to(DEVICE)
    tokens = tokens.to(DEVICE)
    grads = {}
    for screen in (ms.screen, fused.screen):
        model.screen = screen
        model.zero_grad()
        model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
        grads[screen] = {name: p.grad.clone() for name, p in model.named_parameters()}
    assert (model(tokens).detach()[0].cpu().double() - exact).norm() < 1e-4 * exact.norm()
    for name, g in grads[ms.screen].items():
        torch.testing.assert_close(grads[fused.screen][name], g, rtol=1e-3,
                                   atol=1e-4 * g.abs().max().item(), msg=name)
