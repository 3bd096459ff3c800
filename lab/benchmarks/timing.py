"""What lab.benchmarks.cpu and lab.benchmarks.gpu share: what is timed, the timer, and the table.

A row of the table is a model in one setting. `what` says what the model did, and `ms` how long each
pass took:

train      a training step, as in train.py, on random tokens: `batch` sequences of `length` tokens
decode     generating one more token after `length` tokens; the keys and values in the cache are
           random, which takes as long as real ones would
forward    hidden states and logits of `length` tokens at once, with neither cache nor gradients

For "train-compiled", torch.compile compiles the layers, the head and the loss for the one size that
is timed; on a GPU the pass of a small model is also recorded as a CUDA graph, as in train.py. For
"forward-compiled", `alone_ms` is the time of what the pass cannot do without: its matrix products
and its screening, or attention, each timed by itself.

The weights are random. This changes no time, because a relevance of 0 takes as long to compute as
any other; only the windows matter. The `initial` windows have 2 to 257 tokens. The `trained-like`
windows are our guess at trained ones: 70 % of the tiles have windows that are log-uniform in
2 .. 128, 25 % in 256 .. 4096, and 5 % in 4096 .. 65536. SWE changes only the last 5 %.
"""
import gc
import math
import re
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from multiscreen import KeyCache, stays_in_window
from support.checkpoint import read_checkpoint, weights_hash
from support.choose import get_screen
from support.cli import UsageError, on_one_line, products_dtype
from support.compiled import compile_model, try_to_record
from support.evaluation import load_for_evaluation
from support.models import build_model, count_parameters, has_windows, recipe
from support.source import ROOT, hash_of_texts
from support.table import RUN, Table, as_text, describe_run

KEYS = (*RUN, "what", "batch", "setting", "length")
VALUES = ("GiB", "alone_ms", "ms")
COLUMNS = ("model", "parameters", "what", "setting", "length", "ms", "std", "tokens_per_s",
           "x_transformer", "x_alone", "GiB")
CODE = ("multiscreen.py", "screening_triton.py", "support/windowed.py", "support/compiled.py",
        "lab/baselines/*.py")


def attention_by(backend):
    """Attention by one of PyTorch's backends, an SDPBackend, for `attend` of a Transformer."""
    def attend(*inputs, **options):
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(*inputs, **options)

    return attend


# Of a Transformer's attention in a forward pass. Elsewhere PyTorch chooses.
BACKENDS = {"flash": attention_by(SDPBackend.FLASH_ATTENTION),
            "cudnn": attention_by(SDPBackend.CUDNN_ATTENTION)}


# ----------------------------------------------------------------------------- the timer, a table

def take_turns(runs, device, repeats, seconds=math.inf):
    """Milliseconds of each pass of each function, after one to warm up.

    They take turns, so other work slows all alike. No turn begins after `seconds`, but one is made.
    """
    began, times = time.perf_counter(), [[] for _ in runs]
    for n in range(1 + repeats):
        if n > 1 and time.perf_counter() - began > seconds:
            break
        for column, run in zip(times, runs):
            column.append(milliseconds(run, device))
    return [column[1:] for column in times]


