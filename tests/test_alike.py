"""Tests of lab/alike.py: what stands in one figure, table or mean was measured alike."""
import math
import re
import statistics
import string
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.cli import UsageError
from lab import alike, compare, curves, figures, mechanisms, paired, plots, runs, scaling, tiles
from support.run import read_flags
from support.tables import RUN, named_paths, write_table
from support.tasks import ABCDigitsStream, PasskeyStream
from tests.helpers import RUN_FLAGS, needs_matplotlib, write_run
from tests.inputs import draws

TRAINED = {"model": "m", "parameters": "10", "seed": "0", "seq_len": "16", "tokenizer": "bytes",
           "dtype": "float32", "step": "20", "swe": "", "factor": ""}
USUAL = {
    "perplexity": {"data": "a.txt", "window": "0.3", "positions": "32 45 64 91", "document": "a 1",
                   "nats": "1 2 3 4"},
    "copying": {"data": "a.txt", "before": "0", "candidates": "1", "ends": "same another",
                "distances": "64 128", "string": "0 1", "nats": "1 2 3 4", "right": "",
                "beaten": ""},
    "retrieval": {"digits": "2", "length": "256", "depth": "0.5", "trials": "10", "accuracy": "1"}}
KINDS = {"perplexity": alike.PERPLEXITY, "copying": alike.COPYING, "retrieval": alike.RETRIEVAL}
# What says how a number was measured: equal in the whole figure.
PROTOCOL = {"perplexity": ["data", "window", "positions"],
            "copying": ["data", "before", "candidates", "ends", "distances"],
            "retrieval": ["digits", "trials"]}
TEXT = ("corpus", "tokenizer", "seq_len", "digits")
WORDS = st.text(string.ascii_letters + string.digits, min_size=1, max_size=6)


def row_of(name, **cells):
    """A row of a kind of table."""
    return TRAINED | USUAL[name] | cells | {"hash": "w-c"}


def table(path, name, *rows):
    """A table of measurements. rows: what is special in each, dicts."""
    assert TRAINED.keys() >= set(RUN)
    write_table(path, [row_of(name, **row) for row in rows])
    return path


def log_of(loss):
    """Rows of a log that ends at this validation loss."""
    return [*({"step": n, "loss": 2.0} for n in range(1, 20)), {"step": 10, "val_loss": 3.0},
            {"step": 20, "val_loss": loss}]


def differ(column, one, other):
    """A pattern for the error of two values of a column."""
    return re.escape(f"differ in {column} ({one} | {other})")


@st.composite
def two_values(draw, usual=None):
    """Two values of a column, the first one as it usually is."""
    one = draw(WORDS) if usual is None else usual
    return one, draw(WORDS.filter(lambda other: other != one))


# ----------------------------------------------------------------------------- rows of measurements

@given(st.data(), st.sampled_from(sorted(KINDS)))
def test_two_measurements_of_one_figure_differ_in_no_column_of_their_protocol(data, name):
    """Also in none that nobody has thought of yet."""
    new = data.draw(st.text(string.ascii_lowercase, min_size=9, max_size=12), "a new column")
    column = data.draw(st.sampled_from([*PROTOCOL[name], "tokenizer", "dtype", new]))
    one, other = data.draw(two_values((TRAINED | USUAL[name]).get(column)))
    with tempfile.TemporaryDirectory() as folder:
        paths = [table(Path(folder) / f"{model}.tsv", name, {"model": model, column: value})
                 for model, value in (("m", one), ("t", other))]
        assert len(alike.read_measurements(paths[:1], KINDS[name])) == 1
        with pytest.raises(UsageError, match=differ(column, one, other)):
            alike.read_measurements(paths, KINDS[name])


