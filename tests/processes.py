"""What torchrun does, without its start-up time: processes forked from one that has PyTorch.

    python -m tests.processes '[[2, ["--out", "two"]], [1, ["--resume", "--out", "two"]]]'

Each pair is a number of processes and the flags of train.py; one pair runs after the other.
"""
import json
import os
import socket
import sys

import torch
import torch.distributed.fsdp  # noqa: F401  (imported once, before the forks)

import train
from support.distributed import leave


def fork_process(rank, processes, port, flags):
    """The number of a new process that trains as one of several."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        if processes > 1:
            os.environ |= {"TORCHELASTIC_RUN_ID": "test", "RANK": str(rank),
                           "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes),
                           "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        train.main(flags)
        leave()
        sys.stdout.flush()
        code = 0
    except BaseException as e:
        print(f"process {rank}: {e!r}", file=sys.stderr, flush=True)
    finally:
        os._exit(code)


def main(jobs):
    torch.set_num_threads(1)
    for processes, flags in jobs:
        with socket.create_server(("localhost", 0)) as free:
            port = free.getsockname()[1]
        pids = [fork_process(rank, processes, port, flags) for rank in range(processes)]
        if any([os.waitpid(pid, 0)[1] for pid in pids]):
            sys.exit(1)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
