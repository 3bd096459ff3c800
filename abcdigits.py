"""ABCDigits, the paper's retrieval benchmark: prompts, exact match, accuracy by depth and length.

    python abcdigits.py --ckpt out/ckpt.pt

A prompt is a shuffled list of lines LETTER=NUMBER. Each letter has one number. Most letters appear
many times; one, the needle, appears once. The prompt ends with the needle's letter and "=", and the
model must complete the number. The prompts are bit for bit those of the paper's author, Ken M.
Nakanishi (https://github.com/ken-nakanishi/abcdigits); the code is ours.

Each cell is a row of abcdigits.tsv beside the checkpoint. Given again, the command measures what is
missing. `python -m experiments.retrieval` draws such tables.
"""

import random
import re

import torch

from support.cli import UsageError, cli
from support.retrieval import get_parser, measure_grid

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


# --------------------------------------------------------------------------------- prompts

def make_prompts(depth, n_digits, n_trials, fill):
    """n_trials prompts, each ending with its answer. fill(rng, weights, lines, needle): more lines.

    One random.Random(123) serves all trials. A trial draws 26 different numbers and deals
    the letters the weights 0, 2^0, .., 2^24; 0 marks the needle. The context is every other letter
    once and those that `fill` adds, shuffled. The needle's line goes in after the fraction `depth`
    of the lines, and once more at the end, where its last n_digits characters are the answer.
    """
    if not 0 <= depth <= 1:
        raise UsageError(f"depth {depth:g}: it must be in [0, 1]")
    if not 2 <= n_digits <= 18 or n_trials < 1:
        raise UsageError(f"{n_digits} digits, {n_trials} trials: 2 to 18 digits, at least 1 trial")
    rng = random.Random(123)
    prompts = []
    numbers = range(10 ** (n_digits - 1), 10**n_digits)
    for _ in range(n_trials):
        lines = [f"{letter}={n}\n" for letter, n in zip(LETTERS, rng.sample(numbers, 26))]
        weights = [0] + [2**i for i in range(25)]
        rng.shuffle(weights)
        needle = weights.index(0)
        context = [i for i in range(26) if i != needle] + fill(rng, weights, lines, needle)
        rng.shuffle(context)
        context.insert(int(len(context) * depth), needle)
        prompts.append("".join(lines[i] for i in context + [needle]).rstrip("\n"))
    return prompts


def generate_by_line_count(n_lines, depth, n_digits=6, n_trials=1000):
    """n_trials prompts of n_lines lines, counting the one to complete, each with its answer."""
    if n_lines < 27:
        raise UsageError(f"{n_lines} lines: a prompt has at least 27, the letters and a question")

    def fill(rng, weights, lines, needle):
        return rng.choices(range(26), weights, k=n_lines - 27)

    return make_prompts(depth, n_digits, n_trials, fill)


def generate_by_token_count(n_tokens, depth, count_tokens, n_digits=6, n_trials=1000):
    """The same by tokens: lines are added while the sum of count_tokens(line) is below n_tokens."""
    def fill(rng, weights, lines, needle):
        counts = [count_tokens(line) for line in lines]
        total = sum(counts) + counts[needle]
        more = []
        if total > n_tokens:
            raise UsageError(f"{n_tokens} tokens: the shortest prompt has {total}")
        while total < n_tokens:
            more += rng.choices(range(26), weights)
            total += counts[more[-1]]
        return more

    return make_prompts(depth, n_digits, n_trials, fill)


# ------------------------------------------------------------------------------- evaluation

def exact_matches(model, tokenizer, prompts, answers, tokens_at_once=2**15):
    """Which answers are right, a list of bools: the same number and no digit after it.

    Greedy decoding with a cache. Prompts of equal length go through the model together.
    """
    device = next(model.parameters()).device
    right = [False] * len(prompts)
    rows = [tokenizer.encode_ordinary(p) for p in prompts]
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


def main():
    p = get_parser(__doc__)
    p.add_argument("--digits", type=int,
                   help="digits of a number (paper: 6) [the --digits of the training run]")
    args = p.parse_args()

    def get_task(count_tokens, ckpt):
        digits = ckpt["args"]["digits"] if args.digits is None else args.digits
        if ckpt["args"]["data"] != ["abcdigits"]:
            print(f"trained on {' '.join(ckpt['args']['data'])}, not on abcdigits: expect 0 %")

        def get_prompts(length, depth, trials):
            texts = generate_by_token_count(length, depth, count_tokens, digits, trials)
            return [t[:-digits] for t in texts], [t[-digits:] for t in texts]

        return {"digits": digits}, get_prompts

    measure_grid(args, "abcdigits", get_task, exact_matches)


if __name__ == "__main__":
    cli(main)
