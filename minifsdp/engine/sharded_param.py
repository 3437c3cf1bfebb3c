"""One parameter of the per-parameter layout: how it is sharded, its local shard, its DTensor and its unsharded leaf.

A ``DTensor`` is a local tensor with a ``DTensorSpec``, which has a mesh and a placement for each axis of the mesh.
`ShardedParam` stores the spec of its parameter, and uses it to wrap local shards.

Worked example, a (4, 4) weight on the mesh ``(replicate=2, shard=2)``::

    placements     (Replicate(), Shard(0))
    rank 0, 2      rows 0 and 1
    rank 1, 3      rows 2 and 3

A parameter has three tensors. They are assigned in this order:

1. `local_shard`, in the memory of the unit's bucket. The optimizer updates it.
2. `parameter`, a DTensor around it. It is registered on the modules while the unit is sharded.
3. `leaf`, the unsharded parameter, in the memory of the bucket as well. Modules compute with it, and autograd
   accumulates its gradient.

A parameter may already be a DTensor, if tensor parallelism has sharded it over another mesh. Then its local tensor is
sharded, and the spec joins both meshes. While the parameter is unsharded, modules have a DTensor on the mesh of tensor
parallelism, as before. If both meshes shard along the same dim, the rows of one rank are not adjacent in the unsharded
parameter. DTensor expresses this by ``_StridedShard``.

*In torch:* ``FSDPParam``.

Spec: FS2-04, FS2-05, FS2-08, FS2-18, NEW-16, NEW-23.
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import _dtensor_spec as dtensor_spec
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from minifsdp.engine.layout import ParamInfo, share_hooks
from minifsdp.engine.mesh import MeshGroups
from minifsdp.engine.precision import Precision
from minifsdp.engine.shards import local_tensor, padded_shard_numel, shard_of

# The number of in-place changes of a tensor.
VERSION = operator.attrgetter("_version")
# The unsharded parameter of a `ShardedParam`.
LEAF: Callable[[Any], torch.Tensor] = operator.attrgetter("leaf")
# Returns the local tensor of a DTensor. ``to_local()`` would create another tensor, for autograd.
local_shard_of: Callable[[torch.Tensor], torch.Tensor] = operator.attrgetter(
    "_local_tensor"
)


def set_local_shard(tensor: torch.Tensor, local_shard: torch.Tensor) -> None:
    """Replaces the local tensor of a DTensor."""
    tensor._local_tensor = local_shard  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Options:
    """The options for the parameters of a unit.

    Attributes:
        device: the compute device.
        precision: the compute dtype, and the dtype of the reduction.
        offload: whether the shards are on the CPU.
        pin: whether these shards are in pinned memory, for asynchronous copies.
        cases: objects that store some parameters in buckets of their own, see note 6 of ``bucket.py``.
    """

    device: torch.device
    precision: Precision = field(default_factory=Precision)
    offload: bool = False
    pin: bool = False
    cases: Sequence[Any] = ()

    def storage_device(self, local_shard: torch.Tensor) -> torch.device:
        """The device on which the memory for ``local_shard`` is allocated."""
        return (
            torch.device("cpu")
            if self.offload and not local_shard.is_meta
            else local_shard.device
        )


class ShardedParam:
    """One parameter of a unit, sharded and replicated over a mesh.

    Args:
        info: the parameter's module attributes.
        original: the parameter to shard; an ordinary parameter, or a DTensor on another mesh.
        mesh: the mesh over which to shard, with one axis, or with the axes (replicate, shard).
        mesh_groups: the process groups of this mesh.
        placement: the dim to shard; ``None`` for the first dim.

    Attributes:
        info, mesh, mesh_groups: as given.
        shape: the shape of the tensor that is sharded here; with tensor parallelism, of the local tensor.
        dim, num_shards: the dim along which this tensor is split, and the number of shards.
        chunk_numel: number of elements that each rank sends, including padding.
        parameter: the sharded parameter, which the optimizer updates; the original until `replace_original`.
        local_shard: the local tensor of `parameter`.
        leaf: the unsharded parameter, which autograd owns and modules compute with; the original until `use_leaf`.
        plain_leaf: the local tensor of `leaf`; the same tensor, except with tensor parallelism.
        unreduced: the unreduced gradient.
        version: the version of `leaf` at the last check of a case for changes by the user.
        is_trained: ``requires_grad`` of `parameter` and `leaf` when both were last equal.
    """

    def __init__(
        self,
        info: ParamInfo,
        original: nn.Parameter,
        mesh: DeviceMesh,
        mesh_groups: MeshGroups,
        placement: Any,
    ) -> None:
        self.info = info
        self.mesh = mesh
        self.mesh_groups = mesh_groups
        # Tensor parallelism may have sharded the parameter already.
        local = local_tensor(original.detach())
        self.dim = dim = 0 if placement is None else placement.dim % original.ndim
        self.shape = local.shape
        self.num_shards = mesh_groups.num_shards
        self.chunk_numel = padded_shard_numel(self.shape, dim, self.num_shards)
        self._tensor_parallel = (
            original._spec if isinstance(original, DTensor) else None
        )
        self._spec = self._make_spec(original, mesh)
        self.local_shard = shard_of(
            local, dim, self.num_shards, mesh_groups.shard_index
        )
        self.parameter = self.leaf = self.plain_leaf = original
        self.unreduced: torch.Tensor | None = None
        self._user_attributes: dict[str, Any] = {}
        self.is_trained = original.requires_grad
        self.version = 0

    def _make_spec(
        self, original: nn.Parameter, mesh: DeviceMesh
    ) -> dtensor_spec.DTensorSpec:
        """The spec of the DTensors around `local_shard`. A case can have another one."""
        dim = self.dim
        inner = self._tensor_parallel
        placements: tuple[Placement, ...] = (Shard(dim),)
        if inner is not None:
            mesh = DeviceMesh._concatenate([mesh, inner.mesh])
            num_shards = inner.num_shards_map[dim]
            own = (
                Shard(dim)
                if num_shards == 1
                else _StridedShard(dim, split_factor=num_shards)
            )
            placements = (own, *inner.placements)
        # Axes before the shard axis are replicate axes.
        placements = (Replicate(),) * (mesh.ndim - len(placements)) + placements
        meta = dtensor_spec.TensorMeta(
            original.shape, original.stride(), original.dtype
        )
        return dtensor_spec.DTensorSpec(mesh, placements, tensor_meta=meta)

    # --- the sharded parameter ---

    def replace_original(self) -> None:
        """Creates the sharded parameter around `local_shard`, in place of the user's parameter."""
        original = self.parameter
        self.parameter = nn.Parameter(
            around(self.local_shard, self._spec), requires_grad=original.requires_grad
        )
        # `nn.Parameter` detaches, which replaces the local tensor. Restore it.
        set_local_shard(self.parameter, self.local_shard)
        # Copy attributes set by users, such as marks for optimizer groups. Skip attributes of a tensor subclass: the
        # shards have them as well, and the attributes of the original may hold unsharded values.
        self._user_attributes = {
            n: value
            for n, value in vars(original).items()
            if n not in vars(self.local_shard)
        }
        vars(self.parameter).update(self._user_attributes)
        share_hooks(original, self.parameter)

    def accumulates_in(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which gradients of ``dtype`` are added: the user's ``grad_dtype`` (NEW-18), else ``dtype``."""
        chosen = self.parameter.grad_dtype
        return dtype if chosen in (None, self.parameter.dtype) else chosen

    # --- the unsharded parameter ---

    def use_leaf(self, plain_leaf: nn.Parameter, reduce_dtype: torch.dtype) -> None:
        """Uses a new leaf, after the bucket has allocated new memory for it."""
        self.plain_leaf = self.leaf = plain_leaf
        if self._tensor_parallel is not None:
            # The DTensor that tensor parallelism needs.
            self.leaf = nn.Parameter(
                around(plain_leaf.data, self._tensor_parallel), requires_grad=False
            )
        self.is_trained = self.parameter.requires_grad
        self.leaf.requires_grad_(self.is_trained)
        self.version = self.leaf._version
        vars(self.leaf).update({**self._user_attributes, **vars(self.leaf)})
        if self.unreduced is not None:
            # The model was converted, so convert this gradient as well.
            self.unreduced = self.unreduced.to(reduce_dtype)

    def toggle_requires_grad(self) -> None:
        """Called after the user changed ``requires_grad`` of `parameter` or `leaf`. Updates the other tensor."""
        self.is_trained = not self.is_trained
        self.leaf.requires_grad_(self.is_trained)
        self.parameter.requires_grad_(self.is_trained)

    def share_tensor_hooks(self) -> None:
        """Called after the user registered the first hook of `parameter` or `leaf`. Autograd calls those of `leaf`."""
        if self.parameter._backward_hooks is None:
            self.parameter._backward_hooks = self.leaf._backward_hooks
        else:
            self.parameter._backward_hooks.update(self.leaf._backward_hooks or {})
            self.leaf._backward_hooks = self.parameter._backward_hooks

    def local_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """Converts the gradient of the unsharded parameter to the gradient of the tensor that is sharded here."""
        if isinstance(gradient, DTensor):
            assert self._tensor_parallel is not None
            if gradient.placements != self._tensor_parallel.placements:
                gradient = gradient.redistribute(
                    placements=self._tensor_parallel.placements
                )
            return local_shard_of(gradient)
        return gradient


def around(local: torch.Tensor, spec: dtensor_spec.DTensorSpec) -> DTensor:
    """Wraps a local tensor of any dtype in a DTensor, without communication and without autograd."""
    meta = spec.tensor_meta
    assert meta is not None
    if meta.dtype is not local.dtype:
        spec = dtensor_spec.DTensorSpec(
            spec.mesh, spec.placements, tensor_meta=meta._replace(dtype=local.dtype)
        )
    return DTensor(local, spec, requires_grad=False)
