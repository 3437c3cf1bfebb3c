"""The time at which the data of a collective arrives, even if no rank has waited for it yet. The timelines show it."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from docs_build.recording import arrivals
from minifsdp import trace
from minifsdp.checks.attach import attach
from minifsdp.engine import collectives
from minifsdp.engine.mesh import Group
from spec_tests.harness import ranks

# Seconds. Rank 1 comes late, and both wait much later.
LATE, MUCH_LATER = 0.3, 1.0


@pytest.mark.parametrize("number", [2**18, 2**10])
@ranks(2)
def test_data_arrives_when_the_other_rank_sends_and_not_when_this_rank_waits(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINIFSDP_TRANSPORT", "messages")
    attach()  # The handles of the checks note the arrival.
    recorder, rank, group = trace.Recorder(), dist.get_rank(), Group.of(dist.group.WORLD)
    # Larger shards of four bytes each are messages. gloo's collectives send smaller ones, which is the default.
    monkeypatch.setattr(group.transport, "_least_bytes", 4 * 2**18)
    output = torch.empty(2 * number)
    with arrivals.noted(recorder):
        dist.barrier()
        time.sleep(LATE * rank)
        event = recorder.begin("AG", "unit", stream="gather")
        handle = collectives.all_gather(group, output, torch.full((number,), 1.0 + rank))
        time.sleep(MUCH_LATER)
        handle.wait()
        recorder.finish(event)
    assert torch.equal(output, torch.tensor([1.0, 2.0]).repeat_interleave(number)), "received bytes were overwritten"
    # On the late rank, the other rank's data arrives at once, or almost at once.
    assert (0.5 * LATE if rank == 0 else 0.0) < event.arrived - event.start < MUCH_LATER - 0.5 * LATE
