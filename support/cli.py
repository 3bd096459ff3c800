"""What every script shares: flags, one-line errors, exit codes, signals, devices."""
import argparse
import os
import signal
import sys
from contextlib import contextmanager

import torch


class UsageError(Exception):
    """A mistake the user can fix. The message says what is wrong and what to do."""


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# The flags that several scripts have.
SHARED = {
    "--ckpt": {"default": "out/ckpt.pt", "help": "checkpoint of train.py [out/ckpt.pt]"},
    "--device": {"default": DEVICE, "help": f"cpu or cuda [{DEVICE}]"},
    "--force": {"action": "store_true", "help": "overwrite earlier tables and figures"},
}


class Parser(argparse.ArgumentParser):
    """Shows a script's docstring as it is, and raises UsageError for a wrong flag."""

    def __init__(self, description):
        super().__init__(description=description, allow_abbrev=False,
                         formatter_class=argparse.RawDescriptionHelpFormatter)

    def add_shared(self, *names):
        """Add flags of SHARED."""
        for name in names:
            self.add_argument(name, **SHARED[name])

    def error(self, message):
        raise UsageError(f"{message}; {self.prog} -h lists the flags")


def cli(main):
    """Run `main()`. An error the user can fix prints one line and exits with 1, Ctrl-C with 130."""
    sys.stdout.reconfigure(errors="replace")
    try:
        main()
        sys.stdout.flush()
    except BrokenPipeError:                            # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except UsageError as e:
        sys.exit(f"error: {e}")
    except OSError as e:
        sys.exit(f"error: {e.filename}: {e.strerror}" if e.filename else f"error: {e}")
    except (MemoryError, torch.OutOfMemoryError):
        sys.exit("error: out of memory: take a smaller --batch-size, --seq-len or model")
    except KeyboardInterrupt as e:
        print(*e.args or ["stopped"], file=sys.stderr)
        sys.exit(130)


def get_device(name):
    """The torch.device of that name, after checking that it works."""
    try:
        return torch.zeros(1, device=name).device
    except Exception as e:
        raise UsageError(f"the device {name!r} cannot be used ({type(e).__name__}): take cpu, "
                         "or cuda where there is a GPU") from None


def check_writable(path, force=False):
    """Raise before any work if the table `path` cannot be written, or is there (unless `force`).

    With `force` the figure of the same name is deleted: it would not fit the new table.
    """
    if path.exists() and path.stat().st_size and not force:
        raise UsageError(f"{path} exists: --force overwrites it")
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a"):
        pass
    if force:
        path.with_suffix(".png").unlink(missing_ok=True)


def clock(seconds):
    """Seconds as h:mm:ss."""
    return f"{int(seconds) // 3600}:{int(seconds) // 60 % 60:02d}:{int(seconds) % 60:02d}"


@contextmanager
def stop_requests():
    """Inside `with stop_requests() as stop`, Ctrl-C and SIGTERM append to the list `stop`.

    A second one ends the process at once. Afterwards the old handlers are back.
    """
    stop, handlers = [], {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}

    def note(number, _):
        stop.append(number)
        signal.signal(number, signal.SIG_DFL)

    try:
        for s in handlers:
            signal.signal(s, note)
        yield stop
    finally:
        for s, handler in handlers.items():
            signal.signal(s, handler or signal.SIG_DFL)
