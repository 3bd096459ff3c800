"""What all scripts share: flags, one-line errors, exit codes, devices, text, and safe writes."""
import argparse
import ctypes
import os
import platform
import re
import sys
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist


class UsageError(Exception):
    """A mistake the user can fix. The message says what is wrong and what to do.

    code: the exit code, 3 for training that diverged.
    """

    def __init__(self, message, code=1):
        super().__init__(message)
        self.code = code


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Parser(argparse.ArgumentParser):
    """Shows a script's docstring as it is, and raises UsageError for a wrong flag."""

    def __init__(self, description):
        # The command as you type it: Python before 3.14 shows `python -m course.playground` as
        # __main__.py. In pdb, and in a notebook's second %run, __main__ has no spec.
        spec = getattr(sys.modules["__main__"], "__spec__", None)
        prog = f"python -m {spec.name.removesuffix('.__main__')}" if spec else None
        super().__init__(prog, description=description, allow_abbrev=False,
                         formatter_class=argparse.RawDescriptionHelpFormatter)

    def flag(self, name, default, text, type=None, least=1, shown=None, **options):
        """Add a flag of the default's type. least: for numbers; shown: the default, in words."""
        kind = type or default.__class__
        self.add_argument(name, default=default, help=f"{text} [{shown or default}]",
                          type=partial(number, kind, least) if kind in (int, float) else kind,
                          **options)

    def given(self, argv=None):
        """{name: value} of the flags that argv gives, without the defaults of the others."""
        none = argparse.Namespace(**dict.fromkeys(vars(self.parse_args([]))))
        return {name: x for name, x in vars(self.parse_args(argv, none)).items() if x is not None}

    def error(self, message):
        raise UsageError(f"{message}; -h lists the flags")


def number(kind, least, text):
    """Parse a flag's text as an int or float that is `least` or more."""
    try:
        value = kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a {'whole ' * (kind is int)}number"
                                         ) from None
    if not least <= value < 2**63:
        rule = "is too large" if value > least else f"must be at least {least}"
        raise argparse.ArgumentTypeError(f"{text} {rule}")
    return value


def cli(main):
    """Run `main()`. An error the user can fix prints one line and exits with 1, Ctrl-C with 130."""
    sys.stdout = sys.stdout or open(os.devnull, "w")   # a closed one is None
    if hasattr(sys.stdout, "reconfigure"):             # but not in a notebook
        sys.stdout.reconfigure(errors="replace")
    try:
        main()
        sys.stdout.flush()
        if dist.is_initialized():
            # FSDP2 never releases its groups, and their threads may abort a process as it ends.
            os._exit(0)
    except BrokenPipeError:                            # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except (UsageError, FloatingPointError) as e:
        fail(e, getattr(e, "code", 1))
    except OSError as e:
        fail(f"{e.filename}: {e.strerror}" if e.filename else e)
    except (MemoryError, RuntimeError) as e:
        if is_out_of_memory(e):
            fail("out of memory: use a smaller model, --batch-size or --seq-len")
        if not dist.is_initialized() or not re.search("Connection|peer|NCCL", str(e)):
            raise
        fail("another process has ended")
    except KeyboardInterrupt as e:                     # train.py's has its own message
        if not rank():
            print(*(e.args or ["stopped: rerun the command to go on"]), file=sys.stderr)
        sys.exit(130)


def is_out_of_memory(e):
    """Whether an error means out of memory. On a CPU only torch's message tells."""
    words = "not enough memory|can't allocate memory|size.* overflow"
    return isinstance(e, (MemoryError, torch.OutOfMemoryError)) or bool(re.search(words, str(e)))


def fail(message, code=1):
    """Exit with one line on stderr. If all processes of torchrun fail, only number 0 prints it."""
    message = on_one_line(message)
    if rank():
        time.sleep(5)                                  # torchrun ends this process meanwhile
        message = f"process {rank()}: {message}"
    print(f"error: {message}", file=sys.stderr)
    sys.exit(code)


def rank():
    """The number of this process among those of torchrun."""
    return dist.get_rank() if dist.is_initialized() else 0


def get_device(name):
    """The torch.device of that name, after checking that it works. A GPU becomes the current one.

    Each process of torchrun has a GPU of its own. Triton and FSDP2 run on the current GPU, wherever
    the tensors are. For a CPU this calls keep_freed_memory.
    """
    if name == "cuda" and dist.is_initialized():
        name = f"cuda:{os.environ['LOCAL_RANK']}"
    try:
        x = torch.zeros(1, device=name)
        (x if x.is_mps else x.double()).item()         # angles need float64; mps has none
        if x.is_cuda:
            torch.cuda.set_device(x.device)
        else:
            keep_freed_memory()
        return x.device
    except Exception as e:
        reason = (str(e) or type(e).__name__).splitlines()[0][:80]
        raise UsageError(f"the device {name!r} cannot be used ({reason}): use cpu, or cuda or "
                         "mps if this machine has such a GPU") from None


def products_dtype(device, name="auto"):
    """The dtype of matrix products by the name of --dtype: torch.bfloat16, or None for float32."""
    can = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if name == "bfloat16" or name == "auto" and can else None


def keep_freed_memory():
    """Let glibc keep the memory of freed tensors for the next ones.

    Otherwise glibc returns it to the system after each step and requests it again; page faults
    then take about 8 % of a training step on a CPU. Without glibc this does nothing.
    """
    if platform.libc_ver()[0] == "glibc":
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-1, 2**31 - 1)                         # M_TRIM_THRESHOLD, bytes: the largest
        mallopt(-3, 2**25)                             # M_MMAP_THRESHOLD, bytes: the largest


def on_one_line(x):
    """x as text on one line, without tabs, and with ? for whatever is not UTF-8."""
    return " ".join(str(x).encode(errors="replace").decode().split())


def flag(name, *value):
    """A flag as you would type it."""
    return " ".join([f"--{name.replace('_', '-')}", *map(shown, value)])


def shown(value):
    """A flag's value on one line."""
    return on_one_line(" ".join(value) if isinstance(value, list) else value)


def error_line(e):
    """The type of an exception and the first line of its message; two, if that ends with ":"."""
    first, *rest = [line.strip() for line in str(e).splitlines() if line.strip()] or [""]
    if first.endswith(":") and rest:
        first += f" {rest[0]}"
    return f"{type(e).__name__}: {first}"


def printable(text):
    """The text with its control characters escaped, as in \\x07, except newlines and tabs."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def own_folder(name):
    """The Path of --out. Raises UsageError if it is not a folder, or is the current one."""
    path = Path(name)
    if path == Path() or path.exists() and not path.is_dir():
        raise UsageError(f"--out {name!r}: name a folder, a new one or that of an earlier run")
    return path


def at_most_3(names):
    """The first three of some names, and how many more there are."""
    more = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
    return ", ".join(map(str, names[:3])) + more


def clock(seconds):
    """Seconds as h:mm:ss."""
    return f"{int(seconds) // 3600}:{int(seconds) // 60 % 60:02d}:{int(seconds) % 60:02d}"


@contextmanager
def naming(path):
    """Inside `with naming(path)` the error of a full disk, which names no file, names this one."""
    try:
        yield
    except Exception as e:
        for error in (e, e.__context__):               # torch hides it behind another one
            if isinstance(error, OSError):
                error.filename = str(path)
                raise error from None
        raise


@contextmanager
def replacing(path):
    """`with replacing(path) as file`: the file at `path` is always complete, the old or the new.

    It is written under another name, flushed to the disk (a power cut must not leave an empty
    file), then renamed. An error leaves the old one as it was.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with naming(path):
            with open(temporary, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
