"""Tests of mistakes: each gets one line, and nothing already there is lost."""
import contextlib
import io
import math
import os
import queue
import signal
import subprocess
import sys

import pytest
import torch

import abcdigits
import train
from support.cli import UsageError, cli
from multiscreen import GatedScreeningTiles, Multiscreen
from support.models import build_model
from support.run import load_checkpoint
from tests.helpers import ROOT, SMALL, args_of, fit


def complaint(main):
    """The line that `cli(main)` prints if it exits with 1; else the exit code."""
    with pytest.raises(SystemExit) as e, contextlib.redirect_stderr(io.StringIO()) as said:
        cli(main)
    sys.stderr.write(said.getvalue())
    return said.getvalue().removesuffix("\n") if e.value.code == 1 else e.value.code


# ------------------------------------------------------------------------- the command line

@pytest.mark.parametrize("error, code", [
    (UsageError("too small"), "error: too small"),
    (FileNotFoundError(2, "No such file or directory", "a/b"),
     "error: a/b: No such file or directory"),
    (OSError("the disk is full"), "error: the disk is full"), (KeyboardInterrupt(), 130)])
def test_each_kind_of_error_has_its_line_or_its_exit_code(error, code):
    def main():
        raise error

    assert complaint(main) == code


@pytest.mark.parametrize("error, code", [
    (KeyboardInterrupt("stopped at step 3"), 130), (UsageError("diverged", code=3), 3)])
def test_a_process_of_several_ends_at_once_with_its_code(monkeypatch, error, code):
    """Threads of FSDP2 abort one of five processes that end by themselves."""
    def stopped():
        raise error

    codes = []
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(os, "_exit", codes.append)
    assert complaint(stopped) == code
    assert codes == [code]


@pytest.mark.slow
def test_a_terminal_without_a_character_gets_its_escape_and_a_closed_pipe_no_traceback():
    """As in `python -m lab.sample | head`."""
    code = ("from support.cli import cli\n"
            "cli(lambda: [print('caf\\u00e9', flush=True) for _ in range(10**5)])")
    ascii_only = os.environ | {"PYTHONIOENCODING": "ascii"}
    python = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, env=ascii_only)
    assert python.stdout.readline() == b"caf\\xe9\n"
    python.stdout.close()
    assert python.wait() == 128 + signal.SIGPIPE
    assert python.stderr.read() == b""


def test_a_mistake_is_one_line_and_exit_code_1():
    out = subprocess.run([sys.executable, "abcdigits.py", "--ckpt", "nowhere/ckpt.pt"], cwd=ROOT,
                         capture_output=True, text=True)
    assert out.returncode == 1
    assert out.stderr == ("error: nowhere/ckpt.pt does not exist: train a model first, "
                          "or name its ckpt.pt\n")


def test_a_main_module_without_a_spec_has_a_command_line(monkeypatch):
    """As in pdb, and in the second %run of a file in a notebook."""
    monkeypatch.delattr(sys.modules["__main__"], "__spec__")
    assert args_of(["--psi", "3"]).psi == 3


class Forgetful(GatedScreeningTiles):
    def initialize(self):
        self.share = torch.nn.Parameter(torch.zeros(1))


@pytest.mark.parametrize("name, says", [
    (f"multiscreen:{__name__}.Forgetful", "Forgetful has no W_O, .*call super().initialize"),
    ("nicegate.NoTanh", "a part of a model, as in multiscreen:nicegate.NoTanh")])
def test_a_model_that_cannot_be_built_is_one_line(name, says):
    with pytest.raises(UsageError, match=says.replace("(", r"\(").replace(")", r"\)")):
        build_model(name, {"psi": 2, "vocab_size": 9})


def test_a_bug_in_an_edited_model_is_not_called_a_lack_of_memory(monkeypatch):
    def initialize(self):
        raise RuntimeError("shape mismatch")

    monkeypatch.setattr(GatedScreeningTiles, "initialize", initialize)
    with pytest.raises(RuntimeError, match="shape mismatch"):
        build_model("multiscreen", {"psi": 2})


def test_a_bug_is_no_mistake_of_the_user():
    def main():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        cli(main)


# -------------------------------------------------------------------------------- bad input

