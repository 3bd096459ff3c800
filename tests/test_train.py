"""Tests of train.py: the loop, signals and --resume, one recipe, mistakes, the trial of a model."""
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import train
from multiscreen import Config, GatedScreeningTiles, Multiscreen
from tests.helpers import ROOT, SMALL, TEXT, args_of, command, fit, read_table, run, write

assert_same = partial(torch.testing.assert_close, rtol=0, atol=0)      # bit for bit
HERE = __name__                                        # what MODULE.NAME calls this file
FILES = "tests.test_files"


# --------------------------------------------------------------------------------- learning

def test_twelve_steps_are_those_of_a_plain_loop_and_are_logged(tmp_path, monkeypatch, capsys):
    """Bit for bit: two passes a step, warm-up, clipping, decay, the order of the sequences."""
    # A clock that is a minute later each time it is read.
    monkeypatch.setattr(train, "time", SimpleNamespace(perf_counter=count(0, 60).__next__))
    flags = ["--batch-tokens", "256", "--weight-decay", "0.1", "--clip", "0.5", "--seed", "3"]
    ckpt = fit(tmp_path / "out", "--steps", "12", *flags, "--log-every", "5", "--eval-every", "8")
    torch.manual_seed(3)
    model = Multiscreen(Config(psi=2, vocab_size=257))
    decay = [{"params": [p for p in model.parameters() if (p.ndim > 1) is matrices],
              "weight_decay": 0.1 if matrices else 0.0} for matrices in (True, False)]
    optimizer = torch.optim.AdamW(decay, betas=(0.9, 0.95), fused=True)
    tokens = np.append(np.frombuffer(TEXT.encode(), np.uint8).astype(int), 256)
    tokens = tokens[: len(tokens) - len(tokens) // 20]
    sequences = [tokens[n : n + 33] for n in range(0, len(tokens) - 33 + 1, 32)]
    order = np.random.default_rng([3, 0]).permutation(len(sequences))
    wanted = []
    for step in range(12):
        losses = []
        for n in (8 * step, 8 * step + 4):
            x = torch.tensor(np.stack([sequences[i] for i in order[n : n + 4]]))
            losses.append(model.loss(x[:, :-1], x[:, 1:]))
            (losses[-1] / 2).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for group in optimizer.param_groups:
            group["lr"] = 2**-4 * min(1, (step + 1) / 2)
        optimizer.step()
        optimizer.zero_grad()
        w = torch.cat([layer.w for layer in model.layers])
        row = sum(losses).item() / 2, group["lr"], norm.item(), w.median().item(), w.max().item()
        wanted.append(pytest.approx(row, rel=1e-5))
    assert_same(ckpt["weights"], model.state_dict())

    rows = read_table(tmp_path / "out/log.tsv")
    assert tuple(rows[0]) == train.COLUMNS
    assert [(row["step"], row["ms"], bool(row["val_loss"])) for row in rows] == [
        ("1", "60000", False), ("5", "15000", False), ("8", "20000", True), ("10", "30000", False),
        ("12", "30000", True)]
    for row in rows:
        found = [float(row[name]) for name in ("loss", "lr", "grad_norm", "w_median", "w_max")]
        assert found == wanted[int(row["step"]) - 1]
    minutes = re.findall(r"min_left (\S+)", capsys.readouterr().out)
    assert minutes == ["11", "1.75", "1.3333", "1", "0"]


class Fake(torch.nn.Module):
    """A model whose losses are its inputs."""
    W_E, seen = torch.zeros(1), ()

    def loss(self, x, y, reduction):
        assert not self.training
        self.seen += tuple(x[:, 0].tolist())
        return x.float()


def test_the_validation_loss_is_the_mean_over_sequences_spread_evenly_and_without_dropout():
    model, data = Fake(), [np.full(3, n) for n in range(600)]
    assert train.evaluate(model, data, 7) == pytest.approx(np.mean(model.seen))
    assert model.seen == tuple(range(0, 600, 3))
    assert model.training


@pytest.mark.slow
def test_a_compiled_run_has_the_losses_of_one_that_is_not(tmp_path):
    for name, more in (("plain", "--no-compile"), ("compiled", "--compile")):
        fit(tmp_path / name, "--steps", "4", "--log-every", "1", more)
    for a, b in zip(*(read_table(tmp_path / name / "log.tsv") for name in ("plain", "compiled"))):
        assert float(a["loss"]) == pytest.approx(float(b["loss"]), rel=1e-4)


# ------------------------------------------------------------------------- stop and continue

class Noisy(GatedScreeningTiles):
    """A layer that draws random numbers in training."""

    def bound(self, h):
        return F.dropout(super().bound(h), 0.1, self.training)


class Curriculum(train.Text):
    """TEXT, for ten steps. Its state is the number of steps so far.

    stops: {step: the signal that the process gets there}. In place of SIGKILL an exit ends the run
    as it stands.
    """
    state, stops = 0, {}

    def __init__(self, args, tokenizer, part):
        super().__init__([np.frombuffer(TEXT.encode(), np.uint8)], args, tokenizer.n_vocab)

    def observe(self, loss):
        self.state += 1
        number = self.stops.pop(self.state, None)
        if number == signal.SIGKILL:
            sys.exit(137)
        if number is not None:
            signal.raise_signal(number)
            assert signal.getsignal(number) is signal.SIG_DFL          # a second one would end it
        return self.state >= 10


def test_a_run_that_is_stopped_resumed_and_extended_is_the_same_bit_for_bit(
        tmp_path, monkeypatch, capsys):
    """It ends where its curriculum ends, or at the last step, and then makes no more steps."""
    flags = ["--log-every", "1", "--eval-every", "3", "--model", f"{HERE}.Noisy", "--steps"]
    data, path = f"{HERE}.Curriculum", tmp_path / "out/ckpt.pt"
    whole = fit(tmp_path / "whole", *flags, "99", data=data)
    # Killed at step 6, it has logged step 5, which its checkpoint does not know.
    monkeypatch.setattr(Curriculum, "stops", {4: signal.SIGINT, 6: signal.SIGKILL,
                                              7: signal.SIGTERM})
    for code, step in ((130, 4), (137, 4), (130, 7)):
        with pytest.raises(SystemExit) as end:
            fit(tmp_path / "out", *flags, "8", "--resume", data=data)
        assert end.value.code == code
        assert train.read_checkpoint(path)["step"] == step
    again = ["--resume", "--out", tmp_path / "out"]    # all other flags are the checkpoint's
    for more, step in (([], 8), (["--steps", "99"], 10)):
        command(*again, *more)
        before, _ = path.read_bytes(), capsys.readouterr()
        command(*again)
        assert f"is finished, at step {step}" in capsys.readouterr().out
        assert path.read_bytes() == before

    parts = train.read_checkpoint(path)
    assert parts["finished"] and parts["step"] == parts["data_state"] == whole["step"] == 10
    assert_same(parts["weights"], whole["weights"])
    assert_same(parts["optimizer"], whole["optimizer"])
    logs = [[(row["step"], row["loss"]) for row in read_table(tmp_path / out / "log.tsv")]
            for out in ("out", "whole")]
    assert logs[0] == logs[1]


@pytest.mark.parametrize("where", ["here", "in another process"])
def test_a_stop_between_two_printed_lines_is_saved(tmp_path, monkeypatch, where):
    monkeypatch.setattr(Curriculum, "stops", {4: signal.SIGINT} if where == "here" else {})
    own, stops = train.total, count(1)

    def total(x):                                      # the other one stops after four steps
        return own(x) + float(isinstance(x, float) and next(stops) == 4)

    if where != "here":
        monkeypatch.setattr(train, "total", total)
    with pytest.raises(SystemExit) as end:
        fit(tmp_path / "out", "--steps", "8", "--log-every", "3", data=f"{HERE}.Curriculum")
    assert end.value.code == 130
    # A smaller --steps makes no more steps.
    command("--resume", "--out", tmp_path / "out", "--steps", "3")
    assert train.read_checkpoint(tmp_path / "out/ckpt.pt")["step"] == 4


def test_a_pipe_that_nobody_reads_any_longer_changes_nothing(tmp_path, monkeypatch):
    """As in `python train.py | head -1`."""
    def write(text):
        raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", SimpleNamespace(write=write))
    assert fit(tmp_path / "out", "--steps", "2")["step"] == 2


# -------------------------------------------------------------------------------- one recipe

def complaint(capsys, *flags):
    """(exit code, the one line of stderr) of a command that ends with an error."""
    capsys.readouterr()
    with pytest.raises((SystemExit, OSError)) as end:
        command(*flags)
    said, code = capsys.readouterr().err, f"error: {end.value}"        # of an OSError
    if isinstance(end.value, SystemExit):
        code = end.value.code
    if isinstance(code, str):                          # Python prints it and exits with 1
        said, code = f"{said}{code}\n", 1
    assert said.count("\n") == 1 or said.startswith("usage: "), said
    return code, said.splitlines()[-1]


# Files and a folder that are no text, or not enough of it.
NO_TEXTS = {"a.JSONL": "{}", "latin1.txt": b"caf\xe9 " * 9, "utf16.txt": b"\xff\xfea\x00b\x00",
            "odd.bin": b"123", "empty.bin": b"", "folder/a.dat": "x", "short.txt": "short",
            "other.bin": np.full(999, 257, "<u2")}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a run of two steps in out/, and with NO_TEXTS."""
    folder = write(tmp_path_factory.mktemp("trained"), NO_TEXTS)
    fit(folder / "out", "--steps", "2")
    return folder


@pytest.fixture
def copied(trained, tmp_path, monkeypatch):
    """A copy of it, which is the current folder. Its run reads the text of the original."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("flags, old", [
    ("--lr 0.5", "0.0625"), ("--seed 1", "0"), ("--psi 3", "2"), ("--layers 1", "None"),
    ("--w-th 16", "256.0"), ("--clip 1", "0.0"), ("--batch-tokens 256", "128"), ("--warmup 9", "2"),
    ("--seq-len 48", "32"), ("--tokenizer gpt2", "bytes"), ("--weight-decay 1", "0.0"),
    ("--dtype bfloat16", "float32"), (f"--model {HERE}.Noisy", "multiscreen"),
    ("--data stdlib", "text.txt"), ("--val text.txt", "None")])
