"""Checks of the exercises about the states of a unit, and about the pre-backward hook.

Most checks call the learner's function with recorders in place of the layout, and compare the
calls. Worked example, a prefetch: ``unshard(); unshard(); wait()`` must be ``throttle, all-gather, wait``.

*In torch:* no such tool.

Spec: LEARN-03.
"""

from typing import Any, cast

from torch import nn

from minifsdp.engine.backward_hooks import graph_task
from minifsdp.engine.hooks import IterationState
from minifsdp.engine.schedule import BackwardPrefetch, Schedule
from minifsdp.engine.unit import Phase, State, Unit, UnitPolicy
from minifsdp_tools.learn.checking import NotMetError, expect


class Recorder:
    """Records the names of the methods that are called: ``recorder.free()`` appends ``free`` to `calls`.

    Args:
        calls: the names.
        results: what methods return, by name; the others return ``None``.
        **values: other attributes.
    """

    def __init__(
        self, calls: list[str], results: dict[str, Any] | None = None, **values: Any
    ) -> None:
        self.calls = calls
        self.results = results or {}
        vars(self).update(values)

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: self._called(name)

    def _called(self, name: str) -> Any:
        self.calls.append(name)
        return self.results.get(name)


# --- 2: all-gather and reshard ---


def _unit(*methods: str) -> tuple[Any, list[str]]:
    """A unit with a recorder as layout, as handle of the all-gather and as limiter, after calls of these methods."""
    calls: list[str] = []
    given = object()
    nothing = cast(Any, None)
    results = {"all_gather": Recorder(calls), "free": given}
    layout: Any = Recorder(calls, results, offloads=False, num_bytes=0, group=None)
    unit: Any = Unit(nn.Identity(), layout, [nothing], nothing, UnitPolicy(True))
    limiter: Any = Recorder(calls)
    limiter.released = lambda event: calls.append(
        "released" if event is given else "released without the event"
    )
    unit.join(object(), limiter)
    for method in methods:
        getattr(unit, method)()
    return unit, calls


def unshard_issues() -> None:
    """``unshard`` issues the all-gather and does not wait."""
    unit, calls = _unit("unshard")
    expect("wait" not in calls, "waits-early")
    expect("all_gather" in calls, "no-all-gather", calls=calls)
    expect(calls == ["throttle", "all_gather"], "throttle", calls=calls)
    expect(unit.state is State.GATHERING, "not-gathering", state=unit.state)


def unshard_twice() -> None:
    """A unit that is not sharded is not all-gathered again."""
    unit, calls = _unit("unshard", "unshard")
    expect(
        calls.count("all_gather") == 1,
        "gathers-twice",
        when="while the first all-gather ran",
    )
    unit.wait()
    unit.unshard()
    expect(
        calls.count("all_gather") == 1,
        "gathers-twice",
        when="after the unit was unsharded",
    )
    unit, calls = _unit()
    unit.phase = Phase.SUMMONED
    unit.unshard()
    expect(calls == [], "summoned", calls=calls)


def wait_waits() -> None:
    """``wait`` waits for the handle once; it requires an ``unshard`` before it."""
    unit, calls = _unit("unshard")
    calls.clear()
    unit.wait()
    expect("wait" in calls, "no-wait")
    expect(unit.state is State.UNSHARDED, "not-unsharded", state=unit.state)
    unit.wait()
    expect(calls == ["wait"], "waits-twice", calls=calls)
    unit, _ = _unit()
    for ends in ("wait", "reshard"):
        unit.layout.all_gather = lambda comm_streams: None
        unit.unshard()
        try:
            getattr(unit, ends)()
        except (AttributeError, RuntimeError) as error:
            # Errors of other code are raised unchanged, for example of a function that the learner has not written.
            if (
                isinstance(error, NotImplementedError)
                or getattr(error, "obj", None) is not None
            ):
                raise
            raise NotMetError("no-handle", error=error) from error
    try:
        _unit("wait")
    except RuntimeError:
        return
    raise NotMetError("waits-for-nothing")


