"""How long do a training step, a generated token and a long text take, beside a Transformer?

    python -m lab.bench                            what you notice on a laptop
    python -m lab.bench --device cuda              first checks the fused kernel, and times it alone
    python -m lab.bench --device cuda --psi 32 --vocab 50257 --models multiscreen transformer:353M
    python -m lab.bench --what forward --ckpt out/ckpt.pt --lengths 1024 4096 16384

train      a training step, as in train.py, on random tokens
decode     one more token after a context, for each of --lengths
forward    hidden states and logits of a whole text in one pass, for each of --lengths; this is the
           section "Inference Latency" of the paper. `parts` is the sum of its matrix products and
           its screening, or attention, each timed alone: what the pass cannot do without
kernel     on a GPU, for each of --lengths: screening of a layer with psi = 48 by itself, by the
           fused kernel and by PyTorch's FlexAttention, beside attention of the 1.3B Transformer

Multiscreen and the Transformer are compiled alike, or not (--compile, the default on a GPU), and a
small model's training step is recorded as a CUDA graph, as in train.py. The weights are random,
which changes no time: a relevance of 0 takes as long to compute as any other. Only the windows
matter. The `initial` windows have 2 to 257 tokens. The `trained-like` windows are our guess at
trained ones: 70 % of the tiles have windows that are log-uniform in 2 .. 128, 25 % in 256 .. 4096,
and 5 % in 4096 .. 65536. --ckpt times a trained model, too. The models take turns, so that other
work on the machine slows them all alike. Each row is printed and added to --table, out/latency.tsv,
as soon as it is measured; `python -m lab.figures latency` draws the forward passes.

`pytest -q test_multiscreen.py tests/test_kernel.py` tests the compiled kernel on your GPU.
"""
import gc
import math
import statistics
import time
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from multiscreen import softmask, trim
from support import check
from support.cli import DEVICE, Parser, UsageError, at_least, cli, get_device, products_dtype
from support.fast import choose_screen, compile_model, try_to_record
from support.models import build_model, count_parameters, has_windows, recipe
from support.run import load_checkpoint
from support.tables import add_row, print_table
from support.windowed import screen_windowed

COLUMNS = ("model", "parameters", "what", "setting", "length", "machine", "ms", "parts_ms")
ATTENTION = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
# The largest error of a kernel that is right, relative to the length of what is right in a tile, by
# the type of v.
LIMITS = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}


# ----------------------------------------------------------------------------------- the timer

def milliseconds(run, device):
    """The milliseconds that run() takes. On a GPU: until it is idle, with a cold cache."""
    if device.type != "cuda":
        began = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - began)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.zeros(2**28, dtype=torch.uint8, device=device)           # this empties the cache
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def take_turns(runs, device, repeats):
    """Milliseconds of each pass of each function, after one to warm up."""
    times = [[milliseconds(run, device) for run in runs] for _ in range(repeats + 1)]
    return list(zip(*times[1:]))


def report(args, device, times, **row):
    """Print the row of a measurement, and append it to the table. Returns it."""
    machine = f"CPU, {torch.get_num_threads()} threads"
    if device.type == "cuda":
        machine = torch.cuda.get_device_name(device)
    row |= {"machine": f"{machine}, {args.dtype}, torch {torch.__version__}",
            "ms": " ".join(f"{x:.6g}" for x in times)}
    row = {name: row.get(name) for name in COLUMNS}
    add_row(args.table, row)
    print(f"{row['what']} {row['length']} {row['model']} {row['setting']}: "
          f"{statistics.mean(times):.4g} ms", flush=True)
    return row


# ------------------------------------------------------------------------------- is it right?

def draw_inputs(T, w, dtype, device):
    """q, k, v, w, r and dh: a tile for each window in w, v in dtype."""
    return check.draw_case(T, 0, w, [0.5] * len(w), dtype=dtype, device=device)


