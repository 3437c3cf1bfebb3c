"""The outputs of the root stay the tensors that the module returns, and units may begin with operations in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from spec_tests.cases.programs import Block, Net, assert_trains_alike, batch, sharded
from spec_tests.harness import device, ranks
from spec_tests.models.kinds import every_kind, shard
from spec_tests.subject import FullyShardedDataParallel

PLAIN_ONLY = pytest.mark.not_simulated("the package inspects plain tensors only")


def returning(make: Callable[[Tensor, Tensor], Any]) -> Net:
    """A model that returns ``make(x, output)``."""

    class Returns(Net):
        def forward(self, x: Tensor) -> Any:
            return make(x, super().forward(x))

    return Returns()


@pytest.mark.spec("PROG-30")
@every_kind
@ranks(2)
def test_a_unit_that_begins_with_an_operation_in_place_trains(kind: str) -> None:
    class InPlace(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(nn.functional.relu(x, inplace=True))

    class UsesInputAgain(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.head.weight * x
            for block in self.blocks:
                x = block(x) + x
            return self.head(x)

    assert_trains_alike(kind, UsesInputAgain(InPlace), lambda model, x: model(x).square().mean().backward())


@pytest.mark.spec("PROG-99")
@every_kind
@ranks(2)
def test_a_change_of_an_output_in_place_reaches_the_same_output_in_a_nested_container(kind: str) -> None:
    def program(model: Any, x: Tensor) -> None:
        output = model(x)
        output["last"].mul_(3)
        output["hidden"][1].square().sum().backward()

    assert_trains_alike(kind, returning(lambda x, y: {"last": y, "hidden": (x, y)}), program)


@PLAIN_ONLY
@pytest.mark.spec("PROG-99")
@pytest.mark.parametrize("changed", [0, 1])
@every_kind
@ranks(2)
def test_a_change_of_an_output_or_of_its_view_in_place_reaches_the_other_one(kind: str, changed: int) -> None:
    def program(model: Any, x: Tensor) -> None:
        outputs = model(x)
        outputs[changed].mul_(3)
        outputs[1 - changed].square().sum().backward()

    assert_trains_alike(kind, returning(lambda _, y: (y, y[:, 0])), program)


@PLAIN_ONLY
@pytest.mark.spec("PROG-99")
@every_kind
@ranks(2)
def test_a_change_of_an_output_in_place_reaches_a_kept_output(kind: str) -> None:
    class Keeps(Net):
        def forward(self, x: Tensor) -> Tensor:
            self.kept = super().forward(x)
            return self.kept

    def program(model: Any, x: Tensor) -> None:
        model(x).mul_(3)
        model.kept.square().sum().backward()

    assert_trains_alike(kind, Keeps(), program)


@pytest.mark.spec("PROG-99")
@every_kind
@ranks(2)
def test_gradients_of_hidden_outputs_are_retained_and_can_be_computed(kind: str) -> None:
    def program(model: Any, x: Tensor) -> None:
        # The input has a graph of its own.
        x = 2 * x.clone().requires_grad_()
        output, named = model(x)
        tensors = [x, *named["hidden"]]
        for tensor in tensors:
            tensor.retain_grad()
        loss = output.square().sum()
        loss.backward(retain_graph=True)
        retained = [tensor.grad.clone() for tensor in tensors]
        torch.testing.assert_close(retained, list(torch.autograd.grad(loss, tensors, retain_graph=True)))
        named["hidden"][0].sum().backward()

    assert_trains_alike(kind, returning(lambda x, y: (2 * y, {"hidden": [y, x]})), program)


class Pair(tuple[Any, ...]):
    """A tuple whose constructor has two arguments."""

    __slots__ = ()

    def __new__(cls, first: Any, second: Any) -> Pair:
        return super().__new__(cls, (first, second))


@pytest.mark.spec("PROG-99")
@every_kind
@ranks(2)
def test_an_output_container_keeps_its_class(kind: str) -> None:
    def program(model: Any, x: Tensor) -> None:
        output = model(x)
        assert type(output) is Pair
        (output[0] * output[1]).sum().backward()

    assert_trains_alike(kind, returning(lambda _, y: Pair(y, 2 * y)), program)


@PLAIN_ONLY
@pytest.mark.spec("PROG-99")
@every_kind
@ranks(2)
def test_an_output_keeps_its_attributes_and_its_retained_gradient(kind: str) -> None:
    class Marks(Net):
        def forward(self, x: Tensor) -> Tensor:
            output: Any = super().forward(x)
            output.retain_grad()
            output.mark = "kept"
            return output

    def program(model: Any, x: Tensor) -> None:
        output = model(x)
        assert output.mark == "kept"
        output.square().sum().backward()
        assert output.grad is not None

    assert_trains_alike(kind, Marks(), program)


@pytest.mark.spec("PROG-99", "PROG-20")
@every_kind
@ranks(2)
def test_requested_gradients_of_an_output_behind_another_one_are_refused(kind: str) -> None:
    model = sharded(kind, Net())
    parameters = list(model.parameters())
    inside = model.module if isinstance(model, FullyShardedDataParallel) else model
    inside.register_forward_hook(lambda _, __, output: (output, output.mean()), prepend=True)
    output, mean = model(batch())
    with pytest.raises(RuntimeError, match="#E-requested-of-outputs"):
        (output.square().mean() + mean).backward(inputs=parameters)


@pytest.mark.spec("PROG-99")
@ranks(2)
def test_a_kept_tensor_gets_one_hook() -> None:
    plain: Any = Net()
    inside = plain.blocks[0]
    model = shard("flat FULL_SHARD", plain, ["blocks.0", "blocks.1"])
    inside.kept = 2 * torch.ones(2, 8, device=device(), requires_grad=True)
    for _ in range(5):
        model(batch()).sum().backward()
    assert len(inside.kept._backward_hooks) == 1


class Ignore(torch.autograd.Function):
    """Uses a tensor, and has no gradient of it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, other: Tensor) -> Tensor:
        return tensor.sum() + other.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, gradient.expand(4)


@pytest.mark.spec("PROG-102")
@pytest.mark.parametrize("are_requested", [False, True])
@every_kind
@ranks(2)
def test_an_output_without_a_gradient_gives_parameters_no_gradient(kind: str, are_requested: bool) -> None:
    model = sharded(kind, Net())
    parameters = list(model.parameters())
    other = torch.ones(4, device=device(), requires_grad=True)
    loss = Ignore.apply(model(batch()), other)
    loss.backward(inputs=[other, *parameters] if are_requested else None)
    assert other.grad is not None
    assert all(parameter.grad is None for parameter in parameters)
    model(batch()).sum().backward()
    assert any(parameter.grad is not None for parameter in parameters)
