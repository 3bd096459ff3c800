"""Everything that only a GPU can tell: is the kernel right, and how fast is it?

    python -m benchmarks.gpu                     all parts, the most important first
    python -m benchmarks.gpu layer peers         some of them

check     the kernel against float64 at up to 2^17 positions; nothing is timed before it is right
layer     screening of a psi = 48 layer, T = 2^10 .. 2^17, beside its matrix products
training  tokens per second and memory of a step, beside the Transformer
peers     attention, FlexAttention and other ways to screen, beside the fused kernel
tests     all tests of the kernel, compiled, and a small case under compute-sanitizer

Each part writes OUT/PART.tsv row by row, then OUT/report.md with all tables. Rerun the command to
measure what is missing: after a crash, after Ctrl-C, after --minutes. A row that has begun is
finished: if a command may take 10 minutes, use --minutes 8. Times are medians with a cold cache.
"""
import inspect
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

from benchmarks import gpu_check, gpu_times
from benchmarks.measure import measure_missing
from screening_triton import available, triton
from support.cli import Parser, UsageError, cli, own_folder, replacing
from support.source import ROOT
from support.table import read_rows

# Each part: what makes its cells (the report shows its docstring), and its columns.
PARTS = {
    "check": (gpu_check.check, (*gpu_check.GRADIENTS, "verdict")),
    "layer": (gpu_times.layer, ("forward_ms", "backward_ms", "products_ms")),
    "training": (gpu_times.training, ("ms", "tokens_per_s", "peak_GiB")),
    "peers": (gpu_times.peers, ("forward_ms", "backward_ms", "x_forward", "x_backward")),
    "tests": (gpu_check.tests, ("result",)),
}


def require_gpu():
    """Raise UsageError if the compiled kernel cannot run here."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise UsageError("TRITON_INTERPRET=1 is set: unset it to run on the GPU")
    if reason := available():
        raise UsageError(reason)


def measure_part(name, out, end):
    """Measure what a part lacks. Nothing is timed before the check has found the kernel right."""
    if name not in ("check", "tests"):
        measure_part("check", out, end)
    make_cells, columns = PARTS[name]
    cells = list(make_cells())
    rows = measure_missing(out / f"{name}.tsv", columns, cells, end)
    if name == "tests" and len(rows) < len(cells):
        raise UsageError("tests of the kernel failed, or time is up: see above")
    if name == "check" and {row["verdict"] for row in rows} != {"right"}:
        raise UsageError("the kernel is not right, or not checked (python -m benchmarks.gpu check):"
                         f" see {out / 'check.tsv'}")


def write_report(out):
    """Write report.md: the commit, and the tables with what they were measured on."""
    commit = subprocess.run("git rev-parse --short HEAD", shell=True, cwd=ROOT, text=True,
                            capture_output=True).stdout.strip()
    text = (f"# Measured on a GPU\n\nCommit {commit or 'unknown'}, triton "
            f"{getattr(triton, '__version__', 'none')}, CUDA {torch.version.cuda}\n")
    for name, (make_cells, _) in PARTS.items():
        path = out / f"{name}.tsv"
        rows = read_rows(path) if path.exists() else []
        text += f"\n## {name}\n\n{inspect.getdoc(make_cells)}\n\n"
        text += f"Code {rows[0]['hash']}\n\n" if rows else "not measured\n"
        columns = [*rows[0]][:-1] if rows else []
        lines = [columns, ["---"] * len(columns), *([row[c] for c in columns] for row in rows)]
        text += "".join(f"| {' | '.join(line)} |\n" for line in lines if rows)
    with replacing(out / "report.md") as file:
        file.write(text.encode())
    print(f"wrote {out / 'report.md'}")


def main():
    p = Parser(__doc__)
    p.add_argument("part", nargs="*", help=f"{', '.join(PARTS)} [all]")
    p.add_argument("--out", type=own_folder, default=Path("out/gpu"),
                   help="folder of the tables [out/gpu]")
    p.add_argument("--minutes", type=float, default=60.0, help="begin no row after this many [60]")
    args = p.parse_args()
    if unknown := set(args.part) - {*PARTS}:
        raise UsageError(f"{unknown.pop()} is not a part: use {', '.join(PARTS)}")
    wanted = [name for name in PARTS if name in (args.part or PARTS)]
    require_gpu()
    args.out.mkdir(parents=True, exist_ok=True)

    end, failed = time.monotonic() + 60 * args.minutes, []
    if len(wanted) == 1:
        measure_part(wanted[0], args.out, end)
    else:
        # A process each: after an invalid access to memory a process can no longer use the GPU.
        for name in wanted:
            left = str((end - time.monotonic()) / 60)
            command = [sys.executable, "-m", "benchmarks.gpu", name, "--out", args.out]
            failed += [name] * bool(subprocess.run([*command, "--minutes", left]).returncode)
    write_report(args.out)
    if failed:
        raise UsageError(f"{', '.join(failed)} failed")


if __name__ == "__main__":
    cli(main)
