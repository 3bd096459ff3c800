"""Tests of support/prepare.py: a corpus becomes token files, in spite of kills."""
import gzip
import json
import sys

import numpy as np
import pytest

from support import prepare
from support.cli import UsageError
from support.tokens import get_tokenizer, read_bin
from tests.helpers import fit, write

datasets = pytest.importorskip("datasets", reason="the package datasets is not installed")

TEXTS = [f"{n}: " + "naïve ☃ \n" * (n % 40) for n in range(300)]
TEXTS[7] = ""                                                  # the smallest document
FLAGS = ["--tokenizer", "bytes", "--shard-tokens", "9000", "--held-out", "4"]
BOOKS = [*FLAGS, "--books", "100"]


def jsonl(texts, field="text"):
    return "".join(json.dumps({"id": 1, field: text}) + "\n" for text in texts).encode()


@pytest.fixture
def corpus(tmp_path):
    """A folder with TEXTS in three files."""
    return write(tmp_path / "raw", {
        "a.jsonl": jsonl(TEXTS[:120]), "b/b.jsonl.gz": gzip.compress(jsonl(TEXTS[120:200])),
        "c.jsonl": jsonl(TEXTS[200:]), "README.md": "not a document", ".hidden.jsonl": "nor this"})


def run(out, *files, flags=FLAGS):
    prepare.main([*map(str, files), "--out", str(out), *flags])


def shards(out, part):
    """The paths of a part's shards, in order."""
    return sorted(out.glob(f"data_{part}_*.bin"))


def documents(out, part):
    """The tokens of each document of a part, without end-of-text."""
    tokens = np.concatenate([read_bin(p, 257)[:].astype(np.int64) for p in shards(out, part)])
    assert tokens[-1] == 256
    starts = np.flatnonzero(tokens == 256)[:-1] + 1
    return [document[:-1].tolist() for document in np.split(tokens, starts)]


def contents(out):
    """{name: bytes} of each file that is not hidden."""
    return {path.name: path.read_bytes() for path in out.glob("[!.]*")}


def complaint(*args, **options):
    """The one-line message of a mistake."""
    with pytest.raises(UsageError) as e:
        run(*args, **options)
    assert "\n" not in str(e.value)
    return str(e.value)


# ---------------------------------------------------------------------------- what is written

def test_each_document_is_in_one_part_in_order_with_end_of_text_after_it(corpus, tmp_path):
    """In shards of as many tokens as asked, that train.py trains on."""
    out = tmp_path / "tokens"
    run(out, corpus)
    encode = get_tokenizer("bytes").encode_ordinary
    wanted = [encode(text) for text in TEXTS]
    train, val = documents(out, "train"), documents(out, "val")
    assert sorted(train + val) == sorted(wanted)
    for part in (train, val):
        assert part == [document for document in wanted if document in part]
    assert 50 < len(val) < 100                                 # about a quarter of 300

    pairs = zip(shards(out, "train"), shards(out, "val"), strict=True)
    sizes = [len(read_bin(a, 257)) + len(read_bin(b, 257)) for a, b in pairs]
    assert len(sizes) >= 3 and min(sizes[:-1]) >= 9000
    assert fit(tmp_path / "out", "--steps", "2", data=out)["step"] == 2


def test_equal_documents_are_held_out_together_and_none_with_0(tmp_path):
    write(tmp_path, {"a.jsonl": jsonl(TEXTS[10:50] * 2)})
    run(tmp_path / "out", tmp_path / "a.jsonl")
    train, val = documents(tmp_path / "out", "train"), documents(tmp_path / "out", "val")
    assert len(train + val) == 80
    assert not set(map(tuple, train)) & set(map(tuple, val))
    run(tmp_path / "0", tmp_path / "a.jsonl", flags=["--tokenizer", "bytes", "--held-out", "0"])
    assert [*contents(tmp_path / "0")] == ["data_train_000000.bin"]


def test_books_are_the_documents_with_more_tokens(corpus, tmp_path):
    """Numbered through all shards. Documents 48 and 88 have exactly 100 tokens."""
    run(tmp_path / "out", corpus, flags=BOOKS)
    found = {f"book_{n:06}.txt": text.encode() for n, text in enumerate(TEXTS)}
    assert contents(tmp_path / "out") == {name: x for name, x in found.items() if len(x) > 100}
    assert len(found["book_000048.txt"]) == 100


# ----------------------------------------------------------------------------- what is read

def parquet(folder):
    from pyarrow import parquet, table

    parquet.write_table(table({"id": range(300), "text": TEXTS}), folder / "a.parquet")


def zst(folder):
    zstandard = pytest.importorskip("zstandard", reason="zstandard is not installed")
    write(folder, {"a.jsonl.zst": zstandard.compress(jsonl(TEXTS))})


def texts(folder):
    write(folder, {f"{n:03}.txt": text for n, text in enumerate(TEXTS)})


