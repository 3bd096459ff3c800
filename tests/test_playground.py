"""Tests of course/playground/: the numbers on its page, and the page in use in Chromium."""
import html
import json
import math
import re
import shutil
import subprocess

import pytest
import torch

import multiscreen
from course.playground import __main__ as playground
from course.playground.data import page_data
from tests.helpers import ROOT
from train import load_checkpoint

pytestmark = pytest.mark.slow
KEPT = ROOT / "docs/playground.html"
ABCDIGITS = {"args": {"data": ["abcdigits"]}}
PROMPT = playground.default_text(ABCDIGITS)
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.fixture
def model():
    """The bundled model as the page has it: matrices in 16 bits, screening by its definition."""
    found = load_checkpoint(playground.MODEL)[0]
    found.screen = multiscreen.screen
    page_data(found, "a")                              # rounds the matrices
    return found


# ------------------------------------------------------------------------------- without a page

def test_a_page_is_written_from_a_checkpoint_and_a_text(tmp_path, capsys):
    page = tmp_path / "new/p.html"
    playground.main(["--out", str(page), "--text", f"<\r\n\r{'n' * 195}ïve"])
    # As a browser's text field has the line ends. ï has two bytes.
    assert f'"text": "\\u003c\\n\\n{"n" * 195}"' in page.read_text()
    assert not any(marker in page.read_text() for marker in playground.MARKERS)
    readme = re.search('href="([^"]*)#the-idea"', page.read_text())[1]
    assert (page.parent / readme).resolve() == ROOT / "README.md"
    assert "a text of 198 bytes" in capsys.readouterr().out


def test_the_page_in_docs_is_the_one_that_is_built_now(tmp_path):
    """If not: python -m course.playground --out docs/playground.html"""
    playground.main(["--out", str(tmp_path / "docs/playground.html")])
    texts, logits = [], []
    for page in (KEPT, tmp_path / "docs/playground.html"):
        before, data = page.read_text("utf-8").split('<script type="application/json" id="data">')
        numbers, end = json.JSONDecoder().raw_decode(data)
        texts.append(re.sub('href="[^"]*README.md', "", before) + data[end:])
        logits.append(numbers["last_logits"])
    assert texts[0] == texts[1]
    assert logits[0] == pytest.approx(logits[1], abs=1e-3)     # processors round differently
    assert KEPT.stat().st_size < 1.6e6


# ---------------------------------------------------------------------------------- in Chromium

# This comes first in the page, and notes what goes wrong in it.
WATCH = """<script>
const wrong = [];
addEventListener("error", (event) => wrong.push(event.message ?? event.target.outerHTML), true);
for (const kind of ["error", "warn", "log"]) console[kind] = (...words) => wrong.push(words);
</script>"""
# This comes last: a reader's hands, and the script of a test, whose result replaces the page.
USE = """<script>
const says = (name) => $(name).textContent;
function write(name, text) {
  $(name).focus();
  $(name).select();
  document.execCommand("insertText", false, text);
}
function click(selector) {
  document.querySelector(selector).click();
}
// The logits of the last token and its relevances in each tile.
function numbers() {
  return [model.logits(count() - 1), model.tiles.map(({alpha}) => [...alpha.at(-1)])];
}
const found = (() => {SCRIPT})();
for (const {name} of performance.getEntriesByType("resource")) wrong.push(name);
document.documentElement.textContent = JSON.stringify([found, wrong]);
</script>"""


@pytest.fixture
def use(tmp_path):
    """use(script, page) is what the script returns in a page, in which nothing may go wrong."""
    if not CHROMIUM:
        pytest.skip("chromium is not installed: apt-get install chromium")

    def use(script, page=KEPT):
        before, head, after = page.read_text("utf-8").partition("<head>")
        assert head
        text = before + head + WATCH + after + USE.replace("SCRIPT", script)
        (tmp_path / "used.html").write_text(text, "utf-8")
        done = subprocess.run(
            [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
             f"--user-data-dir={tmp_path}/profile", "--dump-dom",
             (tmp_path / "used.html").as_uri()], capture_output=True, text=True, timeout=120)
        assert "</html>" in done.stdout, done.stderr[-3000:]
        result = re.search("<html.*?>(.*)</html>", done.stdout, re.S)[1]
        found, wrong = json.loads(html.unescape(result))
        assert wrong == []
        return found

    return use


def assert_as_in_python(found, model, text=PROMPT):
    """The page's numbers are 1e-4 apart at most."""
    tokens = torch.tensor([list(text.encode())])
    with torch.no_grad():
        logits = model(tokens)[0, -1].float()
        rows = torch.cat([maps[0, :, -1] for maps in model.relevance_maps(tokens)]).float()
    torch.testing.assert_close(torch.tensor(found[0]), logits, rtol=0, atol=1e-4)
    torch.testing.assert_close(torch.tensor(found[1]), rows, rtol=0, atol=1e-4)


def softmax_screen(q, k, v, w, r, i0=0):
    s = q @ k.transpose(-2, -1)
    future = torch.ones_like(s[0, 0], dtype=torch.bool).triu(i0 + 1)
    return (s / 0.1).masked_fill(future, -torch.inf).softmax(-1) @ v


