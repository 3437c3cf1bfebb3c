"""A unit whose output is one of its parameters, or a view of one, stays unsharded until its backward."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from spec_tests.cases.programs import Block, Net, assert_trains_alike, batch, sharded
from spec_tests.harness import ranks
from spec_tests.models.kinds import every_kind

pytestmark = pytest.mark.not_simulated("the package inspects the memory of plain tensors only")


class GivesWeight(Block):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), self.second.weight


class GivesView(Block):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), self.second.weight.t()


class ReadsWeights(Net):
    """Computes with the weights that its blocks return."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x, weight = block(x)
            x = x + (weight.sum() * x).tanh()
        return self.head(x)


@pytest.mark.spec("PROG-32")
@pytest.mark.filterwarnings("ignore:(?s).*E-returns-parameters")
@pytest.mark.parametrize("block", [GivesWeight, GivesView])
@every_kind
@ranks(2)
def test_a_model_that_computes_with_returned_weights_trains(kind: str, block: type[Block]) -> None:
    def program(model: Any, x: Tensor) -> None:
        with torch.no_grad():
            assert model(x).isfinite().all()
        model(x).square().mean().backward()

    assert_trains_alike(kind, ReadsWeights(block), program)


@pytest.mark.spec("PROG-32")
@ranks(2)
def test_unit_that_returns_a_view_warns_once_and_is_resharded_after_its_backward() -> None:
    model = sharded("flat FULL_SHARD", ReadsWeights(GivesView))

    def states() -> set[str]:
        return {unit.state.name for unit in model._root_state.iteration.units}

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            loss = model(batch()).mean()
            assert states() == {"UNSHARDED"}
            loss.backward()
            assert states() == {"SHARDED"}
    found = [str(warning.message) for warning in caught if "E-returns-parameters" in str(warning.message)]
    assert [text.split("'")[1] for text in found] == ["blocks.0", "blocks.1"]
