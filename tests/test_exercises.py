"""The course: solutions pass, stubs fail, and each known mistake gets its message."""
import os
import re

import pytest
import torch

import multiscreen
from exercises import part5_research, picture, test_part1, test_part2, test_part3, trained
from exercises.adapters import earlier, mine
from exercises.checks import Wrong, correlated
from screening_triton import available
from support.cli import UsageError
from tests import mutants
from tests.helpers import ROOT, fit, run

# Kernels are interpreted, or left out where they are compiled for a GPU.
PARTS = [test_part1, test_part2, test_part3]
if available("cpu") is None:
    from exercises import test_part4
    from tests import mutants_kernel  # noqa: F401  (it adds to the lists of mutants)

    PARTS.append(test_part4)


def find_test(exercise):
    """The test of one exercise, a function without arguments."""
    return next(f for part in PARTS if (f := getattr(part, f"test_{exercise}", None)))


@pytest.fixture(autouse=True)
def solved(monkeypatch):
    """Everything is solved, but for what a test puts in its place."""
    monkeypatch.setenv("EXERCISES", "reference")


@pytest.fixture
def put(monkeypatch):
    """put(exercise, f): f stands in for the student's work."""
    def stand_in(exercise, f):
        monkeypatch.setitem(vars(mine), mutants.stands_for(exercise, f), f)

    return stand_in


@pytest.mark.parametrize("exercise, f, words", mutants.MUTANTS,
                         ids=[f"{name}-{words}" for name, _, words in mutants.MUTANTS])
def test_a_known_mistake_gets_its_message(put, exercise, f, words):
    put(exercise, f)
    with pytest.raises(Wrong) as e:
        find_test(exercise)()
    print(e.value)                                     # pytest -rP: read them
    assert words in str(e.value)


@pytest.mark.parametrize("exercise, f", mutants.CORRECT,
                         ids=[f"{name}-{f.__name__}" for name, f in mutants.CORRECT])
def test_what_is_right_in_another_way_passes(put, exercise, f):
    put(exercise, f)
    find_test(exercise)()


def test_later_parts_take_the_students_function_or_else_the_repositorys(monkeypatch, put):
    def trim(s, r):
        return s

    monkeypatch.setenv("EXERCISES", "")
    assert earlier("trim") is multiscreen.trim
    put("trim", trim)
    assert earlier("trim") is trim


# ------------------------------------------------------------------------- as a student calls it

def check_course(*flags, **variables):
    """`pytest exercises` in a process of its own."""
    env = os.environ | {"TRITON_INTERPRET": "1"} | variables
    return run("-m", "pytest", "-q", "-p", "no:cacheprovider", "exercises", *flags, env=env)


def points(out):
    """{part: (points, of)} as printed."""
    return {part: (int(n), int(of))
            for part, n, of in re.findall(r"^(.+): (\d+) of (\d+)$", out.stdout, re.M)}


def test_the_stubs_fail_and_say_what_to_do(tmp_path):
    """One run: the stubs, a file of hidden tests, and the grades."""
    hidden = tmp_path / "test_hidden.py"
    hidden.write_text("def test_one():\n    pass\n\n\ndef test_two():\n    assert 0\n")
    out = check_course("--hidden", str(hidden), "--grades", EXERCISES="")
    assert out.returncode == 1
    assert points(out) == {"part 1": (0, 10), "part 2": (0, 12), "part 3": (0, 8),
                           "part 4": (0, 5), "test_hidden": (1, 2)}
    for n, of in ((1, 10), (2, 10), (3, 8), (4, 5)):
        for m in range(1, of + 1):
            if (n, m) not in ((2, 9), (2, 10)):        # these two fail in what they are built on
                assert f"still to do: Exercise {n}.{m}: " in out.stdout, (n, m)
    assert "Traceback" not in out.stdout
    assert "part\texercise\tpoints\tof\n" in out.stdout
    assert "part 1\ttrim\t0\t1\n" in out.stdout
    assert "test_hidden\tone\t1\t1\n" in out.stdout
    assert "test_hidden\ttwo\t0\t1\n" in out.stdout


def test_every_exercise_has_a_known_mistake():
    tests = {name.removeprefix("test_") for part in PARTS for name in vars(part)
             if name.startswith("test_")}
    assert {exercise for exercise, _, _ in mutants.MUTANTS} == tests


def test_the_picture_of_loads_is_what_its_script_draws():
    assert (ROOT / "exercises/loads.svg").read_text() == picture.draw()


def test_a_trained_model_goes_into_the_students(tmp_path, capsys):
    fit(tmp_path / "out", "--steps", "2")
    trained.main(["--steps", "2", "--ckpt", str(tmp_path / "out/ckpt.pt")])
    out = capsys.readouterr().out
    assert re.search(r"^    1  (\S+)  \1$", out, re.M)              # one loss twice
    assert "the same next byte at 100.0% of 500 positions" in out


# ------------------------------------------------------------------------- the research harness

@pytest.mark.parametrize("variant", [v for v in part5_research.VARIANTS if v != "mine"])
def test_each_open_question_can_be_trained(variant, capsys, monkeypatch):
    monkeypatch.setattr(part5_research, "LONG", 200)
    data = "abcdigits" if variant == "compete" else str(ROOT / "test_multiscreen.py")
    part5_research.main([variant, "--steps", "2", "--data", data])
    out = capsys.readouterr().out
    rows = [line for line in out.splitlines() if line.startswith(tuple(part5_research.ROW_NAMES))]
    assert len(rows) == len(part5_research.ROW_NAMES)
    assert "nan" not in out


def test_variants_change_what_they_say():
    q, k, _ = correlated(0, 1, 1, 12, 12)
    v = torch.eye(12, dtype=torch.float64)[None, None]             # then h is alpha_d
    w, r = torch.tensor([6.0]).double(), torch.tensor([0.1]).double()
    alpha_d = multiscreen.relevance(q, k, w, r)[0, 0]
    compete, hard, sigmoid = (part5_research.SCREENS[name](q, k, v, w, r)[0, 0]
                              for name in ("compete", "hard-window", "sigmoid"))
    inside = multiscreen.softmask(part5_research.distances(q, k, 0), w) > 0
    assert (alpha_d[inside] == 0).any()                            # Trim rejects some
    assert (compete.sum(-1) < 1).all()
    assert torch.equal(hard > 0, alpha_d > 0)
    assert (hard >= alpha_d).all()
    assert torch.equal(sigmoid > 0, inside)


def test_untied_begins_as_the_base_does():
    base, untied = (part5_research.build_variant(name, 0) for name in ("base", "untied"))
    assert untied.screen is base.screen                # or the milliseconds differ for no reason
    tokens = torch.arange(40)[None]
    torch.testing.assert_close(untied(tokens), base(tokens))


@pytest.mark.parametrize("argv, message", [(["nothing"], "variant 'nothing' is unknown"),
                                           (["nope", "--steps", "0"], "--steps must be")])
def test_a_wrong_question_is_explained(argv, message):
    with pytest.raises(UsageError, match=message):
        part5_research.main(argv)
