"""Models by name. A variant's file is imported when its name is asked for: there is no list of all.

    multiscreen                        the paper's
    multiscreen:rope                   a word of VARIANTS in lab/baselines/ablations.py
    multiscreen:my_file.Tiles          the class Tiles of your my_file.py, here or beside train.py
    transformer:8M                     45M, 353M, 1.3B; or N_L,N_H,d_E of your choice
    transformer:4,4,72:alibi           a word of VARIANTS in lab/baselines/attention.py
    transformer:4,4,72:my_file.Block   a class of yours

train.py and `load_checkpoint` build their models here. Read it if your class is not accepted.
"""
import os
import random
import statistics
import sys
from contextlib import contextmanager
from importlib import import_module

import numpy as np
import torch

from support.cli import UsageError, error_line
from multiscreen import Config, GatedScreeningTiles, Multiscreen
from support import distributed as dist

# The flags that set the sizes of Config, and the names of its fields.
SIZES = {"psi": "psi", "layers": "N_L", "tiles": "N_H", "d_E": "d_E", "d_K": "d_K", "d_V": "d_V",
         "w_th": "w_th"}


def build_model(name, config, dtype=None):
    """The model of that name, freshly initialised. config: its sizes; None means the default.

    Raises UsageError for an unknown name or an impossible size.
    """
    family, *words = name.split(":")
    config = {field: x for field, x in config.items() if x is not None}
    try:
        if family == "multiscreen" and len(words) < 2:
            base = GatedScreeningTiles
            tiles = class_of(words[0], "ablations", base) if words else base
            # A class may have sizes of its own, and a definition of its own in place of `screen`.
            sizes = tiles.sizes(config) if hasattr(tiles, "sizes") else config
            model = Multiscreen(Config(**sizes), dtype, tiles)
            if not hasattr(model.layers[0], "W_O"):
                raise UsageError(f"{words[0]} has no W_O, with which its tiles write: does its "
                                 "`initialize` call super().initialize()?")
            if hasattr(tiles, "own_screen"):
                model.screen = tiles.own_screen
            return model
        if family == "transformer" and 0 < len(words) < 3:
            transformer = import_module("lab.baselines.transformer")
            base = transformer.Block
            block = class_of(words[1], "attention", base) if words[1:] else base
            sizes = transformer.get_config(words[0], **config)
            return transformer.Transformer(sizes, dtype, block)
    except ValueError as e:
        raise UsageError(e) from None
    if "." in name and not words:
        raise UsageError(f"model {name!r} is unknown: a class of yours is a part of a model, as in "
                         f"multiscreen:{name}")
    tiles, blocks = (", ".join(variants(room)) for room in ("ablations", "attention"))
    raise UsageError(f"model {name!r} is unknown: use multiscreen, multiscreen:VARIANT ({tiles}), "
                     "transformer:SIZE (8M, 45M, 353M, 1.3B or N_L,N_H,d_E), or "
                     f"transformer:SIZE:VARIANT ({blocks}); a VARIANT of yours is FILE.CLASS")


def class_of(word, room, base):
    """The class of a variant: a word of VARIANTS in a file of lab/baselines/, or FILE.CLASS.

    Raises UsageError if there is none, or if it is not derived from `base`, the class of a layer.
    """
    if "/" in word:
        raise UsageError(f"{word}: write {word.replace('/', '.')}")
    file, _, name = word.rpartition(".")
    if not file:
        there, where = variants(room), f"lab/baselines/{room}.py"
        if name not in there:
            raise UsageError(f"{word} is unknown: {where} has {', '.join(there)}; a class of yours "
                             "is FILE.CLASS")
        return there[name]

    module = module_of(file)
    there, where = vars(module), getattr(module, "__file__", None) or file
    # Compare names, because a notebook may have reloaded the file of `base`.
    known = [key for key, x in there.items()
             if base.__name__ in [c.__name__ for c in getattr(x, "__mro__", ())]]
    if name in known:
        return there[name]
    layer = f"{base.__module__}.{base.__name__}"
    if name in there:
        raise UsageError(f"{word} cannot be a layer of this model: it is no subclass of {layer}")
    own = [key for key in known if there[key].__module__ == module.__name__]
    if own:
        raise UsageError(f"{word} is unknown: {where} has {', '.join(own)}")
    # Python may have found another file than yours: one of its own is called queue.py, too.
    raise UsageError(f"{word} is unknown: {where} has no subclass of {layer}; if that is another "
                     "file than yours, give yours a name that no other module has")


