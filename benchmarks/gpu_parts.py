"""The part `kernel` of experiments.gpu: the fused kernel beside every other way, at psi = 48."""
import math
from functools import partial

import torch

from experiments import kernel_benchmark as bench
from experiments import kernel_work as work
from experiments.gpu_peers import attentions, flex_screen
from experiments.gpu_report import run_steps
from experiments.timing import trained_like
from multiscreen import screen as dense
from support.windowed import screen_windowed

PSI = 48
# The most important lengths first.
LENGTHS = [2**n for n in (17, 12, 15, 10, 16, 14, 13, 11)]
DENSE, SLOW = 2**12, 2**14                             # longest T of `screen` and screen_windowed
TEXT = """Operations and bytes are counted in experiments/kernel_work.py.

* of roofline: the least time that they take, at the rates measured in this run, over the time
* ratio: the time over that of the fused kernel; for attention, of all 24 layers of the 1.3B
  Transformer over all 48 of Multiscreen
* FlexAttention takes q and k in bfloat16; the time for its block mask is left out"""
COLUMNS = ["windows", "T", "way"] + [f"{direction} {x}" for direction in ("fwd", "bwd")
                                     for x in ("ms", "TFLOP/s", "of roofline", "ratio")]
OTHERS = ("FlexAttention", "screen, torch.compile", "screen_windowed")
WAYS = ("fused", *OTHERS, *(f"attention, {name}" for name in attentions()))


def kernel(report, tell):
    Kernel(report).run(tell)


class Kernel:
    """The times that were measured, {(windows, T, way): (ms forward, ms backward)}, and a table."""

    def __init__(self, report):
        self.report, self.times = report, {}
        self.windows = {"initial": work.initial_windows(PSI),
                        "trained-like": trained_like(PSI).tolist()}
        report.section(f"kernel: screening of a layer at psi = {PSI}", TEXT)
        self.table = report.table("Forward and backward", COLUMNS,
                                  key=lambda row: (row[0], row[1], WAYS.index(row[2])))
        self.ways = report.table("Is the fused kernel faster than the other ways of screening?",
                                 ["way", "least ratio", "largest ratio", "faster in", "target"])
        self.compiled = torch.compile(dense, dynamic=False)

    def run(self, tell):
        def step(need, way, T, windows="initial"):
            return f"{way}, T = {T:,}, {windows}", need, partial(self.measure, way, T, windows)

        # The fused kernel at all lengths, then the others, the slowest last: FlexAttention compiles
        # for half a minute each time, and its gradients of w and r are added by atomics.
        top, *rest = LENGTHS
        steps = [("the roofline", 0, self.roofline), step(5, "fused", top),
                 ("beside the projections", 5, self.beside_projections),
                 step(5, "fused", top, "trained-like")]
        steps += [step(5, way, top) for way in WAYS if way.startswith("attention")]
        steps += [step(2, "fused", T, name) for T in rest for name in self.windows]
        steps += [step(2, way, T) for T in rest for way in WAYS if way.startswith("attention")]
        steps += [step(10, OTHERS[2], min(LENGTHS), name) for name in self.windows]
        steps += [step(15, OTHERS[1], T) for T in LENGTHS if T <= DENSE]
        steps += [step(20, OTHERS[0], T) for T in LENGTHS]
        steps += [step(10, OTHERS[2], T, name) for T in sorted(rest) if min(rest) < T <= SLOW
                  for name in self.windows]
        steps += [step(20, OTHERS[0], T, "trained-like") for T in sorted(LENGTHS)]
        run_steps(steps, self.report, tell)

    def roofline(self, report):
        self.operations, self.bytes = bench.roofline()
        report.note(f"roofline: {self.operations / 1e9:.0f} TFLOP/s (bfloat16, 8192^3), "
                    f"{self.bytes / 1e9:.2f} TB/s")

    def measure(self, way, T, windows, report):
        """Time one way and add its row. Attention has no windows: its rows stand by the initial."""
        w = self.windows[windows]
        pairs, scale = work.pairs_inside(T, w), 1.0
        if way.startswith("attention"):
            f, counts = attentions()[way.split(", ")[1]], work.causal_work(T)
            x = [bench.randn(1, work.HEADS, T, work.HEAD) for _ in range(4)]
            scale = work.N_L / PSI
        else:
            x = bench.draw_inputs(T, w, torch.bfloat16)
            f = {"fused": bench.screen, OTHERS[1]: self.compiled, OTHERS[2]: screen_windowed}
            f = flex_screen(T, x[3], x[3].is_cuda) if way == OTHERS[0] else f[way]
            pairs = len(w) * T**2 if way == OTHERS[1] else pairs
            counts = work.screening_work(T, len(w), pairs)

        def say(line):
            report.note(f"{way}, T = {T:,}, {windows}: {line}")

        times = self.times[windows, T, way] = bench.both_times(f, *x, say=say)
        cells = []
        for ms, best, (n, size) in zip(times, self.times[windows, T, "fused"], counts):
            least = max(n / self.operations, size / self.bytes)
            cells += [ms, n / ms / 1e9, least / ms, scale * ms / best]
        self.table.add(windows, T, way, *cells)
        if way in OTHERS:
            self.compare(way)

    def beside_projections(self, report):
        """The targets at the longest T: of the projections, backward over forward, one tile."""
        T = LENGTHS[0]
        forward, backward = self.times["initial", T, "fused"]
        projections = bench.projections_time(T)
        infinite, _ = bench.both_times(bench.screen,
                                       *bench.draw_inputs(T, [math.inf], torch.bfloat16))
        table = report.table(f"At T = {T:,}, initial windows", ["what", "measured", "target"])
        table.add(f"forward over the layer's projections ({projections:.2f} ms)",
                  forward / projections, "under 0.2")
        table.add("backward over forward", backward / forward, "under 3.5")
        table.add("one infinite tile, ms", infinite, "under 5")

    def compare(self, way):
        """Whether the fused kernel is faster than a way, wherever that was measured until now."""
        ratios = [ms / best for (windows, T, name), times in self.times.items() if name == way
                  for ms, best in zip(times, self.times[windows, T, "fused"])]
        ratios = [x for x in ratios if not math.isnan(x)]
        self.ways.rows = [row for row in self.ways.rows if row[0] != way]
        if ratios:
            n = f"{sum(x > 1 for x in ratios)} of {len(ratios)}"
            self.ways.add(way, min(ratios), max(ratios), n, "all")
