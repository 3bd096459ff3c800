"""How long one forward pass over a long context takes (section "Inference Latency").

Multiscreen, the same with SWE, and the Transformer, over context lengths and over sizes. Appendix:
"Latency Impact of Screening-Window Expansion".

Paper:  python -m experiments.latency --repeats 100 --compile
        bfloat16 products, vocabulary 50257. Psi = 8, 16, 32, 48 and the Transformers 8M to 1.3B at
        2^17 tokens, the last two from 2^10 on. Without --compile each elementwise operation of
        both models is its own launch and pass through memory. Weights are random: a
        relevance of 0 takes as long as any other, so only the windows matter. `initial` ones are 2
        to 257 tokens. `trained-like` ones are a guess: 70 % of the tiles log-uniform in 2 .. 128,
        25 % in 256 .. 4096, 5 % in 4096 .. 65536. SWE changes only the last ones. --ckpt takes a
        trained model's windows.
Small:  python -m experiments.latency
        Without a GPU, 3 minutes on 2 cores: Psi = 8 and 8M, vocabulary 257, float32, 2^10 to 2^14
        tokens, not compiled. What it leaves out is what the paper compares: sizes, long contexts,
        bfloat16, the GPU's FlashAttention, the fused kernel.

The last Multiscreen and the last Transformer are timed at all lengths, the others at the longest.
Each time is a row of latency.tsv in --out. Rerun the command to time what is missing on this
machine. `python -m experiments.latency_curves` draws such a table.

Timed: the hidden states of all tokens in one pass (batch 1, no cache, no gradient), then all their
logits, in chunks that are thrown away. Both models do the same. The column ms has the time of each
of --repeats passes, after 2 to warm up. The Transformer is timed with each backend of attention;
math keeps T x T scores in memory and is timed up to T = 2^12.

The paper prints no latency in its text; its figures, from an RTX 4090, are images.
"""
import statistics
import time
import warnings
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend

from baselines import count_parameters
from baselines.transformer import SIZES, attention_by
from experiments.common import with_deviation
from support.checkpoint import load_for_evaluation, require_windows, weights_hash
from support.choose import compile_layers, products_dtype
from support.cli import Parser, UsageError, cli, get_device, own_folder
from support.table import RUN, Progress, Table, describe_run, print_table
from support.timing import code_hash, forward_pass, random_model, set_trained_like

BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION,
            "efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH}
CPU_BACKENDS = ("flash", "math")
SETTINGS = ("initial", "trained-like", "trained-like + SWE")
KEYS = (*RUN, "setting", "length", "machine", "repeats")
SHOWN = ("model", "parameters", "setting", "length", "ms", "std")


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
    p.add_argument("--repeats", type=int, help="timed passes (paper: 100) [10; CPU: 5]")
    p.add_argument("--compile", action="store_true",
                   help="torch.compile the layers of both models (needs a C++ compiler on a CPU)")
    p.add_argument("--out", type=own_folder,
                   help="folder [out/latency, or that of the checkpoint]")
    p.add_shared("--device")
    args = p.parse_args()
    device = get_device(args.device)
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"--device {args.device}: take cpu or cuda")

    cuda = device.type == "cuda"
    trained = args.ckpt is not None
    args.out = args.out or (Path(args.ckpt).parent if trained else Path("out/latency"))
    args.psi = [*dict.fromkeys(args.psi or ([8, 16, 32, 48] if cuda else [8]))]
    args.transformer = [*dict.fromkeys(args.transformer or (list(SIZES) if cuda else ["8M"]))]
    args.lengths = sorted(set(args.lengths or [2**n for n in range(10, 18 if cuda else 15)]))
    if args.repeats is None:
        args.repeats = 10 if cuda else 5
    if not 1 <= args.lengths[0] <= args.lengths[-1] <= 2**24 or args.repeats < 1:
        raise UsageError("--lengths must be from 1 to 2^24 tokens, and --repeats at least 1")
    if max(args.psi) > 2**10:
        raise UsageError(f"--psi {max(args.psi)}: at most 2^10")
    return args, device


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
        model.screen = attention_by(BACKENDS[setting])
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
        no_memory = isinstance(e, (torch.OutOfMemoryError, MemoryError))
        if not (setting in BACKENDS or no_memory or "allocate memory" in str(e)):
            raise
        return None, (str(e) or "out of memory").splitlines()[0]


def main():
    args, device = latency_args()
    trained, T_train, settings = "", 2**12, SETTINGS
    attending = random_models([(f"transformer:{size.removeprefix('transformer:')}", None)
                               for size in args.transformer], device)
    if args.ckpt is not None:
        model, _, ckpt = load_for_evaluation(args.ckpt, device)
        require_windows(model, args.ckpt, ckpt["model"])
        trained, T_train = f"{weights_hash(ckpt)}-", ckpt["args"]["seq_len"]
        screening, settings = [(model, describe_run(ckpt))], ("trained", "trained + SWE")
    else:
        screening = random_models([("multiscreen", psi) for psi in args.psi], device)
    if args.compile:
        for model, _ in attending + screening:
            compile_layers(model)

    machine, lengths = machine_of(args, device), args.lengths
    about = {"machine": machine, "repeats": args.repeats}
    backends = BACKENDS if device.type == "cuda" else CPU_BACKENDS
    timed = [*cells_of(attending, backends, lengths, about),
             *cells_of(screening, settings, lengths, about)]
    cells = [cell for _, cell in timed]
    table = Table(args.out / "latency.tsv", KEYS, ["ms"], trained + code_hash())
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

    rows = [with_deviation(row) for row in table.rows_of(cells)]
    print_table(SHOWN, [[row[name] for name in SHOWN] for row in rows],
                "One forward pass, batch 1, no cache: all hidden states at once, then all logits "
                f"in chunks that are thrown away\n{machine}; random tokens; {table.path}")


if __name__ == "__main__":
    cli(main)
