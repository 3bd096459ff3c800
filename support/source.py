"""What a run ran: the files that its model and train.py are made of, and how two such sets differ.

The unit is the file. A model is known by a hash of multiscreen.py, the files of its classes, and
what these import of yours (`code_hash`). A run keeps these files, train.py, those of its data and
what they import of yours (`source_of`), as they were when imported. Comments and docstrings are no
edit.
"""
import ast
import difflib
import hashlib
import inspect
import sys
from functools import cache
from pathlib import Path

import multiscreen

ROOT = Path(multiscreen.__file__).parent
# How a model runs, not what it computes.
PLUMBING = ("support/", "tasks/", "screening_triton.py")


def path_of(module):
    """The file of a module as seen from ROOT, "support/data.py"; None for one elsewhere."""
    file = Path(getattr(module, "__file__", None) or "/")
    inside = file.is_relative_to(ROOT) and "site-packages" not in file.parts
    return file.relative_to(ROOT).as_posix() if inside else None


@cache
def read(path):
    """The text of a file of ROOT, as it was when first asked for."""
    return (ROOT / path).read_text("utf-8-sig", "replace")


# Now: a later edit is not of this run.
for path in filter(None, map(path_of, [*sys.modules.values()])):
    read(path)


def imported_by(paths, but=PLUMBING):
    """Files of ROOT, and those they import at any depth, without what begins with `but`."""
    todo, found = [*paths], set()
    while todo:
        path = todo.pop()
        skip = path.startswith(but) and path not in paths
        if skip or path in found or not (ROOT / path).is_file():
            continue
        found.add(path)
        for node in ast.walk(ast.parse(read(path))):
            names = [x.name for x in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                folder = Path(path).parts[: -node.level] if node.level else ()
                base = ".".join([*folder, *filter(None, [node.module])])
                names = [base, *(f"{base}.{x.name}" for x in node.names)]
            # A name is a module's, mine.py, or a folder's, mine/__init__.py.
            todo += [name.replace(".", "/") + end for name in names
                     for end in (".py", "/__init__.py")]
    return sorted(found)


def classes_of(objects):
    """The classes of some objects, with their base classes."""
    return {c for x in objects for c in type(x).__mro__}


def files_of(objects, but=PLUMBING):
    """The files of ROOT that have the classes of some objects, and what these import of yours."""
    paths = {path_of(sys.modules.get(c.__module__)) for c in classes_of(objects)} - {None}
    return imported_by(paths, but)


def source_of(model, data):
    """{path: text} of what a run is made of: train.py, its model, its data, and files of yours."""
    others = (*PLUMBING, "baselines/")                 # other models' files are not of this run
    paths = {*files_of(model.modules()), *files_of([data], others),
             *imported_by(["train.py", "support/tokens.py"], others)}
    return {path: read(path) for path in sorted(paths)}


def source_in(folder):
    """{path: text} of what a run of train.py in a folder has kept."""
    root = folder / "source"
    return {path.relative_to(root).as_posix(): path.read_text("utf-8")
            for path in sorted(root.rglob("*.py"))}


# ------------------------------------------------------------------------------ what is an edit

@cache
def bare(text):
    """The lines of a file without comments and docstrings."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(getattr(node, "body", None), list):
            node.body = [x for x in node.body if not isinstance(x, ast.Expr)
                         or not isinstance(x.value, ast.Constant)] or (
                             [ast.Pass()] * (node is not tree))
    return [line for line in ast.unparse(tree).splitlines() if line]


def edited_files(old, new):
    """The paths whose lines differ in two {path: text}."""
    return [path for path in sorted({*old, *new})
            if bare(old.get(path, "")) != bare(new.get(path, ""))]


def differences(old, new, most=20):
    """Lines that say in which lines two {path: text} differ, below the name of their function.

    At most so many of each file. A longer one that only one of them has gets one line: nobody
    changed it.
    """
    lines = []
    for path in edited_files(old, new):
        diff = difflib.unified_diff(bare(old.get(path, "")), bare(new.get(path, "")), n=10**6,
                                    lineterm="")
        # Of the lines that are the same, those that begin the function of a change.
        shown = [x for x in [*diff][3:] if x[0] != " " or x.split()[0] in ("def", "class")]
        changed = [x for x, y in zip(shown, [*shown[1:], " "]) if x[0] != " " or y[0] != " "]
        if len(changed) > most and not (path in old and path in new):
            side = "second" if path in new else "first"
            lines.append(f"  {path}: only the {side} has this file, of {len(changed)} lines")
            continue
        lines += [f"  {path}", *(f"    {line}" for line in changed[:most])]
        lines += [f"    and {len(changed) - most} more lines"] * (len(changed) > most)
    return lines


# ----------------------------------------------------------------------------- what a model is

def code_hash(model):
    """Twelve digits that change with the files of a model. None, and a line, for other code.

    Other code was put in place of a file's at run time, in a notebook say: what it computes must
    not be resumed or reused.
    """
    files = files_of(model.modules())
    if change := replaced(model, files):
        print(f"{change} at run time: nothing is resumed or reused", file=sys.stderr)
        return None
    return hashlib.sha256(repr([bare(read(path)) for path in files]).encode()).hexdigest()[:12]


def replaced(model, files):
    """What is not as in its file, "multiscreen.trim was replaced", or None."""
    for c in classes_of(model.modules()):
        module = sys.modules.get(c.__module__)
        if c.__module__ == "__main__" and path_of(module) is None:
            return f"{c.__qualname__} was defined"
    for module in [x for x in [*sys.modules.values()] if path_of(x) in files]:
        text = read(path_of(module))
        written = codes(compile(text, "", "exec", dont_inherit=True))
        for node in ast.parse(text).body:
            owner, inside = module, [node]
            if isinstance(node, ast.ClassDef):
                owner, inside = getattr(module, node.name, None), node.body
                if (getattr(owner, "__module__", ""), getattr(owner, "__qualname__", "")) != (
                        module.__name__, node.name):
                    return f"{module.__name__}.{node.name} was replaced"
            for f in (x for x in inside if isinstance(x, ast.FunctionDef)):
                value = vars(owner).get(f.name)
                if f.decorator_list:
                    value = inspect.unwrap(getattr(value, "fget", value))
                code = getattr(value, "__code__", None)
                # A decorator may put a function of its own in place, under another name.
                right = code in written and code.co_name == f.name
                if not right and (not f.decorator_list or code and code.co_name == f.name):
                    return f"{owner.__name__}.{f.name} was replaced"
    return None


def codes(code):
    """The code of all functions in a compiled text."""
    inside = [codes(x) for x in code.co_consts if inspect.iscode(x)]
    return {code}.union(*inside)
