"""One unit after each of its four hooks, and after the end of backward, from a recorded run.

The effects of a hook are the recorded moments while it ran. For ``pre_forward`` of a block, without prefetch ::

    AG issued, AG waited for, F begins         afterwards the parameters are unsharded

A moment may belong to another unit: while a gradient is reduced, the reduction of the previous unit is completed.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from docs_build.drawing.sketch import Panel, figure, size_of
from docs_build.recording import recordings

RUN, UNIT = "fsdp1-full-off-block-2", "stage1.block2"
TITLES = {
    "pre_forward": "After pre-forward",
    "leave_forward": "After post-forward",
    "pre_backward": "After pre-backward",
    "post_backward": "After post-backward",
    "end_backward": "After the end of backward",
}
WORDS = {
    ("AG", True): "the all-gather of {unit} is issued ({size})",
    ("AG", False): "{unit} waits for its all-gather",
    ("F", True): "the forward of {unit} begins",
    ("F", False): "the forward of {unit} is complete",
    ("FREE", True): "the unsharded parameters of {unit} are freed ({size})",
    ("B", True): "the gradient of {unit}'s output has arrived",
    ("B", False): "the gradients of {unit} are complete",
    ("RS", True): "the reduce-scatter of {unit} is issued ({size})",
    ("RS", False): "the reduce-scatter of {unit} is complete",
}


class Step:
    """The effects of a hook of `UNIT`, and the state afterwards, as recorded by rank 0.

    Attributes:
        happened: kind, unit, whether it begins, bytes.
        is_whole: all ranks have the unsharded parameters.
        is_reducing: a reduce-scatter of the gradient has been issued and is not complete.
        gradient: bytes of the reduced gradient.
    """

    def __init__(self, hook: str) -> None:
        moments = recordings.find(RUN)["ranks"][0]["moments"]
        here = _while(hook, moments)
        self.happened = [
            (kind, unit, begins, size) for kind, unit, begins, _, size, *_ in moments[here.start : here.stop]
        ]
        # A moment is recorded before its changes, so the next one shows the state after the hook.
        state, _, self.gradient, _ = moments[here.stop][7][_place()]
        self.is_whole = state != "S"
        reductions = [one[2] for one in moments[: here.stop] if one[0] == "RS" and one[1] == UNIT]
        self.is_reducing = reductions == [True]


def _place() -> int:
    return next(place for place, unit in enumerate(recordings.find(RUN)["units"]) if unit["name"] == UNIT)


def _while(hook: str, moments: list[Any]) -> range:
    """The moments during which ``hook`` of `UNIT` ran."""

    def runs(moment: Any) -> bool:
        return any(function == f"IterationState.{hook}" for _, function, *_ in moment[6])

    # The end of backward belongs to all units.
    first = next(n for n, one in enumerate(moments) if runs(one) and (one[1] == UNIT or hook == "end_backward"))
    last = next(n for n in range(first, len(moments)) if not runs(moments[n]))
    return range(first, last)


def _draw(hook: str, caption: str) -> str:
    words = "; ".join(_said(*one) for one in Step(hook).happened)
    return figure("hook", [_panel(hook, f"Recorded: {words}. {_held(hook)}.", 92)], caption, _source())


def storyboard(caption: str) -> str:
    """All five steps in one figure."""
    return figure("hook", [_panel(hook, f"{_held(hook)}.", 56) for hook in TITLES], caption, _source())


def _source() -> str:
    unit = recordings.find(RUN)["units"][_place()]
    date = recordings.load()["date"]
    return f"From a run recorded on {date} with 2 gloo ranks; the unit has {size_of(unit['bytes'])}."


def _held(hook: str) -> str:
    """The memory of a rank after a hook, in words."""
    step, unit = Step(hook), recordings.find(RUN)["units"][_place()]
    held = f"Each rank stores {size_of(unit['shard'])} of its parameters"
    if step.is_whole:
        held += f", and {size_of(unit['bytes'])} of unsharded parameters"
    if step.is_reducing:
        held += ", and the reduction of the unsharded gradient is in flight"
    if step.gradient:
        held += f", and {size_of(step.gradient)} of the mean gradient"
    return held


def _panel(hook: str, text: str, full: float) -> Panel:
    """The parameters and the gradient of both ranks; ``full`` is the width of an unsharded one."""
    step = Step(hook)
    rows = [
        ("parameters", 1.0 if step.is_whole else 0.5, True),
        ("gradient", 1.0 if step.is_reducing else 0.5, step.is_reducing or step.gradient),
    ]
    return Panel(TITLES[hook], {"rows": rows, "full": full}, 84 + 2 * (full + 12), 84, text)


def _said(kind: str, unit: str, begins: bool, num_bytes: int) -> str:
    return WORDS[kind, begins].format(unit=unit.rpartition(".")[2] or "the root", size=size_of(num_bytes))


STEPS: dict[str, Callable[[str], str]] = {hook: partial(_draw, hook) for hook in TITLES}
