"""What a laptop feels: training and decoding beside the Transformer, measured side by side.

    python -m benchmarks.cpu                 psi = 8 beside transformer:8M

train    a default step of train.py: 8 sequences of 256 bytes, eager and with --compile
decode   one token at a time, after 256, 8,192 and 131,072 tokens of context, with initial and
         trained-like windows, and the Transformer with its cache

OUT/cpu.tsv has tokens per second, from medians. Rerun the command to measure what is missing.
The two models take turns, so that other work on the machine slows both. The contexts of `decode`
are random keys and values: a token's cost does not depend on them.
"""
from functools import partial
from pathlib import Path

import torch

from baselines import recipe
from benchmarks.measure import (
    cached,
    get_decoder,
    measure_missing,
    take_turns,
    training_step,
)
from support.checkpoint import has_windows
from support.cli import Parser, UsageError, cli, get_device, own_folder
from support.compiled import compile_model
from support.timing import random_model, set_trained_like

COLUMNS = ("multiscreen", "transformer", "ratio")
BATCH, LENGTH, VOCABULARY = 8, 256, 257                # those of train.py, with bytes
STEPS, TOKENS = 20, 64                                 # that are timed


def measure(args, what, setting, context):
    """Tokens per second of the two models, which take turns."""
    names = "multiscreen", f"transformer:{args.transformer}"
    sizes = {"psi": args.psi, "vocab_size": VOCABULARY}
    models = [random_model(name, sizes, "cpu") for name in names]
    if setting == "compiled":
        for model in models:
            compile_model(model)
    if setting == "trained-like":
        set_trained_like(models[0])
    if what == "train":
        tokens, repeats = BATCH * LENGTH, STEPS
        runs = [training_step(m, recipe(name), BATCH, LENGTH) for m, name in zip(models, names)]
    else:
        tokens, repeats = 1, TOKENS
        runs = [get_decoder(cached(m), fill_caches(m, context)) for m in models]

    ours, theirs = (tokens / seconds for seconds in take_turns(runs, repeats))
    return {"multiscreen": ours, "transformer": theirs, "ratio": ours / theirs}


def fill_caches(model, context):
    """A KeyCache for each layer, with random keys and values of `context` tokens."""
    c, caches = model.config, model.new_caches()
    d_K, d_V = (c.d_K, c.d_V) if has_windows(model) else [c.d_E // c.N_H] * 2
    for cache in caches:
        k, v = (torch.nn.functional.normalize(torch.randn(1, c.N_H, context, d), dim=-1)
                for d in (d_K, d_V))
        cache.append(k, v, torch.full((c.N_H,), torch.inf))
    return caches


def cells(args):
    about = {"psi": args.psi, "beside": args.transformer, "threads": torch.get_num_threads()}
    settings = [("train", "eager", None), ("train", "compiled", None)]
    settings += [("decode", windows, context) for windows in ("initial", "trained-like")
                 for context in args.contexts]
    for what, setting, context in settings:
        yield ({"what": what, "setting": setting, "context": context} | about,
               partial(measure, args, what, setting, context))


def main():
    p = Parser(__doc__)
    p.add_argument("--psi", type=int, default=8, help="Multiscreen's size [8]")
    p.add_argument("--transformer", default="8M", help="the Transformer's size [8M]")
    p.add_argument("--contexts", type=int, nargs="+", default=[256, 8192, 131072],
                   help="tokens before the decoded one [256 8192 131072]")
    p.add_argument("--out", type=own_folder, default=Path("out/cpu"),
                   help="folder of cpu.tsv [out/cpu]")
    args = p.parse_args()
    if not 1 <= args.psi <= 2**10 or min(args.contexts) < 1 or max(args.contexts) > 2**24:
        raise UsageError("--psi must be from 1 to 2^10, --contexts from 1 to 2^24")
    get_device("cpu")                                  # as train.py: glibc keeps freed memory
    path = args.out / "cpu.tsv"
    torch.manual_seed(0)
    measure_missing(path, COLUMNS, cells(args))
    print(f"wrote {path}")


if __name__ == "__main__":
    cli(main)
