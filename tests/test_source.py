"""Tests of support/source.py: what a run keeps, what is an edit, what a model is known by."""
import os
import shutil

import pytest

import train
from support import folder, source
from support.checkpoint import build_model, weights_hash
from support.compiled import compile_model
from support.evaluation import equations
from support.table import describe_run
from tests.helpers import ROOT, fit, run, run_cases

FILE = "multiscreen.py"
NAMES = ("multiscreen", "multiscreen:nope", "transformer:2,2,16", "transformer:2,2,16:entmax")
EDITS = [("return ", "return 2 * "), ("1e-6", "2e-6"), ("d_K: int = 16", "d_K: int = 12"),
         ("import math\n", "import math\nfrom mine import f\n"), ("\n\n\n", "\n\nX = 1\n\n")]


def small_model(name):
    return build_model(name, {"N_L": 4, "N_H": 4, "d_E": 64, "vocab_size": 7})


@pytest.fixture
def files(monkeypatch, tmp_path):
    """files(path, text) is a file that a test writes in place of one of ROOT, or beside it."""
    def write(path, text):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    def file_of(module):
        paths = [tmp_path / f"{module.replace('.', '/')}{end}" for end in (".py", "/__init__.py")]
        return next((path for path in paths if path.is_file()), None)

    shutil.copytree(ROOT / "lab/baselines", tmp_path / "lab/baselines")
    for name in (FILE, "train.py", "support/data.py", "support/tokens.py"):
        write(name, (ROOT / name).read_text())
    monkeypatch.setattr(source, "file_of", file_of)
    monkeypatch.setattr(source, "text_of", lambda module: file_of(module) and (
        file_of(module).read_text()))
    return write


def hashes():
    return {name: source.code_hash(small_model(name)) for name in NAMES}


# ---------------------------------------------------------------------------- what is an edit

def test_differences_name_the_file_the_function_and_the_lines():
    old = {"a.py": "def e():\n    pass\n\ndef f(x):\n    return x\n", "b.py": "B = 1\n"}
    new = {"a.py": 'def e():\n    pass\n\ndef f(x):\n    """Twice."""\n    return 2 * x  # more\n',
           "b.py": "B = 1\n"}
    assert source.differences(old, old) == []
    assert source.differences(old, new) == [
        "  a.py", "     def f(x):", "    -    return x", "    +    return 2 * x"]
    assert source.differences({"d.py": "f(1)\n"}, {"d.py": "f(2)\n"}) == [
        "  d.py", "    -f(1)", "    +f(2)"]
    longer = {"c.py": "C = 1\nD = 2\n"}
    assert source.differences({"c.py": "E = 3\n"}, longer, most=2) == [
        "  c.py", "    -E = 3", "    +C = 1", "    and 1 more lines"]
    # A file of one of them: a short one is shown, a longer one is named.
    assert source.differences({}, longer) == ["  c.py", "    +C = 1", "    +D = 2"]
    assert source.differences(longer, {}, most=1) == [
        "  c.py: only the first has this file (2 lines)"]
    assert source.differences({}, longer, most=1) == [
        "  c.py: only the second has this file (2 lines)"]


@pytest.mark.parametrize("old, new", EDITS)
def test_an_edit_of_an_equation_changes_the_hash(files, old, new):
    before, text = hashes(), (ROOT / FILE).read_text()
    assert old in text
    files(FILE, text.replace(old, new, 1))
    after = hashes()
    assert all(before[name] != after[name] for name in NAMES)      # all models import the file


@pytest.mark.parametrize("old, new", [
    ('"""Eq. (', '"""Well, Eq. ('), ("\n    return ", "  # so\n    return ")])
def test_words_are_no_edit(files, old, new):
    before, text = hashes(), (ROOT / FILE).read_text()
    assert old in text
    files(FILE, text.replace(old, new))
    assert hashes() == before


def test_an_edit_changes_the_models_that_import_the_file_and_no_others(files):
    before = hashes()
    path = "lab/baselines/attention.py"
    files(path, (ROOT / path).read_text() + "X = 1\n")
    after = hashes()
    assert [name for name in NAMES if before[name] != after[name]] == [NAMES[-1]]


