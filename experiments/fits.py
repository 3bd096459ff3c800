"""Lines fitted to losses by size, and the parameters that one family saves at an equal loss."""
import math

import numpy as np


def fit_line(sizes, losses):
    """(a, b) of the line loss = a + b ln(size), or None for fewer than two different sizes."""
    if len(set(sizes)) < 2:
        return None
    b, a = np.polyfit(np.log(sizes), losses, 1)
    return float(a), float(b)


def per_doubling(line):
    """The change of the loss when the size doubles, or None without a line."""
    return line[1] * math.log(2) if line else None


def size_at(loss, line):
    """The size at which a fitted line has that loss."""
    a, b = line
    return math.exp((loss - a) / b)


def variance_at(loss, sizes, losses):
    """The variance of ln(size_at(loss)) by the residuals of the line; NaN for two points."""
    x, y = np.log(sizes), np.array(losses)
    a, b = fit_line(sizes, losses)
    if len(x) < 3:
        return math.nan
    residual = ((y - a - b * x) ** 2).sum() / (len(x) - 2)
    offset = (loss - a) / b - x.mean()
    return residual / b**2 * (1 / len(x) + offset**2 / ((x - x.mean()) ** 2).sum())


def saving(multiscreen, transformer):
    """(loss, N_multiscreen, N_transformer, 1 - their ratio, its standard deviation).

    In the middle of the common losses. Each argument: (sizes, losses). None if no loss is common,
    or if a line does not fall. The deviation is that of the fits, to first order.
    """
    lines = fit_line(*multiscreen), fit_line(*transformer)
    if not all(line and line[1] < 0 for line in lines):
        return None
    low = max(min(multiscreen[1]), min(transformer[1]))
    high = min(max(multiscreen[1]), max(transformer[1]))
    if low > high:
        return None
    loss = (low + high) / 2
    N_m, N_t = (size_at(loss, line) for line in lines)
    std = N_m / N_t * math.sqrt(variance_at(loss, *multiscreen) + variance_at(loss, *transformer))
    return loss, N_m, N_t, 1 - N_m / N_t, std
