"""Mistakes: other lines of the right code, each with what to say to those who have its results."""
import functools
import inspect
import math
import textwrap

import torch
import torch.nn.functional as F

import multiscreen as ms

INF = math.inf


def pairs(q, k, w, r, i, j):
    """z, m and d of queries at positions i and keys at j, of which parts 3 and 4 edit lines."""
    d = j - i[:, None]
    s = q @ k.T
    z = (1 - (1 - s) / r).relu()
    inside = (-w < d) & (d <= 0)
    m = torch.where(inside, 0.5 * (torch.cos(math.pi * (d / w)) + 1), 0.0)
    return z, m, d


# Trim before its square, as parts 1, 3 and 4 write it: right, wrong, what to say. The last one has
# the gradients of one that is right but for 1/r.
ROOT = "(1 - (1 - s) / r).relu()"
ROOTS = [
    ("(1 - s) / r", "(1 - s) * r", "1 - s must be divided by r, not multiplied by it"),
    (ROOT, "(1 - (1 - s) / r)", "the max with 0 is missing: below the threshold the relevance "
     "rises again when it is squared"),
    (ROOT, "(1 - s / r).relu()", "Trim compares 1 - s with r, not s"),
    *[(ROOT, wrong, "r was taken for the threshold: the threshold is 1 - r, the width is r")
      for wrong in ("(s - r).relu()", "((s - r) / (1 - r)).relu()")],
    (ROOT, "(s.relu() + 0 * r)", "r is ignored: 1 - s is compared with it, 1 - (1 - s)/r"),
    (ROOT, "(s - (1 - r)).relu()", "what is above the threshold 1 - r must be divided by r, the "
     "width")]

# Softmask, as they write it.
INSIDE = "(-w < d) & (d <= 0)"
CURVE = "0.5 * (torch.cos(math.pi * (d / w)) + 1)"
MASK = f"torch.where(inside, {CURVE}, 0.0)"
MASKS = [
    (MASK, CURVE, "there is no mask: outside -w < d <= 0 it must be 0"),
    (INSIDE, "d.abs() < w", "a later key, d > 0, must get 0: this mask sees the future"),
    (INSIDE, "d <= 0", "beyond the window the cosine rises again: every distance of w or more must "
     "get exactly 0"),
    (INSIDE, "(-w < d) & (d < 0)", "the query's own key is missing: d <= 0"),
    (CURVE, "torch.cos(math.pi * (d / w)) + 0.5", "parentheses are missing: (cos + 1)/2"),
    (CURVE, "0.5 * (torch.cos(d / w) + 1)", "the cosine lacks pi"),
    (CURVE, "1 + d / w", "inside the window the mask must fall from 1 to 0 as a cosine: this one "
     "is linear"),
    (CURVE, "torch.ones_like(d / w)", "inside the window the mask must fall from 1 to 0 as a "
     "cosine: this window is hard"),
    *[(CURVE, wrong, "inside the window the mask must fall from 1 to 0 as (cos(pi d/w) + 1)/2: "
       "this is another curve") for wrong in (
           "torch.cos(math.pi * (d / w) / 2)", "0.5 * (torch.cos(math.pi * (d / w) / 2) + 1)",
           "torch.cos(math.pi * (d / w))", "(d / w).exp()",
           "1 - (d / w).square()")],
    (MASK, "(d <= 0) + 0 * (d / w)", "a causal mask is not enough: it also falls with the "
     "distance, and ends at w"),
    (MASK, "torch.where(d <= 0, (d / w).exp(), 0.0)", "this is an exponential, as with ALiBi: the "
     "mask falls from 1 to 0 as a cosine, and is 0 at distance w and beyond"),
    *[(f"inside = {INSIDE}", f"w = torch.{f}(w)\n    inside = {INSIDE}", "w is a real number: "
       "round nothing") for f in ("floor", "ceil", "round")]]

# The slope of 1 - (1 - s)/r, in the line that ends with / r.
WITH_R = [
    (" / r", "", "1/r is missing: dz/ds = 1/r"),
    (" / r", " * r", "divide by r, dz/ds = 1/r: this multiplies"),
    (" / r", " / r**2", "divided by r twice: dz/ds = 1/r")]
DIVIDED = "s must not be divided by the root of d_K: it is the cosine of an angle"

# (c, a, b): the factors c z^a m^b.
FACTORS = [(c, a, b) for c in (1, 2) for a in (1, 2) for b in (0, 1, 2)]


# ------------------------------------------------------------------- the right code, edited

# The functions that edits may use besides those of the file that they edit.
ALSO = {"unit": ms.unit, "tanh_norm": ms.tanh_norm, "softmax": lambda x: x.softmax(-1),
        "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
        "rms": lambda x: F.rms_norm(x, x.shape[-1:])}


def edits(right, *mistakes):
    """Mistakes in a right function or class: tuples of right, wrong, right, wrong, .., a sentence.

    Returns pairs (a wrong function, what to say to those who have its results).
    """
    return [(edited(right, *lines), says) for *lines, says in mistakes]


def edited(right, *lines):
    """The right function or class with other lines: right, wrong, right, wrong, .."""
    text = source(right)
    for old, new in zip(lines[::2], lines[1::2], strict=True):
        assert text.count(old) == 1, (f"{right.__name__} has {old!r} {text.count(old)} times, not "
                                      "once: undo your edit of it, or edit the mistake, too")
        text = text.replace(old, new)
    made = {}
    exec(text, vars(inspect.getmodule(right)) | ALSO, made)
    return made[right.__name__]


@functools.cache
def source(right):
    return textwrap.dedent(inspect.getsource(right))
