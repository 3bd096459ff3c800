"""Tests of experiments/: a small run of each script, and the arithmetic behind the tables."""
import math
import os
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch

import multiscreen
import screening_triton as fused
import train
from experiments import (
    ablations,
    common,
    curves,
    fits,
    kernel_benchmark,
    kernel_check,
    lr_sweep,
    models,
    runs,
    sanity,
    scaling,
    training_curves,
)
from support.checkpoint import load_checkpoint
from support.cli import UsageError, check_writable
from support.run import Lock, Log
from tests.helpers import INF, ROOT, fit, read_table

NAN = math.nan
TINY = ["--seq-len", 16, "--batch-size", 2, "--device", "cpu", "--kernel", "definition"]


@pytest.fixture
def call(monkeypatch, tmp_path):
    """call(script, *flags) runs its main() in a folder of this test."""
    monkeypatch.chdir(tmp_path)

    def run(script, *flags):
        monkeypatch.setattr(sys, "argv", [script.__name__, *map(str, flags)])
        script.main()

    return run


@pytest.fixture
def data(tmp_path):
    """Flags: some kilobytes to train on, so that no test reads the standard library."""
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{i} and {i * i}, " for i in range(600)))
    return ["--data", path]


# ----------------------------------------------------------------------------- common runs

def test_a_finished_run_is_read_and_an_interrupted_one_continued(data, tmp_path, monkeypatch):
    run = runs.Run("a", ("--psi", "2", *map(str, TINY), *map(str, data), "--log-every", "1"), 0, 4)
    right = train.main

    def stops_after_2(argv):
        def stop(self, row):
            add(self, row)
            if row["step"] == 2:
                os.kill(os.getpid(), signal.SIGINT)

        add = Log.add
        with monkeypatch.context() as m:
            m.setattr(Log, "add", stop)
            right(argv)

    monkeypatch.setattr(train, "main", stops_after_2)
    with pytest.raises(KeyboardInterrupt, match="the same command continues"):
        run.finish(tmp_path)
    before = runs.read_log(tmp_path / "a-0/log.tsv")
    assert before[-1]["step"] == 2
    assert not runs.is_finished(tmp_path / "a-0", run.key)
    path, half = tmp_path / "a-0/ckpt.pt", (tmp_path / "a-0/ckpt.pt").read_bytes()
    monkeypatch.setattr(train, "main", right)
    assert load_checkpoint(run.checkpoint(tmp_path))[2]["step"] == 4
    path.write_bytes(half)                             # killed between the last row and its save
    assert load_checkpoint(run.checkpoint(tmp_path))[2]["step"] == 4
    rows, diverged = run.finish(tmp_path)
    assert rows[:2] == before                          # their milliseconds too: not run again
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert diverged is None

    # What is finished is not run again, whatever its folder; what was run otherwise is not taken.
    monkeypatch.setattr(train, "main", None)
    assert run.finish(tmp_path) == (rows, None)
    with pytest.raises(UsageError, match="other flags"):
        run._replace(steps=5).finish(tmp_path)
    (tmp_path / "a-0").rename(tmp_path / "mine")
    assert run._replace(name="b").finish(tmp_path) == (rows, None)


def test_a_diverged_run_is_noted_and_not_repeated(data, tmp_path, monkeypatch):
    flags = ["--psi", 2, *TINY, *data, "--lr", 1e18, "--warmup", 0, "--log-every", 1]
    run = runs.Run("b", tuple(map(str, flags)), 0, 3)
    rows, diverged = run.finish(tmp_path)
    assert "diverged" in diverged
    assert rows[-1]["step"] < 3
    monkeypatch.setattr(train, "main", None)
    assert run.finish(tmp_path) == (rows, diverged)
    with pytest.raises(UsageError, match="no model to measure"):
        run.checkpoint(tmp_path)


def test_an_error_is_no_divergence(tmp_path):
    run = runs.Run("c", ("--data", str(tmp_path / "diverged.txt")), 0, 3)
    with pytest.raises(UsageError, match="does not exist"):
        run.finish(tmp_path)
    assert not (tmp_path / "c-0/diverged.txt").exists()


