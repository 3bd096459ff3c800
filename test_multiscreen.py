"""The proof that this code is the paper: what is claimed, by which test, compared with what.

"The paper" is tests/reference.py: the paper once more in plain lines of float64, with loops over
tokens, written independently of multiscreen.py. If you trust those lines, you need not trust ours.
Hypothesis draws inputs with tests/inputs.py, so that queries often find keys; each run draws other
ones, and `pytest test_multiscreen.py --hypothesis-profile=nightly` draws 200 for each property.
tests/kernel.py says how exact the kernel must be. Without a GPU the kernel runs in Triton's
interpreter, with the blocks of three families of GPUs.

claim, and below it the test                                      compared with
----------------------------------------------------------------  ----------------------------------
Each equation
 1) is one function, whose docstring has its number               multiscreen.py, docs/variants.md
     test_every_equation_has_one_owner_and_the_guide_agrees
 2) is right at points worked out by hand                         numbers written in the test
     pytest -k by_hand: Eqs. 4, 6, 7, 9, 10 and 11
 3) is right for drawn inputs: Eqs. 8 to 12                       the paper, a loop over pairs
     test_screen_against_a_loop_over_pairs
 4) makes relevance absolute: other keys do not change it         itself, bit for bit
     test_relevance_of_a_pair_does_not_depend_on_other_keys
 5) is exactly 0 for later keys, for keys at distance w or more,  itself, bit for bit
   and for keys at or below Trim's threshold
     test_causality_and_window_edge_are_bitwise
     test_a_key_exactly_on_the_threshold_contributes_nothing_at_all
 6) is right far out: angles 2^20 tokens after the first one,     80-bit numbers; numbers worked
   keys 70,000 tokens before the query                            out by hand
     test_mipe_angle_is_right_far_out
     test_keys_count_however_far_a_window_reaches
 7) has finite gradients, also where a vector is 0                the limit worked out by hand
     test_unit_of_zero_is_zero_with_a_finite_gradient
     test_tanh_norm_has_a_finite_jacobian_everywhere

The model, Eqs. 1 to 18
 8) has the paper's logits and the gradient of every weight       the paper
     test_logits_and_every_gradient_equal_the_paper_in_float64
 9) has the paper's sizes and initial values                      the paper's tables
     test_parameter_counts_are_the_papers
     test_initial_values_are_the_papers
10) sees no later token                                           itself, bit for bit
     test_the_model_is_causal_bitwise
11) gives the same in pieces with a cache                         one pass over the whole text
     test_cached_chunks_equal_one_pass
12) multiplies in 16 bits, and keeps the rest in float32          itself, with rounded weights
     test_products_run_in_16_bits_and_geometry_in_float32

The fused kernel, screening_triton.py
13) has the value and all five gradients of Eq. 12                the definition in float64, with
     test_kernel_is_as_good_as_torch_in_value_and_every_gradient  about twice PyTorch's own error
     test_kernel_with_shared_keys_is_as_good_as_torch
14) keeps the windows' edges exactly, and Trim's in float32       itself, bit for bit, and with
     test_kernel_drops_a_key_exactly_on_the_threshold             NaN where it must not read
     test_kernel_causality_and_window_edge_are_bitwise
     test_kernel_never_visits_what_lies_outside_the_windows
15) keeps the gradient of w that comes through MiPE               the definition in float64
     test_kernel_keeps_the_gradient_of_the_window_through_mipe
16) gives the model the same logits and gradients                 the paper; the definition
     test_the_model_through_the_kernel_is_the_paper_and_has_its_gradient

The other twins of the definition, in windows and in C++, are compared with it in
tests/test_windowed.py and tests/test_native.py. What users do with a model, such as generation, is
tested in tests/test_generation.py, and what else the kernel takes and refuses in
tests/test_kernel.py.
"""
from tests import DEVICE

# isort: split
# The import above sets TRITON_INTERPRET before the import of screening_triton reads it.
import functools
import math
import re
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import multiscreen as ms
import screening_triton as fused
from multiscreen import Config, KeyCache, Multiscreen
from support.windowed import screen_windowed
from tests import reference
from tests.inputs import (
    INF,
    acceptances,
    correlated,
    draw_tokens,
    draws,
    needs_kernel,
    random,
    seeds,
    small,
    use_products_of,
    widths,
)
from tests.kernel import (
    BF16,
    FAMILIES,
    FP16,
    FP32,
    QUICKLY,
    assert_as_good_as_torch,
    draw_inputs,
    some_blocks,
    through_kernel,
    use_blocks,
)

