"""How far back can a model find what it has read? It copies a random string, by distance.

The paper asks models of text for a number in the context (section "Retrieval Ability"). A model too
small to understand that question can still do this: it reads 32 random letters and digits, then
other text, then the first four of the characters again, the cue. Does it know how they go on? The
measure is the negative log-likelihood of the other 28, in nats per token; guessing a letter or
digit costs log 62 = 4.13 nats. The paper has no such experiment.

    python -m lab.copying --ckpt out/ckpt.pt --swe

What the 28 characters cost means little by itself. So several ends are measured after the same
text, and the table also has what each costs more than `same`; for `another` that is the gain:

same         the string that was read
another      another random string, cue and all
reordered    the cue, then the characters of the string in another order: a model that remembers
             which characters it has read, but not their order, finds this end as cheap
near-miss    the string with every fourth character behind the cue changed, of which only the others
             count: nobody can know what a changed character is

With --before N the model reads N tokens of text before the string. With --candidates K it reads K
strings, one after another, and is asked for one of them by its cue. Then the table also has how
often the right string is the likeliest, by the first four characters behind the cue (`right`;
chance: 1 in K), and how many of the others it beats (`beaten`; chance: a half). The first share
falls with K by itself, because there are more rivals; the second does not.

The text in between is what train.py has held out of the run's text, or that of --data. For a run
on a task, or if the text is too short or is not here, it is that of the standard library's files
which train.py holds out. The table says which text it is. The distance is counted in tokens, from
the end of the strings to where one begins again. Each string has text of its own and a row of
copying.tsv, beside the checkpoint: the nats of all ends, each at all distances, and at each
distance whether the right string was the likeliest, and which share of the others it beat. If you
repeat the command, it measures only what is missing. To draw such tables:

    python -m lab.figures copying out/copying.tsv mine=out-mine/copying.tsv
"""
import copy
import random
import string

import numpy as np
import torch
from lab.curves import curves_by_string, mean_over_items, print_candidates, print_costs

from support.cli import UsageError, at_least, cli
from lab.perplexity import choose_text, documents_of, in_words
from support.data import require_text
from support.measure import Measurement, joined, parser, short_hash

LENGTH, CUE = 32, 4                                    # characters of a string, and of its cue
CHARACTERS = string.ascii_letters + string.digits
ENDS = ("same", "another", "reordered", "near-miss")


def random_strings(n):
    """Two different random strings for the n-th measurement: one to read, one to compare with."""
    rng = random.Random(n)
    return ["".join(rng.choices(CHARACTERS, k=LENGTH)) for _ in range(2)]


def ends_of(n):
    """{name: end} of the n-th measurement, in the order of ENDS."""
    same, another = random_strings(n)
    rng = random.Random(f"ends {n}")
    reordered = same[:CUE] + "".join(rng.sample(same[CUE:], LENGTH - CUE))
    near_miss = ""
    for place, c in enumerate(same):
        if place >= CUE and (place - CUE) % 4 == 3:
            c = rng.choice(CHARACTERS.replace(c, ""))
        near_miss += c
    return dict(zip(ENDS, (same, another, reordered, near_miss)))


def candidates_of(n, k):
    """(k strings to read, of which one is asked for, in random order; the other k - 1).

    The others go on behind their cues with another character than the one that is asked for.
    """
    rng = random.Random(f"candidates {n}")
    asked_for, others = random_strings(n)[0], []
    while len(others) < k - 1:
        other = "".join(rng.choices(CHARACTERS, k=LENGTH))
        if other[CUE] != asked_for[CUE]:
            others.append(other)
    strings = list(others)
    strings.insert(rng.randrange(k), asked_for)
    return strings, others


def get_texts(data, tokenizer, n, size, before=0):
    """`spread_texts` of the files that `data` names; None: what train.py holds out by default."""
    return spread_texts(documents_of(data, tokenizer), n, size, before)


def spread_texts(documents, n, size, before=0):
    """n lists of `size` tokens, evenly spread over documents, [(name, tokens)].

    before: so many more tokens at the front of each, those that come before it in the texts.
    """
    tokens = np.concatenate([tokens for _, tokens in documents])
    if len(tokens) < size + before:
        raise UsageError(f"the text has {len(tokens):,} tokens, fewer than {size + before:,}: use "
                         "smaller --distances, or more text with --data")
    starts = np.linspace(0, len(tokens) - size, n).astype(int)
    # Before the first place there is no text: it comes from the end.
    return [np.take(tokens, range(start - before, start + size), mode="wrap").tolist()
            for start in starts]


