"""Tests of playground/: the numbers of its page, and a hand on it in a Chromium."""
import json

import numpy as np
import pytest
import torch

import multiscreen
from multiscreen import relevance, screen, softmask, trim
from playground import __main__ as playground
from playground.data import (choose_tile, find_needle, page_data, round_matrices,
                             round_similarities)
from support.checkpoint import load_checkpoint
from support.cli import UsageError
from support.tokens import get_tokenizer
from tests.browser import CHROMIUM, Browser
from tests.helpers import INF, ROOT, fit, random, small

UNIT = 1 / 32767
BYTES = get_tokenizer("bytes")


@pytest.fixture(scope="module")
def model():
    """Six tiles far from their initial values; one window has no edge."""
    return small(4, far=True, vocab_size=257, N_L=2)


def prompt(n_tokens, digits=2):
    """An ABCDigits prompt in bytes."""
    ckpt = {"args": {"data": ["abcdigits"], "digits": digits}}
    return playground.default_text(ckpt, BYTES, n_tokens).encode()


def bytes_of(text):
    """The bytes of a text, one by one."""
    return [bytes([b]) for b in text]


def make_page(path, model, tokens):
    """A page about a model that looks at tokens."""
    data = page_data(model, BYTES, list(tokens))
    playground.write_page(path, data | {"step": 0})
    return data


# ------------------------------------------------------------------------------- without a page

@pytest.mark.parametrize("pieces, found", [
    (bytes_of(b"A=12\nB=34\nA="), ("A", "12", [0, 1, 2, 3])),
    (bytes_of(b"A=12\nA=13\nA="), ("A", "12", [0, 1, 2, 3, 5, 6, 7, 8])),
    ([b"B=3", b"4\nA", b"=12\n", b"A="], ("A", "12", [1, 2])),
    (bytes_of(b"A=12\nB="), None), (bytes_of(b"A=12\nA=1"), None), ([], None)])
def test_the_needles_line_is_found_in_an_abcdigits_prompt(pieces, found):
    assert find_needle(pieces) == found


def test_rounding_keeps_each_similarity_on_its_side_of_the_threshold():
    s = torch.rand(4, 300, 300, generator=random(0)) * 2 - 1
    r = torch.tensor([1e-6, 0.029, 0.5, 1.0])
    for n in range(4):                                 # every unit near the threshold
        s[n, 0] = 1 - r[n] + torch.linspace(-3 * UNIT, 3 * UNIT, 300)
    s = s.clamp(-1, 1)
    rounded = round_similarities(s, r).double() * UNIT
    assert ((rounded - s).abs() <= 1.51 * UNIT).all()
    accepted = trim(rounded, r.double()[:, None, None]) > 0
    assert torch.equal(accepted, trim(s, r[:, None, None]) > 0)


def test_the_first_tile_is_the_one_that_finds_the_needle_or_looks_back_farthest():
    maps = np.zeros((3, 5, 5))
    maps[0, 4, 4] = maps[0, 3, 1] = 1
    maps[1, 4, 1] = 0.2
    maps[2, 4, 0] = 0.9
    assert choose_tile(maps, [1, 2]) == 1
    assert choose_tile(maps, None) == 2


def test_the_text_is_a_prompt_for_a_retrieval_model_only():
    assert len(prompt(200)) == 40 * 5 - 3              # 40 lines, without "89" and a newline
    assert find_needle(bytes_of(prompt(200)))
    assert len(prompt(100, digits=6)) == 27 * 9 - 7
    ckpt = {"args": {"data": ["books"], "digits": 2}}
    assert playground.default_text(ckpt, BYTES, 200) is playground.SCREENING
    assert playground.SCREENING.startswith("Softmax attention divides")


