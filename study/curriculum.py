"""Documents from which models learned the study's tasks, with help that ends when it has worked.

    python train.py --data study.curriculum.ABCDigits --steps 4800 --layers 4 --w-th 16 \\
        --lr 0.015625
    python train.py --data study.curriculum.Passkey --seq-len 512 --batch-size 4 --steps 6000 \\
        --layers 4 --w-th 8192 --lr 0.015625

ABCDigits has the documents of abcdigits.py. Passkey: a prompt has only one number to look up, and
few bytes around it are new, so for a long time a model would copy nothing. Three of four training
documents help. Such a document has the ends of prompts, one after another, each with its answer:
the key of the previous end or, one time in four, a new key. Half of the new keys follow a needle
that tells them. An end has at least the last 5 characters of its prompt, and at first at most 19,
which fit into any window. Once the loss shows that keys are copied, this limit grows to 0.8 T, and
the model learns to copy them from far away. Then the help ends: every key to look up is far away.
"""
import math
import re
import sys

import numpy as np

import abcdigits
from study.passkey import FILLER, MOST, NEEDLE, QUESTION, TASK, prompt_sizes


class Curriculum:
    """Counts documents since the loss has shown lookup. DONE_AFTER of them end the training.

    LOOKUP: a mean of the last 20 or so losses, in nats per token, that is not reached without it.
    state: the number of documents since then, and that mean.
    """
    state = 0, 1.0

    def observe(self, loss):
        """Count a step's documents, if the loss shows lookup or did so before."""
        since, mean = self.state
        mean += (float(loss) - mean) / 20
        if since > 0 or mean < self.LOOKUP:
            since += self.per_step
        self.state = since, mean
        return since >= self.DONE_AFTER


class ABCDigits(Curriculum, abcdigits.Documents):
    """The entropy of helping documents of 256 bytes is 0.34 nats per token if a letter's number
    costs only once, and 0.81 if it costs each time (computed at ee2a65c). Runs with lookup came
    below 0.58, and one without it stayed at 0.72 for a long time.
    """
    LOOKUP, DONE_AFTER = 0.6251, 12_000

    def __init__(self, args, tokenizer, part):
        super().__init__(args, tokenizer, part)
        self.per_step = args.batch_tokens // args.seq_len

    def learned(self, n):
        return self.state[0]


class Passkey(Curriculum):
    """A prompt with as many fillers as fit, and its answer; the next prompt fills up the document.

    The key may stand between any two sentences of the fillers, so its distance from the question
    says little. Validation has no help, and all keys that are multiples of 7; training has the
    other keys. While ends are short, a byte costs about 0.15 nats with lookup and 0.42 without
    (computed at ee2a65c).
    """
    LOOKUP = 0.3162
    HELPED, NEW = 0.75, 0.25                           # shares: of documents, of new keys in those
    NEAR, FAR = 19, 0.8                                # longest end: characters; at last, times T
    # Documents since the loss shows lookup: ends are longest, no document helps, training ends.
    GROWN_AFTER, HELPED_UNTIL, DONE_AFTER = 4_000, 6_500, 16_000

    def __init__(self, args, tokenizer, part):
        self.tokenizer, self.T, self.seed = tokenizer, args.seq_len, args.seed
        self.per_step = args.batch_tokens // args.seq_len
        self.part = 0 if part == "train" else 1
        frame, each = prompt_sizes(tokenizer)
        # The answer, end-of-text, and five more: GPT-2 has no token for some keys.
        frame += len(tokenizer.encode_ordinary(f" {MOST}")) + 6
        fillers = (self.T + 1 - frame) // each
        if fillers < 1:
            sys.exit(f"error: --seq-len {self.T}: a passkey document has at least "
                     f"{frame + each - 1} tokens: use 512")
        self.sentences = re.findall(r"[^.]*\. ", FILLER * fillers)
        keys = np.arange(1, MOST + 1)
        self.keys = keys[(keys % 7 == 0) == (part == "val")]
        self.prompt = FILLER * (self.T // len(FILLER)) + QUESTION

    def __len__(self):
        return 2**30

    def __getitem__(self, n):
        rng = np.random.default_rng([self.seed, self.part, n])
        helps = self.part == 0 and self.state[0] < self.HELPED_UNTIL
        if helps and rng.random() < self.HELPED:
            tokens, key = [], None
            while len(tokens) <= self.T:
                more, key = self.end(key, rng)
                tokens += more
            return np.array(tokens[: self.T + 1])
        key = rng.choice(self.keys)
        before = rng.integers(len(self.sentences), endpoint=True)
        head, tail = "".join(self.sentences[:before]), "".join(self.sentences[before:])
        text = f"{TASK}{head}{NEEDLE.format(key)}{tail}{QUESTION} {key}"
        tokens = [*self.tokenizer.encode_ordinary(text), self.tokenizer.eot_token,
                  *self.tokenizer.encode_ordinary(TASK + FILLER)]
        return np.array(tokens[: self.T + 1])

    draw = __getitem__

    def end(self, key, rng):
        """(tokens of an end of a prompt and its answer, its key), which is `key` or a new one."""
        said = ""
        if key is None or rng.random() < self.NEW:
            least = 10 ** rng.integers(5)              # each number of digits is as likely
            key = rng.integers(least, min(10 * least, MOST + 1))
            if key % 7 == 0:                           # those are held out
                key += 1
            if rng.random() < 0.5:
                said = NEEDLE.format(key)
        grown = min(self.state[0] / self.GROWN_AFTER, 1)
        longest = self.NEAR * (self.FAR * self.T / self.NEAR) ** grown
        # Lengths are as likely in each octave.
        length = int(math.exp(rng.uniform(math.log(5), math.log(longest))))
        return self.tokenizer.encode_ordinary(f"{said}{self.prompt[-length:]} {key}.\n"), key
