"""Programs that change, keep or describe the outputs of the root, and steps of one optimizer over several models."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from spec_tests.harness import device, ranks
from spec_tests.models.values import full_values
from spec_tests.subject import FullyShardedDataParallel, fully_shard

Program = Callable[[Any, Tensor], Tensor]


class Pair(tuple[Any, ...]):
    """A tuple whose constructor has two arguments."""

    __slots__ = ()

    def __new__(cls, first: Any, second: Any) -> Pair:
        return super().__new__(cls, (first, second))


class Keeper(nn.Module):
    """Keeps its output, and returns it in the form that ``kind`` names."""

    def __init__(self, kind: str = "plain") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.layer, self.head = kind, nn.Linear(4, 4), nn.Linear(4, 4)
        self.kept: Any = None
        self.cyclic: list[Any] = []
        self.cyclic.append(self.cyclic)
        self.temperature = None

    def forward(self, x: Tensor) -> Any:
        h = self.head(torch.tanh(self.layer(x)))
        if self.kind == "kept":
            self.kept = h
        if self.kind == "marked":
            h.retain_grad()
            h.mark = "kept"  # type: ignore[attr-defined]
        forms = {"twice": {"last": h, "hidden": (x, h)}, "view": (h, h[:, 0]), "class": Pair(h, 2 * h)}
        return {**forms, "inner": (self.head(h), {"hidden": [h, x]})}.get(self.kind, h)


def twice(model: Any, x: Tensor) -> Tensor:
    output = model(x)
    output["last"].mul_(3)
    return output["hidden"][1].pow(2).sum()


def view(model: Any, x: Tensor) -> Tensor:
    output, column = model(x)
    output.mul_(3)
    return column.pow(2).sum()


def view_changed(model: Any, x: Tensor) -> Tensor:
    output, column = model(x)
    column.mul_(3)
    return output.pow(2).sum()


def kept(model: Any, x: Tensor) -> Tensor:
    output = model(x)
    output.mul_(3)
    inside = model.module if isinstance(model, FullyShardedDataParallel) else model
    return inside.kept.pow(2).sum()


def inner(model: Any, x: Tensor) -> Tensor:
    # The input has a graph of its own.
    x = 2 * x.clone().requires_grad_()
    output, named = model(x)
    tensors = [x, *named["hidden"]]
    for tensor in tensors:
        tensor.retain_grad()
    loss: Tensor = output.pow(2).sum()
    loss.backward(retain_graph=True)
    retained = [tensor.grad.clone() for tensor in tensors if tensor.grad is not None]
    for found, expected in zip(retained, torch.autograd.grad(loss, tensors, retain_graph=True), strict=True):
        torch.testing.assert_close(found, expected)
    return named["hidden"][0].sum()


def own_class(model: Any, x: Tensor) -> Tensor:
    output = model(x)
    assert type(output) is Pair
    return (output[0] * output[1]).sum()


def marked(model: Any, x: Tensor) -> Tensor:
    output = model(x)
    assert output.mark == "kept"
    output.pow(2).sum().backward(retain_graph=True)
    assert output.grad is not None
    return output.sum()


def layouts(kind: str) -> Iterator[nn.Module]:
    for originals in (False, True):
        yield FullyShardedDataParallel(Keeper(kind), use_orig_params=originals, device_id=device())
    yield fully_shard(Keeper(kind).to(device()))


PROGRAMS: dict[str, Program] = {
    "twice": twice,
    "view": view,
    "view changed": view_changed,
    "kept": kept,
    "inner": inner,
    "class": own_class,
    "marked": marked,
}
# Tensors of the simulated device are of a class of their own.
PLAIN_ONLY = pytest.mark.not_simulated("the package inspects plain tensors only")
NOT_SIMULATED = dict.fromkeys(("view", "view changed", "kept", "marked"), PLAIN_ONLY)


@pytest.mark.spec("PROG-99")
@pytest.mark.parametrize("name", [pytest.param(name, marks=NOT_SIMULATED.get(name, [])) for name in PROGRAMS])
@ranks(2)
def test_outputs_stay_the_tensors_that_the_module_returns(name: str) -> None:
    kind, program = name.partition(" ")[0], PROGRAMS[name]
    plain, x = Keeper(kind).to(device()), torch.ones(2, 4).to(device())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    program(plain, x).backward()
    optimizer.step()
    for model in layouts(kind):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        program(model, x).backward()
        optimizer.step()
        for found, expected in zip(full_values(model).values(), plain.parameters(), strict=True):
            torch.testing.assert_close(found, expected.detach())


@pytest.mark.spec("PROG-99")
@ranks(2)
def test_a_kept_tensor_gets_one_hook() -> None:
    inside = Keeper()
    model = FullyShardedDataParallel(
        nn.Sequential(FullyShardedDataParallel(inside, device_id=device()), nn.Linear(4, 4)), device_id=device()
    )
    inside.kept = 2 * torch.ones(2, 4, device=device(), requires_grad=True)
    for _ in range(5):
        model(torch.ones(2, 4).to(device())).sum().backward()
    assert len(inside.kept._backward_hooks) == 1


@pytest.mark.spec("PROG-26")
@ranks(2)
def test_a_step_of_one_model_does_not_affect_another_model_of_its_optimizer() -> None:
    x = torch.ones(2, 4).to(device())
    for makes in (0, 1, 2):
        first, second = (list(layouts("plain"))[makes] for _ in range(2))
        optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
        losses = first(x).sum(), second(x).sum()
        for loss in losses:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.spec("PROG-07")
@ranks(2)
def test_the_members_of_a_sharded_module_can_be_listed() -> None:
    model = fully_shard(Keeper().to(device()))
    assert hasattr(model, "_ddp_params_and_buffers_to_ignore")
    assert dict(inspect.getmembers(model))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="E-ddp-around"):
            nn.parallel.DistributedDataParallel(model)


@pytest.mark.spec("PROG-47")
@ranks(2)
def test_a_tensor_of_the_program_can_be_set_on_the_wrapper() -> None:
    model = FullyShardedDataParallel(Keeper(), device_id=device())
    model.temperature = torch.tensor(2.0)
    model.temperature = copy.copy(model.temperature)
    with pytest.raises(AttributeError, match="E-set-on-wrapper"):
        model.layer = nn.Linear(4, 4)
