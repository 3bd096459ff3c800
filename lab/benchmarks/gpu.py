"""Is the fused kernel right on your GPU, and how fast are it and the models that use it?

    python -m lab.benchmarks.gpu                     runs all parts, the most important first
    python -m lab.benchmarks.gpu kernel train        runs only these two

check     compares the kernel with float64 at up to 2^17 positions; nothing is timed unless it is
          right
kernel    times screening by itself, beside attention by itself
train     times a training step, beside the Transformer of the same size
decode    times one more token after 256, 8,192 and 131,072 tokens, beside the Transformer
forward   times all tokens in one pass, by size and by length, beside the Transformer. The column
          x_alone is the time of the pass divided by the time that its matrix products and its
          screening, or attention, take by themselves; whatever exceeds 1 is overhead

Each part appends rows to a table as it measures them: train, decode and forward share
OUT/latency.tsv, and each of the other parts has a table OUT/PART.tsv. If you rerun the command,
after a crash, after Ctrl-C or after --minutes, it measures only what is missing. When --minutes are
over it still finishes the measurement that it has begun, so if your job may take 10 minutes, use
--minutes 8. To draw the forward passes, run `python -m lab.benchmarks.cpu OUT/latency.tsv`. To test
the compiled kernel, run:

    pytest -q test_multiscreen.py -k kernel
"""
import math
import os
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import torch._functorch.config
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from lab.baselines.transformer import SIZES
from lab.benchmarks import timing
from multiscreen import Config, Multiscreen, softmask, trim, unit
from screening_triton import available, screen
from support import windowed
from support.choose import with_gradients
from support.cli import DEVICE, Parser, UsageError, cli, own_folder
from support.table import print_table
from support.windowed import screen_windowed

CHECKED = [{"T": T, "v": v} for T in (2**12 - 1, 2**15, 2**17)
           for v in ("float32", "float16", "bfloat16")]
LIMITS = {"float32": 1e-4, "float16": 4e-3, "bfloat16": 2e-2}
GRADIENTS = ("h", "dq", "dk", "dv", "dw", "dr")

# Of the part `kernel`, the most important first: a layer with psi = 48, and the attention of the
# 1.3B Transformer.
PSI, (_, HEADS, WIDTH) = 48, SIZES["1.3B"]
WAYS = [("fused kernel", windows, 2**n) for n in (17, 12, 15, 10)
        for windows in ("initial", "trained-like")]
WAYS += [(way, "infinite", 2**n) for n in (17, 14, 12, 15)
         for way in ("fused kernel", "flash", "cudnn")]
WAYS += [("matrix products", None, 2**n) for n in (17, 12, 15)]
WAYS += [("FlexAttention", "initial", 2**n) for n in (12, 17)]

# By psi: the Transformer beside it.
BESIDE = {8: "8M", 16: "45M", 32: "353M", 48: "1.3B"}
# By part, what it times, and (psi, tokens in the vocabulary, sequences, tokens in each).
MODELS = {
    # First train.py's defaults.
    "train": ("train-compiled", [(8, 257, 8, 256), (16, 50257, 16, 4096), (32, 50257, 4, 4096)]),
    "decode": ("decode", [(psi, 50257, 1, T) for psi in (8, 32) for T in (2**8, 2**13, 2**17)]),
    "forward": ("forward-compiled", [(psi, 50257, 1, 2**17) for psi in (48, 32, 16, 8)]
                + [(32, 50257, 1, 2**n) for n in (16, 14, 12, 10)]),
}


# ------------------------------------------------------------------------ is the kernel right?

def draw_inputs(T, w, dtype=torch.bfloat16):
    """q and k around one direction of their tile, in float32, v in dtype, w, r.

    One sequence of T positions, a tile for each window in w.
    """
    torch.manual_seed(0)
    H, draw = len(w), partial(torch.randn, device=DEVICE)
    base = draw(1, H, 1, 16)
    q, k = (unit(0.6 * base + 0.4 * draw(1, H, T, 16)) for _ in range(2))
    v = unit(draw(1, T, H, 64)).transpose(1, 2).to(dtype)
    return q, k, v, torch.tensor(w, device=DEVICE), torch.full((H,), 0.5, device=DEVICE)


