"""The folder of a run: what it holds, who may write into it, how a run begins and ends.

    ckpt.pt            everything that a run needs to continue, and its log
    log.tsv            a row for each printed line
    flags.txt          what the run is: flags, sizes, versions, what was changed on --resume
    source/            the text of what it runs; source_until_STEP/ what it ran before an edit
    diverged.txt       why it must not continue
"""
import math
import os
import platform
import shutil
import time
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path

import filelock
import torch

from baselines import recipe
from support import distributed as dist
from support.checkpoint import (
    FIXED,
    SIZE_FLAGS,
    changed_equations,
    equations,
    load_moments,
    read_checkpoint,
    save_checkpoint,
    small_model,
    weights_hash,
)
from support.cli import (
    UsageError,
    at_most_3,
    clock,
    on_one_line,
    own_folder,
    rank,
    replacing,
    stop_requests,
)
from support.data import absolute, changed_files, files_of, fingerprint, hash_of, is_stream
from support.source import (
    TEXT,
    bare_lines,
    classes_of,
    parts_of,
    replaced,
    shown_change,
    source_of,
)
from support.table import read_flags

COLUMNS = ("step", "loss", "lr", "grad_norm", "w_min", "w_median", "w_max", "ms", "tokens_per_s",
           "val_loss", "val_bpb", "alive", "needle", "base")
# Flags that do not say what is trained: a run continues even if they differ.
NOT_RESUMED = ("out", "resume", "force", "device", "shard", "compile")
# Flags that may change without changing what is trained: a run of 10 steps goes on to 20.
LENGTH = ("steps", "log_every", "eval_every", "save_every")
WAYS = "--force overwrites it, another --out starts a new run"


# ----------------------------------------------------------------------------------- flags

def get_args(parser, argv=None):
    """(the arguments of train.py, completed; the checkpoint of --resume or --init, or None).

    A flag that argv leaves out comes from that checkpoint, or else from the model's recipe. Raises
    UsageError for impossible ones.
    """
    args = parser.parse_args(argv)
    if args.resume and args.init:
        raise UsageError("--resume takes OUT's weights, --init those of a checkpoint: use one")
    if args.force and args.init and Path(args.init).resolve().parent == Path(args.out).resolve():
        raise UsageError(f"--force would overwrite {args.init}: name another --out")
    path = Path(args.out) / "ckpt.pt" if args.resume else args.init
    ckpt, old = None, {}
    if path is not None:
        ckpt = read_checkpoint(path)
        names = {"model", "tokenizer", *SIZE_FLAGS}
        if args.resume:
            names = ckpt["args"].keys() - set(NOT_RESUMED)
        old = {name: ckpt["args"][name] for name in names & vars(args).keys()}
    parser.set_defaults(**recipe(old.get("model", args.model)) | old)
    args = parser.parse_args(argv)
    args.data = absolute(args.data)
    for name in old.keys() & set(FIXED):
        if old[name] != getattr(args, name):
            raise UsageError(f"{path} was trained with {flag(name)} {text(old[name])}, not "
                             f"{text(getattr(args, name))}: leave {flag(name)} out, or start a new "
                             "run")
    sizes = [name for name in SIZE_FLAGS if getattr(args, name) != parser.get_default(name)]
    if args.model.startswith("transformer") and {*sizes} - {"layers"}:
        raise UsageError("--psi, --tiles, --d-E, --d-K, --d-V and --w-th are for Multiscreen: a "
                         "Transformer's sizes are in its name, transformer:N_L,N_H,d_E")
    return complete(args), ckpt


