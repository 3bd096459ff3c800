"""Tests of train.py: learning, logging, stopping and resuming, checkpoints, evaluation."""
import math
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import threading
import time
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import multiscreen
import train
from support.cli import UsageError, cli, stop_requests
from multiscreen import Multiscreen
from support import check, distributed, fast, run
from support.check import alive_pairs
from support.data import Sequences, batches, get_tokenizer
from support.models import windows
from support.run import load_checkpoint, read_checkpoint
from support.tasks import ABCDigitsStream
from support.windowed import screen_windowed
from tests.helpers import CPU_SCREEN, ROOT, SMALL, args_of, assert_same_weights, fit, read_table
from tests.inputs import INF, draw_tokens, draws, small

# The default kernel, so that its bits are compared.
DEFAULT = ["--kernel", "auto"]


# --------------------------------------------------------------------------------- learning

def test_training_learns_and_logs_what_it_does(tmp_path):
    """On a repetitive text the loss falls from about 5.5 nats a byte to a third in 60 steps."""
    fit(tmp_path / "out", "--steps", "60", "--eval-every", "60", "--psi", "3", *DEFAULT)
    rows = read_table(tmp_path / "out/log.tsv")
    assert tuple(rows[0]) == run.COLUMNS
    assert [int(row["step"]) for row in rows] == [1, 10, 20, 30, 40, 50, 60, 60]
    first, last = rows[0], rows[-1]
    assert float(first["loss"]) > 5
    assert float(rows[-2]["loss"]) < float(first["loss"]) / 3
    assert float(last["val_loss"]) < float(first["loss"]) / 2
    assert 0 < float(last["alive"]) < 1
    assert float(first["w_min"]) == pytest.approx(2, abs=0.1)
    assert float(first["w_max"]) == pytest.approx(257, rel=0.1)
    assert first["val_loss"] == last["needle"] == ""


def test_the_checkpoint_serves(tmp_path):
    ckpt = fit(tmp_path / "out", "--steps", "2")
    model, tokenizer, again = train.load_checkpoint(tmp_path / "out/ckpt.pt")
    assert again["step"] == 2
    assert not model.training
    assert tokenizer.n_vocab == model.config.vocab_size
    assert_same_weights({"weights": model.state_dict()}, ckpt)
    assert train.load_checkpoint is load_checkpoint


def test_the_code_for_a_program_of_your_own_runs(monkeypatch, capsys):
    """test_fast.py tests that a model follows an edit."""
    examples = re.findall(r"```python\n(.*?)```", (ROOT / "docs/data.md").read_text(), re.S)
    monkeypatch.chdir(ROOT)
    for code in examples:
        exec(code, {})
    assert re.fullmatch(
        r"12\n"                                        # the number of the prompt's last letter
        r"the screen in C\+\+ is for float32 on a CPU; screening in windows, by multiscreen.screen "
        r"torch.Size\(\[4, 32\]\)\n", capsys.readouterr().out, re.S)


def test_clipping_weight_decay_and_learning_rate_are_applied(tmp_path):
    plain = fit(tmp_path / "a", "--steps", "3", "--log-every", "1")
    rates = [float(row["lr"]) for row in read_table(tmp_path / "a/log.tsv")[:3]]
    assert rates == [2**-5, 2**-4, 2**-4]
    assert plain["optimizer"]["param_groups"][0]["betas"] == (0.9, 0.95)
    changes = (["--weight-decay", "0.5"], ["--clip", "1e-6"], ["--lr", "0.01"], ["--seed", "1"],
               ["--dtype", "bfloat16"])
    for n, flags in enumerate(changes):
        other = fit(tmp_path / f"b{n}", "--steps", "3", *flags)
        assert not torch.equal(plain["weights"]["W_E"], other["weights"]["W_E"]), flags


def test_a_step_is_the_same_in_one_pass_and_in_several(tmp_path):
    """Passes read other sequences, and their gradients are averaged."""
    flags = ["--steps", "2", "--batch-tokens", "256", "--log-every", "1"]
    fit(tmp_path / "several", *flags)
    fit(tmp_path / "one", *flags, "--batch-size", "8")
    several, one = ([[float(row[name]) for name in ("loss", "grad_norm")]
                     for row in read_table(tmp_path / run / "log.tsv")[:2]]
                    for run in ("several", "one"))
    for a, b in zip(several, one):
        assert a == pytest.approx(b, rel=1e-4)


@draws(20)
@given(processes=st.integers(1, 4), passes=st.integers(1, 4), batch_size=st.integers(1, 3),
       drawn=st.integers(0, 99))
