"""The only place that talks to other ranks while training: gather, reduce-scatter, all-reduce, broadcast, scaling.

Three collectives carry all of FSDP. Two ranks, a tensor of four elements::

    gather           rank 0 has [1 2], rank 1 has [3 4]              both get [1 2 3 4]
    reduce_scatter   rank 0 has [1 2 3 4], rank 1 has [5 6 7 8]      rank 0 gets [6 8], rank 1 gets [10 12]
    all_reduce       rank 0 has [1 2], rank 1 has [3 4]              both get [4 6]

The last two *sum*. What training wants is the *mean* over all ranks, so one must divide by their number: that is
`Scaling`. Dividing after the sum costs least, since by then only this rank's piece is left. In float16 the sum itself
can overflow (its largest number is 65504), so there one part of the division goes before the sum and one part after
it, as near to the square root each as powers of two allow: 8 ranks divide by 4 before and by 2 after.

Backends know no complex numbers. To send and to add them is to send and to add their two parts, so those are sent.

The functions call the methods of the ``ProcessGroup`` itself, with option objects made once. The public functions of
``torch.distributed`` look up the group, check dtypes and wrap exceptions in each call, which for tiny units costs more
than the rest of the engine; profilers and dispatch modes see the same ``c10d`` operators either way. Between CPUs
something else may carry the first two in the group's place, see `Group.transport`.

Each is an entry of the ledger (``ledger.py``), which is the promise too, whatever the backend hands back: gloo a
``Work`` to wait for, NCCL nothing at all. There the kernel runs on the stream on which it was issued, and what is
issued there later runs after it without being told.

*In torch:* FSDP1 calls the public functions in ``_flat_param.py`` and ``_runtime_utils.py``; FSDP2 has
``_fsdp_collectives.py`` with pluggable allocators. The division rule is theirs.

Spec: SHARD-06, SHARD-11, HYB-04, HYB-05, PAR-04, STREAM-01.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, BroadcastOptions, ReduceScatterOptions

from minifsdp.engine.ledger import Collective
from minifsdp.engine.mesh import Group


def _on_current_stream(options: Any) -> Any:
    # On CUDA a synchronous call puts the collective on the current stream, which is the lane's, instead of a hidden
    # one, does not stop the CPU, and returns None. Gloo hands back a Work in both cases.
    options.asyncOp = False
    return options


_GATHER = _on_current_stream(AllgatherOptions())
_REDUCE_SCATTER = _on_current_stream(ReduceScatterOptions())
_ALL_REDUCE = _on_current_stream(AllreduceOptions())

# torch 2.13 gave the two their present names; before that they had only the older ones.
_IS_RENAMED = hasattr(dist.ProcessGroup, "all_gather_single")
_GATHER_METHOD = "all_gather_single" if _IS_RENAMED else "_allgather_base"
_REDUCE_SCATTER_METHOD = "reduce_scatter_single" if _IS_RENAMED else "_reduce_scatter_base"


def gather(group: Group, output: torch.Tensor, piece: torch.Tensor, unit: str | None = None) -> Collective:
    """All-gather: ``output`` becomes the pieces of all ranks, one after the other, in order of their position.

    Every rank of the group must call it.

    Args:
        group: who gathers.
        output: 1-D, ``group.size * piece.numel()`` elements.
        piece: 1-D, contiguous, the same number of elements on every rank.
        unit: the name of the unit that it is for, if it is for one, as everywhere below.
    """
    if output.is_complex():
        output, piece = torch.view_as_real(output), torch.view_as_real(piece)
    carrier = group.process_group if group.transport is None or not output.is_cpu else group.transport
    how = (getattr(carrier, _GATHER_METHOD), output, piece, _GATHER)
    return Collective("all-gather", group, output.nbytes, *how, on_cpu=output.is_cpu, unit=unit, dtype=output.dtype)


def ask(group: Group, answers: torch.Tensor, mine: torch.Tensor) -> Collective:
    """An all-gather in which ranks make sure that they do the same, apart from all others where that is possible.

    Every rank of the group must call it. For a rank that does not, because it has gone another way, the others wait.
    """
    apart = group.transport.all_gather_apart if group.transport is not None and answers.is_cpu else None
    method = apart or getattr(group.process_group, _GATHER_METHOD)
    return Collective("order check", group, answers.nbytes, method, answers, mine, _GATHER)


def gathers_each(group: Group | None, outputs: Sequence[torch.Tensor]) -> bool:
    """Whether `gather_each` can fill ``outputs``, and is the better way."""
    transport = None if group is None or not outputs[0].is_cpu else group.transport
    return transport is not None and bool(transport.gathers_each(outputs))


def gather_each(
    group: Group, outputs: Sequence[torch.Tensor], pieces: Sequence[torch.Tensor], unit: str | None = None
) -> Collective:
    """One all-gather of several tensors, where `gathers_each` says so; what arrives need not be sorted.

    Every rank of the group must call it.

    Args:
        group: who gathers.
        outputs: each (``group.size``, its elements), side by side in one memory.
        pieces: each 1-D, side by side as well; cast to the dtype of its output.
    """
    if outputs[0].is_complex():
        outputs, pieces = ([torch.view_as_real(each) for each in tensors] for tensors in (outputs, pieces))
    num_bytes = sum(output.nbytes for output in outputs)
    send = group.transport.all_gather_each
    dtype = outputs[0].dtype
    return Collective("all-gather", group, num_bytes, send, outputs, pieces, on_cpu=True, unit=unit, dtype=dtype)


def reduce_scatter(
    group: Group, piece: torch.Tensor, whole: torch.Tensor, unit: str | None = None, parts: Sequence[int] = ()
) -> Collective:
    """Reduce-scatter: ``piece`` becomes this rank's part of the sum of ``whole`` over the group.

    Every rank of the group must call it. ``whole`` is 1-D with ``group.size * piece.numel()`` elements, and must be
    kept alive until the promise was waited for. ``parts`` are the numbers of the parameters whose gradients it has.
    """
    if whole.is_complex():
        piece, whole = torch.view_as_real(piece), torch.view_as_real(whole)
    carrier = group.process_group if group.transport is None or not whole.is_cpu else group.transport
    method = getattr(carrier, _REDUCE_SCATTER_METHOD)
    what: dict[str, Any] = {"on_cpu": whole.is_cpu, "unit": unit, "parts": parts, "dtype": whole.dtype}
    return Collective("reduce-scatter", group, whole.nbytes, method, piece, whole, _REDUCE_SCATTER, **what)


def all_reduce(group: Group, tensor: torch.Tensor, unit: str | None = None, parts: Sequence[int] = ()) -> Collective:
    """All-reduce: ``tensor`` becomes, in place, the sum over the group. Every rank of the group must call it."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    what: dict[str, Any] = {"on_cpu": tensor.is_cpu, "unit": unit, "parts": parts, "dtype": tensor.dtype}
    return Collective("all-reduce", group, tensor.nbytes, group.process_group.allreduce, [tensor], _ALL_REDUCE, **what)


