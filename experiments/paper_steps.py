"""The steps of experiments.paper: what the plan says as commands, and the rows that they make."""
import functools
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import abcdigits
from experiments import ablations, long_context, lr_sweep, perplexity, plan, sanity, scaling
from experiments.models import model_of
from experiments.paper_plan import FIGURES
from experiments.runs import Run, final_loss, flat
from support.data import get_tokenizer
from support.results import Key, flag
from support.run import Lock

SCRIPTS = {"scaling": scaling, "lr_sweep": lr_sweep, "sanity": sanity, "ablations": ablations}


class Step(NamedTuple):
    """A run, or the measurements of one model: its command, the rows it makes, how to make them.

    $n in the command is the seed: steps that differ in their seed only have one command.
    serves: the rows that a run is made for, if its own row is for nothing else.
    """
    command: str
    keys: list[Key]
    do: Callable
    serves: tuple = ()

    def missing(self, results):
        """Its rows that are not there, unless all are that it serves."""
        if self.serves and all(map(results.has, self.serves)):
            return []
        return [key for key in self.keys if not results.has(key)]

    @property
    def alone(self):
        return "python " + self.command.replace("$n", self.keys[0].seed)


def as_lines(steps, results):
    """[(command, how many steps it stands for, how many of them miss rows)]: seeds are a loop."""
    same, lines = {}, []
    for step in steps:
        same.setdefault(step.command, []).append(step)
    for command, found in same.items():
        line = found[0].alone
        if "$n" in command and len(found) > 1:
            seeds = " ".join(step.keys[0].seed for step in found)
            line = f"for n in {seeds}; do python {command}; done"
        lines.append((line, len(found), sum(bool(step.missing(results)) for step in found)))
    return lines


def get_runs(scale, out):
    """({script: its runs}, {name: the runs of that model})"""
    by_script, runs = {}, {}
    for script, words in scale.scripts.items():
        _, found, *_ = SCRIPTS[script].read_flags([*words.split(), "--out", str(out)])
        by_script[script] = flat(found)
        runs |= {seeds[0].name: seeds for seeds in found.values()}
    for name, words in scale.models.items():
        steps = scale.steps.get(name, scale.steps[""])
        runs[name] = [Run(name, tuple(words.split()), seed, steps) for seed in range(scale.seeds)]
    return by_script, runs


def training(run, command, out, results, serves=()):
    """The Step that trains a run, as the command does that it is part of."""
    def do():
        results.measure(run.key, "", lambda: [final_loss(*run.finish(out))])

    return Step(command, [run.key], do, serves)


def command_of(run, out):
    """The command that trains a run; $n is the seed."""
    words = " ".join(run.command).replace(f"--seed {run.seed} ", "--seed $n ")
    return f"train.py {words} --out {out}/{run.name}-$n"


def measuring(words, run, out, results):
    """The Step that measures a run's model."""
    program, *flags = words.split()
    name = program.removesuffix(".py").rpartition(".")[2]

    def do():
        with Lock(Path(out), f"{run.name}-{run.seed}.{name}.lock"):
            call(program, *flags, "--ckpt", run.checkpoint(out), "--results", results.path)

    shown = f"{program_words(program)} {' '.join(flags)} --ckpt {out}/{run.name}-$n/ckpt.pt"
    return Step(f"{shown} --results {results.path}", keys_of(program, flags, run), do)


def keys_of(program, flags, run):
    """The Keys that a program measures of a run, which need not be there."""
    base = run.key
    if program == "experiments.long_context":
        args = long_context.read_flags(flags)
        items = documents(tuple(args.data or ()), flag(base.run, "--tokenizer"), args.length,
                          args.documents)
        model = model_of(base.run)
        rope = model.family == "transformer" or model.variant == "rope"
        return perplexity.get_keys(base, args, args.length, items, rope,
                                   model.family == "multiscreen")
    p = abcdigits.get_parser("")
    p.add_argument("--digits")
    args, task = p.parse_args(flags), "passkey"
    if program == "abcdigits.py":
        task = f"abcdigits, {args.digits or flag(base.run, '--digits')} digits"
    return abcdigits.get_keys(base.at(task=task), args, args.lengths, args.trials)