def test_a_page_is_written_and_written_again(tmp_path, capsys):
    fit(tmp_path / "m", "--data", "abcdigits", "--digits", "2", "--steps", "1")
    page = tmp_path / "new/p.html"
    flags = ["--ckpt", str(tmp_path / "m/ckpt.pt"), "--device", "cpu", "--out", str(page)]
    playground.main(flags)
    assert playground.MARKERS[1] not in page.read_text()
    assert '"needle": {"letter": "R", "number": "89", "positions": [55, 56, 57, 58]' in (
        page.read_text())
    assert "197 of the text's 197 tokens (bytes)" in capsys.readouterr().out
    playground.main([*flags, "--text", "screening", "--tokens", "6"])
    assert '"needle": null' in page.read_text()
    assert "6 of the text's 9 tokens (bytes)" in capsys.readouterr().out
    for wrong in (["--tokens", "0"], ["--tokens", "1001"], ["--text", ""]):
        with pytest.raises(UsageError, match="from 1 to 1000, and --text not empty"):
            playground.main([*flags, *wrong])
    with pytest.raises(UsageError, match="name a page, .html"):
        playground.main([*flags[:-1], str(tmp_path / "m/ckpt.pt")])


# -------------------------------------------------------------------------------- in a Chromium

@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """One browser for all tests. At the end it has asked for nothing but files of these tests."""
    if not CHROMIUM:
        pytest.skip("chromium is not installed: apt-get install chromium")
    found = Browser(tmp_path_factory.mktemp("profile"))
    yield found
    found.close()


@pytest.fixture(scope="module")
def made(model, tmp_path_factory):
    """The path of a page: the model looks at a prompt."""
    path = tmp_path_factory.mktemp("page") / "p.html"
    make_page(path, model, prompt(135))
    return path


@pytest.fixture
def page(browser, made):
    """The browser with the page just opened. After the test: no error, no request."""
    browser.events.clear()
    browser.look(1400, 1000, "light")
    browser.open(made)
    yield browser
    assert complaints(browser.events, made) == []


def complaints(events, path):
    """Errors on the console, and what was asked for beside the page itself."""
    found = []
    for event in events:
        what, about = event.get("method"), event.get("params", {})
        if what in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
            found.append(event)
        elif what == "Network.requestWillBeSent":
            url = about["request"]["url"]
            if url != path.as_uri() and not url.startswith("data:"):
                found.append(url)
    return found


@pytest.fixture(scope="module")
def seen(model):
    """What PyTorch computes for the page: (q, k, v, w, r) of all tiles, in float32."""
    layers = []

    def record(q, k, v, w, r, i0):
        layers.append((q[0], k[0], v[0], w, r))
        return screen(q, k, v, w, r, i0)

    with torch.no_grad():
        model.through_layers(torch.tensor([list(prompt(135))]), None, record)
    return tuple(torch.cat(parts) for parts in zip(*layers))


def in_page(x):
    """A number for JavaScript."""
    return "Infinity" if x == INF else repr(float(x))


def test_the_numbers_of_the_page_are_pytorchs(page, seen):
    q, k, v, w, r = seen
    T = q.shape[1]
    assert T == 27 * 5 - 3
    assert (w == INF).any()
    assert page.evaluate("DATA.pieces.length") == T
    assert page.evaluate("$('warning').hidden")
    maps = relevance(q[None], k[None], w, r)[0]
    inside = softmask(torch.arange(T) - torch.arange(T)[:, None], w[:, None, None]) > 0
    h = screen(q[None], k[None], v[None], w, r)[0]
    for n in range(len(w)):
        found = page.evaluate(f"""(() => {{
            const w = LEARNED_W[{n}], r = DATA.r[{n}], rows = [];
            for (let i = 0; i < T; i++) {{
              const row = [];
              for (let j = 0; j < T; j++) row.push(j > i ? 0 : relevance({n}, i, j, w, r));
              rows.push(row);
            }}
            const at = [...Array(T).keys()].map((i) => summarize({n}, i, w, r));
            return {{w: String(w), r, rows, h: at.map((x) => x.h), alive: at[0].alive,
                     accepted: at.map((x) => x.accepted), shown: DATA.alive[{n}]}}; }})()""")
        assert float(found["w"].replace("Infinity", "inf")) == w[n]
        assert found["r"] == r[n]
        limit = 3 * UNIT / r[n].item() + 1e-5
        rows = torch.tensor(found["rows"])
        torch.testing.assert_close(rows, maps[n], rtol=0, atol=limit)
        assert torch.equal(rows > 0, maps[n] > 0)      # not one key too many or too few
        assert found["accepted"] == (maps[n] > 0).sum(1).tolist()
        assert found["alive"] == found["shown"]
        assert found["alive"] == (maps[n] > 0)[inside[n]].double().mean()
        torch.testing.assert_close(torch.tensor(found["h"]), h[n].norm(dim=-1), rtol=0.02,
                                   atol=0.01)


