"""The ranks compare their collectives at the end of each backward, before the optimizer step.

Different kinds, sizes, dtypes or parameters raise an error on every rank. Different units of equal sizes cause a
warning, or an error while ``minifsdp.debug("order")`` is on.
"""

from __future__ import annotations

import contextlib
import copy
import io
import re
import time
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo

from minifsdp import debug
from minifsdp.checks import rank_checks
from minifsdp.checks.collective_log import log
from minifsdp.engine.mesh import Group, default_group
from minifsdp.watchdog import process
from spec_tests.harness import device, ranks
from spec_tests.models import apis, running, torch_names
from spec_tests.subject import FullyShardedDataParallel as FSDP
from spec_tests.subject import ShardingStrategy, fully_shard

WIDTH = 6
# Blocks 0 and 1 have equal sizes. Only the index in their names differs.
USUAL, SWAPPED = (0, 1), (1, 0)
strategies = pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP])


def sharded(api: apis.Api, strategy: Any = ShardingStrategy.FULL_SHARD) -> Any:
    model = api.shard(strategy=strategy)
    # Collectives are counted from here on. Earlier tests on these ranks may have issued some that were never compared.
    log.sequence_of(Group.of(default_group())).begin_epoch()
    return model


def step(model: Any, order: tuple[int, ...] = USUAL) -> None:
    running.iterate(model, order=order)


