"""The models that the paper compares, by name, and the recipe it trains each with."""
from baselines import ablations, transformer
from multiscreen import Config, Multiscreen

NAMES = "multiscreen, multiscreen:ABLATION (baselines/ablations.py), transformer:SIZE"


def build(name, config, dtype=None):
    """The model of that name, freshly initialised. config: a dict of its sizes; None is a default.

    Raises ValueError for an unknown name or an impossible size.
    """
    family, _, variant = name.partition(":")
    if name == "multiscreen":
        return Multiscreen(Config(**config), dtype)
    if family == "multiscreen":
        return ablations.build_ablation(variant, config, dtype)
    if family == "transformer":
        return transformer.build(variant, config, dtype)
    raise ValueError(f"model {name!r} is unknown: use {NAMES}")


def count_parameters(model):
    """(all parameters, those without the embedding W_E) of a model."""
    total = sum(p.numel() for p in model.parameters())
    return total, total - model.W_E.numel()


def recipe(name):
    """The paper's learning rate, weight decay and clipping for a model, as values of flags."""
    family, _, variant = name.partition(":")
    if family != "transformer":
        return {"lr": 2**-4, "weight_decay": 0.0, "clip": 0.0}
    size = variant.partition(":")[0]
    lr = transformer.LEARNING_RATES.get(size, 1e-3)
    return {"lr": lr, "weight_decay": 0.1, "clip": 1.0}
