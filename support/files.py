"""The files that --data names: which they are, what they hold, whether they are still the same."""
import codecs
import hashlib
import os
import stat
import struct
import sysconfig
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from support.cli import UsageError

BLOCK = 2**18                                          # bytes of text that are read at a time
EDGE = 4096                                            # bytes at each end of a file: one page


# ------------------------------------------------------------------------------------- find

def files_of(names):
    """Yield (path, use) of each file that --data names. use: "train", "val", or None: left out.

    stdlib names the files of Python's own standard library, abcdigits none.

    Folders are searched recursively. Of a folder with token files no other file is used: a text
    beside them is what they were made from. Text is read to see that it is UTF-8, one file at a
    time: a caller may stop long before the last.
    """
    if list(names) == ["abcdigits"]:
        return
    if list(names) == ["stdlib"]:
        yield from ((path, "train") for path in standard_library())
        return
    for name in names:
        path = Path(name)
        if not is_folder(path):
            yield path, "val" if is_held_out(path, path.parent) else "train"
            continue
        files = walk(path)
        if not files:
            raise UsageError(f"the folder {path} has no files")

        has_tokens = any(p.suffix == ".bin" for p in files)
        left_out = 0
        for p in files:
            if p.suffix == ".bin" or not has_tokens and p.suffix != ".jsonl" and is_text(p):
                yield p, "val" if is_held_out(p, path) else "train"
            else:
                left_out += 1
                yield p, None
        if left_out == len(files):
            raise UsageError(f"the folder {path} has no UTF-8 text and no .bin file")


def is_folder(path):
    """Whether a path is a folder; raises UsageError if it holds no text, or is the root."""
    try:
        status = path.stat()
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist") from None
    if stat.S_ISDIR(status.st_mode):
        if path.resolve() == path.resolve().parent:
            raise UsageError(f"{path} is the root of the file system: name a folder of texts")
        return True
    if not stat.S_ISREG(status.st_mode):
        raise UsageError(f"{path} is neither a file nor a folder: write its text to a file")
    if ".jsonl" in path.suffixes or path.suffix == ".parquet":
        raise UsageError(f"{path} holds documents in a format: python -m support.prepare takes "
                         "them out")
    if not status.st_size and path.suffix != ".bin":
        raise UsageError(f"{path} is empty")
    return False


def walk(folder):
    """The files below a folder, sorted. Hidden ones and links to folders are left out."""
    def fail(error):
        raise error                                    # os.walk would skip what it cannot read

    files = []
    for path, folders, names in os.walk(folder, onerror=fail):
        folders[:] = [f for f in folders if not f.startswith(".")]
        files += [Path(path, name) for name in names if not name.startswith(".")]
    return sorted(p for p in files if p.is_file())


def is_held_out(path, root):
    """Whether a file is for validation, as nanoGPT and llm.c name it, or in a folder val/.

    root: the folder that --data names, or that of the file. The folders above have no say.
    """
    if "val" in (root.resolve().name, *path.relative_to(root).parts[:-1]):
        return True
    return path.suffix == ".bin" and "val" in path.stem.split("_")


def standard_library():
    """The files of Python's own standard library, in order, without its tests."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    files = [p for p in root.rglob("*.py") if not skip & set(p.relative_to(root).parts)]
    if not files:
        raise UsageError(f"{root} has no source of Python's standard library: name your own text "
                         "with --data")
    return sorted(p for p in files if not p.stat().st_size or is_text(p))


# ------------------------------------------------------------------------------------- read

def read_blocks(path):
    """Yield the text of a UTF-8 file in blocks of a quarter of a megabyte."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    with open(path, "rb") as file:
        try:
            while block := file.read(BLOCK):
                yield decoder.decode(block)
            decoder.decode(b"", final=True)
        except UnicodeDecodeError as e:
            position = file.tell() - len(e.object) + e.start
            raise UsageError(f"{path} is not UTF-8 text: byte {position} is "
                             f"0x{e.object[e.start]:02x}") from None


def read_text(path):
    """The text of a UTF-8 file."""
    return "".join(read_blocks(path))


