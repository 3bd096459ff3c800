"""Does perplexity stay low far beyond the training length? (section "Long-Context Perplexity")

From each document longer than L tokens we take the L + 1 tokens in the middle. The token at
position p is predicted from the p tokens before it. For each position that is reported, the
negative log-likelihood is averaged over a window of positions around it. The paper's appendix of
the same name has the details.

Paper:  python -m lab.perplexity --data pg19/ --documents 5747 --length 131072 \\
            --window 0.1 --rope-scale 1 2 4 8 16 32 64 --ckpt out/paper/1.3B-0/ckpt.pt
        The texts are the 5,747 books of PG-19 that are longer than 2^17 tokens, and a window is
        +-10 % of its position. Run the same for 353M and the ablation rope, and without
        --rope-scale for psi32, psi48 and the other ablations.
Small:  python -m lab.perplexity --ckpt out/ckpt.pt
        This goes to 32 times the training length, which is 2^13 bytes for
        `python train.py --psi 8`. What it leaves out is 2^17 tokens, books, and all but some 10
        documents, so the windows are wider, +-30 %. You can choose any length; memory grows
        linearly with it. The documents are the files of Python's standard library that train.py
        holds out, which is every 20th file, except for the tables of code pages in encodings/. Use
        the same Python to train and to measure.

Each document becomes a row of perplexity.tsv, beside the checkpoint, with the nats at each
position. Rows that exist already are reused, so you can interrupt the command and run it again. The
rows that you asked for are printed, and drawn in perplexity.png.

    python -m lab.perplexity out/perplexity.tsv mine=out-mine/perplexity.tsv --out out/f.png

compares models: it draws existing tables and measures nothing. Models that differ only in their
seed share a curve, which is their mean over the documents that all of them have, with a band of one
standard deviation. Each model has a panel of its own, which also shows the first model's curve for
comparison. The paper shows its curves but prints no numbers.
"""
import hashlib
import math
import sys
from typing import NamedTuple

import numpy as np
import torch

from lab.common import (
    add_settings,
    add_tables,
    get_figure,
    group_rows,
    pyplot,
    save_figure,
    settings_of,
    stretch,
)
from lab.style import WIDTH, count_of, legend_below, look, plain_axis, plot_with_band
from support.cli import Parser, UsageError, cli
from support.data import absolute, files_of, read_text, standard_library
from support.measure import (
    RUN,
    add_flags,
    beside,
    describe_run,
    fill,
    load_for_evaluation,
    print_table,
    require_finite,
)
from support.run import identity

KEYS = (*RUN, "data", "window", "length", "swe", "factor", "document")
# What a curve's name says of them, where they differ.
TEXTS = {"seq_len": ", trained at {}", "swe": " + SWE", "factor": ", RoPE ×{}",
         "data": ", data {}", "window": ", window {}", "length": ", length {}"}


# --------------------------------------------------------------------------------- measuring

def positions(L):
    """The evaluated positions: 32, 45, 64, 91, .., rounded powers of sqrt(2), and L itself."""
    powers = [round(2 ** (n / 2)) for n in range(10, 2 * L.bit_length() + 2)]
    return [p for p in powers if p < L] + [L]


def window_means(values, L, share):
    """Means of values (L,), in the window of +-share around each of positions(L), cut at 1 and L.

    values[0] is at position 1. Both ends belong to a window.
    """
    means = []
    for p in positions(L):
        first, last = max(math.ceil(p * (1 - share)), 1), math.floor(p * (1 + share))
        means.append(values[first - 1 : last].mean())
    return means


def documents_in(data):
    """The files of a corpus, one document each. data: paths, or None.

    None is what train.py holds out of the standard library, without its tables of code pages.
    """
    if data:
        return files_of(data)
    return [path for path in standard_library()[19::20] if path.parent.name != "encodings"]