@given(st.data(), st.sampled_from(sorted(KINDS)))
def test_what_the_figure_varies_may_differ(data, name):
    kind, item = KINDS[name], {"perplexity": "document", "copying": "string", "retrieval": "depth"}
    column = data.draw(st.sampled_from(["seed", "step", "hash", "swe", "factor", item[name]]))
    rows = [row_of(name), row_of(name, model="t", **{column: "7"})]
    alike.require_alike({"m": rows[:1], "t": rows[1:]}, kind)
    alike.require_alike({"m": rows}, kind)


def test_runs_may_have_read_the_same_texts_at_two_places():
    rows = [{"seed": n, "val_loss": 1.0, "corpus": "1 file", "data": f"{n}/a.txt",
             "val": f"{n}/v.txt"} for n in (0, 1)]
    alike.require_alike({"m": rows}, alike.RUNS)
    with pytest.raises(UsageError, match="differ in corpus"):
        alike.require_alike({"m": [rows[0], rows[1] | {"corpus": "2 files"}]}, alike.RUNS)


@given(st.sampled_from(sorted(KINDS)), st.sampled_from(["seq_len", "parameters"]), two_values())
def test_a_label_is_one_model(name, column, values):
    rows = [row_of(name, seed=seed, **{column: x}) for seed, x in zip("01", values)]
    with pytest.raises(UsageError, match="the runs of m " + differ(column, *values)):
        alike.require_alike({"m": rows}, KINDS[name])
    alike.require_alike({"m": rows[:1], "t": rows[1:]}, KINDS[name])


def test_a_column_that_one_tool_has_and_another_lacks_is_a_difference(tmp_path):
    a = table(tmp_path / "a.tsv", "retrieval", {})
    row = row_of("retrieval", model="t")
    del row["digits"]
    write_table(tmp_path / "b.tsv", [row])
    with pytest.raises(UsageError, match=differ("digits", "2", "(none)")):
        alike.read_measurements([a, tmp_path / "b.tsv"], alike.RETRIEVAL)


def test_an_old_table_without_tokenizer_and_dtype_is_drawn_beside_a_new_one(tmp_path):
    row = row_of("copying")
    del row["tokenizer"], row["dtype"]
    write_table(tmp_path / "old.tsv", [row])
    new = table(tmp_path / "new.tsv", "copying", {"model": "t"})
    assert len(alike.read_measurements([tmp_path / "old.tsv", new], alike.COPYING)) == 2


def test_texts_of_one_name_that_have_nothing_in_common_are_not_drawn():
    rows = [row_of("perplexity"), row_of("perplexity", model="t", document="a 2")]
    with pytest.raises(UsageError, match="no document in common"):
        figures.perplexity(rows)


@given(st.lists(st.tuples(st.sampled_from("mt"), st.integers(0, 2), st.integers(0, 1),
                          st.integers(0, 2)), min_size=1, unique=True))
def test_a_mean_is_over_the_items_that_all_curves_have_at_each_place(measured):
    """measured: which (model, seed, length, depth) a table has."""
    rows = [row_of("retrieval", model=model, seed=str(seed), length=str(256 * 2**length),
                   depth=str(depth), accuracy=str(hash((model, seed, length, depth)) % 11))
            for model, seed, length, depth in measured]
    lengths = sorted({length for _, _, length, _ in measured})
    runs_at = {x: {(model, seed) for model, seed, length, _ in measured if length == x}
               for x in lengths}
    common = {x: [depth for depth in range(3)
                  if all((*run, x, depth) in measured for run in runs_at[x])] for x in lengths}
    if not all(common.values()):
        with pytest.raises(UsageError, match="no depth in common"):
            curves.retrieval_curves(rows, plain=True)
        return
    _, means = curves.retrieval_curves(rows, plain=True)
    for curve in means:
        for length in lengths:
            expected = {str(seed): statistics.fmean(
                float(row["accuracy"]) for row in rows if row["model"] == model
                and row["seed"] == str(seed) and row["length"] == str(256 * 2**length)
                and int(row["depth"]) in common[length])
                for model, seed in runs_at[length] if model == curve.model}
            assert curve.points.get(256 * 2**length, {}) == pytest.approx(expected)


