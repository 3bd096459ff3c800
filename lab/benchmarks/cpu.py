"""How long do a training step, a decoded token and a long text take, beside a Transformer?

    python -m lab.benchmarks.cpu
    python -m lab.benchmarks.cpu --what forward             section "Inference Latency" of the paper
    python -m lab.benchmarks.cpu --models multiscreen multiscreen:nope transformer:8M
    python -m lab.benchmarks.cpu out/latency/latency.tsv    draws this table, and times nothing

This is what you notice on a laptop. --what chooses what is timed:

train      a training step with the defaults of train.py, on 8 sequences of 256 bytes;
           train-compiled is the same with --compile
decode     generating one more token after a context, for each length of --contexts
forward    hidden states and logits of a whole text in one pass, for each length of --lengths;
           forward-compiled is the same, compiled

Multiscreen is timed with its initial windows, with those of --ckpt or a guess at trained ones, and
with SWE; lab/benchmarks/timing.py has the details. The models take turns, so that other work on the
machine slows them all alike. Each time becomes a row of latency.tsv, and the figure latency.png
beside it shows the forward passes. If you rerun the command, it measures only what is missing.

What the paper compares needs a GPU: large models, long contexts, bfloat16, FlashAttention and the
fused kernel. `python -m lab.benchmarks.gpu` times these with random weights, and the following
command times a trained model:

Paper:  python -m lab.benchmarks.cpu --what forward-compiled --models multiscreen --repeats 100 \\
            --lengths 1024 4096 16384 65536 131072 --device cuda --ckpt out/paper/psi8-0/ckpt.pt
        The paper shows its latencies, measured on an RTX 4090, in a figure without numbers.
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
                   help=f"what to time: {', '.join(PASSES)} [all but the last]")
    p.add_argument("--models", nargs="+", default=["multiscreen", "transformer:8M"],
                   help="the models to time, as train.py's --model names them "
                   "[multiscreen transformer:8M]")
    p.flag("--psi", 8, "the size of a Multiscreen")
    p.add_argument("--ckpt",
                   help="time this trained model, with its windows, in place of `multiscreen`")
    p.flag("--contexts", [256, 8192, 131072], "how many tokens come before the decoded one",
           type=int, nargs="+", shown="256 8192 131072")
    p.flag("--lengths", [2**n for n in range(10, 15)], "how many tokens a forward pass has",
           type=int, nargs="+", shown="2^10 .. 2^14")
    p.flag("--repeats", None, "how many passes are timed", type=int,
           shown="train 20, decode 64, forward 5")
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
