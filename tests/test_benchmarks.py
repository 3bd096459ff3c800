"""Tests of benchmarks/ without a GPU: each part at tiny sizes, in Triton's interpreter."""
from tests import DEVICE

# isort: split
import os
import re
import sys
import time

import pytest
import torch

import screening_triton as fused
from benchmarks import cpu, gpu, gpu_check, gpu_peers, gpu_times, measure
from multiscreen import KeyCache, screen
from support import choose, timing
from support.checkpoint import build_model
from support.cli import UsageError
from support.windowed import screen_windowed
from tests.helpers import INF, ROOT, correlated, draw_tokens, read_table, run, small

interpreted = pytest.mark.skipif(DEVICE == "cuda" or fused.triton is None,
                                 reason="for a machine with Triton and without a GPU")


@pytest.fixture(autouse=True)
def few_cases(monkeypatch):
    """Compare screens on short inputs only: the choice does not matter here."""
    monkeypatch.setattr(choose, "CASES", choose.CASES[4:])


# --------------------------------------------------------------------------------- the parts

@interpreted
def test_check_says_right_or_what_is_wrong_and_then_nothing_is_timed(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu_check, "CHECKED", [20])
    monkeypatch.setattr(gpu_check, "LIMITS", {torch.float32: 1e-4, torch.float16: 4e-3})
    with pytest.raises(UsageError, match="or not checked"):
        gpu.measure_part("layer", tmp_path, end=0)
    gpu.measure_part("check", tmp_path, end=INF)
    rows = read_table(tmp_path / "check.tsv")
    assert [(row["T"], row["v"], row["verdict"]) for row in rows] == [
        ("20", v, "right") for v in ("float32", "float16")]
    assert all(0 < float(row[x]) < 2e-2 for row in rows for x in ("h", "dw"))

    monkeypatch.setattr(gpu_check, "screen", lambda q, k, v, w, r: screen(q, k, v, 1.1 * w, r))
    monkeypatch.setattr(gpu_check, "CHECKED", [40])
    for part in ("check", "layer"):
        with pytest.raises(UsageError, match="the kernel is not right"):
            gpu.measure_part(part, tmp_path, end=INF)
    assert [row["verdict"] for row in read_table(tmp_path / "check.tsv")[-2:]] == [
        "off by more than 0.0001", "off by more than 0.004"]
    assert not (tmp_path / "layer.tsv").exists()


def test_other_bits_the_second_time_are_wrong(monkeypatch):
    noise = iter(range(10))
    monkeypatch.setattr(gpu_check, "screen",
                        lambda q, k, v, w, r: screen(q, k, v * (1 + next(noise) * 1e-6), w, r))
    found = gpu_check.compare_with_float64(70, torch.float32)
    assert found["verdict"] == "different bits the second time"


def test_the_tests_are_run_and_what_fails_shows_its_last_lines():
    names = [what["command"] for what, _ in gpu_check.tests()]
    assert names == ["pytest", "memcheck", "racecheck"]
    say = "echo $TRITON_INTERPRET one; echo; echo two"
    assert gpu_check.run_command(f"sh -c '{say}'", 9) == {"result": "two"}
    with pytest.raises(RuntimeError, match="exit code 3: 0 one / two"):
        gpu_check.run_command(f"sh -c '{say}; exit 3'", 9)
    with pytest.raises(RuntimeError, match="took too long: now"):
        gpu_check.run_command("sh -c 'echo now; sleep 9'", 1)


@interpreted
@pytest.mark.filterwarnings("ignore")                  # FlexAttention warns without a compiler
@pytest.mark.parametrize("part", ["layer", "training", "peers"])
def test_what_is_timed_runs_at_tiny_sizes(part, monkeypatch):
    """Only clocks and the compiler need CUDA, and are replaced; the definition is timed."""
    def two_milliseconds(f, during=0):
        f()
        return 2.0

    changes = {"PSI": 2, "LENGTHS": [40, 20], "DENSE": 20, "SLOW": 20,
               "N_L": 24, "HEADS": 1, "WIDTH": 16, "STEPS": {2: (11, 2, 16, "1,2,8")},
               "milliseconds": two_milliseconds, "compile_model": lambda model: None,
               "screen": screen}
    for name, value in changes.items():
        monkeypatch.setattr(gpu_times, name, value)
    monkeypatch.setattr(torch, "compile", lambda f, **options: f)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    make_cells, columns = gpu.PARTS[part]
    rows = []
    for what, function in make_cells():
        if what.get("way") not in ("attention, cudnn", "FlexAttention"):   # no backward on a CPU
            rows.append(what | function())
            assert tuple(rows[-1])[-len(columns):] == columns
    if part == "training":                             # 32 tokens in 2 ms
        assert [row["tokens_per_s"] for row in rows] == [16000, 16000]
    if part == "peers":                                # 24 layers of attention over 2 of screening
        assert {row["x_forward"] for row in rows if "attention" in row["way"]} == {12}


