"""What else is measured: calls, bytes, memory. How busy the machine is changes them little or not at all.

**Python calls** are counted by the interpreter itself. What they cost differs from machine to machine, but nothing
else of what a library adds to a tiny unit grows so steadily with its time.

**Bytes** are counted twice. *Asked* is what textbook algorithms send for the collectives that a library calls: an
all-gather or a reduce-scatter of M bytes on N ranks ``(N - 1) / N * M``, an all-reduce twice that. *Wired* is what the
kernel says that the sockets of this process have sent (Linux only, 0 elsewhere). The two differ: gloo carries out a
reduce-scatter as an all-reduce.

**Memory** is every tensor's, also of those that C++ allocates and that no Python code ever sees: torch's CPU allocator
tells a profiler of each allocation and each release. Worked example, sizes in MiB; the mark is where the step begins::

    +64 (model)  +32 (shards)  -64   mark   +16  +16  -16   +8  -24
     64           96            32           48   64   48   56   32      resting 32, peak 64 (and not 96)

What a backend takes by other ways, as gloo does for some of its buffers, is not in it. And which of gloo's
temporaries are alive together depends on when its threads let go of them: by one or two of these, the peak differs from
step to step, for every contender. So five steps are weighed, and the one whose peak is the median stands for them.
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
# Where `tcpi_bytes_sent` lies in the kernel's `struct tcp_info`, since Linux 4.19.
BYTES_SENT = 200
MARKS = ("spec_tests: forward and backward", "spec_tests: the optimizer", "spec_tests: between steps")
NUM_WEIGHED = 5
NUM_PARTS = 240


def python_calls(action: Action) -> int:
    """How many Python functions are entered."""
    return calls_by_file(action).total()


def collectives(action: Action) -> tuple[dict[str, int], int, int, int]:
    """What is sent. Every rank must call it.

    Returns:
        The collectives that are called, by kind; the bytes asked, and of these the bytes that sharding asks for; and
        the bytes wired.
    """
    # After a barrier nobody is still sending what belongs to before.
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
        with contextlib.suppress(OSError):  # closed by now, or no TCP
            if os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(number))) as end:
                    told = end.getsockopt(socket.IPPROTO_TCP, TCP_INFO, BYTES_SENT + 8)
                    total += struct.unpack_from("Q", told, BYTES_SENT)[0]
    return total


@dataclass(frozen=True)
class Live:
    """Bytes in live tensors; 0 is what was there before all that was watched.

    Attributes:
        resting: when the step begins.
        computing: the most in forward and backward.
        peak: the most in the whole step, so with the optimizer's arithmetic.
        curve: where in the step, from 0 to 1, and how many: the most in each part of it.
    """

    resting: int
    computing: int
    peak: int
    curve: list[tuple[float, int]]


def live_bytes(prepare: Action, clear: Action, compute: Action, update: Action) -> Live:
    """What is live while a step runs, which is ``compute`` and then ``update``, after ``prepare`` and ``clear``.

    Every rank must call it. ``prepare`` must make all the tensors that a step may free: the allocator does not know
    others. ``clear`` is called before each step and is no part of it.

    Returns:
        What was found in one of `NUM_WEIGHED` steps, that with the median of what forward and backward need.
    """
    _count_in_all_threads()
    _settle()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
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
    """One step, by its events.

    Each tells how much was live in all threads together. A sum of the events would not do: what a thread without
    profiler has freed is no event.
    """
    live = [(event.start_time_ns, event.typed[1].total_allocated - zero) for event in _allocations(computing)]
    middle = len(live)
    live += [(event.start_time_ns, event.typed[1].total_allocated - zero) for event in _allocations(updating)]
    values = [value for _, value in live]
    resting = _live_before(_allocations(computing)[0]) - zero
    return Live(resting, max(values[:middle]), max(values), highest_of_each_part(live))


def highest_of_each_part(points: list[tuple[int, int]]) -> list[tuple[float, int]]:
    """As many points as a picture has room for, and no peak lost: the highest of each part of the time.

    Args:
        points: moments, in order, and values.

    Returns:
        Moments from 0, the first, to 1, the last, and values.
    """
    first, last = points[0][0], points[-1][0]
    placed = [((moment - first) / max(last - first, 1), value) for moment, value in points]
    parts = itertools.groupby(placed, key=lambda point: int(point[0] * NUM_PARTS))
    return [max(part, key=lambda point: point[1]) for _, part in parts]


def _count_in_all_threads() -> None:
    """Otherwise the allocator counts in profiled threads only, and what a thread of gloo frees would live for ever."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    ctypes.c_bool.in_dll(library, "FLAGS_caffe2_report_cpu_memory_usage").value = True


def _settle() -> None:
    """Until gloo's threads have let go of the temporaries of what is over."""
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
