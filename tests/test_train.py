"""Tests of train.py: the loop, signals and --resume, one recipe, texts, checkpoints, mistakes."""
import math
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import train
from abcdigits import exact_matches, prompts_of
from multiscreen import Config, GatedScreeningTiles, Multiscreen
from tests.helpers import (
    ROOT,
    SMALL,
    TEXT,
    args_of,
    assert_same_weights,
    command,
    fit,
    full_disk,
    read_table,
    run,
    write,
)

SAMPLE = train.sample                                  # tests/conftest.py puts another in its place
HERE = __name__                                        # what MODULE.NAME calls this file


# --------------------------------------------------------------------------------- learning

def test_training_learns_and_logs_what_it_does(tmp_path):
    """On a repetitive text the loss falls from about 5.5 nats a byte to a third in 60 steps."""
    fit(tmp_path / "out", "--steps", "60", "--psi", "3")
    rows = read_table(tmp_path / "out/log.tsv")
    assert tuple(rows[0]) == train.COLUMNS
    assert [int(row["step"]) for row in rows] == [1, 10, 20, 30, 40, 50, 60]
    assert float(rows[0]["loss"]) > 5
    assert float(rows[-1]["loss"]) < float(rows[0]["loss"]) / 3
    assert float(rows[-1]["val_loss"]) < float(rows[0]["loss"]) / 2
    assert float(rows[0]["w_max"]) == pytest.approx(257, rel=0.1)
    assert rows[0]["val_loss"] == ""


def test_twenty_steps_are_those_of_a_plain_loop(tmp_path):
    """Bit for bit: two passes a step, warm-up, clipping, decay, the order of the sequences."""
    flags = ["--batch-tokens", "256", "--weight-decay", "0.1", "--clip", "0.5", "--seed", "3"]
    ckpt = fit(tmp_path / "out", "--steps", "20", *flags)
    torch.manual_seed(3)
    model = Multiscreen(Config(psi=2, vocab_size=257))
    decay = [{"params": [p for p in model.parameters() if (p.ndim > 1) is matrices],
              "weight_decay": 0.1 if matrices else 0.0} for matrices in (True, False)]
    optimizer = torch.optim.AdamW(decay, betas=(0.9, 0.95), fused=True)
    tokens = np.append(np.frombuffer(TEXT.encode(), np.uint8).astype(int), 256)
    tokens = tokens[: len(tokens) - len(tokens) // 20]
    sequences = [tokens[n : n + 33] for n in range(0, len(tokens) - 33 + 1, 32)]
    order = np.random.default_rng([3, 0]).permutation(len(sequences))
    for step in range(20):
        for n in (8 * step, 8 * step + 4):
            x = torch.tensor(np.stack([sequences[i] for i in order[n : n + 4]]))
            (model.loss(x[:, :-1], x[:, 1:]) / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for group in optimizer.param_groups:
            group["lr"] = 2**-4 * min(1, (step + 1) / 2)
        optimizer.step()
        optimizer.zero_grad()
    assert_same_weights(ckpt, {"weights": model.state_dict()})


def test_a_step_is_the_same_in_one_pass_and_in_several(tmp_path):
    flags = ["--steps", "2", "--batch-tokens", "256", "--log-every", "1"]
    fit(tmp_path / "several", *flags)
    fit(tmp_path / "one", *flags, "--batch-size", "8")
    for a, b in zip(*(read_table(tmp_path / name / "log.tsv") for name in ("several", "one"))):
        for column in ("loss", "grad_norm"):
            assert float(a[column]) == pytest.approx(float(b[column]), rel=1e-4)


def test_the_validation_loss_is_the_mean_over_sequences_spread_evenly_and_without_dropout():
    found = []

    class Model(torch.nn.Module):
        W_E = torch.zeros(1)

        def loss(self, x, y, reduction):
            assert not self.training
            found.extend(x[:, 0].tolist())
            return x.float()

    data = [np.full(3, n) for n in range(600)]
    model = Model()
    assert train.evaluate(model, data, 7) == pytest.approx(np.mean(found))
    assert found == list(range(0, 600, 3))
    assert model.training


def test_a_sample_is_held_out_text_and_how_the_model_continues_it():
    class Model(torch.nn.Module):
        W_E = torch.zeros(1)

        def generate(self, prompt, n, **options):
            assert not self.training
            return torch.tensor([[*b"new", 7]])        # 7 is a bell

    data = [np.frombuffer(TEXT.encode(), np.uint8).astype(int)]
    assert SAMPLE(Model(), data, train.get_tokenizer("bytes")) == TEXT[:32] + "new?"


def test_the_speed_is_that_of_the_steps_since_the_last_line(tmp_path, monkeypatch, capsys):
    """An evaluation does not count."""
    clock, step, evaluate = [0.0], torch.optim.AdamW.step, train.evaluate

    def slow_step(self, *inputs, **options):
        clock[0] += 60.0                               # seconds
        return step(self, *inputs, **options)

    def slow_evaluate(*inputs):
        clock[0] += 1000.0
        return evaluate(*inputs)

    monkeypatch.setattr(torch.optim.AdamW, "step", slow_step)
    monkeypatch.setattr(train, "evaluate", slow_evaluate)
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    fit(tmp_path / "out", "--steps", "10", "--log-every", "3", "--eval-every", "5")
    assert {row["ms"] for row in read_table(tmp_path / "out/log.tsv")} == {"60000"}
    minutes = re.findall(r"min_left (\d+) ", capsys.readouterr().out)
    assert minutes == ["9", "7", "5", "4", "1", "0"]   # after steps 1, 3, 5, 6, 9 and 10


@pytest.mark.slow
def test_a_compiled_run_has_the_losses_of_one_that_is_not(tmp_path):
    for name in ("plain", "compiled"):
        more = ["--compile"] if name == "compiled" else []
        fit(tmp_path / name, "--steps", "4", "--log-every", "1", *more)
    for a, b in zip(*(read_table(tmp_path / name / "log.tsv") for name in ("plain", "compiled"))):
        assert float(a["loss"]) == pytest.approx(float(b["loss"]), rel=1e-4)


# ------------------------------------------------------------------------- stop and continue

def stop_at(monkeypatch, step, number):
    """Send this process a signal at the end of a step."""
    calls = []

    def observe(self, loss):
        calls.append(loss)
        if len(calls) == step:
            signal.raise_signal(number)
        return False

    monkeypatch.setattr(train.Text, "observe", observe)


def losses(out):
    """Rows of the log without the time, and without those of the steps at which a run stopped."""
    return {row["step"]: row["loss"] for row in read_table(out / "log.tsv")}


class Noisy(GatedScreeningTiles):
    """A layer that draws random numbers in training."""

    def bound(self, h):
        return F.dropout(super().bound(h), 0.1, self.training)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("model", ["multiscreen", f"{HERE}.Noisy"])
def test_a_signal_saves_and_resume_continues_bit_for_bit(tmp_path, monkeypatch, number, model):
    flags = ["--steps", "12", "--log-every", "1", "--eval-every", "5", "--model", model]
    whole = fit(tmp_path / "whole", *flags)
    with monkeypatch.context() as m:
        stop_at(m, 7, number)
        with pytest.raises(SystemExit) as end:
            fit(tmp_path / "parts", *flags)
    assert end.value.code == 130
    assert train.read_checkpoint(tmp_path / "parts/ckpt.pt")["step"] == 7
    command("--resume", "--out", tmp_path / "parts")   # all flags are the checkpoint's
    parts = train.read_checkpoint(tmp_path / "parts/ckpt.pt")
    assert parts["step"] == 12
    assert_same_weights(parts, whole)
    for name, moments in whole["optimizer"].items():
        assert all(torch.equal(x, parts["optimizer"][name][key]) for key, x in moments.items())
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


@pytest.mark.slow
def test_kills_at_random_moments_change_nothing(tmp_path):
    """SIGINT, SIGTERM or SIGKILL at any moment, then the same command again."""
    flags = ["--resume", "--steps", "40", "--eval-every", "1", "--log-every", "1"]
    began = time.perf_counter()
    whole = fit(tmp_path / "whole", *flags)
    seconds = time.perf_counter() - began
    fork = multiprocessing.get_context("fork")
    for n in range(9):
        number = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)[n % 3]
        process = fork.Process(target=fit, args=(tmp_path / "out", *flags))
        process.start()
        time.sleep(seconds * random.random() / 4)
        os.kill(process.pid, number)
        process.join()
    assert_same_weights(fit(tmp_path / "out", *flags), whole)
    assert losses(tmp_path / "out") == losses(tmp_path / "whole")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"ckpt.pt", "log.tsv"}


