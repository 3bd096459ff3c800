"""How far back can a model find what it has read? It copies a random string, by distance.

    python -m study.copying --ckpt out/ckpt.pt --swe

The paper asks models of text for a number in the context (section "Retrieval Ability"). A model too
small to understand that question can still do this: it reads 32 random letters and digits, then
other text, then the first four of the characters again, the cue. Does it know how they go on?

Two random strings are a pair. In the same text the model reads the one, then, anew, the other.
After each reading both strings follow as ends, so a model that remembers nothing has a gain of
exactly 0, whatever one string costs more than the other. Means over both readings, per character:

cost       nats of the string that was read, behind its cue; guessing a letter or digit costs 4.13
gain       nats that the other string of the pair costs more
right      the share of the string's 28 characters that are the likeliest next token
reordered  nats that the cue and the other 28 characters in another order cost more
near_miss  nats that the string with every fourth character changed costs more, of which only the
           unchanged ones count: nobody can know what a changed one is

With --before N the model reads N tokens of text before the string. With --candidates K it reads K
strings, one after another, and is asked for one by its cue. Then `likeliest` is the share of
readings after which the right string is the likeliest by the first four characters behind the cue.

--log-scale C multiplies the queries of layers that see all keys by max(1, 1 + C log(n/256)), where
n is the number of keys that the query sees: softmax over more keys than in training gets sharper.

The text in between is that of --data, or what train.py held out of the run's text. The distance is
counted in tokens, from the end of the strings to where one begins again. A row of the table, beside
the checkpoint, is a pair at one distance. The paper has no such experiment.
"""
import copy
import math
import random
import string
import sys
from itertools import pairwise

import numpy as np
import pandas as pd
import torch

from lab.measure import Measurement, add_settings, add_table, get_parser
from lab.perplexity import documents_of

LENGTH, CUE = 32, 4                                    # characters of a string, and of its cue
FIRST = 1000                     # number of the first pair; the runs before 2026-11-29 had 0 to 31
CHARACTERS = string.ascii_letters + string.digits


# ------------------------------------------------------------------------------ what is asked

def pair_of(n):
    """The n-th pair of random strings."""
    rng = random.Random(n)
    return ["".join(rng.choices(CHARACTERS, k=LENGTH)) for _ in range(2)]


def ends_of(same, another):
    """[same, another, reordered, near miss], ends that begin with a cue."""
    rng = random.Random(f"ends {same}")
    reordered = same[:CUE] + "".join(rng.sample(same[CUE:], LENGTH - CUE))
    near_miss = list(same)
    for place in range(CUE + 3, LENGTH, 4):
        near_miss[place] = rng.choice(CHARACTERS.replace(same[place], ""))
    return [same, another, reordered, "".join(near_miss)]


def candidates_of(asked_for, k):
    """(k strings to read, of which one is asked for, in random order; the other k - 1).

    The others go on behind their cues with another character than the one that is asked for.
    """
    rng, others = random.Random(f"candidates {asked_for}"), []
    while len(others) < k - 1:
        other = "".join(rng.choices(CHARACTERS, k=LENGTH))
        if other[CUE] != asked_for[CUE]:
            others.append(other)
    strings = list(others)
    strings.insert(rng.randrange(k), asked_for)
    return strings, others


def spread_texts(tokens, n, size, before=0):
    """n lists of `size` tokens, evenly spread over a text, with `before` more at the front."""
    if len(tokens) < size + before:
        sys.exit(f"error: the text has {len(tokens):,} tokens, fewer than {size + before:,}: use "
                 "smaller --distances, or more text with --data")
    starts = np.linspace(0, len(tokens) - size, n).astype(int)
    # Before the first place there is no text: it comes from the end.
    return [np.take(tokens, range(start - before, start + size), mode="wrap").tolist()
            for start in starts]


def text_of(data, ckpt, tokenizer):
    """The tokens of --data, else what train.py held out of the run's text."""
    return np.concatenate(documents_of(tokenizer, ckpt["args"], data))


# ---------------------------------------------------------------------------- what it costs