MANY = 150                          # keys; screen_windowed makes no cuts below 129


def guards(equation):
    """Name the equation when its test fails, in case you changed it on purpose."""
    def decorate(test):
        @functools.wraps(test)
        def wrapper(*args, **kwargs):
            try:
                test(*args, **kwargs)
            except AssertionError as e:
                e.add_note(f"This test guards {equation} of the paper. If you changed it on "
                           "purpose, the failure is right: your change acts. `git diff "
                           "multiscreen.py` shows how your file differs from the paper's.")
                raise
        return wrapper
    return decorate


# -------------------------------------------------------------------------- equations 4 to 14

def test_the_table_of_claims_names_tests_of_this_file():
    named = re.findall(r"^ +(test_\w+)", __doc__, re.M)
    assert len(named) > 16
    assert set(named) <= set(globals())


def test_every_equation_has_one_owner_and_the_guide_agrees():
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

    # The guide's table: | n, m | ... | `function`.
    guide = Path(__file__).with_name("docs").joinpath("variants.md").read_text()
    rows = re.findall(r"^\| *([\d, ]+?) *\|.*?\| *`([\w.]+)`", guide, re.M)
    table = {int(n): name.split(".")[-1] for numbers, name in rows for n in numbers.split(",")}
    assert table == {n: names[0] for n, names in owners.items()}


@guards("Eq. (4), window and acceptance width")
def test_window_and_acceptance_by_hand():
    s_w = torch.tensor([0.0, math.log(256), -INF, INF, 1e4], requires_grad=True)
    w = ms.window(s_w)
    assert w[0] == 2
    assert w[2] == 1
    assert w[3] == INF
    torch.testing.assert_close(w[1].item(), 257.0, rtol=1e-5, atol=0)
    torch.testing.assert_close(w[4].item(), math.exp(80), rtol=1e-5, atol=0)
    w.sum().backward()
    torch.testing.assert_close(s_w.grad, torch.tensor([1.0, 256.0, 0.0, 0.0, 0.0]))
    assert ms.acceptance(torch.tensor(0.0)) == 0.5
    assert ms.acceptance(torch.tensor(-INF)) == torch.tensor(1e-3)
    torch.testing.assert_close(ms.acceptance(torch.tensor(math.log(3.0))).item(), 0.75)


@guards("Eq. (5), unit length")
@given(seed=seeds, scale=st.floats(1e-3, 1e6))
def test_unit_has_length_one_and_ignores_scale(seed, scale):
    x = torch.randn(5, 16, generator=random(seed), dtype=torch.float64)
    torch.testing.assert_close(ms.unit(x), reference.unit(x))
    torch.testing.assert_close(ms.unit(scale * x), ms.unit(x), rtol=1e-9, atol=1e-12)


@guards("Eq. (5), unit length")
def test_unit_of_zero_is_zero_with_a_finite_gradient():
    x = torch.zeros(3, 16, requires_grad=True)
    y = ms.unit(x)
    y.sum().backward()
    assert (y == 0).all()
    assert x.grad.isfinite().all()


@guards("Eq. (5), unit length")
def test_unit_divides_by_the_length_but_by_no_less_than_1e_6():
    found = ms.unit(torch.tensor([[3.0, 4.0], [6e-6, 8e-6], [3e-8, 4e-8]]))
    torch.testing.assert_close(found, torch.tensor([[0.6, 0.8], [0.6, 0.8], [0.03, 0.04]]))


@guards("Eqs. (6) and (7), MiPE's angle")
def test_mipe_angle_by_hand():
    w = torch.tensor([2.0, 128.0, 256.0, 1e6, INF], dtype=torch.float64)
    angle = ms.mipe_angle(torch.tensor([0, 1, 3]), w, 256.0)
    assert (angle[:, 0] == 0).all()
    assert (angle[2:] == 0).all()
    torch.testing.assert_close(angle[1, 1].item(), math.pi / 256)          # gamma(w_th / 2) = 1/2
    gamma = (math.cos(math.pi / 128) + 1) / 2
    torch.testing.assert_close(angle[0, 2].item(), 3 * math.pi * gamma / 2)
    assert ms.mipe_angle(torch.tensor([1]), w.bfloat16(), 256.0).dtype == torch.float32


