"""For teachers: the autograder in a folder like Gradescope's, and every number on paper."""
import json
import math
import os
import re
import shutil
import subprocess

import pytest
import torch

import multiscreen
from exercises.solutions import part3_derivative, part4_kernel
from exercises.teach import accounting, autograder, observe
from support.cli import UsageError
from tests.helpers import ROOT

TEACH = ROOT / "exercises/teach"
COURSE = (ROOT / "exercises/README.md").read_text()


# ------------------------------------------------------------------------------ the autograder

@pytest.fixture
def root(tmp_path):
    """Gradescope's folder, with the solutions as a submission."""
    ignore = shutil.ignore_patterns(".git", "__pycache__", "out*", "report", "runs")
    shutil.copytree(ROOT, tmp_path / "source", ignore=ignore)
    (tmp_path / "submission").mkdir()
    solutions = (multiscreen, multiscreen, part3_derivative, part4_kernel)
    for name, module in zip(autograder.PARTS, solutions):
        shutil.copyfile(module.__file__, tmp_path / "submission" / name)
    return tmp_path


def edit(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_each_mistake_costs_its_own_points_and_shows_its_message(root, monkeypatch, capsys):
    """And a file of the student in place of a test, or of what a test uses, is not taken."""
    submission = root / "submission"
    edit(submission / "part1_screening.py", "(1 - (1 - s) / r)", "(1 - (1 - s) * r)")
    for name in ("conftest.py", "checks.py", "test_part1.py", "adapters.py"):
        (submission / name).write_text("def test_trim():\n    pass\n")
    (submission / "part2_model.py").unlink()
    edit(submission / "part3_derivative.py", "    return z, c, d",
         "    __import__('os')._exit(0)")
    minutes = autograder.read_minutes()
    some = {test: minutes[test] for test in ("trim", "mipe", "pairs", "dv_block")}
    monkeypatch.setattr(autograder, "read_minutes", lambda: some)
    autograder.main(["--root", str(root)])

    results = json.loads((root / "results/results.json").read_text())
    tests = {test["name"].split()[1]: test for test in results["tests"]}
    assert [tests[name]["score"] for name in some] == [0, 6, 0, 5]
    assert "1 - s must be divided by r" in tests["trim"]["output"]
    assert tests["mipe"]["status"] == "passed"
    assert "did not finish" in tests["pairs"]["output"]
    assert results["output"] == "missing, so its stubs were graded: part2_model.py"
    assert capsys.readouterr().out.startswith("11 of 22 points")

    # What Gradescope reads.
    assert set(results) == {"tests", "output", "execution_time", "stdout_visibility"}
    assert set(tests["trim"]) == {"name", "score", "max_score", "status", "output", "visibility"}


def test_run_autograder_starts_it(root):
    """With a Python that says how it was called."""
    python = root / "venv/bin/python3"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\necho in $PWD: $@\n")
    python.chmod(0o755)
    said = subprocess.run([TEACH / "run_autograder"], env=os.environ | {"AUTOGRADER_ROOT": root},
                          capture_output=True, text=True).stdout
    assert said == f"in {root}/source: -m exercises.teach.autograder --root {root}\n"


def test_a_part_that_takes_too_long_has_no_results():
    assert autograder.run_tests(ROOT, 1, 0.01) == {}


def test_only_the_students_work_is_in_the_graded_copy(root, tmp_path):
    assert autograder.lay_out(root / "source", root / "submission", tmp_path / "copy") == []
    assert not (tmp_path / "copy/exercises/solutions").exists()
    assert not (tmp_path / "copy/exercises/teach").exists()
    assert not (tmp_path / "copy/tests").exists()
    taken = tmp_path / "copy/exercises/part4_kernel.py"
    assert taken.read_bytes() == (root / "submission/part4_kernel.py").read_bytes()


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
    full = sum(minutes for _, minutes in autograder.read_minutes().values())
    assert f" {full} in all" in (TEACH / "README.md").read_text().replace("\n", " ")


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


def test_rounding_grows():
    """answers.md says by how much in 200 steps."""
    apart = observe.rounding_grows(45)
    assert apart[1] < 1e-6
    assert max(apart[n] for n in range(40, 46)) > 2e-6
