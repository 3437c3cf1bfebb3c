"""A tensor hook of a flat parameter may return any tensor of the gradient's shape."""

from __future__ import annotations

import pytest
import torch

from minifsdp import set_reduction_overlap
from spec_tests.harness import ranks
from spec_tests.models.running import iterate
from spec_tests.models.sharding import FLAT_STRATEGIES, wrapped
from spec_tests.models.values import flat_parameters
from spec_tests.subject import ShardingStrategy


@pytest.mark.spec("PROG-40", "NEW-24")
@pytest.mark.parametrize("overlaps", [True, False])
@pytest.mark.parametrize("strategy", FLAT_STRATEGIES)
@ranks(2)
def test_a_gradient_that_a_hook_has_expanded_is_reduced(strategy: ShardingStrategy, overlaps: bool) -> None:
    """Defect: a collective reads the memory of a tensor that is not contiguous."""
    model = wrapped(sharding_strategy=strategy)
    set_reduction_overlap(model, overlaps)
    flat = flat_parameters(model).values()
    for parameter in flat:
        parameter.register_hook(lambda gradient: torch.ones((), device=gradient.device).expand_as(gradient))
    iterate(model)
    assert all(torch.equal(parameter.grad, torch.ones_like(parameter)) for parameter in flat)
    with model.no_sync():
        iterate(model, 1)
    iterate(model, 2)
    assert all(torch.equal(parameter.grad, torch.full_like(parameter, 3.0)) for parameter in flat)
