"""Resharding after forward: free the unsharded parameters, keep them, or reshard to a smaller mesh.

An integer ``reshard_after_forward`` reshards to a smaller mesh. Example: eight ranks in the shard dimension and
``reshard_after_forward=4``. After forward, ranks 0 to 3 hold one sharded copy of the parameters, ranks 4 to 7 another.
The mesh has one row for each copy::

    0 1 2 3        dim 1: ranks with the other shards of the same copy
    4 5 6 7        dim 0: ranks with the same shard

Creating process groups is a collective and slow, so all units share the mesh.

*In torch:* ``_get_post_forward_mesh_info``, once for each unit.

Spec: NEW-05, NEW-06, FS2-13.
"""

from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from minifsdp.engine.messages import message
from minifsdp.engine.unit import Unit


def choose_reshard(unit: Unit, choice: bool | int) -> int | None:
    """Sets what happens to the unsharded parameters after forward.

    Returns:
        The size of the smaller mesh to reshard to, which the caller must set up; ``None`` if there is none.

    Raises:
        ValueError: if ``choice`` is an integer that does not divide the number of ranks in the shard dimension.
    """
    if not isinstance(choice, bool | int):
        raise ValueError(message("reshard-type", choice=choice))
    num_shards = unit.plan.mesh.num_shards
    if not isinstance(choice, bool) and (choice < 1 or num_shards % choice):
        raise ValueError(message("reshard-factor", choice=choice, num_shards=num_shards))
    # In a group of one rank, every rank keeps all parameters unsharded.
    frees = choice if isinstance(choice, bool) else choice == num_shards or choice > 1
    if unit.policy.post_forward_mesh is not None:
        # Release shards on the smaller mesh that are left from this iteration. Nothing else would release them.
        unit.policy.post_forward_mesh.end()
    unit.update_policy(reshard_after_forward=frees, reshard_after_evaluation=frees, post_forward_mesh=None)
    if isinstance(choice, bool) or choice in (1, num_shards):
        return None
    if len(unit.plans) > 1:
        raise NotImplementedError(message("reshard-number-and-meshes", choice=choice))
    return choice


_made: dict[tuple[Any, ...], tuple[dist.ProcessGroup, DeviceMesh]] = {}


def smaller_mesh(mesh: DeviceMesh, size: int) -> DeviceMesh:
    """``mesh`` reshaped to ``size`` ranks in the last dimension. Every rank of the world must call it."""
    key = (mesh.get_group(mesh.ndim - 1), tuple(mesh.mesh.flatten().tolist()), mesh.device_type, size)
    if key not in _made or _made[key][0] not in dist.distributed_c10d._world.pg_map:
        # The mesh was never created, or its groups have been destroyed since.
        made = _make(mesh, size)
        _made[key] = (made.get_group(1), made)
    return _made[key][1]


def _make(mesh: DeviceMesh, size: int) -> DeviceMesh:
    table = mesh.mesh.reshape(-1, size)
    # Ranks can be in different submeshes of one large mesh. But all ranks of the world must create every group,
    # including groups that they are not in.
    everybody: list[list[list[int]]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everybody, table.tolist())
    replicate = _group_of({tuple(ranks) for copies in everybody for ranks in zip(*copies, strict=True)})
    shard = _group_of({tuple(ranks) for copies in everybody for ranks in copies})
    return DeviceMesh.from_group(
        [replicate, shard], mesh.device_type, mesh=table, mesh_dim_names=("replicate", "shard")
    )


def _group_of(groups: set[tuple[int, ...]]) -> dist.ProcessGroup:
    """Creates all ``groups`` and returns the one that contains this rank."""
    made: dict[tuple[int, ...], dist.ProcessGroup] = {ranks: dist.new_group(list(ranks)) for ranks in sorted(groups)}
    return next(group for ranks, group in made.items() if dist.get_rank() in ranks)
