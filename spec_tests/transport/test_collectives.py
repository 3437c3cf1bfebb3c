"""The collectives behave as their module docstring describes, and the division turns the sum into a mean."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from minifsdp.engine.collectives import Scaling, all_gather, all_reduce, reduce_scatter
from minifsdp.engine.exchange import broadcast
from minifsdp.engine.mesh import Group, default_group
from spec_tests.harness import device, ranks


def whole_world() -> Group:
    return Group.of(default_group())


def row(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device())


# --- scaling ---


@pytest.mark.pure
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 6, 8, 12, 64])
def test_sum_is_divided_after_it_and_in_float16_also_before_it_as_in_torch(num_ranks: int) -> None:
    from torch.distributed.algorithms._comm_hooks.default_hooks import DefaultState

    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        assert Scaling.of(num_ranks, dtype) == Scaling(1.0, float(num_ranks))
    before = DefaultState._get_gradient_predivide_factor(num_ranks)
    assert Scaling.of(num_ranks, torch.float16) == Scaling(before, num_ranks / before)


# --- on ranks ---


@ranks(2)
def test_collectives_give_the_results_in_the_docstring() -> None:
    rank = dist.get_rank()
    output, local_shard, summed = torch.zeros(4, device=device()), row(0, 0), row(2 * rank + 1, 2 * rank + 2)
    all_gather(whole_world(), output, row(2 * rank + 1, 2 * rank + 2)).wait()
    assert output.tolist() == [1, 2, 3, 4]
    reduce_scatter(whole_world(), local_shard, row(*[4 * rank + i for i in (1, 2, 3, 4)])).wait()
    assert local_shard.tolist() == [[6, 8], [10, 12]][rank]
    all_reduce(whole_world(), summed).wait()
    assert summed.tolist() == [4, 6]


@ranks(2)
@pytest.mark.spec("SHARD-06")
def test_complex_tensors_are_sent_and_summed_like_other_tensors() -> None:
    rank = dist.get_rank()
    mine = torch.tensor([1 + 2j, 3 - 1j], device=device()) * (rank + 1)
    output = torch.zeros(4, dtype=mine.dtype, device=device())
    all_gather(whole_world(), output, mine).wait()
    assert output.tolist() == [1 + 2j, 3 - 1j, 2 + 4j, 6 - 2j]
    local_shard = torch.zeros(1, dtype=mine.dtype, device=device())
    reduce_scatter(whole_world(), local_shard, mine).wait()
    assert local_shard.tolist() == [[3 + 6j], [9 - 3j]][rank]
    broadcast(whole_world(), output.mul_(rank))
    assert not output.any()
    all_reduce(whole_world(), mine).wait()
    assert mine.tolist() == [3 + 6j, 9 - 3j]


@ranks(4)
def test_source_of_a_broadcast_is_an_index_in_the_group_and_not_a_global_rank() -> None:
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = dist.get_rank() // 2
    tensor = row(dist.get_rank())
    broadcast(Group.of(halves[mine]), tensor, 1)
    assert tensor.tolist() == [2 * mine + 1]


@pytest.mark.spec("PAR-04")
@pytest.mark.parametrize("num_elements", [2, 10000])
@ranks(2)
def test_all_reduce_equals_reduce_scatter_and_all_gather_bitwise(num_elements: int) -> None:
    gradient = torch.randn(num_elements, generator=torch.Generator().manual_seed(dist.get_rank())).to(device())
    reduced, local_shard = gradient.clone(), gradient.new_empty(num_elements // 2)
    all_reduce(whole_world(), reduced).wait()
    reduce_scatter(whole_world(), local_shard, gradient).wait()
    all_gather(whole_world(), gradient, local_shard).wait()
    assert torch.equal(reduced, gradient)
