"""Turn a corpus into token files for train.py, or into long books for lab.perplexity.

    python -m support.prepare --out tokens/ DATA
    python train.py --data tokens/ --tokenizer gpt2

DATA names files or folders, all of one kind: .jsonl (also .gz, .zst) or .parquet with one document
per row, or .txt with one per file. It can also be the name of a data set on the Hugging Face hub,
which is streamed, not stored.

    python -m support.prepare --out slimpajama/ cerebras/SlimPajama-627B
    python -m support.prepare --out pg19/ --books 131072 raw-pg19/

Documents keep their order, with an end-of-text after each. Shards of 10^8 tokens, in llm.c's
format, are called data_train_000000.bin and so on. Documents whose hash is divisible by 1000 are
held out: they go to data_val_000000.bin beside it. Rerun the command to continue after the last
shard.
"""
import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from support.cli import Parser, UsageError, cli, own_folder, replacing
from support.data import fingerprint, visible_files
from support.tokens import LLM_C, encode_document, get_tokenizer, require_text

KINDS = {".jsonl": "json", ".parquet": "parquet", ".txt": "text"}
JOURNAL = ".prepare.json"                              # hidden, so that train.py leaves it out
BATCH = 64                                             # documents read at a time


def open_corpus(args):
    """(a stream of documents, the files it comes from: none if it is a data set on the hub)"""
    import datasets

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    files = [file for name in args.data for file in visible_files(Path(name))]
    kinds = {kind for suffix, kind in KINDS.items() for p in files if suffix in p.suffixes}
    if not kinds and len(args.data) == 1 and not Path(*args.data).exists():
        return datasets.load_dataset(*args.data, args.subset, split=args.split, streaming=True), []
    if len(kinds) != 1:
        raise UsageError(f"{' '.join(args.data)}: use {', '.join(KINDS)}, one kind at a time")
    names = [str(p.resolve()) for p in files if KINDS.keys() & set(p.suffixes)]
    extra = {"sample_by": "document"} if kinds == {"text"} else {}
    return datasets.load_dataset(*kinds, data_files={"train": names}, split="train",
                                 streaming=True, **extra), names


def encoded_batches(stream, args, tokenizer):
    """Yield a batch of documents as a list of pairs (text in UTF-8, tokens)."""
    def encode(text):
        text = text.removeprefix("\ufeff")             # a byte order mark
        return text.encode(), encode_document(text, tokenizer)

    with ThreadPoolExecutor() as threads:
        for batch in stream.iter(BATCH):
            texts = batch.get(args.field)
            if texts is None or None in texts:
                raise UsageError(f"a document has no text in --field {args.field}; its fields: "
                                 f"{', '.join(batch)}")
            yield list(threads.map(encode, texts))


def write_shard(args, number, documents, n_vocab):
    """Write the tokens of documents to two files, those to train on and those held out."""
    parts = {"val": [], "train": []}
    for content, tokens in documents:
        digest = int(hashlib.blake2b(content, digest_size=8).hexdigest(), 16)
        held_out = args.held_out and digest % args.held_out == 0
        parts["val" if held_out else "train"].append(tokens)
    for part, arrays in parts.items():
        if arrays:
            path = args.out / f"data_{part}_{number:06}.bin"
            write_bin(path, np.concatenate(arrays), n_vocab)
            print(f"{path}: {sum(map(len, arrays)):,} tokens", flush=True)


def write_bin(path, tokens, vocab_size=0):
    """Write a token file in llm.c's format."""
    header = np.zeros(256, "<i4")
    header[:4] = LLM_C, 1, len(tokens), vocab_size
    with replacing(path) as file:
        file.write(header.tobytes() + tokens.astype("<u2").tobytes())


def write_books(args, first, documents):
    """Write each document of more than --books tokens to a file named by its number."""
    for number, (content, tokens) in enumerate(documents, first):
        if len(tokens) - 1 > args.books:
            path = args.out / f"book_{number:06}.txt"
            with replacing(path) as file:
                file.write(content)
            print(f"{path}: {len(tokens) - 1:,} tokens", flush=True)


def prepare(args):
    """Fill the folder --out, or go on where the same command was stopped."""
    out, (stream, files) = args.out, open_corpus(args)
    corpus = fingerprint((path, "train") for path in files) or args.data
    flags = vars(args) | {"out": "", "data": corpus}
    # How many documents are done, and the stream's state after each shard of them.
    journal = {"flags": flags, "documents": 0, "states": []}
    if any(out.glob("[!.]*")):
        found = json.loads((out / JOURNAL).read_text()) if (out / JOURNAL).exists() else {}
        if found.get("flags") != flags:
            raise UsageError(f"{out} holds something else, or shards of other files or flags: name "
                             "a new folder")
        journal |= found
    tokenizer = get_tokenizer(args.tokenizer)          # may fail: no folder is made then
    require_text(tokenizer, "support.prepare")
    out.mkdir(parents=True, exist_ok=True)
    for left in out.glob("*.tmp"):                     # of a killed process
        left.unlink()
    if journal["states"]:
        stream.load_state_dict(journal["states"][-1])
    batches = encoded_batches(stream, args, tokenizer)
    while True:
        with replacing(out / JOURNAL) as file:
            file.write(json.dumps(journal).encode())
        documents, size = [], 0
        while size < args.shard_tokens and (batch := next(batches, None)):
            documents += batch
            size += sum(len(tokens) for _, tokens in batch)
        if not documents:
            break
        if args.books is None:
            write_shard(args, len(journal["states"]), documents, tokenizer.n_vocab)
        else:
            write_books(args, journal["documents"], documents)
        journal["documents"] += len(documents)
        journal["states"].append(stream.state_dict())
    n_files = len([*out.glob("*.bin"), *out.glob("*.txt")])
    print(f"{out}: finished, {n_files} file{'s' * (n_files != 1)}")


def main(argv=None):
    p = Parser(__doc__)
    p.add_argument("data", nargs="+", metavar="DATA", help="files, folders, or a name on the hub")
    p.add_argument("--out", type=own_folder, required=True,
                   help="folder to write to: new, or one to continue")
    p.flag("--tokenizer", "gpt2", "gpt2 or bytes")
    p.flag("--field", "text", "field or column that has the text")
    p.flag("--subset", None, "subset of a data set on the hub", type=str, shown="its default")
    p.flag("--split", "train", "split of a data set on the hub")
    p.flag("--shard-tokens", 10**8, "tokens in a shard, below 2^30", shown="10^8")
    p.flag("--held-out", 1000, "hold out one document in N; 0: none", least=0)
    p.flag("--books", None, "write texts of more than N tokens, one per file", type=int,
           metavar="N", shown="token files")
    args = p.parse_args(argv)
    if args.shard_tokens >= 2**30:
        raise UsageError("--shard-tokens must be below 2^30")
    try:
        prepare(args)
    except ImportError as e:
        raise UsageError(f"{e}: pip install datasets zstandard") from None
    except (ValueError, EOFError) as e:                # a damaged file
        raise UsageError(f"{' '.join(args.data)}: {f'{e}'.splitlines()[0]}") from None


if __name__ == "__main__":
    cli(main)
