"""What is drawn from runs: losses by rate, size and ablation, curves of training."""
import math
import statistics

import numpy as np
import pytest

from experiments import ablations, common, lr_sweep, sanity, scaling, tile, training_curves
from support.cli import UsageError
from tests.helpers import INF, ROOT, needs_matplotlib, read_table

NAN = math.nan
FLAGS = {"model": "multiscreen", "psi": "2", "w_th": "256.0", "parameters": "4626",
         "data": "stdlib", "tokenizer": "bytes", "seq_len": "64", "batch_tokens": "512",
         "steps": "20", "warmup": "1", "lr": "0.0625", "weight_decay": "0.0", "clip": "0.0",
         "init_weights": "", "changes": "", "equations": "abcd", "seed": "0",
         "classes": "", "corpus": "0123456789ab", "versions": ""}
TRANSFORMER = {"model": "transformer:1,1,8", "parameters": "2848", "weight_decay": "0.1",
               "clip": "1.0"}


@pytest.fixture
def run(tmp_path):
    """run(name, last validation loss, steps that were made, **flags) -> a folder as train.py's."""
    def write(name, loss, made=20, **flags):
        folder = tmp_path / name
        folder.mkdir()
        flags = FLAGS | flags
        (folder / "flags.txt").write_text("".join(f"{k}\t{x}\n" for k, x in flags.items()))
        rows = [f"{n}\t{6 - n / 10:g}\t{1 + n % 3}\t\n" for n in range(1, made + 1)]
        (folder / "log.tsv").write_text("step\tloss\tgrad_norm\tval_loss\n" + "".join(rows)
                                        + f"{made}\t\t\t{loss}\n")
        return folder

    return write


# ------------------------------------------------------------------------------ reading runs

def test_a_run_is_read(run):
    folder = run("a", 3.5, seed="7")
    found = common.read_run(folder)
    assert found.flags["seed"] == "7"
    assert found.rows[0] == {"step": 1, "loss": 5.9, "grad_norm": 2}
    assert found.rows[-1] == {"step": 20, "val_loss": 3.5}
    assert found.loss == 3.5
    with open(folder / "log.tsv", "a") as file:
        file.write("21\t3")                            # killed while it wrote a row
    assert common.read_run(folder) == found
    (folder / "diverged.txt").write_text("at step 3 the loss is nan\n")
    assert math.isnan(common.read_run(folder).loss)


def test_runs_and_tables_of_them_are_mixed_and_none_comes_twice(run, call, tmp_path, capsys):
    a, b = run("a", 3.5), run("b", 3.7, seed=1)
    call(lr_sweep, a, b, "--out", "o")
    table = tmp_path / "o/lr_sweep.tsv"
    before = table.read_bytes()
    call(lr_sweep, table, a, "--out", "o")
    assert table.read_bytes() == before
    rows = read_table(table)
    assert [(row["seed"], row["val_loss"]) for row in rows] == [("0", "3.5"), ("1", "3.7")]
    assert {row["equations"] for row in rows} == {"abcd"}

    # A run that was measured before is not lost.
    with pytest.raises(UsageError, match="1 rows that are not drawn"):
        call(lr_sweep, a, "--out", "o")
    assert table.read_bytes() == before


@pytest.mark.parametrize("flags, message", [
    ({"steps": "10"}, "differ in steps"), ({"data": "books"}, "differ in data"),
    ({"warmup": "2"}, "differ in warmup"), ({"init_weights": "1"}, "differ in init_weights"),
    ({"changes": "from step 2: --lr 0.5"}, "differ in changes"),
    ({"equations": "xyz"}, "differ in equations")])
def test_runs_that_cannot_be_compared_are_refused(run, call, flags, message):
    with pytest.raises(UsageError, match=message):
        call(lr_sweep, run("a", 3.5), run("b", 3.5, seed=1, **flags))


@pytest.mark.parametrize("script", [ablations, lr_sweep, sanity, scaling])
def test_a_mistake_is_told_in_one_line(script, run, call, tmp_path):
    (tmp_path / "other.tsv").write_text("task\tvalue\npasskey\t1\n")
    for word, message in (("nowhere", "holds no run"), (run("half", 3.5, made=10), "10 of 20"),
                          ("other.tsv", "does not have the columns")):
        with pytest.raises(UsageError, match=message) as e:
            call(script, word)
        assert "\n" not in str(e.value)


