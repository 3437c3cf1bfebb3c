"""Two ranks, one of which exits in the middle of an all-gather. The other one prints the result of its wait.

torchrun --nproc-per-node 2 spec_tests/transport/wire_ends.py
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

from minifsdp.engine import collectives
from minifsdp.engine.mesh import Group

if __name__ == "__main__":
    # A forked process keeps the settings that its parent read, so read the environment again.
    dist.set_debug_level_from_env()
    dist.init_process_group("gloo")
    group = Group.of(dist.group.WORLD)
    output = torch.zeros(4)
    collectives.all_gather(group, output, torch.ones(2)).wait()
    print(f"rank {group.rank}: {output.tolist()}, {type(group.transport).__name__}")
    sys.stdout.flush()
    if group.rank == 1:
        os._exit(0)
    try:
        collectives.all_gather(group, output, torch.ones(2)).wait()
    except RuntimeError as error:
        print(f"rank 0: {type(error).__name__}")
    sys.stdout.flush()
    # Exit immediately. A normal exit would wait for the other rank again.
    os._exit(0)