@guards("Eqs. (6) and (7), MiPE's angle")
@given(i=st.integers(0, 2**20), w=st.floats(1.0, 300.0))
def test_mipe_angle_is_right_far_out(i, w):
    """Computed in float32, it would be off by 0.01 rad at 2^17; longdouble has more digits."""
    w = float(np.float32(w))
    pi = np.longdouble("3.14159265358979323846264338327950288")
    gamma = (np.cos(pi * np.longdouble(w) / 256) + 1) / 2 if w < 256 else np.longdouble(0)
    exact = i * (pi * gamma / np.longdouble(w))

    # They may differ by whole turns.
    angle = ms.mipe_angle(torch.tensor([i]), torch.tensor([w]), 256.0).item()
    assert abs(np.remainder(angle - exact + pi, 2 * pi) - pi) < 2e-6


@guards("Eqs. (6) and (7), MiPE")
def test_a_quarter_turn_takes_the_first_axis_to_the_second_and_leaves_the_others():
    found = ms.mipe(torch.tensor([[[[1.0, 2.0, 3.0, 4.0]]]]), torch.tensor([[math.pi / 2]]))
    torch.testing.assert_close(found, torch.tensor([[[[-2.0, 1.0, 3.0, 4.0]]]]))


@guards("Eqs. (6) and (7), MiPE")
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
        x = turn(q, i)
        torch.testing.assert_close(x.norm(), q.norm())
        assert torch.equal(x[..., 2:], q[..., 2:])


@guards("Eq. (9), Trim")
@pytest.mark.parametrize("s, r, alpha", [
    (1, 0.5, 1), (0.9, 0.5, 0.64), (0.5, 0.5, 0), (0.75, 0.5, 0.25), (0, 1, 0), (-1, 1, 0),
    (0.5, 1, 0.25)])
def test_trim_by_hand(s, r, alpha):
    found = ms.trim(torch.tensor(float(s)), torch.tensor(float(r)))
    torch.testing.assert_close(found.item(), float(alpha))


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
        assert alpha == 0
        assert s.grad == 0
    elif 1 - s < 0.999 * r:
        assert alpha > 0
        assert s.grad > 0


@guards("Eq. (10), Softmask")
@pytest.mark.parametrize("d, w, m", [
    (0, 4, 1), (-1, 4, 0.5 + 0.25 * math.sqrt(2)), (-2, 4, 0.5),
    (-3, 4, 0.5 - 0.25 * math.sqrt(2)), (-4, 4, 0), (1, 4, 0), (-5, 4, 0), (-9, INF, 1),
    (1, INF, 0), (0, 1, 1), (-1, 1, 0), (-100_000, 150_000, 0.25), (-100_000, INF, 1)])
def test_softmask_by_hand(d, w, m):
    found = ms.softmask(torch.tensor(d), torch.tensor(float(w)))
    torch.testing.assert_close(found.item(), float(m))


@guards("Eq. (10), Softmask")
@given(d=st.integers(-200, 100), w=widths, dtype=st.sampled_from([torch.float32, torch.float64]))
@example(d=-7, w=7.0, dtype=torch.float32)
@example(d=-7, w=7.00001, dtype=torch.float64)
@example(d=1, w=INF, dtype=torch.float32)
def test_softmask_is_exactly_zero_outside_the_window_and_positive_inside(d, w, dtype):
    w = torch.tensor(w, dtype=dtype)
    m = ms.softmask(torch.tensor(d), w)
    rounding = math.sqrt(torch.finfo(dtype).eps) * w                       # of a cosine near -1
    assert m <= 1
    if d > 0 or d <= -w:
        assert m == 0
    elif w == INF:
        assert m == 1
    else:
        assert m >= 0
        assert m > 0 or d + w < rounding


@guards("Eqs. (8) and (11), relevance")
def test_relevance_by_hand():
    q = torch.tensor([[[[1.0, 0.0]]]])
    k = torch.tensor([[[[1.0, 0.0], [0.6, 0.8], [-1.0, 0.0]]]])            # -1: an opposite key
    found = ms.relevance(q, k, torch.tensor([4.0]), torch.tensor([1.0]), i0=2)
    expected = torch.tensor([[[[0.5, 0.36 * 0.8535533905932737, 0.0]]]])
    torch.testing.assert_close(found, expected)


@guards("Eqs. (8) and (11), relevance")
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
    assert before.min() >= 0
    assert before.max() <= 1 + 1e-5


