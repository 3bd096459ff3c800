"""Tests of tables of measurements: no row is lost, doubled or mistaken for another."""
import pytest
import torch

from support.checkpoint import equations, model_hash, weights_hash
from support.cli import UsageError
from support.table import (
    RUN,
    Table,
    beside,
    describe_run,
    keep_rows,
    read_rows,
    read_tables,
    write_rows,
)
from tests.helpers import fit, read_table

KEYS = ("model", "length")
CELL = {"model": "multiscreen", "length": 64}
CELL_OF_RUN = dict.fromkeys(RUN, "1") | CELL


def table(path, model_hash="abc-1"):
    return Table(path, KEYS, ["loss"], model_hash)


def test_a_measurement_is_found_again(tmp_path):
    path = tmp_path / "new/loss.tsv"
    first = table(path)
    assert first.missing([CELL, CELL]) == [CELL]
    first.add(CELL, loss=0.25)
    first.add(CELL | {"length": 5, "model": None}, loss=12)
    again = table(path)
    more = CELL | {"length": 128}
    assert again.missing([CELL, more]) == [more]
    again.add(more, loss=3)
    assert again.rows_of([more, CELL]) == [read_table(path)[2], read_table(path)[0]]
    assert read_table(path) == [
        {"model": "multiscreen", "length": "64", "loss": "0.25", "hash": "abc-1"},
        {"model": "", "length": "5", "loss": "12", "hash": "abc-1"},
        {"model": "multiscreen", "length": "128", "loss": "3", "hash": "abc-1"}]


def test_rows_of_other_weights_are_replaced_when_one_is_measured_again(tmp_path, capsys):
    path = tmp_path / "loss.tsv"
    table(path).add(CELL, loss=1)
    table(path).add(CELL | {"length": 128}, loss=1)
    other = table(path, "xyz-1")
    assert other.missing([CELL]) == [CELL]
    assert capsys.readouterr().err.startswith(f"replacing 2 rows in {path}: other weights")
    assert len(read_table(path)) == 2
    other.add(CELL, loss=2)
    other.add(CELL | {"length": 32}, loss=2)
    assert [(row["loss"], row["hash"]) for row in read_table(path)] == [("2", "xyz-1")] * 2


@pytest.mark.parametrize("column, cell", [
    ("accuracy", "0,5"), ("accuracy", ""), ("accuracy", "inf"), ("length", "²"), ("length", ""),
    ("parameters", "65.506"), ("parameters", ""), ("seed", "a")])
def test_what_is_no_number_is_told_in_one_line(tmp_path, column, cell):
    row = CELL_OF_RUN | {"length": "64", "accuracy": "0.5", "hash": "abc-1"} | {column: cell}
    write_rows(tmp_path / "t.tsv", [row])
    with pytest.raises(UsageError, match=f"t.tsv: {column} is '{cell}' in a row") as e:
        read_tables([tmp_path / "t.tsv"], "accuracy")
    assert "\n" not in str(e.value)


def test_two_commands_that_begin_one_table_lose_no_row(tmp_path):
    path = tmp_path / "loss.tsv"
    first, second = table(path), table(path)
    first.add(CELL, loss=1)
    second.add(CELL | {"length": 128}, loss=2)
    first.add(CELL | {"length": 256}, loss=3)
    assert [row["loss"] for row in read_table(path)] == ["1", "2", "3"]
    path.unlink()                                      # during a measurement
    second.add(CELL | {"length": 512}, loss=4)
    assert [row["loss"] for row in read_table(path)] == ["1", "2", "4"]


def test_of_a_cell_with_two_values_in_a_file_the_last_counts(tmp_path):
    rows = [CELL_OF_RUN | {"length": "64", "accuracy": x, "hash": "abc-1"} for x in ("0.5", "0.75")]
    write_rows(tmp_path / "t.tsv", rows)
    assert [row["accuracy"] for row in read_tables([tmp_path / "t.tsv"], "accuracy")] == ["0.75"]


def test_ctrl_c_says_what_is_kept(tmp_path):
    measured = table(tmp_path / "loss.tsv")
    measured.add(CELL, loss=0.25)
    with pytest.raises(KeyboardInterrupt, match="rows in .*loss.tsv: 1; rerun the command"):
        with measured.measuring():
            raise KeyboardInterrupt


def test_a_full_disk_names_the_table(tmp_path, monkeypatch):
    measured = table(tmp_path / "loss.tsv")
    measured.add(CELL, loss=0.25)
    def full(cells):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("support.table.as_line", full)
    with pytest.raises(OSError) as e:
        measured.add(CELL | {"length": 128}, loss=1)
    assert e.value.filename == str(tmp_path / "loss.tsv")


@pytest.mark.parametrize("torn", ["multis", "multiscreen\t128\t1\tabc-1"])
def test_half_a_last_row_of_a_killed_process_is_dropped(tmp_path, torn):
    path = tmp_path / "loss.tsv"
    table(path).add(CELL, loss=1)
    whole = path.read_text()
    path.write_text(whole + torn)
    again = table(path)
    more = CELL | {"length": 128}
    assert again.missing([CELL, more]) == [more]
    again.add(more, loss=2)
    assert path.read_text() == whole + "multiscreen\t128\t2\tabc-1\n"


def test_half_a_head_is_begun_anew(tmp_path):
    (tmp_path / "loss.tsv").write_text("model\tlen")
    table(tmp_path / "loss.tsv").add(CELL, loss=1)
    assert len(read_table(tmp_path / "loss.tsv")) == 1


