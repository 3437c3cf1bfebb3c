"""The collectives behave as their module docstring describes, and the division turns the sum into a mean."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from minifsdp.engine.collectives import (
    Scaling,
    all_gather,
    all_reduce,
    broadcast,
    reduce_scatter,
)
from minifsdp.engine.mesh import Group, default_group
from spec_tests.harness import device, ranks


def everybody() -> Group:
    return Group.of(default_group())


def row(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device())


# --- scaling ---

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.mark.pure
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_ranks", range(1, 65))
def test_factors_before_and_after_multiply_to_world_size(num_ranks: int, dtype: torch.dtype) -> None:
    scaling = Scaling.of(num_ranks, dtype)
    assert scaling.before * scaling.after == num_ranks


@pytest.mark.pure
@pytest.mark.parametrize("dtype", [d for d in DTYPES if d is not torch.float16], ids=str)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 64])
def test_wide_dtype_is_divided_only_after_the_sum(num_ranks: int, dtype: torch.dtype) -> None:
    assert Scaling.of(num_ranks, dtype) == Scaling(1.0, float(num_ranks))


@pytest.mark.pure
@pytest.mark.parametrize(
    ("num_ranks", "before", "after"),
    [(1, 1, 1), (2, 2, 1), (3, 2, 1.5), (4, 2, 2), (6, 4, 1.5), (8, 4, 2), (12, 4, 3), (16, 4, 4), (64, 8, 8)],
)
def test_float16_is_divided_in_two_steps_by_powers_of_two_near_the_square_root(
    num_ranks: int, before: float, after: float
) -> None:
    assert Scaling.of(num_ranks, torch.float16) == Scaling(before, after)


@pytest.mark.pure
@given(st.integers(1, 4096))
def test_float16_divisors_differ_at_most_by_a_factor_of_two_for_a_power_of_two_of_ranks(
    num_ranks: int,
) -> None:
    scaling = Scaling.of(num_ranks, torch.float16)
    assert scaling.before * scaling.after == num_ranks
    if num_ranks & (num_ranks - 1) == 0:
        assert scaling.after <= scaling.before <= 2 * scaling.after


@pytest.mark.pure
def test_the_rule_for_float16_is_that_of_torch() -> None:
    from torch.distributed.algorithms._comm_hooks.default_hooks import DefaultState

    for num_ranks in range(1, 65):
        theirs = DefaultState._get_gradient_predivide_factor(num_ranks)
        assert Scaling.of(num_ranks, torch.float16).before == theirs


@pytest.mark.pure
def test_float16_gradients_whose_sum_would_overflow_are_reduced_correctly() -> None:
    gradients = [torch.full((3,), 16384.0, dtype=torch.float16) for _ in range(8)]
    assert torch.isinf(torch.stack(gradients).sum(0)).all()
    scaling = Scaling.of(8, torch.float16)
    total = torch.zeros(3, dtype=torch.float16)
    for gradient in gradients:
        scaling.prepare(gradient)
        total += gradient
    scaling.complete(total)
    assert torch.equal(total, torch.full((3,), 16384.0, dtype=torch.float16))


@pytest.mark.pure
def test_division_by_one_does_not_change_the_tensor() -> None:
    tensor = torch.ones(3)
    version = tensor._version
    Scaling(1.0, 1.0).prepare(tensor)
    Scaling(1.0, 1.0).complete(tensor)
    assert tensor._version == version


# --- on ranks ---


@ranks(2)
def test_all_gather_concatenates_shards_by_rank() -> None:
    rank = dist.get_rank()
    output = torch.zeros(4, device=device())
    all_gather(everybody(), output, row(2 * rank + 1, 2 * rank + 2)).wait()
    assert output.tolist() == [1, 2, 3, 4]


@ranks(2)
def test_a_reduce_scatter_leaves_each_rank_its_part_of_the_sum() -> None:
    rank = dist.get_rank()
    local_shard = torch.zeros(2, device=device())
    reduce_scatter(everybody(), local_shard, row(*[4 * rank + i for i in (1, 2, 3, 4)])).wait()
    assert local_shard.tolist() == [[6, 8], [10, 12]][rank]


@ranks(2)
def test_an_all_reduce_is_the_sum_in_place() -> None:
    rank = dist.get_rank()
    tensor = row(2 * rank + 1, 2 * rank + 2)
    all_reduce(everybody(), tensor).wait()
    assert tensor.tolist() == [4, 6]


@pytest.mark.parametrize("source", [0, 1])
@ranks(2)
def test_a_broadcast_leaves_the_value_of_the_source_everywhere(source: int) -> None:
    tensor = row(dist.get_rank(), 7)
    broadcast(everybody(), tensor, source)
    assert tensor.tolist() == [source, 7]


@ranks(2)
@pytest.mark.spec("SHARD-06")
def test_complex_tensors_are_sent_and_summed_like_other_tensors() -> None:
    rank = dist.get_rank()
    mine = torch.tensor([1 + 2j, 3 - 1j], device=device()) * (rank + 1)
    output = torch.zeros(4, dtype=mine.dtype, device=device())
    all_gather(everybody(), output, mine).wait()
    assert output.tolist() == [1 + 2j, 3 - 1j, 2 + 4j, 6 - 2j]
    local_shard = torch.zeros(1, dtype=mine.dtype, device=device())
    reduce_scatter(everybody(), local_shard, mine).wait()
    assert local_shard.tolist() == [[3 + 6j], [9 - 3j]][rank]
    broadcast(everybody(), output.mul_(rank))
    assert not output.any()
    all_reduce(everybody(), mine).wait()
    assert mine.tolist() == [3 + 6j, 9 - 3j]


@ranks(4)
def test_source_of_a_broadcast_is_an_index_in_the_group_and_not_a_global_rank() -> None:
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = dist.get_rank() // 2
    tensor = row(dist.get_rank())
    broadcast(Group.of(halves[mine]), tensor, 1)
    assert tensor.tolist() == [2 * mine + 1]


def _all_reduce_two_ways(num_elements: int) -> tuple[torch.Tensor, torch.Tensor]:
    group = everybody()
    gradient = torch.randn(num_elements, generator=torch.Generator().manual_seed(dist.get_rank())).to(device())
    reduced = gradient.clone()
    all_reduce(group, reduced).wait()
    local_shard = gradient.new_empty(num_elements // group.size)
    reduce_scatter(group, local_shard, gradient).wait()
    put_together = torch.empty_like(gradient)
    all_gather(group, put_together, local_shard).wait()
    return reduced, put_together


@pytest.mark.spec("PAR-04")
@pytest.mark.parametrize("num_elements", [2, 64, 10000])
@ranks(2)
def test_all_reduce_equals_reduce_scatter_and_all_gather_bitwise(num_elements: int) -> None:
    reduced, put_together = _all_reduce_two_ways(num_elements)
    assert torch.equal(reduced, put_together)


@pytest.mark.spec("PAR-04")
@pytest.mark.parametrize("num_elements", [4, 64, 10000])
@ranks(4)
def test_both_forms_of_all_reduce_on_four_ranks_differ_at_most_by_the_order_of_the_sum(num_elements: int) -> None:
    reduced, put_together = _all_reduce_two_ways(num_elements)
    torch.testing.assert_close(reduced, put_together, rtol=1e-6, atol=1e-6)
