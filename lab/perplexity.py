"""How well does a model know texts far longer than those it was trained on?

    python -m lab.perplexity --ckpt out/ckpt.pt                 to 32 times the training length
    python -m lab.perplexity --ckpt out/ckpt.pt --data pg19/ --documents 5747 --length 131072 \\
        --share 0.1 --rope-scale 1 2 4 8 16 32 64               as in the paper

From the section "Long-Context Perplexity": of each document longer than L tokens the L + 1 tokens
in the middle are read, and the token at position p is predicted from the p tokens before it. A
perplexity is averaged over the positions around the one that it is printed for, and over documents.
The paper's documents are the 5,747 books of PG-19 with more than 2^17 tokens.

Without --data the text is what train.py holds out of the run's own.
"""
import math
import sys
from types import SimpleNamespace

import numpy as np
import torch

from lab.measure import Measurement, add_settings, add_table, get_parser
from train import files_of, get_data, read_file


def positions(L):
    """The printed positions: 32, 45, 64, 91, .., rounded powers of sqrt(2), and L itself."""
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


def documents_of(tokenizer, flags, data):
    """The documents, arrays of tokens, of files or folders, or of what a run has held out."""
    if data:
        arrays = [read_file(path, tokenizer) for path in files_of(data)]
    else:
        held_out = get_data(SimpleNamespace(**flags), tokenizer)[1]
        if not hasattr(held_out, "tokens"):
            sys.exit(f"error: the run was trained on {flags['data'][0]}, which has no long texts: "
                     "name some with --data")
        arrays = [held_out.tokens]
    documents = []
    for tokens in arrays:
        ends = np.flatnonzero(tokens == tokenizer.eot_token) + 1
        documents += np.split(tokens, ends)
    return [tokens for tokens in documents if len(tokens) > 0]


def middles(documents, L, limit):
    """The L + 1 tokens in the middle of each document that is long enough, of at most `limit`."""
    enough = [tokens for tokens in documents if len(tokens) > L]
    if not enough:
        longest = max((len(tokens) for tokens in documents), default=0)
        sys.exit(f"error: no document is longer than --length, {L} tokens; the longest has "
                 f"{longest}: use a smaller --length, or longer texts with --data")
    starts = [(len(tokens) - L - 1) // 2 for tokens in enough]
    return [tokens[start : start + L + 1] for tokens, start in zip(enough, starts)][:limit]


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
    p = get_parser(__doc__)
    add_settings(p)
    add_table(p)
    p.add_argument("--data", nargs="+", help="UTF-8 files, a document each, folders of them, or "
                   ".bin files\n[what the run has held out]")
    p.add_argument("--length", type=int, help="the longest context L, in tokens (paper: 2^17)\n"
                   "[32 times the training length]")
    p.add_argument("--documents", type=int, default=16,
                   help="measure at most so many documents (paper: 5747) [16]")
    p.add_argument("--share", type=float, default=0.3, help="average over the positions within "
                   "this share of the printed one\n(paper: 0.1) [0.3]")
    args = p.parse_args()
    run = Measurement(args, "perplexity")
    L = args.length or 32 * run.flags["seq_len"]
    documents = middles(documents_of(run.tokenizer, run.flags, args.data), L, args.documents)
    held_out = ["held out of", *(run.flags["val"] or run.flags["data"])]
    text = " ".join(args.data or held_out)
    print(f"perplexity (e to the nats per token), mean of {len(documents)} documents; text: {text}")
    print(f"{'position':>20}" + "".join(f"{p:>8}" for p in positions(L)))
    for setting in run.settings():
        means = np.array([window_means(nats(run.model, tokens), args.share)
                          for tokens in documents])
        print(f"{setting:>20}" + "".join(f"{x:8.4g}" for x in np.exp(means.mean(0))), flush=True)
        for number, of_one in enumerate(means):
            for position, x in zip(positions(L), of_one):
                run.add(text=text, share=args.share, document=number, position=position,
                        nats=f"{x:.6g}")
    run.write()


if __name__ == "__main__":
    main()
