"""Tests of support/run.py: a run's folder stays whole, and its checkpoint is checked."""
import contextlib
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import filelock
import pytest
import torch

import multiscreen
import train
from support.cli import UsageError, pasteable
from support import run as folders
from support.models import build_model
from support.run import read_checkpoint
from tests.helpers import ROOT, SMALL, TEXT, fit, full_disk, read_table
from tests.helpers import run as run_python
from tests.inputs import small

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
    with filelock.FileLock(folder / "lock"):
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

# --------------------------------------------------------------- disks and damaged checkpoints

@pytest.mark.parametrize("name, size", [("ckpt.pt", 30_000), ("log.tsv", 300)])
def test_a_full_disk_names_the_file_and_leaves_the_checkpoint_that_was_there(
        run, monkeypatch, capsys, name, size):
    out, _ = run
    before = (out / "ckpt.pt").read_bytes()
    begin = folders.Run.write_head
    with contextlib.ExitStack() as disk, pytest.raises(OSError) as e:
        def fill_up(*inputs):
            begin(*inputs)
            disk.enter_context(full_disk(size))

        monkeypatch.setattr(folders.Run, "write_head", fill_up)
        resume(out, "--steps", "9")
    assert (e.value.filename, e.value.strerror) == (str(out / name), "File too large")
    assert (out / "ckpt.pt").read_bytes() == before
    assert not [*out.glob("*.tmp")]


def test_a_checkpoint_is_on_the_disk_before_it_takes_the_place_of_the_old_one(
        tmp_path, monkeypatch):
    """Otherwise a power cut could leave an empty file."""
    path, happened, right = tmp_path / "ckpt.pt", [], os.replace

    def replace(*paths):
        happened.append("replaced")
        right(*paths)

    monkeypatch.setattr(os, "replace", replace)
    monkeypatch.setattr(os, "fsync", lambda file: happened.append(os.fstat(file).st_size))
    folders.write_checkpoint(path, {"W": torch.zeros(99)})
    assert happened == [path.stat().st_size, "replaced"]


