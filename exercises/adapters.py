"""The one place through which the tests, and the later parts, reach your work.

`mine.trim` is the `trim` of your part1_screening.py. With EXERCISES=reference it is the solution:
parts 1 and 2 are solved by multiscreen.py, parts 3 and 4 by the files in exercises/solutions/.
If you move or rename something, change FILES.
"""
import importlib
import os

import multiscreen

FILES = {
    "exercises.part1_screening": ["window", "acceptance", "unit", "mipe_angle", "mipe", "trim",
                                  "softmask", "relevance", "screen", "tanh_norm"],
    "exercises.part2_model": ["GatedScreeningTiles", "KeyCache", "Multiscreen"],
    "exercises.part3_derivative": ["pairs", "dv_block", "dz_block", "dq_block", "dk_block",
                                   "dr_block", "dw_block", "gradients"],
    "exercises.part4_kernel": ["similarity_kernel", "relevance_kernel", "bounds_kernel",
                               "forward_kernel", "dq_kernel"],
}
SOLUTIONS = {"exercises.part1_screening": "multiscreen", "exercises.part2_model": "multiscreen",
             "exercises.part3_derivative": "exercises.solutions.part3_derivative",
             "exercises.part4_kernel": "exercises.solutions.part4_kernel"}


class Work:
    """Your work, looked up by name each time."""

    def __getattr__(self, name):
        for file, names in FILES.items():
            if name in names:
                return getattr(importlib.import_module(chosen(file)), name)
        raise AttributeError(f"{name} is in no list of exercises/adapters.py")


def chosen(file):
    """The module to take: yours, or the solution."""
    return SOLUTIONS[file] if os.environ.get("EXERCISES") == "reference" else file


def is_stub(f):
    """Whether a function still raises the NotImplementedError that it came with."""
    return any(str(c).startswith("Exercise ") for c in f.__code__.co_consts)


def earlier(name):
    """A function of part 1: yours if it is written, otherwise the one of multiscreen.py."""
    f = getattr(mine, name)
    return getattr(multiscreen, name) if is_stub(f) else f


mine = Work()
