"""A number as ``reshard_after_forward``: after forward, a unit is resharded to a smaller mesh.

A program for two machines with four GPUs each::

    for block in model.blocks:
        fully_shard(block, reshard_after_forward=4)
    fully_shard(model)
    for batch in batches:
        loss(model(batch)).backward()    # all-gathers within each machine
        optimizer.step()
        optimizer.zero_grad()

Without this case, a number means ``True``: backward all-gathers each unit from all ranks again, over the slow network
between the machines. In this example, ranks 0 to 3 hold one sharded copy of the parameters after forward, and ranks 4
to 7 hold another copy. The mesh has one row for each copy::

    0 1 2 3        dim 1: ranks with the other shards of the same copy
    4 5 6 7        dim 0: ranks with the same shard

The policy of the unit has a `SmallerMesh` as `UnitPolicy.reshard_after_forward`. Before the unsharded parameters are
freed after forward, it copies this rank's larger shards into a `Source`, which the next all-gather reads. Creating
process groups is a slow collective, so all units share the mesh.

*In torch:* ``_get_post_forward_mesh_info`` creates a mesh for each unit.

Spec: NEW-05, NEW-06, FS2-13.
"""

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import _dtensor_spec as dtensor_spec

from minifsdp.engine.bucket import Source
from minifsdp.engine.comm_streams import compute_event
from minifsdp.engine.exchange import exists, on_device_of
from minifsdp.engine.mesh import Group, default_group
from minifsdp.engine.messages import message
from minifsdp.engine.per_param import PerParameterLayout
from minifsdp.engine.root import RootState
from minifsdp.engine.sharded_param import ShardedParam, around
from minifsdp.engine.shards import padded_shard_numel, shard_of
from minifsdp.engine.unit import State, Unit


def reshard_to_number(unit: Unit[PerParameterLayout], choice: Any) -> None:
    """Sets what happens to the unsharded parameters after forward, unless ``choice`` is a bool or ``None``.

    With a number, every rank of the world must call it.

    Raises:
        ValueError: if ``choice`` is no number, or does not divide the number of ranks in the shard dimension.
        NotImplementedError: if the parameters are sharded over different meshes.
    """
    layout = unit.layout
    num_shards = unit.plans[0].mesh.num_shards
    check_number(choice, num_shards)
    if isinstance(choice, bool | None):
        return
    if choice in (1, num_shards):
        # With groups of one rank, every rank keeps all parameters unsharded.
        unit.update_policy(reshard_after_forward=choice == num_shards)
        return
    if len(unit.plans) > 1:
        raise NotImplementedError(message("reshard-number-and-meshes", choice=choice))
    mesh = smaller_mesh(layout.params[0].mesh, choice)
    unit.update_policy(reshard_after_forward=SmallerMesh(layout, mesh, choice))


def check_number(choice: Any, num_shards: int) -> None:
    """Raises an error if ``choice`` is neither a bool, ``None`` nor a number that divides ``num_shards``."""
    if isinstance(choice, bool | None):
        return
    if not isinstance(choice, int):
        raise ValueError(message("reshard-type", choice=choice))
    if choice < 1 or num_shards % choice:
        raise ValueError(
            message("reshard-factor", choice=choice, num_shards=num_shards)
        )


class SmallerMesh:
    """The smaller mesh of one unit, its `UnitPolicy.reshard_after_forward`. The engine only tests that it is true.

    Args:
        layout: the layout of the unit.
        mesh: the smaller mesh.
        num_shards: number of larger shards, the size of its last axis.
    """

    def __init__(
        self, layout: PerParameterLayout, mesh: DeviceMesh, num_shards: int
    ) -> None:
        self.num_shards = num_shards
        self._layout = layout
        self._mesh = mesh
        self._group = Group.of(mesh.get_group(1))

    def begin(self) -> None:
        """Makes the next all-gather of the layout use only the last axis of the mesh.

        Called before the unsharded parameters are freed. Each rank keeps 1/``num_shards`` of them.
        """
        layout = self._layout
        group = self._group
        registered: dict[ShardedParam, torch.Tensor] = {}
        for bucket in layout.buckets:
            sizes = [
                padded_shard_numel(param.shape, param.dim, group.size)
                for param in bucket.params
            ]
            local = torch.zeros(sum(sizes), dtype=bucket.dtype, device=layout.device)
            source = Source(bucket.params, group, sizes, local, bucket.spaces)
            source.copy_in(
                [
                    shard_of(leaf.data, param.dim, group.size, group.rank)
                    for leaf, param in zip(bucket.leaves, bucket.params, strict=True)
                ]
            )
            bucket.gather_from(source, compute_event(layout.device))
            larger = zip(bucket.params, source.local_shards, strict=True)
            for param, local_shard in larger:
                registered[param] = _registered(param, self._mesh, local_shard)
        layout.group = group
        layout.sharded_params = [registered[param] for param in layout.params]

    def end(self) -> None:
        """Makes the next all-gather read the optimizer's shards again, and releases the larger shards."""
        layout = self._layout
        larger = layout.sharded_params
        if larger is layout.local_parameters:
            return
        layout.sharded_params = layout.local_parameters
        for bucket in layout.buckets:
            bucket.gather_from(None)
            layout.group = bucket.group
        if layout.assigned is larger:
            layout.register(layout.local_parameters)


