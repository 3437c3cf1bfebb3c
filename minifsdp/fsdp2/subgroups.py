"""The smaller groups that an integer ``reshard_after_forward`` needs.

Eight ranks on the shard axis and ``reshard_after_forward=4``: ranks 0 to 3 keep one copy between them after forward,
ranks 4 to 7 another. Making a group is a collective and takes a while, so units share the groups.

Spec: NEW-05.
"""

from __future__ import annotations

import torch.distributed as dist

from minifsdp.engine.mesh import Group

__all__ = ["subgroup_of"]

_made: dict[tuple[dist.ProcessGroup, int], dist.ProcessGroup] = {}


def subgroup_of(group: Group, size: int) -> dist.ProcessGroup:
    """The group of ``size`` neighbours in ``group`` that this rank belongs to. Every rank of the world must call it."""
    key = (group.process_group, size)
    if key not in _made or _made[key] not in dist.distributed_c10d._world.pg_map:
        _made[key] = _make(group, size)
    return _made[key]


def _make(group: Group, size: int) -> dist.ProcessGroup:
    # new_group must be called by the whole world for every group there is, also by those who are not in it.
    everybody: list[list[int]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everybody, list(group.ranks))
    rows = sorted({tuple(row[start : start + size]) for row in everybody for start in range(0, len(row), size)})
    mine: dist.ProcessGroup | None = None
    for row in rows:
        made = dist.new_group(list(row))
        if dist.get_rank() in row:
            mine = made
    assert mine is not None
    return mine
