"""A run's folder: whether a run may begin or go on there, what it holds, and its checkpoint.

There is one rule. A folder without a run gets one. A folder with a run is refused, unless --resume
continues the run or --force overwrites it.

    ckpt.pt       all that is needed to go on, even alone in another folder
    log.tsv       a row for each line of numbers
    flags.txt     the run's flags, and what a --resume has changed; a folder with it holds a run
    source/       the code that ran
    diverged.txt  why the run diverged
    lock          an empty file that keeps a second run out while one trains

train.py begins, logs and saves by `Run`; all other commands read by `load_checkpoint`. Read it to
learn what a checkpoint holds, and when a run is refused.
"""
import ast
import hashlib
import math
import os
import pickle
import shutil
import sys
import zipfile
from contextlib import contextmanager
from dataclasses import asdict
from importlib.util import resolve_name
from pathlib import Path

import filelock
import torch

from support.cli import ROOT, UsageError, flag_of, is_out_of_memory
from multiscreen import Multiscreen
from support import check
from support import distributed as dist
from support.data import absolute, files_of, get_tokenizer, is_run
from support.fast import choose_screen, edited_equations
from support.models import (
    SIZES,
    build_model,
    count_parameters,
    has_windows,
    name_of,
    random_states,
    set_random_states,
)

# What --resume does with flags. It may change all others, and a line says so.
FIXED = ("model", *SIZES, "tokenizer")                 # never changes: the checkpoint's
FREE = ("out", "resume", "force", "device", "compile")             # of the command, not the run
LENGTH = ("steps", "log_every", "eval_every", "save_every")        # how far and how often only
# Columns of log.tsv, of which only tasks have the last two; and in which form a number is printed.
COLUMNS = ("step", "loss", "lr", "grad_norm", "w_min", "w_median", "w_max", "ms", "tokens_per_s",
           "val_loss", "val_bpb", "alive", "needle", "base")
PRINTED = {"loss": "7.4f", "lr": "7.2g", "grad_norm": "8.4f", "w_median": "6.4g", "w_max": "7.4g",
           "ms": "5.0f", "min_left": "5.1f", "val_loss": "7.4f", "val_bpb": "6.3f",
           "alive": "5.1%", "needle": "5.1%", "base": "5.3f"}
# Our code that trains and measures. Of the files of support/, COMPUTING are those on which numbers
# depend; the others load, print and keep them.
COMPUTING = ("support/data.py", "support/measure.py", "support/models.py", "support/native.py",
             "support/screen.cpp", "support/tasks.py", "support/windowed.py")
OURS = ("multiscreen.py", "screening_triton.py", "train.py", "abcdigits.py", *COMPUTING,
        "support/cli.py", "support/distributed.py", "support/fast.py", "support/check.py",
        "support/run.py", "support/tables.py", "lab/perplexity.py")
# What reading a damaged file raises, or one of another kind: zipfile, pickle and PyTorch's reader.
DAMAGE = (zipfile.BadZipFile, pickle.UnpicklingError, EOFError, NotImplementedError, RuntimeError,
          ValueError)


# ------------------------------------------------------------------------------- the folder

def require_utf8(path):
    """Raise UsageError if a name is not UTF-8 on the disk: PyTorch finds no other file."""
    try:
        os.fsencode(path).decode()
    except UnicodeDecodeError:
        raise UsageError(f"the name {os.fsencode(path)} is not UTF-8: choose another") from None


def find_checkpoint(out, resume, force):
    """The checkpoint of the run in a folder, if it continues; None if a new run begins.

    resume, force: the flags of the command. A run that was killed before its first checkpoint
    begins again. One that diverged is a result: it is refused with exit code 3. Raises UsageError
    to refuse.
    """
    if out == Path() or out.exists() and not out.is_dir():
        raise UsageError(f"--out {out}: name a folder, a new one or that of an earlier run")
    require_utf8(out)
    for name in ("log.tsv", "flags.txt", "source"):
        if (out / name).exists() and not is_run(out):
            raise UsageError(f"{out / name} belongs to no run: name another --out")
    if force and is_run(out):
        return None
    if (out / "diverged.txt").exists():
        reason = (out / "diverged.txt").read_text("utf-8").strip()
        raise UsageError(f"{out}: {reason}; --force overwrites it, another --out starts a new run",
                         code=3)
    if not (out / "ckpt.pt").exists():
        return None

    # A folder with nothing but a checkpoint is a run, too, unless another program wrote the file.
    ckpt = read_checkpoint(out / "ckpt.pt")
    if resume:
        if not {"drawn", "corpus", "optimizer", "random_states", "data_state"} <= ckpt.keys():
            raise UsageError(f"{out / 'ckpt.pt'} holds a model, but not what it takes to go on "
                             f"training: --init {out / 'ckpt.pt'} --out NEW starts from it")
        return ckpt
    if force:
        return None
    raise UsageError(f"{out} holds a run: --resume continues it, --force overwrites it, another "
                     "--out starts a new one")


