"""Calls of units and other modules, the parameters of a module in forward, and accumulation over several passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from spec_tests.checkpoint.refusals import refused
from spec_tests.harness import device, ranks
from spec_tests.models.gradients import assert_trains_like
from spec_tests.models.modules import seeded
from spec_tests.models.running import batch
from spec_tests.models.sharding import wrapped
from spec_tests.subject import FullyShardedDataParallel as FSDP
from spec_tests.subject import ShardingStrategy, trace

FLAT_STRATEGIES = FULL_SHARD, SHARD_GRAD_OP, NO_SHARD = [*ShardingStrategy][:3]
flat_or_original = pytest.mark.parametrize("keep", [False, True], ids=["flat", "original"])

# --- a submodule that is not a unit ---


BEFORE: dict[str, Callable[[nn.Module], object]] = {
    "nothing": lambda model: None,
    "a forward": lambda model: model(batch()),
    "an evaluation": torch.no_grad()(lambda model: model(batch())),
    "an iteration": lambda model: model(batch()).sum().backward(),
}


@pytest.mark.spec("FWD-01", "NAMES-10")
@pytest.mark.parametrize("strategy", FLAT_STRATEGIES)
@pytest.mark.parametrize("before", list(BEFORE))
@flat_or_original
@ranks(2)
def test_direct_call_of_unwrapped_part_raises_with_remedy(keep: bool, before: str, strategy: ShardingStrategy) -> None:
    stays_unsharded = strategy is NO_SHARD and not keep and before != "nothing"
    if stays_unsharded or (keep and strategy is SHARD_GRAD_OP and before == "a forward"):
        # The parameters can be used. A test below covers this case.
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
    assert_trains_like(model)


@pytest.mark.spec("FWD-01")
@pytest.mark.parametrize("strategy", [FULL_SHARD, NO_SHARD])
@ranks(2)
def test_original_parameters_with_a_coincidentally_correct_shape_are_refused(strategy: ShardingStrategy) -> None:
    # A shard of one element broadcasts, and with NO_SHARD every shape is right, so no other error would occur.
    options: Any = {"sharding_strategy": strategy, "use_orig_params": True, "device_id": device()}
    model = FSDP(nn.LayerNorm(2, bias=False), **options)
    with refused(RuntimeError, "parameter 'weight'", "wrap that part"):
        model.module(torch.ones(3, 2, device=device()))
    model(torch.ones(3, 2, device=device())).sum().backward()


@pytest.mark.spec("FWD-01", "ORIG-09")
@pytest.mark.parametrize(("strategy", "keep"), [(SHARD_GRAD_OP, True), (NO_SHARD, False)])
@ranks(2)
def test_parameters_that_stay_unsharded_may_be_used_outside_the_wrapper_forward(
    strategy: ShardingStrategy, keep: bool
) -> None:
    def loss(model: Any, x: Tensor) -> Tensor:
        return model(x).sum() + getattr(model, "module", model).enter(x).sum()

    assert_trains_like(wrapped(sharding_strategy=strategy, use_orig_params=keep), loss=loss)


# --- a submodule that is a unit ---


@pytest.mark.spec("FWD-02")
@pytest.mark.parametrize("strategy", FLAT_STRATEGIES)
@flat_or_original
@ranks(2)
def test_inner_unit_trains_alone_between_steps_of_root(keep: bool, strategy: ShardingStrategy) -> None:
    plain, layers = (seeded(lambda: nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2))) for _ in range(2))
    options: Any = {"sharding_strategy": strategy, "use_orig_params": keep}
    layers[0] = FSDP(layers[0], **options)
    model = FSDP(layers, **options)
    for units, loss in [
        ({"", "0"}, lambda each, x: each(x).square().mean()),
        ({"0"}, lambda each, x: each[0](x).square().mean()),
    ] * 2:
        with trace.record() as recorder:
            assert_trains_like(model, plain, loss=loss)
        assert {event.unit for event in recorder.events if event.kind == "F"} == units


# --- the parameters that a module has in forward ---


@pytest.mark.spec("FWD-04", "ORIG-04")
@pytest.mark.parametrize("strategy", FLAT_STRATEGIES)
@flat_or_original
@pytest.mark.not_simulated("it marks parameters, and the package keeps marks on views")
@ranks(2)
def test_in_forward_and_backward_parameters_are_plain_views_of_one_flat_tensor(
    keep: bool, strategy: ShardingStrategy
) -> None:
    layer, values = seeded(lambda: nn.Linear(6, 6)), seeded(lambda: nn.Linear(6, 6))
    num_looks = 0

    def look(*_: Any) -> None:
        nonlocal num_looks
        num_looks += 1
        for tensor, value, offset in ((layer.weight, values.weight, 0), (layer.bias, values.bias, 36)):
            assert type(tensor) is Tensor, "a plain tensor, not a parameter"
            assert tensor.storage_offset() == offset
            assert torch.equal(tensor, value)
            assert tensor.requires_grad
        assert layer.weight._base is layer.bias._base is not None

    layer.register_forward_hook(lambda *_: look())
    layer.register_full_backward_pre_hook(look)
    model = FSDP(nn.Sequential(layer), sharding_strategy=strategy, use_orig_params=keep)
    model(batch().requires_grad_()).sum().backward()
    assert num_looks == 2
    with FSDP.summon_full_params(model):
        assert len({parameter.untyped_storage().data_ptr() for parameter in model.parameters()}) == 1


# --- changes in between ---


@pytest.mark.spec("FWD-05")
@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP])
@flat_or_original
@ranks(2)
def test_parameter_change_in_forward_is_lost(keep: bool, strategy: ShardingStrategy) -> None:
    def double(layer: nn.Module, *_: Any) -> None:
        # Without autograd's knowledge. Otherwise autograd would raise an error in backward.
        layer.weight.data.mul_(2.0)

    plain = seeded()
    plain.blocks[1].linear.register_forward_hook(double)
    model = wrapped(plain, use_orig_params=keep, sharding_strategy=strategy)
    loss = model(batch()).square().mean()
    assert_close(model.state_dict(), seeded().state_dict(), rtol=0, atol=0)
    loss.backward()
    if strategy is FULL_SHARD:
        # Backward all-gathers again, so all gradients use the unchanged weight, also those below the changed block.
        model.zero_grad()
        assert_trains_like(model)


# --- several forwards, several backwards ---


@pytest.mark.spec("FWD-06")
@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize("strategy", FLAT_STRATEGIES)
@ranks(2)
def test_several_forwards_before_one_backward_match_the_reference(strategy: ShardingStrategy, evaluates: bool) -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        total = torch.zeros((), device=device())
        for factor in (1, 2, 3):
            total = total + model(factor * x).square().mean()
            if evaluates:
                with torch.no_grad():
                    model(x)
        return total

    assert_trains_like(wrapped(sharding_strategy=strategy), loss=loss)
    assert_trains_like(FSDP(seeded(), sharding_strategy=strategy), loss=loss)


@pytest.mark.spec("FWD-06")
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("strategy", FLAT_STRATEGIES)
@flat_or_original
@ranks(2)
def test_evaluation_before_a_backward_with_recomputation_changes_nothing(
    use_reentrant: bool, strategy: ShardingStrategy, keep: bool
) -> None:
    class Recomputes(nn.Linear):
        """Recomputes inside its forward. The reentrant one looks up the parameters by name in a nested backward."""

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(lambda y: torch.tanh(super(Recomputes, self).forward(y)), x, use_reentrant=use_reentrant)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        output = model(x)
        with torch.no_grad():
            model(x)
        return output.square().mean()

    plain, model = (seeded(lambda: nn.Sequential(nn.Linear(6, 6), Recomputes(6, 6))) for _ in range(2))
    options: Any = {"sharding_strategy": strategy, "use_orig_params": keep}
    model[1] = FSDP(model[1], **options)
    assert_trains_like(FSDP(model, **options), plain, loss=loss)


@pytest.mark.spec("FWD-08", "ORIG-08", "ORIG-09")
@pytest.mark.parametrize(("caller", "set_to_none"), [("model", False), ("optimizer", True), ("model", True)])
@pytest.mark.parametrize("is_unsharded", [False, True])
@pytest.mark.parametrize("strategy", FLAT_STRATEGIES)
@flat_or_original
@ranks(2)
def test_zero_grad_clears_the_gradients_of_every_unit(
    keep: bool, strategy: ShardingStrategy, is_unsharded: bool, caller: str, set_to_none: bool
) -> None:
    model = wrapped(sharding_strategy=strategy, use_orig_params=keep)
    owned = list(model.parameters())
    cleared = torch.optim.SGD(owned, lr=1.0) if caller == "optimizer" else model

    def loss(each: nn.Module, x: Tensor) -> Tensor:
        output = each(x)
        if each is model:
            # After a forward, modules have unsharded parameters, and the optimizer's parameters have the gradients.
            cleared.zero_grad(set_to_none=set_to_none)
            if set_to_none:
                assert [parameter.grad for parameter in owned] == [None] * len(owned)
            assert not any(parameter.grad is not None and parameter.grad.any() for parameter in owned)
        return (output if is_unsharded else each(x)).square().mean()

    model(batch()).sum().backward()
    assert_trains_like(model, loss=loss)
