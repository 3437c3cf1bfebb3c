"""Checks of the exercises about the states of a unit, and about the pre-backward hook.

Most checks call the learner's function with recorders in place of the layout, and compare the
calls. Worked example, a prefetch: ``unshard(); unshard(); wait()`` must be ``throttle, all-gather, wait``.

*In torch:* no such tool.

Spec: LEARN-03.
"""

from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock, call

from torch import nn

from minifsdp.engine.backward_hooks import graph_task
from minifsdp.engine.extension_points import ExtensionPoints
from minifsdp.engine.hooks import IterationState
from minifsdp.engine.schedule import BackwardPrefetch, Schedule
from minifsdp.engine.unit import Phase, State, Unit, UnitPolicy, Uses
from minifsdp_tools.learn.checking import NotMetError, expect


def _calls(recorder: Mock) -> list[str]:
    """The names of the methods that were called: ``recorder.layout.free()`` is ``free``."""
    return [name.rpartition(".")[2] for name, *_ in recorder.mock_calls]


# --- 2: all-gather and reshard ---


def _unit(*methods: str) -> tuple[Any, Any]:
    """A unit and the recorder of its layout, its all-gathers and its limiter, after calls of these methods."""
    recorder = Mock()
    recorder.layout.configure_mock(offloads=False, num_bytes=0, group=None)
    unit: Any = Unit(
        [nn.Identity()], recorder.layout, [cast(Any, None)], UnitPolicy(True)
    )
    unit.root = SimpleNamespace(
        comm_streams=None,
        limiter=recorder.limiter,
        iteration=SimpleNamespace(points=ExtensionPoints()),
    )
    for method in methods:
        getattr(unit, method)()
    return unit, recorder


def unshard_issues() -> None:
    """``unshard`` issues the all-gather and does not wait."""
    unit, recorder = _unit("unshard")
    calls = _calls(recorder)
    expect(
        {
            "waits-early": "wait" not in calls,
            "no-all-gather": "all_gather" in calls,
            "throttle": calls == ["throttle", "all_gather"],
            "not-gathering": unit.state is State.GATHERING,
        },
        calls=calls,
        state=unit.state,
    )


def unshard_twice() -> None:
    """A unit that is not sharded is not all-gathered again."""
    for methods, when in (
        (("unshard", "unshard"), "while the first all-gather ran"),
        (("unshard", "wait", "unshard"), "after the unit was unsharded"),
    ):
        _, recorder = _unit(*methods)
        expect({"gathers-twice": recorder.layout.all_gather.call_count == 1}, when=when)
    unit, recorder = _unit()
    unit.phase = Phase.SUMMONED
    unit.unshard()
    expect({"summoned": not recorder.mock_calls}, calls=_calls(recorder))


def wait_waits() -> None:
    """``wait`` waits for the handle once; it requires an ``unshard`` before it."""
    unit, recorder = _unit("unshard", "wait")
    expect(
        {
            "no-wait": "wait" in _calls(recorder),
            "not-unsharded": unit.state is State.UNSHARDED,
        },
        state=unit.state,
    )
    unit.wait()
    calls = _calls(recorder)[2:]
    expect({"waits-twice": calls == ["wait"]}, calls=calls)
    # An all-gather without a handle.
    unit, recorder = _unit()
    recorder.layout.all_gather.return_value = None
    for method in ("unshard", "wait", "reshard", "unshard", "reshard"):
        getattr(unit, method)()
    with suppress(RuntimeError):
        _unit("wait")
        raise NotMetError("waits-for-nothing")


def reshard_frees() -> None:
    """``reshard`` registers the shards, frees the memory and informs the limiter; it does nothing if sharded."""
    _, recorder = _unit("reshard")
    expect({"frees-sharded": not recorder.mock_calls}, calls=_calls(recorder))
    unit, recorder = _unit("unshard", "wait", "reshard")
    calls = _calls(recorder)[3:]
    released = call(recorder.layout.free.return_value)
    expect(
        {
            "waits-again": "wait" not in calls,
            "no-free": "free" in calls,
            "modules": "use_sharded_params" in calls,
            "not-released": released in recorder.limiter.released.mock_calls,
            "order": calls == ["use_sharded_params", "free", "released"],
            "not-sharded": unit.state is State.SHARDED,
        },
        calls=calls,
        state=unit.state,
    )
    recorder.layout.free.return_value = None
    unit.unshard()
    unit.reshard()
    expect({"no-event": recorder.limiter.released.call_count == 1})