def test_resume_refuses_another_recipe_and_names_it(trained, monkeypatch, capsys, flags, old):
    monkeypatch.chdir(trained)
    before = (trained / "out/ckpt.pt").read_bytes()
    flag, new = flags.split()
    code, line = complaint(capsys, "--resume", "--steps", "3", flag, new)
    assert code == 2 and line.startswith(f"error: {flag}") and old in line and new in line
    assert (trained / "out/ckpt.pt").read_bytes() == before


def test_resume_refuses_another_text_and_other_code(tmp_path, capsys):
    """The number of sequences and a checksum of 64 of them tell one text from another."""
    files = {"text.txt": TEXT, "val.txt": TEXT}
    val = write(tmp_path, files) / "val.txt"
    ckpt = fit(tmp_path / "out", "--steps", "1", "--val", val)
    more = ["--resume", "--out", tmp_path / "out", "--steps", "2"]
    in_the_middle = TEXT[:9000] + TEXT[9000:15000].replace("beer", "wine") + TEXT[15000:]
    for other in ({"text.txt": TEXT + "x" * 64}, {"text.txt": in_the_middle},
                  {"val.txt": in_the_middle}):
        write(tmp_path, files | other)
        code, line = complaint(capsys, *more)
        assert code == 2 and line.startswith("error: --data")
    write(tmp_path, files)

    code = ckpt["source"]["multiscreen"]
    # Weights need not fit the edited code, which is named first.
    other = {"source": {"multiscreen": code + "trim = relu\n"}, "weights": {}}
    torch.save(ckpt | other, tmp_path / "out/ckpt.pt")
    assert "multiscreen.py" in complaint(capsys, *more)[1]
    with pytest.raises(SystemExit, match="Missing key"):
        train.load_checkpoint(tmp_path / "out/ckpt.pt")
    assert "another multiscreen.py" in capsys.readouterr().err
    for begin in ("Multiscreen, from", "One layer:", "Eq. (4), the"):      # module, class, function
        assert begin in code
        code = code.replace(f'"""{begin}', f'"""A docstring is no edit. {begin}')
    code += "# Nor is a comment.\n"
    torch.save(ckpt | {"source": {"multiscreen": code}}, tmp_path / "out/ckpt.pt")
    command(*more)
    assert train.read_checkpoint(tmp_path / "out/ckpt.pt")["step"] == 2
    train.load_checkpoint(tmp_path / "out/ckpt.pt")
    assert "another multiscreen.py" not in capsys.readouterr().err


