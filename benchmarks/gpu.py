"""Everything that only a GPU can tell: is the kernel right, and how fast is it?

    python -m benchmarks.gpu                     all parts, about 8 minutes
    python -m benchmarks.gpu layer peers         some of them
    python -m benchmarks.gpu report              OUT/report.md out of the tables that are there

check     the kernel against float64 at up to 2^17 positions; nothing is timed before it is right
tests     all tests of the kernel, compiled, and a small case under compute-sanitizer
layer     screening of a psi = 48 layer, T = 2^10 .. 2^17, beside its matrix products
training  tokens per second and memory of a step, beside the Transformer
peers     attention, FlexAttention and other ways to screen, beside the fused kernel

Whole models are timed by `python -m experiments.latency --compile`.

Each part writes OUT/PART.tsv row by row. Given again, the command measures what is missing: after a
crash, after Ctrl-C, after --minutes. Times are medians with a cold cache.
"""
import os
import time
from pathlib import Path

import torch

from benchmarks import gpu_parts
from benchmarks.measure import code_and_machine, current_rows, measure_missing
from screening_triton import available, triton
from support.cli import Parser, UsageError, cli

# Each part: what makes its cells, its columns, what the report says above its table.
PARTS = {
    "check": (gpu_parts.check, ("h", "dq", "dk", "dv", "dw", "dr", "verdict"),
              "Largest error over largest value, against `screen_windowed` in float64."),
    "tests": (gpu_parts.tests, ("result",), "The last line of each command."),
    "layer": (gpu_parts.layer, ("forward_ms", "backward_ms", "products_ms"),
              "products: the matrix products of the layer. Targets at T = 131072, initial windows: "
              "forward under 0.2 of them, backward under 3.5 of forward; infinite: under 5 ms."),
    "training": (gpu_parts.training, ("ms", "tokens_per_s", "peak_GiB"),
                 "Target at psi = 16: as many tokens per second as the Transformer."),
    "peers": (gpu_parts.peers, ("forward_ms", "backward_ms", "x_forward", "x_backward"),
              "x: the time over that of the fused kernel; in attention, of all layers of the 1.3B "
              "Transformer over all of Multiscreen. Target: above 1."),
}


def require_gpu():
    """Raise UsageError if the compiled kernel cannot run here."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise UsageError("TRITON_INTERPRET=1 is set: unset it to run on the GPU")
    if reason := available():
        raise UsageError(reason)


def require_right(path):
    """Raise UsageError unless the check has found the kernel right: here, as it is now."""
    columns, rows = current_rows(path)
    verdicts = {row[columns.index("verdict")] for row in rows}
    if "right" not in verdicts:
        raise UsageError("nothing is timed before the kernel is right: python -m benchmarks.gpu "
                         f"check, and see {path}")
    if verdicts - {"right"}:
        raise UsageError(f"the kernel is wrong: see {path}")


def write_report(out):
    """Write report.md: the machine, and every table of it that is there."""
    text = (f"# Measured on a GPU\n\nOf the code {code_and_machine()}, triton "
            f"{getattr(triton, '__version__', 'none')}, CUDA {torch.version.cuda}\n")
    for name, (_, _, about) in PARTS.items():
        text += f"\n## {name}\n\n{about}\n\n"
        columns, rows = current_rows(out / f"{name}.tsv")
        lines = [columns, ["---"] * len(columns), *rows]
        text += "".join(f"| {' | '.join(line)} |\n" for line in lines) if rows else "not measured\n"
    (out / "report.md").write_text(text)
    print(f"wrote {out / 'report.md'}")


def main():
    p = Parser(__doc__)
    p.add_argument("part", nargs="*", help=f"{', '.join(PARTS)}, report [all]")
    p.add_argument("--out", default="out/gpu", help="folder of the tables [out/gpu]")
    p.add_argument("--minutes", type=float, default=60.0, help="begin nothing after them [60]")
    args = p.parse_args()
    if unknown := set(args.part) - {*PARTS, "report"}:
        raise UsageError(f"{unknown.pop()} is no part: take {', '.join(PARTS)} or report")
    out, end = Path(args.out), time.monotonic() + 60 * args.minutes
    wanted = [name for name in PARTS if name in (args.part or PARTS)]
    if wanted:
        require_gpu()
    out.mkdir(parents=True, exist_ok=True)
    for name in wanted:
        cells, columns, _ = PARTS[name]
        if name not in ("check", "tests"):
            require_right(out / "check.tsv")
        measure_missing(out / f"{name}.tsv", columns, cells(), end)
        if name == "check":
            require_right(out / "check.tsv")
    write_report(out)


if __name__ == "__main__":
    cli(main)
