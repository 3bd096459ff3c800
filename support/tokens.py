"""Tokens: of a text, and of files in the formats of nanoGPT and llm.c."""
import numpy as np
import tiktoken

from support.cli import UsageError, replacing

EDGE = 4096                                            # bytes at each end of a file: one page
LLM_C = 20240520                                       # llm.c's token files begin with it
LLM_C_UINT32 = 20240801                                # and those of Llama 3's tokens with it


def get_tokenizer(name):
    """`bytes`: 256 bytes and end-of-text. `gpt2`: GPT-2's BPE (the paper's), downloaded once."""
    if name == "bytes":
        ranks = {bytes([i]): i for i in range(256)}
        return tiktoken.Encoding("bytes", pat_str=r"(?s:.)", mergeable_ranks=ranks,
                                 special_tokens={"<|endoftext|>": 256})
    if name != "gpt2":
        raise UsageError(f"tokenizer {name!r} is unknown: use bytes or gpt2")
    try:
        return tiktoken.get_encoding("gpt2")
    except Exception as e:
        raise UsageError(f"GPT-2's BPE could not be downloaded ({type(e).__name__}): connect once, "
                         "or set TIKTOKEN_CACHE_DIR to a folder that has it") from None


def encode_document(text, tokenizer):
    """The tokens of a text and an end-of-text, uint16. What looks like a special token is text."""
    if tokenizer.name == "bytes":
        tokens = np.frombuffer(text.encode(), dtype=np.uint8)
    else:
        tokens = tokenizer.encode_to_numpy(text, disallowed_special=())
    return np.append(tokens.astype(np.uint16), np.uint16(tokenizer.eot_token))


class TokenFile:
    """The tokens of a file; `tokens[start:stop]` reads them, as an array.

    Nothing stays in memory and no file stays open, for there may be thousands.
    """

    def __init__(self, path, header, vocab_size):
        self.path, self.header, self.vocab_size = path, header, vocab_size
        self.n = (path.stat().st_size - header) // 2

    def __len__(self):
        return self.n

    def __getitem__(self, part):
        start, stop, _ = part.indices(self.n)
        tokens = np.fromfile(self.path, "<u2", stop - start, offset=self.header + 2 * start)
        if len(tokens) < stop - start:
            raise UsageError(f"{self.path} has become shorter since this run began: restore it, "
                             "and go on from the last checkpoint")
        if tokens.max(initial=0) >= self.vocab_size:
            raise UsageError(f"{self.path} has tokens beyond the vocabulary of {self.vocab_size}: "
                             "use the --tokenizer that made it")
        return tokens


def read_bin(path, vocab_size):
    """A token file: raw uint16 (nanoGPT), or behind a header (llm.c).

    llm.c's header: 256 int32, of which the first three are 20240520, version 1, number of tokens.
    The fourth is the vocabulary of support.prepare's tokenizer, or 0 if unknown.
    """
    size = path.stat().st_size
    magic, version, count, vocabulary = np.resize(np.fromfile(path, "<i4", 4), 4).tolist()
    header = 1024 if magic == LLM_C else 0
    if magic == LLM_C_UINT32 or has_4_bytes(np.fromfile(path, "<u2", EDGE)):
        raise UsageError(f"{path} has tokens of 4 bytes or more each, expected 2 (uint16): make it "
                         "again with GPT-2's tokenizer, as support.prepare and nanoGPT do")
    if size % 2 or header and (version, size) != (1, header + 2 * count):
        raise UsageError(f"{path} is truncated, damaged, or not a token file: its {size} bytes do "
                         f"not fit {'its header' if header else 'tokens of two bytes'}")
    if not header and path.with_name("meta.pkl").exists():
        raise UsageError(f"{path} has nanoGPT's numbers for characters, which only meta.pkl beside "
                         "it explains: name the text itself after --data, in nanoGPT input.txt")
    if header and vocabulary not in (0, vocab_size):
        raise UsageError(f"{path} has a vocabulary of {vocabulary}, not of {vocab_size}: use the "
                         "--tokenizer that made it")
    tokens = TokenFile(path, header, vocab_size)

    # Reading both ends finds the wrong --tokenizer before a run begins.
    for end in (slice(EDGE // 2), slice(-EDGE // 2, None)):
        tokens[end]
    return tokens


def has_4_bytes(halves):
    """Whether numbers, read as uint16, are tokens of 4 or 8 bytes: only every second is above 3."""
    low, high = halves[::2], halves[1::2]
    return len(halves) >= 64 and high.max() < 4 and (low > 3).mean() > 0.4


def write_bin(path, tokens, vocab_size=0):
    """Write a token file in llm.c's format."""
    header = np.zeros(256, "<i4")
    header[:4] = LLM_C, 1, len(tokens), vocab_size
    with replacing(path) as file:
        file.write(header.tobytes() + tokens.astype("<u2").tobytes())
