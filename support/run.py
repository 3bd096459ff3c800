"""A run's folder: whether a run may begin or go on there, what it holds, and its checkpoint.

There is one rule. A folder without a run gets one. A folder with a run is refused, unless --resume
continues the run or --force overwrites it.

    ckpt.pt       all that is needed to go on, even alone in another folder
    log.tsv       a row for each line of numbers
    flags.txt     the run's flags, and what a --resume has changed; a folder with it holds a run
    source/       the code that ran
    diverged.txt  why the run diverged
    lock          an empty file that keeps a second run out while one trains
"""
import hashlib
import os
import pickle
import shutil
import sys
import sysconfig
import zipfile
from contextlib import contextmanager
from pathlib import Path

import filelock
import torch

import multiscreen
from multiscreen import Multiscreen
from support import distributed as dist
from support.cli import UsageError, is_out_of_memory
from support.data import get_tokenizer, is_run
from support.fast import choose_screen
from support.models import build_model, has_windows, random_states, set_random_states

ROOT = Path(multiscreen.__file__).parent
# Flags that do not say what is trained, and those that only say how far and how often.
FREE = ("out", "resume", "force", "device", "shard", "compile")
LENGTH = ("steps", "log_every", "eval_every", "save_every")
# Files of support/ on which numbers depend. The others only load, print and keep them.
COMPUTING = ("support/data.py", "support/measure.py", "support/models.py", "support/windowed.py")
# What reading a damaged file raises, or one of another kind: zipfile, pickle and PyTorch's reader.
DAMAGE = (zipfile.BadZipFile, pickle.UnpicklingError, EOFError, NotImplementedError, RuntimeError,
          ValueError)


# ------------------------------------------------------------------------------- the folder

@contextmanager
def locked(name):
    """`with locked(name) as out`: make the folder if it is missing, and keep other runs out.

    A command that is refused before its run begins leaves nothing behind.
    """
    out = Path(name)
    if out == Path() or out.exists() and not out.is_dir():
        raise UsageError(f"--out {name}: name a folder, a new one or that of an earlier run")
    require_utf8(out)
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
            if not is_run(out):
                (out / "lock").unlink()
                for folder in made:
                    if not any(folder.iterdir()):
                        folder.rmdir()


def require_utf8(path):
    """Raise UsageError if a name is not UTF-8 on the disk: PyTorch finds no other file."""
    try:
        os.fsencode(path).decode()
    except UnicodeDecodeError:
        raise UsageError(f"the name {os.fsencode(path)} is not UTF-8: choose another") from None


def find_checkpoint(out, args):
    """The checkpoint of the run in a folder, if it continues; None if a new run begins.

    args: the flags of the command. A run that was killed before its first checkpoint begins again.
    One that diverged is a result: it is refused with exit code 3. Raises UsageError to refuse.
    """
    if args.resume and args.init:
        raise UsageError("--init begins a run and --resume continues one: leave one of them out")
    if args.init and Path(args.init).resolve().parent == out.resolve():
        raise UsageError(f"--out {out} would overwrite {args.init}: name another --out")
    for name in ("log.tsv", "flags.txt", "source"):
        if (out / name).exists() and not is_run(out):
            raise UsageError(f"{out / name} belongs to no run: name another --out")
    if args.force and is_run(out):
        return None
    if (out / "diverged.txt").exists():
        reason = (out / "diverged.txt").read_text("utf-8").strip()
        raise UsageError(f"{out}: {reason}; --force overwrites it, another --out starts a new run",
                         code=3)
    if not (out / "ckpt.pt").exists():
        return None

    # A folder with nothing but a checkpoint is a run, too, unless another program wrote the file.
    ckpt = read_checkpoint(out / "ckpt.pt")
    if args.resume:
        if not {"drawn", "corpus", "optimizer", "random_states", "data_state"} <= ckpt.keys():
            raise UsageError(f"{out / 'ckpt.pt'} holds a model, but not what it takes to go on "
                             f"training: --init {out / 'ckpt.pt'} --out NEW starts from it")
        return ckpt
    if args.force:
        return None
    raise UsageError(f"{out} holds a run: --resume continues it, --force overwrites it, another "
                     "--out starts a new one")


