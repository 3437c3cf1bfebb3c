"""Pairs of ranks that all-gather and then exit immediately, while no thread releases the GIL on its own.

    python -m spec_tests.transport.leave 10

Prints the nonzero exit statuses of the ranks, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile

import torch

# Import this before the fork. Otherwise the first fully_shard imports it, which takes a second per rank.
import torch._dynamo
import torch.distributed as dist
from torch import nn

from spec_tests.subject import fully_shard


def _gather_and_leave(rank: int, store: str) -> nn.Module:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model = fully_shard(nn.Linear(4, 4))
    # By default, the thread that releases the tensors gets the GIL within 5 ms, usually before Python shuts down.
    sys.setswitchinterval(60)
    for _ in range(20):
        model.unshard()
        model.reshard()
    dist.destroy_process_group()
    return model


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    folder, statuses = tempfile.mkdtemp(), []
    # Do not call gc.freeze(). Each rank would exit a second earlier, but Python would release too few objects for the
    # crash to happen.
    for pair in range(int(sys.argv[1])):
        children = []
        for place in range(2):
            child = os.fork()
            if child == 0:
                kept = _gather_and_leave(place, f"{folder}/{pair}")
                sys.exit(0)
            children.append(child)
        statuses += [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    print(json.dumps([status for status in statuses if status != 0]))
