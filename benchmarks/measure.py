"""Shared by the benchmarks: a step of training, a table of cells."""
import gc
import math
import statistics
import time
from itertools import accumulate

import torch

from support.cli import UsageError
from support.table import Table, as_text
from support.timing import code_hash


def training_step(model, recipe, batch, T):
    """A function that makes a step as train.py does, on random tokens (batch, T + 1).

    recipe: of baselines.recipe. The learning rate is a hundredth: nothing is to be learned.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe["lr"] / 100, betas=(0.9, 0.95),
                                  weight_decay=recipe["weight_decay"], fused=True)
    device = next(model.parameters()).device

    def step():
        x = torch.randint(model.config.vocab_size, (batch, T + 1), device=device)
        loss = model.loss(x[:, :-1], x[:, 1:])
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), recipe["clip"] or math.inf)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.stack([loss.detach(), norm]).tolist()    # the one synchronisation with a GPU

    return step


def cached(model):
    """decode(tokens, caches) -> (logits after the last of the tokens, caches), of our models."""
    def decode(tokens, caches):
        caches = caches or model.new_caches()
        return model.logits(model.hidden(tokens, caches)[:, -1]), caches

    return decode


def get_decoder(decode, seen):
    """A function that decodes one more token after those that `seen` holds, greedily.

    decode(tokens, seen) -> (logits, seen), as of `cached`.
    """
    last = torch.zeros(1, 1, dtype=torch.int64)

    @torch.no_grad()
    def step():
        nonlocal last, seen
        z, seen = decode(last, seen)
        last = z.argmax(-1, keepdim=True)

    return step


def take_turns(runs, repeats, warm_up=3):
    """Median seconds of each function. They take turns, so other work slows all alike."""
    times = [[] for _ in runs]
    for _ in range(warm_up + repeats):
        for column, run in zip(times, runs):
            began = time.perf_counter()
            run()
            column.append(time.perf_counter() - began)
    return [statistics.median(column[warm_up:]) for column in times]


def peak_memory(run):
    """A function's peak of tensor memory on a CPU, in MiB."""
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        run()
    events = sorted(profile.kineto_results.events(), key=lambda event: event.start_ns())
    sizes = (event.nbytes() for event in events if event.name() == "[memory]")
    return max(accumulate(sizes), default=0) / 2**20


def code_and_machine():
    """What a row is tied to: a hash of the files that are measured, PyTorch, the GPU."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"{code_hash()}, torch {torch.__version__}, {gpu}"


def measure_missing(path, columns, cells, end=math.inf):
    """Measure the cells that a table lacks for this code and machine; returns all rows of it.

    cells: ({column: value} that says what, a function that returns {column: value} of `columns`).
    A failure is printed, and tried again the next time. No cell begins after `end`, by
    time.monotonic().
    """
    cells = list(cells)
    table = Table(path, cells[0][0], columns, code_and_machine())
    missing = table.missing(what for what, _ in cells)
    with table.measuring():
        for what, function in cells:
            if what not in missing or time.monotonic() > end:
                continue
            try:
                gc.collect()                           # a compiled model refers to itself
                torch.cuda.empty_cache()
                found = function()
                found = {c: f"{x:.5g}" if isinstance(x, float) else x for c, x in found.items()}
                table.add(what, **found)
            except UsageError:                         # from the flags: all cells have it
                raise
            except Exception as e:                     # a compiler's errors have many types
                found = {"why": f"{type(e).__name__}: {str(e)[:300]}"}
            print("  ".join(map(as_text, [*what.values(), *found.values()])), flush=True)
    return list(table.rows.values())
