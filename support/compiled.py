"""Compile a model in place: torch.compile fuses what layers, head and loss do to single elements.

On a GPU the passes of training are also recorded as CUDA graphs. No class, no other model and no
setting of torch changes.
"""
import inspect
import warnings
from functools import cache
from types import MethodType

import torch
from torch import nn
from torch._dynamo.exc import FailOnRecompileLimitHit

from multiscreen import stays_in_window
from support.cli import UsageError, error_line
from support.windowed import screen_windowed

# Inductor computes a value anew wherever it is used, as long as that takes at most 30 operations.
# MiPE's and RoPE's angles take fewer: they would be computed, in float64, for every single number
# that they turn. At 12 operations it computes each angle once, and keeps a table of cos and sin.
OPTIONS = {"realize_opcount_threshold": 12}
COMPILED = "compiled by torch.compile"


def try_to_compile(model, wanted, batch, T):
    """Compile a model in place and try it on `batch` sequences. Returns one line.

    If that fails, the model is left as it was, or UsageError is raised if it was `wanted`.
    """
    modules = [model, *model.layers]
    before = [vars(module).copy() for module in modules]
    compile_model(model)
    tokens = torch.zeros(batch, T + 1, dtype=torch.int64, device=model.W_E.device)
    try:
        model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
        return COMPILED
    except torch.OutOfMemoryError:
        raise
    except Exception as e:                             # whatever it is, it is the compiler's
        if wanted:
            raise UsageError(f"--compile: torch.compile fails here ({error_line(e)})") from e
        for module, attributes in zip(modules, before):
            module.__dict__ = attributes
        return f"not compiled: torch.compile fails here ({error_line(e)})"
    finally:
        model.zero_grad(set_to_none=True)


def compile_model(model, dynamic=None):
    """torch.compile the layers, the head and the loss, in place. Equal layers share their graphs.

    The first sizes are constants in a graph of their own, and all other sizes share one more; with
    dynamic=False every size has its own. Passes without gradients have their own graphs, too.

    The embedding is left out: compiled, a lookup adds its gradient up with atomics, and two runs
    differ. So is `screen_windowed`, whose calls depend on w: it splits a layer's graph, and a layer
    that --recompute asks to be one graph stays eager.
    """
    # Before torch 2.12 all functions that share code also share one limit on recompiling.
    known = inspect.signature(torch.compile).parameters
    isolated = {"isolate_recompiles": True} if "isolate_recompiles" in known else {}
    # PyTorch's limit counts for each layer: if no two are equal, each has graphs of its own.
    limit = len(model.layers) * torch._dynamo.config.recompile_limit

    @cache
    def compiled(f):
        return limited(torch.compile(f, dynamic=dynamic, options=OPTIONS, **isolated), limit)

    parts = [*((layer, "forward") for layer in model.layers), (model, "head"), (model, "nats")]
    for owner, name in parts:
        # Bound to its owner, so that a copy has its own weights.
        setattr(owner, name, MethodType(compiled(getattr(owner, name).__func__), owner))
    model.hidden = MethodType(hidden, model)
    if getattr(model.screen, "func", model.screen) is screen_windowed:
        eager = torch.compiler.disable(model.screen)
        eager.stays_in_window = stays_in_window(model.screen)
        model.screen = eager


def limited(compiled, limit):
    """A compiled function that raises UsageError where it would need more graphs than the limit.

    PyTorch itself would print a warning and run all further sizes eagerly, at a fraction of the
    speed.
    """
    @torch._dynamo.config.patch(recompile_limit=limit, fail_on_recompile_limit_hit=True)
    def run(*inputs, **options):
        try:
            return compiled(*inputs, **options)
        except FailOnRecompileLimitHit as e:
            raise UsageError(f"torch.compile has made {limit} graphs for different sizes and layers"
                             ", and would need more: use --no-compile") from e

    return run


def try_to_record(model, batch, T):
    """Record forward and backward of `batch` sequences as CUDA graphs, in place. Returns a line.

    A small model waits for the CPU to launch some 500 kernels one by one; a graph launches all of
    them at once. It holds kernels only: Python code in a layer no longer runs. Every other pass is
    made as before: without gradients, of another size, with another screen or other weights.
    """
    tokens = torch.zeros(batch, T, dtype=torch.int64, device=model.W_E.device)
    sample = tokens, tokens.clone()
    screen, W_E, weights = model.screen, model.W_E, [*model.parameters()]
    try:
        with warnings.catch_warnings(action="ignore"): # about streams, while it records
            recorded = torch.cuda.make_graphed_callables(Pass(model), sample,
                                                         allow_unused_input=True)
    except Exception as e:                             # what waits for the GPU cannot be recorded
        return f"not recorded as CUDA graphs: {error_line(e)}"
    finally:
        model.zero_grad(set_to_none=True)

    def loss(self, tokens, targets, reduction="mean"):
        # Gradients are where they were recorded, so those of an earlier pass would be overwritten.
        same = (self is model and self.W_E is W_E and self.screen is screen and self.training
                and tokens.shape == targets.shape == (batch, T) and reduction == "mean"
                and torch.is_grad_enabled() and all(p.grad is None for p in weights))
        if same:
            return recorded(tokens, targets)
        return type(self).loss(self, tokens, targets, reduction)

    model.loss = MethodType(loss, model)
    return ("training passes recorded as CUDA graphs: Python code in a layer no longer runs there "
            "(with --no-compile it does)")


class Pass(nn.Module):
    """A model whose call is its loss."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens, targets):
        return type(self.model).loss(self.model, tokens, targets)


def hidden(self, tokens, caches=None, screen=None):
    """A compiled model's `hidden`: layers run eagerly with caches, whose sizes change in each call.

    They also run eagerly with another screen: relevance maps pass a new function in each call.
    """
    if caches is None and screen is None:
        return type(self).hidden(self, tokens)
    with torch.compiler.set_stance("force_eager"):
        return type(self).hidden(self, tokens, caches, screen)
