"""benchmarks/ without a GPU: each part at tiny sizes, through Triton's interpreter.

What needs CUDA is replaced: clocks, memory, the compiler.
"""
from tests import DEVICE

# isort: split
import os
import re
import subprocess
import sys
import time

import pytest
import torch

import screening_triton as fused
from benchmarks import cpu, gpu, gpu_check, gpu_peers, gpu_times, measure
from multiscreen import KeyCache, screen
from support import choose, timing
from support.checkpoint import build_model, has_windows
from support.cli import UsageError
from support.windowed import screen_windowed
from tests.helpers import INF, ROOT, correlated, draw_tokens, read_table, run, small

interpreted = pytest.mark.skipif(DEVICE == "cuda" or fused.triton is None,
                                 reason="for a machine with Triton and without a GPU")


@pytest.fixture(autouse=True)
def few_cases(monkeypatch):
    """What screens is compared on short inputs: here it does not matter."""
    monkeypatch.setattr(choose, "CASES", choose.CASES[4:])


@pytest.fixture
def call(monkeypatch, tmp_path):
    """call(*flags): benchmarks.gpu at tiny sizes on a CPU; returns the rows of the last part.

    The definition is timed, and the fused kernel checked: interpreted, it is slow.
    """
    def two_milliseconds(f):
        f()
        return 2.0

    changes = {"PSI": 2, "BESIDE": {2: "1,2,8"}, "LENGTHS": [40, 20], "DENSE": 20, "SLOW": 20,
               "N_L": 24, "HEADS": 1, "WIDTH": 16, "T_TRAIN": 16, "SEQUENCES": {2: 2},
               "milliseconds": two_milliseconds, "compile_layers": lambda model: None,
               "screen": screen}
    for name, value in changes.items():
        monkeypatch.setattr(gpu_times, name, value)
    monkeypatch.setattr(gpu_check, "CHECKED", [20])
    monkeypatch.setattr(gpu_check, "LIMITS", {torch.float32: 1e-4, torch.float16: 4e-3})
    monkeypatch.setattr(gpu, "require_gpu", lambda: None)
    monkeypatch.setattr(torch, "compile", lambda f, **options: f)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)

    def run(part, *flags):
        monkeypatch.setattr(sys, "argv", ["gpu", part, *flags, "--out", str(tmp_path)])
        gpu.main()
        return read_table(tmp_path / f"{part}.tsv")

    return run


@pytest.fixture
def checked(tmp_path):
    """A table that says that the kernel is right."""
    columns = gpu.PARTS["check"][1]
    right = dict.fromkeys(columns, 0.0) | {"verdict": "right"}
    measure.measure_missing(tmp_path / "check.tsv", columns, [
        ({"T": 20, "v": v}, lambda: right) for v in ("float32", "float16")])


# --------------------------------------------------------------------------------- the parts

@interpreted
def test_check_says_right_or_what_is_wrong_and_then_nothing_is_timed(call, monkeypatch, tmp_path):
    with pytest.raises(UsageError, match="or not checked"):
        call("layer")
    rows = call("check")
    assert [(row["T"], row["v"], row["verdict"]) for row in rows] == [
        ("20", v, "right") for v in ("float32", "float16")]
    assert all(0 < float(row[x]) < 2e-2 for row in rows for x in ("h", "dw"))

    monkeypatch.setattr(gpu_check, "screen", lambda q, k, v, w, r: screen(q, k, v, 1.1 * w, r))
    monkeypatch.setattr(gpu_check, "CHECKED", [40])
    for part in ("check", "layer"):
        with pytest.raises(UsageError, match="the kernel is not right"):
            call(part)
    assert [row["verdict"] for row in read_table(tmp_path / "check.tsv")[-2:]] == [
        "off by more than 0.0001", "off by more than 0.004"]
    assert not (tmp_path / "layer.tsv").exists()


def test_other_bits_the_second_time_are_wrong(call, monkeypatch):
    noise = iter(range(10))
    monkeypatch.setattr(gpu_check, "screen",
                        lambda q, k, v, w, r: screen(q, k, v * (1 + next(noise) * 1e-6), w, r))
    found = gpu_check.compare_with_float64(70, torch.float32)
    assert found["verdict"] == "different bits the second time"


def test_the_tests_are_run_and_what_fails_shows_its_last_lines():
    names = [what["command"] for what, _ in gpu_check.tests()]
    assert names == ["pytest", "memcheck", "racecheck"]
    say = "echo $TRITON_INTERPRET one; echo; echo two"
    assert gpu_check.run_command(f"sh -c '{say}'") == {"result": "two"}
    with pytest.raises(RuntimeError, match="exit code 3: 0 one / two"):
        gpu_check.run_command(f"sh -c '{say}; exit 3'")


@interpreted
def test_layer_has_a_row_for_each_window_and_length(call, checked):
    rows = call("layer")
    assert [(row["windows"], row["T"]) for row in rows] == [
        ("initial", "40"), ("trained-like", "40"), ("initial", "20"), ("trained-like", "20"),
        ("one, infinite", "40")]
    assert {row[x] for row in rows for x in ("forward_ms", "backward_ms", "products_ms")} == {"2"}


