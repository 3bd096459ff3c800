"""Tests of support/tokens.py: tokenizers, files, sequences, the stream of ABCDigits."""
import re
from types import SimpleNamespace

import numpy as np
import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st

import support.tokens
from support.cli import UsageError
from support.tokens import (
    FLAT_AFTER,
    NEAR,
    ABCDigitsStream,
    Sequences,
    files_of,
    get_data,
    get_tokenizer,
    permute,
    read_bin,
    standard_library,
)


def data_of(*paths, T):
    """(training data, validation data) of `--data PATHS --seq-len T`."""
    args = SimpleNamespace(data=[str(path) for path in paths], seq_len=T)
    return get_data(args, get_tokenizer("bytes"))


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


# ------------------------------------------------------------------------------------ files

def test_token_files_of_both_formats(tmp_path):
    tokens = np.random.default_rng(0).integers(0, 50257, 5000).astype("<u2")
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, 5000
    (tmp_path / "nano.bin").write_bytes(tokens.tobytes())
    (tmp_path / "llmc.bin").write_bytes(header.tobytes() + tokens.tobytes())
    for name in ("nano.bin", "llmc.bin"):
        a = read_bin(tmp_path / name, 50257)
        assert isinstance(a, np.memmap)
        assert np.array_equal(a, tokens)


def test_a_folder_of_sources_may_hold_other_files(tmp_path, capsys):
    files = {"a.py": b"a = 1\n" * 99, "__init__.py": b"", "b.pyc": b"\xff\x00\xfe",
             ".hidden": b"text", "deep/c.txt": b"text"}
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert [p.name for p in files_of([str(tmp_path)])] == ["a.py", "c.txt"]
    assert "2 files left out" in capsys.readouterr().out
    with pytest.raises(UsageError, match="empty"):
        data_of(tmp_path / "__init__.py", T=8)


def test_the_standard_library_is_found_without_its_tests():
    texts = list(standard_library())
    assert len(texts) > 100
    assert sum(map(len, texts)) > 5e6
    assert sum("import unittest" in text for text in texts) < 0.05 * len(texts)


def test_documents_are_joined_by_end_of_text_and_whole_ones_are_held_out(tmp_path):
    for n in range(40):
        (tmp_path / f"{n:02}.txt").write_text(chr(65 + n) * 30)
    training, held_out = data_of(tmp_path, T=8)
    a, b = training.arrays[0].tolist(), held_out.arrays[0].tolist()
    assert a[:32] == [65] * 30 + [256, 66]
    assert b == [65 + 19] * 30 + [256] + [65 + 39] * 30 + [256]
    assert set(a) & set(b) == {256}


def test_held_out_tokens_are_not_trained_on(tmp_path):
    """A token file and one text: of each the last twentieth is held out."""
    np.arange(5000, dtype="<u2").tofile(tmp_path / "a.bin")
    (tmp_path / "b.txt").write_text("".join(chr(0x4E00 + n) for n in range(3000)))
    tokenizer = tiktoken.Encoding(
        "wide", pat_str="(?s:.)", mergeable_ranks={bytes([i]): i for i in range(256)},
        special_tokens={"<|endoftext|>": 6000})
    args = SimpleNamespace(data=[str(tmp_path / "a.bin"), str(tmp_path / "b.txt")], seq_len=16)
    training, held_out = get_data(args, tokenizer)
    sizes = [(len(a), len(b)) for a, b in zip(training.arrays, held_out.arrays)]
    assert sizes == [(9001 - 450, 450), (4750, 250)]
    assert training.arrays[1].tolist() == list(range(4750))
    assert held_out.arrays[1].tolist() == list(range(4750, 5000))


# -------------------------------------------------------------------------------- sequences

@given(n=st.integers(1, 3000), key=st.tuples(st.integers(0, 2**32), st.integers(0, 5)))
def test_permute_is_a_permutation(n, key):
    assert sorted(permute(i, n, key) for i in range(n)) == list(range(n))


def test_permutations_differ_by_seed_and_by_epoch_and_look_random():
    keys = ((0, 0), (0, 1), (1, 0), (1, 1), (2, 0))
    orders = [[permute(i, 1000, key) for i in range(1000)] for key in keys]
    assert len(set(map(tuple, orders))) == 5
    for order in orders:
        assert abs(np.corrcoef(order, range(1000))[0, 1]) < 0.12
        assert np.mean(np.diff(order) == 1) < 0.01
    assert permute(10**11, 153 * 10**9, (0, 0)) < 153 * 10**9


def test_sequences_cover_the_text_without_replacement():
    arrays = [np.arange(100, dtype=np.uint16), np.arange(200, 251, dtype=np.uint16)]
    data = Sequences(arrays, 10, "test")
    assert len(data) == 9 + 5
    drawn = [data.draw(n, seed=4) for n in range(28)]
    for x in drawn:
        assert len(x) == 11
        assert (np.diff(x) == 1).all()
    starts = [int(x[0]) for x in drawn]
    for epoch in (starts[:14], starts[14:]):
        assert sorted(epoch) == [*range(0, 90, 10), *range(200, 250, 10)]
    assert starts[:14] != starts[14:]


# ------------------------------------------------------------------- the stream of ABCDigits

def stream_of(T, digits, part=0):
    return ABCDigitsStream(get_tokenizer("bytes"), T, digits, seed=5, part=part)


