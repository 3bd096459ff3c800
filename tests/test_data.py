"""Tests of support/data.py and stream.py: files, tokenizers, sequences, the ABCDigits stream."""
import io
import os
import re
import time
from types import SimpleNamespace

import numpy as np
import pytest
import tiktoken
import torch
from hypothesis import given
from hypothesis import strategies as st

import support.data
import support.tokens
from support.cli import UsageError
from support.data import (
    Sequences,
    check_fingerprint,
    files_of,
    fingerprint,
    get_data,
    permute,
    read_text,
    standard_library,
)
from support.stream import FLAT_AFTER, NEAR, ABCDigitsStream
from support.tokens import check_sums, encode_document, get_tokenizer, read_bin, write_bin


def data_of(*paths, T):
    """(training data, validation data) of `--data PATHS --seq-len T`."""
    args = SimpleNamespace(data=[str(path) for path in paths], seq_len=T)
    return get_data(args, get_tokenizer("bytes"), list(files_of(args.data)))


def write(folder, files):
    """Write files, by name: text, bytes, or an array of tokens. Returns the folder."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, np.ndarray):
            content = content.astype("<u2").tobytes()
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


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
    """A tokenizer by words that has merges and a special token."""
    ranks = {bytes([i]): i for i in range(256)} | {b" a": 256, b"aa": 257, b"<|": 258}
    words = r" ?\p{L}+|\s+|[^\s\p{L}]+"
    return tiktoken.Encoding("like-gpt2", pat_str=words, mergeable_ranks=ranks,
                             special_tokens={"<|endoftext|>": 300})


@pytest.mark.parametrize("make", [gpt2_like, lambda: get_tokenizer("bytes")])
@pytest.mark.parametrize("text", ["naïve aa 𝄞\r\n", "<|endoftext|>", ""])
def test_a_document_is_its_tokens_and_end_of_text(make, text):
    """What looks like a special token is ordinary text."""
    tokenizer = make()
    tokens = encode_document(text, tokenizer)
    assert tokens.dtype == np.uint16
    assert tokens.tolist() == [*tokenizer.encode_ordinary(text), tokenizer.eot_token]


def test_a_byte_that_is_not_utf8_is_named_by_its_place(tmp_path):
    text = "a" * 9999 + "𝄞" * 10
    write(tmp_path, {"bad": text.encode() + b"\xff..", "cut": text.encode()[:-1]})
    for name, message in (("bad", "byte 10039 is 0xff"), ("cut", "byte 10035 is 0xf0")):
        with pytest.raises(UsageError, match=message) as e:
            data_of(tmp_path / name, T=8)
        assert "\n" not in str(e.value)


# ------------------------------------------------------------------------------------ files

def test_token_files_of_both_formats(tmp_path):
    tokens = np.random.default_rng(0).integers(0, 50257, 5000).astype("<u2")
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, 5000
    (tmp_path / "nano.bin").write_bytes(tokens.tobytes())
    (tmp_path / "llmc.bin").write_bytes(header.tobytes() + tokens.tobytes())
    for name in ("nano.bin", "llmc.bin"):
        a = read_bin(tmp_path / name, 50257)
        assert np.array_equal(a.astype(np.uint16), tokens)
        assert np.array_equal(a[100:-100][5:9].astype(np.int64), tokens[105:109])


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


def test_a_token_file_that_shrinks_or_goes_is_an_error_in_one_line(tmp_path):
    training, _ = data_of(write(tmp_path, {"a.bin": np.zeros(10_000)}), T=10)
    os.truncate(tmp_path / "a.bin", 9001)
    assert len(training[448]) == 11
    with pytest.raises(UsageError, match="a.bin has shrunk"):
        training[449]
    (tmp_path / "a.bin").unlink()
    with pytest.raises(FileNotFoundError):
        training[448]


@pytest.mark.skipif(not os.path.isdir("/dev/fd"), reason="counts open files the Unix way")
@pytest.mark.parametrize("bit", [*range(32), 32, 39, 64, 70])
def test_a_flipped_bit_of_a_header_is_found_at_the_start(tmp_path, bit):
    """Of the magic number, the version, the number of tokens."""
    write_bin(tmp_path / "a.bin", np.arange(600) % 256)
    content = bytearray((tmp_path / "a.bin").read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    (tmp_path / "a.bin").write_bytes(content)
    with pytest.raises(UsageError, match="a.bin is truncated, damaged, or not a token file"):
        read_bin(tmp_path / "a.bin", 257)


def test_what_changed_since_a_token_file_was_written_is_found(tmp_path, capsys):
    for name in ("a.bin", "b.bin", "c.bin"):
        write_bin(tmp_path / name, np.arange(600) % 256)
    check_sums(tmp_path)
    assert "3 files are as they were written" in capsys.readouterr().out
    content = bytearray((tmp_path / "b.bin").read_bytes())
    content[1500] ^= 1
    (tmp_path / "b.bin").write_bytes(content)
    (tmp_path / "c.bin").unlink()
    (tmp_path / "d.bin").write_bytes(b"1234")
    with pytest.raises(UsageError) as e:
        check_sums(tmp_path)
    assert "b.bin has changed, c.bin is missing, d.bin has no line" in str(e.value)


def test_no_token_file_stays_open(tmp_path):
    write(tmp_path, {f"{n}.bin": np.full(1000, n) for n in range(40)})
    before = len(os.listdir("/dev/fd"))
    training, _ = data_of(tmp_path, T=10)
    assert len({int(training[n][0]) for n in range(len(training))}) == 40
    assert len(os.listdir("/dev/fd")) == before


@pytest.mark.parametrize("name, wanted", [
    ("data/val.bin", True), ("data/fineweb_val_000000.bin", True), ("data/x_val.bin", True),
    ("data/val/a.txt", True), ("data/val/deep/a.bin", True), ("data/train/a_train_1.bin", False),
    ("data/interval.bin", False), ("data/a_val_b.txt", False), ("data/valley/a.txt", False)])
def test_validation_files_are_known_by_their_names(tmp_path, name, wanted):
    """A folder val above the one that --data names has no say."""
    root = tmp_path / "val/data"
    write(tmp_path / "val", {name: "12" * 30})
    uses = dict(files_of([root]))
    assert list(uses.values()) == ["val" if wanted else "train"]


def test_a_named_file_or_folder_val_is_held_out_too(tmp_path):
    write(tmp_path, {"val/a.txt": "a", "val/deep/b.txt": "b", "c.txt": "c"})
    for name in ("val", "val/a.txt"):
        assert {use for _, use in files_of([tmp_path / name])} == {"val"}


def test_of_a_folder_of_nanogpt_the_token_files_are_taken(tmp_path, capsys):
    """Its text is what they were made from; val.bin is held out."""
    write(tmp_path, {"input.txt": "x" * 999, "train.bin": np.arange(100), "prepare.py": "import os",
                     "readme.md": "# data", "deep/more.bin": np.arange(50), "meta.pkl": b"\x80",
                     "val.bin": np.arange(100, 150)})
    training, held_out = data_of(tmp_path, T=9)
    assert [a.astype(int).tolist() for a in training.arrays] == [[*range(50)], [*range(100)]]
    assert [a.astype(int).tolist() for a in held_out.arrays] == [[*range(100, 150)]]
    lines = [f"{tmp_path}: files: 3, of tokens: 3, bytes: 400; held out: val.bin",
             "left out as empty, not UTF-8, a link to nothing, there twice, or beside token files: "
             "4 (input.txt, meta.pkl, prepare.py and 1 more)"]
    assert capsys.readouterr().out.splitlines() == lines


def test_texts_in_a_folder_val_are_held_out_whatever_else_there_is(tmp_path, capsys):
    files = {f"train/{n:02}.txt": "t" * 50 for n in range(40)}
    write(tmp_path, files | {"val/a.txt": "v" * 30, "val/b.txt": "v" * 30})
    training, held_out = data_of(tmp_path, T=9)
    assert set(training.arrays[0]) == {ord("t"), 256}
    assert len(training.arrays[0]) == 40 * 51
    assert held_out.arrays[0].tolist() == [ord("v")] * 30 + [256] + [ord("v")] * 30 + [256]
    line = f"{tmp_path}: files: 42, of tokens: 0, bytes: 2,060; held out: a.txt, b.txt\n"
    assert capsys.readouterr().out == line


def test_a_line_says_what_was_found(tmp_path, capsys):
    files = {f"{n}.txt": "t" * 50 for n in range(20)} | {"b.bin": np.zeros(50)}
    write(tmp_path, files)
    data_of(*(tmp_path / name for name in files), T=9)
    words = "files: 21, of tokens: 1, bytes: 1,100; held out: every twentieth text, the last"
    assert words in capsys.readouterr().out


def test_a_folder_of_sources_may_hold_other_files(tmp_path, capsys):
    files = {"a.py": b"a = 1\n" * 99, "__init__.py": b"", "b.pyc": b"\xff\x00\xfe",
             ".hidden": b"text", "deep/c.txt": b"text"}
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert [p.name for p, use in files_of([str(tmp_path)]) if use] == ["a.py", "c.txt"]
    data_of(tmp_path, T=8)
    lines = [f"{tmp_path}: files: 2, of tokens: 0, bytes: 598; held out: the last twentieth",
             "left out as empty, not UTF-8, a link to nothing, there twice, or beside token files: "
             "2 (__init__.py, b.pyc)"]
    assert capsys.readouterr().out.splitlines() == lines
    with pytest.raises(UsageError, match="fewer than one sequence"):
        data_of(tmp_path / "__init__.py", T=8)


def test_the_standard_library_is_found_without_its_tests():
    texts = [read_text(path) for path in standard_library()]
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
    training, held_out = get_data(args, tokenizer, list(files_of(args.data)))
    sizes = [(len(a), len(b)) for a, b in zip(training.arrays, held_out.arrays)]
    assert sizes == [(9001 - 450, 450), (4750, 250)]
    assert training.arrays[1].astype(int).tolist() == list(range(4750))
    assert held_out.arrays[1].astype(int).tolist() == list(range(4750, 5000))


# -------------------------------------------------------------------------------- bad paths

def test_what_is_no_text_is_explained(tmp_path):
    write(tmp_path, {"a.jsonl": "{}", "deep/b.pyc": b"\xff"})
    for name, message in (("no", "no does not exist"), ("/dev/null", "or is no file"),
                          ("deep", "deep: nothing is left to train on"),
                          ("a.jsonl", "python -m support.prepare makes token files")):
        with pytest.raises(UsageError, match=message):
            data_of(tmp_path / name, T=9)


def test_a_link_is_no_second_text(tmp_path, capsys):
    """A link to a file of the data, a second one to another file, one to nothing: left out."""
    write(tmp_path, {"data/b.txt": "b" * 99, "elsewhere.txt": "e" * 99})
    for name, target in {"a.txt": "b.txt", "c.txt": "../elsewhere.txt", "d.txt": "../elsewhere.txt",
                         "e.txt": "nothing"}.items():
        (tmp_path / "data" / name).symlink_to(target)
    found = {path.name: use for path, use in files_of([str(tmp_path / "data")])}
    assert found == {"b.txt": "train", "c.txt": "train", "a.txt": None, "d.txt": None,
                     "e.txt": None}
    twice = [str(tmp_path / "data/b.txt"), str(tmp_path / "data/a.txt")]
    assert [use for _, use in files_of(twice)] == ["train", None]
    data_of(tmp_path / "data", T=8)
    assert "beside token files: 3 (a.txt, d.txt, e.txt)" in capsys.readouterr().out


def test_links_in_circles_are_not_followed(tmp_path):
    write(tmp_path, {"deep/a.txt": "a" * 99})
    (tmp_path / "deep/up").symlink_to("..")
    assert [path.name for path, _ in files_of([tmp_path])] == ["a.txt"]


def test_a_python_without_the_source_of_its_library_is_explained(tmp_path, monkeypatch):
    monkeypatch.setattr(support.data.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(UsageError, match="no source of Python's library"):
        data_of("stdlib", T=9)


# ------------------------------------------------------------------------------ fingerprints

def test_a_fingerprint_is_plain_absolute_and_can_be_kept_in_a_checkpoint(tmp_path, monkeypatch):
    write(tmp_path, {"data/a.txt": "a" * 99, "data/val/b.txt": "b", "data/c.pyc": b"\xff"})
    monkeypatch.chdir(tmp_path)
    found = fingerprint(files_of(["data"]))
    paths = [str(tmp_path / "data/a.txt"), str(tmp_path / "data/val/b.txt")]
    assert [[path, size] for path, size, _ in found] == [[paths[0], 99], [paths[1], 1]]
    file = io.BytesIO()
    torch.save({"files": found}, file)
    file.seek(0)
    assert torch.load(file, weights_only=True)["files"] == found
    monkeypatch.chdir("data")
    check_fingerprint(found, fingerprint(files_of(["../data"])))


def test_fingerprints_of_what_is_no_path():
    assert fingerprint(files_of(["abcdigits"])) == []
    assert len(fingerprint(files_of(["stdlib"]))) == len(standard_library())


@pytest.mark.parametrize("content, message", [
    (b"a" * 10_001, "a.bin has changed"), (b"a" * 9_998, "a.bin has changed"),
    (b"b" + b"a" * 9_999, "a.bin has changed"), (b"a" * 9_999 + b"b", "a.bin has changed"),
    (None, "a.bin is missing")])
def test_a_file_that_is_another_one_now_is_named(tmp_path, content, message):
    write(tmp_path, {"a.bin": b"a" * 10_000, "b.bin": b"b" * 10_000})
    old = fingerprint(files_of([tmp_path]))
    check_fingerprint(old, fingerprint(files_of([tmp_path])))
    (tmp_path / "a.bin").unlink()
    if content:
        write(tmp_path, {"a.bin": content})
    with pytest.raises(UsageError, match=f"{message}$") as e:
        check_fingerprint(old, fingerprint(files_of([tmp_path])))
    assert "b.bin" not in str(e.value)


def test_new_files_are_named_three_at_most(tmp_path):
    old = fingerprint(files_of([write(tmp_path, {"a.txt": "a"})]))
    write(tmp_path, {f"{name}.txt": "b" for name in "bcdef"})
    message = "b.txt is new, .*c.txt is new, .*d.txt is new and 2 more$"
    with pytest.raises(UsageError, match=message):
        check_fingerprint(old, fingerprint(files_of([tmp_path])))


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


def test_own_digits_come_together_in_half_of_the_documents_and_alone_in_the_others():
    """Together: a second digit 0.95 and 0.05; alone: 0.55, whether the first is own or not."""
    stream = stream_of(400, 2)
    rows = [row for text in texts_of(stream, 300) for row in set(text.split("\n")[:-1])]
    own = np.array([list(row[2:]) == stream.own[ord(row[0]) - 65] for row in rows])
    first, second = own.T
    assert second[first].mean() == pytest.approx((0.95 + 0.55) / 2, abs=0.06)
    assert second[~first].mean() == pytest.approx((0.05 + 0.55) / 2, abs=0.06)


@pytest.mark.parametrize("learned", [0, FLAT_AFTER // 4, FLAT_AFTER])
def test_the_least_loss_is_that_of_one_who_knows_the_rules(learned):
    """Each line costs its letter's entropy, and a new letter that of its number."""
    stream = stream_of(256, 2)
    stream.learned = learned
    rows = [text.split("\n")[:-1] for text in texts_of(stream, 200)]
    weights = stream.base ** np.arange(26)
    together, first, second = (np.full(n, (1 - stream.share) / n) for n in (90, 9, 10))
    for p in (together, first, second):
        p[0] += stream.share                                   # the letter's own

    def entropy(weights):
        p = weights / weights.sum()
        return -p @ np.log(p)

    number = (entropy(together) + entropy(first) + entropy(second)) / 2
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
    other = stream_of(256, 2)
    other.load(stream.state())
    assert other.base == stream.base
    stream.learned = 0
    assert np.array_equal(stream[3], first)


def test_needles_are_the_digits_of_a_letter_with_one_earlier_line():
    stream = stream_of(256, 2)
    text = "A=12\nB=34\nA=12\nA=12\nB=34\nC=56\nB=3"
    wanted = "....." + "....." + "..XX." + "....." + "..XX." + "....." + "..."
    mask = stream.needles(np.array(list(text.encode())))
    assert "".join(".X"[int(x)] for x in mask) == wanted[1:]
