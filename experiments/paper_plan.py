"""What experiments.paper makes, as a list: figure -> models -> measurements -> commands.

A scale has flags for the scripts that train, models of its own with flags for train.py, and
measurements: (program and flags, names of models, how many of their seeds or None for all).
"""
from typing import NamedTuple

DEPTHS = "--depths 0.1 0.3 0.5 0.7 0.9"
ABLATIONS = ("rope", "nope", "no-tanhnorm", "no-gate", "fixed-r")


class Scale(NamedTuple):
    scripts: dict
    models: dict
    seeds: int
    steps: dict
    measure: dict
    latency: str
    shown: str                                         # the model of maps and windows
    note: str = ""                                     # for the report


def with_ablations(flags):
    """The models of a comparison on ABCDigits: {name: flags} of a Multiscreen and its ablations."""
    models = {"abcdigits_multiscreen": f"--model multiscreen {flags}"}
    for name in ABLATIONS:
        models[f"abcdigits_{name}"] = f"--model multiscreen:{name} {flags}"
    return models


def without_rope(models):
    """The models but those with RoPE, which have scaling factors."""
    return [name for name in models if not name.endswith("_rope")]


ABLATED = [f"abcdigits_{name}" for name in ABLATIONS]
VARIANTS = ["multiscreen", *(f"multiscreen_{name}" for name in ABLATIONS)]

# Everything runs once: nothing is learned.
TINY_RUN = "--seeds 2 --steps 20 --seq-len 64 --batch-size 4 --eval-every 1000 --log-every 1"
TINY_ABC = "--data abcdigits --digits 2 --lr 0.015625 --batch-size 2"
TINY = Scale(
    scripts={
        "scaling": f"--psi 2 3 --transformers transformer:1,2,16 transformer:2,2,24 {TINY_RUN}",
        "lr_sweep": "--psi 3 --models multiscreen transformer:2,2,24 transformer:2,2,24:qknorm "
                    f"--exponents -10 -4 0 {TINY_RUN}",
        "sanity": f"--psi 3 --transformer transformer:2,2,24 --window 5 {TINY_RUN}",
        "ablations": f"--psi 3 --warmup 5 {TINY_RUN}",
    },
    models=with_ablations(f"--psi 2 {TINY_ABC}")
    | {"abcdigits_transformer": f"--model transformer:2,2,24 {TINY_ABC}"},
    seeds=2,
    steps={"": 10},
    measure={
        "perplexity": [
            ("experiments.long_context --length 256 --documents 2", ["multiscreen_psi3"], None),
            ("experiments.long_context --length 256 --documents 2 --rope-scale 1 4",
             ["transformer_2,2,24"], None)],
        "retrieval": [
            ("abcdigits.py --lengths 256 512 --trials 2", ["abcdigits_multiscreen"], None),
            ("abcdigits.py --lengths 256 512 --trials 2 --swe", ["abcdigits_multiscreen"], None),
            ("abcdigits.py --lengths 256 512 --trials 2 --rope-scale 1 4",
             ["abcdigits_transformer"], None)],
        "passkey": [("experiments.passkey --lengths 512 --trials 2", ["abcdigits_multiscreen"],
                     None)],
        "ablations": [
            ("experiments.long_context --length 256 --documents 2",
             VARIANTS, None),
            ("abcdigits.py --lengths 256 512 --trials 2", ABLATED, None),
            ("abcdigits.py --lengths 256 512 --trials 2 --swe", ABLATED, None)],
    },
    latency="--psi 2 3 --transformer 2,2,24 --lengths 256 512 --repeats 1",
    shown="multiscreen_psi3",
    note="`tiny` is a check that everything runs. Nothing is learned: its numbers say nothing of "
         "the paper.")

