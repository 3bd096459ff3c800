"""What a run ran: its source as it was when imported, and the identity of its equations.

A run is known by `identity(name)`, a hash of the text of those definitions of multiscreen.py and
baselines/ that its model reaches through base classes and through names. Comments, docstrings,
blank lines and other variants do not count. A function that was replaced at run time has no text
here; then the identity is unique, so that nothing is resumed or reused.
"""
import ast
import difflib
import hashlib
import inspect
import io
import sys
import tokenize
import uuid
from functools import cache
from pathlib import Path

import baselines
import multiscreen
import support.data
import support.passkey
import support.stream

ROOT = Path(multiscreen.__file__).parent
OTHERS = (support.data, support.passkey, support.stream)


def path_of(module):
    """The file of a module or class as seen from ROOT, "support/data.py"; None elsewhere."""
    file = Path(getattr(module, "__file__", None) or "")
    return file.relative_to(ROOT).as_posix() if file.is_relative_to(ROOT) else None


# What models are made of, by path; and all texts, read once: a later edit is not of this run.
MODULES = {path_of(module): module for name, module in [*sys.modules.items()]
           if name.partition(".")[0] in ("multiscreen", baselines.__name__)}
TEXT = {path: (ROOT / path).read_text(encoding="utf-8")
        for path in (*MODULES, *map(path_of, OTHERS), "train.py")}


# ------------------------------------------------------------------- what a text defines and uses

@cache
def bare_lines(text):
    """The lines of a text; comments and docstrings are blank."""
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(text)):
        documented = isinstance(node, (ast.Module, ast.FunctionDef, ast.ClassDef))
        if documented and ast.get_docstring(node) is not None:
            first, last = node.body[0].lineno, node.body[0].end_lineno
            lines[first - 1 : last] = [""] * (last - first + 1)
    return [line.rstrip() for line in lines]


@cache
def definitions(text):
    """{name: the statements that define it} at the top level, with methods as "Class.method"."""
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.setdefault(node.name, []).append(node)
            for member in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(member, ast.FunctionDef):
                    found.setdefault(f"{node.name}.{member.name}", []).append(member)
            continue
        for x in ast.walk(node):
            if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store):
                found.setdefault(x.id, []).append(node)
    return found