def test_a_second_signal_ends_the_process_at_once(tmp_path, monkeypatch):
    def observe(self, loss):
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        os._exit(0)                                    # not reached

    monkeypatch.setattr(train.Text, "observe", observe)
    process = multiprocessing.get_context("fork").Process(target=fit, args=(tmp_path / "out",))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGTERM


@pytest.mark.slow
def test_a_pipe_that_nobody_reads_any_longer_changes_nothing(tmp_path):
    """As in `python train.py | head -1`: the run goes on, and SIGTERM still saves."""
    write(tmp_path, {"text.txt": TEXT})
    argv = [sys.executable, ROOT / "train.py", *SMALL, "--data", "text.txt", "--log-every", "1",
            "--steps", "99999", "--eval-every", "5"]
    process = subprocess.Popen(argv, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               text=True)
    process.stdout.readline()
    process.stdout.close()
    while not (tmp_path / "out/ckpt.pt").exists():
        time.sleep(0.05)
    process.terminate()
    assert process.wait() == 130
    assert "stopped, saved out/ckpt.pt" in process.stderr.read()
    assert train.read_checkpoint(tmp_path / "out/ckpt.pt")["step"] >= 5


class Curriculum:
    """Documents that end training after two steps, whose state is the number of steps so far."""

    def __init__(self, args, tokenizer, part):
        self.state = 0

    def __len__(self):
        return 9

    def __getitem__(self, n):
        return np.full(33, 65 + n % 9)

    draw = __getitem__

    def observe(self, loss):
        self.state += 1
        return self.state >= 2


