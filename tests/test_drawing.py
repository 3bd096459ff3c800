"""Tests of lab.scaling, and of what figures share."""
import math
import os

import pytest

from lab import common, compare, logs, scaling
from lab.scaling import Model
from lab.style import plain_axis
from support.cli import UsageError
from tests.helpers import needs_matplotlib, read_table, write_run
from tests.helpers import run as run_python

NAN = math.nan
TRANSFORMER = {"model": "transformer:1,1,8", "parameters": "2848"}


@pytest.fixture
def run(tmp_path):
    """run(name, last validation loss, made=steps, **flags) -> a folder like train.py's."""
    def write(name, loss, made=20, **flags):
        return write_run(tmp_path / name, [{"step": made, "loss": 3, "val_loss": loss}], **flags)

    return write


def models_of(*folders):
    return scaling.get_models(logs.read_runs(map(str, folders)))


# ------------------------------------------------------------------------------------ scaling

def test_runs_and_a_table_of_runs_are_mixed(run, call, tmp_path, monkeypatch):
    monkeypatch.setattr(scaling, "pyplot", lambda: None)               # no figures
    call(scaling, run("a-0", 3.5), "--out", "o")
    call(scaling, "o/scaling.tsv", run("b-1", 3.7, seed="1"), "--out", "o")
    rows = read_table(tmp_path / "o/scaling.tsv")
    assert [(row["seed"], row["val_loss"]) for row in rows] == [("0", "3.5"), ("1", "3.7")]
    with pytest.raises(UsageError, match="a has seed 0 twice at one rate"):
        call(scaling, "o/scaling.tsv", "a-0", "--out", "o")


def test_what_does_not_compare_is_refused_in_one_line(run, call):
    one = run("one", 3.5)
    for words, message in (([run("half", 3.5, made=10)], "at step 10 of at most 20: rerun"),
                           ([one, run("long", 3.5, seed="1", steps="20", batch_tokens="10")],
                            r"long does not compare with one: batch_tokens 512 \| 10: draw them"),
                           ([one, run("texts", 3.5, seed="1", corpus="c2")],
                            "texts does not compare with one: other texts: draw them separately")):
        with pytest.raises(UsageError, match=message) as e:
            call(scaling, *words)
        assert "\n" not in str(e.value)


def test_a_size_counts_at_its_best_rate_by_the_mean_over_the_seeds(run):
    """A rate with a diverged seed is as good as its others; one without any is not the best."""
    ours = models_of(run("a", 3.5), run("b", 3.7, seed="1"), run("c", 3.4, lr="0.25"),
                     run("d", 4.0, lr="0.25", seed="1"),
                     run("e", "inf", psi="3", parameters="20486"),
                     run("f", 3.0, psi="3", parameters="20486", lr="0.25"),
                     run("g", "nan", psi="4", parameters="61506"))["multiscreen"]
    assert [(model.lr, model.parameters) for model in ours] == [(0.0625, 4626), (0.25, 20486)]
    assert [model.loss() for model in ours] == pytest.approx([3.6, 3.0])
    assert common.mean_and_std([2.0, NAN, 4.0]) == (3.0, math.sqrt(2))


def test_runs_of_one_point_that_differ_in_more_than_the_seed_are_told(run, call, monkeypatch,
                                                                     capsys):
    monkeypatch.setattr(scaling, "pyplot", lambda: None)
    call(scaling, run("a", 3.5), run("b", 3.7, seed="1", weight_decay=0.1))
    lines = capsys.readouterr().out.splitlines()
    assert lines[lines.index("multiscreen, 4626, lr 0.0625: seed 0 | seed 1") + 1] == (
        "  weight_decay - | 0.1")
    with pytest.raises(UsageError, match="passkey .* with abcdigits: other texts"):
        models_of(*(run(name, 3.5, seed=name, data=name, corpus="")
                    for name in ("abcdigits", "passkey")))