@guards("Eqs. (4) to (11), relevance")
@given(seed=seeds, s_r=st.floats(-30, 30), w=widths, i0=st.integers(0, 2**17))
@example(seed=0, s_r=-30.0, w=20.0, i0=2**17)
def test_every_relevance_is_in_0_1_and_that_of_an_exact_match_is_1(seed, s_r, w, i0):
    """To 1e-3, whatever s_r: in float32 a unit vector's similarity to itself is off by 5e-7."""
    x = torch.randn(1, 1, 40, 16, generator=random(seed))
    w, r = torch.tensor([w]), ms.acceptance(torch.tensor([s_r]))
    q = ms.mipe(ms.unit(x), ms.mipe_angle(torch.arange(i0, i0 + 40), w, 256.0))
    alpha_d = ms.relevance(q, q, w, r)
    assert (alpha_d >= 0).all()
    assert (alpha_d < 1 + 1e-3).all()
    assert (alpha_d.diagonal(dim1=-2, dim2=-1) > 1 - 1e-3).all()


@guards("Eqs. (8) to (12), screening")
@draws(15)
@given(seed=seeds, T=st.integers(1, 12), S=st.integers(1, 12), i0=st.integers(-3, 12), w=widths,
       r=acceptances)
def test_screen_against_a_loop_over_pairs(seed, T, S, i0, w, r):
    q, k, v = correlated(seed, 2, 2, T, S, V=3)
    w = torch.tensor([w, 3.5], dtype=torch.float64)
    r = torch.tensor([r, 0.9], dtype=torch.float64)
    exact = reference.reference_screen(q, k, v, w, r, i0)
    torch.testing.assert_close(ms.screen(q, k, v, w, r, i0), exact, rtol=1e-12, atol=1e-12)


def assert_a_key_on_the_threshold_contributes_nothing(screen, s, T=MANY):
    """s is a multiple of 2^-10, no product rounds, and r is the float32 number 1 - s."""
    q, k = torch.zeros(2, 1, 1, T, 16)
    q[..., 0], k[..., 0] = 1, s
    v, w = torch.ones(1, 1, T, 64), torch.tensor([INF])
    r = torch.tensor([1 - s])
    assert (screen(q, k, v, w, r) == 0).all()
    assert (screen(q, k, v, w, torch.nextafter(r, torch.zeros(1))) == 0).all()
    assert (screen(q, k, v, w, 1.001 * r) > 0).all()


@pytest.mark.parametrize("screen", [ms.screen, screen_windowed])
@pytest.mark.parametrize("s", [717 / 1024, 461 / 1024, 256 / 1024])
def test_a_key_exactly_on_the_threshold_contributes_nothing_at_all(screen, s):
    assert_a_key_on_the_threshold_contributes_nothing(screen, s)


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


@pytest.mark.parametrize("screen", [ms.screen, screen_windowed])
@pytest.mark.parametrize("T", [1, 17])
def test_keys_count_however_far_a_window_reaches(T, screen):
    assert_far_keys_count(screen, T)


@guards("Eq. (13), TanhNorm")
@given(seed=seeds, scale=st.floats(1e-4, 1e3))
@example(seed=0, scale=1e-4)
def test_tanh_norm_bounds_the_length_and_keeps_the_direction(seed, scale):
    x = scale * torch.randn(3, 16, generator=random(seed), dtype=torch.float64)
    y = ms.tanh_norm(x)
    torch.testing.assert_close(y, reference.tanh_norm(x), rtol=1e-9, atol=0)
    torch.testing.assert_close(y.norm(dim=-1), torch.tanh(x.norm(dim=-1)))


@guards("Eq. (13), TanhNorm")
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


@pytest.mark.parametrize("T", [40, MANY])
@pytest.mark.parametrize("screen", [ms.screen, screen_windowed])
def test_bfloat16_values_and_transposed_inputs_give_the_same_numbers(T, screen):
    q, k, v = correlated(3, 2, 2, T, T, dtype=torch.bfloat16)
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    w, r = torch.tensor([5.5, INF]), torch.tensor([0.5, 0.7])
    exact = ms.screen(*(x.double() for x in (q, k, v, w, r)))
    h = screen(q, k, v, w, r)
    assert h.dtype == torch.bfloat16
    torch.testing.assert_close(h.double(), exact, rtol=0.01, atol=1e-3)


@draws(20)
@given(seed=seeds, T=st.integers(2, 40) | st.integers(MANY, MANY + 40), w=widths,
       dtype=st.sampled_from([torch.float32, torch.bfloat16]),
       screen=st.sampled_from([ms.screen, screen_windowed]), data=st.data())
