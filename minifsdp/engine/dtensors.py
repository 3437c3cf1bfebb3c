"""How one parameter is a DTensor: its cut, its mesh, and the way between a local piece and the distributed whole.

A ``DTensor`` is a local tensor with a DTensorSpec: on this mesh, cut along that dim. `Sharding` keeps the
spec for one parameter and puts it around pieces: around the rows that the optimizer owns, and around their
gradients.

Worked example, a (4, 4) weight on the mesh ``(replicate=2, shard=2)``::

    placements     (Replicate(), Shard(0))
    rank 0, 2      rows 0 and 1
    rank 1, 3      rows 2 and 3

A parameter may come as a DTensor already, when tensor parallelism has cut it over a mesh of its own. Then what is cut
here is its local tensor, the spec is that of both meshes joined, and modules are shown, when it is gathered, the
DTensor that they had before. Where both cut along the same dim, the rows of one rank are no longer neighbours in the
whole; ``_StridedShard`` is how DTensor says so.

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
from minifsdp.engine.mesh import Mesh
from minifsdp.engine.messages import message

# The local tensor of a DTensor itself; ``to_local()`` would make another one, for autograd.
piece_of: Callable[[torch.Tensor], torch.Tensor] = operator.attrgetter("_local_tensor")


def set_piece(tensor: torch.Tensor, piece: torch.Tensor) -> None:
    """Puts another local tensor into a DTensor."""
    tensor._local_tensor = piece  # type: ignore[attr-defined]


def gradient_of(parameter: torch.Tensor, piece: torch.Tensor) -> DTensor:
    """A DTensor around a piece of the gradient of ``parameter``, in its dtype.

    It has the very spec of the parameter: DTensor compares specs for each operator of the optimizer, and has compared
    an object with itself at once.
    """
    return DTensor(piece, parameter._spec, requires_grad=False)  # type: ignore[attr-defined]


def _around(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """A DTensor around a tensor of any dtype, without communication and without autograd."""
    meta = spec.tensor_meta
    assert meta is not None
    if meta.dtype is not local.dtype:
        spec = DTensorSpec(spec.mesh, spec.placements, tensor_meta=meta._replace(dtype=local.dtype))
    return DTensor(local, spec, requires_grad=False)


class Sharding:
    """How one parameter is cut and distributed.

    Args:
        parameter: the user's, whole or distributed over another mesh.
        mesh: over which it is sharded; one axis, or (replicate, shard).
        table: the groups of this mesh.
        placement: along which dim; ``None`` for the first.
        path: the parameter's name, for messages.

    Attributes:
        mesh, table: as given.

    Raises:
        NotImplementedError: an uneven cut along a dim that is not the first, or values that are not contiguous.
        ValueError: a parameter without any dim, or a placement that is not a ``Shard``.
    """

    def __init__(self, parameter: nn.Parameter, mesh: DeviceMesh, table: Mesh, placement: Any, path: str) -> None:
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
        # An axis before the shard axis is one of replicas.
        placements = (Replicate(),) * (mesh.ndim - len(placements)) + placements
        meta = TensorMeta(parameter.shape, parameter.stride(), parameter.dtype)
        return DTensorSpec(mesh, placements, tensor_meta=meta)

    @property
    def shard_axis(self) -> DeviceMesh:
        """The ranks that have the other pieces, as a mesh of one axis."""
        mesh = self.mesh
        if mesh.ndim == 1:
            return mesh
        if mesh.mesh_dim_names:
            return mesh[mesh.mesh_dim_names[-1]]
        return DeviceMesh.from_group(mesh.get_group(1), mesh.device_type)

    def local_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """The tensor that is cut here: the parameter's values, or those that tensor parallelism left on this rank."""
        values = parameter.detach()
        return piece_of(values) if isinstance(values, DTensor) else values

    def cut_out_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """This rank's piece of the values, a view."""
        return self.cut.local_part(self.local_of(parameter), self.table.shard_index)

    def wrap(self, piece: torch.Tensor) -> DTensor:
        """A DTensor around a piece."""
        return _around(piece, self._spec)

    def wrap_among(self, mesh: DeviceMesh, piece: torch.Tensor) -> DTensor | None:
        """A DTensor around a piece that is cut over the last axis of ``mesh``; ``None`` with tensor parallelism."""
        if self._tensor_parallel is not None:
            return None
        placements = (*(Replicate() for _ in range(mesh.ndim - 1)), Shard(self.cut.dim))
        return _around(piece, DTensorSpec(mesh, placements, tensor_meta=self._spec.tensor_meta))

    def fits(self, other: torch.Tensor) -> bool:
        """Whether ``other`` is distributed in the same way."""
        return (
            isinstance(other, DTensor)
            and other.shape == self._spec.shape
            and other._spec.mesh == self._spec.mesh
            and other._spec.placements == self._spec.placements
        )

    def show_whole(self, leaf: nn.Parameter) -> nn.Parameter:
        """What modules compute with: ``leaf``, or the DTensor that tensor parallelism needs."""
        inner = self._tensor_parallel
        if inner is None:
            return leaf
        return nn.Parameter(_around(leaf.data, inner), requires_grad=leaf.requires_grad)

    def local_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """The part of a leaf's gradient that belongs to the tensor that is cut here."""
        if isinstance(gradient, DTensor):
            assert self._tensor_parallel is not None
            if gradient.placements != self._tensor_parallel.placements:
                gradient = gradient.redistribute(placements=self._tensor_parallel.placements)
            return piece_of(gradient)
        return gradient
