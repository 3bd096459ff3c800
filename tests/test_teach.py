"""For teachers: the autograder in a folder like Gradescope's, and every number on paper."""
import json
import math
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch

import multiscreen
from exercises.solutions import part3_derivative, part4_kernel
from exercises.teach import accounting, autograder, observe
from support.cli import UsageError
from tests.helpers import ROOT, needs_kernel

TEACH = ROOT / "exercises/teach"
COURSE = (ROOT / "exercises/README.md").read_text()


# ------------------------------------------------------------------------------ the autograder

@pytest.fixture
def root(tmp_path):
    """Gradescope's folder, with the solutions as a submission."""
    ignore = shutil.ignore_patterns(".git", "__pycache__", "out*", "report")
    shutil.copytree(ROOT, tmp_path / "source", ignore=ignore)
    (tmp_path / "submission").mkdir()
    (tmp_path / "venv").symlink_to(sys.prefix)
    solutions = (multiscreen, multiscreen, part3_derivative, part4_kernel)
    for name, module in zip(autograder.PARTS, solutions):
        shutil.copyfile(module.__file__, tmp_path / "submission" / name)
    return tmp_path


def results_of(root):
    """{test: its entry of results.json}, and all of it."""
    results = json.loads((root / "results/results.json").read_text())
    return {test["name"].split()[1]: test for test in results["tests"]}, results


@needs_kernel
def test_the_solutions_have_full_marks(root):
    env = os.environ | {"AUTOGRADER_ROOT": str(root)}
    out = subprocess.run([TEACH / "run_autograder"], env=env, capture_output=True, text=True)
    assert not out.returncode, out.stderr
    tests, results = results_of(root)
    assert [test for test in tests.values() if test["score"] != test["max_score"]] == []
    assert set(results) == {"tests", "output", "execution_time", "stdout_visibility"}
    assert set(tests["trim"]) == {"name", "score", "max_score", "status", "output", "visibility"}
    full = sum(minutes for _, minutes in autograder.read_minutes().values())
    assert out.stdout.startswith(f"{full} of {full} points")
    assert f" {full} in all" in (TEACH / "README.md").read_text().replace("\n", " ")


def graded(root, monkeypatch, *tests):
    """The entries of some tests alone."""
    minutes = {test: row for test, row in autograder.read_minutes().items() if test in tests}
    monkeypatch.setattr(autograder, "read_minutes", lambda: minutes)
    autograder.main(["--root", str(root)])
    return results_of(root)[0]


