"""Tests of tables of measurements: no row is lost, or mistaken for one of other weights or code."""
from pathlib import Path

import pytest
import torch

from support import evaluation
from support.checkpoint import weights_hash
from support.cli import UsageError
from support.evaluation import model_hash
from support.table import (
    RUN,
    Table,
    as_line,
    beside,
    describe_run,
    keep_rows,
    read_rows,
    read_tables,
    write_rows,
)
from tests.helpers import ROOT, fit, read_table

KEYS = ("model", "length")
CELL = {"model": "multiscreen", "length": 64}
CELL_OF_RUN = dict.fromkeys(RUN, "1") | CELL


def table(path, model_hash="abc-1"):
    return Table(path, KEYS, ["loss"], model_hash)


def test_a_measurement_is_found_again(tmp_path):
    path = tmp_path / "new/loss.tsv"
    first = table(path)
    assert first.reuse([CELL, CELL]) == [CELL]
    first.add(CELL, loss=0.25)
    first.add(CELL | {"length": 5, "model": None}, loss=12)
    again = table(path)
    more = CELL | {"length": 128}
    assert again.reuse([CELL, more]) == [more]
    again.add(more, loss=3)
    assert again.rows_of([more, CELL]) == [read_table(path)[2], read_table(path)[0]]
    assert read_table(path) == [
        {"model": "multiscreen", "length": "64", "loss": "0.25", "hash": "abc-1"},
        {"model": "", "length": "5", "loss": "12", "hash": "abc-1"},
        {"model": "multiscreen", "length": "128", "loss": "3", "hash": "abc-1"}]


def test_rows_count_for_their_own_hash_and_an_edit_that_is_undone_loses_none(tmp_path, capsys):
    path, cells = tmp_path / "loss.tsv", [CELL_OF_RUN | {"length": n} for n in (1, 2, 3)]

    def open_table(model_hash):
        return Table(path, (*RUN, "length"), ["loss"], model_hash)

    def drawn():
        return [(row["length"], row["loss"]) for row in read_tables([path], "loss")]

    original = open_table("abc-1")
    for n, cell in enumerate(cells):
        original.add(cell, loss=n)
    edited = open_table("abc-2")
    assert edited.reuse(cells) == cells
    edited.add(cells[0], loss=9)
    assert drawn() == [("1", "9")]
    undone = open_table("abc-1")
    assert undone.reuse(cells) == []
    assert capsys.readouterr().err == f"reusing 3 of 3 measurements in {path}\n"
    assert drawn() == [("1", "0"), ("2", "1"), ("3", "2")]
    assert open_table("abc-2").reuse(cells) == cells[1:]
    # What is current is decided for each run of a table, not for the file.
    open_table("xyz-1").add(CELL_OF_RUN | {"seed": 7, "length": 1}, loss=5)
    assert drawn() == [("1", "9"), ("1", "5")]


def test_two_commands_that_fill_one_table_at_once_lose_no_row(tmp_path, monkeypatch):
    """The second one writes when the first has seen that the file is new, or that it has rows."""
    path = tmp_path / "loss.tsv"
    first, second = table(path), table(path)

    def meanwhile(cells):
        if cells is first.columns:                     # the head
            return as_line(cells)
        monkeypatch.undo()
        second.add(CELL | {"length": len(second.rows)}, loss=2)
        return as_line(cells)

    for n in (128, 256):
        monkeypatch.setattr("support.table.as_line", meanwhile)
        first.add(CELL | {"length": n}, loss=1)
    assert [(row["length"], row["loss"]) for row in read_rows(path)] == [
        ("0", "2"), ("128", "1"), ("1", "2"), ("256", "1")]
    path.unlink()                                      # during a measurement
    second.add(CELL | {"length": 512}, loss=4)
    assert [row["loss"] for row in read_table(path)] == ["4"]


