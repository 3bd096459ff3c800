"""How long one forward pass over a long context takes (section "Inference Latency", appendix "Latency Impact of
Screening-Window Expansion"): Multiscreen, the same with SWE, and the Transformer, over context lengths and over sizes.

Paper:  python -m experiments.latency --repeats 100 --ckpt out/scaling_paper/multiscreen_psi{8,16,32,48}-0/ckpt.pt
GPU:    python -m experiments.latency --compile
        bfloat16 products, vocabulary 50257: Psi = 8, 16, 32, 48 and the Transformers 8M to 1.3B at 2^17 tokens, the last two
        from 2^10 on. Without --compile each elementwise operation, of both models, is a launch and a pass through memory of
        its own. Weights are random, which does not matter: no product is skipped because a relevance is 0. The windows do:
        `initial` (at most 257), and `trained-like`, a guess (70 % of the tiles log-uniform in 2 .. 128, 25 % in
        256 .. 4096, 5 % in 4096 .. 65536), without which SWE would change nothing.
Small:  python -m experiments.latency                 (without a GPU, 2 minutes on 2 cores)
        Psi = 8 and 8M, vocabulary 257, float32, 2^10 to 2^14 tokens, not compiled.
        It leaves out what the paper compares: sizes, long contexts, bfloat16, the GPU's FlashAttention, the fused kernel.

Timed: the hidden states of all tokens in one pass (batch 1, no cache, no gradient), then all their logits, in chunks that
are thrown away; the same for both. 2 passes do not count, then mean and standard deviation over --repeats. Ratios are the
Transformer's time over Multiscreen's: x_flash with the flash backend, x_fastest with the fastest of flash, cuDNN, efficient
and math (T x T scores in memory: up to T = 2^12 only).

The paper prints no latency in its text (its figures, from an RTX 4090, are images). Targets of this implementation on an
H200 with initial windows, NOT MEASURED YET: Psi = 48 at 2^17 tokens 8 times as fast as the 1.3B Transformer with flash
(stretch: 10) and 5 times with the fastest backend; at each length up to 2^12 at least 0.9 times.
"""
import statistics
import time
import warnings
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend

import abcdigits
import train
from experiments.common import Progress, check_writable, pyplot, report, save_figure
from experiments.transformer import SIZES
from train import Parser, UsageError, cli

BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION,
            "efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH}
COLUMNS = ("model", "parameters", "setting", "length", "ms", "std_ms", "repeats", "x_flash", "x_fastest", "fastest")


def trained_like(n, seed=0):
    """n shuffled windows (n,), log-uniform: 5 % (at least one) in 4096 .. 65536, 25 % in 256 .. 4096, the rest in 2 .. 128."""
    rng = torch.Generator().manual_seed(seed)
    far, middle = max(round(0.05 * n), 1), round(0.25 * n)
    bounds = torch.tensor([(4096.0, 65536.0)] * far + [(256.0, 4096.0)] * middle + [(2.0, 128.0)] * (n - far - middle))
    low, high = bounds[torch.randperm(n, generator=rng)].log().T
    return (low + (high - low) * torch.rand(n, generator=rng)).exp()


@torch.no_grad()
def prepare(model, setting, trained_length):
    """Put a model into a setting, in place: the backend of its attention, or its windows; SWE expands those that are there."""
    if setting in BACKENDS:
        model.screen = BACKENDS[setting]
    elif setting.endswith("SWE"):
        model.expand_windows(trained_length)
    elif setting == "trained-like":
        sizes = [len(tile.s_w) for tile in model.layers]
        for tile, w in zip(model.layers, trained_like(sum(sizes)).split(sizes)):
            tile.s_w.copy_((w - 1).log())


