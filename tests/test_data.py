"""Tests of support/data.py: which files are used for what, and the order of sequences."""
import io
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
from tests.helpers import arrays_of, data_of, write

WHY = "empty, not UTF-8, a dangling link, named twice, or beside token files"

# ------------------------------------------------------------------------------------ files

@pytest.mark.parametrize("name, wanted", [
    ("data/val.bin", True), ("data/fineweb_val_000000.bin", True), ("data/x_val.bin", True),
    ("data/val/a.txt", True), ("data/val/deep/a.bin", True), ("data/train/a_train_1.bin", False),
    ("data/interval.bin", False), ("data/a_val_b.txt", False), ("data/valley/a.txt", False)])
def test_validation_files_are_known_by_their_names(tmp_path, name, wanted):
    """A folder val above --data's does not count."""
    root = tmp_path / "val/data"
    write(tmp_path / "val", {name: "12" * 30})
    uses = dict(files_of([root]))
    assert list(uses.values()) == ["val" if wanted else "train"]


def test_a_named_file_or_folder_val_is_held_out_too(tmp_path):
    write(tmp_path, {"val/a.txt": "a", "val/deep/b.txt": "b", "c.txt": "c"})
    for name in ("val", "val/a.txt"):
        assert {use for _, use in files_of([tmp_path / name])} == {"val"}


def test_of_a_folder_of_nanogpt_the_token_files_are_taken(tmp_path, capsys):
    """Its text, their source, is skipped; val.bin is held out."""
    write(tmp_path, {"input.txt": "x" * 999, "train.bin": np.arange(100), "prepare.py": "import os",
                     "readme.md": "# data", "deep/more.bin": np.arange(50), "meta.pkl": b"\x80",
                     "val.bin": np.arange(100, 150)})
    training, held_out = data_of(tmp_path, T=9)
    assert [a.astype(int).tolist() for a in arrays_of(training)] == [[*range(50)], [*range(100)]]
    assert [a.astype(int).tolist() for a in arrays_of(held_out)] == [[*range(100, 150)]]
    lines = [f"{tmp_path}: 3 token files, 400 bytes; held out: val.bin",
             f"skipped input.txt, meta.pkl, prepare.py and 1 more: {WHY}"]
    assert capsys.readouterr().out.splitlines() == lines


def test_texts_in_a_folder_val_are_held_out_whatever_else_there_is(tmp_path, capsys):
    files = {f"train/{n:02}.txt": "t" * 50 for n in range(40)}
    write(tmp_path, files | {"val/a.txt": "v" * 30, "val/b.txt": "v" * 30})
    training, held_out = data_of(tmp_path, T=9)
    assert set(arrays_of(training)[0]) == {ord("t"), 256}
    assert len(arrays_of(training)[0]) == 40 * 51
    assert arrays_of(held_out)[0].tolist() == [ord("v")] * 30 + [256] + [ord("v")] * 30 + [256]
    line = f"{tmp_path}: 42 text files, 2,060 bytes; held out: a.txt, b.txt\n"
    assert capsys.readouterr().out == line


def test_a_line_says_what_was_found(tmp_path, capsys):
    files = {f"{n}.txt": "t" * 50 for n in range(20)} | {"b.bin": np.zeros(50)}
    write(tmp_path, files)
    data_of(*(tmp_path / name for name in files), T=9)
    words = "20 text files and 1 token file, 1,100 bytes; held out: every 20th text file, the last"
    assert words in capsys.readouterr().out


def test_a_folder_of_sources_may_hold_other_files(tmp_path, capsys):
    files = {"a.py": b"a = 1\n" * 99, "__init__.py": b"", "b.pyc": b"\xff\x00\xfe",
             ".hidden": b"text", "deep/c.txt": b"text"}
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert [p.name for p, use in files_of([str(tmp_path)]) if use] == ["a.py", "c.txt"]
    data_of(tmp_path, T=8)
    lines = [f"{tmp_path}: 2 text files, 598 bytes; held out: the last twentieth",
             f"skipped __init__.py, b.pyc: {WHY}"]
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
    a, b = arrays_of(training)[0].tolist(), arrays_of(held_out)[0].tolist()
    assert a[:32] == [65] * 30 + [256, 66]
    assert b == [65 + 19] * 30 + [256] + [65 + 39] * 30 + [256]
    assert set(a) & set(b) == {256}


