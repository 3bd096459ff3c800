"""Is screening the reason? Copying by softmax and by screening, in one layout, planned beforehand.

    python -m lab.experiments reason --lanes 1           train and measure, or go on
    python -m lab.reason --ckpt out/lab/reason/softmax-45/ckpt.pt --data out/lab/copying/text/val
    python -m lab.reason --test lab/report/reason.tsv    the planned statistic: once, at the end

The protocol is that of lab/copying.py with one change. Two random strings make a pair, and in the
same text the model reads the one, then the other. After each reading both strings follow. So a
model that remembers nothing has a gain of exactly 0, whatever one string costs more than the other.

cost   nats per character of the string that was read, behind its cue of four characters
gain   nats per character that the other string of the pair costs more
right  the share of the string's 28 characters that are the likeliest next token

All three are means over the two readings. A row is one pair at one distance. --log-scale C
multiplies the queries of the layers without windows by max(1, 1 + C log(n/256)), where n is the
number of keys that the query sees: softmax over more keys than in training becomes sharper.
"""
import copy
import csv
import math
import os
import sys
from pathlib import Path
from statistics import mean, stdev

import torch

from support.cli import UsageError, at_least, cli
from lab.copying import CUE, get_texts, random_strings
from lab.paired import p_of_t, t_of_p
from support.measure import parser
from support.run import load_checkpoint

FIRST = 1000                     # number of the first pair; lab.copying's reported runs had 0 to 31
DISTANCES = [2**n for n in range(7, 16)]
COLUMNS = ("model", "seed", "log_scale", "pair", "distance", "gain", "cost", "right")


def scale_queries(model, c):
    """Multiply the queries of layers without windows by max(1, 1 + c log(n/256)), in place."""
    for layer in model.layers:
        if layer.nearby < math.inf:
            continue

        def encode(q, k, i, encode=layer.encode):
            q, k = encode(q, k, i)
            factor = 1 + c * torch.log((i + 1) / 256)
            return q * factor.clamp(min=1).to(q.dtype)[:, None], k

        layer.encode = encode


@torch.no_grad()
def read(model, start, text, places, ends):
    """What each of two ends costs behind start + text[:place], for all places.

    Returns {place: [(nats, right) of each end]}, means over the tokens behind newline and cue;
    right: whether the token is the likeliest.
    """
    device = model.W_E.device
    caches, head, found = model.new_caches(), model.head(), {}
    new, before = start, 0
    for place in places:
        new, before = new + text[before:place], place
        for piece in torch.tensor([new], device=device).split(model.tokens_at_once, 1):
            model.hidden(piece, caches)
        new = []
        found[place] = []
        for end in ends:
            tokens = torch.tensor([end], device=device)
            # What an end adds to these copies of the caches is forgotten.
            x = model.hidden(tokens, [copy.copy(cache) for cache in caches])
            z = model.logits(x[0, CUE:-1], head).double()
            targets = tokens[0, 1 + CUE :]
            nats = torch.nn.functional.cross_entropy(z, targets).item()
            found[place].append((nats, (z.argmax(-1) == targets).double().mean().item()))
    return found


def measure(model, encode, text, pair, distances):
    """Rows {distance, gain, cost, right} of a pair of strings in one text."""
    newline = encode("\n")
    places = [distance - 2 * len(newline) for distance in distances]
    readings = []
    for string, other in (pair, pair[::-1]):
        start = encode(string) + newline
        ends = [newline + encode(string), newline + encode(other)]
        readings.append(read(model, start, text, places, ends))
    rows = []
    for distance, place in zip(distances, places):
        same = [reading[place][0] for reading in readings]
        other = [reading[place][1] for reading in readings]
        cost = mean(nats for nats, _ in same)
        rows.append({"distance": distance, "gain": mean(nats for nats, _ in other) - cost,
                     "cost": cost, "right": mean(right for _, right in same)})
    return rows


def test(path):
    """Print the planned statistic of a whole table: screening less softmax, paired by seed."""
    values = {}
    with open(path) as file:
        for row in csv.DictReader(file, delimiter="\t"):
            if int(row["distance"]) <= 8192 and float(row["log_scale"]) == 0:
                key = row["model"], int(row["seed"])
                values.setdefault(key, []).append((float(row["gain"]), float(row["cost"])))
    seeds = sorted({seed for _, seed in values})
    for n, name in enumerate(("gain", "cost")):
        sign = 1 - 2 * n                               # a lower cost is the better one
        differences = [sign * (mean(x[n] for x in values["screening", seed])
                               - mean(x[n] for x in values["softmax", seed])) for seed in seeds]
        m, error = mean(differences), stdev(differences) / math.sqrt(len(seeds))
        p, half = p_of_t(m / error, len(seeds) - 1), error * t_of_p(0.05, len(seeds) - 1)
        print(f"{name}: screening is better by {m:.3f} nats (n = {len(seeds)} seeds: "
              f"{' '.join(f'{x:.2f}' for x in differences)}; 95 % interval {m - half:.2f} to "
              f"{m + half:.2f}; p = {p:.4f})")


def main():
    p = parser(__doc__)
    p.add_argument("--data", nargs="+", help="the files between the strings")
    p.add_argument("--distances", type=at_least(2), nargs="+", default=DISTANCES)
    p.add_argument("--pairs", type=at_least(1), default=10, help="pairs of strings [10]")
    p.add_argument("--first", type=at_least(0), default=FIRST, help=f"the first pair [{FIRST}]")
    p.add_argument("--log-scale", type=float, nargs="+", default=[0.0], metavar="C")
    p.add_argument("--test", type=Path, help="print the planned statistic of this table")
    args = p.parse_args()
    if args.test:
        return test(args.test)
    model, tokenizer, ckpt = load_checkpoint(args.ckpt, args.device)
    if tokenizer.name != "bytes":
        raise UsageError(f"{args.ckpt} was trained with --tokenizer {tokenizer.name}, not bytes")
    own = model
    texts = get_texts(args.data, tokenizer, args.pairs, max(args.distances))
    table = args.table or Path(args.ckpt).with_name("reason.tsv")
    name = "screening" if hasattr(model.layers[0], "s_w") else "softmax"
    lines = ["\t".join(COLUMNS)]
    for c in args.log_scale:
        model = copy.deepcopy(own)
        if c:
            scale_queries(model, c)
        for n, text in enumerate(texts, args.first):
            pair = random_strings(n)
            for row in measure(model, tokenizer.encode_ordinary, text, pair,
                               sorted(args.distances)):
                row |= {"model": name, "seed": ckpt["args"]["seed"], "log_scale": c, "pair": n}
                lines.append("\t".join(f"{row[column]:.6g}" if isinstance(row[column], float)
                                       else str(row[column]) for column in COLUMNS))
            print(f"log scale {c:g}, pair {n}: gain at {row['distance']} is {row['gain']:.2f}",
                  file=sys.stderr)
    temporary = table.with_name(table.name + ".part")
    temporary.write_text("\n".join(lines) + "\n")
    os.replace(temporary, table)
    print(table)


if __name__ == "__main__":
    cli(main)
