"""Tests of lab/benchmarks/ without a GPU: each part at tiny sizes, in Triton's interpreter."""
from tests import DEVICE

# isort: split
import os
import sys
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import SDPBackend

import screening_triton as fused
from lab.benchmarks import cpu, gpu, kernel_compile, timing
from multiscreen import KeyCache, screen
from support import choose
from support.checkpoint import build_model
from support.cli import UsageError
from support.table import write_rows
from support.windowed import screen_windowed
from tests.helpers import (
    INF,
    correlated,
    draw_tokens,
    needs_interpreter,
    needs_matplotlib,
    read_table,
    run,
    small,
)
from tests.pretended import Pretended

interpreted = pytest.mark.skipif(DEVICE == "cuda" or fused.triton is None,
                                 reason="for a machine with Triton and without a GPU")


@pytest.fixture(autouse=True)
def few_cases(monkeypatch):
    """Compare screens on short inputs only: the choice does not matter here."""
    monkeypatch.setattr(choose, "CASES", choose.CASES[4:])


# ----------------------------------------------------------------------------- the timer, a table

def test_passes_take_turns_and_end_when_time_is_over():
    order = []
    runs = [lambda: order.append("a"), lambda: (order.append("b"), time.sleep(0.02))]
    a, b = timing.take_turns(runs, "cpu", repeats=3)
    assert "".join(order) == 4 * "ab"
    assert len(a) == 3
    assert max(a) < 10 < 20 <= min(b)                  # milliseconds
    assert len(timing.take_turns(runs, "cpu", repeats=3, seconds=0)[1]) == 1


def test_what_is_missing_or_failed_or_of_other_code_is_measured_again(tmp_path, monkeypatch,
                                                                      capsys):
    asked, path = [], tmp_path / "t.tsv"

    def do(cells):
        asked.append([cell["name"] for cell in cells])
        if "bad" in asked[-1] and len(asked) < 3:
            raise ValueError("no luck\nat\tall")
        return [{"why": "no"} if cell["name"] == "never" else {"x": 1 / 3} for cell in cells]

    def measured(*groups, **options):
        asked.clear()
        groups = [[{"name": name} for name in names] for names in groups]
        timing.measure(path, ["name"], ("x", "y"), groups, do, "cpu", **options)
        return asked

    assert measured(["a", "never"], ["bad"]) == [["a", "never"], ["bad"]]
    rows = read_table(path)
    assert [(row["name"], row["x"], row["y"]) for row in rows] == [("a", "0.33333", "")]
    assert "ValueError: no luck at all" in capsys.readouterr().out
    assert measured(["a", "never"], ["b"], ["bad"]) == [["never"], ["b"], ["bad"]]
    assert measured(["a"], ["c"], end=time.monotonic()) == []
    monkeypatch.setattr(timing, "machine_of", lambda device: "other")
    assert measured(["a"]) == [["a"]]
    monkeypatch.setattr(timing, "hash_of_code", lambda: "other")
    assert measured(["a"]) == [["a"]]
    assert read_table(path)[-1]["hash"] == "other"