def test_held_out_tokens_are_not_trained_on(tmp_path):
    """With a token file and one text, the last twentieth of each is held out."""
    np.arange(5000, dtype="<u2").tofile(tmp_path / "a.bin")
    (tmp_path / "b.txt").write_text("".join(chr(0x4E00 + n) for n in range(3000)))
    tokenizer = tiktoken.Encoding(
        "wide", pat_str="(?s:.)", mergeable_ranks={bytes([i]): i for i in range(256)},
        special_tokens={"<|endoftext|>": 6000})
    args = SimpleNamespace(data=[str(tmp_path / "a.bin"), str(tmp_path / "b.txt")], seq_len=16)
    training, held_out = get_data(args, tokenizer, list(files_of(args.data)))
    sizes = [(len(a), len(b)) for a, b in zip(arrays_of(training), arrays_of(held_out))]
    assert sizes == [(9001 - 450, 450), (4750, 250)]
    assert arrays_of(training)[1].astype(int).tolist() == list(range(4750))
    assert arrays_of(held_out)[1].astype(int).tolist() == list(range(4750, 5000))


# -------------------------------------------------------------------------------- bad paths

def test_what_is_no_text_is_explained(tmp_path):
    write(tmp_path, {"a.jsonl": "{}", "deep/b.pyc": b"\xff"})
    for name, message in (("no", "no does not exist"), ("/dev/null", "or is not a file"),
                          ("deep", "deep: nothing to train on"),
                          ("a.jsonl", "python -m support.prepare turns it into token files")):
        with pytest.raises(UsageError, match=message):
            data_of(tmp_path / name, T=9)


def test_a_link_is_no_second_text(tmp_path, capsys):
    """Of a file and its links the first counts; dangling ones are skipped."""
    write(tmp_path, {"data/b.txt": "b" * 99, "elsewhere.txt": "e" * 99})
    for name, target in {"a.txt": "b.txt", "c.txt": "../elsewhere.txt", "d.txt": "../elsewhere.txt",
                         "e.txt": "nothing"}.items():
        (tmp_path / "data" / name).symlink_to(target)
    found = {path.name: use for path, use in files_of([str(tmp_path / "data")])}
    assert found == {"a.txt": "train", "b.txt": None, "c.txt": "train", "d.txt": None,
                     "e.txt": None}
    twice = [str(tmp_path / "data/b.txt"), str(tmp_path / "data/a.txt")]
    assert [use for _, use in files_of(twice)] == ["train", None]
    data_of(tmp_path / "data", T=8)
    assert "skipped b.txt, d.txt, e.txt: empty," in capsys.readouterr().out


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
    assert [[path, size, use] for path, size, _, use in found] == [
        [paths[0], 99, "train"], [paths[1], 1, "val"]]
    file = io.BytesIO()
    torch.save({"files": found}, file)
    file.seek(0)
    assert torch.load(file, weights_only=True)["files"] == found
    monkeypatch.chdir("data")
    check_fingerprint(found, fingerprint(files_of(["../data"])))


def test_fingerprints_of_what_is_no_path(tmp_path, monkeypatch):
    write(tmp_path, {"a.py": "a", "deep/b.py": "b", "test/c.py": "c"})
    monkeypatch.setattr(support.data.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    assert fingerprint(files_of(["abcdigits"])) == []
    assert len(fingerprint(files_of(["stdlib"]))) == 2


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


def test_a_file_that_becomes_a_link_keeps_its_place_and_its_use(tmp_path):
    """DVC and git-annex make such links: the same content, kept elsewhere."""
    folder = write(tmp_path / "data", {f"{n:02}.txt": chr(65 + n) * 30 for n in range(40)})
    old, before = fingerprint(files_of([folder])), data_of(folder, T=8)
    for name in ("19.txt", "05.txt"):
        (folder / name).rename(tmp_path / name)
        (folder / name).symlink_to(tmp_path / name)
    check_fingerprint(old, fingerprint(files_of([folder])))
    for a, b in zip(before, data_of(folder, T=8)):
        assert [x.tolist() for x in arrays_of(a)] == [x.tolist() for x in arrays_of(b)]


def test_fingerprints_in_another_order_or_of_another_use_differ(tmp_path):
    folder = write(tmp_path, {f"{n}.txt": str(n) * 30 for n in range(4)})
    old = fingerprint(files_of([folder]))
    with pytest.raises(UsageError, match=".*3.txt comes before .*0.txt"):
        check_fingerprint(old, old[::-1])
    with pytest.raises(UsageError, match="3.txt has changed"):
        check_fingerprint(old, [*old[:3], [*old[3][:3], "val"]])


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
    tokens = np.arange(300, dtype=np.uint16)
    data = Sequences([(tokens, 0, 100), (tokens, 200, 251)], 10, "test")
    assert len(data) == 9 + 5
    drawn = [data.draw(n, seed=4) for n in range(28)]
    for x in drawn:
        assert len(x) == 11
        assert (np.diff(x) == 1).all()
    starts = [int(x[0]) for x in drawn]
    for epoch in (starts[:14], starts[14:]):
        assert sorted(epoch) == [*range(0, 90, 10), *range(200, 250, 10)]
    assert starts[:14] != starts[14:]
