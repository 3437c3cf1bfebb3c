"""Resharding after forward: free the unsharded parameters, keep them, or reshard to a smaller mesh.

An integer ``reshard_after_forward`` reshards to a smaller mesh. Example: eight ranks in the shard dimension and
``reshard_after_forward=4``. After forward, ranks 0 to 3 hold one sharded copy of the parameters, and ranks 4 to 7 hold
another copy. The mesh has one row for each copy::

    0 1 2 3        dim 1: ranks with the other shards of the same copy
    4 5 6 7        dim 0: ranks with the same shard

Creating process groups is a slow collective, so all units share the mesh.

*In torch:* ``_get_post_forward_mesh_info`` creates a mesh for each unit.

Spec: NEW-05, NEW-06, FS2-13.
"""

import functools
import weakref
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from minifsdp.engine.mesh import Group, default_group, exists
from minifsdp.engine.messages import message
from minifsdp.engine.per_param import PerParameterLayout
from minifsdp.engine.unit import PostForwardMesh, Unit


def choose_reshard(unit: Unit[PerParameterLayout], choice: bool | int) -> None:
    """Sets what happens to the unsharded parameters after forward. With an integer, every rank must call it.

    Raises:
        ValueError: if ``choice`` is an integer that does not divide the number of ranks in the shard dimension.
        NotImplementedError: if ``choice`` is an integer and the parameters are sharded over different meshes.
    """
    if not isinstance(choice, bool | int):
        raise ValueError(message("reshard-type", choice=choice))
    layout, num_shards, post_forward_mesh = unit.layout, unit.plan.mesh.num_shards, None
    if not isinstance(choice, bool) and (choice < 1 or num_shards % choice):
        raise ValueError(message("reshard-factor", choice=choice, num_shards=num_shards))
    # With groups of one rank, every rank keeps all parameters unsharded.
    frees = choice if isinstance(choice, bool) else choice == num_shards or choice > 1
    if unit.policy.post_forward_mesh is not None:
        # Release shards on the smaller mesh from this iteration. No other code would release them.
        unit.policy.post_forward_mesh.end()
    if not isinstance(choice, bool) and 1 < choice < num_shards:
        if len(unit.plans) > 1:
            raise NotImplementedError(message("reshard-number-and-meshes", choice=choice))
        mesh = smaller_mesh(layout.params[0].mesh, choice)
        begin = functools.partial(layout.reshard_to_smaller_mesh, Group.of(mesh.get_group(1)), mesh)
        post_forward_mesh = PostForwardMesh(begin, layout.unshard_from_full_mesh, choice)
    unit.update_policy(reshard_after_forward=frees, post_forward_mesh=post_forward_mesh)


# The smaller meshes of each shard group, with one of their groups. A group that was destroyed leaves no entry.
_meshes = weakref.WeakKeyDictionary[Any, dict[tuple[Any, ...], tuple[dist.ProcessGroup, DeviceMesh]]]()


def smaller_mesh(mesh: DeviceMesh, size: int) -> DeviceMesh:
    """``mesh`` reshaped to ``size`` ranks in the last dimension. Every rank of the world must call it."""
    made = _meshes.setdefault(mesh.get_group(mesh.ndim - 1), {})
    key = (tuple(mesh.mesh.flatten().tolist()), mesh.device_type, size)
    if key not in made or not exists(made[key][0]):
        # The mesh does not exist, or its groups have been destroyed since it was created.
        smaller = _make(mesh, size)
        made[key] = (smaller.get_group(1), smaller)
    return made[key][1]


def _make(mesh: DeviceMesh, size: int) -> DeviceMesh:
    table = mesh.mesh.reshape(-1, size)
    # Ranks can be in different submeshes of one large mesh. But all ranks of the world must create every group,
    # including groups that they are not in.
    all_ranks: list[list[list[int]]] = [[] for _ in range(dist.get_world_size())]
    with Group.of(default_group()).on_device():
        dist.all_gather_object(all_ranks, table.tolist())
    columns = sorted({tuple(ranks) for copies in all_ranks for ranks in zip(*copies, strict=True)})
    rows = sorted({tuple(ranks) for copies in all_ranks for ranks in copies})
    groups = [dist.new_subgroups_by_enumeration([list(ranks) for ranks in every])[0] for every in (columns, rows)]
    return DeviceMesh.from_group(groups, mesh.device_type, mesh=table, mesh_dim_names=("replicate", "shard"))
