"""The text to train on: from the files that --data names to sequences in random order.

--data names UTF-8 files, folders of them, or files of tokens: .bin, which holds nothing but tokens,
uint16 or, if the vocabulary has more than 65,536, uint32; or numpy's .npy. `stdlib` is the source
of Python's own library. Held out are the files that --val names; else those that are named val,
valid or validation, or are in a folder of that name; else every twentieth of 20 or more texts; else
the last twentieth of the tokens.

train.py calls `get_data` before it trains. Read it to learn what a model is trained and tested on.
"""
import hashlib
import math
import os
import re
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import tiktoken
import torch

from support.cli import UsageError, pasteable

TASKS = (["abcdigits"], ["passkey"])                   # --data that names no files: tasks.py
TOKEN_FILES = (".bin", ".npy")
HELD_OUT = ("val", "valid", "validation")              # names of files and folders
JOINED = 2**20                                         # token files up to this size are joined


# ------------------------------------------------------------------------------------- tokens

def get_tokenizer(name):
    """`bytes`: 256 bytes and end-of-text. `gpt2`: GPT-2's BPE (the paper's), downloaded once.

    A number such as `65` is the size of a vocabulary of your own; see `Numbers`.
    """
    if name == "bytes":
        ranks = {bytes([i]): i for i in range(256)}
        return tiktoken.Encoding("bytes", pat_str=r"(?s:.)", mergeable_ranks=ranks,
                                 special_tokens={"<|endoftext|>": 256})
    if re.fullmatch(r"[1-9]\d{0,8}", name, re.ASCII):
        return Numbers(name)
    if name != "gpt2":
        raise UsageError(f"tokenizer {name!r} is unknown: use bytes or gpt2, or, for token files "
                         "of another vocabulary, its size, such as 65")
    try:
        return tiktoken.get_encoding("gpt2")
    except Exception as e:                             # there are many ways to be offline
        raise UsageError(f"GPT-2's BPE could not be downloaded ({type(e).__name__}): connect once, "
                         "or set TIKTOKEN_CACHE_DIR to a folder that has it") from None


class Numbers:
    """The tokens 0 .. N - 1 of a vocabulary that only you know, such as notes or moves in chess.

    They are shown as numbers, and there is no end-of-text among them.
    """
    eot_token = None

    def __init__(self, name):
        self.name, self.n_vocab = name, int(name)

    def encode_ordinary(self, text):
        for word in text.split():
            if not re.fullmatch(r"\d{1,9}", word, re.ASCII) or int(word) >= self.n_vocab:
                raise UsageError(f"{word!r} is not in the vocabulary of --tokenizer {self.name}: "
                                 f"use numbers from 0 to {self.n_vocab - 1}, with spaces between")
        return [int(word) for word in text.split()]

    def decode(self, tokens):
        return "".join(f"{token} " for token in tokens)

    def decode_single_token_bytes(self, token):
        return f"{token} ".encode()


def require_text(tokenizer, what):
    """Raise UsageError if `what`, which is about text, meets a vocabulary of numbers."""
    if tokenizer.eot_token is None:
        raise UsageError(f"{what} needs a tokenizer of text, bytes or gpt2: --tokenizer "
                         f"{tokenizer.name} only knows the numbers in token files")


def encode_document(text, tokenizer):
    """Tokens of a text, then end-of-text, uint16. What looks like a special token is just text."""
    if tokenizer.name == "bytes":
        tokens = np.frombuffer(text.encode(), dtype=np.uint8)
    else:
        tokens = tokenizer.encode_to_numpy(text, disallowed_special=())
    return np.append(tokens.astype(np.uint16), np.uint16(tokenizer.eot_token))


# ------------------------------------------------------------------------------------- files

def files_of(names, tokenizer):
    """The files that --data names, each once, in order."""
    if list(names) == ["stdlib"]:
        return standard_library()
    files = {}
    for root in map(Path, names):
        if not root.exists():
            raise UsageError(f"{root} does not exist: name the text where it is now")
        for path in files_in(root, tokenizer) if root.is_dir() else [root]:
            files.setdefault(number_of(path), path)
    return list(files.values())


def number_of(path):
    """What identifies a file, whatever it is called: a link has the number of its file."""
    if not path.exists():
        return path                                    # a link to nothing
    return path.stat().st_dev, path.stat().st_ino