@pytest.mark.parametrize("line", [
    "from lab.baselines.mine import f", "from .mine import f as g", "from . import mine",
    "import lab.baselines.mine as m", "from lab.baselines.mine import *", "import ideas.mine",
    "from ideas import mine", "def g():\n    from ideas.mine import f",
    "try:\n    import mine\nexcept ImportError:\n    mine = None"])
def test_a_file_of_yours_counts_however_it_is_imported(files, line):
    path = "lab/baselines/ablations.py"
    files(path, (ROOT / path).read_text() + f"\n{line}\n")
    found = []
    for text in ("C = 1\n", "C = 2\n", "C = 2  # two\n"):
        for path in ("lab/baselines/mine.py", "ideas/mine.py", "mine.py"):
            files(path, text)
        found.append(hashes())
    assert found[0][NAMES[1]] != found[1][NAMES[1]] == found[2][NAMES[1]]
    assert found[0][NAMES[0]] == found[1][NAMES[0]]


def test_a_run_keeps_its_files_and_yours_and_no_other_models(files):
    files("train.py", (ROOT / "train.py").read_text() + "\nfrom muon import Muon\n")
    files("muon.py", "import optim.beta\n")
    files("optim/beta.py", "BETA = 0.95\n")
    found = source.source_of(small_model("multiscreen"), [])
    assert [*found] == ["multiscreen.py", "muon.py", "optim/beta.py", "support/tokens.py",
                        "train.py"]
    assert {"lab/baselines/attention.py", "lab/baselines/transformer.py"} < (
        source.source_of(small_model(NAMES[-1]), []).keys())


def copy_of_the_house(folder):
    """A folder with what training needs."""
    for name in ("lab", "support"):
        shutil.copytree(ROOT / name, folder / name)
    for name in (FILE, "train.py"):
        shutil.copy(ROOT / name, folder)
    return folder


# Prints whether a source has the word NEW, then a hash.
SHOW = """
import importlib, pathlib, sys, train
from support import source
def show(name="multiscreen"):
    model = train.build_model(name, {"psi": 2, "vocab_size": 7})
    files = source.source_of(model, [])
    print(*files, "NEW" in str(files), source.code_hash(model))
def edit(path):
    path = pathlib.Path(path)
    path.write_text(path.read_text() + "NEW = 1\\n")
"""


def test_a_run_keeps_the_text_that_ran(tmp_path):
    """That of the import; of a reload; in a notebook with %autoreload, that of now."""
    said = run("-c", f"""{SHOW}
edit("train.py"); show()
importlib.reload(train); show()
edit("multiscreen.py"); show()
sys.modules["IPython.extensions.autoreload"] = train; show()""", cwd=copy_of_the_house(tmp_path))
    imported, reloaded, edited, followed = said.stdout.splitlines()
    files = "multiscreen.py support/tokens.py train.py"
    assert imported == f"{files} False {equations('multiscreen')}", said.stderr
    assert edited == reloaded == f"{files} True {equations('multiscreen')}"
    assert followed.startswith(f"{files} True ") and followed != edited


def test_an_installed_copy_is_known_by_its_files(tmp_path):
    """`pip install .` without -e puts ours among the libraries."""
    site = copy_of_the_house(tmp_path / "site-packages")
    found = []
    for _ in range(2):
        found.append(run("-c", f"{SHOW}\nshow(); show('transformer:1,2,8')", cwd=tmp_path,
                         env=os.environ | {"PYTHONPATH": str(site)}).stdout.splitlines())
        with open(site / FILE, "a") as file:
            file.write("OLD = 1\n")
    (before, other), (after, _) = found
    assert before == f"multiscreen.py support/tokens.py train.py False {equations('multiscreen')}"
    assert other.startswith(
        "lab/baselines/transformer.py multiscreen.py support/tokens.py train.py ")
    assert before.rpartition(" ")[0] == after.rpartition(" ")[0] and before != after