@pytest.mark.parametrize("torn", ["multis", "multiscreen\t128\t1\tabc-1"])
def test_half_a_last_row_of_a_killed_process_does_not_count(tmp_path, torn):
    path = tmp_path / "loss.tsv"
    table(path).add(CELL, loss=1)
    whole = path.read_text()
    path.write_text(whole + torn)
    again = table(path)
    more = CELL | {"length": 128}
    assert again.reuse([CELL, more]) == [more]
    again.add(more, loss=2)
    assert path.read_text() == f"{whole}{torn}\nmultiscreen\t128\t2\tabc-1\n"
    assert table(path).reuse([CELL, more]) == []


def test_a_tab_in_a_name_is_a_blank_and_the_row_is_found_again(tmp_path):
    path, cell = tmp_path / "loss.tsv", CELL | {"model": "transformer:\tbook\r\n\udcff"}
    table(path).add(cell, loss=1)
    assert table(path).reuse([cell]) == []
    assert read_table(path)[0]["model"] == "transformer: book ?"


def test_another_file_is_refused_and_stays(tmp_path):
    path = tmp_path / "log.tsv"
    for content in ("step\tloss\n1\t2\n", "model\tlength\thash\nmultiscreen\t64\ta\n",
                    "a line\n", "a text", "model\tlen"):                # half a head, too
        path.write_text(content)
        with pytest.raises(UsageError, match="does not have the columns model length loss hash"):
            table(path)
        assert path.read_text() == content


# ---------------------------------------------------------------------------- tables to draw

@pytest.fixture
def add(tmp_path):
    """add(name, hash, **cell) -> the path of a table with a row more."""
    def write(name, model_hash, **cell):
        path = tmp_path / name
        Table(path, (*RUN, "length"), ["loss"], model_hash).add(
            CELL_OF_RUN | {"init_weights": "", "changes": ""} | cell, loss=cell.get("seed", 1))
        return path

    return write


def models_of(*paths):
    return [row["model"] for row in read_tables(paths, "loss")]


def test_a_table_named_twice_counts_once(add):
    a, b = add("a", "abc-1", seed=1), add("b", "xyz-1", seed=2)
    assert [row["loss"] for row in read_tables([a, b, a], "loss")] == ["1", "2"]


def test_two_runs_of_one_seed_need_labels(add):
    """Also where their measured cells are others."""
    a, b = add("a", "abc-1", length=64), add("b", "xyz-1", length=128)
    with pytest.raises(UsageError, match="two runs are multiscreen, seed 1: label the runs"):
        read_tables([a, b], "loss")
    assert models_of(a, f"mine={b}") == ["multiscreen", "multiscreen=mine"]


def test_two_runs_in_one_table_are_not_one(add):
    """The same model and seed, trained with two rates: other weights. An edit leaves them."""
    path = add("one", "abc-1")
    add("one", "xyz-1", length=128)
    with pytest.raises(UsageError, match="one has two runs that are multiscreen, seed 1: measure"):
        read_tables([path], "loss")
    path = add("edited", "abc-1")
    add("edited", "abc-2")
    assert len(read_tables([path], "loss")) == 1


def test_a_name_that_leaves_out_what_differs_is_not_two_runs(add):
    """The names leave out the checkpoint of --init, and at which step a flag changed."""
    for some, other in (({"init_weights": "1"}, {"init_weights": "2"}),
                        ({"changes": "from step 7: --lr 1"}, {"changes": "from step 9: --lr 1"})):
        tables = [add(f"{n}{[*how]}", f"{n}-1", step=n, **how)
                  for n, how in enumerate((some, other))]
        with pytest.raises(UsageError, match="two runs are multiscreen=.*, seed 1: label"):
            read_tables(tables, "loss")


def test_beside_a_checkpoint_only_its_own_rows_count(add, tmp_path, capsys):
    ckpt = fit(tmp_path / "a", "--steps", "2")
    for name in ("a/perplexity.tsv", "a/mine_perplexity.tsv", "a/figure.tsv"):
        for seed, weights in enumerate(("abc", weights_hash(ckpt), "xyz")):
            add(name, f"{weights}-1", seed=seed)
    (tmp_path / "a/mine.pt").write_bytes((tmp_path / "a/ckpt.pt").read_bytes())
    seeds = {path.name: [row["seed"] for row in read_tables([path], "loss")]
             for path in (tmp_path / "a").glob("*.tsv") if path.name != "log.tsv"}
    assert seeds == {"perplexity.tsv": ["1"], "mine_perplexity.tsv": ["1"],
                     "figure.tsv": ["0", "1", "2"]}
    assert "2 rows left out, measured with other weights" in capsys.readouterr().err


