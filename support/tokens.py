"""From files to the tokens of a training step.

What training draws from has `draw(n, seed)`: its n-th sequence, random access by number. So the
state of the data is one number, and a resumed run sees the same sequences, bit for bit.
"""
import re

import numpy as np
import tiktoken

from support.cli import UsageError
from support.files import at_most_3, read_bin, read_blocks
from support.stream import ABCDigitsStream


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


# ------------------------------------------------------------------------------------ text

WORDS = re.compile(r".*\S(?=[ \n])", re.DOTALL)        # up to a space or newline after a word


def whole_words(blocks):
    """The same text, cut between a word and the space or newline after it.

    No token of GPT-2 goes from a word into the space after it, and how it cuts the text on one
    side does not depend on the other: the tokens are those of the whole text.
    """
    rest = ""
    for block in blocks:
        words = WORDS.match(block)
        if words:
            yield rest + words[0]
            rest = block[words.end() :]
        else:
            rest += block
    yield rest


def encode(blocks, tokenizer):
    """Yield the tokens of a text in arrays; what looks like a special token is ordinary text."""
    if tokenizer.name == "bytes":
        for block in blocks:
            yield np.frombuffer(block.encode(), dtype=np.uint8)
    else:
        for piece in whole_words(blocks):
            yield tokenizer.encode_to_numpy(piece, disallowed_special=())


def join(paths, tokenizer):
    """The tokens of text files, an end-of-text after each. uint16"""
    tokens = bytearray()
    for path in paths:
        for piece in encode(read_blocks(path), tokenizer):
            tokens += piece.astype(np.uint16).tobytes()
        tokens += np.uint16(tokenizer.eot_token).tobytes()
    return np.frombuffer(tokens, dtype=np.uint16)


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

    def state(self):
        """What a checkpoint keeps: nothing, a sequence's number says which it is."""
        return {}

    def load(self, state):
        pass

    def observe(self, loss, documents):
        pass

    def evaluate(self, model, val_data, batch_size):
        """({column: value}, words) that an evaluation adds: none."""
        return {}, ""

    def draw(self, n, seed):
        """The n-th sequence at random without replacement: a new order for each epoch."""
        epoch, n = divmod(n, len(self))
        return self[permute(n, len(self), (seed, epoch))]


def get_data(args, tokenizer, files):
    """(training data, validation data) of train.py's flags, after a line about what was found.

    files: the pairs (path, use) of `files_of(args.data)`.

    Held out are the files that say so by their names. If there are none: of 20 and more texts every
    twentieth, otherwise the last twentieth of all text; and the last twentieth of each token file.
    """
    T = args.seq_len
    if args.data == ["abcdigits"]:
        return tuple(ABCDigitsStream(tokenizer, T, args.digits, args.seed, n) for n in (0, 1))

    name = at_most_3(args.data)
    train, val, left_out = ([p for p, use in files if use == u] for u in ("train", "val", None))
    if not train:
        raise UsageError(f"{name}: nothing is left to train on: val.bin, *_val_*.bin and the files "
                         "in a folder val are held out")

    # Of `ends` the last twentieth is held out, of `whole` nothing.
    texts, bins = split(train)
    if val:
        whole, ends = train, []
        held_out = at_most_3([p.name for p in val])
    elif len(texts) >= 20:
        val = texts[19::20]
        whole, ends = [p for n, p in enumerate(texts) if n % 20 != 19], bins
        held_out = "every twentieth text" + ", the last twentieth of each token file" * bool(bins)
    else:
        whole, ends = [], train
        held_out = "the last twentieth"
    print(f"{name}: {count(whole + val + ends)}; held out: {held_out}")
    if left_out:
        print(f"left out as empty, not UTF-8, or beside token files: {len(left_out):,} "
              f"({at_most_3([p.name for p in left_out])})")

    train, val = arrays_of(whole, tokenizer), arrays_of(val, tokenizer)
    for a in arrays_of(ends, tokenizer):
        cut = len(a) - max(len(a) // 20, min(T + 1, len(a) // 2))
        train.append(a[:cut])
        val.append(a[cut:])
    return (Sequences(train, T, f"{name}, without what is held out"),
            Sequences(val, T, f"the held-out part of {name}"))


def split(paths):
    """(texts, token files)"""
    return [p for p in paths if p.suffix != ".bin"], [p for p in paths if p.suffix == ".bin"]


def count(paths):
    """How many texts and token files there are, and their bytes, in words."""
    kinds = []
    for kind, part in zip(("text", "token file"), split(paths)):
        if part:
            size = sum(p.stat().st_size for p in part)
            kinds.append(f"{len(part):,} {kind}{'s' * (len(part) > 1)}, {size:,} bytes")
    return "; ".join(kinds)


def arrays_of(paths, tokenizer):
    """The tokens of files: one array of all texts, then the token files."""
    texts, bins = split(paths)
    joined = [join(texts, tokenizer)] if texts else []
    return joined + [read_bin(p, tokenizer.n_vocab) for p in bins]
