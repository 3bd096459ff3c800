"""What do the measuring commands share? Flags, a trained model in its settings, and a table.

    p = get_parser(__doc__)
    add_settings(p)
    add_table(p)
    args = p.parse_args()
    run = Measurement(args, "perplexity")              # refuses, before it measures, what cannot be
    for setting in run.settings():
        run.add(text="..", position=..., nats=..)
    run.write()
"""
import argparse
import csv
import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from lab.transformer import scale_rope
from train import load_checkpoint


def get_parser(doc):
    """A parser with the flags of all commands for a checkpoint."""
    p = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--ckpt", default="out/ckpt.pt", help="a checkpoint of train.py [out/ckpt.pt]")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu",
                   help="cpu, cuda or mps [%(default)s]")
    return p


def add_table(p):
    """The flag of a command that writes a table."""
    p.add_argument("--table", type=Path, help="the table to write [beside the checkpoint]")


def add_settings(p):
    """Flags for what can be changed in a trained model."""
    p.add_argument("--swe", action="store_true", help="measure also with screening-window "
                   "expansion: windows longer\nthan the training length become infinite")
    p.add_argument("--rope-scale", nargs="+", default=["1"], metavar="FACTOR", help="measure a "
                   "model with RoPE with each of these factors: 4 divides\npositions by 4, "
                   "ntk4 scales theta instead (paper: 1 2 4 .. 64) [1]")


def commit():
    """The commit of this code, with a + if files were edited since; "" without git."""
    command = ["git", "describe", "--always", "--exclude=*", "--abbrev=10", "--dirty=+"]
    try:
        return subprocess.run(command, cwd=Path(__file__).parent, capture_output=True,
                              text=True).stdout.strip()
    except OSError:
        return ""


def require_writable(path):
    """End the program if a table cannot be written there, before hours of measuring."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as e:
        sys.exit(f"error: the table cannot be written: {e}")


def write_table(path, rows):
    """Write rows, dicts of equal columns, as tab-separated values: all of them, or none."""
    temporary = path.with_name(f"{path.name}.tmp")
    with open(temporary, "w", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]), delimiter="\t", lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
    os.replace(temporary, path)
    print(f"wrote {path}, {len(rows)} rows")


class Measurement:
    """A trained model, what its rows begin with, and the rows. name: of the table."""

    def __init__(self, args, name):
        self.args, self.rows, path = args, [], Path(args.ckpt)
        self.model, self.tokenizer, self.ckpt = load_checkpoint(path, args.device)
        beside = f"{name}.tsv" if path.name == "ckpt.pt" else f"{path.stem}_{name}.tsv"
        self.path = args.table or path.with_name(beside)
        require_writable(self.path)
        self.flags = self.ckpt["args"]
        self.about = {
            "checkpoint": hashlib.sha256(path.read_bytes()).hexdigest()[:10], "commit": commit(),
            "model": self.flags["model"], "seed": self.flags["seed"],
            "seq_len": self.flags["seq_len"], "step": self.ckpt.get("step", "")}

    def settings(self):
        """Put the model into each setting that the flags ask for. Yields its name."""
        if self.args.swe and not hasattr(self.model.layers[0], "s_w"):
            sys.exit(f"error: --swe: {self.flags['model']} has no windows")
        try:
            for factor in self.args.rope_scale:        # all of them, before any work
                scale_rope(self.model, factor)
        except ValueError as e:
            sys.exit(f"error: --rope-scale: {e}")
        for swe in (False, True) if self.args.swe else (False,):
            if swe:                                    # the last ones: windows stay infinite
                self.model.expand_windows(self.flags["seq_len"])
            for factor in self.args.rope_scale:
                scale_rope(self.model, factor)
                names = ["SWE"] if swe else []
                if factor != "1":
                    names.append(f"RoPE x {factor}")
                self.setting = " ".join(names) or "as trained"
                yield self.setting

    def add(self, **values):
        self.rows.append(self.about | {"setting": self.setting} | values)

    def write(self):
        write_table(self.path, self.rows)
