"""Where a row of parameters is cut: the arithmetic of the flat layout, without any communication.

The parameters of a unit are laid end to end, and the row is cut into as many equal pieces as there are ranks. Every
piece has the same number of elements, so that one all-gather, without any table of sizes, puts the row together again.

Worked example, ``a`` with 3 elements and ``b`` with 4, two ranks::

    row        a a a b b b b
    padded     a a a b b b b .      8, the next multiple of 2
    piece 0    a a a b              all of a, one of b
    piece 1            b b b .      the rest of b, and padding

Neither rank owns a parameter; ``b`` lies on both. A cut at the borders of parameters would leave 3 elements here and 4
there, and with one large embedding a single rank would be as heavy as before.

Price: up to one element less than there are ranks, in each unit. For a block of a million parameters on 8 ranks that
is nothing; for a unit of 5 parameters it is more than half, one reason why tiny units are a bad idea.

A parameter may come cut already: tensor parallelism has made it a ``DTensor``, and this rank has a part of it. Then
that part is what lies in the row, and its `Form` keeps what must be said about it when modules are shown it again.

*In torch:* the same cut in ``_get_shard`` of ``_flat_param.py``; with original parameters torch also pads *between*
parameters for alignment. Left out here: it would make every offset depend on the dtype, and nothing in the spec asks
for it. The part of tensor parallelism is ``DTensorExtensions``, found through a global registry.

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
    """``tensor``, or of a distributed one the memory that this rank has; past autograd."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


@dataclass(frozen=True)
class Form:
    """What one parameter is on this rank when its unit is gathered.

    Attributes:
        shape: of what lies in the row.
        spec: how it is distributed over other ranks than those that share the unit; ``None`` for an ordinary one.
        groups: the ranks that have its other parts.
    """

    shape: torch.Size
    spec: DTensorSpec | None = None
    groups: tuple[Group, ...] = ()

    @classmethod
    def of(cls, parameter: torch.Tensor) -> Form:
        """The form of a parameter as the user made it. Nothing is communicated."""
        if not isinstance(parameter, DTensor):
            return cls(parameter.shape)
        spec = parameter._spec
        cut = [axis for axis, placement in enumerate(spec.placements) if placement.is_shard()]
        return cls(local_part(parameter).shape, spec, tuple(Group.of(spec.mesh.get_group(axis)) for axis in cut))

    def show(self, view: torch.Tensor) -> torch.Tensor:
        """What a module shall compute with, made of its place in the row; differentiable."""
        spec = self.spec
        if spec is None:
            return view
        shown: torch.Tensor = DTensor.from_local(
            view, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride
        )
        return shown

    def local(self, value: torch.Tensor) -> torch.Tensor:
        """Of a value for the parameter, whole or this rank's part, what lies in the row. Nothing is communicated."""
        if self.spec is not None and not isinstance(value, DTensor) and value.shape != self.shape:
            value = distribute_tensor(value, self.spec.mesh, self.spec.placements, src_data_rank=None)
        return local_part(value)


@dataclass(frozen=True)
class Partition:
    """How a row of parameters is cut.

    Args:
        numels: elements of each parameter, in order.
        num_shards: pieces to cut into, at least 1.
    """

    numels: tuple[int, ...]
    num_shards: int

    def __post_init__(self) -> None:
        if self.num_shards < 1:
            raise ValueError(message("no-ranks", num_shards=self.num_shards))

    @cached_property
    def numel(self) -> int:
        """Elements of all parameters, without padding."""
        return sum(self.numels)

    @cached_property
    def shard_numel(self) -> int:
        """Elements that each rank stores, padding included."""
        # Rounded up: rounded down, the last elements would belong to no rank.
        return -(-self.numel // self.num_shards)

    @cached_property
    def padded_numel(self) -> int:
        """Elements of all pieces together."""
        return self.shard_numel * self.num_shards

    @cached_property
    def split_sizes(self) -> list[int]:
        """Sizes of the parameters and, if there is any, of the padding behind them."""
        padding = self.padded_numel - self.numel
        return [*self.numels, padding] if padding else list(self.numels)

    @cached_property
    def is_single(self) -> bool:
        """Whether the row is one parameter and nothing else."""
        return len(self.numels) == 1 and self.numel == self.padded_numel

    def piece(self, index: int) -> slice:
        """The elements of the padded row that rank ``index`` stores."""
        return slice(index * self.shard_numel, (index + 1) * self.shard_numel)

    def laid_out(self, values: Sequence[torch.Tensor], index: int) -> torch.Tensor:
        """Rank ``index``'s piece of a row of ``values``, in memory of its own."""
        row = values[0].new_zeros(self.padded_numel)
        for target, value in zip(row.split(self.split_sizes), values, strict=False):
            target.copy_(value.reshape(-1))
        # Without the clone the piece would keep the memory of the whole row.
        return row if self.num_shards == 1 else row[self.piece(index)].clone()

    def slices_of_piece(self, index: int) -> list[slice]:
        """For each parameter, where its part on rank ``index`` lies inside that rank's piece; may be empty."""
        slices, first = [], -index * self.shard_numel
        for numel in self.numels:
            # Clipped at both ends: what begins before the piece or ends behind it is another rank's.
            start = min(max(first, 0), self.shard_numel)
            slices.append(slice(start, min(max(first + numel, start), self.shard_numel)))
            first += numel
        return slices

    def part_in_parameter(self, index: int, number: int) -> slice:
        """Which elements of parameter ``number``, counted from its own start, rank ``index`` stores; may be none."""
        first = sum(self.numels[:number]) - index * self.shard_numel
        start = min(max(-first, 0), self.numels[number])
        return slice(start, max(start, min(self.shard_numel - first, self.numels[number])))

    def views(self, row: torch.Tensor, shapes: Sequence[torch.Size]) -> list[torch.Tensor]:
        """The parameters in a padded row, by one split of all of it; why is told in ``flat.py``, 2.

        A row that is one parameter and nothing else needs none. Its gradient may share memory with other gradients.
        """
        if self.is_single:
            return [row.view(shapes[0])]
        pieces = row.split_with_sizes(self.split_sizes)
        return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=False)]
