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

from support.cli import UsageError, cli, flag_of, pasteable
from lab import check
from lab.experiments import NEEDLES
from lab.runner import TRAIN, parser, run_or_print
from support.run import FREE, as_typed, read_flags, texts
from train import get_args

RUNS = Path("out/idea")                                # in the folder where you are


def idea(name, flags, seeds, needles=False):
    """Your idea on text and its perplexity beyond, against the original. needles: retrieval, too"""
    is_transformer = get_args(shlex.split(flags)).model.startswith("transformer")
    size = "" if is_transformer else "--psi 6 "        # it is in a Transformer's name
    yield [[f"{TRAIN} {size}--seq-len 128 --steps 1000 --warmup 250 {flags} "
            f"--seed {seed} --out {RUNS}/{name}-{seed}",
            f"python -m lab.perplexity --length 2048 --ckpt {RUNS}/{name}-{seed}/ckpt.pt"]
           for seed in seeds]
    if needles:
        yield [[f"{TRAIN} --data abcdigits --digits 2 {NEEDLES} {flags} --seed {seed} "
                f"--out out/needles/{name}-{seed}",
                f"python abcdigits.py --swe --ckpt out/needles/{name}-{seed}/ckpt.pt"]
               for seed in seeds]
    if name != "original":
        if find_spec("matplotlib"):                    # it prints the perplexities and draws them
            tables = " ".join(f"'{label}={RUNS}/{label}-*/perplexity.tsv'"
                              for label in ("original", name))
            # A run's folder is no text, so --data may name the folder where you are.
            yield [[f"python -m lab.figures perplexity {tables} "
                    f"--out {RUNS}/{name}-{seeds[0]}/compared.png"]]
        yield [[f"python -m lab.compare '{RUNS}/original-*' '{RUNS}/{name}-*'"]]


def one_word(name):
    """The name of an idea."""
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise UsageError(f"{name!r}: name your idea in one word, such as mine")
    return name


def require_idea(name, args, now, flags=()):
    """Raise UsageError unless a name is of this code and these args, and not the original's.

    now: the `texts` of the model; flags: those behind --.
    """
    other = "choose another name"
    if name == "original":
        other = f"move {RUNS} away, or work in another folder"
    edited, changes = edited_since(name, now), changes_since(name, args)
    if edited:
        raise UsageError(f"{name} was trained with another {edited}: {other}, or take back that "
                         f"of {RUNS}/{name}-*/source")
    if changes:
        raise UsageError(f"{name} was trained with {changes[0]}: {other}")
    if name == "original":
        return
    if not runs_of("original"):
        command = shlex.join(["python", "-m", "lab.idea", "original", *flags])
        raise UsageError("first train the code without your edit, in this folder and with the same "
                         f"flags: {pasteable(command)}")
    changes = changes_since("original", args)
    if not changes and not edited_since("original", now):
        raise UsageError(f"{name} has the code and the flags of original, so there is nothing to "
                         "compare: edit multiscreen.py, or name your class with -- --model")
    for change in changes:
        print(f"original was trained with {change}")


def runs_of(name):
    """The folders of the seeds of an idea."""
    return [path.parent for path in RUNS.glob(f"{name}-*/flags.txt")
            if path.parent.name.removeprefix(f"{name}-").isdigit()]


def changes_since(name, args):
    """The flags in which args differ from those that an idea was trained with, in words."""
    runs = runs_of(name)
    if not runs:
        return []
    old, new = read_flags(runs[0]), {flag: as_typed(x) for flag, x in vars(args).items()}
    return [f"{flag_of(flag)} {old.get(flag)} and not {x}" for flag, x in new.items()
            if flag not in (*FREE, "seed") and x not in ("auto", old.get(flag))]


def edited_since(name, now):
    """The file that is now another than when an idea was trained, or "". now: {path: text}."""
    for run in runs_of(name):
        for file, text in now.items():
            was = run / "source" / file
            if was.exists() and was.read_text("utf-8", "replace") != text:
                return file
    return ""


def main():
    p = parser(__doc__)
    p.add_argument("name", type=one_word, help="original, or a name for your idea, of one word")
    p.add_argument("--needles", action="store_true", help="train and measure a Multiscreen's "
                   "retrieval, too, half an hour more per seed")
    argv, flags = sys.argv[1:], []
    if "--" in argv:
        argv, flags = argv[: argv.index("--")], argv[argv.index("--") + 1 :]
    args, others = p.parse_known_args(argv)
    if others:
        raise UsageError(f"{' '.join(others)}: flags of train.py come behind --, as in "
                         f"python -m lab.idea {args.name} -- --psi 4")
    stages = [*idea(args.name, shlex.join(flags), args.seeds or [0, 1, 2], args.needles)]
    # What would train in vain is refused here, before it takes minutes.
    trainings = []
    for jobs in stages:
        commands = [shlex.split(job[0]) for job in jobs if job[0].startswith(TRAIN)]
        trainings += [get_args(words[2:]) for words in commands]
    name = trainings[0].model
    model = check.small_model(name)
    behind = ["--", *flags] if flags else []
    require_idea(args.name, trainings[0], texts(model), behind)
    # A parameter without a gradient is only named: an edit may leave it out.
    if check.check_models({name: model}) - {"trained"}:
        raise UsageError(f"{name} would be trained in vain, for the reasons above")
    run_or_print(stages, args)
    if args.name == "original" and not args.print:
        command = shlex.join(["python", "-m", "lab.idea", "mine", *behind])
        print(f"next: edit an equation or write a class, then python -m lab.check and {command}")


if __name__ == "__main__":
    cli(main)
