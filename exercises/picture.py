"""Draw loads.svg: the keys that a program of part 4's forward kernel loads, and the rows it stores.

python -m exercises.picture
"""
import math
from pathlib import Path

T = S = 128
BI, BJ, W, PROGRAM = 32, 16, 20, 2
SIZE, LEFT, TOP = 2.5, 150, 92                         # pixels of a pair, and margins
STYLE = """
text { font: 13px sans-serif; fill: currentColor }
.line { stroke: currentColor; stroke-opacity: .45; fill: none }
.pair { fill: #8a8a8a; fill-opacity: .45 }
.load { fill: #1f77b4; fill-opacity: .35; stroke: #1f77b4 }
.store { fill: #d97706; fill-opacity: .45; stroke: #d97706 }
svg { color: #24292f }
@media (prefers-color-scheme: dark) { svg { color: #e6edf3 } }
"""


def box(kind, x, y, width, height):
    return f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}"/>'


def text(x, y, words, anchor="start"):
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{words}</text>'


def draw():
    right, bottom = LEFT + S * SIZE, TOP + T * SIZE
    out = right + 90

    # The pairs inside the window: a band below the diagonal.
    corners = [(0, 0), (T, T), (T - W, T), (0, W)]
    band = " ".join(f"{LEFT + j * SIZE},{TOP + i * SIZE}" for j, i in corners)
    parts = [f'<polygon class="pair" points="{band}"/>']

    # The grid of blocks.
    for t in range(0, T + 1, BI):
        parts.append(f'<path class="line" d="M{LEFT} {TOP + t * SIZE}H{right}"/>')
    for j in range(0, S + 1, BJ):
        parts.append(f'<path class="line" d="M{LEFT + j * SIZE} {TOP}V{bottom}"/>')

    # What one program does.
    i = PROGRAM * BI
    lo, hi = max(i - math.ceil(W) + 1, 0) // BJ * BJ, min(i + BI, S)
    y, height = TOP + i * SIZE, BI * SIZE
    parts += [box("load", LEFT - 34, y, 20, height), text(LEFT - 42, y + 42, "loads Q", "end"),
              text(LEFT - 42, y + 58, "once", "end"),
              text(LEFT - 42, y + 15, f"program {PROGRAM}", "end"),
              box("store", out, y, 80, height), text(out + 40, y + 40, "stores", "middle"),
              text(out + 40, y + 58, "OUT", "middle"),
              text(out - 45, y + 45, "h += ..", "middle")]
    for n, j in enumerate(range(lo, hi, BJ)):
        x = LEFT + j * SIZE
        parts += [box("load", x, TOP - 46, BJ * SIZE, 20), box("load", x, y, BJ * SIZE, height),
                  text(x + BJ * SIZE / 2, y + 45, f"{n + 1}", "middle")]
    parts += [text(LEFT + lo * SIZE, TOP - 8, f"lo = {lo}"),
              text(LEFT + hi * SIZE, TOP - 8, f"hi = {hi}"),
              text(LEFT + lo * SIZE, TOP - 56, "loads a block of K_ and of V_ in each step"),
              text(LEFT, bottom + 20, f"keys, {BJ} a block"),
              text(LEFT, bottom + 38, f"grey: pairs inside the window, w = {W}"),
              text(LEFT - 8, TOP + 14, f"queries, {BI} a block", "end")]
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 20 {out + 100} {bottom + 30}" '
            f'width="{out + 100}"><style>{STYLE}</style>\n' + "\n".join(parts) + "\n</svg>\n")


if __name__ == "__main__":
    Path(__file__).with_name("loads.svg").write_text(draw())
