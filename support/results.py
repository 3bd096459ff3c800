"""Measurements that are kept: one table that only grows, a row for each, shared by all scripts.

A row is found by what can be known without the checkpoint: what was trained, what is asked. So
nothing is measured twice, an evaluation that was stopped goes on, and several processes can fill
one table. A row counts as long as the equations are those that it was measured with, and, where a
checkpoint is at hand, its weights.
"""
import functools
import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import filelock

from support.checkpoint import equations
from support.cli import UsageError
from support.data import files_of, fingerprint

# Raise the number of a task when its values get another meaning: older rows are not read then. The
# equations have their own number, which is computed.
PROTOCOLS = {"abcdigits": 1, "passkey": 1, "perplexity": 1, "latency": 1, "validation loss": 1}

# The flags of train.py that make another model. The seed and the step are columns of their own.
FLAGS = ("model", "psi", "layers", "data", "tokenizer", "digits", "seq_len", "batch_tokens",
         "warmup", "lr", "weight_decay", "clip", "dtype", "init")


class Key(NamedTuple):
    """What was measured, as text. Empty: does not apply.

    run: the flags of train.py, see run_of; factor: RoPE's; item: a document, or a machine.
    """
    task: str
    run: str
    seed: str
    step: str
    length: str = ""
    depth: str = ""
    factor: str = ""
    swe: str = ""
    trials: str = ""
    item: str = ""

    def at(self, **values):
        """This key with other values, which may be numbers, booleans or None."""
        return self._replace(**{name: text(x) for name, x in values.items()})


COLUMNS = (*Key._fields, "protocol", "value", "weights", "commit", "time")