def complete(args):
    """The arguments, completed from each other. Raises UsageError for a wrong number."""
    above_0 = ("psi", "layers", "tiles", "d_E", "d_K", "d_V", "seq_len", "batch_size",
               "batch_tokens", "shard", "steps", "log_every", "eval_every", "save_every")
    for name in (*above_0, "warmup", "w_th", "lr", "weight_decay", "clip", "seed"):
        value = getattr(args, name)
        least = 1 if name in above_0 else 0
        most = 2**24 if name in (*SIZE_FLAGS, "batch_size") and name != "w_th" else 2**63
        if value is not None and not least <= value < most:
            rule = f"below {most}" if value >= most else f"at least {least}"
            raise UsageError(f"{flag(name)} {value}: it must be {rule}")
    args.save_every = args.save_every or args.eval_every
    args.batch_tokens = args.batch_tokens or args.batch_size * args.seq_len * dist.world()
    passes_of(args)
    return args


def passes_of(args):
    """Forward passes of a process in a step; raises UsageError if they are not whole."""
    at_once = args.batch_size * args.seq_len * dist.world()
    if args.batch_tokens % at_once:
        below = args.batch_tokens // at_once * at_once
        near = f"{below} or {below + at_once}" if below else at_once
        raise UsageError(f"--batch-tokens {args.batch_tokens}: it must be a multiple of {at_once} "
                         f"({args.batch_size} sequences x {args.seq_len} tokens x {dist.world()} "
                         f"processes): use {near}")
    return args.batch_tokens // at_once


def flag(name):
    return f"--{name.replace('_', '-')}"


def text(value):
    return " ".join(value) if isinstance(value, list) else str(value)


# --------------------------------------------------------------------------------- the folder

