"""The recorder: the events that it keeps, their order, and that a disabled recorder costs nothing."""

from __future__ import annotations

import pickle
import time

import pytest
import torch
import torch.distributed as dist

from minifsdp.engine.events import events
from minifsdp.trace import Recorder
from spec_tests.harness import ranks
from spec_tests.models.modules import chain
from spec_tests.models.small import draw, shard_each, train_once
from spec_tests.subject import trace


@pytest.mark.pure
def test_event_begins_as_an_instant_and_becomes_a_span_when_it_ends() -> None:
    recorder = Recorder()
    before = time.perf_counter()
    event = recorder.begin("AG", "0", num_bytes=32, ranks=(0, 1), dtype=torch.bfloat16, stream="gather")
    assert before <= event.start == event.end <= time.perf_counter()
    recorder.finish(event)
    # A span may have begun before the recording.
    recorder.finish(None)
    assert event.start < event.end <= time.perf_counter()
    assert recorder.events == [event]
    assert (event.kind, event.unit, event.num_bytes, event.ranks) == ("AG", "0", 32, (0, 1))
    assert (event.dtype, event.stream) == (torch.bfloat16, "gather")


@pytest.mark.pure
def test_events_are_ordered_by_their_beginning() -> None:
    recorder = Recorder()
    outer, inner = recorder.begin("F", ""), recorder.begin("F", "0.layer")
    recorder.begin("FREE", "0.layer")
    recorder.finish(inner)
    recorder.finish(outer)
    assert recorder.order() == ["F", "F 0.layer", "FREE 0.layer"]
    assert recorder.order("FREE") == ["FREE 0.layer"]
    assert recorder.order("AG") == []
    assert [recorder.count(kind) for kind in ("F", "FREE", "AG")] == [2, 1, 0]


@pytest.mark.pure
def test_inner_recording_gets_the_events_until_an_exception_ends_it() -> None:
    assert events.recorder is None
    with trace.record() as outer:
        outer.begin("F", "before")
        with pytest.raises(KeyError), trace.record() as inner:
            inner.begin("F", "inside")
            assert events.recorder is inner
            raise KeyError
        assert events.recorder is outer
        outer.begin("F", "after")
    assert events.recorder is None
    assert outer.order() == ["F before", "F after"]
    assert inner.order() == ["F inside"]


@ranks(2)
def test_documented_example_is_correct() -> None:
    model = shard_each(torch.nn.Sequential(torch.nn.Linear(3, 2)))
    with trace.record() as recorder, torch.no_grad():
        model(draw(0))
    assert recorder.order() == ["AG 0", "F 0", "FREE 0"]
    gathered, computed, freed = recorder.events
    assert gathered.num_bytes == freed.num_bytes == 32
    assert (gathered.ranks, freed.ranks) == ((0, 1), ())
    assert (gathered.stream, computed.stream) == ("gather", "compute")


@ranks(2)
def test_one_rank_may_record_alone_and_every_span_of_a_step_has_ended_when_the_step_has() -> None:
    model = shard_each(chain())
    if dist.get_rank() == 1:
        train_once(model)
        return
    with trace.record() as recorder:
        train_once(model)
    assert (recorder.count("AG"), recorder.count("RS")) == (6, 3)
    for event in recorder.events:
        assert (event.end == event.start) == (event.kind in {"FREE", "H2D", "D2H", "BCAST"}), event
    assert [event.start for event in recorder.events] == sorted(event.start for event in recorder.events)
    assert pickle.loads(pickle.dumps(recorder.events)) == recorder.events


@ranks(2)
def test_recording_may_begin_or_end_in_the_middle_of_a_step() -> None:
    model = shard_each(chain())
    with trace.record() as forward:
        loss = model(draw(dist.get_rank())).sum()
    with trace.record() as backward:
        loss.backward()
    # The CPU can run ahead of an accelerator, and then waits for it.
    assert {event.kind for event in forward.events} - {"WAIT"} == {"AG", "F", "FREE"}
    assert {event.kind for event in backward.events} - {"WAIT"} == {"AG", "B", "FREE", "RS"}
