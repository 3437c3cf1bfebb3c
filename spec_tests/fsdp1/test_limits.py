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

from spec_tests.checkpoint.refusals import caught_warnings, refused
from spec_tests.harness import device, ranks
from spec_tests.models.modules import WIDTH, Stack, seeded
from spec_tests.models.running import batch, iterate, loss_of
from spec_tests.models.sharding import FLAT_STRATEGIES, wrapped
from spec_tests.models.values import assert_same, full_values, named
from spec_tests.subject import FullyShardedDataParallel, ShardingStrategy

FSDP = FullyShardedDataParallel
either = pytest.mark.parametrize("use_orig_params", [False, True])
flat_strategies = pytest.mark.parametrize("strategy", FLAT_STRATEGIES)


# --- parameters that are tied across units ---


def two_blocks(plain: Stack) -> tuple[nn.Module, str]:
    return plain.blocks[2].linear, "linear.weight"


def block_and_root(plain: Stack) -> tuple[nn.Module, str]:
    return plain.enter, "enter.weight"


@pytest.mark.spec("ORIG-16")
@pytest.mark.parametrize("other", [two_blocks, block_and_root])
@flat_strategies
@either
@ranks(2)
def test_manually_wrapped_units_cannot_share_a_parameter(
    other: Callable[[Stack], tuple[nn.Module, str]], strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    options = {"sharding_strategy": strategy, "use_orig_params": use_orig_params}
    plain = seeded()
    second, name = other(plain)
    second.weight = plain.blocks[1].linear.weight
    with refused(ValueError, "linear.weight", name, "tied across units"):
        for index, block in enumerate(plain.blocks):
            plain.blocks[index] = FSDP(block, **options)
        FSDP(plain, **options)


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


@pytest.mark.spec("CTOR-05")
@pytest.mark.parametrize("was_used", [False, True], ids=["new", "has stepped before"])
@ranks(2)
def test_used_and_unused_optimizers_from_before_wrapping_are_noticed(was_used: bool) -> None:
    # Wrap another model first, so that the package already watches optimizers.
    FSDP(nn.Linear(2, 2, device=device()))
    plain = seeded()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    if was_used:
        loss_of(plain(batch(rank=0))).backward()
        optimizer.step()
        optimizer.zero_grad()
    model = wrapped(plain)
    iterate(model)
    with pytest.warns(UserWarning, match="12 of 12 parameters of this SGD were replaced"):
        optimizer.step()


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
            optimizer.zero_grad()
            iterate(model, step)
            optimizer.step()
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


@pytest.mark.spec("SUMMON-17")
@either
@ranks(2)
def test_backward_inside_summon_raises(use_orig_params: bool) -> None:
    model = FSDP(seeded(two_layers), use_orig_params=use_orig_params)
    said = pytest.raises(RuntimeError, match=rf"rank {dist.get_rank()}.*summon_full_params")
    with said, FSDP.summon_full_params(model, writeback=False):
        # Call the inner module, because the wrapper would raise immediately.
        loss_of(model.module(batch())).backward()


@pytest.mark.spec("SUMMON-05", "SUMMON-17")
@pytest.mark.parametrize("has_run", [False, True])
@either
@ranks(2)
def test_units_that_were_not_summoned_may_run_inside_summon(use_orig_params: bool, has_run: bool) -> None:
    # The usual way to generate text: summon the root's own parameters once; the blocks all-gather theirs as usual.
    model = wrapped(use_orig_params=use_orig_params)
    if has_run:
        iterate(model)
        model.zero_grad()
    with torch.no_grad(), FSDP.summon_full_params(model, recurse=False, writeback=False):
        found = model.module(batch())
    assert torch.equal(found, seeded()(batch()))
    iterate(model)


@pytest.mark.spec("SUMMON-17")
@either
@ranks(2)
def test_forward_runs_while_an_inner_unit_is_summoned(use_orig_params: bool) -> None:
    model = wrapped(use_orig_params=use_orig_params)
    expected = model(batch()).detach()
    with FSDP.summon_full_params(model.blocks[1]), torch.no_grad():
        assert torch.equal(model(batch()), expected)
    with caught_warnings() as caught:
        iterate(model)
    assert caught == []