def test_a_curriculum_that_has_ended_makes_no_more_steps(tmp_path, capsys):
    flags = ["--steps", "9"]
    ckpt = fit(tmp_path / "out", *flags, data=f"{HERE}.Curriculum")
    assert (ckpt["step"], ckpt["data_state"], ckpt["finished"]) == (2, 2, True)
    fit(tmp_path / "out", *flags, "--resume", data=f"{HERE}.Curriculum")
    assert "is finished, at step 2" in capsys.readouterr().out
    again = train.read_checkpoint(tmp_path / "out/ckpt.pt")
    assert_same_weights(ckpt, again)
    assert again["step"] == 2


def test_a_finished_run_is_left_alone_and_goes_on_with_more_steps(tmp_path, capsys):
    whole = fit(tmp_path / "whole", "--steps", "5")
    fit(tmp_path / "out", "--steps", "3")
    before = (tmp_path / "out/ckpt.pt").read_bytes()
    command("--resume", "--out", tmp_path / "out")
    assert "is finished, at step 3" in capsys.readouterr().out
    assert (tmp_path / "out/ckpt.pt").read_bytes() == before
    command("--resume", "--out", tmp_path / "out", "--steps", "5")
    assert_same_weights(train.read_checkpoint(tmp_path / "out/ckpt.pt"), whole)


# -------------------------------------------------------------------------------- one recipe

def complaint(capsys, *flags, code=2):
    """The one line of stderr with which a command ends."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        command(*flags)
    said = capsys.readouterr().err
    if isinstance(end.value.code, str):                # Python prints it and exits with 1
        said, end.value.code = said + end.value.code + "\n", 1
    assert end.value.code == code, said
    line = said.splitlines()[-1]
    assert said.count("\n") == 1 or said.startswith("usage: "), said
    return line


CHANGES = [("--lr 0.5", "--lr", "0.0625", "0.5"), ("--seed 1", "--seed", "0", "1"),
           ("--psi 3", "--psi", "2", "3"), ("--layers 1", "--layers", "None", "1"),
           ("--w-th 16", "--w-th", "256.0", "16.0"), ("--clip 1", "--clip", "0.0", "1.0"),
           ("--batch-tokens 256", "--batch-tokens", "128", "256"),
           ("--warmup 9", "--warmup", "2", "9"),
           ("--seq-len 64 --batch-size 2", "--seq-len", "32", "64"),
           ("--seq-len 48", "--seq-len", "32", "48"),
           ("--tokenizer gpt2", "--tokenizer", "bytes", "gpt2"),
           ("--weight-decay 1", "--weight-decay", "0.0", "1.0"),
           ("--dtype bfloat16", "--dtype", "float32", "bfloat16"),
           (f"--model {HERE}.Noisy", "--model", "multiscreen", f"{HERE}.Noisy"),
           ("--data stdlib", "--data", "text.txt", "stdlib"),
           ("--val text.txt", "--val", "None", "text.txt")]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a run of two steps in out/."""
    folder = tmp_path_factory.mktemp("trained")
    fit(folder / "out", "--steps", "2")
    return folder


@pytest.mark.parametrize("flags, flag, old, new", CHANGES)
def test_resume_refuses_another_recipe_and_names_it(
        trained, monkeypatch, capsys, flags, flag, old, new):
    monkeypatch.chdir(trained)
    before = (trained / "out/ckpt.pt").read_bytes()
    line = complaint(capsys, "--resume", "--steps", "3", *flags.split())
    assert line.startswith(f"error: {flag}")
    assert old in line and new in line
    assert (trained / "out/ckpt.pt").read_bytes() == before


@pytest.mark.parametrize("text", [TEXT + "x" * 64, TEXT[:-64], TEXT.replace("beer", "wine")])
def test_resume_refuses_another_text(tmp_path, monkeypatch, capsys, text):
    """The number of sequences and a checksum of 64 of them tell one text from another."""
    monkeypatch.chdir(tmp_path)
    fit(tmp_path / "out", "--steps", "2")
    write(tmp_path, {"text.txt": text})
    assert complaint(capsys, "--resume", "--steps", "3").startswith("error: --data")


@pytest.mark.parametrize("edit, refused", [("# a comment\n", False), ("trim = relu\n", True)])
def test_resume_refuses_other_code(tmp_path, capsys, edit, refused):
    ckpt = fit(tmp_path / "out", "--steps", "2")
    source = ckpt["source"]["multiscreen"].replace('"""', '"""A docstring is no edit. ', 1)
    ckpt["source"]["multiscreen"] = source + edit
    if refused:
        ckpt["weights"] = {}                           # they need not fit the edited code
    torch.save(ckpt, tmp_path / "out/ckpt.pt")
    flags = ["--resume", "--out", tmp_path / "out", "--steps", "3"]
    if refused:
        assert "multiscreen.py was edited" in complaint(capsys, *flags)
    else:
        command(*flags)
    assert train.read_checkpoint(tmp_path / "out/ckpt.pt")["step"] == (2 if refused else 3)


