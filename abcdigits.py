"""ABCDigits, the paper's retrieval benchmark: prompts, exact match, accuracy by depth and length.

    python abcdigits.py --ckpt out/ckpt.pt

A prompt is a shuffled list of lines LETTER=NUMBER. Each letter has one number; most letters appear
many times, one, the needle, only once. The prompt ends with the needle's letter and "=", and the
model must complete the number. The prompts are bit for bit those of the paper's author, Ken M.
Nakanishi (https://github.com/ken-nakanishi/abcdigits); the code is ours.
"""
import support  # noqa: F401  (first: Ctrl-C while PyTorch is imported is one line too)

# isort: split
import random
import re
import sys
import time
from pathlib import Path

import torch

from support.checkpoint import load_for_evaluation, scale_rope
from support.cli import Parser, UsageError, check_writable, cli, clock

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


def table(cells, lengths, depths, T_train):
    """The cells {(length, depth): (accuracy, RoPE scaling factor or None)} as text."""
    def text(accuracy, scale):
        if scale is None:
            return f"{accuracy:.1%}"
        return "--" if accuracy == 0 else f"{accuracy:.1%} x{scale:g}"

    head = [f"[{n}]" if n == T_train else str(n) for n in lengths]
    lines = [f"{'depth':>6}" + "".join(f"{name:>12}" for name in head)]
    for d in depths:
        lines.append(f"{d:>6g}" + "".join(f"{text(*cells[n, d]):>12}" for n in lengths))
    means = [sum(cells[n, d][0] for d in depths) / len(depths) for n in lengths]
    lines.append(f"{'mean':>6}" + "".join(f"{mean:>12.1%}" for mean in means))
    return "\n".join(lines) + f"\n[{T_train}] is the training length, in tokens"


def get_parser(doc):
    """The flags of a retrieval benchmark."""
    p = Parser(doc)
    p.add_argument("--lengths", type=int, nargs="+", help="context lengths in tokens (paper: 2^12 "
                   ".. 2^17) [1, 2, 4 .. 32 times the training length]")
    p.add_argument("--depths", type=float, nargs="+", default=[0.1, 0.3, 0.5, 0.7, 0.9],
                   help="where the needle is: 0 first, 1 last [.1 .3 .5 .7 .9]")
    p.add_argument("--trials", type=int,
                   help="prompts in a cell (paper: 1000) [20 on a CPU, 1000 on a GPU]")
    p.add_argument("--swe", action="store_true",
                   help="screening-window expansion: windows beyond the training length become "
                   "infinite")
    p.add_argument("--rope-scale", type=float, nargs="+", default=[],
                   help="for models with RoPE: scaling factors of the positions; in each cell the "
                   "best one counts (paper: 1 2 4 .. 64)")
    p.add_shared("--ckpt", "--device", "--force")
    return p


def fill_grid(args, model, tokenizer, T_train, name, digits, get_prompts):
    """Measure every cell of lengths x depths; print the table, and write NAME.tsv cell by cell.

    get_prompts(length, depth, trials) -> (prompts, answers), or UsageError for a short length.
    Returns the cells, {(length, depth): (accuracy, RoPE scaling factor or None)}.
    """
    def possible(length):
        try:
            return get_prompts(length, 0.5, 1)
        except UsageError:
            return None

    trials = args.trials
    if trials is None:
        trials = 1000 if args.device.startswith("cuda") else 20
    lengths = args.lengths or [T_train * 2**n for n in range(6) if possible(T_train * 2**n)]

    # What cannot be done is refused before any work.
    if max(lengths, default=0) > 2**24:
        raise UsageError(f"--lengths {max(lengths)}: at most 2^24 tokens")
    for depth in args.depths:
        get_prompts(min(lengths, default=T_train), depth, min(trials, 1))
    for scale in args.rope_scale:
        scale_rope(model, scale)
    path = Path(args.ckpt).with_name(f"{name}_swe.tsv" if args.swe else f"{name}.tsv")
    check_writable(path, args.force)
    path.write_text("length\tdepth\ttrials\tdigits\taccuracy\trope_scale\n")

    started = time.perf_counter()
    cells = {}
    for length, depth in [(length, depth) for length in lengths for depth in args.depths]:
        prompts, answers = get_prompts(length, depth, trials)
        accuracy, best = -1.0, None
        for scale in args.rope_scale or [None]:
            if scale is not None:
                scale_rope(model, scale)
            right = sum(exact_matches(model, tokenizer, prompts, answers)) / trials
            if right > accuracy:
                accuracy, best = right, scale
        cells[length, depth] = accuracy, best
        shown = "" if best is None else f"{best:g}"
        with open(path, "a") as f:
            f.write(f"{length}\t{depth:g}\t{trials}\t{digits}\t{accuracy:.4f}\t{shown}\n")
        done = sum(n for n, _ in cells) / (len(args.depths) * sum(lengths))
        seconds = time.perf_counter() - started
        print(f"length {length:>7} depth {depth:g}: {accuracy:6.1%}   {clock(seconds)}, "
              f"about {clock(seconds / done - seconds)} left", file=sys.stderr, flush=True)
    print(f"{name}, {digits} digits, {trials} trials in a cell"
          f"{', expanded windows' if args.swe else ''}: accuracy by depth and length"
          f"{', x the best RoPE scaling factor' if args.rope_scale else ''}; {path}")
    print(table(cells, lengths, args.depths, T_train))
    return cells


def main():
    p = get_parser(__doc__)
    p.add_argument("--digits", type=int,
                   help="digits of a number (paper: 6) [the --digits of the training run]")
    args = p.parse_args()
    model, tokenizer, ckpt = load_for_evaluation(args.ckpt, args.device, args.swe)
    digits = ckpt["args"]["digits"] if args.digits is None else args.digits

    def count_tokens(line):
        return len(tokenizer.encode_ordinary(line))

    def get_prompts(length, depth, trials):
        texts = generate_by_token_count(length, depth, count_tokens, digits, trials)
        return [t[:-digits] for t in texts], [t[-digits:] for t in texts]

    T_train = ckpt["args"]["seq_len"]
    if ckpt["args"]["data"] != ["abcdigits"]:
        print(f"{args.ckpt} was trained on {' '.join(ckpt['args']['data'])}, not on abcdigits")
    fill_grid(args, model, tokenizer, T_train, "abcdigits", digits, get_prompts)


if __name__ == "__main__":
    cli(main)