def test_resume_may_change_how_a_run_is_computed_and_keeps_the_tokens_of_a_step(copied):
    command("--resume", "--steps", "3", "--batch-size", "2", "--log-every", "1", "--eval-every",
            "3", "--no-compile", "--kernel", "auto")
    ckpt = train.read_checkpoint("out/ckpt.pt")
    assert (ckpt["step"], ckpt["args"]["batch_tokens"]) == (3, 128)
    fit(copied / "out", "--steps", "3", "--log-every", "1", "--force")
    whole = train.read_checkpoint("out/ckpt.pt")
    torch.testing.assert_close(ckpt["weights"], whole["weights"], rtol=1e-3, atol=1e-5)


class Recipe(GatedScreeningTiles):
    recipe = {"lr": 0.01, "psi": 3, "layers": 5}


def test_init_takes_the_model_of_a_checkpoint_and_begins_a_run_that_goes_on(tmp_path):
    """The model's sizes and its weights, and no other flags. What is typed is above all."""
    flags = ["--model", f"{HERE}.Recipe", "--psi", "2", "--layers", "1", "--lr", "0.5",
             "--tokenizer", f"{FILES}.four"]
    first = fit(tmp_path / "first", "--steps", "1", *flags)
    args = args_of(["--init", tmp_path / "first/ckpt.pt", "--w-th", "16"])
    assert (args.model, args.lr, args.psi, args.N_L) == (f"{HERE}.Recipe", 0.01, 2, 1)
    assert (args.tokenizer, args.w_th) == (f"{FILES}.four", 16)

    new = ["--seq-len", "32", "--batch-size", "4", "--data", tmp_path / "text.txt", "--lr", "1e-30",
           "--init", tmp_path / "first/ckpt.pt", "--out", tmp_path / "out", "--steps"]
    command(*new, "1")
    out = train.read_checkpoint(tmp_path / "out/ckpt.pt")
    assert out["config"] == first["config"] and out["args"]["lr"] == 1e-30
    torch.testing.assert_close(out["weights"], first["weights"])
    (tmp_path / "first/ckpt.pt").unlink()
    command(*new, "2", "--resume")
    assert train.read_checkpoint(tmp_path / "out/ckpt.pt")["step"] == 2