@torch.no_grad()
def forward_pass(model, tokens):
    """Hidden states of the whole context at once, then all logits, at most 2^29 of them at a time. tokens: (1, T)"""
    for x in model.hidden(tokens, chunk=tokens.shape[1]).split(max(2**29 // model.config.vocab_size, 1), 1):
        model.logits(x)


def measure(run, device, repeats, excuse_backend=False):
    """([milliseconds of each run() that counts], None), or ([], the reason) for want of memory, or of a backend if excused."""
    wait = (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else lambda: None
    times = []
    try:
        with warnings.catch_warnings(action="ignore"):             # PyTorch warns at length of a backend it cannot use
            for _ in range(2 + repeats):
                wait()
                began = time.perf_counter()
                run()
                wait()                                             # until the last kernel has finished
                times.append((time.perf_counter() - began) * 1e3)
        return times[2:], None
    except (RuntimeError, MemoryError) as e:
        if not (excuse_backend or isinstance(e, (torch.OutOfMemoryError, MemoryError)) or "allocate memory" in str(e)):
            raise
        return [], (str(e) or "out of memory").splitlines()[0]


def ratios(ms, transformer):
    """[x_flash, x_fastest, fastest]: how many times as fast as a Transformer, from its ms by backend; None where unknown."""
    if ms is None or not transformer:
        return [None, None, None]
    fastest = min(transformer, key=transformer.get)
    return [transformer["flash"] / ms if "flash" in transformer else None, transformer[fastest] / ms, fastest]


def build(name, config, device):
    """A model with random weights, bfloat16 products on a GPU."""
    with device:
        model = train.build_model(name, config, torch.bfloat16 if device.type == "cuda" else None)
    if train.screens(model):
        model.screen, *_ = train.get_screen("auto", device, model.config, model.dtype)
    return model


def draw(plt, rows, last, trained_length, path):
    """Latency over the length for the models `last` and, if there are more, over the size at the longest length."""
    longest = max(row[3] for row in rows)
    fig, axes = plt.subplots(1, 1 + any(row[0] not in last for row in rows), figsize=(10, 4.5), squeeze=False)
    for ax, x, wanted in zip(axes[0], (3, 1), (lambda row: row[0] in last, lambda row: row[3] == longest)):
        for n, setting in enumerate(dict.fromkeys(row[2] for row in rows)):
            kind, style = ("Transformer", "s:") if setting in BACKENDS else ("Multiscreen", "o-")
            if line := [(row[x], row[4], row[5] or 0) for row in rows if wanted(row) and row[2] == setting and row[4] is not None]:
                ax.errorbar(*zip(*line), fmt=style, color=f"C{n}", capsize=3, label=f"{kind}, {setting}")
        ax.set(xlabel=f"parameters (at {longest} tokens)", ylabel="latency of one forward pass (ms)", xscale="log", yscale="log")
    axes[0, 0].set_xlabel("length of the context (tokens)")
    axes[0, 0].set_xscale("log", base=2)
    if trained_length:
        axes[0, 0].axvline(trained_length, color="black", ls="--", lw=1, label="training length")
    axes[0, 0].legend(fontsize=8)
    save_figure(fig, path)


def main():
    p = Parser(__doc__)
    p.add_argument("--psi", type=int, nargs="+", help="Multiscreen's sizes [8 16 32 48; CPU: 8]")
    p.add_argument("--ckpt", nargs="+", help="in place of --psi: trained models, with their windows")
    p.add_argument("--transformer", nargs="+", help="one to compare each with [8M 45M 353M 1.3B; CPU: 8M]")
    p.add_argument("--lengths", type=int, nargs="+", help="tokens of the context [2^10 .. 2^17; CPU: 2^10 .. 2^14]")
    p.add_argument("--repeats", type=int, help="passes that count (paper: 100) [10; CPU: 3]")
    p.add_argument("--compile", action="store_true", help="torch.compile each layer of both models (needs a C++ compiler on a CPU)")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    p.add_argument("--out", default="out/latency", help="folder [out/latency]")
    args = p.parse_args()
    device = train.get_device(args.device)
    cuda = device.type == "cuda"
    sources = args.ckpt or args.psi or ([8, 16, 32, 48] if cuda else [8])
    sizes = args.transformer or (list(SIZES) if cuda else ["8M"])
    lengths = sorted(set(args.lengths or [2**n for n in range(10, 18 if cuda else 15)]))
    repeats = (10 if cuda else 3) if args.repeats is None else args.repeats
    if lengths[0] < 1 or repeats < 1 or len(sources) != len(sizes) or device.type not in ("cpu", "cuda") or args.ckpt and args.psi:
        raise UsageError("lengths and --repeats are at least 1, --device is cpu or cuda, --psi or --ckpt, and each model its --transformer")
    path, rows, plt = Path(args.out) / "latency.tsv", [], pyplot()
    check_writable(path)
    backends = list(BACKENDS) if cuda else ["flash", "math"]       # a CPU has no others
    windows = ["trained", "trained + SWE"] if args.ckpt else ["initial", "trained-like", "trained-like + SWE"]
    if args.compile:                                               # a graph for each size and backend, and never eager unseen
        torch._dynamo.config.recompile_limit, torch._dynamo.config.fail_on_recompile_limit_hit = 64, True
    cells = []                                                     # one for each row of the table; of smaller models the longest only
    for source, size in zip(sources, sizes):
        if args.ckpt:
            model, _, ckpt = abcdigits.load(source, device)
            label, trained_length = source, ckpt["args"]["seq_len"]
            if not train.screens(model):
                raise UsageError(f"{source} is a {ckpt['model']}: --ckpt takes Multiscreen's, --transformer the size of the other")
        else:
            model = build("multiscreen", {"psi": source, "vocab_size": 50257 if cuda else 257}, device)
            label, trained_length = f"Psi = {source}", 2**12
        baseline = f"transformer:{size.removeprefix('transformer:')}"
        other = build(baseline, {"vocab_size": model.config.vocab_size}, device)
        for layer in (*model.layers, *other.layers) if args.compile else ():
            layer.compile(dynamic=True)                            # one graph for all its layers and lengths
        used = lengths if source == sources[-1] else lengths[-1:]
        cells += [(baseline, other, b, T, baseline, None) for b in backends for T in used if b != "math" or T <= 2**12]
        cells += [(label, model, setting, T, baseline, trained_length) for setting in windows for T in used]
    machine = torch.cuda.get_device_name(device) if cuda else f"CPU, {torch.get_num_threads()} threads: not the paper's comparison"
    title = ("One forward pass, batch 1, no cache: all hidden states at once, then all logits in chunks that are thrown away\n"
             f"{machine}; {'bfloat16' if cuda else 'float32'}{', compiled' if args.compile else ''}; screening by {model.screen.__module__}.{model.screen.__name__}; random tokens"
             f"{', the Transformer untrained' if args.ckpt else ', untrained models'}; x_: the Transformer's time over Multiscreen's")
    print(title)

    progress, transformer = Progress(sum(cell[3] for cell in cells)), {}          # transformer: {(baseline, T): {backend: ms}}
    try:
        for label, model, setting, T, baseline, trained_length in cells:
            prepare(model, setting, trained_length)
            n, of_backends = model.config.vocab_size, transformer.setdefault((baseline, T), {})
            times, why = measure(lambda: forward_pass(model, torch.randint(n, (1, T), device=device)), device, repeats, setting in BACKENDS)
            ms, std = statistics.mean(times) if times else None, statistics.stdev(times) if len(times) > 1 else None
            if setting in BACKENDS and times:
                of_backends[setting] = ms
            x = ratios(None if setting in BACKENDS else ms, of_backends)
            rows.append([label, sum(p.numel() for p in model.parameters()), setting, T, ms, std, len(times) or None, *x])
            progress.add(T, f"{label}, {setting}, {T} tokens: {f'{ms:.4g} ms' if times else f'- ({why})'}")
    finally:                                                       # a run that is stopped keeps what it has
        if rows:
            report(path, COLUMNS, rows, title)
    if plt:
        draw(plt, rows, (label, baseline), args.ckpt and trained_length, path.with_suffix(".png"))


if __name__ == "__main__":
    cli(main)
