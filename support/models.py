"""Models by name. A variant's file is imported when its name is asked for: there is no list of all.

    multiscreen                        the paper's
    multiscreen:rope                   a word of VARIANTS in lab/baselines/ablations.py
    multiscreen:my_file.Tiles          the class Tiles of your my_file.py, here or beside train.py
    transformer:8M                     45M, 353M, 1.3B; or N_L,N_H,d_E of your choice
    transformer:4,4,72:alibi           a word of VARIANTS in lab/baselines/attention.py
    transformer:4,4,72:my_file.Block   a class of yours
"""
import os
import re
import sys
from importlib import import_module

from torch import nn

from multiscreen import Config, GatedScreeningTiles, Multiscreen
from support.cli import UsageError, error_line


def build_model(name, config, dtype=None):
    """The model of that name, freshly initialised. config: a dict of its sizes; None is a default.

    Raises UsageError for an unknown name or an impossible size.
    """
    family, *words = name.split(":")
    config = {field: x for field, x in config.items() if x is not None}
    try:
        if family == "multiscreen" and len(words) < 2:
            tiles = class_of(words[0], "ablations") if words else GatedScreeningTiles
            # A class may have sizes of its own, and a definition of its own in place of `screen`.
            sizes = tiles.sizes(config) if hasattr(tiles, "sizes") else config
            model = Multiscreen(Config(**sizes), dtype, tiles)
            if hasattr(tiles, "own_screen"):
                model.screen = tiles.own_screen
            return model
        if family == "transformer" and 0 < len(words) < 3:
            transformer = import_module("lab.baselines.transformer")
            block = class_of(words[1], "attention") if words[1:] else transformer.Block
            sizes = transformer.get_config(words[0], **config)
            return transformer.Transformer(sizes, dtype, block)
    except ValueError as e:
        raise UsageError(e) from None
    except (MemoryError, RuntimeError) as e:           # torch says too much memory in many ways
        if not re.search("memory|overflow|too large", str(e)):
            raise
        raise UsageError(f"a model of these sizes does not fit into memory: {config}") from None
    tiles, blocks = (", ".join(variants(room)) for room in ("ablations", "attention"))
    raise UsageError(f"model {name!r} is unknown: use multiscreen, multiscreen:VARIANT ({tiles}), "
                     "transformer:SIZE (8M, 45M, 353M, 1.3B or N_L,N_H,d_E), or "
                     f"transformer:SIZE:VARIANT ({blocks}); a VARIANT of yours is FILE.CLASS")


def class_of(word, room):
    """The class of a variant: a word of VARIANTS in a file of lab/baselines/, or FILE.CLASS.

    Raises UsageError if there is none, and names those that there are.
    """
    file, _, name = word.rpartition(".")
    if not file:
        known, where = variants(room), f"lab/baselines/{room}.py"
    else:
        known, where = layers_in(file), file
    if name not in known:
        raise UsageError(f"{word} is unknown: {where} has {', '.join(known) or 'no layers'}; a "
                         "class of yours is FILE.CLASS")
    return known[name]


def layers_in(file):
    """{name: class} of what may be a layer in a file of yours, "my_file" or "ideas.my_file"."""
    # Python looks in the folder of the script; the file may be in the current one.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = import_module(file)
    except (ImportError, SyntaxError) as e:
        raise UsageError(f"{file} cannot be imported ({error_line(e)})") from None
    return {name: x for name, x in vars(module).items()
            if isinstance(x, type) and issubclass(x, nn.Module)}


def variants(room):
    """{word: class} of a file of lab/baselines/."""
    return import_module(f"lab.baselines.{room}").VARIANTS


def recipe(name):
    """The paper's learning rate, weight decay and clipping for a model, as values of flags."""
    family, _, rest = name.partition(":")
    if family != "transformer":
        return {"lr": 2**-4, "weight_decay": 0.0, "clip": 0.0}
    rates = import_module("lab.baselines.transformer").LEARNING_RATES
    return {"lr": rates.get(rest.partition(":")[0], 1e-3), "weight_decay": 0.1, "clip": 1.0}


def count_parameters(model):
    """(all parameters, those without the embedding W_E) of a model."""
    total = sum(p.numel() for p in model.parameters())
    return total, total - model.W_E.numel()


def has_windows(model):
    """Whether a model screens: it has windows, relevances, and a function `screen`."""
    return all(hasattr(layer, "s_w") for layer in model.layers)
