"""What a script needs and a reader can skip. Imported first: it says in one line what is too old.

It makes an early Ctrl-C one line, too.
"""
import re
import sys
from importlib.metadata import PackageNotFoundError, version

OLDEST = {"torch": "2.11", "triton": "3.6"}            # triton may be missing


def hook(kind, error, trace):
    if issubclass(kind, KeyboardInterrupt):
        print("stopped", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


def refuse_old_versions():
    """Exit with one line if PyTorch is missing, or if a package is too old."""
    def numbers(text):
        return [int(n) for n in re.findall(r"\d+", text)[:2]]

    for name, oldest in OLDEST.items():
        try:
            found = version(name)
        except PackageNotFoundError:
            if name == "torch":
                sys.exit("error: torch is not installed: pip install -r requirements.txt")
            continue
        if numbers(found) < numbers(oldest):
            sys.exit(f"error: {name} {found} is too old, {oldest} is the oldest that can be: "
                     "pip install -r requirements.txt")


sys.excepthook = hook
refuse_old_versions()
