"""Who shards with whom, and who replicates with whom.

All that is left of a sharding strategy, once the words are gone, is a table of ranks with two axes. The ranks of one
line are a *shard group*: they hold the pieces of one copy of the model and gather from each other. The ranks below each
other are a *replicate group*: they hold the same piece of different copies and average their gradients.

Worked example, four ranks::

    FULL_SHARD            HYBRID_SHARD, two nodes        NO_SHARD

    0 1 2 3               0 1    <- node 0               0
                          2 3    <- node 1               1
                                                         2
    one copy in           two copies in                  3
    four pieces           two pieces each                four copies, whole

In the middle rank 2 gathers from {2, 3} and averages with {0, 2}. The sum of a gradient over its shard group and then
over its replicate group is the sum over all four ranks, which is why two small collectives can do the work of a large
one.

A `Group` is one of these groups as this rank sees it. It keeps the answers that ``torch.distributed`` would look up
again in every call (size, own position, ranks), because the hot path asks for them in every unit.

*In torch:* FSDP1 keeps ``process_group`` and ``_inter_node_pg`` on its state, FSDP2 has ``FSDPMeshInfo`` and
``HSDPMeshInfo``; both are the table above.

Spec: CTOR-06, CTOR-14, SHARD-11, HYB-01 to HYB-08.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
import torch.distributed as dist

from minifsdp.engine.ledger import Chain, chain_of
from minifsdp.engine.messages import message

# Asked for each process group that is sharded over.
transports: list[Callable[[Any], Any]] = []
# Called when a process group is met.
watchers: list[Callable[[], None]] = []


@dataclass(frozen=True)
class Group:
    """Ranks that shard or replicate together, seen from this rank.

    Attributes:
        process_group: the ``torch.distributed`` group.
        size: number of ranks in it.
        rank: this process's position in it, from 0.
        ranks: the global ranks in it, in order of position.
    """

    process_group: dist.ProcessGroup
    size: int
    rank: int
    ranks: tuple[int, ...]

    @cached_property
    def transport(self) -> Any:
        """What gathers and reduce-scatters tensors of the CPU in the place of the process group, or ``None``."""
        return next(filter(None, (ask(self.process_group) for ask in transports)), None)

    @cached_property
    def chain(self) -> Chain:
        """The order of what this rank has issued in the process group."""
        chain = chain_of(self.process_group, self.ranks)
        chain.transport = self.transport
        return chain

    @classmethod
    def of(cls, process_group: dist.ProcessGroup) -> Group:
        """The group's facts, asked once. Nothing is communicated.

        Raises:
            ValueError: this process is not a member.
        """
        if not hasattr(process_group, "rank"):
            # What torch.distributed hands to a rank that is not in a new group is a number.
            raise _not_a_member("the given process group")
        rank, size = process_group.rank(), process_group.size()
        try:
            ranks = tuple(dist.get_process_group_ranks(process_group))
        except (KeyError, RuntimeError, ValueError):
            # A group that torch.distributed did not make, as simulations have; it knows no global ranks.
            ranks = tuple(range(size))
        if rank < 0:
            raise _not_a_member(f"the given process group {ranks}")
        _let_threads_finish_at_exit()
        for begin in watchers:
            begin()
        return cls(process_group, size, rank, ranks)


@cache
def _let_threads_finish_at_exit() -> None:
    """Has the process pause for a moment before Python shuts down.

    A collective of gloo is done for the caller a little before its thread lets go of the tensors, for which that thread
    needs Python's lock. Asked for while Python shuts down, the lock ends the thread, and C++ the whole process:
    ``terminate called without an active exception``, exit by SIGABRT, though all work was done. Nothing else waits for
    these threads, because caches of DTensor keep the group alive even after ``destroy_process_group``.
    """
    atexit.register(time.sleep, 0.05)


@dataclass(frozen=True)
class Mesh:
    """The table of ranks: this rank's two groups. ``None`` stands for a group of one.

    Attributes:
        shard: ranks that hold the other pieces of this copy; ``None`` when every rank holds everything.
        replicate: ranks that hold the same piece of other copies; ``None`` when there is one copy.
    """

    shard: Group | None
    replicate: Group | None

    @classmethod
    def sharded(cls, group: Group) -> Mesh:
        """One copy, in as many pieces as the group has ranks."""
        # A group of one is no group: with no other rank to gather from, nothing is sharded.
        return cls(group, None) if group.size > 1 else cls(None, None)

    @classmethod
    def replicated(cls, group: Group) -> Mesh:
        """As many whole copies as the group has ranks."""
        return cls(None, group if group.size > 1 else None)

    @classmethod
    def hybrid(cls, shard: Group, replicate: Group) -> Mesh:
        """Copies in pieces."""
        return cls(shard if shard.size > 1 else None, replicate if replicate.size > 1 else None)

    @property
    def num_shards(self) -> int:
        """Pieces that one copy is cut into."""
        return 1 if self.shard is None else self.shard.size

    @property
    def shard_index(self) -> int:
        """Which of the pieces this rank holds."""
        return 0 if self.shard is None else self.shard.rank

    @property
    def num_ranks(self) -> int:
        """All ranks of the table: a gradient is averaged over this many."""
        return self.num_shards * (1 if self.replicate is None else self.replicate.size)

    def covers(self, ranks: Iterable[int]) -> bool:
        """Whether a mean over the table is one over all of ``ranks``, as far as this rank's two groups tell."""
        known = {dist.get_rank()}
        for group in (self.shard, self.replicate):
            known |= set() if group is None else set(group.ranks)
        return self.num_ranks == dist.get_world_size() or known.issuperset(ranks)

    @property
    def is_first(self) -> bool:
        """Whether this is the first rank of the whole table, "rank 0" wherever one rank speaks for all."""
        return self.shard_index == 0 and (self.replicate is None or self.replicate.rank == 0)


