"""The collectives of a training step (all-gather, reduce-scatter, all-reduce, broadcast) and the scaling of gradients.

FSDP is built on three collectives. Two ranks, a tensor of four elements::

    all_gather       rank 0 has [1 2], rank 1 has [3 4]              both get [1 2 3 4]
    reduce_scatter   rank 0 has [1 2 3 4], rank 1 has [5 6 7 8]      rank 0 gets [6 8], rank 1 gets [10 12]
    all_reduce       rank 0 has [1 2], rank 1 has [3 4]              both get [4 6]

The last two *sum*. Training needs the *mean* over all ranks, so the sum is divided by their number: see `Scaling`.
Dividing after the sum costs least, because then only this rank's shard must be divided. In float16 the sum itself can
overflow (the largest value is 65504), so one part of the division happens before the sum and one part after it. Both
divisors are powers of two, as close to the square root as possible: 8 ranks divide by 4 before and by 2 after the sum.

Backends do not support complex numbers, so their real and imaginary parts are summed. Collectives that only copy send
bytes if gloo or NCCL does not support the dtype.

The functions call the methods of the ``ProcessGroup`` directly, with option objects created once. The public functions
of ``torch.distributed`` look up the group, check dtypes and wrap exceptions in each call, which for tiny units costs
more than the rest of the engine. Profilers and dispatch modes see the same ``c10d`` operators in both cases. Between
CPUs, another transport can replace the group for the first two collectives, see `Group.transport`.

A `Collective` is the handle of a collective. It hides a difference between backends: gloo returns a ``Work`` to wait
for, and NCCL returns ``None``. An NCCL kernel runs on the stream on which it was issued, so later work on this stream
runs after it. Each collective is recorded in the collective log (``collective_log.py``). If it fails, the error
contains the report of the watchdog (``minifsdp/watchdog``) about the other ranks.

*In torch:* FSDP1 calls the public functions in ``_flat_param.py`` and ``_runtime_utils.py``; FSDP2 has
``_fsdp_collectives.py`` with pluggable allocators. Both use the same division rule.

Spec: SHARD-06, SHARD-11, HYB-04, HYB-05, PAR-04, STREAM-01, LEDGER-02, LEDGER-03, LEDGER-11, ORDER-10.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import distributed_c10d as c10d

from minifsdp.engine.collective_log import log
from minifsdp.engine.mesh import Group
from minifsdp.engine.messages import MORE, message


def _on_current_stream(options: Any) -> Any:
    # On CUDA a synchronous call runs the collective on the current stream, which is the communication stream, instead
    # of a hidden one. It does not block the CPU, and returns None. Gloo returns a Work in both cases.
    options.asyncOp = False
    return options


_GATHER = _on_current_stream(c10d.AllgatherOptions())
_REDUCE_SCATTER = _on_current_stream(c10d.ReduceScatterOptions())
_ALL_REDUCE = _on_current_stream(c10d.AllreduceOptions())

# torch 2.13 introduced the new names; earlier versions have only the old ones.
_IS_RENAMED = hasattr(dist.ProcessGroup, "all_gather_single")
_GATHER_METHOD = "all_gather_single" if _IS_RENAMED else "_allgather_base"
_REDUCE_SCATTER_METHOD = "reduce_scatter_single" if _IS_RENAMED else "_reduce_scatter_base"

_NUM_BYTES = attrgetter("nbytes")
# A fake tensor has no memory: a backend that sends it reads other memory, or ends the process.
_active_mode, _FAKE = torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.FAKE
# Both gloo and NCCL can send these dtypes, and other dtypes as bytes.
_SENDABLE = {torch.half, torch.bfloat16, torch.float, torch.double, torch.uint8, torch.int, torch.long}


class Collective:
    """A collective that was issued, and the handle to wait for it. The constructor issues the collective.

    Args:
        kind, unit, parts: as in `CollectiveLog.record`.
        group: the group; all of its ranks must issue the same collective.
        data: the input or the output, whichever is larger; empty if it is not a tensor.
        issue: the function that issues the collective. It returns a handle or ``None``.
        arguments: arguments of ``issue``.
        checks_size: whether the transport between CPUs compares the size first; see ``gloo.py``, 7.

    Attributes:
        about: kind and unit, as text.
        position: its position in the collective log.

    Raises:
        RuntimeError: if the collective cannot complete, because another rank has exited or issues a different
            collective. Also raised for fake tensors, unless the backend of the group is the fake one.
    """

    def __init__(
        self,
        kind: str,
        group: Group,
        data: Sequence[torch.Tensor],
        issue: Callable[..., Any],
        *arguments: Any,
        checks_size: bool = True,
        unit: str | None = None,
        parts: Sequence[int] = (),
    ) -> None:
        if log.fatal_error:
            raise RuntimeError(log.fatal_error)
        self.about = kind if unit is None else f"{kind} of {unit!r}" if unit else f"{kind} of the root unit"
        is_fake = _active_mode(_FAKE) is not None or FakeTensor in map(type, (*data, *arguments))
        if is_fake and dist.get_backend(group.process_group) != "fake":
            raise RuntimeError(message("fake-tensors", what=self.about, ranks=list(group.ranks)))
        sequence, num_bytes = group.sequence, sum(map(_NUM_BYTES, data))
        on_cpu, dtype = (data[0].is_cpu, data[0].dtype) if data else (True, None)
        self.position, shape = log.record(sequence, kind, num_bytes, unit, tuple(parts), dtype)
        self._work: Any = None
        self._sizes_agree: Any = None
        log.waiting = self
        try:
            if checks_size and on_cpu and sequence.transport is not None:
                self._sizes_agree = sequence.transport.check_size(shape, num_bytes, sequence.epoch)
                if self._sizes_agree is not None and kind != "all-gather":
                    self._read_sizes()
            self._work = issue(*arguments)
        except RuntimeError as error:
            raise self._with_report(error) from error
        finally:
            # Reset this also if the program catches the exception: the main thread no longer waits.
            log.waiting = None

    def wait(self) -> None:
        """Waits until the result may be used on the compute stream.

        Raises:
            RuntimeError: if the backend reports an error, because another rank has exited or the time-out has passed.
        """
        log.waiting = self
        try:
            if self._sizes_agree is not None:
                self._read_sizes()
            if self._work is not None:
                self._work.wait()
        except RuntimeError as error:
            raise self._with_report(error) from error
        finally:
            log.waiting = None
        # The watchdog may hold this object, which must not keep tensors alive.
        self._work = None

    def wait_for(self, complete: Callable[[], Any]) -> None:
        """Makes `wait` call ``complete``."""
        self._work = SimpleNamespace(wait=complete)

    def _read_sizes(self) -> None:
        """Raises on all ranks if they issue collectives of different kinds or sizes."""
        agrees, self._sizes_agree = self._sizes_agree, None
        if (agree := agrees()) is True:
            return
        # If the ranks found a mismatch since then, all of them drop the earlier collectives.
        self._work = None
        if agree is False:
            sequence, report = self.position[0], log.diagnosis(self.position)
            sequence.begin_epoch()
            sequence.forget_sizes()
            raise RuntimeError(message("about-to-part", ranks=list(sequence.ranks), report=report))

    def _with_report(self, error: RuntimeError) -> RuntimeError:
        """The error to raise when this collective failed with ``error``. It contains a report about the other ranks."""
        if MORE in str(error):
            return error
        if log.fatal_error:
            return RuntimeError(log.fatal_error)
        ranks, report = list(self.position[0].ranks), log.diagnosis(self.position)
        return RuntimeError(message("collective-failed", what=self.about, ranks=ranks, error=error, report=report))


def all_gather(group: Group, output: torch.Tensor, local_shard: torch.Tensor, unit: str | None = None) -> Collective:
    """All-gather: fills ``output`` with the shards of all ranks, one after the other, in order of their position.

    Every rank of the group must call it.

    Args:
        group: the ranks that take part.
        output: 1-D, ``group.size * local_shard.numel()`` elements.
        local_shard: 1-D, contiguous, the same number of elements on every rank.
        unit: the name of the unit, if the collective belongs to a unit. The functions below have the same argument.
    """
    carrier = group.process_group if group.transport is None or not output.is_cpu else group.transport
    method = getattr(carrier, _GATHER_METHOD)
    sent = [output, local_shard]
    if output.dtype not in _SENDABLE:
        sent = [tensor.view(torch.uint8) for tensor in sent]
    return Collective("all-gather", group, [output], method, *sent, _GATHER, unit=unit)


def ask(group: Group, answers: torch.Tensor, mine: torch.Tensor) -> Collective:
    """An all-gather for checks between ranks. If possible, it is separate from other collectives.

    Every rank of the group must call it. If a rank does not call it, the other ranks wait.
    """
    apart = group.transport.all_gather_apart if group.transport is not None and answers.is_cpu else None
    method = apart or getattr(group.process_group, _GATHER_METHOD)
    return Collective("order check", group, [answers], method, answers, mine, _GATHER, checks_size=False)


def all_gathers_each(group: Group | None, outputs: Sequence[torch.Tensor]) -> bool:
    """Whether `all_gather_each` can fill ``outputs`` and is faster than `all_gather`."""
    transport = None if group is None or not outputs[0].is_cpu else group.transport
    return transport is not None and bool(transport.all_gathers_each(outputs))


def all_gather_each(
    group: Group, outputs: Sequence[torch.Tensor], local_shards: Sequence[torch.Tensor], unit: str | None = None
) -> Collective:
    """All-gathers several tensors at once, without sorting the result. `all_gathers_each` must have returned ``True``.

    Every rank of the group must call it.

    Args:
        group: the ranks that take part.
        outputs: each of shape (``group.size``, elements), contiguous in one memory.
        local_shards: each 1-D, contiguous in one memory as well; cast to the dtype of its output.
    """
    if outputs[0].is_complex():
        outputs, local_shards = ([torch.view_as_real(each) for each in tensors] for tensors in (outputs, local_shards))
    return Collective("all-gather", group, outputs, group.transport.all_gather_each, outputs, local_shards, unit=unit)


def reduce_scatter(
    group: Group, local_shard: torch.Tensor, whole: torch.Tensor, unit: str | None = None, parts: Sequence[int] = ()
) -> Collective:
    """Reduce-scatter: fills ``local_shard`` with this rank's part of the sum of ``whole`` over the group.

    Every rank of the group must call it. ``whole`` is 1-D with ``group.size * local_shard.numel()`` elements. The
    caller must keep it alive until it has waited for the handle. ``parts`` are the numbers of the parameters in it.
    """
    if whole.is_complex():
        local_shard, whole = torch.view_as_real(local_shard), torch.view_as_real(whole)
    carrier = group.process_group if group.transport is None or not whole.is_cpu else group.transport
    method = getattr(carrier, _REDUCE_SCATTER_METHOD)
    given = (local_shard, whole, _REDUCE_SCATTER)
    return Collective("reduce-scatter", group, [whole], method, *given, unit=unit, parts=parts)


def all_reduce(
    group: Group, tensor: torch.Tensor, unit: str | None = None, parts: Sequence[int] = (), kind: str = "all-reduce"
) -> Collective:
    """All-reduce: sums ``tensor`` over the group, in place. Every rank of the group must call it."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    method = group.process_group.allreduce
    return Collective(kind, group, [tensor], method, [tensor], _ALL_REDUCE, unit=unit, parts=parts)


def broadcast(group: Group, tensor: torch.Tensor, source: int = 0) -> None:
    """Copies ``tensor`` from position ``source`` to all ranks of the group and waits. Every rank must call it."""
    options = _on_current_stream(c10d.BroadcastOptions())
    options.rootRank = source
    sent = tensor if tensor.dtype in _SENDABLE else tensor.view(torch.uint8)
    Collective("broadcast", group, [tensor], group.process_group.broadcast, [sent], options).wait()


def call(function: Callable[..., Any], group: Group, *arguments: Any, about: str = "", **options: Any) -> None:
    """Calls a blocking collective function of ``torch.distributed`` for ``group``. Every rank must call it.

    All ranks must pass the same text ``about``, which describes the values.
    """
    issue = partial(function, *arguments, **options, group=group.process_group)
    # Objects are sent between CPUs if the group supports CPU tensors, and otherwise from the current device.
    data = [value for value in arguments if isinstance(value, torch.Tensor)]
    with group.on_device():
        Collective(function.__name__ + about, group, data, issue).wait()


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
