"""Tests of course/playground/: the numbers on its page, and the page in use in Chromium."""
import base64
import json
import re
from collections import Counter

import numpy as np
import pytest
import torch

import multiscreen
from support.cli import UsageError
from course.playground import __main__ as playground
from course.playground.data import page_data
from multiscreen import relevance, screen, softmask
from support.run import load_checkpoint
from tests.browser import CHROMIUM, Browser
from tests.helpers import ROOT
from tests.inputs import INF, small

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model():
    """Six tiles far from their initial values; one window is infinite."""
    return small(4, moved=True, vocab_size=257, N_L=2)


def prompt(n_tokens, digits=2):
    """An ABCDigits prompt."""
    ckpt = {"args": {"data": ["abcdigits"], "digits": digits}}
    return playground.default_text(ckpt, n_tokens)


def make_page(path, model, text):
    """Write a page that shows a model and a text. Return its path."""
    playground.write_page(path, page_data(model, text) | {"step": 0})
    return path


# ------------------------------------------------------------------------------- without a page

def test_a_text_with_the_line_ends_of_windows_is_measured_as_a_browser_holds_it(model):
    data, plain = (page_data(model, f"one{end}two{end}") for end in ("\r\n", "\n"))
    assert data["text"] == "one\ntwo\n"
    assert data["last_logits"] == plain["last_logits"]


def test_a_model_whose_logits_are_not_finite_gets_no_page(model, monkeypatch):
    monkeypatch.setattr(multiscreen, "tanh_norm", lambda x: x / 0)
    with pytest.raises(FloatingPointError, match="logits are not finite"):
        page_data(model, "a")


def test_a_page_is_written_and_written_again(tmp_path, capsys):
    page = tmp_path / "new/p.html"
    flags = ["--ckpt", str(ROOT / playground.MODEL), "--device", "cpu", "--out", str(page)]
    playground.main(flags)
    assert not any(marker in page.read_text() for marker in playground.MARKERS)
    assert json.dumps(prompt(200)) in page.read_text()
    readme = re.search('href="([^"]*)#the-idea"', page.read_text())[1]
    assert (page.parent / readme).resolve() == ROOT / "README.md"
    assert "a text of 197 bytes" in capsys.readouterr().out
    playground.main([*flags, "--text", "naïve", "--tokens", "3"])          # ï has two bytes
    assert '"text": "na"' in page.read_text()
    for wrong in (["--tokens", "0"], ["--tokens", "1001"], ["--text", ""]):
        with pytest.raises(UsageError, match="from 1 to 1000, and --text not empty"):
            playground.main([*flags, *wrong])
    with pytest.raises(UsageError, match="is a file: to show its text"):
        playground.main([*flags, "--text", str(ROOT / "README.md")])
    with pytest.raises(UsageError, match="name an .html file"):
        playground.main([*flags[:-1], str(tmp_path / "ckpt.pt")])


def test_the_page_in_docs_is_the_one_that_is_built_now(tmp_path):
    """If not: python -m course.playground --out docs/playground.html"""
    kept = ROOT / "docs/playground.html"
    playground.main(["--out", str(tmp_path / "docs/playground.html"), "--device", "cpu"])
    parts = []
    for page in (kept, tmp_path / "docs/playground.html"):
        text = page.read_text("utf-8")
        (data,) = re.findall(r"^.*\"last_logits\".*$", text, re.M)
        start = data.index("{")
        numbers = json.JSONDecoder().raw_decode(data[start:])[0]
        link = re.search(r'href="[^"]*README.md', text)[0]
        parts.append((text.replace(data, "").replace(link, ""), numbers))
    (page, numbers), (page_now, numbers_now) = parts
    assert page == page_now
    for name, size in (("last_logits", 1e-3), ("last_alpha_d", 1e-4)):
        a, b = (x.pop(name) for x in (numbers, numbers_now))
        if name == "last_alpha_d":                     # rounding differs between processors
            a, b = (np.frombuffer(base64.b64decode(x), "<f4") for x in (a, b))
        assert a == pytest.approx(b, abs=size)
    assert numbers == numbers_now
    assert kept.stat().st_size < 3e6


def test_a_model_with_other_equations_is_refused(checkpoints):
    path = checkpoints["multiscreen:rope"]
    with pytest.raises(UsageError, match="multiscreen:rope .* the page needs a multiscreen model"):
        playground.main(["--ckpt", str(path), "--out", str(path.with_name("p.html"))])


# ---------------------------------------------------------------------------------- in Chromium

