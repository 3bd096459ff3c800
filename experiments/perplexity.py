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
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from experiments.common import add_tables, get_figure, group_rows, pyplot, save_figure
from experiments.style import COLORS, WIDTH, count_of, look, plain_axis, plot_with_band
from support.checkpoint import require_windows
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
from support.evaluation import load_for_evaluation, model_hash, rope_factor, scale_rope
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
            setting = " SWE" * cell["swe"] + f" RoPE ×{cell['factor']}" * bool(cell["factor"])
            progress.add(1, f"{cell['document']}{setting}")
    return table.rows_of(cells), table.path.with_suffix(".png")


# ------------------------------------------------------------------------------------ curves

class Curve(NamedTuple):
    """Perplexity at positions(length): its mean and deviation over the seeds, arrays (n,)."""
    label: str
    setting: str
    T_train: int
    length: int
    n_seeds: int
    mean: np.ndarray
    std: np.ndarray


def get_curves(rows, labels):
    """The Curves of rows, of the documents that all seeds of a curve have.

    A line says so where curves have other documents.
    """
    curves, documents = [], {}
    groups = group_rows(rows, labels, {
        "seq_len": ", trained at {}", "swe": " + SWE", "factor": ", RoPE ×{}", "data": ", data {}",
        "window": ", window {}", "length": ", length {}"})
    for (label, setting), found in groups.items():
        seeds = {}
        for row in found:
            nats = np.array(row["nats"].split(), dtype=float)
            seeds.setdefault(row["seed"], {})[row["document"]] = nats
        shared = set.intersection(*map(set, seeds.values()))
        length = int(found[0]["length"])
        documents.setdefault(f"{found[0]['data']}, length {length}", []).append(shared)
        if shared:
            x = np.exp([np.mean([nats[name] for name in shared], 0) for nats in seeds.values()])
            std = x.std(0, ddof=1) if len(x) > 1 else np.full(x.shape[1], math.nan)
            curves.append(Curve(label, setting, int(found[0]["seq_len"]), length, len(x),
                                x.mean(0), std))
    for words, of_curves in documents.items():
        if any(shared != of_curves[0] for shared in of_curves):
            counts = [*map(len, of_curves)]
            print(f"note: the curves of {words}, are of {min(counts)} to {max(counts)} documents, "
                  "not all of the same", file=sys.stderr)
    return curves


def print_curves(curves):
    """A row for each curve: perplexity and deviation at powers of two and at a text's end."""
    rows, shown = [], set()
    for curve in curves:
        found = {p: f"{mean:.3g}" + ("" if math.isnan(std) else f" ± {std:.2g}")
                 for p, mean, std in zip(positions(curve.length), curve.mean, curve.std)
                 if p == curve.length or math.log2(p).is_integer()}
        shown |= found.keys()
        rows.append(([curve.label + curve.setting, curve.n_seeds], found))
    shown = sorted(shown)
    print_table(["model", "seeds", *map(str, shown)],
                [[*words, *map(found.get, shown)] for words, found in rows],
                "Perplexity by tokens of context")


def draw_curves(plt, curves, path):
    """Perplexity by position, with a band over the seeds.

    More curves than there are colours get a panel for each model, each with the first curve.
    """
    panels = {"": curves}
    if len(curves) > len(COLORS):
        panels = {curve.label: [curves[0]] for curve in curves[1:]}
        for curve in curves[1:]:
            panels[curve.label].append(curve)
    columns = min(len(panels), 3)
    lines = math.ceil(len(panels) / columns)
    fig, axes = plt.subplots(lines, columns, sharey=True, squeeze=False, layout="constrained",
                             figsize=(WIDTH, 5.5 if lines == 1 else 2.4 * lines + 1))
    for ax in axes.flat[len(panels):]:
        ax.axis("off")
    styles, handles = {}, {}
    for n, (title, ax) in enumerate(zip(panels, axes.flat)):
        for curve in panels[title]:
            name = curve.label + curve.setting
            if title and curve is not curves[0]:
                name = curve.setting.lstrip(" ,+") or "as trained"
            name += f", {count_of(curve.n_seeds, 'seed')}"
            plot_with_band(ax, positions(curve.length), curve.mean, curve.std, label=name,
                           **styles.setdefault(name, look(len(styles))))
        for T in sorted({curve.T_train for curve in panels[title]}):
            ax.axvline(T, color="black", ls=(0, (5, 3)), lw=1,
                       label=f"training length, {T:,} tokens")
        ax.set_xscale("log", base=2)
        ax.set(yscale="log", title=title)
        if n + columns >= len(panels):
            ax.set_xlabel("position (tokens of context)")
        if n % columns == 0:
            ax.set_ylabel("perplexity per token")
        plain_axis(plt, ax.yaxis, (1, 2, 3, 4, 5, 7))
        handles |= dict(zip(*reversed(ax.get_legend_handles_labels())))
    fig.legend(handles.values(), handles, loc="outside lower center", ncols=2, frameon=False)
    save_figure(fig, path)


def perplexity_args():
    p = Parser(__doc__)
    add_tables(p, "*")
    p.add_argument("--data", nargs="+", help="UTF-8 files or folders, one document per file "
                   "[the standard library's held-out files]")
    p.flag("--length", None, "L in tokens (paper: 2^17)", type=int,
           shown="32 times the training length")
    p.flag("--documents", 16, "at most this many documents (paper: 5747)")
    p.flag("--window", 0.3, "average over positions within this share of each (paper: 0.1)",
           least=0)
    p.add_argument("--rope-scale", type=rope_factor, nargs="+", default=[],
                   help="for models with RoPE: a curve for each scaling factor of the positions, "
                   "or of theta, as ntk4 (paper: 1 2 4 .. 64)")
    p.add_argument("--swe", action="store_true",
                   help="one more curve: windows beyond the training length become infinite")
    p.add_shared("--ckpt", "--device", "--table")
    args = p.parse_args()
    if not 0 < args.window < 1:
        raise UsageError("--window must be between 0 and 1")
    if args.out and not args.tables:
        raise UsageError("--out is for tables: the figure of a checkpoint goes beside it")
    return args


def main():
    rows, out, labels = get_figure(perplexity_args(), "nats", measure)
    curves = get_curves(rows, labels)
    print_curves(curves)
    if plt := pyplot():
        draw_curves(plt, curves, out)


if __name__ == "__main__":
    cli(main)
