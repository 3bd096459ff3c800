"""Text from a checkpoint and a prompt, printed while it is made (no section of the paper: what a model has learned, to read).

    python -m experiments.sample --ckpt out/ckpt.pt --prompt "def read(self, size):"
        (seconds; any model of train.py: multiscreen, its ablations, transformer:SIZE)

An empty prompt starts a new document: the model is given end-of-text. The text ends after --tokens, or where the model ends it.
What comes out depends on the size and the training only: the default model of train.py writes the shape of Python, no sense.
"""
import codecs
import sys
import time

import torch

import abcdigits
from train import Parser, UsageError, cli


def pieces(tokens, tokenizer):
    """The text of a stream of token numbers, in pieces of whole characters: bytes that may still become one are held back.

    Ends at end-of-text. Bytes that can be no character become U+FFFD. Joined, the pieces are the decoded text.
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for token in tokens:
        if token == tokenizer.eot_token:
            break
        yield decoder.decode(tokenizer.decode_single_token_bytes(token))
    yield decoder.decode(b"", final=True)


def main():
    p = Parser(__doc__)
    p.add_argument("--ckpt", default="out/ckpt.pt", help="checkpoint of train.py [out/ckpt.pt]")
    p.add_argument("--prompt", default="", help="the text to go on with [none: a new document]")
    p.add_argument("--tokens", type=int, default=500, help="at most so many new tokens [500]")
    p.add_argument("--temperature", type=float, default=0.7, help="0 takes the likeliest token [0.7]")
    p.add_argument("--top-k", type=int, help="sample from the k likeliest tokens only [all]")
    p.add_argument("--seed", type=int, default=0, help="of the random numbers [0]")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = p.parse_args()
    if args.tokens < 1 or not (args.temperature == 0 or args.temperature >= 1e-4) or args.top_k is not None and args.top_k < 1 or not 0 <= args.seed < 2**63:
        raise UsageError("--tokens and --top-k must be at least 1, --temperature 0 or at least 1e-4, --seed at least 0")
    model, tokenizer, _ = abcdigits.load(args.ckpt, args.device)
    device = model.W_E.device
    prompt = torch.tensor([tokenizer.encode_ordinary(args.prompt) or [tokenizer.eot_token]], device=device)
    generator, n, began = torch.Generator(device).manual_seed(args.seed), 0, time.perf_counter()

    def stream():
        nonlocal n
        for n, token in enumerate(model.stream(prompt, args.tokens, args.temperature, args.top_k, generator), 1):
            yield token.item()

    print(args.prompt, end="", flush=True)
    for text in pieces(stream(), tokenizer):
        print(text, end="", flush=True)
    print(f"\n[{n} tokens, {(time.perf_counter() - began) / n * 1e3:.1f} ms a token]", file=sys.stderr)


if __name__ == "__main__":
    cli(main)