def test_a_run_with_init_or_changed_flags_is_a_model_of_its_own(add, tmp_path):
    hows = ({}, {"init_weights": "123"}, {"changes": "from step 9: --lr 1"},
            {"changes": "from step 7: --lr 1"})
    paths = [add(f"t{n}", f"{n}-1", seed=n, **how) for n, how in enumerate(hows)]
    assert models_of(*paths) == ["multiscreen", "multiscreen=multiscreen, --init",
                                 *["multiscreen=multiscreen, --lr 1"] * 2]
    named = read_tables([paths[1], f"mine={paths[2]}"], "loss")
    assert [row["model"] for row in named] == ["multiscreen=multiscreen, --init",
                                               "multiscreen=mine, --lr 1"]
    write_rows(tmp_path / "named", named)
    assert read_tables([tmp_path / "named"], "loss") == named


def test_what_is_no_table_of_the_measurement_is_refused(add, tmp_path):
    with pytest.raises(UsageError, match=r"does not have the columns .* accuracy hash"):
        read_tables([add("a", "abc-1")], "accuracy")
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
    assert model_hash(ckpt).partition("-")[0] == weights_hash(ckpt)


def test_an_edit_of_the_file_that_measures_is_measured_anew(tmp_path, monkeypatch):
    ckpt, right = fit(tmp_path / "a", "--steps", "1"), evaluation.text_of
    found = [model_hash(ckpt, "abcdigits"), model_hash(ckpt, "lab.perplexity")]
    for old, new in (("re.match(", "re.search("), ("# The remaining", "# What remains of the")):
        assert old in right("abcdigits")
        monkeypatch.setattr(evaluation, "text_of", lambda module, old=old, new=new:
                            right(module).replace(old, new))
        found.append(model_hash(ckpt, "abcdigits"))
    assert len({*found}) == 3 and found[3] == found[0]             # words are no edit


def test_the_table_is_beside_the_checkpoint_or_where_one_can_write(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert beside("out/ckpt.pt", "windows.tsv") == Path("out/windows.tsv")
    assert beside("x/a.pt", "windows.tsv") == Path("x/a_windows.tsv")
    assert beside("x/a.pt", "windows.tsv", "y/mine.tsv") == Path("y/mine.tsv")
    assert capsys.readouterr().err == ""
    # Beside a bundled model a table would change the checkout.
    models = ROOT / "models"
    assert beside(models / "retrieval.pt", "windows.tsv") == Path("out/retrieval_windows.tsv")
    assert capsys.readouterr().err == (
        f"the table is out/retrieval_windows.tsv: nothing is written to {models}\n")
    # A folder that cannot be written. Root writes everywhere, so the answer is made up.
    full = tmp_path / "theirs/run-3"
    full.mkdir(parents=True)
    monkeypatch.setattr("os.access", lambda path, mode: Path(path).resolve() != full)
    assert beside(full / "ckpt.pt", "windows.tsv") == Path("out/run-3_windows.tsv")
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(UsageError, match="out/run-3_windows.tsv cannot be .* --table PATH"):
        beside(full / "ckpt.pt", "windows.tsv")
    assert [*tmp_path.iterdir()] == [tmp_path / "theirs"]


def test_the_hash_of_the_weights_sees_each_of_them():
    ckpt = {"weights": {"a": torch.zeros(3), "b": torch.ones(())}}
    before = weights_hash(ckpt)
    assert before == weights_hash({"weights": dict(reversed(ckpt["weights"].items()))})
    ckpt["weights"]["b"] += 2**-20
    assert weights_hash(ckpt) != before
