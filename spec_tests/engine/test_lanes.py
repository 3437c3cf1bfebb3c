"""On the CPU, a communication stream is only a name, and a handle is the work itself."""

from __future__ import annotations

import pytest
import torch

from minifsdp.engine.lanes import Lane, Lanes

CPU = torch.device("cpu")


class Work:
    def __init__(self) -> None:
        self.num_waits = 0

    def wait(self) -> None:
        self.num_waits += 1


@pytest.mark.pure
def test_there_are_three_lanes_with_names_of_their_own() -> None:
    lanes = Lanes(CPU)
    assert [lane.name for lane in (lanes.gather, lanes.reduce, lanes.all_reduce)] == ["gather", "reduce", "all_reduce"]
    assert lanes.device == CPU


@pytest.mark.pure
def test_on_the_cpu_the_promise_is_the_work_and_nobody_has_waited_for_it_yet() -> None:
    lane, work = Lane("gather", CPU), Work()
    with lane as entered:
        promise = lane.promise(work)
    lane.follow()
    assert entered is lane
    assert promise is work
    assert lane.stream is None
    assert work.num_waits == 0


@pytest.mark.pure
def test_an_exception_passes_through_a_lane() -> None:
    with pytest.raises(KeyError), Lane("gather", CPU):
        raise KeyError
