"""Tests of support/run.py and checkpoint.py: files on disk stay whole, and are checked."""
import io
import multiprocessing
import os
import sys

import pytest
import torch

import train
from experiments.runs import read_run
from support.checkpoint import read_checkpoint, save_checkpoint
from support.cli import UsageError, on_one_line
from support.data import Sequences
from support.run import COLUMNS, lock
from tests.helpers import SMALL, TEXT, fit, read_table

STEPS = ["--log-every", "1", "--eval-every", "2"]

@pytest.fixture
def run(tmp_path):
    """(a folder with a run of four steps, its checkpoint)"""
    ckpt = fit(tmp_path / "out", "--steps", "4", *STEPS)
    return tmp_path / "out", ckpt

def resume(out, *flags):
    train.main(["--resume", "--out", str(out), *flags])

# ---------------------------------------------------------------------------------- the log

@pytest.mark.parametrize("damage", ["deleted", "torn", "rows lost", "rubbish"])
def test_a_resumed_run_has_its_whole_log_again(run, damage):
    out, _ = run
    log = out / "log.tsv"
    text = log.read_text()
    damaged = {"torn": text[:-20], "rows lost": text[: text.index("\n") + 1],
               "rubbish": "rubbish\0\n" * 9}
    if damage == "deleted":
        log.unlink()
    else:
        log.write_text(damaged[damage])
    resume(out, "--steps", "6")
    assert log.read_text().startswith(text)
    assert [row["step"] for row in read_table(log)] == [
        "1", "2", "2", "3", "4", "4", "5", "6", "6"]

def test_rows_beyond_the_checkpoint_are_dropped(run):
    """A kill between the log's row and the checkpoint leaves such rows."""
    out, _ = run
    text = (out / "log.tsv").read_text()
    (out / "log.tsv").write_text(text + "5\t1.0" + "\t" * (len(COLUMNS) - 2) + "\n")
    resume(out, "--steps", "5")
    rows = read_table(out / "log.tsv")
    assert [row["step"] for row in rows] == ["1", "2", "2", "3", "4", "4", "5", "5"]
    assert float(rows[-2]["loss"]) != 1.0

def test_a_full_disk_ends_a_run_in_one_line_and_the_checkpoint_has_the_rows(run, monkeypatch):
    out, _ = run
    before = (out / "log.tsv").read_text()
    draw = Sequences.draw

    def draw_and_fill(self, n, seed):
        if n == 5 * 4:
            (out / "log.tsv").unlink()
            (out / "log.tsv").mkdir()                  # appending fails from now on
        return draw(self, n, seed)

    with monkeypatch.context() as m:
        m.setattr(Sequences, "draw", draw_and_fill)
        with pytest.raises(OSError) as e:
            resume(out, "--steps", "9")
    assert e.value.filename == str(out / "log.tsv")
    (out / "log.tsv").rmdir()
    resume(out, "--steps", "9")
    assert (out / "log.tsv").read_text().startswith(before)


# ------------------------------------------------------------------------- the folder's lock

def hold(folder, pipe):
    """Lock a folder until a message arrives."""
    with lock(folder):
        pipe.send("locked")
        pipe.recv()

def test_a_folder_in_use_names_the_process(run):
    out, _ = run
    here, there = multiprocessing.Pipe()
    other = multiprocessing.Process(target=hold, args=(out, there), daemon=True)
    other.start()
    assert here.recv() == "locked"
    for _ in range(2):
        with pytest.raises(UsageError, match=f"in use by process {other.pid} on"):
            resume(out, "--steps", "5")
    with pytest.raises(UsageError, match="in use by process"):
        fit(out, "--steps", "5", "--force")
    here.send("go")
    other.join()
    assert read_checkpoint(out / "ckpt.pt")["step"] == 4
    resume(out, "--steps", "5")

def test_flags_and_state_come_from_one_checkpoint(run, monkeypatch):
    """It is read once, in the locked folder: another process may have saved it just before."""
    out, _ = run
    read = []

    def read_locked(path):
        with pytest.raises(UsageError, match="in use by process"), lock(out):
            pass
        read.append(path)
        return read_checkpoint(path)

    monkeypatch.setattr("support.run.read_checkpoint", read_locked)
    resume(out, "--steps", "5")
    assert read == [out / "ckpt.pt"]


