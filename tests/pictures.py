"""The README's two pictures of the playground's page, taken in a Chromium.

    python -m tests.pictures
"""
import tempfile
from pathlib import Path

from tests.browser import CHROMIUM, Browser
from tests.helpers import ROOT, run

FIGURES = ROOT / "playground/figures"
PAGE_WIDTH = 1000


def take(page, path, first, height):
    """The page from the top of the element `first` on, as wide as the window."""
    y = page.evaluate(f"document.querySelector('{first}').getBoundingClientRect().y + scrollY - 16")
    page.screenshot(path, clip={"x": 0, "y": max(y, 0), "width": PAGE_WIDTH, "height": height,
                                "scale": 1})


def main():
    if not CHROMIUM:
        raise SystemExit("error: these pictures need Debian's package chromium")
    with tempfile.TemporaryDirectory() as folder:
        html = Path(folder) / "playground.html"
        run("-m", "playground", "--out", html, check=True)
        page = Browser(folder)
        page.look(PAGE_WIDTH, 900, "light")
        page.open(html)
        take(page, FIGURES / "page.png", "h1",
             page.evaluate("document.querySelector('#tiles-head').getBoundingClientRect().y - 8"))

        # Five copies of the fourth key, none of the fifth.
        page.look(PAGE_WIDTH, 900, "dark")
        for _ in range(4):
            page.point("#competition tbody tr:nth-child(4) .copies button:last-child", click=True)
        page.point("#competition tbody tr:nth-child(5) .key button", click=True)
        page.point("h1")
        take(page, FIGURES / "competition.png", "#competition-head", 770)
        for name in ("answer", "screening-says", "softmax-says", "reading", "screening-numbers",
                     "softmax-numbers"):
            print(page.evaluate(f"document.getElementById('{name}').textContent"))
        page.close()


if __name__ == "__main__":
    main()
