"""From the files that --data names to the tokens of a training step."""
import hashlib
import os
import sysconfig
from importlib import import_module
from pathlib import Path

import numpy as np
import torch

from support.cli import UsageError, at_most_3
from support.tokens import encode_document, read_bin, require_text

HELD_OUT = slice(19, None, 20)                         # every twentieth of 20 or more texts
PIECE = 2**16                                          # bytes of each piece of a large file to hash
STREAMS = ("abcdigits", "passkey")                     # of support/tasks/: endless, without files


def is_stream(names):
    """Whether --data names a stream. Next to other names, the same word names a folder."""
    return len(names) == 1 and names[0] in STREAMS


def absolute(names):
    """What --data names, valid from any folder."""
    if is_stream(names) or names == ["stdlib"]:
        return names
    return [os.path.abspath(name) for name in names]


# ------------------------------------------------------------------------------------- files

def files_of(names, out=None):
    """[(path, "train" or "val")] of the files that --data names, to be read or refused later.

    stdlib names the files of Python's own standard library. A file that is named twice, or also by
    a link, is there once. If there are token files, text beside them is what they were made from,
    and is left out. Held out are the files that nanoGPT or llm.c would hold out, and those in a
    folder val, below a named folder or itself named. out: the folder of this run, which is no data.
    """
    if list(names) == ["stdlib"]:
        return [(path, "train") for path in standard_library()]
    found = {}
    for root in map(Path, names):
        folder = root if root.is_dir() else root.parent
        paths = visible_files(root, out)
        bins = [path for path in paths if path.suffix == ".bin"]
        for path in bins or paths:
            in_val = "val" in (folder.resolve().name, *path.relative_to(folder).parts)
            named_val = bins and "val" in path.stem.split("_")
            use = "val" if in_val or named_val else "train"
            found.setdefault(os.path.realpath(path), (path, use))
    return list(found.values())


def visible_files(root, out=None):
    """A file itself, or the files below a folder, in order, without hidden ones and those of runs.

    Tables of runs are left out, too. Links to folders are followed, into each real folder once.
    out: the folder of a new run.
    """
    if not root.is_dir():
        return [root]
    found, seen = [], {out and os.path.realpath(out)}
    for here, folders, files in os.walk(root, followlinks=True):
        here, real = Path(here), os.path.realpath(here)
        if real in seen or is_run(here):
            folders.clear()
        else:
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            paths = [here / name for name in files if not name.startswith(".")]
            found += [path for path in paths if not is_table(path)]
        seen.add(real)
    return sorted(found)


def is_run(folder):
    """Whether a folder holds a run of train.py."""
    flags = folder / "flags.txt"
    return flags.is_file() and b"\nequations\t" in flags.read_bytes()


def is_table(path):
    """Whether a file is a table of runs, or of measurements of them."""
    if path.suffix != ".tsv" or not path.is_file():
        return False
    with open(path, "rb") as file:
        return {b"parameters", b"seed"} <= {*file.readline(9999).split()}


