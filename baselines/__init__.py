"""The models that are compared, by name, and the recipe that the paper trains each with."""
from baselines import ablations, attention, transformer
from multiscreen import Config, Multiscreen

# The layers of a Transformer, by the word after its size. One of yours is a class in a file of its
# own and a line here.
BLOCKS = {
    "": transformer.Block,
    "qknorm": transformer.QKNorm,
    "nope": attention.NoPE,
    "local": attention.Local,
    "alibi": attention.ALiBi,
    "ssmax": attention.SSMaxNoPE,
    "ssmax-rope": attention.SSMax,
    "off-by-one": attention.OffByOne,
    "sigmoid": attention.Sigmoid,
    "entmax": attention.Entmax,
    "stick-breaking": attention.StickBreaking,
    "forgetting": attention.Forgetting,
    "selective": attention.Selective,
    "screening": attention.Screening,
    "alibi-steep": attention.SteepALiBi,
    "sigmoid-fixed": attention.FixedSigmoid,
    "forgetting-late": attention.LateForgetting,
    "screening-wide": attention.WideScreening,
    "screening-slow": attention.SlowScreening,
}
NAMES = (f"multiscreen, multiscreen:ABLATION ({', '.join(ablations.TILES)}), transformer:SIZE "
         f"({', '.join(transformer.SIZES)} or N_L,N_H,d_E), or transformer:SIZE:VARIANT "
         f"({', '.join(filter(None, BLOCKS))})")


def build(name, config, dtype=None):
    """The model of that name, freshly initialised. config: a dict of its sizes; None is a default.

    Raises ValueError for an unknown name or an impossible size.
    """
    family, _, variant = name.partition(":")
    config = {field: x for field, x in config.items() if x is not None}
    if name == "multiscreen":
        return Multiscreen(Config(**config), dtype)
    if family == "multiscreen":
        return ablations.build_ablation(variant, config, dtype)
    if family == "transformer":
        size, _, block = variant.partition(":")
        if block not in BLOCKS:
            raise ValueError(f"{name} is unknown: use transformer:SIZE, or transformer:SIZE: and "
                             f"one of {', '.join(filter(None, BLOCKS))}")
        return transformer.Transformer(transformer.get_config(size, **config), dtype,
                                       BLOCKS[block])
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