def test_all_passes_of_all_processes_together_draw_each_sequence_of_a_step_once(
        processes, passes, batch_size, drawn):
    model, found = small(N_L=1, N_H=1), []

    def draw(number, seed):
        found.append(number)
        return np.zeros(3, int)

    data = SimpleNamespace(draw=draw)
    n = processes * passes * batch_size
    args = SimpleNamespace(batch_tokens=2 * n, seq_len=2, batch_size=batch_size, seed=0, clip=0.0)
    for rank in range(processes):
        with (mock.patch.multiple(distributed, rank=lambda rank=rank: rank,
                                  world=lambda: processes, mean=lambda x: x,
                                  average_in_next_backward=lambda *inputs: None),
              mock.patch.object(model, "loss", wraps=model.loss) as loss):
            train.train_step(model, data, args, drawn)
        assert [len(call.args[0]) for call in loss.call_args_list] == passes * [batch_size]
    assert sorted(found) == [*range(drawn, drawn + n)]


@pytest.mark.parametrize("tokens", ["64", "200"])
def test_a_step_that_is_not_a_number_of_whole_passes_is_refused(tokens):
    with pytest.raises(UsageError, match=f"{tokens}: it must be a multiple of 128"):
        args_of([*SMALL, "--batch-tokens", tokens])


@pytest.mark.parametrize("flag, value", [
    ("--seed", str(2**63)), ("--seed", "-1"), ("--seed", "1.5"), ("--lr", "nan"), ("--lr", "inf"),
    ("--steps", "0")])
def test_a_number_that_a_flag_does_not_take_is_refused(flag, value):
    with pytest.raises(UsageError, match=f"{flag}: '{value}' must be a number"):
        args_of([flag, value])


def test_a_resumed_run_takes_another_weight_decay(tmp_path):
    fit(tmp_path / "a", "--steps", "2")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    a = fit(tmp_path / "a", "--resume", "--steps", "3")
    b = fit(tmp_path / "b", "--resume", "--steps", "3", "--weight-decay", "0.5")
    assert not torch.equal(a["weights"]["W_E"], b["weights"]["W_E"])


@pytest.mark.parametrize("kernel, screen", [
    ("definition", Multiscreen.screen), ("windowed", screen_windowed), ("auto", CPU_SCREEN)])
def test_a_loaded_run_screens_by_the_definition_if_it_was_trained_so(tmp_path, kernel, screen):
    fit(tmp_path / "out", "--steps", "1", "--kernel", kernel)
    assert load_checkpoint(tmp_path / "out/ckpt.pt")[0].screen is screen


def test_weight_decay_shrinks_matrices_and_nothing_else():
    model = Multiscreen(multiscreen.Config(psi=2, vocab_size=7))
    optimizer = train.get_optimizer(model, args_of(["--lr", "0.1", "--weight-decay", "0.5"]))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for name, p in model.named_parameters():
        shrinks = 0.95 if p.ndim > 1 else 1.0
        torch.testing.assert_close(p.detach(), shrinks * before[name], msg=name)


def diverging(monkeypatch, call):
    """Make one loss of training, the call-th, NaN."""
    right, calls = Multiscreen.loss, 0

    def loss(self, x, y, reduction="mean"):
        nonlocal calls
        nats = right(self, x, y, reduction)
        if reduction == "mean":                        # not in an evaluation
            calls += 1
            if calls == call:
                return nats * math.nan
        return nats

    monkeypatch.setattr(Multiscreen, "loss", loss)


def test_divergence_stops_the_run_and_keeps_the_last_good_checkpoint(tmp_path, monkeypatch):
    diverging(monkeypatch, 5)
    with pytest.raises(UsageError, match="diverged: at step 5 .*holds step 4"):
        fit(tmp_path / "out", "--steps", "9", "--eval-every", "2")
    ckpt = read_checkpoint(tmp_path / "out/ckpt.pt")
    assert ckpt["step"] == 4
    assert all(p.isfinite().all() for p in ckpt["weights"].values())


def test_divergence_before_the_first_checkpoint_says_that_nothing_was_saved(tmp_path, monkeypatch):
    diverging(monkeypatch, 2)
    with pytest.raises(UsageError, match="diverged: at step 2 loss is nan.*nothing was saved"):
        fit(tmp_path / "out", "--steps", "9")
    assert not (tmp_path / "out/ckpt.pt").exists()

    # Rerun, the command repeats this without training; --force tries again.
    for flags in ([], ["--resume"]):
        with pytest.raises(UsageError, match="at step 2 loss is nan.*--force.*another --out") as e:
            fit(tmp_path / "out", "--steps", "9", *flags)
        assert e.value.code == 3
    assert fit(tmp_path / "out", "--steps", "2", "--force")["step"] == 2
    assert not (tmp_path / "out/diverged.txt").exists()


def test_a_checkpoint_holds_only_finite_weights(tmp_path, monkeypatch):
    """An update may make a weight infinite although its loss and its gradients were finite."""
    def overflow(self, closure=None):
        self.param_groups[0]["params"][0].data[0] = INF

    monkeypatch.setattr(torch.optim.AdamW, "step", overflow)
    with pytest.raises(UsageError, match="at step 1 a weight is not finite; nothing was sav") as e:
        fit(tmp_path / "out", "--steps", "9", "--save-every", "1")
    assert e.value.code == 3
    assert not (tmp_path / "out/ckpt.pt").exists()