def test_causality_and_window_edge_are_bitwise(seed, T, w, dtype, screen, data):
    """A change at j leaves every bit before j, and from j + w on, as it was."""
    q, k, v = correlated(seed, 1, 1, T, T, dtype=dtype)
    w, r = torch.tensor([w]), torch.tensor([0.9])
    j = data.draw(st.integers(0, T - 1))
    k2, v2 = k.clone(), v.clone()
    k2[:, :, j], v2[:, :, j] = q[:, :, T - 1], -v[:, :, j]
    before, after = screen(q, k, v, w, r), screen(q, k2, v2, w, r)
    edge = math.ceil(min(w.item(), T)) + j             # the first query beyond the reach of j
    assert torch.equal(before[:, :, :j], after[:, :, :j])
    assert torch.equal(before[:, :, edge:], after[:, :, edge:])
    assert not torch.equal(before[:, :, j], after[:, :, j])        # close: the pair (j, j) is alive


# --------------------------------------------------------- the model: equations 1 to 3, 15 to 18

# A size of the paper's that is written into an equation shows with the others.
SIZES = {"the paper's": {}, "others": {"w_th": 16.0, "d_K": 9, "d_V": 25, "N_H": 4}}


@functools.cache
def reference_run(seed, moved, sizes):
    """(tokens, parameters, logits) of a small model, from tests/reference.py, in float64.

    The parameters carry the gradients of the loss.
    """
    model = small(seed, moved, **SIZES[sizes])
    tokens = draw_tokens(1, MANY + 1, seed=seed)
    p = {name: x.detach().double().requires_grad_() for name, x in model.named_parameters()}
    logits = reference.reference_logits(p, model.config, tokens[0, :-1])
    torch.nn.functional.cross_entropy(logits, tokens[0, 1:]).backward()
    return tokens, p, logits.detach()


@guards("Eqs. (1) to (18), the model")
@pytest.mark.parametrize("seed, moved, sizes", [
    (0, False, "the paper's"), (0, True, "the paper's"), (1, True, "the paper's"),
    (2, True, "others")])
@pytest.mark.parametrize("screen", [ms.screen, screen_windowed])
def test_logits_and_every_gradient_equal_the_paper_in_float64(seed, moved, sizes, screen):
    tokens, parameters, exact = reference_run(seed, moved, sizes)
    x, y = tokens[:, :-1], tokens[:, 1:]
    model = small(seed, moved, **SIZES[sizes])
    model.screen = screen
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


@guards("Eqs. (1), (3) and (18), the log scales")
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
    for tile in model.layers:
        for name, std in stds.items():
            W = getattr(tile, name).detach() / std
            assert abs(W.std() - 1) < 0.05
            assert abs(W.mean()) < 0.05
            assert abs(W.pow(4).mean() / 3 - 1) < 0.2      # 3: the fourth moment of a normal
        s_w = torch.arange(H) * math.log(config.w_th) / (H - 1)
        torch.testing.assert_close(tile.s_w.detach(), s_w)
        assert (tile.s_r == 0).all()
        s_O = torch.full((H,), -0.5 * math.log(H * config.N_L))
        torch.testing.assert_close(tile.s_O.detach(), s_O)
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
    model = small(seed % 3, moved=True)
    use_products_of(model, dtype)
    tokens = draw_tokens(1, T, seed=seed)
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
        return screen_windowed(q, k, v, w, r, i0)

    tokens = draw_tokens(2, 60)
    exact = small(1, moved=True)(tokens)
    model = small(1, moved=True, dtype=dtype, tiles=Watched)
    assert all(type(tile) is Watched for tile in model.layers)
    model.screen = screen
    logits = model(tokens)
    assert logits.dtype == torch.float32
    assert 0 < (logits - exact).norm() / exact.norm() < 0.1

    # A product in 16 bits rounds both its factors: rounding one before changes no bit.
    x = torch.randn(3, 24, generator=random(0))
    assert torch.equal(model.logits(x), model.logits(x.to(dtype).float()))
    for tile in model.layers:
        tile.s_O.data.zero_()                          # W_O is rounded after the factor e^s_O
    logits = model(tokens)
    for name in ("W_Q", "W_K", "W_V", "W_G", "W_O"):
        for tile in model.layers:
            W = getattr(tile, name)
            W.data.copy_(W.to(dtype))
        assert torch.equal(model(tokens), logits), name