def test_a_forward_pass_makes_the_logits_of_all_tokens():
    model, tokens, made = small(), draw_tokens(1, 2**13 + 3), []
    model.screen, logits = screen_windowed, model.logits
    model.logits = lambda x, head: made.append(logits(x, head))
    model.config.vocab_size = 2**17
    timing.forward_pass(model, tokens)
    assert len(made) == 3                              # all at once would be 26 GB on a GPU
    with torch.no_grad():
        torch.testing.assert_close(torch.cat(made, 1), logits(model.hidden(tokens)))


def test_a_step_of_training_is_a_step():
    torch.manual_seed(0)
    model = build_model("multiscreen", {"psi": 2, "vocab_size": 11})
    before = [p.detach().clone() for p in model.parameters()]
    measure.training_step(model, {"lr": 1.0, "weight_decay": 0.0, "clip": 0.0}, 2, 8)()
    assert all(p.grad is None and not torch.equal(p, old)
               for p, old in zip(model.parameters(), before))


@pytest.mark.filterwarnings("ignore")
def test_flex_attention_screens_as_the_definition_does():
    q, k, v = correlated(0, 1, 3, 256, 256)
    w, r = torch.tensor([2.0, 40.5, INF]).double(), torch.tensor([0.3, 0.5, 1.0]).double()
    found = gpu_peers.flex_screen(256, w)(q, k, v, w, r)
    torch.testing.assert_close(found, screen(q, k, v, w, r), rtol=1e-6, atol=1e-12)


# --------------------------------------------------------------------- the table, the command

def test_what_is_missing_or_failed_or_of_other_code_is_measured_again(tmp_path, monkeypatch,
                                                                      capsys):
    asked, path = [], tmp_path / "t.tsv"

    def cells(*names):
        def do(name):
            asked.append(name)
            if name == "bad" and len(asked) < 4:
                raise ValueError("no luck\nat\tall")
            return {"x": len(asked) / 3, "y": None}

        return [({"name": name}, lambda name=name: do(name)) for name in names]

    def measured(*names, **options):
        asked.clear()
        measure.measure_missing(path, ("x", "y"), cells(*names), **options)
        return asked

    assert measured("a", "bad") == ["a", "bad"]
    rows = read_table(path)
    assert [(row["name"], row["x"], row["y"]) for row in rows] == [("a", "0.33333", "")]
    assert "bad  ValueError: no luck at all" in capsys.readouterr().out
    assert measured("a", "bad", "b") == ["bad", "b"]
    assert measured("a", "b", "c", end=time.monotonic()) == []
    monkeypatch.setattr(measure, "code_and_machine", lambda: "other")
    assert measured("a") == ["a"]
    assert read_table(path)[-1]["hash"] == "other"


def test_rows_are_tied_to_the_files_that_are_measured(tmp_path, monkeypatch):
    for name in timing.CODE:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    before = measure.code_and_machine()
    monkeypatch.setattr(timing, "ROOT", tmp_path)
    assert measure.code_and_machine() == before
    (tmp_path / "multiscreen.py").write_text("edited")
    assert measure.code_and_machine() != before


