"""Tests of a run's identity: the text of its equations, and how it was trained."""
import ast
import functools
import hashlib
import random
import shutil
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import abcdigits
import multiscreen
import train
from baselines import ablations, transformer
from multiscreen import Multiscreen
from support import source
from support.checkpoint import (
    build_model,
    equations,
    model_hash,
    scale_rope,
    small_model,
    weights_hash,
)
from support.cli import UsageError
from support.table import describe_run
from tests.helpers import ROOT, fit, read_table, run, run_cases

FILE = "multiscreen.py"
CLASSES = [f"{FILE}:{name}" for name in ("Config", "GatedScreeningTiles", "Multiscreen")]
# A hash of a model's outputs on random inputs would miss the first eight.
EDITS = [
    ("return torch.sigmoid(s_r).clamp_min(1e-3)", "return torch.sigmoid(s_r).clamp_min(0.25)"),
    ("return torch.sigmoid(s_r).clamp_min(1e-3)", "return torch.sigmoid(s_r).clamp(1e-3, 0.7)"),
    ("def unit(x, eps=1e-6):", "def unit(x, eps=0.3):"),
    ("def unit(x, eps=1e-6):", "def unit(x, eps=0.1):"),
    ("s_w.clamp(max=80.0)", "s_w.clamp(max=7.0)"),
    ("torch.remainder(i.to(w_near.device)", "torch.remainder(i.to(w_near.device) % 512"),
    ("(-w < d) & (d <= 0)", "(-w < d) & (d <= 0) & (d > -400)"),
    ("def tanh_norm(x, eps=1e-6):", "def tanh_norm(x, eps=1e-2):"),
    ("(1 - (1 - s) / r).relu().square()", "(1 - (1 - s) / r).relu()"),
    ("return x * (torch.tanh(norm) / norm)", "return x * (torch.tanh(2 * norm) / norm)"),
    ("return torch.tanh(F.silu(", "return torch.sigmoid(F.silu("),
    ("return self.s_E.exp() * unit(", "return (1 + self.s_E) * unit("),
    ("return self.s_F.exp() * unit(self.W_E)", "return self.s_F.exp() * self.W_E"),
    ("window(layer.s_w) > T_train", "window(layer.s_w) > 2 * T_train"),
    ("return nats.view(targets.shape)", "return nats.view(targets.shape).sqrt()"),
    ("math.log(c.w_th), H)", "math.log(c.w_th), H + 1)[1:]"),
    ("    d_K: int = 16", "    d_K: int = 12")]


@torch.no_grad()
def probe(model, screen):
    """A hash of a model's logits and loss over 300 positions, before and after expansion.

    The model is small and in float64. Its parameters are far from their initial values, and its
    queries resemble its keys, so that many pairs pass Trim.
    """
    model, rng, found = model.double(), random.Random(0), hashlib.sha256()
    for W in model.parameters():
        numbers = [rng.random() - 0.5 for _ in range(W.numel())]
        drawn = torch.tensor(numbers, dtype=torch.float64).view_as(W)
        W.copy_(drawn if W.dim() > 1 else W + drawn)
    if screen:
        model.screen = getattr(model, "own_screen", screen)
        for tile in model.layers:
            tile.W_K.copy_(tile.W_Q)
    tokens = torch.arange(300)[None] ** 2 % 7

    def note(z):
        found.update((z / z.abs().max() * 1e6).round().long().numpy().tobytes())

    note(model(tokens))
    note(model.loss(tokens[:, :-1], tokens[:, 1:], "none"))
    if screen:
        model.expand_windows(100)
        note(model(tokens))
    if any(getattr(layer, "rope_scale", None) for layer in model.layers):
        scale_rope(model, "2")
        note(model(tokens))
    return found.hexdigest()


def edited(old, new, path=FILE):
    """The source after one edit."""
    assert source.TEXT[path].count(old) == 1
    return source.TEXT | {path: source.TEXT[path].replace(old, new)}


