"""Perplexity by position, far beyond the training length (section "Long-Context Perplexity").

Take the L + 1 tokens in the middle of each document longer than L tokens. The token at position p
has p tokens of context. Around each evaluated p, average the negative log-likelihood over the
positions of a window. Further details: the appendix of the same name.

Paper:  python -m experiments.perplexity --data pg19/ --documents 5747 --length 131072 \\
            --window 0.1 --rope-scale 1 2 4 8 16 32 64 --ckpt out/paper/transformer_45M-0/ckpt.pt
        5,747 books of PG-19 that are longer than 2^17 tokens; windows of +-10 %. A Multiscreen is
        measured without --rope-scale.
Small:  python -m experiments.perplexity --ckpt out/ckpt.pt
        32 times the training length: 2^13 bytes for `python train.py --psi 8`. What it leaves out:
        2^17 tokens, books, and all but 10 documents; so windows are wider, +-30 %. Any length
        works; memory grows linearly. The documents are the files of the standard library that
        train.py holds out, every 20th, without the code-page tables in encodings/. Train and
        measure with the same Python.

Each document is a row of perplexity.tsv beside the checkpoint: nats at each position. Existing rows
are reused; interrupted work resumes. The requested rows are printed, and drawn in perplexity.png.

    python -m experiments.perplexity out/perplexity.tsv mine=out-mine/perplexity.tsv --out out/f.png

draws such tables and measures nothing. Models that differ only in their seed share a curve: their
mean, with a band of one standard deviation. Many curves get a panel for each model, each with the
first curve. The paper prints no numbers for its curves.
"""
import hashlib
import itertools
import math
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from experiments.common import add_tables, get_figure, mean_and_std, pyplot, save_figure
from experiments.style import COLORS, WIDTH, count_of, look, plain_axis, plot_with_band
from support.checkpoint import (
    load_for_evaluation,
    model_hash,
    require_windows,
    rope_factor,
    scale_rope,
)
from support.cli import Parser, UsageError, cli
from support.data import (
    HELD_OUT,
    USES,
    absolute,
    files_of,
    fingerprint,
    hash_of,
    read_text,
    standard_library,
)
from support.table import RUN, Progress, Table, beside, describe_run, print_table

KEYS = (*RUN, "data", "window", "length", "swe", "factor", "document")


# --------------------------------------------------------------------------------- measuring

def positions(L):
    """The evaluated positions: 32, 45, 64, 91, .., rounded powers of sqrt(2), and L itself."""
    powers = [round(2 ** (n / 2)) for n in range(10, 2 * L.bit_length() + 2)]
    return [p for p in powers if p < L] + [L]


def window_means(values, L, share):
    """Means of values (L,), in the window of +-share around each of positions(L), cut at L.

    values[0] is at position 1. Both ends belong to a window.
    """
    values = np.asarray(values, dtype=np.float64)
    means = []
    for p in positions(L):
        first, last = np.ceil(p * (1 - share)), min(np.floor(p * (1 + share)), L)
        means.append(values[int(first) - 1 : int(last)].mean())
    return means


def middle(tokens, L):
    """The L + 1 tokens in the middle of a document, uint16; None if it has fewer."""
    start = (len(tokens) - L - 1) // 2
    if start < 0:
        return None
    return np.array(tokens[start : start + L + 1], dtype=np.uint16)


def files_in(data):
    """(the files of a corpus, those of them that are documents). data: paths, or None.

    None is what train.py holds out of the standard library; its tables of code pages are no
    documents.
    """
    if data:
        files = [path for path, use in files_of(data) if use in USES]
        return files, files
    held_out = standard_library()[HELD_OUT]
    return held_out, [path for path in held_out if path.parent.name != "encodings"]


def corpus_of(data, files):
    """The name of a corpus, with a hash of its files: two folders may have one name."""
    found = fingerprint((path, "val") for path in files)
    return f"{' '.join(Path(name).name for name in data or ['stdlib'])} {hash_of(found)[:8]}"


def get_documents(files, tokenizer, L, limit):
    """({name and hash: segment of L + 1 tokens}, at most `limit`; how many were too short).

    files: one document each. Raises UsageError if all are too short.
    """
    segments, short, longest = {}, 0, 0
    for path in files:
        tokens = tokenizer.encode_ordinary(read_text(path))
        longest = max(longest, len(tokens))
        segment = middle(tokens, L)
        if segment is None:
            short += 1
        else:
            segments[f"{path.name} {hashlib.sha256(segment.tobytes()).hexdigest()[:8]}"] = segment
        if len(segments) == limit:
            break
    if not segments:
        raise UsageError(f"no document is longer than {L} tokens, the longest has {longest}: use "
                         "a smaller --length, or longer texts with --data")
    return segments, short


