"""Latency by context length and by size as a figure (section "Inference Latency").

    python -m experiments.latency_curves out/latency/latency.tsv

draws the table of `python -m experiments.latency`: the largest models by length and, where there
are several, all of them by size at the longest length. The column x_transformer is the time of the
Transformer beside it, with its fastest backend, over Multiscreen's; x_std is its deviation, by
those of both times. By size, the n-th Multiscreen stands beside the n-th Transformer. If a table
has several machines, the last one is drawn. Bars are standard deviations over the passes.
"""
import math

from experiments.common import get_figure, pyplot, save_figure, with_deviation
from experiments.style import WIDTH, legend_below, look, millions_axis, plain_axis, short_number
from support.cli import cli
from support.table import print_table

COLUMNS = ("model", "parameters", "setting", "length", "ms", "std", "x_transformer", "x_std")


def family_of(row):
    """The family of a row's model."""
    return "Transformer" if row["model"].startswith("transformer") else "Multiscreen"


def latency_rows(rows):
    """Dicts of COLUMNS, numbers as numbers. rows: of latency.tsv"""
    last, sizes, found = rows[-1], {"Transformer": set(), "Multiscreen": set()}, []
    for row in rows:
        if (row["machine"], row["repeats"]) == (last["machine"], last["repeats"]):
            row = with_deviation(row)
            row |= {"parameters": int(row["parameters"]), "length": int(row["length"])}
            sizes[family_of(row)].add(row["parameters"])
            found.append(row)
    beside = dict(zip(sorted(sizes["Multiscreen"]), sorted(sizes["Transformer"])))
    for row in found:
        other = beside.get(row["parameters"]) if family_of(row) == "Multiscreen" else None
        peers = [peer for peer in found if family_of(peer) == "Transformer"
                 and (peer["parameters"], peer["length"]) == (other, row["length"])]
        row |= {"x_transformer": None, "x_std": None}
        if peers:
            fastest = min(peers, key=lambda peer: peer["ms"])
            ratio = fastest["ms"] / row["ms"]
            relative = [x["std"] / x["ms"] for x in (fastest, row)]
            row |= {"x_transformer": ratio, "x_std": ratio * math.hypot(*relative)}
    return found


def draw_latency(plt, rows, path):
    """Latency by length for the largest pair, and by size at the longest length if more are there.

    rows: of latency_rows
    """
    longest = max(row["length"] for row in rows)
    all_lengths = {(row["model"], row["parameters"]) for row in rows if row["length"] < longest}
    panels = []
    if len({(row["model"], row["parameters"]) for row in rows}) > 2:
        panels.append(("parameters", f"parameters (millions), at {longest:,} tokens",
                       [row for row in rows if row["length"] == longest]))
    if all_lengths:
        shown = [row for row in rows if (row["model"], row["parameters"]) in all_lengths]
        sizes = {family_of(row): short_number(row["parameters"]) for row in shown}
        names = ", ".join(f"{family} {size}" for family, size in sizes.items())
        panels.append(("length", f"context (tokens); {names}", shown))
    fig, axes = plt.subplots(1, max(len(panels), 1), figsize=(WIDTH, 4.8), sharey=True,
                             squeeze=False, layout="constrained")
    for ax, (x, xlabel, shown) in zip(axes[0], panels):
        for n, setting in enumerate(dict.fromkeys(row["setting"] for row in rows)):
            line = [row for row in shown if row["setting"] == setting]
            if line:
                family = family_of(line[0])
                ax.errorbar([row[x] for row in line], [row["ms"] for row in line],
                            [row["std"] for row in line], ms=5, label=f"{family}, {setting}",
                            **look(n) | {"ls": "--" if family == "Transformer" else "-"})
        millions_axis(plt, ax)
        ax.set(xlabel=xlabel, yscale="log")
        plain_axis(plt, ax.yaxis)
        if x == "length":
            ax.set_xscale("log", base=2)
            for T in {int(row["seq_len"]) for row in rows if row["seq_len"]}:
                ax.axvline(T, color="black", ls=":", lw=1.5, label="training length")
    axes[0, 0].set_ylabel("latency of one forward pass (ms)")
    legend_below(fig, axes[0, -1])
    save_figure(fig, path)


def main():
    rows, out, _ = get_figure(__doc__, "ms")
    rows = latency_rows(rows)
    print_table(COLUMNS, [[row[name] for name in COLUMNS] for row in rows],
                f"One forward pass, batch 1, no cache, milliseconds; {rows[0]['machine']}")
    if plt := pyplot():
        draw_latency(plt, rows, out)


if __name__ == "__main__":
    cli(main)