def test_resume_may_change_how_a_run_is_computed_and_keeps_the_tokens_of_a_step(tmp_path):
    fit(tmp_path / "whole", "--steps", "4", "--log-every", "1")
    fit(tmp_path / "out", "--steps", "2", "--log-every", "1")
    ckpt = fit(tmp_path / "out", "--resume", "--steps", "4", "--batch-size", "2", "--log-every",
               "1", "--eval-every", "3", "--no-compile", "--kernel", "auto")
    assert ckpt["args"]["batch_tokens"] == 128
    for a, b in zip(*(read_table(tmp_path / name / "log.tsv") for name in ("out", "whole"))):
        assert float(a["loss"]) == pytest.approx(float(b["loss"]), rel=1e-4)


@pytest.mark.parametrize("more", [[], ["--resume"]])
def test_init_takes_the_model_of_a_checkpoint_and_begins_another_run(tmp_path, more):
    """The model's sizes and its weights, and nothing else."""
    first = fit(tmp_path / "first", "--steps", "2", "--layers", "1", "--lr", "0.01")
    flags = ["--seq-len", "32", "--batch-size", "4", "--kernel", "multiscreen"]
    command(*flags, "--init", tmp_path / "first/ckpt.pt", "--data", tmp_path / "text.txt",
            "--out", tmp_path / "out", "--steps", "1", "--lr", "1e-30", *more)
    out = train.read_checkpoint(tmp_path / "out/ckpt.pt")
    assert out["config"] == first["config"] and out["args"]["lr"] == 1e-30
    for name, W in first["weights"].items():
        torch.testing.assert_close(out["weights"][name], W)


def test_a_run_that_init_began_goes_on_and_does_not_begin_again(tmp_path):
    fit(tmp_path / "first", "--steps", "1")
    flags = ["--init", tmp_path / "first/ckpt.pt", "--resume", "--steps"]
    whole = fit(tmp_path / "whole", *flags, "4")
    fit(tmp_path / "out", *flags, "2")
    (tmp_path / "first/ckpt.pt").unlink()
    assert_same_weights(fit(tmp_path / "out", *flags, "4"), whole)


def test_a_folder_with_a_run_is_refused_without_force(trained, tmp_path, monkeypatch, capsys):
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    assert "out holds a run" in complaint(capsys, *SMALL, "--data", "text.txt", code=1)
    assert fit(tmp_path / "out", "--force", "--steps", "1")["step"] == 1


class Recipe(GatedScreeningTiles):
    recipe = {"lr": 0.01, "psi": 3, "layers": 5}


def test_a_model_may_have_a_recipe_of_its_own_and_what_is_typed_wins():
    args = args_of(["--model", f"{HERE}.Recipe", "--psi", "2"])
    assert (args.lr, args.psi, args.N_L, args.seq_len) == (0.01, 2, 5, 256)


def test_init_has_the_recipe_of_the_model_and_the_sizes_of_the_checkpoint(tmp_path):
    flags = ["--model", f"{HERE}.Recipe", "--psi", "2", "--layers", "1", "--lr", "0.5"]
    fit(tmp_path / "out", "--steps", "1", *flags)
    args = args_of(["--init", tmp_path / "out/ckpt.pt"])
    assert (args.model, args.lr, args.psi, args.N_L) == (f"{HERE}.Recipe", 0.01, 2, 1)


# ------------------------------------------------------------------------------------- texts

def arrays_of(*names, T=4, val=None, tokenizer="bytes"):
    """(training arrays, held-out arrays) of --data NAMES --val VAL, as lists of tokens."""
    args = SimpleNamespace(data=[*map(str, names)], val=val, seq_len=T, seed=0)
    data = train.get_data(args, train.get_tokenizer(tokenizer))
    return [np.concatenate(part.arrays).tolist() for part in data]


def test_a_text_is_read_byte_by_byte_and_ends_with_end_of_text(tmp_path):
    """A byte order mark, with which Windows begins a UTF-8 file, is no part of it."""
    write(tmp_path, {"a.txt": b"\xef\xbb\xbfone\r\ntwo\rthree\n\x00\xc3\xa9", "b.txt": "held out"})
    tokens, val = arrays_of(tmp_path / "a.txt", val=[str(tmp_path / "b.txt")])
    assert tokens == [*b"one\r\ntwo\rthree\n\x00\xc3\xa9", 256]
    assert val == [*b"held out", 256]


@pytest.mark.parametrize("name, content, says", [
    ("a.JSON", "{}", "lab.prepare"), ("a.jsonl", "{}", "lab.prepare"),
    ("a.ndJson", "{}", "lab.prepare"), ("a.parquet", b"PAR1", "lab.prepare"),
    ("a.txt", "text".encode("utf-16"), "UTF-16"), ("b.txt", b"caf\xe9 " * 9, "utf-8"),
    ("odd.bin", b"123", "odd.bin"), ("none.bin", b"", "none.bin"), ("folder/a.dat", "x", "folder"),
    ("short.txt", "short", "fewer than one sequence")])
def test_what_is_no_text_is_one_line_that_names_it(tmp_path, monkeypatch, capsys, name, content,
                                                   says):
    monkeypatch.chdir(write(tmp_path, {name: content}))
    line = complaint(capsys, *SMALL, "--data", name.split("/")[0], code=1)
    assert line.startswith("error: ") and says in line
    assert name.split("/")[0] in line or "--data" in line
    assert not (tmp_path / "out/ckpt.pt").exists()


