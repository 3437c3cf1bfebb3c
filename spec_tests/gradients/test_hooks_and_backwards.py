"""Special cases: several backwards, hooks, frozen submodules and complex numbers.

No single requirement covers these cases, but existing training loops depend on them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from spec_tests.harness import ranks
from spec_tests.models import apis, gradients, modules, running, values
from spec_tests.subject import ShardingStrategy, fully_shard, trace

some_settings = apis.settings_of(
    (apis.WRAPPED, ShardingStrategy.FULL_SHARD),
    (apis.ORIGINALS, ShardingStrategy.NO_SHARD),
    (apis.FULLY_SHARD, ShardingStrategy.FULL_SHARD),
    (apis.FULLY_SHARD, ShardingStrategy.SHARD_GRAD_OP),
)

# --- backward ---


@pytest.mark.api_spec(wrapper=["FWD-07"], fully_shard=["FS2-13", "NEW-07"])
@some_settings
@ranks(2)
def test_a_graph_that_is_kept_can_be_run_backward_twice(api: Any, strategy: Any) -> None:
    model = api.shard(strategy=strategy)
    loss = model(running.batch()).square().mean()
    with running.Wire() as wire:
        loss.backward(retain_graph=True)
        loss.backward()
    # The root and four blocks are reduced once in each backward.
    assert len(wire.calls("RS", "AR")) == 10
    once = values.mean_gradients(modules.seeded())
    values.assert_same(api.gradients(model), {name: 2 * gradient for name, gradient in once.items()})
    model.zero_grad()
    running.iterate(model)
    values.assert_same(api.gradients(model), once)


@pytest.mark.api_spec(wrapper=[], fully_shard=["FS2-13"])
@some_settings
@ranks(2)
def test_input_gradient_is_correct_and_its_computation_alone_reduces_nothing(api: Any, strategy: Any) -> None:
    model, plain, x = api.shard(strategy=strategy), modules.seeded(), running.batch().requires_grad_()
    (expected,) = torch.autograd.grad(plain(x).square().mean(), x)
    with running.Wire() as wire:
        (gradient,) = torch.autograd.grad(model(x).square().mean(), x)
    torch.testing.assert_close(gradient, expected)
    assert wire.calls("RS", "AR") == []
    assert all(parameter.grad is None for parameter in model.parameters())
    model(x).square().mean().backward()
    torch.testing.assert_close(x.grad, expected)
    values.assert_same(api.gradients(model), values.mean_gradients(plain))


class Towers(nn.Module):
    """A part that is not trained, and runs without a graph, and a trained part."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.trained = modules.Block(), modules.Block()

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.frozen(x)
        return self.trained(x)


@pytest.mark.spec("FS2-13", "FS2-21")
@ranks(2)
def test_tower_without_grad_runs_inside_a_recorded_forward() -> None:
    model, plain = modules.seeded(Towers), modules.seeded(Towers)
    for part in (model.frozen, model.trained, model):
        fully_shard(part)
    for step in range(2):
        with trace.record() as recorder:
            gradients.assert_mean_gradients(model, plain, [step])
        assert recorder.order("AG") == ["AG frozen", "AG trained", "AG trained"]


# --- calls of single modules ---


@pytest.mark.spec("FS2-09", "FS2-13")
@ranks(2)
def test_units_work_independently_if_their_root_is_never_called() -> None:
    def loss(model: Any, x: Tensor) -> Tensor:
        return model.blocks[1](torch.tanh(model.blocks[0](x))).square().mean()

    model = apis.FULLY_SHARD.shard()
    for step in range(2):
        gradients.assert_mean_gradients(model, modules.seeded(), [step], loss=loss)
        assert {type(p.data) for p in model.parameters()} == {DTensor}


# --- complex numbers ---


class Waves(nn.Module):
    """A filter in the frequency domain, whose weights are complex."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(6 // 2 + 1, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=6)


@pytest.mark.spec("FS2-16")
@ranks(2)
def test_unit_of_complex_parameters_trains_like_an_unsharded_one() -> None:
    plain, model = (modules.seeded(lambda: nn.Sequential(nn.Linear(6, 6), Waves())) for _ in range(2))
    for part in (*model, model):
        fully_shard(part)
    gradients.assert_mean_gradients(model, plain, [0], bitwise=False)
    assert model[1].filter.is_complex()
