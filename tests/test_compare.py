"""Tests of lab.compare: groups, changes and differences of anybody's runs."""
import math

import numpy as np
import pytest

from lab import common, compare, logs
from support.cli import UsageError
from tests.helpers import needs_matplotlib, write_run

NAN = math.nan
SOURCE = "class Model:\n    def power(self):\n        return 2\n\n\ndef other():\n    return 3\n"


@pytest.fixture
def run(tmp_path):
    """run(name, {step: validation loss}, made=steps, source=text, **flags) -> a run's folder."""
    def write(name, losses, made=None, source=SOURCE, **flags):
        log = [{"step": n, "loss": f"{6 - n / 10:g}", "grad_norm": 1 + n % 3,
                "tokens_per_s": 100 + n, "w_max": 10 + n, "alive": 0.5,
                "val_loss": losses.get(n, "")}
               for n in range(1, (made or max(losses, default=1)) + 1)]
        folder = write_run(tmp_path / name, log, **flags)
        (folder / "source").mkdir()
        (folder / "source/multiscreen.py").write_text(source)
        (folder / "source/train.py").write_text("betas = (0.9, 0.95)\n")
        return folder

    return write


@pytest.fixture
def said(call, capsys, monkeypatch):
    """said(RUN...) -> the lines that lab.compare prints. It draws no figure."""
    monkeypatch.setattr(compare, "pyplot", lambda: None)

    def lines(*words):
        capsys.readouterr()
        call(compare, *words)
        return capsys.readouterr().out.splitlines()

    return lines


def rows_in(lines):
    """{label: [cells]} of the first table; a missing column reads -."""
    head = next(n for n, line in enumerate(lines) if line.split()[:2] == ["run", "seeds"])
    columns, found = lines[head].split(), {}
    for line in lines[head + 1 :]:
        cells = line.split()
        if len(line) != len(lines[head]):
            break
        label = " ".join(cells[: -len(columns) + 1])
        known = dict(zip(columns[1:], cells[-len(columns) + 1 :]))
        found[label] = [known.get(name, "-") for name in compare.COLUMNS[1:]]
    return found


def test_runs_are_compared_by_seed(run, said):
    """a: 3.5, 3.7; b: 3.4, 3.4 and a seed that a lacks. The change is -0.1 and -0.3."""
    a = [run(f"a-{n}", {20: x}, seed=n) for n, x in enumerate((3.5, 3.7))]
    b = [run(f"b-{n}", {20: x}, seed=n, lr=0.5) for n, x in enumerate((3.4, 3.4, 9.0))]
    rows = rows_in(lines := said(*a, *b[:2]))
    assert rows["a"][:5] == ["2", "4626", "3.6", f"{0.2 / math.sqrt(2):.5g}", "-"]
    assert rows["b"][:6] == ["2", "4626", "3.4", "0", "-0.2000", f"{0.2 / math.sqrt(2):.5g}"]
    assert rows["a"][6:] == ["110", "0.5", "30", "0", "2"]
    assert lines[lines.index("a | b") + 1 :][0] == "  lr 0.0625 | 0.5"
    rows = rows_in(said(*a, *b))
    assert rows["b"][0] == "3"
    assert float(rows["b"][5]) == pytest.approx(0.2 / math.sqrt(2), rel=1e-3)


@pytest.mark.parametrize("losses, words", [
    ((3.4, 3.6, 3.9), "changes the loss by at most twice the deviation, as another seed may, too"),
    ((3.5, 3.7, 3.9), "changes the loss by at most twice the deviation, as another seed may, too"),
    ((3.3, 3.4, 3.6), "has a lower loss: the change is more than twice its deviation"),
    ((3.7, 3.8, 4.0), "has a higher loss: the change is more than twice its deviation"),
    ((3.3, 3.4), None), ((3.3, 3.4, None), None)])
