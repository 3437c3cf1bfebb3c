"""``zero_grad(set_to_none=False)`` of a sharded module sets gradients to zero, and neither creates nor replaces any."""

from __future__ import annotations

import pytest
import torch

from spec_tests.harness import ranks
from spec_tests.models.running import batch, iterate
from spec_tests.models.sharding import sharded


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
