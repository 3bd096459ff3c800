"""Trains and measures the models of part 5. Nothing to do here: read it once."""
import math
import statistics
import time

import numpy as np
import torch

import multiscreen as ms
from abcdigits import exact_matches, generate_by_token_count
from exercises.trained import train_steps
from support.maps import alive_fraction
from tasks.abcdigits import DONE_AFTER, ABCDigitsStream

T = 128                                                # tokens of a training sequence
LONG = 1024                                            # tokens of a long one, and of a prompt
LAST = 64                                              # its last tokens, whose loss is compared
MORE = 25                                              # extra steps with trained weights


def train_variant(name, model, data, steps, lr, seed):
    """The paper's recipe. Returns the loss, gradient norm and milliseconds of each step."""
    numbers = (range(8 * step, 8 * step + 8) for step in range(steps))
    batches = (torch.from_numpy(np.stack([data.draw(n, seed) for n in ns])) for ns in numbers)
    rows, start = [], time.perf_counter()
    for loss, norm in train_steps(model, batches, lr * getattr(model, "lr_factor", 1)):
        now = time.perf_counter()
        rows.append((loss, norm, 1000 * (now - start)))
        start = now
        if len(rows) % 50 == 0:
            print(f"seed {seed}  {name:12s} step {len(rows):4d}   loss {mean_of_last(rows, 0):.4f}",
                  flush=True)
    return rows


def mean_of_last(rows, column, n=20):
    return statistics.mean(row[column] for row in rows[-n:])


def some(data, n):
    """n sequences of data, (n, tokens + 1)."""
    return torch.from_numpy(np.stack([data[i] for i in data.spread(n)]))


@torch.no_grad()
def measure(model, rows, val, long):
    """{what: a number} for a trained model."""
    model.eval()                                       # for your dropout
    x, far = some(val, 32), some(long, 8)
    near = far[:, -T - 1 :]
    losses = [model.loss(x[:, :-1], x[:, 1:], reduction="none")[:, -LAST:].mean().item()
              for x in (near, far)]
    found = {"training loss, last 20 steps": mean_of_last(rows, 0),
             f"validation loss, {T} tokens": model.loss(x[:, :-1], x[:, 1:]).item(),
             f"{LAST} tokens after {T - LAST} others: loss": losses[0],
             f"the same after {LONG - LAST} others": losses[1],
             "what the longer context costs": losses[1] - losses[0]}
    return found | of_windows(model, x[:1, :-1]) | {
        "gradient norm, last 20 steps": mean_of_last(rows, 1),
        "parameters": sum(p.numel() for p in model.parameters()),
        "milliseconds a step": statistics.median(row[2] for row in rows)}


def retrieval(name, model, trained, tokenizer, seed):
    """{what: a number}: the share of needles that a model finds with trained weights.

    Ten prompts ask for a number that stood there once: at once, and after 25 more steps, in which
    the weights get used to this variant. Nothing where they do not fit.
    """
    weights = trained.state_dict()
    if {n: W.shape for n, W in weights.items()} != {n: W.shape for n, W in
                                                    model.state_dict().items()}:
        return {}
    model.load_state_dict(weights)

    def count_tokens(line):
        return len(tokenizer.encode_ordinary(line))

    def found():
        return 100 * statistics.mean(exact_matches(model, tokenizer, [row[:-2] for row in rows],
                                                   [row[-2:] for row in rows]))

    rows = [row for depth in (0.1, 0.3, 0.5, 0.7, 0.9)
            for row in generate_by_token_count(LONG, depth, count_tokens, 2, 2)]
    at_once = found()
    data = ABCDigitsStream(tokenizer, 256, 2, seed, part=0)
    data.looked_up = DONE_AFTER                        # documents as at the end of its training
    train_variant(name, model, data, MORE, 2**-6, seed)
    return {f"trained before: found, {LONG:,} tokens, %": at_once,
            f"found after {MORE} more steps, %": found()}


def of_windows(model, x):
    """The windows, and the share of the pairs inside them that pass Trim."""
    if not hasattr(model.layers[0], "s_w"):
        return {}
    w = torch.cat([ms.window(tile.s_w) for tile in model.layers])
    found = {"median window": w.median().item(), "largest window": w.max().item()}
    if model.screen is ms.screen:
        found["pairs in the windows that pass Trim, %"] = 100 * alive_fraction(model, x)
    return found


def table(variant, pairs):
    """Lines: the means of both models, and their paired differences. pairs: (base, variant)s."""
    head = f"{'mean of the seeds':40s}{'base':>12s}{variant:>12s}{'difference':>12s}"
    yield head + ("   +- deviation   of each seed" if len(pairs) > 1 else "")
    for what in dict.fromkeys([*pairs[0][0], *pairs[0][1]]):
        values = [[side.get(what, math.nan) for side in pair] for pair in pairs]
        differences = [b - a for a, b in values]
        means = [statistics.mean(column) for column in (*zip(*values), differences)]
        line = f"{what:40s}" + "".join(f"{shown(x):>12s}" for x in means)
        if len(pairs) > 1 and not math.isnan(means[2]):
            line += f"   +- {shown(statistics.stdev(differences)):10s}  "
            line += "  ".join(map(shown, differences))
        yield line


def shown(x):
    """A number with at least four digits."""
    if math.isnan(x):
        return "-"
    return f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.4f}" if abs(x) < 10 else f"{x:.1f}"
