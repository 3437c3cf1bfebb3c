"""Ranks with different numbers of batches stop together, and every token has the same weight on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import minifsdp
from minifsdp import batches
from minifsdp.checks.attach import attach
from minifsdp.checks.collective_log import log
from minifsdp.engine.comm_streams import CommStream
from minifsdp.engine.mesh import Group
from spec_tests.harness import device, ranks
from spec_tests.models.apis import Api, both_apis
from spec_tests.models.values import assert_same
from spec_tests.subject import ShardingStrategy

WIDTH = 5


@pytest.mark.spec("BATCH-01", "BATCH-05")
@ranks(2)
def test_all_ranks_end_when_the_first_rank_has_no_more_data() -> None:
    mine = range(3 if dist.get_rank() == 0 else 7)
    with pytest.warns(UserWarning, match=r"4 on rank 1"):
        assert list(minifsdp.while_all_have_data(mine, count_left=True)) == [0, 1, 2]
    # No message is pending, so the next loop starts normally, without a warning.
    assert list(minifsdp.while_all_have_data("ab", count_left=True)) == ["a", "b"]
    assert list(minifsdp.while_all_have_data([] if dist.get_rank() else [1])) == []


@pytest.mark.spec("BATCH-02")
@ranks(2)
def test_a_loader_that_raises_ends_all_ranks_with_its_error() -> None:
    def loader() -> Iterator[int]:
        yield 0
        if dist.get_rank() == 1:
            raise OSError("no such file")
        yield 1

    seen = []
    with pytest.raises(RuntimeError, match=rf"rank {dist.get_rank()}: .*rank 1: OSError: no such file"):
        seen.extend(minifsdp.while_all_have_data(loader()))
    assert dist.get_rank() or seen in ([], [0])


@pytest.mark.spec("BATCH-03")
@ranks(2)
def test_next_batch_is_fetched_before_current_one_is_yielded() -> None:
    fetched: list[int] = []

    def loader() -> Iterator[int]:
        for number in range(3):
            fetched.append(number)
            yield number

    for batch in minifsdp.while_all_have_data(loader()):
        assert fetched == [*range(min(batch + 2, 3))]


@pytest.mark.spec("BATCH-03")
@pytest.mark.accelerator
@ranks(2)
def test_watchdog_detects_wait_for_accelerator() -> None:
    attach()
    # Simulate a group without a CPU backend.
    comm_stream, seen = CommStream("batches", device()), []
    event = type(comm_stream.stream.record_event())
    with pytest.MonkeyPatch.context() as patch:
        wait = event.synchronize
        patch.setattr(event, "synchronize", lambda self: (seen.append(log.waiting), wait(self))[1])
        batch, all_have_one = batches._fetch(iter([1]), Group.of(dist.group.WORLD), device(), comm_stream)
        assert (batch, all_have_one()) == ([1], True)
    assert [waiting.about for waiting in seen] == ["while_all_have_data"]
    assert log.waiting is None


@pytest.mark.spec("BATCH-04")
@ranks(2)
def test_a_loop_that_ends_early_waits_for_the_all_reduce_in_flight() -> None:
    fetch, in_flight = batches._fetch, []

    def recorded(*arguments: Any) -> Any:
        batch, all_have_one = fetch(*arguments)
        in_flight.append(all_have_one)
        return batch, lambda: in_flight.pop(in_flight.index(all_have_one))()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batches, "_fetch", recorded)
        for batch in minifsdp.while_all_have_data(range(5)):
            assert len(in_flight) == 1
            if batch == 2:
                break
    assert in_flight == []
    assert list(minifsdp.while_all_have_data("xy")) == ["x", "y"]


@pytest.mark.spec("BATCH-01")
@ranks(4)
def test_while_all_have_data_ends_only_the_ranks_of_its_group() -> None:
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    assert list(minifsdp.while_all_have_data(range(rank + 1), groups[rank // 2])) == [*range(1 if rank < 2 else 3)]


# ---- tokens ---------------------------------------------------------------------------------------------------------


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)).to(device())


def tokens_of(rank: int, part: int = 0) -> Tensor:
    """Returns a different number of tokens on each rank. The last rank has no tokens in the first part."""
    number = 0 if rank == dist.get_world_size() - 1 and part == 0 else 3 * rank + part + 1
    return torch.randn(number, WIDTH, generator=torch.Generator().manual_seed(10 * rank + part)).to(device())


def loss_sum(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(tokens).square().sum()


def sharded(api: Api) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model, and the gradients of a single process that uses all tokens of both parts."""
    model, num_ranks = net(), dist.get_world_size()
    tokens = torch.cat([tokens_of(rank, part) for rank in range(num_ranks) for part in range(2)])
    (loss_sum(model, tokens) / len(tokens)).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    strategy = ShardingStrategy.HYBRID_SHARD if num_ranks == 4 else ShardingStrategy.FULL_SHARD
    return api.shard(net(), strategy=strategy), gradients


@pytest.mark.spec("BATCH-06")
@both_apis
@ranks(2)
def test_a_token_counts_the_same_on_each_rank(api: Api) -> None:
    model, expected = sharded(api)
    mine = torch.cat([tokens_of(dist.get_rank(), part) for part in range(2)])
    minifsdp.token_weighted(loss_sum(model, mine), len(mine)).backward()
    assert_same(api.gradients(model), expected, bitwise=False)


@pytest.mark.spec("BATCH-06", "BATCH-07")
@both_apis
@ranks(4)
def test_tokens_of_micro_batches_count_the_same_with_replicas(api: Api) -> None:
    model, expected = sharded(api)
    parts = [tokens_of(dist.get_rank(), part) for part in range(2)]
    scale = minifsdp.token_scale(torch.tensor(sum(map(len, parts)), device=device()))
    for part in parts:
        (loss_sum(model, part) * scale.to(device())).backward()
    assert_same(api.gradients(model), expected, bitwise=False)


@pytest.mark.spec("BATCH-07")
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.float64])
@ranks(2)
def test_token_scale_is_zero_without_tokens_and_keeps_the_callers_tensor(dtype: torch.dtype) -> None:
    assert minifsdp.token_scale(0).item() == 0.0
    mine = torch.tensor(3 * dist.get_rank(), dtype=dtype, device=device())
    assert minifsdp.token_scale(mine).item() == pytest.approx(2 / 3)
    assert mine.item() == 3 * dist.get_rank()


@pytest.mark.spec("BATCH-08")
@ranks(2)
def test_mean_of_means_has_documented_error() -> None:
    # Rank 0 has one token with loss 8. Rank 1 has three tokens with losses 2, 2 and 2.
    mine = torch.tensor([8.0] if dist.get_rank() == 0 else [2.0, 2.0, 2.0], device=device())
    both = torch.stack([mine.mean(), minifsdp.token_weighted(mine.sum(), len(mine))])
    dist.all_reduce(both)
    assert (both / 2).tolist() == [5.0, 3.5]
