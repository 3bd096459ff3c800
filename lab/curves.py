"""From the rows of measurements to the curves of a figure.

A curve is a model, by its label, in one setting. All curves of a figure have arrays of one shape: a
row for each seed, then the axes of the figure, such as lengths or positions. What was not measured
is NaN, so each place says by itself which seeds are in its mean.
"""
import math
from dataclasses import dataclass, replace

import numpy as np

from lab.alike import COPYING, PERPLEXITY, RETRIEVAL
from lab.perplexity import positions
from support.cli import UsageError
from support.data import count

BEST = "best"                                          # in place of a RoPE factor


@dataclass
class Curve:
    """A model in a setting. values: (seeds, ...), NaN where a seed was not measured."""
    model: str
    swe: str
    factor: str
    seeds: list
    values: np.ndarray

    @property
    def setting(self):
        """What was changed after training, in words: "" for nothing."""
        words = []
        if self.swe:
            words.append("SWE")
        if self.factor == BEST:
            words.append("best RoPE scaling")
        elif self.factor:
            words.append(f"RoPE ×{self.factor}")
        return ", ".join(words)

    @property
    def name(self):
        return f"{self.model} + {self.setting}" if self.setting else self.model

    def of(self, values):
        """This curve with other values of the same seeds."""
        return replace(self, values=values)

    def at(self, n):
        """{seed: its value} at the n-th place of values (seeds, places), of the seeds measured."""
        return {seed: value for seed, value in zip(self.seeds, self.values[:, n].tolist())
                if not math.isnan(value)}

    def mean(self):
        """The mean over the seeds at each place, NaN where none was measured."""
        n = (~np.isnan(self.values)).sum(axis=0)
        return np.where(n > 0, np.nansum(self.values, axis=0) / np.maximum(n, 1), np.nan)

    def seeds_measured(self):
        """The seeds that were measured at one place at least."""
        measured = ~np.isnan(self.values).reshape(len(self.seeds), -1).all(axis=1)
        return [seed for seed, x in zip(self.seeds, measured) if x]


# --------------------------------------------------------------------------- of any kind of table

def read_curves(rows, kind, value=None):
    """([a Curve (seeds, places, items, numbers)], the places) of rows of a kind of table.

    The places are those on the kind's axis, or a single one; the numbers those of a column, by
    default the first of its values.
    """
    axis, item = kind.the("axis"), kind.the("item")
    value = value or kind.the("value")
    seeds = sorted({row["seed"] for row in rows}, key=int)
    places = sorted({int(row.get(axis, 0)) for row in rows})
    items = sorted({row[item] for row in rows})        # depths, 0 to 1, are in order as texts, too
    shape = len(seeds), len(places), len(items), len(rows[0][value].split())
    curves = {}
    for row in rows:
        key = row["model"], row["swe"], row["factor"]
        if key not in curves:
            curves[key] = Curve(*key, seeds, np.full(shape, np.nan))
        place = places.index(int(row.get(axis, 0)))
        curves[key].values[seeds.index(row["seed"]), place, items.index(row[item])] = [
            float(x) for x in row[value].split()]
    return list(curves.values()), places


def mean_over_items(curves, item):
    """Curves (seeds, places, numbers): means over the items, such as documents, that all have.

    At each place, all that were measured there have to have an item for it to count.
    """
    has = ~np.isnan([curve.values[..., 0] for curve in curves])    # (curves, seeds, places, items)
    was_measured = has.any(axis=3, keepdims=True)
    counts = (has | ~was_measured).all(axis=(0, 1))    # (places, items)
    n = counts.sum(axis=1)
    if not n.all():
        raise UsageError(f"the curves have no {item} in common: measure them on one text")
    left_out = (has.any(axis=(0, 1)) & ~counts).sum()
    words = count(n.max(), item)
    if n.min() < n.max():
        words = f"{n.min()} to {words}"
    if left_out:
        words += f"; left out, because not every curve has it: {left_out}"
    print(f"\nEach mean is over {words}")
    return [curve.of(np.where(counts[..., None], curve.values, 0).sum(axis=2) / n[:, None])
            for curve in curves]


