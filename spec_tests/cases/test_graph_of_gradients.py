"""A backward with ``create_graph=True`` that computes gradients of parameters is refused."""

from __future__ import annotations

import pytest

from spec_tests.cases.programs import Net, batch, sharded
from spec_tests.harness import ranks
from spec_tests.models.kinds import every_kind


@pytest.mark.spec("PROG-25", "PROG-20")
@pytest.mark.parametrize("are_requested", [False, True])
@every_kind
@ranks(2)
def test_a_graph_of_gradients_of_parameters_is_refused_and_the_next_iteration_works(
    kind: str, are_requested: bool
) -> None:
    model = sharded(kind, Net())
    requested = list(model.parameters()) if are_requested else None
    with pytest.raises(RuntimeError, match="#E-graph-of-gradients"):
        model(batch()).square().mean().backward(create_graph=True, inputs=requested)
    model.zero_grad()
    model(batch()).square().mean().backward()
    assert any(parameter.grad is not None for parameter in model.parameters())