def test_what_is_called_diverged():
    """Half a nat above the least mean over an eighth of the rows, here 2.95."""
    log = [{"step": n, "loss": 6.0 - n / 10} for n in range(1, 33)]
    log.append({"step": 33, "val_loss": 3.0})
    assert common.final_loss(log, False) == 3.0
    assert math.isnan(common.final_loss(log, True))
    for last, diverged in ((3.44, False), (3.46, True), (80.0, True), (INF, True), (NAN, True)):
        log[-1]["val_loss"] = last
        assert math.isnan(common.final_loss(log, False)) == diverged, last
    assert math.isnan(common.final_loss([], False))


def test_diverged_seeds_are_left_out_of_the_mean_and_counted():
    assert common.mean_and_std([2.0, NAN, 4.0]) == (3.0, math.sqrt(2), 1)
    mean, std, diverged = common.mean_and_std([NAN])
    assert math.isnan(mean)
    assert math.isnan(std)
    assert diverged == 1


def test_a_line_is_least_squares_in_the_logarithm():
    """x = 0, 1, 2: slope -1/2, mean 4 at x = 1."""
    a, b = scaling.fit_line([1.0, math.e, math.e**2], [5.0, 3.0, 4.0])
    assert a == pytest.approx(4.5)
    assert b == pytest.approx(-0.5)
    assert scaling.size_at(3.0, (5.0, -0.5)) == pytest.approx(math.e**4)
    assert scaling.fit_line([7, 7], [1.0, 2.0]) is None


def test_saving_at_equal_loss():
    """In the middle of the losses that both have reached."""
    sizes = [100, 200, 400]
    loss = [6 - math.log(n) for n in sizes]
    at, N_m, N_t, saved, std = scaling.saving((sizes, loss), ([n / 0.7 for n in sizes], loss))
    assert at == pytest.approx(6 - math.log(200))
    assert N_m == pytest.approx(200)
    assert N_t == pytest.approx(200 / 0.7)
    assert saved == pytest.approx(0.3)
    assert std == pytest.approx(0, abs=1e-9)
    low = [x - 1 for x in loss]
    at, _, _, saved, _ = scaling.saving((sizes, low), (sizes, loss))
    assert at == pytest.approx((11 - math.log(40_000)) / 2)
    assert saved == pytest.approx(1 - 1 / math.e)


def test_the_deviation_of_a_saving_is_that_of_the_fits():
    """To first order, by NumPy's covariance of a line."""
    sizes, losses = [100, 200, 400, 800], [4.0, 3.4, 2.7, 2.2]
    line, covariance = np.polyfit(np.log(sizes), losses, 1, cov=True)
    b, a = line
    slope = np.array([-(3.0 - a) / b**2, -1 / b])      # of ln N = (3 - a)/b by b and a
    expected = slope @ covariance @ slope
    assert scaling.variance_at(3.0, sizes, losses) == pytest.approx(expected)
    *_, std = scaling.saving((sizes, losses), (sizes, losses))
    at = scaling.variance_at(3.1, sizes, losses)
    assert std == pytest.approx(math.sqrt(2 * at))
    *_, std = scaling.saving((sizes[:2], losses[:2]), (sizes, losses))
    assert math.isnan(std)


@pytest.mark.parametrize("other", [
    ([100, 200], [9.0, 8.0]), ([100, 200], [1.0, 2.0]), ([100], [1.5]), ([], [])])
def test_no_saving_without_a_common_loss_or_a_line_that_falls(other):
    assert scaling.saving(([100, 200], [2.0, 1.0]), other) is None


