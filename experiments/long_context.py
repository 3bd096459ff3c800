"""Perplexity by position, far beyond the training length (section "Long-Context Perplexity").

Take the L + 1 tokens in the middle of each document longer than L tokens. The token at position p
has p tokens of context. Around each evaluated p, average the negative log-likelihood over the
positions 0.9 p .. 1.1 p, both ends included and cut at L, then over the documents. The perplexity
is e to that mean. Further details: the appendix of the same name.

Paper:  python -m experiments.long_context --data pg19/ --documents 5747 --length 131072 \\
            --rope-scale 1 2 4 8 16 32 64 \\
            --ckpt out/scaling_paper/{multiscreen_psi16,transformer_45M}-0/ckpt.pt
        A Multiscreen and a Transformer trained on 4096 tokens; 5,747 books of PG-19 that are longer
        than 2^17 tokens. Name the checkpoints of several seeds to draw their mean and a band of one
        standard deviation.
Small:  python -m experiments.long_context --ckpt out/ckpt.pt
        32 times the training length: 2^13 bytes for `python train.py --psi 8`. What it leaves out:
        2^17 tokens, books, and all but 15 documents, so the curve is rough, most of all on its
        left, where a window has few tokens. Any length runs; memory grows linearly. The documents
        are single files of the standard library, every 20th, which train.py holds out. Train and
        measure with the same Python. Some of these files are tables of character codes.

The paper prints no numbers for its curves.
"""
if not __package__:
    raise SystemExit("error: run python -m experiments.long_context in the folder above")

from pathlib import Path

import numpy as np

from experiments.common import Progress, pyplot, report, save_figure
from experiments.perplexity import get_curves, get_documents, nll_by_position, positions
from experiments.style import WIDTH, count_of, label_models, legend_below, look, plot_with_band
from support.cli import Parser, UsageError, check_writable, cli

COLUMNS = ["checkpoint", "model", "curve", "position", "perplexity", "nats_per_token",
           "bits_per_byte"]


def draw_perplexity(plt, curves, L, path):
    """Perplexity by position. Curves of one kind and setting are seeds: their mean and a band."""
    groups = {}
    for curve in curves:
        groups.setdefault((curve.kind, curve.T_train, curve.setting), []).append(curve)
    labels = label_models(kind for kind, _, _ in groups)
    fig, ax = plt.subplots(figsize=(WIDTH, 5.5), layout="constrained")
    for n, ((kind, _, setting), seeds) in enumerate(groups.items()):
        values = np.array([curve.perplexity for curve in seeds])
        std = values.std(0, ddof=1) if len(seeds) > 1 else None
        label = labels[kind]
        if setting != "as trained":
            label += ", " + setting.replace("x", "×")
        if len(seeds) > 1:
            label += f", {count_of(len(seeds), 'seed')}"
        plot_with_band(ax, positions(L), values.mean(0), std, label=label, **look(n))
    for T in sorted({curve.T_train for curve in curves}):
        ax.axvline(T, color="black", ls=(0, (5, 3)), lw=1, label=f"training length, {T:,} tokens")
    ax.set_xscale("log", base=2)
    ax.set(yscale="log", xlabel="position (tokens of context)", ylabel="perplexity per token")
    ax.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
    ax.yaxis.set_minor_formatter(lambda y, _: f"{y:g}")
    legend_below(fig, ax)
    save_figure(fig, path)


def main():
    p = Parser(__doc__)
    p.add_argument("--ckpt", nargs="+", default=["out/ckpt.pt"],
                   help="checkpoints of train.py [out/ckpt.pt]")
    p.add_argument("--data", nargs="+", help="UTF-8 files or folders, a file a document "
                   "[the standard library's held-out files]")
    p.add_argument("--length", type=int,
                   help="L in tokens (paper: 2^17) [32 times the longest training length]")
    p.add_argument("--documents", type=int, default=16,
                   help="at most this many documents (paper: 5747) [16]")
    p.add_argument("--rope-scale", type=float, nargs="+", default=[],
                   help="for models with RoPE: a curve for each scaling factor of the positions "
                   "(paper: 1 2 4 .. 64)")
    p.add_argument("--swe", action="store_true",
                   help="one more curve: windows beyond the training length become infinite")
    p.add_shared("--device", "--force")
    args = p.parse_args()
    if args.documents < 1 or args.length is not None and args.length < 1:
        raise UsageError("--length and --documents must be above 0")
    if not all(factor > 0 for factor in args.rope_scale):
        raise UsageError("the factors of --rope-scale must be above 0")

    # What is measured.
    curves = get_curves(args)
    table = Path(args.ckpt[0]).with_name("long_context.tsv")
    check_writable(table, args.force)
    trained = sorted({curve.T_train for curve in curves})
    L = args.length or 32 * trained[-1]
    if args.data and any(args.data == curve.ckpt["args"]["data"] for curve in curves):
        print("note: a checkpoint was trained on 19 twentieths of --data: expect a higher "
              "perplexity on texts it has not seen")
    documents = {}
    for tokenizer in {curve.tokenizer.name: curve.tokenizer for curve in curves}.values():
        segments, short = get_documents(args.data, tokenizer, L, args.documents)
        documents[tokenizer.name] = segments
        print(f"{len(segments)} documents of {L} + 1 tokens ({tokenizer.name}); {short} were too "
              "short")

    # The curves. If you stop the run, the finished ones are kept.
    rows, progress = [], Progress(sum(len(documents[c.tokenizer.name]) for c in curves))
    try:
        for curve in curves:
            curve.prepare()
            per_token, per_byte = nll_by_position(
                curve.model, curve.tokenizer, documents[curve.tokenizer.name], L, progress,
                f"{curve.path}, {curve.setting}")
            curve.perplexity = np.exp(per_token)
            values = [x.tolist() for x in (curve.perplexity, per_token, per_byte)]
            for value in zip(positions(L), *values):
                rows.append([curve.path, curve.ckpt["model"], curve.setting, *value])
    finally:
        if rows:
            report(table, COLUMNS, rows,
                   "Perplexity by position (tokens of context), averaged within +-10 % of it; "
                   f"training length {' and '.join(map(str, trained))} (the paper prints no "
                   "numbers of its curves)")
    if plt := pyplot():
        draw_perplexity(plt, curves, L, table.with_suffix(".png"))


if __name__ == "__main__":
    cli(main)
