"""The formulas that stand in papers, one plain function for each quantity, on plain numbers.

They are kept apart from everything else so that they can be read beside a paper. What a job needs at its worst moment
is in ``peaks.py``, and what the numbers mean together is told in ``cost.py``.

Worked example: of a unit of 9 elements each of 2 ranks stores 5 (`padded_row` says 10). Gathering its 40 bytes means
that each rank sends ``40 * 1 / 2 = 20`` (`gather_sends`).

*In torch:* nothing of the kind.

Spec: COST-01, COST-02, COST-06.
"""

from collections.abc import Sequence
from math import prod

Shape = Sequence[int]

# ---- stored ---------------------------------------------------------------------------------------------------------


def padded_row(shapes: Sequence[Shape], num_shards: int) -> int:
    """Elements of a unit that is laid end to end and filled up to a multiple of ``num_shards``."""
    numel = sum(prod(shape) for shape in shapes)
    return -(-numel // num_shards) * num_shards


def padded_per_parameter(shapes: Sequence[Shape], num_shards: int) -> int:
    """Elements of a unit of which each parameter's first dim is filled up to a multiple of ``num_shards``."""
    return sum(-(-shape[0] // num_shards) * num_shards * prod(shape[1:]) for shape in shapes)


def model_states(num: float, *, parameter: float, gradient: float, optimizer: float) -> float:
    """Bytes that a rank keeps of ``num`` elements: weights, gradients, optimizer state (COST-01, COST-02).

    Args:
        num: elements of the model.
        parameter, gradient, optimizer: bytes of each for one element, as far as the rank keeps them: all, or a part.
    """
    return num * (parameter + gradient + optimizer)


def zero_bytes(num: float, num_ranks: int, stage: int, *, low: float = 2, optimizer: float = 12) -> float:
    """Bytes of model states under ZeRO's mixed precision: ``2 + 2 + 12`` for an element, the stage says what is cut.

    Args:
        num: elements of the model.
        num_ranks: ranks that share.
        stage: 1 cuts the optimizer state, 2 also the gradients, 3 also the parameters; 0 nothing.
        low: bytes of a weight, and of a gradient.
        optimizer: bytes of an element's state: full-precision copy, two moments.
    """
    return model_states(
        num,
        parameter=low / num_ranks if stage >= 3 else low,
        gradient=low / num_ranks if stage >= 2 else low,
        optimizer=optimizer / num_ranks if stage >= 1 else optimizer,
    )


# ---- sent -----------------------------------------------------------------------------------------------------------


def gather_sends(num_bytes: float, num_ranks: int) -> float:
    """Bytes that each rank sends so that all have ``num_bytes``, of which each had one part."""
    return num_bytes * (num_ranks - 1) / num_ranks


def ring_reduce_scatter_sends(num_bytes: float, num_ranks: int) -> float:
    """Bytes that each rank sends so that each has one part of the sum of ``num_bytes``."""
    return num_bytes * (num_ranks - 1) / num_ranks


def ring_all_reduce_sends(num_bytes: float, num_ranks: int) -> float:
    """Bytes that each rank sends so that all have the sum: a reduce-scatter, and a gather of the result (PAR-04)."""
    return ring_reduce_scatter_sends(num_bytes, num_ranks) + gather_sends(num_bytes, num_ranks)


def hybrid_cross_host(num_bytes: float, num_ranks: int, per_host: int) -> float:
    """Bytes that each rank sends to *other hosts* in a step of a hybrid strategy that shards inside of hosts.

    Only the all-reduce of gradients leaves the host: of 1/``per_host`` of the model, among ``num_ranks / per_host``
    replicas.
    """
    return ring_all_reduce_sends(num_bytes / per_host, num_ranks // per_host)


def hybrid_cross_host_as_printed(num_bytes: float, num_ranks: int, per_host: int) -> float:
    """The same as printed in arXiv 2304.11277: ``2 M (W - 1) / (G W)``.

    Its ring seems to have all W ranks in it, but the ranks of one host do not reduce with each other any more; there
    are W / G in the ring. With W = 16, G = 8, M = 1 this gives 0.234, where exactly 0.125 is sent.
    """
    return 2 * num_bytes * (num_ranks - 1) / (per_host * num_ranks)