@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """One browser for all tests."""
    if not CHROMIUM:
        pytest.skip("chromium is not installed: apt-get install chromium")
    found = Browser(tmp_path_factory.mktemp("profile"))
    yield found
    found.close()


@pytest.fixture(scope="module")
def made(model, tmp_path_factory):
    """The path of a page with the model and a prompt."""
    return make_page(tmp_path_factory.mktemp("page") / "p.html", model, prompt(135))


@pytest.fixture
def show(browser):
    """show(path) opens a page. Afterwards it must have no error, and no request but its own."""
    paths = []

    def show(path):
        paths.append(path)
        browser.events.clear()
        browser.look(1400, 900)
        browser.open(path)
        return browser

    yield show
    for event in browser.events:
        what, about = event.get("method"), event.get("params")
        assert what not in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        if what == "Network.requestWillBeSent":
            assert about["request"]["url"].startswith((paths[-1].as_uri(), "data:"))


@pytest.fixture
def page(show, made):
    """The browser with a freshly opened page."""
    return show(made)


@pytest.fixture(scope="module")
def seen(made, model):
    """PyTorch's (q, k, v, w, r) of all tiles for the page, in float32."""
    layers = []

    def record(q, k, v, w, r, i0):
        layers.append((q[0], k[0], v[0], w, r))
        return screen(q, k, v, w, r, i0)

    own, model.screen = model.screen, record
    with torch.no_grad():
        model.hidden(torch.tensor([list(prompt(135).encode())]))
    model.screen = own
    return tuple(torch.cat(parts) for parts in zip(*layers))


def test_the_numbers_of_each_tile_are_pytorchs(page, seen):
    """The page warns unless its logits and relevances of the last token are, too."""
    q, k, v, w, r = seen
    T = q.shape[1]
    assert (w == INF).any()
    assert page.evaluate("$('warning').hidden")
    maps = relevance(q[None], k[None], w, r)[0]
    inside = softmask(torch.arange(T) - torch.arange(T)[:, None], w[:, None, None]) > 0
    h = screen(q[None], k[None], v[None], w, r)[0]
    for n in range(len(w)):
        page.point(f"#maps button:nth-child({n + 1})", click=True)
        # JSON has no inf.
        assert page.evaluate("[state.tile, state.w, state.r]") == [
            n, w[n] if w[n] < INF else None, r[n]]
        found = page.evaluate("[...document.querySelectorAll('#numbers td:nth-child(2)')]"
                              ".map((cell) => +cell.textContent.replace('−', '-'))")
        alive = (maps[n] > 0)[inside[n]].double().mean().item()
        assert found == pytest.approx([(maps[n, -1] > 0).sum().item(), inside[n, -1].sum().item(),
                                       h[n, -1].norm().item(), alive], abs=1e-3)


def rows_of(page, rows):
    """A JavaScript expression for T rows of growing length, as a (T, T) tensor."""
    found = page.evaluate(f"({rows}).map((row) => [...row, ...Array(count()).fill(0)]"
                          ".slice(0, count()))")
    return torch.tensor(found, dtype=torch.float32)


def assert_same_map(found, expected):
    """Relevances are close; accepted and rejected keys agree, except right at the edge."""
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    differ = (found > 0) != (expected > 0)
    assert torch.maximum(found, expected)[differ].max() < 1e-8 if differ.any() else True


def test_other_values_of_the_sliders_are_pytorchs_too(page, seen):
    """At distance 9 with w = 9.0002 the float32 cosine is -1, so the relevance is exactly 0."""
    q, k, _, _, _ = seen
    js = {INF: "Infinity"}
    for w, r in ((1.0, 0.5), (9.0, 1.0), (9.0002, 1.0), (40.0, 0.05), (INF, 0.3)):
        w_all, r_all = torch.full((len(q),), w), torch.full((len(q),), r)
        maps = relevance(q[None], k[None], w_all, r_all)[0]
        for n in (0, 4):
            found = rows_of(page, f"mapOf(model.tiles[{n}], {js.get(w, w)}, {r})")
            assert_same_map(found, maps[n])