# ---------------------------------------------------------------------------- what is an edit

@pytest.mark.parametrize("old, new", EDITS)
def test_each_edit_of_an_equation_changes_the_hash(old, new):
    text = edited(old, new)
    assert source.digest(text, CLASSES) != source.digest(source.TEXT, CLASSES)


@settings(max_examples=15, deadline=None)
@given(n=st.integers(0, 10**6), factor=st.sampled_from([0.5, 2, 3, 20]))
def test_whenever_a_number_of_the_file_changes_the_hash_changes(n, factor):
    text = source.TEXT[FILE]
    numbers = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)
               and type(node.value) in (int, float)]
    node = numbers[n % len(numbers)]
    lines = text.splitlines(keepends=True)
    line = lines[node.lineno - 1].encode()
    value = type(node.value)(node.value * factor)
    line = line[: node.col_offset] + str(value).encode() + line[node.end_col_offset :]
    lines[node.lineno - 1] = line.decode()
    other = "".join(lines)
    changed = source.digest(source.TEXT | {FILE: other}, CLASSES) != (
        source.digest(source.TEXT, CLASSES))
    assert changed == (value != node.value)


@pytest.mark.parametrize("old, new, path", [
    ("Eq. (9), Trim: alpha", "Trim, the heart of it: alpha", FILE),
    ("# at w_th it is 0, as is its slope", "# flat at w_th", FILE),
    ("def softmask(d, w):", "def mine(s, r):\n    return s / r\n\n\ndef softmask(d, w):", FILE),
    ("class Softmax(Compete):", "class Mine(Compete):\n    pass\n\n\nclass Softmax(Compete):",
     "baselines/ablations.py"),
    ('"softmax": Softmax,', '"softmax": Softmax, "mine": Compete,', "baselines/ablations.py"),
    ("def build_ablation(", 'TILES["mine"] = Compete\n\n\ndef build_ablation(',
     "baselines/ablations.py"),
    ("def rope(", "def hidden(x):\n    return x\n\n\ndef rope(", "baselines/transformer.py"),
    ("def softmask(d, w):", "def record(x):\n    return x\n\n\ndef softmask(d, w):", FILE),
    ("expected 'mean' or 'none'", "either 'mean' or 'none'", FILE)])
def test_words_and_new_definitions_change_no_hash(old, new, path):
    text = edited(old, new, path)
    for name in ("multiscreen", "multiscreen:softmax", "transformer:8M"):
        classes = source.classes_of(small_model(name))
        assert source.digest(text, classes) == source.digest(source.TEXT, classes)


@pytest.mark.parametrize("old, new, path, names", [
    ("(1 - (1 - s) / r).relu().square()", "(1 - (1 - s) / r).relu()", FILE,
     ["multiscreen", "multiscreen:rope", "multiscreen:softmax-rope"]),
    ("theta = 10_000.0", "theta = 20_000.0", "baselines/transformer.py",
     ["multiscreen:rope", "multiscreen:softmax-rope", "transformer:8M", "transformer:8M:local",
      "transformer:8M:ssmax"]),
    ("z.clamp(-60.0, 60.0)", "z.clamp(-50.0, 60.0)", "baselines/ablations.py",
     ["multiscreen:softmax-rope"]),
    ("1 / math.log(256)", "1 / math.log(99)", "baselines/transformer.py", ["transformer:8M:ssmax"]),
    ("keepdim=True)\n            else:", "keepdim=True)\n            elif True:", FILE,
     ["multiscreen", "multiscreen:rope", "multiscreen:softmax-rope", "transformer:8M",
      "transformer:8M:local", "transformer:8M:ssmax"])])
def test_an_edit_changes_the_models_that_use_it_and_no_others(old, new, path, names):
    text = edited(old, new, path)
    changed = []
    for name in ("multiscreen", "multiscreen:rope", "multiscreen:softmax-rope", "transformer:8M",
                 "transformer:8M:local", "transformer:8M:ssmax"):
        classes = source.classes_of(small_model(name))
        if source.digest(text, classes) != source.digest(source.TEXT, classes):
            changed.append(name)
    assert changed == names