def test_the_report_has_each_table_and_what_it_was_measured_on(tmp_path):
    row = {"ms": 2.0, "tokens_per_s": 16000, "peak_GiB": 0.5}
    measure.measure_missing(tmp_path / "training.tsv", tuple(row), [({"psi": 2}, lambda: row)])
    gpu.write_report(tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert re.search("Commit [0-9a-f]{7,}, triton [0-9.]+, CUDA ", text)
    assert f"\nCode {measure.code_and_machine()}\n" in text
    assert "| psi | ms | tokens_per_s | peak_GiB |\n| --- |" in text
    assert "| 2 | 2 | 16000 | 0.5 |\n" in text
    assert text.count("not measured") == len(gpu.PARTS) - 1


def test_without_a_gpu_or_with_an_unknown_part_it_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["gpu", "--out", str(tmp_path / "out")])
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(UsageError, match="unset it"):
        gpu.main()
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(gpu, "available", lambda: "there is no CUDA GPU")
    with pytest.raises(UsageError, match="no CUDA GPU"):
        gpu.main()
    monkeypatch.setattr(sys, "argv", ["gpu", "layers"])
    with pytest.raises(UsageError, match="layers is not a part"):
        gpu.main()
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(fused.triton is None, reason="triton is not installed")
def test_the_kernels_compile_ahead_of_time_without_spills():
    """All kernels for an H100 with bfloat16 values, the most demanding two for an RTX 5090.

    `python -m benchmarks.kernel_compile` compiles for all chips and types.
    """
    code = """if True:
        import benchmarks.kernel_compile as script
        kernels, values = script.KERNELS, script.DTYPES
        script.TARGETS, script.DTYPES = [90], values[:1]
        script.cli(script.main)
        script.TARGETS, script.DTYPES = [120], values[3:]
        script.KERNELS = {name: kernels[name] for name in ("dq", "dkv")}
        script.cli(script.main)"""
    process = run("-c", code, env=os.environ | {"TRITON_INTERPRET": "0"})
    assert process.returncode == 0, process.stderr
    lines = [line.split() for line in process.stdout.splitlines() if "sm_" in line]
    assert len(lines) == len(fused.KERNELS) + 2

    # Instructions per pair in the loop without masks, on an H100 with 16-bit values.
    aims = {"forward": 11, "decode": 25, "dq": 30, "dkv": 21}
    for name, _, _, target, _, _, _, _, spills, shared, edge, interior in lines:
        assert int(spills) == 0
        assert int(shared) <= 99 * 1024
        assert float(interior) < float(edge)
        assert target != "sm_90" or float(interior) <= aims[name]


# --------------------------------------------------------------------------------- the CPU

def test_the_cpu_benchmark_has_a_row_for_each_setting(monkeypatch, tmp_path):
    compiled = []
    monkeypatch.setattr(cpu, "compile_model", compiled.append)
    for name in ("LENGTH", "STEPS", "TOKENS"):
        monkeypatch.setattr(cpu, name, 3)
    monkeypatch.setattr(sys, "argv", [
        "cpu", "--psi", "2", "--transformer", "1,2,8", "--contexts", "5", "40",
        "--out", str(tmp_path)])
    cpu.main()
    rows = read_table(tmp_path / "cpu.tsv")
    assert [(row["what"], row["setting"], row["context"]) for row in rows] == [
        ("train", "eager", ""), ("train", "compiled", ""),
        *(("decode", s, T) for s in ("initial", "trained-like") for T in ("5", "40"))]
    assert len(compiled) == 2
    for row in rows:
        ratio = float(row["multiscreen"]) / float(row["transformer"])
        assert float(row["ratio"]) == pytest.approx(ratio, rel=1e-3)
    monkeypatch.setattr(cpu, "random_model", None)
    cpu.main()                                         # nothing is missing
    assert read_table(tmp_path / "cpu.tsv") == rows


@pytest.mark.parametrize("name", ["multiscreen", "transformer:1,2,8"])
def test_filled_caches_are_those_of_a_context(name):
    model = build_model(name, {"psi": 2, "vocab_size": 11})
    with torch.no_grad():
        caches = cpu.fill_caches(model, 30)
        model.hidden(torch.zeros(1, 1, dtype=torch.int64), caches)
        real = [KeyCache() for _ in model.layers]
        model.hidden(torch.zeros(1, 30, dtype=torch.int64), real)
        model.hidden(torch.zeros(1, 1, dtype=torch.int64), real)
    for a, b in zip(caches, real):
        assert (a.first, a.end) == (b.first, b.end) == (0, 31)
        assert a.k[:, :, :31].shape == b.k[:, :, :31].shape
        assert a.v[:, :, :31].shape == b.v[:, :, :31].shape
