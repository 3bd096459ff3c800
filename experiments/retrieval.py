"""Retrieval as a figure: accuracy by context length and depth, a panel for each kind of model.

Section "Retrieval Ability", appendices "ABCDigits" and "Passkey Retrieval Results". The tables are
those of abcdigits.py and experiments.passkey. Tables of one kind of model, trained with several
seeds, share a panel: it shows their mean.

Paper:  python abcdigits.py --ckpt out/scaling_paper/multiscreen_psi48-0/ckpt.pt \\
            --lengths 4096 8192 16384 32768 65536 131072
        python -m experiments.retrieval \\
            out/scaling_paper/{transformer_1.3B,multiscreen_psi32,multiscreen_psi48}-0/abcdigits.tsv
        Run the first for each model: again with --swe, Transformers with --rope-scale 1 2 .. 64.
Small:  python -m experiments.retrieval out-abc/abcdigits.tsv
        The model of the README. What it leaves out: language; it was trained on this very task.

The paper prints two means over the depths at 4,096 tokens, its training length: 99.18 % for the
286M Multiscreen, 95.98 % for the 1.3B Transformer with the best RoPE scaling factor in each cell.
"""
if not __package__:
    raise SystemExit("error: run python -m experiments.retrieval in the folder above")

from pathlib import Path

from experiments.common import mean_and_std, pyplot, report
from experiments.grids import draw_grids, get_grid, group_seeds
from experiments.style import count_of
from support.checkpoint import read_checkpoint
from support.cli import Parser, check_writable, cli

COLUMNS = ["table", "model", "length", "x_training", "mean", "worst_depth"]


def main():
    p = Parser(__doc__)
    p.add_argument("tables", nargs="+", help="TSV files of abcdigits.py or experiments.passkey, "
                   "each beside its checkpoint")
    p.add_argument("--out", default="out/retrieval", help="folder [out/retrieval]")
    p.add_shared("--force")
    args = p.parse_args()
    out = Path(args.out) / "retrieval.tsv"
    check_writable(out, args.force)

    # A row for each table and length.
    grids, rows = [], []
    for path in map(Path, args.tables):
        ckpt = read_checkpoint(path.with_name("ckpt.pt"))
        grid = get_grid(path, ckpt, "_swe" in path.stem)
        grids.append(grid)
        for n in grid.lengths:
            rows.append([str(path), grid.name, n, n / grid.T_train, f"{grid.mean(n):.1%}",
                         f"{grid.worst(n):.1%}"])

    # Where a kind of model has several seeds: their mean and deviation, a row for each length.
    groups, columns = group_seeds(grids), COLUMNS
    if len(groups) < len(grids):
        columns = [*COLUMNS, "std"]
        rows = [[*row, None] for row in rows]
    for seeds in groups:
        for n in sorted({n for grid in seeds for n in grid.lengths}) if len(seeds) > 1 else []:
            measured = [grid for grid in seeds if n in grid.lengths]
            mean, std, _ = mean_and_std([grid.mean(n) for grid in measured])
            worst = min(grid.worst(n) for grid in measured)
            rows.append([count_of(len(measured), "seed"), measured[0].name, n,
                         n / measured[0].T_train, f"{mean:.1%}", f"{worst:.1%}",
                         f"{std:.1%}" if len(measured) > 1 else None])
    report(out, columns, rows,
           "Retrieval, mean over the depths (paper, ABCDigits at its training length: Multiscreen "
           "286M 99.18 %, Transformer 1.3B 95.98 %)")
    if plt := pyplot():
        draw_grids(plt, groups, out.with_suffix(".png"))


if __name__ == "__main__":
    cli(main)
