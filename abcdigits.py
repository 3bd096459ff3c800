"""ABCDigits, the paper's retrieval benchmark: prompts, evaluation, and the table of accuracy by depth and length.

    python abcdigits.py --ckpt out/ckpt.pt

A prompt is a shuffled list of lines LETTER=NUMBER, each letter with one number, most letters many times over; one
letter's line, the needle, stands there only once. The prompt ends with the needle's letter and "=", and the model must
complete the number. The prompts are bit for bit those of the paper's author, K. M. Nakanishi
(https://github.com/ken-nakanishi/abcdigits); the code is ours.
"""
import random
import re
import sys
import time
from pathlib import Path

import torch

from train import Parser, UsageError, cli, clock, get_device, load_checkpoint, scale_rope, screens, set_aside

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def generate(depth, n_digits, n_trials, fill):
    """n_trials prompts with their answers. fill(rng, weights, lines, needle): the further letters of the context.

    One random.Random(123) serves all trials. A trial draws 26 different numbers, deals the weights 0, 2^0, .., 2^24 out
    to the letters (0 is the needle), takes each other letter once and the further ones, shuffles, inserts the needle's
    line after the fraction `depth` of the lines, and appends it once more: its number, the last n_digits characters, is
    the answer.
    """
    if not (0 <= depth <= 1 and n_digits >= 2 and n_trials >= 1):
        raise UsageError(f"depth {depth}, {n_digits} digits, {n_trials} trials: a depth is in [0, 1], a number has at least "
                         "2 digits, and there is at least 1 trial")
    rng, prompts = random.Random(123), []
    for _ in range(n_trials):
        lines = [f"{a}={n}\n" for a, n in zip(LETTERS, rng.sample(range(10 ** (n_digits - 1), 10**n_digits), 26))]
        weights = [0] + [2**i for i in range(25)]
        rng.shuffle(weights)
        needle = weights.index(0)
        context = [i for i in range(26) if i != needle] + fill(rng, weights, lines, needle)
        rng.shuffle(context)
        context.insert(int(len(context) * depth), needle)
        prompts.append("".join(lines[i] for i in context + [needle]).rstrip("\n"))
    return prompts


def generate_by_line_count(n_lines, depth, n_digits=6, n_trials=1000):
    """Prompts of exactly n_lines lines, the one to complete included: n_trials strings, each ending with its answer."""
    def fill(rng, weights, lines, needle):
        return rng.choices(range(26), weights, k=n_lines - 27)

    if n_lines < 27:
        raise UsageError(f"{n_lines} lines: a prompt has at least 27, the 26 letters and the line to complete")
    return generate(depth, n_digits, n_trials, fill)


def generate_by_token_count(n_tokens, depth, count_tokens, n_digits=6, n_trials=1000):
    """Prompts of n_tokens tokens or a few more: lines are added while the sum of count_tokens(line) is below n_tokens."""
    def fill(rng, weights, lines, needle):
        counts = [count_tokens(line) for line in lines]
        total, more = sum(counts) + counts[needle], []
        if total > n_tokens:
            raise UsageError(f"{n_tokens} tokens: the 26 letters and the line to complete take {total} already")
        while total < n_tokens:
            more += rng.choices(range(26), weights)
            total += counts[more[-1]]
        return more

    return generate(depth, n_digits, n_trials, fill)


