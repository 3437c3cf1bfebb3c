"""The memory of a recorded step against torch's memory tracker, for torch's own ``fully_shard``."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from minifsdp_tools.simulate.models import Transformer
from minifsdp_tools.simulate.recording import record
from minifsdp_tools.simulate.setup import Setup
from minifsdp_tools.simulate.shapes import Shape

SHAPE = Shape(layers=4, width=512, heads=8, vocabulary=4000)


def tracked_peak(setup: Setup) -> int:
    """The peak of the second step, by torch's tracker."""
    assert isinstance(setup.model, Shape)
    dist.init_process_group("fake", rank=0, world_size=setup.num_ranks, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (setup.num_ranks,))
        with FakeTensorMode():
            model = Transformer(setup.model, setup.checkpointing, setup.unit)
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
            for block in model.decoder.groups:
                fully_shard(block, mesh=mesh, mp_policy=policy)
            fully_shard(model, mesh=mesh, mp_policy=policy)
            optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
            tokens = torch.zeros(setup.micro_batch, setup.sequence or 0, dtype=torch.long)
            tracker = FSDPMemTracker(model, optimizer)
            tracker.track_inputs((tokens,))
            with tracker:
                for _ in range(2):
                    # The tracker keeps the peak of both steps; the second one has the states of the optimizer.
                    tracker.reset_mod_stats()
                    model(tokens).backward()
                    optimizer.step()
                    optimizer.zero_grad()
            peaks = tracker.get_tracker_snapshot("peak")
    finally:
        dist.destroy_process_group()
    (of_device,) = peaks.values()
    return int(of_device["Total"])


@pytest.mark.spec("CHECKED-04")
@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("num_ranks", [2, 64])
def test_the_recorded_peak_is_that_of_torchs_tracker(num_ranks: int, checkpointing: str) -> None:
    setup = Setup(SHAPE, num_ranks, micro_batch=2, sequence=256, checkpointing=checkpointing)
    recorded, tracked = record(setup).peak_bytes, tracked_peak(setup)
    assert recorded == pytest.approx(tracked, rel=0.01)
