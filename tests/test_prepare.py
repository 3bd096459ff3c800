"""Tests of support/prepare.py: from a corpus to token files, through crashes and damaged files."""
import gzip
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from support import prepare
from support.cli import UsageError
from support.data import get_tokenizer, read_bin
from support.run import Lock
from tests.helpers import ROOT, fit

TEXTS = [f"{n}: " + "naïve ☃ \n" * (n % 40) for n in range(300)]
TEXTS[7] = ""                                                  # the smallest document
TEXTS[8] = "half a pair: \ud83d."                              # JSON can hold what UTF-8 cannot
FLAGS = ["--tokenizer", "bytes", "--shard-tokens", "5000", "--held-out", "4"]
unix = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")


def package(name):
    """A package that prepare.py needs for some files only."""
    return pytest.importorskip(name, reason=f"{name} is not installed")


def jsonl(texts, field="text"):
    return "".join(json.dumps({"id": 1, field: text}) + "\n" for text in texts).encode()


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    """TEXTS in many batches, in three files: in a folder, compressed, one document a file."""
    monkeypatch.setattr(prepare, "BATCH", 2000)
    (tmp_path / "raw/b").mkdir(parents=True)
    (tmp_path / "raw/a.jsonl").write_bytes(jsonl(TEXTS[:120]))
    (tmp_path / "raw/b/b.jsonl.gz").write_bytes(gzip.compress(jsonl(TEXTS[120:299])))
    (tmp_path / "raw/c.txt").write_bytes(TEXTS[299].encode())
    (tmp_path / "raw/README.md").write_text("not a document")
    (tmp_path / "raw/.hidden.txt").write_text("nor this")
    return tmp_path / "raw"


def run(out, *files, flags=FLAGS, processes=1):
    names = map(str, files)
    prepare.main([*names, "--out", str(out), *flags, "--processes", str(processes)])


def shards(out, part):
    """The names of a part's shards, in order."""
    return sorted(path.name for path in out.glob(f"data_{part}_*.bin"))


def documents(out, part):
    """The tokens of each document of a part, without the end-of-text."""
    arrays = [read_bin(out / name, 257).astype(np.int64) for name in shards(out, part)]
    tokens = np.concatenate(arrays)
    assert tokens[-1] == 256
    return [document[1:].tolist() for document in
            np.split(np.append(256, tokens[:-1]), np.flatnonzero(tokens[:-1] == 256) + 1)]


def contents(out):
    """Name and bytes of each file that is not hidden."""
    return {path.name: path.read_bytes() for path in out.iterdir() if path.name[0] != "."}


def complaint(*args, **options):
    """The one line of a mistake."""
    with pytest.raises(UsageError) as e:
        run(*args, **options)
    assert "\n" not in str(e.value)
    return str(e.value)


# ----------------------------------------------------------------------------------- shards

def test_each_document_is_in_one_part_in_order_with_end_of_text_after_it(corpus, tmp_path):
    run(tmp_path / "out", corpus)
    encode = get_tokenizer("bytes").encode_ordinary
    wanted = [encode(text) for text in TEXTS]
    train, val = documents(tmp_path / "out", "train"), documents(tmp_path / "out", "val")
    assert sorted(train + val) == sorted(wanted)
    assert len(set(map(tuple, wanted))) == len(wanted)
    for part in (train, val):
        assert part == [document for document in wanted if document in part]
    assert 50 < len(val) < 100                                 # a quarter of 300


def test_shards_are_full_but_the_last_and_in_the_format_of_llm_c(corpus, tmp_path):
    run(tmp_path / "out", corpus)
    total = sum(len(text.encode("utf-8", "replace")) + 1 for text in TEXTS)
    for part in ("train", "val"):
        names = shards(tmp_path / "out", part)
        sizes = [len(read_bin(tmp_path / "out" / name, 257)) for name in names]
        assert names == [f"data_{part}_{n:06}.bin" for n in range(len(names))]
        assert sizes[:-1] == [5000] * (len(names) - 1)
        assert 0 < sizes[-1] <= 5000
        total -= sum(sizes)
    assert abs(total) <= 4                                     # the half pair may be 1 to 3 bytes
    header = np.fromfile(tmp_path / "out" / names[0], "<i4", 256)
    assert header[:3].tolist() == [20240520, 1, 5000]
    assert not header[3:].any()


def test_the_bytes_do_not_depend_on_the_number_of_processes(corpus, tmp_path):
    run(tmp_path / "one", corpus)
    run(tmp_path / "three", corpus, processes=3)
    assert len(contents(tmp_path / "one")) > 5
    assert contents(tmp_path / "one") == contents(tmp_path / "three")


