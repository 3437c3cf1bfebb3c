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
def test_a_parameter_without_a_gradient_still_has_none(has_evaluated: bool) -> None:
    """Defect: a gradient of zeros appears, so weight decay changes a layer that the model has not used."""
    model = sharded()
    parameters = dict(model.named_parameters())
    iterate(model, order=(0, 1))
    if has_evaluated:
        with torch.no_grad():
            model(batch(1))
    model.zero_grad(set_to_none=False)
    for name, parameter in parameters.items():
        is_unused = name.startswith(("blocks.2", "blocks.3"))
        assert (parameter.grad is None) == is_unused, name
        assert is_unused or not parameter.grad.to_local().any(), name


class ClearsItself(nn.Linear):
    def zero_grad(self) -> None:  # type: ignore[override]
        for parameter in self.parameters():
            parameter.grad = None


class CountsCalls(nn.Linear):
    num_calls = 0

    def zero_grad(self, set_to_none: bool = True, *, counts: bool = False) -> None:
        self.num_calls += counts
        super().zero_grad(set_to_none)


@pytest.mark.spec("FUZZ-04")
@pytest.mark.parametrize(("kind", "arguments"), [(ClearsItself, {}), (CountsCalls, {"counts": True})])
@ranks(2)
def test_zero_grad_of_the_module_keeps_its_own_parameters(kind: type[nn.Module], arguments: dict[str, Any]) -> None:
    module = fully_shard(kind(4, 4))
    parameters = list(module.parameters())
    module(torch.ones(2, 4)).sum().backward()
    with torch.no_grad():
        module(torch.ones(2, 4))
    module.zero_grad(**arguments)
    assert all(parameter.grad is None for parameter in parameters)
    assert getattr(module, "num_calls", 1) == 1


@pytest.mark.spec("FUZZ-04")
@pytest.mark.parametrize("arguments", [{"set_to_none": False}, (False,)], ids=str)
@ranks(2)
def test_zero_grad_takes_its_argument_by_name_and_by_position(arguments: Any) -> None:
    module = fully_shard(nn.Linear(4, 4))
    parameters = list(module.parameters())
    module(torch.ones(2, 4)).sum().backward()
    with torch.no_grad():
        module(torch.ones(2, 4))
    module.zero_grad(**arguments) if isinstance(arguments, dict) else module.zero_grad(*arguments)
    assert not any(parameter.grad.to_local().any() for parameter in parameters)


@pytest.mark.spec("FWD-08")
@ranks(2)
def test_gradients_are_set_to_zero_in_place() -> None:
    """Defect: gradients that a program keeps over several steps are no longer the gradients of the parameters."""
    model = sharded()
    iterate(model)
    kept = [parameter.grad for parameter in model.parameters()]
    model.zero_grad(set_to_none=False)
    iterate(model)
    assert all(gradient is parameter.grad for gradient, parameter in zip(kept, model.parameters(), strict=True))