class Run:
    """`with Run(parser, argv) as run`: the folder --out, locked. Process 0 alone writes into it.

    args: of `get_args`; ckpt: the checkpoint that this command continues, or None; initial: the one
    whose weights it takes, that or the one of --init, or None; files: what `files_of` finds.
    finished: whether there is nothing left to do. Raises UsageError if the folder is in use, or
    holds a run with other flags, equations or data.
    """

    def __init__(self, parser, argv=None):
        self.parser, self.argv = parser, argv
        self.out = own_folder(parser.parse_args(argv).out)
        self.path = self.out / "ckpt.pt"
        self.finished = False

    def __enter__(self):
        with ExitStack() as stack:
            if rank() == 0:
                stack.enter_context(lock(self.out))
            dist.wait()
            args, self.initial = get_args(self.parser, self.argv)
            self.args, self.ckpt = args, find_checkpoint(args, self.initial)
            if self.ckpt and (self.ckpt["learned"] or self.ckpt["step"] >= args.steps):
                step, learned = self.ckpt["step"], self.ckpt["learned"]
                end = "it has learned the task" if learned else "--resume --steps N continues"
                print(f"{self.out} is already finished, at step {step}: {end}")
                self.finished = True
            else:
                self.initial = self.ckpt or self.initial
                self.files = list(files_of(args.data, args.out))
                self.fingerprints = fingerprint(self.files)
                changed = self.ckpt and changed_files(self.ckpt["files"], self.fingerprints)
                if changed:
                    raise UsageError("the data has changed since the run began: "
                                     f"{at_most_3(changed)}")
            self.stack = stack.pop_all()
        return self

    def __exit__(self, *error):
        self.stack.close()

    def begin(self, model, optimizer, data, parameters):
        """(the step, how many sequences were drawn) where training begins; what is on disk is kept.

        Prints the head of the table.
        """
        args, ckpt = self.args, self.ckpt
        step = drawn = 0
        if ckpt:
            step, drawn = ckpt["step"], ckpt["drawn"]
            data.load(ckpt["data_state"])
            load_moments(model, optimizer, ckpt["optimizer"], self.path)
            torch.set_rng_state(ckpt["random_state"])  # for your dropout, on a CPU
        self.about = about_run(args, ckpt, self.initial, data, self.fingerprints)
        self.log_text = ckpt["log"] if ckpt else "\t".join(COLUMNS) + "\n"
        if rank() == 0:
            write_folder(self.out, args, ckpt, parameters, self.about, self.log_text)
        self.saved_at, self.first, self.began = step, step, time.perf_counter()
        if self.initial:
            print(f"continuing at step {step}" if ckpt else f"weights from {args.init}")
        left = "at most" if is_stream(args.data) else "left"
        print(f"{'step':>13} {'loss':>8} {'lr':>8} {'|grad|':>8} {'w min':>6} {'median':>7} "
              f"{'max':>8} {'ms':>7} {'tok/s':>8} {left:>8}", flush=True)
        self.initial = self.ckpt = None                # up to 12 bytes per parameter
        self.stop = self.stack.enter_context(stop_requests())
        return step, drawn

    def check(self, step, **values):
        """Raise UsageError if a value is not finite, and keep the reason in diverged.txt."""
        found = [f"{name} is {x:g}" for name, x in values.items() if not math.isfinite(x)]
        if found:
            saved = f"{self.path} holds step {self.saved_at}" if self.saved_at else (
                "nothing was saved")
            message = (f"training diverged: at step {step} {', '.join(found)}; {saved}: "
                       "try a smaller --lr, or undo your last edit")
            if rank() == 0:
                with replacing(self.out / "diverged.txt") as file:
                    file.write(f"{message}\n".encode())
            raise UsageError(message, code=3)

    def told_to_stop(self):
        """Whether one of the processes was: by Ctrl-C, SIGTERM or SIGHUP."""
        return dist.total(len(self.stop)) != [0]

    def interrupt(self, step):
        """What to raise, after saving, if training was told to stop."""
        return KeyboardInterrupt(f"stopped at step {step}, saved {self.path}: rerun the command"
                                 f"{' without --force' * self.args.force} to resume")

    def log(self, step, **row):
        """Print a line, and add a row to the log. row: numbers by column."""
        at = f"{step:>6}/{self.args.steps:<6}"
        if "loss" in row:
            windows = " " * 23
            if "w_min" in row:
                windows = f"{row['w_min']:6.2f} {row['w_median']:7.1f} {row['w_max']:8.4g}"
            seconds = (time.perf_counter() - self.began) / (step - self.first)
            print(f"{at} {row['loss']:8.4f} {row['lr']:8.2g} {row['grad_norm']:8.4f} {windows} "
                  f"{row['ms']:7.0f} {row['tokens_per_s']:8.0f} "
                  f"{clock(seconds * (self.args.steps - step)):>8}", flush=True)
        else:
            self.check(step, val_loss=row["val_loss"])
            words = [f"validation loss {row['val_loss']:.4f}, {row['val_bpb']:.3f} bits per byte"]
            if "alive" in row:
                words.append(f"{row['alive']:.1%} of the pairs inside the windows are alive")
            words += [f"{name} {row[name]:.3f}" for name in ("needle", "base") if name in row]
            print(f"{at} {'; '.join(words)}", flush=True)
        row = {name: f"{x:.6g}" for name, x in row.items()} | {"step": str(step)}
        line = "\t".join(row.get(name, "") for name in COLUMNS) + "\n"
        self.log_text += line
        if rank() == 0:
            with open(self.out / "log.tsv", "a") as file:
                file.write(line)

    def save(self, model, optimizer, step, drawn, data):
        """Write the checkpoint."""
        args = self.args
        shards = (dist.local(p.detach()) for p in model.parameters())
        weights_sum, = dist.total(sum(x.abs().sum().item() for x in shards))
        self.check(step, sum_of_weights=weights_sum)
        weights, moments = dist.get_states(model, optimizer)
        if rank() == 0:
            save_checkpoint(self.path, {
                "model": args.model, "config": asdict(model.config), "weights": weights,
                "tokenizer": args.tokenizer, "optimizer": moments, "step": step, "drawn": drawn,
                "data_state": data.state(), "learned": data.learned, "log": self.log_text,
                "random_state": torch.get_rng_state(), "args": vars(args), **self.about})
        dist.wait()                                    # torchrun ends all when one ends
        self.saved_at = step
        end = ", the end: it has learned the task" * data.learned
        print(f"{step:>6}/{args.steps:<6} saved {self.path}{end}", flush=True)


