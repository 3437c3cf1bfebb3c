"""``FSDP_USE_FULL_PREC_IN_EVAL=1``: evaluation mode computes in full precision, training mode in low precision."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from spec_tests.harness import device, ranks
from spec_tests.models.apis import WRAPPED
from spec_tests.models.sharding import FLAT_STRATEGIES, NO_SHARD
from spec_tests.models.values import assert_same
from spec_tests.subject import ShardingStrategy

pytestmark = pytest.mark.spec("FRESH-08")
every_strategy = pytest.mark.parametrize("strategy", FLAT_STRATEGIES)
BF16 = torch.bfloat16
LOW = {"param_dtype": BF16, "reduce_dtype": BF16, "buffer_dtype": BF16}


class Shift(nn.Module):
    """bfloat16 cannot represent the parameters, but it can represent the buffer, which is cast permanently."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.1, 1.37, 16))
        self.shift = nn.Parameter(torch.linspace(0.2, 0.9, 16))
        self.register_buffer("factor", torch.linspace(0.5, 2.375, 16))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight + self.shift) * self.factor


def plain_and_sharded(strategy: ShardingStrategy, precision: Any = LOW, **options: Any) -> tuple[nn.Sequential, Any]:
    # The harness restores the environment after each test.
    os.environ["FSDP_USE_FULL_PREC_IN_EVAL"] = "1"
    plain = nn.Sequential(Shift(), Shift()).to(device())
    options |= {"strategy": strategy, "precision": precision, "device_id": device()}
    return plain, WRAPPED.shard(copy.deepcopy(plain), unit_classes=(Shift,), **options)


def batch() -> Tensor:
    return torch.linspace(0.123, 1.77, 16).to(device())


def backward(model: nn.Module) -> None:
    model(batch()).float().sum().backward()


def unreduced_backward(model: Any) -> None:
    with model.no_sync():
        backward(model)


def is_exact(model: nn.Module, plain: nn.Module) -> bool:
    found, expected = model(batch()), plain(batch())
    return found.dtype is expected.dtype and bool(torch.allclose(found, expected, rtol=1e-6))


BEFORE: dict[str, Any] = {
    "nothing": lambda model: None,
    "backward": backward,
    "unreduced backward": unreduced_backward,
    "forward": lambda model: model(batch()),
    "apply": lambda model: model.apply(id),
}


@pytest.mark.parametrize("with_gradients", [False, True])
@pytest.mark.parametrize("before", BEFORE)
@every_strategy
@ranks(2)
def test_evaluation_is_exact_after_any_earlier_unshard(
    strategy: ShardingStrategy, before: str, with_gradients: bool
) -> None:
    plain, model = plain_and_sharded(strategy, forward_prefetch=True)
    unit = model.module[0].module
    for _ in range(2):
        BEFORE[before](model)
        model.eval()
        with torch.set_grad_enabled(with_gradients):
            assert is_exact(model, plain)
            assert is_exact(model, plain)
        assert unit.factor.dtype is torch.float32, "buffers are in full precision, too"
        model.train()
        assert model(batch()).dtype is BF16
        assert unit.factor.dtype is BF16


@pytest.mark.parametrize("precision", [LOW, {"reduce_dtype": BF16}, LOW | {"keep_low_precision_grads": True}])
@every_strategy
@ranks(2)
def test_a_backward_in_evaluation_mode_does_not_round_its_gradients(
    strategy: ShardingStrategy, precision: dict[str, Any]
) -> None:
    plain, model = plain_and_sharded(strategy, precision)
    backward(model)
    model.zero_grad()
    model.eval()
    backward(model)
    backward(plain)
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    torch.testing.assert_close(WRAPPED.gradients(model), expected, rtol=1e-6, atol=0.0)
    model.zero_grad()
    model.train()
    backward(model)
    rounded = WRAPPED.gradients(model)["0.weight"].float()
    assert not torch.allclose(rounded, expected["0.weight"], rtol=1e-6)