@torch.no_grad()
def nats(model, segment):
    """Negative log-likelihoods of the tokens at positions 1 .. L, in nats. (L + 1,) -> (L,)"""
    x = torch.from_numpy(segment.astype(np.int64)).to(model.W_E.device)[None]
    caches, head, found = model.new_caches(), model.head(), []
    pieces = [model.pieces(tokens) for tokens in (x[:, :-1], x[:, 1:])]
    for tokens, targets in zip(*pieces):
        found.append(model.nats(model.hidden(tokens, caches)[0], targets[0], head))
    return torch.cat(found).cpu().double().numpy()


def measure(args):
    """Measure what is missing. Returns (the rows that args ask for, path of their figure)."""
    model, tokenizer, ckpt = load_for_evaluation(args.ckpt, args.device)
    if args.rope_scale:
        scale_rope(model, args.rope_scale[0])          # refuses a model without RoPE
    if args.swe:
        require_windows(model, args.ckpt, ckpt["model"])
    L = args.length or 32 * ckpt["args"]["seq_len"]
    files, texts = files_in(args.data)
    documents, short = get_documents(texts, tokenizer, L, args.documents)
    if args.data and absolute(args.data) == ckpt["args"]["data"]:
        print("note: the model was trained on 19 twentieths of --data: expect a higher perplexity "
              "on texts it has not seen")
    print(f"documents of {L} + 1 tokens ({tokenizer.name}): {len(documents)}; too short: "
          f"{short}", flush=True)

    data = corpus_of(args.data, files)
    # SWE comes last: windows stay expanded.
    run = describe_run(ckpt) | {"data": data, "window": args.window, "length": L}
    settings = itertools.product([False, True][: 1 + args.swe], args.rope_scale or [None])
    cells = [run | {"swe": swe, "factor": factor, "document": name}
             for swe, factor in settings for name in documents]
    table = Table(beside(args.ckpt, "perplexity.tsv", args.table), KEYS, ["nats"], model_hash(ckpt))
    missing = table.missing(cells)
    progress = Progress(len(missing))
    with table.measuring():
        for cell in missing:
            if cell["swe"]:
                model.expand_windows(ckpt["args"]["seq_len"])
            if cell["factor"]:
                scale_rope(model, cell["factor"])
            means = window_means(nats(model, documents[cell["document"]]), L, args.window)
            if not max(means) < 700:                   # or NaN; e^700 is the end of float64
                raise UsageError(f"{cell['document']}: the mean loss is {max(means):g} nats: is "
                                 f"{args.ckpt} a trained model?")
            table.add(cell, nats=" ".join(f"{x:.6g}" for x in means))
            progress.add(1, f"{setting_of(cell)}, {cell['document']}")
    return table.rows_of(cells), table.path.with_suffix(".png")


# ------------------------------------------------------------------------------------ curves

class Curve(NamedTuple):
    """What one curve shows, as text: the columns of a row except the seed and the document."""
    model: str
    parameters: str
    seq_len: str
    step: str
    data: str
    window: str
    length: str
    swe: str
    factor: str


def get_curves(rows):
    """{Curve: {seed: [nats at each position]}}, means over the documents that all seeds have.

    A line says so where curves of the same data have other documents.
    """
    found, documents = {}, {}
    for row in rows:
        curve = Curve(*(row[name] for name in Curve._fields))
        nats = [float(x) for x in row["nats"].split()]
        if len(nats) != len(positions(int(curve.length))):
            raise UsageError(f"{row['document']}: its row has {len(nats)} positions: delete it, "
                             "and measure again")
        found.setdefault(curve, {}).setdefault(row["seed"], {})[row["document"]] = nats
    curves = {}
    for curve, seeds in found.items():
        shared = set.intersection(*map(set, seeds.values()))
        documents.setdefault((curve.data, curve.length), []).append(shared)
        if shared:
            curves[curve] = {seed: [statistics.mean(x) for x in zip(*(d[name] for name in shared))]
                             for seed, d in sorted(seeds.items())}
    for (data, length), of_curves in documents.items():
        if any(shared != of_curves[0] for shared in of_curves):
            least, most = min(map(len, of_curves)), max(map(len, of_curves))
            print(f"note: the curves of {data}, length {length}, are of {least} to {most} "
                  "documents, not all of the same", file=sys.stderr)
    return curves


def summarize(seeds):
    """(perplexity, its deviation over the seeds) at each position, of {seed: [nats]}."""
    return [mean_and_std([math.exp(x) for x in column])[:2] for column in zip(*seeds.values())]


def setting_of(row):
    """What was done to the model before it was measured, in words."""
    words = ["SWE"] if row["swe"] else []
    if row["factor"]:
        words.append(f"RoPE ×{row['factor']}")
    return " ".join(words) or "as trained"


def words_of(curve, curves):
    """`setting_of` a curve among others, and how it was measured where they differ in that."""
    words = [setting_of(curve._asdict())]
    for name in ("data", "window", "length"):
        if len({getattr(other, name) for other in curves}) > 1:
            words.append(f"{name} {getattr(curve, name)}")
    return ", ".join(words)