def test_typing_changes_the_text_and_the_caches_know_it(page):
    """An edit recomputes its letter and later ones; the results match a fresh model's."""
    def read():
        return page.evaluate("$('speed').textContent").split(";")[0]

    start = prompt(135)
    page.point("[data-j='131']", click=True)
    page.type("8")
    assert read() == "Computed 1 byte, kept the 132 before the edit"
    page.press("Backspace")
    assert read() == "Computed nothing, kept the 132 before the edit"
    page.point("[data-j='60']", click=True)
    page.type("Zé")
    text = start[:61] + "Zé" + start[61:]
    assert page.evaluate("$('typing').value") == text
    assert page.evaluate("model.tokens") == list(text.encode())
    assert page.evaluate("[state.query, spans.length]") == [63, 135]
    assert read() == "Computed 73 bytes, kept the 62 before the edit"          # é has two bytes
    off = page.evaluate("""(() => {
        const other = new Model(DATA.model);
        other.read(model.tokens);
        const last = count() - 1, right = other.logits(last);
        return [JSON.stringify(model.tiles) === JSON.stringify(other.tiles),
                Math.max(...model.logits(last).map((z, n) => Math.abs(z - right[n])))]; })()""")
    assert off == [True, 0]
    page.evaluate("setText('')")
    assert page.evaluate("model.tokens") == [10]
    assert read() == "Computed 1 byte"


def test_a_slider_moves_the_map_the_keys_and_the_sum_at_once(page):
    def look():
        return page.evaluate("""[state.w, state.r, $("w-now").textContent, $("r-now").textContent,
            bigMap.toDataURL(), $("map").toDataURL(), $("numbers").textContent,
            spans.map((s) => s.className + s.style.background).join()]""")

    page.evaluate("chooseTile(model.tiles.findIndex(({w}) => w > 3 && w < 60))")
    before = look()
    page.evaluate("$('w').focus()")
    for _ in range(20):
        page.press("ArrowRight")
    wider = look()
    assert wider[0] > before[0]
    assert wider[1] == before[1]
    assert all(a != b for a, b in zip(wider[4:], before[4:]))
    page.evaluate("$('r').focus()")
    page.press("Home")
    narrow = look()
    assert narrow[1] == pytest.approx(1e-3)
    assert narrow[3] != wider[3]
    assert all(a != b for a, b in zip(narrow[4:], wider[4:]))
    assert "learned" in page.evaluate("$('w-mark').textContent + $('r-mark').textContent")
    page.evaluate("$('w').focus()")
    page.press("End")
    assert page.evaluate("state.w === Infinity")
    page.point("#learned", click=True)
    assert look() == before


def test_deleting_and_copying_keys_moves_softmax_and_no_relevance(page, seen):
    q, k, _, w, r = seen
    tile = page.evaluate("state.tile")
    s = (q[tile, -1] @ k[tile].T).double()
    tau = page.evaluate("state.tau")
    alphas = relevance(q[None], k[None], w, r)[0, tile, -1]

    def values(name):
        return page.evaluate(f"[...compete(state.tile, count() - 1, state.copies, state.w, "
                             f"state.r, state.tau).{name}]")

    torch.testing.assert_close(torch.tensor([x for _, x in values("weight")]),
                               (s / tau).softmax(0).float(), rtol=1e-3, atol=1e-6)
    alpha, weight = dict(values("alpha")), dict(values("weight"))

    # Delete the first key of the table, add two copies of the second.
    page.point("#competition tbody tr:nth-child(1) .key button", click=True)
    for _ in range(2):
        page.point("#competition tbody tr:nth-child(2) .copies button:last-child", click=True)
    copies = dict(page.evaluate("[...state.copies]"))
    (gone, zero), (more, three) = copies.items()
    assert (zero, three) == (0, 3)
    assert page.evaluate("document.querySelectorAll('#competition tr.deleted').length") == 1
    kept = [j for j in range(len(s)) if j != gone] + [more, more]
    expected = (s[kept] / tau).softmax(0)
    after = dict(values("weight"))
    assert gone not in after
    for n, j in enumerate(kept):
        assert after[j] == pytest.approx(expected[n].item(), rel=2e-3, abs=1e-6)
        assert after[j] != weight[j]
    assert dict(values("alpha")) == {j: a for j, a in alpha.items() if j != gone}      # same bits
    moved = page.evaluate("[$('screening-numbers').textContent, $('softmax-numbers').textContent]")
    assert moved[0].endswith("Largest change of an untouched key: 0.")
    assert not moved[1].endswith("Largest change of an untouched key: 0.")
    total = alphas[kept].sum().item()
    shown = float(moved[0].split(",")[0].removeprefix("Sum "))
    assert shown == pytest.approx(total, abs=2e-3)

    # Change the temperature, click in a chart, show all keys again.
    page.evaluate("$('tau').focus()")
    page.press("Home")
    assert page.evaluate("$('tau-now').textContent") == "0.010"
    page.point("#restore", click=True)
    assert dict(values("alpha")) == alpha
    page.point("#softmax-chart", click=True)
    assert page.evaluate("[...state.copies.values()]") == [0]