VARIANT = """
from torch.nn.functional import silu as act
{imports}
CONSTANTS = {{"p": 2}}
class Base:
    power = 2
class Mine(Base):
    def bound(self, h):
        {local}
        return {use}(h) * CONSTANTS["p"]
{more}
"""
MINE = """
def f(h):
    return h + 1
"""


@pytest.mark.parametrize("imports, local, use", [
    ("from baselines.mine import f", "pass", "f"),
    ("from baselines.mine import f as g", "pass", "g"), ("from .mine import f", "pass", "f"),
    ("from . import mine", "pass", "mine.f"), ("import baselines.mine", "pass", "baselines.mine.f"),
    ("import baselines.mine as m", "pass", "m.f"), ("from baselines.mine import *", "pass", "f"),
    ("from baselines import mine", "pass", "mine.f"), ("", "from baselines.mine import f", "f"),
    ("from mine import f", "pass", "f"), ("import mine", "pass", "(lambda h: mine.f(h))")])
def test_a_function_is_found_however_it_is_imported(imports, local, use):
    path = "mine.py" if "mine" in imports.split(".")[0] and "baselines" not in imports and (
        "from ." not in imports) else "baselines/mine.py"
    text = VARIANT.format(imports=imports, local=local, use=use, more="")
    before, after = ({"baselines/ablations.py": text, path: mine}
                     for mine in (MINE, MINE.replace("+ 1", "+ 2")))
    classes = ["baselines/ablations.py:Mine"]
    assert source.digest(before, classes) != source.digest(after, classes)
    quiet = before | {path: MINE + "def other(h):\n    return h\n"}
    assert source.digest(before, classes) == source.digest(quiet, classes)


@pytest.mark.parametrize("imports, local, use", [
    ("try:\n    from mine import f\nexcept ImportError:\n    f = abs", "pass", "f"),
    ("f = abs", "from mine import f", "f"), ("from deep import *", "pass", "f"),
    ("import mine", "m = mine", "m.f"), ("import mine", "pass", "getattr(mine, 'f')"),
    ("from mine import f", "x = [f for f in (1, 2)]", "f"),
    ("from mine import f", "global f; f = f", "f")])
def test_a_function_is_found_whatever_else_its_name_may_mean(imports, local, use):
    text = VARIANT.format(imports=imports, local=local, use=use, more="")
    found = [source.digest({"ablations.py": text, "deep.py": "from mine import f", "mine.py": mine},
                           ["ablations.py:Mine"])
             for mine in (MINE, MINE.replace("+ 1", "+ 2"))]
    assert found[0] != found[1]


@pytest.mark.parametrize("old, new", [
    ("silu as act", "gelu as act"), ('"p": 2', '"p": 3'), ("power = 2", "power = 3"),
    ("{more}", "CONSTANTS['p'] = 3"), ("{more}", "CONSTANTS.update(p=3)"),
    ("{more}", "Base.power = 3"), ("{more}", "if True:\n    def act(h):\n        return h"),
    ("{more}", "import torch\ntorch.set_default_dtype(torch.float64)"),
    ("{more}", "def act(h):\n    return h"),
    ("{more}", "for _ in range(3):\n    CONSTANTS['p'] += 1")])
def test_what_a_file_does_at_its_top_level_counts(old, new):
    found = []
    for text in (VARIANT, VARIANT.replace(old, new)):
        text = text.format(imports="", local="pass", use="act", more="")
        found.append(source.digest({"mine.py": text}, ["mine.py:Mine"]))
    assert found[0] != found[1]


def test_all_methods_of_a_class_count_where_one_is_named():
    power = ("class Power:\n    @classmethod\n    def make(cls, h):\n        return cls.raised(h)\n"
             "    def raised(h):\n        return h ** 2\n")
    text = VARIANT.format(imports="", local="pass", use="Power.make", more=power)
    found = [source.digest({"mine.py": text.replace("** 2", edit)}, ["mine.py:Mine"])
             for edit in ("** 2", "** 3")]
    assert found[0] != found[1]