def print_curves(curves, labels):
    """A row for each curve: perplexity and deviation at powers of two and at a text's end.

    labels: {(model, parameters): label}
    """
    shown, rows = set(), []
    for curve, seeds in curves.items():
        L, found = int(curve.length), {}
        for p, (mean, std) in zip(positions(L), summarize(seeds)):
            if p == L or math.log2(p).is_integer():
                found[p] = f"{mean:.3g}" + ("" if math.isnan(std) else f" ± {std:.2g}")
        shown |= found.keys()
        rows.append(([labels[curve.model, curve.parameters], words_of(curve, curves), len(seeds)],
                     found))
    shown = sorted(shown)
    print_table(["model", "curve", "seeds", *map(str, shown)],
                [[*words, *map(found.get, shown)] for words, found in rows],
                "Perplexity by tokens of context")


def draw_curves(plt, curves, labels, path):
    """Perplexity by position: a curve for each model and setting, and a band over its seeds.

    More curves than there are colours get a panel for each model, beside the first curve.
    """
    def model_of(curve):
        return labels[curve.model, curve.parameters]

    panels = {"": [*curves]}
    if len(curves) > len(COLORS):
        first, *others = curves
        panels = {model: [first, *(curve for curve in others if model_of(curve) == model)]
                  for model in dict.fromkeys(map(model_of, others))}
    columns = min(len(panels), 3)
    rows = math.ceil(len(panels) / columns)
    fig, axes = plt.subplots(rows, columns, figsize=(WIDTH, 5.5 if rows == 1 else 2.4 * rows + 1),
                             sharey=True, squeeze=False, layout="constrained")
    styles, handles = {}, {}
    for ax, (title, shown) in zip(axes.flat, panels.items()):
        for curve in shown:
            mean, std = zip(*summarize(curves[curve]))
            words = [words_of(curve, curves), count_of(len(curves[curve]), "seed")]
            if not title or curve == shown[0]:
                words = [model_of(curve), *words]
            if words[1] == "as trained":
                del words[1]
            label = ", ".join(words)
            plot_with_band(ax, positions(int(curve.length)), mean,
                           std if len(curves[curve]) > 1 else None, label=label,
                           **styles.setdefault(label, look(len(styles))))
        for T in sorted({int(curve.seq_len) for curve in shown}):
            ax.axvline(T, color="black", ls=(0, (5, 3)), lw=1,
                       label=f"training length, {T:,} tokens")
        ax.set_xscale("log", base=2)
        ax.set(yscale="log", title=title)
        plain_axis(plt, ax.yaxis, (1, 2, 3, 4, 5, 7))
        found, names = ax.get_legend_handles_labels()
        handles |= dict(zip(names, found))
    for ax in axes.flat[len(panels):]:
        ax.axis("off")
    for ax in axes.flat[len(panels) - columns : len(panels)]:
        ax.set_xlabel("position (tokens of context)")
    for ax in axes[:, 0]:
        ax.set_ylabel("perplexity per token")
    fig.legend(handles.values(), handles, loc="outside lower center", ncols=2, frameon=False)
    save_figure(fig, path)


def perplexity_args():
    p = Parser(__doc__)
    add_tables(p, "*")
    p.add_argument("--data", nargs="+", help="UTF-8 files or folders, one document per file "
                   "[the standard library's held-out files]")
    p.add_argument("--length", type=int,
                   help="L in tokens (paper: 2^17) [32 times the training length]")
    p.add_argument("--documents", type=int, default=16,
                   help="at most this many documents (paper: 5747) [16]")
    p.add_argument("--window", type=float, default=0.3,
                   help="average over positions within this share of each (paper: 0.1) [0.3]")
    p.add_argument("--rope-scale", type=rope_factor, nargs="+", default=[],
                   help="for models with RoPE: a curve for each scaling factor of the positions, "
                   "or of theta, as ntk4 (paper: 1 2 4 .. 64)")
    p.add_argument("--swe", action="store_true",
                   help="one more curve: windows beyond the training length become infinite")
    p.add_shared("--ckpt", "--device", "--table")
    args = p.parse_args()
    if args.documents < 1 or args.length is not None and args.length < 1:
        raise UsageError("--length and --documents must be above 0")
    if not 0 < args.window < 1:
        raise UsageError("--window must be between 0 and 1")
    if args.out and not args.tables:
        raise UsageError("--out is for tables: the figure of a checkpoint goes beside it")
    return args


def main():
    rows, out, labels = get_figure(perplexity_args(), "nats", measure)
    curves = get_curves(rows)
    print_curves(curves, labels)
    if plt := pyplot():
        draw_curves(plt, curves, labels, out)


if __name__ == "__main__":
    cli(main)
