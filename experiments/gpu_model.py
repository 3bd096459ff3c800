"""The part `model` of experiments.gpu: the latency of whole models, compiled, as in the paper.

What is timed, and how, is that of experiments.latency.
"""
import statistics
from types import SimpleNamespace

import torch

from experiments import kernel_check
from experiments.gpu_report import run_steps
from experiments.timing import BACKENDS, get_cells, prepare, ratios, time_cell

# (psi, Transformer), the largest first; the lengths of the largest, the most important first.
SIZES = [(48, "1.3B"), (32, "353M"), (16, "45M"), (8, "8M")]
LENGTHS = [2**n for n in (17, 12, 10, 15, 16, 14, 13, 11)]
REPEATS = 5
# Of Multiscreen's largest model: (longest T only?, setting, column): (target, stretch).
TARGETS = {(True, "initial", "x_flash"): ("8", "10 (limit 11.8)"),
           (True, "initial", "x_fastest"): ("5", "6 (limit 6.8)"),
           (True, "trained-like", "x_flash"): ("6", "7.5"),
           (False, "initial", "x_fastest"): ("0.9", "")}
SHORT = 2**12                                          # the last target is for T up to here


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
        for T in lengths:
            need = 10 if largest and T > 2**15 else 3
            steps.append((f"psi = {psi}, T = {T:,}", need, measure.length(psi, T)))
    run_steps([*steps, ("the targets", 0, measure.targets)], report, tell)


class Measure:
    def __init__(self, report):
        self.cells, self.rows = {}, []
        self.table = report.table("Milliseconds", [
            "model", "setting", "T", "ms", "std", "x_flash", "x_fastest", "fastest"])

    def build(self, psi, size, lengths):
        """A step that makes two models, in place of the ones before."""
        def step(report):
            self.cells.clear()
            device = torch.device(kernel_check.DEVICE)
            args = SimpleNamespace(ckpt=None, psi=[psi], transformer=[size], compile=True,
                                   lengths=lengths)
            cells, screening = get_cells(args, device)
            report.note(f"psi = {psi}: screening by {screening}")
            self.cells[psi] = cells
            self.s_w = [tile.s_w.detach().clone() for tile in cells[-1].model.layers]

        return step

    def length(self, psi, T):
        """A step that times both models in all settings at one length."""
        def step(report):
            transformer = {}
            for cell in [cell for cell in self.cells[psi] if cell.length == T]:
                is_attention = cell.setting in BACKENDS
                if not is_attention:
                    self.set_windows(cell)
                times, why = time_cell(cell, torch.device(kernel_check.DEVICE), REPEATS)
                if why:
                    report.note(f"{cell.label}, {cell.setting}, T = {T:,}: not run: {why}")
                ms = statistics.mean(times) if times else None
                std = statistics.stdev(times) if len(times) > 1 else None
                if is_attention and times:
                    transformer[cell.setting] = ms
                found = ratios(None if is_attention else ms, transformer)
                self.table.add(cell.label, cell.setting, T, ms, std, *found)
                self.rows.append((cell.label, cell.setting, T, *found))

        return step

    @torch.no_grad()
    def set_windows(self, cell):
        """The windows before `prepare`, which expands what it finds: `initial`, or trained-like."""
        for tile, s_w in zip(cell.model.layers, self.s_w):
            tile.s_w.copy_(s_w)
        if cell.setting == "trained-like + SWE":
            prepare(cell.model, "trained-like", cell.T_train)

    def targets(self, report):
        """What was measured of the largest model beside what is wanted."""
        table = report.table("Targets, for one H200",
                             ["model", "setting", "T", "ratio", "measured", "target", "stretch"])
        longest = max(LENGTHS)
        for label, setting, T, x_flash, x_fastest, _ in self.rows:
            measured = {"x_flash": x_flash, "x_fastest": x_fastest}
            for (at_longest, wanted, column), (target, stretch) in TARGETS.items():
                fits = T == longest if at_longest else T <= SHORT
                if label == f"Psi = {SIZES[0][0]}" and wanted == setting and fits:
                    table.add(label, setting, T, column, measured[column], target, stretch)
