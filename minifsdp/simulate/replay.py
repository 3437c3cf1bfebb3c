"""Replays a recorded step: gives each item of the tape a time.

The CPU thread reads the tape from the beginning. It needs some time for each item, and it only stops for an item that
makes it wait. Each stream executes its kernels and collectives in order, each as soon as

* the CPU thread has issued it,
* the stream has completed the item before it,
* the events that the stream waits for are complete,
* and, for a collective, the collectives that were issued before it in the same process group are complete.

So one pass over the tape is enough: all these times are known when an item is read. The waits are those that the engine
issued. All ranks do the same, so a collective begins when this rank reaches it.

Worked example, in milliseconds, the all-gather of the next unit next to the kernel of this one::

    CPU           issues AG1 at 0, F0 at 0, the wait at 0, F1 at 0
    all-gather    AG1 from 0 to 3
    compute       F0 from 0 to 2, then waits; F1 from 3 to 5        1 ms of AG1 is exposed

Two measures of memory are computed. *Allocated* memory follows the order of the CPU thread, like
``torch.cuda.max_memory_allocated``. *Held* memory also contains blocks that were released but that ``record_stream``
keeps until another stream has used them. The limiter exists because of these blocks.

*In torch:* nothing comparable; a profiler measures.

Spec: SIMULATE-08 to SIMULATE-12.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from minifsdp import trace
from minifsdp.simulate.machine import Card, Network
from minifsdp.simulate.recording import Recording
from minifsdp.simulate.tape import (
    COMPUTE,
    Allocate,
    Collective,
    Free,
    HostWait,
    Kernel,
    Mark,
    RecordEvent,
    UseOn,
    WaitEvent,
)

_OF_COLLECTIVES = ("AG", "RS", "AR", "BCAST")


@dataclass(frozen=True)
class Result:
    """A simulated step of one rank.

    Attributes:
        seconds: the time from the first item until all streams and the CPU thread are done.
        compute_seconds: time in which kernels run on the compute stream.
        exposed_seconds: time in which a collective runs and the compute stream is idle.
        host_seconds: time in which the CPU thread issues work and does not wait.
        waits: seconds in which the CPU thread waits for events.
        tokens_per_second: of each rank.
        mfu: operations of forward and backward without recomputation, divided by the card's peak.
        hfu: all operations, divided by the card's peak.
        stored_bytes: memory at the beginning of the step.
        peak_allocated: the peak of allocated memory.
        peak_held: the peak including blocks that ``record_stream`` keeps.
        memory: seconds and held bytes, after each change.
        events: the engine's events with simulated times.
        busy: for each kind of work, its seconds on the streams.
    """

    seconds: float
    compute_seconds: float
    exposed_seconds: float
    host_seconds: float
    waits: float
    tokens_per_second: float
    mfu: float
    hfu: float
    stored_bytes: int
    peak_allocated: int
    peak_held: int
    memory: Sequence[tuple[float, int]]
    events: Sequence[trace.Event]
    busy: dict[str, float]


class _Memory:
    """Held memory over time."""

    def __init__(self, stored: int, old_blocks: dict[int, int]) -> None:
        self.num_bytes = self.peak = stored
        self._sizes = dict(old_blocks)
        # Streams that use a block, apart from the one that allocated it, and the end of the uses of released blocks.
        self._used_on: dict[int, set[int]] = defaultdict(set)
        self._kept: list[tuple[float, int]] = []
        self.steps: list[tuple[float, int]] = [(0.0, stored)]

    def allocate(self, now: float, block: int, num_bytes: int) -> None:
        while self._kept and self._kept[0][0] <= now:
            until, released = heapq.heappop(self._kept)
            self._change(until, -released)
        self._sizes[block] = num_bytes
        self._change(now, num_bytes)

    def use_on(self, block: int, stream: int) -> None:
        self._used_on[block].add(stream)

    def free(self, now: float, block: int, ends: dict[int, float]) -> None:
        size = self._sizes.pop(block, 0)
        until = max((ends[stream] for stream in self._used_on.pop(block, ())), default=now)
        if until > now:
            heapq.heappush(self._kept, (until, size))
        else:
            self._change(now, -size)

    def _change(self, when: float, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self.peak = max(self.peak, self.num_bytes)
        self.steps.append((when, self.num_bytes))


def replay(recording: Recording, card: Card, network: Network) -> Result:
    """Simulates the recorded step on a machine."""
    host = waited = 0.0
    ends: dict[int, float] = defaultdict(float)
    groups: dict[tuple[int, ...], float] = defaultdict(float)
    events: dict[int, float] = {}
    memory = _Memory(recording.stored_bytes, recording.old_blocks)
    spans: dict[str, list[tuple[float, float]]] = {"compute": [], "communication": []}
    busy: dict[str, float] = defaultdict(float)
    times: dict[int, list[float]] = {}
    # Collectives that the engine has marked, whose item follows.
    marked: list[trace.Event] = []
    nominal = {"forward": 0.0, "backward": 0.0, "optimizer": 0.0}
    slowed_until = 0.0
    for item in recording.tape.items:
        if isinstance(item, Kernel):
            host += card.host_operator
            start = max(ends[item.stream], host)
            seconds = card.seconds(item)
            if item.stream == COMPUTE:
                # Collectives that run now use a part of the card.
                seconds += card.slowdown * max(0.0, min(seconds, slowed_until - start))
                spans["compute"].append((start, start + seconds))
                busy[item.phase] += seconds
            else:
                busy["copies"] += seconds
            nominal[item.phase] += item.nominal_flops
            ends[item.stream] = start + seconds
        elif isinstance(item, Collective):
            host += card.host_collective
            start = max(ends[item.stream], host, groups[item.ranks])
            end = start + network.seconds(item)
            ends[item.stream] = groups[item.ranks] = end
            slowed_until = max(slowed_until, end)
            spans["communication"].append((start, end))
            busy[item.kind] += end - start
            if marked and marked[-1].kind == item.kind:
                times[id(marked.pop())] = [start, end]
        elif isinstance(item, RecordEvent):
            host += card.host_event
            events[item.event] = max(ends[item.stream], host)
        elif isinstance(item, WaitEvent):
            host += card.host_event
            # An event of the step before is complete.
            ends[item.stream] = max(ends[item.stream], events.get(item.event, 0.0))
        elif isinstance(item, HostWait):
            waited += max(0.0, events.get(item.event, 0.0) - host)
            host = max(host, events.get(item.event, 0.0))
        elif isinstance(item, Allocate):
            memory.allocate(host, item.block, item.num_bytes)
        elif isinstance(item, UseOn):
            memory.use_on(item.block, item.stream)
        elif isinstance(item, Free):
            memory.free(host, item.block, ends)
        else:
            _mark(item, times, marked, max(host, ends[COMPUTE]), host)
    seconds = max(host, *ends.values(), 0.0)
    exposed = _length(spans["compute"] + spans["communication"]) - _length(spans["compute"])
    useful, all_flops = 3 * nominal["forward"], sum(nominal.values())
    peak = card.matmul32 if recording.setup.param_dtype == "fp32" else card.matmul
    return Result(
        seconds=seconds,
        compute_seconds=_length(spans["compute"]),
        exposed_seconds=exposed,
        host_seconds=host - waited,
        waits=waited,
        tokens_per_second=recording.tokens / seconds,
        mfu=useful / seconds / peak,
        hfu=all_flops / seconds / peak,
        stored_bytes=recording.stored_bytes,
        peak_allocated=recording.peak_bytes,
        peak_held=memory.peak,
        memory=memory.steps,
        events=[_timed(event, times) for event in recording.events],
        busy=dict(busy),
    )


def _mark(item: Mark, times: dict[int, list[float]], marked: list[trace.Event], compute: float, host: float) -> None:
    """Notes the time of the begin or the end of an event of the engine."""
    event = item.event
    if event.kind in _OF_COLLECTIVES:
        if item.is_begin:
            marked.append(event)
        return
    now = host if event.kind == "WAIT" else compute
    if item.is_begin:
        times[id(event)] = [now, now]
    else:
        times[id(event)][1] = now


def _timed(event: trace.Event, times: dict[int, list[float]]) -> trace.Event:
    start, end = times.get(id(event), (0.0, 0.0))
    return replace(event, start=start, end=end)


def _length(spans: Sequence[tuple[float, float]]) -> float:
    """The total length of the union of spans."""
    total, until = 0.0, 0.0
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