def check(T, v):
    """Largest error over largest value, against `screen_windowed` in float64."""
    dtype = getattr(torch, v)
    inputs = *draw_inputs(T, (2.0, 17.5, 256.0, 5000.0, math.inf), dtype), 0
    # Larger blocks: at T = 2^17 those for a CPU are half a minute of launches.
    with mock.patch.object(windowed, "PAIRS", 2**24):
        exact = with_gradients(screen_windowed, inputs)
    first, second = (with_gradients(screen, inputs, torch.float32, dtype) for _ in range(2))
    errors = [((a - b).abs().max() / b.abs().max()).item() for a, b in zip(first, exact)]
    verdict = "right"
    if not all(e < LIMITS[v] for e in errors):         # a NaN is not
        verdict = f"off by more than {LIMITS[v]}"
    elif not all(torch.equal(a, b) for a, b in zip(first, second)):
        verdict = "different bits the second time"
    return dict(zip(GRADIENTS, errors)) | {"verdict": verdict}


# ------------------------------------------------------------------------- how fast is it alone?

def kernel(way, windows, T):
    """Milliseconds of one layer with psi = 48, and query-key pairs in the windows per second.

    Infinite windows are those of 16 tiles, beside the 16 heads of the 1.3B Transformer's attention.
    A model has 48 layers of screening; the Transformer has 24 of attention.
    """
    randn = partial(torch.randn, dtype=torch.bfloat16, device=DEVICE)
    if way == "matrix products":
        x = [randn(T, PSI**2), randn(PSI**2, PSI * (16 + 16 + 64 + 64)),
             randn(T, PSI * 64), randn(PSI * 64, PSI**2)]
        return {"forward_ms": milliseconds(lambda: (x[0] @ x[1], x[2] @ x[3]))}
    w = windows_of(windows)
    if way in timing.BACKENDS:
        f = partial(timing.BACKENDS[way], is_causal=True)
        x = [randn(1, HEADS, T, WIDTH // HEADS) for _ in "qkv"]
    else:
        x = draw_inputs(T, w)
        f = screen if way == "fused kernel" else flex_screen(T, x[3])
    forward = milliseconds(lambda: f(*x))
    x = [a.requires_grad_() for a in x]
    h = f(*x)
    dh = torch.randn_like(h)
    backward = milliseconds(lambda: torch.autograd.grad(h, x, dh, retain_graph=True))
    reaches = [min(math.ceil(min(width, T)), T) for width in w]
    pairs = sum(n * T - n * (n - 1) // 2 for n in reaches)
    return {"forward_ms": forward, "backward_ms": backward,
            "forward_pairs_per_s": 1e3 * pairs / forward,
            "backward_pairs_per_s": 1e3 * pairs / backward}


def windows_of(name):
    """The windows of a layer by name."""
    if name == "infinite":
        return [math.inf] * HEADS
    tile, = Multiscreen(Config(psi=PSI, N_L=1, d_E=1, vocab_size=1)).layers
    return (timing.trained_like(PSI) if name == "trained-like" else tile.reach().detach()).tolist()


def milliseconds(f):
    """The median of up to 50 passes, in about a second."""
    times, = timing.take_turns([f], DEVICE, repeats=50, seconds=1)
    return statistics.median(times)


def flex_screen(T, w):
    """Stock PyTorch's way to screen: a function (q, k, v, w, r). T: a multiple of 128.

    A softmax of log alpha_d is alpha_d over its sum, and exp(lse) is that sum: relevances are at
    least 0, so the product of the two is Eq. 12. Below 1e-30 a relevance counts as 1e-30. q and k
    are cast to v's dtype, as FlexAttention requires. The block mask is made here, once, from the
    windows w (H,): while they are trained it must be made again after each step.
    """
    def inside(b, h, i, j):
        return (j <= i) & (i - j < edges[h])

    edges, make, flex = w.detach(), create_block_mask, flex_attention
    if w.is_cuda:
        make, flex = (torch.compile(f, dynamic=False) for f in (make, flex))
        torch._functorch.config.donated_buffer = False  # backward is timed again and again
    block_mask = make(inside, None, len(w), T, T, device=w.device)

    def screen(q, k, v, w, r):
        def score(s, b, h, i, j):
            return (trim(s, r[h]) * softmask(j - i, w[h])).clamp(min=1e-30).log()

        u, lse = flex(q.to(v.dtype), k.to(v.dtype), v, score_mod=score, block_mask=block_mask,
                      scale=1.0, return_lse=True)
        return (u * lse.exp()[..., None]).to(v.dtype)

    return screen


# ------------------------------------------------------------- models, beside the Transformers

def model_cells(part):
    """The cells of a part that times models."""
    what, cases = MODELS[part]
    for psi, vocab_size, batch, T in cases:
        for name in ("multiscreen", f"transformer:{BESIDE[psi]}"):
            model = timing.new_model(name, psi, vocab_size, DEVICE)
            yield from timing.cells_of([model], what, batch, T, DEVICE)


# ---------------------------------------------------------------------------------- the command

PARTS = ("check", "kernel", "train", "decode", "forward")
# A function, its arguments, the columns of what it returns.
ALONE = {
    "check": (check, CHECKED, (*GRADIENTS, "verdict")),
    "kernel": (kernel, [dict(zip(("way", "windows", "T"), way)) for way in WAYS],
               ("forward_ms", "backward_ms", "forward_pairs_per_s", "backward_pairs_per_s")),
}


def measure_part(name, out, end):
    """(columns, rows) of a part, after measuring what it lacks.

    Nothing is timed before the check has found the kernel right.
    """
    if name != "check":
        measure_part("check", out, end)
    # A group for each cell, so that its memory is counted.
    if name not in ALONE:
        rows = timing.measure(out / "latency.tsv", timing.KEYS, timing.VALUES,
                              [[cell] for cell in model_cells(name)],
                              partial(timing.time_models, device=DEVICE, repeats=10, seconds=2),
                              DEVICE, end=end)
        return timing.COLUMNS, timing.summarize(rows)
    f, cells, values = ALONE[name]
    path, keys = out / f"{name}.tsv", [*cells[0]]
    rows = timing.measure(path, keys, values, [[cell] for cell in cells],
                          lambda group: [f(*(cell[key] for key in keys)) for cell in group],
                          DEVICE, end=end)
    if name == "check" and [row["verdict"] for row in rows] != ["right"] * len(cells):
        raise UsageError("the kernel is not right, or not checked (python -m lab.benchmarks.gpu "
                         f"check): see {path}")
    return (*keys, *values), rows


def main():
    p = Parser(__doc__)
    p.add_argument("part", nargs="*", help=f"what to run: {', '.join(PARTS)} [all]")
    p.add_argument("--out", type=own_folder, default=Path("out/gpu"),
                   help="the folder to write the tables to [out/gpu]")
    p.add_argument("--minutes", type=float, default=60.0,
                   help="begin no new measurement after this many minutes [60]")
    args = p.parse_args()
    if unknown := set(args.part) - {*PARTS}:
        raise UsageError(f"{unknown.pop()} is not a part: use {', '.join(PARTS)}")
    wanted = [name for name in PARTS if name in (args.part or PARTS)]
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise UsageError("TRITON_INTERPRET=1 is set: unset it to run on the GPU")
    if reason := available():
        raise UsageError(reason)
    args.out.mkdir(parents=True, exist_ok=True)

    end, failed = time.monotonic() + 60 * args.minutes, []
    if len(wanted) == 1:
        columns, rows = measure_part(wanted[0], args.out, end)
        print_table(columns, [[row[name] or None for name in columns] for row in rows],
                    f"{wanted[0]}, on {timing.machine_of(DEVICE)}")
    else:
        # A process each: after an invalid access to memory a process can no longer use the GPU.
        for name in wanted:
            left = str((end - time.monotonic()) / 60)
            command = [sys.executable, "-m", "lab.benchmarks.gpu", name, "--out", args.out]
            failed += [name] * bool(subprocess.run([*command, "--minutes", left]).returncode)
    if failed:
        raise UsageError(f"{', '.join(failed)} failed")


if __name__ == "__main__":
    cli(main)