def test_a_run_of_another_process_is_left_to_it_and_what_the_table_holds_is_not_run(
        data, tmp_path, monkeypatch):
    flags = tuple(map(str, ["--psi", 1, *TINY, *data]))
    found = [runs.Run("x", flags, seed, 1) for seed in range(3)]
    lock, order, right = Lock(tmp_path / "x-0", "run.lock"), [], runs.Run.train

    def train_one(self, folder):
        order.append(self.seed)
        if self.seed == 1:
            lock.__exit__()                            # the other process has ended
        right(self, folder)

    monkeypatch.setattr(runs.Run, "train", train_one)
    lock.__enter__()
    losses = runs.train_missing(found, tmp_path)
    assert order == [1, 2, 0]
    assert list(losses) == found
    assert len(set(losses.values())) == 3

    # Without the folders, too.
    for run in found:
        shutil.rmtree(tmp_path / f"x-{run.seed}")
    monkeypatch.setattr(train, "main", None)
    assert runs.train_missing(found, tmp_path) == losses


def test_seeds_for_all_sizes_and_for_one():
    assert runs.parse_seeds(["3", "48:1", "transformer:1.3B:2"]) == {
        "": 3, "48": 1, "transformer:1.3B": 2}
    for wrong in ("0", "48:", "48:0", "many"):
        with pytest.raises(UsageError, match="seeds"):
            runs.parse_seeds([wrong])


def test_what_is_called_diverged():
    """Half a nat above the least mean over an eighth of the rows, here 2.95."""
    log = [{"step": n, "loss": 6.0 - n / 10} for n in range(1, 33)]
    log.append({"step": 33, "val_loss": 3.0})
    assert runs.final_loss(log, None) == 3.0
    assert math.isnan(runs.final_loss(log, "training diverged: at step 21 loss is nan"))
    for last, diverged in ((3.44, False), (3.46, True), (80.0, True), (INF, True), (NAN, True)):
        log[-1]["val_loss"] = last
        assert math.isnan(runs.final_loss(log, None)) == diverged, last
    assert math.isnan(runs.final_loss([], None))


def test_diverged_seeds_are_left_out_of_the_mean_and_counted():
    assert common.mean_and_std([2.0, NAN, 4.0]) == (3.0, math.sqrt(2), 1)
    mean, std, diverged = common.mean_and_std([NAN])
    assert math.isnan(mean)
    assert math.isnan(std)
    assert diverged == 1


@pytest.mark.parametrize("flags, total, rest", [
    (["--psi", 8], 917_698 + 257 * 64, 917_698),
    (["--model", "transformer:8M"], 1_180_416 + 257 * 128, 1_180_416)])
def test_parameters_agree_with_the_papers_tables(flags, total, rest):
    """Of the embedding 257 tokens, bytes, instead of 50,257."""
    assert models.parameters_of(*flags) == (total, rest)


@pytest.mark.parametrize("script, flags, message", [
    (ablations, ["--seed", "1"], "--seed is set"), (ablations, ["--seeds", "0"], "seed"),
    (lr_sweep, ["--models", "transformer:huge"], "unknown"),
    (lr_sweep, ["--exponents", "2000"], "exponents"), (lr_sweep, ["--nonsense", "1"], "nonsense"),
    (lr_sweep, ["--lr=1"], "--lr is set"), (scaling, ["--psi", "0"], "psi = 0"),
    (scaling, ["--transformers", "transformer:1,3,8"], "multiple"),
    (training_curves, [], "lr_sweep"), (training_curves, ["--window", "1"], "window"),
    (scaling, ["--seeds", "9:2"], "sizes are")])
def test_a_mistake_is_told_in_one_line_before_any_run(call, monkeypatch, script, flags, message):
    monkeypatch.setattr(train, "main", None)
    with pytest.raises(UsageError, match=message) as e:
        call(script, *flags)
    assert "\n" not in str(e.value)


# --------------------------------------------------- scripts that train: ablations, rates, sizes

def test_the_table_of_ablations_is_that_of_their_runs(call, data, tmp_path):
    flags = ["--psi", 2, *TINY, *data, "--steps", 3, "--out", tmp_path / "o"]
    call(ablations, *flags)
    rows = read_table(tmp_path / "o/ablations.tsv")
    names = ["multiscreen", *(f"multiscreen:{name}" for name in
                              ("rope", "nope", "no-tanhnorm", "no-gate", "fixed-r"))]
    assert [row["model"] for row in rows] == names
    losses = []
    for row in rows:
        folder = tmp_path / "o" / (row["model"].replace(":", "_") + "-0")
        model, _, ckpt = load_checkpoint(folder / "ckpt.pt")
        assert ckpt["model"] == row["model"]
        assert int(row["parameters"]) == sum(p.numel() for p in model.parameters())
        losses.append(runs.read_log(folder / "log.tsv")[-1]["val_loss"])
        assert float(row["val_loss"]) == pytest.approx(losses[-1], rel=1e-4)
        assert float(row["change"]) == pytest.approx(losses[-1] - losses[0], abs=6e-5)
    assert len(set(losses)) == 6

    # The paper's table.
    paper = ["3.0966", "3.1232", "3.1109", "3.1094", "3.1555", "3.112"]
    assert [row["paper_28M"] for row in rows] == paper
    changes = ["+0.0000", "+0.0266", "+0.0143", "+0.0128", "+0.0589", "+0.0154"]
    assert [row["paper_change"] for row in rows] == changes

    # It can be made again without the runs.
    before = (tmp_path / "o/ablations.tsv").read_bytes()
    for name in names:
        shutil.rmtree(tmp_path / "o" / (name.replace(":", "_") + "-0"))
    call(ablations, *flags)
    assert (tmp_path / "o/ablations.tsv").read_bytes() == before


