"""experiments.gpu without a GPU: each part at tiny sizes, through Triton's interpreter.

What needs CUDA is replaced: clocks, the roofline, the profiler, the compiler.
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
from experiments import (
    cpu_benchmark,
    gpu,
    gpu_check,
    gpu_kernel,
    gpu_layer,
    gpu_model,
    gpu_peers,
    gpu_train,
    kernel_benchmark,
    kernel_check,
    kernel_work,
    layer_bytes,
    timing,
)
from experiments.gpu_report import Report, run_steps
from multiscreen import Config, GatedScreeningTiles, KeyCache, Multiscreen, screen, window
from support.checkpoint import build_model
from support.cli import UsageError
from tests.helpers import INF, correlated, read_table

interpreted = pytest.mark.skipif(DEVICE == "cuda" or fused.triton is None,
                                 reason="for a machine with Triton and without a GPU")
GREEN = [sys.executable, "-c", "print('7 passed')"]


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Tiny sizes and no CUDA. Returns the report that a part is to fill."""
    def two_milliseconds(f):
        f()
        return 2.0

    changes = {
        kernel_check: {"DEVICE": "cpu", "LENGTHS": [20], "WINDOWS": (7.5, INF)},
        kernel_benchmark: {"median": two_milliseconds, "roofline": lambda: (1e12, 1e9),
                           "projections_time": lambda T: 8.0},
        kernel_work: {"HEADS": 1},
        gpu_check: {"TESTS": GREEN, "SANITIZER": ("false",)},
        gpu_kernel: {"PSI": 2, "LENGTHS": [40, 20], "DENSE": 20, "SLOW": 20},
        gpu_layer: {"PSI": 2, "LENGTH": 64, "compile_layers": lambda model: None},
        gpu_model: {"SIZES": [(2, "1,2,8"), (3, "1,2,8")], "LENGTHS": [64, 32], "REPEATS": 2,
                    "LONG": 40},
        gpu_train: {"SIZES": [(2, "1,2,8", 2)], "LENGTH": 16, "VOCABULARY": 50, "REPEATS": 1,
                    "compile_layers": lambda model: None},
        timing: {"compile_layers": lambda model: None},
    }
    for module, values in changes.items():
        for name, value in values.items():
            monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(torch, "compile", lambda f, **options: f)
    return Report(tmp_path / "report.md", 600)


def read_tables(report):
    """{title: rows as dicts}. Each row must have as many cells as the head of its table."""
    tables, title = {}, ""
    for block in report.path.read_text().split("\n\n"):
        if block.startswith("|"):
            head, line, *rows = ([x.strip() for x in row.strip("|").split("|")]
                                 for row in block.strip().splitlines())
            assert set(line) == {"---"}
            assert rows
            tables[title] = [dict(zip(head, row, strict=True)) for row in rows]
        title = block.strip().rstrip(":")
    return tables


def run_part(part, report):
    """Run a part to its end: its tables, and the names of what was left at each step."""
    told = []
    part(report, lambda missing: told.append(list(missing)))
    assert told[-1] == []
    return read_tables(report)


# ------------------------------------------------------------------------------ the parts

@interpreted
def test_check_compares_runs_the_tests_and_the_sanitizer(small):
    table, = run_part(gpu_check.check, small).values()
    assert [(row["T"], row["v"], row["same bits twice"]) for row in table] == [
        ("20", v, "yes") for v in ("float32", "float16", "bfloat16")]
    assert all(0 < float(row[x]) < float(row["limit"]) for row in table for x in ("h", "dw"))
    text = small.path.read_text()
    assert "the tests of the kernel: exit code 0: 7 passed" in text
    assert "compute-sanitizer racecheck: exit code 1:" in text


@interpreted
def test_check_stops_at_a_wrong_kernel_and_at_a_command_that_hangs(small, monkeypatch):
    monkeypatch.setattr(gpu_check, "TESTS", [sys.executable, "-c", "import time; "
                                             "print('1 passed', flush=True); time.sleep(60)"])
    monkeypatch.setattr(gpu_check, "SANITIZER", ("no-such-program",))
    small.deadline = time.monotonic() + 2
    gpu_check.command_step("the tests", gpu_check.TESTS)(small)
    assert "the tests: did not end in the time that was left: 1 passed" in small.path.read_text()
    small.deadline = INF
    right = kernel_check.screen
    monkeypatch.setattr(kernel_check, "screen", lambda q, k, v, w, r: right(q, k, v, 1.01 * w, r))
    with pytest.raises(UsageError, match="T = 20, torch.float32: the kernel is wrong"):
        gpu_check.check(small, lambda missing: None)
    assert "compute-sanitizer is not here" in small.path.read_text()
    assert len(read_tables(small)) == 1


