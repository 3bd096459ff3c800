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
    """Counts documents once the loss shows lookup. DONE_AFTER of them end the training.

    state: documents since then, and the level of the loss: 0 the least, 1 without lookup.
    losses() -> bounds on the loss with and without lookup, in nats per token.
    """
    state = 0, 1.0

    def observe(self, loss):
        """Count a step's documents, if the last 20 or so losses show lookup."""
        looked_up, level = self.state
        least, without = self.losses()
        level += ((float(loss) - least) / (without - least) - level) / 20
        if level < 0.6:                                # lookup is below 0.5, a plateau was at 0.8
            looked_up += self.per_step
        self.state = looked_up, level
        return looked_up >= self.DONE_AFTER


class ABCDigits(Curriculum, abcdigits.Documents):
    DONE_AFTER = 12_000

    def __init__(self, args, tokenizer, part):
        super().__init__(args, tokenizer, part)
        self.per_step = args.batch_tokens // args.seq_len
        line = "A=" + "1" * self.digits + "\n"
        self.lines = self.T / len(tokenizer.encode_ordinary(line))     # of a document, on average

    def learned(self, n):
        return self.state[0]

    def losses(self):
        """Each letter costs its entropy in both. With lookup only a new letter's number costs;
        without it every number does.
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


class Passkey(Curriculum):
    """A prompt with as many fillers as fit, and its answer; the next prompt fills up the document.

    The key may stand between any two sentences of the fillers, so its distance from the question
    says little. Validation has no help, and all keys that are multiples of 7; training has the
    other keys.
    """
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
        self.keys = keys[(keys % 7 == 0) == bool(self.part)]
        self.prompt = FILLER * (self.T // len(FILLER)) + QUESTION
        # The tokens from an end to the next one, on average, while all are short.
        rng, key, sizes = np.random.default_rng(0), None, []
        for _ in range(2_000):
            tokens, key = self.end(key, rng)
            sizes.append(len(tokens))
        self.spacing = np.mean(sizes).item()

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

    def losses(self):
        """Estimates while all ends are short. The place where an end begins costs in both. With
        lookup only a new key costs; without it every key does. A new one stands once or, after its
        needle, three times: twice on average. Documents without help count as free, and so does
        what kind of end comes.
        """
        place = math.log(self.NEAR - 5)
        counts = [min(10 * n, MOST + 1) - n for n in (1, 10, 100, 1_000, 10_000)]
        number = math.log(5) + np.mean(np.log(counts)).item()
        share = self.HELPED / self.spacing
        return share * (place + self.NEW * number), share * (place + (1 + self.NEW) * number)
