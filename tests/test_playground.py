"""Tests of course/playground/: the numbers on its page, and the page in use in Chromium."""
import base64
import json
import re

import numpy as np
import pytest
import torch

import multiscreen
from course.playground import __main__ as playground
from course.playground.data import page_data
from tests.browser import CHROMIUM, Browser
from tests.helpers import ROOT
from train import load_checkpoint

pytestmark = pytest.mark.slow
KEPT = ROOT / "docs/playground.html"
ABCDIGITS = {"args": {"data": ["abcdigits"]}}
PROMPT = playground.default_text(ABCDIGITS, 200)


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
    playground.main(["--out", str(page), "--text", "n<ïve\r\n", "--tokens", "3"])
    assert '"text": "n\\u003c"' in page.read_text()    # ï has two bytes
    assert not any(marker in page.read_text() for marker in playground.MARKERS)
    readme = re.search('href="([^"]*)#the-idea"', page.read_text())[1]
    assert (page.parent / readme).resolve() == ROOT / "README.md"
    assert "a text of 2 bytes" in capsys.readouterr().out
    for wrong in (["--tokens", "0"], ["--tokens", "1001"], ["--text", ""]):
        with pytest.raises(SystemExit, match="from 1 to 1000, and --text not empty"):
            playground.main(["--out", str(page), *wrong])


def test_a_model_whose_logits_are_not_finite_gets_no_page(model, monkeypatch):
    monkeypatch.setattr(multiscreen, "tanh_norm", lambda x: x / 0)
    with pytest.raises(FloatingPointError, match="logits are not finite"):
        page_data(model, "a")


def test_the_page_in_docs_is_the_one_that_is_built_now(tmp_path):
    """If not: python -m course.playground --out docs/playground.html"""
    playground.main(["--out", str(tmp_path / "docs/playground.html")])
    parts = []
    for page in (KEPT, tmp_path / "docs/playground.html"):
        before, data = page.read_text("utf-8").split('<script type="application/json" id="data">')
        numbers, end = json.JSONDecoder().raw_decode(data)
        alphas = np.frombuffer(base64.b64decode(numbers.pop("last_alpha_d")), "<f4")
        link = re.search(r'href="[^"]*README.md', before)[0]
        parts.append((before.replace(link, "") + data[end:], alphas, numbers))
    (page, alphas, numbers), (page_now, alphas_now, numbers_now) = parts
    assert page == page_now
    # Processors round differently.
    assert alphas == pytest.approx(alphas_now, abs=1e-4)
    assert numbers.pop("last_logits") == pytest.approx(numbers_now.pop("last_logits"), abs=1e-3)
    assert numbers == numbers_now
    assert KEPT.stat().st_size < 1.6e6


# ---------------------------------------------------------------------------------- in Chromium

@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """One browser for all tests."""
    if not CHROMIUM:
        pytest.skip("chromium is not installed: apt-get install chromium")
    found = Browser(tmp_path_factory.mktemp("profile"))
    yield found
    found.close()


@pytest.fixture
def show(browser):
    """show(path) opens a page. Afterwards it must have no message, and no request but its own."""
    paths = []

    def show(path):
        paths.append(path)
        browser.events.clear()
        browser.look(1240, 900)
        browser.open(path)
        return browser

    yield show
    for event in browser.events:
        what, about = event.get("method"), event.get("params")
        assert what not in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        if what == "Network.requestWillBeSent":
            assert about["request"]["url"].startswith((paths[-1].as_uri(), "data:"))


@pytest.fixture
def page(show):
    """The browser with the page of docs/ freshly opened."""
    return show(KEPT)


def text_of(page, name):
    return page.evaluate(f"$('{name}').textContent")


def write(page, name, text):
    """Type a text into a field in place of what is there."""
    page.evaluate(f"$('{name}').focus(); $('{name}').select()")
    page.send("Input.insertText", text=text)


def assert_as_in_python(page, model, text=PROMPT):
    """Logits of the last token and relevances of all tokens, 1e-4 apart at most."""
    tokens = torch.tensor([list(text.encode())])
    with torch.no_grad():
        logits = model(tokens)[0, -1].float()
        maps = torch.cat([layer[0] for layer in model.relevance_maps(tokens)]).float()
    found = page.evaluate("[model.logits(count() - 1), model.tiles.map(({alpha}) => "
                          "alpha.map((row) => [...row, ...Array(count() - row.length).fill(0)]))]")
    torch.testing.assert_close(torch.tensor(found[0]), logits, rtol=0, atol=1e-4)
    torch.testing.assert_close(torch.tensor(found[1]), maps, rtol=0, atol=1e-4)


def softmax_screen(q, k, v, w, r, i0=0):
    s = q @ k.transpose(-2, -1)
    future = torch.ones_like(s[0, 0], dtype=torch.bool).triu(i0 + 1)
    return (s / 0.1).masked_fill(future, -torch.inf).softmax(-1) @ v