# ------------------------------------------------------------------------------- divergence

def test_divergence_exits_with_3_and_keeps_the_checkpoint_from_before(
        tmp_path, monkeypatch, capsys):
    right, calls = Multiscreen.loss, []

    def loss(self, x, y, reduction="mean"):
        calls.extend([reduction] if reduction == "mean" else [])
        return right(self, x, y, reduction) * (math.nan if len(calls) == 4 else 1)

    monkeypatch.setattr(Multiscreen, "loss", loss)
    flags = [*SMALL, "--data", write(tmp_path, {"a.txt": TEXT}) / "a.txt", "--out",
             tmp_path / "out", "--eval-every", "2", "--log-every", "1"]
    code, line = complaint(capsys, *flags)
    assert code == 3 and str(tmp_path / "out/ckpt.pt") in line
    assert train.read_checkpoint(tmp_path / "out/ckpt.pt")["step"] == 2
    assert read_table(tmp_path / "out/log.tsv")[-1]["loss"] == "nan"


@pytest.mark.parametrize("change", [{}, {"loss": math.inf}, {"val_loss": math.nan},
                                    {"grad_norm": 0.0}, {"grad_norm": math.inf}])
def test_a_loss_or_a_gradient_from_which_no_training_recovers_is_a_divergence(change):
    """No step changes a model whose gradients all vanish."""
    row = {"loss": 1.0, "grad_norm": 1e-30, "val_loss": 2.0} | change
    assert train.has_diverged(row) == bool(change)


