"""Idioms of programs written for torch: saving a shard, unsharding manually, unusual groups, other parallelisms.

Each idiom works in torch and failed in an earlier version of minifsdp.
"""

from __future__ import annotations

import copy
import io
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._composable import replicate
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from spec_tests.harness import ranks
from spec_tests.models.apis import FULLY_SHARD
from spec_tests.models.gradients import assert_mean_gradients
from spec_tests.models.modules import Block, seeded
from spec_tests.models.running import batch
from spec_tests.subject import FSDPModule, fully_shard, register_fsdp_forward_method

# --- shards as tensors ---


@pytest.mark.spec("FS2-SD-01")
@ranks(2)
def test_each_rank_can_save_its_shards_with_torch_save_after_the_model_is_deleted() -> None:
    model = FULLY_SHARD.shard()
    model(batch()).sum().backward()
    expected, state, file = FULLY_SHARD.values(model), model.state_dict(), io.BytesIO()
    del model
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for name, value in state.items():
        assert torch.equal(value.full_tensor(), expected[name])
        assert torch.equal(loaded[name].to_local(), value.to_local()), name


@pytest.mark.spec("FS2-SD-01", "FS2-06")
@pytest.mark.parametrize("rows", [5, 1])
@ranks(2)
def test_a_shard_can_be_copied_alone_and_a_copy_is_not_larger_than_the_shard(rows: int) -> None:
    model = fully_shard(seeded(lambda: nn.Linear(3, rows)))
    for parameter in model.parameters():
        twin = copy.deepcopy(parameter)
        assert torch.equal(twin.to_local(), parameter.to_local())
        # `torch.save` and staging copy the whole storage.
        assert twin.to_local().untyped_storage().nbytes() == parameter.to_local().numel() * 4
        with torch.no_grad():
            twin.add_(1)
        assert not torch.equal(twin.full_tensor(), parameter.full_tensor())


# --- the modules that fully_shard accepts ---


class Encoder(nn.Module):
    """Has no forward, only a method with another name."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def encode(self, x: Tensor) -> Tensor:
        """The method that the test registers."""
        return self.layer(x)


@pytest.mark.spec("NEW-13", "FS2-25")
@ranks(2)
def test_registered_method_all_gathers_module_without_forward() -> None:
    model, plain = fully_shard(seeded(Encoder)), seeded(Encoder)
    register_fsdp_forward_method(model, "encode")
    assert torch.equal(model.encode(batch()), plain.encode(batch()))
    method = model.encode
    assert (method.__name__, method.__doc__, method.__self__) == ("encode", plain.encode.__doc__, model)


@pytest.mark.spec("FS2-25")
@ranks(2)
def test_list_of_modules_with_a_forward_is_accepted() -> None:
    class Chain(nn.ModuleList):
        def forward(self, x: Tensor) -> Tensor:
            return self[1](self[0](x))

    model, plain = (seeded(lambda: Chain([nn.Linear(6, 6), nn.Linear(6, 6)])) for _ in range(2))
    assert_mean_gradients(fully_shard(model), plain, bitwise=False)


class TwoHeads(nn.Module):
    """The last layer and the list of heads are never called; forward uses a weight and the list's elements."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm = Block(), nn.LayerNorm(6)
        self.heads = nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3)])
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.body(x))
        return F.linear(x, self.last.weight, self.last.bias) + self.heads[0](x) * self.heads[1](x)


@pytest.mark.spec("NEW-04", "FS2-25")
@pytest.mark.parametrize("reshard_after_forward", [True, False])
@ranks(2)
def test_group_trains_if_some_of_its_modules_are_not_called(reshard_after_forward: bool) -> None:
    model, plain = seeded(TwoHeads), seeded(TwoHeads)
    options: dict[str, Any] = {"reshard_after_forward": reshard_after_forward}
    fully_shard(model.body, **options)
    fully_shard([model.norm, model.heads, model.last], **options)
    fully_shard(model, **options)
    assert_mean_gradients(model, plain, bitwise=False)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())


