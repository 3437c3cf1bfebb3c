"""Calls of units and other modules, the parameters of a module in forward, and accumulation over several passes."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from spec_tests.checkpoint.checkpoints import is_plain
from spec_tests.checkpoint.refusals import refused
from spec_tests.harness import device, ranks
from spec_tests.models.modules import WIDTH, Block, Scale, seeded
from spec_tests.models.running import batch, iterate, loss_of
from spec_tests.models.sharding import FLAT_STRATEGIES, FULL_SHARD, NO_SHARD, SHARD_GRAD_OP, wrapped
from spec_tests.models.values import (
    assert_same,
    full_values,
    mean_gradients,
    named,
    own_names,
)
from spec_tests.models.whole import assert_a_step_uses_the_mean_gradient_alone, assert_step_moves_by, memory_of
from spec_tests.subject import FullyShardedDataParallel, ModuleWrapPolicy, ShardingStrategy, trace

FSDP = FullyShardedDataParallel
flat_or_original = pytest.mark.parametrize("keep", [False, True], ids=["flat", "original"])

# --- a submodule that is not a unit ---


def evaluate(model: nn.Module) -> None:
    with torch.no_grad():
        model(batch(7))


BEFORE: dict[str, Callable[[FSDP], object]] = {
    "nothing": lambda model: None,
    "a forward": lambda model: model(batch()),
    "an evaluation": evaluate,
    "an iteration": iterate,
}


@pytest.mark.spec("FWD-01", "NAMES-10")
@pytest.mark.parametrize("strategy", FLAT_STRATEGIES)
@pytest.mark.parametrize("before", list(BEFORE))
@flat_or_original
@ranks(2)
def test_direct_call_of_unwrapped_part_raises_with_remedy(keep: bool, before: str, strategy: ShardingStrategy) -> None:
    stays_unsharded = strategy is NO_SHARD and not keep and before != "nothing"
    if stays_unsharded or (keep and strategy is SHARD_GRAD_OP and before == "a forward"):
        # The parameters can be used. The test below covers this case.
        return
    model = wrapped(sharding_strategy=strategy, use_orig_params=keep)
    BEFORE[before](model)
    with refused(RuntimeError, "parameter 'enter.", "wrap that part as a unit of its own"):
        model.module.enter(batch())
    with refused(RuntimeError, "parameter 'linear.", "wrap that part as a unit of its own"):
        model.module.blocks[1].module(batch())
    with refused(RuntimeError, "wrap"):
        model.module(batch())
    model.zero_grad()
    assert_a_step_uses_the_mean_gradient_alone(model, seeded())


@pytest.mark.spec("FWD-01")
@pytest.mark.parametrize("strategy", [FULL_SHARD, NO_SHARD])
@ranks(2)
def test_original_parameters_with_a_coincidentally_correct_shape_are_refused(strategy: ShardingStrategy) -> None:
    # A shard of one element broadcasts, and with NO_SHARD every shape is right, so no other error would occur.
    model = FSDP(Scale(2), sharding_strategy=strategy, use_orig_params=True, device_id=device())
    with refused(RuntimeError, "parameter 'weight'", "wrap that part"):
        model.module(torch.ones(3, 2, device=device()))
    model(torch.ones(3, 2, device=device())).sum().backward()


@pytest.mark.spec("FWD-01", "ORIG-09")
@pytest.mark.parametrize(("strategy", "keep"), [(SHARD_GRAD_OP, True), (NO_SHARD, False)])
@ranks(2)
def test_parameters_that_stay_unsharded_may_be_used_outside_the_wrapper_forward(
    strategy: ShardingStrategy, keep: bool
) -> None:
    model, plain = wrapped(sharding_strategy=strategy, use_orig_params=keep), seeded()
    (model(batch()).sum() + model.module.enter(batch()).sum()).backward()
    for rank in range(2):
        x = batch(0, rank)
        ((plain(x).sum() + plain.enter(x).sum()) / 2).backward()
    assert_step_moves_by(model, plain, {name: parameter.grad for name, parameter in plain.named_parameters()})


# --- a submodule that is a unit ---


def pair() -> nn.Module:
    """A model that is trained as a whole and whose first half is also used alone."""
    return nn.Sequential(OrderedDict(encoder=nn.Sequential(Block(), Block()), decoder=nn.Linear(WIDTH, 2)))


@pytest.mark.spec("FWD-02")
@pytest.mark.parametrize("strategy", FLAT_STRATEGIES)
@flat_or_original
@ranks(2)
def test_inner_unit_trains_alone_between_steps_of_root(keep: bool, strategy: ShardingStrategy) -> None:
    plain, model = seeded(pair), seeded(pair)
    options: dict[str, Any] = {"sharding_strategy": strategy, "use_orig_params": keep}
    model.encoder = FSDP(model.encoder, auto_wrap_policy=ModuleWrapPolicy({Block}), **options)
    model = FSDP(model, **options)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    for step in range(4):
        alone = step % 2 == 1
        with trace.record() as recorder:
            output = (model.encoder if alone else model)(batch(step))
        units = {event.unit for event in recorder.events}
        assert units == ({"encoder.0", "encoder.1"} if alone else {"", "encoder.0", "encoder.1"})
        loss_of(output).backward()
        for rank in range(2):
            expected = (plain.encoder if alone else plain)(batch(step, rank))
            if rank == dist.get_rank():
                torch.testing.assert_close(output, expected)
            (loss_of(expected) / 2).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same(full_values(model), named(plain))


# --- a reference that the model keeps ---


class Keeps(nn.Module):
    """Uses a layer's weight through its own reference, which the wrapper cannot detect."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)
        self.kept = [self.layer.weight]

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.kept[0].T


