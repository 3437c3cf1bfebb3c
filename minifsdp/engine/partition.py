"""How the flat tensor of a unit is sharded: only arithmetic, without communication.

The parameters of a unit are concatenated into a flat tensor, which is split into equal shards, one for each rank. Equal
sizes let one all-gather rebuild the tensor without a table of sizes.

Worked example, ``a`` with 3 elements and ``b`` with 4, two ranks::

    flat       a a a b b b b
    padded     a a a b b b b .      8, the next multiple of 2
    shard 0    a a a b              all of a, one element of b
    shard 1            b b b .      the rest of b, and padding

``b`` is split between the ranks. Splitting only at parameter boundaries would give one rank 3 elements and the other 4.
With one large embedding, a single rank would store most of the model.

Cost: at most ``num_shards - 1`` elements of padding in each unit. That is negligible for a million parameters on 8
ranks. In a unit of 5 parameters it can be more than half, which is one reason not to wrap very small modules.

A parameter may already be a ``DTensor`` if tensor parallelism has sharded it. Then the flat tensor contains its local
tensor. `Form` keeps the spec from which the DTensor is created again for the modules.

*In torch:* the same sharding in ``_get_shard`` of ``_flat_param.py``. With original parameters, torch also pads
*between* parameters for alignment. minifsdp omits this, because every offset would then depend on the dtype, and no
requirement needs it. For tensor parallelism, torch has ``DTensorExtensions``, found through a global registry.

Spec: SHARD-02, SHARD-03, ORIG-03, NEW-01.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from minifsdp.engine.mesh import Group
from minifsdp.engine.messages import message


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The local tensor of a ``DTensor``, without autograd; other tensors are returned unchanged."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


@dataclass(frozen=True)
class Form:
    """How one parameter is stored in the flat tensor, and how the modules' tensor is created from it.

    Attributes:
        shape: shape of its values in the flat tensor.
        spec: for a DTensor, its spec over ranks outside the shard group; ``None`` for an ordinary parameter.
        groups: the process groups over which the DTensor is sharded.
    """

    shape: torch.Size
    spec: DTensorSpec | None = None
    groups: tuple[Group, ...] = ()

    @classmethod
    def of(cls, parameter: torch.Tensor) -> Form:
        """The form of an original parameter. Does not communicate."""
        if not isinstance(parameter, DTensor):
            return cls(parameter.shape)
        spec = parameter._spec
        cut = [axis for axis, placement in enumerate(spec.placements) if placement.is_shard()]
        return cls(local_part(parameter).shape, spec, tuple(Group.of(spec.mesh.get_group(axis)) for axis in cut))

    def show(self, view: torch.Tensor) -> torch.Tensor:
        """The tensor for the modules, from a view of the flat tensor; differentiable."""
        spec = self.spec
        if spec is None:
            return view
        shown: torch.Tensor = DTensor.from_local(
            view, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride
        )
        return shown

    def local(self, value: torch.Tensor) -> torch.Tensor:
        """The local values of an unsharded or distributed ``value`` for the parameter. Does not communicate."""
        if self.spec is not None and not isinstance(value, DTensor) and value.shape != self.shape:
            value = distribute_tensor(value, self.spec.mesh, self.spec.placements, src_data_rank=None)
        return local_part(value)


@dataclass(frozen=True)
class Partition:
    """How a flat tensor of several parameters is sharded.

    Args:
        numels: elements of each parameter, in order.
        num_shards: size of the shard group; at least 1.
    """

    numels: tuple[int, ...]
    num_shards: int

    def __post_init__(self) -> None:
        if self.num_shards < 1:
            raise ValueError(message("no-ranks", num_shards=self.num_shards))

    @cached_property
    def numel(self) -> int:
        """Number of elements in all parameters, without padding."""
        return sum(self.numels)

    @cached_property
    def shard_numel(self) -> int:
        """Number of elements that each rank stores, including padding."""
        # Rounded up: rounding down would leave the last elements without a rank.
        return -(-self.numel // self.num_shards)

    @cached_property
    def padded_numel(self) -> int:
        """Number of elements in the flat tensor, including padding."""
        return self.shard_numel * self.num_shards

    @cached_property
    def split_sizes(self) -> list[int]:
        """Sizes of the parameters, and of the padding after them if there is any."""
        padding = self.padded_numel - self.numel
        return [*self.numels, padding] if padding else list(self.numels)

    @cached_property
    def is_single(self) -> bool:
        """Whether the flat tensor is one parameter without padding."""
        return len(self.numels) == 1 and self.numel == self.padded_numel

    def local_shard(self, index: int) -> slice:
        """The elements of the padded flat tensor that rank ``index`` stores."""
        return slice(index * self.shard_numel, (index + 1) * self.shard_numel)

    def laid_out(self, values: Sequence[torch.Tensor], index: int) -> torch.Tensor:
        """The shard of rank ``index`` of the concatenated ``values``, in memory of its own."""
        row = values[0].new_zeros(self.padded_numel)
        for target, value in zip(row.split(self.split_sizes), values, strict=False):
            target.copy_(value.reshape(-1))
        # Without the clone, the shard would keep the memory of the unsharded tensor alive.
        return row if self.num_shards == 1 else row[self.local_shard(index)].clone()

    def slices_of_local_shard(self, index: int) -> list[slice]:
        """For each parameter, its range inside the shard of rank ``index``. Can be empty."""
        slices, first = [], -index * self.shard_numel
        for numel in self.numels:
            # Clipped at both ends: elements before and after the shard belong to other ranks.
            start = min(max(first, 0), self.shard_numel)
            slices.append(slice(start, min(max(first + numel, start), self.shard_numel)))
            first += numel
        return slices

    def part_in_parameter(self, index: int, number: int) -> slice:
        """The range of parameter ``number``, counted from its own start, that rank ``index`` stores. Can be empty."""
        first = sum(self.numels[:number]) - index * self.shard_numel
        start = min(max(-first, 0), self.numels[number])
        return slice(start, max(start, min(self.shard_numel - first, self.numels[number])))

    def views(self, row: torch.Tensor, shapes: Sequence[torch.Size]) -> list[torch.Tensor]:
        """Views of the parameters in a padded flat tensor ``row``, by one split (``flat.py``, 2).

        A single parameter without padding needs no split. Its gradient may share memory with other gradients.
        """
        if self.is_single:
            return [row.view(shapes[0])]
        local_shards = row.split_with_sizes(self.split_sizes)
        return [local_shard.view(shape) for local_shard, shape in zip(local_shards, shapes, strict=False)]
