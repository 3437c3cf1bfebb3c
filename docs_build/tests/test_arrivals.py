"""The time at which the data of a collective arrives, even if no rank has waited for it yet. The timelines show it."""

from __future__ import annotations

import time
from typing import Any

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
MESSAGES, COLLECTIVES = 2**18, 2**10  # numbers of four bytes: a shard that is sent by itself, and a small one


def issued(kind: str, number: int) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """The handle, the output tensor, and the values that the output must have."""
    group, rank = Group.of(dist.group.WORLD), dist.get_rank()
    if kind == "AG":
        output, expected = torch.empty(2 * number), torch.tensor([1.0, 2.0]).repeat_interleave(number)
        return collectives.all_gather(group, output, torch.full((number,), 1.0 + rank)), output, expected
    output, expected = torch.empty(number), torch.full((number,), 3.0)
    return collectives.reduce_scatter(group, output, torch.full((2 * number,), 1.0 + rank)), output, expected


@pytest.mark.parametrize("number", [MESSAGES, COLLECTIVES])
@pytest.mark.parametrize("kind", ["AG", "RS"])
@ranks(2)
def test_data_arrives_when_the_other_rank_sends_and_not_when_this_rank_waits(
    kind: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINIFSDP_TRANSPORT", "messages")
    attach()  # The handles of the checks note the arrival.
    recorder, rank = trace.Recorder(), dist.get_rank()
    # Send small shards by gloo's collectives, which is the default.
    monkeypatch.setattr(Group.of(dist.group.WORLD).transport, "_least_bytes", 4 * MESSAGES)
    with arrivals.noted(recorder):
        dist.barrier()
        time.sleep(LATE * rank)
        event = recorder.begin(kind, "unit", stream="gather")
        handle, found, expected = issued(kind, number)
        time.sleep(MUCH_LATER)
        handle.wait()
        recorder.finish(event)
    assert torch.equal(found, expected), "the received bytes were overwritten"
    waited = event.arrived - event.start
    # On the late rank, the other rank's data arrives at once, or almost at once.
    assert (0.5 * LATE if rank == 0 else 0.0) < waited < MUCH_LATER - 0.5 * LATE
