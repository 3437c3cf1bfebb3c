"""Formulas from papers, one function for each quantity, on plain numbers; and numbers of bytes as text.

They are separate from the other modules, so that they can be compared with a paper. The peaks of a job are in
``peaks.py``, and ``cost.py`` explains the combined numbers.

Worked example: each of 2 ranks stores 5 elements of a unit of 9 (`padded_flat` returns 10). In the all-gather of its 40
bytes, each rank sends ``40 * 1 / 2 = 20`` (`gather_sends`).

*In torch:* nothing comparable.

Spec: COST-01, COST-02, COST-06.
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
    return sum(-(-shape[0] // num_shards) * num_shards * prod(shape[1:]) for shape in shapes)


def model_states(num: float, *, parameter: float, gradient: float, optimizer: float) -> float:
    """Bytes that a rank stores for ``num`` elements: weights, gradients, optimizer state (COST-01, COST-02).

    Args:
        num: elements of the model.
        parameter, gradient, optimizer: bytes per element that the rank stores of each: all of them, or its share.
    """
    return num * (parameter + gradient + optimizer)


def zero_bytes(num: float, num_ranks: int, stage: int, *, low: float = 2, optimizer: float = 12) -> float:
    """Bytes of model states in ZeRO's mixed precision: ``2 + 2 + 12`` per element; the stage defines which are sharded.

    Args:
        num: elements of the model.
        num_ranks: ranks in the shard group.
        stage: 1 shards the optimizer state, 2 also the gradients, 3 also the parameters; 0 nothing.
        low: bytes of a weight, and of a gradient.
        optimizer: bytes of an element's state: full-precision copy, two moments.
    """
    # Bytes per element of the parameter, the gradient and the optimizer state, with the first stage that shards them.
    parts = ((low, 3), (low, 2), (optimizer, 1))
    return num * sum(size / num_ranks if stage >= first else size for size, first in parts)


# ---- sent -----------------------------------------------------------------------------------------------------------


def gather_sends(num_bytes: float, num_ranks: int) -> float:
    """Bytes that each rank sends in an all-gather of ``num_bytes`` in total."""
    return num_bytes * (num_ranks - 1) / num_ranks


def ring_reduce_scatter_sends(num_bytes: float, num_ranks: int) -> float:
    """Bytes that each rank sends in a reduce-scatter of ``num_bytes`` in total."""
    return num_bytes * (num_ranks - 1) / num_ranks


def ring_all_reduce_sends(num_bytes: float, num_ranks: int) -> float:
    """Bytes that each rank sends in an all-reduce: a reduce-scatter, and an all-gather of the result (PAR-04)."""
    return ring_reduce_scatter_sends(num_bytes, num_ranks) + gather_sends(num_bytes, num_ranks)


def hybrid_cross_host(num_bytes: float, num_ranks: int, per_host: int) -> float:
    """Bytes that each rank sends to *other hosts* in a step of a hybrid strategy with one shard group per host.

    Only the all-reduce of gradients leaves the host: of 1/``per_host`` of the model, among ``num_ranks / per_host``
    replicas.
    """
    return ring_all_reduce_sends(num_bytes / per_host, num_ranks // per_host)


def hybrid_cross_host_as_printed(num_bytes: float, num_ranks: int, per_host: int) -> float:
    """The formula as printed in arXiv 2304.11277: ``2 M (W - 1) / (G W)``.

    It seems to assume a ring of all W ranks. But the ranks of one host do not all-reduce with each other, so the ring
    has W / G ranks. With W = 16, G = 8, M = 1 the printed formula gives 0.234; the exact value is 0.125.
    """
    return 2 * num_bytes * (num_ranks - 1) / (per_host * num_ranks)


# ---- as text --------------------------------------------------------------------------------------------------------


def size_of(num_bytes: float) -> str:
    """A number of bytes as text: ``"4.2 MB"``; a MB is 10**6 bytes."""
    units = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
    large = (f"{num_bytes / factor:.3g} {unit}" for unit, factor in units if num_bytes >= factor)
    return next(large, f"{num_bytes:g} B")
