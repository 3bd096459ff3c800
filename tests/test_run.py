"""Tests of support/run.py and checkpoint.py: what is on disk stays whole, and is checked."""
import errno
import io
import multiprocessing
import os
import sys

import pytest
import torch

import train
from experiments.runs import read_folder
from support.checkpoint import read_checkpoint, save_checkpoint
from support.cli import UsageError, on_one_line
from support.data import Sequences
from support.run import Lock, Log
from tests.helpers import SMALL, TEXT, fit, read_table

STEPS = ["--log-every", "1", "--eval-every", "2"]

@pytest.fixture
def run(tmp_path):
    """A folder with a run of four steps, and what it holds."""
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
    assert [row["step"] for row in read_table(log)] == ["1", "2", "3", "4", "5", "6"]

def test_rows_beyond_the_checkpoint_are_dropped(run):
    """As after a kill between the log's row and the checkpoint."""
    out, _ = run
    text = (out / "log.tsv").read_text()
    (out / "log.tsv").write_text(text + "5\t1.0" + "\t" * (len(train.COLUMNS) - 2) + "\n")
    resume(out, "--steps", "5")
    assert [row["step"] for row in read_table(out / "log.tsv")] == ["1", "2", "3", "4", "5"]
    assert float(read_table(out / "log.tsv")[-1]["loss"]) != 1.0

@pytest.fixture
def lock(tmp_path):
    with Lock(tmp_path) as held:
        yield held

class Full:
    """A file on a full disk."""

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def write(self, text):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

def test_a_full_disk_costs_no_row(lock, tmp_path, monkeypatch, capsys):
    log = Log(lock, ("step", "loss"))
    log.add({"step": 1, "loss": 2.5})
    with monkeypatch.context() as m:
        m.setattr("builtins.open", lambda *a, **k: Full())
        log.add({"step": 2})
        m.setattr(Log, "rewrite", lambda self: Full().write(""))
        log.add({"step": 3, "loss": 1.5})
    assert capsys.readouterr().out.count("No space left") == 1
    log.add({"step": 4})
    assert (tmp_path / "log.tsv").read_text() == "step\tloss\n1\t2.5\n2\t\n3\t1.5\n4\t\n"
    assert log.text == (tmp_path / "log.tsv").read_text()

def test_steps_beyond_a_million_keep_their_digits(lock):
    log = Log(lock, ("step", "loss"))
    log.add({"step": 1_234_567, "loss": 1.23456789})
    assert log.text == "step\tloss\n1234567\t1.23457\n"
    assert Log(lock, ("step", "loss"), log.text).text == log.text

# ------------------------------------------------------------------------- the folder's lock

def hold(folder, pipe):
    """Lock a folder until something is said."""
    with Lock(folder):
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

@pytest.mark.skipif(sys.platform == "win32", reason="links need rights there")
@pytest.mark.parametrize("name", ["ckpt.pt", "log.tsv", "flags.txt", "lock"])
def test_nothing_is_written_through_a_link(tmp_path, name):
    (tmp_path / "out").mkdir()
    (tmp_path / "elsewhere").write_text("mine")
    (tmp_path / "out" / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError):
        fit(tmp_path / "out", "--steps", "1", "--force")
    assert (tmp_path / "elsewhere").read_text() == "mine"
    assert (tmp_path / "out" / name).is_symlink()

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
    """In the weights, the moments, the pickle, the archive's own records."""
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

        # Nothing but padding between the records may change without a word.
        same += 1
        for name, p in run[1]["weights"].items():
            silent += not torch.equal(ckpt["weights"][name], p)
    assert silent == 0
    assert same < 20

def edited(ckpt, edit):
    file = io.BytesIO()
    torch.save(ckpt, file)
    file.seek(0)
    copy = torch.load(file, weights_only=True)
    edit(copy)
    return copy

def transpose(ckpt):
    moments = ckpt["optimizer"]["state"]["W_E"]
    moments["exp_avg"] = moments["exp_avg"].T.contiguous()

EDITS = {
    "step is '-1'": lambda c: c.update(step=-1),
    "--lr is": lambda c: c["args"].update(lr=[1]),
    "optimizer state does not fit": transpose,
    "random state": lambda c: c.update(random_state=torch.zeros(5, dtype=torch.uint8)),
    "do not fit the model": lambda c: c["weights"].update(s_E=torch.zeros(7)),
    "fit the model$": lambda c: c["optimizer"]["state"].pop("layers.0.W_Q"),
    "optimizer state": lambda c: c["optimizer"]["state"]["W_E"]["exp_avg"].fill_(torch.nan),
    "its log is not a table": lambda c: c.update(log=""),
    "its log": lambda c: c.update(log=c["log"] + "5\t2.5\n"),
    "theta is '3'": lambda c: c["config"].update(theta=3),
    "lacks args|lacks seed": lambda c: c["args"].pop("seed"),
    "W_E holds nan or inf": lambda c: c["weights"]["W_E"][3].fill_(torch.nan),
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

# ------------------------------------------------------------------- the folder during a run

@pytest.mark.parametrize("damage", ["lock removed", "folder moved", "taken by another run"])
def test_a_folder_that_was_moved_or_taken_ends_the_run_and_nothing_is_written(run, monkeypatch,
                                                                               damage):
    out, _ = run
    moved, draw = out.with_name("moved"), Sequences.draw

    def draw_and_damage(self, n, seed):
        if n == 16 and damage == "folder moved":
            out.rename(moved)
        elif n == 16:
            (out / "lock").unlink()
            if damage == "taken by another run":
                (out / "lock").write_text("process 1 on elsewhere")
            (out / "ckpt.pt").write_text("of the other run")
            (out / "log.tsv").write_text("of the other run")
        return draw(self, n, seed)

    monkeypatch.setattr(Sequences, "draw", draw_and_damage)
    with pytest.raises(UsageError, match="lock is gone: was the folder moved or deleted, or is"):
        resume(out, "--steps", "9")
    if damage == "folder moved":
        assert not out.exists()
        assert read_checkpoint(moved / "ckpt.pt")["step"] == 4
    else:
        assert (out / "ckpt.pt").read_text() == (out / "log.tsv").read_text() == "of the other run"
        assert (out / "lock").exists() == (damage == "taken by another run")

@pytest.mark.parametrize("name", ["a\tb.txt", "a\nb.txt", b"caf\xe9.txt", "café.txt"])
@pytest.mark.skipif(sys.platform == "win32", reason="such names are refused there")
def test_any_name_of_a_file_can_be_trained_on(tmp_path, name):
    path = os.fsencode(tmp_path) + b"/" + os.fsencode(name)
    with open(path, "w") as file:
        file.write(TEXT)
    name = os.fsdecode(path)
    fit(tmp_path / "out", "--steps", "1", data=name)
    resume(tmp_path / "out", "--steps", "2")
    found = read_folder(tmp_path / "out")
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
