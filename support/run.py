"""The folder of a run: what it holds, who may write into it, its log."""
import os
import platform
from pathlib import Path

import filelock
import torch

from support.checkpoint import (
    FIXED,
    SIZE_FLAGS,
    changed_equations,
    equations,
    read_checkpoint,
    small_model,
    weights_hash,
)
from support.cli import UsageError, on_one_line, own_folder, replacing, require_file
from support.data import hash_of
from support.distributed import world
from support.source import (
    TEXT,
    bare_lines,
    classes_of,
    parts_of,
    replaced,
    shown_change,
    source_of,
)

# Flags that do not say what is trained: a run continues even if they differ.
NOT_RESUMED = ("out", "resume", "force", "device", "shard", "compile")
# Flags whose change does not change what is trained: a run of 10 steps goes on to 20.
LENGTH = ("steps", "log_every", "eval_every", "save_every")


def take_flags(parser, argv, ckpt, path, names):
    """The arguments; those of `names` that argv leaves out come from the checkpoint."""
    old = {name: ckpt["args"][name] for name in names if hasattr(parser.parse_args([]), name)}
    for name, value in old.items():
        default = parser.get_default(name)
        if default is not None and type(value) is not type(default):
            raise UsageError(f"{path} is damaged: {flag(name)} is {value!r}")
    parser.set_defaults(**old)
    args = parser.parse_args(argv)
    args.data = absolute(args.data)
    for name in old.keys() & set(FIXED):
        if old[name] != getattr(args, name):
            raise UsageError(f"{path} was trained with {flag(name)} {text(old[name])}, not "
                             f"{text(getattr(args, name))}: leave {flag(name)} out, or start a new "
                             "run")
    return args


def complete(args):
    """The arguments, completed from each other. Raises UsageError for a wrong number."""
    above_0 = ("psi", "layers", "tiles", "d_E", "d_K", "d_V", "seq_len", "batch_size",
               "batch_tokens", "shard", "steps", "log_every", "eval_every", "save_every")
    for name in (*above_0, "warmup", "w_th", "lr", "weight_decay", "clip", "seed"):
        value = getattr(args, name)
        most = 2**24 if name in (*SIZE_FLAGS, "batch_size") and name != "w_th" else 2**63
        if value is not None and not int(name in above_0) <= value < most:
            rule = "be at least 1" if name in above_0 else "not be negative"
            rule = f"be below {most}" if value >= most else rule
            raise UsageError(f"{flag(name)} {value}: it must {rule}")
    args.save_every = args.save_every or args.eval_every
    args.batch_tokens = args.batch_tokens or args.batch_size * args.seq_len * world()
    passes_of(args)
    return args


def passes_of(args):
    """Forward passes of a process in a step; raises UsageError if they are not whole."""
    at_once = args.batch_size * args.seq_len * world()
    if args.batch_tokens % at_once:
        below = args.batch_tokens // at_once * at_once
        near = f"{below} or {below + at_once}" if below else at_once
        raise UsageError(f"--batch-tokens {args.batch_tokens}: it must be a multiple of {at_once} "
                         f"({args.batch_size} sequences x {args.seq_len} tokens x {world()} "
                         f"processes): take {near}")
    return args.batch_tokens // at_once


def flag(name):
    return f"--{name.replace('_', '-')}"


def text(value):
    return " ".join(value) if isinstance(value, list) else str(value)


def absolute(names):
    """What --data names, valid from any folder."""
    return [x if x in ("stdlib", "abcdigits", "passkey") else os.path.abspath(x) for x in names]


