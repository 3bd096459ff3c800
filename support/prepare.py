"""Turn a corpus into two files of tokens for train.py.

    python -m support.prepare tokens/ corpus/*.jsonl.zst
    python train.py --data tokens/ --tokenizer gpt2

The files are .jsonl (also .gz, .zst) or .parquet with one document per row, or else one document
each. Documents keep their order, with an end-of-text after each. Every thousandth goes to val.bin,
which train.py holds out, and the others go to train.bin.
"""
import gzip
import io
import json
import os
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
        import zstandard

        return io.TextIOWrapper(zstandard.open(path, "rb"), encoding="utf-8")
    return open(path, encoding="utf-8")


def main(argv=None):
    p = Parser(__doc__)
    p.add_argument("out", type=Path, help="the folder to write, a new one")
    p.add_argument("files", nargs="+", type=Path, help="files to read, in this order")
    p.flag("--tokenizer", "gpt2", "gpt2 or bytes")
    p.flag("--field", "text", "field or column that has the text")
    args = p.parse_args(argv)
    tokenizer = get_tokenizer(args.tokenizer)
    require_text(tokenizer, "support.prepare")
    for path in args.files:
        if not path.is_file():
            raise UsageError(f"{path} does not exist, or is no file")
    if args.out.exists():
        raise UsageError(f"{args.out} exists: name a new folder")

    # The folder gets its name at the end, so that nobody trains on half of a corpus.
    part = args.out.with_name(args.out.name + ".part")
    part.mkdir(parents=True, exist_ok=True)
    n_documents = n_tokens = 0
    with open(part / "train.bin", "wb") as train, open(part / "val.bin", "wb") as val:
        for path in args.files:
            try:
                for text in documents(path, args.field):
                    n_documents += 1
                    tokens = encode_document(text, tokenizer)
                    n_tokens += len(tokens)
                    with naming(part):
                        file = val if n_documents % 1000 == 0 else train
                        file.write(tokens.tobytes())
            except ImportError as e:
                raise UsageError(f"{path}: pip install {e.name.partition('.')[0]}") from None
            except (KeyError, ValueError) as e:
                raise UsageError(f"{path}: a row without {args.field!r}, or damaged ({e})"
                                 ) from None
            print(f"{path}: {n_tokens:,} tokens so far", flush=True)
    if (part / "val.bin").stat().st_size == 0:
        (part / "val.bin").unlink()                    # train.py holds out the last twentieth
    os.replace(part, args.out)


if __name__ == "__main__":
    cli(main)
