"""Tests of support/source.py: what a run keeps, what is an edit, what a model is known by."""
import functools
import shutil

import pytest

import multiscreen
import train
from support import source
from support.checkpoint import build_model, weights_hash
from support.cli import UsageError
from support.evaluation import equations, model_hash
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

    shutil.copytree(ROOT / "baselines", tmp_path / "baselines")
    for name in (FILE, "train.py", "support/data.py", "support/tokens.py"):
        write(name, (ROOT / name).read_text())
    monkeypatch.setattr(source, "ROOT", tmp_path)
    monkeypatch.setattr(source, "read", lambda path: (tmp_path / path).read_text())
    monkeypatch.setattr(source, "path_of", lambda module: (
        module.__name__.replace(".", "/") + ".py" if module else None))
    monkeypatch.setattr(source, "replaced", lambda model, files: None)
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
        "  c.py: only the first has this file, of 2 lines"]
    assert source.differences({}, longer, most=1) == [
        "  c.py: only the second has this file, of 2 lines"]


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
    files("baselines/attention.py", (ROOT / "baselines/attention.py").read_text() + "X = 1\n")
    after = hashes()
    assert [name for name in NAMES if before[name] != after[name]] == [NAMES[-1]]


@pytest.mark.parametrize("line", [
    "from baselines.mine import f", "from .mine import f as g", "from . import mine",
    "import baselines.mine as m", "from baselines.mine import *", "import ideas.mine",
    "from ideas import mine", "def g():\n    from ideas.mine import f",
    "try:\n    import mine\nexcept ImportError:\n    mine = None"])
def test_a_file_of_yours_counts_however_it_is_imported(files, line):
    files("baselines/ablations.py", (ROOT / "baselines/ablations.py").read_text() + f"\n{line}\n")
    found = []
    for text in ("C = 1\n", "C = 2\n", "C = 2  # two\n"):
        for path in ("baselines/mine.py", "ideas/mine.py", "mine.py"):
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
    assert {"baselines/attention.py", "baselines/transformer.py"} < (
        source.source_of(small_model(NAMES[-1]), []).keys())


def test_what_is_edited_after_the_import_is_not_of_the_run(tmp_path):
    for path in ROOT.glob("*.py"):
        shutil.copy(path, tmp_path)
    for name in ("baselines", "support", "tasks"):
        shutil.copytree(ROOT / name, tmp_path / name)
    code = ("import train, pathlib\n"
            "from support import source\n"
            "path = pathlib.Path('multiscreen.py')\n"
            "path.write_text(path.read_text() + 'X = 1\\n')\n"
            "model = train.build_model('multiscreen', {'psi': 2})\n"
            "print(source.code_hash(model))\n"
            "print(source.source_of(model, [])['multiscreen.py'])")
    said = run("-c", code, cwd=tmp_path)
    assert said.stdout == f"{equations('multiscreen')}\n{source.read(FILE)}\n", said.stderr


# -------------------------------------------------------------------------- replaced at run time

REPLACED = [
    ("multiscreen.trim", "lambda s, r: s.relu()"), ("multiscreen.tanh_norm", "multiscreen.unit"),
    ("multiscreen.softmask", "functools.wraps(multiscreen.softmask)(lambda d, w: (d <= 0) * 1.0)"),
    ("multiscreen.GatedScreeningTiles.encode", "lambda self, x, i, w: x"),
    ("multiscreen.KeyCache", "Mine"), ("multiscreen.Multiscreen.embed", "lambda self, tokens: 1")]
CELL = """
import functools, multiscreen, baselines
from support.checkpoint import build_model
from support.source import code_hash
class Mine(multiscreen.GatedScreeningTiles): pass
exec(case)
print(code_hash(build_model("multiscreen:mine" if "TILES" in case else "multiscreen", {"psi": 2})))
"""


def test_what_a_notebook_replaces_is_named_and_nothing_is_reused():
    """A function, a method, a class; a layer of its own, which is in no file."""
    cases = [f"{name} = {new}" for name, new in REPLACED]
    done = run_cases(CELL, [*cases, "baselines.ablations.TILES['mine'] = Mine", "pass"])
    *none, right = done.stdout.split()
    assert none == ["None"] * (len(cases) + 1) and right == equations("multiscreen")
    names = [name.removeprefix("multiscreen.") if name.count(".") > 1 else name
             for name, _ in REPLACED]
    assert done.stderr.splitlines() == [
        *(f"{name} was replaced at run time: nothing is resumed or reused" for name in names),
        "Mine was defined at run time: nothing is resumed or reused"]


def test_usual_code_is_as_in_its_file():
    """Properties, decorated methods, a dataclass, compiled layers."""
    model = small_model("multiscreen")
    train.try_to_compile.__globals__["compile_model"](model)
    assert source.code_hash(model) == equations("multiscreen")
    for name in ("multiscreen:softmax-rope", "transformer:2,2,16:forgetting"):
        assert source.code_hash(small_model(name))


def test_a_run_with_replaced_code_says_so_and_is_not_gone_on_with(tmp_path, monkeypatch):
    monkeypatch.setattr(multiscreen, "trim", functools.partial(multiscreen.trim))
    ckpt = fit(tmp_path / "out", "--steps", "2")
    assert model_hash(ckpt) != model_hash(ckpt)
    assert "from step 0: code replaced at run time\n" in (tmp_path / "out/flags.txt").read_text()
    monkeypatch.undo()
    with pytest.raises(UsageError, match="holds another run"):
        fit(tmp_path / "out", "--steps", "2")


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
