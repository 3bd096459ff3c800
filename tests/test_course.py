"""Tests of the course: the solutions pass, typical mistakes are named, cheats fail."""
import functools
import inspect
import os
import shutil
import textwrap

import pytest
import torch

import multiscreen
from course.exercises import grade, test_part1, test_part2, test_part3
from screening_triton import available
from tests.helpers import edit

PARTS = [test_part1, test_part2, test_part3]
if available("cpu"):                                   # Triton's interpreter
    from course.exercises import test_part4

    PARTS.append(test_part4)
TESTS = [(part, name) for part in PARTS for name in vars(part) if name.startswith("test_")]
SOLUTIONS = grade.HERE / "solutions"
os.environ["HERE"] = str(grade.ROOT)                   # which a student must not see
TRIM = "return (1 - (1 - s) / r).relu().square()"


def hand_in_solutions(folder):
    shutil.copyfile(multiscreen.__file__, folder / "part1_screening.py")
    shutil.copyfile(multiscreen.__file__, folder / "part2_model.py")
    for path in SOLUTIONS.glob("part*.py"):
        shutil.copy(path, folder)


@pytest.fixture(autouse=True)
def solved(monkeypatch, tmp_path):
    """A folder with the solutions, which is graded in place of the stubs."""
    hand_in_solutions(tmp_path)
    monkeypatch.setattr(grade, "FOLDER", tmp_path)
    return tmp_path


def message_of(part, test):
    """What a student reads, or "" if the test passes."""
    try:
        getattr(part, test)()
    except pytest.fail.Exception as e:
        print(e)                                       # pytest -rP: read them
        return str(e)
    return ""


@pytest.mark.parametrize("part, test", TESTS)
def test_a_solution_passes(part, test):
    assert message_of(part, test) == ""


@pytest.mark.parametrize("part, name", [(part, name) for part in PARTS for name in part.MISTAKES])
def test_each_typical_mistake_has_its_own_sentence(monkeypatch, part, name):
    """And no other: any two mistakes of an exercise differ by more than the tolerance."""
    made = []
    with monkeypatch.context() as m:
        m.setattr(grade.Exercise, "grade", lambda exercise, *cases: made.append((exercise, cases)))
        getattr(part, f"test_{name}")()
    (exercise, cases), = made
    # Each is computed once, here as in a student's process.
    monkeypatch.setattr(exercise, "results", functools.cache(exercise.results))
    others = []
    for n, (wrong, cause) in enumerate(exercise.mistakes):
        monkeypatch.setattr(grade, "ask", lambda exercise, cases, wrong=wrong: [
            exercise.results(wrong, case) for case in cases])
        message = "right"
        try:
            exercise.grade(*cases)
        except pytest.fail.Exception as e:
            message = str(e)
        if not f"{message}\n".startswith(f"{cause}\n") or "\n  or: " in message:
            others.append((n, cause, message))
    assert others == []


def test_a_known_mistake_is_named_beside_another(solved):
    edit(solved / "part1_screening.py", "s_w.clamp(max=80.0).exp() + 1", "s_w.clamp(max=9.0).exp()")
    assert message_of(test_part1, "test_window").startswith("perhaps: w lacks the + 1")


def test_a_mistake_in_one_exercise_costs_nothing_in_another(solved):
    edit(solved / "part1_screening.py", "(1 - (1 - s) / r)", "(1 - (1 - s) * r)")
    edit(solved / "part2_model.py", "torch.tanh(F.silu(", "torch.sigmoid(F.silu(")
    edit(solved / "part3_derivative.py", "dz @ k / r", "dz @ k")
    tests = [(test_part1, "trim"), (test_part1, "relevance"), (test_part2, "gate"),
             (test_part2, "forward"), (test_part2, "model"), (test_part3, "dq_block"),
             (test_part3, "gradients")]
    assert [test for part, test in tests if message_of(part, f"test_{test}")] == [
        "trim", "gate", "model", "dq_block"]


def test_code_that_hangs_or_ends_the_server_costs_its_own_exercise(solved, monkeypatch):
    edit(solved / "part1_screening.py", TRIM, "while True: pass")
    with monkeypatch.context() as m:
        m.setattr(grade, "SECONDS", 0.5)
        assert message_of(test_part1, "test_trim") == "this did not finish in 0.5 seconds"
    server, _ = grade.server()                         # what other code may do to it, too
    server.kill()
    server.wait()
    assert message_of(test_part1, "test_softmask") == ""


