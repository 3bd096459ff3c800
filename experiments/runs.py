"""Runs of train.py for an experiment: flags, folders, final losses."""
import math
from pathlib import Path

import torch

import train
from baselines import count_parameters
from support.checkpoint import build_model
from support.cli import UsageError
from support.tokens import get_tokenizer


def parse_flags(p, out, steps, paper_steps, seeds, own=()):
    """(arguments, flags for train.py). p: the experiment's parser, with the flags that only it has.

    Raises UsageError for a flag that the experiment sets itself: --model, --seed, --resume, `own`.
    """
    p.add_argument("--steps", type=int, default=steps,
                   help=f"optimizer steps of a run (paper: {paper_steps}) [{steps}]")
    p.add_argument("--seeds", type=int, default=1, help=f"{seeds} [1]")
    p.add_argument("--out", default=out, help=f"folder; finished runs in it are kept [{out}]")
    p.add_shared("--force")
    args, flags = p.parse_known_args()
    if args.seeds < 1:
        raise UsageError(f"--seeds {args.seeds}: at least 1")
    for flag in flags:
        name = flag.partition("=")[0]
        if name in ("--model", "--seed", "--resume", *own):
            raise UsageError(f"{name} is set by the experiment itself; -h lists what you can set")
    return args, flags


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


def final_loss(rows, message):
    """The last validation loss of a run, nats per token, or NaN if it diverged.

    Diverged: train.py stopped it (message), or it ended more than half a nat above its first loss,
    or above the least mean over an eighth of the logged rows.
    """
    losses = [row["loss"] for row in rows if "loss" in row]
    if message or not losses:
        return math.nan
    n = max(len(losses) // 8, 1)
    best = min(losses[0], *(sum(losses[i : i + n]) / n for i in range(len(losses) - n + 1)))
    last = ([row["val_loss"] for row in rows if "val_loss" in row] or losses)[-1]
    return last if last <= best + 0.5 else math.nan


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
