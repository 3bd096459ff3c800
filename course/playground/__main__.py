"""Write a web page where a model reads what you type and screening is shown next to softmax.

    python -m course.playground --ckpt out-abc/ckpt.pt

This takes a few seconds and writes a single HTML file, which needs no network because the model
runs in your browser. A model that was trained on ABCDigits starts with a prompt of that benchmark,
and the page opens at the tile that finds the needle. Other models start with a text about
screening. To start with a text of your own, use --text.

The page computes the equations in JavaScript (model.js), and stores the model's matrices in 16
bits. When it opens, it compares its numbers with those of PyTorch, and tells you if they disagree,
as they do after you change an equation of multiscreen.py.
"""
if not __package__:
    raise SystemExit("error: run python -m course.playground in the repository's folder")

import argparse
import json
import os
import sys
from pathlib import Path
from urllib.parse import quote

import multiscreen
from abcdigits import Documents, generate_by_line_count
from course.playground.data import page_data
from train import load_checkpoint

MODEL = Path(multiscreen.__file__).with_name("models") / "retrieval.pt"
PAGE = Path(__file__).with_name("page.html")
SCRIPT = Path(__file__).with_name("model.js")
README = Path(multiscreen.__file__).with_name("README.md")
MARKERS = ("PLAYGROUND_README", "PLAYGROUND_SCRIPT", "PLAYGROUND_DATA")    # in the page, once
SCREENING = multiscreen.__doc__.split("\n\n")[1]        # what screening is
TOKENS = 200                                           # at most, of the text to start with
DIGITS = Documents.digits                              # of a number that a model was taught


def default_text(ckpt):
    """An ABCDigits prompt for a model that was trained on them, or SCREENING."""
    if "abcdigits" not in " ".join(ckpt["args"]["data"]):
        return SCREENING
    return generate_by_line_count(TOKENS // (DIGITS + 3), 0.3, DIGITS, 1)[0][:-DIGITS]


def write_page(path, data):
    """Write the page, with a link to README, the model's script and the data put into it."""
    readme = quote(Path(os.path.relpath(README, path.parent)).as_posix())
    # "<" is escaped, so that no text can end the page's script element.
    text = json.dumps(data, allow_nan=False).replace("<", "\\u003c")
    page = PAGE.read_text(encoding="utf-8")
    for marker, part in zip(MARKERS, (readme, SCRIPT.read_text(encoding="utf-8"), text)):
        page = page.replace(marker, part)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        file.write(page.encode())


def main(argv=None):
    p = argparse.ArgumentParser(prog="python -m course.playground", description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--ckpt", default=MODEL, help="the model, a checkpoint of train.py "
                   "[models/retrieval.pt]")
    p.add_argument("--text", help=f"the text to start with, of which {TOKENS} bytes are used [an "
                   "ABCDigits prompt, or four lines about screening]")
    p.add_argument("--out", type=Path, default=Path("out/playground.html"),
                   help="the HTML file to write [out/playground.html]")
    args = p.parse_args(argv)
    model, tokenizer, ckpt = load_checkpoint(args.ckpt)
    if (ckpt["args"]["model"], tokenizer.name) != ("multiscreen", "bytes"):
        sys.exit(f"error: {args.ckpt} has --model {ckpt['args']['model']} and --tokenizer "
                 f"{tokenizer.name}; the page needs --model multiscreen and --tokenizer bytes")
    text = args.text or default_text(ckpt)
    text = text.encode(errors="replace")[:TOKENS].decode(errors="ignore")
    data = page_data(model, text)
    write_page(args.out, data)
    print(f"wrote {args.out}, {args.out.stat().st_size / 1e6:.1f} MB, with a text of "
          f"{len(data['text'].encode())} bytes: open it in a browser and type")


if __name__ == "__main__":
    main()
