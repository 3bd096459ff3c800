"""Tests of the experiments: parameter counts, the baseline and the ablations against formulas written again in float64."""
import math
import os
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend

sys.path.insert(0, str(Path(__file__).parent.parent))
os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")

import abcdigits
import train
from experiments import ablations, common, passkey, transformer
from multiscreen import window

seeds = st.integers(0, 2**31 - 1)
TINY = {"psi": 3, "N_L": None, "vocab_size": 50}


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


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
        assert (model(x)[0].double() - exact).norm() > 1e-3 * exact.norm()


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
    model.screen = SDPBackend.CUDNN_ATTENTION if not torch.cuda.is_available() else []
    with pytest.raises(RuntimeError):                                           # the choice is obeyed, not a hint
        model(x)


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
        p, other = dict(model.named_parameters()), {"rope": "nope"}.get(variant, "rope")
        exact = dense_tiles(p, model.config, x[0], variant)
        torch.testing.assert_close(model(x)[0], exact, rtol=1e-8, atol=1e-8)
        if variant == "rope":
            train.scale_rope(model, 8)
            torch.testing.assert_close(model(x)[0], dense_tiles(p, model.config, x[0], variant, 8), rtol=1e-8, atol=1e-8)
        if variant:                                    # and the change matters
            original = dense_tiles(p, model.config, x[0], "" if variant != "no-gate" else "nope")
            assert (original - exact).norm() > 1e-3 * exact.norm() if "layers.0.W_G" in p else True
    model.loss(x, x).backward()
    learned = {n for n, q in model.named_parameters() if q.grad is not None}
    assert learned == {n for n in p if not (variant == "fixed-r" and n.endswith("s_r"))}


def test_without_a_gate_there_are_19_layers_of_19_tiles_as_in_the_paper():
    with torch.device("meta"):
        model = train.build_model("multiscreen:no-gate", {"psi": 16, "N_L": None, "vocab_size": 50257})
    assert (model.config.N_L, model.config.N_H, model.config.d_E) == (19, 19, 256)
    assert sum(p.numel() for p in model.parameters()) == 27_653_437
    with torch.device("meta"):
        again = train.build_model("multiscreen:no-gate", asdict(model.config))
    assert again.config == model.config


def test_rope_scale_and_swe_need_a_model_that_has_them(tmp_path, monkeypatch):
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
    for module in (abcdigits, passkey):
        monkeypatch.setattr(sys, "argv", ["x", "--ckpt", str(path), "--lengths", "700", "--depths", "0.5", "--trials", "2", "--rope-scale", "1", "2", "4"])
        module.main()
        assert "100.0% x2" in capsys.readouterr().out
        assert path.with_name(f"{module.__name__.split('.')[-1]}.tsv").read_text().splitlines()[1] == "700\t0.5\t2\t1.0000\t2"
    assert seen == [1, 2, 4] * 2
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
        assert 1 <= int(key) <= 50_000 and prompt.count(key) >= 2 and prompt.endswith(" The pass key is")
        head, tail = prompt.split(f"\nThe pass key is {key}. Remember it. {key} is the pass key.\n")
        assert head.count("The grass is green.") == before and tail.count("The grass is green.") == 10 - before
        assert head.startswith("There is an important info hidden inside a lot of irrelevant text.")
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
    for _ in range(2):
        rows, diverged = common.run_once(tmp_path / "b", *flags, "--lr", 1e30, "--warmup", 0, steps=3)
        assert "diverged" in diverged and rows[-1]["step"] < 3
    common.report(tmp_path / "t/x.tsv", ["a", "b"], [["one", 1.23456], ["two", None]], "Title")
    assert (tmp_path / "t/x.tsv").read_text() == "a\tb\none\t1.235\ntwo\t-\n" and "Title" in capsys.readouterr().out


def test_ablations_command(tmp_path, monkeypatch, capsys):
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question. " * 200)
    monkeypatch.setattr(sys, "argv", ["ablations", "--steps", "2", "--out", str(tmp_path / "o"), "--psi", "2", "--seq-len", "32", "--batch-size", "2",
                                      "--device", "cpu", "--data", str(tmp_path / "text.txt")])
    ablations.main()
    table = (tmp_path / "o/ablations.tsv").read_text().splitlines()
    assert len(table) == 7 and table[5].startswith("multiscreen:no-gate") and "3.155\t" in table[5]
    assert "no figure" in capsys.readouterr().out or (tmp_path / "o/ablations.png").exists()
