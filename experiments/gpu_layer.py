"""The part `layer` of experiments.gpu: where the time of one psi = 48 layer goes."""
from collections import defaultdict
from functools import partial

import torch

from experiments import kernel_benchmark as bench
from experiments import kernel_check
from experiments.gpu_report import run_steps
from experiments.layer_bytes import Layer, total
from multiscreen import Config, Multiscreen
from support.choose import compile_layers

PSI, LENGTH = 48, 2**17
# Parts of the names of CUDA kernels: of the libraries' matrix products, and of the fused kernel's.
PRODUCTS = ("gemm", "cutlass", "nvjet", "cublas", "xmma", "triton_tem", "mm_kernel")
SCREENING = ("_forward", "_split")
TEXT = f"""One forward pass of one layer, {LENGTH:,} tokens, bfloat16 products, initial windows.
Counted bytes are those of experiments/layer_bytes.py. Bytes in this time: what the memory could
have moved meanwhile, at the rate measured in this run."""


def layer(report, tell):
    report.section(f"layer: one layer at psi = {PSI}", TEXT)
    measure = Measure(report)
    run_steps([("the roofline", 0, measure.roofline),
               ("eager", 10, partial(measure.time, "eager")),
               ("compiled", 20, partial(measure.time, "fused"))], report, tell)


class Measure:
    def __init__(self, report):
        self.kinds = report.table(
            "Time by kind", ["layer", "kind", "launches", "ms", "counted bytes per token",
                             "bytes per token in this time", "least bytes per token"])
        self.targets = report.table("Screening over the projections of the layer",
                                    ["layer", "measured", "target"])

    def roofline(self, report):
        _, self.bytes = bench.roofline()
        report.note(f"{self.bytes / 1e9:.2f} TB/s")

    @torch.no_grad()
    def time(self, way, report):
        """Time the launches of a layer, eager or compiled ("fused"), by kind."""
        with torch.device(kernel_check.DEVICE):
            model = Multiscreen(Config(psi=PSI, N_L=1, vocab_size=2), torch.bfloat16)
            x = torch.randn(1, LENGTH, model.config.d_E)
        model.screen = bench.screen
        if way == "fused":
            compile_layers(model)
        for _ in range(3):
            model.layers[0](x, model.screen)
        found = launches(lambda: model.layers[0](x, model.screen))

        # Their times, in sum over each kind.
        ms, n = defaultdict(float), defaultdict(int)
        for name, took in found:
            ms[kind_of(name)] += took
            n[kind_of(name)] += 1
        counted = Layer(model.config).ways()
        for kind in ("product", "kernel", "elementwise"):
            could = round(ms[kind] * self.bytes / LENGTH) if kind == "elementwise" else None
            self.kinds.add(way, kind, n[kind], ms[kind], total(counted[way], kind), could,
                           total(counted["least"], kind))
        if ms["product"]:
            self.targets.add(way, ms["kernel"] / ms["product"], "under 0.2")
        if way == "fused":
            list_passes(found, report)


def launches(f):
    """[(name, milliseconds)] of the CUDA kernels that f() launches, in their order."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        f()
        torch.cuda.synchronize()
    events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA
              and not getattr(e, "is_user_annotation", False)]
    events.sort(key=lambda e: e.time_range.start)
    return [(e.name, e.time_range.elapsed_us() / 1e3) for e in events]


def kind_of(name):
    """product, kernel or elementwise, by the name of a CUDA kernel."""
    if name in SCREENING:
        return "kernel"
    return "product" if any(part in name.lower() for part in PRODUCTS) else "elementwise"


def list_passes(found, report):
    """A row for each launch of the compiled layer, and why an elementwise one is a pass of its own.

    Between two products, or a product and the kernel, one pass is the least that a compiler needs.
    Two in a row have another reason, which only their code shows: TORCH_LOGS=fusion tells it.
    """
    table = report.table("The compiled layer, launch by launch",
                         ["launch", "kind", "ms", "name", "not fused with what is before it"])
    before = None
    for i, (name, ms) in enumerate(found, 1):
        kind, why = kind_of(name), "-"
        if kind == "elementwise" and before == "elementwise":
            why = "the compiler could have: TORCH_LOGS=fusion says why"
        elif kind == "elementwise" and before:
            why = f"the {before} cannot be entered"
        table.add(i, kind, ms, f"`{name[:90]}`", why)
        before = kind