def is_text(path):
    """Whether a file holds UTF-8 text."""
    try:
        return sum(map(len, read_blocks(path))) > 0
    except UsageError:
        return False


class TokenFile:
    """Tokens of a file, read when `astype` asks for them; a slice is a TokenFile, too.

    Nothing stays in memory and no file stays open, for there may be thousands. A memory map would
    be as fast, but the process would die of a bus error if the file shrinks.
    """

    def __init__(self, path, vocab_size, header, positions):
        self.path, self.vocab_size = path, vocab_size
        self.header, self.positions = header, positions

    def __len__(self):
        return len(self.positions)

    def __getitem__(self, part):
        return TokenFile(self.path, self.vocab_size, self.header, self.positions[part])

    def astype(self, dtype):
        """The tokens as an array, after a comparison with the vocabulary."""
        with open(self.path, "rb") as file:
            file.seek(self.header + 2 * self.positions.start)
            content = file.read(2 * len(self))
        if len(content) < 2 * len(self):
            gone = self.positions[len(content) // 2]
            raise UsageError(f"{self.path} has shrunk: its tokens from {gone} on are gone")
        tokens = np.frombuffer(content, dtype="<u2").astype(dtype)
        beyond = np.flatnonzero(tokens >= self.vocab_size)
        if len(beyond):
            raise UsageError(f"{self.path}: token {tokens[beyond[0]]} at position "
                             f"{self.positions[beyond[0]]} is beyond the vocabulary of "
                             f"{self.vocab_size}: take the --tokenizer that made the file")
        return tokens


def read_bin(path, vocab_size):
    """A token file: raw uint16 (nanoGPT), or behind a header (llm.c).

    llm.c's header: 256 int32, of which the first three are 20240520, version 1, number of tokens.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        magic, version, count = struct.unpack("<3I", file.read(12).ljust(12, b"\0"))
    start = 0
    if magic == 20240520:
        start = 1024
        if version != 1 or size != start + 2 * count:
            raise UsageError(f"{path} is truncated or of another version: its header does not fit "
                             f"its {size} bytes")
    elif size == 0 or size % 2:
        raise UsageError(f"{path} is not a token file: its {size} bytes are not 16-bit tokens")
    tokens = TokenFile(path, vocab_size, start, range((size - start) // 2))

    # A look at both ends finds the wrong --tokenizer before a run begins.
    for end in (tokens[: EDGE // 2], tokens[-EDGE // 2 :]):
        end.astype(np.int64)
    return tokens


# ------------------------------------------------------------------------------------ write

@contextmanager
def replacing(path):
    """`with replacing(path) as file`: the file at `path` is whole at any time, the old or the new.

    It is written under another name, brought to the disk (a power cut must not leave an empty
    file), then renamed. An error leaves the old one as it was.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


# ---------------------------------------------------------------------------------- compare

def fingerprint(files):
    """[absolute path, size, short hash of both ends] of each file of `files_of` that is used."""
    found = []
    for path in (path for path, use in files if use):
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            ends = file.read(EDGE)
            file.seek(max(size - EDGE, 0))
            ends += file.read(EDGE)
        found.append([os.path.abspath(path), size, hashlib.sha256(ends).hexdigest()[:16]])
    return found


def check_fingerprint(old, new):
    """Raise UsageError if the files of two fingerprints differ: it says which, and how."""
    before, now = ({path: rest for path, *rest in files} for files in (old, new))
    changes = []
    for path, (size, ends) in before.items():
        if path not in now:
            changes.append(f"{path} is missing")
        elif now[path][0] != size:
            verb = "grew" if now[path][0] > size else "shrank"
            changes.append(f"{path} {verb} from {size:,} to {now[path][0]:,} bytes")
        elif now[path][1] != ends:
            changes.append(f"{path} has changed")
    changes += [f"{path} is new" for path in now if path not in before]
    if changes:
        raise UsageError(f"the data is not what the run began with: {at_most_3(changes)}")


def at_most_3(names):
    """The first three of some names, and how many more there are."""
    more = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
    return ", ".join(map(str, names[:3])) + more
