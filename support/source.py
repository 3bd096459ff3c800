"""What a run ran: its source as it was when imported, and the identity of its equations.

A model is known by `identity(model)`, a hash of the definitions that it reaches by base classes and
names, in multiscreen.py, baselines/ and your own files beside them. Comments, docstrings, error
messages and other variants do not count. A number, a string, or a list or dict of these that a file
computes when it is imported, from an environment variable say, counts by its value, a function that
it picks counts by its name; what a function reads from elsewhere does not count. What was replaced
at run time has no text here; then the identity is unique, so that nothing is resumed or reused.
"""
import ast
import copy
import difflib
import hashlib
import inspect
import sys
import uuid
from enum import Enum
from functools import cache
from numbers import Number
from pathlib import Path
from types import BuiltinFunctionType, FunctionType

import baselines
import multiscreen

ROOT = Path(multiscreen.__file__).parent
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
IMPORTS = (ast.Import, ast.ImportFrom)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
# What an expression without names is made of.
PURE = (ast.Constant, ast.Tuple, ast.List, ast.Dict, ast.BinOp, ast.UnaryOp, ast.operator,
        ast.unaryop, ast.expr_context)


def path_of(module):
    """The file of a module as seen from ROOT, "support/data.py"; None for one elsewhere."""
    file = Path(getattr(module, "__file__", None) or "")
    return file.relative_to(ROOT).as_posix() if file.is_relative_to(ROOT) else None


def read(path):
    """The text of a file of ROOT."""
    return (ROOT / path).read_bytes().decode("utf-8-sig", errors="replace")


# Read once: a later edit is not of this run.
FILES = [*sorted(ROOT.glob("*.py")), *sorted(Path(baselines.__file__).parent.rglob("*.py")),
         ROOT / "support/data.py", ROOT / "support/tokens.py",
         *sorted((ROOT / "tasks").glob("*.py"))]
TEXT = {path.relative_to(ROOT).as_posix(): read(path) for path in FILES}


# ------------------------------------------------------------------- what a text defines and uses

@cache
def definitions(text):
    """{name: the statements that define or change it} at the top level; methods are "Class.method".

    "" has the statements that change no name of the text, such as a call of another module.
    """
    found, others = {}, []
    for node in ast.parse(text).body:
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            found.setdefault(node.name, []).append(node)
            for member in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(member, FUNCTIONS):
                    found.setdefault(f"{node.name}.{member.name}", []).append(member)
        elif isinstance(node, ast.Assign) and all(isinstance(x, ast.Name) for x in node.targets):
            for target in node.targets:
                found.setdefault(target.id, []).append(node)
        elif not isinstance(node, IMPORTS) and not is_docstring(node):
            others.append(node)
    for node in others:
        inside = [x for part in changed_in(node) for x in ast.walk(part)]
        made = {x.name for x in inside if isinstance(x, (*FUNCTIONS, ast.ClassDef))}
        made |= {x.id for x in inside if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)}
        used = {x.id for x in inside if isinstance(x, ast.Name)} & found.keys()
        for name in made | used or {""}:
            found.setdefault(name, []).append(node)
    return found


def changed_in(node):
    """Where a statement names what it may change: of `P["x"] = y` only P."""
    if isinstance(node, (ast.Assign, ast.Delete)):
        return node.targets
    return [node.target] if isinstance(node, (ast.AugAssign, ast.AnnAssign)) else [node]