def test_each_model_has_equations_of_its_own_whatever_its_size():
    names = ["multiscreen", *(f"multiscreen:{name}" for name in ablations.TILES)]
    names += [f"transformer:8M{name}" for name in ("", ":qknorm", ":nope", ":local", ":ssmax")]
    assert len({equations(name) for name in names}) == len(names)
    assert equations("transformer:8M") == equations("transformer:4,4,96")
    probes = []
    for name in names:
        torch.manual_seed(0)
        size = name.replace("8M", "2,2,16")
        psi = {"psi": 2} if name.startswith("multiscreen") else {}
        model = build_model(size, psi | {"vocab_size": 7})
        probes.append(probe(model, multiscreen.screen if psi else None))
    # The probes even tell RMSNorm with weights of 1, and Scalable-Softmax, apart.
    assert len({*probes}) == len(names)


# -------------------------------------------------------------------------- replaced at run time

class Mine(multiscreen.GatedScreeningTiles):
    """A layer defined outside the model's files."""


REPLACED = {
    "trim": (multiscreen, lambda s, r: s.relu()),
    "softmask": (multiscreen, functools.wraps(multiscreen.softmask)(lambda d, w: (d <= 0) * 1.0)),
    "acceptance": (multiscreen, multiscreen.window),
    "encode": (multiscreen.GatedScreeningTiles, lambda self, x, i, w: x),
    "expand_windows": (Multiscreen, lambda self, T: None),
    "extra": (Multiscreen, lambda self: None), "forgets": (Multiscreen, True),
    "KeyCache": (multiscreen, Mine), "F": (multiscreen, torch)}


@pytest.mark.parametrize("name", REPLACED)
def test_a_replaced_function_makes_a_model_unique(monkeypatch, capsys, name):
    source.say_replaced.cache_clear()                  # one line per process
    before = equations("multiscreen")
    assert not capsys.readouterr().err
    owner, f = REPLACED[name]
    monkeypatch.setattr(owner, name, f, raising=False)
    found = {equations("multiscreen"), equations("multiscreen"), before}
    assert len(found) == 3
    assert " was replaced at run time, or is in no file of this model: " in capsys.readouterr().err
    monkeypatch.undo()
    assert equations("multiscreen") == before


def test_a_layer_from_elsewhere_makes_a_model_unique(monkeypatch, capsys):
    source.say_replaced.cache_clear()
    monkeypatch.setitem(ablations.TILES, "mine", Mine)
    assert equations("multiscreen:mine") != equations("multiscreen:mine")
    assert "Mine was replaced at run time, or is in no file" in capsys.readouterr().err
    assert equations("multiscreen") == equations("multiscreen")


@pytest.mark.parametrize("owner, name, value", [
    (ablations, "softmask", multiscreen.softmask), (ablations.Compete, "rest", 5.0),
    (transformer.Block, "window", 16), (ablations.RoPE, "bound", ablations.NoTanhNorm.bound),
    (ablations.Softmax, "own_screen", staticmethod(multiscreen.screen)),
    (multiscreen.unit, "__defaults__", (0.3,))])
def test_each_way_to_replace_something_is_seen(monkeypatch, owner, name, value):
    names = ("multiscreen:softmax-rope", "transformer:8M:local")
    before = [equations(name) for name in names]
    if name == "softmask":
        value = functools.wraps(value)(lambda d, w: d)
    monkeypatch.setattr(owner, name, value)
    assert [equations(name) for name in names] != before
    monkeypatch.undo()
    assert [equations(name) for name in names] == before


