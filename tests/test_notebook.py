"""The notebook of the course: what its .py says, without outputs, and it runs."""
import json
import os
import re

import pytest
import torch

from multiscreen import screen
from tests.helpers import ROOT, needs_interpreter, needs_matplotlib, run
from tests.pretended import Pretended

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


@needs_interpreter
def test_its_last_cell_compares_part_4s_kernels_with_the_definition_on_a_gpu(monkeypatch, capsys):
    """On a pretended one, where they are interpreted."""
    monkeypatch.setenv("EXERCISES", "reference")
    monkeypatch.setattr("triton.testing.do_bench", lambda f: 1.0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "pretended")
    cell = SCRIPT.read_text().rpartition("# %%\n")[2]
    cell = cell.replace("run_on_gpu()", "run_on_gpu(T=70, w=20.0)")
    with Pretended("cuda") as gpu:
        exec(cell, {"os": os, "torch": torch, "screen": screen})
    assert (gpu.launches["forward_kernel"], gpu.launches["dq_kernel"]) == (1, 1)
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first.endswith("w = 20, kernels of exercises.solutions.part4_kernel")
    h, dq = (float(x) for x in re.fullmatch("largest difference: h (.*), dq (.*)", second).groups())
    assert 0 < h < 1e-5
    assert 0 < dq < 1e-4


def test_without_the_repository_it_says_what_to_do(tmp_path):
    out = run(SCRIPT, cwd=tmp_path)
    assert out.returncode == 1
    assert "set ADDRESS to the repository's address" in out.stderr
