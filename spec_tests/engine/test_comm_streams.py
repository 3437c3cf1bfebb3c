"""On the CPU, a communication stream is only a name, and a handle is the work itself."""

from __future__ import annotations

import pytest
import torch

from minifsdp.engine.comm_streams import CommStream, CommStreams

CPU = torch.device("cpu")


class Work:
    def __init__(self) -> None:
        self.num_waits = 0

    def wait(self) -> None:
        self.num_waits += 1


@pytest.mark.pure
def test_there_are_three_named_comm_streams() -> None:
    comm_streams = CommStreams(CPU)
    assert [
        comm_stream.name for comm_stream in (comm_streams.all_gather, comm_streams.reduce, comm_streams.all_reduce)
    ] == ["gather", "reduce", "all_reduce"]
    assert comm_streams.device == CPU


@pytest.mark.pure
def test_cpu_handle_is_the_work_before_any_wait() -> None:
    comm_stream, work = CommStream("gather", CPU), Work()
    with comm_stream as entered:
        handle = comm_stream.handle(work)
    comm_stream.wait_compute()
    assert entered is comm_stream
    assert handle is work
    assert comm_stream.stream is None
    assert work.num_waits == 0


@pytest.mark.pure
def test_exception_passes_through_comm_stream() -> None:
    with pytest.raises(KeyError), CommStream("gather", CPU):
        raise KeyError