def test_losses_are_read_only_where_they_are_shown_or_a_task_needs_them(tmp_path, monkeypatch):
    """To read one, the CPU has to wait for the GPU."""
    right, read = run.Run.require_finite, []

    def noted(self, step, **values):
        if step == self.step and "loss" in values:
            read.append(step)
        right(self, step, **values)

    monkeypatch.setattr(run.Run, "require_finite", noted)
    fit(tmp_path / "out", "--steps", "13", "--log-every", "5", "--eval-every", "13",
        "--save-every", "7")
    assert read == [1, 5, 7, 10, 13]


def test_the_speed_is_that_of_the_steps_since_the_last_line(tmp_path, monkeypatch, capsys):
    """So are the minutes left. An evaluation does not count."""
    clock, right, right_evaluate = [0.0], torch.optim.AdamW.step, train.evaluate

    def step(self, *inputs, **options):
        clock[0] += 60.0                               # seconds
        return right(self, *inputs, **options)

    def evaluate(*inputs):
        clock[0] += 1000.0
        return right_evaluate(*inputs)

    fit(tmp_path / "out", "--steps", "4")
    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    monkeypatch.setattr(train, "evaluate", evaluate)
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    capsys.readouterr()
    fit(tmp_path / "out", "--resume", "--steps", "10", "--log-every", "3", "--eval-every", "5")
    rows = [row for row in read_table(tmp_path / "out/log.tsv")[2:] if row["loss"]]
    assert [(row["step"], row["ms"], row["tokens_per_s"]) for row in rows[-3:]] == [
        ("6", "60000", "2.13333"), ("9", "60000", "2.13333"), ("10", "60000", "2.13333")]
    left = re.findall(r"min_left +([\d.]+)", capsys.readouterr().out)
    assert left == ["4.0", "1.0", "0.0"]


def test_what_is_printed_does_not_change_what_is_trained(tmp_path):
    """A task reads its loss every step, or its documents would depend on --log-every."""
    flags = ["--steps", "12", "--digits", "2"]
    a = fit(tmp_path / "a", *flags, "--log-every", "1", data="abcdigits")
    b = fit(tmp_path / "b", *flags, "--log-every", "100", data="abcdigits")
    assert a["data_state"] == b["data_state"]
    assert_same_weights(a, b)


# -------------------------------------------------------------------------- stop and resume

def stop_at(monkeypatch, step, number):
    """Send this process a signal at the end of a step."""
    right, steps = torch.optim.AdamW.step, 0

    def counted(self, *a, **k):
        nonlocal steps
        steps += 1
        if steps == step:
            os.kill(os.getpid(), number)
        return right(self, *a, **k)

    monkeypatch.setattr(torch.optim.AdamW, "step", counted)


@pytest.mark.parametrize("step, number, again", [
    (4, signal.SIGTERM, False), (7, signal.SIGINT, True)])
def test_interrupted_and_resumed_equals_uninterrupted(tmp_path, monkeypatch, capsys, step, number,
                                                      again):
    """With and without the flags of the run."""
    flags = ["--steps", "12", "--eval-every", "5", "--log-every", "2", "--batch-tokens",
             "256", *DEFAULT]
    whole = fit(tmp_path / "whole", *flags)
    with monkeypatch.context() as m:
        stop_at(m, step, number)
        with pytest.raises(KeyboardInterrupt, match=f"stopped at step {step}, saved .*; "
                           "to go on, repeat the command with --resume"):
            fit(tmp_path / "parts", *flags)
    assert read_checkpoint(tmp_path / "parts/ckpt.pt")["step"] == step
    if again:
        fit(tmp_path / "parts", "--resume", *flags)
    else:
        train.main(["--resume", "--out", str(tmp_path / "parts")])
    assert f"steps {step} to 12" in capsys.readouterr().out
    parts = read_checkpoint(tmp_path / "parts/ckpt.pt")
    assert parts["step"] == 12
    assert parts["drawn"] == whole["drawn"] == 96
    assert_same_weights(parts, whole)
    a, b = (ckpt["optimizer"]["state"] for ckpt in (parts, whole))
    for n in a:
        assert all(torch.equal(a[n][key], b[n][key]) for key in a[n])

    # The log agrees, too, except for the extra row at step 1.
    def losses(name):
        rows = read_table(tmp_path / name / "log.tsv")
        return [(row["step"], row["loss"]) for row in rows if row["step"] != "1"]

    assert losses("parts") == losses("whole")