def milliseconds(run, device):
    """The milliseconds that run() takes. On a GPU: until it is idle, with a cold cache."""
    if device == "cpu":
        began = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - began)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.zeros(2**28, dtype=torch.uint8, device=device)           # this empties the cache
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def measure(path, keys, values, groups, function, device, ckpt=None, end=math.inf):
    """Measure the cells that a table lacks for this code and machine. Returns the rows of all.

    groups: lists of cells that are measured together: function(cells) returns a dict of `values`
    for each, or {"why": a reason}. A failure is printed, and tried again the next time. No group
    begins after `end`, by time.monotonic(). ckpt: the path of a model that is among those timed.
    """
    machine = {"machine": machine_of(device)}
    groups = [[cell | machine for cell in cells] for cells in groups]
    wanted = [cell for cells in groups for cell in cells]
    weights = f"{weights_hash(read_checkpoint(ckpt))}-" if ckpt else ""
    table = Table(path, (*keys, "machine"), values, weights + hash_of_code())
    missing = table.reuse(wanted)
    for cells in groups:
        cells = [cell for cell in cells if cell in missing]
        if not cells or time.monotonic() > end:
            continue
        gc.collect()                                   # a compiled model refers to itself
        if device != "cpu":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        try:
            found = function(cells)
        except UsageError:                             # from the flags: all cells have it
            raise
        except Exception as e:                         # a compiler's errors have many types
            found = [reason(e)] * len(cells)
        for cell, row in zip(cells, found):
            row = {name: f"{x:.5g}" if isinstance(x, float) else x for name, x in row.items()}
            if "why" not in row:
                table.add(cell, **dict.fromkeys(values) | row)
            if "ms" in row:
                row["ms"] = f"{mean_ms(row):.4g} ms"
            shown = [as_text(x)[:300] for x in [cell[name] for name in keys] + [*row.values()]]
            print("  ".join(filter(None, shown)), flush=True)
    return table.rows_of(wanted)


def reason(e):
    """The values of a cell that failed."""
    return {"why": f"{type(e).__name__}: {on_one_line(e)}"}


def mean_ms(row):
    return statistics.mean(map(float, row["ms"].split()))


def hash_of_code():
    """A hash of the files that are timed."""
    return hash_of_texts(path.read_text("utf-8") for name in CODE for path in ROOT.glob(name))


def machine_of(device):
    """What times depend on besides the code."""
    name = f"CPU, {torch.get_num_threads()} threads"
    if device != "cpu":
        name = torch.cuda.get_device_name(device)
    dtype = products_dtype(torch.device(device)) or torch.float32
    return f"{name}, {str(dtype)[6:]}, torch {torch.__version__}"


# ------------------------------------------------------------------------------------ the models

class Subject(NamedTuple):
    """A model that is timed."""
    run: dict                                          # what it is, by RUN
    load: Callable                                     # () -> the model
    windows: list                                      # their names, if it has some
    T_train: int                                       # tokens of a sequence in training, for SWE


def new_model(name, psi, vocab_size, device):
    """The Subject of a model with random weights. When loaded, it says what screens, if unexpected.

    name: as train.py's --model
    """
    sizes = {"psi": psi, "vocab_size": vocab_size}
    with torch.device("meta"):                         # this takes no memory
        model = build_model(name, sizes)
    run = dict.fromkeys(RUN) | {"model": name, "parameters": count_parameters(model)}

    def load():
        with torch.device(device) as where:
            model = build_model(name, sizes, products_dtype(where))
        if has_windows(model):
            model.screen, line, expected = get_screen(model)
            if not expected:
                print(line, flush=True)
        return model

    return Subject(run, load, ["initial", "trained-like"] * has_windows(model), 2**12)


def trained_model(path, device):
    """The Subject of a checkpoint."""
    ckpt = read_checkpoint(path)
    with torch.device("meta"):
        windowed = has_windows(build_model(ckpt["model"], ckpt["config"]))
    return Subject(describe_run(ckpt), lambda: load_for_evaluation(path, device, text=False)[0],
                   ["trained"] * windowed, ckpt["args"]["seq_len"])


def get_settings(windows, what, device):
    """What a model is timed in: its windows, or the backends of its attention."""
    forward = what.startswith("forward")
    if windows and what.startswith("train"):
        return windows[:1]
    if windows:
        return windows + [f"{windows[-1]} + SWE"] * forward
    if not forward:
        return ["default"]
    return ["flash"] if device == "cpu" else ["flash", "cudnn"]


def cells_of(subjects, what, batch, length, device):
    """The cells of models, each in its settings."""
    return [x.run | {"what": what, "batch": batch, "setting": setting, "length": length,
                     "subject": x}
            for x in subjects for setting in get_settings(x.windows, what, device)]