@functools.cache
def documents(data, tokenizer, L, limit):
    return list(perplexity.get_documents(list(data), get_tokenizer(tokenizer), L, limit)[0])


def get_steps(name, scale, found, out, results):
    """The steps of a figure, in order. found: what get_runs says."""
    (by_script, runs), steps = found, []
    for script in by_script.keys() & set(FIGURES[name].scripts):
        command = f"-m experiments.{script} {scale.scripts[script]} --out {out}"
        steps += [training(run, command, out, results) for run in by_script[script]]
    known = {run.key for run in flat(by_script)}       # by a script
    measured = {}
    for words, models, n in scale.measure.get(name, ()):
        for run in flat({model: runs[model][:n] for model in models}):
            measured.setdefault(run, []).append(measuring(words, run, out, results))
    if name in ("maps", "windows"):
        measured[runs[scale.shown][0]] = []
    for run, own in measured.items():
        if run.key not in known:
            serves = tuple(key for step in own for key in step.keys)
            steps.append(training(run, command_of(run, out), out, results, serves))
        steps += own
    return steps


def seconds(key):
    """About how long a run or a measurement takes on one core, as measured on a Xeon."""
    model = model_of(key.run)
    if key.task == "validation loss":
        rate = 7e10 if model.family == "transformer" else 2e10
        a_step = 0.03 + 6 * model.parameters * int(flag(key.run, "--batch-tokens")) / rate
        return 4 + int(key.step) * a_step
    return 3.5e-10 * model.parameters * int(key.length) * int(key.trials or 1)


def program_words(program):
    return program if program.endswith(".py") else f"-m {program}"


def call(program, *flags):
    """Run a program of this repository in this process."""
    module = importlib.import_module(program.removesuffix(".py"))
    print(f"\npython {program_words(program)} {' '.join(map(str, flags))}", flush=True)
    before, sys.argv = sys.argv, [program, *map(str, flags)]
    try:
        module.main()
    finally:
        sys.argv = before


def show_paper(scale):
    """Print the paper's runs as commands, with the flags that experiments.plan finds."""
    by_script, _ = get_runs(scale, "out/paper")
    printed = set()
    for script, runs in by_script.items():
        print(f"\n{script}")
        for run in runs:
            if run.key in printed:
                continue
            printed.add(run.key)
            like = f"--psi {flag(run.key.run, '--psi')}"       # an ablation's, too
            if model_of(run.key.run).family == "transformer":
                like = f"--model {flag(run.key.run, '--model').removesuffix(':qknorm')}"
            gpus = plan.PAPER[like]
            _, fit = plan.fit_paper(like, gpus)
            words = " ".join(run.command).replace("--batch-size 16 ", "")
            print(f"    torchrun --nnodes {gpus // 8} --nproc_per_node 8 train.py {words} "
                  f"{plan.in_flags(*fit)} --out out/paper/{run.name}-{run.seed}")
    for name, entries in scale.measure.items():
        print(f"\n{name}: each on one GPU")
        for words, models, _ in entries:
            program, _, flags = words.partition(" ")
            for model in models:
                print(f"    python {program_words(program)} {flags} "
                      f"--ckpt out/paper/{model}-*/ckpt.pt --results out/paper/results.tsv")
    print(f"\nlatency: an RTX 4090\n    python -m experiments.latency {scale.latency}\n\n"
          "maps, windows\n    python -m experiments.relevance_maps --ckpt "
          f"out/paper/{scale.shown}-0/ckpt.pt\n    python -m experiments.windows --ckpt "
          "out/paper/multiscreen_psi64-0/ckpt.pt")
