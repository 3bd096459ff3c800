"""How an exercise is graded: your function and the right one get the same inputs.

If the results differ, the message names your mistake where it is a known one. Known mistakes are
wrong functions, each with a sentence. They get the same inputs, too, and the one that has your
results is your mistake. A test that fails shows only its message, and no lines of the tests.
"""
import ast
import importlib
import importlib.util
import inspect
import itertools
import linecache
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.nn.functional import normalize

# Your files are beside this one. EXERCISES names another folder to grade, say a student's.
FOLDER = Path(__file__).resolve().parent
if os.environ.get("EXERCISES"):
    FOLDER = Path(os.environ["EXERCISES"]).resolve()

MODULES = {"__future__", "collections", "dataclasses", "functools", "itertools", "math", "numpy",
           "torch", "triton", "typing"}
BUILT_IN = {"delattr", "eval", "exec", "globals", "locals", "open", "setattr", "vars()"}
TO_DO = "still to do"
PLAIN = (torch.Tensor, torch.nn.Parameter)             # the types that a result may have
ALLOWED = "write the exercises yourself, with torch, triton, math and numpy"
PART_1 = {"window", "acceptance", "unit", "mipe_angle", "mipe", "trim", "softmask", "relevance",
          "screen", "tanh_norm"}


def fail(message):
    """End the test with this message."""
    pytest.fail(message, pytrace=False)


# ------------------------------------------------------------------------------- your files

def load(part):
    """Your file of a part, such as "part1_screening", as a module. Each call runs it anew."""
    path = FOLDER / f"{part}.py"
    if not path.is_file():
        fail(f"{FOLDER}: {missing(path.name, FOLDER.glob('*'))}")
    spec = importlib.util.spec_from_file_location(part, path)
    module, wrong = importlib.util.module_from_spec(spec), ""
    try:
        tree = ast.parse(path.read_bytes())
        refuse_what_is_not_yours(path.name, tree)
        refuse_detours(path.name, tree)
        # A dataclass whose annotations are texts looks for its module here.
        sys.modules[part] = module
        spec.loader.exec_module(module)
    except SyntaxError as e:
        wrong = f"{path.name}, line {e.lineno}: {e.msg}: {(e.text or '').strip()}"
    except (Exception, SystemExit) as e:
        wrong = describe_error(e)
    finally:
        sys.modules.pop(part, None)
    if wrong:
        fail(wrong)
    return module


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


def refuse_what_is_not_yours(name, tree):
    """Refuse a file that imports a solution, or anything that no exercise needs."""
    for node in ast.walk(tree):
        where = f"{name}, line {getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.ImportFrom) and node.module == "multiscreen" and "part2" in name:
            for alias in node.names:
                if alias.name not in PART_1:
                    fail(f"{where} imports {alias.name} from multiscreen.py: part 2 is yours to "
                         "write, with the functions of part 1")
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            modules = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                modules = [node.module or "."]
            for module in modules:
                if module.partition(".")[0] not in MODULES:
                    fail(f"{where} imports {module}: {ALLOWED}")
        used = used_name(node)
        if used in BUILT_IN or (used.startswith("__") and used != "__init__"):
            fail(f"{where} uses {used}, which no exercise needs")


def used_name(node):
    """The name that a node of the syntax tree uses, bare, after a dot or as a text, or "" """
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Constant):
        return str(node.value)                         # of getattr(f, "__globals__")
    if isinstance(node, ast.Call) and not node.args:
        return ast.unparse(node)                       # vars()
    return ""


def refuse_detours(name, tree):
    """Refuse what leads to other modules by way of those that are allowed, such as torch.sys.

    A module may only stand before a dot, so that it can be followed: t = torch is refused. Nor may
    anything imported be changed, as in torch.isclose = .., because the tests use it, too.
    """
    modules, imported = imported_modules(name, tree), imported_names(tree)
    before_a_dot = {node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load) and (
                ast.unparse(node).partition(".")[0] in imported):
            fail(f"{name}, line {node.lineno} changes {ast.unparse(node)}, which is not yours: use "
                 "what you import as it is")
        found = module_of(node, modules)
        if found is None or isinstance(node.ctx, ast.Store):
            continue
        where = f"{name}, line {node.lineno}: {ast.unparse(node)} is the module {found.__name__}"
        if found.__name__.partition(".")[0] not in MODULES:
            fail(f"{where}: {ALLOWED}")
        if node not in before_a_dot:
            fail(f"{where}, which may only stand before a dot: give a variable of yours another "
                 "name")


