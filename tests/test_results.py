"""The table of measurements: nothing is lost, doubled or taken for something else."""
import multiprocessing
import shutil

import pytest

import multiscreen
import train
from support.cli import UsageError
from support.results import (
    COLUMNS,
    Key,
    Results,
    begin,
    describe,
    equations,
    flag,
    key_of,
    protocol_of,
    run_of,
)
from tests.helpers import fit, read_table

KEY = Key("passkey", "--model multiscreen --psi 2", "0", "10", "64")


def test_a_measurement_is_found_again_by_another_process(tmp_path):
    path = tmp_path / "new/results.tsv"
    results = Results(path)
    assert results.measure(KEY, "abc", lambda: [0.25, 3]) == [0.25, 3]
    again = Results(path)
    assert again.measure(KEY, "abc", None) == [0.25, 3]
    assert again.measure(KEY.at(swe=True), "abc", lambda: [1]) == [1]
    results.refresh()
    assert results.values[KEY.at(swe=True)] == [1]
    row = read_table(path)[0]
    assert (row["value"], row["weights"], row["protocol"]) == ("0.25 3", "abc", protocol_of(KEY))


def test_other_weights_are_measured_anew_and_the_last_row_counts(tmp_path):
    results = Results(tmp_path / "results.tsv")
    results.add(KEY, [1], "abc")
    assert results.has(KEY)
    assert not results.has(KEY, "xyz")
    results.add(KEY, [2], "xyz")
    assert Results(tmp_path / "results.tsv").values[KEY] == [2]
    assert len(read_table(tmp_path / "results.tsv")) == 2


def test_rows_of_an_older_protocol_are_kept_and_not_read(tmp_path, monkeypatch, capsys):
    """And a line says so."""
    Results(tmp_path / "results.tsv").add(KEY, [1])
    Results(tmp_path / "results.tsv")
    assert not capsys.readouterr().err
    monkeypatch.setitem(protocol_of.__globals__["PROTOCOLS"], "passkey", 2)
    results = Results(tmp_path / "results.tsv")
    assert capsys.readouterr().err.startswith("1 rows of ")
    assert not results.has(KEY)
    results.add(KEY, [2])
    assert [row["value"] for row in read_table(tmp_path / "results.tsv")] == ["1", "2"]


def test_what_cannot_be_a_table_is_refused(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file/results.tsv"):
        with pytest.raises(UsageError, match="name another"):
            Results(path)


@pytest.mark.parametrize("torn", ["passkey\t--model mul", "passkey\trun\t0\t10" + "\t" * 7 + "1\t"])
def test_half_a_row_of_a_killed_process_costs_that_row_only(tmp_path, torn):
    path = tmp_path / "results.tsv"
    Results(path).add(KEY, [1])
    before = path.read_text()
    path.write_text(before + torn)
    results = Results(path)
    results.add(KEY.at(length=128), [2])
    assert path.read_text().startswith(before + torn + "\n")
    assert Results(path).values == {KEY: [1], KEY.at(length=128): [2]} == results.values


def test_another_file_is_refused_and_stays(tmp_path):
    (tmp_path / "log.tsv").write_text("step\tloss\n1\t2\n")
    with pytest.raises(UsageError, match="not a table of measurements"):
        Results(tmp_path / "log.tsv")
    assert (tmp_path / "log.tsv").read_text() == "step\tloss\n1\t2\n"


def fill(path, first):
    results = Results(path)
    for n in range(40):
        results.measure(KEY.at(length=(first + n) % 40), "abc", lambda: [1])


def test_processes_that_fill_one_table_lose_and_double_no_row(tmp_path):
    path = tmp_path / "results.tsv"
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=fill, args=(path, n)) for n in (0, 1, 20)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    lengths = [row["length"] for row in read_table(path)]
    assert sorted(map(int, lengths)) == list(range(40))
    assert path.read_text().count("\t".join(COLUMNS)) == 1


def test_rows_of_other_equations_are_not_read(tmp_path, monkeypatch):
    """What was measured with an edited Trim does not count once it is undone."""
    path = tmp_path / "results.tsv"
    right = multiscreen.trim
    monkeypatch.setattr(multiscreen, "trim", lambda s, r: right(s, r).sqrt())
    equations.cache_clear()
    Results(path).add(KEY, [1], "abc")
    monkeypatch.undo()
    equations.cache_clear()
    results = Results(path)
    assert not results.has(KEY, "abc")
    results.add(KEY, [2], "abc")
    assert Results(path).values[KEY] == [2]
    assert len(read_table(path)) == 2


def test_two_models_of_one_name_are_refused(tmp_path):
    results = Results(tmp_path / "results.tsv")
    begin(results, [(KEY, "abc")])
    begin(results, [(KEY, "abc")])
    with pytest.raises(UsageError, match="same flags, seed and step"):
        begin(results, [(KEY, "xyz")])


def test_a_run_is_known_by_its_flags_wherever_it_is(tmp_path):
    """A checkpoint says what the flags said, whatever folder, device and data folder it had."""
    ckpt = fit(tmp_path / "a", "--steps", "2", "--seed", "3")
    flags = ["--psi", "2", "--seq-len", "32", "--batch-size", "4", "--warmup", "2", "--data",
             str(tmp_path / "elsewhere/text.txt"), "--seed", "3", "--steps", "2", "--out", "b",
             "--log-every", "1"]
    (tmp_path / "elsewhere").mkdir()
    shutil.copy(tmp_path / "text.txt", tmp_path / "elsewhere")
    args, _ = train.get_args(flags)
    key = key_of(vars(args), args.steps)
    assert key == key_of(ckpt["args"], ckpt["step"], files=ckpt["files"])
    (tmp_path / "elsewhere/text.txt").write_text("another text of that name" * 99)
    assert key != key_of(vars(args), args.steps)
    assert (tmp_path / "a/flags.txt").read_text() == f"{describe(key)}\n"
    assert str(tmp_path) not in key.run
    again, _ = train.get_args([*key.run.split(), "--batch-size", "4"])
    assert run_of(vars(again)) == key.run
    assert flag(key.run, "--psi") == "2"
    assert flag(key.run, "--digits") is None
    for more in (["--lr", "0.5"], ["--warmup", "3"], ["--batch-size", "8"], ["--layers", "1"]):
        assert run_of(vars(train.get_args([*flags, *more])[0])) != key.run