@torch.no_grad()
def costs_of_ends(model, start, text, places, ends, cue):
    """What each token of several ends costs behind start + text[:place], for all places, in nats.

    All are lists of tokens; places are ascending. Returns, for each end and for each place, a
    tensor with the negative log-likelihoods of the tokens of the end behind its first `cue`.
    """
    def tensor(tokens):
        return torch.tensor([tokens], device=model.W_E.device)

    caches, head = model.new_caches(), model.head()
    costs = [[] for _ in ends]
    for before, place in zip([0, *places], places):
        new = text[before:place]
        if place == places[0]:
            new = start + text[:place]
        if new:
            for piece in tensor(new).split(model.tokens_at_once, 1):
                model.hidden(piece, caches)

        # Each end continues from here. What it adds to copies of the caches is forgotten.
        for end, of_end in zip(ends, costs):
            x = model.hidden(tensor(end), [copy.copy(cache) for cache in caches])[0, cue - 1 : -1]
            of_end.append(model.nats(x, tensor(end)[0, cue:], head).double().cpu())
    return costs


def nats_of_ends(model, start, text, places, ends, cue):
    """The means of `costs_of_ends` over the tokens behind the cue. (len(ends), len(places))"""
    costs = costs_of_ends(model, start, text, places, ends, cue)
    return np.array([[x.mean().item() for x in of_end] for of_end in costs])


def means_of(costs, ends):
    """The mean cost of each of ENDS at each place. Of a near miss what was not changed counts."""
    unchanged = [a == b for a, b in zip(ends["same"], ends["near-miss"])]
    means = []
    for name, of_end in zip(ENDS, costs):
        for x in of_end:
            if name == "near-miss":
                x = x[torch.tensor(unchanged[CUE:])]
            means.append(x.mean().item())
    return means


def shares_beaten(same, others):
    """At each place the share of the others whose first four tokens cost more.

    same, others: of `costs_of_ends`, of the string that is asked for and of the other candidates
    """
    return [sum(bool(x[:4].sum() < other[place][:4].sum()) for other in others) / len(others)
            for place, x in enumerate(same)]


def main():
    p = parser(__doc__)
    p.add_argument("--data", nargs="+", help="UTF-8 files or folders with the text in between "
                   "[what the run has held out]")
    p.add_argument("--distances", type=at_least(2), nargs="+",
                   default=[2**n for n in range(7, 16)],
                   help="distances to measure, in tokens [128 256 512 .. 32768]")
    p.add_argument("--strings", type=at_least(1), default=8,
                   help="how many strings to ask for, each with text of its own [8]")
    p.add_argument("--candidates", type=at_least(1), default=1,
                   help="how many strings the model reads, of which it is asked for one [1]")
    p.add_argument("--before", type=at_least(0), default=0,
                   help="tokens of text before the first string [0]")
    args = p.parse_args()
    run = Measurement(args, "copying")
    require_text(run.tokenizer, "copying a string")
    if run.tokenizer.name != "bytes":
        raise UsageError(f"{args.ckpt} was trained with --tokenizer {run.tokenizer.name}: this "
                         "measurement counts characters, so it needs a model of bytes")
    distances = sorted(set(args.distances))
    least = distances[-1] + args.before

    def is_enough(documents):
        return sum(len(tokens) for _, tokens in documents) >= least

    documents, text, more = choose_text(run, args.data, is_enough)
    texts = spread_texts(documents, args.strings, distances[-1], args.before)
    print(f"text: {in_words(text, more)}", flush=True)

    what = {"data": text, "before": args.before,
            "candidates": args.candidates, "ends": " ".join(ENDS),
            "distances": " ".join(map(str, distances))}
    names = {f"{n} {short_hash(tokens)}": n for n, tokens in enumerate(texts)}
    cells = [what | setting | {"string": name} for setting in run.settings for name in names]
    encode = run.tokenizer.encode_ordinary
    line_end = encode("\n")
    for cell in run.missing(cells):
        n = names[cell["string"]]
        ends = ends_of(n)
        strings, others = candidates_of(n, args.candidates)
        start = [token for one in strings for token in encode(one) + line_end]
        if args.before:
            start = texts[n][: args.before] + line_end + start
        ways = [*ends.values(), *(ends["same"][:CUE] + other[CUE:] for other in others)]
        costs = costs_of_ends(run.model, start, texts[n][args.before :],
                              [distance - 2 * len(line_end) for distance in distances],
                              [line_end + encode(way) for way in ways], len(line_end) + CUE)
        nats = means_of(costs, ends)
        same, others = costs[0], costs[len(ENDS) :]
        right = beaten = ""                            # of one candidate there is no choice
        if args.candidates > 1:
            shares = shares_beaten(same, others)
            right, beaten = joined([int(share == 1) for share in shares]), joined(shares)
        run.add(cell, nats=joined(nats), right=right, beaten=beaten)

    print_costs(mean_over_items(curves_by_string(run.rows()), "string"))
    if args.candidates > 1:
        print_candidates(run.rows())
    print(f"guessing: 4.13; {run.path}")


if __name__ == "__main__":
    cli(main)
