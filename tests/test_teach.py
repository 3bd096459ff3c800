"""Tests for teachers: the autograder in a folder like Gradescope's, and the problem set."""
import json
import math
import os
import re
import shutil
import subprocess

import pytest
import torch

import multiscreen
from course.exercises import handout
from course.exercises.checks import correlated
from course.exercises.solutions import part3_derivative, part4_kernel
from course.exercises.teach import autograder
from support.cli import UsageError
from support.measure import beside
from support.models import build_model
from support.run import load_checkpoint
from tests.helpers import ROOT, args_of, full_disk, run

TEACH = ROOT / "course/exercises/teach"
COURSE = (ROOT / "course/exercises/README.md").read_text()


# ------------------------------------------------------------------------------ the autograder

@pytest.fixture
def root(tmp_path):
    """Gradescope's folder, with the solutions as a submission."""
    ignore = shutil.ignore_patterns(".git", ".venv", "__pycache__", "out*", "report", "runs")
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
    """Submitted copies of the tests, and of what they use, are ignored."""
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
    assert results["output"] == "missing, so the stubs were graded instead: part2_model.py"
    assert capsys.readouterr().out.startswith("11 of 22 points")

    # The keys that Gradescope reads.
    assert set(results) == {"tests", "output", "execution_time", "stdout_visibility"}
    assert set(tests["trim"]) == {"name", "score", "max_score", "status", "output", "visibility"}


def test_run_autograder_starts_it(root):
    """A stand-in for Python reports how it was called."""
    python = root / "venv/bin/python3"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\necho in $PWD: $@\n")
    python.chmod(0o755)
    said = subprocess.run([TEACH / "run_autograder"], env=os.environ | {"AUTOGRADER_ROOT": root},
                          capture_output=True, text=True).stdout
    assert said == f"in {root}/source: -m course.exercises.teach.autograder --root {root}\n"


def test_a_part_that_takes_too_long_has_no_results():
    assert autograder.run_tests(ROOT, 1, 0.01) == {}


def test_only_the_students_work_is_in_the_graded_copy(root, tmp_path):
    assert autograder.lay_out(root / "source", root / "submission", tmp_path / "copy") == []
    assert not (tmp_path / "copy/course/exercises/solutions").exists()
    assert not (tmp_path / "copy/course/exercises/teach").exists()
    assert not (tmp_path / "copy/tests").exists()
    taken = tmp_path / "copy/course/exercises/part4_kernel.py"
    assert taken.read_bytes() == (root / "submission/part4_kernel.py").read_bytes()


def test_a_folder_without_a_submission_is_explained(tmp_path):
    with pytest.raises(UsageError, match="source is missing"):
        autograder.main(["--root", str(tmp_path)])


def test_setup_is_a_script():
    assert not subprocess.run(["bash", "-n", TEACH / "setup.sh"]).returncode
    assert os.access(TEACH / "setup.sh", os.X_OK) and os.access(TEACH / "run_autograder", os.X_OK)


# ------------------------------------------------------------------------------- its table

def test_each_exercise_has_its_minutes():
    names = {test for part in sorted((ROOT / "course/exercises").glob("test_part*.py"))
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


# ------------------------------------------------------------------------------- the hand-out

@pytest.fixture(scope="module")
def course(tmp_path_factory):
    """The hand-out, unpacked."""
    if not (ROOT / ".git").exists():
        pytest.skip("no git repository")
    folder = tmp_path_factory.mktemp("hand-out")
    out = run("-m", "course.exercises.handout", "--out", folder / "course.zip")
    assert (out.returncode, out.stderr) == (0, "")
    shutil.unpack_archive(folder / "course.zip", folder)
    return folder / "course"


def test_the_hand_out_leaves_out_what_is_for_teachers(course):
    names = {path.relative_to(course).as_posix() for path in course.rglob("*")}
    assert {"multiscreen.py", "course/exercises/part1_screening.py", "tests/reference.py"} <= names
    hidden = ("solutions", "teach", "handout", "mutants", "test_exercises", "test_notebook")
    assert [name for name in names if any(word in name for word in hidden)] == []
    for path in course.rglob("*.md"):
        text = path.read_text()
        assert "teach/" not in text and "solutions/" not in text, path
    assert not (course / "course/README.md").exists()
    assert "Part 5" in (course / "course/exercises/README.md").read_text()


def test_a_full_disk_names_the_hand_out_and_leaves_no_half(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(handout, "committed_files", lambda: [("a.py", b"a = 1\n" * 9, 0o644)])
    with full_disk(), pytest.raises(OSError) as e:
        handout.main(["--out", str(tmp_path / "course.zip")])
    assert e.value.filename == str(tmp_path / "course.zip")
    assert not any(tmp_path.iterdir())


def test_a_clone_by_windows_leaves_scripts_as_they_are():
    """It may be used in WSL, where bash knows no other line ends."""
    def git(*words):
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout

    scripts = [*git("grep", "-lI", "^#!").split(), *git("ls-files", "*.sh").split()]
    if not scripts:
        pytest.skip("no git repository")
    ends = git("check-attr", "eol", *scripts).splitlines()
    assert len(ends) > 10
    assert [line for line in ends if not line.endswith(": eol: lf")] == []


def test_no_link_in_the_hand_out_is_dead(course):
    links = [(path, link.partition("#")[0]) for path in course.rglob("*.md")
             for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text()) if "://" not in link]
    assert len(links) > 10
    assert [link for path, link in links if not (path.parent / link).exists()] == []


def test_the_tests_run_in_the_hand_out_and_the_stubs_fail(course):
    out = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "course/exercises", "-k", "part1",
              cwd=course, env=os.environ | {"EXERCISES": "", "PYTHONPATH": str(course)})
    assert out.returncode == 1
    assert out.stdout.count("still to do: Exercise 1.") == 10
    assert "part 1: 0 of 10\n" in out.stdout


