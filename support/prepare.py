"""Turn a corpus into token files for train.py, or into long books for experiments.long_context.

    python -m support.prepare --out tokens/ --tokenizer gpt2 FILES
    python train.py --data tokens/ --tokenizer gpt2

FILES are files or folders: .jsonl, .jsonl.gz, .jsonl.zst (pip install zstandard) and .parquet
(pip install pyarrow) with a document a row in the field `text`, .txt with a document a file.

The documents stay in order, an end-of-text after each, and fill shards of 10^8 tokens in llm.c's
format: data_train_000000.bin, .. A document whose hash is divisible by 1000 goes to
data_val_000000.bin, .. instead: of two equal documents either both are held out or neither.
The bytes do not depend on --processes. The same command continues after Ctrl-C or a crash.

The paper's corpora, SlimPajama (895 GB) and the books of PG-19 longer than 2^17 tokens:

    hf download cerebras/SlimPajama-627B --repo-type dataset --local-dir raw/
    python -m support.prepare --out slimpajama/ raw/train/
    hf download Geralt-Targaryen/pg19 --repo-type dataset --local-dir raw-pg19/
    python -m support.prepare --out pg19/ --books 131072 raw-pg19/
"""
import hashlib
import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

import numpy as np

from support.cli import Parser, UsageError, cli, clock, replacing, stop_requests
from support.data import get_tokenizer
from support.documents import find_files, place, read, text_of
from support.run import Lock
from support.shards import append, is_finished, open_folder, save

BATCH = 2**18                                          # characters that a process gets at a time
SAVE_EVERY = 10                                        # seconds


# --------------------------------------------------------------------- documents to tokens

def batches(state, field):
    """Yield (path, number of the first document, documents, what to read next) of what is left.

    Where reading fails an error stands in place of a document.
    """
    sizes = [size for _, size in state["files"]]
    for n in range(state["file"], len(sizes)):
        path, before = Path(state["files"][n][0]), sum(sizes[:n])
        first = line = state["line"] if n == state["file"] else 0
        documents, length = [], 0
        try:
            for line, (document, share) in enumerate(read(path, field), 1):
                if line <= first:                      # an earlier start has done it
                    continue
                documents.append(document)
                length += len(document)
                if length >= BATCH:
                    after = {"file": n, "line": line, "bytes": before + int(share * sizes[n])}
                    yield path, first, documents, after
                    first, documents, length = line, [], 0
        except Exception as e:                         # each package has its own for a damaged file
            reason = str(e).splitlines() or ["?"]
            documents.append(UsageError(f"{place(path, line)}: {type(e).__name__}: {reason[0]}"))
        yield path, first, documents, {"file": n + 1, "line": 0, "bytes": before + sizes[n]}


def encode(args, path, first, documents):
    """({"train": tokens, "val": tokens}, long books in UTF-8, how many tokens) of documents."""
    tokenizer = get_tokenizer(args.tokenizer)
    parts, books, count = {"train": [], "val": []}, [], 0
    for n, document in enumerate(documents, first):
        if isinstance(document, UsageError):
            raise document
        text = text_of(document, path, n, args.field)
        if text is None:
            continue
        tokens = [*tokenizer.encode_ordinary(text), tokenizer.eot_token]
        content = text.encode("utf-8", "replace")      # JSON can hold half a surrogate pair
        count += len(tokens)
        if args.books is None:
            parts["val" if is_held_out(content, args.held_out) else "train"] += tokens
        elif len(tokens) - 1 > args.books:
            books.append(content)
    return {part: np.array(parts[part], "<u2") for part in parts}, books, count


def is_held_out(content, one_in):
    """Whether a document is held out, by a hash of its text."""
    number = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")
    return one_in > 0 and number % one_in == 0


def serve(connection, args):
    """A process of its own: encode what comes. Ends when the parent has gone, however it went."""
    def follow_parent():
        multiprocessing.parent_process().join()
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)       # Ctrl-C is for the parent
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=follow_parent, daemon=True).start()
    while True:
        batch = connection.recv()
        try:
            answer = encode(args, *batch)
        except Exception as e:
            answer = e
        connection.send(answer)


class Killed(UsageError):
    """A process of `processes` has gone."""