EDITS = {                                              # {what is done: the same in Python}
    "0": {},
    "write('trim', 'max(1 - (1 - s) / r, 0)')": {"trim": lambda s, r: (1 - (1 - s) / r).relu()},
    "write('trim', 'max(s, 0) ** 2')": {"trim": lambda s, r: s.relu().square()},
    "click('#no-square')": {"trim": lambda s, r: (1 - (1 - s) / r).relu()},
    "click('#no-window')": {"softmask": lambda d, w: (d <= 0).double() + 0 * w},
    "click('#original')": {},
    "click('#use-softmax')": {"screen": softmax_screen}}


def test_what_you_type_or_click_is_what_the_model_uses_and_its_numbers_are_pythons(
        use, model, monkeypatch):
    model.double().screen = lambda *inputs: multiscreen.screen(*inputs)
    looks = ", ".join(f"({do}, [numbers(), says('answer'), says('effect')])" for do in EDITS)
    seen = dict(zip(EDITS, use(f"return [{looks}]"), strict=True))
    for do, equations in EDITS.items():
        with monkeypatch.context() as m:
            for name, f in equations.items():
                m.setattr(multiscreen, name, f)
            assert_as_in_python(seen[do][0], model)
    answers = [re.search("answers “(.*?)”", answer)[1] for _, answer, _ in seen.values()]
    assert answers[:6] == ["89", "89", "22", "89", "====", "89"]
    assert "it writes “89”" in seen["write('trim', 'max(s, 0) ** 2')"][2]
    assert seen["click('#original')"][2] == seen["0"][2]
    assert " 0.0% of the weights" in seen["click('#use-softmax')"][2]


def test_a_wrong_formula_is_a_line_beside_the_field_and_the_last_right_one_stays(use):
    wrong = {"max(s, ": "not a formula yet", "": "not a formula yet", "maximum(s)": "not defined",
             "sqrt(s)": "it gives NaN for s = -1", "1 / (1 - s)": "it gives Infinity for s = 1",
             "1e300 * (s + 2) ** 2": "no longer finite"}
    (answer, _, _), *rows, (_, says, invalid) = use("""
        const look = () => [says("answer"), says("trim-says"), $("trim").ariaInvalid];
        const type = (text) => { write("trim", text); return look(); };
        const rows = ["max(s, 0) ** 2", ...WRONG].map(type);
        click("#original");
        return [...rows, look()];""".replace("WRONG", json.dumps([*wrong])))
    for row, cause in zip(rows, wrong.values(), strict=True):
        assert (row[0], row[2]) == (answer, "true")
        assert cause in row[1]
        assert "still uses “max(s, 0) ** 2”" in row[1]
    assert (says, invalid) == ("", None)


def test_typing_changes_the_text_and_the_caches_know_it(use, model):
    *found, text, speed, inside = use("""
        click("[data-j='60']");
        for (const letter of "Zé") document.execCommand("insertText", false, letter);
        const insideOf = ({alpha, w, v}) => summarize(alpha, count() - 1, w, v).inside;
        return [...numbers(), $("typing").value, says("speed"), model.tiles.map(insideOf)];""")
    assert inside == [min(math.ceil(w), len(text.encode()))
                      for layer in model.layers for w in layer.w.tolist()]
    assert text == PROMPT[:61] + "Zé" + PROMPT[61:]
    assert "kept the 62 before the edit" in speed      # é has two bytes
    assert_as_in_python(found, model.double(), text)


def test_the_panels_compare_screening_with_softmax_and_do_not_change_the_model(use):
    """A slider, copies of a key, and a text without the needle, where screening finds nothing."""
    before, after, again, untouched, answers, accepted, text = use("""
        const look = () => [says("numbers"), $("row").toDataURL(), $("map").toDataURL()];
        const found = [look()], answers = [says("answer")], accepted = [];
        $("r").value = 1000;
        $("r").dispatchEvent(new Event("input"));
        found.push(look());
        click("#learned");
        found.push(look());
        click("#competition tbody tr:nth-child(2) .copies button:last-child");
        found.push([says("screening-numbers"), says("softmax-numbers")]);
        answers.push(says("answer"));
        for (const button of ["#delete", "#threshold-0"]) {
          click(button);
          accepted.push(says("screening-says"));
        }
        click("#delete");
        return [...found, answers, accepted, $("typing").value];""")
    assert [a == b for a, b in zip(before, after)] == [False, True, False]
    assert again == before
    assert [says.endswith("untouched key: 0.") for says in untouched] == [True, False]
    assert answers[0] == answers[1]
    assert "finds nothing and says so: all 192 characters" in accepted[0]
    assert re.search(r"accepts \d+ of 192 characters", accepted[1])
    assert text == PROMPT


def test_an_edit_of_multiscreen_py_is_reported_on_its_page(use, model, tmp_path, monkeypatch):
    """The text needs escaping, and has a character of two bytes."""
    monkeypatch.setattr(multiscreen, "trim", lambda s, r: (1 + (s - 1) / r).relu())
    text = "</script><!-- é &amp; \\ PLAYGROUND_DATA"
    playground.write_page(tmp_path / "edited.html", page_data(model, text))
    is_hidden, typed, warning = use(
        "return [$('warning').hidden, $('typing').value, says('warning')]",
        tmp_path / "edited.html")
    assert (is_hidden, typed) == (False, text)
    assert "course/playground/model.js" in warning
