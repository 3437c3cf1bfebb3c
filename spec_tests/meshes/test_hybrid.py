"""Hybrid strategies: sharded inside a group, replicated across groups. Four ranks form two nodes of two.

For example, rank 2's gradient is the result of three steps. The reduce-scatter adds rank 3's gradient, the all-reduce
adds the result of rank 0's node, and the sum is divided by four. ``test_timelines.py`` checks the order of whole
iterations.
"""

from __future__ import annotations

import contextlib
import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from spec_tests.harness import device, ranks
from spec_tests.models import modules, running, sharding, values
from spec_tests.subject import FullyShardedDataParallel, ShardingStrategy, trace

both = pytest.mark.parametrize("strategy", sharding.HYBRID_STRATEGIES)


def node() -> tuple[int, ...]:
    """The ranks of this rank's node in `grid`."""
    return (0, 1) if dist.get_rank() < 2 else (2, 3)


def replicas() -> tuple[int, ...]:
    """The ranks that store the same shard as this rank in `grid`."""
    return (dist.get_rank() % 2, dist.get_rank() % 2 + 2)


def ranks_of(recorder: trace.Recorder, kind: str) -> set[tuple[int, ...]]:
    """The ranks of each collective of a kind."""
    return {event.ranks for event in recorder.events if event.kind == kind}


# --- ranks that share the shards ---


@pytest.mark.spec("HYB-01", "HYB-02", "HYB-04")
@both
@ranks(4)
def test_the_first_group_of_the_pair_shards_and_the_second_replicates(strategy: ShardingStrategy) -> None:
    """The nodes are columns of the grid here. In the wrong order, all ranks except 0 and 3 would get another shard."""
    row, column = sharding.grid()
    plain, rank = modules.seeded(), dist.get_rank()
    model = sharding.wrapped(sharding_strategy=strategy, process_group=(column, row))
    own = values.chunked(plain, values.named(plain), 2, rank // 2)
    values.assert_same(values.flat_parameters(model), own, bitwise=True)
    for unit in FullyShardedDataParallel.fsdp_modules(model):
        assert (unit.process_group, unit.world_size, unit.rank) == (column, 2, rank // 2)
    with trace.record() as recorder:
        running.iterate(model)
    assert ranks_of(recorder, "AG") == ranks_of(recorder, "RS") == {replicas()}
    assert ranks_of(recorder, "AR") == {node()}


@pytest.mark.spec("HYB-03")
@both
@ranks(4)
def test_without_groups_the_ranks_of_a_node_shard_and_equal_local_ranks_replicate(strategy: ShardingStrategy) -> None:
    # Two machines with two ranks each.
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    accelerator = torch.get_device_module(device())
    is_cpu = device().type == "cpu"
    with contextlib.nullcontext() if is_cpu else mock.patch.object(accelerator, "device_count", return_value=2):
        plain, model = modules.seeded(), sharding.wrapped(sharding_strategy=strategy, process_group=None)
    sharding.all_connected()
    own = values.chunked(plain, values.named(plain), 2, dist.get_rank() % 2)
    values.assert_same(values.flat_parameters(model), own, bitwise=True)
    units = FullyShardedDataParallel.fsdp_modules(model)
    assert len({(unit._mesh.shard, unit._mesh.replicate) for unit in units}) == 1, "all units share one pair of groups"
    for unit in units:
        assert tuple(dist.get_process_group_ranks(unit.process_group)) == node()
        assert (unit.world_size, unit.rank) == (2, dist.get_rank() % 2)
    with trace.record() as recorder:
        running.iterate(model)
    assert ranks_of(recorder, "AG") == ranks_of(recorder, "RS") == {node()}
    assert ranks_of(recorder, "AR") == {replicas()}


# --- replicas stay equal ---


@pytest.mark.spec("HYB-09", "HYB-05")
@both
@ranks(4)
def test_replicas_stay_equal_over_clipped_steps(strategy: ShardingStrategy) -> None:
    plain, model = modules.seeded(), sharding.wrapped(sharding_strategy=strategy)
    reference, optimizer = (torch.optim.Adam(each.parameters(), lr=0.05) for each in (plain, model))
    for step in range(3):
        running.iterate(model, step)
        for name, gradient in values.mean_gradients(plain, [step]).items():
            plain.get_parameter(name).grad = gradient
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        assert expected > 0.1, "the norm is above the limit"
        norm = model.clip_grad_norm_(0.1)
        torch.testing.assert_close(norm, expected, msg="every element counts once, not once for each replica")
        for each in (reference, optimizer):
            each.step()
            each.zero_grad()
        for parameter in model.parameters():
            of_ranks = [torch.empty_like(parameter) for _ in range(4)]
            dist.all_gather(of_ranks, parameter.detach())
            assert torch.equal(of_ranks[0], of_ranks[2])
            assert torch.equal(of_ranks[1], of_ranks[3])
    torch.testing.assert_close(values.full_values(model), values.named(plain), rtol=1e-4, atol=1e-4)


# --- errors ---


@pytest.mark.spec("HYB-07")
@both
@ranks(4)
def test_a_hybrid_with_anything_but_two_groups_is_refused(strategy: ShardingStrategy) -> None:
    row, column = sharding.grid()
    for wrong in (row, (row, None), (row, column, row), (2, 2)):
        with pytest.raises(ValueError, match=f"rank {dist.get_rank()}: {strategy.name}"):
            FullyShardedDataParallel(modules.seeded(), process_group=wrong, sharding_strategy=strategy)


@pytest.mark.spec("HYB-07")
@pytest.mark.parametrize("strategy", [*sharding.FLAT_STRATEGIES, None])
@ranks(4)
def test_a_pair_of_groups_without_a_hybrid_strategy_is_refused(strategy: ShardingStrategy | None) -> None:
    with pytest.raises(ValueError, match="a pair of process groups"):
        FullyShardedDataParallel(modules.seeded(), process_group=sharding.grid(), sharding_strategy=strategy)


@pytest.mark.spec("HYB-08")
@both
@ranks(4)
def test_a_hybrid_without_groups_and_without_a_policy_is_refused(strategy: ShardingStrategy) -> None:
    with pytest.raises(ValueError, match="auto_wrap_policy"):
        FullyShardedDataParallel(modules.seeded(), sharding_strategy=strategy)
    # With groups, no policy is needed.
    FullyShardedDataParallel(modules.seeded(), sharding_strategy=strategy, process_group=sharding.grid())


# --- the environment ---


@pytest.mark.spec("HYB-11")
@pytest.mark.parametrize("value", [None, "0"])
@ranks(4)
def test_the_environment_is_left_as_it_is(value: str | None) -> None:
    if value is not None:
        os.environ["NCCL_CROSS_NIC"] = value
    before = dict(os.environ)
    running.iterate(sharding.wrapped(sharding_strategy=ShardingStrategy.HYBRID_SHARD))
    assert dict(os.environ) == before
