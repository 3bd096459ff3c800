"""Give the commands several hundred bad inputs. Run by hand: python -m tests.bad_inputs

Each must end within 20 seconds with one line on stderr and exit code 1, and must leave existing
files as they were. Failures are printed; the table at the end counts by command.
"""
import importlib
import os
import select
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
import torch

import train
from support.checkpoint import KEYS, read_checkpoint, save_checkpoint
from support.cli import cli
from support.tokens import write_bin
from tests.helpers import SMALL, TEXT

HUGE, LONG_NAME = 10**30, "x" * 5000
NO_FILES = ["folder", "", ".", "missing", LONG_NAME, "text.txt", "half/ckpt.pt"]
FIRST = [x or "''" for x in NO_FILES]                  # an empty word on the command line
TABLES = [*FIRST, "--nonsense", "wrong.tsv", "binary/a.txt", "empty.txt",
          "wrong.tsv --out new", "wrong.tsv --out text.txt", "wrong.tsv --out new.png"]

# For each command: the flags it needs to reach the bad input, and the inputs. Spaces separate
# words; NAME=value sets the environment.
NEW = "--out new --data text.txt"
COMMANDS = {
    "train": (" ".join(SMALL), [
        # Sizes and numbers.
        *(f"{NEW} --psi {x}" for x in (0, -3, 2.5, "many", 100000, HUGE)),
        *(f"{NEW} --layers {x}" for x in (0, -1, 10**12, "²")),
        *(f"{NEW} --lr {x}" for x in ("1e30", "nan", "-1", "inf", "x")),
        *(f"{NEW} --w-th {x}" for x in ("nan", "-1", "1", "inf", "x")),
        *(f"{NEW} --seed {x}" for x in (-1, 2**64, "x")),
        *(f"{NEW} --batch-size {x}" for x in (0, -1, 10**9, HUGE)),
        *(f"{NEW} --seq-len {x}" for x in (0, -1, 10**9, HUGE)),
        *(f"{NEW} --steps {x}" for x in (0, 1.5, -1, HUGE)),
        *(f"{NEW} --batch-tokens {x}" for x in (500, 0, -128, HUGE)),
        *(f"{NEW} --shard {x}" for x in (2, 0, -1)),
        *(f"{NEW} --{x}" for x in ("clip -1", "clip nan", "weight-decay -1", "weight-decay nan",
                                   "warmup -1", "save-every 0", "log-every 0", "eval-every 0")),
        # Names.
        *(f"{NEW} --model {x}" for x in (
            "nothing", "transformer:3M", "multiscreen:what", "transformer:8M --psi 3",
            "transformer:8M --w-th 9", "transformer:1,2", "transformer:1,2,7",
            "transformer:0,2,8", "transformer:²,2,8")),
        *(f"{NEW} --device {x}" for x in ("nonsense", "cuda", "meta", "mps", "cuda:99", "")),
        *(f"{NEW} --{x}" for x in ("tokenizer words", "dtype int8", "kernel triton",
                                   "kernel nothing", "nonsense 1", "ste 3")),
        # Data.
        *(f"--out new --data {x}" for x in (
            *NO_FILES[:-2], "/dev/zero", "fifo", "empty.txt", "latin.txt", "short.txt",
            "empty.bin", "odd.bin", "truncated.bin", "beyond.bin", "version.bin",
            "count.bin", "nothing", "binary", "/dev", "only_val", "dangling", "a.jsonl",
            "stdlib text.txt", "abcdigits x", "passkey", "passkey x")),
        *(f"--out new --data abcdigits --digits {x}" for x in (1, 20, -1, 400, "²")),
        # Folders and checkpoints.
        *(f"--data text.txt --out {x}" for x in (
            "/dev/zero", "/dev/full", "/dev/null", "fifo", ".", "./", "text.txt", "text.txt/x",
            "notes", "out", "/proc/x", LONG_NAME)),
        *(f"--out {x} --resume --steps 9" for x in (
            "new", "half", "flipped", "moved", "link", "text.txt")),
        *(f"--out out --resume --steps 9 --{x}" for x in (
            "psi 3", "seed 5", "seq-len 16", "tokenizer gpt2", "model multiscreen:nope",
            "data notes", "digits 3", "layers 1")),
        *(f"{NEW} --init {x}" for x in (*NO_FILES, "out/ckpt.pt --psi 3", "flipped/ckpt.pt",
                                        "out/ckpt.pt --model multiscreen:rope")),
        f"{NEW} --resume --force", "--out out --resume --init out/ckpt.pt",
        "--out out --force --init out/ckpt.pt --steps 9",
        f"TORCHELASTIC_RUN_ID=1 {NEW}", f"TORCHELASTIC_RUN_ID=1 RANK=0 WORLD_SIZE=a {NEW}",
        f"TORCHELASTIC_RUN_ID=1 RANK=x WORLD_SIZE=1 {NEW}",
        f"TORCHELASTIC_RUN_ID=1 RANK=0 WORLD_SIZE=1 {NEW}",
    ]),
    "abcdigits": ("--device cpu --trials 1", [
        *(f"--ckpt {x}" for x in NO_FILES), "--ckpt flipped/ckpt.pt", "--ckpt link/ckpt.pt",
        *(f"--ckpt out/ckpt.pt {x}" for x in (
            "--lengths 3", f"--lengths {HUGE}", "--lengths -1", "--lengths ²", "--depths 2",
            "--depths nan", "--depths -0.1", "--trials 0", "--trials -5", "--digits 1",
            "--digits 400", "--digits ²", "--digits -1", "--rope-scale 2", "--device nonsense",
            "--seeds ²", "x")),
        *(f"--ckpt rope/ckpt.pt --rope-scale {x}" for x in (0, "nan", -1, "inf", "x",
                                                                "ntk", "ntk0", "4ntk")),
        "--ckpt transformer/ckpt.pt --swe",
    ]),
    "support.prepare": ("", [
        *(f"--out new {x}" for x in (
            "missing.jsonl", "torn.jsonl", "odd.parquet", "a.jsonl text.txt", "nothing", "out",
            "torn.jsonl.gz", "nofield.jsonl", "null.jsonl", "fifo", "/dev/zero", "")),
        *(f"--out new {x} a.jsonl" for x in (
            "--tokenizer words", "--books -1", "--books 0", "--books x", "--shard-tokens 0",
            f"--shard-tokens {HUGE}", "--held-out -1", "--field nothing", "--nonsense")),
        *(f"--out {x} a.jsonl" for x in ("out", "text.txt", "/dev/zero", "fifo", ".", "", "notes")),
        "", "--out new", "a.jsonl",
    ]),
    "experiments.passkey": ("--device cpu --trials 1", [
        *(f"--ckpt {x}" for x in NO_FILES),
        *(f"--ckpt out/ckpt.pt {x}" for x in ("--lengths 10", f"--lengths {HUGE}", "--depths 3",
                                              "--trials 0", "--digits 3", "--rope-scale 2")),
    ]),
    "experiments.perplexity": ("", [
        *TABLES, "wrong.tsv --device cpu", "--out new.png",
        *(f"--ckpt {x}" for x in NO_FILES),
        *(f"--ckpt out/ckpt.pt --data {x}" for x in NO_FILES[:-2]),
        *(f"--ckpt out/ckpt.pt {x}" for x in (
            "--length 0", "--length -1", f"--length {HUGE}", f"--length {10**13}", "--documents 0",
            "--documents -1", "--window 0", "--window 1", "--window nan", "--window -1",
            "--rope-scale 2", "--data binary", "--data nothing")),
        *(f"--ckpt rope/ckpt.pt --rope-scale {x}" for x in (0, "nan", -1)),
        "--ckpt transformer/ckpt.pt --swe",
    ]),
    "experiments.tiles": ("--device cpu", [
        *(f"--ckpt {x}" for x in NO_FILES),
        *(f"--ckpt out/ckpt.pt {x}" for x in ("--tokens 0", "--tokens 5000", "--tokens ²",
                                              "--text=", "--device x")),
        "--ckpt transformer/ckpt.pt",
    ]),
    "experiments.sample": ("--device cpu --tokens 3", [
        *(f"--ckpt {x}" for x in NO_FILES),
        *(f"--ckpt out/ckpt.pt {x}" for x in (
            "--tokens 0", "--temperature -1", "--temperature 1e-45", "--temperature nan",
            "--top-k 0", "--seed -1", f"--seed {2**64}", "--tokens ²")),
    ]),
    **{f"experiments.{name}": ("", [
        *FIRST, "--nonsense", "out --out /dev/zero", "out --out text.txt", "out --out fifo",
        "out torn_log", "notes", "nan.tsv", "cut.tsv", *["out cut_run"][:name == "scaling"],
    ]) for name in ("scaling", "compare")},
    "experiments.retrieval": ("", ["", *TABLES]),
    "benchmarks.cpu": ("", [
        *TABLES, "wrong.tsv --device cpu", "--out new.png",
        *(f"--ckpt {x}" for x in NO_FILES),
        *(f"--table new.tsv {x}" for x in (
            "--psi 0", "--psi ²", f"--psi {HUGE}", "--repeats 0", "--models transformer:3M",
            "--device meta", "--what nothing", *(f"{name} {x}" for name in (
                "--lengths", "--contexts") for x in (0, -1, "²", 10**13, HUGE)))),
        *(f"--psi 2 --models multiscreen --what forward --lengths 8 --repeats 1 --table {x}"
          for x in ("/dev/zero", "text.txt", "wrong.tsv", "folder/x/new.tsv")),
    ]),
    "benchmarks.gpu": ("", ["nothing", "check nothing", "--minutes x", "--out text.txt",
                            "--out /dev/zero", "--nonsense", "check", "kernel", "all"]),
    "benchmarks.kernel_compile": ("", ["--x", "3", "-1", "x y", "--psi 3", "--h", "-q", "²", "a",
                                       "--ckpt x"]),
    "playground.__main__": ("--device cpu", [
        *(f"--ckpt {x} --out new.html" for x in NO_FILES),
        *(f"--ckpt out/ckpt.pt {x}" for x in ("--tokens 0", "--tokens 1000000", "--text=",
                                              "--out folder", "--out /dev/zero",
                                              "--out text.txt/x")),
        "--ckpt transformer/ckpt.pt --out new.html",
    ]),
    "exercises.handout": ("", ["--nonsense", "--out folder", "--out missing/course.zip"]),
}

