"""Tests of several processes: they get the numbers of one, and all stop together."""
import json
import random
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from support.cli import get_device
from multiscreen import GatedScreeningTiles
from support import fast
from support.models import set_seeds
from support.run import read_checkpoint
from tests.helpers import SMALL, TEXT, fit, read_table, run
from tests.inputs import small

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="torchrun with gloo")
STEP = ["--batch-tokens", "256", "--log-every", "1"]


def losses(out):
    return [[float(row[c]) for c in ("step", "loss", "grad_norm")]
            for row in read_table(out / "log.tsv") if row["loss"]]


NAN_IN_ONE = """
import os, multiscreen
right = multiscreen.Multiscreen.loss
def loss(self, x, y, reduction="mean"):
    loss.calls += 1
    bad = os.environ["RANK"] == "1" and loss.calls > 4
    return right(self, x, y, reduction) * (float("nan") if bad else 1)
loss.calls = 0
multiscreen.Multiscreen.loss = loss
"""

SIGNAL_TO_ONE = """
import os, signal, sys, time, torch
right_save, right_step, steps = torch.save, torch.optim.AdamW.step, []
def save(*inputs):
    time.sleep(0.3)
    right_save(*inputs)
    print("saved at last", file=sys.stderr, flush=True)
def step(self, *inputs, **options):
    steps.append(self)
    if len(steps) == 3 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGTERM)
    return right_step(self, *inputs, **options)
torch.save, torch.optim.AdamW.step = save, step
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(a folder of runs of several processes, their output).

    Two processes that share a model. Two, resumed by one process, then by two. Four, in two
    passes. Last, a run that fails and one that is stopped.
    """
    folder = tmp_path_factory.mktemp("scale")
    (folder / "text.txt").write_text(TEXT)
    names = ("two", "shared", "four", "bad", "stopped")
    two, shared, four, bad, stopped = (str(folder / name) for name in names)
    new = [*SMALL, *STEP, "--data", str(folder / "text.txt"), "--out"]
    jobs = [(2, [*new, two, "--steps", "6"]),
            (2, [*new, shared, "--steps", "2"]),
            (1, ["--resume", "--out", shared, "--steps", "4"]),
            (2, ["--resume", "--out", shared, "--steps", "6", "--recompute"]),
            (4, [*new, four, "--steps", "2", "--batch-size", "1"]),
            (2, [*new, bad, "--steps", "99"], NAN_IN_ONE),
            (2, [*new, stopped, "--steps", "99"], SIGNAL_TO_ONE)]
    return folder, run("-m", "tests.processes", json.dumps(jobs))


@pytest.mark.slow
def test_several_processes_compute_what_one_computes_and_resume_each_other(tmp_path, trained):
    folder, said = trained
    whole = fit(tmp_path / "one", "--steps", "6", *STEP)
    assert said.stdout.count("val_loss") == 5, said.stderr
    for row, expected in zip(losses(folder / "four"), losses(tmp_path / "one")[:2], strict=True):
        assert row == pytest.approx(expected, rel=2e-4)

    for out in (folder / "two", folder / "shared"):
        for row, expected in zip(losses(out), losses(tmp_path / "one"), strict=True):
            assert row == pytest.approx(expected, rel=2e-4)
        ckpt = read_checkpoint(out / "ckpt.pt")
        assert ckpt["drawn"] == whole["drawn"] == 48
        for name, p in whole["weights"].items():
            assert type(ckpt["weights"][name]) is torch.Tensor
            torch.testing.assert_close(ckpt["weights"][name], p, rtol=1e-3, atol=1e-5)
    last = [read_table(out / "log.tsv")[-1] for out in (tmp_path / "one", folder / "two")]
    assert float(last[0]["val_loss"]) == pytest.approx(float(last[1]["val_loss"]), rel=1e-4)


@pytest.mark.slow
def test_a_loss_that_is_not_finite_in_one_process_stops_all(trained):
    folder, said = trained
    assert said.returncode != 0
    for rank in (0, 1):
        assert f"process {rank}: UsageError('training diverged: at step 5 loss is" in said.stderr
    assert not (folder / "bad/ckpt.pt").exists()


@pytest.mark.slow
def test_a_signal_to_one_process_saves_and_stops_all(trained):
    """Once a process ends, torchrun gives the others 30 seconds; none may end while 0 saves."""
    folder, said = trained
    assert read_checkpoint(folder / "stopped/ckpt.pt")["step"] == 3
    assert losses(folder / "stopped")[-1][0] == 3
    before, after = said.stderr.split("saved at last")
    assert "stopped at" not in before
    for rank in (0, 1):
        assert f"process {rank}: KeyboardInterrupt('stopped at step 3, saved" in after


def test_a_process_works_on_its_own_gpu(monkeypatch):
    """Without set_device, FSDP2 and Triton would use the first GPU in every process."""
    own = []
    monkeypatch.setattr(torch.cuda, "set_device", own.append)
    monkeypatch.setattr(torch, "zeros", lambda *_, device, **__: SimpleNamespace(
        is_mps=True, item=lambda: 0.0, is_cuda=True, device=torch.device(device)))
    assert get_device("cuda:3") == torch.device("cuda:3")
    assert own == [torch.device("cuda:3")]


def test_recomputed_activations_are_the_same_bits(tmp_path, monkeypatch):
    calls, gate = [], GatedScreeningTiles.gate

    def counted(self, x):
        calls.append(torch.is_grad_enabled())
        return gate(self, x)

    monkeypatch.setattr(GatedScreeningTiles, "gate", counted)
    flags = ["--steps", "3", "--eval-every", "99"]
    a = fit(tmp_path / "a", *flags)
    once = sum(calls)
    b = fit(tmp_path / "b", *flags, "--recompute")
    assert all(torch.equal(a["weights"][name], b["weights"][name]) for name in a["weights"])
    assert sum(calls) - 2 * once == 2 * 3              # once more per layer and step


@pytest.mark.parametrize("draw", [lambda: torch.rand(()), np.random.rand, random.random])
def test_a_recomputed_layer_draws_the_same_random_numbers_again(draw):
    class Noisy(GatedScreeningTiles):
        def bound(self, h):
            return super().bound(h) * float(draw())

    model, tokens = small(tiles=Noisy), torch.randint(50, (2, 9))
    found = []
    for change in (lambda model: None, fast.recompute):
        change(model)
        set_seeds(3)
        model.zero_grad()
        model.loss(tokens, tokens).backward()
        found.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found))
    assert random.random() != random.random()
