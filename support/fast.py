"""Make a model fast: a faster twin of `screen`, torch.compile, CUDA graphs, recomputing.

A twin repeats equations of multiscreen.py, so it screens only as long as these have the code that
it was written for: each twin has EQUATIONS, {name of a function: a hash of its code}. After an edit
of one of them the definition screens, and a line says so.

train.py calls `make_fast` once, and `load_checkpoint` calls `choose_screen`. Read it if a line says
that the definition screens, or before you add a kernel.
"""
import ast
import hashlib
import inspect
import math
from functools import partial
from operator import attrgetter
from textwrap import dedent
from types import MethodType

import torch
from torch import nn
from torch.utils._triton import has_triton
from torch.utils.checkpoint import checkpoint

import multiscreen
from support.cli import UsageError, error_line
from multiscreen import GatedScreeningTiles, Multiscreen
from support import check, native, windowed
from support import distributed as dist
from support.models import count_parameters, drawing_from, has_windows, random_states

# Inductor recomputes a value wherever it is used if that takes at most 30 operations. The angles of
# MiPE and RoPE take fewer: they would be computed, in float64, for every number that they rotate.
OPTIONS = {"realize_opcount_threshold": 12}

# Parameters times tokens of a pass that takes a GPU about ten milliseconds. A larger pass does not
# wait for its kernels to be launched, so a graph would only take up memory.
SMALL = 2**39


# ------------------------------------------------------------------------------- the screen

def code_of(f):
    """The code of a function without its comments and docstrings; "" if nobody can read it."""
    try:
        tree = ast.parse(dedent(inspect.getsource(f.__code__)))
    except (AttributeError, OSError, SyntaxError):     # no file, or a part of a statement
        return ""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
            del node.body[0]
    return ast.unparse(tree)


def hash_of_code(name):
    """A hash of a function of multiscreen, as it is in memory: a notebook's counts.

    Of a function that wraps another one both count, because your wrapper may name ours.
    """
    f = attrgetter(name)(multiscreen)
    code = code_of(f) + code_of(inspect.unwrap(f))
    return hashlib.sha256(code.encode()).hexdigest()[:12]


class CannotScreen(Exception):
    """A way to screen is of no use for this model here. The message says why, in a line."""


def edited_equations():
    """The names of the functions that you have edited, of those that a twin repeats."""
    known = native.EQUATIONS | windowed.EQUATIONS
    return [name for name, code in known.items() if hash_of_code(name) != code]


def require_unedited(twin, model):
    """Raise CannotScreen if a twin, a module, does not repeat what a model screens by now."""
    own = definition_of(model)
    if own is not Multiscreen.screen:
        raise CannotScreen(f"{twin.__name__} was not written for the model's own {own.__name__}")
    if any(hash_of_code(name) != code for name, code in twin.EQUATIONS.items()):
        raise CannotScreen(f"{twin.__name__} was not written for it")


def choose_screen(model, kernel="auto"):
    """Set what a model screens with, in place. Returns a line that says so. kernel: of --kernel.

    Call it again after each edit. Raises UsageError if the one that `kernel` asks for cannot run.
    """
    said, edited = [], edited_equations()
    if edited:
        said.append(f"your edit of {' and '.join(edited)} is used")
    for use in ways_to_screen(model, kernel):
        try:
            return "; ".join([*said, use(model) + where_called(model)])
        except CannotScreen as e:
            said.append(str(e))
    raise UsageError(f"--kernel {kernel}: {'; '.join(said)}")


def where_called(model):
    """Words for a layer with a `screening` of its own, which may pass on another function."""
    layer = type(model.layers[0])
    original = GatedScreeningTiles.screening
    if hasattr(layer, "own_screen") or getattr(layer, "screening", original) is original:
        return ""
    return f", where {layer.__name__}.screening calls it"


def definition_of(model):
    """What a model's class screens by: multiscreen's `screen`, unless it or its layers have one."""
    return getattr(type(model.layers[0]), "own_screen", type(model).screen)


def ways_to_screen(model, kernel):
    """The functions below to try, one after another, for a --kernel."""
    if kernel != "auto":
        return [{"definition": use_definition, "windowed": use_windows, "cpp": use_cpp,
                 "triton": use_kernel}[kernel]]
    if definition_of(model) is not Multiscreen.screen:
        return [use_definition]                        # the twins repeat only ours
    ways = [use_unedited_windows, use_definition]
    if model.W_E.is_cuda:
        return [use_kernel, *ways]
    if model.W_E.is_cpu:
        return [use_cpp, *ways]
    return ways


