"""Part 2, a layer: hand-worked points first, then properties, then multiscreen.py."""
import math

import torch
import torch.nn.functional as F

import multiscreen as ms
from course.exercises.adapters import mine
from course.exercises.checks import check, enliven, expect, random
from course.exercises.trained import load_into

SIZES = {"vocab_size": 40, "N_L": 2, "N_H": 3, "d_E": 24, "w_th": 100.0}


def a_layer():
    """(your layer, the repository's) with the same parameters."""
    config = ms.Config(**SIZES)
    theirs = enliven(ms.GatedScreeningTiles(config))
    yours = mine.GatedScreeningTiles(config)
    load_into(yours, theirs)
    return yours, theirs


def draw_inputs(*shape):
    """Similar positions, with a part in common; otherwise every key would be rejected."""
    g = random(0)
    return torch.randn(shape[-1], generator=g) + 0.5 * torch.randn(*shape, generator=g)


def some_tokens(*shape, seed=0):
    return torch.randint(SIZES["vocab_size"], shape, generator=random(seed))


def test_project():
    yours, _ = a_layer()
    x, W = torch.tensor([[[1.0, 2.0], [0.0, 3.0], [1.0, 0.0]]]), torch.tensor([[[1.0], [10.0]],
                                                                              [[0.1], [5.0]]])
    found = yours.project(x, W)
    check(found.shape != (1, 3, 2, 1), "the axes are (B, T, H, D): the tiles come before the "
          "positions, (B, H, T, D)")
    expect(found, [[[[1.2], [0.3], [1]], [[20], [15], [10]]]], "x W of two tiles and 3 positions",
           [([[[[1.2], [20], [0.3]], [[15], [1], [10]]]], "tiles and positions are mixed up: the "
             "product is (B, T, H, D). Transpose it: a reshape only renames the axes")])
    x, W = draw_inputs(2, 5, 24), draw_inputs(24, 3, 7)
    expect(yours.project(x, W), torch.einsum("bte,ehd->bhtd", x, W), "x W",
           [((x @ W.flatten(1)).unflatten(-1, (7, 3)).permute(0, 3, 1, 2), "tiles and dimensions "
             "are mixed up: unflatten(-1, (H, D)), in the order of W's axes")])


def test_gate():
    yours, theirs = a_layer()
    x = draw_inputs(2, 5, 24)
    g = theirs.project(x, theirs.W_G)
    expect(yours.gate(x), torch.tanh(g * torch.sigmoid(g)), "the gate",
           [(F.silu(g), "the gate is not bounded: tanh is missing"),
            (torch.tanh(g), "SiLU is missing: tanh(SiLU(g))"),
            (F.silu(torch.tanh(g)), "tanh and SiLU are in the wrong order: tanh(SiLU(g))"),
            (torch.sigmoid(g), "this is a sigmoid: the gate is tanh(SiLU(g))"),
            (torch.tanh(torch.sigmoid(g)), "SiLU(g) is g times sigmoid(g), not sigmoid(g)"),
            (theirs.gate(F.normalize(x, dim=-1)), "x must not be normalised before the projection"),
            (torch.tanh(F.gelu(g)), "this is GELU: the paper has SiLU"),
            (torch.tanh(F.relu(g)), "this is ReLU: the paper has SiLU"),
            (torch.tanh(F.silu(theirs.project(x, theirs.W_V))), "W_V is for the values: take W_G"),
            (torch.tanh(F.silu(ms.unit(g))), "g must not be of unit length: Eq. 5 is for q, k and "
             "v"),
            (1 + torch.tanh(F.silu(g)), "add nothing: the gate may be negative, and 0"),
            (F.silu(torch.tanh(F.silu(g))), "SiLU twice: tanh(SiLU(g))"),
            (torch.tanh(F.silu(torch.tanh(g))), "tanh twice: tanh(SiLU(g))")])


def parts_of(layer, x, start=0):
    """What screening computes from x, from position `start` on: q_bar, k_bar, v, angle, w, r."""
    q, k, v = (layer.project(x, W) for W in (layer.W_Q, layer.W_K, layer.W_V))
    w, r = ms.window(layer.s_w), ms.acceptance(layer.s_r)
    angle = ms.mipe_angle(start + torch.arange(x.shape[1]), w, layer.config.w_th)
    return ms.unit(q), ms.unit(k), v, angle, w, r


