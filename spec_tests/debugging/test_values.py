"""The first value that is not finite is reported on every rank."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import minifsdp
from minifsdp.engine.root import RootState
from minifsdp.engine.unit import State
from minifsdp.fsdp2.fsdp_state import state_of
from spec_tests import subject
from spec_tests.debugging.faults import Spoiler, local_values, on_rank
from spec_tests.harness import device, ranks
from spec_tests.models.apis import FULLY_SHARD, ORIGINALS, Api, all_apis, both_apis
from spec_tests.models.modules import seeded
from spec_tests.models.running import batch, iterate, loss_of
from spec_tests.models.sharding import FULL_SHARD, HYBRID_SHARD, NO_SHARD, SHARD_GRAD_OP
from spec_tests.models.values import assert_same, full_values


def places(action: Callable[[], Any]) -> tuple[str, list[str]]:
    """Runs an action that must fail on this rank. Returns the phase that failed, and the places in the message."""
    with pytest.raises(RuntimeError, match="values that are not finite") as caught:
        action()
    text = str(caught.value)
    assert text.startswith(f"rank {dist.get_rank()}: ")
    (during,) = re.findall(r"appear in this (\w+), so all ranks stop", text)
    return during, re.findall(r"^rank \d+: (?!values that).*$", text, re.MULTILINE)


@pytest.mark.spec("DEBUG-05")
@all_apis
@ranks(2)
def test_non_finite_gradient_is_reported_on_every_rank_before_the_reduction(api: Api) -> None:
    model = seeded()
    Spoiler(model.blocks[1].linear, 1, float("nan"), in_backward=True)
    model = api.shard(model)
    with minifsdp.debug("values"):
        loss = loss_of(model(batch()))
        during, found = places(loss.backward)
    assert during == "backward"
    # One value of the 3 x 6 output gradient affects one row of the weight's gradient.
    place = "gradient of 'blocks.1.linear.weight' before it was reduced: 6 nan and 0 inf among 36 values"
    assert found == [f"rank 1: {place}"]


@pytest.mark.spec("DEBUG-05")
@all_apis
@ranks(2)
def test_an_activation_is_named_on_every_rank(api: Api) -> None:
    model = seeded()
    Spoiler(model.blocks[2].linear, 0, float("nan"), in_backward=False)
    model = api.shard(model)
    with minifsdp.debug("values"):
        during, found = places(lambda: model(batch()))
    assert during == "forward"
    assert found == ["rank 0: activation that unit 'blocks.2' returned: 1 nan and 0 inf among 18 values"]


@pytest.mark.spec("DEBUG-05")
@all_apis
@pytest.mark.parametrize(("strategy", "num_nan"), [(FULL_SHARD, 1), (FULL_SHARD, 0), (SHARD_GRAD_OP, 1)])
@ranks(2)
def test_every_unsharding_rank_names_bad_parameter(api: Api, strategy: Any, num_nan: int) -> None:
    model = api.shard(strategy=strategy)
    iterate(model)
    bad = torch.tensor([float("inf"), float("nan")][: 1 + num_nan])
    on_rank(1, lambda: local_values(model, api, 3).view(-1)[: len(bad)].copy_(bad))
    with minifsdp.debug("values"), torch.no_grad():
        during, found = places(lambda: model(batch(1)))
    assert during == "forward"
    place = f"parameter 'blocks.3.linear.weight' after its all-gather: {num_nan} nan and 1 inf among 36 values"
    assert found == [f"rank {rank}: {place}" for rank in (0, 1)]


@pytest.mark.spec("DEBUG-05")
@all_apis
@ranks(2)
def test_each_rank_reports_its_own_first_non_finite_activation(api: Api) -> None:
    model = seeded()
    Spoiler(model.blocks[3].linear, 0, float("nan"), in_backward=False)
    Spoiler(model.blocks[1].linear, 1, float("nan"), in_backward=False)
    model = api.shard(model)
    with minifsdp.debug("values"):
        _, found = places(lambda: model(batch()))
    assert [re.findall(r"rank (\d): activation that unit '([\w.]*)'", line) for line in found] == [
        [("0", "blocks.3")],
        [("1", "blocks.1")],
    ]


@pytest.mark.spec("DEBUG-05")
@both_apis
@pytest.mark.parametrize("rank", [0, 3])
@ranks(4)
def test_all_ranks_of_a_hybrid_mesh_raise(api: Api, rank: int) -> None:
    model = seeded()
    Spoiler(model.blocks[0].linear, rank, float("inf"), in_backward=True)
    model = api.shard(model, strategy=HYBRID_SHARD)
    with minifsdp.debug("values"):
        loss = loss_of(model(batch()))
        _, found = places(loss.backward)
    assert [line.startswith(f"rank {rank}: gradient of 'blocks.0.linear.weight'") for line in found] == [True]


@pytest.mark.spec("DEBUG-05")
@all_apis
@ranks(2)
def test_accumulation_raises_in_the_micro_batch_with_a_non_finite_gradient(api: Api) -> None:
    model = seeded()
    spoiler = Spoiler(model.blocks[2].linear, 1, float("nan"), in_backward=True)
    spoiler.is_armed = False
    model = api.shard(model)
    with minifsdp.debug("values"):
        for step in range(2):
            spoiler.is_armed = step == 1
            with api.no_sync(model):
                if step == 0:
                    iterate(model, step)
                    continue
                _, found = places(lambda: iterate(model))
                assert "rank 1: gradient of 'blocks.2.linear.weight'" in found[0]


@pytest.mark.spec("DEBUG-05")
@both_apis
@ranks(2)
def test_evaluation_without_communication_works_on_one_rank(api: Api) -> None:
    model = api.shard(strategy=NO_SHARD)
    with minifsdp.debug("values"):
        iterate(model)
        if dist.get_rank() == 0:
            with torch.no_grad():
                model(batch(1))
        iterate(model)


@pytest.mark.spec("DEBUG-05")
@both_apis
@ranks(2)
def test_overflowing_sum_of_finite_values_is_not_reported(api: Api) -> None:
    model = seeded()
    with torch.no_grad():
        model.enter.weight.fill_(3e38)
        model.enter.weight[3:].neg_()
    model = api.shard(model)
    with minifsdp.debug("values"), torch.no_grad():
        model(torch.zeros(3, 6, device=device()))


@pytest.mark.spec("DEBUG-06")
@all_apis
@pytest.mark.parametrize("in_backward", [False, True])
@ranks(2)
def test_training_continues_after_fault(api: Api, in_backward: bool) -> None:
    model, untouched = seeded(), api.shard()
    spoiler = Spoiler(model.blocks[1].linear, 1, float("nan"), in_backward=in_backward)
    model = api.shard(model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, untouched)]
    with minifsdp.debug("values"):
        places(lambda: iterate(model))
        assert {(unit.state, unit.uses.awaits_backward) for unit in tree_of(model).units} == {(State.SHARDED, False)}
        spoiler.is_armed = False
        optimizers[0].zero_grad()
        losses = [[iterate(model, s, optimizers[0]), iterate(untouched, s, optimizers[1])] for s in (1, 2)]
    assert all(mine == other for mine, other in losses)
    assert_same(full_values(model), full_values(untouched), bitwise=True)


def tree_of(model: Any) -> RootState:
    tree = model._root_state if isinstance(model, subject.FullyShardedDataParallel) else state_of(model).root_state
    assert tree is not None
    return tree


@pytest.mark.spec("DEBUG-06")
@pytest.mark.parametrize("api", [ORIGINALS, FULLY_SHARD], ids=str)
@ranks(2)
def test_interrupted_forward_leaves_no_report_for_later(api: Api) -> None:
    model = seeded()
    spoiler = Spoiler(model.blocks[0].linear, 0, float("nan"), in_backward=False)
    broken = model.blocks[2].register_forward_pre_hook(lambda *_: 1 / 0)
    model = api.shard(model)
    with minifsdp.debug("values"):
        with pytest.raises(ZeroDivisionError):
            model(batch())
        broken.remove()
        spoiler.is_armed = False
        iterate(model)