def test_rows_are_tied_to_the_files_that_are_timed(tmp_path, monkeypatch):
    monkeypatch.setattr(timing, "ROOT", tmp_path)
    hashes = {timing.hash_of_code()}
    for name in ("multiscreen.py", "screening_triton.py", "support/windowed.py",
                 "lab/baselines/mine.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"edited = {name!r}\n")
        hashes |= {timing.hash_of_code(), timing.hash_of_code()}
    assert len(hashes) == 5
    (tmp_path / name).write_text(f"# Words are no edit.\nedited = {name!r}\n")
    assert timing.hash_of_code() in hashes


# ---------------------------------------------------------------------------------- what is timed

def test_trained_like_windows_have_the_stated_shares_and_ranges():
    w = timing.trained_like(1000)
    shares = [((a <= w) & (w <= b)).sum() for a, b in ((2, 128), (256, 4096), (4096, 65536))]
    assert shares == [700, 250, 50]
    assert 0 < (w[:100] > 4096).sum() < 20                     # shuffled over the layers
    assert (timing.trained_like(9) > 4096).sum() == 1


@pytest.mark.parametrize("name", ["multiscreen", "transformer:9,4,16:screening"])
def test_settings_change_only_the_windows_they_should(name):
    model = build_model(name, {"psi": 6, "vocab_size": 11})

    def widths():
        return torch.cat([tile.reach().detach() for tile in model.layers])

    before = widths()
    timing.set_up(model, "initial", 4096)
    assert torch.equal(widths(), before)
    timing.set_up(model, "trained-like", 4096)
    likely = widths()
    torch.testing.assert_close(likely, timing.trained_like(36), rtol=1e-5, atol=0)
    timing.set_up(model, "trained-like + SWE", 4096)
    assert (likely > 4096).sum() == 2
    assert torch.equal(widths(), torch.where(likely > 4096, INF, likely))


def test_a_step_of_training_is_a_step():
    torch.manual_seed(0)
    model = build_model("multiscreen", {"psi": 2, "vocab_size": 11})
    before = [p.detach().clone() for p in model.parameters()]
    timing.training_step(model, {"lr": 1.0, "weight_decay": 0.0, "clip": 0.0}, 2, 8)()
    assert all(p.grad is None and not torch.equal(p, old)
               for p, old in zip(model.parameters(), before))


def test_a_forward_pass_makes_the_logits_of_all_tokens():
    model, tokens, made = small(), draw_tokens(1, 2**13 + 3), []
    model.screen, logits = screen_windowed, model.logits
    model.logits = lambda x, head: made.append(logits(x, head))
    model.config.vocab_size = 2**17
    timing.forward_pass(model, tokens)
    assert len(made) == 3                              # all at once would be 26 GB on a GPU
    with torch.no_grad():
        torch.testing.assert_close(torch.cat(made, 1), logits(model.hidden(tokens)))


@pytest.mark.parametrize("name, calls", [
    ("multiscreen", 2 * 6 + 2), ("transformer:2,2,8", 2 * 8 + 2)])
@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=needs_interpreter)])
def test_products_and_screening_or_attention_are_timed_alone(name, calls, kind, monkeypatch):
    """A layer of Multiscreen has five products, of the Transformer seven; logits have two parts.

    Each call takes a millisecond here in the second pass, and a hundred in the first.
    """
    passes = []

    def time_call(f, device):
        assert device == kind
        f()
        return 100.0 if len(passes) == 1 else 1.0

    def forward_pass(*inputs):
        passes.append(inputs)
        run(*inputs)

    run = timing.forward_pass
    monkeypatch.setattr(timing, "forward_pass", forward_pass)
    monkeypatch.setattr(timing, "milliseconds", time_call)
    model, tokens = build_model(name, {"psi": 2, "vocab_size": 11}), draw_tokens(1, 40, n=11)
    model.config.vocab_size = 2**29 // 30
    with Pretended("cuda") if kind == "cuda" else nullcontext():
        model.screen = fused.screen if kind == "cuda" else screen_windowed
        assert timing.time_alone(model.to(kind), tokens.to(kind), kind) == calls
    assert len(passes) == 2
    assert torch.einsum.__module__ == "torch.functional"


@pytest.mark.parametrize("name", ["multiscreen", "transformer:1,2,8"])
def test_filled_caches_are_those_of_a_context(name):
    model = build_model(name, {"psi": 2, "vocab_size": 11})
    with torch.no_grad():
        caches = timing.fill_caches(model, 30)
        model.hidden(torch.zeros(1, 1, dtype=torch.int64), caches)
        real = [KeyCache() for _ in model.layers]
        model.hidden(torch.zeros(1, 30, dtype=torch.int64), real)
        model.hidden(torch.zeros(1, 1, dtype=torch.int64), real)
    for a, b in zip(caches, real):
        assert (a.first, a.end) == (b.first, b.end) == (0, 31)
        assert a.k[:, :, :31].shape == b.k[:, :, :31].shape
        assert a.v[:, :, :31].shape == b.v[:, :, :31].shape


def test_caches_that_forget_hold_what_a_token_may_see():
    model = build_model("multiscreen", {"psi": 2, "vocab_size": 11})
    model.screen = screen_windowed
    caches = timing.fill_caches(model, 10_000)
    for tile, cache in zip(model.layers, caches):
        assert cache.end == 10_000
        assert cache.end - cache.first == tile.reach().max().ceil()
    decode = timing.get_decoder(model, 10_000)
    decode()


