"""Gradient accumulation: micro-batches without communication, and one reduction of their sum.

Tests of behaviour that only one API has are in ``accumulation/test_no_sync.py`` and ``accumulation/test_setters.py``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from spec_tests.harness import ranks
from spec_tests.models import apis, running, values
from spec_tests.models.modules import seeded
from spec_tests.subject import ShardingStrategy

FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD, HYBRID_SHARD_ZERO2 = ShardingStrategy

with_hybrids = apis.settings_of(
    (apis.WRAPPED, FULL_SHARD),
    (apis.ORIGINALS, NO_SHARD),
    (apis.FULLY_SHARD, FULL_SHARD),
    (apis.FULLY_SHARD, SHARD_GRAD_OP),
    (apis.WRAPPED, HYBRID_SHARD_ZERO2),
    (apis.FULLY_SHARD, HYBRID_SHARD),
)


@pytest.mark.api_spec(
    wrapper=["NOSYNC-01", "NOSYNC-02", "NOSYNC-09"], fully_shard=["FS2-SYNC-01", "FS2-SYNC-02", "FS2-18", "MIG-16"]
)
@with_hybrids
@ranks(4)
def test_micro_batches_are_reduced_once_as_a_sum(api: Any, strategy: Any) -> None:
    plain, model = seeded(), api.shard(strategy=strategy)
    for steps in ((0, 1, 2), (3,)):
        with running.Wire() as wire, api.no_sync(model):
            for step in steps[:-1]:
                running.iterate(model, step)
        assert wire.calls("RS", "AR") == []
        if api == apis.FULLY_SHARD:
            assert all(parameter.grad is None for parameter in model.parameters())
        with running.Wire() as wire:
            running.iterate(model, steps[-1])
        is_hybrid = "HYBRID" in strategy.name
        kinds = {"AR"} if strategy is NO_SHARD else {"RS", "AR"} if is_hybrid else {"RS"}
        assert sorted(wire.calls("RS", "AR")) == sorted(5 * list(kinds)), "the root and four blocks"
        values.assert_same(api.gradients(model), values.mean_gradients(plain, steps))
        model.zero_grad()


@pytest.mark.api_spec(wrapper=["NOSYNC-02"], fully_shard=["FS2-SYNC-01", "FS2-SYNC-02"])
@apis.settings_of(
    (apis.WRAPPED, FULL_SHARD),
    (apis.ORIGINALS, NO_SHARD),
    (apis.FULLY_SHARD, FULL_SHARD),
)
@ranks(2)
def test_reduced_gradients_are_kept_and_later_sums_are_added(api: Any, strategy: Any) -> None:
    plain, model = seeded(), api.shard(strategy=strategy)
    for step in (0, 1):
        running.iterate(model, step)
    with api.no_sync(model):
        running.iterate(model, 2)
        if api == apis.FULLY_SHARD:
            values.assert_same(api.gradients(model), values.accumulated_gradients(plain, (0,), (1,)))
    running.iterate(model, 3)
    values.assert_same(api.gradients(model), values.accumulated_gradients(plain, (0,), (1,), (2, 3)))
    running.iterate(model, 4)
    values.assert_same(api.gradients(model), values.accumulated_gradients(plain, (0,), (1,), (2, 3), (4,)))


@pytest.mark.api_spec(wrapper=["NOSYNC-03"], fully_shard=["FS2-SYNC-01", "FS2-17", "FS2-18"])
@with_hybrids
@ranks(4)
def test_micro_batches_train_like_one_big_batch(api: Any, strategy: Any) -> None:
    plain, model = seeded(), api.shard(strategy=strategy)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (plain, model)]
    for steps in ((0, 1, 2), (3, 4, 5)):
        big = torch.cat([running.batch(step, rank) for step in steps for rank in range(4)])
        plain(big).square().mean().backward()
        with api.no_sync(model):
            for step in steps[:-1]:
                (model(running.batch(step)).square().mean() / 3).backward()
        (model(running.batch(steps[-1])).square().mean() / 3).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    values.assert_same(api.values(model), values.named(plain), bitwise=False)
