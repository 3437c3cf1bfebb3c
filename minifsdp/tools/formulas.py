"""The formulas behind ``cost.py``, one plain function for each quantity, on plain numbers.

They are kept apart from everything else so that they can be read beside a paper, and written down a second time in
another language. What the numbers mean together is told in ``cost.py``.

Worked example: of a unit of 9 elements each of 2 ranks stores 5 (`padded_row` says 10). Gathering its 40 bytes means
that each rank sends ``40 * 1 / 2 = 20`` (`gather_sends`).

*In torch:* nothing of the kind.

Spec: COST-01 to COST-08.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

__all__ = [
    "gather_sends",
    "hybrid_cross_host",
    "hybrid_cross_host_as_printed",
    "model_states",
    "padded_per_parameter",
    "padded_row",
    "peak_of_backward",
    "peak_of_forward",
    "peak_of_optimizer",
    "ring_all_reduce_sends",
    "ring_reduce_scatter_sends",
    "zero_bytes",
]

Shape = Sequence[int]

# ---- stored ---------------------------------------------------------------------------------------------------------


def padded_row(shapes: Sequence[Shape], num_shards: int) -> int:
    """Elements of a unit that is laid end to end and filled up to a multiple of ``num_shards``."""
    numel = sum(prod(shape) for shape in shapes)
    return -(-numel // num_shards) * num_shards


def padded_per_parameter(shapes: Sequence[Shape], num_shards: int) -> int:
    """Elements of a unit of which each parameter's first dim is filled up to a multiple of ``num_shards``."""
    return sum(-(-shape[0] // num_shards) * num_shards * prod(shape[1:]) for shape in shapes)


def model_states(
    num: float,
    *,
    parameter: float,
    gradient: float,
    optimizer: float,
    parameter_shards: int = 1,
    gradient_shards: int = 1,
    optimizer_shards: int = 1,
) -> float:
    """Bytes that a rank keeps of ``num`` elements: weights, gradients, optimizer state (COST-01, COST-02).

    Args:
        num: elements of the model.
        parameter, gradient, optimizer: bytes of each for one element.
        parameter_shards, gradient_shards, optimizer_shards: into how many pieces each is cut.
    """
    return num * (parameter / parameter_shards + gradient / gradient_shards + optimizer / optimizer_shards)


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
        parameter=low,
        gradient=low,
        optimizer=optimizer,
        optimizer_shards=num_ranks if stage >= 1 else 1,
        gradient_shards=num_ranks if stage >= 2 else 1,
        parameter_shards=num_ranks if stage >= 3 else 1,
    )


# ---- at the worst moment --------------------------------------------------------------------------------------------


def peak_of_forward(sizes: Sequence[float], root: float, *, keeps: bool, ahead: int, sorts: bool = False) -> float:
    """Bytes of gathered parameters, at most, in forward (COST-03).

    Args:
        sizes: bytes of each gathered unit, in the order of forward.
        root: bytes of the root's own parameters, gathered first and kept.
        keeps: units stay for backward, as with ``SHARD_GRAD_OP``.
        ahead: units that are gathered before their turn.
        sorts: what is gathered is copied once more, because it arrives sorted by rank.
    """
    copies = 2 if sorts else 1
    moments = [copies * root]
    for i, size in enumerate(sizes):
        there = sum(sizes[: i + 1]) if keeps else size
        coming = sum(sizes[i + 1 : i + 1 + ahead])
        moments.append(root + there + coming + (copies - 1) * size)
    return max(moments)


def peak_of_backward(
    sizes: Sequence[float],
    root: float,
    *,
    num_shards: int,
    keeps: bool,
    ahead: int,
    gradient: float,
    reduction: float,
    stored: float,
    held: str = "nothing",
    reduces: bool = True,
    joins: bool = True,
    sorts: bool = False,
    is_replicated: bool = False,
) -> float:
    """Bytes beside what is stored, at most, in backward (COST-03, COST-07, COST-08).

    The root's unit comes last, and its gradient waits all the time for the part that was used first in forward.

    Args:
        sizes: bytes of each gathered unit, in the order of *forward*.
        root: bytes of the root's own gathered parameters.
        num_shards: pieces that a unit is cut into.
        keeps: units are still there from forward.
        ahead: 1 if the next unit is gathered before the gradients of this one are computed, else 0.
        gradient: bytes of a unit's gradient for each byte of the gathered unit: nearly always 1.
        reduction: bytes of a gradient in travel, for each byte of the gathered unit.
        stored: bytes of a gradient at rest, for each byte of the gathered unit.
        held: gradients from earlier micro-batches: ``"nothing"``, ``"reduced"`` ones or ``"unreduced"`` ones.
        reduces: this backward ends in a reduction.
        joins: a gradient is put together from its parameters', which takes it twice for a moment.
        sorts: gathers are copied once more, and so are gradients, into the row that travels.
        is_replicated: units are computed on where they are stored, and nothing is gathered.
    """
    units = [root, *sizes] if root else list(sizes)
    share = 1 / num_shards if num_shards > 1 else 0.0  # what is not cut is summed in place
    moments = [0.0]
    for i in reversed(range(len(units))):
        here, after = units[i], units[i + 1] if i + 1 < len(units) else 0.0
        elsewhere = 0.0 if is_replicated else _gathered_elsewhere(units, i, keeps, ahead, has_root=root > 0)
        resting = _gradients_at_rest(units, i, num_shards, gradient, stored, held, reduces)
        waiting = gradient * root if i else 0.0
        gathered = 0.0 if is_replicated else here
        # One after the other: the gather is sorted, gradients are computed, packed, and the one before is completed.
        arriving = gathered + (here if sorts else 0.0)
        computing = gathered + gradient * here * (2 if joins else 1)
        stages = [arriving, computing]
        under_way = 0.0
        if reduces:
            under_way = reduction * after * (1 + share)
            if sorts or reduction != gradient:
                # Sorted by rank, or cast, into a row of its own.
                stages.append((gradient + reduction) * here)
            stages.append(
                reduction * here * (1 + share) + (stored * after / num_shards if stored != reduction else 0.0)
            )
        moments.append(elsewhere + resting + waiting + under_way + max(stages))
    return max(moments)


def _gathered_elsewhere(units: Sequence[float], i: int, keeps: bool, ahead: int, *, has_root: bool) -> float:
    """Bytes of the gathered units other than number ``i``, whose backward runs; the root, if there is one, is first."""
    if keeps:
        return sum(units[:i])
    first = int(has_root)
    return sum(units[max(first, i - ahead) : i]) + (units[0] if has_root and i else 0.0)


def _gradients_at_rest(
    units: Sequence[float], i: int, num_shards: int, gradient: float, stored: float, held: str, reduces: bool
) -> float:
    """Bytes of gradients that are neither being computed nor under way, in the backward of unit ``i``."""
    if held == "reduced":
        return stored * sum(units) / num_shards
    if not reduces:
        return gradient * sum(units if held == "unreduced" else units[i + 1 :])
    waiting = gradient * sum(units[: i + 1]) if held == "unreduced" else 0.0
    return waiting + stored * sum(units[i + 2 :]) / num_shards


def peak_of_optimizer(num: float, *, gradient: float, scratch: float) -> float:
    """Bytes beside weights and state during the optimizer's step.

    Args:
        num: elements that this rank stores.
        gradient: bytes of a stored gradient's element.
        scratch: bytes of the optimizer's own intermediate results for an element: 4 for ``foreach``, 0 for ``fused``.
    """
    return num * (gradient + scratch)


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
