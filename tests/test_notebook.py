"""Tests of the course's notebook: it runs, and its saved outputs are what it prints."""
import json
import os
import shutil
import subprocess
import sys

from tests.helpers import ROOT, needs_interpreter, needs_matplotlib, run

NOTEBOOK = ROOT / "course/exercises/notebook.ipynb"
CELLS = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
CODE = ["".join(cell["source"]) for cell in CELLS]


def printed(cell):
    """The text saved with a cell."""
    return "".join("".join(x["text"]) for x in cell["outputs"] if x["output_type"] == "stream")


def figures(cell):
    """The number of figures saved with a cell."""
    return sum("image/png" in x.get("data", ()) for x in cell["outputs"])


@needs_interpreter
@needs_matplotlib
def test_the_notebook_runs_and_prints_what_it_has_kept(tmp_path):
    """Run as a script, without a GPU. The cell that trains takes 4 steps in place of 400."""
    text = '\nprint(end="\\f")\n'.join(CODE).replace('"400"', '"4"')
    text = text.replace('/ "out-notebook"', f'/ "{tmp_path}/out"')
    script = tmp_path / "notebook.py"
    script.write_text(text)
    env = os.environ | {"MPLBACKEND": "Agg", "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "80"}
    out = run(script, env=env)
    said = [x for x in out.stderr.splitlines() if "retrieval.pt was trained with other" not in x]
    assert (out.returncode, said) == (0, [])
    for code, cell, found in zip(CODE, CELLS, out.stdout.split("\f")):
        if "train.main" in code:                       # its times differ
            assert "400/400    saved " in printed(cell) and "4/4      saved " in found
        else:
            assert found == printed(cell), (
                "run all cells of course/exercises/notebook.ipynb without a GPU, and save")
    assert "60 degrees: similarity  0.50, relevance 0\n" in out.stdout
    assert "screening  match: 0.98 → 0.98, kept; " in out.stdout
    assert "with the needle: accepted R=[8] " in out.stdout
    assert "the answer is 89\nwithout the needle: accepted nothing;" in out.stdout
    assert "still to do: Exercise 4.1" in out.stdout


def test_the_notebook_shows_its_figures_and_stays_small():
    assert [figures(cell) for cell in CELLS] == [text.count("plt.show()") for text in CODE]
    assert NOTEBOOK.stat().st_size < 300_000


# ------------------------------------------------------------------------ on a hosted machine

def test_without_the_repository_it_says_what_to_do(tmp_path):
    out = run("-c", CODE[0], cwd=tmp_path)
    assert out.returncode == 1
    assert "upload course.zip, or set ADDRESS to the repository's address" in out.stderr


def test_it_unpacks_the_hand_out_once(tmp_path, monkeypatch):
    (tmp_path / "made/course").mkdir(parents=True)
    (tmp_path / "made/course/multiscreen.py").write_text("")
    shutil.make_archive(tmp_path / "course", "zip", tmp_path / "made")
    installed = []
    monkeypatch.setattr(subprocess, "run", lambda command, check: installed.append(command))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.chdir(tmp_path)
    exec(CODE[0], {})
    (tmp_path / "course/multiscreen.py").write_text("edited")
    exec(CODE[0], {})
    assert (tmp_path / "course/multiscreen.py").read_text() == "edited"
    assert len(installed) == 1
