"""From files to the tokens of a training step.

What training draws from has `draw(n, seed)`: its n-th sequence, random access by number. So the
state of the data is one number, and a resumed run sees the same sequences, bit for bit.
"""
import math
import re
import sysconfig
from pathlib import Path

import numpy as np
import tiktoken

from support.cli import UsageError


def get_tokenizer(name):
    """`bytes`: 256 bytes and end-of-text. `gpt2`: GPT-2's BPE (the paper's), downloaded once."""
    if name == "bytes":
        ranks = {bytes([i]): i for i in range(256)}
        return tiktoken.Encoding("bytes", pat_str=r"(?s:.)", mergeable_ranks=ranks,
                                 special_tokens={"<|endoftext|>": 256})
    if name != "gpt2":
        raise UsageError(f"tokenizer {name!r} is unknown: take bytes or gpt2")
    try:
        return tiktoken.get_encoding("gpt2")
    except Exception as e:
        raise UsageError(f"GPT-2's BPE could not be downloaded ({type(e).__name__}): connect once, "
                         "or set TIKTOKEN_CACHE_DIR to a folder that has it") from None


# ------------------------------------------------------------------------------------ files

def read_bin(path, vocab_size):
    """A token file, memory-mapped: raw uint16 (nanoGPT), or behind a header (llm.c).

    llm.c's header: 256 int32, of which the first three are 20240520, version 1, number of tokens.
    """
    tokens = map_bin(path)
    for first in range(0, len(tokens), 2**24):
        largest = tokens[first : first + 2**24].max()
        if largest >= vocab_size:
            raise UsageError(f"{path}: token {largest} is beyond the vocabulary of {vocab_size}: "
                             "take the --tokenizer that made the file")
    return tokens


def map_bin(path):
    size = path.stat().st_size
    header = np.fromfile(path, dtype="<i4", count=256)
    if len(header) and header[0] == 20240520:
        if len(header) < 256 or header[1] != 1 or size != 1024 + 2 * int(header[2]):
            raise UsageError(f"{path} is truncated or of another version: its header does not fit "
                             f"its {size} bytes")
        return np.memmap(path, dtype="<u2", mode="r", offset=1024)
    if size == 0 or size % 2:
        raise UsageError(f"{path} is not a token file: its {size} bytes are not 16-bit tokens")
    return np.memmap(path, dtype="<u2", mode="r")


def read_text(path):
    """The text of a UTF-8 file."""
    text = path.read_bytes()
    if not text:
        raise UsageError(f"{path} is empty")
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as e:
        raise UsageError(f"{path} is not UTF-8 text: byte {e.start} is "
                         f"0x{text[e.start]:02x}") from None


def files_of(names):
    """Yield the files that paths name. Folders are searched recursively, hidden files left out."""
    for name in names:
        path = Path(name)
        if not path.exists():
            raise UsageError(f"{path} does not exist")
        if not path.is_dir():
            yield path
            continue
        below = [p.relative_to(path) for p in path.rglob("*") if p.is_file()]
        hidden = [p for p in below if any(part.startswith(".") for part in p.parts)]
        below = sorted(path / p for p in set(below) - set(hidden))
        if not below:
            raise UsageError(f"the folder {path} has no files")

        # Read one by one: a caller may stop long before the last.
        left_out = 0
        for p in below:
            if p.suffix == ".bin" or is_text(p):
                yield p
            else:
                left_out += 1
        if left_out == len(below):
            raise UsageError(f"the folder {path} has no UTF-8 text and no .bin file")
        if left_out:
            print(f"{path}: {left_out} files left out, empty or not UTF-8")


def is_text(path):
    """Whether a file holds UTF-8 text."""
    try:
        return bool(read_text(path))
    except (UsageError, OSError):
        return False


