"""Tests of the course: the solutions pass, and each typical mistake gets its own message."""
import shutil

import pytest

import multiscreen
from course.exercises import grade, test_part1, test_part2, test_part3
from course.exercises.solutions import part3_derivative, part4_kernel
from screening_triton import available

PARTS = [test_part1, test_part2, test_part3]
if available("cpu"):                                   # Triton's interpreter
    from course.exercises import test_part4

    PARTS.append(test_part4)
TESTS = [(part, name) for part in PARTS for name in vars(part) if name.startswith("test_")]
FILES = {"part1_screening": multiscreen, "part2_model": multiscreen,
         "part3_derivative": part3_derivative, "part4_kernel": part4_kernel}


@pytest.fixture(autouse=True)
def solved(monkeypatch, tmp_path):
    """A folder with the solutions, which is graded in place of the stubs."""
    for part, module in FILES.items():
        shutil.copyfile(module.__file__, tmp_path / f"{part}.py")
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


def edit(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize("part, test", TESTS)
def test_a_solution_passes(part, test):
    assert message_of(part, test) == ""


@pytest.mark.parametrize("part, name, n", [
    (part, name, n) for part in PARTS for name, mistakes in part.MISTAKES.items()
    for n in range(len(mistakes))])
def test_a_typical_mistake_has_its_own_sentence(monkeypatch, part, name, n):
    wrong, cause = part.MISTAKES[name][n]
    monkeypatch.setattr(part, "yours", lambda name: wrong)
    # Alone: two mistakes that differ by less than the tolerance would both be named.
    assert message_of(part, f"test_{name}").split("\n  or: ")[0].partition("\n")[0] == cause
    assert "\n  or: " not in message_of(part, f"test_{name}")


@pytest.mark.skipif(not available("cpu"), reason="Triton's interpreter")
@pytest.mark.parametrize("kernel, old, new, cause", [
    ("similarity", ', input_precision="ieee"', "", "tl.dot needs input_precision"),
    ("similarity", "tl.program_id(1) * BJ", "tl.program_id(1) * BI", "OUT[0, 16] was never stored"),
    ("similarity", "tl.store(X + t * S + j", "tl.store(X + t * S + j - S", "before the beginning"),
    ("relevance", "i0 + t0 + tl.arange(0, BI), j0", "t0 + tl.arange(0, BI), j0", "i0 is ignored"),
    ("relevance", "m, 0.0)", "m, float('-inf'))", "is an infinite number multiplied by 0?"),
    ("bounds", "tl.ceil(tl.load(W))", "tl.load(W)", "w is rounded down"),
    ("bounds", "tl.where(first < end, end, lo)", "end", "where the block sees no key"),
    ("bounds", "tl.maximum(i - reach, 0)", "i - reach", "lo is negative, where there are no keys"),
    ("bounds", "tl.minimum(tl.ceil(tl.load(W)), 1073741824.0)", "tl.ceil(tl.load(W))",
     "inf became an integer"),
    ("forward", ", other=0.0", "", "a load with a mask needs other=0.0"),
    ("forward", ", mask=(rows < end)[:, None], other=0.0", "", "OUT contains NaN"),
    ("forward", ", mask=(rows < end)[:, None])\n\n\n@triton.jit\ndef store_block",
     ")\n\n\n@triton.jit\ndef store_block", "a store goes past the end of OUT"),
    ("forward", "tl.store(X + at", "tl.atomic_add(X + at", "no atomics"),
    ("forward", "tl.maximum(i - reach, 0)", "i - reach", "is the first row at least 0"),
    ("forward", "j0 + tl.arange(0, BJ), W", "tl.arange(0, BJ), W", "the keys lack j0"),
    ("forward", "h += ", "h = ", "only the last block of keys counts"),
    ("forward", "for j0 in range(lo, hi, BJ)", "for j0 in range(0, hi, BJ)", "blocks of keys out"),
    ("dq", "(d <= 0) & (d > -w)", "d <= 0", "at distance w and beyond m must be 0"),
    ("dq", "dq / tl.load(R)", "dq", "1/r is missing")])
def test_a_mistake_in_a_kernel_is_named(solved, kernel, old, new, cause):
    edit(solved / "part4_kernel.py", old, new)
    assert cause in message_of(test_part4, f"test_{kernel}_kernel")


def test_a_mistake_in_one_exercise_costs_nothing_in_another(solved):
    edit(solved / "part1_screening.py", "(1 - (1 - s) / r)", "(1 - (1 - s) * r)")
    edit(solved / "part2_model.py", "torch.tanh(F.silu(", "torch.sigmoid(F.silu(")
    edit(solved / "part3_derivative.py", "dz @ k / r", "dz @ k")
    for part in PARTS[:3]:
        wrong = [test for other, test in TESTS if other is part and message_of(part, test)]
        assert wrong == {test_part1: ["test_trim"], test_part3: ["test_dq_block"],
                         test_part2: ["test_gate", "test_model", "test_training"]}[part]


@pytest.mark.parametrize("body, message", [
    ("raise NotImplementedError('Exercise 1.6: Trim')", "still to do: Exercise 1.6: Trim"),
    ("return (1 - s /", "part1_screening.py, line "),
    ("return s[99, 99]", ": return s[99, 99]"),
    ("exit()", "SystemExit: None\npart1_screening.py, line "),
    ("import multiscreen; return multiscreen.trim(s, r)", "imports multiscreen: write"),
    ("import os", "imports os: write the exercises yourself"),
    ("from course.exercises.solutions import part3_derivative", "imports course.exercises.sol"),
    ("return torch.sys.modules['multiscreen'].trim(s, r)", "torch.sys is the module sys: write"),
    ("return torch.nn.functional.importlib", "torch.nn.functional.importlib is the module impor"),
    ("from torch import sys", "imports sys: write the exercises yourself"),
    ("t = torch; return t.sys", "torch is the module torch, which may only stand before a dot"),
    ("return getattr(torch, 'sys')", "torch is the module torch, which may only stand before a"),
    ("return getattr(trim, '__globals__')", "uses __globals__, which no exercise needs"),
    ("return vars()['torch'].sys", "uses vars(), which no exercise needs"),
    ("return eval('multiscreen')", "uses eval, which no exercise needs"),
    ("open('results.json', 'w')", "uses open, which no exercise needs"),
    ("setattr(torch.Tensor, 'nothing', 0)", "uses setattr, which no exercise needs"),
    ("torch.isclose = torch.isclose", "changes torch.isclose, which is not yours"),
    ("del torch.nn.functional.nothing", "changes torch.nn.functional.nothing, which is not yours"),
    ("math.pi += 0", "changes math.pi, which is not yours"),
    ("from torch import Tensor; Tensor.any = Tensor.any", "changes Tensor.any, which is not yours"),
    ("s -= 1", "a tensor was changed in place"),
    ("s.data.sub_(1); return s + 0", "trim changes its input s in place"),
    ("(1 - (1 - s) / r).relu().square()", "the value of trim is nothing; it should be a tensor: is "
     "a return missing?"),
    ("return [s, s]", "the value of trim is 2 things; it should be a tensor"),
    ("return (1 - (1 - s) / float(r)).relu().square()", "the gradient dL/dr of trim is 0 "
     "everywhere: is the input detached, or turned into a number on the way?"),
    ("return (1 - (1 - s) / r).relu().square() / 4", "All are 0.25 times what they should be")])
def test_what_is_no_known_mistake_is_described(solved, body, message):
    edit(solved / "part1_screening.py", "return (1 - (1 - s) / r).relu().square()", body)
    assert message in message_of(test_part1, "test_trim")


@pytest.mark.parametrize("part, test, code", [
    (test_part1, "softmask", "def softmask(d, w):\n"
     "    return torch.where((-w < d) & (d <= 0), torch.cos(math.pi / 2 * (d / w)) ** 2, 0.0)"),
    (test_part1, "trim", "def trim(s, r):\n    return (1 - (1 - s) / r).clamp(0, 1) ** 2"),
    (test_part1, "mipe_angle", "def mipe_angle(i, w, w_th):\n"
     "    u = w.double().clamp(max=w_th)\n"
     "    angle = i * (math.pi * torch.cos(math.pi / 2 * u / w_th) ** 2 / u)[:, None]\n"
     "    return (torch.remainder(angle + math.pi, 2 * math.pi) - math.pi).to(w.dtype)"),
    (test_part1, "mipe", "def mipe(x, angle):\n"
     "    turn = torch.polar(torch.ones_like(angle), angle)\n"
     "    pair = torch.view_as_complex(x[..., :2].contiguous()) * turn\n"
     "    return torch.cat((torch.view_as_real(pair), x[..., 2:]), -1)"),
    (test_part1, "tanh_norm", "from torch import nn\nimport torch.nn.functional as F\n"
     "import numpy as np\nhalf = np.float64(0.5)\n\n\ndef tanh_norm(x, eps=1e-6):\n"
     "    n = 2 * half * torch.linalg.vector_norm(x, dim=-1, keepdim=True)\n"
     "    n = torch.where(n < eps, 0 * n.detach() + eps, n)\n"
     "    return F.tanh(n) / n * nn.Identity()(x)"),
    (test_part2, "gate", "def gate(self, x):\n    g = self.project(x, self.W_G)\n"
     "    return torch.tanh(g * torch.sigmoid(g))\nGatedScreeningTiles.gate = gate"),
    (test_part2, "loss", "def loss(self, tokens, targets):\n"
     "    p = self(tokens).log_softmax(-1).flatten(0, 1)\n    t = targets.flatten()\n"
     "    return -p[t >= 0].gather(1, t[t >= 0][:, None]).mean()\nMultiscreen.loss = loss")])
def test_a_right_answer_in_another_form_passes(solved, part, test, code):
    path, = solved.glob(f"{part.__name__.rpartition('test_')[2]}_*.py")
    path.write_text(f"{path.read_text()}\n\n{code}\n")
    assert message_of(part, f"test_{test}") == ""


def test_a_file_that_is_missing_is_told_from_one_under_another_name(solved):
    (solved / "part1_screening.py").rename(solved / "part1_screening (1).py")
    assert message_of(test_part1, "test_trim") == (
        f"{solved}: part1_screening.py is missing: is it part1_screening (1).py? Give it this name")


def test_a_tensor_that_says_yes_gets_no_points(solved):
    edit(solved / "part1_screening.py", "return (1 - (1 - s) / r).relu().square()",
         "return s.as_subclass(Yes)\n\n\nclass Yes(torch.Tensor):\n    @classmethod\n"
         "    def __torch_function__(cls, *_, **options):\n        return True")
    assert message_of(test_part1, "test_trim") != ""


def test_results_in_another_order_are_not_blamed_for_their_dtypes(solved):
    edit(solved / "part3_derivative.py", "return z, m, d", "return d, z, m")
    assert message_of(test_part3, "test_pairs") == (
        "pairs returns the right results in another order: d, z, m")


def test_a_file_may_begin_with_a_future_import(solved):
    file = solved / "part1_screening.py"
    text = file.read_text()
    start = text.index("import ")
    file.write_text(f"{text[:start]}from __future__ import annotations\n{text[start:]}")
    assert message_of(test_part1, "test_trim") == ""


def test_a_right_shape_is_not_blamed(solved):
    edit(solved / "part1_screening.py", "math.pi * w_near / w_th", "3.0 * w_near / w_th")
    message = message_of(test_part1, "test_mipe_angle")
    advice, seen = message.split("\n")
    assert advice.startswith("no known mistake") and seen.startswith("the value of mipe_angle is ")


@pytest.mark.parametrize("part, test, old, new, message", [
    # A floor under the mask is not taken for another mistake.
    (test_part1, "test_softmask", "* (d / w)) + 1), 0.0)", "* (d / w)) + 1), 1e-15)",
     "for w = 4 and d = -300 .. 99\n"
     "the value of softmask is 1e-15 at [0, 0]; it should be 0, exactly"),
    # What one number lacks is not said of all.
    (test_part1, "test_acceptance", ".clamp_min(1e-3)", ".clamp(1e-3, 1 - 1e-3)",
     "no known mistake. By hand: s_r = 0 gives r = 1/2, and s_r = log 3 gives 3/4\n"
     "the value of acceptance is 0.999 at [2]; it should be 1"),
    # Gradients need no tensor of all pairs.
    (test_part3, "test_gradients", "T, S = len(q), len(k)", "T, S = (q @ k.T).shape",
     "for 96 queries and 96 keys there is a tensor of 9216 numbers: compute block by block, "
     "without a T x S tensor")])
def test_a_message_says_what_is_wrong_and_no_more(solved, part, test, old, new, message):
    file = {test_part1: "part1_screening.py", test_part3: "part3_derivative.py"}[part]
    edit(solved / file, old, new)
    assert message_of(part, test) == message


@pytest.mark.parametrize("body, message", [
    ("(dz * (1 - z) / z * z).sum() / r", "z is 0 where Trim rejects, so divide nothing by it\n"),
    ("(dz * (1 - z)).sum() / (r + 1)", "no known mistake. ")])
def test_a_division_by_0_is_blamed_only_where_there_is_nan(solved, body, message):
    edit(solved / "part3_derivative.py", "(dz * (1 - z)).sum() / r", body)
    assert message_of(test_part3, "test_dr_block").startswith(message)


def test_a_head_with_a_matrix_of_its_own_is_named(solved):
    edit(solved / "part2_model.py", "self.s_E = nn.Parameter(torch.zeros(1))",
         "self.s_E, self.W_U = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(N, E))")
    for test in ("test_model", "test_training"):
        assert message_of(test_part2, test).startswith("your model has parameters that the stubs "
                                                       "have not, W_U: keep to theirs")


def test_an_answer_that_is_drawn_at_random_is_told_so(solved):
    edit(solved / "part2_model.py", "z.argmax(-1, keepdim=True)", "z.softmax(-1).multinomial(1)")
    for _ in range(10):
        message = message_of(test_part2, "test_generate")
        assert message.startswith("generate has another result when it is called again: nothing")


def test_part_2_may_import_the_functions_of_part_1_and_nothing_else(solved):
    file = solved / "part2_model.py"
    file.write_text("from multiscreen import trim\n" + file.read_text())
    assert message_of(test_part2, "test_gate") == ""
    file.write_text("from multiscreen import KeyCache\n" + file.read_text())
    assert "imports KeyCache from multiscreen.py" in message_of(test_part2, "test_gate")


def test_the_stubs_say_what_is_to_do(monkeypatch):
    monkeypatch.undo()
    for part, test in TESTS:
        assert message_of(part, test).startswith("still to do: Exercise "), test
