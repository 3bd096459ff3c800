"""How fast is the kernel? The parts `layer`, `training` and `peers` of benchmarks.gpu."""
import math
from functools import partial
from itertools import product

import torch

from baselines import recipe
from baselines.transformer import SIZES, attention_by
from benchmarks.gpu_check import draw_inputs
from benchmarks.gpu_peers import flex_screen
from benchmarks.measure import training_step
from multiscreen import Config, Multiscreen, window
from multiscreen import screen as dense
from screening_triton import screen, triton
from support.cli import DEVICE
from support.compiled import compile_model
from support.timing import BACKENDS, random_model, trained_like
from support.windowed import screen_windowed

PSI = 48                                               # of the parts `layer` and `peers`
N_L, HEADS, WIDTH = SIZES["1.3B"]                      # beside psi = 48
LENGTHS = [2**n for n in (17, 12, 15, 10, 16, 14, 13, 11)]         # the most important first
DENSE, SLOW = 2**12, 2**14          # longest T of `screen`, of screen_windowed
# By psi, what a step trains on, tokens in the vocabulary, sequences, their length, and the
# Transformer of this size. First the defaults of train.py.
STEPS = {8: (257, 8, 256, "8M"), 16: (50257, 16, 4096, "45M"), 32: (50257, 4, 4096, "353M")}


def randn(*shape):
    return torch.randn(*shape, dtype=torch.bfloat16, device=DEVICE)


def milliseconds(f, during=300):
    """The median time of f(), with a cold cache. during: how long it is timed, in ms."""
    return triton.testing.do_bench(f, warmup=50, rep=during, return_mode="median")


# -------------------------------------------------------------------------- screening alone

def both_times(f, *x):
    """Milliseconds forward and backward. x: what f takes, then the gradient of its result."""
    *x, dh = x
    with torch.no_grad():
        forward = milliseconds(lambda: f(*x))
    x = [a.detach().requires_grad_() for a in x]
    h = f(*x)
    backward = milliseconds(lambda: torch.autograd.grad(h, x, dh, retain_graph=True))
    return {"forward_ms": forward, "backward_ms": backward}


def layer_windows():
    """{name: the windows of a layer}"""
    tile, = Multiscreen(Config(psi=PSI, N_L=1, d_E=1, vocab_size=1)).layers
    return {"initial": window(tile.s_w.detach()).tolist(),
            "trained-like": trained_like(PSI).tolist()}


def layer():
    """Screening of a layer of psi = 48, and of one infinite tile.

    products: the matrix products of the layer. Targets at T = 131072, initial windows: forward
    under 0.2 of them, backward under 3.5 of forward; the infinite tile: forward under 5 ms.
    """
    for T, (name, w) in product(LENGTHS, layer_windows().items()):
        yield {"windows": name, "T": T}, partial(time_layer, T, w)
    yield {"windows": "one, infinite", "T": LENGTHS[0]}, partial(time_layer, LENGTHS[0], [math.inf])


def time_layer(T, w):
    found = both_times(screen, *draw_inputs(T, w))
    x, y = randn(T, PSI**2), randn(T, PSI * 64)
    W_in, W_out = randn(PSI**2, PSI * (16 + 16 + 64 + 64)), randn(PSI * 64, PSI**2)
    return found | {"products_ms": milliseconds(lambda: (x @ W_in, y @ W_out))}


def peers():
    """Other ways to screen a layer of psi = 48, and a layer of the 1.3B Transformer's attention.

    x: the time over that of the fused kernel; in attention, of all layers over all of Multiscreen.
    Target: above 1.
    """
    ways = {f"attention, {backend}": math.inf for backend in ("flash", "cudnn")}
    ways |= {"screen, torch.compile": DENSE, "screen_windowed": SLOW, "FlexAttention": math.inf}
    for way, (name, w), T in product(ways, layer_windows().items(), LENGTHS):
        if T <= ways[way] and (name == "initial" or not way.startswith("attention")):
            yield {"way": way, "windows": name, "T": T}, partial(time_peer, way, T, w)


def time_peer(way, T, w):
    """One way, and the fused kernel right before it."""
    x, layers = draw_inputs(T, w), 1
    fused = both_times(screen, *x)
    if way.startswith("attention"):
        attend, layers = attention_by(BACKENDS[way.split(", ")[1]]), N_L / PSI
        f = partial(attend, is_causal=True)
        x = [randn(1, HEADS, T, WIDTH // HEADS) for _ in "qkvh"]
    elif way == "FlexAttention":
        f = flex_screen(T, x[3])
    else:
        f = screen_windowed if way == "screen_windowed" else torch.compile(dense, dynamic=False)
    found = both_times(f, *x)
    return found | {f"x_{ms[:-3]}": layers * found[ms] / fused[ms] for ms in found}


# ------------------------------------------------------------------------- a step of training

def training():
    """A step of training, compiled: train.py's default, and the paper's sequences of 4,096.

    Target at psi = 16: as many tokens as the Transformer.
    """
    for psi, (vocab_size, sequences, T, size) in STEPS.items():
        for name in ("multiscreen", f"transformer:{size}"):
            what = {"psi": psi, "model": name, "sequences": sequences, "T": T}
            yield what, partial(time_training, name, psi, vocab_size, sequences, T)


def time_training(name, psi, vocab_size, sequences, T):
    torch._dynamo.reset()                              # its limit on recompiling is one for all
    model = random_model(name, {"psi": psi, "vocab_size": vocab_size}, DEVICE)
    compile_model(model)
    step = training_step(model, recipe(name), sequences, T)
    step()
    torch.cuda.reset_peak_memory_stats()
    ms = milliseconds(step, 2000)
    return {"ms": ms, "tokens_per_s": 1e3 * sequences * T / ms,
            "peak_GiB": torch.cuda.max_memory_allocated() / 2**30}
