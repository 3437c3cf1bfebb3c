"""Hybrid strategies: sharded inside a group, replicated across groups. Four ranks form two nodes of two.

For example, rank 2's gradient is the result of three steps. The reduce-scatter adds rank 3's gradient, the all-reduce
adds the result of rank 0's node, and the sum is divided by four. ``test_timelines.py`` checks the order of whole
iterations.
"""

from __future__ import annotations

import ast
import contextlib
import os
import pathlib
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import minifsdp
from spec_tests.harness import device, ranks
from spec_tests.models.modules import UNITS, Stack, seeded
from spec_tests.models.running import Wire, batch, iterate, loss_of, of_unit
from spec_tests.models.sharding import (
    FULL_SHARD,
    HYBRID_SHARD,
    HYBRID_SHARD_ZERO2,
    HYBRID_STRATEGIES,
    NO_SHARD,
    SHARD_GRAD_OP,
    all_connected,
    grid,
    wrapped,
)
from spec_tests.models.values import (
    assert_same,
    chunked,
    flat_gradients,
    flat_parameters,
    flattened,
    full_values,
    mean_gradients,
    named,
)
from spec_tests.subject import FullyShardedDataParallel, ShardingStrategy, trace

both = pytest.mark.parametrize("strategy", HYBRID_STRATEGIES)


def node() -> tuple[int, ...]:
    """The ranks of this rank's node in `grid`."""
    return (0, 1) if dist.get_rank() < 2 else (2, 3)


def replicas() -> tuple[int, ...]:
    """The ranks that store the same shard as this rank in `grid`."""
    return (dist.get_rank() % 2, dist.get_rank() % 2 + 2)


def from_all_ranks(tensor: torch.Tensor) -> list[torch.Tensor]:
    everybody = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, tensor.detach())
    return everybody


# --- ranks that share the shards ---


@pytest.mark.spec("HYB-01")
@both
@ranks(4)
def test_each_rank_stores_its_shard_of_one_of_two_replicas(strategy: ShardingStrategy) -> None:
    plain = seeded()
    model = wrapped(sharding_strategy=strategy)
    assert_same(flat_parameters(model), chunked(plain, named(plain), 2, dist.get_rank() % 2), bitwise=True)
    for unit, row in flattened(plain, named(plain)).items():
        assert flat_parameters(model)[unit].numel() == row.numel() // 2
    for unit in FullyShardedDataParallel.fsdp_modules(model):
        assert unit.sharding_strategy is strategy


@pytest.mark.spec("HYB-01")
@ranks(4)
def test_hybrid_all_gathers_like_full_shard_in_its_group() -> None:
    model = wrapped(sharding_strategy=HYBRID_SHARD)
    with trace.record() as recorder:
        iterate(model)
    for unit in UNITS[1:]:
        assert of_unit(recorder, unit) == ["AG", "F", "FREE", "AG", "B", "FREE", "RS", "AR"]


