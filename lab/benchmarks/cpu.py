"""What a laptop feels: how long a step, a decoded token and a long text take, beside a Transformer.

    python -m lab.benchmarks.cpu
    python -m lab.benchmarks.cpu --what forward             section "Inference Latency" of the paper
    python -m lab.benchmarks.cpu --models multiscreen multiscreen:nope transformer:8M
    python -m lab.benchmarks.cpu out/latency/latency.tsv    draws the table, times nothing

train      a step of train.py's default, 8 sequences of 256 bytes; train-compiled: with --compile
decode     one more token, after each of --contexts
forward    hidden states and logits of each of --lengths, in one pass; forward-compiled

Multiscreen is timed with its initial windows, with a guess at trained ones or those of --ckpt, and
with SWE: see lab/benchmarks/timing.py. The models take turns, so other work slows all alike. Each
time is a row of latency.tsv; the figure beside it, latency.png, has the forward passes. Rerun the
command to measure what is missing.

What the paper compares needs a GPU: large sizes, long contexts, bfloat16, FlashAttention, the fused
kernel. `python -m lab.benchmarks.gpu` times that with random weights, and this a trained model:

Paper:  python -m lab.benchmarks.cpu --what forward-compiled --models multiscreen --repeats 100 \\
            --lengths 1024 4096 16384 65536 131072 --device cuda --ckpt out/paper/psi8-0/ckpt.pt
        The paper shows its latencies, on an RTX 4090, without numbers.
"""
from pathlib import Path

from lab.benchmarks import timing
from lab.common import add_tables, get_figure, pyplot, save_figure
from lab.style import WIDTH, labels_of, look, millions_axis, paper_name, plain_axis
from support.cli import Parser, UsageError, cli, get_device
from support.table import beside, print_table

# What is timed, and how many passes.
PASSES = {"train": 20, "train-compiled": 20, "decode": 64, "forward": 5, "forward-compiled": 5}
BATCH, LENGTH = 8, 256                                 # of a step


def get_parser():
    p = Parser(__doc__)
    add_tables(p, "*")
    p.add_argument("--what", nargs="+", choices=PASSES, metavar="WHAT",
                   default=["train", "train-compiled", "decode", "forward"],
                   help=f"{', '.join(PASSES)} [all but the last]")
    p.add_argument("--models", nargs="+", default=["multiscreen", "transformer:8M"],
                   help="as train.py's --model [multiscreen transformer:8M]")
    p.flag("--psi", 8, "Multiscreen's size")
    p.add_argument("--ckpt", help="a trained model with its windows, in place of `multiscreen`")
    p.flag("--contexts", [256, 8192, 131072], "tokens before the decoded one", type=int, nargs="+",
           shown="256 8192 131072")
    p.flag("--lengths", [2**n for n in range(10, 15)], "tokens of a forward pass", type=int,
           nargs="+", shown="2^10 .. 2^14")
    p.flag("--repeats", None, "timed passes", type=int, shown="train 20, decode 64, forward 5")
    p.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cpu or cuda [cpu]")
    p.add_argument("--table", type=Path,
                   help="the table to fill [out/latency/latency.tsv, or beside the checkpoint]")
    return p


def measure_models(args):
    """Time what is missing. Returns (the rows that args ask for, path of their figure)."""
    device = get_device(args.device).type
    vocab_size = 257 if device == "cpu" else 50257
    models = [timing.new_model(name, args.psi, vocab_size, device) for name in args.models]
    path = args.table or Path("out/latency/latency.tsv")
    if args.ckpt is not None:
        models = [timing.trained_model(args.ckpt, device),
                  *(x for x in models if x.run["model"] != "multiscreen")]
        path = beside(args.ckpt, "latency.tsv", args.table)

    def time_group(cells):
        return timing.time_models(cells, device, args.repeats or PASSES[cells[0]["what"]])

    cases = {"train": [(BATCH, LENGTH)], "decode": [(1, T) for T in args.contexts],
             "forward": [(1, T) for T in sorted(args.lengths)]}
    groups = [timing.cells_of(models, what, *case, device)
              for what in args.what for case in cases[what.partition("-")[0]]]
    rows = timing.measure(path, timing.KEYS, timing.VALUES, groups, time_group, device, args.ckpt)
    if not rows:
        raise UsageError("nothing could be timed, for the reasons above")
    return rows, path.with_suffix(".png")


def draw_latency(plt, rows, labels, path):
    """Forward passes at the longest length by size, if there are several sizes, and by length.

    rows: of `summarize`
    """
    for row in rows:
        row["kind"] = paper_name(row["model"])
        row["label"] = labels[row["model"], str(row["parameters"])]
    longest = max(row["length"] for row in rows)
    short = {row["label"] for row in rows if row["length"] < longest}
    panels = {}
    if not short or len({row["label"] for row in rows}) > len({row["kind"] for row in rows}):
        panels["parameters"] = [row for row in rows if row["length"] == longest]
    if short:
        panels["length"] = [row for row in rows if row["label"] in short]
    fig, axes = plt.subplots(1, len(panels), figsize=(WIDTH, 5.2), sharey=True, squeeze=False,
                             layout="constrained")
    for ax, (x, shown) in zip(axes[0], panels.items()):
        lines = {}
        for row in sorted(shown, key=lambda row: row[x]):
            name = row["kind" if x == "parameters" else "label"]
            lines.setdefault(f"{name}, {row['setting']}", []).append(row)
        for n, (label, line) in enumerate(lines.items()):
            ax.errorbar([row[x] for row in line], [row["ms"] for row in line],
                        [row["std"] for row in line], ms=5, label=label,
                        **look(n) | {"ls": "--" if "transformer" in line[0]["model"] else "-"})
        if x == "parameters":
            millions_axis(plt, ax)
            ax.set_xlabel(f"parameters (millions), at {longest:,} tokens")
        else:
            ax.set_xscale("log", base=2)
            ax.set_xlabel("context (tokens)")
        ax.set_yscale("log")
        plain_axis(plt, ax.yaxis)
        ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=3 - len(panels),
                  frameon=False)
    axes[0, 0].set_ylabel("latency of one forward pass (ms)")
    save_figure(fig, path)


def main():
    rows, out = get_figure(get_parser(), "ms", measure_models)
    labels = labels_of(rows)
    rows = timing.summarize(rows)
    print_table(timing.COLUMNS, [[row[name] for name in timing.COLUMNS] for row in rows],
                f"Milliseconds of one pass; {rows[0]['machine']}")
    forward = [row for row in rows if row["what"].startswith("forward")]
    if forward and (plt := pyplot()):
        draw_latency(plt, forward, labels, out)


if __name__ == "__main__":
    cli(main)
