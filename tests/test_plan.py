"""The count of bytes: against models that are built and run, and what is refused because of it."""
import re
import sys
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import multiscreen
import screening_triton
import train
from experiments import plan, sizes
from support import memory
from support.checkpoint import build_model, has_windows
from support.cli import UsageError
from support.memory import count, refuse_what_cannot_fit
from tests import DEVICE
from tests.helpers import CPU, draw_tokens, fit

DTYPES = [None, torch.bfloat16]
SMALL = {"psi": 2, "vocab_size": 50, "N_L": 3}
NAMES = ["multiscreen", "multiscreen:no-gate", "transformer:2,2,32", "transformer:2,2,32:qknorm"]


def refuse(*flags, vocab_size=257, dtype=None):
    args, _ = train.get_args(list(map(str, flags)))
    config = {"psi": args.psi, "N_L": args.layers, "vocab_size": vocab_size}
    refuse_what_cannot_fit(args, config, dtype, CPU)


def bytes_kept(run, known):
    """(run(), the bytes that it saves for backward), each address in memory once."""
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda x: x):
        result = run()
    found = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in kept}
    for x in known:
        found.pop(x.untyped_storage().data_ptr(), None)
    return result, sum(found.values())


@pytest.fixture
def machine(monkeypatch):
    """machine(n): every device has n bytes of memory."""
    return lambda n: monkeypatch.setattr(memory, "memory_of", lambda device: n)


# ------------------------------------------------------------------------------- the count

@pytest.mark.parametrize("label", sizes.PAPER)
def test_the_parameters_are_those_of_the_papers_models(label):
    name, _, psi = label.partition(", psi ")
    c = count(name, {"psi": int(psi or 8), "vocab_size": 50257}, torch.bfloat16, 1, 8)
    assert (c.parameters, c.parameters - c.of_embedding) == sizes.PAPER[label]


@pytest.mark.parametrize("config", [SMALL, SMALL | {"N_L": None}, {"psi": 5, "vocab_size": 257}])
@pytest.mark.parametrize("name", NAMES)
def test_the_parameters_are_those_of_a_built_model(name, config):
    model = build_model(name, config)
    c = count(name, config, None, 1, 8)
    assert c.parameters == sum(p.numel() for p in model.parameters())
    assert c.of_embedding == model.W_E.numel()
    assert c.layers == len(model.layers)


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
    c = count(name, SMALL, dtype, 2, 16)
    assert c.saved_by_embed + 3 * c.saved_by_layer == saved > 0
    assert c.hidden == x.nbytes

    # The loss, then layers that are computed again.
    y, z = x.flatten(0, 1), tokens.flatten()
    _, saved = bytes_kept(lambda: F.cross_entropy(model.logits(y), z), [*weights, x, tokens])
    assert c.saved_by_head == saved > 0
    if has_windows(model):
        model.screen = multiscreen.screen              # fast; it must not matter here
    for layer in model.layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    _, saved = bytes_kept(lambda: model.hidden(tokens), weights)
    assert c.saved_by_embed + 3 * c.hidden == saved


def test_the_loss_is_counted_on_the_chunk_that_the_model_takes():
    with torch.device("meta"):
        model = build_model("multiscreen", {"psi": 1})
        model.screen = lambda q, k, v, w, r, i0: v
        taken, logits = [], model.logits
        model.logits = lambda x, head: taken.append(len(x)) or logits(x, head)
        tokens = torch.zeros(1, 2000, dtype=torch.int64)
        model.loss(tokens, tokens)
    less, chunk, more = (count("multiscreen", {"psi": 1}, None, 1, n).saved_by_head
                         for n in (taken[0] - 1, taken[0], 2000))
    assert taken[0] < 2000
    assert less < chunk == more


def test_a_process_keeps_its_share_of_the_state_and_what_is_gathered():
    c = count("multiscreen", {"psi": 4, "vocab_size": 257}, None, 2, 16)
    P = c.parameters
    whole, part = c.memory(), c.memory(shard=2, recompute=True, processes=4)
    assert (whole["weights"], whole["gradients"], whole["moments"]) == (4 * P, 4 * P, 8 * P)
    assert (part["weights"], part["gradients"], part["moments"]) == (2 * P, 2 * P, 4 * P)
    assert whole["gathered"] == 0
    assert part["gathered"] == 2 * 4 * (P - 2 * c.of_layer)
    assert whole["activations"] == (c.saved_by_embed + 4 * c.saved_by_layer + c.saved_by_head
                                    + c.hidden)
    assert part["activations"] == (c.saved_by_embed + 5 * c.hidden
                                   + max(c.saved_by_layer, c.saved_by_head))


def test_the_checkpoint_has_the_counted_size(tmp_path):
    found = fit(tmp_path / "run", "--psi", "6", "--steps", "1", "--eval-every", "9")
    size = (tmp_path / "run" / "ckpt.pt").stat().st_size
    c = count("multiscreen", found["config"], None, 4, 32)
    assert c.checkpoint == pytest.approx(size, rel=0.02)


def test_counting_draws_no_random_numbers():
    before = torch.get_rng_state()
    count("multiscreen", {"psi": 2}, None, 1, 8)
    assert torch.equal(torch.get_rng_state(), before)


# -------------------------------------------------------------------------- what is refused