def module_of(file):
    """The module of a file of yours, "my_file" or "ideas.my_file"."""
    # Python looks in the folder of the script; the file may be in the current one.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return import_module(file)
    except (ImportError, SyntaxError) as e:
        where = ""
        if getattr(e, "name", None) == file:
            path = file.replace(".", "/") + ".py"
            where = f": {path} is neither beside train.py nor in the current folder"
        raise UsageError(f"{file} cannot be imported ({error_line(e)}){where}") from None


def variants(room):
    """{word: class} of a file of lab/baselines/."""
    return import_module(f"lab.baselines.{room}").VARIANTS


def name_of(model):
    """The name with which `build_model` builds a model with this class of layers."""
    c, layer, name = model.config, type(model.layers[0]), "multiscreen"
    if not hasattr(c, "w_th"):                         # a Transformer's sizes are in its name
        name = f"transformer:{c.N_L},{c.N_H},{c.d_E}"
    base = "Block" if name.startswith("transformer") else "GatedScreeningTiles"
    if layer.__name__ == base and layer.__module__ in ("multiscreen", "lab.baselines.transformer"):
        return name
    return f"{name}:{layer.__module__}.{layer.__qualname__}"


def recipe(name):
    """The paper's learning rate, weight decay and clipping for a model, as values of flags."""
    family, _, rest = name.partition(":")
    if family != "transformer":
        return {"lr": 2**-4, "weight_decay": 0.0, "clip": 0.0}
    rates = import_module("lab.baselines.transformer").LEARNING_RATES
    return {"lr": rates.get(rest.partition(":")[0], 1e-3), "weight_decay": 0.1, "clip": 1.0}


def count_parameters(model):
    """The number of a model's parameters, including the embedding W_E."""
    return sum(p.numel() for p in model.parameters())


def has_windows(model):
    """Whether a model screens: it has windows, relevances, and a function `screen`."""
    return all(hasattr(layer, "s_w") for layer in model.layers)


def windows_of(model):
    """The windows of each layer of a model that has some, tensors (H,)."""
    return [dist.full(layer.window().detach()) for layer in model.layers]


def windows(model):
    """Columns of the log: the smallest, median and largest window, of a model that has some."""
    if not has_windows(model):
        return {}
    w = torch.cat(windows_of(model)).tolist()
    return {"w_min": min(w), "w_median": statistics.median(w), "w_max": max(w)}


# ------------------------------------------------- random numbers, which layers of yours may draw

def set_seeds(seed):
    """Seed the generators of torch, Python and numpy."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)                       # numpy takes no larger seeds


def random_states():
    """The states of these generators on the CPU, of plain numbers: a checkpoint keeps them."""
    name, numbers, *rest = np.random.get_state()
    return {"torch": torch.get_rng_state().tolist(), "python": random.getstate(),
            "numpy": (name, numbers.tolist(), *rest)}


def set_random_states(states):
    """Go on drawing from where `random_states` was called."""
    torch.set_rng_state(torch.tensor(states["torch"], dtype=torch.uint8))
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])


@contextmanager
def drawing_from(states):
    """Inside, layers draw random numbers from these states on; afterwards as if none were drawn."""
    own = random_states()
    set_random_states(states)
    try:
        yield
    finally:
        set_random_states(own)