class SmallerMeshes:
    """Begins the use of the smaller meshes after a forward, and ends it.

    Args:
        root_state: the root of the units.
    """

    def __init__(self, root_state: RootState) -> None:
        self._root_state = root_state
        points = root_state.iteration.points
        if any(map(mesh_after_forward, root_state.units)):
            points.unit_reshards.append(self._reshard)
            points.forward_begins.append(self._end_stale)

    def _reshard(self, unit: Unit) -> None:
        """After a recorded forward, its backward all-gathers the larger shards. Every other reshard ends their use."""
        mesh = mesh_after_forward(unit)
        if mesh is None:
            return
        iteration = self._root_state.iteration
        is_after_forward = iteration.in_forward and iteration.is_recorded
        if is_after_forward and unit.uses.awaits_backward:
            if unit.state is not State.SHARDED:
                mesh.begin()
        else:
            mesh.end()

    def _end_stale(self) -> None:
        for unit in self._root_state.units:
            mesh = mesh_after_forward(unit)
            if mesh is not None and unit.layout.is_stale():
                mesh.end()


def mesh_after_forward(unit: Unit) -> SmallerMesh | None:
    """The smaller mesh of a unit, if its ``reshard_after_forward`` is a number."""
    chosen = unit.policy.reshard_after_forward
    return chosen if isinstance(chosen, SmallerMesh) else None


def leave_smaller_mesh(unit: Unit) -> None:
    """Makes the next all-gather of ``unit`` read the optimizer's shards again, and releases larger shards."""
    mesh = mesh_after_forward(unit)
    if mesh is not None:
        mesh.end()


def _registered(
    param: ShardedParam, mesh: DeviceMesh, local_shard: torch.Tensor
) -> nn.Parameter:
    """A DTensor around a shard over the last axis of ``mesh``; with tensor parallelism, the sharded parameter."""
    if param.leaf is not param.plain_leaf:
        return param.parameter
    meta = param.parameter._spec.tensor_meta  # type: ignore[attr-defined]
    spec = dtensor_spec.DTensorSpec(
        mesh, (Replicate(), Shard(param.dim)), tensor_meta=meta
    )
    return nn.Parameter(
        around(local_shard, spec), requires_grad=param.parameter.requires_grad
    )


# The smaller meshes of each shard group, with one of their groups. A group that was destroyed leaves no entry.
_meshes = weakref.WeakKeyDictionary[
    Any, dict[tuple[Any, ...], tuple[dist.ProcessGroup, DeviceMesh]]
]()


def smaller_mesh(mesh: DeviceMesh, size: int) -> DeviceMesh:
    """``mesh`` reshaped to ``size`` ranks in the last dimension. Every rank of the world must call it."""
    made = _meshes.setdefault(mesh.get_group(mesh.ndim - 1), {})
    key = (tuple(mesh.mesh.flatten().tolist()), mesh.device_type, size)
    if key in made and exists(made[key][0]):
        return made[key][1]
    # The mesh does not exist, or its groups have been destroyed since it was created.
    table = mesh.mesh.reshape(-1, size)
    # Ranks can be in different submeshes of one large mesh. But all ranks of the world must create every group,
    # including groups that they are not in.
    all_ranks: list[list[list[int]]] = [[] for _ in range(dist.get_world_size())]
    with on_device_of(Group.of(default_group())):
        dist.all_gather_object(all_ranks, table.tolist())
    columns = {
        tuple(ranks) for copies in all_ranks for ranks in zip(*copies, strict=True)
    }
    rows = {tuple(ranks) for copies in all_ranks for ranks in copies}
    groups = [
        dist.new_subgroups_by_enumeration([*map(list, sorted(every))])[0]
        for every in (columns, rows)
    ]
    smaller = DeviceMesh.from_group(
        groups, mesh.device_type, mesh=table, mesh_dim_names=("replicate", "shard")
    )
    made[key] = (groups[1], smaller)
    return smaller
