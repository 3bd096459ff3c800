"""What all commands share: flags, errors of one line, signals, the device, text to print.

Every command starts here. Read it if you add a command, or wonder where an error line comes from.
"""
import argparse
import ctypes
import math
import os
import platform
import shlex
import signal
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed

ROOT = Path(__file__).resolve().parent.parent          # the folder of this repository
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class UsageError(Exception):
    """A mistake the user can fix. The message says what is wrong and what to do.

    code: the exit code, 3 for training that diverged.
    """

    def __init__(self, message, code=1):
        super().__init__(message)
        self.code = code


class Parser(argparse.ArgumentParser):
    """Shows a script's docstring as it is, and raises UsageError for a wrong flag."""

    def __init__(self, description):
        super().__init__(description=description, allow_abbrev=False,
                         formatter_class=argparse.RawDescriptionHelpFormatter)

    def flag(self, name, default, text, type=None, **options):
        """Add a flag whose help ends with its default. type: that of the default, if not given."""
        shown = ""
        if default is not None:
            shown = f" [{' '.join(default) if isinstance(default, list) else default}]"
        self.add_argument(name, default=default, type=type or default.__class__,
                          help=text + shown, **options)

    def error(self, message):
        raise UsageError(f"{message}; -h lists the flags")


def flag_of(name):
    """How a flag is typed: "--d-E" for the attribute d_E of the parsed flags."""
    return f"--{name.replace('_', '-')}"


def at_least(least, kind=int):
    """The type of a flag that is a number, `least` or more. kind: int or float."""
    def number(text):
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not least <= value < 2**63:
            raise argparse.ArgumentTypeError(f"{text!r} must be a number of type {kind.__name__}, "
                                             f"at least {least} and below 2^63")
        return value

    return number


def cli(main):
    """Run `main()`. A mistake the user can fix prints a line and exits with 1, Ctrl-C with 130."""
    # What a terminal's encoding lacks is escaped: a model writes any character.
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):             # a notebook's has none
            stream.reconfigure(errors="backslashreplace")
    try:
        main()
    except KeyboardInterrupt as e:                     # train.py's says where it stopped
        if rank() == 0:
            print(*(e.args or ["stopped"]), file=sys.stderr)
        leave(130)
    except UsageError as e:
        fail(e, e.code)
    except BrokenPipeError:                            # nobody reads on, as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
    except OSError as e:
        fail(f"{e.filename}: {e.strerror}" if e.filename else e)
    except FloatingPointError as e:
        fail(e)
    except (MemoryError, RuntimeError) as e:
        if not is_out_of_memory(e):
            raise
        fail("out of memory: use a smaller model, --batch-size or --seq-len")


def is_out_of_memory(e):
    """Whether an error means out of memory. On a CPU only torch's message tells."""
    if isinstance(e, (MemoryError, torch.OutOfMemoryError)):
        return True
    return "not enough memory" in str(e) or "can't allocate memory" in str(e)


def fail(message, code=1):
    """Exit with one line on stderr, which number 0 of several processes prints."""
    if rank() == 0:
        print(f"error: {' '.join(str(message).split())}", file=sys.stderr)
    leave(code)


def leave(code):
    """Exit with this code. FSDP2 keeps threads that may abort a process which ends by itself."""
    if torch.distributed.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def rank():
    """The number of this process among those of torchrun."""
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


@contextmanager
def stop_requests():
    """Inside `with stop_requests() as stop`, Ctrl-C, SIGTERM and SIGHUP append to the list `stop`.

    A second one ends the process at once, except under torchrun, which repeats signals itself.
    Afterwards the old handlers are restored. Only the main thread can set handlers.
    """
    stop, handlers = [], {}

    def note(sent, _):
        stop.append(sent)
        if not torch.distributed.is_initialized():
            signal.signal(sent, signal.SIG_DFL)
            # Not `print`, which this may have interrupted.
            os.write(2, b"\nstopping after this step, with a checkpoint; a second time ends at "
                     b"once, without one\n")

    if threading.current_thread() is threading.main_thread():
        for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(s) is not signal.SIG_IGN:          # nohup ignores SIGHUP
                handlers[s] = signal.signal(s, note)
    try:
        yield stop
    finally:
        for s, handler in handlers.items():
            signal.signal(s, handler or signal.SIG_DFL)


def get_device(name):
    """The torch.device of that name, after checking that it works. A GPU becomes the current one.

    Each process of torchrun has a GPU of its own. Triton and FSDP2 run on the current GPU, wherever
    the tensors are. For a CPU this calls keep_freed_memory.
    """
    if name == "cuda" and torch.distributed.is_initialized():
        name = f"cuda:{os.environ['LOCAL_RANK']}"
    try:
        x = torch.zeros(1, device=name)
        x.item()
    except Exception as e:                             # each kind of device has its own errors
        reason = (str(e) or type(e).__name__).splitlines()[0]
        raise UsageError(f"the device {name!r} cannot be used ({reason}): use cpu, or cuda or mps "
                         "if this machine has such a GPU") from None
    if x.is_cuda:
        torch.cuda.set_device(x.device)
    else:
        keep_freed_memory()
    return x.device


def keep_freed_memory():
    """Let glibc keep the memory of freed tensors for the next ones.

    Otherwise glibc returns it to the system after each step and requests it again; page faults
    then take about 8 % of a training step on a CPU. Without glibc this does nothing.
    """
    if platform.libc_ver()[0] == "glibc":
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-1, 2**31 - 1)                         # M_TRIM_THRESHOLD, bytes: the largest
        mallopt(-3, 2**25)                             # M_MMAP_THRESHOLD, bytes: the largest


def products_dtype(device, name="auto"):
    """The dtype of matrix products by the name of --dtype: torch.bfloat16, or None for float32."""
    if name == "auto" and device.type == "cuda":
        can = torch.cuda.is_bf16_supported(including_emulation=False)
        name = "bfloat16" if can else "float32"
    return torch.bfloat16 if name == "bfloat16" else None


def pasteable(command):
    """A command `python -m ..` of this repository, as the current folder needs it.

    So your own files, and what you name relative to your folder, stay where you are.
    """
    if Path.cwd() == ROOT:
        return command
    return f"PYTHONPATH={shlex.quote(str(ROOT))}:$PYTHONPATH {command}"


def error_line(e):
    """The type of an exception and the first line of its message; two, if that ends with ":"."""
    lines = [line.strip() for line in str(e).splitlines() if line.strip()]
    said = " ".join(lines[:1])
    if said.endswith(":"):
        said = " ".join(lines[:2])
    return f"{type(e).__name__}: {said}"


def printable(text):
    """The text with its control characters escaped, as in \\x07, except newlines and tabs."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)