def test_a_folder_is_its_texts_and_every_twentieth_of_many_is_held_out(tmp_path):
    files = {f"{n:02}.txt": f"{n:02}" * 8 for n in range(20)}
    write(tmp_path, files | {"deep/a.md": "markdown", "deep/b.py": "python!!", "c.png": b"\xff"})
    tokens, val = arrays_of(tmp_path)
    assert bytes(x for x in tokens if x < 256).endswith(b"1818" * 4 + b"markdown" + b"python!!")
    assert val == [*b"19" * 8, 256]


def test_of_few_files_the_last_twentieth_of_each_is_held_out(tmp_path):
    """But at least one sequence, T inputs and their targets; of a shorter file, half."""
    write(tmp_path, {"a.txt": "a" * 999, "b.txt": "b" * 1999, "c.txt": "c" * 59, "d.txt": "d" * 7})
    tokens, val = arrays_of(*(tmp_path / f"{name}.txt" for name in "abcd"))
    assert tokens == [*b"a" * 950, *b"b" * 1900, *b"c" * 55, *b"d" * 4]
    assert val == [*b"a" * 49, 256, *b"b" * 99, 256, *b"c" * 4, 256, *b"d" * 3, 256]


class Large:
    """A vocabulary that needs four bytes for a token."""
    name, n_vocab, eot_token = "large", 2**16 + 1, 2**16


large = Large()


@pytest.mark.parametrize("tokenizer, dtype", [("bytes", "<u2"), (f"{HERE}.large", "<u4")])
def test_a_bin_file_has_two_bytes_for_a_token_or_four(tmp_path, tokenizer, dtype):
    write(tmp_path, {"a.bin": np.arange(200, dtype=dtype)})
    tokens, val = arrays_of(tmp_path / "a.bin", tokenizer=tokenizer)
    assert tokens + val == [*range(200)]


