"""Try an idea of your own: three seeds with your edit against three of the code as it is.

    python -m lab.idea original                      first the code as it is,
    python -m lab.idea mine                          then with your edit,
    python -m lab.idea mine -- --model multiscreen:mine.Tiles         or with your class

This checks the model, as lab.check does, trains three seeds on text, in four minutes on two idle
cores, measures their perplexity up to 16 times the training length, and compares them with
`original`: losses, and if there is matplotlib perplexities, too. What follows -- are more flags of
train.py; give them to `original`, too, unless they are the idea. Do not edit anything until it
ends, because each seed reads the code when it starts. A name is one code and one list of flags:
after an edit choose another name. The runs are in out/idea/ of the folder where you are; in a
folder of your own first `export PYTHONPATH=/path/to/this/repository`. If you stop it, repeat the
command to go on.
"""
import re
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path

from support.cli import ROOT, UsageError, cli, pasteable
from lab import check
from lab.experiments import NEEDLES
from lab.runner import TRAIN, parser, run_or_print
from train import get_args

RUNS = Path("out/idea")                                # in the folder where you are


def idea(name, flags, seeds, needles=False):
    """Your idea on text and its perplexity beyond, against the original. needles: retrieval, too"""
    yield [[f"{TRAIN} --psi 6 --seq-len 128 --steps 1000 --warmup 250 {flags} "
            f"--seed {seed} --out out/idea/{name}-{seed}",
            f"python -m lab.perplexity --length 2048 --ckpt out/idea/{name}-{seed}/ckpt.pt"]
           for seed in seeds]
    if needles:
        yield [[f"{TRAIN} --data abcdigits --digits 2 {NEEDLES} {flags} --seed {seed} "
                f"--out out/needles/{name}-{seed}",
                f"python abcdigits.py --swe --ckpt out/needles/{name}-{seed}/ckpt.pt"]
               for seed in seeds]
    if name != "original":
        if find_spec("matplotlib"):                    # it prints the perplexities and draws them
            tables = " ".join(f"'{label}=out/idea/{label}-*/perplexity.tsv'"
                              for label in ("original", name))
            yield [[f"python -m lab.figures perplexity {tables} --out out/idea/{name}.png"]]
        yield [[f"python -m lab.compare 'out/idea/original-*' 'out/idea/{name}-*'"]]


def require_idea(name, flags):
    """Raise UsageError unless a name is of this code and these flags, and not the original's."""
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise UsageError(f"{name!r}: name your idea in one word, such as mine")
    edited = edited_since(name)
    if edited:
        raise UsageError(f"{name} was trained with another {edited}: choose another name, or take "
                         f"back that of {RUNS}/{name}-*/source")
    if runs_of(name) and flags_of(name) != flags:
        raise UsageError(f"{name} was trained with other flags, {flags_of(name)!r}: choose another "
                         "name")
    if name == "original":
        return
    if not runs_of("original"):
        raise UsageError("first train the code without your edit, in this folder and with the same "
                         f"flags: {pasteable('python -m lab.idea original')}")
    if flags_of("original") == flags and not edited_since("original"):
        raise UsageError(f"{name} has the code and the flags of original, so there is nothing to "
                         "compare: edit multiscreen.py, or name your class with -- --model")
    if flags_of("original") != flags:
        print(f"the flags differ: {flags_of('original')!r} of original, {flags!r} of {name}")


def require_promises(flags):
    """Raise UsageError if the model of these flags breaks what training and decoding need."""
    name = get_args(shlex.split(flags)).model
    if not check.check_models({name: check.small_model(name)}):
        raise UsageError(f"{name} would be trained in vain, for the reasons above")


def runs_of(name):
    """The folders of the seeds of an idea."""
    return [path.parent for path in RUNS.glob(f"{name}-*/flags.txt")
            if path.parent.name.removeprefix(f"{name}-").isdigit()]


def flags_of(name):
    """The flags, behind --, with which an idea was trained."""
    kept = RUNS / f"{name}.txt"
    return kept.read_text() if kept.exists() else ""


def edited_since(name):
    """The name of a file that is now another than when an idea was trained, or "".

    A run's source/ has our files, and yours, which lie in the folder where you are.
    """
    for run in runs_of(name):
        for path in (run / "source").rglob("*.py"):
            file = path.relative_to(run / "source")
            for now in (ROOT / file, file):
                if now.exists() and now.read_bytes() != path.read_bytes():
                    return file.name
    return ""


def main():
    p = parser(__doc__)
    p.add_argument("name", help="original, or a name for your idea, of one word")
    p.add_argument("--needles", action="store_true", help="train and measure retrieval, too, half "
                   "an hour more per seed")
    argv, flags = sys.argv[1:], []
    if "--" in argv:
        argv, flags = argv[: argv.index("--")], argv[argv.index("--") + 1 :]
    args, flags = p.parse_args(argv), shlex.join(flags)
    # What would train in vain is refused here, before it takes minutes.
    require_idea(args.name, flags)
    require_promises(flags)
    if not args.print:
        RUNS.mkdir(parents=True, exist_ok=True)
        (RUNS / f"{args.name}.txt").write_text(flags)
    run_or_print(idea(args.name, flags, args.seeds or [0, 1, 2], args.needles), args)
    if args.name == "original" and not args.print:
        print("next: edit an equation or write a class, then python -m lab.check and python -m "
              "lab.idea mine")


if __name__ == "__main__":
    cli(main)
