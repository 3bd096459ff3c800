"""How far back can a model find what it has read? It copies a random string, by distance.

The paper asks models of text for a number in the context (section "Retrieval Ability"). A model too
small to understand that question can still do this: it reads 32 random letters and digits, then
other text, then the first four of the characters again, the cue. Does it know how they go on? The
measure is the negative log-likelihood of the other 28, in nats per token; guessing a letter or
digit costs log 62 = 4.13 nats. The paper has no such experiment.

    python -m lab.copying --ckpt out/ckpt.pt --swe

What the 28 characters cost means little by itself. So several ends are measured after the same
text, and the table also has the gain, which is what `another` costs more than `same`:

same         the string that was read
another      another random string, cue and all
reordered    the cue, then the characters of the string in another order: a model that remembers
             which characters it has read, but not their order, finds this end as cheap
near-miss    the string with every fourth character behind the cue changed

With --before N the model reads N tokens of text before the string. With --candidates K it reads K
strings, one after another, and is asked for one of them by its cue. Then the table also has how
often the first character behind the cue, and how often the first four together, cost less if they
are those of the right string than if they are those of any other.

The text in between is that of the standard library's files which train.py holds out, or that of
--data. The distance is counted in tokens, from the end of the strings to where one begins again.
Each string has text of its own and a row of copying.tsv, beside the checkpoint: the nats of all
ends, each at all distances, and at which distances the first and the first four were right. If you
repeat the command, it measures only what is missing. To draw such tables:

    python -m lab.figures copying out/copying.tsv mine=out-mine/copying.tsv
"""
import copy
import random
import string

import numpy as np
import torch

from lab.perplexity import documents_of
from support.cli import UsageError, at_least, cli
from support.measure import Measurement, joined, parser, short_hash
from support.tables import print_table

LENGTH, CUE = 32, 4                                    # characters of a string, and of its cue
CHARACTERS = string.ascii_letters + string.digits
ENDS = ("same", "another", "reordered", "near-miss")


def strings_and_ends(n, candidates=1):
    """(the strings to read, {name: end}) of the n-th measurement.

    The first end, `same`, is one of the strings; those behind ENDS are the other candidates.
    """
    rng = random.Random(n)

    def draw():
        return "".join(rng.choices(CHARACTERS, k=LENGTH))

    asked, another = draw(), draw()
    reordered = asked[:CUE] + "".join(rng.sample(asked[CUE:], LENGTH - CUE))
    near_miss = "".join(rng.choice(CHARACTERS.replace(c, "")) if place > CUE and place % 4 == 0
                        else c for place, c in enumerate(asked, 1))
    ends = dict(zip(ENDS, (asked, another, reordered, near_miss)))

    strings = [draw() for _ in range(candidates - 1)]
    ends |= {f"candidate {m}": asked[:CUE] + one[CUE:] for m, one in enumerate(strings)}
    strings.insert(rng.randrange(candidates), asked)
    return strings, ends


def get_texts(data, tokenizer, n, size, before):
    """n pairs of lists: `before` tokens, and the `size` tokens that follow them in the texts.

    The n places are spread evenly over the texts of `data`, or the held-out files.
    """
    tokens = np.concatenate(list(documents_of(data, tokenizer).values()))
    if len(tokens) < size + before:
        raise UsageError(f"the text has {len(tokens):,} tokens, fewer than {size + before:,}: use "
                         "smaller --distances, or more text with --data")
    starts = np.linspace(0, len(tokens) - size, n).astype(int)
    # Before the first place there is no text: it comes from the end.
    return [(np.take(tokens, range(start - before, start), mode="wrap").tolist(),
             tokens[start : start + size].tolist()) for start in starts]


@torch.no_grad()
def read(model, caches, tokens):
    """The model reads a list of tokens: its caches then hold their keys and values."""
    if tokens:
        for piece in model.pieces(torch.tensor([tokens], device=model.W_E.device)):
            model.hidden(piece, caches)


@torch.no_grad()
def nats_of(model, caches, end, cue):
    """What each token of a list `end` costs behind its first `cue`, in nats. -> (len(end) - cue,)

    The end continues what the caches hold, which stay as they are.
    """
    tokens = torch.tensor(end, device=model.W_E.device)
    x = model.hidden(tokens[None], [copy.copy(cache) for cache in caches])[0, cue - 1 : -1]
    return model.nats(x, tokens[cue:], model.head()).double()


def by_distance(model, tokenizer, strings, ends, texts, distances):
    """{name: [what each token of an end costs, at each of some distances, which ascend]}"""
    encode = tokenizer.encode_ordinary
    line_end, (before, between) = encode("\n"), texts
    caches, at = model.new_caches(), 0                 # `at` tokens of the text have been read
    if before:
        read(model, caches, before + line_end)
    for one in strings:
        read(model, caches, encode(one) + line_end)
    found = {name: [] for name in ends}
    for distance in distances:
        place = distance - 2 * len(line_end)
        read(model, caches, between[at:place])
        at = place
        for name, end in ends.items():
            cue = len(line_end) + CUE
            found[name].append(nats_of(model, caches, line_end + encode(end), cue))
    return found


def right(found, n):
    """At each distance 1 if the first n tokens of `same` cost less than those of any other, else 0.

    found: of `by_distance`, for the ends of candidates
    """
    costs = [[nats[:n].sum().item() for nats in at_distances] for at_distances in found.values()]
    return [int(all(same < other for other in others)) for same, *others in zip(*costs)]


def main():
    p = parser(__doc__)
    p.add_argument("--data", nargs="+", help="UTF-8 files or folders with the text in between [the "
                   "standard library's held-out files]")
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
    distances = sorted(set(args.distances))
    texts = get_texts(args.data, run.tokenizer, args.strings, distances[-1], args.before)

    what = {"data": " ".join(args.data or ["stdlib"]), "before": args.before,
            "candidates": args.candidates, "ends": " ".join(ENDS),
            "distances": " ".join(map(str, distances))}
    names = {f"{n} {short_hash(text[0] + text[1])}": n for n, text in enumerate(texts)}
    cells = [what | setting | {"string": name} for setting in run.settings for name in names]
    for cell in run.missing(cells):
        n = names[cell["string"]]
        found = by_distance(run.model, run.tokenizer, *strings_and_ends(n, args.candidates),
                            texts[n], distances)
        nats = [x.mean().item() for name in ENDS for x in found[name]]
        candidates = {name: x for name, x in found.items() if name == "same" or name not in ENDS}
        run.add(cell, nats=joined(nats), first_right=joined(right(candidates, 1)),
                four_right=joined(right(candidates, 4)))

    lines = []
    for setting, means in run.means("nats"):
        means = dict(zip(ENDS, means.reshape(len(ENDS), -1)))
        means["gain"] = means["another"] - means["same"]
        lines += [[*setting.values(), name, *x.tolist()] for name, x in means.items()]
    if args.candidates > 1:
        for column in ("first_right", "four_right"):
            lines += [[*setting.values(), column.replace("_", " "), *(f"{x:.0%}" for x in shares)]
                      for setting, shares in run.means(column)]
    guess = "; guessing: 4.13" if run.tokenizer.name == "bytes" else ""
    print_table(["SWE", "RoPE", "end", *distances], lines,
                f"Nats per token of a random string by distance, {args.strings} strings{guess}; "
                f"{run.path}")


if __name__ == "__main__":
    cli(main)
