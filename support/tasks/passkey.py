"""Passkey: the prompts of lab/passkey.py, and the documents that teach a model the task.

The curriculum. A prompt has only one number to look up, and few bytes around it are new, so for a
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

from support.cli import UsageError
from support.tasks.stream import Stream

TASK = ("There is an important info hidden inside a lot of irrelevant text. Find it and memorize "
        "them. I will quiz you about the important information there.\n")
FILLER = ("The grass is green. The sky is blue. The sun is yellow. Here we go. There and back "
          "again. ")
NEEDLE = "\nThe pass key is {0}. Remember it. {0} is the pass key.\n"
QUESTION = "\nWhat is the pass key? The pass key is"
MOST = 50_000                                          # the largest key; the smallest is 1
HELPED = 0.75                                          # share of training documents that help
NEW = 0.25                                             # share of new keys in those
NEAR, FAR = 19, 0.8                                    # longest end: characters; at last, times T

# Documents from the step whose loss shows lookup ..
GROWN_AFTER = 4_000                                    # .. until ends are longest
HELPED_UNTIL = 6_500                                   # .. until none helps
DONE_AFTER = 16_000                                    # .. until training ends


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
    next_command = "-m lab.passkey"

    def __init__(self, tokenizer, T, seed, part):
        super().__init__(tokenizer, T, seed, part, DONE_AFTER)
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
        if not self.part and self.looked_up < HELPED_UNTIL and rng.random() < HELPED:
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
        return NEAR * (FAR * self.T / NEAR) ** min(self.looked_up / GROWN_AFTER, 1)

    def end(self, key, rng):
        """(tokens of an end of a prompt and its answer, its key), which is `key` or a new one.

        Lengths are as likely in each octave.
        """
        said = ""
        if key is None or rng.random() < NEW:
            least = 10 ** rng.integers(5)              # each number of digits is as likely
            key = rng.integers(least, min(10 * least, MOST + 1))
            key += key % 7 == 0
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
        place = math.log(NEAR - 5)
        counts = [min(10 * n, MOST + 1) - n for n in (1, 10, 100, 1_000, 10_000)]
        number = math.log(5) + np.mean(np.log(counts)).item()
        share = HELPED / self.spacing
        return share * (place + NEW * number), share * (place + (1 + NEW) * number)

    def needles(self, document):
        """True where the target is a digit of the answer. (T + 1,) -> (T,)"""
        text, starts = self.tokenizer.decode_with_offsets(document.tolist())
        answer = re.search(re.escape(QUESTION) + r" (\d+)", text)
        if answer is None:
            return np.zeros(self.T, dtype=bool)
        ends = np.array([*starts[1:], len(text)])      # a token of GPT-2 is a blank and digits
        return ((answer.start(1) < ends) & (ends <= answer.end(1)))[1:]


def get_data(args, tokenizer):
    """(training, validation) documents of train.py's flags."""
    return [PasskeyStream(tokenizer, args.seq_len, args.seed, part) for part in (0, 1)]
