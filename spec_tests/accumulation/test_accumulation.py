"""Gradient accumulation: micro-batches without communication, and one reduction of their sum.

Tests of behaviour that only one API has are in ``accumulation/test_no_sync.py`` and ``accumulation/test_setters.py``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from spec_tests.harness import ranks
from spec_tests.models.apis import FULLY_SHARD, Api, every_setting, hybrid_settings
from spec_tests.models.modules import UNITS, seeded
from spec_tests.models.running import Wire, batch, iterate, loss_of, of_unit
from spec_tests.models.sharding import HYBRID_STRATEGIES, NO_SHARD
from spec_tests.models.values import accumulated_gradients, assert_same, full_values, mean_gradients, named
from spec_tests.subject import trace


def reductions_of(api: Api, strategy: Any) -> list[str]:
    """The reductions of one unit in one backward."""
    if strategy is NO_SHARD:
        return ["AR"]
    return ["RS", "AR"] if strategy in HYBRID_STRATEGIES else ["RS"]


@pytest.mark.api_spec(wrapper=["NOSYNC-01", "NOSYNC-02"], fully_shard=["FS2-SYNC-01", "FS2-SYNC-02", "MIG-16"])
@every_setting
@ranks(2)
def test_micro_batches_are_reduced_once_as_a_sum(api: Api, strategy: Any) -> None:
    check_reductions(api, strategy)


@pytest.mark.api_spec(wrapper=["NOSYNC-02", "NOSYNC-09"], fully_shard=["FS2-SYNC-01", "FS2-18"])
@hybrid_settings
@ranks(4)
def test_micro_batches_on_a_grid_are_reduced_once_as_a_sum(api: Api, strategy: Any) -> None:
    check_reductions(api, strategy)


def check_reductions(api: Api, strategy: Any) -> None:
    plain, model = seeded(), api.shard(strategy=strategy)
    for steps in ((0, 1), (2, 3, 4), (5,)):
        with trace.record() as inside, Wire() as wire, api.no_sync(model):
            for step in steps[:-1]:
                iterate(model, step)
        assert not {"RS", "AR"} & {event.kind for event in inside.events}
        assert not {"RS", "AR"} & set(wire.kinds())
        if api == FULLY_SHARD:
            assert all(isinstance(p.data, DTensor) and p.grad is None for p in model.parameters())
        with trace.record() as last:
            iterate(model, steps[-1])
        for unit in UNITS:
            assert of_unit(last, unit, "RS", "AR") == reductions_of(api, strategy)
        assert_same(api.gradients(model), mean_gradients(plain, steps))
        model.zero_grad()


@pytest.mark.api_spec(wrapper=["NOSYNC-02"], fully_shard=["FS2-SYNC-01", "FS2-SYNC-02"])
@every_setting
@ranks(2)
def test_reduced_gradients_are_kept_and_later_sums_are_added(api: Api, strategy: Any) -> None:
    plain, model = seeded(), api.shard(strategy=strategy)
    for steps in ((0,), (1,)):
        iterate(model, *steps)
    with api.no_sync(model):
        iterate(model, 2)
        if api == FULLY_SHARD:
            assert_same(api.gradients(model), accumulated_gradients(plain, (0,), (1,)))
    iterate(model, 3)
    assert_same(api.gradients(model), accumulated_gradients(plain, (0,), (1,), (2, 3)))
    iterate(model, 4)
    assert_same(api.gradients(model), accumulated_gradients(plain, (0,), (1,), (2, 3), (4,)))


@pytest.mark.api_spec(wrapper=["NOSYNC-03"], fully_shard=["FS2-SYNC-01", "FS2-17"])
@every_setting
@ranks(2)
def test_micro_batches_train_like_one_big_batch(api: Api, strategy: Any) -> None:
    compare_with_one_big_batch(api, strategy, 4)


@pytest.mark.api_spec(wrapper=["NOSYNC-03"], fully_shard=["FS2-SYNC-01", "FS2-18"])
@hybrid_settings
@ranks(4)
def test_micro_batches_on_a_grid_train_like_one_big_batch(api: Api, strategy: Any) -> None:
    compare_with_one_big_batch(api, strategy, 2)


def compare_with_one_big_batch(api: Api, strategy: Any, num: int) -> None:
    """Compares two optimizer steps with a single process that uses the batches of all ranks."""
    plain, model = seeded(), api.shard(strategy=strategy)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (plain, model)]
    for first in (0, num):
        steps = range(first, first + num)
        for optimizer in optimizers:
            optimizer.zero_grad()
        big = torch.cat([batch(step, rank) for step in steps for rank in range(dist.get_world_size())])
        loss_of(plain(big)).backward()
        with api.no_sync(model):
            for step in steps[:-1]:
                (loss_of(model(batch(step))) / num).backward()
        (loss_of(model(batch(steps[-1]))) / num).backward()
        expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
        assert_same(api.gradients(model), expected, bitwise=False)
        for optimizer in optimizers:
            optimizer.step()
    assert_same(full_values(model), named(plain), bitwise=False)
