"""The simulated machine: devices with their streams, the host's clock, and the collisions found.

Each process has one, `WORLD`. A test begins with `World.begin`, where all operations are complete. At its end
`World.races` must be empty.

There are two devices, ``sim:0`` and ``sim:1``, so that "the current device" and "the device of this tensor" can
differ. Training runs only on ``sim:0``, because autograd supports one device of a Python backend.

Spec: SIM-01, SIM-03.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from spec_tests.harness.simulated.backward import Backwards
from spec_tests.harness.simulated.capture import Captures
from spec_tests.harness.simulated.clocks import HOST, LOCK, Clock, Stream, join
from spec_tests.harness.simulated.memory import Access, Block, Memory
from spec_tests.harness.simulated.races import Race, SimulatedRaceError
from spec_tests.harness.simulated.stuck import Stuck

__all__ = ["NUM_DEVICES", "WORLD", "World"]

NUM_DEVICES = 2
PROGRAM = f"{os.sep}minifsdp{os.sep}"  # part of the file names of the program
CHECKOUT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
DEPTH = 30  # frames that are searched for lines of the program
NUM_LINES = 3  # lines of the program that are shown for an access


class World:
    """One machine.

    Attributes:
        memory: the blocks and their accesses.
        host: the CPU's clock.
        races: the collisions, each pair of lines once.
        stops: number of stops of the host, by reason and line.
        num_operations: launched so far.
        log: the open `Log`, if there is one (see ``replay.py``).
        is_strict: all operations run on one stream, and a remaining collision raises immediately.
        stuck: collectives that cannot complete.
        backwards: the streams of nodes of autograd.
        captures: captures of graphs that have not ended.
        programs: parts of file names whose lines are shown in reports.
    """

    def __init__(self) -> None:
        self._local = threading.local()
        self.host: Clock = {}
        Stream.current_index = lambda: self.current_index
        Stream.current = self.current_stream
        Stream.host_clock = self.host
        Stream.host_stops = self.host_stops
        Stream.host_waits = self.wait_for
        Stream.where = self.where
        self.stuck, self.captures = Stuck(), Captures()
        Stream.refuse_in_captures = self.captures.refuse
        Stream.is_in_capture = self.captures.is_own
        self.main = [Stream(index, name="compute stream") for index in range(NUM_DEVICES)]
        self.streams: dict[int, Stream] = {stream.number: stream for stream in self.main}
        self.backwards = Backwards(self.main[0])
        self.memory = Memory(self._report)
        self.races: dict[Any, Race] = {}
        self.stops: Counter[tuple[str, str]] = Counter()
        self.num_operations = 0
        self.log: Any = None
        self.is_strict = False
        self.look_at(PROGRAM)

    # --- lines of the program ---

    def look_at(self, *parts: str) -> None:
        """Until the next test, reports show lines of files whose names contain one of these parts."""
        self.programs = parts
        self._is_program: dict[str, bool] = {}

    @property
    def current_index(self) -> int:
        """The current device of this thread."""
        index: int = getattr(self._local, "index", 0)
        return index

    @current_index.setter
    def current_index(self, index: int) -> None:
        if not 0 <= index < NUM_DEVICES:
            raise RuntimeError(f"sim: invalid device ordinal {index}; there are {NUM_DEVICES} simulated devices")
        self._local.index = index

    def current_stream(self, index: int) -> Stream:
        """The current stream of a device in this thread."""
        if self.is_strict:
            return self.main[index]
        if index == 0 and (place := self.backwards.place()):
            return place.stream
        chosen: dict[int, Stream] | None = getattr(self._local, "streams", None)
        return self.main[index] if chosen is None else chosen.get(index) or self.main[index]

    def use_stream(self, stream: Stream) -> None:
        """Makes ``stream`` the current stream of its device in this thread."""
        self.streams[stream.number] = stream
        if stream.index == 0:
            self.backwards.changed(stream)
            if place := self.backwards.place():
                place.stream = stream
                return
        self._local.__dict__.setdefault("streams", {})[stream.index] = stream

    def where(self) -> str:
        """The innermost lines of the program under test, innermost first."""
        frame: Any = sys._getframe(2)
        found: list[str] = []
        is_program = self._is_program
        for _ in range(DEPTH):
            if frame is None:
                break
            name = frame.f_code.co_filename
            if is_program.get(name) or (name not in is_program and self._look_at(name)):
                found.append(f"{os.path.basename(name)}:{frame.f_lineno}")
                if len(found) == NUM_LINES:
                    break
            frame = frame.f_back
        return " < ".join(found) or "the user's program"

    def _look_at(self, name: str) -> bool:
        # The folder of the checkout can have the name of the package.
        inside = name.rpartition(CHECKOUT)[2]
        found = self._is_program[name] = any(part in inside for part in self.programs)
        return found

    # --- the host ---

    def host_stops(self, reason: str) -> None:
        """Records that the CPU waits for the device.

        Raises:
            RuntimeError: a graph is captured.
        """
        self.captures.refuse(reason)
        with LOCK:
            self.stops[reason, self.where()] += 1

    def wait_for(self, clock: Clock) -> None:
        """Makes the CPU wait until all operations of the clock are complete."""
        self.stuck.wait(clock)
        with LOCK:
            join(self.host, clock)

    def stop_for(self, stream: Stream, reason: str) -> None:
        """Makes the CPU wait until the stream has completed all its operations."""
        self.host_stops(reason)
        self.wait_for(stream.clock)

    def synchronize(self) -> None:
        """Makes the CPU wait for all streams."""
        for stream in list(self.streams.values()):
            self.wait_for(stream.clock)

    # --- operations ---

    def begin_operation(self, stream: Stream | None) -> tuple[int, int, Clock]:
        """Stream, number and clock of an operation that is launched now. Without a stream it runs on the CPU."""
        with LOCK:
            self.num_operations += 1
            if stream is None:
                self.host[HOST] = self.host.get(HOST, 0) + 1
                return HOST, self.host[HOST], dict(self.host)
            self.streams[stream.number] = stream
            number, clock = stream.begin_operation()
            return stream.number, number, clock

    def name_of(self, stream: int) -> str:
        """The name of a stream for reports."""
        return "the CPU" if stream == HOST else self.streams[stream].name

    def _report(self, kind: str, new: Access, old: Access | None, block: Block | None) -> None:
        key = (kind, new.operator, new.where, new.is_write, old and (old.operator, old.where))
        if key in self.races:
            return
        race = self.races[key] = Race.of(self, kind, new, old, block)
        if self.is_strict:
            raise SimulatedRaceError(str(race))

    @contextmanager
    def strict(self) -> Iterator[None]:
        """Makes the device strict in a ``with`` block: it has one queue, so missing waits of streams have no effect.

        The remaining errors raise immediately: the host reads the target of an incomplete copy, or writes its source.
        As always, mixing CPU and device memory in one operator raises, and so does an invalid index.
        """
        self.is_strict = True
        try:
            yield
        finally:
            self.is_strict = False

    # --- tests ---

    def assert_no_race(self) -> None:
        """Called at the end of a test.

        Raises:
            AssertionError: there was a collision.
        """
        if self.races:
            shown = [str(race) for race in list(self.races.values())[:5]]
            raise AssertionError("\n".join([f"{len(self.races)} collisions on the simulated device:", *shown]))

    def begin(self) -> None:
        """Called at the beginning of a test: all operations are complete, and there are no collisions."""
        self.stuck.end()
        self.synchronize()
        self.memory.calm()
        self.races.clear()
        self.stops.clear()
        self.num_operations = 0
        self.log = None
        self.is_strict = False
        self.look_at(PROGRAM)
        self._local.__dict__.clear()
        self.backwards.begin()
        alive = {stream.number for stream in self.main}
        for number in [number for number in self.streams if number not in alive]:
            del self.streams[number]
        torch.manual_seed(0)


WORLD = World()
