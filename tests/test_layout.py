"""Imports form a tree: no circle, and no import in a function that hides one. What is installed."""
import graphlib
import os
import shlex
import subprocess
import sys

import pytest

from support.run import imports_of
from tests.helpers import ROOT

FOLDERS = ("support", "lab", "course")
FIRST = {"multiscreen", "screening_triton", "train", "abcdigits", "support"}


def our_modules():
    """{module: path} of all files but the tests."""
    paths = [*ROOT.glob("*.py"), *(p for name in FOLDERS for p in (ROOT / name).rglob("*.py"))]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
            for path in paths if not path.name.startswith("test_")}


def test_no_module_imports_itself_in_a_circle():
    files = our_modules()
    graph = {}
    for name, path in files.items():
        found = set(imports_of(path, "")) & files.keys()
        # `from support import cli` needs support.cli; of the package itself only its folder.
        graph[name] = {x for x in found if not any(y.startswith(x + ".") for y in found)}
    assert "support.cli" in graph["train"]
    assert list(graphlib.TopologicalSorter(graph).static_order())


def test_what_is_read_and_run_first_needs_neither_the_lab_nor_the_course():
    """Models are imported by their names only, when these are asked for.

    A file of yours beside train.py, such as a variant of lab/baselines/, may import everything.
    """
    files = {name: path for name, path in our_modules().items() if name.partition(".")[0] in FIRST}
    for name, path in files.items():
        rooms = {module.partition(".")[0] for module in imports_of(path, "")}
        assert not rooms & {"lab", "course"}, name
    assert FIRST | {"support.models", "support.measure"} <= files.keys()


def test_a_file_of_the_lab_that_is_run_by_its_path_says_how_to_run_it():
    files = our_modules()
    commands = [name for name, path in files.items()
                if name.startswith("lab.") and "cli(main)" in path.read_text()]
    for name in commands:
        ours = [x for x in imports_of(files[name], "") if x in files]
        assert ours[0] == "support.cli", name
    assert "lab.sample" in commands
    done = subprocess.run([sys.executable, files["lab.collect"]], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == ("error: run python -m lab.collect in the repository's folder, or "
                           f"outside of it with PYTHONPATH={shlex.quote(str(ROOT))}\n")


def test_an_installation_leaves_your_modules_alone(tmp_path):
    """Your own train.py is found in another folder, and of ours only the model and the kernel."""
    code = ("import sys\nfrom importlib.util import find_spec\n"
            "print(*[name for name in sys.argv[1:] if find_spec(name)])")
    env = {name: x for name, x in os.environ.items() if name != "PYTHONPATH"}
    names = ["multiscreen", "screening_triton", "train", "abcdigits", *FOLDERS, "tests"]
    (tmp_path / "train.py").write_text("")
    done = subprocess.run([sys.executable, "-c", code, *names], cwd=tmp_path, env=env,
                          capture_output=True, text=True)
    if not done.stdout.startswith("multiscreen"):
        pytest.skip("multiscreen is not installed here")
    assert done.stdout == "multiscreen screening_triton train\n"