@pytest.mark.filterwarnings("ignore")
def test_flex_attention_screens_as_the_definition_does():
    q, k, v = correlated(0, 1, 3, 256, 256)
    w, r = torch.tensor([2.0, 40.5, INF]).double(), torch.tensor([0.3, 0.5, 1.0]).double()
    found = gpu.flex_screen(256, w)(q, k, v, w, r)
    torch.testing.assert_close(found, screen(q, k, v, w, r), rtol=1e-6, atol=1e-12)


# --------------------------------------------------------------------------------- on a GPU

@interpreted
def test_check_says_right_or_what_is_wrong_and_then_nothing_is_timed(monkeypatch, tmp_path):
    def checked(T, *dtypes):
        cells = [{"T": T, "v": v} for v in ("float32", "float16", *dtypes)]
        monkeypatch.setitem(gpu.ALONE, "check", (gpu.check, cells, gpu.ALONE["check"][2]))

    checked(20)
    with pytest.raises(UsageError, match="or not checked"):
        gpu.measure_part("kernel", tmp_path, end=0)
    gpu.measure_part("check", tmp_path, end=INF)
    rows = read_table(tmp_path / "check.tsv")
    assert [(row["T"], row["v"], row["verdict"]) for row in rows] == [
        ("20", v, "right") for v in ("float32", "float16")]
    assert all(0 < float(row[x]) < 2e-2 for row in rows for x in ("h", "dw"))

    checked(20, "int8")                                # fails
    with pytest.raises(UsageError, match="or not checked"):
        gpu.measure_part("kernel", tmp_path, end=INF)

    monkeypatch.setattr(gpu, "screen", lambda q, k, v, w, r, i0: screen(q, k, v, 1.1 * w, r))
    checked(40)
    for part in ("check", "kernel"):
        with pytest.raises(UsageError, match="the kernel is not right"):
            gpu.measure_part(part, tmp_path, end=INF)
    assert [row["verdict"] for row in read_table(tmp_path / "check.tsv")[-2:]] == [
        "off by more than 0.0001", "off by more than 0.004"]
    assert [path.name for path in tmp_path.iterdir()] == ["check.tsv"]


def test_other_bits_the_second_time_are_wrong(monkeypatch):
    noise = iter(range(10))
    monkeypatch.setattr(gpu, "screen",
                        lambda q, k, v, w, r, i0: screen(q, k, v * (1 + next(noise) * 1e-6), w, r))
    assert gpu.check(70, "float32")["verdict"] == "different bits the second time"


@interpreted
def test_screening_alone_is_timed_in_pairs_per_second(monkeypatch):
    """The definition is timed: only the clock and FlexAttention's backward need a GPU."""
    def two_milliseconds(f):
        f()
        return 2.0

    for name, value in {"PSI": 2, "HEADS": 3, "WIDTH": 48, "screen": screen,
                        "milliseconds": two_milliseconds}.items():
        monkeypatch.setattr(gpu, name, value)
    monkeypatch.setitem(timing.BACKENDS, "cudnn", timing.attention_by(SDPBackend.MATH))
    monkeypatch.setattr(gpu.timing, "trained_like", lambda n: torch.tensor([1.0, 3.5]))
    columns = gpu.ALONE["kernel"][2]
    found = {}
    for way, windows, _ in gpu.WAYS:
        if way != "FlexAttention":
            found[way, windows] = gpu.kernel(way, windows, 40)
            assert tuple(found[way, windows]) == columns[:len(found[way, windows])]
    assert found["matrix products", None] == {"forward_ms": 2.0}
    # A query sees itself, and three of the others where there are three.
    assert found["fused kernel", "trained-like"][columns[2]] == 500 * (40 + 1 + 2 + 3 + 37 * 4)
    assert found["cudnn", "infinite"][columns[3]] == 500 * 3 * 40 * 41 / 2


