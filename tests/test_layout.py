"""Imports form a tree: no circle, and no import in a function that hides one."""
import ast
import graphlib

from tests.helpers import ROOT

FOLDERS = ("baselines", "support", "tasks", "experiments", "benchmarks", "playground", "exercises")


def our_modules():
    """{module: path} of all files but the tests."""
    paths = [*ROOT.glob("*.py"), *(p for name in FOLDERS for p in (ROOT / name).rglob("*.py"))]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
            for path in paths if not path.name.startswith("test_")}


def imports_of(path):
    """What a file imports, by module: `a.b` and `a` for `from a import b`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from names
            yield node.module


def test_no_module_imports_itself_in_a_circle():
    files = our_modules()
    graph = {}
    for name, path in files.items():
        found = set(imports_of(path)) & files.keys()
        # `from support import cli` needs support.cli; of the package itself only its folder.
        graph[name] = {x for x in found if not any(y.startswith(x + ".") for y in found)}
    assert "support.cli" in graph["train"]
    assert list(graphlib.TopologicalSorter(graph).static_order())
