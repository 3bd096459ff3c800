"""How long do a training step, a generated token and a long text take, beside a Transformer?

    python -m lab.bench                            what you notice on a laptop
    python -m lab.bench --psi 32 --vocab 50257 --models multiscreen transformer:353M
    python -m lab.bench --what forward --ckpt out/ckpt.pt --lengths 1024 4096 16384

train      a training step, as in train.py, on random tokens
decode     one more token after a context, for each of --lengths
forward    hidden states and logits of a whole text in one pass, for each of --lengths; this is the
           section "Inference Latency" of the paper

Multiscreen and the Transformer are compiled alike, or not (--compile, the default on a GPU), and a
small model's training step is recorded as a CUDA graph, as in train.py. The models take turns, so
that other work on the machine slows them all alike. Each row is printed and added to --table,
out/latency.tsv, as soon as it is measured; `python -m lab.figures latency` draws the forward
passes.

The weights are random. On a GPU that changes no time, since a relevance of 0 takes as long to
compute as any other; only the windows matter. The screen in C++ skips the keys that Trim rejects,
and random weights reject more of them than trained ones, so on a CPU time a trained model, too:
--ckpt. The `initial` windows have 2 to 257 tokens. The `trained-like` windows are our guess at
trained ones: 70 % of the tiles have windows that are log-uniform in 2 .. 128, 25 % in 256 .. 4096,
and 5 % in 4096 .. 65536.

`pytest -q test_multiscreen.py tests/test_kernel.py` tests the compiled kernel on your GPU.
"""
import gc
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from support.cli import DEVICE, Parser, at_least, cli, get_device, products_dtype
from lab.alike import mean_in_words
from support.fast import choose_screen, compile_model, try_to_record
from support.models import build_model, count_parameters, has_windows, recipe
from support.run import load_checkpoint
from support.tables import add_row
from train import get_optimizer, train_step

ATTENTION = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


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


def report(args, device, times, row):
    """Print a row with its times, and append it to the table."""
    machine = f"CPU, {torch.get_num_threads()} threads"
    if device.type == "cuda":
        machine = torch.cuda.get_device_name(device)
    add_row(args.table, row | {
        "machine": f"{machine}, {args.dtype}, torch {torch.__version__}",
        "ms": " ".join(f"{x:.6g}" for x in times)})
    print(f"{row['what']} {row['length']} {row['model']} {row['setting']}: "
          f"{mean_in_words(times, 2)} ms", flush=True)


# ---------------------------------------------------------------------------------- the models

def attention_by(name):
    """Causal attention by one of PyTorch's backends."""
    def attend(q, k, v, attn_mask=None, is_causal=True, **options):
        with sdpa_kernel(ATTENTION[name]):
            return F.scaled_dot_product_attention(q, k, v, attn_mask, is_causal=is_causal,
                                                  **options)
    return attend


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
        print(f"{name}, {setting}: {choose_screen(model)}")
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
    B, flags = args.batch_size, SimpleNamespace(**recipe(name))
    flags.lr /= 100                                    # windows stay about as wide as they are
    flags.seed, flags.seq_len, flags.batch_size, flags.batch_tokens = 0, length, B, B * length
    rng = np.random.default_rng(0)

    def draw(n, seed):
        return rng.integers(model.config.vocab_size, size=length + 1)

    data, optimizer = SimpleNamespace(draw=draw), get_optimizer(model, flags)
    if args.compile and model.W_E.is_cuda:
        print(f"{name}: {try_to_record(model, B, length)}")

    def step():
        train_step(model, data, flags, 0)
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


PASSES = {"train": training_step, "decode": decoder, "forward": forward_pass}


def time_models(part, length, device, args):
    """Time a part for one length: all models in all settings take turns."""
    models = get_models(args, device)
    if args.compile and part != "decode":              # a token is decoded without the compiler
        for _, _, model in models:
            compile_model(model)
    runs = [PASSES[part](model, name, length, args) for name, _, model in models]
    of_each = take_turns(runs, device, args.repeats)
    what = f"{part}, compiled" if args.compile and part != "decode" else part
    for (name, setting, model), times in zip(models, of_each):
        report(args, device, times, {
            "model": name, "parameters": count_parameters(model), "what": what,
            "setting": setting, "length": length})


def main():
    p = Parser(__doc__)
    p.add_argument("--what", nargs="+", choices=[*PASSES], default=[*PASSES],
                   help="what to time [train decode forward]")
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
    if device.type == "cuda":
        args.compile = True
    for part in args.what:
        for length in [args.train_length] if part == "train" else args.lengths:
            gc.collect()                               # of the models before, for the next's memory
            if device.type == "cuda":
                torch.cuda.empty_cache()
            time_models(part, length, device, args)


if __name__ == "__main__":
    cli(main)
