"""Weights that differ between ranks when a unit is sharded."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import minifsdp
from spec_tests.debugging.faults import on_rank, said
from spec_tests.harness import device, ranks
from spec_tests.models.apis import ALL_APIS, FULLY_SHARD, Api, all_apis, both_apis, wrapper_apis
from spec_tests.models.modules import seeded
from spec_tests.models.sharding import HYBRID_SHARD, NO_SHARD


def spoiled(rank: int) -> nn.Module:
    """A model in which one rank reverses the values of one bias, so that their sum is the same."""
    model = seeded()
    bias = model.blocks[2].linear.bias
    on_rank(rank, lambda: bias.copy_(bias.flip(0)))
    return model


@pytest.mark.spec("DEBUG-04")
@all_apis
@ranks(2)
def test_a_parameter_that_differs_is_named_on_every_rank_with_the_ranks(api: Api) -> None:
    with minifsdp.debug("weights"), said() as texts:
        api.shard(spoiled(1))
    assert len(texts) == 1
    assert texts[0].startswith(f"rank {dist.get_rank()}: the initial weights of ")
    assert " differ between ranks: parameter 'linear.bias' on rank(s) 1 differs from that on rank 0." in texts[0]


@pytest.mark.spec("DEBUG-04")
@wrapper_apis
@ranks(2)
def test_without_the_check_and_after_a_broadcast_no_rank_warns(api: Api) -> None:
    with said() as texts:
        api.shard(spoiled(1))
        with minifsdp.debug("weights"):
            api.shard(spoiled(1), sync_module_states=True)
    assert texts == []


@pytest.mark.spec("DEBUG-04")
@both_apis
@ranks(2)
def test_replicated_weights_are_compared(api: Api) -> None:
    with minifsdp.debug("weights"), said() as texts:
        api.shard(spoiled(1), strategy=NO_SHARD)
    assert [text.count("'linear.bias' on rank(s) 1") for text in texts] == [1]


@pytest.mark.spec("DEBUG-04")
@both_apis
@pytest.mark.parametrize(("rank", "named"), [(0, "1, 2, 3"), (3, "3")])
@ranks(4)
def test_hybrid_mesh_warns_on_every_rank(api: Api, rank: int, named: str) -> None:
    with minifsdp.debug("weights"), said() as texts:
        api.shard(spoiled(rank), strategy=HYBRID_SHARD)
    assert [f"'linear.bias' on rank(s) {named} differs from that on rank 0" in text for text in texts] == [True]


@pytest.mark.spec("DEBUG-04")
@all_apis
@pytest.mark.parametrize("bit", ["lowest", "sign"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@ranks(2)
def test_one_different_bit_is_reported_and_nan_equals_itself(api: Api, dtype: torch.dtype, bit: str) -> None:
    model = seeded().to(dtype)
    with torch.no_grad():
        model.enter.weight.fill_(float("nan"))
    last, far = model.leave.bias, torch.full((1,), 9.0, dtype=dtype, device=device())
    other = -last[-1:] if bit == "sign" else torch.nextafter(last[-1:], far)
    on_rank(1, lambda: last[-1:].copy_(other))
    with minifsdp.debug("weights"), said() as texts:
        api.shard(model)
    assert [text.count("on rank(s) 1") for text in texts] == [1]
    assert "'leave.bias'" in texts[0]


@pytest.mark.spec("DEBUG-04")
@pytest.mark.parametrize(
    ("api", "dtype"),
    [
        *((FULLY_SHARD, dtype) for dtype in (torch.bool, torch.int16, torch.int64)),
        *((api, dtype) for api in ALL_APIS for dtype in (torch.float8_e4m3fn, torch.complex64)),
    ],
    ids=str,
)
@ranks(2)
def test_weights_that_differ_between_ranks_are_named_in_any_dtype(api: Api, dtype: torch.dtype) -> None:
    layer = nn.Module()
    values = torch.tensor([0, 1, 0, 1] if dist.get_rank() == 0 else [1, 0, 0, 1], device=device())
    layer.table = nn.Parameter(values.to(dtype), requires_grad=False)
    with minifsdp.debug("weights"), said() as texts:
        api.unit(layer)
    assert ["parameter 'table' on rank(s) 1 differs" in text for text in texts] == [True]