def test_a_class_in_a_file_elsewhere_has_an_identity_of_its_own(tmp_path):
    (tmp_path / "ideas").mkdir()
    (tmp_path / "ideas/__init__.py").write_text("")
    (tmp_path / "ideas/mine.py").write_text("from multiscreen import GatedScreeningTiles as G\n"
                                            "from .half import HALF\nclass Tiles(G):\n    pass\n")
    found = []
    for text in ("HALF = 0.5\n", "HALF = 0.5  # a half\n", "HALF = 1 / 2\n"):
        (tmp_path / "ideas/half.py").write_text(text)
        said = run("-c", f"{SHOW}\nshow('multiscreen:ideas.mine.Tiles')", cwd=tmp_path,
                   env=os.environ | {"PYTHONPATH": str(ROOT)})
        assert said.stdout.startswith("ideas/half.py ideas/mine.py multiscreen.py "), said.stderr
        found.append(said.stdout)
    assert found[0] == found[1] != found[2]
    assert equations("multiscreen") not in str(found)


# --------------------------------------------------------------------- what cannot be known

def test_what_a_notebook_puts_in_place_is_told_and_never_equal():
    """A function, a method, and a layer of its own, which is in no file."""
    code = """if True:
        import multiscreen
        from lab.baselines import ablations
        from support.models import build_model
        from support.source import code_hash
        class Mine(multiscreen.GatedScreeningTiles): pass
        exec(case)
        model = build_model("multiscreen:mine" if "mine" in case else "multiscreen", {"psi": 2})
        print(code_hash(model), code_hash(model))"""
    done = run_cases(code, ["multiscreen.trim = lambda s, r: s",
                            "multiscreen.GatedScreeningTiles.encode = lambda self, x, i, w: x",
                            "ablations.VARIANTS['mine'] = Mine", "pass"])
    *unknown, a, b = done.stdout.split()
    assert a == b == equations("multiscreen")
    assert len({*unknown, a}) == 7
    said = ("multiscreen.trim is not the one in its file",
            "GatedScreeningTiles.encode is not the one in its file", "__main__ has no file")
    assert done.stderr.splitlines()[::2] == [
        f"{what}: nothing measured with it is reused" for what in said]


def test_usual_code_is_known():
    """Properties, decorated methods, a dataclass, compiled layers."""
    model = small_model("multiscreen")
    compile_model(model)
    assert source.code_hash(model) == equations("multiscreen")
    for name in ("multiscreen:softmax-rope", "transformer:2,2,16:forgetting"):
        assert equations(name) == equations(name)


def test_a_run_of_unknown_code_says_so_when_it_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "code_hash", lambda model: "of a notebook")
    fit(tmp_path / "out", "--steps", "2")
    monkeypatch.undo()
    longer = fit(tmp_path / "out", "--resume", "--steps", "3")
    assert "  code that is in no file\n" in (tmp_path / "out/note.txt").read_text()
    assert longer["changes"][0].startswith("from step 2: code that is in no file")


# ------------------------------------------------------------------------------ in measurements

def test_rows_say_from_which_weights_and_with_which_flags_a_run_went_on(tmp_path):
    first = fit(tmp_path / "a", "--steps", "2")
    began = fit(tmp_path / "b", "--init", str(tmp_path / "a/ckpt.pt"), "--steps", "2")
    assert began["init_weights"] == weights_hash(first)
    train.main(["--resume", "--out", str(tmp_path / "a"), "--steps", "3"])
    longer = train.load_checkpoint(tmp_path / "a/ckpt.pt")[2]
    assert longer["changes"] == []                     # more steps are not a change
    train.main(["--resume", "--out", str(tmp_path / "a"), "--steps", "4", "--lr", "0.5"])
    train.main(["--resume", "--out", str(tmp_path / "a"), "--steps", "5", "--clip", "1"])
    twice = train.load_checkpoint(tmp_path / "a/ckpt.pt")[2]
    assert twice["changes"] == ["from step 3: --lr 0.0625 | 0.5", "from step 4: --clip 0.0 | 1.0"]
    rows = [describe_run(x) | {"step": 2} for x in (first, began, twice)]
    assert len({tuple(row.values()) for row in rows}) == 3
