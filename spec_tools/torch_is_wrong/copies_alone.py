"""With a hybrid strategy and a shard group of one rank, replicas diverge.

Two ranks form two shard groups of one rank, so each rank has a replica of the whole model. torch switches to
``NO_SHARD`` with a warning. However, it reduces over the shard group of one rank, not over the replicas. The gradients
are divided by the number of replicas but never summed, so each rank trains a different model. The batches are 1 on
rank 0 and 2 on rank 1, and the mean of their gradients is 1.5.

With torch 2.13.0::

    gradients 0.5 and 1.0

With minifsdp::

    gradients 1.5 and 1.5

Spec: CTOR-18, HYB-05.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy


def main() -> str:
    alone, _ = dist.new_subgroups_by_enumeration([[0], [1]])
    model = FSDP(
        nn.Linear(1, 1, bias=False),
        process_group=(alone, dist.group.WORLD),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        device_id=torch.device("cpu"),
    )
    model(torch.full((1, 1), 1.0 + dist.get_rank())).sum().backward()
    gradients = [torch.zeros(1) for _ in range(2)]
    dist.all_gather(gradients, next(model.parameters()).grad.view(-1))
    return "gradients " + " and ".join(f"{float(one):.1f}" for one in gradients)
