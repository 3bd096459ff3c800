"""Tests of a run's folder and of support/checkpoint.py: files stay whole, and are checked."""
import multiprocessing

import pytest
import torch

import train
from support import run as folders
from support.cli import UsageError
from support.run import read_checkpoint
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


# ------------------------------------------------------------------------------ fine-tuning

def test_init_takes_the_model_and_starts_anew(run, tmp_path):
    out, ckpt = run
    flags = ["--steps", "1", "--lr", "1e-30", "--seq-len", "16"]
    other = fit(tmp_path / "tuned", *flags, "--init", str(out / "ckpt.pt"))
    assert other["step"] == 1
    for name, p in ckpt["weights"].items():
        torch.testing.assert_close(other["weights"][name], p)
    with pytest.raises(UsageError, match="trained with --psi 2: leave --psi out"):
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
