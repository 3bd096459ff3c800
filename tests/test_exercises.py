"""The course: solutions pass, stubs fail, and each known mistake gets its message."""
import importlib

import pytest

from exercises import mutants
from exercises.adapters import mine
from exercises.checks import Wrong
from tests.helpers import ROOT, run  # noqa: F401

MODULES = [importlib.import_module(f"exercises.test_part{n}") for n in (1, 2, 3)]


def find_test(exercise):
    """The test of one exercise, a function without arguments."""
    return next(f for m in MODULES if (f := getattr(m, f"test_{exercise}", None)))


@pytest.fixture(autouse=True)
def solved(monkeypatch):
    """Everything but what a test puts in its place is solved."""
    monkeypatch.setenv("EXERCISES", "reference")
    monkeypatch.setattr(mine, "instead", {})


@pytest.mark.parametrize("exercise, f, words", mutants.MUTANTS,
                         ids=[f.__name__ for _, f, _ in mutants.MUTANTS])
def test_a_known_mistake_gets_its_message(exercise, f, words):
    mine.instead[mutants.place(exercise, f)] = f
    with pytest.raises(Wrong) as e:
        find_test(exercise)()
    print(e.value)                                     # pytest -rP: read them
    assert words in str(e.value)


@pytest.mark.parametrize("exercise, f", mutants.CORRECT,
                         ids=[f.__name__ for _, f in mutants.CORRECT])
def test_what_is_right_in_another_way_passes(exercise, f):
    mine.instead[mutants.place(exercise, f)] = f
    find_test(exercise)()
