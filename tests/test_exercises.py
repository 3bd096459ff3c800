"""Tests of the course: solutions pass, stubs fail, each known mistake gets its message."""
import os
import re
from importlib.util import find_spec

import numpy as np
import pytest
import torch

import multiscreen
from course.exercises import (
    checks,
    test_part1,
    test_part1_screening,
    test_part2,
    test_part2_model,
    test_part3,
    trained,
)
from course.exercises.adapters import earlier, mine, own
from course.exercises.checks import Wrong
from screening_triton import available
from support.cli import UsageError
from tests import mutants
from tests.helpers import fit, run, write

# Part 4 is tested in the interpreter only.
PARTS = [test_part1, test_part1_screening, test_part2, test_part2_model, test_part3]
if available("cpu") is None:
    from course.exercises import test_part4

    PARTS.append(test_part4)
TESTS = {name.removeprefix("test_"): f for part in PARTS for name, f in vars(part).items()
         if name.startswith("test_")}


@pytest.fixture(autouse=True)
def solved(monkeypatch):
    """Use the solutions, except where a test replaces one."""
    monkeypatch.setenv("EXERCISES", "reference")


@pytest.mark.parametrize("exercise", TESTS)
def test_a_solution_passes_and_each_cause_is_of_a_wrong_value(monkeypatch, exercise):
    """Each cause given to a comparison has, in some comparison, a value that is wrong."""
    causes, revealed = set(), set()

    def expect(found, right, what, mistakes=(), tolerance=1e-5, at=None, judge=checks.expect):
        exact, mistakes = checks.as_tensor(right), [*mistakes]
        for x, cause in mistakes:
            x = checks.as_tensor(x)
            causes.add(cause)
            if x.shape != exact.shape or not checks.near(x, exact, tolerance):
                revealed.add(cause)
        judge(found, right, what, mistakes, tolerance, at)

    for place in (checks, *PARTS):
        monkeypatch.setattr(place, "expect", expect, raising=False)
    TESTS[exercise]()
    # This cause compares the student's own values, with s_w = inf replaced.
    assert causes - revealed <= {"s_w = inf must give w = inf: a clamp makes it finite"}


@pytest.fixture
def message_of(monkeypatch, tmp_path):
    """message_of(exercise, mistake, cases): what a student reads, "" if the test passes.

    cases: how many of part 4's, since some kernels take seconds in Triton's interpreter.
    """
    all_cases = test_part4.CASES if available("cpu") is None else []

    def message_of(exercise, mistake, cases):
        name, f = mutants.made(exercise, mistake, tmp_path)
        monkeypatch.setitem(vars(mine), name, f)
        if all_cases:
            monkeypatch.setattr(test_part4, "CASES", all_cases[:cases])
        try:
            TESTS[exercise]()
        except Wrong as e:
            return str(e)
        return ""

    return message_of


@pytest.mark.parametrize("exercise, words", [
    (exercise, words) for exercise in TESTS for words in mutants.MISTAKES[exercise]])
def test_a_known_mistake_gets_its_message(message_of, exercise, words):
    for cases in (1, 2, 5):
        message = message_of(exercise, mutants.MISTAKES[exercise][words], cases)
        if words in message:
            break
    print(message)                                     # pytest -rP: read them
    assert words in message


@pytest.mark.parametrize("exercise, n", [
    (exercise, n) for exercise in TESTS for n in range(len(mutants.CORRECT.get(exercise, ())))])
def test_what_is_right_in_another_way_passes(message_of, exercise, n):
    assert message_of(exercise, mutants.CORRECT[exercise][n], 2) == ""


def test_later_parts_take_the_students_function_or_else_the_repositorys(monkeypatch):
    def trim(s, r):
        return s

    monkeypatch.setenv("EXERCISES", "")
    assert earlier("trim") is multiscreen.trim
    monkeypatch.setitem(vars(mine), "trim", trim)
    assert earlier("trim") is trim


class Built(multiscreen.Multiscreen):
    """A student's class that inherits from the repository's."""


@pytest.mark.parametrize("name, f", [
    ("trim", multiscreen.trim), ("Multiscreen", Built), ("Multiscreen", multiscreen.Multiscreen)])
def test_what_is_the_repositorys_is_no_solution(name, f):
    with pytest.raises(Wrong, match=f"{name} is the repository's own"):
        own(name, f)


def test_a_call_of_the_repositorys_function_is_no_solution():
    def indirect(s, r):
        return multiscreen.trim(s, r)

    s = torch.tensor([0.7])
    for f in (indirect, lambda s, r: indirect(s, r=r)):
        with pytest.raises(Wrong, match="trim calls multiscreen.py's trim"):
            own("trim", f)(s, s)
    q = torch.ones(1, 1, 2, 4)
    with pytest.raises(Wrong, match="screen calls multiscreen.py's relevance"):    # decorated
        own("screen", lambda q: multiscreen.relevance(q, q, s, s) @ q)(q)
    assert own("trim", lambda s, r: s * r)(s, r=s) == s * s