def require_same_flags(ckpt, args):
    """Raise UsageError if a run that is finished was trained with other flags than the command's.

    Its numbers would pass for those of another recipe. Texts may have moved, so --data is free.
    """
    for name, (old, new) in changed_flags(ckpt["args"], vars(args)).items():
        if name not in (*LENGTH, "data", "val", "recompute") and new != "auto":
            raise UsageError(f"{args.out} is already finished, with {flag_of(name)} {old} and not "
                             f"{new}: name another --out, or a larger --steps")


def changed_flags(old, new):
    """{flag: (its value in old, in new), as typed} where two runs' args, dicts, differ.

    FREE flags are left out.
    """
    return {name: (as_typed(old.get(name)), as_typed(x)) for name, x in new.items()
            if name not in FREE and old.get(name) != x}


def read_flags(folder):
    """{name of a flag: its value} of flags.txt in the folder of a run."""
    lines = (Path(folder) / "flags.txt").read_text("utf-8", "replace").splitlines()
    flags = dict(line.partition("\t")[::2] for line in lines)
    if flags.get("corpus") == "documents of a task":   # an old run: its --data names the task
        flags["corpus"] = f"documents of {flags['data']}"
    return flags


def as_typed(x):
    """A flag's value on one line, as you would type it."""
    if isinstance(x, list):
        x = " ".join(x)
    return " ".join(str(x).split())


# ----------------------------------------------------------------------------- while it trains

