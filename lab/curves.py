"""From the rows of measurements to curves, and from curves to a printed table.

A curve is a model, by its label, in one setting. It has numbers at places: at positions, at lengths
and depths, or at an end, a distance and a string. At each place there is a number for each seed
that was measured there, so a place says by itself which seeds are in its mean.
"""
import math
import statistics
from dataclasses import dataclass, replace

from support.cli import UsageError
from lab.alike import mean_of_seeds, seeds_in_words
from lab.paired import share_among
from support.data import count
from support.tables import print_table

BEST = "best"                                          # in place of a RoPE factor


@dataclass
class Curve:
    """A model in a setting. points: {place: {seed: number}}, where most places are tuples.

    more: what else tells it from others, in words.
    """
    model: str
    points: dict
    swe: str = ""
    factor: str = ""
    more: str = ""

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
        if self.more:
            words.append(self.more)
        return ", ".join(words)

    @property
    def name(self):
        return f"{self.model} + {self.setting}" if self.setting else self.model

    def seeds(self):
        """The seeds that were measured at one place at least."""
        return {seed for of_seed in self.points.values() for seed in of_seed}

    def times(self, factor):
        return self.map(lambda x: factor * x)

    def map(self, change):
        """This curve with each of its numbers changed."""
        return replace(self, points={place: {seed: change(x) for seed, x in of_seed.items()}
                                     for place, of_seed in self.points.items()})

    def part(self, *pattern):
        """The curve over x, of the places that fit: ("same", ..., 128) has ... in place of x."""
        n = pattern.index(...)
        points = {place[n]: of_seed for place, of_seed in self.points.items()
                  if (*place[:n], ..., *place[n + 1 :]) == pattern}
        return replace(self, points=dict(sorted(points.items())))


# --------------------------------------------------------------------------- of any kind of table

def read_curves(rows, column, places_of):
    """The curves of rows. column: has the numbers of a row; places_of(row): their places."""
    curves = {}
    for row in rows:
        key = row["model"], row["swe"], row["factor"]
        new = Curve(row["model"], {}, row["swe"], row["factor"])
        points = curves.setdefault(key, new).points
        for place, x in zip(places_of(row), row[column].split()):
            points.setdefault(place, {})[row["seed"]] = float(x)
    return list(curves.values())


def mean_over_items(curves, name):
    """Curves without the last part of their places, such as a document: means over all of these.

    name: of the items. An item counts at a place if all that were measured there have it.
    """
    items = {}                                         # {place: {(curve, seed): its items}}
    for n, curve in enumerate(curves):
        for (*place, item), of_seed in curve.points.items():
            for seed in of_seed:
                items.setdefault(tuple(place), {}).setdefault((n, seed), set()).add(item)
    means, sizes, left_out = [replace(curve, points={}) for curve in curves], set(), 0
    for place, of_run in items.items():
        common = sorted(set.intersection(*of_run.values()))
        if not common:
            raise UsageError(f"the curves have no {name} in common: measure them on one text")
        sizes.add(len(common))
        left_out += len(set.union(*of_run.values())) - len(common)
        for n, seed in of_run:
            means[n].points.setdefault(place, {})[seed] = statistics.fmean(
                curves[n].points[*place, item][seed] for item in common)

    words = count(max(sizes), name)
    if len(sizes) > 1:
        words = f"{min(sizes)} to {words}"
    if left_out:
        words += f"; left out, because not every curve has it: {left_out}"
    print(f"\nEach mean is over {words}")
    return means


def with_best_scaling(curves, cost, plain=True):
    """The curves, where those of a model with several RoPE factors become one, of the best factor.

    cost: (points of a curve, place) -> a number, the lower the better. plain: whether the model as
    it was trained stays, too.
    """
    models, shown = {}, []
    for curve in curves:
        models.setdefault((curve.model, curve.swe), []).append(curve)
    for of_model in models.values():
        if len(of_model) == 1:
            shown += of_model
            continue
        if plain:
            shown += [curve for curve in of_model if not curve.factor]
        points = {place: best_at(place, of_model, cost)[place]
                  for place in dict.fromkeys(place for curve in of_model for place in curve.points)}
        shown.append(replace(of_model[0], factor=BEST, points=points))
    return shown