def test_a_size_is_fitted_at_its_best_rate_by_the_mean_over_the_seeds(run):
    """No loss is better than nan. Three sizes: residuals are one part of (1, -2, 1)."""
    runs = [run("a", 3.5), run("b", 3.7, seed=1), run("c", 3.4, lr="0.25"),
            run("d", 4.0, lr="0.25", seed=1), run("e", 9, psi="3", parameters="20486"),
            run("f", 3.0, psi="3", parameters="20486", lr="0.25"),
            run("g", 2.9, psi="4", parameters="61506")]
    rows = scaling.model_rows(common.read_runs(runs))
    assert [row["lr"] for row in rows] == [0.0625, 0.25] * 2 + [0.0625]
    best = scaling.at_best_rates(rows)
    assert [row["val_loss"] for row in best] == pytest.approx([3.6, 3.0, 2.9])
    assert [row["val_loss"] for row in scaling.at_paper_rates(rows)] == pytest.approx(
        [3.6, NAN, 2.9], nan_ok=True)
    scaling.set_residuals(best, [])
    assert sum(row["residual"] for row in best) == pytest.approx(0)
    assert best[1]["residual"] < 0 < min(best[0]["residual"], best[2]["residual"])
    scaling.set_residuals(best, [4])
    assert [row["residual"] for row in best[:2]] == pytest.approx([0, 0])
    assert best[2]["residual"] > 0.1


def test_moving_average():
    x = np.array([1.0, 2.0, 6.0, 4.0])
    assert training_curves.moving_average(x, 2).tolist() == [1.5, 4.0, 5.0]
    assert training_curves.moving_average(x, 9).tolist() == [3.25]   # all there are
    huge = np.array([1e30, 1.0, 3.0])
    assert training_curves.moving_average(huge, 2)[-1] == 2.0   # a running sum would lose it


@pytest.mark.parametrize("values, spikes", [
    ({}, 0), ({12: 6.9}, 0), ({12: 7.1}, 1), ({12: -20.0}, 0), ({8: 100, 16: 100}, 2),
    ({2: 100}, 0)])
def test_spikes_are_measured_against_the_rows_before_them(values, spikes):
    """Any 4 rows have the mean 2 and the deviation 1: the limit is 7. The first 4 have none."""
    x = np.tile([1.0, 3.0], 10)
    for n, value in values.items():
        x[n] = value
    assert training_curves.count_spikes(x, 4) == spikes


def test_summary_of_a_run():
    step, loss = np.arange(1.0, 11.0), np.arange(10.0, 0.0, -1.0)
    norm = np.array([9.0, 9.0, 9.0, 9.0, 9.0, 5.0, 1.0, 4.0, 2.0, 3.0])
    found = training_curves.summarize_run(step, loss, norm, 4)
    assert found[:4] == [10, 8.5, 2.5, 0]
    assert found[4:] == pytest.approx([3.0, 4.6, 5.0, 0])      # of 1 2 3 4 5, the second half
    rows = [{"step": 1.0}, *({"step": n, "val_loss": x} for n, x in ((2.0, 1.5), (3.0, 1.75)))]
    assert training_curves.least_and_last(rows) == [1.5, 2, 1.75]
    assert training_curves.least_and_last(rows[:1]) == [None] * 3

# ------------------------------------------------------------------------------------ figures

@needs_matplotlib
def test_losses_are_means_over_seeds_by_model_and_rate(run, call, tmp_path, capsys):
    folders = [run("a", 3.5), run("b", 3.7, seed=1), run("c", 3.9, lr="1.0"),
               run("d", 9, lr="1.0", **TRANSFORMER), run("e", 3.8, **TRANSFORMER)]
    call(lr_sweep, *folders, "--out", "o")
    results = lr_sweep.losses_by_rate(common.read_runs(["o/lr_sweep.tsv"]))
    assert list(results) == ["Multiscreen, 4.6K", "Transformer, 2.8K"]
    columns, rows = lr_sweep.rate_table(results)
    assert columns == ["exponent", "rate", "Multiscreen, 4.6K", "std", "Transformer, 2.8K", "std"]
    assert [row[:3] + row[4:5] for row in rows] == [
        [-4, 0.0625, "3.6", "3.8"], [0, 1, "3.9", "1 of 1 diverged"]]
    assert rows[0][3] == pytest.approx(0.2 / math.sqrt(2))
    assert (tmp_path / "o/lr_sweep.png").stat().st_size > 10_000


