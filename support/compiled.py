"""Compile a model in place: torch.compile fuses the elementwise work of layers, head and loss.

On a GPU, the training pass of a small model is also recorded as a CUDA graph. No class, no other
model and no setting of PyTorch is changed.
"""
import gc
import inspect
import random
import warnings
from contextlib import contextmanager
from functools import cache
from types import MethodType

import torch
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch.autograd.function import once_differentiable

from multiscreen import stays_in_window
from support.cli import UsageError, error_line
from support.models import count_parameters
from support.windowed import screen_windowed

# Inductor recomputes a value wherever it is used if that takes at most 30 operations. MiPE's and
# RoPE's angles take fewer: they would be computed, in float64, for every number that they rotate.
# With 12, each angle is computed once, and its cosine and sine are kept in a table.
OPTIONS = {"realize_opcount_threshold": 12}

# Parameters times tokens of a pass that takes a GPU about ten milliseconds. A larger pass does not
# wait for kernel launches, so a graph would only take up memory.
SMALL = 2**39


def try_to_compile(model, wanted, batch, T, record=False):
    """Compile a model in place and try it on `batch` sequences; on a GPU, `record` its pass, too.

    Returns what was done, in a line or two. If it cannot be compiled, the model is left as it was,
    or UsageError is raised if it was `wanted`.
    """
    modules = [model, *model.layers]
    before = [vars(module).copy() for module in modules]
    # On a CPU, constant sizes make Multiscreen's graphs 3 to 8 % slower than symbolic ones do.
    compile_model(model, dynamic=None if model.W_E.is_cuda else True)
    tokens = torch.zeros(batch, T + 1, dtype=torch.int64, device=model.W_E.device)
    try:
        model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
    except torch.OutOfMemoryError:
        raise
    except Exception as e:                             # whatever it is, the compiler caused it
        if wanted:
            raise UsageError(f"--compile: torch.compile fails here ({error_line(e)})") from e
        for module, attributes in zip(modules, before):
            module.__dict__ = attributes
        return f"not compiled: torch.compile fails here ({error_line(e)})"
    finally:
        model.zero_grad(set_to_none=True)
    lines = ["compiled by torch.compile"]
    if record and model.W_E.is_cuda:
        lines.append(try_to_record(model, batch, T))
    return "\n".join(lines)