def test_the_bytes_do_not_depend_on_the_size_of_a_batch(corpus, tmp_path, monkeypatch):
    run(tmp_path / "small", corpus)
    monkeypatch.setattr(prepare, "BATCH", 2**18)
    run(tmp_path / "large", corpus)
    assert contents(tmp_path / "small") == contents(tmp_path / "large")


def test_equal_documents_are_held_out_together(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(jsonl(TEXTS[10:50] * 2))
    run(tmp_path / "out", tmp_path / "a.jsonl")
    train, val = documents(tmp_path / "out", "train"), documents(tmp_path / "out", "val")
    assert len(train + val) == 80
    assert not set(map(tuple, train)) & set(map(tuple, val))


def test_nothing_is_held_out_with_0(corpus, tmp_path):
    run(tmp_path / "out", corpus, flags=["--tokenizer", "bytes", "--held-out", "0"])
    assert list(contents(tmp_path / "out")) == ["data_train_000000.bin"]


def test_train_py_trains_on_the_shards(corpus, tmp_path):
    run(tmp_path / "tokens", corpus)
    assert fit(tmp_path / "out", "--steps", "2", data=tmp_path / "tokens")["step"] == 2


def test_books_are_the_documents_with_more_tokens(tmp_path):
    texts = ["a" * n for n in (99, 100, 101, 7, 300)] + ["é" * 51]
    (tmp_path / "a.jsonl").write_bytes(jsonl(texts))
    run(tmp_path / "out", tmp_path / "a.jsonl", flags=["--tokenizer", "bytes", "--books", "100"],
        processes=2)
    wanted = [text.encode() for text in (texts[2], texts[4], texts[5])]
    assert contents(tmp_path / "out") == {f"book_{n:06}.txt": wanted[n] for n in range(3)}


# ------------------------------------------------------------------------------ other files

def test_blank_lines_and_another_field(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"\n" + jsonl(["one", "two"], "content") + b"\n \r\n")
    run(tmp_path / "out", tmp_path / "a.jsonl", flags=[*FLAGS[:2], "--field", "content"])
    assert bytes(documents(tmp_path / "out", "train")[0]) == b"one"
    assert len(documents(tmp_path / "out", "train")) == 2


def write_parquet(path, texts, column="text"):
    table = package("pyarrow").table({"id": list(range(len(texts))), column: texts})
    importlib.import_module("pyarrow.parquet").write_table(table, path, row_group_size=50)


def write_zst(path, texts):
    """Two frames, cut in the middle of a line. The last line has no end."""
    data, compress = jsonl(texts)[:-1], package("zstandard").ZstdCompressor().compress
    path.write_bytes(compress(data[:1234]) + compress(data[1234:]))


@pytest.mark.parametrize("name, write", [("a.parquet", write_parquet), ("a.jsonl.zst", write_zst)])
def test_all_formats_give_the_same_tokens(tmp_path, name, write):
    write(tmp_path / name, TEXTS[9:])
    (tmp_path / "a.jsonl").write_bytes(jsonl(TEXTS[9:]))
    run(tmp_path / "out", tmp_path / name, processes=2)
    run(tmp_path / "plain", tmp_path / "a.jsonl")
    assert contents(tmp_path / "out") == contents(tmp_path / "plain")


@pytest.mark.parametrize("name, module", [("a.jsonl.zst", "zstandard"), ("a.parquet", "pyarrow")])
def test_a_missing_package_is_asked_for_by_name(tmp_path, monkeypatch, name, module):
    monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / name).write_bytes(b"anything")
    assert f"pip install {module}" in complaint(tmp_path / "out", tmp_path / name)


# --------------------------------------------------------------------------------- mistakes

LINES = jsonl(TEXTS[:200])


@pytest.mark.parametrize("name, content, message", [
    ("a.jsonl", LINES + b'{"text": "cut', "a.jsonl, line 201 is not JSON"),
    ("a.jsonl", LINES + b'{"text": "caf\xe9"}\n' + LINES, "a.jsonl, line 201 is not JSON in UTF-8"),
    ("a.jsonl", LINES + b"[" * 10**6, "a.jsonl, line 201 is not JSON"),
    ("a.jsonl", LINES + b'\n{"title": "x"}\n', "a.jsonl, line 202 has no text in the field 'text'"),
    ("a.jsonl", b'{"text": null}\n', "line 1 has no text"), ("a.jsonl", b"7\n", "line 1 has no"),
    ("a.jsonl", b"", "a.jsonl is empty"), ("a.jsonl", b"\n\n", "no documents"),
    ("a.jsonl.gz", gzip.compress(b""), "no documents"),
    ("a.jsonl.gz", gzip.compress(LINES)[:-20], "a.jsonl.gz, line "),
    ("a.jsonl.gz", LINES, "a.jsonl.gz, line 1: BadGzipFile"),
    ("a.txt", b"caf\xe9 au lait", "a.txt: UnicodeDecodeError"),
    ("a.csv", b"text\n", "a.csv is none of .jsonl")])