def test_a_token_beyond_the_vocabulary_is_reported(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(write(tmp_path, {"a.bin": np.full(999, 257, "<u2")}))
    line = complaint(capsys, *SMALL, "--data", "a.bin", code=1)
    assert "token 257" in line and "--tokenizer has 257" in line


def test_sequences_cover_the_text_without_replacement_in_an_order_of_the_seed():
    def text(seed):
        args = SimpleNamespace(seq_len=4, seed=seed)
        return train.Text([np.arange(60), np.arange(60, 109)], args, 257)

    data = text(0)
    assert len(data) == 27                             # of 27 x 4 + 1 tokens; one less is too few
    assert len(train.Text([np.arange(108)], SimpleNamespace(seq_len=4, seed=0), 257)) == 26
    assert [data[n].tolist() for n in (0, 26)] == [[0, 1, 2, 3, 4], [104, 105, 106, 107, 108]]
    drawn = [[int(data.draw(n)[0]) for n in range(27 * epoch, 27 * epoch + 27)]
             for epoch in (0, 1)]
    assert sorted(drawn[0]) == sorted(drawn[1]) == [*range(0, 108, 4)]
    assert drawn[0] != drawn[1]
    assert int(text(0).draw(30)[0]) == drawn[1][3]     # whatever was drawn before
    assert [int(text(1).draw(n)[0]) for n in range(27)] != drawn[0]


def test_sequences_come_from_each_text_and_each_bin_file(tmp_path):
    numbers = np.arange(40, dtype="<u2")
    write(tmp_path, {"a.bin": numbers[:10], "b.txt": b"text", "c.bin": numbers[20:32]})
    names = [str(tmp_path / name) for name in ("a.bin", "b.txt", "c.bin")]
    args = SimpleNamespace(data=names, val=names, seq_len=4, seed=0)
    data, _ = train.get_data(args, train.get_tokenizer("bytes"))
    assert [int(data[n][0]) for n in range(len(data))] == [ord("t"), 0, 4, 20, 24]


def test_data_is_found_from_another_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(write(tmp_path, {"text.txt": TEXT, "elsewhere/a.txt": ""}))
    command(*SMALL, "--data", "text.txt", "--out", "out", "--steps", "1")
    monkeypatch.chdir("elsewhere")
    command("--resume", "--out", "../out", "--steps", "2")
    assert train.read_checkpoint("../out/ckpt.pt")["step"] == 2


# ------------------------------------------------------------------------------- checkpoints

def test_a_checkpoint_serves(trained):
    model, tokenizer, ckpt = train.load_checkpoint(trained / "out/ckpt.pt")
    assert ckpt["step"] == 2 and ckpt["finished"] and not model.training
    assert tokenizer.n_vocab == model.config.vocab_size == 257
    assert_same_weights({"weights": model.state_dict()}, ckpt)


class Keeps(GatedScreeningTiles):
    """A class that keeps a tensor, which its checkpoints have, too."""

    def __init__(self, *inputs, **options):
        super().__init__(*inputs, **options)
        self.register_buffer("kept", torch.ones(2))


@pytest.mark.parametrize("name", ["multiscreen", f"{HERE}.Keeps"])
def test_a_loop_of_your_own_saves_its_model_whatever_its_windows(tmp_path, name):
    model = train.build_model(name, {"psi": 2, "vocab_size": 257})
    model.expand_windows(64)                           # some become infinite
    flags = ["--model", name, "--psi", "2", "--seq-len", "64"]
    train.save_checkpoint(tmp_path / "mine.pt", model, args_of(flags))
    again, _, ckpt = train.load_checkpoint(tmp_path / "mine.pt")
    assert_same_weights({"weights": again.state_dict()}, {"weights": model.state_dict()})
    assert ckpt["args"]["seq_len"] == 64 and ckpt["args"]["model"] == name
    (tmp_path / "mine.pt").rename(tmp_path / "ckpt.pt")
    with pytest.raises(SystemExit, match="not a checkpoint of train.py"):
        command("--resume", "--out", tmp_path)         # there are no moments, no place in the data


def test_a_weight_that_is_not_a_number_is_not_saved(tmp_path):
    model = Multiscreen(Config(psi=2, vocab_size=257))
    model.layers[0].W_Q.data[0] = math.nan
    with pytest.raises(SystemExit, match="W_Q has a NaN"):
        train.save_checkpoint(tmp_path / "mine.pt", model, args_of(["--psi", "2"]))
    assert not (tmp_path / "mine.pt").exists()


def test_divergence_exits_with_3_and_keeps_the_checkpoint_from_before(
        tmp_path, monkeypatch, capsys):
    right, calls = Multiscreen.loss, []

    def loss(self, x, y, reduction="mean"):
        calls.extend([reduction] if reduction == "mean" else [])
        return right(self, x, y, reduction) * (math.nan if len(calls) == 5 else 1)

    monkeypatch.setattr(Multiscreen, "loss", loss)
    with pytest.raises(SystemExit) as end:
        fit(tmp_path / "out", "--steps", "9", "--eval-every", "2", "--log-every", "1")
    assert end.value.code == 3
    assert capsys.readouterr().err.count("\n") == 1
    ckpt = train.read_checkpoint(tmp_path / "out/ckpt.pt")
    assert ckpt["step"] == 4
    assert all(p.isfinite().all() for p in ckpt["weights"].values())
    assert read_table(tmp_path / "out/log.tsv")[-1]["loss"] == "nan"


def test_weights_that_give_no_finite_validation_loss_are_a_divergence(tmp_path):
    """Already in the first step, whose loss and gradient are those of the initial weights."""
    with pytest.raises(SystemExit) as end:
        fit(tmp_path / "out", "--steps", "1", "--lr", "1e38", "--warmup", "0")
    assert end.value.code == 3
    assert not (tmp_path / "out/ckpt.pt").exists()


def test_a_gradient_of_zero_is_a_divergence():
    """No step changes a model whose gradients all vanish."""
    assert not train.has_diverged({"loss": 1.0, "grad_norm": 1e-30})
    assert train.has_diverged({"loss": 1.0, "grad_norm": 0.0})


@pytest.mark.parametrize("name, size", [("ckpt.pt", 9000), ("log.tsv", 80)])
def test_a_full_disk_names_the_file_and_leaves_what_was_there(tmp_path, capsys, name, size):
    out = tmp_path / "out"
    fit(out, "--steps", "2")
    before = (out / "ckpt.pt").read_bytes()
    with full_disk(size):
        line = complaint(capsys, "--resume", "--out", out, "--steps", "4", code=1)
    assert line.startswith("error: ") and name in line
    assert (out / "ckpt.pt").read_bytes() == before
    assert {path.name for path in out.iterdir()} == {"ckpt.pt", "log.tsv"}


class Evil:
    def __reduce__(self):
        return os.mkdir, ("executed",)


@pytest.mark.parametrize("kind", ["empty", "half", "text", "evil", "other", "misfit"])
def test_a_bad_checkpoint_is_one_line_and_nothing_in_it_runs(trained, tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    whole = trained / "out/ckpt.pt"
    if kind == "evil":
        torch.save({"args": Evil()}, "bad.pt")
    elif kind == "other":
        torch.save({"weights": torch.zeros(3)}, "bad.pt")
    elif kind == "misfit":
        ckpt = train.read_checkpoint(whole)
        torch.save(ckpt | {"config": ckpt["config"] | {"N_L": 1}}, "bad.pt")
    else:
        content = {"empty": b"", "half": whole.read_bytes()[:9999], "text": b"text" * 99}[kind]
        write(tmp_path, {"bad.pt": content})
    with pytest.raises(SystemExit, match="error: bad.pt") as end:
        train.load_checkpoint("bad.pt")
    assert "\n" not in end.value.code
    assert not os.path.exists("executed")


def test_code_that_was_edited_since_is_named(trained, tmp_path, capsys):
    ckpt = train.read_checkpoint(trained / "out/ckpt.pt")
    ckpt["source"]["multiscreen"] += "an_edit = 1"
    torch.save(ckpt, tmp_path / "ckpt.pt")
    train.load_checkpoint(trained / "out/ckpt.pt")
    assert "another" not in capsys.readouterr().err
    train.load_checkpoint(tmp_path / "ckpt.pt")
    assert "ckpt.pt was trained with another multiscreen.py\n" in capsys.readouterr().err


def test_a_checkpoint_has_the_code_that_was_trained_though_it_was_edited_since(
        tmp_path, monkeypatch):
    write(tmp_path, {"base_of_mine.py": "from multiscreen import GatedScreeningTiles as Tiles\n"
                                        "class Base(Tiles): pass\n",
                     "layers_of_mine.py": "from base_of_mine import Base\n"
                                          "class Mine(Base): pass\n"})
    monkeypatch.syspath_prepend(tmp_path)

    def observe(self, loss):
        with open(tmp_path / "layers_of_mine.py", "a") as file:
            file.write("# an edit\n")

    monkeypatch.setattr(train.Text, "observe", observe)
    ckpt = fit(tmp_path / "out", "--steps", "1", "--model", "layers_of_mine.Mine")
    assert ckpt["source"]["layers_of_mine"].endswith("pass\n")
    assert ckpt["source"]["base_of_mine"].endswith("pass\n")


def test_the_bundled_models_answer():
    model, tokenizer, ckpt = train.load_checkpoint(ROOT / "models/retrieval.pt")
    assert ckpt["args"]["seed"] == 24 and ckpt["step"] == 2575
    for length, depth in ((256, 0.9), (1024, 0.1)):
        assert all(exact_matches(model, tokenizer, *prompts_of(tokenizer, length, depth, 4, 2)))
    model, tokenizer, ckpt = train.load_checkpoint(ROOT / "models/text.pt")
    prompt = torch.tensor([tokenizer.encode_ordinary("    def read(self")])
    assert tokenizer.decode(model.generate(prompt, 12)[0].tolist()) == ", self, self"


def test_the_programs_of_the_guide_run(tmp_path, monkeypatch, capsys):
    texts = re.findall(r"```python\n(.*?)```", (ROOT / "docs/data.md").read_text(), re.S)
    (tmp_path / "models").symlink_to(ROOT / "models")
    monkeypatch.chdir(tmp_path)
    for text in texts:
        exec(text, {})
    assert capsys.readouterr().out.startswith("12\n")
    assert train.read_checkpoint("mine.pt")["args"]["seq_len"] == 128


@dataclass
class LongerConfig(Config):
    sharpness: float = 1.5


def test_a_field_that_you_add_to_config_has_its_default(tmp_path, monkeypatch):
    """In training, in the checkpoint, and in a run that --init begins; no flag need set it."""
    monkeypatch.setattr(train, "Config", LongerConfig)
    fit(tmp_path / "run", "--steps", "1")
    ckpt = fit(tmp_path / "next", "--steps", "1", "--init", tmp_path / "run/ckpt.pt")
    assert ckpt["config"]["sharpness"] == 1.5
    model, _, _ = train.load_checkpoint(tmp_path / "next/ckpt.pt")
    assert model.config.sharpness == 1.5


# ---------------------------------------------------------------------------------- mistakes

class Misspelt(GatedScreeningTiles):
    recipe = {"learning_rate": 0.01}


MISTAKES = [
    ("--psi 0", "--psi"), ("--psi 2.5", "--psi"), ("--layers 0", "--layers"), ("--d-K 1", "d_K"),
    ("--w-th 1", "w_th is 1.0"), ("--w-th inf", "w_th is inf"),
    ("--steps 0", "--steps"), ("--batch-size 0", "--batch-size"),
    ("--lr x", "--lr"), ("--lr -1", "--lr"), ("--seed -1", "--seed"), ("--nonsense 1", "nonsense"),
    ("--batch-tokens 500", "--batch-tokens is 500"), ("--device nonsense", "--device"),
    ("--dtype int", "--dtype"), ("--kernel nothing", "nothing"),
    ("--model nothing", "nothing"), ("--model absent.Tiles", "absent.Tiles"),
    ("--model multiscreen.Tiles", "multiscreen.Tiles"), ("--tokenizer words", "words"),
    ("--data missing.txt", "missing.txt"), ("--data text.txt missing.txt", "missing.txt"),
    ("--data text.A text.B", "text.A"), ("--val missing.txt", "missing.txt"),
    ("--init missing.pt", "missing.pt"), (f"--model {HERE}.Misspelt", "--learning-rate"),
    ("--init text.txt", "text.txt"), ("--init out", "out"), ("--out text.txt", "text.txt")]


@pytest.mark.parametrize("flags, says", MISTAKES)
def test_a_mistake_is_one_line_that_names_it_and_costs_nothing(
        trained, monkeypatch, capsys, flags, says):
    monkeypatch.chdir(trained)
    before = {path: path.is_file() and path.read_bytes() for path in trained.rglob("*")}
    capsys.readouterr()
    with pytest.raises((SystemExit, OSError)) as end:
        command(*SMALL, "--data", "text.txt", "--out", "new", "--steps", "2", *flags.split())
    said = capsys.readouterr().err.splitlines()[-1:] + [str(end.value)]
    assert any("error: " in line or isinstance(end.value, OSError) for line in said)
    assert any(says in line for line in said)
    assert {path: path.is_file() and path.read_bytes() for path in trained.rglob("*")} == before


# ------------------------------------------------------------------- an own model is tried

class Leaks(GatedScreeningTiles):
    """Each position sees the mean of all."""

    def bound(self, h):
        return super().bound(h) + 0.1 * h.mean(2, keepdim=True)


def smoothed(config, dtype):
    """A model whose `loss` is not the cross-entropy of its `forward`."""
    model = Multiscreen(config, dtype)
    right = model.loss
    model.loss = lambda x, y, reduction="mean": 0.9 * right(x, y, reduction)
    return model


@pytest.mark.parametrize("name, says", [
    ("multiscreen", None), (f"{HERE}.Noisy", None), (f"{HERE}.Keeps", None),
    (f"{HERE}.Leaks", "later tokens"), (f"{HERE}.smoothed", "not the cross-entropy")])
def test_a_model_is_tried_before_the_first_step(tmp_path, capsys, name, says):
    """Of 128 random tokens and 128 new ones some are equal by chance, after others that differ."""
    fit(tmp_path / "out", "--steps", "1", "--model", name, "--seq-len", "128")
    lines = [line for line in capsys.readouterr().out.splitlines() if "warning" in line]
    assert len(lines) == (says is not None)
    assert says is None or says in lines[0]


# --------------------------------------------------------------------------- several processes

def torchrun(folder, *flags, processes=2):
    argv = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", processes,
            ROOT / "train.py", *flags]
    return run(*argv, cwd=folder)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="torchrun with gloo")