def test_a_sweep_of_learning_rates_then_its_curves(call, data, tmp_path, monkeypatch):
    models = ["multiscreen", "transformer:1,1,4:qknorm"]
    sweep = [lr_sweep, "--models", *models, "--exponents", -4, 40, "--seeds", 2, "--steps", 4,
             "--psi", 2, *TINY, *data]
    call(*sweep)
    path = tmp_path / "out/lr_sweep/lr_sweep.tsv"
    rows = read_table(path)
    assert [row["exponent"] for row in rows] == ["-4", "40"]
    assert [float(row["rate"]) for row in rows] == pytest.approx([2**-4, 2**40], rel=1e-4)
    finals = [runs.read_log(tmp_path / f"out/lr_sweep/multiscreen--4-{seed}/log.tsv")[-1]
              for seed in (0, 1)]
    mean = (finals[0]["val_loss"] + finals[1]["val_loss"]) / 2
    assert float(rows[0]["multiscreen"]) == pytest.approx(mean, rel=1e-4)
    assert float(rows[0]["multiscreen std"]) > 0
    assert rows[1]["transformer:1,1,4:qknorm"] == "diverged"

    # Finished runs are not run again.
    before = path.read_bytes()
    monkeypatch.setattr(train, "main", None)
    call(*sweep)
    assert path.read_bytes() == before

    # One row for each run: two seeds, but one with QKNorm.
    call(training_curves, "--window", 2)
    rows = read_table(tmp_path / "out/training_curves/training_curves.tsv")
    assert [row["run"] for row in rows] == [
        "multiscreen--4-0", "multiscreen--4-1", "multiscreen-40-0", "multiscreen-40-1",
        "transformer_1,1,4_qknorm--4-0", "transformer_1,1,4_qknorm-40-0"]
    assert rows[0]["steps"] == "4"
    assert rows[0]["end"] == "-"
    assert rows[-1]["end"] == "diverged"


def test_the_sanity_check_has_four_runs_and_their_curves(call, data, tmp_path):
    call(sanity, "--transformer", "transformer:1,1,4", "--psi", 1, "--steps", 3, "--window", 2,
         *TINY, *data)
    rows = read_table(tmp_path / "out/sanity/sanity.tsv")
    assert [row["run"] for row in rows] == ["Transformer", "Transformer w/o weight decay",
                                            "Transformer w/o clipping", "Multiscreen"]
    folders = ["transformer_1,1,4-0", "transformer_1,1,4_no_decay-0",
               "transformer_1,1,4_no_clipping-0", "multiscreen_psi1-0"]
    found = [training_curves.parse_folder(tmp_path / "out/sanity" / name)[1] for name in folders]
    assert found == ["0.001", "w/o weight decay", "w/o clipping", -4]
    rows = read_table(tmp_path / "out/sanity/sanity_curves.tsv")
    assert [row["run"] for row in rows] == folders


