"""ABCDigits, the paper's retrieval benchmark: prompts, exact match, accuracy by depth and length.

    python abcdigits.py --ckpt out/ckpt.pt

This measures whether a model can look up a number that it read once, anywhere in a long context. A
prompt is a shuffled list of lines LETTER=NUMBER, in which each letter always has the same number.
Most letters appear many times, but one of them, the needle, appears only once. The prompt ends with
the needle's letter and "=", and the model has to complete the number. The prompts are bit for bit
those of the paper's author, Ken M. Nakanishi (https://github.com/ken-nakanishi/abcdigits); the code
is ours.

Accuracy is measured for each combination of a context length and a depth of the needle. Each of
them becomes a row of abcdigits.tsv, beside the checkpoint, so if you rerun the command, it measures
only what is missing. `python -m lab.retrieval` draws such tables.
"""
import random
import re
import statistics
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import torch

from support.cli import Parser, UsageError, cli
from support.evaluation import add_flags, load_for_evaluation, model_hash, rope_factor, scale_rope
from support.table import RUN, Progress, Table, beside, describe_run, print_table

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
# What identifies a cell. factor: that of --rope-scale; swe: whether windows are expanded.
CELL = ("length", "depth", "factor", "swe", "trials")


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
    p = Parser(doc)
    p.add_argument("--lengths", type=int, nargs="+", help="context lengths in tokens (paper: 2^12 "
                   ".. 2^17) [1, 2, 4 .. 32 times the training length]")
    p.add_argument("--depths", type=float, nargs="+", default=[0.1, 0.3, 0.5, 0.7, 0.9],
                   help="where the needle is: at 0 it comes first, at 1 last [.1 .3 .5 .7 .9]")
    p.add_argument("--trials", type=int,
                   help="prompts for each length and depth (paper: 1000) [10 on a CPU, 1000 on a "
                   "GPU]")
    p.add_argument("--swe", action="store_true",
                   help="use screening-window expansion: windows longer than the training length "
                   "become infinite")
    p.add_argument("--rope-scale", type=rope_factor, nargs="+", default=[],
                   help="for models with RoPE: try each of these factors, of which the best counts "
                   "for each length and depth; 4 divides the positions by 4, ntk4 scales theta "
                   "instead (paper: 1 2 4 .. 64)")
    add_flags(p, "--ckpt", "--device", "--table")
    return p


def measure(args, name, loaded, get_prompts, **task_flags):
    """Fill NAME.tsv beside the checkpoint, lengths x depths x factors, and print the cells.

    loaded: (model, tokenizer, ckpt). get_prompts(tokenizer, length, depth, trials, **task_flags)
    gives (prompts, answers), or raises UsageError for a length that is too short. task_flags: those
    that only this task has, here digits; they become columns, too.
    """
    model, tokenizer, ckpt = loaded
    identity = model_hash(ckpt, __name__, get_prompts.__module__, f"support.tasks.{name}")
    get_prompts = partial(get_prompts, tokenizer, **task_flags)
    T_train = ckpt["args"]["seq_len"]
    trials = args.trials
    if trials is None:
        trials = 1000 if model.W_E.is_cuda else 10
    lengths = args.lengths or possible_lengths(T_train, get_prompts)

    # Make one prompt per depth, so that impossible ones are refused before any work.
    for depth in args.depths:
        get_prompts(min(lengths), depth, min(trials, 1))
    for factor in args.rope_scale:
        scale_rope(model, factor)

    # Each cell that the table lacks becomes a row. None: no --rope-scale.
    run = describe_run(ckpt) | task_flags | {"swe": args.swe, "trials": trials}
    cells = [run | {"length": length, "depth": depth, "factor": factor} for length in lengths
             for depth in args.depths for factor in args.rope_scale or [None]]
    table = Table(beside(args.ckpt, f"{name}.tsv", args.table), (*RUN, *task_flags, *CELL),
                  ["accuracy"], identity)
    missing = table.reuse(cells)
    progress = Progress(sum(cell["length"] for cell in missing))
    for cell in missing:
        length, depth, factor = cell["length"], cell["depth"], cell["factor"]
        if factor:
            scale_rope(model, factor)
        prompts, answers = get_prompts(length, depth, trials)
        accuracy = statistics.mean(exact_matches(model, tokenizer, prompts, answers))
        table.add(cell, accuracy=accuracy)
        scaled = f" x{factor}" if factor else ""
        progress.add(length, f"length {length:>7} depth {depth:g}{scaled}: {accuracy:6.1%}")

    what = [name, *(f"{value} {flag}" for flag, value in task_flags.items())]
    if args.swe:
        what.append("expanded windows")
    title = (f"{', '.join(what)}, trials per cell: {trials}; accuracy by depth and length, in "
             f"tokens ([{T_train}]: the training length)")
    if args.rope_scale:
        title += ", x the best RoPE scaling, ntk: of theta"
    print_grid(table.rows_of(cells), T_train, f"{title}; {table.path}")