def test_screening():
    yours, theirs = a_layer()
    x = draw_inputs(2, 9, 24)
    q, k, v, angle, w, r = parts_of(theirs, x)
    q_tilde, k_tilde, v_bar = ms.mipe(q, angle), ms.mipe(k, angle), ms.unit(v)
    h = ms.screen(q_tilde, k_tilde, v_bar, w, r)
    q_long, k_long = theirs.project(x, theirs.W_Q), theirs.project(x, theirs.W_K)
    of_256, of_s_w = (ms.mipe_angle(torch.arange(9), *x) for x in ((w, 256.0),
                                                                   (theirs.s_w, 100.0)))
    found = yours.screening(x, ms.screen)
    expect(found, ms.tanh_norm(h), "u",
           [(h, "the output is not bounded: Eq. 14, TanhNorm, is missing"),
            (ms.tanh_norm(ms.screen(q_tilde, k_tilde, v, w, r)),
             "the values are not of unit length: Eq. 5 is for q, k and v"),
            (ms.tanh_norm(ms.screen(ms.mipe(q_long, angle), k_tilde, v_bar, w, r)),
             "the queries are not of unit length: Eq. 5 is for q, k and v"),
            (ms.tanh_norm(ms.screen(q_tilde, ms.mipe(k_long, angle), v_bar, w, r)),
             "the keys are not of unit length: Eq. 5 is for q, k and v"),
            *((ms.tanh_norm(ms.screen(ms.mipe(q_long, angle), ms.mipe(k_long, angle), *x)),
               "nothing is of unit length, or only the values are: Eq. 5 is for q, k and v")
              for x in ((v, w, r), (v_bar, w, r))),
            (ms.tanh_norm(ms.screen(ms.mipe(q, of_256), ms.mipe(k, of_256), v_bar, w, r)),
             "w_th is self.w_th, here 100, not 256"),
            (torch.tanh(h), "tanh of each number changes the direction: TanhNorm scales the "
             "whole vector"),
            (ms.unit(h), "u has length 1 whatever h is: TanhNorm's length is tanh |h|"),
            (ms.tanh_norm(ms.screen(q_tilde, k_tilde, v_bar, w, theirs.s_r)),
             "s_r is not yet r: apply `acceptance`"),
            (ms.tanh_norm(ms.screen(q_tilde, k_tilde, v_bar, r, w)), "w and r were swapped"),
            (ms.tanh_norm(ms.screen(q, k, v_bar, w, r)),
             "queries and keys have no positions: MiPE is missing"),
            (ms.tanh_norm(ms.screen(q_tilde, k, v_bar, w, r)),
             "only the queries have positions: MiPE is for keys too"),
            (ms.tanh_norm(ms.screen(q_tilde, k_tilde, ms.mipe(v_bar, angle), w, r)),
             "MiPE turned the values: it is for queries and keys only"),
            (ms.tanh_norm(ms.screen(k_tilde, q_tilde, v_bar, w, r)),
             "queries and keys were swapped"),
            (ms.tanh_norm(ms.screen(q_tilde, q_tilde, v_bar, w, r)),
             "queries and keys both come from W_Q: keys take W_K"),
            (ms.tanh_norm(ms.screen(k_tilde, k_tilde, v_bar, w, r)),
             "queries and keys both come from W_K: queries take W_Q"),
            (ms.tanh_norm(ms.screen(q_tilde, k_tilde, ms.unit(theirs.project(x, theirs.W_G)), w,
                                    r)), "W_G is for the gate: values take W_V"),
            (ms.tanh_norm(ms.screen(ms.mipe(q, of_s_w), ms.mipe(k, of_s_w), v_bar, theirs.s_w, r)),
             "s_w is not yet w: apply `window`"),
            (ms.screen(q_tilde, k_tilde, ms.tanh_norm(v_bar), w, r),
             "TanhNorm is for the sum h, not for the values"),
            (ms.tanh_norm(ms.screen(ms.mipe(q, -angle), ms.mipe(k, angle), v_bar, w, r)),
             "queries and keys turn in opposite directions: both take the same angle")],
           tolerance=1e-4)

    def twice(*inputs):
        return 2 * ms.screen(*inputs)

    expect(yours.screening(x, twice), ms.tanh_norm(2 * h), "u with another `screen`, 2 h,",
           [(found, "the argument `screen` is ignored: the caller chooses what screens")],
           tolerance=1e-4)


def test_forward():
    yours, theirs = a_layer()
    x = draw_inputs(2, 9, 24)
    y = theirs.screening(x, ms.screen) * theirs.gate(x)
    updates = torch.einsum("bhtv,hve->bthe", y, theirs.W_O)
    scale = theirs.s_O.exp()[:, None]
    right = x + (updates * scale).sum(2)

    def update(y):
        return x + torch.einsum("bhtv,hve->bte", y, scale[..., None] * theirs.W_O)

    one_by_one = x
    for h, W in enumerate(scale[..., None] * theirs.W_O):
        y = theirs.screening(one_by_one, ms.screen) * theirs.gate(one_by_one)
        one_by_one = one_by_one + y[:, h] @ W
    expect(yours(x, ms.screen), right, "x^(1)",
           [(right - x, "the residual is missing: Eq. 2 adds the updates to x"),
            (x + updates.sum(2), "the scale e^s_O is missing"),
            (x + (updates * theirs.s_O[:, None]).sum(2), "the scale is e^s_O, not s_O"),
            (x + (updates * scale).mean(2), "the tiles are averaged: Eq. 2 adds them"),
            (x + torch.einsum("bhtv,hve->bte", theirs.screening(x, ms.screen), scale[..., None]
                              * theirs.W_O), "the gate is ignored: u times g_hat"),
            (update(theirs.screening(x, ms.screen) * theirs.gate(x) ** 2), "the gate acts twice"),
            (update(theirs.screening(x, ms.screen) + theirs.gate(x)), "u is multiplied by the "
             "gate, not added to it"),
            (ms.unit(right), "do not normalise after the sum: Eq. 2 only adds"),
            (theirs(ms.unit(x), ms.screen), "do not normalise x: there is no norm before a layer"),
            (theirs(ms.unit(x), ms.screen) - ms.unit(x) + x, "do not normalise x: there is no "
             "norm before a layer"),
            (x + (updates / scale).sum(2), "the scale is e^s_O, but this divides by it"),
            (one_by_one, "all tiles read the same x: add up their updates, then add the sum to x")],
           tolerance=1e-4)


