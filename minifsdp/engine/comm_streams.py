"""Communication streams: where all-gathers, reductions and copies run, and how to wait for them.

A unit's parameters should be communicated while another unit computes. So forward and backward run on the compute
stream, and communication runs on separate streams. The engine *issues* work on a communication stream. The compute
stream continues, and *waits* only where it needs the result::

    compute     ---- F0 ----|---- F1 ----|---- F2 ----
    all-gather       AG1 ---^    AG2 ---^                   ^ = the wait

On CUDA a `CommStream` is a stream, and a wait makes the compute stream wait for an event: the CPU does not stop. On the
CPU a `CommStream` is only a name. Collectives of gloo run in their own threads and return a ``Work``. Waiting for it
blocks the calling thread, but all work between issue and wait still overlaps. Both kinds of handle have one method,
``wait()``, and the rest of the engine does not distinguish them.

Three rules keep the communication streams correct on CUDA:

1. A communication stream waits for the compute stream up to the point where its input was written. The all-gather
   stream waits once in an iteration, after the optimizer step that changed the shards. The reduce stream waits for each
   gradient. A stream also waits up to the point where memory that it reuses was last read. Waiting more often is
   correct but slow: an all-gather that waits for earlier compute does not overlap with it.
2. A wait is only for the event of the work whose result is needed, never for a whole stream.
3. Streams are always looked up with an explicit device. Otherwise PyTorch uses a stream of the *current* device, which
   is a different device if the user passed ``device_id`` and never called ``set_device``.

Trade-off: more streams allow more overlap, but collectives of one group run in the order of their issue on any stream,
so a stream for each unit would not help. There are three streams: all-gather, reduce, and all-reduce for the replicas
of a hybrid mesh, which communicate over another network.

*In torch:* FSDP1 has ``_init_streams`` (five streams) and waits for whole streams; FSDP2's ``FSDPCommContext`` has
similar streams and waits for events, as here.

Spec: PREF-10, PREF-14, HYB-04, STREAM-02, STREAM-03, STREAM-07.
"""

from __future__ import annotations

from typing import Any

import torch

from minifsdp.engine.events import COMPLETED, Handle, events

__all__ = [
    "COMPLETED",
    "CommStream",
    "CommStreams",
    "Handle",
    "compute_event",
    "current_stream",
]


class _EventHandle:
    """The handle of work on a CUDA stream: `wait` makes the current stream, nearly always the compute stream, wait."""

    def __init__(self, device: torch.device, event: Any) -> None:
        self._device = device
        self._event = event
        # For the watchdog thread, which detects a device that makes no progress.
        events.last_event = event

    def wait(self) -> None:
        current_stream(self._device).wait_event(self._event)


def current_stream(device: torch.device) -> Any:
    """Rule 3: the current stream of ``device``, an accelerator."""
    return torch.get_device_module(device).current_stream(device)


def compute_event(device: torch.device) -> Any:
    """An event after all work issued on the compute stream of ``device``; ``None`` on the CPU."""
    if device.type == "cpu":
        return None
    return current_stream(device).record_event()


class CommStream:
    """A communication stream. Work inside ``with comm_stream:`` is issued on it; on the CPU this has no effect.

    Args:
        name: for traces.
        device: the compute device.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self.name = name
        self._device = device
        # A list, because a user's hook may enter the stream again.
        self._contexts: list[Any] = []
        self.stream: Any = None
        if device.type != "cpu":
            # Collectives get a high priority: they need little GPU time, and other work always waits for them.
            self.stream = torch.get_device_module(device).Stream(
                device=device, priority=-1
            )

    def __enter__(self) -> CommStream:
        if self.stream is not None:
            self._contexts.append(
                torch.get_device_module(self._device).stream(self.stream)
            )
            self._contexts[-1].__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        if self.stream is not None:
            self._contexts.pop().__exit__(*exception)

    def wait_compute(self, event: Any = None) -> None:
        """Rule 1: work issued on this stream from now on runs after all work issued on the compute stream.

        Args:
            event: an accelerator event of the compute stream, to wait only for the work before it.
        """
        if self.stream is not None:
            self.stream.wait_event(
                compute_event(self._device) if event is None else event
            )

    def join(self) -> None:
        """The exception to rule 2: the compute stream waits for all work, because no caller waited for its handles."""
        if self.stream is not None:
            current_stream(self._device).wait_stream(self.stream)

    def synchronize(self) -> None:
        """Blocks the CPU until all work on this stream is done. Has no effect on the CPU."""
        if self.stream is not None:
            self.stream.synchronize()

    def handle(self, work: Handle = COMPLETED) -> Handle:
        """The handle of all work issued on this stream, including ``work``. Call it inside the ``with`` block.

        On the CPU this is the ``Work`` itself. On CUDA rule 2 requires an event, even without ``work``, because copies
        and casts also run on this stream. An NCCL collective runs on this stream itself. If the backend has its own
        threads, such as gloo with tensors of an accelerator, the CPU waits for it before it records the event.
        """
        if self.stream is None:
            return work
        work.wait()
        return _EventHandle(self._device, self.stream.record_event())


class CommStreams:
    """The three communication streams of one root, on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.all_gather = CommStream("gather", device)
        self.reduce = CommStream("reduce", device)
        self.all_reduce = CommStream("all_reduce", device)
