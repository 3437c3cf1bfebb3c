"""Gradient reduction: each stage, and the limit of one reduction in flight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from minifsdp.engine.comm_streams import CommStreams
from minifsdp.engine.layout import Gradient
from minifsdp.engine.mesh import Group, MeshGroups, default_group
from minifsdp.engine.reduce import ReducePlan, Reducer
from spec_tests.harness import device, ranks
from spec_tests.models.stand_in import Kept
from spec_tests.subject import trace

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


def reducer() -> Reducer:
    return Reducer(CommStreams(device()))


def reduced(plan: ReducePlan, whole: torch.Tensor) -> torch.Tensor:
    """Reduces a gradient. Returns the local shard that the layout receives."""
    kept: Any = Kept()
    one = reducer()
    one.reduce(kept, plan, Gradient([whole]))
    one.finish()
    (local_shard,) = kept.local_shards
    return local_shard


def full(value: float, num: int = 4, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.full((num,), value, dtype=dtype, device=device())


def two_by_two() -> MeshGroups:
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    rank = dist.get_rank()
    return MeshGroups.hybrid(Group.of(rows[rank // 2]), Group.of(columns[rank % 2]))


def world() -> Group:
    return Group.of(default_group())


# --- the reduced gradients ---


@pytest.mark.spec("HYB-04", "HYB-05")
@ranks(4)
def test_hybrid_unit_reduce_scatters_then_all_reduces() -> None:
    rank = dist.get_rank()
    mesh = two_by_two()
    whole = torch.arange(4.0, device=device()) + 10 * rank
    with trace.record() as recorder:
        local_shard = reduced(ReducePlan.mean(mesh, F32), whole)
    assert local_shard.tolist() == [[15.0, 16.0], [17.0, 18.0]][rank % 2]
    scattered, summed = recorder.events
    assert (scattered.kind, scattered.ranks) == ("RS", ((0, 1), (0, 1), (2, 3), (2, 3))[rank])
    assert (summed.kind, summed.ranks) == ("AR", ((0, 2), (1, 3), (0, 2), (1, 3))[rank])
    assert (scattered.num_bytes, summed.num_bytes) == (16, 8), "only the slice is all-reduced"
    assert (scattered.stream, summed.stream) == ("reduce", "all_reduce")


# --- dtypes ---


@pytest.mark.spec("SHARD-06")
@ranks(4)
def test_a_sum_in_float16_does_not_overflow_where_the_mean_does_not() -> None:
    whole = full(16384.0, dtype=F16)
    local_shard = reduced(ReducePlan.mean(MeshGroups.sharded(world()), F16), whole)
    assert local_shard.tolist() == [16384.0]


# --- one in flight ---


@pytest.mark.spec("NEW-08")
@pytest.mark.parametrize("is_replicated", [True, False])
@ranks(4)
def test_a_partial_sum_in_flight_is_included_in_the_next_reduction(is_replicated: bool) -> None:
    # As with `set_is_last_backward(False)`, the first reduction is not completed before the second one begins.
    plan = ReducePlan.mean(MeshGroups.replicated(world()) if is_replicated else two_by_two(), F32)
    kept, one = Kept(), reducer()
    target: Any = kept
    plan.all_reduces = False
    one.reduce(target, plan, Gradient([full(dist.get_rank())]))
    plan.all_reduces = True
    one.reduce(target, plan, Gradient([full(10)]))
    one.finish()
    assert [local_shard.unique().tolist() for local_shard in kept.local_shards] == [[11.5]]


# --- a user's hook ---
