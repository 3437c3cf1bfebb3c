"""Iterations of several forwards and backwards: pending backwards, unequal numbers of micro-batches, pipelines."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
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
from spec_tests.models.modules import WIDTH
from spec_tests.models.running import batch, loss_of
from spec_tests.oracles import count_collectives
from spec_tests.subject import FSDPModule, fully_shard, trace

# --- backwards that follow later ---


class Parts(nn.Module):
    """Calls its blocks in any order. It has no parameters of its own, so each parameter belongs to a block."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, order: Iterable[int]) -> Tensor:
        for index in order:
            x = torch.tanh(self.blocks[index](x))
        return x


def sharded_parts() -> Any:
    model = Parts().to(device())
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


@pytest.mark.spec("NEW-07")
@pytest.mark.parametrize("orders", [[(0, 1, 2), (0, 1, 2)], [(0, 1, 2, 2)]], ids=["second iteration", "run twice"])
@ranks(2)
def test_units_whose_backward_has_ended_are_not_prefetched_in_the_next_one(orders: list[tuple[int, ...]]) -> None:
    model = sharded_parts()
    for number, order in enumerate(orders):
        model.set_is_last_backward(number < len(orders) - 1)
        loss_of(model(batch(number), order)).backward()
    loss = loss_of(model(batch(2), (0, 1)))
    model.set_is_last_backward(True)
    with trace.record() as recorder:
        loss.backward()
    assert recorder.order("AG") == ["AG blocks.1", "AG blocks.0"]


# --- ranks with unequal numbers of micro-batches ---


def micro_batch(rank: int, number: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * rank + number)).to(device())


@pytest.mark.spec("PROG-86")
@pytest.mark.parametrize("has_last_backward", [False, True])
@pytest.mark.parametrize("has_units", [False, True])
@ranks(2)
def test_parameters_stay_unsharded_and_are_reduced_once(has_units: bool, has_last_backward: bool) -> None:
    for counts in ([3, 2], [1, 4], [2, 2]):
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).to(device())
        model = copy.deepcopy(plain)
        for module in (model[0], model[2]) if has_units else ():
            fully_shard(module, reshard_after_forward=False)
        fully_shard(model, reshard_after_forward=False)
        optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (model, plain)]
        for _ in range(2):
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.unshard()
            for number in range(counts[dist.get_rank()]):
                is_last = number == counts[dist.get_rank()] - 1
                model.set_requires_gradient_sync(is_last)
                model.set_reshard_after_backward(is_last)
                if has_last_backward:
                    model.set_is_last_backward(is_last)
                model(micro_batch(dist.get_rank(), number)).square().mean().backward()
            for rank in range(2):
                for number in range(counts[rank]):
                    (plain(micro_batch(rank, number)).square().mean() / 2).backward()
            for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(found.grad.full_tensor(), expected.grad)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


# --- pipeline schedules of PyTorch ---

# For each schedule: the stages of the two pipeline ranks, and options.
ONE_EACH, IN_TURN, THERE_AND_BACK = [(0,), (1,)], [(0, 2), (1, 3)], [(0, 3), (1, 2)]
SCHEDULES: dict[str, tuple[Any, list[tuple[int, ...]], dict[str, Any]]] = {
    "GPipe": (ScheduleGPipe, ONE_EACH, {}),
    "1F1B": (Schedule1F1B, ONE_EACH, {}),
    "looped": (ScheduleLoopedBFS, IN_TURN, {}),
    "interleaved": (ScheduleInterleaved1F1B, IN_TURN, {}),
    "zero bubble": (ScheduleInterleavedZeroBubble, IN_TURN, {}),
    "zero bubble, V": (ScheduleZBVZeroBubble, THERE_AND_BACK, {}),
    "dual pipe, V": (ScheduleDualPipeV, THERE_AND_BACK, {}),
}
# Options that schedules have since torch 2.15.
SINCE_2_15: dict[str, tuple[Any, list[tuple[int, ...]], dict[str, Any]]] = {
    "a late wait": (ScheduleInterleaved1F1B, IN_TURN, {"defer_reduce_grad_wait": True}),
    "zero bubble and a late wait": (ScheduleInterleavedZeroBubble, IN_TURN, {"defer_reduce_grad_wait": True}),
    "one active stage": (ScheduleInterleaved1F1B, IN_TURN, {"max_active_stages": 1}),
}