def broadcast(group: Group, tensor: torch.Tensor, source: int = 0) -> None:
    """``tensor`` becomes, in place, what it is on position ``source`` of the group; waits. Every rank must call it."""
    options = _on_current_stream(BroadcastOptions())
    options.rootRank = source
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    send = group.process_group.broadcast
    Collective("broadcast", group, tensor.nbytes, send, [tensor], options, on_cpu=tensor.is_cpu).wait()


def call(function: Callable[..., Any], group: Group, *arguments: Any, **options: Any) -> None:
    """Calls a collective function of ``torch.distributed``, which waits, for ``group``. Every rank must call it."""
    issue = partial(function, *arguments, **options, group=group.process_group)
    # Objects travel between CPUs wherever the group can do that.
    Collective(function.__name__, group, 0, issue, on_cpu=True).wait()


@dataclass(frozen=True)
class Scaling:
    """What the gradient is divided by, before and after it is summed over ``before * after`` ranks."""

    before: float
    after: float

    @classmethod
    def mean(cls, num_ranks: int, dtype: torch.dtype) -> Scaling:
        """The mean over ``num_ranks``, split in two if ``dtype`` is so narrow that the sum itself could overflow."""
        return cls.by(float(num_ranks), dtype)

    @classmethod
    def by(cls, factor: float, dtype: torch.dtype) -> Scaling:
        """A factor of the user's choice, split in the same way."""
        if dtype is not torch.float16:
            return cls(1.0, float(factor))
        before = 1.0
        while factor % before == 0 and factor / before > before:
            before *= 2
        return cls(before, factor / before)

    def within(self, dtype: torch.dtype) -> Scaling:
        """The same factor for sums in another dtype."""
        return Scaling.by(self.before * self.after, dtype)

    def prepare(self, whole: torch.Tensor) -> None:
        """Divides, in place, what is about to be summed."""
        if self.before != 1.0:
            whole.div_(self.before)

    def complete(self, piece: torch.Tensor) -> None:
        """Divides, in place, what has been summed."""
        if self.after != 1.0:
            piece.div_(self.after)
