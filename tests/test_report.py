"""Tests of experiments/report/report.md: its tables are what their commands print now."""
import contextlib
import importlib
import io
import re
import sys

import pytest

from experiments import fill_report
from support.cli import UsageError
from tests.helpers import ROOT

TEXT = fill_report.REPORT.read_text()


@pytest.fixture
def run_here(monkeypatch):
    """Run a command in this process, without drawing its figure."""
    def run(command, folder):
        _, _, name, *flags = command.split()
        script = importlib.import_module(name)
        monkeypatch.setattr(script, "pyplot", lambda: None, raising=False)
        monkeypatch.setattr(sys, "argv", [name, *flags])
        monkeypatch.chdir(folder)
        with contextlib.redirect_stdout(io.StringIO()) as out:
            script.main()
        return out.getvalue()

    return run


def test_each_table_is_what_its_command_prints_now(run_here):
    emptied = fill_report.BLOCK.sub(r"<!-- \1 -->\n```\n```\n", TEXT)
    assert len(emptied) < len(TEXT) / 2
    found = fill_report.filled(emptied, run_here)
    assert found == TEXT, "run python -m experiments.fill_report"


def test_the_tables_of_the_readme_are_those_of_the_report():
    text = fill_report.README.read_text()
    emptied = fill_report.FILLED.sub(lambda table: table[0].partition("\n")[0] + "\n", text)
    assert text.count("\n") > emptied.count("\n") + 12
    found = fill_report.filled_readme(emptied, TEXT)
    assert found == text, "run python -m experiments.fill_report"


def test_the_tallies_are_those_of_the_verdicts():
    said = list(fill_report.verdicts(TEXT).values())
    assert len(said) == 22
    for word in ("shown", "partly", "contradicted", "not testable here", "a GPU's claim"):
        count = sum(verdict.startswith(word) for verdict in said)
        for text in (TEXT, fill_report.README.read_text()):
            tally = rf"\b{count} (are |is ){word}"
            assert not count or re.search(tally, text.replace("\n", " ")), (word, count)


def test_every_block_has_its_command_and_every_table_and_figure_is_shown():
    assert TEXT.count("```\n") == 2 * len(fill_report.BLOCK.findall(TEXT))
    folder = fill_report.REPORT.parent
    for path in [*folder.rglob("*.tsv"), *folder.rglob("*.png")]:
        name = str(path.relative_to(ROOT if path.suffix == ".tsv" else folder))
        assert re.search(rf"<!-- .*\b{re.escape(name)}\b.* -->|\]\({re.escape(name)}\)", TEXT), name


def test_no_committed_table_has_changed_unnoticed():
    path = fill_report.REPORT.with_name("SHA256SUMS")
    assert path.read_text() == fill_report.sums(), "run python -m experiments.fill_report"


def test_the_table_of_memory_adds_up():
    lines = re.findall(r"^\| `(.+)` \| (.+) \|$", (ROOT / "docs/scale.md").read_text(), re.M)
    assert len([words for words, _ in lines if "--gpus" in words]) == 9
    for words, cells in lines:
        if "--gpus" in words:
            P, passes, *sizes = (float(x.replace(",", "")) for x in cells.split(" | "))
            shard = int((re.findall(r"--shard (\d+)", words) or [1])[0])
            weights, gradients, moments, _, _, whole, checkpoint = sizes
            state = 4 * P / 2**30
            known = [state / shard, state / (shard if passes == 1 else 1), 2 * state / shard]
            assert [weights, gradients, moments] == pytest.approx(known, abs=0.006)
            assert whole == pytest.approx(sum(sizes[:5]), abs=0.03)
            assert checkpoint == pytest.approx(3 * state, abs=0.006)


def test_a_command_that_fails_is_told(tmp_path):
    assert fill_report.run("python -c print(3)", tmp_path) == "3\n"
    with pytest.raises(UsageError, match="nowhere.tsv does not exist"):
        fill_report.run("python -m experiments.retrieval nowhere.tsv", tmp_path)
