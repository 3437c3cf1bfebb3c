"""Lanes: where gathers, reductions and copies run, and how to wait for them.

A unit's parameters should travel while another unit computes. So there is a main road, on which forward and backward
run, and beside it a few lanes. Work is put on a lane (*issue*), the main road goes on, and stops only where it needs
the result (*wait*)::

    main road   ---- F0 ----|---- F1 ----|---- F2 ----
    gather           AG1 ---^    AG2 ---^                   ^ = the wait

On CUDA a lane is a stream, and a wait is an event that the main road's stream waits for: the CPU does not stop. On the
CPU a lane is only a name. Collectives of gloo run in threads of their own and hand back a ``Work``; waiting for it does
stop the calling thread, but what happened between issue and wait was overlap all the same. Both kinds of promise have
one method, ``wait()``, and nothing else in the engine asks which kind it is.

Two rules keep the lanes correct on CUDA:

1. a lane follows the main road up to the point where what it reads was written: the gather lane once in an iteration,
   behind the optimizer step that changed the shards, the reduce lane for each gradient. Following more often than
   that would be correct and slow: a gather that waits for the compute issued before it does not overlap with it;
2. nobody waits for a whole lane, only for the event of the one thing that is needed.

Trade-off: more lanes, more overlap, but collectives of one group execute in the order of their issue on any lane,
so a lane for each unit would buy nothing. There are three: gather, reduce, and all_reduce for the copies of a hybrid
mesh, whose traffic takes another network.

*In torch:* FSDP1 has ``_init_streams`` (five streams) and waits for whole streams; FSDP2's ``FSDPCommContext`` has the
same and waits for events, as here.

Spec: PREF-10, PREF-14, HYB-04.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Protocol

import torch

__all__ = ["Lane", "Lanes", "Promise", "passed"]


class Promise(Protocol):
    """Something that was issued and will be complete once `wait` has returned."""

    def wait(self) -> Any:
        """Until this returns, what was promised must not be used on the main road."""
        ...


class _EventPromise:
    """A promise of a CUDA lane: the main road waits for the event, the CPU goes on."""

    __slots__ = ("_event", "_module")

    def __init__(self, module: Any, event: Any) -> None:
        self._module, self._event = module, event

    def wait(self) -> None:
        self._module.current_stream().wait_event(self._event)


def passed(device: torch.device) -> Any:
    """An event for all that the main road of ``device`` has been given so far; ``None`` on the CPU: all is done."""
    if device.type in ("cpu", "meta"):
        return None
    return torch.get_device_module(device).current_stream().record_event()


class Lane:
    """A side lane. ``with lane:`` issues what is inside onto it; on the CPU that changes nothing.

    Args:
        name: for traces.
        device: the compute device.
    """

    __slots__ = ("_context", "_held", "_module", "name", "stream")

    def __init__(self, name: str, device: torch.device) -> None:
        self.name = name
        self._context: Any = None
        self._module: Any = None
        self.stream: Any = None
        self._held: list[tuple[torch.Tensor, Any]] = []
        if device.type != "cpu":
            self._module = torch.get_device_module(device)
            # Collectives go first: they are short for the GPU and somebody always waits for them.
            self.stream = self._module.Stream(device=device, priority=-1)

    def __enter__(self) -> Lane:
        if self.stream is not None:
            self._context = self._module.stream(self.stream)
            self._context.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.stream is not None:
            self._context.__exit__(kind, error, trace)

    def follow(self, event: Any = None) -> None:
        """Rule 1: what is issued on the lane from now on runs after what the main road has been given so far.

        Args:
            event: an accelerator's event of the main road, if less than all is to be waited for.
        """
        if self.stream is None:
            return
        if event is not None:
            self.stream.wait_event(event)
        else:
            self.stream.wait_stream(self._module.current_stream())

    def hold(self, memory: torch.Tensor) -> None:
        """Keeps ``memory`` of this lane alive until what the main road has been given so far is done with it."""
        if self.stream is not None:
            self._held.append((memory, self._module.current_stream().record_event()))

    def let_go(self) -> None:
        """Gives back what is held; what is issued on the lane from now on may get that memory, and so runs after it."""
        for _, event in self._held:
            self.stream.wait_event(event)
        self._held.clear()

    def promise(self, work: Promise) -> Promise:
        """The promise that ``work``, just issued on this lane, will be complete.

        On the CPU that is the ``Work`` itself. On CUDA the collective runs on the lane's own stream, so the ``Work``
        says nothing new, and rule 2 asks for an event.
        """
        if self.stream is None:
            return work
        return _EventPromise(self._module, self.stream.record_event())


class Lanes:
    """The three side lanes of one tree of units, on one device."""

    __slots__ = ("all_reduce", "device", "gather", "reduce")

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.gather = Lane("gather", device)
        self.reduce = Lane("reduce", device)
        self.all_reduce = Lane("all_reduce", device)
