"""One process or many: `torchrun train.py ...` trains with PyTorch's FSDP2 on any number of GPUs.

Each process draws its own sequences. Groups of `shard` processes hold one copy of the weights,
gradients and moments between them, and gradients are averaged over all. Without torchrun there is
one process, number 0, and nothing is distributed. FSDP2 is imported where it is used: it
takes as long as the rest of PyTorch.
"""
import atexit
import os
import sys

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from support.cli import UsageError, rank


def join():
    """Join the processes that torchrun has started, if it has. Number 0 prints and writes."""
    if "TORCHELASTIC_RUN_ID" in os.environ and not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        atexit.register(leave)
        if rank():
            sys.stdout = open(os.devnull, "w")


def leave():
    """Part from the other processes."""
    if dist.is_initialized():
        dist.destroy_process_group()


def world():
    """The number of processes."""
    return dist.get_world_size() if dist.is_initialized() else 1


def own_device(name):
    """The name of this process's device: with several GPUs in a machine, its own."""
    return f"cuda:{os.environ['LOCAL_RANK']}" if name == "cuda" and dist.is_initialized() else name


def total(*values):
    """The sums of numbers over all processes."""
    x = torch.tensor(values, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(x)
    return x.tolist()


def wait():
    """Wait until all processes are here."""
    total(0)


def distribute(model, shard, device):
    """Leave each process its part of the model, in place. Raises UsageError for groups that differ.

    All processes must hold the same model before.
    """
    if world() % shard:
        raise UsageError(f"--shard {shard}: it must divide the number of processes, {world()}")
    if dist.is_initialized():
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

        mesh = init_device_mesh(device.type, (world() // shard, shard),
                                mesh_dim_names=("copy", "shard"))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        register_fsdp_forward_method(model, "loss")


def average_gradients(model, now):
    """Whether the next backward pass averages the gradients over the processes, or only adds."""
    if dist.is_initialized():
        model.set_requires_gradient_sync(now)


def recompute(layer):
    """Keep a layer's input only, and compute its activations again in backward. In place."""
    forward = layer.forward
    layer.forward = lambda *inputs: checkpoint(forward, *inputs, use_reentrant=False)


def whole(x):
    """A tensor put together from the parts of all processes, which must all take part."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def part(x):
    """What this process holds of a tensor."""
    return x.to_local() if hasattr(x, "to_local") else x


def gather(state):
    """A state_dict with whole tensors, in process 0's memory; all processes must take part."""
    if isinstance(state, dict):
        return {key: gather(value) for key, value in state.items()}
    if not hasattr(state, "full_tensor"):
        return state
    x = state.full_tensor()
    return x.cpu() if rank() == 0 else None


def part_like(x, p):
    """The part of the whole tensor x that this process holds of the parameter p."""
    if not hasattr(p, "placements"):
        return x
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(x.to(p.device), p.device_mesh, p.placements, src_data_rank=None)
