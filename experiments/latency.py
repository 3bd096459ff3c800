"""How long one forward pass over a long context takes (section "Inference Latency").

Multiscreen, the same with SWE, and the Transformer, over context lengths and over sizes. Appendix:
"Latency Impact of Screening-Window Expansion".

Paper:  python -m experiments.latency --repeats 100 \\
            --ckpt out/scaling_paper/multiscreen_psi{8,16,32,48}-0/ckpt.pt
GPU:    python -m experiments.latency --compile
        bfloat16 products, vocabulary 50257. Psi = 8, 16, 32, 48 and the Transformers 8M to 1.3B at
        2^17 tokens, the last two from 2^10 on. Without --compile each elementwise operation of
        both models is a launch and a pass through memory of its own. Weights are random: a
        relevance of 0 takes as long as any other, so only the windows matter. `initial` ones are 2
        to 257 tokens. `trained-like` ones are a guess: 70 % of the tiles log-uniform in 2 .. 128,
        25 % in 256 .. 4096, 5 % in 4096 .. 65536. SWE changes the last ones only.
Small:  python -m experiments.latency
        Without a GPU, 2 minutes on 2 cores: Psi = 8 and 8M, vocabulary 257, float32, 2^10 to 2^14
        tokens, not compiled. What it leaves out is what the paper compares: sizes, long contexts,
        bfloat16, the GPU's FlashAttention, the fused kernel.

Timed: the hidden states of all tokens in one pass (batch 1, no cache, no gradient), then all their
logits, in chunks that are thrown away. Both models do the same. After 2 passes that do not count:
mean and standard deviation over --repeats. Ratios are the Transformer's time over Multiscreen's:
x_flash with the flash backend, x_fastest with the fastest of flash, cuDNN, efficient and math. math
keeps T x T scores in memory and is timed up to T = 2^12.

The paper prints no latency in its text; its figures, from an RTX 4090, are images.
"""
if not __package__:
    raise SystemExit("error: run python -m experiments.latency in the folder above")

import statistics
from pathlib import Path

import torch

from baselines import count_parameters
from baselines.transformer import SIZES
from experiments.common import Progress, pyplot, report, save_figure
from experiments.style import WIDTH, legend_below, look, millions_axis
from experiments.timing import BACKENDS, get_cells, ratios, time_cell
from support.cli import Parser, UsageError, check_writable, cli, get_device

COLUMNS = ("model", "parameters", "setting", "length", "ms", "std_ms", "repeats", "x_flash",
           "x_fastest", "fastest")


def read_flags():
    """(arguments with the defaults of the device filled in, device)."""
    p = Parser(__doc__)
    group = p.add_mutually_exclusive_group()
    group.add_argument("--psi", type=int, nargs="+",
                       help="Multiscreen's sizes [8 16 32 48; CPU: 8]")
    group.add_argument("--ckpt", nargs="+",
                       help="in place of --psi: trained models, with their windows")
    p.add_argument("--transformer", nargs="+",
                   help="sizes of the Transformers, one for each Multiscreen "
                   "[8M 45M 353M 1.3B; CPU: 8M]")
    p.add_argument("--lengths", type=int, nargs="+",
                   help="tokens of the context [2^10 .. 2^17; CPU: 2^10 .. 2^14]")
    p.add_argument("--repeats", type=int, help="passes that count (paper: 100) [10; CPU: 3]")
    p.add_argument("--compile", action="store_true",
                   help="torch.compile the layers of both models (needs a C++ compiler on a CPU)")
    p.add_argument("--out", default="out/latency", help="folder [out/latency]")
    p.add_shared("--device", "--force")
    args = p.parse_args()
    device = get_device(args.device)
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"--device {args.device}: take cpu or cuda")

    cuda = device.type == "cuda"
    args.psi = args.psi or ([8, 16, 32, 48] if cuda else [8])
    args.transformer = args.transformer or (list(SIZES) if cuda else ["8M"])
    args.lengths = sorted(set(args.lengths or [2**n for n in range(10, 18 if cuda else 15)]))
    if args.repeats is None:
        args.repeats = 10 if cuda else 3
    if args.lengths[0] < 1 or args.repeats < 1:
        raise UsageError("--lengths and --repeats must be at least 1")
    if len(args.ckpt or args.psi) != len(args.transformer):
        raise UsageError(f"{len(args.ckpt or args.psi)} Multiscreens, {len(args.transformer)} of "
                         "--transformer: give as many of each")
    return args, device


