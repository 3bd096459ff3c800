"""Passkey: the prompts of experiments/passkey.py, and the documents that teach a model the task."""
import math
import re

import numpy as np

from support.cli import UsageError
from support.stream import Stream

TASK = ("There is an important info hidden inside a lot of irrelevant text. Find it and memorize "
        "them. I will quiz you about the important information there.\n")
FILLER = ("The grass is green. The sky is blue. The sun is yellow. Here we go. There and back "
          "again. ")
NEEDLE = "\nThe pass key is {0}. Remember it. {0} is the pass key.\n"
QUESTION = "\nWhat is the pass key? The pass key is"
MOST = 50_000                                          # the largest key; the smallest is 1
HELPED = 0.75                                          # share of training documents that help
HELPED_UNTIL = 9_600                                   # documents until there are none of these
NEW = 0.25                                             # share of new keys in those
NEAR, FAR = 19, 0.8                                    # longest end at first; at last, times T
GROWS = 3_000, 7_000                                   # the documents between which it grows


def prompt_sizes(count_tokens):
    """Tokens of a prompt without fillers, and of each filler."""
    frame = count_tokens(TASK + NEEDLE.format(MOST) + QUESTION)
    return frame, count_tokens(FILLER * 2) - count_tokens(FILLER)  # a token may join two fillers


class PasskeyStream(Stream):
    """Endless passkey documents of T + 1 tokens, by number. part: 0 training, 1 validation.

    A document is a prompt with as many fillers as fit, and its answer; the rest of its tokens begin
    the next one. The key stands between any two sentences of the fillers, so that its distance
    from the question says little.

    A prompt has one number to look up, and few bytes around it are new, so a model would copy
    nothing for long. Three of four training documents help: they are ends of prompts, one after
    another, each with its answer: the key of the last one or, one in four, a new one, half of these
    after their needle. An end begins anywhere in its prompt. At first it has at most 19 characters,
    which are within any window; then it grows, and a model that copies keys from near learns to
    copy them from afar. Help ends after 9,600 documents: then every key to look up is far, and
    windows grow. Validation has no help, and all keys that are multiples of 7; training has the
    other keys.
    """

    def __init__(self, tokenizer, T, seed, part):
        self.tokenizer, self.T, self.seed, self.part = tokenizer, T, seed, part
        frame, each = prompt_sizes(self.count_tokens)
        # The answer, end-of-text, and five more: GPT-2 has no token for some keys.
        frame += self.count_tokens(f" {MOST}") + 6
        fillers = (T + 1 - frame) // each
        if fillers < 1:
            raise UsageError(f"--seq-len {T}: a passkey document has at least {frame + each - 1} "
                             "tokens: take 512")
        self.sentences = re.findall(r"[^.]*\. ", FILLER * fillers)
        keys = np.arange(1, MOST + 1)
        self.keys = keys[(keys % 7 == 0) == bool(part)]

    def count_tokens(self, text):
        return len(self.tokenizer.encode_ordinary(text))

    def __getitem__(self, n):
        rng = np.random.default_rng([self.seed, self.part, n])
        if not self.part and n < HELPED_UNTIL and rng.random() < HELPED:
            return np.array(self.ends(n, rng)[: self.T + 1])
        key = rng.choice(self.keys)
        before = rng.integers(len(self.sentences), endpoint=True)
        head, tail = "".join(self.sentences[:before]), "".join(self.sentences[before:])
        text = f"{TASK}{head}{NEEDLE.format(key)}{tail}{QUESTION} {key}"
        tokens = [*self.tokenizer.encode_ordinary(text), self.tokenizer.eot_token,
                  *self.tokenizer.encode_ordinary(TASK + FILLER)]
        return np.array(tokens[: self.T + 1])

    def longest_end(self, n):
        """Characters of the longest end of a prompt in the n-th document."""
        first, last = GROWS
        grown = min(max((n - first) / (last - first), 0), 1)
        return NEAR * (FAR * self.T / NEAR) ** grown

    def ends(self, n, rng):
        """Tokens of ends of prompts and their answers. Lengths are as likely in each octave."""
        prompt = FILLER * (self.T // len(FILLER)) + QUESTION
        shortest, longest = math.log(5), math.log(self.longest_end(n))
        tokens, key = [], None
        while len(tokens) <= self.T:
            if key is None or rng.random() < NEW:
                least = 10 ** rng.integers(5)          # each number of digits is as likely
                key = rng.integers(least, min(10 * least, MOST + 1))
                key += key % 7 == 0
                if rng.random() < 0.5:
                    tokens += self.tokenizer.encode_ordinary(NEEDLE.format(key))
            length = int(math.exp(rng.uniform(shortest, longest)))
            tokens += self.tokenizer.encode_ordinary(f"{prompt[-length:]} {key}.\n")
        return tokens

    def needles(self, document):
        """True where the target is a digit of the answer. (T + 1,) -> (T,)"""
        text, starts = self.tokenizer.decode_with_offsets(document.tolist())
        answer = re.search(re.escape(QUESTION) + r" (\d+)", text)
        if answer is None:
            return np.zeros(self.T, dtype=bool)
        ends = np.array([*starts[1:], len(text)])      # a token of GPT-2 is a blank and digits
        return ((answer.start(1) < ends) & (ends <= answer.end(1)))[1:]
