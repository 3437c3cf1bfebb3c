"""Exposed communication: the time in which a GPU communicates and computes nothing.

Worked example, a step with two all-gathers, of which the second runs next to a forward::

    communication   [0 ... 4]   [5 ......... 12]
    computation              [4 ......... 10]          exposed: 0 to 4 and 10 to 12, so 6

Kernels of NCCL also run while they wait for other ranks, so the exposed time includes this wait.

Spec: KIT-09.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch.autograd import DeviceType

__all__ = ["Interval", "exposed", "of_kernels"]


class Interval(NamedTuple):
    """Work of a GPU from ``start`` to ``end``, in any unit."""

    start: float
    end: float
    is_communication: bool


def exposed(intervals: Iterable[Interval]) -> float:
    """The time in which at least one interval of communication is active, and no other interval."""
    changes: list[tuple[float, bool, int]] = []
    for interval in intervals:
        changes += [(interval.start, interval.is_communication, 1), (interval.end, interval.is_communication, -1)]
    active = {True: 0, False: 0}
    total, before = 0.0, 0.0
    for moment, is_communication, change in sorted(changes):
        if active[True] and not active[False]:
            total += moment - before
        active[is_communication] += change
        before = moment
    return total


def of_kernels(events: Iterable[Any]) -> list[Interval]:
    """The kernels and copies of a GPU among the profiler's events, in microseconds.

    Ranges of ``record_function`` also appear on the GPU. They are not work, so they are omitted.
    """
    return [
        Interval(event.time_range.start, event.time_range.end, "nccl" in event.name.lower())
        for event in events
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    ]