def standard_library():
    """Yield the texts of Python's own standard library, in order, without its tests."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    for path in sorted(root.rglob("*.py")):
        if not skip & set(path.relative_to(root).parts):
            try:
                yield path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                pass


# -------------------------------------------------------------------------------- sequences

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


class Sequences:
    """Contiguous sequences of T + 1 tokens, cut from token arrays: T inputs, T targets."""

    def __init__(self, arrays, T, what):
        self.arrays, self.T = arrays, T
        self.ends = np.cumsum([max(len(a) - 1, 0) // T for a in arrays])
        if not len(self):
            raise UsageError(f"{what}: {sum(map(len, arrays))} tokens are fewer than one sequence "
                             f"of {T} + 1: give more text or a smaller --seq-len")

    def __len__(self):
        return int(self.ends[-1])

    def __getitem__(self, n):
        a = int(np.searchsorted(self.ends, n, side="right"))
        start = (n - (int(self.ends[a - 1]) if a else 0)) * self.T
        return self.arrays[a][start : start + self.T + 1].astype(np.int64)

    def __str__(self):
        return f"{len(self):,} sequences"

    def spread(self, n):
        """The numbers of at most n sequences, evenly spread."""
        return range(0, len(self), -(-len(self) // n))

    def draw(self, n, seed):
        """The n-th sequence at random without replacement: a new order for each epoch."""
        epoch, n = divmod(n, len(self))
        return self[permute(n, len(self), (seed, epoch))]


FLAT_AFTER = 12_000                                    # documents learned until b is 1.1
OWN = 0.5                                              # share of digits that are the letter's own
NEAR = 0.4                                             # nats per token above the least loss


class ABCDigitsStream:
    """Endless ABCDigits documents of T + 1 tokens, by number. part: 0 training, 1 validation.

    A document is lines LETTER=NUMBER; each letter has one random number in a document. A line's
    letter is drawn with the weights b^0 .. b^25, in an order that is new in each document.

    At first b is 2, so a few letters fill the document; and a letter has own digits, the same in
    all documents: half of its digits are these, at random. To learn them, a model must bring the
    letter to each place where a digit is predicted, and lookup needs just that. While the loss is
    near the least possible, b falls to 1.1 and own digits disappear. In the end most questions are
    about a letter that stood there once before, which is what the benchmark asks. Validation is
    like the end.
    """

    def __init__(self, tokenizer, T, digits, seed, part):
        if not 2 <= digits <= 18:
            raise UsageError(f"--digits {digits}: a number has 2 to 18")
        self.tokenizer, self.T, self.digits = tokenizer, T, digits
        self.seed, self.part = seed, part
        line = "A=" + "1" * digits + "\n"
        self.lines = T / len(tokenizer.encode_ordinary(line))      # of a document, on average
        self.low, self.high = 10 ** (digits - 1), 10**digits       # numbers, high excluded
        own = np.random.default_rng([seed, 2]).integers(self.low, self.high, 26)
        self.own = split(own)
        self.learned = 0                               # documents whose loss was near the least

    @property
    def base(self):
        """b, the ratio of the weights of two letters next to each other in rank."""
        return 1.1 if self.part else max(2 - 0.9 * self.learned / FLAT_AFTER, 1.1)

    @property
    def share(self):
        """The share of the digits that are their letter's own."""
        return 0.0 if self.part else OWN * max(1 - 2 * self.learned / FLAT_AFTER, 0.0)

    def least_loss(self):
        """The least possible loss, nats per token: the letters, and the numbers of new ones."""
        p = self.base ** np.arange(26) / np.sum(self.base ** np.arange(26))
        letters = -self.lines * np.sum(p * np.log(p))
        new = np.sum(1 - (1 - p) ** self.lines)

        # A digit of a new number is the letter's own, or one of n with equal probability.
        def entropy(n):
            other = (1 - self.share) / n
            own = self.share + other
            return -own * math.log(own) - (n - 1) * other * math.log(other)

        number = entropy(9) + (self.digits - 1) * entropy(10)
        return (letters + new * number) / self.T

    def observe(self, loss, documents):
        """Count the documents of a step, if its loss (nats per token) is near the least."""
        if loss < self.least_loss() + NEAR:
            self.learned += documents

    def __getitem__(self, n):
        rng = np.random.default_rng([self.seed, self.part, n])
        numbers = split(self.low + rng.choice(self.high - self.low, 26, replace=False))
        numbers = np.where(rng.random(numbers.shape) < self.share, self.own, numbers)
        values = ["".join(digits) for digits in numbers]
        p = rng.permutation(self.base ** np.arange(26))
        tokens = []
        while len(tokens) <= self.T:
            letters = rng.choice(26, self.T // (self.digits + 3) + 1, p=p / p.sum())
            lines = "".join(f"{chr(65 + c)}={values[c]}\n" for c in letters)
            tokens += self.tokenizer.encode_ordinary(lines)
        return np.array(tokens[: self.T + 1])

    def needles(self, document):
        """True where the target is a digit of a letter with one earlier line. (T + 1,) -> (T,)"""
        text, starts = self.tokenizer.decode_with_offsets(document.tolist())
        starts, mask, seen = np.array(starts), np.zeros(len(document), dtype=bool), []
        for line in re.finditer(r"([A-Z])=(\d*)", text):
            if seen.count(line[1]) == 1:
                mask |= (starts >= line.start(2)) & (starts < line.end(2))
            seen.append(line[1])
        return mask[1:]

    def __str__(self):
        return "an endless stream"

    def spread(self, n):
        """The numbers of n documents."""
        return range(n)

    def draw(self, n, seed):
        """The n-th document."""
        return self[n]


def split(numbers):
    """The digits of numbers of equal length, as characters. (n,) -> (n, digits)"""
    return np.array([list(str(n)) for n in numbers])


def get_data(args, tokenizer):
    """(training data, validation data) of train.py's flags.

    The last twentieth of the text is held out; of 20 and more files, every twentieth.
    """
    T = args.seq_len
    if args.data == ["abcdigits"]:
        return tuple(ABCDigitsStream(tokenizer, T, args.digits, args.seed, n) for n in (0, 1))

    arrays = []
    if args.data == ["stdlib"]:
        texts = list(standard_library())
    else:
        paths = list(files_of(args.data))
        texts = [read_text(p) for p in paths if p.suffix != ".bin"]
        arrays = [read_bin(p, tokenizer.n_vocab) for p in paths if p.suffix == ".bin"]

    # Whole files are held out where there are enough, otherwise the end of what there is.
    train, val = [], []
    if len(texts) >= 20:
        train = [join([t for n, t in enumerate(texts) if n % 20 != 19], tokenizer)]
        val = [join(texts[19::20], tokenizer)]
    elif texts:
        arrays = [join(texts, tokenizer), *arrays]
    for a in arrays:
        cut = len(a) - max(len(a) // 20, min(T + 1, len(a) // 2))
        train.append(a[:cut])
        val.append(a[cut:])
    name = " ".join(args.data)
    return (Sequences(train, T, f"{name}, a twentieth held out"),
            Sequences(val, T, f"the held-out part of {name}"))


def join(texts, tokenizer):
    """The tokens of texts, an end-of-text after each. uint16"""
    eot = [tokenizer.eot_token]
    encode = tokenizer.encode_ordinary
    return np.concatenate([np.array(encode(t) + eot, dtype=np.uint16) for t in texts])
