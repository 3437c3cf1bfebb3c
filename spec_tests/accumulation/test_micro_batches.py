"""Iterations of several forwards and backwards: pending backwards, unequal numbers of micro-batches, pipelines."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
)
from torch.distributed.pipelining.schedules import ScheduleDualPipeV, ScheduleZBVZeroBubble

from spec_tests.harness import device, ranks
from spec_tests.models import apis, running, values
from spec_tests.models.modules import seeded
from spec_tests.oracles import count_collectives
from spec_tests.subject import FSDPModule, fully_shard, trace

# --- backwards that follow later ---


@pytest.mark.spec("NEW-07")
@pytest.mark.parametrize("orders", [[(0, 1, 2), (0, 1, 2)], [(0, 1, 2, 2)]], ids=["second iteration", "run twice"])
@ranks(2)
def test_units_whose_backward_has_ended_are_not_prefetched_in_the_next_one(orders: list[tuple[int, ...]]) -> None:
    model = apis.FULLY_SHARD.shard()
    for number, order in enumerate(orders):
        model.set_is_last_backward(number < len(orders) - 1)
        running.iterate(model, number, order=order)
    loss = model(running.batch(2), order=(0, 1)).square().mean()
    model.set_is_last_backward(True)
    with trace.record() as recorder:
        loss.backward()
    assert recorder.order("AG") == ["AG blocks.1", "AG blocks.0"]


# --- ranks with unequal numbers of micro-batches ---


@pytest.mark.spec("PROG-86")
@pytest.mark.parametrize(("counts", "has_last_backward", "blocks"), [((3, 2), False, ()), ((1, 4), True, (0, 2))])
@ranks(2)
def test_parameters_stay_unsharded_and_are_reduced_once(
    blocks: tuple[int, ...], has_last_backward: bool, counts: tuple[int, int]
) -> None:
    plain, model = seeded(), seeded()
    for module in (*(model.blocks[index] for index in blocks), model):
        fully_shard(module, reshard_after_forward=False)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (model, plain)]
    for _ in range(2):
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.unshard()
        own_count = counts[dist.get_rank()]
        for number in range(own_count):
            is_last = number == own_count - 1
            model.set_requires_gradient_sync(is_last)
            model.set_reshard_after_backward(is_last)
            if has_last_backward:
                model.set_is_last_backward(is_last)
            model(running.batch(number)).square().mean().backward()
        for rank in range(2):
            for number in range(counts[rank]):
                (plain(running.batch(number, rank)).square().mean() / 2).backward()
        for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(found.grad.full_tensor(), expected.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


# --- pipeline schedules of PyTorch ---

# For each schedule: the stages of the two pipeline ranks.
ONE_EACH, IN_TURN, THERE_AND_BACK = [(0,), (1,)], [(0, 2), (1, 3)], [(0, 3), (1, 2)]
SCHEDULES: list[tuple[Any, list[tuple[int, ...]]]] = [
    (ScheduleGPipe, ONE_EACH),
    (Schedule1F1B, ONE_EACH),
    (ScheduleLoopedBFS, IN_TURN),
    (ScheduleInterleaved1F1B, IN_TURN),
    (ScheduleInterleavedZeroBubble, IN_TURN),
    (ScheduleZBVZeroBubble, THERE_AND_BACK),
    (ScheduleDualPipeV, THERE_AND_BACK),
]
# In torch 2.11, schedules in the form of a V send from a rank to itself in their first step, which gloo cannot do.
V_FORM = pytest.mark.needs("torch>=2.12")
# The options and the accumulation are new in 2.15.
NEW = pytest.mark.needs("torch>=2.15")
WAIT_LATER = {"defer_reduce_grad_wait": True}
# Each with the number of pipeline steps for an optimizer step.
CASES = [
    *(pytest.param(api, *schedule, {}, 1) for api in (apis.WRAPPED, apis.ORIGINALS) for schedule in SCHEDULES[:4]),
    *(pytest.param(apis.FULLY_SHARD, *schedule, {}, 1) for schedule in SCHEDULES[:5]),
    *(pytest.param(apis.FULLY_SHARD, *schedule, {}, 1, marks=V_FORM) for schedule in SCHEDULES[5:]),
    *(pytest.param(apis.FULLY_SHARD, *schedule, {}, 2, marks=NEW) for schedule in SCHEDULES),
    pytest.param(apis.FULLY_SHARD, ScheduleInterleaved1F1B, IN_TURN, WAIT_LATER, 1, marks=NEW),
    pytest.param(apis.FULLY_SHARD, ScheduleInterleavedZeroBubble, IN_TURN, WAIT_LATER, 1, marks=NEW),
    pytest.param(apis.FULLY_SHARD, ScheduleInterleaved1F1B, IN_TURN, {"max_active_stages": 1}, 1, marks=NEW),
]


def stage() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).to(device())


@pytest.mark.spec("PROG-84")
@pytest.mark.parametrize(("api", "schedule_class", "placement", "options", "accumulate"), CASES, ids=apis.name_of)
@ranks(4)
def test_a_pipeline_over_sharded_stages_trains_as_the_plain_model(
    api: apis.Api, schedule_class: Any, placement: list[tuple[int, ...]], options: dict[str, Any], accumulate: int
) -> None:
    mesh = init_device_mesh(device().type, (2, 2), mesh_dim_names=("pp", "dp"))
    place, copy_number = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    num_stages, mine = sum(map(len, placement)), placement[place]
    of_unit: dict[str, Any] = {"process_group": mesh["dp"].get_group()}
    if api == apis.FULLY_SHARD:
        of_unit = {"mesh": mesh["dp"], "reshard_after_forward": False}
    torch.manual_seed(0)
    plain = nn.Sequential(*(stage() for _ in range(num_stages)))
    model = copy.deepcopy(plain)
    for index in mine:
        # Two units in each stage.
        model[index][2] = api.unit(model[index][2], **of_unit)
        model[index] = api.unit(model[index], **of_unit)
    group = mesh["pp"].get_group()
    stages = [PipelineStage(model[index], index, num_stages, device(), group=group) for index in mine]
    loss = nn.functional.mse_loss
    schedule = schedule_class(stages[0] if len(stages) == 1 else stages, 4, loss_fn=loss, **options)
    optimizers = [torch.optim.SGD(of.parameters(), lr=0.1) for of in (plain, *(model[index] for index in mine))]

    for step in range(2):
        for part in range(accumulate):
            batches = torch.randn(2, 2, 8, 8, device=device())
            x, wanted = batches[copy_number]
            named: dict[str, Any] = {"target": wanted, "losses": []} if num_stages - 1 in mine else {}
            if accumulate > 1:
                named["finalize_gradients"] = part == accumulate - 1
            with count_collectives() as counts:
                schedule.step(*([x] if place == 0 else []), **named)
            if step == 1 and accumulate == 1 and api == apis.FULLY_SHARD and "max_active_stages" not in options:
                # The first step also infers shapes. The wrapper reduces the gradients of each micro-batch.
                assert counts.calls["all_gather"] == counts.calls["reduce_scatter"] == 2 * len(mine)
            for x, wanted in batches:
                (loss(plain(x), wanted) / 2).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    for index in mine:
        values.assert_same(values.full_values(model[index]), values.named(plain[index]), bitwise=False)
    dist.barrier()
