"""Retrieval as figures: by context length and depth, a panel for each model, and by length alone.

Section "Retrieval Ability", appendices "ABCDigits" and "Passkey Retrieval Results", and the
retrieval of "Architectural Ablations". Rows: Transformer, Multiscreen, Multiscreen + SWE; columns:
sizes, or ablations. Models that differ in their seed only share a panel: it shows their mean.

Paper:  python abcdigits.py --ckpt out/scaling_paper/multiscreen_psi32-{0,1,2}/ckpt.pt \\
            --lengths 4096 8192 16384 32768 65536 131072 --results out/paper.tsv
        python -m experiments.retrieval out/paper.tsv
        Run the first for each model: again with --swe, Transformers with --rope-scale 1 2 .. 64.
Small:  python -m experiments.retrieval out-abc/results.tsv
        The model of the README. What it leaves out: language; it was trained on this very task.

The paper prints two means over the depths at 4,096 tokens, its training length: 99.18 % for the
286M Multiscreen, 95.98 % for the 1.3B Transformer with the best RoPE scaling factor in each cell.
"""
if not __package__:
    raise SystemExit("error: run python -m experiments.retrieval in the folder above")

from pathlib import Path

from experiments.common import mean_and_std, pyplot, report, save_figure
from experiments.grids import draw_grids
from experiments.models import model_of, tell_apart
from experiments.style import ABLATIONS, WIDTH, label_models, legend_below, look, plot_with_band
from support.cli import Parser, UsageError, cli
from support.results import Results, flag
from support.retrieval import by_model, get_cells, mean_by_length

COLUMNS = ["task", "model", "length", "x_training", "seeds", "prompts", "mean", "std",
           "worst_depth"]


def with_names(models):
    """Yield (name, one of the keys, cells) of each model; "+ SWE" is part of the name."""
    keys = [key for values in models for key in values]
    names, words = label_models(model_of(key.run)[:2] for key in keys), tell_apart(keys)
    for values in models:
        key = next(iter(values))
        name = names[model_of(key.run)[:2]] + (" + SWE" if key.swe else "") + words(key)
        yield name, key, get_cells(values)


def get_rows(models):
    """A row of COLUMNS for each model and length: the mean over the depths, std over the seeds.

    prompts: in a cell of one seed, as a range where they differ.
    """
    rows = []
    for name, key, cells in with_names(models):
        for length, by_seed in mean_by_length(cells).items():
            mean, std, _ = mean_and_std(by_seed.values())
            column = [cell for (n, _), cell in cells.items() if n == length]
            prompts = [n for cell in column for seed, n in cell.prompts.items() if seed in by_seed]
            least, most = min(prompts), max(prompts)
            rows.append([key.task, name, length, length / int(flag(key.run, "--seq-len")),
                         len(by_seed), most if least == most else f"{least}-{most}",
                         f"{mean:.1%}", f"{std:.1%}" if len(by_seed) > 1 else None,
                         f"{min(cell.mean for cell in column):.1%}"])
    return rows


def draw_by_length(plt, models, path):
    """The means over the depths as curves by length, with a band of one std over the seeds.

    A hollow marker is of fewer seeds than others of its curve. Ablations have figures of their own:
    they are left out where there are other models.
    """
    plain = [x for x in models if model_of(next(iter(x)).run).variant not in ABLATIONS] or models
    plain = sorted(plain, key=lambda x: next((key.swe, key.run) for key in x))     # SWE last
    fig, ax = plt.subplots(figsize=(WIDTH, 4), layout="constrained")
    lengths = set()
    for n, (name, key, cells) in enumerate(with_names(plain)):
        found = mean_by_length(cells)
        stats = [mean_and_std([100 * share for share in x.values()]) for x in found.values()]
        means, stds, _ = zip(*stats)                   # of one seed the std is NaN: no band
        plot_with_band(ax, list(found), means, stds, label=name, clip_on=False, **look(n))
        most = max(map(len, found.values()))
        fewer = {length: mean for length, mean in zip(found, means) if len(found[length]) < most}
        ax.plot([*fewer], [*fewer.values()], clip_on=False, in_layout=False, zorder=3, ms=5,
                **look(n) | {"ls": "", "mfc": "white"})
        lengths |= found.keys()
        trained = int(flag(key.run, "--seq-len"))
        ax.axvline(trained, color="0.5", lw=1, ls=":")
    ax.annotate("training length", (trained, 50), (-5, 0), textcoords="offset points",
                color="0.4", rotation=90, ha="right", va="center")
    ax.set(xscale="log", ylim=(0, 100), ylabel="needles found (%)",
           xlabel="context (tokens); a hollow marker is of fewer seeds")
    ax.set_xticks(sorted(lengths), [f"{n:,}" for n in sorted(lengths)])
    ax.minorticks_off()
    legend_below(fig, ax, 3)
    save_figure(fig, path)


def main():
    p = Parser(__doc__)
    p.add_argument("tables", nargs="+", metavar="results.tsv",
                   help="tables of abcdigits.py and experiments.passkey")
    p.add_argument("--out", help="folder of the figures [that of the first table]")
    args = p.parse_args()
    values = {}
    for path in args.tables:
        if not Path(path).exists():
            raise UsageError(f"{path} does not exist: abcdigits.py fills a table")
        values |= Results(path).values
    out = Path(args.out or Path(args.tables[0]).parent)
    out.mkdir(parents=True, exist_ok=True)

    found = {name: by_model(values, name) for name in ("abcdigits", "passkey")}
    if not any(found.values()):
        raise UsageError(f"{args.tables[0]} holds no retrieval: abcdigits.py measures it")
    rows = [row for models in found.values() for row in get_rows(models)]
    report(out / "retrieval.tsv", COLUMNS, rows,
           "Retrieval, mean over the depths (paper, ABCDigits at its training length: Multiscreen "
           "286M 99.18 %, Transformer 1.3B 95.98 %)")
    if plt := pyplot():
        for name, models in found.items():
            if models:
                draw_grids(plt, models, out / f"{name}.png")
        if found["abcdigits"]:
            draw_by_length(plt, found["abcdigits"], out / "abcdigits_by_length.png")


if __name__ == "__main__":
    cli(main)
