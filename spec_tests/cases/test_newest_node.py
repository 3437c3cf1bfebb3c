"""A unit that puts its result in a container of its inputs, or that changes an input in place."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from spec_tests.cases.programs import Block, Net, assert_trains_alike
from spec_tests.harness import ranks
from spec_tests.models.kinds import every_kind


def square_loss(model: Any, x: Tensor) -> None:
    model(x).square().mean().backward()


@pytest.mark.spec("PROG-29")
@every_kind
@ranks(2)
def test_a_unit_that_appends_its_result_to_a_list_trains(kind: str) -> None:
    class Appends(Block):
        def forward(self, results: list[Tensor]) -> None:
            results.append(super().forward(results[-1]))

    class Lists(Net):
        def forward(self, x: Tensor) -> Tensor:
            results = [x]
            for block in self.blocks:
                block(results)
            assert len(results) == 3
            return self.head(results[-1])

    assert_trains_alike(kind, Lists(Appends), square_loss)


@pytest.mark.spec("PROG-29")
@every_kind
@ranks(2)
def test_a_unit_that_changes_a_dict_and_a_list_inside_it_trains(kind: str) -> None:
    class Fills(Block):
        def forward(self, *, cache: dict[str, Any]) -> None:
            cache["layers"][0].append(super().forward(cache.pop("old")))

    class Caches(Net):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                results: list[Tensor] = []
                cache = {"old": x, "layers": [results]}
                block(cache=cache)
                assert list(cache) == ["layers"], "a key that the block has removed"
                assert cache["layers"][0] is results
                x = results[0]
            return self.head(x)

    assert_trains_alike(kind, Caches(Fills), square_loss)


@pytest.mark.spec("PROG-29")
@pytest.mark.parametrize("num_outputs", [1, 2])
@every_kind
@ranks(2)
def test_a_unit_that_adds_a_penalty_to_a_list_beside_its_outputs_trains(kind: str, num_outputs: int) -> None:
    class AddsPenalty(Block):
        def forward(self, x: Tensor, penalties: list[Tensor]) -> tuple[Tensor, ...]:
            y = super().forward(x)
            # The caller only uses the first output, from which the second one is computed.
            outputs = (y, self.first(y))[:num_outputs]
            # Newer than the operations of the outputs, so autograd runs its backward first.
            penalties.append(self.second.weight.square().mean())
            return outputs

    class SumsPenalties(Net):
        def forward(self, x: Tensor) -> Tensor:
            penalties: list[Tensor] = []
            for block in self.blocks:
                x = block(x, penalties)[0]
            return self.head(x) + sum(penalties)

    assert_trains_alike(kind, SumsPenalties(AddsPenalty), square_loss)


@pytest.mark.spec("PROG-29")
@every_kind
@ranks(2)
def test_a_unit_that_changes_its_input_in_place_and_returns_nothing_trains(kind: str) -> None:
    class AddsToInput(Block):
        def forward(self, x: Tensor) -> None:
            x += super().forward(1 * x)

    class ReadsInputAgain(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.head.weight * x
            for block in self.blocks:
                block(x)
                x = x * 1
            return self.head(x)

    assert_trains_alike(kind, ReadsInputAgain(AddsToInput), square_loss)