@pytest.mark.parametrize("part, rows", [("train", 2), ("decode", 3), ("forward", 4)])
def test_models_are_timed_beside_the_transformer(part, rows, monkeypatch, tmp_path):
    batch, length = {"train": (2, 16), "decode": (1, 20), "forward": (1, 64)}[part]
    monkeypatch.setattr(gpu, "BESIDE", {2: "1,2,16"})
    monkeypatch.setitem(gpu.MODELS, part, (gpu.MODELS[part][0], [(2, 11, batch, length)]))
    monkeypatch.setattr(timing, "compile_model", lambda model, dynamic: None)
    monkeypatch.setitem(gpu.ALONE, "check", (lambda: {"verdict": "right"}, [{}], ("verdict",)))
    columns, found = gpu.measure_part(part, tmp_path, end=INF)
    assert len(read_table(tmp_path / "latency.tsv")) == len(found) == rows
    for row in found:
        tokens = {"train": 32, "decode": 1, "forward": 64}[part]
        assert row["tokens_per_s"] == pytest.approx(1e3 * tokens / row["ms"])
        assert (row["x_transformer"] is None) == (row["model"] != "multiscreen")
        assert (row["x_alone"] is None) == (part != "forward")
        if part == "forward":
            assert row["x_alone"] == row["ms"] / float(row["alone_ms"])


def test_without_a_gpu_or_with_an_unknown_part_it_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["gpu", "--out", str(tmp_path / "out")])
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(UsageError, match="unset it"):
        gpu.main()
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(gpu, "available", lambda: "there is no CUDA GPU")
    with pytest.raises(UsageError, match="no CUDA GPU"):
        gpu.main()
    monkeypatch.setattr(sys, "argv", ["gpu", "kernels"])
    with pytest.raises(UsageError, match="kernels is not a part"):
        gpu.main()
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(fused.triton is None, reason="triton is not installed")
def test_the_kernels_compile_ahead_of_time_without_spills():
    """All kernels for an H100 with bfloat16 values, the most demanding two for an RTX 5090.

    `python -m lab.benchmarks.kernel_compile` compiles for all chips and types.
    """
    code = """if True:
        import lab.benchmarks.kernel_compile as script
        kernels, values = script.KERNELS, script.DTYPES
        script.TARGETS, script.DTYPES = [90], values[:1]
        script.cli(script.main)
        script.TARGETS, script.DTYPES = [120], values[3:]
        script.KERNELS = {name: kernels[name] for name in ("dq", "dkv")}
        script.cli(script.main)"""
    process = run("-c", code, env=os.environ | {"TRITON_INTERPRET": "0"})
    assert process.returncode == 0, process.stderr     # else: there is a spill
    assert process.stdout.count("sm_") == len(fused.KERNELS) + 2


@pytest.mark.skipif(fused.triton is None, reason="triton is not installed")
@pytest.mark.parametrize("version, said", [
    ("3.7.1", "$"), ("9.9", ": .*triton 3.7.1, this is 9.9$")])
def test_where_another_triton_spills_the_error_says_which_was_meant(monkeypatch, version, said):
    binary = SimpleNamespace(metadata=SimpleNamespace(shared=1))
    for name, value in {"KERNELS": ["dq"], "TARGETS": [100], "compile_kernel": lambda *_: binary,
                        "registers_and_spills": lambda binary: (168, 8),
                        "triton": SimpleNamespace(__version__=version)}.items():
        monkeypatch.setattr(kernel_compile, name, value)
    monkeypatch.setattr(sys, "argv", ["kernel_compile"])
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setenv("TRITON_CACHE_DIR", "")         # restored afterwards
    with pytest.raises(UsageError, match=f"^4 configurations spill .* tensor memory{said}"):
        kernel_compile.main()


# --------------------------------------------------------------------------------- on a CPU

CPU = ["--psi", 2, "--models", "multiscreen", "transformer:1,2,8", "--repeats", 2]


