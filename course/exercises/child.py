"""What runs your code: a process of its own, which grade.py starts, and which has no right results.

It gets your file, the inputs, and as multiscreen.py those right functions that the exercise may
use. It sends back tensors and texts, which grade.py compares with the right results.
"""
import contextlib
import importlib
import importlib.util
import linecache
import multiprocessing
import os
import sys
from pathlib import Path

import torch

PLAIN = (torch.Tensor, torch.nn.Parameter)             # a result of another type is no tensor


class Wrong(Exception):
    """A message for the student, as it stands."""


# ------------------------------------------------------------------------------- your file

def load(path):
    """Your file of a part as a module. Each call runs it anew."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    # A dataclass whose annotations are texts looks for its module here.
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except SyntaxError as e:
        line = (e.text or "").strip()
        raise Wrong(f"{Path(e.filename).name}, line {e.lineno}: {e.msg}: {line}") from None
    except (Exception, SystemExit) as e:
        raise Wrong("".join(describe(e).values())) from None
    return module


def own(file, name):
    """What a file has under a name."""
    if not hasattr(file, name):
        raise Wrong(f"{file.__name__}.py has no {name}")
    return getattr(file, name)


# --------------------------------------------------------------------------------- results

def results(f, name, inputs, trained):
    """{"the value": f(*inputs), "the gradient dL/dx": ..}, or {"an error": its text, "where": ..}.

    If f returns a dict, its results have names of their own. trained: {position of an input: its
    name}, those whose gradients are wanted. Where the whole message is known, it is {"a message"}.
    """
    try:
        return call(f, name, inputs, trained)
    except Wrong as e:
        return {"a message": str(e)}
    except (Exception, SystemExit) as e:
        return describe(e)


def call(f, name, inputs, trained):
    """`results` of a function that raises no exception. f gets copies of the inputs."""
    copies = [x.clone() if torch.is_tensor(x) else x for x in inputs]
    for n in trained:
        copies[n].requires_grad_()
    y = f(*copies)
    for n, (x, copy) in enumerate(zip(inputs, copies)):
        if torch.is_tensor(x) and not torch.equal(x.nan_to_num(), copy.nan_to_num()):
            raise Wrong(f"{name} changes its input {trained.get(n, n)} in place, but the caller "
                        "still needs it: write x = x + 1, not x += 1 or x.add_(1)")
    if isinstance(y, dict):
        return {what: plain(x) for what, x in y.items()}
    found = {"the value": plain(y)}
    if type(y) not in PLAIN:
        return found

    gradients = [torch.zeros_like(copies[n]) for n in trained]      # if y depends on no input
    if trained and y.requires_grad:
        dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(9)).to(y)
        gradients = torch.autograd.grad(y, [copies[n] for n in trained], dy, allow_unused=True,
                                        materialize_grads=True)
    for argument, gradient in zip(trained.values(), gradients):
        found[f"the gradient dL/d{argument}"] = gradient
    return found


def plain(y):
    """A result as a tensor, or a text that says what else it is."""
    if type(y) in PLAIN:
        return y.detach()
    if isinstance(y, float):                           # will do for a tensor without axes
        return torch.tensor(y, dtype=torch.float64)
    if isinstance(y, (tuple, list)):
        return f"{len(y)} things"
    if y is None:
        return "nothing: is a return missing?"
    return f"an object of the type {type(y).__name__}"


def describe(e):
    """An exception: its text, and the line of your file that it comes from."""
    while e.__cause__:                                 # Triton's interpreter wraps those in kernels
        e = e.__cause__
    text, where, trace = f"{type(e).__name__}: {e}", "", e.__traceback__
    if isinstance(e, NotImplementedError) and str(e).startswith("Exercise "):
        return {"a message": f"still to do: {e}"}
    if "in-place operation" in text or "inplace operation" in text:
        text = ("a tensor was changed in place, and a gradient needs its old values: write "
                "x = x + 1, not x += 1 or x.add_(1)")
    while trace:
        file = Path(trace.tb_frame.f_code.co_filename)
        if file.name.startswith("part"):
            code = linecache.getline(str(file), trace.tb_lineno).strip()
            where = f"\n{file.name}, line {trace.tb_lineno}: {code}"
        trace = trace.tb_next
    return {"an error": text, "where": where}


# ----------------------------------------------------------------------------- the process

def serve():
    """Grade in a new process each folder that standard input names, with its limit in seconds.

    Prints the exit code of that process, or None if the time was up. Only this process imports
    torch, which takes a second.
    """
    # The first gradient of a process imports this, in 0.3 s: here once for all. Another torch may
    # have it elsewhere, which only costs that time.
    with contextlib.suppress(ImportError):
        importlib.import_module("torch.fx.experimental.symbolic_shapes")
    for line in sys.stdin:
        folder, seconds = line.rstrip("\n").split("\t")
        process = multiprocessing.get_context("fork").Process(target=run, args=(folder,),
                                                              daemon=True)
        process.start()
        process.join(float(seconds))
        code = process.exitcode
        process.kill()
        process.join()
        print(code, flush=True)


def run(folder):
    """Answer the request in a folder: what your function returns for each of the inputs."""
    os.chdir(folder)
    sys.path.insert(0, folder)
    # What you print appears below the message, also what came before a loop without an end.
    with open("printed.txt", "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout.reconfigure(line_buffering=True)
    torch.set_num_threads(1)
    part, name, cases = torch.load("request.pt", weights_only=True)
    given = importlib.import_module("multiscreen")
    drive = importlib.import_module("course.exercises.drive")
    try:
        file = load(Path(folder) / f"{part}.py")
        for other in getattr(given, "__all__", ()):
            setattr(file, other, getattr(given, other))
        f = drive.yours(file, name)
        found = [results(f, name, *case) for case in cases]
    except Wrong as e:
        found = [{"a message": str(e)}] * len(cases)
    torch.save(found, "results.pt")
