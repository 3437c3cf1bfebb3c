"""A backward inside a forward computes gradients of parameters, or runs while earlier gradients are not reduced yet."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from spec_tests.harness import device, ranks
from spec_tests.models.running import of_unit
from spec_tests.subject import fully_shard, trace


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.tanh(self.first(x)))


class WithForces(nn.Module):
    """Computes an energy with its layers and its own parameters, and adds the gradient of the energy."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.head = nn.ModuleList(Layer() for _ in range(2)), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = x = x.clone().requires_grad_()
        for layer in self.layers:
            h = layer(h)
        (force,) = torch.autograd.grad(self.head(h).sum(), x, create_graph=True)
        return self.head(self.layers[1](x + force))


class WithAuxiliaryLoss(WithForces):
    """Adds the gradients of a loss inside its own forward."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        y = self.head(x)
        y.square().mean().backward(retain_graph=True)
        return self.head(x.detach() + 1) + y


class WithLocalLosses(WithForces):
    """Trains each layer and the head with a loss inside its own forward. No backward follows."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x.detach())
            self.head(x).square().mean().backward()
        return x.detach()


def sharded(model: Any) -> Any:
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def batch(step: int) -> Tensor:
    return torch.linspace(-1, 1 + step, 32).view(4, 8).to(device())


def gradients(model: nn.Module) -> list[Tensor | None]:
    found = [parameter.grad for parameter in model.parameters()]
    return [gradient.full_tensor() if isinstance(gradient, DTensor) else gradient for gradient in found]


@pytest.mark.spec("PROG-23", "FS2-SYNC-01")
@pytest.mark.parametrize("kind", [WithForces, WithAuxiliaryLoss])
@pytest.mark.parametrize("num_unreduced", [0, 1])
@ranks(2)
def test_gradients_of_a_unit_that_still_computes_are_reduced_in_the_outer_backward(
    kind: type[WithForces], num_unreduced: int
) -> None:
    plain = kind().to(device())
    model = sharded(copy.deepcopy(plain))
    for step in range(2):
        model.set_requires_gradient_sync(step >= num_unreduced)
        plain(batch(step)).square().mean().backward()
        with trace.record() as recorder:
            model(batch(step)).square().mean().backward()
        # The inner backward does not reduce gradients of the root, which still computes.
        assert of_unit(recorder, "", "RS") == ["RS"] * (step >= num_unreduced)
    for found, expected in zip(gradients(model), gradients(plain), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.spec("PROG-23")
@ranks(2)
def test_all_gradients_are_reduced_at_the_end_of_a_forward_that_no_backward_follows() -> None:
    plain = WithLocalLosses().to(device())
    model = sharded(copy.deepcopy(plain))
    for step in range(2):
        torch.testing.assert_close(model(batch(step)), plain(batch(step)))
        for found, expected in zip(gradients(model), gradients(plain), strict=True):
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
