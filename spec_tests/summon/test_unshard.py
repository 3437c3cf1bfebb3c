"""Unsharding and resharding manually, also around changes of the shards and around a forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from spec_tests.harness import ranks
from spec_tests.models.gradients import assert_trains_like
from spec_tests.models.modules import seeded
from spec_tests.models.running import batch, iterate
from spec_tests.models.sharding import sharded
from spec_tests.subject import UnshardHandle, fully_shard, trace


def sharded_names(model: Any) -> set[str]:
    """The names of the parameters that are registered as shards."""
    return {name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)}


ROOT = {"enter.weight", "enter.bias", "leave.weight", "leave.bias"}
BLOCK_2 = {"blocks.2.linear.weight", "blocks.2.linear.bias"}


@pytest.mark.spec("FS2-19")
@ranks(2)
def test_unshard_and_reshard_change_only_own_params_of_group() -> None:
    model, plain = sharded(), seeded()
    before = dict(model.named_parameters())
    iterate(model)
    model.zero_grad()
    model.unshard()
    assert sharded_names(model) == before.keys() - ROOT
    assert torch.equal(model.enter.weight, plain.enter.weight)
    model.blocks[2].unshard()
    assert sharded_names(model) == before.keys() - ROOT - BLOCK_2
    assert torch.equal(model.blocks[2].linear.weight, plain.blocks[2].linear.weight)
    model.reshard()
    assert sharded_names(model) == before.keys() - BLOCK_2, "nested groups are not touched"
    model.blocks[2].reshard()
    model.blocks[2].reshard()
    assert all(parameter is before[name] for name, parameter in model.named_parameters()), "same objects"
    assert_trains_like(model)


@pytest.mark.spec("FS2-20")
@ranks(2)
def test_only_an_asynchronous_unshard_returns_a_handle() -> None:
    model = sharded()
    assert model.unshard() is None
    model.reshard()
    waiting = model.unshard(async_op=True)
    assert isinstance(waiting, UnshardHandle)
    assert waiting.wait() is None
    assert ROOT.isdisjoint(sharded_names(model))
    waiting.wait()
    model.reshard()
    waiting.wait()
    assert sharded_names(model) >= ROOT
    model.unshard(async_op=True)
    assert_trains_like(model)


@pytest.mark.spec("FS2-20")
@ranks(2)
def test_a_module_without_parameters_can_be_unsharded_too() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    fully_shard(model[0])
    fully_shard(model)
    assert model.unshard() is None
    model.unshard(async_op=True).wait()
    model.reshard()


@pytest.mark.spec("FS2-19")
@ranks(2)
def test_units_that_are_unsharded_by_hand_have_the_new_values_after_a_change() -> None:
    """Defect: the module uses the values that were all-gathered before the change."""
    model, plain = sharded(), seeded()
    shards = [parameter for block in model.blocks for parameter in block.parameters()]
    for _ in range(3):
        for block, same in zip(model.blocks, plain.blocks, strict=True):
            block.unshard()
            assert torch.equal(block.linear.weight, same.linear.weight)
        with torch.no_grad():
            for parameter in (*shards, *plain.blocks.parameters()):
                parameter.mul_(2)
    assert torch.equal(model(batch()), plain(batch()))


@pytest.mark.spec("FS2-19", "FS2-SD-03")
@ranks(2)
def test_unshard_after_an_assigning_load_shows_the_new_values() -> None:
    """Defect: tensors that users assigned in place of the shards are detected in forward only, and not in `unshard`."""
    model = sharded()
    iterate(model)
    doubled = {name: (2 * value).detach() for name, value in model.state_dict().items()}
    model.load_state_dict(doubled, assign=True)
    for module, layer in ((model, "enter"), (model.blocks[1], "blocks.1.linear")):
        module.unshard()
        weight = model.get_submodule(layer).weight
        assert not isinstance(weight, DTensor)
        assert torch.equal(weight, 2 * seeded().get_submodule(layer).weight)


@pytest.mark.spec("FS2-13")
@ranks(2)
def test_changed_local_tensor_is_all_gathered() -> None:
    model, plain = sharded(reshard_after_forward=False), seeded()
    with torch.no_grad():
        # After this forward, all parameters are unsharded, and the changes below make those values stale.
        model(batch())
        model.reshard()
        for parameter, whole in zip(model.parameters(), plain.parameters(), strict=True):
            if isinstance(parameter, DTensor):
                parameter._local_tensor.mul_(2)
                whole.mul_(2)
        assert torch.equal(model(batch()), plain(batch()))


@pytest.mark.spec("FS2-19", "CTOR-11")
@pytest.mark.parametrize("is_async", [True, False])
@ranks(2)
def test_units_unsharded_before_root_are_not_all_gathered_again(is_async: bool) -> None:
    model = sharded()
    with trace.record() as recorder:
        handles = [block.unshard(async_op=is_async) for block in model.blocks]
        model.unshard()
        if is_async:
            for handle in handles:
                handle.wait()
        assert sharded_names(model) == set()
        assert torch.equal(model(batch()), seeded()(batch()))
    assert len(recorder.order("AG")) == 5, "of the root and of four blocks"


@pytest.mark.spec("FS2-19", "GRAD-04")
@ranks(2)
def test_a_conversion_of_unsharded_units_converts_their_shards() -> None:
    model, plain = sharded(), seeded().double()
    for module in (model, *model.blocks):
        module.unshard()
    model.double()
    assert {(type(parameter.data), parameter.dtype) for parameter in model.parameters()} == {(DTensor, torch.float64)}
    torch.testing.assert_close(model(batch().double()), plain(batch().double()))


@pytest.mark.spec("FS2-19", "CTOR-11")
@ranks(2)
def test_a_unit_that_ran_alone_and_is_unsharded_by_hand_is_not_all_gathered_again_by_a_larger_root() -> None:
    model: Any = seeded()
    fully_shard(model.blocks[0])
    iterate(model.blocks[0])
    model.blocks[0].unshard()
    fully_shard(model)
    with trace.record() as recorder, torch.no_grad():
        assert torch.equal(model(batch()), seeded()(batch()))
    assert recorder.order("AG") == ["AG"], "of the root"


@pytest.mark.spec("FS2-13", "CTOR-11")
@ranks(2)
def test_a_unit_that_ran_alone_is_freed_after_its_forward_in_a_larger_root() -> None:
    model = sharded()
    iterate(model.blocks[0])
    with trace.record() as recorder:
        model(batch())
    assert [event for event in recorder.order("AG", "FREE") if "blocks.0" in event] == ["AG blocks.0", "FREE blocks.0"]
