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
        2^17 tokens, books, and all but 10 documents; so windows are wider, +-30 %. Any length runs;
        memory grows linearly. The documents are single files of the standard library, every 20th,
        which train.py holds out, without the tables of code pages in encodings/. Train and measure
        with the same Python.

Each document is a row of perplexity.tsv beside the checkpoint: nats at each position. Rerun the
command to measure what is missing. `python -m experiments.long_context` draws such tables.
"""
import hashlib
import itertools
from pathlib import Path

import numpy as np
import torch

from experiments.curves import get_curves, positions, print_curves, setting_of
from experiments.style import paper_name
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
    files_of,
    fingerprint,
    hash_of,
    read_text,
    standard_library,
    visible_files,
)
from support.run import absolute
from support.table import RUN, Progress, Table, beside, describe_run

KEYS = (*RUN, "data", "window", "length", "swe", "factor", "document")
VALUES = ("nats",)


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


def corpus_of(data):
    """The name of a corpus, with a hash of its files: two folders may have one name."""
    paths = [Path(name) for name in data or ()]
    files = [p for path in paths for p in (visible_files(path) if path.is_dir() else [path])]
    found = fingerprint((path, "val") for path in files or standard_library()[HELD_OUT])
    return f"{' '.join(path.name for path in paths) or 'stdlib'} {hash_of(found)[:8]}"


def get_documents(data, tokenizer, L, limit):
    """({name and hash: segment of L + 1 tokens}, at most `limit`; how many were too short).

    data: paths, one document per file, or None for the files of the standard library that train.py
    holds out, without the tables of code pages. Raises UsageError if all are too short.
    """
    if data:
        paths = (path for path, use in files_of(data) if use)
    else:
        held_out = standard_library()[HELD_OUT]
        paths = (path for path in held_out if path.parent.name != "encodings")
    segments, short, longest = {}, 0, 0
    for path in paths:
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
        raise UsageError(f"no document is longer than {L} tokens, the longest has {longest}: take "
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


# --------------------------------------------------------------------------------- measuring

def perplexity_args():
    p = Parser(__doc__)
    p.add_argument("--data", nargs="+", help="UTF-8 files or folders, one document per file "
                   "[the standard library's held-out files]")
    p.add_argument("--length", type=int,
                   help="L in tokens (paper: 2^17) [32 times the training length]")
    p.add_argument("--documents", type=int, default=16,
                   help="at most this many documents (paper: 5747) [16]")
    p.add_argument("--window", type=float, default=0.3,
                   help="a position stands for those within this share of it (paper: 0.1) [0.3]")
    p.add_argument("--rope-scale", type=rope_factor, nargs="+", default=[],
                   help="for models with RoPE: a curve for each scaling factor of the positions, "
                   "or of theta, as ntk4 (paper: 1 2 4 .. 64)")
    p.add_argument("--swe", action="store_true",
                   help="one more curve: windows beyond the training length become infinite")
    p.add_shared("--ckpt", "--device")
    args = p.parse_args()
    if args.documents < 1 or args.length is not None and args.length < 1:
        raise UsageError("--length and --documents must be above 0")
    if not 0 < args.window < 1:
        raise UsageError("--window must be between 0 and 1")
    return args


def main():
    args = perplexity_args()
    model, tokenizer, ckpt = load_for_evaluation(args.ckpt, args.device)
    if args.rope_scale:
        scale_rope(model, args.rope_scale[0])          # refuses a model without RoPE
    if args.swe:
        require_windows(model, args.ckpt, ckpt["model"])
    L = args.length or 32 * ckpt["args"]["seq_len"]
    documents, short = get_documents(args.data, tokenizer, L, args.documents)
    if args.data and absolute(args.data) == ckpt["args"]["data"]:
        print("note: the model was trained on 19 twentieths of --data: expect a higher perplexity "
              "on texts it has not seen")
    print(f"{len(documents)} documents of {L} + 1 tokens ({tokenizer.name}); {short} were too "
          "short", flush=True)

    data = corpus_of(args.data)
    # SWE comes last: windows stay expanded.
    run = describe_run(ckpt) | {"data": data, "window": args.window, "length": L}
    settings = itertools.product([False, True][: 1 + args.swe], args.rope_scale or [None])
    cells = [run | {"swe": swe, "factor": factor, "document": name}
             for swe, factor in settings for name in documents]
    table = Table(beside(args.ckpt, "perplexity.tsv"), KEYS, VALUES, model_hash(ckpt))
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

    rows = table.rows_of(cells)
    labels = {(row["model"], row["parameters"]): paper_name(row["model"]) for row in rows}
    print_curves(get_curves(rows), labels,
                 f"Perplexity by tokens of context, {len(documents)} documents; {table.path}")


if __name__ == "__main__":
    cli(main)
