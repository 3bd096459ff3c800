"""From the files that --data names to the tokens of a training step."""
import hashlib
import os
import sysconfig
from pathlib import Path

import numpy as np

from support.cli import UsageError, at_most_3
from support.tokens import EDGE, encode_document, read_bin

HELD_OUT = slice(19, None, 20)                         # every twentieth of 20 or more texts
STREAMS = ("abcdigits", "passkey")                     # of tasks/: endless, without files
USES = ("train", "val")


class Data:
    """What training draws from: data[n] is a sequence of T + 1 tokens, of text or of a stream.

    draw(n, seed) is the n-th in training: random access, so that a resumed run sees the same ones.
    spread(n) has the numbers of n sequences.
    """
    learned = False                                    # whether training may end early

    def observe(self, loss, documents):
        """Told of each step's loss."""

    def state(self):
        """What a checkpoint keeps besides the number of drawn sequences."""
        return ()

    def load(self, state):
        """Take the state of a checkpoint."""

    def extra_columns(self, model, batches):
        """More columns of an evaluation. batches: of `distributed.batches`"""
        return {}


def is_stream(names):
    """Whether --data names a stream: beside other names it is a folder's."""
    return len(names) == 1 and names[0] in STREAMS


def absolute(names):
    """What --data names, valid from any folder."""
    known = is_stream(names) or names == ["stdlib"]
    return names if known else [os.path.abspath(x) for x in names]


# ------------------------------------------------------------------------------------- files

def files_of(names, out=None):
    """Yield (path, use) of each file that --data names: "train", "val", or why it is skipped.

    stdlib names the files of Python's own standard library, a stream none. What is named twice, or
    also by links, is used once. Text is read to check it, file by file: a caller may stop early.
    out: the folder of the run that asks. Whatever lies in a run's folder is no data.
    """
    if is_stream(names):
        return
    if list(names) == ["stdlib"]:
        yield from ((path, "train") for path in standard_library())
        return
    taken = set()
    for root in map(Path, names):
        if out and root.resolve() == Path(out).resolve():
            raise UsageError(f"--out {out}: a run's folder is no data: name another one")
        found = visible_files(root, out) if root.is_dir() else [root]
        has_bins = any(map(is_bin, found))
        for path in found:
            real = os.path.realpath(path)
            if real not in taken:
                use = use_of(path, root, has_bins)
                if path == root and use not in USES:
                    raise UsageError(f"{path}: {use}")
                yield path, use
            taken.add(real)


def visible_files(folder, out=None):
    """The files below a folder, in order, without hidden ones. Of a run it lists only the folder.

    Links to folders are followed, into each real folder once. out: the folder of a new run.
    """
    found, seen, own = [], set(), out and os.path.realpath(out)
    for here, folders, files in os.walk(folder, followlinks=True):
        here, real = Path(here), os.path.realpath(here)
        if real in seen:
            folders.clear()
        elif real == own or is_run(here):
            folders.clear()
            found.append(here)
        else:
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            found += [here / name for name in files if not name.startswith(".")]
        seen.add(real)
    return sorted(found)


def is_run(folder):
    """Whether a folder holds a run of train.py."""
    flags = folder / "flags.txt"
    return flags.is_file() and b"\nequations\t" in flags.read_bytes()


def is_bin(path):
    """Whether a file holds tokens, by its name."""
    return path.suffix == ".bin"


def use_of(path, root, has_bins):
    """"train", "val", or why a file is skipped. root: what --data names, a folder or the file.

    Held out are the files that nanoGPT or llm.c would hold out, and those in a folder val below
    --data's, or in --data's own. has_bins: text beside token files is what they were made from.
    """
    if path.is_dir():
        return "the folder of a run"
    if not path.is_file():
        return "a link to nothing" if path.is_symlink() else "missing, or not a file"
    if not is_bin(path):
        if has_bins:
            return "beside token files"
        if ".jsonl" in path.suffixes or path.suffix == ".parquet":
            return "python -m support.prepare turns it into token files"
        content = path.read_bytes()
        try:
            content.decode()
        except UnicodeDecodeError as e:
            return f"not UTF-8, byte {e.start} is 0x{content[e.start]:02x}"
        if not content:
            return "empty"
    folder = root if root.is_dir() else root.parent
    in_val = "val" in (folder.resolve().name, *path.relative_to(folder).parts[:-1])
    named_val = is_bin(path) and "val" in path.stem.split("_")
    return "val" if in_val or named_val else "train"


