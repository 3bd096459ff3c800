"""What does a model write?

    python -m lab.sample --ckpt out/ckpt.pt --prompt "def read(self, size):"

Without a prompt the model begins a new document, as it would after an end-of-text token. The text
has --tokens new tokens, or fewer if the model itself ends it.
"""
import sys

import torch

from lab.measure import get_parser
from train import load_checkpoint


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
    end = tokenizer.eot_token
    prompt = torch.tensor([tokenizer.encode_ordinary(args.prompt) or [end]], device=args.device)
    generator = torch.Generator(args.device).manual_seed(args.seed)
    try:
        new = model.generate(prompt, args.tokens, temperature=args.temperature, top_k=args.top_k,
                             generator=generator)[0].tolist()
    except (ValueError, FloatingPointError) as e:
        sys.exit(f"error: {e}")
    if end in new:
        new = new[: new.index(end)]
    text = tokenizer.decode(new)
    # Other characters than these could change the colours or the title of a terminal.
    print(args.prompt + "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text))


if __name__ == "__main__":
    main()
