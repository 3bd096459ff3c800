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
from course.exercises import child
from course.exercises.messages import agree, is_plain, message, same

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
# Your files are beside this one. EXERCISES names another folder to grade, say a student's.
FOLDER = HERE
if os.environ.get("EXERCISES"):
    FOLDER = Path(os.environ["EXERCISES"]).resolve()

SECONDS = 60                                           # an exercise that takes longer hangs
TO_DO, HUNG, ENDED = "still to do", "this did not finish", "your code ended the program"

# What multiscreen.py has of the exercises, each after those that it may use.
IN_ORDER = [
    "window", "acceptance", "unit", "mipe_angle", "mipe", "trim", "softmask", "relevance", "screen",
    "tanh_norm", "KeyCache", "GatedScreeningTiles.project", "GatedScreeningTiles.gate",
    "GatedScreeningTiles.screening", "GatedScreeningTiles.forward", "Multiscreen.embed",
    "Multiscreen.head", "Multiscreen.logits", "Multiscreen.nats", "Multiscreen.loss",
    "Multiscreen.stream", "Multiscreen.generate"]


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


def ask(part, name, cases, given, replaced, driver):
    """What your file's function returns in each case: a list of what `child.results` returns.

    cases: (inputs, trained) each. given: the text of the multiscreen.py that your file may import.
    replaced: the names of functions of your file in whose place it gets those of that text.
    driver: the file whose `yours` makes a function of what you wrote, if it is none of tensors.
    """
    path = FOLDER / f"{part}.py"
    if not path.is_file():
        fail(f"{FOLDER}: {missing(path.name, FOLDER.glob('*'))}")
    if server()[0].poll() is not None:                 # other code has ended it
        server.cache_clear()
    process, base = server()
    with tempfile.TemporaryDirectory(dir=base, ignore_cleanup_errors=True) as folder:
        folder = Path(folder)
        shutil.copy(path, folder)
        (folder / "multiscreen.py").write_text(given)
        torch.save((part, name, driver, replaced, cases), folder / "request.pt")
        process.stdin.write(f"{folder}\t{SECONDS}\n")
        process.stdin.flush()
        code = process.stdout.readline().strip()
        print((folder / "printed.txt").read_text(errors="replace"), end="")
        if code == "None":
            fail(f"{HUNG} in {SECONDS} seconds")
        if code != "0" or not (folder / "results.pt").exists():
            fail(f"{ENDED}, with exit code {code}")
        found = torch.load(folder / "results.pt", weights_only=True)
    if isinstance(found, str):
        fail(found)
    return found


def before(name):
    """multiscreen.py as a text, without the exercise `name` and those after it."""
    removed = IN_ORDER[IN_ORDER.index(name) :]
    tree = ast.parse(inspect.getsource(multiscreen))
    for node, prefix in [(tree, "")] + [(c, f"{c.name}.") for c in tree.body
                                        if isinstance(c, ast.ClassDef)]:
        node.body = [x for x in node.body if f"{prefix}{getattr(x, 'name', '')}" not in removed]
    return ast.unparse(tree)


def missing(name, others):
    """What to say of a file that is not there: browsers call it part3_derivative (1).py.

    others: the paths of the files that are there.
    """
    part = name.partition("_")[0]
    alike = [path.name for path in others if part in path.name.lower()]
    alike = sorted(other for other in alike if not other.startswith("test_"))
    if alike:
        return f"{name} is missing: is it {' or '.join(alike)}? Give it this name"
    return f"{name} is missing"


# ------------------------------------------------------------------------------ comparisons

@dataclass
class Case:
    """Inputs on which your function is compared with the right one.

    hint: what to say where no mistake is known. tolerance: relative to the largest right value, or
    absolute where all are below 1. zero: how large a number may be where the right one is 0.
    through: a function of the value; what it returns is compared.
    outputs: the names of the results of a function that returns several; then, or without
    `gradients`, only values are compared, else also the gradients of all inputs.
    """
    inputs: tuple
    hint: str = ""
    tolerance: float = 1e-5
    zero: float = 1e-12
    through: object = None
    outputs: tuple = ()
    gradients: bool = True

    def request(self, names):
        """The inputs, and which of them get gradients, {position: name}. names: of the inputs."""
        if self.outputs or not self.gradients:
            return self.inputs, {}
        return self.inputs, {n: names[n] for n, x in enumerate(self.inputs)
                             if torch.is_tensor(x) and x.is_floating_point()}

    def read(self, found):
        """{the name of a result: the result}, of what a function has returned."""
        if isinstance(found, str):
            return {"a message": found}
        y = found.get("the value")
        if self.outputs and isinstance(y, tuple) and len(y) == len(self.outputs):
            found = dict(zip(self.outputs, y))
        if self.through is not None and is_plain(y):
            found = found | {"the value": self.through(y)}
        return found


def case(*inputs, **options):
    return Case(inputs, **options)


@dataclass
class Exercise:
    """What is compared, and what to say: see `ask` and `Case`. right: the right function.

    mistakes: pairs (a wrong function, what to say to those who have its results). hint: what to say
    where no mistake is known, and the case has no hint of its own. names: those of the inputs.
    """
    part: str
    name: str
    right: object
    mistakes: tuple = ()
    hint: str = ""
    given: str = ""
    replaced: tuple = ()
    driver: str = ""
    names: tuple = ()

    def grade(self, *cases):
        """Compare your function with the right one in each case."""
        names = self.names or tuple(inspect.signature(self.right).parameters)
        found = self.yours(cases, names)
        for n, case in enumerate(cases):
            if "a message" in found[n]:
                fail(found[n]["a message"])
            wanted = results(self.right, case, names)
            wrong = [what for what in ["an error", *wanted]
                     if not agree(found[n].get(what), wanted.get(what), case)]
            if wrong:
                first, second = self.yours([case, case], names)
                if "an error" not in first and not same(second, first, case):
                    fail(f"{self.name} has another result when it is called again: nothing in this "
                         "exercise is drawn at random, such as by sampling or dropout, or "
                         "remembered from an earlier call")
                causes = causes_of(found, self.mistakes, cases, n, names)
                fail(message(case, causes, found[n], wanted, wrong, self.name, self.hint))

    def yours(self, cases, names):
        """The results of your function in each case."""
        found = ask(self.part, self.name, [case.request(names) for case in cases], self.given,
                    self.replaced, self.driver)
        return [case.read(x) for case, x in zip(cases, found, strict=True)]


def results(f, case, names):
    """The results of a function that is at hand."""
    return case.read(child.results(f, "", *case.request(names)))


def causes_of(found, mistakes, cases, n, names):
    """What to say about the known mistakes that have your results, in case n and all before it.

    Where several have, the later cases decide, if they can.
    """
    for m, case in enumerate(cases):
        alike = [(wrong, cause) for wrong, cause in mistakes
                 if same(results(wrong, case, names), found[m], case)]
        if alike or m <= n:
            mistakes = alike
        if m >= n and len(mistakes) < 2:               # later cases have nothing to decide
            break
    return list(dict.fromkeys(cause for _, cause in mistakes))


# ------------------------------------------------------------------------------------ inputs

def random(seed):
    """A generator of random numbers of its own."""
    return torch.Generator().manual_seed(seed)


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
