"""What the benchmarks share: random models, windows, a step of training, a table of cells."""
import csv
import math
import os
import time
from hashlib import sha256
from pathlib import Path

import torch

from support.checkpoint import build_model, has_windows
from support.choose import get_screen
from support.cli import UsageError

ROOT = Path(__file__).parent.parent
CODE = ("multiscreen.py", "screening_triton.py", "support/windowed.py", "baselines/transformer.py")


# ---------------------------------------------------------------------------------- models

def random_model(name, config, device):
    """A model with random weights, its products in bfloat16 on a GPU."""
    with torch.device(device):
        model = build_model(name, config, torch.bfloat16 if device == "cuda" else None)
    if has_windows(model):
        model.screen, line, as_expected = get_screen(model)
        if device == "cuda" and not as_expected:
            raise UsageError(line)                     # the fused kernel is what is measured
        print(line, flush=True)
    return model


def trained_like(n, seed=0):
    """n shuffled windows (n,), log-uniform in three ranges.

    5 % (at least one) are in 4096 .. 65536, 25 % in 256 .. 4096, the rest in 2 .. 128.
    """
    rng = torch.Generator().manual_seed(seed)
    n_far, n_middle = max(round(0.05 * n), 1), round(0.25 * n)
    bounds = [(4096.0, 65536.0)] * n_far + [(256.0, 4096.0)] * n_middle
    bounds = torch.tensor(bounds + [(2.0, 128.0)] * (n - len(bounds)))
    low, high = bounds[torch.randperm(n, generator=rng)].log().T
    return (low + (high - low) * torch.rand(n, generator=rng)).exp()


@torch.no_grad()
def set_trained_like(model):
    """Give a model trained-like windows, in place."""
    sizes = [len(tile.s_w) for tile in model.layers]
    for tile, w in zip(model.layers, trained_like(sum(sizes)).split(sizes)):
        tile.s_w.copy_((w - 1).log())


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


# ------------------------------------------------------------------------------- the table

def stamp():
    """What a row is tied to: a hash of the files that are measured, and the machine."""
    code = sha256(b"".join((ROOT / name).read_bytes() for name in CODE)).hexdigest()[:12]
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {"code": code, "torch": torch.__version__, "GPU": gpu}


def read_rows(path):
    """The rows of a table as dicts of strings, of any code and machine."""
    if not path.exists():
        return []
    with open(path, newline="") as file:
        return list(csv.DictReader(file, delimiter="\t"))


def current(rows):
    """The rows of this code and machine."""
    return [row for row in rows if stamp().items() <= row.items()]


def show(x):
    """A cell: five digits of a number, - for what was not measured."""
    if x is None or isinstance(x, float) and math.isnan(x):
        return "-"
    return f"{x:.5g}" if isinstance(x, float) else " ".join(str(x).split())


def measure_missing(path, columns, cells, end=math.inf):
    """Measure the cells that a table lacks for this code and machine, and write it after each.

    cells: ({column: value} that says what, a function that returns {column: value} of `columns`).
    One that fails has "-" everywhere, says why in its note, and is tried again the next time. None
    begins when time.monotonic() is past `end`.
    """
    rows = [row for row in read_rows(path) if any(row[column] != "-" for column in columns)]
    if old := len(rows) - len(current(rows)):
        print(f"{path}: {old} rows are of other code or another machine, and stay", flush=True)
    for what, function in cells:
        what = {column: show(x) for column, x in what.items()}
        if time.monotonic() > end or any(what.items() <= row.items() for row in current(rows)):
            continue
        try:
            found = function()
        except Exception as e:                         # a compiler's errors have many types
            found = {"note": f"{type(e).__name__}: {str(e)[:300]}"}
            torch.cuda.empty_cache()
        found = {column: show(found.get(column)) for column in (*columns, "note")}
        rows.append(what | found | stamp())
        print("  ".join([*what.values(), *found.values()]), flush=True)

        # The file is whole at any time.
        new = path.with_suffix(".tmp")
        with open(new, "w", newline="") as file:
            table = csv.DictWriter(file, rows[-1], "-", "ignore", delimiter="\t", quotechar=None,
                                   quoting=csv.QUOTE_NONE, lineterminator="\n")
            table.writeheader()
            table.writerows(rows)
        os.replace(new, path)