@contextmanager
def lock(out):
    """Inside, other runs are kept out of the folder `out`, which is made if it is missing.

    If the command is refused before a run begins, nothing of it stays.
    """
    made = [folder for folder in (out, *out.parents) if not folder.exists()]
    out.mkdir(parents=True, exist_ok=True)
    path = out / "lock"
    held = filelock.FileLock(path, timeout=0)
    try:
        held.acquire()
    except filelock.Timeout:
        owner = path.read_text().strip() or "another process"
        raise UsageError(f"{out} is in use by {owner}: stop it, or name another --out") from None
    try:
        path.write_text(f"process {os.getpid()} on {platform.node()}")
        yield
    finally:
        held.release()
        if not (out / "flags.txt").exists():
            path.unlink()
        for folder in made:
            if not any(folder.iterdir()):
                folder.rmdir()


def find_checkpoint(args, initial):
    """The checkpoint that the same command left in --out, or None if a run begins.

    initial: that of --resume or --init, or None. Raises UsageError if the run there has other flags
    or other equations, or diverged.
    """
    out, source = Path(args.out), Path(args.out) / "source"
    if source.exists() and not (source.is_dir() and (out / "flags.txt").exists()):
        raise UsageError(f"{source} belongs to no run: name another --out")
    if args.force:
        return None
    if (out / "diverged.txt").exists() and not args.resume:
        # For this very command it is a result; runs/lib.sh knows it by the exit code.
        lines = (out / "flags.txt").read_text(encoding="utf-8").splitlines(keepends=True)
        message = (out / "diverged.txt").read_text(encoding="utf-8").strip()
        same = {*flag_lines(args, equations(args.model))} <= {*lines}
        raise UsageError(f"{out}: {message}; {WAYS}", 3 if same else 1)
    if not (out / "ckpt.pt").exists():
        # A run killed in its first steps leaves only a log: it starts over.
        log = out / "log.tsv"
        if log.exists() and not log.read_bytes().startswith(b"step\tloss\t"):
            raise UsageError(f"{log} is not a log of train.py: {WAYS}")
        if log.exists() and was_saved(out):
            raise UsageError(f"{log} belongs to a run whose checkpoint is gone: {WAYS}")
        return None
    ckpt = initial if args.resume else read_checkpoint(out / "ckpt.pt")
    other = ckpt["equations"] != equations(args.model)
    edits = edits_since(ckpt)
    if not args.resume:
        for name, now in vars(args).items():
            before = ckpt["args"].get(name)
            if name not in NOT_RESUMED and before != now:
                raise UsageError(f"{out} holds a run with {flag(name)} {text(before)}, not "
                                 f"{text(now)}: {WAYS}, --resume continues with changed flags")
        if other:
            raise UsageError(f"{out} holds a run with other equations: "
                             f"{changed_equations(ckpt)}: {WAYS}, --resume continues with the "
                             "edit")
        if edits:
            path, lines = next(iter(edits.items()))
            raise UsageError(f"{out} holds a run with another {path}: {lines}: {WAYS}, --resume "
                             "continues with the edit")
        if initial and weights_hash(initial) != ckpt["init_weights"]:
            raise UsageError(f"{out} holds a run that began with other weights than "
                             f"{args.init} has now: {WAYS}")
    if other:
        print(f"the equations have changed since step {ckpt['step']}: {changed_equations(ckpt)}")
    for path, lines in edits.items():
        print(f"{path} has changed since step {ckpt['step']}: {lines}")
    return ckpt


def was_saved(out):
    """Whether the log of a run continues past its first save."""
    every = read_flags(out).get("save_every", "")
    *rows, _ = (out / "log.tsv").read_text(errors="replace").split("\n")     # the last may be torn
    last, _, _ = rows[-1].partition("\t")
    return every.isdecimal() and last.isdecimal() and int(last) > int(every)


