"""Hooks that a program registers on parameters before or after a forward, and models inside ``torch.vmap``.

Each program runs on a plain model and on the sharded models. Both ranks have the same batch, so the mean of the
gradients over the ranks equals the gradient of the plain model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from spec_tests.harness import device, ranks
from spec_tests.models.kinds import KINDS, every_kind, shard
from spec_tests.models.values import full_values
from spec_tests.subject import FullyShardedDataParallel

Program = Callable[[nn.Module, Tensor], None]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.block, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(torch.tanh(self.block(torch.tanh(self.first(x)))))
        return result


# The kinds whose `parameters()` have the names of the plain model's parameters.
every_named_kind = pytest.mark.parametrize("kind", KINDS[3:])


def sharded(kind: str, plain: nn.Module) -> nn.Module:
    model: nn.Module = shard(kind, copy.deepcopy(plain), ["block"])
    return model


def batch() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(3, 4).to(device())


def full_gradient(parameter: Tensor) -> Tensor | None:
    gradient = parameter.grad
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def assert_trains(kind: str, program: Program, plain: nn.Module | None = None) -> None:
    """Compares the weights of the plain model and of the sharded one after two steps of ``program``."""
    plain = (plain or Net()).to(device())
    model = sharded(kind, plain)
    for net in (plain, model):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(2):
            program(net, batch())
            optimizer.step()
            optimizer.zero_grad()
    for name, expected in plain.state_dict().items():
        torch.testing.assert_close(full_values(model)[name], expected)


def mask(gradient: Tensor) -> Tensor:
    return gradient * (gradient > 0)


# --- hooks between forward and backward ---


@pytest.mark.spec("PROG-100")
@every_named_kind
@ranks(2)
def test_a_hook_after_the_forward_changes_the_unsharded_gradient(kind: str) -> None:
    def program(net: nn.Module, x: Tensor) -> None:
        output = net(x)
        handles = [parameter.register_hook(mask) for parameter in net.parameters()]
        output.square().sum().backward()
        for handle in handles:
            handle.remove()
        net(x).sum().backward()

    assert_trains(kind, program)


@pytest.mark.spec("PROG-100")
@every_named_kind
@ranks(2)
def test_a_hook_of_a_weight_of_a_module_after_the_forward_is_permanent(kind: str) -> None:
    def program(net: nn.Module, x: Tensor) -> None:
        output = net(x)
        if not called:
            inside: Any = net.module if isinstance(net, FullyShardedDataParallel) else net
            inside.head.weight.register_hook(lambda gradient: called.append(gradient))
            inside.head.weight.register_hook(mask)
        output.square().sum().backward()

    called: list[Tensor] = []
    plain = Net().to(device())
    for net in (sharded(kind, plain), plain):
        called.clear()
        for _ in range(3):
            program(net, batch())
        assert [gradient.shape for gradient in called] == [plain.head.weight.shape] * 3


@pytest.mark.spec("PROG-100")
@every_kind
@ranks(2)
def test_a_hook_after_the_forward_is_called_once_with_a_gradient_in_each_backward(kind: str) -> None:
    calls: list[tuple[int, Tensor]] = []
    model = sharded(kind, Net().to(device()))
    output = model(batch())
    for number, parameter in enumerate(model.parameters()):
        parameter.register_hook(lambda gradient, number=number: calls.append((number, gradient)))
    numbers = list(range(number + 1))
    for _ in range(2):
        output.square().sum().backward()
        assert sorted(number for number, _ in calls) == numbers
        assert all(isinstance(gradient, Tensor) for _, gradient in calls)
        calls.clear()
        output = model(batch())


@pytest.mark.spec("PROG-100")
@every_kind
@ranks(2)
def test_a_post_accumulate_hook_after_the_forward_is_called_once_with_the_sharded_parameter(kind: str) -> None:
    model = sharded(kind, Net().to(device()))
    owned = [parameter for parameter in model.parameters() if parameter.numel()]
    # The second backward adds to the gradients of the first one.
    model(batch()).sum().backward()
    before = [full_gradient(parameter) for parameter in owned]
    before = [None if gradient is None else gradient.clone() for gradient in before]
    output = model(batch())
    calls: list[Tensor] = []
    # If `fully_shard` keeps parameters unsharded, the model has other parameters between a forward and its backward.
    for parameter in owned if kind == "fully_shard False" else model.parameters():
        parameter.register_post_accumulate_grad_hook(calls.append)
    output.square().sum().backward()
    assert sorted(map(id, calls)) == sorted(map(id, owned))
    for parameter, old in zip(owned, before, strict=True):
        new = full_gradient(parameter)
        assert (new is None) == (old is None)
        assert new is None or old is None or not torch.equal(new, old)


@pytest.mark.spec("PROG-100")
@pytest.mark.parametrize("kind", ["original NO_SHARD", "fully_shard True"])
@ranks(2)
def test_a_post_accumulate_hook_is_called_for_a_loss_of_the_parameter_alone(kind: str) -> None:
    model = sharded(kind, Net().to(device()))
    parameter, calls = next(model.parameters()), []
    parameter.register_post_accumulate_grad_hook(calls.append)
    for _ in range(2):
        model(batch()).sum().backward()
        parameter.square().sum().backward()
    assert len(calls) == 4


# --- other ways to use hooks ---


@pytest.mark.spec("PROG-101")
@every_kind
@pytest.mark.parametrize("method", ["register_hook", "register_post_accumulate_grad_hook"])
@ranks(2)
def test_requested_gradients_of_parameters_with_hooks_are_computed(kind: str, method: str) -> None:
    calls: list[Tensor] = []

    def program(net: nn.Module, x: Tensor) -> None:
        parameters = list(net.parameters())
        handles = [getattr(parameter, method)(lambda value: calls.append(value)) for parameter in parameters]
        net(x).square().sum().backward(inputs=parameters)
        for handle in handles:
            handle.remove()

    assert_trains(kind, program)
    assert None not in calls


@pytest.mark.spec("PROG-101")
@every_kind
@pytest.mark.parametrize("mode", ["all", "any"])
@pytest.mark.parametrize("is_late", [False, True])
@ranks(2)
def test_a_hook_of_several_parameters_is_called_once_in_each_backward(kind: str, mode: Any, is_late: bool) -> None:
    model, calls = sharded(kind, Net().to(device())), []
    output = model(batch()) if is_late else None
    parameters = list(model.parameters())
    register_multi_grad_hook(parameters, calls.append, mode=mode)
    for count in (1, 2):
        (model(batch()) if output is None else output).square().sum().backward()
        output = None
        assert len(calls) == count
    if mode == "all":
        assert [len(gradients) for gradients in calls] == [len(parameters)] * 2
        assert all(isinstance(gradient, Tensor) for gradients in calls for gradient in gradients)


class Ignore(torch.autograd.Function):
    """Uses a tensor, and has no gradient of it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, other: Tensor) -> Tensor:
        return tensor.sum() + other.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, gradient.expand(4)


