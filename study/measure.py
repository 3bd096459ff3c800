"""What the measuring commands of the study share: a checkpoint in several settings, and a table."""
import argparse
import subprocess
from pathlib import Path

import pandas as pd
import torch

from lab.transformer import scale_rope
from train import load_checkpoint


def parser(doc):
    p = argparse.ArgumentParser(description=doc,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--ckpt", default="out/ckpt.pt", help="a checkpoint of train.py [out/ckpt.pt]")
    p.add_argument("--swe", action="store_true", help="measure with screening-window expansion, "
                   "too: windows longer than the training length become infinite")
    p.add_argument("--rope-scale", nargs="+", default=["1"], metavar="FACTOR",
                   help="stretch RoPE by these, such as 4 or ntk4 [1]")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--table", type=Path, help="the table to write [beside the checkpoint]")
    return p


class Measurement:
    """A trained model, the settings that the flags ask for, and the rows that are measured."""

    def __init__(self, args, name):
        self.args, self.rows = args, []
        self.model, self.tokenizer, self.ckpt = load_checkpoint(args.ckpt, args.device)
        self.path = args.table or Path(args.ckpt).with_name(f"{name}.tsv")
        commit = subprocess.run(["git", "describe", "--always", "--dirty"], text=True,
                                capture_output=True, cwd=Path(__file__).parent)
        flags = self.ckpt["args"]
        self.columns = {"ckpt": args.ckpt, "class": flags["model"], "seed": flags["seed"],
                        "seq_len": flags["seq_len"], "step": self.ckpt.get("step"),
                        "commit": commit.stdout.strip()}

    def settings(self):
        """Put the model into each setting, and yield its columns."""
        for swe in ["", "SWE"] if self.args.swe else [""]:
            if swe:                                    # comes last: expanded windows stay expanded
                self.model.expand_windows(self.ckpt["args"]["seq_len"])
            for factor in self.args.rope_scale:
                scale_rope(self.model, factor)
                yield {"swe": swe, "factor": "" if factor == "1" else factor}

    def add(self, row):
        self.rows.append(self.columns | row)

    def save(self, by, show):
        """Write the table, whole, and print the means of the columns `show` by another one."""
        table = pd.DataFrame(self.rows)
        table.to_csv(self.path, sep="\t", index=False, float_format="%.6g")
        means = table.groupby(["swe", "factor", by])[list(show)].mean()
        print(f"{means.round(3)}\n\n{self.path}")
