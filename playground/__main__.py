"""One page to play with: the keys that each tile accepts, and what softmax would do with them.

    python -m playground --ckpt out-abc/ckpt.pt

Seconds. It writes one HTML file that needs no network. A model trained on ABCDigits gets a prompt
of that benchmark, and the page begins with the tile that finds the needle. Another model gets a
text about screening; --text takes one of yours.

The similarities are stored in 16 bits, the values in 8. From them the page computes relevances with
Trim and Softmask of its own, in JavaScript: see the script in page.html. It compares them with
PyTorch's when it opens, and says so if an equation of multiscreen.py was changed.
"""
if not __package__:
    raise SystemExit("error: run python -m playground in the folder above")

import json
from pathlib import Path

import multiscreen
from abcdigits import generate_by_line_count
from playground.data import page_data, round_matrices
from support.checkpoint import load_for_evaluation, require_windows
from support.cli import Parser, UsageError, cli, replacing, require_file

MODEL = "models/retrieval.pt"
PAGE = Path(__file__).with_name("page.html")
SCRIPT = PAGE.with_name("model.js")
MARKERS = ("PLAYGROUND_SCRIPT", "PLAYGROUND_DATA")     # in the page, once
SCREENING = multiscreen.__doc__.split("\n\n")[1]       # what screening is
MOST_TOKENS = 1000


def default_text(ckpt, tokenizer, n_tokens):
    """An ABCDigits prompt of about n_tokens for a model trained on them, otherwise SCREENING."""
    if ckpt["args"]["data"] != ["abcdigits"]:
        return SCREENING
    digits = ckpt["args"]["digits"]
    line = tokenizer.encode_ordinary(f"A={10 ** (digits - 1)}\n")
    n_lines = max(n_tokens // len(line), 27)           # the shortest prompt
    return generate_by_line_count(n_lines, 0.3, digits, 1)[0][:-digits]


def write_page(path, data):
    """The page with the model's script and the data. Escaped: no text can end the element."""
    text = json.dumps(data, allow_nan=False).replace("<", "\\u003c")
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        page = PAGE.read_text(encoding="utf-8")
        page = page.replace(MARKERS[0], SCRIPT.read_text(encoding="utf-8"))
        file.write(page.replace(MARKERS[1], text).encode())


def main(argv=None):
    p = Parser(__doc__)
    p.add_argument("--ckpt", default=MODEL, help=f"checkpoint of train.py [{MODEL}]")
    p.add_argument("--text", help="the text [an ABCDigits prompt, or four lines about screening]")
    p.add_argument("--tokens", type=int, default=200, help="at most this many of its tokens, but "
                   "all of an ABCDigits prompt; the page grows with their square [200]")
    p.add_argument("--out", type=Path, default=Path("out/playground.html"),
                   help="the file to write [out/playground.html]")
    p.add_shared("--device")
    args = p.parse_args(argv)
    if not 1 <= args.tokens <= MOST_TOKENS or args.text == "":
        raise UsageError(f"--tokens must be from 1 to {MOST_TOKENS}, and --text not empty")
    if args.out.suffix != ".html":
        raise UsageError(f"--out {args.out}: name a page, .html")
    require_file(args.out)
    model, tokenizer, ckpt = load_for_evaluation(args.ckpt, args.device)
    require_windows(model, args.ckpt, ckpt["model"])

    round_matrices(model)
    text = args.text or default_text(ckpt, tokenizer, args.tokens)
    tokens = tokenizer.encode_ordinary(text)
    shown = tokens[: args.tokens] if args.text or text is SCREENING else tokens
    print(f"{len(shown)} of the text's {len(tokens)} tokens ({tokenizer.name})", flush=True)
    data = page_data(model, tokenizer, shown)
    write_page(args.out, data | {"step": ckpt["step"]})
    layer, tile = divmod(data["chosen"], data["tiles"])
    print(f"wrote {args.out}, {args.out.stat().st_size / 1e6:.1f} MB: open it in a browser; it "
          f"begins with layer {layer + 1}, tile {tile + 1}")


if __name__ == "__main__":
    cli(main)
