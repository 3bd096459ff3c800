"""Is a difference more than chance? Differences that are paired by seed, and Student's t of them.

lab.compare, lab.figures and lab.mechanisms print what is here. Runs with the same seed saw the same
data in the same order, so a difference is taken within each seed first. With few seeds p is large
even where all of them agree: three differences of one sign have p below 0.05 only if their mean is
at least 2.5 times their standard deviation.
"""
import math
import statistics
from dataclasses import dataclass

from lab.alike import mean_and_std


@dataclass
class Difference:
    """The mean difference over the pairs, its deviation, and t and p; NaN where there is one pair.

    p is two-sided: how often chance alone would give a t as far from 0. t95 is half of the 95 %
    interval of the mean.
    """
    seeds: list
    mean: float
    std: float
    t: float = math.nan
    p: float = math.nan
    t95: float = math.nan


def difference(ours, theirs):
    """The Difference of two {seed: number}, over the seeds that both have."""
    seeds = sorted(ours.keys() & theirs.keys(), key=int)
    mean, std = mean_and_std([ours[seed] - theirs[seed] for seed in seeds])
    if not std > 0:
        return Difference(seeds, mean, std)
    error, freedom = std / math.sqrt(len(seeds)), len(seeds) - 1
    return Difference(seeds, mean, std, mean / error, p_of_t(mean / error, freedom),
                      t_of_p(0.05, freedom) * error)


def p_of_t(t, freedom):
    """The two-sided p of Student's t by its finite series (Abramowitz and Stegun, 26.7.3 and 4)."""
    angle = math.atan(abs(t) / math.sqrt(freedom))
    if freedom == 1:
        return 1 - 2 / math.pi * angle
    cos, odd = math.cos(angle), freedom % 2
    term = total = cos if odd else 1.0
    for n in range(2 + odd, freedom, 2):
        term *= cos * cos * (n - 1) / n
        total += term
    within = math.sin(angle) * total
    if odd:
        within = 2 / math.pi * (angle + within)
    return 1 - within


def t_of_p(p, freedom):
    """The t whose two-sided p that is: half a confidence interval in standard errors."""
    low, high = 0.0, 1e4
    for _ in range(100):
        middle = (low + high) / 2
        if p_of_t(middle, freedom) > p:
            low = middle
        else:
            high = middle
    return low


def holm(p_values):
    """p of several tests together, by Holm: one falls below 0.05 by chance in one of 20 tables.

    NaN is of no test, and stays.
    """
    corrected, largest = list(p_values), 0.0
    tests = [n for n, p in enumerate(p_values) if not math.isnan(p)]
    for place, n in enumerate(sorted(tests, key=lambda n: p_values[n])):
        largest = max(largest, (len(tests) - place) * p_values[n])
        corrected[n] = min(largest, 1.0)
    return corrected


def standard_errors(differences):
    """The standard error of the mean of an array (seeds, items): over seeds, items, and both.

    The last one is that of other seeds and other items, such as strings, that all seeds share. A
    part of the deviation over seeds is one between items, and is counted once.
    """
    n_seeds, n_items = differences.shape
    of_seed, of_item = differences.mean(1), differences.mean(0)
    rest = differences - of_seed[:, None] - of_item[None, :] + differences.mean()
    over_seeds = of_seed.var(ddof=1) / n_seeds
    over_items = of_item.var(ddof=1) / n_items
    shared = (rest**2).sum() / ((n_seeds - 1) * (n_items - 1)) / (n_seeds * n_items)
    both = max(over_seeds + over_items - shared, 0)
    return [math.sqrt(x) for x in (over_seeds, over_items, both)]


def share_among(k, share_of_two):
    """How often an observer who is right among two would be right among k.

    The right one looks better than another by d deviations on average, and the others are
    independent (a forced choice in signal detection). NaN if it was always right among two.
    """
    normal = statistics.NormalDist()
    if not 0 < share_of_two < 1:
        return math.nan
    d, step = math.sqrt(2) * normal.inv_cdf(share_of_two), 0.01
    places = [d - 8 + step * n for n in range(1601)]
    return sum(normal.pdf(x - d) * normal.cdf(x) ** (k - 1) for x in places) * step
