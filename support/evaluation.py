"""Load a trained model to measure it, stretch it to longer texts, and identify it by hashes."""
import hashlib
import re
from pathlib import Path

import torch

from support.checkpoint import build_model, load_checkpoint, require_windows, weights_hash
from support.cli import DEVICE, UsageError, get_device, products_dtype
from support.source import code_hash, hash_of_texts, text_of
from support.tokens import require_text

# The flags that several measuring commands have.
FLAGS = {
    "--ckpt": {"default": "out/ckpt.pt", "help": "checkpoint of train.py [out/ckpt.pt]"},
    "--device": {"default": DEVICE, "help": f"cpu, cuda or mps [{DEVICE}]"},
    "--table": {"type": Path, "help": "the table to fill [beside the checkpoint]"},
}


def add_flags(parser, *names):
    """Add some of FLAGS to a command's parser."""
    for name in names:
        parser.add_argument(name, **FLAGS[name])


def load_for_evaluation(path, device, swe=False, text=True):
    """Like load_checkpoint, with `products_dtype`; `swe` expands its windows.

    text: raise UsageError for a model that was trained on numbers, `--tokenizer 65`, not on text.
    """
    device = get_device(device)
    model, tokenizer, ckpt = load_checkpoint(path, device, products_dtype(device))
    if text:
        require_text(tokenizer, f"this measurement of {path}")
    if swe:
        require_windows(model, path, ckpt["model"])
        model.expand_windows(ckpt["args"]["seq_len"])
    return model, tokenizer, ckpt


def require_finite(numbers, what):
    """Raise FloatingPointError if some of a model's numbers are nan or inf. what: their name."""
    if not numbers.isfinite().all():
        raise FloatingPointError(f"the model's {what} are not finite: has it diverged, or does an "
                                 "edit divide by 0?")


def rope_factor(text):
    """A factor of --rope-scale as tables write it. Raises UsageError for anything else."""
    ntk, number = "ntk" * text.startswith("ntk"), text.removeprefix("ntk")
    if not re.fullmatch(r"\d+(\.\d+)?", number, re.ASCII) or not 1e-9 < float(number) < 1e9:
        raise UsageError(f"--rope-scale {text}: expected a number above 0, such as 4 or ntk4")
    return f"{ntk}{float(number):g}"


def scale_rope(model, factor):
    """Stretch the RoPE of a model for texts `factor` times as long. factor: of `rope_factor`.

    "4" divides the positions by 4 (position interpolation); "ntk4" turns the slowest pair at a
    quarter of its speed and the fastest as before (NTK-aware scaling of theta).
    """
    layers = [layer for layer in model.layers if getattr(layer, "rope_scale", None)]
    if not layers:
        raise UsageError("--rope-scale is for models with RoPE: transformer:SIZE, multiscreen:rope")
    number = float(factor.removeprefix("ntk"))
    for layer in layers:
        layer.rope_scale = (1.0, number) if factor.startswith("ntk") else (number, 1.0)


def add_settings(parser):
    """Add the flags that `settings_of` reads."""
    parser.add_argument("--rope-scale", type=rope_factor, nargs="+", default=[],
                        help="for models with RoPE: measure with each of these factors; 4 divides "
                        "the positions by 4, ntk4 scales theta instead (paper: 1 2 4 .. 64)")
    parser.add_argument("--swe", action="store_true",
                        help="measure also with screening-window expansion: windows longer than "
                        "the training length become infinite")


def settings_of(args, model, ckpt):
    """What `stretch` needs of a cell, {"swe": .., "factor": ..}, for each setting that is measured.

    SWE comes last, as windows stay expanded. Raises UsageError for a model without windows or RoPE.
    """
    if args.swe:
        require_windows(model, args.ckpt, ckpt["model"])
    for factor in args.rope_scale:
        scale_rope(model, factor)
    return [{"swe": swe, "factor": factor} for swe in [False, True][: 1 + args.swe]
            for factor in args.rope_scale or [None]]


def stretch(model, cell, T_train):
    """Expand the windows or scale the RoPE of a model, as a cell asks. Returns it in words."""
    if cell["swe"]:
        model.expand_windows(T_train)
    if cell["factor"]:
        scale_rope(model, cell["factor"])
    return " SWE" * cell["swe"] + f" RoPE ×{cell['factor']}" * bool(cell["factor"])


def model_hash(ckpt, *modules):
    """What a measurement is tied to: a hash of a checkpoint's weights, and one of the code.

    The code is that of the model and that of `modules`, the names of the modules that measure it.
    """
    code = equations(ckpt["model"]) + hash_of_texts(map(text_of, modules))
    return f"{weights_hash(ckpt)}-{hashlib.sha256(code.encode()).hexdigest()[:12]}"


def equations(name):
    """A hash of the code of the model of that name; see `code_hash`."""
    with torch.random.fork_rng(devices=[]):
        model = build_model(name, {"N_L": 4, "N_H": 4, "d_E": 64, "vocab_size": 7})
    return code_hash(model)
