"""Tests on a pretended GPU: nothing mixes devices, and no float64 goes to an Apple GPU."""
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

import abcdigits
import screening_triton
import train
from lab import perplexity, sample
from support import choose, cli
from tests.helpers import SMALL, TEXT, args_of, needs_interpreter, read_table
from tests.pretended import CPU, Pretended, Refused


def train_on(device, *flags):
    """Two steps of train.py, an evaluation and a sample, in a folder named after the device."""
    Path("text.txt").write_text(TEXT)
    train.main([*SMALL[2:-4], "--data", "text.txt", "--device", device, "--out", device,
                "--batch-size", "16", "--log-every", "1", "--eval-every", "2", "--steps", "2",
                *flags])


def results(device, out):
    """The log without times, the weights, the tables, and the printed lines from the sample on."""
    folder = Path(device)
    log = [[x for name, x in row.items() if name not in ("ms", "tokens_per_s")]
           for row in read_table(folder / "log.tsv")]
    weights = torch.load(folder / "ckpt.pt")["weights"]
    tables = [path.read_text() for path in sorted(folder.glob("[ap]*.tsv"))]
    shown = out.rpartition("held-out tokens:")[2].replace(f"{device}/", "")
    return log, {name: p.tolist() for name, p in weights.items()}, tables, shown


# --------------------------------------------------------------- the pretended GPU refuses

@pytest.mark.parametrize("kind", ["cuda", "mps"])
def test_what_mixes_devices_is_refused(kind):
    with Pretended(kind) as gpu:
        here, there = torch.ones(3, requires_grad=True), torch.ones(3, device=kind)
        assert (there * 2).device == there[1:].device == here.to(kind).device == gpu.device
        assert (there * torch.tensor(2.0)).device == gpu.device        # a single number is allowed
        cpu = torch.Generator()
        for mistake in (lambda: here + there, lambda: torch.stack((here.sum(), there.sum())),
                        lambda: there.numpy(), lambda: torch.cat((here, there)),
                        lambda: torch.rand(3, device=kind, generator=cpu)):
            with pytest.raises(Refused):
                mistake()
        if screening_triton.available("cpu") is None:
            with pytest.raises(Refused, match="_split of a tensor on the CPU"):
                screening_triton._split[1,](torch.ones(1, 1, 1, 16), there)
        there.copy_(here.detach())
        (here.to(kind) * there).sum().backward()
        assert here.grad.device == CPU
    assert here.grad.tolist() == [1.0, 1.0, 1.0]


def test_float64_is_refused_on_an_apple_gpu():
    with Pretended("mps"):
        x = torch.ones(3, device="mps")
        double = torch.ones(3, dtype=torch.float64)
        for mistake in (lambda: x.double(), lambda: x.sum(dtype=double.dtype),
                        lambda: torch.zeros(1, dtype=double.dtype, device="mps"),
                        lambda: double.to("mps"), lambda: x.to("cpu", double.dtype)):
            with pytest.raises(Refused):
                mistake()
        assert x.cpu().double().sum() == 3


# --------------------------------------------------------------------------- an Apple GPU

def test_an_apple_gpu_is_taken_where_it_is_asked_for_and_only_there(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert cli.DEVICE != "mps"
    assert args_of(["--steps", "1"]).device == cli.DEVICE
    with Pretended("mps") as gpu:
        assert cli.get_device("mps") == gpu.device


MEASURE = {abcdigits: ("--lengths", 256, "--depths", 0.5, "--trials", 2, "--digits", 3),
           perplexity: ("--data", "text.txt", "--length", 40),
           sample: ("--prompt", "screen", "--tokens", 8)}


@pytest.mark.parametrize("flag", ["--psi=2", "--model=transformer:2,2,8"])
def test_an_apple_gpu_gives_the_numbers_of_a_cpu(call, capsys, monkeypatch, flag):
    """Choosing a screen, training, resuming, and what measures a checkpoint."""
    # Operators are slow here.
    monkeypatch.setattr(choose, "CASES", [(17, 140, choose.NEARBY, choose.WIDE)])
    found = []
    for device in ("cpu", "mps"):
        with Pretended("mps") if device == "mps" else nullcontext():
            train_on(device, flag)
            train.main(["--resume", "--steps", "4", "--device", device, "--out", device])
            for script, flags in MEASURE.items():
                call(script, "--ckpt", f"{device}/ckpt.pt", "--device", device, *flags)
        found.append(results(device, capsys.readouterr().out))
    assert found[0] == found[1]
    assert len(found[0][2]) == 2                       # tables


@needs_interpreter
def test_a_cuda_gpu_gives_the_numbers_of_a_cpu(call, capsys, monkeypatch):
    """On a GPU train.py chooses the fused kernel, and bfloat16."""
    few = ["--psi", "1", "--batch-size", "1", "--seq-len", "16"]
    with monkeypatch.context() as changes:
        # Only the GPU compares.
        changes.setattr(choose, "objection", lambda kind, model: None)
        train_on("cpu", *few, "--kernel", "triton", "--dtype", "bfloat16")
    on_cpu = results("cpu", capsys.readouterr().out)
    monkeypatch.setattr(choose, "CASES", [(17, 17, (17.0,), (1.0,))])
    with Pretended("cuda"):
        train_on("cuda", *few)
    out = capsys.readouterr().out
    assert "\nscreening by screening_triton.screen, which agrees" in out
    assert results("cuda", out) == on_cpu
