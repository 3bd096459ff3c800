"""What a script needs and a reader can skip. Imported first, it makes an early Ctrl-C one line."""
import sys


def hook(kind, error, trace):
    if issubclass(kind, KeyboardInterrupt):
        print("stopped", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


sys.excepthook = hook