def files_in(folder, tokenizer):
    """The files of a folder that --data names, in order.

    Token files lie beside the texts that they were made from, so only one kind is read: for bytes
    the texts, because the tokens may be those of another vocabulary, otherwise the tokens.
    """
    paths = files_below(folder)
    tokens = [path for path in paths if path.suffix in TOKEN_FILES]
    texts = [path for path in paths if path.suffix not in TOKEN_FILES]
    if not tokens or not texts:
        return paths
    if tokenizer.name == "bytes":
        print(f"left out {count(len(tokens), 'token file')} beside the texts in {folder}: name "
              "their vocabulary with --tokenizer to read them instead")
        return texts
    print(f"left out {count(len(texts), 'file')} beside the token files in {folder}")
    return tokens


def files_below(folder):
    """The files of a folder and of those in it, without hidden ones.

    Links are followed. Folders of runs are left out, so that you can train where your texts are.
    """
    found, been = [], set()
    for here, folders, files in os.walk(folder, followlinks=True):
        number = number_of(Path(here))
        if is_run(Path(here)) or number in been:       # a link may lead back
            folders.clear()
            continue
        been.add(number)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [Path(here, name) for name in files if not name.startswith(".")]
    return sorted(found)


def is_run(folder):
    """Whether a folder holds a run of train.py: its flags.txt begins with the model."""
    file = folder / "flags.txt"
    return file.is_file() and file.read_bytes().startswith(b"model\t")


def is_held_out(path, names):
    """Whether the name of a file, or of its folder below those that --data names, says so."""
    words = [path.stem]
    if path.suffix in TOKEN_FILES:
        words = path.stem.split("_")                   # such as llm.c's data_val_000000.bin
    for root in map(Path, names):
        if root in path.parents:
            words += [root.name, *path.relative_to(root).parent.parts]
    return bool(set(words) & set(HELD_OUT))


def every_twentieth(paths):
    """What is held out of many texts. lab/perplexity.py measures what this holds out of stdlib."""
    return paths[19::20]