def standard_library():
    """The files of Python's own standard library, in order, without its tests."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    files = [p for p in root.rglob("*.py") if not skip & set(p.relative_to(root).parts)]
    if not files:
        raise UsageError(f"{root} has no source of Python's library: name a text with --data")
    return sorted(files)


def read_text(path):
    """The text of a UTF-8 file, without a byte order mark."""
    return path.read_bytes().decode("utf-8-sig")


def fingerprint(files):
    """[absolute path, size, short hash of both ends, use] of each used file of `files_of`."""
    found = []
    for path, use in files:
        if use in USES:
            size = path.stat().st_size
            with open(path, "rb") as file:
                ends = file.read(EDGE)
                file.seek(max(size - EDGE, 0))
                ends += file.read(EDGE)
            found.append([os.path.abspath(path), size, hashlib.sha256(ends).hexdigest()[:16], use])
    return found


def hash_of(fingerprints):
    """Twelve digits that change with the files of a fingerprint, wherever they are; "" for none."""
    found = repr([rest for path, *rest in fingerprints]).encode()
    return hashlib.sha256(found).hexdigest()[:12] if fingerprints else ""


def changed_files(old, new):
    """What differs between two fingerprints, a line a file."""
    before, now = ({path: rest for path, *rest in files} for files in (old, new))
    changes = [f"{path} has changed" if path in now else f"{path} is missing"
               for path in before if before[path] != now.get(path)]
    return changes + [f"{path} is new" for path in now if path not in before]


# --------------------------------------------------------------------------------- sequences

def permute(i, n, key, rounds=4):
    """The image of i under a pseudo-random permutation of 0 .. n - 1. key: a tuple of integers.

    A Feistel network on an even number of bits, repeated until it lands below n. It needs no
    memory, whatever n is.
    """
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    keys = [int(x) for x in np.random.SeedSequence(key).generate_state(rounds, np.uint64)]
    while True:
        left, right = i >> half, i % 2**half
        for k in keys:
            mixed = (right ^ k) * 0x9E3779B97F4A7C15 % 2**64
            mixed = (mixed ^ mixed >> 29) * 0xBF58476D1CE4E5B9 % 2**64
            left, right = right, left ^ (mixed >> 32) % 2**half
        i = left << half | right
        if i < n:
            return i


class Sequences(Data):
    """Contiguous sequences of T + 1 tokens: T inputs, T targets.

    parts: what they are cut from, each the tokens of an array or TokenFile from start to stop.
    """

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
        return f"{len(self):,} sequences"

    def spread(self, n):
        """The numbers of at most n sequences, evenly spread."""
        return range(0, len(self), -(-len(self) // n))

    def draw(self, n, seed):
        """The n-th sequence at random without replacement: a new order for each epoch."""
        epoch, n = divmod(n, len(self))
        return self[permute(n, len(self), (seed, epoch))]


def get_data(args, tokenizer, files):
    """(training data, validation data) of train.py's flags, after a line about what was found.

    files: the pairs (path, use) of `files_of`. If no name says what to hold out, it is
    every twentieth of 20 or more texts, or the last twentieth of all text and of each token file.
    """
    T, name = args.seq_len, at_most_3(args.data)
    train, val = ([path for path, use in files if use == wanted] for wanted in USES)
    if skipped := [f"{path.name} ({use})" for path, use in files if use not in USES]:
        print(f"skipped {at_most_3(skipped)}")
    if not train:
        raise UsageError(f"{name}: nothing to train on: no UTF-8 text and no .bin file, except "
                         "val.bin, *_val_*.bin and files in a folder val")

    used = train + val
    if val:
        held_out = at_most_3([path.name for path in val])
    elif len(train) >= 20 and not any(map(is_bin, train)):
        held_out = "every 20th file"
        val = train[HELD_OUT]
        del train[HELD_OUT]
    else:
        held_out = "the last twentieth"
    print(f"{name}: {len(used):,} file{'s' * (len(used) > 1)}, "
          f"{sum(path.stat().st_size for path in used):,} bytes; held out: {held_out}")

    train, val = ([(tokens, 0, len(tokens)) for tokens in tokens_of(paths, tokenizer)]
                  for paths in (train, val))
    if not val:
        for part, (tokens, _, n) in enumerate(train):
            cut = n - max(n // 20, min(T + 1, n // 2))
            train[part] = tokens, 0, cut
            val.append((tokens, cut, n))
    return (Sequences(train, T, f"{name}, without its held-out part"),
            Sequences(val, T, f"the held-out part of {name}"))


def tokens_of(paths, tokenizer):
    """The tokens of files: one array of all texts, then a TokenFile for each token file."""
    documents = [encode_document(read_text(p), tokenizer) for p in paths if not is_bin(p)]
    joined = [np.concatenate(documents)] if documents else []
    return joined + [read_bin(p, tokenizer.n_vocab) for p in paths if is_bin(p)]