@draws(15)
@given(seed=seeds, pieces=st.lists(st.integers(1, 60), min_size=1, max_size=5),
       infinite=st.booleans())
def test_cached_chunks_equal_one_pass(seed, pieces, infinite):
    model = small(seed % 5, moved=True)
    if not infinite:                                   # the only infinite window
        model.layers[0].s_w.data[0] = 3.0
    tokens = draw_tokens(2, sum(pieces), seed=seed)
    caches = [KeyCache() for _ in model.layers]
    with torch.no_grad():
        whole = model(tokens)
        parts = torch.cat([model(piece, caches) for piece in tokens.split(pieces, 1)], 1)
    torch.testing.assert_close(parts, whole, rtol=1e-3, atol=1e-4)


# ------------------------------------------------------------------------------- the fused kernel

@needs_kernel
@draws(3, phases=QUICKLY)
@given(seed=seeds, B=st.integers(1, 2), T=st.integers(1, 40), S=st.integers(1, 40),
       i0=st.one_of(st.just(0), st.integers(-40, 40)), blocks=some_blocks,
       tiles=st.lists(st.tuples(widths, acceptances), min_size=1, max_size=2),
       rho=st.floats(0.3, 0.9),
       dtypes=st.sampled_from([(FP32, FP32), (FP16, FP16), (BF16, BF16), (FP32, FP16),
                               (FP32, BF16), (BF16, FP16)]))
# One pair; a window over several blocks; a chunk after a cache, and a tiny r; a huge window and a
# small one; windows smaller than the shipped blocks; queries that come long after the last key.
@example(seed=0, B=1, T=1, S=1, i0=0, blocks=(16, 16), tiles=[(1.0, 0.5), (INF, 1.0)], rho=0.9,
         dtypes=(FP32, BF16))
@example(seed=1, B=2, T=50, S=50, i0=0, blocks=(16, 32), tiles=[(40.0, 0.3), (INF, 1.0)], rho=0.6,
         dtypes=(FP32, FP32))
@example(seed=2, B=1, T=50, S=75, i0=25, blocks=(32, 16), tiles=[(33.0, 0.02), (48.5, 0.9)],
         rho=0.6, dtypes=(FP32, BF16))
@example(seed=3, B=1, T=75, S=75, i0=0, blocks=(16, 32), tiles=[(1e4, 0.5), (2.5, 0.7)], rho=0.4,
         dtypes=(BF16, BF16))
@example(seed=4, B=1, T=90, S=90, i0=0, blocks=FAMILIES[0], tiles=[(1.5, 0.9), (2.0, 0.7)],
         rho=0.8, dtypes=(FP32, FP16))
@example(seed=5, B=2, T=35, S=21, i0=5, blocks=(16, 32), tiles=[(30.0, 0.9), (INF, 0.7)], rho=0.8,
         dtypes=(FP32, BF16))
def test_kernel_is_as_good_as_torch_in_value_and_every_gradient(seed, B, T, S, i0, blocks, tiles,
                                                                rho, dtypes):
    q, k, v, dh = draw_inputs(seed, B, T, S, dtypes, rho, len(tiles))
    assert_as_good_as_torch(q, k, v, *torch.tensor(tiles).T, i0, dh, blocks)


@needs_kernel
@pytest.mark.parametrize("v_dtype", [FP32, BF16])
@pytest.mark.parametrize("family", FAMILIES)
def test_kernel_is_as_good_as_torch_with_the_blocks_of_each_family_of_gpus(family, v_dtype):
    """A window ends inside a block, another one has blocks that need no mask."""
    q, k, v, dh = draw_inputs(9, 1, 75, 75, (FP32, v_dtype))
    w, r = torch.tensor([20.5, INF]), torch.tensor([0.9, 0.3])
    assert_as_good_as_torch(q, k, v, w, r, 0, dh, family)


@needs_kernel
@draws(2, phases=QUICKLY)
@given(seed=seeds, B=st.integers(1, 2), T=st.integers(1, 16), S=st.integers(1, 60),
       before=st.integers(-20, 20), keys=st.sampled_from([16, 48, 1024]),
       blocks=st.sampled_from([*FAMILIES, (16, 32), (32, 64)]),
       tiles=st.lists(st.tuples(widths, acceptances), min_size=1, max_size=1),
       rho=st.floats(0.3, 0.9),
       dtypes=st.sampled_from([(FP32, FP32), (FP16, FP16), (BF16, BF16), (FP32, FP16),
                               (FP32, BF16), (BF16, FP16)]))