def test_a_change_of_three_seeds_or_more_is_judged_by_its_deviation(run, said, losses, words):
    """a: 3.5, 3.7, 3.9. A seed that diverged is no loss, and spoils the verdict."""
    runs = [run(f"a-{n}", {20: x}, seed=n) for n, x in enumerate((3.5, 3.7, 3.9))]
    runs += [run(f"b-{n}", {20: x or 3.0}, seed=n) for n, x in enumerate(losses)]
    if None in losses:
        (runs[-1] / "diverged.txt").write_text("loss is nan")
    assert [line for line in said(*runs) if "deviation" in line] == [f"b {words}"] * bool(words)


def test_a_seed_that_diverged_is_left_out_of_the_mean_and_named(run, said):
    a = [run(f"a-{n}", {10: 4.0, 20: x}, seed=n) for n, x in enumerate((3.5, 3.7, 3.9))]
    b = [run(f"b-{n}", losses, seed=n) for n, losses in enumerate((
        {10: 3.9, 20: 3.4}, {10: 9.0}, {10: 3.9, 20: 9.0}))]
    for folder in b[1:]:
        (folder / "diverged.txt").write_text("loss is nan")
    lines = said(*a, *b)
    assert rows_in(lines)["b"][:5] == ["3", "4626", "3.4", "-", "-0.1000"]
    assert "b, seed 1: diverged" in lines


def test_the_last_evaluation_that_all_have_counts(run, said):
    lines = said(run("a", {10: 4.0, 20: 3.0}), run("b", {10: 3.9}, steps=10))
    assert rows_in(lines)["b"][2:5] == ["3.9", "-", "-0.1000"]
    assert lines[1] == "Validation loss, nats per token, after 10 steps; change: against a, by seed"


def test_a_run_without_an_evaluation_in_common_spoils_nobody_elses_change(run, said):
    c, d, e = run("c", {20: 3.0}), run("d", {15: 3.9}, steps=15), run("e", {20: 3.5})
    rows = rows_in(lines := said(c, e, d))
    assert rows == rows_in(said(c, d, e))
    assert rows["d"][2:5] == ["3.9", "-", "-"]
    assert rows["e"][4] == "+0.5000"
    assert ("d: the change uses 0 of its 1 losses: the others have no partner, of the same seed "
            "and step") in lines
    assert [line for line in lines if line.endswith(" steps") and "its loss" in line] == [
        "d, seed 0: its loss is that after 15 steps"]


def test_a_loss_that_rose_is_told(run, said):
    lines = said(run("a", {10: 4.0, 20: 3.0}), run("b", {10: 3.1, 20: 3.5}))
    assert "b, seed 0: best 3.1 after 10 steps" in lines
    assert not any(line.startswith("a, seed 0") for line in lines)


def test_by_a_flag_changes_are_between_equal_values(run, said):
    """Transformers at rates 1 and 2, Multiscreens at 2 and 3: one rate in common."""
    for lr in (1, 2, 3):
        run(f"t{lr}", {20: 3 + lr / 10}, lr=lr, model="transformer:1,1,8")
        run(f"m{lr}", {20: 3.5 + lr / 10}, lr=lr)
    lines = said("Transformer=t[12]", "Multiscreen=m[23]", "--by", "lr")
    rows = rows_in(lines)
    assert [row[4] for row in rows.values()] == ["-", "-", "+0.5000", "-"]
    at = lines.index("Transformer | Multiscreen")
    assert lines[at + 1 :][0] == "  model transformer:1,1,8 | multiscreen"
    assert not any(line.startswith("  lr") for line in lines)


def test_a_run_that_goes_on_is_shown_as_it_is(run, said):
    lines = said(run("a", {10: 4.0, 20: 3.0}), run("b", {10: 3.5}, made=12))
    assert rows_in(lines)["b"][4] == "-0.5000"
    assert "b, seed 0: at step 12 of at most 20" in lines


@pytest.mark.parametrize("flags, reason", [
    ({"corpus": "c2"}, "other texts"), ({"tokenizer": "gpt2"}, "tokenizer bytes | gpt2"),
    ({"seq_len": 128}, "seq_len 64 | 128"),
    ({"data": "abcdigits", "corpus": ""}, "other texts")])
