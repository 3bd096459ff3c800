"""What a laptop feels: training and decoding beside the Transformer, measured side by side.

    python -m experiments.cpu_benchmark                 all of it, psi = 8 beside transformer:8M
    python -m experiments.cpu_benchmark --part decode

train    a default step of train.py: 8 sequences of 256 bytes, eager and with --compile
decode   one token after the other, after 256, 8,192 and 131,072 tokens of context, with initial and
         trained-like windows (experiments.latency says which), and the Transformer with its cache

The two models take turns, so that other work on the machine slows both. Tokens per second are from
medians. ratio: Multiscreen's over the Transformer's. The contexts of `decode` are random keys and
values, written into the caches: what a token costs does not depend on what they are.
"""
if not __package__:
    raise SystemExit("error: run python -m experiments.cpu_benchmark in the folder above")

import statistics
import time
from pathlib import Path

import torch

from baselines import recipe
from experiments.common import report
from experiments.timing import prepare, random_model
from experiments.training_step import get_step
from multiscreen import KeyCache
from support.checkpoint import has_windows
from support.choose import compile_layers
from support.cli import Parser, UsageError, check_writable, cli, get_device

COLUMNS = ("what", "setting", "context", "multiscreen", "transformer", "ratio")
BATCH, LENGTH, VOCABULARY = 8, 256, 257                # those of train.py, with bytes


def get_models(args):
    """[Multiscreen, Transformer] with random weights, and the Transformer's name."""
    name, cpu = f"transformer:{args.transformer}", get_device("cpu")
    sizes = {"psi": args.psi, "vocab_size": VOCABULARY}
    return [random_model("multiscreen", sizes, cpu),
            random_model(name, {"vocab_size": VOCABULARY}, cpu)], name


def medians(functions, repeats, warmup):
    """The median seconds of each function, which returns its seconds. They take turns."""
    times = [[f() for f in functions] for _ in range(warmup + repeats)]
    return [statistics.median(column) for column in zip(*times[warmup:])]


def train_rows(args):
    """Tokens per second of a step, eager and compiled."""
    for setting in ("eager",) if args.eager else ("eager", "compiled"):
        models, name = get_models(args)
        if setting == "compiled":
            for model in models:
                compile_layers(model)
        steps = [get_step(model, recipe(family), BATCH, LENGTH)
                 for model, family in zip(models, ("multiscreen", name))]
        ours, theirs = (BATCH * LENGTH / s for s in medians(steps, args.repeats, 3))
        yield ["train", setting, None, ours, theirs, ours / theirs]


def fill_caches(model, context):
    """A KeyCache for each layer, with random keys and values of `context` tokens."""
    c, caches = model.config, [KeyCache() for _ in model.layers]
    d_K, d_V = (c.d_K, c.d_V) if has_windows(model) else [c.d_E // c.N_H] * 2
    for cache in caches:
        k, v = (torch.nn.functional.normalize(torch.randn(1, c.N_H, context, d), dim=-1)
                for d in (d_K, d_V))
        cache.append(k, v, torch.full((c.N_H,), torch.inf))
    return caches


def get_decoder(model, context):
    """A function that decodes one token, as Multiscreen.stream does, and returns its seconds."""
    caches, tokens = fill_caches(model, context), torch.zeros(1, 1, dtype=torch.int64)

    @torch.no_grad()
    def decode():
        began = time.perf_counter()
        model.logits(model.hidden(tokens, caches)[:, -1]).argmax(-1)
        return time.perf_counter() - began

    return decode


def decode_rows(args):
    """Tokens per second at each context, with both kinds of windows."""
    models, _ = get_models(args)
    for setting in ("initial", "trained-like"):        # in this order: the second one stays
        prepare(models[0], setting, None)
        for context in args.contexts:
            decoders = [get_decoder(model, context) for model in models]
            ours, theirs = (1 / s for s in medians(decoders, args.tokens, 3))
            yield ["decode", setting, context, ours, theirs, ours / theirs]


def main():
    p = Parser(__doc__)
    p.add_argument("--part", choices=["train", "decode", "all"], default="all",
                   help="what to time [all]")
    p.add_argument("--psi", type=int, default=8, help="Multiscreen's size [8]")
    p.add_argument("--transformer", default="8M", help="the Transformer's size [8M]")
    p.add_argument("--contexts", type=int, nargs="+", default=[256, 8192, 131072],
                   help="tokens before the one that is decoded [256 8192 131072]")
    p.add_argument("--repeats", type=int, default=20, help="steps of training that count [20]")
    p.add_argument("--tokens", type=int, default=64, help="decoded tokens that count [64]")
    p.add_argument("--eager", action="store_true", help="leave the compiled models out")
    p.add_argument("--out", default="out/cpu_benchmark", help="folder [out/cpu_benchmark]")
    p.add_shared("--force")
    args = p.parse_args()
    if min(args.psi, args.repeats, args.tokens, *args.contexts) < 1:
        raise UsageError("--psi, --contexts, --repeats and --tokens must be at least 1")
    table = Path(args.out) / "cpu_benchmark.tsv"
    check_writable(table, args.force)

    torch.manual_seed(0)
    rows, title = [], (f"Tokens per second, CPU, {torch.get_num_threads()} threads, float32: "
                       f"psi = {args.psi} beside transformer:{args.transformer}")
    parts = {"train": train_rows, "decode": decode_rows}
    for name in parts if args.part == "all" else [args.part]:
        for row in parts[name](args):
            rows.append(row)
            print(f"{name} {row[1]} {row[2] or ''}: ratio {row[-1]:.3g}", flush=True)
    report(table, COLUMNS, rows, title)


if __name__ == "__main__":
    cli(main)
