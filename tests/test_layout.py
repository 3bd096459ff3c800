"""Imports between rooms form a tree."""
import ast
import graphlib
import sys

import pytest

from tests.helpers import ROOT

# What each room may import besides the standard library and its own files.
ROOMS = {
    "multiscreen": {"torch"},
    "screening_triton": {"torch", "triton", "multiscreen"},
    "baselines": {"torch", "multiscreen"},
    "support": {"torch", "numpy", "tiktoken", "filelock", "datasets", "multiscreen",
                "screening_triton", "baselines"},
    "abcdigits": {"torch", "support"},
    "tasks": {"torch", "numpy", "support"},
    "train": {"torch", "numpy", "support", "tasks", "baselines", "multiscreen"},
    "exercises": {"torch", "triton", "numpy", "matplotlib", "pytest", "support", "multiscreen"},
    "experiments": {"torch", "numpy", "matplotlib", "support", "tasks", "baselines",
                    "multiscreen", "abcdigits"},
    "benchmarks": {"torch", "triton", "support", "baselines", "multiscreen", "screening_triton",
                   "experiments"},
    "playground": {"torch", "numpy", "support", "multiscreen", "abcdigits"},
}


def modules_of(room):
    """The Python files of a room, by module name."""
    if (ROOT / f"{room}.py").exists():
        return {room: ROOT / f"{room}.py"}
    names = {}
    for path in (ROOT / room).rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        names[".".join(parts).removesuffix(".__init__")] = path
    return names


def imports_of(path):
    """(module, name or None) of each import in a file, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            yield from ((node.module, alias.name) for alias in node.names)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_what_it_may(room):
    allowed = ROOMS[room] | {room} | set(sys.stdlib_module_names)
    for path in modules_of(room).values():
        found = {module.split(".")[0] for module, _ in imports_of(path)}
        assert found <= allowed, path


def imports_of_all():
    """({module: path}, {module: our modules that it imports})"""
    files, graph = {}, {}
    for room in ROOMS:
        files |= modules_of(room)
    for name, path in files.items():
        found = set()
        for module, part in imports_of(path):
            whole = f"{module}.{part}"
            found.add(whole if whole in files else module)
        graph[name] = found & files.keys()
    return files, graph


def test_no_module_imports_itself_in_a_circle():
    _, graph = imports_of_all()
    assert graph["train"]
    assert list(graphlib.TopologicalSorter(graph).static_order())


def test_no_script_imports_a_script():
    """Code shared by two scripts belongs in a module that is not a command."""
    files, graph = imports_of_all()
    rooms = ("experiments.", "benchmarks.")
    scripts = {name for name, path in files.items()
               if name.startswith(rooms) and 'if __name__ == "__main__"' in path.read_text()}
    assert scripts
    assert {name: graph[name] & scripts for name in scripts if graph[name] & scripts} == {}