def test_what_does_not_compare_is_listed_with_the_reason(run, said, flags, reason):
    lines = said(run("a", {20: 3.0}), run("b", {20: 2.0}, **flags))
    assert rows_in(lines)["b"][2:6] == ["2", "-", "-", "-"]
    assert f"b is not compared: {reason}" in lines


def test_labels_patterns_and_names_make_groups(run, said):
    for n in (0, 1):
        run(f"x-{n}", {20: 3.0 + n}, seed=n)
        run(f"y-{n}", {20: 4.0 + n}, seed=n)
    assert [*rows_in(said("Mine=x-*", "y-0", "y-1"))] == ["Mine", "y"]
    assert rows_in(said("both=x-0", "both=y-1"))["both"][0] == "2"
    # A label is unique: one seed of it is one run.
    for words in (["x-0", run("deep/x-0", {20: 3.0})], ["one=x-0", "one=y-0"]):
        with pytest.raises(UsageError, match="has seed 0 twice: label the runs"):
            said(*words)


def test_one_pair_of_runs_shows_nothing_and_two_do(run, said):
    for n in (0, 1):
        run(f"a-{n}", {20: 3.0 + n}, seed=n)
        run(f"b-{n}", {20: 3.1 + n}, seed=n)
    note = ("one pair of runs shows nothing, since another seed gives another loss; "
            "train more seeds of b")
    assert note in said("a-*", "b-0")
    assert not any("one pair" in line for line in said("a-*", "b-*"))


def test_changed_lines_of_source_are_shown(run, said):
    new = SOURCE.replace("return 2", "return 4  # power")
    a, b = run("a", {20: 3.0}), run("b", {20: 3.1}, source=new, equations="xyz")
    (b / "source/train.py").write_text("betas = (0.9, 0.99)\n")
    lines = said(a, b)
    at = lines.index("a | b")
    assert lines[at + 1 : at + 8] == [
        "  multiscreen.py", "         def power(self):", "    -        return 2",
        "    +        return 4",
        "  train.py", "    -betas = (0.9, 0.95)", "    +betas = (0.9, 0.99)"]
    # Something was replaced at run time.
    lines = said(a, run("d", {20: 3.1}, equations="xyz"))
    assert lines[lines.index("a | d") + 1].startswith("  other equations")


def test_a_group_of_two_sources_says_so(run, said):
    lines = said(run("a-0", {20: 3.0}),
                 run("a-1", {20: 3.0}, seed=1, source=SOURCE.replace("2", "3"), equations="x"))
    at = lines.index("a: seed 0 | seed 1")
    assert lines[at + 1 :][2:4] == ["    -        return 2", "    +        return 3"]
    said("a-0", "a-1", "--name", "mine", "--out", "o")
    lines = said("o/mine.tsv", "--out", "p")           # a table has no source
    assert lines[lines.index("a: seed 0 | seed 1") + 1].startswith("  other equations")


def test_a_new_flag_of_the_reader_is_compared(run, said):
    lines = said(run("a", {20: 3.0}), run("b", {20: 3.0}, dropout=0.1))
    assert "  dropout - | 0.1" in lines


def test_a_table_is_read_again(run, said, tmp_path):
    folders = [run("a-0", {20: 3.0}), run("a-1", {20: 3.2}, seed=1), run("b-0", {20: 3.3}, lr=1)]
    first = said(*folders, "--name", "mine", "--out", "o")
    again = said("o/mine.tsv", "--out", "p")
    assert rows_in(first) == rows_in(again)
    assert "  lr 0.0625 | 1" in again
    (tmp_path / "other.tsv").write_text("model\thash\nx\ty\n")
    with pytest.raises(UsageError, match="not a table of runs"):
        said("other.tsv")
    # No run of a table is lost; one that went on has new values.
    with pytest.raises(UsageError, match="already holds 2 other rows"):
        said("b-0", "--name", "mine", "--out", "o")
    with open(folders[0] / "log.tsv", "a") as log:
        log.write("30\t3\t1\t\t\t\t2.5\n")
    said(*folders, "--name", "mine", "--out", "o")


