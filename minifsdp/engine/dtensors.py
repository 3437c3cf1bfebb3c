"""DTensors of the per-parameter layout: how one parameter is sharded, and conversions from and to local shards.

A ``DTensor`` is a local tensor with a DTensorSpec, which has a mesh and a placement for each of its axes. `Sharding`
keeps the spec of one parameter. It wraps local tensors with it: the shards that the optimizer owns, and their
gradients.

Worked example, a (4, 4) weight on the mesh ``(replicate=2, shard=2)``::

    placements     (Replicate(), Shard(0))
    rank 0, 2      rows 0 and 1
    rank 1, 3      rows 2 and 3

A parameter may already be a DTensor, if tensor parallelism has sharded it over another mesh. Then its local tensor is
sharded, and the spec joins both meshes. While the parameter is unsharded, modules have the DTensor that they had
before. If both shard along the same dim, the rows of one rank are not adjacent in the unsharded parameter. DTensor
expresses this by ``_StridedShard``.

*In torch:* ``FSDPParam._init_sharding_spec``.

Spec: FS2-04, FS2-05, FS2-08, FS2-18, NEW-16, NEW-23.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from minifsdp.engine.cut import Cut
from minifsdp.engine.mesh import MeshGroups
from minifsdp.engine.messages import message

# Returns the local tensor of a DTensor itself. ``to_local()`` creates another tensor, for autograd.
local_shard_of: Callable[[torch.Tensor], torch.Tensor] = operator.attrgetter("_local_tensor")


def set_local_shard(tensor: torch.Tensor, local_shard: torch.Tensor) -> None:
    """Replaces the local tensor of a DTensor."""
    tensor._local_tensor = local_shard  # type: ignore[attr-defined]


def gradient_of(parameter: torch.Tensor, local_shard: torch.Tensor) -> DTensor:
    """Wraps a local shard of the gradient of ``parameter`` in a DTensor.

    It shares the spec object of the parameter. DTensor compares specs for each operator of the optimizer, and the
    comparison of an object with itself is fast.
    """
    return DTensor(local_shard, parameter._spec, requires_grad=False)  # type: ignore[attr-defined]


def _around(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """Wraps a local tensor of any dtype in a DTensor, without communication and without autograd."""
    meta = spec.tensor_meta
    assert meta is not None
    if meta.dtype is not local.dtype:
        spec = DTensorSpec(spec.mesh, spec.placements, tensor_meta=meta._replace(dtype=local.dtype))
    return DTensor(local, spec, requires_grad=False)


class Sharding:
    """How one parameter is sharded and replicated over a mesh.

    Args:
        parameter: the original parameter; ordinary, or a DTensor on another mesh.
        mesh: the mesh over which to shard; one axis, or (replicate, shard).
        table: the process groups of this mesh.
        placement: the dim to shard; ``None`` for the first.
        path: the parameter's name, for messages.

    Attributes:
        mesh, table: as given.

    Raises:
        NotImplementedError: the size of a dim other than the first is not divisible, or the values are not contiguous.
        ValueError: a parameter without dims, or a placement that is not a ``Shard``.
    """

    def __init__(self, parameter: nn.Parameter, mesh: DeviceMesh, table: MeshGroups, placement: Any, path: str) -> None:
        self.mesh, self.table = mesh, table
        where = f"parameter {path!r}"
        if parameter.ndim == 0:
            raise ValueError(message("scalar-parameter", where=where))
        if not isinstance(placement, Shard | None):
            raise ValueError(message("placement-type", where=where, placement=placement))
        self._tensor_parallel: DTensorSpec | None = parameter._spec if isinstance(parameter, DTensor) else None
        local = self.local_of(parameter)
        if not local.is_contiguous():
            raise NotImplementedError(
                message("not-contiguous", where=where, shape=tuple(local.shape), stride=local.stride())
            )
        dim = placement.dim if placement is not None else 0
        dim = dim + parameter.ndim if dim < 0 else dim
        if not 0 <= dim < parameter.ndim:
            raise ValueError(message("placement-dim", where=where, shape=tuple(parameter.shape), dim=dim))
        self.cut = Cut(local.shape, dim, mesh.size(mesh.ndim - 1))
        self._spec = self._make_spec(parameter, mesh)

    def _make_spec(self, parameter: nn.Parameter, mesh: DeviceMesh) -> DTensorSpec:
        dim, inner = self.cut.dim, self._tensor_parallel
        placements: tuple[Placement, ...] = (Shard(dim),)
        if inner is not None:
            mesh, num_cuts = DeviceMesh._concatenate([mesh, inner.mesh]), inner.num_shards_map[dim]
            own = Shard(dim) if num_cuts == 1 else _StridedShard(dim, split_factor=num_cuts)
            placements = (own, *inner.placements)
        # Axes before the shard axis are replicate axes.
        placements = (Replicate(),) * (mesh.ndim - len(placements)) + placements
        meta = TensorMeta(parameter.shape, parameter.stride(), parameter.dtype)
        return DTensorSpec(mesh, placements, tensor_meta=meta)

    @property
    def shard_axis(self) -> DeviceMesh:
        """The shard group as a 1-D mesh."""
        mesh = self.mesh
        if mesh.ndim == 1:
            return mesh
        if mesh.mesh_dim_names:
            return mesh[mesh.mesh_dim_names[-1]]
        return DeviceMesh.from_group(mesh.get_group(1), mesh.device_type)

    def local_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """The tensor to shard: the parameter's values, or their local tensor if tensor parallelism has sharded them."""
        values = parameter.detach()
        return local_shard_of(values) if isinstance(values, DTensor) else values

    def cut_out_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """This rank's shard of the values, as a view."""
        return self.cut.local_part(self.local_of(parameter), self.table.shard_index)

    def wrap(self, local_shard: torch.Tensor) -> DTensor:
        """Wraps a local shard in a DTensor."""
        return _around(local_shard, self._spec)

    def wrap_among(self, mesh: DeviceMesh, local_shard: torch.Tensor) -> DTensor | None:
        """Wraps a shard over the last axis of ``mesh`` in a DTensor; ``None`` with tensor parallelism."""
        if self._tensor_parallel is not None:
            return None
        placements = (*(Replicate() for _ in range(mesh.ndim - 1)), Shard(self.cut.dim))
        return _around(local_shard, DTensorSpec(mesh, placements, tensor_meta=self._spec.tensor_meta))

    def fits(self, other: torch.Tensor) -> bool:
        """Whether ``other`` is a DTensor of the same shape, mesh and placements."""
        return (
            isinstance(other, DTensor)
            and other.shape == self._spec.shape
            and other._spec.mesh == self._spec.mesh
            and other._spec.placements == self._spec.placements
        )

    def show_whole(self, leaf: nn.Parameter) -> nn.Parameter:
        """The unsharded parameter for the modules: ``leaf``, or the DTensor that tensor parallelism needs."""
        inner = self._tensor_parallel
        if inner is None:
            return leaf
        return nn.Parameter(_around(leaf.data, inner), requires_grad=leaf.requires_grad)

    def local_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient of the tensor that is sharded here, from the gradient of the unsharded parameter."""
        if isinstance(gradient, DTensor):
            assert self._tensor_parallel is not None
            if gradient.placements != self._tensor_parallel.placements:
                gradient = gradient.redistribute(placements=self._tensor_parallel.placements)
            return local_shard_of(gradient)
        return gradient
