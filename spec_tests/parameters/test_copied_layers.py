"""A copy of a layer that the program makes inside ``summon_full_params`` is a plain layer afterwards."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from spec_tests.harness import ranks
from spec_tests.models.modules import seeded
from spec_tests.models.running import batch
from spec_tests.models.sharding import FLAT_STRATEGIES, wrapped
from spec_tests.models.values import assert_same, named
from spec_tests.subject import FullyShardedDataParallel, ShardingStrategy


def pickled(layer: Any) -> Any:
    return pickle.loads(pickle.dumps(layer))


@pytest.mark.spec("SUMMON-02")
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", FLAT_STRATEGIES)
@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
@ranks(2)
def test_it_computes_saves_and_loads_outside(
    copied: Callable[[Any], Any], strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    """Defect: the copy still belongs to the unit of the original, so its state dict is refused."""
    plain, model = seeded(), wrapped(sharding_strategy=strategy, use_orig_params=use_orig_params)
    model(batch()).sum().backward()
    with FullyShardedDataParallel.summon_full_params(model):
        layers = [copied(model.module.enter), copied(model.module.blocks[1].module.linear)]
    for layer, expected in zip(layers, (plain.enter, plain.blocks[1].linear), strict=True):
        assert torch.equal(layer(batch()), expected(batch()))
        saved = layer.state_dict()
        assert_same(saved, named(expected), bitwise=True)
        layer.load_state_dict({name: value + 1 for name, value in saved.items()})
    assert torch.equal(model(batch()), plain(batch()))
