"""One process or many: `torchrun train.py ...` trains with PyTorch's FSDP2 on any number of GPUs.

Each process draws its own sequences. Groups of `shard` processes hold one copy of the weights,
gradients and moments between them, and gradients are averaged over all. Without torchrun there is
one process, number 0, and nothing is distributed. FSDP2 and its checkpoints are imported where they
are used: they take as long as the rest of PyTorch.
"""
import atexit
import os
import signal
import sys
import threading
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed

from support.cli import UsageError, rank


def join():
    """Join the processes that torchrun has started, if it has. Number 0 prints and writes."""
    if "TORCHELASTIC_RUN_ID" in os.environ and not torch.distributed.is_initialized():
        backend = "gloo"
        if torch.cuda.is_available():
            backend = "cpu:gloo,cuda:nccl"
        torch.distributed.init_process_group(backend)
        atexit.register(leave_group)
        if rank() > 0:
            sys.stdout = open(os.devnull, "w")


def leave_group():
    """End the group of processes, if there is one."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def world():
    """The number of processes."""
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def total(value):
    """The sum of a number over all processes."""
    x = torch.tensor(value, dtype=torch.float64)
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(x)
    return x.item()


def mean(x):
    """The mean of a tensor over all processes, on its device."""
    if world() > 1:
        torch.distributed.all_reduce(x)
        x /= world()
    return x


def wait():
    """Wait until all processes are here."""
    total(0)


def leave():
    """End this process together with the others, if there are any.

    FSDP2 never releases its groups, and their threads may abort a process that ends by itself.
    """
    wait()
    if torch.distributed.is_initialized():
        sys.stdout.flush()
        os._exit(0)


@contextmanager
def stop_requests():
    """Inside `with stop_requests() as stop`, Ctrl-C, SIGTERM and SIGHUP append to the list `stop`.

    A second one ends the process at once, except under torchrun, which repeats signals itself.
    Afterwards the old handlers are restored. Only the main thread can set handlers.
    """
    stop, handlers = [], {}

    def note(sent, _):
        stop.append(sent)
        if not torch.distributed.is_initialized():
            signal.signal(sent, signal.SIG_DFL)

    if threading.current_thread() is threading.main_thread():
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            s = getattr(signal, name, None)            # Windows has no SIGHUP; nohup ignores it
            if s and (name != "SIGHUP" or signal.getsignal(s) is not signal.SIG_IGN):
                handlers[s] = signal.signal(s, note)
    try:
        yield stop
    finally:
        for s, handler in handlers.items():
            signal.signal(s, handler or signal.SIG_DFL)


def distribute(model, shard, device):
    """Give each group of `shard` processes a copy of the model to share, in place.

    All processes must hold the same model beforehand. Raises UsageError for unequal groups.
    """
    if world() % shard:
        raise UsageError(f"--shard {shard}: it must divide the number of processes, {world()}")
    if world() > 1:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

        mesh = init_device_mesh(device.type, (world() // shard, shard),
                                mesh_dim_names=("copy", "shard"))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        for name in ("loss", "relevance_maps"):
            register_fsdp_forward_method(model, name)


def draw(data, first, args, device):
    """This process's sequences, of those that all processes draw from number `first` on."""
    mine = range(first + rank() * args.batch_size, first + (rank() + 1) * args.batch_size)
    x = torch.from_numpy(np.stack([data.draw(n, args.seed) for n in mine]))
    # From pinned memory a GPU copies while it computes.
    if device.type == "cuda":
        x = x.pin_memory()
    return x.to(device, non_blocking=x.is_pinned())


def average_in_next_backward(model, now):
    """Let the next backward pass average the gradients over the processes, or only add them up."""
    if world() > 1:
        model.set_requires_gradient_sync(now)


def full(x):
    """A tensor put together from the shards of all processes, which must all take part."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def get_states(model, optimizer):
    """(weights, moments) as whole tensors in process 0's memory, by the names of the parameters.

    All processes must take part; the others get nothing. A parameter that has had no gradient has
    zeros for the moments that the others have; an optimizer may have none at all.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, moments = get_state_dict(model, optimizer, options=options)
    known = {key: x for state in moments.get("state", {}).values() for key, x in state.items()
             if torch.is_tensor(x)}
    if known:
        for name, W in weights.items():
            zeros = {key: x.new_zeros(W.shape if x.ndim else ()) for key, x in known.items()}
            moments["state"].setdefault(name, zeros)
    return weights, moments


def set_moments(model, optimizer, moments):
    """Give an optimizer the moments that get_states returned. It keeps its own rates and decays."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

    if not moments.get("state"):
        return                                         # plain SGD, say
    own = [{name: x for name, x in group.items() if name != "params"}
           for group in optimizer.param_groups]
    options = StateDictOptions(full_state_dict=True)
    set_optimizer_state_dict(model, optimizer, moments, options=options)
    for group, settings in zip(optimizer.param_groups, own):
        group.update(settings)
