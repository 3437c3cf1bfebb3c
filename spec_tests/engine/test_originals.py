"""The gradients of flat and of original parameters: reduced ones, unreduced ones, and their dtypes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from minifsdp.engine.flat import FlatLayout
from minifsdp.engine.flat_gradients import FlatGradients
from minifsdp.engine.flat_params import RegisteredFlatParam, RegisteredOrigParams
from minifsdp.engine.flat_tensor import FlatSharding
from minifsdp.engine.layout import Gradient, owned_parameters
from minifsdp.engine.mesh import MeshGroups
from minifsdp.engine.precision import Precision


class Unit(nn.Module):
    """The example of the module docstring: a weight of 2 x 3 and a bias of 3."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(6.0).view(2, 3))
        self.bias = nn.Parameter(torch.arange(6.0, 9.0))


def own(home: nn.Module, index: int, num_shards: int = 2) -> RegisteredOrigParams:
    parameters = owned_parameters([("", home)], set())
    sharding = FlatSharding(tuple(p.numel() for p in parameters), num_shards)
    row = torch.zeros(sharding.padded_numel)
    row[: sharding.numel] = torch.cat([p.detach().reshape(-1) for p in parameters])
    return RegisteredOrigParams(parameters, row[sharding.shard_range(index)].clone(), sharding, index)


def flat(home: nn.Module) -> RegisteredFlatParam:
    return RegisteredFlatParam(home, owned_parameters([("", home)], set()), torch.zeros(5))


def row(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


@pytest.mark.pure
@pytest.mark.spec("NOSYNC-05", "FWD-07")
@pytest.mark.parametrize("is_flat", [False, True])
def test_unreduced_gradients_and_reduced_ones_exist_at_the_same_time(is_flat: bool) -> None:
    home = Unit()
    made = flat(home) if is_flat else own(home, 1)
    gradients = FlatGradients(made)
    shown: list[Any] = list(home.parameters())
    for _ in range(2):
        gradients.add_reduced(row(1, 2, 3, 4, 0))
    assert gradients.take_unreduced() is None
    for _ in range(2):
        gradients.keep_unreduced(torch.ones(10))
    # The unreduced gradients have the size of the unsharded parameters.
    unreduced = [[2.0] * 10] if is_flat else [[[2, 2, 2], [2, 2, 2]], [2, 2, 2]]
    assert [parameter.grad.tolist() for parameter in shown] == unreduced
    assert gradients.has_unreduced
    taken = gradients.take_unreduced()
    assert taken is not None
    assert taken.tolist() == [2.0] * 10
    assert not gradients.has_unreduced
    reduced = [[2, 4, 6, 8, 0]] if is_flat else [[2], [4, 6, 8]]
    assert [parameter.grad.tolist() for parameter in shown] == reduced


@pytest.mark.pure
@pytest.mark.spec("FWD-08")
def test_zero_grad_of_one_parameter_drops_its_part_and_zero_grad_of_all_drops_everything() -> None:
    home = Unit()
    gradients = FlatGradients(own(home, 1))
    gradients.keep_unreduced(torch.ones(10))
    home.bias.grad = None
    taken = gradients.take_unreduced()
    assert taken is not None
    assert taken.tolist() == [1, 1, 1, 1, 1, 1, 0, 0, 0, 1]
    gradients.keep_unreduced(torch.ones(10))
    home.zero_grad()
    assert not gradients.has_unreduced
    assert gradients.take_unreduced() is None


@pytest.mark.pure
@pytest.mark.parametrize(("index", "numel", "has"), [(1, 7, 3), (0, 3, 0)])
def test_a_parameter_that_was_given_another_size_raises_with_its_name(index: int, numel: int, has: int) -> None:
    home = Unit()
    made = own(home, index)
    home.bias.data = torch.zeros(numel)
    message = rf"'bias' was set to a tensor of {numel} elements.*this rank has {has}.*summon_full_params"
    with pytest.raises(RuntimeError, match=message):
        made.write_back()


@pytest.mark.pure
@pytest.mark.spec("MP-11", "MP-12")
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("keep", [False, True])
def test_reduced_gradients_are_widened_unless_they_may_keep_their_dtype(keep: bool, use_orig_params: bool) -> None:
    home = Unit()
    parameters = owned_parameters([("", home)], set())
    mesh, precision = MeshGroups(None, None), Precision(keep_reduce_dtype=keep)
    layout = FlatLayout(home, parameters, mesh, torch.device("cpu"), precision, use_orig_params=use_orig_params)
    for _ in range(2):
        layout.accept_gradient(Gradient([]), row(*range(9)).bfloat16())
    gradient = layout.local_parameters()[-1].grad
    assert gradient is not None
    assert gradient.dtype is (torch.bfloat16 if keep else torch.float32)
    assert gradient[-3:].tolist() == [12, 14, 16]
    assert layout.registered.shard.dtype is torch.float32


@pytest.mark.pure
@pytest.mark.spec("SUMMON-15", "MP-12")
def test_reduced_gradient_keeps_its_dtype() -> None:
    gradients = FlatGradients(own(Unit(), 1))
    gradients.add_reduced(row(1, 2, 3, 4, 0).bfloat16())
    local_shard, present = gradients.reduced()
    assert (local_shard.dtype, present) == (torch.bfloat16, [True, True])