def possible_lengths(T_train, get_prompts):
    """1, 2, 4 .. 32 times the training length, without those that are too short for a prompt."""
    lengths = []
    for length in (T_train * 2**n for n in range(6)):
        with suppress(UsageError):
            get_prompts(length, 0.5, 1)
            lengths.append(length)
    return lengths or [length]                         # get_prompts says why not


class Cell(NamedTuple):
    """{seed: share of right answers} at a length and a depth, and the RoPE factor, or ""."""
    shares: dict
    factor: str

    @property
    def mean(self):
        return statistics.mean(self.shares.values())


def get_cells(rows):
    """{(length, depth): Cell} of the rows of one model, dicts of text.

    For each seed the measurement with the most prompts counts. Of the RoPE factors, the one with
    the best mean over the seeds counts; of equal ones, the first.
    """
    found = {}
    for row in sorted(rows, key=lambda row: int(row["trials"])):
        by_factor = found.setdefault((int(row["length"]), float(row["depth"])), {})
        cell = by_factor.setdefault(row["factor"], Cell({}, row["factor"]))
        cell.shares[row["seed"]] = float(row["accuracy"])
    return {place: max(by_factor.values(), key=lambda cell: (len(cell.shares), cell.mean))
            for place, by_factor in sorted(found.items())}


def print_grid(rows, T_train, title):
    """Accuracy by depth and length, and its mean over the depths. rows: a table's, of one run."""
    def shown(cell):
        return f"{cell.mean:.1%} x{cell.factor}" if cell.factor else f"{cell.mean:.1%}"

    cells = get_cells(rows)
    lengths, depths = (sorted(set(x)) for x in zip(*cells))
    columns = ["depth", *(f"[{n}]" if n == T_train else str(n) for n in lengths)]
    lines = [[depth, *(shown(cells[n, depth]) for n in lengths)] for depth in depths]
    means = [statistics.mean(cells[n, depth].mean for depth in depths) for n in lengths]
    print_table(columns, [*lines, ["mean", *(f"{x:.1%}" for x in means)]], title)


def abcdigits_prompts(tokenizer, length, depth, trials, digits):
    """(prompts, answers) of about `length` tokens."""
    def count_tokens(text):
        return len(tokenizer.encode_ordinary(text))

    texts = generate_by_token_count(length, depth, count_tokens, digits, trials)
    return [text[:-digits] for text in texts], [text[-digits:] for text in texts]


def main():
    p = get_parser(__doc__)
    p.add_argument("--digits", type=int,
                   help="digits in each number (paper: 6) [as many as in the training run]")
    args = p.parse_args()
    model, tokenizer, ckpt = load_for_evaluation(args.ckpt, args.device, args.swe)
    if ckpt["args"]["data"] != ["abcdigits"]:
        print(f"trained on {' '.join(ckpt['args']['data'])}, not on abcdigits: expect 0 %")
    digits = ckpt["args"]["digits"] if args.digits is None else args.digits
    measure(args, "abcdigits", (model, tokenizer, ckpt), abcdigits_prompts, digits=digits)


if __name__ == "__main__":
    cli(main)
