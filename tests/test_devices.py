"""Tests on a pretended GPU: nothing mixes devices, and no float64 goes to an Apple GPU."""
import pytest
import torch

import abcdigits
import screening_triton
import train
from baselines.transformer import Transformer
from experiments import perplexity, sample
from multiscreen import Multiscreen
from support import choose, cli, evaluation
from tests.helpers import SMALL, TEXT, assert_same_weights, needs_interpreter, read_table
from tests.pretended import CPU, Pretended, Refused

GENERATE = Multiscreen.generate


@pytest.fixture(autouse=True)
def brief(monkeypatch):
    """Operators are slow here, so sample 3 tokens and compare screens on one case."""
    for model in (Multiscreen, Transformer):
        monkeypatch.setattr(model, "generate", lambda model, tokens, n, **options:
                            GENERATE(model, tokens, min(n, 3), **options))
    monkeypatch.setattr(choose, "CASES", [(17, 140, choose.NEARBY, choose.WIDE)])


def train_on(device, folder, *flags, resume=True):
    """Two steps of train.py and an evaluation, then two more, resumed."""
    (folder / "text.txt").write_text(TEXT)
    sizes = [] if "transformer" in " ".join(flags) else SMALL[:2]
    flags = [*sizes, *SMALL[2:-4], "--data", str(folder / "text.txt"), "--device", device, "--out",
             str(folder / device), "--batch-size", "16", "--log-every", "1",
             "--eval-every", "2", *flags]
    train.main([*flags, "--steps", "2"])
    if resume:
        train.main(["--resume", "--steps", "4", "--device", device, "--out", str(folder / device)])
    return folder / device / "ckpt.pt"


def sample_in(out):
    """The sample printed at the end of training."""
    return out.rpartition("tokens:")[2].partition("\nnext:")[0]


def without_times(path):
    rows = read_table(path.with_name("log.tsv"))
    return [{c: x for c, x in row.items() if c not in ("ms", "tokens_per_s")} for row in rows]


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
    assert train.get_args(["--steps", "1"]).device == cli.DEVICE
    with Pretended("mps") as gpu:
        assert cli.get_device("mps") == gpu.device


@pytest.mark.parametrize("model", ["multiscreen", "transformer:2,2,8"])
def test_training_on_an_apple_gpu_gives_the_numbers_of_a_cpu(tmp_path, capsys, model):
    """The choice of a screen, steps, evaluation, saving, resuming, and the sample."""
    on_cpu = train_on("cpu", tmp_path, "--model", model)
    before = capsys.readouterr().out
    with Pretended("mps"):
        on_gpu = train_on("mps", tmp_path, "--model", model)
    assert sample_in(capsys.readouterr().out) == sample_in(before)
    assert without_times(on_gpu) == without_times(on_cpu)
    assert_same_weights(*(torch.load(path) for path in (on_gpu, on_cpu)))


@needs_interpreter
def test_training_on_a_cuda_gpu_gives_the_numbers_of_a_cpu(tmp_path, capsys, monkeypatch):
    """On a GPU train.py chooses the fused kernel, and bfloat16."""
    monkeypatch.setattr(choose, "CASES", [(17, 17, (17.0,), (1.0,))])
    short = tmp_path / "short.txt"
    short.write_text(TEXT[:800])
    few = ["--data", str(short), "--psi", "1", "--batch-size", "1", "--seq-len", "16"]
    with monkeypatch.context() as changes:
        # Only the GPU compares.
        changes.setattr(choose, "objection", lambda kind, model: None)
        on_cpu = train_on("cpu", tmp_path, *few, "--kernel", "triton", "--dtype", "bfloat16",
                          resume=False)
    before = capsys.readouterr().out
    with Pretended("cuda"):
        on_gpu = train_on("cuda", tmp_path, *few, resume=False)
    out = capsys.readouterr().out
    assert "\nscreening by screening_triton.screen, which agrees" in out
    assert sample_in(out) == sample_in(before)
    assert without_times(on_gpu) == without_times(on_cpu)
    assert_same_weights(*(torch.load(path) for path in (on_gpu, on_cpu)))


@pytest.mark.parametrize("name, kind", [
    ("multiscreen", "mps"), ("multiscreen", "cuda"), ("transformer:2,2,8", "mps")])
def test_what_measures_a_model_gives_the_same_on_a_gpu(checkpoints, call, capsys, monkeypatch, name,
                                                       kind):
    monkeypatch.setattr(evaluation, "products_dtype", lambda device: None)
    # The pretended device replaces methods of the model.
    monkeypatch.setattr(evaluation, "equations", lambda name: "of the model")
    path = checkpoints[name]
    text = path.with_name("text.txt")
    text.write_text(TEXT)
    commands = {abcdigits: ("--lengths", 256, "--depths", 0.5, "--trials", 2, "--digits", 3),
                perplexity: ("--data", text, "--length", 40),
                sample: ("--prompt", "screen", "--tokens", 8)}
    shown = []
    for device in ("cpu", kind):
        with Pretended(kind) as gpu:
            for script, flags in commands.items():
                call(script, "--ckpt", path, "--device", device, *flags)
        assert bool(gpu.marked) == (device == kind)
        shown.append([capsys.readouterr().out, *((table.name, table.read_text())
                      for table in sorted(path.parent.glob("*.tsv")))])
        for table in path.parent.glob("*.tsv"):
            table.unlink()
    assert shown[0] == shown[1]
