"""Give train.py, abcdigits.py and support.prepare 60 and more bad inputs. Run by hand.

    python -m tests.bad_inputs                     a minute

Each must end within 20 seconds with exit code 1 and one line on stderr, and must leave the files
that were there as they were. What did not is printed; the last line counts.
"""
import os
import select
import signal
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

import abcdigits
import train
from support import prepare
from support.checkpoint import read_checkpoint, save_checkpoint
from support.cli import cli
from tests.helpers import SMALL, TEXT

NEW = "--out new --data text.txt "
TRAIN = [
    # Sizes and numbers.
    NEW + "--psi 0", NEW + "--psi -3", NEW + "--psi many", NEW + "--psi 200", NEW + "--psi 100000",
    NEW + f"--psi {10**30}", NEW + "--layers 0", NEW + f"--layers {10**12}", NEW + "--lr 1e30",
    NEW + "--lr nan", NEW + "--lr -1", NEW + "--seed -1", NEW + f"--seed {2**64}",
    NEW + "--batch-size 0", NEW + f"--batch-size {10**9}", NEW + f"--seq-len {10**9}",
    NEW + "--seq-len 0", NEW + "--steps 0", NEW + "--steps 1.5", NEW + "--clip -1",
    NEW + "--batch-tokens 500", NEW + "--batch-tokens 0", NEW + "--shard 2", NEW + "--shard 0",
    NEW + "--warmup -1", NEW + "--save-every 0", NEW + "--log-every 0",
    # Names.
    NEW + "--model nothing", NEW + "--model transformer:3M", NEW + "--model multiscreen:what",
    NEW + "--model transformer:8M --psi 3", NEW + "--tokenizer words", NEW + "--device nonsense",
    NEW + "--device cuda", NEW + "--device meta", NEW + "--device mps", NEW + "--dtype int8",
    NEW + "--kernel triton", NEW + "--kernel nothing", NEW + "--nonsense 1", NEW + "--ste 3",
    # Data.
    "--out new --data missing.txt", "--out new --data empty.txt", "--out new --data latin.txt",
    "--out new --data short.txt", "--out new --data empty.bin", "--out new --data odd.bin",
    "--out new --data truncated.bin", "--out new --data beyond.bin", "--out new --data nothing",
    "--out new --data binary", "--out new --data fifo", "--out new --data /dev/zero",
    "--out new --data /", f"--out new --data {'x' * 5000}", "--out new --data only_val",
    "--out new --data abcdigits --digits 1", "--out new --data abcdigits --digits 20",
    # Folders and checkpoints.
    "--out out --data text.txt", "--out text.txt --data text.txt", "--out text.txt/x",
    "--out link --data text.txt", "--out new --resume", "--out half --resume --steps 9",
    "--out flipped --resume --steps 9", "--out nan --resume --steps 9",
    "--out shape --resume --steps 9", "--out out --resume --steps 9 --psi 3",
    "--out moved --resume --steps 9", NEW + "--init half/ckpt.pt", NEW + "--init nowhere.pt",
    NEW + "--init out/ckpt.pt --psi 3", "--out new --data text.txt --resume --force",
    "--out out --resume --init out/ckpt.pt",
]
ABCDIGITS = [
    "--ckpt nowhere.pt", "--ckpt half/ckpt.pt", "--ckpt nan/ckpt.pt", "--lengths 3",
    f"--lengths {10**30}", "--depths 2", "--trials 0", "--digits 1", "--rope-scale 2",
]
PREPARE = ["--out new missing.jsonl", "--out new torn.jsonl", "--out new binary/a.txt",
           "--out new --tokenizer words text.txt", "--out new odd.parquet"]


def make(folder):
    """The files that the inputs name."""
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, 5000
    files = {"text.txt": TEXT.encode(), "empty.txt": b"", "latin.txt": b"caf\xe9 " * 100,
             "short.txt": b"short", "empty.bin": b"", "odd.bin": b"123",
             "beyond.bin": np.full(5000, 300, "<u2").tobytes(),
             "truncated.bin": header.tobytes() + b"12" * 4000, "binary/a.txt": b"caf\xe9 " * 100,
             "only_val/val.bin": b"12" * 5000, "torn.jsonl": b'{"text": "a"}\n{"text":',
             "odd.parquet": b"no", "moved/text.txt": TEXT.encode()}
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    (folder / "nothing").mkdir()
    os.mkfifo(folder / "fifo")
    train.main([*SMALL, "--data", "text.txt", "--out", "out", "--steps", "2"])
    train.main([*SMALL, "--data", "moved/text.txt", "--out", "moved", "--steps", "2"])
    (folder / "moved/text.txt").write_text(TEXT + "more")
    good = (folder / "out/ckpt.pt").read_bytes()
    for name in ("half", "flipped", "nan", "shape", "link"):
        (folder / name).mkdir()
    (folder / "half/ckpt.pt").write_bytes(good[: len(good) // 2])
    flipped = bytearray(good)
    flipped[good.index(torch.load("out/ckpt.pt")["weights"]["W_E"].numpy().tobytes())] ^= 1
    (folder / "flipped/ckpt.pt").write_bytes(flipped)
    ckpt = read_checkpoint("out/ckpt.pt")
    ckpt["weights"]["W_E"][0] = torch.nan
    save_checkpoint(folder / "nan/ckpt.pt", ckpt)
    ckpt = read_checkpoint("out/ckpt.pt")
    ckpt["optimizer"]["state"][0]["exp_avg"] = torch.zeros(3)
    save_checkpoint(folder / "shape/ckpt.pt", ckpt)
    (folder / "link/ckpt.pt").symlink_to(folder / "text.txt")


def run_forked(main, argv, seconds=20):
    """(exit code or "hangs", stderr) of cli(main) in a fork of this process."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(write, 2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.argv = argv
        code = 0
        try:
            cli(main)
        except SystemExit as e:
            code = e.code
            if isinstance(code, str):
                os.write(2, f"{code}\n".encode())
                code = 1
        except BaseException as e:
            os.write(2, f"traceback: {e!r}\n".encode())
            code = 99
        os._exit(code)
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
    return {p: p.read_bytes() for p in Path().rglob("*") if p.is_file() and "lock" not in p.name}


def main():
    torch.set_num_threads(1)
    os.environ.pop("TRITON_INTERPRET", None)           # the kernel would run on a CPU, and slowly
    os.chdir(tempfile.mkdtemp())
    make(Path().resolve())
    small = " ".join(SMALL)
    cases = [(train.main, "train.py", f"{small} {flags}") for flags in TRAIN]
    cases += [(abcdigits.main, "abcdigits.py",
               flags if "--ckpt" in flags else f"--ckpt out/ckpt.pt {flags}")
              for flags in ABCDIGITS]
    cases += [(prepare.main, "support.prepare", flags) for flags in PREPARE]
    before = contents()
    good = 0
    for function, name, flags in cases:
        code, said = run_forked(function, [name, *flags.split()])
        same = contents() == before
        right = code == 1 and said.startswith("error: ") and said.count("\n") == 1 and same
        good += right
        shown = flags.replace(small, "..")[:100]
        print(f"{'ok ' if right else 'BAD'} {name} {shown}: {said.strip()[:200]}", flush=True)
        if not right:
            print(f"    exit code {code}, files {'unchanged' if same else 'changed'}", flush=True)
            for p in contents().keys() - before.keys():
                p.unlink()
    print(f"{len(cases)} bad inputs, {good} one-line errors")
    sys.exit(good != len(cases))


if __name__ == "__main__":
    main()
