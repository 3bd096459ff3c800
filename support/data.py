"""From the files that --data names to the tokens of a training step."""
import hashlib
import os
import sysconfig
from pathlib import Path
from shlex import quote

import numpy as np

from support.cli import UsageError, at_most_3
from support.tokens import EDGE, SUMS, encode_document, read_bin

HELD_OUT = slice(19, None, 20)                         # every twentieth of 20 or more texts
STREAMS = ("abcdigits", "passkey")                     # of tasks/: endless, without files


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


# ------------------------------------------------------------------------------------- files

def files_of(names):
    """Yield (path, use) of each file that --data names. use: "train", "val", or None: left out.

    stdlib names the files of Python's own standard library, a stream none. A file that is named
    twice, or also by links, is used once.
    """
    if is_stream(names):
        return
    if list(names) == ["stdlib"]:
        yield from ((path, "train") for path in standard_library())
        return
    taken = set()
    for root in map(Path, names):
        found = visible_files(root) if root.is_dir() else [root]
        # Text beside token files is what they were made from.
        texts = not root.is_dir() or not any(map(is_bin, found))
        for path in found:
            file = os.path.realpath(path)
            yield path, None if file in taken else checked_use(path, root, texts)
            taken.add(file)


def checked_use(path, root, texts):
    """The use of a file that `root` names, a folder or itself. texts: whether text counts there.

    Text in a folder is read to check that it is UTF-8, one file at a time: a caller may stop early.
    """
    if path == root:
        if not path.is_file():
            raise UsageError(f"{path} does not exist, or is not a file")
        if ".jsonl" in path.suffixes or path.suffix == ".parquet":
            raise UsageError(f"{path}: python -m support.prepare turns it into token files")
        return use_of(path, path.parent)
    if not path.exists() or not is_bin(path) and (not texts or path.suffix == ".jsonl"):
        return None
    return use_of(path, root) if is_bin(path) or is_text(path) else None


def visible_files(folder):
    """The files below a folder, dangling links too, in order, without hidden ones."""
    found = sorted(folder.rglob("*"))                  # a file that becomes a link keeps its place
    return [p for p in found if (p.is_file() or not p.exists()) and p.name != SUMS
            and not any(part.startswith(".") for part in p.relative_to(folder).parts)]


def is_bin(path):
    """Whether a file holds tokens, by its name."""
    return path.suffix == ".bin"


def use_of(path, root):
    """"val" for a file that nanoGPT or llm.c would hold out, or in a folder val/; else "train".

    root: the folder that --data names, or that of the file. The folders above do not count.
    """
    in_val = "val" in (root.resolve().name, *path.relative_to(root).parts[:-1])
    named_val = is_bin(path) and "val" in path.stem.split("_")
    return "val" if in_val or named_val else "train"


def standard_library():
    """The files of Python's own standard library, in order, without its tests."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    files = [p for p in root.rglob("*.py") if not skip & set(p.relative_to(root).parts)]
    if not files:
        raise UsageError(f"{root} has no source of Python's library: name a text with --data")
    return sorted(p for p in files if not p.stat().st_size or is_text(p))


def read_text(path):
    """The text of a UTF-8 file."""
    content = path.read_bytes()
    try:
        return content.decode()
    except UnicodeDecodeError as e:
        raise UsageError(f"{path} is not UTF-8 text: byte {e.start} is "
                         f"0x{content[e.start]:02x}") from None


def is_text(path):
    """Whether a file holds UTF-8 text."""
    try:
        return bool(read_text(path))
    except UsageError:
        return False


def fingerprint(files):
    """[absolute path, size, short hash of both ends, use] of each used file of `files_of`."""
    found = []
    for path, use in files:
        if not use:
            continue
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


def check_fingerprint(old, new):
    """Raise UsageError, which says how, if two fingerprints differ, even only in order."""
    before, now = ({path: rest for path, *rest in files} for files in (old, new))
    changes = [f"{path} has changed" if path in now else f"{path} is missing"
               for path in before if before[path] != now.get(path)]
    changes += [f"{path} is new" for path in now if path not in before]
    if not changes and old != new:
        changes = [f"{b[0]} comes before {a[0]}" for a, b in zip(old, new) if a != b]
    if changes:
        raise UsageError(f"the data has changed since the run began: {at_most_3(changes)}")


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

    files: the pairs (path, use) of `files_of(args.data)`.

    Files whose names say so are held out. If there are none: every twentieth of 20 or more texts,
    otherwise the last twentieth of all text; and the last twentieth of each token file.
    """
    T = args.seq_len
    name = at_most_3(args.data)
    train, val, left_out = ([p for p, use in files if use == u] for u in ("train", "val", None))
    if not train:
        raise UsageError(f"{name}: nothing to train on: no UTF-8 text and no .bin file, except "
                         "val.bin, *_val_*.bin and files in a folder val")

    # The last twentieth of each file in `ends` is held out, and nothing of `whole`.
    texts, bins = [p for p in train if not is_bin(p)], list(filter(is_bin, train))
    if val:
        whole, ends = train, []
        held_out = at_most_3([p.name for p in val])
    elif len(texts) >= 20:
        val, whole, ends = texts[HELD_OUT], texts.copy(), bins
        del whole[HELD_OUT]
        held_out = "every 20th text file" + ", the last twentieth of each token file" * bool(bins)
    else:
        whole, ends = [], train
        held_out = "the last twentieth"
    used = whole + val + ends
    bins_used = sum(map(is_bin, used))
    kinds = [f"{count:,} {kind} file{'s' * (count > 1)}" for count, kind in
             ((len(used) - bins_used, "text"), (bins_used, "token")) if count]
    print(f"{name}: {' and '.join(kinds)}, {sum(p.stat().st_size for p in used):,} bytes; "
          f"held out: {held_out}")
    for folder in sorted({p.parent for p in used if is_bin(p) and (p.parent / SUMS).exists()}):
        print(f"token files are not checked here; to check: (cd {quote(str(folder))} && "
              f"sha256sum -c {SUMS})")
    if left_out:
        print(f"skipped {at_most_3([p.name for p in left_out])}: empty, not UTF-8, a dangling "
              "link, named twice, or beside token files")

    train, val = ([(tokens, 0, len(tokens)) for tokens in tokens_of(paths, tokenizer)]
                  for paths in (whole, val))
    for tokens in tokens_of(ends, tokenizer):
        n = len(tokens)
        cut = n - max(n // 20, min(T + 1, n // 2))
        train.append((tokens, 0, cut))
        val.append((tokens, cut, n))
    return (Sequences(train, T, f"{name}, without its held-out part"),
            Sequences(val, T, f"the held-out part of {name}"))


def tokens_of(paths, tokenizer):
    """The tokens of files: one array of all texts, then a TokenFile for each token file."""
    documents = [encode_document(read_text(p), tokenizer) for p in paths if not is_bin(p)]
    joined = [np.concatenate(documents)] if documents else []
    return joined + [read_bin(p, tokenizer.n_vocab) for p in paths if is_bin(p)]
