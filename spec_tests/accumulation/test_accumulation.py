"""Gradient accumulation: micro-batches without communication, and one reduction of their sum.

Tests of behaviour that only one API has are in ``accumulation/test_no_sync.py`` and ``accumulation/test_setters.py``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from spec_tests.harness import ranks
from spec_tests.models.apis import FULLY_SHARD, HYBRID_SETTINGS, SETTINGS, Api, every_setting, settings_of
from spec_tests.models.modules import UNITS, seeded
from spec_tests.models.running import Wire, batch, iterate, loss_of
from spec_tests.models.sharding import HYBRID_STRATEGIES, NO_SHARD
from spec_tests.models.values import accumulated_gradients, assert_same, full_values, mean_gradients, named

with_hybrids = settings_of(*SETTINGS, *HYBRID_SETTINGS)


@pytest.mark.api_spec(
    wrapper=["NOSYNC-01", "NOSYNC-02", "NOSYNC-09"], fully_shard=["FS2-SYNC-01", "FS2-SYNC-02", "FS2-18", "MIG-16"]
)
@with_hybrids
@ranks(4)
def test_micro_batches_are_reduced_once_as_a_sum(api: Api, strategy: Any) -> None:
    plain, model = seeded(), api.shard(strategy=strategy)
    for steps in ((0, 1), (2, 3, 4), (5,)):
        with Wire() as wire, api.no_sync(model):
            for step in steps[:-1]:
                iterate(model, step)
        assert wire.calls("RS", "AR") == []
        if api == FULLY_SHARD:
            assert all(parameter.grad is None for parameter in model.parameters())
        with Wire() as wire:
            iterate(model, steps[-1])
        expected = {"AR"} if strategy is NO_SHARD else {"RS", "AR"} if strategy in HYBRID_STRATEGIES else {"RS"}
        assert sorted(wire.calls("RS", "AR")) == sorted(kind for _ in UNITS for kind in expected)
        assert_same(api.gradients(model), mean_gradients(plain, steps))
        model.zero_grad()


@pytest.mark.api_spec(wrapper=["NOSYNC-02"], fully_shard=["FS2-SYNC-01", "FS2-SYNC-02"])
@every_setting
@ranks(2)
def test_reduced_gradients_are_kept_and_later_sums_are_added(api: Api, strategy: Any) -> None:
    plain, model = seeded(), api.shard(strategy=strategy)
    for step in (0, 1):
        iterate(model, step)
    with api.no_sync(model):
        iterate(model, 2)
        if api == FULLY_SHARD:
            assert_same(api.gradients(model), accumulated_gradients(plain, (0,), (1,)))
    iterate(model, 3)
    assert_same(api.gradients(model), accumulated_gradients(plain, (0,), (1,), (2, 3)))
    iterate(model, 4)
    assert_same(api.gradients(model), accumulated_gradients(plain, (0,), (1,), (2, 3), (4,)))


@pytest.mark.api_spec(wrapper=["NOSYNC-03"], fully_shard=["FS2-SYNC-01", "FS2-17", "FS2-18"])
@with_hybrids
@ranks(4)
def test_micro_batches_train_like_one_big_batch(api: Api, strategy: Any) -> None:
    plain, model = seeded(), api.shard(strategy=strategy)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (plain, model)]
    for steps in ((0, 1, 2), (3, 4, 5)):
        big = torch.cat([batch(step, rank) for step in steps for rank in range(4)])
        loss_of(plain(big)).backward()
        with api.no_sync(model):
            for step in steps[:-1]:
                (loss_of(model(batch(step))) / 3).backward()
        (loss_of(model(batch(steps[-1]))) / 3).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same(full_values(model), named(plain), bitwise=False)