# What a notebook's first cell may do, and the name in the line about it.
BEFORE_THE_FIRST_LOOK = [
    ("multiscreen.trim = lambda s, r: s.relu()", "multiscreen.trim"),
    ("multiscreen.tanh_norm = torch.tanh", "multiscreen.tanh_norm"),
    ("multiscreen.tanh_norm = multiscreen.unit", "multiscreen.tanh_norm"),
    ("multiscreen.unit.__defaults__ = (0.3,)", "multiscreen.unit"),
    ("multiscreen.unit = functools.partial(multiscreen.unit, eps=0.3)", "multiscreen.unit"),
    ("baselines.ablations.Compete.rest = 5.0", "Compete.rest"),
    ("baselines.transformer.Block.rope_scale = (1.0, 8.0)", "Block.rope_scale")]
FIRST_CELL = """
import functools, baselines.ablations, baselines.transformer, multiscreen
exec(case)
from support.checkpoint import equations
for name in ("multiscreen", "multiscreen:compete", "transformer:8M"):
    print(equations(name))
"""


def test_what_was_replaced_before_the_first_look_is_seen():
    done = run_cases(FIRST_CELL, [line for line, _ in BEFORE_THE_FIRST_LOOK])
    found, said = done.stdout.split(), done.stderr.splitlines()
    right = [equations(name) for name in ("multiscreen", "multiscreen:compete", "transformer:8M")]
    assert len(found) == 3 * len(BEFORE_THE_FIRST_LOOK)
    for n, (line, name) in enumerate(BEFORE_THE_FIRST_LOOK):
        assert found[3 * n : 3 * n + 3] != right, line
        assert said[n].startswith(f"{name} was replaced at run time"), line    # one line each


def test_unusual_text_is_as_written(clone):
    """A function defined twice, a class built by a call, an enum, lambdas on adjacent lines."""
    clone("\n\ndef softmask(d, w):", "\n\ndef trim(s, r):\n    return s\n\n\n"
          "class Pair(__import__('typing').NamedTuple):\n    a: int = 1\n\n\n"
          "class Kind(__import__('enum').Enum):\n    SOFT = 'soft'\n\n\n"
          "@dataclass(slots=True)\nclass Slots:\n    a: int = 1\n\n\ndef softmask(d, w):")
    clone("    agreeing = None\n", "    one = lambda self: 1\n    two = lambda self: 2\n"
          "    used = Pair, Kind, Slots\n    agreeing = None\n")
    code = ("from support.checkpoint import equations;"
            "print(*(equations('multiscreen') for _ in range(2)))")
    done = run("-c", code, cwd=clone.folder)
    assert done.stderr == ""
    first, again = done.stdout.split()
    assert first == again


def test_a_file_in_a_folder_of_your_own_counts(clone):
    """If multiscreen.py imports it; source/ keeps it, too."""
    (clone.folder / "ideas").mkdir()
    clone("import math\n", "import math\nfrom ideas.act import C\n")
    clone("return x * (torch.tanh(norm)", "return C * x * (torch.tanh(norm)")
    code = """if True:
        with open("ideas/act.py", "w") as file:
            file.write(case)
        sys.dont_write_bytecode = True
        from support import source
        from support.checkpoint import small_model
        model = small_model("multiscreen")
        print(source.identity(model))
        print(*source.source_of(source.classes_of(model), []))"""
    done = run_cases(code, ["C = 1.0", "C = 2.0", "C = 2.0  # a comment"], cwd=clone.folder)
    first, files, second, _, third, _ = done.stdout.splitlines()
    assert first != second == third
    assert files == "ideas/act.py multiscreen.py support/tokens.py train.py"


