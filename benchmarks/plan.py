"""What a training run needs on each GPU, counted. Nothing is built.

    python -m benchmarks.plan                         the paper's nine models, as Markdown
    python -m benchmarks.plan --psi 64 --batch-size 1 --shard 8 --gpus 64

Flags are those of train.py that change memory, with the paper's values. GiB are per GPU, with
bfloat16 products and the fused kernel. Leave a tenth free: temporary tensors are not counted.
"""
import sys
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

import screening_triton
from support.checkpoint import build_model, has_windows
from support.cli import Parser, UsageError, cli

DEFAULTS = {"--model": "multiscreen", "--psi": 8, "--vocab-size": 50257, "--seq-len": 4096,
            "--batch-size": 1, "--batch-tokens": 2**22, "--shard": 1, "--gpus": 1}
# GPUs (appendix "Compute Resources"), and the sequences of a pass that fit into 80 GiB.
PAPER = {"--psi 8": (16, 64), "--psi 16": (16, 32), "--psi 32": (64, 4), "--psi 48": (64, 2),
         "--psi 64 --shard 8": (64, 1), "--model transformer:8M": (16, 64),
         "--model transformer:45M": (16, 64), "--model transformer:353M": (64, 8),
         "--model transformer:1.3B": (64, 2)}


def count_bytes(name, config, dtype, batch_size, seq_len):
    """Numbers of parameters, and the bytes that one pass saves for backward, as attributes."""
    with torch.device("meta"):
        whole = build_model(name, config)
    with FakeTensorMode():                             # on "meta" attention would save T x T
        model = build_model(name, config | {"N_L": 1}, dtype)
        screen = screening_triton.screen if has_windows(model) else model.screen
        weights, tokens = list(model.parameters()), torch.zeros(batch_size, seq_len).long()
        x, embed = saved_bytes(lambda: model.embed(tokens), weights)
        y, layer = saved_bytes(lambda: model.layers[0](x, screen), weights)
        n = max(2**25 // model.config.vocab_size, 1)   # a chunk of Multiscreen.loss
        y_n, z = y.flatten(0, 1)[:n], tokens.flatten()[:n]
        _, head = saved_bytes(lambda: F.cross_entropy(model.logits(y_n), z), [*weights, y, tokens])
    return SimpleNamespace(layers=len(whole.layers), embed=embed, layer=layer, head=head,
                           parameters=sum(p.numel() for p in whole.parameters()), hidden=y.nbytes,
                           of_layer=sum(p.numel() for p in model.layers.parameters()))


def saved_bytes(run, known):
    """(run(), the bytes that it saves for backward besides the storages of the tensors `known`)."""
    storages = set()
    with saved_tensors_hooks(lambda x: storages.add(x.untyped_storage()), lambda x: x):
        result = run()
    return result, sum(s.nbytes() for s in storages - {x.untyped_storage() for x in known})


def memory(c, shard=1, recompute=False, gpus=1, passes=1):
    """{what: bytes on each GPU} after count_bytes; `shard` GPUs share weights and moments."""
    # One layer is recomputed at a time, after the head.
    saved = c.embed + c.layers * c.layer + c.hidden + c.head
    if recompute:
        saved = c.embed + (c.layers + 1) * c.hidden + max(c.layer, c.head)

    # FSDP gathers the embedding and two layers, and their gradients; over several passes all.
    gathered = 8 * (c.parameters - max(c.layers - 2, 0) * c.of_layer) if gpus > 1 else 0
    state = 4 * c.parameters // shard
    gradients = 4 * c.parameters if passes > 1 and gpus > 1 else state
    return {"weights": state, "gradients": gradients, "moments": 2 * state, "gathered": gathered,
            "activations": saved}


def plan(words):
    """(what count_bytes counts, passes of each GPU in a step, {what: bytes on each GPU})."""
    p = Parser(__doc__)
    for flag, default in DEFAULTS.items():
        p.add_argument(flag, type=type(default), default=default, help=f"[{default}]")
    p.add_argument("--recompute", action="store_true")
    args = p.parse_args(words)
    at_once = args.batch_size * args.seq_len * args.gpus
    if min(at_once, args.shard) < 1 or args.gpus % args.shard or args.batch_tokens % at_once:
        raise UsageError("--gpus must be a multiple of --shard, --batch-tokens of --batch-size x "
                         "--seq-len x --gpus, all at least 1")
    sizes, passes = {"psi": args.psi, "vocab_size": args.vocab_size}, args.batch_tokens // at_once
    c = count_bytes(args.model, sizes, torch.bfloat16, args.batch_size, args.seq_len)
    return c, passes, memory(c, args.shard, args.recompute, args.gpus, passes)


def main():
    runs = [sys.argv[1:]] if len(sys.argv) > 1 else [
        [*model.split(), "--gpus", str(n), "--batch-size", str(size)]
        for model, (n, size) in PAPER.items()]
    plans = {" ".join(words): plan(words) for words in runs}
    print("| flags | parameters | passes per step | weights | gradients | moments | gathered "
          "| activations | all, GiB | checkpoint, GiB |\n|---" + "|--:" * 9 + "|")
    for run, (c, passes, need) in plans.items():
        need = *need.values(), sum(need.values()), 12 * c.parameters       # two moments, float32
        sizes = " | ".join(f"{n / 2**30:.2f}" for n in need)
        print(f"| `{run}` | {c.parameters:,} | {passes:,} | {sizes} |")


if __name__ == "__main__":
    cli(main)
