"""Tests of reading runs, and of experiments.scaling."""
import math

import numpy as np
import pytest

from experiments import common, runs, scaling
from experiments.style import plain_axis
from support.cli import UsageError
from tests.helpers import INF, needs_matplotlib, read_table

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
    """run(name, last validation loss, made=steps, **flags) -> a folder like train.py's."""
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
    found = runs.read_folder(folder)
    assert found.seed == "7"
    assert [column[0] for column in found.curve] == [1, 5.9, 2]
    assert found.losses == {20: 3.5}
    assert found.loss_at() == found.facts["best"] == 3.5
    with open(folder / "log.tsv", "a") as file:
        file.write("21\t3")                            # killed while it wrote a row
    assert runs.read_folder(folder).losses == {20: 3.5}
    (folder / "diverged.txt").write_text("at step 3 the loss is nan\n")
    assert math.isnan(runs.read_folder(folder).loss_at())


def test_runs_and_tables_of_them_are_mixed_and_none_is_lost(run, call, tmp_path, monkeypatch):
    monkeypatch.setattr(scaling, "pyplot", lambda: None)               # no figures
    a, b = run("a-0", 3.5), run("b-1", 3.7, seed=1)
    call(scaling, a, b, "--out", "o")
    table = tmp_path / "o/scaling.tsv"
    before = table.read_bytes()
    call(scaling, table, "--out", "o")
    assert table.read_bytes() == before
    rows = read_table(table)
    assert [(row["seed"], row["val_loss"]) for row in rows] == [("0", "3.5"), ("1", "3.7")]
    assert {row["equations"] for row in rows} == {"abcd"}
    with pytest.raises(UsageError, match="seed 0 twice"):
        call(scaling, table, a, "--out", "o")
    # A run in the table is not lost.
    with pytest.raises(UsageError, match="already holds 1 other row:"):
        call(scaling, a, "--out", "o")
    assert table.read_bytes() == before
    # Runs that went on have new values.
    for folder in (a, b):
        flags = (folder / "flags.txt").read_text()
        (folder / "flags.txt").write_text(flags.replace("steps\t20", "steps\t30"))
        with open(folder / "log.tsv", "a") as file:
            file.write("30\t\t\t3.25\n")
    call(scaling, a, b, "--out", "o")
    assert [row["val_loss"] for row in read_table(table)] == ["3.25", "3.25"]


@pytest.mark.parametrize("name", ["steps", "data", "corpus"])
def test_sizes_of_another_budget_are_refused(run, call, name):
    with pytest.raises(UsageError, match=f"differ in {name}"):
        call(scaling, run("a", 3.5), run("b", 3.5, seed=1, **{name: "10"}))


def test_a_mistake_is_told_in_one_line(run, call, tmp_path):
    (tmp_path / "other.tsv").write_text("task\tvalue\npasskey\t1\n")
    bad = run("bad", 3.5)
    (bad / "log.tsv").write_text("loss\n1\n")
    empty = run("empty", 3.5)
    (empty / "flags.txt").write_text("psi\t2\n")
    for word, message in (("nowhere", "holds no run"), (run("half", 3.5, made=10), "10 of 20"),
                          (run("cut", ""), "20 of 20"), (bad, "is not a log"),
                          ("other.tsv", "not a table of runs"), (empty, "lacks model, parameters")):
        with pytest.raises(UsageError, match=message) as e:
            call(scaling, word)
        assert "\n" not in str(e.value)


def test_what_is_called_diverged():
    """The last eighth's mean is half a nat above the lowest eighth's, here 2.95 over 4 rows.

    A validation loss counts only if it is not finite: it also rises when texts are memorized.
    """
    log = [{"step": n, "loss": 6.0 - n / 10} for n in range(1, 33)]
    assert not runs.has_diverged(log)
    for last, diverged in ((3.44, False), (3.46, True), (80.0, True), (INF, True), (NAN, True)):
        end = [{"step": 33 + n, "loss": last} for n in range(4)]
        assert runs.has_diverged(log + end) == diverged, last
    assert not runs.has_diverged([])
    for last, diverged in ((5.0, False), (INF, True), (NAN, True)):
        assert runs.has_diverged(log + [{"step": 33, "val_loss": last}]) == diverged, last


def test_diverged_seeds_are_left_out_of_the_mean_and_counted():
    assert common.mean_and_std([2.0, NAN, 4.0]) == (3.0, math.sqrt(2), 1)


def test_the_size_at_a_loss_and_no_line_through_equal_sizes():
    assert scaling.size_at(3.0, (5.0, -0.5)) == pytest.approx(math.e**4)
    assert scaling.fit_line([7, 7], [1.0, 2.0]) is None


def test_saving_at_equal_loss():
    """Taken in the middle of the losses that both reached."""
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
    """To first order, from NumPy's covariance of a line."""
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
    """A rate with a nan is not the best. Three sizes leave residuals of the form c (1, -2, 1)."""
    folders = [run("a", 3.5), run("b", 3.7, seed=1), run("c", 3.4, lr="0.25"),
               run("d", 4.0, lr="0.25", seed=1), run("e", "inf", psi="3", parameters="20486"),
               run("f", 3.0, psi="3", parameters="20486", lr="0.25"),
               run("g", 2.9, psi="4", parameters="61506")]
    rows = scaling.model_rows(runs.read_runs(map(str, folders)))
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


