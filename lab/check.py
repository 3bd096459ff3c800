"""Is it a language model? Try a class of yours, a checkpoint, or a screen, before you train it.

    python -m lab.check                                   the code as it is
    python -m lab.check --model multiscreen:mine.Tiles    any model that train.py knows, or several
    python -m lab.check --ckpt out/ckpt.pt
    python -m lab.check --screen mine.screen              against multiscreen.screen

A model is tried on a copy: small, unless it is a checkpoint, in float64, its parameters moved a
little. Training and decoding need four things, and if one is missing, the exit code is 1:

    causal              other tokens after position t leave the logits up to t unchanged
    cached              a text in pieces, with caches, gets the logits of one pass
    alone               a sequence's logits do not depend on the other sequences of its batch
    trained             every parameter gets a gradient that is finite and not all 0

Version 4 of the paper calls relevance absolute "when its values lie on a fixed bounded scale,
depend on neither competing keys nor sequence length, require no sequence-length-dependent
calibration, and can all be zero". Here these values are the weights by which a layer sums values:

    bounded             they are between -1 and 1, also where W_Q and W_K are large
    no competing keys   they stay the same when every other key is replaced
    no length           .. and when eight more keys come before them
    exact zeros         a key inside the window can have the weight 0
    all can be 0        .. and so can all keys of a query at once

A constant that was calibrated by hand, such as the bias of sigmoid-fixed, passes. A - stands for
what could not be tried; below the table, a line for each NO says what was found.

A screen is compared with multiscreen.screen in float64, in its value and all gradients, in 16
cases: narrow, wide and infinite windows, decoding, odd lengths. Without a GPU Triton runs in its
interpreter, which takes a minute.
"""
import math
import os
import sys

import torch

from support.cli import DEVICE, Parser, UsageError, cli, error_line
from multiscreen import screen as definition
from support import check
from support.fast import choose_screen, edited_equations
from support.models import build_model, has_windows, module_of
from support.run import load_checkpoint
from support.tables import print_table

# {condition: (the largest number with which it holds, what that number is)}
ABSOLUTE = {
    "bounded": (1 + 1e-6, "with all matrices of a layer 100 times as large, a weight is {:.3g}"),
    "no competing keys": (1e-6, "a weight changes by {:.2g} when every other key is replaced"),
    "no length": (1e-6, "a weight changes by {:.2g} when eight more keys come before"),
    "exact zeros": (0, "of all keys that a query can see, none has a weight below {:.2g}"),
    "all can be 0": (0, "each query that can see a key gives one a weight of {:.2g} or more")}
TINY = 2.0**-20                                        # values that TanhNorm leaves as they are
SIZES = {"psi": 4, "vocab_size": 257}
WRONG = 1e-3                                           # a larger error is not one of rounding
LENGTHS = [(1, 0), (1, 150), (3, 70), (7, 0), (17, 60), (33, 0), (129, 0), (200, 0)]   # T, i0
WINDOWS = [(1.5, 3.0), (17.0, 33.5), (90.5, 250.0), (1e9, math.inf)]                   # of 4 tiles
WIDTHS = (0.02, 0.1, 0.5, 1.0)


# ---------------------------------------------------------------------------------- a model

def small_model(name):
    """A model of that name with random weights: small, if its name does not say its size.

    It screens, and its caches forget, as in train.py.
    """
    torch.manual_seed(0)
    sizes = SIZES if name.startswith("multiscreen") else {"vocab_size": 257}
    model = build_model(name, sizes)
    if has_windows(model):
        line = choose_screen(model)
        if edited_equations():
            print(line)
    return model


def check_models(models):
    """Print a row of ticks for each model, and what is wrong.

    models: {name: model}. Returns the promises that one of them breaks, and "used" if its class
    overrides nothing.
    """
    rows, lines, conditions, broken = [], [], [], set()
    for name, model in models.items():
        try:
            faults = check.faults(model, check.LONG, gradients=True)
        except Exception:
            print(f"{name} fails on 2 x {check.LONG} random tokens, with which its promises are "
                  "tried:", flush=True)
            raise
        cells = {promise: "NO" if promise in faults else "yes" for promise in check.PROMISES}
        ticks, reasons = absolute(model)
        cells |= ticks
        if "causal" in faults:                         # a cache cannot know later tokens
            cells["cached"] = "-"
        if check.HOPELESS.keys() & faults.keys():
            cells, reasons = dict.fromkeys(cells, "-"), {}
        rows.append({"model": name} | cells)
        lines += [f"{name}: {line}" for line in faults.values()]
        broken |= faults.keys()
        unused = check.unused(type(model.layers[0]))
        if unused:
            lines += [f"{name}: {line}" for line in unused]
            broken.add("used")
        conditions += [f"{name}, {condition}: NO, {why}" for condition, why in reasons.items()]
    print_table(rows, "What holds: the promises of a language model, and from `bounded` on the "
                "conditions of absolute relevance")
    for line in [*lines, *conditions]:
        print(line)
    return broken


class Keys:
    """A cache that gives a layer the columns `part` of the identity in place of its values.

    So the sums of values are the weights of these keys. before: how many keys of another sequence
    come first; alters: whether every other key is that of another sequence.
    """

    def __init__(self, part=0, before=0, alters=False):
        self.end, self.part, self.alters = before, part, alters

    def append(self, k, v, w):
        others = k.roll(1, 0)
        if self.alters:
            k = k.clone()
            k[:, :, 1::2] = others[:, :, 1::2]
        k = torch.cat((others[:, :, : self.end], k), 2)
        self.S, V = k.shape[2], v.shape[3]
        columns = TINY * torch.eye(self.S + V, dtype=v.dtype, device=v.device)[: self.S]
        columns = columns[:, self.part * V : (self.part + 1) * V]
        return k, columns.expand(*k.shape[:3], V)


