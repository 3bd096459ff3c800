"""Tests of support/data.py: which files are used for what, and the order of sequences."""
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import train
from lab import compare
from support.checkpoint import read_checkpoint
from support.cli import UsageError
from support.data import (
    Sequences,
    files_of,
    fingerprint,
    hash_of,
    permute,
    read_text,
    standard_library,
)
from support.table import RUN, Table
from tests.helpers import SMALL, arrays_of, data_of, write, write_run

# ------------------------------------------------------------------------------------ files

@pytest.mark.parametrize("name, wanted", [
    ("data/val.bin", True), ("data/fineweb_val_000000.bin", True), ("data/x_val.bin", True),
    ("data/val/a.txt", True), ("data/val/deep/a.bin", True), ("data/train/a_train_1.bin", False),
    ("data/interval.bin", False), ("data/a_val_b.txt", False), ("data/valley/a.txt", False)])
def test_validation_files_are_known_by_their_names(tmp_path, name, wanted):
    """A folder val above --data's does not count."""
    write(tmp_path / "val", {name: "12" * 30})
    assert [use for _, use in files_of([tmp_path / "val/data"])] == ["val" if wanted else "train"]


def test_a_named_file_or_folder_val_is_held_out_too(tmp_path):
    write(tmp_path, {"val/a.txt": "a", "val/deep/b.txt": "b", "c.txt": "c"})
    for name in ("val", "val/a.txt"):
        assert {use for _, use in files_of([tmp_path / name])} == {"val"}


def test_of_a_folder_of_nanogpt_the_token_files_are_taken(tmp_path, capsys):
    """Its text, their source, is not; val.bin is held out."""
    write(tmp_path, {"input.txt": "x" * 999, "train.bin": np.arange(100), "prepare.py": "import os",
                     "readme.md": "# data", "deep/more.bin": np.arange(50),
                     "val.bin": np.arange(100, 150)})
    training, held_out = data_of(tmp_path, T=9)
    assert [a.astype(int).tolist() for a in arrays_of(training)] == [[*range(50)], [*range(100)]]
    assert [a.astype(int).tolist() for a in arrays_of(held_out)] == [[*range(100, 150)]]
    assert capsys.readouterr().out == f"{tmp_path}: 3 token files, 400 bytes; held out: val.bin\n"


@pytest.mark.parametrize("in_val", [[], [3, 7]])
def test_whole_texts_are_held_out_those_in_val_or_every_twentieth(tmp_path, in_val):
    """All are joined, with an end-of-text behind each."""
    write(tmp_path, {f"{'val' if n in in_val else 'train'}/{n:02}.txt": chr(65 + n) * 30
                     for n in range(40)})
    training, held_out = ([*arrays_of(data)[0]] for data in data_of(tmp_path, T=8))
    chosen = in_val or [19, 39]
    assert held_out == [x for n in chosen for x in [65 + n] * 30 + [256]]
    assert training == [x for n in range(40) if n not in chosen for x in [65 + n] * 30 + [256]]


def test_the_last_twentieth_of_all_text_and_of_each_token_file_is_held_out(tmp_path):
    write(tmp_path, {"a.bin": np.arange(5000) % 256, "b.txt": "b" * 3000, "c.txt": "c" * 999})
    training, held_out = data_of(*(tmp_path / name for name in ("a.bin", "b.txt", "c.txt")), T=16)
    whole = [[*b"b" * 3000, 256, *b"c" * 999, 256], [n % 256 for n in range(5000)]]
    for text, a, b, cut in zip(whole, arrays_of(training), arrays_of(held_out), [200, 250]):
        assert [*a, *b] == text
        assert len(b) == cut


def test_what_is_skipped_in_a_folder_is_named_with_the_reason(tmp_path, capsys):
    write(tmp_path, {"a.py": "a = 1\n" * 99, "b.pyc": b"\xff\x00\xfe", "c.py": "", "d.jsonl": "{}",
                     "deep/e.txt": "text", ".hidden": "text", ".git/f.txt": "text"})
    (tmp_path / "g.txt").symlink_to("nothing")
    training, _ = data_of(tmp_path, T=8)
    assert capsys.readouterr().out.splitlines() == [
        f"skipped {tmp_path}/b.pyc: not UTF-8, {tmp_path}/c.py: empty, {tmp_path}/d.jsonl: python "
        "-m support.prepare turns it into token files and 1 more",
        f"{tmp_path}: 2 files, 598 bytes; held out: the last twentieth, at least one sequence"]
    assert [path for path, *_ in training.files] == [f"{tmp_path}/a.py", f"{tmp_path}/deep/e.txt"]


@pytest.mark.parametrize("name, reason", [
    ("no", "missing"), ("/dev/null", "not a file"), ("a.jsonl.gz", "support.prepare"),
    ("b.parquet", "support.prepare"), ("c.txt", "empty"), ("d.txt", "not UTF-8"),
    ("run", "nothing to train on"), ("deep", "nothing to train on")])