def test_a_damaged_file_is_one_line_that_names_the_place(tmp_path, name, content, message):
    """The same line for any number of processes."""
    (tmp_path / name).write_bytes(content)
    line = complaint(tmp_path / "out", tmp_path / name)
    assert message in line
    assert complaint(tmp_path / "out3", tmp_path / name, processes=3).replace("out3", "out") == line


def test_damaged_zst_and_parquet_files_are_found(tmp_path):
    write_zst(tmp_path / "a.jsonl.zst", TEXTS)
    write_parquet(tmp_path / "a.parquet", TEXTS[9:])
    write_parquet(tmp_path / "null.parquet", ["one", None])
    for name, message in (("a.jsonl.zst", r"line \d+: EOFError: the file is truncated"),
                          ("a.parquet", "row 1: ArrowInvalid"),
                          ("null.parquet", "row 2: ValueError: no text in the field 'text'")):
        path = tmp_path / name
        if name[0] == "a":
            path.write_bytes(path.read_bytes()[:-10])
        with pytest.raises(UsageError, match=message):
            run(tmp_path / f"out-{name}", path)


def test_a_folder_without_documents_and_a_folder_of_something_else(tmp_path):
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw/a.csv").write_text("text")
    (tmp_path / "a.txt").write_text("text")
    assert "has no .jsonl" in complaint(tmp_path / "out", tmp_path / "raw")
    assert "holds something else" in complaint(tmp_path / "raw", tmp_path / "a.txt")
    with pytest.raises(FileNotFoundError):
        run(tmp_path / "out", tmp_path / "nowhere.txt")


@pytest.mark.parametrize("flags", [["--shard-tokens", "0"], ["--shard-tokens", "3000000000"],
                                   ["--processes", "0"], ["--held-out", "-1"]])
def test_flags_are_checked(corpus, tmp_path, flags):
    with pytest.raises(UsageError, match=flags[0]):
        prepare.main([str(corpus), "--out", str(tmp_path / "out"), *flags])


# ------------------------------------------------------------------------------- continuing

def test_a_folder_that_another_process_fills_is_left_alone(corpus, tmp_path):
    with Lock(tmp_path / "out", ".lock"), pytest.raises(UsageError, match="in use by process"):
        run(tmp_path / "out", corpus)
    run(tmp_path / "out", corpus)


