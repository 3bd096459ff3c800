"""Tests of a run's folder and of support/checkpoint.py: files stay whole, and are checked."""
import io
import multiprocessing
import os
import sys

import pytest
import torch

import train
from lab.logs import read_run
from support import folder as folders
from support.checkpoint import read_checkpoint
from support.cli import UsageError, on_one_line
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

def test_a_resumed_run_has_its_whole_log_again(run):
    """The checkpoint has it. A kill may leave half a row, or rows beyond the checkpoint."""
    out, _ = run
    log = out / "log.tsv"
    text = log.read_text()
    log.write_text(text[:-20] + "\n5\t1.0")
    resume(out, "--steps", "6")
    assert log.read_text().startswith(text)
    assert [row["step"] for row in read_table(log)] == [
        "1", "2", "2", "3", "4", "4", "5", "6", "6"]

# ------------------------------------------------------------------------- the folder's lock

def hold(folder, pipe):
    """Lock a folder until a message arrives."""
    with folders.locked(str(folder)):
        pipe.send("locked")
        pipe.recv()

def test_a_folder_in_use_is_refused(run):
    out, _ = run
    here, there = multiprocessing.Pipe()
    other = multiprocessing.Process(target=hold, args=(out, there), daemon=True)
    other.start()
    assert here.recv() == "locked"
    for flags in (["--resume"], ["--force"]):
        with pytest.raises(UsageError, match="in use by another process"):
            fit(out, "--steps", "5", *flags)
    here.send("go")
    other.join()
    assert read_checkpoint(out / "ckpt.pt")["step"] == 4
    resume(out, "--steps", "5")

# --------------------------------------------------------------------- damaged checkpoints

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
}

@pytest.mark.parametrize("message", EDITS)
def test_what_a_checkpoint_holds_is_checked_before_it_is_used(run, message):
    out, ckpt = run
    torch.save(edited(ckpt, EDITS[message]), out / "ckpt.pt")
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

@pytest.mark.parametrize("name", ["a\tb\nc.txt", b"caf\xe9.txt"])
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