# (part, exercise, a line of the solution, a line in its place, what the message says)
SAID = [
    *[(1, "trim", TRIM, line, says) for line, says in [
        ("return (1 - s /", "SyntaxError: '(' was never closed"),
        ("return s[99, 99]", ": return s[99, 99]"),
        ("import sys; sys.exit()", "SystemExit\npart1_screening.py, line "),
        ("import os; os._exit(0)", "your code ended the program, with exit code 0"),
        ("s -= 1", "a tensor was changed in place"),
        ("s.data.sub_(1); return s + 0", "trim changes its input s in place"),
        (TRIM.removeprefix("return "), "and is nothing: is a return missing?"),
        ("return [s, s]", "should be a tensor, and is an object of the type list"),
        (TRIM.replace("r)", "float(r))", 1), "is the input detached, or turned"),
        (f"{TRIM}.double()", "is torch.float64; it should be"),
        (f"{TRIM} / 4", "All are 0.25 times what they should be"),
        ("return 0 * s * r", "All are 0")]],
    # A floor under the mask is not taken for another mistake.
    (1, "softmask", "* (d / w)) + 1), 0.0)", "* (d / w)) + 1), 1e-15)",
     "for w = 4 and d = -300 .. 99\nthe value of softmask is 1e-15 at [0, 0]; it should be 0, "),
    (1, "relevance", "q @ k.transpose(-2, -1)", "(q.float() @ k.float().mT).to(q.dtype)",
     "is something in float32 on the way?"),
    # s_w is less than w: a cache forgets too much by it.
    (2, "screening", "reach = w if", "reach = self.s_w if", "the value of screening is "),
    # What one number lacks is not said of all.
    (1, "acceptance", ".clamp_min(1e-3)", ".clamp(1e-3, 1 - 1e-3)",
     "should be 1. Only index 2 of axis 0 is wrong, of 3"),
    # Two matrices that are alike, all layers, and another seed.
    (2, "initialize", "W_K = nn.Parameter(0.1 / math.sqrt(K) * torch.randn(E, H, K))",
     "W_K = nn.Parameter(self.W_Q.clone())", "other matrices like a W_Q of initialize is 3;"),
    (2, "initialize", "c = self.config\n", "c = self.config; torch.manual_seed(0)\n",
     "other matrices like a W_Q of initialize is 15;"),
    (2, "training", "self.s_F.exp() * unit(", "self.s_F.detach().exp() * unit(",
     "10^4 dL/d(s_F) of training is 0"),
    (4, "similarity_kernel", "@triton.jit\ndef similarity", "def similarity", "is no kernel"),
    (4, "similarity_kernel", ', input_precision="ieee"', "", "tl.dot needs input_precision"),
    (4, "similarity_kernel", "tl.program_id(1) * BJ", "tl.program_id(1) * BI",
     "OUT[0, 16] was never stored"),
    (4, "similarity_kernel", "tl.store(X + t * S + j", "tl.store(X + t * S + j - S",
     "before the beginning"),
    (4, "bounds_kernel", "tl.maximum(i - reach, 0)", "i - reach",
     "is -32 at [0, 0]; it should be 0"),
    (4, "bounds_kernel", "tl.minimum(tl.ceil(tl.load(W)), 1073741824.0)", "tl.ceil(tl.load(W))",
     "invalid value encountered in cast\npart4_kernel.py, line "),
    *[(4, "forward_kernel", right, wrong, "the value of forward_kernel is ") for right, wrong in [
        ("i - reach, 0", "i - reach + 1, 0"),
        ("tl.minimum(S, i_last + 1)", "tl.minimum(S, i_last)")]],
    (4, "forward_kernel", ", other=0.0", "", "a load with a mask needs other=0.0"),
    (4, "forward_kernel", "mask=(rows < end)[:, None], other=0.0", "(rows < end)[:, None]",
     "a load with a mask needs other=0.0"),
    (4, "forward_kernel", ", mask=(rows < end)[:, None], other=0.0", "", "OUT contains NaN"),
    (4, "forward_kernel", "x, mask=(rows < end)[:, None])", "x)", "a store goes past the end")]


@pytest.mark.parametrize("number, test, old, new, says", SAID)
def test_what_is_no_known_mistake_is_described(solved, number, test, old, new, says):
    if number > len(PARTS):
        pytest.skip("needs Triton's interpreter")
    part, (file,) = PARTS[number - 1], solved.glob(f"part{number}_*.py")
    edit(file, old, new)
    said = message_of(part, f"test_{test}")
    assert says in said
    assert not [cause for _, cause in part.MISTAKES.get(test, ()) if cause in said]


# ------------------------------------------------------------------------------- the grader