def test_two_processes_compute_what_one_computes_and_resume_each_other(tmp_path):
    flags = ["--batch-tokens", "256", "--log-every", "1", "--eval-every", "2"]
    one = fit(tmp_path / "one", *flags, "--steps", "6")
    # Two passes a step in each process: gradients are averaged once, in the last one.
    new = [*SMALL, *flags, "--batch-size", "2", "--data", "text.txt", "--out"]
    done = torchrun(tmp_path, *new, "two", "--steps", "2")
    assert done.returncode == 0, done.stderr
    fit(tmp_path / "two", *flags, "--steps", "4", "--resume")
    done = torchrun(tmp_path, "--resume", "--out", "two", "--steps", "6")
    assert done.returncode == 0, done.stderr
    two = train.read_checkpoint(tmp_path / "two/ckpt.pt")
    for a, b in zip(*(read_table(tmp_path / name / "log.tsv") for name in ("one", "two")),
                    strict=True):
        for column in ("loss", "grad_norm", "val_loss"):
            if a[column] and b[column]:
                assert float(a[column]) == pytest.approx(float(b[column]), rel=2e-4)
    for name, p in one["weights"].items():
        assert type(two["weights"][name]) is torch.Tensor
        torch.testing.assert_close(two["weights"][name], p, rtol=1e-3, atol=1e-5)
    done = torchrun(tmp_path, *SMALL, "--data", "missing.txt", "--out", "new")
    assert "error: missing.txt" in done.stderr and "Traceback (most" not in done.stderr.split(
        "error: missing.txt")[0]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="torchrun with gloo")
