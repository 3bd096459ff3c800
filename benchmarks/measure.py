"""What the benchmarks share: a step of training, a table of cells."""
import gc
import math
import time

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

    def step():
        x = torch.randint(model.config.vocab_size, (batch, T + 1), device=model.W_E.device)
        loss = model.loss(x[:, :-1], x[:, 1:])
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), recipe["clip"] or math.inf)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.stack([loss.detach(), norm]).tolist()    # the one synchronisation with a GPU

    return step


def code_and_machine():
    """What a row is tied to: a hash of the files that are measured, PyTorch, the GPU."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"{code_hash()}, torch {torch.__version__}, {gpu}"


def measure_missing(path, columns, cells, end=math.inf):
    """Measure the cells that a table lacks for this code and machine; returns all rows of it.

    cells: ({column: value} that says what, a function that returns {column: value} of `columns`).
    One that fails is printed, and tried again the next time. None begins when time.monotonic() is
    past `end`.
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
            except UsageError:                         # of the flags, so of all cells
                raise
            except Exception as e:                     # a compiler's errors have many types
                found = {"why": f"{type(e).__name__}: {str(e)[:300]}"}
            print("  ".join(map(as_text, [*what.values(), *found.values()])), flush=True)
    return list(table.rows.values())
