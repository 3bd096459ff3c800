"""The code of a run: the files that a run keeps, their hash for tables, and how two sets differ.

The unit is the file. A model is identified by a hash of the files with its classes and of whatever
these import from your own files. A run keeps these, train.py, the code of its data, and whatever
they import from your own. Libraries are left out, and so is the code that decides how a model runs
rather than what it computes. A change in comments and docstrings is not an edit.
"""
import ast
import difflib
import hashlib
import os
import sys
import uuid
from functools import cache
from pathlib import Path

import multiscreen

ROOT = Path(multiscreen.__file__).parent
OURS = {"abcdigits", "lab", "multiscreen", "train"}
PLUMBING = {"screening_triton", "support"}             # kept only if the data's class is in it
texts = {}                                             # {module: (its spec, its text)}


def file_of(module):
    """The file of a module by its name, imported or not; None if there is none."""
    if module in sys.modules:
        file = str(getattr(sys.modules[module], "__file__", None))
        return Path(file) if file.endswith(".py") else None
    path = module.replace(".", "/")
    places = [Path(folder, path + end) for folder in (ROOT, *sys.path, os.getcwd())
              for end in (".py", "/__init__.py")]
    return next((file for file in places if file.is_file()), None)


def text_of(module):
    """The text of a module as it was imported, or last reloaded; None if it has no file."""
    spec = getattr(sys.modules.get(module), "__spec__", None)
    known, text = texts.get(module, (None, None))
    # In a notebook %run reads a script again each time, and %autoreload each edited file.
    again = ("IPython.extensions.autoreload" if spec else "IPython") in sys.modules
    if text is None or known is not spec or again:
        file = file_of(module)
        text = file and file.read_text("utf-8-sig", "replace")
        texts[module] = spec, text
    return text


# Read now what has been imported: a later edit does not belong to this run.
for module in ("train", *sys.modules):
    if module.partition(".")[0] in OURS | PLUMBING:
        text_of(module)


def files_of(modules):
    """{path: text} of modules and of all code of yours that they import, as `text_of` returns it.

    modules: their names, or the paths under which a run has kept them.
    """
    found, todo = {}, [x.removesuffix(".py").replace("/", ".") for x in modules]
    while todo:
        module = todo.pop()
        path, text = module.replace(".", "/") + ".py", text_of(module)
        if text is None or path in found:
            continue
        found[path] = text
        for node in ast.walk(ast.parse(text)):
            names = [x.name for x in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                folder = module.split(".")[: -node.level] if node.level else []
                base = ".".join([*folder, *filter(None, [node.module])])
                names = [base, *(f"{base}.{x.name}" for x in node.names)]
            todo += filter(is_yours, names)
    return dict(sorted(found.items()))


def is_yours(module):
    """Whether an imported module is neither plumbing nor a library's."""
    top, file = module.partition(".")[0], file_of(module)
    if not file or top in PLUMBING or top in sys.stdlib_module_names:
        return False
    return top in OURS or not {"site-packages", "dist-packages"} & {*file.parts}


def modules_of(objects):
    """The names of the modules with the classes of some objects, without PyTorch's and Python's."""
    names = {c.__module__ for x in objects for c in type(x).__mro__}
    return {x for x in names if x.partition(".")[0] not in {"torch", *sys.stdlib_module_names}}


def source_of(model, data):
    """{path: text} of the code that makes up a run."""
    return files_of({"train", "support.tokens", *modules_of([*model.modules(), data])})


# ------------------------------------------------------------------------ what a model is known by

def code_hash(model):
    """A hash of the files of a model: twelve hexadecimal digits.

    If the files are not known, as for a class in no file, the hash is unique, and a line says so.
    """
    modules = modules_of(model.modules())
    unknown = [f"{name} has no file" for name in modules if text_of(name) is None]
    # A notebook or a script may have replaced a function of a file, or a method of a class.
    loaded = [sys.modules[name] for name in modules - {"__main__"} if name in sys.modules]
    classes = [x for module in loaded for x in vars(module).values() if isinstance(x, type)]
    unknown += [f"{owner.__name__}.{name} is not the one in its file"
                for owner in loaded + classes for name, x in vars(owner).items()
                if getattr(x, "__module__", None) == "__main__"]
    if unknown:
        print(f"{unknown[0]}: nothing measured with it is reused", file=sys.stderr)
    return hash_of_texts([None] if unknown else files_of(modules).values())


def hash_of_texts(texts):
    """A hash of the lines of some files; a new one each time if one of the texts is None."""
    texts = {*texts}
    if None in texts:
        return uuid.uuid4().hex[:12]
    return hashlib.sha256(repr(sorted(map(bare, texts))).encode()).hexdigest()[:12]


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
    """The lines in which two {path: text} differ, each below the name of its function.

    At most `most` lines per file. A file that only one of the two has is not an edit: if it is
    long, one line names it.
    """
    lines = []
    for path in edited_files(old, new):
        diff = difflib.unified_diff(bare(old.get(path, "")), bare(new.get(path, "")), n=10**6,
                                    lineterm="")
        # Of the unchanged lines, keep those that begin the function or class of a change.
        shown = [x for x in [*diff][3:] if x[0] != " " or x.split()[0] in ("def", "class")]
        changed = [x for x, y in zip(shown, [*shown[1:], " "]) if x[0] != " " or y[0] != " "]
        if len(changed) > most and not (path in old and path in new):
            side = "second" if path in new else "first"
            lines.append(f"  {path}: only the {side} has this file ({len(changed)} lines)")
            continue
        lines += [f"  {path}", *(f"    {line}" for line in changed[:most])]
        lines += [f"    and {len(changed) - most} more lines"] * (len(changed) > most)
    return lines
