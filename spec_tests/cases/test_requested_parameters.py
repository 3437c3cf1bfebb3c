"""``backward(inputs=...)`` computes the gradients of the parameters that the program lists."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from spec_tests.cases.programs import Net, assert_trains_alike, batch, sharded
from spec_tests.harness import ranks
from spec_tests.models.kinds import every_kind


class GivesDict(Net):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"result": super().forward(x)}


@pytest.mark.spec("PROG-20")
@pytest.mark.parametrize("with_input", [False, True])
@every_kind
@ranks(2)
def test_all_parameters_may_be_listed(kind: str, with_input: bool) -> None:
    def program(model: Any, x: Tensor) -> None:
        x = x.clone().requires_grad_(with_input)
        inputs = [*model.parameters(), *[x] * with_input]
        model(x)["result"].square().mean().backward(inputs=inputs)
        assert (x.grad is not None) == with_input

    assert_trains_alike(kind, GivesDict(), program)


@pytest.mark.spec("PROG-20")
@every_kind
@ranks(2)
def test_an_input_alone_may_be_listed_and_gives_parameters_no_gradient(kind: str) -> None:
    def program(model: Any, x: Tensor) -> None:
        x = x.clone().requires_grad_()
        model(x).square().mean().backward(inputs=[x])
        assert all(parameter.grad is None for parameter in model.parameters())
        model(x.detach()).square().mean().backward()

    assert_trains_alike(kind, Net(), program)


@pytest.mark.spec("PROG-20", "PROG-21")
@pytest.mark.filterwarnings("ignore:.*frozen parameters")
@pytest.mark.parametrize("kind", ["original FULL_SHARD", "fully_shard True"])
@ranks(2)
def test_all_trained_parameters_may_be_listed_if_others_are_frozen(kind: str) -> None:
    """Defect: the frozen parameters of a unit count as parameters that the program has left out."""

    def program(model: Any, x: Tensor) -> None:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        model(x).square().mean().backward(inputs=trained)

    plain = Net()
    plain.get_parameter("blocks.1.first.bias").requires_grad_(False)
    plain.head.bias.requires_grad_(False)
    assert_trains_alike(kind, plain, program)


@pytest.mark.spec("PROG-21")
@ranks(2)
def test_some_parameters_of_a_unit_are_refused() -> None:
    model = sharded("original FULL_SHARD", Net())
    with pytest.raises(RuntimeError, match="#E-part-of-unit"):
        model(batch()).mean().backward(inputs=list(model.parameters())[:1])


@pytest.mark.spec("PROG-22")
@every_kind
@ranks(2)
def test_autograd_grad_of_parameters_is_refused_and_the_next_iteration_works(kind: str) -> None:
    model = sharded(kind, Net())
    parameters = list(model.parameters())
    with pytest.raises(RuntimeError, match="#E-autograd-grad"):
        torch.autograd.grad(model(batch()).mean(), parameters, allow_unused=True)
    model.zero_grad()
    model(batch()).mean().backward()
    assert any(parameter.grad is not None for parameter in model.parameters())