@interpreted
def test_check_stops_at_a_kernel_that_does_not_compile(small, monkeypatch):
    def screen(*inputs):
        raise RuntimeError("backend='inductor' raised:\n\nptxas: no such register")

    monkeypatch.setattr(kernel_check, "screen", screen)
    with pytest.raises(UsageError, match="T = 20, .* raised: / ptxas: no such register"):
        gpu_check.check(small, lambda missing: None)


@interpreted
@pytest.mark.filterwarnings("ignore")                  # FlexAttention warns without a compiler
def test_kernel_has_a_row_for_each_way_window_and_length(small, monkeypatch):
    def flex(T, w, compiled):
        return gpu_peers.flex_screen(T, w, False)

    monkeypatch.setattr(gpu_kernel, "flex_screen", flex)
    tables = run_part(gpu_kernel.kernel, small)
    rows = {(row["windows"], row["T"], row["way"]): row for row in tables["Forward and backward"]}
    settings = ("initial", "trained-like")
    assert rows.keys() == {
        *((s, T, way) for s in settings for T in ("20", "40")
          for way in ("fused", "FlexAttention")),
        *(("initial", T, f"attention, {name}") for T in ("20", "40")
          for name in ("flash", "cuDNN")),
        ("initial", "20", "screen, torch.compile"),
        *((s, "20", "screen_windowed") for s in settings)}
    assert [row["T"] for row in tables["Forward and backward"]] == sorted(
        row["T"] for row in rows.values() if row["windows"] == "initial") + sorted(
        row["T"] for row in rows.values() if row["windows"] == "trained-like")

    # 2 ms each: ratios are 1, and 24 layers of attention over 2 of screening.
    assert rows["initial", "20", "fused"]["fwd ratio"] == "1"
    assert rows["initial", "20", "screen_windowed"]["bwd ratio"] == "1"
    assert rows["initial", "20", "attention, flash"]["fwd ratio"] == "12"
    assert rows["initial", "20", "attention, cuDNN"]["fwd ms"] == "-"
    assert rows["initial", "20", "FlexAttention"]["bwd ms"] == "-"        # a CPU has none
    assert "attention, cuDNN, T = 20, initial: not run: " in small.path.read_text()
    found = {row["what"].split(" (")[0]: row["measured"]
             for row in tables["At T = 40, initial windows"]}
    assert found == {"forward over the layer's projections": "0.25", "backward over forward": "1",
                     "one infinite tile, ms": "2"}
    ways = tables["Is the fused kernel faster than the other ways of screening?"]
    assert {tuple(row.values()) for row in ways} == {
        ("FlexAttention", "1", "1", "0 of 4", "all"),      # a CPU has no backward
        ("screen, torch.compile", "1", "1", "0 of 2", "all"),
        ("screen_windowed", "1", "1", "0 of 4", "all")}


@interpreted
def test_layer_sums_launches_by_kind_and_says_what_is_not_fused(small, monkeypatch):
    names = ["triton_poi_fused_a", "nvjet_tst", "triton_per_fused_b", "triton_poi_fused_c",
             "_split", "_forward", "triton_red_fused_d", "sm90_xmma_gemm", "add_kernel"]

    def launches(f):
        f()
        return [(name, 2.0) for name in names]

    monkeypatch.setattr(gpu_layer, "launches", launches)
    tables = run_part(gpu_layer.layer, small)
    counted = layer_bytes.Layer(Config(psi=2)).ways()
    for row in tables["Time by kind"]:
        n = {"product": 2, "kernel": 2, "elementwise": 5}[row["kind"]]
        assert (row["launches"], row["ms"]) == (str(n), str(2 * n))
        assert int(row["counted bytes per token"]) == layer_bytes.total(counted[row["layer"]],
                                                                        row["kind"])
    passes = tables["The compiled layer, launch by launch"]
    assert [row["kind"][0] for row in passes] == list("epeekkepe")
    why = [row["not fused with what is before it"] for row in passes]
    assert [x.split(":")[0] for x in why] == [
        "-", "-", "the product cannot be entered", "the compiler could have", "-", "-",
        "the kernel cannot be entered", "-", "the product cannot be entered"]
    assert {row["measured"] for row in tables["Screening over the projections of the layer"]} == {
        "1"}


