"""Hooks that a program registers on parameters between a forward and its backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from spec_tests.cases.programs import Net, assert_trains_alike, batch, sharded
from spec_tests.harness import device, ranks
from spec_tests.models.kinds import KINDS, every_kind
from spec_tests.models.values import full
from spec_tests.subject import fully_shard

# The kinds whose `parameters()` have the names of the plain model's parameters.
every_named_kind = pytest.mark.parametrize("kind", KINDS[3:])


def only_positive(gradient: Tensor) -> Tensor:
    return gradient * (gradient > 0)


@pytest.mark.spec("PROG-100")
@every_named_kind
@ranks(2)
def test_a_hook_after_the_forward_changes_the_unsharded_gradient(kind: str) -> None:
    def program(model: Any, x: Tensor) -> None:
        output = model(x)
        handles = [parameter.register_hook(only_positive) for parameter in model.parameters()]
        output.square().sum().backward()
        for handle in handles:
            handle.remove()
        model(x).sum().backward()

    assert_trains_alike(kind, Net(), program)


@pytest.mark.spec("PROG-100")
@every_named_kind
@ranks(2)
def test_a_hook_of_a_weight_of_a_module_after_the_forward_is_permanent(kind: str) -> None:
    plain = Net()
    model, gradients = sharded(kind, plain), list[Tensor]()
    output = model(batch())
    model.head.weight.register_hook(gradients.append)
    for _ in range(3):
        output.sum().backward()
        output = model(batch())
    assert [gradient.shape for gradient in gradients] == [plain.head.weight.shape] * 3


@pytest.mark.spec("PROG-100")
@every_kind
@ranks(2)
def test_a_hook_after_the_forward_is_called_once_with_a_gradient_in_each_backward(kind: str) -> None:
    model, calls = sharded(kind, Net()), list[tuple[int, Tensor]]()
    output = model(batch())
    parameters = list(model.parameters())
    for number, parameter in enumerate(parameters):
        parameter.register_hook(lambda gradient, number=number: calls.append((number, gradient)))
    for _ in range(2):
        output.square().sum().backward()
        assert sorted(number for number, _ in calls) == list(range(len(parameters)))
        assert all(isinstance(gradient, Tensor) for _, gradient in calls)
        calls.clear()
        output = model(batch())


@pytest.mark.spec("PROG-100")
@every_kind
@ranks(2)
def test_a_post_accumulate_hook_after_the_forward_is_called_once_with_the_sharded_parameter(kind: str) -> None:
    model, calls = sharded(kind, Net()), list[Tensor]()
    owned = [parameter for parameter in model.parameters() if parameter.numel()]
    # The second backward adds to the gradients of the first one.
    model(batch()).sum().backward()
    before = [full(parameter.grad).clone() for parameter in owned]
    output = model(batch())
    # If `fully_shard` keeps parameters unsharded, the model has other parameters between a forward and its backward.
    for parameter in owned if kind == "fully_shard False" else model.parameters():
        parameter.register_post_accumulate_grad_hook(calls.append)
    output.square().sum().backward()
    assert sorted(map(id, calls)) == sorted(map(id, owned))
    for parameter, old in zip(owned, before, strict=True):
        assert not torch.equal(full(parameter.grad), old)


@pytest.mark.spec("PROG-100")
@pytest.mark.parametrize("kind", ["original NO_SHARD", "fully_shard True"])
@ranks(2)
def test_a_post_accumulate_hook_is_called_for_a_loss_of_the_parameter_alone(kind: str) -> None:
    model, calls = sharded(kind, Net()), list[Tensor]()
    parameter = next(model.parameters())
    parameter.register_post_accumulate_grad_hook(calls.append)
    for _ in range(2):
        model(batch()).sum().backward()
        parameter.square().sum().backward()
    assert len(calls) == 4


class HooksItsWeight(nn.Module):
    """Registers hooks in forward: on the weight that it computes with, and on the sharded parameter."""

    def __init__(self, calls: list[str]) -> None:
        super().__init__()
        self.weight, self.calls = nn.Parameter(torch.ones(2, 2)), calls
        self.others: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.weight.register_hook(lambda gradient: self.calls.append("in forward"))
        self.others[0].register_hook(lambda gradient: self.calls.append("sharded"))
        return x @ self.weight


@pytest.mark.spec("PROG-100")
@ranks(2)
def test_a_hook_in_forward_and_one_on_the_sharded_parameter_are_both_called() -> None:
    calls: list[str] = []
    model: Any = fully_shard(HooksItsWeight(calls).to(device()))
    model.others.append(model.weight)

    model(torch.ones(1, 2, device=device())).sum().backward()

    assert sorted(calls) == ["in forward", "sharded"]