@pytest.mark.spec("FWD-03")
@ranks(2)
def test_parameter_in_a_list_of_its_module_has_current_values_and_gets_a_gradient() -> None:
    model = FSDP(seeded(Keeps))
    (flat,) = model.parameters()
    with torch.no_grad():
        flat.zero_()
    output = model(batch())
    assert not output.any()
    output.sum().backward()
    assert flat.grad is not None and flat.grad.any()


# --- the parameters that a module has in forward ---


@pytest.mark.spec("FWD-04", "ORIG-04")
@pytest.mark.parametrize("strategy", FLAT_STRATEGIES)
@flat_or_original
@pytest.mark.not_simulated("it marks parameters, and the package keeps marks on views")
@ranks(2)
def test_in_forward_and_backward_parameters_are_plain_views_of_one_flat_tensor(
    keep: bool, strategy: ShardingStrategy
) -> None:
    plain = seeded()
    values, seen = named(plain), list[int]()

    def look(index: int) -> None:
        layer = blocks[index].linear
        for name, offset in (("weight", 0), ("bias", WIDTH * WIDTH)):
            tensor = getattr(layer, name)
            assert is_plain(tensor), "a plain tensor, not a parameter"
            assert tensor.storage_offset() == offset
            assert torch.equal(tensor, values[f"blocks.{index}.linear.{name}"])
        assert layer.weight._base is layer.bias._base is not None
        assert layer.weight.requires_grad
        seen.append(index)

    blocks = list(plain.blocks)
    for index, block in enumerate(blocks):

        def in_forward(_: Any, args: Any, output: Tensor, index: int = index) -> None:
            look(index)
            output.register_hook(lambda _: look(index))

        block.linear.register_forward_hook(in_forward)
    model = wrapped(plain, sharding_strategy=strategy, use_orig_params=keep)
    loss_of(model(batch())).backward()
    assert seen == [0, 1, 2, 3, 3, 2, 1, 0]
    with FSDP.summon_full_params(model):
        for names in own_names(seeded()).values():
            assert len({memory_of(model.get_parameter(name)) for name in names}) == 1


# --- changes in between ---