def test_model_times_both_and_has_the_targets_of_the_largest(small):
    tables = run_part(gpu_model.model, small)
    rows = [(row["model"], row["setting"], row["T"]) for row in tables["Milliseconds"]]
    windows = ["initial", "trained-like", "trained-like + SWE"]
    soon, small_one = ["flash", *windows], ["flash", "math", *windows]     # math comes late
    assert [(s, T) for _, s, T in rows] == [
        *((s, "64") for s in soon), *((s, "32") for s in small_one), ("math", "64"),
        *((s, "64") for s in small_one)]
    assert [rows[1][0], rows[-1][0]] == ["Psi = 2", "Psi = 3"]
    targets = [(row["T"], row["setting"], row["ratio"], row["target"])
               for row in tables["Targets, for one H200"]]
    assert targets == [("64", "initial", "x_flash", "8"), ("64", "initial", "x_fastest", "5"),
                       ("64", "initial", "x_fastest", "0.9"),
                       ("64", "trained-like", "x_flash", "6"),
                       ("32", "initial", "x_fastest", "0.9")]


def test_the_settings_of_a_model_do_not_depend_on_their_order(small):
    measure = gpu_model.Measure(small)
    measure.build(3, "1,2,8", [16])(small)
    model = measure.cells[3][-1].model

    def widths(setting):
        cell = timing.Cell("", model, setting, 16, "", 4096)
        measure.set_windows(cell)
        timing.prepare(model, setting, 4096)
        return torch.cat([window(tile.s_w.detach()) for tile in model.layers])

    initial, expanded = widths("initial"), widths("trained-like + SWE")
    likely = timing.trained_like(9)
    torch.testing.assert_close(expanded, torch.where(likely > 4096, INF, likely))
    assert torch.equal(widths("initial"), initial)


def test_train_counts_tokens_per_second_and_the_ratio(small):
    tables = run_part(gpu_train.train, small)
    ours, theirs = tables["Training"]
    assert ours["model"].startswith("multiscreen")
    assert float(ours["tokens/s"]) * float(ours["ms a step"]) == pytest.approx(32e3, rel=1e-2)
    ratio, = tables["Tokens per second, Multiscreen's over the Transformer's"]
    assert float(ratio["measured"]) == pytest.approx(
        float(ours["tokens/s"]) / float(theirs["tokens/s"]), rel=1e-2)
    assert ratio["target"] == "1"


def test_operations_of_training_by_hand():
    """Two tokens: 3 pairs in the past; a window of 2 reaches all of them, one of 1 two of them."""
    model = Multiscreen(Config(psi=1, vocab_size=5, N_H=2, d_E=3))
    with torch.no_grad():
        model.layers[0].s_w.copy_(torch.tensor([0.0, -INF]))
    weights = 5 * 3 + 2 * 3 * (16 + 16 + 64 + 64 + 64)
    assert gpu_train.operations(model, 2) == 6 * weights + 6 * 80 * (3 + 2) / 2
    model = build_model("transformer:1,2,8", {"vocab_size": 5})
    weights = 5 * 8 + 4 * 64 + 3 * 8 * 21
    assert gpu_train.operations(model, 2) == 6 * weights + 12 * 8 * 3 / 2


# ------------------------------------------------------------------------- peers and counts

@pytest.mark.filterwarnings("ignore")
def test_flex_attention_screens_as_the_definition_does():
    q, k, v = correlated(0, 1, 3, 256, 256)
    w, r = torch.tensor([2.0, 40.5, INF]).double(), torch.tensor([0.3, 0.5, 1.0]).double()
    found = gpu_peers.flex_screen(256, w, False)(q, k, v, w, r)
    torch.testing.assert_close(found, screen(q, k, v, w, r), rtol=1e-6, atol=1e-12)


def test_pairs_inside_are_counted_by_hand():
    assert kernel_work.pairs_inside(4, [1.0, 1.5, 3.0, INF]) == 4 + 7 + 9 + 10


# E, K, V, H of a token of the smallest layer.
TINY = Config(psi=1, N_H=2, d_E=3, d_K=4, d_V=5)