def test_an_edited_equation_is_reported_on_the_page(show, model, tmp_path, monkeypatch):
    """The text needs escaping, and has a character of two bytes."""
    monkeypatch.setattr(multiscreen, "trim", lambda s, r: (1 + (s - 1) / r).relu())
    text = "</script><!-- é &amp; \\ PLAYGROUND_DATA"
    page = show(make_page(tmp_path / "edited.html", model, text))
    assert page.evaluate("$('warning').hidden") is False
    assert "course/playground/model.js" in page.evaluate("$('warning').textContent")
    assert page.evaluate("$('typing').value") == text
    assert page.evaluate("$('text').textContent") == text.replace("é", "\\xc3\\xa9")


# ---------------------------------------------------------------------------- the bundled model

PROMPT = prompt(200)
TEXTS = [PROMPT, PROMPT.replace("R=89\n", ""), prompt(300), PROMPT[60:] + "8", "R=12\nR=", "A",
         playground.SCREENING[:200], "naïve café, 漢字\n" * 5, "=" * 150, " ".join(PROMPT[:60])]


@pytest.fixture(scope="module")
def bundled(tmp_path_factory):
    """(the bundled model, whose matrices are 16-bit numbers, and the path of its page)"""
    model = load_checkpoint(ROOT / playground.MODEL)[0]
    return model, make_page(tmp_path_factory.mktemp("bundled") / "p.html", model, PROMPT)


@pytest.fixture
def real(show, bundled):
    """The browser with the bundled model's page freshly opened."""
    return show(bundled[1])


def test_the_bundled_model_in_the_page_is_pytorchs(real, bundled):
    """Logits of every token, up to 118, and relevances of the last, from one text to the next."""
    for text in TEXTS:
        tokens = torch.tensor([list(text.encode())])
        found = real.evaluate(f"""(() => {{
            setText({json.dumps(text)});
            return [model.tokens.map((_, i) => model.logits(i)),
                    model.tiles.map((tile) => [...tile.alpha.at(-1)])]; }})()""")
        with torch.no_grad():
            z = bundled[0](tokens)[0]
            maps = torch.cat([layer[0, :, -1] for layer in bundled[0].relevance_maps(tokens)])
        for seen, expected in zip(found, (z, maps)):
            seen = torch.tensor(seen, dtype=torch.float32)
            torch.testing.assert_close(seen, expected, rtol=0, atol=1e-3)


def test_without_the_needle_screening_finds_nothing_and_softmax_must_answer(real):
    """The sentences, above the fold, agree with the finder's similarities."""
    def says():
        return real.evaluate("['answer', 'screening-says', 'softmax-says', 'delete'].map((id) => "
                             "$(id).textContent)")

    def weigh():
        """The number whose first digits get the largest weight, and that weight."""
        s = real.evaluate("[...model.tiles[state.finder].s.at(-1)]")
        weights = (torch.tensor(s, dtype=torch.float64) / 0.1).softmax(0)
        found = Counter()
        for line in re.finditer(r"=(\d\d)\n", real.evaluate("$('typing').value")):
            found[line[1]] += weights[line.start(1)].item()
        return found.most_common(1)[0]

    assert real.evaluate("$('softmax-says').getBoundingClientRect().bottom < innerHeight")
    answer, screening, softmax, button = says()
    assert "R=89, is the needle. The model answers “89”, the first character" in answer
    assert "accepts 1 of 197 characters: “8” at 57, relevance 0.8" in screening
    assert weigh()[0] == "89"
    assert f"gives “89” a weight of {weigh()[1]:.3f}, and divides" in softmax
    assert button == "Delete the needle"
    real.point("#delete", click=True)
    answer, screening, softmax, button = says()
    assert real.evaluate("$('typing').value") == PROMPT.replace("R=89\n", "")
    assert "No line has it." in answer
    assert "finds nothing and says so: all 192 characters have relevance 0, and" in screening
    other, weight = weigh()
    assert (f"must still choose: it gives “{other}” a weight of {weight:.3f}, and "
            f"divides {1 - weight:.3f} among the rest") in softmax
    real.point("#delete", click=True)
    assert real.evaluate("$('typing').value") == PROMPT
    assert says()[3] == "Delete the needle"

    # With one more letter after the question, the needle can still be deleted.
    real.evaluate(f"setText({json.dumps(PROMPT + '8')})")
    assert says()[3] == "Delete the needle"
    real.point("#delete", click=True)
    assert real.evaluate("$('typing').value") == PROMPT.replace("R=89\n", "") + "8"
    assert says()[3] == "Put the first text back"