class Run:
    """A run that trains: how far it is, and what it writes into its folder, `out`.

    step, drawn, learned: the optimizer's steps, the sequences drawn for them, and whether a task is
    learned. The training loop counts them. owes_evaluation: whether a signal stopped that of this
    step. saved: the step of the last checkpoint, 0 before it.
    facts: what all checkpoints say, such as the flags and the code. rows: the text of log.tsv.
    Of several processes, number 0 writes.
    """

    def __init__(self, out, args, model, data, ckpt=None):
        """ckpt: the checkpoint of the run, if it continues. Prints what has changed since."""
        self.out, self.args = out, args
        self.learned = self.owes_evaluation = False
        self.step = self.drawn = self.saved = 0
        self.rows = "\t".join(COLUMNS) + "\n"
        self.facts = {"model": args.model, "config": asdict(model.config), "args": vars(args),
                      "tokenizer": args.tokenizer, "corpus": data.corpus, "source": texts(model),
                      "parameters": count_parameters(model), "changes": []}
        if ckpt:
            self.step = self.saved = ckpt["step"]
            self.drawn, self.rows = ckpt["drawn"], ckpt["log"]
            self.learned, self.owes_evaluation = ckpt["learned"], ckpt.get("owes_evaluation", False)
            self.note_changes(ckpt)

    def note_changes(self, ckpt):
        """Print how this run differs from its checkpoint, and note what has another effect."""
        changes = {name: f"{flag_of(name)} from {old} to {new}" for name, (old, new) in
                   changed_flags(ckpt["args"], self.facts["args"]).items()}
        if ckpt["corpus"] != self.facts["corpus"]:
            changes["corpus"] = "other data"
        else:
            for name in ("data", "val"):               # the same texts, moved
                changes.pop(name, None)
        for path, text in self.facts["source"].items():
            if ckpt["source"].get(path, text) != text:
                changes[path] = f"other code in {path}"
        for line in changes.values():
            print(f"changed at step {self.step}: {line}")
        noted = [line for name, line in changes.items() if name not in LENGTH]
        self.facts["changes"] = list(ckpt["changes"])
        if noted:
            self.facts["changes"].append(f"from step {self.step}: {', '.join(noted)}")

    def resume(self, ckpt, model, optimizer, data):
        """Go on where a checkpoint was saved: moments, place in the data, random numbers."""
        set_moments(model, optimizer, ckpt["optimizer"])
        # What `observe` has seen of other data says nothing of these. `drawn` goes on in any case.
        if ckpt["args"]["data"] == self.facts["args"]["data"]:
            data.state = ckpt["data_state"]
        set_random_states(ckpt["random_states"])       # if your layers draw some

    @contextmanager
    def begin(self):
        """Create the run's folder, and keep other runs out of it for the `with` block."""
        if dist.rank() > 0:
            yield
            return
        self.out.mkdir(parents=True, exist_ok=True)
        try:
            with filelock.FileLock(self.out / "lock", timeout=0):
                # Another run may have begun or gone on here since the checkpoint was looked for.
                ckpt = find_checkpoint(self.out, self.args.resume, self.args.force)
                if ckpt and ckpt["step"] != self.step:
                    raise UsageError(f"{self.out} has changed meanwhile: repeat the command")
                if self.args.resume and self.step == 0:
                    self.require_same_begin()
                self.write_head()
                yield
        except filelock.Timeout:
            raise UsageError(f"{self.out} is in use by another process: stop it, or name another "
                             "--out") from None

    def require_same_begin(self):
        """Raise UsageError if --resume would begin a run anew with other flags than it began with.

        It was stopped before its first checkpoint. A mistyped folder has no run: a line says so.
        """
        if not is_run(self.out):
            print(f"a new run begins in {self.out}")
            return
        old = read_flags(self.out)
        for name, x in self.facts["args"].items():
            if name not in (*FREE, *LENGTH) and old.get(name) != as_typed(x):
                raise UsageError(f"{self.out} holds a run without a checkpoint, begun with "
                                 f"{flag_of(name)} {old.get(name)} and not {as_typed(x)}: repeat "
                                 "its command, or --force begins another")

    def write_head(self):
        """Write flags.txt, log.tsv and source/. A new run deletes what an old one left behind."""
        if self.step == 0:
            for name in ("ckpt.pt", "diverged.txt"):
                (self.out / name).unlink(missing_ok=True)
        if (self.out / "source").exists():
            shutil.rmtree(self.out / "source")
        facts = self.facts
        flags = {name: x for name, x in facts["args"].items() if name not in FREE}
        flags |= {"corpus": facts["corpus"], "parameters": facts["parameters"],
                  "changes": "; ".join(facts["changes"]), "torch": torch.__version__}
        files = {"flags.txt": "".join(f"{name}\t{as_typed(x)}\n" for name, x in flags.items()),
                 "log.tsv": self.rows}
        files |= {f"source/{path}": text for path, text in facts["source"].items()}
        for name, text in files.items():
            (self.out / name).parent.mkdir(parents=True, exist_ok=True)
            # On a full disk the old file stays whole.
            temporary = self.out / f"{name}.tmp"
            with naming(self.out / name):
                temporary.write_text(text, "utf-8", "surrogateescape")
                os.replace(temporary, self.out / name)

    def log(self, **row):
        """Print numbers by their names, and append those of COLUMNS as a row of the log."""
        self.print("  ".join(f"{name} {row[name]:{form}}" for name, form in PRINTED.items()
                             if name in row))
        cells = [f"{row[name]:.6g}" if name in row else "" for name in COLUMNS]
        cells[0] = str(self.step)
        line = "\t".join(cells) + "\n"
        self.rows += line
        if dist.rank() == 0:
            with naming(self.out / "log.tsv"), open(self.out / "log.tsv", "a") as file:
                file.write(line)

    def print(self, words):
        """Print a line that begins with the step."""
        print(f"{self.step:>6}/{self.args.steps:<6} {words}", flush=True)

    def save(self, model, optimizer, data):
        """Write the checkpoint: weights, moments, the place in the data, the random states."""
        weights, moments = get_states(model, optimizer)
        # Only process 0 has the weights, and all must agree whether the run goes on.
        infinite = [name for name, W in weights.items() if not W.isfinite().all()]
        if dist.total(len(infinite)) > 0:
            raise self.diverged(self.step, "a weight is not finite")
        if dist.rank() == 0:
            write_checkpoint(self.out / "ckpt.pt", self.facts | {
                "step": self.step, "drawn": self.drawn, "learned": self.learned, "log": self.rows,
                "owes_evaluation": self.owes_evaluation,
                "weights": weights, "optimizer": moments, "data_state": data.state,
                "random_states": random_states()})
        # All wait until process 0 has written: if another one ended first, torchrun would end it.
        dist.wait()
        self.saved = self.step
        end = ", the last step: the model has learned the task" if self.learned else ""
        self.print(f"saved {self.out / 'ckpt.pt'}{end}")

    def require_finite(self, step, **values):
        """Raise UsageError if a number of a step is not finite: the run has diverged.

        So it has if the gradient is 0: nothing will ever move again.
        """
        for name, x in values.items():
            if not math.isfinite(x) or name == "grad_norm" and x == 0:
                raise self.diverged(step, f"{name} is {x:g}")

    def diverged(self, step, reason):
        """The UsageError of a run that diverged at a step, after writing it to diverged.txt."""
        saved = "nothing was saved"
        if self.saved > 0:
            saved = (f"{self.out / 'ckpt.pt'} holds step {self.saved}, from which --init and "
                     "another --out can start")
        message = (f"training diverged: at step {step} {reason}; {saved}: try a smaller --lr, or "
                   "undo your last edit")
        if dist.rank() == 0:
            (self.out / "diverged.txt").write_text(f"{message}\n", "utf-8")
        return UsageError(message, code=3)


