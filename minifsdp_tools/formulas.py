"""Formulas of stored and sent bytes, one function for each quantity, on plain numbers; and numbers of bytes as text.

They are separate from the other modules, so that they can be compared with a paper. The peaks of a job are in
``peaks.py``, and ``cost.py`` explains the combined numbers.

Worked example: each of 2 ranks stores 5 elements of a unit of 9 (`padded_flat` returns 10). In the all-gather of its 40
bytes, each rank sends ``40 * 1 / 2 = 20`` (`ring_sends`).

*In torch:* nothing comparable.

Spec: COST-02, COST-06.
"""

from collections.abc import Sequence
from math import prod

Shape = Sequence[int]

# ---- stored ---------------------------------------------------------------------------------------------------------


def padded_flat(shapes: Sequence[Shape], num_shards: int) -> int:
    """Elements of a unit whose parameters are concatenated and padded to a multiple of ``num_shards``."""
    numel = sum(prod(shape) for shape in shapes)
    return -(-numel // num_shards) * num_shards


def padded_per_parameter(shapes: Sequence[Shape], num_shards: int) -> int:
    """Elements of a unit in which each parameter's first dim is padded to a multiple of ``num_shards``."""
    return sum(
        -(-shape[0] // num_shards) * num_shards * prod(shape[1:]) for shape in shapes
    )


# ---- sent -----------------------------------------------------------------------------------------------------------


def ring_sends(num_bytes: float, num_ranks: int) -> float:
    """Bytes that each rank sends in an all-gather or a reduce-scatter of ``num_bytes`` in total."""
    return num_bytes * (num_ranks - 1) / num_ranks


def ring_all_reduce_sends(num_bytes: float, num_ranks: int) -> float:
    """Bytes that each rank sends in an all-reduce: a reduce-scatter, and an all-gather of the result (PAR-04)."""
    return 2 * ring_sends(num_bytes, num_ranks)


# ---- as text --------------------------------------------------------------------------------------------------------


def size_of(num_bytes: float) -> str:
    """A number of bytes as text: ``"4.2 MB"``; a MB is 10**6 bytes."""
    units = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
    large = (
        f"{num_bytes / factor:.3g} {unit}"
        for unit, factor in units
        if num_bytes >= factor
    )
    return next(large, f"{num_bytes:g} B")
