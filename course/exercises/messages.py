"""What a student reads: whether results agree, and what can be seen where they do not."""
import itertools
import math

import torch

# Where 0 is right, a larger number is wrong. A relevance clipped at 1e-9 is 1e-18 when squared.
ZERO = 1e-20


def is_plain(x):
    """Whether x is a tensor that can be compared: a subclass could answer each question by yes."""
    return type(x) is torch.Tensor and x.layout == torch.strided and x.device.type == "cpu"


def agree(x, y, case):
    """Whether x has the shape and dtype of y, and is near it by the rules of a case."""
    if not is_plain(y):
        return type(x) is type(y) and x == y
    if not is_plain(x) or x.shape != y.shape:
        return False
    # Whole numbers may be of any dtype.
    if y.is_floating_point() and x.dtype != y.dtype:
        return False
    return not off(x.double(), y.double(), case.tolerance).any()


def off(x, y, tolerance, zero=ZERO):
    """Where x is not near y, or too large where y is 0. NaN is near NaN, as mistakes have it."""
    finite = y[y.isfinite()].abs()
    largest = max(finite.max().item(), 1.0) if finite.numel() else 1.0
    near = torch.isclose(x, y, 0, tolerance * largest, equal_nan=True)
    return ~near | ((y == 0) & (x.abs() > zero))


def near(x, y, tolerance=1e-5):
    """Whether x is y but for its last digits, and for small numbers where 0 is right."""
    return x.shape == y.shape and not off(x.double(), y.double(), tolerance, math.inf).any()


def same(found, wanted, case):
    """Whether two functions have the same results in a case, wrong ones included."""
    found, wanted = ({what: x for what, x in results.items() if what != "where"}
                     for results in (found, wanted))
    # In both directions: a number that is 0 in one of the two must be 0 in the other.
    return found.keys() == wanted.keys() and all(
        agree(found[what], x, case) and agree(x, found[what], case) for what, x in wanted.items())


# -------------------------------------------------------------------------------- messages

def message(case, causes, found, wanted, wrong, name, hint):
    """The message for results `found`. causes: those of the known mistakes that have them.

    wrong: the names of the results that are not right. hint: for those without a known mistake.
    """
    what, lines = wrong[0], []
    if 0 < len(causes) <= 3:
        lines.append("\n  or: ".join(causes))
    if "an error" in found:
        return "\n".join([*lines, found["an error"] + found["where"]])
    x, y = found.get(what), wanted[what]
    if not is_plain(x):
        return "\n".join([*lines, f"{what} of {name} should be a tensor, and is {x}"])
    # Only numbers that are right are blamed for their dtype.
    if y.is_floating_point() and x.dtype != y.dtype and near(x, y, 1e-3):
        lines.append(f"{what} of {name} is {x.dtype}; it should be {y.dtype}")
        if (x.dtype, y.dtype) == (torch.float32, torch.float64):
            lines[-1] += (". math.pi * d, for integers d, and a new tensor without dtype= are "
                          "float32")
        return "\n".join(lines)
    if not lines and case.hint:
        lines.append(f"no known mistake: {case.hint}")
    elif not lines and what.startswith("the gradient") and not x.any():
        lines.append("is the input detached, or turned into a number on the way?")
    elif not lines and hint:
        lines.append(f"no known mistake. {hint}")
    lines.append(describe_numbers(x.double(), y.double(), f"{what} of {name}", case))
    if not causes:
        lines[-1] += describe_pattern(x.double(), y.double(), case)
    if "the value" not in wrong and len(wrong) < len(wanted):
        lines.append(f"wrong: {', '.join(wrong)}; all else is right")
    return "\n".join(lines)


def describe_numbers(x, y, what, case):
    """Where a tensor is wrong, in one line."""
    if x.shape != y.shape:
        return f"{what} has the shape {tuple(x.shape)}; it should be {tuple(y.shape)}"
    error = torch.where(off(x, y, case.tolerance), (x - y).abs().nan_to_num(torch.inf), 0.0)
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


def describe_pattern(x, y, case):
    """What is seen of all numbers of a wrong tensor, in words that end a line."""
    if near(x, y) and case.tolerance < 1e-6:
        return ". It is nearly right: is something in float32 on the way?"
    if not near(x, y) and about_all(x, y):
        return about_all(x, y)
    return about_places(off(x, y, case.tolerance), y) if x.shape == y.shape else ""


def about_all(x, y):
    """What all numbers have to do with the right ones, or "" """
    if x.numel() == y.numel() > 1:
        for order in itertools.permutations(range(x.ndim)):
            if list(order) != sorted(order) and near(x.permute(order), y):
                return (". The numbers are right, but the axes are in another order: "
                        f"permute{order} of your result is right")
    if x.shape != y.shape:
        return ""
    if y.any() and near(-x, y):
        return ". Only the sign is wrong"
    if x.numel() == 1:                                 # one number has a factor in any case
        return ""
    if not x.any():
        return ". All are 0"
    factor = ((x * y).sum() / y.square().sum()).item()
    # The nearer it is to 1, the closer it has to fit: 0.999 for the largest is not for all.
    if f"{factor:.4g}" not in ("1", "0") and near(x / factor, y, 1e-5 * min(1, abs(factor - 1))):
        return f". All are {factor:.4g} times what they should be"
    return ""


def about_places(wrong, y):
    """Which numbers are wrong, or "" """
    if wrong.numel() < 2:
        return ""
    if not wrong.all() and not y[wrong].any():
        return ". Only numbers that should be 0 are wrong"
    for axis, n in enumerate(wrong.shape):
        bad = wrong.movedim(axis, 0).reshape(n, -1).any(1).nonzero().flatten().tolist()
        if n > 1 and len(bad) == 1:
            return f". Only index {bad[0]} of axis {axis} is wrong, of {n}"
    return f". {wrong.double().mean().item():.0%} of the numbers are wrong"
