"""How long one forward pass over a long context takes (section "Inference Latency").

Multiscreen, the same with SWE, and the Transformer, over context lengths and over sizes. Appendix:
"Latency Impact of Screening-Window Expansion".

Paper:  python -m experiments.latency --repeats 100 --compile
        bfloat16 products, vocabulary 50257. Psi = 8, 16, 32, 48 and the Transformers 8M to 1.3B at
        2^17 tokens, the last two from 2^10 on. Without --compile each elementwise operation of
        both models is a launch and a pass through memory of its own. Weights are random: a
        relevance of 0 takes as long as any other, so only the windows matter. `initial` ones are 2
        to 257 tokens. `trained-like` ones are a guess: 70 % of the tiles log-uniform in 2 .. 128,
        25 % in 256 .. 4096, 5 % in 4096 .. 65536. SWE changes the last ones only. --ckpt takes a
        trained model's windows.
Small:  python -m experiments.latency
        Without a GPU, 2 minutes on 2 cores: Psi = 8 and 8M, vocabulary 257, float32, 2^10 to 2^14
        tokens, not compiled. What it leaves out is what the paper compares: sizes, long contexts,
        bfloat16, the GPU's FlashAttention, the fused kernel.

The n-th Multiscreen stands beside the n-th Transformer, and either may have none; of the largest
pair all lengths are timed. Each time is a row of latency.tsv in --out; given again, the command
times what is missing on this machine and draws the figure.

Timed: the hidden states of all tokens in one pass (batch 1, no cache, no gradient), then all their
logits, in chunks that are thrown away. Both models do the same. After 2 passes that do not count:
the mean over --repeats. Ratios are the Transformer's time over Multiscreen's:
x_flash with the flash backend, x_fastest with the fastest of flash, cuDNN, efficient and math. math
keeps T x T scores in memory and is timed up to T = 2^12.

The paper prints no latency in its text; its figures, from an RTX 4090, are images.
"""
if not __package__:
    raise SystemExit("error: run python -m experiments.latency in the folder above")

import hashlib
import itertools
from pathlib import Path

import torch

from baselines.transformer import SIZES
from experiments.common import Progress, print_table, pyplot, save_figure
from experiments.style import WIDTH, legend_below, look, millions_axis, plain_axis, short_number
from experiments.timing import BACKENDS, get_models, get_timed, time_passes
from support.checkpoint import has_windows
from support.choose import compile_layers
from support.cli import Parser, UsageError, cli, get_device
from support.table import RUN, Table

ROOT = Path(__file__).parent.parent
KEYS = (*RUN, "setting", "length", "machine", "repeats")
COLUMNS = ("model", "parameters", "setting", "length", "ms", "x_flash", "x_fastest", "fastest")


def ratios(ms, transformer):
    """[x_flash, x_fastest, fastest]: how many times as fast as a Transformer; None where unknown.

    transformer: its milliseconds by backend.
    """
    if ms is None or not transformer:
        return [None, None, None]
    fastest = min(transformer, key=transformer.get)
    x_flash = transformer["flash"] / ms if "flash" in transformer else None
    return [x_flash, transformer[fastest] / ms, fastest]


def latency_args():
    """(arguments with the defaults of the device filled in, device)."""
    p = Parser(__doc__)
    group = p.add_mutually_exclusive_group()
    group.add_argument("--psi", type=int, nargs="+",
                       help="Multiscreen's sizes [8 16 32 48; CPU: 8]")
    group.add_argument("--ckpt", help="in place of --psi: a trained model, with its windows")
    p.add_argument("--transformer", nargs="+",
                   help="sizes of the Transformers [8M 45M 353M 1.3B; CPU: 8M]")
    p.add_argument("--lengths", type=int, nargs="+",
                   help="tokens of the context [2^10 .. 2^17; CPU: 2^10 .. 2^14]")
    p.add_argument("--repeats", type=int, help="passes that count (paper: 100) [10; CPU: 3]")
    p.add_argument("--compile", action="store_true",
                   help="torch.compile the layers of both models (needs a C++ compiler on a CPU)")
    p.add_argument("--out", type=Path,
                   help="folder [out/latency, or that of the checkpoint]")
    p.add_shared("--device")
    args = p.parse_args()
    device = get_device(args.device)
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"--device {args.device}: take cpu or cuda")

    cuda = device.type == "cuda"
    args.out = args.out or (Path(args.ckpt).parent if args.ckpt else Path("out/latency"))
    args.psi = args.psi or ([8, 16, 32, 48] if cuda else [8])
    args.transformer = args.transformer or (list(SIZES) if cuda else ["8M"])
    args.lengths = sorted(set(args.lengths or [2**n for n in range(10, 18 if cuda else 15)]))
    if args.repeats is None:
        args.repeats = 10 if cuda else 3
    if args.lengths[0] < 1 or args.repeats < 1:
        raise UsageError("--lengths and --repeats must be at least 1")
    return args, device


