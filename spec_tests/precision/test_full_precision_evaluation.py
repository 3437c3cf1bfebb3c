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

every_strategy = pytest.mark.parametrize("strategy", FLAT_STRATEGIES)
LOW = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16}


class Shift(nn.Module):
    """A module whose values cannot be represented in bfloat16."""

    def __init__(self, *, with_buffer: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.1, 1.37, 16))
        self.shift = nn.Parameter(torch.linspace(0.2, 0.9, 16))
        self.register_buffer("factor", torch.linspace(0.7, 1.3, 16) if with_buffer else None)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x * self.weight + self.shift
        return result if self.factor is None else result * self.factor


def plain_and_sharded(
    strategy: ShardingStrategy, *, low: Any = LOW, with_buffer: bool = False, **options: Any
) -> tuple[nn.Sequential, Any]:
    # The harness restores the environment after each test.
    os.environ["FSDP_USE_FULL_PREC_IN_EVAL"] = "1"
    plain = nn.Sequential(*(Shift(with_buffer=with_buffer) for _ in range(2))).to(device())
    options |= {"strategy": strategy, "precision": low, "device_id": device()}
    return plain, WRAPPED.shard(copy.deepcopy(plain), unit_classes=(Shift,), **options)


def batch() -> Tensor:
    return torch.linspace(0.123, 1.77, 16).to(device())


def backward(model: nn.Module) -> None:
    model(batch()).float().sum().backward()


def is_exact(model: nn.Module, plain: nn.Module, *, records: bool = False) -> bool:
    with torch.set_grad_enabled(records):
        got, expected = model(batch()), plain(batch())
    return got.dtype is expected.dtype and bool(torch.allclose(got, expected, rtol=1e-6))


@pytest.mark.spec("FRESH-08")
@every_strategy
@ranks(2)
def test_evaluation_is_exact_after_any_earlier_unshard(strategy: ShardingStrategy) -> None:
    def kept(model: Any) -> None:
        with model.no_sync():
            backward(model)

    for before in (lambda model: None, backward, kept, lambda model: model(batch()), lambda model: model.apply(id)):
        for records in (False, True):
            plain, model = plain_and_sharded(strategy, forward_prefetch=True)
            for _ in range(2):
                before(model)
                model.eval()
                assert is_exact(model, plain, records=records)
                assert is_exact(model, plain, records=records)
                model.train()
                assert not is_exact(model, plain)
                assert model(batch()).dtype is torch.bfloat16


@pytest.mark.spec("FRESH-08")
@every_strategy
@ranks(2)
def test_a_backward_in_evaluation_mode_does_not_round_its_gradients(strategy: ShardingStrategy) -> None:
    for low in (LOW, {"reduce_dtype": torch.bfloat16}, LOW | {"keep_low_precision_grads": True}):
        plain, model = plain_and_sharded(strategy, low=low)
        backward(model)
        for one in (model, plain):
            one.zero_grad()
            one.eval()
            backward(one)
        expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
        torch.testing.assert_close(WRAPPED.gradients(model), expected, rtol=1e-6, atol=0.0)
        model.zero_grad()
        model.train()
        backward(model)
        found = WRAPPED.gradients(model)
        assert not all(torch.allclose(found[name].float(), expected[name], rtol=1e-6) for name in expected)


@pytest.mark.spec("FRESH-08")
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


@pytest.mark.spec("FRESH-08")
@every_strategy
@ranks(2)
def test_an_evaluation_between_a_forward_and_its_backward_changes_neither(strategy: ShardingStrategy) -> None:
    gradients = []
    for is_disturbed in (True, False):
        plain, model = plain_and_sharded(strategy)
        loss = model(batch()).float().sum()
        if is_disturbed:
            model.eval()
            assert is_exact(model, plain)
            model.train()
        loss.backward()
        gradients.append(WRAPPED.gradients(model))
    assert_same(*gradients, bitwise=True)


@pytest.mark.spec("FRESH-08")
@ranks(2)
def test_one_backward_after_forwards_in_both_modes_gives_the_gradients_of_both() -> None:
    plain, model = plain_and_sharded(NO_SHARD)
    for one in (model, plain):
        one.eval()
        in_evaluation = one(batch()).sum()
        one.train()
        (in_evaluation + one(batch()).float().sum()).backward()
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    torch.testing.assert_close(WRAPPED.gradients(model), expected, rtol=0.02, atol=0.0)


@pytest.mark.spec("FRESH-08", "NOSYNC-02")
@every_strategy
@ranks(2)
def test_unreduced_gradients_of_both_modes_are_added_without_rounding(strategy: ShardingStrategy) -> None:
    """In bfloat16, 1 + 1/512 rounds to 1."""
    _, model = plain_and_sharded(strategy)
    with model.no_sync():
        backward(model)
        model.eval()
        (model(batch()).sum() / 512).backward()
    (model(batch()).sum() / 512).backward()
    shift = WRAPPED.gradients(model)["1.shift"]
    assert torch.equal(shift, torch.full_like(shift, 1 + 2 / 512))


@pytest.mark.spec("FRESH-08")
@every_strategy
@ranks(2)
def test_buffers_are_in_full_precision_too(strategy: ShardingStrategy) -> None:
    plain, model = plain_and_sharded(strategy, low=LOW | {"buffer_dtype": torch.bfloat16}, with_buffer=True)
    unit = model.module[0].module
    model.eval()
    assert is_exact(model, plain)
    model.train()
    model(batch())
    assert unit.factor.dtype is torch.bfloat16
    model.eval()
    with torch.no_grad():
        assert model(batch()).dtype is torch.float32
    assert unit.factor.dtype is torch.float32


@pytest.mark.spec("FRESH-08")
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
        self.first = Shift()
        self.second = Shift().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        self.between = x
        return self.second(x) if self.training else x


@pytest.mark.spec("FRESH-08", "FWD-06")
@ranks(2)
def test_frozen_unit_is_resharded_during_backward_after_an_evaluation_without_it() -> None:
    os.environ["FSDP_USE_FULL_PREC_IN_EVAL"] = "1"
    options: Any = {"strategy": ShardingStrategy.FULL_SHARD, "precision": LOW, "device_id": device()}
    model = WRAPPED.shard(SkipsFrozenPart(), unit_classes=(Shift,), **options)
    backward(model)
    model.eval()
    with torch.no_grad():
        model(batch())
    model.train()
    states: list[str] = []
    result = model(batch())
    inside: Any = model.module
    unit = inside.second._unit
    inside.between.register_hook(lambda _: states.append(unit.state.name))
    inside.between.register_hook(lambda _: states.append(unit.phase.name))
    result.float().sum().backward()
    # The gradient of the input of the frozen unit has been computed.
    assert states == ["SHARDED", "IDLE"]
