"""Checkpoints: build a model by name, save it, read it back."""
import os
import re
import sys
import warnings
from pathlib import Path

import torch

import baselines
from multiscreen import Multiscreen
from support.cli import UsageError, get_device
from support.kernel import get_screen
from support.tokens import get_tokenizer

KEYS = {"model", "config", "weights", "tokenizer", "optimizer", "step", "drawn", "random_state",
        "args", "versions"}
# The flags that --resume cannot change; a checkpoint has them all.
FIXED = ("model", "psi", "layers", "data", "tokenizer", "digits", "seq_len", "seed")
# The tables and figures that scripts write beside a checkpoint.
MEASURED = ("abcdigits", "abcdigits_swe", "passkey", "passkey_swe", "long_context", "windows",
            "relevance_maps")


def build_model(name, config, dtype=None):
    """`baselines.build`; raises UsageError for a name or sizes that cannot be."""
    try:
        return baselines.build(name, config, dtype)
    except ValueError as e:
        raise UsageError(e) from None
    except (MemoryError, RuntimeError) as e:           # torch says too much memory in many ways
        if not re.search("memory|overflow|too large", str(e)):
            raise
        raise UsageError(f"a model of these sizes does not fit into memory: {config}") from None


def has_windows(model):
    """Whether a model screens: it has windows, relevances, and a function `screen`."""
    return isinstance(model, Multiscreen)


def require_windows(model, path, name):
    """Raise UsageError if the model of that name, of the checkpoint at `path`, has no windows."""
    if not has_windows(model):
        raise UsageError(f"{path} is a {name}, which has no screening windows: take a multiscreen "
                         "checkpoint")


def has_rope(model):
    """Whether a model has RoPE, so that its positions can be scaled."""
    return any(hasattr(layer, "rope_scale") for layer in model.layers)


def scale_rope(model, factor):
    """Divide the positions of a model with RoPE by `factor` (position interpolation)."""
    if not has_rope(model):
        raise UsageError("--rope-scale is for models with RoPE: transformer:SIZE, multiscreen:rope")
    if not factor > 0:
        raise UsageError(f"--rope-scale {factor:g}: a factor is above 0")
    for layer in model.layers:
        layer.rope_scale = factor


def save_checkpoint(path, ckpt):
    """Write to a temporary file, then rename: the file at `path` is whole at any time."""
    temporary = path.with_suffix(".tmp")
    try:
        with open(temporary, "wb") as file:
            torch.save(ckpt, file)
            file.flush()
            os.fsync(file.fileno())                    # a power cut must not leave an empty file
        os.replace(temporary, path)
    except (OSError, RuntimeError) as e:
        temporary.unlink(missing_ok=True)
        raise UsageError(f"{path} cannot be written ({str(e).splitlines()[0]}); the file that was "
                         "there is unchanged") from None


def read_checkpoint(path, device="cpu"):
    """The dict that train.py wrote. Nothing in the file is executed."""
    if not Path(path).exists():
        raise UsageError(f"{path} does not exist: train a model first "
                         f"(python train.py --out {Path(path).parent})")
    with open(path, "rb") as file, warnings.catch_warnings(action="ignore"):
        try:
            ckpt = torch.load(file, map_location=device, weights_only=True)
            ckpt["args"].setdefault("model", ckpt["model"])        # older ones have it once
            missing = KEYS - ckpt.keys() | set(FIXED) - ckpt["args"].keys()
        except Exception as e:
            raise UsageError(f"{path} is truncated, or not a checkpoint of train.py "
                             f"({type(e).__name__})") from None
    if missing:
        raise UsageError(f"{path} is not a checkpoint of train.py: it lacks "
                         f"{', '.join(sorted(missing))}")
    return ckpt


def load_weights(model, weights, path):
    """Put the weights of a checkpoint into a model."""
    shapes = {name: p.shape for name, p in model.state_dict().items()}
    for name, p in weights.items():                    # older ones have s_E, s_F without an axis
        if p.ndim == 0 and shapes.get(name) == (1,):
            weights[name] = p.reshape(1)
    try:
        model.load_state_dict(weights)
    except RuntimeError:
        raise UsageError(f"{path}: its weights do not fit the model as it is built now") from None


def load_checkpoint(path, device="cpu", dtype=None):
    """(model, tokenizer, dict) from a checkpoint of train.py; the model is in eval mode.

    dtype: of the matrix products. What screens is chosen anew, except after --kernel definition.
    Raises UsageError if the file is missing, truncated or something else.
    """
    ckpt = read_checkpoint(path, device)
    model = build_model(ckpt["model"], ckpt["config"], dtype)
    load_weights(model, ckpt["weights"], path)
    if has_windows(model):
        kernel = "definition" if ckpt["args"].get("kernel") == "definition" else "auto"
        model.screen, line, expected = get_screen(kernel, torch.device(device), model.config, dtype)
        if not expected:
            print(line, file=sys.stderr)
    return model.to(device).eval(), get_tokenizer(ckpt["tokenizer"]), ckpt


def load_for_evaluation(path, device, swe=False):
    """As load_checkpoint, in bfloat16 on a GPU; with `swe` its windows are expanded."""
    device = get_device(device)
    dtype = torch.bfloat16 if device.type == "cuda" else None
    model, tokenizer, ckpt = load_checkpoint(path, device, dtype)
    if swe and not has_windows(model):
        raise UsageError(f"--swe is for models with windows; {path} is a {ckpt['model']}")
    if swe:
        model.expand_windows(ckpt["args"]["seq_len"])
    return model, tokenizer, ckpt


def load_optimizer(optimizer, state):
    """Put the state of a checkpoint into an optimizer."""
    optimizer.load_state_dict(state)
    for p, moments in optimizer.state.items():
        for name in ("exp_avg", "exp_avg_sq"):
            moments[name] = moments[name].reshape(p.shape)         # as in load_weights


def refuse_other_run(out):
    """Raise UsageError if `out` is a file, or a folder that holds a run."""
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {out} is a file: name a folder")
    log, path = out / "log.tsv", out / "ckpt.pt"
    if path.exists():
        try:
            state = f"a run at step {read_checkpoint(path)['step']}: --resume goes on with it"
        except UsageError:
            state = "a damaged checkpoint: move it away"
        raise UsageError(f"{out} holds {state}, --out elsewhere starts a new one, --force "
                         "overwrites it")
    if log.exists() and log.read_text(errors="replace").count("\n") > 1:
        raise UsageError(f"{out} holds the log of a run without a checkpoint: --out elsewhere "
                         "starts a new one, --force overwrites it")


def open_run(out, ckpt, columns):
    """(checkpoint, log): the paths of a run in the folder `out`, which is made ready for it.

    A resumed run's log is cut to its checkpoint `ckpt`. For a new run, an older run is deleted, and
    the tables and figures that were made from it.
    """
    out.mkdir(parents=True, exist_ok=True)
    log, temporary = out / "log.tsv", out / "log.tmp"
    rows = []
    if ckpt and log.exists():
        lines = log.read_text(errors="replace").splitlines(keepends=True)
        rows = [row for row in lines if row.split("\t")[0].isdigit()]
        rows = [row for row in rows if int(row.split("\t")[0]) <= ckpt["step"]]
    temporary.write_text("\t".join(columns) + "\n" + "".join(rows))
    if not ckpt:
        made = [f"{name}.{end}" for name in MEASURED for end in ("tsv", "png")]
        for name in ("ckpt.pt", "diverged.txt", *made):
            (out / name).unlink(missing_ok=True)
    os.replace(temporary, log)
    return out / "ckpt.pt", log