@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a run and unusable files."""
    folder = tmp_path_factory.mktemp("bad")
    fit(folder / "out", "--steps", "2")
    files = {"empty.txt": b"", "short.txt": b"short", "empty.bin": b"", "odd.bin": b"123",
             "notes/log.tsv": b"my notes\n",
             "half/ckpt.pt": (folder / "out/ckpt.pt").read_bytes()[:9999]}
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


MISTAKES = [
    # Numbers and names.
    ("--psi 0", "--psi: "), ("--layers 0", "--layers: "),
    ("--psi 2.5", "--psi: "), ("--psi 100000", "out of memory"),
    ("--lr -1", "--lr: "), ("--lr nan", "--lr: "), ("--lr x", "--lr: "),
    ("--seed -1", "--seed: "), ("--clip -1", "--clip: "), ("--batch-size 0", "--batch-size: "),
    (f"--seed {2**64}", "must be a number"), ("--steps 0", "--steps: "),
    ("--w-th 1", "w_th is 1.0"),
    ("--batch-tokens 500", "--batch-tokens 500: it must be a multiple of 128"),
    ("--nonsense 1", "nonsense"), ("--kernel fast", "--kernel: invalid choice: 'fast'"),
    ("--model nothing", "'nothing' is unknown"), ("--model multiscreen:what", "what is unknown"),
    ("--model transformer:3M", "transformer:3M is unknown"),
    ("--model transformer:1,2,7", "a multiple of 2 N_H"),
    ("--model transformer:8M --psi 3", "a Transformer's sizes are in its name"),
    ("--tokenizer words", "'words' is unknown"), ("--device nonsense", "'nonsense' cannot be used"),
    # Data. Other files that cannot be used are in test_data.py.
    ("--data missing.txt", "missing.txt does not exist"), ("--data empty.txt", "fewer than one"),
    ("--data short.txt", "fewer than one sequence"), ("--data empty.bin", "empty, or"),
    ("--val text.txt", "text.txt holds out all of --data: leave some of it to train on"),
    ("--data odd.bin", "not a whole number of tokens"),
    ("--data abcdigits --digits 1", "digits"), ("--data abcdigits --digits 19", "digits"),
    # Folders and checkpoints.
    ("--out short.txt", "name a folder"), ("--out .", "name a folder"),
    ("--out short.txt/x", "short.txt/x: Not a directory"),
    ("--out caf\udce9", "the name b'caf\\xe9' is not UTF-8: choose another"),
    ("--init out", "out is a folder: name a checkpoint, such as out/ckpt.pt"),
    ("--init out/ckpt", "out/ckpt does not exist: train a model first, or name its ckpt.pt"),
    ("--out notes", "notes/log.tsv belongs to no run: name another --out"),
    ("--out half --resume", "half/ckpt.pt is damaged, or not a checkpoint of train.py"),
    ("--out out --resume --psi 3", "was trained with --psi 2: leave --psi out"),
    ("--out out --force --init out/ckpt.pt", "--out out would overwrite out/ckpt.pt"),
    ("--resume --init out/ckpt.pt", "--init begins a run and --resume continues one"),
    ("--resume --force", "not allowed with"),
    ("--init missing.pt", "missing.pt does not exist"), ("--init text.txt", "not a checkpoint"),
    ("--out out", "out holds a run: --resume continues it, --force overwrites it, another"),
    ("--model multiscreen:absent_file.Tiles",
     "named 'absent_file'): absent_file.py is neither beside train.py nor in"),
    ("--model multiscreen:ideas/mine.Mine", "ideas/mine.Mine: write ideas.mine.Mine"),
    ("--model multiscreen:multiscreen.Tiles",
     f"multiscreen.Tiles is unknown: {ROOT}/multiscreen.py has GatedScreeningTiles\n"),
    ("--model multiscreen:tests.test_mistakes.Forget", "test_mistakes.py has Forgetful\n"),
    ("--model multiscreen:queue.Tiles", f"queue.Tiles is unknown: {queue.__file__} has no subclass "
     "of multiscreen.GatedScreeningTiles; if that is another file than yours, give yours a name"),
    ("--model multiscreen:torch.nn.Linear", "torch.nn.Linear cannot be a layer of this model"),
    ("--model transformer:1,2,8:multiscreen.GatedScreeningTiles",
     "a layer of this model: it is no subclass of lab.baselines.transformer.Block"),
]


@pytest.mark.parametrize("flags, message", MISTAKES)
def test_a_mistake_is_explained_and_costs_nothing(folder, monkeypatch, flags, message):
    monkeypatch.chdir(folder)
    before = {p: p.is_file() and p.read_bytes() for p in folder.rglob("*")}
    small = SMALL[2:] if "transformer" in flags else SMALL         # no --psi
    argv = [*small, "--data", "text.txt", "--out", "new", "--steps", "2", *flags.split()]
    line = complaint(lambda: train.main(argv))
    assert line.startswith("error: ")
    assert message in f"{line}\n"
    assert "\n" not in line
    assert {p: p.is_file() and p.read_bytes() for p in folder.rglob("*")} == before


@pytest.mark.parametrize("flags", ["--model nothing", "--psi 100000", "--device nonsense"])
def test_a_model_that_cannot_be_is_refused_before_the_data_is_read(tmp_path, monkeypatch, flags):
    monkeypatch.setattr(train, "get_data", lambda *inputs: pytest.fail("has read the data"))
    argv = [*SMALL, "--out", str(tmp_path / "new"), *flags.split()]
    assert complaint(lambda: train.main(argv)).startswith("error: ")


@pytest.mark.parametrize("flags", ["--data empty.txt", "--psi 100000"])
def test_even_force_overwrites_a_run_only_with_one_that_can_start(folder, monkeypatch, flags):
    monkeypatch.chdir(folder)
    before = {p: p.is_file() and p.read_bytes() for p in folder.rglob("*")}
    argv = [*SMALL, "--data", "text.txt", "--out", "out", "--force", *flags.split()]
    assert complaint(lambda: train.main(argv)).startswith("error: ")
    assert {p: p.is_file() and p.read_bytes() for p in folder.rglob("*")} == before


def test_a_table_that_cannot_be_written_is_explained_before_any_work(folder, monkeypatch):
    def exact_matches(*inputs):
        pytest.fail("measured before the table could be written")

    monkeypatch.setattr(abcdigits, "exact_matches", exact_matches)
    (folder / "out/abcdigits.tsv").mkdir()
    monkeypatch.setattr(sys, "argv", ["abcdigits.py", "--ckpt", str(folder / "out/ckpt.pt"),
                                      "--swe", "--lengths", "260", "--device", "cpu"])
    assert "abcdigits.tsv: Is a directory" in complaint(abcdigits.main)
    (folder / "out/abcdigits.tsv").rmdir()


def test_logits_that_are_not_finite_are_reported_and_not_counted_as_wrong(folder, monkeypatch):
    monkeypatch.setattr(Multiscreen, "logits", lambda self, x, head=None: x[..., :1] * math.nan)
    monkeypatch.setattr(sys, "argv", ["abcdigits.py", "--ckpt", str(folder / "out/ckpt.pt"),
                                      "--lengths", "260", "--device", "cpu", "--trials", "1"])
    assert "error: the logits are not finite" in complaint(abcdigits.main)


# ------------------------------------------------------------------------- bad checkpoints

def test_a_checkpoint_in_a_folder_whose_name_is_not_utf8_is_not_called_damaged(folder, tmp_path):
    path = tmp_path / "caf\udce9" / "ckpt.pt"
    path.parent.mkdir()
    path.write_bytes((folder / "out/ckpt.pt").read_bytes())
    with pytest.raises(UsageError, match="is not UTF-8: choose another"):
        load_checkpoint(path)


def test_an_error_of_the_disk_is_no_damage(folder, monkeypatch):
    def fail(*inputs, **options):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(torch, "load", fail)
    path = folder / "out/ckpt.pt"
    assert complaint(lambda: load_checkpoint(path)) == f"error: {path}: Input/output error"


class Malicious:
    """Ends the tests when unpickled."""

    def __reduce__(self):
        return os._exit, (1,)


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", ["empty", "truncated", "text", "evil", "other"])
def test_bad_checkpoints_are_explained_and_nothing_in_them_runs(folder, tmp_path, kind):
    good = (folder / "out/ckpt.pt").read_bytes()
    content = {"empty": b"", "truncated": good[: len(good) // 2], "text": b"hello",
               "evil": saved({"weights": Malicious()}), "other": saved({"model": "multiscreen"})}
    path = tmp_path / "ckpt.pt"
    path.write_bytes(content[kind])
    message = "damaged, or not a checkpoint of train.py"
    if kind == "other":
        message = "it lacks args"
    with pytest.raises(UsageError, match=message) as e:
        load_checkpoint(path)
    assert "\n" not in str(e.value)
