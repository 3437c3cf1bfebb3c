"""Tensors are found however deep the containers around them are nested."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from spec_tests.harness import device, ranks
from spec_tests.models.apis import Api, all_apis
from spec_tests.models.modules import Block, seeded
from spec_tests.models.running import batch
from spec_tests.models.values import assert_same


def packed(tensor: Tensor, depth: int) -> Any:
    """The tensor in ``depth`` containers: a list in a tuple in a dict, and so on."""
    value: Any = tensor
    for level in range(depth):
        value = ([value], (value, None), {"key": value})[level % 3]
    return value


def unpacked(value: Any) -> Tensor:
    while not isinstance(value, Tensor):
        value = value["key"] if isinstance(value, dict) else value[0]
    return value


class Keeps(Block):
    """Keeps a second output as an attribute."""

    depth = 0

    def forward(self, x: Tensor) -> Tensor:
        self.kept = packed(super().forward(2 * x), self.depth)
        return super().forward(x)


class Packs(Block):
    """Takes and returns a packed tensor."""

    depth = 0

    def forward(self, x: Any) -> Any:
        return packed(super().forward(unpacked(x)), self.depth)


def gradients_of_plain(plain: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in plain.named_parameters() if parameter.grad is not None}


@pytest.mark.spec("PROG-27")
@pytest.mark.parametrize("depth", range(5))
@all_apis
@ranks(2)
def test_a_loss_of_a_kept_activation_trains_at_each_depth_of_containers(api: Api, depth: int) -> None:
    plain, inner = seeded(Keeps), seeded(Keeps)
    model = api.shard(nn.Sequential(inner, nn.Linear(6, 2).to(device())), unit_classes=(Keeps,))
    plain.depth = inner.depth = depth
    for net, keeper in ((plain, plain), (model, inner)):
        net(batch(0, 0))
        unpacked(keeper.kept).square().mean().backward()
    found = {name.removeprefix("0."): g for name, g in api.gradients(model).items() if name.startswith("0.")}
    assert_same(found, gradients_of_plain(plain), bitwise=True)


@pytest.mark.spec("FS2-13", "MP-17")
@pytest.mark.parametrize("depth", [0, 1, 3, 6, 12])
@all_apis
@ranks(2)
def test_inputs_are_cast_and_outputs_train_at_each_depth_of_containers(api: Api, depth: int) -> None:
    plain, inner = seeded(Packs).double(), seeded(Packs)
    precision = {"param_dtype": torch.float64, "cast_forward_inputs": True}
    model = api.shard(nn.Sequential(inner), unit_classes=(Packs,), precision=precision)
    plain.depth = inner.depth = depth
    for net, x in ((plain, batch(0, 0).double()), (model, batch(0, 0))):
        output = unpacked(net(packed(x, depth)))
        assert output.dtype is torch.float64
        output.square().mean().backward()
    found = {name.removeprefix("0."): gradient for name, gradient in api.gradients(model).items()}
    assert_same(found, {name: gradient.float() for name, gradient in gradients_of_plain(plain).items()}, bitwise=True)
