"""One step of train.py, as benchmarks time it: forward, backward, gradient norm, AdamW."""
import math
import time

import torch


def get_step(model, recipe, batch, T):
    """A function that makes a step on random tokens (batch, T + 1), and returns its seconds.

    recipe: that of baselines.recipe. The learning rate is a hundredth: nothing is to be learned.
    """
    device, n = model.W_E.device, model.config.vocab_size
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe["lr"] / 100, betas=(0.9, 0.95),
                                  weight_decay=recipe["weight_decay"], fused=True)

    def step():
        x = torch.randint(n, (batch, T + 1), device=device)
        began = time.perf_counter()
        loss = model.loss(x[:, :-1], x[:, 1:])
        loss.backward()
        loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe["clip"] or math.inf).item()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    return step