def is_docstring(node):
    """Whether a statement is a docstring, or another constant that nothing uses."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


@cache
def imports(text, path):
    """[(name, the dotted path, a tuple, that it stands for)]; "*" is all names of a module.

    None stands for the file of `import a.b`, whose name is a.
    """
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            for x in node.names:
                parts = tuple(x.name.split("."))
                found.append((x.asname or parts[0], parts if x.asname else parts[:1]))
                found.append((None, parts))
        elif isinstance(node, ast.ImportFrom):
            folder = Path(path).parts[: -node.level] if node.level else ()
            module = (*folder, *(node.module or "").split(".")) if node.module else folder
            for x in node.names:
                found.append((x.asname or x.name, module if x.name == "*" else (*module, x.name)))
    return found


def imported_by(paths, but=()):
    """{path: text} of the files of ROOT, in any folder, that some import, with themselves.

    but: a tuple of what paths that are imported, and do not count, begin with.
    """
    todo, found = [*paths], {}
    while todo:
        path = todo.pop()
        known = path.startswith(but) and path not in paths
        if path in found or known or not (path in TEXT or (ROOT / path).is_file()):
            continue
        found[path] = TEXT[path] if path in TEXT else read(path)
        for _, parts in imports(found[path], path):
            names = ["/".join(parts[: n + 1]) for n in range(len(parts))]
            todo += [f"{name}{end}" for name in names for end in (".py", "/__init__.py")]
    return found


# A model, and an optimizer, may be in a folder of your own.
KNOWN = ("multiscreen.py", "baselines/", "support/", "tasks/")
TEXT |= imported_by([x for x in TEXT if x.startswith(("train.py", "support/", "tasks/"))], KNOWN)
TEXT |= imported_by(x for x in TEXT if x == "multiscreen.py" or x.startswith("baselines/"))
MODULES = {path: module for module in [*sys.modules.values()]
           if (path := path_of(module)) in TEXT}


def imported_as(source, path, parts):
    """[(path, parts)] of what the dotted name `parts` may mean in the files that a file imports.

    A module that is used as a value, in `f = mine`, means all that it defines.
    """
    found = []
    for name, module in imports(source[path], path):
        if name not in ("*", parts[0]):
            continue
        full = (*module, *(parts if name == "*" else parts[1:]))
        files = [(f"{'/'.join(full[:n])}{end}", full[n:]) for n in range(len(full), 0, -1)
                 for end in (".py", "/__init__.py")]
        there, rest = next((file for file in files if file[0] in source), (None, ()))
        if rest:
            found.append((there, rest))
        elif there:
            found += [(there, (x,)) for x in definitions(source[there]) if "." not in x]
    return found


def of_scope(node):
    """Yield what is in a function, without what is in scopes inside it."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, (*FUNCTIONS, *COMPREHENSIONS, ast.ClassDef, ast.Lambda)):
            yield from of_scope(child)


def names_in(node):
    """Yield the global names that a node uses, each as a tuple: (name,), or (name, member, ..)."""
    if isinstance(node, ast.Attribute):
        parts, base = (), node
        while isinstance(base, ast.Attribute):
            parts, base = (base.attr, *parts), base.value
        if isinstance(base, ast.Name):
            yield (base.id, *parts)
        else:
            yield from names_in(base)
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        yield (node.id,)
    elif isinstance(node, (*FUNCTIONS, ast.Lambda)):
        own = {x.arg for x in ast.walk(node.args) if isinstance(x, ast.arg)}
        for x in of_scope(node):
            if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store):
                own.add(x.id)
            elif isinstance(x, (*FUNCTIONS, ast.ClassDef)):
                own.add(x.name)
        own -= {name for x in of_scope(node) if isinstance(x, ast.Global) for name in x.names}
        outside = [*node.args.defaults, *filter(None, node.args.kw_defaults),
                   *getattr(node, "decorator_list", [])]
        body = node.body if isinstance(node.body, list) else [node.body]
        yield from (x for child in body for x in names_in(child) if x[0] not in own)
        yield from (x for child in outside for x in names_in(child))
    else:
        for child in ast.iter_child_nodes(node):
            yield from names_in(child)


@cache
def used_in(text, name):
    """The global names that a definition uses, as of `names_in`, in order."""
    return sorted({x for node in definitions(text)[name] for x in names_in(node)})


def reached(source, classes):
    """[(path, name)] of the definitions that classes, as of `classes_of`, reach with themselves."""
    todo, seen, found = [], set(), set()
    for path, name in (x.split(":") for x in classes):
        todo.append((path, tuple(name.split("."))))
    while todo:
        path, parts = todo.pop()
        if (path, parts) in seen or path not in source:
            continue
        seen.add((path, parts))
        # A name may be defined here, imported, or both: `try: .. except ImportError: ..`.
        todo += imported_as(source, path, parts)
        # Of `Mine.make` the whole class counts: a method may call the others.
        name = parts[0]
        if name in definitions(source[path]):
            found.add((path, name))
            todo += [(path, x) for x in [("",), *used_in(source[path], name)]]
    return sorted(found)


class Bare(ast.NodeTransformer):
    """Without docstrings and error messages."""

    def visit_Raise(self, node):
        return ast.Raise(getattr(node.exc, "func", node.exc), None)

    def generic_visit(self, node):
        super().generic_visit(node)
        if isinstance(getattr(node, "body", None), list):
            node.body = [x for x in node.body if not is_docstring(x)] or [ast.Pass()]
        return node


def lines_of(node):
    """The bare lines of a statement or a module, as Python writes them."""
    node = ast.fix_missing_locations(Bare().visit(copy.deepcopy(node)))
    return [line for line in ast.unparse(node).splitlines() if line]


@cache
def bare_lines(text, name=None):
    """The bare lines of a definition in a text, or of the whole text."""
    nodes = [ast.parse(text)] if name is None else definitions(text)[name]
    return [line for node in nodes for line in lines_of(node)]


