"""Tests of the course's notebook: it runs, and it finds the code wherever it is opened."""
import json
import re
import shutil
import subprocess
import sys

import pytest
import torch

from multiscreen import screen
from tests.helpers import ROOT, needs_interpreter, run

NOTEBOOK = ROOT / "course/exercises/notebook.ipynb"
CELLS = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
CODE = ["".join(cell["source"]) for cell in CELLS]


@pytest.mark.slow
@needs_interpreter
def test_the_notebook_runs_and_shows_what_its_text_says(tmp_path, monkeypatch, capsys):
    """Without a GPU. The cell that trains takes 4 steps in place of 400."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    text = "\n".join(CODE).replace('"400"', '"4"').replace('/ "out-notebook"', f'/ "{tmp_path}/o"')
    with pytest.importorskip("matplotlib.pyplot").rc_context({"backend": "Agg"}):
        exec(text, {})
    said = capsys.readouterr().out
    assert "60 degrees: similarity  0.50, relevance 0\n" in said
    assert "10 equal keys: screening 0.36, softmax 0.10, for the first\n" in said
    assert "with the needle: accepted R=[8] " in said
    assert "the answer is 89\nwithout the needle: accepted nothing;" in said
    assert "still to do: Exercise 4.1" in said


def test_the_notebook_is_saved_with_its_outputs():
    for cell, code in zip(CELLS, CODE):
        figures = sum("image/png" in output.get("data", ()) for output in cell["outputs"])
        assert figures == code.count("plt.show()")
    assert not [output for cell in CELLS for output in cell["outputs"]
                if output["output_type"] == "error"]


@needs_interpreter
def test_its_last_cell_compares_part_4s_kernels_with_the_definition(monkeypatch, capsys):
    """On a CPU, where the kernels are interpreted."""
    monkeypatch.setattr("triton.testing.do_bench", lambda f: 1.0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a CPU")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "part4_kernel", raising=False)
    text = CODE[-1].replace("run_on_gpu()", "run_on_gpu(T=70, w=20.0)").replace('"cuda"', '"cpu"')
    exec(text, {"torch": torch, "screen": screen, "ROOT": ROOT, "sys": sys})
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first.endswith("kernels of course/exercises/solutions/part4_kernel.py")
    h, dq = (float(x) for x in re.fullmatch("largest difference: h (.*), dq (.*)", second).groups())
    assert 0 < h < 1e-5
    assert 0 < dq < 1e-4


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