# (an entry of a checkpoint, its replacement; GONE removes it). Such checkpoints come from another
# version; deliberate forgeries are not guarded against.
GONE = object()
FORGED = [
    *(((name,), GONE) for name in sorted(KEYS)), (("args", "seq_len"), GONE),
    (("args", "seed"), GONE), (("weights", "W_E"), GONE),
    (("weights", "W_E"), torch.zeros(3)), (("weights", "foreign"), torch.zeros(3)),
]
# Entries that only --resume reads.
FOR_RESUME = {"optimizer", "step", "drawn", "data_state", "random_state", "log", "files",
              "equations", "source"}


def make_files(folder):
    """Write the files named in the inputs."""
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, 5000
    files = {
        "text.txt": TEXT.encode(), "empty.txt": b"", "latin.txt": b"caf\xe9 " * 100,
        "short.txt": b"short", "empty.bin": b"", "odd.bin": b"123",
        "beyond.bin": np.full(5000, 300, "<u2").tobytes(),
        "truncated.bin": header.tobytes() + b"12" * 4000, "binary/a.txt": b"caf\xe9 " * 100,
        "only_val/val.bin": b"12" * 5000, "a.jsonl": b'{"text": "a"}\n',
        "torn.jsonl": b'{"text": "a"}\n{"text":', "torn.jsonl.gz": b"\x1f\x8b\x08\x00",
        "nofield.jsonl": b'{"x": "a"}\n', "null.jsonl": b'{"text": "a"}\n{"text": null}\n',
        "odd.parquet": b"no", "moved/text.txt": TEXT.encode(), "notes/log.tsv": b"my notes\n",
        "wrong.tsv": b"a\tb\n1\t2\n", "nan.tsv": b"\xff\x00\n", "cut.tsv": b"model\tpsi",
        "folder/x": b"", "nothing/.x": b"",
    }
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    os.mkfifo(folder / "fifo")
    for name, position in {"version.bin": 33, "count.bin": 66}.items():
        write_bin(folder / name, np.arange(5000) % 256)
        flip(folder / name, position)
    (folder / "damaged").mkdir()
    write_bin(folder / "damaged/a.bin", np.arange(5000) % 256)
    flip(folder / "damaged/a.bin", 8 * 2000)
    for name in ("dangling", "half", "flipped"):
        (folder / name).mkdir()
    (folder / "dangling/a.txt").symlink_to("missing")


