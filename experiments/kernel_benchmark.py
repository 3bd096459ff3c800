"""The fused kernel (screening_triton.py) on a GPU: is it right, and how fast is it?

    python -m experiments.kernel_benchmark

First the check: h and the five gradients at up to 2^17 positions, against `screen_windowed` in
float64, and twice for equal bits. If they are wrong the script fails before it times anything.

Then a layer's screening at Psi = 48: 48 tiles at their initial windows (2 to 257), d_K = 16,
d_V = 64, one sequence, values in bfloat16. Beside it: other ways to compute the same, and causal
attention of the Transformer of that size (18 heads of 128). For N query-key pairs in the windows:

                          forward             backward
    operations            2 N (K + V)         2 N (2K + V) for dq, 2 N (2K + 2V) for dk and dv
    bytes per position    384: q, k, v, h     1024: q, k, v, dh twice, and dq, dk, dv

An operation counts once, however many parts its operands have. So with T = 2^17, for one tile:

    w = 256               N = T w             5.4e9 operations,   48 MiB
    dense (`screen`)      all T^2 pairs       2.7e12 operations, 64 GiB for its relevances

Times are medians, with a cold cache. roofline: the least time that the operations or the bytes
take, at the rates measured in the same run, over the time. ratio: the time over that of the fused
kernel. nan: it did not run, and a line says why. The backward pass of `screen_windowed` includes a
second forward pass.
"""
import math
import os
from functools import partial

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from multiscreen import screen as dense
from multiscreen import screen_windowed, unit
from screening_triton import available, screen, triton
from support.cli import Parser, UsageError, cli

if triton is not None:
    from triton.testing import do_bench

DEVICE = "cuda"
CHECKED = (2**12 - 1, 2**15, 2**17)
LENGTHS = [2**n for n in range(10, 18)]
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}


def randn(*shape, dtype=torch.bfloat16, rng=None):
    return torch.randn(*shape, dtype=dtype, device=DEVICE, generator=rng)


def inputs(T, w, dtype):
    """Correlated q, k in float32, v in dtype, w, r and dh: one sequence of T, a tile for each w."""
    rng = torch.Generator(DEVICE).manual_seed(0)
    H = len(w)
    draw = partial(randn, dtype=torch.float32, rng=rng)
    base = draw(1, H, 1, 16)
    q, k = (unit(0.6 * base + 0.4 * draw(1, H, T, 16)) for _ in range(2))
    v = unit(draw(1, T, H, 64)).transpose(1, 2).to(dtype)
    dh = draw(1, T, H, 64).transpose(1, 2).to(dtype)
    return q, k, v, torch.tensor(w, device=DEVICE), torch.full((H,), 0.5, device=DEVICE), dh


# ------------------------------------------------------------------------------------- the check

def value_and_gradients(f, *x, dtype=None):
    """[h, dq, dk, dv, dw, dr]. x: q, k, v, w, r and dh, cast to dtype if one is given."""
    *x, dh = x
    x = [a.detach().to(dtype or a.dtype).requires_grad_() for a in x]
    h = f(*x)
    return [h.detach(), *torch.autograd.grad(h, x, dh.to(h.dtype))]


def check():
    print("largest error over largest value, against screen_windowed in float64")
    print(f"{'T':>7}{'v':>10}{'h':>9}{'dq':>9}{'dk':>9}{'dv':>9}{'dw':>9}{'dr':>9}")
    for T in CHECKED:
        for dtype, limit in ((torch.float32, 1e-4), (torch.float16, 4e-3), (torch.bfloat16, 2e-2)):
            x = inputs(T, [2.0, 17.5, 256.0, 5000.0, math.inf], dtype)
            exact = value_and_gradients(screen_windowed, *x, dtype=torch.float64)
            first, second = (value_and_gradients(screen, *x) for _ in range(2))
            errors = [((a - b).abs().max() / b.abs().max()).item() for a, b in zip(first, exact)]
            print(f"{T:>7}{str(dtype)[6:]:>10}" + "".join(f"{e:9.1e}" for e in errors), flush=True)
            if not all(e < limit for e in errors):                          # a NaN fails, too
                raise UsageError(f"the kernel is wrong by more than {limit}")
            if not all(torch.equal(a, b) for a, b in zip(first, second)):
                raise UsageError("the kernel gave other bits the second time")