def imported_names(tree):
    """The names that a file has for what it imports."""
    imports = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    aliases = [alias for node in imports for alias in node.names]
    return {alias.asname or alias.name.partition(".")[0] for alias in aliases}


def imported_modules(name, tree):
    """The modules that a file imports, by the names that it has for them."""
    modules = {}
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        for alias in node.names:
            try:
                if isinstance(node, ast.ImportFrom):
                    found = getattr(importlib.import_module(node.module), alias.name, None)
                else:
                    found = importlib.import_module(alias.name)
            except ImportError:                        # running the file will tell
                continue
            if isinstance(node, ast.Import) and not alias.asname:
                top = alias.name.partition(".")[0]     # import torch.nn binds torch
                modules[top] = importlib.import_module(top)
            elif isinstance(found, ModuleType):
                modules[alias.asname or alias.name] = found
                if found.__name__.partition(".")[0] not in MODULES:
                    fail(f"{name}, line {node.lineno} imports {found.__name__}: {ALLOWED}")
    return modules


def module_of(node, modules):
    """The module that an expression is, such as torch.nn.functional, or None."""
    if isinstance(node, ast.Name):
        return modules.get(node.id)
    if not isinstance(node, ast.Attribute):
        return None
    found = getattr(module_of(node.value, modules), node.attr, None)
    return found if isinstance(found, ModuleType) else None


def yours(part, name, right):
    """Your function of that name. In place of your file's other functions it calls the right ones.

    So a mistake in one exercise costs nothing in another. right: {name: the right function}
    """
    file = load(part)
    for other, f in right.items():
        if other != name:
            setattr(file, other, f)
    return own(file, part, name)


def own(file, part, name):
    """What a file has under a name."""
    if not hasattr(file, name):
        fail(f"{part}.py has no {name}")
    return getattr(file, name)


# ------------------------------------------------------------------------------ comparisons

@dataclass
class Case:
    """Inputs on which your function is compared with the right one.

    hint: what to say where no mistake is known; hint_at_nan: instead of it, where NaN or inf is in
    your result. tolerance: relative to the largest right value, or absolute where all are below 1.
    zero: how large a number may be where the right one is 0.
    through: a function of the results; what it returns is compared.
    outputs: the names of the results of a function that returns several; then, or without
    `gradients`, only values are compared, else also the gradients of all inputs.
    """
    inputs: tuple
    hint: str = ""
    hint_at_nan: str = ""
    tolerance: float = 1e-5
    zero: float = 1e-12
    through: object = None
    outputs: tuple = ()
    gradients: bool = True

    def results(self, f, name, names):
        """{"the value": f(*inputs), "the gradient dL/dx": ...}, or {"an error": the exception}.

        f gets copies of the inputs. name: the function's, and names: those of its arguments.
        """
        try:
            return self.call(f, name, names)
        except (Exception, SystemExit) as e:
            error = first_cause(e)
        if isinstance(error, NotImplementedError) and str(error).startswith("Exercise "):
            fail(f"{TO_DO}: {error}")
        return {"an error": error}

    def call(self, f, name, names):
        """`results` of a function that raises no exception."""
        copies = [x.clone() if torch.is_tensor(x) else x for x in self.inputs]
        trained = {}
        if self.gradients and not self.outputs:
            for arg, x in zip(names, copies):
                if torch.is_tensor(x) and x.is_floating_point():
                    trained[f"the gradient dL/d{arg}"] = x.requires_grad_()
        y = f(*copies)
        for arg, x, copy in zip(names, self.inputs, copies):
            if torch.is_tensor(x) and not torch.equal(x.nan_to_num(), copy.nan_to_num()):
                fail(f"{name} changes its input {arg} in place, but the caller still needs it: "
                     "write x = x + 1, not x += 1 or x.add_(1)")

        # A number will do for a tensor without axes.
        several = self.outputs and isinstance(y, (tuple, list)) and len(y) == len(self.outputs)
        found = [torch.tensor(x, dtype=torch.float64) if isinstance(x, float) else x
                 for x in (y if several else [y])]
        if self.through is not None and all(type(x) in PLAIN for x in found):
            y = self.through(*found)
            found = y if several else [y]
        if several:
            return dict(zip(self.outputs, found))
        y = found[0]
        if not trained or not torch.is_tensor(y):
            return {"the value": y}

        if not y.requires_grad:                        # nothing depends on the inputs
            return {"the value": y} | {what: torch.zeros_like(x) for what, x in trained.items()}
        dy = torch.randn(y.shape, generator=random(9)).to(y)
        found = torch.autograd.grad(y, list(trained.values()), dy, allow_unused=True,
                                    materialize_grads=True)
        return {"the value": y.detach()} | dict(zip(trained, found))


