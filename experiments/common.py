"""What the experiments share: runs of train.py that are not run twice, tables, TSV files, matplotlib if it is there."""
import math
import statistics
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
    before = command.read_text() if command.exists() else "unknown flags"
    if (out / "log.tsv").exists() and before != " ".join(flags):
        raise UsageError(f"{out} holds a run with other flags ({before}): name another --out, or move that folder away")
    if not is_finished(out, steps):
        try:
            out.mkdir(parents=True, exist_ok=True)
            command.write_text(" ".join(flags))
        except OSError as e:
            raise UsageError(f"--out {out} cannot be written ({e.strerror})") from None
        print(f"\n{out}: python train.py {' '.join(flags)}", flush=True)
        try:
            train.main([*flags, "--out", str(out), *(["--resume"] if (out / "ckpt.pt").exists() else [])])
        except train.Diverged as e:
            note.write_text(str(e))
        if not is_finished(out, steps):
            raise KeyboardInterrupt("the same experiment, started again, goes on with this run and then with the others")
    return read_log(out / "log.tsv"), note.read_text() if note.exists() else None


def is_finished(out, steps):
    """Whether the folder holds a run of that many steps, or one that diverged."""
    if (out / "diverged.txt").exists():
        return True
    rows = read_log(out / "log.tsv") if (out / "log.tsv").exists() else []
    return bool(rows) and rows[-1]["step"] >= steps


def run_seeds(out, *flags, steps, seeds, progress, amount=1):
    """The last validation losses of the runs with the seeds 0, 1, .., in OUT-0, OUT-1, ..; NaN if diverged. nats per token"""
    losses = []
    for seed in range(seeds):
        folder = Path(f"{out}-{seed}")
        known = is_finished(folder, steps)
        losses.append(outcome(*run_once(folder, *flags, "--seed", seed, steps=steps)))
        shown = "diverged" if math.isnan(losses[-1]) else f"validation loss {losses[-1]:.4f}"
        progress.add(amount, f"\n{folder}: {shown}", known)
    return losses


def refuse(flags, *names):
    """Raise UsageError if flags that are passed on to train.py hold one that the experiment sets itself."""
    for flag in map(str, flags):
        if flag.partition("=")[0] in names:
            raise UsageError(f"{flag.partition('=')[0]} is set by the experiment itself; -h lists what can be chosen")


def outcome(rows, message):
    """The last validation loss of a run, nats per token, or NaN if it diverged: if train.py stopped it (message), or if it
    ended more than half a nat above where it had been, its first loss or a mean over an eighth of its logged rows."""
    losses = [row["loss"] for row in rows if "loss" in row]
    if message or not losses:
        return math.nan
    n = max(len(losses) // 8, 1)
    best = min(losses[0], *(sum(losses[i : i + n]) / n for i in range(len(losses) - n + 1)))
    last = ([row["val_loss"] for row in rows if "val_loss" in row] or losses)[-1]
    return last if last <= best + 0.5 else math.nan


def summarize(losses):
    """(mean, std, number of seeds that diverged) over the losses that are not NaN; mean and std are NaN where undefined."""
    good = [x for x in losses if not math.isnan(x)]
    return (statistics.mean(good) if good else math.nan, statistics.stdev(good) if len(good) > 1 else math.nan,
            len(losses) - len(good))


def read_log(path):
    """The rows of a log.tsv as dicts of floats; a column that a row leaves empty is missing from its dict."""
    try:
        head, *rows = [line.split("\t") for line in Path(path).read_text().splitlines()]
        return [{k: float(v) for k, v in zip(head, row) if v} for row in rows]
    except (OSError, ValueError) as e:
        raise UsageError(f"{path} is no log of train.py ({type(e).__name__})") from None


def text(x):
    """A cell of a table: five digits of a float, - for None and NaN."""
    return "-" if x is None or isinstance(x, float) and math.isnan(x) else f"{x:.5g}" if isinstance(x, float) else str(x)


def count_parameters(*flags):
    """(total, non-embedding): the number of parameters of the model that `train.py FLAGS` builds. Raises UsageError."""
    args, _ = train.get_args([str(f) for f in flags])
    n_vocab = train.get_tokenizer(args.tokenizer).n_vocab
    with torch.device("meta"):
        model = train.build_model(args.model, {"psi": args.psi, "N_L": args.layers, "vocab_size": n_vocab})
    total = sum(p.numel() for p in model.parameters())
    return total, total - model.W_E.numel()


def check_writable(path):
    """Raise UsageError if `path` cannot be written, before any work; what is in it stays."""
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a"):
            pass
    except OSError as e:
        raise UsageError(f"{path} cannot be written ({e.strerror})") from None


def report(path, columns, rows, title):
    """Print rows (lists of str or numbers; None is shown as -) as a table and write them to `path` as TSV; another table that
    was there is moved to NAME-old-1, -2, ..."""
    cells = [list(columns)] + [[text(x) for x in row] for row in rows]
    widths = [max(len(row[c]) for row in cells) for c in range(len(columns))]
    print(f"\n{title}")
    for row in cells:
        print("  ".join(x.rjust(n) for x, n in zip(row, widths)))
    check_writable(path)
    path, table = Path(path), "".join("\t".join(row) + "\n" for row in cells)
    if path.read_text() not in ("", table):
        train.set_aside(path)
    path.write_text(table)
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
    try:
        fig.savefig(path, dpi=150, bbox_inches="tight")
    except OSError as e:
        raise UsageError(f"{path} cannot be written ({e.strerror})") from None
    print(f"wrote {path}")


class Progress:
    """One line per finished unit of work on stdout, with the time left by its share of the whole."""

    def __init__(self, total):
        self.total, self.done, self.began = total, 0.0, time.perf_counter()

    def add(self, amount, text, known=False):
        """known: it was there already, and says nothing about the time that the others take."""
        self.done, self.total = (self.done, self.total - amount) if known else (self.done + amount, self.total)
        seconds = time.perf_counter() - self.began
        left = f", about {train.clock(seconds * (self.total / self.done - 1))} left" if self.done else ""
        print(f"{text}   {train.clock(seconds)}{left}", flush=True)
