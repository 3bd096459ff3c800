"""How long one forward pass over a long context takes (section "Inference Latency").

Multiscreen, with and without SWE, and the Transformer, by context length and by size. Appendix:
"Latency Impact of Screening-Window Expansion".

Paper:  python -m experiments.latency --repeats 100 --compile
        bfloat16 products, vocabulary 50257. Psi = 8, 16, 32, 48 and the Transformers 8M to 1.3B at
        2^17 tokens, the last two from 2^10 on. Without --compile each elementwise operation of
        both models is its own launch and pass through memory. Weights are random: a relevance of 0
        takes as long as any other, so only the windows matter. `initial` windows are 2 to 257
        tokens. `trained-like` windows are a guess: 70 % of the tiles log-uniform in 2 .. 128, 25 %
        in 256 .. 4096, 5 % in 4096 .. 65536. SWE changes only the last 5 %. --ckpt uses the windows
        of a trained model.
Small:  python -m experiments.latency
        Without a GPU, 3 minutes on 2 cores: Psi = 8 and 8M, vocabulary 257, float32, 2^10 to 2^14
        tokens, not compiled. What it leaves out is what the paper compares: sizes, long contexts,
        bfloat16, the GPU's FlashAttention, the fused kernel.

The last Multiscreen and the last Transformer are timed at all lengths, the others at the longest.
Each time is a row of latency.tsv beside the figure, latency.png. Existing rows of this machine are
reused; interrupted work resumes.

    python -m experiments.latency out/latency/latency.tsv

draws the table again and times nothing. The column x_transformer is the time of the Transformer
beside a Multiscreen, with its fastest backend, over Multiscreen's; x_std is its deviation, from
those of both times. By size, the n-th Multiscreen is beside the n-th Transformer. If a table has
several machines, the last one is drawn. Bars are standard deviations over the passes.

Timed: the hidden states of all tokens in one pass (batch 1, no cache, no gradient), then all their
logits, in chunks that are thrown away. Both models do the same. The column ms has the time of each
of --repeats passes, after 2 to warm up. The Transformer is timed with each backend of attention;
math keeps T x T scores in memory and is timed up to T = 2^12.

The paper prints no latency in its text; its figures, from an RTX 4090, are images.
"""
import math
import statistics
import time
import warnings
from pathlib import Path

import torch

from baselines import count_parameters
from baselines.transformer import SIZES, attention_by
from experiments.common import add_tables, get_figure, mean_and_std, pyplot, save_figure
from experiments.style import WIDTH, look, millions_axis, paper_name, plain_axis
from support.checkpoint import load_for_evaluation, require_windows, weights_hash
from support.cli import Parser, UsageError, cli, get_device, is_out_of_memory, products_dtype
from support.compiled import compile_model
from support.table import RUN, Progress, Table, beside, describe_run, print_table
from support.timing import BACKENDS, code_hash, forward_pass, random_model, set_trained_like

CPU_BACKENDS = ("flash", "math")
SETTINGS = ("initial", "trained-like", "trained-like + SWE")
KEYS = (*RUN, "setting", "length", "machine", "repeats")
COLUMNS = ("model", "parameters", "setting", "length", "ms", "std", "x_transformer", "x_std")


def get_parser():
    p = Parser(__doc__)
    add_tables(p, "*")
    group = p.add_mutually_exclusive_group()
    group.add_argument("--psi", type=int, nargs="+",
                       help="Multiscreen's sizes [8 16 32 48; CPU: 8]")
    group.add_argument("--ckpt", help="a trained model with its windows, in place of --psi")
    p.add_argument("--transformer", nargs="+",
                   help="sizes of the Transformers [8M 45M 353M 1.3B; CPU: 8M]")
    p.add_argument("--lengths", type=int, nargs="+",
                   help="tokens of the context [2^10 .. 2^17; CPU: 2^10 .. 2^14]")
    p.add_argument("--repeats", type=int, help="timed passes (paper: 100) [10; CPU: 5]")
    p.add_argument("--compile", action="store_true",
                   help="torch.compile the layers of both models (needs a C++ compiler on a CPU)")
    p.add_shared("--device")
    return p