def standard_library():
    """The files of Python's own standard library, in order, without its tests."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    return sorted(path for path in root.rglob("*.py")
                  if not skip & set(path.relative_to(root).parts))


def read_text(path):
    """The text of a UTF-8 file, without a byte order mark. Raises UsageError for anything else."""
    if ".jsonl" in path.suffixes or path.suffix == ".parquet":
        prepare = pasteable("python -m lab.prepare")
        raise UsageError(f"{path}: {prepare} turns it into token files")
    try:
        return path.read_text("utf-8-sig")
    except UnicodeDecodeError as e:
        raise UsageError(f"{path}: not UTF-8 at byte {e.start:,}; if it is Latin-1, iconv -f "
                         "latin1 -t utf-8 converts it") from None


def read_tokens(path, tokenizer):
    """The tokens of a .bin or .npy file, which stay on the disk until they are used."""
    if path.suffix == ".npy":
        try:
            tokens = np.load(path, mmap_mode="r")
        except (ValueError, EOFError):
            raise UsageError(f"{path} is damaged, or no array of numpy.save") from None
        if not isinstance(tokens, np.ndarray):
            raise UsageError(f"{path} has several arrays: save each with numpy.save")
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise UsageError(f"{path} has the shape {tokens.shape} and the type {tokens.dtype}; "
                             "expected a list of whole numbers")
        if tokens.dtype.kind == "u" and tokens.dtype.itemsize == 8:
            tokens = tokens.view(tokens.dtype.str.replace("u", "i"))   # with int64, floats result
    else:
        width = 2 if tokenizer.n_vocab <= 2**16 else 4
        if path.stat().st_size == 0 or path.stat().st_size % width != 0:
            raise UsageError(f"{path} is empty, or not a whole number of tokens of {width} bytes, "
                             f"those of a vocabulary of {tokenizer.n_vocab}")
        tokens = np.memmap(path, f"<u{width}", "r")
        # Numbers of twice the width have their upper half in every second place: zeros.
        some = np.concatenate((tokens[:JOINED], tokens[-JOINED:]))
        if len(tokens) > 64 and some.any() and not some[1::2].any():
            raise UsageError(f"{path} has tokens of {2 * width} bytes or more each, expected "
                             f"{width} for a vocabulary of {tokenizer.n_vocab}: write them as "
                             f"uint{8 * width}, or with numpy.save as .npy")
    # All of a large one would take minutes: the rest is looked at as it is drawn.
    require_known(tokens[:JOINED], path, tokenizer.n_vocab)
    if tokenizer.name == "bytes" and len(tokens) > 0 and tokens[:JOINED].max() < ord("a"):
        n = tokens[:JOINED].max()
        print(f"{path}: its numbers are 0 to {n}, read as bytes; if they are those of a vocabulary "
              f"of your own, its size is --tokenizer {n + 1}")
    return tokens


def require_known(tokens, path, n_vocab):
    """Raise UsageError if some tokens are not in the vocabulary."""
    if len(tokens) > 0 and not 0 <= int(tokens.min()) <= int(tokens.max()) < n_vocab:
        raise UsageError(f"{path} has tokens from {tokens.min()} to {tokens.max()}; expected 0 to "
                         f"{n_vocab - 1}: use the --tokenizer that made it; a .bin file must have "
                         "nothing else in it, such as a header")


# --------------------------------------------------------------------------------- sequences

class Sequences:
    """Contiguous sequences of T + 1 tokens, T inputs and T targets, cut from arrays of tokens.

    A task's endless documents, `Stream` in tasks.py, have the same attributes.
    """
    state = ()                                         # what a checkpoint keeps, besides `drawn`
    corpus = ""                                        # what was read, in words, with a hash
    next_command = "-m lab.sample"                     # to try the model

    def __init__(self, arrays, T, n_vocab, what):
        self.arrays, self.T, self.n_vocab = arrays, T, n_vocab
        self.order = self.order_of = None
        self.ends = np.cumsum([max(len(tokens) - 1, 0) // T for tokens in arrays])
        if len(arrays) == 0 or len(self) == 0:
            raise UsageError(f"{what}: {sum(map(len, arrays))} tokens are fewer than one sequence "
                             f"of {T} + 1: use more text or a smaller --seq-len")

    def __len__(self):
        return int(self.ends[-1])

    def __getitem__(self, n):
        a = int(np.searchsorted(self.ends, n, side="right"))       # the array that has it
        if a > 0:
            n -= int(self.ends[a - 1])
        tokens = self.arrays[a][n * self.T : (n + 1) * self.T + 1].astype(np.int64)
        if isinstance(self.arrays[a], np.memmap):
            require_known(tokens, self.arrays[a].filename, self.n_vocab)
        return tokens

    def __str__(self):
        return count(len(self), "sequence")

    def spread(self, n):
        """The numbers of at most n sequences, evenly spread."""
        return range(0, len(self), math.ceil(len(self) / n))

    def draw(self, n, seed):
        """The n-th sequence in random order, without replacement, and a new order in each epoch.

        Any n can be drawn directly, so a resumed run sees the same sequences.
        """
        epoch, n = divmod(n, len(self))
        if self.order_of != (seed, epoch):
            self.order_of = seed, epoch
            self.order = np.random.default_rng([seed, epoch]).permutation(len(self))
        return self[self.order[n]]

    def observe(self, loss, n):
        """Called with the loss of each step of n sequences. Returns whether training may end."""
        return False

    def extra_columns(self, model, batches):
        """More columns of an evaluation. batches: from `batches`"""
        return {}


def batches(data, n, batch_size):
    """At most n sequences of data, evenly spread, in tensors of (batch_size, T + 1)."""
    numbers = data.spread(n)
    for first in range(0, len(numbers), batch_size):
        yield torch.from_numpy(np.stack([data[i] for i in numbers[first : first + batch_size]]))


def absolute(names):
    """What --data or --val names, valid from any folder."""
    if names in (["stdlib"], *TASKS):
        return names
    return [os.path.abspath(name) for name in names]


def get_data(args, tokenizer):
    """(training data, validation data) of train.py's flags, if they name text."""
    files = read_files(args.data, tokenizer)
    train, val, how = hold_out(files, args, tokenizer)
    n_bytes = sum(path.stat().st_size for path in files)
    size = f"{count(len(files), 'file')}, {n_bytes:,} bytes"
    print(f"{size}; held out: {how}")
    what = f"--data {' '.join(args.data[:3])}"
    data = Sequences(train, args.seq_len, tokenizer.n_vocab, f"{what}, without what is held out")
    data.corpus = f"{size}, {hash_of_tokens(train, val)}"
    if tokenizer.eot_token is None:                    # there is no beginning of a document
        data.next_command += " --prompt 0"
    val = Sequences(val, args.seq_len, tokenizer.n_vocab, f"what is held out of {what}")
    return data, val