def test_a_value_that_no_text_has_counts(clone):
    """A value from an environment variable, or put into a dict at run time."""
    clone("import math\n", "import math\nimport os\nP = float(os.environ.get('POWER', 1))\n"
          "class Mine:\n    p = float(os.environ.get('MINE', 1))\nC = {'c': 1.0}\n"
          "LIST = [float(x) for x in os.environ.get('LIST', '1').split()]\n"
          "ACT = {'abs': abs, 'sum': sum}[os.environ.get('ACT', 'abs')]\n"
          "TWO = 'TWO' in os.environ\n")
    clone("return x * (torch.tanh(norm)",
          "return C['c'] * P * Mine.p * LIST[0] * ACT([TWO]) * x * (torch.tanh(norm)")
    code = """if True:
        name, _, value = case.partition("=")
        os.environ[name] = value
        import multiscreen
        from support.checkpoint import equations
        print(equations("multiscreen"))
        multiscreen.C["c"] = 2.0
        equations("multiscreen")"""
    cases = ["X=", "POWER=1", "POWER=2", "MINE=2", "LIST=2", "ACT=sum", "TWO=1"]
    done = run_cases(code, cases, cwd=clone.folder)
    plain, same, *others = done.stdout.splitlines()
    assert plain == same and len({plain, *others}) == 6
    assert done.stderr.count("multiscreen.C was replaced at run time") == len(cases)


def test_a_compiled_function_is_the_one_it_was(monkeypatch):
    before = equations("multiscreen")
    monkeypatch.setattr(multiscreen, "trim", torch.compile(multiscreen.trim))
    for _ in range(2):                                 # disabled twice
        monkeypatch.setattr(multiscreen.KeyCache, "append",
                            torch.compiler.disable(multiscreen.KeyCache.append))
    assert equations("multiscreen") == before


def test_nothing_resumes_after_a_function_was_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(multiscreen, "trim", lambda s, r: s.relu())
    fit(tmp_path / "out", "--steps", "2")
    flags = (tmp_path / "out/flags.txt").read_text()
    assert "changes\tfrom step 0: multiscreen.trim replaced at run time\n" in flags
    with pytest.raises(UsageError, match="other equations: one of the two replaced something at"):
        fit(tmp_path / "out", "--steps", "2")


# ----------------------------------------------------------------- what a folder keeps and shows

@pytest.fixture
def clone(tmp_path):
    """A copy of the code for a test to edit: clone(old, new) edits multiscreen.py."""
    folder = tmp_path / "clone"
    folder.mkdir()
    for path in ROOT.glob("*.py"):
        shutil.copy(path, folder)
    # Without what a reader measured of the bundled model.
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("*.tsv"))

    def edit(old, new, path=FILE):
        file = folder / path
        assert file.read_text().count(old) == 1
        file.write_text(file.read_text().replace(old, new))

    edit.folder = folder
    (folder / "text.txt").write_text("to be or not to be\n" * 400)
    return edit


FOLDERS = ("baselines", "support", "tasks", "models")
TRAIN = ["--psi", "2", "--seq-len", "32", "--batch-size", "2", "--data", "text.txt", "--kernel",
         "definition"]


def test_a_run_is_not_resumed_with_other_equations_and_the_difference_is_shown(clone, monkeypatch,
                                                                               capsys):
    monkeypatch.chdir(clone.folder)
    train.main([*TRAIN, "--steps", "2"])
    folder = clone.folder / "out"
    assert (folder / "source" / FILE).read_text() == source.TEXT[FILE]
    assert all((folder / "source" / x).exists()
               for x in ("train.py", "support/data.py", "support/tokens.py"))
    before = (folder / "ckpt.pt").read_bytes()
    clone(*EDITS[2])
    found = run("train.py", *TRAIN, "--steps", "2", cwd=clone.folder)
    assert found.returncode == 1
    assert found.stderr == (
        "error: out holds a run with other equations: `-def unit(x, eps=1e-06):` "
        "`+def unit(x, eps=0.3):`: --force overwrites it, another --out starts a new run, --resume "
        "continues with the edit\n")
    assert (folder / "ckpt.pt").read_bytes() == before

    # An edit of train.py is refused, too; --resume accepts it, shows it and records it.
    text = source.TEXT["train.py"].replace("betas=(0.9, 0.95)", "betas=(0.9, 0.99)")
    monkeypatch.setitem(source.TEXT, "train.py", text)
    with pytest.raises(UsageError, match=r"another train.py: `-    optimizer .*--resume contin"):
        train.main([*TRAIN, "--steps", "2"])
    train.main([*TRAIN, "--steps", "4", "--resume", "--lr", "0.5"])
    said = capsys.readouterr().out
    assert "train.py has changed since step 2: `-    optimizer" in said
    assert "from step 2: --lr 0.5, before 0.0625, train.py changed\n" in said
    ckpt = torch.load(folder / "ckpt.pt", weights_only=True)
    assert ckpt["changes"] == ["from step 2: --lr 0.5, before 0.0625, train.py changed"]
    assert "betas=(0.9, 0.99)" in ckpt["source"]["train.py"]
    flags = dict(line.split("\t") for line in (folder / "flags.txt").read_text().splitlines())
    assert flags["changes"] == ckpt["changes"][0]
    assert flags["versions"] == f"python {sys.version.split()[0]}, torch {torch.__version__}"