def fill_in(args):
    """Give the arguments the defaults of their device. Returns the device."""
    device = get_device(args.device)
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"--device {args.device}: use cpu or cuda")

    cuda = device.type == "cuda"
    args.psi = [*dict.fromkeys(args.psi or ([8, 16, 32, 48] if cuda else [8]))]
    args.transformer = [*dict.fromkeys(args.transformer or (list(SIZES) if cuda else ["8M"]))]
    args.lengths = sorted(set(args.lengths or [2**n for n in range(10, 18 if cuda else 15)]))
    if args.repeats is None:
        args.repeats = 10 if cuda else 5
    if not 1 <= args.lengths[0] <= args.lengths[-1] <= 2**24 or args.repeats < 1:
        raise UsageError("--lengths must be from 1 to 2^24 tokens, and --repeats at least 1")
    if max(args.psi) > 2**10:
        raise UsageError(f"--psi {max(args.psi)}: use at most 2^10")
    return device


def machine_of(args, device):
    """What the times depend on, besides the model and the code."""
    machine = f"CPU, {torch.get_num_threads()} threads, float32"
    if device.type == "cuda":
        dtype = products_dtype(device) or torch.float32
        machine = f"{torch.cuda.get_device_name(device)}, {str(dtype)[6:]}"
    return f"{machine}{', compiled' if args.compile else ''}, torch {torch.__version__}"


# ----------------------------------------------------------------------------------- models

def random_models(names, device):
    """[(model, columns of RUN)] with random weights. names: [(name, psi or None)]"""
    vocab_size = 50257 if device.type == "cuda" else 257
    found = []
    for name, psi in names:
        model = random_model(name, {"psi": psi, "vocab_size": vocab_size}, device)
        parameters, _ = count_parameters(model)
        run = dict.fromkeys(RUN) | {"model": name, "parameters": parameters, "seed": 0, "step": 0}
        found.append((model, run))
    return found


def cells_of(models, settings, lengths, about):
    """(model, cell) in the table's order: the last model at all lengths, others at the longest.

    models: [(model, columns of RUN)]; about: the columns that all cells share.
    """
    for model, run in models:
        for setting in settings:
            for length in lengths if model is models[-1][0] else lengths[-1:]:
                if setting != "math" or length <= 2**12:
                    yield model, run | about | {"setting": setting, "length": length}


@torch.no_grad()
def apply_setting(model, setting, T_train):
    """Put a model into a setting, in place: the backend of its attention, or its windows.

    SWE expands those it has; "initial" and "trained" leave them as they are.
    """
    if setting in BACKENDS:
        for layer in model.layers:
            layer.attend = attention_by(BACKENDS[setting])
    if setting.startswith("trained-like"):
        set_trained_like(model)
    if setting.endswith("SWE"):
        model.expand_windows(T_train)


# ---------------------------------------------------------------------------------- timing

def time_passes(model, setting, length, device, repeats):
    """(milliseconds of each pass after 2 to warm up, None), or (None, why not).

    The reason is a lack of memory, or a backend of attention that cannot run here.
    """
    def now():
        """Milliseconds, when the last kernel has finished."""
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return 1e3 * time.perf_counter()

    times = []
    try:
        # PyTorch warns at length about a backend that it cannot use.
        with warnings.catch_warnings(action="ignore"):
            for _ in range(2 + repeats):
                tokens = torch.randint(model.config.vocab_size, (1, length), device=device)
                began = now()
                forward_pass(model, tokens)
                times.append(now() - began)
        return times[2:], None
    except (RuntimeError, MemoryError) as e:
        if setting not in BACKENDS and not is_out_of_memory(e):
            raise
        return None, (str(e) or "out of memory").splitlines()[0]


def measure(args):
    """Time what is missing. Returns (the rows that args ask for, path of their figure)."""
    device = fill_in(args)
    trained, T_train, settings = "", 2**12, SETTINGS
    attending = random_models([(f"transformer:{size.removeprefix('transformer:')}", None)
                               for size in args.transformer], device)
    if args.ckpt is not None:
        model, _, ckpt = load_for_evaluation(args.ckpt, device)
        require_windows(model, args.ckpt, ckpt["model"])
        trained, T_train = f"{weights_hash(ckpt)}-", ckpt["args"]["seq_len"]
        screening, settings = [(model, describe_run(ckpt))], ("trained", "trained + SWE")
        out = beside(args.ckpt, "latency.png")
    else:
        screening = random_models([("multiscreen", psi) for psi in args.psi], device)
        out = Path("out/latency/latency.png")
    if args.compile:
        for model, _ in attending + screening:
            compile_model(model)

    machine, lengths = machine_of(args, device), args.lengths
    about = {"machine": machine, "repeats": args.repeats}
    backends = BACKENDS if device.type == "cuda" else CPU_BACKENDS
    timed = [*cells_of(attending, backends, lengths, about),
             *cells_of(screening, settings, lengths, about)]
    cells = [cell for _, cell in timed]
    out = args.out or out
    table = Table(out.with_suffix(".tsv"), KEYS, ["ms"], trained + code_hash())
    missing = table.missing(cells)
    progress = Progress(sum(cell["length"] for cell in missing))
    with table.measuring():
        for model, cell in timed:
            if cell in missing:
                setting, length = cell["setting"], cell["length"]
                apply_setting(model, setting, T_train)
                times, why = time_passes(model, setting, length, device, args.repeats)
                if times:
                    table.add(cell, ms=" ".join(f"{ms:.6g}" for ms in times))
                progress.add(length, f"{cell['model']}, {setting}, {length} tokens: "
                             f"{why or f'{statistics.mean(times):.4g} ms'}")

    rows = table.rows_of(cells)
    if not rows:
        raise UsageError("nothing could be timed, for the reasons above")
    return rows, out