@every_strategy
@ranks(2)
def test_training_mode_of_the_wrapped_module_determines_the_precision(strategy: ShardingStrategy) -> None:
    plain, model = plain_and_sharded(strategy)
    model(batch())
    assert model.training
    model.module.eval()
    assert is_exact(model, plain)
    model.module.train()
    assert not is_exact(model, plain)
    # Switch only one unit to evaluation mode.
    model.module[1].module.eval()
    with torch.no_grad():
        assert model(batch()).dtype is torch.float32


@pytest.mark.parametrize("with_graph", [False, True])
@every_strategy
@ranks(2)
def test_an_evaluation_between_a_forward_and_its_backward_changes_neither(
    strategy: ShardingStrategy, with_graph: bool
) -> None:
    gradients = []
    for is_disturbed in (True, False):
        plain, model = plain_and_sharded(strategy)
        loss = model(batch()).float().sum()
        if is_disturbed:
            model.eval()
            with torch.set_grad_enabled(with_graph):
                assert is_exact(model, plain)
            model.train()
        loss.backward()
        gradients.append(WRAPPED.gradients(model))
    assert_same(*gradients, bitwise=True)


@ranks(2)
def test_one_backward_after_forwards_in_both_modes_gives_the_gradients_of_both() -> None:
    plain, model = plain_and_sharded(NO_SHARD)
    for one in (model, plain):
        one.eval()
        in_evaluation = one(batch()).sum()
        one.train()
        (in_evaluation + one(batch()).float().sum()).backward()
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    # About four operations of the forward in training mode round to bfloat16.
    rounding = 4 * torch.finfo(BF16).eps
    torch.testing.assert_close(WRAPPED.gradients(model), expected, rtol=rounding, atol=0.0)


@pytest.mark.spec("NOSYNC-02")
@every_strategy
@ranks(2)
def test_unreduced_gradients_of_both_modes_are_added_without_rounding(strategy: ShardingStrategy) -> None:
    """In bfloat16, 1 + 1/512 rounds to 1."""
    _, model = plain_and_sharded(strategy)
    nn.init.ones_(model.module[1].module.factor)
    with model.no_sync():
        backward(model)
        model.eval()
        (model(batch()).sum() / 512).backward()
    (model(batch()).sum() / 512).backward()
    shift = WRAPPED.gradients(model)["1.shift"]
    assert torch.equal(shift, torch.full_like(shift, 1 + 2 / 512))


@every_strategy
@ranks(2)
def test_parameters_frozen_during_an_evaluation_keep_the_graph_of_the_last_forward(strategy: ShardingStrategy) -> None:
    _, model = plain_and_sharded(strategy)
    model.eval()
    with torch.no_grad():
        model(batch())
    model.train()
    loss = model(batch()).float().sum()
    model.requires_grad_(False)
    model.eval()
    with torch.no_grad():
        model(batch())
    model.requires_grad_(True)
    model.train()
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.numel())


class SkipsFrozenPart(nn.Module):
    """An evaluation does not run the frozen second part."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Shift(), Shift().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        self.between = self.first(x)
        return self.second(self.between) if self.training else self.between


@pytest.mark.spec("FWD-06")
@ranks(2)
def test_frozen_unit_is_resharded_during_backward_after_an_evaluation_without_it() -> None:
    os.environ["FSDP_USE_FULL_PREC_IN_EVAL"] = "1"
    model: Any = WRAPPED.shard(SkipsFrozenPart(), unit_classes=(Shift,), precision=LOW, device_id=device())
    backward(model)
    model.eval()
    with torch.no_grad():
        model(batch())
    model.train()
    result = model(batch())
    unit = model.module.second._unit
    states: list[tuple[str, str]] = []
    # Called when the gradient of the input of the frozen unit has been computed.
    model.module.between.register_hook(lambda _: states.append((unit.state.name, unit.phase.name)))
    result.float().sum().backward()
    assert states == [("SHARDED", "IDLE")]