def stage_module() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Tanh(), nn.Linear(8, 8)), nn.Linear(8, 8))


def loss(found: Tensor, wanted: Tensor) -> Tensor:
    return (found - wanted).square().mean()


# In torch 2.11, these schedules send from a rank to itself in their first step, which gloo cannot do.
SINCE_2_12 = ("zero bubble, V", "dual pipe, V")


def with_versions(name: str) -> Any:
    return pytest.param(name, marks=pytest.mark.needs("torch>=2.12") if name in SINCE_2_12 else ())


@pytest.mark.spec("PROG-84")
@pytest.mark.parametrize("name", [with_versions(name) for name in SCHEDULES])
@ranks(4)
def test_a_pipeline_over_sharded_stages_trains_as_the_plain_model(name: str) -> None:
    check_pipeline(*SCHEDULES[name])


@pytest.mark.needs("torch>=2.15")
@pytest.mark.spec("PROG-84")
@pytest.mark.parametrize("name", SINCE_2_15)
@ranks(4)
def test_a_pipeline_that_reduces_or_unshards_later_trains_as_the_plain_model(name: str) -> None:
    check_pipeline(*SINCE_2_15[name])


@pytest.mark.needs("torch>=2.15")
@pytest.mark.spec("PROG-84")
@pytest.mark.parametrize("name", SCHEDULES)
@ranks(4)
def test_gradients_of_two_pipeline_steps_are_reduced_in_the_second(name: str) -> None:
    check_pipeline(*SCHEDULES[name], accumulate=2)


def check_pipeline(
    schedule_class: Any, placement: list[tuple[int, ...]], options: dict[str, Any], accumulate: int = 1
) -> None:
    mesh = init_device_mesh(device().type, (2, 2), mesh_dim_names=("pp", "dp"))
    place, copy_number = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    num_stages = sum(map(len, placement))
    torch.manual_seed(0)
    plain = nn.Sequential(*(stage_module() for _ in range(num_stages))).to(device())
    model, mine = copy.deepcopy(plain), placement[place]
    for index in mine:
        # Two units in each stage.
        fully_shard(model[index][1], mesh=mesh["dp"], reshard_after_forward=False)
        fully_shard(model[index], mesh=mesh["dp"], reshard_after_forward=False)
    group = mesh["pp"].get_group()
    stages = [PipelineStage(model[index], index, num_stages, device(), group=group) for index in mine]
    schedule = schedule_class(stages[0] if placement is ONE_EACH else stages, 4, loss_fn=loss, **options)
    parameters = [parameter for index in mine for parameter in model[index].parameters()]
    optimizers = [torch.optim.SGD(of, lr=0.1) for of in (plain.parameters(), parameters)]
    for step in range(2):
        for part in range(accumulate):
            batches = []
            for number in range(2):
                generator = torch.Generator().manual_seed(100 * step + 10 * part + number)
                batches.append([torch.randn(8, 8, generator=generator).to(device()) for _ in range(2)])
            x, wanted = batches[copy_number]
            inputs = (x,) if place == 0 else ()
            named: dict[str, Any] = {"target": wanted, "losses": []} if num_stages - 1 in mine else {}
            if accumulate > 1:
                named["finalize_gradients"] = part == accumulate - 1
            with count_collectives() as counts:
                schedule.step(*inputs, **named)
            if step == 1 and accumulate == 1 and "max_active_stages" not in options:
                # The first step also infers shapes.
                assert counts.calls["all_gather"] == counts.calls["reduce_scatter"] == 2 * len(mine)
            for x, wanted in batches:
                (loss(plain(x), wanted) / 2).backward()
        for index in mine:
            for (path, found), of in zip(model[index].named_parameters(), plain[index].parameters(), strict=True):
                torch.testing.assert_close(found.grad.full_tensor(), of.grad, msg=lambda m, p=path: f"{p}: {m}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    dist.barrier()
