"""Generate text from a checkpoint and a prompt, and print it as it is generated.

    python -m lab.sample --ckpt out/ckpt.pt --prompt "def read(self, size):"

This shows you in seconds what a model of train.py has learned; the default model writes something
that looks like Python. Without a prompt the model starts a new document, as it would after an
end-of-text token. The text stops after --tokens tokens, or earlier if the model itself ends it. A
model of your own vocabulary, which you trained with --tokenizer and a number, prints numbers, and
needs some as a prompt, such as --prompt "12 7". The paper has no samples to compare with.
"""
import codecs
import sys

import torch

from support.cli import (
    DEVICE,
    Parser,
    UsageError,
    at_least,
    cli,
    get_device,
    printable,
    products_dtype,
)
from support import check
from support.run import load_checkpoint


def decode_stream(tokens, tokenizer):
    """The text of a stream of token numbers, in pieces of whole characters, up to end-of-text.

    The bytes of an incomplete character are held back. Wrong bytes are shown as U+FFFD. Joined, the
    pieces are the decoded text.
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for token in tokens:
        if token == tokenizer.eot_token:
            break
        yield decoder.decode(tokenizer.decode_single_token_bytes(token))
    yield decoder.decode(b"", final=True)


def main():
    p = Parser(__doc__)
    p.flag("--prompt", "", "the text to continue [none: start a new document]")
    p.flag("--tokens", 500, "generate at most this many new tokens", at_least(1))
    p.flag("--temperature", 0.7, "how random the choice is; 0 takes the likeliest token",
           at_least(0, float))
    p.flag("--top-k", None, "sample only from the k likeliest tokens [all]", at_least(1))
    p.flag("--seed", 0, "seed of the random number generator", at_least(0))
    p.flag("--ckpt", "out/ckpt.pt", "checkpoint of train.py")
    p.flag("--device", DEVICE, "cpu, cuda or mps")
    args = p.parse_args()
    if 0 < args.temperature < 1e-4:
        raise UsageError("--temperature must be 0, or at least 1e-4")

    device = get_device(args.device)
    model, tokenizer, _ = load_checkpoint(args.ckpt, device, products_dtype(device))
    check.warn(model, file=sys.stderr)                 # decoding may not be what was trained
    given = tokenizer.encode_ordinary(args.prompt)
    if not given and tokenizer.eot_token is None:
        raise UsageError(f"{args.ckpt} was trained on numbers without an end-of-text to begin "
                         'with: give it some, as in --prompt "0 1"')
    prompt = torch.tensor([given or [tokenizer.eot_token]], device=device)
    generator = torch.Generator(device).manual_seed(args.seed)
    stream = model.stream(prompt, args.tokens, args.temperature, args.top_k, generator)

    print(tokenizer.decode(given), end="", flush=True)
    try:
        for text in decode_stream(map(int, stream), tokenizer):
            print(printable(text), end="", flush=True)
    finally:
        print(flush=True)                              # an error has a line of its own


if __name__ == "__main__":
    cli(main)
