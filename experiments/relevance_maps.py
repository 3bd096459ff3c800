"""What every tile looks at in one text: the maps alpha_d.

Appendix "Visualization of Distance-Aware Relevance".

Paper:  python -m experiments.relevance_maps --text "The abstract of the paper .." \\
            --ckpt out/scaling_paper/multiscreen_psi8-0/ckpt.pt
        psi = 8 with GPT-2's tokens, 203 of them.
Small:  python -m experiments.relevance_maps --ckpt out/ckpt.pt
        10 seconds. 203 tokens of a text of ours. What it leaves out: with bytes for tokens this is
        two sentences instead of a passage.

A row of the grid is a layer, a column the n-th tile of each. In a map, queries i go down and keys j
to the right. Dark gray: outside the window, or in the future. White: inside it, and exactly 0. Pr
is the share of the pairs inside the window with alpha_d > 0. Most windows are short: so
relevance_by_distance.png has i down and the distance i - j to the right, up to the window, and one
map with its characters. The paper prints no numbers for its figure. It says: many maps have a
substantial number of zeros, more in some tiles.
"""
if not __package__:
    raise SystemExit("error: run python -m experiments.relevance_maps in the folder above")

from pathlib import Path

import torch

from experiments.common import pyplot, report, save_figure
from experiments.maps import alive, draw_distances, draw_maps
from multiscreen import window
from support.checkpoint import load_for_evaluation, require_windows
from support.cli import Parser, UsageError, check_writable, cli

TEXT = (
    "Softmax attention hands out a fixed amount of weight, so a key can only win what "
    "another key loses. Screening asks every\n"
    "key the same question: are you similar enough to the query, and near enough? A key that "
    "fails is dropped, its relevance is\n"
    "exactly zero, whatever the others are worth. A key that passes is counted at its own "
    "value, and nobody else pays for it. If\n"
    "all keys fail, the sum is zero, and this is an answer too: nothing here is relevant. "
    "How similar is enough and how near is\n"
    "enough are learned, one pair of numbers for every tile. Some tiles look at the last few "
    "tokens only, others at everything\n"
    "that was ever said. Because a far key cannot take weight from a near one, a longer text "
    "does not blur what was seen before.\n"
)
COLUMNS = ["layer", "tile", "w", "r", "alive"]


@torch.no_grad()
def get_maps(model, tokens):
    """(maps (N_L, N_H, T, T), rows of COLUMNS for all tiles, counted from 1). tokens: (1, T)"""
    maps = torch.cat(model.relevance_maps(tokens)).float().cpu().numpy()
    rows = []
    for n, tile in enumerate(model.layers):
        widths = zip(window(tile.s_w).tolist(), tile.acceptance().tolist())
        for m, (w, r) in enumerate(widths):
            rows.append([n + 1, m + 1, w, r, alive(maps[n, m], w)])
    return maps, rows


def main():
    p = Parser(__doc__)
    p.add_argument("--text", default=TEXT, help="the text [six lines about screening]")
    p.add_argument("--tokens", type=int, default=203,
                   help="at most this many of its tokens; memory grows with their square [203]")
    p.add_shared("--ckpt", "--device", "--force")
    args = p.parse_args()
    if args.tokens < 1 or not args.text:
        raise UsageError("--tokens must be at least 1, and --text not empty")
    model, tokenizer, ckpt = load_for_evaluation(args.ckpt, args.device)
    require_windows(model, args.ckpt, ckpt["model"])
    table = Path(args.ckpt).with_name("relevance_maps.tsv")
    check_writable(table, args.force)

    tokens = tokenizer.encode_ordinary(args.text)
    shown = tokens[: args.tokens]
    print(f"{len(shown)} of the text's {len(tokens)} tokens ({tokenizer.name})", flush=True)
    maps, rows = get_maps(model, torch.tensor([shown], device=model.W_E.device))
    report(table, COLUMNS, rows,
           "Window w (tokens), acceptance width r, and alive = Pr(alpha_d > 0) inside the window, "
           f"{ckpt['model']} after {ckpt['step']} steps")
    if plt := pyplot():
        save_figure(draw_maps(plt, maps, rows), table.with_suffix(".png"))
        characters = [tokenizer.decode([token]).replace("\n", "\u21b5") for token in shown]
        save_figure(draw_distances(plt, maps, rows, characters),
                    table.with_name("relevance_by_distance.png"))


if __name__ == "__main__":
    cli(main)
