"""If two roots share their communication streams, the second backward fails.

``share_comm_ctx`` is for pipelines, where each stage is a root. The roots also share the list of units that ran in
forward. The last backward of one root clears the list, and the backward of the other root then indexes an empty list.

With torch 2.13.0::

    IndexError: list index out of range

With minifsdp::

    both have gradients: True

Spec: NEW-17.
"""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard, share_comm_ctx


def main() -> str:
    first, second = stage(), stage()
    share_comm_ctx([first, second])
    losses = [first(torch.ones(1, 4)).sum(), second(torch.ones(1, 4)).sum()]
    for loss in losses[::-1]:
        loss.backward()
    have = [p.grad is not None for root in (first, second) for p in root.parameters()]
    return f"both have gradients: {all(have)}"


def stage() -> nn.Module:
    return fully_shard(nn.Sequential(fully_shard(nn.Linear(4, 4)), fully_shard(nn.Linear(4, 4))))