def reshard_in_flight() -> None:
    """``reshard`` waits for an all-gather in flight before it frees the memory."""
    calls = _calls(_unit("unshard", "reshard")[1])
    expect(
        {
            "frees-in-flight": "wait" in calls
            and calls.index("wait") < calls.index("free")
        },
        calls=calls,
    )


# --- 3: the pre-backward hook ---


def _state(
    prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
    of_unit: State = State.SHARDED,
    **policy: Any,
) -> tuple[Any, Any, Mock]:
    """The state of an iteration, a unit, and the recorder of what the hook does with them."""
    recorder = Mock()
    unit = recorder.unit
    unit.configure_mock(
        name="block",
        policy=UnitPolicy(True, **policy),
        phase=Phase.IDLE,
        state=of_unit,
        uses=Uses(awaits_backward=True, graph_task=-2),
        is_held=False,
    )
    unit.unshard.side_effect = lambda **_: unit.configure_mock(state=State.GATHERING)
    state: Any = IterationState([], cast(Any, None), Schedule(prefetch))
    recorder.begin_backward.side_effect = partial(setattr, state, "in_backward", True)
    state.begin_backward = recorder.begin_backward
    state._prefetch_backward = recorder.prefetch
    return state, unit, recorder


def _calls_of_hook(*options: Any, num_times: int = 1, **policy: Any) -> list[str]:
    """The calls of the hook in a `_state` with these options."""
    state, unit, recorder = _state(*options, **policy)
    for _ in range(num_times):
        state.pre_backward(unit)
    return _calls(recorder)


FIRST_CALL = ["begin_backward", "unshard", "wait", "use_unsharded_params", "prefetch"]


def hook_order() -> None:
    """The order of the calls of the first hook of a backward."""
    calls = _calls_of_hook()
    for name in FIRST_CALL:
        expect({f"no-{name.replace('_', '-')}": name in calls}, calls=calls)
    expect(
        {
            "prefetch-first": calls.index("prefetch") > calls.index("unshard"),
            "prefetch-early": calls.index("prefetch") > calls.index("wait"),
            "wait-first": calls.index("unshard") < calls.index("wait"),
            "hook-order": calls == FIRST_CALL,
        },
        calls=calls,
        right=FIRST_CALL,
    )


def hook_notes() -> None:
    """The attributes of the unit after the hook."""
    state, unit, recorder = _state()
    state.in_backward = True
    state.pre_backward(unit)
    expect(
        {
            "begins-twice": not recorder.begin_backward.called,
            "phase": unit.phase is Phase.PRE_BACKWARD,
            "awaits-backward": unit.uses.awaits_backward is False,
            "graph-task": unit.uses.graph_task == graph_task(),
        },
        phase=unit.phase,
        got=unit.uses.graph_task,
    )


def hook_once() -> None:
    """A second output of the unit calls the hook again, without an effect."""
    calls = _calls_of_hook(num_times=2)
    expect({"twice": calls == FIRST_CALL}, calls=calls[len(FIRST_CALL) :])


def hook_policy() -> None:
    """Units that need no all-gather, units that are unsharded, and schedules without this prefetch."""
    calls = _calls_of_hook(unshards_in_backward=False)
    expect(
        {
            "needless-all-gather": "unshard" not in calls,
            "waits-for-sharded": not {"wait", "use_unsharded_params"} & {*calls},
        },
        calls=calls,
    )
    calls = _calls_of_hook(of_unit=State.UNSHARDED, unshards_in_backward=False)
    expect({"forgets-unsharded": "use_unsharded_params" in calls}, calls=calls)
    for prefetch in (BackwardPrefetch.BACKWARD_POST, None):
        calls = _calls_of_hook(prefetch)
        expect({"always-prefetches": "prefetch" not in calls}, prefetch=prefetch)