def require_same_flags(ckpt, args):
    """Raise UsageError if a run that is finished was trained with other flags than the command's.

    Its numbers would pass for those of another recipe. Texts may have moved, so --data is free.
    """
    before, now = ckpt["args"], vars(args)
    for name in changed_flags(before, now):
        if name not in (*LENGTH, "data", "val", "recompute") and now[name] != "auto":
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"{args.out} is already finished, with {flag} "
                             f"{as_typed(before.get(name))} and not {as_typed(now[name])}: name "
                             "another --out, or a larger --steps")


def begin(out, state):
    """Write flags.txt, log.tsv and source/. A new run deletes what an old one left behind."""
    if state["step"] == 0:
        for name in ("ckpt.pt", "diverged.txt"):
            (out / name).unlink(missing_ok=True)
    flags = {name: x for name, x in state["args"].items() if name not in FREE}
    flags |= {"corpus": state["corpus"], "parameters": state["parameters"],
              "changes": "; ".join(state["changes"]), "torch": torch.__version__}
    lines = [f"{name}\t{as_typed(x)}\n" for name, x in flags.items()]
    texts = {"flags.txt": "".join(lines), "log.tsv": state["log"]}
    texts |= {f"source/{path}": text for path, text in state["source"].items()}
    if (out / "source").exists():
        shutil.rmtree(out / "source")
    for name, text in texts.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        with naming(out / name):
            (out / name).write_text(text, "utf-8", "surrogateescape")


def as_typed(x):
    """A flag's value on one line, as you would type it."""
    if isinstance(x, list):
        x = " ".join(x)
    return " ".join(str(x).split())


def changed_flags(old, new):
    """The names of the flags that differ between two runs' args, dicts, but for FREE."""
    return [name for name, x in new.items() if name not in FREE and old.get(name) != x]


def note_changes(old, new):
    """Print how a resumed run differs from its checkpoint, and note what has another effect.

    old: the checkpoint; new: what the next one will hold.
    """
    flags = {}
    for name in changed_flags(old["args"], new["args"]):
        flag, x, y = name.replace("_", "-"), old["args"].get(name), new["args"][name]
        flags[name] = f"--{flag} {as_typed(x)} | {as_typed(y)}"
    others = []
    if old["corpus"] == new["corpus"]:
        flags.pop("data", None)                        # the same texts, moved
    else:
        others.append("other data")
    others += [f"other code in {path}" for path, text in new["source"].items()
               if old["source"].get(path, text) != text]
    for line in [*flags.values(), *others]:
        print(f"changed at step {old['step']}: {line}")
    noted = [line for name, line in flags.items() if name not in LENGTH] + others
    new["changes"] = list(old["changes"])
    if noted:
        new["changes"].append(f"from step {old['step']}: {', '.join(noted)}")