# ---------------------------------------------------------------------------------- what it is

def edits_since(ckpt):
    """{path: changed lines} of what else a run is made of: train.py and the files of its data."""
    of_model = parts_of(ckpt["source"], ckpt["classes"])
    found = {path: shown_change(bare_lines(before), bare_lines(TEXT.get(path, "")))
             for path, before in ckpt["source"].items() if path not in of_model}
    return {path: lines for path, lines in found.items() if lines}


def about_run(args, ckpt, initial, data, files):
    """What a checkpoint says of a run besides its state. Prints a line if something was changed.

    ckpt: the checkpoint that it continues, or None; initial: that, or the one of --init, or None;
    files: the fingerprint of its data. Changes: of flags, of equations and other source, and of
    functions at run time.
    """
    classes = classes_of(small_model(args.model))
    about = {"equations": equations(args.model), "classes": classes,
             "source": source_of(classes, data), "files": files,
             "init_weights": weights_hash(initial) if initial and not ckpt else "", "changes": [],
             "versions": {"python": platform.python_version(), "torch": f"{torch.__version__}"}}
    changes = []
    if ckpt:
        about |= {name: ckpt[name] for name in ("init_weights", "changes")}
        changes = [f"{flag(name)} {text(value)}, before {text(ckpt['args'].get(name))}"
                   for name, value in vars(args).items()
                   if name not in (*NOT_RESUMED, *LENGTH) and ckpt["args"].get(name) != value]
        changes += [f"{path} changed" for path in edits_since(ckpt)]
    if initial and initial["equations"] != about["equations"]:
        changes.append(f"equations {about['equations']}, before {initial['equations']}")
    if name := replaced(classes):
        changes.append(f"{name} replaced at run time")
    if changes:
        step = ckpt["step"] if ckpt else 0
        about["changes"] = [*about["changes"], f"from step {step}: {', '.join(changes)}"]
        print(about["changes"][-1])
    return about


def flag_lines(args, identity):
    """The lines of flags.txt that say what a run is: its flags and the identity of its model."""
    flags = {name: value for name, value in vars(args).items() if name not in NOT_RESUMED}
    flags["equations"] = identity
    return [f"{name}\t{on_one_line(text(value))}\n" for name, value in flags.items()]


def write_folder(out, args, ckpt, parameters, about, log):
    """Write flags.txt, source/ and log.tsv of a run. A new run deletes an old one."""
    source, old = out / "source", out / f"source_until_{ckpt['step'] if ckpt else 0}"
    for left in [*out.glob("*.*.tmp")]:
        if left.suffixes[-2][1:].isdigit():            # of a killed process: the folder is locked
            left.unlink()
    (out / "diverged.txt").unlink(missing_ok=True)
    if not ckpt:
        (out / "ckpt.pt").unlink(missing_ok=True)
        for folder in out.glob("source_until_*"):      # of the run that --force overwrites
            shutil.rmtree(folder)
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    more = {"parameters": parameters, "init_weights": about["init_weights"],
            "changes": "; ".join(about["changes"]), "versions": versions,
            "classes": " ".join(about["classes"]), "corpus": hash_of(about["files"])}
    lines = flag_lines(args, about["equations"])
    lines += [f"{name}\t{on_one_line(value)}\n" for name, value in more.items()]
    write_text(out / "flags.txt", "".join(lines))
    # After flags.txt, by which a folder named source is known as a run's.
    if ckpt and ckpt["source"] != about["source"] and source.exists() and not old.exists():
        source.rename(old)
    for path in source.rglob("*.py"):
        path.unlink()
    for name, content in about["source"].items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        write_text(source / name, content)
    write_text(out / "log.tsv", log)


def write_text(path, content):
    """Write a file that is complete at all times."""
    with replacing(path) as file:
        file.write(content.encode())
