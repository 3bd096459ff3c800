"""Endless documents to train on, from which a model learns to look up: --data abcdigits, passkey.

train.py draws from them in place of a text. Read it to learn how such a model was taught. Each is a
curriculum, whose help ends once the loss shows lookup.

ABCDigits. The letter of a line is drawn with weights b^0 .. b^25, whose order is new in each
document. At first b is 2, so a few letters fill a document, and half of the documents help. There
each letter has a number of its own, the same in all documents. In one half of these, nine of ten
numbers are such own numbers; in the other half nine of ten digits are, each drawn separately. To
predict them a model must bring the letter to each of its digits, which is just what lookup needs.
All other numbers require lookup.

Once the loss shows lookup, the help soon ends, and b slowly falls to 1.1. In the end a quarter of
the lines ask, as the benchmark does, about a letter that was seen just once before. The validation
documents are like those at the end. Training ends 12,000 documents after the loss shows lookup.

Passkey. A prompt has only one number to look up, and few bytes around it are new, so for a
long time a model would copy nothing. Three of four training documents help. Such a document has the
ends of prompts, one after another, each with its answer: the key of the previous end or, one time
in four, a new key. Half of the new keys follow a needle that tells them. An end has at least the
last 5 characters of its prompt, and at first at most 19, which fit into any window. Once the loss
shows that keys are copied, this limit grows to 0.8 T, and the model learns to copy them from far
away. Then the help ends: every key to look up is far away, and windows grow. Training ends 16,000
documents after the loss shows lookup.
"""
import math
import re

import numpy as np
import torch

from support.cli import UsageError
from support.data import require_text


class Stream:
    """Endless documents of T + 1 tokens, by number, of a task that needs lookup.

    It has the attributes of Sequences in support/data.py.

    part: 0 training, 1 validation. Training documents change as a model learns the task.
    needles(document) is True where a target is to be looked up. (T + 1,) -> (T,)
    losses() -> bounds on the loss with and without lookup, in nats per token.
    """
    corpus = ""                                        # which task: documents are made, not read

    def __init__(self, tokenizer, T, seed, part, done_after):
        self.tokenizer, self.T, self.seed, self.part = tokenizer, T, seed, part
        self.done_after = done_after                   # looked_up at the end of training
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

    def observe(self, loss, n):
        """Count a step's n documents, if the last 20 or so losses (nats per token) show lookup.

        Returns whether the model has learned the task, and seen enough documents since.
        """
        least, without = self.losses()
        self.level += ((float(loss) - least) / (without - least) - self.level) / 20
        if self.level < 0.6:                           # lookup is below 0.5, a plateau was at 0.8
            self.looked_up += n
        return self.looked_up >= self.done_after

    @property
    def state(self):
        """What a checkpoint keeps besides the number of drawn documents."""
        return self.looked_up, self.level

    @state.setter
    def state(self, state):
        self.looked_up, self.level = state

    @torch.no_grad()
    def extra_columns(self, model, batches):
        """The share of right guesses among the needles of documents; NaN where they have none.

        batches: tensors of documents (B, T + 1)
        """
        right = asked = 0
        for x in batches:
            mask = torch.from_numpy(np.stack([self.needles(document) for document in x.numpy()]))
            guesses = model(x[:, :-1].to(model.W_E.device)).argmax(-1).cpu()
            right += (guesses == x[:, 1:])[mask].sum().item()
            asked += mask.sum().item()
        return {"needle": right / asked if asked else math.nan}


# ------------------------------------------------------------------------------- ABCDigits

