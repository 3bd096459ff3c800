"""Tests of the course: the solutions pass, and each typical mistake gets its own message."""
import pytest

from course.exercises import test_part1, test_part2, test_part3

PARTS = [test_part1, test_part2, test_part3]
CASES = [(part, name, n) for part in PARTS for name, mistakes in part.MISTAKES.items()
         for n in range(len(mistakes))]


@pytest.mark.parametrize("part, name, n", CASES)
def test_a_typical_mistake_fails_with_the_message_that_names_it(monkeypatch, part, name, n):
    wrong, cause = part.MISTAKES[name][n]
    monkeypatch.setattr(part, "yours", lambda name: wrong)
    with pytest.raises(pytest.fail.Exception) as failure:
        getattr(part, f"test_{name}")()
    print(failure.value)                               # pytest -rP: read them
    assert str(failure.value).startswith(cause)