def test_what_is_named_but_cannot_be_used_is_refused(tmp_path, name, reason):
    write(tmp_path, {"a.jsonl.gz": b"\x1f", "b.parquet": "P", "c.txt": "", "d.txt": b"12\xff",
                     "deep/b.pyc": b"\xff", "run/flags.txt": "model\tx\nequations\tabc\n",
                     "run/source/train.py": "x" * 99, "e.txt": "e" * 99})
    also = [tmp_path / "e.txt"] * (reason != "nothing to train on")
    with pytest.raises(UsageError, match=f"{name}: .*{reason}"):
        data_of(*also, tmp_path / name, T=9)


def test_the_standard_library_is_found_without_its_tests():
    """All of it, empty files too: README's loss is of these."""
    training, _ = data_of("stdlib", T=256)
    texts = [read_text(path) for path in standard_library()]
    assert len(training.files) == len(texts)
    assert len(texts) > 100
    assert sum(map(len, texts)) > 5e6
    assert sum("import unittest" in text for text in texts) < 0.05 * len(texts)


def test_a_byte_order_mark_is_no_text(tmp_path):
    """Only the one that begins the file goes."""
    write(tmp_path, {"a.txt": b"\xef\xbb\xbfna\xc3\xafve" * 20})
    training, _ = data_of(tmp_path / "a.txt", T=8)
    assert bytes(training[0].astype(np.uint8)) == b"na\xc3\xafve\xef\xbb\xbf"


# ---------------------------------------------------------------------------- runs and links

def test_a_run_in_the_folder_of_its_data_is_no_data(tmp_path, monkeypatch):
    """`cd texts; python train.py --data .` trains on the texts, and can be resumed."""
    write(tmp_path, {"a.txt": "a" * 5000, "b/c.txt": "c" * 5000, "out/page.html": "the page"})
    monkeypatch.chdir(tmp_path)
    for flags in ("--out out --steps 1", "--out out --steps 2 --resume", "--out b/other --steps 1",
                  "--out out --steps 1 --force"):
        train.main([*SMALL, "--data", ".", *flags.split()])
        files = read_checkpoint(f"{flags.split()[1]}/ckpt.pt")["files"]
        assert [path for path, *_ in files] == [str(tmp_path / x) for x in ("a.txt", "b/c.txt")]


def test_tables_of_runs_are_no_data(tmp_path, call):
    """`compare --name t` leaves out/t.tsv in the folder of the texts. Other tables are text."""
    write(tmp_path, {"a.txt": "a" * 5000, "b.tsv": "word\tseed\n" * 500})
    write_run(tmp_path / "out/one-0", [
        {"step": n, "loss": 2.0, "grad_norm": 1.0, "val_loss": 2.0} for n in (10, 20)])
    call(compare, "out/one-0", "--name", "t")
    Table("out/m_mine.tsv", RUN, ["loss"], "h").add(dict.fromkeys(RUN, "0"), loss=1.0)
    assert os.path.exists("out/t.tsv")
    training, _ = data_of(tmp_path, T=8)
    assert [path for path, *_ in training.files] == [f"{tmp_path}/a.txt", f"{tmp_path}/b.tsv"]


def test_a_run_may_not_be_in_its_data(tmp_path):
    write(tmp_path / "texts", {"a.txt": "a" * 5000})
    with pytest.raises(UsageError, match="nothing to train on: .* those of runs"):
        train.main([*SMALL, "--data", f"{tmp_path}/texts", "--out", f"{tmp_path}/texts"])
    assert os.listdir(tmp_path / "texts") == ["a.txt"]


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

def test_a_fingerprint_changes_with_the_files_and_not_with_their_place(tmp_path):
    old = fingerprint(files_of([write(tmp_path, {"a.bin": b"a" * 10_000, "b.bin": b"b"})]))
    for new in (b"a" * 9_998, b"a" * 9_999 + b"b"):
        found = fingerprint(files_of([write(tmp_path, {"a.bin": new})]))
        assert len(hash_of(old)) == 12 and hash_of(old) != hash_of(found)
    assert hash_of(old) == hash_of([["/elsewhere", *rest] for _, *rest in old])


@pytest.mark.parametrize("name, size", [
    ("text.txt", 9_000_001), ("tokens.bin", 3_000_000), ("corpus.jsonl.gz", 30_000)])
def test_an_edit_in_the_middle_changes_a_fingerprint(tmp_path, name, size):
    """A byte of a text of any size, and of a token file or corpus up to 4 MiB."""
    path = tmp_path / name
    path.write_bytes(bytes(size))
    old = fingerprint([(path, "train")])
    with open(path, "r+b") as file:
        file.seek(size // 2)
        file.write(b"x")
    assert hash_of(old) != hash_of(fingerprint([(path, "train")]))


def test_the_fingerprint_of_a_large_token_file_is_of_pieces_spread_over_it(tmp_path):
    """Other tokens in a twentieth of it change the fingerprint, wherever they are."""
    path, size = tmp_path / "a.bin", 50_000_000
    with open(path, "wb") as file:
        file.truncate(size)
    seen = {hash_of(fingerprint([(path, "train")]))}
    for n in range(20):
        with open(path, "r+b") as file:
            file.seek(n * size // 20)
            file.write(b"x" * (size // 20))
        seen.add(hash_of(fingerprint([(path, "train")])))
    assert len(seen) == 21


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
