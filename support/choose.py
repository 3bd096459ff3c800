"""Make a model fast, above all by the fastest `screen` that agrees with the definition."""
import math
import os
import sys
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import NamedTuple

import torch
from torch.nn.functional import normalize
from torch.utils._triton import has_triton

import multiscreen
from support import distributed as dist
from support.cli import UsageError, error_line
from support.models import has_windows
from support.windowed import screen_windowed

# What is compared: calls of `screen` like a model's, (queries, keys, windows, acceptance widths).
NEARBY, FAR = (1.5, 17.0, 300.0, math.inf), (4950.0, 5100.0, 7000.0, math.inf)
WIDE = (1.0, 0.1, 0.5, 0.03, 0.2)
CASES = [(331, 331, NEARBY, WIDE), (17, 401, NEARBY, WIDE), (17, 5017, FAR, WIDE),
         (1, 2017, NEARBY, WIDE), (131, 131, NEARBY, (1e-3,))]
# Errors allowed, divided by the largest value: pieces in float64, kernel in float32, 16-bit values.
LIMIT_64, LIMIT, LIMIT_16 = 1e-7, 5e-4, 1e-1


class Choice(NamedTuple):
    """The function that a model screens with, and why."""
    screen: Callable
    line: str                                          # why, in one line
    expected: bool                                     # whether it is as fast as it can be here


def make_fast(model, args):
    """Choose the screen, set up recomputing and compiling, and distribute the model, in place.

    args: train.py's flags. Prints what was chosen.
    """
    if has_windows(model):
        choice = get_screen(model, args.kernel)
        model.screen = choice.screen
        print(choice.line)
        require_memory(model, args.batch_size, args.seq_len, args.recompute)
    if sees_later_tokens(model, args.seq_len):
        print("warning: the model's output at a token depends on later tokens, which it has to "
              "predict, so its losses will be too low: has an edit dropped a mask?", flush=True)
    if args.recompute:
        dist.recompute(model)
    device, sizes = model.W_E.device, (args.batch_size, args.seq_len)
    if args.compile or args.compile is None and device.type == "cuda" and has_triton():
        from support import compiled  # here, because it takes a second

        # A model that recomputes, or that waits for other processes, is not recorded.
        alone = dist.world() == 1 and not args.recompute
        print(compiled.try_to_compile(model, args.compile, *sizes, record=alone))
    dist.distribute(model, args.shard, device)