def use_definition(model):
    """Let a model screen by multiscreen's `screen`, or by its own."""
    model.screen = definition_of(model)
    return f"screening by {model.screen.__module__}.{model.screen.__name__}, with T x S memory"


def use_windows(model):
    """Let a model screen in windows, by its definition; nobody checks that none looks beyond w."""
    screen = definition_of(model)
    model.screen = windowed.screen_windowed
    if screen is not Multiscreen.screen:
        model.screen = partial(windowed.screen_windowed, screen=screen)
        model.screen.cache = windowed.WindowCache
    return f"screening in windows, by {screen.__module__}.{screen.__name__}"


def use_unedited_windows(model):
    """As use_windows. Raises CannotScreen if something may lie beyond w."""
    require_unedited(windowed, model)
    return use_windows(model)


def use_kernel(model):
    """Let a model screen by the fused kernel. Raises CannotScreen if it may not."""
    import screening_triton as fused  # takes a second, and is of no use on a CPU

    if model.W_E.dtype == torch.float64:
        raise CannotScreen("the kernel does not support float64")
    try:
        fused.require_device(model.W_E.device)
        fused.require_sizes(model.config.d_K, model.config.d_V)
    except (RuntimeError, ValueError) as e:
        raise CannotScreen(str(e)) from None
    require_unedited(fused, model)
    require_right(fused.screen, model, torch.bfloat16)
    fused.screen.cache = windowed.WindowCache
    model.screen = fused.screen
    return "screening by the fused kernel"


def use_cpp(model):
    """Let a model screen in C++, on a CPU. Raises CannotScreen if it may not."""
    dtypes = {model.W_E.dtype, model.dtype or torch.float32}
    if not model.W_E.is_cpu or dtypes != {torch.float32}:
        raise CannotScreen("the screen in C++ is for float32 on a CPU")
    require_unedited(native, model)
    try:
        library = native.library(model.config.d_K, model.config.d_V)
    except OSError as e:
        raise CannotScreen(f"no screen in C++ ({error_line(e)})") from None
    require_right(native.screen, model, torch.float32)
    model.screen = native.screen
    line = "screening in C++, by support/screen.cpp"
    if not library.has_threads():
        line += ", on one thread, because the compiler has no OpenMP"
    return line


def require_right(screen, model, dtype):
    """Raise CannotScreen if a twin errs on this machine in one case: compilers have mistakes, too.

    The case has the model's device, d_K and d_V, for which a twin is compiled. dtype: that of the
    values; rounding to bfloat16 makes errors of up to 1 %.
    """
    windows, widths = [1.5, 17.0, 250.0, math.inf], [1.0, 0.2, 0.5, 0.1]
    try:
        inputs = check.draw_case(300, 0, windows, widths, dtype=dtype, device=model.W_E.device,
                                 d_K=model.config.d_K, d_V=model.config.d_V)
        errors = check.screen_errors(screen, inputs)
    except Exception as e:                             # whatever it is, this one cannot be used
        raise CannotScreen(f"{screen.__module__}.screen fails here ({error_line(e)})") from e
    for name, error in errors.items():
        if not error.max() < 0.02:
            raise CannotScreen(f"on this machine, {name} of {screen.__module__}.screen is wrong by "
                               f"{error.max():.1%}: please report it")


# ------------------------------------------------------------------------------- training

def make_fast(model, args):
    """Choose the screen, recompute, compile, all in place. args: train.py's flags.

    Prints a warning if the model breaks a promise of support/check.py, or its class does nothing.
    """
    if has_windows(model):
        print(choose_screen(model, args.kernel))
    check.warn(model)
    for line in check.unused(type(model.layers[0])):
        print(f"warning: {line}")
    if args.recompute:
        recompute(model)
    wants_compile = args.compile
    if args.compile is None:
        wants_compile = model.W_E.is_cuda and has_triton()
    if wants_compile:
        compile_and_record(model, args)


def compile_and_record(model, args):
    """Compile a model and, on a GPU, record its pass, in place, as far as both work here.

    Raises UsageError if the compiler fails and --compile was given.
    """
    compile_model(model)
    try:
        try_a_pass(model, args.batch_size, args.seq_len)
    except torch.OutOfMemoryError:
        raise
    except Exception as e:                             # whatever it is, try without the compiler
        if args.compile:
            raise UsageError(f"--compile: torch.compile fails here ({error_line(e)})") from e
        undo_compile(model)
        print(f"not compiled: torch.compile fails here ({error_line(e)})")
        return
    print("compiled by torch.compile")

    # A graph writes the gradients of a pass over those of the pass before, so a step has just one.
    is_one_pass = args.batch_tokens == args.batch_size * args.seq_len
    if model.W_E.is_cuda and is_one_pass and not args.recompute and dist.world() == 1:
        print(try_to_record(model, args.batch_size, args.seq_len))