def find_checkpoint(args):
    """The checkpoint that the same command left in --out, or None if a run begins.

    Raises UsageError if the run there has other flags or other equations, or diverged.
    """
    out = Path(args.out)
    ways = "--force overwrites it, another --out starts a new run"
    if args.force:
        return None
    if (out / "diverged.txt").exists() and not args.resume:
        # For this very command it is a result; runs/lib.sh knows it by the exit code.
        lines = (out / "flags.txt").read_text(encoding="utf-8").splitlines(keepends=True)
        message = (out / "diverged.txt").read_text(encoding="utf-8").strip()
        same = {*flag_lines(args, equations(args.model))} <= {*lines}
        raise UsageError(f"{out}: {message}; {ways}", 3 if same else 1)
    if not (out / "ckpt.pt").exists():
        # A run killed in its first steps leaves only a log: it starts over.
        log = out / "log.tsv"
        require_file(log)
        if log.exists() and not log.read_bytes().startswith(b"step\tloss\t"):
            raise UsageError(f"{log} is not a log of train.py: {ways}")
        if log.exists() and was_saved(out):
            raise UsageError(f"{log} belongs to a run whose checkpoint is gone: {ways}")
        return None
    ckpt = read_checkpoint(out / "ckpt.pt")
    head, *rows = [line.split("\t") for line in ckpt["log"].split("\n")]
    if head[0] != "step" or {*map(len, rows[:-1])} - {len(head)}:
        raise UsageError(f"{out / 'ckpt.pt'} is damaged: its log is not a table; {ways}")
    other = ckpt["equations"] != equations(args.model)
    if not args.resume:
        for name, now in (vars(args) | {"data": absolute(args.data)}).items():
            before = ckpt["args"].get(name)
            if name not in NOT_RESUMED and before != now:
                raise UsageError(f"{out} holds a run with {flag(name)} {text(before)}, not "
                                 f"{text(now)}: {ways}, --resume continues with changed flags")
        if other:
            raise UsageError(f"{out} holds a run with other equations: "
                             f"{changed_equations(ckpt)}: {ways}")
        if args.init is not None and weights_hash(read_checkpoint(args.init)) != (
                ckpt["init_weights"]):
            raise UsageError(f"{out} holds a run that began with other weights than those that "
                             f"{args.init} has now: {ways}")
    if other:
        print(f"the equations have changed since step {ckpt['step']}: {changed_equations(ckpt)}")
    for path, lines in edits_since(ckpt).items():
        print(f"{path} has changed since step {ckpt['step']}: {lines}")
    return ckpt


def edits_since(ckpt):
    """{path: changed lines} of what else a run is made of: train.py and the files of its data."""
    of_model = parts_of(ckpt["source"], ckpt["classes"])
    found = {path: shown_change(bare_lines(text), bare_lines(TEXT[path]))
             for path, text in ckpt["source"].items() if path in TEXT and path not in of_model}
    return {path: lines for path, lines in found.items() if lines}


def about_run(args, ckpt, start, data, files):
    """What a checkpoint says of a run besides its state, after a line if something was changed.

    ckpt: the checkpoint that it continues, or None; start: that, or the one of --init, or None;
    files: the fingerprint of its data. Changes: of flags, of equations and other source, and of
    functions at run time.
    """
    classes = classes_of(small_model(args.model))
    about = {"equations": equations(args.model), "classes": classes,
             "source": source_of(classes, data), "files": files,
             "init_weights": weights_hash(start) if start and not ckpt else "", "changes": [],
             "versions": {"python": platform.python_version(), "torch": f"{torch.__version__}"}}
    changes = []
    if ckpt:
        about |= {name: ckpt[name] for name in ("init_weights", "changes")}
        changes = [f"{flag(name)} {text(value)}, before {text(ckpt['args'].get(name))}"
                   for name, value in (vars(args) | {"data": absolute(args.data)}).items()
                   if name not in (*NOT_RESUMED, *LENGTH) and ckpt["args"].get(name) != value]
        changes += [f"{path} changed" for path in edits_since(ckpt)]
    if start and start["equations"] != about["equations"]:
        changes.append(f"equations {about['equations']}, before {start['equations']}")
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


def was_saved(out):
    """Whether the log of a run continues past its first save."""
    if not (out / "flags.txt").exists():
        return False
    lines = (out / "flags.txt").read_text(errors="replace").splitlines()
    every = dict(line.partition("\t")[::2] for line in lines).get("save_every", "")
    last = (out / "log.tsv").read_text(errors="replace").split("\n")[:-1][-1].partition("\t")[0]
    return every.isdecimal() and last.isdecimal() and int(last) > int(every)