# One query; 16 queries; a program without keys.
@example(seed=0, B=2, T=1, S=110, before=0, keys=48, blocks=FAMILIES[0],
         tiles=[(60.0, 0.3), (INF, 1.0)], rho=0.6, dtypes=(FP32, BF16))
@example(seed=1, B=1, T=16, S=70, before=0, keys=16, blocks=(16, 16),
         tiles=[(5.0, 0.9), (40.5, 0.02)], rho=0.6, dtypes=(FP32, FP32))
@example(seed=2, B=1, T=7, S=20, before=3, keys=16, blocks=(32, 64), tiles=[(INF, 0.5)], rho=0.9,
         dtypes=(FP32, FP16))
def test_kernel_with_shared_keys_is_as_good_as_torch(seed, B, T, S, before, keys, blocks, tiles,
                                                     rho, dtypes):
    """Decoding: a few queries near the last key; several programs divide the keys."""
    q, k, v, dh = draw_inputs(seed, B, T, S, dtypes, rho, len(tiles))
    with mock.patch.object(fused, "KEYS_PER_PROGRAM", keys):
        assert_as_good_as_torch(q, k, v, *torch.tensor(tiles).T, S - T + before, dh, blocks)


@needs_kernel
@pytest.mark.parametrize("s", range(1, 1024, 93))
def test_kernel_drops_a_key_exactly_on_the_threshold(s):
    """However 1/r rounds."""
    def screen(*inputs):
        return fused.screen(*(x.to(DEVICE) for x in inputs))

    assert_a_key_on_the_threshold_contributes_nothing(screen, 1 - s / 1024, 30)


@needs_kernel
@pytest.mark.parametrize("T", [1, 17])
def test_kernel_counts_keys_however_far_a_window_reaches(T):
    def screen(*inputs):
        *tensors, i0 = inputs
        return fused.screen(*(x.to(DEVICE) for x in tensors), i0)

    if DEVICE == "cuda":
        assert_far_keys_count(screen, T)
        return
    # Large blocks, of which there are fewer to interpret.
    with use_blocks((32, 8192)), mock.patch.object(fused, "KEYS_PER_PROGRAM", 8192):
        assert_far_keys_count(screen, T)


@needs_kernel
@pytest.mark.parametrize("i0", [0, 1, 7, 14])
def test_kernel_sees_exactly_the_window_wherever_blocks_begin(i0):
    """The window's edge at several offsets from blocks of 16: a pair too many would show.

    At 0, 1 and 14 the bounds of w = 31.1 or 30.1 lie on the edge of a block, or one beside it.
    """
    q, k, v, dh = draw_inputs(12, 1, 47, 50, (FP32, FP32))
    w, r = torch.tensor([31.1, 30.1]), torch.tensor([0.5, 1.0])
    assert_as_good_as_torch(q, k, v, w, r, i0, dh, (16, 16))


@needs_kernel
@draws(2, phases=QUICKLY)
@given(seed=seeds, T=st.integers(2, 40), j=st.integers(0, 39), w=widths, blocks=some_blocks,
       dtypes=st.sampled_from([(FP32, FP32), (FP32, BF16)]))
@example(seed=0, T=40, j=20, w=16.0, blocks=(16, 16), dtypes=(FP32, FP32))
def test_kernel_causality_and_window_edge_are_bitwise(seed, T, j, w, blocks, dtypes):
    """Key j reaches only queries j to j + w - 1; a query's gradient reaches only keys it sees.

    All other bits stay the same.
    """
    q, k, v, dh = draw_inputs(seed, 1, T, T, dtypes, 0.8, H=1)
    w, r = torch.tensor([w]), torch.tensor([0.9])
    j = j % T
    reach = math.ceil(min(w[0].item(), T))
    unseen = [n for n in range(T) if not j <= n < j + reach]
    unseeing = [n for n in range(T) if not j - reach < n <= j]

    # Another key at j, and another value.
    k2, v2 = k.clone(), v.clone()
    k2[:, :, j], v2[:, :, j] = q[:, :, T - 1], -v[:, :, j]
    h, dq, dk, dv, _, _ = through_kernel(q, k, v, w, r, 0, dh, blocks)
    h2, dq2, _, _, _, _ = through_kernel(q, k2, v2, w, r, 0, dh, blocks)
    assert torch.equal(h[:, :, unseen], h2[:, :, unseen])
    assert torch.equal(dq[:, :, unseen], dq2[:, :, unseen])
    assert not torch.equal(h[:, :, j], h2[:, :, j])

    # A value at j alone: no other could hide a tiny relevance.
    v2[:, :, [n for n in range(T) if n != j]] = 0
    h2, dq2, _, _, _, _ = through_kernel(q, k, v2, w, r, 0, dh, blocks)
    assert not h2[:, :, unseen].any()
    assert not dq2[:, :, unseen].any()

    # Another query at j, and another gradient.
    q2, dh2 = q.clone(), dh.clone()
    q2[:, :, j], dh2[:, :, j] = k[:, :, 0], -dh[:, :, j]
    _, _, dk2, dv2, _, _ = through_kernel(q2, k, v, w, r, 0, dh2, blocks)
    assert torch.equal(dk[:, :, unseeing], dk2[:, :, unseeing])
    assert torch.equal(dv[:, :, unseeing], dv2[:, :, unseeing])