@pytest.mark.parametrize("name, size", [("ckpt.pt", 9000), ("log.tsv", 80)])
def test_a_full_disk_names_the_file_and_leaves_what_was_there(copied, capsys, name, size):
    """The system lets a file have `size` bytes, no more."""
    resource = pytest.importorskip("resource")         # Windows has none
    before, limits = Path("out/ckpt.pt").read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        code, line = complaint(capsys, "--resume", "--steps", "4")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert code == 1 and line.startswith("error: ") and name in line
    assert Path("out/ckpt.pt").read_bytes() == before
    assert sorted(os.listdir("out")) == ["ckpt.pt", "log.tsv"]


# ---------------------------------------------------------------------------------- mistakes

class Misspelt(GatedScreeningTiles):
    recipe = {"learning_rate": 0.01}


@pytest.mark.parametrize("flags, says", [
    ("--psi 0", "psi"), ("--psi 2.5", "--psi"), ("--d-K 1", "d_K"), ("--steps 0", "--steps"),
    ("--batch-size 0", "--batch-size"), ("--step 2", "--step"),
    ("--batch-tokens 500", "--batch-tokens is 500"), ("--device nonsense", "--device"),
    ("--kernel nothing", "nothing"), ("--model nothing", "nothing"),
    ("--model absent.Tiles", "absent.Tiles"), ("--model multiscreen.Tiles", "multiscreen.Tiles"),
    (f"--model {HERE}.Misspelt", "--learning-rate"), ("--data missing.txt", "missing.txt"),
    ("--data text.txt missing.txt", "missing.txt"), ("--val missing.txt", "missing.txt"),
    ("--data a.JSONL", "a.JSONL"), ("--data latin1.txt", "latin1.txt"),
    ("--data utf16.txt", "UTF-16"), ("--data odd.bin", "odd.bin"),
    ("--data empty.bin", "empty.bin"), ("--data folder", "folder"),
    ("--data short.txt", "--data"), ("--data other.bin", "257"),
    ("--init missing.pt", "missing.pt"), ("--init out", "out"), ("--out text.txt", "text.txt"),
    ("--out out", "out holds a run")])
def test_a_mistake_is_one_line_that_names_it_and_costs_nothing(
        trained, monkeypatch, capsys, flags, says):
    def files():
        return {path: path.is_file() and path.read_bytes() for path in trained.rglob("*")}

    monkeypatch.chdir(trained)
    before, new = files(), ["--data", "text.txt", "--out", "new", "--steps", "2"]
    _, line = complaint(capsys, *SMALL, *new, *flags.split())
    assert "error: " in line and says in line
    assert files() == before


# ------------------------------------------------------------------- an own model is tried

class Leaks(GatedScreeningTiles):
    """Each position sees the mean of all."""

    def bound(self, h):
        return super().bound(h) + 0.1 * h.mean(2, keepdim=True)


class LeaksLate(GatedScreeningTiles):
    """From position 64 on each sees the next one."""

    def bound(self, h):
        u = super().bound(h)
        return torch.cat([u[:, :, :64], u[:, :, 65:], u[:, :, -1:]], 2)[:, :, : u.shape[2]]