def test_the_embedding_has_the_width_of_the_run(run):
    models = models_of(run("a", 4.0, d_E="8", parameters="9238"), run("b", 4.0, **TRANSFORMER))
    assert [model.rest for found in models.values() for model in found] == [
        9238 - 257 * 8, 2848 - 257 * 8]
    numbers = models_of(run("c", 4.0, d_E="8", parameters="9238", tokenizer="65"))
    assert numbers["multiscreen"][0].rest == 9238 - 65 * 8


def test_sizes_are_taken_between_measured_neighbours_and_nowhere_else():
    """Multiscreens of 100 and 400 parameters, Transformers of 100 and 1,600; two seeds each."""
    def model(name, parameters, *losses):
        return Model(name, 1.0, parameters, parameters, dict(enumerate(losses)))

    ours = [model("multiscreen", 100, 4.0, 4.0), model("multiscreen", 400, 3.0, 3.2)]
    theirs = [model("transformer", 100, 4.5, 4.5), model("transformer", 1600, 2.5, 2.5)]
    rows = scaling.equal_losses({"multiscreen": ours, "transformer": theirs})
    # At 4.0 the Transformer has 100 * 16^(1/4) = 200 parameters; at 3.1 it has 100 * 16^(1.4/2).
    assert [row[2] for row in rows] == pytest.approx([4.5, 4.0, 3.1, 2.5])
    assert rows[1][3:7] == [100, 200, "50%", "0%"]
    assert rows[2][3:6] == [400, round(100 * 16**0.7), f"{1 - 4 / 16**0.7:.0%}"]
    assert math.isnan(rows[2][6])                      # the second seed does not reach 3.1
    assert all(math.isnan(x) for row in (rows[0], rows[3]) for x in (row[3], row[5]))
    rising = [model("multiscreen", n, loss) for n, loss in ((1, 4.0), (2, 2.0), (3, 3.5))]
    assert math.isnan(scaling.size_at(3.0, rising, "parameters"))
    assert scaling.equal_losses({"multiscreen": [], "transformer": []}) == []
    alone = scaling.equal_losses({"multiscreen": ours, "transformer": []})
    assert [row[3] for row in alone] == [100, 400] and math.isnan(alone[0][4])


# ------------------------------------------------------------------------------------ figures

@needs_matplotlib
def test_losses_by_size(run, call, monkeypatch):
    found = []
    monkeypatch.setattr(compare, "save_figure", lambda fig, path: found.append(fig))
    call(scaling, run("a", 4.0), run("b", 3.5, psi="1", parameters="486"),
         run("c", 3.9, **TRANSFORMER),
         run("d", 3.8, **TRANSFORMER | {"model": f"{TRANSFORMER['model']}:nope"}), "--out", "o")
    ax, = found[0].axes
    assert [text.get_text() for text in found[0].legends[0].get_texts()] == [
        "Multiscreen, 1 seed", "Transformer, 1 seed"]
    points = [curve.lines[0].get_xydata().tolist() for curve in ax.containers]
    assert points == [[[486, 3.5], [4626, 4.0]], [[2848, 3.9], [2848, 3.8]]]


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


@needs_matplotlib
def test_a_notebooks_backend_that_is_not_installed_stops_no_figure():
    done = run_python("-c", "from lab.common import pyplot; pyplot().subplots()",
                      env=os.environ | {"MPLBACKEND": "module://not_installed_here"})
    assert (done.returncode, done.stderr) == (0, "")


@needs_matplotlib
def test_in_a_notebook_its_own_backend_stays():
    """`%run -m lab.compare` runs in the notebook's process."""
    code = """if True:
        import sys
        from types import SimpleNamespace
        sys.modules["IPython"] = SimpleNamespace(version_info=(9, 0), get_ipython=lambda: None)
        from lab.common import pyplot
        print(pyplot().get_backend())"""
    done = run_python("-c", code, env=os.environ | {"MPLBACKEND": "svg"})
    assert (done.returncode, done.stdout) == (0, "svg\n")