def test_a_change_in_place_is_named():
    def doubled(x):
        x *= 2
        return x

    def behind_autograd(x):
        x.data.mul_(2)
        return x * 1

    for f in (doubled, behind_autograd):
        for x in (torch.ones(2), torch.ones(2, requires_grad=True)):
            with pytest.raises(Wrong, match="unit changes its input in place"):
                own("unit", f)(x)


@pytest.mark.parametrize("found, words", [
    (None, "None: is a return missing?"), ((torch.ones(2), 1), "type tuple: it should be a ten"),
    (np.ones(2), "type ndarray: it should be a tensor")])
def test_what_is_no_tensor_is_named(found, words):
    """By the name of a function, or in a comparison: of a method's result."""
    with pytest.raises(Wrong, match=f"trim returns .*{re.escape(words)}"):
        own("trim", lambda s, r: found)(torch.ones(2), 1)
    with pytest.raises(Wrong, match=f"the gate is .*{re.escape(words)}"):
        checks.expect(found, torch.ones(2), "the gate")


def test_a_failure_names_the_entry_that_is_most_wrong():
    for what, said in {"f(x)": "f(x)[1] is 5;", "f, r = 2,": "f, r = 2, at [1], is 5;"}.items():
        with pytest.raises(Wrong, match=re.escape(said)):
            checks.expect(torch.tensor([1.0, 5.0]), torch.tensor([1.0, 2.0]), what)


# ------------------------------------------------------------------------- as a student runs it

HIDDEN = """if True:
    def test_one():
        pass

    def test_two():
        assert 0

    def test_three():
        from course.exercises import checks
        checks.near = 0

    def test_four():
        compile("def trim(s, r:\\n    pass\\n", "folder/mine.py", "exec")

    def test_four_again():
        test_four()

    def test_five():
        import torch
        x = torch.ones(2, requires_grad=True)
        y = x.exp()
        y.mul_(2)
        y.sum().backward()
"""


def test_the_stubs_fail_and_say_what_to_do(tmp_path):
    """One run with stubs, a file of hidden tests, and grades."""
    hidden = tmp_path / "test_hidden.py"
    hidden.write_text(HIDDEN)
    out = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "course/exercises", "--hidden",
              hidden, "--grades", env=os.environ | {"TRITON_INTERPRET": "1", "EXERCISES": ""})
    assert out.returncode == 1
    points = dict(re.findall(r"^(.+): (\d+ of \d+)$", out.stdout, re.M))
    assert points == {"part 1": "0 of 10", "part 2": "0 of 12", "part 3": "0 of 8",
                      "part 4": "0 of 5", "test_hidden": "1 of 6"}
    for n, of in ((1, 10), (2, 10), (3, 8), (4, 5)):
        for m in range(1, of + 1):
            if (n, m) not in ((2, 9), (2, 10)):        # these fail in the exercises they build on
                assert f"still to do: Exercise {n}.{m}: " in out.stdout, (n, m)
    assert "course.exercises.checks.near was replaced" in out.stdout
    assert out.stdout.count("mine.py, line 1: ") == 1
    assert "\na tensor was changed in place, and its gradient needs the old values" in out.stdout
    assert "Traceback" not in out.stdout
    assert "part\texercise\tpoints\tof\n" in out.stdout
    assert "part 1\ttrim\t0\t1\n" in out.stdout
    assert "test_hidden\tone\t1\t1\n" in out.stdout
    assert "test_hidden\ttwo\t0\t1\n" in out.stdout


@pytest.mark.skipif(not find_spec("xdist"), reason="pytest -n is pytest-xdist's")
def test_grades_are_those_of_all_processes(tmp_path):
    """Not of the first, which only hears from the others."""
    hidden = tmp_path / "test_hidden.py"
    hidden.write_text("def test_one():\n    pass\n\ndef test_two():\n    assert 0\n")
    out = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "course/exercises", "--hidden",
              hidden, "--grades", "-n", "2", "-k", "one or two or trim",
              env=os.environ | {"EXERCISES": ""})
    assert out.returncode == 1
    assert "part 1\ttrim\t0\t1\n" in out.stdout
    assert re.findall(r"^(.+: \d+ of \d+)$", out.stdout, re.M) == [
        "part 1: 0 of 1", "test_hidden: 1 of 2"]


def test_a_trained_model_goes_into_the_students(tmp_path, capsys):
    fit(tmp_path / "out", "--steps", "2")
    trained.main(["--steps", "2", "--ckpt", str(tmp_path / "out/ckpt.pt")])
    out = capsys.readouterr().out
    assert re.search(r"^    1  (\S+)  \1$", out, re.M)              # the same loss twice
    assert "the same next byte at 100.0% of 500 positions" in out
    write(tmp_path, {"a.bin": np.arange(600) % 65})
    fit(tmp_path / "numbers", "--steps", "1", "--tokenizer", "65", data=tmp_path / "a.bin")
    with pytest.raises(UsageError, match="needs a tokenizer of text, bytes or gpt2"):
        trained.main(["--steps", "1", "--ckpt", str(tmp_path / "numbers/ckpt.pt")])
