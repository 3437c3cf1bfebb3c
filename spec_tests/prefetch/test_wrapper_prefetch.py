"""Prefetching in backward and in forward, and its cost in memory.

A watch on each unit's layer records the blocks in memory in the middle of the unit's forward and backward. The tracer
records the order of the collectives. ``test_timelines.py`` checks the order of whole iterations.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Sequence

import pytest
import torch

from spec_tests.harness import ranks
from spec_tests.models import apis, running, values
from spec_tests.models.modules import Stack, seeded
from spec_tests.subject import BackwardPrefetch, FullyShardedDataParallel, ShardingStrategy, trace

PRE, POST = BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST
SETTINGS = (PRE, POST, None)


# --- the option ---


@pytest.mark.spec("PREF-01", "PREF-11")
@ranks(2)
def test_backward_prefetch_accepts_only_its_two_members_or_none() -> None:
    assert [member.name for member in BackwardPrefetch] == ["BACKWARD_PRE", "BACKWARD_POST"]
    assert inspect.signature(FullyShardedDataParallel).parameters["backward_prefetch"].default is PRE
    assert inspect.signature(FullyShardedDataParallel).parameters["forward_prefetch"].default is False
    assert (apis.WRAPPED.shard().backward_prefetch, apis.WRAPPED.shard().forward_prefetch) == (PRE, False)
    for setting in SETTINGS:
        model = apis.WRAPPED.shard(backward_prefetch=setting)
        assert {unit.backward_prefetch for unit in FullyShardedDataParallel.fsdp_modules(model)} == {setting}
    for wrong in ("BACKWARD_PRE", 1, True, False, object()):
        with pytest.raises(TypeError, match=r"backward_prefetch should be one of BackwardPrefetch\.BACKWARD_PRE"):
            apis.WRAPPED.shard(backward_prefetch=wrong)


# --- backward ---


@pytest.mark.spec("PREF-03", "PREF-05", "PREF-06")
@pytest.mark.parametrize("setting", SETTINGS)
@ranks(2)
def test_backward_unshards_the_current_block_and_with_pre_the_next_one(setting: BackwardPrefetch | None) -> None:
    plain = seeded()
    watch = running.Watch(plain)
    alive: dict[str, list[str]] = {}
    watch.in_backward = lambda unit: alive.update({unit: watch.alive_blocks()})
    model = apis.WRAPPED.shard(plain, backward_prefetch=setting)
    for step in range(2):
        running.iterate(model, step)
        for index in range(4):
            expected = [f"blocks.{index}"]
            if setting is PRE and index > 0:
                expected.insert(0, f"blocks.{index - 1}")
            assert alive[f"blocks.{index}"] == expected


@pytest.mark.spec("PREF-07", "PREF-12")
@ranks(2)
def test_all_settings_give_the_same_gradients_bit_by_bit() -> None:
    expected = values.accumulated_gradients(seeded(), (0,), (1,))
    later = []
    for setting, forward_prefetch in itertools.product(SETTINGS, (False, True)):
        model = apis.WRAPPED.shard(backward_prefetch=setting, forward_prefetch=forward_prefetch)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        running.iterate(model, 0)
        running.iterate(model, 1)
        values.assert_same(apis.WRAPPED.gradients(model), expected)
        optimizer.step()
        optimizer.zero_grad()
        running.iterate(model, 2)
        later.append(values.flat_gradients(model))
        values.assert_same(later[-1], later[0], bitwise=True)


# --- communication streams ---


@pytest.mark.spec("PREF-10")
@pytest.mark.parametrize(
    "strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD]
)
@pytest.mark.parametrize("setting", SETTINGS)
@ranks(2)
def test_collectives_run_in_traced_issue_order(strategy: ShardingStrategy, setting: BackwardPrefetch | None) -> None:
    """The blocks have different sizes, so that the number of elements identifies the unit of a collective."""
    model = apis.WRAPPED.shard(seeded(lambda: Stack(hidden=(2, 4, 6, 8))), strategy=strategy, backward_prefetch=setting)
    for step in range(2):
        with trace.record() as recorder, running.Wire() as wire:
            running.iterate(model, step)
        assert wire.values == [(event.kind, event.num_bytes // 4) for event in recorder.events if event.ranks]


@pytest.mark.spec("PREF-14")
@ranks(2)
def test_forward_of_unit_waits_for_its_prefetched_all_gather() -> None:
    """A prefetched all-gather runs while another unit computes. There is no other overlap."""
    model = apis.WRAPPED.shard(forward_prefetch=True)
    running.iterate(model)
    with trace.record() as recorder:
        running.iterate(model, 1)
    first = {}
    for event in recorder.events:
        first.setdefault((event.kind, event.unit), event)
    for index in range(3):
        computes, ahead = first["F", f"blocks.{index}"], first["AG", f"blocks.{index + 1}"]
        assert ahead.start < computes.start < computes.end < ahead.end


# --- forward ---


@pytest.mark.spec("PREF-13")
@pytest.mark.parametrize("later", [(3, 2, 1, 0), (0, 2)])
@ranks(2)
def test_forward_prefetch_with_another_order_warns_and_stays_correct(later: Sequence[int]) -> None:
    plain, expected = seeded(), seeded()
    watch = running.Watch(plain)
    model = apis.WRAPPED.shard(plain, forward_prefetch=True)
    running.iterate(model, 0)
    running.iterate(model, 1)
    model.zero_grad()
    with pytest.warns(UserWarning, match=r"forward_prefetch expects .*order of the first iteration"):
        running.iterate(model, 2, order=later)
    assert watch.alive() == [], "unused gathered parameters are freed at the end of backward"
    expected.order = later
    values.assert_same(apis.WRAPPED.gradients(model), values.mean_gradients(expected, [2]))
    # Return to the recorded order, after a parameter change that a stale prefetch would not include.
    with torch.no_grad():
        for parameter in (*model.parameters(), *expected.parameters()):
            parameter.add_(0.25)
    model.zero_grad()
    running.iterate(model, 3)
    expected.order = range(4)
    values.assert_same(apis.WRAPPED.gradients(model), values.mean_gradients(expected, [3]))
