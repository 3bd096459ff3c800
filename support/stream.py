"""The documents that a model learns ABCDigits from: a stream that becomes the task as it learns."""
import math
import re

import numpy as np
import torch

from support.cli import UsageError
from support.distributed import total

FLAT_AFTER = 12_000                                    # documents learned until b is 1.1
DONE_AFTER = 16_000                                    # documents learned until training ends
OWN = 0.5                                              # share of what is the letter's own at first
NEAR = 0.4                                             # nats per token above the least loss


class ABCDigitsStream:
    """Endless ABCDigits documents of T + 1 tokens, by number. part: 0 training, 1 validation.

    A document is lines LETTER=NUMBER; each letter has one random number in a document. A line's
    letter is drawn with the weights b^0 .. b^25, in an order that is new in each document.

    At first b is 2, so a few letters fill the document; and each letter has a number of its own,
    the same in all documents. In half of the documents it stands for half of the letters, in the
    others half of its digits stand, each by itself. To learn own numbers, a model must bring the
    letter to each place where a digit is predicted, and lookup needs just that. While the loss is
    near the least possible, b falls to 1.1 and own numbers disappear. In the end most questions are
    about a letter that stood there once before, which is what the benchmark asks. Validation is
    like the end. After some more documents of that kind the model has `learned`.
    """

    def __init__(self, tokenizer, T, digits, seed, part):
        if not 2 <= digits <= 18:
            raise UsageError(f"--digits {digits}: a number has 2 to 18")
        self.tokenizer, self.T, self.digits = tokenizer, T, digits
        self.seed, self.part = seed, part
        line = "A=" + "1" * digits + "\n"
        self.lines = T / len(tokenizer.encode_ordinary(line))      # of a document, on average
        self.low, self.high = 10 ** (digits - 1), 10**digits       # numbers, high excluded
        own = np.random.default_rng([seed, 2]).integers(self.low, self.high, 26)
        self.own = digits_of(own)
        self.near = 0                                  # documents whose loss was near the least

    @property
    def base(self):
        """b, the ratio of the weights of two letters next to each other in rank."""
        return 1.1 if self.part else max(2 - 0.9 * self.near / FLAT_AFTER, 1.1)

    @property
    def share(self):
        """The share of numbers, or of digits, that are their letter's own."""
        return 0.0 if self.part else OWN * max(1 - 2 * self.near / FLAT_AFTER, 0.0)

    @property
    def learned(self):
        """Whether the model has learned the task, and had the documents after that."""
        return self.near >= DONE_AFTER

    def least_loss(self):
        """The least possible loss, nats per token: the letters, and the numbers of new ones."""
        p = self.base ** np.arange(26) / np.sum(self.base ** np.arange(26))
        letters = -self.lines * np.sum(p * np.log(p))
        new = np.sum(1 - (1 - p) ** self.lines)

        # A new number, or a digit, is the letter's own, or one of n with equal probability.
        def entropy(n):
            other = (1 - self.share) / n
            own = self.share + other
            return -own * math.log(own) - (n - 1) * other * math.log(other)

        digits = entropy(9) + (self.digits - 1) * entropy(10)
        number = (entropy(self.high - self.low) + digits) / 2
        return (letters + new * number) / self.T

    def observe(self, loss, documents):
        """Count the documents of a step, if its loss (nats per token) is near the least."""
        if loss < self.least_loss() + NEAR:
            self.near += documents

    def __getitem__(self, n):
        rng = np.random.default_rng([self.seed, self.part, n])
        numbers = digits_of(self.low + rng.choice(self.high - self.low, 26, replace=False))
        draws = 1 if rng.random() >= 0.5 else self.digits              # of a number
        numbers = np.where(rng.random((26, draws)) < self.share, self.own, numbers)
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
        """The share of right digits among the needles of some documents, and the base.

        A needle is a digit whose number stood once before. batches: (documents, how many count).
        """
        return {"needle": share_right(model, batches, self.needles), "base": self.base}

    def state(self):
        return self.near

    def load(self, state):
        self.near = state

    def __str__(self):
        return "an endless stream"

    def spread(self, n):
        """The numbers of n documents."""
        return range(n)

    def draw(self, n, seed):
        """The n-th document."""
        return self[n]


@torch.no_grad()
def share_right(model, batches, needles):
    """The share of right guesses among the needles of documents; NaN where they have none.

    batches: (documents, how many count); needles: document (T + 1,) -> its targets that count (T,)
    """
    right = asked = 0
    for x, count in batches:
        mask = torch.from_numpy(np.stack([needles(document) for document in x.numpy()]))
        mask[count:] = False
        guesses = model(x[:, :-1].to(model.W_E.device)).argmax(-1).cpu()
        right += (guesses == x[:, 1:])[mask].sum().item()
        asked += mask.sum().item()
    right, asked = total(right, asked)
    return right / asked if asked else math.nan


def has_learned(data, state):
    """Whether a run on --data had learned all. state: of its data, as a checkpoint keeps it."""
    return data == ["abcdigits"] and state >= DONE_AFTER


def digits_of(numbers):
    """The digits of numbers of equal length, as characters. (n,) -> (n, digits)"""
    return np.array([list(str(n)) for n in numbers])
