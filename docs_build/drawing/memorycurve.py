"""The memory of a rank over one step, with activations: simulated while the site is built.

The simulator replays a step that the engine issues for a model on the meta device. Three heights are drawn above each
other, from the bottom up::

    stored            shards of the parameters and states of the optimizer, at the beginning of the step
    unsharded         outputs of all-gathers that are not freed yet
    all the rest      activations, gradients and buffers of collectives

The CPU allocates and releases memory long before the device uses it. So a change is drawn when the compute stream has
reached its place in the order of the step.
"""

from dataclasses import dataclass
from functools import cache

from docs_build.drawing.sketch import Panel, figure, size_of
from minifsdp_tools.events import gathered_bytes
from minifsdp_tools.simulate.machine import CARDS, Network
from minifsdp_tools.simulate.recording import record
from minifsdp_tools.simulate.replay import Replay, Result
from minifsdp_tools.simulate.setup import Setup
from minifsdp_tools.simulate.tape import COMPUTE

SETUP = {"model": "llama3-8b", "num_ranks": 8, "micro_batch": 1, "sequence": 4096}
TITLES = {"none": "Without activation checkpointing", "full": "With activation checkpointing for each block"}
LEGEND = [("o", "stored: shards and optimizer"), ("p", "unsharded parameters"), ("g", "activations and gradients")]
SOURCE = (
    "Simulated by minifsdp_tools.simulate when this page was built: Llama 3 8B, bfloat16, AdamW, 8 ranks of an A100 "
    "each, one sequence of 4096 tokens on each rank. Not measured on a GPU."
)
_ROOM, _HEIGHT = 304, 130


@dataclass(frozen=True)
class Curve:
    """A step, and its allocated memory: the time on the compute stream of each change, and the bytes after it."""

    result: Result
    allocated: list[tuple[float, float]]

    @property
    def peak(self) -> float:
        """The most allocated bytes."""
        return max(size for _, size in self.allocated)


@cache
def simulated(checkpointing: str) -> Curve:
    """The step of `SETUP`, with ``"full"`` activation checkpointing or ``"none"``."""
    recording = record(Setup(checkpointing=checkpointing, **SETUP))  # type: ignore[arg-type]
    state = Replay(recording, CARDS["A100-80"], Network())
    times = []
    for item in recording.tape.items:
        state.run(item)
        times.append(max(state.host, state.ends[COMPUTE]))
    allocated = [(times[position], float(size)) for position, size in recording.memory()]
    return Curve(state.result(), allocated)


def draw(caption: str) -> str:
    """Both steps, with the same scale."""
    curves = {kind: simulated(kind) for kind in TITLES}
    seconds = max(curve.result.seconds for curve in curves.values())
    most = max(curve.peak for curve in curves.values())
    panels = [_panel(title, curves[kind], seconds, most) for kind, title in TITLES.items()]
    return figure("curve", panels, caption, SOURCE, LEGEND)


def _panel(title: str, curve: Curve, seconds: float, most: float) -> Panel:
    result, stored = curve.result, float(curve.result.stored_bytes)

    def stairs(changes: list[tuple[float, float]]) -> list[tuple[float, float]]:
        return [(_ROOM * when / seconds, _HEIGHT * size / most) for when, size in changes]

    gathered = gathered_bytes(sorted(result.events, key=lambda event: event.start))
    unsharded = [(when, stored + size) for when, size in gathered]
    areas = [
        ("g", stairs(_thinned(curve.allocated, seconds))),
        ("p", stairs([(0.0, stored), *unsharded, (result.seconds, stored)])),
        ("o", stairs([(0.0, stored), (result.seconds, stored)])),
    ]
    texts = {"peak": f"peak {size_of(curve.peak)}", "end": f"{1e3 * result.seconds:,.0f} ms"}
    data = {**texts, "areas": areas, "right": _ROOM * result.seconds / seconds}
    peak = max(size for _, size in gathered)
    text = f"Stored: {size_of(stored)}. Unsharded parameters: at most {size_of(peak)}."
    return Panel(title, data, _ROOM + 16, _HEIGHT + 46, text)


def _thinned(stairs: list[tuple[float, float]], seconds: float) -> list[tuple[float, float]]:
    """For each of 300 equal parts of the step, its highest value, at its beginning."""
    columns: dict[int, float] = {}
    last = 0.0
    for when, size in stairs:
        column = int(300 * when / seconds)
        columns[column] = max(columns.get(column, 0.0), size)
    thinned = []
    for column in range(max(columns) + 1):
        last = columns.get(column, last)
        thinned.append((column * seconds / 300, last))
    return thinned
