"""One flat parameter for the whole unit, and gradients of two sizes in its ``.grad``."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from minifsdp.engine.flat import FlatLayout
from minifsdp.engine.flat_gradients import FlatGradients
from minifsdp.engine.flat_params import RegisteredFlatParam
from minifsdp.engine.layout import Gradient, owned_parameters
from minifsdp.engine.mesh import MeshGroups
from minifsdp.engine.precision import Precision


def registered(num: int = 2) -> RegisteredFlatParam:
    """A unit with two elements, of which this rank stores ``num``."""
    home = nn.Linear(1, 1)
    parameters = owned_parameters([("", home)], set())
    return RegisteredFlatParam(home, parameters, torch.arange(float(num)))


def row(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


@pytest.mark.pure
@pytest.mark.spec("ORIG-01")
def test_the_module_lists_one_flat_parameter_in_place_of_its_own() -> None:
    made = registered()
    assert [(name, p.dim()) for name, p in made._module.named_parameters()] == [("_flat_param", 1)]
    assert made.parameters == [made.shard]


@pytest.mark.pure
@pytest.mark.spec("FWD-07", "SHARD-06")
def test_reduced_gradients_add_up() -> None:
    made = registered()
    gradients = FlatGradients(made)
    gradients.add_reduced(row(1, 2))
    gradients.add_reduced(row(10, 20))
    assert made.shard.grad is not None
    assert made.shard.grad.tolist() == [11, 22]


@pytest.mark.pure
@pytest.mark.spec("MP-11", "MP-12")
@pytest.mark.parametrize("keep", [False, True])
def test_a_reduced_gradient_is_widened_unless_it_may_keep_its_dtype(keep: bool) -> None:
    module, precision = nn.Linear(1, 1), Precision(keep_reduce_dtype=keep)
    parameters = owned_parameters([("", module)], set())
    layout = FlatLayout(module, parameters, MeshGroups(None, None), torch.device("cpu"), precision)
    made = layout.registered
    layout.accept_gradient(Gradient([]), row(1, 2).bfloat16())
    assert made.shard.grad is not None
    assert made.shard.grad.dtype is (torch.bfloat16 if keep else torch.float32)
    assert made.shard.dtype is torch.float32
    layout.accept_gradient(Gradient([]), row(1, 2).bfloat16())
    assert made.shard.grad.tolist() == [2, 4]


@pytest.mark.pure
@pytest.mark.spec("NOSYNC-05")
def test_unreduced_gradient_is_shown_in_full_size_and_accumulates() -> None:
    made = registered()
    gradients = FlatGradients(made)
    gradients.keep_unreduced(row(1, 1, 1, 1))
    assert gradients.has_unreduced
    assert made.shard.grad is not None
    assert made.shard.grad.tolist() == [1, 1, 1, 1]
    assert made.shard.tolist() == [0, 1], "the shard itself is what it was"
    gradients.keep_unreduced(row(2, 2, 2, 2))
    taken = gradients.take_unreduced()
    assert taken is not None
    assert taken.tolist() == [3, 3, 3, 3]
    assert not gradients.has_unreduced
    assert made.shard.grad is None


@pytest.mark.pure
def test_reduced_gradient_is_restored_after_the_unreduced_gradient_is_taken() -> None:
    made = registered()
    gradients = FlatGradients(made)
    gradients.add_reduced(row(5, 6))
    gradients.keep_unreduced(row(1, 1, 1, 1))
    gradients.keep_unreduced(row(1, 1, 1, 1))
    taken = gradients.take_unreduced()
    assert taken is not None
    assert taken.tolist() == [2, 2, 2, 2]
    assert made.shard.grad is not None
    assert made.shard.grad.tolist() == [5, 6]


@pytest.mark.pure
@pytest.mark.spec("FWD-08")
def test_zero_grad_drops_the_reduced_and_the_unreduced_gradient() -> None:
    made = registered()
    gradients = FlatGradients(made)
    gradients.add_reduced(row(5, 6))
    gradients.keep_unreduced(row(1, 1, 1, 1))
    torch.optim.SGD(made.parameters, lr=0.1).zero_grad()
    assert not gradients.has_unreduced
    assert gradients.take_unreduced() is None
    assert made.shard.grad is None


@pytest.mark.pure
def test_take_unreduced_returns_none_without_an_unreduced_gradient() -> None:
    made = registered()
    gradients = FlatGradients(made)
    gradients.add_reduced(row(5, 6))
    assert gradients.take_unreduced() is None
    assert made.shard.grad is not None
    assert made.shard.grad.tolist() == [5, 6]


@pytest.mark.pure
def test_stamp_changes_only_with_the_values_and_the_memory() -> None:
    made = registered()
    gradients = FlatGradients(made)
    first = made.stamp()
    gradients.add_reduced(row(1, 1))
    assert made.stamp() == first
    made.overwrite(row(8, 9))
    second = made.stamp()
    assert second != first
    assert made.shard.tolist() == [8, 9]
    made.shard.data = made.shard.data.clone()
    assert made.stamp() != second


@pytest.mark.pure
def test_flat_parameter_is_not_listed_while_full_parameters_are_in_use() -> None:
    made = registered()
    shown = made.use_full_params([row(1).view(1, 1), row(2)])
    assert [type(p) for p in shown] == [nn.Parameter, nn.Parameter]
    assert list(made._module.named_parameters()) == []
    made.use_sharded_params()
    assert [name for name, _ in made._module.named_parameters()] == ["_flat_param"]