@needs_kernel
@pytest.mark.parametrize("w, end", [((5.0, 16.5), 48), ((33.0, 32.5), 64)])
def test_kernel_never_visits_what_lies_outside_the_windows(w, end):
    """One visit to a block outside the window would turn a program's sums into NaN.

    If w is 33 or 32.5, the middle one of three blocks needs no masks.
    """
    q, k, v, dh = draw_inputs(5, 1, 80, 80, (FP32, FP32))
    w, r = torch.tensor(w), torch.tensor([0.5, 0.9])

    # The last 16 queries before `end` see keys 16 to end - 1.
    k2, v2 = k.clone(), v.clone()
    for x in (k2, v2):
        x[:, :, :16] = math.nan
        x[:, :, end:] = math.nan
    h, dq, _, _, _, _ = through_kernel(q, k2, v2, w, r, 0, dh, (16, 16))
    for x in (h, dq):
        assert x[:, :, end - 16:end].isfinite().all()
        assert x[:, :, :16].isnan().any()

    # Queries 16 to end - 1 see keys 16 to 31.
    q2, dh2 = q.clone(), dh.clone()
    for x in (q2, dh2):
        x[:, :, :16] = math.nan
        x[:, :, end:] = math.nan
    _, _, dk, dv, _, _ = through_kernel(q2, k, v, w, r, 0, dh2, (16, 16))
    for x in (dk, dv):
        assert x[:, :, 16:32].isfinite().all()
        assert x[:, :, end:].isnan().any()


@needs_kernel
def test_kernel_keeps_the_gradient_of_the_window_through_mipe():
    """d(s_w) through the rotations and the softmask, with 16-bit values: off by at most 2.5e-3.

    At T = 2048 MiPE's part is a small difference of large sums. If the backward pass used one part
    of q and k the error would be 1, and 1e-2 with two parts in bfloat16. With an Ampere's products
    it may be 1e-2: only a Hopper rounds s alike in both backward kernels.
    """
    hopper = DEVICE == "cpu" or torch.cuda.get_device_capability()[0] == 9
    T, w = 2048, 3.0
    q, k, v = correlated(11, 1, 1, T, T, rho=0.6)
    v = v.to(BF16)
    dh = torch.randn(1, 1, T, 64, generator=random(12), dtype=torch.float64).to(BF16)

    def gradient(screen, dtype, v):
        s_w, r = torch.tensor([math.log(w - 1)], requires_grad=True), torch.tensor([0.5])
        width = ms.window(s_w.to(dtype))
        angle = ms.mipe_angle(torch.arange(T), width, 256.0)
        q_tilde, k_tilde = (ms.mipe(x.float().to(dtype), angle) for x in (q, k))
        h = screen(*(x.to(DEVICE) for x in (q_tilde, k_tilde, v, width, r.to(dtype))))
        h.backward(dh.to(h.dtype).to(DEVICE))
        return s_w.grad.item()

    exact = gradient(screen_windowed, torch.float64, v.double())
    with use_blocks(FAMILIES[0] if DEVICE == "cuda" else (256, 256)):      # fewer to interpret
        error = abs(gradient(fused.screen, FP32, v) / exact - 1)
    assert error < (2.5e-3 if hopper else 2e-2)


@needs_kernel
def test_the_model_through_the_kernel_is_the_paper_and_has_its_gradient():
    model = small(1, moved=True, N_L=2)
    tokens = draw_tokens(1, 41)
    parameters = {name: p.detach().double() for name, p in model.named_parameters()}
    exact = reference.reference_logits(parameters, model.config, tokens[0])
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