@contextmanager
def processes(args):
    """Start them. Yields a function that has a batch encoded by one that is free: a Future.

    A thread waits for each process. (A pool of the library can wait for ever for one that is gone.)
    """
    free = SimpleQueue()
    for _ in range(args.processes):
        ours, theirs = multiprocessing.Pipe()
        multiprocessing.Process(target=serve, args=(theirs, args), daemon=True).start()
        theirs.close()
        free.put(ours)

    def ask(batch):
        connection = free.get()
        try:
            connection.send(batch)
            answer = connection.recv()
        except (EOFError, OSError):
            raise Killed("a process was killed: the same command continues, with fewer "
                         "--processes if memory ran out") from None
        finally:
            free.put(connection)
        if isinstance(answer, Exception):
            raise answer
        return answer

    threads = ThreadPoolExecutor(args.processes)
    try:
        yield lambda *batch: threads.submit(ask, batch)
    finally:
        threads.shutdown(cancel_futures=True)


def in_order(encoded, args, state):
    """Yield (what to read next, what `encode` made) of each batch; the processes work ahead."""
    waiting = deque()
    for *batch, after in batches(state, args.field):
        waiting.append((after, encoded(*batch)))
        if len(waiting) > 4 * args.processes:
            after, future = waiting.popleft()
            yield after, future.result()
    for after, future in waiting:
        yield after, future.result()


def run(args, state):
    """Work until all files are read, or until Ctrl-C. `state` changes after each whole batch."""
    out, size, start = Path(args.out), args.shard_tokens, dict(state)
    began = saved = time.perf_counter()
    with stop_requests() as stop, processes(args) as encoded:      # before pyarrow starts threads
        try:
            for after, (parts, books, count) in in_order(encoded, args, state):
                new = {part: append(out, part, state[part], parts[part], size) for part in parts}
                for n, book in enumerate(books, state["books"]):
                    with replacing(out / f"book_{n:06}.txt") as file:
                        file.write(book)
                full = any(new[part] // size > state[part] // size for part in parts)
                new |= {"tokens": state["tokens"] + count, "books": state["books"] + len(books)}
                state.update(new | after)
                if stop:
                    break
                if full or time.perf_counter() - saved > SAVE_EVERY:
                    save(out, state)
                    saved = time.perf_counter()
                    report(start, state, saved - began)
        except Killed:
            if not stop:
                raise
        finally:
            save(out, state)
    if stop and not is_finished(state):
        raise KeyboardInterrupt(f"stopped at {state['tokens']:,} tokens: the same command goes on")


def report(start, state, seconds):
    """Print a line of progress. The time left goes by the bytes of the files."""
    rate = (state["tokens"] - start["tokens"]) / seconds
    read, total = state["bytes"] - start["bytes"], sum(size for _, size in state["files"])
    left = seconds * (total - state["bytes"]) / max(read, 1)
    print(f"{state['tokens']:,} tokens, {rate:,.0f} tokens/s, {clock(left)} left", flush=True)


def main(argv=None):
    p = Parser(__doc__)
    p.add_argument("files", nargs="+", metavar="FILES")
    p.add_argument("--out", required=True, help="folder to write to: a new one, or one to continue")
    p.add_argument("--tokenizer", default="gpt2", help="gpt2, bytes [gpt2]")
    p.add_argument("--field", default="text", help="field or column of the text [text]")
    p.add_argument("--shard-tokens", type=int, default=10**8, help="tokens in a shard [10^8]")
    p.add_argument("--held-out", type=int, default=1000,
                   help="hold out one document in so many; 0: none [1000]")
    p.add_argument("--books", type=int, metavar="N",
                   help="no shards: write each document of more than N tokens as a text file")
    p.add_argument("--processes", type=int, default=os.cpu_count(), help="[the number of cores]")
    args = p.parse_args(argv)
    if not 0 < args.shard_tokens < 2**31 or args.processes < 1 or args.held_out < 0:
        raise UsageError("--shard-tokens (below 2^31) and --processes must be above 0, --held-out "
                         "0 or more")

    get_tokenizer(args.tokenizer)                      # downloaded once, not by each process
    files = find_files(args.files, Path(args.out))
    with Lock(Path(args.out), ".lock"):                # hidden, so that train.py leaves it out
        state = open_folder(args, files)
        run(args, state)
    if not state["tokens"]:
        raise UsageError(f"{' '.join(args.files)} holds no documents")
    if args.books is None:
        print(f"{args.out}: {state['train']:,} tokens, {state['val']:,} held out")
    else:
        print(f"{args.out}: {state['books']} documents of more than {args.books} tokens")


if __name__ == "__main__":
    cli(main)
