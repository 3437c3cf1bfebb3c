"""The root state: the choice of the root unit, its other units, and the reset of state before each iteration."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from spec_tests.harness import device, ranks
from spec_tests.models.modules import chain
from spec_tests.models.small import (
    assert_at_rest,
    assert_gradients,
    assert_trains,
    draw,
    mean_gradients,
    shard_each,
    square_loss,
    units_of,
)
from spec_tests.models.three_units import FULL, NONE, each_strategy
from spec_tests.subject import FullyShardedDataParallel as FSDP
from spec_tests.subject import ShardingStrategy


def with_own_layer() -> nn.Sequential:
    """Two blocks and a layer that belongs to the root."""
    layer = nn.Linear(3, 2)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(0.25)
    return nn.Sequential(*chain(2), layer).to(device())


def sharded(**options: Any) -> Any:
    model = with_own_layer()
    for index in (0, 1):
        model[index] = FSDP(model[index], device_id=device(), **options)
    return FSDP(model, device_id=device(), **options)


# --- the root state ---


@pytest.mark.spec("CTOR-10")
@ranks(2)
def test_unit_with_the_first_outer_forward_is_the_root() -> None:
    model = sharded()
    model(draw(0))
    root, first, second = units_of(model)
    assert [unit.name for unit in (root, first, second)] == ["", "0", "1"]
    assert [unit.policy.reshard_after_forward for unit in (root, first, second)] == [False, True, True]
    tree = model._root_state
    assert all(wrapper._root_state is tree for wrapper in FSDP.fsdp_modules(model))
    assert all(unit.root is tree for unit in units_of(model))
    assert root.inner == {first, second}
    assert first.inner == second.inner == frozenset()


@ranks(2)
def test_two_trees_in_one_loss_train_both() -> None:
    models, plain = nn.ModuleList([sharded(), shard_each(chain(3))]), nn.ModuleList([with_own_layer(), chain(3)])

    def of_both(models: Any, rank: int) -> Tensor:
        return models[0](models[1](draw(rank))).square().mean()

    expected = mean_gradients(plain, of_both)
    for _ in range(2):
        models.zero_grad()
        of_both(models, dist.get_rank()).backward()
        for index, model in enumerate(models):
            prefix = f"{index}."
            mine = {name.removeprefix(prefix): g for name, g in expected.items() if name.startswith(prefix)}
            assert_gradients(model, mine)
            assert_at_rest(model)


# --- a submodule that ran on its own first ---


@pytest.mark.spec("CTOR-11")
@pytest.mark.parametrize("before", ["trained", "ran forward", "was evaluated", "broke off"])
@pytest.mark.parametrize("original", [False, True])
@each_strategy
@ranks(2)
def test_root_takes_over_submodule_that_ran_alone(strategy: ShardingStrategy, original: bool, before: str) -> None:
    model = sharded(sharding_strategy=strategy, use_orig_params=original)
    plain = with_own_layer()
    part = model[0]
    if before == "trained":
        part(draw(3)).sum().backward()
    elif before == "ran forward":
        part(draw(3))
    elif before == "was evaluated":
        with torch.no_grad():
            part(draw(3))
    else:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            part(torch.ones(1, 17, device=device()))
    calls = assert_trains(model, mean_gradients(plain, square_loss))
    assert calls.count("RS" if strategy is not NONE else "AR") == 3, "each unit once, also that of the other tree"
    assert part._root_state is model._root_state
    assert part._unit.name == "0"
    assert part._unit.policy.reshard_after_forward is (strategy is FULL), "only the root is kept"