@cache
def imports(text):
    """{name: (module, the name there or None)} of what a text imports."""
    found = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {x.asname or x.name: (x.name, None) for x in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {x.asname or x.name: (node.module, x.name) for x in node.names}
    return found


def file_of(source, module):
    """The path of a module among those of a source, or None."""
    path = f"{module}".replace(".", "/")
    return next((p for p in (f"{path}.py", f"{path}/__init__.py") if p in source), None)


def resolve(source, path, name, member=None):
    """(path, name) of the definition that `name` or `name.member` means in a file, or None."""
    if name in definitions(source[path]):
        method = f"{name}.{member}"
        return path, method if method in definitions(source[path]) else name
    module, attribute = imports(source[path]).get(name, (None, None))
    if attribute and not file_of(source, f"{module}.{attribute}"):
        there = file_of(source, module)
        return resolve(source, there, attribute, member) if there else None
    there = file_of(source, f"{module}.{attribute}" if attribute else module)
    return resolve(source, there, member) if there and member else None


def names_in(node):
    """Yield (name, None) for each global name a node uses, (name, member) for name.member."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        yield node.value.id, node.attr
    elif isinstance(node, ast.Name):
        yield node.id, None
    elif isinstance(node, (ast.FunctionDef, ast.Lambda)):
        # Its parameters and variables are not global; decorators and defaults are outside.
        outside = [*node.args.defaults, *filter(None, node.args.kw_defaults),
                   *getattr(node, "decorator_list", [])]
        own = {x.arg for x in ast.walk(node.args) if isinstance(x, ast.arg)}
        own |= {x.id for x in ast.walk(node) if isinstance(x, ast.Name)
                and isinstance(x.ctx, ast.Store)}
        body = node.body if isinstance(node.body, list) else [node.body]
        yield from (x for child in body for x in names_in(child) if x[0] not in own)
        yield from (x for child in outside for x in names_in(child))
    else:
        for child in ast.iter_child_nodes(node):
            yield from names_in(child)


def reached(source, roots):
    """The (path, name) of the definitions that those in `roots` reach, themselves included."""
    todo, found = list(roots), set()
    while todo:
        path, name = todo.pop()
        if (path, name) in found or name not in definitions(source.get(path, "")):
            continue
        found.add((path, name))
        used = {x for node in definitions(source[path])[name] for x in names_in(node)}
        todo += filter(None, (resolve(source, path, *x) for x in used))
    return sorted(found)


def equations_of(source, roots):
    """The lines of all definitions that `roots` reach, bare."""
    lines = []
    for path, name in reached(source, roots):
        for node in definitions(source[path])[name]:
            first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
            lines += filter(None, bare_lines(source[path])[first - 1 : node.end_lineno])
    return lines


# ------------------------------------------------------------------------------- what a model is

def roots_of(model):
    """[(path, name)] of the classes of a model, its layers and its config."""
    classes = {type(model), type(model.config), *map(type, model.layers)}
    return sorted((path_of(sys.modules[c.__module__]) or "", c.__qualname__) for c in classes)


def digest(source, roots):
    """Twelve digits that change with the equations of a source."""
    return hashlib.sha256("\n".join(equations_of(source, roots)).encode()).hexdigest()[:12]


def identity(model):
    """Twelve digits that change with the equations of a model, and with nothing else.

    After one line they are unique if a function of it was replaced at run time.
    """
    roots = roots_of(model)
    if found := replaced(roots):
        print(f"{found} is not in the files of this model, or was replaced at run time: it has an "
              "identity of its own, and nothing is resumed or reused", file=sys.stderr)
        return uuid.uuid4().hex[:12]
    return digest(TEXT, roots)


def replaced(roots):
    """The first function or class that a model reaches which is not as in its file, or None."""
    for path, name in roots:
        if path not in MODULES:
            return name
    for path, name in reached(TEXT, roots):
        written = definitions(TEXT[path])
        for method in [name, *(x for x in written if x.startswith(f"{name}."))]:
            owner, _, last = method.rpartition(".")
            owner = getattr(MODULES[path], owner) if owner else MODULES[path]
            if not is_as_written(vars(owner).get(last), path, method):
                return f"{owner.__name__}.{last}"
    return None


def is_as_written(value, path, name):
    """Whether a function or class is what the file at `path` defines under this name."""
    node, written = definitions(TEXT[path])[name][-1], definitions(TEXT[path])
    if isinstance(node, ast.ClassDef):
        if getattr(value, "__qualname__", None) != name:
            return False
        # A file may assign functions, as in `loss = Multiscreen.loss`; a dataclass makes __init__.
        assigned = [inspect.unwrap(f).__code__ for key, f in vars(value).items()
                    if inspect.isfunction(f) and f"{name}.{key}" not in written
                    and not key.startswith("__")]
        known = [code for path in MODULES for code in codes(path).values()]
        return all(code in known for code in assigned)
    if not isinstance(node, ast.FunctionDef):
        return True
    for wrapper in ("__func__", "fget", "_torchdynamo_orig_callable"):     # the last: if compiled
        value = getattr(value, wrapper, value)
    for _ in node.decorator_list:
        value = getattr(value, "__wrapped__", value)
    return getattr(value, "__code__", None) == codes(path)[name]


@cache
def codes(path):
    """{qualified name: compiled code} of the functions in a file, as it was read."""
    todo, found = [compile(TEXT[path], path, "exec", dont_inherit=True)], {}
    while todo:
        code = todo.pop()
        found[code.co_qualname] = code
        todo += [x for x in code.co_consts if inspect.iscode(x)]
    return found


# ------------------------------------------------------------------------------------ what a run is

def source_of(model, data):
    """{path: text} of what a run is made of: model, training data, train.py."""
    used = {path for path, _ in reached(TEXT, roots_of(model))}
    used |= {path_of(sys.modules[c.__module__]) for c in type(data).__mro__ if c is not object}
    return {path: TEXT[path] for path in sorted({"multiscreen.py", "train.py"} | used & {*TEXT})}


def changed_lines(old, new, most):
    """The lines that only one of two lists has, "-" before old and "+" before new ones."""
    lines = [line for line in difflib.unified_diff(old, new, n=0, lineterm="")
             if not line.startswith(("---", "+++", "@@"))]
    more = [f"and {len(lines) - most} more lines"] if len(lines) > most else []
    return lines[:most] + more
