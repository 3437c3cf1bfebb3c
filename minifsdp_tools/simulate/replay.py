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

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from minifsdp import trace
from minifsdp_tools.simulate.machine import Card, Network
from minifsdp_tools.simulate.recording import Recording
from minifsdp_tools.simulate.tape import (
    COMPUTE,
    Allocate,
    Collective,
    Free,
    HostWait,
    Item,
    Kernel,
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


class Replay:
    """The state of a replay: the times up to the current item."""

    def __init__(self, recording: Recording, card: Card, network: Network) -> None:
        self._recording = recording
        self._card = card
        self._network = network
        self.host = self._waited = self._slowed_until = 0.0
        # A CPU computes and communicates on the same cores. This delay is not included in the other times.
        self.delay = 0.0
        # When each stream, the last collective of each group, and each event are complete.
        self.ends: dict[int, float] = defaultdict(float)
        self._groups: dict[tuple[int, ...], float] = defaultdict(float)
        self._events: dict[int, float] = {}
        # The changes of held memory and their times. For each block, other streams that use it.
        self._changes = [(0.0, recording.stored_bytes)]
        self._used_on: dict[int, set[int]] = defaultdict(set)
        self._computing: list[tuple[float, float]] = []
        self._communicating: list[tuple[float, float]] = []
        self._busy: dict[str, float] = defaultdict(float)
        self._flops: dict[str, float] = defaultdict(float)
        # For each number of items, the time of the CPU thread, and when it and the compute stream have completed them.
        self._clock = [(0.0, 0.0)]
        # The kind, the position and the time of each collective.
        self._collectives: list[tuple[str, int, float, float]] = []

    def run(self, item: Item) -> None:
        """Gives the item its time."""
        match item:
            case Kernel():
                self._compute(item)
            case Collective():
                self._communicate(item)
            case RecordEvent():
                self.host += self._card.host_event
                self._events[item.event] = max(self.ends[item.stream], self.host)
            case WaitEvent():
                self.host += self._card.host_event
                # An event of an earlier step is complete.
                self.ends[item.stream] = max(
                    self.ends[item.stream], self._events.get(item.event, 0.0)
                )
                if self._card.is_cpu and item.stream == COMPUTE:
                    # A CPU thread that computes itself waits where the compute stream of a card does.
                    self._waited += max(0.0, self.ends[COMPUTE] - self.host)
                    self.host = max(self.host, self.ends[COMPUTE])
            case HostWait():
                until = self._events.get(item.event, 0.0)
                self._waited += max(0.0, until - self.host)
                self.host = max(self.host, until)
            case Allocate():
                self._changes.append((self.host, item.num_bytes))
            case UseOn():
                self._used_on[item.block].add(item.stream)
            case Free():
                users = self._used_on.pop(item.block, ())
                until = max([self.host, *(self.ends[stream] for stream in users)])
                self._changes.append((until, -item.num_bytes))
        work_ends = max(self.host, self.ends[COMPUTE])
        self._clock.append((self.host + self.delay, work_ends + self.delay))

    def result(self) -> Result:
        """The step, after its last item."""
        seconds = max(self.host, *self.ends.values(), 0.0) + self.delay
        compute = _length(self._computing)
        changes = sorted(self._changes, key=lambda change: change[0])
        memory = list(accumulate(changes, lambda old, new: (new[0], old[1] + new[1])))
        peak = (
            self._card.matmul32
            if self._recording.setup.param_dtype == "fp32"
            else self._card.matmul
        )
        return Result(
            seconds=seconds,
            compute_seconds=compute + self.delay,
            exposed_seconds=_length(self._computing + self._communicating) - compute,
            host_seconds=self.host + self.delay - self._waited,
            waits=self._waited,
            tokens_per_second=self._recording.tokens / seconds,
            mfu=3 * self._flops["forward"] / seconds / peak,
            hfu=sum(self._flops.values()) / seconds / peak,
            stored_bytes=self._recording.stored_bytes,
            peak_allocated=self._recording.peak_bytes,
            peak_held=max(num_bytes for _, num_bytes in memory),
            memory=memory,
            events=[self._timed(event) for event in self._recording.events],
            busy=dict(self._busy),
        )

    def _compute(self, kernel: Kernel) -> None:
        self.host += self._card.host_operator
        # The thread of a CPU executes the kernels of all streams. Collectives run in other threads.
        start = (
            self.host if self._card.is_cpu else max(self.ends[kernel.stream], self.host)
        )
        seconds = self._card.seconds(kernel)
        if kernel.stream == COMPUTE:
            # Collectives that run now use a part of the card.
            more = self._card.slowdown * max(
                0.0, min(seconds, self._slowed_until - start)
            )
            self._busy[kernel.phase] += seconds + more
            if self._card.is_cpu:
                self.delay += more
            else:
                seconds += more
            self._computing.append((start, start + seconds))
        else:
            self._busy["copies"] += seconds
        self._flops[kernel.phase] += kernel.nominal_flops
        self.ends[kernel.stream] = max(self.ends[kernel.stream], start + seconds)
        self.host = max(self.host, start + seconds) if self._card.is_cpu else self.host

    def _communicate(self, collective: Collective) -> None:
        self.host += self._card.host_collective
        # The collectives of all groups share the cores of a CPU. So two at a time take as long as one after the other.
        group = () if self._card.is_cpu else collective.ranks
        start = max(self.ends[collective.stream], self.host, self._groups[group])
        end = start + self._network.seconds(collective)
        self.ends[collective.stream] = self._groups[group] = end
        self._slowed_until = max(self._slowed_until, end)
        self._communicating.append((start, end))
        self._busy[collective.kind] += end - start
        self._collectives.append(
            (
                collective.kind,
                len(self._clock) - 1,
                start + self.delay,
                end + self.delay,
            )
        )

    def _timed(self, event: trace.Event) -> trace.Event:
        """The event with its times in seconds. A collective is the next one of its kind on the tape."""
        if event.kind in _OF_COLLECTIVES:
            spans = (
                (start, end)
                for kind, position, start, end in self._collectives
                if kind == event.kind and position >= event.start
            )
            start, end = next(spans, (0.0, 0.0))
        else:
            of_work = int(event.kind != "WAIT")
            start = self._clock[int(event.start)][of_work]
            end = self._clock[int(event.end)][of_work]
        return replace(event, start=start, end=end)


def replay(recording: Recording, card: Card, network: Network) -> Result:
    """Simulates the recorded step on a machine."""
    state = Replay(recording, card, network)
    for item in recording.tape.items:
        state.run(item)
    return state.result()


def _length(spans: Sequence[tuple[float, float]]) -> float:
    """The total length of the union of spans."""
    total = 0.0
    until = 0.0
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