# Ways to a solution, or around it. Each stands for `trim`, and uses only what a file may import.
CHEATS = {
    "a search of sys.path and of the environment": """
        import os, sys
        from importlib.machinery import PathFinder
        for path in [*sys.path, os.environ.get("HERE", "")]:
            spec = PathFinder.find_spec("multiscreen", [path])
            f = getattr(spec and spec.loader.load_module("multiscreen"), "trim", f)""",
    "everything alive": """
        import gc
        f, = [x for x in gc.get_objects() if x is not trim and hasattr(x, "__code__")
              and getattr(x, "__name__", "") == "trim"]""",
    "a tensor that says yes": """
        class Yes(torch.Tensor):
            @classmethod
            def __torch_function__(cls, *_, **options):
                return True
            def __reduce_ex__(self, protocol):
                return (torch.Tensor, ())
        f = lambda s, r: s.as_subclass(Yes)""",
    "an object that agrees": """
        save = torch.save
        torch.save = lambda found, path: save([{} for x in found], path)
        f = lambda s, r: s"""}


@pytest.mark.parametrize("way", CHEATS)
def test_no_way_around_the_work_earns_points(solved, way):
    body = textwrap.indent(textwrap.dedent(CHEATS[way]).strip(), "    ")
    edit(solved / "part1_screening.py", TRIM,
         f"f = None\n{body}\n    return f(s, r)")
    assert message_of(test_part1, "test_trim") != ""


# What is a solution besides the function of an exercise's name.
ALSO = {"initialize": "torch.randn(", "cache": "class KeyCache", "logits": "->...n",
        "loss": "cross_entropy", "generate": "argmax",
        "the whole model": "class GatedScreeningTiles", "training": "class Multiscreen"}


def test_an_exercise_never_gets_its_own_solution(monkeypatch):
    asked = []

    def ask(exercise, cases):
        name = exercise.name
        asked.append(name)
        for solution in (f"def {name}(", ALSO.get(name, f"def {name}(")):
            assert solution not in exercise.given, (name, solution)
        assert name not in exercise.others
        grade.fail("")

    monkeypatch.setattr(grade, "ask", ask)
    for part, test in TESTS:
        message_of(part, test)
    assert len(set(asked)) == len(TESTS)
    assert all(solution in inspect.getsource(multiscreen) for solution in ALSO.values())


@pytest.mark.parametrize("part, test, code", [
    (test_part1, "softmask", "def softmask(d, w):\n"
     "    return torch.where((-w < d) & (d <= 0), torch.cos(math.pi / 2 * (d / w)) ** 2, 0.0)"),
    (test_part1, "mipe_angle", "def mipe_angle(i, w, w_th):\n"
     "    u = w.double().clamp(max=w_th)\n"
     "    angle = i * (math.pi * torch.cos(math.pi / 2 * u / w_th) ** 2 / u)[:, None]\n"
     "    return (torch.remainder(angle + math.pi, 2 * math.pi) - math.pi).to(w.dtype)"),
    (test_part2, "screening", """
def screening(self, x, screen, cache=None):
    start = 0 if cache is None else cache.end
    w, r = window(self.s_w), acceptance(self.s_r)
    angle = mipe_angle(start + torch.arange(x.shape[1]), w, self.w_th)
    q, k = (mipe(unit(self.project(x, W)), angle) for W in (self.W_Q, self.W_K))
    v, i0 = unit(self.project(x, self.W_V)), 0
    if cache is not None:
        k, v = cache.append(k, v, w)
        i0 = k.shape[2] - x.shape[1]
    return tanh_norm(screen(q, k, v, w, r, i0))
GatedScreeningTiles.screening = screening"""),
    (test_part2, "loss", "def loss(self, tokens, targets):\n"
     "    p = self(tokens).log_softmax(-1).flatten(0, 1)\n    t = targets.flatten()\n"
     "    return -p[t >= 0].gather(1, t[t >= 0][:, None]).mean()\nMultiscreen.loss = loss")])
def test_a_right_answer_in_another_form_passes(solved, part, test, code):
    path, = solved.glob(f"{part.__name__.rpartition('test_')[2]}_*.py")
    path.write_text(f"{path.read_text()}\n\n{code}\n")
    assert message_of(part, f"test_{test}") == ""


def test_a_file_that_is_missing_is_told_from_one_under_another_name(solved):
    (solved / "part1_screening.py").rename(solved / "part1_screening (1).py")
    said = message_of(test_part1, "test_trim")
    assert "part1_screening.py is missing. The folder has part1_screening (1)" in said


def test_the_stubs_say_what_is_to_do(monkeypatch):
    """One of each part."""
    monkeypatch.undo()
    for part, test in dict(TESTS).items():
        assert message_of(part, test).startswith("still to do: Exercise "), test


def test_what_your_code_prints_is_shown(solved, capsys):
    edit(solved / "part1_screening.py", TRIM, f"print('here', s.shape)\n    {TRIM}")
    assert message_of(test_part1, "test_trim") == ""
    assert "here torch.Size([5])\n" in capsys.readouterr().out


def test_only_plain_tensors_agree():
    right, case = torch.ones(3), grade.Case()
    assert grade.agree(right.clone(), right, case)
    for other in (torch.nn.Parameter(right), right.to_sparse(), 1.0):
        assert not grade.agree(other, right, case)
