"""benchmarks.plan: its count of bytes, against models that are built and run."""
import sys
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import multiscreen
import screening_triton
from benchmarks import plan
from benchmarks.plan import count_bytes, memory
from experiments import scaling
from support.checkpoint import build_model, has_windows
from support.cli import UsageError
from tests import DEVICE
from tests.helpers import draw_tokens

DTYPES = [None, torch.bfloat16]
SMALL = {"psi": 2, "vocab_size": 50, "N_L": 3}
NAMES = ["multiscreen", "multiscreen:no-gate", "transformer:2,2,32", "transformer:2,2,32:qknorm"]


def bytes_kept(run, known):
    """(run(), the bytes that it saves for backward), each address in memory once."""
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda x: x):
        result = run()
    found = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in kept}
    for x in known:
        found.pop(x.untyped_storage().data_ptr(), None)
    return result, sum(found.values())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_the_bytes_are_those_that_a_model_saves(name, dtype):
    device = DEVICE if name.startswith("multiscreen") else "cpu"
    model = build_model(name, SMALL, dtype).to(device)
    if has_windows(model):
        model.screen = screening_triton.screen
    tokens = draw_tokens(2, 16).to(device)
    weights = list(model.parameters())
    x, saved = bytes_kept(lambda: model.hidden(tokens), weights)
    c = count_bytes(name, SMALL, dtype, 2, 16)
    assert c.embed + 3 * c.layer == saved > 0
    assert c.hidden == x.nbytes

    # The loss, then layers that are computed again.
    y, z = x.flatten(0, 1), tokens.flatten()
    _, saved = bytes_kept(lambda: F.cross_entropy(model.logits(y), z), [*weights, x, tokens])
    assert c.head == saved > 0
    if has_windows(model):
        model.screen = multiscreen.screen              # fast; it must not matter here
    for layer in model.layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    _, saved = bytes_kept(lambda: model.hidden(tokens), weights)
    assert c.embed + 3 * c.hidden == saved


def test_the_loss_is_counted_on_the_chunk_that_the_model_takes():
    with torch.device("meta"):
        model = build_model("multiscreen", {"psi": 1})
        model.screen = lambda q, k, v, w, r, i0: v
        taken, logits = [], model.logits
        model.logits = lambda x, head: taken.append(len(x)) or logits(x, head)
        tokens = torch.zeros(1, 2000, dtype=torch.int64)
        model.loss(tokens, tokens)
    less, chunk, more = (count_bytes("multiscreen", {"psi": 1}, None, 1, n).head
                         for n in (taken[0] - 1, taken[0], 2000))
    assert taken[0] < 2000
    assert less < chunk == more


def test_a_process_keeps_its_share_of_the_state_and_what_is_gathered():
    c = count_bytes("multiscreen", {"psi": 4, "vocab_size": 257}, None, 2, 16)
    P = c.parameters
    full, local = memory(c), memory(c, shard=2, recompute=True, gpus=4)
    assert (full["weights"], full["gradients"], full["moments"]) == (4 * P, 4 * P, 8 * P)
    assert (local["weights"], local["gradients"], local["moments"]) == (2 * P, 2 * P, 4 * P)
    assert memory(c, 2, False, 4, passes=2)["gradients"] == 4 * P          # whole, to be added to
    assert full["gathered"] == 0
    assert local["gathered"] == 2 * 4 * (P - 2 * c.of_layer)
    assert full["activations"] == (c.embed + 4 * c.layer + c.head
                                    + c.hidden)
    assert local["activations"] == (c.embed + 5 * c.hidden
                                   + max(c.layer, c.head))


def run_plan(monkeypatch, capsys, *flags):
    """The cells of each row that the command prints."""
    monkeypatch.setattr(sys, "argv", ["plan", *map(str, flags)])
    plan.main()
    lines = capsys.readouterr().out.splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert {len(row) for row in rows} == {len(rows[0])}
    return rows[2:]


@pytest.mark.parametrize("name", ["multiscreen", "transformer:4,4,256"])
def test_a_row_says_what_the_flags_need(name, monkeypatch, capsys):
    flags = ["--model", name, "--psi", 16, "--vocab-size", 257, "--batch-tokens", 2**20,
             "--gpus", 4, "--batch-size", 8, "--shard", 2]
    c = count_bytes(name, {"psi": 16, "vocab_size": 257}, torch.bfloat16, 8, 4096)
    for recompute in (False, True):
        row, = run_plan(monkeypatch, capsys, *flags, *["--recompute"] * recompute)
        need = memory(c, 2, recompute, 4, passes=8)
        sizes_of_run = [*need.values(), sum(need.values()), 12 * c.parameters]
        assert row[1:3] == [f"{c.parameters:,}", "8"]
        assert row[3:] == [f"{n / 2**30:.2f}" for n in sizes_of_run]


@pytest.mark.parametrize("flags", [["--shard", 3, "--gpus", 4], ["--batch-size", 3],
                                   ["--batch-size", 0]])
def test_what_cannot_be_divided_is_refused(flags, monkeypatch, capsys):
    with pytest.raises(UsageError, match="a multiple of"):
        run_plan(monkeypatch, capsys, *flags)


def test_the_papers_table_has_flags_that_fit_80_gib(monkeypatch, capsys):
    rows = run_plan(monkeypatch, capsys)
    assert [int(row[1].replace(",", "")) for row in rows] == [n for n, _ in scaling.PAPER.values()]
    for row in rows:
        words = row[0].strip("`").split()
        flags = dict(zip(words[::2], words[1::2]))
        assert int(flags["--batch-size"]) * int(flags["--gpus"]) * int(row[2]) == 1024
        assert float(row[7]) < float(row[8]) <= 72
