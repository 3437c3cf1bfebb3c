"""Roots that share communication streams, and an event that the first all-gather waits for."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from minifsdp.engine.comm_streams import CommStream
from minifsdp.fsdp2.fsdp_state import state_of
from spec_tests.harness import device, ranks
from spec_tests.models import apis, modules, running
from spec_tests.models.values import assert_same
from spec_tests.subject import fully_shard, share_comm_ctx


def two_stages() -> list[Any]:
    """Two models whose steps have different units."""
    return [apis.FULLY_SHARD.shard(modules.seeded()), fully_shard(modules.seeded(modules.Tied))]


MOMENTS = ["never", "at first", "after a step", "between forward and backward", "after another call"]


@pytest.mark.spec("NEW-17")
@pytest.mark.parametrize("moment", MOMENTS)
@ranks(2)
def test_roots_compute_the_same_and_share_their_streams_from_any_moment_on(moment: str) -> None:
    stages, usual = two_stages(), two_stages()
    if moment == "at first":
        share_comm_ctx(stages)
    if moment == "after another call":
        share_comm_ctx(stages[1:])
    if moment in ("after a step", "after another call"):
        for stage in (*stages, *usual):
            running.iterate(stage)
            stage.zero_grad()
    losses = [stage(running.batch()).square().mean() for stage in (*stages, *usual)]
    if moment not in ("never", "at first"):
        share_comm_ctx(stages)
    for loss in losses:
        loss.backward()
    for mine, other in zip(stages, usual, strict=True):
        assert_same(apis.FULLY_SHARD.gradients(mine), apis.FULLY_SHARD.gradients(other))
    streams = {id(unit.root.comm_streams) for stage in stages for unit in state_of(stage).root_state.units}
    assert len(streams) == (2 if moment == "never" else 1)


@pytest.mark.spec("NEW-17")
@ranks(2)
def test_only_sharded_modules_share_streams() -> None:
    share_comm_ctx([])
    with pytest.raises(ValueError, match="FSDPModule"):
        share_comm_ctx([apis.FULLY_SHARD.shard(), nn.Linear(2, 2)])


class Complete:
    """Replaces an event on a device without streams, where all previous work is already complete."""

    def record(self, stream: Any = None) -> None:
        """Does nothing."""

    def wait(self, stream: Any = None) -> None:
        """Returns immediately."""


@pytest.mark.spec("NEW-12")
@ranks(2)
def test_only_the_next_iteration_waits_for_the_event_after_the_optimizer_step() -> None:
    """Checks the event that is passed to the all-gather stream. The wait only matters on a device with streams."""
    model, usual = apis.FULLY_SHARD.shard(), apis.FULLY_SHARD.shard()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, usual)]
    event_class = Complete if device().type == "cpu" else torch.get_device_module(device()).Event
    given, followed = [event_class(), event_class(), None, None], []
    for step, event in enumerate(given):
        with mock.patch.object(
            CommStream, "wait_compute", autospec=True, side_effect=CommStream.wait_compute
        ) as wait_compute:
            loss = model(running.batch(step)).square().mean()
        followed.append([event for call in wait_compute.call_args_list for event in call.args[1:] if event is not None])
        loss.backward()
        running.iterate(usual, step)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if event is not None:
            event.record()
            model.set_post_optim_event(event)
    assert followed == [[], [given[0]], [given[1]], []]
    assert_same(apis.FULLY_SHARD.values(model), apis.FULLY_SHARD.values(usual))
