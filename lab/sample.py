"""What does a model write? Prints the text as it is generated.

    python -m lab.sample --ckpt out/ckpt.pt --prompt "def read(self, size):"

Without a prompt the model begins a new document, as it would after an end-of-text token. The text
stops after --tokens tokens, or earlier if the model itself ends it.
"""
import sys

import torch

from lab.measure import get_parser
from train import load_checkpoint


def decode_stream(tokens, tokenizer):
    """The text of a stream of tokens, in pieces of whole characters, up to end-of-text."""
    read, done = [], 0
    for token in tokens:
        if token == tokenizer.eot_token:
            break
        read.append(token)
        text = tokenizer.decode(read)
        if not text.endswith("\ufffd"):                # else it may end with half a character
            yield text[done:]
            done = len(text)
    yield tokenizer.decode(read)[done:]


def printable(text):
    """The text without what would change a terminal's colours or its title."""
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text)


def main():
    p = get_parser(__doc__)
    p.add_argument("--prompt", default="", help="the text to continue [a new document]")
    p.add_argument("--tokens", type=int, default=500, help="at most so many new tokens [500]")
    p.add_argument("--temperature", type=float, default=0.7,
                   help="how random the choice is; 0 takes the likeliest token [0.7]")
    p.add_argument("--top-k", type=int, help="choose among the k likeliest tokens [all]")
    p.add_argument("--seed", type=int, default=0, help="of the random numbers [0]")
    args = p.parse_args()
    model, tokenizer, _ = load_checkpoint(args.ckpt, args.device)
    given = tokenizer.encode_ordinary(args.prompt) or [tokenizer.eot_token]
    prompt = torch.tensor([given], device=args.device)
    generator = torch.Generator(args.device).manual_seed(args.seed)
    stream = model.stream(prompt, args.tokens, args.temperature, args.top_k, generator)

    print(args.prompt, end="", flush=True)
    try:
        for text in decode_stream(map(int, stream), tokenizer):
            print(printable(text), end="", flush=True)
        print()
    except (ValueError, FloatingPointError) as e:
        sys.exit(f"\nerror: {e}")


if __name__ == "__main__":
    main()
