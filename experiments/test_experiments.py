"""Tests of the experiments: parameter counts, the baseline and the ablations against formulas written again in float64."""
import math
import os
import re
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend

sys.path.insert(0, str(Path(__file__).parent.parent))
os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")

import abcdigits
import multiscreen
import train
from experiments import (ablations, common, kernel_benchmark, latency, long_context, lr_sweep, passkey, relevance_maps,
                         retrieval, sample, scaling, training_curves, transformer, windows)
from experiments.common import count_parameters
from multiscreen import Config, Multiscreen, softmask, window
from train import UsageError

seeds = st.integers(0, 2**31 - 1)
TINY = {"psi": 3, "N_L": None, "vocab_size": 50}


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def tokens(*shape, seed=0, n=50):
    return torch.randint(n, shape, generator=torch.Generator().manual_seed(seed))


def build(name, seed=0, far=False, **sizes):
    """A small model; its parameters far from their initial values if asked, so that little depends on the initialisation."""
    torch.manual_seed(seed)
    model = train.build_model(name, TINY | sizes).double()
    if far:
        with torch.no_grad():
            for n, (key, p) in enumerate(model.named_parameters()):
                noise = randn(*p.shape, seed=seed + n)
                if "norm" in key:
                    p.add_(0.3 * noise)
                elif key.endswith(("s_w", "s_r")):
                    p.add_(1.0 + noise)
                elif key.endswith("W_E"):
                    p.add_(0.2 * noise[0])                             # tokens alike: many pairs pass Trim
                else:
                    p.add_(0.3 * noise)
            for tile in model.layers if train.screens(model) else []:
                tile.W_K.copy_(tile.W_Q + 0.1 * randn(*tile.W_Q.shape, seed=seed))            # so do similar queries and keys
    return model


# ------------------------------------------------------------------------------------------------------ the Transformer

@pytest.mark.parametrize("size, total, rest", [("8M", 7_613_312, 1_180_416), ("45M", 44_609_024, 18_877_440),
                                               ("353M", 353_453_056, 301_989_888), ("1.3B", 1_310_935_040, 1_208_008_704)])