def double(layer: nn.Module) -> None:
    """Changes the weight without autograd's knowledge. Otherwise autograd would raise an error in backward."""
    layer.weight.data.mul_(2.0)


@pytest.mark.spec("FWD-05")
@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP])
@flat_or_original
@ranks(2)
def test_parameter_change_in_forward_is_lost(keep: bool, strategy: ShardingStrategy) -> None:
    plain, model = seeded(), seeded()
    model.blocks[1].linear.register_forward_hook(lambda module, args, output: double(module))
    model = wrapped(model, use_orig_params=keep, sharding_strategy=strategy)
    loss_of(model(batch())).backward()
    assert_same(full_values(model), named(plain), bitwise=True)
    if strategy is FULL_SHARD:
        # Backward all-gathers again, so all gradients use the unchanged weight, also those below the changed block.
        assert_step_moves_by(model, plain, mean_gradients(plain))


# --- several forwards, several backwards ---


@pytest.mark.spec("FWD-06")
@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize("strategy", FLAT_STRATEGIES)
@ranks(2)
def test_several_forwards_before_one_backward_match_the_reference(strategy: ShardingStrategy, evaluates: bool) -> None:
    plain = seeded()
    for model in (wrapped(sharding_strategy=strategy), FSDP(seeded(), sharding_strategy=strategy)):
        losses = []
        for step in range(3):
            losses.append(loss_of(model(batch(step))))
            assert torch.equal(losses[-1], loss_of(plain(batch(step))))
            if evaluates:
                evaluate(model)
        sum(losses).backward()
        # Backward reaches the last forward first.
        assert_step_moves_by(model, plain, mean_gradients(plain, (2, 1, 0)))


@pytest.mark.spec("FWD-06")
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("strategy", FLAT_STRATEGIES)
@flat_or_original
@ranks(2)
def test_evaluation_before_a_backward_with_recomputation_changes_nothing(
    use_reentrant: bool, strategy: ShardingStrategy, keep: bool
) -> None:
    class Recomputes(Block):
        """Recomputes inside its forward. The reentrant one looks up the parameters by name in a nested backward."""

        def forward(self, x: Tensor) -> Tensor:
            return x + checkpoint(lambda y: torch.tanh(self.linear(y)), x, use_reentrant=use_reentrant)

    plain = seeded(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Recomputes(), Recomputes()))
    model = wrapped(copy.deepcopy(plain), sharding_strategy=strategy, use_orig_params=keep)
    loss = loss_of(model(batch()))
    evaluate(model)
    loss.backward()
    assert_step_moves_by(model, plain, mean_gradients(plain))


@pytest.mark.spec("FWD-08", "ORIG-08", "ORIG-09")
@pytest.mark.parametrize(("caller", "set_to_none"), [("model", False), ("optimizer", True), ("model", True)])
@pytest.mark.parametrize("is_unsharded", [False, True])
@pytest.mark.parametrize("strategy", FLAT_STRATEGIES)
@flat_or_original
@ranks(2)
def test_zero_grad_clears_the_gradients_of_every_unit(
    keep: bool, strategy: ShardingStrategy, is_unsharded: bool, caller: str, set_to_none: bool
) -> None:
    plain = seeded()
    model = wrapped(sharding_strategy=strategy, use_orig_params=keep)
    owned = list(model.parameters())
    optimizer = torch.optim.SGD(owned, lr=1.0)
    iterate(model, 5)
    # After a forward, modules have unsharded parameters, and the optimizer's parameters have the gradients.
    loss = loss_of(model(batch())) if is_unsharded else None
    (optimizer if caller == "optimizer" else model).zero_grad(set_to_none=set_to_none)
    assert not any(parameter.grad is not None and parameter.grad.any() for parameter in owned)
    if set_to_none:
        assert [parameter.grad for parameter in owned] == [None] * len(owned)
    (loss_of(model(batch())) if loss is None else loss).backward()
    assert_step_moves_by(model, plain, mean_gradients(plain))
