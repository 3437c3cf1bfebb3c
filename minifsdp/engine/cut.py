"""How one parameter is cut: the arithmetic of the per-parameter layout, without any communication.

A parameter is cut along one of its dims, the first unless the user says otherwise, the way ``torch.chunk`` cuts: every
rank gets the same number of rows until there are none left. So that one all-gather fits all, each rank *sends* the same
number of elements; the last ranks fill up with padding.

Worked example, shape (3, 2) on two ranks::

    rows           a a | b b | c c
    rank 0 has     a a | b b              2 rows
    rank 1 has     c c                    1 row ...
    rank 1 sends   c c | . .              ... and padding up to 2
    gathered       a a | b b | c c | . .  the parameter is the beginning of it, without a copy

Along another dim the pieces of the ranks do not lie one behind the other in the whole. Such a parameter is put together
by a concatenation, and padding would end up in its middle; therefore it must be divisible.

Trade-off against the flat layout: a rank can be without any row, and a parameter of one row lies on one rank alone; in
exchange every piece is whole rows of one named tensor.

*In torch:* ``FSDPParam._init_sharded_param``.

Spec: FS2-05, FS2-06, FS2-08.
"""

from dataclasses import dataclass
from functools import cached_property

import torch

from minifsdp.engine.messages import message


@dataclass(frozen=True)
class Cut:
    """How one parameter is cut.

    Args:
        shape: of the whole.
        dim: along which it is cut.
        num_shards: pieces, at least 1.

    Raises:
        NotImplementedError: it is not divisible along a dim that is not the first.
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
        """Rows, or columns, of a piece that is full."""
        return -(-self.shape[self.dim] // self.num_shards)

    @cached_property
    def chunk_numel(self) -> int:
        """Elements that each rank sends, padding included."""
        return self.num_rows * (self.shape.numel() // self.shape[self.dim] if self.shape[self.dim] else 0)

    @cached_property
    def padded_numel(self) -> int:
        """Elements of all pieces together."""
        return self.chunk_numel * self.num_shards

    def start(self, index: int) -> int:
        """The first row of piece ``index``; where the rows end if that piece is empty."""
        return min(index * self.num_rows, self.shape[self.dim])

    def local_shape(self, index: int) -> torch.Size:
        """The shape of piece ``index``; along `dim` it may be 0."""
        rows = self.start(index + 1) - self.start(index)
        return torch.Size((*self.shape[: self.dim], rows, *self.shape[self.dim + 1 :]))

    def local_part(self, whole: torch.Tensor, index: int) -> torch.Tensor:
        """Piece ``index`` of ``whole``, a view."""
        return whole.narrow(self.dim, self.start(index), self.local_shape(index)[self.dim])