def test_after_a_damaged_file_is_repaired_the_same_command_goes_on(corpus, tmp_path):
    run(tmp_path / "whole", corpus)
    path = corpus / "b/b.jsonl.gz"
    good = path.read_bytes()
    path.write_bytes(good[: len(good) // 2])
    complaint(tmp_path / "out", corpus)
    before = {p.name: p.stat().st_ino for p in (tmp_path / "out").glob("data*")}
    assert len(before) >= 3
    path.write_bytes(good)
    assert "other files" in complaint(tmp_path / "out", corpus / "a.jsonl", path)      # no c.txt
    run(tmp_path / "out", corpus, processes=3)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    after = {p.name: p.stat().st_ino for p in (tmp_path / "out").glob("data*")}
    assert before.items() <= after.items()                     # not made again


@pytest.mark.parametrize("call", [1, 2, 30, 59, 60])
def test_a_full_disk_at_any_moment_loses_nothing(corpus, tmp_path, monkeypatch, call):
    """Also after the training tokens of a batch, before its held-out ones."""
    append, calls = prepare.append, []

    def append_once(*args):
        calls.append(args)
        written = append(*args)
        if len(calls) == call:
            raise OSError("the disk is full")
        return written

    run(tmp_path / "whole", corpus)
    monkeypatch.setattr(prepare, "append", append_once)
    with pytest.raises(OSError, match="the disk is full"):
        run(tmp_path / "out", corpus)
    run(tmp_path / "out", corpus)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_crash_between_the_state_and_the_names_of_the_shards(corpus, tmp_path):
    run(tmp_path / "whole", corpus)
    run(tmp_path / "out", corpus)
    for name in contents(tmp_path / "out"):
        (tmp_path / "out" / name).rename(tmp_path / "out" / f".{name}")
    run(tmp_path / "out", corpus)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_other_flags_and_other_files_are_refused(corpus, tmp_path):
    run(tmp_path / "out", corpus)
    before = contents(tmp_path / "out")
    line = complaint(tmp_path / "out", corpus, flags=["--tokenizer", "bytes"])
    assert "was begun with --shard-tokens 5000" in line
    assert "other files" in complaint(tmp_path / "out", corpus / "a.jsonl")
    (corpus / "a.jsonl").write_bytes(jsonl(TEXTS))
    assert "other files" in complaint(tmp_path / "out", corpus)
    assert contents(tmp_path / "out") == before


def test_what_a_crash_left_beyond_the_state_is_cut_off(corpus, tmp_path):
    """Also if the files have no more tokens for that part, or for that shard."""
    run(tmp_path / "whole", corpus)
    with open(corpus / "c.txt", "ab") as file:
        file.write(b"\xff")
    complaint(tmp_path / "out", corpus)
    (corpus / "c.txt").write_bytes(TEXTS[299].encode())
    unfinished = list((tmp_path / "out").glob(".data_*.bin"))
    assert len(unfinished) == 2                                # train and val
    for path in unfinished:
        n = int(path.stem[-6:])
        path.with_name(f"{path.stem[:-6]}{n + 1:06}.bin").write_bytes(b"beyond" * 9999)
        with open(path, "r+b") as file:
            file.write(b"another header")
            file.seek(0, os.SEEK_END)
            file.write(b"beyond" * 9999)
    run(tmp_path / "out", corpus)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert not list((tmp_path / "out").glob(".data_*.bin"))


def test_lost_tokens_are_noticed(corpus, tmp_path):
    with open(corpus / "c.txt", "ab") as file:
        file.write(b"\xff")
    complaint(tmp_path / "out", corpus)
    (corpus / "c.txt").write_bytes(TEXTS[299].encode())
    for path in (tmp_path / "out").glob(".data_*.bin"):
        path.unlink()
    assert "has lost tokens" in complaint(tmp_path / "out", corpus)


# ------------------------------------------------------------------------- killed processes

LONG = ["--tokenizer", "bytes", "--shard-tokens", "50000", "--held-out", "4"]


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    """(A file of eight batches, the shards of a start that was never stopped.)"""
    folder = tmp_path_factory.mktemp("long")
    (folder / "a.jsonl").write_bytes(jsonl(TEXTS[9:] * 30))
    run(folder / "whole", folder / "a.jsonl", flags=LONG)
    return folder / "a.jsonl", contents(folder / "whole")


def start(out, path):
    """prepare.py in processes of its own, after it has written a shard."""
    command = [sys.executable, "-m", "support.prepare", path, "--out", out, *LONG, "--processes",
               "2"]
    process = subprocess.Popen(list(map(str, command)), cwd=ROOT, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True, start_new_session=True)
    while not shards(out, "train"):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.002)
    return process


def end(process):
    """(exit code, stderr) when all processes have closed their output."""
    error = process.communicate(timeout=60)[1]
    return process.returncode, error


@unix
def test_kill_and_start_again_is_the_same_as_never_stopped(long, tmp_path):
    """The worker processes end with their parent: they close its output."""
    path, whole = long
    process = start(tmp_path / "out", path)
    process.kill()
    assert end(process) == (-signal.SIGKILL, "")
    assert 0 < len(contents(tmp_path / "out")) < len(whole)
    run(tmp_path / "out", path, flags=LONG, processes=3)
    assert contents(tmp_path / "out") == whole


@unix
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_all_processes_and_a_later_start_goes_on(long, tmp_path, number):
    path, whole = long
    process = start(tmp_path / "out", path)
    os.killpg(process.pid, number)
    code, error = end(process)
    assert code == 130
    assert error.startswith("stopped at ")
    assert error.count("\n") == 1
    run(tmp_path / "out", path, flags=LONG, processes=3)
    assert contents(tmp_path / "out") == whole


@unix
def test_a_killed_worker_is_one_line_and_a_later_start_goes_on(long, tmp_path):
    path, whole = long
    process = start(tmp_path / "out", path)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) == 2
    os.kill(int(children[0]), signal.SIGKILL)
    code, error = end(process)
    assert code == 1
    assert error.startswith("error: a process was killed")
    assert error.count("\n") == 1
    run(tmp_path / "out", path, flags=LONG, processes=3)
    assert contents(tmp_path / "out") == whole