class Results:
    """The table at `path`: {Key: numbers} in `values`, of equal keys the last row.

    A value is a number, or several with blanks between.
    """

    def __init__(self, path):
        self.path, self.position = Path(path), 0
        self.values, self.weights, self.begun, self.others = {}, {}, {}, 0
        self.lock = filelock.FileLock(f"{path}.lock")
        if self.path.is_dir() or self.path.parent.is_file():
            raise UsageError(f"{self.path} cannot be a table: a folder stands there, or a file in "
                             "place of its folder; name another")
        self.refresh()
        say_others(self.path, self.others)

    def refresh(self):
        """Read the rows that were added since, by this process or another."""
        if not self.path.exists():
            return
        with open(self.path, "rb") as file:
            if self.position > os.fstat(file.fileno()).st_size:        # deleted, and begun anew
                self.position = 0
                self.values, self.weights, self.others = {}, {}, 0
            file.seek(self.position)
            for line in file:
                if not line.endswith(b"\n"):           # its writer was killed, or still writes
                    break
                cells = tuple(line.decode(errors="replace").rstrip("\n").split("\t"))
                if not self.position and cells != COLUMNS:
                    raise UsageError(f"{self.path} is not a table of measurements: move it away, "
                                     "or name another")
                self.position += len(line)
                self.take(cells)

    def take(self, cells):
        """Remember a row, unless it is the head, half a row, or of an older protocol."""
        n = len(Key._fields)
        try:
            protocol, value, weights, _, _ = cells[n:]
            numbers = [float(x) for x in value.split()]
        except ValueError:
            return
        key = Key(*cells[:n])
        if numbers and protocol == protocol_of(key):
            self.values[key], self.weights[key] = numbers, weights
        elif numbers:
            self.others += 1

    def has(self, key, weights=""):
        """Whether the table holds that measurement, of these weights if they are given."""
        return key in self.values and weights in ("", self.weights[key])

    def add(self, key, numbers, weights=""):
        """Append a row, unless another process was faster."""
        value = " ".join(f"{x:.6g}" for x in numbers)
        row = (*key, protocol_of(key), value, weights, commit(),
               time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.lock, open(self.path, "ab") as file:
            self.refresh()
            if self.has(key, weights):
                return
            start = "" if file.tell() else "\t".join(COLUMNS) + "\n"
            if file.tell() > self.position:            # half a row of a killed process
                start = "\n"
            file.write((start + "\t".join(row) + "\n").encode())
        self.refresh()

    def measure(self, key, weights, function):
        """The numbers of the table, or those of function(), which are added to it."""
        if not self.has(key, weights):
            self.add(key, function(), weights)
        return self.values[key]


@functools.cache
def say_others(path, n):
    """Say once that n rows of a table do not count."""
    if n:
        print(f"{n} rows of {path} are of other equations (is multiscreen.py changed?) or of an "
              "older protocol: they do not count", file=sys.stderr)


def text(x):
    """A cell of the table."""
    if x is None or x is False:
        return ""
    return "yes" if x is True else x if isinstance(x, str) else f"{x:.12g}"


def protocol_of(key):
    """The numbers of the protocol and of the equations, as text.

    Of a task, what follows a comma is a variant: "abcdigits, 2 digits".
    """
    number = PROTOCOLS.get(key.task.partition(",")[0], 0)
    model = flag(key.run, "--model")
    try:
        return f"{number}-{equations(model) if model else ''}"
    except UsageError:                                 # a table of another version of the code
        return f"{number}-"


def short_hash(content):
    """Twelve digits that differ for other bytes."""
    return hashlib.sha256(content).hexdigest()[:12]


# ------------------------------------------------------------------------------ what a run is

def name_data(names, files=None):
    """--data wherever it lies: the last parts of paths, and a hash of what the files hold.

    files: their fingerprint, if it is known. Without it, and without the files, there is no hash.
    """
    words = " ".join(Path(name).name for name in names)
    if names in (["stdlib"], ["abcdigits"]):
        return words
    try:
        files = fingerprint(files_of(names)) if files is None else files
    except (UsageError, OSError):
        return words
    return f"{words}#{short_hash(repr(sorted(x[1:] for x in files)).encode())[:8]}"


def run_of(args, files=None):
    """The flags of train.py that make a model what it is. args: a dict of all, or a checkpoint's.

    A run is known wherever its data and its folder are. files: as in name_data.
    """
    found = {name: args.get(name) for name in FLAGS}
    if not found["batch_tokens"] and args.get("batch_size"):           # an older checkpoint
        found["batch_tokens"] = (args["batch_size"] * args.get("accumulate", 1)
                                 * args["seq_len"])
    if (found["model"] or "").startswith("transformer"):
        found["psi"] = None                            # its size is in its name
    if found["data"] != ["abcdigits"]:
        found["digits"] = None
    if found["dtype"] == "auto":
        found["dtype"] = None
    words = []
    for name, x in found.items():
        if name == "data" and x:
            x = name_data(list(x), files)
        elif name == "init" and x:
            x = os.path.abspath(x)
        if x is not None:
            words.append(f"--{name.replace('_', '-')} {x}")
    return " ".join(words)


def flag(run, name):
    """The value of a flag in a `run`, as text; None if it is not there."""
    words = run.split()
    return words[words.index(name) + 1] if name in words else None


def key_of(args, step, task="", files=None):
    """The Key of a run after that step. args, files: all flags as a dict; a checkpoint has both."""
    return Key(task, run_of(args, files), text(args["seed"] or 0), text(step))


def describe(key):
    """A run in a line, as flags.txt has it in the folder of each run."""
    return f"{key.run} --seed {key.seed} --steps {key.step}"


@functools.cache
def commit():
    """The commit of the code that runs, with a + if files have changed; "" outside of git."""
    command = ["git", "describe", "--always", "--exclude", "*", "--dirty=+"]
    try:
        return subprocess.run(command, cwd=Path(__file__).parent, capture_output=True,
                              text=True).stdout.strip()
    except OSError:
        return ""


# --------------------------------------------------------------------------- for the scripts

def add_flags(p):
    """--ckpt and --results, for a script that measures."""
    p.add_argument("--ckpt", nargs="+", help="checkpoints of train.py; those that differ in their "
                   "seed only are one model [out/ckpt.pt]")
    p.add_argument("--results", help="the table of measurements: what it holds is not measured "
                   "again; without --ckpt it is shown as it is [results.tsv beside the first "
                   "checkpoint]")


def open_results(args):
    """(Results, paths of the checkpoints to measure) by the flags of add_flags."""
    if not args.ckpt and not args.results:
        args.ckpt = ["out/ckpt.pt"]
    for name in args.ckpt or []:
        if not Path(name).exists():
            raise UsageError(f"{name} does not exist: train a model first, README.md has the "
                             "commands")
    path = Path(args.results or Path(args.ckpt[0]).with_name("results.tsv"))
    if not args.ckpt and not path.exists():
        raise UsageError(f"{path} does not exist: --ckpt names the checkpoints to measure")
    return Results(path), args.ckpt or []


def begin(results, wanted):
    """Say how many of the measurements are there. wanted: [(Key, hash of the weights or "")].

    Raises OSError if the others cannot be added, and UsageError for a second model of that name.
    """
    if any(results.begun.setdefault(key, weights) != weights for key, weights in wanted):
        raise UsageError("two of the checkpoints have the same flags, seed and step, but not the "
                         "same weights: measure each by itself, with a --results of its own")
    known = sum(results.has(key, weights) for key, weights in wanted)
    if known:
        print(f"{known} of {len(wanted)} measurements are in {results.path} and not made again",
              file=sys.stderr)
    if known < len(wanted):
        with results.lock:
            pass