def test_transformer_counts_are_the_papers(size, total, rest):
    with torch.device("meta"):
        model = train.build_model(f"transformer:{size}", {"psi": 8, "N_L": None, "vocab_size": 50257})
        more = train.build_model(f"transformer:{size}:qknorm", {"vocab_size": 50257})
    count = sum(p.numel() for p in model.parameters())
    assert (count, count - model.W_E.numel()) == (total, rest)
    N_L, N_H, d_E = transformer.SIZES[size]
    assert sum(p.numel() for p in more.parameters()) == total + N_L * 2 * (d_E // N_H)


def test_transformer_is_initialised_as_gpt_neox():
    torch.manual_seed(0)
    model = train.build_model("transformer:3,2,160", {"vocab_size": 300})
    for name, p in model.named_parameters():
        if p.ndim == 1:
            assert (p == 1).all()
            continue
        std = 2 / (3 * math.sqrt(160)) if name.split(".")[-1] in ("W_O", "W_down") else math.sqrt(2 / (5 * 160))
        assert p.std().item() == pytest.approx(std, rel=0.03) and abs(p.mean().item()) < 0.05 * std, name
    assert model.layers[0].W_up.shape == (160, 426)                       # floor(8 * 160 / 3)


def llama(p, config, x, scale):
    """Logits of a LLaMA in float64, one head and one query at a time. p: parameters by name; x: (T,) tokens."""
    def norm(y, weight=1.0):
        return y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight

    def turned(y):                                                     # the pair (n, n + K/2) as a complex number
        K, i = y.shape[-1], torch.arange(len(y), dtype=torch.float64)
        angle = torch.outer(i / scale, torch.tensor([10_000 ** (-2 * n / K) for n in range(K // 2)], dtype=torch.float64))
        z = torch.complex(y[:, : K // 2], y[:, K // 2 :]) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat((z.real, z.imag), 1)

    K, h = config.d_E // config.N_H, p["W_E"][x]
    for n in range(config.N_L):
        W = {key.split(".", 2)[2]: value for key, value in p.items() if key.startswith(f"layers.{n}.")}
        y, out = norm(h, W["norm_1.weight"]), []
        for t in range(config.N_H):
            q, k, v = (y @ W[key][:, t * K : (t + 1) * K] for key in ("W_Q", "W_K", "W_V"))
            if config.qk_norm:
                q, k = norm(q, W["norm_q.weight"]), norm(k, W["norm_k.weight"])
            q, k = turned(q), turned(k)
            out.append(torch.stack([((k[: i + 1] @ q[i]) / math.sqrt(K)).softmax(0) @ v[: i + 1] for i in range(len(x))]))
        h = h + torch.cat(out, 1) @ W["W_O"]
        y = norm(h, W["norm_2.weight"])
        gate = y @ W["W_gate"]
        h = h + (gate * torch.sigmoid(gate) * (y @ W["W_up"])) @ W["W_down"]
    return norm(h) @ p["W_E"].T


@pytest.mark.parametrize("name", ["transformer:2,3,24", "transformer:2,3,24:qknorm"])
@pytest.mark.parametrize("scale", [1, 4])
def test_transformer_is_a_llama(name, scale):
    model = build(name, far=True)
    train.scale_rope(model, scale)
    x = tokens(1, 30)
    with torch.no_grad():
        exact = llama(dict(model.named_parameters()), model.config, x[0], scale)
        torch.testing.assert_close(model(x)[0], exact, rtol=1e-9, atol=1e-9)
        assert (model.float()(x)[0].double() - exact).norm() < 1e-4 * exact.norm()
        train.scale_rope(model, 2 * scale)
        assert (model(x)[0].double() - exact).norm() > 1e-4 * exact.norm()


@settings(max_examples=20)
@given(seeds, st.integers(0, 2000), st.integers(0, 2000), st.integers(0, 2000), st.sampled_from([1.0, 2.0, 64.0]))
def test_rope_knows_distances_only(seed, i, j, shift, scale):
    q, k = randn(1, 1, 1, 16, seed=seed), randn(1, 1, 1, 16, seed=seed + 1)

    def product(i, j):
        return (transformer.rope(q, torch.tensor([i]), scale) * transformer.rope(k, torch.tensor([j]), scale)).sum().item()

    assert product(i, j) == pytest.approx(product(i + shift, j + shift), abs=1e-9)


def test_rope_by_hand():
    x = torch.tensor([[[[1.0, 0.0, 0.0, 2.0]]]], dtype=torch.float64)           # pairs (1, 0) and (0, 2), K = 4
    a, b = 300 / 2, 300 / 2 / 100                                               # theta^(-2/4) = 1/100
    wanted = [math.cos(a), -2 * math.sin(b), math.sin(a), 2 * math.cos(b)]
    assert transformer.rope(x, torch.tensor([300]), 2.0).flatten().tolist() == pytest.approx(wanted, abs=1e-9)


@pytest.mark.parametrize("name", ["transformer:2,3,24", "multiscreen:rope", "multiscreen:nope", "multiscreen:no-gate"])
def test_cached_chunks_and_decoding_equal_one_pass(name):
    model, x = build(name, far=True), tokens(2, 60)
    full = model(x)
    with torch.no_grad():
        torch.testing.assert_close(model.logits(model.hidden(x, chunk=17)), full, rtol=1e-9, atol=1e-9)
    y = x
    for _ in range(5):
        y = torch.cat((y, model(y)[:, -1].argmax(-1, keepdim=True)), 1)
    assert torch.equal(model.generate(x, 5), y[:, 60:])


def test_transformer_is_causal_and_every_backend_agrees():
    model, x = build("transformer:2,3,24", far=True).float(), tokens(1, 60)
    full, cut = model(x), model(torch.cat((x[:, :40], tokens(1, 20, seed=1)), 1))
    torch.testing.assert_close(full[:, :40], cut[:, :40], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(full[:, 40:], cut[:, 40:], atol=1e-2)
    for backend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
        model.screen = backend
        torch.testing.assert_close(model(x), full, rtol=1e-4, atol=1e-4)
    model.screen = SDPBackend.CUDNN_ATTENTION                                   # which no CPU has
    with pytest.raises(RuntimeError):                                           # the choice is obeyed, not a hint
        model(x)


@pytest.mark.filterwarnings("ignore")
def test_a_layer_of_the_transformer_compiles_as_one_graph_for_all_lengths():
    model = build("transformer:2,3,24").float()
    compiled = torch.compile(model.layers[0], backend="aot_eager", fullgraph=True, dynamic=True)
    for T in (20, 33):
        x = model.embed(tokens(1, T))
        torch.testing.assert_close(compiled(x), model.layers[0](x))


@pytest.mark.parametrize("name, message", [("transformer:9M", "8M, 45M"), ("transformer:2,3", "8M, 45M"), ("transformer:2,3,25", "multiple"),
                                           ("transformer:8M:norm", "qknorm"), ("multiscreen:moe", "rope, nope"), ("mamba", "multiscreen:ABLATION"),
                                           ("transformer:0,1,8", "at least 1")])
def test_unknown_models_are_explained(name, message):
    with pytest.raises(train.UsageError, match=message):
        train.build_model(name, TINY)


def test_train_takes_the_papers_settings_for_each_model():
    def flags(*argv):
        args, _ = train.get_args(list(argv))
        return args.lr, args.weight_decay, args.clip

    assert flags() == flags("--model", "multiscreen:nope") == (0.0625, 0.0, 0.0)
    assert flags("--model", "transformer:8M") == flags("--model", "transformer:45M:qknorm") == (1e-3, 0.1, 1.0)
    assert flags("--model", "transformer:353M")[0] == 3e-4 and flags("--model", "transformer:1.3B")[0] == 2e-4
    assert flags("--model", "transformer:45M", "--weight-decay", "0", "--clip", "0", "--lr", ".25") == (0.25, 0.0, 0.0)


# -------------------------------------------------------------------------------------------------------- the ablations

def dense_tiles(p, c, x, variant, scale=1.0):
    """Logits of Multiscreen with one thing changed, in float64, tile by tile with T x T matrices. x: (T,) tokens."""
    T = len(x)
    i = torch.arange(T, dtype=torch.float64)
    d = i - i[:, None]
    E = p["W_E"] / p["W_E"].norm(dim=1, keepdim=True)
    h = p["s_E"].exp() * E[x]
    for n in range(c.N_L):
        update = torch.zeros_like(h)
        for t in range(c.N_H):
            W = {key.split(".")[2]: value.select(0 if key[-3:] in ("W_O", "s_w", "s_r", "s_O") else 1, t)
                 for key, value in p.items() if key.startswith(f"layers.{n}.")}
            q, k, v = (h @ W[key] / (h @ W[key]).norm(dim=1, keepdim=True) for key in ("W_Q", "W_K", "W_V"))
            w, r = W["s_w"].exp() + 1, 1.0 if variant == "fixed-r" else 1 / (1 + (-W["s_r"]).exp())
            s = q @ k.T
            if variant == "rope":                      # turning q by a and k by b turns their product by a - b
                s = torch.zeros(T, T, dtype=torch.float64)
                for m in range(8):
                    (a, b), (e, f), angle = q[:, [m, m + 8]].T, k[:, [m, m + 8]].T, d / scale * 10_000 ** (-m / 8)
                    s += (torch.outer(a, e) + torch.outer(b, f)) * angle.cos() + (torch.outer(b, e) - torch.outer(a, f)) * angle.sin()
            elif variant != "nope" and w < 256:
                angle = d * math.pi * ((math.pi * w / 256).cos() + 1) / 2 / w
                (a, b), (e, f) = q[:, :2].T, k[:, :2].T
                s = q[:, 2:] @ k[:, 2:].T + (torch.outer(a, e) + torch.outer(b, f)) * angle.cos() + (torch.outer(b, e) - torch.outer(a, f)) * angle.sin()
            inside = (d <= 0) & (d > -w)
            u = ((1 - (1 - s) / r).clamp(min=0) ** 2 * ((math.pi * d / w).cos() + 1) / 2 * inside) @ v
            if variant != "no-tanhnorm":
                norm = u.norm(dim=1, keepdim=True)
                u = torch.where(norm > 0, norm.tanh() / norm.clamp(min=1e-30), 1.0) * u
            if variant != "no-gate":
                g = h @ W["W_G"]
                u = u * (g * torch.sigmoid(g)).tanh()
            update += u @ (W["s_O"].exp() * W["W_O"])
        h = h + update
    return h @ (p["s_F"].exp() * E).T


@pytest.mark.parametrize("variant", ["", *ablations.TILES])
def test_each_ablation_is_the_paper_with_one_thing_changed(variant):
    model, x = build(f"multiscreen:{variant}".rstrip(":"), far=True), tokens(1, 50)
    with torch.no_grad():
        p = dict(model.named_parameters())
        exact = dense_tiles(p, model.config, x[0], variant)
        torch.testing.assert_close(model(x)[0], exact, rtol=1e-8, atol=1e-8)
        if variant == "rope":
            train.scale_rope(model, 8)
            torch.testing.assert_close(model(x)[0], dense_tiles(p, model.config, x[0], variant, 8), rtol=1e-8, atol=1e-8)
        if variant and variant != "no-gate":           # and the change is seen (without a gate there is no W_G to compare with)
            assert (dense_tiles(p, model.config, x[0], "") - exact).norm() > 1e-4 * exact.norm()
    model.loss(x, x).backward()
    learned = {n for n, q in model.named_parameters() if q.grad is not None}
    assert learned == {n for n in p if not (variant == "fixed-r" and n.endswith("s_r"))}


@pytest.mark.parametrize("psi", range(4, 17))
def test_without_a_gate_the_parameters_stay_about_the_same(psi):
    with torch.device("meta"):
        sizes = [sum(p.numel() for p in train.build_model(name, {"psi": psi, "vocab_size": 257}).layers.parameters())
                 for name in ("multiscreen", "multiscreen:no-gate")]
    assert abs(sizes[1] / sizes[0] - 1) < 0.15


def test_without_a_gate_there_are_19_layers_of_19_tiles_as_in_the_paper():
    with torch.device("meta"):
        model = train.build_model("multiscreen:no-gate", {"psi": 16, "N_L": None, "vocab_size": 50257})
    assert (model.config.N_L, model.config.N_H, model.config.d_E) == (19, 19, 256)
    assert sum(p.numel() for p in model.parameters()) == 27_653_437
    with torch.device("meta"):
        again = train.build_model("multiscreen:no-gate", asdict(model.config))
    assert again.config == model.config


def test_rope_scale_needs_a_model_that_has_it():
    with pytest.raises(train.UsageError, match="RoPE"):
        train.scale_rope(build("multiscreen"), 2)


# ---------------------------------------------------------------------------------- train, evaluate, retrieve, by name

def fit(out, *flags):
    (out.parent / "text.txt").write_text("".join(f"{n} bottles of beer on the wall.\n" for n in range(400)))
    train.main(["--psi", "2", "--seq-len", "64", "--batch-size", "4", "--warmup", "2", "--device", "cpu", "--steps", "4", "--data",
                str(out.parent / "text.txt"), "--out", str(out), *flags])


@pytest.mark.parametrize("name", ["transformer:1,2,16", "multiscreen:rope"])
def test_a_named_model_is_trained_resumed_and_measured(tmp_path, monkeypatch, capsys, name):
    fit(tmp_path / "a", "--model", name)
    fit(tmp_path / "b", "--model", name, "--steps", "2")
    train.main(["--resume", "--out", str(tmp_path / "b"), "--steps", "4"])
    a, b = (train.read_checkpoint(tmp_path / x / "ckpt.pt") for x in "ab")
    assert a["model"] == name and all(torch.equal(a["weights"][n], b["weights"][n]) for n in a["weights"])
    model, tokenizer, _ = train.load_checkpoint(tmp_path / "a/ckpt.pt")
    assert train.screens(model) == name.startswith("multiscreen")
    path, seen = tmp_path / "a/ckpt.pt", []
    # the first of three factors finds nothing, the second and third everything: the table shows the second
    monkeypatch.setattr(abcdigits, "evaluate", lambda model, tokenizer, prompts, answers: seen.append(model.layers[0].rope_scale) or [seen[-1] > 1] * len(prompts))
    for module, digits in ((abcdigits, 6), (passkey, "1 to 5")):
        monkeypatch.setattr(sys, "argv", ["x", "--ckpt", str(path), "--lengths", "700", "--depths", "0.5", "--trials", "2", "--rope-scale", "1", "2", "4"])
        module.main()
        assert "100.0% x2" in capsys.readouterr().out
        assert path.with_name(f"{module.__name__.split('.')[-1]}.tsv").read_text().splitlines()[1] == f"700\t0.5\t2\t{digits}\t1.0000\t2"
    assert seen == [1, 2, 4] * 2
    grid = retrieval.read_grid(path.with_name("passkey.tsv"))
    assert grid == ({(700, 0.5): (1.0, 2.0)}, "1 to 5 digits")
    abcdigits.measure(abcdigits.get_parser("").parse_args(["--ckpt", str(path), "--lengths", "700", "--depths", "0.5", "--trials", "1"]), model, tokenizer, 64,
                      "passkey", 9, lambda *a: (["x"], ["1"]))                       # a table that was there is kept
    assert retrieval.read_grid(path.with_name("passkey-old-1.tsv")) == grid and retrieval.read_grid(path.with_name("passkey.tsv"))[1] == "9 digits"
    os.replace(path.with_name("passkey-old-1.tsv"), path.with_name("passkey.tsv"))
    monkeypatch.setattr(sys, "argv", ["x", str(path.with_name("passkey.tsv")), "--out", str(tmp_path / "r")])
    retrieval.main()
    assert (tmp_path / "r/retrieval.tsv").read_text().splitlines()[1].split("\t")[1:] == [name, "700", f"{700 / 64:.5g}", "100.0%", "100.0%"]
    with pytest.raises(UsageError, match="no table"):
        retrieval.read_grid(path.with_name("log.tsv"))
    monkeypatch.setattr(sys, "argv", ["x", "--ckpt", str(path), "--swe", "--lengths", "700", "--trials", "1"])
    if name.startswith("transformer"):
        with pytest.raises(train.UsageError, match="--swe"):
            abcdigits.main()


# -------------------------------------------------------------------------------------------------------------- passkey

@pytest.mark.parametrize("depth, before", [(0.0, 0), (0.3, 3), (0.5, 5), (1.0, 10)])
def test_passkey_prompts_are_as_published(depth, before):
    frame = len(passkey.TASK) + len("\nThe pass key is 50000. Remember it. 50000 is the pass key.\n") + len("\nWhat is the pass key? The pass key is")
    prompts, answers = passkey.generate(frame + 10 * len(passkey.FILLER) + 50, depth, len, 5)
    assert len(set(answers)) == 5
    for prompt, answer in zip(prompts, answers):
        key = answer.removeprefix(" ")
        assert 1 <= int(key) <= 50_000
        head, tail = prompt.split(f"\nThe pass key is {key}. Remember it. {key} is the pass key.\n")
        assert head.count("The grass is green.") == before and tail.count("The grass is green.") == 10 - before
        assert head.startswith("There is an important info hidden inside a lot of irrelevant text.")
    once = passkey.generate(frame + 2 * len(passkey.FILLER), 0.5, len, 1)
    assert once == (["There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. I will quiz you about the "
                     "important information there.\nThe grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
                     "\nThe pass key is 3432. Remember it. 3432 is the pass key.\nThe grass is green. The sky is blue. The sun is yellow. Here we go. "
                     "There and back again. \nWhat is the pass key? The pass key is"], [" 3432"])
    for bad in [(frame, 0.5, 1), (5000, 1.5, 1), (5000, 0.5, 0)]:
        with pytest.raises(train.UsageError):
            passkey.generate(bad[0], bad[1], len, bad[2])


# ------------------------------------------------------------------------------------------------- runs and their tables

def test_runs_are_kept_and_diverged_ones_noted(tmp_path, monkeypatch, capsys):
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question. " * 200)
    flags = ["--psi", 2, "--seq-len", 32, "--batch-size", 2, "--device", "cpu", "--data", tmp_path / "text.txt", "--log-every", 1]
    rows, diverged = common.run_once(tmp_path / "a", *flags, steps=3)
    assert [row["step"] for row in rows] == [1, 2, 3] and diverged is None and "val_loss" in rows[-1]
    calls = []
    monkeypatch.setattr(train, "main", lambda argv: calls.append(argv))
    assert common.run_once(tmp_path / "a", *flags, steps=3)[0] == rows and not calls
    with pytest.raises(train.UsageError, match="other flags"):
        common.run_once(tmp_path / "a", *flags, steps=4)
    monkeypatch.undo()
    main = train.main
    monkeypatch.setattr(train, "main", lambda argv: main([*argv, "--steps", "2"]))                       # stopped half way
    with pytest.raises(KeyboardInterrupt, match="started again"):
        common.run_once(tmp_path / "d", *flags, steps=4)
    assert not common.is_finished(tmp_path / "d", 4) and common.is_finished(tmp_path / "d", 2)
    monkeypatch.undo()
    rows, _ = common.run_once(tmp_path / "d", *flags, steps=4)
    assert [row["step"] for row in rows] == [1, 2, 3, 4] and not list((tmp_path / "d").glob("old*"))      # it went on, not anew
    capsys.readouterr()
    progress = common.Progress(5)
    losses = common.run_seeds(tmp_path / "e", *flags, steps=2, seeds=2, progress=progress)
    assert common.run_seeds(tmp_path / "e", *flags, steps=2, seeds=2, progress=progress) == losses and losses[0] != losses[1]
    assert (progress.done, progress.total) == (2, 3)                                # the two that were there do not count
    assert losses == [common.read_log(tmp_path / f"e-{seed}/log.tsv")[-1]["val_loss"] for seed in (0, 1)]
    for _ in range(2):
        rows, diverged = common.run_once(tmp_path / "b", *flags, "--lr", 1e18, "--warmup", 0, steps=3)
        assert "diverged" in diverged and rows[-1]["step"] < 3
    with pytest.raises(UsageError, match="does not exist"):                         # the word alone is no divergence
        common.run_once(tmp_path / "c", "--data", tmp_path / "diverged.txt", steps=3)
    with pytest.raises(UsageError, match="cannot be written"):
        common.run_once(tmp_path / "text.txt", *flags, steps=3)
    for flags in (["--seed", "1"], ["--seed=1"]):
        with pytest.raises(UsageError, match="--seed is set"):
            common.refuse(flags, "--model", "--seed")
    common.report(tmp_path / "t/x.tsv", ["a", "b"], [["one", 1.23456], ["two", None]], "Title")
    assert (tmp_path / "t/x.tsv").read_text() == "a\tb\none\t1.2346\ntwo\t-\n" and "Title" in capsys.readouterr().out
    for rows in ([["one", 1.23456], ["two", None]], [["three", 3]]):                # the same again, then others
        common.report(tmp_path / "t/x.tsv", ["a", "b"], rows, "Title")
    assert sorted((p.name, p.read_text().count("three")) for p in (tmp_path / "t").iterdir()) == [("x-old-1.tsv", 0), ("x.tsv", 1)]


def test_time_left_is_by_the_share_that_is_done(monkeypatch, capsys):
    clock = [100.0]
    monkeypatch.setattr(common.time, "perf_counter", lambda: clock[0])
    progress = common.Progress(10)
    progress.add(4, "read", known=True)
    clock[0] += 60
    progress.add(2, "run")                                                          # 2 of 6 in a minute: two more
    assert capsys.readouterr().out.splitlines() == ["read   0:00:00", "run   0:01:00, about 0:02:00 left"]


def test_ablations_command(tmp_path, monkeypatch, capsys):
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question. " * 200)
    monkeypatch.setattr(sys, "argv", ["ablations", "--steps", "2", "--out", str(tmp_path / "o"), "--psi", "2", "--seq-len", "32", "--batch-size", "2",
                                      "--device", "cpu", "--data", str(tmp_path / "text.txt")])
    ablations.main()
    table = (tmp_path / "o/ablations.tsv").read_text().splitlines()
    cells = [line.split("\t") for line in table[1:]]
    assert [row[0] for row in cells] == ["multiscreen"] + [f"multiscreen:{x}" for x in ("rope", "nope", "no-tanhnorm", "no-gate", "fixed-r")]
    assert [row[6] for row in cells] == ["3.0966", "3.1232", "3.1109", "3.1094", "3.1555", "3.112"]        # the paper's table
    assert [row[7] for row in cells] == ["0.0027", "0.0014", "0.0025", "0.0026", "0.0007", "0.0026"]
    for row in cells:
        assert float(row[5]) == pytest.approx(float(row[2]) - float(cells[0][2]), abs=1e-3)
    assert "no figure" in capsys.readouterr().out or (tmp_path / "o/ablations.png").exists()


# ----------------------------------------------------------------------- long context, windows, relevance maps, samples

@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Checkpoints of some models with random weights, by name, as train.py writes them."""
    folder, paths = tmp_path_factory.mktemp("ckpt"), {}
    for name in ("multiscreen", "multiscreen:rope", "multiscreen:fixed-r", "transformer:2,2,8"):
        torch.manual_seed(0)
        model = train.build_model(name, {"psi": 3, "N_L": 2, "vocab_size": 257})
        with torch.no_grad():
            for W in model.layers.parameters():                    # so that layers, positions and windows matter
                W.mul_(6 if W.ndim > 1 else 1)
        paths[name] = folder / name.replace(":", "_") / "ckpt.pt"
        paths[name].parent.mkdir()
        args = {k: None for k in train.FIXED} | {"model": name, "seq_len": 16}
        train.save_checkpoint(paths[name], dict.fromkeys(train.CHECKPOINT, 0) | {
            "model": name, "config": vars(model.config), "weights": model.state_dict(), "tokenizer": "bytes", "args": args})
    return paths


def run(module, monkeypatch, *flags):
    monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, flags)])
    module.main()


def read(path):
    head, *rows = [line.split("\t") for line in path.read_text().splitlines()]
    return [dict(zip(head, row, strict=True)) for row in rows]


def test_positions_and_their_windows():
    assert long_context.positions(100) == [16, 23, 32, 45, 64, 91, 100]
    assert long_context.positions(64) == [16, 23, 32, 45, 64]
    assert long_context.positions(3) == [3]
    assert [long_context.around(p, 100) for p in (1, 10, 16, 91, 100)] == [(1, 1), (9, 11), (15, 17), (82, 100), (90, 100)]
    values = np.arange(1.0, 101)                                   # position p has the value p
    assert long_context.window_sums(values, 100)[[0, -1]].tolist() == [15 + 16 + 17, 11 * 95]


def test_middle_is_centred():
    assert long_context.middle(list(range(10)), 3).tolist() == [3, 4, 5, 6]
    assert long_context.middle(list(range(4)), 3).tolist() == [0, 1, 2, 3]
    assert long_context.middle(list(range(3)), 3) is None


def test_documents(tmp_path):
    for name, n in (("a", 5), ("b", 8), ("c", 9), ("d", 20)):
        (tmp_path / name).write_text(name * n)
    tokenizer = train.get_tokenizer("bytes")
    segments, short = long_context.get_documents([tmp_path], tokenizer, 8, 5)
    assert [bytes(s.astype(np.uint8)) for s in segments] == [b"c" * 9, b"d" * 9] and short == 2
    assert len(long_context.get_documents([tmp_path], tokenizer, 8, 1)[0]) == 1
    with pytest.raises(train.UsageError, match="longer than 20 tokens, the longest has 20"):
        long_context.get_documents([tmp_path], tokenizer, 20, 5)


def test_default_documents_are_held_out_from_training():
    tokenizer = train.get_tokenizer("bytes")
    training, _ = train.get_data(train.get_parser().parse_args([]), tokenizer)
    seen = b"".join(bytes(a.astype(np.uint8)) for a in training.arrays)
    segments, _ = long_context.get_documents(None, tokenizer, 4096, 5)
    assert len(segments) == 5 and not any(bytes(s.astype(np.uint8))[1000:1500] in seen for s in segments)


def test_position_p_has_p_tokens_of_context(checkpoints):
    """Against the logits of the whole model on each prefix by itself."""
    model, _, _ = train.load_checkpoint(checkpoints["multiscreen"])
    x = torch.randint(257, (21,), generator=torch.Generator().manual_seed(1))
    found = long_context.nats(model, x.numpy().astype(np.uint16))
    for p in (1, 2, 20):
        with torch.no_grad():
            assert found[p - 1] == pytest.approx(-model(x[None, :p])[0, -1].log_softmax(-1)[x[p]].item(), abs=1e-5)


def test_means_over_tokens_documents_and_bytes(monkeypatch):
    """Two documents whose tokens cost 1 and 3 nats, with two bytes a token: 2 nats, 1 / ln 2 bits per byte."""
    class Tokenizer:
        def decode_tokens_bytes(self, tokens):
            return [b"ab"] * len(tokens)

    monkeypatch.setattr(long_context, "nats", lambda model, segment: np.full(20, segment[0], dtype=float))
    progress = long_context.Progress(2)
    per_token, per_byte = long_context.measure(None, Tokenizer(), [np.full(21, 1), np.full(21, 3)], 20, progress, "")
    assert per_token == pytest.approx([2, 2]) and per_byte == pytest.approx([1 / math.log(2)] * 2)


def test_long_context_runs(checkpoints, tmp_path, monkeypatch):
    (tmp_path / "text").write_text("screening is enough " * 4)
    names = ["multiscreen", "multiscreen:rope", "transformer:2,2,8"]
    flags = ["--device", "cpu", "--data", tmp_path / "text", "--length", 40]
    run(long_context, monkeypatch, "--ckpt", *[checkpoints[n] for n in names], *flags, "--rope-scale", 1, 4, "--swe")
    rows = read(checkpoints["multiscreen"].with_name("long_context.tsv"))
    assert [(r["model"], r["curve"]) for r in rows if r["position"] == "16"] == [
        ("multiscreen", "as trained"), ("multiscreen", "SWE"), ("multiscreen:rope", "RoPE x1"), ("multiscreen:rope", "RoPE x4"),
        ("multiscreen:rope", "SWE RoPE x1"), ("multiscreen:rope", "SWE RoPE x4"),
        ("transformer:2,2,8", "RoPE x1"), ("transformer:2,2,8", "RoPE x4")]
    assert len(rows) == 8 * 4 and len({tuple(r["perplexity"] for r in rows[n : n + 4]) for n in range(0, 32, 4)}) == 8
    for r in rows:
        assert float(r["nats_per_token"]) == pytest.approx(math.log(float(r["perplexity"])), rel=1e-3)
        assert float(r["bits_per_byte"]) == pytest.approx(math.log2(float(r["perplexity"])), rel=1e-3)
    for more, message in ((["--rope-scale", 2], "RoPE"), (["--length", 0], "above 0"), (["--length", 80], "no document")):
        with pytest.raises(train.UsageError, match=message):
            run(long_context, monkeypatch, "--ckpt", checkpoints["multiscreen"], *flags, *more)
    with pytest.raises(train.UsageError, match="--swe"):
        run(long_context, monkeypatch, "--ckpt", checkpoints["transformer:2,2,8"], *flags, "--swe")


def test_retrieval_by_length_from_a_table_by_hand(checkpoints, tmp_path, monkeypatch):
    path = tmp_path / "abcdigits_swe.tsv"
    shutil.copy(checkpoints["multiscreen"], tmp_path)
    path.write_text("length\tdepth\ttrials\tdigits\taccuracy\trope_scale\n16\t0.1\t4\t2\t1.0\t\n32\t0.1\t4\t2\t0.25\t\n32\t0.5\t4\t2\t0.75\t\n")
    run(retrieval, monkeypatch, path, "--out", tmp_path / "r")
    rows = read(tmp_path / "r/retrieval.tsv")
    T = train.read_checkpoint(tmp_path / "ckpt.pt")["args"]["seq_len"]
    assert [(r["model"], r["length"], float(r["x_training"]), r["mean"], r["worst_depth"]) for r in rows] == [
        ("multiscreen, SWE", "16", 16 / T, "100.0%", "100.0%"), ("multiscreen, SWE", "32", 32 / T, "50.0%", "25.0%")]


def test_summary_of_windows():
    row = windows.summary("1", np.array([2.0, 300.0, np.inf]), np.array([0.5, 1.0, 0.25]), 256.0, 300)
    assert row == ["1", 3, 2.0, 300.0, math.inf, 0.25, 0.5, 1.0, 2, 1]


def test_windows_runs(checkpoints, monkeypatch):
    """The initial windows are 2, 17 and 257 tokens: exp(s_w) + 1 with s_w evenly spaced from 0 to ln 256."""
    for name, r in (("multiscreen", 0.5), ("multiscreen:fixed-r", 1.0)):
        run(windows, monkeypatch, "--ckpt", checkpoints[name])
        rows = read(checkpoints[name].with_name("windows.tsv"))
        assert [row["layer"] for row in rows] == ["1", "2", "all"]
        last = {k: float(v) for k, v in rows[-1].items() if k != "layer"}
        assert last == {"tiles": 6, "w_min": 2, "w_median": 17, "w_max": 257, "r_min": r, "r_median": r, "r_max": r,
                        "w>w_th": 2, "w>T_train": 4}
    model, _, _ = train.load_checkpoint(checkpoints["multiscreen"])
    model.expand_windows(16)
    assert windows.learned(model)[0].tolist() == [[2.0, math.inf, math.inf]] * 2
    for module in (windows, relevance_maps):
        with pytest.raises(train.UsageError, match="no screening windows"):
            run(module, monkeypatch, "--ckpt", checkpoints["transformer:2,2,8"])


@pytest.mark.parametrize("infinite", [False, True])
def test_windows_figure(infinite):
    plt = pytest.importorskip("matplotlib.pyplot")
    w = np.array([[1.5, 40.0, np.inf if infinite else 900.0]] * 2)
    fig = windows.draw(plt, w, np.full((2, 3), 0.5), 256.0, 128)
    top, _, ax, right = fig.axes[:4]
    assert sum(bar.get_height() for bar in top.patches) == sum(bar.get_width() for bar in right.patches) == 6
    assert sum(len(points.get_offsets()) for points in ax.collections) == 6
    plt.close(fig)


def test_inside_and_alive():
    assert relevance_maps.inside(3, 1.5).tolist() == [[True, False, False], [True, True, False], [False, True, True]]
    assert relevance_maps.inside(3, 2.0).tolist() == relevance_maps.inside(3, 1.5).tolist()
    assert relevance_maps.inside(4, math.inf).sum() == 10
    d = torch.arange(50) - torch.arange(50)[:, None]
    assert (relevance_maps.inside(50, 7.3) == (softmask(d, torch.tensor(7.3)) > 0).numpy()).all()
    alpha_d = np.array([[1.0, 0, 0], [0, 0.5, 0], [0, 0, 0.1]])
    assert relevance_maps.alive(alpha_d, 1.5) == pytest.approx(3 / 5)
    assert relevance_maps.alive(alpha_d, math.inf) == pytest.approx(3 / 6)


def test_paint_tells_zero_from_small_and_from_outside():
    alpha_d = np.array([[1e-30, 0, 0], [0, 1, 0], [0, 0, 0.5]])
    image = relevance_maps.paint(alpha_d, 1.5, lambda a: np.stack([a, a, a, np.ones_like(a)], -1))
    assert image[1, 0].tolist() == [1, 1, 1, 1] and image[0, 1].tolist() == image[2, 0].tolist() == [0.3, 0.3, 0.3, 1]
    assert image[0, 0, 0] == 1e-30 and image[2, 2, 0] == 0.5


def test_relevance_maps_runs(checkpoints, monkeypatch):
    """`alive` over all tiles, weighted by the pairs in their windows, is the number that train.py logs."""
    path = checkpoints["multiscreen"]
    run(relevance_maps, monkeypatch, "--ckpt", path, "--text", "screening is enough" * 9, "--tokens", 20, "--device", "cpu")
    rows = read(path.with_name("relevance_maps.tsv"))
    assert [(r["layer"], r["head"]) for r in rows] == [(n, m) for n in "12" for m in "123"]
    assert [r["w"] for r in rows] == ["2", "17", "257"] * 2 and {r["r"] for r in rows} == {"0.5"}
    pairs = {"2": 20 + 19, "17": sum(range(4, 21)), "257": 210}
    share = sum(float(r["alive"]) * pairs[r["w"]] for r in rows) / (2 * sum(pairs.values()))
    model, tokenizer, _ = train.load_checkpoint(path)
    tokens = torch.tensor([tokenizer.encode_ordinary("screening is enough" * 9)[:20]])
    assert share == pytest.approx(train.alive_fraction(model, tokens), rel=1e-3)


def test_pieces_hold_back_what_is_no_character_yet():
    tokenizer = train.get_tokenizer("bytes")
    assert list(sample.pieces([0x61, 0xC3, 0xA9, 0x62], tokenizer)) == ["a", "", "é", "b", ""]
    assert list(sample.pieces([0xE2, 0x82], tokenizer)) == ["", "", "\ufffd"]
    assert "".join(sample.pieces([0xE2, 0x61, 0xFF], tokenizer)) == "\ufffda\ufffd"
    assert "".join(sample.pieces([0x61, 256, 0x62], tokenizer)) == "a"
    assert "".join(sample.pieces("né 世界".encode(), tokenizer)) == "né 世界"


@pytest.mark.parametrize("name", ["multiscreen", "multiscreen:fixed-r", "transformer:2,2,8"])
def test_sample_runs(name, checkpoints, monkeypatch, capsys):
    flags = ["--ckpt", checkpoints[name], "--device", "cpu", "--tokens", 8]
    run(sample, monkeypatch, *flags, "--prompt", "screen", "--temperature", 0)
    model, tokenizer, _ = train.load_checkpoint(checkpoints[name])
    greedy = model.generate(torch.tensor([list(b"screen")]), 8)[0].tolist()
    shown, note = capsys.readouterr()
    assert shown == "screen" + bytes(t for t in greedy if t < 256).decode(errors="replace") and "8 tokens" in note
    run(sample, monkeypatch, *flags, "--top-k", 5, "--seed", 3)
    first = capsys.readouterr().out
    run(sample, monkeypatch, *flags, "--top-k", 5, "--seed", 3)
    assert first == capsys.readouterr().out
    run(sample, monkeypatch, *flags, "--prompt", "screen", "--top-k", 1)                         # one to choose from
    assert capsys.readouterr().out == shown
    for flag, value in (("--temperature", -1), ("--top-k", 0), ("--tokens", 0), ("--seed", -1)):
        with pytest.raises(train.UsageError, match="at least"):
            run(sample, monkeypatch, *flags, flag, value)


# ------------------------------------------------------------------------------------------------- rates, curves, sizes

NAN = math.nan


@pytest.fixture
def text(tmp_path):
    """Some kilobytes to train on, so that no test reads the standard library."""
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{i} and {i * i}, " for i in range(600)))
    return str(path)


@pytest.fixture
def call(monkeypatch, tmp_path):
    """call(script, *flags) runs its main() in tmp_path; returns the rows of the TSV files that it wrote, by name."""
    def run(script, *flags):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [script.__name__, *map(str, flags)])
        script.main()
        return {p.name: [line.split("\t") for line in p.read_text().splitlines()] for p in tmp_path.glob("out/*/*.tsv")}
    return run


def test_count_parameters_agrees_with_the_papers_tables():
    paper = [(["--psi", 8], 917_698, 64), (["--psi", 16], 14_680_834, 256), (["--model", "transformer:8M"], 1_180_416, 128)]
    for flags, rest, d_E in paper:
        assert count_parameters(*flags) == (rest + 257 * d_E, rest)            # bytes: 257 tokens instead of 50,257
    with pytest.raises(UsageError, match="unknown"):
        count_parameters("--model", "transformer:9M")


def test_what_is_called_diverged():
    log = [{"step": n, "loss": 6.0 - n / 10} for n in range(1, 33)] + [{"step": 33, "val_loss": 3.0}]     # means over 4: down to 2.95
    assert common.outcome(log, None) == 3.0
    assert math.isnan(common.outcome(log, "training diverged: at step 21 loss is nan"))
    for last, diverged in ((3.44, False), (3.46, True), (80.0, True), (math.inf, True), (NAN, True)):
        log[-1]["val_loss"] = last
        assert math.isnan(common.outcome(log, None)) == diverged, last
    slow = [{"step": 1, "loss": 16.0}, {"step": 2, "loss": 16.1, "val_loss": 16.2}]        # a large start is no divergence
    assert common.outcome(slow, None) == 16.2
    wild = [{"step": 1, "loss": 5.7}, {"step": 2, "loss": 18.0}, {"step": 3, "loss": 18.0, "val_loss": 18.0}]
    assert math.isnan(common.outcome(wild, None)) and math.isnan(common.outcome([], None))


def test_diverged_seeds_are_left_out_of_the_mean_and_shown():
    assert common.summarize([2.0, NAN, 4.0]) == (3.0, math.sqrt(2), 1)
    assert lr_sweep.cells([2.5]) == [2.5]
    assert lr_sweep.cells([NAN]) == ["diverged"]
    assert lr_sweep.cells([2.0, 4.0]) == [3.0, math.sqrt(2)]
    text, std = lr_sweep.cells([2.0, NAN, 4.0])
    assert text == "3 (1 of 3 diverged)" and std == math.sqrt(2)
    text, std = lr_sweep.cells([NAN, NAN])
    assert text == "diverged" and math.isnan(std)


def test_moving_average():
    x = np.array([1.0, 2.0, 6.0, 4.0])
    assert training_curves.moving_average(x, 2).tolist() == [1.5, 4.0, 5.0]
    assert training_curves.moving_average(x, 9).tolist() == [3.25]            # fewer rows than the window: all of them
    huge = np.array([1e30, 1.0, 3.0])
    assert training_curves.moving_average(huge, 2)[-1] == 2.0                 # a running sum would have lost it


def test_spikes_are_measured_against_the_rows_before_them():
    flat = np.tile([1.0, 3.0], 10)                                 # any 4 in a row: mean 2, deviation 1, so the limit is 7
    for value, n in ((6.9, 0), (7.1, 1), (-20.0, 0)):
        x = flat.copy()
        x[12] = value
        assert training_curves.count_spikes(x, 4) == n, value
    x = flat.copy()
    x[[8, 16]] = 100
    assert training_curves.count_spikes(x, 4) == 2
    assert training_curves.count_spikes(np.array([1.0, 1.0, 50.0]), 4) == 0   # no full window before it


def test_summary_of_a_run():
    step, loss = np.arange(1.0, 11.0), np.arange(10.0, 0.0, -1.0)
    norm = np.array([9.0, 9.0, 9.0, 9.0, 9.0, 5.0, 1.0, 4.0, 2.0, 3.0])       # second half, sorted: 1 2 3 4 5
    steps, first, last, loss_spikes, median, p90, top, norm_spikes = training_curves.summarize(step, loss, norm, 4)
    assert (steps, first, last, loss_spikes, median, top, norm_spikes) == (10, 8.5, 2.5, 0, 3.0, 5.0, 0)
    assert p90 == pytest.approx(4.6)                               # 0.9 * 4 = 3.6 places up: between the 4 and the 5


def test_logs_of_any_folders_are_drawn(call, tmp_path):
    for name in ("runs-3-0", "a", "multiscreen--4-0"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "log.tsv").write_text("step\tloss\tgrad_norm\n" + "".join(f"{n}\t{5 - n / 10}\t1\n" for n in range(1, 9)))
    rows = call(training_curves, *tmp_path.glob("*/log.tsv"), "--window", 2)["training_curves.tsv"]
    assert [row[0] for row in rows[1:]] == ["multiscreen--4-0", "a", "runs-3-0"]
    (tmp_path / "a/log.tsv").write_text("step\tloss\tgrad_norm\n")                            # stopped before its first row
    rows = call(training_curves, *tmp_path.glob("*/log.tsv"), "--window", 2)["training_curves.tsv"]
    assert [row[-1] for row in rows[1:]] == ["-", "-", "-"] and rows[2][1] == "0"


def test_folders_of_the_sweep_sort_by_rate():
    names = ["transformer_45M-0-0", "transformer_45M--14-1", "transformer_45M--4-0", "transformer_45M--14-0", "multiscreen--2-0"]
    assert training_curves.parse(names[1]) == ("transformer:45M", -14, 1)
    assert training_curves.parse("out28M") == ("runs", "out28M", 0)
    assert sorted(names, key=training_curves.parse) == [names[i] for i in (4, 3, 1, 2, 0)]


def test_fit_is_least_squares_in_the_logarithm():
    a, b = scaling.fit([1.0, math.e, math.e**2], [5.0, 3.0, 4.0])              # x = 0, 1, 2: slope -1/2, mean 4 at x = 1
    assert (a, b) == (pytest.approx(4.5), pytest.approx(-0.5))
    assert scaling.size_at(3.0, (5.0, -0.5)) == pytest.approx(math.e**4)
    assert scaling.fit([7, 7], [1.0, 2.0]) is None


def test_saving_at_equal_loss():
    sizes = [100, 200, 400]
    loss = [6 - math.log(n) for n in sizes]
    at, N_m, N_t, saved = scaling.saving((sizes, loss), ([n / 0.7 for n in sizes], loss))
    assert saved == pytest.approx(0.3) and N_m == pytest.approx(200) and N_t == pytest.approx(200 / 0.7)
    assert at == pytest.approx(6 - math.log(200))                  # the middle of the range of losses
    low = [x - 1 for x in loss]                                    # common range: 6 - ln 400 to 5 - ln 100
    at, N_m, N_t, saved = scaling.saving((sizes, low), (sizes, loss))
    assert at == pytest.approx((11 - math.log(40_000)) / 2) and saved == pytest.approx(1 - 1 / math.e)
    assert scaling.saving((sizes, [x - 9 for x in loss]), (sizes, loss)) is None          # no common loss
    assert scaling.saving((sizes, loss[::-1]), (sizes, loss)) is None                     # a line that rises
    assert scaling.saving(([], []), (sizes, loss)) is None


def test_the_sweep_then_its_curves(call, text, monkeypatch, tmp_path):
    flags = ["--psi", 2, "--seq-len", 16, "--batch-size", 2, "--steps", 4, "--data", text]
    sweep = [lr_sweep, "--models", "multiscreen", "transformer:1,1,4:qknorm", "--exponents", -4, 40, "--seeds", 2, *flags]
    table = call(*sweep)["lr_sweep.tsv"]
    assert table[0] == ["exponent", "rate", "multiscreen", "std", "transformer:1,1,4:qknorm"]
    assert [row[0] for row in table[1:]] == ["-4", "40"] and float(table[1][1]) == 0.0625
    assert 3 < float(table[1][2]) < 7 and float(table[1][3]) > 0 and 3 < float(table[1][4]) < 7
    assert table[2][4] == "diverged"                               # a Transformer at 2^40 = 10^12
    monkeypatch.setattr("train.main", lambda argv: pytest.fail("a finished run was run again"))
    assert call(*sweep)["lr_sweep.tsv"] == table
    rows = call(training_curves, "--window", 2)["training_curves.tsv"]
    assert rows[0] == training_curves.COLUMNS and len(rows) == 1 + 2 * 2 + 2
    assert [row[0] for row in rows[1:3]] == ["multiscreen--4-0", "multiscreen--4-1"] and rows[1][1] == "4"
    assert [row[-1] for row in rows[1:3]] == ["-", "-"] and rows[-1][0].startswith("transformer") and rows[-1][-1] == "diverged"
    assert "--warmup 0 " in (tmp_path / "out/lr_sweep/multiscreen--4-0/flags.txt").read_text()              # a sixteenth of 4 steps


def test_scaling(call, text):
    tables = call(scaling, "--psi", 1, 2, "--transformers", "transformer:1,1,4", "transformer:1,1,8", "--seq-len", 16,
                  "--batch-size", 2, "--steps", 3, "--data", text)
    rows = tables["scaling.tsv"]
    assert [row[:4] for row in rows[1:3]] == [["multiscreen_psi1", "1", "486", "229"], ["multiscreen_psi2", "2", "4626", "3598"]]
    assert [row[2] for row in rows[3:]] == [str(257 * E + 4 * E * E + 3 * E * (8 * E // 3) + 2 * E) for E in (4, 8)]
    assert all(3 < float(row[4]) < 7 for row in rows[1:])
    assert [row[0] for row in tables["fits.tsv"]] == ["size", "total", "non_embedding", "psi"]
    slope = (float(rows[2][4]) - float(rows[1][4])) / math.log2(4626 / 486)               # through two points
    assert float(tables["fits.tsv"][1][1]) == pytest.approx(slope, abs=2e-3)


def test_scaling_shows_diverged_models_and_fits_none(call, text):
    tables = call(scaling, "--psi", 2, "--transformers", "transformer:1,1,4", "--seq-len", 16, "--batch-size", 2, "--steps", 3,
                  "--data", text, "--lr", 1e13, "--seeds", 2)
    assert [row[4:] for row in tables["scaling.tsv"][1:]] == [["-", "-", "2"]] * 2
    for m in ("multiscreen_psi2-0", "transformer_1,1,4-0", "transformer_1.3B-0"):            # no learning rates of a sweep
        assert training_curves.parse(m)[0] == "runs"
    assert training_curves.parse("transformer_45M_qknorm--4-2") == ("transformer:45M:qknorm", -4, 2)
    assert all(row[1:7] == ["-"] * 6 for row in tables["fits.tsv"][1:])


@pytest.mark.parametrize("script, flags, message", [
    (lr_sweep, ["--models", "transformer:huge"], "unknown"), (lr_sweep, ["--exponents", "2000"], "exponents"),
    (lr_sweep, ["--seeds", "0"], "seed"), (lr_sweep, ["--nonsense", "1"], "nonsense"), (scaling, ["--psi", "0"], "psi|N_L|least"),
    (scaling, ["--transformers", "transformer:1,3,8"], "multiple"), (training_curves, [], "lr_sweep"),
    (training_curves, ["nowhere.tsv"], "nowhere.tsv"), (training_curves, ["--window", "1"], "window")])
def test_mistakes_end_in_one_line_before_any_run(call, script, flags, message):
    with pytest.raises(UsageError, match=message) as e:
        call(script, *flags)
    assert "\n" not in str(e.value)


# -------------------------------------------------------------------------------------------------------------- latency

CPU = torch.device("cpu")


def test_trained_like_windows_have_the_stated_shares_and_ranges():
    w = latency.trained_like(1000)
    assert [((a <= w) & (w <= b)).sum().item() for a, b in [(2, 128), (256, 4096), (4096, 65536)]] == [700, 250, 50]
    assert torch.equal(w, latency.trained_like(1000)) and not torch.equal(w, latency.trained_like(1000, seed=1))
    near = w[w <= 128]
    assert abs((near < 16).float().mean().item() - 0.5) < 0.06             # log-uniform: 16 is the geometric middle of 2 .. 128
    assert 0 < (w[:100] > 4096).sum() < 20                                 # shuffled over the layers
    assert sorted((latency.trained_like(9) > 4096).tolist())[-2:] == [False, True]


def test_settings_change_only_the_windows_they_should():
    torch.manual_seed(0)
    model = Multiscreen(Config(psi=6, vocab_size=11))
    screen = model.screen
    get = lambda: torch.cat([window(tile.s_w.detach()) for tile in model.layers])
    before = get()
    latency.prepare(model, "initial", 4096)
    assert torch.equal(get(), before)
    latency.prepare(model, "trained-like", 4096)
    likely = get()
    torch.testing.assert_close(likely, latency.trained_like(36), rtol=1e-5, atol=0)           # all layers, in order
    latency.prepare(model, "trained-like + SWE", 4096)
    assert torch.equal(get() == torch.inf, likely > 4096) and (likely > 4096).sum() == 2
    assert torch.equal(get()[likely <= 4096], likely[likely <= 4096]) and model.screen is screen
    other = SimpleNamespace(screen=None)
    latency.prepare(other, "flash", None)
    assert other.screen == SDPBackend.FLASH_ATTENTION


def test_a_pass_computes_all_hidden_states_at_once_and_every_logit_once():
    seen = []

    def hidden(tokens, chunk):
        seen.append((tuple(tokens.shape), chunk, torch.is_grad_enabled()))
        return torch.arange(10.0).view(1, 10, 1)

    def logits(x):
        parts.append(x.flatten().tolist())

    parts, model = [], SimpleNamespace(hidden=hidden, logits=logits, config=SimpleNamespace(vocab_size=2**27))
    latency.forward_pass(model, torch.zeros(1, 10, dtype=torch.long))
    assert seen == [((1, 10), 10, False)]
    assert parts == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]                   # 2^29 / 2^27 = 4 tokens at a time


def test_two_passes_do_not_count_and_times_are_milliseconds(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(latency.time, "perf_counter", lambda: clock[0])
    durations = iter([9.0, 9.0, 0.5, 0.25])

    def run():
        clock[0] += next(durations)

    assert latency.measure(run, CPU, 2) == ([500, 250], None) and not list(durations)


def test_what_cannot_run_gives_a_reason_and_what_is_wrong_in_the_code_does_not():
    def fail(error, excused=False):
        def run():
            raise error
        return latency.measure(run, CPU, 3, excused)

    assert fail(torch.OutOfMemoryError("CUDA out of memory\n...")) == ([], "CUDA out of memory")
    assert fail(MemoryError()) == ([], "out of memory")
    assert fail(RuntimeError("DefaultCPUAllocator: can't allocate memory")) == ([], "DefaultCPUAllocator: can't allocate memory")
    assert fail(RuntimeError("No available kernel.\nAborting"), True) == ([], "No available kernel.")
    with pytest.raises(RuntimeError):                                      # no backend to blame: Multiscreen's own
        fail(RuntimeError("shapes"))


def test_ratios():
    assert latency.ratios(50, {"flash": 400, "cudnn": 250, "math": 900}) == [8, 5, "cudnn"]
    assert latency.ratios(50, {"math": 25}) == [None, 0.5, "math"]
    assert latency.ratios(None, {"flash": 1}) == latency.ratios(50, {}) == [None, None, None]


def run_main(monkeypatch, *flags):
    monkeypatch.setattr(sys, "argv", ["latency", *map(str, flags)])
    latency.main()


def test_main_writes_a_row_for_each_cell(tmp_path, monkeypatch):
    run_main(monkeypatch, "--psi", 2, 3, "--transformer", "1,2,8", "transformer:2,2,8", "--lengths", 64, 32, "--repeats", 2,
             "--device", "cpu", "--out", tmp_path)
    head, *rows = [line.split("\t") for line in (tmp_path / "latency.tsv").read_text().splitlines()]
    assert head == list(latency.COLUMNS)
    windows = ["initial", "trained-like", "trained-like + SWE"]
    cells = [("transformer:1,2,8", s, "64") for s in ("flash", "math")] + [("Psi = 2", s, "64") for s in windows]
    cells += [("transformer:2,2,8", s, T) for s in ("flash", "math") for T in ("32", "64")]
    cells += [("Psi = 3", s, T) for s in windows for T in ("32", "64")]
    assert [(row[0], row[2], row[3]) for row in rows] == cells
    assert {row[1] for row in rows if row[0] == "Psi = 2"} == {"4626"}    # 257 x 4 + 2 + 2 layers x 2 tiles x (4 x 224 + 3)
    ms = {(row[0], row[2], row[3]): float(row[4]) for row in rows}
    for row in rows:
        assert float(row[4]) > 0 and float(row[5]) >= 0 and row[6] == "2"
        if row[0] == "Psi = 3":
            both = {s: ms["transformer:2,2,8", s, row[3]] for s in ("flash", "math")}
            assert math.isclose(float(row[7]), both["flash"] / float(row[4]), rel_tol=2e-3)
            assert math.isclose(float(row[8]), min(both.values()) / float(row[4]), rel_tol=2e-3) and row[9] == min(both, key=both.get)
    assert all(row[7:] == ["-", "-", "-"] for row in rows if row[0].startswith("transformer"))


def test_main_goes_on_without_a_backend_and_keeps_its_rows_when_interrupted(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(latency.BACKENDS, "flash", SDPBackend.CUDNN_ATTENTION)             # which no CPU has
    tiny = ["--psi", 2, "--transformer", "1,2,8", "--lengths", 32, "--repeats", 1, "--device", "cpu", "--out", tmp_path]
    run_main(monkeypatch, *tiny)
    rows = [line.split("\t") for line in (tmp_path / "latency.tsv").read_text().splitlines()]
    assert rows[1][4:7] == ["-"] * 3 and rows[3][7] == "-" and float(rows[3][8]) > 0 and rows[3][9] == "math"
    assert "flash, 32 tokens: - (" in capsys.readouterr().out
    calls, forward_pass = [], latency.forward_pass

    def interrupted(*args):
        calls.append(args)
        if len(calls) > 7:                                                 # 1 without the backend, 3 for math, 3 for initial
            raise KeyboardInterrupt
        forward_pass(*args)

    monkeypatch.setattr(latency, "forward_pass", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_main(monkeypatch, *tiny[:-2], "--out", tmp_path / "cut")
    after = (tmp_path / "cut" / "latency.tsv").read_text()
    assert [line.split("\t")[2] for line in after.splitlines()] == ["setting", "flash", "math", "initial"]


def test_compile_is_for_both_models(tmp_path, monkeypatch):
    compiled = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda layer, dynamic: compiled.append(layer))
    run_main(monkeypatch, "--psi", 2, "--transformer", "3,2,8", "--lengths", 32, "--repeats", 1, "--device", "cpu", "--out", tmp_path, "--compile")
    assert len(compiled) == len(set(compiled)) == 2 + 3


def test_math_is_not_tried_where_its_scores_do_not_fit(tmp_path, monkeypatch):
    monkeypatch.setattr(latency, "forward_pass", lambda model, tokens: None)
    run_main(monkeypatch, "--psi", 2, "--transformer", "1,2,8", "--lengths", 2**12, 2**13, "--repeats", 1, "--device", "cpu", "--out", tmp_path)
    rows = [line.split("\t") for line in (tmp_path / "latency.tsv").read_text().splitlines()[1:]]
    assert [row[3] for row in rows if row[2] == "math"] == ["4096"] and [row[3] for row in rows if row[2] == "flash"] == ["4096", "8192"]


def test_main_measures_a_checkpoint_with_its_own_windows(tmp_path, monkeypatch):
    model = Multiscreen(Config(psi=2, vocab_size=257))
    with torch.no_grad():
        model.layers[1].s_w[1] = 6.0
    ckpt = dict.fromkeys(train.CHECKPOINT) | {"model": "multiscreen", "config": vars(model.config), "weights": model.state_dict(),
                                              "tokenizer": "bytes", "args": dict.fromkeys(train.FIXED) | {"seq_len": 64}}
    train.save_checkpoint(tmp_path / "ckpt.pt", ckpt)
    widest, forward_pass = [], latency.forward_pass

    def spy(model, tokens):
        if isinstance(model, Multiscreen):
            widest.append(max(window(tile.s_w).max().item() for tile in model.layers))
        forward_pass(model, tokens)

    monkeypatch.setattr(latency, "forward_pass", spy)
    run_main(monkeypatch, "--ckpt", tmp_path / "ckpt.pt", "--transformer", "1,2,8", "--lengths", 32, "--repeats", 1, "--device", "cpu",
             "--out", tmp_path)
    rows = [line.split("\t") for line in (tmp_path / "latency.tsv").read_text().splitlines()]
    assert [row[2] for row in rows[3:]] == ["trained", "trained + SWE"]
    assert widest[:3] == pytest.approx([math.exp(6) + 1] * 3) and widest[3:] == [torch.inf] * 3


@pytest.mark.parametrize("flags", [["--lengths", 0], ["--repeats", 0], ["--psi", 2, 3], ["--psi", 0], ["--transformer", "9M"],
                                   ["--ckpt", "nowhere.pt"], ["--length", "many"]])
def test_a_mistake_is_told_before_any_work(flags, tmp_path, monkeypatch):
    monkeypatch.setattr(latency, "measure", None)
    with pytest.raises(train.UsageError):
        run_main(monkeypatch, *flags, "--device", "cpu", "--out", tmp_path)


# --------------------------------------------------------------------------------------------------- the kernel's benchmark

def small_benchmark(monkeypatch, screen):
    """The benchmark on a CPU, at lengths of a test, with `screen` in place of the kernel."""
    for name, value in (("DEVICE", "cpu"), ("CHECKED", (70,)), ("LENGTHS", [16, 32]), ("screen", screen)):
        monkeypatch.setattr(kernel_benchmark, name, value)


def test_the_kernel_check_takes_a_right_kernel_and_no_wrong_one(monkeypatch, capsys):
    small_benchmark(monkeypatch, multiscreen.screen)
    kernel_benchmark.check()
    assert len(capsys.readouterr().out.splitlines()) == 2 + 3
    small_benchmark(monkeypatch, lambda q, k, v, w, r: multiscreen.screen(q, k, v, w * 1.001, r))
    with pytest.raises(UsageError, match="wrong by more than 0.0001"):
        kernel_benchmark.check()
    noise = iter(range(10))
    small_benchmark(monkeypatch, lambda q, k, v, w, r: multiscreen.screen(q, k, v * (1 + next(noise) * 1e-6), w, r))
    with pytest.raises(UsageError, match="other bits the second time"):
        kernel_benchmark.check()


def test_the_kernel_benchmark_has_a_line_for_each_way_or_says_why_not(monkeypatch, capsys):
    small_benchmark(monkeypatch, multiscreen.screen)
    monkeypatch.setattr(kernel_benchmark, "median", lambda f: [f(), 2.0][1])
    monkeypatch.setattr(kernel_benchmark, "roofline", lambda: (1e12, 1e9))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(torch, "compile", lambda f, dynamic: f)
    kernel_benchmark.benchmark()
    out = capsys.readouterr().out
    for T in (16, 32):
        for name in ("fused", "screen_windowed", "screen, torch.compile", "attention, flash"):
            line = next(line for line in out.splitlines() if line.split()[0:1] == [str(T)] and line[9:].startswith(name))
            assert line.split()[-1] == "1.00" and line.split()[-5] == "1.00" and "nan" not in line
        assert re.search(rf"^ +{T}  attention, cuDNN +nan", out, re.M)                       # a CPU has none
    assert out.count("not run: ") == 2 and "backward: 1.00 times forward" in out


def test_the_kernel_benchmark_wants_a_gpu(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["kernel_benchmark.py"])
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(UsageError, match="unset it"):
        kernel_benchmark.main()
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(kernel_benchmark, "available", lambda: "there is no CUDA GPU")
    with pytest.raises(UsageError, match="no CUDA GPU"):
        kernel_benchmark.main()