@pytest.mark.parametrize("step, part", [(5, 256), (10, 256), (12, 256), (10, 64)])
def test_a_signal_stops_an_evaluation_and_resume_begins_with_it(tmp_path, monkeypatch, step, part):
    """Also with that of the last step, if it is stopped a second time, and in a task's 64."""
    def stopping(data, n, batch_size):
        for number, x in enumerate(batches(data, n, batch_size)):
            now = read_table(tmp_path / "parts/log.tsv")[-1]["step"]
            if n == part and number == 1 and now == str(step):
                os.kill(os.getpid(), signal.SIGTERM)
            yield x

    flags = ["--steps", "12", "--eval-every", "5", "--log-every", "1"]
    if part == 64:
        flags += ["--data", "abcdigits", "--digits", "2"]
    whole = fit(tmp_path / "whole", *flags)
    with monkeypatch.context() as m:
        m.setattr(train, "batches", stopping)
        for more in ([], ["--resume"]):
            with pytest.raises(KeyboardInterrupt, match=f"stopped at step {step}, saved"):
                fit(tmp_path / "parts", *flags, *more)
            assert read_checkpoint(tmp_path / "parts/ckpt.pt")["step"] == step
    # With fewer steps than it has, it evaluates and ends.
    fewer = fit(tmp_path / "parts", *flags, "--resume", "--steps", str(step - 1))
    assert fewer["step"] == step
    parts = fit(tmp_path / "parts", *flags, "--resume")
    assert_same_weights(parts, whole)
    rows, wanted = (read_table(tmp_path / name / "log.tsv") for name in ("parts", "whole"))
    for row, right in zip(rows, wanted, strict=True):
        assert row | {"ms": "", "tokens_per_s": ""} == right | {"ms": "", "tokens_per_s": ""}


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_another_optimizer_resumes(tmp_path, monkeypatch, momentum):
    """SGD without momentum has no moments."""
    monkeypatch.setattr(torch.optim, "AdamW", lambda groups, lr, **_: torch.optim.SGD(
        groups, lr=lr, momentum=momentum))
    whole = fit(tmp_path / "whole", "--steps", "6")
    fit(tmp_path / "parts", "--steps", "3")
    train.main(["--resume", "--steps", "6", "--out", str(tmp_path / "parts")])
    assert_same_weights(read_checkpoint(tmp_path / "parts/ckpt.pt"), whole)


def hear_twice(number, pipe):
    """Send this process a signal twice, and say after each how many it has noted."""
    with stop_requests() as stop:
        for _ in range(2):
            os.kill(os.getpid(), number)
            pipe.send([*stop])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_asks_training_to_stop_and_a_second_one_ends_it_at_once(number):
    here, there = multiprocessing.Pipe()
    process = multiprocessing.Process(target=hear_twice, args=(number, there))
    process.start()
    there.close()
    process.join()
    assert process.exitcode == -number
    assert here.recv() == [number]
    with pytest.raises(EOFError):                      # it did not live to say more
        here.recv()


def test_nohup_keeps_a_run_alive_when_its_terminal_closes():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_requests() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
        assert stop == []
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def interrupted(*inputs):
    raise KeyboardInterrupt


def test_a_run_whose_sample_is_stopped_is_finished(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train, "sample", interrupted)
    assert fit(tmp_path / "out", "--steps", "1")["step"] == 1
    assert re.search("the sample was stopped\nnext: python ", capsys.readouterr().out)


def test_main_gives_the_signal_handlers_back(tmp_path):
    before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    fit(tmp_path / "out", "--steps", "1")
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_notebook_may_train_in_a_thread(tmp_path, monkeypatch):
    """Its stdout has no `reconfigure`, and only the main thread may handle signals."""
    said = []
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(write=said.append, flush=lambda: None))
    thread = threading.Thread(target=cli, args=(lambda: fit(tmp_path / "out", "--steps", "1"),))
    thread.start()
    thread.join()
    assert "".join(said).count("saved") == 1
    assert read_checkpoint(tmp_path / "out/ckpt.pt")["step"] == 1


@pytest.mark.parametrize("flags", [["--resume"], [*SMALL, "--resume", "--steps", "2"]])
def test_a_finished_run_says_so_and_is_left_alone(tmp_path, capsys, flags):
    fit(tmp_path / "out", "--steps", "2")
    before = contents(tmp_path)
    train.main([*flags, "--data", str(tmp_path / "text.txt"), "--out", str(tmp_path / "out")])
    said = capsys.readouterr().out
    assert "already finished, at step 2: a larger --steps continues it" in said
    assert contents(tmp_path) == before


def test_a_finished_run_does_not_pass_for_one_with_other_flags(tmp_path):
    fit(tmp_path / "out", "--steps", "2")
    before = contents(tmp_path)
    with pytest.raises(UsageError, match="already finished, with --lr 0.0625 and not 0.01: name"):
        fit(tmp_path / "out", "--resume", "--steps", "2", "--lr", "0.01")
    assert contents(tmp_path) == before
    fit(tmp_path / "out", "--resume", "--steps", "2", "--dtype", "auto", "--log-every", "1")
    assert contents(tmp_path) == before