def test_losses_by_size_and_the_lines_through_them(call, data, tmp_path):
    sizes = [257 * E + 4 * E * E + 3 * E * (8 * E // 3) + 2 * E for E in (4, 8)]
    call(scaling, "--psi", 1, 2, "--transformers", "transformer:1,1,4", "transformer:1,1,8",
         "--steps", 3, *TINY, *data)
    rows = read_table(tmp_path / "out/scaling/scaling.tsv")
    assert [row["model"] for row in rows[:2]] == ["multiscreen_psi1", "multiscreen_psi2"]
    assert [int(row["total"]) for row in rows] == [486, 4626, *sizes]
    assert all(3 < float(row["val_loss"]) < 7 for row in rows)
    lines = read_table(tmp_path / "out/scaling/fits.tsv")
    assert [line["size"] for line in lines] == ["total", "non_embedding", "psi"]
    rise = float(rows[1]["val_loss"]) - float(rows[0]["val_loss"])
    slope = rise / math.log2(4626 / 486)               # through two points
    assert float(lines[0]["multiscreen"]) == pytest.approx(slope, abs=2e-3)


def test_a_line_is_least_squares_in_the_logarithm():
    """x = 0, 1, 2: slope -1/2, mean 4 at x = 1."""
    a, b = fits.fit_line([1.0, math.e, math.e**2], [5.0, 3.0, 4.0])
    assert a == pytest.approx(4.5)
    assert b == pytest.approx(-0.5)
    assert fits.size_at(3.0, (5.0, -0.5)) == pytest.approx(math.e**4)
    assert fits.fit_line([7, 7], [1.0, 2.0]) is None


def test_saving_at_equal_loss():
    """In the middle of the losses that both have reached."""
    sizes = [100, 200, 400]
    loss = [6 - math.log(n) for n in sizes]
    at, N_m, N_t, saved, std = fits.saving((sizes, loss), ([n / 0.7 for n in sizes], loss))
    assert at == pytest.approx(6 - math.log(200))
    assert N_m == pytest.approx(200)
    assert N_t == pytest.approx(200 / 0.7)
    assert saved == pytest.approx(0.3)
    assert std == pytest.approx(0, abs=1e-9)
    low = [x - 1 for x in loss]
    at, _, _, saved, _ = fits.saving((sizes, low), (sizes, loss))
    assert at == pytest.approx((11 - math.log(40_000)) / 2)
    assert saved == pytest.approx(1 - 1 / math.e)


def test_the_deviation_of_a_saving_is_that_of_the_fits():
    """To first order, by NumPy's covariance of a line."""
    sizes, losses = [100, 200, 400, 800], [4.0, 3.4, 2.7, 2.2]
    line, covariance = np.polyfit(np.log(sizes), losses, 1, cov=True)
    b, a = line
    slope = np.array([-(3.0 - a) / b**2, -1 / b])      # of ln N = (3 - a)/b by b and a
    expected = slope @ covariance @ slope
    assert fits.variance_at(3.0, sizes, losses) == pytest.approx(expected)
    *_, std = fits.saving((sizes, losses), (sizes, losses))
    at = fits.variance_at(3.1, sizes, losses)
    assert std == pytest.approx(math.sqrt(2 * at))
    *_, std = fits.saving((sizes[:2], losses[:2]), (sizes, losses))
    assert math.isnan(std)


@pytest.mark.parametrize("other", [
    ([100, 200], [9.0, 8.0]), ([100, 200], [1.0, 2.0]), ([100], [1.5]), ([], [])])
def test_no_saving_without_a_common_loss_or_a_line_that_falls(other):
    assert fits.saving(([100, 200], [2.0, 1.0]), other) is None


def test_moving_average():
    x = np.array([1.0, 2.0, 6.0, 4.0])
    assert curves.moving_average(x, 2).tolist() == [1.5, 4.0, 5.0]
    assert curves.moving_average(x, 9).tolist() == [3.25]      # fewer rows than that: all of them
    huge = np.array([1e30, 1.0, 3.0])
    assert curves.moving_average(huge, 2)[-1] == 2.0           # a running sum would have lost it


@pytest.mark.parametrize("values, spikes", [
    ({}, 0), ({12: 6.9}, 0), ({12: 7.1}, 1), ({12: -20.0}, 0), ({8: 100, 16: 100}, 2),
    ({2: 100}, 0)])
def test_spikes_are_measured_against_the_rows_before_them(values, spikes):
    """Any 4 rows have the mean 2 and the deviation 1: the limit is 7. The first 4 have none."""
    x = np.tile([1.0, 3.0], 10)
    for n, value in values.items():
        x[n] = value
    assert curves.count_spikes(x, 4) == spikes


def test_summary_of_a_run():
    step, loss = np.arange(1.0, 11.0), np.arange(10.0, 0.0, -1.0)
    norm = np.array([9.0, 9.0, 9.0, 9.0, 9.0, 5.0, 1.0, 4.0, 2.0, 3.0])
    found = curves.summarize_run(step, loss, norm, 4)
    assert found[:4] == [10, 8.5, 2.5, 0]
    assert found[4:] == pytest.approx([3.0, 4.6, 5.0, 0])      # of 1 2 3 4 5, the second half


# ---------------------------------------------------------------------------- the fused kernel

@pytest.fixture
def small_benchmark(monkeypatch):
    """small_benchmark(screen): check and benchmark that function, on a CPU, at small lengths."""
    def patch(screen):
        monkeypatch.setattr(kernel_check, "DEVICE", "cpu")
        for script, lengths in ((kernel_check, [70]), (kernel_benchmark, [16, 32])):
            monkeypatch.setattr(script, "LENGTHS", lengths)
            monkeypatch.setattr(script, "screen", screen)

    return patch


def test_the_kernel_check_takes_a_right_kernel_and_no_wrong_one(small_benchmark, capsys):
    right, noise = multiscreen.screen, iter(range(10))
    small_benchmark(right)
    kernel_check.check_kernel()
    assert len(capsys.readouterr().out.splitlines()) == 2 + 3
    small_benchmark(lambda q, k, v, w, r: right(q, k, v, w * 1.001, r))
    with pytest.raises(UsageError, match="wrong by more than 0.0001"):
        kernel_check.check_kernel()
    small_benchmark(lambda q, k, v, w, r: right(q, k, v * (1 + next(noise) * 1e-6), w, r))
    with pytest.raises(UsageError, match="other bits the second time"):
        kernel_check.check_kernel()


def test_the_kernel_benchmark_has_a_line_for_each_way_or_says_why_not(small_benchmark, monkeypatch,
                                                                      capsys):
    def two_milliseconds(f):
        f()
        return 2.0

    small_benchmark(multiscreen.screen)
    monkeypatch.setattr(kernel_benchmark, "median", two_milliseconds)
    monkeypatch.setattr(kernel_benchmark, "roofline", lambda: (1e12, 1e9))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(torch, "compile", lambda f, dynamic: f)
    kernel_benchmark.benchmark()
    lines = capsys.readouterr().out.splitlines()
    for T in (16, 32):
        found = {line[9:31].strip(): line for line in lines if line.split()[:1] == [str(T)]}
        assert list(found) == ["fused", "screen_windowed", "screen, torch.compile",
                               "attention, flash", "attention, cuDNN"]
        assert found["fused"].split()[-1] == "1.00"
        assert "nan" in found["attention, cuDNN"]              # a CPU has none
    assert sum("not run: " in line for line in lines) == 2


@pytest.mark.parametrize("script", [kernel_check, kernel_benchmark])
def test_a_kernel_is_checked_and_timed_on_a_gpu_only(call, monkeypatch, script):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(UsageError, match="unset it"):
        call(script)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(kernel_check, "available", lambda: "there is no CUDA GPU")
    with pytest.raises(UsageError, match="no CUDA GPU"):
        call(script)


@pytest.mark.skipif(fused.triton is None, reason="triton is not installed")
def test_every_configuration_compiles_ahead_of_time_without_spills():
    """A process for each GPU, side by side: together they take a minute of a core."""
    processes = []
    for target in (80, 89, 90):
        code = ("import experiments.kernel_compile as script; "
                f"script.TARGETS = ({target},); script.cli(script.main)")
        processes.append(subprocess.Popen(
            [sys.executable, "-c", code], cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": "0"},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    lines = []
    for process in processes:
        out, errors = process.communicate()
        assert process.returncode == 0, errors
        lines += [line.split() for line in out.splitlines() if " sm_" in line]
    assert len(lines) == 3 * 4 * 3

    # Instructions a pair in the loop without masks, on an H100 with 16-bit values.
    aims = {"forward": 11, "dq": 30, "dkv": 21}
    for name, _, v, target, _, _, _, _, spills, shared, edge, interior in lines:
        assert int(spills) == 0
        assert int(shared) <= 99 * 1024
        assert float(interior) < float(edge)
        assert target != "sm_90" or v == "fp32" or float(interior) <= aims[name]


def test_parameters_are_counted_beside_a_run_that_is_there(tmp_path, monkeypatch):
    """The quick start's model lies in out/ while the experiments run."""
    fit(tmp_path / "out", "--steps", "1")
    monkeypatch.chdir(tmp_path)
    assert models.parameters_of("--psi", 2)[0] > 0


def test_a_figure_without_a_table_is_deleted_with_force_only(tmp_path):
    figure = tmp_path / "windows.png"
    figure.write_bytes(b"mine")
    check_writable(tmp_path / "windows.tsv")
    assert figure.read_bytes() == b"mine"
    check_writable(tmp_path / "windows.tsv", force=True)
    assert not figure.exists()
