"""The tokens of texts, and of files in the formats of nanoGPT and llm.c."""
import re

import numpy as np
import tiktoken

from support.cli import UsageError

EDGE = 4096                                            # bytes at each end of a file: one page
LLM_C = 20240520                                       # llm.c's token files begin with it
HEADERS = {LLM_C: (1, 2), 20240801: (7, 4)}            # version, bytes; then Llama 3's


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
        raise UsageError(f"tokenizer {name!r} is unknown: use bytes or gpt2, or, for .bin token "
                         "files of another vocabulary, its size, such as 65")
    try:
        return tiktoken.get_encoding("gpt2")
    except Exception as e:
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
                         f"{tokenizer.name} only knows the numbers in .bin token files")


def encode_document(text, tokenizer):
    """Tokens of a text, then end-of-text, uint16. What looks like a special token is just text."""
    if tokenizer.name == "bytes":
        tokens = np.frombuffer(text.encode(), dtype=np.uint8)
    else:
        tokens = tokenizer.encode_to_numpy(text, disallowed_special=())
    return np.append(tokens.astype(np.uint16), np.uint16(tokenizer.eot_token))


class TokenFile:
    """The tokens of a file; `tokens[start:stop]` reads them, as an array.

    Nothing stays in memory and no file stays open, for there may be thousands.
    """

    def __init__(self, path, header, width, vocab_size):
        self.path, self.header, self.width, self.vocab_size = path, header, width, vocab_size
        self.n = (path.stat().st_size - header) // width

    def __len__(self):
        return self.n

    def __getitem__(self, part):
        start, stop, _ = part.indices(self.n)
        offset = self.header + self.width * start
        tokens = np.fromfile(self.path, f"<u{self.width}", stop - start, offset=offset)
        if len(tokens) < stop - start:
            raise UsageError(f"{self.path} has become shorter since this run began: restore it, "
                             "and go on from the last checkpoint")
        if tokens.max(initial=0) >= self.vocab_size:
            raise UsageError(f"{self.path} has tokens beyond the vocabulary of {self.vocab_size}, "
                             f"if each has {self.width} bytes: use the --tokenizer that made it")
        return tokens


def read_bin(path, vocab_size, numbers=False):
    """Read a token file: raw uint16 (nanoGPT), or tokens after a header (llm.c).

    llm.c's header is 256 int32. The first three are 20240520, version 1, and the number of tokens;
    the fourth is the vocabulary of support.prepare's tokenizer, or 0 if unknown. Tokens are uint32
    after Llama 3's header, which begins with 20240801 and version 7, and in raw files if the
    vocabulary is above 65,536. numbers: whether the tokenizer is `Numbers`.
    """
    size = path.stat().st_size
    magic, version, count, vocabulary = np.resize(np.fromfile(path, "<i4", 4), 4).tolist()
    header = 1024 if magic in HEADERS else 0
    known, width = HEADERS.get(magic, (0, 2 if vocab_size <= 2**16 else 4))
    if not header and are_wider(np.fromfile(path, f"<u{width}", EDGE)):
        raise UsageError(f"{path} has tokens of {2 * width} bytes or more each, expected {width} "
                         f"for a vocabulary of {vocab_size}: write them as uint{8 * width}, or "
                         "give the size of the vocabulary they are from, as in --tokenizer 128256")
    if size % width or header and (version, size) != (known, header + width * count):
        raise UsageError(f"{path} is truncated, damaged, or not a token file: its {size} bytes do "
                         f"not fit {'its header' if header else f'tokens of {width} bytes'}")
    if not (header or numbers) and path.with_name("meta.pkl").exists():
        raise UsageError(f"{path} has nanoGPT's numbers for characters, which only meta.pkl beside "
                         "it explains: name the text itself after --data, in nanoGPT input.txt, or "
                         "give the size of that vocabulary, as in --tokenizer 65")
    if header and vocabulary not in (0, vocab_size):
        raise UsageError(f"{path} has a vocabulary of {vocabulary}, not of {vocab_size}: use the "
                         "--tokenizer that made it")
    tokens = TokenFile(path, header, width, vocab_size)

    # Reading both ends finds the wrong --tokenizer before a run begins.
    for end in (slice(EDGE // 2), slice(-EDGE // 2, None)):
        tokens[end]
    return tokens


def are_wider(halves):
    """Whether tokens have more bytes than they were read with: then every second one is 0."""
    low, high = halves[::2], halves[1::2]
    return len(halves) >= 64 and not high.any() and (low > 0).mean() > 0.4
