"""Runs of train.py for an experiment: flags, folders, final losses. None is made twice."""
import functools
import math
import time
from pathlib import Path
from typing import NamedTuple

import train
from experiments.common import Progress
from support.checkpoint import read_checkpoint
from support.cli import UsageError
from support.results import Results, describe, key_of
from support.run import InUse, Lock, read_rows


def parse_flags(p, argv, out, steps, paper_steps, seeds, own=()):
    """(arguments, flags for train.py). p: the experiment's parser, with the flags that only it has.

    Raises UsageError for a flag that the experiment sets itself: --model, --seed, --resume, `own`.
    """
    p.add_argument("--steps", type=int, default=steps,
                   help=f"optimizer steps of a run (paper: {paper_steps}) [{steps}]")
    p.add_argument("--seeds", nargs="+", default=["1"], help=f"{seeds} [1]")
    p.add_argument("--out", default=out,
                   help=f"folder of runs, tables, figures; what is in it is not run again [{out}]")
    args, flags = p.parse_known_args(argv)
    args.seeds = parse_seeds(args.seeds)
    for word in flags:
        name = word.partition("=")[0]
        if name in ("--model", "--seed", "--resume", *own):
            raise UsageError(f"{name} is set by the experiment itself; -h lists what you can set")
    return args, flags


def parse_seeds(words):
    """{model: number of seeds} of words like 3, for all, or 8:3 and transformer:1.3B:1, for one."""
    seeds = {"": 1}
    for word in words:
        model, _, n = word.rpartition(":")
        if not n.isdigit() or int(n) < 1:
            raise UsageError(f"--seeds {word}: a number of at least 1, or MODEL:NUMBER")
        seeds[model] = int(n)
    return seeds


# ---------------------------------------------------------------------------------- one run

class Run(NamedTuple):
    """A run of `train.py FLAGS --seed SEED --steps STEPS`; its folder is OUT/NAME-SEED."""
    name: str
    flags: tuple
    seed: int
    steps: int

    @property
    def command(self):
        """All flags but --out, each once: the last counts, as in train.py."""
        flags = {}
        for word in [*self.flags, "--seed", str(self.seed), "--steps", str(self.steps)]:
            if word.startswith("--"):
                flags.pop(word, None)
                values = flags[word] = []
            else:
                values.append(word)
        return [word for name, values in flags.items() for word in (name, *values)]

    @property
    def key(self):
        """The Key of its final validation loss."""
        return key_of_command(tuple(self.command))

    def checkpoint(self, out):
        """The path of its last checkpoint. It is trained on, or again, where that is not there.

        Raises UsageError if the run diverged: an earlier checkpoint is another model.
        """
        _, message = self.finish(out)
        folder = self.folder(out)
        if message:
            raise UsageError(f"{folder} diverged: there is no model to measure")
        path = folder / "ckpt.pt"
        if not is_at(path, self.steps):
            with Lock(folder, "run.lock"):
                if not is_at(path, self.steps):        # another may have ended meanwhile
                    self.train(folder)
        return path

    def folder(self, out):
        """Where it is finished, in any folder of OUT; else OUT/NAME-SEED."""
        own, key = Path(out) / f"{self.name}-{self.seed}", self.key
        near = [own, *sorted(Path(out).glob("*/"))]
        return next((path for path in near if is_finished(path, key)), own)

    def finish(self, out):
        """(rows of log.tsv, message of a run that diverged or None), after training if needed.

        An interrupted run is continued. Raises InUse if another process trains it, and UsageError
        if its folder holds a run with other flags.
        """
        folder = self.folder(out)
        if not is_finished(folder, self.key):
            with Lock(folder, "run.lock"):
                if not is_finished(folder, self.key):  # another may have ended meanwhile
                    self.train(folder)
        note = folder / "diverged.txt"
        return read_log(folder / "log.tsv"), note.read_text() if note.exists() else None

    def train(self, folder):
        """Train in that folder, from its checkpoint if there is one."""
        before = flags_in(folder) or "unknown flags"
        if (folder / "log.tsv").exists() and before != describe(self.key):
            raise UsageError(f"{folder} holds a run with other flags ({before}): name another "
                             "--out, or remove that folder")
        print(f"\n{folder}: python train.py {' '.join(self.command)}", flush=True)
        start = "--resume" if (folder / "ckpt.pt").exists() else "--force"
        try:
            train.main([*self.command, "--out", str(folder), start])
        except train.Diverged as e:
            (folder / "diverged.txt").write_text(str(e))
        except KeyboardInterrupt:
            raise KeyboardInterrupt("stopped: the same command continues") from None


@functools.cache
def key_of_command(flags):
    """The Key of what `train.py FLAGS` trains."""
    args, _ = train.get_args(flags)
    return key_of(vars(args), args.steps, "validation loss")


def flags_in(folder):
    """What flags.txt says, which train.py writes, or None."""
    path = folder / "flags.txt"
    return path.read_text().strip() if path.exists() else None


def is_finished(folder, key):
    """Whether the folder holds the run of that Key to its last step, or until it diverged."""
    if flags_in(folder) != describe(key):
        return False
    if (folder / "diverged.txt").exists():
        return True
    rows = read_log(folder / "log.tsv") if (folder / "log.tsv").exists() else []
    return bool(rows) and rows[-1]["step"] >= int(key.step)


def is_at(path, step):
    """Whether the checkpoint `path` is there, and of that step: its last row is logged first."""
    return path.exists() and read_checkpoint(path)["step"] >= step


def read_log(path):
    """The rows of a log.tsv as dicts of numbers, without the columns that a row leaves empty."""
    rows, _ = read_rows(Path(path).read_text(errors="replace"))
    if not rows:
        raise UsageError(f"{path} is not a log of train.py")
    return rows


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


# -------------------------------------------------------------------------------- many runs

def make_runs(name, flags, args, model=""):
    """The runs of a model with the seeds 0, 1, .. that --seeds gives it. name: of their folders."""
    n = args.seeds.get(model, args.seeds[""])
    return [Run(name, tuple(map(str, flags)), seed, args.steps) for seed in range(n)]


def flat(runs):
    """The runs of {anything: [Run]}."""
    return [run for found in runs.values() for run in found]


def do_all(things, do):
    """do(thing) for each. What another process works on (InUse) is tried again after the others."""
    waiting = list(things)
    while waiting:
        busy = []
        for thing in waiting:
            try:
                do(thing)
            except InUse:
                busy.append(thing)
        if len(busy) == len(waiting):
            time.sleep(10)
        waiting = busy


def train_missing(runs, out, weight=lambda run: 1):
    """{Run: final validation loss, NaN if it diverged}: from OUT/results.tsv, or after training.

    What another process trains is left to it, and waited for at the end. weight(run): its share of
    the time.
    """
    results = Results(Path(out) / "results.tsv")
    waiting = [run for run in runs if not results.has(run.key)]
    progress = Progress(sum(map(weight, waiting)))

    def finish(run):
        results.refresh()
        try:
            if not results.has(run.key):
                results.add(run.key, [final_loss(*run.finish(out))])
        except InUse as e:
            print(f"{e}", flush=True)
            raise
        loss, = results.values[run.key]
        shown = "diverged" if math.isnan(loss) else f"validation loss {loss:.4f}"
        progress.add(weight(run), f"\n{run.folder(out)}: {shown}")

    do_all(waiting, finish)
    return {run: results.values[run.key][0] for run in runs}
