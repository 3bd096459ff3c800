"""Fixtures that several test files use."""
import signal
import sys

import pytest
import torch

import train
from support.models import build_model
from tests.helpers import needs_matplotlib


@pytest.fixture(scope="session", autouse=True)
def hear_ctrl_c():
    """A shell's background job ignores Ctrl-C, and so would all processes that tests start."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def short_samples():
    """End training with a sample of 4 tokens: 256 would take longer than a short run."""
    def build(*inputs):
        model = build_model(*inputs)
        generate = model.generate
        model.generate = lambda begin, n, **options: generate(begin, 4, **options)
        return model

    with pytest.MonkeyPatch.context() as m:
        m.setattr(train, "build_model", build)
        yield


@pytest.fixture(autouse=True)
def no_figures(request, monkeypatch):
    """There is no matplotlib in a test that does not say that it needs it, as for many users."""
    if needs_matplotlib.mark not in request.node.iter_markers("skipif"):
        monkeypatch.setitem(sys.modules, "matplotlib", None)


@pytest.fixture
def call(monkeypatch, tmp_path):
    """call(script, *flags) runs its main() in the test's own folder."""
    monkeypatch.chdir(tmp_path)

    def run(script, *flags):
        monkeypatch.setattr(sys, "argv", [script.__name__, *map(str, flags)])
        script.main()

    return run


@pytest.fixture
def checkpoints(tmp_path):
    """{model: path} of checkpoints as train.py writes them, with random weights."""
    paths = {}
    for name in ("multiscreen", "multiscreen:rope", "transformer:2,2,8"):
        torch.manual_seed(0)
        model = build_model(name, {"psi": 3, "N_L": 2, "vocab_size": 257})
        with torch.no_grad():
            for W in model.layers.parameters():        # make layers and positions matter
                W.mul_(6 if W.ndim > 1 else 1)
        args = dict.fromkeys(("model", *train.SIZES, "tokenizer"), 0) | {
            "model": name, "tokenizer": "bytes", "data": ["text"], "seq_len": 16,
            "kernel": "definition", "seed": 0}
        paths[name] = tmp_path / "checkpoints" / name.replace(":", "_") / "ckpt.pt"
        paths[name].parent.mkdir(parents=True)
        torch.save({"model": name, "config": vars(model.config), "weights": model.state_dict(),
                    "tokenizer": "bytes", "args": args, "source": {}, "step": 0}, paths[name])
    return paths
