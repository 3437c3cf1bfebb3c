"""Pipeline schedules of PyTorch whose stages are sharded with ``fully_shard``."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from spec_tests.harness import device, ranks
from spec_tests.oracles import count_collectives
from spec_tests.subject import fully_shard

SCHEDULES: dict[str, Any] = {
    "zero bubble": ScheduleInterleavedZeroBubble,
    "interleaved": ScheduleInterleaved1F1B,
    "1F1B": Schedule1F1B,
}


def stage_module() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Tanh(), nn.Linear(8, 8)), nn.Linear(8, 8))


def loss(found: Tensor, wanted: Tensor) -> Tensor:
    return (found - wanted).square().mean()


@pytest.mark.spec("PROG-84")
@pytest.mark.parametrize("name", SCHEDULES)
@ranks(4)
def test_a_pipeline_over_sharded_stages_trains_as_the_plain_model(name: str) -> None:
    mesh = init_device_mesh(device().type, (2, 2), mesh_dim_names=("pp", "dp"))
    place, copy_number = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    num_stages = 2 if name == "1F1B" else 4
    torch.manual_seed(0)
    plain = nn.Sequential(*(stage_module() for _ in range(num_stages))).to(device())
    model, mine = copy.deepcopy(plain), range(place, num_stages, 2)
    for index in mine:
        # Two units in each stage.
        fully_shard(model[index][1], mesh=mesh["dp"], reshard_after_forward=False)
        fully_shard(model[index], mesh=mesh["dp"], reshard_after_forward=False)
    group = mesh["pp"].get_group()
    stages = [PipelineStage(model[index], index, num_stages, device(), group=group) for index in mine]
    schedule = SCHEDULES[name](stages[0] if name == "1F1B" else stages, 4, loss_fn=loss)
    parameters = [parameter for index in mine for parameter in model[index].parameters()]
    optimizers = [torch.optim.SGD(of, lr=0.1) for of in (plain.parameters(), parameters)]
    for step in range(2):
        batches = []
        for number in range(2):
            generator = torch.Generator().manual_seed(10 * step + number)
            batches.append([torch.randn(8, 8, generator=generator).to(device()) for _ in range(2)])
        x, wanted = batches[copy_number]
        is_last = num_stages - 1 in mine
        inputs = (x,) if place == 0 else ()
        with count_collectives() as counts:
            schedule.step(*inputs, **({"target": wanted, "losses": []} if is_last else {}))
        # The first step also infers shapes.
        assert step == 0 or counts.calls["all_gather"] == counts.calls["reduce_scatter"] == 2 * len(mine)
        for x, wanted in batches:
            (loss(plain(x), wanted) / 2).backward()
        for index in mine:
            for (path, found), of in zip(model[index].named_parameters(), plain[index].parameters(), strict=True):
                torch.testing.assert_close(found.grad.full_tensor(), of.grad, msg=lambda m, p=path: f"{p}: {m}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    dist.barrier()
