"""Draws one gated screening tile, Eqs. 4 to 18, as docs/tile.svg. On any machine:

python -m experiments.tile
"""
import math

from support.cli import Parser, cli

STYLE = """
text { font: 13px sans-serif; fill: currentColor }
.small { font-size: 11px }
.line { stroke: currentColor; fill: none; marker-end: url(#tip) }
.box { stroke: currentColor; fill: none; rx: 4px }
.grid { stroke: currentColor; stroke-opacity: .25; fill: none }
.seen { fill: #0072b2; stroke: none }
svg { color: #24292f }
@media (prefers-color-scheme: dark) { svg { color: #e6edf3 } .seen { fill: #56b4e9 } }
"""
TIP = ('<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
       'orient="auto"><path d="M0 0L8 4L0 8" fill="currentColor"/></marker>')
N, CELL = 14, 10                                       # of the map: queries, and pixels a pair
ACCEPTED = {0: 0.5, 3: 1.0, 5: 0.8, 9: 0.6}            # a key with a match: how well it matches
WINDOW = 6.0


def box(x, y, width, *lines):
    """A box around words, 22 pixels per line; y is its middle."""
    height = 22 * len(lines)
    parts = [f'<rect class="box" x="{x}" y="{y - height / 2}" width="{width}" height="{height}"/>']
    for n, words in enumerate(lines):
        parts.append(text(x + width / 2, y - height / 2 + 22 * n + 15, words, "middle"))
    return "".join(parts)


def text(x, y, words, anchor="start", kind=""):
    return f'<text class="{kind}" x="{x}" y="{y}" text-anchor="{anchor}">{words}</text>'


def arrow(*points):
    """A line through the points, with a tip at its end."""
    return '<path class="line" d="M' + "L".join(f"{x} {y}" for x, y in points) + '"/>'


def relevances(x, y):
    """A map of alpha^d: few keys are accepted, and none beyond the window."""
    parts = [f'<path class="grid" d="M{x} {y}V{y + N * CELL}H{x + N * CELL}Z"/>']
    for j, alpha in ACCEPTED.items():
        for i in range(j, N):
            if (i * 5 + j) % 3 == 0 and i - j < WINDOW:
                m = 0.5 * (math.cos(math.pi * (i - j) / WINDOW) + 1)
                parts.append(f'<rect class="seen" x="{x + j * CELL}" y="{y + i * CELL}" '
                             f'width="{CELL}" height="{CELL}" fill-opacity="{alpha * m:.2f}"/>')
    return "".join(parts)


def draw():
    rows = {"q": 45, "k": 85, "v": 240, "g": 290}
    parts = [text(12, 169, "x"), text(12, 186, "(T, d_E)", kind="small")]
    for name, y in rows.items():
        words = "g = x W_G" if name == "g" else f"{name} = unit(x W_{name.upper()})"
        parts += [arrow((28, 165), (70, 165), (70, y), (88, y)), box(90, y, 118, words)]

    # The relevances of all pairs of a query and a key.
    parts += [box(232, 65, 74, "MiPE:", "turn q, k"), arrow((208, 45), (230, 58)),
              arrow((208, 85), (230, 72)), arrow((306, 65), (328, 65)),
              box(330, 65, 62, "s = q.k"), arrow((392, 65), (448, 65)),
              relevances(454, 30), text(454, 22, "alpha^d = Trim(s) Softmask(j - i)"),
              text(530, 62, "no colour: exactly 0", kind="small"),
              text(448, 104, "query i", "end", "small"),
              text(524, 184, "key j", "middle", "small")]

    # What is seen, bounded, gated, and added.
    parts += [arrow((208, 240), (666, 240), (666, 122)), arrow((594, 110), (616, 110)),
              box(618, 110, 96, "h = alpha^d v"), arrow((714, 110), (734, 110)),
              box(736, 110, 118, "u = TanhNorm(h)"), arrow((795, 121), (795, 178)),
              box(718, 290, 154, "g_hat = tanh(SiLU(g))"), arrow((208, 290), (716, 290)),
              arrow((795, 279), (795, 202)), box(750, 190, 90, "u * g_hat"),
              arrow((840, 190), (862, 190)), box(864, 190, 86, "e^s_O W_O"),
              arrow((950, 190), (968, 190)), text(972, 194, "added to x")]
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1044 320" width="1044">'
            f"<style>{STYLE}</style><defs>{TIP}</defs>\n" + "\n".join(parts) + "\n</svg>\n")


def main(argv=None):
    parser = Parser(description=__doc__)
    parser.add_argument("--out", default="docs/tile.svg")
    flags = parser.parse_args(argv)
    with open(flags.out, "w") as file:
        file.write(draw())


if __name__ == "__main__":
    cli(main)