def test_the_bytes_of_a_tiny_layer_by_hand():
    """E = 3, K = 8, V = 10: fused 26 E + 48 K + 20 V, at the least 12 E + 24 K + 12 V."""
    layer = layer_bytes.Layer(TINY)
    total, ways = layer_bytes.total, layer.ways()
    assert layer.operations() == 2 * 3 * (8 + 8 + 10 + 10 + 10)
    assert total(ways["fused"]) == 26 * 3 + 48 * 8 + 20 * 10
    assert total(ways["least"]) == 12 * 3 + 24 * 8 + 12 * 10
    for way in ("eager", "fused"):                     # five products; q, k twice, v and h once
        assert total(ways[way], "product") == 10 * 3 + 4 * 8 + 6 * 10
        assert total(ways[way], "kernel") == 32 * 8 + 4 * 10
    assert total(ways["least"], "elementwise") == 0
    row = layer_bytes.summary(layer, 1000, 1e6)[1]
    assert row == ["fused", 14, 122, 296, 244, 662, 122.0, 296.0, 244.0, 662.0]


class CountBytes(torch.utils._python_dispatch.TorchDispatchMode):
    """The bytes that operations read and write, but for those that only make a view."""
    moved = 0

    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        result = f(*args, **kwargs or {})
        if not f.is_view and "_unsafe_view" not in str(f):
            tensors = [x for arg in (*args, result)
                       for x in (arg if isinstance(arg, (list, tuple)) else [arg])]
            self.moved += sum(x.numel() * x.element_size() for x in tensors
                              if isinstance(x, torch.Tensor))
        return result


@torch.no_grad()
def test_the_count_of_an_eager_layer_is_what_its_operations_move():
    """Of 60 tokens more than of 40, so that what does not depend on their number falls out."""
    moved = []
    for T in (40, 60):
        layer = GatedScreeningTiles(TINY, torch.bfloat16)
        for p in layer.parameters():
            p.fill_(0.1)
        x, h = torch.zeros(1, T, 3), torch.zeros(1, T, 2, 5).bfloat16().transpose(1, 2)
        with CountBytes() as counter:
            layer(x, lambda *inputs, h=h: h)
        moved.append(counter.moved)
    passes = layer_bytes.Layer(TINY).eager()
    counted = layer_bytes.total(passes) - layer_bytes.total(passes, "kernel")
    assert (moved[1] - moved[0]) / 20 == counted


# ---------------------------------------------------------------- the report and the driver

def test_steps_that_fail_or_do_not_fit_are_named(tmp_path):
    report = Report(tmp_path / "report.md", 100)
    report.section("a part")
    table = report.table("Squares", ["x", "x^2"], key=lambda row: row[0])

    def fails(report):
        raise ValueError("no luck\nat all")

    steps = [("two", 0, lambda report: table.add(2, 4.0)), ("long", 1000, fails),
             ("short", 0, fails), ("one", 0, lambda report: table.add(1, float("nan")))]
    run_steps(steps, report)
    assert report.path.read_text() == (
        "## a part\n\nSquares:\n\n| x | x^2 |\n| --- | --- |\n| 1 | - |\n| 2 | 4 |\n\n"
        "* short failed (ValueError: no luck / at all)\n\n* Did not fit into the time: long.\n\n")
    with pytest.raises(ValueError, match="3 cells"):
        table.add(1, 2, 3)
    again = Report(report.path)
    again.section("another part")
    assert again.path.read_text().endswith("long.\n\n## another part\n\n")


def good(report, tell):
    report.section("good")
    run_steps([("a", 0, lambda report: report.note("done"))], report, tell)


def crashes(report, tell):
    report.section("crashes")
    for _ in range(200):                               # more than a pipe holds
        tell(["b", "c" * 1000])
    tell(["b", "c"])
    os._exit(9)


def fails(report, tell):
    report.section("fails")
    sys.stderr = sys.__stderr__                        # pytest's own goes past file descriptor 2
    run_steps([("f", 0, lambda report: 1 / 0)], report, tell)


def hangs(report, tell):
    report.section("hangs")
    tell(["d"])
    later = "import pathlib, sys, time; time.sleep(3); pathlib.Path(sys.argv[1]).touch()"
    subprocess.run([sys.executable, "-c", later, str(report.path.with_name("later"))])


def wrong(report, tell):
    tell(["e"])
    raise UsageError("the kernel is wrong by more than 1")


