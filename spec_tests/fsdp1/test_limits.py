"""Documented limitations: each case gives a clear error or the right result, and never a wrong result.

Other files test each topic on its own. This file tests combinations of topics that users can run into: a parameter tied
across units, a mistake that only has an effect two calls later, or a submodule that is called on its own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from spec_tests.checkpoint.refusals import refused
from spec_tests.harness import ranks
from spec_tests.models.modules import WIDTH, seeded
from spec_tests.models.running import batch, iterate, loss_of
from spec_tests.models.sharding import FLAT_STRATEGIES, wrapped
from spec_tests.models.values import assert_same, full_values, named
from spec_tests.subject import FullyShardedDataParallel, ShardingStrategy

FSDP = FullyShardedDataParallel
either = pytest.mark.parametrize("use_orig_params", [False, True])
flat_strategies = pytest.mark.parametrize("strategy", FLAT_STRATEGIES)


# --- parameters that are tied across units ---


@pytest.mark.spec("ORIG-16", "CTOR-12")
@either
@ranks(2)
def test_units_cannot_be_tied_after_wrapping(use_orig_params: bool) -> None:
    model = wrapped(use_orig_params=use_orig_params)
    first, second = (model.blocks[index].module.linear for index in (1, 2))
    second.weight = first.weight
    with refused(RuntimeError, "blocks.2.linear.weight", "removed or replaced"):
        iterate(model)


@pytest.mark.spec("ORIG-16", "CTOR-05")
@ranks(2)
def test_a_tie_between_a_unit_and_a_module_in_no_unit_is_noticed_at_the_first_step() -> None:
    plain = seeded()
    plain.blocks[2].linear.weight = plain.blocks[1].linear.weight
    plain.blocks[1] = FSDP(plain.blocks[1])
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    loss_of(plain(batch())).backward()
    with pytest.warns(UserWarning, match="1 of 11 parameters of this SGD were replaced"):
        optimizer.step()


# --- gradients that were never reduced ---


def clip_by_method(model: FSDP, optimizer: Any) -> None:
    model.clip_grad_norm_(1.0)


def clip_by_utility_and_step(model: FSDP, optimizer: Any) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


@pytest.mark.spec("NOSYNC-10")
@pytest.mark.parametrize("mistake", [clip_by_method, clip_by_utility_and_step])
@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP])
@either
@ranks(2)
def test_step_and_clipping_raise_after_an_unfinished_no_sync(
    mistake: Callable[..., None], strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    model = wrapped(sharding_strategy=strategy, use_orig_params=use_orig_params)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.no_sync():
        iterate(model)
    with refused(RuntimeError, "never reduced", "no_sync"):
        mistake(model, optimizer)


@pytest.mark.spec("NOSYNC-10")
@either
@ranks(2)
def test_step_raises_if_the_reducing_backward_skips_a_unit(use_orig_params: bool) -> None:
    model = wrapped(use_orig_params=use_orig_params)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.no_sync():
        iterate(model, order=[0, 1, 2, 3])
    iterate(model, order=[0, 1, 2])
    with refused(RuntimeError, "never reduced"):
        optimizer.step()


# --- an optimizer that was built before wrapping ---


@pytest.mark.spec("CTOR-05", "ORIG-02")
@flat_strategies
@ranks(2)
def test_with_original_parameters_an_optimizer_from_before_wrapping_trains_the_model(
    strategy: ShardingStrategy,
) -> None:
    after = wrapped(sharding_strategy=strategy, use_orig_params=True)
    late = torch.optim.SGD(after.parameters(), lr=0.1)
    plain = seeded()
    early = torch.optim.SGD(plain.parameters(), lr=0.1)
    before = wrapped(plain, sharding_strategy=strategy, use_orig_params=True)
    for model, optimizer in ((after, late), (before, early)):
        for step in range(2):
            iterate(model, step, optimizer)
    assert_same(full_values(before), full_values(after), bitwise=True)


# --- a submodule that is called on its own ---


def two_layers() -> nn.Module:
    """Two layers of one unit, which can be called together or one by one."""
    layers = {"first": nn.Linear(WIDTH, WIDTH), "tanh": nn.Tanh(), "second": nn.Linear(WIDTH, WIDTH)}
    return nn.Sequential(OrderedDict(layers))


def of_first(model: nn.Module, rank: int) -> Tensor:
    return loss_of(model.first(batch(rank=rank)))


@pytest.mark.spec("FWD-01")
@pytest.mark.parametrize("when", ["before any forward", "after a forward", "after a backward"])
@flat_strategies
@either
@ranks(2)
def test_a_submodule_called_on_its_own_raises_or_has_the_mean_gradient(
    strategy: ShardingStrategy, use_orig_params: bool, when: str
) -> None:
    plain = seeded(two_layers)
    model = FSDP(seeded(two_layers), sharding_strategy=strategy, use_orig_params=use_orig_params)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if when != "before any forward":
        loss = loss_of(model(batch()))
        if when == "after a backward":
            loss.backward()
            model.zero_grad()
        del loss
    try:
        of_first(model.module, dist.get_rank()).backward()
    except RuntimeError:
        return
    optimizer.step()
    (sum(of_first(plain, rank) for rank in range(2)) / 2).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert_same(full_values(model), named(plain), bitwise=False)


# --- unsharded parameters in user code ---