def test_a_run_of_init_goes_on_and_does_not_begin_with_its_weights_again(tmp_path, monkeypatch):
    fit(tmp_path / "first", "--steps", "2")
    flags = ["--steps", "6", "--init", str(tmp_path / "first/ckpt.pt")]
    whole = fit(tmp_path / "whole", *flags)
    with monkeypatch.context() as m:
        stop_at(m, 3, signal.SIGINT)
        with pytest.raises(KeyboardInterrupt, match="with --resume, without --force and --i"):
            fit(tmp_path / "out", *flags)
    assert_same_weights(fit(tmp_path / "out", "--resume", *flags[:2]), whole)

    # Then what it began with may go.
    shutil.rmtree(tmp_path / "first")
    fit(tmp_path / "out", "--resume", "--steps", "7")


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_anew(tmp_path):
    whole = fit(tmp_path / "whole", "--steps", "2")
    fit(tmp_path / "out", "--steps", "9")
    (tmp_path / "out/ckpt.pt").unlink()
    assert_same_weights(fit(tmp_path / "out", "--steps", "2", "--resume"), whole)
    assert [row["step"] for row in read_table(tmp_path / "out/log.tsv")] == ["1", "2", "2"]


@pytest.mark.slow
def test_five_random_kills_change_nothing(tmp_path):
    """SIGKILL at any moment, then the same command again."""
    flags = ["--resume", *SMALL, "--steps", "40", "--save-every", "1", "--log-every", "1",
             "--eval-every", "20", "--data", str(tmp_path / "text.txt")]
    begin = time.perf_counter()
    whole = fit(tmp_path / "whole", *flags)
    seconds = time.perf_counter() - begin
    for _ in range(5):
        process = multiprocessing.Process(target=train.main, args=(
            [*flags, "--out", str(tmp_path / "out")],))
        process.start()
        process.join(seconds * random.random())
        process.kill()
        process.join()
    assert_same_weights(fit(tmp_path / "out", *flags), whole)
    rows = [[{name: x for name, x in row.items() if name not in ("ms", "tokens_per_s")}
             for row in read_table(tmp_path / name / "log.tsv")] for name in ("out", "whole")]
    assert rows[0] == rows[1]
    assert not [*(tmp_path / "out").glob("*.tmp")]


@pytest.mark.parametrize("flags, message", [
    (["--psi", "3"], "--psi 2"), (["--w-th", "16"], "--w-th 256.0"),
    (["--d-V", "8"], "another"), (["--tokenizer", "gpt2"], "--tokenizer bytes"),
    (["--model", "multiscreen:nope"], "--model multiscreen")])
def test_resume_cannot_change_the_model(tmp_path, flags, message):
    fit(tmp_path / "out", "--steps", "2")
    before = contents(tmp_path)
    with pytest.raises(UsageError, match=f"trained with {message}: leave --"):
        train.main(["--out", str(tmp_path / "out"), "--resume", "--steps", "4", *flags])
    assert contents(tmp_path) == before


def test_a_resumed_abcdigits_run_goes_on_with_the_weights_it_had(tmp_path, monkeypatch):
    monkeypatch.setattr(ABCDigitsStream, "FLAT_AFTER", 40)
    monkeypatch.setattr(ABCDigitsStream, "losses", lambda _: (10.0, 10.1))
    whole = fit(tmp_path / "whole", "--steps", "6", "--digits", "2", data="abcdigits")
    fit(tmp_path / "parts", "--steps", "4", "--digits", "2", data="abcdigits")
    train.main(["--resume", "--out", str(tmp_path / "parts"), "--steps", "6"])
    parts = read_checkpoint(tmp_path / "parts/ckpt.pt")
    assert parts["data_state"] == whole["data_state"]
    assert parts["data_state"][0] == 24
    assert_same_weights(parts, whole)
    assert 0 <= float(read_table(tmp_path / "parts/log.tsv")[-1]["needle"]) <= 1


def test_other_data_start_from_the_top(tmp_path, monkeypatch):
    """How far a task's curriculum has come says nothing about a text, nor the other way round."""
    monkeypatch.setattr(ABCDigitsStream, "losses", lambda _: (10.0, 10.1))
    flags, out = ["--resume", "--digits", "2", "--steps"], tmp_path / "out"
    task = fit(out, *flags, "3", data="abcdigits")
    assert task["data_state"][0] == 12
    assert fit(out, *flags, "4")["data_state"] == ()
    assert fit(out, *flags, "5", data="abcdigits")["data_state"][0] == 4


