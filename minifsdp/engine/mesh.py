"""Shard groups and replicate groups.

Every sharding strategy is a 2-D arrangement of ranks: (replicate, shard). The ranks of one row are a *shard group*:
they hold the shards of one copy of the model and all-gather from each other. The ranks of one column are a *replicate
group*: they hold the same shard of different copies and average their gradients.

Worked example, four ranks::

    FULL_SHARD            HYBRID_SHARD, two nodes        NO_SHARD

    0 1 2 3               0 1    <- node 0               0
                          2 3    <- node 1               1
                                                         2
    one copy in           two copies in                  3
    four shards           two shards each                four unsharded copies

With HYBRID_SHARD, rank 2 all-gathers from {2, 3} and averages with {0, 2}. The sum of a gradient over its shard group
and then over its replicate group is the sum over all four ranks, so two small collectives can replace a large one.

A `Group` is one of these groups as seen from this rank. It caches the size, the rank and the ranks of the group,
because ``torch.distributed`` looks them up again in every call, and every unit needs them in each step.

*In torch:* FSDP1 keeps ``process_group`` and ``_inter_node_pg`` on its state, FSDP2 has ``FSDPMeshInfo`` and
``HSDPMeshInfo``; both describe the same arrangement.

Spec: CTOR-06, CTOR-14, SHARD-11, HYB-01 to HYB-08.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch.distributed as dist

from minifsdp.engine.events import events
from minifsdp.engine.messages import message


@dataclass(frozen=True)
class Group:
    """A shard group or replicate group, seen from this rank.

    Attributes:
        process_group: the ``torch.distributed`` group.
        size: number of ranks in it.
        rank: this process's position in it, from 0.
        ranks: the global ranks of its members, in order of position.
        notes: values that an observer keeps with this group.
        sender: an object of a case that sends instead of the process group and the transport, or ``None``. It has
            methods with the names of the process group's.
    """

    process_group: dist.ProcessGroup
    size: int
    rank: int
    ranks: tuple[int, ...]
    notes: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    sender: Any = None

    @cached_property
    def transport(self) -> Any:
        """An object that sends CPU tensors instead of the process group, see ``events.py``, or ``None``."""
        return events.transport(self.process_group)

    @classmethod
    def of(cls, process_group: dist.ProcessGroup) -> Group:
        """Reads the properties of the process group once. Does not communicate.

        Args:
            process_group: the group.

        Raises:
            ValueError: if this process is not a member.
        """
        if not hasattr(process_group, "rank"):
            # For a group that this rank is not in, torch.distributed returns a number instead of a group.
            raise ValueError(message("not-a-member", group="the given process group"))
        rank = process_group.rank()
        size = process_group.size()
        try:
            ranks = tuple(dist.get_process_group_ranks(process_group))
        except (KeyError, RuntimeError, ValueError):
            # A group that torch.distributed did not create, for example a simulated group, has no global ranks.
            ranks = tuple(range(size))
        if rank < 0:
            raise ValueError(
                message("not-a-member", group=f"the given process group {ranks}")
            )
        return cls(process_group, size, rank, ranks)


@dataclass(frozen=True)
class MeshGroups:
    """The shard group and the replicate group of this rank. ``None`` represents a group of one rank.

    Attributes:
        shard: ranks that hold the other shards of this copy; ``None`` if every rank has all values.
        replicate: ranks that hold the same shard of other copies; ``None`` if there is one copy.
    """

    shard: Group | None
    replicate: Group | None

    @classmethod
    def sharded(cls, group: Group) -> MeshGroups:
        """One copy, with one shard for each rank of the group."""
        # A group of one rank becomes ``None``: without another rank, nothing is sharded.
        return cls(group, None) if group.size > 1 else cls(None, None)

    @classmethod
    def replicated(cls, group: Group) -> MeshGroups:
        """One unsharded copy for each rank of the group."""
        return cls(None, group if group.size > 1 else None)

    @classmethod
    def hybrid(cls, shard: Group, replicate: Group) -> MeshGroups:
        """Several sharded copies."""
        return cls(
            shard if shard.size > 1 else None, replicate if replicate.size > 1 else None
        )

    @property
    def num_shards(self) -> int:
        """Number of shards of one copy."""
        return 1 if self.shard is None else self.shard.size

    @property
    def shard_index(self) -> int:
        """The index of this rank's shard."""
        return 0 if self.shard is None else self.shard.rank

    @property
    def num_ranks(self) -> int:
        """Number of ranks in both dimensions. A gradient is averaged over this number of ranks."""
        return self.num_shards * (1 if self.replicate is None else self.replicate.size)

    @property
    def is_first(self) -> bool:
        """Whether this is the first rank of the mesh, which takes the role of rank 0 where one rank acts for all."""
        return self.shard_index == 0 and (
            self.replicate is None or self.replicate.rank == 0
        )


def default_group(argument: str = "process_group") -> dist.ProcessGroup:
    """The default process group. ``argument`` is the name of the caller's argument for another group.

    Raises:
        RuntimeError: if there is no default process group yet.
    """
    if not dist.is_initialized():
        raise RuntimeError(message("no-process-group", argument=argument))
    group = dist.group.WORLD
    assert group is not None
    return group
