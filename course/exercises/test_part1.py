"""Part 1, up to MiPE: hand-worked points first, then properties, then multiscreen.py."""
import math

import torch

import multiscreen as ms
from course.exercises.adapters import mine
from course.exercises.checks import (
    check,
    expect,
    expect_gradients,
    gradient,
    near,
    random,
)

INF = math.inf


def test_window():
    s_w = torch.tensor([0.0, math.log(3), -INF, 4.0, INF])
    found, right = mine.window(s_w), torch.tensor([2, 4, 1, 1 + math.exp(4), INF])
    no_inf = torch.where(s_w < INF, right, found) if found.shape == s_w.shape else found
    expect(found, right, "window([0, log 3, -inf, 4, inf])",
           [(s_w.exp(), "w lacks the + 1: the smallest window is 1"),
            (2**s_w + 1, "e^s_w, not 2^s_w"),
            (torch.where(s_w == INF, INF, (-s_w).exp() + 1), "e^s_w, not e^-s_w"),
            (s_w.exp() - 1, "the 1 is added, not subtracted"),
            (no_inf, "s_w = inf must give w = inf: a clamp makes it finite"),
            (s_w + 1, "e^s_w: the exponential is missing"),
            (s_w.exp().clamp(min=1), "the 1 is added, not a lower limit"),
            (s_w.clamp(min=0).exp() + 1, "s_w may be negative: then w is between 1 and 2"),
            (torch.where(s_w.isinf(), INF, s_w.exp() + 1), "only +inf gives w = inf: isinf is true "
             "of -inf, too"),
            ((s_w + 1).exp(), "the 1 is added to the exponential, not to s_w"),
            ((s_w.exp() + 1).round(), "w is a real number: round nothing"),
            ((s_w.exp() + 1).clamp(max=256), "nothing limits w: it may be inf"),
            (torch.nn.functional.softplus(s_w) + 1, "e^s_w, not log(1 + e^s_w)")])
    far = torch.tensor([12.0, 40.0])
    expect(mine.window(far) / far.exp(), [1, 1], "window([12, 40]), divided by exp([12, 40]),",
           [((far.clamp(max=n) - far).exp(), f"s_w is clamped at {n}: clamp at 80 or above")
            for n in (10, 20)])
    slope, = gradient(mine.window, s_w)
    check(not slope.isnan().any() and slope[4] == 0,
          f"the gradient at s_w = inf is {slope[4]}: it must be 0. An infinite window is a "
          "setting, and must not spoil a backward pass")
    expect(slope[:4], [1, 3, 0, math.exp(4)], "the gradient of window([0, log 3, -inf, 4])")
    expect(mine.window(s_w.double()), s_w.double().exp() + 1, "window of float64 numbers")


def test_acceptance():
    s_r = torch.tensor([0.0, math.log(3), -math.log(3), INF])
    expect(mine.acceptance(s_r), [0.5, 0.75, 0.25, 1], "acceptance([0, log 3, -log 3, inf])",
           [(s_r.exp() + 1, "r = exp(s) + 1 is from an older version of the paper, which "
             "multiplies by r: here r is the sigmoid of s_r"),
            (torch.sigmoid(-s_r).clamp_min(1e-3),
             "the sign of s_r is wrong: a larger s_r accepts more"),
            (torch.sigmoid(s_r) + 1e-3, "1e-3 is a lower limit: clip r there, add nothing"),
            (torch.full((4,), 1e-3), "1e-3 is a lower limit: clamp(min=1e-3), not max"),
            (torch.tanh(s_r).clamp_min(1e-3), "r is the sigmoid of s_r, not its tanh"),
            (torch.sigmoid(2 * s_r), "sigmoid(s) is (tanh(s/2) + 1)/2"),
            (1 + (-s_r).exp(), "brackets: 1/(1 + e^-s_r)"),
            (torch.sigmoid(s_r.clamp(min=1e-3)), "1e-3 is the lower limit of r, not of s_r"),
            (torch.nn.functional.hardsigmoid(s_r), "this is a hard sigmoid, of straight lines")])
    expect(mine.acceptance(torch.tensor([-6.0, -9.0])) * 1e3, [2.47262, 1],
           "10^3 acceptance([-6, -9])",
           [([2.47262, 0.123395], "r is not clipped, or clipped too low: the limit is 1e-3"),
            ([10.0, 10.0], "clipped at 1e-2: the limit is 1e-3")], tolerance=1e-4)
    expect_gradients(mine.acceptance, ms.acceptance, [torch.tensor([-2.0, 0.3, 1.5])], "s_r")
    smallest = mine.acceptance(torch.tensor([-100.0]))
    check(smallest >= 0.99e-3, f"acceptance(-100) is {smallest.item():.3g}: clip r at 1e-3 from "
          "below, or Trim divides by 0")


