"""How long one forward pass over a long context takes (section "Inference Latency").

Multiscreen, the same with SWE, and the Transformer, over context lengths and over sizes. Appendix:
"Latency Impact of Screening-Window Expansion".

Paper:  python -m experiments.latency --repeats 100 \\
            --ckpt out/scaling_paper/multiscreen_psi{8,16,32,48,64}-*/ckpt.pt
        Checkpoints that differ in their seed only are one size, with a bar over the seeds.
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

The n-th Multiscreen stands beside the n-th Transformer, and either may have none; of the largest
pair all lengths are timed. What OUT/results.tsv holds for this machine is not timed again.

Timed: the hidden states of all tokens in one pass (batch 1, no cache, no gradient), then all their
logits, in chunks that are thrown away. Both models do the same. After 2 passes that do not count:
the mean over --repeats. Ratios are the Transformer's time over Multiscreen's:
x_flash with the flash backend, x_fastest with the fastest of flash, cuDNN, efficient and math. math
keeps T x T scores in memory and is timed up to T = 2^12.

The paper prints no latency in its text; its figures, from an RTX 4090, are images.
"""
if not __package__:
    raise SystemExit("error: run python -m experiments.latency in the folder above")

import statistics
from pathlib import Path

import torch

from baselines.transformer import SIZES
from experiments.common import Progress, mean_and_std, pyplot, report, save_figure
from experiments.models import model_of
from experiments.style import WIDTH, legend_below, look, millions_axis, plain_axis, short_number
from experiments.timing import BACKENDS, get_cells, ratios, time_cell
from support.cli import Parser, UsageError, cli, get_device
from support.results import Results, begin, flag, short_hash

COLUMNS = ("model", "parameters", "setting", "length", "ms", "std_ms", "seeds", "x_flash",
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
                   help="sizes of the Transformers [8M 45M 353M 1.3B; CPU: 8M]")
    p.add_argument("--lengths", type=int, nargs="+",
                   help="tokens of the context [2^10 .. 2^17; CPU: 2^10 .. 2^14]")
    p.add_argument("--repeats", type=int, help="passes that count (paper: 100) [10; CPU: 3]")
    p.add_argument("--compile", action="store_true",
                   help="torch.compile the layers of both models (needs a C++ compiler on a CPU)")
    p.add_argument("--out", default="out/latency", help="folder [out/latency]")
    p.add_shared("--device")
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
    return args, device


ROOT = Path(__file__).parent.parent


def machine_of(args, device):
    """What the times depend on, beside the model: the machine, and the code that is timed."""
    machine = f"CPU, {torch.get_num_threads()} threads, float32"
    if device.type == "cuda":
        machine = f"{torch.cuda.get_device_name(device)}, bfloat16"
    names = ("multiscreen", "screening_triton", "baselines/transformer", "experiments/timing")
    code = short_hash(b"".join((ROOT / f"{name}.py").read_bytes() for name in names))
    return (f"{machine}{', compiled' if args.compile else ''}, torch {torch.__version__}, "
            f"code {code}")


def measure(cells, results, machine, device, repeats):
    """Time what is missing; returns {Key: cell}."""
    found = []
    for cell in cells:
        key = cell.key.at(length=cell.length, swe=cell.setting.endswith("SWE"), trials=repeats,
                          item=f"{cell.setting}; {machine}")
        found.append((key, cell))
    begin(results, [(key, cell.weights) for key, cell in found])
    missing = [(key, cell) for key, cell in found if not results.has(key, cell.weights)]
    progress = Progress(sum(cell.length for _, cell in missing))
    for key, cell in missing:
        times, why = time_cell(cell, device, repeats)
        took = f"{statistics.mean(times):.4g} ms" if times else f"- ({why})"
        if times:
            results.add(key, [statistics.mean(times)], cell.weights)
        progress.add(cell.length, f"{cell.label}, {cell.setting}, {cell.length} tokens: {took}")
    return dict(found)


def get_rows(keys, results):
    """Rows of COLUMNS: mean and deviation over the seeds of a model, the Transformers' first."""
    groups, transformer = {}, {}
    for key, cell in keys.items():
        group = groups.setdefault((key.run, key.step, cell.setting, cell.length), (cell, []))
        group[1].extend(results.values.get(key, []))
    rows = []
    for (run, _, setting, length), (cell, times) in groups.items():
        ms, std, _ = mean_and_std(times)
        by_backend = transformer.setdefault((cell.baseline, length), {})
        if setting in BACKENDS and times:
            by_backend[setting] = ms
        is_screening = setting not in BACKENDS and times
        model = model_of(run)
        psi = flag(run, "--psi")
        rows.append([f"Psi = {psi}" if psi else model.name, model.parameters, setting, length,
                     ms if times else None, std if len(times) > 1 else None, len(times) or None,
                     *ratios(ms if is_screening else None, by_backend)])
    return rows


def kind_of(row):
    """The family of a row's model."""
    return "Transformer" if row["setting"] in BACKENDS else "Multiscreen"


def draw_latency(plt, rows, T_train, path):
    """Latency by length for the largest pair, and by size at the longest length if more are there.

    rows: dicts of COLUMNS; T_train: of trained models, or None.
    """
    longest = max(row["length"] for row in rows)
    all_lengths = {row["model"] for row in rows if row["length"] < longest}
    panels = []
    if len({row["model"] for row in rows}) > 2:
        panels.append(("parameters", f"parameters (millions), at {longest:,} tokens",
                       [row for row in rows if row["length"] == longest]))
    if all_lengths:
        shown = [row for row in rows if row["model"] in all_lengths]
        sizes = {kind_of(row): short_number(row["parameters"]) for row in shown}
        names = ", ".join(f"{kind} {size}" for kind, size in sizes.items())
        panels.append(("length", f"context (tokens); {names}", shown))
    fig, axes = plt.subplots(1, max(len(panels), 1), figsize=(WIDTH, 4.8), sharey=True,
                             squeeze=False, layout="constrained")
    for ax, (x, xlabel, shown) in zip(axes[0], panels):
        for n, setting in enumerate(dict.fromkeys(row["setting"] for row in rows)):
            line = [row for row in shown if row["setting"] == setting and row["ms"] is not None]
            if line:
                kind, stds = kind_of(line[0]), [row["std_ms"] or 0 for row in line]
                ax.errorbar([row[x] for row in line], [row["ms"] for row in line],
                            stds if any(stds) else None, capsize=3, ms=5,
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
    args, device = read_flags()
    out, machine = Path(args.out), machine_of(args, device)
    results = Results(out / "results.tsv")
    cells, screening = get_cells(args, device)
    keys = measure(cells, results, machine, device, args.repeats)
    rows = get_rows(keys, results)
    weights = "the Transformer untrained" if args.ckpt else "untrained models"
    report(out / "latency.tsv", COLUMNS, rows,
           "One forward pass, batch 1, no cache: all hidden states at once, then all logits in "
           f"chunks that are thrown away\n{machine}; screening by {screening}; random tokens, "
           f"{weights}; x_: the Transformer's time over Multiscreen's")
    if plt := pyplot():
        draw_latency(plt, [dict(zip(COLUMNS, row)) for row in rows],
                     cells[-1].T_train if args.ckpt else None, out / "latency.png")


if __name__ == "__main__":
    cli(main)
