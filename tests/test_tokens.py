"""Tests of support/tokens.py: tokenizers and token files."""
import os
import time

import numpy as np
import pytest
import tiktoken

import support.data
import support.tokens
from support.cli import UsageError
from support.tokens import encode_document, get_tokenizer, read_bin, write_bin
from tests.helpers import data_of, write

# ------------------------------------------------------------------------------- tokenizers

def test_the_byte_tokenizer_is_lossless_and_needs_no_network():
    tokenizer = get_tokenizer("bytes")
    text = "naïve ☃ \0\r\n 𝄞<|endoftext|>"
    tokens = tokenizer.encode_ordinary(text)
    assert tokens == list(text.encode())
    assert tokenizer.decode(tokens) == text
    assert tokenizer.n_vocab == 257
    assert tokenizer.eot_token == 256


def test_gpt2_without_network_or_cache_is_explained(monkeypatch):
    def get_encoding(name):
        raise ConnectionError("no route")

    monkeypatch.setattr(support.tokens.tiktoken, "get_encoding", get_encoding)
    with pytest.raises(UsageError, match="TIKTOKEN_CACHE_DIR"):
        get_tokenizer("gpt2")


def gpt2_like():
    """A word tokenizer with merges and a special token."""
    ranks = {bytes([i]): i for i in range(256)} | {b" a": 256, b"aa": 257, b"<|": 258}
    words = r" ?\p{L}+|\s+|[^\s\p{L}]+"
    return tiktoken.Encoding("like-gpt2", pat_str=words, mergeable_ranks=ranks,
                             special_tokens={"<|endoftext|>": 300})


@pytest.mark.parametrize("make", [gpt2_like, lambda: get_tokenizer("bytes")])
@pytest.mark.parametrize("text", ["naïve aa 𝄞\r\n", "<|endoftext|>", ""])
def test_a_document_is_its_tokens_and_end_of_text(make, text):
    """Text that looks like a special token is ordinary text."""
    tokenizer = make()
    tokens = encode_document(text, tokenizer)
    assert tokens.dtype == np.uint16
    assert tokens.tolist() == [*tokenizer.encode_ordinary(text), tokenizer.eot_token]


# ------------------------------------------------------------------------------------ files

def test_token_files_of_both_formats(tmp_path):
    tokens = np.random.default_rng(0).integers(0, 50257, 5000).astype("<u2")
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, 5000
    (tmp_path / "nano.bin").write_bytes(tokens.tobytes())
    (tmp_path / "llmc.bin").write_bytes(header.tobytes() + tokens.tobytes())
    for name in ("nano.bin", "llmc.bin"):
        a = read_bin(tmp_path / name, 50257)
        assert len(a) == 5000
        assert np.array_equal(a[:], tokens)
        assert np.array_equal(a[105:109], tokens[105:109])


def test_a_token_file_is_not_read_before_a_sequence_is_drawn(tmp_path):
    with open(tmp_path / "sparse.bin", "wb") as file:
        file.truncate(6 * 10**9)
    began = time.process_time()
    training, held_out = data_of(tmp_path, T=256)
    assert time.process_time() - began < 0.5
    assert len(training) + len(held_out) > 11e6
    assert not training.draw(5, seed=0).any()


@pytest.mark.parametrize("position", [0, -1])
def test_the_wrong_tokenizer_is_found_at_the_start(tmp_path, position):
    tokens = np.zeros(10_000)
    tokens[position] = 50256
    with pytest.raises(UsageError, match="beyond the vocabulary"):
        data_of(write(tmp_path, {"a.bin": tokens}), T=10)


def test_a_token_beyond_the_vocabulary_is_found_when_it_is_drawn(tmp_path):
    tokens = np.zeros(10_000)
    tokens[5000] = 257
    training, _ = data_of(write(tmp_path, {"a.bin": tokens}), T=10)
    with pytest.raises(UsageError, match="beyond the vocabulary"):
        training[499]


@pytest.mark.parametrize("bit", [32, 39, 64, 70])
def test_a_header_that_does_not_fit_its_file_is_found_at_the_start(tmp_path, bit):
    """Its version, or the number of tokens: a torn copy, or another format."""
    write_bin(tmp_path / "a.bin", np.arange(600) % 256)
    content = bytearray((tmp_path / "a.bin").read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    (tmp_path / "a.bin").write_bytes(content)
    with pytest.raises(UsageError, match="a.bin is truncated, damaged, or not a token file"):
        read_bin(tmp_path / "a.bin", 257)


def test_the_tokenizer_of_a_prepared_file_is_known(tmp_path):
    write_bin(tmp_path / "a.bin", np.arange(600) % 256, 257)
    assert len(read_bin(tmp_path / "a.bin", 257)) == 600
    with pytest.raises(UsageError, match="a vocabulary of 257, not of 50257: use the --token"):
        read_bin(tmp_path / "a.bin", 50257)


@pytest.mark.parametrize("name, words", [
    ("gpt2.bin", "tokens of 4 bytes"), ("long.bin", "tokens of 4 bytes"),
    ("llama3.bin", "tokens of 4 bytes"), ("zeros.bin", None), ("few.bin", None)])
def test_token_files_of_4_bytes_are_told(tmp_path, name, words):
    """Raw ones, and llm.c's of Llama 3. Tokens of 2 bytes that are all small stay what they are."""
    tokens = np.random.default_rng(0).integers(0, 50257, 5000)
    header = np.zeros(256, "<i4")
    header[:3] = 20240801, 7, 5000
    contents = {"gpt2.bin": tokens.astype("<u4"), "long.bin": tokens.astype("<i8"),
                "llama3.bin": np.append(header, (tokens + 2**16).astype("<i4")),
                "zeros.bin": np.zeros(9000, "<u2"), "few.bin": tokens.astype("<u2") % 4}
    contents[name].tofile(tmp_path / name)
    if words:
        with pytest.raises(UsageError, match=f"{name} has {words}"):
            read_bin(tmp_path / name, 50257)
    else:
        read_bin(tmp_path / name, 50257)


def test_characters_numbered_by_nanogpt_are_not_taken_for_bytes(tmp_path):
    """Its character-level example has meta.pkl beside train.bin. A header would know better."""
    write(tmp_path, {"train.bin": np.arange(600) % 65, "meta.pkl": b"\x80"})
    with pytest.raises(UsageError, match="train.bin has nanoGPT's numbers .*meta.pkl.*--data"):
        data_of(tmp_path, T=9)
    write_bin(tmp_path / "train.bin", np.arange(600) % 256, 257)
    assert len(data_of(tmp_path, T=9)[0]) == 63


def test_a_token_file_that_is_cut_short_in_training_is_named(tmp_path):
    """Everything that is gone, or the end of a sequence."""
    training, _ = data_of(write(tmp_path, {"a.bin": np.arange(600) % 256}), T=9)
    for size in (100, 0):
        with open(tmp_path / "a.bin", "r+b") as file:
            file.truncate(size)
        with pytest.raises(UsageError, match="a.bin has become shorter since this run began"):
            training[5]


@pytest.mark.skipif(not os.path.isdir("/dev/fd"), reason="counts open files the Unix way")
def test_no_token_file_stays_open(tmp_path):
    write(tmp_path, {f"{n}.bin": np.full(1000, n) for n in range(40)})
    before = len(os.listdir("/dev/fd"))
    training, _ = data_of(tmp_path, T=10)
    assert len({int(training[n][0]) for n in range(len(training))}) == 40
    assert len(os.listdir("/dev/fd")) == before
