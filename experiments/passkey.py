"""Passkey retrieval (Mohtashami and Jaggi 2023; appendix "Passkey Retrieval Results"), on the grid of ABCDigits.

A number is hidden in a text that repeats the same five sentences, and asked for at its end.

Paper:  python -m experiments.passkey --ckpt out/scaling_paper/multiscreen_psi16-0/ckpt.pt \\
            --lengths 4096 8192 16384 32768 65536 131072 --trials 1000
        (with --swe the bottom row of the figure; a Transformer's checkpoint with --rope-scale 1 2 4 8 16 32 64 the top row)
Small:  python -m experiments.passkey --ckpt out/ckpt.pt
        20 prompts in a cell and 1 to 32 times the training length, some minutes on a CPU. What it leaves out: a model that has
        read enough English to understand the question; one trained on other text finds nothing.

The paper prints: over 99.5 % in every cell for the 28M Multiscreen with SWE, 100 % for the 286M and the 1.3B.
"""
import random
from pathlib import Path

import abcdigits
from experiments.common import pyplot
from experiments.retrieval import draw
from train import UsageError, cli

TASK = "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. I will quiz you about the important information there.\n"
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
NEEDLE = "\nThe pass key is {0}. Remember it. {0} is the pass key.\n"
QUESTION = "\nWhat is the pass key? The pass key is"


def generate(n_tokens, depth, count_tokens, n_trials=1000):
    """n_trials prompts of about n_tokens tokens, and their answers (a space and 1 to 5 digits).

    The number, from 1 to 50,000, comes from one random.Random(123). As many fillers as fit are split at the fraction
    `depth`: that many, rounded down, come before the needle. Raises UsageError if not even one fits.
    """
    if not (0 <= depth <= 1 and n_trials >= 1):
        raise UsageError(f"depth {depth}, {n_trials} trials: a depth is in [0, 1], and there is at least 1 trial")
    frame = count_tokens(TASK + NEEDLE.format(50_000) + QUESTION)
    each = count_tokens(FILLER * 2) - count_tokens(FILLER)             # its last space may join the next word
    n = (n_tokens - frame) // each
    if n < 1:
        raise UsageError(f"{n_tokens} tokens: the shortest passkey prompt has {frame + each}")
    rng, before = random.Random(123), int(n * depth)
    keys = [rng.randint(1, 50_000) for _ in range(n_trials)]
    return [TASK + FILLER * before + NEEDLE.format(key) + FILLER * (n - before) + QUESTION for key in keys], [f" {key}" for key in keys]


def main():
    args = abcdigits.get_parser(__doc__).parse_args()
    plt = pyplot()
    model, tokenizer, ckpt = abcdigits.load(args.ckpt, args.device, args.rope_scale, args.swe)

    def get_prompts(length, depth, trials):
        return generate(length, depth, lambda text: len(tokenizer.encode_ordinary(text)), trials)

    T_train = ckpt["args"]["seq_len"]
    cells = abcdigits.measure(args, model, tokenizer, T_train, "passkey", "1 to 5", get_prompts)
    print("the paper, 2^12 to 2^17 tokens, with SWE: 28M Multiscreen over 99.5 % in each cell, 286M and 1.3B 100 %")
    if plt:
        name = "passkey_swe.png" if args.swe else "passkey.png"
        draw(plt, [(ckpt["model"] + (", SWE" if args.swe else ""), cells, T_train)], Path(args.ckpt).with_name(name))


if __name__ == "__main__":
    cli(main)