def reshard_frees() -> None:
    """``reshard`` registers the shards, frees the memory and informs the limiter; it does nothing if sharded."""
    unit, calls = _unit("reshard")
    expect(calls == [], "frees-sharded", calls=calls)
    unit.unshard()
    unit.wait()
    calls.clear()
    unit.reshard()
    expect("wait" not in calls, "waits-again")
    expect("free" in calls, "no-free")
    expect("use_sharded_params" in calls, "modules", calls=calls)
    expect("released" in calls, "not-released", calls=calls)
    expect(calls == ["use_sharded_params", "free", "released"], "order", calls=calls)
    expect(unit.state is State.SHARDED, "not-sharded", state=unit.state)
    unit.layout.free = lambda: None
    unit.unshard()
    calls.clear()
    unit.reshard()
    expect("released without the event" not in calls, "no-event")


def reshard_in_flight() -> None:
    """``reshard`` waits for an all-gather in flight before it frees the memory."""
    _, calls = _unit("unshard", "reshard")
    expect(
        "wait" in calls and calls.index("wait") < calls.index("free"),
        "frees-in-flight",
        calls=calls,
    )


# --- 3: the pre-backward hook ---


def _state(
    prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE, **policy: Any
) -> tuple[Any, Any, list[str]]:
    """The state of an iteration, and a unit that records what the hook does with them."""
    calls: list[str] = []
    nothing: Any = None
    state: Any = IterationState([], nothing, Schedule(prefetch))
    unit: Any = Recorder(
        calls,
        name="block",
        layout=Recorder(calls),
        policy=UnitPolicy(True, **policy),
        phase=Phase.IDLE,
        state=State.SHARDED,
        graph_task=None,
        awaits_backward=True,
        is_held=False,
    )

    def begin() -> None:
        calls.append("begin_backward")
        state.in_backward = True

    def unshard(**_: Any) -> None:
        calls.append("unshard")
        unit.state = State.GATHERING

    state.begin_backward = begin
    unit.unshard = unshard
    state._prefetch_backward = lambda unit: calls.append("prefetch")
    return state, unit, calls


FIRST_CALL = ["begin_backward", "unshard", "wait", "use_unsharded_params", "prefetch"]


def hook_order() -> None:
    """The order of the calls of the first hook of a backward."""
    state, unit, calls = _state()
    state.pre_backward(unit)
    for name in FIRST_CALL:
        expect(name in calls, f"no-{name.replace('_', '-')}", calls=calls)
    expect(
        calls.index("prefetch") > calls.index("unshard"), "prefetch-first", calls=calls
    )
    expect(calls.index("prefetch") > calls.index("wait"), "prefetch-early", calls=calls)
    expect(calls.index("unshard") < calls.index("wait"), "wait-first", calls=calls)
    expect(calls == FIRST_CALL, "hook-order", calls=calls, right=FIRST_CALL)


def hook_notes() -> None:
    """The attributes of the unit after the hook."""
    state, unit, calls = _state()
    state.in_backward = True
    state.pre_backward(unit)
    expect("begin_backward" not in calls, "begins-twice")
    expect(unit.phase is Phase.PRE_BACKWARD, "phase", phase=unit.phase)
    expect(unit.awaits_backward is False, "awaits-backward")
    expect(unit.graph_task == graph_task(), "graph-task", got=unit.graph_task)


def hook_once() -> None:
    """A second output of the unit calls the hook again, without an effect."""
    state, unit, calls = _state()
    state.pre_backward(unit)
    state.pre_backward(unit)
    expect(calls == FIRST_CALL, "twice", calls=calls[len(FIRST_CALL) :])


def hook_policy() -> None:
    """Units that need no all-gather, units that are unsharded, and schedules without this prefetch."""
    state, unit, calls = _state(unshards_in_backward=False)
    state.pre_backward(unit)
    expect("unshard" not in calls, "needless-all-gather")
    expect(
        not {"wait", "use_unsharded_params"} & {*calls},
        "waits-for-sharded",
        calls=calls,
    )
    state, unit, calls = _state(unshards_in_backward=False)
    unit.state = State.UNSHARDED
    state.pre_backward(unit)
    expect("use_unsharded_params" in calls, "forgets-unsharded", calls=calls)
    for prefetch in (BackwardPrefetch.BACKWARD_POST, None):
        state, unit, calls = _state(prefetch)
        state.pre_backward(unit)
        expect("prefetch" not in calls, "always-prefetches", prefetch=prefetch)