# Two cores for a night. Retrieval needs ABCDigits to train on: small models of text find nothing.
SMALL_ABC = "--data abcdigits --digits 2 --layers 4 --lr 0.015625"
SMALL = Scale(
    scripts={
        "scaling": "--seeds 3 --steps 2000 --log-every 1",
        "lr_sweep": "--psi 5 --exponents -10 -8 -6 -4 -2 0 --seeds 3 --steps 1000 --models "
                    "multiscreen transformer:8,4,48 transformer:8,4,48:qknorm",
        "sanity": "--seeds 3 --steps 2000 --window 64",
        "ablations": "--seeds 3 --steps 1000 --warmup 250",
    },
    models=with_ablations(SMALL_ABC) | {
        "abcdigits_transformer": "--model transformer:4,4,96 --data abcdigits --digits 2 "
                                 "--lr 0.001953125",
        "text_multiscreen": "--psi 8",
        "text_transformer": "--model transformer:8M"},
    seeds=3,
    steps={"": 2400, "abcdigits_transformer": 3000, "text_multiscreen": 620,
           "text_transformer": 620},
    measure={
        "perplexity": [
            ("experiments.long_context --length 8192", ["text_multiscreen"], None),
            ("experiments.long_context --length 8192 --rope-scale 1 4 16", ["text_transformer"],
             None)],
        "retrieval": [
            ("abcdigits.py --lengths 256 512 1024 2048 4096 --trials 40",
             ["abcdigits_multiscreen"], None),
            ("abcdigits.py --lengths 256 512 1024 2048 4096 --trials 40 --swe",
             ["abcdigits_multiscreen"], None),
            ("abcdigits.py --lengths 8192 --trials 40", ["abcdigits_multiscreen"], None),
            ("abcdigits.py --lengths 16384 32768 --trials 20", ["abcdigits_multiscreen"], None),
            ("abcdigits.py --lengths 8192 --trials 20 --swe", ["abcdigits_multiscreen"], None),
            ("abcdigits.py --lengths 16384 32768 --trials 20 --swe", ["abcdigits_multiscreen"], 1),
            ("abcdigits.py --lengths 256 512 1024 2048 --trials 20 --rope-scale 1 2 4",
             ["abcdigits_transformer"], None)],
        "passkey": [("experiments.passkey --lengths 512 1024 2048 --trials 20",
                     ["text_multiscreen"], None)],
        "ablations": [
            ("experiments.long_context --length 4096", without_rope(VARIANTS), None),
            ("experiments.long_context --length 4096 --rope-scale 1 4 16", ["multiscreen_rope"],
             None),
            ("abcdigits.py --lengths 256 512 1024 2048 --trials 40",
             without_rope(ABLATED), None),
            ("abcdigits.py --lengths 256 512 1024 2048 --trials 40 --rope-scale 1 4",
             ["abcdigits_rope"], None),
            ("abcdigits.py --lengths 256 512 1024 2048 --trials 40 --swe", ABLATED, None)],
    },
    latency="",
    shown="text_multiscreen",
    note="Not part of this scale: models above 2M parameters, several sizes in retrieval and "
         "perplexity, perplexity on books, passkey with expanded windows or beside a Transformer, "
         "and anything on a GPU.\n\n"
         "Text is the source of Python's standard library, but for ABCDigits, whose models are "
         "trained on its documents. A token is a byte. Models are trained on 128 at a time for "
         "validation losses and the ablations' perplexity, on 256 for all else. But for the figure "
         "of learning rates, Transformers have the paper's, 1e-3, which is not tuned for this "
         "scale; that of ABCDigits has 2^-9, the best of three.")

# The paper's. Nobody has run these commands here.
PAPER_RUN = "--data slimpajama --tokenizer gpt2 --seq-len 4096 --batch-size 16 " \
            "--batch-tokens 4194304 --eval-every 4096 --log-every 1"
GRID = "--lengths 4096 8192 16384 32768 65536 131072 --trials 1000"
FACTORS = "--rope-scale 1 2 4 8 16 32 64"
BOOKS = "experiments.long_context --data pg19 --documents 5747 --length 131072 --window 0.1"
SIZES = [f"multiscreen_psi{n}" for n in (8, 16, 32, 48)]
TRANSFORMERS = [f"transformer_{size}" for size in ("8M", "45M", "353M", "1.3B")]
PAPER = Scale(
    scripts={
        "scaling": "--psi 8 16 32 48 64 --transformers transformer:8M transformer:45M "
                   "transformer:353M transformer:1.3B --seeds 3 48:1 64:1 transformer:1.3B:1 "
                   f"--unfitted 64 --steps 65536 {PAPER_RUN}",
        "lr_sweep": "--exponents -14 -13 -12 -11 -10 -9 -8 -7 -6 -5 -4 -3 -2 -1 0 --seeds 3 "
                    "--psi 16 --models multiscreen transformer:45M transformer:45M:qknorm "
                    f"--steps 65536 {PAPER_RUN}",
        "sanity": "--seeds 3 --psi 16 --transformer transformer:45M --window 256 --steps 65536 "
                  f"{PAPER_RUN}",
        "ablations": f"--seeds 3 --psi 16 --steps 16384 --warmup 4096 {PAPER_RUN}",
    },
    models={}, seeds=3, steps={},
    measure={
        "perplexity": [(BOOKS, ["multiscreen_psi48", "multiscreen_psi32"], None),
                       (f"{BOOKS} {FACTORS}", ["transformer_1.3B", "transformer_353M"], None)],
        "retrieval": [(f"abcdigits.py {GRID} --digits 6", SIZES, None),
                      (f"abcdigits.py {GRID} --digits 6 --swe", SIZES, None),
                      (f"abcdigits.py {GRID} --digits 6 {FACTORS}", TRANSFORMERS, None)],
        "passkey": [(f"experiments.passkey {GRID}", SIZES, None),
                    (f"experiments.passkey {GRID} --swe", SIZES, None),
                    (f"experiments.passkey {GRID} {FACTORS}", TRANSFORMERS, None)],
        "ablations": [(BOOKS, without_rope(VARIANTS), None),
                      (f"{BOOKS} {FACTORS}", ["multiscreen_rope"], None),
                      (f"abcdigits.py {GRID} --digits 6", without_rope(VARIANTS), None),
                      (f"abcdigits.py {GRID} --digits 6 {FACTORS}", ["multiscreen_rope"], None),
                      (f"abcdigits.py {GRID} --digits 6 --swe", VARIANTS, None)],
    },
    latency="--repeats 100 --ckpt out/paper/multiscreen_psi{8,16,32,48,64}-*/ckpt.pt",
    shown="multiscreen_psi8")

