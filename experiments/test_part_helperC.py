"""experiments/latency.py against hand-worked numbers, and one tiny run of its main()."""
import math
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import SDPBackend

import train
from experiments import latency
from multiscreen import Config, Multiscreen, window

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


@pytest.mark.parametrize("repeats, seconds, calls", [(1, 100, 3), (7, 100, 9), (50, 0, 5), (2, 0, 4)])
def test_two_passes_do_not_count_and_the_time_limit_leaves_three(repeats, seconds, calls):
    n = []
    times, why = latency.measure(lambda: n.append(0), CPU, repeats, seconds)
    assert len(n) == calls and len(times) == calls - 2 and why is None and all(t >= 0 for t in times)


def test_measured_times_are_milliseconds(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(latency.time, "perf_counter", lambda: clock[0])
    durations = iter([9.0, 9.0, 0.5, 0.25, 0.5, 1.0, 1.0])

    def run():
        clock[0] += next(durations)

    assert latency.measure(run, CPU, 10, 1.5) == ([500, 250, 500, 1000], None)     # 2.25 s are spent


def test_what_cannot_run_gives_a_reason_and_what_is_wrong_in_the_code_does_not():
    def fail(error):
        def run():
            raise error
        return latency.measure(run, CPU, 3, 1)

    assert fail(torch.OutOfMemoryError("CUDA out of memory\n...")) == ([], "out of memory")
    assert fail(RuntimeError("No available kernel.\nAborting")) == ([], "No available kernel.")
    with pytest.raises(TypeError):
        fail(TypeError("a bug"))


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
    calls, written, forward_pass = [], [], latency.forward_pass

    def interrupted(*args):
        calls.append(args)
        if len(calls) > 7:                                                 # 1 without the backend, 3 for math, 3 for initial
            written.append((tmp_path / "cut" / "latency.tsv").read_text())
            raise KeyboardInterrupt
        forward_pass(*args)

    monkeypatch.setattr(latency, "forward_pass", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_main(monkeypatch, *tiny[:-2], "--out", tmp_path / "cut")
    after = (tmp_path / "cut" / "latency.tsv").read_text()
    assert [line.split("\t")[2] for line in after.splitlines()] == ["setting", "flash", "math", "initial"] and written == [after]


def test_main_measures_a_checkpoint_with_its_own_windows(tmp_path, monkeypatch):
    model = Multiscreen(Config(psi=2, vocab_size=257))
    with torch.no_grad():
        model.layers[1].s_w[1] = 6.0
    ckpt = dict.fromkeys(train.CHECKPOINT) | {"model": "multiscreen", "config": vars(model.config), "weights": model.state_dict(),
                                              "args": dict.fromkeys(train.FIXED) | {"seq_len": 64}}
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
