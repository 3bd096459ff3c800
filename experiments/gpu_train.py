"""The part `train` of experiments.gpu: tokens per second, utilisation and memory of training."""
import gc
import statistics

import torch

from baselines import count_parameters, recipe
from experiments import kernel_benchmark as bench
from experiments import kernel_check
from experiments.gpu_report import run_steps
from experiments.kernel_work import pairs_inside
from experiments.timing import name_of, random_model
from experiments.training_step import get_step
from multiscreen import window
from support.checkpoint import has_windows
from support.choose import compile_layers

# (Multiscreen's psi, Transformer, sequences in a step)
SIZES = [(16, "45M", 16), (32, "353M", 8)]
LENGTH, VOCABULARY, REPEATS = 4096, 50257, 10


def train(report, tell):
    report.section("train: one step of training", f"{LENGTH:,} tokens in a sequence, bfloat16 "
                   "products, compiled. Utilisation: the operations of the model, without what "
                   "is computed twice, over what a bfloat16 product of 8192^3 did meanwhile.")
    measure = Measure(report)
    steps = [("the roofline", 0, measure.roofline)]
    for psi, size, batch in SIZES:
        pair = {"multiscreen": {"psi": psi}, f"transformer:{size}": {}}
        steps += [(f"{name} {config or ''}".strip(), 15, measure.train(name, config, batch))
                  for name, config in pair.items()]
    run_steps([*steps, ("the ratios", 0, measure.ratios)], report, tell)


class Measure:
    def __init__(self, report):
        self.rates = {}
        self.table = report.table("Training", ["model", "parameters", "sequences", "ms a step",
                                               "tokens/s", "utilisation", "peak memory, GiB"])

    def roofline(self, report):
        self.operations, _ = bench.roofline()
        report.note(f"{self.operations / 1e9:.0f} TFLOP/s (bfloat16, 8192^3)")

    def train(self, name, config, batch):
        """A step of the report: time steps of training of one model, 3 more that do not count."""
        def run(report):
            cuda, label = kernel_check.DEVICE == "cuda", f"{name} {config or ''}".strip()
            gc.collect()                               # a compiled model refers to itself
            model = random_model(name, config | {"vocab_size": VOCABULARY},
                                 torch.device(kernel_check.DEVICE))
            if has_windows(model):
                report.note(f"{label}: screening by {name_of(model.screen)}")
            compile_layers(model)
            if cuda:
                torch.cuda.reset_peak_memory_stats()
            step = get_step(model, recipe(name), batch, LENGTH)
            seconds = statistics.median([step() for _ in range(3 + REPEATS)][3:])
            memory = torch.cuda.max_memory_allocated() / 2**30 if cuda else None
            rate = self.rates[name, batch] = batch * LENGTH / seconds
            use = operations(model, LENGTH) * rate / (1e3 * self.operations)
            self.table.add(label, count_parameters(model)[0], batch, 1e3 * seconds, rate, use,
                           memory)

        return run

    def ratios(self, report):
        table = report.table("Tokens per second, Multiscreen's over the Transformer's",
                             ["psi", "Transformer", "measured", "target"])
        for psi, size, batch in SIZES:
            ours = self.rates.get(("multiscreen", batch))
            theirs = self.rates.get((f"transformer:{size}", batch))
            if ours and theirs:
                table.add(psi, size, ours / theirs, "1" if size == SIZES[0][1] else "")


def operations(model, T):
    """Of a forward and a backward pass, per token: 6 for each weight of a product, and the pairs.

    A pair costs 2 (K + V) forward and twice that backward, in a window or in the past.
    """
    weights = sum(p.numel() for p in model.parameters() if p.ndim > 1)
    c = model.config
    if has_windows(model):
        w = torch.cat([window(tile.s_w.detach()) for tile in model.layers]).tolist()
        per_pair, pairs = 6 * (c.d_K + c.d_V), pairs_inside(T, w)
    else:
        per_pair, pairs = 12 * c.d_E, c.N_L * T * (T + 1) // 2
    return 6 * weights + per_pair * pairs / T
