"""Other measurements: calls, bytes, memory. They depend little or not at all on the load of the machine.

**Python calls** are counted by the interpreter itself. Their cost differs between machines, but no other figure grows
so steadily with the time that a library adds to a tiny unit.

**Bytes** are counted twice. *Asked* is the number of bytes that textbook algorithms send for the collectives of a
library: ``(N - 1) / N * M`` for an all-gather or a reduce-scatter of M bytes on N ranks, twice that for an all-reduce.
*Wired* is the number of bytes that the sockets of this process have sent, according to the kernel (Linux only, 0
elsewhere). The two differ, because gloo implements a reduce-scatter as an all-reduce.

**Memory** contains all tensors, including those that C++ allocates and that Python code cannot access: torch's CPU
allocator reports each allocation and each release to a profiler. Worked example in MiB; the step begins at the mark::

    +64 (model)  +32 (shards)  -64   mark   +16  +16  -16   +8  -24
     64           96            32           48   64   48   56   32      resting 32, peak 64 (and not 96)

Memory that a backend allocates differently, such as some buffers of gloo, is not counted. The number of gloo's
temporary buffers that are alive at once depends on when its threads release them. The peak of each contender varies
between steps by one or two of these. So five steps are measured, and the result is the step with the median peak.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from spec_tests.engine.count_calls import calls_by_file
from tutorials.gpt.counting import CollectiveCounter

__all__ = ["Live", "collectives", "highest_of_each_part", "live_bytes", "python_calls"]

Action = Callable[[], Any]
TCP_INFO = 11
# Offset of `tcpi_bytes_sent` in the kernel's `struct tcp_info`, since Linux 4.19.
BYTES_SENT = 200
MARKS = ("spec_tests: forward and backward", "spec_tests: the optimizer", "spec_tests: between steps")
NUM_WEIGHED = 5
NUM_PARTS = 240


def python_calls(action: Action) -> int:
    """The number of Python functions that are entered."""
    return calls_by_file(action).total()


def collectives(action: Action) -> tuple[dict[str, int], int, int, int]:
    """Counts the communication of ``action``. Every rank must call it.

    Returns:
        The number of collectives by kind; the bytes asked, in total and by the collectives of sharding; and the bytes
        wired.
    """
    # After a barrier, no rank is still sending bytes of earlier operations.
    dist.barrier()
    before = _sent()
    with CollectiveCounter() as counter:
        action()
    dist.barrier()
    sharding = counter.num_bytes["all-gather"] + counter.num_bytes["reduce-scatter"]
    return dict(counter.num_calls), counter.bytes_sent, sharding, _sent() - before


def _sent() -> int:
    total = 0
    for number in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []:
        with contextlib.suppress(OSError):  # closed, or not TCP
            if os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(number))) as end:
                    reported = end.getsockopt(socket.IPPROTO_TCP, TCP_INFO, BYTES_SENT + 8)
                    total += struct.unpack_from("Q", reported, BYTES_SENT)[0]
    return total


@dataclass(frozen=True)
class Live:
    """Bytes in live tensors, relative to the state before the measurement.

    Attributes:
        between_steps: at the beginning of the step.
        computing: maximum in forward and backward.
        peak: maximum in the whole step, including the optimizer.
        curve: positions in the step, from 0 to 1, each with the maximum number of bytes in this part of it.
    """

    between_steps: int
    computing: int
    peak: int
    curve: list[tuple[float, int]]


def live_bytes(prepare: Action, clear: Action, compute: Action, update: Action) -> Live:
    """Measures the live bytes of a step. A step is ``compute`` and then ``update``, after ``prepare`` and ``clear``.

    Every rank must call it. ``prepare`` must create all tensors that a step may free, because the allocator only
    reports tensors that are created in it or later. ``clear`` runs before each step and is not part of it.

    Returns:
        The result of one of `NUM_WEIGHED` steps: the one with the median peak of forward and backward.
    """
    _count_in_all_threads()
    _settle()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        prepare()
        clear()
        for _ in range(NUM_WEIGHED):
            _settle()
            for mark, action in zip(MARKS, (compute, update, clear), strict=True):
                with record_function(mark):
                    action()
    events = sorted(_all(profiler.profiler.kineto_results.experimental_event_tree()), key=lambda e: e.start_time_ns)
    begins, middles, ends = ([n for n, event in enumerate(events) if event.name == mark] for mark in MARKS)
    zero = _live_before(_allocations(events[: begins[0]])[0])
    steps = zip(begins, middles, ends, strict=True)
    weighed = [_weighed(zero, events[begin:middle], events[middle:end]) for begin, middle, end in steps]
    return sorted(weighed, key=lambda live: live.computing)[NUM_WEIGHED // 2]


def _weighed(zero: int, computing: list[Any], updating: list[Any]) -> Live:
    """The result of one step from its events.

    Each event contains the live bytes of all threads. Adding up the sizes of the events would be wrong, because a
    thread without a profiler does not produce events when it frees memory.
    """
    live = [(event.start_time_ns, event.typed[1].total_allocated - zero) for event in _allocations(computing)]
    middle = len(live)
    live += [(event.start_time_ns, event.typed[1].total_allocated - zero) for event in _allocations(updating)]
    values = [value for _, value in live]
    between_steps = _live_before(_allocations(computing)[0]) - zero
    return Live(between_steps, max(values[:middle]), max(values), highest_of_each_part(live))


def highest_of_each_part(points: list[tuple[int, int]]) -> list[tuple[float, int]]:
    """Reduces points to as many as a picture can show, without losing peaks: the highest of each part of the time.

    Args:
        points: times, in increasing order, and values.

    Returns:
        Times, scaled from 0 (the first) to 1 (the last), and values.
    """
    first, last = points[0][0], points[-1][0]
    placed = [((moment - first) / max(last - first, 1), value) for moment, value in points]
    parts = itertools.groupby(placed, key=lambda point: int(point[0] * NUM_PARTS))
    return [max(part, key=lambda point: point[1]) for _, part in parts]


def _count_in_all_threads() -> None:
    """Makes the allocator count in all threads. By default, memory freed by gloo's threads counts as live."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    ctypes.c_bool.in_dll(library, "FLAGS_caffe2_report_cpu_memory_usage").value = True


def _settle() -> None:
    """Waits until gloo's threads have released their temporary buffers."""
    dist.barrier()
    time.sleep(0.1)


def _all(events: Iterable[Any]) -> Iterator[Any]:
    for event in events:
        yield event
        yield from _all(event.children)


def _allocations(events: Iterable[Any]) -> list[Any]:
    return [event for event in events if hasattr(event.typed[1], "total_allocated")]


def _live_before(event: Any) -> int:
    return int(event.typed[1].total_allocated - event.typed[1].alloc_size)