def test_ablations_are_compared_with_the_original(run, call, capsys):
    folders = [run("a", 3.5), run("b", 3.6, model="multiscreen:no-gate", parameters="4000")]
    call(ablations, *folders, "--out", "o")
    rows = ablations.ablation_rows(common.read_runs(folders))
    assert [row[:4] + [row[6], row[8]] for row in rows] == [
        ["multiscreen", "4626", 1, 3.5, "+0.0000", 3.0966],
        ["multiscreen:no-gate", "4000", 1, 3.6, "+0.1000", 3.1555]]
    more = [run("d", 3.7, seed="1"), run("e", 3.9, seed="2"),
            run("f", 4.0, seed="1", model="multiscreen:no-gate", parameters="4000")]
    rows = ablations.ablation_rows(common.read_runs([*folders, *more]))
    assert rows[1][6] == "+0.2000"                     # by seed: +0.1 and +0.3
    assert rows[1][7] == pytest.approx(0.2 / math.sqrt(2))
    with pytest.raises(UsageError, match="original is missing"):
        call(ablations, folders[1])
    with pytest.raises(UsageError, match="two sizes"):
        call(ablations, *folders, run("c", 3.4, parameters="9"))

    # The paper's table.
    assert [f"{mean - 3.0966:+.4f}" for mean, _ in ablations.PAPER.values()] == [
        "+0.0000", "+0.0266", "+0.0143", "+0.0128", "+0.0589", "+0.0154"]


def test_the_sanity_check_is_against_the_transformer_as_it_is(run, call):
    folders = [run("a", 3.5, **TRANSFORMER), run("b", 3.4, **TRANSFORMER | {"clip": "0.0"}),
               run("c", 3.6, **TRANSFORMER | {"weight_decay": "0.0"}), run("d", 3.3),
               run("e", 3.7, w_th="16.0")]
    rows = sanity.sanity_rows(common.read_runs(folders))
    assert [(row[0], row[5]) for row in rows] == [
        ("Transformer", "+0.0000"), ("Transformer w/o clipping", "-0.1000"),
        ("Transformer w/o weight decay", "+0.1000"), ("Multiscreen, w_th = 256", "-0.2000"),
        ("Multiscreen, w_th = 16", "+0.2000")]
    more = [run("f", 3.4, seed="2", **TRANSFORMER), run("g", 9, seed="3", **TRANSFORMER),
            run("h", 3.8, seed="2", **TRANSFORMER | {"weight_decay": "0.0"})]
    rows = sanity.sanity_rows(common.read_runs([*folders, *more]))
    deviation = {row[0]: row[6] for row in rows}["Transformer w/o weight decay"]
    assert deviation == pytest.approx(statistics.stdev([3.6 - 3.5, 3.8 - 3.4]))    # by seed
    with pytest.raises(UsageError, match="no Transformer"):
        call(sanity, folders[3])


def test_losses_by_size_and_the_lines_through_them(run, call, tmp_path, capsys):
    folders = [run("a", 4.0), run("b", 3.5, psi="1", parameters="486"),
               run("c", 3.9, **TRANSFORMER)]
    call(scaling, *folders, "--out", "o")
    rows = scaling.model_rows(common.read_runs(["o/scaling.tsv"]))
    assert [(row["model"], row["psi"], row["total"], row["non_embedding"]) for row in rows] == [
        ("multiscreen", 1, 486, 486 - 257), ("multiscreen", 2, 4626, 4626 - 4 * 257),
        ("transformer:1,1,8", None, 2848, 2848 - 8 * 257)]
    lines = scaling.fit_rows("best", rows, unfitted=[])
    assert [line[:2] for line in lines] == [
        ["best", "total"], ["best", "non_embedding"], ["best", "psi"]]
    slope = 0.5 / math.log2(4626 / 486)                # through two points
    assert lines[0][2] == pytest.approx(slope)
    assert math.isnan(lines[0][3])
    assert lines[0][4:6] == [None, None]
    assert scaling.fit_rows("best", rows, unfitted=[1])[0][2] is None
    # 1, 0, 0 at ln(size) 0, 1, 2 lie 1/6, -1/3, 1/6 off their line.
    assert scaling.off_line([1, math.e, math.e**2], [1, 0, 0]) == pytest.approx(math.sqrt(1 / 6))