def check_kernel(screen, device, lengths=(2**12 - 1, 2**15, 2**17)):
    """Compare the kernel with float64. Raises UsageError if it is wrong."""
    for T in lengths:
        for dtype, limit in LIMITS.items():
            inputs = draw_inputs(T, [2.0, 17.5, 256.0, 5000.0, math.inf], dtype, device)
            errors = check.screen_errors(screen, inputs, exact=screen_windowed)
            error = max(tiles.max().item() for tiles in errors.values())
            print(f"kernel, {T} positions, {dtype}: largest error {error:.2g}", flush=True)
            if not error < limit:
                raise UsageError(f"the kernel is wrong on this machine: more than {limit}")
            first, second = (check.value_and_gradients(screen, inputs) for _ in range(2))
            if not all(torch.equal(first[name], second[name]) for name in first):
                raise UsageError("the kernel gives other bits the second time")


# ------------------------------------------------------------------------- screening by itself

def time_kernel(T, device, args):
    """Yield the rows of the part `kernel`: forward and backward by themselves."""
    from screening_triton import screen

    layer = build_model("multiscreen", {"psi": 48, "N_L": 1, "d_E": 1, "vocab_size": 1}).layers[0]
    windows = {"initial": layer.window().tolist(), "trained-like": trained_like(48).tolist(),
               "infinite": [math.inf] * 16}
    ways = {("fused kernel", name): (screen, draw_inputs(T, w, torch.bfloat16, device)[:-1])
            for name, w in windows.items()}
    inputs = draw_inputs(T, windows["initial"], torch.bfloat16, device)[:-1]
    ways["FlexAttention", "initial"] = flex_screen(T, inputs[3]), inputs
    for name in ATTENTION:
        q, k, v = torch.randn(3, 1, 16, T, 128, dtype=torch.bfloat16, device=device)
        ways["attention", name] = attention_by(name), [q, k, v]
    for (name, setting), (function, inputs) in ways.items():
        inputs = [x.requires_grad_() for x in inputs]
        h = function(*inputs)
        dh = torch.randn_like(h)
        runs = {"forward": lambda f=function, x=inputs: f(*x),
                "backward": lambda h=h, x=inputs, dh=dh: torch.autograd.grad(h, x, dh,
                                                                             retain_graph=True)}
        for part, run in runs.items():
            times, = take_turns([run], device, args.repeats)
            yield report(args, device, times, model=name, what=f"kernel, {part}", setting=setting,
                         length=T)


def flex_screen(T, w):
    """Stock PyTorch's way to screen: a function (q, k, v, w, r). T: a multiple of 128.

    A softmax of log alpha_d is alpha_d over its sum, and exp(lse) is that sum: relevances are at
    least 0, so the product of the two is Eq. 12. Below 1e-30 a relevance counts as 1e-30. q and k
    are cast to v's dtype, as FlexAttention requires. The block mask is made here, once, from the
    windows w (H,): while they are trained it must be made again after each step.
    """
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    edges, make, flex = w.detach(), create_block_mask, flex_attention
    if w.is_cuda:
        make, flex = (torch.compile(f, dynamic=False) for f in (make, flex))
        torch._functorch.config.donated_buffer = False  # backward is timed again and again

    def inside(b, h, i, j):
        return (j <= i) & (i - j < edges[h])

    block_mask = make(inside, None, len(w), T, T, device=w.device)

    def screen(q, k, v, w, r):
        def score(s, b, h, i, j):
            return (trim(s, r[h]) * softmask(j - i, w[h])).clamp(min=1e-30).log()

        u, lse = flex(q.to(v.dtype), k.to(v.dtype), v, score_mod=score, block_mask=block_mask,
                      scale=1.0, return_lse=True)
        return (u * lse.exp()[..., None]).to(v.dtype)

    return screen


def attention_by(name):
    """Causal attention by one of PyTorch's backends."""
    def attend(q, k, v, attn_mask=None, is_causal=True, **options):
        with sdpa_kernel(ATTENTION[name]):
            return F.scaled_dot_product_attention(q, k, v, attn_mask, is_causal=is_causal,
                                                  **options)
    return attend


# ---------------------------------------------------------------------------------- the models