def standard_library():
    """The files of Python's own standard library, in order, without its tests."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    return sorted(path for path in root.rglob("*.py")
                  if not skip & set(path.relative_to(root).parts))


def read_text(path):
    """The text of a UTF-8 file, without a byte order mark. Raises UsageError for anything else."""
    if not path.is_file():
        raise UsageError(f"{path}: missing, or not a file")
    if ".jsonl" in path.suffixes or path.suffix == ".parquet":
        raise UsageError(f"{path}: python -m support.prepare turns it into token files")
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UsageError(f"{path}: not UTF-8") from None


def fingerprint(files):
    """[path, size, short hash, use] of each pair (path, use).

    A text is hashed as a whole. Token files and corpora may have many gigabytes, so of those above
    4 MiB only 64 pieces are hashed, spread evenly from beginning to end.
    """
    found = []
    for path, use in files:
        content, size = hashlib.sha256(), os.path.getsize(path)
        with open(path, "rb") as file:
            if size > 64 * PIECE and {".bin", ".jsonl", ".parquet"} & {*Path(path).suffixes}:
                for n in range(64):
                    file.seek(n * (size - PIECE) // 63)
                    content.update(file.read(PIECE))
            else:
                content = hashlib.file_digest(file, "sha256")
        found.append([str(path), size, content.hexdigest()[:16], use])
    return found


def hash_of(fingerprints):
    """A hash of the files of a fingerprint, whatever folder they are in; "" if there are none."""
    found = repr([rest for path, *rest in fingerprints]).encode()
    return hashlib.sha256(found).hexdigest()[:12] if fingerprints else ""


# --------------------------------------------------------------------------------- sequences

def permute(i, n, key):
    """The image of i under a pseudo-random permutation of 0 .. n - 1. key: a tuple of integers.

    A Feistel network of four rounds on an even number of bits, repeated until it lands below n. It
    needs no memory, whatever n is.
    """
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    keys = [int(x) for x in np.random.SeedSequence(key).generate_state(4, np.uint64)]
    while True:
        left, right = i >> half, i % 2**half
        for k in keys:
            mixed = (right ^ k) * 0x9E3779B97F4A7C15 % 2**64
            mixed = (mixed ^ mixed >> 29) * 0xBF58476D1CE4E5B9 % 2**64
            left, right = right, left ^ (mixed >> 32) % 2**half
        i = left << half | right
        if i < n:
            return i


class Sequences:
    """What training on text draws from: contiguous sequences of T + 1 tokens, T inputs, T targets.

    parts: what they are cut from, each the tokens of an array or TokenFile from start to stop.
    A stream of support/tasks/ has the same attributes, and gets harder as it is learned.
    """
    files = ()                                         # the `fingerprint` of what was read
    next_command = "-m lab.sample"             # to try the model
    learned = False                                    # whether training may end early
    state = ()                                         # what a checkpoint keeps, besides `drawn`

    def __init__(self, parts, T, what):
        self.parts, self.T = parts, T
        sizes = [stop - start for _, start, stop in parts]
        self.ends = np.cumsum([max(size - 1, 0) // T for size in sizes])
        if not len(self):
            raise UsageError(f"{what}: {sum(sizes)} tokens are fewer than one sequence of {T} + 1: "
                             "use more text or a smaller --seq-len")

    def __len__(self):
        return int(self.ends[-1])

    def __getitem__(self, n):
        p = int(np.searchsorted(self.ends, n, side="right"))
        tokens, start, _ = self.parts[p]
        start += (n - (int(self.ends[p - 1]) if p else 0)) * self.T
        return tokens[start : start + self.T + 1].astype(np.int64)

    def __str__(self):
        return f"{len(self):,} sequence{'s' * (len(self) > 1)}"

    def spread(self, n):
        """The numbers of at most n sequences, evenly spread."""
        return range(0, len(self), -(-len(self) // n))

    def draw(self, n, seed):
        """The n-th sequence in random order, without replacement, and a new order in each epoch.

        Any n can be drawn directly, so a resumed run sees the same sequences.
        """
        epoch, n = divmod(n, len(self))
        return self[permute(n, len(self), (seed, epoch))]

    def observe(self, loss, documents):
        """Called with the loss of each step."""

    def extra_columns(self, model, batches):
        """More columns of an evaluation. batches: from `batches`"""
        return {}


def batches(data, n, batch_size):
    """At most n sequences of data, evenly spread, in tensors of (batch_size, T + 1)."""
    numbers = data.spread(n)
    for first in range(0, len(numbers), batch_size):
        yield torch.from_numpy(np.stack([data[i] for i in numbers[first : first + batch_size]]))


def get_data(args, tokenizer):
    """(training data, validation data) of train.py's flags: text, or the documents of a task."""
    if is_stream(args.data):
        require_text(tokenizer, f"--data {args.data[0]}")
        return import_module(f"support.tasks.{args.data[0]}").get_data(args, tokenizer)
    T, name = args.seq_len, at_most_3(args.data)
    files, documents = read_files(args, tokenizer)
    train, val, how = hold_out(files, documents)
    if not train:
        raise UsageError(f"{name}: nothing to train on: no UTF-8 text and no .bin file, except "
                         "val.bin, *_val_*.bin, files in a folder val, and those of runs")
    kind = "file" if documents else "token file"
    print(f"{name}: {len(files):,} {kind}{'s' * (len(files) > 1)}, "
          f"{sum(path.stat().st_size for path, _ in files):,} bytes; held out: {how}")

    train, val = ([(x, 0, len(x)) for x in tokens_of(paths, documents, tokenizer)]
                  for paths in (train, val))
    if not val:
        cuts = [n - max(n // 20, min(T + 1, n // 2)) for _, _, n in train]
        val = [(x, cut, n) for (x, _, n), cut in zip(train, cuts)]
        train = [(x, 0, cut) for (x, _, _), cut in zip(train, cuts)]
    data = Sequences(train, T, f"{name}, without its held-out part")
    data.files = fingerprint(files)
    if tokenizer.eot_token is None:                    # nothing else to begin with
        data.next_command += " --prompt 0"
    return data, Sequences(val, T, f"the held-out part of {name}")


def read_files(args, tokenizer):
    """([(path, "train" or "val")], {path: tokens of a text}) of --data. Token files stay on disk.

    A file that cannot be used is an error if --data names it. Inside a folder it is skipped, and a
    line says so.
    """
    files, documents, skipped = [], {}, []
    for path, use in files_of(args.data, args.out):
        if path.suffix != ".bin":
            require_text(tokenizer, path)
        try:
            if path.suffix != ".bin":
                text = read_text(path)
                # The standard library's empty files are kept, as for README's losses.
                if not text and args.data != ["stdlib"]:
                    raise UsageError(f"{path}: empty")
                documents[path] = encode_document(text, tokenizer)
            files.append((path, use))
        except UsageError as e:
            if str(path) in args.data:
                raise
            skipped.append(f"{e}")                     # not e: it holds all the bytes
    if skipped:
        print(f"skipped {at_most_3(skipped)}")
    return files, documents


def hold_out(files, documents):
    """(paths to train on, paths held out, how they were chosen, in words).

    If no name says what to hold out, it is every twentieth of 20 or more texts, or else (with no
    paths) the last twentieth of all text and of each token file, and at least one sequence.
    """
    train, val = ([path for path, use in files if use == wanted] for wanted in ("train", "val"))
    if val:
        return train, val, at_most_3([path.name for path in val])
    if len(train) >= 20 and len(train) == len(documents):
        val = train[HELD_OUT]
        del train[HELD_OUT]
        return train, val, "every 20th file"
    return train, [], "the last twentieth, at least one sequence"


def tokens_of(paths, documents, tokenizer):
    """One array of all texts, then each token file."""
    texts = [documents[path] for path in paths if path in documents]
    numbers = tokenizer.eot_token is None
    files = [read_bin(path, tokenizer.n_vocab, numbers) for path in paths if path not in documents]
    return [np.concatenate(texts), *files] if texts else files