def grade(yours, right, cases, mistakes=(), hint=""):
    """Compare your function with the right one in each case.

    mistakes: pairs (a wrong function, what to say to those who have its results).
    hint: what to say where no mistake is known, and the case has no hint of its own.
    """
    name, names = right.__name__, list(inspect.signature(right).parameters)
    for n, case in enumerate(cases):
        found, wanted = case.results(yours, name, names), case.results(right, name, names)
        wrong = [what for what in ["an error", *wanted]
                 if not agree(found.get(what), wanted.get(what), case)]
        if wrong:
            if "an error" not in found and not same(case.results(yours, name, names), found, case):
                fail(f"{name} has another result when it is called again: nothing in this exercise "
                     "is drawn at random, such as by sampling or dropout, or remembered from an "
                     "earlier call")
            causes = causes_of(yours, mistakes, cases, n, name, names)
            fail(message(case, causes, found, wanted, wrong, name, hint))


def causes_of(yours, mistakes, cases, n, name, names):
    """What to say about the known mistakes that have your results, in case n and all before it.

    Where several have, the later cases decide, if they can.
    """
    for m, case in enumerate(cases):
        found = case.results(yours, name, names)
        alike = [(wrong, cause) for wrong, cause in mistakes
                 if same(case.results(wrong, name, names), found, case)]
        if alike or m <= n:
            mistakes = alike
        if m >= n and len(mistakes) < 2:               # later cases have nothing to decide
            break
    return list(dict.fromkeys(cause for _, cause in mistakes))


def same(found, wanted, case):
    """Whether two functions have the same results in a case, wrong ones included."""
    if found.keys() != wanted.keys():
        return False
    pairs = [(found[what], x) for what, x in wanted.items()]
    # In both directions: a number that is 0 in one of the two must be 0 in the other.
    return all(agree(x, y, case, equal_nan=True) and agree(y, x, case, equal_nan=True)
               for x, y in pairs)


def first_cause(e):
    """The exception in your code: Triton's interpreter wraps those in a kernel."""
    while e.__cause__:
        e = e.__cause__
    return e


def agree(x, y, case, equal_nan=False):
    """Whether x has the shape and dtype of y, and is near it by the rules of a case."""
    if isinstance(y, Exception) or not torch.is_tensor(y):
        return type(x) is type(y) and str(x) == str(y)
    # A subclass of Tensor could answer each comparison with yes.
    if type(x) not in PLAIN or x.shape != y.shape:
        return False
    # Whole numbers may be of any dtype.
    if y.is_floating_point() and x.dtype != y.dtype:
        return False
    return not off(x.double(), y.double(), case.tolerance, case.zero, equal_nan).any()


def off(x, y, tolerance, zero=1e-12, equal_nan=False):
    """Where x is not near y, or too large where y is 0."""
    finite = y[y.isfinite()].abs()
    largest = max(finite.max().item(), 1.0) if finite.numel() else 1.0
    near = torch.isclose(x, y, 0, tolerance * largest, equal_nan)
    return ~near | ((y == 0) & (x.abs() > zero))


# ---------------------------------------------------------------------------------- messages

def message(case, causes, found, wanted, wrong, name, hint):
    """What a student reads. wrong: the names of the results that are not right."""
    what, lines = wrong[0], []
    if 0 < len(causes) <= 3:
        lines.append("\n  or: ".join(causes))
    other = describe_other(found, wanted, what, name, case)
    if other:
        return "\n".join([*lines, other])
    if not lines and case.hint_at_nan and not found[what].isfinite().all():
        lines.append(case.hint_at_nan)
    elif not lines and case.hint:
        lines.append(case.hint)
    if not lines and what.startswith("the gradient") and not found[what].any():
        return (f"{what} of {name} is 0 everywhere: is the input detached, or turned into a number "
                "on the way?")
    if not lines and hint:
        lines.append(hint)
    lines.append(describe_numbers(found[what], wanted[what], f"{what} of {name}", case))
    if case.outputs and len(wrong) < len(wanted):
        lines.append(f"wrong: {', '.join(wrong)}")
    return "\n".join(lines)