def flip(path, bit):
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def make_runs(folder):
    """Make the runs named in the inputs; yield (command, flags, what is forged)."""
    small = [*SMALL, "--data", "text.txt", "--steps", "2"]
    train.main([*small, "--out", "out"])
    train.main([*small, "--out", "rope", "--model", "multiscreen:rope"])
    train.main([*small[2:], "--out", "transformer", "--model", "transformer:1,2,8"])
    train.main([*small, "--out", "cut_run", "--log-every", "1"])
    train.main([*SMALL, "--data", "moved/text.txt", "--out", "moved", "--steps", "2"])
    (folder / "moved/text.txt").write_text(TEXT + "more")
    (folder / "cut_run/log.tsv").write_text("step\tloss\n1\t2.5\n")
    (folder / "torn_log").mkdir()
    (folder / "torn_log/log.tsv").write_bytes(b"\xff\x00\n\t\n")
    (folder / "torn_log/flags.txt").write_bytes(b"\xff")
    good = (folder / "out/ckpt.pt").read_bytes()
    (folder / "half/ckpt.pt").write_bytes(good[: len(good) // 2])
    (folder / "flipped/ckpt.pt").write_bytes(good)
    W_E = torch.load("out/ckpt.pt")["weights"]["W_E"].numpy().tobytes()
    flip(folder / "flipped/ckpt.pt", 8 * good.index(W_E))

    for n, (path, x) in enumerate(FORGED):
        ckpt = place = read_checkpoint("out/ckpt.pt")
        for name in path[:-1]:
            place = place[name]
        if x is GONE:
            place.pop(path[-1])
        else:
            place[path[-1]] = x
        out = folder / f"forged_{n}"
        out.mkdir()
        save_checkpoint(out / "ckpt.pt", ckpt)
        about = f"{'.'.join(path)} = {'GONE' if x is GONE else repr(x)[:30]}"
        yield "train", f"--out {out.name} --resume --steps 9", about
        if path[0] not in FOR_RESUME and path[:2] not in [("args", name) for name in (
                "lr", "model", "steps", "batch_size", "clip")]:
            yield "abcdigits", f"--ckpt {out.name}/ckpt.pt --device cpu --trials 1", about


def run(main, words, seconds=20):
    """(exit code or "hangs", stderr) of cli(main) in a fork of this process."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(write, 2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = 0
        try:
            settings = [x for x in words if x.partition("=")[0].isupper() and "=" in x]
            os.environ.update(x.split("=", 1) for x in settings)
            sys.argv = ["command", *(x for x in words if x not in settings)]
            cli(main)
        except SystemExit as e:
            code = e.code
        except BaseException as e:
            os.write(2, f"traceback: {e!r}\n".encode())
            code = 99
        os._exit(code or 0)
    os.close(write)
    said, end = b"", time.monotonic() + seconds
    while time.monotonic() < end and select.select([read], [], [], end - time.monotonic())[0]:
        part = os.read(read, 4096)
        if not part:
            break
        said += part
    else:
        os.kill(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    os.close(read)
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else "hangs", said.decode()


def contents():
    """{path: bytes} of all files but locks."""
    return {p: p.read_bytes() for p in Path().rglob("*") if p.is_file() and p.name != "lock"}


def main():
    torch.set_num_threads(1)
    os.chdir(tempfile.mkdtemp())
    make_files(Path())
    cases = [(name, f"{before} {flags}", "") for name, (before, all_flags) in COMMANDS.items()
             for flags in all_flags]
    cases += make_runs(Path().resolve())
    if sys.argv[1:]:                                   # the named commands only
        cases = [case for case in cases if case[0] in sys.argv[1:]]
    mains = {name: importlib.import_module(name).main for name, *_ in cases}
    # Importing the course sets it, and the kernel would run slowly on the CPU.
    os.environ.pop("TRITON_INTERPRET", None)
    before, tried, good = contents(), Counter(), Counter()
    for name, flags, about in cases:
        words = ["" if x == "''" else x for x in flags.lstrip().split(" ")]
        code, said = run(mains[name], words if flags.strip() else [])
        same = contents() == before
        right = code in (1, 3) and said.startswith("error: ") and said.count("\n") == 1 and same
        tried[name] += 1
        good[name] += right
        if not right:
            print(f"{name} {flags[-120:]} {about}\n    exit code {code}, files "
                  f"{'unchanged' if same else 'changed'}: {said.strip()[-300:]}", flush=True)
            for p in contents().keys() - before.keys():
                p.unlink()
            for p in (p for p, content in before.items() if p.read_bytes() != content):
                p.write_bytes(before[p])
    print("\n| command | bad inputs | one line |\n|---|--:|--:|")
    for name, n in tried.items():
        print(f"| {name} | {n} | {good[name]} |")
    print(f"| all | {tried.total()} | {good.total()} |")
    sys.exit(good != tried)


if __name__ == "__main__":
    main()