def machine_of(args, device):
    """What the times depend on, beside the model and the code."""
    machine = f"CPU, {torch.get_num_threads()} threads, float32"
    if device.type == "cuda":
        machine = f"{torch.cuda.get_device_name(device)}, bfloat16"
    return f"{machine}{', compiled' if args.compile else ''}, torch {torch.__version__}"


def code_hash():
    """Twelve digits that change with the code that is timed."""
    names = ("multiscreen", "screening_triton", "baselines/transformer", "support/windowed")
    code = b"".join((ROOT / f"{name}.py").read_bytes() for name in names)
    return hashlib.sha256(code).hexdigest()[:12]


def latency_rows(timed, milliseconds):
    """Rows of COLUMNS as dicts. milliseconds: of each in `timed`, None where it could not run."""
    rows, transformer = [], {}
    for one, ms in zip(timed, milliseconds):
        by_backend = transformer.setdefault((one.pair, one.length), {})
        attends = one.setting in BACKENDS
        if attends and ms is not None:
            by_backend[one.setting] = ms
        row = [one.run["model"], one.run["parameters"], one.setting, one.length, ms,
               *ratios(None if attends else ms, by_backend)]
        rows.append(dict(zip(COLUMNS, row)))
    return rows


def kind_of(row):
    """The family of a row's model."""
    return "Transformer" if row["setting"] in BACKENDS else "Multiscreen"


def draw_latency(plt, rows, T_train, path):
    """Latency by length for the largest pair, and by size at the longest length if more are there.

    rows: dicts of COLUMNS; T_train: of trained models, or None.
    """
    longest = max(row["length"] for row in rows)
    all_lengths = {(row["model"], row["parameters"]) for row in rows if row["length"] < longest}
    panels = []
    if len({(row["model"], row["parameters"]) for row in rows}) > 2:
        panels.append(("parameters", f"parameters (millions), at {longest:,} tokens",
                       [row for row in rows if row["length"] == longest]))
    if all_lengths:
        shown = [row for row in rows if (row["model"], row["parameters"]) in all_lengths]
        sizes = {kind_of(row): short_number(row["parameters"]) for row in shown}
        names = ", ".join(f"{kind} {size}" for kind, size in sizes.items())
        panels.append(("length", f"context (tokens); {names}", shown))
    fig, axes = plt.subplots(1, max(len(panels), 1), figsize=(WIDTH, 4.8), sharey=True,
                             squeeze=False, layout="constrained")
    for ax, (x, xlabel, shown) in zip(axes[0], panels):
        for n, setting in enumerate(dict.fromkeys(row["setting"] for row in rows)):
            line = [row for row in shown if row["setting"] == setting and row["ms"] is not None]
            if line:
                kind = kind_of(line[0])
                ax.plot([row[x] for row in line], [row["ms"] for row in line], ms=5,
                        label=f"{kind}, {setting}",
                        **look(n) | {"ls": "--" if kind == "Transformer" else "-"})
        millions_axis(plt, ax)
        ax.set(xlabel=xlabel, yscale="log")
        plain_axis(plt, ax.yaxis)
        if x == "length":
            ax.set_xscale("log", base=2)
            if T_train:
                ax.axvline(T_train, color="black", ls=":", lw=1.5, label="training length")
    axes[0, 0].set_ylabel("latency of one forward pass (ms)")
    legend_below(fig, axes[0, -1])
    save_figure(fig, path)


def main():
    args, device = latency_args()
    pairs, largest, trained = get_models(args, device)
    if args.compile:
        for model, *_ in itertools.chain(*pairs):
            compile_layers(model)
    timed = get_timed(pairs, largest, args.lengths)
    machine = machine_of(args, device)
    cells = [one.run | {"setting": one.setting, "length": one.length, "machine": machine,
                        "repeats": args.repeats} for one in timed]
    table = Table(args.out / "latency.tsv", KEYS, ["ms"], trained + code_hash())
    missing = table.missing(cells)
    progress = Progress(sum(cell["length"] for cell in missing))
    for cell, one in zip(cells, timed):
        if cell in missing:
            ms, why = time_passes(one, device, args.repeats)
            if ms is not None:
                table.add(cell, ms=f"{ms:.6g}")
            progress.add(one.length, f"{cell['model']}, {one.setting}, {one.length} tokens: "
                         f"{why or f'{ms:.4g} ms'}")

    found = [table.rows_of([cell]) for cell in cells]
    rows = latency_rows(timed, [float(row[0]["ms"]) if row else None for row in found])
    screening = [model.screen for model, *_ in itertools.chain(*pairs) if has_windows(model)]
    print_table(COLUMNS, [row.values() for row in rows],
                "One forward pass, batch 1, no cache: all hidden states at once, then all logits "
                f"in chunks that are thrown away\n{machine}; screening by "
                f"{screening[0].__module__}.{screening[0].__name__}; random tokens; x_: the "
                "Transformer's time over Multiscreen's")
    if plt := pyplot():
        draw_latency(plt, rows, timed[-1].T_train if args.ckpt else None, args.out / "latency.png")


if __name__ == "__main__":
    cli(main)