def test_training_on_abcdigits_ends_when_the_task_is_learned(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ABCDigitsStream, "DONE_AFTER", 12)
    monkeypatch.setattr(ABCDigitsStream, "losses", lambda _: (10.0, 10.1))
    run = ("--steps", "9", "--eval-every", "9", "--log-every", "9")
    assert fit(tmp_path / "out", *run, data="abcdigits")["step"] == 3
    assert "3/9      saved" in (printed := capsys.readouterr().out)
    assert "ckpt.pt, the last step: the model has learned" in printed
    assert read_table(tmp_path / "out/log.tsv")[-1]["needle"]
    fit(tmp_path / "out", "--resume", *run, data="abcdigits")
    assert "already finished, at step 3: it has learned" in capsys.readouterr().out
    with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
        m.setattr(train, "evaluate", interrupted)
        fit(tmp_path / "stopped", *run, data="abcdigits")
    assert fit(tmp_path / "stopped", "--resume", *run, data="abcdigits")["step"] == 3
    assert read_table(tmp_path / "stopped/log.tsv")[-1]["needle"]


# ------------------------------------------------------------------ a folder that holds a run

def contents(folder):
    """{path: bytes} of every file below a folder."""
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_what_resume_changes_is_shown_and_noted(tmp_path, monkeypatch, capsys):
    """Flags, code and data. A checkpoint that was copied alone brings it along."""
    out = tmp_path / "out"
    fit(out, "--steps", "3")
    before = contents(out)
    with pytest.raises(UsageError, match="out holds a run: --resume continues it, --force "
                       "overwrites it, another --out starts a new one"):
        fit(out, "--steps", "3")
    assert contents(out) == before

    right = run.texts(small())
    edited = right | {"train.py": right["train.py"] + "# an edit"}
    monkeypatch.setattr(run, "texts", lambda model: edited)
    (tmp_path / "more.txt").write_text("more")
    data = ["--data", str(tmp_path / "text.txt"), str(tmp_path / "more.txt")]
    capsys.readouterr()
    fit(out, "--resume", "--steps", "4", "--lr", "0.5", *data)
    said = capsys.readouterr().out
    for change in ("--steps from 3 to 4", "--lr from 0.0625 to 0.5", "other data",
                   "other code in train.py"):
        assert f"changed at step 3: {change}\n" in said
    assert (out / "source/train.py").read_text() == edited["train.py"]

    copy = tmp_path / "copy"
    copy.mkdir()
    shutil.copy(out / "ckpt.pt", copy)
    longer = fit(copy, "--resume", "--steps", "5", *data)
    change, = longer["changes"]                        # more steps are none
    assert change.startswith("from step 3: --data ") and "--steps" not in change
    assert change.endswith("--lr from 0.0625 to 0.5, other data, other code in train.py")
    assert f"changes\t{change}\n" in (copy / "flags.txt").read_text()
    steps = [row["step"] for row in read_table(copy / "log.tsv")]
    assert steps == ["1", "3", "3", "4", "4", "5", "5"]


def test_the_same_text_at_another_place_is_no_change(tmp_path, capsys):
    (tmp_path / "val.txt").write_text("held out " * 99)
    fit(tmp_path / "out", "--steps", "2", "--val", str(tmp_path / "val.txt"))
    for name in ("text", "val"):
        (tmp_path / f"{name}.txt").rename(tmp_path / f"moved_{name}.txt")
    capsys.readouterr()
    longer = fit(tmp_path / "out", "--resume", "--steps", "3", "--val",
                 str(tmp_path / "moved_val.txt"), data=tmp_path / "moved_text.txt")
    assert longer["changes"] == []
    assert capsys.readouterr().out.count("changed at step 2: ") == 1       # --steps


def test_init_and_resume_are_refused_together(tmp_path):
    """One begins a run, and the other continues one: the weights would not be used."""
    fit(tmp_path / "first", "--steps", "1")
    for out in ("first", "new"):
        with pytest.raises(UsageError, match="leave one of them out"):
            fit(tmp_path / out, "--resume", "--init", str(tmp_path / "first/ckpt.pt"))
    assert not (tmp_path / "new").exists()


def test_the_products_dtype_is_noted_as_what_it_was(tmp_path):
    """`auto` is bfloat16 on one machine and float32 on another."""
    ckpt = fit(tmp_path / "out", "--steps", "1")
    assert ckpt["args"]["dtype"] == "float32"
    assert "dtype\tfloat32\n" in (tmp_path / "out/flags.txt").read_text()


@pytest.mark.parametrize("name", ["ckpt.pt", "log.tsv", "flags.txt", "source/train.py"])
@pytest.mark.parametrize("flags", [[], ["--force"]])
def test_what_belongs_to_no_run_is_left_alone(tmp_path, name, flags):
    path = tmp_path / "out" / name
    path.parent.mkdir(parents=True)
    path.write_text("precious")
    message = "belongs to no run: name another"
    if name == "ckpt.pt":
        message = "is damaged, or not a checkpoint of train.py"
    with pytest.raises(UsageError, match=f"{name.partition('/')[0]} {message}"):
        fit(tmp_path / "out", "--steps", "2", *flags)
    assert path.read_text() == "precious"
    assert {x.name for x in path.parent.iterdir()} == {path.name}