@pytest.mark.parametrize("figure", figures.OF_ROWS)
def test_a_table_of_another_tool_is_refused_in_a_line(call, tmp_path, figure):
    for name in USUAL:
        table(tmp_path / f"{name}.tsv", name, {})
    own = {"perplexity": "perplexity", "retrieval": "retrieval"}.get(figure, "copying")
    for name in USUAL.keys() - {own}:
        with pytest.raises(UsageError, match=f"{name}.tsv is no table of {KINDS[own].tool}"):
            call(figures, figure, f"{name}.tsv")


@pytest.mark.parametrize("script, words, tool", [
    (figures, ["latency"], "lab.bench"), (tiles, [], "lab.tiles"),
    (mechanisms, [], "lab.mechanisms"), (compare, [], "lab.compare --table"),
    (scaling, [], "lab.compare --table")])
def test_every_other_reader_of_tables_refuses_those_of_another_tool(call, tmp_path, script, words,
                                                                    tool):
    table(tmp_path / "t.tsv", "perplexity", {})
    with pytest.raises(UsageError, match=f"t.tsv is no table of {tool}"):
        call(script, *words, "t.tsv")


# ------------------------------------------------------------------------------- runs of train.py

def logged(label, seed=0, loss=1.0, diverged=False, **flags):
    """A run of train.py."""
    flags = {name: str(x) for name, x in (RUN_FLAGS | {"seed": seed} | flags).items()}
    facts = dict.fromkeys(alike.FACTS, math.nan)
    return runs.LoggedRun(label, flags, {20: loss}, lambda step: facts, diverged, {})


@given(st.sampled_from(TEXT), two_values())
def test_losses_on_two_texts_or_tasks_stand_in_no_table(column, values):
    both = [logged(label, **{column: x}) for label, x in zip("ab", values)]
    for put_together in (compare.compare, scaling.get_models):
        with pytest.raises(UsageError, match=differ(column, *values)):
            put_together(both)


@needs_matplotlib
@pytest.mark.parametrize("column", TEXT)
def test_losses_on_two_texts_or_tasks_stand_in_no_figure(tmp_path, column):
    write_run(tmp_path / "a-0", log_of(1.0), **{column: "1"})
    write_run(tmp_path / "b-0", log_of(1.0), **{column: "2"})
    for figure in (figures.changes, figures.losses, figures.logs):
        with pytest.raises(UsageError, match=differ(column, 1, 2)):
            figure([tmp_path / "a-0", tmp_path / "b-0"])


def test_the_corpus_of_a_task_names_the_task_also_of_an_old_run(tmp_path):
    for stream, task in ((ABCDigitsStream, "abcdigits"), (PasskeyStream, "passkey")):
        write_run(tmp_path / task, log_of(1.0), corpus="documents of a task", data=task)
        assert stream.corpus == read_flags(tmp_path / task)["corpus"]
        assert stream.corpus == f"documents of {task}"


@given(st.sampled_from(["warmup", "clip", "dtype", "lr", "weight_decay", "kernel", "steps", "init",
                        "model", "batch_size", "psi", "a_new_flag"]), two_values())
def test_runs_of_one_mean_differ_in_no_flag_but_the_seed(flag, values):
    both = [logged("a", seed, **{flag: x}) for seed, x in enumerate(values)]
    with pytest.raises(UsageError, match="the runs of a " + differ(flag, *values)):
        compare.compare(both)
    rows, _, _ = compare.compare([logged(label, **{flag: x}) for label, x in zip("ab", values)])
    assert [row["run"] for row in rows] == ["a", "b"]
    rows, _, _ = compare.compare(both, by=flag)
    assert [row["seeds"] for row in rows] == ["1 (0)", "1 (1)"]


