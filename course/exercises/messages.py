"""What a student reads: whether results agree, and what can be seen where they do not."""
import itertools
import math

import torch

# Where 0 is right, a larger number is wrong. A relevance clipped at 1e-9 is 1e-18 when squared.
ZERO = 1e-20


def is_plain(x):
    """Whether x is a tensor that can be compared: a subclass could answer each question by yes."""
    return type(x) is torch.Tensor and x.layout == torch.strided and x.device.type == "cpu"


def agree(x, y, case, equal_nan=False):
    """Whether x has the shape and dtype of y, and is near it by the rules of a case."""
    if not is_plain(y):
        return type(x) is type(y) and x == y
    if not is_plain(x) or x.shape != y.shape:
        return False
    # Whole numbers may be of any dtype.
    if y.is_floating_point() and x.dtype != y.dtype:
        return False
    return not off(x.double(), y.double(), case.tolerance, ZERO, equal_nan).any()


def off(x, y, tolerance, zero=ZERO, equal_nan=False):
    """Where x is not near y, or too large where y is 0."""
    finite = y[y.isfinite()].abs()
    largest = max(finite.max().item(), 1.0) if finite.numel() else 1.0
    near = torch.isclose(x, y, 0, tolerance * largest, equal_nan)
    return ~near | ((y == 0) & (x.abs() > zero))


def same(found, wanted, case):
    """Whether two functions have the same results in a case, wrong ones included."""
    found, wanted = ({what: x for what, x in results.items() if what != "where"}
                     for results in (found, wanted))
    # In both directions: a number that is 0 in one of the two must be 0 in the other.
    return found.keys() == wanted.keys() and all(
        agree(found[what], x, case, equal_nan=True) and agree(x, found[what], case, equal_nan=True)
        for what, x in wanted.items())


# -------------------------------------------------------------------------------- messages

def message(case, causes, found, wanted, wrong, name, hint):
    """The message for results `found`. causes: those of the known mistakes that have them.

    wrong: the names of the results that are not right. hint: for those without a known mistake.
    """
    what, lines = wrong[0], []
    if 0 < len(causes) <= 3:
        lines.append("\n  or: ".join(causes))
    other = describe_other(found, wanted, what, name, case)
    if other:
        return "\n".join([*lines, other])
    x, y = found[what], wanted[what]
    if not lines and case.hint:
        lines.append(case.hint)
    if not lines and what.startswith("the gradient") and not x.any():
        return (f"{what} of {name} is 0 everywhere: is the input detached, or turned into a number "
                "on the way?")
    if not lines and hint:
        lines.append(f"no known mistake. {hint}")
    lines.append(describe_numbers(x, y, f"{what} of {name}", case))
    if not causes and x.shape == y.shape:
        lines[-1] += describe_pattern(x.double(), y.double(), case)
    if not causes and what.startswith("the gradient"):
        lines.append("the values are right: only the derivative is not")
    if "the value" not in wanted and len(wrong) < len(wanted):
        lines.append(f"wrong: {', '.join(wrong)}")
    return "\n".join(lines)


def describe_other(found, wanted, what, name, case):
    """What is wrong with a result besides its numbers, or "" """
    if "an error" in found:
        return found["an error"] + found["where"]
    if "the value" not in wanted and len(wanted) <= 5:
        for order in itertools.permutations(wanted):
            if all(agree(found.get(mine), wanted[right], case)
                   for mine, right in zip(wanted, order)):
                return f"{name} returns the right results in another order: {', '.join(order)}"
    x, y = found.get(what, "nothing"), wanted[what]
    if not is_plain(x):
        missing = ": is a return missing?" if x == "nothing" else ""
        return f"{what} of {name} is {x}; it should be a tensor{missing}"
    # Autograd makes gradients, and only numbers that are right are blamed for their dtype.
    if what.startswith("the gradient") or not y.is_floating_point() or x.dtype == y.dtype or (
            x.shape != y.shape or off(x.double(), y.double(), 1e-3, math.inf).any()):
        return ""
    line = f"{what} of {name} is {x.dtype}; it should be {y.dtype}"
    if (x.dtype, y.dtype) == (torch.float32, torch.float64):
        line += ". math.pi * d, for integers d, and a new tensor without dtype= are float32"
    return line