def test_a_run_leaves_other_files_alone_and_force_overwrites_it(tmp_path):
    """out/ also gets the page, tables and figures."""
    out = tmp_path / "out"
    mine = [out / "playground.html", out / "ckpt.tmp", out / "abcdigits.tsv", out / "deep/ckpt.pt"]
    mine[-1].parent.mkdir(parents=True)
    for path in mine:
        path.write_text("before")
    fit(out, "--steps", "3", "--log-every", "1")
    assert fit(out, "--steps", "2", "--log-every", "1", "--force")["step"] == 2
    assert [row["step"] for row in read_table(out / "log.tsv")] == ["1", "2", "2"]
    assert all(path.read_text() == "before" for path in mine)


def test_a_folder_may_have_the_name_of_a_stream(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "abcdigits").mkdir()
    (tmp_path / "abcdigits/a.txt").write_text("a folder of text\n" * 99)
    ckpt = fit(tmp_path / "out", "--steps", "1", "--data", "abcdigits", "text.txt")
    assert ckpt["corpus"].startswith("2 files") and ckpt["data_state"] == ()
    assert ckpt["args"]["data"] == [str(tmp_path / name) for name in ("abcdigits", "text.txt")]


def test_flags_txt_says_what_the_run_is(tmp_path):
    fit(tmp_path / "out", "--steps", "1", "--lr", "0.5")
    flags = dict(line.split("\t") for line in (tmp_path / "out/flags.txt").read_text().splitlines())
    assert flags["model"] == "multiscreen"
    assert float(flags["lr"]) == 0.5
    assert int(flags["parameters"]) == 4626
    assert {"seed", "steps", "seq_len", "batch_tokens", "init"} <= flags.keys()


# ------------------------------------------------------------------------------- evaluation

def test_a_model_is_compiled_for_training_and_not_once_more_for_evaluation(tmp_path, monkeypatch):
    trains = []

    def backend(graph, inputs):
        trains.append(torch.is_grad_enabled())
        return graph.forward

    def compile_model(model):
        for layer in model.layers:
            layer.compile(backend=backend)

    monkeypatch.setattr(fast, "compile_model", compile_model)
    fit(tmp_path / "out", "--steps", "2", "--eval-every", "1", "--compile")
    assert trains and all(trains)


def test_evaluation_counts_nats_and_bits_per_byte():
    """With uniform logits, each token costs ln 257 nats; a token is one byte."""
    model = small(1, moved=True, vocab_size=257)
    with torch.no_grad():
        model.s_F.fill_(-INF)
    text = draw_tokens(2000, n=120).numpy().astype(np.uint16)
    data = Sequences([text], 300, 257, "test")
    row = train.evaluate(model, data, data, SimpleNamespace(batch_size=3), get_tokenizer("bytes"))
    assert 0 < row.pop("alive") < 1
    assert row == {"val_loss": pytest.approx(math.log(257), abs=1e-6),
                   "val_bpb": pytest.approx(math.log2(257), abs=1e-6)}


def test_the_validation_loss_is_the_mean_over_sequences_spread_evenly_over_the_data():
    model = small(1, moved=True, vocab_size=257)
    text = draw_tokens(1201, n=120).numpy().astype(np.uint16)
    data, args = Sequences([text], 40, 257, "test"), SimpleNamespace(batch_size=4)
    row = train.evaluate(model, data, data, args, get_tokenizer("bytes"))
    x = torch.stack([torch.from_numpy(data[n]) for n in range(30)])
    assert row["val_loss"] == pytest.approx(model.loss(x[:, :-1], x[:, 1:]).item(), rel=1e-5)
    assert [*Sequences([np.zeros(1001, np.uint16)], 10, 257, "test").spread(4)] == [0, 25, 50, 75]
    assert [*Sequences([np.zeros(1011, np.uint16)], 10, 257, "test").spread(4)] == [0, 26, 52, 78]


def test_end_of_text_is_no_byte():
    model = small(1, vocab_size=257)
    text = np.array([65, 256] * 50 + [65], dtype=np.uint16)
    data, args = Sequences([text], 100, 257, ""), SimpleNamespace(batch_size=1)
    row = train.evaluate(model, data, data, args, get_tokenizer("bytes"))
    assert row["val_bpb"] == pytest.approx(2 * row["val_loss"] / math.log(2))

    # Of the targets of a text, which ends in end-of-text, but not of the inputs.
    data = Sequences([np.array([65, 65, 65, 256], dtype=np.uint16)], 3, 257, "")
    row = train.evaluate(model, data, data, args, get_tokenizer("bytes"))
    assert row["val_bpb"] == pytest.approx(3 / 2 * row["val_loss"] / math.log(2))