@given(st.sampled_from(["warmup", "clip", "dtype", "weight_decay", "kernel", "w_th", "init",
                        "a_new_flag"]), two_values(), st.booleans())
def test_a_family_in_scaling_differs_only_in_its_size_and_what_is_adapted_to_it(flag, values,
                                                                                is_same_size):
    psi = [2, 2 if is_same_size else 3]
    both = [logged("a", seed=n, psi=psi[n], parameters=4626 * psi[n], batch_size=psi[n], lr=n,
                   **{flag: x}) for n, x in enumerate(values)]
    with pytest.raises(UsageError, match="the runs of multiscreen " + differ(flag, *values)):
        scaling.get_models(both)


def test_scaling_has_no_family_of_unlike_models():
    both = [logged("a"), logged("b", model="multiscreen:no-gate", parameters=25403)]
    with pytest.raises(UsageError, match=differ("variant", "(none)", "no-gate")):
        scaling.get_models(both)
    names = "transformer:2,2,28", "transformer:2,2,28:qknorm", "multiscreen:a.B"
    assert [scaling.family_and_variant(logged("a", model=name)) for name in names] == [
        ("transformer", ""), ("transformer", "qknorm"), ("multiscreen", "a.B")]
    with pytest.raises(UsageError, match="a is neither a multiscreen nor a transformer"):
        scaling.get_models([logged("a", model="mine.Tiles")])


def test_a_path_that_exists_is_no_pattern(tmp_path):
    for name in ("x[1]", "x1"):
        (tmp_path / name).mkdir()
    assert named_paths([f"{tmp_path}/x[1]", f"m={tmp_path}/x[1]", f"m={tmp_path}/x?"]) == [
        ("", f"{tmp_path}/x[1]"), ("m", f"{tmp_path}/x[1]"), ("m", f"{tmp_path}/x1")]


# ------------------------------------------------------------------------ which seeds are in a mean

def test_the_seeds_of_a_mean_are_named_and_one_seed_has_no_deviation():
    assert [alike.seeds_in_words(x) for x in ([], ["3"], ["5", "0"], ["2", "0", "1"])] == [
        "0", "1 (3)", "2 (0 5)", "3 (0-2)"]
    assert alike.mean_in_words([0.5], 2) == "0.50" and alike.mean_in_words([], 2) == "-"


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=1, max_size=5,
                unique_by=lambda x: x[0]),
       st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=1, max_size=5,
                unique_by=lambda x: x[0]))
def test_a_row_names_the_seeds_of_its_mean_those_that_diverged_and_the_pairs_of_a_change(a, b):
    """a, b: (seed, whether it diverged)"""
    good = [{seed for seed, diverged in group if not diverged} for group in (a, b)]
    both = [logged(label, seed, n + seed**2, diverged) for n, (label, group) in enumerate(
        (("a", a), ("b", b))) for seed, diverged in group]
    if not good[0] | good[1]:
        with pytest.raises(UsageError, match="all of these runs have diverged"):
            compare.compare(both)
        return
    rows, _, _ = compare.compare(both)
    for n, (row, group) in enumerate(zip(rows, (a, b))):
        assert row["seeds"] == alike.seeds_in_words(good[n])
        assert row["diverged"] == alike.seeds_in_words({seed for seed, _ in group} - good[n])
        if good[n]:
            assert row["val_loss"] == pytest.approx(statistics.fmean(x**2 + n for x in good[n]))
    assert rows[1]["pairs"] == alike.seeds_in_words(good[0] & good[1])
    if good[0] & good[1]:
        assert rows[1]["change"] == pytest.approx(1)


@given(st.integers(0, 9))
def test_a_seed_counts_once(seed):
    with pytest.raises(UsageError, match=f"a has seed {seed} twice"):
        compare.compare([logged("a", seed), logged("a", seed)])
    with pytest.raises(UsageError, match=f"multiscreen, 4626, lr 0.0625 has seed {seed} twice"):
        scaling.get_models([logged("a", seed), logged("b", seed)])
    row = {"model": "m", "seed": str(seed), "what": "loss", "length": "", "setting": "",
           "value": "1"}
    with pytest.raises(UsageError, match=f"m has seed {seed} twice in loss"):
        mechanisms.get_lines([row, row | {"value": "2"}])


