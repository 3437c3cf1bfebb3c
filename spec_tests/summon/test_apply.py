"""``apply``: calls a function for every submodule, with unsharded parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from spec_tests.harness import ranks
from spec_tests.models.modules import seeded
from spec_tests.models.running import Wire, batch, iterate, loss_of
from spec_tests.models.sharding import FULL_SHARD, HYBRID_SHARD, NO_SHARD, SHARD_GRAD_OP, wrapped
from spec_tests.models.values import assert_same, full_values, named
from spec_tests.subject import FullyShardedDataParallel, ShardingStrategy

PAIRS = [(FULL_SHARD, False), (FULL_SHARD, True), (SHARD_GRAD_OP, True), (NO_SHARD, False), (NO_SHARD, True)]
pairs = pytest.mark.parametrize(("strategy", "use_orig_params"), PAIRS)


def visits_of(model: nn.Module, *, wrappers: bool = False) -> list[tuple[Any, ...]]:
    """The modules that ``apply`` visits, in order, with the shapes and values of their own parameters at that time."""
    visits: list[tuple[Any, ...]] = []

    def note(module: nn.Module) -> None:
        own = [
            (name, tuple(p.shape), float(p.detach().sum())) for name, p in module._parameters.items() if p is not None
        ]
        if wrappers or type(module).__name__ != "FullyShardedDataParallel":
            visits.append((type(module).__name__, own))

    model.apply(note)
    return visits


@pytest.mark.spec("APPLY-01")
@pairs
@ranks(2)
def test_apply_visits_every_module_after_its_children_with_full_parameters(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    model = wrapped(sharding_strategy=strategy, use_orig_params=use_orig_params)
    before = named(model)
    expected = visits_of(seeded())
    assert [name for name, _ in expected][-1] == "Stack"
    for _ in range(2):
        assert visits_of(model) == expected
        assert_same(named(model), before, bitwise=True)
        # The second iteration of the loop checks this in the middle of training.
        iterate(model)


def fill(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        with torch.no_grad():
            module.weight.fill_(module.in_features + module.out_features / 100)
            module.bias.zero_()


@pytest.mark.spec("APPLY-01", "APPLY-02")
@pytest.mark.parametrize(("strategy", "use_orig_params"), [*PAIRS, (HYBRID_SHARD, False), (HYBRID_SHARD, True)])
@ranks(4)
def test_changes_by_apply_persist(strategy: ShardingStrategy, use_orig_params: bool) -> None:
    plain = seeded().apply(fill)
    model = wrapped(sharding_strategy=strategy, use_orig_params=use_orig_params)
    with torch.no_grad():
        model(batch())  # Parameters that were all-gathered before the change must not be reused after it.
    assert model.apply(fill) is model
    assert_same(full_values(model), named(plain), bitwise=True)
    inner = model.module.blocks[1]
    assert inner.apply(fill) is inner
    with torch.no_grad():
        torch.testing.assert_close(model(batch()), plain(batch()))


@pytest.mark.spec("APPLY-01")
@ranks(2)
def test_a_plain_module_around_wrapped_ones_applies_to_them() -> None:
    model = nn.Sequential(wrapped(), nn.Linear(2, 2))
    model.apply(fill)
    assert_same(full_values(model[0]), named(seeded().apply(fill)), bitwise=True)


@pytest.mark.spec("APPLY-03")
@pytest.mark.parametrize("options", [{}, {"writeback": False, "rank0_only": True}])
@pairs
@ranks(2)
def test_apply_raises_inside_summon_full_params_and_calls_nothing(
    strategy: ShardingStrategy, use_orig_params: bool, options: dict[str, bool]
) -> None:
    model = wrapped(sharding_strategy=strategy, use_orig_params=use_orig_params)
    called: list[nn.Module] = []
    with FullyShardedDataParallel.summon_full_params(model, **options):
        for each in (model, model.module.blocks[2]):
            with Wire() as wire, pytest.raises(RuntimeError, match="summon_full_params"):
                each.apply(called.append)
            assert wire.sent == []
    assert called == []
    assert visits_of(model) == visits_of(seeded())


@pytest.mark.spec("APPLY-03")
@ranks(2)
def test_apply_raises_during_forward() -> None:
    model = wrapped()
    hook = model.module.blocks[1].module.linear.register_forward_hook(lambda *_: model.apply(fill))
    with pytest.raises(RuntimeError, match="during forward"):
        model(batch())
    hook.remove()
    loss_of(model(batch())).backward()


def init_by_type(module: nn.Module) -> None:
    """An initialization function as users write it for an unwrapped model."""
    if isinstance(module, nn.Linear):
        nn.init.xavier_normal_(module.weight)
        nn.init.uniform_(module.bias, -0.1, 0.1)


INITS: dict[str, Callable[[nn.Module], None]] = {
    "by type": init_by_type,
    "by its own method": lambda m: m.reset_parameters() if hasattr(m, "reset_parameters") else None,
}


@pytest.mark.spec("APPLY-04")
@pytest.mark.parametrize("init", INITS)
@pytest.mark.parametrize(("strategy", "use_orig_params"), [*PAIRS, (HYBRID_SHARD, False)])
@ranks(4)
def test_with_one_seed_on_all_ranks_initialising_equals_that_of_the_plain_module(
    strategy: ShardingStrategy, use_orig_params: bool, init: str
) -> None:
    plain = seeded()
    model = wrapped(seeded(), sharding_strategy=strategy, use_orig_params=use_orig_params)
    for seed in (1, 2):
        for each in (plain, model):
            torch.manual_seed(seed)
            each.apply(INITS[init])
        assert_same(full_values(model), named(plain), bitwise=True)
    assert not torch.equal(plain.enter.weight, seeded().enter.weight)
