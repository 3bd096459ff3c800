"""One page to play with: the keys that each tile accepts, and what softmax would do with them.

    python -m experiments.playground --ckpt out-abc/ckpt.pt

Seconds. It writes one HTML file that needs no network. A model that was trained on ABCDigits gets a
prompt of that benchmark, and the page begins with the tile that finds the needle. Another model
gets the text of `experiments.relevance_maps`; --text takes one of yours.

The similarities are stored in 16 bits, the values in 8. From them the page computes relevances with
Trim and Softmask of its own, in JavaScript: see the script in playground.html. It compares them
with PyTorch's when it opens, and says so if an equation of multiscreen.py was changed.
"""
if not __package__:
    raise SystemExit("error: run python -m experiments.playground in the folder above")

import base64
import json
import math
import re
from pathlib import Path

import numpy as np
import torch

from abcdigits import generate_by_line_count
from experiments.relevance_maps import TEXT, get_maps
from multiscreen import trim
from support.checkpoint import load_for_evaluation, require_windows
from support.cli import Parser, UsageError, check_writable, cli

MODEL = "models/retrieval.pt"
PAGE = Path(__file__).with_suffix(".html")
MARKER = "PLAYGROUND_DATA"                             # in the page, once
MOST_TOKENS = 1000


# ---------------------------------------------------------------------------------- the text