def measured_run(folder, *rows, seed=0, loss=1.0, **flags):
    """A run with a table of perplexities."""
    write_run(folder, log_of(loss), seed=seed, **flags)
    table(folder / "perplexity.tsv", "perplexity", *({"seed": str(seed)} | row for row in rows))


@needs_matplotlib
def test_a_seed_that_was_measured_in_two_ways_is_no_mean_of_two_among_mechanisms(call, tmp_path,
                                                                                 capsys):
    measured_run(tmp_path / "m-0", {}, {"window": "0.02", "nats": "1 2 3 9"})
    write_run(tmp_path / "k-0", [*log_of(1.0), {"step": 20, "needle": 0.9}], data="abcdigits",
              corpus="documents of abcdigits", steps=20)
    table(tmp_path / "k-0/abcdigits.tsv", "retrieval", {})
    with pytest.raises(UsageError, match=differ("window", "0.3", "0.02")):
        call(mechanisms, "m=?-0")
    table(tmp_path / "m-0/perplexity.tsv", "perplexity", {})
    capsys.readouterr()
    call(mechanisms, "m=?-0")
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].split() == ["m", "1.000", f"{math.e:.2f}", "100", "1", "of", "1"]


def test_the_columns_of_mechanisms_have_one_order():
    lines = {("a", ""): {("needles", 256): {}},
             ("b", ""): {("needles", 64): {}, ("loss", 0): {}}}
    assert mechanisms.columns_of(lines) == [("loss", 0), ("needles", 64), ("needles", 256)]


@needs_matplotlib
def test_a_run_that_diverged_is_in_no_mean_and_is_counted(call, tmp_path, capsys):
    for seed in (0, 1, 2):
        measured_run(tmp_path / f"a-{seed}", {}, seed=seed)
        measured_run(tmp_path / f"b-{seed}", {}, seed=seed, loss=1.0 + seed)
    (tmp_path / "b-2/diverged.txt").write_text("at step 9")
    call(mechanisms, "a=a-*", "b=b-*")
    assert "1.500 ± 0.707, seeds 2 (0 1), diverged 1 (2)" in capsys.readouterr().out
    fig = figures.changes(["a-0", "a-1", "a-2", "b-0", "b-1", "b-2"])
    assert [label.get_text() for label in fig.axes[0].get_yticklabels()] == [
        "a, 3 seeds", "b, 2 seeds, 1 diverged"]
    *_, line, verdict = capsys.readouterr().out.splitlines()
    assert re.split(" {2,}", line.strip())[:3] == ["b", "2 (0 1)", "1 (2)"]
    assert verdict.startswith("b: no difference from a is shown: +0.5000, 95 % interval -5.8531")
    fig = figures.losses(["a-0", "a-1", "a-2", "b-0", "b-1", "b-2"])
    labels = fig.axes[0].get_legend_handles_labels()[1]
    assert {"a, 3 seeds", "b, 2 seeds"} < set(labels)


# ----------------------------------------------------------------------- what a picture cannot show

def test_perplexities_that_end_before_64_tokens_are_no_table_of_mechanisms(call, tmp_path):
    measured_run(tmp_path / "m-0", {"positions": "32", "nats": "1"})
    with pytest.raises(UsageError, match="of 32 tokens: measure with --length 128 or more"):
        call(mechanisms, "m=m-0")


@pytest.mark.parametrize("flag, value", [("kernel", "auto"), ("model", "multiscreen")])
def test_there_is_no_axis_for_words_and_the_table_is_printed(tmp_path, flag, value, capsys):
    write_run(tmp_path / "a-0", log_of(1.0), **{flag: value})
    with pytest.raises(UsageError, match=f"--by {flag}: {value} is no number"):
        figures.losses([tmp_path / "a-0"], flag)
    assert f"a, {flag} {value}" in capsys.readouterr().out


