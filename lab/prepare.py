"""How do I train on a corpus? This turns it into two files of tokens for train.py.

    python -m lab.prepare tokens/ corpus/*.jsonl.zst
    python train.py --data tokens/train.bin --val tokens/val.bin --tokenizer gpt2

What a file holds is told by its first bytes, whatever its name: parquet, or text, compressed by
gzip or zstandard or not. A text whose first line is a JSON object has a document in each line; any
other text is one document. Documents keep their order, with an end-of-text after each. Every
thousandth goes to val.bin, and the others go to train.bin.
"""
import argparse
import gzip
import json
import os
import shutil
import sys
from collections import Counter
from pathlib import Path

import numpy as np

from train import get_tokenizer

GZIP, ZSTD, PARQUET = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PAR1"


# ------------------------------------------------------------------------- from files to documents

def pieces_of_zst(path):
    """The bytes of a zstandard file. Raises EOFError if it ends inside a frame.

    zstandard's own reader takes such a half of a file for a whole one.
    """
    import zstandard

    frame = None
    with open(path, "rb") as file:
        while piece := file.read(2**20):
            while piece:                               # a piece may have the end of a frame in it
                if frame is None:
                    frame = zstandard.ZstdDecompressor().decompressobj()
                yield frame.decompress(piece)
                piece = frame.unused_data
                if frame.eof:
                    frame = None
    if frame is not None:
        raise EOFError("the file ends too early")


def lines_of(path, first_bytes):
    """The lines of a file, as bytes, with their ends."""
    if not first_bytes.startswith(ZSTD):
        opened = gzip.open if first_bytes.startswith(GZIP) else open
        with opened(path, "rb") as file:
            yield from file
        return
    begun = b""                                        # a line whose end is still to come
    for piece in pieces_of_zst(path):
        *lines, begun = (begun + piece).split(b"\n")
        for line in lines:
            yield line + b"\n"
    if begun:
        yield begun


def documents(path, field, note):
    """The texts of a file. note(what, line): called for what is skipped or replaced."""
    with open(path, "rb") as file:
        first_bytes = file.read(4)
    if first_bytes == PARQUET:
        import pyarrow.parquet

        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(columns=[field]):
            yield from batch.column(0).to_pylist()
        return
    whole, is_json = [], None
    for number, line in enumerate(lines_of(path, first_bytes), 1):
        if number == 1 and line.startswith(b"\xef\xbb\xbf"):
            note("byte order marks skipped", number)
            line = line[3:]
        if is_json is None and line.strip():
            is_json = is_object(line)
        if not is_json:
            whole.append(line)
        elif not line.strip():
            note("blank lines skipped", number)
        else:
            yield text_in(line, field, number, note)
    if whole and is_json is False:
        yield b"".join(whole).decode("utf-8")
    elif is_json is None:
        note("files without any text", 1)


def is_object(line):
    """Whether a line is a JSON object."""
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def text_in(line, field, number, note):
    """The text of a line with a JSON object."""
    try:
        text = json.loads(line)[field]
        if not isinstance(text, str):
            raise TypeError(f"{field!r} is no text")
    except (ValueError, KeyError, TypeError) as e:
        raise ValueError(f"line {number}: a damaged line, or one without {field!r} ({e})") from None
    # JSON may have half of a pair of surrogates, which is no character, and has no UTF-8.
    right = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if right != text:
        note("lone surrogates replaced by U+FFFD", number)
    return right


# ------------------------------------------------------------------------- from documents to tokens

def encode(text, tokenizer):
    """The tokens of a document and an end-of-text, in the dtype that train.py reads."""
    dtype = np.uint16 if tokenizer.n_vocab <= 2**16 else np.uint32
    if tokenizer.name == "bytes":
        tokens = np.frombuffer(text.encode(), np.uint8)
    else:
        tokens = np.array(tokenizer.encode_ordinary(text))
    return np.append(tokens.astype(dtype), dtype(tokenizer.eot_token))


def write(folder, args):
    """Write train.bin and val.bin."""
    tokenizer, n_documents, n_tokens = get_tokenizer(args.tokenizer), 0, 0
    with open(folder / "train.bin", "wb") as train, open(folder / "val.bin", "wb") as val:
        for path in args.files:
            counts, first, before = Counter(), {}, n_documents

            def note(what, line, counts=counts, first=first):
                counts[what] += 1
                first.setdefault(what, line)

            try:
                for text in documents(path, args.field, note):
                    n_documents += 1
                    tokens = encode(text, tokenizer)
                    n_tokens += len(tokens)
                    file = val if n_documents % 1000 == 0 else train
                    file.write(tokens.tobytes())
            except ImportError as e:
                package = e.name.partition(".")[0]
                sys.exit(f"error: {path} needs {package}: pip install {package}")
            except Exception as e:                     # the decompressors have errors of their own
                sys.exit(f"error: {path}: {e}")
            print(f"{path}: {n_documents - before:,} documents; {n_tokens:,} tokens so far",
                  flush=True)
            for what, count in counts.items():
                print(f"  {count:,} {what}, the first in line {first[what]}")
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
    # The folder gets its name at the end, so that nobody trains on half of a corpus.
    part = args.out.with_name(args.out.name + ".part")
    for path in (args.out, part):
        if path.exists():
            sys.exit(f"error: {path} exists: name a new folder, or remove it")
    for path in args.files:
        if not path.is_file():
            sys.exit(f"error: {path} does not exist, or is no file")
    try:
        part.mkdir(parents=True)
        write(part, args)
        os.replace(part, args.out)
    except OSError as e:
        sys.exit(f"error: {e}")
    finally:
        shutil.rmtree(part, ignore_errors=True)        # of a command that failed


if __name__ == "__main__":
    main()
