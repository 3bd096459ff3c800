"""Is the fused kernel (screening_triton.py) right on a GPU?

    python -m experiments.kernel_check

h and its five gradients at up to 2^17 positions, against `screen_windowed` in float64. A second run
must give the same bits. The script fails at the first error that is too large.
"""
if not __package__:
    raise SystemExit("error: run python -m experiments.kernel_check in the folder above")

import math
import os
from unittest import mock

import torch

from multiscreen import unit
from screening_triton import available, screen
from support import windowed
from support.cli import Parser, UsageError, cli
from support.windowed import screen_windowed

DEVICE = "cuda"
LENGTHS = (2**12 - 1, 2**15, 2**17)
LIMITS = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}
WINDOWS = (2.0, 17.5, 256.0, 5000.0, math.inf)
PAIRS = 2**24                          # at once in the reference, for a GPU: 2 GB in float64


def require_gpu():
    """Raise UsageError if the compiled kernel cannot run here."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise UsageError("TRITON_INTERPRET=1 is set: unset it to run on the GPU")
    if reason := available():
        raise UsageError(reason)


def randn(*shape, dtype=torch.bfloat16, rng=None):
    """torch.randn on the GPU, in bfloat16."""
    return torch.randn(*shape, dtype=dtype, device=DEVICE, generator=rng)


def draw_inputs(T, w, dtype):
    """q and k around one direction of their tile, in float32, v in dtype, w, r and dh.

    One sequence of T positions, a tile for each window in w.
    """
    rng = torch.Generator(DEVICE).manual_seed(0)
    H = len(w)

    def draw(*shape):
        return randn(*shape, dtype=torch.float32, rng=rng)

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


def check_case(T, dtype):
    """(the largest errors of h, dq, dk, dv, dw, dr over the largest value, the same bits twice)"""
    x = draw_inputs(T, WINDOWS, dtype)
    # At T = 2^17 its blocks for a CPU are 37,000 pieces of 88 launches, half a minute of waiting.
    with mock.patch.object(windowed, "PAIRS", PAIRS):
        exact = value_and_gradients(screen_windowed, *x, dtype=torch.float64)
    first, second = (value_and_gradients(screen, *x) for _ in range(2))
    errors = [((a - b).abs().max() / b.abs().max()).item() for a, b in zip(first, exact)]
    return errors, all(torch.equal(a, b) for a, b in zip(first, second))


def objection(errors, same, limit):
    """What is wrong with a case, or None."""
    if not all(e < limit for e in errors):                                  # a NaN fails, too
        return f"the kernel is wrong by more than {limit}"
    if not same:
        return "the kernel gave other bits the second time"


def check_kernel():
    """Print the errors, a line for each length and type of v; raise UsageError for a wrong one."""
    print("largest error over largest value, against screen_windowed in float64")
    print(f"{'T':>7}{'v':>10}{'h':>9}{'dq':>9}{'dk':>9}{'dv':>9}{'dw':>9}{'dr':>9}")
    for T in LENGTHS:
        for dtype, limit in LIMITS.items():
            errors, same = check_case(T, dtype)
            print(f"{T:>7}{str(dtype)[6:]:>10}" + "".join(f"{e:9.1e}" for e in errors), flush=True)
            if wrong := objection(errors, same, limit):
                raise UsageError(wrong)


def main():
    Parser(__doc__).parse_args()
    require_gpu()
    check_kernel()


if __name__ == "__main__":
    cli(main)
