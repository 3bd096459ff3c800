"""Tests of long_context, windows, relevance_maps and sample: hand-worked numbers, and one small run of each script."""
import math
import sys

import numpy as np
import pytest
import torch

import train
from experiments import long_context, relevance_maps, sample, windows
from multiscreen import softmask


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
    for flag, value in (("--temperature", -1), ("--top-k", 0), ("--tokens", 0), ("--seed", -1)):
        with pytest.raises(train.UsageError, match="at least"):
            run(sample, monkeypatch, *flags, flag, value)