def test_what_a_run_ran_before_an_edit_stays_beside_it(tmp_path, monkeypatch):
    fit(tmp_path / "out", "--steps", "2")
    text = source.TEXT["train.py"]
    monkeypatch.setitem(source.TEXT, "train.py", text + "\nx = 1\n")
    for steps in ("3", "4"):
        train.main(["--resume", "--out", str(tmp_path / "out"), "--steps", steps])
    assert (tmp_path / "out/source_until_2/train.py").read_text() == text
    assert (tmp_path / "out/source/train.py").read_text() == text + "\nx = 1\n"
    assert not (tmp_path / "out/source_until_3").exists()
    fit(tmp_path / "out", "--steps", "2", "--force")
    assert not (tmp_path / "out/source_until_2").exists()


@pytest.mark.parametrize("kind", ["folder", "link", "file"])
def test_a_source_of_somebody_elses_is_not_touched(tmp_path, kind):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/train.py").write_text("precious")
    out = tmp_path / "out"
    out.mkdir()
    if kind == "link":
        (out / "source").symlink_to(tmp_path / "mine")
    elif kind == "folder":
        shutil.copytree(tmp_path / "mine", out / "source")
    else:
        (out / "source").write_text("precious")
    with pytest.raises(UsageError, match="source belongs to no run: name another --out"):
        fit(out, "--steps", "2")
    found = out / "source" if kind == "file" else out / "source/train.py"
    assert found.read_text() == "precious"
    assert [path.name for path in out.iterdir()] == ["source"]


def test_an_edited_model_measures_its_needles_again(clone, call, capsys, quick_choice):
    flags = ["--lengths", "256", "--trials", "1", "--depths", "0.5"]
    path, table = (clone.folder / f"models/retrieval{end}" for end in (".pt", "_abcdigits.tsv"))
    for _ in range(2):
        call(abcdigits, "--ckpt", path, *flags)
    first, = read_table(table)
    assert "reusing 1 of 1 measurements in" in capsys.readouterr().err
    clone(*EDITS[0])
    code = ("import abcdigits; from support import choose, cli;"
            "choose.CASES = choose.CASES[1:2]; cli.cli(abcdigits.main)")
    said = run("-c", code, "--ckpt", "models/retrieval.pt", *flags, cwd=clone.folder).stderr
    change = "`-    return torch.sigmoid(s_r).clamp_min(1e-06)` " + (
        "`+    return torch.sigmoid(s_r).clamp_min(0.25)`")
    assert f"retrieval.pt was trained with other equations: {change}" in said
    assert "replacing 1 row in" in said
    row, = read_table(table)
    assert row["hash"] != first["hash"]
    assert row["hash"].split("-")[0] == first["hash"].split("-")[0]


