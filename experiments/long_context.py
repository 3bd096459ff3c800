"""Perplexity by position, far beyond the training length (section "Long-Context Perplexity").

Take the L + 1 tokens in the middle of each document longer than L tokens. The token at position p
has p tokens of context. Around each evaluated p, average the negative log-likelihood over the
positions of a window, then over the documents. The perplexity is e to that mean. Further details:
the appendix of the same name; the ablations: "Architectural Ablations".

Paper:  python -m experiments.long_context --data pg19/ --documents 5747 --length 131072 \\
            --window 0.1 --rope-scale 1 2 4 8 16 32 64 --results out/paper.tsv \\
            --ckpt out/scaling_paper/{multiscreen_psi16,transformer_45M}-{0,1,2}/ckpt.pt
        A Multiscreen and a Transformer trained on 4096 tokens; 5,747 books of PG-19 that are longer
        than 2^17 tokens; windows of +-10 %. Checkpoints that differ in their seed only are one
        curve: their mean, and a band of one standard deviation.
Small:  python -m experiments.long_context --ckpt out/ckpt.pt
        32 times the training length: 2^13 bytes for `python train.py --psi 8`. What it leaves out:
        2^17 tokens, books, and all but 10 documents; so windows are wider, +-30 %. Any length runs;
        memory grows linearly. The documents are single files of the standard library, every 20th,
        which train.py holds out, without the tables of code pages in encodings/. Train and measure
        with the same Python.

Each document is a row of the table of measurements: what was stopped goes on with the next one.
The paper prints no numbers for its curves.
"""
if not __package__:
    raise SystemExit("error: run python -m experiments.long_context in the folder above")

from experiments.common import pyplot, report, save_figure
from experiments.models import model_of, split_runs
from experiments.perplexity import get_curves, measure, positions, setting_of, summarize
from experiments.style import (
    ABLATIONS,
    WIDTH,
    count_of,
    label_models,
    legend_below,
    look,
    plain_axis,
    plot_with_band,
)
from support.cli import Parser, UsageError, cli
from support.results import add_flags, flag, open_results

COLUMNS = ["task", "model", "curve", "seeds", "position", "x_training", "perplexity", "std",
           "nats_per_token"]
PANELS = {"positions": ("", "rope", "nope"),
          "TanhNorm, gate, acceptance width": ("", "no-tanhnorm", "no-gate", "fixed-r")}


def draw_panel(plt, ax, curves, labels):
    """Perplexity by position: a curve for each key, the mean over its seeds, and a band."""
    for n, (key, seeds) in enumerate(curves.items()):
        mean, std, _ = zip(*summarize(seeds))
        words = [labels[key.run], setting_of(key)]
        if len(seeds) > 1:
            words.append(count_of(len(seeds), "seed"))
        label = ", ".join(filter(None, words))
        plot_with_band(ax, positions(int(key.length)), mean, std if len(seeds) > 1 else None,
                       label=label, **look(n))
    for T in sorted({int(flag(key.run, "--seq-len")) for key in curves}):
        ax.axvline(T, color="black", ls=(0, (5, 3)), lw=1, label=f"training length, {T:,} tokens")
    ax.set_xscale("log", base=2)
    ax.set(yscale="log", xlabel="position (tokens of context)")
    plain_axis(plt, ax.yaxis, (1, 2, 3, 4, 5, 7))


def name_runs(curves):
    """{run: what a table calls its model}"""
    labels = label_models(model_of(key.run)[:2] for key in curves)
    plain, same = split_runs([key.run for key in curves])
    names = {key.run: labels[model_of(key.run)[:2]] for key in curves}
    for run in same:
        if run not in plain and model_of(run).variant not in ABLATIONS:
            names[run] = "Multiscreen, Original"
    return names


def draw_perplexity(plt, curves, path):
    """The figure of all models but ablations, and one of the ablations, if there are any."""
    plain, same = ({key: seeds for key, seeds in curves.items() if key.run in runs}
                   for runs in split_runs([key.run for key in curves]))
    if plain:
        fig, ax = plt.subplots(figsize=(WIDTH, 5.5), layout="constrained")
        draw_panel(plt, ax, plain, name_runs(curves))
        ax.set_ylabel("perplexity per token")
        legend_below(fig, ax)
        save_figure(fig, path)
    if not same:
        return

    fig, axes = plt.subplots(1, 2, figsize=(1.5 * WIDTH, 5.5), sharey=True, layout="constrained")
    labels = {key.run: ABLATIONS.get(model_of(key.run).variant, "Original") for key in same}
    for ax, (title, variants) in zip(axes, PANELS.items()):
        draw_panel(plt, ax, {key: seeds for key, seeds in same.items()
                             if model_of(key.run).variant in variants}, labels)
        ax.set_title(title)
        ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=2, frameon=False)
    axes[0].set_ylabel("perplexity per token")
    save_figure(fig, path.with_name("long_context_ablations.png"))


def read_flags(argv=None):
    p = Parser(__doc__)
    add_flags(p)
    p.add_argument("--data", nargs="+", help="UTF-8 files or folders, a file a document "
                   "[the standard library's held-out files]")
    p.add_argument("--length", type=int,
                   help="L in tokens (paper: 2^17) [32 times the training length]")
    p.add_argument("--documents", type=int, default=16,
                   help="at most this many documents (paper: 5747) [16]")
    p.add_argument("--window", type=float, default=0.3,
                   help="a position stands for those within this share of it (paper: 0.1) [0.3]")
    p.add_argument("--rope-scale", type=float, nargs="+", default=[],
                   help="for models with RoPE: a curve for each scaling factor of the positions "
                   "(paper: 1 2 4 .. 64)")
    p.add_argument("--swe", action="store_true",
                   help="one more curve: windows beyond the training length become infinite")
    p.add_shared("--device")
    args = p.parse_args(argv)
    if args.documents < 1 or args.length is not None and args.length < 1:
        raise UsageError("--length and --documents must be above 0")
    if not all(factor > 0 for factor in args.rope_scale) or not 0 < args.window < 1:
        raise UsageError("the factors of --rope-scale must be above 0, --window between 0 and 1")

    return args


def main():
    args = read_flags()
    results, paths = open_results(args)
    keys = [key for path in paths for key in measure(path, args, results)]
    curves = get_curves({key: results.values[key] for key in keys} if paths else results.values)
    if not curves:
        raise UsageError(f"{results.path} holds no perplexity: --ckpt names what to measure")

    names, rows = name_runs(curves), []
    for key, seeds in curves.items():
        for position, found in zip(positions(int(key.length)), summarize(seeds)):
            rows.append([key.task, names[key.run], setting_of(key) or "as trained",
                         len(seeds), position, position / int(flag(key.run, "--seq-len")), *found])
    report(results.path.with_name("long_context.tsv"), COLUMNS, rows,
           "Perplexity by position (tokens of context); the paper prints no numbers of its curves")
    if plt := pyplot():
        draw_perplexity(plt, curves, results.path.with_name("long_context.png"))


if __name__ == "__main__":
    cli(main)