def time_models(cells, device, repeats, seconds=math.inf):
    """The values of each cell of a group, which take turns."""
    runs, found = {}, {}
    with warnings.catch_warnings(action="ignore"):     # at length, of a backend that cannot run
        for n, cell in enumerate(cells):
            try:
                run = prepare(cell)
                run()
                runs[n] = run
            except Exception as e:                     # no compiler, too little memory
                found[n] = reason(e)
        for n, times in zip(runs, take_turns(runs.values(), device, repeats, seconds)):
            found[n] = {"ms": " ".join(f"{ms:.6g}" for ms in times)}
            if device != "cpu":
                found[n]["GiB"] = torch.cuda.max_memory_allocated() / 2**30
        # Last, as this takes more memory than the pass itself.
        for n, run in runs.items():
            if cells[n]["what"] == "forward-compiled":
                found[n]["alone_ms"] = time_alone(*run.args, device)
    return [found[n] for n in range(len(cells))]


def prepare(cell):
    """A function that makes one pass of a cell."""
    model = cell["subject"].load()
    set_up(model, cell["setting"], cell["subject"].T_train)
    what, _, compiled = cell["what"].partition("-")
    if compiled:
        # As in a run of train.py: on a GPU the size is a constant, whatever was timed before.
        compile_model(model, dynamic=not model.W_E.is_cuda)
    batch, T, device = cell["batch"], cell["length"], model.W_E.device
    if what == "train":
        if compiled and model.W_E.is_cuda:
            print(try_to_record(model, batch, T), flush=True)
        return training_step(model, recipe(cell["model"]), batch, T)
    if what == "decode":
        return get_decoder(model, T)
    tokens = torch.randint(model.config.vocab_size, (batch, T), device=device)
    return partial(forward_pass, model, tokens)


@torch.no_grad()
def set_up(model, setting, T_train):
    """Put a model into a setting, in place: the backend of its attention, or its windows.

    SWE expands those it has; "initial" and "trained" leave them as they are.
    """
    if setting in BACKENDS:
        for layer in model.layers:
            layer.attend = BACKENDS[setting]
    if setting.startswith("trained-like"):
        sizes = [len(layer.s_w) for layer in model.layers]
        for layer, w in zip(model.layers, trained_like(sum(sizes)).split(sizes)):
            # A Transformer's layer that screens may store s_w divided by its speed.
            layer.s_w.copy_((w - 1).log() / getattr(layer, "speed", 1.0))
    if setting.endswith("SWE"):
        model.expand_windows(T_train)


def trained_like(n):
    """n shuffled windows (n,), log-uniform in three ranges.

    5 % (at least one) are in 4096 .. 65536, 25 % in 256 .. 4096, the rest in 2 .. 128.
    """
    rng = torch.Generator().manual_seed(0)
    n_far, n_middle = max(round(0.05 * n), 1), round(0.25 * n)
    bounds = [(4096.0, 65536.0)] * n_far + [(256.0, 4096.0)] * n_middle
    bounds = torch.tensor(bounds + [(2.0, 128.0)] * (n - len(bounds)))
    low, high = bounds[torch.randperm(n, generator=rng)].log().T
    return (low + (high - low) * torch.rand(n, generator=rng)).exp()


# ------------------------------------------------------------------------------- one pass of each

