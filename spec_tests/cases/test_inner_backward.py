"""A backward inside a forward computes gradients of parameters, or runs while earlier gradients are not reduced yet."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from spec_tests.cases.programs import Net, assert_trains_alike, batch, sharded
from spec_tests.harness import ranks
from spec_tests.models.kinds import every_kind
from spec_tests.models.running import of_unit
from spec_tests.models.values import full_gradients
from spec_tests.subject import trace


class WithForces(Net):
    """Computes an energy with its blocks and its head, and adds the gradient of the energy to the input."""

    with_graph = True

    @torch.enable_grad()
    def forward(self, x: Tensor) -> Tensor:
        h = x = x.clone().requires_grad_()
        for block in self.blocks:
            h = block(h)
        energy = self.head(h).sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=self.with_graph, retain_graph=True)
        return self.head(self.blocks[1](x + force)) + energy


class WithAuxiliaryLoss(Net):
    """Adds the gradients of a loss inside its own forward."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        y.square().mean().backward(retain_graph=True)
        return self.head(x + 1) + y


class WithLocalLosses(Net):
    """Trains each block and the head with a loss inside its own forward. No backward follows."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x.detach())
            self.head(x).square().mean().backward()
        return x.detach()


@pytest.mark.spec("PROG-23")
@pytest.mark.parametrize("with_graph", [False, True])
@every_kind
@ranks(2)
def test_a_model_that_computes_gradients_in_its_forward_trains(kind: str, with_graph: bool) -> None:
    def program(model: Any, x: Tensor) -> None:
        # In the second step, this evaluation follows an optimizer step.
        with torch.no_grad():
            model(x)
        model(x).square().mean().backward()

    plain = WithForces()
    plain.with_graph = with_graph
    assert_trains_alike(kind, plain, program)


@pytest.mark.spec("PROG-23", "FS2-SYNC-01")
@pytest.mark.parametrize("build", [WithForces, WithAuxiliaryLoss])
@pytest.mark.parametrize("num_unreduced", [0, 1])
@ranks(2)
def test_gradients_of_a_unit_that_still_computes_are_reduced_in_the_outer_backward(
    build: type[Net], num_unreduced: int
) -> None:
    plain = build()
    model = sharded("fully_shard True", plain)
    plain.to(batch().device)
    for step in range(2):
        model.set_requires_gradient_sync(step >= num_unreduced)
        plain(batch() + step).square().mean().backward()
        with trace.record() as recorder:
            model(batch() + step).square().mean().backward()
        # The inner backward does not reduce gradients of the root, which still computes.
        assert of_unit(recorder, "", "RS") == ["RS"] * (step >= num_unreduced)
    torch.testing.assert_close(full_gradients(model), full_gradients(plain))


@pytest.mark.spec("PROG-23")
@ranks(2)
def test_all_gradients_are_reduced_at_the_end_of_a_forward_that_no_backward_follows() -> None:
    plain = WithLocalLosses()
    model = sharded("fully_shard True", plain)
    plain.to(batch().device)
    for step in range(2):
        torch.testing.assert_close(model(batch() + step), plain(batch() + step))
        torch.testing.assert_close(full_gradients(model), full_gradients(plain))
