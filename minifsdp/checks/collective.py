"""A collective that was issued, as an observer sees it: the handle, its entry in the log, and its error.

1. *Before* the collective is issued, it is added to the collective log. Between CPUs the ranks compare its size if the
   order of collectives is new, because a wrong size ends the process in gloo.
2. *While* the main thread waits for it, the watchdog can find out what it waits for.
3. *If it fails*, the error contains the report of the watchdog about the other ranks.
4. *A barrier* before a state dict is in the log while this rank waits. The ranks compare the collectives before it.

Worked example: rank 1 ends before its all-gather of ``layers.2``. The error of rank 0 names the all-gather, the ranks
of its group, and the line at which rank 1 has ended.

*In torch:* the flight recorder and the watchdog of NCCL. Gloo has neither. Its ``monitored_barrier`` names missing
ranks and does not compare collectives.

Spec: LEDGER-02, LEDGER-03, LEDGER-11, LEDGER-23, ORDER-10, ORDER-11, SD-FULL-03.
"""

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor

from minifsdp.checks.collective_log import log
from minifsdp.engine.collectives import GATHER, GATHER_METHOD
from minifsdp.engine.mesh import Group
from minifsdp.engine.messages import MORE, message

_NUM_BYTES = attrgetter("nbytes")
# A fake tensor has no memory: a backend that sends it reads other memory, or ends the process.
_active_mode = torch._C._get_dispatch_mode
_FAKE = torch._C._TorchDispatchModeKey.FAKE


class Collective:
    """A collective that was issued, and the handle to wait for it. The constructor issues the collective.

    Args:
        kind, unit, parts: as in `CollectiveLog.record`.
        group: the group; all of its ranks must issue the same collective.
        data: the input or the output, whichever is larger; empty if it is not a tensor.
        issue: the function that issues the collective. It returns a handle or ``None``.
        arguments: arguments of ``issue``.
        checks_size: whether the transport between CPUs compares the size first.

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
        arguments: Sequence[Any] = (),
        unit: str | None = None,
        parts: Sequence[int] = (),
        *,
        checks_size: bool = True,
    ) -> None:
        if log.fatal_error:
            raise RuntimeError(log.fatal_error)
        self.about = (
            kind
            if unit is None
            else f"{kind} of {unit!r}"
            if unit
            else f"{kind} of the root unit"
        )
        is_fake = _active_mode(_FAKE) is not None or FakeTensor in map(
            type, (*data, *arguments)
        )
        if is_fake and dist.get_backend(group.process_group) != "fake":
            raise RuntimeError(
                message("fake-tensors", what=self.about, ranks=list(group.ranks))
            )
        sequence = (
            group.notes["sequence"]
            if "sequence" in group.notes
            else log.sequence_of(group)
        )
        num_bytes = sum(map(_NUM_BYTES, data))
        on_cpu, dtype = (data[0].is_cpu, data[0].dtype) if data else (True, None)
        self.position, shape = log.record(
            sequence, kind, num_bytes, unit, tuple(parts), dtype
        )
        self._work: Any = None
        self._sizes_agree: Any = None
        log.waiting = self
        try:
            if checks_size and on_cpu and sequence.transport is not None:
                self._sizes_agree = sequence.transport.check_size(
                    shape, self.position[1]
                )
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

    def _read_sizes(self) -> None:
        """Raises on all ranks if they issue collectives of different kinds or sizes."""
        agrees = self._sizes_agree
        self._sizes_agree = None
        if (agree := agrees()) is True:
            return
        # If the ranks found a mismatch since then, all of them drop the earlier collectives.
        self._work = None
        if agree is False:
            sequence = self.position[0]
            report = log.diagnosis(self.position)
            sequence.begin_epoch()
            sequence.forget_sizes()
            raise RuntimeError(
                message("about-to-part", ranks=list(sequence.ranks), report=report)
            )

    def _with_report(self, error: RuntimeError) -> RuntimeError:
        """The error to raise when this collective failed with ``error``. It contains a report about the other ranks."""
        if MORE in str(error):
            return error
        if log.fatal_error:
            return RuntimeError(log.fatal_error)
        return RuntimeError(
            message(
                "collective-failed",
                what=self.about,
                ranks=list(self.position[0].ranks),
                error=error,
                report=log.diagnosis(self.position),
            )
        )


def ask(group: Group, answers: torch.Tensor, mine: torch.Tensor) -> Collective:
    """An all-gather for checks between ranks. If possible, it is separate from other collectives.

    Every rank of the group must call it. If a rank does not call it, the other ranks wait.
    """
    apart = (
        group.transport.all_gather_apart
        if group.transport is not None and answers.is_cpu
        else None
    )
    method = apart or getattr(group.process_group, GATHER_METHOD)
    return Collective(
        "order check",
        group,
        [answers],
        method,
        (answers, mine, GATHER),
        checks_size=False,
    )


class BarrierCheck:
    """4. An observer of one barrier before a state dict. `Events.barrier` creates it.

    Worked example: rank 1 saves another model before this one. Then the text `order` differs, and both ranks raise an
    error with a report about the collectives at which they have parted.

    Args:
        group: the ranks that wait for each other.

    Attributes:
        order: a text that is equal on all ranks if they have issued the same collectives in the group.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._sequence = log.sequence_of(group)
        self._before = self._sequence.now
        self._position = (self._sequence, self._before[0], self._before[1])
        self.order = "; collectives {} {} {}".format(*self._before)

    def wait(self, wait: Callable[..., None], *arguments: Any) -> None:
        """Calls ``wait``, with an entry in the log. ``wait`` raises `TimeoutError` if a rank does not arrive."""
        Collective("barrier", self._group, [], wait, arguments, checks_size=False)

    def is_over(self) -> bool:
        """Whether no further collective can complete, so that this rank stops to wait."""
        return bool(log.fatal_error)

    def undo(self) -> str:
        """Called if a rank has not arrived. Removes the entry, which the other ranks do not have. Returns a report.

        Then all ranks can call again.
        """
        report = log.diagnosis(self._position)
        self._sequence.undo(self._before)
        return report

    def begin_epoch(self) -> str:
        """Called if the texts of the ranks differ. Returns the report about all ranks."""
        report = log.diagnosis(self._position)
        self._sequence.begin_epoch()
        return report
