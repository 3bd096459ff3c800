"""Is my edit better? Trains the original and yours on three seeds each, then compares them.

    python -m lab.idea original                      first the code as it is,
    python -m lab.idea mine                          then with your edit of an equation,
    python -m lab.idea mine --model mine.Tiles       or with your class

All other flags go to train.py. Those of the original hold for yours, too, so give yours only what
is the idea. The default is a small model (--psi 6, 1,000 steps of 1,024 tokens): four minutes on
two idle cores. A name is one code and one list of flags, and its runs are out/idea/NAME-SEED of the
current folder.

You may edit while it runs: all seeds have the code of the command's start. If you stop the command,
undo what you edited and repeat it to go on; what is finished is not trained again.
"""
import argparse
import shlex
import sys
from pathlib import Path

import train
from lab.compare import compare

RUNS = Path("out/idea")
FLAGS = RUNS / "original.txt"                          # what was typed for the original
SMALL = ["--model", "multiscreen", "--psi", "6", "--seq-len", "128", "--steps", "1000",
         "--warmup", "250"]
ANOTHER_RUN, DIVERGED = 2, 3                           # train.py's exit codes


def main():
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("name", help="original, or a name for your idea")
    p.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="[0 1 2]")
    args, flags = p.parse_known_args()
    if args.name != "original":
        if not FLAGS.exists():
            sys.exit("error: first train the code without your edit: python -m lab.idea original")
        flags = shlex.split(FLAGS.read_text()) + flags
    train.get_parser().parse_args(flags)               # exits if train.py knows no such flag
    for seed in args.seeds:
        out = f"{RUNS}/{args.name}-{seed}"
        try:
            train.main([*SMALL, *flags, "--seed", str(seed), "--out", out, "--resume"])
        except SystemExit as end:
            if end.code == ANOTHER_RUN and Path(out).exists():
                sys.exit(f"error: {out} is a run of another code or other flags: undo what was "
                         f"changed, or choose another name; to begin anew, delete "
                         f"{RUNS}/{args.name}-*")
            if end.code != DIVERGED:
                raise
    compare(dict.fromkeys([f"{RUNS}/original", f"{RUNS}/{args.name}"]))
    if args.name == "original":
        FLAGS.write_text(shlex.join(flags))
        print("\nnext: edit an equation or write a class, then: python -m lab.idea mine")


if __name__ == "__main__":
    main()
