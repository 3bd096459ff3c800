"""How do I train on a corpus? This turns it into two files of tokens for train.py.

    python -m lab.prepare tokens/ corpus/*.jsonl.zst
    python train.py --data tokens/train.bin --val tokens/val.bin --tokenizer gpt2

What a file holds is told by its first bytes, whatever its name: parquet, or text, compressed by
gzip or zstandard or not. A text whose first line begins with { has a JSON object in each line, and
each of them is a document; any other text is one document. Documents keep their order, with an
end-of-text after each. Every thousandth goes to val.bin, and the others go to train.bin.

Of a file that was cut off, the last line is no JSON, which is an error. Nobody notices it where a
plain text was compressed by zstandard, whose reader ends without an error.
"""
import argparse
import gzip
import io
import json
import os
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from train import encode, get_tokenizer

GZIP, ZSTD, PARQUET, MARK = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PAR1", b"\xef\xbb\xbf"


# ------------------------------------------------------------------------- from files to documents

def lines_of(path, first_bytes):
    """The lines of a file, as bytes, with their ends."""
    if first_bytes == ZSTD:
        import zstandard

        with open(path, "rb") as file:
            text = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
            yield from io.BufferedReader(text)
        return
    opened = gzip.open if first_bytes.startswith(GZIP) else open
    with opened(path, "rb") as file:
        yield from file


def documents(path, field, noted):
    """The texts of a file. noted: {what was skipped or replaced: numbers of the lines}, filled."""
    with open(path, "rb") as file:
        first_bytes = file.read(4)
    if first_bytes == PARQUET:
        import pyarrow.parquet

        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(columns=[field]):
            yield from batch.column(0).to_pylist()
        return
    whole, is_json = [], None
    for number, line in enumerate(lines_of(path, first_bytes), 1):
        if number == 1 and line.startswith(MARK):
            noted["byte order marks skipped"].append(number)
            line = line.removeprefix(MARK)
        if is_json is None and line.strip():
            is_json = line.lstrip().startswith(b"{")
            # An array begins with its first object, or alone in a line.
            if line.strip() == b"[" or line.lstrip().startswith(b"[{"):
                raise ValueError("it is one JSON array: jq -c '.[]' FILE > NEW.jsonl makes lines")
        if not is_json:
            whole.append(line)
        elif not line.strip():
            noted["blank lines skipped"].append(number)
        else:
            yield text_in(line, field, number, noted)
    if is_json is False:
        yield b"".join(whole).decode("utf-8")


def text_in(line, field, number, noted):
    """The text of a line with a JSON object."""
    try:
        text = json.loads(line)[field]
        # JSON may have half of a pair of surrogates, which is no character, and has no UTF-8.
        right = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        what = f"line {number} has no text in --field {field}, or is damaged: {e!r}"
        raise ValueError(what) from None
    if right != text:
        noted["lone surrogates replaced by U+FFFD"].append(number)
    return right


# ------------------------------------------------------------------------- from documents to tokens

def write(folder, args):
    """Write train.bin and val.bin."""
    tokenizer, n_documents, n_tokens = get_tokenizer(args.tokenizer), 0, 0
    with open(folder / "train.bin", "wb") as train, open(folder / "val.bin", "wb") as val:
        for path in args.files:
            noted, before = defaultdict(list), n_documents
            try:
                for text in documents(path, args.field, noted):
                    n_documents += 1
                    tokens = encode(text, tokenizer)
                    n_tokens += len(tokens)
                    file = val if n_documents % 1000 == 0 else train
                    file.write(tokens.tobytes())
            except Exception as e:                     # the decompressors have errors of their own
                sys.exit(f"error: {path}: {e}")
            print(f"{path}: {n_documents - before:,} documents; {n_tokens:,} tokens so far",
                  flush=True)
            for what, lines in noted.items():
                print(f"  {len(lines):,} {what}, the first in line {lines[0]}")
    if n_documents == 0:
        sys.exit("error: there is no document in these files")
    if (folder / "val.bin").stat().st_size == 0:
        (folder / "val.bin").unlink()
        print("fewer than 1,000 documents, so there is no val.bin: train.py holds out the last "
              "twentieth of train.bin")


def main():
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("out", type=Path, help="the folder to write, a new one")
    p.add_argument("files", nargs="+", type=Path, help="files to read, in this order")
    p.add_argument("--tokenizer", default="gpt2", help="as for train.py [gpt2]")
    p.add_argument("--field", default="text", help="the field or column with the text [text]")
    args = p.parse_args()
    if args.out.exists():
        sys.exit(f"error: {args.out} exists: name a new folder, or remove it")
    for path in args.files:
        if not path.is_file():
            sys.exit(f"error: {path} does not exist, or is no file")
    # The folder gets its name at the end, so that nobody trains on half of a corpus.
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.out.parent, prefix=f"{args.out.name}.part") as part:
        folder = Path(part, "tokens")
        folder.mkdir()
        write(folder, args)
        os.replace(folder, args.out)


if __name__ == "__main__":
    main()