def texts_of(stream, n):
    return [stream.tokenizer.decode(stream[i].tolist()) for i in range(n)]


def test_the_abcdigits_stream_is_the_task():
    stream = stream_of(400, 3)
    most_frequent = []
    for text in texts_of(stream, 50):
        assert len(text) == 401
        rows = text.split("\n")[:-1]
        assert all(re.fullmatch(r"[A-Z]=[1-9]\d\d", row) for row in rows)
        letters = [row[0] for row in rows]
        assert len(set(rows)) == len(set(letters))             # one number a letter
        most_frequent.append(max(map(letters.count, letters)) / len(rows))
    assert 0.4 < np.mean(most_frequent) < 0.6                  # the weights 2^i: half of the lines


def test_the_abcdigits_stream_can_be_continued_and_its_held_out_part_is_apart():
    stream = stream_of(400, 3)
    texts = texts_of(stream, 50)
    assert len(set(texts)) == 50
    assert texts_of(stream_of(400, 3), 50) == texts
    stream.learned = FLAT_AFTER                                # as even as what is held out
    assert not set(texts_of(stream_of(400, 3, part=1), 50)) & set(texts_of(stream, 50))


def test_half_of_the_digits_are_the_letters_own_at_first():
    """The same in all documents; later none is, nor in what is held out."""
    stream, held_out = stream_of(400, 6), stream_of(400, 6, part=1)

    def share(stream):
        rows = [row for text in texts_of(stream, 200) for row in set(text.split("\n")[:-1])]
        own = []
        for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ":
            for place in zip(*(row[3:] for row in rows if row[0] == letter)):
                own.append(max(map(place.count, place)) / len(place))
        return (np.mean(own) - 0.1) / 0.9                      # a tenth is right by chance

    assert share(stream) == pytest.approx(0.5, abs=0.05)
    by_chance = share(held_out)                                # the most frequent of ten digits
    assert by_chance < 0.12
    stream.learned = FLAT_AFTER // 4
    assert share(stream) == pytest.approx(0.25, abs=0.07)
    stream.learned = FLAT_AFTER // 2
    assert share(stream) < 0.12


def test_each_digit_is_the_letters_own_or_not_by_itself():
    """So the first digit does not tell the second: both are predicted from the letter."""
    stream = stream_of(400, 2)
    rows = [row for text in texts_of(stream, 300) for row in set(text.split("\n")[:-1])]
    own = np.array([list(row[2:]) == stream.own[ord(row[0]) - 65] for row in rows])
    first, second = own.T
    assert second[first].mean() == pytest.approx(0.55, abs=0.05)
    assert second[~first].mean() == pytest.approx(0.55, abs=0.05)


@pytest.mark.parametrize("learned", [0, FLAT_AFTER // 4, FLAT_AFTER])
def test_the_least_loss_is_that_of_one_who_knows_the_rules(learned):
    """Each line costs its letter's entropy, and a new letter that of its number."""
    stream = stream_of(256, 2)
    stream.learned = learned
    rows = [text.split("\n")[:-1] for text in texts_of(stream, 200)]
    weights = stream.base ** np.arange(26)
    first, second = (np.full(n, (1 - stream.share) / n) for n in (9, 10))
    first[0] += stream.share                                   # the letter's own
    second[0] += stream.share

    def entropy(weights):
        p = weights / weights.sum()
        return -p @ np.log(p)

    number = entropy(first) + entropy(second)
    nats = [len(r) * entropy(weights) + len(set(r)) * number for r in rows]
    assert stream.least_loss() == pytest.approx(np.mean(nats) / 256, abs=0.01)


def test_the_stream_becomes_flatter_while_the_loss_is_near_the_least():
    stream, held_out = stream_of(256, 2), stream_of(256, 2, part=1)

    def share_of_needles():
        return np.mean([stream.needles(stream[n]).mean() for n in range(50)])

    assert stream.base == 2
    assert held_out.base == 1.1
    first, early = stream[3], share_of_needles()
    stream.observe(stream.least_loss() + 1.01 * NEAR, 1000)    # far from it: nothing happens
    assert stream.base == 2
    stream.observe(stream.least_loss() + 0.99 * NEAR, FLAT_AFTER // 3)
    assert stream.base == pytest.approx(1.7)
    stream.observe(0.0, FLAT_AFTER)
    assert stream.base == 1.1
    assert held_out.base == 1.1
    assert share_of_needles() > 2 * early
    stream.learned = 0
    assert np.array_equal(stream[3], first)


def test_needles_are_the_digits_of_a_letter_with_one_earlier_line():
    stream = stream_of(256, 2)
    text = "A=12\nB=34\nA=12\nA=12\nB=34\nC=56\nB=3"
    wanted = "....." + "....." + "..XX." + "....." + "..XX." + "....." + "..."
    mask = stream.needles(np.array(list(text.encode())))
    assert "".join(".X"[int(x)] for x in mask) == wanted[1:]


def test_needles_are_counted_in_whole_documents():
    stream = stream_of(256, 2, part=1)
    counted = sum(stream.needles(stream[n]).sum() for n in range(100))
    by_hand = 0
    for text in texts_of(stream, 100):
        rows = re.findall(r"[A-Z]=\d\d", text)
        by_hand += sum(2 for i, row in enumerate(rows) if rows[:i].count(row) == 1)
    assert by_hand <= counted <= by_hand + 100                 # a last number may be cut off