def parts_in(model: Any, train: Callable[[], None], then: Callable[[], None]) -> str:
    """Returns the text of the error that this rank must raise, and checks that the parameters are unchanged.

    On an accelerator, the error occurs in the next iteration, ``then``, after the optimizer has taken the step.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [copy.deepcopy(parameter.detach()) for parameter in model.parameters()]
    begin = rf"rank {dist.get_rank()}: the ranks issued different collectives"
    with pytest.raises(RuntimeError, match=begin) as caught:
        train()
        optimizer.step()
        assert device().type != "cpu"
        then()
    text = str(caught.value)
    if device().type == "cpu":
        assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    assert ("no step was taken" if device().type == "cpu" else "one step was taken since") in text
    return text


def assert_names_both_blocks(text: str) -> None:
    # Collective 0 is the all-gather of the root.
    assert "The ranks diverge at collective 1 of group" in text
    for rank in range(2):
        assert re.search(rf"rank {rank}: all-gather of 'blocks.{rank}' in forward \(running.py:\d+\)", text)


@pytest.mark.spec("ORDER-01", "ORDER-03")
@strategies
@apis.both_apis
@ranks(2)
def test_equal_units_in_another_order_cause_one_warning_that_names_them(api: apis.Api, strategy: Any) -> None:
    model = sharded(api, strategy)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for order in (USUAL, USUAL, SWAPPED, USUAL, SWAPPED, USUAL):
            step(model, order if dist.get_rank() else USUAL)
    (text,) = [str(one.message) for one in caught if "different numbers in their roots" in str(one.message)]
    assert_names_both_blocks(text)


@pytest.mark.spec("ORDER-01", "ORDER-02", "ORDER-03", "ORDER-07", "NEW-19", "DEBUG-07")
@pytest.mark.parametrize("num_before", [0, 2])
@pytest.mark.parametrize("by_torch", [False, True], ids=["debug", "debug level of torch"])
@strategies
@apis.both_apis
@ranks(2)
def test_debug_mode_raises_for_equal_units_in_another_order(
    api: apis.Api, strategy: Any, by_torch: bool, num_before: int
) -> None:
    """Torch's FSDP1 compares the first iteration, torch's FSDP2 none."""
    with running.detailed_debugging() if by_torch else contextlib.nullcontext():
        model = sharded(api, strategy)
        for _ in range(num_before):
            step(model)
            model.zero_grad()
        with contextlib.nullcontext() if by_torch else debug("order"):
            text = parts_in(model, lambda: step(model, SWAPPED if dist.get_rank() else USUAL), lambda: step(model))
    assert_names_both_blocks(text)
    # All ranks have reset their state and can continue.
    model.zero_grad()
    step(model)
    if device().type == "cpu":
        untouched = sharded(api, strategy)
        step(untouched)
        torch.testing.assert_close(api.gradients(model), api.gradients(untouched))


@pytest.mark.spec("ORDER-12")
@pytest.mark.simulated
@pytest.mark.accelerator
@pytest.mark.parametrize("late", [0, 1, None])
@apis.both_apis
@ranks(2)
def test_step_of_the_error_does_not_depend_on_complete_events(api: apis.Api, late: int | None) -> None:
    model = sharded(api)
    for number in range(3):
        with debug("order"):
            step(model, SWAPPED if number == 2 and dist.get_rank() else USUAL)
        if dist.get_rank() != late:
            # All events of this rank are complete, and none of the other one.
            torch.get_device_module(device()).synchronize()
    with pytest.raises(RuntimeError, match="the ranks issued different collectives"):
        step(model)


SAVES: dict[str, Callable[[Any, Any], Any]] = {
    "model": lambda model, _: model.state_dict(),
    "optimizer": lambda _, optimizer: optimizer.state_dict(),
    "end": lambda *_: process.at_exit(),
}


@pytest.mark.spec("ORDER-12")
@pytest.mark.accelerator
@pytest.mark.parametrize("what", SAVES)
@apis.both_apis
@ranks(2)
def test_divergence_of_last_iteration_is_reported_before_save(api: apis.Api, what: str) -> None:
    model = sharded(api)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model)
    optimizer.step()
    with debug("order"):
        step(model, SWAPPED if dist.get_rank() else USUAL)
    optimizer.step()
    said, status = io.StringIO(), []
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(said):
        answers = {"ask": lambda _: "", "leave": lambda *_, **__: None}
        patch.setattr(log, "watchdog", SimpleNamespace(**answers, is_of_this_process=True, last=None))
        patch.setattr(process, "_ExitStatus", lambda: status.append(1))
        try:
            SAVES[what](model, optimizer)
        except RuntimeError as error:
            assert what != "end"
            said.write(str(error))
    assert status == ([1] if what == "end" else [])
    assert "the ranks issued different collectives" in said.getvalue()
    assert "one step was taken since" in said.getvalue()
    # The error is raised only once.
    SAVES["model"](model, optimizer)


@pytest.mark.spec("ORDER-12")
@pytest.mark.parametrize("num_steps", [0, 1, 2])
@ranks(2)
def test_message_counts_the_optimizer_steps_since_the_difference(num_steps: int) -> None:
    model = sharded(apis.WRAPPED)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model)
    with debug("order"), pytest.raises(RuntimeError) as caught:
        step(model, SWAPPED if dist.get_rank() else USUAL)
        for _ in range(num_steps):
            optimizer.step()
        step(model)
    words = ("no step was taken", "one step was taken since", "2 steps were taken since")
    assert words[0 if device().type == "cpu" else num_steps] in str(caught.value)


@pytest.mark.spec("ORDER-04")
@apis.both_apis
@ranks(4)
def test_order_error_with_replicas_is_raised_on_all_ranks(api: apis.Api) -> None:
    model = sharded(api, ShardingStrategy.HYBRID_SHARD)
    step(model)
    # Rank 0 shares one group with rank 1 and one with rank 2, and both issue the same collectives as rank 0.
    with debug("order"):
        text = parts_in(model, lambda: step(model, SWAPPED if dist.get_rank() == 3 else USUAL), lambda: step(model))
    if dist.get_rank() in (1, 2, 3):
        assert "rank 3: all-gather of 'blocks.1'" in text or "rank 3: all-reduce of" in text


class Experts(nn.Module):
    """Two equal experts. Each rank uses the expert ``which``."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, x: Tensor, which: int) -> Tensor:
        chosen: Tensor = self.experts[which](x)
        return chosen


@pytest.mark.spec("ORDER-05", "ORDER-03")
@pytest.mark.not_simulated("a frame of the simulation calls the backward")
@ranks(2)
def test_gradients_of_experts_that_only_some_ranks_have_used_are_noticed() -> None:
    model: Any = fully_shard(Experts().to(device()), mesh=init_device_mesh(device().type, (2,)))
    x = torch.ones(2, WIDTH, device=device())
    model(x, 0).sum().backward()
    model.zero_grad()
    text = parts_in(model, lambda: model(x, dist.get_rank()).sum().backward(), lambda: model(x, 0).sum().backward())
    for rank in range(2):
        assert f"rank {rank}: reduce-scatter of the root unit, its parameters [{rank}] in backward" in text


