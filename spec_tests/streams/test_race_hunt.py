"""Tests of the race hunt on the simulated accelerator: where its delays are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from spec_tests.harness import device, rank_among_fake_ranks
from spec_tools.gpu import races


@pytest.mark.simulated
@pytest.mark.accelerator
@pytest.mark.spec("KIT-06")
@pytest.mark.parametrize("call", ["record_event", "wait_event"])
@rank_among_fake_ranks(2)
def test_streams_are_late_before_events_and_waits(call: str) -> None:
    module = torch.get_device_module(device())
    side, event = module.Stream(), module.current_stream().record_event()
    late: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(races, "keep_busy", lambda milliseconds: late.append(module.current_stream()))
        with races.Delays(2, 0) as delays:
            for _ in range(50):
                side.record_event() if call == "record_event" else side.wait_event(event)
        assert delays.num_delays == len(late) > 0
        assert set(late) == {side}
        side.record_event()
    assert delays.num_delays == len(late)


@pytest.mark.simulated
@pytest.mark.accelerator
@pytest.mark.spec("KIT-06")
@pytest.mark.parametrize("configuration", ["wrapper, side stream", "function, side stream"])
@rank_among_fake_ranks(2)
def test_configuration_trains_without_a_race(configuration: str) -> None:
    delays = races.Delays(2, 0)
    assert len(races.train(configuration, delays)) == races.NUM_STEPS
    assert delays.num_delays > 0
