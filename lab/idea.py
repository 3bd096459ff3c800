"""Is my edit better? Trains the original and yours on three seeds each, then compares them.

    python -m lab.idea original                      first the code as it is,
    python -m lab.idea mine                          then with your edit of an equation,
    python -m lab.idea mine --model mine.Tiles       or with your class

All other flags go to train.py: give the original the same ones, unless they are the idea. The
default is a small model (--psi 6, 1,000 steps of 1,024 tokens): four minutes on two idle cores.
Each seed reads the code when it starts, so edit nothing until the command ends. A name is one code
and one list of flags. If you stop the command, repeat it to go on. The runs are in out/idea/ of the
current folder.
"""
import argparse
import subprocess
import sys
from pathlib import Path

import train
from lab.compare import compare

RUNS = Path("out/idea")
SMALL = ["--psi", "6", "--seq-len", "128", "--steps", "1000", "--warmup", "250"]
DIVERGED = 3                                           # train.py's exit code


def refuse_other_code(name, seeds, flags):
    """End the program if a name was trained with other code than there is now."""
    args = train.get_args(flags)
    model = train.make_model(args, train.get_tokenizer(args.tokenizer))
    for seed in seeds:
        path = RUNS / f"{name}-{seed}" / "ckpt.pt"
        before = train.read_checkpoint(path)["source"] if path.exists() else {}
        for module, text in train.source_of(model).items():
            if before.get(module, text) != text or (before and module not in before):
                sys.exit(f"error: {path.parent} was trained with another {module}.py: choose "
                         "another name, or take your edit back")


def train_seed(flags):
    """Run train.py to its end. At Ctrl-C it saves the run, and this waits until it has."""
    process = subprocess.Popen([sys.executable, train.__file__, *flags])
    try:
        code = process.wait()
    except KeyboardInterrupt:
        process.wait()
        code = 130
    if code not in (0, DIVERGED):
        sys.exit(code)


def main():
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("name", help="original, or a name for your idea")
    p.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="[0 1 2]")
    args, flags = p.parse_known_args()
    if not args.name.isidentifier():
        sys.exit(f"error: {args.name} is no name: use letters, digits and _, a letter first")
    if args.name != "original" and not (RUNS / f"original-{args.seeds[0]}").exists():
        sys.exit("error: first train the code without your edit: python -m lab.idea original")
    flags = [*SMALL, *flags]
    refuse_other_code(args.name, args.seeds, flags)
    for seed in args.seeds:
        train_seed([*flags, "--seed", str(seed), "--out", f"{RUNS}/{args.name}-{seed}", "--resume"])
    compare(dict.fromkeys([f"{RUNS}/original", f"{RUNS}/{args.name}"]))
    if args.name == "original":
        print("\nnext: edit an equation or write a class, then: python -m lab.idea mine")


if __name__ == "__main__":
    main()