def describe_other(found, wanted, what, name, case):
    """What is wrong with a result besides its numbers, or "" """
    if "an error" in found:
        return describe_error(found["an error"])
    if what not in found:
        return f"{name} returns {kind_of(found['the value'])}; it should return {', '.join(wanted)}"
    order = other_order(found, wanted, case)
    if order:
        return f"{name} returns the right results in another order: {', '.join(order)}"
    x, y = found[what], wanted[what]
    if type(x) not in PLAIN:
        missing = ": is a return missing?" if x is None else ""
        return f"{what} of {name} is {kind_of(x)}; it should be a tensor{missing}"
    if x.shape == y.shape and y.is_floating_point() and x.dtype != y.dtype:
        line = f"{what} of {name} is {x.dtype}; it should be {y.dtype}"
        if x.is_floating_point() and what.startswith("the gradient"):
            return ""                                  # autograd made it, not the student
        if x.is_floating_point():
            line += ". math.pi * d, for integers d, and a new tensor without dtype= are float32"
        return line
    return ""


def other_order(found, wanted, case):
    """The names of your results in the order in which you return them, if only that is wrong."""
    names = list(wanted)
    if found.keys() != wanted.keys() or not case.outputs or len(names) > 5:
        return ()
    for order in itertools.permutations(names):
        if all(agree(found[mine], wanted[right], case) for mine, right in zip(names, order)):
            return order
    return ()


def describe_numbers(x, y, what, case):
    """Where a tensor is wrong, in one line."""
    if x.shape != y.shape:
        return f"{what} has the shape {tuple(x.shape)}; it should be {tuple(y.shape)}"
    x, y = x.double(), y.double()
    wrong = off(x, y, case.tolerance, case.zero)
    error = torch.where(wrong, (x - y).abs().nan_to_num(torch.inf), 0.0)
    at = tuple(int(n) for n in torch.unravel_index(error.argmax(), error.shape))
    place = f" at {list(at)}" if at else ""
    a, b = x[at].item(), y[at].item()
    if math.isnan(a):
        return f"{what} is NaN{place}; it should be {b:.6g}"
    digits = next((n for n in (6, 9, 12) if f"{a:.{n}g}" != f"{b:.{n}g}"), 17)
    line = f"{what} is {a:.{digits}g}{place}; it should be {b:.{digits}g}"
    if b == 0 and abs(a) < case.tolerance:
        return line + ", exactly"
    if case.tolerance < 1e-6 and not off(x, y, 1e-5).any():
        return line + ". It is nearly right: is something in float32 on the way?"
    factor = (x * y).sum() / y.square().sum()
    # The nearer it is to 1, the closer it has to fit: 0.999 for the largest is not for all.
    unlike = off(x / factor, y, 1e-5 * min(1.0, abs(factor.item() - 1)))
    if x.numel() > 1 and not unlike.any() and f"{factor:.4g}" != "1":
        return line + f". All are {factor:.4g} times what they should be"
    return line


def kind_of(x):
    """What a wrong result is, in words."""
    if x is None:
        return "nothing"
    if isinstance(x, (tuple, list)):
        return f"{len(x)} things"
    return f"an object of the type {type(x).__name__}"


def describe_error(e):
    """An exception, and the line of your file that it comes from."""
    text = f"{type(e).__name__}: {e}"
    if "in-place operation" in text or "inplace operation" in text:
        text = ("a tensor was changed in place, and a gradient needs its old values: write "
                "x = x + 1, not x += 1 or x.add_(1)")
    where, trace = "", e.__traceback__
    while trace:
        file = Path(trace.tb_frame.f_code.co_filename)
        if file.parent == FOLDER and file.name.startswith("part"):
            code = linecache.getline(str(file), trace.tb_lineno).strip()
            where = f"\n{file.name}, line {trace.tb_lineno}: {code}"
        trace = trace.tb_next
    return text + where


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