def test_without_a_line_sizes_are_taken_between_neighbours():
    """Multiscreen of 100 and 400 parameters, Transformers of 100 and 1,600; two seeds each."""
    def row(model, total, *losses):
        return {"model": model, "total": total, "non_embedding": total,
                "val_loss": sum(losses) / 2, "losses": dict(enumerate(losses))}

    rows = [row("multiscreen", 100, 4.0, 4.0), row("multiscreen", 400, 3.0, 3.2),
            row("transformer:1,1,8", 100, 4.5, 4.5), row("transformer:2,2,8", 1600, 2.5, 2.5)]
    table = scaling.between_rows(rows)
    # At 4.0 the Transformer has 100 * 16^(1/4) = 200 parameters; at 3.1 it has 100 * 16^(1.4/2).
    at_4, at_31 = table[:2]
    assert at_4[:2] == ["total", 4.0]
    assert at_4[2:4] == pytest.approx([100, 200])
    assert at_4[4:] == ["50%", "0%"]
    assert at_31[1:4] == pytest.approx([3.1, 400, 100 * 16**0.7])
    assert at_31[4] == f"{1 - 4 / 16**0.7:.0%}"
    assert math.isnan(at_31[5])                        # the second seed does not reach 3.1
    assert [line[0] for line in table] == ["total"] * 2 + ["non_embedding"] * 2
    assert math.isnan(scaling.size_between(3.0, [1, 2, 3], [4.0, 2.0, 3.5]))
    assert math.isnan(scaling.size_between(3.0, [1, 2, 3], [4.0, NAN, 2.0]))
    diverged = row("multiscreen", 900, NAN, NAN)
    assert str(scaling.between_rows([*rows, diverged])) == str(table)
    assert scaling.between_rows([diverged]) == []
    assert scaling.between_rows(rows[:2]) == []        # one family alone


@needs_matplotlib
def test_curves_have_a_row_each_run_and_unfinished_ones_too(run, call, tmp_path, capsys):
    folders = [run("a", 3.5), run("b", 9, made=10, lr="1.0"), run("c", 3.5, **TRANSFORMER),
               run("d", 3.5, **TRANSFORMER | {"clip": "0.0"})]
    call(training_curves, *folders, "--window", 2, "--name", "mine", "--out", "o")
    rows = read_table(tmp_path / "o/mine.tsv")
    assert [(row["run"], row["lr"], row["steps"], row["end"]) for row in rows] == [
        ("a", "0.0625", "20", "-"), ("b", "1.0", "10", "diverged"), ("c", "0.0625", "20", "-"),
        ("d", "0.0625", "20", "-")]
    assert (tmp_path / "o/mine.png").stat().st_size > 10_000
    labels = [training_curves.label_curve(common.read_run(folder).flags) for folder in folders]
    assert labels == [
        ("Multiscreen, 4.6K", "$2^{-4}$"), ("Multiscreen, 4.6K", "$2^{0}$"),
        ("Transformer, 2.8K", "$2^{-4}$"), ("Transformer, 2.8K", "w/o clipping")]
    with pytest.raises(UsageError, match="at least 2"):
        call(training_curves, folders[0], "--window", 1)


@needs_matplotlib
@pytest.mark.parametrize("losses, window, begin", [([9, 3, 3, 3], 2, 6), ([4, 4, 90, 90], 9, 4)])
def test_the_loss_axis_ends_above_where_the_curves_begin(run, monkeypatch, losses, window, begin):
    figures = []
    monkeypatch.setattr(training_curves, "save_figure", lambda fig, path: figures.append(fig))
    rows = [{"step": n, "loss": x, "grad_norm": 1.0} for n, x in enumerate(losses)]
    drawn = common.read_run(run("a", 3.5))._replace(rows=rows)
    training_curves.draw_curves(common.pyplot(), [drawn], window, "a.png")
    assert figures[0].axes[0].get_ylim()[1] == pytest.approx(1.2 * begin)


def test_the_picture_of_a_tile_is_what_its_script_draws():
    assert (ROOT / "docs/tile.svg").read_text() == tile.draw()
