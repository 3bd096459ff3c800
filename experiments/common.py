"""What the experiments share: runs of train.py, tables, matplotlib if it is there, progress."""
import math
import statistics
import time
from pathlib import Path

import torch

import train
from baselines import count_parameters
from experiments.style import SETTINGS
from support.checkpoint import build_model
from support.cli import UsageError, clock
from support.tokens import get_tokenizer

# ------------------------------------------------------------------------ runs of train.py

def run_once(out, *flags, steps):
    """Train with `train.py FLAGS --steps STEPS --out OUT`, unless OUT holds that run already.

    An interrupted run is continued. Returns (rows, diverged): the rows of log.tsv as dicts, and the
    message of a run that diverged, or None. Raises UsageError if OUT holds a run with other flags.
    """
    out, flags = Path(out), [str(f) for f in flags] + ["--steps", str(steps)]
    note, command = out / "diverged.txt", out / "flags.txt"
    before = command.read_text() if command.exists() else "unknown flags"
    if (out / "log.tsv").exists() and before != " ".join(flags):
        raise UsageError(f"{out} holds a run with other flags ({before}): name another --out, or "
                         "remove that folder")
    if not is_finished(out, steps):
        out.mkdir(parents=True, exist_ok=True)
        command.write_text(" ".join(flags))
        print(f"\n{out}: python train.py {' '.join(flags)}", flush=True)
        start = "--resume" if (out / "ckpt.pt").exists() else "--force"
        try:
            train.main([*flags, "--out", str(out), start])
        except train.Diverged as e:
            note.write_text(str(e))
        except KeyboardInterrupt:
            raise KeyboardInterrupt("stopped: the same command continues") from None
    return read_log(out / "log.tsv"), note.read_text() if note.exists() else None


def is_finished(out, steps):
    """Whether the folder holds a run of that many steps, or one that diverged."""
    if (out / "diverged.txt").exists():
        return True
    rows = read_log(out / "log.tsv") if (out / "log.tsv").exists() else []
    return bool(rows) and rows[-1]["step"] >= steps


def run_seeds(out, *flags, steps, seeds, progress, amount=1):
    """The final losses of runs with the seeds 0, 1, .., in OUT-0, OUT-1, ..; NaN if diverged."""
    losses = []
    for seed in range(seeds):
        folder = Path(f"{out}-{seed}")
        known = is_finished(folder, steps)
        loss = final_loss(*run_once(folder, *flags, "--seed", seed, steps=steps))
        losses.append(loss)
        shown = "diverged" if math.isnan(loss) else f"validation loss {loss:.4f}"
        progress.add(amount, f"\n{folder}: {shown}", known)
    return losses


def refuse(flags, *names):
    """Raise UsageError if flags that go to train.py hold one that the experiment sets itself."""
    for flag in map(str, flags):
        name = flag.partition("=")[0]
        if name in names:
            raise UsageError(f"{name} is set by the experiment itself; -h lists what you can set")


def final_loss(rows, message):
    """The last validation loss of a run, nats per token, or NaN if it diverged.

    Diverged: train.py stopped it (message), or it ended more than half a nat above where it had
    been, its first loss or its least mean over an eighth of the logged rows.
    """
    losses = [row["loss"] for row in rows if "loss" in row]
    if message or not losses:
        return math.nan
    n = max(len(losses) // 8, 1)
    best = min(losses[0], *(sum(losses[i : i + n]) / n for i in range(len(losses) - n + 1)))
    last = ([row["val_loss"] for row in rows if "val_loss" in row] or losses)[-1]
    return last if last <= best + 0.5 else math.nan


def mean_and_std(losses):
    """(mean, standard deviation, number of NaNs) of losses, the first two over what is not NaN."""
    good = [x for x in losses if not math.isnan(x)]
    mean = statistics.mean(good) if good else math.nan
    std = statistics.stdev(good) if len(good) > 1 else math.nan
    return mean, std, len(losses) - len(good)


def read_log(path):
    """The rows of a log.tsv as dicts of floats, without the columns that a row leaves empty."""
    try:
        head, *rows = [line.split("\t") for line in Path(path).read_text().splitlines()]
        return [{k: float(v) for k, v in zip(head, row) if v} for row in rows]
    except ValueError:
        raise UsageError(f"{path} is not a log of train.py") from None


def parameters_of(*flags):
    """(total, non-embedding) parameters of the model that `train.py FLAGS` builds."""
    args, _ = train.get_args([str(f) for f in flags])
    n_vocab = get_tokenizer(args.tokenizer).n_vocab
    config = {"psi": args.psi, "N_L": args.layers, "vocab_size": n_vocab}
    with torch.device("meta"):
        return count_parameters(build_model(args.model, config))


# ---------------------------------------------------------------------- tables and figures

def report(path, columns, rows, title):
    """Print rows as a table and write them to `path` as TSV. None and NaN are shown as -.

    Whether `path` may be overwritten is asked before the work, with `check_writable`.
    """
    cells = [list(columns)] + [[text(x) for x in row] for row in rows]
    widths = [max(len(row[c]) for row in cells) for c in range(len(columns))]
    print(f"\n{title}")
    for row in cells:
        print("  ".join(x.rjust(n) for x, n in zip(row, widths)))
    path.write_text("".join("\t".join(row) + "\n" for row in cells))
    print(f"wrote {path}")


def text(x):
    """A cell of a table."""
    if x is None or isinstance(x, float) and math.isnan(x):
        return "-"
    return f"{x:.5g}" if isinstance(x, float) else str(x)


def pyplot():
    """matplotlib.pyplot without a window, or None after one line that says how to get it."""
    try:
        import matplotlib
    except ImportError:
        print("no figure: `pip install matplotlib` and run this again to draw it")
        return None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update(SETTINGS)
    return plt


def save_figure(fig, path):
    """Write a figure as PNG, 150 dots per inch."""
    fig.savefig(path, dpi=150, bbox_inches="tight")
    print(f"wrote {path}")


class Progress:
    """One printed line for each unit of work, with the time left by its share of the whole."""

    def __init__(self, total):
        self.total, self.done, self.began = total, 0.0, time.perf_counter()

    def add(self, amount, text, known=False):
        """known: it was there before, and says nothing about the time that the others take."""
        if known:
            self.total -= amount
        else:
            self.done += amount
        seconds = time.perf_counter() - self.began
        left = ""
        if self.done:
            left = f", about {clock(seconds * (self.total / self.done - 1))} left"
        print(f"{text}   {clock(seconds)}{left}", flush=True)