@pytest.mark.spec("PROG-102")
@every_kind
@ranks(2)
def test_an_output_without_a_gradient_gives_parameters_no_gradient(kind: str) -> None:
    model = sharded(kind, Net().to(device()))
    parameters = list(model.parameters())
    for are_requested in (False, True):
        other = torch.ones(4, device=device(), requires_grad=True)
        loss = Ignore.apply(model(batch()), other)
        loss.backward(inputs=[other, *parameters] if are_requested else None)
        assert other.grad is not None
        assert all(parameter.grad is None for parameter in parameters)
    model(batch()).sum().backward()
    assert any(parameter.grad is not None for parameter in parameters)


# --- vmap ---


def mapped(net: nn.Module, x: Tensor) -> None:
    torch.vmap(net)(x).square().sum().backward()


def mapped_twice(net: nn.Module, x: Tensor) -> None:
    torch.vmap(torch.vmap(net))(x.expand(2, 3, 4)).square().sum().backward()


def mapped_and_not(net: nn.Module, x: Tensor) -> None:
    (torch.vmap(net)(x).square().sum() + net(x).sum()).backward()


def mapped_input(net: nn.Module, x: Tensor) -> None:
    x = x.clone().requires_grad_()
    torch.vmap(net)(x).square().sum().backward()
    assert x.grad is not None


@pytest.mark.spec("PROG-103")
@every_kind
@pytest.mark.parametrize("program", [mapped, mapped_twice, mapped_and_not, mapped_input])
@ranks(2)
def test_a_model_inside_vmap_trains(kind: str, program: Program) -> None:
    assert_trains(kind, program)


class Inside(Net):
    """Calls its units inside ``torch.vmap``."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(torch.vmap(self.block)(self.first(x)))
        return result


@pytest.mark.spec("PROG-103")
@every_kind
@ranks(2)
def test_a_unit_inside_vmap_trains(kind: str) -> None:
    assert_trains(kind, lambda net, x: net(x).square().sum().backward(), Inside())


# --- kept outputs inside checkpoints ---


class Keeper(nn.Linear):
    """Keeps its output as an attribute."""

    def forward(self, x: Tensor) -> Tensor:
        self.kept = super().forward(x)
        return self.kept


class Checkpointed(Net):
    """Runs its unit, which keeps its output, inside a checkpoint."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant, self.block = use_reentrant, Keeper(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.block, torch.tanh(self.first(x)), use_reentrant=self.use_reentrant)
        result: Tensor = self.head(torch.tanh(hidden))
        return result


@pytest.mark.spec("PROG-104")
@every_kind
@pytest.mark.parametrize("use_reentrant", [True, False])
@ranks(2)
def test_a_unit_that_keeps_its_output_trains_inside_a_checkpoint(kind: str, use_reentrant: bool) -> None:
    assert_trains(kind, lambda net, x: net(x).square().sum().backward(), Checkpointed(use_reentrant=use_reentrant))