@needs_matplotlib
def test_a_band_is_one_standard_deviation_around_the_mean():
    curve = curves.Curve("m", {1: {"0": 1.0, "1": 3.0}, 2: {"0": 5.0, "1": 9.0}})
    _, ax = plots.pyplot().subplots()
    plots.draw_curves(ax, [curve], plots.looks([curve]))
    band = ax.collections[0].get_paths()[0].vertices
    assert ax.lines[0].get_ydata().tolist() == [2.0, 7.0]
    for x, mean, std in ((1, 2.0, 2**0.5), (2, 7.0, 8**0.5)):
        y = band[band[:, 0] == x, 1]
        assert (y.min(), y.max()) == pytest.approx((mean - std, mean + std))


def test_a_mean_says_how_many_items_it_leaves_out(capsys):
    one = curves.Curve("a", {(64, "x"): {"0": 1.0}, (64, "y"): {"0": 3.0}})
    other = curves.Curve("b", {(64, "x"): {"0": 5.0}})
    means = curves.mean_over_items([one, other], "document")
    assert [curve.points for curve in means] == [{(64,): {"0": 1.0}}, {(64,): {"0": 5.0}}]
    said = "Each mean is over 1 document; left out, because not every curve has it: 1\n"
    assert capsys.readouterr().out.endswith(said)


@needs_matplotlib
@draws(10)
@given(st.lists(st.sampled_from([0.0, 0.001, 0.01, 0.1, 1.0]), min_size=1, max_size=4,
                unique=True))
def test_every_value_is_in_sight_on_a_logarithmic_axis_also_0(values):
    plt = plots.pyplot()
    fig, ax = plt.subplots()
    ax.plot(sorted(values), [1.0] * len(values))
    plots.logarithmic(ax.set_xscale, values)
    fig.canvas.draw()
    points = [(x, 1.0) for x in sorted(values)]
    places = ax.transAxes.inverted().transform(ax.transData.transform(points))[:, 0]
    plt.close(fig)
    assert ((0 <= places) & (places <= 1)).all() and (np.diff(places) > 0.05).all()


@needs_matplotlib
def test_a_flag_or_a_gradient_norm_of_0_is_in_the_figure(tmp_path):
    for n, value in enumerate((0.0, 0.01, 0.1)):
        log = [*log_of(1.0 + n), {"step": 5, "grad_norm": 0.0}, {"step": 6, "grad_norm": 1.0}]
        write_run(tmp_path / f"a{n}-0", log, weight_decay=value)
    losses = figures.losses([f"m={tmp_path}/a*"], "weight_decay").axes[0]
    assert losses.lines[0].get_xdata().tolist() == [0, 0.01, 0.1]
    _, norms = figures.logs([tmp_path / "a0-0"]).axes
    assert losses.get_xscale() == norms.get_yscale() == "symlog"