def parts_of(source, classes):
    """{path: the bare lines of its definitions that classes reach, and what imports stand for}"""
    parts, foreign = {}, {}
    for path, name in reached(source, classes):
        parts.setdefault(path, []).extend(bare_lines(source[path], name))
        used = {x[0] for x in used_in(source[path], name)}
        foreign.setdefault(path, set()).update(f"{x} is {'.'.join(full)}" for x, full in
                                               imports(source[path], path) if x in used)
    return {path: [*sorted(foreign.get(path, ())), *lines] for path, lines in parts.items()}


def equations_of(source, classes):
    """The lines of all parts."""
    return [line for part in parts_of(source, classes).values() for line in part]


# ------------------------------------------------------------------------------- what a model is

def classes_of(model):
    """["path:name"] of the classes of a fresh model, its modules and config, and of its screen."""
    classes = {type(model), type(model.config), *map(type, model.layers)}
    classes |= {c for c in map(type, model.modules())
                if path_of(sys.modules.get(c.__module__)) in TEXT}
    if inspect.isfunction(getattr(model, "screen", None)):
        classes.add(model.screen)
    return sorted(f"{path_of(sys.modules[c.__module__]) or c.__module__}:{c.__qualname__}"
                  for c in classes)


def digest(source, classes, more=()):
    """Twelve digits that change with the equations of a source, and with more lines."""
    lines = [*equations_of(source, classes), *more]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


def identity(model):
    """Twelve digits that change with the equations of a fresh model, and with nothing else.

    After one line they are unique if something of it was replaced at run time.
    """
    classes = classes_of(model)
    if name := replaced(classes):
        say_replaced(name)
        return uuid.uuid4().hex[:12]
    return digest(TEXT, classes, computed(classes))


def computed(classes):
    """Lines of what a call, a lookup or a comparison of reached files has computed."""
    found = []
    for path, name in reached(TEXT, classes):
        for node in definitions(TEXT[path])[name]:
            is_class = isinstance(node, ast.ClassDef)
            place = getattr(MODULES.get(path), name, None) if is_class else MODULES.get(path)
            for statement in node.body if is_class else [node]:
                inside = [*ast.walk(statement)]
                if isinstance(statement, (*FUNCTIONS, ast.ClassDef)) or place is None or not any(
                        isinstance(x, (ast.Call, ast.Subscript, ast.Compare)) for x in inside):
                    continue
                values = {x.id: shown(vars(place).get(x.id)) for x in inside
                          if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)}
                found += [f"{path} {name} {x} {value}" for x, value in values.items() if value]
    return found


def shown(value):
    """A number or a string as text, a function's or a class's name, a list of them; else ""."""
    if isinstance(value, dict):
        value = [*value.items()]
    if isinstance(value, (list, tuple)):
        return str([shown(x) for x in value])
    if isinstance(value, (type, FunctionType, BuiltinFunctionType)):
        return value.__qualname__
    return repr(value) if isinstance(value, (Number, str)) else ""


@cache
def say_replaced(name):
    """One line, once."""
    print(f"{name} was replaced at run time, or is in no file of this model: only --resume "
          "continues its runs, and none of its rows are reused", file=sys.stderr)


def uncompiled(value):
    """The function that torch.compile, or torch.compiler.disable, was given."""
    while hasattr(value, "_torchdynamo_orig_callable"):
        value = value._torchdynamo_orig_callable
    return value


def state(value, deep=True):
    """What stays the same while nobody replaces it: a class with its members, a function's code."""
    value = uncompiled(value)
    inside = {}
    if deep and isinstance(value, type) and path_of(sys.modules.get(value.__module__)) in TEXT:
        inside = {name: state(x, deep=False) for name, x in vars(value).items()
                  if callable(x) or not name.startswith("__")}
    return (value, inside, *(getattr(value, f"__{name}__", None)
                             for name in ("code", "defaults", "kwdefaults")))


def changed(name, before, now):
    """The name, or that of its first member, that is not the same object in two states, or None."""
    (a, inside, *rest), (b, members, *others) = before, now
    if not all(x is y for x, y in zip((a, *rest), (b, *others))):
        return name
    both = inside.keys() & members.keys()
    return next((f"{name}.{member}" for member in sorted(inside.keys() | members.keys())
                 if member not in both or changed(member, inside[member], members[member])), None)


STATES = {path: {name: state(x) for name, x in vars(module).items() if not name.startswith("__")}
          for path, module in MODULES.items()}