class Lock:
    """`with Lock(out)` keeps other runs out of the folder `out`, and makes it if it is missing.

    Raises UsageError if another process holds it, or if a run's file there is a link.
    """

    def __init__(self, out):
        out = own_folder(out)
        out.mkdir(parents=True, exist_ok=True)
        for name in ("ckpt.pt", "log.tsv", "flags.txt", "lock", "source"):
            if (out / name).is_symlink():
                raise UsageError(f"{out / name} is a link: name another --out")
        if (out / "source").exists() and not ((out / "source").is_dir()
                                              and (out / "flags.txt").exists()):
            raise UsageError(f"{out / 'source'} is not a run's: name another --out")
        self.path = out / "lock"
        self.lock = filelock.FileLock(self.path, timeout=0)
        self.owner = f"process {os.getpid()} on {platform.node()}"

    def __enter__(self):
        try:
            self.lock.acquire()
        except filelock.Timeout:
            owner = self.path.read_text().strip() or "another process"
            raise UsageError(f"{self.path.parent} is in use by {owner}: stop it, or name another "
                             "--out") from None
        self.path.write_text(self.owner)
        return self

    def check(self):
        """Raise UsageError if the folder is no longer this process's."""
        if not self.is_held():
            raise UsageError(f"{self.path} is gone: was the folder moved or deleted, or is another "
                             "run in it? Nothing more is written")

    def is_held(self):
        return self.path.exists() and self.path.read_text() == self.owner

    def __exit__(self, *error):
        if self.is_held():
            self.path.write_text("")
        self.lock.release()
        # A command that failed before its run began leaves nothing.
        if self.path.exists() and [*self.path.parent.iterdir()] == [self.path]:
            self.path.unlink()
            self.path.parent.rmdir()


class Log:
    """log.tsv: a row for each printed line and each evaluation.

    A checkpoint holds `text`, so the file is made again from there. If it cannot be written,
    training continues, and the rows are written as soon as possible.
    """

    def __init__(self, lock, columns, text=""):
        self.lock, self.path = lock, lock.path.with_name("log.tsv")
        self.columns, self.behind = columns, False
        self.text = text or "\t".join(columns) + "\n"
        self.rewrite()

    def rewrite(self):
        with replacing(self.path) as file:
            file.write(self.text.encode())

    def add(self, row):
        """Add a row, a dict of numbers by column."""
        self.lock.check()
        # Steps stay whole numbers beyond a million.
        row = {c: f"{x:.{15 if c == 'step' else 6}g}" for c, x in row.items()}
        line = "\t".join(row.get(c, "") for c in self.columns) + "\n"
        self.text += line
        try:
            if self.behind:
                self.rewrite()
            else:
                with open(self.path, "a") as file:
                    file.write(line)
            self.behind = False
        except OSError as e:
            if not self.behind:
                print(f"{self.path} cannot be written ({e.strerror}): training continues, and each "
                      "checkpoint holds the rows")
            self.behind = True

    def end(self, message):
        """Note in diverged.txt why the run must not go on."""
        self.lock.check()
        with replacing(self.path.with_name("diverged.txt")) as file:
            file.write(f"{message}\n".encode())


def open_run(args, ckpt, columns, parameters, about, lock):
    """The Log of a run in the folder --out. A new run deletes an older one.

    flags.txt says what the run is, a line for each flag, its name and its value, and what `about`
    says; source/ has the text of what it runs, source_until_STEP/ what it ran before an edit.
    """
    out = Path(args.out)
    for left in [*out.glob("*.*.tmp")]:
        if left.suffixes[-2][1:].isdigit():            # of a killed process: the folder is locked
            left.unlink()
    (out / "diverged.txt").unlink(missing_ok=True)
    if not ckpt:
        (out / "ckpt.pt").unlink(missing_ok=True)
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    more = {"parameters": parameters, "init_weights": about["init_weights"],
            "changes": "; ".join(about["changes"]), "versions": versions,
            "classes": " ".join(about["classes"]),
            "corpus": hash_of(about["files"])}
    with replacing(out / "flags.txt") as file:
        lines = [f"{name}\t{on_one_line(value)}\n" for name, value in more.items()]
        file.write("".join([*flag_lines(args, about["equations"]), *lines]).encode())
    # After flags.txt, by which a folder named source is known as a run's.
    source, old = out / "source", out / f"source_until_{ckpt['step'] if ckpt else 0}"
    if ckpt and ckpt["source"] != about["source"] and source.exists() and not old.exists():
        source.rename(old)
    for path in source.rglob("*.py"):
        path.unlink()
    for name, content in about["source"].items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        with replacing(source / name) as file:
            file.write(content.encode())
    return Log(lock, columns, ckpt["log"] if ckpt else "")
