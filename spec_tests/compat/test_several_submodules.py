"""Several elements in arguments that take sets or lists."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from spec_tests.harness import ranks
from spec_tests.models.modules import WIDTH, seeded
from spec_tests.models.running import batch, loss_of
from spec_tests.models.sharding import sharded
from spec_tests.models.values import assert_same, full_gradients, full_values, mean_gradients
from spec_tests.subject import FullyShardedDataParallel, fully_shard


@pytest.mark.spec("IGN-04")
@pytest.mark.parametrize("kind", ["modules", "parameters"])
@ranks(2)
def test_several_ignored_states_all_stay_unsharded(kind: str) -> None:
    plain: Any = seeded()
    modules = [plain.enter, plain.leave, plain.blocks[1]]
    ignored = modules if kind == "modules" else [p for module in modules for p in module.parameters()]
    model = FullyShardedDataParallel(plain, ignored_states=ignored, use_orig_params=True)
    shapes = [(WIDTH, WIDTH), (WIDTH,), (2, WIDTH), (2,), (WIDTH, WIDTH), (WIDTH,)]
    assert [tuple(p.shape) for module in modules for p in module.parameters()] == shapes
    assert_same(full_values(model), dict(seeded().named_parameters()), bitwise=True)


@pytest.mark.spec("FS2-23")
@ranks(2)
def test_several_ignored_parameters_all_stay_unsharded() -> None:
    plain: Any = seeded()
    ignored = {plain.enter.weight, plain.leave.weight, plain.leave.bias}
    model = fully_shard(plain, ignored_params=ignored)
    plain_tensors = {name for name, p in model.named_parameters() if type(p) is nn.Parameter}
    assert plain_tensors == {"enter.weight", "leave.weight", "leave.bias"}


@pytest.mark.spec("NEW-04")
@ranks(2)
def test_a_list_of_four_modules_is_one_unit() -> None:
    model: Any = seeded()
    fully_shard(list(model.blocks))
    fully_shard(model)
    assert len({id(fully_shard.state(block).unit) for block in model.blocks}) == 1
    loss_of(model(batch())).backward()
    assert_same(full_gradients(model), mean_gradients(seeded()), bitwise=True)


@pytest.mark.spec("FS2-PREF-03")
@ranks(2)
def test_all_modules_of_a_prefetch_list_are_prefetched() -> None:
    model = sharded()
    first, *others = model.blocks
    first.set_modules_to_forward_prefetch(others)
    seen: list[str] = []
    first.register_forward_hook(lambda *_: seen.extend(fully_shard.state(each).unit.state.name for each in others))
    model(batch())
    assert len(seen) == 3
    assert "SHARDED" not in seen
