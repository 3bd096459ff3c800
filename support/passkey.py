"""Passkey: the prompts of experiments/passkey.py, and the documents that teach a model the task."""
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


def prompt_sizes(count_tokens):
    """Tokens of a prompt without fillers, and of each filler."""
    frame = count_tokens(TASK + NEEDLE.format(MOST) + QUESTION)
    return frame, count_tokens(FILLER * 2) - count_tokens(FILLER)  # a token may join two fillers


class PasskeyStream(Stream):
    """Endless passkey documents of T + 1 tokens, by number. part: 0 training, 1 validation.

    A document is a prompt with as many fillers as fit, and its answer; the rest of its tokens begin
    the next one. The key stands between any two sentences of the fillers, so that its distance
    from the question says little. Validation has all keys that are multiples of 7, training none.
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

    def count_tokens(self, text):
        return len(self.tokenizer.encode_ordinary(text))

    def __getitem__(self, n):
        rng = np.random.default_rng([self.seed, self.part, n])
        key = rng.integers(1, MOST, endpoint=True)
        while (key % 7 == 0) != bool(self.part):
            key = rng.integers(1, MOST, endpoint=True)
        before = rng.integers(len(self.sentences), endpoint=True)
        head, tail = "".join(self.sentences[:before]), "".join(self.sentences[before:])
        text = f"{TASK}{head}{NEEDLE.format(key)}{tail}{QUESTION} {key}"
        tokens = [*self.tokenizer.encode_ordinary(text), self.tokenizer.eot_token,
                  *self.tokenizer.encode_ordinary(TASK + FILLER)]
        return np.array(tokens[: self.T + 1])

    def needles(self, document):
        """True where the target is a digit of the answer. (T + 1,) -> (T,)"""
        text, starts = self.tokenizer.decode_with_offsets(document.tolist())
        answer = re.search(re.escape(QUESTION) + r" (\d+)", text)
        ends = np.array([*starts[1:], len(text)])      # a token of GPT-2 is a blank and digits
        return ((answer.start(1) < ends) & (ends <= answer.end(1)))[1:]
