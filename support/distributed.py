"""One process or many: `torchrun train.py ...` trains with PyTorch's FSDP2 on any number of GPUs.

Each process draws its own sequences. All of them hold one copy of the weights, gradients and
moments between them, and gradients are averaged over all. Without torchrun there is one process,
number 0, and nothing is distributed. FSDP2 and its checkpoints are imported where they are used:
they take as long as the rest of PyTorch.

On a laptop you need not read this: what train.py calls here then does nothing.
"""
import atexit
import os
import sys
from contextlib import contextmanager

import torch
import torch.distributed

from support.cli import leave, rank


@contextmanager
def joined():
    """Inside, the processes that torchrun has started work together. Number 0 prints and writes.

    Outside torchrun this does nothing.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ or torch.distributed.is_initialized():
        yield
        return
    backend = "gloo"
    if torch.cuda.is_available():
        backend = "cpu:gloo,cuda:nccl"
    torch.distributed.init_process_group(backend)
    atexit.register(leave_group)
    if rank() > 0:
        sys.stdout = open(os.devnull, "w")
    yield
    wait()
    leave(0)


def leave_group():
    """End the group of processes, if there is one."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def world():
    """The number of processes."""
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def my_share(numbers):
    """This process's share of a step's sequences, a range."""
    return numbers[rank() :: world()]


def total(value):
    """The sum of a number over all processes, which wait for each other here."""
    x = torch.tensor(value, dtype=torch.float64)
    if world() > 1:
        torch.distributed.all_reduce(x)
    return x.item()


def wait():
    """Wait until all processes are here."""
    total(0)


def mean(x):
    """The mean of a tensor over all processes, on its device."""
    if world() > 1:
        torch.distributed.all_reduce(x)
        x /= world()
    return x


def full(x):
    """A tensor put together from the shards of all processes, which must all take part."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def shard(model):
    """Let several processes hold one copy of a model between them, in place.

    All must hold the same model beforehand.
    """
    if world() == 1:
        return
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    mesh = init_device_mesh(model.W_E.device.type, (world(),))
    for part in (*model.layers, model):
        fully_shard(part, mesh=mesh)
    for name in ("loss", "relevance_maps"):
        register_fsdp_forward_method(model, name)


def average_in_next_backward(model, now):
    """Let the next backward pass average the gradients over the processes, or only add them up."""
    if world() > 1:
        model.set_requires_gradient_sync(now)
