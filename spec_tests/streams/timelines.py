"""Timelines of an accelerator: the model of durations, and the drawing of several runs with one time axis.

The simulated device has no clock. It records the order in which the CPU launches operators, their waits, and the stops
of the CPU. These are real. The durations come from a model of three numbers:

* the CPU needs `LAUNCH` seconds to launch any operator;
* an operator on the compute stream takes its bytes, read and written, divided by `COMPUTE`;
* a collective takes its bytes divided by `LINK`. The collectives of one process group run one at a time in launch
  order, as on NCCL.

An operator begins when it has been launched, its stream is free, and all operators in its clock have ended::

    launched at 10 us, its stream free at 25 us, waits for an all-gather that ends at 40 us: begins at 40 us

The rates are far below those of a GPU, because the tensors are small. The relevant property is that an all-gather takes
about as long as the forward of a block. Memory that ``record_stream`` keeps counts until the compute stream is done.

Spec: SIM-11.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minifsdp.trace import Event
from minifsdp_tools import timeline
from spec_tests.harness.simulated.clocks import HOST, Clock
from spec_tests.streams.steps import ROWS, Moment, Step

__all__ = ["COMPUTE", "LAUNCH", "LINK", "Played", "comparison", "played"]

LAUNCH = 5e-6
COMPUTE = 20e9
LINK = 5e9

WIDTH = 840
ROOM = 24  # in pixels: height of a panel's name


@dataclass(frozen=True)
class Played:
    """A step with times, in seconds.

    Attributes:
        step: the step.
        launched: the time at which the CPU began to launch each operator, and then the end of all launches.
        ran: begin and end of each operator.
        stops: begin and end of each ``WAIT``, by its place.
    """

    step: Step
    launched: list[float]
    ran: list[tuple[float, float]]
    stops: dict[int, tuple[float, float]]

    @property
    def end(self) -> float:
        """The end of the last operator or launch."""
        return max(self.launched[-1], *(end for _, end in self.ran))

    def release(self, moment: Moment) -> float:
        """When the memory of a ``FREE`` can be reused: after all earlier launches on the compute stream have ended."""
        freed = self.launched[moment.place - 1] + LAUNCH
        computing = [m.places[-1] for m in self.step.moments if m.row == "compute stream" and m.place < moment.place]
        return max([freed, *(self.ran[place][1] for place in computing)])


def played(step: Step) -> Played:
    """Gives each operator the earliest time that the model allows."""
    stops = {moment.place: moment.known for moment in step.moments if moment.kind == "WAIT"}
    ends: dict[tuple[int, int], float] = {}
    free_at: dict[object, float] = {}
    result = Played(step, [], [], {})
    cpu = 0.0
    for place, operation in enumerate(step.operations):
        if place in stops:
            begin, cpu = cpu, max(cpu, _over(stops[place], ends))
            result.stops[place] = (begin, cpu)
        result.launched.append(cpu)
        cpu += LAUNCH
        queues: list[object] = [operation.stream]
        rate = COMPUTE
        if operation.communicator:
            queues.append(f"communicator {operation.communicator}")
            rate = LINK
        start = max(cpu, _over(operation.clock, ends), *(free_at.get(queue, 0.0) for queue in queues))
        end = ends[operation.stream, operation.number] = start + operation.num_bytes / rate
        free_at.update(dict.fromkeys(queues, end))
        result.ran.append((start, end))
    result.launched.append(cpu)
    return result


def _over(clock: Clock, ends: dict[tuple[int, int], float]) -> float:
    """The time at which all operators in a clock have ended; operators before the step end at 0."""
    return max((ends.get(item, 0.0) for item in clock.items() if item[0] != HOST), default=0.0)


# --- drawing ---


def comparison(title: str, panels: Sequence[tuple[str, Step]]) -> str:
    """An SVG picture of several steps below each other, with one time axis."""
    runs = [(name, played(step)) for name, step in panels]
    rows = [row for row in ROWS if any(row == moment.row for _, run in runs for moment in run.step.moments)]
    stairs = {name: _memory(run) for name, run in runs}
    largest = max(timeline.peak_gathered_bytes(events) for events in stairs.values())
    everything = [event for _, run in runs for row in rows for event in _events(run, row)]
    sheet = timeline._Sheet(WIDTH, max(run.end for _, run in runs), largest, everything)
    model = f"{1e6 * LAUNCH:.0f} us of the CPU for each operator, {COMPUTE / 1e9:.0f} GB/s computing,"
    captions = (
        "Simulated: order and waits are real, lengths are a model:",
        f"{model} {LINK / 1e9:.0f} GB/s between ranks, one collective of a group at a time.",
    )
    top = y = timeline._draw_heading(sheet, everything, title, *captions)
    for name, run in runs:
        sheet.text(20, y + 15, "rank", f"{name}: {1e3 * run.end:.2f} ms")
        y += ROOM
        for row in rows:
            y = timeline._draw_stream(sheet, y, row.removesuffix(" stream"), _events(run, row))
        y = timeline._draw_memory(sheet, y, stairs[name]) + 10
    timeline._draw_grid(sheet, top, y)
    return sheet.finished(y + 34, title)


def _events(run: Played, row: str) -> list[Event]:
    """The events of a row. For the CPU, these are its launches and its stops."""
    events = []
    for moment in run.step.moments:
        places = moment.places
        if row == "CPU" and moment.kind == "WAIT":
            events.append(Event("WAIT", "", *run.stops[moment.place]))
        elif moment.kind not in timeline.BOXES:
            continue
        elif row == "CPU":
            events.append(Event(moment.kind, moment.unit, run.launched[places[0]], run.launched[places[-1]] + LAUNCH))
        elif row == moment.row:
            events.append(Event(moment.kind, moment.unit, run.ran[places[0]][0], run.ran[places[-1]][1]))
    return events


def _memory(run: Played) -> list[Event]:
    """All-gathers and frees, when memory is allocated and when it is reusable; each all-gather has its own name."""
    events: list[Event] = []
    numbers: dict[str, int] = {}
    for moment in run.step.moments:
        if moment.kind == "AG":
            numbers[moment.unit] = numbers.get(moment.unit, 0) + 1
            taken = run.launched[moment.place]
            events.append(Event("AG", f"{moment.unit}#{numbers[moment.unit]}", taken, taken, moment.num_bytes))
        elif moment.kind == "FREE":
            free = run.release(moment)
            events.append(Event("FREE", f"{moment.unit}#{numbers[moment.unit]}", free, free))
    return sorted(events, key=lambda event: event.start)