SCALES = {"tiny": TINY, "small": SMALL, "paper": PAPER}


class Figure(NamedTuple):
    """A figure or table. paper: what the paper states; scripts: that train and draw it.

    source: the table that is there once it was measured, in OUT or in a folder of it.
    """
    title: str
    paper: str
    scripts: tuple = ()
    draw: tuple = ()
    table: str = ""
    images: tuple = ()
    source: str = ""


FIGURES = {
    "scaling": Figure(
        "Scaling efficiency", "Multiscreen needs roughly 30 % fewer parameters at similar "
        "validation loss; the 4B model, undertrained, lies off the line.",
        ("scaling",), (), "fits.tsv", ("scaling.png",),
        source="fits.tsv"),
    "lr_sweep": Figure(
        "Learning-rate stability, QKNorm, loss curves", "The Transformer diverges from 2^-4 on, "
        "with QKNorm and without; Multiscreen trains at 1.",
        ("lr_sweep",), ("experiments.training_curves",), "lr_sweep.tsv",
        ("lr_sweep.png", "training_curves.png"),
        source="lr_sweep.tsv"),
    "sanity": Figure(
        "Gradient norms, weight decay, clipping", "Without weight decay the Transformer's loss is "
        "about 0.02 lower and its gradient norm larger; without clipping both stay; Multiscreen's "
        "gradient norm is much smaller.",
        ("sanity",), (), "sanity.tsv", ("sanity_curves.png",),
        source="sanity.tsv"),
    "perplexity": Figure(
        "Long-context perplexity", "Multiscreen's stays stable beyond the training length, the "
        "Transformer's rises sharply; RoPE scaling delays that and costs perplexity.",
        (), ("experiments.long_context",), "", ("long_context.png",),
        source="long_context.tsv"),
    "retrieval": Figure(
        "ABCDigits", "At 4,096 tokens, the training length: 286M Multiscreen 99.18 %, 1.3B "
        "Transformer 95.98 %. Multiscreen hardly degrades up to 131,072 tokens, the Transformer "
        "finds nothing there; SWE helps small models.",
        (), ("experiments.retrieval",), "retrieval.tsv",
        ("abcdigits_by_length.png", "abcdigits.png"),
        source="retrieval.tsv"),
    "passkey": Figure(
        "Passkey retrieval", "With SWE the 28M Multiscreen is above 99.5 % in each cell, 286M and "
        "1.3B have 100 %.", (), ("experiments.retrieval",), "retrieval.tsv", ("passkey.png",),
        source="retrieval.tsv"),
    "latency": Figure(
        "Latency", "Multiscreen is faster at each size and length, the more so the longer the "
        "context; SWE lies between it and the Transformer.",
        (), (), "latency.tsv", ("latency.png",),
        source="latency.tsv"),
    "ablations": Figure(
        "Ablations", "Each costs validation loss, no gate most. Retrieval: RoPE degrades it "
        "severely, no TanhNorm and r = 1 too, no gate hardly. Perplexity: r = 1 rises sharply.",
        ("ablations",), ("experiments.long_context", "experiments.retrieval"), "ablations.tsv",
        ("ablations.png", "long_context_ablations.png", "abcdigits_ablations.png"),
        source="ablations.tsv"),
    "maps": Figure(
        "Relevance maps", "Many maps have a substantial number of zeros, more in some tiles.",
        images=("relevance_by_distance.png", "relevance_maps.png"),
        source="*/relevance_maps.tsv"),
    "windows": Figure(
        "Learned windows", "Most windows are local or medium-range, a few exceed the training "
        "length; r is often close to 1.", table="windows.tsv", images=("windows.png",),
        source="*/windows.tsv"),
}