def replaced(classes):
    """The first name that a model reaches and that is not as in its file, or None."""
    for path, name in (x.split(":") for x in classes):
        if name not in definitions(TEXT.get(path, "")):
            return name
    for path, name in reached(TEXT, classes):
        if path not in STATES:
            continue
        module, states = MODULES[path], STATES[path]
        for used in {name, *(x[0] for x in used_in(TEXT[path], name))}:
            now = state(getattr(module, used, None))
            if used in states and (which := changed(used, states[used], now)):
                return f"{module.__name__}.{which}"
        # What was replaced before this module was imported is not what the file says.
        written = definitions(TEXT[path])
        for each in [x for x in written if x.startswith(f"{name}.")] or [name]:
            owner, _, last = each.rpartition(".")
            value = vars(getattr(module, owner) if owner else module).get(last)
            if each and not is_of(path, each, value, written[each]):
                return f"{module.__name__}.{each}"
        for node in written[name] if len(written[name]) == 1 else ():
            place = getattr(module, name) if isinstance(node, ast.ClassDef) else module
            for target, constant in constants_of(node):
                found = vars(place).get(target)
                # An enum, a named tuple and slots keep a constant in a form of their own.
                if found != constant and not (inspect.isdatadescriptor(found)
                                              or isinstance(found, Enum)):
                    return f"{place.__name__}.{target}"
    return None


def is_of(path, name, value, nodes):
    """Whether a value may be what the statements `nodes` of the file at `path` give its name."""
    value = uncompiled(value)
    plain = all(isinstance(node, FUNCTIONS) and not node.decorator_list for node in nodes)
    if not plain:
        value = inspect.unwrap(value)
    if not inspect.isfunction(value):
        return not plain
    if not plain:
        return value.__code__ in codes(path)
    code, args = value.__code__, nodes[-1].args
    defaults = [*zip(reversed(args.defaults), reversed(value.__defaults__ or ())),
                *((node, (value.__kwdefaults__ or {}).get(arg.arg))
                  for arg, node in zip(args.kwonlyargs, args.kw_defaults) if node)]
    return (code in codes(path) and code.co_qualname == name
            and all(found == right for node, found in defaults for right in constant(node)))


def constants_of(node):
    """Yield (name, value) of the constants to which a class, or an assignment, sets names once."""
    set_here = [x.id for x in ast.walk(node) if isinstance(x, ast.Name)
                and isinstance(x.ctx, ast.Store)]
    for x in node.body if isinstance(node, ast.ClassDef) else [node]:
        if isinstance(x, (ast.Assign, ast.AnnAssign)) and x.value:
            targets = x.targets if isinstance(x, ast.Assign) else [x.target]
            yield from ((target.id, value) for value in constant(x.value) for target in targets
                        if isinstance(target, ast.Name) and set_here.count(target.id) == 1)


def constant(node):
    """[the value] of an expression of numbers and strings alone, else []."""
    if not all(isinstance(x, PURE) for x in ast.walk(node)):
        return []
    return [eval(compile(ast.Expression(node), "", "eval"))]


@cache
def codes(path):
    """The compiled functions of a file, as it was read."""
    todo, found = [compile(TEXT[path], path, "exec", dont_inherit=True)], set()
    while todo:
        code = todo.pop()
        found.add(code)
        todo += [x for x in code.co_consts if inspect.iscode(x)]
    return found


# ------------------------------------------------------------------------------------ what a run is

def source_of(classes, data):
    """{path: text} of what a run is made of: its model's files, those of its data and tokens,
    train.py, and your own that these import."""
    used = {"multiscreen.py", *(path for path, _ in reached(TEXT, classes))}
    of_data = {path_of(sys.modules[c.__module__]) for c in type(data).__mro__} & TEXT.keys()
    used |= imported_by(["train.py", "support/tokens.py", *of_data], KNOWN).keys()
    return {path: TEXT[path] for path in sorted(used & TEXT.keys())}


def shown_change(old, new):
    """At most three changed lines in one: `-    return 1` `+    return 2`; "" if there is none."""
    *lines, last = [*changed_lines(old, new, most=3), ""][:4]
    return " ".join([*(f"`{line}`" for line in lines), last]).strip()


def changed_lines(old, new, most):
    """The lines that only one of two lists has, "-" before old and "+" before new ones."""
    lines = [line for line in difflib.unified_diff(old, new, n=0, lineterm="")
             if not line.startswith(("---", "+++", "@@"))]
    more = [f"and {len(lines) - most} more lines"] if len(lines) > most else []
    return lines[:most] + more


def differences(old, new, most=20):
    """Lines that say in which lines two {path: text} differ, at most so many of each file."""
    lines = []
    for path in sorted({*old, *new}):
        before, now = (bare_lines(x[path]) if path in x else [] for x in (old, new))
        found = changed_lines(before, now, most)
        lines += [f"  {path}", *(f"    {line}" for line in found)] if found else []
    return lines


def code_hash(model):
    """Twelve digits that change with the code of a model. None if some was replaced at run time."""
    classes = classes_of(model)
    if name := replaced(classes):
        say_replaced(name)
        return None
    return digest(TEXT, classes, computed(classes))
