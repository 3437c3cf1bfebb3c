"""How one parameter is sharded: the arithmetic of the per-parameter layout, without communication.

A parameter is split along one of its dims, by default the first, like ``torch.chunk``: every rank gets the same number
of rows until there are none left. Each rank *sends* the same number of elements, so that one all-gather works for all;
the last ranks add padding.

Worked example, shape (3, 2) on two ranks::

    rows           a a | b b | c c
    rank 0 has     a a | b b              2 rows
    rank 1 has     c c                    1 row ...
    rank 1 sends   c c | . .              ... and padding up to 2
    gathered       a a | b b | c c | . .  the parameter is the beginning of it, without a copy

Along another dim, the shards are not contiguous in the unsharded parameter. The all-gathered shards are concatenated,
and padding would be in the middle, so the dim must be divisible.

Trade-off against the flat layout: a rank can have no rows, and a parameter with one row is on one rank only. In
exchange, every shard consists of whole rows of one named tensor.

*In torch:* ``FSDPParam._init_sharded_param``.

Spec: FS2-05, FS2-06, FS2-08.
"""

from dataclasses import dataclass
from functools import cached_property

import torch

from minifsdp.engine.messages import message


@dataclass(frozen=True)
class Cut:
    """How one parameter is sharded.

    Args:
        shape: of the unsharded parameter.
        dim: the dim along which it is split.
        num_shards: number of shards, at least 1.

    Raises:
        NotImplementedError: the size is not divisible, and the dim is not the first.
    """

    shape: torch.Size
    dim: int
    num_shards: int

    def __post_init__(self) -> None:
        if self.dim != 0 and self.shape[self.dim] % self.num_shards:
            raise NotImplementedError(
                message("uneven-dim", dim=self.dim, shape=tuple(self.shape), num_shards=self.num_shards)
            )

    @cached_property
    def num_rows(self) -> int:
        """Number of rows, or columns, of a shard without padding."""
        return -(-self.shape[self.dim] // self.num_shards)

    @cached_property
    def chunk_numel(self) -> int:
        """Number of elements that each rank sends, including padding."""
        return self.num_rows * (self.shape.numel() // self.shape[self.dim] if self.shape[self.dim] else 0)

    @cached_property
    def padded_numel(self) -> int:
        """Number of elements of all shards together, including padding."""
        return self.chunk_numel * self.num_shards

    def start(self, index: int) -> int:
        """The first row of shard ``index``; the total number of rows if that shard is empty."""
        return min(index * self.num_rows, self.shape[self.dim])

    def local_shape(self, index: int) -> torch.Size:
        """The shape of shard ``index``; its size along `dim` can be 0."""
        rows = self.start(index + 1) - self.start(index)
        return torch.Size((*self.shape[: self.dim], rows, *self.shape[self.dim + 1 :]))

    def local_part(self, whole: torch.Tensor, index: int) -> torch.Tensor:
        """Shard ``index`` of ``whole``, as a view."""
        return whole.narrow(self.dim, self.start(index), self.local_shape(index)[self.dim])
