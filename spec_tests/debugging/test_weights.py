"""Weights that differ between ranks when a unit is sharded."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import minifsdp
from spec_tests.debugging.faults import FLAT, FUNCTION, ORIGINALS, each_api, on_rank, said, through
from spec_tests.harness import device, ranks
from spec_tests.models.modules import seeded
from spec_tests.models.sharding import HYBRID_SHARD, NO_SHARD, column_mesh, grid_mesh


def spoiled(rank: int) -> nn.Module:
    """A model in which one rank reverses the values of one bias, so that their sum is the same."""
    model = seeded()
    bias = model.blocks[2].linear.bias
    on_rank(rank, lambda: bias.copy_(bias.flip(0)))
    return model


@pytest.mark.spec("DEBUG-04")
@each_api
@ranks(2)
def test_a_parameter_that_differs_is_named_on_every_rank_with_the_ranks(api: str) -> None:
    with minifsdp.debug("weights"), said() as texts:
        through(api, spoiled(1))
    assert len(texts) == 1
    assert texts[0].startswith(f"rank {dist.get_rank()}: the initial weights of ")
    assert " differ between ranks: parameter 'linear.bias' on rank(s) 1 differs from that on rank 0." in texts[0]


@pytest.mark.spec("DEBUG-04")
@each_api
@ranks(2)
def test_disabled_check_prints_nothing(api: str) -> None:
    with said() as texts:
        through(api, spoiled(1))
    assert texts == []


@pytest.mark.spec("DEBUG-04")
@pytest.mark.parametrize("api", [FLAT, ORIGINALS])
@ranks(2)
def test_synced_weights_give_no_warning(api: str) -> None:
    with minifsdp.debug("weights"), said() as texts:
        through(api, spoiled(1), sync_module_states=True)
    assert texts == []


@pytest.mark.spec("DEBUG-04")
@pytest.mark.parametrize("api", [FLAT, FUNCTION])
@ranks(2)
def test_replicated_weights_are_compared(api: str) -> None:
    options = {"mesh": column_mesh()} if api == FUNCTION else {"sharding_strategy": NO_SHARD}
    with minifsdp.debug("weights"), said() as texts:
        through(api, spoiled(1), **options)
    assert [text.count("'linear.bias' on rank(s) 1") for text in texts] == [1]


@pytest.mark.spec("DEBUG-04")
@pytest.mark.parametrize("api", [FLAT, FUNCTION])
@pytest.mark.parametrize(("rank", "named"), [(0, "1, 2, 3"), (3, "3")])
@ranks(4)
def test_hybrid_mesh_warns_on_every_rank(api: str, rank: int, named: str) -> None:
    options = {"mesh": grid_mesh()} if api == FUNCTION else {"sharding_strategy": HYBRID_SHARD}
    with minifsdp.debug("weights"), said() as texts:
        through(api, spoiled(rank), **options)
    assert [f"'linear.bias' on rank(s) {named} differs from that on rank 0" in text for text in texts] == [True]


@pytest.mark.spec("DEBUG-04")
@each_api
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@ranks(2)
def test_one_different_bit_is_reported_and_nan_equals_itself(api: str, dtype: torch.dtype) -> None:
    model = seeded().to(dtype)
    with torch.no_grad():
        model.enter.weight.fill_(float("nan"))
    last, far = model.leave.bias, torch.full((1,), 9.0, dtype=dtype, device=device())
    on_rank(1, lambda: last[-1:].copy_(torch.nextafter(last[-1:], far)))
    with minifsdp.debug("weights"), said() as texts:
        through(api, model)
    assert [text.count("on rank(s) 1") for text in texts] == [1]
    assert "'leave.bias'" in texts[0]
