"""The parts of benchmarks.gpu: each yields cells, (what is measured, a function that measures)."""
import gc
import importlib.util
import math
import shutil
import subprocess
import sys
from functools import partial
from itertools import product
from unittest import mock

import torch

from baselines import recipe
from baselines.transformer import SIZES
from benchmarks.measure import training_step
from benchmarks.peers import attention, flex_screen
from multiscreen import Config, Multiscreen, unit, window
from multiscreen import screen as dense
from screening_triton import screen, triton
from support import windowed
from support.choose import compile_layers
from support.timing import ROOT, random_model, trained_like
from support.windowed import screen_windowed

DEVICE = "cuda"
PSI = 48                            # of the parts `layer` and `peers`
LENGTHS = [2**n for n in (17, 12, 15, 10, 16, 14, 13, 11)]         # the most important first
DENSE, SLOW = 2**12, 2**14          # longest T of `screen` and slow backends; of screen_windowed
N_L, HEADS, WIDTH = SIZES["1.3B"]   # of the Transformer of the size of psi = 48
TRAINED, T_TRAIN = [(16, "45M", 16), (32, "353M", 8)], 4096        # and sequences in a step
CHECKED = (2**12 - 1, 2**15, 2**17)
LIMITS = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}


def randn(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, dtype=dtype, device=DEVICE)


# ------------------------------------------------------------------------------- is it right?

def tests():
    """The tests of the kernel, compiled, and a small case under compute-sanitizer."""
    beside = ["-n", "8"] if importlib.util.find_spec("xdist") else []
    commands = {"pytest": [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *beside,
                           "test_multiscreen.py", "-k", "kernel"]}
    sanitizer = shutil.which("compute-sanitizer", path="/usr/local/cuda/bin") or "compute-sanitizer"
    small = ("from benchmarks.gpu_parts import *; x = draw_inputs(130, (2.0, 70.5, math.inf), "
             "torch.bfloat16); value_and_gradients(screen, *x)")
    for tool in ("memcheck", "racecheck"):
        commands[tool] = [sanitizer, "--tool", tool, "--error-exitcode", "9", sys.executable, "-c",
                          small]
    for name, command in commands.items():
        yield {"command": name}, partial(run_command, command)


def run_command(command):
    """The last line of a command that succeeds. Memory is not pooled: it would hide mistakes."""
    command = ["env", "TRITON_INTERPRET=0", "PYTORCH_NO_CUDA_MEMORY_CACHING=1", *command]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True)
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}: {' / '.join(lines[-5:])}")
    return {"result": lines[-1]}


def check():
    """h and its gradients against `screen_windowed` in float64; the same bits twice."""
    for T, dtype in product(CHECKED, LIMITS):
        yield {"T": T, "v": str(dtype)[6:]}, partial(compare_with_float64, T, dtype)


def draw_inputs(T, w, dtype):
    """q and k around one direction of their tile, in float32, v in dtype, w, r and dh.

    One sequence of T positions, a tile for each window in w.
    """
    torch.manual_seed(0)
    H, draw = len(w), partial(randn, dtype=torch.float32)
    base = draw(1, H, 1, 16)
    q, k = (unit(0.6 * base + 0.4 * draw(1, H, T, 16)) for _ in range(2))
    v = unit(draw(1, T, H, 64)).transpose(1, 2).to(dtype)
    dh = draw(1, T, H, 64).transpose(1, 2).to(dtype)
    return q, k, v, torch.tensor(w, device=DEVICE), torch.full((H,), 0.5, device=DEVICE), dh


def value_and_gradients(f, *x, dtype=None):
    """[h, dq, dk, dv, dw, dr]. x: q, k, v, w, r and dh, cast to dtype if one is given."""
    *x, dh = x
    x = [a.detach().to(dtype or a.dtype).requires_grad_() for a in x]
    h = f(*x)
    return [h.detach(), *torch.autograd.grad(h, x, dh.to(h.dtype))]


def compare_with_float64(T, dtype, w=(2.0, 17.5, 256.0, 5000.0, math.inf)):
    x = draw_inputs(T, w, dtype)
    # Larger blocks: at T = 2^17 those for a CPU are half a minute of launches.
    with mock.patch.object(windowed, "PAIRS", 2**24):
        exact = value_and_gradients(screen_windowed, *x, dtype=torch.float64)
    first, second = (value_and_gradients(screen, *x) for _ in range(2))
    errors = [((a - b).abs().max() / b.abs().max()).item() for a, b in zip(first, exact)]
    verdict = "right"
    if not all(e < LIMITS[dtype] for e in errors):     # a NaN is not
        verdict = f"wrong by more than {LIMITS[dtype]}"
    elif not all(torch.equal(a, b) for a, b in zip(first, second)):
        verdict = "other bits the second time"
    return dict(zip(("h", "dq", "dk", "dv", "dw", "dr"), errors)) | {"verdict": verdict}