def save(path, state):
    """Write a checkpoint: the file at `path` is always complete, the old one or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with naming(path):
            with open(temporary, "wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())                # a power cut must not leave an empty file
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def naming(path):
    """Inside `with naming(path)` an error of the disk that names no file names this one."""
    try:
        yield
    except Exception as e:
        for error in (e, e.__context__):               # torch hides it behind another one
            if isinstance(error, OSError):
                error.filename = str(path)
                raise error from None
        raise


# ------------------------------------------------------------------------------ the checkpoint

def read_checkpoint(path):
    """The dict that train.py wrote. Nothing in it is executed.

    The file is mapped into memory, so weights and moments that nobody uses take up none.
    """
    path = Path(path)
    if path.is_dir():
        raise UsageError(f"{path} is a folder: name a checkpoint, such as {path / 'ckpt.pt'}")
    require_utf8(path)
    if not path.exists():
        if (path.parent / "diverged.txt").exists():
            why = (path.parent / "diverged.txt").read_text("utf-8").strip()
        else:
            why = "train a model first, or name its ckpt.pt"
        raise UsageError(f"{path} does not exist: {why}")
    damaged = UsageError(f"{path} is damaged, or not a checkpoint of train.py")
    try:
        # Every file in a zip has a checksum, which torch ignores: flipped bits would be loaded.
        with naming(path):
            if dist.rank() == 0 and zipfile.ZipFile(path).testzip():
                raise damaged
            ckpt = torch.load(path, "cpu", weights_only=True, mmap=True)
    except DAMAGE as e:
        if is_out_of_memory(e):
            raise
        raise damaged from None
    if not isinstance(ckpt, dict):
        raise damaged
    missing = {"model", "config", "weights", "tokenizer", "args", "step"} - ckpt.keys()
    if missing:
        raise UsageError(f"{path} is not a checkpoint of train.py: it lacks {min(missing)}")
    return ckpt


def load_weights(model, weights, path):
    """Put the weights of a checkpoint into a model."""
    try:
        model.load_state_dict(weights)
    except RuntimeError:
        raise UsageError(f"{path}: its weights do not fit the model that is built now") from None


def load_checkpoint(path, device="cpu", dtype=None):
    """(model, tokenizer, dict) from a checkpoint of train.py; the model is in eval mode.

    dtype: for matrix products. The screen is chosen anew, unless the run named one that always
    runs: --kernel definition or windowed.
    """
    ckpt = read_checkpoint(path)
    model = build_model(ckpt["model"], ckpt["config"], dtype)
    load_weights(model, ckpt["weights"], path)
    model.to(device).eval()
    # No warning for this repository's own models, whose answers a test checks.
    if Path(path).resolve().parent != ROOT / "models":
        files = {"multiscreen.py", path_of(type(model.layers[0]).__module__)}
        now, before = texts(), ckpt["source"]
        for file in sorted(files & now.keys() & before.keys()):
            if now[file] != before[file]:
                print(f"{path} was trained with another {file}", file=sys.stderr)
    if has_windows(model):
        kernel = ckpt["args"].get("kernel")
        if kernel not in ("definition", "windowed"):
            kernel = "auto"
        line = choose_screen(model, kernel)
        if kernel == "auto" and model.screen is Multiscreen.screen:
            print(line, file=sys.stderr)
    return model, get_tokenizer(ckpt["tokenizer"]), ckpt


# ------------------------------------------------------------------------------------ the code

@torch.no_grad()
def import_all(model):
    """Run a model on two tokens: what its `forward` imports is loaded then, and `texts` has it."""
    state, training = random_states(), model.training
    model.eval()
    model(torch.zeros(1, 2, dtype=torch.long, device=next(model.parameters()).device))
    model.train(training)
    set_random_states(state)


def texts():
    """{path: text} of our code and yours, of the modules that are loaded now.

    Libraries are left out. A module is known by its name, since your file may be in any folder.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    found = {}
    for name, module in sorted(sys.modules.items()):
        file = Path(getattr(module, "__file__", None) or "")
        is_package = bool({"site-packages", "dist-packages"} & set(file.parts))
        is_file = file.is_absolute() and file.suffix == ".py"
        if is_file and not is_package and library not in file.parents:
            if name in ("__main__", "__mp_main__"):    # both are the script, as python calls it
                name = name_of_main(file)
            elif file.name == "__init__.py":
                name += ".__init__"
            found[path_of(name)] = file.read_text("utf-8", "replace")
    return found


def name_of_main(file):
    """The name of the module that was started, as `python lab/x.py` or as `python -m lab.x`."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec.name.removesuffix(".__main__") if spec else file.stem


def path_of(module):
    """The path under which a run keeps the text of a module."""
    return module.replace(".", "/") + ".py"


def identity(ckpt):
    """What a measurement is tied to: a hash of the weights, and one of the code that computes.

    That is all code of ours and yours that is loaded, except for what support/ has beside
    COMPUTING. None in a notebook, where functions may be replaced that no file has.
    """
    if not hasattr(sys.modules["__main__"], "__file__"):
        return None
    weights = hashlib.sha256()
    for name, W in sorted(ckpt["weights"].items()):
        weights.update(name.encode())
        weights.update(W.contiguous().reshape(-1).view(torch.uint8).numpy())
    code = [(path, text) for path, text in texts().items()
            if not path.startswith("support/") or path in COMPUTING]
    code = hashlib.sha256(repr(code).encode())
    return f"{weights.hexdigest()[:12]}-{code.hexdigest()[:12]}"
