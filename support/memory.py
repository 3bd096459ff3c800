"""The bytes that a training step needs on one GPU, or in one process. Nothing is built.

One layer and the head run on PyTorch's fake tensors, which have sizes and no values; what they save
for backward is counted. Not counted is what an operation needs while it runs, and CUDA's own.
"""
import os
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from baselines import transformer
from support.checkpoint import build_model, has_windows
from support.cli import UsageError


@dataclass
class Count:
    """Numbers of parameters, and the bytes that one pass saves for backward."""
    layers: int
    parameters: int
    of_embedding: int
    of_layer: int
    saved_by_embed: int
    saved_by_layer: int
    saved_by_head: int                                 # for one chunk of the loss
    hidden: int                                        # the bytes of x between two layers

    @property
    def checkpoint(self):
        return 12 * self.parameters                    # bytes: weights and two moments, float32

    def memory(self, shard=1, recompute=False, processes=1, passes=1):
        """{what: bytes in one process}; `shard` processes share one copy of the state, float32."""
        # Recomputed is one layer at a time, after the head. x leaves the last layer in any case.
        each, once = self.saved_by_layer, self.saved_by_head
        if recompute:
            each, once = self.hidden, max(self.saved_by_layer, self.saved_by_head)
        saved = self.saved_by_embed + self.layers * each + self.hidden + once

        # FSDP gathers the embedding, the layer in use and the next; their gradients are whole too.
        # Over several passes all gradients are: they are averaged, and divided, once a step.
        gathered = self.parameters - max(self.layers - 2, 0) * self.of_layer
        part = gradients = 4 * self.parameters // shard
        if passes > 1 and processes > 1:
            gradients = 4 * self.parameters
        return {"weights": part, "gradients": gradients, "moments": 2 * part,
                "gathered": 8 * gathered if processes > 1 else 0, "activations": saved}


def count(name, config, dtype, batch_size, seq_len):
    """The Count of baselines.build(name, config, dtype) with the fused kernel."""
    # Here, because not every machine has Triton.
    import screening_triton

    N_L = config.get("N_L")
    one_layer = config | {"N_L": 1 if N_L is None else min(N_L, 1)}
    try:
        with FakeTensorMode():                         # on "meta" attention would save T x T
            model = build_model(name, one_layer, dtype)
            screen = screening_triton.screen if has_windows(model) else None
            weights = list(model.parameters())
            tokens = torch.zeros(batch_size, seq_len, dtype=torch.int64)
            x, by_embed = saved_bytes(lambda: model.embed(tokens), weights)
            y, by_layer = saved_bytes(lambda: model.layers[0](x, screen), weights)
            n = max(2**25 // model.config.vocab_size, 1)           # as in Multiscreen.loss
            y_n, target = y.flatten(0, 1)[:n], tokens.flatten()[:n]
            _, by_head = saved_bytes(lambda: F.cross_entropy(model.logits(y_n), target),
                                     [*weights, y, tokens])
    except (RuntimeError, TypeError) as e:             # PyTorch says it in several ways
        if "verflow" not in str(e):
            raise
        raise UsageError("a tensor has over 2^63 bytes: take a smaller model, --batch-size or "
                         "--seq-len") from None
    if N_L is None:
        N_L = model.config.N_H if screen else transformer.get_config(name.partition(":")[2]).N_L
    of_layer = sum(p.numel() for p in model.layers.parameters())
    total = sum(p.numel() for p in weights) + (N_L - 1) * of_layer
    return Count(N_L, total, model.W_E.numel(), of_layer, by_embed, by_layer, by_head, y.nbytes)


def saved_bytes(run, known):
    """(run(), the bytes that it saves for backward beside the storages of the tensors `known`)."""
    storages = set()
    with saved_tensors_hooks(lambda x: storages.add(x.untyped_storage()), lambda x: x):
        result = run()
    storages -= {x.untyped_storage() for x in known}
    return result, sum(s.nbytes() for s in storages)


def memory_of(device):
    """The bytes of memory of a device, or None if that is unknown."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if device.type == "cpu" and "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def refuse_what_cannot_fit(args, config, dtype, device):
    """Raise UsageError if train.py's flags need more than all memory of the device, at the least.

    For a model that cannot run on fake tensors (an edit may ask for values) nothing is refused.
    """
    total = memory_of(device)
    try:
        counted = count(args.model, config, dtype, args.batch_size, args.seq_len)
    except UsageError:
        raise
    except Exception:
        return
    need = counted.memory(args.shard, args.recompute)
    if args.compile:                                   # it saves less, but never less than this
        need["activations"] = counted.layers * counted.hidden
    state, saved = need["weights"] + need["moments"], need["activations"]

    # Gradients come as activations go: there are never all of both.
    if total is None or state + max(need["gradients"], saved) <= total:
        return
    state += need["gradients"]
    advice = ("a smaller model, or a larger --shard on more GPUs" if state > total
              else "a smaller --batch-size or --seq-len, or --recompute")
    state, saved, total = (f"{n / 2**30:,.1f} GiB" for n in (state, saved, total))
    raise UsageError(f"{counted.parameters:,} parameters, gradients and moments take {state}, "
                     f"{args.batch_size:,} sequences of {args.seq_len:,} tokens {saved} more, and "
                     f"{device} has {total}: take {advice}")
