"""``apply``: calls a function for every submodule, with unsharded parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from spec_tests.harness import ranks
from spec_tests.models import apis, running
from spec_tests.models.gradients import assert_trains_like
from spec_tests.models.modules import seeded
from spec_tests.models.values import assert_same
from spec_tests.subject import FullyShardedDataParallel

batch = running.batch
with_hybrid_settings = apis.settings_of(
    *apis.WRAPPER_SETTINGS, *((api, apis.HYBRID_STRATEGIES[0]) for api in (apis.WRAPPED, apis.ORIGINALS))
)


def visits_of(model: nn.Module) -> list[Any]:
    """The modules that ``apply`` visits, in order, with the shapes and values of their own parameters at that time."""
    visits: list[Any] = []

    def note(module: nn.Module) -> None:
        if not isinstance(module, FullyShardedDataParallel):
            own = module.named_parameters(recurse=False)
            visits.append((type(module), [(name, value.shape, value.detach().sum().item()) for name, value in own]))

    model.apply(note)
    return visits


@pytest.mark.spec("APPLY-01")
@apis.wrapper_settings
@ranks(2)
def test_apply_visits_every_module_after_its_children_with_full_parameters(api: apis.Api, strategy: Any) -> None:
    model = api.shard(strategy=strategy)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    assert visits_of(model) == visits_of(seeded())
    assert all(map(torch.equal, model.parameters(), before))
    running.iterate(model)
    assert visits_of(model) == visits_of(seeded()), "also in the middle of training"


@pytest.mark.spec("APPLY-01")
@ranks(2)
def test_a_plain_module_around_wrapped_ones_applies_to_them() -> None:
    model = nn.Sequential(apis.WRAPPED.shard(), nn.Linear(2, 2))
    assert visits_of(model)[:-2] == visits_of(seeded())
    model.apply(lambda module: [parameter.data.fill_(2.0) for parameter in module.parameters(recurse=False)])
    assert all((value == 2.0).all() for value in apis.WRAPPED.values(model[0]).values())


@pytest.mark.spec("APPLY-03")
@pytest.mark.parametrize("options", [{}, {"writeback": False, "rank0_only": True}])
@apis.wrapper_settings
@ranks(2)
def test_apply_raises_inside_summon_full_params_and_calls_nothing(api: Any, strategy: Any, options: Any) -> None:
    model = api.shard(strategy=strategy)
    called: list[nn.Module] = []
    with FullyShardedDataParallel.summon_full_params(model, **options):
        for each in (model, model.module.blocks[2]):
            with running.Wire() as wire, pytest.raises(RuntimeError, match="summon_full_params"):
                each.apply(called.append)
            assert wire.sent == []
    assert called == []
    assert visits_of(model) == visits_of(seeded())


@pytest.mark.spec("APPLY-03")
@ranks(2)
def test_apply_raises_during_forward() -> None:
    model = apis.WRAPPED.shard()
    hook = model.module.blocks[1].module.linear.register_forward_hook(lambda *_: model.apply(print))
    with pytest.raises(RuntimeError, match="during forward"):
        model(batch())
    hook.remove()
    assert_trains_like(model)


def init_by_type(module: nn.Module) -> None:
    """An initialization function as users write it for an unwrapped model."""
    if isinstance(module, nn.Linear):
        nn.init.xavier_normal_(module.weight)
        nn.init.uniform_(module.bias, -0.1, 0.1)


INITS: dict[str, Callable[[nn.Module], None]] = {
    "by type": init_by_type,
    "by its own method": lambda m: m.reset_parameters() if hasattr(m, "reset_parameters") else None,
}


@pytest.mark.spec("APPLY-01", "APPLY-02", "APPLY-04")
@pytest.mark.parametrize("init", INITS)
@with_hybrid_settings
@ranks(4)
def test_with_one_seed_on_all_ranks_initialising_equals_that_of_the_plain_module(
    api: apis.Api, strategy: Any, init: str
) -> None:
    plain: Any = seeded()
    model = api.shard(strategy=strategy)
    for whole, same in ((model, plain), (model.module.blocks[1], plain.blocks[1])):
        with torch.no_grad():
            model(batch())  # Parameters that were all-gathered before the change must not be reused after it.
        for each in (whole, same):
            torch.manual_seed(1)
            assert each.apply(INITS[init]) is each
        assert_same(api.values(model), dict(plain.named_parameters()), bitwise=True)
        with torch.no_grad():
            torch.testing.assert_close(model(batch()), plain(batch()))
    assert not torch.equal(plain.enter.weight, seeded().enter.weight)
