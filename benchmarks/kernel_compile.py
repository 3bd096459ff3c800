"""What the compiler makes of the fused kernel (screening_triton.py). Needs no GPU.

    python -m benchmarks.kernel_compile

Every shipped configuration is compiled for sm_80 (A100), sm_86 (RTX 3090), sm_89 (RTX 4090), sm_90
(H100, H200), sm_100 (B200) and sm_120 (RTX 5090), with d_K = 16 and d_V = 64, in two minutes on a
CPU. A spill is a value that does not fit into a register and costs each pair a trip to memory. The
script fails if there is one, or if a program needs more shared memory than one of these has.

block:           queries x keys
shared:          bytes of shared memory of a program
edge, interior:  instructions of a thread per query-key pair, in the loop with and without masks
"""
import itertools
import os
import re
import subprocess
import tempfile
from pathlib import Path

import torch

from screening_triton import KERNELS, available, block_sizes, choose_parts, triton
from support.cli import Parser, UsageError, cli

# The types of q and k, and of v.
DTYPES = ((torch.float32, torch.bfloat16), (torch.float32, torch.float16),
          (torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32))
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
TARGETS = (80, 86, 89, 90, 100, 120)
SHARED = 99 * 1024                      # what sm_86, 89 and 120 grant a program
COLUMNS = ("kernel", "q_k", "v", "target", "block", "warps", "stages", "registers", "spills",
           "shared", "edge", "interior")


def compile_kernel(kernel, qk, v, target, blocks):
    """The compiled kernel, as Triton returns it."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    BI, BJ, warps, stages = blocks
    of_parts, n = choose_parts(kernel, qk, v)
    constants = {"BI": BI, "BJ": BJ, "D_K": 16, "D_V": 64, "PARTS": n}
    pointers = dict.fromkeys(("V", "OUT", "DH", "DV"), v)
    pointers |= dict.fromkeys(("Q", "K"), of_parts) | dict.fromkeys(("DQ", "DK"), qk)
    pointers |= dict.fromkeys(("W", "R", "DW", "DR"), torch.float32)
    types = {name: f"*{NAMES[dtype]}" for name, dtype in pointers.items()} | {"ORDER": "*i64"}

    # Pointers and strides are multiples of 16, as they are at run time: loads are vectorised.
    signature, aligned = {}, {}
    for n, name in enumerate(KERNELS[kernel].arg_names):
        signature[name] = "constexpr" if name in constants else types.get(name, "i32")
        if name in types or name in ("k_b", "k_h", "k_t", "v_b", "v_h", "v_t"):
            aligned[(n,)] = [["tt.divisibility", 16]]
    return triton.compile(ASTSource(KERNELS[kernel], signature, constants, aligned),
                          target=GPUTarget("cuda", target, 32),
                          options={"num_warps": warps, "num_stages": stages})


def disassemble(binary, folder):
    """(registers of a thread, lines of machine code), by the tools that come with triton."""
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    path = Path(folder, "kernel.cubin")
    path.write_bytes(binary.asm["cubin"])
    usage, code = (subprocess.run(command, capture_output=True, text=True, check=True).stdout
                   for command in ([tools / "cuobjdump", "-res-usage", path],
                                   [tools / "nvdisasm", "-c", path]))
    return int(re.search(r"REG:(\d+)", usage)[1]), code.splitlines()


def longest_loops(code):
    """Instructions of the two longest loops. A loop ends with a branch back to a label."""
    labels, loops, count = {}, [], 0
    for line in code:
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = count
        elif re.match(r"\s+/\*[0-9a-f]{4,}\*/\s", line):
            count += 1
            branch = re.search(r"BRA.*(\.L_x_\d+)", line)
            if branch and branch[1] in labels:
                loops.append(count - labels[branch[1]])
    return sorted(loops)[-2:]


def main():
    Parser(__doc__).parse_args()
    if triton is None:
        raise UsageError(available())
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise UsageError("TRITON_INTERPRET=1 is set: unset it to compile")

    print(f"torch {torch.__version__}, triton {triton.__version__}")
    print(*COLUMNS, sep="\t")
    bad = 0
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        for kernel, (qk, v), target in itertools.product(KERNELS, DTYPES, TARGETS):
            blocks = BI, BJ, warps, stages = block_sizes(
                kernel, v == torch.float32, 16, 64, divmod(target, 10))
            binary = compile_kernel(kernel, qk, v, target, blocks)
            registers, code = disassemble(binary, folder)
            spills = sum(bool(re.search(r"\b(LDL|STL)\b", line)) for line in code)
            shared = binary.metadata.shared
            interior, edge = (n * 32 * warps / (BI * BJ) for n in longest_loops(code))
            print(kernel, NAMES[qk], NAMES[v], f"sm_{target}", f"{BI}x{BJ}", warps, stages,
                  registers, spills, shared, f"{edge:.1f}", f"{interior:.1f}", sep="\t", flush=True)
            bad += spills > 0 or shared > SHARED
    if bad:
        raise UsageError(f"{bad} configurations spill registers or need more than {SHARED} bytes "
                         "of shared memory")


if __name__ == "__main__":
    cli(main)