# ------------------------------------------------------------------------------------- the times

def median(f):
    """Milliseconds."""
    return do_bench(f, warmup=50, rep=300, return_mode="median")


def attempt(f, *args):
    """f(*args), or nan and a line that says why: no memory, or no such backend."""
    try:
        return f(*args)
    except RuntimeError as e:
        print(f"{'':9}not run: {str(e).splitlines()[0]}")
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


def both_times(f, *x):
    """Milliseconds forward and backward. x: what f takes, then the gradient of its result."""
    forward = attempt(forward_time, f, *x[:-1])
    return forward, math.nan if math.isnan(forward) else attempt(backward_time, f, *x)


def roofline():
    """What this GPU does: operations in bfloat16 products, and bytes to and from memory, a ms."""
    a, b = randn(8192, 8192), randn(8192, 8192)
    x = torch.zeros(2**28, device=DEVICE)
    return 2 * 8192**3 / median(lambda: a @ b), 2 * 2**30 / median(lambda: x.add_(1))


def ways(T, w, compiled):
    """{name: ((ms forward, ms backward), [(operations, bytes) forward, backward])} at length T."""
    # The queries that see a key d back are T - d, for d = 0 .. n - 1 where the window is n.
    n_inside = [min(math.ceil(width), T) for width in w]
    pairs = sum(n * T - n * (n - 1) // 2 for n in n_inside)
    screening, all_pairs = ([(160 * N, 384 * len(w) * T), (512 * N, 1024 * len(w) * T)]
                            for N in (pairs, len(w) * T**2))
    causal = [(2 * 18 * 128 * T**2, 8 * 18 * 128 * T), (5 * 18 * 128 * T**2, 16 * 18 * 128 * T)]

    x = inputs(T, w, torch.bfloat16)
    times = {"fused": (both_times(screen, *x), screening),
             "screen_windowed": (both_times(screen_windowed, *x), screening)}
    if T <= 4096:
        times["screen, torch.compile"] = both_times(compiled, *x), all_pairs
    attention = partial(scaled_dot_product_attention, is_causal=True)
    x = [randn(1, 18, T, 128) for _ in range(4)]
    for name, backend in BACKENDS.items():
        with sdpa_kernel(backend):
            times[f"attention, {name}"] = both_times(attention, *x), causal
    return times


def benchmark():
    operations, bytes_ = roofline()
    print(f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}, "
          f"triton {triton.__version__}\n"
          f"roofline: {operations / 1e9:.0f} TFLOP/s (bfloat16, 8192^3), {bytes_ / 1e9:.2f} TB/s")
    rates = f"{'TFLOP/s':>9}{'roofline':>10}{'ratio':>8}"
    print(f"{'T':>7}  {'':22}{'fwd ms':>10}{rates}{'bwd ms':>10}{rates}")

    w = [math.exp(s) + 1 for s in torch.linspace(0, math.log(256), 48).tolist()]
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
    x, y = randn(T, 2304), randn(T, 48 * 64)
    W_in, W_out = randn(2304, 48 * (16 + 16 + 64 + 64)), randn(48 * 64, 2304)
    projections = median(lambda: (x @ W_in, y @ W_out))
    infinite, _ = both_times(screen, *inputs(T, [math.inf], torch.bfloat16))
    print(f"at T = {T}, forward: {fused[0] / projections:.3f} of the layer's projections "
          f"({projections:.2f} ms; wanted: under 0.2)\n"
          f"one infinite tile: {infinite:.2f} ms (under 5)\n"
          f"backward: {fused[1] / fused[0]:.2f} times forward (under 3.5)")


def main():
    Parser(__doc__).parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise UsageError("TRITON_INTERPRET=1 is set: unset it to run on the GPU")
    if reason := available():
        raise UsageError(reason)
    check()
    benchmark()


if __name__ == "__main__":
    cli(main)