def get_models(args, device):
    """[(name, setting, a model)]: each model in each of its settings."""
    models = []
    if args.ckpt:
        model, _, ckpt = load_checkpoint(args.ckpt, device, products_dtype(device, args.dtype))
        models.append((ckpt["model"], "trained", model))
    for name in args.models:
        if name.startswith("multiscreen"):
            settings = ["initial", "trained-like", "trained-like + SWE"]
        elif device.type == "cuda":
            settings = list(ATTENTION)
        else:
            settings = ["flash"]
        models += [(name, setting, new_model(name, setting, args, device)) for setting in settings]
    return models


@torch.no_grad()
def new_model(name, setting, args, device):
    """A model with random weights, in a setting."""
    sizes = {"vocab_size": args.vocab}
    if name.startswith("multiscreen"):
        sizes["psi"] = args.psi
    model = build_model(name, sizes, products_dtype(device, args.dtype)).to(device)
    if setting in ATTENTION:
        for layer in model.layers:
            layer.attend = attention_by(setting)
    if setting.startswith("trained-like"):
        for layer in model.layers:
            layer.s_w.copy_((trained_like(len(layer.s_w)) - 1).log())
    if setting.endswith("SWE"):
        model.expand_windows(2**12)
    if has_windows(model):
        choose_screen(model)
    return model


def trained_like(n):
    """n windows: 5 % (at least one) in 4096 .. 65536, 25 % in 256 .. 4096, the rest in 2 .. 128."""
    generator = torch.Generator().manual_seed(0)
    n_far, n_middle = max(round(0.05 * n), 1), round(0.25 * n)
    low = torch.tensor([4096.0] * n_far + [256.0] * n_middle + [2.0] * (n - n_far - n_middle))
    high = torch.tensor([65536.0] * n_far + [4096.0] * n_middle + [128.0] * (n - n_far - n_middle))
    return low * (high / low) ** torch.rand(n, generator=generator)


# ------------------------------------------------------------------------------ one pass of each

def training_step(model, name, length, args):
    """A function that makes a step as train.py does, on sequences of random tokens."""
    flags, B = recipe(name), args.batch_size
    optimizer = torch.optim.AdamW(model.parameters(), lr=flags["lr"] / 100, betas=(0.9, 0.95),
                                  weight_decay=flags["weight_decay"], fused=True)
    if args.compile and model.W_E.is_cuda:
        print(f"{name}: {try_to_record(model, B, length)}")

    def step():
        x = torch.randint(model.config.vocab_size, (B, length + 1), device=model.W_E.device)
        model.loss(x[:, :-1].contiguous(), x[:, 1:].contiguous()).backward()
        if flags["clip"] > 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), flags["clip"])
        else:
            torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


@torch.no_grad()
def decoder(model, name, length, args):
    """A function that decodes one more token after `length` random tokens."""
    tokens = torch.randint(model.config.vocab_size, (1, length), device=model.W_E.device)
    caches, head = model.new_caches(), model.head()
    for piece in tokens.split(model.tokens_at_once, 1):
        model.hidden(piece, caches)

    @torch.no_grad()
    def step():
        x = model.hidden(tokens[:, -1:], caches)
        model.logits(x[:, -1], head).argmax(-1)

    return step


def forward_pass(model, name, length, args):
    """A function that makes hidden states of all tokens at once, then all logits in parts."""
    tokens = torch.randint(model.config.vocab_size, (1, length), device=model.W_E.device)

    @torch.no_grad()
    def step():
        x, head = model.hidden(tokens), model.head()
        for part in x.split(2**12, dim=1):
            model.logits(part, head)

    return step


def time_parts(model, length, device):
    """Milliseconds of the matrix products and the screening, or attention, of a forward pass.

    Each call is timed alone, while an eager pass runs for the second time. The model's attention is
    replaced in place.
    """
    times = []

    def timed(f):
        def call(*inputs, **options):
            results = []
            times.append(milliseconds(lambda: results.append(f(*inputs, **options)), device))
            return results[0]

        return call

    for layer in model.layers:
        if hasattr(layer, "attend"):                   # a Transformer's
            layer.attend = timed(layer.attend)
    if has_windows(model):
        model.screen = timed(model.screen)
    run = forward_pass(model, "", length, None)
    with (torch.compiler.set_stance("force_eager"),
          mock.patch("torch.einsum", timed(torch.einsum))):
        for _ in range(2):
            times.clear()
            run()
    return sum(times)