def test_the_cpu_benchmark_has_a_row_for_each_setting(call, monkeypatch, tmp_path):
    compiled = []
    monkeypatch.setattr(timing, "compile_model", lambda model, dynamic: compiled.append(model))
    monkeypatch.setattr(cpu, "LENGTH", 16)
    monkeypatch.setitem(timing.BACKENDS, "flash",
                        timing.attention_by(SDPBackend.CUDNN_ATTENTION))   # no CPU has it
    flags = [*CPU, "--contexts", 5, "--lengths", 64, 32, "--table", tmp_path / "t.tsv"]
    call(cpu, *flags)
    rows = read_table(tmp_path / "t.tsv")
    windows = ["initial", "trained-like", "trained-like + SWE"]
    assert [(row["what"], row["setting"], row["length"]) for row in rows] == [
        ("train", "initial", "16"), ("train", "default", "16"),
        ("train-compiled", "initial", "16"), ("train-compiled", "default", "16"),
        ("decode", "initial", "5"), ("decode", "trained-like", "5"), ("decode", "default", "5"),
        *(("forward", setting, T) for T in ("32", "64") for setting in windows)]
    assert len(compiled) == 2
    assert all(float(ms) > 0 for row in rows for ms in row["ms"].split())

    # Only what could not run is tried again.
    tried = []
    monkeypatch.setattr(timing, "prepare", lambda cell: tried.append(cell["setting"]))
    call(cpu, *flags)
    assert tried == ["flash", "flash"]
    assert read_table(tmp_path / "t.tsv") == rows


@pytest.mark.parametrize("flags, message", [
    (["--lengths", "0"], "at least 1"), (["--device", "meta"], "invalid choice"),
    (["--models", "transformer:3M"], "unknown"), (["--ckpt", "nowhere.pt"], "not exist"),
    (["nowhere.tsv"], "measure a model first"),
    (["a.tsv", "--psi", "9"], "--psi is for measuring")])
def test_a_mistake_is_told_in_one_line_before_any_work(call, flags, message):
    with pytest.raises(UsageError, match=message) as e:
        call(cpu, *flags)
    assert "\n" not in str(e.value)


def test_the_times_of_a_checkpoint_are_a_table_beside_it(call, checkpoints):
    path = checkpoints["multiscreen"]
    call(cpu, "--ckpt", path, *CPU[2:], "--what", "decode", "forward", "--contexts", 9,
         "--lengths", 32)
    rows = read_table(path.with_name("latency.tsv"))
    assert [(row["model"], row["what"], row["setting"], row["seq_len"]) for row in rows] == [
        ("multiscreen", "decode", "trained", "16"), ("transformer:1,2,8", "decode", "default", ""),
        ("multiscreen", "forward", "trained", "16"),
        ("multiscreen", "forward", "trained + SWE", "16"),
        ("transformer:1,2,8", "forward", "flash", "")]


def timed(model, parameters, setting, length, ms, machine="CPU"):
    """A row of the report's latency.tsv, which has forward passes only."""
    row = dict.fromkeys((*timing.RUN, "setting", "length", "machine", "repeats", "ms", "hash"), "")
    return row | {"model": model, "parameters": parameters, "setting": setting, "length": length,
                  "machine": machine, "repeats": "3", "ms": ms, "hash": "1"}


@needs_matplotlib
def test_a_time_is_compared_with_the_fastest_of_the_transformer_nearest_in_size(call, tmp_path,
                                                                                capsys):
    """Other machines' times do not count, nor do a Transformer's variants, nor far sizes."""
    write_rows(tmp_path / "t.tsv", [
        timed("transformer:a", "10", "flash", "64", "9", "GPU"),
        timed("transformer:a", "10", "flash", "32", "4"),
        timed("transformer:a", "10", "flash", "64", "400"),
        timed("transformer:a", "10", "math", "64", "80 120"),
        timed("transformer:a:alibi", "10", "flash", "64", "1"),
        timed("transformer:b", "80", "flash", "64", "14"),
        timed("multiscreen", "300", "initial", "64", "7"),
        timed("multiscreen", "90", "initial", "64", "7"),
        timed("multiscreen", "9", "initial", "64", "45 50 55")])
    call(cpu, tmp_path / "t.tsv")
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [[line[n] for n in (4, 5, 6, 8)] for line in lines[3:11]] == [
        ["32", "4", "-", "-"], ["64", "400", "-", "-"], ["64", "100", "28.284", "-"],
        ["64", "1", "-", "100"], ["64", "14", "-", "-"], ["64", "7", "-", "-"],
        ["64", "7", "-", "2"], ["64", "50", "5", "2"]]
    assert (tmp_path / "t.png").stat().st_size > 10_000
