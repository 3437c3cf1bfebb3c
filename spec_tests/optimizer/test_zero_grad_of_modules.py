"""``zero_grad(set_to_none=False)`` of a sharded module sets gradients to zero, and neither creates nor replaces any."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from spec_tests.harness import ranks
from spec_tests.models.running import batch, iterate
from spec_tests.models.sharding import sharded
from spec_tests.subject import fully_shard


@pytest.mark.spec("FUZZ-04", "FWD-08")
@pytest.mark.parametrize("has_evaluated", [False, True])
@ranks(2)
def test_gradients_become_zero_in_place_and_a_parameter_without_one_still_has_none(has_evaluated: bool) -> None:
    """Defect: a gradient of zeros appears, so weight decay changes a layer that the model has not used."""
    model = sharded()
    parameters = dict(model.named_parameters())
    iterate(model, order=(0, 1))
    kept = {name: parameter.grad for name, parameter in parameters.items()}
    if has_evaluated:
        with torch.no_grad():
            model(batch(1))
    model.zero_grad(set_to_none=False)
    for name, parameter in parameters.items():
        is_unused = name.startswith(("blocks.2", "blocks.3"))
        assert (parameter.grad is None) == is_unused, name
        assert is_unused or not parameter.grad.to_local().any(), name
    iterate(model)
    # A program may keep the gradients over several steps.
    for name, gradient in kept.items():
        assert gradient is None or gradient is parameters[name].grad, name


class CountsCalls(nn.Linear):
    """A module with its own `zero_grad`, which has another argument."""

    num_calls = 0

    def zero_grad(self, set_to_none: bool = True, *, counts: bool = False) -> None:
        self.num_calls += counts
        super().zero_grad(set_to_none)


class ClearsItself(nn.Linear):
    """A module with its own `zero_grad`, which has no argument."""

    def zero_grad(self) -> None:  # type: ignore[override]
        for parameter in self.parameters():
            parameter.grad = None


@pytest.mark.spec("FUZZ-04")
@pytest.mark.parametrize(
    ("module_class", "args", "kwargs"),
    [
        (CountsCalls, (), {"counts": True}),
        (CountsCalls, (), {"set_to_none": False}),
        (CountsCalls, (False,), {}),
        (ClearsItself, (), {}),
    ],
)
@ranks(2)
def test_zero_grad_of_the_module_keeps_its_own_parameters(module_class: Any, args: Any, kwargs: Any) -> None:
    module = fully_shard(module_class(4, 4))
    parameters = list(module.parameters())
    module(torch.ones(2, 4)).sum().backward()
    with torch.no_grad():
        module(torch.ones(2, 4))
    module.zero_grad(*args, **kwargs)
    if module_class is ClearsItself or "counts" in kwargs:
        assert all(parameter.grad is None for parameter in parameters)
    else:
        assert not any(parameter.grad.to_local().any() for parameter in parameters)
    assert module_class is ClearsItself or module.num_calls == ("counts" in kwargs)
