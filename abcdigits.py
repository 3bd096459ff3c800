"""ABCDigits, the paper's retrieval benchmark: prompts, exact match, accuracy by depth and length.

    python abcdigits.py --ckpt out/ckpt.pt

A prompt is a shuffled list of lines LETTER=NUMBER. Each letter has one number; most letters appear
many times, one, the needle, only once. The prompt ends with the needle's letter and "=", and the
model must complete the number. The prompts are bit for bit those of the paper's author, Ken M.
Nakanishi (https://github.com/ken-nakanishi/abcdigits); the code is ours.
"""

import random
import re
import sys
import time

import torch

from support.checkpoint import load_for_evaluation, scale_rope
from support.cli import Parser, UsageError, cli, clock
from support.results import add_flags, begin, flag, key_of, open_results, weights_hash
from support.retrieval import by_model, get_cells, table

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


# --------------------------------------------------------------------------------- prompts

def make_prompts(depth, n_digits, n_trials, fill):
    """n_trials prompts, each ending with its answer. fill(rng, weights, lines, needle): the rest.

    One random.Random(123) serves all trials. A trial draws 26 different numbers and deals the
    weights 0, 2^0, .., 2^24 out to the letters; 0 is the needle. The context is every other letter
    once and those that `fill` adds, shuffled. The needle's line goes in after the fraction `depth`
    of the lines, and once more at the end, where its last n_digits characters are the answer.
    """
    if not 0 <= depth <= 1:
        raise UsageError(f"depth {depth:g}: it must be in [0, 1]")
    if n_digits < 2 or n_trials < 1:
        raise UsageError(f"{n_digits} digits, {n_trials} trials: at least 2 digits and 1 trial")
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
    """n_trials prompts of n_lines lines, the one to complete included, each with its answer."""
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


def get_parser(doc):
    """The flags of a retrieval benchmark."""
    p = Parser(doc)
    p.add_argument("--lengths", type=int, nargs="+", help="context lengths in tokens (paper: 2^12 "
                   ".. 2^17) [1, 2, 4 .. 32 times the training length]")
    p.add_argument("--depths", type=float, nargs="+", default=[0.1, 0.3, 0.5, 0.7, 0.9],
                   help="where the needle is: 0 first, 1 last [.1 .3 .5 .7 .9]")
    p.add_argument("--trials", type=int,
                   help="prompts in a cell (paper: 1000) [10 on a CPU, 1000 on a GPU]")
    p.add_argument("--swe", action="store_true",
                   help="screening-window expansion: windows beyond the training length become "
                   "infinite")
    p.add_argument("--rope-scale", type=float, nargs="+", default=[],
                   help="for models with RoPE: scaling factors of the positions; in each cell the "
                   "best one counts (paper: 1 2 4 .. 64)")
    add_flags(p)
    p.add_shared("--device")
    return p


def get_keys(base, args, lengths, trials):
    """The Keys of all cells; base: that of the checkpoint."""
    return [base.at(length=length, depth=depth, factor=factor, swe=args.swe, trials=trials)
            for length in lengths for depth in args.depths for factor in args.rope_scale or [None]]


def measure(args, results, model, tokenizer, ckpt, task, get_prompts):
    """Fill the cells of one checkpoint, lengths x depths x factors; returns their keys.

    get_prompts(length, depth, trials) -> (prompts, answers), or UsageError for a short length.
    """
    def possible(length):
        try:
            return get_prompts(length, 0.5, 1)
        except UsageError:
            return None

    trials = args.trials
    if trials is None:
        trials = 1000 if args.device.startswith("cuda") else 10
    T_train = ckpt["args"]["seq_len"]
    lengths = args.lengths or [T_train * 2**n for n in range(6) if possible(T_train * 2**n)]

    # What cannot be done is refused before any work.
    if max(lengths, default=0) > 2**24:
        raise UsageError(f"--lengths {max(lengths)}: at most 2^24 tokens")
    for depth in args.depths:
        get_prompts(min(lengths, default=T_train), depth, min(trials, 1))
    for factor in args.rope_scale:
        scale_rope(model, factor)

    weights = weights_hash(ckpt)
    key = key_of(ckpt["args"], ckpt["step"], task, ckpt.get("files"))
    keys = get_keys(key, args, lengths, trials)
    begin(results, [(key, weights) for key in keys])
    missing = [key for key in keys if not results.has(key, weights)]
    started, done = time.perf_counter(), 0
    for key in missing:
        if key.factor:
            scale_rope(model, float(key.factor))
        prompts, answers = get_prompts(int(key.length), float(key.depth), trials)
        right = sum(exact_matches(model, tokenizer, prompts, answers))
        results.add(key, [right / trials], weights)
        done += int(key.length)
        seconds = time.perf_counter() - started
        left = seconds * (sum(int(k.length) for k in missing) / done - 1)
        factor = f" x{key.factor}" if key.factor else ""
        print(f"length {key.length:>7} depth {key.depth}{factor}: {right / trials:6.1%}   "
              f"{clock(seconds)}, about {clock(left)} left", file=sys.stderr, flush=True)
    return keys


def evaluate(args, name, get_task):
    """Measure the checkpoints and print a table for each model. Returns the Results.

    get_task(tokenizer, ckpt) -> (name of the task in the table, get_prompts).
    """
    results, paths = open_results(args)
    keys = []
    for path in paths:
        model, tokenizer, ckpt = load_for_evaluation(path, args.device, args.swe)
        keys += measure(args, results, model, tokenizer, ckpt, *get_task(tokenizer, ckpt))
    shown = {key: results.values[key] for key in keys} if paths else results.values
    models = by_model(shown, name)
    if not models:
        raise UsageError(f"{results.path} holds no {name}: --ckpt names what to measure")
    for values in models:
        first, seeds = next(iter(values)), len({key.seed for key in values})
        trials = sorted({int(key.trials) for key in values})
        print(f"{first.task}{', expanded windows' if first.swe else ''}, "
              f"{' or '.join(map(str, trials))} trials in a cell"
              f"{f', mean of {seeds} seeds' if seeds > 1 else ''}: accuracy by depth and length"
              f"{', x the best RoPE scaling factor' if first.factor else ''}; {results.path}")
        print(table(get_cells(values), int(flag(first.run, "--seq-len"))))
    return results


def main():
    p = get_parser(__doc__)
    p.add_argument("--digits", type=int,
                   help="digits of a number (paper: 6) [the --digits of the training run]")
    args = p.parse_args()

    def get_task(tokenizer, ckpt):
        digits = ckpt["args"]["digits"] if args.digits is None else args.digits
        if ckpt["args"]["data"] != ["abcdigits"]:
            print(f"trained on {' '.join(ckpt['args']['data'])}, not on abcdigits: expect 0 %")

        def count_tokens(line):
            return len(tokenizer.encode_ordinary(line))

        def get_prompts(length, depth, trials):
            texts = generate_by_token_count(length, depth, count_tokens, digits, trials)
            return [t[:-digits] for t in texts], [t[-digits:] for t in texts]

        return f"abcdigits, {digits} digits", get_prompts

    evaluate(args, "abcdigits", get_task)


if __name__ == "__main__":
    cli(main)
