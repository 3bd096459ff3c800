"""ABCDigits, the paper's retrieval benchmark: documents to learn from, prompts and exact match.

    python train.py --data abcdigits --layers 4 --lr 0.015625 --w-th 16 --steps 3000
    python abcdigits.py --ckpt out/ckpt.pt

This measures whether a model can look up a number that it read once, anywhere in a long context. A
prompt is a shuffled list of lines LETTER=NUMBER, in which each letter always has the same number.
A few letters fill most of the lines; the needle is a letter that has only one line. The prompt
ends with the needle's letter and "=", and the model has to complete the number. The prompts are bit
for bit those of the paper's author, Ken M. Nakanishi (https://github.com/ken-nakanishi/abcdigits);
the code is ours.

Accuracy is measured for each combination of a context length and a depth of the needle, and the
printed table says how many prompts each number stands for. With --digits 6, --trials 1000 and
lengths from 2^12 to 2^17 tokens the table is the paper's; the default suits a laptop.
"""
import argparse
import random
import re
import statistics
import sys
import time
from functools import partial

import numpy as np
import torch

from train import load_checkpoint

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


# ------------------------------------------------------------------------------ to learn from

class Documents:
    """An endless supply of documents, T + 1 tokens of lines LETTER=NUMBER, that teach lookup.

    Each document draws a number for each letter, and letters for its lines, with weights b^0 ..
    b^25 in a new order. At first b is 2, so a few letters fill a document. Half of the documents
    are easier: there a letter also has a number of its own, the same in all easier documents, which
    replaces the drawn one with a probability of 0.9 (in half of these documents digit by digit). To
    predict these, a model must carry the letter to each digit of its number, as lookup needs, too.
    After LEARNED documents the easier ones fade out, and b falls to 1.1, so that a document asks
    for letters seen just once.

    Document n depends on n and the seed alone, so a resumed run sees the same ones.
    """
    digits = 2
    LEARNED, FADING, FALLING = 10_000, 1_500, 8_000    # documents
    state = None

    def __init__(self, args, tokenizer, part):
        self.tokenizer, self.T, self.seed = tokenizer, args.seq_len, args.seed
        self.part = 0 if part == "train" else 1
        self.low, self.high = 10 ** (self.digits - 1), 10**self.digits         # high excluded
        own = np.random.default_rng([self.seed, 2]).integers(self.low, self.high, 26)
        self.own = self.digits_of(own)

    def __len__(self):
        return 2**30

    def learned(self, n):
        """n less the number of documents after which, by our estimate, lookup is learned."""
        return n - self.LEARNED

    def digits_of(self, numbers):
        return np.array([list(str(n)) for n in numbers])

    def help_at(self, n):
        """(the share of easier documents, b) at document n. Validation has the final values."""
        if self.part == 1:
            return 0.0, 1.1
        since = max(self.learned(n), 0)
        return 0.5 * max(1 - since / self.FADING, 0.0), max(2 - 0.9 * since / self.FALLING, 1.1)

    def __getitem__(self, n):
        helped, base = self.help_at(n)
        rng = np.random.default_rng([self.seed, self.part, n])
        numbers = self.digits_of(self.low + rng.choice(self.high - self.low, 26, replace=False))
        share = 0.9 if rng.random() < helped else 0.0
        draws = 1 if rng.random() >= 0.5 else self.digits              # per number
        numbers = np.where(rng.random((26, draws)) < share, self.own, numbers)
        p = rng.permutation(base ** np.arange(26))
        tokens = []
        while len(tokens) <= self.T:
            letters = rng.choice(26, self.T // (self.digits + 3) + 1, p=p / p.sum())
            lines = (f"{LETTERS[c]}={''.join(numbers[c])}\n" for c in letters)
            tokens += self.tokenizer.encode_ordinary("".join(lines))
        return np.array(tokens[: self.T + 1])

    draw = __getitem__

    def observe(self, loss):
        return False


# ------------------------------------------------------------------------------------ prompts

def generate_by_token_count(n_tokens, depth, count_tokens, n_digits=6, n_trials=1000):
    """n_trials prompts of about n_tokens, each with its answer at the end.

    One random.Random(123) serves all trials. A trial draws 26 different numbers and gives the
    letters the weights 0, 2^0, .., 2^24 in random order; the letter with 0 is the needle. The
    context has one line for each of the 25 others and further lines, of letters drawn by weight,
    until there are n_tokens by count_tokens(line); all are shuffled. Then the needle's line goes
    in after a fraction `depth` of the context, and again at the end, where its last n_digits
    characters are the answer.
    """
    if not 0 <= depth <= 1:
        raise ValueError(f"depth is {depth:g}; expected 0 to 1")
    if not 2 <= n_digits <= 18 or n_trials < 1:
        raise ValueError(f"{n_digits} digits, {n_trials} trials; expected 2 to 18, at least 1")
    rng = random.Random(123)
    prompts = []
    numbers = range(10 ** (n_digits - 1), 10**n_digits)
    for _ in range(n_trials):
        lines = [f"{letter}={n}\n" for letter, n in zip(LETTERS, rng.sample(numbers, 26))]
        counts = [count_tokens(line) for line in lines]
        weights = [0] + [2**i for i in range(25)]
        rng.shuffle(weights)
        needle = weights.index(0)
        context = [i for i in range(26) if i != needle]
        total = sum(counts) + counts[needle]
        if total > n_tokens:
            raise ValueError(f"{n_tokens} is too short: the shortest prompt has {total}")
        while total < n_tokens:
            context += rng.choices(range(26), weights)
            total += counts[context[-1]]
        rng.shuffle(context)
        context.insert(int(len(context) * depth), needle)
        prompts.append("".join(lines[i] for i in context + [needle]).rstrip("\n"))
    return prompts


def generate_by_line_count(n_lines, depth, n_digits=6, n_trials=1000):
    """n_trials prompts of n_lines lines, counting the one to complete, each with its answer."""
    return generate_by_token_count(n_lines, depth, lambda line: 1, n_digits, n_trials)


# ------------------------------------------------------------------------------- evaluation

def exact_matches(model, tokenizer, prompts, answers, tokens_at_once=2**15):
    """Which answers are right, as a list of bools: the right number, and no digit after it.

    Decoding is greedy, with a cache. Prompts of equal length go through the model together.
    """
    device = next(model.parameters()).device
    right = [False] * len(prompts)
    rows = [tokenizer.encode_ordinary(p) for p in prompts]
    # Batches of prompts of equal length, shortest first.
    order = sorted(range(len(rows)), key=lambda n: len(rows[n]))
    while order:
        T = len(rows[order[0]])
        batch = [n for n in order[: max(tokens_at_once // T, 1)] if len(rows[n]) == T]
        order = order[len(batch) :]
        tokens = torch.tensor([rows[n] for n in batch], device=device)
        longest = max(len(answers[n]) for n in batch)
        out = model.generate(tokens, longest + 1).tolist()         # one more, to see where it ends
        for n, new in zip(batch, out):
            right[n] = bool(re.match(re.escape(answers[n]) + "(?![0-9])", tokenizer.decode(new)))
    return right


def prompts_of(tokenizer, length, depth, trials, digits):
    """(prompts, answers), of about `length` tokens with the answer."""
    def count_tokens(text):
        return len(tokenizer.encode_ordinary(text))

    texts = generate_by_token_count(length, depth, count_tokens, digits, trials)
    return [text[:-digits] for text in texts], [text[-digits:] for text in texts]


def get_parser(doc=__doc__):
    p = argparse.ArgumentParser(description=doc,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--ckpt", default="out/ckpt.pt", help="a checkpoint of train.py [out/ckpt.pt]")
    p.add_argument("--lengths", type=int, nargs="+", default=[256, 512, 1024, 2048, 4096, 8192],
                   help="context lengths in tokens [256 512 .. 8192] (paper: 2^12 .. 2^17)")
    p.add_argument("--depths", type=float, nargs="+", default=[0.1, 0.3, 0.5, 0.7, 0.9],
                   help="where the needle is: at 0 it comes first, at 1 last [.1 .3 .5 .7 .9]")
    p.add_argument("--trials", type=int, default=10,
                   help="prompts for each length and depth [10] (paper: 1000)")
    p.add_argument("--swe", action="store_true", help="screening-window expansion: windows longer "
                   "than the training length become infinite")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return p


def measure(args, prompts_of):
    """Print the table of exact matches of a checkpoint. Returns {(length, depth): share}.

    prompts_of(tokenizer, length, depth, trials) -> (prompts, answers)
    """
    model, tokenizer, ckpt = load_checkpoint(args.ckpt, args.device)
    if args.swe:
        if not hasattr(model.layers[0], "s_w"):
            sys.exit(f"error: --swe: the model of {args.ckpt} has no windows to expand")
        model.expand_windows(ckpt["args"]["seq_len"])
    print(f"Exact matches, of {args.trials} prompts in each cell, by length in tokens and depth\n"
          f"{'':>8}" + "".join(f"{depth:>8}" for depth in args.depths) + "    mean  seconds")
    found, began = {}, time.perf_counter()
    for length in args.lengths:
        since = time.perf_counter()
        print(f"{length:>8}", end="", flush=True)
        for depth in args.depths:
            try:
                prompts, answers = prompts_of(tokenizer, length, depth, args.trials)
                share = statistics.mean(exact_matches(model, tokenizer, prompts, answers))
            except (ValueError, FloatingPointError) as e:              # the latter: logits are NaN
                sys.exit(f"\nerror: {e}")
            found[length, depth] = share
            print(f"{share:8.1%}", end="", flush=True)
        mean = statistics.mean(found[length, depth] for depth in args.depths)
        print(f"{mean:8.1%}{time.perf_counter() - since:9.1f}")
    print(f"{len(found) * args.trials:,} prompts took {time.perf_counter() - began:.0f} seconds")
    return found


def main():
    p = get_parser()
    p.add_argument("--digits", type=int, default=2, help="digits in each number [2] (paper: 6)")
    args = p.parse_args()
    measure(args, partial(prompts_of, digits=args.digits))


if __name__ == "__main__":
    main()