@pytest.mark.parametrize("w, r", [(1.0, 0.5), (9.0, 1.0), (9.0002, 1.0), (40.0, 0.05), (INF, 0.3)])
def test_other_values_of_the_sliders_are_pytorchs_too(page, seen, w, r):
    """With w = 9.0002 the cosine at distance 9 is -1 in float32: a relevance of exactly 0."""
    q, k, _, _, _ = seen
    w_all, r_all = torch.full((len(q),), w), torch.full((len(q),), r)
    maps = relevance(q[None], k[None], w_all, r_all)[0]
    for n in (0, 4):
        found = page.evaluate(f"[...Array(T).keys()].map((j) => relevance({n}, T - 1, j, "
                              f"{in_page(w)}, {in_page(r)}))")
        found = torch.tensor(found)
        torch.testing.assert_close(found, maps[n, -1], rtol=0, atol=3 * UNIT / r + 1e-5)
        assert torch.equal(found > 0, maps[n, -1] > 0)


def test_pointing_at_a_token_makes_it_the_query_and_a_click_pins_it(page):
    def reading():
        return page.evaluate("$('reading').textContent")

    last = page.evaluate("T - 1")
    assert reading().startswith(f"Query {last}, “=”: ")

    # A window of 30 keys, of which the ten least similar are rejected.
    s = page.evaluate("[...Array(61).keys()].map((j) => similarity(state.tile, 60, j))")
    r = 1 - sorted(s[31:])[9]
    page.evaluate(f"state.w = 30; state.r = {r}; showTile()")
    page.point("[data-j='60']")
    assert reading().startswith("Query 60, ")
    kinds = []
    for j in range(61):
        alpha = page.evaluate(f"relevance(state.tile, 60, {j}, 30, {r})")
        inside = "rejected" if alpha == 0 else "accepted small" if alpha < 0.01 else "accepted"
        kinds.append(f"token {inside if 60 - j < 30 else 'outside'}")
    assert {kind.removeprefix("token ") for kind in kinds} == {
        "outside", "rejected", "accepted small", "accepted"}
    kinds[60] += " query"
    found = page.evaluate("spans.map((span) => span.className.replace(' newline', ''))")
    assert found == kinds + ["token future"] * (last - 60)

    # The mouse goes: the pinned query is back. A click, then keys.
    page.point("h1")
    assert reading().startswith(f"Query {last}, ")
    page.point("[data-j='60']", click=True)
    page.point("h1")
    assert reading().startswith("Query 60, ")
    page.evaluate("$('text').focus()")
    for key, query in (("ArrowLeft", 59), ("ArrowDown", 64), ("ArrowUp", 59), ("Home", 0),
                       ("ArrowLeft", 0), ("End", last), ("ArrowRight", last)):
        page.press(key)
        assert reading().startswith(f"Query {query}, "), key


def test_a_slider_moves_the_map_the_keys_and_the_sum_at_once(page):
    def look():
        return page.evaluate("""[state.w, state.r, $("w-now").textContent, $("r-now").textContent,
            bigMap.toDataURL(), $("map").toDataURL(), $("numbers").textContent,
            spans.map((s) => s.className + s.style.background).join()]""")

    page.evaluate("chooseTile(LEARNED_W.findIndex((w) => w > 3 && w < 60))")
    before = look()
    page.evaluate("$('w').focus()")
    for _ in range(60):
        page.press("ArrowRight")
    wider = look()
    assert wider[0] > before[0]
    assert wider[1] == before[1]
    assert all(a != b for a, b in zip(wider[4:], before[4:]))
    page.evaluate("$('r').focus()")
    page.press("Home")
    narrow = look()
    assert narrow[1] == pytest.approx(1e-6)
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
        return page.evaluate(f"[...compete(state.tile, T - 1, state.copies, state.w, state.r, "
                             f"state.tau).{name}]")

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
    assert shown == pytest.approx(total, abs=2e-3 + 3 * UNIT / r[tile].item())

    # The temperature, a click in a chart, and all keys again.
    page.evaluate("$('tau').focus()")
    page.press("Home")
    assert page.evaluate("$('tau-now').textContent") == "0.010"
    page.point("#restore", click=True)
    assert dict(values("alpha")) == alpha
    page.point("#softmax-chart", click=True)
    assert page.evaluate("[...state.copies.values()]") == [0]


