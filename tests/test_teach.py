"""Tests of what a teacher uses: the autograder in a folder like Gradescope's, and the hand-out."""
import json
import math
import os
import re
import shutil
import subprocess
import sys

import pytest

from course.exercises import grade, handout, test_part1
from course.exercises.teach import autograder
from tests.helpers import ROOT, edit, run
from tests.test_course import hand_in_solutions
from train import load_checkpoint

TEACH = ROOT / "course/exercises/teach"
COURSE = ROOT / "course/exercises/README.md"


def packed(folder, *flags):
    """What course.exercises.handout packs, unpacked."""
    if not (ROOT / ".git").exists():
        pytest.skip("no git repository")
    handout.main(["--out", str(folder / "made.zip"), *flags])
    shutil.unpack_archive(folder / "made.zip", folder / "made")
    return folder / "made"


# ------------------------------------------------------------------------------ the autograder

# It reads memory that is not there.
CRASH = """
    import numpy
    numpy.lib.stride_tricks.as_strided(numpy.zeros(1), (2**30,), (4096,)).sum()
    return z, m, d"""


@pytest.fixture
def root(monkeypatch, tmp_path):
    """Gradescope's folder with the solutions as a submission, and somebody else's results."""
    monkeypatch.setattr(grade, "FOLDER", grade.FOLDER)
    for name in ("submission", "results"):
        (tmp_path / name).mkdir()
    (tmp_path / "results/results.json").write_text('{"score": 99}')
    hand_in_solutions(tmp_path / "submission")
    return tmp_path


def only(monkeypatch, *names):
    """Grade these exercises alone."""
    rows = [row for row in autograder.read_minutes() if row["test"] in names]
    monkeypatch.setattr(autograder, "read_minutes", lambda: rows)


def test_each_mistake_costs_its_own_points_and_shows_its_message(root, monkeypatch, capsys):
    """Even if they end the program. Submitted copies of the tests, and of grade.py, are ignored."""
    only(monkeypatch, "trim", "mipe", "gate", "pairs", "dv_block", "bounds_kernel")
    submission = root / "submission"
    edit(submission / "part1_screening.py", "(1 - (1 - s) / r)", "(1 - (1 - s) * r)")
    for name in ("conftest.py", "grade.py", "test_part1.py"):
        (submission / name).write_text("def test_trim():\n    pass\n")
    (submission / "part2_model.py").unlink()
    edit(submission / "part3_derivative.py", "    return z, m, d", CRASH)
    (submission / "old").mkdir()
    shutil.copy(submission / "part4_kernel.py", submission / "old")
    autograder.main(["--root", str(root)])
    tests = json.loads((root / "results/results.json").read_text())["tests"]
    said = [(test["name"], test["score"], test["max_score"], test["output"]) for test in tests]
    mipe, trim, gate, pairs, dv_block, bounds = said
    assert trim[:3] == ("1.6 trim", 0, 3)
    assert trim[3].startswith("1 - s must be divided by r")
    assert (mipe, dv_block) == (("1.5 mipe", 6, 6, "right"), ("3.2 dv_block", 5, 5, "right"))
    assert gate[3].startswith("part2_model.py is missing. The folder has part")
    assert pairs[3] == "your code ended the program, with exit code -11"
    assert bounds[3] == ("there are 2 files part4_kernel.py: old/part4_kernel.py, part4_kernel.py. "
                         "Hand in one of them")
    assert capsys.readouterr().out.startswith("11 of 50 points")


def test_a_folder_of_submissions_becomes_a_table(tmp_path, monkeypatch, capsys):
    """A stand-in for the tests: a file says how its part ends."""
    def run_test(part, test):
        said = (grade.FOLDER / autograder.PARTS[int(part) - 1]).read_text()
        if said == "hangs" and test == "gate":
            said = "this did not finish in 60 seconds"
        return said == "right" or test == "trim", said

    monkeypatch.setattr(grade, "FOLDER", grade.FOLDER)
    monkeypatch.setattr(autograder, "run_test", run_test)
    only(monkeypatch, "trim", "unit", "gate", "pairs", "dv_block", "bounds_kernel")

    def hand_in(name, *ends):
        (tmp_path / name / "in a folder").mkdir(parents=True)
        for part, end in zip(autograder.PARTS, ends):
            (tmp_path / name / "in a folder" / part).write_text(end)

    hand_in("ann", "right", "right", "right", "right")
    hand_in("bob", "wrong\nin two lines", "hangs", "right", "right")
    shutil.make_archive(tmp_path / "zoe", "zip", tmp_path / "ann")
    (tmp_path / "dan.zip").write_text("no archive")
    autograder.main([str(tmp_path)])
    header, *rows = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert header == ["submission", *autograder.PARTS, "total", "remarks"]
    ann, bob, dan, zoe = rows
    assert ann == ["ann", "11", "3", "13", "25", "52", ""]
    assert zoe == ["zoe.zip", *ann[1:]]
    assert bob == ["bob", "3", "0", "13", "25", "41", "part 2: this did not finish in 60 seconds; "
                   "2.2 gate: this did not finish in 60 seconds"]
    assert dan[:6] == ["dan.zip", "0", "0", "0", "0", "0"]
    assert dan[6].startswith("not graded: ")

    with pytest.raises(SystemExit, match="ann/in a folder is one submission"):
        autograder.main([str(tmp_path / "ann/in a folder")])


