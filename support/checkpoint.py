"""Checkpoints of train.py: read one, build its model, and load its weights and moments."""
import hashlib
import sys
import warnings
import zipfile
from pathlib import Path

import torch

from support.choose import get_screen
from support.cli import UsageError, at_most_3, is_out_of_memory, rank
from support.distributed import set_moments
from support.models import build_model, has_windows
from support.source import ROOT, edited_files, files_of, modules_of
from support.tokens import get_tokenizer

KEYS = {"model", "config", "weights", "tokenizer", "optimizer", "step", "drawn", "data_state",
        "learned", "random_state", "log", "files", "args", "equations", "source", "init_weights",
        "changes", "versions"}


def require_windows(model, path, name):
    """Raise UsageError if a model has no windows. path: its checkpoint; name: the model's."""
    if not has_windows(model):
        raise UsageError(f"{path} is a {name}, which has no screening windows: use a multiscreen "
                         "checkpoint")


def read_checkpoint(path):
    """The dict that train.py wrote. Nothing in it is executed.

    The file's checksums are verified first, by process 0 alone. Then it is mapped into memory, so
    weights and moments that nobody uses take up none.
    """
    is_folder = Path(path).is_dir()
    if is_folder or not Path(path).exists():
        folder = Path(path) if is_folder else Path(path).parent
        said = f"{path} is a folder" if is_folder else f"{path} does not exist"
        if (folder / "diverged.txt").exists():
            why = (folder / "diverged.txt").read_text("utf-8").strip()
        elif others := sorted(map(str, folder.glob("*.pt"))):
            why = f"name a checkpoint, such as {at_most_3(others)}"
        else:
            command = "python train.py" + (f" --out {folder}" if folder != Path() else "")
            why = f"train a model first ({command})"
        raise UsageError(f"{said}: {why}")
    try:
        # Every file in a zip has a checksum, but torch ignores it, so flipped bits would be loaded.
        if rank() == 0 and (bad := zipfile.ZipFile(path).testzip()):
            raise zipfile.BadZipFile(bad)
        with warnings.catch_warnings(action="ignore"):
            ckpt = torch.load(path, "cpu", weights_only=True, mmap=True)
        missing = KEYS - ckpt.keys()
    except Exception as e:                             # a damaged file has many kinds of errors
        if isinstance(e, OSError) or is_out_of_memory(e):
            raise
        raise UsageError(f"{path} is damaged, or not a checkpoint of train.py") from None
    if missing:
        raise UsageError(f"{path} is not a checkpoint of train.py: it lacks {min(missing)}")
    return ckpt


def load_weights(model, weights, path):
    """Put the weights of a checkpoint into a model."""
    try:
        model.load_state_dict(weights)
    except RuntimeError:
        raise UsageError(f"{path}: its weights do not fit the model that is built now") from None


def load_checkpoint(path, device="cpu", dtype=None):
    """(model, tokenizer, dict) from a checkpoint of train.py; the model is in eval mode.

    dtype: for matrix products. The screen is chosen anew unless the run had --kernel definition.
    Raises UsageError if the file is missing, truncated or something else.
    """
    ckpt = read_checkpoint(path)
    model = build_model(ckpt["model"], ckpt["config"], dtype)
    load_weights(model, ckpt["weights"], path)
    model.to(device).eval()
    # No warning for this repository's own models, whose answers a test checks.
    bundled = Path(path).resolve().parent == ROOT / "models"
    if not bundled and (changed := other_code(model, ckpt)):
        print(f"{path} was trained with another {changed}", file=sys.stderr)
    if has_windows(model):
        kernel = "definition" if ckpt["args"].get("kernel") == "definition" else "auto"
        model.screen, line, expected = get_screen(model, kernel)
        if not expected:
            print(line, file=sys.stderr)
    return model, get_tokenizer(ckpt["tokenizer"]), ckpt


def other_code(model, ckpt):
    """The files of a model that have changed since its training, as a phrase; "" if none have."""
    now = files_of(modules_of(model.modules()))
    before = {path: text for path, text in ckpt["source"].items() if path in now}
    return " and ".join(edited_files(before, {path: now[path] for path in before}))


def load_moments(model, optimizer, moments, path):
    """Put the moments of a checkpoint into an optimizer, which keeps its own rates and decays."""
    try:
        set_moments(model, optimizer, moments)
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as e:
        if is_out_of_memory(e):
            raise
        raise UsageError(f"{path}: its optimizer state does not fit model and optimizer as "
                         f"they are now: --init {path} --out NEW takes only the weights") from None


def weights_hash(ckpt):
    """A hash of the weights: twelve hexadecimal digits."""
    found = hashlib.sha256()
    for name, W in sorted(ckpt["weights"].items()):
        found.update(name.encode())
        found.update(W.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return found.hexdigest()[:12]