def get_segments(files, tokenizer, L, limit):
    """{name and hash: the L + 1 tokens in the middle of a document}, of at most `limit` files.

    Says which files are no text. Raises UsageError if all are too short.
    """
    segments, longest, skipped = {}, 0, []
    for path in files:
        try:
            tokens = tokenizer.encode_ordinary(read_text(path))
        except UsageError as e:
            skipped.append(f"{e}")
            continue
        longest = max(longest, len(tokens))
        start = (len(tokens) - L - 1) // 2
        if start >= 0:
            segment = np.array(tokens[start : start + L + 1], dtype=np.uint16)
            segments[f"{path.name} {hashlib.sha256(segment.tobytes()).hexdigest()[:8]}"] = segment
        if len(segments) == limit:
            break
    if skipped:
        print(f"skipped {len(skipped)} files, such as {skipped[0]}")
    if not segments:
        raise UsageError(f"no document is longer than {L} tokens, the longest has {longest}: use "
                         "a smaller --length, or longer texts with --data")
    return segments


@torch.no_grad()
def nats(model, segment):
    """Negative log-likelihoods of the tokens at positions 1 .. L, in nats. (L + 1,) -> (L,)"""
    x = torch.from_numpy(segment.astype(np.int64)).to(model.W_E.device)[None]
    caches, head, found = model.new_caches(), model.head(), []
    pieces = [model.pieces(tokens) for tokens in (x[:, :-1], x[:, 1:])]
    for tokens, targets in zip(*pieces):
        found.append(model.nats(model.hidden(tokens, caches)[0], targets[0], head))
    found = torch.cat(found).cpu().double()
    require_finite(found, "losses")
    return found.numpy()


def measure(args):
    """Measure what is missing. Returns (the rows that args ask for, path of their figure)."""
    model, tokenizer, ckpt = load_for_evaluation(args.ckpt, args.device)
    T_train = ckpt["args"]["seq_len"]
    settings = settings_of(args, model)
    L = args.length or 32 * T_train
    segments = get_segments(documents_in(args.data), tokenizer, L, args.documents)
    if args.data and absolute(args.data) == ckpt["args"]["data"]:
        print("note: the model was trained on 19 twentieths of --data: expect a higher perplexity "
              "on texts it has not seen")
    print(f"{len(segments)} documents of {L} + 1 tokens ({tokenizer.name})", flush=True)

    run = describe_run(ckpt) | {"data": " ".join(args.data or ["stdlib"]), "window": args.window,
                                "length": L}
    cells = [run | setting | {"document": name} for setting in settings for name in segments]

    def means(cell):
        stretch(model, cell, T_train)
        found = window_means(nats(model, segments[cell["document"]]), L, args.window)
        return " ".join(f"{x:.6g}" for x in found)

    path = beside(args.ckpt, "perplexity.tsv", args.table)
    return fill(path, cells, "nats", identity(ckpt), means), path.with_suffix(".png")


# ------------------------------------------------------------------------------------ curves

class Curve(NamedTuple):
    """Perplexity at positions x: mean and deviation over the seeds. Arrays (n,)"""
    label: str
    setting: str
    T_train: int
    n_seeds: int
    n_documents: int
    x: list
    mean: np.ndarray
    std: np.ndarray


def hash_in(document):
    """What is the same for a document in any file: the end of its name in a table."""
    return document.rpartition(" ")[2]


def documents_of(rows):
    """{(data, length): the hashes of its documents}"""
    found = {}
    for row in rows:
        found.setdefault((row["data"], row["length"]), set()).add(hash_in(row["document"]))
    return found


def with_one_path(rows):
    """The rows, where --data that has the same documents has one name: a text may have moved."""
    names = {}
    for (data, length), documents in documents_of(rows).items():
        names[data, length] = names.setdefault((length, frozenset(documents)), data)
    return [row | {"data": names[row["data"], row["length"]]} for row in rows]


