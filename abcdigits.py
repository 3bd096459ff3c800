"""ABCDigits, the paper's retrieval benchmark: prompts and exact match.

    python train.py --data abcdigits --digits 2 --layers 4 --lr 0.015625 --w-th 16 --steps 4800
    python abcdigits.py --ckpt out/ckpt.pt

This measures whether a model can look up a number that it read once, anywhere in a long context. A
prompt is a shuffled list of lines LETTER=NUMBER, in which each letter always has the same number.
Most letters appear many times, but one of them, the needle, appears only once. The prompt ends with
the needle's letter and "=", and the model has to complete the number. The prompts are bit for bit
those of the paper's author, Ken M. Nakanishi (https://github.com/ken-nakanishi/abcdigits); the code
is ours.

Accuracy is measured for each combination of a context length and a depth of the needle. Each of
them becomes a row of abcdigits.tsv, beside the checkpoint, so if you repeat the command, it
measures only what is missing. `python -m lab.figures retrieval TSV` draws such tables.

The documents that `--data abcdigits` trains on, and their curriculum, are in support/tasks.py.
"""
import random
import re
import statistics

import torch

from support.cli import UsageError, at_least, cli
from support.data import require_text
from support.measure import Measurement, parser
from support.tables import print_table

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


# --------------------------------------------------------------------------------- prompts

def generate_by_token_count(n_tokens, depth, count_tokens, n_digits=6, n_trials=1000):
    """n_trials prompts whose lines have n_tokens or a few more, each ending with its answer.

    One random.Random(123) serves all trials. A trial draws 26 different numbers and gives the
    letters the weights 0, 2^0, .., 2^24; the one with 0 is the needle. The context is a line of
    each other letter, plus lines of letters drawn by weight until the count_tokens(line) add up to
    n_tokens, shuffled. The needle's line goes in after a fraction `depth` of these, and again at
    the end, where its last n_digits characters are the answer.
    """
    if not 0 <= depth <= 1:
        raise UsageError(f"depth is {depth:g}; expected 0 to 1")
    if not 2 <= n_digits <= 18 or n_trials < 1:
        raise UsageError(f"{n_digits} digits, {n_trials} trials; expected 2 to 18, at least 1")
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
            raise UsageError(f"{n_tokens} is too short: the shortest prompt has {total}")
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
    # The remaining prompts, shortest first: those as long as the first one go together.
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


# ---------------------------------------------------------------------------- depth by length

def get_parser(doc):
    """The flags of a retrieval benchmark."""
    p = parser(doc)
    p.add_argument("--lengths", type=int, nargs="+", help="context lengths in tokens (paper: 2^12 "
                   ".. 2^17) [1, 2, 4 .. 32 times the training length]")
    p.add_argument("--depths", type=float, nargs="+", default=[0.1, 0.3, 0.5, 0.7, 0.9],
                   help="where the needle is: at 0 it comes first, at 1 last [.1 .3 .5 .7 .9]")
    p.add_argument("--trials", type=at_least(1), default=10,
                   help="prompts for each length and depth (paper: 1000) [10]")
    return p


def measure(run, args, get_prompts, **task):
    """Fill the table of a retrieval benchmark, lengths x depths, and print the shares found.

    get_prompts(tokenizer, length, depth, trials, **task) gives (prompts, answers), or raises
    UsageError for a length that is too short. task: more columns, here digits.
    """
    require_text(run.tokenizer, "a prompt in words")
    lengths = args.lengths or possible_lengths(run, get_prompts, task)
    for depth in args.depths:                          # refuse what is impossible before any work
        get_prompts(run.tokenizer, min(lengths), depth, 1, **task)
    cells = [task | setting | {"length": length, "depth": depth, "trials": args.trials}
             for setting in run.settings for length in lengths for depth in args.depths]
    for cell in run.missing(cells, cost="length"):
        prompts, answers = get_prompts(run.tokenizer, cell["length"], cell["depth"], args.trials,
                                       **task)
        right = exact_matches(run.model, run.tokenizer, prompts, answers)
        run.add(cell, accuracy=statistics.mean(right))

    lines = []
    for setting in run.settings:
        shares = [[float(row["accuracy"]) for row in run.rows() if setting.items() <= row.items()
                   and row["length"] == str(length)] for length in lengths]
        for n, depth in enumerate(args.depths):
            lines.append(setting | {"depth": depth}
                         | {length: f"{x[n]:.1%}" for length, x in zip(lengths, shares)})
        lines.append(setting | {"depth": "mean"}
                     | {length: f"{statistics.mean(x):.1%}" for length, x in zip(lengths, shares)})
    print_table(lines, f"Found by depth and length, {args.trials} prompts each; trained on "
                f"{run.T_train} tokens; {run.path}")


def possible_lengths(run, get_prompts, task):
    """1, 2, 4 .. 32 times the training length, without those that are too short for a prompt."""
    lengths = []
    for length in [run.T_train * 2**n for n in range(6)]:
        try:
            get_prompts(run.tokenizer, length, 0.5, 1, **task)
            lengths.append(length)
        except UsageError:
            pass
    if not lengths:
        raise UsageError(f"no prompt fits into {length} tokens: name longer --lengths")
    return lengths


def abcdigits_prompts(tokenizer, length, depth, trials, digits):
    """(prompts, answers) of about `length` tokens."""
    def count_tokens(text):
        return len(tokenizer.encode_ordinary(text))

    texts = generate_by_token_count(length, depth, count_tokens, digits, trials)
    return [text[:-digits] for text in texts], [text[-digits:] for text in texts]


def main():
    p = get_parser(__doc__)
    p.add_argument("--digits", type=at_least(2),
                   help="digits in each number (paper: 6) [as many as in the training run]")
    args = p.parse_args()
    run = Measurement(args, "abcdigits")
    if run.flags["data"] not in ([], ["abcdigits"]):   # [] for a training loop of your own
        print(f"trained on {' '.join(run.flags['data'])}, not on abcdigits: expect 0 %")
    measure(run, args, abcdigits_prompts, digits=args.digits or run.flags["digits"])


if __name__ == "__main__":
    cli(main)
