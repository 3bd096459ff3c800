"""Which folder imports which: nothing imports upwards."""
import ast
import subprocess

import pytest

from tests.helpers import ROOT

SIX = [f"{name}.py" for name in ("multiscreen", "screening_triton", "train", "abcdigits",
                                 "test_multiscreen")]
# What each may import of the folders. train.py finds screening_cpu by its name.
MAY = {"the six": set(), "screening_cpu": set(), "lab": {"lab", "screening_cpu"},
       "study": {"study", "lab", "screening_cpu"}, "course": {"course", "lab", "screening_cpu"}}


def imports_of(path):
    """The first words of the modules that a file imports, in its functions, too."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module.partition(".")[0]
        elif isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)


@pytest.mark.parametrize("folder", MAY)
def test_nothing_imports_upwards(folder):
    """Of the files that git knows: one that you add may import what it likes."""
    files = SIX
    if folder != "the six":
        files = subprocess.run(["git", "ls-files", f"{folder}/*.py"], cwd=ROOT, text=True,
                               capture_output=True).stdout.split()
    if not files:
        pytest.skip("git lists the files")
    for name in files:
        found = {*imports_of(ROOT / name)} & {*MAY, "tests"}
        assert found <= MAY[folder], name