def hold_out(files, args, tokenizer):
    """(arrays to train on, arrays held out, how they were chosen, in words).

    files: {path: tokens} of --data.
    """
    if args.val:
        held_out, how = read_files(args.val, tokenizer), " ".join(args.val)
    else:
        held_out, how = held_out_files(files, args.data)
    numbers = {number_of(path) for path in held_out}
    kept = [tokens for path, tokens in files.items() if number_of(path) not in numbers]
    if args.val and not kept:
        raise UsageError(f"--val {how} holds out all of --data: leave some of it to train on")
    train = join(kept)
    if held_out:
        return train, join(list(held_out.values())), how

    # At least one sequence, but not more than half of what there is.
    T, how = args.seq_len, "the last twentieth of the tokens, at least one sequence"
    cuts = [len(x) - max(len(x) // 20, min(T + 1, len(x) // 2)) for x in train]
    val = [x[cut:] for x, cut in zip(train, cuts)]
    return [x[:cut] for x, cut in zip(train, cuts)], val, how


def held_out_files(files, names):
    """({path: tokens} of the files to hold out, how they were chosen, in words); {} if none are.

    files: all of them, {path: tokens}; names: of --data. The standard library's names say nothing.
    """
    if names != ["stdlib"]:
        found = {path: x for path, x in files.items() if is_held_out(path, names)}
        if found:
            return found, f"{count(len(found), 'file')}, by name"
    n_texts = len([path for path in files if path.suffix not in TOKEN_FILES])
    if n_texts >= 20 and n_texts == len(files):
        return {path: files[path] for path in every_twentieth(list(files))}, "every twentieth file"
    return {}, ""


def text_held_out(ckpt, tokenizer):
    """What train.py has held out of the text of a run: ({path: tokens}, how, in words).

    ckpt: the run's checkpoint. Raises UsageError if its text is not here, or not what it was.
    """
    names, val = ckpt["args"]["data"], ckpt["args"].get("val")
    if names in TASKS:
        raise UsageError(f"the run was trained on {names[0]}")
    if not names and not val:
        raise UsageError("the checkpoint names no text")
    if not names:                                      # of a training loop of your own
        return read_files(val, tokenizer), "all of it"
    args = SimpleNamespace(data=names, val=val, seq_len=ckpt["args"]["seq_len"])
    files = read_files(names, tokenizer)
    train, ends, how = hold_out(files, args, tokenizer)
    # Other files may be held out of a text that has changed, and the run may have read them.
    if not ckpt.get("corpus", "").endswith(hash_of_tokens(train, ends)):
        raise UsageError(f"{names[0]} has another hash than the text that the run has read")
    if val:
        return read_files(val, tokenizer), "all of it"
    found, _ = held_out_files(files, names)
    if not found:
        found = {Path(f"{names[0]} {n}"): tokens for n, tokens in enumerate(ends)}
    return found, how


def documents_in(files, tokenizer):
    """[(name of its file, tokens)] of all documents in files, {path: tokens}.

    A document ends with end-of-text, of which a vocabulary of your own has none: there a file is a
    document.
    """
    found = []
    for path, tokens in files.items():
        ends = [len(tokens)]
        if tokenizer.eot_token is not None:
            ends = [*np.flatnonzero(tokens == tokenizer.eot_token).tolist(), len(tokens)]
        starts = [0, *(end + 1 for end in ends)]
        found += [(path.name, tokens[a:b]) for a, b in zip(starts, ends) if a < b]
    return found


def read_files(names, tokenizer):
    """{path: tokens} of the files that --data names.

    A file that cannot be used is an error if it is named. Inside a folder it is left out, and a
    line says so.
    """
    found, left_out = {}, []
    for path in files_of(names, tokenizer):
        try:
            if path.suffix in TOKEN_FILES:
                found[path] = read_tokens(path, tokenizer)
            else:
                require_text(tokenizer, path)
                found[path] = encode_document(read_text(path), tokenizer)
        except (UsageError, OSError) as e:
            if path in map(Path, names):
                raise
            left_out.append(str(e))
    if left_out:
        print(f"left out {count(len(left_out), 'file')}: {left_out[0]}")
    if not found:
        raise UsageError(f"{' '.join(names)}: no UTF-8 text, no .bin file, no .npy file")
    return found


def count(n, what):
    """n of something, in words: 1 file, 2 files."""
    return f"{n:,} {what}" if n == 1 else f"{n:,} {what}s"


def join(arrays):
    """One array of all texts and small token files, then each large one, which stays on the disk.

    Otherwise up to T tokens of each file would be left over.
    """
    small = [x for x in arrays if not isinstance(x, np.memmap) or len(x) <= JOINED]
    large = [x for x in arrays if isinstance(x, np.memmap) and len(x) > JOINED]
    return [np.concatenate(small), *large] if small else large


def hash_of_tokens(train, val):
    """A hash of arrays of tokens. Of a file that stays on the disk, the first 2^24 count."""
    found = hashlib.sha256(repr([[len(x) for x in part] for part in (train, val)]).encode())
    for x in train + val:
        found.update(np.ascontiguousarray(x[: 2**24] if isinstance(x, np.memmap) else x))
    return found.hexdigest()[:12]