@pytest.mark.spec("HYB-02")
@both
@ranks(4)
def test_the_first_group_of_the_pair_shards_and_the_second_replicates(strategy: ShardingStrategy) -> None:
    """The nodes are columns of the grid here. In the wrong order, all ranks except 0 and 3 would get another shard."""
    row, column = grid()
    plain, rank = seeded(), dist.get_rank()
    model = wrapped(sharding_strategy=strategy, process_group=(column, row))
    assert_same(flat_parameters(model), chunked(plain, named(plain), 2, rank // 2), bitwise=True)
    with trace.record() as recorder:
        iterate(model)
    assert {event.ranks for event in recorder.events if event.kind in ("AG", "RS")} == {replicas()}
    assert {event.ranks for event in recorder.events if event.kind == "AR"} == {node()}


@pytest.mark.spec("HYB-03")
@both
@ranks(4)
def test_without_groups_the_ranks_of_a_node_shard_and_equal_local_ranks_replicate(strategy: ShardingStrategy) -> None:
    plain, model = seeded(), on_nodes_of_two(strategy)
    assert_same(flat_parameters(model), chunked(plain, named(plain), 2, dist.get_rank() % 2), bitwise=True)
    with trace.record() as recorder:
        iterate(model)
    assert {event.ranks for event in recorder.events if event.kind in ("AG", "RS")} == {node()}
    assert {event.ranks for event in recorder.events if event.kind == "AR"} == {replicas()}
    assert of_unit(recorder, "blocks.2").count("AR") == 1


def on_nodes_of_two(strategy: ShardingStrategy) -> FullyShardedDataParallel:
    """Wraps a model without passing groups, on simulated machines with two ranks each."""
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    accelerator = torch.get_device_module(device())
    is_cpu = device().type == "cpu"
    with contextlib.nullcontext() if is_cpu else mock.patch.object(accelerator, "device_count", return_value=2):
        model = wrapped(sharding_strategy=strategy, process_group=None)
    all_connected()
    return model


@pytest.mark.spec("HYB-03")
@ranks(4)
def test_all_units_of_a_policy_share_one_pair_of_groups() -> None:
    model = on_nodes_of_two(HYBRID_SHARD)
    pairs = {(unit.mesh.shard, unit.mesh.replicate) for unit in FullyShardedDataParallel.fsdp_modules(model)}
    assert len(pairs) == 1
    shard, replicate = pairs.pop()
    assert shard.ranks == node()
    assert replicate.ranks == replicas()


@pytest.mark.spec("HYB-02")
@both
@ranks(4)
def test_the_attribute_process_group_is_the_group_that_shards_as_in_torch(strategy: ShardingStrategy) -> None:
    pair = grid()
    for model in (wrapped(sharding_strategy=strategy, process_group=pair), on_nodes_of_two(strategy)):
        for unit in FullyShardedDataParallel.fsdp_modules(model):
            assert tuple(dist.get_process_group_ranks(unit.process_group)) == node()
            assert (unit.world_size, unit.rank) == (2, dist.get_rank() % 2)


# --- communication ---


@pytest.mark.spec("HYB-04")
@both
@ranks(4)
def test_hybrid_sends_shards_inside_the_node_and_one_all_reduce_of_the_shard_between_nodes(
    strategy: ShardingStrategy,
) -> None:
    plain = seeded()
    model = wrapped(sharding_strategy=strategy)
    with trace.record() as recorder, Wire() as wire:
        iterate(model)
    for unit, row in flattened(plain, named(plain)).items():
        mine = [event for event in recorder.events if event.unit == unit]
        inside = [event for event in mine if event.kind in ("AG", "RS")]
        across = [event for event in mine if event.kind == "AR"]
        assert {event.ranks for event in inside} == {node()}
        assert {event.num_bytes for event in inside} == {4 * row.numel()}
        assert [(event.ranks, event.num_bytes) for event in across] == [(replicas(), 2 * row.numel())]
    on_the_wire = sorted(wire.values)
    assert on_the_wire == sorted((e.kind, e.num_bytes // 4) for e in recorder.events if e.ranks), "and nothing else"


@pytest.mark.spec("HYB-05")
@both
@ranks(4)
def test_the_gradient_is_the_mean_over_all_four_ranks(strategy: ShardingStrategy) -> None:
    plain = seeded()
    model = wrapped(sharding_strategy=strategy)
    for step in range(2):
        model.zero_grad()
        iterate(model, step)
        expected = mean_gradients(plain, [step])
        assert_same(flat_gradients(model), chunked(plain, expected, 2, dist.get_rank() % 2))


@pytest.mark.spec("HYB-06")
@ranks(4)
def test_hybrid_zero2_all_gathers_once_until_backward_ends() -> None:
    plain = seeded()
    model = wrapped(sharding_strategy=HYBRID_SHARD_ZERO2)
    for step in range(2):
        with trace.record() as recorder:
            loss = loss_of(model(batch(step)))
        assert recorder.count("AG") == len(UNITS)
        assert recorder.count("FREE") == 0
        with trace.record() as recorder:
            loss.backward()
        assert recorder.count("AG") == 0
        for unit in UNITS:
            assert of_unit(recorder, unit) == ["B", "FREE", "RS", "AR"]
    assert_same(flat_parameters(model), chunked(plain, named(plain), 2, dist.get_rank() % 2), bitwise=True)


@pytest.mark.spec("HYB-12")
@ranks(4)
def test_a_hybrid_sends_less_between_nodes_and_stores_more() -> None:
    traffic, stored = {}, {}
    for strategy in (FULL_SHARD, *HYBRID_STRATEGIES):
        model = wrapped(seeded(lambda: Stack(SEVEN)), sharding_strategy=strategy)
        traffic[strategy] = traffic_of(model)
        stored[strategy] = sum(parameter.numel() for parameter in model.parameters())
    whole = 4 * (72 + 4 * 56)
    of_root = 4 * 72
    # All-gathers: each parameter twice, but the root's only once. Reductions: each gradient once.
    assert traffic[FULL_SHARD] == {(0, 1, 2, 3): 3 * whole - of_root}
    assert traffic[HYBRID_SHARD] == {node(): 3 * whole - of_root, replicas(): whole // 2}
    assert traffic[HYBRID_SHARD_ZERO2] == {node(): 2 * whole, replicas(): whole // 2}, "without the backward gathers"
    assert stored[HYBRID_SHARD] == stored[HYBRID_SHARD_ZERO2] == 2 * stored[FULL_SHARD]


# A width at which no unit needs padding on four ranks: 56 elements in each block and 72 in the root.
SEVEN = 7


def traffic_of(model: FullyShardedDataParallel) -> dict[tuple[int, ...], int]:
    """For each group, the bytes that one iteration all-gathers and reduces."""
    with trace.record() as recorder:
        loss_of(model(batch(width=SEVEN))).backward()
    total: dict[tuple[int, ...], int] = {}
    for event in recorder.events:
        if event.ranks:
            total[event.ranks] = total.get(event.ranks, 0) + event.num_bytes
    return total


# --- replicas stay equal ---


@pytest.mark.spec("HYB-09", "HYB-05")
@both
@ranks(4)
def test_replicas_stay_equal_over_clipped_steps(strategy: ShardingStrategy) -> None:
    plain = seeded()
    model = wrapped(sharding_strategy=strategy)
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.05) for each in (plain, model)]
    for step in range(3):
        for name, gradient in mean_gradients(plain, [step]).items():
            plain.get_parameter(name).grad = gradient
        iterate(model, step)
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        norm = model.clip_grad_norm_(0.1)
        torch.testing.assert_close(norm, expected, msg="every element counts once, not once for each replica")
        assert expected > 0.1, "there was something to clip"
        reduced = {name: parameter.grad for name, parameter in plain.named_parameters()}
        assert_same(flat_gradients(model), chunked(plain, reduced, 2, dist.get_rank() % 2))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for parameter in model.parameters():
            values = from_all_ranks(parameter)
            assert torch.equal(values[0], values[2])
            assert torch.equal(values[1], values[3])
    torch.testing.assert_close(full_values(model), named(plain), rtol=1e-4, atol=1e-4)


# --- errors ---


@pytest.mark.spec("HYB-07")
@both
@pytest.mark.parametrize("kind", ["one group", "a pair with a gap", "three groups", "a pair of numbers"])
@ranks(4)
def test_a_hybrid_with_anything_but_two_groups_is_refused(strategy: ShardingStrategy, kind: str) -> None:
    row, column = grid()
    wrong: dict[str, Any] = {
        "one group": row,
        "a pair with a gap": (row, None),
        "three groups": (row, column, row),
        "a pair of numbers": (2, 2),
    }
    with Wire() as wire, pytest.raises(ValueError, match=f"rank {dist.get_rank()}: {strategy.name}"):
        FullyShardedDataParallel(seeded(), process_group=wrong[kind], sharding_strategy=strategy)
    assert wire.sent == [], "before any collective"


@pytest.mark.spec("HYB-07")
@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, None])
@ranks(4)
def test_a_pair_of_groups_without_a_hybrid_strategy_is_refused(strategy: ShardingStrategy | None) -> None:
    pair = grid()
    with Wire() as wire, pytest.raises(ValueError, match=f"rank {dist.get_rank()}: a pair of process groups"):
        FullyShardedDataParallel(seeded(), process_group=pair, sharding_strategy=strategy)
    assert wire.sent == [], "before any collective"


@pytest.mark.spec("HYB-08")
@both
@ranks(4)
def test_a_hybrid_without_groups_and_without_a_policy_is_refused(strategy: ShardingStrategy) -> None:
    with Wire() as wire, pytest.raises(ValueError, match="auto_wrap_policy"):
        FullyShardedDataParallel(seeded(), sharding_strategy=strategy)
    assert wire.sent == [], "before any collective"
    # With groups, no policy is needed.
    FullyShardedDataParallel(seeded(), sharding_strategy=strategy, process_group=grid())


# --- the environment ---


@pytest.mark.spec("HYB-11")
@pytest.mark.parametrize("value", [None, "0"])
@ranks(4)
def test_the_environment_is_left_as_it_is(value: str | None) -> None:
    if value is not None:
        os.environ["NCCL_CROSS_NIC"] = value
    before = dict(os.environ)
    iterate(wrapped(sharding_strategy=HYBRID_SHARD))
    assert dict(os.environ) == before


@pytest.mark.spec("HYB-11")
@pytest.mark.pure
def test_the_package_does_not_read_the_variable_that_the_docs_recommend() -> None:
    """Docstrings may name the variable. Code that reads it would contain the name as a string."""
    for path in pathlib.Path(minifsdp.__file__).parent.rglob("*.py"):
        for part in ast.walk(ast.parse(path.read_text())):
            assert not (isinstance(part, ast.Constant) and part.value == "NCCL_CROSS_NIC"), path