def compile_model(model, dynamic=None):
    """torch.compile the layers, the head and the loss, in place. Equal layers share their graphs.

    By default the first sizes become constants of a graph of their own, and all other sizes share
    one more. With dynamic=False every size has its own graph; with dynamic=True no size is a
    constant, except 1. Passes without gradients have their own graphs, too.

    The embedding is left out, because a compiled lookup adds up its gradient with atomics, and two
    runs would differ. So is `screen_windowed`, whose calls depend on w: it splits a layer's graph,
    and with --recompute, which asks for one graph per layer, the layer stays eager.
    """
    # Before torch 2.12 all functions that share code also share one limit on recompiling.
    known = inspect.signature(torch.compile).parameters
    isolated = {"isolate_recompiles": True} if "isolate_recompiles" in known else {}
    # PyTorch's limit, for each layer: if no two layers are equal, each has graphs of its own.
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
    """Record a small model's pass, forward and backward, as a CUDA graph, in place. Returns a line.

    A small model waits for the CPU to launch some 500 kernels one by one; a graph launches them all
    at once. It holds nothing but kernels, so Python code in a layer no longer runs. The first
    replay must give the same numbers as the model, bit for bit. All other passes run as before:
    those without gradients, of another size, or with another screen or other weights.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    if count_parameters(model) * batch * T > SMALL:
        return "not recorded as a CUDA graph: a pass of this size keeps the GPU busy"
    tokens = torch.arange(batch * T, device=model.W_E.device).view(batch, T)
    tokens %= model.config.vocab_size
    inputs = tokens, tokens.flip(1)

    def one_pass(tokens, targets):
        loss = type(model).loss(model, tokens, targets)
        # Without its autograd graph: what that holds would break the recording.
        return loss.detach(), torch.autograd.grad(loss, trained, allow_unused=True)

    try:
        with warnings.catch_warnings(action="ignore"):   # about syncs and streams
            # The first pass compiles, and the compiler itself may wait for the GPU. A weight
            # without a gradient, such as s_r where r is fixed, is left out from then on.
            _, gradients = one_pass(*inputs)
            trained = [p for p, gradient in zip(trained, gradients) if gradient is not None]
            before = random_states()
            with require_no_wait():
                loss, gradients = one_pass(*inputs)
            if random_states() != before:
                return "not recorded as a CUDA graph: a layer draws random numbers on the CPU"
            play = record(one_pass, inputs)
        played = Played.apply(play, *inputs, *trained)
        found = played.detach(), *torch.autograd.grad(played, trained)
    except torch.AcceleratorError as e:                # recording failed
        return (f"not recorded as a CUDA graph: {error_line(e)} (PyTorch may not recover from "
                "that: if a later step fails, use --no-compile)")
    except Exception as e:
        return f"not recorded as a CUDA graph: {error_line(e)}"
    if not all(map(torch.equal, found, (loss, *gradients))):
        return ("not recorded as a CUDA graph: a recorded pass gives other numbers here: do its "
                "layers draw random numbers?")

    def weights(model):
        return [(id(p), p.data_ptr(), p.requires_grad) for p in model.parameters()]

    screen, recorded, modules = model.screen, weights(model), [*model.modules()]

    def loss(self, tokens, targets, reduction="mean"):
        same = (self.training and torch.is_grad_enabled() and reduction == "mean"
                and tokens.shape == targets.shape == (batch, T)
                and self.screen is screen and weights(self) == recorded)
        if same and not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks
                            for m in modules):
            return Played.apply(play, tokens, targets, *trained)
        return type(self).loss(self, tokens, targets, reduction)

    model.loss = MethodType(loss, model)
    return ("training passes are recorded as a CUDA graph, so Python code in a layer (prints, "
            "counters) does not run during training: --no-compile turns this off")


@contextmanager
def require_no_wait():
    """Raise RuntimeError where the CPU waits for the GPU: then nothing can be recorded."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def random_states():
    """The states of the random number generators on the CPU."""
    return random.getstate(), torch.get_rng_state().tolist()


def record(one_pass, like):
    """Record a pass of inputs like these as a CUDA graph. Returns a function that plays it.

    A graph reads its inputs from, and writes its results to, the memory it was recorded with.
    """
    inputs = [torch.zeros_like(x) for x in like]
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    gc.collect()                       # a graph that is freed during a recording would break it
    stream.wait_stream(torch.cuda.current_stream())
    # Even if recording fails, the former stream becomes the current one again.
    with torch.cuda.stream(stream):
        one_pass(*inputs)              # so that cuBLAS and Triton are set up by now
        with torch.cuda.graph(graph, stream=stream):
            results = one_pass(*inputs)

    def play(*new):
        for x, y in zip(inputs, new):
            x.copy_(y)
        graph.replay()
        return results

    return play


class Played(torch.autograd.Function):
    """The loss of a recorded pass, of which the graph has also computed the gradients.

    Both are copied: the next pass that is played overwrites them.
    """

    @staticmethod
    def forward(ctx, play, tokens, targets, *trained):
        loss, gradients = play(tokens, targets)
        ctx.gradients = torch._foreach_mul(gradients, 1.0)
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss):
        return None, None, None, *torch._foreach_mul(ctx.gradients, dloss)


def hidden(self, tokens, caches=None, screen=None):
    """A compiled model's `hidden`: layers run eagerly with caches, whose sizes change in each call.

    They also run eagerly with another screen: relevance maps pass a new function in each call.
    """
    if caches is None and screen is None:
        return type(self).hidden(self, tokens)
    with torch.compiler.set_stance("force_eager"):
        return type(self).hidden(self, tokens, caches, screen)
