"""Gradients and optimizer steps of a sharded model, compared with those of an unsharded one in a single process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from spec_tests.models.modules import seeded
from spec_tests.models.running import batch, loss_of
from spec_tests.models.values import assert_same, full_gradients, full_values, named
from spec_tests.oracles.gathering import clean_name

Loss = Callable[[Any, Tensor], Tensor]


def usual_loss(model: nn.Module, x: Tensor) -> Tensor:
    return loss_of(model(x))


def mean_gradients_of(loss: Loss, plain: nn.Module, step: int = 0) -> dict[str, Tensor]:
    """The gradients of ``loss(plain, batch)`` by name, averaged over the batches of all ranks."""
    num_ranks = dist.get_world_size()
    total: dict[str, Tensor] = {}
    for rank in range(num_ranks):
        plain.zero_grad()
        loss(plain, batch(step, rank)).backward()
        for name, parameter in plain.named_parameters():
            if parameter.grad is not None:
                total[name] = total.get(name, 0) + parameter.grad / num_ranks
    plain.zero_grad()
    return total


def assert_mean_gradients(
    model: nn.Module, plain: nn.Module, steps: Iterable[int] = range(2), *, loss: Loss = usual_loss, **tolerance: bool
) -> None:
    """Runs forward and backward and checks in each step that the gradients are the means over the ranks."""
    for step in steps:
        model.zero_grad()
        loss(model, batch(step)).backward()
        assert_same(full_gradients(model), mean_gradients_of(loss, plain, step), **tolerance)
    model.zero_grad()


def step_with(gradients: dict[str, Tensor], plain: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One optimizer step of the unsharded model."""
    for name, parameter in plain.named_parameters():
        parameter.grad = gradients.get(name)
    optimizer.step()
    optimizer.zero_grad()


def assert_trains_like(
    model: nn.Module,
    plain: nn.Module | None = None,
    steps: Iterable[int] = (0,),
    *,
    loss: Loss = usual_loss,
    **tolerance: bool,
) -> None:
    """Trains both models with SGD on the batches of all ranks, and checks that their values are the same afterwards.

    Without ``plain``, the sharded model is a `Stack`. It may be sharded with either API. All ranks must call it.
    """
    plain = seeded() if plain is None else plain
    for step in steps:
        loss(model, batch(step)).backward()
        gradients = mean_gradients_of(loss, plain, step)
        with_gradient = {clean_name(name) for name in gradients}
        for name, parameter in model.named_parameters():
            if isinstance(parameter, DTensor):
                # None and zeros differ: an optimizer with weight decay changes a parameter whose gradient is zero.
                assert (parameter.grad is not None) == (clean_name(name) in with_gradient), name
        step_with(gradients, plain, torch.optim.SGD(plain.parameters(), lr=1.0))
        torch.optim.SGD(model.parameters(), lr=1.0).step()
        model.zero_grad()
    values = {clean_name(name): value for name, value in full_values(model).items()}
    assert_same(values, {clean_name(name): value for name, value in named(plain).items()}, **tolerance)


def assert_learns_alike(plain: nn.Module, model: nn.Module, loss: Callable[[Any], Tensor]) -> None:
    """Both train for two steps, on the same batch on all ranks. A third loss shows whether all weights are the same."""
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.5) for net in (plain, model)]
    for _ in range(3):
        expected, found = loss(plain), loss(model)
        torch.testing.assert_close(found, expected)
        for optimizer, value in zip(optimizers, (expected, found), strict=True):
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