@pytest.mark.spec("ORDER-04", "ORDER-05", "NEW-23")
@pytest.mark.parametrize("place", ["replicas", "a mesh of their own"])
@ranks(4)
def test_experts_with_replicas_that_only_some_ranks_have_used_are_noticed_by_all(place: str) -> None:
    model: Any = Experts().to(device())
    grid = init_device_mesh(device().type, (2, 2), mesh_dim_names=("replicate", "shard"))
    if place == "replicas":
        fully_shard(model, mesh=grid)
        which = int(dist.get_rank() == 3)
    else:
        own = dict.fromkeys(model.parameters(), torch_names.ShardPlacementResult(None, FSDPMeshInfo(grid["shard"], 0)))
        model.scale = nn.Parameter(torch.ones(4, device=device()))
        fully_shard(model, mesh=init_device_mesh(device().type, (4,)), shard_placement_fn=own.get)
        which = dist.get_rank() % 2
    x = torch.ones(2, WIDTH, device=device())
    model(x, 0).sum().backward()
    model.zero_grad()
    parts_in(model, lambda: model(x, which).sum().backward(), lambda: model(x, 0).sum().backward())


@pytest.mark.spec("ORDER-08")
@ranks(2)
def test_one_flat_unit_trains_experts_that_run_on_different_ranks() -> None:
    model = FSDP(Experts(), device_id=device(), use_orig_params=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model(torch.ones(2, WIDTH, device=device()), dist.get_rank()).sum().backward()
    optimizer.step()
    # Each expert ran on one of the two ranks, with two rows of ones.
    for name, value in model.state_dict().items():
        assert torch.allclose(value, before[name] - 1.0)


@pytest.mark.spec("ORDER-08")
@strategies
@apis.both_apis
@ranks(2)
def test_equal_collectives_on_all_ranks_are_accepted(api: apis.Api, strategy: Any) -> None:
    model = sharded(api, strategy)
    step(model, (0,))  # All ranks skip a unit.
    step(model)
    with pytest.raises(IndexError, match="out of range"):
        step(model, (0, 9))  # All ranks raise an exception.
    step(model, SWAPPED)


@pytest.mark.spec("ORDER-08")
@ranks(2)
def test_one_rank_may_run_a_frozen_model_that_needs_no_communication() -> None:
    model = sharded(apis.WRAPPED, ShardingStrategy.NO_SHARD)
    step(model)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    if dist.get_rank() == 0:
        x = torch.ones(2, WIDTH, device=device(), requires_grad=True)
        model(x).sum().backward()
        with torch.no_grad():
            model(x)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    step(model)


@pytest.mark.spec("ORDER-09")
@apis.both_apis
@ranks(2)
def test_order_check_issues_one_small_collective_that_modes_do_not_count(api: apis.Api) -> None:
    model = sharded(api)
    step(model)
    ask, asked = rank_checks.ask, []
    with pytest.MonkeyPatch.context() as patch, running.Wire() as wire:
        patch.setattr(rank_checks, "ask", lambda *args: (asked.append(args[2].nbytes), ask(*args))[1])
        step(model)
    assert asked == [24]
    # The root is gathered once, and each of two blocks in forward and in backward.
    assert wire.calls().count("AG") == 1 + 2 * 2


@pytest.mark.spec("ORDER-12")
@pytest.mark.gpu
@pytest.mark.own_gpus
@apis.both_apis
@ranks(2)
def test_ranks_raise_in_the_same_step_although_one_device_is_three_seconds_late(api: apis.Api) -> None:
    model, begin = sharded(api), time.monotonic()
    for _ in range(2):
        step(model)
    if dist.get_rank() == 1:
        torch.cuda._sleep(6_000_000_000)
    with debug("order"):
        step(model, SWAPPED if dist.get_rank() else USUAL)
    with pytest.raises(RuntimeError, match="the ranks issued different collectives"):
        step(model)
    assert time.monotonic() - begin < 30
