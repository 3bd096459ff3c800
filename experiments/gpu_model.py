"""The part `model` of experiments.gpu: the latency of whole models, compiled, as in the paper.

What is timed, and how, is that of experiments.latency.
"""
import gc
import statistics
from types import SimpleNamespace

import torch

from experiments import kernel_check
from experiments.gpu_report import run_steps
from experiments.timing import BACKENDS, get_cells, prepare, ratios, time_cell

# (psi, Transformer), the largest first, and its lengths, the most important first.
SIZES = [(48, "1.3B"), (32, "353M"), (16, "45M"), (8, "8M")]
LENGTHS = [2**n for n in (17, 12, 10, 15, 16, 14, 13, 11)]
# Passes that count, up to LONG and beyond it. There the largest Transformer takes seconds a pass,
# and the backends that are not SOON come last.
REPEATS, REPEATS_LONG, LONG, SOON = 5, 2, 2**15, ("flash", "cudnn")
# Of the largest model. (at the longest T, or up to SHORT; setting; column): (target, stretch)
TARGETS = {(True, "initial", "x_flash"): ("8", "10 (limit 11.8)"),
           (True, "initial", "x_fastest"): ("5", "6 (limit 6.8)"),
           (True, "trained-like", "x_flash"): ("6", "7.5"),
           (False, "initial", "x_fastest"): ("0.9", "")}
SHORT = 2**12


def model(report, tell):
    report.section("model: latency of one forward pass", "As in experiments.latency, compiled. "
                   "x_flash, x_fastest: the Transformer's time over Multiscreen's.")
    measure = Measure(report)
    steps = []
    for psi, size in SIZES:
        largest = psi == SIZES[0][0]
        lengths = LENGTHS if largest else LENGTHS[:1]
        steps.append((f"psi = {psi} and transformer:{size}, compiled", 20,
                      measure.build(psi, size, lengths)))
        late = [T for T in lengths if largest and T > LONG]
        for T in lengths:
            steps.append((f"psi = {psi}, T = {T:,}", 30 if T > LONG else 8,
                          measure.time(psi, T, lambda name, T=T, late=late:
                                       T not in late or name not in BACKENDS or name in SOON)))
        steps += [(f"psi = {psi}, T = {T:,}: the other backends", 30,
                   measure.time(psi, T, lambda name: name in BACKENDS and name not in SOON))
                  for T in late]
    run_steps(steps, report, tell)


class Measure:
    """The times that were measured, {(psi, setting, T): ms}, and a table of them."""

    def __init__(self, report):
        self.report, self.cells, self.ms = report, {}, {}
        self.table = report.table("Milliseconds", [
            "model", "setting", "T", "ms", "std", "x_flash", "x_fastest", "fastest"])
        self.reached = report.table("Targets, for one H200", [
            "psi", "setting", "T", "ratio", "measured", "target", "stretch"])

    def build(self, psi, size, lengths):
        """A step that makes two models, in place of the ones before."""
        def step(report):
            self.cells.clear()
            gc.collect()                               # a compiled model refers to itself
            device = torch.device(kernel_check.DEVICE)
            args = SimpleNamespace(ckpt=None, psi=[psi], transformer=[size], compile=True,
                                   lengths=lengths)
            self.cells[psi], screening = get_cells(args, device)
            report.note(f"psi = {psi}: screening by {screening}")
            self.s_w = [tile.s_w.detach().clone() for tile in self.cells[psi][-1].model.layers]

        return step

    def time(self, psi, T, wanted):
        """A step that times both models at one length, in the settings with wanted(setting)."""
        def step(report):
            repeats = REPEATS_LONG if T > LONG else REPEATS
            for cell in self.cells[psi]:
                if cell.length != T or not wanted(cell.setting):
                    continue
                if cell.setting not in BACKENDS:
                    self.set_windows(cell)
                times, why = time_cell(cell, torch.device(kernel_check.DEVICE), repeats)
                if why:
                    report.note(f"{cell.label}, {cell.setting}, T = {T:,}: not run: {why}")
                ms = self.ms[psi, cell.setting, T] = statistics.mean(times) if times else None
                std = statistics.stdev(times) if len(times) > 1 else None
                self.table.add(cell.label, cell.setting, T, ms, std,
                               *self.ratios(psi, cell.setting, T))
                self.targets()

        return step

    def ratios(self, psi, setting, T):
        """[x_flash, x_fastest, fastest] of what is measured."""
        transformer = {name: self.ms.get((psi, name, T)) for name in BACKENDS}
        transformer = {name: ms for name, ms in transformer.items() if ms}
        return ratios(None if setting in BACKENDS else self.ms[psi, setting, T], transformer)

    @torch.no_grad()
    def set_windows(self, cell):
        """The initial windows, or those that SWE expands. `prepare` does the rest."""
        for tile, s_w in zip(cell.model.layers, self.s_w):
            tile.s_w.copy_(s_w)
        if cell.setting == "trained-like + SWE":
            prepare(cell.model, "trained-like", cell.T_train)

    def targets(self):
        """What is measured of the largest model until now, beside what is wanted."""
        rows = []
        for (psi, setting, T), ms in self.ms.items():
            x_flash, x_fastest, _ = self.ratios(psi, setting, T)
            measured = {"x_flash": x_flash, "x_fastest": x_fastest}
            for (at_longest, wanted, column), (target, stretch) in TARGETS.items():
                fits = T == max(LENGTHS) if at_longest else T <= SHORT
                if ms and psi == SIZES[0][0] and wanted == setting and fits:
                    rows.append((psi, setting, T, column, measured[column], target, stretch))
        self.reached.rows = rows
        self.report.write()