def get_curves(rows):
    """The Curves of rows, of the documents that all seeds of a curve have."""
    curves = []
    for (label, setting), found in group_rows(with_one_path(rows), TEXTS).items():
        seeds = {}
        for row in found:
            of_seed = seeds.setdefault(row["seed"], {})
            of_seed[hash_in(row["document"])] = np.array(row["nats"].split(), dtype=float)
        shared = set.intersection(*map(set, seeds.values()))
        if not shared:
            print(f"{label}{setting}: no curve, since its seeds share no document",
                  file=sys.stderr)
        else:
            y = np.exp([np.mean([nats[name] for name in shared], 0) for nats in seeds.values()])
            std = y.std(0, ddof=1) if len(y) > 1 else np.full(y.shape[1], math.nan)
            curves.append(Curve(label, setting, int(found[0]["seq_len"]), len(y), len(shared),
                                positions(int(found[0]["length"])), y.mean(0), std))
    return curves


def print_curves(curves):
    """A row for each curve: perplexity and deviation at powers of two and at a text's end."""
    shown = sorted({p for curve in curves for p in curve.x
                    if p == curve.x[-1] or math.log2(p).is_integer()})
    rows = []
    for curve in curves:
        cells = {p: f"{mean:.3g}" + ("" if math.isnan(std) else f" ± {std:.2g}")
                 for p, mean, std in zip(curve.x, curve.mean, curve.std)}
        rows.append([curve.label + curve.setting, curve.n_seeds, curve.n_documents,
                     *map(cells.get, shown)])
    print_table(["model", "seeds", "documents", *map(str, shown)], rows,
                "Perplexity by tokens of context")


def draw_curves(plt, curves, path):
    """A panel for each model: its curves, and the first model's first curve to compare with."""
    first, *others = curves
    panels = {curve.label: [first] for curve in others or curves}
    for curve in others:
        panels[curve.label].append(curve)
    settings = [*dict.fromkeys(curve.setting for curve in curves)]
    columns = min(len(panels), 3)
    lines = math.ceil(len(panels) / columns)
    fig, axes = plt.subplots(lines, columns, sharey=True, squeeze=False, layout="constrained",
                             figsize=(WIDTH, max(2.4 * lines, 4) + 1))
    for ax in axes.flat[len(panels):]:
        ax.axis("off")

    for ax, (label, shown) in zip(axes.flat, panels.items()):
        for curve in shown:
            name, n = curve.label + curve.setting, 1 + settings.index(curve.setting)
            if curve is first:
                n = 0
            elif len(panels) > 1:                      # the title names the model
                name = curve.setting.lstrip(" ,+") or "as trained"
            plot_with_band(ax, curve.x, curve.mean, curve.std,
                           label=f"{name}, {count_of(curve.n_seeds, 'seed')}", **look(n))
        for T in sorted({curve.T_train for curve in shown}):
            ax.axvline(T, color="black", ls=(0, (5, 3)), lw=1,
                       label=f"training length, {T:,} tokens")
        ax.set_xscale("log", base=2)
        ax.set(yscale="log", title=label if len(panels) > 1 else "")
        plain_axis(plt, ax.yaxis, (1, 2, 3, 4, 5, 7))
    for ax in axes[-1]:
        ax.set_xlabel("position (tokens of context)")
    fig.supylabel("perplexity per token", fontsize=10)
    legend_below(fig)
    save_figure(fig, path)


def main():
    p = Parser(__doc__)
    add_tables(p, "*")
    p.add_argument("--data", nargs="+", help="UTF-8 files or folders; each file is a document "
                   "[the standard library's held-out files]")
    p.flag("--length", None, "the longest context L, in tokens (paper: 2^17) [32 times the "
           "training length]", int)
    p.flag("--documents", 16, "measure at most this many documents (paper: 5747)")
    p.flag("--window", 0.3, "average over the positions within this share of the reported one "
           "(paper: 0.1)")
    add_settings(p)
    add_flags(p)
    rows, out = get_figure(p, "nats", measure)
    curves = get_curves(rows)
    print_curves(curves)
    if plt := pyplot():
        draw_curves(plt, curves, out)


if __name__ == "__main__":
    cli(main)
