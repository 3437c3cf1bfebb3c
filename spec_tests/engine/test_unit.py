"""The state machine of a unit, with a layout that only records its calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from minifsdp.engine.comm_streams import CommStreams
from minifsdp.engine.mesh import Group, MeshGroups
from minifsdp.engine.precision import Precision
from minifsdp.engine.reduce import ReducePlan
from minifsdp.engine.unit import Phase, State, Unit, UnitPolicy
from spec_tests.subject import trace

CPU = torch.device("cpu")


class Log:
    """Replaces a layout, its handles and the limiter. It only records the calls."""

    offloads = False
    all_gather_group: Any = None

    def __init__(self, *, has_promise: bool = True, has_memory: bool = True, fails: bool = False) -> None:
        self.calls: list[str] = []
        self.has_promise, self.has_memory, self.fails = has_promise, has_memory, fails
        self.dtype, self.num_bytes = torch.float32, 32

    # layout
    def all_gather(self, comm_streams: CommStreams) -> Any:
        self.calls.append("all_gather")
        if self.fails:
            raise ConnectionError("the wire is cut")
        return self if self.has_promise else None

    def use_sharded_params(self) -> None:
        self.calls.append("use_sharded_params")

    def free(self) -> Any:
        self.calls.append("free")
        return "event" if self.has_memory else None

    # handle
    def wait(self) -> None:
        self.calls.append("wait")

    # limiter
    def throttle(self, name: str) -> None:
        self.calls.append("throttle")

    def released(self, event: Any) -> None:
        assert event == "event"
        self.calls.append("released")


def make(log: Log, mesh: MeshGroups | None = None) -> Unit:
    layout: Any = log
    plan = ReducePlan.mean(mesh or MeshGroups(None, None), torch.float32)
    log.all_gather_group = plan.mesh.shard
    unit = Unit(nn.Linear(2, 2), layout, [plan], Precision(), UnitPolicy(reshard_after_forward=True))
    limiter: Any = log
    unit.join(CommStreams(CPU), limiter)
    unit.name = "block"
    return unit


def brought_to(state: State, log: Log) -> Unit:
    unit = make(log)
    if state is not State.SHARDED:
        unit.unshard()
    if state is State.UNSHARDED:
        unit.wait()
    assert unit.state is state
    log.calls.clear()
    return unit


# state before, method, state after, and the calls of layout, handle and limiter in this order
TABLE = [
    (State.SHARDED, "unshard", State.GATHERING, ["throttle", "all_gather"]),
    (State.SHARDED, "wait", RuntimeError, []),
    (State.SHARDED, "reshard", State.SHARDED, []),
    (State.GATHERING, "unshard", State.GATHERING, []),
    (State.GATHERING, "wait", State.UNSHARDED, ["wait"]),
    (State.GATHERING, "reshard", State.SHARDED, ["wait", "use_sharded_params", "free", "released"]),
    (State.UNSHARDED, "unshard", State.UNSHARDED, []),
    (State.UNSHARDED, "wait", State.UNSHARDED, []),
    (State.UNSHARDED, "reshard", State.SHARDED, ["use_sharded_params", "free", "released"]),
]


@pytest.mark.pure
def test_the_table_of_transitions_has_every_state_and_every_verb() -> None:
    assert {(state, verb) for state, verb, _, _ in TABLE} == {
        (state, verb) for state in State for verb in ("unshard", "wait", "reshard")
    }


@pytest.mark.pure
@pytest.mark.parametrize(("before", "verb", "after", "calls"), TABLE, ids=[f"{s.name}-{v}" for s, v, _, _ in TABLE])
def test_each_unit_method_leads_to_state_in_table(before: State, verb: str, after: Any, calls: list[str]) -> None:
    log = Log()
    unit = brought_to(before, log)
    if after is RuntimeError:
        with pytest.raises(RuntimeError, match="'block' waits for an all-gather that was never issued"):
            getattr(unit, verb)()
        assert unit.state is before
    else:
        getattr(unit, verb)()
        assert unit.state is after
    assert log.calls == calls


@pytest.mark.pure
@pytest.mark.parametrize("state", State)
def test_unshard_wait_and_reshard_do_not_change_the_phase(state: State) -> None:
    unit = brought_to(state, Log())
    for phase in Phase:
        unit.phase = phase
        unit.unshard()
        if phase is not Phase.SUMMONED:
            # The full parameters of a summoned unit are not all-gathered here.
            unit.wait()
        unit.reshard()
        assert unit.phase is phase


@pytest.mark.pure
def test_wrong_prefetch_is_awaited_before_reshard() -> None:
    log = Log()
    unit = brought_to(State.GATHERING, log)
    unit.reshard()
    # Other ranks take part in that all-gather. If the unit freed the memory first, the
    # all-gather would write into freed memory.
    assert log.calls.index("wait") < log.calls.index("free")


@pytest.mark.pure
@pytest.mark.spec("LIM-02")
@given(st.lists(st.sampled_from(["unshard", "wait", "reshard"]), max_size=20))
def test_limiter_is_called_before_each_all_gather(
    verbs: list[str],
) -> None:
    log = Log()
    unit = make(log)
    for verb in verbs:
        if verb != "wait" or unit.state is not State.SHARDED:
            getattr(unit, verb)()
    unit.reshard()
    one_life = ["throttle", "all_gather", "wait", "use_sharded_params", "free", "released"]
    assert log.calls == one_life * log.calls.count("all_gather")


@pytest.mark.pure
def test_unit_without_handle_and_memory_has_the_same_states() -> None:
    log = Log(has_promise=False, has_memory=False)
    unit = make(log)
    with trace.record() as recorder:
        unit.unshard()
        assert unit.state is State.GATHERING
        unit.wait()
        assert unit.state is State.UNSHARDED
        unit.reshard()
    assert unit.state is State.SHARDED
    assert log.calls == ["throttle", "all_gather", "use_sharded_params", "free"]
    assert recorder.events == [], "nothing was sent and nothing was released, so there is nothing to record"


@pytest.mark.pure
def test_failed_all_gather_leaves_unit_sharded() -> None:
    log = Log(fails=True)
    unit = make(log)
    with pytest.raises(ConnectionError):
        unit.unshard()
    assert unit.state is State.SHARDED
    log.fails = False
    unit.unshard()
    unit.wait()
    assert unit.state is State.UNSHARDED


@pytest.mark.pure
def test_trace_has_all_gather_as_span_and_reshard_as_instant() -> None:
    row: Any = Group(None, 2, 0, (4, 5))  # type: ignore[arg-type]
    unit = make(Log(), MeshGroups.sharded(row))
    with trace.record() as recorder:
        unit.unshard()
        unit.wait()
        unit.reshard()
    gathered, freed = recorder.events
    assert (gathered.kind, gathered.unit, gathered.ranks, gathered.num_bytes) == ("AG", "block", (4, 5), 32)
    assert (gathered.stream, gathered.dtype) == ("gather", torch.float32)
    assert gathered.end > gathered.start
    assert (freed.kind, freed.unit, freed.num_bytes, freed.ranks) == ("FREE", "block", 32, ())
    assert freed.end == freed.start


@pytest.mark.pure
def test_cpu_shard_records_copy_before_all_gather() -> None:
    row: Any = Group(None, 2, 0, (4, 5))  # type: ignore[arg-type]
    log = Log()
    log.offloads = True
    unit = make(log, MeshGroups.sharded(row))
    with trace.record() as recorder:
        unit.unshard()
    copied, gathered = recorder.events
    assert (copied.kind, copied.unit, copied.num_bytes) == ("H2D", "block", 16)
    assert gathered.kind == "AG"


@pytest.mark.pure
def test_a_span_of_an_earlier_recording_is_not_touched_by_a_later_one() -> None:
    row: Any = Group(None, 2, 0, (4, 5))  # type: ignore[arg-type]
    unit = make(Log(), MeshGroups.sharded(row))
    with trace.record() as earlier:
        unit.unshard()
        unit.wait()
        unit.reshard()
    end = earlier.events[0].end
    unit.unshard()
    with trace.record():
        unit.wait()
    assert earlier.events[0].end == end