def describe_numbers(x, y, what, case):
    """Where a tensor is wrong, in one line."""
    if x.shape != y.shape:
        line = f"{what} has the shape {tuple(x.shape)}; it should be {tuple(y.shape)}"
        return line + about_axes(x.double(), y.double())
    x, y = x.double(), y.double()
    wrong = off(x, y, case.tolerance)
    error = torch.where(wrong, (x - y).abs().nan_to_num(torch.inf), 0.0)
    at = tuple(int(n) for n in torch.unravel_index(error.argmax(), error.shape))
    place = f" at {list(at)}" if at else ""
    a, b = x[at].item(), y[at].item()
    if math.isnan(a):
        return f"{what} is NaN{place}; it should be {b:.6g}"
    digits = next((n for n in (6, 9, 12) if f"{a:.{n}g}" != f"{b:.{n}g}"), 17)
    line = f"{what} is {a:.{digits}g}{place}; it should be {b:.{digits}g}"
    if b == 0 and abs(a) < case.tolerance:
        line += ", exactly"
    return line


# ----------------------------------------------------- what is seen where no mistake is known

def describe_pattern(x, y, case):
    """What is seen of numbers without a known mistake, in words that end a line."""
    if case.tolerance < 1e-6 and not off(x, y, 1e-5, math.inf).any():
        return ". It is nearly right: is something in float32 on the way?"
    wrong = off(x, y, case.tolerance)
    if near(x, y):                                     # such as 1e-9 where 0 is right
        return about_places(x, y, wrong)
    return about_axes(x, y) or about_numbers(x, y) or about_places(x, y, wrong)


def near(x, y):
    """Whether x is y in all digits that float32 has. One number alone says nothing."""
    return x.shape == y.shape and x.numel() > 1 and x.isfinite().all() and not off(
        x, y, 1e-5, math.inf).any()


def about_axes(x, y):
    """Whether the numbers are right and stand in other places, in words that end a line."""
    if x.numel() != y.numel() or x.numel() < 2 or x.ndim > 5:
        return ""
    for order in itertools.permutations(range(x.ndim)):
        if list(order) != sorted(order) and near(x.permute(order), y):
            return (f". The numbers are right, but the axes are in another order: permute{order} "
                    "of your result is right")
    return ""


def about_numbers(x, y):
    """What all numbers have to do with the right ones, in words that end a line."""
    if not x.isfinite().all() or not y.isfinite().all() or not x.numel():
        return ""
    if not off(-x, y, 1e-5, math.inf).any() and y.any():
        return ". Only the sign is wrong"
    if x.numel() == 1:                                 # one number has a factor in any case
        return ""
    if not x.any():
        return ". All are 0"
    factor = ((x * y).sum() / y.square().sum()).item()
    # The nearer it is to 1, the closer it has to fit: 0.999 for the largest is not for all.
    if f"{factor:.4g}" not in ("1", "0") and not off(
            x / factor, y, 1e-5 * min(1.0, abs(factor - 1)), math.inf).any():
        return f". All are {factor:.4g} times what they should be"
    shift = (x - y).mean().item()
    if abs(shift) > 1e-3 and near(x - shift, y):
        return f". All are {abs(shift):.4g} too {'large' if shift > 0 else 'small'}"
    for axis in reversed(range(x.ndim)):
        if x.shape[axis] > 1 and near(x.sum(axis), torch.ones_like(x.sum(axis))):
            return f". They add up to 1 along axis {axis}, as after a softmax"
        if x.shape[axis] > 1 and near(x.mean(axis), torch.zeros_like(x.mean(axis))):
            return f". They have the mean 0 along axis {axis}, as after LayerNorm"
    for axis in reversed(range(x.ndim)):
        scale = (x * y).sum(axis, keepdim=True) / y.square().sum(axis, keepdim=True)
        if x.ndim > 1 and x.shape[axis] > 2 and near(x, scale * y):
            return (f". Along axis {axis} one factor is wrong, the same for all: yours are "
                    f"{scale.min():.4g} to {scale.max():.4g} times what they should be")
    return ""


def about_places(x, y, wrong):
    """Which numbers are wrong, in words that end a line."""
    if wrong.sum() > 1 and not wrong.all():
        if not y[wrong].any():
            return ". Only numbers that should be 0 are wrong"
        if not (x[wrong] - x[wrong][0]).any():
            return f". All wrong ones are {x[wrong][0]:.4g}"
    for axis, n in enumerate(wrong.shape):
        bad = wrong.movedim(axis, 0).flatten(1).any(1) if wrong.ndim > 1 else wrong
        bad = bad.nonzero().flatten().tolist()
        if n > 1 and len(bad) == 1:
            return f". Only index {bad[0]} of axis {axis} is wrong, of {n}"
        if n > 3 and len(bad) < n and bad == list(range(bad[0], bad[-1] + 1)):
            return f". Only indices {bad[0]} to {bad[-1]} of axis {axis} are wrong, of {n}"
    share = wrong.double().mean().item()
    return f". {share:.0%} of the numbers are wrong" if wrong.numel() > 1 else ""