def test_what_a_checkpoint_holds_is_checked_before_it_is_used(run):
    """Every byte of the weights has a checksum, and they must fit the model."""
    out, ckpt = run
    content = bytearray((out / "ckpt.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (out / "ckpt.pt").unlink()                         # `ckpt` is still mapped to it
    (out / "ckpt.pt").write_bytes(content)
    with pytest.raises(UsageError, match="is damaged, or not a checkpoint of train.py"):
        resume(out, "--steps", "5")
    (out / "ckpt.pt").unlink()
    ckpt["weights"]["s_E"] = torch.zeros(7)
    torch.save(ckpt, out / "ckpt.pt")
    with pytest.raises(UsageError, match="do not fit the model") as e:
        resume(out, "--steps", "5")
    assert "\n" not in str(e.value)


def test_a_model_without_what_training_needs_can_be_tried_but_not_resumed(run):
    out, ckpt = run
    for name in ("drawn", "optimizer", "random_states"):
        del ckpt[name]
    (out / "ckpt.pt").unlink()
    torch.save(ckpt, out / "ckpt.pt")
    train.load_checkpoint(out / "ckpt.pt")
    with pytest.raises(UsageError, match="--init .*ckpt.pt --out NEW starts from it"):
        resume(out, "--steps", "5")


# ---------------------------------------------------------------------------------- the code

def test_the_code_of_a_run_is_that_of_the_modules_it_loaded(run):
    out, ckpt = run
    for path in ("multiscreen.py", "train.py", "support/windowed.py", "support/screen.cpp"):
        assert (out / "source" / path).read_text() == (ROOT / path).read_text()
    assert not any("site-packages" in path or path == "os.py" for path in ckpt["source"])


def test_to_the_code_of_a_run_belongs_what_your_class_imports(tmp_path, monkeypatch):
    """Its base, your other files, and of ours what a Transformer is; nothing that is installed.

    In the same order in each process, as hashes depend on it.
    """
    mine = ("\ufeffimport numpy\nimport queue\nimport common.act\n"
            "from lab.baselines.attention import NoPE\nfrom .deep import B\n\n\n"
            "class Mine(NoPE):\n    pass\n")
    for file, text in {"ideas/mine.py": mine, "ideas/deep.py": "B = 1\n", "ideas/other.py": "",
                       "common/act.py": "A = 1\n", "common/__init__.py": ""}.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    model = build_model("transformer:2,2,16:ideas.mine.Mine", {"vocab_size": 9})
    assert [path for path in folders.texts(model) if path not in folders.OURS] == [
        "ideas/mine.py", "common/act.py", "lab/baselines/attention.py", "ideas/deep.py",
        "common/__init__.py", "lab/baselines/__init__.py", "lab/baselines/transformer.py",
        "lab/__init__.py"]
    # A file that is being edited still counts as it is, and so do the classes of all layers.
    (tmp_path / "ideas/mine.py").write_text("class Mine(\n")
    assert folders.texts(model)["ideas/mine.py"] == "class Mine(\n"
    model.layers[0] = build_model("transformer:2,2,16", {"vocab_size": 9}).layers[0]
    assert "ideas/mine.py" in folders.texts(model)
    model = build_model("multiscreen", {"psi": 2, "vocab_size": 9})
    assert folders.texts(model).keys() == {*folders.OURS}
    for name in ("ideas.mine", "ideas.deep", "ideas", "common.act", "common"):
        del sys.modules[name]


def test_a_model_of_other_equations_is_loaded_with_a_line_for_each_file(tmp_path, capsys):
    fit(tmp_path / "out", "--model", "transformer:2,2,16", "--steps", "1")
    ckpt = torch.load(tmp_path / "out/ckpt.pt")
    for file in ("multiscreen.py", "lab/baselines/transformer.py", "support/cli.py"):
        ckpt["source"][file] += "# an edit"
    del ckpt["source"]["lab/baselines/__init__.py"]    # an older checkpoint has fewer files
    torch.save(ckpt, tmp_path / "ckpt.pt")
    capsys.readouterr()
    folders.load_checkpoint(tmp_path / "ckpt.pt")
    assert capsys.readouterr().err == "".join(
        f"{tmp_path / 'ckpt.pt'} was trained with another {file}\n"
        for file in ("multiscreen.py", "lab/baselines/transformer.py"))


def test_the_identity_of_a_measurement_has_the_weights_and_the_code_that_computes(
        tmp_path, monkeypatch):
    """Yours, and of ours what numbers depend on."""
    (tmp_path / "my_idea.py").write_text("from multiscreen import GatedScreeningTiles\n\n\n"
                                         "class Tiles(GatedScreeningTiles):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    model = build_model("multiscreen:my_idea.Tiles", {"psi": 2, "vocab_size": 9})
    right, zeros = folders.texts(model), {"W": torch.zeros(3)}
    assert "class Tiles" in right["my_idea.py"]
    before = folders.identity(model, zeros)
    assert folders.identity(model, zeros) == before
    weights, code = folders.identity(model, {"W": torch.ones(3)}).split("-")
    assert weights != before.split("-")[0]
    assert code == before.split("-")[1]
    for path, counts in (("multiscreen.py", True), ("support/windowed.py", True),
                         ("support/screen.cpp", True), ("my_idea.py", True),
                         ("support/cli.py", False)):
        edited = right | {path: right[path] + "# an edit"}
        monkeypatch.setattr(folders, "texts", lambda model, edited=edited: edited)
        assert (folders.identity(model, zeros) != before) == counts
        monkeypatch.undo()
        monkeypatch.syspath_prepend(tmp_path)
    del sys.modules["my_idea"]

    # In a notebook, functions may be replaced that no file has.
    model = build_model("multiscreen", {"psi": 2, "vocab_size": 9})
    monkeypatch.delattr(sys.modules["__main__"], "__file__")
    assert folders.identity(model, zeros) is None


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
    assert said.count("val_loss") == 1

@pytest.mark.slow
@pytest.mark.parametrize("data", ["text.txt", "abcdigits"])
def test_the_command_that_a_run_ends_with_works_where_it_is_printed(
        tmp_path, monkeypatch, capsys, data):
    """In a folder of your own, with your own class and a name that a shell would split."""
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "mine.py").write_text("from multiscreen import GatedScreeningTiles\n\n\n"
                                      "class Tiles(GatedScreeningTiles):\n    pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    train.main([*SMALL, "--data", data, "--digits", "2", "--steps", "1", "--seq-len", "64",
                "--model", "multiscreen:mine.Tiles", "--out", "my run"])
    del sys.modules["mine"]
    command = capsys.readouterr().out.splitlines()[-1].removeprefix("next: ")
    flags = " --tokens 4 --device cpu"
    if data == "abcdigits":
        flags = " --lengths 160 --depths 0.5 --trials 1 --device cpu"
    env = {name: x for name, x in os.environ.items() if name != "PYTHONPATH"}
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    pasted = subprocess.run(command + flags, shell=True, text=True, capture_output=True, env=env)
    assert pasted.returncode == 0, pasted.stderr


def test_in_the_checkout_a_command_is_as_the_readme_has_it(monkeypatch):
    monkeypatch.chdir(ROOT)
    assert pasteable("python -m lab.sample") == "python -m lab.sample"


def test_data_is_found_from_another_folder(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "text.txt").write_text(TEXT)
    monkeypatch.chdir(tmp_path)
    train.main([*SMALL, "--data", "text.txt", "--out", "relative", "--steps", "1"])
    monkeypatch.chdir(tmp_path / "elsewhere")
    train.main(["--resume", "--out", "../relative", "--steps", "2"])
    assert read_checkpoint("../relative/ckpt.pt")["step"] == 2


# ----------------------------------------------------------------- a training loop of your own

def own(case):
    """A model that is not what its name stands for."""
    class Doubled(multiscreen.GatedScreeningTiles):
        def gate(self, x):
            return 2 * super().gate(x)

    class Other(multiscreen.Multiscreen):
        def logits(self, x, head=None):
            return 2 * super().logits(x, head)

    if case == "model":
        return Other(multiscreen.Config(2, 257))
    if case == "class":                                # no module has it by a name
        return multiscreen.Multiscreen(multiscreen.Config(2, 257), tiles=Doubled)
    model = small(psi=2, vocab_size=257)
    if case == "screen":
        model.screen = lambda q, k, v, w, r, i0=0: multiscreen.screen(q, k, v, 0.9 * w, r, i0)
    elif case == "layer":
        model.layers[1] = Doubled(model.config)
    return model


@pytest.mark.parametrize("case", ["screen", "layer", "model", "class"])
def test_a_model_that_would_be_loaded_as_another_one_is_refused_and_its_weights_are_kept(
        tmp_path, case):
    model = own(case)
    reason = "would build another model"
    if case == "class":
        reason = "could not read it again"
    with pytest.raises(UsageError, match=f"{reason}.*are safe in .*a.pt.refused"):
        train.save_checkpoint(tmp_path / "a.pt", model)
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt.refused"]
    kept = torch.load(tmp_path / "a.pt.refused")["weights"]
    assert all(torch.equal(kept[name], W) for name, W in model.state_dict().items())


@pytest.mark.slow
def test_a_class_in_the_script_itself_is_saved_with_a_line(tmp_path, capsys):
    """At the end of a long loop its weights must not be lost."""
    (tmp_path / "loop.py").write_text(
        "from multiscreen import Config, GatedScreeningTiles, Multiscreen\n"
        "from train import load_checkpoint, save_checkpoint\n\n\n"
        "class Tiles(GatedScreeningTiles):\n    def gate(self, x):\n        return -super().gate(x)"
        "\n\n\nmodel = Multiscreen(Config(2, 257), tiles=Tiles)\n"
        "save_checkpoint('a.pt', model)\n"
        "print(type(load_checkpoint('a.pt')[0].layers[0]) is Tiles)\n")
    path = os.environ | {"PYTHONPATH": str(ROOT)}
    said = run_python(tmp_path / "loop.py", cwd=tmp_path, env=path).stdout
    assert "a.pt: only a program that has the class Tiles can load it" in said
    assert said.endswith("True\n")


# ----------------------------------------------------------- begun, and stopped before a checkpoint

def stopped_at_once(out, *flags):
    """A run in `out` that ends before its first checkpoint."""
    fit(out, "--steps", "1", *flags)
    (out / "ckpt.pt").unlink()


def test_resume_begins_a_run_that_has_no_checkpoint_again_with_its_own_flags_only(tmp_path, capsys):
    stopped_at_once(tmp_path / "out", "--lr", "0.01")
    with pytest.raises(UsageError, match="begun with --lr 0.01 and not 0.0625: repeat its command"):
        fit(tmp_path / "out", "--steps", "1", "--resume")
    assert not (tmp_path / "out/ckpt.pt").exists()
    assert fit(tmp_path / "out", "--steps", "1", "--lr", "0.01", "--resume")["step"] == 1
    assert "a new run begins" not in capsys.readouterr().out
    fit(tmp_path / "mistyped", "--steps", "1", "--resume")
    assert f"a new run begins in {tmp_path / 'mistyped'}" in capsys.readouterr().out


def test_a_gradient_of_0_is_a_run_that_has_diverged(tmp_path, monkeypatch):
    """At a rate of 1000 all is rejected, and the loss stays at that of guessing."""
    monkeypatch.setattr(train, "train_step", lambda *inputs: (torch.tensor(5.5), torch.zeros(())))
    with pytest.raises(UsageError, match="at step 1 grad_norm is 0; nothing was saved"):
        fit(tmp_path / "out", "--steps", "40")
