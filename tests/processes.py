"""A stand-in for torchrun without its start-up time: forks of a process that has imported PyTorch.

    python -m tests.processes '[[2, ["--out", "two"]], [1, ["--resume", "--out", "two"]]]'

A job is a number of processes, the flags of train.py and, optionally, code that each process runs
first. Jobs run one after another.
"""
import json
import os
import socket
import sys

import torch

# Imported once, before the forks.
import torch._dynamo  # noqa: F401
import torch.distributed.checkpoint.state_dict  # noqa: F401
import torch.distributed.fsdp  # noqa: F401

import train


def fork_process(rank, processes, port, flags, code):
    """Fork a process that trains as one of several; return its ID."""
    pid = os.fork()
    if pid:
        return pid
    failed = 1
    try:
        if processes > 1:
            os.environ |= {"TORCHELASTIC_RUN_ID": "test", "RANK": str(rank),
                           "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes),
                           "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        exec(code, {})
        train.main(flags)
        if processes > 1:
            torch.distributed.destroy_process_group()
        sys.stdout.flush()
        failed = 0
    except BaseException as e:
        print(f"process {rank}: {e!r}", file=sys.stderr, flush=True)
    finally:
        os._exit(failed)


def main(jobs):
    torch.set_num_threads(1)
    failed = False
    for processes, flags, *code in jobs:
        with socket.create_server(("localhost", 0)) as free:
            port = free.getsockname()[1]
        pids = [fork_process(rank, processes, port, flags, "".join(code))
                for rank in range(processes)]
        if any([os.waitpid(pid, 0)[1] for pid in pids]):
            failed = True
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