def check_independent(named):
    """Each matrix is drawn around 0, independently of the others."""
    matrices = [(name, W.detach().flatten()) for name, W in named if W.ndim > 1]
    for n, (name, W) in enumerate(matrices):
        check(W.mean().abs() < 0.1 * W.std(), f"the mean of {name} is {W.mean().item():.3g}: it is "
              "N(0, ..), around 0")
        check(W.abs().max() > 2.5 * W.std(), f"{name} is drawn from an interval: N is the normal "
              "distribution, torch.randn")
        for other, V in matrices[:n]:
            if len(V) == len(W):
                same = torch.corrcoef(torch.stack((V, W)))[0, 1].abs()
                check(same < 0.5, f"{other} and {name} are alike: draw each matrix anew")


def test_initialize():
    sizes = {"vocab_size": 1000, "N_L": 3, "N_H": 5, "d_E": 100, "w_th": 100.0}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = mine.Multiscreen(ms.Config(**sizes))
    named = list(model.named_parameters())

    def std(name):
        return torch.cat([p.detach().flatten() for n, p in named if n.endswith(name)]).std()

    dimension = ("divided by the root of the wrong dimension: take the output's, the second of the "
                 "paper's shape")
    rows = {"W_Q": 0.1 / 4, "W_K": 0.1 / 4, "W_V": 0.1 / 8, "W_G": 0.1, "W_O": 0.01, "W_E": 0.01}
    for name, right in rows.items():
        causes = [(math.sqrt(right), "x of N(0, x) in the table is the standard deviation, not "
                   "the variance"),
                  (10 * right, "the scale 0.1 is missing")]
        causes += [(0.1 / n**0.5, dimension) for n in (16, 64, 100, 1000)]
        causes += [(0.1 / n, "divided by the dimension: divide by its root")
                   for n in (16, 64, 100, 1000)]
        if name == "W_G":
            causes = [(0.1 / 8, "W_G has the fixed scale 0.1, whatever its dimensions"), *causes]
        check(std(name) > 0, f"{name} has no initial values: it is one number everywhere")
        check(1e-4 < std(name) < 10, f"{name} has no initial values: torch.empty "
              "leaves what was in memory")
        expect(std(name), right, f"the standard deviation of {name}", causes,
               tolerance=0.05 * right)
    check_independent(named)
    for layer in model.layers:
        s_w = torch.linspace(0, math.log(100), 5)
        expect(layer.s_w, s_w, "s_w of a layer",
               [(torch.zeros(5), "s_w is spread over the tiles of a layer, not 0 for all"),
                (torch.linspace(0, 100, 5), "s_w goes up to log w_th, not w_th"),
                (torch.linspace(0, math.log(256), 5), "w_th is config.w_th, here 100, not 256"),
                (torch.linspace(0, math.log(99), 5), "s_w goes up to log w_th: then w is 1 more"),
                (0.8 * s_w, "the last tile has s_w = log w_th: N_H values make N_H - 1 steps"),
                (s_w.flip(0), "the first tile has the narrowest window"),
                (torch.linspace(1, 100, 5).log(), "s_w itself is evenly spaced, not the window")])
        expect(layer.s_r, torch.zeros(5), "s_r", [(0.5 * torch.ones(5), "r is 1/2, so s_r is 0")])
        expect(layer.s_O, -math.log(15) / 2 * torch.ones(5), "s_O",
               [(-math.log(15) * torch.ones(5), "the root is missing: log(1 / sqrt(N_H N_L))"),
                (-math.log(5) / 2 * torch.ones(5), "N_L is missing: all tiles of all layers count"),
                (15**-0.5 * torch.ones(5), "the log is missing: log(1 / sqrt(N_H N_L))")])
    expect(model.s_E, [0], "s_E", [([1], "the scale e^s_E starts at 1, so s_E starts at 0")])
    expect(model.s_F, [math.log(10)], "s_F",
           [([10], "the log is missing: log sqrt(d_E)"), ([math.log(100)], "the root is missing"),
            ([0], "s_F starts at log sqrt(d_E): with 0 the logits are too small to learn from")])
