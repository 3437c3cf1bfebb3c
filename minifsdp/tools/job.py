"""A job: what is trained and how, and what follows from that before anything is priced.

A `Job` has a field for every choice that costs memory or traffic. The rest of the calculator asks it in bytes: how
large is each unit when it is gathered, how wide is a gradient in travel, and how much of it stays at rest.

Worked example, a unit of 1000 elements on two ranks, computed in bfloat16, reduced and stored in float32::

    gathered               2 bytes * 1000           2000      `Job.width`, `Job.sizes`
    a gradient in travel   4 bytes * 1000           4000      `Job.reduce_width`
    and at rest            4 bytes * 1000 / 2       2000      `Job.settled`

*In torch:* nothing of the kind.

Spec: COST-01, COST-07, COST-08.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from minifsdp.tools.formulas import Shape, padded_per_parameter, padded_row


@dataclass(frozen=True)
class Job:
    """What is trained, and how.

    Attributes:
        units: for each unit, in the order of forward, the shapes of its parameters.
        root: the shapes of the root's own parameters.
        trained: of these, the shapes of what is trained, the root's before all others; ``None`` for everything.
        strategy: ``FULL_SHARD``, ``SHARD_GRAD_OP``, ``NO_SHARD``, ``HYBRID_SHARD`` or ``_HYBRID_SHARD_ZERO2``.
        num_shards: ranks in the sharding group; for ``NO_SHARD`` 1 is meant, whatever is given.
        num_replicas: ranks in the replication group; with ``NO_SHARD`` all ranks.
        per_parameter: ``fully_shard``, which cuts each parameter's first dim, instead of the wrapper.
        root_frees: the root's own parameters are freed after forward like those of any unit, and gathered again.
        rests_with: ``reshard_after_forward`` as an integer: 1/``rests_with`` of each unit is kept for backward.
        stored: dtype of weights at rest.
        compute: ``param_dtype``; ``None`` for the stored one.
        reduce: ``reduce_dtype``; ``None`` for the compute dtype.
        optimizer: bytes of state for each element: 8 for Adam in float32, 0 for plain SGD.
        scratch: bytes of intermediate results in the optimizer's step, for each element.
        buffers: elements of all buffers; they are not sharded.
        buffer: ``buffer_dtype``; ``None`` for the stored one.
        offload: shards, their gradients and the optimizer state live on the host.
        forward_prefetch: forward asks for the next unit, too.
        backward_prefetch: backward asks for the next unit before this one's gradients are computed.
        overlaps: a gradient is reduced while that of the next unit is computed (`set_reduction_overlap`).
        micro_batches: backwards in a step.
        no_sync: only the last of them reduces.
        by_messages: between CPUs, with gloo: pieces of 256 KiB and more are sent one by one (``engine/gloo.py``), and
            a reduction has room for those of the other ranks.
        activations: bytes, to be added to the peaks of forward and backward; or, for each unit in the order of
            `sizes`, what its forward keeps until its backward, and at the end what is kept after the last.
    """

    units: Sequence[Sequence[Shape]]
    root: Sequence[Shape] = ()
    trained: Sequence[Sequence[Shape]] | None = None
    strategy: str = "FULL_SHARD"
    num_shards: int = 1
    num_replicas: int = 1
    per_parameter: bool = False
    root_frees: bool = False
    rests_with: int | None = None
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

    @property
    def shards(self) -> int:
        """Pieces that a unit is cut into."""
        return 1 if self.strategy == "NO_SHARD" else self.num_shards

    @property
    def keeps(self) -> bool:
        """Whether units stay gathered between forward and backward."""
        return self.strategy in ("SHARD_GRAD_OP", "NO_SHARD", "_HYBRID_SHARD_ZERO2") or self.shards == 1

    def numel(self, shapes: Sequence[Shape]) -> int:
        """Elements of a unit with these parameters, padding included."""
        return (padded_per_parameter if self.per_parameter else padded_row)(shapes, self.shards)

    @cached_property
    def sizes(self) -> list[float]:
        """Bytes of each gathered unit in the order of forward, the root's own parameters before all others."""
        return [self.width * self.numel(shapes) for shapes in [self.root, *self.units]]

    @cached_property
    def gradients(self) -> list[float]:
        """Bytes of the gradient of each unit, in the order of `sizes`; 0 of one in which nothing is trained."""
        if self.trained is None:
            return self.sizes
        both = zip([self.root, *self.units], self.trained, strict=True)
        # A flat unit has one gradient for all of its parameters, the frozen ones among them included.
        return [self.width * self.numel(all_ if some and not self.per_parameter else some) for all_, some in both]

    @property
    def num_trained(self) -> int:
        """Elements that the optimizer keeps a state for, on all shards together, padding included."""
        return sum(map(self.numel, [self.root, *self.units] if self.trained is None else self.trained))

    @property
    def width(self) -> int:
        """Bytes of an element that is computed with, and of its gradient."""
        return (self.compute or self.stored).itemsize

    @property
    def reduce_width(self) -> int:
        """Bytes of an element of a gradient in travel."""
        return (self.reduce or self.compute or self.stored).itemsize

    def settled(self, size: float) -> float:
        """Bytes that stay on the device of the reduced gradient of a unit that has ``size`` bytes when gathered."""
        return 0.0 if self.offload else size * self.stored.itemsize / self.width / self.shards

    @property
    def is_borrowed(self) -> bool:
        """Whether units are computed on where they are stored, so that nothing is gathered."""
        return self.shards == 1 and self.compute in (None, self.stored) and not self.offload

    @property
    def sorts(self) -> bool:
        """Whether what is gathered arrives sorted by rank and is copied once more, and so are gradients."""
        return self.per_parameter and any(len(shapes) > 1 for shapes in self.units)

    def puts_together(self, number: int) -> bool:
        """Whether the gradient of a unit, 0 for the root's, is put together from those of its parameters."""
        shapes = [self.root, *self.units][number]
        return not self.per_parameter and (len(shapes) > 1 or self.numel(shapes) > sum(map(math.prod, shapes)))

    @property
    def rests(self) -> float:
        """Bytes of all units that are kept for backward with ``rests_with``."""
        return sum(self.sizes[1:]) / self.rests_with if self.rests_with else 0.0

    def kept(self, num: int | None = None) -> float:
        """Bytes of activations when the root and ``num`` units have computed; ``None`` for the end of forward."""
        if not isinstance(self.activations, Sequence):
            return self.activations
        return sum(self.activations if num is None else self.activations[: num + 1])

    def reduces(self, number: int) -> bool:
        """Whether the backward of micro-batch ``number`` ends in a reduction; the first is 0."""
        return not self.no_sync or number == self.micro_batches - 1