def get_states(model, optimizer):
    """(weights, moments) as whole tensors in process 0's memory, by the names of the parameters.

    All processes must take part; the others get nothing. A parameter that has had no gradient has
    zeros for the moments that the others have; an optimizer may have none at all.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, moments = get_state_dict(model, optimizer, options=options)
    known = {key: x for state in moments.get("state", {}).values() for key, x in state.items()
             if torch.is_tensor(x)}
    if known:
        for name, W in weights.items():
            zeros = {key: x.new_zeros(W.shape if x.ndim else ()) for key, x in known.items()}
            moments["state"].setdefault(name, zeros)
    return weights, moments


def set_moments(model, optimizer, moments):
    """Give an optimizer the moments that get_states returned. It keeps its own rates and decays."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

    if not moments.get("state"):
        return                                         # plain SGD, say
    own = [{name: x for name, x in group.items() if name != "params"}
           for group in optimizer.param_groups]
    options = StateDictOptions(full_state_dict=True)
    set_optimizer_state_dict(model, optimizer, moments, options=options)
    for group, settings in zip(optimizer.param_groups, own):
        group.update(settings)


def write_checkpoint(path, contents):
    """Write a checkpoint: the file at `path` is always complete, the old one or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with naming(path):
            with open(temporary, "wb") as file:
                torch.save(contents, file)
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
        for file, text in texts(model).items():
            was = ckpt["source"].get(file, text)
            if was != text and (file == "multiscreen.py" or file not in OURS):
                print(f"{path} was trained with another {file}", file=sys.stderr)
    if has_windows(model):
        kernel = ckpt["args"].get("kernel")
        if kernel not in ("definition", "windowed"):
            kernel = "auto"
        line = choose_screen(model, kernel)
        is_slow = kernel == "auto" and model.screen is Multiscreen.screen
        if edited_equations() or is_slow:
            print(line, file=sys.stderr)
    return model, get_tokenizer(ckpt["tokenizer"]), ckpt


def save_checkpoint(path, model, tokenizer="bytes", seq_len=256, seed=0, step=0, val=()):
    """Write the weights of a training loop of your own, for `load_checkpoint` and all commands.

    Raises UsageError if `load_checkpoint` builds another model from the file, because a class or a
    screen of yours is not what its name stands for; the file is then called PATH.refused.

    tokenizer, seq_len, seed: as the flags of those names; step: how many steps were trained; val:
    files and folders of text that you have held out, on which lab.perplexity and lab.copying
    measure. There are no optimizer's moments in it, so --init starts from it, and --resume cannot.
    """
    path, config = Path(path), asdict(model.config)
    n_vocab = get_tokenizer(str(tokenizer)).n_vocab
    if n_vocab > config["vocab_size"]:
        raise UsageError(f"--tokenizer {tokenizer} has {n_vocab} tokens, and the model's "
                             f"vocabulary {config['vocab_size']}: name the one it was trained with")
    args = {"model": name_of(model), "tokenizer": str(tokenizer), "seq_len": seq_len, "seed": seed,
            "data": [], "val": absolute(list(val)), "digits": 6, "kernel": "auto"}
    files_of(args["val"], get_tokenizer(args["tokenizer"]))        # refuses what does not exist
    if args["model"].startswith("multiscreen"):        # a Transformer's sizes are in its name
        args |= {name: config[field] for name, field in SIZES.items()}
    weights = {name: W.detach().cpu() for name, W in model.state_dict().items()}
    for name, W in weights.items():
        if not W.isfinite().all():
            raise UsageError(f"{path} was not written: {name} is not finite")
    path.parent.mkdir(parents=True, exist_ok=True)
    # It gets its name once it is known to be right: an older file at `path` stays until then.
    refused = path.with_name(path.name + ".refused")
    write_checkpoint(refused, {"model": args["model"], "config": config, "weights": weights,
                               "args": args, "tokenizer": args["tokenizer"],
                               "source": texts(model), "step": step})
    try:
        loaded, *_ = load_checkpoint(refused, model.W_E.device, model.dtype)
    except UsageError as e:
        raise UsageError(f"load_checkpoint could not read it again ({e}); your weights are safe in "
                         f"{refused}") from None
    if not check.are_same(model, loaded):
        raise UsageError("load_checkpoint would build another model than yours: write what is "
                         "your own, a screen, too, as one class of layers in a file of its own; "
                         f"your weights are safe in {refused}")
    os.replace(refused, path)
    if ":__main__." in args["model"]:
        print(f"{path}: only a program that has the class {args['model'].split('.')[-1]} can load "
              "it; write the class to a file of its own, and import it, before you train again")


# ------------------------------------------------------------------------------------ the code

def texts(model):
    """{path: text} of the code that trains a model: ours, and that of your classes of layers.

    To yours belongs what their files import, and so on, but nothing that is installed.
    """
    found = {path: (ROOT / path).read_text("utf-8") for path in OURS}
    names = sorted({type(layer).__module__ for layer in model.layers})
    for name in names:                                 # to which the loop adds more
        module = sys.modules.get(name)
        file = Path(getattr(module, "__file__", None) or "")       # a notebook has none
        if is_yours(file):
            folders = module.__name__.split(".")
            if file.name != "__init__.py":
                folders.pop()
            path = "/".join([*folders, file.name])
            if path not in found:
                found[path] = file.read_text("utf-8", "replace")
                names += [name.rpartition(".")[0], *imports_of(file, module.__package__)]
    return found


def is_yours(file):
    """Whether a file holds Python that is neither its own library's nor an installed package's."""
    stdlib = Path(os.__file__).parent
    is_installed = {"site-packages", "dist-packages"} & set(file.parts)
    return file.suffix == ".py" and not is_installed and stdlib not in file.parents


def imports_of(file, package):
    """The names of the modules that a file of a package imports, and of what may be one."""
    try:
        nodes = [*ast.walk(ast.parse(file.read_bytes()))]
    except (SyntaxError, ValueError):                  # it is being edited
        return []
    found = []
    for node in nodes:
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and (package or node.level == 0):
            name = resolve_name("." * node.level + (node.module or ""), package)
            found += [name, *(f"{name}.{alias.name}" for alias in node.names)]
    return found


def identity(model, weights):
    """What a measurement is tied to: a hash of the weights, and one of the code that computes.

    That is the code of `texts`, except for what support/ has beside COMPUTING, and of the command
    that measures. None in a notebook, where functions may be replaced that no file has.
    """
    if not hasattr(sys.modules["__main__"], "__file__"):
        return None
    numbers = hashlib.sha256()
    for name, W in sorted(weights.items()):
        numbers.update(name.encode())
        numbers.update(W.contiguous().reshape(-1).view(torch.uint8).numpy())
    code = [(path, text) for path, text in texts(model).items()
            if not path.startswith("support/") or path in COMPUTING]
    code.append(Path(sys.modules["__main__"].__file__).read_text("utf-8", "replace"))
    code = hashlib.sha256(repr(code).encode())
    return f"{numbers.hexdigest()[:12]}-{code.hexdigest()[:12]}"
