"""The documents that a model learns ABCDigits from: a stream that becomes the task step by step.

The curriculum. The letter of a line is drawn with weights b^0 .. b^25, whose order is new in each
document. At first b is 2, so a few letters fill a document, and half of the documents help. There
each letter has a number of its own, the same in all documents. In one half of these, nine of ten
numbers are such own numbers; in the other half nine of ten digits are, each drawn separately. To
predict them a model must bring the letter to each of its digits, which is just what lookup needs.
All other numbers require lookup.

Once the loss shows lookup, the help soon ends, and b slowly falls to 1.1. In the end a quarter of
the lines ask, as the benchmark does, about a letter that was seen just once before. The validation
documents are like those at the end. Training ends 12,000 documents after the loss shows lookup.
"""
import math
import re

import numpy as np

from support.cli import UsageError
from support.tasks.stream import Stream

HELPED = 0.5                                           # share of documents with help at first
OWN = 0.9                                              # share of own numbers or digits in these

# Documents from the step whose loss shows lookup ..
OWN_UNTIL = 1_500                                      # .. until none helps
FLAT_AFTER = 8_000                                     # .. until b is 1.1
DONE_AFTER = 12_000                                    # .. until training ends


class ABCDigitsStream(Stream):
    """Lines LETTER=NUMBER; each letter has one random number per document."""
    next_command = "abcdigits.py"

    def __init__(self, tokenizer, T, digits, seed, part):
        if not 2 <= digits <= 18:
            raise UsageError(f"--digits {digits}: use 2 to 18")
        super().__init__(tokenizer, T, seed, part, DONE_AFTER)
        self.digits = digits
        line = "A=" + "1" * digits + "\n"
        self.lines = T / len(tokenizer.encode_ordinary(line))      # of a document, on average
        self.low, self.high = 10 ** (digits - 1), 10**digits       # numbers, high excluded
        own = np.random.default_rng([seed, 2]).integers(self.low, self.high, 26)
        self.own = digits_of(own)

    @property
    def base(self):
        """b, the ratio of the weights of two letters adjacent in rank."""
        return 1.1 if self.part else max(2 - 0.9 * self.looked_up / FLAT_AFTER, 1.1)

    @property
    def helped(self):
        """The share of documents where letters have their own numbers."""
        return 0.0 if self.part else HELPED * max(1 - self.looked_up / OWN_UNTIL, 0.0)

    def losses(self):
        """Bounds on the loss with and without lookup, in nats per token.

        Each letter costs its entropy in both. With lookup only a new letter's number costs; without
        it every number does.
        """
        p = self.base ** np.arange(26) / np.sum(self.base ** np.arange(26))
        letters = -self.lines * np.sum(p * np.log(p)).item()
        new = np.sum(1 - (1 - p) ** self.lines).item()
        number = self.helped * self.nats(OWN) + (1 - self.helped) * self.nats(0)
        return (letters + new * number) / self.T, (letters + self.lines * number) / self.T

    def nats(self, share):
        """The entropy of a number that is own with this probability, in nats."""
        def entropy(n):
            other = (1 - share) / n                    # or one of n, each as probable
            own = share + other
            return -own * math.log(own) - (n - 1) * other * math.log(other)

        digits = entropy(9) + (self.digits - 1) * entropy(10)
        return (entropy(self.high - self.low) + digits) / 2

    def __getitem__(self, n):
        rng = np.random.default_rng([self.seed, self.part, n])
        numbers = digits_of(self.low + rng.choice(self.high - self.low, 26, replace=False))
        share = OWN if rng.random() < self.helped else 0.0
        draws = 1 if rng.random() >= 0.5 else self.digits              # per number
        numbers = np.where(rng.random((26, draws)) < share, self.own, numbers)
        values = ["".join(digits) for digits in numbers]
        p = rng.permutation(self.base ** np.arange(26))
        tokens = []
        while len(tokens) <= self.T:
            letters = rng.choice(26, self.T // (self.digits + 3) + 1, p=p / p.sum())
            lines = "".join(f"{chr(65 + c)}={values[c]}\n" for c in letters)
            tokens += self.tokenizer.encode_ordinary(lines)
        return np.array(tokens[: self.T + 1])

    def needles(self, document):
        """True where the target is a digit of a letter with one earlier line. (T + 1,) -> (T,)"""
        text, starts = self.tokenizer.decode_with_offsets(document.tolist())
        starts, mask, seen = np.array(starts), np.zeros(len(document), dtype=bool), []
        for line in re.finditer(r"([A-Z])=(\d*)", text):
            if seen.count(line[1]) == 1:
                mask |= (starts >= line.start(2)) & (starts < line.end(2))
            seen.append(line[1])
        return mask[1:]

    def extra_columns(self, model, batches):
        """The share of right digits among the needles, and the base."""
        return super().extra_columns(model, batches) | {"base": self.base}


def digits_of(numbers):
    """The digits of numbers of equal length, as characters. (n,) -> (n, digits)"""
    return np.array([list(str(n)) for n in numbers])


def get_data(args, tokenizer):
    """(training, validation) documents of train.py's flags."""
    return [ABCDigitsStream(tokenizer, args.seq_len, args.digits, args.seed, part)
            for part in (0, 1)]