def training_step(model, recipe, batch, T):
    """A function that makes a step as train.py does, on random tokens (batch, T + 1).

    recipe: of support.models. The learning rate is a hundredth: nothing is to be learned.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe["lr"] / 100, betas=(0.9, 0.95),
                                  weight_decay=recipe["weight_decay"], fused=True)

    def step():
        x = torch.randint(model.config.vocab_size, (batch, T + 1), device=model.W_E.device)
        loss = model.loss(x[:, :-1], x[:, 1:])
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        if recipe["clip"]:
            torch.nn.utils.clip_grads_with_norm_(model.parameters(), recipe["clip"], norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.stack([loss.detach(), norm]).tolist()    # the one synchronisation with a GPU

    return step


@torch.no_grad()
def get_decoder(model, context):
    """A function that decodes one more token, greedily, after `context` tokens."""
    tokens = torch.zeros(1, 1, dtype=torch.int64, device=model.W_E.device)
    caches, head = fill_caches(model, context), model.head()

    @torch.no_grad()
    def step():
        nonlocal tokens
        x = model.hidden(tokens, caches)
        tokens = model.logits(x[:, -1], head).argmax(-1, keepdim=True)

    return step


@torch.no_grad()
def fill_caches(model, context):
    """Caches after `context` tokens: random keys and values of those that a cache keeps."""
    caches = model.new_caches()
    model.hidden(torch.zeros(1, 1, dtype=torch.int64, device=model.W_E.device), caches)
    drops = stays_in_window(model.screen) or not has_windows(model)
    for layer, cache in zip(model.layers, caches):
        reach = layer.reach().max().item() if drops else math.inf
        kept, filled = math.ceil(min(reach, context)), KeyCache()
        k, v = (F.normalize(torch.randn(1, x.shape[1], kept, x.shape[3], device=x.device), dim=-1)
                for x in (cache.k, cache.v))
        filled.append(k.to(cache.k.dtype), v.to(cache.v.dtype), torch.tensor(math.inf))
        filled.first, filled.end = context - kept, context
        cache.__dict__ = filled.__dict__
    return caches


@torch.no_grad()
def forward_pass(model, tokens, screen=None):
    """Hidden states of all tokens at once, then all logits in parts of 2^29. tokens: (1, T)"""
    x, head = model.hidden(tokens, None, screen), model.head()
    for part in x.split(max(2**29 // model.config.vocab_size, 1), 1):
        model.logits(part, head)


def time_alone(model, tokens, device):
    """Milliseconds of the products and the screening, or attention, of a forward pass, in all.

    Each call is timed alone while a pass runs eagerly, the second one, as the first warms up. The
    model's attention is replaced in place.
    """
    times = []

    def timed(f):
        def call(*inputs, **options):
            results = []
            times.append(milliseconds(lambda: results.append(f(*inputs, **options)), device))
            return results[0]

        return call

    for layer in model.layers:
        if hasattr(layer, "attend"):                   # a Transformer's
            layer.attend = timed(layer.attend)
    with mock.patch("torch.einsum", timed(torch.einsum)):
        for _ in range(2):
            times.clear()
            forward_pass(model, tokens, timed(model.screen))
    return sum(times)


# ---------------------------------------------------------------------------------- what is shown

def summarize(rows):
    """The rows of the last machine, by COLUMNS, numbers as numbers.

    x_transformer: the time of the plain Transformer nearest in size, in its fastest setting, over
    that of the row. At most half or twice the size counts. x_alone: the time of the row over that
    of its products and its screening, or attention, timed alone; 1 means no overhead.
    """
    found = []
    for row in rows:
        if row["machine"] == rows[-1]["machine"]:
            row = {"what": "forward", "batch": "1", "GiB": "", "alone_ms": ""} | row
            ms, length = [*map(float, row["ms"].split())], int(row["length"])
            tokens = 1 if row["what"] == "decode" else length * int(row["batch"])
            found.append(row | {
                "parameters": int(row["parameters"]), "length": length, "ms": mean_ms(row),
                "std": statistics.stdev(ms) if len(ms) > 1 else math.nan, "GiB": row["GiB"] or None,
                "tokens_per_s": 1e3 * tokens / mean_ms(row), "x_transformer": None,
                "x_alone": mean_ms(row) / float(row["alone_ms"]) if row["alone_ms"] else None})
    plain = [row for row in found if re.fullmatch("transformer:[^:]*", row["model"])]
    for row in found:
        peers = [(abs(math.log(x["parameters"] / row["parameters"])), x["ms"]) for x in plain
                 if all(x[name] == row[name] for name in ("what", "batch", "length"))]
        apart, ms = min(peers, default=(math.inf, None))
        if apart <= math.log(2) and row not in plain:
            row["x_transformer"] = ms / row["ms"]
    return found