# ---------------------------------------------------------------------------- how fast is it?

def milliseconds(f):
    """The median time of f(), with a cold cache."""
    return triton.testing.do_bench(f, warmup=50, rep=300, return_mode="median")


def both_times(f, *x):
    """Milliseconds forward and backward. x: what f takes, then the gradient of its result."""
    *x, dh = x
    with torch.no_grad():
        found = {"forward_ms": milliseconds(lambda: f(*x))}
    try:
        x = [a.detach().requires_grad_() for a in x]
        h = f(*x)
        found["backward_ms"] = milliseconds(
            lambda: torch.autograd.grad(h, x, dh, retain_graph=True))
    except Exception as e:                             # it is forward only, or out of memory
        found["note"] = f"backward: {type(e).__name__}: {str(e)[:200]}"
    return found


def layer_windows():
    """{name: the windows of a layer}"""
    tile, = Multiscreen(Config(psi=PSI, N_L=1, vocab_size=2)).layers
    return {"initial": window(tile.s_w.detach()).tolist(),
            "trained-like": trained_like(PSI).tolist()}


def layer():
    """Screening of a layer, and one infinite tile, beside the matrix products of the layer."""
    for T, (name, w) in product(LENGTHS, layer_windows().items()):
        yield {"windows": name, "T": T}, partial(time_layer, T, w)
    yield {"windows": "one, infinite", "T": LENGTHS[0]}, partial(time_layer, LENGTHS[0], [math.inf])


def time_layer(T, w):
    found = both_times(screen, *draw_inputs(T, w, torch.bfloat16))
    x, y = randn(T, PSI**2), randn(T, PSI * 64)
    W_in, W_out = randn(PSI**2, PSI * (16 + 16 + 64 + 64)), randn(PSI * 64, PSI**2)
    return found | {"products_ms": milliseconds(lambda: (x @ W_in, y @ W_out))}


def peers():
    """Other ways to screen a layer, and a layer of the Transformer's attention."""
    ways = {f"attention, {backend}": math.inf for backend in ("flash", "cudnn")}
    ways |= {"screen, torch.compile": DENSE, "screen_windowed": SLOW, "FlexAttention": math.inf}
    for way, (name, w), T in product(ways, layer_windows().items(), LENGTHS):
        if T <= ways[way] and (name == "initial" or not way.startswith("attention")):
            yield {"way": way, "windows": name, "T": T}, partial(time_peer, way, T, w)


def time_peer(way, T, w):
    """One way, and the fused kernel right before it."""
    x, layers = draw_inputs(T, w, torch.bfloat16), 1
    fused = both_times(screen, *x)
    if way.startswith("attention"):
        f, layers = partial(attention, way.split(", ")[1]), N_L / PSI
        x = [randn(1, HEADS, T, WIDTH // HEADS) for _ in "qkvh"]
    elif way == "FlexAttention":
        f = flex_screen(T, x[3], DEVICE == "cuda")
    else:
        f = screen_windowed if way == "screen_windowed" else torch.compile(dense, dynamic=False)
    found = both_times(f, *x)
    for ms in found.keys() & {"forward_ms", "backward_ms"}:
        found[f"x_{ms[:-3]}"] = layers * found[ms] / fused.get(ms, math.nan)
    return found


def training():
    """A step of training, compiled."""
    for psi, size, sequences in TRAINED:
        for name in ("multiscreen", f"transformer:{size}"):
            yield ({"psi": psi, "model": name, "sequences": sequences},
                   partial(time_training, name, psi, sequences))


def time_training(name, psi, sequences):
    gc.collect()                                       # a compiled model refers to itself
    model = random_model(name, {"psi": psi}, DEVICE)
    compile_layers(model)
    torch.cuda.reset_peak_memory_stats()
    ms = milliseconds(training_step(model, recipe(name), sequences, T_TRAIN))
    return {"ms": ms, "tokens_per_s": 1e3 * sequences * T_TRAIN / ms,
            "peak_GiB": torch.cuda.max_memory_allocated() / 2**30}
