"""Tests of support/tokens.py: tokenizers and token files."""
import os
import time

import numpy as np
import pytest
import tiktoken

import abcdigits
import support.data
import support.tokens
import train
from course.playground import __main__ as playground
from lab import copying, passkey, perplexity, sample, tiles
from lab.benchmarks import cpu
from support.cli import UsageError
from support.prepare import write_bin
from support.tokens import encode_document, get_tokenizer, read_bin
from tests.helpers import SMALL, data_of, fit, read_table, write

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
    ("gpt2.bin", "tokens of 4 bytes or more each, expected 2 for a vocabulary of 50257: write"),
    ("long.bin", "tokens of 4 bytes"),
    ("llama3.bin", "tokens beyond the vocabulary of 50257, if each has 4 bytes"),
    ("zeros.bin", None), ("few.bin", None)])
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
    words = "train.bin has nanoGPT's numbers .*meta.pkl.*--data, .*or .* --tokenizer 65"
    with pytest.raises(UsageError, match=words):
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


# -------------------------------------------------------------------- a vocabulary of your own

NOTES = np.arange(4000) * 7 % 65                       # each is 7 more than the one before
NUMBERS = ["--tokenizer", "65"]


@pytest.fixture
def notes(tmp_path):
    """A folder as nanoGPT's character-level example has it: 65 symbols, and what explains them."""
    return write(tmp_path / "notes", {"train.bin": NOTES, "val.bin": NOTES[:500],
                                      "meta.pkl": b"\x80", "input.txt": "the text itself"})


def test_a_number_is_the_size_of_a_vocabulary_of_numbers():
    tokenizer = get_tokenizer("65")
    assert (tokenizer.n_vocab, tokenizer.name) == (65, "65")
    assert tokenizer.encode_ordinary(" 12 7\n64 ") == [12, 7, 64]
    assert tokenizer.encode_ordinary(tokenizer.decode([0, 64, 7])) == [0, 64, 7]
    for text, word in (("12 65", "65"), ("7 -1", "-1"), ("C4 E4", "C4"), ("1, 2", "1,"),
                       ("1 ²", "²"), ("9" * 9999, "9")):
        with pytest.raises(UsageError, match=f"'{word}.* numbers from 0 to 64, with spaces"):
            tokenizer.encode_ordinary(text)
    for name in ("0", "-65", "6.5", "065", "９", "9" * 10):
        with pytest.raises(UsageError, match="is unknown"):
            get_tokenizer(name)


def test_a_run_on_numbers_goes_on_and_its_samples_are_numbers(notes, tmp_path, call, capsys):
    fit(tmp_path / "out", "--steps", "2", *NUMBERS, data=notes)
    said = capsys.readouterr().out
    assert "next: python -m lab.sample --prompt 0 --ckpt" in said
    begin = said.split("held-out tokens:\n")[1].split("\n")[0].split()
    assert [*map(int, begin[:32])] == NOTES[:32].tolist()
    assert 32 < len(begin) <= 36
    assert all(int(word) < 65 for word in begin)

    # No token has bytes, so the log and the line leave them out.
    ckpt = fit(tmp_path / "out", "--steps", "4", "--resume", data=notes)
    said = capsys.readouterr().out
    assert "validation loss" in said
    assert "bits per byte" not in said
    rows = [row for row in read_table(tmp_path / "out/log.tsv") if row["val_loss"]]
    assert [(row["step"], row["val_bpb"]) for row in rows] == [("2", ""), ("4", "")]
    assert ckpt["config"]["vocab_size"] == 65

    flags = ["--ckpt", tmp_path / "out/ckpt.pt", "--device", "cpu", "--tokens", 5]
    call(sample, *flags, "--prompt", "12 7")
    numbers = capsys.readouterr().out.split()
    assert numbers[:2] == ["12", "7"]
    assert len(numbers) == 7
    assert all(int(word) < 65 for word in numbers)
    for prompt, words in (("", "--prompt"), ("def f(", "'def' is not in the vocabulary")):
        with pytest.raises(UsageError, match=words) as e:
            call(sample, *flags, "--prompt", prompt)
        assert "\n" not in str(e.value)