# ------------------------------------------------------------------------------------- part 5

def test_the_variants_of_part_5_are_models():
    names = re.findall(r"^\| .* \| `(multiscreen:[\w-]+)` \|", COURSE, re.M)
    assert len(names) == 5
    for name in names:
        model = build_model(name, {"psi": 2, "vocab_size": 20})
        assert model(torch.arange(5)[None]).shape == (1, 5, 20)
    flags, = re.findall(r"^\| .* \| `(.*--model transformer:.*)` in place", COURSE, re.M)
    # They follow the flags of idea.sh.
    assert args_of(["--psi", "6", *flags.split()]).lr == 2**-7


def test_the_pages_name_the_files_of_a_bundled_model_where_they_are_written():
    table = beside(ROOT / "models/text.pt", "tiles.tsv")
    assert f"`{table}`" in COURSE
    lecture = (TEACH / "lecture4.md").read_text()
    assert f"`{table.with_name(f'{table.stem}_windows.png')}`" in lecture


def test_the_sigmoid_of_the_guide_rejects_no_key_in_the_window():
    guide = (ROOT / "docs/variants.md").read_text()
    names = {"__name__": "sigmoid"}
    exec(guide.partition("```python\n")[2].partition("```")[0], names)
    q, k, v = correlated(0, 1, 1, 12, 12)
    v = torch.eye(12, dtype=torch.float64)[None, None]             # makes h alpha_d
    w, r = torch.tensor([6.0]).double(), torch.tensor([0.1]).double()
    alpha_d = names["Sigmoid"].own_screen(q, k, v, w, r)[0, 0]
    inside = multiscreen.softmask(torch.arange(12) - torch.arange(12)[:, None], w) > 0
    assert (multiscreen.relevance(q, k, w, r)[0, 0][inside] == 0).any()   # Trim rejects some
    assert torch.equal(alpha_d > 0, inside)

    # 8 / r would amplify what an autocast rounds; values may have 16 bits.
    q, k, v = q.float(), k.float(), v.bfloat16()
    found = names["Sigmoid"].own_screen(q, k, v, w.float(), r.float())
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(names["Sigmoid"].own_screen(q, k, v, w.float(), r.float()), found)
    assert found.dtype == torch.bfloat16
    assert (found[0, 0] - alpha_d).abs().max() < 0.01


def test_the_softpick_of_the_guide_can_attend_to_nothing():
    guide, names = (ROOT / "docs/variants.md").read_text(), {"__name__": "softpick"}
    exec(guide.split("```python\n")[2].partition("```")[0], names)
    d = torch.arange(4) - torch.arange(4)[:, None]
    s = torch.tensor([-1.0, 2.0, 0.5, -3.0]).masked_fill(d > 0, -math.inf)
    p = names["Softpick"].weights(None, s, d)
    assert p[0].tolist() == [0, 0, 0, 0]
    assert p[3].count_nonzero() == 2
    assert 0 < p[3].sum() < 1


