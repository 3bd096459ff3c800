"""The README's picture of the playground's page, taken in a Chromium.

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
        raise SystemExit("error: this picture needs Debian's package chromium")
    with tempfile.TemporaryDirectory() as folder:
        html = Path(folder) / "playground.html"
        run("-m", "playground", "--out", html, check=True)
        page = Browser(folder)
        page.look(PAGE_WIDTH, 900, "light")
        page.open(html)
        end = page.evaluate("document.getElementById('sliders-head').getBoundingClientRect().y")
        take(page, FIGURES / "page.png", "h1", end - 20)
        page.close()


if __name__ == "__main__":
    main()