def test_unit():
    x = torch.tensor([[3.0, 4.0], [0.0, -2.0]])
    expect(mine.unit(x), [[0.6, 0.8], [0, -1]], "unit([[3, 4], [0, -2]])",
           [(x / x.norm(), "all vectors were divided by one length: each has its own, over the "
             "last dimension"),
            (x / x.norm(dim=0), "the length was taken over the wrong dimension: take the last"),
            (x / x.norm(dim=-1), "keepdim=True is missing: a row's length acts on a column"),
            (x / x.norm(dim=-1, keepdim=True) ** 2, "divided by the squared length: take its root"),
            (x / x.square().mean(-1, keepdim=True).sqrt(), "the length is the root of the sum of "
             "squares, not of their mean"),
            (x / x.abs().sum(-1, keepdim=True), "the length is the root of the sum of squares, "
             "not the sum of absolute values"),
            (x / x.abs().amax(-1, keepdim=True), "the length is the root of the sum of squares, "
             "not the largest absolute value"),
            (x / 1e-6, "eps is the smallest length, not the largest: clamp(min=eps), not max"),
            (ms.unit(x - x.mean(-1, keepdim=True)), "the mean was subtracted first: "
             "divide by the length only")])
    small = torch.tensor([[0.0, 1e-4]])
    expect(mine.unit(small), [[0, 1]], "unit([0, 1e-4])",
           [([[0, 1e-4 / (1e-4 + 1e-6)]], "eps was added to the length: clip it from below "
             "instead, so that a short vector has length 1 too"),
            ([[0, 1e-4 / (1e-8 + 1e-6) ** 0.5]], "eps was added in the root: clip the square from "
             "below, at eps^2"),
            ([[0, 0.1]], "the square was clipped at eps: clip it at eps^2")], tolerance=1e-4)
    zero = torch.zeros(1, 4)
    check((mine.unit(zero) == 0).all(), "unit(0) is not 0: clip the length from below at eps")
    short = torch.tensor([[0.0, 1e-8], [0.0, 2e-6]])
    expect(mine.unit(short), [[0, 0.01], [0, 1]], "unit([[0, 1e-8], [0, 2e-6]])",
           [([[0, 1], [0, 1]], "the length is clipped at less than eps = 1e-6: pass eps on"),
            (short / (short.square().sum(-1, True) + 1e-12).sqrt(), "eps^2 was added to the "
             "square: clip it from below instead"),
            ([[0, 0], [0, 1]], "a vector shorter than eps is divided by eps, not set to 0")])
    slope, = gradient(mine.unit, zero)
    check(slope.isfinite().all(), "the gradient of unit at 0 is not finite: the slope of a root at "
          "0 is infinite. Clip the square, before the root")
    x = torch.randn(2, 3, 5, 16, generator=random(0), dtype=torch.float64)
    expect(mine.unit(x), ms.unit(x), "unit of random vectors (2, 3, 5, 16)",
           [(x / x.norm(dim=n, keepdim=True), f"the length is taken along axis {n}: take it along "
             "the last") for n in range(3)], tolerance=1e-9)
    expect_gradients(mine.unit, ms.unit, [x], "x", [
        (lambda y: y / x.norm(dim=-1, keepdim=True), "the length is detached: it changes with x, "
         "too")])


