"""Tests of support/data.py: which files are used for what, and the order of sequences."""
import io
import os
from types import SimpleNamespace

import numpy as np
import pytest
import tiktoken
import torch
from hypothesis import given
from hypothesis import strategies as st

import support.data
import train
from support.checkpoint import read_checkpoint
from support.cli import UsageError
from support.data import (
    Sequences,
    changed_files,
    files_of,
    fingerprint,
    get_data,
    hash_of,
    permute,
    read_text,
    standard_library,
)
from tests.helpers import SMALL, arrays_of, data_of, write

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
    out = capsys.readouterr().out
    assert f"{tmp_path}: 3 files, 400 bytes; held out: val.bin\n" in out
    assert "skipped input.txt (beside token files), meta.pkl" in out


def test_texts_in_a_folder_val_are_held_out_whatever_else_there_is(tmp_path):
    files = {f"train/{n:02}.txt": "t" * 50 for n in range(40)}
    write(tmp_path, files | {"val/a.txt": "v" * 30, "val/b.txt": "v" * 30})
    training, held_out = data_of(tmp_path, T=9)
    assert set(arrays_of(training)[0]) == {ord("t"), 256}
    assert len(arrays_of(training)[0]) == 40 * 51
    assert arrays_of(held_out)[0].tolist() == [ord("v")] * 30 + [256] + [ord("v")] * 30 + [256]


def test_what_is_skipped_in_a_folder_is_named_with_the_reason(tmp_path, capsys):
    write(tmp_path, {"a.py": "a = 1\n" * 99, "__init__.py": b"", "b.pyc": b"\xff\x00\xfe",
                     ".hidden": "text", ".git/c.txt": "text", "deep/c.txt": "text",
                     "d.jsonl": "{}"})
    (tmp_path / "e.txt").symlink_to("nothing")
    os.mkfifo(tmp_path / "pipe")
    uses = {path.name: use for path, use in files_of([str(tmp_path)])}
    assert uses == {
        "a.py": "train", "c.txt": "train", "__init__.py": "empty", "e.txt": "a link to nothing",
        "b.pyc": "not UTF-8, byte 0 is 0xff", "pipe": "missing, or not a file",
        "d.jsonl": "python -m support.prepare turns it into token files"}
    data_of(tmp_path, T=8)
    lines = ["skipped __init__.py (empty), b.pyc (not UTF-8, byte 0 is 0xff), d.jsonl (python -m "
             "support.prepare turns it into token files) and 2 more",
             f"{tmp_path}: 2 files, 598 bytes; held out: the last twentieth"]
    assert capsys.readouterr().out.splitlines() == lines


@pytest.mark.parametrize("name, reason", [
    ("no", "missing"), ("/dev/null", "not a file"), ("a.jsonl", "support.prepare"),
    ("a.jsonl.gz", "support.prepare"), ("b.parquet", "support.prepare"), ("c.txt", "empty"),
    ("d.txt", "not UTF-8, byte 9 is 0xff"), ("run", "the folder of a run"),
    ("deep", "nothing to train on")])
def test_what_is_named_but_cannot_be_used_is_refused(tmp_path, name, reason):
    write(tmp_path, {"a.jsonl": "{}", "a.jsonl.gz": b"\x1f", "b.parquet": "P", "c.txt": "",
                     "d.txt": b"123456789\xff", "deep/b.pyc": b"\xff",
                     "run/flags.txt": "model\tx\nequations\tabc\n"})
    with pytest.raises(UsageError, match=f"{name}: .*{reason}"):
        data_of(tmp_path / name, T=9)


def test_a_run_in_the_folder_of_its_data_is_no_data(tmp_path, monkeypatch, capsys):
    """`cd texts; python train.py --data .` trains on the texts, and can be resumed."""
    write(tmp_path, {"a.txt": "a" * 5000, "b/c.txt": "c" * 5000, "out/page.html": "the page",
                     "other/lock": ""})                                  # a run that begins
    monkeypatch.chdir(tmp_path)
    for flags in ("--out out --steps 1", "--out out --steps 2 --resume", "--out b/other --steps 1",
                  "--out out --steps 1 --force"):
        train.main([*SMALL, "--data", ".", *flags.split()])
        out = flags.split()[1]
        files = read_checkpoint(tmp_path / out / "ckpt.pt")["files"]
        assert [path for path, *_ in files] == [str(tmp_path / x) for x in ("a.txt", "b/c.txt")]
    assert "skipped other (the folder of a run), lock (empty), out (the" in capsys.readouterr().out