def test_runs_that_differ_are_not_one_model_without_a_word(run, capsys):
    folders = [run("a-0", 4.0), run("a-1", 4.0, seed="1"), run("a-2", 4.0, seed="2", warmup="9")]
    row, = scaling.model_rows(runs.read_runs(map(str, folders)))
    assert row["seeds"] == 3
    assert capsys.readouterr().out == ("note: a, seed 2, and a, seed 0, count as one model, but "
                                       "differ in warmup: experiments.compare shows how\n")
    change = "from step 9: --lr 0.0625, before 1"
    alone = run("b-0", 4.0, changes=change, init_weights="0123456789ab")
    scaling.model_rows(runs.read_runs([str(alone)]))
    assert capsys.readouterr().out == (
        f"note: b, seed 0: it began with the weights of --init\nnote: b, seed 0: {change}\n")


def test_the_embedding_has_the_width_of_the_run(run):
    row, = scaling.model_rows(runs.read_runs([str(run("a", 4.0, d_E="8", parameters="9238"))]))
    assert row["non_embedding"] == 9238 - 257 * 8


def test_a_parabola_through_three_rates_has_the_least_loss(run):
    """(log2(lr) + 5)^2 / 10 + 3 at 2^-6, 2^-4 and 2^-2: the minimum, 3, is between two rates."""
    folders = [run(f"a{n}", (n + 5) ** 2 / 10 + 3, lr=str(2.0**n)) for n in (-6, -4, -2)]
    folders += [run("b", 3.5, psi="3", parameters="20486")]
    rows = scaling.at_parabolas(scaling.model_rows(runs.read_runs(map(str, folders))))
    assert [row["val_loss"] for row in rows] == pytest.approx([3.0, 3.5])
    assert rows[0]["losses"] == pytest.approx({"0": 3.0})
    assert scaling.lowest([1, 2, 4], [1.0, 3.0, 2.0]) == 1.0
    # This falling curve is almost a line: its vertex, at 2^50, would have a loss of -10.
    assert scaling.lowest([1, 2, 4], [3.0, 2.5, 2.01]) == pytest.approx(2.01)


# ------------------------------------------------------------------------------------ figures

@needs_matplotlib
def test_a_logarithmic_axis_has_ticks_however_little_it_spans():
    plt = common.pyplot()
    for high in (8.0, 11.0, 30.0, 7e5):
        fig, ax = plt.subplots()
        ax.semilogy([7.3, high])
        plain_axis(plt, ax.yaxis)
        low, top = ax.get_ylim()
        assert sum(low < y < top for y in ax.get_yticks()) > 1
        plt.close(fig)


def test_losses_by_size_and_the_lines_through_them(run, call, tmp_path, capsys):
    folders = [run("a", 4.0), run("b", 3.5, psi="1", parameters="486"),
               run("c", 3.9, **TRANSFORMER)]
    call(scaling, *folders, "--out", "o")
    rows = scaling.model_rows(runs.read_runs(["o/scaling.tsv"]))
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
    """Multiscreens of 100 and 400 parameters, Transformers of 100 and 1,600; two seeds each."""
    def row(model, total, *losses):
        return {"model": model, "total": total, "non_embedding": total,
                "val_loss": sum(losses) / 2, "losses": dict(enumerate(losses))}

    rows = [row("multiscreen", 100, 4.0, 4.0), row("multiscreen", 400, 3.0, 3.2),
            row("transformer:1,1,8", 100, 4.5, 4.5), row("transformer:2,2,8", 1600, 2.5, 2.5)]
    table = scaling.between_rows(rows)
    # At 4.0 the Transformer has 100 * 16^(1/4) = 200 parameters; at 3.1 it has 100 * 16^(1.4/2).
    at_4, at_31 = table[:2]
    assert at_4[:2] == ["total", 4.0]
    assert at_4[2:4] == [100, 200]
    assert at_4[4:] == ["50%", "0%"]
    assert at_31[1:4] == pytest.approx([3.1, 400, round(100 * 16**0.7)])
    assert at_31[4] == f"{1 - 4 / 16**0.7:.0%}"
    assert math.isnan(at_31[5])                        # the second seed does not reach 3.1
    assert [line[0] for line in table] == ["total"] * 2 + ["non_embedding"] * 2
    assert math.isnan(scaling.size_between(3.0, [1, 2, 3], [4.0, 2.0, 3.5]))
    assert math.isnan(scaling.size_between(3.0, [1, 2, 3], [4.0, NAN, 2.0]))
    diverged = row("multiscreen", 900, NAN, NAN)
    assert str(scaling.between_rows([*rows, diverged])) == str(table)
    assert scaling.between_rows([diverged]) == []
    assert scaling.between_rows(rows[:2]) == []        # a single family
