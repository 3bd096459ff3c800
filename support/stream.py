"""The documents that a model learns ABCDigits from: a stream that becomes the task step by step."""
import math
import re

import numpy as np
import torch

from support.cli import UsageError
from support.distributed import total

HELPED = 0.5                                           # share of documents with help at first
OWN = 0.9                                              # share of own numbers, or digits, in those
OWN_UNTIL = 1_500                                      # documents looked up until there are none
FLAT_AFTER = 8_000                                     # documents looked up until b is 1.1
DONE_AFTER = 12_000                                    # documents looked up until training ends


class Data:
    """What training draws from: data[n] is a sequence of T + 1 tokens, of text or of a stream.

    draw(n, seed) is the n-th in training: random access, so that a resumed run sees the same ones.
    spread(n) has the numbers of n sequences.
    """
    learned = False                                    # whether training may end early

    def observe(self, loss, documents):
        """Told of each step's loss."""

    def state(self):
        """What a checkpoint keeps besides the number of drawn sequences."""
        return ()

    def load(self, state):
        """Take the state of a checkpoint."""

    def extra_columns(self, model, batches):
        """More columns of an evaluation. batches: of `distributed.batches`"""
        return {}


class Stream(Data):
    """Endless documents, by number, of a task that needs lookup. They change as a model learns it.

    needles(document) is True where a target is to be looked up. (T + 1,) -> (T,)
    losses() are the least possible loss, and the least without lookup, in nats per token.
    """

    def __init__(self, done_after):
        self.done_after = done_after                   # documents looked up until training ends
        self.looked_up = 0                             # documents since the loss shows lookup
        self.level = 1.0                               # of the loss: 0 the least, 1 without lookup

    def __str__(self):
        return "an endless stream"

    def spread(self, n):
        """The numbers of n documents."""
        return range(n)

    def draw(self, n, seed):
        """The n-th document."""
        return self[n]

    def observe(self, loss, documents):
        """Count the documents of a step, if about 20 losses (nats per token) show lookup."""
        least, without = self.losses()
        self.level += ((loss - least) / (without - least) - self.level) / 20
        if self.level < 0.6:                           # lookup is below 0.5, a plateau was at 0.8
            self.looked_up += documents

    @property
    def learned(self):
        """Whether the model has learned the task, and seen enough documents since."""
        return self.looked_up >= self.done_after

    def state(self):
        return self.looked_up, self.level

    def load(self, state):
        self.looked_up, self.level = state

    @torch.no_grad()
    def extra_columns(self, model, batches):
        """The share of right guesses among the needles of documents; NaN where they have none.

        batches: (documents, how many count)
        """
        right = asked = 0
        for x, count in batches:
            mask = torch.from_numpy(np.stack([self.needles(document) for document in x.numpy()]))
            mask[count:] = False
            guesses = model(x[:, :-1].to(model.W_E.device)).argmax(-1).cpu()
            right += (guesses == x[:, 1:])[mask].sum().item()
            asked += mask.sum().item()
        right, asked = total(right, asked)
        return {"needle": right / asked if asked else math.nan}


class ABCDigitsStream(Stream):
    """Endless ABCDigits documents of T + 1 tokens, by number. part: 0 training, 1 validation.

    A document is lines LETTER=NUMBER; each letter has one random number per document. A line's
    letter is drawn with the weights b^0 .. b^25, whose order is new in each document.

    At first b is 2, so a few letters fill a document, and half of the documents help: there each
    letter has its own number, the same in all of them. In one half of these documents nine of ten
    numbers are own, in the other nine of ten digits, each drawn separately. To predict them a model
    must bring the letter to each of its digits; that is just what lookup needs, which all other
    numbers require. When the loss shows lookup, help soon ends, and b slowly falls to 1.1: in the
    end a quarter of the lines ask, as the benchmark does, about a letter seen once before.
    Validation is like the end. After some more documents of that kind the model has `learned`.
    """

    def __init__(self, tokenizer, T, digits, seed, part):
        if not 2 <= digits <= 18:
            raise UsageError(f"--digits {digits}: a number has 2 to 18")
        super().__init__(DONE_AFTER)
        self.tokenizer, self.T, self.digits = tokenizer, T, digits
        self.seed, self.part = seed, part
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
        """The least possible loss, and the least without lookup, in nats per token.

        Both pay for the letters. The first pays for the numbers of new letters, the second for all.
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