@torch.enable_grad()
def get_screen(model, kernel="auto"):
    """Choose what a model screens with; returns a Choice. kernel: a value of --kernel.

    `auto` takes the first of the fused kernel (on a GPU) and `screen_windowed` that agrees with the
    definition in value and in every gradient, else the definition: multiscreen.screen as it stands
    now, or the `own_screen` of the layers' class. Call it again after each edit. If the layers do
    not call the screen that they are given, nothing is compared.

    Raises UsageError if the one that `kernel` asks for cannot run or does not agree.
    """
    (definition, name), device = definition_of(model), model.W_E.device
    own = definition is not multiscreen.screen
    if not asks_for_screen(model):
        return Choice(model.screen, "screening by the layers' own code: nothing is compared, and "
                      "there are no relevance maps", True)
    if kernel == "definition":
        return Choice(definition, f"screening by {name}, the definition", True)

    kinds, objections = [kernel], []
    if kernel == "auto":
        kinds = ["triton", "windowed"] if device.type == "cuda" and not own else ["windowed"]
    for kind in kinds:
        if why := objection(kind, model):
            objections += [why] * (why not in objections)
            continue
        f, label, _ = screen_of(kind, model)
        if kernel == "auto" and kind == "windowed" and device.type != "cpu":
            # On a GPU one call is faster: it has a third of the launches. For backward the layers
            # keep up to eight numbers for each of B H T T pairs, which makes 4 GiB in all.
            f = partial(f, at_once=2**27 // model.config.N_L)
            f.stays_in_window = not own
            label = f"{name} up to B H T T = {f.keywords['at_once']:.1e}, then {label}"
        if objections:
            return Choice(f, f"{'; '.join(objections)}: using {label}", False)
        return Choice(f, f"screening by {label}, which agrees with {name}", True)
    if kernel != "auto":
        raise UsageError(f"--kernel {kernel}: {objections[0]}")
    return Choice(definition, f"{'; '.join(objections)}: using {name}, the definition", False)


def definition_of(model):
    """(the function that defines how a model screens, its name)."""
    if own := getattr(model.layers[0], "own_screen", None):
        return own, own.__name__
    return multiscreen.screen, "multiscreen.screen"


def require_memory(model, batch, T, recompute=False):
    """Raise UsageError if training on a CPU needs more memory than there is for T x T relevances.

    Only a definition holds them. For backward each layer, or with `recompute` one layer at a time,
    keeps about seven tensors of that size; four are counted, as an edited one may keep fewer.
    """
    definition, name = definition_of(model)
    if model.screen is not definition or model.W_E.device.type != "cpu" or sys.platform == "win32":
        return
    needed = 16 * batch * model.config.N_H * T * T * (1 if recompute else model.config.N_L)
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > there:
        raise UsageError(f"{name} would keep {needed / 2**30:,.0f} GiB of relevances for backward; "
                         f"this machine has {there / 2**30:,.0f}: use --kernel windowed, "
                         "--recompute, or a smaller --batch-size or --seq-len")


@torch.no_grad()
def asks_for_screen(model):
    """Whether each layer calls its `screen` argument exactly once, as relevance maps require.

    Raises UsageError unless windows and acceptance widths have one number per tile.
    """
    calls, H = [], model.config.N_H

    def record(q, k, v, w, r, i0=0):
        for name, x in {"windows w": w, "acceptance widths r": r}.items():
            if x.shape != (H,):
                raise UsageError(f"a layer's {name} have shape {tuple(x.shape)}; expected ({H},), "
                                 "one number per tile: repeat a value that tiles share")
        calls.append(q)
        return torch.zeros_like(v)

    tokens, training = torch.zeros(1, 2, dtype=torch.int64, device=model.W_E.device), model.training
    model.eval().hidden(tokens, None, record)
    model.train(training)
    return len(calls) == len(model.layers)


@torch.no_grad()
def sees_later_tokens(model, T):
    """Whether the second half of min(T, 128) tokens changes the hidden states of the first half."""
    device, vocab_size, half = model.W_E.device, model.config.vocab_size, min(T, 128) // 2
    tokens = torch.arange(16 * half, device=device).view(8, 2 * half) % vocab_size
    others = torch.cat([tokens[:, :half], (tokens[:, half:] + 1) % vocab_size], 1)
    # On copies, and the first twice: a layer may keep state between calls or draw random numbers.
    with torch.random.fork_rng([]):
        x, again, y = (deepcopy(model).eval().hidden(some)[:, :half]
                       for some in (tokens, tokens, others))
    return torch.equal(x, again) and ((x - y).abs() > 1e-6).any().item()


# ------------------------------------------------------------------------------ the comparison

def screen_of(kind, model):
    """(the fast function of a kind, its name, why it cannot run with this model or None)"""
    if kind == "windowed":
        definition, _ = definition_of(model)
        own = definition is not multiscreen.screen
        f = partial(screen_windowed, screen=definition) if own else screen_windowed
        return f, "screen_windowed", None
    # Imported here: it takes a second, and is of no use on a CPU.
    import screening_triton as fused

    why = (fused.available(model.W_E.device)
           or fused.unsupported_sizes(model.config.d_K, model.config.d_V))
    if model.W_E.dtype == torch.float64:
        why = "the kernel does not support float64"
    return fused.screen, "screening_triton.screen", why


def objection(kind, model):
    """Why the function of that kind must not screen here, or None.

    The definition is computed in float64, and so are pieces of it, which then equal it however an
    edit affects rounding.
    """
    (definition, name), (f, label, why) = definition_of(model), screen_of(kind, model)
    if why:
        return why
    # An Apple GPU has no float64.
    device = torch.device("cpu") if model.W_E.device.type == "mps" else model.W_E.device
    cases, limits = CASES, {torch.float64: LIMIT_64}
    if kind == "triton":
        limits = {torch.float32: LIMIT}
        if device.type == "cpu":
            cases = [case for case in CASES if case[0] * case[1] < 2**15]
            print(f"comparing the kernel in Triton's interpreter, in {len(cases)} of {len(CASES)} "
                  "cases; a step will take minutes, not milliseconds", flush=True)
    dtype, = limits
    if model.dtype in (torch.float16, torch.bfloat16):
        limits[model.dtype] = LIMIT_16

    for *case, widths in cases:
        inputs = revealing_inputs(*case, widths, model.config, device)
        try:
            exact = with_gradients(definition, inputs)
        except Exception as e:                         # whatever it is, an edit caused it
            return (f"{name} fails in the comparison ({error_line(e)}), which --kernel definition "
                    "skips")
        if not all(x.isfinite().all() for x in exact):
            return f"{name} gives nan or inf in the comparison"
        for dtype_v, limit in limits.items():
            try:
                error = difference(with_gradients(f, inputs, dtype, dtype_v), exact)
            except Exception as e:                     # whatever it is, this one cannot be used
                return f"{label} fails here ({error_line(e)})"
            if error > limit * max(0.03 / min(widths), 1):               # 2/r amplifies errors of s
                return (f"{name} and {label} differ by {error:.2g} times the largest value "
                        "(a changed equation?)")


def revealing_inputs(T, S, windows, widths, config, device):
    """q, k, v, w, r in float64 and i0, as a model calls `screen`, chosen so that mistakes show.

    In each tile, queries and keys lie near one direction (else nearly all pairs are rejected), and
    some pairs have s = 1 or s = -1. There are a multiple of N_H tiles, at least 4. float32 holds
    all numbers exactly, and bfloat16 holds v: rounding it would swamp the gradients of few keys.
    """
    H = config.N_H * -(-4 // config.N_H)
    g = torch.Generator().manual_seed(0)
    base = torch.randn(H, 1, config.d_K, generator=g)
    spread = torch.rand(2, H, S, 1, generator=g)
    x = base + spread * torch.randn(2, H, S, config.d_K, generator=g)
    q, k = normalize(x, dim=-1)[:, None]
    k[:, :, ::7], k[:, :, 3::11] = q[:, :, ::7], -q[:, :, 3::11]
    v = normalize(torch.randn(1, H, S, config.d_V, generator=g), dim=-1).bfloat16()
    w = torch.tensor([windows[n % len(windows)] for n in range(H)])
    r = torch.tensor([widths[n % len(widths)] for n in range(H)])
    return *(x.to(device).double() for x in (q[:, :, S - T :], k, v, w, r)), S - T


def with_gradients(screen, inputs, dtype=torch.float64, dtype_v=None):
    """h and the gradients of q, k, v, w, r, in float64. inputs: from `revealing_inputs`.

    `screen` takes v in dtype_v, if that is given, and all others in dtype.
    """
    *x, i0 = inputs
    leaves = q, k, v, w, r = [a.detach().to(dtype).requires_grad_() for a in x]
    h = screen(q, k, v.to(dtype_v or dtype), w, r, i0)
    dh = torch.randn(h.shape, generator=torch.Generator().manual_seed(1)).bfloat16().to(h)
    gradients = torch.autograd.grad(h, leaves, dh, allow_unused=True, materialize_grads=True)
    return [x.detach().double() for x in (h, *gradients)]


def difference(found, exact):
    """The largest error relative to the largest value: for h, dq, dk and dv that of each tile."""
    worst = 0.0
    for a, b in zip(found, exact):
        axes = (0, 2, 3) if b.ndim == 4 else 0
        error = (a - b).abs().amax(axes) / b.abs().amax(axes).clamp_min(1e-30)
        worst = max(worst, error.max().nan_to_num(math.inf).item())
    return worst