def edit(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_each_mistake_costs_its_own_points_and_shows_its_message(root, monkeypatch):
    """And a file of the student in place of a test, or of what a test uses, is not taken."""
    part1 = root / "submission/part1_screening.py"
    edit(part1, "(1 - (1 - s) / r)", "(1 - (1 - s) * r)")
    edit(part1, "    square = x.square()", "    __import__('os')._exit(0)\n    square = x.square()")
    for name in ("conftest.py", "checks.py", "test_part1.py", "adapters.py"):
        (root / "submission" / name).write_text("def test_trim():\n    pass\n")
    (root / "submission/part2_model.py").write_text("def project(self, x, W:\n")
    (root / "submission/part3_derivative.py").unlink()
    names = ("trim", "mipe", "tanh_norm", "project", "pairs")
    tests = graded(root, monkeypatch, *names)
    assert [tests[name]["score"] for name in names] == [0, 6, 0, 0, 0]
    assert "1 - s must be divided by r" in tests["trim"]["output"]
    assert "did not finish" in tests["tanh_norm"]["output"]
    assert "part2_model.py" in tests["project"]["output"]
    assert "still to do: Exercise 3.1" in tests["pairs"]["output"]
    assert "part3_derivative.py" in results_of(root)[1]["output"]


def test_a_part_that_takes_too_long_has_no_results():
    assert autograder.run_tests(ROOT, 1, 0.01) == {}


def test_solutions_are_not_in_the_graded_copy(root, tmp_path):
    assert autograder.lay_out(root / "source", root / "submission", tmp_path / "copy") == []
    assert not (tmp_path / "copy/exercises/solutions").exists()
    assert not (tmp_path / "copy/exercises/teach").exists()
    assert not (tmp_path / "copy/tests").exists()


def test_a_folder_without_a_submission_is_explained(tmp_path):
    with pytest.raises(UsageError, match="source is missing"):
        autograder.main(["--root", str(tmp_path)])


def test_setup_is_a_script():
    assert not subprocess.run(["bash", "-n", TEACH / "setup.sh"]).returncode
    assert os.access(TEACH / "setup.sh", os.X_OK) and os.access(TEACH / "run_autograder", os.X_OK)


# ------------------------------------------------------------------------------- its table

def test_each_exercise_has_its_minutes():
    names = {test for part in sorted((ROOT / "exercises").glob("test_part*.py"))
             for test in re.findall(r"^def test_(\w+)\(", part.read_text(), re.M)}
    assert autograder.read_minutes().keys() == names


def test_the_course_shows_the_minutes_and_the_difficulty():
    for line in autograder.MINUTES.read_text().splitlines()[1:]:
        exercise, test, minutes, difficulty = line.split("\t")
        name = {"cache": "KeyCache"}.get(test, test)
        if "." in exercise:
            assert f"| {exercise} | `{name}` | {minutes} | {difficulty} |" in COURSE


def test_the_hand_out_leaves_out_what_is_for_teachers(tmp_path):
    if not (ROOT / ".git").exists():
        pytest.skip("no git repository")
    command, = re.findall(r"^git archive --prefix=course/.*$", COURSE, re.M)
    subprocess.run(command.replace("course.zip", str(tmp_path / "course.tar")), shell=True,
                   check=True, cwd=ROOT)
    names = subprocess.run(["tar", "tf", tmp_path / "course.tar"], capture_output=True,
                           text=True).stdout.split()
    assert "course/exercises/part1_screening.py" in names
    hidden = ("solutions/", "teach/", "mutants", "test_exercises", "test_teach")
    assert [name for name in names if any(word in name for word in hidden)] == []


# ---------------------------------------------------------------------------- on paper, observed

def test_the_problem_set_has_the_computed_numbers():
    solutions = (TEACH / "problems.md").read_text().split("# Solutions")[1]
    parts = re.split(r"^(\d)\. ", solutions, flags=re.M)
    for question, text in zip(parts[1::2], parts[2::2]):
        for what, number in accounting.answers()[question].items():
            assert f"**{accounting.in_words(number)}**" in text, what
    assert parts[1::2] == list(accounting.answers())


def test_parameters_and_initial_windows_are_the_models():
    c = accounting.PSI_8
    model = multiscreen.Multiscreen(multiscreen.Config(psi=8))
    assert accounting.parameters(c) == sum(p.numel() for p in model.parameters())
    w = multiscreen.window(model.layers[0].s_w)
    torch.testing.assert_close(w, torch.tensor(accounting.initial_windows(c)))


@pytest.mark.parametrize("T, w", [(50, 1.0), (50, 17.0), (64, 17.5), (64, 18.0), (70, math.inf)])
def test_pairs_and_blocks_are_those_of_softmask(T, w):
    i = torch.arange(T)
    seen = multiscreen.softmask(i - i[:, None], torch.tensor(w)) > 0
    assert accounting.pairs(T, w) == seen.sum()
    for BI in (16, 32):
        blocks = {(q // BI, k // 16) for q, k in seen.nonzero().tolist()}
        assert accounting.visited_blocks(T, w, BI) == len(blocks)


def test_the_cache_has_the_computed_bytes():
    c = accounting.PSI_8
    model = multiscreen.Multiscreen(multiscreen.Config(psi=8, vocab_size=11))
    caches = [multiscreen.KeyCache() for _ in model.layers]
    with torch.no_grad():
        model.hidden(torch.zeros(1, 40, dtype=torch.int64), caches)
    kept = sum(x[:, :, :40].numel() for cache in caches for x in (cache.k, cache.v))
    assert 4 * kept == accounting.cache_bytes(c, 40)


def test_answers_say_what_is_observed():
    answers = " ".join((TEACH / "answers.md").read_text().split())
    alpha = observe.relevance_of_a_turned_key()
    assert f"{alpha[40]:.2f} at 40 and {alpha[50]:.2f} at 50" in answers
    assert alpha[0] == 1 and [n for n, x in alpha.items() if x == 0] == [60, 70, 80, 90]
    copied = observe.weight_of_a_copied_key()
    assert copied["softmax"] == (1.0, 0.5)
    assert "{:.2f} stays {:.2f}".format(*copied["screening"]) in answers
    passes = observe.passes_of_generate()
    assert f"{passes['calls']} times either way" in answers
    assert f"cache {passes['with the cache']} tokens" in answers
    assert f"= {passes['without']:,}." in answers
    assert set(observe.gradients_of_a_rejected_key().values()) == {0.0}
    assert f"{accounting.visited_blocks(4096, 17, BI=32)} visits" in answers
    assert f"{accounting.visited_blocks(4096, math.inf, BI=32):,} for w = inf" in answers


def test_rounding_grows_as_the_answers_say():
    apart = observe.rounding_grows()
    assert apart[1] < 1e-6
    assert apart[200] > 1e-3
