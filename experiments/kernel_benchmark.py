"""How fast the fused kernel (screening_triton.py) is on a GPU.

    python -m experiments.kernel_benchmark

First it runs experiments.kernel_check. A wrong kernel is not timed.

Then a layer's screening at Psi = 48: 48 tiles at their initial windows (2 to 257), d_K = 16,
d_V = 64, one sequence, values in bfloat16. Beside it: other ways to compute the same, and causal
attention of the paper's 1.3B Transformer (16 heads of 128; it has half as many layers). Operations
and bytes are counted in experiments/kernel_work.py. With T = 2^17, for one tile:

    w = 256               N = T w             5.4e9 operations,   48 MiB
    dense (`screen`)      all T^2 pairs       2.7e12 operations, 64 GiB for its relevances

Times are medians, with a cold cache. roofline: the least time that the operations or the bytes
take, at the rates measured in the same run, over the time. ratio: the time over that of the fused
kernel. nan: it did not run, and a line says why. The backward pass of `screen_windowed` includes a
second forward pass.
"""
if not __package__:
    raise SystemExit("error: run python -m experiments.kernel_benchmark in the folder above")

import math
import time
import traceback

import torch

from experiments.gpu_peers import attentions
from experiments.gpu_report import first_line
from experiments.kernel_check import check_kernel, draw_inputs, randn, require_gpu
from experiments.kernel_work import (
    HEAD,
    HEADS,
    causal_work,
    initial_windows,
    pairs_inside,
    screening_work,
)
from multiscreen import screen as dense
from screening_triton import screen, triton
from support.cli import Parser, cli
from support.windowed import screen_windowed

if triton is not None:
    from triton.testing import do_bench

LENGTHS = [2**n for n in range(10, 18)]


def median(f):
    """Milliseconds. What takes over 0.2 s is timed once, after one run that does not count."""
    f()
    torch.cuda.synchronize()
    began = time.perf_counter()
    f()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    if seconds > 0.2:
        return 1e3 * seconds
    return do_bench(f, warmup=50, rep=300, return_mode="median")


def attempt(f, *args, say=lambda line: print(f"{'':9}{line}")):
    """f(*args), or nan and a line that says why: no memory, or no such backend."""
    try:
        return f(*args)
    except Exception as e:                             # a compiler's errors have many types
        traceback.print_exc()
        say(f"not run: {first_line(e)}")
        torch.cuda.empty_cache()
        return math.nan


@torch.no_grad()
def forward_time(f, *x):
    return median(lambda: f(*x))


def backward_time(f, *x):
    *x, dh = x
    x = [a.detach().requires_grad_() for a in x]
    h = f(*x)
    return median(lambda: torch.autograd.grad(h, x, dh, retain_graph=True))


def both_times(f, *x, **options):
    """Milliseconds forward and backward. x: what f takes, then the gradient of its result."""
    forward = attempt(forward_time, f, *x[:-1], **options)
    return forward, math.nan if math.isnan(forward) else attempt(backward_time, f, *x, **options)


def roofline():
    """What this GPU does: operations in bfloat16 products, and bytes to and from memory, a ms."""
    a, b = randn(8192, 8192), randn(8192, 8192)
    x = randn(2**28, dtype=torch.float32)
    return 2 * 8192**3 / median(lambda: a @ b), 2 * 2**30 / median(lambda: x.add_(1))


def projections_time(T):
    """Milliseconds of the matrix products of one layer at psi = 48."""
    x, y = randn(T, 2304), randn(T, 48 * 64)
    W_in, W_out = randn(2304, 48 * (16 + 16 + 64 + 64)), randn(48 * 64, 2304)
    return median(lambda: (x @ W_in, y @ W_out))


def ways(T, w, compiled):
    """{name: ((ms forward, ms backward), [(operations, bytes) forward, backward])} at length T."""
    x, work = draw_inputs(T, w, torch.bfloat16), screening_work(T, len(w), pairs_inside(T, w))
    times = {"fused": (both_times(screen, *x), work),
             "screen_windowed": (both_times(screen_windowed, *x), work)}
    if T <= 4096:
        all_pairs = screening_work(T, len(w), len(w) * T**2)
        times["screen, torch.compile"] = both_times(compiled, *x), all_pairs
    x = [randn(1, HEADS, T, HEAD) for _ in range(4)]
    for name, attention in attentions().items():
        times[f"attention, {name}"] = both_times(attention, *x), causal_work(T)
    return times


def benchmark():
    operations, bytes_ = roofline()
    print(f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}, "
          f"triton {triton.__version__}\n"
          f"roofline: {operations / 1e9:.0f} TFLOP/s (bfloat16, 8192^3), {bytes_ / 1e9:.2f} TB/s")
    rates = f"{'TFLOP/s':>9}{'roofline':>10}{'ratio':>8}"
    print(f"{'T':>7}  {'':22}{'fwd ms':>10}{rates}{'bwd ms':>10}{rates}")

    w = initial_windows()
    compiled = torch.compile(dense, dynamic=False)
    for T in LENGTHS:
        table = ways(T, w, compiled)
        fused = table["fused"][0]
        for name, (times, work) in table.items():
            cells = ""
            for ms, best, (n, size) in zip(times, fused, work):
                least = max(n / operations, size / bytes_)
                cells += f"{ms:10.3f}{n / ms / 1e9:9.1f}{least / ms:10.1%}{ms / best:8.2f}"
            print(f"{T:>7}  {name:22}{cells}", flush=True)

    # Beside the matrix products of the same layer, at the last length.
    projections = projections_time(T)
    infinite, _ = both_times(screen, *draw_inputs(T, [math.inf], torch.bfloat16))
    print(f"at T = {T}, forward: {fused[0] / projections:.3f} of the layer's projections "
          f"({projections:.2f} ms; wanted: under 0.2)\n"
          f"one infinite tile: {infinite:.2f} ms (under 5)\n"
          f"backward: {fused[1] / fused[0]:.2f} times forward (under 3.5)")


def main():
    Parser(__doc__).parse_args()
    require_gpu()
    check_kernel()
    benchmark()


if __name__ == "__main__":
    cli(main)