def test_a_signal_to_torchrun_saves_and_stops_all(tmp_path):
    """torchrun passes it on, and sends another one to those that have not ended yet."""
    write(tmp_path, {"text.txt": TEXT})
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
            ROOT / "train.py", *SMALL, "--data", "text.txt", "--log-every", "1", "--steps", "9999"]
    process = subprocess.Popen([*map(str, argv)], cwd=tmp_path, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, text=True)
    for line in process.stdout:
        if line.startswith("step 3 "):
            process.send_signal(signal.SIGTERM)
    assert process.wait() != 0
    assert train.read_checkpoint(tmp_path / "out/ckpt.pt")["step"] >= 3
    assert not list((tmp_path / "out").glob("*.tmp"))


# ---------------------------------------------------------------------------- six files alone

SIX = ("multiscreen.py", "screening_triton.py", "train.py", "abcdigits.py", "test_multiscreen.py",
       "README.md")


@pytest.mark.slow
def test_the_files_alone_train_resume_and_measure_without_triton(tmp_path):
    """They import nothing else of this repository. `triton` is not there, as on a Mac."""
    for name in SIX:
        shutil.copy(ROOT / name, tmp_path)
    write(tmp_path, {"triton.py": "raise ImportError", "text.txt": TEXT})
    env = {name: x for name, x in os.environ.items() if name != "PYTHONPATH"}
    code = ("import sys; from pathlib import Path; import train, abcdigits\n"
            "from unittest.mock import patch\n"
            "def do(main, *argv):\n"
            "    with patch.object(sys, 'argv', ['x', *argv]): main()\n"
            "flags = '--psi 2 --seq-len 32 --batch-size 4 --device cpu --data text.txt'.split()\n"
            "do(train.main, *flags, '--steps', '2')\n"
            "do(train.main, '--resume', '--steps', '4')\n"
            "do(abcdigits.main, '--trials', '1', '--lengths', '256', '--depths', '0.5')\n"
            "root = Path(sys.argv[1])\n"
            "print('OURS', *sorted({m.partition('.')[0] for m, x in sys.modules.items()"
            " if (getattr(x, '__file__', None) or '').startswith(str(root))}))\n")
    done = run("-c", code, str(ROOT), cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    assert "step 4 " in done.stdout and "1 prompts took" in done.stdout
    assert done.stdout.splitlines()[-1] == "OURS"