class ABCDigitsStream(Stream):
    """Lines LETTER=NUMBER; each letter has one random number per document."""
    corpus = "documents of abcdigits"
    next_command = "-m abcdigits"
    HELPED = 0.5                                       # share of documents with help at first
    OWN = 0.9                                          # share of own numbers or digits in these

    # Documents from the step whose loss shows lookup ..
    OWN_UNTIL = 1_500                                  # .. until none helps
    FLAT_AFTER = 8_000                                 # .. until b is 1.1
    DONE_AFTER = 12_000                                # .. until training ends

    def __init__(self, tokenizer, T, digits, seed, part):
        if not 2 <= digits <= 18:
            raise UsageError(f"--digits {digits}: use 2 to 18")
        super().__init__(tokenizer, T, seed, part, self.DONE_AFTER)
        self.digits = digits
        line = "A=" + "1" * digits + "\n"
        self.lines = T / len(tokenizer.encode_ordinary(line))      # of a document, on average
        self.low, self.high = 10 ** (digits - 1), 10**digits       # numbers, high excluded
        own = np.random.default_rng([seed, 2]).integers(self.low, self.high, 26)
        self.own = digits_of(own)

    @property
    def base(self):
        """b, the ratio of the weights of two letters adjacent in rank."""
        return 1.1 if self.part else max(2 - 0.9 * self.looked_up / self.FLAT_AFTER, 1.1)

    @property
    def helped(self):
        """The share of documents where letters have their own numbers."""
        return 0.0 if self.part else self.HELPED * max(1 - self.looked_up / self.OWN_UNTIL, 0.0)

    def losses(self):
        """Bounds on the loss with and without lookup, in nats per token.

        Each letter costs its entropy in both. With lookup only a new letter's number costs; without
        it every number does.
        """
        p = self.base ** np.arange(26) / np.sum(self.base ** np.arange(26))
        letters = -self.lines * np.sum(p * np.log(p)).item()
        new = np.sum(1 - (1 - p) ** self.lines).item()
        number = self.helped * self.nats(self.OWN) + (1 - self.helped) * self.nats(0)
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
        share = self.OWN if rng.random() < self.helped else 0.0
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


# --------------------------------------------------------------------------------- passkey

TASK = ("There is an important info hidden inside a lot of irrelevant text. Find it and memorize "
        "them. I will quiz you about the important information there.\n")
FILLER = ("The grass is green. The sky is blue. The sun is yellow. Here we go. There and back "
          "again. ")
NEEDLE = "\nThe pass key is {0}. Remember it. {0} is the pass key.\n"
QUESTION = "\nWhat is the pass key? The pass key is"
MOST = 50_000                                          # the largest key; the smallest is 1


def prompt_sizes(tokenizer):
    """Tokens of a prompt without fillers, and of each filler; a token may join two fillers."""
    texts = TASK + NEEDLE.format(MOST) + QUESTION, FILLER, FILLER * 2
    frame, one, two = (len(tokenizer.encode_ordinary(text)) for text in texts)
    return frame, two - one


