"""The size of a sharded checkpoint, and the memory and traffic of saving it, for any number of ranks.

`torch.distributed.checkpoint` writes one file for each rank, with the rank's rows of every tensor, and one file
``.metadata``, which lists the rows of all ranks. Worked example, one unit with ``weight`` (5 x 4) and ``bias`` (5) in
float32 on two ranks, with Adam's two averages for each parameter::

    rows             rank 0: rows 0 to 2             rank 1: rows 3 and 4
    bytes of a file  3 * (3 * 4 + 3) * 4 = 180       3 * (2 * 4 + 2) * 4 = 120
    files            2 + 1
    listed shards    (2 parameters * 3 tensors) * 2 ranks, and one step counter for each parameter = 14
    memory           the wrapper all-gathers the unit (25 elements, padded to 26) for one tensor of each parameter at
                     a time: 26 * 4 = 104 bytes, in addition to the 180 bytes of the result. `fully_shard` needs none,
                     because its parameters and averages already are rows.

Sizes of files are the bytes of the tensors; the file format adds some bytes for each tensor.

Spec: SCALE-01, SCALE-02, SCALE-03.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from minifsdp_tools.formulas import Shape, padded_flat, ring_sends


@dataclass(frozen=True)
class Checkpoint:
    """A sharded checkpoint of a model and its optimizer.

    Args:
        units: the shapes of the parameters of each unit; the root is one of them.
        num_ranks: the number of ranks that share the parameters.
        tensors: stored tensors for each parameter. With Adam, these are the parameter and two averages.
        scalars: stored 0-d tensors for each parameter. With Adam, this is the step counter.
        element_size: bytes of an element.
    """

    units: Sequence[Sequence[Shape]]
    num_ranks: int
    tensors: int = 3
    scalars: int = 1
    element_size: int = 4

    @property
    def num_files(self) -> int:
        """One file for each rank, and ``.metadata``. Some parameter must have at least one row for each rank."""
        return self.num_ranks + 1

    def rows(self, shape: Shape, rank: int) -> int:
        """The number of rows of a parameter that ``rank`` stores, as in ``torch.chunk``."""
        each = -(-shape[0] // self.num_ranks)
        return max(0, min(each, shape[0] - rank * each))

    def file_bytes(self, rank: int) -> int:
        """Bytes of the tensors with rows in the file of ``rank``; also the size of its sharded state dicts."""
        elements = sum(self.rows(shape, rank) * prod(shape[1:]) for unit in self.units for shape in unit)
        return self.tensors * self.element_size * elements

    def total_bytes(self) -> int:
        """Bytes of the tensors with rows in all files; the size of the full state dicts, without padding."""
        return self.tensors * self.element_size * sum(prod(shape) for unit in self.units for shape in unit)

    def num_listed(self) -> int:
        """The number of tensors and shards in ``.metadata``. All ranks without a row of a parameter are listed once."""
        shapes = [shape for unit in self.units for shape in unit]
        holders = (sum(self.rows(shape, rank) > 0 for rank in range(self.num_ranks)) for shape in shapes)
        return sum(self.tensors * min(held + 1, self.num_ranks) + self.scalars for held in holders)

    def largest_unit(self) -> int:
        """Bytes of the largest unsharded unit, with its padding."""
        return self.element_size * max(padded_flat(unit, self.num_ranks) for unit in self.units)

    def save_memory(self, rank: int, *, is_flat: bool) -> int:
        """Memory for the state dicts on ``rank``, in addition to the memory of the model and of the optimizer.

        Args:
            rank: the rank.
            is_flat: whether units have a flat parameter, as with the wrapper. Otherwise the state dicts refer to the
                shards of the model and of the optimizer, as with `fully_shard`.
        """
        return self.file_bytes(rank) + self.largest_unit() if is_flat else 0

    def load_memory(self, rank: int, *, is_flat: bool) -> int:
        """Memory for ``set_state_dict`` of sharded state dicts on ``rank``, in addition to the dicts and the model.

        With a flat parameter, the optimizer gets new averages, and rows are all-gathered for one parameter at a time:
        its padded rows on all ranks, and a copy of those of this rank.
        """
        averages = sum(padded_flat(unit, self.num_ranks) for unit in self.units) // self.num_ranks * (self.tensors - 1)
        rows = max(-(-shape[0] // self.num_ranks) * prod(shape[1:]) for unit in self.units for shape in unit)
        return self.element_size * (averages + (self.num_ranks + 1) * rows) if is_flat else 0

    def sent_bytes(self, *, is_flat: bool) -> float:
        """Bytes that each rank sends and receives for the state dicts: the all-gathers of units with a flat parameter.

        `torch.distributed.checkpoint` sends no values.
        """
        padded = self.element_size * sum(padded_flat(unit, self.num_ranks) for unit in self.units)
        return ring_sends(self.tensors * padded, self.num_ranks) if is_flat else 0.0


def llama_70b() -> list[list[tuple[int, ...]]]:
    """The units of Llama 3 70B: 80 blocks, and the root with the embedding and the output."""
    width, hidden, keys, vocabulary = 8192, 28672, 1024, 128256
    attention = [(width, width), (keys, width), (keys, width), (width, width)]
    block = [*attention, (hidden, width), (hidden, width), (width, hidden), (width,), (width,)]
    return [block] * 80 + [[(vocabulary, width), (vocabulary, width), (width,)]]
