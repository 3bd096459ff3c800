"""A folder of token files in llm.c's format that survives a crash. support/prepare.py fills it.

Its state is a dict in a hidden file: what the folder is made from, how far it is. What is written
beyond the state is written again by the next start. A shard has a hidden name until it is full.
"""
import json
import os
from pathlib import Path

import numpy as np

from support.cli import UsageError, replacing

FIXED = ("tokenizer", "field", "shard_tokens", "held_out", "books")    # a later start has the same
MANIFEST = ".prepare.json"                             # hidden, so that train.py leaves it out


def open_folder(args, files):
    """The state of the folder --out: what it is made from, how far it is. A new one is at 0."""
    out, manifest = Path(args.out), Path(args.out, MANIFEST)
    state = {"flags": {name: getattr(args, name) for name in FIXED},
             "files": [[str(path), path.stat().st_size] for path in files],
             "file": 0, "line": 0, "bytes": 0, "tokens": 0, "train": 0, "val": 0, "books": 0}
    out.mkdir(parents=True, exist_ok=True)
    if not manifest.exists():
        if any(not path.name.startswith(".") for path in out.iterdir()):
            raise UsageError(f"{out} holds something else: name a new folder")
        return state
    before = json.loads(manifest.read_text())
    for name, value in before["flags"].items():
        if value != state["flags"][name]:
            flag = "--" + name.replace("_", "-")
            raise UsageError(f"{out} was begun with {flag} {value}: take it, or another --out")

    # A file that is not read to its end may have another size: a damaged one can be repaired.
    names = [[name for name, _ in s["files"]] for s in (before, state)]
    done = before["file"]
    if names[0] != names[1] or before["files"][:done] != state["files"][:done]:
        raise UsageError(f"{out} was begun with other files: take them, or another --out")
    if not is_finished(before):
        for path in [*out.glob("*.tmp"), *out.glob(".*.tmp")]:
            path.unlink()
        for part in ("train", "val"):
            cut(out, part, before[part], args.shard_tokens)
    return before | {"files": state["files"]}


def append(out, part, written, tokens, size):
    """Add tokens to the `written` ones of a part, in shards of `size`. Returns the new number."""
    while len(tokens):
        n, filled = divmod(written, size)
        added, tokens = np.split(tokens, [size - filled])
        write_shard(out / f".data_{part}_{n:06}.bin", filled, added)
        written += len(added)
    return written


def write_shard(path, filled, tokens):
    """Let a shard end with these tokens after its first `filled`, behind llm.c's header."""
    path.touch()
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, filled + len(tokens)
    with open(path, "r+b") as file:
        file.write(header.tobytes())
        file.seek(1024 + 2 * filled)
        file.write(tokens.tobytes())
        file.truncate()


def cut(out, part, written, size):
    """Take away what a crashed start wrote after the `written` tokens that its state counts."""
    last, filled = divmod(written, size)
    for path in out.glob(f".data_{part}_*.bin"):
        if number_of(path) * size >= written:
            path.unlink()
    if filled:
        path = out / f".data_{part}_{last:06}.bin"
        if not path.exists() or path.stat().st_size < 1024 + 2 * filled:
            raise UsageError(f"{path} has lost tokens: begin again with another --out")
        write_shard(path, filled, np.empty(0, "<u2"))


def number_of(path):
    return int(path.stem.split("_")[2])


def flush(path):
    """Bring a file to the disk: a power cut must not leave an empty one."""
    with open(path, "r+b") as file:
        os.fsync(file.fileno())


def save(out, state):
    """Write down how far the folder is, then give the shards before that their names."""
    shards = list(out.glob(".data_*.bin"))
    for path in shards:
        flush(path)
    with replacing(out / MANIFEST) as file:
        file.write(json.dumps(state).encode())
    full = state["flags"]["shard_tokens"]
    for path in shards:
        least = 1 if is_finished(state) else full      # the last shard of all may be short
        if number_of(path) * full + least <= state[path.stem.split("_")[1]]:
            path.replace(path.with_name(path.name[1:]))


def is_finished(state):
    return state["file"] == len(state["files"])