def test_the_first_run_is_the_reference_and_none_counts_twice(run, said):
    for name in ("mine-0", "original-0"):
        run(name, {20: 3.0})
    assert [*rows_in(said("original-*", "*-0"))] == ["original", "mine"]
    with pytest.raises(UsageError, match=r"do you mean 'mine-\*'"):
        said("mine")


def test_a_long_curve_is_a_mean_of_neighbours(run):
    """The loss of row n is 6 - n / 10."""
    found = [logs.read_run(run("a", {12: 3.0}))]
    steps, mean, std = compare.mean_curve(found, "loss", 4)
    assert [*steps] == pytest.approx(np.arange(2.5, 11))
    assert [*mean] == pytest.approx(6 - steps / 10)
    assert std is None
    assert len(compare.mean_curve(found, "loss", 5)[0]) == 12      # short


@pytest.mark.parametrize("losses, training, diverged", [
    ((2.69, 2.48, 2.39), (5.55, 3.31, 2.66, 2.70, 3.20, 2.41, 3.41), False),   # noisy, but healthy
    ((2.6, 2.4, 2.1), (2.2, 1.2, 1.2, 1.2, 1.6, 2.04, 2.04), False),           # a harder task
    ((2.6, 2.4, 2.9), (5.0, 3.0, 2.6, 2.5, 2.0, 1.5, 1.0), False),             # overfits
    ((2.6, 2.4, 2.9), (5.0, 3.0, 2.6, 2.5, 2.4, 2.8, 2.9), True),
    ((2.6, NAN), (5.0, 3.0, 2.6, 2.5, 2.4, 2.8, 2.9), True), ((2.6,), (5.0, 3.0, 9.0), False),
    ((), (), False), ((), (5.0, 9.0), False)])
def test_what_is_called_diverged(losses, training, diverged):
    """Validation after 100, 200 and 300 steps; rows of the log after 1, 50, 100, .., 300."""
    losses = {100 * n: x for n, x in enumerate(losses, 1)}
    steps = np.array([1, 50, 100, 150, 200, 250, 300])[: len(training)]
    assert logs.rose(losses, steps, np.array(training)) == diverged


def test_healthy_runs_of_noisy_steps_keep_their_losses(said, tmp_path):
    """Four seeds of two sequences a step: the last logged loss of two is the highest but one."""
    logs = {n: [{"step": step, "loss": x, "grad_norm": 1} for step, x in
                zip((1, 100, 200, 300), (5.5, 2.6, 2.5, last))] for n, last in
            enumerate((2.4, 3.4, 2.3, 3.2))}
    for n, log in logs.items():
        log += [{"step": step, "val_loss": x + n / 100}
                for step, x in ((100, 2.7), (200, 2.5), (300, 2.4))]
        write_run(tmp_path / f"a-{n}", log, seed=n, steps=300)
    lines = said("a-*")
    assert rows_in(lines)["a"][2] == "2.415"
    assert not any("diverged" in line for line in lines)


def test_without_any_loss_no_step_is_named(run, said):
    (run("a", {}) / "diverged.txt").touch()
    assert said("a")[1] == "Validation loss, nats per token"


def test_a_seed_on_another_text_is_no_part_of_the_mean(run, said):
    a = [run(f"a-{n}", {20: 3.0}, seed=n) for n in (0, 1)]
    b = [run(f"b-{n}", {20: 2.0 + n}, seed=n, corpus=f"c{n + 1}") for n in (0, 1)]
    lines = said(*a, *b)
    assert rows_in(lines)["b"][2:5] == ["2", "-", "-1.0000"]
    assert "b, seed 1: left out of the mean: other texts" in lines
    assert lines[lines.index("b: seed 0 | seed 1") + 1] == "  other texts"


def test_the_same_text_at_another_path_is_no_difference(run, said):
    lines = said(run("a", {20: 3.0}, data="/a/x.txt"), run("b", {20: 3.5}, data="/b/x.txt"))
    assert rows_in(lines)["b"][4] == "+0.5000"
    assert not any("data" in line or "texts" in line for line in lines)


