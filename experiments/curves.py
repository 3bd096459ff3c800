"""Perplexity by position: the rows of perplexity.tsv as curves, and their table."""
import math
import statistics
from typing import NamedTuple

from experiments.common import mean_and_std
from support.cli import UsageError
from support.table import print_table


class Curve(NamedTuple):
    """What one curve shows, as text: the columns of a row except the seed and the document."""
    model: str
    parameters: str
    seq_len: str
    step: str
    data: str
    window: str
    length: str
    swe: str
    factor: str


def positions(L):
    """The evaluated positions: 32, 45, 64, 91, .., rounded powers of sqrt(2), and L itself."""
    powers = [round(2 ** (n / 2)) for n in range(10, 2 * L.bit_length() + 2)]
    return [p for p in powers if p < L] + [L]


def get_curves(rows):
    """{Curve: {seed: [nats at each position]}}, means over the documents that all seeds have."""
    found = {}
    for row in rows:
        curve = Curve(*(row[name] for name in Curve._fields))
        nats = [float(x) for x in row["nats"].split()]
        if len(nats) != len(positions(int(curve.length))):
            raise UsageError(f"{row['document']}: its row has {len(nats)} positions: delete it, "
                             "and measure again")
        found.setdefault(curve, {}).setdefault(row["seed"], {})[row["document"]] = nats
    curves = {}
    for curve, seeds in found.items():
        shared = set.intersection(*map(set, seeds.values()))
        if shared:
            curves[curve] = {seed: [statistics.mean(x) for x in zip(*(d[name] for name in shared))]
                             for seed, d in sorted(seeds.items())}
    return curves


def summarize(seeds):
    """(perplexity, its deviation over the seeds) at each position, of {seed: [nats]}."""
    return [mean_and_std([math.exp(x) for x in column])[:2] for column in zip(*seeds.values())]


def setting_of(row):
    """What was done to the model before it was measured, in words."""
    words = ["SWE"] if row["swe"] else []
    if row["factor"]:
        words.append(f"RoPE ×{row['factor']}")
    return " ".join(words) or "as trained"


def words_of(curve, curves):
    """`setting_of` a curve among others, and its corpus where they have several."""
    several = len({other.data for other in curves}) > 1
    return setting_of(curve._asdict()) + f", {curve.data}" * several


def print_curves(curves, labels, title):
    """A row for each curve: perplexity and deviation at powers of two and at a text's end.

    labels: {(model, parameters): label}
    """
    shown, rows = set(), []
    for curve, seeds in curves.items():
        L, found = int(curve.length), {}
        for p, (mean, std) in zip(positions(L), summarize(seeds)):
            if p == L or math.log2(p).is_integer():
                found[p] = f"{mean:.3g}" + ("" if math.isnan(std) else f" ± {std:.2g}")
        shown |= found.keys()
        rows.append(([labels[curve.model, curve.parameters], words_of(curve, curves), len(seeds)],
                     found))
    shown = sorted(shown)
    print_table(["model", "curve", "seeds", *map(str, shown)],
                [[*words, *map(found.get, shown)] for words, found in rows], title)