@torch.no_grad()
def read(model, text, places, ends):
    """What ends cost behind text[:place], for each place in rising order. Lists of tokens.

    Returns [(nats, hits) of each end] for each place, tensors with a number for each character
    behind a newline and the cue; hits: whether it is the likeliest token.
    """
    def tensor(tokens):
        return torch.tensor([tokens], device=model.W_E.device)

    caches, head, found = model.new_caches(), model.head(), []
    for done, place in pairwise([0, *places]):
        for piece in tensor(text[done:place]).split(model.tokens_at_once, 1):
            model.hidden(piece, caches)
        found.append([])
        for end in ends:
            # What an end adds to copies of the caches is forgotten.
            x = model.hidden(tensor(end), [copy.copy(cache) for cache in caches])[0, CUE:-1]
            targets = tensor(end)[0, 1 + CUE :]
            nats = model.nats(x, targets, head).double().cpu()
            found[-1].append((nats, (model.logits(x, head).argmax(-1) == targets).cpu()))
    return found


def measure(model, encode, text, pair, distances, before=0, candidates=1):
    """A row for each distance: means over both readings of a pair of strings, in one text."""
    newline, rows = encode("\n"), []
    for same, another in (pair, pair[::-1]):
        strings, others = candidates_of(same, candidates)
        start = [token for one in strings for token in encode(one) + newline]
        if before:
            start = text[:before] + newline + start
        places = [len(start) + distance - 2 * len(newline) for distance in distances]
        ends = [*ends_of(same, another), *(same[:CUE] + other[CUE:] for other in others)]
        found = read(model, start + text[before:], places, [newline + encode(end) for end in ends])
        rows += [{"distance": distance} | numbers(at) for distance, at in zip(distances, found)]
    return pd.DataFrame(rows).groupby("distance", as_index=False).mean().to_dict("records")


def numbers(ends):
    """The numbers of one reading at one place. ends: of `read`, first the four of ends_of."""
    (same, hits), (another, _), (reordered, _), (near_miss, _) = ends[:4]
    unchanged = torch.arange(LENGTH - CUE) % 4 != 3    # in a near miss
    row = {"cost": same.mean(), "gain": another.mean() - same.mean(),
           "right": hits.double().mean(), "reordered": reordered.mean() - same.mean(),
           "near_miss": (near_miss - same)[unchanged].mean()}
    if len(ends) > 4:
        row["likeliest"] = all(same[:4].sum() < other[:4].sum() for other, _ in ends[4:])
    return {name: float(x) for name, x in row.items()}


def scale_queries(model, c):
    """Multiply the queries of layers without windows by max(1, 1 + c log(n/256)), in place."""
    for layer in model.layers:
        if getattr(layer, "nearby", 0) < math.inf:
            continue

        def encode(q, k, i, layer=layer):
            q, k = type(layer).encode(layer, q, k, i)
            factor = 1 + c * torch.log((i + 1) / 256)
            return q * factor.clamp(min=1).to(q.dtype)[:, None], k

        layer.encode = encode


def main():
    p = get_parser(__doc__)
    add_settings(p)
    add_table(p)
    p.add_argument("--data", nargs="+", help="the text in between [what the run has held out]")
    p.add_argument("--distances", type=int, nargs="+", default=[2**n for n in range(7, 16)],
                   help="distances to measure, in tokens [128 256 512 .. 32768]")
    p.add_argument("--pairs", type=int, default=10,
                   help="pairs of strings, each with a text of its own [10]")
    p.add_argument("--first", type=int, default=FIRST, help=f"number of the first pair [{FIRST}]")
    p.add_argument("--candidates", type=int, default=1,
                   help="how many strings the model reads, of which it is asked for one [1]")
    p.add_argument("--before", type=int, default=0, help="tokens of text before the first string")
    p.add_argument("--log-scale", type=float, nargs="+", default=[0.0], metavar="C",
                   help="sharpen queries over many keys by these C, one after the other [0]")
    args = p.parse_args()
    run = Measurement(args, "copying")
    if run.tokenizer.name != "bytes":
        sys.exit("error: this counts characters, so it needs a model of bytes")
    distances = sorted(args.distances)
    tokens = text_of(args.data, run.ckpt, run.tokenizer)
    texts = spread_texts(tokens, args.pairs, distances[-1], args.before)
    for _ in run.settings():
        for c in args.log_scale:
            scale_queries(run.model, c)
            for n, text in enumerate(texts, args.first):
                rows = measure(run.model, run.tokenizer.encode_ordinary, text, pair_of(n),
                               distances, args.before, args.candidates)
                for row in rows:
                    run.add(log_scale=c, before=args.before, candidates=args.candidates, pair=n,
                            **row)
    means = pd.DataFrame(run.rows).groupby(["setting", "log_scale", "distance"], sort=False)
    print(means[["cost", "gain", "right", "reordered", "near_miss"]].mean().round(3), "\n")
    run.write()


if __name__ == "__main__":
    main()
