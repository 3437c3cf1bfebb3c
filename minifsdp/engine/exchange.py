"""Exchange of Python objects between ranks, for rare moments: before a state dict, at construction, in a failed check.

A training step sends tensors. Outside of it, ranks also compare facts: names, problems, checksums. `exchange` sends one
value of each rank to all ranks.

Worked example, four ranks with the shard groups (0 1) and (2 3), and a fact that only rank 3 has::

    exchange in the shard groups        2 and 3 have it
    exchange in the replicate groups    1 receives it from 3, and 0 from 2: all ranks have it

Two rounds in small groups reach every rank, so a hybrid strategy needs no group of all ranks.

*In torch:* ``torch.distributed.all_gather_object``, for one group.

Spec: SD-FULL-09, NEW-20, BATCH-02.
"""

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from minifsdp.engine import collectives
from minifsdp.engine.mesh import Group, MeshGroups, exists
from minifsdp.engine.messages import rank_of_this_process
from minifsdp.engine.precision import move

T = TypeVar("T")


def groups_of(meshes: Iterable[MeshGroups]) -> list[Group]:
    """The groups of all meshes without duplicates, shard groups first. Ranks with equal module trees get equal lists.

    Groups of a simulation are excluded.
    """
    chosen = list(meshes)
    groups = [mesh.shard for mesh in chosen] + [mesh.replicate for mesh in chosen]
    existing = dict.fromkeys(group for group in groups if group is not None and exists(group.process_group))
    # In a simulation, one process runs all ranks and nothing is sent.
    return [group for group in existing if dist.get_backend(group.process_group) != "fake"]


def exchange(groups: Sequence[Group], mine: T) -> dict[int, T]:
    """Exchanges one value per rank; returns all values by global rank. All ranks of the groups must call it.

    With several groups, each exchange includes the values received in the previous ones.
    """
    # A tensor of an accelerator would arrive on the accelerator with the same index, which belongs to another rank.
    known = {rank_of_this_process(): move(torch.device("cpu"), mine) if groups else mine}
    for group in groups:
        others: list[Any] = [None] * group.size
        collectives.call(dist.all_gather_object, group, others, known)
        for other in others:
            known.update(other)
    return dict(sorted(known.items()))
