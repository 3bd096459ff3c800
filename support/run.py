"""The folder of a run: the flags it began with, who may write into it, its log."""
import math
import os
import platform

import filelock

from support.checkpoint import FIXED, read_checkpoint
from support.cli import UsageError, replacing
from support.results import describe, key_of

# The tables and figures that scripts write beside a checkpoint.
MEASURED = ("abcdigits", "abcdigits_ablations", "abcdigits_by_length", "long_context",
            "long_context_ablations", "passkey", "passkey_ablations", "passkey_by_length",
            "relevance_by_distance", "relevance_maps", "retrieval", "windows")


def take_flags(parser, argv, ckpt, path, names):
    """The arguments, where those of `names` that argv leaves out are the checkpoint's."""
    old = dict(ckpt["args"])
    if "accumulate" in old:                            # the older way to say --batch-tokens
        old["batch_tokens"] = old["accumulate"] * old["batch_size"] * old["seq_len"]
        names = [*names, "batch_tokens"] if "accumulate" in names else names
    if "data" in old:
        old["data"] = absolute(old["data"])
    old = {name: old[name] for name in names if hasattr(parser.parse_args([]), name)}
    for name, value in old.items():
        default = parser.get_default(name)
        if value is not None and default is not None and type(value) is not type(default):
            raise UsageError(f"{path} is damaged: --{name.replace('_', '-')} is {value!r}")
    parser.set_defaults(**old)
    args = parser.parse_args(argv)
    args.data = absolute(args.data)
    for name in old.keys() & set(FIXED):
        before, now = (" ".join(x) if name == "data" else x
                       for x in (old[name], getattr(args, name)))
        if before != now:
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"{path} was trained with {flag} {before}, not {now}: leave {flag} "
                             "out, or start a new run")
    return args


def absolute(names):
    """What --data names, as it is called from any folder."""
    return [x if x in ("stdlib", "abcdigits") else os.path.abspath(x) for x in names]


def refuse_other_run(out):
    """Raise UsageError if `out` is a file, or a folder that holds a run."""
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {out} is a file: name a folder")
    log, path = out / "log.tsv", out / "ckpt.pt"
    if path.exists():
        try:
            state = f"a run at step {read_checkpoint(path)['step']}: --resume goes on with it"
        except UsageError:
            state = "a damaged checkpoint: move it away"
        raise UsageError(f"{out} holds {state}, --out elsewhere starts a new one, --force "
                         "overwrites it")
    text = log.read_text(errors="replace") if log.exists() else ""
    if text and (text.count("\n") > 1 or not text.startswith("step\tloss\t")):
        raise UsageError(f"{out} holds the log of a run without a checkpoint: --out elsewhere "
                         "starts a new one, --force overwrites it")


class InUse(UsageError):
    """Another process holds the lock."""


class Lock:
    """`with Lock(out)` keeps other runs out of the folder `out`, which is made if it is missing.

    Raises InUse if another process holds it, UsageError if a file of a run is a link there.
    """

    def __init__(self, out, lock="lock"):
        out.mkdir(parents=True, exist_ok=True)
        for name in ("ckpt.pt", "log.tsv", lock):
            if (out / name).is_symlink():
                raise UsageError(f"{out / name} is a link: name another --out")
        self.path = out / lock
        self.lock = filelock.FileLock(self.path, timeout=0)

    def __enter__(self):
        try:
            self.lock.acquire()
        except filelock.Timeout:
            owner = self.path.read_text().strip() or "another process"
            raise InUse(f"{self.path.parent} is in use by {owner}: stop it, or name another "
                        "--out") from None
        self.path.write_text(f"process {os.getpid()} on {platform.node()}")

    def __exit__(self, *error):
        self.path.write_text("")
        self.lock.release()


class Log:
    """log.tsv: a row for each printed line and each evaluation.

    A checkpoint holds `text`, so the file is made again from there. While it cannot be written
    training goes on, and the rows are written as soon as they can be.
    """

    def __init__(self, path, columns, rows=()):
        self.path, self.columns, self.behind = path, columns, False
        self.text = "\t".join(columns) + "\n"
        self.text += "".join(self.line(row) for row in rows)
        self.rewrite()

    def line(self, row):
        # Steps are whole beyond a million, too.
        row = {c: f"{x:.{15 if c == 'step' else 6}g}" for c, x in row.items()}
        return "\t".join(row.get(c, "") for c in self.columns) + "\n"

    def rewrite(self):
        with replacing(self.path) as file:
            file.write(self.text.encode())

    def add(self, row):
        """Add a row, a dict of numbers by column."""
        line = self.line(row)
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
                print(f"{self.path} cannot be written ({e.strerror}): training goes on, and each "
                      "checkpoint holds the rows")
            self.behind = True


def read_rows(text):
    """(rows, bad): the rows of a log as dicts of numbers, and how many cannot be read."""
    head, *lines = [line.split("\t") for line in text.splitlines()] or [[]]
    rows, bad = [], 0
    for line in lines:
        try:
            rows.append({c: float(v) for c, v in zip(head, line, strict=True) if v})
        except ValueError:
            bad += 1
    return rows, bad


def open_run(out, ckpt, columns, args, files):
    """(path of the checkpoint, Log) of a run in the folder `out`, which must be locked.

    A resumed run's log is made again from its checkpoint `ckpt`. For a new run, an older run is
    deleted, and the tables and figures that were made from it, but not its measurements in
    results.tsv. flags.txt tells what the run is. files: the fingerprint of its data.
    """
    path, rows = out / "log.tsv", []
    if ckpt and "log" in ckpt:
        rows, _ = read_rows(ckpt["log"])
    elif ckpt:                                         # an older one, which does not hold its log
        rows, bad = read_rows(path.read_text(errors="replace") if path.exists() else "")
        rows = [row for row in rows if row.get("step", math.inf) <= ckpt["step"]]
        if bad or not rows:
            print(f"{path}: {f'{bad} rows cannot be read' if bad else 'no rows'}; they are missing "
                  "from here on")
    for left in [*out.glob("ckpt.pt.*.tmp"), *out.glob("log.tsv.*.tmp")]:
        if left.suffixes[-2][1:].isdigit():            # of a killed process: the folder is locked
            left.unlink()
    if not ckpt:
        made = [f"{name}.{end}" for name in MEASURED for end in ("tsv", "png")]
        for name in ("ckpt.pt", "diverged.txt", *made):
            (out / name).unlink(missing_ok=True)
    key = key_of(vars(args), args.steps, files=files)
    (out / "flags.txt").write_text(f"{describe(key)}\n")
    return out / "ckpt.pt", Log(path, columns, rows)