PASSES = {"train": training_step, "decode": decoder, "forward": forward_pass}


def time_models(part, length, device, args):
    """Yield the rows of a part for one length: all models in all settings take turns."""
    models = get_models(args, device)
    if args.compile and part != "decode":              # a token is decoded without the compiler
        for _, _, model in models:
            compile_model(model)
    runs = [PASSES[part](model, name, length, args) for name, _, model in models]
    of_each = take_turns(runs, device, args.repeats)
    what = f"{part}, compiled" if args.compile and part != "decode" else part
    for (name, setting, model), times in zip(models, of_each):
        row = {"model": name, "parameters": count_parameters(model), "what": what,
               "setting": setting, "length": length}
        if part == "forward":
            row["parts_ms"] = time_parts(model, length, device)
        yield report(args, device, times, **row)


def main():
    p = Parser(__doc__)
    p.add_argument("--what", nargs="+", choices=[*PASSES, "kernel"],
                   help="what to time [train decode forward, and on a GPU kernel]")
    p.add_argument("--models", nargs="+", default=["multiscreen", "transformer:8M"],
                   help="as train.py's --model names them [multiscreen transformer:8M]")
    p.flag("--psi", 8, "the size of a Multiscreen")
    p.flag("--vocab", 257, "tokens in the vocabulary")
    p.add_argument("--ckpt", help="time this trained model, too")
    p.add_argument("--lengths", type=at_least(1), nargs="+", default=[1024, 4096, 16384],
                   help="tokens of a text, or of a context [1024 4096 16384]")
    p.flag("--train-length", 256, "tokens of a training sequence")
    p.flag("--batch-size", 8, "training sequences")
    p.add_argument("--repeats", type=at_least(1), default=10, help="how many passes are timed [10]")
    p.add_argument("--compile", action="store_true", default=None,
                   help="torch.compile the models [on a GPU]")
    p.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"],
                   help="of the matrix products [bfloat16 on a GPU]")
    p.add_argument("--device", default=DEVICE, help=f"cpu or cuda [{DEVICE}]")
    p.add_argument("--table", type=Path, default=Path("out/latency.tsv"),
                   help="the table to append to [out/latency.tsv]")
    args = p.parse_args()
    device = get_device(args.device)
    args.dtype = str(products_dtype(device, args.dtype) or "float32").removeprefix("torch.")
    has_kernel = False
    if device.type == "cuda":
        from screening_triton import available, screen

        has_kernel = available(device)
        args.compile = True
        if has_kernel:
            check_kernel(screen, device)               # nothing is timed unless it is right
    what = args.what or [*PASSES]
    if args.what is None and has_kernel:
        what.append("kernel")
    if "kernel" in what and not has_kernel:
        raise UsageError("the kernel cannot be timed here: it needs an NVIDIA GPU")

    rows = []
    for part in what:
        for length in [args.train_length] if part == "train" else args.lengths:
            gc.collect()                               # of the models before, for the next's memory
            if device.type == "cuda":
                torch.cuda.empty_cache()
            if part == "kernel":
                rows += time_kernel(length, device, args)
            else:
                rows += time_models(part, length, device, args)
    shown = []
    for row in rows:
        ms = [float(x) for x in row["ms"].split()]
        std = statistics.stdev(ms) if len(ms) > 1 else None
        line = {name: row[name] for name in ("model", "parameters", "what", "setting", "length")}
        shown.append(line | {"ms": statistics.mean(ms), "std": std, "parts": row["parts_ms"]})
    print_table(shown, f"Milliseconds of one pass; {rows[0]['machine']}; {args.table}")


if __name__ == "__main__":
    cli(main)
