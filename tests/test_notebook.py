"""The notebook of the course: what its .py says, without outputs, and it runs."""
import json
import os

import pytest

from tests.helpers import ROOT, needs_matplotlib, run

SCRIPT, NOTEBOOK = ROOT / "exercises/notebook.py", ROOT / "exercises/notebook.ipynb"


def cells_of(notebook):
    """(kind, text) of each cell."""
    return [(cell["cell_type"], "".join(cell["source"])) for cell in notebook["cells"]]


def test_the_notebook_is_what_jupytext_makes_of_its_script():
    jupytext = pytest.importorskip("jupytext", reason="makes notebooks: pip install jupytext")
    made = jupytext.read(SCRIPT)
    notebook = json.loads(NOTEBOOK.read_text())
    assert cells_of(notebook) == cells_of(made), (
        "make it again: jupytext --to ipynb --update exercises/notebook.py")
    assert notebook["metadata"]["kernelspec"] == made["metadata"]["kernelspec"]


def test_the_notebook_holds_no_outputs():
    code = [x for x in json.loads(NOTEBOOK.read_text())["cells"] if x["cell_type"] == "code"]
    assert len(code) > 5
    assert not any(cell["outputs"] or cell["execution_count"] for cell in code)


@needs_matplotlib
def test_the_notebook_runs_and_finds_the_needle():
    """As a script, without a GPU."""
    env = os.environ | {"MPLBACKEND": "Agg", "CUDA_VISIBLE_DEVICES": ""}
    out = run(SCRIPT, env=env)
    assert (out.returncode, out.stderr) == (0, "")
    assert "60 degrees: similarity  0.50, relevance 0\n" in out.stdout
    assert "10 equal keys: screening 0.36, softmax 0.10" in out.stdout
    assert "with the needle: accepted R=[8] " in out.stdout
    assert "the answer is 89\nwithout the needle: accepted nothing;" in out.stdout
    assert "There is no GPU here" in out.stdout


def test_without_the_repository_it_says_what_to_do(tmp_path):
    out = run(SCRIPT, cwd=tmp_path)
    assert out.returncode == 1
    assert "set ADDRESS to the repository's address" in out.stderr
