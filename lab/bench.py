"""How fast are a training step, a generated token and a pass over a long text?

    python -m lab.bench                            what you notice on a laptop
    python -m lab.bench --what forward --ckpt out/ckpt.pt --lengths 1024 4096 16384
    python -m lab.bench --tokenizer gpt2 --models "--psi 32" \\
        "--model lab.transformer.Transformer --layers 24 --tiles 16 --d-E 1024"

train      a step as in train.py, on sequences of random tokens
decode     one more token after a context, for each of --lengths
forward    hidden states and logits of a text in one pass, for each of --lengths; this is the
           section "Inference Latency" of the paper

A model is named by flags of train.py, in quotes. Other flags of train.py are for all models whose
quotes do not have them, such as --seq-len, --batch-size, --dtype, --device and --compile, which a
GPU does by itself. The models take turns, so that other work on the machine slows them all alike.

The weights are random. On a GPU that changes no time, because a relevance of 0 takes as long to
compute as any other; only windows matter. On a CPU the screen in C++ skips keys that Trim rejects,
and random weights reject more of them than trained ones: time a trained model, too, by --ckpt.
`initial` windows have 2 to 257 tokens. `trained-like` ones are our guess at trained ones: 70 % of
the tiles are log-uniform in 2 .. 128, 25 % in 256 .. 4096, and 5 % in 4096 .. 65536 tokens.
"""
import argparse
import gc
import shlex
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import train
from lab.measure import commit, require_writable, write_table

ATTENTION = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


# ----------------------------------------------------------------------------------- the models

def trained_like(n):
    """n windows: 5 % in 2^12 .. 2^16 (at least one), 25 % in 2^8 .. 2^12, the rest in 2 .. 2^7."""
    generator = torch.Generator().manual_seed(0)
    n_far, n_middle = max(round(0.05 * n), 1), round(0.25 * n)
    ranges = [(2**12, 2**16)] * n_far + [(2**8, 2**12)] * n_middle
    ranges += [(2, 2**7)] * (n - n_far - n_middle)
    low, high = torch.tensor(ranges, dtype=torch.float32).T
    return low * (high / low) ** torch.rand(n, generator=generator)


@torch.no_grad()
def new_model(flags, setting):
    """A model with random weights, in a setting."""
    tokenizer = train.get_tokenizer(flags.tokenizer)
    model = train.make_model(flags, tokenizer, getattr(torch, flags.dtype)).to(flags.device)
    for layer in model.layers:
        if setting in ATTENTION and hasattr(layer, "attend"):
            layer.attend = sdpa_kernel(ATTENTION[setting])(F.scaled_dot_product_attention)
        if setting.startswith("trained-like"):
            layer.s_w.copy_((trained_like(len(layer.s_w)) - 1).log())
    if setting.endswith("SWE"):
        model.expand_windows(2**12)
    return model


def get_models(args, shared):
    """[(name, setting, model)]: each model in each of its settings. shared: flags of all."""
    found = []
    if args.ckpt:
        dtype = getattr(torch, args.dtype)
        model, _, _ = train.load_checkpoint(args.ckpt, args.device, dtype)
        found.append((args.ckpt, "trained", model))
    for words in args.models:
        flags = train.get_args([*shared, *shlex.split(words)])
        if hasattr(new_model(flags, "initial").layers[0], "s_w"):
            settings = ["initial", "trained-like", "trained-like + SWE"]
        else:
            settings = list(ATTENTION) if args.device == "cuda" else ["flash"]
        for setting in settings:
            model = new_model(flags, setting)
            print(f"{words}, {setting}: {train.choose_screen(model, flags.kernel)}")
            found.append((words, setting, model))
    return found


# ------------------------------------------------------------------------------ one pass of each

