"""The documents of a corpus, one by one: JSON lines, Parquet, text. support/prepare.py reads them.

A document is a str, or bytes: a line of JSON. `text_of` is its text.
"""
import gzip
import importlib
import json
from pathlib import Path

from support.cli import UsageError

KINDS = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet", ".txt")
EXTRAS = {".zst": "zstandard", ".parquet": "pyarrow"}


def find_files(names, out):
    """The files that paths name. Folders are searched recursively, without hidden files and `out`.

    A missing package, an empty file and a file of another kind raise here, before any work.
    """
    paths = []
    for path in map(Path, names):
        below = [path]
        if path.is_dir():
            below = [p for p in sorted(path.rglob("*")) if p.name.endswith(KINDS)]
            below = [p for p in below if out.absolute() not in p.absolute().parents]
            below = [p for p in below if "/." not in f"/{p.relative_to(path).as_posix()}"]
        if not below:
            raise UsageError(f"the folder {path} has no {', '.join(KINDS)}")
        paths += below
    for path in paths:
        if not path.stat().st_size:
            raise UsageError(f"{path} is empty")
        if not path.name.endswith(KINDS):
            raise UsageError(f"{path} is none of {', '.join(KINDS)}")
        if path.suffix in EXTRAS:
            get_extra(path.suffix)
    return paths


def get_extra(suffix, module=""):
    """The package, or a module of it, that files with this suffix need."""
    name = EXTRAS[suffix]
    try:
        return importlib.import_module(name + module)
    except ImportError:
        raise UsageError(f"{suffix} files need {name}: pip install {name}") from None


def read(path, field):
    """Yield (document, share of the file that is read) for each document of a file."""
    if path.suffix == ".parquet":
        # With these settings pyarrow holds half as much: about one group of rows.
        parquet = get_extra(".parquet", ".parquet")
        table = parquet.ParquetFile(path, pre_buffer=False, buffer_size=2**20)
        batches = table.iter_batches(16, columns=[field])
        texts = (text for batch in batches for text in batch[field].to_pylist())
        for n, text in enumerate(texts, 1):
            if not isinstance(text, str):
                raise ValueError(f"no text in the field {field!r}")
            yield text, n / table.metadata.num_rows
        return

    with open(path, "rb") as file:
        if path.suffix == ".txt":
            yield file.read().decode("utf-8"), 1
            return
        size = path.stat().st_size
        for line in {".jsonl": iter, ".gz": gzip.open, ".zst": unzstd}[path.suffix](file):
            yield line, file.tell() / size


def unzstd(file):
    """Yield the lines of a .zst file. zstandard's own reader takes half a file for a whole one."""
    frame, rest = None, b""
    while data := file.read(2**17):
        while data:
            frame = frame or get_extra(".zst").ZstdDecompressor().decompressobj()
            *lines, rest = (rest + frame.decompress(data)).split(b"\n")
            yield from lines
            data = frame.unused_data
            frame = None if frame.eof else frame
    if frame:
        raise EOFError("the file is truncated")
    if rest:
        yield rest


def place(path, n):
    """Where the document with number n is, in words. n: from 0, empty lines are counted too."""
    if path.suffix == ".txt":
        return str(path)
    return f"{path}, {'row' if path.suffix == '.parquet' else 'line'} {n + 1}"


def text_of(document, path, n, field):
    """The text of a document; None for an empty line of a JSON file."""
    if isinstance(document, str):
        return document
    if not document.strip():
        return None
    try:
        row = json.loads(document)
    except (ValueError, RecursionError):
        raise UsageError(f"{place(path, n)} is not JSON in UTF-8") from None
    if not isinstance(row, dict) or not isinstance(row.get(field), str):
        raise UsageError(f"{place(path, n)} has no text in the field {field!r}: take --field")
    return row[field]
