"""Does perplexity stay low far beyond the training length? (section "Long-Context Perplexity")

From each document longer than L tokens we take the L + 1 tokens in the middle. The token at
position p is predicted from the p tokens before it. For each position that is reported, the
negative log-likelihood is averaged over a window of positions around it. The paper's appendix of
the same name has the details.

Paper:  python -m lab.perplexity --data pg19/ --documents 5747 --length 131072 \\
            --share 0.1 --rope-scale 1 2 4 8 16 32 64 --ckpt out/paper/1.3B-0/ckpt.pt
        The texts are the 5,747 books of PG-19 that are longer than 2^17 tokens. Run the same for
        353M and the ablation rope, and without --rope-scale for psi32, psi48 and the others.
Small:  python -m lab.perplexity --ckpt out/ckpt.pt
        This goes to 32 times the training length. The documents are those that train.py has held
        out of the run's text. For a run on a task, or if the text is too short or is not here, they
        are the files of Python's standard library that train.py holds out, every 20th file, except
        for the tables of code pages in encodings/. Use the same Python to train and to measure.
        They are few, so windows are wider. The table says which text it is.

Each document becomes a row of perplexity.tsv, beside the checkpoint, with the nats at each
position. If you repeat the command, it measures only what is missing. To draw such tables:

    python -m lab.figures perplexity out/perplexity.tsv mine=out-mine/perplexity.tsv
"""
import math
from pathlib import Path

import numpy as np
import torch

from support.cli import UsageError, at_least, cli
from lab.curves import perplexity_curves, print_perplexities
from support.data import documents_in, every_twentieth, read_files, text_held_out
from support.measure import Measurement, joined, parser, short_hash


def positions(L):
    """The evaluated positions: 32, 45, 64, 91, .., rounded powers of sqrt(2), and L itself."""
    powers = [round(2 ** (n / 2)) for n in range(10, 64)]
    return [p for p in powers if p < L] + [L]


def window_means(values, share):
    """Means of values (L,) in the window of +-share around each of positions(L), cut at 1 and L.

    values[0] is at position 1. Both ends belong to a window.
    """
    means = []
    for p in positions(len(values)):
        first, last = max(math.ceil(p * (1 - share)), 1), math.floor(p * (1 + share))
        means.append(values[first - 1 : last].mean())
    return means


def documents_of(data, tokenizer):
    """[(name, tokens)] of a corpus. data: paths, or None for what train.py holds out by default."""
    files = read_files(data or ["stdlib"], tokenizer)
    if data is None:
        files = {path: files[path] for path in every_twentieth(list(files))
                 if path.parent.name != "encodings"}
    return documents_in(files, tokenizer)


def choose_text(run, data, is_enough):
    """([(name, tokens)], the text's name in tables, more about it in words) of what to measure on.

    That is --data, else what the run has held out, else what train.py holds out by default.
    is_enough(documents): whether a text is long enough.
    """
    tokenizer, names, val = run.tokenizer, run.flags["data"], run.flags.get("val")
    if data:
        return documents_of(data, tokenizer), " ".join(data), ""
    if names == ["stdlib"] and not val:
        return documents_of(None, tokenizer), "stdlib", "every twentieth file"
    try:
        files, how = text_held_out(run.ckpt, tokenizer)
        documents = documents_in(files, tokenizer)
        if is_enough(documents):
            folders = " ".join(Path(name).name for name in val or names)
            return documents, f"held out of {folders}", how
        reason = "what the run has held out is too short"
    except UsageError as e:
        reason = str(e)
    if tokenizer.eot_token is None:
        raise UsageError(f"{reason}: name token files with --data, longer than --length")
    return documents_of(None, tokenizer), "stdlib", f"every twentieth file, because {reason}"


def in_words(text, more):
    """The text's name and what else `choose_text` says about it."""
    return f"{text} ({more})" if more else text


def middles(documents, L, limit):
    """{name and hash: the L + 1 tokens in the middle of a document}, of at most `limit`."""
    chosen = {}
    for name, tokens in documents:
        start = (len(tokens) - L - 1) // 2
        if start >= 0 and len(chosen) < limit:
            middle = tokens[start : start + L + 1]
            chosen[f"{name} {short_hash(middle)}"] = middle
    if not chosen:
        longest = max(len(tokens) for _, tokens in documents)
        raise UsageError(f"no document is longer than {L} tokens, the longest has {longest}: use "
                         "a smaller --length, or longer texts with --data")
    return chosen


@torch.no_grad()
def nats(model, tokens):
    """Negative log-likelihoods of the tokens at positions 1 .. L. (L + 1,) -> (L,)"""
    x = torch.from_numpy(tokens.astype(np.int64)).to(model.W_E.device)[None]
    inputs, targets = (part.split(model.tokens_at_once, 1) for part in (x[:, :-1], x[:, 1:]))
    caches, head, found = model.new_caches(), model.head(), []
    for some, answers in zip(inputs, targets):
        found.append(model.nats(model.hidden(some, caches)[0], answers[0], head))
    return torch.cat(found).double().cpu().numpy()


def main():
    p = parser(__doc__)
    p.add_argument("--data", nargs="+", help="UTF-8 files or folders; each file is a document "
                   "[what the run has held out]")
    p.add_argument("--length", type=at_least(1), help="the longest context L, in tokens (paper: "
                   "2^17) [32 times the training length]")
    p.add_argument("--documents", type=at_least(1), default=16,
                   help="measure at most this many documents (paper: 5747) [16]")
    p.add_argument("--share", type=at_least(0, float), default=0.3, help="average over the "
                   "positions within this share of the reported one (paper: 0.1) [0.3]")
    args = p.parse_args()
    run = Measurement(args, "perplexity")
    L = args.length or 32 * run.T_train

    def is_enough(documents):
        return any(len(tokens) > L for _, tokens in documents)

    documents, text, more = choose_text(run, args.data, is_enough)
    documents = middles(documents, L, args.documents)
    print(f"text: {in_words(text, more)}", flush=True)

    what = {"data": text, "window": args.share,
            "positions": " ".join(map(str, positions(L)))}
    cells = [what | setting | {"document": name} for setting in run.settings for name in documents]
    for cell in run.missing(cells):
        means = window_means(nats(run.model, documents[cell["document"]]), args.share)
        run.add(cell, nats=joined(means))

    print_perplexities(perplexity_curves(run.rows()))
    print(run.path)


if __name__ == "__main__":
    cli(main)
