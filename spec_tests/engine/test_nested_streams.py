"""A hook of the program may enter a communication stream that the engine has already entered."""

from __future__ import annotations

import pytest

from minifsdp.engine.comm_streams import CommStreams, current_stream
from spec_tests.harness import device, ranks


@pytest.mark.accelerator
@pytest.mark.spec("STREAM-09")
@ranks(1)
def test_each_exit_restores_the_stream_from_before_its_entry() -> None:
    """Defect: the exits restore the streams in the order of the entries."""
    streams = CommStreams(device())
    outer, other = streams.reduce, streams.all_reduce
    before = current_stream(device())
    with outer:
        with other:
            with outer:
                assert current_stream(device()) == outer.stream
            assert current_stream(device()) == other.stream
        assert current_stream(device()) == outer.stream
        with outer:
            pass
        assert current_stream(device()) == outer.stream
    assert current_stream(device()) == before
