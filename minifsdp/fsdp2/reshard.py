"""What becomes of the full parameters after forward: freed, kept, or kept in parts by a few ranks.

The last is what an integer ``reshard_after_forward`` asks for, and it needs a smaller mesh. Eight ranks on the shard
axis and ``reshard_after_forward=4``: ranks 0 to 3 keep one copy between them after forward, ranks 4 to 7 another. As a
mesh with a line for each copy::

    0 1 2 3        axis 1: who keeps the other pieces
    4 5 6 7        axis 0: who keeps the same piece

Making groups is a collective and takes a while, so units share the mesh.

*In torch:* ``_get_post_forward_mesh_info``, once for each unit.

Spec: NEW-05, NEW-06, FS2-13.
"""

from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from minifsdp.engine.messages import message
from minifsdp.engine.unit import Unit


def choose_reshard(unit: Unit, choice: bool | int) -> int | None:
    """Sets what happens to the full parameters after forward.

    Returns:
        To how many ranks they shall be resharded, if not to all; the rest of that is the caller's.

    Raises:
        ValueError: a number that does not divide the ranks on the shard axis.
    """
    if not isinstance(choice, bool | int):
        raise ValueError(message("reshard-type", choice=choice))
    num_shards = unit.plan.mesh.num_shards
    if not isinstance(choice, bool) and (choice < 1 or num_shards % choice):
        raise ValueError(message("reshard-factor", choice=choice, num_shards=num_shards))
    # A smaller group of one rank is the whole on every rank: kept.
    frees = choice if isinstance(choice, bool) else choice == num_shards or choice > 1
    if unit.policy.resting is not None:
        # What rests right now is of this iteration, and nothing else would end that.
        unit.policy.resting.end()
    unit.choose(reshard_after_forward=frees, reshard_after_evaluation=frees, resting=None)
    if isinstance(choice, bool) or choice in (1, num_shards):
        return None
    if len(unit.plans) > 1:
        raise NotImplementedError(message("reshard-number-and-meshes", choice=choice))
    return choice


_made: dict[tuple[Any, ...], tuple[dist.ProcessGroup, DeviceMesh]] = {}


def smaller_mesh(mesh: DeviceMesh, size: int) -> DeviceMesh:
    """All ranks of ``mesh``, ``size`` neighbours on the last axis. Every rank of the world must call it."""
    key = (mesh.get_group(mesh.ndim - 1), tuple(mesh.mesh.flatten().tolist()), mesh.device_type, size)
    if key not in _made or _made[key][0] not in dist.distributed_c10d._world.pg_map:
        # Made never, or for groups that were destroyed since.
        made = _make(mesh, size)
        _made[key] = (made.get_group(1), made)
    return _made[key][1]


def _make(mesh: DeviceMesh, size: int) -> DeviceMesh:
    table = mesh.mesh.reshape(-1, size)
    # Parts of one large mesh can differ from rank to rank. A group must be made by the whole world all the same, also
    # by those who are not in it.
    everybody: list[list[list[int]]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everybody, table.tolist())
    replicate = _group_of({tuple(ranks) for copies in everybody for ranks in zip(*copies, strict=True)})
    shard = _group_of({tuple(ranks) for copies in everybody for ranks in copies})
    return DeviceMesh.from_group(
        [replicate, shard], mesh.device_type, mesh=table, mesh_dim_names=("replicate", "shard")
    )


def _group_of(groups: set[tuple[int, ...]]) -> dist.ProcessGroup:
    """Makes all of ``groups``, and returns the one that this rank is in."""
    made: dict[tuple[int, ...], dist.ProcessGroup] = {ranks: dist.new_group(list(ranks)) for ranks in sorted(groups)}
    return next(group for ranks, group in made.items() if dist.get_rank() in ranks)
