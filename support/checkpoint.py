"""Checkpoints: build a model by name, save it, read it back."""
import os
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
    except (ValueError, TypeError) as e:
        raise UsageError(e) from None
    except RuntimeError:
        raise UsageError(f"a model of these sizes does not fit into memory: {config}") from None


def has_windows(model):
    """Whether a model screens: it has windows, relevances, and a function `screen`."""
    return isinstance(model, Multiscreen)


def scale_rope(model, factor):
    """Divide the positions of a model with RoPE by `factor` (position interpolation)."""
    layers = [layer for layer in model.layers if hasattr(layer, "rope_scale")]
    if not layers:
        raise UsageError("--rope-scale is for models with RoPE: transformer:SIZE, multiscreen:rope")
    if not factor > 0:
        raise UsageError(f"--rope-scale {factor:g}: a factor is above 0")
    for layer in layers:
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
        raise UsageError(f"{path} does not exist: train a model first (python train.py)")
    with open(path, "rb") as file, warnings.catch_warnings(action="ignore"):
        try:
            ckpt = torch.load(file, map_location=device, weights_only=True)
            ckpt["args"].setdefault("model", ckpt["model"])        # older ones have it once
            complete = KEYS <= ckpt.keys() and set(FIXED) <= ckpt["args"].keys()
        except Exception as e:
            raise UsageError(f"{path} is truncated, or not a checkpoint of train.py "
                             f"({type(e).__name__})") from None
    if not complete:
        raise UsageError(f"{path} is not a checkpoint of train.py: it lacks part of one")
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
        raise UsageError(f"{path}: its weights do not fit the model it names") from None


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


def open_run(out, ckpt, columns, force=False):
    """(checkpoint, log): the paths of a run in the folder `out`, which was made ready for it.

    A resumed run's log is cut to its checkpoint `ckpt`. A folder that holds another run is refused;
    with `force` that run is deleted, and the tables and figures that were made from it.
    """
    path, log = out / "ckpt.pt", out / "log.tsv"
    lines = log.read_text(errors="replace").splitlines(keepends=True)[1:] if log.exists() else []
    if not ckpt and not force and (path.exists() or lines):
        at = f" at step {read_checkpoint(path)['step']}" if path.exists() else ""
        going_on = "--resume goes on with it, " if path.exists() else ""
        raise UsageError(f"{out} holds a run{at}: {going_on}--out elsewhere starts a new one, "
                         "--force overwrites it")
    out.mkdir(parents=True, exist_ok=True)
    temporary = out / "log.tmp"
    rows = [row for row in lines if row.split("\t")[0].isdigit()]
    rows = [row for row in rows if ckpt and int(row.split("\t")[0]) <= ckpt["step"]]
    temporary.write_text("\t".join(columns) + "\n" + "".join(rows))
    if not ckpt:
        made = [f"{name}.{end}" for name in MEASURED for end in ("tsv", "png")]
        for name in ("ckpt.pt", "diverged.txt", *made):
            (out / name).unlink(missing_ok=True)
    os.replace(temporary, log)
    return path, log