def test_the_exponent_of_the_guide_begins_at_2_and_is_learned():
    guide, names = (ROOT / "docs/variants.md").read_text(), {"__name__": "power"}
    exec(guide.split("```python\n")[3].partition("```")[0], names)
    torch.manual_seed(0)
    config = multiscreen.Config(psi=3, vocab_size=20)
    model = multiscreen.Multiscreen(config, tiles=names["Power"])
    plain = multiscreen.Multiscreen(config)
    plain.load_state_dict(model.state_dict(), strict=False)
    tokens = torch.randint(20, (2, 30), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model(tokens), plain(tokens))
    caches = model.new_caches()
    parts = [model(part, caches) for part in tokens.split([9, 21], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), model(tokens))

    # Below 1 the slope of alpha at 0 is infinite, and relu's is 0.
    for layer in model.layers:
        layer.s_p.data.fill_(-1.0)
    model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
    for p in model.parameters():
        assert p.grad.isfinite().all()
    assert all(layer.s_p.grad.any() for layer in model.layers)


# ------------------------------------------------------------------- part 5: a model that copies

def run_script(text, begin, capsys, *edits):
    """What the script of a page prints that begins in that way, after edits (old, new)."""
    script, = (block.partition("```")[0] for block in text.split("```python\n")[1:]
               if block.startswith(begin))
    for old, new in edits:
        assert old in script
        script = script.replace(old, new)
    exec(script, {})
    return capsys.readouterr().out


def test_the_tiles_that_copy(monkeypatch, capsys):
    """With any Python's texts, the numbers are near the table's. Two of eight layers will do."""
    monkeypatch.chdir(ROOT)
    answers = (TEACH / "answers.md").read_text()
    said = run_script(COURSE, "import torch\n\nfrom lab.copying import CUE", capsys,
                      ("enumerate(model.layers, 1)", "enumerate(model.layers[2:4], 3)"))
    found = re.findall(r"([\d.]+)  another string ([\d.]+)  (?:all|tile) ([\w.]+)", said)
    rows = {tile: (first, other) for tile, first, other in re.findall(
        r"^\| (none|\d\.\d) \|.*? \| ([\d.]+) \| ([\d.]+) \|", answers, re.M)}
    assert [tile for *_, tile in found[:3]] == ["tiles", "4.8", "3.1"]
    for numbers, name in zip(found, ["none", "4.8", "3.1"]):
        for number, expected in zip(numbers[:2], rows[name]):
            assert float(number) == pytest.approx(float(expected), abs=0.7)
    assert float(found[3][0]) < 3.1                    # no other tile of these layers costs 1 nat


def test_where_they_look(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    answers = (TEACH / "answers.md").read_text()
    said = run_script(answers, "import torch\n\nfrom lab.copying import get_texts", capsys)
    number = r"\d\.\d\d"
    for line in said.splitlines():
        expected, = (x for x in answers.splitlines() if x.startswith(line[:9]))
        assert re.sub(number, "", line) == re.sub(number, "", expected)
        found = [[float(x) for x in re.findall(number, y)] for y in (line, expected)]
        assert found[0] == pytest.approx(found[1], abs=0.1)

    # Without tile 3.1, tile 4.8 does not find its key.
    said = run_script(answers, "import torch\n\nfrom lab.copying import get_texts", capsys,
                      ("i = torch", "model.layers[2].s_O.data[0] = -torch.inf\ni = torch"))
    assert float(re.search(rf"tile 4.8.* after that ({number})", said)[1]) < 0.2


def test_one_expanded_window(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run_script((TEACH / "answers.md").read_text(), "import torch\n\nckpt", capsys,
               ("models/", f"{ROOT}/models/"), ("out/", ""))
    model, _, _ = load_checkpoint("one.pt")
    windows = torch.stack([layer.window() for layer in model.layers])
    assert (windows == math.inf).nonzero().tolist() == [[3, 7]]


# -------------------------------------------------------------------------------- lectures

@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_the_minutes_of_a_lecture_add_up(n):
    text = (TEACH / f"lecture{n}.md").read_text()
    blocks = re.findall(r"^\*\*(\d+)-(\d+)\. ", text, re.M)
    assert [int(begin) for begin, _ in blocks] == [0, *(int(end) for _, end in blocks[:-1])]
    assert blocks[-1][1] == "90"


# -------------------------------------------------------------------------------- on paper

@pytest.mark.parametrize("name", ["problems.md", "answers.md"])
def test_the_python_of_the_solutions_gives_their_numbers(name):
    text = (TEACH / name).read_text()
    lines = re.findall(r"`([^`]+)`\s+=\s+\*\*([\d,.]+)\*\*", text)
    assert len(lines) == len(re.findall(r"=\s+\*\*", text))
    for line, number in lines:
        digits = number.replace(",", "")
        found = eval(line, vars(math) | {"sum": sum})
        decimals = len(digits.partition(".")[2])
        assert f"{found:.{decimals}f}" == digits, line
