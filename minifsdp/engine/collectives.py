"""The collectives of a training step (all-gather, reduce-scatter, all-reduce) and the scaling of gradients.

FSDP is built on three collectives. Two ranks, a tensor of four elements::

    all_gather       rank 0 has [1 2], rank 1 has [3 4]              both get [1 2 3 4]
    reduce_scatter   rank 0 has [1 2 3 4], rank 1 has [5 6 7 8]      rank 0 gets [6 8], rank 1 gets [10 12]
    all_reduce       rank 0 has [1 2], rank 1 has [3 4]              both get [4 6]

The last two *sum*. Training needs the *mean* over all ranks, so the sum is divided by their number: see `Scaling`.
Dividing after the sum costs least, because then only this rank's shard must be divided. In float16 the sum itself can
overflow (the largest value is 65504), so one part of the division happens before the sum and one part after it. The
first divisor is a power of two. It doubles while it divides the number of ranks and is smaller than the quotient: 8
ranks divide by 4 before and by 2 after the sum.

Backends do not support complex numbers, so their real and imaginary parts are summed. Collectives that only copy send
bytes if gloo or NCCL does not support the dtype.

The functions call the methods of the ``ProcessGroup`` directly, with option objects created once. The public functions
of ``torch.distributed`` look up the group, check dtypes and wrap exceptions in each call, which for tiny units costs
more than the rest of the engine. Profilers and dispatch modes see the same ``c10d`` operators in both cases. Between
CPUs, another transport can replace the group for the first two collectives, see `Group.transport`. An object of a case
can replace both, see `Group.sender`.

The functions return a handle to wait for. It hides a difference between backends: gloo returns a ``Work``, and NCCL
returns ``None``. An NCCL kernel runs on the stream on which it was issued, so later work on this stream runs after it.
An observer may issue the collective instead, to log it and to add a report about the other ranks to its error
(``minifsdp/checks``).

*In torch:* FSDP1 calls the public functions in ``_flat_param.py`` and ``_runtime_utils.py``; FSDP2 has
``_fsdp_collectives.py`` with pluggable allocators. Both use the same division rule.

Spec: SHARD-06, SHARD-11, HYB-04, HYB-05, PAR-04, STREAM-01, LEDGER-02, LEDGER-03, LEDGER-11, ORDER-10.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from minifsdp.engine.events import Handle, events
from minifsdp.engine.mesh import Group


def on_current_stream(options: Any) -> Any:
    """Sets options so that a collective on CUDA runs on the current stream, instead of a hidden one.

    This is the communication stream. The CPU is not blocked, and the call returns ``None``. Gloo returns a ``Work`` in
    both cases.
    """
    options.asyncOp = False
    return options


GATHER = on_current_stream(c10d.AllgatherOptions())
REDUCE_SCATTER = on_current_stream(c10d.ReduceScatterOptions())
ALL_REDUCE = on_current_stream(c10d.AllreduceOptions())

# torch 2.13 introduced the new names; earlier versions have only the old ones.
_IS_RENAMED = hasattr(dist.ProcessGroup, "all_gather_single")
GATHER_METHOD = "all_gather_single" if _IS_RENAMED else "_allgather_base"
SCATTER_METHOD = "reduce_scatter_single" if _IS_RENAMED else "_reduce_scatter_base"

# Both gloo and NCCL can send these dtypes, and other dtypes as bytes.
SENDABLE = {
    torch.half,
    torch.bfloat16,
    torch.float,
    torch.double,
    torch.uint8,
    torch.int,
    torch.long,
}


def all_gather(
    group: Group,
    output: torch.Tensor,
    local_shard: torch.Tensor,
    unit: str | None = None,
) -> Handle:
    """All-gather: fills ``output`` with the shards of all ranks, one after the other, in order of their position.

    Every rank of the group must call it.

    Args:
        group: the ranks that take part.
        output: 1-D, ``group.size * local_shard.numel()`` elements.
        local_shard: 1-D, contiguous, the same number of elements on every rank.
        unit: the name of the unit, if the collective belongs to a unit. The functions below have the same argument.
    """
    transport = group.transport if output.is_cpu else None
    method = getattr(group.sender or transport or group.process_group, GATHER_METHOD)
    sent = [output, local_shard]
    if output.dtype not in SENDABLE:
        sent = [tensor.view(torch.uint8) for tensor in sent]
    return events.collective(
        "all-gather", group, [output], method, (*sent, GATHER), unit
    )


def all_gather_each(
    group: Group,
    outputs: Sequence[torch.Tensor],
    local_shards: Sequence[torch.Tensor],
    unit: str | None = None,
) -> Handle:
    """All-gathers several tensors at once by the transport of the group, without sorting the result.

    Every rank of the group must call it.

    Args:
        group: the ranks that take part.
        outputs: each of shape (``group.size``, elements), in one memory.
        local_shards: each 1-D, in one memory as well; cast to the dtype of its output.
    """
    method = group.transport.all_gather_each
    return events.collective(
        "all-gather", group, outputs, method, (outputs, local_shards), unit
    )


def reduce_scatter(
    group: Group,
    local_shard: torch.Tensor,
    whole: torch.Tensor,
    unit: str | None = None,
    parts: Sequence[int] = (),
) -> Handle:
    """Reduce-scatter: fills ``local_shard`` with this rank's part of the sum of ``whole`` over the group.

    Every rank of the group must call it. ``whole`` is 1-D with ``group.size * local_shard.numel()`` elements. The
    caller must keep it alive until it has waited for the handle. ``parts`` are the numbers of the parameters in it.
    """
    if whole.is_complex():
        local_shard = torch.view_as_real(local_shard)
        whole = torch.view_as_real(whole)
    transport = group.transport if whole.is_cpu else None
    method = getattr(group.sender or transport or group.process_group, SCATTER_METHOD)
    sent = (local_shard, whole, REDUCE_SCATTER)
    return events.collective(
        "reduce-scatter", group, [whole], method, sent, unit, parts
    )


def all_reduce(
    group: Group,
    tensor: torch.Tensor,
    unit: str | None = None,
    parts: Sequence[int] = (),
    kind: str = "all-reduce",
) -> Handle:
    """All-reduce: sums ``tensor`` over the group, in place. Every rank of the group must call it."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return events.collective(
        kind,
        group,
        [tensor],
        group.process_group.allreduce,
        ([tensor], ALL_REDUCE),
        unit,
        parts,
    )


@dataclass(frozen=True)
class Scaling:
    """The divisors of the gradient, before and after it is summed. Their product is usually the number of ranks."""

    before: float
    after: float

    @classmethod
    def of(cls, divisor: float, dtype: torch.dtype) -> Scaling:
        """The division by ``divisor``, split in two if the sum itself could overflow in ``dtype``."""
        if dtype is not torch.float16:
            return cls(1.0, float(divisor))
        before = 1.0
        while divisor % before == 0 and divisor / before > before:
            before *= 2
        return cls(before, divisor / before)

    def prepare(self, whole: torch.Tensor) -> None:
        """Divides the input of the sum in place."""
        if self.before != 1.0:
            whole.div_(self.before)

    def complete(self, local_shard: torch.Tensor) -> None:
        """Divides the sum in place."""
        if self.after != 1.0:
            local_shard.div_(self.after)
