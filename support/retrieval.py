"""Measurements of retrieval as a grid, depth by length: the mean over models, as text."""
import statistics
from typing import NamedTuple


class Cell(NamedTuple):
    """The share of right answers and the number of prompts by seed; the RoPE factor, or None."""
    shares: dict
    prompts: dict
    factor: float = None

    @property
    def mean(self):
        return statistics.mean(self.shares.values())


def by_model(values, name):
    """[{Key: [share]} of one model and task]: keys that differ in the seed and the cell only.

    name: "abcdigits" or "passkey".
    """
    models = {}
    for key, numbers in values.items():
        if key.task.partition(",")[0] == name:
            models.setdefault((key.task, key.run, key.step, key.swe), {})[key] = numbers
    return list(models.values())


def get_cells(values):
    """{(length, depth): Cell} of one model's {Key: [share]}.

    Of a seed's measurements the one with the most prompts counts. Of the RoPE factors the one
    counts that is best in the mean over the seeds, of several the smallest.
    """
    found = {}
    for key in sorted(values, key=lambda key: int(key.trials)):
        by_factor = found.setdefault((int(key.length), float(key.depth)), {})
        factor = float(key.factor) if key.factor else None
        cell = by_factor.setdefault(key.factor, Cell({}, {}, factor))
        cell.shares[key.seed], cell.prompts[key.seed] = values[key][0], int(key.trials)
    cells = {}
    for place, by_factor in sorted(found.items()):
        candidates = sorted(by_factor.values(), key=lambda cell: cell.factor or 0)
        cells[place] = max(candidates, key=lambda cell: (len(cell.shares), cell.mean))
    return cells


def mean_by_length(cells):
    """{length: {seed: mean share over the depths}}

    Seeds that were measured at fewer depths than others are left out: their mean is of other cells.
    """
    columns = {}
    for (length, _), cell in cells.items():
        for seed, share in cell.shares.items():
            columns.setdefault(length, {}).setdefault(seed, []).append(share)
    return {length: {seed: statistics.mean(shares) for seed, shares in column.items()
                     if len(shares) == max(map(len, column.values()))}
            for length, column in columns.items()}


def table(cells, T_train):
    """The cells as text, and their means over the depths."""
    def show(cell):
        if cell.factor is None:
            return f"{cell.mean:.1%}"
        return "--" if cell.mean == 0 else f"{cell.mean:.1%} x{cell.factor:g}"

    lengths, depths = (sorted(set(x)) for x in zip(*cells))
    head = [f"[{n}]" if n == T_train else str(n) for n in lengths]
    lines = [["depth", *head]]
    for d in depths:
        lines.append([f"{d:g}", *(show(cells[n, d]) if (n, d) in cells else "" for n in lengths)])
    means = mean_by_length(cells)
    lines.append(["mean", *(f"{statistics.mean(means[n].values()):.1%}" for n in lengths)])
    text = [f"{line[0]:>6}" + "".join(f"{x:>12}" for x in line[1:]) for line in lines]
    return "\n".join(text) + f"\n[{T_train}] is the training length, in tokens"
