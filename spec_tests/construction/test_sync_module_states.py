"""``sync_module_states``: initial parameters and buffers are those of the first rank of a group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing import assert_close

from spec_tests.harness import device, ranks
from spec_tests.models import sharding
from spec_tests.models.running import Wire
from spec_tests.subject import FullyShardedDataParallel as FSDP
from spec_tests.subject import ModuleWrapPolicy, ShardingStrategy, trace


def random_tower(seed: int) -> nn.Module:
    """A unit with buffers in a root with parameters and buffers. All values depend on the seed."""
    dice = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)), nn.BatchNorm1d(6))
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = (torch.rand(tensor.shape, generator=dice) * 100).to(tensor.dtype)
    return model.to(device())


def wrapped(plain: nn.Module, **options: Any) -> FSDP:
    """Two units: the inner container and the root."""
    plain[1] = FSDP(plain[1], **options)
    return FSDP(plain, **options)


@pytest.mark.spec("SYNC-01")
@pytest.mark.parametrize("options", [{}, {"sync_module_states": False}])
@ranks(2)
def test_default_construction_sends_nothing_and_each_rank_keeps_its_values(options: dict[str, Any]) -> None:
    with trace.record() as recorder, Wire() as wire:
        model = wrapped(random_tower(seed=dist.get_rank()), **options)
    assert recorder.count("BCAST") == 0
    assert "broadcast_" not in wire.calls()
    plain = random_tower(seed=dist.get_rank())
    flat = torch.cat([parameter.detach().reshape(-1) for parameter in plain[1].parameters()])
    assert torch.equal(model[1].module._flat_param.detach(), flat.chunk(2)[dist.get_rank()])
    assert [buffer.tolist() for buffer in model.buffers()] == [buffer.tolist() for buffer in plain.buffers()]


@pytest.mark.spec("SYNC-02", "SYNC-04", "SYNC-05")
@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD])
@pytest.mark.parametrize("keep", [False, True], ids=["flat", "original"])
@ranks(2)
def test_with_sync_every_rank_has_the_parameters_and_buffers_of_rank_0(strategy: ShardingStrategy, keep: bool) -> None:
    plain = random_tower(seed=dist.get_rank())
    model = wrapped(plain, sync_module_states=True, sharding_strategy=strategy, use_orig_params=keep)
    assert_close(model.state_dict(), random_tower(seed=0).state_dict(), rtol=0, atol=0)


@pytest.mark.spec("SYNC-02")
@pytest.mark.parametrize("is_hybrid", [True, False])
@ranks(4)
def test_the_source_is_the_first_rank_of_a_hybrid_or_of_the_units_own_group(is_hybrid: bool) -> None:
    source, options = 0, {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "process_group": sharding.grid()}
    if not is_hybrid:
        groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        source = dist.get_rank() % 2
        options = {"process_group": groups[source]}
    model = wrapped(random_tower(seed=dist.get_rank()), sync_module_states=True, **options)
    assert_close(model.state_dict(), random_tower(seed=source).state_dict(), rtol=0, atol=0)


@pytest.mark.spec("SYNC-02")
@pytest.mark.parametrize("dtype", [torch.int16, torch.uint16, torch.float8_e4m3fn, torch.complex64], ids=str)
@ranks(2)
def test_with_sync_buffers_have_any_dtype(dtype: torch.dtype) -> None:
    plain = nn.Linear(2, 2)
    plain.register_buffer("table", torch.tensor([0, dist.get_rank(), 1 - dist.get_rank()]).to(dtype))
    model = FSDP(plain, sync_module_states=True, device_id=device())
    assert model.table.to(torch.complex64).tolist() == [0.0, 0.0, 1.0]


@pytest.mark.spec("SYNC-03")
@ranks(2)
def test_buffer_shared_by_several_nested_units_is_sent_once() -> None:
    table = torch.full((1000,), float(dist.get_rank()), device=device())
    layers = [nn.Linear(6, 6) for _ in range(3)]
    for layer in layers:
        layer.register_buffer("table", table)
    model = nn.Sequential(nn.Sequential(*layers[:2]), layers[2]).to(device())
    with Wire() as wire:
        FSDP(model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear, nn.Sequential}), sync_module_states=True)
    sent = sum(numel for kind, numel in wire.sent if kind == "broadcast_")
    assert sent == 3 * 42 + 1000, "every parameter once, and the table once"
    assert all(layer.table is table for layer in layers)
    assert not table.any(), "the values of rank 0"