def evaluate(model, tokenizer, prompts, answers, tokens_at_once=2**15):
    """How many answers are right: one prefill a prompt, greedy decoding with the cache, the same text and no digit after it.

    Prompts of equal length go through the model together. Returns a list of bools in the order of the prompts.
    """
    device, right = next(model.parameters()).device, [False] * len(prompts)
    rows = [tokenizer.encode_ordinary(p) for p in prompts]
    order = sorted(range(len(rows)), key=lambda n: len(rows[n]))
    while order:
        T = len(rows[order[0]])
        batch = [n for n in order[: max(tokens_at_once // T, 1)] if len(rows[n]) == T]
        order = order[len(batch) :]
        new = max(len(answers[n]) for n in batch) + 1              # one more than the answer, to see that the integer ends
        out = model.generate(torch.tensor([rows[n] for n in batch], device=device), new).tolist()
        for n, tokens in zip(batch, out):
            right[n] = bool(re.match(re.escape(answers[n]) + "(?![0-9])", tokenizer.decode(tokens)))
    return right


def table(cells, lengths, depths, T_train):
    """The cells {(length, depth): (accuracy, RoPE scaling factor or None)} as text, depths down, lengths across, the
    training length marked."""
    def text(accuracy, scale):
        return f"{accuracy:.1%}" if scale is None else "--" if accuracy == 0 else f"{accuracy:.1%} x{scale:g}"

    lines = [f"{'depth':>6}" + "".join(f"{f'[{n}]' if n == T_train else n:>12}" for n in lengths)]
    lines += [f"{d:>6g}" + "".join(f"{text(*cells[n, d]):>12}" for n in lengths) for d in depths]
    lines += [f"{'mean':>6}" + "".join(f"{sum(cells[n, d][0] for d in depths) / len(depths):>12.1%}" for n in lengths)]
    return "\n".join(lines) + f"\n[{T_train}] is the training length, in tokens"


def get_parser(doc):
    """The flags of a retrieval benchmark."""
    p = Parser(doc)
    p.add_argument("--ckpt", default="out/ckpt.pt", help="checkpoint of train.py [out/ckpt.pt]")
    p.add_argument("--lengths", type=int, nargs="+",
                   help="context lengths in tokens (paper: 2^12 .. 2^17) [1, 2, 4 .. 32 times the training length]")
    p.add_argument("--depths", type=float, nargs="+", default=[0.1, 0.3, 0.5, 0.7, 0.9],
                   help="where the needle is, 0 first, 1 last [.1 .3 .5 .7 .9]")
    p.add_argument("--trials", type=int, help="prompts in a cell (paper: 1000) [20 on a CPU, 1000 on a GPU]")
    p.add_argument("--swe", action="store_true", help="screening-window expansion: windows beyond the training length become infinite")
    p.add_argument("--rope-scale", type=float, nargs="+",
                   help="for models with RoPE: scaling factors of the positions, the best one of each cell counts (paper: 1 2 4 .. 64)")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return p


def load(path, device, rope_scale=None, swe=False):
    """(model, tokenizer, checkpoint), in bfloat16 on a GPU; its windows expanded with swe, its factors tried out."""
    device = get_device(device)
    model, tokenizer, ckpt = load_checkpoint(path, device, torch.bfloat16 if device.type == "cuda" else None)
    for factor in rope_scale or []:
        if not factor > 0:
            raise UsageError(f"--rope-scale {factor:g}: a factor is above 0")
        scale_rope(model, factor)
    if swe:
        if not screens(model):
            raise UsageError(f"--swe is for models with screening windows; {path} is a {ckpt['model']}")
        model.expand_windows(ckpt["args"]["seq_len"])
    return model, tokenizer, ckpt


def measure(args, model, tokenizer, T_train, name, digits, get_prompts):
    """Fill the grid of lengths and depths, print it, and write it beside the checkpoint as NAME.tsv (NAME_swe.tsv), cell by
    cell; a table that was there is moved to NAME-old-1.tsv, -2, ...

    get_prompts(length, depth, trials) -> (prompts, answers); it raises UsageError for a length that is too short. Returns
    the cells, {(length, depth): (accuracy, RoPE scaling factor or None)}.
    """
    def possible(length):
        try:
            return get_prompts(length, 0.5, 1)
        except UsageError:
            return None

    trials = (1000 if args.device.startswith("cuda") else 20) if args.trials is None else args.trials
    lengths = args.lengths or [T_train * 2**n for n in range(6) if possible(T_train * 2**n)]
    for depth in args.depths:                                  # what cannot be done is refused before any work
        get_prompts(min(lengths, default=T_train), depth, min(trials, 1))
    cells, path = {}, Path(args.ckpt).with_name(f"{name}_swe.tsv" if args.swe else f"{name}.tsv")
    try:
        set_aside(path)
        path.write_text("length\tdepth\ttrials\tdigits\taccuracy\trope_scale\n")
    except OSError as e:
        raise UsageError(f"{path} cannot be written ({e.strerror})") from None
    started = time.perf_counter()
    for length, depth in [(length, depth) for length in lengths for depth in args.depths]:
        prompts, answers = get_prompts(length, depth, trials)
        cells[length, depth] = (-1.0, None)
        for scale in args.rope_scale or [None]:
            if scale is not None:
                scale_rope(model, scale)
            accuracy = sum(evaluate(model, tokenizer, prompts, answers)) / trials
            cells[length, depth] = max(cells[length, depth], (accuracy, scale), key=lambda cell: cell[0])
        accuracy, scale = cells[length, depth]
        with open(path, "a") as f:
            f.write(f"{length}\t{depth:g}\t{trials}\t{digits}\t{accuracy:.4f}\t{'' if scale is None else f'{scale:g}'}\n")
        done = sum(n for n, _ in cells) / (len(args.depths) * sum(lengths))
        seconds = time.perf_counter() - started
        print(f"length {length:>7} depth {depth:g}: {accuracy:6.1%}   {clock(seconds)}, "
              f"about {clock(seconds / done - seconds)} left", file=sys.stderr, flush=True)
    print(f"{name}, {digits} digits, {trials} trials in a cell{', expanded windows' if args.swe else ''}: accuracy by depth and length"
          f"{', x the best RoPE scaling factor' if args.rope_scale else ''}; {path}")
    print(table(cells, lengths, args.depths, T_train))
    return cells


def main():
    p = get_parser(__doc__)
    p.add_argument("--digits", type=int, help="digits of a number (paper: 6) [the --digits of the training run]")
    args = p.parse_args()
    model, tokenizer, ckpt = load(args.ckpt, args.device, args.rope_scale, args.swe)
    digits = ckpt["args"]["digits"] if args.digits is None else args.digits

    def get_prompts(length, depth, trials):
        texts = generate_by_token_count(length, depth, lambda line: len(tokenizer.encode_ordinary(line)), digits, trials)
        return [t[:-digits] for t in texts], [t[-digits:] for t in texts]

    measure(args, model, tokenizer, ckpt["args"]["seq_len"], "abcdigits", digits, get_prompts)


if __name__ == "__main__":
    cli(main)