@pytest.mark.skipif(sys.platform == "win32", reason="processes are forked here, to be quick")
def test_a_part_that_crashes_or_hangs_leaves_the_others_their_time(monkeypatch, tmp_path):
    parts = {"crashes": (crashes, 1), "hangs": (hangs, 1), "fails": (fails, 9), "good": (good, 9),
             "wrong": (wrong, 9), "last": (good, 9)}
    monkeypatch.setattr(gpu, "PARTS", parts)
    monkeypatch.setattr(gpu, "START", "fork")
    path = tmp_path / "report.md"
    with pytest.raises(UsageError, match="the kernel is wrong: see"):
        gpu.run_parts([*gpu.PARTS], path, 40)
    notes = re.findall(r"^(?:##|\*) (.*)$", path.read_text(), re.M)
    assert notes == [
        "crashes", "crashes ended with exit code 9.", "Did not fit into the time: b; c.",
        "hangs", "hangs was stopped after 1 s.", "Did not fit into the time: d.",
        "fails", "f failed (ZeroDivisionError: division by zero)", "good", "done",
        "Stopped: the kernel is wrong by more than 1", "Did not fit into the time: e.",
        "Not run, because of the kernel: last."]
    assert "1 / 0" in (tmp_path / "errors.txt").read_text()
    time.sleep(3)
    assert not (tmp_path / "later").exists()           # what a part started has ended with it


def test_the_command_writes_the_machine_and_the_parts_in_processes_of_their_own(
        monkeypatch, tmp_path):
    monkeypatch.setattr(gpu, "PARTS", {"check": (good, 1)})
    monkeypatch.setattr(gpu, "require_gpu", lambda: None)
    monkeypatch.setattr(sys, "argv", ["gpu", "--part", "check", "--out", str(tmp_path)])
    gpu.main()
    report = Report(tmp_path / "report.md")
    what = [row["what"] for row in read_tables(report)["The machine and the code"]]
    assert {"commit", "GPU, driver, memory, clock, power", "torch, CUDA, triton, python"} <= {*what}
    assert report.before.endswith("## good\n\n* done\n\n")
    with pytest.raises(UsageError, match="--force overwrites it"):
        gpu.main()


def test_without_a_gpu_it_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["gpu", "--out", str(tmp_path)])
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(UsageError, match="unset it"):
        gpu.main()
    assert not (tmp_path / "report.md").exists()


# --------------------------------------------------------------------------------- the CPU

def test_the_cpu_benchmark_has_a_row_for_each_setting(monkeypatch, tmp_path):
    compiled = []
    monkeypatch.setattr(cpu_benchmark, "compile_layers", compiled.append)
    monkeypatch.setattr(cpu_benchmark, "LENGTH", 8)
    monkeypatch.setattr(sys, "argv", [
        "cpu_benchmark", "--psi", "2", "--transformer", "1,2,8", "--contexts", "5", "40",
        "--repeats", "2", "--tokens", "2", "--out", str(tmp_path)])
    cpu_benchmark.main()
    rows = read_table(tmp_path / "cpu_benchmark.tsv")
    assert [(row["what"], row["setting"], row["context"]) for row in rows] == [
        ("train", "eager", "-"), ("train", "compiled", "-"),
        *(("decode", s, T) for s in ("initial", "trained-like") for T in ("5", "40"))]
    assert len(compiled) == 2
    for row in rows:
        ratio = float(row["multiscreen"]) / float(row["transformer"])
        assert float(row["ratio"]) == pytest.approx(ratio, rel=1e-3)


@pytest.mark.parametrize("name", ["multiscreen", "transformer:1,2,8"])
def test_filled_caches_are_those_of_a_context(name):
    model = build_model(name, {"psi": 2, "vocab_size": 11})
    with torch.no_grad():
        caches = cpu_benchmark.fill_caches(model, 30)
        model.hidden(torch.zeros(1, 1, dtype=torch.int64), caches)
        real = [KeyCache() for _ in model.layers]
        model.hidden(torch.zeros(1, 30, dtype=torch.int64), real)
        model.hidden(torch.zeros(1, 1, dtype=torch.int64), real)
    for a, b in zip(caches, real):
        assert (a.first, a.end) == (b.first, b.end) == (0, 31)
        assert a.k[:, :, :31].shape == b.k[:, :, :31].shape
        assert a.v[:, :, :31].shape == b.v[:, :, :31].shape
