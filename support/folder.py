"""A run's folder: whether a run may begin or go on there, and what it holds.

There is one rule. A folder without a run gets one. A folder with a run is refused, unless --resume
continues the run or --force overwrites it. Nothing is compared to decide this; differences are only
printed and noted.

    ckpt.pt       all that is needed to go on, even alone in another folder
    log.tsv       a row for each line of numbers
    flags.txt     the run's flags and hashes; a folder with this file counts as a run's
    source/       the code that ran
    note.txt      what each --resume changed: flags, data, lines of code
    diverged.txt  why the run diverged
    lock          an empty file that keeps a second run out while one trains
"""
import platform
import shutil
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import filelock
import torch

from support import distributed as dist
from support.checkpoint import read_checkpoint, weights_hash
from support.cli import UsageError, flag, own_folder, replacing, shown
from support.data import hash_of, is_run
from support.models import count_parameters
from support.source import code_hash, differences, edited_files, files_of, source_of

# The columns of the log. Only tasks have the last two.
COLUMNS = ("step", "loss", "lr", "grad_norm", "w_min", "w_median", "w_max", "ms", "tokens_per_s",
           "val_loss", "val_bpb", "alive", "needle", "base")
# Flags that do not say what is trained, and those that only say how far and how often.
FREE = ("out", "resume", "force", "device", "shard", "compile")
LENGTH = ("steps", "log_every", "eval_every", "save_every")


@contextmanager
def locked(name):
    """`with locked(name) as out`: make the folder if it is missing, and keep other runs out of it.

    A command that is refused before its run begins leaves nothing behind.
    """
    out = own_folder(name)
    made = [folder for folder in (out, *out.parents) if not folder.exists()]
    lock = filelock.FileLock(out / "lock", timeout=0)
    try:
        if dist.rank() == 0:
            out.mkdir(parents=True, exist_ok=True)
            lock.acquire()
        dist.wait()
        yield out
    except filelock.Timeout:
        raise UsageError(f"{out} is in use by another process: stop it, or name another --out"
                         ) from None
    finally:
        if lock.is_locked:
            lock.release()
            if not (out / "flags.txt").exists():
                (out / "lock").unlink()
                for folder in made:
                    if not any(folder.iterdir()):
                        folder.rmdir()


def run_in(out, given):
    """The checkpoint of the run in a folder, if it continues; None if a new run begins.

    given: the flags of the command. A run that was killed before its first checkpoint begins again.
    One that diverged is a result: it is refused with exit code 3. Raises UsageError to refuse.
    """
    resume, force, init = (given.get(name) for name in ("resume", "force", "init"))
    for name in ("log.tsv", "flags.txt", "source"):
        if (out / name).exists() and not is_run(out):
            raise UsageError(f"{out / name} belongs to no run: name another --out")
    if force and init and Path(init).resolve().parent == out.resolve():
        raise UsageError(f"--force would overwrite {init}: name another --out")
    if force and is_run(out):
        return None
    if (out / "diverged.txt").exists():
        said = (out / "diverged.txt").read_text("utf-8").strip()
        raise UsageError(f"{out}: {said}; --force overwrites it, another --out starts a new run", 3)
    if not (out / "ckpt.pt").exists():
        return None

    # A folder with nothing but a checkpoint is a run, too, unless another program wrote the file.
    ckpt = read_checkpoint(out / "ckpt.pt")
    if not resume and not force:
        raise UsageError(f"{out} holds a run: --resume continues it, --force overwrites it, "
                         "another --out starts a new one")
    return ckpt if resume else None


def kept_flags(fixed, given, ckpt, init):
    """The flags you need not give again: all those of a continued run, or the `fixed` of --init.

    Raises UsageError if a flag that you do give would change a `fixed` one.
    """
    known = (ckpt or init or {"args": {}})["args"]
    for name in fixed:
        if name in known and given.get(name, known[name]) != known[name]:
            raise UsageError(f"the checkpoint was trained with {flag(name, known[name])}, not "
                             f"{shown(given[name])}: leave {flag(name)} out, or start a new run")
    return {name: x for name, x in known.items() if name in fixed or ckpt and name not in FREE}


