"""A hybrid strategy without process groups: each node holds one sharded copy.

::

    dist.init_process_group()                # torchrun, two nodes with two ranks each
    model = FSDP(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
    )
    for x in batches:
        model(x).sum().backward()            # rank 3 all-gathers from {2, 3} and averages with {1, 3}
        optimizer.step()
        optimizer.zero_grad()

Without this case, the program must create both groups itself, and pass them as ``process_group``.

The wrapper calls `node_groups` if it got no groups. All units that are wrapped one by one share a pair of groups.

*In torch:* ``_init_process_group_state_for_hybrid_shard``.

Spec: HYB-03.
"""

import os
import weakref
from typing import Any

import torch
import torch.distributed as dist

from minifsdp.engine.exchange import exists
from minifsdp.engine.mesh import default_group
from minifsdp.engine.messages import message


def node_size(device: torch.device) -> int:
    """Number of ranks on each node: torchrun's ``LOCAL_WORLD_SIZE``, or else the accelerators that this process sees.

    A process may see only its own accelerator, or more accelerators than there are ranks.
    """
    if "LOCAL_WORLD_SIZE" in os.environ:
        return int(os.environ["LOCAL_WORLD_SIZE"])
    return (
        dist.get_world_size()
        if device.type == "cpu"
        else int(torch.get_device_module(device).device_count())
    )


# One pair of groups for each default group and node size. Units that were wrapped one by one must share a pair.
# Creating a group is a collective, which should not be repeated for each of a hundred units. A default group that was
# destroyed leaves no entry.
_node_groups = weakref.WeakKeyDictionary[
    Any, dict[int, tuple[dist.ProcessGroup, dist.ProcessGroup]]
]()


def node_groups(device: torch.device) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """This rank's shard group (its node) and replicate group (equal positions on all nodes). Every rank must call it.

    Worked example, four ranks, two on each node: rank 3 gets ``(group of {2, 3}, group of {1, 3})``.

    Raises:
        ValueError: if the number of ranks is not a multiple of the ranks on one node.
    """
    world = default_group()
    num_ranks = dist.get_world_size()
    per_node = node_size(device)
    if num_ranks % per_node:
        raise ValueError(
            message("uneven-nodes", num_ranks=num_ranks, per_node=per_node)
        )
    made = _node_groups.setdefault(world, {})
    if per_node not in made or not all(map(exists, made[per_node])):
        nodes = [
            list(range(start, start + per_node))
            for start in range(0, num_ranks, per_node)
        ]
        shard, _ = dist.new_subgroups_by_enumeration(nodes)
        replicate, _ = dist.new_subgroups_by_enumeration(
            [list(ranks) for ranks in zip(*nodes, strict=True)]
        )
        made[per_node] = (shard, replicate)
    return made[per_node]