def test_a_tab_in_a_name_is_a_blank_and_the_row_is_found_again(tmp_path):
    path, cell = tmp_path / "loss.tsv", CELL | {"model": "transformer:\tbook\r\n\udcff"}
    table(path).add(cell, loss=1)
    assert table(path).missing([cell]) == []
    assert read_table(path)[0]["model"] == "transformer: book ?"


def test_another_file_is_refused_and_stays(tmp_path):
    path = tmp_path / "log.tsv"
    for content in ("step\tloss\n1\t2\n", "model\tlength\thash\nmultiscreen\t64\ta\n"):
        path.write_text(content)
        with pytest.raises(UsageError, match="does not have the columns model length loss hash"):
            table(path)
        assert path.read_text() == content


def test_what_the_runs_of_a_figure_differ_in_is_noted(tmp_path, capsys):
    def add(name, model_hash, seed, length, loss, init_weights="", changes=""):
        how = {"init_weights": init_weights, "changes": changes}
        path = tmp_path / name
        Table(path, (*RUN, "length"), ["loss"], model_hash).add(
            CELL_OF_RUN | {"seed": seed, "length": length} | how, loss=loss)
        return path

    def noted(*paths):
        assert len(read_tables(paths, "loss")) == len(paths)
        return capsys.readouterr().err

    a, b = add("a", "abc-1", 0, 64, 1), add("b", "xyz-1", 1, 64, 2)
    assert [row["loss"] for row in read_tables([a, b, a], "loss")] == ["1", "2"]
    assert noted(a, b) == ""
    assert noted(a, add("c", "xyz-2", 1, 128, 2)) == (
        "note: the runs of multiscreen differ in equations\n")
    assert noted(a, f"mine={add('m', 'xyz-2', 1, 128, 2)}") == ""
    runs = [add(f"run-{n}/t", f"{n}-1", n, 64, 5) for n in (1, 2)]
    for n, path in enumerate(runs):
        path.with_name("flags.txt").write_text(f"lr\t0.{n}\nseed\t{n}\nd_E\t8\n")
    assert noted(*runs) == "note: the runs of multiscreen differ in lr\n"
    two = [add("seeds-0", "p-1", 0, 64, 3), add("seeds-1", "q-1", 1, 64, 4)]
    found = read_tables([a, f"mine={tmp_path}/seeds-*"], "loss")
    assert [row["model"] for row in found] == ["multiscreen", *["multiscreen=mine"] * len(two)]
    with pytest.raises(UsageError, match="both have multiscreen, seed 0: label the runs"):
        read_tables([a, two[0]], "loss")
    # A run with, say, another rate is another run, even if its measured cells are other ones.
    with pytest.raises(UsageError, match="both have multiscreen, seed 0: label the runs"):
        read_tables([a, add("rate", "rate-1", 0, 128, 2)], "loss")

    # A run with --init or changed flags is a model of its own, whenever it was changed.
    hows = ({"init_weights": "123"}, {"changes": "from step 9: --lr 1"},
            {"changes": "from step 7: --lr 1"})
    others = [add(f"h{n}", f"{n}-1", n, 64, n, **how) for n, how in enumerate(hows)]
    assert [row["model"] for row in read_tables([b, *others], "loss")] == [
        "multiscreen", "multiscreen=multiscreen, --init",
        *["multiscreen=multiscreen, --lr 1"] * 2]
    with pytest.raises(UsageError, match=r"does not have the columns .* accuracy hash"):
        read_tables([a], "accuracy")
    with pytest.raises(UsageError, match="does not exist"):
        read_tables([tmp_path / "d"], "loss")


def test_the_rows_of_a_figure_are_kept_and_none_is_lost(tmp_path):
    path = tmp_path / "figure/loss.tsv"
    for n in (1, 2):
        table(tmp_path / "loss.tsv").add(CELL | {"length": n}, loss=n)
    rows = read_rows(tmp_path / "loss.tsv")
    keep_rows(path, rows[:1])
    keep_rows(path, rows)
    assert read_table(path) == rows
    with pytest.raises(UsageError, match="already holds 1 other row:"):
        keep_rows(path, rows[1:])
    assert read_table(path) == rows


# ----------------------------------------------------------------------------- what a row is of

def test_a_row_says_what_the_run_is(tmp_path):
    ckpt = fit(tmp_path / "a", "--steps", "2", "--seed", "3")
    run = describe_run(ckpt)
    assert tuple(run) == RUN
    assert run == {"model": "multiscreen", "parameters": 4626, "seed": 3, "seq_len": 32,
                   "init_weights": "", "changes": "", "step": 2}
    assert model_hash(ckpt) == f"{weights_hash(ckpt)}-{equations('multiscreen')}"


def test_two_checkpoints_in_a_folder_have_tables_of_their_own():
    assert str(beside("out/ckpt.pt", "windows.tsv")) == "out/windows.tsv"
    assert str(beside("models/a.pt", "windows.tsv")) == "models/a_windows.tsv"


def test_the_hash_of_the_weights_sees_each_of_them():
    ckpt = {"weights": {"a": torch.zeros(3), "b": torch.ones(())}}
    before = weights_hash(ckpt)
    assert before == weights_hash({"weights": dict(reversed(ckpt["weights"].items()))})
    ckpt["weights"]["b"] += 2**-20
    assert weights_hash(ckpt) != before
