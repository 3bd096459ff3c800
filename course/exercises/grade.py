"""How an exercise is graded: your function and the right one get the same inputs.

Your code runs in a process of its own, of child.py, which has no right results; here they are
computed and compared with yours. If they differ, the message names your mistake where it is a known
one. Known mistakes are wrong functions, each with a sentence. They get the same inputs, too, and
the one that has your results is your mistake. Otherwise the message says what is seen. A test that
fails shows only its message, and no lines of the tests.
"""
import ast
import atexit
import functools
import inspect
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch.nn.functional import normalize

import multiscreen
from course.exercises import child, drive
from course.exercises.drive import random
from course.exercises.messages import agree, message, same

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
# Your files are beside this one. EXERCISES names another folder to grade, say a student's.
FOLDER = HERE
if os.environ.get("EXERCISES"):
    FOLDER = Path(os.environ["EXERCISES"]).resolve()

SECONDS = 60                                           # an exercise that takes longer hangs
HUNG, ENDED = "this did not finish", "your code ended the program"


def fail(message):
    """End the test with this message."""
    pytest.fail(message, pytrace=False)


# ------------------------------------------------------------------------ the other process

@functools.cache
def server():
    """The process that starts a new one for each exercise, and its folder.

    It finds torch and the standard library, but not this repository: neither by its folder and
    path nor by what `pip install -e` has noted for `site` (-S). Its environment does not name it.
    """
    folder = Path(tempfile.mkdtemp(prefix="exercises"))
    (folder / "course/exercises").mkdir(parents=True)
    for name in ("__init__.py", "child.py", "drive.py", "launch.py"):
        shutil.copy(HERE / name, folder / "course/exercises")
    packages = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    command = f"import sys; sys.path += {[*packages, str(folder)]}; " \
              "from course.exercises.child import serve; serve()"
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", command], cwd=folder, text=True, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={name: value for name, value in os.environ.items() if str(ROOT) not in value})
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(process.kill)
    return process, folder


def ask(exercise, cases):
    """What your function returns in each case: a list of what `child.results` returns."""
    part, name = exercise.part, exercise.name
    path = FOLDER / f"{part}.py"
    if not path.is_file():
        fail(f"{FOLDER}: {missing(path.name, FOLDER)}")
    if server()[0].poll() is not None:                 # other code has ended it
        server.cache_clear()
    process, base = server()
    with tempfile.TemporaryDirectory(dir=base, ignore_cleanup_errors=True) as folder:
        folder = Path(folder)
        shutil.copy(path, folder)
        (folder / "multiscreen.py").write_text(exercise.given)
        requests = [exercise.request(case) for case in cases]
        torch.save((part, name, requests, [*exercise.others]), folder / "request.pt")
        process.stdin.write(f"{folder}\t{SECONDS}\n")
        process.stdin.flush()
        code = process.stdout.readline().strip()
        print((folder / "printed.txt").read_text(errors="replace"), end="")
        if code == "None":
            fail(f"{HUNG} in {SECONDS} seconds")
        if code in ("-6", "-11") and name.endswith("_kernel"):
            fail(f"{ENDED}, with exit code {code}: does a kernel store far outside of OUT?")
        if code != "0" or not (folder / "results.pt").exists():
            fail(f"{ENDED}, with exit code {code}")
        return torch.load(folder / "results.pt", weights_only=True)


def without(*names):
    """multiscreen.py as a text without these functions, methods and classes.

    Each equation is written once, so what is left calls them and does not have their code.
    """
    tree = ast.parse(inspect.getsource(multiscreen))
    for place in [tree, *tree.body]:
        if isinstance(place, (ast.Module, ast.ClassDef)):
            place.body = [part for part in place.body if getattr(part, "name", "") not in names]
    return ast.unparse(tree)


def missing(name, folder):
    """What to say of a file that is not there: browsers call it part3_derivative (1).py."""
    others = sorted(path.name for path in folder.rglob("*part*.py"))
    return f"{name} is missing. The folder has {', '.join(others) or 'no such file'}"


# ------------------------------------------------------------------------------ comparisons

class Case:
    """Inputs on which your function is compared with the right one.

    hint: what to say where no mistake is known. tolerance: relative to the largest right value, or
    absolute where all are below 1.
    """

    def __init__(self, *inputs, hint="", tolerance=1e-5):
        self.inputs, self.hint, self.tolerance = inputs, hint, tolerance


@dataclass
class Exercise:
    """What is compared, and what to say. right: the right function, or class.

    mistakes: pairs (a wrong one, what to say to those who have its results). hint: what to say
    where no mistake is known, and the case has no hint of its own. given: the text of the
    multiscreen.py that your file may import. others: the names of those of its functions that stand
    in for yours. gradients: whether the gradients of all inputs are compared, too.
    """
    part: str
    name: str
    right: object
    mistakes: tuple = ()
    hint: str = ""
    given: str = ""
    others: tuple = ()
    gradients: bool = True

    def grade(self, *cases):
        """Compare your function with the right one in each case."""
        found = ask(self, cases)
        for n, (case, mine) in enumerate(zip(cases, found, strict=True)):
            if "a message" in mine:
                fail(mine["a message"])
            wanted = self.results(self.right, case)
            wrong = [what for what in ["an error", *wanted]
                     if not agree(mine.get(what), wanted.get(what), case)]
            if wrong:
                seen = cases[: n + 1]
                causes = self.causes_of(found, cases) or [
                    f"perhaps: {cause}" for cause in self.causes_of(found, seen)]
                fail(message(case, causes, mine, wanted, wrong, self.name, self.hint))

    def request(self, case):
        """The inputs, and which of them get gradients, {position: name}."""
        names = [name for name in inspect.signature(self.right).parameters if name != "self"]
        return case.inputs, {n: names[n] for n, x in enumerate(case.inputs)
                             if self.gradients and torch.is_tensor(x) and x.is_floating_point()}

    def results(self, written, case):
        """The results of right or wrong code."""
        return child.results(drive.call_of(self.name, written), "", *self.request(case))

    def causes_of(self, found, cases):
        """What to say about the mistakes that have your results in all these cases."""
        causes = [cause for wrong, cause in self.mistakes
                  if all(same(self.results(wrong, case), mine, case)
                         for case, mine in zip(cases, found))]
        return list(dict.fromkeys(causes))


# ------------------------------------------------------------------------------------ inputs

def correlated(seed, B, H, T, S, K=16, V=8, dtype=torch.float64, rho=0.6):
    """Unit q, k, v around a direction of each tile: similarities spread around 0.7.

    Independent unit vectors in 16 dimensions almost never pass Trim: a test would compare zeros.
    """
    g = random(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    base = draw(B, H, 1, K)
    q = normalize(rho * base + (1 - rho) * draw(B, H, T, K), dim=-1)
    k = normalize(rho * base + (1 - rho) * draw(B, H, S, K), dim=-1)
    v = normalize(draw(B, H, S, V), dim=-1)
    return q.to(dtype), k.to(dtype), v.to(dtype)