def test_without_matplotlib_the_numbers_are_printed_and_a_line_says_what_is_missing(
        call, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    measured_run(tmp_path / "m-0", {})
    for name in ("copying", "retrieval"):
        table(tmp_path / f"{name}.tsv", name, {})
    write_table(tmp_path / "latency.tsv", [
        {"model": "m", "parameters": "9", "what": "forward", "setting": "flash", "length": "64",
         "machine": "here", "ms": "1 2", "parts_ms": ""}])
    for script, *words in (
            (figures, "perplexity", "m-0/perplexity.tsv"), (figures, "copying", "copying.tsv"),
            (figures, "gain", "copying.tsv"), (figures, "copying_steps", "copying.tsv"),
            (figures, "retrieval", "retrieval.tsv"), (figures, "losses", "m-0"),
            (figures, "changes", "m-0"), (figures, "logs", "m-0"), (mechanisms, "m=m-0"),
            (figures, "latency", "latency.tsv"), (scaling, "m-0")):
        with pytest.raises(UsageError, match="the picture needs matplotlib: pip install"):
            call(script, *words)
        assert len(capsys.readouterr().out.splitlines()) > 2, words


# ------------------------------------------------------------------------- differences, by seed

@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.floats(0.001, 0.999))
def test_p_is_the_tail_of_students_t(freedom, p):
    """Against its density, integrated numerically; t_of_p is the inverse."""
    t = paired.t_of_p(p, freedom)
    assert paired.p_of_t(t, freedom) == paired.p_of_t(-t, freedom) == pytest.approx(p, rel=1e-6)
    # With t = sqrt(freedom) tan(angle) the density is cos(angle) ** (freedom - 1) up to a factor.
    limit = math.atan(t / math.sqrt(freedom))
    inside, whole = (np.trapezoid(np.cos(x) ** (freedom - 1), x)
                     for x in (np.linspace(0, limit, 5001), np.linspace(0, math.pi / 2, 5001)))
    assert inside / whole == pytest.approx(1 - p, abs=1e-5)


def test_a_difference_is_paired_by_seed():
    x = paired.difference({"0": 5.0, "1": 7.0, "9": 99.0}, {"1": 4.0, "0": 1.0, "2": 0.0})
    assert (x.seeds, x.mean, x.std) == (["0", "1"], 3.5, pytest.approx(0.5**0.5))
    assert x.t == pytest.approx(7) and x.p == pytest.approx(1 - 2 / math.pi * math.atan(7))
    for one in ({"0": 5.0}, {}, {"4": 1.0}):
        assert math.isnan(paired.difference(one, {"0": 4.0}).p)


@given(st.lists(st.floats(0, 0.12), min_size=1, max_size=9))
def test_holm_rejects_step_by_step(p_values):
    """The smallest p is compared with 5 % over all, the next over one less, until one is larger."""
    rejected = set()
    for n, place in enumerate(sorted(range(len(p_values)), key=lambda place: p_values[place])):
        if p_values[place] > 0.05 / (len(p_values) - n):
            break
        rejected.add(p_values[place])
    corrected = paired.holm(p_values)
    for p, of_all in zip(p_values, corrected):
        assert min(p, 1) <= of_all <= 1
        if abs(of_all - 0.05) > 1e-9:
            assert (of_all < 0.05) == (p in rejected)
    with_none = paired.holm([math.nan, *p_values])
    assert math.isnan(with_none[0]) and with_none[1:] == corrected


def test_the_error_over_seeds_and_strings_is_that_of_drawing_both_anew():
    rng = np.random.default_rng(0)
    means, errors = [], []
    for _ in range(4000):
        table = rng.normal(size=(3, 1)) + rng.normal(size=(1, 10)) + 3 * rng.normal(size=(3, 10))
        means.append(table.mean())
        errors.append([x**2 for x in paired.standard_errors(table)])
    over_seeds, over_strings, both = np.mean(errors, axis=0)
    assert both == pytest.approx(np.var(means), rel=0.1)
    assert over_seeds == pytest.approx(1 / 3 + 9 / 30, rel=0.1)
    assert over_strings == pytest.approx(1 / 10 + 9 / 30, rel=0.1)


def test_the_share_among_many_is_that_of_as_good_an_observer():
    rng = np.random.default_rng(0)
    right = 1.5 + rng.normal(size=200_000)
    others = rng.normal(size=(200_000, 7))
    of_two, of_eight = (right > others[:, 0]).mean(), (right > others.max(axis=1)).mean()
    assert paired.share_among(8, of_two) == pytest.approx(of_eight, abs=0.01)
    assert paired.share_among(2, 0.8) == pytest.approx(0.8, abs=1e-6)
    assert math.isnan(paired.share_among(8, 1.0))
