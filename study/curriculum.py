"""ABCDigits with a curriculum that waits for the model: its help ends once the loss shows lookup.

    python train.py --data lab.tasks.ABCDigits --layers 4 --lr 0.015625 --w-th 16 --steps 4800
"""
import math

import numpy as np

import abcdigits


class ABCDigits(abcdigits.Documents):
    """Training ends 12,000 documents after the loss shows lookup.

    state: documents since then, and the level of the loss: 0 the least, 1 without lookup.
    """
    DONE_AFTER = 12_000

    def __init__(self, args, tokenizer, part):
        super().__init__(args, tokenizer, part)
        self.state, self.per_step = (0, 1.0), args.batch_tokens // args.seq_len
        line = "A=" + "1" * self.digits + "\n"
        self.lines = self.T / len(tokenizer.encode_ordinary(line))     # of a document, on average

    def learned(self, n):
        return self.state[0]

    def observe(self, loss):
        """Count a step's documents, if the last 20 or so losses show lookup."""
        looked_up, level = self.state
        least, without = self.losses()
        level += ((float(loss) - least) / (without - least) - level) / 20
        if level < 0.6:                                # lookup is below 0.5, a plateau was at 0.8
            looked_up += self.per_step
        self.state = looked_up, level
        return looked_up >= self.DONE_AFTER

    def losses(self):
        """Bounds on the loss with and without lookup, in nats per token.

        Each letter costs its entropy in both. With lookup only a new letter's number costs; without
        it every number does.
        """
        helped, base = self.help_at(0)
        p = base ** np.arange(26) / np.sum(base ** np.arange(26))
        letters = -self.lines * np.sum(p * np.log(p)).item()
        new = np.sum(1 - (1 - p) ** self.lines).item()
        number = helped * self.nats(0.9) + (1 - helped) * self.nats(0)
        return (letters + new * number) / self.T, (letters + self.lines * number) / self.T

    def nats(self, share):
        """The entropy of a number that is own with this probability, in nats."""
        def entropy(n):
            other = (1 - share) / n                    # or one of n, each as probable
            own = share + other
            return -own * math.log(own) - (n - 1) * other * math.log(other)

        digits = entropy(9) + (self.digits - 1) * entropy(10)
        return (entropy(self.high - self.low) + digits) / 2
