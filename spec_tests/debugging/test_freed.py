"""A freed unsharded parameter that the program still refers to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import minifsdp
from spec_tests.debugging.faults import said
from spec_tests.harness import ranks
from spec_tests.models.apis import FULLY_SHARD, ORIGINALS, Api, all_apis
from spec_tests.models.modules import Stack
from spec_tests.models.running import batch, iterate
from spec_tests.models.sharding import sharded

REFUSED = r"rank \d: aten\.{}\.\w+ reads an unsharded parameter of unit 'blocks\.1', or a view of one, of shape \({}\)"


def keeping(model: Stack, kept: list[Tensor]) -> Stack:
    """Adds a forward hook to the layer of a block. The hook keeps the weight, and a view of it."""

    def keep(layer: Any, inputs: Any, output: Tensor) -> None:
        kept.extend([layer.weight, layer.weight.t()])

    model.blocks[1].linear.register_forward_hook(keep)
    return model


@pytest.mark.spec("DEBUG-13")
@all_apis
@pytest.mark.parametrize("grad", [True, False])
@ranks(2)
def test_reading_a_freed_weight_or_a_view_of_it_raises_an_error(api: Api, grad: bool) -> None:
    kept: list[Tensor] = []
    model = api.shard(keeping(Stack(), kept))
    iterate(model)
    kept.clear()
    with minifsdp.debug("memory"):
        with torch.set_grad_enabled(grad):
            model(batch())
        weight, view = kept
        shape = ", ".join(map(str, weight.shape))
        with pytest.raises(RuntimeError, match=REFUSED.format("sum", shape)):
            weight.sum()
        with pytest.raises(RuntimeError, match=REFUSED.format("mm", ".*")):
            view @ torch.ones(weight.shape[0], 1)
        with pytest.raises(RuntimeError, match=REFUSED.format("t", shape)):
            weight.t()
        # Training continues.
        iterate(model)


@pytest.mark.spec("DEBUG-13")
@ranks(2)
def test_kept_weight_can_be_read_while_its_unit_is_unsharded() -> None:
    kept: list[Tensor] = []
    model: Any = sharded(keeping(Stack(), kept))
    with minifsdp.debug("memory"), said() as warnings:
        model(batch())
        model.blocks[1].unshard()
        assert torch.equal(kept[0], model.blocks[1].linear.weight)
        model.blocks[1].reshard()
    assert warnings == []


@pytest.mark.spec("DEBUG-13")
@pytest.mark.parametrize("api", [ORIGINALS, FULLY_SHARD], ids=str)
@pytest.mark.not_simulated("the compiler would trace the simulation itself")
@ranks(2)
def test_compiled_model_trains_with_the_memory_check(api: Api) -> None:
    model = api.shard()
    compiled = torch.compile(model, backend="eager")
    with minifsdp.debug("memory"):
        compiled(batch()).sum().backward()
    assert any(p.grad is not None for p in model.parameters())