def test_a_part_that_cannot_run_here_has_no_points(monkeypatch):
    monkeypatch.setattr(test_part1, "test_trim", lambda: pytest.skip("no triton"))
    try:
        assert autograder.run_test("1", "trim") == (False, "no triton")
    except pytest.skip.Exception:                      # which would only skip this test
        pytest.fail("the skip ends the autograder")


def test_results_of_somebody_else_never_stay(root, monkeypatch):
    monkeypatch.setattr(autograder, "grade_files", lambda submission: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        autograder.main(["--root", str(root)])
    results = json.loads((root / "results/results.json").read_text())
    assert results["score"] == 0
    assert results["output"].startswith("Grading did not finish")

    # And without any Python.
    subprocess.run(["bash", TEACH / "run_autograder"], capture_output=True,
                   env=os.environ | {"AUTOGRADER_ROOT": str(root)})
    assert not (root / "results/results.json").exists()


@pytest.mark.slow
def test_what_gradescope_unpacks_grades_a_submission(root, tmp_path):
    """autograder.zip, started as Gradescope does, with a few of the tests."""
    source = packed(tmp_path, "--autograder")
    assert not list(source.rglob("solutions"))
    source.rename(root / "source")
    minutes = root / "source/course/exercises/teach/minutes.tsv"
    minutes.write_text("".join(line for line in minutes.read_text().splitlines(keepends=True)
                               if re.search("^exercise|\ttrim|\tpairs|\tbounds", line)))
    python = root / "venv/bin/python3"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    out = subprocess.run(["bash", root / "source/run_autograder"], capture_output=True, text=True,
                         env=os.environ | {"AUTOGRADER_ROOT": str(root)})
    assert out.stdout.startswith("36 of 36 points"), out.stderr
    assert json.loads((root / "results/results.json").read_text())["tests"]


# ------------------------------------------------------------------------------- the hand-out

@pytest.fixture(scope="module")
def course(tmp_path_factory):
    """The hand-out, unpacked."""
    return packed(tmp_path_factory.mktemp("hand-out")) / "course"


def test_the_hand_out_leaves_out_what_is_for_teachers(course):
    names = {path.relative_to(course).as_posix() for path in course.rglob("*")}
    assert {"multiscreen.py", "course/exercises/part1_screening.py"} <= names
    hidden = ("solutions", "teach", "handout", "test_course", "test_notebook", "course/README.md")
    assert [name for name in names if any(word in name for word in hidden)] == []
    for path in course.rglob("*.md"):
        text = path.read_text()
        assert "teach/" not in text and "solutions/" not in text, path


def test_no_link_in_the_hand_out_is_dead(course):
    links = [(path, link.partition("#")[0]) for path in course.rglob("*.md")
             for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text()) if "://" not in link]
    assert len(links) > 10
    assert [link for path, link in links if not (path.parent / link).exists()] == []


@pytest.mark.slow
def test_the_tests_run_in_the_hand_out_and_the_stubs_fail(course):
    out = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "course/exercises/test_part1.py",
              cwd=course, env=os.environ | {"EXERCISES": "", "PYTHONPATH": str(course)})
    assert out.returncode == 1
    for n in range(1, 11):
        assert f"\nstill to do: Exercise 1.{n}: " in out.stdout
    assert "Traceback" not in out.stdout and "grade.py" not in out.stdout


# ------------------------------------------------------------------------------- the pages

def test_the_scripts_of_the_pages_run(tmp_path, monkeypatch, capsys):
    """The first one is the file that the second one imports. One of eight layers will do."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "models").symlink_to(ROOT / "models")
    (tmp_path / "out").mkdir()
    text = COURSE.read_text() + (TEACH / "answers.md").read_text()
    scripts = re.findall(r"```python\n(.*?)```", text, re.S)
    (tmp_path / "softpick.py").write_text(scripts[0])
    for script in scripts:
        exec(script.replace("enumerate(model.layers, 1)", "enumerate(model.layers[3:4], 4)"), {})
    assert "tile 4.8" in capsys.readouterr().out
    assert load_checkpoint("out/one.pt")[0].layers[3].w[7] == math.inf
