"""Compile a model in place: torch.compile fuses what its layers and head do to single elements.

No class, no other model and no setting of torch changes.
"""
import inspect
from functools import cache, partial
from types import MethodType

import torch
from torch.utils._triton import has_triton

from support.cli import UsageError, error_line
from support.windowed import screen_windowed


def try_to_compile(model, wanted, batch, T):
    """Compile a model in place and try it on `batch` sequences. Returns one line, or None.

    wanted: see --compile; None compiles on a CUDA GPU with Triton, and leaves the model as it was
    if that fails. Raises UsageError if it fails but was asked for.
    """
    device = model.W_E.device
    if not wanted and (wanted is not None or device.type != "cuda" or not has_triton()):
        return None
    modules = [model, *model.layers]
    before = [vars(module).copy() for module in modules]
    compile_model(model)
    tokens = torch.zeros(batch, T, dtype=torch.int64, device=device)
    try:
        model.loss(tokens, tokens).backward()
        return "compiled by torch.compile"
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


def compile_model(model):
    """torch.compile the layers and the head, in place. All layers and lengths share their graphs.

    The embedding is left out: compiled, a lookup adds its gradient up with atomics, and two runs
    differ. So is `screen_windowed`, whose calls depend on w: it splits a layer's graph, and a layer
    that --recompute asks to be one graph stays eager.
    """
    # Before torch 2.12 all functions that share code also share one limit on recompiling.
    known = inspect.signature(torch.compile).parameters
    options = {"isolate_recompiles": True} if "isolate_recompiles" in known else {}
    compiled = cache(partial(torch.compile, dynamic=True, **options))
    for owner, name in [*((layer, "forward") for layer in model.layers), (model, "head")]:
        # Bound to its owner, so that a copy has its own weights.
        setattr(owner, name, MethodType(compiled(getattr(owner, name).__func__), owner))
    model.hidden = MethodType(hidden, model)
    if getattr(model.screen, "func", model.screen) is screen_windowed:
        eager = torch.compiler.disable(model.screen)
        model.agreeing = eager if model.forgets else None
        model.screen = eager


def hidden(self, tokens, caches=None, screen=None):
    """A compiled model's `hidden`: layers run eagerly with caches, whose sizes change in each call.

    They also run eagerly with another screen: relevance maps pass a new function in each call.
    """
    if caches is None and screen is None:
        return type(self).hidden(self, tokens)
    with torch.compiler.set_stance("force_eager"):
        return type(self).hidden(self, tokens, caches, screen)