def test_live_pairs_are_those_inside_the_windows_with_a_relevance():
    model, tokens = small(1, moved=True), draw_tokens(2, 300)
    alive = inside = 0
    for tile, maps in zip(model.layers, model.relevance_maps(tokens)):
        for n, w in enumerate(tile.s_w.exp() + 1):
            alive += (maps[:, n] > 0).sum().item()
            inside += 2 * sum(min(i + 1, math.ceil(min(w.item(), 300))) for i in range(300))
    assert alive_pairs(model, tokens)["alive"] == pytest.approx(alive / inside, rel=1e-6)


def test_pairs_with_a_negative_weight_are_alive_too():
    """A screen of your own may give some."""
    model, tokens = small(1, moved=True, N_L=1), draw_tokens(2, 100)
    alive = alive_pairs(model, tokens)["alive"]
    model.screen = lambda *inputs: -multiscreen.screen(*inputs)
    assert alive_pairs(model, tokens)["alive"] == alive > 0


@pytest.mark.parametrize("data", ["text", "abcdigits"])
def test_dropout_is_off_in_evaluation_and_samples_and_on_again_after(tmp_path, monkeypatch, data):
    modes = []
    right = multiscreen.GatedScreeningTiles.bound

    def bound(self, h):
        modes.append((self.training, torch.is_grad_enabled()))
        return torch.nn.functional.dropout(right(self, h), 0.1, self.training)

    monkeypatch.setattr(multiscreen.GatedScreeningTiles, "bound", bound)
    monkeypatch.setattr(check, "warn", lambda *inputs, **options: None)    # it tries both modes
    digits = {"data": "abcdigits"} if data == "abcdigits" else {}
    fit(tmp_path / "out", "--steps", "4", "--eval-every", "2", "--digits", "2",
        "--seq-len", "128", **digits)
    assert set(modes) == {(True, True), (False, False)}
    trained = [n for n, (training, _) in enumerate(modes) if training]
    assert any(not training for training, _ in modes[: trained[-1]])


def test_a_validation_loss_that_is_not_finite_is_divergence(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "evaluate", lambda *inputs: {"val_loss": math.nan, "val_bpb": 1.0})
    with pytest.raises(UsageError, match="at step 2 val_loss is nan; nothing was saved") as e:
        fit(tmp_path / "out", "--steps", "2")
    assert e.value.code == 3


@pytest.mark.parametrize("generator", ["torch", "python", "numpy"])
def test_a_layer_may_draw_random_numbers(tmp_path, monkeypatch, generator):
    """They are seeded, and a resumed run draws what it would have."""
    right = multiscreen.GatedScreeningTiles.bound
    draw = {"torch": lambda: torch.rand(1), "python": random.random, "numpy": np.random.random}

    def bound(self, h):
        if self.training:
            return right(self, h) * draw[generator]()
        return right(self, h)

    monkeypatch.setattr(multiscreen.GatedScreeningTiles, "bound", bound)
    whole = fit(tmp_path / "whole", "--steps", "4")
    assert_same_weights(fit(tmp_path / "again", "--steps", "4"), whole)
    fit(tmp_path / "out", "--steps", "2")
    assert_same_weights(fit(tmp_path / "out", "--steps", "4", "--resume"), whole)


def test_the_median_window_of_an_even_number_is_between_two():
    model = small(N_L=1, N_H=2)
    with torch.no_grad():
        model.layers[0].s_w.copy_(torch.tensor([1.0, 3.0]).log())
    assert windows(model) == {"w_min": 2.0, "w_median": pytest.approx(3.0), "w_max": 4.0}


class Guesses:
    """A model that is sure of its guesses."""
    W_E = torch.zeros(1)

    def __init__(self, guess):
        self.guess = guess

    def __call__(self, tokens):
        return torch.nn.functional.one_hot(self.guess(tokens), 257)


def test_needles_are_right_where_the_model_guesses_their_digits():
    """One model knows every target, one always says 1."""
    data = ABCDigitsStream(get_tokenizer("bytes"), 256, 2, seed=0, part=1)
    known = {tuple(data[n][:-1]): torch.from_numpy(data[n][1:]) for n in range(10)}

    def answers(tokens):
        return torch.stack([known[tuple(row)] for row in tokens.tolist()])

    for guess, low, high in ((answers, 1, 1), (lambda x: torch.full_like(x, 49), 0.01, 0.3)):
        model = Guesses(guess)
        columns = data.extra_columns(model, batches(data, 10, 4))
        assert low <= columns["needle"] <= high
        assert columns["base"] == data.base


def test_the_size_is_on_the_first_line(tmp_path, capsys):
    fit(tmp_path / "out", "--steps", "1")
    lines = capsys.readouterr().out.splitlines()
    assert "multiscreen, 4,626 parameters, cpu, float32" in lines