@pytest.mark.parametrize("flags, advice", [
    (["--psi", 200], "358,410,400,002 parameters, .* take a smaller model"),
    (["--psi", 10**6], "does not fit into memory"), (["--psi", 10**30], "smaller model"),
    (["--layers", 10**9], "take a smaller model"),
    (["--batch-size", 10**9], "1,000,000,000 sequences .* take a smaller --batch-size"),
    (["--seq-len", 10**9], "1,000,000,000 tokens .* smaller --batch-size or --seq-len, or --rec"),
    (["--batch-size", 2**62, "--seq-len", 2**62], "2.63 bytes: take a smaller"),
    (["--model", "transformer:99999,8,800"], "take a smaller model")])
def test_what_no_machine_can_do_is_refused_within_a_second(flags, advice):
    began = time.process_time()
    with pytest.raises(UsageError, match=advice) as e:
        refuse(*flags)
    assert time.process_time() - began < 1
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("flags", [
    [], ["--psi", 16], ["--seq-len", 4096], ["--batch-size", 64], ["--model", "transformer:8M"],
    ["--model", "transformer:45M"], ["--data", "abcdigits", "--layers", 4]])
def test_ordinary_flags_pass_on_a_machine_of_8_gb(flags, machine):
    machine(8 * 10**9)
    refuse(*flags)


def test_refused_is_what_needs_one_byte_more_than_there_is(machine):
    c = count("multiscreen", {"psi": 4, "vocab_size": 257}, None, 8, 256)
    again = c.memory(recompute=True)["activations"]
    for saved, flags in ((c.memory()["activations"], []), (again, ["--recompute"]),
                         (4 * c.hidden, ["--compile"])):
        need = 12 * c.parameters + saved
        machine(need)
        refuse("--psi", 4, *flags)
        machine(need - 1)
        with pytest.raises(UsageError):
            refuse("--psi", 4, *flags)


def test_what_is_unknown_is_not_refused(machine, monkeypatch):
    machine(None)
    refuse("--psi", 200)
    machine(1)
    monkeypatch.setattr(multiscreen, "acceptance", lambda s_r: s_r * s_r.max().item())
    refuse()


def test_training_asks_before_it_builds(machine, tmp_path):
    machine(1)
    with pytest.raises(UsageError, match="take a smaller model"):
        fit(tmp_path / "run", "--steps", "1")
    assert not (tmp_path / "run").exists()


# --------------------------------------------------------------------------------- the plan

def test_passes_times_tokens_at_once_are_the_tokens_of_a_step():
    paper = SimpleNamespace(batch_tokens=2**22, batch_size=1, seq_len=4096)
    assert train.passes(paper, 64) == 16
    paper.batch_size = 3
    with pytest.raises(UsageError, match="take 4190208 or 4202496"):
        train.passes(paper, 1)


@pytest.fixture
def output(monkeypatch, capsys):
    """output(*flags): the lines that the script prints."""
    def run(*flags):
        monkeypatch.setattr(sys, "argv", ["plan", *map(str, flags)])
        plan.main()
        return capsys.readouterr().out.splitlines()

    return run


@pytest.mark.parametrize("name", ["multiscreen", "transformer:4,4,256"])
def test_a_plan_says_what_does_not_fit_and_what_does(name, output):
    psi = ["--psi", 16] if name == "multiscreen" else []
    flags = ["--model", name, *psi, "--seq-len", 4096, "--batch-tokens", 2**20, "--gpus", 4]
    out = output(*flags, "--batch-size", 8, "--gpu-memory", 2)
    c = count(name, {"psi": 16, "vocab_size": 257}, torch.bfloat16, 8, 4096)
    assert f"{c.parameters:,} parameters" in out[0]
    assert out[1] == ("passes of each GPU in a step: 8; tokens: 1,048,576 in a step, 650,117,120 "
                      "in 620 steps")
    table = {line[:16].strip(): line.split()[-2:] for line in out[4:10]}
    for column, recompute in enumerate((False, True)):
        need = c.memory(1, recompute, 4, passes=8)
        need["in all"] = sum(need.values())
        shown = [f"{n / 2**30:.2f}" for n in need.values()]
        assert [table[what][column] for what in need] == shown
    assert out[-2].startswith("--batch-size 8 --shard 1 does not fit; --batch-size ")
    other = out[-2].partition("; ")[2].partition(" does")[0]
    assert f"{other} fits" in output(*flags, *other.split(), "--gpu-memory", 2)[-2]

    # The small model that runs saves what was counted, but for the order of the tiles.
    measured, counted = (int(n.replace(",", "")) for n in re.findall(r" (\d[\d,]+)", out[-1]))
    assert measured == pytest.approx(counted, rel=1e-4)


def test_a_plan_refuses_what_cannot_be_divided(output):
    with pytest.raises(UsageError, match="must divide the 4 GPUs"):
        output("--shard", 3, "--gpus", 4)
    with pytest.raises(UsageError, match="take a smaller model"):
        output("--psi", 64, "--gpu-memory", 24)


def test_the_papers_table_has_flags_that_fit(output, monkeypatch):
    monkeypatch.setattr(plan, "PAPER", {"--psi 64": 64, "--model transformer:8M": 16})
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in output()]
    assert all(len(row) == len(rows[0]) for row in rows)
    assert [row[1] for row in rows[2:]] == ["3,963,961,346", "7,613,312"]
    assert rows[2][3] == "`--batch-size 1 --shard 8`"              # shared before recomputed
    for row in rows[2:]:
        batch_size = int(row[3].split()[1])
        assert batch_size * int(row[4]) * int(row[2]) == 1024      # sequences in 2^22 tokens
        assert float(row[5]) < float(row[6]) <= 72