def default_text(ckpt, tokenizer, n_tokens):
    """An ABCDigits prompt of about n_tokens for a model trained on them, otherwise TEXT."""
    if ckpt["args"]["data"] != ["abcdigits"]:
        return TEXT
    digits = ckpt["args"]["digits"]
    line = tokenizer.encode_ordinary(f"A={10 ** (digits - 1)}\n")
    n_lines = max(n_tokens // len(line), 27)           # the shortest prompt
    return generate_by_line_count(n_lines, 0.3, digits, 1)[0][:-digits]


def find_needle(pieces):
    """(letter, number, positions of its line's tokens) of an ABCDigits prompt, or None.

    pieces: the bytes of each token. A letter with several lines: the first number, all lines.
    """
    text = b"".join(pieces)
    question = re.search(rb"(?:^|\n)([A-Z])=$", text)
    lines = question and list(re.finditer(rb"^%b=(\d+)$" % question[1], text, re.MULTILINE))
    if not lines:
        return None
    ends = np.cumsum([len(piece) for piece in pieces])
    positions = []
    for line in lines:
        first, last = np.searchsorted(ends, [line.start(), line.end() - 1], side="right")
        positions += range(int(first), int(last) + 1)
    return question[1].decode(), lines[0][1].decode(), positions


# --------------------------------------------------------------------------------- the model

@torch.no_grad()
def record_screening(model, tokens):
    """What each layer hands to `screen` and gets back: a list of (q, k, v, r, h). tokens: (1, T)"""
    layers = []

    def record(q, k, v, w, r, i0):
        h = model.screen(q, k, v, w, r, i0)
        layers.append((q[0].float(), k[0].float(), v[0].float(), r, h[0].float()))
        return h

    x = model.embed(tokens)
    for tile in model.layers:
        x = tile(x, record)
    return layers


def round_similarities(s, r):
    """s in units of 1/32767, 16 bits; no rounding crosses the threshold of Trim. (H, T, T); r (H,)

    A similarity on the wrong side of 1 - r goes one unit back.
    """
    s, r = s.clamp(-1, 1), r[:, None, None]
    rounded = torch.round(s.double() * 32767)
    accepted = trim(s, r) > 0
    wrong = (trim(rounded / 32767, r.double()) > 0) != accepted
    step = torch.where(accepted, 1.0, -1.0)
    return torch.where(wrong, rounded + step, rounded).to(torch.int16)


def choose_tile(maps, needle):
    """The tile to begin with. maps: (tiles, T, T); needle: positions, or None.

    With a needle, the tile whose last query gives its line the largest relevance. Without one, the
    tile that looks back farthest: the largest sum of alpha_d times the distance.
    """
    if needle:
        return int(maps[:, -1, needle].sum(1).argmax())
    i = np.arange(maps.shape[1])
    return int((maps * (i[:, None] - i)).sum((1, 2)).argmax())


def pack(arrays, dtype):
    """Arrays of numbers one after the other, little-endian, as base64 text."""
    flat = np.concatenate([np.asarray(a).ravel() for a in arrays])
    return base64.b64encode(flat.astype(np.dtype(dtype).newbyteorder("<")).tobytes()).decode()


def get_data(model, tokenizer, tokens):
    """What the page gets, a dict for JSON. tokens: a list."""
    x = torch.tensor([tokens], device=model.W_E.device)
    pieces = tokenizer.decode_tokens_bytes(tokens)
    needle = find_needle(pieces)
    maps, rows = get_maps(model, x)
    maps = maps.reshape(-1, *maps.shape[2:])
    past = np.tril_indices(len(tokens))                # pairs (i, j <= i), row by row
    similarities, values, scales, lengths = [], [], [], []
    for q, k, v, r, h in record_screening(model, x):
        s = round_similarities(q @ k.mT, r).cpu().numpy()
        similarities.append(s[:, *past])
        scale = v.abs().amax((1, 2), keepdim=True).clamp_min(1e-12) / 127
        values.append((v / scale).round().cpu().numpy())
        scales += scale.flatten().tolist()
        lengths += h[:, -1].norm(dim=-1).tolist()
    data = {"pieces": [piece.decode(errors="backslashreplace") for piece in pieces],
            "tokenizer": tokenizer.name, "layers": model.config.N_L, "tiles": model.config.N_H,
            "w": [None if math.isinf(w) else w for _, _, w, _, _ in rows],     # JSON has no inf
            "r": [r for _, _, _, r, _ in rows], "alive": [share for *_, share in rows],
            "d_V": model.config.d_V, "similarities": pack(similarities, np.int16),
            "values": pack(values, np.int8), "value_scales": scales,
            "chosen": choose_tile(maps, needle and needle[2]), "needle": None,
            # PyTorch's numbers for the last query, for the page to compare with.
            "last_alpha_d": pack([maps[:, -1]], np.float32), "last_length": lengths}
    if needle:
        letter, number, positions = needle
        answer = model.generate(x, len(tokenizer.encode_ordinary(number)))[0].tolist()
        data["needle"] = {"letter": letter, "number": number, "positions": positions,
                          "answer": tokenizer.decode(answer)}
    return data


def write_page(path, data):
    """The page with its data in it. Escaped: no text can end the script element."""
    text = json.dumps(data, allow_nan=False).replace("<", "\\u003c")
    path.write_text(PAGE.read_text(encoding="utf-8").replace(MARKER, text), encoding="utf-8")


def main():
    p = Parser(__doc__)
    p.add_argument("--ckpt", help=f"checkpoint of train.py [{MODEL}]")
    p.add_argument("--text", help="the text [an ABCDigits prompt, or six lines about screening]")
    p.add_argument("--tokens", type=int, default=200, help="at most this many of its tokens; the "
                   "page grows with their square [200]")
    p.add_argument("--out", type=Path, default=Path("out/playground.html"),
                   help="the file to write [out/playground.html]")
    p.add_shared("--device", "--force")
    args = p.parse_args()
    if not 1 <= args.tokens <= MOST_TOKENS or args.text == "":
        raise UsageError(f"--tokens must be from 1 to {MOST_TOKENS}, and --text not empty")
    if args.ckpt is None and not Path(MODEL).exists():
        raise UsageError(f"{MODEL} does not exist: train a model first (python train.py --data "
                         "abcdigits ..., see the README) and name its checkpoint with --ckpt")
    ckpt_path = args.ckpt or MODEL
    model, tokenizer, ckpt = load_for_evaluation(ckpt_path, args.device)
    require_windows(model, ckpt_path, ckpt["model"])
    check_writable(args.out, args.force)

    text = args.text or default_text(ckpt, tokenizer, args.tokens)
    tokens = tokenizer.encode_ordinary(text)
    shown = tokens[: args.tokens] if args.text or text is TEXT else tokens
    print(f"{len(shown)} of the text's {len(tokens)} tokens ({tokenizer.name})", flush=True)
    data = get_data(model, tokenizer, shown)
    write_page(args.out, data | {"model": ckpt["model"], "step": ckpt["step"]})
    n, m = divmod(data["chosen"], data["tiles"])
    print(f"wrote {args.out}, {args.out.stat().st_size / 1e6:.1f} MB: open it in a browser; it "
          f"begins with layer {n + 1}, tile {m + 1}")


if __name__ == "__main__":
    cli(main)
