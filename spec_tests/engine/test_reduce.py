"""Gradient reduction: each stage, and the limit of one reduction in flight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from minifsdp.engine import collectives
from minifsdp.engine.collectives import Scaling
from minifsdp.engine.comm_streams import CommStreams
from minifsdp.engine.layout import Gradient
from minifsdp.engine.mesh import Group, MeshGroups, default_group
from minifsdp.engine.reduce import ReducePlan, Reducer
from spec_tests.harness import device, ranks
from spec_tests.subject import trace

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


class Kept:
    """Replaces a layout. Receives reduced gradients and stores them."""

    name = "unit"
    offloads = has_gradient_hooks = False

    def __init__(self) -> None:
        self.local_shards: list[torch.Tensor] = []

    def pack(self, gradient: Gradient, dtype: torch.dtype, *, is_written: bool = False) -> torch.Tensor:
        return gradient.parts[0].to(dtype)

    def copy_to_host(self, local_shard: torch.Tensor) -> torch.Tensor:
        return local_shard

    def accept_gradient(self, gradient: Gradient, local_shard: torch.Tensor) -> None:
        self.local_shards.append(local_shard.clone())


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


@pytest.mark.spec("SHARD-06")
@ranks(2)
def test_sharded_unit_gets_its_shard_of_the_mean() -> None:
    rank = dist.get_rank()
    whole = torch.tensor([1.0, 2, 3, 4], device=device()) * (rank + 1)
    local_shard = reduced(ReducePlan.mean(MeshGroups.sharded(world()), F32), whole)
    assert local_shard.tolist() == [[1.5, 3.0], [4.5, 6.0]][rank]


@pytest.mark.spec("SHARD-11")
@ranks(2)
def test_replicated_unit_gets_mean_by_one_all_reduce() -> None:
    rank = dist.get_rank()
    with trace.record() as recorder:
        local_shard = reduced(ReducePlan.mean(MeshGroups.replicated(world()), F32), full(rank + 1))
    assert local_shard.tolist() == [1.5] * 4
    assert recorder.order() == ["AR unit"]
    assert recorder.events[0].ranks == (0, 1)


@pytest.mark.spec("HYB-04", "HYB-05")
@ranks(4)
def test_hybrid_unit_reduce_scatters_then_all_reduces() -> None:
    rank = dist.get_rank()
    mesh = two_by_two()
    with trace.record() as recorder:
        local_shard = reduced(ReducePlan.mean(mesh, F32), full(rank + 1))
    assert local_shard.tolist() == [2.5, 2.5], "the mean of 1, 2, 3 and 4"
    scattered, summed = recorder.events
    assert (scattered.kind, scattered.ranks) == ("RS", ((0, 1), (0, 1), (2, 3), (2, 3))[rank])
    assert (summed.kind, summed.ranks) == ("AR", ((0, 2), (1, 3), (0, 2), (1, 3))[rank])
    assert (scattered.num_bytes, summed.num_bytes) == (16, 8), "all-reduced is only the slice"
    assert (scattered.stream, summed.stream) == ("reduce", "all_reduce")


@pytest.mark.spec("HYB-05")
@ranks(4)
def test_hybrid_unit_gets_the_shard_of_its_shard_index() -> None:
    rank = dist.get_rank()
    whole = torch.arange(4.0, device=device()) + 10 * rank
    local_shard = reduced(ReducePlan.mean(two_by_two(), F32), whole)
    assert local_shard.tolist() == [[15.0, 16.0], [17.0, 18.0]][rank % 2]


@ranks(1)
def test_a_unit_of_one_rank_keeps_its_gradient_and_sends_nothing() -> None:
    with trace.record() as recorder:
        local_shard = reduced(ReducePlan.mean(MeshGroups(None, None), F32), full(3))
    assert local_shard.tolist() == [3.0] * 4
    assert recorder.events == []


# --- dtypes ---


@pytest.mark.spec("MP-05")
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@ranks(2)
def test_gradients_are_reduced_and_stored_in_the_dtype_of_the_plan(dtype: torch.dtype) -> None:
    whole = full(dist.get_rank() + 1, dtype=BF16)
    with trace.record() as recorder:
        local_shard = reduced(ReducePlan.mean(MeshGroups.sharded(world()), dtype), whole)
    (event,) = recorder.events
    assert (event.dtype, local_shard.dtype) == (dtype, dtype)
    assert event.num_bytes == 4 * dtype.itemsize
    assert local_shard.tolist() == [1.5, 1.5]


@pytest.mark.spec("MP-07")
@ranks(2)
def test_sum_in_float32_is_more_precise_than_a_sum_in_bfloat16() -> None:
    # bfloat16 cannot represent 256 + 1: the next number after 256 is 258.
    whole = full(256.0 if dist.get_rank() == 0 else 1.0, dtype=BF16)
    mesh = MeshGroups.sharded(world())
    assert reduced(ReducePlan.mean(mesh, F32), whole.clone()).tolist() == [128.5, 128.5]
    assert reduced(ReducePlan.mean(mesh, BF16), whole.clone()).tolist() == [128.0, 128.0]


@pytest.mark.spec("SHARD-06")
@ranks(4)
def test_a_sum_in_float16_does_not_overflow_where_the_mean_does_not() -> None:
    whole = full(16384.0, dtype=F16)
    local_shard = reduced(ReducePlan.mean(MeshGroups.sharded(world()), F16), whole)
    assert local_shard.tolist() == [16384.0]


@pytest.mark.pure
def test_a_plan_divides_by_all_ranks_of_the_mesh() -> None:
    anything: Any = None
    row, column = Group(anything, 4, 0, (0, 1, 2, 3)), Group(anything, 2, 0, (0, 4))
    assert ReducePlan.mean(MeshGroups.hybrid(row, column), F32).scaling == Scaling(1.0, 8.0)
    assert ReducePlan.mean(MeshGroups.hybrid(row, column), F16).scaling == Scaling(4.0, 2.0)


# --- one in flight ---


@ranks(2)
def test_a_reduction_is_completed_by_the_next_and_the_last_one_by_finish() -> None:
    plan = ReducePlan.mean(MeshGroups.sharded(world()), F32)
    first, second, one = Kept(), Kept(), reducer()
    issued: Any = [first, second]
    one.reduce(issued[0], plan, Gradient([full(1)]))
    assert first.local_shards == [], "nobody needs it yet"
    one.reduce(issued[1], plan, Gradient([full(2)]))
    assert len(first.local_shards) == 1
    assert second.local_shards == []
    one.finish()
    assert [local_shard.tolist() for local_shard in first.local_shards + second.local_shards] == [
        [1.0, 1.0],
        [2.0, 2.0],
    ]
    one.finish()
    assert len(second.local_shards) == 1, "a second finish has nothing to do"


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


class Work:
    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name

    def wait(self) -> None:
        self.log.append(f"wait {self.name}")


@pytest.mark.pure
def test_on_the_cpu_a_reduction_is_waited_for_before_the_next_gradient_is_packed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[str] = []

    def reduce_scatter(group: Group, local_shard: torch.Tensor, whole: torch.Tensor, *_: Any) -> Work:
        name = str(int(whole[0]))
        log.append(f"issue {name}")
        local_shard.copy_(whole[: local_shard.numel()])
        return Work(log, name)

    monkeypatch.setattr(collectives, "reduce_scatter", reduce_scatter)
    anything: Any = None
    plan = ReducePlan(MeshGroups.sharded(Group(anything, 2, 0, (0, 1))), F32, Scaling(1.0, 2.0))
    one, kept = Reducer(CommStreams(torch.device("cpu"))), Kept()
    target: Any = kept
    for number in (1, 2, 3):
        one.reduce(target, plan, Gradient([torch.full((4,), float(number))]))
    one.finish()
    assert log == ["issue 1", "wait 1", "issue 2", "wait 2", "issue 3", "wait 3"]
    assert [local_shard.tolist() for local_shard in kept.local_shards] == [[0.5, 0.5], [1.0, 1.0], [1.5, 1.5]]


@ranks(2)
def test_a_gradient_that_goes_to_the_cpu_is_recorded_after_its_reduction() -> None:
    kept = Kept()
    kept.offloads = True
    target: Any = kept
    one = reducer()
    with trace.record() as recorder:
        one.reduce(target, ReducePlan.mean(MeshGroups.sharded(world()), F32), Gradient([full(1)]))
        one.finish()
    assert recorder.order() == ["RS unit", "D2H unit"]
    assert recorder.events[1].num_bytes == 8


@ranks(2)
def test_span_of_a_reduction_ends_after_its_wait() -> None:
    plan = ReducePlan.mean(MeshGroups.sharded(world()), F32)
    target: Any = Kept()
    one = reducer()
    with trace.record() as recorder:
        one.reduce(target, plan, Gradient([full(1)]))
        (event,) = recorder.events
        assert event.end == event.start
        one.finish()
    assert event.end > event.start


# --- a user's hook ---


@pytest.mark.spec("HOOK-02", "HOOK-03")
@ranks(2)
def test_comm_hook_replaces_mean_and_gets_shard_if_sharded() -> None:
    seen: list[tuple[int, ...]] = []

    def hook(whole: torch.Tensor, local_shard: torch.Tensor | None = None) -> None:
        seen.append((whole.numel(),) if local_shard is None else (whole.numel(), local_shard.numel()))
        (whole if local_shard is None else local_shard).fill_(7.0)

    sharded = ReducePlan.mean(MeshGroups.sharded(world()), F32)
    replicated = ReducePlan.mean(MeshGroups.replicated(world()), F32)
    sharded.hook = replicated.hook = hook
    with trace.record() as recorder:
        assert reduced(sharded, full(1)).tolist() == [7.0, 7.0]
        assert reduced(replicated, full(1)).tolist() == [7.0] * 4
    assert seen == [(4, 2), (4,)]
    assert recorder.events == [], "the engine itself sends nothing"