def test_a_foreign_log_and_foreign_temporary_files_are_left_alone(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/log.tsv").write_text("my notes")
    with pytest.raises(UsageError, match="is not a log of train.py"):
        fit(tmp_path / "out", "--steps", "1")
    assert (tmp_path / "out/log.tsv").read_text() == "my notes"
    (tmp_path / "out/log.tsv").unlink()
    mine, left = tmp_path / "out/ckpt.tmp", tmp_path / "out/ckpt.pt.123.tmp"
    mine.write_text("mine")
    left.write_text("of a killed process")
    fit(tmp_path / "out", "--steps", "1")
    assert mine.read_text() == "mine"
    assert not left.exists()

# --------------------------------------------------------------------- damaged checkpoints

def test_a_flipped_bit_is_found_wherever_it_is(run, tmp_path):
    """In the weights, the moments, the pickle, or the archive's own records."""
    good = (run[0] / "ckpt.pt").read_bytes()
    path = tmp_path / "ckpt.pt"
    same = silent = 0
    for n in range(0, len(good), len(good) // 61):
        bad = bytearray(good)
        bad[n] ^= 1 << n % 8
        path.write_bytes(bad)
        try:
            ckpt = read_checkpoint(path)
        except UsageError:
            continue

        # Only padding between records may change unnoticed.
        same += 1
        for name, p in run[1]["weights"].items():
            silent += not torch.equal(ckpt["weights"][name], p)
    assert silent == 0
    assert same < 20


def test_a_record_before_the_first_byte_is_damage(run, tmp_path):
    """A flipped bit in the directory's offset, near the end of the file, moves all records."""
    bad = bytearray((run[0] / "ckpt.pt").read_bytes())
    bad[-46] ^= 1
    (tmp_path / "ckpt.pt").write_bytes(bad)
    with pytest.raises(UsageError, match="truncated, or not a checkpoint"):
        read_checkpoint(tmp_path / "ckpt.pt")


def test_a_record_marked_as_a_folder_is_damage(run, tmp_path):
    """A flipped bit in its attributes, 8 bytes before its name: torch would read other memory."""
    bad = bytearray((run[0] / "ckpt.pt").read_bytes())
    bad[bad.rfind(b"archive/data/0PK") - 8] ^= 16
    (tmp_path / "ckpt.pt").write_bytes(bad)
    with pytest.raises(UsageError, match="truncated, or not a checkpoint"):
        read_checkpoint(tmp_path / "ckpt.pt")


def edited(ckpt, edit):
    file = io.BytesIO()
    torch.save(ckpt, file)
    file.seek(0)
    copy = torch.load(file, weights_only=True)
    edit(copy)
    return copy

EDITS = {
    "do not fit the model": lambda c: c["weights"].update(s_E=torch.zeros(7)),
    "state does not fit model and optimizer": lambda c: c["optimizer"]["state"].pop("layers.0.W_Q"),
    "lacks args|lacks seed": lambda c: c["args"].pop("seed"),
}

@pytest.mark.parametrize("message", EDITS)
def test_what_a_checkpoint_holds_is_checked_before_it_is_used(run, message):
    out, ckpt = run
    save_checkpoint(out / "ckpt.pt", edited(ckpt, EDITS[message]))
    with pytest.raises(UsageError, match=message) as e:
        resume(out, "--steps", "5")
    assert "\n" not in str(e.value)

# ------------------------------------------------------------------------------ fine-tuning

def test_init_takes_the_model_and_starts_anew(run, tmp_path):
    out, ckpt = run
    flags = ["--steps", "1", "--lr", "1e-30", "--seq-len", "16"]
    other = fit(tmp_path / "tuned", *flags, "--init", str(out / "ckpt.pt"))
    assert other["step"] == 1
    for name, p in ckpt["weights"].items():
        torch.testing.assert_close(other["weights"][name], p)
    with pytest.raises(UsageError, match="trained with --psi 2, not 3: leave --psi out"):
        fit(tmp_path / "tuned3", *flags, "--init", str(out / "ckpt.pt"), "--psi", "3")

def test_checkpoints_have_their_own_rhythm(tmp_path, capsys):
    fit(tmp_path / "out", "--steps", "5", "--eval-every", "5", "--save-every", "2")
    said = capsys.readouterr().out
    assert said.count("saved") == 3
    assert said.count("validation loss") == 1

def test_data_is_found_from_another_folder(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "text.txt").write_text(TEXT)
    monkeypatch.chdir(tmp_path)
    train.main([*SMALL, "--data", "text.txt", "--out", "relative", "--steps", "1"])
    monkeypatch.chdir(tmp_path / "elsewhere")
    train.main(["--resume", "--out", "../relative", "--steps", "2"])
    assert read_checkpoint("../relative/ckpt.pt")["step"] == 2

@pytest.mark.parametrize("name", ["a\tb.txt", "a\nb.txt", b"caf\xe9.txt", "café.txt"])
@pytest.mark.skipif(sys.platform == "win32", reason="such names are refused there")
def test_any_name_of_a_file_can_be_trained_on(tmp_path, name):
    path = os.fsencode(tmp_path) + b"/" + os.fsencode(name)
    with open(path, "w") as file:
        file.write(TEXT)
    name = os.fsdecode(path)
    fit(tmp_path / "out", "--steps", "1", data=name)
    resume(tmp_path / "out", "--steps", "2")
    found = read_run(tmp_path / "out")
    assert found.flags["data"] == on_one_line(name)
    assert found.flags["seq_len"] == "32"

def test_the_log_of_a_run_whose_checkpoint_was_renamed_stays(run):
    out, _ = run
    (out / "ckpt.pt").rename(out / "m.pt")
    before = (out / "log.tsv").read_text()
    with pytest.raises(UsageError, match="belongs to a run whose checkpoint is gone: --force"):
        fit(out, "--steps", "9", *STEPS)
    assert (out / "log.tsv").read_text() == before

@pytest.mark.parametrize("flag, code", [([], 3), (["--lr", "0.01"], 1)])
def test_a_diverged_run_is_a_result_of_its_own_flags_only(tmp_path, flag, code):
    flags = ["--steps", "9", "--lr", "1e18", "--warmup", "1"]
    with pytest.raises(UsageError, match="diverged") as e:
        fit(tmp_path / "out", *flags)
    assert e.value.code == 3
    with pytest.raises(UsageError, match="diverged.*--force overwrites it") as e:
        fit(tmp_path / "out", *flags, *flag)
    assert e.value.code == code
