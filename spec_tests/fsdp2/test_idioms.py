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
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable import replicate
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from spec_tests.harness import ranks
from spec_tests.models.modules import WIDTH, Block, seeded
from spec_tests.models.running import Wire, batch, iterate, loss_of
from spec_tests.models.sharding import line_mesh, sharded
from spec_tests.models.values import assert_same, full_gradients, full_values, mean_gradients
from spec_tests.subject import FSDPModule, fully_shard, register_fsdp_forward_method, trace

# --- shards as tensors ---


def local(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local()


@pytest.mark.spec("FS2-SD-01")
@ranks(2)
def test_each_rank_can_save_its_shards_with_torch_save() -> None:
    model = sharded()
    iterate(model)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for name, value in model.state_dict().items():
        assert torch.equal(local(loaded[name]), local(value)), name


@pytest.mark.spec("FS2-SD-01", "FS2-06")
@pytest.mark.parametrize("rows", [5, 1])
@ranks(2)
def test_a_shard_can_be_copied_alone_and_a_copy_is_not_larger_than_the_shard(rows: int) -> None:
    model = fully_shard(seeded(lambda: nn.Linear(3, rows)))
    for parameter in model.parameters():
        twin = copy.deepcopy(parameter)
        assert torch.equal(local(twin), local(parameter))
        # `torch.save` and staging copy the whole storage.
        assert local(twin).untyped_storage().nbytes() == local(parameter).numel() * 4
        with torch.no_grad():
            twin.add_(1)
        assert not torch.equal(twin.full_tensor(), parameter.full_tensor())


@pytest.mark.spec("FS2-SD-01")
@ranks(2)
def test_shard_stays_valid_after_its_model_is_deleted() -> None:
    model = sharded()
    expected = full_values(model)
    state = model.state_dict()
    del model
    assert_same({name: value.full_tensor() for name, value in state.items()}, expected, bitwise=True)


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


# --- counting collectives, unsharding manually ---


@pytest.mark.spec("NEW-19", "FS2-PREF-06")
@ranks(2)
def test_first_iteration_has_as_many_collectives_as_later_iterations() -> None:
    model = sharded()
    seen = []
    for step in range(2):
        with Wire() as forward:
            loss = loss_of(model(batch(step)))
        with Wire() as backward:
            loss.backward()
        seen.append((len(forward.sent), len(backward.sent)))
    # Five units: backward reduces all of them, and all-gathers all except the root.
    assert seen == [(5, 4 + 5)] * 2


@pytest.mark.spec("FS2-19", "CTOR-11")
@pytest.mark.parametrize("is_async", [True, False])
@ranks(2)
def test_units_unsharded_before_root_are_not_all_gathered_again(is_async: bool) -> None:
    model = sharded()
    with trace.record() as recorder:
        handles = [block.unshard(async_op=is_async) for block in model.blocks]
        model.unshard()
        for handle in handles:
            if handle is not None:
                handle.wait()
        assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
        output = model(batch())
    assert len(recorder.order("AG")) == 5
    assert torch.equal(output, seeded()(batch()))


@pytest.mark.spec("FS2-19")
@ranks(2)
def test_changed_unsharded_units_are_all_gathered_again() -> None:
    model, plain = sharded(), seeded()
    own = [list(block.parameters()) for block in model.blocks]
    for block in model.blocks:
        block.unshard()
    with torch.no_grad():
        for shards, block in zip(own, plain.blocks, strict=True):
            for shard, whole in zip(shards, block.parameters(), strict=True):
                shard.mul_(2)
                whole.mul_(2)
    assert torch.equal(model(batch()), plain(batch()))


# --- the modules that fully_shard accepts ---


class Encoder(nn.Module):
    """Has no forward, only a method with another name."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def encode(self, x: Tensor) -> Tensor:
        """The method that the test registers."""
        return self.layer(x)


@pytest.mark.spec("NEW-13", "FS2-25")
@ranks(2)
def test_registered_method_all_gathers_module_without_forward() -> None:
    model, plain = fully_shard(seeded(Encoder)), seeded(Encoder)
    register_fsdp_forward_method(model, "encode")
    assert torch.equal(model.encode(batch()), plain.encode(batch()))
    assert (model.encode.__name__, model.encode.__doc__, model.encode.__self__) == (
        "encode",
        plain.encode.__doc__,
        model,
    )


class Chain(nn.ModuleList):
    """A `ModuleList` with a forward."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = layer(x)
        return x


@pytest.mark.spec("FS2-25")
@ranks(2)
def test_list_of_modules_with_a_forward_is_accepted() -> None:
    def make() -> Chain:
        return Chain([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])

    model, plain = fully_shard(seeded(make)), seeded(make)
    loss_of(model(batch())).backward()
    assert_same(full_gradients(model), mean_gradients(plain), bitwise=False)


class TwoHeads(nn.Module):
    """The last layer and the list of heads are never called; forward uses a weight and the list's elements."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm = Block(), nn.LayerNorm(WIDTH)
        self.heads = nn.ModuleList([nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 3)])
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.body(x))
        return F.linear(x, self.last.weight, self.last.bias) + self.heads[0](x) * self.heads[1](x)


@pytest.mark.spec("NEW-04", "FS2-25")
@pytest.mark.parametrize("reshard_after_forward", [True, False, None])
@ranks(2)
def test_group_trains_if_some_of_its_modules_are_not_called(reshard_after_forward: bool | None) -> None:
    model, plain = seeded(TwoHeads), seeded(TwoHeads)
    options: dict[str, Any] = {"reshard_after_forward": reshard_after_forward}
    fully_shard(model.body, **options)
    fully_shard([model.norm, model.heads, model.last], **options)
    fully_shard(model, **options)
    for step in range(2):
        model.zero_grad()
        loss_of(model(batch(step))).backward()
        assert_same(full_gradients(model), mean_gradients(plain, [step]), bitwise=False)
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())


# --- in combination with other parallelisms ---


@pytest.mark.spec("FS2-09")
@ranks(2)
def test_replicated_module_stays_replicated() -> None:
    model, plain = seeded(), seeded()
    replicate(model.blocks[0])
    for block in model.blocks[1:]:
        fully_shard(block)
    fully_shard(model)
    loss_of(model(batch())).backward()
    replicated = {name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)}
    assert replicated == {f"blocks.0.{name}" for name, _ in plain.blocks[0].named_parameters()}
    assert_same(full_gradients(model), mean_gradients(plain), bitwise=False)


@pytest.mark.spec("FS2-09")
@ranks(2)
def test_replicate_does_not_change_sharded_blocks() -> None:
    model, plain = seeded(), seeded()
    for block in model.blocks:
        fully_shard(block)
    replicate(model)
    loss_of(model(batch())).backward()
    assert all(isinstance(parameter, DTensor) for parameter in model.blocks.parameters())
    assert_same(full_gradients(model), mean_gradients(plain), bitwise=False)


@pytest.mark.spec("FS2-11")
@ranks(2)
def test_replicate_refuses_a_module_that_is_sharded() -> None:
    model = fully_shard(seeded(), mesh=line_mesh())
    with pytest.raises(RuntimeError, match="fully_shard"):
        replicate(model)
    assert isinstance(model, FSDPModule) and dist.get_world_size() == 2


# --- modules that call themselves ---


class Descends(nn.Module):
    """Calls itself recursively, and uses its parameters again after the inner call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.block = nn.Linear(WIDTH, WIDTH), Block()

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        if depth:
            x = self(torch.tanh(self.layer(x)), depth - 1)
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
    if method == "generate":
        register_fsdp_forward_method(model, method)
    outer = model if is_root else fully_shard(nn.Sequential(model))
    name = "forward" if method == "forward" else "generate"
    for step in range(2):
        outer.zero_grad()
        plain.zero_grad()
        output = outer(batch(step)) if name == "forward" else model.generate(batch(step))
        loss_of(output).backward()
        mean: dict[str, Tensor] = {}
        for rank in range(2):
            plain.zero_grad()
            loss_of(getattr(plain, name)(batch(step, rank))).backward()
            for key, parameter in plain.named_parameters():
                mean[key] = mean.get(key, 0) + parameter.grad / 2
        assert_same(full_gradients(model), mean, bitwise=False)
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())


