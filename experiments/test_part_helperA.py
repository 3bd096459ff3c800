"""Tests of lr_sweep, training_curves and scaling: hand-worked numbers, and each main() with models of a few weights."""
import math
import sys

import numpy as np
import pytest

from experiments import lr_sweep, scaling, training_curves
from experiments.common import count_parameters
from train import UsageError

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
    log = [{"step": 1, "loss": 5.9}, {"step": 10, "loss": 3.0, "val_loss": 3.5}, {"step": 20, "val_loss": 3.2}]
    assert lr_sweep.outcome(log, None, 257) == 3.2
    assert math.isnan(lr_sweep.outcome(log, "training diverged: at step 21 loss is nan", 257))
    for last, diverged in ((5.54, False), (5.8, False), (5.95, True), (80.0, True), (math.inf, True), (NAN, True)):
        log[-1]["val_loss"] = last                                 # ln 257 = 5.549; 5.8 is a run that has not learnt yet
        assert math.isnan(lr_sweep.outcome(log, None, 257)) == diverged, last
    log = [{"step": 1, "loss": 4.0}, {"step": 2, "val_loss": 5.5}]
    assert lr_sweep.outcome(log, None, 257) == 5.5                 # worse than its start, better than a guess
    assert math.isnan(lr_sweep.outcome(log, None, 200))            # ln 200 = 5.298


def test_diverged_seeds_are_left_out_of_the_mean_and_shown():
    assert lr_sweep.summarize([2.0, NAN, 4.0]) == (3.0, math.sqrt(2), 1)
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


def test_the_sweep_then_its_curves(call, text, capsys, monkeypatch):
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
    assert "2^-4" in capsys.readouterr().out


def test_scaling(call, text):
    tables = call(scaling, "--psi", 1, 2, "--transformers", "transformer:1,1,4", "transformer:1,1,8", "--seq-len", 16,
                  "--batch-size", 2, "--steps", 3, "--data", text)
    rows = tables["scaling.tsv"]
    assert [row[:4] for row in rows[1:3]] == [["multiscreen-1", "1", "486", "229"], ["multiscreen-2", "2", "4626", "3598"]]
    assert [row[2] for row in rows[3:]] == [str(257 * E + 4 * E * E + 3 * E * (8 * E // 3) + 2 * E) for E in (4, 8)]
    assert all(3 < float(row[4]) < 7 for row in rows[1:])
    assert [row[0] for row in tables["fits.tsv"]] == ["size", "total", "non_embedding", "psi"]
    slope = (float(rows[2][4]) - float(rows[1][4])) / math.log2(4626 / 486)               # through two points
    assert float(tables["fits.tsv"][1][1]) == pytest.approx(slope, abs=2e-3)


def test_scaling_shows_diverged_models_and_fits_none(call, text):
    tables = call(scaling, "--psi", 2, "--transformers", "transformer:1,1,4", "--seq-len", 16, "--batch-size", 2, "--steps", 3,
                  "--data", text, "--lr", 1e13, "--seeds", 2)
    assert [row[4:] for row in tables["scaling.tsv"][1:]] == [["-", "-"]] * 2
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
