"""What runs your code: a process of its own, which grade.py starts, and which has no right results.

It gets your file, the inputs, and as multiscreen.py those right functions that the exercise may
use. It sends back tensors and texts, which grade.py compares with the right results.
"""
import contextlib
import importlib
import importlib.util
import multiprocessing
import os
import sys
import traceback
from pathlib import Path

import torch

PLAIN = (torch.Tensor, torch.nn.Parameter)             # a result of another type is no tensor


class Wrong(Exception):
    """A message for the student, as it stands."""


def load(path):
    """Your file of a part as a module. Each call runs it anew."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    # A dataclass whose annotations are texts looks for its module here.
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def own(place, name):
    """What your file, or a class in it, has under a name."""
    if not hasattr(place, name):
        raise Wrong(f"{place.__name__} has no {name}")
    return getattr(place, name)


# --------------------------------------------------------------------------------- results

def results(f, name, inputs, trained):
    """{"the value": f(*inputs), "the gradient dL/dx": ..}, or what `describe` says of an error.

    If f returns a dict, its results have names of their own. trained: {position of an input: its
    name}, those whose gradients are wanted. f gets copies of the inputs.
    """
    copies = [x.clone() if torch.is_tensor(x) else x for x in inputs]
    for n in trained:
        copies[n].requires_grad_()
    try:
        y = f(*copies)
        for n, (x, copy) in enumerate(zip(inputs, copies)):
            if torch.is_tensor(x) and not torch.equal(x.nan_to_num(), copy.nan_to_num()):
                raise Wrong(f"{name} changes its input {trained.get(n, n)} in place, but the "
                            "caller still needs it: write x = x + 1, not x += 1 or x.add_(1)")
        found = y if isinstance(y, dict) else {"the value": y}
        found = {what: plain(x) for what, x in found.items()}
        if type(y) in PLAIN:
            for n, gradient in zip(trained, gradients(y, [copies[n] for n in trained])):
                found[f"the gradient dL/d{trained[n]}"] = gradient
        return found
    except (Exception, SystemExit) as e:
        return describe(e)


def gradients(y, inputs):
    """The gradients of a sum of y, weighted at random. 0 where y does not depend on an input."""
    if not inputs or not y.requires_grad:
        return [torch.zeros_like(x) for x in inputs]
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(9)).to(y)
    # Of a sum: for a tensor torch would first import what takes half a second.
    return torch.autograd.grad((y * dy).sum(), inputs, allow_unused=True, materialize_grads=True)


def plain(y):
    """A result as a tensor, or a text that says what else it is."""
    if type(y) in PLAIN:
        return y.detach()
    if isinstance(y, (int, float)):                    # will do for a tensor without axes
        return torch.tensor(y, dtype=torch.float64)
    if y is None:
        return "nothing: is a return missing?"
    return f"an object of the type {type(y).__name__}"


def describe(e):
    """{"a message": ..}, if that is all to say; or {"an error": its text, "where": your line}."""
    while e.__cause__:                                 # Triton's interpreter wraps those in kernels
        e = e.__cause__
    if isinstance(e, Wrong):
        return {"a message": str(e)}
    if isinstance(e, NotImplementedError) and str(e).startswith("Exercise "):
        return {"a message": f"still to do: {e}"}
    text = "".join(traceback.format_exception_only(e)).strip()
    text = text.replace(os.getcwd() + os.sep, "")      # a syntax error names your file's copy
    if "in-place operation" in text or "inplace operation" in text:
        text = ("a tensor was changed in place, and a gradient needs its old values: write "
                "x = x + 1, not x += 1 or x.add_(1)")
    where = ""
    for frame in traceback.extract_tb(e.__traceback__):
        file = Path(frame.filename).name
        if file.startswith("part"):
            where = f"\n{file}, line {frame.lineno}: {frame.line}"
    return {"an error": text, "where": where}


# ----------------------------------------------------------------------------- the process

def serve():
    """Grade in a new process each folder that standard input names, with its limit in seconds.

    Prints the exit code of that process, or None if the time was up. Only this process imports
    torch, which takes a second.
    """
    # Once for all processes: it takes half a second, and is only on Linux.
    with contextlib.suppress(ImportError):
        importlib.import_module("triton")
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
    part, name, cases, others = torch.load("request.pt", weights_only=True)
    given = importlib.import_module("multiscreen")
    drive = importlib.import_module("course.exercises.drive")
    try:
        file = load(Path(folder) / f"{part}.py")
        for other in others:
            setattr(file, other, getattr(given, other))
        f = drive.yours(file, name)
        found = [results(f, name, *case) for case in cases]
    except (Exception, SystemExit) as e:
        found = [describe(e)] * len(cases)
    torch.save(found, "results.pt")