def test_what_you_type_is_what_the_model_uses_and_its_numbers_are_pythons(page, model, monkeypatch):
    model.double()
    assert "answers “89”" in text_of(page, "answer")
    assert page.evaluate("[$('warning').hidden, $('trim').value]") == [
        True, "max(1 - (1 - s) / r, 0) ** 2"]
    assert_as_in_python(page, model)
    before = text_of(page, "effect")

    write(page, "trim", "max(1 - (1 - s) / r, 0)")
    with monkeypatch.context() as patch:
        patch.setattr(multiscreen, "trim", lambda s, r: (1 - (1 - s) / r).relu())
        assert_as_in_python(page, model)
    assert "answers “89”" in text_of(page, "answer")
    assert "with your formulas" in text_of(page, "screening-says")

    write(page, "trim", "max(s, 0) ** 2")
    with monkeypatch.context() as patch:
        patch.setattr(multiscreen, "trim", lambda s, r: s.relu().square())
        assert_as_in_python(page, model)
    assert "answers “22”" in text_of(page, "answer")
    assert "With the paper's formulas it writes “89”" in text_of(page, "effect")

    page.click("#original")
    assert text_of(page, "effect") == before
    write(page, "softmask", "d <= 0 ? 1 : 0")
    with monkeypatch.context() as patch:
        patch.setattr(multiscreen, "softmask", lambda d, w: (d <= 0).double() + 0 * w)
        assert_as_in_python(page, model)
    assert "answers “====”" in text_of(page, "answer")

    page.click("#original")
    page.click("#use-softmax")
    model.screen = softmax_screen
    assert_as_in_python(page, model)
    assert " 0.0% of the weights" in text_of(page, "effect")


def test_the_buttons_type_the_edits_and_put_back_the_original(page):
    values = "[$('trim').value, $('softmask').value]"
    original = page.evaluate(values)
    for name, trim, softmask in (("no-square", "max(1 - (1 - s) / r, 0)", original[1]),
                                 ("threshold-0", "max(s, 0) ** 2", original[1]),
                                 ("no-window", original[0], "d <= 0 ? 1 : 0")):
        page.click(f"#{name}")
        assert page.evaluate(values) == [trim, softmask]
        assert page.evaluate(f"$('{name}').getAttribute('aria-pressed')") == "true"
    page.click("#original")
    assert page.evaluate(values) == original


def test_a_wrong_formula_is_a_line_beside_the_field_and_the_last_right_one_stays(page):
    write(page, "trim", "max(s, 0) ** 2")
    answer = text_of(page, "answer")
    for wrong, says in (("max(s, ", "not a formula yet"), ("", "not a formula yet"),
                        ("maximum(s)", "not defined"), ("sqrt(s)", "it gives NaN for s = -1"),
                        ("1 / (1 - s)", "it gives Infinity for s = 1"),
                        ("1e300 * (s + 2) ** 2", "no longer finite")):
        write(page, "trim", wrong)
        assert says in text_of(page, "trim-says")
        assert "still uses “max(s, 0) ** 2”" in text_of(page, "trim-says")
        assert page.evaluate("$('trim').ariaInvalid") == "true"
        assert text_of(page, "answer") == answer
    page.click("#original")
    assert page.evaluate("[$('trim').ariaInvalid, $('trim-says').textContent]") == [None, ""]


def test_without_the_needle_screening_finds_nothing_but_a_threshold_of_0_finds_something(page):
    page.click("#delete")
    assert "No line has it." in text_of(page, "answer")
    assert "finds nothing and says so: all 192 characters" in text_of(page, "screening-says")
    assert "must still choose" in text_of(page, "softmax-says")
    page.click("#threshold-0")
    assert re.search(r"accepts \d+ of 192 characters", text_of(page, "screening-says"))
    page.click("#delete")
    assert page.evaluate("$('typing').value") == PROMPT
    assert text_of(page, "delete") == "Delete the needle"


def test_typing_changes_the_text_and_the_caches_know_it(page, model):
    page.click("[data-j='60']")
    page.type("Zé")
    text = PROMPT[:61] + "Zé" + PROMPT[61:]
    assert page.evaluate("$('typing').value") == text
    assert "kept the 62 before the edit" in text_of(page, "speed")        # é has two bytes
    assert_as_in_python(page, model.double(), text)


def test_sliders_and_copies_of_keys_change_the_pictures_but_not_the_model(page):
    look = "[$('numbers').textContent, $('row').toDataURL(), $('map').toDataURL()]"
    answer, before = text_of(page, "answer"), page.evaluate(look)
    page.evaluate("$('r').focus()")
    page.press("End")
    after = page.evaluate(look)
    assert [a == b for a, b in zip(before, after)] == [False, True, False]
    page.click("#learned")
    assert page.evaluate(look) == before
    page.click("#competition tbody tr:nth-child(2) .copies button:last-child")
    assert text_of(page, "screening-numbers").endswith("change of an untouched key: 0.")
    assert not text_of(page, "softmax-numbers").endswith("change of an untouched key: 0.")
    assert text_of(page, "answer") == answer


def test_a_phone_a_keyboard_and_a_screen_reader_can_use_the_page(page):
    page.look(390, 844)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    nameless = page.evaluate("""[...document.querySelectorAll("button, input, textarea, canvas")]
        .filter((e) => e.id !== "ramp" && !e.closest("#maps, #legend")
                && !(e.ariaLabel || e.labels?.length || e.textContent.trim()))
        .map((e) => e.outerHTML)""")
    assert nameless == []
    page.evaluate("$('no-window').focus()")
    page.press("Enter", "\r")
    assert page.evaluate("$('softmask').value") == "d <= 0 ? 1 : 0"
    page.evaluate("$('maps').children[3].focus()")
    page.press("ArrowRight")
    assert page.evaluate("state.tile") == 4


def test_an_edit_of_multiscreen_py_is_reported_on_its_page(show, model, tmp_path, monkeypatch):
    """The text needs escaping, and has a character of two bytes."""
    monkeypatch.setattr(multiscreen, "trim", lambda s, r: (1 + (s - 1) / r).relu())
    text = "</script><!-- é &amp; \\ PLAYGROUND_DATA"
    playground.write_page(tmp_path / "edited.html", page_data(model, text))
    page = show(tmp_path / "edited.html")
    assert page.evaluate("[$('warning').hidden, $('typing').value]") == [False, text]
    assert "course/playground/model.js" in text_of(page, "warning")