@interpreted
@pytest.mark.filterwarnings("ignore")                  # FlexAttention warns without a compiler
def test_peers_have_a_row_for_each_way_window_and_length(call, checked, capsys):
    rows = {(row["way"], row["windows"], row["T"]): row for row in call("peers")}
    settings = ("initial", "trained-like")
    assert rows.keys() == {
        *(("attention, flash", "initial", T) for T in ("20", "40")),       # a CPU has no cudnn
        *((way, s, "20") for way in ("screen, torch.compile", "screen_windowed") for s in settings)}
    # 2 ms each: ratios are 1, and 24 layers of attention over 2 of screening.
    assert rows["screen_windowed", "initial", "20"]["x_backward"] == "1"
    assert rows["attention, flash", "initial", "20"]["x_forward"] == "12"
    # A CPU has no cuDNN, and FlexAttention no backward pass there.
    out = capsys.readouterr().out
    assert "attention, cudnn  initial  20  RuntimeError: " in out
    assert re.search("FlexAttention  trained-like  40  .*backward", out)


@interpreted
def test_model_times_whole_models_eager_and_compiled(call, checked, monkeypatch):
    compiled = []
    monkeypatch.setattr(gpu_times, "compile_layers", compiled.append)
    rows = call("model")
    assert [(row["T"], row["layers"]) for row in rows] == [
        ("40", "compiled"), ("40", "eager"), ("20", "compiled"), ("20", "eager")]
    assert {row[x] for row in rows for x in ("initial", "trained-like", "transformer")} == {"2"}
    assert {row["x"] for row in rows} == {"1"}
    assert [has_windows(model) for model in compiled] == [True, False] * 2
    assert compiled[1].screen is not torch.nn.functional.scaled_dot_product_attention


def test_a_forward_pass_makes_the_logits_of_all_tokens():
    model, tokens, made = small(), draw_tokens(1, 2**13 + 3), []
    model.screen, logits = screen_windowed, model.logits
    model.logits = lambda x, head: made.append(logits(x, head))
    model.config.vocab_size = 2**17
    timing.forward_pass(model, tokens)
    assert len(made) == 3                              # all at once would be 26 GB on a GPU
    with torch.no_grad():
        torch.testing.assert_close(torch.cat(made, 1), logits(model.hidden(tokens)))


@interpreted
def test_training_counts_tokens_per_second(call, checked):
    ours, theirs = call("training")
    assert [ours["model"], theirs["model"]] == ["multiscreen", "transformer:1,2,8"]
    assert ours["tokens_per_s"] == theirs["tokens_per_s"] == "16000"           # 32 in 2 ms


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
    assert [row["hash"] for row in read_table(path)] == ["other"]


def test_rows_are_tied_to_the_files_that_are_measured(tmp_path, monkeypatch):
    for name in timing.CODE:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    before = measure.code_and_machine()
    monkeypatch.setattr(timing, "ROOT", tmp_path)
    assert measure.code_and_machine() == before
    (tmp_path / "multiscreen.py").write_text("edited")
    assert measure.code_and_machine() != before


@interpreted
def test_the_report_has_each_table_and_the_machine(call, checked, tmp_path):
    call("training")
    text = (tmp_path / "report.md").read_text()
    assert re.search("Commit [0-9a-f]{7,}, triton [0-9.]+, CUDA ", text)
    assert f"\nCode {measure.code_and_machine()}\n" in text
    assert "| psi | model | sequences | ms | tokens_per_s | peak_GiB |\n| --- |" in text
    assert "| 2 | multiscreen | 2 | 2 | 16000 | 0 |\n" in text
    assert text.count("not measured") == len(gpu.PARTS) - 2


def test_each_part_has_a_process_and_one_that_fails_leaves_the_others(monkeypatch, tmp_path):
    started = []

    def start(command, **options):
        if command[0] == sys.executable:
            started.append(command[3])
        return subprocess.CompletedProcess(command, command[3] == "model", "abc")

    monkeypatch.setattr(gpu, "require_gpu", lambda: None)
    monkeypatch.setattr(subprocess, "run", start)
    monkeypatch.setattr(sys, "argv", ["gpu", "--out", str(tmp_path)])
    with pytest.raises(UsageError, match="model failed"):
        gpu.main()
    assert started == ["check", "layer", "model", "training", "peers", "tests"]
    assert "Commit abc" in (tmp_path / "report.md").read_text()


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
    """All kernels for an H100 with bfloat16 values, those that need most on an RTX 5090.

    `python -m benchmarks.kernel_compile` does all chips and types.
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

    # Instructions a pair in the loop without masks, on an H100 with 16-bit values.
    aims = {"forward": 11, "decode": 25, "dq": 30, "dkv": 21}
    for name, _, _, target, _, _, _, _, spills, shared, edge, interior in lines:
        assert int(spills) == 0
        assert int(shared) <= 99 * 1024
        assert float(interior) < float(edge)
        assert target != "sm_90" or float(interior) <= aims[name]


# --------------------------------------------------------------------------------- the CPU

def test_the_cpu_benchmark_has_a_row_for_each_setting(monkeypatch, tmp_path):
    compiled = []
    monkeypatch.setattr(cpu, "compile_layers", compiled.append)
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
