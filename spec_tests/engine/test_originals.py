"""The user's original parameters. Each one is a view of its part of the local shard."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from minifsdp.engine.flat import FlatLayout
from minifsdp.engine.flat_gradients import FlatGradients
from minifsdp.engine.flat_params import RegisteredOrigParams
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


def row(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


@pytest.mark.pure
@pytest.mark.spec("ORIG-02", "ORIG-03", "ORIG-04")
@pytest.mark.parametrize(("index", "weight", "bias"), [(0, [0, 1, 2, 3, 4], []), (1, [5], [6, 7, 8])])
def test_registered_parameters_remain_the_same_objects_and_show_their_shard(
    index: int, weight: list[float], bias: list[float]
) -> None:
    home = Unit()
    before = dict(home.named_parameters())
    made = own(home, index)
    after = dict(home.named_parameters())
    assert list(after) == ["weight", "bias"]
    assert all(after[name] is before[name] for name in after)
    assert [after["weight"].tolist(), after["bias"].tolist()] == [weight, bias]
    for parameter in after.values():
        if parameter.numel():
            assert parameter.untyped_storage().data_ptr() == made.shard.untyped_storage().data_ptr()


@pytest.mark.pure
@pytest.mark.spec("ORIG-05")
def test_a_step_of_an_optimizer_with_groups_writes_into_the_shard() -> None:
    home = Unit()
    made = own(home, 1)
    gradients = FlatGradients(made)
    gradients.add_reduced(row(1, 1, 1, 1, 0))
    groups = [{"params": [home.weight], "lr": 1.0}, {"params": [home.bias], "lr": 2.0}]
    torch.optim.SGD(groups, lr=0.0).step()
    assert made.shard.tolist() == [4, 4, 5, 6, 0]


@pytest.mark.pure
@pytest.mark.spec("ORIG-13")
def test_a_frozen_parameter_among_trained_ones_warns_and_gets_no_gradient() -> None:
    home = Unit()
    home.bias.requires_grad_(False)
    with pytest.warns(UserWarning, match=r"frozen parameters \(\['bias'\]\) among trained ones.*memory"):
        made = own(home, 1)
    gradients = FlatGradients(made)
    gradients.add_reduced(row(1, 2, 3, 4, 0))
    assert home.weight.grad is not None
    assert home.weight.grad.tolist() == [1]
    assert home.bias.grad is None
    assert made.requires_grad


@pytest.mark.pure
@pytest.mark.parametrize("frozen", [[], ["weight", "bias"]])
def test_uniformly_trained_or_frozen_unit_gives_no_warning(frozen: list[str]) -> None:
    home = Unit()
    for name in frozen:
        home.get_parameter(name).requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = own(home, 0)
    assert made.requires_grad is (not frozen)


@pytest.mark.pure
@pytest.mark.spec("SHARD-06", "FWD-07")
def test_reduced_gradients_accumulate_in_the_shape_of_the_shards() -> None:
    home = Unit()
    gradients = FlatGradients(own(home, 1))
    for _ in range(2):
        gradients.add_reduced(row(1, 2, 3, 4, 0))
    assert home.weight.grad is not None
    assert home.bias.grad is not None
    assert home.weight.grad.tolist() == [2]
    assert home.bias.grad.tolist() == [4, 6, 8]


@pytest.mark.pure
@pytest.mark.spec("NOSYNC-05")
def test_unreduced_gradients_have_original_shapes_and_reduced_ones_are_restored() -> None:
    home = Unit()
    gradients = FlatGradients(own(home, 1))
    gradients.add_reduced(row(1, 2, 3, 4, 0))
    for _ in range(2):
        gradients.keep_unreduced(torch.ones(10))
    assert home.weight.grad is not None
    assert home.bias.grad is not None
    assert home.weight.grad.tolist() == [[2, 2, 2], [2, 2, 2]]
    assert home.bias.grad.tolist() == [2, 2, 2]
    assert gradients.has_unreduced
    taken = gradients.take_unreduced()
    assert taken is not None
    assert taken.tolist() == [2.0] * 10
    assert not gradients.has_unreduced
    assert home.weight.grad.tolist() == [1]
    assert home.bias.grad.tolist() == [2, 3, 4]


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
def test_data_assigned_to_a_parameter_is_copied_into_the_shard() -> None:
    home = Unit()
    made = own(home, 1)
    before = made.stamp()
    home.bias.data = row(60, 70, 80)
    assert made.stamp() != before
    made.write_back()
    assert made.shard.tolist() == [5, 60, 70, 80, 0]
    assert home.bias.untyped_storage().data_ptr() == made.shard.untyped_storage().data_ptr()


@pytest.mark.pure
def test_a_parameter_that_was_given_another_size_raises_with_its_name() -> None:
    home = Unit()
    made = own(home, 1)
    home.bias.data = torch.zeros(7)
    with pytest.raises(
        RuntimeError, match=r"'bias' was set to a tensor of 7 elements.*this rank has 3.*summon_full_params"
    ):
        made.write_back()


@pytest.mark.pure
def test_setting_data_of_a_parameter_without_local_elements_raises() -> None:
    home = Unit()
    made = own(home, 0)
    home.bias.data = torch.zeros(3)
    with pytest.raises(RuntimeError, match=r"'bias' was set to a tensor of 3 elements.*this rank has 0"):
        made.write_back()


@pytest.mark.pure
def test_one_rank_unit_keeps_param_shapes() -> None:
    home = Unit()
    gradients = FlatGradients(own(home, 0, num_shards=1))
    assert (home.weight.shape, home.bias.shape) == ((2, 3), (3,))
    gradients.add_reduced(torch.ones(9))
    assert home.weight.grad is not None
    assert home.weight.grad.shape == (2, 3)


@pytest.mark.pure
@pytest.mark.spec("MP-11", "MP-12")
@pytest.mark.parametrize("keep", [False, True])
def test_reduced_gradients_are_widened_unless_they_may_keep_their_dtype(keep: bool) -> None:
    home = Unit()
    parameters = owned_parameters([("", home)], set())
    mesh, precision = MeshGroups(None, None), Precision(keep_reduce_dtype=keep)
    layout = FlatLayout(home, parameters, mesh, torch.device("cpu"), precision, use_orig_params=True)
    layout.accept_gradient(Gradient([]), row(*range(9)).bfloat16())
    assert home.bias.grad is not None
    assert home.bias.grad.dtype is (torch.bfloat16 if keep else torch.float32)


@pytest.mark.pure
def test_stamp_changes_with_each_value() -> None:
    home = Unit()
    made = own(home, 1)
    first = made.stamp()
    assert made.stamp() == first
    with torch.no_grad():
        home.bias.mul_(2)
    second = made.stamp()
    assert second != first
    made.overwrite(row(1, 2, 3, 4, 0))
    assert made.stamp() != second
    assert home.bias.tolist() == [2, 3, 4]


@pytest.mark.pure
@pytest.mark.spec("SHARD-11")
def test_one_rank_unit_shows_params_in_original_shape() -> None:
    home = Unit()
    gradients = FlatGradients(own(home, 0, num_shards=1))
    assert [parameter.shape for parameter in home.parameters()] == [(2, 3), (3,)]
    gradients.add_reduced(row(*range(9)))
    assert [p.grad.shape for p in home.parameters() if p.grad is not None] == [(2, 3), (3,)]


@pytest.mark.pure
@pytest.mark.spec("SUMMON-15", "MP-12")
def test_reduced_gradient_keeps_its_dtype() -> None:
    gradients = FlatGradients(own(Unit(), 1))
    gradients.add_reduced(row(1, 2, 3, 4, 0).bfloat16())
    local_shard, present = gradients.reduced()
    assert (local_shard.dtype, present) == (torch.bfloat16, [True, True])
