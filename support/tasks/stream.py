"""What the streams of support/tasks/ have in common: when lookup shows, and when training ends."""
import math

import numpy as np
import torch


class Stream:
    """Endless documents of T + 1 tokens, by number, of a task that needs lookup.

    part: 0 training, 1 validation. Training documents change as a model learns the task.
    needles(document) is True where a target is to be looked up. (T + 1,) -> (T,)
    losses() -> bounds on the loss with and without lookup, in nats per token.
    """
    files = ()                                         # it is made, not read

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

    def observe(self, loss, documents):
        """Count a step's documents, if the last 20 or so losses (nats per token) show lookup."""
        least, without = self.losses()
        self.level += ((loss - least) / (without - least) - self.level) / 20
        if self.level < 0.6:                           # lookup is below 0.5, a plateau was at 0.8
            self.looked_up += documents

    @property
    def learned(self):
        """Whether the model has learned the task, and seen enough documents since."""
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
