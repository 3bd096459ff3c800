"""What the flags of a run say of its model: name, size, what it is a variant of."""
import functools
from typing import NamedTuple

import torch

import train
from baselines import count_parameters
from experiments.style import ABLATIONS
from multiscreen import Config
from support.checkpoint import build_model
from support.data import get_tokenizer
from support.results import flag


class Model(NamedTuple):
    """What a `run` says of its model. variant: an ablation, a Transformer's size, or ""."""
    name: str
    parameters: int
    rest: int

    @property
    def family(self):
        return self.name.partition(":")[0]

    @property
    def variant(self):
        return self.name.partition(":")[2]


@functools.cache
def model_of(run):
    """The Model of a `run` in the table of measurements."""
    names = ("--model", "--psi", "--layers", "--tokenizer")
    words = [word for name in names if flag(run, name) for word in (name, flag(run, name))]
    return Model(flag(run, "--model"), *parameters_of(*words))


def is_variant_of(run, others):
    """Whether a Multiscreen's `run` has the flags of one of the others, but for --model."""
    def rest(run):
        return run.replace(f"--model {flag(run, '--model')} ", "")

    return "--psi" in run and rest(run) in map(rest, others)


def split_runs(runs):
    """(the runs of all models but ablations, those of the ablations and of their original).

    The original is among the first, too, if no other Multiscreen is there.
    """
    ablated = [run for run in runs if model_of(run).variant in ABLATIONS]
    same = [run for run in runs if is_variant_of(run, ablated)]
    plain = [run for run in runs if run not in ablated]
    others = [run for run in plain if run not in same]
    if any(model_of(run).family == "multiscreen" for run in others):
        plain = others
    return plain, same


def tell_apart(keys):
    """A function: Key -> the variant of its task and its step, in words, where these keys differ.

    A step is said where the same flags were measured after several.
    """
    tasks, steps = {key.task for key in keys}, {}
    for key in keys:
        steps.setdefault(key.run, set()).add(key.step)

    def words(key):
        variant = f", {key.task.partition(', ')[2]}" if len(tasks) > 1 else ""
        return variant + (f", step {key.step}" if len(steps[key.run]) > 1 else "")

    return words


def parameters_of(*flags):
    """(total, non-embedding) parameters of the model that `train.py FLAGS` builds."""
    args, _ = train.get_args([str(f) for f in flags])
    gpt2 = args.tokenizer == "gpt2"                    # its size is known without a download
    n_vocab = Config.vocab_size if gpt2 else get_tokenizer(args.tokenizer).n_vocab
    config = {"psi": args.psi, "N_L": args.layers, "vocab_size": n_vocab}
    with torch.device("meta"):
        return count_parameters(build_model(args.model, config))