def training_step(model, length, args):
    """A function that makes a step as train.py does, on sequences of random tokens."""
    n_vocab = model.config.vocab_size
    tokens = np.random.default_rng(0).integers(n_vocab, size=args.batch_tokens + 1)
    data = train.Text([tokens], args, n_vocab)
    # Slow steps, so that windows stay about as wide as they are.
    optimizer = train.make_optimizer(model, lr=1e-5, weight_decay=0.0)

    def step():
        train.accumulate_gradients(model, data, args, 0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def decoder(model, length, args):
    """A function that decodes one more token after `length` random tokens, as `generate` does."""
    tokens = torch.randint(model.config.vocab_size, (1, length), device=args.device)
    stream = model.stream(tokens, args.repeats + 2)
    next(stream)                                       # this reads the context
    return lambda: next(stream)


def forward_pass(model, length, args):
    """A function that makes hidden states of all tokens at once, then all logits in parts."""
    tokens = torch.randint(model.config.vocab_size, (1, length), device=args.device)

    def step():
        x, head = model.hidden(tokens), model.head()
        for part in x.split(2**12, dim=1):
            model.logits(part, head)

    return step


PASSES = {"train": training_step, "decode": decoder, "forward": forward_pass}


# ----------------------------------------------------------------------------------- the timer

def milliseconds(run, device):
    """The milliseconds that run() takes. On a GPU: until it is idle, with a cold cache."""
    if device == "cuda":
        torch.zeros(2**28, dtype=torch.uint8, device=device)       # this empties the cache
        torch.cuda.synchronize()
    began = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - began)


def time_models(what, length, args, shared, about):
    """Rows of a part for one length: all models in all settings take turns."""
    models, rows = get_models(args, shared), []
    compiled = args.compile and what != "decode"       # a token is decoded without the compiler
    if compiled:
        for *_, model in models:
            train.compile_model(model)
    with torch.set_grad_enabled(what == "train"):
        runs = [PASSES[what](model, length, args) for *_, model in models]
        # The first pass of each warms up.
        turns = [[milliseconds(run, args.device) for run in runs] for _ in range(args.repeats + 1)]
    for (name, setting, model), times in zip(models, zip(*turns[1:])):
        print(f"{what} {length} tokens, {name}, {setting}: {np.mean(times):.4g} "
              f"± {np.std(times, ddof=1):.2g} ms", flush=True)
        rows.append(about | {
            "what": what, "compiled": compiled, "length": length, "model": name, "setting": setting,
            "parameters": sum(p.numel() for p in model.parameters()),
            "ms": " ".join(f"{x:.6g}" for x in times)})
    return rows


def main():
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--what", nargs="+", choices=[*PASSES], default=[*PASSES], help="[all three]")
    p.add_argument("--models", nargs="+", metavar="FLAGS", default=[
        "--psi 8", "--model lab.transformer.Transformer"], help="flags of train.py for each model")
    p.add_argument("--ckpt", help="time this trained model, too")
    p.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16384],
                   help="tokens of a text, or of a context [1024 4096 16384]")
    p.add_argument("--repeats", type=int, default=10, help="passes that are timed, 2 or more [10]")
    p.add_argument("--table", type=Path, default=Path("out/latency.tsv"), help="[out/latency.tsv]")
    own, shared = p.parse_known_args()
    args = argparse.Namespace(**vars(train.get_args(shared)) | vars(own))
    require_writable(args.table)
    if args.compile is None:
        args.compile = args.device == "cuda"
    machine = f"CPU, {torch.get_num_threads()} threads"
    if args.device == "cuda":
        machine = torch.cuda.get_device_name()
    about = {"machine": f"{machine}, {args.dtype}, torch {torch.__version__}", "commit": commit()}
    rows = []
    for what in args.what:
        for length in [args.seq_len] if what == "train" else args.lengths:
            gc.collect()                               # of the models before, for the next's memory
            rows += time_models(what, length, args, shared, about)
    write_table(args.table, rows)


if __name__ == "__main__":
    main()