def recompute(model):
    """Keep only the layers' inputs, and recompute their activations in backward. In place.

    Whatever random numbers a layer draws, by torch, Python or numpy, it draws again.
    """
    def forward(self, *inputs):
        states, done = random_states(), []

        def run(*inputs):
            if not done:
                done.append(True)
                return type(self).forward(self, *inputs)
            with drawing_from(states):
                return type(self).forward(self, *inputs)

        return checkpoint(run, *inputs, use_reentrant=False)

    for layer in model.layers:
        layer.forward = MethodType(forward, layer)


def compile_model(model):
    """torch.compile the layers, the head and the loss, in place. Equal layers share their graphs.

    The embedding is left out, because a compiled lookup adds up its gradient with atomics, and two
    runs would differ. So are `screen_windowed`, whose calls depend on w, and the screen in C++.
    """
    # On a CPU, constant sizes make Multiscreen's graphs 3 to 8 % slower than symbolic ones do.
    options = {"dynamic": None if model.W_E.is_cuda else True, "options": OPTIONS}
    for layer in model.layers:
        layer.compile(**options)
    model.head = torch.compile(model.head, **options)
    model.nats = torch.compile(model.nats, **options)
    screen = model.screen
    function = getattr(screen, "func", screen)         # that of a `partial`, too
    if function in (windowed.screen_windowed, native.screen):
        model.screen = torch.compiler.disable(screen)
        model.screen.cache = windowed.WindowCache


def undo_compile(model):
    """Leave a model as it was before `compile_model`, in place. Its screen needs no change."""
    for layer in model.layers:
        layer._compiled_call_impl = None
    del model.head, model.nats


def trial_pass(model, batch, T):
    """Inputs and targets (batch, T) of a pass, to try a model on."""
    tokens = torch.arange(batch * T, device=model.W_E.device).view(batch, T)
    tokens %= model.config.vocab_size
    return tokens, tokens.flip(1)


def try_a_pass(model, batch, T):
    """Run a pass, forward and backward, and forget its gradients."""
    try:
        model.loss(*trial_pass(model, batch, T)).backward()
    finally:
        model.zero_grad(set_to_none=True)


class Loss(nn.Module):
    """A model's loss as a module, which is what PyTorch can record."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens, targets):
        return type(self.model).loss(self.model, tokens, targets)


def try_to_record(model, batch, T):
    """Record a small model's pass as CUDA graphs, forward and backward, in place. Returns a line.

    A small model waits for the CPU to launch some 500 kernels one by one; a graph launches them all
    at once. It holds nothing but kernels: Python code in a layer no longer runs. Passes of another
    size, and those of evaluation, run as before.
    """
    if count_parameters(model) * batch * T > SMALL:
        return "not recorded as a CUDA graph: a pass of this size keeps the GPU busy"
    inputs, before = trial_pass(model, batch, T), random_states()
    try:
        # A pass that waits for the GPU cannot be recorded, and trying it may break PyTorch.
        torch.cuda.set_sync_debug_mode("error")
        model.loss(*inputs).backward()
        torch.cuda.set_sync_debug_mode("default")
        if random_states() != before:
            return "not recorded as a CUDA graph: a layer draws random numbers on the CPU"
        model.zero_grad(set_to_none=True)
        recorded = torch.cuda.make_graphed_callables(Loss(model), inputs, allow_unused_input=True)
    except Exception as e:                             # whatever it is, the pass runs without
        return f"not recorded as a CUDA graph: {error_line(e)}"
    finally:
        torch.cuda.set_sync_debug_mode("default")
        model.zero_grad(set_to_none=True)

    def loss(self, tokens, targets, reduction="mean"):
        is_recorded = tokens.shape == (batch, T) and reduction == "mean" and self.training
        if is_recorded and torch.is_grad_enabled():
            return recorded(tokens, targets).clone()   # the next pass overwrites it
        return type(self).loss(self, tokens, targets, reduction)

    model.loss = MethodType(loss, model)
    return "recorded as a CUDA graph"