def with_best_scaling(curves, cost, plain=True):
    """The curves, where those of a model with several RoPE factors become one, of the best factor.

    cost: see best_scaling. plain: whether the model as it was trained stays, too.
    """
    models = {}
    for curve in curves:
        models.setdefault((curve.model, curve.swe), []).append(curve)
    shown = []
    for of_model in models.values():
        if len(of_model) == 1:
            shown += of_model
            continue
        if plain:
            shown += [curve for curve in of_model if not curve.factor]
        shown.append(best_scaling(of_model, cost))
    return shown


def best_scaling(curves, cost):
    """The curve of the best RoPE factor at each place, of curves of one model that differ in it.

    cost: values (seeds, ..) -> (seeds, places), the lower the better; the places are the last axes
    of the values. A factor counts at a place if it has all seeds that were measured there.
    """
    values = np.array([curve.values for curve in curves])
    costs = np.array([cost(of_factor) for of_factor in values])    # (factors, seeds, places)
    measured = ~np.isnan(costs)
    complete = (measured | ~measured.any(axis=0)).all(axis=1)      # (factors, places)
    if not complete.any(axis=0).all():
        raise UsageError(f"no RoPE factor of {curves[0].model} was measured with all seeds: "
                         "measure them alike")
    sums = np.where(measured, costs, 0).sum(axis=1)
    # Shares of ten prompts are equal, or not: rounding errors are no difference.
    best = np.argmin(np.where(complete, np.round(sums, 9), np.inf), axis=0)
    chosen = np.take_along_axis(values, np.broadcast_to(best, values.shape[1:])[None], axis=0)[0]
    return replace(curves[0], factor=BEST, values=chosen)


# ------------------------------------------------------------------------------- of one kind each

def perplexity_curves(rows):
    """(curves (seeds, positions) of perplexities, the positions)"""
    curves, _ = read_curves(rows, PERPLEXITY)
    means = mean_over_items(curves, "document")
    return [curve.of(np.exp(curve.values[:, 0])) for curve in means], positions(
        int(rows[0]["length"]))


def copying_curves(rows, kind):
    """(curves (seeds, ends, steps, distances), the names of ends, the steps, the distances)

    Several RoPE factors become the one with which `same` costs least at each distance.
    """
    ends = ends_of(rows)
    distances = [int(distance) for distance in rows[0]["distances"].split()]
    curves, steps = read_curves(rows, kind)
    shape = len(curves[0].seeds), len(steps), len(ends), len(distances)
    curves = [curve.of(curve.values.reshape(shape).swapaxes(1, 2))
              for curve in mean_over_items(curves, "string")]
    same = ends.index("same")
    return with_best_scaling(curves, lambda costs: costs[:, same]), ends, steps, distances


def ends_of(rows):
    """The names of the ends whose costs are in the rows; tables from before had two."""
    return rows[0].get("ends", "same another").split()


def gains_by_string(rows):
    """{name of a curve: its gains (seeds, strings, distances)}, with each RoPE factor by itself."""
    ends, found = ends_of(rows), {}
    curves, _ = read_curves(rows, COPYING)
    for curve in curves:
        costs = curve.values[:, 0]                     # (seeds, strings, ends times distances)
        costs = costs.reshape(*costs.shape[:2], len(ends), -1)
        gains = costs[:, :, ends.index("another")] - costs[:, :, ends.index("same")]
        found[curve.name] = gains
    return found


def retrieval_curves(rows, plain):
    """(curves (seeds, lengths, depths) of shares found, their means (seeds, lengths), the lengths)

    Several RoPE factors become the best one in each cell. plain: see with_best_scaling.
    """
    curves, lengths = read_curves(rows, RETRIEVAL)
    cells = [curve.of(curve.values[..., 0]) for curve in curves]
    cells = with_best_scaling(cells, lambda shares: -shares, plain)
    means = mean_over_items([curve.of(curve.values[..., None]) for curve in cells], "depth")
    return cells, [curve.of(curve.values[..., 0]) for curve in means], lengths
