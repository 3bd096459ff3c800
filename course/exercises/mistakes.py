"""Mistakes that several parts share: pairs (a wrong function, what to say to those who have it)."""
import inspect
import math
import textwrap

import torch

INF = math.inf


def cosine(d, w):
    """Softmask without its mask."""
    return 0.5 * (torch.cos(math.pi * (d / w)) + 1)


def inside(d, w):
    return (-w < d) & (d <= 0)


def masked(where, f):
    """A wrong Softmask, which is f(d, w) where where(d, w) is true, and 0 elsewhere."""
    return lambda d, w: torch.where(where(d, w), f(d, w), 0.0)


def past(d, w):
    return d <= 0


# Trim before its square. The last one has the gradients of one that is right but for 1/r.
ROOTS = [
    (lambda s, r: (1 - (1 - s) * r).relu(), "1 - s must be divided by r, not multiplied by it"),
    (lambda s, r: 1 - (1 - s) / r, "the max with 0 is missing: below the threshold the relevance "
     "rises again when it is squared"),
    (lambda s, r: ((1 - (1 - s)) / r).relu(), "only 1 - s is divided by r: 1 - (1 - s)/r"),
    (lambda s, r: ((1 - s) / r).relu(), "1 minus this is missing: 1 - (1 - s)/r"),
    (lambda s, r: (1 - s / r).relu(), "Trim compares 1 - s with r, not s"),
    *[(z, "r was taken for the threshold: the threshold is 1 - r, the width is r") for z in (
        lambda s, r: (s - r).relu(), lambda s, r: ((s - r) / (1 - r)).relu())],
    (lambda s, r: s.relu() + 0 * r, "r is ignored: 1 - s is compared with it, 1 - (1 - s)/r"),
    (lambda s, r: (s - (1 - r)).relu(), "what is above the threshold 1 - r must be divided by r, "
     "the width")]

MASKS = [
    (cosine, "there is no mask: outside -w < d <= 0 it must be 0"),
    (masked(lambda d, w: d.abs() < w, cosine), "a later key, d > 0, must get 0: this mask sees the "
     "future"),
    (masked(past, cosine), "beyond the window the cosine rises again: every distance of w or more "
     "must get exactly 0"),
    (masked(lambda d, w: (-w < d) & (d < 0), cosine), "the query's own key is missing: d <= 0"),
    (masked(inside, lambda d, w: cosine(d, w) + 0.5), "the 1/2 multiplies the 1, too: "
     "0.5 * (cos + 1)"),
    (masked(inside, lambda d, w: 2 * cosine(d, w) - 0.5), "parentheses are missing: (cos + 1)/2"),
    (masked(inside, lambda d, w: cosine(d / math.pi, w)), "the cosine lacks pi"),
    (masked(inside, lambda d, w: 1 + d / w), "inside the window the mask must fall from 1 to 0 as "
     "a cosine: this one is linear"),
    (masked(inside, lambda d, w: torch.ones_like(d / w)), "inside the window the mask must fall "
     "from 1 to 0 as a cosine: this window is hard"),
    *[(masked(inside, curve), "inside the window the mask must fall from 1 to 0 as (cos(pi d/w) + "
       "1)/2: this is another curve") for curve in (
           lambda d, w: torch.cos(math.pi * (d / w) / 2), lambda d, w: cosine(2 * d, w),
           lambda d, w: 1 - cosine(d, w), lambda d, w: (d / w).exp(),
           lambda d, w: 1 - (d / w).square())],
    (masked(past, lambda d, w: torch.ones_like(d / w)), "a causal mask is not enough: it also "
     "falls with the distance, and ends at w"),
    (masked(past, lambda d, w: (d / w).exp()), "this is an exponential, as with ALiBi: the mask "
     "falls from 1 to 0 as a cosine, and is 0 at distance w and beyond"),
    *[(lambda d, w, round=round: masked(inside, cosine)(d, round(w)), "w is a real number: round "
       "nothing") for round in (torch.floor, torch.ceil)]]

# (c, a, b): the factors c z^a m^b.
FACTORS = [(c, a, b) for c in (1, 2) for a in (0, 1, 2) for b in (0, 1, 2)]


def with_r(f, at):
    """The mistakes in dz/ds = 1/r of a right function whose input number `at` is r."""
    return [(lambda *x: f(*x) * x[at], "1/r is missing: dz/ds = 1/r"),
            (lambda *x: f(*x) * x[at] ** 2, "divide by r, dz/ds = 1/r: this multiplies"),
            (lambda *x: f(*x) / x[at], "divided by r twice: dz/ds = 1/r")]


def edits(right, *mistakes):
    """Mistakes as other lines of the right code: tuples of right, wrong, .., what to say."""
    return [(edited(right, *lines), says) for *lines, says in mistakes]


def edited(right, *lines):
    """The right function or class with other lines: right, wrong, right, wrong, .."""
    text = textwrap.dedent(inspect.getsource(right))
    for old, new in zip(lines[::2], lines[1::2], strict=True):
        assert text.count(old) == 1, (right.__name__, old)
        text = text.replace(old, new)
    made = {}
    exec(text, vars(inspect.getmodule(right)), made)
    return made[right.__name__]
