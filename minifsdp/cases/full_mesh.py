"""``dp_mesh_dims``: the mesh has dimensions for several kinds of parallelism.

All parameters are DTensors on one mesh. Tensor parallelism has sharded them over ``cut``, and ``fully_shard`` shards
them over ``data``::

    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("data", "cut"))
    distribute_module(model, mesh, partition)        # weights with the placements (Replicate(), Shard(0))
    fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="data"))
    model.weight.placements                          # (_StridedShard(0), Shard(0))

Without this case, ``fully_shard`` takes a part of the mesh. It puts this part in front of the mesh of the parameter, so
a parameter on the full mesh would have the dimension ``data`` twice.

`FullMesh` finds the groups of ranks for data parallelism. `FullMeshParam` is a `ShardedParam` with two differences. Its
DTensor stays on the full mesh: the dimensions in ``shard`` get the new placement. An unreduced gradient can be a
partial sum over the dimensions for data parallelism. It stays one, because the reduction of the unit adds these parts.

Worked example, eight ranks, ``(replicate=2, data=2, cut=2)``: rank 5 is at (1, 0, 1). It all-gathers with rank 7, and
averages with rank 1. Several names, for example ``shard=("data", "context")``, become one dimension.

*In torch:* ``_get_mesh_info_from_named_dims``, and branches in ``FSDPParam``.

Spec: NEW-31.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import _dtensor_spec as dtensor_spec
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from minifsdp.engine.layout import ParamInfo
from minifsdp.engine.mesh import Group, MeshGroups
from minifsdp.engine.messages import message
from minifsdp.engine.sharded_param import ShardedParam, local_shard_of


class FullMesh:
    """The dimensions of a mesh that ``fully_shard`` uses.

    Args:
        mesh: the full mesh, the same on all ranks.
        dims: a ``DataParallelMeshDims`` with names of its dimensions.

    Attributes:
        full: the full mesh.
        shard, replicate: the indices of the dimensions to shard and to replicate over.
        mesh: the mesh of data parallelism: one dimension, or the dimensions (replicate, shard).
        groups: this rank's groups on it.

    Raises:
        ValueError: if the mesh does not have these names.
    """

    def __init__(self, mesh: DeviceMesh, dims: Any) -> None:
        names = mesh.mesh_dim_names or ()
        for name in (*dims.shard_names, *dims.replicate_names):
            if name not in names:
                raise ValueError(message("mesh-dim-name", name=name, names=names))
        self.full = mesh
        self.shard = [names.index(name) for name in dims.shard_names]
        self.replicate = [names.index(name) for name in dims.replicate_names]
        chosen = [
            _as_one_dim(mesh, found)
            for found in (dims.replicate_names, dims.shard_names)
            if found
        ]
        groups = [Group.of(one.get_group()) for one in chosen]
        self.mesh = chosen[0]
        if len(chosen) > 1:
            self.mesh = DeviceMesh._concatenate(chosen)
            self.groups = MeshGroups.hybrid(shard=groups[1], replicate=groups[0])
        elif self.shard:
            self.groups = MeshGroups.sharded(groups[0])
        else:
            self.groups = MeshGroups.replicated(groups[0])

    def param(
        self,
        info: ParamInfo,
        original: nn.Parameter,
        mesh: DeviceMesh,
        mesh_groups: MeshGroups,
        placement: Any,
    ) -> ShardedParam:
        """Creates a parameter. The arguments are those of `ShardedParam`.

        Raises:
            ValueError: if ``original`` is not a DTensor on the full mesh that all ranks of data parallelism have.
        """
        if mesh != self.mesh:
            # ``shard_placement_fn`` has chosen another mesh.
            return ShardedParam(info, original, mesh, mesh_groups, placement)
        if not isinstance(original, DTensor) or original.device_mesh != self.full:
            raise ValueError(message("not-on-mesh", path=info.path, mesh=self.full))
        for dim in (*self.shard, *self.replicate):
            found = original.placements[dim]
            if not isinstance(found, Replicate):
                names = self.full.mesh_dim_names or ()
                raise ValueError(
                    message(
                        "sharded-on-mesh", path=info.path, name=names[dim], found=found
                    )
                )
        return FullMeshParam(self, info, original, placement)


class FullMeshParam(ShardedParam):
    """A parameter on the full mesh.

    Args:
        full_mesh: the mesh and its dimensions.
        info: the parameter's module attributes.
        original: the parameter, a DTensor on the full mesh.
        placement: the dim to shard; ``None`` for the first dim.
    """

    def __init__(
        self, full_mesh: FullMesh, info: ParamInfo, original: Any, placement: Any
    ) -> None:
        self._full_mesh = full_mesh
        super().__init__(info, original, full_mesh.mesh, full_mesh.groups, placement)

    def _make_spec(self, original: Any, mesh: DeviceMesh) -> dtensor_spec.DTensorSpec:
        """The spec on the full mesh. Several dimensions to shard over are one dimension of its mesh."""
        found: dtensor_spec.DTensorSpec = original._spec
        own = self._full_mesh
        if not own.shard:
            return found
        first = min(own.shard)
        placements = list(found.placements)
        placements[first] = self._placement(first, found.placements)
        full = own.full
        if len(own.shard) > 1:
            # The dimensions for data parallelism become those of `mesh`, at the place of the first one.
            used = {*own.shard, *own.replicate} - {first}
            dims = [dim for dim in range(full.ndim) if dim not in used]
            names = full.mesh_dim_names or ()
            full = DeviceMesh._concatenate(
                [mesh if dim == first else full[names[dim]] for dim in dims]
            )
            placements = [placements[dim] for dim in dims]
            at = dims.index(first)
            placements[at:at] = [Replicate()] * (mesh.ndim - 1)
        return dtensor_spec.DTensorSpec(
            full, tuple(placements), tensor_meta=found.tensor_meta
        )

    def _placement(self, dim: int, placements: Sequence[Placement]) -> Placement:
        """The placement for the dimension ``dim`` of the mesh."""
        # The shards of later dimensions of the mesh are parts of the shards of this one.
        num_inner = math.prod(
            self._full_mesh.full.size(later)
            for later in range(dim + 1, len(placements))
            if getattr(placements[later], "dim", None) == self.dim
        )
        if num_inner == 1:
            return Shard(self.dim)
        return _StridedShard(self.dim, split_factor=num_inner)

    def local_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """As in `ShardedParam`, but a partial sum over the dimensions for data parallelism stays one."""
        assert isinstance(gradient, DTensor)
        assert isinstance(self.leaf, DTensor)
        own = self._full_mesh
        placements = list(self.leaf.placements)
        for dim in (*own.shard, *own.replicate):
            placements[dim] = gradient.placements[dim]
        if tuple(placements) != gradient.placements:
            gradient = gradient.redistribute(placements=placements)
        return local_shard_of(gradient)


def _as_one_dim(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    return mesh[names[0]] if len(names) == 1 else mesh[names]._flatten("_".join(names))