def describe(args, device, screening):
    """The title of the table: what was timed, where."""
    machine = f"CPU, {torch.get_num_threads()} threads: not the paper's comparison"
    dtype = "float32"
    if device.type == "cuda":
        machine, dtype = torch.cuda.get_device_name(device), "bfloat16"
    compiled = ", compiled" if args.compile else ""
    untrained = "the Transformer untrained" if args.ckpt else "untrained models"
    return ("One forward pass, batch 1, no cache: all hidden states at once, then all logits in "
            "chunks that are thrown away\n"
            f"{machine}; {dtype}{compiled}; screening by {screening}; random tokens, {untrained}; "
            "x_: the Transformer's time over Multiscreen's")


def draw_latency(plt, rows, last, T_train, path):
    """Latency by length for the models `last`, and by size at the longest length if more are there.

    rows: dicts of COLUMNS; T_train: of trained models, or None.
    """
    longest = max(row["length"] for row in rows)
    panels = [("length", "context (tokens)", [row for row in rows if row["model"] in last])]
    if len(panels[0][2]) < len(rows):
        panels.append(("parameters", f"parameters (millions), at {longest:,} tokens",
                       [row for row in rows if row["length"] == longest]))
    fig, axes = plt.subplots(1, len(panels), figsize=(WIDTH, 4.8), sharey=True, squeeze=False,
                             layout="constrained")
    for ax, (x, xlabel, shown) in zip(axes[0], panels):
        for n, setting in enumerate(dict.fromkeys(row["setting"] for row in rows)):
            line = [row for row in shown if row["setting"] == setting and row["ms"] is not None]
            if line:
                kind, ls = ("Transformer", "--") if setting in BACKENDS else ("Multiscreen", "-")
                ax.errorbar([row[x] for row in line], [row["ms"] for row in line],
                            [row["std_ms"] or 0 for row in line], capsize=3, ms=5,
                            label=f"{kind}, {setting}", **look(n) | {"ls": ls})
        millions_axis(plt, ax)
        ax.set(xlabel=xlabel, yscale="log")
    axes[0, 0].set_xscale("log", base=2)
    axes[0, 0].set_ylabel("latency of one forward pass (ms)")
    if T_train:
        axes[0, 0].axvline(T_train, color="black", ls=":", lw=1.5, label="training length")
    legend_below(fig, axes[0, 0])
    save_figure(fig, path)


def main():
    args, device = read_flags()
    table = Path(args.out) / "latency.tsv"
    check_writable(table, args.force)
    cells, screening = get_cells(args, device)
    title = describe(args, device, screening)
    print(title)

    # If you stop the run, the finished rows are kept.
    rows, progress = [], Progress(sum(cell.length for cell in cells))
    transformer = {}                                   # (name, length): {backend: ms}
    try:
        for cell in cells:
            times, why = time_cell(cell, device, args.repeats)
            ms = statistics.mean(times) if times else None
            std = statistics.stdev(times) if len(times) > 1 else None
            by_backend = transformer.setdefault((cell.baseline, cell.length), {})
            is_attention = cell.setting in BACKENDS
            if is_attention and times:
                by_backend[cell.setting] = ms
            parameters, _ = count_parameters(cell.model)
            rows.append([cell.label, parameters, cell.setting, cell.length, ms, std,
                         len(times) or None, *ratios(None if is_attention else ms, by_backend)])
            found = f"{ms:.4g} ms" if times else f"- ({why})"
            progress.add(cell.length,
                         f"{cell.label}, {cell.setting}, {cell.length} tokens: {found}")
    finally:
        if rows:
            report(table, COLUMNS, rows, title)
    if plt := pyplot():
        last = cells[-1]
        draw_latency(plt, [dict(zip(COLUMNS, row)) for row in rows], (last.label, last.baseline),
                     last.T_train if args.ckpt else None, table.with_suffix(".png"))


if __name__ == "__main__":
    cli(main)
