"""The bytes that one layer moves to and from memory per token, counted by hand, forward.

Products in bfloat16, geometry and residual in float32, screening by the fused kernel. Weights do
not count: many tokens share them. Nor does what the kernel reads a second time: it is in the cache.

eager   each operation of GatedScreeningTiles.forward reads its inputs and writes its result
fused   one pass between two products or the kernel's operator, which a compiler cannot enter
least   x, q, k, v, g and y are written once and read once; x is read again for the sum. What is
        elementwise happens inside the products and the kernel

product: the matrix products; kernel: the operator, the split of q and k included; elementwise: all
else.
"""
from dataclasses import dataclass

from multiscreen import Config

KINDS = ("product", "kernel", "elementwise")


@dataclass
class Pass:
    """One or several trips through memory: bytes per token."""
    name: str
    kind: str
    read: int
    written: int
    trips: int = 1


class Layer:
    """E of x, K of all queries or keys, V of all values or gates, H tiles: numbers per token."""

    def __init__(self, config):
        self.E, self.H, self.N_L = config.d_E, config.N_H, config.N_L
        self.K, self.V = config.N_H * config.d_K, config.N_H * config.d_V

    def operations(self):
        """Of the matrix products, per token: a product and a sum for each weight."""
        return 2 * self.E * (2 * self.K + 3 * self.V)

    def ways(self):
        """{way: its passes}"""
        return {"eager": self.eager(), "fused": self.fused(), "least": self.least()}

    def eager(self):
        E, K, V, H = self.E, self.K, self.V, self.H
        passes = []

        def elementwise(name, *sizes):
            read, written = (sum(x) for x in zip(*sizes))
            passes.append(Pass(name, "elementwise", read, written, len(sizes)))

        def project(name, D):
            elementwise(f"x to bfloat16, for {name}", (4 * E, 2 * E))
            passes.append(Pass(f"x W, for {name}", "product", 2 * E, 2 * D))
            elementwise(f"{name} to float32", (2 * D, 4 * D))

        def unit(name, D):
            elementwise(f"unit of {name}: square, sum, clamp, root, quotient", (4 * D, 4 * D),
                        (4 * D, 4 * H), (4 * H, 4 * H), (4 * H, 4 * H), (4 * D + 4 * H, 4 * D))

        elementwise("positions", (0, 8))
        project("q", K)
        project("k", K)
        elementwise("q and k as one tensor", (8 * K, 8 * K))
        unit("q", K)
        unit("k", K)
        elementwise("angle: product, remainder, to float32", (8, 8 * H), (8 * H, 8 * H),
                    (8 * H, 4 * H))
        elementwise("MiPE of both: cosine, sine, 4 products, 2 sums, cat", *[(4 * H, 4 * H)] * 2,
                    *[(12 * H, 8 * H)] * 4, *[(16 * H, 8 * H)] * 2, (8 * K, 8 * K))
        project("v", V)
        unit("v", V)
        elementwise("v to bfloat16", (4 * V, 2 * V))
        passes += self.operator()
        elementwise("h to float32", (2 * V, 4 * V))
        elementwise("TanhNorm: square, sum, small, fill, sqrt, tanh, quotient, fill, product",
                    (4 * V, 4 * V), (4 * V, 4 * H), (4 * H, H), (5 * H, 4 * H), (4 * H, 4 * H),
                    (4 * H, 4 * H), (8 * H, 4 * H), (5 * H, 4 * H), (4 * V + 4 * H, 4 * V))
        project("g", V)
        elementwise("gate: SiLU, tanh", (4 * V, 4 * V), (4 * V, 4 * V))
        elementwise("y = u * gate, to bfloat16", (8 * V, 4 * V), (4 * V, 2 * V))
        passes.append(Pass("y W_O", "product", 2 * V, 2 * E))
        elementwise("update to float32, sum", (2 * E, 4 * E), (8 * E, 4 * E))
        return passes

    def operator(self):
        """q and k are split into three parts of 16 bits."""
        split = [Pass(f"split of {name}", "kernel", 4 * self.K, 6 * self.K) for name in "qk"]
        return [*split, Pass("screening", "kernel", 12 * self.K + 2 * self.V, 2 * self.V)]

    def fused(self):
        E, K, V = self.E, self.K, self.V
        sizes = {"q": K, "k": K, "v": V, "g": V}
        products = [Pass(f"x W, for {name}", "product", 2 * E, 2 * D)
                    for name, D in sizes.items()]
        return [Pass("x to bfloat16", "elementwise", 4 * E, 2 * E), *products,
                Pass("unit, MiPE of q", "elementwise", 2 * K, 4 * K),
                Pass("unit, MiPE of k", "elementwise", 2 * K, 4 * K),
                Pass("unit of v", "elementwise", 2 * V, 2 * V),
                *self.operator(),
                Pass("TanhNorm, gate, y", "elementwise", 4 * V, 2 * V),
                Pass("y W_O", "product", 2 * V, 2 * E),
                Pass("sum", "elementwise", 6 * E, 4 * E)]

    def least(self):
        E, K, V = self.E, self.K, self.V
        return [Pass("x W, unit, MiPE, split", "product", 4 * E, 12 * K + 4 * V),
                Pass("screening, TanhNorm, gate", "kernel", 12 * K + 4 * V, 2 * V),
                Pass("y W_O, sum", "product", 2 * V + 4 * E, 4 * E)]


def total(passes, kind=None):
    """Bytes per token, read and written, of one kind or of all."""
    return sum(p.read + p.written for p in passes if kind in (None, p.kind))


def summary(layer, T, bytes_per_s):
    """Rows: way, passes, bytes per token of each kind and in all, ms of a model at T tokens."""
    rows = []
    for way, passes in layer.ways().items():
        moved = [total(passes, kind) for kind in (*KINDS, None)]
        ms = [1e3 * n * T * layer.N_L / bytes_per_s for n in moved]
        rows.append([way, sum(p.trips for p in passes), *moved, *ms])
    return rows


def print_layer(psi=48, T=2**17, bytes_per_s=4.3e12, operations_per_s=790e12):
    """The passes of each way, and what they mean for the latency of the whole model."""
    layer = Layer(Config(psi=psi))
    print(f"psi = {psi}: bytes per token of one layer, forward\n")
    for way, passes in layer.ways().items():
        print(f"{way:76}{'kind':>12}{'passes':>8}{'read':>9}{'written':>9}")
        for p in passes:
            print(f"  {p.name:74}{p.kind:>12}{p.trips:>8}{p.read:>9,}{p.written:>9,}")
        print(f"  {'in all':74}{'':20}{total(passes):>18,}\n")

    rate = f"{bytes_per_s / 1e12:g} TB/s"
    print(f"{layer.N_L} layers, {T:,} tokens, at {rate}: bytes per token of a layer, and ms of all")
    columns = [*KINDS, "all", *(f"{kind}, ms" for kind in (*KINDS, "all"))]
    print(f"{'':8}{'passes':>7}" + "".join(f"{c:>17}" for c in columns))
    for way, n, *cells in summary(layer, T, bytes_per_s):
        shown = [f"{x:>17,}" for x in cells[:4]] + [f"{x:>17.1f}" for x in cells[4:]]
        print(f"{way:8}{n:>7}{''.join(shown)}")
    ms = 1e3 * layer.operations() * T * layer.N_L / operations_per_s
    print(f"the operations of the products at {operations_per_s / 1e12:g} TFLOP/s: {ms:.1f} ms")
