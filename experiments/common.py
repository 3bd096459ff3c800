"""What the experiments share: runs of train.py that are not run twice, tables, TSV files, matplotlib if it is there."""
import math
import signal
import time
from pathlib import Path

import torch

import train
from train import UsageError


def run_once(out, *flags, steps):
    """Train with `train.py FLAGS --steps STEPS --out OUT`, unless OUT holds that run already; go on if it was interrupted.

    Returns (rows, diverged): the rows of OUT/log.tsv as dicts, and the message of a run that diverged, else None.
    Raises KeyboardInterrupt if it was stopped by Ctrl-C, UsageError for anything else that is wrong.
    """
    out, flags = Path(out), [str(f) for f in flags] + ["--steps", str(steps)]
    note, command = out / "diverged.txt", out / "flags.txt"
    if (out / "log.tsv").exists() and (not command.exists() or command.read_text() != " ".join(flags)):
        raise UsageError(f"{out} holds a run with other flags: name another --out, or move that folder away")
    rows = read_log(out / "log.tsv") if (out / "log.tsv").exists() else []
    if not note.exists() and not (rows and rows[-1]["step"] >= steps):
        out.mkdir(parents=True, exist_ok=True)
        command.write_text(" ".join(flags))
        print(f"\n{out}: python train.py {' '.join(flags)}", flush=True)
        handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            train.main([*flags, "--out", str(out), *(["--resume"] if (out / "ckpt.pt").exists() else [])])
        except UsageError as e:
            if "diverged" not in str(e):
                raise
            note.write_text(str(e))
        finally:
            for s, handler in handlers.items():
                signal.signal(s, handler)
        rows = read_log(out / "log.tsv")
        if not note.exists() and not (rows and rows[-1]["step"] >= steps):
            raise KeyboardInterrupt
    return rows, note.read_text() if note.exists() else None


def read_log(path):
    """The rows of a log.tsv as dicts of floats; a column that a row leaves empty is missing from its dict."""
    try:
        head, *rows = [line.split("\t") for line in Path(path).read_text().splitlines()]
        return [{k: float(v) for k, v in zip(head, row) if v} for row in rows]
    except (OSError, ValueError) as e:
        raise UsageError(f"{path} is no log of train.py ({type(e).__name__})") from None


def text(x):
    """A cell of a table: four digits of a float, - for None and NaN."""
    return "-" if x is None or isinstance(x, float) and math.isnan(x) else f"{x:.4g}" if isinstance(x, float) else str(x)


def count_parameters(*flags):
    """(total, non-embedding): the number of parameters of the model that `train.py FLAGS` builds. Raises UsageError."""
    args, _ = train.get_args([str(f) for f in flags])
    n_vocab = train.get_tokenizer(args.tokenizer).n_vocab
    with torch.device("meta"):
        model = train.build_model(args.model, {"psi": args.psi, "N_L": args.layers, "vocab_size": n_vocab})
    total = sum(p.numel() for p in model.parameters())
    return total, total - model.W_E.numel()


def report(path, columns, rows, title):
    """Print rows (lists of str or numbers; None is shown as -) as a table and write them to `path` as TSV."""
    cells = [list(columns)] + [[text(x) for x in row] for row in rows]
    widths = [max(len(row[c]) for row in cells) for c in range(len(columns))]
    print(f"\n{title}")
    for row in cells:
        print("  ".join(x.rjust(n) for x, n in zip(row, widths)))
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join("\t".join(row) + "\n" for row in cells))
    except OSError as e:
        raise UsageError(f"{path} cannot be written ({e.strerror})") from None
    print(f"wrote {path}")


def pyplot():
    """matplotlib.pyplot without a window, or None after saying in one line how to get it."""
    try:
        import matplotlib
    except ImportError:
        print("no figure: `pip install matplotlib` and run this again to draw it")
        return None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def save_figure(fig, path):
    """Write a figure as PNG, 150 dots per inch."""
    fig.savefig(path, dpi=150, bbox_inches="tight")
    print(f"wrote {path}")


class Progress:
    """One line per finished unit of work on stdout, with the time left by its share of the whole."""

    def __init__(self, total):
        self.total, self.done, self.began = total, 0.0, time.perf_counter()

    def add(self, amount, text):
        self.done += amount
        seconds = time.perf_counter() - self.began
        left = seconds * (self.total / self.done - 1)
        print(f"{text}   {train.clock(seconds)}, about {train.clock(left)} left", flush=True)
