"""What a training run needs on each GPU, counted from train.py's flags. Nothing is built.

    python -m experiments.plan                      the paper's nine models, as Markdown
    python -m experiments.plan --psi 64 --tokenizer gpt2 --seq-len 4096 --batch-size 1 \\
        --batch-tokens 4194304 --steps 65536 --shard 4 --gpus 64 --gpu-memory 80

Every flag that is not listed below is one of train.py. Matrix products are bfloat16, unless --dtype
float32 is given. The counts are of the fused kernel, without --compile. A tenth of each GPU is left
for what is not counted: what an operation needs while it runs, CUDA, the network. The last line
compares the count with what a small model saves when it runs.
"""
if not __package__:
    raise SystemExit("error: run python -m experiments.plan in the folder above")

from functools import cache, partial
from itertools import product

import torch
from torch.utils.checkpoint import checkpoint

import multiscreen
import train
from support.checkpoint import build_model, has_windows
from support.cli import Parser, UsageError, cli
from support.memory import count, saved_bytes
from support.tokens import get_tokenizer

GIB = 2**30
PAPER = {                                              # flags: GPUs (appendix "Compute Resources")
    "--psi 8": 16, "--psi 16": 16, "--psi 32": 64, "--psi 48": 64, "--psi 64": 64,
    "--model transformer:8M": 16, "--model transformer:45M": 16, "--model transformer:353M": 64,
    "--model transformer:1.3B": 64,
}


def counter(args):
    """A function: batch size -> the Count of train.py's flags with that batch size."""
    gpt2 = args.tokenizer == "gpt2"                    # its size is known without a download
    n = multiscreen.Config.vocab_size if gpt2 else get_tokenizer(args.tokenizer).n_vocab
    config = {"psi": args.psi, "N_L": args.layers, "vocab_size": n}
    dtype = None if args.dtype == "float32" else torch.bfloat16
    return cache(lambda batch_size: count(args.model, config, dtype, batch_size, args.seq_len))


def first_fit(counted, gpus, gpu_memory, passes, batch_size, shard, recompute):
    """The first (batch size, shard, recompute) that fits; raises UsageError if none does.

    passes: those of a step with that batch size; smaller ones need more.

    First passes become smaller, then more GPUs share, at last layers are recomputed.
    """
    shards = [gpus // n for n in halves(gpus // shard)]
    for again, n_shared, n_passed in product((recompute, True), shards, halves(batch_size)):
        need = counted(n_passed).memory(n_shared, again, gpus, passes * batch_size // n_passed)
        if sum(need.values()) <= 0.9 * gpu_memory * GIB:
            return n_passed, n_shared, again
    raise UsageError(f"no --batch-size and --shard fit {gpus} GPUs of {gpu_memory:g} GiB: take a "
                     "smaller model or --seq-len, or more --gpus")


def halves(n):
    """n, n/2, n/4, .. as long as they are whole."""
    return [n >> e for e in range(n.bit_length()) if n % 2**e == 0]


def in_flags(batch_size, shard, recompute):
    return f"--batch-size {batch_size} --shard {shard}" + " --recompute" * recompute


def plan(args, gpus, gpu_memory):
    """Print what the flags need, whether it fits, and flags that do."""
    if args.shard < 1 or gpus % args.shard:
        raise UsageError(f"--shard {args.shard}: it must divide the {gpus} GPUs")
    n = train.passes(args, gpus)
    tokens = n * gpus * args.batch_size * args.seq_len
    counted = counter(args)
    c = counted(args.batch_size)
    print(f"{args.model}: {c.parameters:,} parameters ({c.parameters - c.of_embedding:,} "
          f"non-embedding), a checkpoint of {c.checkpoint / GIB:,.2f} GiB\n"
          f"passes of each GPU in a step: {n:,}; tokens: {tokens:,} in a step, "
          f"{args.steps * tokens:,} in {args.steps:,} steps\n\n"
          f"{'GiB on each GPU':<16}{'all saved':>14}{'--recompute':>14}")
    saved, again = (c.memory(args.shard, recompute, gpus, n) for recompute in (False, True))
    for what in saved:
        print(f"{what:<16}{saved[what] / GIB:14,.2f}{again[what] / GIB:14,.2f}")
    print(f"{'in all':<16}{sum(saved.values()) / GIB:14,.2f}{sum(again.values()) / GIB:14,.2f}")
    now = args.batch_size, args.shard, args.recompute
    fit = first_fit(counted, gpus, gpu_memory, n, *now)
    verdict = "fits" if fit == now else f"does not fit; {in_flags(*fit)} does"
    print(f"{in_flags(*now)} {verdict}, with a tenth of {gpu_memory:g} GiB to spare")


def check(name, dtype):
    """Compare the count with what the layers of a small model save when it runs."""
    name = "transformer:3,4,64" if name.startswith("transformer") else name
    config = {"psi": 4, "vocab_size": 257}
    model = build_model(name, config, dtype)
    if has_windows(model):
        # Like the kernel, a checkpoint saves what it is given.
        model.screen = partial(checkpoint, multiscreen.screen, use_reentrant=False)
    tokens = torch.randint(257, (2, 256))
    _, measured = saved_bytes(lambda: model.hidden(tokens), model.parameters())
    c = count(name, config, dtype, *tokens.shape)
    print(f"check: the layers of a small {name} save {measured:,} bytes; counted: "
          f"{c.saved_by_embed + c.layers * c.saved_by_layer:,}")


@cache
def fit_paper(model, gpus, gpu_memory=80):
    """(counter, first_fit) of flags that name a model, with the paper's tokens in a step."""
    args, _ = train.get_args([*model.split(), "--tokenizer", "gpt2", "--seq-len", "4096"])
    counted = counter(args)
    return counted, first_fit(counted, gpus, gpu_memory, 1, 2**22 // 4096 // gpus, 1, False)


def paper(gpu_memory):
    """Print the paper's models, its numbers of GPUs, and flags that fit. A step is 2^22 tokens."""
    print("| model | parameters | GPUs | flags | passes a step | activations, GiB | all, GiB "
          "| checkpoint, GiB |\n|---|--:|--:|---|--:|--:|--:|--:|")
    for model, gpus in PAPER.items():
        counted, (batch_size, *sharing) = fit_paper(model, gpus, gpu_memory)
        c, sequences = counted(batch_size), 2**22 // 4096 // gpus
        need = c.memory(*sharing, gpus, sequences // batch_size)
        print(f"| `{model}` | {c.parameters:,} | {gpus} | `{in_flags(batch_size, *sharing)}` "
              f"| {sequences // batch_size} | {need['activations'] / GIB:.1f} "
              f"| {sum(need.values()) / GIB:.1f} | {c.checkpoint / GIB:.2f} |")


def main():
    p = Parser(__doc__)
    p.add_argument("--gpus", type=int, default=1, help="processes, one on each GPU [1]")
    p.add_argument("--gpu-memory", type=float, default=80, help="GiB of each GPU [80]")
    own, flags = p.parse_known_args()
    if own.gpus < 1 or not own.gpu_memory > 0:
        raise UsageError("--gpus and --gpu-memory must be above 0")
    if not flags:
        return paper(own.gpu_memory)
    args, _ = train.get_args(flags)
    if not any(flag.startswith("--batch-tokens") for flag in flags):
        args.batch_tokens *= own.gpus                  # one pass of each GPU, not of this process
    plan(args, own.gpus, own.gpu_memory)
    check(args.model, None if args.dtype == "float32" else torch.bfloat16)


if __name__ == "__main__":
    cli(main)