@pytest.mark.parametrize("make", [parquet, zst, texts])
def test_all_formats_give_the_same_tokens(corpus, tmp_path, make):
    (tmp_path / "other").mkdir()
    make(tmp_path / "other")
    write(tmp_path, {"a.jsonl": jsonl(TEXTS)})
    run(tmp_path / "out", tmp_path / "other")
    run(tmp_path / "plain", tmp_path / "a.jsonl")
    assert contents(tmp_path / "out") == contents(tmp_path / "plain")


def test_another_field_and_no_byte_order_mark(tmp_path):
    write(tmp_path, {"a.jsonl": jsonl(["one", "\ufefftwo"], "content")})
    run(tmp_path / "out", tmp_path / "a.jsonl", flags=[*FLAGS[:2], "--field", "content"])
    assert [*map(bytes, documents(tmp_path / "out", "train"))] == [b"one", b"two"]


def test_a_name_on_the_hub_is_streamed(tmp_path, monkeypatch):
    asked, load = [], datasets.load_dataset
    write(tmp_path, {"a.jsonl": jsonl(TEXTS)})

    def load_dataset(*names, **flags):
        asked.append((names, flags))
        return load("json", data_files=str(tmp_path / "a.jsonl"), split="train", streaming=True)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    run(tmp_path / "out", "someone/texts", flags=[*FLAGS, "--subset", "small", "--split", "test"])
    assert asked == [(("someone/texts", "small"), {"split": "test", "streaming": True})]
    assert len(documents(tmp_path / "out", "train") + documents(tmp_path / "out", "val")) == 300


# --------------------------------------------------------------------------------- mistakes

@pytest.mark.parametrize("name, content, message", [
    ("a.jsonl", jsonl(TEXTS) + b'{"text": "cut', "JSON parse error"),
    ("a.jsonl", b'{"title": "x"}\n', "no text in --field text; its fields: title"),
    ("a.jsonl", b'{"text": "x"}\n{"text": null}\n', "no text in --field text"),
    ("a.jsonl.gz", gzip.compress(jsonl(TEXTS))[:-20], "Compressed file ended"),
    ("a.txt", b"caf\xe9 au lait", "can't decode byte 0xe9"),
    ("a.parquet", b"no", "a.parquet"), ("a.csv", b"text\n", "use .jsonl, .parquet, .txt")])
def test_a_damaged_file_is_one_line(tmp_path, name, content, message):
    write(tmp_path, {name: content})
    assert message in complaint(tmp_path / "out", tmp_path / name)


def test_two_kinds_another_folder_and_wrong_numbers_are_told(tmp_path):
    write(tmp_path, {"a.txt": "text", "b.jsonl": "{}"})
    assert "one kind at a time" in complaint(tmp_path / "out", tmp_path)
    assert "name a new folder" in complaint(tmp_path, tmp_path / "a.txt")
    for flags in (["--shard-tokens", "3000000000"], ["--held-out", "-1"], ["--books", "0"]):
        assert flags[0] in complaint(tmp_path / "out", tmp_path / "a.txt", flags=flags)
    for name, words in (("gpt3", "gpt3"), ("65", "support.prepare needs a tokenizer of text")):
        assert words in complaint(tmp_path / "out", tmp_path / "a.txt", flags=["--tokenizer", name])
    assert not (tmp_path / "out").exists()


def test_the_missing_package_is_asked_for_by_name(corpus, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "pip install datasets" in complaint(tmp_path / "out", corpus)


# ------------------------------------------------------------------------------- continuing

def test_other_flags_and_other_files_are_refused(corpus, tmp_path):
    run(tmp_path / "out", corpus)
    before = contents(tmp_path / "out")
    for files, flags in (([corpus], FLAGS[:2]), ([corpus / "a.jsonl"], FLAGS)):
        assert "name a new folder" in complaint(tmp_path / "out", *files, flags=flags)
    assert contents(tmp_path / "out") == before


@pytest.mark.parametrize("nth, flags", [*((nth, FLAGS) for nth in range(1, 9)),
                                        (60, BOOKS), (99, BOOKS)])
def test_a_kill_at_any_write_loses_nothing(corpus, tmp_path, monkeypatch, nth, flags):
    """The nth write fails; then the same files are made, those of finished shards not again."""
    run(tmp_path / "whole", corpus, flags=flags)
    out, replacing, calls = tmp_path / "out", prepare.replacing, []

    def replacing_once(path):
        calls.append(path)
        if len(calls) == nth:
            raise OSError("the disk is full")
        return replacing(path)

    for module in ("support.prepare", "support.tokens"):
        monkeypatch.setattr(f"{module}.replacing", replacing_once)
    with pytest.raises(OSError, match="the disk is full"):
        run(out, corpus, flags=flags)
    finished = json.loads((out / prepare.JOURNAL).read_text())["states"] if nth > 1 else []
    kept = {path: path.stat().st_ino for path in out.glob("data*")
            if int(path.stem[-6:]) < len(finished)}
    (out / ".prepare.json.1.tmp").write_bytes(b"of a killed process")
    for _ in range(2):
        run(out, corpus, flags=flags)
        assert contents(out) == contents(tmp_path / "whole")
    assert not [*out.glob("*.tmp")]
    assert all(path.stat().st_ino == n for path, n in kept.items())
