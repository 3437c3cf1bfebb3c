"""Formulas of papers that only the documentation and the tests use: the table of ZeRO, and the traffic of hybrids.

Worked example: with ZeRO-3 on 2 ranks, each rank stores half of the 16 bytes of an element (`zero_bytes`).
"""

from minifsdp_tools.formulas import ring_all_reduce_sends


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
