"""Lanes: where gathers, reductions and copies run, and how to wait for them.

A unit's parameters should travel while another unit computes. So there is a compute stream, on which forward and
backward run, and beside it a few lanes. Work is put on a lane (*issue*), the compute stream goes on, and stops only
where it needs the result (*wait*)::

    compute     ---- F0 ----|---- F1 ----|---- F2 ----
    gather           AG1 ---^    AG2 ---^                   ^ = the wait

On CUDA a lane is a stream, and a wait is an event that the compute stream waits for: the CPU does not stop. On the
CPU a lane is only a name. Collectives of gloo run in threads of their own and hand back a ``Work``; waiting for it does
stop the calling thread, but what happened between issue and wait was overlap all the same. Both kinds of promise have
one method, ``wait()``, and nothing else in the engine asks which kind it is.

Three rules keep the lanes correct on CUDA:

1. a lane follows the compute stream up to the point where what it reads was written: the gather lane once in an
   iteration, behind the optimizer step that changed the shards, the reduce lane for each gradient; and up to the point
   where memory that it is about to use again was read. Following more often than that would be correct and slow: a
   gather that waits for the compute issued before it does not overlap with it;
2. a wait is never for a whole lane, only for the event of the one thing that is needed;
3. a stream is always asked for by its device. Without one PyTorch answers with a stream of the *current* device, which
   is another one where ``device_id`` was given and ``set_device`` never called.

Trade-off: more lanes, more overlap, but collectives of one group execute in the order of their issue on any lane,
so a lane for each unit would buy nothing. There are three: gather, reduce, and all_reduce for the copies of a hybrid
mesh, whose traffic takes another network.

*In torch:* FSDP1 has ``_init_streams`` (five streams) and waits for whole streams; FSDP2's ``FSDPCommContext`` has the
same and waits for events, as here.

Spec: PREF-10, PREF-14, HYB-04, STREAM-02, STREAM-03, STREAM-07.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Protocol

import torch

from minifsdp.engine import ledger


class Promise(Protocol):
    """Something that was issued and will be complete once `wait` has returned."""

    def wait(self) -> Any:
        """Until this returns, what was promised must not be used on the compute stream."""
        ...


class _Nothing:
    """The promise of what needs no waiting: nothing was sent, or it runs on the stream of who would wait for it."""

    __slots__ = ()

    def wait(self) -> None:
        return None


NOTHING: Promise = _Nothing()


class _EventPromise:
    """A promise of a CUDA lane: the stream of who waits, nearly always the compute stream, waits for the event."""

    __slots__ = ("_device", "_event")

    def __init__(self, device: torch.device, event: Any) -> None:
        self._device, self._event = device, event
        # For the thread that notices a device on which nothing goes on.
        ledger.on_its_way = event

    def wait(self) -> None:
        current_stream(self._device).wait_event(self._event)


def current_stream(device: torch.device) -> Any:
    """Rule 3: the stream of an accelerator on which the caller's work on ``device`` runs."""
    return torch.get_device_module(device).current_stream(device)


def compute_event(device: torch.device) -> Any:
    """An event for all that the compute stream of ``device`` was given so far; ``None`` on the CPU: all is done."""
    if device.type in ("cpu", "meta"):
        return None
    return current_stream(device).record_event()


class Lane:
    """A side lane. ``with lane:`` issues what is inside onto it; on the CPU that changes nothing.

    Args:
        name: for traces.
        device: the compute device.
    """

    __slots__ = ("_contexts", "_device", "name", "stream")

    def __init__(self, name: str, device: torch.device) -> None:
        self.name, self._device = name, device
        # A hook of the user may enter it again.
        self._contexts: list[Any] = []
        self.stream: Any = None
        if device.type != "cpu":
            # Collectives go first: they are short for the GPU and are always waited for.
            self.stream = torch.get_device_module(device).Stream(device=device, priority=-1)

    def __enter__(self) -> Lane:
        if self.stream is not None:
            self._contexts.append(torch.get_device_module(self._device).stream(self.stream))
            self._contexts[-1].__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.stream is not None:
            self._contexts.pop().__exit__(kind, error, trace)

    def follow(self, event: Any = None) -> None:
        """Rule 1: what is issued on the lane from now on runs after what the compute stream has been given so far.

        Args:
            event: an accelerator's event of the compute stream, if less than all is to be waited for.
        """
        if self.stream is None:
            return
        self.stream.wait_event(compute_event(self._device) if event is None else event)

    def join(self) -> None:
        """The exception to rule 2, where many were issued and none was waited for: the compute stream waits for all."""
        if self.stream is not None:
            current_stream(self._device).wait_stream(self.stream)

    def synchronize(self) -> None:
        """Stops the CPU until all that was issued on the lane is done; where there is no stream, it is."""
        if self.stream is not None:
            self.stream.synchronize()

    def promise(self, work: Promise = NOTHING) -> Promise:
        """The promise that what was issued on this lane, last of all ``work``, will be complete; call it inside.

        On the CPU that is the ``Work`` itself. On CUDA rule 2 asks for an event, also if there is no ``work``: copies
        and casts run on the lane as well. NCCL's collective runs on the lane's own stream; a backend with threads of
        its own, as gloo has for an accelerator's tensors, too, is waited for before the event.
        """
        if self.stream is None:
            return work
        work.wait()
        return _EventPromise(self._device, self.stream.record_event())


class Lanes:
    """The three side lanes of one tree of units, on one device."""

    __slots__ = ("all_reduce", "device", "gather", "reduce")

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.gather = Lane("gather", device)
        self.reduce = Lane("reduce", device)
        self.all_reduce = Lane("all_reduce", device)