def test_a_run_may_not_be_in_its_data(tmp_path):
    write(tmp_path / "texts", {"a.txt": "a" * 5000})
    with pytest.raises(UsageError, match="--out .*texts: a run's folder is no data"):
        train.main([*SMALL, "--data", f"{tmp_path}/texts", "--out", f"{tmp_path}/texts"])
    assert os.listdir(tmp_path / "texts") == ["a.txt"]


def test_the_standard_library_is_found_without_its_tests():
    texts = [read_text(path) for path in standard_library()]
    assert len(texts) > 100
    assert sum(map(len, texts)) > 5e6
    assert sum("import unittest" in text for text in texts) < 0.05 * len(texts)


def test_a_python_without_the_source_of_its_library_is_explained(tmp_path, monkeypatch):
    monkeypatch.setattr(support.data.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(UsageError, match="no source of Python's library"):
        data_of("stdlib", T=9)


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
    data = [str(tmp_path / "a.bin"), str(tmp_path / "b.txt")]
    args = SimpleNamespace(data=data, seq_len=16)
    training, held_out = get_data(args, tokenizer, list(files_of(data)))
    sizes = [(len(a), len(b)) for a, b in zip(arrays_of(training), arrays_of(held_out))]
    assert sizes == [(9001 - 450, 450), (4750, 250)]
    assert arrays_of(training)[1].astype(int).tolist() == list(range(4750))
    assert arrays_of(held_out)[1].astype(int).tolist() == list(range(4750, 5000))


def test_a_byte_order_mark_is_no_text(tmp_path):
    write(tmp_path, {"a.txt": b"\xef\xbb\xbfna\xc3\xafve" * 20})
    training, _ = data_of(tmp_path / "a.txt", T=8)
    start = bytes(arrays_of(training)[0][:9].astype(np.uint8))
    assert start == b"na\xc3\xafve\xef\xbb\xbf"        # only the one that begins the file goes


# ------------------------------------------------------------------------------------ links

def test_a_linked_folder_is_followed_once_for_each_real_folder(tmp_path):
    """Also where links lead in circles."""
    write(tmp_path, {"data/a.txt": "a", "elsewhere/b.txt": "b", "elsewhere/deep/c.txt": "c"})
    for name, target in {"link": "../elsewhere", "more": "../elsewhere", "up": ".."}.items():
        (tmp_path / "data" / name).symlink_to(target)
    found = [str(path.relative_to(tmp_path)) for path, _ in files_of([tmp_path / "data"])]
    assert found == ["data/a.txt", "data/link/b.txt", "data/link/deep/c.txt"]


def test_a_file_and_its_links_are_one_text(tmp_path):
    write(tmp_path, {"data/b.txt": "b" * 99, "elsewhere.txt": "e" * 99})
    for name, target in {"a.txt": "b.txt", "c.txt": "../elsewhere.txt", "d.txt": "c.txt"}.items():
        (tmp_path / "data" / name).symlink_to(target)
    assert [path.name for path, _ in files_of([tmp_path / "data"])] == ["a.txt", "c.txt"]
    twice = [tmp_path / "data/b.txt", tmp_path / "data/a.txt"]
    assert [path.name for path, _ in files_of(twice)] == ["b.txt"]


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
    assert fingerprint(files_of(["../data"])) == found
    assert fingerprint(files_of(["abcdigits"])) == []


def test_what_differs_between_two_fingerprints_is_named_file_by_file(tmp_path):
    names = ("a.bin", "b.bin", "c.bin", "d.bin")
    write(tmp_path, {name: b"a" * 10_000 for name in names})
    old = fingerprint(files_of([tmp_path]))
    assert changed_files(old, old) == []
    write(tmp_path, {"a.bin": b"a" * 9_998, "b.bin": b"a" * 9_999 + b"b", "e.bin": b"ee"})
    (tmp_path / "c.bin").unlink()
    new = fingerprint(files_of([tmp_path]))
    assert changed_files(old, new) == [f"{tmp_path}/{line}" for line in (
        "a.bin has changed", "b.bin has changed", "c.bin is missing", "e.bin is new")]
    assert len(hash_of(old)) == 12 and hash_of(old) != hash_of(new)
    assert hash_of(old) == hash_of([["/elsewhere", *rest] for _, *rest in old])


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