def test_a_run_is_read(run):
    folder = run("a-7", {10: 3.2, 20: 3.5}, seed=7)
    found = logs.read_run(folder)
    assert (found.label, found.seed, found.losses) == ("a", "7", {10: 3.2, 20: 3.5})
    assert (found.loss_at(), found.loss_at(10), found.facts["best"]) == (3.5, 3.2, 3.2)
    with open(folder / "log.tsv", "a") as file:
        file.write("21\t3")                            # killed while it wrote a row
    assert logs.read_run(folder).losses == {10: 3.2, 20: 3.5}
    with open(folder / "log.tsv", "a") as file:
        file.write("\t1\t1\t1\t1\tnan\n")
    assert logs.read_run(folder).end == "diverged"
    assert math.isnan(logs.read_run(folder).loss_at())


@pytest.mark.parametrize("values, spikes", [
    ({}, 0), ({12: 6.9}, 0), ({12: 7.1}, 1), ({12: -20.0}, 0), ({8: 100, 16: 100}, 2),
    ({2: 100}, 0)])
def test_spikes_are_measured_against_the_rows_before_them(values, spikes):
    """Any 4 rows have mean 2 and deviation 1, so the limit is 7. The first 4 rows have no limit."""
    x = np.tile([1.0, 3.0], 10)
    for n, value in values.items():
        x[n] = value
    assert logs.count_spikes(x, 4) == spikes


@needs_matplotlib
def test_figures(run, said, tmp_path, monkeypatch):
    monkeypatch.setattr(compare, "pyplot", common.pyplot)
    figures = []
    save = compare.save_figure
    monkeypatch.setattr(compare, "save_figure", lambda fig, path: figures.append(fig) or
                        save(fig, path))
    a = [run(f"a{n}-{s}", {10: 3 + s, 20: 3 - n / 10}, seed=s, lr=2.0**-n)
         for n in range(3) for s in (0, 1)]
    log = a[1] / "log.tsv"                             # seed 1 of a0 is four nats below seed 0
    log.write_text(log.read_text().replace("\t5.", "\t1.").replace("\t4.", "\t0."))
    bad = run("a9-0", {}, made=3, lr=2.0**3)
    (bad / "diverged.txt").write_text("nan")
    said(*a, bad, "--out", "o")
    said("a=a?-?", "--by", "lr", "--out", "o", "--name", "rates")
    above, below = figures[0].axes
    assert [text.get_text() for text in figures[0].legends[0].get_texts()] == [
        "a0, 2 seeds", "a1, 2 seeds", "a2, 2 seeds", "a9, 1 seed"]
    assert sum(len(line.get_xdata()) == 2 for line in above.lines) == 3    # validation points
    bands = [band.get_datalim(above.transData) for band in above.collections]
    assert len(bands) == 3 and above.get_ylim()[0] < min(band.y0 for band in bands)
    assert above.get_ylim()[1] == pytest.approx(5.9)   # where a9 begins
    ax, = figures[1].axes
    assert (ax.get_xscale(), ax.get_xlabel()) == ("log", "learning rate")
    assert ax.lines[0].get_xdata() == pytest.approx([0.25, 0.5, 1, 8])
    assert ax.lines[0].get_ydata() == pytest.approx([2.8, 2.9, 3.0, NAN], nan_ok=True)
    for n, name in enumerate("abcd"):
        run(name, {20: 3 - n / 10}, psi=n)
    said("a", "b", "c", "d", "--out", "o", "--name", "four")
    said("o/four.tsv", "--out", "p", "--name", "changes")
    ax, = figures[3].axes
    assert [t.get_text() for t in ax.get_yticklabels()] == [f"{x}, 1 seed" for x in "abcd"]
    assert ax.lines[0].get_xdata() == pytest.approx([0, -0.1, -0.2, -0.3])
    for name in ("compare", "rates"):
        assert (tmp_path / f"o/{name}.png").stat().st_size > 10_000
