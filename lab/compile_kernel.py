"""Does the kernel compile for six chips, without spills? This needs no GPU.

    python -m lab.compile_kernel
    python -m lab.compile_kernel --kernel dq --target 90 --blocks 128 64 4 3

Every configuration of screening_triton.py is compiled, with d_K = 16 and d_V = 64, for sm_80
(A100), sm_86 (RTX 3090), sm_89 (RTX 4090), sm_90 (H100, H200), sm_100 (B200) and sm_120 (RTX 5090),
in two minutes on a CPU. The second command compiles one configuration of your own, for the dtypes
of training on a GPU.

A spill is a value that does not fit into the registers, so that every query-key pair costs a trip
to memory. The command fails if there is a spill, if a program needs more shared memory than the GPU
grants it, or if it multiplies in the tensor memory of a B200, where Triton 3.6 to 3.8 can compile
two products that add to one accumulator in a loop wrongly (github.com/triton-lang/triton, issue
10821). Other versions of Triton allocate registers differently: 3.7.1 chose ours.

Columns: block is the number of queries and keys that a program works on at a time; registers are
counted for a thread; spills are bytes of a thread; shared is memory of a program, in bytes.
"""
import argparse
import contextlib
import io
import itertools
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from screening_triton import KERNELS, block_sizes, choose_parts, triton

# The dtype of q and k, which share one, and that of v. The first pair is that of training.
DTYPES = ((torch.float32, torch.bfloat16), (torch.float32, torch.float16),
          (torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32))
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
# How much shared memory a program may use, in KiB.
TARGETS = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
TENSOR_MEMORY = "tcgen05"               # how the instructions of a B200's tensor memory begin
COLUMNS = ("kernel", "q_k", "v", "target", "block", "warps", "stages", "registers", "spills",
           "shared")


def compile_kernel(kernel, qk, v, target, blocks):
    """The compiled kernel, as Triton returns it."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    BI, BJ, warps, stages = blocks
    of_parts, n = choose_parts(kernel, qk, v)
    constants = {"BI": BI, "BJ": BJ, "D_K": 16, "D_V": 64, "PARTS": n}
    pointers = dict.fromkeys(("V", "OUT", "DH", "DV"), v)
    pointers |= dict.fromkeys(("Q", "K"), of_parts) | dict.fromkeys(("DQ", "DK"), qk)
    pointers |= dict.fromkeys(("W", "R", "BOUND", "DW", "DR"), torch.float32)
    types = {name: f"*{NAMES[dtype]}" for name, dtype in pointers.items()} | {"ORDER": "*i64"}

    # Pointers and strides are multiples of 16, as they are at run time: loads are vectorised.
    signature, aligned = {}, {}
    for n, name in enumerate(KERNELS[kernel].arg_names):
        signature[name] = "constexpr" if name in constants else types.get(name, "i32")
        if name in types or name in ("k_b", "k_h", "k_t", "v_b", "v_h", "v_t"):
            aligned[(n,)] = [["tt.divisibility", 16]]
    try:
        with contextlib.redirect_stdout(io.StringIO()):            # else all of the PTX is printed
            return triton.compile(ASTSource(KERNELS[kernel], signature, constants, aligned),
                                  target=GPUTarget("cuda", target, 32),
                                  options={"num_warps": warps, "num_stages": stages})
    except Exception as e:                             # the compiler's errors have many types
        sys.exit(f"error: {kernel} with blocks {BI} {BJ} {warps} {stages} does not compile for "
                 f"sm_{target}: {e}")


def registers_and_spills(binary):
    """(registers, bytes of the stack that hold spills), of each thread."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(binary.asm["cubin"])
        usage = subprocess.check_output([tool, "-res-usage", path], text=True)
    return map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())


def main():
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--kernel", nargs="+", choices=[*KERNELS], default=[*KERNELS], help="[all]")
    p.add_argument("--target", nargs="+", type=int, choices=[*TARGETS], default=[*TARGETS],
                   help="compute capabilities [all]")
    p.add_argument("--blocks", type=int, nargs=4, metavar=("BI", "BJ", "WARPS", "STAGES"),
                   help="in place of ours")
    args = p.parse_args()
    if triton is None:
        sys.exit("error: triton is not installed (it is made for Linux: pip install triton)")
    if os.environ.get("TRITON_INTERPRET") == "1":
        sys.exit("error: TRITON_INTERPRET=1 is set: unset it to compile")

    print(f"torch {torch.__version__}, triton {triton.__version__}")
    print(*COLUMNS, sep="\t")
    dtypes = DTYPES[:1] if args.blocks else DTYPES
    bad = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        for kernel, (qk, v), target in itertools.product(args.kernel, dtypes, args.target):
            blocks = args.blocks or block_sizes(kernel, v == torch.float32, 16, 64,
                                                divmod(target, 10))
            BI, BJ, warps, stages = blocks
            binary = compile_kernel(kernel, qk, v, target, blocks)
            registers, spills = registers_and_spills(binary)
            shared = binary.metadata.shared
            print(kernel, NAMES[qk], NAMES[v], f"sm_{target}", f"{BI}x{BJ}", warps, stages,
                  registers, spills, shared, sep="\t", flush=True)
            where = f"{kernel} for sm_{target}"
            if spills > 0:
                bad.append(f"{where} spills registers")
            if shared > 1024 * TARGETS[target]:
                bad.append(f"{where} has only {TARGETS[target]} KiB of shared memory")
            if TENSOR_MEMORY in binary.asm["ptx"]:
                bad.append(f"{where} uses tensor memory")
    if bad:
        sys.exit(f"error: {', '.join(dict.fromkeys(bad))}")


if __name__ == "__main__":
    main()