def weights(layer, x, screen, **keys):
    """The weight of each key of each query in a layer, (B, H, T, S), for any way to attend.

    They are seen where a layer's sums of values leave `mix` (a Transformer's) or enter `bound`.
    """
    method = "bound" if hasattr(layer, "bound") else "mix"
    call, seen, parts, done, S = getattr(layer, method), [], [], 0, math.inf

    def note(h, *inputs):
        seen.append(h if method == "bound" else call(h, *inputs))
        return seen[-1]

    setattr(layer, method, note)
    while done < S:
        cache = Keys(len(parts), **keys)
        layer(x, screen, cache)
        parts.append(seen.pop() / TINY)
        done, S = done + parts[-1].shape[3], cache.S
    delattr(layer, method)
    return torch.cat(parts, 3)[..., :S]


@torch.no_grad()
def absolute(model):
    """({condition: "yes", "NO", or "-" if it cannot be tried}, {condition: why NO}) of a model.

    The first three must hold in all layers, the last two in one. Keys that are never seen, by their
    position, are not rejected.
    """
    model = check.moved_copy(model, torch.float64)
    g = torch.Generator().manual_seed(0)
    x = model.embed(torch.randint(len(model.W_E), (8, 24), generator=g).to(model.W_E.device))
    found = {name: [] for name in ABSOLUTE}            # a number for each layer
    try:
        for layer in model.layers:
            p = weights(layer, x, model.screen)
            altered = weights(layer, x, model.screen, alters=True)
            later = weights(layer, x, model.screen, before=8)
            found["no competing keys"].append((altered - p)[..., ::2].abs().max().item())
            found["no length"].append((later[..., 8:] - p).abs().max().item())
            seen = (p != 0).any(0).expand_as(p)        # in one of the sequences
            found["exact zeros"].append(p[seen].abs().min().item())
            found["all can be 0"].append(p.abs().amax(-1)[seen.any(-1)].min().item())
            y = layer(x, model.screen)
            for W in layer.parameters():               # scores may be as large as they like
                if W.ndim > 1:
                    W.mul_(100.0)
            found["bounded"].append(weights(layer, x, model.screen).abs().max().item())
            x = y
    except Exception:                                  # a layer of yours may have other methods
        return dict.fromkeys(ABSOLUTE, "-"), {}
    for name in ("exact zeros", "all can be 0"):
        found[name] = [min(found[name])]
    ticks, reasons = {}, {}
    for name, (most, words) in ABSOLUTE.items():
        wrong = [number for number in found[name] if not number <= most]       # NaN is wrong, too
        ticks[name] = "NO" if wrong else "yes"
        if wrong:
            reasons[name] = words.format(wrong[0])
    return ticks, reasons


# --------------------------------------------------------------------------------- a screen

def check_screen(name, n_cases=16):
    """Print the worst errors of a screen of yours, and the definition's own. name: FILE.FUNCTION

    Returns whether they are those of rounding.
    """
    file, _, function = name.rpartition(".")
    screen = getattr(module_of(file), function, None) if file else None
    if not callable(screen):
        raise UsageError(f"--screen {name}: name a function of a file, as in mine.screen")
    worst, own = {}, {}
    for n in range(n_cases):
        T, i0 = LENGTHS[n % len(LENGTHS)]
        w = [pair[n // len(LENGTHS) % 2] for pair in WINDOWS]
        r = [WIDTHS[(n + tile) % 4] for tile in range(4)]
        inputs = check.draw_case(T, i0, w, r, seed=n, device=DEVICE)
        try:
            errors = check.screen_errors(screen, inputs, i0)
        except Exception as e:                         # whatever it is, a model would meet it
            print(f"{name} fails with {T} queries and {i0 + T} keys: {error_line(e)}")
            return False
        rounded = check.screen_errors(definition, inputs, i0)
        for output, error in errors.items():
            tile = error.argmax().item()
            case = f"{T} queries, {i0 + T} keys, i0 = {i0}, w = {w[tile]:g}, r = {r[tile]:g}"
            worst[output] = max(worst.get(output, (-1.0, "")), (error[tile].item(), case))
            own[output] = max(own.get(output, 0.0), rounded[output].max().item())
    print_table([{"": x, "worst error": f"{error:.1e}",
                  "multiscreen.screen in float32": f"{own[x]:.1e}", "worst case": case}
                 for x, (error, case) in worst.items()],
                f"{name} against multiscreen.screen in float64, {n_cases} cases")
    if len(worst) == 1:
        print("its gradients cannot be computed on this device")
    wrong = [x for x, (error, _) in worst.items() if error > WRONG]
    if wrong:
        print(f"{', '.join(wrong)}: too far off for rounding")
    return not wrong


def main():
    p = Parser(__doc__)
    p.add_argument("--model", nargs="+", default=[], help="names of models, as for train.py")
    p.add_argument("--ckpt", nargs="+", default=[], help="checkpoints of train.py")
    p.add_argument("--screen", help="FILE.FUNCTION, called like multiscreen.screen")
    args = p.parse_args()
    if DEVICE == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")
    if args.screen:
        sys.exit(0 if check_screen(args.screen) else 1)
    names = args.model
    if not names and not args.ckpt:
        names = ["multiscreen"]
    models = {name: small_model(name) for name in names}
    models |= {path: load_checkpoint(path)[0] for path in args.ckpt}
    sys.exit(1 if check_models(models) else 0)


if __name__ == "__main__":
    cli(main)