def best_at(place, curves, cost):
    """The points of the curve that is best at a place, of those with all seeds measured there."""
    measured = [curve.points for curve in curves if place in curve.points]
    seeds = {seed for points in measured for seed in points[place]}
    complete = [points for points in measured if points[place].keys() == seeds]
    if not complete:
        raise UsageError(f"no RoPE factor of {curves[0].model} was measured with all seeds: "
                         "measure them alike")
    # Shares of ten prompts are equal, or not: rounding errors are no difference.
    return min(complete, key=lambda points: round(cost(points, place), 9))


# ------------------------------------------------------------------------------- of one kind each

def perplexity_curves(rows):
    """Curves of perplexities, by position."""
    curves = read_curves(rows, "nats", lambda row: [
        (int(position), row["document"]) for position in row["positions"].split()])
    return [curve.map(math.exp).part(...) for curve in mean_over_items(curves, "document")]


def curves_by_string(rows, *columns, of="nats"):
    """Curves of what each end costs, by (end, *columns, distance, string).

    What an end costs more than the same is an end, too: the gain is that of another string. of:
    "right" and "beaten" have numbers of the first end only.
    """
    def places_of(row):
        ends = row.get("ends", "same another").split()             # tables from before had two
        more = [int(row[name]) for name in columns]
        return [(end, *more, int(distance), row["string"]) for end in ends
                for distance in row["distances"].split()]

    curves = read_curves(rows, of, places_of)
    for points in (curve.points for curve in curves):
        for end, *place in [*points]:
            if end != "same":
                gain = "gain" if end == "another" else f"gain, {end}"
                same, other = points["same", *place], points[end, *place]
                points[gain, *place] = {seed: other[seed] - same[seed] for seed in same}
    return curves


def copying_curves(rows, *columns):
    """Curves of what each end costs, by (end, *columns, distance): means over the strings.

    Several RoPE factors become the one with which `same` costs least at each distance.
    """
    return with_best_scaling(mean_over_items(curves_by_string(rows, *columns), "string"),
                             lambda points, place: sum(points["same", *place[1:]].values()))


def retrieval_curves(rows, plain):
    """(curves of shares found, by (length, depth), their means, by length).

    Several RoPE factors become the best one in each cell. plain: see with_best_scaling.
    """
    curves = read_curves(rows, "accuracy", lambda row: [(int(row["length"]), row["depth"])])
    cells = with_best_scaling(curves, lambda points, place: -sum(points[place].values()), plain)
    return cells, [curve.part(...) for curve in mean_over_items(cells, "depth")]


# ------------------------------------------------------------------------------------------ tables

def row_of(curve, places, **more):
    """The row of a curve in a printed table."""
    return {"model": curve.name, "seeds": seeds_in_words(curve.seeds())} | more | {
        place: mean_of_seeds(curve.points.get(place, {}), 2, curve.seeds()) for place in places}


def print_perplexities(curves):
    print_table([row_of(curve, curves[0].points) for curve in curves],
                "Perplexity by tokens of context")


def print_costs(curves):
    """Print curves of copying by (end, distance)."""
    lines = []
    for curve in curves:
        for end in dict.fromkeys(end for end, _ in curve.points):
            part = curve.part(end, ...)
            lines.append(row_of(part, part.points, end=end))
    print_table(lines, "Nats per token by distance; gain: what another string costs more than the "
                "same")


def print_candidates(rows):
    """Print how many strings cost what. Returns {(name, k): the shares of the right one of k}."""
    lines, shares = [], {}
    for what, unit in (("nats", 1), ("right", 100), ("beaten", 100)):
        if not all(row[what] for row in rows):         # tables from before have no share beaten
            continue
        for curve in mean_over_items(curves_by_string(rows, "candidates", of=what), "string"):
            for k in sorted({k for _, k, _ in curve.points}):
                of_k = curve.part("same", k, ...).times(unit)
                lines.append(row_of(of_k, of_k.points, strings=k, of=what))
                if what != "right":
                    continue
                shares[curve.name, k] = replace(of_k, more=f"{k} strings")
                of_two = shares.get((curve.name, 2))
                if k > 2 and of_two:
                    expected = {distance: {"0": 100 * share_among(
                        k, statistics.fmean(of_seed.values()) / 100)}
                        for distance, of_seed in of_two.points.items()}
                    lines.append(row_of(replace(of_k, points=expected), expected, strings=k,
                                        of="expected") | {"seeds": ""})
    print_table(lines, "Strings in the context, one asked for: its nats per token; in percent, how "
                "often\nit is the likeliest (expected: as well as among two), and how many others "
                "it beats")
    return shares