def smoothed(config, dtype):
    """A model whose `loss` is not the cross-entropy of its `forward`."""
    model = Multiscreen(config, dtype)
    right = model.loss
    model.loss = lambda x, y, reduction="mean": 0.9 * right(x, y, reduction)
    return model


@pytest.mark.parametrize("name, says", [
    ("Noisy", None), ("Leaks", "later tokens"), ("LeaksLate", "later tokens"),
    ("smoothed", "not the cross-entropy")])
def test_a_model_is_tried_before_the_first_step(tmp_path, capsys, name, says):
    fit(tmp_path / "out", "--steps", "1", "--model", f"{HERE}.{name}", "--seq-len", "128")
    lines = [line for line in capsys.readouterr().out.splitlines() if "warning" in line]
    assert len(lines) == (says is not None)
    assert says is None or says in lines[0]


# --------------------------------------------------------------------------- several processes

def test_a_step_has_the_passes_of_all_processes(monkeypatch):
    monkeypatch.setattr(train, "WORLD", 2)
    assert args_of(["--seq-len", "32", "--batch-size", "4"]).batch_tokens == 256


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="torchrun with gloo")
def test_two_processes_compute_what_one_computes_and_resume_each_other(tmp_path):
    """The first two are stopped by a signal to torchrun, which sends it on to both."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
                ROOT / "train.py"]
    # Two passes a step in each process.
    flags = ["--batch-tokens", "256", "--lr", "0.01", "--log-every", "1", "--eval-every", "2"]
    new = [*SMALL, *flags, "--batch-size", "2", "--data", "text.txt", "--out", "two", "--steps"]
    write(tmp_path, {"text.txt": TEXT})
    argv = [sys.executable, *torchrun, *new, "9999"]
    with subprocess.Popen(argv, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        printed = []                                   # by one of the two processes
        for line in process.stdout:
            printed.append(line.split(maxsplit=2)[:2])
            if printed[-1] == ["step", "1"]:
                process.send_signal(signal.SIGTERM)
    assert process.returncode != 0
    assert printed.count(["step", "1"]) == 1
    step = train.read_checkpoint(tmp_path / "two/ckpt.pt")["step"]
    assert not list((tmp_path / "two").glob("*.tmp"))

    fit(tmp_path / "two", *flags, "--steps", step + 2, "--resume")
    done = run(*torchrun, "--resume", "--out", "two", "--steps", step + 4, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    one = fit(tmp_path / "one", *flags, "--steps", step + 4)
    two = train.read_checkpoint(tmp_path / "two/ckpt.pt")
    for a, b in zip(*(read_table(tmp_path / name / "log.tsv") for name in ("one", "two")),
                    strict=True):
        for column in ("loss", "grad_norm", "val_loss"):
            if a[column] and b[column]:
                assert float(a[column]) == pytest.approx(float(b[column]), rel=2e-4)
    torch.testing.assert_close(two["weights"], one["weights"], rtol=1e-3, atol=1e-4)


# ------------------------------------------------------------------------------ six files alone

SIX = ("multiscreen.py", "screening_triton.py", "train.py", "abcdigits.py", "test_multiscreen.py",
       "README.md")


@pytest.mark.slow
def test_the_files_alone_train_resume_and_measure_without_triton(tmp_path):
    """They import nothing else of this repository. `triton` is not there, as on a Mac."""
    for name in SIX:
        shutil.copy(ROOT / name, tmp_path)
    write(tmp_path, {"triton.py": "raise ImportError", "text.txt": TEXT})
    env = {name: x for name, x in os.environ.items() if name != "PYTHONPATH"}
    for argv in (["train.py", *SMALL, "--kernel", "auto", "--data", "text.txt", "--steps", "2"],
                 ["train.py", "--resume", "--steps", "4"],
                 ["abcdigits.py", "--trials", "1", "--lengths", "256", "--depths", "0.5"]):
        done = run(*argv, cwd=tmp_path, env=env)
        assert done.returncode == 0, done.stderr
    assert "1 prompts took" in done.stdout
    assert train.read_checkpoint(tmp_path / "out/ckpt.pt")["step"] == 4
