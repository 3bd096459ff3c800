"""Turn a corpus into two files of tokens for train.py.

    python -m lab.prepare tokens/ corpus/*.jsonl.zst
    python train.py --data tokens/ --tokenizer gpt2

The files are .jsonl (also .gz, .zst) or .parquet with one document per row, or else one document
each. Documents keep their order, with an end-of-text after each. Every thousandth goes to val.bin,
which train.py holds out, and the others go to train.bin.
"""
import gzip
import json
import os
import shutil
from pathlib import Path

from support.cli import Parser, UsageError, cli
from support.data import encode_document, get_tokenizer, read_text, require_text
from support.run import naming


def documents(path, field):
    """The texts of a file."""
    if path.suffix == ".parquet":
        import pyarrow.parquet

        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(columns=[field]):
            yield from batch.column(0).to_pylist()
    elif ".jsonl" in path.suffixes:
        for line in open_lines(path):
            yield json.loads(line)[field]
    else:
        yield read_text(path)


def open_lines(path):
    """The lines of a file that may be compressed."""
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8")
    if path.suffix == ".zst":
        return lines_of_zst(path)
    return open(path, encoding="utf-8")


def lines_of_zst(path):
    """The lines of a .zst file, as bytes. Raises EOFError if the file ends inside a frame.

    zstandard's own reader takes such a half of a file for a whole one.
    """
    import zstandard

    frame, begun = None, b""                           # begun: a line whose end is still to come
    with open(path, "rb") as file:
        while piece := file.read(2**20):
            while piece:                               # a piece may have the end of a frame in it
                if frame is None:
                    frame = zstandard.ZstdDecompressor().decompressobj()
                try:
                    begun += frame.decompress(piece)
                except zstandard.ZstdError as e:
                    raise ValueError(e) from None
                piece = frame.unused_data
                if frame.eof:
                    frame = None
            *lines, begun = begun.split(b"\n")
            yield from lines
    if frame is not None:
        raise EOFError("the file ends too early")
    if begun:
        yield begun


def main(argv=None):
    p = Parser(__doc__)
    p.add_argument("out", type=Path, help="the folder to write, a new one")
    p.add_argument("files", nargs="+", type=Path, help="files to read, in this order")
    p.flag("--tokenizer", "gpt2", "gpt2 or bytes")
    p.flag("--field", "text", "field or column that has the text")
    args = p.parse_args(argv)
    # The folder gets its name at the end, so that nobody trains on half of a corpus.
    part = args.out.with_name(args.out.name + ".part")
    for path in (args.out, part):
        if path.exists():
            raise UsageError(f"{path} exists: name a new folder, or remove it")
    for path in args.files:
        if not path.is_file():
            raise UsageError(f"{path} does not exist, or is no file")
    tokenizer = get_tokenizer(args.tokenizer)
    require_text(tokenizer, "lab.prepare")
    part.mkdir(parents=True)
    try:
        write(part, args, tokenizer)
        os.replace(part, args.out)
    finally:
        shutil.rmtree(part, ignore_errors=True)        # of a command that failed


def write(folder, args, tokenizer):
    """Write train.bin and val.bin."""
    n_documents = n_tokens = 0
    with open(folder / "train.bin", "wb") as train, open(folder / "val.bin", "wb") as val:
        for path in args.files:
            try:
                for text in documents(path, args.field):
                    n_documents += 1
                    tokens = encode_document(text, tokenizer)
                    n_tokens += len(tokens)
                    with naming(folder):
                        file = val if n_documents % 1000 == 0 else train
                        file.write(tokens.tobytes())
            except ImportError as e:
                raise UsageError(f"{path}: pip install {e.name.partition('.')[0]}") from None
            except (KeyError, ValueError, TypeError, AttributeError, EOFError) as e:
                raise UsageError(f"{path}: a row without {args.field!r}, or damaged ({e})"
                                 ) from None
            print(f"{path}: {n_tokens:,} tokens so far", flush=True)
    if n_documents == 0:
        raise UsageError("there is no document in these files")
    if (folder / "val.bin").stat().st_size == 0:
        (folder / "val.bin").unlink()                  # train.py holds out the last twentieth


if __name__ == "__main__":
    cli(main)