class PasskeyStream(Stream):
    """A prompt with as many fillers as fit, and its answer; the next prompt fills up the document.

    The key may stand between any two sentences of the fillers, so its distance from the question
    says little. Validation has no help, and all keys that are multiples of 7; training has the
    other keys.
    """
    corpus = "documents of passkey"
    next_command = "-m lab.passkey"
    HELPED = 0.75                                      # share of training documents that help
    NEW = 0.25                                         # share of new keys in those
    NEAR, FAR = 19, 0.8                                # longest end: characters; at last, times T

    # Documents from the step whose loss shows lookup ..
    GROWN_AFTER = 4_000                                # .. until ends are longest
    HELPED_UNTIL = 6_500                               # .. until none helps
    DONE_AFTER = 16_000                                # .. until training ends

    def __init__(self, tokenizer, T, seed, part):
        super().__init__(tokenizer, T, seed, part, self.DONE_AFTER)
        frame, each = prompt_sizes(tokenizer)
        # The answer, end-of-text, and five more: GPT-2 has no token for some keys.
        frame += len(tokenizer.encode_ordinary(f" {MOST}")) + 6
        fillers = (T + 1 - frame) // each
        if fillers < 1:
            raise UsageError(f"--seq-len {T}: a passkey document has at least {frame + each - 1} "
                             "tokens: use 512")
        self.sentences = re.findall(r"[^.]*\. ", FILLER * fillers)
        keys = np.arange(1, MOST + 1)
        self.keys = keys[(keys % 7 == 0) == bool(part)]
        self.prompt = FILLER * (T // len(FILLER)) + QUESTION
        # The tokens from an end to the next one, on average, while all are short.
        rng, key, sizes = np.random.default_rng(0), None, []
        for _ in range(2_000):
            tokens, key = self.end(key, rng)
            sizes.append(len(tokens))
        self.spacing = np.mean(sizes).item()

    def __getitem__(self, n):
        rng = np.random.default_rng([self.seed, self.part, n])
        if not self.part and self.looked_up < self.HELPED_UNTIL and rng.random() < self.HELPED:
            return np.array(self.ends(rng)[: self.T + 1])
        key = rng.choice(self.keys)
        before = rng.integers(len(self.sentences), endpoint=True)
        head, tail = "".join(self.sentences[:before]), "".join(self.sentences[before:])
        text = f"{TASK}{head}{NEEDLE.format(key)}{tail}{QUESTION} {key}"
        tokens = [*self.tokenizer.encode_ordinary(text), self.tokenizer.eot_token,
                  *self.tokenizer.encode_ordinary(TASK + FILLER)]
        return np.array(tokens[: self.T + 1])

    @property
    def longest_end(self):
        """Characters of the longest end of a prompt."""
        grown = min(self.looked_up / self.GROWN_AFTER, 1)
        return self.NEAR * (self.FAR * self.T / self.NEAR) ** grown

    def end(self, key, rng):
        """(tokens of an end of a prompt and its answer, its key), which is `key` or a new one.

        Lengths are as likely in each octave.
        """
        said = ""
        if key is None or rng.random() < self.NEW:
            least = 10 ** rng.integers(5)              # each number of digits is as likely
            key = rng.integers(least, min(10 * least, MOST + 1))
            if key % 7 == 0:                           # those are held out
                key += 1
            if rng.random() < 0.5:
                said = NEEDLE.format(key)
        length = int(math.exp(rng.uniform(math.log(5), math.log(self.longest_end))))
        return self.tokenizer.encode_ordinary(f"{said}{self.prompt[-length:]} {key}.\n"), key

    def ends(self, rng):
        """Tokens of ends of prompts and their answers, more than T."""
        tokens, key = [], None
        while len(tokens) <= self.T:
            more, key = self.end(key, rng)
            tokens += more
        return tokens

    def losses(self):
        """Estimates of the loss with and without lookup while all ends are short, nats per token.

        The place where an end begins costs in both. With lookup only a new key costs; without it
        every key does. A new one stands once or, after its needle, three times: twice on average.
        Documents without help count as free, and so does what kind of end comes.
        """
        place = math.log(self.NEAR - 5)
        counts = [min(10 * n, MOST + 1) - n for n in (1, 10, 100, 1_000, 10_000)]
        number = math.log(5) + np.mean(np.log(counts)).item()
        share = self.HELPED / self.spacing
        return share * (place + self.NEW * number), share * (place + (1 + self.NEW) * number)

    def needles(self, document):
        """True where the target is a digit of the answer. (T + 1,) -> (T,)"""
        text, starts = self.tokenizer.decode_with_offsets(document.tolist())
        answer = re.search(re.escape(QUESTION) + r" (\d+)", text)
        if answer is None:
            return np.zeros(self.T, dtype=bool)
        ends = np.array([*starts[1:], len(text)])      # a token of GPT-2 is a blank and digits
        return ((answer.start(1) < ends) & (ends <= answer.end(1)))[1:]


def get_documents(args, tokenizer):
    """(training, validation) documents of train.py's flags."""
    if args.val:
        raise UsageError(f"--val is for text: --data {args.data[0]} makes its own documents")
    require_text(tokenizer, f"--data {args.data[0]}")
    if args.data == ["abcdigits"]:
        return [ABCDigitsStream(tokenizer, args.seq_len, args.digits, args.seed, part)
                for part in (0, 1)]
    return [PasskeyStream(tokenizer, args.seq_len, args.seed, part) for part in (0, 1)]