def _not_a_member(group: str) -> ValueError:
    return ValueError(message("not-a-member", group=group))


def default_group(argument: str = "process_group") -> dist.ProcessGroup:
    """The default process group. ``argument`` is the caller's argument for another one.

    Raises:
        RuntimeError: there is none yet.
    """
    if not dist.is_initialized():
        raise RuntimeError(message("no-process-group", argument=argument))
    group = dist.group.WORLD
    assert group is not None
    return group


def node_size(device: torch.device) -> int:
    """Ranks on each node: accelerators of this machine, or ``LOCAL_WORLD_SIZE`` on the CPU (set by ``torchrun``)."""
    if device.type != "cpu":
        return int(torch.get_device_module(device).device_count())
    return int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))


# One pair of groups for each default group and node size: units that were wrapped one by one must share them, and
# making a group is a collective that should not be repeated for each of a hundred units.
_node_groups: dict[tuple[dist.ProcessGroup, int], tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}


def node_groups(device: torch.device) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """This rank's shard group (its node) and replicate group (equal positions on all nodes). Every rank must call it.

    Worked example, four ranks, two on each node: rank 3 gets ``(group of {2, 3}, group of {1, 3})``.

    Raises:
        ValueError: the number of ranks is no multiple of the ranks on one node.
    """
    world = default_group()
    num_ranks, per_node = dist.get_world_size(), node_size(device)
    if num_ranks % per_node:
        raise ValueError(message("uneven-nodes", num_ranks=num_ranks, per_node=per_node))
    key = (world, per_node)
    alive = dist.distributed_c10d._world.pg_map
    if key not in _node_groups or any(group not in alive for group in _node_groups[key]):
        for stale in [k for k in _node_groups if k[0] is not world]:
            del _node_groups[stale]
        nodes = [list(range(start, start + per_node)) for start in range(0, num_ranks, per_node)]
        shard, _ = dist.new_subgroups_by_enumeration(nodes)
        replicate, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in zip(*nodes, strict=True)])
        _node_groups[key] = (shard, replicate)
    return _node_groups[key]