def test_a_model_of_numbers_is_timed_but_not_asked_in_words(notes, tmp_path, call):
    fit(tmp_path / "out", "--steps", "1", *NUMBERS, data=notes)
    write(tmp_path, {"12.txt": "12 7 " * 999})
    flags = ["--ckpt", tmp_path / "out/ckpt.pt", "--device", "cpu"]
    for script, more in ((abcdigits, ()), (passkey, ()), (copying, ()), (tiles, ()),
                         (perplexity, ["--data", "12.txt"])):
        with pytest.raises(UsageError, match="ckpt.pt needs a tokenizer of text, .* 65 only") as e:
            call(script, *flags, *more)
        assert "\n" not in str(e.value)
    with pytest.raises(UsageError, match="with --tokenizer 65: the page needs a multiscreen model"):
        playground.main([*map(str, flags), "--out", "page.html"])
    call(cpu, *flags[:2], "--psi", 2, "--models", "multiscreen", "--repeats", 1,
         "--what", "forward", "--lengths", 32)
    assert read_table(tmp_path / "out/latency.tsv")[0]["setting"] == "trained"


@pytest.mark.parametrize("data, what", [
    ("stdlib", ".*.py"), ("abcdigits", "--data abcdigits"), ("passkey", "--data passkey"),
    ("notes/input.txt", ".*input.txt"), ("texts", ".*a.txt")])
def test_numbers_are_not_for_text(notes, monkeypatch, data, what):
    monkeypatch.chdir(notes.parent)
    write(notes.parent, {"texts/a.txt": "12 7 " * 99, "texts/b.txt": "12 7 " * 99})
    with pytest.raises(UsageError, match=f"^{what} needs a tokenizer of text, bytes or gpt2") as e:
        train.main([*SMALL, "--data", data, "--out", "out", *NUMBERS])
    assert "\n" not in str(e.value)
    assert not (notes.parent / "out").exists()


@pytest.mark.parametrize("name, N", [("raw", 70_000), ("llama3", 70_000), ("llama3", 65)])
def test_tokens_of_4_bytes(tmp_path, name, N):
    """Raw if the vocabulary needs them, and behind llm.c's header of Llama 3 for any vocabulary."""
    tokens = (np.arange(3000) * 7919 % N).astype("<u4")
    header = np.zeros(256, "<i4")
    header[:3] = 20240801, 7, 3000
    content = (header.tobytes() if name == "llama3" else b"") + tokens.tobytes()
    write(tmp_path, {"a.bin": content})
    found = read_bin(tmp_path / "a.bin", N, numbers=True)
    assert len(found) == 3000
    assert np.array_equal(found[:], tokens)
    assert np.array_equal(found[1905:1909], tokens[1905:1909])
    assert fit(tmp_path / "out", "--steps", "1", "--tokenizer", str(N), data=tmp_path)["step"] == 1
    write(tmp_path, {"a.bin": content[:-2]})
    with pytest.raises(UsageError, match="a.bin is truncated, damaged, or not a token file"):
        read_bin(tmp_path / "a.bin", N, numbers=True)


@pytest.mark.parametrize("dtype, N, words", [
    ("<u4", 65, "4 bytes or more each, expected 2"), ("<u4", 4, "4 bytes or more each, expected 2"),
    ("<i8", 65, "4 bytes"), ("<i8", 70_000, "8 bytes or more each, expected 4"),
    ("<u2", 70_000, "beyond the vocabulary of 70000, if each has 4 bytes")])
def test_numbers_of_another_width_are_told(tmp_path, dtype, N, words):
    tokens = np.random.default_rng(0).integers(1, min(N, 2**16), 5000).astype(dtype)
    tokens.tofile(tmp_path / "a.bin")
    with pytest.raises(UsageError, match=words):
        read_bin(tmp_path / "a.bin", N, numbers=True)


def test_pairs_of_a_large_and_a_small_number_are_tokens(tmp_path):
    """Such as a pitch and one of four durations."""
    g = np.random.default_rng(0)
    pairs = np.stack([g.integers(4, 65, 3000), g.integers(0, 4, 3000)], 1)
    write(tmp_path, {"a.bin": pairs.ravel()})
    assert len(read_bin(tmp_path / "a.bin", 65, numbers=True)) == 6000
