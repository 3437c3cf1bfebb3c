"""The input of the cost calculator: the model's sizes, the choices, and quantities that follow directly from them.

A `Job` has a field for every choice that affects memory or communication. The rest of the calculator uses its
attributes, in bytes: the size of each unsharded unit, the width of a reduced element, and the stored gradient.

Worked example, a unit of 1000 elements on two ranks, computed in bfloat16, reduced and stored in float32::

    unsharded               2 bytes * 1000           2000      `Job.width`, `Job.sizes`
    gradient in reduction   4 bytes * 1000           4000      `Job.reduce_width`
    stored gradient         4 bytes * 1000 / 2       2000      `Job.settled`

*In torch:* nothing comparable.

Spec: COST-01, COST-07, COST-08.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from minifsdp.engine.messages import message
from minifsdp_tools.formulas import Shape, padded_flat, padded_per_parameter, ring_sends

STRATEGIES = (
    "FULL_SHARD",
    "SHARD_GRAD_OP",
    "NO_SHARD",
    "HYBRID_SHARD",
    "_HYBRID_SHARD_ZERO2",
)


@dataclass
class Job:
    """The model and all choices that affect its cost. To change a choice, create another job (``dataclasses.replace``).

    Args:
        units: for each unit, in the order of forward, the shapes of its parameters.
        root: the shapes of the root's own parameters.
        trained: the shapes of the trained parameters, by unit, with the root first; ``None`` if all are trained.
        strategy: ``FULL_SHARD``, ``SHARD_GRAD_OP``, ``NO_SHARD``, ``HYBRID_SHARD`` or ``_HYBRID_SHARD_ZERO2``.
        num_shards: ranks in the shard group; ignored for ``NO_SHARD``, which has 1.
        num_replicas: ranks in the replicate group; with ``NO_SHARD`` all ranks.
        per_parameter: use ``fully_shard``, which shards the first dim of each parameter, instead of the wrapper.
        root_frees: the root's own parameters are resharded after forward like any unit, and all-gathered again.
        reshards_to: ``reshard_after_forward`` as an integer: 1/``reshards_to`` of each unit is kept for backward.
        stored: dtype of the stored weights.
        compute: ``param_dtype``; ``None`` for the stored one.
        reduce: ``reduce_dtype``; ``None`` for the compute dtype.
        optimizer: bytes of state for each element: 8 for Adam in float32, 0 for plain SGD.
        scratch: bytes of intermediate results in the optimizer's step, for each element.
        buffers: elements of all buffers; they are not sharded.
        buffer: ``buffer_dtype``; ``None`` for the stored one.
        offload: shards, their gradients and the optimizer state are on the host.
        forward_prefetch: forward prefetches the next unit.
        backward_prefetch: backward prefetches the next unit before this one's gradients are computed.
        overlaps: a gradient is reduced while that of the next unit is computed (`set_reduction_overlap`).
        micro_batches: number of backwards in a step.
        no_sync: only the last backward reduces gradients.
        by_messages: between CPUs, with gloo: shards of 256 KiB and more are sent one by one (``minifsdp_gloo``), and
            a reduction has buffers for those of the other ranks.
        activations: bytes, added to the peaks of forward and backward. Or one number for each unit in the order of
            `sizes`, the bytes that its forward keeps until its backward, and one for those kept after the last unit.

    Attributes:
        shards: the number of shards of a unit.
        keeps: whether units stay unsharded between forward and backward.
        width: bytes of an element in the compute dtype; its gradient has the same dtype.
        reduce_width: bytes of an element of a gradient in a reduction.
        sizes: bytes of each unsharded unit in the order of forward, with the root's own parameters first.
        gradients: bytes of the gradient of each unit, in the order of `sizes`; 0 if all its parameters are frozen.
        num_trained: elements of a shard with an optimizer state, including padding.
        parameter_bytes: bytes of the parameters in a shard, including padding.
        optimizer_bytes: bytes of the optimizer states in a shard.
        num_reductions: reductions of a unit in a step.
        is_borrowed: whether units compute with the stored tensors, so that nothing is all-gathered.
        sorts: whether all-gather outputs are sorted by rank and copied again, and reduce-scatter inputs likewise.
        in_smaller_mesh: unsharded bytes of the units that ``reshards_to`` ranks keep and all-gather for backward.
        sent_in_smaller_mesh: bytes that each rank sends in all-gathers among ``reshards_to`` ranks.
        to_smaller_mesh: bytes of all units that are kept for backward with ``reshards_to``.

    Raises:
        ValueError: the strategy is unknown, or a number is less than 1.
    """

    units: Sequence[Sequence[Shape]]
    root: Sequence[Shape] = ()
    trained: Sequence[Sequence[Shape]] | None = None
    strategy: str = "FULL_SHARD"
    num_shards: int = 1
    num_replicas: int = 1
    per_parameter: bool = False
    root_frees: bool = False
    reshards_to: int | None = None
    stored: torch.dtype = torch.float32
    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    optimizer: float = 8
    scratch: float = 0
    buffers: int = 0
    buffer: torch.dtype | None = None
    offload: bool = False
    forward_prefetch: bool = False
    backward_prefetch: bool = True
    overlaps: bool = True
    micro_batches: int = 1
    no_sync: bool = False
    by_messages: bool = False
    activations: float | Sequence[float] = 0

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise ValueError(
                message(
                    "cost-strategy", known=", ".join(STRATEGIES), strategy=self.strategy
                )
            )
        if min(self.num_shards, self.num_replicas, self.micro_batches) < 1:
            raise ValueError(
                message(
                    "cost-counts",
                    num_shards=self.num_shards,
                    num_replicas=self.num_replicas,
                    micro_batches=self.micro_batches,
                )
            )
        self.shards = 1 if self.strategy == "NO_SHARD" else self.num_shards
        self.is_borrowed = (
            self.shards == 1
            and self.compute in (None, self.stored)
            and not self.offload
        )
        # The wrapper frees copies of a unit that is not sharded, like sharded units.
        is_single = self.shards == 1 and (self.per_parameter or self.is_borrowed)
        self.keeps = is_single or (
            self.shards > 1
            and self.strategy in ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2")
        )
        self.width = (self.compute or self.stored).itemsize
        self.reduce_width = (self.reduce or self.compute or self.stored).itemsize
        every = [self.root, *self.units]
        trained = every if self.trained is None else self.trained
        self.sizes: list[float] = [self.width * self.numel(shapes) for shapes in every]
        # A flat unit has one gradient for all of its parameters, including frozen ones.
        counted = [
            all_ if some and not self.per_parameter else some
            for all_, some in zip(every, trained, strict=True)
        ]
        self.gradients: list[float] = [
            self.width * self.numel(shapes) for shapes in counted
        ]
        self.num_trained = sum(map(self.numel, trained)) / self.shards
        self.parameter_bytes = (
            sum(self.sizes) / self.width / self.shards * self.stored.itemsize
        )
        self.optimizer_bytes = self.num_trained * self.optimizer
        self.num_reductions = 1 if self.no_sync else self.micro_batches
        self.sorts = self.per_parameter and any(
            len(shapes) > 1 for shapes in self.units
        )
        self.in_smaller_mesh = (
            self.micro_batches * sum(self.sizes[1:])
            if self.reshards_to and not self.keeps
            else 0.0
        )
        self.sent_in_smaller_mesh = ring_sends(
            self.in_smaller_mesh, self.reshards_to or 1
        )
        self.to_smaller_mesh = (
            sum(self.sizes[1:]) / self.reshards_to if self.reshards_to else 0.0
        )

    def numel(self, shapes: Sequence[Shape]) -> int:
        """Elements of a unit with these parameters, including padding."""
        return (padded_per_parameter if self.per_parameter else padded_flat)(
            shapes, self.shards
        )

    def settled(self, size: float) -> float:
        """Bytes on the device of the reduced gradient of a unit that has ``size`` bytes when it is unsharded."""
        return (
            0.0
            if self.offload
            else size * self.stored.itemsize / self.width / self.shards
        )

    def puts_together(self, number: int) -> bool:
        """Whether the gradient of a unit (0: the root) is concatenated from those of its parameters."""
        shapes = [self.root, *self.units][number]
        return not self.per_parameter and (
            len(shapes) > 1 or self.numel(shapes) > sum(map(math.prod, shapes))
        )

    def kept(self, num: int | None = None) -> float:
        """Bytes of activations after the root and ``num`` units have computed; ``None`` for the end of forward."""
        if not isinstance(self.activations, Sequence):
            return self.activations
        return sum(self.activations if num is None else self.activations[: num + 1])

    def reduces(self, number: int) -> bool:
        """Whether the backward of micro-batch ``number``, counted from 0, ends in a reduction."""
        return not self.no_sync or number == self.micro_batches - 1