@pytest.mark.spec("NEW-15", "NEW-13")
@pytest.mark.parametrize("method", ["forward", "generate"])
@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
@ranks(2)
def test_call_after_an_exception_in_a_recursive_call_is_an_outer_call(error: type[BaseException], method: str) -> None:
    """Defect: after Ctrl-C, for which PyTorch runs no forward hook, the next call continues the interrupted one."""

    def fail(*_: Any) -> None:
        raise error

    model, plain = seeded(Descends), seeded(Descends)
    fully_shard(model.block)
    fully_shard(model)
    register_fsdp_forward_method(model, "generate")
    hook = model.block.register_forward_pre_hook(fail)
    with pytest.raises(error):
        model(batch()) if method == "forward" else model.generate(batch())
    hook.remove()
    for _ in range(2):
        model.zero_grad()
        loss_of(model(batch())).backward()
        assert_same(full_gradients(model), mean_gradients(plain), bitwise=False)


class Retries(nn.Module):
    """Calls itself recursively, and computes without the result if the inner call fails."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.block = nn.Linear(WIDTH, WIDTH), Block()

    def forward(self, x: Tensor, depth: int = 1) -> Tensor:
        if not depth:
            raise ZeroDivisionError
        hidden = self.layer(x)
        with suppress(ZeroDivisionError):
            hidden = self(hidden, depth - 1)
        return self.block(self.layer(hidden))


@pytest.mark.spec("NEW-15", "FS2-13")
@pytest.mark.parametrize("reshard_after_forward", [True, None])
@ranks(2)
def test_a_module_may_handle_an_exception_of_its_recursive_call(reshard_after_forward: bool | None) -> None:
    model, plain = seeded(Retries), seeded(Retries)
    fully_shard(model.block)
    fully_shard(model, reshard_after_forward=reshard_after_forward)
    for _ in range(2):
        model.zero_grad()
        loss_of(model(batch())).backward()
        assert_same(full_gradients(model), mean_gradients(plain), bitwise=False)