# ----------------------------------------------------------------------------------- figure

def is_transformer(row):
    return row["model"].startswith("transformer")


def latency_rows(rows):
    """The rows of the last machine, with COLUMNS, numbers as numbers. rows: of latency.tsv"""
    last, sizes, found = rows[-1], {True: set(), False: set()}, []
    for row in rows:
        if (row["machine"], row["repeats"]) == (last["machine"], last["repeats"]):
            mean, std, _ = mean_and_std([float(ms) for ms in row["ms"].split()])
            row = row | {"ms": mean, "std": std, "parameters": int(row["parameters"]),
                         "length": int(row["length"])}
            sizes[is_transformer(row)].add(row["parameters"])
            found.append(row)
    other_size = dict(zip(sorted(sizes[False]), sorted(sizes[True])))
    for row in found:
        row |= {"x_transformer": None, "x_std": None}
        size = None if is_transformer(row) else other_size.get(row["parameters"])
        peers = [peer for peer in found if is_transformer(peer)
                 and (peer["parameters"], peer["length"]) == (size, row["length"])]
        if peers:
            fastest = min(peers, key=lambda peer: peer["ms"])
            ratio = fastest["ms"] / row["ms"]
            relative = [x["std"] / x["ms"] for x in (fastest, row)]
            row |= {"x_transformer": ratio, "x_std": ratio * math.hypot(*relative)}
    return found


def draw_latency(plt, rows, labels, path):
    """Latency by size at the longest length, if there are several sizes, and by length.

    rows: of latency_rows
    """
    longest = max(row["length"] for row in rows)
    for row in rows:
        row["kind"] = paper_name(row["model"])
        row["label"] = labels[row["model"], str(row["parameters"])]
    short = {row["label"] for row in rows if row["length"] < longest}
    panels = []
    if len(labels) > len({row["kind"] for row in rows}):
        panels.append(("parameters", f"parameters (millions), at {longest:,} tokens", "kind",
                       [row for row in rows if row["length"] == longest]))
    if short or not panels:
        panels.append(("length", "context (tokens)", "label",
                       [row for row in rows if row["label"] in short or not panels]))
    fig, axes = plt.subplots(1, len(panels), figsize=(WIDTH, 5.2), sharey=True, squeeze=False,
                             layout="constrained")
    for ax, (x, xlabel, name, shown) in zip(axes[0], panels):
        lines = {}
        for row in shown:
            lines.setdefault(f"{row[name]}, {row['setting']}", []).append(row)
        for n, (label, line) in enumerate(lines.items()):
            line.sort(key=lambda row: row[x])
            ax.errorbar([row[x] for row in line], [row["ms"] for row in line],
                        [row["std"] for row in line], ms=5, label=label,
                        **look(n) | {"ls": "--" if is_transformer(line[0]) else "-"})
        millions_axis(plt, ax)
        ax.set(xlabel=xlabel, yscale="log")
        plain_axis(plt, ax.yaxis)
        if x == "length":
            ax.set_xscale("log", base=2)
            for T in {int(row["seq_len"]) for row in shown if row["seq_len"]}:
                ax.axvline(T, color="black", ls=":", lw=1.5, label="training length")
        ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=3 - len(panels),
                  frameon=False)
    axes[0, 0].set_ylabel("latency of one forward pass (ms)")
    save_figure(fig, path)


def main():
    rows, out, labels = get_figure(get_parser().parse_args(), "ms", measure)
    rows = latency_rows(rows)
    print_table(COLUMNS, [[row[name] for name in COLUMNS] for row in rows],
                f"One forward pass, batch 1, no cache, milliseconds; {rows[0]['machine']}")
    if plt := pyplot():
        draw_latency(plt, rows, labels, out)


if __name__ == "__main__":
    cli(main)