def test_an_edit_during_a_training_is_not_stamped_onto_it(clone):
    """multiscreen.py is edited after its import, and before a checkpoint records its source."""
    code = ("import train, pathlib\n"
            "from support import checkpoint, source\n"
            "path = pathlib.Path('multiscreen.py')\n"
            f"path.write_text(path.read_text().replace({EDITS[8][0]!r}, {EDITS[8][1]!r}))\n"
            "classes = source.classes_of(checkpoint.small_model('multiscreen'))\n"
            "print(checkpoint.equations('multiscreen'))\n"
            "print(source.source_of(classes, [])['multiscreen.py'])")
    said = run("-c", code, cwd=clone.folder).stdout
    assert EDITS[8][1] in (clone.folder / FILE).read_text()
    assert said == f"{equations('multiscreen')}\n{source.TEXT[FILE]}\n"


def test_rows_say_from_which_weights_and_with_which_flags_a_run_went_on(tmp_path):
    first = fit(tmp_path / "a", "--steps", "2")
    rows = [describe_run(first)]
    began = fit(tmp_path / "b", "--init", str(tmp_path / "a/ckpt.pt"), "--steps", "2")
    assert began["init_weights"] == weights_hash(first)
    rows.append(describe_run(began))
    with pytest.raises(UsageError, match="began with other weights than .* has now"):
        train.main(["--resume", "--out", str(tmp_path / "a"), "--steps", "3"])
        fit(tmp_path / "b", "--init", str(tmp_path / "a/ckpt.pt"), "--steps", "2")
    longer = train.load_checkpoint(tmp_path / "a/ckpt.pt")[2]
    assert longer["changes"] == []                     # more steps are not a change
    train.main(["--resume", "--out", str(tmp_path / "a"), "--steps", "4", "--lr", "0.5"])
    train.main(["--resume", "--out", str(tmp_path / "a"), "--steps", "5", "--clip", "1"])
    twice = train.load_checkpoint(tmp_path / "a/ckpt.pt")[2]
    assert twice["changes"] == ["from step 3: --lr 0.5, before 0.0625",
                                "from step 4: --clip 1.0, before 0.0"]
    rows.append(describe_run(twice) | {"step": 2})
    rows.append(describe_run(longer) | {"step": 2})
    assert rows[0] == rows[3]
    assert len({tuple(row.values()) for row in rows}) == 3
    assert model_hash(first).endswith(equations("multiscreen"))


def test_a_run_keeps_your_own_files_that_training_imports(monkeypatch):
    """For example an optimizer, or code that cleans the texts, in its own file."""
    text = source.TEXT["train.py"]
    monkeypatch.setitem(source.TEXT, "train.py", f"{text}\nfrom muon import Muon\n")
    monkeypatch.setitem(source.TEXT, "muon.py", "import optim.beta\nBETA = optim.beta.BETA\n")
    monkeypatch.setitem(source.TEXT, "optim/beta.py", "BETA = 0.95\n")
    assert {"muon.py", "optim/beta.py"} < source.source_of(CLASSES, []).keys()
    monkeypatch.setitem(source.TEXT, "train.py", text)
    assert [*source.source_of(CLASSES, [])] == ["multiscreen.py", "support/tokens.py", "train.py"]
    monkeypatch.setitem(source.TEXT, "support/tokens.py", "from muon import BETA")
    assert {"muon.py", "optim/beta.py"} < source.source_of(CLASSES, []).keys()


def test_a_docstring_of_train_py_is_no_edit():
    text = source.TEXT["train.py"]
    assert source.bare_lines(text) == source.bare_lines(text.replace('"""Train', '"""Teach', 1))


def test_differences_name_the_file_and_the_lines():
    old = {"a.py": "def f(x):\n    return x\n", "b.py": "B = 1\n"}
    new = {"a.py": 'def f(x):\n    """Twice."""\n    return 2 * x  # more\n', "b.py": "B = 1\n"}
    assert source.differences(old, old) == []
    assert source.differences(old, new) == ["  a.py", "    -    return x", "    +    return 2 * x"]
    assert source.differences({}, {"c.py": "C = 1\nD = 2\n"}, most=1) == [
        "  c.py", "    +C = 1", "    and 1 more lines"]