def test_the_page_begins_with_the_needle_and_maps_choose_another_tile(page, seen):
    q, k, _, w, r = seen
    data = page.evaluate("[DATA.chosen, DATA.needle.positions, state.tile]")
    maps = relevance(q[None], k[None], w, r)[0]
    assert data[0] == data[2] == maps[:, -1, data[1]].sum(1).argmax()
    assert page.evaluate("$('needle-line').textContent").startswith("The text asks for ")
    lit = "document.querySelectorAll('.needle.lit').length"
    assert page.evaluate(lit) == 1
    page.evaluate("$('r').value = 1; $('r').oninput()")
    assert page.evaluate(lit) == 0
    other = (data[0] + 1) % len(w)
    page.point(f"#maps button:nth-child({other + 1})", click=True)
    layer, tile = divmod(other, 3)
    assert page.evaluate("$('tile-name').textContent").startswith(
        f"Layer {layer + 1}, tile {tile + 1}: ")
    assert page.evaluate("[state.w, state.r].join() === "
                         "[LEARNED_W[state.tile], DATA.r[state.tile]].join()")
    page.evaluate("$('maps').children[0].focus()")
    page.press("ArrowRight")
    assert page.evaluate("[state.tile, document.activeElement === $('maps').children[1]]") == [
        1, True]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_page_fits_a_phone_and_takes_a_tap(page, theme):
    page.look(360, 800, theme, phone=True)
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    assert page.evaluate("color('--paper')") == {"light": "#ffffff", "dark": "#14161a"}[theme]
    assert page.evaluate("$('map').clientWidth") > 300
    page.tap("[data-j='20']")
    assert page.evaluate("[state.query, state.pinned]") == [20, 20]


def test_an_edited_equation_is_told_on_the_page(browser, model, tmp_path, monkeypatch):
    """Its text holds what must be escaped, and what is no character."""
    monkeypatch.setattr(multiscreen, "trim", lambda s, r: (1 + (s - 1) / r).relu())
    tokens = [*b"</script><!-- \xe9 &amp; \\", *"é".encode()]
    path = tmp_path / "edited.html"
    data = make_page(path, model, tokens)
    browser.events.clear()
    browser.open(path)
    assert browser.evaluate("$('warning').hidden") is False
    assert "playground/page.html" in browser.evaluate("$('warning').textContent")
    pieces = [chr(t) for t in tokens]
    pieces[14], pieces[-2:] = "\\xe9", ["\\xc3", "\\xa9"]
    assert browser.evaluate("DATA.pieces") == pieces == json.loads(json.dumps(data["pieces"]))
    assert complaints(browser.events, path) == []


# Ten texts: prompts with the needle at ten depths, without one, prose, other scripts, one letter.
PROMPT = prompt(200).decode()
TEXTS = [PROMPT, PROMPT.replace("R=89\n", ""), prompt(600).decode(), PROMPT[60:] + "8", "R=12\nR=",
         "A", playground.SCREENING, "naïve café, 漢字\n" * 5, "=" * 150, " ".join(PROMPT)]


def test_the_bundled_model_in_the_page_is_pytorchs(browser, tmp_path):
    """Logits of every token and relevances of the last, of ten texts."""
    model = load_checkpoint(ROOT / playground.MODEL)[0]
    round_matrices(model)
    make_page(tmp_path / "p.html", model, b"A")
    browser.open(tmp_path / "p.html")
    browser.evaluate("model = new Model(DATA.model)")
    for text in TEXTS:
        tokens = torch.tensor([list(text.encode())])
        found = browser.evaluate(f"""(() => {{
            model.read({tokens[0].tolist()});
            return [model.tokens.map((_, i) => model.logits(i)),
                    model.tiles.map((tile) => [...tile.alpha.at(-1)])]; }})()""")
        with torch.no_grad():
            z = model(tokens)[0]
            maps = torch.cat([layer[0] for layer in model.relevance_maps(tokens)])
        for seen, expected in zip(found, (z, maps[:, -1])):
            seen = torch.tensor(seen, dtype=torch.float32)
            torch.testing.assert_close(seen, expected, rtol=0, atol=1e-3)