def test_mipe_angle():
    i, w = torch.tensor([0, 1, 3]), torch.tensor([2.0, 128.0], dtype=torch.float64)
    gamma = (torch.cos(math.pi * w / 256) + 1) / 2

    def with_gamma(gamma):
        return math.pi * i * (gamma / w)[:, None]

    right = with_gamma(gamma)
    causes = [(right / math.pi, "the angle lacks pi"),
              (2 * right, "the angle is doubled: does gamma lack its 1/2?"),
              (right * w[:, None], "the angle is not divided by w"),
              (with_gamma(1), "gamma is missing: the angle must fade out towards w_th"),
              (with_gamma(1), "gamma depends on w / w_th, not on w_th / w"),
              (with_gamma(0), "nothing turns for w < w_th: clamp w with w.clamp(max=w_th)"),
              (with_gamma((torch.sin(math.pi * w / 256) + 1) / 2), "gamma has a cosine, not a "
               "sine"),
              (with_gamma(torch.cos(math.pi * w / 256 + 1) / 2), "brackets: the 1 of gamma is "
               "outside the cosine"),
              (with_gamma(torch.cos(math.pi * w / 512)), "gamma is (cos(pi w / w_th) + 1)/2: the "
               "cosine of half the angle must be squared"),
              (math.pi * (i // w[:, None]) * gamma[:, None], "i / w is a fraction: / and not //"),
              (i * gamma[:, None], "the angle lacks pi / w"),
              (right * w[:, None] / 256, "the angle is divided by w_th: it is divided by w"),
              (right + math.pi / 2 * i / w[:, None], "brackets: gamma is 0.5 * (cos(..) + 1)"),
              (right * gamma[:, None], "gamma is squared: multiply by it once"),
              (with_gamma((torch.cos(w / 256) + 1) / 2), "pi is missing in gamma"),
              (torch.remainder(right, math.pi), "a whole turn is 2 pi: remove only whole turns"),
              (-right, "the sign: the angle grows with the position"),
              (math.pi * (i + 1) * (gamma / w)[:, None], "positions are given, and count from 0: "
               "add nothing to i"),
              (with_gamma(1 - gamma), "gamma falls from 1 at w = 0 to 0 at w_th: this one rises"),
              (with_gamma((torch.cos(math.pi * w / 512) + 1) / 2),
               "gamma is (cos(pi w / w_th) + 1)/2: this one is not 0 at w_th"),
              (with_gamma(1 - w / 256), "gamma is a cosine, not a line"),
              (i * 10_000 ** (-w / 256)[:, None], "this is RoPE's angle: MiPE's is "
               "pi i gamma(w)/w")]
    found = mine.mipe_angle(i, w, 256.0)
    what = "of the angle at positions 0, 1, 3 for w = 2, 128"
    check(found.shape == (2, 3),
          f"the angle has the shape {tuple(found.shape)}: it is (H, T), a row for each window")
    for turn in (torch.cos, torch.sin):
        expect(turn(found), turn(right), f"the {turn.__name__} {what}",
               [(turn(wrong), cause) for wrong, cause in causes])

    w = torch.tensor([2.5, 40.0, 63.0], dtype=torch.float64)
    right = ms.mipe_angle(i, w, 64.0)
    found = mine.mipe_angle(i, w, 64.0)
    for turn in (torch.cos, torch.sin):
        expect(turn(found), turn(right), f"the {turn.__name__} of the angle for w_th = 64",
               [(turn(ms.mipe_angle(i, w, 256.0)), "w_th is an argument, and not always 256")])
    expect_gradients(lambda w: mine.mipe_angle(i, w, 64.0), lambda w: ms.mipe_angle(i, w, 64.0),
                     [w], "w")
    found = mine.mipe_angle(i, w.float(), 64.0)
    check(found.dtype == torch.float32,
          f"for w in float32 the angle is {found.dtype}: return it in w's dtype")

    wide = torch.tensor([64.0, 70.0, 128.0, 1e6, INF])
    found = mine.mipe_angle(i, wide, 64.0)
    check((torch.sin(found / 2).abs() < 1e-6).all(),
          "MiPE still turns at w >= w_th: the angle must be 0 there, for w = inf too")
    slope, = gradient(lambda w: mine.mipe_angle(i, w, 64.0), wide)
    where = ", ".join(f"{x:g}" for x in wide[slope.isnan()])
    check(not where, f"the gradient of w is NaN at w = {where} (w_th = 64): torch.where does not "
          "stop a NaN in backward (0 times NaN). Clamp w before the formula")
    check((slope.abs() < 1e-6).all(), "the gradient of w is not 0 at w >= w_th")

    i, w = torch.tensor([2**17 + 1]), torch.tensor([2.0039062])
    exact = ms.mipe_angle(i, w.double(), 256.0)
    off = torch.sin((mine.mipe_angle(i, w, 256.0).double() - exact) / 2).abs().item() * 2
    check(off < 1e-3, f"at position 2^17 the angle is off by {off:.2g} rad: convert i and w to "
          "float64 before anything else, and remove whole turns before you convert the angle "
          "back to w's dtype")


def test_mipe():
    x = torch.tensor([1.0, 0, 0, 5, 0, 7, 0, 0]).view(1, 1, 1, 8)
    quarter = torch.full((1, 1), math.pi / 2)

    def rotated(a, b, sign=1):
        y = x.clone().flatten()
        y[a], y[b] = (x.flatten()[a] * 0 - sign * x.flatten()[b],
                      sign * x.flatten()[a] + x.flatten()[b] * 0)
        return y.view(1, 1, 1, 8)

    others = torch.tensor([0.0, 1, -5, 0, -7, 0, 0, 0]).view(1, 1, 1, 8)
    expect(mine.mipe(x, quarter), [[[[0, 1, 0, 5, 0, 7, 0, 0]]]],
           "(1, 0, 0, 5, 0, 7, 0, 0), after a quarter turn,",
           [(rotated(0, 1, -1), "turned the wrong way: a quarter turn maps (1, 0) to (0, 1). The "
             "trained weights expect this direction"),
            (others * torch.tensor([1.0, 1, 1, -1, 1, -1, 1, 1]),
             "all pairs of dimensions turn, as in RoPE: MiPE turns only the first two"),
            (others, "all pairs of dimensions turn, as in RoPE: MiPE turns only the first two"),
            (rotated(0, 4), "the wrong pair turns: MiPE takes dimensions 0 and 1, not 0 and K/2"),
            (torch.tensor([0.0, -7, 0, 0, 1, 0, 0, 5]).view(1, 1, 1, 8),
             "all pairs of dimensions turn, as in RoPE: MiPE turns only the first two"),
            (rotated(6, 7), "the wrong pair turns: MiPE takes the first two dimensions"),
            (x, "the two turned numbers are swapped"),
            (x, "sine and cosine were swapped: a turn by 0 changes nothing"),
            (rotated(0, 1).roll(-2, -1), "the two turned dimensions come first, then the others"),
            (ms.mipe(x, quarter * math.pi / 180), "the angle is in radians"),
            (ms.mipe(x, quarter / 2), "turned half as far: the angle is given, use it as it is"),
            ([[[[0, 0, 0, 5, 0, 7, 0, 0]]]], "x_0 was overwritten before x_1 used it: keep both"),
            ([[[[0, 0, 0, 5, 0, 7, 0, 0]]]], "the second number is x_0 sin + x_1 cos"),
            ([[[[1, 1, 0, 5, 0, 7, 0, 0]]]], "sine and cosine were added: multiply")])
    x = torch.randn(2, 3, 4, 16, generator=random(1), dtype=torch.float64)
    angle = torch.randn(3, 4, generator=random(2), dtype=torch.float64)
    y = mine.mipe(x, angle)
    check(y.shape == x.shape, f"for x {tuple(x.shape)} mipe returns {tuple(y.shape)}: "
          "torch.cos(angle) is (H, T), so it needs an axis at its end, [..., None]")
    check(near(y.norm(dim=-1), x.norm(dim=-1), 1e-9), "a rotation keeps the length; this does not: "
          "one of the two sines has a minus")
    check(torch.equal(y[..., 2:], x[..., 2:]), "only the first two dimensions may change")
    expect(y, ms.mipe(x, angle), "mipe of random vectors (2, 3, 4, 16)",
           [(ms.mipe(x, angle[:1].expand_as(angle)), "each tile has angles of its own"),
            (ms.mipe(x, angle[:, :1].expand_as(angle)), "each position has angles of its own")],
           tolerance=1e-9)
    expect_gradients(mine.mipe, ms.mipe, [x, angle], "x angle")