# --- in combination with other parallelisms ---


@pytest.mark.spec("FS2-09")
@pytest.mark.parametrize("replicates_root", [False, True])
@ranks(2)
def test_replicated_modules_stay_replicated_and_sharded_ones_sharded(replicates_root: bool) -> None:
    model, plain = seeded(), seeded()
    if replicates_root:
        for block in model.blocks:
            fully_shard(block)
        replicate(model)
    else:
        replicate(model.blocks[0])
        for module in (*model.blocks[1:], model):
            fully_shard(module)
    replicated = ("enter.", "leave.") if replicates_root else "blocks.0."
    assert_mean_gradients(model, plain, bitwise=False)
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor) is not name.startswith(replicated)


@pytest.mark.spec("FS2-11")
@ranks(2)
def test_replicate_refuses_a_module_that_is_sharded() -> None:
    model = fully_shard(seeded())
    with pytest.raises(RuntimeError, match="fully_shard"):
        replicate(model)
    assert isinstance(model, FSDPModule)


# --- modules that call themselves ---


class Descends(nn.Module):
    """Calls itself recursively, and uses its parameters again after the inner call, even if the inner call fails."""

    fails = False

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.block = nn.Linear(6, 6), Block()

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        if not depth and self.fails:
            raise OverflowError
        x = self.layer(x)
        if depth:
            with suppress(OverflowError):
                x = self(torch.tanh(x), depth - 1)
        return self.block(self.layer(x))

    def generate(self, x: Tensor) -> Tensor:
        return self.layer(self(x) + self(2 * x))


@pytest.mark.spec("FS2-13", "NEW-13")
@pytest.mark.parametrize("reshard_after_forward", [True, None])
@pytest.mark.parametrize("method", ["forward", "generate"])
@pytest.mark.parametrize("is_root", [True, False])
@ranks(2)
def test_a_module_may_call_itself(is_root: bool, method: str, reshard_after_forward: bool | None) -> None:
    model, plain = seeded(Descends), seeded(Descends)
    fully_shard(model.block)
    fully_shard(model, reshard_after_forward=reshard_after_forward)
    register_fsdp_forward_method(model, "generate")
    outer = model if is_root else fully_shard(nn.Sequential(model))

    def loss(net: Any, x: Tensor) -> Tensor:
        called = outer if net is model else net
        return (called(x) if method == "forward" else net.generate(x)).square().mean()

    for step in range(2):
        assert_mean_gradients(model, plain, [step], loss=loss, bitwise=False)
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())


@pytest.mark.spec("NEW-15", "NEW-13", "FS2-13")
@pytest.mark.parametrize(("error", "method"), [(ZeroDivisionError, "forward"), (KeyboardInterrupt, "generate")])
@ranks(2)
def test_call_after_an_exception_in_a_recursive_call_is_an_outer_call(error: type[BaseException], method: str) -> None:
    """Defect: after Ctrl-C, for which PyTorch runs no forward hook, the next call continues the interrupted one."""

    def fail(*_: Any) -> None:
        raise error("in the block")

    model, plain = seeded(Descends), seeded(Descends)
    fully_shard(model.block)
    fully_shard(model)
    register_fsdp_forward_method(model, "generate")
    hook = model.block.register_forward_pre_hook(fail)
    with pytest.raises(error, match="in the block"):
        model(batch()) if method == "forward" else model.generate(batch())
    hook.remove()
    assert_mean_gradients(model, plain, bitwise=False)


@pytest.mark.spec("NEW-15", "FS2-13")
@ranks(2)
def test_a_module_may_handle_an_exception_of_its_recursive_call() -> None:
    model, plain = seeded(Descends), seeded(Descends)
    model.fails = plain.fails = True
    fully_shard(model.block)
    fully_shard(model)
    assert_mean_gradients(model, plain, bitwise=False)