def is_finished(out, args, ckpt):
    """Whether the continued run has nothing left to do; if so, prints a line."""
    if not ckpt or not ckpt["learned"] and ckpt["step"] < args.steps:
        return False
    tell_changes(ckpt, ckpt | {"args": vars(args), "source": files_of(ckpt["source"])})
    end = "it has learned the task" if ckpt["learned"] else "a larger --steps continues it"
    print(f"{out} is already finished, at step {ckpt['step']}: {end}")
    return True


def get_state(args, model, data, ckpt, init):
    """What the checkpoints of a run hold, except for what train.py's `save` adds.

    ckpt: of a continued run; init: the one whose weights a new run starts from. Either may be None.
    """
    state = {"model": args.model, "config": asdict(model.config), "tokenizer": args.tokenizer,
             "args": vars(args), "files": data.files, "equations": code_hash(model),
             "source": source_of(model, data), "parameters": count_parameters(model),
             "init_weights": weights_hash(init) if init else "", "changes": [], "note": "",
             "versions": f"python {platform.python_version()}, torch {torch.__version__}",
             "step": 0, "drawn": 0, "log": "\t".join(COLUMNS) + "\n"}
    if ckpt:
        told, changes = tell_changes(ckpt, state)
        state |= {name: ckpt[name] for name in ("step", "drawn", "log", "init_weights")}
        state |= {"changes": ckpt["changes"] + changes, "note": ckpt.get("note", "") + told}
    return state


def tell_changes(old, new):
    """Print how a resumed run differs from its checkpoint: flags, data, lines of code.

    Returns what was printed, for the note, and a list of one line for tables and figures, which
    names files without their lines. Both are empty if only the flags in LENGTH have changed.
    """
    flags = {name: f"{flag(name, old['args'].get(name))} | {shown(x)}"
             for name, x in new["args"].items()
             if name not in FREE and old["args"].get(name) != x}
    before, now = hash_of(old["files"]), hash_of(new["files"])
    if before == now != "" and new["files"] is not old["files"]:
        flags.pop("data", None)                        # the same files, moved
    files = edited_files(old["source"], new["source"])
    others = ["other data"] * (before != now)
    if not files and new["equations"] != old["equations"]:
        others.append("code that is in no file")       # of a notebook
    lines = [f"  {line}" for line in [*flags.values(), *others]]
    lines += differences(old["source"], new["source"])
    if not lines:
        return "", []
    told = "\n".join([f"until step {old['step']} | now:", *lines, ""])
    print(told, end="")
    words = [line for name, line in flags.items() if name not in LENGTH] + others + files
    return (told, [f"from step {old['step']}: {', '.join(words)}"]) if words else ("", [])


def write(out, state):
    """Write all files but the checkpoint. A new run deletes what an old one left behind."""
    about = {name: x for name, x in state["args"].items() if name not in FREE}
    about |= {"corpus": hash_of(state["files"])}
    about |= {name: state[name] for name in ("equations", "parameters", "init_weights")}
    about |= {"changes": "; ".join(state["changes"]), "versions": state["versions"]}
    files = {"flags.txt": "".join(f"{name}\t{shown(x)}\n" for name, x in about.items()),
             "log.tsv": state["log"], "note.txt": state["note"]}
    files |= {f"source/{path}": text for path, text in state["source"].items()}
    old = [out / "source", out / "note.txt", *out.glob("*.*.[0-9]*.tmp")]
    if not state["step"]:
        old += [out / "ckpt.pt", out / "diverged.txt"]
    for path in old:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    for name, text in files.items():
        if text:
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            with replacing(out / name) as file:
                file.write(text.encode())
