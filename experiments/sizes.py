"""The sizes and parameter counts of the paper's models, built and counted.

    python -m experiments.sizes                 (seconds; nothing is allocated)
"""
import torch

from baselines import build, count_parameters
from baselines.transformer import SIZES
from support.cli import Parser, cli
from support.table import print_table

PAPER = {                                              # parameters: total, non-embedding
    "multiscreen, psi 8": (4_134_146, 917_698),
    "multiscreen, psi 16": (27_546_626, 14_680_834),
    "multiscreen, psi 32": (286_347_266, 234_884_098),
    "multiscreen, psi 48": (1_304_884_226, 1_189_092_098),
    "multiscreen, psi 64": (3_963_961_346, 3_758_108_674),
    "transformer:8M": (7_613_312, 1_180_416),
    "transformer:45M": (44_609_024, 18_877_440),
    "transformer:353M": (353_453_056, 301_989_888),
    "transformer:1.3B": (1_310_935_040, 1_208_008_704),
}
COLUMNS = ["model", "N_L", "N_H", "d_E", "parameters", "non-embedding", "as in the paper"]


def main():
    Parser(__doc__).parse_args()
    models = {f"multiscreen, psi {n}": ("multiscreen", {"psi": n}) for n in (8, 16, 32, 48, 64)}
    models |= {f"transformer:{size}": (f"transformer:{size}", {}) for size in SIZES}
    rows = []
    for label, (name, sizes) in models.items():
        with torch.device("meta"):
            model = build(name, sizes)
        total, rest = count_parameters(model)
        same = "yes" if (total, rest) == PAPER[label] else f"no: {PAPER[label]}"
        c = model.config
        rows.append([label, c.N_L, c.N_H, c.d_E, f"{total:,}", f"{rest:,}", same])
    print_table(COLUMNS, rows, "Parameters of the paper's models")


if __name__ == "__main__":
    cli(main)
